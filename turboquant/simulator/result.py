"""Figures of a replay: throughput, time to first token, preemptions, batch size over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turboquant.simulator.trace import Trace


@dataclass
class Timeline:
    """One entry an event: its end, and what the steps before it had.

    Attributes:
        time_s: end of the steps.
        batch: requests that ran.
        waiting: requests that waited.
        blocks: in use.
        tokens: generated.
    """

    time_s: list[float] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, time_s: float, batch: int, waiting: int, blocks: int, tokens: int) -> None:
        for series, value in zip(vars(self).values(), (time_s, batch, waiting, blocks, tokens), strict=True):
            series.append(value)

    def mean_batch(self) -> float:
        """Over time."""
        return float(np.average(self.batch, weights=np.diff(self.time_s, prepend=0.0)))


@dataclass(frozen=True)
class Outcome:
    """Times by request, in seconds from the start, and the course of the run."""

    trace: Trace
    arrival_s: np.ndarray
    first_token_s: np.ndarray
    finish_s: np.ndarray
    preemptions: int
    timeline: Timeline

    @property
    def seconds(self) -> float:
        return float(self.finish_s.max() - self.arrival_s.min())

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens, over the whole run."""
        return float(self.trace.output_tokens.sum() / self.seconds)

    def steady_tokens_per_s(self) -> float:
        """Generated tokens per second between the first end of a request and the last arrival: no filling or draining.

        Of the whole run where there is no such time.
        """
        begin, end = float(self.finish_s.min()), float(self.arrival_s.max())
        times, tokens = np.array(self.timeline.time_s), np.array(self.timeline.tokens)
        inside = (times > begin) & (times <= end)
        if inside.sum() < 2:
            return self.tokens_per_s
        return float(tokens[inside].sum() / (times[inside].max() - begin))

    def figures(self) -> dict[str, Any]:
        ttft = self.first_token_s - self.arrival_s
        outputs = self.trace.output_tokens
        several = outputs > 1
        tpot = (self.finish_s - self.first_token_s)[several] / (outputs[several] - 1)
        return {
            "requests": len(self.trace),
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "steady_tokens_per_s": self.steady_tokens_per_s(),
            "prompt_tokens_per_s": float(self.trace.prompt_tokens.sum() / self.seconds),
            "ttft_mean_s": float(ttft.mean()),
            "ttft_p50_s": float(np.median(ttft)),
            "ttft_p99_s": float(np.quantile(ttft, 0.99)),
            "tpot_mean_s": float(tpot.mean()) if several.any() else None,
            "preemptions": self.preemptions,
            "batch_mean": self.timeline.mean_batch(),
            "batch_max": max(self.timeline.batch),
            "blocks_max": max(self.timeline.blocks),
        }
