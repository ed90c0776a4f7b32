"""`turboquant theory`: the distortion of the quantisers on random vectors, against what the paper predicts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from turboquant.theory import Measurement

_LABELS = {"mse": "mse", "prod": "prod x dim"}


def theory(
    head_dim: Annotated[
        list[int] | None, typer.Option("--head-dim", help="Length of the vectors; repeat for several.")
    ] = None,
    bits: Annotated[list[int] | None, typer.Option("--bits", help="Bits per coordinate; repeat for several.")] = None,
    num_vectors: Annotated[int, typer.Option("--num-vectors", help="Random vectors for each row.")] = 2048,
    seed: Annotated[int, typer.Option("--seed", help="Draws rotations, sketches and vectors.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")] = False,
) -> None:
    """Measure both quantisers of the paper on random unit vectors and compare with the theory.

    Columns: the distortion as measured, as predicted, their ratio, and the paper's lower bound for any quantiser. The
    distortion of the prod variant is multiplied by the dimension, so that one prediction fits all dimensions.
    """
    rows = _measure_with_progress(head_dim, bits, num_vectors, seed)
    if json_output:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console().print(_table(rows))


def _measure_with_progress(
    head_dim: list[int] | None, bits: list[int] | None, num_vectors: int, seed: int
) -> list[Measurement]:
    # Imported here because it brings torch, which would slow down every other command and --help.
    from turboquant.theory import DEFAULT_BITS, DEFAULT_DIMS, VARIANTS, measure

    dims, widths = head_dim or DEFAULT_DIMS, bits or DEFAULT_BITS
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # On standard error and gone when done, so that standard output holds the result alone.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(dims) * len(widths) * len(VARIANTS))

        def advance(row: Measurement) -> None:
            progress.update(task, advance=1, description=f"head_dim {row['head_dim']}, {row['bits']} bits")

        try:
            return measure(dims, widths, num_vectors, seed, advance)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


def _table(rows: list[Measurement]) -> Table:
    table = Table(title="Distortion on random unit vectors")
    for name in ("head_dim", "bits"):
        table.add_column(name, justify="right")
    table.add_column("variant")
    for name in ("measured", "theory", "ratio", "lower bound"):
        table.add_column(name, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["head_dim"] != row["head_dim"]:
            table.add_section()
        table.add_row(*_cells(row))
    return table


def _cells(row: Measurement) -> tuple[str, ...]:
    return (
        str(row["head_dim"]),
        str(row["bits"]),
        _LABELS[row["variant"]],
        f"{row['measured']:.5f}",
        f"{row['theory']:.5f}",
        f"{row['measured'] / row['theory']:.3f}",
        f"{row['lower_bound']:.5f}",
    )
