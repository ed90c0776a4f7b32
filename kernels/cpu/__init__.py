"""The CPU kernels: `store_kv` and `attend` in C++, for AVX2, AVX-512, NEON and plain C++, loaded through ctypes.

Same signatures and meaning as `kernels/reference.py`, for CPU tensors. Attend computes on 16-bit integers where it
reads packed tokens (see `src/packed.h`) and in float32 elsewhere. `docs/cpu-kernels.md` has the design and what was
measured.
"""

from __future__ import annotations

import functools

import torch

from turboquant.kernels.cpu.library import AttendArgs, Integers, Pages, StoreArgs, Vectors, call
from turboquant.kernels.cpu.tables import layer_tables
from turboquant.kernels.interface import FORCE_ENV, ExactWindow, KVParams
from turboquant.packing import split_page

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def store_kv(key, value, pages, slot_mapping, positions, params: KVParams) -> None:
    """See `turboquant.kernels.interface.store_kv`."""
    _check_device(key)
    key, value = _inner_contiguous(key), _inner_contiguous(value)
    slots, positions = _int64(slot_mapping), _int64(positions)
    tables = layer_tables(params)
    args = StoreArgs(
        _vectors(key), _vectors(value), _pages(pages, params), tables.cover(0),
        slots.data_ptr(), positions.data_ptr(), len(slots), torch.get_num_threads(),
    )  # fmt: skip
    call("tq_store", args)


def attend(
    query, pages, block_table, seq_lens, query_start_loc, params: KVParams,
    *, scale, causal, sliding_window, softcap, sinks, fresh, window, strict, out,
) -> None:  # fmt: skip
    """See `turboquant.kernels.interface.attend`.

    Raises:
        IndexError: a block that would be read lies outside its pages, or rows outside `query`.
        ValueError: a sequence has more queries than tokens.
    """
    _check_device(query)
    query, block_table = _inner_contiguous(query), _inner_contiguous(block_table)
    lengths, starts = _int64(seq_lens), _int64(query_start_loc)
    written = _inner_contiguous(out)
    own = (None, None) if fresh is None else tuple(_inner_contiguous(x) for x in fresh)
    sinks = None if sinks is None else sinks.float().contiguous()
    tables = layer_tables(params)
    args = AttendArgs(
        query=_vectors(query), out=_vectors(written), fresh_key=_vectors(own[0]), fresh_value=_vectors(own[1]),
        pages=_pages(pages, params), block_table=_integers(block_table),
        layer=tables.cover(int(lengths.max()) if len(lengths) else 0),
        seq_lens=lengths.data_ptr(), starts=starts.data_ptr(),
        num_seqs=len(lengths), num_rows=query.shape[0], num_heads=query.shape[1],
        scale=scale, softcap=softcap, sinks=None if sinks is None else sinks.data_ptr(), causal=causal,
        sliding_window=sliding_window or 0, strict=strict, threads=torch.get_num_threads(),
    )  # fmt: skip
    held = None if window is None else _add_window(args, window)
    call("tq_attend", args)
    del held
    if written is not out:
        used = slice(int(starts[0]), int(starts[-1]))
        out[used] = written[used]


def _check_device(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        raise ValueError(f"the CPU kernels were asked for a tensor on {x.device}: unset {FORCE_ENV}, or move it.")


def _add_window(args: AttendArgs, window: ExactWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the window's fields; the tensors returned must outlive the call."""
    pages, table = _inner_contiguous(window.pages), _inner_contiguous(window.block_table)
    args.window = Vectors(pages.data_ptr(), DTYPES[pages.dtype], pages.stride(0), pages.stride(1))
    args.window_table = _integers(table)
    args.window_blocks, args.window_block_size = pages.shape[0], pages.shape[2]
    args.window_token_stride = pages.stride(2)
    args.window_size, args.window_first = window.size, window.first
    return pages, table


def _pages(pages: torch.Tensor, params: KVParams) -> Pages:
    planes = _checked_planes(pages.shape, pages.stride(), params.fmt, params.head_dim)
    return Pages(
        pages.data_ptr(), *pages.shape[:3], *pages.stride()[:2],
        planes.value_codes, planes.key_scales, planes.value_scales, planes.end,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _checked_planes(shape, stride, fmt, head_dim):
    split_page(torch.empty_strided(shape, stride, dtype=torch.uint8, device="meta"), fmt, head_dim)
    return fmt.planes(shape[2], head_dim)


def _vectors(x: torch.Tensor | None) -> Vectors:
    return Vectors() if x is None else Vectors(x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.stride(1))


def _integers(x: torch.Tensor) -> Integers:
    return Integers(x.data_ptr(), x.element_size(), x.stride(0), x.shape[1])


def _inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _int64(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64).contiguous()
