"""What a task is: data, what is asked of a served model, and what is made of its answers."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from turboquant.evals.divergence import tokenize
from turboquant.evals.results import Finished, interval
from turboquant.evals.serving import Served
from turboquant.text import load_text

LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Request:
    """How much of which data. Every task takes what concerns it.

    Attributes:
        model: folder with the tokenizer.
        max_length: tokens that the model can read.
        num_tokens, context_length: of tasks on text, which is cut into contexts; of each text.
        limit: samples of each task and text, or contexts in place of num_tokens; None for all.
        lengths: of prompts with needles and of RULER's tasks, in tokens; those beyond max_length are left out.
        depths: where needles lie, 0 for the start and 1 for the end.
        max_new_tokens: of the long generation.
        seed: of generated data.
    """

    model: Path
    max_length: int
    num_tokens: int = 4096
    context_length: int = 1024
    limit: int | None = None
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    max_new_tokens: int = 128
    seed: int = 0

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return _tokenizer(self.model)

    def tokens(self, text: str) -> list[int]:
        """All tokens of a text, no special ones."""
        return _tokens(self.model, text)

    def contexts(self, text: str) -> torch.Tensor:
        """A text's first tokens, int64 [num_contexts, context_length]."""
        length = min(self.context_length, self.num_tokens)
        total = self.limit * length if self.limit else self.num_tokens
        return _contexts(self.model, text, total, length)


@dataclass(frozen=True)
class Sample:
    """One question to a model.

    Attributes:
        prompt: token ids.
        answer: token ids behind it, to be scored; may be empty.
        about: what it is, for the samples file and for figures.
        shared: how many tokens of the prompt the next samples begin with, too.
    """

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    shared: int = 0


@dataclass(frozen=True)
class Measured:
    """What a task says of one cache.

    Attributes:
        figures: for JSON; the one called `Task.primary` first among them, `primary_interval` its 95 % interval.
        scores: float64 [k, n], rows named by `Task.rows`, row 0 the primary score of each sample or position.
        samples: one record for each sample, for JSON; empty where the scores say it all.
    """

    figures: dict[str, Any]
    scores: torch.Tensor
    samples: list[dict[str, Any]] = field(default_factory=list)


class Task:
    """One way to measure a cache; a subclass a file.

    Attributes:
        name: as in --tasks.
        primary: name of the figure that stands for all.
        higher_is_better: of it.
        shown: figures for a terminal.
        rows: what the rows of the scores are.
        block: how many neighbouring scores are resampled together: as many as are alike.
        has_text: asked once for each text; else once.
        needs_states: compares whole distributions, which an API does not give.
        needs_exact: is nothing without the exact cache's answers.
        uses_exact: takes them where they can be had.
        moves: still means the same with all positions shifted.
    """

    name = ""
    primary = ""
    higher_is_better = False
    shown: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    block = 1
    has_text = True
    needs_states = False
    needs_exact = False
    uses_exact = True
    moves = False

    @property
    def interval_name(self) -> str:
        """Of the primary figure."""
        return f"{self.primary}_interval"

    def samples(self, request: Request, text: str) -> list[Sample]:
        """The data, the same on every call.

        Raises:
            ValueError: a text that is too short, or a model that cannot be asked this.
        """
        raise NotImplementedError

    def extra_tokens(self, request: Request) -> int:
        """Tokens that may be generated behind a prompt and its answer."""
        return 0

    def settings(self, request: Request) -> dict[str, Any]:
        """What the figures depend on beside the samples' tokens."""
        return {}

    def observe(self, served: Served, sample: Sample, request: Request) -> Any:
        """What this model makes of a sample."""
        raise NotImplementedError

    def observe_all(
        self, served: Served, samples: list[Sample], request: Request, on_sample: Callable[[int], None]
    ) -> list[Any]:
        """One observation a sample; `on_sample` is told how many are done."""
        seen = []
        for sample in samples:
            seen.append(self.observe(served, sample, request))
            on_sample(len(seen))
        return seen

    def judge(self, samples: list[Sample], exact: list[Any] | None, seen: list[Any], served: Served) -> Measured:
        """Figures of observations, beside those of the exact cache where there are any."""
        raise NotImplementedError

    def recall(self, finished: Finished, samples: list[Sample]) -> list[Any] | None:
        """The observations behind a finished cell, None where it does not keep them."""
        return None

    def mean(self, name: str, values: torch.Tensor) -> dict[str, Any]:
        """A figure and its 95 % interval."""
        return {name: values.mean().item(), f"{name}_interval": interval(values, block=self.block)}


def digest(samples: list[Sample]) -> str:
    """SHA-256 of the samples' tokens, or of what they are about where they have none."""
    tokens = [token for sample in samples for token in (*sample.prompt, *sample.answer)]
    if not tokens:
        return hashlib.sha256(json.dumps([s.about for s in samples], sort_keys=True).encode()).hexdigest()
    return hashlib.sha256(torch.tensor(tokens).numpy().tobytes()).hexdigest()


@functools.cache
def _tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


@functools.cache
def _tokens(model: Path, text: str) -> list[int]:
    return _tokenizer(model)(load_text(text), add_special_tokens=False, verbose=False).input_ids


@functools.cache
def _contexts(model: Path, text: str, num_tokens: int, length: int) -> torch.Tensor:
    return tokenize(model, load_text(text), num_tokens, length)
