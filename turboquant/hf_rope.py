"""How a Transformers layer rotates its keys, found by watching it.

Configs do not say it all: some layers have no RoPE, some pair neighbours and others halves, some rotate a part of the
head. So the model reads a few tokens, and what it caches is held against what its K projection gave.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from turboquant.rope import Rope, rope_from_config

# Far apart, so that slow and fast pairs both turn; few, so that even a large model reads them at once.
PROBE_POSITIONS = (1, 2, 3, 7, 20, 41)
SHIFT = 30
TOLERANCE = 2e-2  # relative; 16-bit models round K


def ropes_of_layers(model: PreTrainedModel, modules: dict[int, torch.nn.Module]) -> dict[int, Rope | None]:
    """The rotary embedding of each of these layers, or None for one that has none.

    Args:
        modules: attention modules with a k_proj, by layer index.

    Raises:
        ValueError: no rotation that we know turns a projection's output into the cached keys.
    """
    if not modules:
        return {}
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    described = {
        i: rope_from_config(config, module.head_dim, layer_type=layer_types[i] if layer_types else None)
        for i, module in modules.items()
    }
    keys = _watch(model, modules)
    return {i: _matching_rope(type(model).__name__, i, described[i], *keys[i]) for i in modules}


def _matching_rope(
    model_name: str, index: int, described: Rope, before: torch.Tensor, after: torch.Tensor
) -> Rope | None:
    positions = torch.tensor(PROBE_POSITIONS)[:, None]
    for rope in (described, replace(described, interleaved=True), None):
        rotated = before if rope is None else rope.rotate(before, positions)
        if (rotated - after).norm() <= TOLERANCE * after.norm():
            return rope
    raise ValueError(
        f"layer {index} of {model_name} rotates its keys in a way that we do not know, so K's mean cannot be "
        "placed: use its default cache and report this model."
    )


@torch.inference_mode()
def ropes_by_shift(model: PreTrainedModel, layers: dict[int, int]) -> dict[int, Rope | None]:
    """The rotary embedding of layers of which nothing but the cached keys can be seen.

    RoPE is relative: a shift of all positions changes nothing but the turn of the keys, so under the right rotation the
    keys of two shifts turn back into the same.

    Args:
        layers: head_dim by layer index.

    Raises:
        ValueError: no rotation that we know does that.
    """
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    positions = torch.tensor(PROBE_POSITIONS)
    keys = [_cached_keys(model, positions + shift) for shift in (0, SHIFT)]
    found = {}
    for i, head_dim in layers.items():
        described = rope_from_config(config, head_dim, layer_type=layer_types[i] if layer_types else None)
        for rope in (described, replace(described, interleaved=True), None):
            here, there = (
                k[i] if rope is None else rope.unrotate(k[i], (positions + shift)[:, None])
                for k, shift in zip(keys, (0, SHIFT), strict=True)
            )
            if (here - there).norm() <= TOLERANCE * here.norm():
                found[i] = rope
                break
        else:
            raise ValueError(
                f"layer {i} of {type(model).__name__} rotates its keys in a way that we do not know, so they cannot be "
                "calibrated: please report this model."
            )
    return found


def _cached_keys(model: PreTrainedModel, positions: torch.Tensor) -> list[torch.Tensor | None]:
    """Keys of every softmax layer as the cache holds them, float32 [T, Hkv, D], of a few tokens at these positions."""
    ids = torch.arange(1, len(positions) + 1, device=model.device)[None]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=ids, position_ids=positions.to(model.device)[None], past_key_values=cache, use_cache=True)
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    return [k[0].transpose(0, 1).float().cpu() if isinstance(k, torch.Tensor) and k.ndim == 4 else None for k in keys]


@torch.inference_mode()
def _watch(model: PreTrainedModel, modules: dict[int, torch.nn.Module]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys of each layer before and after RoPE at PROBE_POSITIONS, float32 [T, Hkv, D], from one forward pass."""
    seen = {}
    hooks = [
        module.k_proj.register_forward_hook(lambda _module, _args, output, i=i: seen.__setitem__(i, output))
        for i, module in modules.items()
    ]
    positions = torch.tensor(PROBE_POSITIONS, device=model.device)[None]
    ids = torch.arange(1, positions.shape[1] + 1, device=model.device)[None]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    try:
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    before = {i: seen[i][0].unflatten(-1, (-1, module.head_dim)) for i, module in modules.items()}
    after = {i: cache.layers[i].keys[0].transpose(0, 1) for i in modules}
    return {i: (before[i].float().cpu(), after[i].float().cpu()) for i in modules}
