"""Pictures of a study: throughput against concurrency, or the batch over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turboquant.simulator.study import Run


def draw(runs: Sequence[Run], title: str, path: Path) -> None:
    """Two panels. Several concurrencies: throughput and time to first token over them; one: batch and blocks over time.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no run to draw, or a file format that matplotlib does not write.
    """
    from matplotlib.figure import Figure

    done = [run for run in runs if run.outcome]
    if not done:
        raise ValueError("nothing to draw: no run fits into the pool.")
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    if len({run.max_concurrency for run in done}) > 1:
        _sweep(panels, done)
    else:
        _course(panels, done)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"Simulation: {title}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _sweep(panels, runs: Sequence[Run]) -> None:
    for name in dict.fromkeys(run.kv_cache_dtype for run in runs):
        own = [run for run in runs if run.kv_cache_dtype == name]
        limits = [run.max_concurrency for run in own]
        panels[0].plot(limits, [run.outcome.steady_tokens_per_s() for run in own], marker="o", label=name)
        panels[1].plot(limits, [run.outcome.figures()["ttft_p50_s"] for run in own], marker="o", label=name)
    for panel, what in zip(panels, ("generated tokens/s, steady", "time to first token, median, s"), strict=True):
        panel.set(xlabel="requests at once", ylabel=what, xscale="log")
    panels[1].set_yscale("log")


def _course(panels, runs: Sequence[Run]) -> None:
    for run in runs:
        course = run.outcome.timeline
        panels[0].step(course.time_s, course.batch, where="pre", label=run.kv_cache_dtype)
        panels[1].step(course.time_s, course.waiting, where="pre", label=run.kv_cache_dtype)
    for panel, what in zip(panels, ("requests in the batch", "requests waiting"), strict=True):
        panel.set(xlabel="seconds", ylabel=what)
