"""Scalar codebooks for the coordinates of a randomly rotated unit vector.

A uniformly random point of the sphere S^{d-1} has coordinates with the density

    f(x) = (1 - x^2)^((d-3)/2) / B(1/2, (d-1)/2),    -1 <= x <= 1,

B being the Beta function (arXiv 2504.19874, Lemma 1). The best `bits`-bit scalar quantiser of f is its continuous
one-dimensional k-means: every centroid is the mean of its cell, every border the midpoint of two centroids.
`lloyd_max` solves these two conditions in float64. Everything is in unit-sphere scale: standard deviation 1/sqrt(d).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import special

MIN_DIM = 2
MIN_BITS, MAX_BITS = 1, 8

# Residual of the centroid condition, in standard deviations; rounding alone leaves up to 1e-13.
_TOLERANCE = 1e-11
_MAX_ITERATIONS = 30

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Codebook:
    """The Lloyd-Max quantiser of one coordinate, in unit-sphere scale.

    Attributes:
        dim: length d of the rotated vectors.
        bits: bits for one coordinate.
        centroids: [2^bits], ascending and symmetric about 0.
        boundaries: [2^bits - 1], the borders between neighbouring cells; the outer cells end at -1 and 1.
        distortion: D_mse, the expected squared error of a whole unit vector: d times the error of one coordinate.
    """

    dim: int
    bits: int
    centroids: tuple[float, ...]
    boundaries: tuple[float, ...]
    distortion: float

    def centroid_tensor(
        self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The centroids as a tensor [2^bits]."""
        return torch.tensor(self.centroids, device=device, dtype=dtype)

    def boundary_tensor(
        self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The borders as a tensor [2^bits - 1], ready for `torch.bucketize`."""
        return torch.tensor(self.boundaries, device=device, dtype=dtype)


def sphere_density(x: ArrayLike, dim: int) -> Floats:
    """Density f at x [...] of one coordinate of a uniform unit vector of length dim; x inside (-1, 1)."""
    log_power = (dim - 3) / 2 * np.log1p(-np.square(x))
    return np.exp(log_power) / special.beta(0.5, (dim - 1) / 2)


def sphere_cdf(x: ArrayLike, dim: int) -> Floats:
    """Probability [...] that one coordinate of a uniform unit vector of length dim is at most x [...]."""
    x = np.asarray(x, dtype=np.float64)
    tail = _tail_mass(np.abs(x), dim)
    return np.where(x < 0, tail, 1.0 - tail)


@functools.cache
def lloyd_max(dim: int, bits: int) -> Codebook:
    """The optimal scalar quantiser for the coordinates of a random unit vector (paper, section 3.1).

    Deterministic. For dim >= 3 the density is log-concave, so the solution is the only one and the global optimum;
    at dim 2 it is the symmetric solution.

    Args:
        dim: length of the vectors, 2 or more.
        bits: bits for one coordinate, 1 to 8.

    Raises:
        ValueError: dim or bits outside these ranges.
        RuntimeError: the iteration did not reach the tolerance.
    """
    _check(dim, bits)
    half = _positive_centroids(dim, 2 ** (bits - 1))
    edges = _half_edges(half)
    mass, moment = _cell_moments(edges, dim)
    # E x^2 = 1/d, and each half-line cell stands for itself and for its mirror image.
    coordinate_error = 1.0 / dim + 2.0 * np.sum(half * (half * mass - 2.0 * moment))
    return Codebook(
        dim=int(dim),
        bits=int(bits),
        centroids=tuple(np.concatenate((-half[::-1], half)).tolist()),
        boundaries=tuple(np.concatenate((-edges[-2:0:-1], edges[:-1])).tolist()),
        distortion=float(dim * coordinate_error),
    )


def mse_lower_bound(bits: int) -> float:
    """4^-bits: the least D_mse that the paper proves for any quantiser, however complex (Theorem 3).

    It is a statement about large dimensions. A unit vector carries its length for free, so very short ones can
    be quantised better: at dim 2 and 1 bit, D_mse is 0.189 against 0.25.
    """
    return 4.0**-bits


def prod_lower_bound(bits: int, dim: int) -> float:
    """4^-bits / dim: the least mean squared error of an inner product with a unit query (Theorem 3)."""
    return 4.0**-bits / dim


def _check(dim: int, bits: int) -> None:
    if not isinstance(dim, (int, np.integer)) or dim < MIN_DIM:
        raise ValueError(
            f"dim={dim!r}: a codebook needs vectors of length {MIN_DIM} or more, as an integer; "
            "pass the length of the last axis, such as the model's head_dim."
        )
    if not isinstance(bits, (int, np.integer)) or not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(
            f"bits={bits!r}: a codebook takes an integer number of bits from {MIN_BITS} to {MAX_BITS}; "
            "choose 2, 3 or 4 for a KV cache."
        )


def _tail_mass(x: Floats, dim: int) -> Floats:
    """P(X > x) for x >= 0 [...], accurate relative to itself however far out x lies."""
    # x^2 has a Beta(1/2, (d-1)/2) distribution. Through 1 - x^2 the rounding error would grow with d.
    return 0.5 * special.betaincc(0.5, (dim - 1) / 2, x * x)


def _tail_moment(x: Floats, dim: int) -> Floats:
    """Integral of t f(t) from x to 1, for x >= 0 [...]: closed form, since t (1 - t^2)^p integrates to a power."""
    with np.errstate(divide="ignore"):
        power = np.exp((dim - 1) / 2 * np.log1p(-x * x))
    return power / ((dim - 1) * special.beta(0.5, (dim - 1) / 2))


def _half_edges(half: Floats) -> Floats:
    """Borders [n + 1] of the cells of the positive centroids [n], from 0 to 1."""
    return np.concatenate(([0.0], (half[:-1] + half[1:]) / 2, [1.0]))


def _cell_moments(edges: Floats, dim: int) -> tuple[Floats, Floats]:
    """Probability [n] and first moment [n] of the cells between edges [n + 1]."""
    return -np.diff(_tail_mass(edges, dim)), -np.diff(_tail_moment(edges, dim))


def _companding_start(dim: int, count: int) -> Floats:
    """First guess [count]: quantiles of the density f^(1/3), which is optimal in the limit of many levels.

    f^(1/3) is again a coordinate density, that of a sphere of dimension d' = d/3 + 2.
    """
    upper_tail = 1.0 - (np.arange(count) + 0.5) / count
    return np.sqrt(1.0 - special.betaincinv((dim / 3 + 1) / 2, 0.5, upper_tail))


def _positive_centroids(dim: int, count: int) -> Floats:
    """Solve c = (means of the cells of c) for the positive half [count] by Newton's method.

    Lloyd's iteration, c <- means, has the same fixed point but needs thousands of rounds at 8 bits. From the
    companding start Newton takes about five, in order from the first to the last.
    """
    centroids = _companding_start(dim, count)
    for _ in range(_MAX_ITERATIONS):
        means, jacobian = _cell_means(centroids, dim)
        residual = centroids - means
        if np.max(np.abs(residual)) * np.sqrt(dim) <= _TOLERANCE and np.all(np.diff(means) > 0):
            return means
        centroids = centroids - np.linalg.solve(np.eye(count) - jacobian, residual)
    raise RuntimeError(
        f"the codebook for dim={dim} with {2 * count} levels did not converge in {_MAX_ITERATIONS} iterations; "
        "this is a defect of the solver: please report these two numbers."
    )


def _cell_means(centroids: Floats, dim: int) -> tuple[Floats, Floats]:
    """Cell means [n] of the centroids [n] and their (tridiagonal) derivative [n, n] with respect to the centroids."""
    edges = _half_edges(centroids)
    mass, moment = _cell_moments(edges, dim)
    means = moment / mass
    inner = edges[1:-1]
    # The chain rule through a midpoint gives the factor 1/2, the same for both of its centroids.
    weight = 0.5 * sphere_density(inner, dim)
    from_above = weight * (inner - means[:-1]) / mass[:-1]
    from_below = weight * (means[1:] - inner) / mass[1:]
    diagonal = np.append(from_above, 0.0) + np.insert(from_below, 0, 0.0)
    return means, np.diag(diagonal) + np.diag(from_above, 1) + np.diag(from_below, -1)
