"""What a report says of one cache: its cells of one task on several texts, taken together.

Row 0 of a cell's scores is the task's primary score of each position or sample; `block` of them in a row are alike, so
means of such blocks are what intervals and tests are made of.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turboquant.evals.results import BLOCK, Finished, block_means, interval, paired_p
from turboquant.evals.scores import summary
from turboquant.formats import BF16_BYTES

BACKENDS = {"hf": "Transformers", "vllm": "the vLLM engine", "server": "a vLLM server"}
EXACT = "auto"
# What does not make two cells incomparable.
FREE = {"num_tokens", "context_length", "tokens_sha256", "calibration"}
LENGTH_STEP = 256  # generated prompts are a little shorter than asked for, by their text


@dataclass(frozen=True)
class Row:
    """One cache in one table: its cells by text.

    Attributes:
        label: as tables name it.
        cells: by text.
        pooled: the texts whose figures are taken together: those that all rows of the table have.
    """

    label: str
    cells: dict[str, Finished]
    pooled: tuple[str, ...]

    @property
    def any(self) -> Finished:
        return next(iter(self.cells.values()))

    @property
    def primary(self) -> str:
        """The figure that stands for all; cells of the first version have no such entry."""
        return self.any.metrics.get("primary", "kl_mean")

    @property
    def higher_is_better(self) -> bool:
        return bool(self.any.metrics.get("higher_is_better", False))

    @property
    def value(self) -> float:
        """The primary figure, the mean over texts weighted by their scores."""
        cells = [self.cells[text] for text in self.pooled]
        weights = [cell.scores.shape[1] for cell in cells]
        return float(np.average([cell.metrics[self.primary] for cell in cells], weights=weights))

    @property
    def bits(self) -> float:
        """Of a packed token."""
        return 8.0 * BF16_BYTES if self.any.config["cache"] == EXACT else self._mean("bits_per_element")

    @property
    def bits_at_16(self) -> float:
        """Of all that is held, exact tokens at 16 bits."""
        if self.any.config["cache"] == EXACT:
            return 8.0 * BF16_BYTES
        if "bits_at_16" in self.any.metrics:
            return self._mean("bits_at_16")
        # Cells of the first version: a window in the model's dtype is all that came on top.
        exact = self._mean("bits_per_element_with_window") - self.bits
        return self.bits + exact * BF16_BYTES / getattr(torch, self.any.config["settings"]["dtype"]).itemsize

    def _mean(self, name: str) -> float:
        return float(np.mean([cell.metrics[name] for cell in self.cells.values()]))

    @property
    def simulated(self) -> bool:
        return bool(self.any.metrics.get("simulated", False))

    @property
    def scores(self) -> torch.Tensor:
        """float64 [k, n] of the pooled texts, one behind the other."""
        return torch.cat([self.cells[text].scores for text in self.pooled], dim=1)

    def blocks(self, texts: Iterable[str] | None = None) -> torch.Tensor:
        """Block means of the primary score over these texts, the pooled ones if None: float64 [n]."""
        cells = [self.cells[text] for text in (self.pooled if texts is None else texts)]
        return torch.tensor(np.concatenate([block_means(cell.scores[0], block_of(cell)) for cell in cells]))

    @property
    def spread(self) -> tuple[float, float] | None:
        """95 % interval of the mean primary score over the pooled texts."""
        return interval(self.blocks(), block=1)

    def divergence(self) -> dict[str, float]:
        """Figures of `scores.summary` over the pooled texts; NaN for top-5 agreement in cells that do not have it."""
        scores = self.scores
        if len(scores) == 4:
            scores = torch.cat((scores, torch.full_like(scores[:1], torch.nan)))
        return summary(scores)


@dataclass(frozen=True)
class Group:
    """Cells that may stand in one table: the same task, model, back end and settings.

    Attributes:
        title: what they share, in words.
        rows: by quality, the best first.
    """

    task: str
    title: str
    rows: list[Row]

    @property
    def texts(self) -> list[str]:
        return sorted({text for row in self.rows for text in row.cells})

    @property
    def is_divergence(self) -> bool:
        """KL by position, the exact model's beside the other's."""
        return self.rows[0].primary == "kl_mean"

    def find(self, label: str) -> Row | None:
        """The row of a cache, by its name in the table; without a window also as NAME@0."""
        label = re.sub(r"@0(?= |$)", "", label)
        return next((row for row in self.rows if row.label == label), None)


def length_of(cell: Finished) -> int:
    """Tokens of a context; of the longest prompt for tasks that make their own, roughly. 0 where it is not known."""
    length = cell.config["settings"].get("context_length") or 0
    return length if block_of(cell) > 1 else -(-length // LENGTH_STEP) * LENGTH_STEP


def block_of(cell: Finished) -> int:
    return int(cell.metrics.get("block", BLOCK))


def better(row: Row, other: Row) -> float:
    """p of the hypothesis that row is no better than other, over the blocks of the texts that both have."""
    texts = sorted(set(row.cells) & set(other.cells))
    sign = -1.0 if row.higher_is_better else 1.0
    return paired_p(sign * row.blocks(texts), sign * other.blocks(texts), block=1) if texts else float("nan")


def groups_of(cells: list[Finished]) -> list[Group]:
    """Cells to tables, sorted by title; of a cell that is there twice the later one counts."""
    calibrations = {c for cell in cells if (c := cell.config["settings"].get("calibration"))}
    members: dict[tuple, list[Finished]] = defaultdict(list)
    for cell in cells:
        settings = {k: v for k, v in cell.config["settings"].items() if k not in FREE} | {"length": length_of(cell)}
        shared = (*(cell.config[k] for k in ("task", "model", "backend")), json.dumps(settings, sort_keys=True))
        members[shared].append(cell)
    groups = []
    for (task, *_), found in members.items():
        rows: dict[str, dict[str, Finished]] = defaultdict(dict)
        for cell in found:
            rows[label_of(cell, len(calibrations) > 1)][Path(cell.config["text"]).name] = cell
        common = sorted(set.intersection(*(set(by_text) for by_text in rows.values())))
        ordered = [Row(label, by_text, tuple(common or sorted(by_text))) for label, by_text in rows.items()]
        ordered.sort(key=lambda row: (-row.value if row.higher_is_better else row.value, row.label))
        groups.append(Group(task, _title(found[0]), ordered))
    return sorted(groups, key=lambda group: group.title)


def label_of(cell: Finished, several: bool = False) -> str:
    """A cache as one would write it, and whether it is calibrated; by which artifact, where there are `several`."""
    name, digest = cell.config["cache"], cell.config["settings"].get("calibration")
    if not digest or cell.metrics.get("simulated") or name == EXACT:
        return name
    return f"{name} (calibrated{f' {digest[:6]}' if several else ''})"


def _title(cell: Finished) -> str:
    config: dict[str, Any] = cell.config
    settings = config["settings"]
    parts = [config["task"]]
    if length := length_of(cell):
        parts.append(f"contexts of {length:,} tokens" if block_of(cell) > 1 else f"up to {length:,} tokens")
    if shift := settings.get("position_offset"):
        parts.append(f"positions shifted by {shift:,}")
    return f"{', '.join(parts)}: {config['model']}, {BACKENDS.get(config['backend'], config['backend'])}"
