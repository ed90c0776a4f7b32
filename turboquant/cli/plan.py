"""`turboquant plan`: how many tokens fit, at what speed, from a model's config alone."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from turboquant.cli import serving as options
from turboquant.cli.sizes import parse_bytes, parse_count

GIB = 2**30
DEFAULT_CONTEXTS = (4096, 32768)


def plan(
    model: options.Model,
    gpu: options.GpuName = None,
    memory: options.Memory = None,
    kv_cache_memory: options.KvCacheMemory = None,
    tp: options.Tp = 1,
    kv_cache_dtype: options.KvCacheDtypes = "auto,fp8,turboquant3.5",
    max_model_len: options.MaxModelLen = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences that decode together, for the speed.")] = 32,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Lengths to show; may be repeated (4096, 32768 and the longest).")
    ] = None,
    pool_tokens: Annotated[
        str | None, typer.Option(help="Also: what a pool of so many tokens takes, such as 4.7M, on every known GPU.")
    ] = None,
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
    show_explanation: Annotated[bool, typer.Option("--explain", help="Print every step of the arithmetic.")] = False,
    json_output: options.JsonOutput = False,
) -> None:
    """Say how many tokens a GPU holds in each cache dtype, and how fast it decodes at best.

    tokens that fit is the number that vLLM logs as "KV cache size" at start-up. Speeds are bounds, not promises.
    """
    from turboquant.planner.explain import explain
    from turboquant.planner.gpus import find_gpu
    from turboquant.planner.needs import pool_needs
    from turboquant.planner.plan import Wish, make_plan
    from turboquant.planner.source import load

    try:
        source, card = load(model), find_gpu(gpu) if gpu else None
        serving = options.make_serving(
            source, card, max_model_len=max_model_len, dtype=dtype, tp=tp, device=device, block_size=block_size,
            window=window, prefix_caching=prefix_caching, max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs, mamba_ssm_dtype=mamba_ssm_dtype,
        )  # fmt: skip
        wish = Wish(
            kv_cache_dtype.split(","), card, parse_bytes("--memory", memory),
            parse_bytes("--kv-cache-memory", kv_cache_memory), gpu_memory_utilization,
            parse_bytes("--reserve", reserve), parse_bytes("--weights", weights), concurrency,
            context or (*DEFAULT_CONTEXTS, serving.max_model_len),
        )  # fmt: skip
        result = make_plan(source, serving, wish)
        needs = pool_needs(result, parse_count("--pool-tokens", pool_tokens)) if pool_tokens else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        typer.echo(json.dumps({**result.to_dict(), **({"pool": needs} if needs else {})}, indent=2))
        return
    _print(result.to_dict(), needs, list(explain(result)) if show_explanation else [])


def _print(plan: dict[str, Any], needs: dict[str, Any] | None, explanation: list[str]) -> None:
    console = Console(highlight=False)
    for line in explanation:
        console.print(line, markup=False, soft_wrap=True)
    where = f"{plan['tp']} x {plan['gpu'] or 'a device'}"
    console.print(
        f"{plan['model']} on {where}: {plan['weights']['parameters'] / 1e9:.2f} B parameters, "
        f"{plan['kv_layers']} layers with a KV cache, {plan['budget']['pool'] / GIB:,.4g} GiB for it on each device",
        soft_wrap=True,
    )
    if plan["state"]:
        console.print(f"{plan['state']['bytes_per_sequence'] / 1e6:.1f} MB of recurrent state a sequence")
    console.print(_formats_table(plan))
    console.print(_contexts_table(plan))
    if needs:
        console.print(_needs_table(needs))


def _formats_table(plan: dict[str, Any]) -> Table:
    table = _table(
        f"Tokens that fit, with sequences of up to {plan['max_model_len']:,} tokens", "cache", "B/token", "all in",
        "block", "tokens that fit", "less memory from", "faster from",
    )  # fmt: skip
    table.caption = (
        "B/token: K and V of a further token; all in: a whole sequence of that length, by its length. Less memory: a "
        "sequence takes less than in auto from this length on. Faster: a decode step is 5 % shorter than in auto, "
        f"{plan['concurrency']} sequences at once."
    )
    for row in plan["formats"]:
        table.add_row(
            row["kv_cache_dtype"], f"{row['kv_bytes_per_token']:,}", f"{row['all_inclusive_bytes_per_token']:,.0f}",
            f"{row['block_size']:,}", f"{row['tokens_that_fit']:,}" if row["starts"] else "does not start",
            _or_dash(row["memory_pays_from_tokens"]), _or_dash(row["decode_pays_from_tokens"]),
        )  # fmt: skip
    return table


def _contexts_table(plan: dict[str, Any]) -> Table:
    table = _table("By length", "tokens", "cache", "MiB", "saved", "fit", "decoding", "ms a step", "tokens/s")
    table.caption = (
        "MiB: of one sequence, all included; saved: against auto; fit: sequences at once; tokens/s: of those decoding, "
        "at best."
    )
    for index, length in enumerate(row["context"] for row in plan["formats"][0]["contexts"]):
        for of_format in plan["formats"]:
            row = of_format["contexts"][index]
            speed = (f"{row['decode_ms']:.2f}", f"{row['tokens_per_s']:,.0f}") if row["decode_ms"] else ("-", "-")
            table.add_row(
                f"{length:,}", of_format["kv_cache_dtype"], f"{row['sequence_bytes'] / 2**20:,.1f}",
                f"{row['saved_against_auto']:.1%}", f"{row['sequences']:,}", str(row["batch"]), *speed,
            )  # fmt: skip
        table.add_section()
    return table


def _needs_table(needs: dict[str, Any]) -> Table:
    formats = needs["formats"]
    table = _table(f"What a pool of {needs['tokens']:,} tokens takes", "", *(f["kv_cache_dtype"] for f in formats))
    table.add_row("pool, GiB", *(f"{f['pool_bytes'] / GIB:,.1f}" for f in formats))
    for gpu in formats[0]["devices"]:
        table.add_row(f"{gpu}, devices", *(_or_dash(f["devices"][gpu], "more than 8") for f in formats))
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("cache", "") else "right", no_wrap=heading == "cache")
    return table


def _or_dash(number: int | None, otherwise: str = "-") -> str:
    return otherwise if number is None else f"{number:,}"
