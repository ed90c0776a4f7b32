"""Attention over exact K and V: this step's own tokens, and those that the window holds. Not rotated.

One partial result for each tile of queries, which `combine.py` merges with those of the packed pages.
"""

from __future__ import annotations

import triton
import triton.language as tl
from turboquant.kernels.triton.common import locate
from turboquant.kernels.triton.packed import NEVER, soft_capped


@triton.jit
def _product(a, b, acc, WIDEN: tl.constexpr, IP: tl.constexpr):
    """a @ b + acc. The interpreter's products of bfloat16 are wrong: WIDEN the operands there."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=IP)


@triton.jit
def exact_tile(
    key, value, keys_inside, visible, q, largest, total, broken, acc, factor, softcap, column, dim, key_dim, value_dim,
    SOFTCAP: tl.constexpr, WIDEN: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over N tokens at row pointers `key` and `value` [N].

    Args:
        keys_inside: [N], what may be loaded.
        visible: [N, M].
        broken: [M], how many of the tokens that a query saw were not finite in V. In a product 0 · NaN would spoil the
            queries that do not see them.
    """
    inside = keys_inside[:, None] & (column < dim)[None, :]
    k = tl.load(key[:, None] + column[None, :] * key_dim, mask=inside, other=0.0)
    logits = _product(k.to(q.dtype), q, None, WIDEN, IP) * factor
    if SOFTCAP:
        logits = soft_capped(logits, softcap) * 1.4426950408889634
    logits = tl.where(visible, logits, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(logits, 0))
    rescale = tl.exp2(largest - now_largest)
    weights = tl.exp2(logits - now_largest[None, :])
    total = total * rescale + tl.sum(weights, 0)

    v = tl.load(value[None, :] + column[:, None] * value_dim, mask=tl.trans(inside), other=0.0)
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    bad = tl.max((~finite).to(tl.int32), 0) > 0
    broken += tl.sum((visible & bad[:, None]).to(tl.float32), 0)
    v = tl.where(finite, v, 0.0).to(q.dtype)
    acc = _product(v, tl.where(visible, weights, 0.0).to(q.dtype), acc * rescale[None, :], WIDEN, IP)
    return now_largest, total, broken, acc


@triton.jit
def exact_kernel(
    query, key, value, window_pages, window_table, seq_lens, query_start_loc, partial, statistics,
    scale, softcap, window_size, window_first, sliding, num_seqs, num_kv_heads, first_tile, dim,
    query_token, query_head, query_dim, key_token, key_head, key_dim, value_token, value_head, value_dim,
    window_block, window_head, window_slot, window_dim, window_seq,
    SPLITS: tl.constexpr, WINDOW_BLOCK: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, GP: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr, SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, STRICT: tl.constexpr, WIDEN: tl.constexpr,
    IP: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, num_kv_heads)."""
    M: tl.constexpr = BQ * GP
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq, row, count, begin, end = locate(first_tile + tile, query_start_loc, num_seqs, BQ)
    if count > 0:
        seq_len = tl.load(seq_lens + seq).to(tl.int32)
        past = seq_len - (end - begin)
        lowest = past + row - begin
        highest = lowest + count - 1
        slot = tl.arange(0, M)
        query_row = slot // GP
        live = (query_row < count) & (slot % GP < GROUP)
        query_at = lowest + query_row
        index = tl.arange(0, N)
        column = tl.arange(0, DP)
        rows = query + (row + query_row).to(tl.int64) * query_token + (head * GROUP + slot % GP) * query_head
        q = tl.load(
            rows[None, :] + column[:, None] * query_dim, mask=live[None, :] & (column < dim)[:, None], other=0.0
        )
        factor = scale
        if not SOFTCAP:
            factor = scale * 1.4426950408889634
        largest = tl.full([M], NEVER, tl.float32)
        total = tl.zeros([M], tl.float32)
        broken = tl.zeros([M], tl.float32)
        acc = tl.zeros([DP, M], tl.float32)
        seen_from = 0
        if SLIDING:
            seen_from = tl.maximum(lowest - sliding + 1, 0)

        if HAS_WINDOW:
            recent = tl.maximum(tl.maximum(lowest - window_size + 1, window_first), seen_from)
            table_row = window_table + seq.to(tl.int64) * window_seq
            for i in range(1 + tl.cdiv(tl.maximum(past - recent, 0), N)):
                # The first tokens, then the recent ones.
                first = tl.where(i == 0, 0, recent + (i - 1) * N)
                last = tl.where(i == 0, tl.minimum(window_first, past), past)
                at = first + index
                block = tl.load(table_row + at // WINDOW_BLOCK, mask=(at < last) & (at >= seen_from), other=0)
                held = block > 0
                visible = live[None, :] & held[:, None]
                visible &= (at[:, None] > query_at[None, :] - window_size) | (at < window_first)[:, None]
                if SLIDING:
                    visible &= at[:, None] > query_at[None, :] - sliding
                k_rows = (
                    window_pages + block.to(tl.int64) * window_block + head.to(tl.int64) * window_head
                    + (at % WINDOW_BLOCK) * window_slot
                )  # fmt: skip
                largest, total, broken, acc = exact_tile(
                    k_rows, k_rows + dim * window_dim, held, visible, q, largest, total, broken, acc, factor, softcap,
                    column, dim, window_dim, window_dim, SOFTCAP, WIDEN, IP,
                )  # fmt: skip

        until = seq_len
        if CAUSAL:
            until = highest + 1
        for first in range(tl.maximum(past, seen_from), until, N):
            at = first + index
            inside = at < until
            visible = live[None, :] & inside[:, None]
            if CAUSAL:
                visible &= at[:, None] <= query_at[None, :]
            if SLIDING:
                visible &= at[:, None] > query_at[None, :] - sliding
            if STRICT:
                visible &= (at[:, None] > query_at[None, :] - window_size) | (at < window_first)[:, None]
            token = (begin + at - past).to(tl.int64)
            largest, total, broken, acc = exact_tile(
                key + token * key_token + head * key_head, value + token * value_token + head * value_head,
                inside, visible, q, largest, total, broken, acc, factor, softcap,
                column, dim, key_dim, value_dim, SOFTCAP, WIDEN, IP,
            )  # fmt: skip

        slab = (tile * num_kv_heads + head).to(tl.int64)
        part = (slab * (SPLITS + 1) + SPLITS) * M
        tl.store(statistics + part * 2 + slot, largest)
        tl.store(statistics + part * 2 + M + slot, total)
        acc = tl.where((broken > 0)[None, :], float("nan"), acc)
        at = partial + (part + slot)[None, :] * D + column[:, None]
        tl.store(at, acc, mask=(column < D)[:, None] & (slot >= 0)[None, :])
