"""How a Transformers layer rotates its keys, found by watching it.

Configs do not say it all: some layers have no RoPE, some pair neighbours and others halves, some rotate a part of the
head. So the model reads a few tokens, and what it caches is held against what its K projection gave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from turboquant.rope import Rope, rope_from_config

# Far apart, so that slow and fast pairs both turn; few, so that even a large model reads them at once.
PROBE_POSITIONS = (1, 2, 3, 7, 20, 41)
TOLERANCE = 2e-2  # relative; 16-bit models round K


def rope_of_layer(model: PreTrainedModel, index: int, projection: torch.nn.Module, head_dim: int) -> Rope | None:
    """The rotary embedding of layer `index`, or None if it has none.

    Args:
        projection: the layer's k_proj.

    Raises:
        ValueError: no rotation that we know turns the projection's output into the cached keys.
    """
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    described = rope_from_config(config, head_dim, layer_type=layer_types[index] if layer_types else None)
    before, after, positions = _watch(model, index, projection, head_dim)
    for rope in (described, replace(described, interleaved=True), None):
        rotated = before if rope is None else rope.rotate(before, positions[:, None])
        if (rotated - after).norm() <= TOLERANCE * after.norm():
            return rope
    raise ValueError(
        f"layer {index} of {type(model).__name__} rotates its keys in a way that we do not know, so K's mean cannot be "
        "placed: use its default cache and report this model."
    )


@torch.inference_mode()
def _watch(model: PreTrainedModel, index: int, projection: torch.nn.Module, head_dim: int) -> tuple[Any, Any, Any]:
    """Keys before and after RoPE, float32 [T, Hkv, D], and their positions [T]."""
    seen = []
    hook = projection.register_forward_hook(lambda _module, _args, output: seen.append(output))
    positions = torch.tensor(PROBE_POSITIONS)
    ids = torch.arange(1, len(positions) + 1, device=model.device)[None]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    try:
        model(input_ids=ids, position_ids=positions[None].to(model.device), past_key_values=cache, use_cache=True)
    finally:
        hook.remove()
    before = seen[-1][0].unflatten(-1, (-1, head_dim))
    after = cache.layers[index].keys[0].transpose(0, 1)
    return before.float().cpu(), after.float().cpu(), positions
