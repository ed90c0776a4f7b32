"""Copying: divergence on the second half of contexts that repeat their first half.

What is copied was read half a context before, so that nothing but the packed cache can tell what comes next.
"""

from __future__ import annotations

from turboquant.evals.divergence import repeated
from turboquant.evals.tasks.base import Request, Sample
from turboquant.evals.tasks.divergence import Divergence


class Copying(Divergence):
    name = "copying"

    def samples(self, request: Request, text: str) -> list[Sample]:
        return [Sample(context.tolist()) for context in repeated(request.contexts(text))]

    def first_scored(self, sample: Sample) -> int:
        return len(sample.prompt) // 2
