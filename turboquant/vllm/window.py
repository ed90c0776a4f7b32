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
from turboquant.vllm.metadata import PagesBackend
from turboquant.vllm.window_manager import WindowSpec
from turboquant.window import FIRST_TOKENS

logger = init_logger("vllm.turboquant")

SUFFIX = ".window"
MAX_BLOCK_SIZE = 32


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
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            logger.warning_once(
                "TurboQuant: no exact window, because vLLM's hybrid KV cache manager is off. Every token is read from "
                "packed pages (measured on SmolLM2-135M: KL .083 in place of .006)."
            )
            return None
        token_bytes = 2 * self.head_size * self.dtype.itemsize
        page_bytes = vllm_config.cache_config.block_size * self.fmt.slot_bytes(self.head_size)
        block_size = window_block_size(vllm_config.cache_config.block_size, page_bytes // token_bytes)
        return WindowSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            # Raw bytes: pages of mixed dtypes would be zeroed at every allocation.
            dtype=torch.uint8,
            state_content_bytes=token_bytes,
            sliding_window=self.size,
            margin_tokens=2 * (vllm_config.num_speculative_tokens + 1) if vllm_config.speculative_config else 0,
            # Recurrent state cannot be rewound to compute a hit's last tokens again.
            replay_tokens=0 if vllm_config.model_config.is_hybrid else self.size + block_size,
        )

    @property
    def pages(self) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, 2·D] in the model's dtype."""
        return self.kv_cache.view(self.dtype)

    def store(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write exact K and V, [num_tokens, num_kv_heads, D] each, into their slots: −1 and block 0 hold nothing."""
        block_size = self.kv_cache.shape[2]
        real = slot_mapping >= block_size
        slots = slot_mapping[real]
        self.pages[slots // block_size, :, slots % block_size] = torch.cat((key, value), dim=-1)[real].to(self.dtype)


def window_block_size(block_size: int, tokens_that_fit: int) -> int:
    """The largest power of two that divides the packed block size and whose page is no larger than a packed one.

    A larger window page would pad all packed pages to its size.

    Raises:
        ValueError: too few exact tokens fit into a packed page.
    """
    size = MAX_BLOCK_SIZE
    while size >= FIRST_TOKENS:
        if block_size % size == 0 and size <= tokens_that_fit:
            return size
        size //= 2
    raise ValueError(
        f"block size {block_size} is too small for an exact window: {tokens_that_fit} exact tokens fit into a packed "
        f"page, {FIRST_TOKENS} at least are needed. Use a larger --block-size (160 fits well), or window 0."
    )
