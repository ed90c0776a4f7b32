"""The CPU kernels: `store_kv` and `attend` in C++, for AVX2, AVX-512, NEON and plain C++, loaded through ctypes.

Same signatures and meaning as `kernels/reference.py`, for CPU tensors. Attend computes on 16-bit integers where it
reads packed tokens (see `src/packed.h`) and in float32 elsewhere. `docs/cpu-kernels.md` has the design and what was
measured.
"""

from __future__ import annotations

import functools

import torch

from turboquant.kernels.cpu.library import ATTEND, NO_INTEGERS, NO_VECTORS, STORE, STORE_EXACT, call
from turboquant.kernels.cpu.tables import layer_tables
from turboquant.kernels.interface import FORCE_ENV, ExactWindow, KVParams
from turboquant.packing import split_page

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def store_kv(key, value, pages, slot_mapping, positions, params: KVParams) -> None:
    """See `turboquant.kernels.interface.store_kv`."""
    _check_device(key)
    key, value = _inner_contiguous(key), _inner_contiguous(value)
    slots, positions = _int64(slot_mapping), _int64(positions)
    args = STORE.pack(
        *_vectors(key), *_vectors(value), *_pages(pages, params), *layer_tables(params).cover(0),
        slots.data_ptr(), positions.data_ptr(), slots.shape[0], torch.get_num_threads(),
    )  # fmt: skip
    call("tq_store", args)


def store_window(key, value, pages, slot_mapping) -> None:
    """See `turboquant.kernels.interface.store_window`."""
    _check_device(key)
    key, value = (_inner_contiguous(x.to(pages.dtype)) for x in (key, value))
    written, slots = _inner_contiguous(pages), _int64(slot_mapping)
    blocks, heads, block_size, width = pages.shape
    args = STORE_EXACT.pack(
        *_vectors(key), *_vectors(value), *_vectors(written),
        blocks, heads, block_size, written.stride(2), width // 2, slots.data_ptr(), slots.shape[0],
    )  # fmt: skip
    call("tq_store_exact", args)
    if written is not pages:
        pages.copy_(written)


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
    key, value = (None, None) if fresh is None else (_inner_contiguous(x) for x in fresh)
    sinks = None if sinks is None else sinks.float().contiguous()
    held = None if window is None else (_inner_contiguous(window.pages), _inner_contiguous(window.block_table))
    # What the table of blocks can reach, which is known without a look at the lengths.
    layer = layer_tables(params).cover(block_table.shape[1] * pages.shape[2])
    args = ATTEND.pack(
        *_vectors(query), *_vectors(written), *_vectors(key), *_vectors(value), *_pages(pages, params), *layer,
        *_integers(block_table), *(NO_INTEGERS if held is None else _integers(held[1])),
        lengths.data_ptr(), starts.data_ptr(), lengths.shape[0], *query.shape[:2],
        *_window(window, held), scale, softcap, 0 if sinks is None else sinks.data_ptr(), causal,
        sliding_window or 0, strict, torch.get_num_threads(),
    )  # fmt: skip
    call("tq_attend", args)
    if written is not out:
        used = slice(int(starts[0]), int(starts[-1]))
        out[used] = written[used]


def _check_device(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        raise ValueError(f"the CPU kernels were asked for a tensor on {x.device}: unset {FORCE_ENV}, or move it.")


def _window(window: ExactWindow | None, held: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, ...]:
    if held is None:
        return (*NO_VECTORS, 0, 0, 0, 0, 0)
    pages = held[0]
    return (*_vectors(pages), pages.shape[0], pages.shape[2], pages.stride(2), window.size, window.first)


def _pages(pages: torch.Tensor, params: KVParams) -> tuple[int, ...]:
    shape, stride = pages.shape, pages.stride()
    planes = _checked_planes(shape, stride, params.fmt, params.head_dim)
    return (pages.data_ptr(), *shape[:3], *stride[:2], *planes)


@functools.lru_cache(maxsize=256)
def _checked_planes(shape, stride, fmt, head_dim) -> tuple[int, int, int, int]:
    split_page(torch.empty_strided(shape, stride, dtype=torch.uint8, device="meta"), fmt, head_dim)
    planes = fmt.planes(shape[2], head_dim)
    return planes.value_codes, planes.key_scales, planes.value_scales, planes.end


def _vectors(x: torch.Tensor | None) -> tuple[int, int, int, int]:
    return NO_VECTORS if x is None else (x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.stride(1))


def _integers(x: torch.Tensor) -> tuple[int, int, int, int]:
    return x.data_ptr(), x.element_size(), x.stride(0), x.shape[1]


def _inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _int64(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64).contiguous()
