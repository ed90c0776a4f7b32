"""vLLM 0.33: third parties register a KV cache dtype through a public decorator."""

from __future__ import annotations

import torch


def register_names(names: list[str]) -> None:
    """Make `names` valid KV cache dtypes, stored as uint8, handled by our own backend alone."""
    from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    for name in names:
        if is_known_kv_cache_dtype(name):
            continue

        class Handler:
            def torch_dtype(self) -> torch.dtype:
                return torch.uint8

            def quant_mode(self) -> KVQuantMode:
                return KVQuantMode.CUSTOM

        Handler.name = name
        register_kv_cache_dtype(name)(Handler)
