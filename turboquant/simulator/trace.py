"""Requests: read from a file, or drawn. Names of settings are those of `vllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KINDS = "a number, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        arrival_s: float64 [num_requests], seconds from the start.
        prompt_tokens, output_tokens: int64 [num_requests], both at least 1.
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, from `Lengths.parse`."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises:
        ValueError: no distribution; the message names the forms.
        """
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        expected = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind, 0)
        ordered = kind != "uniform" or values[:1] <= values[1:2]
        if not expected or len(values) != expected or values[0] < 1 or min(values) < 0 or not ordered:
            raise ValueError(f"length {text!r} is not known: give {KINDS}, in tokens.")
        return cls(kind, *values)

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [count]."""
        if self.kind == "fixed":
            return np.full(count, int(self.first))
        if self.kind == "uniform":
            return rng.integers(int(self.first), int(self.second) + 1, count)
        return np.maximum(1, np.rint(self.first * rng.lognormal(0, self.second, count))).astype(np.int64)


def generate(
    count: int, prompts: Lengths, outputs: Lengths, request_rate: float | None, burstiness: float, seed: int
) -> Trace:
    """Draw requests.

    Args:
        request_rate: arrivals per second; None for all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(count)
    if request_rate is not None:
        gaps = rng.gamma(burstiness, 1 / (request_rate * burstiness), count)
        arrivals = np.cumsum(gaps) - gaps[0]
    return Trace(arrivals, prompts.draw(count, rng), outputs.draw(count, rng))


def read_trace(path: Path) -> Trace:
    """Read JSON lines with arrival_s, prompt_tokens and output_tokens.

    Raises:
        ValueError: a line is not such an object; the message names it.
    """
    rows: list[Sequence[float]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            row = (float(entry["arrival_s"]), int(entry["prompt_tokens"]), int(entry["output_tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: no request ({type(error).__name__}: {error}). A line is "
                '{"arrival_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}.'
            ) from error
        if row[0] < 0 or row[1] < 1 or row[2] < 1:
            raise ValueError(f"{path}, line {number}: times must not be negative, and token counts at least 1.")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no requests.")
    arrivals, prompts, outputs = map(np.array, zip(*sorted(rows), strict=True))
    return Trace(arrivals, prompts.astype(np.int64), outputs.astype(np.int64))


def check_lengths(trace: Trace, max_model_len: int) -> None:
    """Raises:
    ValueError: a request is longer than the model's longest sequence.
    """
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    if longest > max_model_len:
        raise ValueError(
            f"a request has {longest:,} tokens, prompt and output together, and the longest sequence is "
            f"{max_model_len:,}: raise --max-model-len, or shorten the requests."
        )
