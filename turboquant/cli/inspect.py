"""`turboquant inspect`: a calibration artifact, or the cache of a running server."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from turboquant.served_cache import ServedCache


def inspect(
    target: Annotated[
        str, typer.Argument(help="An artifact's folder or file, or a server's address such as http://localhost:8000.")
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Of an artifact: also draw gains and outliers by layer into this image file.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what an artifact holds, or what KV cache a running server really has.

    ARTIFACT: what it was made from, what it gains in each layer, and where the outliers are.
    URL: dtype, tokens that fit, usage, prefix hits, preemptions. Exit code 1 if the cache is not compressed.
    """
    if target.startswith(("http://", "https://")):
        if plot:
            raise typer.BadParameter("--plot draws an artifact; a server has nothing to draw.", param_hint="--plot")
        _server(target, json_output)
        return
    _artifact(Path(target), plot, json_output)


def _server(url: str, json_output: bool) -> None:
    from turboquant.served_cache import ServerNotReadable, ask

    try:
        cache = ask(url)
    except ImportError as error:
        typer.echo(f"error: this needs {error.name}: pip install 'turboquant-toolkit[inspect]'", err=True)
        raise typer.Exit(2) from error
    except ServerNotReadable as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if json_output:
        extra = {"compressed": cache.compressed, "hit_rate": cache.hit_rate, "verdict": cache.verdict}
        typer.echo(json.dumps({**asdict(cache), **extra}, indent=2))
    else:
        _print_server(cache)
    if not cache.compressed:
        raise typer.Exit(1)


def _print_server(cache: ServedCache) -> None:
    version = f"vLLM {cache.version}" if cache.version else "vLLM"
    hit_rate = "-" if cache.hit_rate is None else f"{cache.hit_rate:.1%} of {cache.prefix_queries:,} prompt tokens"
    of_token = cache.memory_bytes / cache.tokens if cache.memory_bytes and cache.tokens else None
    rows = {
        "server": f"{cache.url}, {version}, serves {', '.join(cache.models) or '-'}",
        "kv_cache_dtype": cache.kv_cache_dtype,
        "tokens that fit": _number(cache.tokens),
        "longest sequence": _number(cache.max_model_len),
        "memory": "-" if of_token is None else f"{cache.memory_bytes / 2**20:,.0f} MiB, {of_token:,.0f} B a token",
        "blocks in use": f"{cache.usage:.1%} of {_number(cache.blocks)} an engine",
        "prefix hits": hit_rate,
        "preemptions": f"{cache.preemptions:,}",
        "requests": f"{cache.running} running, {cache.waiting} waiting",
    }
    table = Table(show_header=False, box=None)
    for what, found in rows.items():
        table.add_row(what, found)
    console = Console(highlight=False)
    console.print(table)
    console.print(cache.verdict, style="green" if cache.compressed else "bold red", soft_wrap=True)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _artifact(path: Path, plot: Path | None, json_output: bool) -> None:
    from turboquant.artifact import Artifact

    try:
        loaded = Artifact.load(path)
        if plot:
            from turboquant.calibration.plots import draw

            draw(loaded, plot)
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        typer.echo(loaded.info.model_dump_json(indent=2))
        return
    console = Console()
    info = loaded.info
    console.print(f"{info.model} ({info.model_type}), {len(info.layers)} layers, presets {', '.join(info.presets)}")
    for data in info.data:
        console.print(f"{data.samples} samples, {data.tokens:,} tokens of {data.source}, seed {data.seed}")
    console.print(_layers_table(loaded))
    console.print("K energy left: E‖k − RoPE(μ)‖² / E‖k‖², mean of the KV heads; quantisation error is in proportion.")


def _layers_table(artifact: Any) -> Table:
    table = Table(title="By layer")
    for heading in ("layer", "|μ|", "K energy left", "held out", "max |K| / rms", "max |V| / rms"):
        table.add_column(heading, justify="right")
    for index, layer in sorted(artifact.info.layers.items()):
        norm = artifact.key_means[index].norm(dim=-1).mean().item()
        ratios = [_peak(layer.key_max, layer.key_rms), _peak(layer.value_max, layer.value_rms)]
        table.add_row(str(index), f"{norm:.3g}", _mean(layer.energy_left), _mean(layer.held_out_energy_left), *ratios)
    return table


def _mean(values: list[float] | None) -> str:
    return "-" if values is None else f"{sum(values) / len(values):.3f}"


def _peak(largest: list[float] | None, rms: list[float] | None) -> str:
    if largest is None or rms is None:
        return "-"
    return f"{max(m / r if r else 0.0 for m, r in zip(largest, rms, strict=True)):.1f}"
