"""The specification: store_kv and attend in plain torch, float32 throughout.

Store, for one token and KV head (x is k − RoPE_p(μ), or v):

    y = R·x / ‖x‖      code_i = index of the centroid nearest to y_i      scale = ‖x‖ / ‖ŷ‖  (ŷ the centroids chosen)

so that x̂ = scale · Rᵀ·ŷ has the norm of x: reading is one multiply. μ is subtracted from a key only where that makes
it shorter, since the error is in proportion to what is left. Attention sinks (the first token, above all) are unlike μ
and carry up to a third of the attention: they keep their own length. The sign of a K scale says which was done:
negative, or -0, for a key stored without its mean taken out.

Attend works in the rotated frame: q·k̂ = (R·q)·(|scale|·ŷ) + [scale ≥ +0]·q·RoPE_p(μ); the output is rotated back once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from turboquant.kernels.interface import KVParams
from turboquant.packing import look_up, pack_codes, split_page

FP16_MAX = torch.finfo(torch.float16).max
MAX_LOGITS = 2**22  # a tile of queries holds at most so many logits: 16 MiB


class EncodedKV(NamedTuple):
    """Packed K and V with any leading axes [...]."""

    key_codes: torch.Tensor  # [..., key_code_bytes] uint8
    value_codes: torch.Tensor  # [..., value_code_bytes] uint8
    key_scales: torch.Tensor  # [...] float16
    value_scales: torch.Tensor  # [...] float16


def mean_at(params: KVParams, positions: torch.Tensor) -> torch.Tensor:
    """RoPE_p(μ): positions [...] to float32 [..., num_kv_heads, D]."""
    assert params.key_mean is not None
    at = positions[..., None]
    return params.rope.rotate(params.key_mean, at) if params.rope else params.key_mean.expand(*at.shape[:-1], -1, -1)


def encode_kv(key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, params: KVParams) -> EncodedKV:
    """Quantise and pack K and V.

    Args:
        key, value: [..., num_kv_heads, D] float.
        positions: [...] int64, index in the sequence.
    """
    key, keeps_mean = _take_out_mean(key.float(), positions, params)
    key_codes, key_scales = _encode(key @ params.rotation.T, params.key_centroids)
    value_codes, value_scales = _encode(value.float() @ params.rotation.T, params.value_centroids)
    return EncodedKV(
        pack_codes(key_codes, params.fmt.key_bits),
        pack_codes(value_codes, params.fmt.value_bits),
        torch.where(keeps_mean, -key_scales, key_scales),
        value_scales,
    )


def decode_rotated(encoded: EncodedKV, params: KVParams) -> tuple[torch.Tensor, torch.Tensor]:
    """|scale| · ŷ of K (a mean that was taken out is not in it) and V, in the rotated frame: two float32 [..., D]."""
    fmt, dim = params.fmt, params.head_dim
    key = look_up(encoded.key_codes, fmt.key_bits, dim, params.key_centroids)
    value = look_up(encoded.value_codes, fmt.value_bits, dim, params.value_centroids)
    return key * encoded.key_scales.float().abs()[..., None], value * encoded.value_scales.float()[..., None]


def taken_out(encoded: EncodedKV, positions: torch.Tensor, params: KVParams) -> torch.Tensor:
    """What to add back to K: RoPE_p(μ), or zero for a key that kept its mean. float32 [..., num_kv_heads, D].

    Args:
        positions: [...] int64, the ones that the keys were stored with.
    """
    return mean_at(params, positions).masked_fill(encoded.key_scales.signbit()[..., None], 0.0)


def decode_kv(encoded: EncodedKV, positions: torch.Tensor, params: KVParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `encode_kv`, up to the quantisation error: two float32 [..., num_kv_heads, D]."""
    key, value = (x @ params.rotation for x in decode_rotated(encoded, params))
    if params.key_mean is not None:
        key = key + taken_out(encoded, positions, params)
    return key, value


def store_kv(key, value, pages, slot_mapping, positions, params: KVParams) -> None:
    """See `turboquant.kernels.interface.store_kv`."""
    block_size = pages.shape[2]
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    if slots.numel() and (last := int(slots.max())) >= pages.shape[0] * block_size:
        raise IndexError(f"slot {last} lies outside the pages: {pages.shape[0]} blocks of {block_size} tokens.")
    block, offset = slots // block_size, slots % block_size
    encoded = encode_kv(key[real], value[real], positions[real], params)
    for plane, data in zip(split_page(pages, params.fmt, params.head_dim), encoded, strict=True):
        plane[block, :, offset] = data


