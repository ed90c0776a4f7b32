"""Rivals, fake-quantised: right bytes, right errors by hand, and the names that users write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turboquant.evals import candidates
from turboquant.evals.candidates import Candidate
from turboquant.evals.rivals import RIVALS, asymmetric, fp8, gaussian_codebook, lloyd_max_key, nvfp4, symmetric
from turboquant.formats import PRESETS

# Where the package of a rival is missing, the rest is tested.
EVERY_RIVAL = pytest.mark.parametrize(
    "rival",
    [
        pytest.param(
            rival,
            id=name,
            marks=pytest.mark.skipif(
                bool(rival.requires) and candidates.installed_version(rival.requires) is None,
                reason=f"needs {rival.requires}",
            ),
        )
        for name, rival in RIVALS.items()
    ],
)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("fp8", (128, 256, 512)),
        ("nvfp4", (72, 144, 288)),
        ("turboquant_k8v4", (100, 196, 388)),
        ("turboquant_4bit_nc", (70, 134, 262)),
        ("turboquant_k3v4_nc", (62, 118, 230)),
        ("turboquant_3bit_nc", (54, 102, 198)),
        ("kivi4", (72, 144, 288)),
        ("kivi2", (40, 80, 160)),
        ("quanto4", (72, 144, 288)),
        ("hqq2", (40, 80, 160)),
    ],
)
def test_slot_bytes(name, slots):
    """At head dims 64, 128 and 256: as vLLM allocates them; of groups of 64 the codes, a step and a minimum."""
    assert tuple(RIVALS[name].slot_bytes(dim) for dim in (64, 128, 256)) == slots


@EVERY_RIVAL
def test_what_is_read_back_is_near_and_keeps_shape_and_dtype(rival):
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 71, 3, 64, generator=generator).bfloat16()
    for given, read in zip((key, value), rival.read_back(key, value), strict=True):
        assert (read.shape, read.dtype) == (given.shape, given.dtype)
        error = (read.float() - given.float()).norm() / given.float().norm()
        assert 0 < error < (0.5 if rival.name.endswith("2") else 0.25)


@EVERY_RIVAL
def test_zeros_are_read_as_zeros(rival):
    zeros = torch.zeros(128, 2, 64)
    for read in rival.read_back(zeros, zeros):
        assert torch.equal(read, zeros)


def test_formats_by_hand():
    assert fp8(torch.tensor([1.0, 1.06, 1000.0, -0.3])).tolist() == [1.0, 1.0, 448.0, -0.3125]
    assert symmetric(torch.tensor([127.0, -63.4, 0.4]), 8).tolist() == [127.0, -63.0, 0.0]
    assert asymmetric(torch.tensor([-1.0, 14.0, 3.4]), 4).tolist() == [-1.0, 14.0, 3.0]
    assert nvfp4(torch.tensor([6.0, 2.4, -5.1, 0.2] * 4))[:4].tolist() == [6.0, 2.0, -6.0, 0.0]


@pytest.mark.parametrize("bits", [4, 2])
def test_kivi_by_numpy(bits):
    """K in 64 tokens of a channel, V in 64 channels of a token, the K of the last, open group exact."""
    key, value = torch.randn(2, 150, 2, 128, generator=torch.Generator().manual_seed(0)).numpy()
    read_key, read_value = RIVALS[f"kivi{bits}"].read_back(torch.tensor(key), torch.tensor(value))

    def uniform(x):
        low, high = x.min(), x.max()
        step = np.float16((high - low) / (2**bits - 1))
        return np.round((x - low) / ((high - low) / (2**bits - 1))) * step + np.float16(low)

    for token, head, channel in ((0, 0, 0), (63, 1, 5), (64, 0, 127), (127, 1, 64)):
        group = slice(token // 64 * 64, token // 64 * 64 + 64)
        expected = uniform(key[group, head, channel])[token % 64]
        assert read_key[token, head, channel].item() == pytest.approx(expected, abs=1e-3)
        channels = slice(channel // 64 * 64, channel // 64 * 64 + 64)
        expected = uniform(value[token, head, channels])[channel % 64]
        assert read_value[token, head, channel].item() == pytest.approx(expected, abs=1e-3)
    np.testing.assert_array_equal(read_key[128:], key[128:])


@EVERY_RIVAL
def test_what_a_rival_reads_does_not_depend_on_later_tokens(rival):
    key, value = torch.randn(2, 160, 3, 64, generator=torch.Generator().manual_seed(0))
    if rival.requires == "hqq":
        pytest.skip("its solver stops by the error of all that it is given")
    whole, start = rival.read_back(key, value), rival.read_back(key[:130], value[:130])
    for x, y in zip(whole, start, strict=True):
        torch.testing.assert_close(x[:128], y[:128], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "package"), [("quanto4", "optimum.quanto"), ("hqq2", "hqq")])
def test_transformers_caches_give_back_what_their_rival_reads(name, package):
    """In a later step; in the first one they return what came in, which is why one forward pass measures nothing."""
    pytest.importorskip(package)
    from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

    kind, axis = (HQQQuantizedLayer, 1) if name.startswith("hqq") else (QuantoQuantizedLayer, 0)
    layer = kind(nbits=int(name[-1]), axis_key=axis, axis_value=axis)
    key, value = torch.randn(2, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(layer.update(key, value)[0], key)
    later = layer.update(key[:, :, :1], value[:, :, :1])
    expected = RIVALS[name].read_back(key.transpose(1, 2), value.transpose(1, 2))
    for x, y in zip(later, expected, strict=True):
        torch.testing.assert_close(x[:, :, :64], y.transpose(1, 2), atol=2e-3, rtol=0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(candidates, "installed_version", lambda name: None)
    with pytest.raises(ValueError, match="quanto4 needs optimum-quanto"):
        Candidate.parse("quanto4@64")
    assert Candidate.parse("kivi4").cache is RIVALS["kivi4"]


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
    assert Candidate.parse("turboquant_k8v4+boundary@64").label == "turboquant_k8v4+boundary@64"
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
