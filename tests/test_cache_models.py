"""What models make of the cache: their logits, its bytes, and generation of every kind, padding included."""

from __future__ import annotations

import pytest
import torch
from cache_cases import (
    DENSE_MODELS,
    DENSE_TOKEN_BYTES,
    EVERY_MODEL,
    FMT,
    ONE_CODE,
    SAME,
    generate,
    kl,
    pad_left,
    prompt,
    stepwise_logits,
)
from models import BOS
from transformers import AutoModelForCausalLM, DynamicCache

from turboquant.cache import turboquant_cache
from turboquant.formats import PRESETS

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad", "window_off")


# Models.


@EVERY_MODEL
def test_attention_matters_in_the_test_models(model):
    """Otherwise no test here could fail: earlier tokens must change what comes later, and the cache is not exact."""
    ids = prompt(60)
    other = ids.clone()
    other[:, 1:30] = ids[:, 1:30].flip(1)
    exact = model(ids).logits
    assert kl(exact[:, 40:], model(other).logits[:, 40:]) > 0.01
    with turboquant_cache(model, FMT):
        assert kl(exact, model(ids).logits) > 1e-4


def test_the_key_bias_of_the_test_model_is_large(qwen2):
    keys = model_keys(qwen2, prompt(60))[:, :, 1:]
    bias = qwen2.model.layers[0].self_attn.k_proj.bias.view(2, 64).norm(dim=-1)
    # The bias has the same norm at every position, whatever RoPE does to it.
    rest = qwen2.model.layers[0].self_attn.k_proj.weight[:, 1:].norm() / 2**0.5
    assert (bias > 20 * rest).all()
    assert (keys.norm(dim=-1) > 0.8 * bias[:, None]).all()


def model_keys(model, ids: torch.Tensor, layer: int = 0, **kwargs) -> torch.Tensor:
    """Exact keys of a layer."""
    return model(ids, use_cache=True, **kwargs).past_key_values.layers[layer].keys


@EVERY_MODEL
@pytest.mark.parametrize("sizes", [[1] * 40, [25, 1, 1, 13], [39, 1]], ids=["tokens", "chunks", "all-but-one"])
def test_one_forward_is_many(model, sizes):
    """The same tokens in the cache give the same logits, however they came in."""
    ids = prompt(40)
    with turboquant_cache(model, FMT):
        torch.testing.assert_close(stepwise_logits(model, ids, sizes), model(ids).logits, atol=ONE_CODE, rtol=0)


@EVERY_MODEL
def test_every_format_is_closer_than_the_one_below(model):
    ids = torch.cat([prompt(64, seed=seed) for seed in range(3)])
    exact = model(ids).logits
    distances = []
    for name in PRESETS:
        with turboquant_cache(model, name) as session:
            distances.append(kl(exact, model(ids).logits))
        assert session.fmt.name == name
    print(f"\nKL {type(model).__name__}: " + ", ".join(f"{n} {d:.4f}" for n, d in zip(PRESETS, distances, strict=True)))
    # The middle two differ in K's bits only, which routing to experts can hide.
    assert distances[0] > max(distances[1:3])
    assert min(distances[1:3]) > distances[3]
    assert distances[3] < 0.05


@DENSE_MODELS
@pytest.mark.parametrize("name", PRESETS)
def test_bytes_are_tokens_layers_heads_and_slots(model, name):
    slot = PRESETS[name].slot_bytes(64)
    with turboquant_cache(model, PRESETS[name]) as session:
        assert session.nbytes == 0
        model(prompt(33, batch=3))
        assert session.nbytes == 3 * 33 * 2 * 2 * slot
        generate(model, input_ids=prompt(10), max_new_tokens=5)
        # The last token is never fed back.
        assert session.nbytes == (10 + 4) * 2 * 2 * slot
    assert len(session.layers) == 2


@EVERY_MODEL
def test_use_cache_false_still_measures_the_cache(model):
    ids = prompt(40)
    exact = model(ids, use_cache=False).logits
    with turboquant_cache(model, FMT) as session:
        without = model(ids, use_cache=False).logits
        assert session.nbytes > 0
        assert torch.equal(without, model(ids, use_cache=True).logits)
    assert (without - exact).abs().max() > 1e-2


@DENSE_MODELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes(model, dtype, request):
    path = request.getfixturevalue("llama_dir" if model.config.model_type == "llama" else "qwen2_dir")
    narrow, ids = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), prompt(40)
    with turboquant_cache(model, FMT), turboquant_cache(narrow, FMT):
        assert kl(model(ids).logits, narrow(ids).logits) < (0.03 if dtype == torch.bfloat16 else 1e-6)


# Generation.


