"""Codes to numbers inside a kernel: `load_words` reads packed codes, `dequant` turns a word into operands of `tl.dot`.

A word holds the same number of codes for every head_dim: 4 codes of 4 bits or 8 of 2 bits in an int16, 8 codes of 3
bits in the low 24 bits of an int32. Code j of word w is coordinate NUM·w + j of the vector, so the j-th results of all
words are the coordinates j, j + NUM, j + 2·NUM, ...: a dot product over D is the sum of NUM dot products over D / NUM
words, and no code ever changes its place.

FAST maps codes to small integers (`tables.py`) by byte permutes: one PRMT looks up four codes in a table of eight
bytes, and a second one spreads the bytes of two words over fp16 pairs. The pair (b, 0) is the subnormal b · 2**-24:
tensor cores take it as it is, no conversion, no magic number, no subtraction. With 4 bits the table is in two halves,
positive and negative centroids, each zero where the other holds: x = p - n. With 2 and 3 bits it is b - BIAS.
Elsewhere (other hardware, float32 and the interpreter) `look_up` gathers from a table in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

BIAS = 64  # of the 2-bit and 3-bit byte tables

_BIAS_SUBNORMAL = tl.constexpr(BIAS * 2.0**-24)


@triton.jit
def load_words(rows, word, mask, shifts, BITS: tl.constexpr, ALIGNED: tl.constexpr, FAST: tl.constexpr):
    """Words [.., ..] at the broadcast of row pointers (bytes) and word indices.

    Args:
        rows: uint8 pointers to each token's codes, [N, 1] or [1, N].
        word: indices of words, [1, W] or [W, 1].
        mask: of the broadcast shape, or None.
        shifts: with 3 bits and ALIGNED, the bit that each group of codes starts at in its 4-byte word, broadcast; a
            value from memory, because the compiler moves a layout conversion above the unpacking only if all inputs of
            the unpacking are loads.
        ALIGNED: rows start at multiples of 4 bytes.
    """
    if BITS == 3:
        byte = word * 3
        if ALIGNED:
            pointers = rows.to(tl.pointer_type(tl.int32)) + byte // 4
            low = _load(pointers, mask)
            high = _load(pointers + 1, mask)
            words = _funnel(low, high, shifts, FAST)
        else:
            words = _load(rows + byte, mask).to(tl.int32)
            words |= _load(rows + byte + 1, mask).to(tl.int32) << 8
            words |= _load(rows + byte + 2, mask).to(tl.int32) << 16
    else:
        words = _load(rows.to(tl.pointer_type(tl.int16)) + word, mask)
    return words


@triton.jit
def _load(pointers, mask):
    if mask is None:  # noqa: SIM108
        words = tl.load(pointers)
    else:
        words = tl.load(pointers, mask=mask, other=0)
    return words


@triton.jit
def _funnel(low, high, shifts, FAST: tl.constexpr):
    """The low 32 bits of (high : low) >> shifts."""
    if FAST:
        words = tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shifts], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        words = (low.to(tl.uint32, bitcast=True) >> shifts.to(tl.uint32)).to(tl.int32, bitcast=True)
        # In two steps, for a shift by 32 is none.
        words |= (high << 1) << (31 - shifts)
    return words


@triton.jit
def look_up(words, table, J: tl.constexpr, BITS: tl.constexpr):
    """table[code J of each word]."""
    return tl.load(table + ((words.to(tl.int32) >> (J * BITS)) & ((1 << BITS) - 1)))


# The low half of a table, in a register: ptxas keeps a constant in a uniform register and copies it for each PRMT, so
# make it look as if it depended on the lane. No lane has all others below it.
_TABLE = tl.constexpr(
    ".reg .pred p; .reg .b32 m, low; mov.u32 m, %lanemask_lt; setp.eq.u32 p, m, 0xFFFFFFFF; selp.b32 low, 0, "
)
_LOOK_UP_PAIR = tl.constexpr("shr.u32 h, x, 16; prmt.b32 $0, low, ")


@triton.jit
def _bytes_of_pairs(words, LOW: tl.constexpr, HIGH: tl.constexpr, SELECT: tl.constexpr):
    """Two int16 words at a time: the bytes that each word's four nibbles select, after SELECT has made x of $2."""
    asm: tl.constexpr = (
        "{ .reg .b32 x, h; " + _TABLE + LOW + ", p; " + SELECT + _LOOK_UP_PAIR + HIGH + ", x; prmt.b32 $1, low, "
        + HIGH + ", h; }"
    )  # fmt: skip
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [words], dtype=tl.int32, is_pure=True, pack=2)


