"""Perplexity on real text, beside the exact cache's.

Strict: every query reads what a decode step would read, packed tokens above all. A peer's usual figure takes one
forward pass in which a cache returns what came in, and so measures an exact cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from turboquant.evals.results import BLOCK, Finished, interval
from turboquant.evals.serving import Scored, Served
from turboquant.evals.tasks.base import Measured, Request, Sample, Task


class Perplexity(Task):
    name = "perplexity"
    primary = "perplexity"
    shown = ("perplexity", "exact_perplexity", "delta_ppl", "top1")
    rows = ("nll", "exact_nll", "same_top1", "top_token")
    block = BLOCK
    moves = True

    def samples(self, request: Request, text: str) -> list[Sample]:
        return [Sample([context[0].item()], context[1:].tolist()) for context in request.contexts(text)]

    def observe(self, served: Served, sample: Sample, request: Request) -> Scored:
        return served.score(sample.prompt, sample.answer)

    def judge(self, samples: list[Sample], exact: list[Scored] | None, seen: list[Scored], served: Served) -> Measured:
        nll, top = -torch.cat([s.logprobs for s in seen]), torch.cat([s.top for s in seen])
        figures: dict[str, Any] = {"perplexity": math.exp(nll.mean()), "perplexity_interval": _exp(self, nll)}
        missing = torch.full_like(nll, torch.nan)
        exact_nll = same = missing
        if exact is not None:
            exact_nll = -torch.cat([s.logprobs for s in exact])
            same = (top == torch.cat([s.top for s in exact])).double()
            more = _exp(self, nll - exact_nll)
            figures |= {
                "exact_perplexity": math.exp(exact_nll.mean()),
                "delta_ppl": math.expm1((nll - exact_nll).mean()),
                "delta_ppl_interval": more and tuple(x - 1 for x in more),
                "top1": same.mean().item(),
            }
        return Measured(figures, torch.stack((nll, exact_nll, same, top.double())))

    def recall(self, finished: Finished, samples: list[Sample]) -> list[Scored]:
        lengths = [len(sample.answer) for sample in samples]
        parts = (finished.scores[0].split(lengths), finished.scores[3].long().split(lengths))
        return [Scored(-nll, top) for nll, top in zip(*parts, strict=True)]


def _exp(task: Task, values: torch.Tensor) -> tuple[float, float] | None:
    """Interval of exp(mean of values)."""
    found = interval(values, block=task.block)
    return found and tuple(math.exp(x) for x in found)
