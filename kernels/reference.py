"""The specification: store_kv, store_window and attend in plain torch, float32 throughout. The coding: `coding.py`.

Attend takes one sequence at a time and works in the rotated frame:

    q·k̂ = (R·q)·(|scale|·ŷ) + [scale ≥ +0]·q·RoPE_p(μ)        packed
    q·k  = (R·q)·(R·k)                                        exact
    out  = Rᵀ·Σ w·v'                                          v' packed (scale·ŷ) or exact (R·v), one softmax for both

Which tokens a query reads exactly is `_reads_exactly`; where an exact value is not at hand, the packed copy is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from turboquant.kernels.coding import EncodedKV, decode_rotated, encode_kv, taken_out
from turboquant.kernels.interface import ExactWindow, KVParams
from turboquant.packing import split_page

MAX_LOGITS = 2**22  # a tile of queries holds at most so many logits: 16 MiB


class Tokens(NamedTuple):
    """L consecutive tokens of one sequence, rotated."""

    keys: torch.Tensor  # [Hkv, L, D] float32, packed copies, the mean not in them
    values: torch.Tensor  # [Hkv, L, D] float32
    means: torch.Tensor | None = None  # [Hkv, L, D] float32, RoPE_p(μ) where it was taken out; not rotated by R
    exact_keys: torch.Tensor | None = None  # [Hkv, L, D] float32, anything where not held
    exact_values: torch.Tensor | None = None  # [Hkv, L, D] float32
    held: torch.Tensor | None = None  # [L] bool: exact values are at hand

    def part(self, begin: int, end: int) -> Tokens:
        held = None if self.held is None else self.held[begin:end]
        return Tokens(*(None if x is None else x[:, begin:end] for x in self[:-1]), held)


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


def store_window(key, value, pages, slot_mapping) -> None:
    """See `turboquant.kernels.interface.store_window`."""
    block_size = pages.shape[2]
    real = slot_mapping >= block_size
    slots = slot_mapping[real]
    if slots.numel() and (last := int(slots.max())) >= pages.shape[0] * block_size:
        raise IndexError(f"slot {last} lies outside the window pages: {pages.shape[0]} blocks of {block_size} tokens.")
    exact = torch.cat((key[real], value[real]), dim=-1).to(pages.dtype)
    pages[slots // block_size, :, slots % block_size] = exact


def attend(
    query, pages, block_table, seq_lens, query_start_loc, params: KVParams,
    *, scale, causal, sliding_window, softcap, sinks, fresh, window, strict, out,
) -> None:  # fmt: skip
    """See `turboquant.kernels.interface.attend`. Queries go in tiles that bound the logits."""
    planes = EncodedKV(*split_page(pages, params.fmt, params.head_dim))
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for i, seq_len in enumerate(lengths):
        begin, end = starts[i], starts[i + 1]
        if begin == end:
            continue
        past = seq_len - (end - begin)  # position of the first query
        first = 0 if sliding_window is None else max(0, past - sliding_window + 1)
        own = None if fresh is None else (fresh[0][begin:end], fresh[1][begin:end])
        held_blocks = None if window is None else window.block_table[i]
        tokens = _read(planes, block_table[i], window, held_blocks, own, range(first, seq_len), past, params, strict)
        for row, stop in tiles(begin, end, query.shape[1], seq_len):
            queries = range(past + row - begin, past + stop - begin)
            seen = _seen(queries, seq_len, causal, sliding_window)
            part = tokens.part(seen.start - first, seen.stop - first)
            visible = visible_to(queries, seen, causal, sliding_window, query.device)
            exact = None
            if part.held is not None:
                exact = visible & part.held & _reads_exactly(queries, seen, past, window, strict, query.device)
            out[row:stop] = softmax_attention(
                query[row:stop].float(), part, visible, exact, params.rotation, scale, softcap, sinks
            )


def _read(planes, blocks, window, held_blocks, own, wanted: range, past: int, params: KVParams, strict: bool) -> Tokens:
    """The tokens at positions `wanted`: packed copies from pages, exact ones from window pages and this step's own."""
    only_exact = own is not None and not strict
    packed_end = min(wanted.stop, max(past, wanted.start)) if only_exact else wanted.stop
    keys, values, means = _read_packed(planes, blocks, range(wanted.start, packed_end), params)
    missing = wanted.stop - packed_end
    keys, values, means = (
        None if x is None else torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (keys, values, means)
    )
    if own is None or (strict and window is None):
        return Tokens(keys, values, means)
    exact = torch.zeros(2, *keys.shape, device=keys.device)
    held = torch.zeros(len(wanted), dtype=torch.bool, device=keys.device)
    if window is not None:
        _read_window(exact, held, window, held_blocks, wanted, past)
    from_own = slice(max(past, wanted.start) - past, None)
    at = slice(max(past, wanted.start) - wanted.start, None)
    for kind in (0, 1):
        exact[kind][:, at] = own[kind][from_own].float().transpose(0, 1)
    held[at] = True
    return Tokens(keys, values, means, *(exact @ params.rotation.T), held)


