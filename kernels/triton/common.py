"""Small device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turns(position, frequency):
    """cos and sin of the angle position · frequency, frequency in 2**-64 turns (int64, wrapping).

    Whole turns drop out of the integer product by themselves, which makes any position as exact as position 0.
    """
    product = position.to(tl.int64) * frequency
    half = (product >> 32).to(tl.int32).to(tl.float32) * 7.314590396335798e-10  # π · turns, in -π/2 .. π/2
    square = half * half
    # Taylor series; the next terms are below 6e-8.
    sin = -2.505210838544172e-08 * square + 2.7557319223985893e-06
    sin = sin * square - 1.984126984126984e-04
    sin = sin * square + 8.333333333333333e-03
    sin = sin * square - 1.6666666666666666e-01
    sin = (sin * square + 1.0) * half
    cos = 2.08767569878681e-09 * square - 2.755731922398589e-07
    cos = cos * square + 2.48015873015873e-05
    cos = cos * square - 1.388888888888889e-03
    cos = cos * square + 4.1666666666666664e-02
    cos = cos * square - 0.5
    cos = cos * square + 1.0
    return 1.0 - 2.0 * sin * sin, 2.0 * sin * cos


@triton.jit
def locate(tile, query_start_loc, num_seqs, BQ: tl.constexpr):
    """Which sequence query tile number `tile` belongs to: (sequence, first row, rows of the sequence that it has).

    The tiles of a sequence follow each other; the host, which does not know the lengths, launches
    `num_query_tiles(...)` of them, and one past the end of its sequence has no rows. With BQ = 1, a tile is a row.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        start = tl.load(query_start_loc + middle).to(tl.int32)
        if BQ > 1:
            start = start // BQ + middle
        if start <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    begin = tl.load(query_start_loc + seq).to(tl.int32)
    end = tl.load(query_start_loc + seq + 1).to(tl.int32)
    row = tile
    if BQ > 1:
        row = begin + (tile - begin // BQ - seq) * BQ
    return seq, row, tl.minimum(tl.maximum(end - row, 0), BQ), begin, end


def num_query_tiles(num_rows: int, num_seqs: int, rows_per_tile: int) -> int:
    """An upper bound that needs no lengths."""
    return num_rows if rows_per_tile == 1 else num_rows // rows_per_tile + num_seqs
