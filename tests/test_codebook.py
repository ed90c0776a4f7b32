"""The codebooks against published values, closed forms and numeric integration."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from turboquant.codebook import lloyd_max, mse_lower_bound, prod_lower_bound, sphere_cdf, sphere_density

DISTORTION = {
    64: (0.35839, 0.11453, 0.03339, 0.00913, 0.00240),
    96: (0.36006, 0.11551, 0.03377, 0.00925, 0.00243),
    128: (0.36089, 0.11600, 0.03397, 0.00932, 0.00245),
    256: (0.36214, 0.11674, 0.03426, 0.00941, 0.00248),
    # The limit for large d, from which d = 1536 is less than 0.2 % away.
    1536: (0.36338, 0.11748, 0.03455, 0.00950, 0.00250),
}
# Positive half, times sqrt(d).
CENTROIDS = {
    (64, 2): (0.4521, 1.5000),
    (64, 3): (0.2438, 0.7507, 1.3293, 2.1113),
    (64, 4): (0.1274, 0.3847, 0.6505, 0.9319, 1.2394, 1.5908, 2.0233, 2.6464),
    (96, 2): (0.4523, 1.5035),
    (96, 3): (0.2442, 0.7524, 1.3342, 2.1247),
    (96, 4): (0.1277, 0.3858, 0.6526, 0.9354, 1.2450, 1.5998, 2.0383, 2.6746),
    (128, 2): (0.4525, 1.5052),
    (128, 3): (0.2444, 0.7533, 1.3366, 2.1315),
    (128, 4): (0.1279, 0.3864, 0.6536, 0.9371, 1.2478, 1.6043, 2.0459, 2.6889),
    (256, 2): (0.4526, 1.5078),
    (256, 3): (0.2448, 0.7547, 1.3402, 2.1417),
    (256, 4): (0.1281, 0.3872, 0.6552, 0.9397, 1.2520, 1.6112, 2.0574, 2.7106),
}
INTEGRATED = [(3, 4), (5, 2), (37, 3), (64, 4), (80, 1), (128, 2), (128, 8), (255, 5), (1536, 4)]


def density(x: float, dim: int) -> float:
    """The density from log-gamma functions, independent of the module under test."""
    log_norm = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - math.log(math.pi) / 2
    return math.exp(log_norm + (dim - 3) / 2 * math.log1p(-x * x)) if abs(x) < 1 else 0.0


def integral(function, low: float, high: float) -> float:
    return integrate.quad(function, low, high, epsabs=1e-14, epsrel=1e-11, limit=200)[0]


def cells(dim: int, bits: int) -> list[tuple[float, float, float]]:
    """Centroid, lower and upper edge of every cell; the tails end where the density vanishes in float64."""
    book = lloyd_max(dim, bits)
    reach = min(1.0, 12 / math.sqrt(dim))
    edges = (-reach, *book.boundaries, reach)
    return list(zip(book.centroids, edges[:-1], edges[1:], strict=True))


@pytest.mark.parametrize("dim", DISTORTION, ids="d{}".format)
@pytest.mark.parametrize("bits", range(1, 6), ids="b{}".format)
def test_distortion_is_the_published_one(dim, bits):
    # At 5 bits the table has three digits, so rounding alone is worth 0.2 %.
    assert lloyd_max(dim, bits).distortion == pytest.approx(DISTORTION[dim][bits - 1], rel=0.005)


@pytest.mark.parametrize(("dim", "bits"), CENTROIDS)
def test_centroids_are_the_published_ones(dim, bits):
    half = np.array(lloyd_max(dim, bits).centroids[2 ** (bits - 1) :]) * math.sqrt(dim)
    np.testing.assert_allclose(half, CENTROIDS[dim, bits], atol=6e-5)


@pytest.mark.parametrize(("dim", "bits"), INTEGRATED)
def test_lloyd_conditions_by_numeric_integration(dim, bits):
    book = lloyd_max(dim, bits)
    for centroid, low, high in cells(dim, bits):
        mass = integral(lambda x: density(x, dim), low, high)
        mean = integral(lambda x: x * density(x, dim), low, high) / mass
        assert centroid == pytest.approx(mean, abs=1e-8 / math.sqrt(dim))
    midpoints = (np.array(book.centroids[:-1]) + book.centroids[1:]) / 2
    np.testing.assert_allclose(book.boundaries, midpoints, atol=1e-15)


@pytest.mark.parametrize(("dim", "bits"), INTEGRATED)
def test_distortion_by_numeric_integration(dim, bits):
    error = sum(integral(lambda x, c=c: (x - c) ** 2 * density(x, dim), low, high) for c, low, high in cells(dim, bits))
    assert lloyd_max(dim, bits).distortion == pytest.approx(dim * error, rel=1e-7)


@pytest.mark.parametrize("bits", range(1, 9), ids="b{}".format)
def test_uniform_density_has_equal_cells(bits):
    # In three dimensions a coordinate is uniform on [-1, 1] (Archimedes), so the answer is known exactly.
    book = lloyd_max(3, bits)
    np.testing.assert_allclose(book.centroids, (2 * np.arange(2**bits) + 1) / 2**bits - 1, atol=1e-12)
    assert book.distortion == pytest.approx(4.0**-bits, rel=1e-9)


@pytest.mark.parametrize("dim", [2, 5, 64, 1536, 100_000], ids="d{}".format)
def test_one_bit_in_closed_form(dim):
    mean_modulus = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
    book = lloyd_max(dim, 1)
    assert book.centroids == pytest.approx((-mean_modulus, mean_modulus), rel=1e-9)
    assert book.distortion == pytest.approx(1 - dim * mean_modulus**2, rel=1e-8)


@pytest.mark.parametrize("dim", [2, 3, 4, 64, 255, 1536], ids="d{}".format)
def test_density_and_cdf(dim):
    points = np.linspace(-0.95, 0.95, 13) / math.sqrt(dim)
    np.testing.assert_allclose(sphere_density(points, dim), [density(x, dim) for x in points], rtol=1e-10)
    steps = np.diff(sphere_cdf(points, dim))
    pairs = itertools.pairwise(points)
    np.testing.assert_allclose(steps, [integral(lambda x: density(x, dim), a, b) for a, b in pairs], rtol=1e-9)
    np.testing.assert_allclose(sphere_cdf([-1.0, 0.0, 1.0], dim), [0.0, 0.5, 1.0], atol=1e-15)


@settings(max_examples=150, deadline=None)
@given(dim=st.integers(2, 5000), bits=st.integers(1, 8))
def test_any_codebook_is_symmetric_ordered_and_within_the_bounds(dim, bits):
    book = lloyd_max(dim, bits)
    assert len(book.centroids) == 2**bits
    assert len(book.boundaries) == 2**bits - 1
    assert book.centroids == tuple(-c for c in reversed(book.centroids))
    interleaved = [-1.0, *(v for pair in zip(book.centroids, (*book.boundaries, 1.0), strict=True) for v in pair)]
    assert all(a < b for a, b in itertools.pairwise(interleaved))
    assert book.distortion <= math.sqrt(3) * math.pi / 2 * mse_lower_bound(bits)
    if dim > 3:
        assert book.distortion > mse_lower_bound(bits)
    if bits > 1:
        assert book.distortion < lloyd_max(dim, bits - 1).distortion


def test_codebooks_are_deterministic_and_cached():
    again = lloyd_max.__wrapped__(96, 4)
    assert again == lloyd_max(96, 4)
    assert lloyd_max(96, 4) is lloyd_max(96, 4)


def test_codebooks_come_fast():
    start = time.perf_counter()
    for dim in (64, 80, 96, 112, 120, 128, 160, 192, 256, 1536):
        for bits in range(1, 5):
            lloyd_max.__wrapped__(dim, bits)
    # 40 codebooks at the allowed 50 ms each; they take about 20 ms together.
    assert time.perf_counter() - start < 2


def test_tensors_hold_the_values_in_the_dtype_asked_for():
    book = lloyd_max(128, 3)
    assert book.centroid_tensor(dtype=torch.float64).tolist() == list(book.centroids)
    assert book.boundary_tensor(dtype=torch.float64).tolist() == list(book.boundaries)
    assert book.centroid_tensor("cpu").dtype == torch.float32
    torch.testing.assert_close(book.centroid_tensor(), torch.tensor(book.centroids))
    nearest = torch.bucketize(book.centroid_tensor(), book.boundary_tensor())
    assert nearest.tolist() == list(range(8))


def test_lower_bounds():
    assert [mse_lower_bound(b) for b in (1, 2, 3)] == [0.25, 0.0625, 0.015625]
    assert prod_lower_bound(2, 128) == 0.0625 / 128
    # Why the docstring keeps the bound to large dimensions: here the codebook itself is below it.
    assert lloyd_max(2, 1).distortion == pytest.approx(1 - 8 / math.pi**2)


@pytest.mark.parametrize(
    ("dim", "bits", "message"),
    [
        (1, 4, "dim=1: .* 2 or more"),
        (-64, 4, "dim=-64"),
        (64.5, 4, r"dim=64\.5"),
        (64, 0, "bits=0: .* 1 to 8"),
        (64, 9, "bits=9: .* 1 to 8"),
        (64, 2.5, r"bits=2\.5"),
    ],
)
def test_bad_arguments_are_named(dim, bits, message):
    with pytest.raises(ValueError, match=message):
        lloyd_max(dim, bits)
