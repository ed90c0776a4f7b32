"""`turboquant eval`: accuracy of a cache format on a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

TASKS = ("divergence",)


def evaluate(
    model: Annotated[Path, typer.Option(help="Folder of a Transformers model.", exists=True, file_okay=False)],
    kv_cache_dtype: Annotated[str, typer.Option(help="Cache format to measure (see `turboquant formats`).")],
    tasks: Annotated[str, typer.Option(help=f"What to measure: {', '.join(TASKS)}.")] = "divergence",
    text: Annotated[str, typer.Option(help="'pydoc' (Python's own topics) or a UTF-8 text file.")] = "pydoc",
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens to score, in whole contexts.")] = 4096,
    context_length: Annotated[int, typer.Option(min=2, help="Tokens in one forward pass.")] = 1024,
    dtype: Annotated[str, typer.Option(help="Model dtype: float32, bfloat16, float16.")] = "float32",
    key_mean: Annotated[str, typer.Option(help="K's mean: auto (the k_proj bias, if there is one) or none.")] = "auto",
    window: Annotated[
        int | None, typer.Option(min=0, help="Newest tokens read exactly; else by TURBOQUANT_WINDOW, else 64.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the result, with versions and machine, here.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare a model on a compressed cache with itself on an exact one, all tokens read from the cache."""
    if tasks not in TASKS:
        raise typer.BadParameter(f"{tasks!r} is not a task; allowed: {', '.join(TASKS)}.", param_hint="--tasks")
    if find_spec("transformers") is None:
        typer.echo("error: eval needs Transformers: pip install 'turboquant-toolkit[eval]'", err=True)
        raise typer.Exit(1)
    from turboquant.environment import environment_report
    from turboquant.evals.divergence import divergence
    from turboquant.evals.text import load_text

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(f"{kv_cache_dtype} on {model.name}", total=None)
            result = divergence(
                model, kv_cache_dtype, load_text(text), num_tokens=num_tokens, context_length=context_length,
                dtype=dtype, key_mean=key_mean, window=window,
                on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )  # fmt: skip
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    row = asdict(result)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {"task": tasks, "model": model.name, "text": text, "dtype": dtype, "result": row}
        output.write_text(json.dumps({**report, "environment": environment_report()}, indent=2) + "\n")
    if json_output:
        typer.echo(json.dumps(row, indent=2))
        return
    table = Table("figure", "value", title="Divergence from the exact cache")
    for name, value in row.items():
        table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console().print(table)
