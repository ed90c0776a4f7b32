"""Scratch memory: one buffer a device, reserved before CUDA graphs are captured and never moved after.

A tile of queries of one KV head holds, for each of its M columns: the rotated query, its norm, and for every split and
the exact tokens an accumulator of D float32 and two statistics. Large batches go through in rounds of as many tiles as
fit into `LIMIT_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LIMIT_BYTES = 64 << 20
ALIGNMENT = 256

_buffers: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True)
class Scratch:
    """What one round of tiles writes and reads.

    Attributes:
        rotated: [tiles, num_kv_heads, M, D] float16 or float32.
        norms: [tiles, num_kv_heads, M] float32.
        partial: [tiles, num_kv_heads, splits + 1, M, D] float32, the exact tokens' last.
        statistics: [tiles, num_kv_heads, splits + 1, 2, M] float32: running maximum (log2) and sum.
    """

    rotated: torch.Tensor
    norms: torch.Tensor
    partial: torch.Tensor
    statistics: torch.Tensor


def bytes_per_tile(num_kv_heads: int, columns: int, head_dim: int, splits: int) -> int:
    """Bytes of one tile of queries in all KV heads, float32 queries assumed."""
    floats = columns * (head_dim + 1 + (splits + 1) * (head_dim + 2))
    return 4 * num_kv_heads * floats


def tiles_per_round(num_kv_heads: int, columns: int, head_dim: int, splits: int) -> int:
    """How many tiles fit, at least one."""
    return max(1, (LIMIT_BYTES - 4 * ALIGNMENT) // bytes_per_tile(num_kv_heads, columns, head_dim, splits))


def reserve(device: torch.device, num_bytes: int = LIMIT_BYTES) -> torch.Tensor:
    """The device's buffer, of at least `num_bytes`. Every launch fits into LIMIT_BYTES unless one tile is larger.

    Raises:
        RuntimeError: it would have to grow while a CUDA graph is being captured.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    buffer = _buffers.get(device)
    if buffer is None or buffer.numel() < num_bytes:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the Triton kernels need {num_bytes} bytes of scratch memory, which cannot be allocated while a CUDA "
                "graph is captured: call turboquant.kernels.triton.reserve(device) first."
            )
        buffer = _buffers[device] = torch.empty(max(num_bytes, LIMIT_BYTES), dtype=torch.uint8, device=device)
    return buffer


def scratch(
    device: torch.device, tiles: int, num_kv_heads: int, columns: int, head_dim: int, splits: int, dtype: torch.dtype
) -> Scratch:
    """Views into the device's buffer for `tiles` tiles; `dtype` of the rotated queries."""
    shapes = {
        "rotated": ((tiles, num_kv_heads, columns, head_dim), dtype),
        "norms": ((tiles, num_kv_heads, columns), torch.float32),
        "partial": ((tiles, num_kv_heads, splits + 1, columns, head_dim), torch.float32),
        "statistics": ((tiles, num_kv_heads, splits + 1, 2, columns), torch.float32),
    }
    begin, spans = 0, {}
    for name, (shape, kind) in shapes.items():
        size = torch.Size(shape).numel() * kind.itemsize
        spans[name] = (begin, begin + size, shape, kind)
        begin = -(-(begin + size) // ALIGNMENT) * ALIGNMENT
    buffer = reserve(device, begin)
    return Scratch(**{name: buffer[a:b].view(kind).view(shape) for name, (a, b, shape, kind) in spans.items()})
