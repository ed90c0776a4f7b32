"""The two quantisers of the TurboQuant paper (arXiv 2504.19874), written to be read beside it.

`TurboQuantMSE` is Algorithm 1: rotate, round every coordinate to the Lloyd-Max codebook of its exact distribution.
It has the least squared error, D_mse, and shrinks inner products by the factor 1 - D_mse.
`TurboQuantProd` is Algorithm 2: Algorithm 1 with one bit less, and one sign per coordinate of a Gaussian sketch of
the residual (QJL). Its inner products are unbiased over the draw of the sketch; its squared error is several times
larger.

The paper assumes unit vectors and says that others are handled by their norms; so it is done here: a vector is
divided by its norm, which is kept in floating point. Vectors are rows, so the paper's y = Pi x reads x @ Pi.T.
Tensors are [..., dim] with any leading axes, also empty ones. Computation is in float32, or in float64 for float64
input. These classes are for study and for tests: codes take a byte per coordinate, nothing is packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from turboquant.codebook import MAX_BITS, MIN_BITS, lloyd_max
from turboquant.rotation import gaussian_matrix, haar_rotation, hadamard_rotation

ROTATIONS = {"haar": haar_rotation, "hadamard": hadamard_rotation}


@dataclass(frozen=True)
class MSECodes:
    """Output of Algorithm 1: uint8 codebook indices [..., dim] and the vectors' norms [...]."""

    indices: torch.Tensor
    norms: torch.Tensor


@dataclass(frozen=True)
class ProdCodes:
    """Output of Algorithm 2.

    Attributes:
        mse: codes of Algorithm 1 at one bit less; None at 1 bit, where all of the vector is residual.
        signs: int8 [..., dim], the signs (+1, -1) of the sketched residual.
        residual_norms: [...], length of the residual in the units of the input (the paper's gamma).
    """

    mse: MSECodes | None
    signs: torch.Tensor
    residual_norms: torch.Tensor


class TurboQuantMSE:
    """Algorithm 1: the quantiser with the least mean squared error.

    Args:
        dim: length of the vectors, 2 or more.
        bits: bits per coordinate, 1 to 8.
        seed: draws the rotation; a seed means the same one everywhere, a Haar rotation up to rounding.
        rotation: "haar" as in the paper, or "hadamard": cheaper and as good on vectors whose energy is spread, but
            a fixed error for a vector with one nonzero coordinate (D = .26 at 2 bits), which it maps to +-1/sqrt(dim).

    Raises:
        ValueError: an argument outside these, or a Hadamard rotation of a dimension that has none.
    """

    def __init__(self, dim: int, bits: int, *, seed: int = 0, rotation: str = "haar") -> None:
        if rotation not in ROTATIONS:
            raise ValueError(
                f"rotation={rotation!r}: allowed are {', '.join(map(repr, ROTATIONS))}; "
                "choose 'haar' to follow the paper, 'hadamard' for speed."
            )
        self.codebook = lloyd_max(dim, bits)
        self.rotation = ROTATIONS[rotation](dim, seed, dtype=torch.float64)

    def quantize(self, x: torch.Tensor) -> MSECodes:
        """Codes of x [..., dim], any floating-point dtype.

        Raises:
            TypeError: x is not a tensor.
            ValueError: x has the wrong last axis, is not floating point, or holds NaN or Inf.
        """
        x = _checked(x, self.codebook.dim)
        unit, norms = _split_norm(x)
        rotated = unit @ self.rotation.to(x).T
        indices = torch.bucketize(rotated, self.codebook.boundary_tensor(x.device, x.dtype))
        return MSECodes(indices.to(torch.uint8), norms)

    def dequantize(self, codes: MSECodes) -> torch.Tensor:
        """The vectors [..., dim] that the codes stand for, in the dtype of their norms.

        Raises:
            ValueError: the codes are of another dimension or of more bits.
        """
        self._check_codes(codes)
        centroids = self.codebook.centroid_tensor(codes.norms.device, codes.norms.dtype)
        rotated = centroids[codes.indices.long()]
        return codes.norms.unsqueeze(-1) * (rotated @ self.rotation.to(rotated))

    def _check_codes(self, codes: MSECodes) -> None:
        dim, levels = self.codebook.dim, len(self.codebook.centroids)
        _check_last_axis(codes.indices, dim, "codes.indices")
        if codes.indices.numel() and int(codes.indices.max()) >= levels:
            raise ValueError(
                f"codes hold the index {int(codes.indices.max())}: a {self.codebook.bits}-bit quantiser has the "
                f"indices 0 to {levels - 1}; dequantize with the quantiser that made the codes."
            )


