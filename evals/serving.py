"""What a task needs of a model that is served from some cache, whoever serves it.

Every back end reads strictly: each query, of a prompt's tokens too, reads what a decode step at its position would
read. A server does so only if it was started for it (`server_backend.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from turboquant.evals.candidates import Candidate

UNBOUNDED = 1 << 20  # tokens, for models that name no limit
EXACT_CACHE = Candidate(None, 0)


@dataclass(frozen=True)
class Scored:
    """A continuation of n tokens under a model.

    Attributes:
        logprobs: float64 [n], of each token given all before it, natural logarithm.
        top: int64 [n], the most likely token at each place.
    """

    logprobs: torch.Tensor
    top: torch.Tensor


class Served(Protocol):
    """A model whose cache is one candidate's. Token ids in and out."""

    candidate: Candidate

    def hold(self, prefix: list[int]) -> None:
        """The next prompts begin with these tokens: a back end that can reads them once."""

    def score(self, prompt: list[int], continuation: list[int]) -> Scored:
        """How likely a continuation is behind a prompt of at least one token."""

    def generate(
        self, prompt: list[int], max_tokens: int, *, stop: tuple[str, ...] = (), ignore_eos: bool = False
    ) -> list[int]:
        """Greedy continuation, which ends with the model's end-of-sequence token or one of the texts in `stop`."""

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] token ids to final hidden states [n, hidden] of the first n positions, n = T or T - 1."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Final hidden states [n, hidden] to logits [n, vocabulary]."""

    def bits(self, num_tokens: int) -> dict[str, float]:
        """All-inclusive bits per element: `bits_per_element` of packed tokens, `bits_per_element_with_window` of all
        that is held of num_tokens, `bits_at_16` the same with exact tokens of 16 bits."""


class Backend(Protocol):
    """Serves a model from one cache after the other.

    Attributes:
        name: as in --backend.
        has_states: whether `Served` has `states` and `logits`, whole distributions.
        max_length: tokens that the model can read, prompt and answer.
        settings: what its figures depend on, for `Cell.settings`.
    """

    name: str
    has_states: bool
    max_length: int
    settings: dict[str, Any]

    def check(self, candidates: list[Candidate]) -> None:
        """Raises:
        ValueError: one that this back end cannot serve; the message says what can.
        """

    def has(self, candidate: Candidate) -> bool:
        """Can it be served, the exact cache above all? Only a server holds what it was started with."""

    def serve(self, candidate: Candidate, max_tokens: int) -> AbstractContextManager[Served]:
        """The model on this cache while the block runs, for sequences of up to max_tokens."""
