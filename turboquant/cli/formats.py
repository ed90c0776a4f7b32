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
    table = Table(title="KV cache formats: one token in one KV head")
    for heading in ("preset", "K bits", "V bits", "head_dim", "bytes", "bits per element", "against bf16"):
        table.add_column(heading, justify="left" if heading == "preset" else "right", no_wrap=heading == "preset")
    for row in rows:
        table.add_row(*_cells(row), end_section=row["head_dim"] == head_dim[-1])
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


def _cells(row: dict[str, object]) -> list[str]:
    whole = [str(row[key]) for key in ("name", "key_bits", "value_bits", "head_dim", "slot_bytes")]
    return [*whole, f"{row['bits_per_element']:.3f}", f"{row['ratio_vs_bf16']:.2f}x"]
