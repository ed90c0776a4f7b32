"""Divergence: how far the next-token distributions on real text are from the same model's with an exact cache."""

from __future__ import annotations

from typing import Any

import torch

from turboquant.evals.results import BLOCK
from turboquant.evals.scores import by_position, compare_states, next_tokens, summary
from turboquant.evals.serving import Served
from turboquant.evals.tasks.base import Measured, Request, Sample, Task


class Divergence(Task):
    """KL at every position of a text, teacher-forced (`evals/divergence.py` has the equation)."""

    name = "divergence"
    primary = "kl_mean"
    interval_name = "kl_interval"
    shown = ("kl_mean", "kl_p99", "top1", "delta_ppl")
    rows = ("kl", "same_top1", "exact_nll", "nll", "same_top5")
    block = BLOCK
    needs_states = needs_exact = moves = True

    def samples(self, request: Request, text: str) -> list[Sample]:
        return [Sample(context.tolist()) for context in request.contexts(text)]

    def observe(self, served: Served, sample: Sample, request: Request) -> torch.Tensor:
        """Final hidden states [n, hidden], from which the distributions are made when they are compared."""
        return served.states(torch.tensor(sample.prompt))

    def judge(
        self, samples: list[Sample], exact: list[torch.Tensor] | None, seen: list[torch.Tensor], served: Served
    ) -> Measured:
        rows = []
        for sample, p, q in zip(samples, exact, seen, strict=True):
            targets = next_tokens(torch.tensor(sample.prompt)).to(p.device)[: len(p)]
            rows.append(compare_states(p, q, targets, served.logits)[:, self.first_scored(sample) :])
        scores = torch.cat(rows, dim=1)
        figures: dict[str, Any] = {**summary(scores), **self.mean("kl", scores[0])}
        del figures["kl"]
        figures["kl_by_position"] = by_position(scores[0], len(samples))
        return Measured(figures, scores)

    def first_scored(self, sample: Sample) -> int:
        """The first position of a context that counts."""
        return 0
