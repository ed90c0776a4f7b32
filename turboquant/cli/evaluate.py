"""`turboquant eval` and `turboquant report`: quality of compressed caches on a real model and real text."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

COLUMNS = ("task", "text", "cache", "window", "kl_mean", "kl_p99", "top1", "delta_ppl", "bits_per_element")


def evaluate(
    model: Annotated[Path, typer.Option(help="Folder of a Transformers model.", exists=True, file_okay=False)],
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="Caches to measure, separated by commas: formats (see `turboquant formats`) or rivals such "
                          "as fp8; NAME@64 sets the exact window."),
    ],
    tasks: Annotated[str, typer.Option(help="Of divergence and copying, separated by commas.")] = "divergence",
    text: Annotated[
        str, typer.Option(help="'pydoc', 'source' (both in every Python) or UTF-8 text files, separated by commas.")
    ] = "pydoc",
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens to score of each text, in whole contexts.")] = 4096,
    limit: Annotated[int | None, typer.Option(min=1, help="Contexts of each text, in place of --num-tokens.")] = None,
    context_length: Annotated[int, typer.Option(min=2, help="Tokens in one forward pass.")] = 1024,
    backend: Annotated[
        Literal["hf", "vllm"], typer.Option(help="hf: Transformers. vllm: the engine, all in this process.")
    ] = "hf",
    dtype: Annotated[str, typer.Option(help="Model dtype: float32, bfloat16, float16.")] = "float32",
    key_mean: Annotated[str, typer.Option(help="K's mean: auto (calibrated, or the k_proj bias) or none.")] = "auto",
    window: Annotated[
        int | None, typer.Option(min=0, help="Newest tokens read exactly; else by TURBOQUANT_WINDOW, else 64.")
    ] = None,
    position_offset: Annotated[
        int, typer.Option(min=0, help="Shift all positions by so many, which an exact model does not mind (hf).")
    ] = 0,
    output: Annotated[
        Path | None, typer.Option(help="A .json file for the figures; or a folder, where finished cells stay.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Compare a model on compressed caches with itself on an exact one, all tokens read as decoding would read them.

    divergence: on text. copying: on the second half of contexts that repeat their first half.
    """
    missing = next((name for name in ("transformers", backend) if name != "hf" and find_spec(name) is None), None)
    if missing:
        typer.echo(f"error: this needs {missing}: pip install 'turboquant-toolkit[eval]' (or [vllm])", err=True)
        raise typer.Exit(1)
    from turboquant.environment import environment_report
    from turboquant.evals.candidates import Candidate
    from turboquant.evals.results import Results
    from turboquant.evals.suite import Suite, calibration

    single_file = output is not None and output.suffix == ".json"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("", total=None)
            suite = Suite(
                model, [Candidate.parse(name, window) for name in kv_cache_dtype.split(",")], tasks.split(","),
                text.split(","), limit * context_length if limit else num_tokens, context_length, backend, dtype,
                key_mean, position_offset, None if output is None or single_file else Results(output),
                lambda what, done, total: progress.update(bar, description=what, completed=done, total=total),
            )  # fmt: skip
            rows = [{"task": task, "text": name, **figures} for task, name, figures in suite.run()]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    one = {name: value for name, value in rows[0].items() if name not in ("task", "text")} if len(rows) == 1 else None
    if single_file:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "task": tasks, "model": model.name, "text": text, "dtype": dtype, "position_offset": position_offset,
            "calibration": calibration(model), "result": one or rows,
        }  # fmt: skip
        output.write_text(json.dumps({**report, "environment": environment_report()}, indent=2) + "\n")
    if json_output:
        typer.echo(json.dumps(one or rows, indent=2))
        return
    Console().print(_table(rows))


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `turboquant eval --output` wrote.", exists=True)],
    output: Annotated[Path | None, typer.Option(help="Where to write; else report.md in the first folder.")] = None,
) -> None:
    """Make one page of results: tables with intervals, paired tests, and quality against bytes as a picture."""
    from turboquant.evals.report import write_report

    try:
        page = write_report(folders, output or folders[0] / "report.md")
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    Console(stderr=True).print(f"Wrote {page}", soft_wrap=True)


def _table(rows: list[dict]) -> Table:
    table = Table(*COLUMNS, title="Divergence from the exact cache")
    for row in rows:
        values = {**row, "cache": row["kv_cache_dtype"] + (" (simulated)" if row["simulated"] else "")}
        table.add_row(*(f"{v:.4g}" if isinstance(v := values[name], float) else str(v) for name in COLUMNS))
    return table
