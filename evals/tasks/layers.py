"""Layers: divergence with one layer's cache alone compressed, for each layer in turn. What is costly is read there.

As many forward passes as layers, so one short context only unless --limit asks for more. Transformers alone can do it:
an engine compresses what it was started with.
"""

from __future__ import annotations

from typing import Any

import torch

from turboquant.evals.results import BLOCK
from turboquant.evals.scores import compare_states, next_tokens
from turboquant.evals.serving import Served
from turboquant.evals.tasks.base import Measured, Request, Sample, Task

LENGTH = 512
ALL = -1  # in place of a layer's index


class Layers(Task):
    """The sum over layers of the KL that each causes alone, beside that of all together.

    The scores' first row is that sum; a row for each layer is behind it.
    """

    name = "layers"
    primary = "kl_sum"
    shown = ("kl_sum", "kl_all", "worst_layer", "worst_kl")
    rows = ("kl_sum", "kl_of_each_layer")
    block = BLOCK
    needs_states = needs_exact = moves = True

    def samples(self, request: Request, text: str) -> list[Sample]:
        contexts = request.contexts(text)[: request.limit or 1, :LENGTH]
        return [Sample(context.tolist()) for context in contexts]

    def observe(self, served: Served, sample: Sample, request: Request) -> dict[int, torch.Tensor]:
        """Final hidden states by the layer that was compressed, and of ALL; of an exact cache the latter alone.

        Raises:
            ValueError: a back end other than Transformers.
        """
        if not hasattr(served, "session"):
            raise ValueError("layers compresses one layer at a time, which no engine does: use --backend hf.")
        ids, states = torch.tensor(sample.prompt), {}
        params = served.session.params if served.session else {}
        try:
            for layer in params:
                served.session.params = {layer: params[layer]}
                states[layer] = served.states(ids)
        finally:
            if served.session:
                served.session.params = params
        # The last one, so that the bytes that are measured are those of all layers.
        return {**states, ALL: served.states(ids)}

    def judge(self, samples: list[Sample], exact: list[dict], seen: list[dict], served: Served) -> Measured:
        layers = [layer for layer in seen[0] if layer != ALL]
        kl = torch.cat([
            torch.stack([_kl(p[ALL], q[layer], sample, served) for layer in (ALL, *layers)])
            for sample, p, q in zip(samples, exact, seen, strict=True)
        ], dim=1)  # fmt: skip
        scores = torch.cat((kl[1:].sum(0, keepdim=True), kl[1:]))
        means = kl[1:].mean(1).tolist()
        figures: dict[str, Any] = {**self.mean(self.primary, scores[0]), **self.mean("kl_all", kl[0])}
        if layers:
            figures |= {"worst_kl": max(means), "worst_layer": layers[means.index(max(means))]}
        return Measured({**figures, "layers": layers, "kl_by_layer": means}, scores)


def _kl(exact: torch.Tensor, other: torch.Tensor, sample: Sample, served: Served) -> torch.Tensor:
    targets = next_tokens(torch.tensor(sample.prompt)).to(exact.device)[: len(exact)]
    return compare_states(exact, other, targets, served.logits)[0]
