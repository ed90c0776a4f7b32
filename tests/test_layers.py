"""The layers task: what compressing one layer alone costs, against the same damage done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import kl, prompt

from turboquant.evals.candidates import Candidate
from turboquant.evals.hf_backend import HFBackend
from turboquant.evals.rivals import RIVALS
from turboquant.evals.serving import EXACT_CACHE
from turboquant.evals.tasks.base import Sample
from turboquant.evals.tasks.layers import Layers

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

# K as it is, V lost.
NO_VALUES = replace(RIVALS["fp8"], name="no values", key=lambda x: x, value=torch.zeros_like)


def measured(model, candidate: Candidate, ids: torch.Tensor) -> dict:
    task, sample, seen = Layers(), Sample(ids[0].tolist()), []
    backend = HFBackend(model)
    for cache in (EXACT_CACHE, candidate):
        with backend.serve(cache, 200) as served:
            seen.append([task.observe(served, sample, None)])
            result = task.judge([sample], seen[0], seen[-1], served)
    return result.figures


def without_values(model, layers: tuple[int, ...], ids: torch.Tensor) -> torch.Tensor:
    projections = [model.model.layers[layer].self_attn.v_proj for layer in layers]
    handles = [x.register_forward_hook(lambda _module, _args, output: torch.zeros_like(output)) for x in projections]
    try:
        return model(ids).logits[0]
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("window", [0, 16])
def test_every_layer_by_hand(llama, window):
    ids = prompt(16 if window else 120)
    figures = measured(llama, Candidate(NO_VALUES, window), ids)
    assert figures["layers"] == [0, 1]
    # A window over all that a query reads hides what is lost behind it.
    exact = llama(ids).logits[0]
    expected = [0.0 if window else kl(exact, without_values(llama, (layer,), ids)) for layer in (0, 1)]
    assert figures["kl_by_layer"] == pytest.approx(expected, abs=1e-5)
    assert figures["kl_sum"] == pytest.approx(sum(expected), abs=1e-5)
    assert figures["kl_all"] == pytest.approx(
        0.0 if window else kl(exact, without_values(llama, (0, 1), ids)), abs=1e-5
    )
    if not window:
        assert min(expected) > 0.01
        assert figures["worst_kl"] == max(figures["kl_by_layer"])


def test_the_exact_cache_costs_nothing(llama):
    figures = measured(llama, EXACT_CACHE, prompt(60))
    assert figures["kl_all"] < 1e-9
    assert (figures["kl_sum"], figures["layers"]) == (0.0, [])


def test_an_engine_is_refused():
    with pytest.raises(ValueError, match="--backend hf"):
        Layers().observe(object(), Sample([1, 2, 3]), None)
