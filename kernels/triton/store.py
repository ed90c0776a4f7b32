"""`store_kv` in one launch: rotate, find the nearest codes, match the norm, pack, write. See `kernels/coding.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from turboquant.kernels.interface import KVParams
from turboquant.kernels.triton.common import turns
from turboquant.kernels.triton.launch import constants, dot_precision, launch, on_host
from turboquant.packing import split_page

FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def _norm_and_scaled(x):
    """‖x‖ and x / max|x| of rows [T, D]; 0 where a row is not finite, and its norm is then NaN or infinite.

    The squares of large bf16 values overflow float32.
    """
    largest = tl.max(tl.abs(x), 1)
    # fmax drops NaN.
    finite = (largest < float("inf")) & (tl.sum((x != x).to(tl.int32), 1) == 0)
    usable = finite & (largest > 0)
    inverse = tl.where(usable, 1.0 / tl.where(usable, largest, 1.0), 0.0)
    scaled = tl.where(finite[:, None], x, 0.0) * inverse[:, None]
    relative = tl.sqrt(tl.sum(scaled * scaled, 1))
    return tl.where(finite, largest * relative, float("nan")), relative, scaled


@triton.jit
def _write_codes(codes, rows, first, dim, mask, BITS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Pack codes [T, C] of coordinates first.. into the bytes of `rows` [T]."""
    if BITS == 3:
        groups = tl.reshape(codes, (T, C // 8, 8))
        words = tl.sum(groups << (3 * tl.arange(0, 8))[None, None, :], 2)
        group = first // 8 + tl.arange(0, C // 8)
        pointers = rows[:, None] + group[None, :] * 3
        inside = mask[:, None] & (group * 8 < dim)[None, :]
        tl.store(pointers, (words & 0xFF).to(tl.uint8), mask=inside)
        tl.store(pointers + 1, ((words >> 8) & 0xFF).to(tl.uint8), mask=inside)
        tl.store(pointers + 2, (words >> 16).to(tl.uint8), mask=inside)
    else:
        NUM: tl.constexpr = 8 // BITS
        groups = tl.reshape(codes, (T, C // NUM, NUM))
        octets = tl.sum(groups << (BITS * tl.arange(0, NUM))[None, None, :], 2)
        octet = first // NUM + tl.arange(0, C // NUM)
        inside = mask[:, None] & (octet * NUM < dim)[None, :]
        tl.store(rows[:, None] + octet[None, :], octets.to(tl.uint8), mask=inside)


@triton.jit
def _encode(
    x, rotation, centroids, bounds, rows, mask, dim, BITS: tl.constexpr, T: tl.constexpr, DP: tl.constexpr,
    C: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Write the codes of vectors x [T, DP] into `rows`; their scales [T] float32."""
    norm, relative, scaled = _norm_and_scaled(x)
    unit = scaled / tl.where(relative > 0, relative, 1.0)[:, None]
    inner = tl.arange(0, DP)
    squares = tl.zeros([T], tl.float32)
    for first in range(0, dim, C):
        outer = first + tl.arange(0, C)
        matrix = tl.load(
            rotation + outer[None, :] * dim + inner[:, None],
            mask=(outer < dim)[None, :] & (inner < dim)[:, None],
            other=0.0,
        )
        rotated = tl.dot(unit, matrix, input_precision=IP)
        codes = tl.zeros([T, C], tl.int32)
        chosen = tl.zeros([T, C], tl.float32) + tl.load(centroids)
        for i in range((1 << BITS) - 1):
            above = rotated > tl.load(bounds + i)
            codes += above.to(tl.int32)
            chosen = tl.where(above, tl.load(centroids + i + 1), chosen)
        codes = tl.where((outer < dim)[None, :], codes, 0)
        squares += tl.sum(tl.where((outer < dim)[None, :], chosen * chosen, 0.0), 1)
        _write_codes(codes, rows, first, dim, mask, BITS, T, C)
    scale = tl.minimum(norm / tl.sqrt(squares), FP16_MAX)
    return tl.where(norm < float("inf"), scale, float("nan"))


@triton.jit
def _mean_at(mean, frequency, positions, column, dim, factor, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """RoPE_p(μ) of one head: positions [T, 1] and columns [1, DP] to [T, DP]."""
    own = tl.load(mean + column, mask=column < dim, other=0.0)
    if ROTARY > 0:
        rotary = column < ROTARY
        if INTERLEAVED:
            pair = column // 2
            partner = column ^ 1
            is_first = column % 2 == 0
        else:
            is_first = column < ROTARY // 2
            pair = tl.where(is_first, column, column - ROTARY // 2)
            partner = tl.where(is_first, column + ROTARY // 2, column - ROTARY // 2)
        cos, sin = turns(positions, tl.load(frequency + pair, mask=rotary, other=0))
        other = tl.load(mean + partner, mask=rotary, other=0.0)
        turned = (own * cos + tl.where(is_first, -other, other) * sin) * factor
        own = tl.where(rotary, turned, own)
    return own


@triton.jit
def store_kernel(
    key, value, pages, slot_mapping, positions, rotation, key_centroids, key_bounds, value_centroids, value_bounds,
    mean, frequency, rope_factor, num_tokens, num_slots, dim,
    key_token, key_head, key_dim, value_token, value_head, value_dim, page_block, page_head,
    BLOCK_SIZE: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr, HAS_MEAN: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    T: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_tokens, T), num_kv_heads). Rows of `pages` are addressed by block and head strides in bytes."""
    token = tl.program_id(0) * T + tl.arange(0, T)
    head = tl.program_id(1)
    column = tl.arange(0, DP)[None, :]
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    real = (slot >= 0) & (slot < num_slots)
    slot = tl.where(real, slot, 0)
    inside = real[:, None] & (column < dim)
    offset = (slot % BLOCK_SIZE).to(tl.int32)
    page = pages + (slot // BLOCK_SIZE) * page_block + head.to(tl.int64) * page_head
    scales = (page + BLOCK_SIZE * (KEY_BYTES + VALUE_BYTES) + offset * 2).to(tl.pointer_type(tl.int16))

    rows = token.to(tl.int64)[:, None]
    x = tl.load(key + rows * key_token + head * key_head + column * key_dim, mask=inside, other=0.0).to(tl.float32)
    sign = tl.zeros([T], tl.int16)
    if HAS_MEAN:
        at = tl.load(positions + token, mask=real, other=0)[:, None]
        centred = x - _mean_at(mean + head * dim, frequency, at, column, dim, rope_factor, ROTARY, INTERLEAVED)
        whole, _, _ = _norm_and_scaled(x)
        shorter, _, _ = _norm_and_scaled(centred)
        keeps = whole <= shorter
        x = tl.where(keeps[:, None], x, centred)
        sign = tl.where(keeps, -32768, 0).to(tl.int16)
    scale = _encode(
        x, rotation, key_centroids, key_bounds, page + offset * KEY_BYTES, real, dim, KEY_BITS, T, DP, C, IP
    )
    tl.store(scales, scale.to(tl.float16).to(tl.int16, bitcast=True) | sign, mask=real)

    x = tl.load(value + rows * value_token + head * value_head + column * value_dim, mask=inside, other=0.0).to(
        tl.float32
    )
    codes = page + BLOCK_SIZE * KEY_BYTES + offset * VALUE_BYTES
    scale = _encode(x, rotation, value_centroids, value_bounds, codes, real, dim, VALUE_BITS, T, DP, C, IP)
    tl.store(scales + BLOCK_SIZE, scale.to(tl.float16).to(tl.int16, bitcast=True), mask=real)


def store_kv(key, value, pages, slot_mapping, positions, params: KVParams) -> None:
    """See `turboquant.kernels.interface.store_kv`. On a GPU, a slot outside the pages is skipped, not reported."""
    split_page(pages, params.fmt, params.head_dim)
    num_blocks, num_kv_heads, block_size, _ = pages.shape
    num_tokens, dim = key.shape[0], params.head_dim
    if num_tokens == 0:
        return
    if on_host(key) and (last := int(slot_mapping.max())) >= num_blocks * block_size:
        raise IndexError(f"slot {last} lies outside the pages: {num_blocks} blocks of {block_size} tokens.")
    made, fmt = constants(params, key), params.fmt
    rope = params.rope if made.frequency is not None else None
    tile = min(256, triton.next_power_of_2(num_tokens)) if on_host(key) else 16
    launch(
        store_kernel, (triton.cdiv(num_tokens, tile), num_kv_heads),
        key, value, pages, slot_mapping, positions, made.rotation,
        made.centroids[0], made.bounds[0], made.centroids[1], made.bounds[1],
        made.mean, made.frequency, rope.attention_scaling if rope else 1.0,
        num_tokens, num_blocks * block_size, dim,
        *key.stride(), *value.stride(), pages.stride(0), pages.stride(1),
        BLOCK_SIZE=block_size, KEY_BITS=fmt.key_bits, VALUE_BITS=fmt.value_bits,
        KEY_BYTES=fmt.key_code_bytes(dim), VALUE_BYTES=fmt.value_code_bytes(dim),
        HAS_MEAN=made.mean is not None, ROTARY=rope.rotary_dim if rope else 0,
        INTERLEAVED=bool(rope and rope.interleaved),
        T=tile, DP=max(16, triton.next_power_of_2(dim)), C=32, IP=dot_precision(key.device),
        num_warps=4,
    )  # fmt: skip
