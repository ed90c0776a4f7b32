"""Loads the shared library and says how to call it. The two structs mirror `src/abi.h` field by field.

A call's struct is packed from a flat tuple of its values: a decode step calls twice a layer, and making ctypes objects
would take longer than the work in a short one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from ctypes import c_char_p, c_int64, c_void_p

from turboquant.kernels.cpu.build import HERE, LIBRARY

ABI_VERSION = 2
TILE, SMOOTH = 64, 8
MESSAGE_BYTES = 256
ISA_ENV = "TURBOQUANT_CPU_ISA"
LIBRARY_ENV = "TURBOQUANT_CPU_LIBRARY"
HOW_TO_BUILD = "build it with a C++17 compiler: python -m turboquant.kernels.cpu.build"
ERRORS = {1: IndexError, 2: ValueError, 3: MemoryError}


# Every field has 8 bytes: q for integers and pointers, d for float64.
VECTORS = "4q"  # data, dtype, token_stride, head_stride
INTEGERS = "4q"  # data, bytes, row_stride, columns
PAGES = "10q"  # data, num_blocks, num_kv_heads, block_size, block_stride, head_stride, offsets of three planes, end
LAYER = (
    "3q"  # dim, key_bits, value_bits
    "6q"  # rotation, signs, key_centroids, value_centroids, key_mean, head_has_mean
    "5q"  # num_pairs, interleaved, num_fast, smooth_stride, table_tiles
    "d"  # attention_scaling
    "5q"  # inv_freq, tile_angles, local, basis, smooth
)
STORE = struct.Struct(
    "=" + 2 * VECTORS + PAGES + LAYER  # key, value, pages, layer
    + "4q"  # slots, positions, num_tokens, threads
)  # fmt: skip
STORE_EXACT = struct.Struct(
    "=" + 3 * VECTORS  # key, value, pages
    + "7q"  # num_blocks, num_kv_heads, block_size, token_stride, dim, slots, num_tokens
)  # fmt: skip
ATTEND = struct.Struct(
    "=" + 4 * VECTORS + PAGES + LAYER  # query, out, fresh_key, fresh_value, pages, layer
    + 2 * INTEGERS  # block_table, window_table
    + "5q"  # seq_lens, starts, num_seqs, num_rows, num_heads
    + VECTORS + "5q"  # window: pages, num_blocks, block_size, token_stride in a block, size, first
    + "2d" + "5q"  # scale, softcap, sinks, causal, sliding_window, strict, threads
)  # fmt: skip
NO_VECTORS = NO_INTEGERS = (0, 0, 0, 0)


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
    for name in ("tq_store", "tq_store_exact", "tq_attend"):
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


def call(function: str, args: bytes) -> None:
    """Call tq_store, tq_store_exact or tq_attend with a packed struct.

    Raises:
        IndexError: a block or slot outside the pages.
        ValueError: lengths that contradict each other.
        MemoryError: no memory for the kernels' own buffers.
    """
    message = _message_of_thread()
    status = getattr(load(), function)(args, message)
    if status:
        raise ERRORS[status](message.value.decode())


_thread = threading.local()


def _message_of_thread() -> ctypes.Array:
    if not hasattr(_thread, "message"):
        _thread.message = ctypes.create_string_buffer(MESSAGE_BYTES)
    return _thread.message
