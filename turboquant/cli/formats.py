"""`turboquant formats`: what each preset costs."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from turboquant.formats import PRESETS
from turboquant.window import COST_LENGTHS, CacheLayout, window_size

DEFAULT_HEAD_DIMS = [64, 128, 256]


def formats(
    head_dim: Annotated[list[int], typer.Option(help="Head dimension; may be repeated.")] = DEFAULT_HEAD_DIMS,
    window: Annotated[
        int | None, typer.Option(min=0, help="Exact recent window in tokens.", show_default="64, or TURBOQUANT_WINDOW")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 160,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the KV cache presets: bits per element (scales included), bytes, compression against bf16.

    And what the exact window leaves of that, in whole pages, at 4k, 32k and 128k tokens.
    """
    try:
        size = window_size(window)
        rows = [describe(CacheLayout(fmt, dim, block_size, size)) for fmt in PRESETS.values() for dim in head_dim]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title="KV cache formats: one token in one KV head", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("preset", "K/V bits", "head dim", "bytes", "bits per element", "against bf16", *COST_LENGTHS):
        table.add_column(heading, justify="left" if heading == "preset" else "right", no_wrap=heading == "preset")
    for row in rows:
        table.add_row(*_cells(row), end_section=row["head_dim"] == head_dim[-1])
    console = Console()
    console.print(table)
    console.print("Bits per element count everything that is stored: codes of K and V and an fp16 scale for each.")
    console.print(
        f"4k to 128k: against bf16 for a sequence of that length, in whole pages of {block_size} tokens, "
        + (f"exact window of {size} tokens included." if size else "no exact window.")
    )


def describe(layout: CacheLayout) -> dict[str, object]:
    """One row: a preset at one head_dim, without and with its window."""
    fmt, head_dim = layout.fmt, layout.head_dim
    return {
        "name": fmt.name,
        "key_bits": fmt.key_bits,
        "value_bits": fmt.value_bits,
        "head_dim": head_dim,
        "slot_bytes": fmt.slot_bytes(head_dim),
        "bits_per_element": fmt.bits_per_element(head_dim),
        "ratio_vs_bf16": fmt.ratio_vs_bf16(head_dim),
        "window": layout.window,
        "block_size": layout.block_size,
        "ratio_vs_bf16_at": {str(tokens): layout.ratio_vs_bf16(tokens) for tokens in COST_LENGTHS.values()},
    }


def _cells(row: dict[str, object]) -> list[str]:
    bits = f"{row['key_bits']}/{row['value_bits']}"
    ratios = [row["ratio_vs_bf16"], *row["ratio_vs_bf16_at"].values()]
    numbers = [bits, str(row["head_dim"]), str(row["slot_bytes"]), f"{row['bits_per_element']:.3f}"]
    return [row["name"], *numbers, *(f"{ratio:.2f}x" for ratio in ratios)]
