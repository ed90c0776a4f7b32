"""The exact window inside vLLM's own allocator: a companion cache beside each attention layer.

The companion `<layer>.window` is a layer of its own to vLLM, with a sliding-window spec whose pages hold exact K and V.
It gets its own KV cache group, block table and slot mapping, so accounting, preemption and speculation are vLLM's.
Which blocks exist is `window_manager.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec

from turboquant.formats import KVFormat
from turboquant.vllm.draft import leaves_room_for_windows
from turboquant.vllm.metadata import PagesBackend
from turboquant.vllm.skipping import packed_block_size
from turboquant.vllm.window_manager import WindowSpec
from turboquant.window import COST_LENGTHS, CacheLayout

logger = init_logger("vllm.turboquant")

SUFFIX = ".window"


class WindowBackend(PagesBackend):
    """Attends to nothing; tells vLLM about the companion's pages and metadata."""

    @staticmethod
    def get_name() -> str:
        return "TURBOQUANT_WINDOW"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("a window cache has no attention of its own")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]


class WindowCache(torch.nn.Module, AttentionLayerBase):
    """The companion of one attention layer.

    Args:
        layer: vLLM's attention layer.
        fmt: the format of its packed pages.
        dtype: of the exact K and V.
        size: W in tokens.
    """

    def __init__(self, layer: Any, fmt: KVFormat, dtype: torch.dtype, size: int) -> None:
        super().__init__()
        self.layer_name = layer.layer_name + SUFFIX
        self.num_kv_heads, self.head_size = layer.num_kv_heads, layer.head_size
        self.fmt, self.dtype, self.size = fmt, dtype, size
        self.kv_cache: torch.Tensor | None = None  # until it is bound; connectors leave out layers without one

    def get_attn_backend(self) -> type[AttentionBackend]:
        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        reason = None
        if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            reason = "vLLM's hybrid KV cache manager is off"
        elif not leaves_room_for_windows(vllm_config):
            reason = "vLLM serves draft models from the first KV cache group, where this one does not fit with windows"
        if reason:
            logger.warning_once(
                "TurboQuant: no exact window, because %s. Every token is read from packed pages (measured on "
                "SmolLM2-135M: KL .083 in place of .006).", reason,
            )  # fmt: skip
            return None
        layout = self.layout(packed_block_size(vllm_config, self.fmt, self.head_size, self.dtype))
        block_size = layout.window_block_size()
        _log_cost(layout, block_size)
        return WindowSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            # Raw bytes: pages of mixed dtypes would be zeroed at every allocation.
            dtype=torch.uint8,
            state_content_bytes=layout.exact_token_bytes,
            sliding_window=self.size,
            max_batches=vllm_config.max_concurrent_batches,
            margin_tokens=2 * (vllm_config.num_speculative_tokens + 1) if vllm_config.speculative_config else 0,
            # Recurrent state cannot be rewound to compute a hit's last tokens again.
            replay_tokens=0 if vllm_config.model_config.is_hybrid else self.size + block_size,
        )

    def layout(self, block_size: int) -> CacheLayout:
        return CacheLayout(self.fmt, self.head_size, block_size, self.size, self.dtype.itemsize)

    @property
    def pages(self) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, 2·D] in the model's dtype."""
        return self.kv_cache.view(self.dtype)


def _log_cost(layout: CacheLayout, block_size: int) -> None:
    ratios = ", ".join(f"{layout.ratio_vs_bf16(tokens):.2f}x at {name}" for name, tokens in COST_LENGTHS.items())
    logger.info_once(
        "TurboQuant: exact window of %d tokens in blocks of %d beside packed blocks of %d; a whole sequence is smaller "
        "than in bf16 by %s tokens (%.2fx without a window).",
        layout.window, block_size, layout.block_size, ratios, layout.fmt.ratio_vs_bf16(layout.head_dim),
    )  # fmt: skip
