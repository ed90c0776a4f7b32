"""Rivals in a Transformers cache: what is read back is theirs, the window is ours, and exact is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import EVERY_MODEL, kl, prompt, stepwise_logits

from turboquant.evals.hf_rivals import rival_cache
from turboquant.evals.rivals import RIVALS, Rival

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

LOSSLESS = Rival("lossless", lambda x: x, lambda x: x, lambda dim: 4 * dim, "nothing is lost")
ZERO_VALUES = replace(LOSSLESS, name="broken", value=torch.zeros_like)


def divergence(model, rival: Rival, window: int, ids: torch.Tensor) -> float:
    exact = model(ids).logits
    with rival_cache(model, rival, window):
        return kl(exact, model(ids).logits)


@EVERY_MODEL
@pytest.mark.parametrize("window", [0, 16])
def test_a_rival_that_loses_nothing_is_the_exact_cache(model, window):
    assert divergence(model, LOSSLESS, window, prompt(60)) < 1e-6


@EVERY_MODEL
def test_a_broken_rival_is_seen_and_a_window_over_all_hides_it(model):
    assert divergence(model, ZERO_VALUES, 0, prompt(60)) > 0.01
    assert divergence(model, ZERO_VALUES, 60, prompt(60)) < 1e-6


@EVERY_MODEL
@pytest.mark.parametrize("window", [0, 16])
def test_one_forward_reads_what_decoding_reads(model, window):
    ids = prompt(50)
    with rival_cache(model, RIVALS["int8"], window):
        torch.testing.assert_close(stepwise_logits(model, ids, [30, 1, 1, 18]), model(ids).logits, atol=5e-3, rtol=0)


def test_finer_rivals_are_closer_and_a_window_helps(llama):
    ids = prompt(200)
    int8, int4, upstream = (divergence(llama, RIVALS[name], 0, ids) for name in ("int8", "int4", "turboquant_3bit_nc"))
    assert 0 < int8 < 0.1 * int4 < upstream
    assert divergence(llama, RIVALS["int4"], 64, ids) < int4


def test_bytes_are_the_rival_s(llama):
    with rival_cache(llama, RIVALS["fp8"], 16) as session:
        llama(prompt(40), use_cache=True)
    assert session.packed_nbytes == 2 * 2 * 40 * 128
    assert session.nbytes > session.packed_nbytes


def test_another_cache_is_refused(llama):
    with rival_cache(llama, RIVALS["fp8"], 0):
        cache = llama(prompt(5), use_cache=True).past_key_values
    with rival_cache(llama, RIVALS["int8"], 0), pytest.raises(ValueError, match="holds fp8 with a window of 0"):
        llama(prompt(5), past_key_values=cache)
