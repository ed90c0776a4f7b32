"""Watch a Transformers model's attention: queries, K and V of every softmax layer as the cache would hold them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from turboquant.hf_model import attention_modules, text_config
from turboquant.hf_rope import ropes_by_shift
from turboquant.hf_window import attending_by, exact_attention, visible_tokens
from turboquant.rope import Rope

ATTENTION = "turboquant_capture"

# (layer index, query [B, H, T, D], key [B, Hkv, T, D], value [B, Hkv, T, D])
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class CalibrationError(ValueError):
    """This model, or this data, cannot be calibrated on."""


def capturing(model: PreTrainedModel, observe: Observer) -> AbstractContextManager[None]:
    """Call `observe` for every attention layer of every forward pass inside this block."""
    return attending_by(ATTENTION, model.get_decoder(), attention_modules(model), _observers, observe)


def layers_of(model: PreTrainedModel) -> tuple[dict[int, tuple[int, int]], dict[int, Rope | None]]:
    """(num_kv_heads, head_dim) and the RoPE of every softmax-attention layer, by layer index.

    Raises:
        CalibrationError: the model has no K and V of its own to calibrate, or rotates K in an unknown way.
    """
    if getattr(text_config(model), "kv_lora_rank", None):
        raise CalibrationError(f"{type(model).__name__} has MLA (multi-head latent attention), which holds no K and V.")
    shapes: dict[int, tuple[int, int]] = {}

    def note(index: int, _query, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.shape != value.shape:
            raise CalibrationError(
                f"layer {index} of {type(model).__name__} has K {tuple(key.shape)} and V {tuple(value.shape)}: "
                "a turboquant cache holds K and V of one head_dim."
            )
        shapes[index] = (key.shape[1], key.shape[3])

    with capturing(model, note), torch.inference_mode():
        model(input_ids=torch.arange(1, 4, device=model.device)[None], use_cache=False)
    if not shapes:
        raise CalibrationError(f"{type(model).__name__} has no attention layer that keeps K and V.")
    shapes = dict(sorted(shapes.items()))
    try:
        return shapes, ropes_by_shift(model, {index: shape[1] for index, shape in shapes.items()})
    except ValueError as error:
        raise CalibrationError(str(error)) from error


def capture_attention(
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
    """Transformers' attention signature: show the states to the observer, then attend exactly."""
    _observers[module](module.layer_idx, query, key, value)
    if softcap is None and s_aux is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    visible = visible_tokens(attention_mask, query, key.shape[2])
    return exact_attention(query, key, value, visible, scale, softcap or 0.0, s_aux).to(query.dtype), None


_observers: weakref.WeakKeyDictionary[torch.nn.Module, Observer] = weakref.WeakKeyDictionary()

AttentionInterface.register(ATTENTION, capture_attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
