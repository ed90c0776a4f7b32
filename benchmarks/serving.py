"""Serving speed of the engine: decode tokens/s and time to first token, the packed cache against the engine's own.

    python benchmarks/serving.py --context 256 --context 4096 --concurrency 8 --output out/serving.json

Each cache type runs in an engine process of its own, one after the other, several times in turn with --rounds: what a
busy machine does to one of them it does to the others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

POOL_BYTES = 2 << 30
WARM_UP_TOKENS = 4


def prompts(count: int, length: int, vocabulary: int) -> list[dict]:
    """Different random prompts: nothing is shared between them."""
    import torch

    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(10, vocabulary, (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in tokens.tolist()]


def generate(llm, batch: list[dict], new_tokens: int) -> tuple[float, list[float]]:
    """Seconds of the whole batch, and until each request's first token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    first: dict[str, float] = {}
    begin = time.perf_counter()
    for i, prompt in enumerate(batch):
        engine.add_request(f"{begin}-{i}", prompt, params)
    last = begin
    while engine.has_unfinished_requests():
        outputs = engine.step()
        last = time.perf_counter()
        for output in outputs:
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, last - begin)
    return last - begin, sorted(first.values())


def measure(llm, context: int, concurrency: int, new_tokens: int, vocabulary: int) -> dict:
    """Decode time is that between the last request's first token and the end: all requests decode then."""
    batch = prompts(concurrency, context, vocabulary)
    seconds, first = generate(llm, batch, new_tokens)
    decoded = concurrency * (new_tokens - 1)
    return {
        "context": context, "concurrency": concurrency, "new_tokens": new_tokens,
        "decode_tokens_per_s": round(decoded / (seconds - first[-1]), 3),
        "ttft_s": round(statistics.median(first), 4), "ttft_last_s": round(first[-1], 4), "total_s": round(seconds, 4),
    }  # fmt: skip


def serve(
    model: str, cache: str, dtype: str, cases: list[tuple[int, int]], new_tokens: int, threads: int
) -> list[dict]:
    """All cases on one engine in this process."""
    from vllm import LLM

    longest, most = max(c for c, _ in cases) + new_tokens + 16, max(n for _, n in cases)
    llm = LLM(
        model, kv_cache_dtype=cache, dtype=dtype, max_model_len=longest, kv_cache_memory_bytes=POOL_BYTES,
        max_num_seqs=most, enforce_eager=True, enable_prefix_caching=False, distributed_executor_backend="uni",
        disable_log_stats=True,
    )  # fmt: skip
    import torch

    if threads:
        torch.set_num_threads(threads)
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    generate(llm, prompts(1, 64, vocabulary), WARM_UP_TOKENS)
    rows = [measure(llm, context, concurrency, new_tokens, vocabulary) for context, concurrency in cases]
    threads = torch.get_num_threads()
    llm.llm_engine.engine_core.shutdown()
    return [{"kv_cache_dtype": cache, "threads": threads, **row} for row in rows]


def in_its_own_process(arguments: dict) -> list[dict]:
    """`serve` in a fresh interpreter: an engine leaves threads and memory behind."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        environment = {
            **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", json.dumps(arguments | {"result": str(result)})]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
        return json.loads(result.read_text())


def summary(runs: list[dict]) -> list[dict]:
    """One row a case: medians over rounds, and the ratio of decode speeds."""
    rows = []
    for case in dict.fromkeys((run["context"], run["concurrency"]) for run in runs):
        of_case = [run for run in runs if (run["context"], run["concurrency"]) == case]
        row: dict = {"context": case[0], "concurrency": case[1]}
        for cache in dict.fromkeys(run["kv_cache_dtype"] for run in runs):
            own = [run for run in of_case if run["kv_cache_dtype"] == cache]
            for key in ("decode_tokens_per_s", "ttft_s"):
                row[f"{cache}_{key}"] = statistics.median(run[key] for run in own)
        caches = [run["kv_cache_dtype"] for run in of_case]
        if "auto" in caches and len(set(caches)) > 1:
            other = next(cache for cache in caches if cache != "auto")
            row["decode_ratio_vs_auto"] = round(
                row[f"{other}_decode_tokens_per_s"] / row["auto_decode_tokens_per_s"], 3
            )
            row["ttft_ratio_vs_auto"] = round(row[f"{other}_ttft_s"] / row["auto_ttft_s"], 3)
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    table = Table(*rows[0], title="serving")
    for row in rows:
        table.add_row(*(f"{value:g}" for value in row.values()))
    Console().print(table)


def main(
    model: Annotated[str | None, typer.Option(help="Folder of a model; the demo model if none.")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="KV cache types; auto and turboquant3.5 if none.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be repeated (256, 4096).")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests at once; may be repeated (8).")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 32,
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads; 0 for the engine's choice.")] = 0,
    rounds: Annotated[int, typer.Option(help="Times that each engine runs, in turn.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure every case on an engine of each cache type."""
    if worker:
        arguments = json.loads(worker)
        result = Path(arguments.pop("result"))
        result.write_text(json.dumps(serve(**arguments)))
        return
    if model is None:
        from turboquant.demo.model import ensure_demo_model

        model = str(ensure_demo_model())
    cases = [(tokens, count) for tokens in context or [256, 4096] for count in concurrency or [8]]
    runs = []
    for _ in range(rounds):
        for kind in cache or ["auto", "turboquant3.5"]:
            arguments = {"model": model, "cache": kind, "dtype": dtype, "cases": cases}
            runs += in_its_own_process(arguments | {"new_tokens": new_tokens, "threads": threads})
    result = {"model": Path(model).name, "dtype": dtype, "rows": summary(runs), "runs": runs}
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result)) if json_ else show(result["rows"])


if __name__ == "__main__":
    typer.run(main)
