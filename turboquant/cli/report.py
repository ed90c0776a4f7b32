"""`turboquant report`: one page from results of `turboquant eval --output`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `turboquant eval --output` wrote.", exists=True)],
    output: Annotated[
        Path | None, typer.Option(help="Where to write: a .md or a .html; else report.md in the first folder.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="A:B, caches as the tables name them: is A better than B, by a paired test? May be repeated."
        ),
    ] = None,
) -> None:
    """Make one page of results: tables with intervals, paired tests, and quality against bytes as a picture."""
    from turboquant.evals.report import write_report

    try:
        pairs = [_pair(text) for text in compare or []]
        page = write_report(folders, output or folders[0] / "report.md", pairs)
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    Console(stderr=True).print(f"Wrote {page}", soft_wrap=True)


def _pair(text: str) -> tuple[str, str]:
    first, colon, second = text.partition(":")
    if not (colon and first.strip() and second.strip()):
        raise ValueError(f"--compare {text!r}: two caches with a colon between them, such as turboquant3.5:fp8.")
    return first.strip(), second.strip()
