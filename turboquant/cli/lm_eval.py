"""`turboquant lm-eval`: lm-evaluation-harness's own command, with the model type `turboquant` known to it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval with the model type `turboquant`; all arguments are lm-eval's.

    turboquant lm-eval --model turboquant --model_args pretrained=DIR,kv_cache_dtype=turboquant3.5 --tasks hellaswag
    """
    if find_spec("lm_eval") is None:
        typer.echo("error: this needs lm-eval: pip install 'turboquant-toolkit[eval]'", err=True)
        raise typer.Exit(1)
    from lm_eval.__main__ import cli_evaluate

    import turboquant.evals.lm_eval_model  # noqa: F401  (registers the type)

    sys.argv = ["lm-eval", *context.args]
    cli_evaluate()
