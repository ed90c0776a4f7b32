"""The exact window in Transformers: a cache layer that keeps its newest tokens exact, and the attention that reads it.

Each query has a window of its own, so no single K and V can stand for the cache: `update` keeps what came in, and the
attention function registered as "turboquant" reads packed and exact tokens in one softmax (`kernels/reference.py`), in
a single forward pass over a text just as in decoding it token by token.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from turboquant.cache_layer import TurboQuantLayer
from turboquant.kernels import reference
from turboquant.kernels.coding import EncodedKV, decode_rotated, taken_out
from turboquant.kernels.interface import KVParams
from turboquant.window import FIRST_TOKENS

ATTENTION = "turboquant"


class WindowedLayer(TurboQuantLayer):
    """All tokens packed, and the first few and the newest W exact as well.

    Attributes:
        window: W.
        exact: [2, B, n, Hkv, D] in the model's dtype, K and V of the tokens at `exact_at`.
        exact_at: [n] int64, indices into the cached tokens, ascending.
    """

    def __init__(self, params: KVParams, window: int) -> None:
        super().__init__(params)
        self.window = window
        self.exact: torch.Tensor | None = None
        self.exact_at = torch.empty(0, dtype=torch.int64)
        # Where each sequence begins in its padded row, [B]; None for all at 0.
        self.starts: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, Hkv, T, D]; returned as they came: the attention function alone knows what each query reads."""
        past = self.get_seq_length()
        self.append(key_states, value_states)
        fresh = torch.stack((key_states, value_states)).transpose(2, 3)
        self.exact = fresh if self.exact is None else torch.cat((self.exact, fresh), dim=2)
        at = torch.arange(past, past + key_states.shape[2], device=self.device)
        self.exact_at = torch.cat((self.exact_at.to(self.device), at))
        return key_states, value_states

    def attend(self, query: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float, sinks) -> torch.Tensor:
        """Attention of this step's queries.

        Args:
            query: [B, H, Tq, D].
            visible: bool [B, Tq, T], what each query may read.

        Returns:
            float32 [B, Tq, H, D].
        """
        rows = [
            self._attend_row(row, query[row].transpose(0, 1).float(), visible[row], scale, softcap, sinks)
            for row in range(query.shape[0])
        ]
        return torch.stack(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tokens and of the exact ones."""
        return self.packed_nbytes + (0 if self.exact is None else self.exact.nbytes)

    def reset(self) -> None:
        super().reset()
        self.exact, self.exact_at = None, torch.empty(0, dtype=torch.int64)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.exact is not None:
            self._keep_exact(self.exact_at < self.get_seq_length())

    def _map_batch(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_batch(fn)
        if self.exact is not None:
            self.exact = torch.stack([fn(x) for x in self.exact])

    def forget(self) -> None:
        """Drop exact values that no later query will read; after a whole forward pass, as layers may share K and V."""
        if self.exact is not None:
            past = self.get_seq_length()
            first = FIRST_TOKENS + (0 if self.starts is None else int(self.starts.max()))
            self._keep_exact((self.exact_at < first) | (self.exact_at > past - self.window))

    def _keep_exact(self, kept: torch.Tensor) -> None:
        self.exact, self.exact_at = self.exact[:, :, kept], self.exact_at[kept]

    def packed(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Packed copies of one sequence, float32 [Hkv, T, D]: keys and values in a rotated frame, means or None.

        And the rotation into that frame, [D, D].
        """
        encoded = EncodedKV(*(plane[row] for plane in self.encoded))
        keys, values = (x.transpose(0, 1) for x in decode_rotated(encoded, self.params))
        means = None
        if self.params.key_mean is not None:
            means = taken_out(encoded, self.positions[row], self.params).transpose(0, 1)
        return keys, values, means, self.params.rotation

    def _attend_row(self, row: int, query, visible, scale, softcap, sinks) -> torch.Tensor:
        keys, values, means, rotation = self.packed(row)
        exact = torch.zeros(2, *keys.shape, device=self.device)
        exact[:, :, self.exact_at] = self.exact[:, row].float().transpose(1, 2)
        held = torch.zeros(keys.shape[1], dtype=torch.bool, device=self.device)
        held[self.exact_at] = True
        tokens = reference.Tokens(keys, values, means, *(exact @ rotation.T), held)
        total, num_queries = keys.shape[1], query.shape[0]
        first = FIRST_TOKENS + (0 if self.starts is None else int(self.starts[row]))
        outputs = []
        for begin, end in reference.tiles(0, num_queries, query.shape[1], total):
            queries = range(total - num_queries + begin, total - num_queries + end)
            covered = reference.in_window(queries, range(total), self.window, first, self.device)
            seen = visible[begin:end]
            outputs.append(
                reference.softmax_attention(
                    query[begin:end], tokens, seen, seen & held & covered, rotation, scale, softcap, sinks
                )
            )
        return torch.cat(outputs)


def leading_zeros(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Of a padding mask [B, T] of ones and zeros: how many zeros lead each row, [B]. None for any other mask."""
    if mask is None or mask.ndim != 2:
        return None
    return (mask.long().cumsum(-1) == 0).sum(-1)


@contextmanager
def attending_by(
    name: str,
    decoder: PreTrainedModel,
    modules: dict[int, torch.nn.Module],
    registry: weakref.WeakKeyDictionary[torch.nn.Module, Any],
    entry: Any,
) -> Iterator[None]:
    """Let `decoder` attend by the function called `name` inside this block, which finds `entry` by its module."""
    before = decoder.config._attn_implementation
    for module in modules.values():
        registry[module] = entry
    decoder.set_attn_implementation(name)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)
        for module in modules.values():
            registry.pop(module, None)


def use_window_attention(decoder: PreTrainedModel, modules: dict[int, torch.nn.Module], session: Any):
    """Let `decoder` attend by `turboquant_attention` inside this block; `session.cache` is what it reads."""
    return attending_by(ATTENTION, decoder, modules, _sessions, session)


def turboquant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention signature: query [B, H, Tq, D]; key and value [B, Hkv, T, D], used where the layer's own
    cache is an exact one. Returns [B, Tq, H, D] in query's dtype."""
    layer = _sessions[module].cache.layers[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    total = layer.get_seq_length() if isinstance(layer, WindowedLayer) else key.shape[2]
    visible = visible_tokens(attention_mask, query, total)
    if isinstance(layer, WindowedLayer):
        output = layer.attend(query, visible, scale, softcap or 0.0, s_aux)
    else:
        output = exact_attention(query, key, value, visible, scale, softcap or 0.0, s_aux)
    # A query of padding reads nothing. Its NaN would reach other tokens through a recurrent layer behind this one.
    output = output.masked_fill(~visible.any(-1)[:, :, None, None], 0.0)
    return output.to(query.dtype), None


def exact_attention(query, key, value, visible, scale: float, softcap: float, sinks) -> torch.Tensor:
    """query [B, H, Tq, D], exact key and value [B, Hkv, T, D], visible bool [B, Tq, T]: float32 [B, Tq, H, D]."""
    same = torch.eye(query.shape[-1], device=query.device)
    rows = zip(query.transpose(1, 2).float(), key.float(), value.float(), visible, strict=True)
    return torch.stack([
        reference.softmax_attention(q, reference.Tokens(k, v), seen, None, same, scale, softcap, sinks)
        for q, k, v, seen in rows
    ])  # fmt: skip


def visible_tokens(mask: torch.Tensor | None, query: torch.Tensor, total: int) -> torch.Tensor:
    """What each query may read, bool [B, Tq, T], from Transformers' boolean mask [B, 1, Tq, T], or causal without."""
    batch, _, num_queries, _ = query.shape
    if mask is not None:
        return mask[:, 0, :, :total].expand(batch, -1, -1)
    queries = range(total - num_queries, total)
    return reference.visible_to(queries, range(total), True, None, query.device).expand(batch, -1, -1)


_sessions: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()

AttentionInterface.register(ATTENTION, turboquant_attention)
# The boolean kind: True where a query may read.
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
