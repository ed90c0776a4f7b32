"""`store_window` in Triton: a copy, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from turboquant.kernels.triton.launch import launch, on_host


@triton.jit
def store_window_kernel(
    key, value, pages, slot_mapping, num_tokens, num_slots, dim,
    key_token, key_head, key_dim, value_token, value_head, value_dim, page_block, page_head, page_token,
    BLOCK_SIZE: tl.constexpr, T: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """T tokens of one KV head."""
    token = tl.program_id(0) * T + tl.arange(0, T)
    head = tl.program_id(1)
    column = tl.arange(0, DP)[None, :]
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    real = (slot >= BLOCK_SIZE) & (slot < num_slots)
    slot = tl.where(real, slot, 0)
    inside = real[:, None] & (column < dim)
    rows = token.to(tl.int64)[:, None]
    out = slot // BLOCK_SIZE * page_block + head.to(tl.int64) * page_head + slot % BLOCK_SIZE * page_token
    out = pages + out[:, None] + column
    x = tl.load(key + rows * key_token + head * key_head + column * key_dim, mask=inside)
    tl.store(out, x.to(pages.dtype.element_ty), mask=inside)
    x = tl.load(value + rows * value_token + head * value_head + column * value_dim, mask=inside)
    tl.store(out + dim, x.to(pages.dtype.element_ty), mask=inside)


def store_window(key, value, pages, slot_mapping) -> None:
    """See `turboquant.kernels.interface.store_window`. On a GPU, a slot outside the pages is skipped, not reported."""
    num_tokens, dim = key.shape[0], key.shape[2]
    num_blocks, num_kv_heads, block_size, _ = pages.shape
    if num_tokens == 0:
        return
    if on_host(key) and (last := int(slot_mapping.max())) >= num_blocks * block_size:
        raise IndexError(f"slot {last} lies outside the window pages: {num_blocks} blocks of {block_size} tokens.")
    if pages.stride(3) != 1:
        raise ValueError("window pages must be contiguous in their last dimension.")
    tile = min(256, triton.next_power_of_2(num_tokens)) if on_host(key) else 16
    launch(
        store_window_kernel, (triton.cdiv(num_tokens, tile), num_kv_heads),
        key, value, pages, slot_mapping, num_tokens, num_blocks * block_size, dim,
        *key.stride(), *value.stride(), *pages.stride()[:3],
        BLOCK_SIZE=block_size, T=tile, DP=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
