"""The `turboquant` command: one module a subcommand, registered here."""

from __future__ import annotations

from typing import Annotated

import typer

import turboquant
from turboquant.cli.calibrate import calibrate, merge
from turboquant.cli.demo import demo
from turboquant.cli.doctor import doctor
from turboquant.cli.evaluate import evaluate
from turboquant.cli.formats import formats
from turboquant.cli.inspect import inspect
from turboquant.cli.lm_eval import SETTINGS, lm_eval
from turboquant.cli.plan import plan
from turboquant.cli.report import report
from turboquant.cli.simulate import simulate
from turboquant.cli.theory import theory

app = typer.Typer(
    name="turboquant",
    help="Compress an LLM's KV cache to about 3.5 bits, and serve from it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(calibrate)
app.command()(merge)
app.command()(inspect)
app.command()(demo)
app.command()(doctor)
app.command("eval")(evaluate)
app.command()(report)
app.command("lm-eval", context_settings=SETTINGS)(lm_eval)
app.command()(formats)
app.command()(plan)
app.command()(simulate)
app.command()(theory)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"turboquant-toolkit {turboquant.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compress an LLM's KV cache to about 3.5 bits, and serve from it."""


if __name__ == "__main__":
    app()