def attend(
    query, pages, block_table, seq_lens, query_start_loc, params: KVParams,
    *, scale, causal, sliding_window, softcap, sinks, fresh, out,
) -> None:  # fmt: skip
    """See `turboquant.kernels.interface.attend`. One sequence at a time, its queries in tiles that bound the logits."""
    planes = EncodedKV(*split_page(pages, params.fmt, params.head_dim))
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for i, seq_len in enumerate(lengths):
        begin, end = starts[i], starts[i + 1]
        if begin == end:
            continue
        past = seq_len - (end - begin)  # position of the first query
        first = 0 if sliding_window is None else max(0, past - sliding_window + 1)
        own = None if fresh is None else (fresh[0][begin:end], fresh[1][begin:end])
        tokens = _read(planes, block_table[i], first, seq_len, params, own, past)
        tile = max(1, MAX_LOGITS // (query.shape[1] * seq_len))
        for row in range(begin, end, tile):
            stop = min(row + tile, end)
            queries = range(past + row - begin, past + stop - begin)
            seen = _seen(queries, seq_len, causal, sliding_window)
            keys, values, means = (None if x is None else x[:, seen.start - first : seen.stop - first] for x in tokens)
            visible = _visible(queries, seen, causal, sliding_window, query.device)
            out[row:stop] = _softmax_attention(
                query[row:stop].float(), keys, values, means, visible, params.rotation, scale, softcap, sinks
            )


def _take_out_mean(key: torch.Tensor, positions: torch.Tensor, params: KVParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., Hkv, D] as they are quantised, and which of them [..., Hkv] kept their mean."""
    if params.key_mean is None:
        return key, torch.zeros(key.shape[:-1], dtype=torch.bool, device=key.device)
    centred = key - mean_at(params, positions)
    keeps_mean = _norm(key) <= _norm(centred)
    return torch.where(keeps_mean[..., None], key, centred), keeps_mean


def _norm(x: torch.Tensor) -> torch.Tensor:
    """‖x‖ over the last axis, float32. The squares of large bf16 values overflow float32."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).float()


def _encode(rotated: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., D] and scales float16 [...] of rotated vectors [..., D]."""
    norm = _norm(rotated)[..., None]
    finite = norm.isfinite()
    unit = torch.where(finite & (norm > 0), rotated / norm, 0.0)
    codes = torch.bucketize(unit, (centroids[1:] + centroids[:-1]) / 2)
    scale = norm / torch.linalg.vector_norm(centroids[codes], dim=-1, keepdim=True)
    scale = torch.where(finite, scale.clamp(max=FP16_MAX), torch.nan)
    return codes.to(torch.uint8), scale.squeeze(-1).half()


def _read(planes, blocks, first, last, params, own, fresh_from):
    """K and V (rotated) and RoPE_p(μ) of positions first..last-1: three float32 [Hkv, last - first, D], μ or None.

    `own` are the exact (key, value) of positions fresh_from.., which then replace the packed copies.
    """
    packed_end = last if own is None else min(last, max(fresh_from, first))
    block_size = planes.key_scales.shape[2]
    first_block = first // block_size
    chosen = blocks[first_block : -(-packed_end // block_size)].long()
    tokens = slice(first - first_block * block_size, packed_end - first_block * block_size)
    encoded = EncodedKV(*(plane[chosen].transpose(1, 2).flatten(0, 1)[tokens] for plane in planes))
    keys, values = (x.transpose(0, 1) for x in decode_rotated(encoded, params))
    means = None
    if params.key_mean is not None:
        positions = torch.arange(first, packed_end, device=keys.device)
        means = taken_out(encoded, positions, params).transpose(0, 1)
    if own is not None:
        exact = slice(packed_end - fresh_from, last - fresh_from)
        own_keys, own_values = ((x[exact].float() @ params.rotation.T).transpose(0, 1) for x in own)
        keys, values = torch.cat((keys, own_keys), 1), torch.cat((values, own_values), 1)
        # An exact key still has its mean in it.
        means = None if means is None else torch.cat((means, torch.zeros_like(own_keys)), 1)
    return keys, values, means


def _seen(queries: range, seq_len: int, causal: bool, sliding_window: int | None) -> range:
    """The positions that any of the queries (by position) reads."""
    start = 0 if sliding_window is None else max(0, queries.start - sliding_window + 1)
    return range(start, queries.stop if causal else seq_len)


def _visible(queries: range, seen: range, causal: bool, sliding_window: int | None, device) -> torch.Tensor:
    """Which of the positions `seen` each query reads: bool [len(queries), len(seen)]."""
    query_at = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key_at = torch.arange(seen.start, seen.stop, device=device)[None, :]
    visible = torch.ones(len(queries), len(seen), dtype=torch.bool, device=device)
    if causal:
        visible &= key_at <= query_at
    if sliding_window is not None:
        visible &= key_at > query_at - sliding_window
    return visible


def _softmax_attention(query, keys, values, means, visible, rotation, scale, softcap, sinks) -> torch.Tensor:
    """[Tq, H, D] queries against [Hkv, L, D] keys and values: [Tq, H, D]."""
    num_queries, num_heads, dim = query.shape
    grouped = query.unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G·Tq, D]
    logits = (grouped @ rotation.T) @ keys.transpose(1, 2)
    if means is not None:
        logits += grouped @ means.transpose(1, 2)
    logits = logits.view(num_heads, num_queries, -1) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[1]].view(keys.shape[0], -1, keys.shape[1])
    rotated = _weighted_sum(weights, values, visible)
    return (rotated @ rotation).view(num_heads, num_queries, dim).transpose(0, 1)


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """weights [Hkv, G·Tq, L] @ values [Hkv, L, D], where a token that is not finite spoils only the rows that see it.

    In a plain product 0 · NaN would spoil the others, too.
    """
    if values.sum().isfinite():  # cheap, and rarely wrong about finite values
        return weights @ values
    broken = ~values.isfinite().all(-1)
    sees_broken = (visible[None] & broken[:, None, :]).any(-1, keepdim=True)  # [Hkv, Tq, 1]
    sees_broken = sees_broken.repeat(1, weights.shape[1] // visible.shape[0], 1)
    finite = torch.where(broken[..., None], 0.0, values)
    return (weights @ finite).masked_fill(sees_broken, torch.nan)
