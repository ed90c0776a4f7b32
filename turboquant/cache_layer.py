"""One layer of the Transformers cache: packed, append-only, dequantised when read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from turboquant.kernels.coding import EncodedKV, decode_kv, encode_kv
from turboquant.kernels.interface import KVParams


class TurboQuantLayer(CacheLayerMixin):
    """Packed K and V of one layer, append-only. B sequences, T tokens: every plane is [B, T, Hkv, ...]."""

    is_sliding = False
    is_croppable = True
    label = ""  # of the session that made it

    def __init__(self, params: KVParams) -> None:
        super().__init__()
        self.params = params
        self.encoded: EncodedKV | None = None
        # K's mean is put back where it was taken out: [B, T] int32, kept only where there is a mean.
        self.positions: torch.Tensor | None = None
        self.next_positions: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, dim = key_states.shape
        if dim != self.params.head_dim or value_states.shape[-1] != dim:
            raise ValueError(
                f"this layer's K and V have head_dim {dim} and {value_states.shape[-1]}, the cache was built for "
                f"{self.params.head_dim} of both: use the model's default cache."
            )
        empty, nowhere = key_states.new_empty(batch, 0, heads, dim), torch.empty(batch, 0, dtype=torch.int32)
        self.positions = nowhere.to(self.device)
        self.encoded = encode_kv(empty, empty, self.positions, self.params)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, Hkv, T, D] and return all tokens dequantised, [B, Hkv, T_all, D] in the model's dtype."""
        self.append(key_states, value_states)
        key, value = (x.to(self.dtype).transpose(1, 2) for x in decode_kv(self.encoded, self.positions, self.params))
        return key, value

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Quantise and keep [B, Hkv, T, D].

        The new tokens stand at `next_positions` ([B, T] or [1, T]) if that was set, else behind those held.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self._take_positions(*key_states.shape[::2])
        fresh = encode_kv(key_states.transpose(1, 2), value_states.transpose(1, 2), at, self.params)
        self.encoded = EncodedKV(*(torch.cat(pair, dim=1) for pair in zip(self.encoded, fresh, strict=True)))
        if self.params.key_mean is not None:
            self.positions = torch.cat((self.positions, at), dim=1)

    def _take_positions(self, batch: int, new: int) -> torch.Tensor:
        """Positions of the next `new` tokens, int32 [B, new]."""
        at, self.next_positions = self.next_positions, None
        if at is None:
            past = self.get_seq_length()
            at = torch.arange(past, past + new)[None]
        return at.to(self.device, torch.int32).expand(batch, new)

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V that are held."""
        return self.packed_nbytes

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed tokens. Where K has a mean, 4 bytes a token and sequence for its position come on top."""
        return 0 if self.encoded is None else sum(plane.nbytes for plane in self.encoded)

    @property
    def num_elements(self) -> int:
        """Elements of K and V that are held."""
        return 0 if self.encoded is None else 2 * self.params.head_dim * self.encoded.key_scales.numel()

    def get_seq_length(self) -> int:
        return 0 if self.encoded is None else self.encoded.key_codes.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.encoded = self.positions = self.next_positions = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last |tokens_to_remove| tokens (a positive value is the length to keep, as in Transformers)."""
        keep = tokens_to_remove if tokens_to_remove > 0 else max(0, self.get_seq_length() + tokens_to_remove)
        self._map(lambda x: x[:, :keep])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._map_batch(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map_batch(lambda x: x.to(self.device, non_blocking=True))

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `fn` to what is held of every token, axes [B, T, ...]."""
        if self.encoded is not None:
            self.encoded, self.positions = EncodedKV(*map(fn, self.encoded)), fn(self.positions)

    def _map_batch(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `fn`, which looks at the first axis only, to everything that is held."""
        self._map(fn)
