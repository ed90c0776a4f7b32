"""`attend`: rotate queries, attend to packed pages and to exact tokens, combine. No host reads of device data."""

from __future__ import annotations

from typing import Any

import torch

import triton
from turboquant.kernels.interface import KVParams
from turboquant.kernels.triton.combine import combine_kernel, rotate_kernel
from turboquant.kernels.triton.common import num_query_tiles
from turboquant.kernels.triton.config import Plan, plan
from turboquant.kernels.triton.exact import exact_kernel
from turboquant.kernels.triton.launch import constants, dot_precision, is_nvidia, launch, on_host
from turboquant.kernels.triton.packed import packed_kernel
from turboquant.kernels.triton.tables import MAX_TILE, prepare
from turboquant.kernels.triton.workspace import scratch, tiles_per_round
from turboquant.packing import split_page

EXACT_TILE = 32


def attend(
    query, pages, block_table, seq_lens, query_start_loc, params: KVParams,
    *, scale, causal, sliding_window, softcap, sinks, fresh, window, strict, out,
) -> None:  # fmt: skip
    """See `turboquant.kernels.interface.attend`."""
    split_page(pages, params.fmt, params.head_dim)
    num_rows, num_heads, dim = query.shape
    num_seqs, num_kv_heads, block_size = len(seq_lens), pages.shape[1], pages.shape[2]
    if num_rows == 0 or num_seqs == 0:
        return
    if strict and window is None:
        fresh = None
    group, device, is_float32 = num_heads // num_kv_heads, query.device, query.dtype == torch.float32
    made = constants(params, query)
    how = plan(
        num_rows, num_seqs, num_kv_heads, group, dim, block_size, block_table.shape[1], device,
        made.mean is not None, is_float32,
    )  # fmt: skip
    tiles = num_query_tiles(num_rows, num_seqs, how.rows)
    per_round = tiles_per_round(num_kv_heads, how.columns, dim, how.splits)
    block_table, seq_lens = _dense(block_table), seq_lens.contiguous()
    common = {"GROUP": group, "BQ": how.rows, "GP": how.padded_group, "D": dim}
    padded = {"DP": max(16, triton.next_power_of_2(dim))}
    flags = {"CAUSAL": causal, "SLIDING": sliding_window is not None, "SOFTCAP": softcap != 0.0}
    exact = {"HAS_WINDOW": window is not None, "STRICT": bool(strict)}
    limits = (
        float(scale),
        float(softcap),
        window.size if window else 0,
        window.first if window else 0,
        sliding_window or 0,
    )
    window_table = None if window is None else _dense(window.block_table)
    window_row = 0 if window is None else window_table.stride(0)
    window_block = 1 if window is None else window.pages.shape[2]
    precision, around = dot_precision(device), rotation_options(dim, is_nvidia(device))
    for first in range(0, tiles, per_round):
        count = min(per_round, tiles - first)
        at = scratch(
            device, count, num_kv_heads, how.columns, dim, how.splits, torch.float32 if is_float32 else torch.float16
        )
        launch(
            rotate_kernel, (count, num_kv_heads),
            query, made.rotation, at.rotated, at.norms, query_start_loc, num_seqs, num_kv_heads, first, dim,
            *query.stride(), **common, **padded, IP=precision, **around,
        )  # fmt: skip
        launch(
            packed_kernel, (count, num_kv_heads, how.splits),
            query, at.rotated, at.norms, pages, block_table, seq_lens, query_start_loc, window_table,
            at.partial, at.statistics, *_tables(made, is_float32, device),
            made.shifts, made.mean, made.frequency, made.angles if is_float32 else made.split_angles, MAX_TILE,
            params.rope.attention_scaling if made.frequency is not None else 1.0,
            *limits, num_seqs, num_heads, num_kv_heads, first, dim,
            *query.stride(), pages.stride(0), pages.stride(1), block_table.stride(0), window_row,
            SPLITS=how.splits, BLOCK_SIZE=block_size, WINDOW_BLOCK=window_block, **common, **padded, **flags, **exact,
            HAS_FRESH=fresh is not None,
            **packed_constants(params, how, block_size, is_aligned(pages, dim), is_float32, is_nvidia(device)),
            IP=precision,
            **compile_options(is_nvidia(device), how.tiling.num_warps, how.tiling.num_stages),
        )  # fmt: skip
        if fresh is not None:
            held = window.pages if window is not None else fresh[0].unsqueeze(0)
            launch(
                exact_kernel, (count, num_kv_heads),
                query, *fresh, held, window_table, seq_lens, query_start_loc, at.partial, at.statistics,
                *limits, num_seqs, num_kv_heads, first, dim, *query.stride(), *fresh[0].stride(), *fresh[1].stride(),
                *held.stride(), window_row,
                SPLITS=how.splits, WINDOW_BLOCK=window_block, **common, **padded, **flags, **exact, N=EXACT_TILE,
                WIDEN=on_host(query), IP=precision,
                **compile_options(is_nvidia(device), num_warps=4),
            )  # fmt: skip
        launch(
            combine_kernel, (count, num_kv_heads),
            at.partial, at.statistics, made.rotation, sinks, out, query_start_loc, num_seqs, num_kv_heads, first, dim,
            *out.stride(), SPLITS=how.splits, **common, **padded, VALUE_BITS=params.fmt.value_bits,
            HAS_EXACT=int(fresh is not None), HAS_SINKS=sinks is not None,
            IP=precision, **around,
        )  # fmt: skip


