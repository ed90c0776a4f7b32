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
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from turboquant.formats import KVFormat
from turboquant.hf_model import layer_params, text_config
from turboquant.kernels.interface import KVParams
from turboquant.kernels.reference import EncodedKV, decode_kv, encode_kv
from turboquant.kv_quantizer import DEFAULT_SEED


class TurboQuantLayer(CacheLayerMixin):
    """Packed K and V of one layer, append-only. B sequences, T tokens: every plane is [B, T, Hkv, ...]."""

    is_sliding = False
    is_croppable = True

    def __init__(self, params: KVParams) -> None:
        super().__init__()
        self.params = params
        self.encoded: EncodedKV | None = None
        self.left_padding: torch.Tensor | None = None  # [B] int64, tokens before each sequence's first

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, dim = key_states.shape
        if dim != self.params.head_dim or value_states.shape[-1] != dim:
            raise ValueError(
                f"this layer's K and V have head_dim {dim} and {value_states.shape[-1]}, the cache was built for "
                f"{self.params.head_dim} of both: use the model's default cache."
            )
        empty = key_states.new_empty(batch, 0, heads, dim)
        self.encoded = encode_kv(empty, empty, self._positions(batch, 0, 0), self.params)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, Hkv, T, D] and return all tokens dequantised, [B, Hkv, T_all, D] in the model's dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, new, _ = key_states.shape
        past = self.get_seq_length()
        at = self._positions(batch, past, past + new)
        fresh = encode_kv(key_states.transpose(1, 2), value_states.transpose(1, 2), at, self.params)
        self.encoded = EncodedKV(*(torch.cat(pair, dim=1) for pair in zip(self.encoded, fresh, strict=True)))
        states = decode_kv(self.encoded, self._positions(batch, 0, past + new), self.params)
        key, value = (x.to(self.dtype).transpose(1, 2) for x in states)
        return key, value

    @property
    def nbytes(self) -> int:
        """Bytes held: codes and scales of every token, nothing else is kept."""
        return 0 if self.encoded is None else sum(plane.nbytes for plane in self.encoded)

    def get_seq_length(self) -> int:
        return 0 if self.encoded is None else self.encoded.key_codes.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.encoded = self.left_padding = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last |tokens_to_remove| tokens (a positive value is the length to keep, as in Transformers)."""
        keep = tokens_to_remove if tokens_to_remove > 0 else self.get_seq_length() + tokens_to_remove
        self._map_planes(lambda plane: plane[:, :keep])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._map_planes(lambda plane: plane.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map_planes(lambda plane: plane.to(self.device, non_blocking=True))

    def _map_planes(self, fn) -> None:
        if self.encoded is not None:
            self.encoded = EncodedKV(*map(fn, self.encoded))

    def _map_batch(self, fn) -> None:
        self._map_planes(fn)
        self.left_padding = None if self.left_padding is None else fn(self.left_padding)

    def _positions(self, batch: int, begin: int, end: int) -> torch.Tensor:
        """Index of each token in its own sequence, [B, end - begin]; padding lies before 0."""
        at = torch.arange(begin, end, device=self.device).expand(batch, -1)
        return at if self.left_padding is None else at - self.left_padding[:, None]


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
    """
    fmt = KVFormat.from_name(fmt) if isinstance(fmt, str) else fmt
    session = CacheSession(fmt, layer_params(model, fmt, key_mean=key_mean, seed=seed))
    decoder = model.get_decoder()
    cache_name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"

    def use_our_cache(_module, args, kwargs):
        cache = session.compress(kwargs.get(cache_name), text_config(model))
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            _set_left_padding(session.layers, mask)
        return args, {**kwargs, cache_name: cache}

    handle = decoder.register_forward_pre_hook(use_our_cache, with_kwargs=True)
    try:
        yield session
    finally:
        handle.remove()


def _set_left_padding(layers: list[TurboQuantLayer], mask: torch.Tensor) -> None:
    """From a mask [B, T_all] of ones and zeros: how many zeros lead each row."""
    padding = (mask.long().cumsum(-1) == 0).sum(-1)
    for layer in layers:
        layer.left_padding = padding
