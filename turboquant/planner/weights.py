"""Weights by the config: how many parameters each part of a decoder has, and how many bytes they take.

`tests/test_planner.py` holds the counts against Transformers' own models. What a checkpoint's index says is taken
before any count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turboquant.planner import PlanError
from turboquant.planner.shape import DTYPE_BYTES, FULL, SLIDING, Shape
from turboquant.planner.source import Source

# Families with norms after attention and MLP as well, and with a norm on each head's queries and keys.
FOUR_NORMS = {"gemma2", "gemma3_text"}
HEAD_NORMS = {"qwen3", "qwen3_moe", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
GATED_QUERY = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
QKV_BIAS = {"qwen2", "qwen2_moe"}
# Their counts are compared with Transformers' in the tests.
COUNTED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "gpt_oss", "granitemoehybrid", "bamba",
    *FOUR_NORMS, *HEAD_NORMS,
}  # fmt: skip
QUANTISED_PARTS = ("attention", "recurrent", "mlp", "experts", "shared")
# What a checkpoint's list of unquantised modules calls them.
PART_NAMES = {"attention": ("self_attn",), "recurrent": ("linear_attn", "mamba"), "shared": ("shared_expert",)}
BITS_OF_METHOD = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25}


@dataclass(frozen=True)
class Weights:
    """Parameters and bytes of the whole model.

    Attributes:
        parameters: by part: embeddings, head, attention, recurrent, mlp, experts, shared, router, norms, vision.
        bytes_by_part: the same parts.
        source: where the bytes come from.
        bits: of a quantised weight, scales included; None where nothing is quantised.
        experts: routed experts of a layer and how many of them a token takes; (0, 0) in a dense model.
    """

    parameters: Mapping[str, int]
    bytes_by_part: Mapping[str, int]
    source: str
    bits: float | None
    experts: tuple[int, int]

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_part.values())

    def read_bytes(self, num_tokens: int) -> float:
        """Bytes of a step over num_tokens tokens: each expert is read if one of them is expected to choose it."""
        everything = {part: size for part, size in self.bytes_by_part.items() if part not in ("embeddings", "vision")}
        everything["head"] = everything.get("head") or self.bytes_by_part["embeddings"]
        experts, chosen = self.experts
        if experts:
            everything["experts"] *= 1 - (1 - chosen / experts) ** num_tokens
        return sum(everything.values())

    @property
    def active_parameters(self) -> int:
        """Parameters that multiply each token."""
        active = {part: count for part, count in self.parameters.items() if part not in ("embeddings", "vision")}
        active["head"] = active.get("head") or self.parameters["embeddings"]
        experts, chosen = self.experts
        if experts:
            active["experts"] = active["experts"] * chosen // experts
        return sum(active.values())


def count_weights(source: Source, shape: Shape, dtype: str) -> Weights:
    """Parameters and bytes of a model served in `dtype`.

    Raises:
        PlanError: an unknown quantisation method.
    """
    parts = {**_body(shape), **_ends(shape), "vision": _vision(source.vision)}
    width = DTYPE_BYTES[dtype]
    bits, kept = _quantisation(source)
    sizes = {}
    for part, count in parts.items():
        quantised = bits is not None and part in QUANTISED_PARTS and part not in kept
        sizes[part] = int(count * bits / 8) if quantised else count * width
    origin = "counted from the config"
    if shape.model_type not in COUNTED:
        origin += f" as a usual decoder ({shape.model_type!r} is not among the families whose count was checked)"
    if source.checkpoint_bytes is not None:
        factor = _checkpoint_factor(source, shape, dtype, bits)
        whole = sum(sizes.values())
        sizes = {part: int(size * source.checkpoint_bytes * factor / whole) for part, size in sizes.items()}
        origin = "the checkpoint beside the config" + ("" if factor == 1 else f", times {factor:g} for {dtype}")
    text = shape.text
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    chosen = text.get("num_experts_per_tok") or 0
    return Weights(parts, sizes, origin, bits, (experts, chosen) if experts and parts["experts"] else (0, 0))


def _checkpoint_factor(source: Source, shape: Shape, dtype: str, bits: float | None) -> float:
    """A checkpoint in another dtype than it is served in is converted while it is loaded."""
    return 1.0 if bits is not None else DTYPE_BYTES[dtype] / DTYPE_BYTES.get(shape.dtype, DTYPE_BYTES[dtype])


def _body(shape: Shape) -> dict[str, int]:
    text, hidden = shape.text, shape.hidden_size
    parts = dict.fromkeys(("attention", "recurrent", "mlp", "experts", "shared", "router", "norms"), 0)
    for index, kind in enumerate(shape.layers):
        if kind in (FULL, SLIDING):
            parts["attention"] += _attention(shape)
        else:
            parts["recurrent"] += _gdn(shape) if shape.recurrent.kind == "GDN" else _mamba(shape)
        for part, count in _feed_forward(text, hidden, index).items():
            parts[part] += count
        parts["norms"] += (4 if shape.model_type in FOUR_NORMS else 2) * hidden
    parts["norms"] += hidden
    return parts


def _ends(shape: Shape) -> dict[str, int]:
    table = shape.vocab_size * shape.hidden_size
    return {"embeddings": table, "head": 0 if shape.text.get("tie_word_embeddings") else table}


def _attention(shape: Shape) -> int:
    text, hidden, dim = shape.text, shape.hidden_size, shape.head_dim
    queries, kv = shape.num_heads * dim, shape.num_kv_heads * dim
    gate = queries if shape.model_type in GATED_QUERY else 0
    count = hidden * (2 * queries + gate + 2 * kv)
    if text.get("attention_bias") or text.get("qkv_bias") or shape.model_type in QKV_BIAS:
        count += queries + gate + 2 * kv
    if text.get("attention_bias"):
        count += hidden
    if shape.model_type == "gpt_oss":
        count += shape.num_heads
    return count + (2 * dim if shape.model_type in HEAD_NORMS else 0)


def _gdn(shape: Shape) -> int:
    state, text, hidden = shape.recurrent, shape.text, shape.hidden_size
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    projections = hidden * (state.conv_channels + values) + 2 * hidden * state.heads + values * hidden
    return projections + state.conv_channels * state.conv_kernel + 2 * state.heads + text["linear_value_head_dim"]


def _mamba(shape: Shape) -> int:
    state, text, hidden = shape.recurrent, shape.text, shape.hidden_size
    inner = text["mamba_n_heads"] * text["mamba_d_head"]
    count = hidden * (inner + state.conv_channels + state.heads) + inner * hidden
    count += state.conv_channels * (state.conv_kernel + bool(text.get("mamba_conv_bias", True)))
    return count + 3 * state.heads + inner


def _feed_forward(text: Mapping[str, Any], hidden: int, index: int) -> dict[str, int]:
    """MLP or experts of one layer: three matrices each."""
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    dense = text.get("intermediate_size") or 0
    step = text.get("decoder_sparse_step") or 1
    if not experts or index in (text.get("mlp_only_layers") or ()) or (index + 1) % step:
        # Granite's hybrids call the MLP of every layer the shared one.
        return {"mlp": 3 * hidden * (text.get("shared_intermediate_size") or dense)}
    width = text.get("moe_intermediate_size") or dense
    count = {"experts": experts * 3 * hidden * width, "router": hidden * experts}
    if text.get("model_type") == "gpt_oss":
        count["experts"] += experts * (2 * width + hidden)
        count["router"] += experts
    shared = text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size") or 0
    count["shared"] = 3 * hidden * shared
    if text.get("shared_expert_intermediate_size"):
        count["router"] += hidden
    return count


def _vision(config: Mapping[str, Any]) -> int:
    """A vision tower, estimated: four attention matrices and two of the MLP in each layer; the rest is small."""
    hidden = config.get("hidden_size") or config.get("embed_dim") or 0
    depth = config.get("depth") or config.get("num_hidden_layers") or 0
    return depth * (4 * hidden * hidden + 2 * hidden * (config.get("intermediate_size") or 4 * hidden))


def _quantisation(source: Source) -> tuple[float | None, set[str]]:
    """Bits of a quantised weight, scales included, and the parts that the checkpoint keeps as they are."""
    config = source.quantisation
    if not config:
        return None, set()
    ignored = [str(name) for key in ("ignore", "modules_to_not_convert") for name in config.get(key) or ()]
    kept = {part for part, names in PART_NAMES.items() if any(n in name for n in names for name in ignored)}
    return _bits(config), kept


def _bits(config: Mapping[str, Any]) -> float:
    method = config.get("quant_method", "")
    if method in BITS_OF_METHOD:
        return BITS_OF_METHOD[method]
    if method == "bitsandbytes":
        return 4.5 if config.get("load_in_4bit") else 8.0
    if method == "modelopt":
        return 4.5 if "FP4" in str(config.get("quant_algo")) else 8.0
    if method in ("awq", "gptq", "auto-round"):
        return _grouped(config.get("bits", 4), config.get("group_size", 128))
    if method == "compressed-tensors":
        scheme = next(iter((config.get("config_groups") or {}).values()), {}).get("weights") or {}
        return _grouped(scheme.get("num_bits", 8), scheme.get("group_size"))
    raise PlanError(
        f"quantisation method {method!r} is not known: give the weights' size with --weights, such as 35GB."
    )


def _grouped(bits: int, group: int | None) -> float:
    """A 16-bit scale and a zero point of the weights' width for each group."""
    return bits + (16 + bits) / group if group and group > 0 else float(bits)
