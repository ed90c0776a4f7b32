"""One layer of the cache: what it holds and returns, its bookkeeping, crops, and changes of the batch."""

from __future__ import annotations

import pytest
import torch
from cache_cases import FMT
from transformers.cache_utils import DynamicLayer

from turboquant.cache_layer import TurboQuantLayer
from turboquant.formats import PRESETS
from turboquant.kv_quantizer import KVQuantizer, make_params
from turboquant.rope import Rope

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad", "window_off")


def layer_states(length: int, heads: int = 2, batch: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, length, 64, generator=generator) for _ in range(2))


def layer_with_mean() -> TurboQuantLayer:
    generator = torch.Generator().manual_seed(9)
    rope = Rope(torch.tensor([10000.0 ** (-i / 32) for i in range(32)], dtype=torch.float64))
    mean = 10 * torch.randn(2, 64, generator=generator)
    return TurboQuantLayer(make_params(PRESETS[FMT], 64, key_mean=mean, rope=rope))


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [7, 1, 12], [0, 20]], ids=str)
def test_update_returns_dequantised_states_of_all_tokens(sizes):
    """The newest among them: none passes by the quantiser."""
    layer, (key, value) = layer_with_mean(), layer_states(20)
    params = layer.params
    quantizer = KVQuantizer(FMT, 64, key_mean=params.key_mean, rope=params.rope)
    expected = [
        quantizer.dequantize(quantizer.quantize(k.transpose(0, 1), v.transpose(0, 1)))
        for k, v in zip(key, value, strict=True)
    ]
    seen = 0
    for key_piece, value_piece in zip(key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True):
        seen += key_piece.shape[2]
        returned = layer.update(key_piece, value_piece)
        for which, states in enumerate(returned):
            assert states.shape == (3, 2, seen, 64)
            for row, pair in zip(states, expected, strict=True):
                torch.testing.assert_close(row.transpose(0, 1), pair[which][:seen], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(returned[0][:, :, -1], key[:, :, -1], atol=1e-2)
    assert not torch.allclose(returned[1][:, :, -1], value[:, :, -1], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_update_answers_in_the_model_s_dtype(dtype):
    layer, (key, value) = layer_with_mean(), layer_states(5)
    returned = layer.update(key.to(dtype), value.to(dtype))
    assert [x.dtype for x in returned] == [dtype, dtype]


def test_bookkeeping_of_a_layer():
    layer, (key, value) = layer_with_mean(), layer_states(20)
    assert (layer.nbytes, layer.get_seq_length(), layer.get_mask_sizes(5)) == (0, 0, (5, 0))
    layer.update(key, value)
    assert layer.nbytes == 3 * 20 * 2 * PRESETS[FMT].slot_bytes(64)
    assert (layer.get_seq_length(), layer.get_mask_sizes(5), layer.get_max_length()) == (20, (25, 0), -1)
    layer.reset()
    assert (layer.nbytes, layer.get_seq_length()) == (0, 0)
    assert layer.update(key, value)[0].shape == (3, 2, 20, 64)


def test_nothing_is_kept_beside_the_packed_planes():
    """`nbytes` would be a lie if the layer held its exact tokens, too."""
    layer = layer_with_mean()
    layer.update(*layer_states(20))
    held = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    assert [(x.shape, x.dtype) for x in held] == [((3, 20), torch.int32)]  # where the mean was taken out
    assert all(plane.untyped_storage().nbytes() == plane.nbytes for plane in layer.encoded)


@pytest.mark.parametrize("keep", [19, 13, 1], ids="keep{}".format)
@pytest.mark.parametrize("way", ["negative", "positive"])
def test_crop_keeps_the_first_tokens(keep, way):
    layer, short, (key, value) = layer_with_mean(), layer_with_mean(), layer_states(20)
    layer.update(key, value)
    layer.crop(keep - 20 if way == "negative" else keep)
    short.update(key[:, :, :keep], value[:, :, :keep])
    assert layer.get_seq_length() == keep
    more = layer_states(4, seed=1)
    for ours, theirs in zip(layer.update(*more), short.update(*more), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("argument", [0, 20, 25, 1000, -20, -21, -25, -1000])
def test_crop_at_its_limits_is_transformers_own(argument):
    layer, exact, states = layer_with_mean(), DynamicLayer(), layer_states(20)
    for each in (layer, exact):
        each.update(*states)
        each.crop(argument)
    assert layer.get_seq_length() == exact.get_seq_length()


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "select-mask", "repeat"],
)
def test_changes_of_the_batch_carry_codes_and_padding(change, rows):
    layer, (key, value) = layer_with_mean(), layer_states(20)
    positions = torch.arange(20) - torch.tensor([[0], [3], [7]])
    layer.next_positions = positions
    before = layer.update(key, value)
    change(layer)
    more = layer_states(4, batch=len(rows), seed=1)
    for ours, theirs in zip(layer.update(*more), before, strict=True):
        assert torch.equal(ours[:, :, :20], theirs[rows])
    alone = layer_with_mean()
    alone.next_positions = positions[rows]
    alone.update(key[rows], value[rows])
    torch.testing.assert_close(layer.update(*more)[0], [alone.update(*more)[0] for _ in range(2)][1])


def test_changes_before_the_first_token_are_harmless():
    layer = layer_with_mean()
    layer.crop(-1)
    layer.reorder_cache(torch.tensor([0, 0]))
    layer.batch_repeat_interleave(2)
    layer.offload()
    layer.prefetch()
    assert layer.update(*layer_states(3))[0].shape == (3, 2, 3, 64)


@pytest.mark.parametrize("dims", [(80, 80), (64, 32)], ids=str)
def test_a_layer_of_another_head_dim(dims):
    layer = layer_with_mean()
    with pytest.raises(ValueError, match=rf"head_dim {dims[0]} and {dims[1]}, the cache was built for 64"):
        layer.update(torch.zeros(1, 2, 3, dims[0]), torch.zeros(1, 2, 3, dims[1]))
