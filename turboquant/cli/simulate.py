"""`turboquant simulate`: requests replayed against a pool, for several cache dtypes. A simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from turboquant.cli import serving as options
from turboquant.cli.sizes import parse_bytes

if TYPE_CHECKING:
    from turboquant.simulator.trace import Trace


def simulate(
    model: options.Model,
    gpu: options.GpuName = None,
    kv_cache_memory: options.KvCacheMemory = None,
    tp: options.Tp = 1,
    kv_cache_dtype: options.KvCacheDtypes = "auto,fp8,turboquant3.5",
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines of arrival_s, prompt_tokens, output_tokens.", exists=True)
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests to draw; else 4 times the concurrency, 200 at least.")
    ] = None,
    input_len: Annotated[str, typer.Option(help="Prompt: 1024, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.")] = "1024",
    output_len: Annotated[str, typer.Option(help="Output, in the same forms.")] = "256",
    request_rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Arrivals per second; all at once if none.")
    ] = None,
    burstiness: Annotated[float, typer.Option(min=0.01, help="1 is Poisson; less comes in bursts.")] = 1.0,
    max_concurrency: Annotated[
        str | None, typer.Option(help="Requests in the system at a time; several, as in 1,8,64, to find the peak.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="Measured step costs (benchmarks/step_costs.py).")] = None,
    efficiency: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the roofline that is reached.")] = 1.0,
    overhead_ms: Annotated[float, typer.Option(min=0, help="Added to every step of the roofline.")] = 0.0,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = "auto",
    window: options.Window = None,
    block_size: options.BlockSize = None,
    device: options.Device = "cuda",
    prefix_caching: options.PrefixCaching = True,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_num_seqs: options.MaxNumSeqs = None,
    mamba_ssm_dtype: options.MambaSsmDtype = None,
    gpu_memory_utilization: options.Utilization = 0.92,
    weights: options.WeightsSize = None,
    reserve: options.Reserve = None,
    seed: Annotated[int, typer.Option(help="Of the drawn requests.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Also draw into this image file.")] = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Replay requests against a pool of KV cache: throughput, time to first token, preemptions, batch size over time.

    A simulation of vLLM's scheduler. Step times come from the roofline of --gpu, or from --costs.
    """
    from turboquant.planner.gpus import find_gpu
    from turboquant.planner.plan import Wish, make_plan
    from turboquant.planner.source import load
    from turboquant.simulator.costs import read_costs
    from turboquant.simulator.study import Study, peaks

    console = Console(highlight=False)
    try:
        source, card = load(model), find_gpu(gpu) if gpu else None
        serving = options.make_serving(
            source, card, max_model_len=max_model_len, dtype=dtype, tp=tp, device=device, block_size=block_size,
            window=window, prefix_caching=prefix_caching, max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs, mamba_ssm_dtype=mamba_ssm_dtype,
        )  # fmt: skip
        wish = Wish(
            kv_cache_dtype.split(","), card, None, parse_bytes("--kv-cache-memory", kv_cache_memory),
            gpu_memory_utilization, parse_bytes("--reserve", reserve), parse_bytes("--weights", weights),
        )  # fmt: skip
        study = Study(
            make_plan(source, serving, wish), efficiency, overhead_ms / 1e3, read_costs(costs) if costs else None
        )
        limits = _limits(max_concurrency)
        make_trace = _traces(trace, num_prompts, input_len, output_len, request_rate, burstiness, seed)
        with Console(stderr=True).status("simulating") as status:
            runs = study.run(make_trace, limits, lambda what: status.update(f"simulating {what}"))
        if plot:
            from turboquant.simulator.plots import draw

            draw(runs, f"{source.name} on {card.name if card else 'measured step costs'}", plot)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    best = peaks(runs) if len(limits) > 1 else {}
    rows = [run.to_dict() for run in runs]
    if json_output:
        result = {
            "simulation": True, "model": source.name, "gpu": card and card.name, "assumptions": study.assumptions(),
            "trace": str(trace) if trace else {
                "num_prompts": num_prompts, "input_len": input_len, "output_len": output_len,
                "request_rate": request_rate, "burstiness": burstiness, "seed": seed,
            },
            "pool_bytes": study.plan.budget.pool, "max_num_seqs": serving.max_num_seqs,
            "max_num_batched_tokens": serving.max_num_batched_tokens, "runs": rows, "peaks": best,
        }  # fmt: skip
        typer.echo(json.dumps(result, indent=2))
        return
    for assumption in study.assumptions():
        console.print(f"[dim]{assumption}[/]", soft_wrap=True)
    console.print(_table(rows))
    for name, row in best.items():
        console.print(
            f"{name}: highest at {row['max_concurrency']} requests at once, {row['steady_tokens_per_s']:,.0f} tokens/s "
            f"({row['preemptions']} preemptions, {row['batch_mean']:.0f} in the batch)",
            soft_wrap=True,
        )


def _limits(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--max-concurrency {text!r} is no list of numbers: give 64, or several such as 1,8,64.")
    return [int(part) for part in parts]


def _traces(
    path: Path | None, count: int | None, prompts: str, outputs: str, rate: float | None, burst: float, seed: int
):
    """A function from concurrency to requests; drawn ones have the same lengths at every concurrency."""
    from turboquant.simulator.trace import Lengths, generate, read_trace

    if path is not None:
        read = read_trace(path)
        return lambda _: read
    lengths = Lengths.parse(prompts), Lengths.parse(outputs)

    def draw(limit: int | None) -> Trace:
        return generate(count or max(200, 4 * (limit or 0)), *lengths, rate, burst, seed)

    return draw


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Simulated", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.caption = (
        "tok/s: generated tokens, whole run; steady: without filling and draining; TTFT, TPOT: time to first token "
        "(median) and for each further one (mean); preempt: preemptions; batch, max: requests in a step, in the mean "
        "over time and at most."
    )
    headings = ("cache", "at once", "tok/s", "steady", "TTFT s", "p99", "TPOT ms", "preempt", "batch", "max")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=heading == "cache")
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before["kv_cache_dtype"] != row["kv_cache_dtype"]:
            table.add_section()
        start = (row["kv_cache_dtype"], str(row["max_concurrency"] or "all"))
        if row.get("too_small"):
            table.add_row(*start, "a request does not fit into the pool")
            continue
        tpot = "-" if row["tpot_mean_s"] is None else f"{1e3 * row['tpot_mean_s']:.2f}"
        table.add_row(
            *start, f"{row['tokens_per_s']:,.0f}", f"{row['steady_tokens_per_s']:,.0f}", f"{row['ttft_p50_s']:.3g}",
            f"{row['ttft_p99_s']:.3g}", tpot, f"{row['preemptions']:,}", f"{row['batch_mean']:.1f}",
            str(row["batch_max"]),
        )  # fmt: skip
    return table
