"""`turboquant calibrate` and `merge`: K's mean from real text, once and offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

OutputFolder = Annotated[
    Path | None,
    typer.Option("--output", help="Where to write; else MODEL/turboquant, where serving looks."),
]


def calibrate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a model (the 16-bit base of a quantised one).")],
    dataset: Annotated[
        str, typer.Option(help="'pydoc' or 'source' (in every Python), a .txt, .jsonl or .parquet file, or a hub id.")
    ] = "pydoc",
    num_samples: Annotated[int, typer.Option(min=1, help="Samples to read.")] = 512,
    max_seq_len: Annotated[int, typer.Option(min=16, help="Tokens of a sample.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in one forward pass.")] = 1,
    dtype: Annotated[str, typer.Option(help="Model dtype: auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto to spread over what is there.")] = "auto",
    output: OutputFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the moments that a killed run left.")] = False,
    seed: Annotated[int, typer.Option(help="Of the choice of samples.")] = 0,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Render 'messages' by it.")] = False,
    shard: Annotated[str, typer.Option(help="K/N: every N-th sample from the K-th; then `merge`.")] = "1/1",
    hf_overrides: Annotated[
        str | None, typer.Option(help="JSON put over the model's config, as in vLLM: YaRN as it will be served.")
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="How often moments are written.")] = 20.0,
    from_weights: Annotated[
        bool, typer.Option("--from-weights", help="Take K's mean from the k_proj bias, without any data.")
    ] = False,
) -> None:  # fmt: skip
    """Measure K's mean before RoPE, by layer and KV head, and write the artifact that serving takes it from."""
    from turboquant.calibration.job import Job

    console = Console(stderr=True)
    try:
        job = Job(
            model, dataset, num_samples, max_seq_len, batch_size, dtype, device, seed, chat_template, _shard(shard),
            json.loads(hf_overrides) if hf_overrides else {}, checkpoint_seconds,
        )  # fmt: skip
        folder = job.output_folder(output)
        if from_weights:
            artifact = job.from_weights()
        else:
            with _progress(console) as progress:
                task = progress.add_task(f"Calibrating {Path(model).name}", total=None, speed="")
                artifact = job.run(folder, resume, lambda done, total, speed: progress.update(
                    task, completed=done, total=total, speed=f"{speed:,.0f} tokens/s"))  # fmt: skip
        path = artifact.save(folder)
    except (ValueError, OSError, ImportError) as error:
        raise _error(error) from error
    console.print(f"Wrote {path}. {_gain(artifact)}", soft_wrap=True)


def merge(
    parts: Annotated[list[Path], typer.Argument(help="Output folders of `calibrate`, one for each shard.")],
    output: Annotated[Path, typer.Option(help="Folder for the joint artifact.")],
) -> None:
    """Join the moments of shards into one artifact."""
    from turboquant.calibration.job import merge_shards

    try:
        artifact = merge_shards(parts, output)
        path = artifact.save(output)
    except (ValueError, OSError) as error:
        raise _error(error) from error
    Console(stderr=True).print(f"Wrote {path}. {_gain(artifact)}", soft_wrap=True)


def _gain(artifact: Any) -> str:
    left = [x for layer in artifact.info.layers.values() for x in layer.held_out_energy_left or layer.energy_left or []]
    if not left:
        return "K's mean is the k_proj bias."
    return f"K's mean takes away {1 - sum(left) / len(left):.0%} of K's energy, in the mean over layers and heads."


def _shard(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise typer.BadParameter(
            f"{text!r} is no shard: give K/N with K from 1 to N, such as 2/4.", param_hint="--shard"
        )
    return int(number), int(of)


def _error(error: Exception) -> typer.BadParameter:
    return typer.BadParameter(str(error))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=console,
    )  # fmt: skip
