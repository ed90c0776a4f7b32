"""Is `turboquant simulate` right? The same requests through a real engine and through the simulator.

    python benchmarks/simulate_validation.py --output docs/results/simulate-validation.json

For each cache dtype one engine runs, in turn, a part of the grid that step costs are fitted to and one of the traces
that are compared: what a busy machine does to one it does to the other. Then the costs are fitted, and the simulator
replays each trace against the same pool. No step of a compared trace enters the fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from harness.engine_steps import Played, grid, play, recording
from step_costs import (
    BATCHES,
    CONTEXTS,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    NEW_TOKENS,
    Clock,
    relative_errors,
    settings,
)

from turboquant.environment import environment_report
from turboquant.evals.vllm_backend import running
from turboquant.planner.plan import FormatPlan, Wish, make_plan
from turboquant.planner.serving import Serving
from turboquant.planner.source import load
from turboquant.simulator.costs import MeasuredCosts, costs_dict, fit
from turboquant.simulator.replay import Replay
from turboquant.simulator.trace import Lengths, Trace, generate

POOL_BYTES = 64 << 20  # small: requests wait for blocks, and are preempted
TRACES = {
    "poisson": {"request_rate": 0.6, "burstiness": 1.0},
    "bursts": {"request_rate": 1.5, "burstiness": 0.25},
    "all at once": {"request_rate": None, "burstiness": 1.0},
}
LIMIT = 0.2


def traces(count: int) -> dict[str, Trace]:
    lengths = Lengths.parse("lognormal:120:0.6"), Lengths.parse("uniform:8:48")
    return {name: generate(count, *lengths, **how, seed=seed) for seed, (name, how) in enumerate(TRACES.items())}


def engine_run(
    model: str, kv_cache_dtype: str, compared: dict[str, Trace], clock: str
) -> tuple[MeasuredCosts, dict, int, dict]:
    """Fitted costs, played traces, blocks of the real pool, and how well the fit predicts the traces' own steps."""
    parts = np.array_split(np.arange(len(BATCHES) * len(CONTEXTS)), len(compared))
    fitted, played, own = ([], []), {}, {}
    with running(model, **settings(kv_cache_dtype, POOL_BYTES)) as llm, recording(llm, clock) as recorder:
        vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        cells = grid(BATCHES, CONTEXTS, NEW_TOKENS)
        play(llm, recorder, grid([2], [32], 2)[0], vocabulary, seed=0)  # warm-up
        for number, (name, trace) in enumerate(compared.items()):
            for before in (True, False):  # the grid on both sides of the trace
                recorder.works.clear(), recorder.seconds.clear()
                for cell in parts[number]:
                    play(llm, recorder, cells[cell], vocabulary, seed=1 + 2 * int(cell) + before)
                fitted[0].extend(recorder.works), fitted[1].extend(recorder.seconds)
                if before:
                    recorder.works.clear(), recorder.seconds.clear()
                    played[name] = play(llm, recorder, trace, vocabulary, seed=100 + number)
                    own[name] = (list(recorder.works), list(recorder.seconds))
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    costs = fit(*fitted)
    errors = {name: float(np.median(relative_errors(costs, *steps))) for name, steps in own.items()}
    return costs, played, blocks, errors


def planned(model: str, kv_cache_dtype: str) -> FormatPlan:
    serving = Serving(
        "float32", MAX_MODEL_LEN, device="cpu", max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=64, batches_in_flight=1,
    )  # fmt: skip
    (of_format,) = make_plan(load(model), serving, Wish((kv_cache_dtype,), pool=POOL_BYTES)).formats
    return of_format


def row(trace: Trace, first_token_s: np.ndarray, finish_s: np.ndarray, preemptions: int) -> dict[str, float]:
    return {
        "tokens_per_s": float(trace.output_tokens.sum() / (finish_s.max() - trace.arrival_s.min())),
        "ttft_mean_s": float((first_token_s - trace.arrival_s).mean()),
        "finish_mean_s": float((finish_s - trace.arrival_s).mean()),
        "preemptions": preemptions,
    }


def compare(kv_cache_dtype: str, name: str, trace: Trace, played: Played, of_format: FormatPlan, costs: Any) -> dict:
    blocks = of_format.pool // of_format.paging.block_bytes - 1
    outcome = Replay(trace, of_format.paging, blocks, costs).run()
    measured = row(trace, played.first_token_s, played.finish_s, played.preemptions)
    predicted = row(trace, outcome.first_token_s, outcome.finish_s, outcome.preemptions)
    errors = {key: predicted[key] / measured[key] - 1 for key in ("tokens_per_s", "ttft_mean_s", "finish_mean_s")}
    return {
        "kv_cache_dtype": kv_cache_dtype, "trace": name, "requests": len(trace), "measured": measured,
        "predicted": predicted, "error": errors,
    }  # fmt: skip


def main(
    model: Annotated[str | None, typer.Option(help="Folder of a model; the demo model if none.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Cache dtypes, comma-separated.")] = "auto,turboquant3.5",
    count: Annotated[int, typer.Option(min=2, help="Requests of each trace.")] = 16,
    clock: Clock = "wall",
    output: Annotated[Path, typer.Option(help="Where to write.")] = Path("out/simulate-validation.json"),
) -> None:
    """Run, fit, replay, compare. Exit code 1 if a throughput is further off than 20 %."""
    if model is None:
        from turboquant.demo.model import ensure_demo_model

        model = str(ensure_demo_model())
    compared, rows, fits = traces(count), [], {}
    for kind in kv_cache_dtype.split(","):
        of_format = planned(model, kind)
        costs, played, blocks, step_errors = engine_run(model, kind, compared, clock)
        if blocks != of_format.pool // of_format.paging.block_bytes:
            raise SystemExit(f"{kind}: the engine has {blocks} blocks, the plan says otherwise")
        fits[kind] = costs
        for name, trace in compared.items():
            entry = compare(kind, name, trace, played[name], of_format, costs)
            entry["step_error_median"] = step_errors[name]
            rows.append(entry)
    result = {
        "model": Path(model).name, "clock": clock, "pool_bytes": POOL_BYTES, "limit": LIMIT, "rows": rows,
        **costs_dict(fits),
        "environment": environment_report(),
    }  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    for entry in rows:
        shown = ", ".join(
            f"{key} {entry['measured'][key]:.3g} measured, {entry['predicted'][key]:.3g} predicted ({off:+.1%})"
            for key, off in entry["error"].items()
        )
        preempted = f"{entry['measured']['preemptions']} and {entry['predicted']['preemptions']} preemptions"
        print(f"{entry['kv_cache_dtype']}, {entry['trace']}: {shown}, {preempted}")
    worst = max(abs(entry["error"]["tokens_per_s"]) for entry in rows)
    print(f"Largest error of throughput: {worst:.1%} (limit {LIMIT:.0%}). Wrote {output}")
    raise typer.Exit(int(worst > LIMIT))


if __name__ == "__main__":
    typer.run(main)
