"""Attention over the packed cache against what else there is, on the same shapes, alternating in one process.

python benchmarks/attention.py --device cpu --shape 32/8/128 --context 16384 --json
python benchmarks/attention.py --op prefill --queries 512 --context 16896
python benchmarks/attention.py --context 4096 --context 16384 --context 131072 --plot out/context.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import typer
from harness import cpu_attention as cpu
from harness.timing import alternate, machine, median, slope, spread
from rich.console import Console
from rich.table import Table

OPS = ("decode", "prefill", "store")


def parse_shape(text: str) -> tuple[int, int, int]:
    """'heads/kv_heads/head_dim'.

    Raises:
        typer.BadParameter: it is not that.
    """
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts) or int(parts[0]) % int(parts[1]):
        raise typer.BadParameter(f"{text!r} is no shape: give heads/kv_heads/head_dim, such as 32/8/128.")
    return tuple(map(int, parts))


def measure(problem: cpu.Problem, op: str, threads: int, seconds: float, chosen: dict) -> dict:
    """One row of results: milliseconds of each candidate, ratios to ours, bytes."""
    if op == "store":
        chosen = {name: run.store for name, run in chosen.items() if name in ("ours", "vllm_bf16", "vllm_fp32")}
    slow = {name: run for name, run in chosen.items() if name == "reference"}
    times = alternate({name: run for name, run in chosen.items() if name not in slow}, seconds)
    times |= alternate(slow, 0.0, least=1) if slow else {}
    ours = median(times["ours"])
    row = {
        "op": op, "shape": problem.shape, "context": problem.context, "batch": problem.batch,
        "queries": problem.queries, "format": problem.fmt, "window": problem.window, "mean": problem.mean,
        "threads": threads, **cpu.kernels_in_use(), **{f"{name}_ms": round(median(t), 4) for name, t in times.items()},
    }  # fmt: skip
    row |= {f"ratio_vs_{name}": round(median(t) / ours, 3) for name, t in times.items() if name != "ours"}
    row |= {"packed_bytes": problem.packed_bytes, "bf16_bytes": problem.bf16_bytes}
    row["gb_per_s"] = round(problem.packed_bytes / ours / 1e6, 3)
    row["percentiles_ms"] = {name: spread(t) for name, t in times.items()}
    return row | machine()


def show(rows: list[dict]) -> None:
    names = [key.removesuffix("_ms") for key in rows[0] if key.endswith("_ms") and key != "percentiles_ms"]
    table = Table("shape", "context", "batch", *(f"{name} ms" for name in names), "GB/s", title=rows[0]["op"])
    for row in rows:
        cells = [f"{row[f'{n}_ms']:.3f}" + (f" ({row[f'ratio_vs_{n}']:.2f}x)" if n != "ours" else "") for n in names]
        table.add_row(row["shape"], str(row["context"]), str(row["batch"]), *cells, f"{row['gb_per_s']:.2f}")
    Console().print(table)


def plot(rows: list[dict], path: Path) -> None:
    """Milliseconds against context, or against batch if that is what changes."""
    try:
        import matplotlib
    except ImportError as error:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'turboquant-toolkit[notebooks]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axis = "batch" if len({row["batch"] for row in rows}) > 1 else "context"
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for key in (key for key in rows[0] if key.endswith("_ms") and key != "percentiles_ms"):
        axes.plot([row[axis] for row in rows], [row[key] for row in rows], marker="o", label=key.removesuffix("_ms"))
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms", title=f"{rows[0]['op']} {rows[0]['shape']}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(
    device: Annotated[str, typer.Option(help="Where to run: cpu.")] = "cpu",
    op: Annotated[str, typer.Option(help="decode, prefill or store.")] = "decode",
    shape: Annotated[list[str] | None, typer.Option(help="heads/kv_heads/head_dim; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; may be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; may be repeated.")] = None,
    queries: Annotated[int | None, typer.Option(help="New tokens of a sequence (prefill and store: 512).")] = None,
    fmt: Annotated[str, typer.Option("--format", help="Cache format.")] = "turboquant3.5",
    window: Annotated[int, typer.Option(help="Exact recent tokens; 0 for none.")] = 64,
    mean: Annotated[bool, typer.Option(help="With K's mean taken out.")] = False,
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.")] = 1,
    seconds: Annotated[float, typer.Option(help="To measure for, each row.")] = 3.0,
    fp32: Annotated[bool, typer.Option(help="vLLM's float32 attention, too.")] = True,
    sdpa: Annotated[bool, typer.Option(help="torch's SDPA on contiguous bf16, too.")] = True,
    reference: Annotated[bool, typer.Option(help="Our reference kernels, too (slow).")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: an object, or a list of several rows.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Draw the rows into this file.")] = None,
) -> None:
    """Time attention, or the store, of one or more problems."""
    if device != "cpu" or op not in OPS:
        raise typer.BadParameter(f"device {device!r}, op {op!r}: known are cpu, and {', '.join(OPS)}.")
    torch.set_num_threads(threads)
    new = queries or (1 if op == "decode" else 512)
    rows = []
    for heads, kv_heads, dim in map(parse_shape, shape or ["32/8/128"]):
        for tokens in context or [16384]:
            for size in batch or [1]:
                problem = cpu.Problem(heads, kv_heads, dim, tokens, size, new, fmt, window, mean)
                chosen = cpu.candidates(problem, fp32=fp32, sdpa=sdpa, with_reference=reference)
                rows.append(measure(problem, op, threads, seconds, chosen))
                del chosen
    result: dict | list = rows[0] if len(rows) == 1 else rows
    if len(rows) > 1 and len({row["context"] for row in rows}) == len(rows):
        contexts = [row["context"] for row in rows]
        slopes = {key: slope(contexts, [row[f"{key}_ms"] for row in rows]) for key in ("ours", "vllm_bf16")}
        result = {"rows": rows, "slope_ns_per_token": {key: round(value, 3) for key, value in slopes.items()}}
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
    if plot_to:
        plot(rows, plot_to)
    print(json.dumps(result)) if json_ else show(rows)


if __name__ == "__main__":
    typer.run(main)
