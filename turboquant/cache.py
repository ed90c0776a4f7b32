"""A compressed cache for Transformers.

    with turboquant_cache(model, "turboquant3.5") as session:
        model.generate(**inputs)
        print(session.nbytes)

Inside the block every `model(...)` and `model.generate(...)` keeps its full-attention K and V packed. Without a window
`update` returns the dequantised states, those of the newest tokens included: a single forward pass, as evaluations do,
then measures the cache and not its bypass. With one (`hf_window.py`), each query reads the newest tokens exactly, also
in a single forward pass. Sliding-window and linear-attention layers keep their own, bounded caches.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from turboquant.artifact import ARTIFACT_ENV, Artifact, find_artifact
from turboquant.cache_layer import TurboQuantLayer
from turboquant.formats import KVFormat
from turboquant.hf_model import attention_modules, layer_params, text_config
from turboquant.hf_window import WindowedLayer, leading_zeros, use_window_attention
from turboquant.kernels.interface import KVParams
from turboquant.kv_quantizer import DEFAULT_SEED
from turboquant.window import window_size

_active: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class CacheSession:
    """What `turboquant_cache` yields: the format, and the last cache that the model used."""

    def __init__(self, fmt: KVFormat, params: dict[int, KVParams], window: int) -> None:
        self.fmt = fmt
        self.params = params
        self.window = window
        self.cache: Cache | None = None
        self.artifact: Artifact | None = None

    @property
    def label(self) -> str:
        """What a layer of this session holds; layers of another are refused."""
        return f"{self.fmt.name} with a window of {self.window}"

    def new_layer(self, index: int) -> TurboQuantLayer:
        """An empty cache layer for layer `index` of the model."""
        params = self.params[index]
        return WindowedLayer(params, self.window) if self.window else TurboQuantLayer(params)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in the compressed layers of the last cache: packed ones, and exact ones of the window."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def packed_nbytes(self) -> int:
        """Those of the packed ones alone."""
        return sum(layer.packed_nbytes for layer in self.layers)

    @property
    def exact_nbytes(self) -> int:
        """Those of the exact ones alone."""
        return self.nbytes - self.packed_nbytes

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
        for index in self.params:
            layer = cache.layers[index]
            if isinstance(layer, TurboQuantLayer):
                if layer.label != self.label:
                    raise ValueError(
                        f"layer {index} of the cache holds {layer.label}, this block is {self.label}: "
                        "start with an empty cache."
                    )
                continue
            if type(layer) is not DynamicLayer or layer.get_seq_length():
                raise ValueError(
                    f"layer {index} of the cache is a {type(layer).__name__} with {layer.get_seq_length()} exact "
                    "tokens: start with an empty cache inside turboquant_cache."
                )
            cache.layers[index] = self.new_layer(index)
            cache.layers[index].label = self.label
        self.cache = cache
        return cache


@contextmanager
def turboquant_cache(
    model: PreTrainedModel,
    fmt: KVFormat | str,
    *,
    key_mean: str = "auto",
    window: int | None = None,
    artifact: str | Path | None = None,
    seed: int = DEFAULT_SEED,
) -> Iterator[CacheSession]:
    """Keep K and V packed in every forward pass of `model` inside this block.

    Args:
        model: a decoder-only Transformers model; hybrids with linear attention included.
        fmt: a preset or its name.
        key_mean: "auto" takes K's mean from the k_proj bias where there is one; "none" refuses such a model.
        window: W, how many of the newest tokens stay exact, the first few with them; TURBOQUANT_WINDOW if None.
        artifact: a calibration (`turboquant calibrate`), "none" for none; TURBOQUANT_ARTIFACT if None, or else what
            lies in the model's folder.
        seed: of the rotation.

    Raises:
        ArtifactError: an artifact that is damaged or not this model's.
        ValueError: an unknown format, a wrong window, or a model that cannot be served from it.
        RuntimeError: the model is inside such a block already.
    """
    fmt = KVFormat.from_name(fmt) if isinstance(fmt, str) else fmt
    if model.get_decoder() in _active:
        raise RuntimeError("this model is inside a turboquant_cache block already: leave it before entering another.")
    found = _artifact_of(model, artifact, key_mean)
    params = layer_params(model, fmt, key_mean=key_mean, artifact=found, seed=seed)
    session = CacheSession(fmt, params, window_size(window))
    session.artifact = found
    with compressing(model, session):
        yield session


@contextmanager
def compressing(model: PreTrainedModel, session: CacheSession) -> Iterator[None]:
    """Let every forward pass of `model` inside this block keep K and V in the layers of `session`."""
    decoder = model.get_decoder()
    signature = inspect.signature(decoder.forward)
    cache_name = "cache" if "cache" in signature.parameters else "past_key_values"
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def use_our_cache(_module, args, kwargs):
        given = signature.bind_partial(*args, **kwargs).arguments
        given.update(given.pop(rest, {}))
        given[cache_name] = session.compress(given.get(cache_name), text_config(model))
        mask = given.get("attention_mask")
        for layer in session.layers:
            layer.next_positions = _rotary_positions(given.get("position_ids"))
            if isinstance(layer, WindowedLayer):
                layer.starts = leading_zeros(mask)
        return (), given

    def forget(_module, _args, _output):
        for layer in session.layers:
            if isinstance(layer, WindowedLayer):
                layer.forget()

    windowed = use_window_attention(decoder, attention_modules(model), session) if session.window else nullcontext()
    handles = [
        decoder.register_forward_pre_hook(use_our_cache, with_kwargs=True),
        decoder.register_forward_hook(forget),
    ]
    _active.add(decoder)
    try:
        with windowed:
            yield
    finally:
        for handle in handles:
            handle.remove()
        _active.discard(decoder)


def _artifact_of(model: PreTrainedModel, given: str | Path | None, key_mean: str) -> Artifact | None:
    """The artifact that this model is served with, checked. What merely lies there is not used with key_mean "none"."""
    path = find_artifact(model.config.name_or_path, None if given is None else str(given))
    if path is None or (key_mean == "none" and given is None and not os.environ.get(ARTIFACT_ENV)):
        return None
    artifact = Artifact.load(path)
    artifact.check(text_config(model))
    return artifact


def _rotary_positions(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """The positions [B, T] that the model turns keys by; of multimodal ones [3 or 4, B, T] those of text."""
    return position_ids[0] if position_ids is not None and position_ids.ndim == 3 else position_ids
