"""What the cache needs to know of a Transformers model: its decoder, its attention modules, K's mean of each layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from turboquant.artifact import Artifact
from turboquant.formats import KVFormat
from turboquant.hf_rope import ropes_by_shift, ropes_of_layers
from turboquant.kernels.interface import KVParams
from turboquant.key_bias import as_key_mean, check_key_norm, check_no_hidden_bias
from turboquant.kv_quantizer import DEFAULT_SEED, make_params

KEY_MEANS = ("auto", "none")
COMPRESSED_LAYER_TYPE = "full_attention"
# These hold a bounded state, or at most one sliding window: they stay as they are.
EXACT_LAYER_TYPES = {"sliding_attention", "chunked_attention", "linear_attention", "conv", "moe", "mlp"}


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def layer_params(
    model: PreTrainedModel,
    fmt: KVFormat,
    *,
    key_mean: str = "auto",
    artifact: Artifact | None = None,
    seed: int = DEFAULT_SEED,
) -> dict[int, KVParams]:
    """The kernels' parameters of every layer that is compressed, by layer index.

    Args:
        key_mean: "auto" takes μ from the artifact, or else from the k_proj bias where there is one; "none" refuses such
            a model.
        artifact: of this model, already checked against its config.

    Raises:
        ValueError: no layer of this model can be compressed, or a layer has a K bias without a usable mean.
    """
    if key_mean not in KEY_MEANS:
        raise ValueError(f"key_mean {key_mean!r} is not known: allowed are {', '.join(KEY_MEANS)}.")
    modules = compressed_modules(model)
    means, ropes = _means_and_ropes(model, modules, key_mean, artifact)
    return {
        i: make_params(
            fmt, modules[i].head_dim, key_mean=means.get(i), rope=ropes.get(i), seed=seed,
            device=next(modules[i].parameters()).device,
        )
        for i in modules
    }  # fmt: skip


def compressed_modules(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The attention modules whose K and V are compressed, by layer index.

    Raises:
        ValueError: there is none, or the model has layers of a kind that we do not know.
    """
    layer_types, _ = get_layer_types_and_kwargs(text_config(model))
    unknown = set(layer_types) - EXACT_LAYER_TYPES - {COMPRESSED_LAYER_TYPE}
    modules = attention_modules(model)
    indices = [i for i, kind in enumerate(layer_types) if kind == COMPRESSED_LAYER_TYPE]
    if unknown or not indices or any(i not in modules for i in indices):
        what = f"layer types {sorted(unknown)}" if unknown else "no full-attention layer that we can find"
        raise ValueError(
            f"{type(model).__name__} has {what}: a turboquant cache holds {COMPRESSED_LAYER_TYPE} layers, beside "
            f"{', '.join(sorted(EXACT_LAYER_TYPES))}. Use its default cache."
        )
    return {i: modules[i] for i in indices}


def key_biases(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """The K bias [num_kv_heads, D] of every softmax-attention layer that has one, by layer index.

    Raises:
        MissingKeyMeanError: a layer has a bias that cannot serve as mean.
    """
    modules = attention_modules(model)
    return {i: mean for i in sorted(modules) if (mean := _key_mean(i, modules[i], "auto")) is not None}


def _means_and_ropes(model: PreTrainedModel, modules: dict[int, torch.nn.Module], mode: str, artifact: Artifact | None):
    """μ and RoPE by layer index, of the layers that have a mean."""
    if artifact is None:
        means = {i: mean for i, module in modules.items() if (mean := _key_mean(i, module, mode)) is not None}
        return means, ropes_of_layers(model, {i: modules[i] for i in means})
    if mode == "none":
        raise ValueError(f"key_mean='none' and the artifact {artifact.path} contradict each other: leave one out.")
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    means = {i: artifact.key_mean(i, heads) for i in modules}
    return means, ropes_by_shift(model, {i: module.head_dim for i, module in modules.items()})


def attention_modules(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """Softmax-attention modules by layer index: those with a layer_idx and a head_dim."""
    found = {}
    for module in model.get_decoder().modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "head_dim"):
            found.setdefault(module.layer_idx, module)
    return found


def _key_mean(index: int, module: torch.nn.Module, mode: str) -> torch.Tensor | None:
    """μ [num_kv_heads, D] of a layer whose K has a bias, None for one whose K has none."""
    name = f"{type(module).__name__} {index}"
    projection = getattr(module, "k_proj", None)
    check_key_norm(name, module)
    if projection is None:
        check_no_hidden_bias(name, module)
    bias = getattr(projection, "bias", None)
    return None if bias is None or not bias.any() else as_key_mean(name, module, bias, module.head_dim, mode)
