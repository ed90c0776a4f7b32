"""Long generation: how far greedy answers from a cache stay equal to the exact cache's, and whether they go round.

One other token changes all that follow, so that equal tokens tell when a cache first mattered and not how much. What
tells a broken cache is repetition beyond the exact model's own.
"""

from __future__ import annotations

from typing import Any

import torch

from turboquant.evals.results import Finished
from turboquant.evals.serving import Served
from turboquant.evals.tasks.base import Measured, Request, Sample, Task

NGRAM = 4


class LongGeneration(Task):
    name = "longgen"
    primary = "equal_tokens"
    shown = ("equal_tokens", "first_difference", "repetition", "exact_repetition", "loop", "exact_loop")
    higher_is_better = True
    rows = ("equal_tokens", "first_difference", "repetition", "exact_repetition", "loop", "exact_loop")
    needs_exact = True

    def samples(self, request: Request, text: str) -> list[Sample]:
        """Real text to go on with: whole contexts, shorter ones where the model could not read the answer, too."""
        room = request.max_length - request.max_new_tokens
        if room < 1:
            raise ValueError(
                f"longgen: this model reads {request.max_length} tokens, {request.max_new_tokens} are to be generated: "
                "ask for fewer (--max-new-tokens)."
            )
        return [Sample(context[:room].tolist()) for context in request.contexts(text)]

    def extra_tokens(self, request: Request) -> int:
        return request.max_new_tokens

    def settings(self, request: Request) -> dict[str, Any]:
        return {"max_new_tokens": request.max_new_tokens}

    def observe(self, served: Served, sample: Sample, request: Request) -> list[int]:
        return served.generate(sample.prompt, request.max_new_tokens, ignore_eos=True)

    def judge(
        self, samples: list[Sample], exact: list[list[int]] | None, seen: list[list[int]], served: Served
    ) -> Measured:
        columns = [
            (equal_share(a, b), first_difference(a, b), repetition(b), repetition(a), loop(b), loop(a))
            for a, b in zip(exact, seen, strict=True)
        ]
        scores = torch.tensor(columns, dtype=torch.float64).T
        figures: dict[str, Any] = {}
        for name, values in zip(self.rows, scores, strict=True):
            figures |= self.mean(name, values)
        records = [
            {"tokens": tokens, **dict(zip(self.rows, column, strict=True))}
            for tokens, column in zip(seen, columns, strict=True)
        ]
        return Measured({**figures, "generated_tokens": len(seen[0])}, scores, records)

    def recall(self, finished: Finished, samples: list[Sample]) -> list[list[int]]:
        return [record["tokens"] for record in finished.samples]


def equal_share(exact: list[int], other: list[int]) -> float:
    """Share of places that hold the same token."""
    return sum(a == b for a, b in zip(exact, other, strict=True)) / len(exact)


def first_difference(exact: list[int], other: list[int]) -> int:
    """Tokens before the first other one; all of them if there is none."""
    return next((i for i, (a, b) in enumerate(zip(exact, other, strict=True)) if a != b), len(exact))


def repetition(tokens: list[int], n: int = NGRAM) -> float:
    """Share of n-grams that were there before: 1 - distinct-n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loop(tokens: list[int]) -> int:
    """Tokens at the end that go round: the longest tail that is a cycle seen at least twice. 0 for none."""
    longest = 0
    for period in range(1, len(tokens) // 2 + 1):
        same = 0
        while same < len(tokens) - period and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        if same >= period:
            longest = max(longest, same + period)
    return longest
