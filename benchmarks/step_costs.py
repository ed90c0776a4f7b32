"""Step costs of the engine on this machine, for `turboquant simulate --costs`: prompts, decoding, by batch and context.

    python benchmarks/step_costs.py --output out/step-costs.json

Runs the engine in this process through a grid of batches and contexts, once for each cache dtype, and fits the five
weights of `turboquant/simulator/costs.py` to the seconds of its steps. The file also holds how well they fit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from harness.engine_steps import grid, play, recording

from turboquant.environment import environment_report
from turboquant.evals.vllm_backend import running
from turboquant.simulator.costs import FEATURES, MeasuredCosts, costs_dict, fit

BATCHES, CONTEXTS, NEW_TOKENS = [1, 4, 8], [32, 128, 320], 8
MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS = 1024, 512
Clock = Annotated[str, typer.Option(help="wall, or cpu: the time that the engine computes, on a machine with others.")]


def settings(kv_cache_dtype: str, memory_bytes: int) -> dict[str, Any]:
    """Of the engine, here and in simulate_validation.py."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    return {
        "kv_cache_dtype": kv_cache_dtype, "dtype": "float32", "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS, "max_num_seqs": 64, "kv_cache_memory_bytes": memory_bytes,
        "enforce_eager": True, "distributed_executor_backend": "uni", "disable_log_stats": True,
        "async_scheduling": False,
    }  # fmt: skip


def relative_errors(costs: MeasuredCosts, works: list, seconds: list[float]) -> np.ndarray:
    """|predicted − measured| / measured of every step."""
    times = np.array(seconds)
    return np.abs(np.array([costs.step_seconds(work) for work in works]) - times) / times


def measure(model: str, kv_cache_dtype: str, rounds: int, clock: str) -> tuple[MeasuredCosts, dict[str, Any]]:
    """Fitted costs of one cache dtype, and how well they fit."""
    with running(model, **settings(kv_cache_dtype, 2 << 30)) as llm, recording(llm, clock) as recorder:
        vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        play(llm, recorder, grid([2], [32], 2)[0], vocabulary, seed=0)  # warm-up
        recorder.works.clear(), recorder.seconds.clear()
        for seed, trace in enumerate(grid(BATCHES, CONTEXTS, NEW_TOKENS) * rounds, start=1):
            play(llm, recorder, trace, vocabulary, seed)
    costs = fit(recorder.works, recorder.seconds)
    errors = relative_errors(costs, recorder.works, recorder.seconds)
    return costs, {
        "steps": len(errors), "error_median": float(np.median(errors)), "error_p90": float(np.quantile(errors, 0.9)),
    }  # fmt: skip


def main(
    model: Annotated[str | None, typer.Option(help="Folder of a model; the demo model if none.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Cache dtypes, comma-separated.")] = "auto,turboquant3.5",
    rounds: Annotated[int, typer.Option(min=1, help="Times that the grid is run.")] = 1,
    clock: Clock = "wall",
    output: Annotated[Path, typer.Option(help="Where to write.")] = Path("out/step-costs.json"),
) -> None:
    """Measure, fit and write."""
    if model is None:
        from turboquant.demo.model import ensure_demo_model

        model = str(ensure_demo_model())
    measured = {name: measure(model, name, rounds, clock) for name in kv_cache_dtype.split(",")}
    result = {
        "model": Path(model).name,
        "clock": clock,
        **costs_dict({name: costs for name, (costs, _) in measured.items()}),
        "fit": {name: quality for name, (_, quality) in measured.items()},
        "environment": environment_report(),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    for name, (costs, quality) in measured.items():
        weights = ", ".join(f"{feature} {1e3 * getattr(costs, feature):.4g} ms" for feature in FEATURES)
        print(f"{name}: {weights}; {quality['steps']} steps, median error {quality['error_median']:.1%}")
    print(f"Wrote {output}")


if __name__ == "__main__":
    typer.run(main)
