"""Draft models (`"method": "draft_model"`) beside an exact window.

vLLM 0.32 hands a draft model the block table of the first KV cache group, whichever group its layers are in: in another
one it would overwrite the target's pages and draft from noise. Window caches make groups. With them, target and draft
layers still share the first group while they are of one spec and the draft layers are fewer than half the target's:
vLLM cuts layers of one spec into groups as large as the smallest kind, or as the largest where that is below 1.5 times
it.
"""

from __future__ import annotations

from typing import Any

import wrapt
from vllm.config import VllmConfig

METHOD = "draft_model"
PROPOSER = "vllm.v1.spec_decode.draft_model"


def leaves_room_for_windows(vllm_config: VllmConfig) -> bool:
    """May the target's layers have window caches, as far as a draft model is concerned?"""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method != METHOD:
        return True
    context = vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if hasattr(layer, "impl")]
    draft = sum(getattr(layer.impl, "is_draft", False) for layer in layers)
    return len({_kind(layer) for layer in layers}) == 1 and 2 * draft < len(layers) - draft


def _kind(layer: Any) -> tuple:
    """What decides a layer's KV cache spec."""
    return layer.kv_cache_dtype, layer.num_kv_heads, layer.head_size, layer.sliding_window


def guard_groups() -> None:
    """Refuse a draft model outside the first group, now or when vLLM's module is imported. Idempotent."""
    wrapt.register_post_import_hook(_wrap, PROPOSER)


def _wrap(module: Any) -> None:
    proposer = module.DraftModelProposer
    initialize = proposer.initialize_attn_backend
    if hasattr(initialize, "turboquant"):
        return

    def initialize_attn_backend(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        dtype = self.vllm_config.cache_config.cache_dtype
        if self.kv_cache_gid > 0 and dtype.startswith("turboquant"):
            raise NotImplementedError(
                f"kv_cache_dtype={dtype!r}: the draft model's layers are in KV cache group {self.kv_cache_gid}, and "
                "vLLM serves draft models from group 0 only: the target would read noise. Draft with n-grams, EAGLE or "
                "MTP, or serve this target without speculation."
            )

    initialize_attn_backend.turboquant = True
    proposer.initialize_attn_backend = initialize_attn_backend
