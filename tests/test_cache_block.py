"""The cache object and the block: which caches are taken or refused, and what the block does and leaves behind."""

from __future__ import annotations

import contextlib

import pytest
import torch
from cache_cases import DENSE_MODELS, DENSE_TOKEN_BYTES, EVERY_MODEL, FMT, SAME, generate, prompt, stepwise_logits
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer, QuantizedCache

from turboquant.cache import turboquant_cache
from turboquant.cache_layer import TurboQuantLayer
from turboquant.formats import PRESETS
from turboquant.key_bias import MissingKeyMeanError

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad", "window_off")


# The cache object.


@EVERY_MODEL
@pytest.mark.parametrize("with_config", [True, False], ids=["with-config", "bare"])
def test_an_empty_dynamic_cache_is_compressed_in_place(model, with_config):
    ids = prompt(20)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    if not with_config and model.config.model_type == "qwen3_5_moe_text":
        pytest.skip("Transformers itself needs the config to build a hybrid cache")
    with turboquant_cache(model, FMT) as session:
        output = model(ids, past_key_values=cache, use_cache=True)
        expected = model(ids).logits
        assert session.cache is not cache
    assert output.past_key_values is cache
    assert cache.get_seq_length() == 20
    assert [i for i, x in enumerate(cache.layers) if isinstance(x, TurboQuantLayer)] == list(session.params)
    assert torch.equal(output.logits, expected)


@EVERY_MODEL
def test_a_cache_with_exact_tokens_is_refused(model):
    cache = model(prompt(5), use_cache=True).past_key_values
    with turboquant_cache(model, FMT), pytest.raises(ValueError, match=r"DynamicLayer with 5 exact tokens: start with"):
        model(prompt(5), past_key_values=cache)


def quantized_cache(model) -> QuantizedCache:
    # Its constructor needs a quantisation package; what is refused is the class.
    return QuantizedCache.__new__(QuantizedCache)


def static_cache(model) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=64)


@DENSE_MODELS
@pytest.mark.parametrize("make", [static_cache, quantized_cache], ids=lambda make: make.__name__)
def test_other_caches_are_refused(model, make):
    cache = make(model)
    with (
        turboquant_cache(model, FMT),
        pytest.raises(TypeError, match=f"cannot compress a {type(cache).__name__}: call"),
    ):
        model(prompt(5), past_key_values=cache)


def test_generate_with_a_cache_implementation_is_refused(llama):
    with turboquant_cache(llama, FMT), pytest.raises(TypeError, match="cannot compress a StaticCache"):
        generate(llama, input_ids=prompt(5), cache_implementation="static")


def test_a_cache_of_another_format_is_refused(llama):
    """It would go on in its own format, and be reported as this one."""
    with turboquant_cache(llama, "turboquant2.5"):
        cache = llama(prompt(5), use_cache=True).past_key_values
    with turboquant_cache(llama, "turboquant4"), pytest.raises(ValueError, match=r"turboquant2\.5"):
        llama(prompt(5), past_key_values=cache)


@EVERY_MODEL
def test_crop_of_the_whole_cache(model):
    """Take back tokens and go on with others. A linear-attention state cannot be taken back, exact or not."""
    if model.config.model_type == "qwen3_5_moe_text":
        pytest.skip("Transformers crops no linear-attention state without a recording")
    ids, other = prompt(30), prompt(12, seed=1)
    with turboquant_cache(model, FMT):
        cache = model(ids, use_cache=True).past_key_values
        assert cache.is_croppable
        cache.crop(-10)
        cropped = model(other, past_key_values=cache, use_cache=True).logits
        expected = model(torch.cat((ids[:, :20], other), dim=1)).logits[:, 20:]
    torch.testing.assert_close(cropped, expected, atol=SAME, rtol=0)


@EVERY_MODEL
def test_reordering_the_whole_cache(model):
    """As beam search does: rows change places in every layer, linear attention's states too."""
    ids, other = prompt(20, batch=3), prompt(6, seed=1, batch=3)
    rows = torch.tensor([2, 2, 0])
    with turboquant_cache(model, FMT):
        cache = model(ids, use_cache=True).past_key_values
        cache.reorder_cache(rows)
        after = model(other, past_key_values=cache, use_cache=True).logits
        expected = model(torch.cat((ids[rows], other), dim=1)).logits[:, 20:]
    torch.testing.assert_close(after, expected, atol=SAME, rtol=0)


@DENSE_MODELS
def test_repeating_and_selecting_the_whole_cache(model):
    ids, other = prompt(20, batch=2), prompt(6, seed=1, batch=2)
    with turboquant_cache(model, FMT):
        cache = model(ids, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 1]))
        after = model(other, past_key_values=cache, use_cache=True).logits
        expected = model(torch.cat((ids[[1, 0]], other), dim=1)).logits[:, 20:]
    torch.testing.assert_close(after, expected, atol=SAME, rtol=0)


