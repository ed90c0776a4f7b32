"""`turboquant eval`: quality of compressed caches on a real model and real text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

TASKS = ("divergence", "copying")
COLUMNS = ("text", "cache", "window", "kl_mean", "kl_p99", "top1", "delta_ppl", "bits_per_element")


def evaluate(
    model: Annotated[Path, typer.Option(help="Folder of a Transformers model.", exists=True, file_okay=False)],
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="Caches to measure, separated by commas: formats (see `turboquant formats`) or, on vllm, "
                          "rivals such as fp8; NAME@64 sets the exact window."),
    ],
    tasks: Annotated[str, typer.Option(help=f"What to measure: {', '.join(TASKS)}.")] = "divergence",
    text: Annotated[
        str, typer.Option(help="'pydoc', 'source' (both in every Python) or UTF-8 text files, separated by commas.")
    ] = "pydoc",
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens to score of each text, in whole contexts.")] = 4096,
    context_length: Annotated[int, typer.Option(min=2, help="Tokens in one forward pass.")] = 1024,
    backend: Annotated[
        Literal["hf", "vllm"], typer.Option(help="hf: Transformers. vllm: the engine, all in this process.")
    ] = "hf",
    dtype: Annotated[str, typer.Option(help="Model dtype: float32, bfloat16, float16.")] = "float32",
    key_mean: Annotated[str, typer.Option(help="K's mean: auto (the k_proj bias, if there is one) or none.")] = "auto",
    window: Annotated[
        int | None, typer.Option(min=0, help="Newest tokens read exactly; else by TURBOQUANT_WINDOW, else 64.")
    ] = None,
    position_offset: Annotated[
        int, typer.Option(min=0, help="Shift all positions by so many, which an exact model does not mind (hf).")
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the result, with versions and machine, here.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Compare a model on compressed caches with itself on an exact one, all tokens read as decoding would read them.

    divergence: on text. copying: on the second half of contexts that repeat their first half.
    """
    if tasks not in TASKS:
        raise typer.BadParameter(f"{tasks!r} is not a task; allowed: {', '.join(TASKS)}.", param_hint="--tasks")
    missing = next((name for name in ("transformers", backend) if name != "hf" and find_spec(name) is None), None)
    if missing:
        typer.echo(f"error: this needs {missing}: pip install 'turboquant-toolkit[eval]' (or [vllm])", err=True)
        raise typer.Exit(1)
    from turboquant.environment import environment_report
    from turboquant.evals.candidates import Candidate
    from turboquant.evals.divergence import repeated, tokenize
    from turboquant.text import load_text

    try:
        candidates = [Candidate.parse(name, window) for name in kv_cache_dtype.split(",")]
        contexts = {name: tokenize(model, load_text(name), num_tokens, context_length) for name in text.split(",")}
        if backend == "vllm" and (tasks != "divergence" or position_offset):
            raise ValueError("--backend vllm measures divergence at a text's own positions: use hf for the rest.")
        options = {"position_offset": position_offset}
        if tasks == "copying":
            contexts = {name: repeated(ids) for name, ids in contexts.items()}
            options["score_from"] = context_length // 2
        run = _through_transformers if backend == "hf" else _through_the_engine
        rows = [
            {"text": name, **asdict(row)} for name, row in run(model, candidates, contexts, dtype, key_mean, options)
        ]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    one = {name: value for name, value in rows[0].items() if name != "text"} if len(rows) == 1 else None
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "task": tasks, "model": model.name, "text": text, "dtype": dtype, "position_offset": position_offset,
            "calibrated": calibration(model), "result": one or rows,
        }  # fmt: skip
        output.write_text(json.dumps({**report, "environment": environment_report()}, indent=2) + "\n")
    if json_output:
        typer.echo(json.dumps(one or rows, indent=2))
        return
    Console().print(_table(rows))


def calibration(model: Path) -> dict | None:
    """What the artifact that this model is measured with was made from; None without one."""
    from turboquant.artifact import Artifact, find_artifact

    path = find_artifact(model)
    return None if path is None else Artifact.load(path).info.model_dump(mode="json", include={"data", "versions"})


def _through_transformers(model, candidates, contexts, dtype: str, key_mean: str, options: dict) -> Iterator:
    from turboquant.evals.divergence import divergence, load_model

    loaded = load_model(model, dtype)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for candidate in candidates:
            for name, ids in contexts.items():
                bar = progress.add_task(f"{candidate.label} on {name}", total=len(ids))
                yield name, divergence(
                    loaded, candidate, ids, key_mean=key_mean, **options,
                    on_progress=lambda done, total, bar=bar: progress.update(bar, completed=done, total=total),
                )  # fmt: skip


def _through_the_engine(model, candidates, contexts, dtype: str, key_mean: str, _options: dict) -> Iterator:
    from turboquant.evals.engine_divergence import engine_divergence

    console = Console(stderr=True)
    yield from engine_divergence(
        model, candidates, contexts, dtype=dtype, key_mean=key_mean,
        on_progress=lambda what: console.print(f"Running {what}", style="dim"),
    )  # fmt: skip


def _table(rows: list[dict]) -> Table:
    table = Table(*COLUMNS, title="Divergence from the exact cache")
    for row in rows:
        values = {**row, "cache": row["kv_cache_dtype"] + (" (simulated)" if row["simulated"] else "")}
        table.add_row(*(f"{v:.4g}" if isinstance(v := values[name], float) else str(v) for name in COLUMNS))
    return table
