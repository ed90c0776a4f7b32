"""A compressed cache for Transformers.

    with turboquant_cache(model, "turboquant3.5") as session:
        model.generate(**inputs)
        print(session.nbytes)

Inside the block every `model(...)` and `model.generate(...)` keeps its full-attention K and V packed. `update` returns
the dequantised states, those of the newest tokens included: a single forward pass, as evaluations do, then measures the
cache and not its bypass. Sliding-window and linear-attention layers keep their own, bounded caches.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from turboquant.formats import KVFormat
from turboquant.hf_model import layer_params, text_config
from turboquant.kernels.coding import EncodedKV, decode_kv, encode_kv
from turboquant.kernels.interface import KVParams
from turboquant.kv_quantizer import DEFAULT_SEED

_active: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class TurboQuantLayer(CacheLayerMixin):
    """Packed K and V of one layer, append-only. B sequences, T tokens: every plane is [B, T, Hkv, ...]."""

    is_sliding = False
    is_croppable = True

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
        """Append [B, Hkv, T, D] and return all tokens dequantised, [B, Hkv, T_all, D] in the model's dtype.

        The new tokens stand at `next_positions` ([B, T] or [1, T]) if that was set, else behind those held.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self._take_positions(*key_states.shape[::2])
        fresh = encode_kv(key_states.transpose(1, 2), value_states.transpose(1, 2), at, self.params)
        self.encoded = EncodedKV(*(torch.cat(pair, dim=1) for pair in zip(self.encoded, fresh, strict=True)))
        if self.params.key_mean is not None:
            self.positions = torch.cat((self.positions, at), dim=1)
        key, value = (x.to(self.dtype).transpose(1, 2) for x in decode_kv(self.encoded, self.positions, self.params))
        return key, value

    def _take_positions(self, batch: int, new: int) -> torch.Tensor:
        """Positions of the next `new` tokens, int32 [B, new]."""
        at, self.next_positions = self.next_positions, None
        if at is None:
            past = self.get_seq_length()
            at = torch.arange(past, past + new)[None]
        return at.to(self.device, torch.int32).expand(batch, new)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tokens. Where K has a mean, 4 bytes a token and sequence for its position come on top."""
        return 0 if self.encoded is None else sum(plane.nbytes for plane in self.encoded)

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
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda x: x.to(self.device, non_blocking=True))

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `fn` to everything that is held: all of it has the axes [B, T, ...]."""
        if self.encoded is not None:
            self.encoded, self.positions = EncodedKV(*map(fn, self.encoded)), fn(self.positions)


class CacheSession:
    """What `turboquant_cache` yields: the format, and the last cache that the model used."""

    def __init__(self, fmt: KVFormat, params: dict[int, KVParams]) -> None:
        self.fmt = fmt
        self.params = params
        self.cache: Cache | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of packed K and V in the last cache."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def layers(self) -> list[TurboQuantLayer]:
        """The compressed layers of the last cache."""
        return [] if self.cache is None else [x for x in self.cache.layers if isinstance(x, TurboQuantLayer)]

    def compress(self, cache: Cache | None, config) -> Cache:
        """Make the full-attention layers of an empty cache ours, in place; a new cache if there is none.

        Raises:
            TypeError: a cache of another kind, which would not be compressed.
            ValueError: the cache already holds exact tokens.
        """
        cache = DynamicCache(config=config) if cache is None else cache
        if not isinstance(cache, DynamicCache):
            raise TypeError(
                f"turboquant_cache cannot compress a {type(cache).__name__}: call the model without one, with a "
                "DynamicCache, and generate() without cache_implementation."
            )
        if not cache.layers:
            cache.layers, cache.layer_class_to_replicate = DynamicCache(config=config).layers, None
        for index, params in self.params.items():
            layer = cache.layers[index]
            if isinstance(layer, TurboQuantLayer):
                if layer.params.fmt != self.fmt:
                    raise ValueError(
                        f"layer {index} of the cache holds {layer.params.fmt.name}, this block is {self.fmt.name}: "
                        "start with an empty cache."
                    )
                continue
            if type(layer) is not DynamicLayer or layer.get_seq_length():
                raise ValueError(
                    f"layer {index} of the cache is a {type(layer).__name__} with {layer.get_seq_length()} exact "
                    "tokens: start with an empty cache inside turboquant_cache."
                )
            cache.layers[index] = TurboQuantLayer(params)
        self.cache = cache
        return cache


@contextmanager
def turboquant_cache(
    model: PreTrainedModel, fmt: KVFormat | str, *, key_mean: str = "auto", seed: int = DEFAULT_SEED
) -> Iterator[CacheSession]:
    """Keep K and V packed in every forward pass of `model` inside this block.

    Args:
        model: a decoder-only Transformers model; hybrids with linear attention included.
        fmt: a preset or its name.
        key_mean: "auto" takes K's mean from the k_proj bias where there is one; "none" refuses such a model.
        seed: of the rotation.

    Raises:
        ValueError: an unknown format, or a model that cannot be served from it.
        RuntimeError: the model is inside such a block already.
    """
    fmt = KVFormat.from_name(fmt) if isinstance(fmt, str) else fmt
    decoder = model.get_decoder()
    if decoder in _active:
        raise RuntimeError("this model is inside a turboquant_cache block already: leave it before entering another.")
    session = CacheSession(fmt, layer_params(model, fmt, key_mean=key_mean, seed=seed))
    signature = inspect.signature(decoder.forward)
    cache_name = "cache" if "cache" in signature.parameters else "past_key_values"
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def use_our_cache(_module, args, kwargs):
        given = signature.bind_partial(*args, **kwargs).arguments
        given.update(given.pop(rest, {}))
        given[cache_name] = session.compress(given.get(cache_name), text_config(model))
        for layer in session.layers:
            layer.next_positions = _rotary_positions(given.get("position_ids"))
        return (), given

    handle = decoder.register_forward_pre_hook(use_our_cache, with_kwargs=True)
    _active.add(decoder)
    try:
        yield session
    finally:
        handle.remove()
        _active.discard(decoder)


def _rotary_positions(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """The positions [B, T] that the model turns keys by; of multimodal ones [3 or 4, B, T] those of text."""
    return position_ids[0] if position_ids is not None and position_ids.ndim == 3 else position_ids