def test_a_hybrid_keeps_its_linear_states(qwen35):
    ids = prompt(40)
    exact = qwen35(ids, use_cache=True).past_key_values
    with turboquant_cache(qwen35, FMT) as session:
        cache = qwen35(ids, use_cache=True).past_key_values
    kinds = qwen35.config.layer_types
    assert list(session.params) == [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]
    for kind, layer in zip(kinds, cache.layers, strict=True):
        assert type(layer) is (TurboQuantLayer if kind == "full_attention" else LinearAttentionLayer)
    assert session.nbytes == 40 * 2 * 2 * PRESETS[FMT].slot_bytes(256)
    # Nothing compressed stands before the first full-attention layer.
    for index in range(3):
        assert torch.equal(cache.layers[index].recurrent_states[0], exact.layers[index].recurrent_states[0])


@DENSE_MODELS
def test_the_cache_outlives_the_block(model):
    """Its layers do the work; the block only puts them in."""
    ids = prompt(30)
    with turboquant_cache(model, FMT):
        cache = model(ids[:, :20], use_cache=True).past_key_values
        inside = stepwise_logits(model, ids, [20, 10])[:, 20:]
    outside = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(outside, inside, atol=SAME, rtol=0)


# The block.


class Interrupted(Exception):
    pass


@EVERY_MODEL
@pytest.mark.parametrize("raises", [False, True], ids=["normal", "exception"])
def test_the_block_leaves_no_trace(model, raises):
    ids = prompt(20)
    hooks = len(model.get_decoder()._forward_pre_hooks)
    exact = model(ids, use_cache=True)
    with contextlib.suppress(Interrupted), turboquant_cache(model, FMT):
        assert not torch.equal(model(ids).logits, exact.logits)
        if raises:
            raise Interrupted
    assert len(model.get_decoder()._forward_pre_hooks) == hooks
    again = model(ids, use_cache=True)
    assert torch.equal(again.logits, exact.logits)
    assert not any(isinstance(layer, TurboQuantLayer) for layer in again.past_key_values.layers)


def test_a_refused_model_gets_no_hook(qwen2):
    hooks = len(qwen2.get_decoder()._forward_pre_hooks)
    with pytest.raises(MissingKeyMeanError), turboquant_cache(qwen2, FMT, key_mean="none"):
        pass
    assert len(qwen2.get_decoder()._forward_pre_hooks) == hooks


def test_two_models_at_once(llama, qwen2):
    ids = prompt(20)
    with turboquant_cache(llama, FMT) as one, turboquant_cache(qwen2, "turboquant4") as two:
        both = llama(ids).logits, qwen2(ids).logits
    assert (one.nbytes, two.nbytes) == (20 * DENSE_TOKEN_BYTES, 20 * 4 * PRESETS["turboquant4"].slot_bytes(64))
    with turboquant_cache(llama, FMT):
        assert torch.equal(llama(ids).logits, both[0])
    with turboquant_cache(qwen2, "turboquant4"):
        assert torch.equal(qwen2(ids).logits, both[1])


def test_two_blocks_on_one_model(llama):
    """The inner one counts, or is refused; what must not be: it says 4 bits and measures 2.5."""
    ids = prompt(20)
    with turboquant_cache(llama, "turboquant4"):
        expected = llama(ids).logits
    with turboquant_cache(llama, "turboquant2.5"):
        try:
            with turboquant_cache(llama, "turboquant4") as inner:
                logits = llama(ids).logits
        except (RuntimeError, ValueError) as error:
            assert "turboquant_cache" in str(error)
            return
    assert inner.nbytes == 20 * 4 * PRESETS["turboquant4"].slot_bytes(64)
    assert torch.equal(logits, expected)


def test_the_bare_decoder_is_a_model_too(llama):
    ids = prompt(20)
    with turboquant_cache(llama.model, FMT) as session:
        hidden = llama.model(ids).last_hidden_state
    assert session.nbytes == 20 * DENSE_TOKEN_BYTES
    with turboquant_cache(llama, FMT):
        assert torch.equal(llama(ids).logits, llama.lm_head(hidden))


def test_the_seed_is_the_rotation_s(llama):
    ids, logits = prompt(20), []
    for seed in (0, 0, 1):
        with turboquant_cache(llama, FMT, seed=seed):
            logits.append(llama(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fmt": "turboqant4"}, "Did you mean 'turboquant4'"),
        ({"fmt": FMT, "key_mean": "calibrated"}, "key_mean.*calibrated.*auto.*none"),
    ],
    ids=["format", "key-mean"],
)
def test_wrong_arguments(qwen2, arguments, message):
    with pytest.raises(ValueError, match=message), turboquant_cache(qwen2, **arguments):
        pass
