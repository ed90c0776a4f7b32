"""Loads the shared library and says how to call it. The two structs mirror `src/abi.h` field by field."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_char_p, c_double, c_int64, c_void_p

from turboquant.kernels.cpu.build import HERE, LIBRARY

ABI_VERSION = 1
TILE, SMOOTH = 64, 8
MESSAGE_BYTES = 256
ISA_ENV = "TURBOQUANT_CPU_ISA"
LIBRARY_ENV = "TURBOQUANT_CPU_LIBRARY"
HOW_TO_BUILD = "build it with a C++17 compiler: python -m turboquant.kernels.cpu.build"
ERRORS = {1: IndexError, 2: ValueError, 3: MemoryError}


def _struct(name: str, **fields) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _int64(*names: str) -> dict:
    return dict.fromkeys(names, c_int64)


def _pointers(*names: str) -> dict:
    return dict.fromkeys(names, c_void_p)


Vectors = _struct("Vectors", data=c_void_p, **_int64("dtype", "token_stride", "head_stride"))
Integers = _struct("Integers", data=c_void_p, **_int64("bytes", "row_stride", "columns"))
Pages = _struct(
    "Pages",
    data=c_void_p,
    **_int64("num_blocks", "num_kv_heads", "block_size", "block_stride", "head_stride"),
    **_int64("value_codes", "key_scales", "value_scales", "end"),
)
Layer = _struct(
    "Layer",
    **_int64("dim", "key_bits", "value_bits"),
    **_pointers("rotation", "signs", "key_centroids", "value_centroids", "key_mean", "head_has_mean"),
    **_int64("num_pairs", "interleaved", "num_fast", "smooth_stride", "table_tiles"),
    attention_scaling=c_double,
    **_pointers("inv_freq", "tile_angles", "local", "basis", "smooth"),
)
StoreArgs = _struct(
    "StoreArgs",
    key=Vectors, value=Vectors, pages=Pages, layer=Layer,
    **_pointers("slots", "positions"), **_int64("num_tokens", "threads"),
)  # fmt: skip
AttendArgs = _struct(
    "AttendArgs",
    query=Vectors, out=Vectors, fresh_key=Vectors, fresh_value=Vectors, pages=Pages, layer=Layer,
    block_table=Integers, window_table=Integers,
    **_pointers("seq_lens", "starts"), **_int64("num_seqs", "num_rows", "num_heads"),
    window=Vectors,
    **_int64("window_blocks", "window_block_size", "window_token_stride", "window_size", "window_first"),
    scale=c_double, softcap=c_double, sinks=c_void_p,
    **_int64("causal", "sliding_window", "strict", "threads"),
)  # fmt: skip


class LibraryMissing(RuntimeError):
    """The library is not there or does not fit; the message says how to build it."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library, with the instruction set that TURBOQUANT_CPU_ISA asks for or the best that this CPU has.

    TURBOQUANT_CPU_LIBRARY names another file, such as one built with a sanitiser.

    Raises:
        LibraryMissing: no library, or one of another version.
        ValueError: TURBOQUANT_CPU_ISA names an instruction set that is not available.
    """
    path = os.environ.get(LIBRARY_ENV) or str(HERE / LIBRARY)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryMissing(f"the CPU kernels' library cannot be loaded ({error}): {HOW_TO_BUILD}") from error
    library.tq_abi_version.restype = c_int64
    if library.tq_abi_version() != ABI_VERSION:
        raise LibraryMissing(f"{path} is of another version than this package: {HOW_TO_BUILD}")
    for name in ("tq_available", "tq_selected"):
        getattr(library, name).restype = c_char_p
    library.tq_select.argtypes, library.tq_select.restype = [c_char_p], c_int64
    for name in ("tq_store", "tq_attend"):
        getattr(library, name).argtypes, getattr(library, name).restype = [c_void_p, c_char_p], c_int64
    if wanted := os.environ.get(ISA_ENV):
        _select(library, wanted)
    return library


def available() -> list[str]:
    """The instruction sets that were built and that this CPU has, best first."""
    return load().tq_available().decode().split()


def selected() -> str:
    """The instruction set in use."""
    return load().tq_selected().decode()


def select(name: str) -> None:
    """Use another instruction set from now on, in this process.

    Raises:
        ValueError: it is not available.
    """
    _select(load(), name)


def _select(library: ctypes.CDLL, name: str) -> None:
    if library.tq_select(name.encode()):
        known = ", ".join(library.tq_available().decode().split())
        raise ValueError(f"instruction set {name!r} is not available: allowed are {known} (see {ISA_ENV}).")


def call(function: str, args: ctypes.Structure) -> None:
    """Call tq_store or tq_attend.

    Raises:
        IndexError: a block or slot outside the pages.
        ValueError: lengths that contradict each other.
        MemoryError: no memory for the kernels' own buffers.
    """
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    status = getattr(load(), function)(ctypes.addressof(args), message)
    if status:
        raise ERRORS[status](message.value.decode())
