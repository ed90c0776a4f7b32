"""Rivals in a Transformers cache: what is read back is theirs, the window is ours, and exact is exact."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
import torch
from cache_cases import EVERY_MODEL, kl, prompt, stepwise_logits

from turboquant.evals.hf_grouped import GroupedRivalLayer
from turboquant.evals.hf_rivals import boundary_layers, rival_cache
from turboquant.evals.rivals import RIVALS, Rival

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

LOSSLESS = Rival("lossless", lambda x: x, lambda x: x, lambda dim: 4 * dim, "nothing is lost")
ZERO_VALUES = replace(LOSSLESS, name="broken", value=torch.zeros_like)


@pytest.fixture(scope="module")
def llama_of_6():
    config = models.LlamaConfig(**models.COMMON, **{**models.DENSE, "num_hidden_layers": 6})
    return models.build(models.LlamaForCausalLM, config).double()


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


def kivi_by_hand(query, key, value, rival: Rival) -> torch.Tensor:
    """Attention of one head, [T, D] each, query by query, as KIVI's decode step does it."""
    outputs = []
    for i in range(len(query)):
        begin = i // 64 * 64  # what was quantised before this step
        read_key = key[: i + 1].clone()
        for group in range(0, begin, 64):
            read_key[group : group + 64] = rival.key(key[group : group + 64])
        read_value = value[: i + 1].clone()
        old = max(0, i - 64)
        read_value[:old] = rival.value(value[:old])
        outputs.append(torch.softmax(read_key @ query[i] * 64**-0.5, dim=0) @ read_value)
    return torch.stack(outputs)


def test_kivi_reads_its_residual_exactly_and_nothing_else():
    query, key, value = torch.randn(3, 200, 64, generator=torch.Generator().manual_seed(0)).double() * 2
    rival = replace(RIVALS["kivi2"], key=torch.zeros_like, value=lambda x: -x)
    layer = GroupedRivalLayer(None, rival, 0)
    layer.update(key[None, None], value[None, None])
    visible = torch.ones(200, 200, dtype=torch.bool).tril()
    read = layer.attend(query[None, None].float(), visible[None], 64**-0.5, 0.0, None)[0, :, 0]
    torch.testing.assert_close(read.double(), kivi_by_hand(query, key, value, rival), atol=1e-5, rtol=0)


@EVERY_MODEL
@pytest.mark.parametrize("window", [0, 64])
def test_kivi_forward_in_one_step_and_in_many(model, window):
    ids = prompt(150)
    with rival_cache(model, RIVALS["kivi4"], window):
        torch.testing.assert_close(stepwise_logits(model, ids, [100, 1, 1, 48]), model(ids).logits, atol=5e-3, rtol=0)


def test_kivi_with_a_window_reads_as_much_as_any_other(llama):
    """K and V that are all wrong are seen by no query whose window covers all before it."""
    broken = replace(RIVALS["kivi4"], key=torch.zeros_like, value=torch.zeros_like)
    assert divergence(llama, broken, 64, prompt(64)) < 1e-6
    assert divergence(llama, broken, 64, prompt(200)) > 0.01


def test_bytes_of_kivi_s_residual(llama):
    with rival_cache(llama, RIVALS["kivi4"], 0) as session:
        llama(prompt(256), use_cache=True)
    assert session.packed_nbytes == 2 * 2 * 256 * 72
    # 32 of K, on average, and 64 of V, in float64; their packed copies are not kept.
    exact = 2 * 2 * (32 + 64) * 64
    assert session.exact_nbytes == exact * 8
    assert session.nbytes == session.packed_nbytes + exact * 8 - 2 * 2 * 96 * 36


def test_boundary_layers_are_exact_and_counted(llama_of_6):
    ids, broken = prompt(60), replace(ZERO_VALUES, boundary=2, slot_bytes=lambda dim: dim)
    assert boundary_layers(llama_of_6, 2) == {0, 1, 4, 5}
    for window in (0, 16):
        with rival_cache(llama_of_6, broken, window) as session:
            llama_of_6(ids, use_cache=True)
        exact = [layer.rival.name == "16 bits" for layer in session.layers]
        assert exact == [True, True, False, False, True, True]
        assert session.packed_nbytes == 60 * 2 * (2 * 64 + 4 * 4 * 64)
    everything = replace(broken, boundary=3)
    assert divergence(llama_of_6, everything, 0, ids) < 1e-6 < 0.01 < divergence(llama_of_6, broken, 0, ids)


def test_models_with_recurrent_layers_have_no_boundary(qwen35):
    assert boundary_layers(qwen35, 2) == set()