@EVERY_MODEL
def test_greedy_generation_is_the_argmax_of_full_forwards(model):
    ids = prompt(30)
    with turboquant_cache(model, FMT):
        generated = generate(model, input_ids=ids)
        for _ in range(12):
            ids = torch.cat((ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(generated, ids)


@EVERY_MODEL
def test_generation_leaves_the_exact_path_at_some_point(model):
    """Else nothing that generation tests compare would come from the compressed cache."""
    rows = [prompt(30, seed=seed) for seed in range(4)]
    exact = [generate(model, input_ids=row, max_new_tokens=24) for row in rows]
    with turboquant_cache(model, "turboquant2.5"):
        ours = [generate(model, input_ids=row, max_new_tokens=24) for row in rows]
    assert any(not torch.equal(a, b) for a, b in zip(exact, ours, strict=True))


STRATEGIES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "beam-3-answers": {"num_beams": 4, "num_return_sequences": 3},
    "prefill-chunks": {"prefill_chunk_size": 7},
}


@EVERY_MODEL
@pytest.mark.parametrize("strategy", [k for k in STRATEGIES if k != "prefill-chunks"])
def test_a_padded_batch_generates_what_single_prompts_do(model, strategy):
    rows = [prompt(length, seed=length) for length in (23, 9, 30)]
    options = STRATEGIES[strategy]
    with turboquant_cache(model, FMT):
        batch = generate(model, **pad_left(rows), **options)
        alone = [generate(model, input_ids=row, **options) for row in rows]
    answers = options.get("num_return_sequences", 1)
    for i, row in enumerate(rows):
        expected = alone[i][:, row.shape[1] :]
        assert torch.equal(batch[i * answers : (i + 1) * answers, 30:], expected)


@DENSE_MODELS
@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 3}, STRATEGIES["prefill-chunks"]], ids=["lookup", "chunks"]
)
def test_other_ways_to_the_same_tokens(model, options):
    """Prompt lookup proposes tokens and crops those that are refused; chunked prefill fills the cache in pieces."""
    ids = prompt(12).repeat(1, 3)
    with turboquant_cache(model, FMT) as session:
        greedy = generate(model, input_ids=ids, max_new_tokens=16)
        assert torch.equal(generate(model, input_ids=ids, max_new_tokens=16, **options), greedy)
        assert session.nbytes % DENSE_TOKEN_BYTES == 0


@DENSE_MODELS
def test_a_padded_forward_is_the_unpadded_one(model):
    rows = [prompt(length, seed=length) for length in (40, 23)]
    batch = pad_left(rows)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with turboquant_cache(model, FMT):
        logits = model(**batch, position_ids=positions).logits
        for padded, row in zip(logits, rows, strict=True):
            torch.testing.assert_close(padded[40 - row.shape[1] :], model(row).logits[0], atol=SAME, rtol=0)


@DENSE_MODELS
def test_right_padding_changes_nothing(model):
    ids = prompt(40)
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    with turboquant_cache(model, FMT):
        torch.testing.assert_close(
            model(ids, attention_mask=mask).logits[:, :30], model(ids[:, :30]).logits, atol=SAME, rtol=0
        )


@DENSE_MODELS
@pytest.mark.parametrize("case", ["padded", "shifted"])
def test_the_mean_follows_the_model_s_own_positions(model, case):
    """RoPE is relative, so an exact cache does not mind left padding without position_ids, nor a shift of them.

    Neither must ours: the mean sits where the model's RoPE put it, which is `position_ids`, or else the index in the
    padded row. From the index of the token in its own sequence, it is off by the padding or the shift.
    """
    ids, shift = prompt(60), 50
    exact = model(ids).logits
    if case == "padded":
        filler = torch.full((1, shift), BOS)
        inputs = {"input_ids": torch.cat((filler, ids), dim=1)}
        inputs["attention_mask"] = torch.cat((torch.zeros_like(filler), torch.ones_like(ids)), dim=1)
    else:
        inputs = {"input_ids": ids, "position_ids": torch.arange(shift, shift + 60)[None]}
    assert kl(exact, model(**inputs).logits[:, -60:]) < 1e-6
    with turboquant_cache(model, FMT):
        usual, moved = kl(exact, model(ids).logits), kl(exact, model(**inputs).logits[:, -60:])
    assert moved < 1.5 * usual


@DENSE_MODELS
def test_hiding_old_tokens_later_does_not_move_their_means(model):
    """A mask may hide tokens that were stored as visible: they are read at the positions they were stored at."""
    ids = prompt(60)
    mask = torch.ones_like(ids)
    mask[:, :10] = 0

    def second_half() -> torch.Tensor:
        cache = model(ids[:, :40], use_cache=True).past_key_values
        return model(ids[:, 40:], past_key_values=cache, attention_mask=mask).logits

    exact, usual = second_half(), model(ids).logits[:, 40:]
    with turboquant_cache(model, FMT):
        distance, usual = kl(exact, second_half()), kl(usual, model(ids).logits[:, 40:])
    assert distance < 2 * usual


@DENSE_MODELS
def test_a_conversation_goes_on_in_its_cache(model):
    """Two turns with one cache of the user's: the second turn feeds its new tokens only."""
    first, second = prompt(20), prompt(15, seed=1)
    with turboquant_cache(model, FMT) as session:
        cache = DynamicCache(config=model.config)
        answer = generate(model, input_ids=first, past_key_values=cache)
        assert session.cache is cache
        assert session.nbytes == DENSE_TOKEN_BYTES * (20 + 11)
        both = torch.cat((answer, second), dim=1)
        again = generate(model, input_ids=both, past_key_values=cache)
        assert torch.equal(again, generate(model, input_ids=both))
