"""`turboquant eval`: quality of compressed caches on a real model and real text."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

NEEDS = {"hf": "transformers", "vllm": "vllm", "server": "openai"}


def evaluate(
    model: Annotated[Path, typer.Option(help="Folder of a Transformers model.", exists=True, file_okay=False)],
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="Caches to measure, separated by commas: formats (see `turboquant formats`) or rivals such "
                          "as fp8; NAME@64 sets the exact window; auto is the exact cache."),
    ],
    tasks: Annotated[
        str,
        typer.Option(help="Of divergence, copying, perplexity, needle, multineedle, longgen, ruler_offline and any "
                          "task of lm-eval (lm_eval:NAME), separated by commas."),
    ] = "divergence",
    text: Annotated[
        str, typer.Option(help="'pydoc', 'source' (both in every Python) or UTF-8 text files, separated by commas.")
    ] = "pydoc",
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens to read of each text, in whole contexts.")] = 4096,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Samples of each task and text: contexts, needles or documents.")
    ] = None,
    context_length: Annotated[int, typer.Option(min=2, help="Tokens of a context.")] = 1024,
    backend: Annotated[
        Literal["hf", "vllm", "server"],
        typer.Option(help="hf: Transformers. vllm: the engine, in this process. server: servers that run."),
    ] = "hf",
    base_url: Annotated[
        str | None,
        typer.Option(help="Servers such as http://127.0.0.1:8000/v1, one for each cache, separated by commas."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Model dtype: float32, bfloat16, float16.")] = "float32",
    key_mean: Annotated[str, typer.Option(help="K's mean: auto (calibrated, or the k_proj bias) or none.")] = "auto",
    window: Annotated[
        int | None, typer.Option(min=0, help="Newest tokens read exactly; else by TURBOQUANT_WINDOW, else 64.")
    ] = None,
    position_offset: Annotated[
        int, typer.Option(min=0, help="Shift all positions by so many, which an exact model does not mind (hf).")
    ] = 0,
    lengths: Annotated[
        str, typer.Option(help="Tokens of prompts with needles and of RULER's, separated by commas.")
    ] = "1024,2048,4096,8192",
    depths: Annotated[str, typer.Option(help="Where needles lie, 0 to 1.")] = "0,0.25,0.5,0.75,1",
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each long generation.")] = 128,
    seed: Annotated[int, typer.Option(help="Of generated data.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="A .json file for the figures; or a folder, where finished cells stay.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:  # fmt: skip
    """Compare a model on compressed caches with itself on an exact one, all tokens read as decoding would read them.

    divergence: next-token distributions on text. copying: on the second half of contexts that repeat their first half.
    layers: with one layer alone compressed (hf). perplexity: on text. needle, multineedle: numbers hidden in text.
    longgen: greedy answers, how far they stay equal.
    """
    missing = next((name for name in ("transformers", NEEDS[backend]) if find_spec(name) is None), None)
    if missing:
        typer.echo(f"error: this needs {missing}: pip install 'turboquant-toolkit[eval]' (or [vllm])", err=True)
        raise typer.Exit(1)
    from turboquant.environment import environment_report
    from turboquant.evals.backends import make_backend
    from turboquant.evals.candidates import Candidate
    from turboquant.evals.results import Results
    from turboquant.evals.suite import Suite, calibration
    from turboquant.evals.tasks import Request

    single_file = output is not None and output.suffix == ".json"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        candidates = [Candidate.parse(name, window) for name in kv_cache_dtype.split(",")]
        served = make_backend(
            backend, model, candidates, dtype=dtype, key_mean=key_mean, position_offset=position_offset,
            base_urls=base_url.split(",") if base_url else None,
        )  # fmt: skip
        request = Request(
            model, served.max_length, num_tokens, context_length, limit, tuple(_numbers(lengths, int, "--lengths")),
            tuple(_numbers(depths, float, "--depths")), max_new_tokens, seed,
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as progress:
            cells, samples = progress.add_task("", total=None), progress.add_task("its samples", total=None)
            suite = Suite(
                served, request, candidates, tasks.split(","), text.split(","),
                results=None if output is None or single_file else Results(output),
                on_cell=lambda what, done, total: progress.update(cells, description=what, completed=done, total=total),
                on_sample=lambda done, total: progress.update(samples, completed=done, total=total),
            )  # fmt: skip
            found = dict(suite.run())
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    rows = [{"task": key.task, "text": key.text, **found[key]} for key in suite.wanted()]
    one = {name: value for name, value in rows[0].items() if name not in ("task", "text")} if len(rows) == 1 else None
    if single_file:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "task": tasks, "model": model.resolve().name, "text": text, "dtype": dtype,
            "position_offset": position_offset, "calibration": calibration(model), "result": one or rows,
        }  # fmt: skip
        output.write_text(json.dumps({**report, "environment": environment_report()}, indent=2) + "\n")
    if json_output:
        typer.echo(json.dumps(one or rows, indent=2))
        return
    for name, members in groupby(rows, key=lambda row: row["task"]):
        Console().print(_table(name, suite.tasks[name].shown, list(members)))


def _numbers(text: str, kind: type, option: str) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text!r}: numbers separated by commas are expected.") from error
    high = 1 if kind is float else float("inf")
    if any(not 0 <= number <= high for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"{option} {text!r}: different numbers from 0 to {high:g} are expected.")
    return sorted(numbers)


def _table(task: str, shown: tuple[str, ...], rows: list[dict]) -> Table:
    table = Table("text", "cache", "window", *shown, "bits_per_element", title=f"{task}, beside the exact cache")
    for row in rows:
        cache = row["kv_cache_dtype"] + (" (simulated)" if row["simulated"] else "")
        values = (row.get(name) for name in (*shown, "bits_per_element"))
        numbers = (f"{value:.4g}" if isinstance(value, float) else str(value or "") for value in values)
        table.add_row(row["text"], cache, str(row["window"]), *numbers)
    return table
