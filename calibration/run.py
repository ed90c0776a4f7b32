"""Read samples through a model into moments, batch by batch, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from turboquant.artifact import DataInfo
from turboquant.calibration.capture import CalibrationError, capturing
from turboquant.calibration.moments import LayerMoments, Moments
from turboquant.rope import Rope

MOMENTS_NAME = "turboquant.moments"  # in safetensors format, but not a file that looks like weights
HELD_OUT_EVERY = 10


class MomentsInfo(BaseModel):
    """What moments on disk are of."""

    model_config = ConfigDict(extra="forbid")

    model: str
    config_json: str
    batch_size: int
    dtype: str
    data: list[DataInfo]
    done: bool = False


@torch.inference_mode()
def read(
    model: PreTrainedModel,
    samples: list[list[int]],
    numbers: list[int],
    moments: Moments,
    ropes: dict[int, Rope | None],
    *,
    batch_size: int,
    on_batch: Callable[[Moments], None] = lambda moments: None,
) -> None:
    """Add the samples behind the first `moments.samples` ones to `moments`.

    Args:
        samples: token ids.
        numbers: of each sample in the whole data: every tenth is held out, whatever shard it is in.
        on_batch: called after each batch.

    Raises:
        CalibrationError: NaN or infinite states, naming the layer.
    """
    for begin in range(moments.samples, len(samples), batch_size):
        batch = samples[begin : begin + batch_size]
        lengths = torch.tensor([len(ids) for ids in batch])
        held_out = torch.tensor([n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for n in numbers[begin : begin + batch_size]])
        added = Moments.zeros(moments.shapes)
        observe = _observer(added, ropes, lengths, held_out)
        with capturing(model, observe):
            _forward(model, batch, lengths)
        added.samples, added.tokens = len(batch), int(lengths.sum())
        moments.add(added)
        on_batch(moments)


def _forward(model: PreTrainedModel, batch: list[list[int]], lengths: torch.Tensor) -> None:
    width = int(lengths.max())
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    for row, tokens in zip(ids, batch, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    mask = None if (lengths == width).all() else (torch.arange(width) < lengths[:, None]).long().to(model.device)
    # The head would make logits over the whole vocabulary that nobody reads.
    model.get_decoder()(input_ids=ids.to(model.device), attention_mask=mask, use_cache=False)


def _observer(added: Moments, ropes: dict[int, Rope | None], lengths: torch.Tensor, held_out: torch.Tensor):
    """Counts every token but padding and position 0."""

    def observe(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        at = torch.arange(key.shape[2])
        counted = (at > 0) & (at < lengths[:, None])
        for layers, rows in ((added.fit, ~held_out), (added.held_out, held_out)):
            taken = counted & rows[:, None]
            if not taken.any():
                continue
            positions = at.expand_as(taken)[taken].to(key.device)
            states = [x.transpose(1, 2)[taken.to(x.device)] for x in (query, key, value)]
            for name, x in zip(("queries", "keys", "values"), states, strict=True):
                if not x.isfinite().all():
                    raise CalibrationError(
                        f"layer {index} makes NaN or infinite {name}: a cache cannot hold them. Try --dtype "
                        "float32, and look whether the checkpoint is whole."
                    )
            rope = ropes[index]
            rope = rope.to(key.device) if rope is not None else None
            layers[index].add(LayerMoments.of(*states, positions, rope))

    return observe


def save_moments(folder: Path, moments: Moments, info: MomentsInfo) -> None:
    """Write moments in one step, so that a kill leaves the last ones whole."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / (MOMENTS_NAME + ".part")
    save_file(moments.as_tensors(), temporary, metadata={"info": info.model_dump_json()})
    temporary.chmod(0o644)
    os.replace(temporary, folder / MOMENTS_NAME)


def load_moments(folder: Path) -> tuple[Moments, MomentsInfo]:
    """Read what `save_moments` wrote.

    Raises:
        CalibrationError: not there, or damaged.
    """
    path = folder / MOMENTS_NAME
    if not path.is_file():
        raise CalibrationError(f"no moments at {path}: run `turboquant calibrate` with this --output first.")
    try:
        with safe_open(path, framework="pt") as file:
            info = MomentsInfo.model_validate_json((file.metadata() or {}).get("info", ""))
            return Moments.from_tensors({key: file.get_tensor(key) for key in file.keys()}), info  # noqa: SIM118
    except (SafetensorError, ValidationError, KeyError, ValueError, TypeError) as error:
        raise CalibrationError(f"{path} is damaged: {error}. Remove it and calibrate again.") from error


class Checkpoints:
    """Writes moments now and then, as a callback of `read`."""

    def __init__(self, folder: Path, info: MomentsInfo, seconds: float) -> None:
        self.folder, self.info, self.seconds = folder, info, seconds
        self.last = time.monotonic()

    def __call__(self, moments: Moments) -> None:
        if time.monotonic() - self.last >= self.seconds:
            save_moments(self.folder, moments, self.info)
            self.last = time.monotonic()
