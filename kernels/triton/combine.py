"""Before and after: rotate the queries, and merge the partial results, rotating the packed ones back."""

from __future__ import annotations

import triton
import triton.language as tl
from turboquant.kernels.triton.common import locate
from turboquant.kernels.triton.packed import NEVER


@triton.jit
def rotate_kernel(
    query, rotation, rotated, norms, query_start_loc, num_seqs, num_kv_heads, first_tile, dim,
    query_token, query_head, query_dim,
    GROUP: tl.constexpr, BQ: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr,
    IP: tl.constexpr,
):  # fmt: skip
    """R·q / ‖q‖ of a tile, [tiles, num_kv_heads, M, D], and ‖q‖; zero in columns that hold no query.

    Grid (query tiles, num_kv_heads). Queries of norm 1 fit fp16 whatever the model.
    """
    M: tl.constexpr = BQ * GP
    tile = tl.program_id(0)
    head = tl.program_id(1)
    _seq, row, count, _begin, _end = locate(first_tile + tile, query_start_loc, num_seqs, BQ)
    if count > 0:
        slot = tl.arange(0, M)
        live = (slot // GP < count) & (slot % GP < GROUP)
        inner = tl.arange(0, DP)
        rows = query + (row + slot // GP).to(tl.int64) * query_token + (head * GROUP + slot % GP) * query_head
        inside = live[:, None] & (inner < dim)[None, :]
        q = tl.load(rows[:, None] + inner[None, :] * query_dim, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(q), 1)
        q = q / tl.where(largest > 0, largest, 1.0)[:, None]
        relative = tl.sqrt(tl.sum(q * q, 1))
        q = q / tl.where(largest > 0, relative, 1.0)[:, None]
        slab = (tile * num_kv_heads + head).to(tl.int64)
        tl.store(norms + slab * M + slot, largest * relative)
        for first in range(0, dim, C):
            outer = first + tl.arange(0, C)
            matrix = tl.load(
                rotation + outer[None, :] * dim + inner[:, None],
                mask=(outer < dim)[None, :] & (inner < dim)[:, None], other=0.0,
            )  # fmt: skip
            turned = tl.dot(q, matrix, input_precision=IP)
            at = rotated + (slab * M + slot)[:, None] * D + outer[None, :]
            tl.store(at, turned.to(rotated.dtype.element_ty), mask=(outer < dim)[None, :] & (slot >= 0)[:, None])


@triton.jit
def combine_kernel(
    partial, statistics, rotation, sinks, out, query_start_loc, num_seqs, num_kv_heads, first_tile, dim,
    out_token, out_head, out_dim,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, C: tl.constexpr, VALUE_BITS: tl.constexpr, HAS_EXACT: tl.constexpr, HAS_SINKS: tl.constexpr,
    IP: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, num_kv_heads): out = (Rᵀ·Σ w·acc + w·acc_exact) / Σ w·total, w = 2**(max - max of all)."""
    M: tl.constexpr = BQ * GP
    NUM: tl.constexpr = 4 if VALUE_BITS == 4 else 8
    tile = tl.program_id(0)
    head = tl.program_id(1)
    _seq, row, count, _begin, _end = locate(first_tile + tile, query_start_loc, num_seqs, BQ)
    if count > 0:
        slot = tl.arange(0, M)
        live = (slot // GP < count) & (slot % GP < GROUP)
        inner = tl.arange(0, DP)
        part = (tile * num_kv_heads + head).to(tl.int64) * (SPLITS + 1) * M
        largest = tl.full([M], NEVER, tl.float32)
        for split in range(SPLITS + HAS_EXACT):
            largest = tl.maximum(largest, tl.load(statistics + (part + split * M) * 2 + slot))
        total = tl.zeros([M], tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head * GROUP + slot % GP, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            largest = tl.maximum(largest, sink)
            total = tl.exp2(sink - largest)
        acc = tl.zeros([M, DP], tl.float32)
        for split in range(SPLITS):
            at = part + split * M
            weight = tl.exp2(tl.load(statistics + at * 2 + slot) - largest)
            total += weight * tl.load(statistics + at * 2 + M + slot)
            values = tl.load(
                partial + (at + slot)[:, None] * D + inner[None, :], mask=(slot >= 0)[:, None] & (inner < D)[None, :],
                other=0.0,
            )  # fmt: skip
            acc += weight[:, None] * values
        exact_weight = tl.zeros([M], tl.float32)
        exact_at = part + SPLITS * M
        if HAS_EXACT:
            exact_weight = tl.exp2(tl.load(statistics + exact_at * 2 + slot) - largest)
            total += exact_weight * tl.load(statistics + exact_at * 2 + M + slot)
        inverse = 1.0 / tl.where(total == 0, 1.0, total)
        acc *= inverse[:, None]
        exact_weight *= inverse
        # The packed kernel leaves coordinate NUM·w + j at j · (D / NUM) + w.
        coordinate = (inner % (D // NUM)) * NUM + inner // (D // NUM)
        pointers = out + (row + slot // GP).to(tl.int64) * out_token + (head * GROUP + slot % GP) * out_head
        for first in range(0, dim, C):
            outer = first + tl.arange(0, C)
            matrix = tl.load(
                rotation + coordinate[:, None] * dim + outer[None, :],
                mask=(inner < D)[:, None] & (outer < dim)[None, :], other=0.0,
            )  # fmt: skip
            result = tl.dot(acc, matrix, input_precision=IP)
            if HAS_EXACT:
                exact = tl.load(
                    partial + (exact_at + slot)[:, None] * D + outer[None, :],
                    mask=(slot >= 0)[:, None] & (outer < dim)[None, :], other=0.0,
                )  # fmt: skip
                result += exact_weight[:, None] * exact
            tl.store(
                pointers[:, None] + outer[None, :] * out_dim, result.to(out.dtype.element_ty),
                mask=live[:, None] & (outer < dim)[None, :],
            )  # fmt: skip
