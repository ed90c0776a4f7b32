"""The paper's distortions, measured and predicted side by side (arXiv 2504.19874, Theorems 1 to 3).

For uniform random unit vectors x and unit queries y, with x^ the dequantised x:

    "mse"   D_mse      = E |x - x^|^2              of `TurboQuantMSE`,
    "prod"  d * D_prod = d * E (<y, x> - <y, x^>)^2  of `TurboQuantProd`,

the second times d, because D_prod falls as 1/d: in this unit one number holds for all dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

import torch

from turboquant.codebook import lloyd_max, mse_lower_bound, prod_lower_bound
from turboquant.quantizer import TurboQuantMSE, TurboQuantProd

VARIANTS = ("mse", "prod")
DEFAULT_DIMS = (64, 128, 256, 1536)
DEFAULT_BITS = (1, 2, 3, 4)

_CHUNK_ELEMENTS = 1 << 20
_NUM_QUERIES = 1024


class Measurement(TypedDict):
    """One row: the distortion of a variant at bits per coordinate, "prod" multiplied by head_dim."""

    head_dim: int
    bits: int
    variant: str
    measured: float
    theory: float
    lower_bound: float


def measure(
    dims: Sequence[int] = DEFAULT_DIMS,
    bits: Sequence[int] = DEFAULT_BITS,
    num_vectors: int = 2048,
    seed: int = 0,
    progress: Callable[[Measurement], None] | None = None,
) -> list[Measurement]:
    """Quantise random unit vectors by both algorithms and set their distortion against the theory.

    Args:
        dims: lengths of the vectors.
        bits: bits per coordinate, 1 to 8.
        num_vectors: vectors per row of the result; they pass in chunks, so memory does not grow with their number.
        seed: draws rotations, sketches and data.
        progress: called with every row as soon as it is measured.

    Returns:
        One row per dim, bits and variant, in this order of nesting. All three figures of a "prod" row are multiplied
        by head_dim: the measured and predicted d * D_prod, and the bound 4^-bits.

    Raises:
        ValueError: num_vectors is below 1, or dims, bits or seed are not allowed by the quantisers.
    """
    if num_vectors < 1:
        raise ValueError(f"num_vectors={num_vectors}: at least one is needed; 2048 leaves 1 or 2 % of noise.")
    rows = []
    for dim, width, variant in ((d, b, v) for d in dims for b in bits for v in VARIANTS):
        rows.append(_measure_one(dim, width, variant, num_vectors, seed))
        if progress is not None:
            progress(rows[-1])
    return rows


def mse_theory(dim: int, bits: int) -> float:
    """D_mse of Algorithm 1: that of its codebook; 1 at 0 bits, where the vector is dropped."""
    return lloyd_max(dim, bits).distortion if bits > 0 else 1.0


def prod_theory(dim: int, bits: int) -> float:
    """d * D_prod of Algorithm 2: pi/2 times D_mse at one bit less (Theorem 2).

    The variance of QJL is at most pi/2 |r|^2 / d for a residual r. On average over the queries it is smaller by the
    factor 1 - 2 / (pi d), 1 % at d = 64, which the paper and this function leave out.
    """
    return math.pi / 2 * mse_theory(dim, bits - 1)


def random_unit_vectors(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Vectors [count, dim], float32, uniform on the unit sphere."""
    return torch.nn.functional.normalize(torch.randn(count, dim, generator=generator), dim=-1)


def _measure_one(dim: int, bits: int, variant: str, num_vectors: int, seed: int) -> Measurement:
    generator = torch.Generator().manual_seed(seed)
    if variant == "mse":
        measured = _mse_distortion(TurboQuantMSE(dim, bits, seed=seed), dim, num_vectors, generator)
        theory, lower_bound = mse_theory(dim, bits), mse_lower_bound(bits)
    else:
        measured = dim * _prod_distortion(TurboQuantProd(dim, bits, seed=seed), dim, num_vectors, generator)
        theory, lower_bound = prod_theory(dim, bits), dim * prod_lower_bound(bits, dim)
    return Measurement(
        head_dim=dim, bits=bits, variant=variant, measured=measured, theory=theory, lower_bound=lower_bound
    )


def _chunks(dim: int, num_vectors: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    size = max(_CHUNK_ELEMENTS // dim, 1)
    for start in range(0, num_vectors, size):
        yield random_unit_vectors(min(size, num_vectors - start), dim, generator)


def _mse_distortion(quantizer: TurboQuantMSE, dim: int, num_vectors: int, generator: torch.Generator) -> float:
    total = 0.0
    for x in _chunks(dim, num_vectors, generator):
        total += (quantizer.dequantize(quantizer.quantize(x)) - x).square().sum().item()
    return total / num_vectors


def _prod_distortion(quantizer: TurboQuantProd, dim: int, num_vectors: int, generator: torch.Generator) -> float:
    """Mean squared error of all inner products between the vectors and one set of random unit queries."""
    queries = random_unit_vectors(_NUM_QUERIES, dim, generator)
    total = 0.0
    for x in _chunks(dim, num_vectors, generator):
        error = quantizer.dequantize(quantizer.quantize(x)) - x
        total += (error @ queries.T).square().sum().item()
    return total / (num_vectors * _NUM_QUERIES)
