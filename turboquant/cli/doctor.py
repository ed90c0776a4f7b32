"""`turboquant doctor`: is it really on?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder of a model, to check its calibration too.", exists=True, file_okay=False),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check the installation: versions, plugin, kernels, device, calibration. Exit code 1 if something is wrong."""
    from turboquant.doctor import examine

    findings = examine(model)
    if json_output:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table("check", "", "found", "what to do", show_lines=True)
        for f in findings:
            table.add_row(f.check, f"[{STYLES[f.status]}]{f.status}[/]", f.found, f.remedy)
        Console().print(table)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)
