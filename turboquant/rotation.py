"""Random rotations of the last axis: exact Haar, and a Hadamard matrix behind random signs.

A rotation is a matrix R [dim, dim] with orthonormal rows. For row vectors x [..., dim]:

    rotated = x @ R.T,    back = rotated @ R.

`haar_rotation` is the paper's choice (arXiv 2504.19874, Algorithm 1): uniform over all rotations, dim^2 products.
`hadamard_rotation` is H diag(signs) / sqrt(dim) with every entry +-1/sqrt(dim): a vector with a single nonzero
coordinate comes out perfectly flat, and for a power of two a butterfly applies it in dim log2(dim) additions.

All randomness comes from the raw output of the Philox counter generator, whose bits are fixed by its definition:
a seed means the same signs on every device, platform and library version, so they need not be stored with the data.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

MIN_HADAMARD_ORDER = 4

# The second word of the Philox key, so that the draws made from one seed are independent of each other.
_STREAM_SIGNS, _STREAM_HAAR, _STREAM_SKETCH = 0, 1, 2

Floats = NDArray[np.float64]


def random_signs(dim: int, seed: int) -> torch.Tensor:
    """Random signs [dim], float32, each +1 or -1; a shorter draw is the beginning of a longer one.

    Sign i is bit i % 64, counted from the lowest, of word i // 64 of Philox 4x64-10 with the key (seed, 0); a set
    bit is -1.

    Raises:
        ValueError: dim is below 1, or seed is negative or does not fit 64 bits.
    """
    if dim < 1:
        raise ValueError(f"dim={dim}: there must be at least one sign; pass the length of the last axis.")
    words = _random_words(-(-dim // 64), seed, _STREAM_SIGNS)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[:dim]
    return torch.from_numpy(1.0 - 2.0 * bits).to(torch.float32)


def gaussian_matrix(dim: int, seed: int) -> Floats:
    """Independent standard normal entries [dim, dim], float64: the S of the paper's Algorithm 2.

    Independent of the rotations and signs of the same seed. Equal on all platforms up to rounding.
    """
    return _gaussians(dim, seed, _STREAM_SKETCH)


def haar_rotation(dim: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rotation [dim, dim] drawn uniformly from the orthogonal group; computed in float64, returned in dtype.

    Raises:
        ValueError: dim is below 1, or seed is negative or does not fit 64 bits.
    """
    if dim < 1:
        raise ValueError(f"dim={dim}: a rotation needs at least one dimension; pass the length of the last axis.")
    return _haar(dim, seed).to(dtype, copy=True)


