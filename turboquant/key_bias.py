"""K's mean without data: the bias of the K projection.

Without its mean a cache of Qwen2's kind collapses (KL 6), with the bias as mean it is as good as calibrated. So a
layer with a K bias either gets it as its mean or does not serve.
"""

from __future__ import annotations

import torch

# Children of an attention module whose bias does not reach K.
OUTPUT_PROJECTIONS = {"o_proj", "out_proj", "dense", "c_proj", "wo", "proj", "q_proj", "v_proj"}
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")


class MissingKeyMeanError(ValueError):
    """A layer's keys have a bias, and no mean is at hand to take it out."""


def refuse(layer_name: str, reason: str) -> MissingKeyMeanError:
    """The error for a layer whose K has a bias that cannot serve as its mean."""
    return MissingKeyMeanError(
        f"layer {layer_name} adds a bias to K, and {reason}. Without K's mean its cache would collapse "
        "(measured on Qwen2.5: KL 6). Serve with kv_cache_dtype='auto', or with key_mean='auto' on a model whose "
        "attention module has a k_proj or a fused qkv_proj."
    )


def check_no_hidden_bias(layer_name: str, module: torch.nn.Module) -> None:
    """Refuse a module with a biased projection, at any depth, that may feed K and that we cannot take apart.

    Raises:
        MissingKeyMeanError: naming the projection.
    """
    for name, child in module.named_modules():
        weight = getattr(child, "weight", None)
        is_projection = isinstance(weight, torch.Tensor) and weight.ndim == 2
        if is_projection and _has_bias(child) and name.rpartition(".")[2] not in OUTPUT_PROJECTIONS:
            raise refuse(layer_name, f"its projection {name!r} ({type(child).__name__}) is not one that we can split")


def check_key_norm(layer_name: str, module: torch.nn.Module) -> None:
    """Refuse a norm of K that adds a bias itself.

    Raises:
        MissingKeyMeanError: naming the norm.
    """
    for name in KEY_NORMS:
        if _has_bias(getattr(module, name, None)):
            raise refuse(layer_name, f"it is {name} that adds it, of which no mean is known")


def as_key_mean(layer_name: str, module: torch.nn.Module, bias: torch.Tensor, head_dim: int, mode: str) -> torch.Tensor:
    """The bias [num_kv_heads·D] as μ [num_kv_heads, D] float32.

    Raises:
        MissingKeyMeanError: a norm between projection and cache bends the bias, or `mode` is "none".
    """
    norm = next((name for name in KEY_NORMS if isinstance(getattr(module, name, None), torch.nn.Module)), None)
    if norm:
        raise refuse(layer_name, f"{norm} comes after it, so the bias is not the mean")
    if mode == "none":
        raise refuse(layer_name, "key_mean='none' forbids taking it as the mean")
    return bias.detach().float().cpu().view(-1, head_dim)


def _has_bias(module: object) -> bool:
    bias = getattr(module, "bias", None)
    return isinstance(bias, torch.Tensor) and bool(bias.any())
