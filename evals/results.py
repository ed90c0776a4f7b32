"""A folder of results: one sub-folder for each finished cell, so that a run that was killed goes on.

FOLDER/<model>__<backend>__<task>__<text>__<cache>__<hash>/
    config.json         what was measured, in full; its hash ends the folder's name
    metrics.json        figures with confidence intervals, `task`, `primary` (the figure that stands for all of them),
                        `higher_is_better`, `rows` (what the rows of the scores are) and `block`; written last
    scores.safetensors  float64 [k, n], row 0 the primary score of each position or sample
    samples.json        what was asked and answered, where a task has answers
    environment.json    machine and versions
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import bootstrap, wilcoxon

from turboquant.environment import environment_report

BLOCK = 128  # positions that are resampled together: neighbours are alike
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        model, backend, task, text: what on what; text with the hash of its tokens in `settings`.
        cache: label of the candidate, with its window.
        settings: everything else that the figures depend on.
    """

    model: str
    backend: str
    task: str
    text: str
    cache: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def folder(self) -> str:
        """Its name in a results folder: readable, and another one for every other configuration."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]
        parts = (self.model, self.backend, self.task, Path(self.text).name, self.cache)
        return "__".join(re.sub(r"[^\w.@+-]", "-", part) for part in parts) + f"__{digest}"


@dataclass(frozen=True)
class Finished:
    """A cell that has been measured: its config, figures, scores by position or sample, and what was answered."""

    config: dict[str, Any]
    metrics: dict[str, Any]
    scores: torch.Tensor
    environment: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)


class Results:
    """The cells in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, cell: Cell) -> Finished | None:
        """The cell, if it is finished."""
        return _load(self.folder / cell.folder)

    def save(
        self, cell: Cell, metrics: dict[str, Any], scores: torch.Tensor, samples: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Keep a finished cell."""
        folder = self.folder / cell.folder
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "config.json", {**asdict(cell), "settings": dict(cell.settings)})
        _write(folder / "environment.json", environment_report())
        save_file({"scores": scores.contiguous()}, folder / "scores.safetensors")
        if samples:
            _write(folder / "samples.json", list(samples))
        temporary = folder / "metrics.json.part"
        _write(temporary, metrics)
        os.replace(temporary, folder / "metrics.json")

    def all(self) -> list[Finished]:
        """Every finished cell, by name."""
        found = (_load(path.parent) for path in sorted(self.folder.glob("*/metrics.json")))
        return [cell for cell in found if cell is not None]


def interval(values: torch.Tensor, seed: int = 0, block: int = BLOCK) -> tuple[float, float] | None:
    """95 % bootstrap interval of the mean of values [n], in blocks of neighbours; None for fewer than two blocks."""
    means = block_means(values, block)
    if len(means) < 2:
        return None
    if np.ptp(means) == 0:
        return float(means[0]), float(means[0])
    result = bootstrap((means,), np.mean, confidence_level=CONFIDENCE, method="percentile", random_state=seed)
    return tuple(float(x) for x in result.confidence_interval)


def paired_p(values: torch.Tensor, others: torch.Tensor, block: int = BLOCK) -> float:
    """p of the hypothesis that values [n] are not smaller than others [n]: Wilcoxon's signed ranks of block means.

    Args:
        block: `Task.block` of the task: how many neighbouring scores are alike.
    """
    mine, theirs = block_means(values, block), block_means(others, block)
    if len(mine) < 2 or np.array_equal(mine, theirs):
        return 1.0
    return float(wilcoxon(mine, theirs, alternative="less").pvalue)


def block_means(values: torch.Tensor, block: int = BLOCK) -> np.ndarray:
    """[n] to the means of consecutive blocks, the last one shorter."""
    return np.array([part.mean().item() for part in values.double().split(block)])


def _load(folder: Path) -> Finished | None:
    if not (folder / "metrics.json").is_file():
        return None
    parts = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "metrics", "environment"))
    config, metrics, environment = parts
    answers = folder / "samples.json"
    samples = json.loads(answers.read_text()) if answers.is_file() else []
    return Finished(config, metrics, load_file(folder / "scores.safetensors")["scores"], environment, samples)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
