"""K's mean of a vLLM layer: found in the module around it, already sharded by vLLM's own tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models.utils import extract_layer_index

from turboquant.artifact import Artifact, find_artifact
from turboquant.key_bias import as_key_mean, check_key_norm, check_no_hidden_bias, refuse
from turboquant.rope import Rope, rope_from_config
from turboquant.vllm.owner import OwnedLayer

logger = init_logger("vllm.turboquant")

UNCALIBRATED = "no calibration artifact was found; `turboquant calibrate` makes one"
# How far a rotary table of 16 bits may be from ours.
TABLE_TOLERANCE = 2e-2


def layer_key_mean(
    owned: OwnedLayer, text_config: Any, mode: str, artifact: Artifact | None
) -> tuple[torch.Tensor | None, Rope | None, str]:
    """μ [num_kv_heads, D] of this rank's heads, its RoPE, and where μ comes from.

    Args:
        mode: "auto" or "none", see `turboquant.vllm.options.Options`.
        artifact: of the model, None for none.

    Raises:
        ArtifactError: the artifact lacks this layer.
        MissingKeyMeanError: K has a bias and no mean can be had.
    """
    head_dim = owned.layer.head_size
    if artifact is not None:
        if owned.parent is None:
            raise RuntimeError(f"the module around {owned.name} cannot be found, so its calibrated mean has no RoPE.")
        mean = artifact.key_mean(
            extract_layer_index(owned.name), owned.layer.num_kv_heads,
            tp_rank=get_tensor_model_parallel_rank(), tp_size=get_tensor_model_parallel_world_size(),
        )  # fmt: skip
        return mean, _rope(owned, text_config, head_dim), f"calibrated, {artifact.path}"
    if owned.parent is None:
        if getattr(text_config, "attention_bias", False) or getattr(text_config, "qkv_bias", False):
            raise refuse(owned.name, "its projection cannot be found in the model")
        logger.warning_once("The module around %s cannot be found: assuming that its keys have no bias.", owned.name)
        return None, None, "none"
    check_key_norm(owned.name, owned.parent)
    bias = _key_bias(owned)
    if bias is None or not bias.any():
        return None, None, f"none ({UNCALIBRATED})"
    mean = as_key_mean(owned.name, owned.parent, bias, head_dim, mode)
    return mean, _rope(owned, text_config, head_dim), f"the k_proj bias ({UNCALIBRATED})"


def load_artifact(config: Any, given: str | None, mode: str) -> Artifact | None:
    """The artifact that this engine serves with, held against its model.

    Args:
        config: vLLM's model config.
        given: see `turboquant.artifact.find_artifact`.

    Raises:
        ArtifactError: damaged, not there, or another model's.
        ValueError: one was given, and `mode` forbids it.
    """
    path = find_artifact(config.model, given, config.revision)
    if path is None:
        return None
    if mode == "none":
        if given is None:
            return None
        raise ValueError(f"key_mean='none' and artifact={given!r} contradict each other: leave one out.")
    artifact = Artifact.load(path)
    artifact.check(config.hf_text_config)
    return artifact


def _key_bias(owned: OwnedLayer) -> torch.Tensor | None:
    """This rank's K bias [num_kv_heads·D], or None."""
    for module in owned.parent.children():
        if isinstance(module, QKVParallelLinear):
            if module.bias is None:
                return None
            begin = module.num_heads * module.head_size
            return module.bias[begin : begin + module.num_kv_heads * module.head_size]
    separate = getattr(owned.parent, "k_proj", None)
    if separate is not None:
        return separate.bias
    check_no_hidden_bias(owned.name, owned.parent)
    return None


def _rope(owned: OwnedLayer, text_config: Any, head_dim: int) -> Rope | None:
    """The layer's RoPE, held against the table that the layer itself uses.

    Raises:
        ValueError: the two differ, so that the mean would be put in the wrong place.
    """
    module = getattr(owned.parent, "rotary_emb", None)
    if module is None or not getattr(owned.parent, "use_rope", True):
        return None
    layer_type = "sliding_attention" if owned.layer.sliding_window else "full_attention"
    rope = rope_from_config(text_config, head_dim, layer_type=layer_type)
    rope = Rope(rope.inv_freq, rope.attention_scaling, interleaved=not module.is_neox_style)
    at = torch.tensor([1, 2, 17, 100])
    table = module.cos_sin_cache[at.to(module.cos_sin_cache.device)].float().cpu()
    ours = torch.cat(rope.cos_sin(at), dim=-1)
    if table.shape != ours.shape or (table - ours).abs().max() > TABLE_TOLERANCE:
        raise ValueError(
            f"layer {owned.name}: its rotary table ({type(module).__name__}) is not the one that the model's config "
            "describes, so K's mean cannot be placed. Serve with kv_cache_dtype='auto' and report this model."
        )
    return rope
