"""Rivals, fake-quantised: right bytes, right errors by hand, and the names that users write."""

from __future__ import annotations

import pytest
import torch

from turboquant.evals.candidates import Candidate
from turboquant.evals.rivals import RIVALS, asymmetric, fp8, gaussian_codebook, lloyd_max_key, nvfp4, symmetric
from turboquant.formats import PRESETS


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("fp8", (128, 256, 512)),
        ("nvfp4", (72, 144, 288)),
        ("turboquant_k8v4", (100, 196, 388)),
        ("turboquant_4bit_nc", (70, 134, 262)),
        ("turboquant_k3v4_nc", (62, 118, 230)),
        ("turboquant_3bit_nc", (54, 102, 198)),
    ],
)
def test_slot_bytes(name, slots):
    """As vLLM allocates them at head dims 64, 128 and 256."""
    assert tuple(RIVALS[name].slot_bytes(dim) for dim in (64, 128, 256)) == slots


@pytest.mark.parametrize("rival", RIVALS.values(), ids=RIVALS.keys())
def test_what_is_read_back_is_near_and_keeps_shape_and_dtype(rival):
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 7, 3, 64, generator=generator).bfloat16()
    for given, read in zip((key, value), rival.read_back(key, value), strict=True):
        assert (read.shape, read.dtype) == (given.shape, given.dtype)
        error = (read.float() - given.float()).norm() / given.float().norm()
        assert 0 < error < 0.25


@pytest.mark.parametrize("rival", RIVALS.values(), ids=RIVALS.keys())
def test_zeros_are_read_as_zeros(rival):
    zeros = torch.zeros(2, 64)
    for read in rival.read_back(zeros, zeros):
        assert torch.equal(read, zeros)


def test_formats_by_hand():
    assert fp8(torch.tensor([1.0, 1.06, 1000.0, -0.3])).tolist() == [1.0, 1.0, 448.0, -0.3125]
    assert symmetric(torch.tensor([127.0, -63.4, 0.4]), 8).tolist() == [127.0, -63.0, 0.0]
    assert asymmetric(torch.tensor([-1.0, 14.0, 3.4]), 4).tolist() == [-1.0, 14.0, 3.0]
    assert nvfp4(torch.tensor([6.0, 2.4, -5.1, 0.2] * 4))[:4].tolist() == [6.0, 2.0, -6.0, 0.0]


def test_the_gaussian_codebook_is_the_known_one():
    torch.testing.assert_close(gaussian_codebook(1), torch.tensor([-0.7979, 0.7979]), atol=1e-4, rtol=0)
    known = torch.tensor([-1.5104, -0.4528, 0.4528, 1.5104])
    torch.testing.assert_close(gaussian_codebook(2), known, atol=1e-4, rtol=0)


def test_keys_come_back_at_their_length():
    key = torch.randn(50, 128, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 30, 50)[:, None]
    torch.testing.assert_close(lloyd_max_key(key, 4).norm(dim=-1), key.norm(dim=-1), rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="head_dim 80"):
        lloyd_max_key(torch.ones(80), 4)


def test_names_with_and_without_a_window(monkeypatch):
    ours = PRESETS["turboquant3.5"]
    assert Candidate.parse("turboquant35") == Candidate(ours, 64)
    assert Candidate.parse("turboquant3.5@0", window=32) == Candidate(ours, 0)
    assert Candidate.parse("turboquant3.5", window=32) == Candidate(ours, 32)
    assert Candidate.parse("fp8", window=32) == Candidate(RIVALS["fp8"], 0)
    assert Candidate.parse("fp8@64").label == "fp8@64"
    monkeypatch.setenv("TURBOQUANT_WINDOW", "16")
    assert Candidate.parse("turboquant3.5").window == 16


@pytest.mark.parametrize("text", ["fp9", "turboquant3.5@many", "fp8@", "fp8@-1"])
def test_a_name_that_means_nothing_is_named(text):
    with pytest.raises(ValueError, match=text.partition("@")[2] or text.partition("@")[0]):
        Candidate.parse(text)


def test_bits_with_a_window():
    candidate = Candidate(PRESETS["turboquant3.5"], 64)
    assert candidate.bits_per_element(64, 2) == 3.75
    assert candidate.bits_with_window(64, 2, 4096) == pytest.approx(3.75 + 16 * 67 / 4096)
