"""The exact window in Transformers: what each query reads, in one forward pass as in decoding."""

from __future__ import annotations

import pytest
import torch
from cache_cases import EVERY_MODEL, FMT, ONE_CODE, generate, kl, pad_left, prompt, stepwise_logits
from models import build, llama_config
from transformers import GptOssConfig, GptOssForCausalLM

from turboquant.cache import turboquant_cache
from turboquant.formats import PRESETS
from turboquant.hf_window import WindowedLayer
from turboquant.window import FIRST_TOKENS, window_size

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

LENGTH = 120


@EVERY_MODEL
def test_a_window_over_everything_is_the_exact_cache(model):
    ids = prompt(LENGTH)
    with turboquant_cache(model, FMT, window=LENGTH):
        torch.testing.assert_close(model(ids).logits, model(ids).logits)
        windowed = model(ids).logits
    torch.testing.assert_close(windowed, model(ids).logits, atol=1e-3, rtol=0)


@EVERY_MODEL
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [70, 1, 1, 48], [33, 87]], ids=["tokens", "chunks", "two"])
def test_one_forward_reads_what_decoding_reads(model, sizes):
    ids = prompt(LENGTH)
    with turboquant_cache(model, FMT, window=16):
        torch.testing.assert_close(stepwise_logits(model, ids, sizes), model(ids).logits, atol=ONE_CODE, rtol=0)


@EVERY_MODEL
@pytest.mark.parametrize("window", [4, 64])
def test_a_padded_batch_generates_what_single_prompts_do(model, window):
    """Queries of padding read nothing at all, and must not spoil the recurrent state of a hybrid."""
    rows = [prompt(length, seed=length) for length in (23, 9, 30)]
    with turboquant_cache(model, FMT, window=window):
        batch = generate(model, **pad_left(rows))
        alone = [generate(model, input_ids=row) for row in rows]
    for answer, row, expected in zip(batch, rows, alone, strict=True):
        assert torch.equal(answer[30:], expected[0, row.shape[1] :])


@EVERY_MODEL
def test_a_larger_window_is_closer(model):
    ids = prompt(200)
    exact, distances = model(ids).logits, []
    for window in (0, 8, 64):
        with turboquant_cache(model, "turboquant2.5", window=window):
            distances.append(kl(exact, model(ids).logits))
    assert distances[0] > distances[1] > distances[2] > 0


def test_which_tokens_are_exact(llama):
    """Keys in the middle are packed, the first few and the newest are not: by corrupting what is held."""
    ids = prompt(LENGTH)
    with turboquant_cache(llama, FMT, window=16) as session:
        llama(ids, use_cache=True)
    layer = session.layers[0]
    assert isinstance(layer, WindowedLayer)
    # A query at LENGTH reads exactly from LENGTH - 16 + 1 on; the one at LENGTH is yet to come.
    assert layer.exact_at.tolist() == [*range(FIRST_TOKENS), *range(LENGTH - 15, LENGTH)]


def test_bytes_are_packed_and_exact_ones(llama):
    with turboquant_cache(llama, FMT, window=16) as session:
        llama(prompt(LENGTH), use_cache=True)
    exact_tokens, element_bytes = FIRST_TOKENS + 15, 8  # the fixture runs in float64
    assert session.packed_nbytes == LENGTH * 4 * PRESETS[FMT].slot_bytes(64)
    assert session.nbytes - session.packed_nbytes == exact_tokens * 4 * 2 * 64 * element_bytes


def test_a_padded_batch_reads_what_single_prompts_read(llama):
    rows = [prompt(LENGTH), prompt(70, seed=1), prompt(20, seed=2)]
    batch = pad_left(rows)
    # Without its own positions a padded row turns its keys further, and other keys have other codes.
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with turboquant_cache(llama, FMT, window=16):
        padded = llama(**batch).logits
        for row, logits in zip(rows, padded, strict=True):
            torch.testing.assert_close(logits[-row.shape[1] :], llama(row).logits[0], atol=ONE_CODE, rtol=0)


@EVERY_MODEL
def test_generation_with_beams_and_answers(model):
    ids = prompt(50)
    with turboquant_cache(model, FMT, window=16):
        beams = generate(model, input_ids=ids, num_beams=3)
        again = generate(model, input_ids=ids, num_beams=3)
    assert torch.equal(beams, again)


def test_crop_takes_exact_tokens_back_too(llama):
    ids, other = prompt(LENGTH), prompt(10, seed=3)
    with turboquant_cache(llama, FMT, window=16) as session:
        cache = llama(ids, use_cache=True).past_key_values
        cache.crop(-6)
        assert session.layers[0].exact_at.max() == LENGTH - 7
        logits = llama(other, past_key_values=cache).logits
    assert logits.isfinite().all()


def test_sinks_and_sliding_layers_beside_windowed_ones():
    config = GptOssConfig(
        **{**llama_config().to_diff_dict(), "model_type": "gpt_oss", "architectures": None}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "hidden_size": 128}
        | {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    )
    model, ids = build(GptOssForCausalLM, config), prompt(60)
    exact = model(ids).logits
    with turboquant_cache(model, FMT, window=60):
        torch.testing.assert_close(model(ids).logits, exact, atol=1e-3, rtol=0)


def test_the_block_gives_the_attention_back(llama):
    before = llama.config._attn_implementation
    with pytest.raises(KeyError), turboquant_cache(llama, FMT, window=16):
        assert llama.config._attn_implementation == "turboquant"
        raise KeyError
    assert llama.config._attn_implementation == before


def test_a_cache_of_another_window_is_refused(llama):
    with turboquant_cache(llama, FMT, window=16):
        cache = llama(prompt(5), use_cache=True).past_key_values
    with turboquant_cache(llama, FMT), pytest.raises(ValueError, match="window of 16"):
        llama(prompt(5), past_key_values=cache)


def test_the_size_comes_from_the_environment(monkeypatch, llama):
    monkeypatch.setenv("TURBOQUANT_WINDOW", "48")
    with turboquant_cache(llama, FMT) as session:
        assert session.window == 48


@pytest.mark.parametrize("text", ["-1", "many", "6.4", ""])
def test_a_wrong_size_is_named(monkeypatch, text):
    monkeypatch.setenv("TURBOQUANT_WINDOW", text)
    with pytest.raises(ValueError, match=r"window .* is not a number of tokens"):
        window_size()