@triton.jit
def _bytes_of_nibbles(nibbles, LOW: tl.constexpr, HIGH: tl.constexpr):
    asm: tl.constexpr = "{ " + _TABLE + LOW + ", p; prmt.b32 $0, low, " + HIGH + ", $1; }"
    return tl.inline_asm_elementwise(asm, "=r,r", [nibbles], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _half(octets, SELECT: tl.constexpr):
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, " + SELECT + ";"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [octets], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _halves(octets):
    # Byte j of both words into the low bytes of a pair; selectors with bit 3 set give zero, bytes being below 128.
    return _half(octets, "0xC480"), _half(octets, "0xD591"), _half(octets, "0xE6A2"), _half(octets, "0xF7B3")


@triton.jit
def _nibbles_of_3(groups):
    """Eight 3-bit codes in 24 bits to eight nibbles; what is above bit 23 does not matter."""
    x = (groups & 0xFFF) + (groups & 0xFFF000) * 16
    x += (x & 0x0FC00FC0) * 3
    return x + (x & 0x38383838)


@triton.jit
def dequant(words, LOW: tl.constexpr, HIGH: tl.constexpr, MIRROR_LOW: tl.constexpr, MIRROR_HIGH: tl.constexpr,
            BITS: tl.constexpr):  # fmt: skip
    """FAST: a word to eight fp16 operands, in units of 2**-24.

    4 bits: positive parts of codes 0..3, then negative parts. 2 and 3 bits: codes 0..7, BIAS included. LOW and HIGH are
    the byte table as hexadecimal strings, MIRROR_... that of the negative centroids of 4 bits.
    """
    if BITS == 4:
        # PRMT fills a byte with the table byte's sign bit, zero, where bit 3 of the selector is set.
        x0, x1, x2, x3 = _halves(_bytes_of_pairs(words, LOW, HIGH, "xor.b32 x, $2, 0x88888888; "))
        x4, x5, x6, x7 = _halves(_bytes_of_pairs(words, MIRROR_LOW, MIRROR_HIGH, "mov.b32 x, $2; "))
    elif BITS == 3:
        nibbles = _nibbles_of_3(words)
        x0, x1, x2, x3 = _halves(_bytes_of_nibbles(nibbles, LOW, HIGH))
        x4, x5, x6, x7 = _halves(_bytes_of_nibbles(nibbles >> 16, LOW, HIGH))
    else:
        x0, x2, x4, x6 = _halves(_bytes_of_pairs(words, LOW, HIGH, "and.b32 x, $2, 0x33333333; "))
        x1, x3, x5, x7 = _halves(_bytes_of_pairs(words, LOW, HIGH, "shr.u32 x, $2, 2; and.b32 x, x, 0x33333333; "))
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def scores(
    words, q0, q1, q2, q3, q4, q5, q6, q7, query_sum, table, LOW: tl.constexpr, HIGH: tl.constexpr,
    MIRROR_LOW: tl.constexpr, MIRROR_HIGH: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Σ over D of centroid · q, float32 [N, M], up to the table's gain.

    Args:
        words: [N, W].
        q0..q7: [W, M], q_j[w] = q[NUM·w + j]; of 4 bits only the first four count.
        query_sum: [M], Σ q, which the bias of 2 and 3 bits multiplies.
        table: what `look_up` reads, without FAST.
    """
    if FAST:
        x0, x1, x2, x3, x4, x5, x6, x7 = dequant(words, LOW, HIGH, MIRROR_LOW, MIRROR_HIGH, BITS)
        s = tl.dot(x0, q0)
        s = tl.dot(x1, q1, s)
        s = tl.dot(x2, q2, s)
        s = tl.dot(x3, q3, s)
        if BITS == 4:
            negative = tl.dot(x4, q0)
            negative = tl.dot(x5, q1, negative)
            negative = tl.dot(x6, q2, negative)
            negative = tl.dot(x7, q3, negative)
            s -= negative
        else:
            s = tl.dot(x4, q4, s)
            s = tl.dot(x5, q5, s)
            s = tl.dot(x6, q6, s)
            s = tl.dot(x7, q7, s)
            s -= _BIAS_SUBNORMAL * query_sum[None, :]
    else:
        s = tl.dot(look_up(words, table, 0, BITS), q0, input_precision=IP)
        s = tl.dot(look_up(words, table, 1, BITS), q1, s, input_precision=IP)
        s = tl.dot(look_up(words, table, 2, BITS), q2, s, input_precision=IP)
        s = tl.dot(look_up(words, table, 3, BITS), q3, s, input_precision=IP)
        if BITS != 4:
            s = tl.dot(look_up(words, table, 4, BITS), q4, s, input_precision=IP)
            s = tl.dot(look_up(words, table, 5, BITS), q5, s, input_precision=IP)
            s = tl.dot(look_up(words, table, 6, BITS), q6, s, input_precision=IP)
            s = tl.dot(look_up(words, table, 7, BITS), q7, s, input_precision=IP)
    return s


@triton.jit
def accumulate(
    words, weights, rescale, a0, a1, a2, a3, a4, a5, a6, a7, table, LOW: tl.constexpr, HIGH: tl.constexpr,
    MIRROR_LOW: tl.constexpr, MIRROR_HIGH: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """a_j · rescale + Σ over tokens of centroid · weight: float32 [W, M] each, up to the table's gain.

    Args:
        words: [W, N].
        weights: [N, M], rounded to the operands' dtype.
        rescale: [M].
        a0..a7: [W, M]; of 4 bits only the first four count.
    """
    scale = rescale[None, :]
    if FAST:
        x0, x1, x2, x3, x4, x5, x6, x7 = dequant(words, LOW, HIGH, MIRROR_LOW, MIRROR_HIGH, BITS)
        if BITS == 4:
            opposite = -weights
            a0 = tl.dot(x4, opposite, tl.dot(x0, weights, a0 * scale))
            a1 = tl.dot(x5, opposite, tl.dot(x1, weights, a1 * scale))
            a2 = tl.dot(x6, opposite, tl.dot(x2, weights, a2 * scale))
            a3 = tl.dot(x7, opposite, tl.dot(x3, weights, a3 * scale))
        else:
            # Taken out tile by tile: once at the end, the bias would have drowned the sum's last bits.
            bias = (-_BIAS_SUBNORMAL * tl.sum(weights.to(tl.float32), 0))[None, :]
            a0 = tl.dot(x0, weights, a0 * scale + bias)
            a1 = tl.dot(x1, weights, a1 * scale + bias)
            a2 = tl.dot(x2, weights, a2 * scale + bias)
            a3 = tl.dot(x3, weights, a3 * scale + bias)
            a4 = tl.dot(x4, weights, a4 * scale + bias)
            a5 = tl.dot(x5, weights, a5 * scale + bias)
            a6 = tl.dot(x6, weights, a6 * scale + bias)
            a7 = tl.dot(x7, weights, a7 * scale + bias)
    else:
        a0 = tl.dot(look_up(words, table, 0, BITS), weights, a0 * scale, input_precision=IP)
        a1 = tl.dot(look_up(words, table, 1, BITS), weights, a1 * scale, input_precision=IP)
        a2 = tl.dot(look_up(words, table, 2, BITS), weights, a2 * scale, input_precision=IP)
        a3 = tl.dot(look_up(words, table, 3, BITS), weights, a3 * scale, input_precision=IP)
        if BITS != 4:
            a4 = tl.dot(look_up(words, table, 4, BITS), weights, a4 * scale, input_precision=IP)
            a5 = tl.dot(look_up(words, table, 5, BITS), weights, a5 * scale, input_precision=IP)
            a6 = tl.dot(look_up(words, table, 6, BITS), weights, a6 * scale, input_precision=IP)
            a7 = tl.dot(look_up(words, table, 7, BITS), weights, a7 * scale, input_precision=IP)
    return a0, a1, a2, a3, a4, a5, a6, a7
