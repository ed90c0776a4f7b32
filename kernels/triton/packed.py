"""Attention over the packed pages: one split of one tile of queries of one KV head.

Everything is transposed: tokens are rows and queries columns, so that a query group of 8 fills the tensor core's 8
columns. A tile's M columns are BQ query rows times GP heads of the group (GP >= group, padded).

    logits [N, M] = Σ_j words_j · q_j          softmax over axis 0          acc_j [W, M] += values_j · weights

The tiles that every query sees whole go through a loop without masks, and the few at the edges (causal diagonal,
sliding window, first tokens, tokens that are read exactly by `exact.py`) through one with masks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from turboquant.kernels.triton.common import locate, turns
from turboquant.kernels.triton.dequant import accumulate, load_words, scores

NEVER = tl.constexpr(-1e30)  # a running maximum before any logit; finite, so that differences are


@triton.jit
def page_rows(pages, block_table_row, first, known, page_block, page_head, head, BLOCK_SIZE: tl.constexpr,
              N: tl.constexpr, PER_PAGE: tl.constexpr):  # fmt: skip
    """Pages of the N positions from `first`, and their offsets in them: one page for all with PER_PAGE."""
    index = tl.arange(0, N)
    if PER_PAGE:
        block = tl.load(block_table_row + first // BLOCK_SIZE).to(tl.int64)
        offset = first % BLOCK_SIZE + index
    else:
        position = first + index
        block = tl.load(block_table_row + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
    return pages + block * page_block + head.to(tl.int64) * page_head, offset


@triton.jit
def mean_logits(cos_part, sin_part, constant, bound, first, frequency, cos_high, sin_high, cos_low, sin_low,
                N: tl.constexpr, R2: tl.constexpr, R2P: tl.constexpr, IP: tl.constexpr):  # fmt: skip
    """q·RoPE_p(μ) for the N positions from `first`: [N, M].

    It is Σ_i cos_part_i·cos(p·ω_i) + sin_part_i·sin(p·ω_i) + constant; the tile's start turns the coefficients, and the
    tables [N, R2P] hold positions 0..N-1. In 16 bits, a number is the sum of two, LOW of them in units of 2**-11: a
    mean's logits are large, and their differences matter. `bound` [M] brings the coefficients into -1..1.
    """
    added = tl.zeros([N, 1], tl.float32) + constant[None, :]
    if R2 > 0:
        pair = tl.arange(0, R2P)
        cos, sin = turns(tl.zeros([R2P], tl.int64) + first, tl.load(frequency + pair, mask=pair < R2, other=0))
        cosines = cos_part * cos[:, None] + sin_part * sin[:, None]
        sines = sin_part * cos[:, None] - cos_part * sin[:, None]
        high_cos = cosines.to(cos_high.dtype)
        high_sin = sines.to(cos_high.dtype)
        logits = tl.dot(cos_high, high_cos, input_precision=IP)
        logits = tl.dot(sin_high, high_sin, logits, input_precision=IP)
        if cos_high.dtype == tl.float16:
            low = tl.dot(cos_low, high_cos)
            low = tl.dot(sin_low, high_sin, low)
            low = tl.dot(cos_high, ((cosines - high_cos.to(tl.float32)) * 2048.0).to(tl.float16), low)
            low = tl.dot(sin_high, ((sines - high_sin.to(tl.float32)) * 2048.0).to(tl.float16), low)
            logits += low * (1.0 / 2048.0)
        added += logits * bound[None, :]
    return added


@triton.jit
def mean_coefficients(query, mean, columns, live, dim, stride, R2: tl.constexpr, R2P: tl.constexpr,
                      DP: tl.constexpr, INTERLEAVED: tl.constexpr, factor):  # fmt: skip
    """The coefficients that `mean_logits` takes, [R2P, M] twice and [M], from raw queries at pointers `query` [M]."""
    column = tl.arange(0, DP)
    passed = (column >= 2 * R2) & (column < dim)
    both = passed[:, None] & live[None, :]
    q = tl.load(query[None, :] + column[:, None] * stride, mask=both, other=0.0).to(tl.float32)
    constant = tl.sum(q * tl.load(mean + column, mask=passed, other=0.0)[:, None], 0)
    cos_part = tl.zeros([1, 1], tl.float32)
    sin_part = cos_part
    if R2 > 0:
        pair = tl.arange(0, R2P)
        first = pair
        second = pair + R2
        if INTERLEAVED:
            first = 2 * pair
            second = 2 * pair + 1
        inside = pair < R2
        both = inside[:, None] & live[None, :]
        q1 = tl.load(query[None, :] + first[:, None] * stride, mask=both, other=0.0).to(tl.float32)
        q2 = tl.load(query[None, :] + second[:, None] * stride, mask=both, other=0.0).to(tl.float32)
        mu1 = tl.load(mean + first, mask=inside, other=0.0)[:, None] * factor
        mu2 = tl.load(mean + second, mask=inside, other=0.0)[:, None] * factor
        cos_part = q1 * mu1 + q2 * mu2
        sin_part = q2 * mu1 - q1 * mu2
    return cos_part, sin_part, constant


@triton.jit
def soft_capped(logits, softcap):
    """softcap · tanh(logits / softcap)."""
    return softcap - 2.0 * softcap / (tl.exp(2.0 * logits / softcap) + 1.0)


@triton.jit
def load_query(pointers, word, live, J: tl.constexpr, NUM: tl.constexpr, W: tl.constexpr):
    """Coordinates J, J + NUM, ... of rotated queries: [WP, M]."""
    inside = (word < W)[:, None] & live[None, :]
    return tl.load(pointers[None, :] + (word * NUM + J)[:, None], mask=inside, other=0.0)


@triton.jit
def packed_kernel(
    query, rotated, norms, pages, block_table, seq_lens, query_start_loc, window_table, partial, statistics,
    key_table, value_table, key_gain, value_gain, shifts, mean, frequency, angles, angle_rows, rope_factor,
    scale, softcap, window_size, window_first, sliding, num_seqs, num_heads, num_kv_heads, first_tile, dim,
    query_token, query_head, query_dim, page_block, page_head, table_seq, window_seq,
    SPLITS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    BQ: tl.constexpr, GP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr,
    KEY_WP: tl.constexpr, VALUE_WP: tl.constexpr,
    KEY_LOW: tl.constexpr, KEY_HIGH: tl.constexpr, KEY_MIRROR_LOW: tl.constexpr, KEY_MIRROR_HIGH: tl.constexpr,
    VALUE_LOW: tl.constexpr, VALUE_HIGH: tl.constexpr, VALUE_MIRROR_LOW: tl.constexpr, VALUE_MIRROR_HIGH: tl.constexpr,
    ALIGNED: tl.constexpr, PER_PAGE: tl.constexpr, CAUSAL: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_MEAN: tl.constexpr, R2: tl.constexpr, R2P: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_FRESH: tl.constexpr, HAS_WINDOW: tl.constexpr, STRICT: tl.constexpr,
    FAST: tl.constexpr, WEIGHT_UNIT: tl.constexpr, IP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, num_kv_heads, SPLITS); writes one partial result, in the rotated frame."""
    M: tl.constexpr = BQ * GP
    KEY_NUM: tl.constexpr = 4 if KEY_BITS == 4 else 8
    VALUE_NUM: tl.constexpr = 4 if VALUE_BITS == 4 else 8
    KEY_W: tl.constexpr = D // KEY_NUM
    VALUE_W: tl.constexpr = D // VALUE_NUM
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq, row, count, begin, end = locate(first_tile + tile, query_start_loc, num_seqs, BQ)
    if count > 0:
        seq_len = tl.load(seq_lens + seq).to(tl.int32)
        past = seq_len - (end - begin)
        lowest = past + row - begin
        highest = lowest + count - 1
        column = tl.arange(0, M)
        query_row = column // GP
        live = (query_row < count) & (column % GP < GROUP)
        query_at = lowest + query_row
        index = tl.arange(0, N)
        table_row = block_table + seq.to(tl.int64) * table_seq

        # Positions that some query sees here, and those that every query sees and nothing reads exactly.
        seen_from = 0
        whole_from = 0
        seen_to = seq_len
        whole_to = seq_len
        if SLIDING:
            seen_from = tl.maximum(lowest - sliding + 1, 0)
            whole_from = tl.maximum(highest - sliding + 1, 0)
        if CAUSAL:
            seen_to = highest + 1
            whole_to = lowest + 1
        if HAS_FRESH and not STRICT:
            seen_to = tl.minimum(seen_to, past)
            whole_to = tl.minimum(whole_to, past)
        if HAS_WINDOW:
            whole_from = tl.maximum(whole_from, window_first)
            whole_to = tl.minimum(whole_to, lowest - window_size + 1)
        first_of_all = seen_from // N
        last_of_all = tl.maximum(tl.cdiv(seen_to, N), first_of_all)
        chunk = tl.cdiv(last_of_all - first_of_all, SPLITS)
        from_tile = tl.minimum(first_of_all + split * chunk, last_of_all)
        to_tile = tl.minimum(from_tile + chunk, last_of_all)
        whole_from_tile = tl.minimum(tl.maximum(tl.cdiv(whole_from, N), from_tile), to_tile)
        whole_to_tile = tl.minimum(tl.maximum(tl.maximum(whole_to, 0) // N, whole_from_tile), to_tile)
        edges_before = whole_from_tile - from_tile
        num_edges = edges_before + to_tile - whole_to_tile

        slab = (tile * num_kv_heads + head).to(tl.int64)
        key_word = tl.arange(0, KEY_WP)
        value_word = tl.arange(0, VALUE_WP)
        rotated_rows = rotated + (slab * M + column) * D
        q0 = load_query(rotated_rows, key_word, live, 0, KEY_NUM, KEY_W)
        q1 = load_query(rotated_rows, key_word, live, 1, KEY_NUM, KEY_W)
        q2 = load_query(rotated_rows, key_word, live, 2, KEY_NUM, KEY_W)
        q3 = load_query(rotated_rows, key_word, live, 3, KEY_NUM, KEY_W)
        q4 = q0
        q5 = q0
        q6 = q0
        q7 = q0
        query_sum = tl.zeros([M], tl.float32)
        if KEY_NUM == 8:
            q4 = load_query(rotated_rows, key_word, live, 4, KEY_NUM, KEY_W)
            q5 = load_query(rotated_rows, key_word, live, 5, KEY_NUM, KEY_W)
            q6 = load_query(rotated_rows, key_word, live, 6, KEY_NUM, KEY_W)
            q7 = load_query(rotated_rows, key_word, live, 7, KEY_NUM, KEY_W)
            every = q0.to(tl.float32) + q1.to(tl.float32) + q2.to(tl.float32) + q3.to(tl.float32)
            every += q4.to(tl.float32) + q5.to(tl.float32) + q6.to(tl.float32) + q7.to(tl.float32)
            query_sum = tl.sum(every, 0)

        # Logits in units of log2, so that exp2 is enough; a soft cap takes them in natural units first.
        unit = scale
        if not SOFTCAP:
            unit = scale * 1.4426950408889634
        factor = tl.load(norms + slab * M + column) * (key_gain * unit)
        cos_part = tl.zeros([1, 1], tl.float32)
        sin_part = cos_part
        constant = tl.zeros([1], tl.float32)
        bound = constant
        cos_high = cos_part
        sin_high = cos_part
        cos_low = cos_part
        sin_low = cos_part
        if HAS_MEAN:
            raw = (
                query + (row + query_row).to(tl.int64) * query_token
                + (head * GROUP + column % GP).to(tl.int64) * query_head
            )  # fmt: skip
            cos_part, sin_part, constant = mean_coefficients(
                raw, mean + head * dim, column, live, dim, query_dim, R2, R2P, DP, INTERLEAVED, rope_factor
            )
            constant *= unit
            if R2 > 0:
                # A rotation of (cos_part, sin_part) leaves this as it is.
                largest_part = tl.max(tl.sqrt(cos_part * cos_part + sin_part * sin_part), 0)
                bound = largest_part * unit
                inverse = tl.where(largest_part > 0, 1.0 / tl.where(largest_part > 0, largest_part, 1.0), 0.0)
                cos_part *= inverse[None, :]
                sin_part *= inverse[None, :]
                pair = tl.arange(0, R2P)
                cell = index[:, None] * R2 + pair[None, :]
                plane = angle_rows * R2
                inside = tl.broadcast_to((pair < R2)[None, :], (N, R2P))
                cos_high = tl.load(angles + cell, mask=inside, other=0.0)
                sin_high = tl.load(angles + plane + cell, mask=inside, other=0.0)
                if cos_high.dtype == tl.float16:
                    cos_low = tl.load(angles + 2 * plane + cell, mask=inside, other=0.0)
                    sin_low = tl.load(angles + 3 * plane + cell, mask=inside, other=0.0)

        largest = tl.full([M], NEVER, tl.float32)
        total = tl.zeros([N, M], tl.float32)
        # Weights times V's scales must fit fp16: they are kept relative to the largest scale so far.
        reach = 0.0
        a0 = tl.zeros([VALUE_WP, M], tl.float32)
        a1 = a0
        a2 = a0
        a3 = a0
        a4 = a0
        a5 = a0
        a6 = a0
        a7 = a0

        for t in tl.range(whole_from_tile, whole_to_tile, num_stages=STAGES):
            page, offset = page_rows(
                pages, table_row, t * N, index >= 0, page_block, page_head, head, BLOCK_SIZE, N, PER_PAGE
            )
            largest, total, reach, a0, a1, a2, a3, a4, a5, a6, a7 = attend_tile(
                page, offset, t * N, None, largest, total, reach, a0, a1, a2, a3, a4, a5, a6, a7,
                q0, q1, q2, q3, q4, q5, q6, q7, query_sum, factor, softcap,
                cos_part, sin_part, constant, bound, frequency, cos_high, sin_high, cos_low, sin_low,
                key_table, value_table, shifts, key_word, value_word,
                BLOCK_SIZE, N, KEY_BITS, VALUE_BITS, KEY_BYTES, VALUE_BYTES, KEY_W, VALUE_W, KEY_WP, VALUE_WP,
                KEY_LOW, KEY_HIGH, KEY_MIRROR_LOW, KEY_MIRROR_HIGH,
                VALUE_LOW, VALUE_HIGH, VALUE_MIRROR_LOW, VALUE_MIRROR_HIGH,
                ALIGNED, SOFTCAP, HAS_MEAN, R2, R2P, FAST, WEIGHT_UNIT, IP,
            )  # fmt: skip

        for e in tl.range(0, num_edges, num_stages=1):
            first = tl.where(e < edges_before, from_tile + e, whole_to_tile + e - edges_before) * N
            at = first + index
            visible = live[None, :] & (at >= seen_from)[:, None] & (at < seen_to)[:, None]
            if CAUSAL:
                visible &= at[:, None] <= query_at[None, :]
            if SLIDING:
                visible &= at[:, None] > query_at[None, :] - sliding
            if HAS_WINDOW:
                covered = (at[:, None] > query_at[None, :] - window_size) | (at < window_first)[:, None]
                held_block = tl.load(
                    window_table + seq.to(tl.int64) * window_seq + at // WINDOW_BLOCK, mask=at < past, other=0
                )
                visible &= ~(covered & ((at >= past) | (held_block > 0))[:, None])
            if tl.max(tl.max(visible.to(tl.int32), 1), 0) > 0:
                page, offset = page_rows(
                    pages, table_row, first, (at >= seen_from) & (at < seen_to), page_block, page_head, head,
                    BLOCK_SIZE, N, PER_PAGE,
                )  # fmt: skip
                largest, total, reach, a0, a1, a2, a3, a4, a5, a6, a7 = attend_tile(
                    page, offset, first, visible, largest, total, reach, a0, a1, a2, a3, a4, a5, a6, a7,
                    q0, q1, q2, q3, q4, q5, q6, q7, query_sum, factor, softcap,
                    cos_part, sin_part, constant, bound, frequency, cos_high, sin_high, cos_low, sin_low,
                    key_table, value_table, shifts, key_word, value_word,
                    BLOCK_SIZE, N, KEY_BITS, VALUE_BITS, KEY_BYTES, VALUE_BYTES, KEY_W, VALUE_W, KEY_WP, VALUE_WP,
                    KEY_LOW, KEY_HIGH, KEY_MIRROR_LOW, KEY_MIRROR_HIGH,
                    VALUE_LOW, VALUE_HIGH, VALUE_MIRROR_LOW, VALUE_MIRROR_HIGH,
                    ALIGNED, SOFTCAP, HAS_MEAN, R2, R2P, FAST, WEIGHT_UNIT, IP,
                )  # fmt: skip

        part = (slab * (SPLITS + 1) + split) * M
        tl.store(statistics + part * 2 + column, largest)
        tl.store(statistics + part * 2 + M + column, tl.sum(total, 0))
        gain = reach * (value_gain / WEIGHT_UNIT)
        at = partial + (part + column)[None, :] * D + value_word[:, None]
        inside = (value_word < VALUE_W)[:, None] & (column >= 0)[None, :]
        tl.store(at, a0 * gain, mask=inside)
        tl.store(at + VALUE_W, a1 * gain, mask=inside)
        tl.store(at + 2 * VALUE_W, a2 * gain, mask=inside)
        tl.store(at + 3 * VALUE_W, a3 * gain, mask=inside)
        if VALUE_NUM == 8:
            tl.store(at + 4 * VALUE_W, a4 * gain, mask=inside)
            tl.store(at + 5 * VALUE_W, a5 * gain, mask=inside)
            tl.store(at + 6 * VALUE_W, a6 * gain, mask=inside)
            tl.store(at + 7 * VALUE_W, a7 * gain, mask=inside)


@triton.jit
def attend_tile(
    page, offset, first, visible, largest, total, reach, a0, a1, a2, a3, a4, a5, a6, a7,
    q0, q1, q2, q3, q4, q5, q6, q7, query_sum, factor, softcap,
    cos_part, sin_part, constant, bound, frequency, cos_high, sin_high, cos_low, sin_low,
    key_table, value_table, shifts, key_word, value_word,
    BLOCK_SIZE: tl.constexpr, N: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, KEY_W: tl.constexpr, VALUE_W: tl.constexpr,
    KEY_WP: tl.constexpr, VALUE_WP: tl.constexpr,
    KEY_LOW: tl.constexpr, KEY_HIGH: tl.constexpr, KEY_MIRROR_LOW: tl.constexpr, KEY_MIRROR_HIGH: tl.constexpr,
    VALUE_LOW: tl.constexpr, VALUE_HIGH: tl.constexpr, VALUE_MIRROR_LOW: tl.constexpr, VALUE_MIRROR_HIGH: tl.constexpr,
    ALIGNED: tl.constexpr, SOFTCAP: tl.constexpr, HAS_MEAN: tl.constexpr, R2: tl.constexpr, R2P: tl.constexpr,
    FAST: tl.constexpr, WEIGHT_UNIT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over N tokens; `visible` [N, M], or None where every query sees all of them."""
    key_shifts = 0
    value_shifts = 0
    if KEY_BITS == 3 and ALIGNED:
        key_shifts = tl.broadcast_to(tl.load(shifts + key_word, mask=key_word < KEY_W, other=0)[None, :], (N, KEY_WP))
    if VALUE_BITS == 3 and ALIGNED:
        value_shifts = tl.broadcast_to(
            tl.load(shifts + value_word, mask=value_word < VALUE_W, other=0)[:, None], (VALUE_WP, N)
        )
    key_mask = None
    value_mask = None
    if KEY_W < KEY_WP:
        key_mask = tl.broadcast_to((key_word < KEY_W)[None, :], (N, KEY_WP))
    if VALUE_W < VALUE_WP:
        value_mask = tl.broadcast_to((value_word < VALUE_W)[:, None], (VALUE_WP, N))
    # Tokens that nobody sees are read all the same: their pages exist, and what they hold is masked below.
    scale_at = (page + BLOCK_SIZE * (KEY_BYTES + VALUE_BYTES) + offset * 2).to(tl.pointer_type(tl.int16))
    key_scale = tl.load(scale_at)
    value_scale = tl.load(scale_at + BLOCK_SIZE)
    value_scale = value_scale.to(tl.float16, bitcast=True).to(tl.float32)

    key_words = load_words(
        (page + offset * KEY_BYTES)[:, None], key_word[None, :], key_mask, key_shifts, KEY_BITS, ALIGNED, FAST
    )
    logits = scores(
        key_words, q0, q1, q2, q3, q4, q5, q6, q7, query_sum, key_table,
        KEY_LOW, KEY_HIGH, KEY_MIRROR_LOW, KEY_MIRROR_HIGH, KEY_BITS, FAST, IP,
    )  # fmt: skip
    logits *= (key_scale & 0x7FFF).to(tl.float16, bitcast=True).to(tl.float32)[:, None] * factor[None, :]
    if HAS_MEAN:
        added = mean_logits(
            cos_part, sin_part, constant, bound, first, frequency, cos_high, sin_high, cos_low, sin_low, N, R2, R2P, IP
        )
        logits += tl.where((key_scale >= 0)[:, None], added, 0.0)
    if SOFTCAP:
        logits = soft_capped(logits, softcap) * 1.4426950408889634
    if visible is not None:
        logits = tl.where(visible, logits, float("-inf"))

    now_largest = tl.maximum(largest, tl.max(logits, 0))
    rescale = tl.exp2(largest - now_largest)
    weights = tl.exp2(logits - now_largest[None, :])
    total = total * rescale[None, :] + weights

    finite = value_scale == value_scale
    if visible is not None:
        finite &= tl.max(visible.to(tl.int32), 1) > 0
    now_reach = tl.maximum(reach, tl.max(tl.where(finite, value_scale, 0.0), 0))
    inverse = tl.where(now_reach > 0, 1.0 / tl.where(now_reach > 0, now_reach, 1.0), 0.0)
    scaled = weights * (value_scale * (inverse * WEIGHT_UNIT))[:, None]
    if visible is not None:
        scaled = tl.where(visible, scaled, 0.0)

    value_rows = page + BLOCK_SIZE * KEY_BYTES + offset * VALUE_BYTES
    value_words = load_words(
        value_rows[None, :], value_word[:, None], value_mask, value_shifts, VALUE_BITS, ALIGNED, FAST
    )
    a0, a1, a2, a3, a4, a5, a6, a7 = accumulate(
        value_words, scaled.to(q0.dtype), rescale * (reach * inverse), a0, a1, a2, a3, a4, a5, a6, a7, value_table,
        VALUE_LOW, VALUE_HIGH, VALUE_MIRROR_LOW, VALUE_MIRROR_HIGH, VALUE_BITS, FAST, IP,
    )  # fmt: skip
    return now_largest, total, now_reach, a0, a1, a2, a3, a4, a5, a6, a7
