"""Rotations: fixed signs, true Hadamard matrices, orthonormality, and the distribution of the Haar ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from turboquant.rotation import (
    fast_hadamard,
    gaussian_matrix,
    haar_rotation,
    hadamard_matrix,
    hadamard_rotation,
    random_signs,
)

HEAD_DIMS = (64, 80, 96, 112, 120, 128, 160, 192, 256)
# Multiples of 4 up to 256 that doubling and Paley's constructions over prime fields do not reach.
UNREACHABLE = {52, 92, 100, 116, 156, 172, 184, 188, 232, 236, 244}
REACHABLE = [n for n in range(4, 257, 4) if n not in UNREACHABLE]
ROTATIONS = {"haar": haar_rotation, "hadamard": hadamard_rotation}


def test_signs_never_change():
    # Stored caches and calibration artefacts depend on these values.
    golden = "--+--++-+++--+--++-++---+++-++++++-++--+"
    assert "".join("+" if s > 0 else "-" for s in random_signs(40, 0).tolist()) == golden


def philox_words(count: int, seed: int, stream: int) -> list[int]:
    """Philox 4x64 with 10 rounds, as its authors define it, for counters 1, 2, ...; four words a counter."""
    mask, words = 2**64 - 1, []
    for block in range(1, -(-count // 4) + 1):
        c0, c1, c2, c3 = block, 0, 0, 0
        k0, k1 = seed, stream
        for _ in range(10):
            left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & mask, (left >> 64) ^ c3 ^ k1, left & mask
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        words += [c0, c1, c2, c3]
    return words[:count]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_signs_are_the_low_to_high_bits_of_philox(seed):
    bits = [word >> position & 1 for word in philox_words(9, seed, stream=0) for position in range(64)]
    assert random_signs(555, seed).tolist() == [1.0 - 2.0 * bit for bit in bits[:555]]


def test_signs_are_fair_distinct_and_prefix_stable():
    signs = random_signs(65_536, 7)
    assert signs.dtype == torch.float32
    assert signs.abs().eq(1).all()
    # Five standard deviations of a fair coin, for the mean and for the correlation of neighbours.
    assert abs(signs.mean().item()) < 5 / 256
    assert abs((signs[1:] * signs[:-1]).mean().item()) < 5 / 256
    assert torch.equal(random_signs(77, 7), signs[:77])
    assert len({tuple(random_signs(64, seed).tolist()) for seed in range(200)}) == 200


def test_draws_leave_the_global_generators_alone():
    torch.manual_seed(1)
    before, state = haar_rotation(24, 3), torch.get_rng_state()
    np.random.seed(5)
    torch.testing.assert_close(haar_rotation(24, 3), before, rtol=0, atol=0)
    random_signs(64, 3)
    gaussian_matrix(8, 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("order", REACHABLE, ids="n{}".format)
def test_hadamard_matrices_are_hadamard(order):
    matrix = hadamard_matrix(order)
    assert matrix.dtype == np.float64
    assert np.array_equal(np.abs(matrix), np.ones((order, order)))
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))


def test_all_head_dims_are_reachable():
    assert set(HEAD_DIMS) <= set(REACHABLE)


@pytest.mark.parametrize(("order", "run"), [(80, 4), (96, 8), (112, 4), (120, 2), (160, 8), (192, 16), (256, 256)])
def test_hadamard_matrix_is_a_core_times_the_longest_butterfly(order, run):
    matrix, butterfly = hadamard_matrix(order), hadamard_matrix(256)[:run, :run]
    core = matrix[::run, ::run]
    assert np.array_equal(matrix, np.kron(core, butterfly))


@pytest.mark.parametrize("order", [-4, 0, 1, 2, 3, 63, 66, *sorted(UNREACHABLE)], ids="n{}".format)
def test_unreachable_orders_say_what_to_do(order):
    with pytest.raises(ValueError, match=rf"order={order}: .*multiples of 4.*rotation='haar'"):
        hadamard_matrix(order)


def test_the_error_names_the_nearest_orders():
    with pytest.raises(ValueError, match="nearest being 88 and 96"):
        hadamard_rotation(92, seed=0)


def test_cached_results_cannot_be_spoilt():
    with pytest.raises(ValueError, match="read-only"):
        hadamard_matrix(12)[0, 0] = 5
    for build in ROTATIONS.values():
        first = build(12, 0, dtype=torch.float64)
        expected = first.clone()
        first.zero_()
        assert torch.equal(build(12, 0, dtype=torch.float64), expected)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dim", [*HEAD_DIMS, 12, 576], ids="d{}".format)
def test_rotations_are_orthonormal(rotation, dim):
    exact = ROTATIONS[rotation](dim, 5, dtype=torch.float64)
    identity = torch.eye(dim, dtype=torch.float64)
    torch.testing.assert_close(exact @ exact.T, identity, rtol=0, atol=1e-13)
    single = ROTATIONS[rotation](dim, 5)
    assert single.dtype == torch.float32
    assert torch.equal(single, exact.float())
    x = torch.randn(7, dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((x @ single.T) @ single, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", HEAD_DIMS, ids="d{}".format)
def test_hadamard_rotation_flattens_a_one_hot_vector(dim):
    rotated = torch.eye(dim) @ hadamard_rotation(dim, 3).T
    assert torch.equal(rotated.abs(), torch.full((dim, dim), np.float32(1 / math.sqrt(dim)).item()))


@pytest.mark.parametrize("dim", [64, 96], ids="d{}".format)
def test_hadamard_rotation_is_the_matrix_after_the_signs(dim):
    x = torch.randn(5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signed = x * random_signs(dim, 11).double()
    expected = signed @ torch.from_numpy(hadamard_matrix(dim).copy()).T / math.sqrt(dim)
    torch.testing.assert_close(x @ hadamard_rotation(dim, 11, dtype=torch.float64).T, expected)


@pytest.mark.parametrize("dim", [4, 8, 64, 128, 256, 1024], ids="d{}".format)
def test_fast_hadamard_equals_the_matrix(dim):
    x = torch.randn(3, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    expected = x @ torch.from_numpy(hadamard_matrix(dim).copy()).T / math.sqrt(dim)
    torch.testing.assert_close(fast_hadamard(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(fast_hadamard(x.float()), expected.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(fast_hadamard(fast_hadamard(x)), x, rtol=0, atol=1e-13)
    by_column = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(fast_hadamard(by_column), expected, rtol=0, atol=1e-13)


def test_fast_hadamard_at_the_edges():
    x = torch.tensor([3.0, 1.0])
    torch.testing.assert_close(fast_hadamard(x), torch.tensor([4.0, 2.0]) / math.sqrt(2))
    assert fast_hadamard(torch.ones(1)).tolist() == [1.0]
    assert fast_hadamard(torch.empty(3, 0, 16)).shape == (3, 0, 16)
    assert fast_hadamard(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"last axis 96: .*power of two.*hadamard_rotation"):
        fast_hadamard(torch.ones(2, 96))


def test_haar_moments():
    # Uniform on O(4): every entry has mean 0 and variance 1/4, the trace has E t^2 = 1 and E t^4 = 3. Without the
    # sign fix the mean of the first entry is about -0.4. Tolerances are five standard errors of 4000 draws.
    draws = torch.stack([haar_rotation(4, seed, dtype=torch.float64) for seed in range(4000)])
    assert draws.mean(0).abs().max() < 5 * 0.5 / math.sqrt(4000)
    assert (draws.square().mean(0) - 0.25).abs().max() < 5 * 0.25 / math.sqrt(4000)
    trace = draws.diagonal(dim1=1, dim2=2).sum(-1)
    assert trace.square().mean().item() == pytest.approx(1, abs=5 * math.sqrt(2 / 4000))
    assert trace.pow(4).mean().item() == pytest.approx(3, abs=5 * math.sqrt(96 / 4000))
    # Both components of the orthogonal group are equally likely.
    assert abs(torch.linalg.det(draws).mean().item()) < 5 / math.sqrt(4000)


def test_gaussian_matrix_is_standard_normal_and_independent_of_the_rotation():
    sketch = gaussian_matrix(400, 0)
    count = sketch.size
    assert abs(sketch.mean()) < 5 / math.sqrt(count)
    assert np.mean(sketch**2) == pytest.approx(1, abs=5 * math.sqrt(2 / count))
    assert np.mean(sketch**4) == pytest.approx(3, abs=5 * math.sqrt(96 / count))
    rotation = haar_rotation(400, 0, dtype=torch.float64).numpy() * math.sqrt(400)
    assert abs(np.mean(rotation * sketch)) < 5 / math.sqrt(count)
    assert np.abs(gaussian_matrix(400, 1) - sketch).max() > 1


@pytest.mark.parametrize("seed", [-1, 2**64], ids=["negative", "too-large"])
@pytest.mark.parametrize("draw", [random_signs, gaussian_matrix, haar_rotation, hadamard_rotation])
def test_bad_seeds_are_named(draw, seed):
    with pytest.raises(ValueError, match=rf"seed={seed}: .*0 to 2\^64 - 1"):
        draw(8, seed)


@pytest.mark.parametrize("draw", [random_signs, haar_rotation])
def test_empty_dimensions_are_refused(draw):
    with pytest.raises(ValueError, match="dim=0"):
        draw(0, 0)
