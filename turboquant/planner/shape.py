"""What of a config costs memory: layers with a KV cache, layers with a recurrent state, and the size of their heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turboquant.formats import check_head_dim
from turboquant.planner import PlanError
from turboquant.planner.source import Source

FULL, SLIDING, RECURRENT = "full", "sliding", "recurrent"
# Names that configs give to kinds of layers.
KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": SLIDING,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What this planner would get wrong: a key in the config, and what it means.
REFUSED = {
    "kv_lora_rank": "MLA (one latent per token in place of K and V)",
    "num_kv_shared_layers": "layers that share another layer's KV cache",
    "global_head_dim": "layers of different head dims",
    "attention_chunk_size": "chunked attention",
    "hybrid_override_pattern": "layers of a single mixer each (Nemotron-H)",
    "mamba_d_ssm": "attention and Mamba in one layer (Falcon-H1)",
}


@dataclass(frozen=True)
class Recurrent:
    """State of one recurrent layer, as vLLM lays it out (model_executor/layers/mamba/mamba_utils.py).

    Attributes:
        kind: "GDN" (gated delta net) or "Mamba2".
        conv_channels: of the short convolution.
        conv_kernel: its width; the state holds one token less.
        heads: of the recurrent state.
        head_elements: of one head's state.
        groups, group_elements: of Mamba2's B and C; 0 for GDN.
    """

    kind: str
    conv_channels: int
    conv_kernel: int
    heads: int
    head_elements: int
    groups: int = 0
    group_elements: int = 0

    def state_bytes(self, tp: int, conv_bytes: int, ssm_bytes: int) -> tuple[int, int]:
        """Bytes of convolution and recurrent state of one layer and sequence, on each of `tp` devices."""
        # Groups that do not divide are replicated, so that every head finds its own.
        extra = 0 if self.groups % tp == 0 else 2 * (tp - self.groups) * self.group_elements
        conv = (self.conv_channels + extra) // tp * (self.conv_kernel - 1)
        return conv * conv_bytes, self.heads // tp * self.head_elements * ssm_bytes


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
        model_type: Transformers' name of the family.
        layers: kind of every layer: full, sliding or recurrent.
        sliding_window: tokens that a sliding layer reads; None where there is none.
        recurrent: state of the recurrent layers; None where there are none.
        dtype: of weights and activations, as the config has it.
        max_model_len: longest sequence by the config, YaRN included; None where it does not say.
        text: the config that all this came from.
    """

    model_type: str
    layers: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    recurrent: Recurrent | None
    dtype: str
    max_model_len: int | None
    text: Mapping[str, Any]

    def count(self, *kinds: str) -> int:
        return sum(kind in kinds for kind in self.layers)

    @property
    def kv_layers(self) -> int:
        """Layers with K and V of tokens."""
        return self.count(FULL, SLIDING)

    def local_kv_heads(self, tp: int) -> int:
        """KV heads on each of `tp` devices: more devices than heads hold copies."""
        return max(1, self.num_kv_heads // tp)

    def check_tp(self, tp: int) -> None:
        """Raises:
        PlanError: the heads do not divide by `tp`.
        """
        kv_divides = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        state_divides = self.recurrent is None or self.recurrent.heads % tp == 0
        if self.num_heads % tp or not kv_divides or not state_divides:
            raise PlanError(
                f"--tp {tp} does not divide the heads: {self.num_heads} query, {self.num_kv_heads} KV heads."
            )


def read_shape(source: Source) -> Shape:
    """What of this config costs memory.

    Raises:
        PlanError: something is missing, or of a kind that would be planned wrongly.
    """
    text = source.text
    refused = [what for key, what in REFUSED.items() if text.get(key)]
    if refused or text.get("is_encoder_decoder"):
        raise PlanError(f"{source.name}: not planned: {', '.join(refused) or 'encoder and decoder'}.")
    heads = _need(source, text, "num_attention_heads")
    hidden = _need(source, text, "hidden_size")
    head_dim = text.get("head_dim") or hidden // heads
    check_head_dim(head_dim)
    layers = _layers(source, text)
    return Shape(
        model_type=text.get("model_type", ""),
        layers=layers,
        hidden_size=hidden,
        vocab_size=_need(source, text, "vocab_size"),
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        sliding_window=text.get("sliding_window") if SLIDING in layers else None,
        recurrent=_recurrent(source, text, layers),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        max_model_len=_max_model_len(source.own_text),
        text=text,
    )


def _need(source: Source, text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise PlanError(
            f"{source.name}: {key} is {value!r}, and no default is known for model_type {text.get('model_type')!r}. "
            "Write it into the config, or install a Transformers that knows the model."
        )
    return value


def _layers(source: Source, text: Mapping[str, Any]) -> tuple[str, ...]:
    count = _need(source, text, "num_hidden_layers")
    named = text.get("layer_types") or text.get("layers_block_type")
    if named is None:
        return tuple(_layer_by_rule(text, index) for index in range(count))
    unknown = sorted({*named} - {*KINDS})
    if unknown or len(named) != count:
        raise PlanError(f"{source.name}: {len(named)} layer types for {count} layers, unknown: {unknown or 'none'}.")
    return tuple(KINDS[name] for name in named)


def _layer_by_rule(text: Mapping[str, Any], index: int) -> str:
    """Kind of a layer where the config has a rule in place of a list."""
    if interval := text.get("full_attention_interval"):
        return RECURRENT if (index + 1) % interval else FULL
    if text.get("attn_layer_indices") is not None:
        return FULL if index in text["attn_layer_indices"] else RECURRENT
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return FULL
    if pattern := text.get("sliding_window_pattern") or text.get("_sliding_window_pattern"):
        return SLIDING if (index + 1) % pattern else FULL
    return SLIDING if index >= (text.get("max_window_layers") or 0) else FULL


def _recurrent(source: Source, text: Mapping[str, Any], layers: tuple[str, ...]) -> Recurrent | None:
    if RECURRENT not in layers:
        return None
    if text.get("mamba_n_heads"):
        heads, dim, state, groups, kernel = (
            _need(source, text, f"mamba_{part}") for part in ("n_heads", "d_head", "d_state", "n_groups", "d_conv")
        )
        return Recurrent("Mamba2", heads * dim + 2 * groups * state, kernel, heads, dim * state, groups, state)
    keys, values = (_need(source, text, f"linear_num_{part}_heads") for part in ("key", "value"))
    key_dim, value_dim = (_need(source, text, f"linear_{part}_head_dim") for part in ("key", "value"))
    kernel = _need(source, text, "linear_conv_kernel_dim")
    return Recurrent("GDN", 2 * keys * key_dim + values * value_dim, kernel, values, value_dim * key_dim)


def _max_model_len(text: Mapping[str, Any]) -> int | None:
    """The written length only: defaults of classes are too short for their own published models."""
    length = text.get("max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if length and (rope.get("rope_type") or rope.get("type")) == "yarn":
        return int((rope.get("original_max_position_embeddings") or length) * rope.get("factor", 1))
    return length
