"""vLLM 0.32: the KV cache dtypes are a closed Literal, so the names go into the tables that were built from it."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from pydantic.dataclasses import rebuild_dataclass


def register_names(names: list[str]) -> None:
    """Make `names` valid values of `CacheConfig.cache_dtype` and `--kv-cache-dtype`, stored as uint8.

    Raises:
        RuntimeError: this vLLM's CacheConfig is not what 0.32 had.
    """
    from vllm.config import cache
    from vllm.engine import arg_utils
    from vllm.utils import torch_utils
    from vllm.v1.attention import selector

    extended = Literal[*get_args(cache.CacheDType), *names]
    field = next((f for f in dataclasses.fields(cache.CacheConfig) if f.name == "cache_dtype"), None)
    if field is None:
        raise RuntimeError("vLLM's CacheConfig has no field cache_dtype: this build is not a known vLLM 0.32.")
    cache.CacheDType = selector.CacheDType = extended
    # pydantic validates by the dataclass field, argparse by a cached copy of it.
    field.type = extended
    rebuild_dataclass(cache.CacheConfig, force=True)
    arg_utils._compute_kwargs.cache_clear()
    for name in names:
        torch_utils.STR_DTYPE_TO_TORCH_DTYPE[name] = torch.uint8
