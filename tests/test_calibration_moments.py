"""What calibration counts: right on states that are known, whatever the batches and shards."""

from __future__ import annotations

import pytest
import torch
from models import build, llama_config
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from turboquant.calibration.capture import CalibrationError, layers_of
from turboquant.calibration.moments import LayerMoments, Moments
from turboquant.calibration.run import read
from turboquant.hf_rope import ropes_by_shift
from turboquant.rope import Rope

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")


def samples(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 512, (n,), generator=generator).tolist() for n in lengths]


def moments_of(model, data: list[list[int]], batch_size: int = 1, numbers: list[int] | None = None) -> Moments:
    shapes, ropes = layers_of(model)
    moments = Moments.zeros(shapes)
    read(model, data, numbers or [0] * len(data), moments, ropes, batch_size=batch_size)
    return moments


def keys_before_rope(model, ids: list[int], layer: int) -> torch.Tensor:
    """[T, Hkv, D] straight from the projection."""
    seen = []
    module = model.model.layers[layer].self_attn
    hook = module.k_proj.register_forward_hook(lambda _module, _args, out: seen.append(out[0]))
    model(input_ids=torch.tensor([ids]), use_cache=False)
    hook.remove()
    return seen[0].unflatten(-1, (-1, module.head_dim))


def test_sums_are_those_of_the_projection(llama):
    """Keys before RoPE are what k_proj gave; position 0 is not counted."""
    data = samples(40, 23)
    moments = moments_of(llama, data)
    for layer, counted in moments.fit.items():
        keys = torch.cat([keys_before_rope(llama, ids, layer)[1:] for ids in data]).double()
        assert counted.count == 39 + 22
        torch.testing.assert_close(counted.key_mean, keys.mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(counted.key_energy, keys.square().sum(-1).mean(0), rtol=1e-4, atol=0)
        mean = torch.randn(counted.key_mean.shape, dtype=torch.float64)
        by_hand = (keys - mean).square().sum(-1).mean(0)
        torch.testing.assert_close(counted.energy_without(mean), by_hand, rtol=1e-4, atol=0)
    assert (moments.samples, moments.tokens) == (2, 63)


def test_values_queries_and_extremes(llama):
    (ids,) = samples(30)
    cache = DynamicCache(config=llama.config)
    llama(input_ids=torch.tensor([ids]), past_key_values=cache)
    counted = moments_of(llama, [ids]).fit[0]
    values, keys = cache.layers[0].values[0, :, 1:], cache.layers[0].keys[0, :, 1:]
    torch.testing.assert_close(counted.value_sum, values.sum(1).double(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(counted.value_max, values.abs().amax((1, 2)).double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(counted.key_max, keys.abs().amax((1, 2)).double(), atol=1e-5, rtol=1e-5)
    module, seen = llama.model.layers[0].self_attn, []
    hook = module.q_proj.register_forward_hook(lambda _module, _args, out: seen.append(out[0, 1:]))
    llama(input_ids=torch.tensor([ids]), use_cache=False)
    hook.remove()
    queries = seen[0].unflatten(-1, (2, 2, -1)).double()  # KV head, head of its group
    torch.testing.assert_close(counted.query_squares, queries.square().mean(2).sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_batches_with_padding_change_nothing(llama, batch_size):
    data = samples(40, 23, 31, 17, 40)
    alone, together = moments_of(llama, data), moments_of(llama, data, batch_size)
    for (name, mine), (_, theirs) in zip(alone.fit[1].tensors(), together.fit[1].tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4, msg=name)


def test_every_tenth_sample_is_held_out(llama):
    data = samples(*[20] * 12)
    moments = moments_of(llama, data, batch_size=4, numbers=[*range(12)])
    assert moments.fit[0].count == 11 * 19
    assert moments.held_out[0].count == 19
    torch.testing.assert_close(
        moments.held_out[0].key_sum, moments_of(llama, [data[9]]).fit[0].key_sum, rtol=1e-5, atol=1e-4
    )


def test_moments_add_and_travel_through_a_file(llama):
    data = samples(20, 30, 25)
    whole, parts = moments_of(llama, data), [moments_of(llama, data[:1]), moments_of(llama, data[1:])]
    parts[0].add(Moments.from_tensors(parts[1].as_tensors()))
    for (name, mine), (_, theirs) in zip(whole.fit[1].tensors(), parts[0].fit[1].tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-9, msg=name)
    assert (whole.samples, whole.tokens) == (parts[0].samples, parts[0].tokens)
    with pytest.raises(ValueError, match="different models"):
        whole.add(Moments.zeros({0: (1, 64)}))


def test_states_that_are_not_finite_are_named(llama_dir):
    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    model.model.layers[1].self_attn.v_proj.weight[3, 3] = torch.nan
    with pytest.raises(CalibrationError, match=r"layer 1 makes NaN or infinite values"):
        moments_of(model, samples(20))


def test_the_rotation_of_a_model_with_key_norms_is_found(gemma3_dir):
    """Gemma 3: K is normalised behind its projection, and sliding layers turn by other angles."""
    model = AutoModelForCausalLM.from_pretrained(gemma3_dir)
    shapes, ropes = layers_of(model)
    assert shapes == {0: (1, 256), 1: (1, 256), 2: (1, 256)}
    assert not torch.equal(ropes[0].inv_freq, ropes[2].inv_freq)
    assert moments_of(model, samples(40)).fit[2].count == 39


def test_neighbouring_pairs_and_no_rotation_are_found(monkeypatch):
    model = build(LlamaForCausalLM, llama_config())
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q, k))
    assert ropes_by_shift(model, {0: 64, 1: 64}) == {0: None, 1: None}


def test_an_unknown_rotation_is_refused(monkeypatch):
    model = build(LlamaForCausalLM, llama_config())
    monkeypatch.setattr(
        "turboquant.hf_rope.rope_from_config",
        lambda *args, **kwargs: Rope(torch.linspace(3, 1, 32, dtype=torch.float64)),
    )
    with pytest.raises(CalibrationError, match="rotates its keys in a way"):
        layers_of(model)


def test_moments_of_no_tokens_are_zero():
    empty = torch.zeros(0, 2, 8)
    moments = LayerMoments.of(torch.zeros(0, 4, 8), empty, empty, torch.zeros(0, dtype=torch.int64), None)
    assert moments.count == 0
    assert moments.key_mean.abs().max() == 0