def _read_packed(planes, blocks, wanted: range, params: KVParams):
    """K and V (rotated) and RoPE_p(μ) of the packed tokens `wanted`: three float32 [Hkv, len(wanted), D], μ or None."""
    block_size = planes.key_scales.shape[2]
    first_block = wanted.start // block_size
    chosen = blocks[first_block : -(-wanted.stop // block_size)].long()
    tokens = slice(wanted.start - first_block * block_size, wanted.stop - first_block * block_size)
    encoded = EncodedKV(*(plane[chosen].transpose(1, 2).flatten(0, 1)[tokens] for plane in planes))
    keys, values = (x.transpose(0, 1) for x in decode_rotated(encoded, params))
    if params.key_mean is None:
        return keys, values, None
    positions = torch.arange(wanted.start, wanted.stop, device=keys.device)
    return keys, values, taken_out(encoded, positions, params).transpose(0, 1)


def _read_window(exact, held, window: ExactWindow, blocks, wanted: range, past: int) -> None:
    """Fill exact [2, Hkv, L, D] and held [L] from window pages: the first tokens, and those that a query may need.

    A block that has left the window may belong to somebody else by now, whatever the table says.
    """
    block_size = window.pages.shape[2]
    at = torch.arange(wanted.start, min(wanted.stop, past), device=held.device)
    at = at[(at < window.first) | (at > past - window.size)]
    of = blocks[at // block_size].long()
    at, of = at[of > 0], of[of > 0]
    tokens = window.pages[of, :, at % block_size].float()  # [n, Hkv, 2·D]
    exact[:, :, at - wanted.start] = tokens.unflatten(-1, (2, -1)).permute(2, 1, 0, 3)
    held[at - wanted.start] = True


def _seen(queries: range, seq_len: int, causal: bool, sliding_window: int | None) -> range:
    """The positions that any of the queries (by position) reads."""
    start = 0 if sliding_window is None else max(0, queries.start - sliding_window + 1)
    return range(start, queries.stop if causal else seq_len)


def _grid(queries: range, seen: range, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries [Tq, 1] and of tokens [1, L]."""
    query_at = torch.arange(queries.start, queries.stop, device=device)
    return query_at[:, None], torch.arange(seen.start, seen.stop, device=device)[None, :]


def tiles(begin: int, end: int, num_heads: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut query rows begin..end-1 into pieces of at most MAX_LOGITS logits: (first row, row past the last)."""
    size = max(1, MAX_LOGITS // (num_heads * num_tokens))
    return ((row, min(row + size, end)) for row in range(begin, end, size))


def visible_to(queries: range, seen: range, causal: bool, sliding_window: int | None, device) -> torch.Tensor:
    """Which of the positions `seen` each query reads: bool [len(queries), len(seen)]."""
    query_at, key_at = _grid(queries, seen, device)
    visible = torch.ones(len(queries), len(seen), dtype=torch.bool, device=device)
    if causal:
        visible &= key_at <= query_at
    if sliding_window is not None:
        visible &= key_at > query_at - sliding_window
    return visible


def _reads_exactly(queries: range, seen: range, past: int, window: ExactWindow | None, strict: bool, device):
    """Which of the positions `seen` each query takes exactly if it can: bool [len(queries), len(seen)]."""
    key_at = torch.arange(seen.start, seen.stop, device=device)
    exact = (key_at >= past).expand(len(queries), -1) & (not strict)
    return exact if window is None else exact | in_window(queries, seen, window.size, window.first, device)


def in_window(queries: range, seen: range, size: int, first: int, device) -> torch.Tensor:
    """Which of the positions `seen` each query's window of `size` covers, the `first` ones with it: bool as above."""
    query_at, key_at = _grid(queries, seen, device)
    return (key_at > query_at - size) | (key_at < first)


def softmax_attention(query, tokens: Tokens, visible, exact, rotation, scale, softcap, sinks) -> torch.Tensor:
    """[Tq, H, D] queries against one sequence's tokens, those in `exact` [Tq, L] taken exactly: [Tq, H, D]."""
    num_queries, num_heads, dim = query.shape
    num_kv_heads = tokens.keys.shape[0]
    group = num_heads // num_kv_heads
    tokens, exact, mixed = _settle(tokens, visible, exact)
    grouped = query.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G·Tq, D]
    rotated = grouped @ rotation.T
    logits = rotated @ tokens.keys.transpose(1, 2)
    if tokens.means is not None:
        logits += grouped @ tokens.means.transpose(1, 2)
    if mixed is not None:
        logits[..., mixed] = torch.where(
            exact.repeat(group, 1), rotated @ tokens.exact_keys[:, mixed].transpose(1, 2), logits[..., mixed]
        )
    logits = logits.view(num_heads, num_queries, -1) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : visible.shape[1]].view(num_kv_heads, group * num_queries, -1)
    if mixed is None:
        output = _weighted_sum(weights, tokens.values, visible)
    else:
        from_exact = weights[..., mixed] * exact.repeat(group, 1)
        weights[..., mixed] -= from_exact
        packed = visible.clone()
        packed[:, mixed] &= ~exact
        output = _weighted_sum(weights, tokens.values, packed)
        output += _weighted_sum(from_exact, tokens.exact_values[:, mixed], exact)
    return (output @ rotation).view(num_heads, num_queries, dim).transpose(0, 1)


def _settle(tokens: Tokens, visible: torch.Tensor, exact: torch.Tensor | None):
    """Where all queries that see a token take it exactly, let the exact values stand for the packed ones.

    Returns the tokens, and of the others that some query takes exactly: `exact` [Tq, n] and their indices [n], or None.
    """
    if exact is None or not exact.any():
        return tokens, None, None
    taken = exact.any(0)
    settled = (taken & (exact | ~visible).all(0))[:, None]
    means = None if tokens.means is None else tokens.means.masked_fill(settled, 0.0)
    tokens = tokens._replace(
        keys=torch.where(settled, tokens.exact_keys, tokens.keys),
        values=torch.where(settled, tokens.exact_values, tokens.values),
        means=means,
    )
    mixed = (taken & ~settled[:, 0]).nonzero().flatten()
    return (tokens, exact[:, mixed], mixed) if mixed.numel() else (tokens, None, None)


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
