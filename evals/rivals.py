"""What users would take in place of our formats, quantised and dequantised to the byte.

Each rival is a pure function of one token's K or V in one KV head, so it can stand in any cache: the engine lacks some
of these on some platforms, and serves others wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.linalg import hadamard
from scipy.stats import norm

FP8_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Rival:
    """One other way to store K and V.

    Attributes:
        name: as in --kv-cache-dtype.
        key, value: float32 [..., D] to what is read back, [..., D].
        slot_bytes: of head_dim: one token in one KV head, K and V, scales included.
        what: one line for tables.
    """

    name: str
    key: Callable[[torch.Tensor], torch.Tensor]
    value: Callable[[torch.Tensor], torch.Tensor]
    slot_bytes: Callable[[int], int]
    what: str

    def bits_per_element(self, head_dim: int) -> float:
        """All-inclusive, as for our formats."""
        return 8 * self.slot_bytes(head_dim) / (2 * head_dim)

    def read_back(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [..., D] as a cache of this kind returns them, in the dtype that they came in."""
        return self.key(key.float()).to(key.dtype), self.value(value.float()).to(value.dtype)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with scale 1, which is what vLLM does without calibrated scales."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def symmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers with one fp16 scale for each vector."""
    top = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(-1, keepdim=True) / top).half().float()
    return torch.where(scale > 0, (x / scale).round().clamp(-top, top) * scale, 0.0)


def asymmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers between the vector's extremes, with an fp16 step and an fp16 minimum."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    codes = ((x - low) / step + 0.5).floor().clamp(0, 2**bits - 1)
    return codes * step.half().float() + low.half().float()


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1 in blocks of 16 with an E4M3 scale, without the second, global scale."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = fp8(blocks.abs().amax(-1, keepdim=True) / E2M1[-1])
    grid = torch.tensor(E2M1, device=x.device)
    units = torch.where(scale > 0, blocks / scale, 0.0)
    nearest = torch.bucketize(units.abs(), (grid[1:] + grid[:-1]) / 2)
    return (grid[nearest] * units.sign() * scale).flatten(-2)


def lloyd_max_key(x: torch.Tensor, bits: int) -> torch.Tensor:
    """K of vLLM's own `turboquant_*_nc` presets: Hadamard without signs, Gaussian Lloyd-Max, fp16 norm, and the read
    vector brought back to unit length."""
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(f"vLLM's turboquant_* presets cannot do head_dim {dim}: powers of two only.")
    rotation = torch.tensor(hadamard(dim) / dim**0.5, dtype=torch.float32, device=x.device)
    length = x.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, x / length, 0.0) @ rotation
    centroids = gaussian_codebook(bits).to(x.device) / dim**0.5
    read = centroids[torch.bucketize(unit, (centroids[1:] + centroids[:-1]) / 2)]
    return (read / read.norm(dim=-1, keepdim=True)) @ rotation * length.half().float()


@functools.cache
def gaussian_codebook(bits: int) -> torch.Tensor:
    """Lloyd-Max centroids of N(0, 1), float32 [2**bits]."""
    import numpy as np

    centroids = np.linspace(-3.0, 3.0, 2**bits)
    for _ in range(2000):
        edges = np.concatenate(([-np.inf], (centroids[1:] + centroids[:-1]) / 2, [np.inf]))
        centroids = -np.diff(norm.pdf(edges)) / np.diff(norm.cdf(edges))
    return torch.tensor(centroids, dtype=torch.float32)


def _upstream(name: str, key_bits: int, value_bits: int) -> Rival:
    exact_key = key_bits == 8
    return Rival(
        name,
        fp8 if exact_key else functools.partial(lloyd_max_key, bits=key_bits),
        functools.partial(asymmetric, bits=value_bits),
        lambda dim: (dim if exact_key else -(-dim * key_bits // 8) + 2) + -(-dim * value_bits // 8) + 4,
        f"vLLM's own preset: K {'fp8' if exact_key else f'{key_bits} bits'}, V {value_bits} bits",
    )


def _same(name: str, read: Callable[[torch.Tensor], torch.Tensor], half_slot: Callable[[int], int], what: str) -> Rival:
    return Rival(name, read, read, lambda dim: 2 * half_slot(dim), what)


RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        _same("fp8", fp8, lambda dim: dim, "E4M3, scale 1"),
        _same("int8", functools.partial(symmetric, bits=8), lambda dim: dim + 2, "a scale for each token and head"),
        _same("int4", functools.partial(asymmetric, bits=4), lambda dim: dim // 2 + 4, "a step and a minimum likewise"),
        _same("nvfp4", nvfp4, lambda dim: dim // 2 + dim // 16, "E2M1 in blocks of 16 with an E4M3 scale"),
        _upstream("turboquant_k8v4", 8, 4),
        _upstream("turboquant_4bit_nc", 4, 4),
        _upstream("turboquant_k3v4_nc", 3, 4),
        _upstream("turboquant_3bit_nc", 3, 3),
    )
}
