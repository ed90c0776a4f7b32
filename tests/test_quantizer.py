"""Algorithms 1 and 2 against the paper's figures, the codebooks, and their own formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from turboquant.codebook import lloyd_max, mse_lower_bound
from turboquant.quantizer import MSECodes, ProdCodes, TurboQuantMSE, TurboQuantProd
from turboquant.rotation import gaussian_matrix, haar_rotation, hadamard_rotation

DIMS = (64, 80, 96, 128, 256, 1536)
BOTH = pytest.mark.parametrize("quantizer", [TurboQuantMSE, TurboQuantProd])


def unit_vectors(count: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)


def roundtrip(quantizer: TurboQuantMSE | TurboQuantProd, x: torch.Tensor) -> torch.Tensor:
    return quantizer.dequantize(quantizer.quantize(x))


def standard_error(samples: torch.Tensor) -> float:
    return samples.std().item() / math.sqrt(samples.numel())


@pytest.mark.parametrize(("bits", "published"), [(1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_mse_distortion_is_the_paper_s(bits, published):
    x = unit_vectors(400, 1536)
    errors = (roundtrip(TurboQuantMSE(1536, bits), x) - x).square().sum(-1)
    assert errors.mean().item() == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("bits", "published"), [(1, 1.57), (2, 0.56), (3, 0.184), (4, 0.054)])
def test_prod_distortion_is_the_paper_s(bits, published):
    x, queries = unit_vectors(400, 1536), unit_vectors(400, 1536, seed=1)
    errors = (roundtrip(TurboQuantProd(1536, bits), x) - x) @ queries.T
    assert 1536 * errors.square().mean().item() == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize("rotation", ["haar", "hadamard"])
@pytest.mark.parametrize("bits", range(1, 6), ids="b{}".format)
@pytest.mark.parametrize("dim", DIMS, ids="d{}".format)
def test_mse_distortion_bias_and_bound(dim, bits, rotation):
    """D is the codebook's, <x, x^> = 1 - D, and D stays above the lower bound.

    Any fixed rotation maps uniform vectors to uniform vectors, so both means are exact and their errors independent
    from vector to vector: five standard errors of the sample at hand are the tolerance (6 % of D at most).
    """
    x = unit_vectors(300 if dim > 1000 else 4000, dim, seed=bits)
    restored = roundtrip(TurboQuantMSE(dim, bits, seed=dim, rotation=rotation), x)
    distortion = lloyd_max(dim, bits).distortion
    errors, products = (restored - x).square().sum(-1), (restored * x).sum(-1)
    assert errors.mean().item() == pytest.approx(distortion, abs=5 * standard_error(errors))
    assert 5 * standard_error(errors) < 0.06 * distortion
    assert products.mean().item() == pytest.approx(1 - distortion, abs=5 * standard_error(products))
    assert errors.mean().item() > mse_lower_bound(bits)


@pytest.mark.parametrize("bits", [6, 7, 8], ids="b{}".format)
def test_mse_distortion_at_many_bits(bits):
    x = unit_vectors(500, 128, dtype=torch.float64)
    errors = (roundtrip(TurboQuantMSE(128, bits), x) - x).square().sum(-1)
    assert errors.mean().item() == pytest.approx(lloyd_max(128, bits).distortion, rel=0.03)


@pytest.mark.parametrize("rotation", [haar_rotation, hadamard_rotation], ids=["haar", "hadamard"])
@pytest.mark.parametrize("bits", [1, 3, 8], ids="b{}".format)
def test_algorithm_1_written_out(bits, rotation):
    x = 3 * torch.randn(50, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    quantizer = TurboQuantMSE(20, bits, seed=9, rotation=rotation.__name__.split("_")[0])
    pi = rotation(20, 9, dtype=torch.float64)
    centroids = torch.tensor(lloyd_max(20, bits).centroids, dtype=torch.float64)
    norms = x.norm(dim=1)
    distance = ((x / norms[:, None]) @ pi.T).unsqueeze(-1) - centroids
    indices = distance.abs().argmin(-1)

    codes = quantizer.quantize(x)
    assert codes.indices.dtype == torch.uint8
    assert torch.equal(codes.indices.long(), indices)
    torch.testing.assert_close(codes.norms, norms)
    torch.testing.assert_close(quantizer.dequantize(codes), norms[:, None] * (centroids[indices] @ pi))


@pytest.mark.parametrize("bits", [1, 2, 4], ids="b{}".format)
def test_algorithm_2_written_out(bits):
    x = 3 * torch.randn(50, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    quantizer = TurboQuantProd(20, bits, seed=9)
    sketch = torch.from_numpy(gaussian_matrix(20, 9))
    first = torch.zeros_like(x) if bits == 1 else roundtrip(TurboQuantMSE(20, bits - 1, seed=9), x)
    signs = torch.sign((x - first) @ sketch.T)
    gamma = (x - first).norm(dim=1)

    codes = quantizer.quantize(x)
    assert (codes.mse is None) == (bits == 1)
    assert torch.equal(codes.signs.double(), signs)
    torch.testing.assert_close(codes.residual_norms, gamma)
    expected = first + math.sqrt(math.pi / 2) / 20 * gamma[:, None] * (signs @ sketch)
    torch.testing.assert_close(quantizer.dequantize(codes), expected)


@pytest.fixture(scope="module")
def over_seeds():
    """Exact inner products [8], and for 400 seeds the MSE and Prod estimates of them [400, 8], d = 16, 2 bits."""
    x = unit_vectors(8, 16, dtype=torch.float64)
    # Close to x, so that there is a product to lose.
    y = torch.nn.functional.normalize(x + 0.7 * unit_vectors(8, 16, seed=1, dtype=torch.float64), dim=-1)
    estimates = {
        kind: torch.stack([(roundtrip(kind(16, 2, seed=seed), x) * y).sum(-1) for seed in range(400)])
        for kind in (TurboQuantMSE, TurboQuantProd)
    }
    return (x * y).sum(-1), estimates


def test_prod_is_unbiased_for_every_vector(over_seeds):
    exact, estimates = over_seeds
    samples = estimates[TurboQuantProd]
    errors = samples.mean(0) - exact
    assert (errors.abs() < 4.5 * samples.std(0) / math.sqrt(400)).all()
    assert abs(errors.mean().item()) < 0.02


def test_mse_shrinks_every_product_by_one_minus_d(over_seeds):
    exact, estimates = over_seeds
    samples, distortion = estimates[TurboQuantMSE], lloyd_max(16, 2).distortion
    errors = samples.mean(0) - (1 - distortion) * exact
    assert (errors.abs() < 4.5 * samples.std(0) / math.sqrt(400)).all()
    # The shrinkage is seen, not lost in the noise.
    assert (samples.mean(0) - exact).mean().item() == pytest.approx(-distortion * exact.mean().item(), rel=0.1)


@pytest.mark.parametrize("bits", [1, 2, 4], ids="b{}".format)
def test_inner_product_is_that_of_the_dequantised_vectors(bits):
    quantizer = TurboQuantProd(96, bits)
    x, queries = 5 * unit_vectors(7, 96), unit_vectors(3, 96, seed=1)
    codes = quantizer.quantize(x)
    expected = queries @ quantizer.dequantize(codes).T
    torch.testing.assert_close(quantizer.inner_product(queries[:, None], codes), expected)
    torch.testing.assert_close(quantizer.inner_product(queries[0], codes), expected[0])


def test_hadamard_has_a_fixed_error_on_one_hot_vectors_and_haar_has_not():
    # All rotated coordinates are +-1/sqrt(d), and so share the cell of the outer centroid.
    x = torch.eye(128)
    fixed = (1 - lloyd_max(128, 2).centroids[-1] * math.sqrt(128)) ** 2
    errors = (roundtrip(TurboQuantMSE(128, 2, rotation="hadamard"), x) - x).square().sum(-1)
    torch.testing.assert_close(errors, torch.full((128,), fixed), rtol=1e-4, atol=0)
    assert fixed == pytest.approx(0.255, abs=0.001)
    errors = (roundtrip(TurboQuantMSE(128, 2), x) - x).square().sum(-1)
    assert errors.mean().item() == pytest.approx(0.116, rel=0.05)


@BOTH
def test_scaling_the_input_scales_the_output(quantizer):
    x = unit_vectors(20, 80)
    expected = roundtrip(quantizer(80, 3), x)
    for scale in (2.0**-120, 2.0**-20, 8.0, 2.0**110):
        torch.testing.assert_close(roundtrip(quantizer(80, 3), x * scale) / scale, expected)


@BOTH
@pytest.mark.parametrize("bits", [1, 2, 4], ids="b{}".format)
def test_zero_vectors_stay_exactly_zero(quantizer, bits):
    x = unit_vectors(5, 64)
    x[[0, 3]] = 0
    restored = roundtrip(quantizer(64, bits), x)
    assert (restored[[0, 3]] == 0).all()
    assert (restored[[1, 2, 4]].norm(dim=-1) > 0.5).all()


@BOTH
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty_batches(quantizer, shape):
    chosen = quantizer(64, 2)
    assert roundtrip(chosen, torch.empty(shape)).shape == shape
    if isinstance(chosen, TurboQuantProd):
        assert chosen.inner_product(torch.ones(64), chosen.quantize(torch.empty(shape))).shape == shape[:-1]


@BOTH
def test_leading_axes_do_not_matter(quantizer):
    chosen, x = quantizer(120, 3, rotation="hadamard"), unit_vectors(30, 120)
    flat = roundtrip(chosen, x)
    torch.testing.assert_close(roundtrip(chosen, x.view(2, 3, 5, 120)), flat.view(2, 3, 5, 120))
    torch.testing.assert_close(roundtrip(chosen, x[4]), flat[4])
    strided = x.view(5, 6, 120).transpose(0, 1)
    torch.testing.assert_close(roundtrip(chosen, strided), flat.view(5, 6, 120).transpose(0, 1))


@BOTH
def test_precision_follows_the_input(quantizer):
    chosen, x = quantizer(64, 4), unit_vectors(50, 64, dtype=torch.float64)
    exact = roundtrip(chosen, x)
    assert exact.dtype == torch.float64
    single = roundtrip(chosen, x.float())
    assert single.dtype == torch.float32
    # A coordinate on the edge of two cells may fall on the other side, which changes a few vectors and no more.
    same = torch.isclose(single.double(), exact, rtol=0, atol=1e-5).all(-1)
    assert same.sum() >= 48
    assert torch.equal(roundtrip(chosen, x.bfloat16()), roundtrip(chosen, x.bfloat16().float()))


@BOTH
def test_seeds_decide(quantizer):
    x = unit_vectors(10, 64)
    assert torch.equal(roundtrip(quantizer(64, 2, seed=3), x), roundtrip(quantizer(64, 2, seed=3), x))
    assert not torch.equal(roundtrip(quantizer(64, 2, seed=3), x), roundtrip(quantizer(64, 2, seed=4), x))


@BOTH
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "bits=0: .*1 to 8"),
        ({"bits": 9}, "bits=9: .*1 to 8"),
        ({"dim": 1}, "dim=1: .*2 or more"),
        ({"rotation": "dct"}, "rotation='dct': allowed are 'haar', 'hadamard'"),
        ({"dim": 52, "rotation": "hadamard"}, "order=52: .*rotation='haar'"),
        ({"seed": -1}, "seed=-1"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(quantizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        quantizer(**{"dim": 64, "bits": 2, **arguments})


@BOTH
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3, 32), r"shape \(3, 32\): .*dim=64.*\[\.\.\., 64\]"),
        (torch.ones(64, 1), r"shape \(64, 1\)"),
        (torch.tensor(1.0), r"shape \(\)"),
        (torch.ones(3, 64, dtype=torch.int32), r"torch\.int32: .*x\.float"),
        (torch.ones(3, 64, dtype=torch.complex64), r"torch\.complex64"),
    ],
    ids=["length", "axis", "scalar", "integer", "complex"],
)
def test_bad_inputs_say_what_to_do(quantizer, x, message):
    with pytest.raises(ValueError, match=message):
        quantizer(64, 2).quantize(x)


@BOTH
def test_other_arrays_are_refused(quantizer):
    with pytest.raises(TypeError, match=r"ndarray: .*torch\.as_tensor"):
        quantizer(64, 2).quantize(np.ones((3, 64), dtype=np.float32))


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_counted_and_located(quantizer, bad):
    x = unit_vectors(6, 64).view(2, 3, 64).clone()
    x[1, 0, 17] = x[1, 2, 3] = bad
    with pytest.raises(ValueError, match=r"2 of 384 values are NaN or Inf, the first at index \(1, 0, 17\)"):
        quantizer(64, 2).quantize(x)


def test_codes_of_another_quantiser_are_refused():
    x = unit_vectors(3, 64)
    mse, prod = TurboQuantMSE(64, 4).quantize(x), TurboQuantProd(64, 2).quantize(x)
    with pytest.raises(ValueError, match="index 15: a 2-bit quantiser has the indices 0 to 3"):
        TurboQuantMSE(64, 2).dequantize(MSECodes(torch.full_like(mse.indices, 15), mse.norms))
    with pytest.raises(ValueError, match=r"codes\.indices has the shape \(3, 64\)"):
        TurboQuantMSE(32, 4).dequantize(mse)
    with pytest.raises(ValueError, match=r"codes\.signs has the shape \(3, 64\)"):
        TurboQuantProd(32, 2).dequantize(prod)
    with pytest.raises(ValueError, match="come with an MSE part, a 1-bit quantiser needs them without"):
        TurboQuantProd(64, 1).inner_product(x, prod)
    with pytest.raises(ValueError, match="come without an MSE part, a 2-bit quantiser needs them with"):
        TurboQuantProd(64, 2).dequantize(ProdCodes(None, prod.signs, prod.residual_norms))
