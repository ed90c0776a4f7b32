"""What a step takes: from the roofline (`turboquant.planner.roofline`), or from steps that were measured.

Measured steps are described by five numbers, and a step's seconds are their weighted sum:

    seconds = step + prefill_token · P + prefill_product · Q + decode · B + decode_token · C

P: prompt tokens of this step; Q: products of one of them and a token that it attends to; B: sequences that decode; C:
their context lengths together. `benchmarks/step_costs.py` fits the weights, none below zero, to steps of a real engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turboquant.planner.roofline import Work

FEATURES = ("step", "prefill_token", "prefill_product", "decode", "decode_token")


class Costs(Protocol):
    def step_seconds(self, work: Work) -> float: ...


@dataclass(frozen=True)
class MeasuredCosts:
    """The five weights, in seconds."""

    step: float
    prefill_token: float
    prefill_product: float
    decode: float
    decode_token: float

    def step_seconds(self, work: Work) -> float:
        return float(np.dot(features(work), [getattr(self, name) for name in FEATURES]))


def features(work: Work) -> np.ndarray:
    """float64 [5], in the order of FEATURES."""
    tokens = sum(new for _, new in work.prefills)
    products = sum(new * cached + new * (new + 1) / 2 for cached, new in work.prefills)
    return np.array([1.0, tokens, products, len(work.decodes), float(work.decodes.sum())])


def fit(works: Sequence[Work], seconds: Sequence[float]) -> MeasuredCosts:
    """The weights that explain measured steps best, none negative.

    Each step counts by its relative error, so that short ones are not drowned, and outliers (a busy machine) weigh
    less: twice, steps are weighted by the inverse of how far they lie off.
    """
    from scipy.optimize import nnls

    rows, times = np.stack([features(work) for work in works]), np.asarray(seconds)
    weight = 1 / times
    for _ in range(3):
        found, _ = nnls(rows * weight[:, None], times * weight)
        off = np.abs(rows @ found - times) / times
        weight = 1 / times / np.maximum(1, off / max(np.median(off), 1e-9))
    return MeasuredCosts(*map(float, found))


def read_costs(path: Path) -> dict[str, MeasuredCosts]:
    """Measured costs by kv_cache_dtype.

    Raises:
        ValueError: the file is not one of `benchmarks/step_costs.py`.
    """
    try:
        costs = json.loads(path.read_text())["costs"]
        return {name: MeasuredCosts(*(float(row[feature]) for feature in FEATURES)) for name, row in costs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no file of step costs ({type(error).__name__}: {error}): benchmarks/step_costs.py makes one."
        ) from error


def costs_dict(costs: dict[str, MeasuredCosts]) -> dict[str, Any]:
    """What `read_costs` reads."""
    return {"costs": {name: asdict(cost) for name, cost in costs.items()}}
