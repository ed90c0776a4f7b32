"""Checks of the kernels' arguments: each names the value, what was expected and, where it helps, the next step."""

from __future__ import annotations

from typing import Any

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int32, torch.int64)


def check_pages(pages: torch.Tensor, params: Any) -> None:
    """Pages are 4-D uint8, and a mean has one row for each of their KV heads."""
    if pages.ndim != 4 or pages.dtype != torch.uint8:
        raise TypeError(f"pages must be a 4-D uint8 tensor, got {pages.ndim}-D {pages.dtype}.")
    check_mean_heads(params, pages.shape[1])


def check_mean_heads(params: Any, num_kv_heads: int) -> None:
    """One mean would otherwise be broadcast over all heads."""
    mean = params.key_mean
    if mean is not None and mean.shape[0] != num_kv_heads:
        raise ValueError(f"key_mean has {mean.shape[0]} heads: expected {num_kv_heads}, one mean a KV head.")


def check_vectors(
    name: str, x: torch.Tensor, head_dim: int, *, num_heads: int | None = None, multiple_of: int = 1
) -> None:
    """x is [num_tokens, heads, head_dim] of a float dtype, with `num_heads` heads or a multiple of `multiple_of`."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}: allowed are {', '.join(map(str, FLOAT_DTYPES))}.")
    if x.ndim != 3 or x.shape[2] != head_dim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected [num_tokens, heads, {head_dim}].")
    heads = x.shape[1]
    if num_heads is not None and heads != num_heads:
        raise ValueError(f"{name} has {heads} heads: expected {num_heads}, the KV heads of the pages.")
    if heads % multiple_of:
        raise ValueError(f"{name} has {heads} heads: expected a multiple of {multiple_of}, the KV heads of the pages.")


def check_window(window: Any, head_dim: int, num_kv_heads: int, seq_lens: torch.Tensor) -> None:
    """Window pages are [num_blocks, num_kv_heads, block_size, 2·D] of a float dtype, one table row a sequence."""
    pages, table = window.pages, window.block_table
    check_window_pages(pages, head_dim, num_kv_heads)
    check_integers("window block_table", table)
    if table.ndim != 2 or table.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"window block_table has shape {tuple(table.shape)}: expected one row a sequence.")
    if not 0 <= window.first <= pages.shape[2]:
        raise ValueError(f"window first {window.first} is not allowed: 0 to {pages.shape[2]}, the window's block size.")
    if window.size < 1:
        raise ValueError(f"window size {window.size} is not allowed: at least 1, or None for no window.")


def check_window_pages(pages: torch.Tensor, head_dim: int, num_kv_heads: int) -> None:
    """[num_blocks, num_kv_heads, block_size, 2·D] of a float dtype."""
    if pages.dtype not in FLOAT_DTYPES:
        raise TypeError(f"window pages have dtype {pages.dtype}: allowed are {', '.join(map(str, FLOAT_DTYPES))}.")
    if pages.ndim != 4 or pages.shape[1] != num_kv_heads or pages.shape[3] != 2 * head_dim:
        expected = f"[num_blocks, {num_kv_heads}, block_size, {2 * head_dim}]"
        raise ValueError(f"window pages have shape {tuple(pages.shape)}: expected {expected}.")


def check_integers(name: str, x: torch.Tensor) -> None:
    if x.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}: allowed are {', '.join(map(str, INTEGER_DTYPES))}.")


def check_shape(name: str, x: torch.Tensor, expected: torch.Size, meaning: str) -> None:
    if x.shape != expected:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {[*expected]}, {meaning}.")


def check_devices(anchor: torch.Tensor, **others: torch.Tensor) -> None:
    """All on one device."""
    for name, tensor in others.items():
        if tensor.device != anchor.device:
            raise ValueError(f"{name} is on {tensor.device}, the rest on {anchor.device}: move it with .to(...).")
