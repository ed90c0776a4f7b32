"""What the kernels read besides pages: a layer's `KVParams` brought into their form once, before anything is captured.

`byte_table` approximates a Lloyd-Max codebook by integers below 128 and a gain. For D = 64 to 256, the RMS error
against the centroids themselves is at most 0.42 % of their RMS, which adds at most 0.2 % to the codebook's own squared
error.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from turboquant.codebook import sphere_cdf
from turboquant.kernels.interface import KVParams
from turboquant.kernels.triton.dequant import BIAS

MAX_TILE = 128
SCALES_TRIED = 4000


@dataclass(frozen=True)
class ByteTable:
    """Centroids as integers.

    Attributes:
        words: the table's four 32-bit words as hexadecimal strings: low and high half of the eight bytes that codes
            select, and, with 4 bits, those of the negative centroids' magnitudes.
        values: what code c stands for, c = 0, 1, ...; integers, centred.
        gain: centroid ~ gain · value.
        error: RMS of gain · value - centroid against the RMS of the centroids.
    """

    words: tuple[str, str, str, str]
    values: tuple[int, ...]
    gain: float
    error: float


@functools.cache
def byte_table(centroids: tuple[float, ...], head_dim: int) -> ByteTable:
    """The best table for ascending centroids that are symmetric about zero.

    Raises:
        ValueError: they are not symmetric.
    """
    c = np.array(centroids)
    if not np.allclose(c, -c[::-1], rtol=1e-4, atol=1e-7):
        raise ValueError(f"centroids {c.round(4).tolist()} are not symmetric about zero: the Triton kernels need that.")
    edges = [-1.0, *((c[1:] + c[:-1]) / 2), 1.0]
    weights = np.diff([float(sphere_cdf(x, head_dim)) for x in edges])[len(c) // 2 :]
    positive = c[len(c) // 2 :]
    limit = 127 if len(c) == 16 else 127 - BIAS
    tried = np.linspace(0.3, 1.0, SCALES_TRIED)[:, None] * limit / positive[-1]
    values = np.round(tried * positive)
    gains = (weights * values * positive).sum(1) / np.maximum((weights * values**2).sum(1), 1e-30)
    errors = (weights * (gains[:, None] * values - positive) ** 2).sum(1)
    best = int(errors.argmin())
    magnitudes = [int(v) for v in values[best]]
    signed = (*(-m for m in reversed(magnitudes)), *magnitudes)
    return ByteTable(
        words=_words(magnitudes) + _words(magnitudes[::-1]) if len(c) == 16 else _words([BIAS + v for v in signed]) * 2,
        values=signed,
        gain=float(gains[best]),
        error=float(np.sqrt(errors[best] / (weights * positive**2).sum())),
    )


def _words(octets: list[int]) -> tuple[str, str]:
    octets = octets + [0] * (8 - len(octets))
    return tuple("0x" + bytes(octets[i : i + 4])[::-1].hex() for i in (0, 4))


@dataclass(frozen=True)
class Prepared:
    """One layer's constants on its device.

    Attributes:
        rotation: R, [D, D] float32, contiguous.
        centroids, bounds: of (K, V): [2**bits] and [2**bits - 1] float32; a code is the number of bounds below.
        byte_tables: of (K, V).
        byte_values: of (K, V), `ByteTable.values` as [2**bits] float16.
        shifts: of (K, V), where each group of eight 3-bit codes starts in its 4-byte word, [D / 8] int32.
        mean: μ [num_kv_heads, D] float32, or None.
        frequency: RoPE's angles per position in 2**-64 turns, [R / 2] int64, or None.
        angles: cos and sin at positions 0..MAX_TILE-1, [2, MAX_TILE, R / 2] float32, or None.
        split_angles: the same as the sum of two float16 numbers, the second in units of 2**-11: [4, MAX_TILE, R / 2],
            cos, sin, and what is left of each.
    """

    rotation: torch.Tensor
    centroids: tuple[torch.Tensor, torch.Tensor]
    bounds: tuple[torch.Tensor, torch.Tensor]
    byte_tables: tuple[ByteTable, ByteTable]
    byte_values: tuple[torch.Tensor, torch.Tensor]
    shifts: torch.Tensor
    mean: torch.Tensor | None
    frequency: torch.Tensor | None
    angles: torch.Tensor | None
    split_angles: torch.Tensor | None


def prepare(params: KVParams) -> Prepared:
    """A layer's constants, made at the first call, which reads the codebooks on the host, and kept with `params`."""
    made = params.__dict__.get("_triton_constants")
    if made is None:
        made = params.__dict__["_triton_constants"] = _prepare(params)
    return made


def _prepare(params: KVParams) -> Prepared:
    device, dim = params.rotation.device, params.head_dim
    centroids = tuple(x.float().contiguous() for x in (params.key_centroids, params.value_centroids))
    tables = tuple(byte_table(tuple(x.tolist()), dim) for x in centroids)
    frequency = angles = split = None
    if params.key_mean is not None and params.rope is not None:
        rope = params.rope
        whole = rope.inv_freq.double().cpu().numpy() / (2 * np.pi) % 1.0
        # Doubles hold 53 bits of a turn, more than enough up to position 2**30.
        fixed = np.array([int(f * 2**53) << 11 for f in whole], dtype=np.uint64)
        frequency = torch.from_numpy(fixed.view(np.int64)).to(device)
        turned = torch.arange(MAX_TILE, dtype=torch.float64)[:, None] * rope.inv_freq.double().cpu()
        exact = torch.stack((turned.cos(), turned.sin()))
        rest = (exact - exact.half().double()) * 2048
        angles, split = exact.float().to(device), torch.cat((exact, rest)).half().to(device)
    return Prepared(
        rotation=params.rotation.float().contiguous(),
        centroids=centroids,
        bounds=tuple(((x[1:] + x[:-1]) / 2).contiguous() for x in centroids),
        byte_tables=tables,
        byte_values=tuple(torch.tensor(table.values, dtype=torch.float16, device=device) for table in tables),
        shifts=(torch.arange(dim // 8, dtype=torch.int32, device=device) * 24) % 32,
        mean=None if params.key_mean is None else params.key_mean.float().contiguous(),
        frequency=frequency,
        angles=angles,
        split_angles=split,
    )
