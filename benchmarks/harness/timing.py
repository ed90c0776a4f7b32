"""Timing that a busy machine spoils least: all candidates in turn, again and again, and the median of each."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def alternate(candidates: Mapping[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, list[float]]:
    """Run every candidate once a round, after one round of warm-up, until `seconds` are over.

    Returns:
        Milliseconds of each run, by candidate.
    """
    for run in candidates.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    started, rounds = time.perf_counter(), 0
    while rounds < least or time.perf_counter() - started < seconds:
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - begin) * 1e3)
        rounds += 1
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def spread(times: list[float]) -> list[float]:
    """20th, 50th and 80th percentile."""
    ordered = sorted(times)
    return [round(ordered[min(int(len(ordered) * p), len(ordered) - 1)], 4) for p in (0.2, 0.5, 0.8)]


def slope(contexts: list[int], times_ms: list[float]) -> float:
    """Nanoseconds that a token of context adds: least squares, relative errors weighing the same."""
    x, y = torch.tensor(contexts, dtype=torch.float64), torch.tensor(times_ms, dtype=torch.float64)
    design = torch.stack((x, torch.ones_like(x)), dim=1) / y[:, None]
    return float(torch.linalg.lstsq(design, torch.ones_like(y)[:, None]).solution[0, 0]) * 1e6


def machine() -> dict[str, str]:
    """What to name beside a figure."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.machine(), "torch": torch.__version__}
