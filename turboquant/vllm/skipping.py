"""Layers left exact by `--kv-cache-dtype-skip-layers`: packed blocks that are as large in bytes as exact ones.

vLLM gives every layer blocks of as many tokens and pads the smaller pages to the larger ones, which would make packed
pages cost as much as exact ones. Blocks of k times as many tokens fill such a page. The price is that prefix hits come
in steps of k blocks.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from turboquant.formats import KVFormat
from turboquant.window import CacheLayout

logger = init_logger("vllm.turboquant")


def packed_block_size(vllm_config: VllmConfig, fmt: KVFormat, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens in a packed block: vLLM's block size, or a multiple of it where some layers stay exact."""
    block_size = vllm_config.cache_config.block_size
    if not vllm_config.cache_config.kv_cache_dtype_skip_layers:
        return block_size
    layout = CacheLayout(fmt, head_dim, block_size, window=0, exact_bytes=dtype.itemsize)
    return block_size * max(1, block_size * layout.exact_token_bytes // layout.page_bytes)


def fill_pages(layer: Any, fmt: KVFormat, dtype: torch.dtype) -> None:
    """Let one of vLLM's attention layers, with our impl, ask for blocks of that size."""
    plain = layer.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = plain(vllm_config)
        block_size = packed_block_size(vllm_config, fmt, self.head_size, dtype)
        if not isinstance(spec, FullAttentionSpec) or block_size == spec.block_size:
            return spec
        logger.info_once(
            "TurboQuant: packed blocks of %d tokens beside exact ones of %d, so that both fill a page; prefix hits "
            "come in steps of %d tokens.", block_size, spec.block_size, block_size,
        )  # fmt: skip
        return replace(spec, block_size=block_size)

    layer.get_kv_cache_spec = MethodType(get_kv_cache_spec, layer)
