"""`turboquant formats`: what each preset costs."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from turboquant.formats import PRESETS, KVFormat

DEFAULT_HEAD_DIMS = [64, 128, 256]


def formats(
    head_dim: Annotated[list[int], typer.Option(help="Head dimension; may be repeated.")] = DEFAULT_HEAD_DIMS,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the KV cache presets: bits per element (scales included), bytes, compression against bf16."""
    try:
        rows = [describe(fmt, dim) for fmt in PRESETS.values() for dim in head_dim]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--head-dim") from error
    if json_output:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("preset", "K bits", "V bits", title="KV cache formats: bytes for one token in one KV head")
    for dim in head_dim:
        table.add_column(f"head_dim {dim}", justify="right")
    for fmt in PRESETS.values():
        cells = [_cell(row) for row in rows if row["name"] == fmt.name]
        table.add_row(fmt.name, str(fmt.key_bits), str(fmt.value_bits), *cells)
    console = Console()
    console.print(table)
    console.print("Bits per element count everything that is stored: codes of K and V and an fp16 scale for each.")


def describe(fmt: KVFormat, head_dim: int) -> dict[str, object]:
    """One row: a preset at one head_dim."""
    return {
        "name": fmt.name,
        "key_bits": fmt.key_bits,
        "value_bits": fmt.value_bits,
        "head_dim": head_dim,
        "slot_bytes": fmt.slot_bytes(head_dim),
        "bits_per_element": fmt.bits_per_element(head_dim),
        "ratio_vs_bf16": fmt.ratio_vs_bf16(head_dim),
    }


def _cell(row: dict[str, object]) -> str:
    return f"{row['slot_bytes']} B  {row['bits_per_element']:.3f} b  {row['ratio_vs_bf16']:.2f}x"