class TurboQuantProd:
    """Algorithm 2: the quantiser with unbiased inner products.

    Args:
        dim: length of the vectors, 2 or more.
        bits: bits per coordinate, 1 to 8, the sign included: at 1 bit it is QJL alone.
        seed: draws the rotation and, independently of it, the sketch.
        rotation: as for `TurboQuantMSE`.

    Raises:
        ValueError: an argument outside these, or a Hadamard rotation of a dimension that has none.
    """

    def __init__(self, dim: int, bits: int, *, seed: int = 0, rotation: str = "haar") -> None:
        if bits not in range(MIN_BITS, MAX_BITS + 1):
            raise ValueError(
                f"bits={bits!r}: allowed are {MIN_BITS} to {MAX_BITS}, one of them for the sign; "
                "choose one more than the bits of the TurboQuantMSE inside."
            )
        # Built at 1 bit too, where it is not used, so that dim and rotation are checked in one place.
        inner = TurboQuantMSE(dim, max(bits - 1, 1), seed=seed, rotation=rotation)
        self.dim, self.bits = dim, bits
        self.mse = inner if bits > 1 else None
        self.sketch = torch.from_numpy(gaussian_matrix(dim, seed))

    def quantize(self, x: torch.Tensor) -> ProdCodes:
        """Codes of x [..., dim], any floating-point dtype.

        Raises:
            TypeError: x is not a tensor.
            ValueError: x has the wrong last axis, is not floating point, or holds NaN or Inf.
        """
        x = _checked(x, self.dim)
        mse = None if self.mse is None else self.mse.quantize(x)
        residual = x if mse is None else x - self.mse.dequantize(mse)
        direction, residual_norms = _split_norm(residual)
        sketched = direction @ self.sketch.to(x).T
        signs = torch.where(sketched < 0, -1, 1).to(torch.int8)
        return ProdCodes(mse, signs, residual_norms)

    def dequantize(self, codes: ProdCodes) -> torch.Tensor:
        """The vectors [..., dim] that the codes stand for, in the dtype of their norms.

        Raises:
            ValueError: the codes are of another dimension or of other bits.
        """
        self._check_codes(codes)
        signs = codes.signs.to(codes.residual_norms)
        residual = self._sign_weight(codes) * (signs @ self.sketch.to(signs))
        return residual if self.mse is None else self.mse.dequantize(codes.mse) + residual

    def inner_product(self, query: torch.Tensor, codes: ProdCodes) -> torch.Tensor:
        """Unbiased estimate [...] of <query, x>, for query [..., dim] broadcast against the quantised x.

        The query stays exact: it is sketched once, and what remains per vector is a product with its signs.

        Raises:
            TypeError: query is not a tensor.
            ValueError: a wrong query, as for `quantize`, or codes of another dimension or of other bits.
        """
        self._check_codes(codes)
        query = _checked(query, self.dim)
        sketched = query @ self.sketch.to(query).T
        residual = (self._sign_weight(codes) * codes.signs * sketched).sum(dim=-1)
        return residual if self.mse is None else (query * self.mse.dequantize(codes.mse)).sum(dim=-1) + residual

    def _sign_weight(self, codes: ProdCodes) -> torch.Tensor:
        """sqrt(pi/2) / d * gamma [..., 1]: what makes a sign of the sketch an unbiased share of the residual."""
        return math.sqrt(math.pi / 2) / self.dim * codes.residual_norms.unsqueeze(-1)

    def _check_codes(self, codes: ProdCodes) -> None:
        _check_last_axis(codes.signs, self.dim, "codes.signs")
        if (codes.mse is None) != (self.mse is None):
            found, needed = ("without", "with") if codes.mse is None else ("with", "without")
            raise ValueError(
                f"the codes come {found} an MSE part, a {self.bits}-bit quantiser needs them {needed} one; "
                "dequantize with the quantiser that made the codes."
            )


def _checked(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x [..., dim] in the dtype of the computation, or an error that says what to change."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"got a {type(x).__name__}: a torch tensor is needed; convert it, e.g. by torch.as_tensor(x).")
    if not x.is_floating_point():
        raise ValueError(f"dtype {x.dtype}: a real floating-point tensor is needed; convert it, e.g. by x.float().")
    _check_last_axis(x, dim, "the input")
    wrong = ~torch.isfinite(x)
    if wrong.any():
        where = wrong.nonzero()
        raise ValueError(
            f"{len(where)} of {x.numel()} values are NaN or Inf, the first at index {tuple(where[0].tolist())}: only "
            "finite values can be quantised; look for an overflow in what made them, or mask them out."
        )
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _check_last_axis(x: torch.Tensor, dim: int, name: str) -> None:
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(
            f"{name} has the shape {tuple(x.shape)}: a quantiser with dim={dim} takes [..., {dim}]; "
            "move the vectors' axis last, or make a quantiser of their length."
        )


def _split_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors [..., dim] and norms [...] of x [..., dim]; a zero vector gives zeros."""
    # Squares of very large or very small numbers leave the range of float32, so the largest is divided out first.
    largest = x.abs().amax(dim=-1, keepdim=True)
    scaled = x / torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    unit = scaled / torch.where(length > 0, length, 1.0)
    return unit, (largest * length).squeeze(-1)
