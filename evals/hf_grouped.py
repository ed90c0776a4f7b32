"""A rival in a Transformers cache that quantises K over whole groups of tokens, as KIVI does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from turboquant.evals.rivals import Rival
from turboquant.hf_window import WindowedLayer
from turboquant.kernels import reference
from turboquant.kernels.interface import KVParams
from turboquant.window import FIRST_TOKENS


class GroupedRivalLayer(WindowedLayer):
    """K of a whole group of tokens quantised together, as in KIVI: what a query reads exactly differs for K and V.

    Every token is kept as it came in; what the rival stores is made of it when it is read. A query at index i reads
    exactly the K of its own group, which is not full before it, and the V of the `residual` tokens before it and its
    own. An exact window takes the place of that residual, beside the group.
    """

    def __init__(self, params: KVParams, rival: Rival, window: int) -> None:
        super().__init__(params, window)
        self.rival = rival

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.next_positions = None

    def forget(self) -> None:
        """Nothing: groups are made of what is kept."""

    def get_seq_length(self) -> int:
        return 0 if self.exact is None else self.exact.shape[2]

    @property
    def packed_nbytes(self) -> int:
        """As if every token were packed."""
        _, batch, tokens, heads, dim = self.exact.shape
        return batch * tokens * heads * self.rival.slot_bytes(dim)

    @property
    def nbytes(self) -> int:
        """Packed ones, and exact ones in the model's dtype: with a window beside packed copies, without in their place.

        Of the group that is not full, which grows from nothing to a whole group, half a group is counted.
        """
        dim = self.exact.shape[-1]
        packed = self.exact_elements * self.rival.slot_bytes(dim) // (2 * dim)
        return self.packed_nbytes + self.exact_nbytes - (0 if self.window else packed)

    @property
    def exact_nbytes(self) -> int:
        return self.exact_elements * self.dtype.itemsize

    @property
    def exact_elements(self) -> int:
        _, batch, tokens, heads, dim = self.exact.shape
        if self.window:
            held = 2 * min(tokens, self.window - 1 + FIRST_TOKENS)
        else:
            held = min(tokens, self.rival.key_group // 2) + min(tokens, self.rival.residual)
        return batch * held * heads * dim

    @property
    def num_elements(self) -> int:
        return 0 if self.exact is None else self.exact.numel()

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.exact is not None:
            self.exact = torch.stack([fn(x) for x in self.exact])
            self.exact_at = self.exact_at[: self.exact.shape[2]]

    def _map_batch(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._map(fn)

    def _attend_row(self, row: int, query, visible, scale, softcap, sinks) -> torch.Tensor:
        kept = self.exact[:, row]
        stored = torch.stack(self.rival.read_back(*kept))
        exact, read = (x.float().transpose(1, 2) for x in (kept, stored))
        total, num_queries = self.get_seq_length(), query.shape[0]
        outputs = []
        for begin, end in reference.tiles(0, num_queries, query.shape[1], total):
            queries = range(total - num_queries + begin, total - num_queries + end)
            masks = self._reads_exactly(row, queries, total)
            tile, seen = query[begin:end], visible[begin:end]
            outputs.append(mixed_attention(tile, exact, read, masks, seen, scale, softcap, sinks))
        return torch.cat(outputs)

    def _reads_exactly(self, row: int, queries: range, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of K and of V: bool [len(queries), total]."""
        query_at = torch.arange(queries.start, queries.stop, device=self.device)[:, None]
        key_at = torch.arange(total, device=self.device)[None]
        group = self.rival.key_group
        own_group = key_at // group >= query_at // group
        if not self.window:
            return own_group, key_at >= query_at - self.rival.residual
        first = FIRST_TOKENS + (0 if self.starts is None else int(self.starts[row]))
        covered = reference.in_window(queries, range(total), self.window, first, self.device)
        return own_group | covered, covered


def mixed_attention(query, exact, read, masks, visible, scale: float, softcap: float, sinks) -> torch.Tensor:
    """Attention whose exact K are others than its exact V.

    Args:
        query: float32 [Tq, H, D].
        exact, read: float32 [2, Hkv, T, D], K and V as they came in and as they are read back.
        masks: bool [Tq, T] of K and of V, which of them each query takes exactly.
        visible: bool [Tq, T].
        sinks: [H] or None.

    Returns:
        [Tq, H, D].
    """
    heads = query.unflatten(1, (exact.shape[1], -1)).permute(1, 2, 0, 3)  # [Hkv, G, Tq, D]
    logits = torch.where(masks[0], *(heads @ x[0].transpose(1, 2)[:, None] for x in (exact, read))) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, -torch.inf).flatten(0, 1)
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, query.shape[0], 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : visible.shape[1]].unflatten(0, heads.shape[:2])
    output = (weights * masks[1]) @ exact[1][:, None] + (weights * ~masks[1]) @ read[1][:, None]
    return output.flatten(0, 1).transpose(0, 1)
