"""`store_window`: exact K and V in their slots of the window's pages, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from turboquant.kernels.interface import store_window

HEADS, BLOCKS, BLOCK_SIZE = 3, 7, 5
WINDOW_STORES = pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 80), (torch.float16, 24)], ids=str
)


def check_store_window(dtype: torch.dtype, dim: int) -> None:
    """Against a loop: odd strides, padding, block 0, slots in random order; one token more than a launch's tile."""
    generator = torch.Generator().manual_seed(dim)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:17]
    slots = torch.cat((slots, torch.tensor([-1, 0, BLOCK_SIZE - 1])))
    both = torch.randn(len(slots), HEADS, 2 * dim, generator=generator).to(dtype)
    key, value = both[..., :dim], both[..., dim:]
    padded = torch.full((BLOCKS, HEADS, BLOCK_SIZE + 2, 2 * dim), 7.0, dtype=dtype)
    pages = padded[:, :, :BLOCK_SIZE]
    expected = padded.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= BLOCK_SIZE:
            expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = both[token]
    store_window(key, value, pages, slots)
    assert torch.equal(padded, expected)


@WINDOW_STORES
def test_writes_what_a_loop_would(dtype, dim, kernels):
    check_store_window(dtype, dim)


def test_other_dtypes_are_converted(kernels):
    key, value = torch.randn(2, 4, HEADS, 8).double().float()
    pages = torch.zeros(2, HEADS, 4, 16, dtype=torch.bfloat16)
    store_window(key, value, pages, torch.arange(4, 8))
    assert torch.equal(pages[1].transpose(0, 1), torch.cat((key, value), dim=-1).bfloat16())


def test_bad_arguments_are_named(kernels):
    key = torch.zeros(2, HEADS, 8)
    pages = torch.zeros(2, HEADS, 4, 16)
    slots = torch.tensor([4, 5])
    with pytest.raises(IndexError, match="slot 8 lies outside the window pages: 2 blocks of 4 tokens"):
        store_window(key, key, pages, torch.tensor([4, 8]))
    with pytest.raises(ValueError, match="window pages have shape"):
        store_window(key, key, pages[..., :12], slots)
    with pytest.raises(TypeError, match=r"window pages have dtype torch\.uint8"):
        store_window(key, key, pages.to(torch.uint8), slots)
    with pytest.raises(ValueError, match="slot_mapping has shape"):
        store_window(key, key, pages, slots[:1])
    assert not pages.any()
