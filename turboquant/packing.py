"""Codes to bytes and back, and the planes of a page.

The codes of one token form a little-endian bit stream: code i takes bits [i·b, (i+1)·b), bit j of the stream is bit
j % 8 of byte j // 8. A 4-bit pair is one byte (even code in the low nibble), eight 3-bit codes are three bytes.
Every function works on the last axis and keeps the others. `pack_codes` and `unpack_codes` define the order that every
kernel reads; `split_page` defines where the planes are.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from turboquant.formats import KVFormat, code_bytes


class PageViews(NamedTuple):
    """Views into pages, no copies. B blocks, H KV heads, N tokens in a block."""

    key_codes: torch.Tensor  # [B, H, N, key_code_bytes] uint8
    value_codes: torch.Tensor  # [B, H, N, value_code_bytes] uint8
    key_scales: torch.Tensor  # [B, H, N] float16
    value_scales: torch.Tensor  # [B, H, N] float16


def _group(bits: int) -> tuple[int, int]:
    """The smallest run of codes that fills whole bytes: (codes, bytes)."""
    codes = 8 // math.gcd(8, bits)
    return codes, codes * bits // 8


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes into bytes.

    Args:
        codes: uint8 [..., D], every value below 2**bits (not checked: a larger value spills into its neighbour).
        bits: bits of one code, 1 to 8.

    Returns:
        uint8 [..., ceil(D·bits / 8)].
    """
    _check(codes, bits)
    dim = codes.shape[-1]
    group_codes, group_bytes = _group(bits)
    padded = torch.nn.functional.pad(codes, (0, -dim % group_codes)).unflatten(-1, (-1, group_codes))
    shifts = torch.arange(group_codes, device=codes.device) * bits
    words = (padded.to(torch.int64) << shifts).sum(-1, keepdim=True)
    octets = (words >> (8 * torch.arange(group_bytes, device=codes.device))) & 0xFF
    return octets.to(torch.uint8).flatten(-2)[..., : code_bytes(dim, bits)]


def unpack_codes(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [..., ceil(dim·bits / 8)] to uint8 [..., dim]."""
    _check(packed, bits)
    _check_length(packed, bits, dim)
    words, group_codes = _words(packed, bits)
    shifts = torch.arange(group_codes, device=packed.device) * bits
    codes = (words >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :dim]


def look_up(packed: torch.Tensor, bits: int, dim: int, table: torch.Tensor) -> torch.Tensor:
    """`table[unpack_codes(packed, bits, dim)]`, with several codes to a gather where the bits allow it.

    Args:
        packed: uint8 [..., ceil(dim·bits / 8)].
        table: [2**bits], any float dtype.

    Returns:
        table.dtype [..., dim].
    """
    group_codes, group_bytes = _group(bits)
    if group_bytes * 8 > 24 or dim % group_codes:
        return table[unpack_codes(packed, bits, dim).long()]
    _check_length(packed, bits, dim)
    words, _ = _words(packed, bits)
    if group_bytes == 3:
        # Half a group at a time: a table of 2**24 rows would fit no cache.
        words = torch.cat((words & 0xFFF, words >> 12), dim=-1)
        group_codes //= 2
    rows = table[_code_table(group_codes, bits).to(table.device)]
    return torch.nn.functional.embedding(words, rows).flatten(-3)


@functools.cache
def _code_table(num_codes: int, bits: int) -> torch.Tensor:
    """[2**(num_codes·bits), num_codes] int64: the codes of every word of `num_codes` codes."""
    words = torch.arange(2 ** (num_codes * bits))
    return (words[:, None] >> (torch.arange(num_codes) * bits)) & (2**bits - 1)


def _words(packed: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """Bytes to one word a group of codes: [..., num_groups, 1], and the number of codes in a group."""
    group_codes, group_bytes = _group(bits)
    dtype = torch.int32 if group_bytes < 4 else torch.int64
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % group_bytes)).unflatten(-1, (-1, group_bytes))
    words = padded[..., 0].to(dtype)
    for i in range(1, group_bytes):
        words = words | (padded[..., i].to(dtype) << (8 * i))
    return words.unsqueeze(-1), group_codes


def split_page(pages: torch.Tensor, fmt: KVFormat, head_dim: int) -> PageViews:
    """Views of the four planes of every page.

    Args:
        pages: uint8 [num_blocks, num_kv_heads, block_size, slot_bytes]; the outer two strides are free, a page itself
            is contiguous.
        fmt: the format of the pages.
        head_dim: D.

    Raises:
        ValueError: the last axis is not this format's slot, a page is not contiguous, or its scales would lie at an
            odd address (odd block size with an odd number of code bytes).
    """
    num_blocks, num_kv_heads, block_size, slot = pages.shape
    if slot != fmt.slot_bytes(head_dim):
        raise ValueError(
            f"pages have slots of {slot} bytes; {fmt.name} at head_dim {head_dim} needs {fmt.slot_bytes(head_dim)}. "
            "Allocate them with KVFormat.slot_bytes(head_dim)."
        )
    if pages.stride(3) != 1 or pages.stride(2) != slot:
        raise ValueError(
            f"a page must be contiguous (inner strides ({slot}, 1)), got {tuple(pages.stride()[2:])}: "
            "use a head-major KV cache layout (LBHNC or BLHNC)."
        )
    at = fmt.planes(block_size, head_dim)
    if at.key_scales % 2:
        raise ValueError(
            f"{block_size} tokens of {fmt.name} at head_dim {head_dim} would put fp16 scales at an odd address: "
            "use an even block size."
        )
    flat = pages.as_strided((num_blocks, num_kv_heads, at.end), (pages.stride(0), pages.stride(1), 1))
    scales = flat[..., at.key_scales : at.end].view(torch.float16).unflatten(-1, (2, block_size))
    return PageViews(
        flat[..., : at.value_codes].unflatten(-1, (block_size, -1)),
        flat[..., at.value_codes : at.key_scales].unflatten(-1, (block_size, -1)),
        scales[..., 0, :],
        scales[..., 1, :],
    )


def _check_length(packed: torch.Tensor, bits: int, dim: int) -> None:
    if packed.shape[-1] != code_bytes(dim, bits):
        raise ValueError(
            f"{packed.shape[-1]} bytes cannot hold {dim} codes of {bits} bits: expected {code_bytes(dim, bits)}."
        )


def _check(tensor: torch.Tensor, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits {bits} is not supported: allowed are 1 to 8.")
    if tensor.dtype != torch.uint8:
        raise TypeError(f"codes must be torch.uint8, got {tensor.dtype}: convert them with .to(torch.uint8).")
