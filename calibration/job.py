"""One calibration: load the model and the data, read, solve."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from turboquant.artifact import SUBFOLDER, Artifact, DataInfo
from turboquant.calibration.capture import CalibrationError, layers_of
from turboquant.calibration.data import load_samples, sample_hash
from turboquant.calibration.moments import Moments
from turboquant.calibration.run import MOMENTS_NAME, Checkpoints, MomentsInfo, load_moments, read, save_moments
from turboquant.calibration.solve import solve, solve_from_biases
from turboquant.hf_model import key_biases

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class Job:
    """What `turboquant calibrate` was asked for; see there.

    Raises:
        CalibrationError: what cannot work, before the model is loaded where that can be known.
    """

    model: str
    dataset: str
    num_samples: int
    max_seq_len: int
    batch_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    chat_template: bool = False
    shard: tuple[int, int] = (1, 1)
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    checkpoint_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise CalibrationError(f"dtype {self.dtype!r} is not known: allowed are {', '.join(DTYPES)}.")

    def output_folder(self, given: Path | None) -> Path:
        """Where to write: as given, or where serving looks in the model's own folder."""
        if given is not None:
            return given
        if not Path(self.model).is_dir():
            raise CalibrationError(f"{self.model!r} is no folder, so say where the artifact is to go with --output.")
        return Path(self.model) / SUBFOLDER

    @cached_property
    def config(self) -> Any:
        config = AutoConfig.from_pretrained(self.model)
        for name, value in self.hf_overrides.items():
            for part in {id(c): c for c in (config, config.get_text_config())}.values():
                if hasattr(part, name):
                    setattr(part, name, value)
                    break
            else:
                raise CalibrationError(f"--hf-overrides: the config of {self.model!r} has no field {name!r}.")
        return config

    def load_model(self) -> PreTrainedModel:
        placement = {"device_map": self.device} if self.device != "cpu" and torch.cuda.is_available() else {}
        try:
            model = AutoModelForCausalLM.from_pretrained(self.model, config=self.config, dtype=self.dtype, **placement)
        except (ImportError, RuntimeError, NotImplementedError) as error:
            if getattr(self.config, "quantization_config", None):
                raise CalibrationError(
                    f"{self.model!r} is quantised, and Transformers cannot run it here ({error}). Calibrate its 16-bit "
                    "base model and copy the two files beside the quantised one."
                ) from error
            raise
        return model.eval()

    def from_weights(self) -> Artifact:
        """μ from the k_proj bias.

        Raises:
            CalibrationError: the model has no K bias, or it cannot serve as mean.
        """
        biases = key_biases(self.load_model())
        if not biases:
            raise CalibrationError(f"{self.model!r} has no K bias: calibrate it on data, without --from-weights.")
        return solve_from_biases(biases, self.config.get_text_config(), self.model)

    def run(self, folder: Path, resume: bool, on_progress: Callable[[int, int, float], None]) -> Artifact:
        """Read the data, leave the moments in `folder`, and solve.

        Args:
            on_progress: called with samples done, samples in all and tokens per second.
        """
        samples, numbers = self._samples()
        data = DataInfo(
            source=self.dataset, sha256=sample_hash(samples), samples=len(samples), tokens=sum(map(len, samples)),
            max_seq_len=self.max_seq_len, seed=self.seed,
        )  # fmt: skip
        info = MomentsInfo(
            model=self.model, config_json=_config_json(self.config), batch_size=self.batch_size, dtype=self.dtype,
            data=[data],
        )  # fmt: skip
        before = _left_over(folder, info) if resume else None
        model = self.load_model()
        shapes, ropes = layers_of(model)
        moments = before or Moments.zeros(shapes)
        checkpoint = Checkpoints(folder, info, self.checkpoint_seconds)
        started, at_start = time.monotonic(), moments.tokens

        def on_batch(moments: Moments) -> None:
            checkpoint(moments)
            speed = (moments.tokens - at_start) / max(1e-9, time.monotonic() - started)
            on_progress(moments.samples, len(samples), speed)

        read(model, samples, numbers, moments, ropes, batch_size=self.batch_size, on_batch=on_batch)
        artifact = solve(moments, self.config.get_text_config(), self.model, info.data)
        save_moments(folder, moments, info.model_copy(update={"done": True}))
        return artifact

    def _samples(self) -> tuple[list[list[int]], list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        samples = load_samples(
            self.dataset, tokenizer, num_samples=self.num_samples, max_seq_len=self.max_seq_len, seed=self.seed,
            chat_template=self.chat_template,
        )  # fmt: skip
        number, of = self.shard
        numbers = [*range(len(samples))][number - 1 :: of]
        if not numbers:
            raise CalibrationError(
                f"dataset {self.dataset!r} has {len(samples)} samples, none of them in shard {number}/{of}."
            )
        return [samples[i] for i in numbers], numbers


def merge_shards(folders: list[Path], output: Path) -> Artifact:
    """Add the moments of finished shards, leave the sum in `output`, and solve.

    Raises:
        CalibrationError: a shard that is not finished, of another model, or given twice.
    """
    parts = [load_moments(folder) for folder in folders]
    moments, info = parts[0]
    for folder, (_, other) in zip(folders, parts, strict=True):
        if not other.done:
            raise CalibrationError(f"the shard in {folder} is not finished: run it again with --resume.")
        if (other.config_json, other.dtype) != (info.config_json, info.dtype):
            raise CalibrationError(
                f"the shard in {folder} is of another model or dtype: {other.model}, not {info.model}."
            )
    data = [entry for _, other in parts for entry in other.data]
    if len({entry.sha256 for entry in data}) < len(data):
        raise CalibrationError("the same shard was given twice: its samples would count twice.")
    for other, _ in parts[1:]:
        moments.add(other)
    config = AutoConfig.for_model(**json.loads(info.config_json))
    artifact = solve(moments, config.get_text_config(), info.model, data)
    save_moments(output, moments, info.model_copy(update={"data": data}))
    return artifact


def _left_over(folder: Path, info: MomentsInfo) -> Moments | None:
    """Moments of a killed run of the same job; None where there are none yet."""
    if not (folder / MOMENTS_NAME).is_file():
        return None
    moments, theirs = load_moments(folder)
    wrong = [
        name
        for name in ("model", "config_json", "batch_size", "dtype", "data")
        if getattr(theirs, name) != getattr(info, name)
    ]
    if wrong:
        raise CalibrationError(
            f"the moments in {folder} are of another run: {', '.join(wrong)} differ. Repeat its command line with "
            "--resume, or start anew without."
        )
    return moments


def _config_json(config: Any) -> str:
    return json.dumps(json.loads(config.to_json_string(use_diff=False)), sort_keys=True)