def compile_options(nvidia: bool, num_warps: int, num_stages: int = 1) -> dict[str, int]:
    """Of one kernel. Left to itself, ptxas sometimes spills to fit one more program on a processor."""
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return {**options, "maxnreg": 255} if nvidia else options


def rotation_options(head_dim: int, nvidia: bool) -> dict[str, int]:
    """Columns of the rotation at a time, and compile options, of the kernels that multiply by it."""
    return {"C": 32 if head_dim > 128 else 16, **compile_options(nvidia, num_warps=8)}


def _dense(table: torch.Tensor) -> torch.Tensor:
    """Rows may be apart, entries not."""
    return table if table.stride(-1) == 1 or table.shape[-1] < 2 else table.contiguous()


def _tables(made, is_float32: bool, device: torch.device):
    """Tables in memory of K and V, and the gains of what is looked up."""
    if is_float32:
        return *made.centroids, 1.0, 1.0
    # Byte permutes leave integers in units of 2**-24.
    unit = 2.0**24 if is_nvidia(device) else 1.0
    return *made.byte_values, *(table.gain * unit for table in made.byte_tables)


def is_aligned(pages: torch.Tensor, dim: int) -> bool:
    """Whether the codes of every token start at a multiple of 4 bytes."""
    return all(x % 4 == 0 for x in (dim // 8, pages.data_ptr(), pages.stride(0), pages.stride(1)))


def packed_constants(
    params: KVParams, how: Plan, block_size: int, aligned: bool, is_float32: bool, nvidia: bool
) -> dict[str, Any]:
    """The compile-time arguments of `packed_kernel` that come from the format, the pages and the plan."""
    fmt, dim, made = params.fmt, params.head_dim, prepare(params)
    pairs = 0 if made.frequency is None else made.frequency.numel()
    return {
        "N": how.tiling.tokens,
        "PER_PAGE": block_size % how.tiling.tokens == 0,
        "ALIGNED": aligned,
        "KEY_BITS": fmt.key_bits,
        "VALUE_BITS": fmt.value_bits,
        "KEY_BYTES": fmt.key_code_bytes(dim),
        "VALUE_BYTES": fmt.value_code_bytes(dim),
        "KEY_WP": padded_words(dim, fmt.key_bits),
        "VALUE_WP": padded_words(dim, fmt.value_bits),
        **byte_words("KEY", made.byte_tables[0].words),
        **byte_words("VALUE", made.byte_tables[1].words),
        "HAS_MEAN": made.mean is not None,
        "R2": pairs,
        "R2P": max(16, triton.next_power_of_2(pairs)),
        "INTERLEAVED": bool(pairs and params.rope.interleaved),
        "FAST": not is_float32 and nvidia,
        "WEIGHT_UNIT": 1.0 if is_float32 else 2.0**15,
        "STAGES": how.tiling.num_stages,
    }


def padded_words(dim: int, bits: int) -> int:
    """W rounded up to what `tl.dot` takes."""
    return max(16, triton.next_power_of_2(dim // (4 if bits == 4 else 8)))


def byte_words(which: str, words: tuple[str, str, str, str]) -> dict[str, str]:
    return {
        f"{which}_{name}": word for name, word in zip(("LOW", "HIGH", "MIRROR_LOW", "MIRROR_HIGH"), words, strict=True)
    }
