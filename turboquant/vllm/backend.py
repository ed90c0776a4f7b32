"""The attention backend: vLLM's layer on one side, `store_kv` and `attend` on the other.

A layer's life: its impl is built; the layer joins its model (`owner.py` tells which, and what this backend cannot do is
refused, before weights are loaded); weights arrive and `process_weights_after_loading` builds the kernels' parameters,
K's mean among them; then `do_kv_cache_update` and `forward` once a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

from turboquant.formats import ALIASES, PRESETS, KVFormat, check_head_dim
from turboquant.kernels.interface import ExactWindow, KVParams, attend, prepare, store_kv, store_window
from turboquant.kv_quantizer import make_params
from turboquant.vllm import owner
from turboquant.vllm.key_mean import layer_key_mean, load_artifact
from turboquant.vllm.metadata import PagesBackend, TurboQuantMetadata
from turboquant.vllm.options import Options
from turboquant.vllm.routing import enum_name
from turboquant.vllm.skipping import fill_pages
from turboquant.vllm.window import WindowCache

logger = init_logger("vllm.turboquant")


class TurboQuantBackend(PagesBackend):
    """One subclass a preset: the KV cache spec does not carry the dtype's name."""

    fmt: ClassVar[KVFormat]
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [*PRESETS, *ALIASES]

    @classmethod
    def get_name(cls) -> str:
        return enum_name(cls.fmt.name)

    @staticmethod
    def get_impl_cls() -> type[TurboQuantImpl]:
        return TurboQuantImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """160 with an exact window: 32 exact tokens fill nine tenths of such a page, at head dims 128 and 256."""
        window = Options.load(get_current_vllm_config().additional_config).window
        return 160 if window else super().get_preferred_block_size(default_block_size)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Size a page by the format's bytes: this is what the reported number of tokens comes from."""
        if spec.dtype is not torch.uint8 or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=cls.fmt.slot_bytes(spec.head_size))

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class TurboQuant25Backend(TurboQuantBackend):
    fmt = PRESETS["turboquant2.5"]


class TurboQuant3Backend(TurboQuantBackend):
    fmt = PRESETS["turboquant3"]


class TurboQuant35Backend(TurboQuantBackend):
    fmt = PRESETS["turboquant3.5"]


class TurboQuant4Backend(TurboQuantBackend):
    fmt = PRESETS["turboquant4"]


class TurboQuantImpl(AttentionImpl[TurboQuantMetadata]):
    """Attention of one layer over packed pages. Arguments are vLLM's."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        check_head_dim(head_size)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.softcap = float(logits_soft_cap or 0.0)
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.fmt = KVFormat.from_name(kv_cache_dtype)
        self.params: KVParams | None = None
        self.window: WindowCache | None = None

        config = get_current_vllm_config()
        self.options = Options.load(config.additional_config)
        self.model_config = config.model_config
        self.device = torch.device(config.device_config.device)
        requests = {
            "ALiBi": alibi_slopes is not None,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            **{name: True for name, value in extra.items() if value not in (None, False, -1)},
        }
        self.unsupported = [what for what, asked in requests.items() if asked]
        context = config.compilation_config.static_forward_context
        # A draft model is built when its target is complete. It has no window, as vLLM wants all its layers in one KV
        # cache group, and the artifact is not its own.
        self.is_draft = any(getattr(getattr(layer, "impl", None), "params", None) for layer in context.values())
        owner.expect(self, context)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Build the kernels' parameters; the model's weights are there now."""
        layer = owner.find(self)
        artifact = (
            None if self.is_draft else load_artifact(self.model_config, self.options.artifact, self.options.key_mean)
        )
        mean, rope, source = layer_key_mean(layer, self.model_config.hf_text_config, self.options.key_mean, artifact)
        self.params = make_params(self.fmt, self.head_size, key_mean=mean, rope=rope, device=self.device)
        prepare(self.params)
        fill_pages(layer.layer, self.fmt, act_dtype)
        if self.options.window and not self.is_draft:
            self.window = WindowCache(layer.layer, self.fmt, act_dtype, self.options.window)
            self.ownership.static_forward_context[self.window.layer_name] = self.window
        logger.info_once(
            "TurboQuant: %s, %d bytes a token and KV head (%.3f bits per element, scales included), K's mean: %s, "
            "a prefill chunk reads its own tokens %s, exact window: %s.",
            self.fmt.name, self.fmt.slot_bytes(self.head_size), self.fmt.bits_per_element(self.head_size), source,
            "exactly" if self.options.prefill_reads == "exact" else "from the packed pages",
            f"the newest {self.window.size} tokens" if self.window else "none",
        )  # fmt: skip

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Quantise this step's K and V into their slots (vLLM calls it before `forward`)."""
        metadata = _layer_metadata(layer.layer_name)
        if metadata is None:
            return
        n = metadata.num_actual_tokens
        store_kv(key[:n], value[:n], kv_cache, slot_mapping[:n], metadata.positions, self.params)
        if self._window_metadata() is not None:
            slots = get_forward_context().slot_mapping[self.window.layer_name]
            store_window(key[:n], value[:n], self.window.pages, slots[:n])

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [num_tokens, num_heads, D], key and value [num_tokens, num_kv_heads, D] of this step; writes output."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not available with a turboquant KV cache.")
        if attn_metadata is None:  # warm-up
            return output
        n = attn_metadata.num_actual_tokens
        held = self._window_metadata()
        window = None if held is None else ExactWindow(self.window.pages, held.block_table, self.window.size)
        attend(
            query[:n], kv_cache, attn_metadata.block_table, attn_metadata.seq_lens, attn_metadata.query_start_loc,
            self.params, scale=self.scale, sliding_window=self.sliding_window, softcap=self.softcap, sinks=self.sinks,
            fresh=(key[:n], value[:n]), window=window, strict=self.options.prefill_reads == "packed", out=output[:n],
        )  # fmt: skip
        return output

    def _window_metadata(self) -> TurboQuantMetadata | None:
        """The companion's metadata of this step; None where there is no window."""
        return None if self.window is None else _layer_metadata(self.window.layer_name)


def _layer_metadata(layer_name: str) -> TurboQuantMetadata | None:
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):  # micro-batches: the base model's comes first
        metadata = metadata[0]
    return metadata.get(layer_name) if isinstance(metadata, dict) else metadata