def hadamard_rotation(dim: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The rotation H diag(signs) / sqrt(dim) [dim, dim], with the H and the signs of this module, in dtype.

    Raises:
        ValueError: `hadamard_matrix` has no matrix of order dim, or `random_signs` refuses the seed.
    """
    signs = random_signs(dim, seed).to(torch.float64).numpy()
    return torch.from_numpy(hadamard_matrix(dim) * signs / math.sqrt(dim)).to(dtype)


def fast_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Hadamard transform of the last axis of x [..., dim], dim a power of two.

    The same as x @ H.T / sqrt(dim) with H = hadamard_matrix(dim), which for these orders is symmetric: applied
    twice it gives x back. Computed and returned in float32, or in float64 where x is float64.

    Raises:
        ValueError: the last axis is not a power of two.
    """
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(
            f"last axis {dim}: the butterfly needs a power of two; multiply by hadamard_rotation(dim, seed) instead."
        )
    y = x if x.dtype == torch.float64 else x.to(torch.float32)
    for half in (2**level for level in range(dim.bit_length() - 1)):
        low, high = y.unflatten(-1, (dim // (2 * half), 2, half)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return y / math.sqrt(dim)


@functools.cache
def hadamard_matrix(order: int) -> Floats:
    """A Hadamard matrix H [order, order]: float64 entries +-1, rows orthogonal, read-only.

    The order is 2^k * m, with the largest k for which the core m is 1 or comes from one of Paley's constructions:
    q + 1 for a prime q = 3 (mod 4), or 2 (q + 1) for a prime q = 1 (mod 4). H is the Kronecker product of the
    core and Sylvester's matrix of order 2^k, so each run of 2^k coordinates can go through a butterfly.

    Raises:
        ValueError: the order is not a multiple of 4, or none of these constructions reaches it.
    """
    core_order = _core_order(order)
    if core_order is None:
        raise ValueError(_unreachable(order))
    matrix = np.kron(_core(core_order), _sylvester(order // core_order)).astype(np.float64)
    matrix.setflags(write=False)
    return matrix


def _random_words(count: int, seed: int, stream: int) -> NDArray[np.uint64]:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed}: a seed is an integer from 0 to 2^64 - 1; choose one in that range.")
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(count)


def _gaussians(dim: int, seed: int, stream: int) -> Floats:
    # Through the inverse distribution function, as the normal sampler of numpy may change between versions.
    uniform = ((_random_words(dim * dim, seed, stream) >> np.uint64(11)) + 0.5) * 2.0**-53
    return special.ndtri(uniform).reshape(dim, dim)


@functools.lru_cache(maxsize=8)
def _haar(dim: int, seed: int) -> torch.Tensor:
    q, r = torch.linalg.qr(torch.from_numpy(_gaussians(dim, seed, _STREAM_HAAR)))
    # A QR routine chooses the signs of R by a convention of its own, which biases Q. With R's diagonal made positive
    # the factorisation is unique, and Q is uniform.
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q)


def _core_order(order: int) -> int | None:
    """The smallest m with order = 2^k * m and a known core of order m, or None."""
    if order < MIN_HADAMARD_ORDER or order % 4:
        return None
    odd_part = order // (order & -order)
    candidates = (odd_part << k for k in range((order // odd_part).bit_length()))
    return next((m for m in candidates if m == 1 or _is_paley_one(m) or _is_paley_two(m)), None)


def _is_paley_one(order: int) -> bool:
    return order % 4 == 0 and _is_prime(order - 1)


def _is_paley_two(order: int) -> bool:
    return order % 4 == 0 and (order // 2 - 1) % 4 == 1 and _is_prime(order // 2 - 1)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


def _sylvester(order: int) -> NDArray[np.int8]:
    matrix = np.ones((1, 1), dtype=np.int8)
    while len(matrix) < order:
        matrix = np.kron(np.array([[1, 1], [1, -1]], dtype=np.int8), matrix)
    return matrix


def _core(order: int) -> NDArray[np.int8]:
    """The core matrix [order, order] of +-1: trivial, Paley's first or Paley's second construction."""
    if order == 1:
        return np.ones((1, 1), dtype=np.int8)
    if _is_paley_one(order):
        return _bordered_residues(order - 1, corner_sign=-1) + np.eye(order, dtype=np.int8)
    conference = _bordered_residues(order // 2 - 1, corner_sign=1)
    on_entries = np.array([[1, 1], [1, -1]], dtype=np.int8)
    on_diagonal = np.array([[1, -1], [-1, -1]], dtype=np.int8)
    return np.kron(conference, on_entries) + np.kron(np.eye(order // 2, dtype=np.int8), on_diagonal)


def _bordered_residues(prime: int, corner_sign: int) -> NDArray[np.int8]:
    """Quadratic characters of i - j modulo a prime, with a border of ones [prime + 1, prime + 1]; diagonal zero."""
    character = np.full(prime, -1, dtype=np.int8)
    character[np.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    index = np.arange(prime)
    matrix = np.zeros((prime + 1, prime + 1), dtype=np.int8)
    matrix[0, 1:] = 1
    matrix[1:, 0] = corner_sign
    matrix[1:, 1:] = character[(index[:, None] - index) % prime]
    return matrix


def _unreachable(order: int) -> str:
    nearby = [n for n in range(max(order - 64, MIN_HADAMARD_ORDER), order + 65) if _core_order(n)]
    below = [n for n in nearby if n < order][-1:]
    above = [n for n in nearby if n > order][:1] or [MIN_HADAMARD_ORDER]
    return (
        f"order={order}: no Hadamard matrix is built for it; allowed are multiples of {MIN_HADAMARD_ORDER} that "
        f"doubling and Paley's constructions reach, the nearest being {' and '.join(map(str, below + above))}; "
        "use rotation='haar' for this dimension, or one of these orders."
    )
