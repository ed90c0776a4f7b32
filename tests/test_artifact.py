"""Calibration artifacts: what does not fit never serves, and each message names both sides."""

from __future__ import annotations

import json
import os

import pytest
import torch
from models import llama_config, qwen2_config

from turboquant.artifact import (
    ARTIFACT_ENV,
    JSON_NAME,
    TENSORS_NAME,
    Artifact,
    ArtifactError,
    find_artifact,
    rope_fingerprint,
)
from turboquant.calibration.solve import solve_from_biases

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}


def some_artifact(config=None, num_kv_heads: int = 2) -> Artifact:
    generator = torch.Generator().manual_seed(0)
    means = {i: torch.randn(num_kv_heads, 64, generator=generator) for i in range(2)}
    return solve_from_biases(means, config or llama_config(), "some-model")


@pytest.fixture
def saved(tmp_path):
    some_artifact().save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("which", [".", JSON_NAME, TENSORS_NAME])
def test_what_was_saved_is_loaded(saved, which):
    loaded, original = Artifact.load(saved / which), some_artifact()
    assert loaded.info.model_dump(exclude={"tensors_sha256"}) == original.info.model_dump(exclude={"tensors_sha256"})
    for index, mean in original.key_means.items():
        assert torch.equal(loaded.key_means[index], mean)
    loaded.check(llama_config())
    assert {os.stat(saved / name).st_mode & 0o444 for name in (JSON_NAME, TENSORS_NAME)} == {0o444}


def test_the_same_calibration_gives_the_same_bytes(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    some_artifact().save(other)
    for name in (JSON_NAME, TENSORS_NAME):
        assert (saved / name).read_bytes() == (other / name).read_bytes()


def test_damaged_tensors(saved):
    data = bytearray((saved / TENSORS_NAME).read_bytes())
    data[-5] ^= 1
    (saved / TENSORS_NAME).write_bytes(data)
    with pytest.raises(ArtifactError, match=r"turboquant\.safetensors is damaged.*SHA-256"):
        Artifact.load(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 1}'])
def test_a_damaged_description(saved, text):
    (saved / JSON_NAME).write_text(text)
    with pytest.raises(ArtifactError, match=r"turboquant\.json is damaged"):
        Artifact.load(saved)


@pytest.mark.parametrize("missing", [JSON_NAME, TENSORS_NAME])
def test_half_an_artifact(saved, missing):
    (saved / missing).unlink()
    with pytest.raises(ArtifactError, match=f"{missing} is missing"):
        Artifact.load(saved)
    assert find_artifact(saved) is not None, "half an artifact must not be taken for none"


@pytest.mark.parametrize(("name", "value"), [("format_version", 2), ("transform", "haar-1"), ("codebook", "uniform")])
def test_another_version(saved, name, value):
    info = json.loads((saved / JSON_NAME).read_text())
    (saved / JSON_NAME).write_text(json.dumps({**info, name: value}))
    with pytest.raises(ArtifactError, match=f"{name} {value!r}, this version .* reads"):
        Artifact.load(saved)


def test_another_model(saved):
    with pytest.raises(ArtifactError, match=r"of another model, some-model: hidden_size 128 there, 256 here"):
        Artifact.load(saved).check(qwen2_config())


def test_another_rotary_scaling(saved):
    served = llama_config(rope_parameters=YARN)
    with pytest.raises(ArtifactError, match=r"another rotary scaling: \{.*\} there, \{.*\} here.*--hf-overrides"):
        Artifact.load(saved).check(served)
    some_artifact(served).check(served)
    assert rope_fingerprint(served) != rope_fingerprint(llama_config())


def test_a_missing_layer(saved):
    with pytest.raises(ArtifactError, match=r"has no layer 5, only \[0, 1\]"):
        Artifact.load(saved).key_mean(5, 2)


@pytest.mark.parametrize(
    ("heads", "tp_size", "slices"),
    [
        (4, 1, [(0, 4)]),
        (4, 2, [(0, 2), (2, 4)]),
        (2, 2, [(0, 1), (1, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_tensor_parallel_ranks_take_their_heads(heads, tp_size, slices):
    """Fewer heads than ranks: each head serves several ranks, as in vLLM."""
    artifact = some_artifact(num_kv_heads=heads)
    for rank, (begin, end) in enumerate(slices):
        mean = artifact.key_mean(1, end - begin, tp_rank=rank, tp_size=tp_size)
        assert torch.equal(mean, artifact.key_means[1][begin:end])


def test_other_heads_are_refused():
    with pytest.raises(ArtifactError, match=r"2 KV heads in layer 0, the model has 4 on each of 1 ranks"):
        some_artifact().key_mean(0, 4)


def test_where_an_artifact_is_looked_for(saved, tmp_path_factory, monkeypatch):
    monkeypatch.delenv(ARTIFACT_ENV, raising=False)
    empty = tmp_path_factory.mktemp("model")
    assert find_artifact(saved) == saved / JSON_NAME
    assert find_artifact(empty) is None
    assert find_artifact("nobody/has-this-model") is None
    assert find_artifact(empty, str(saved)) == saved
    assert find_artifact(saved, "none") is None
    monkeypatch.setenv(ARTIFACT_ENV, str(saved))
    assert find_artifact(empty) == saved
    monkeypatch.setenv(ARTIFACT_ENV, "none")
    assert find_artifact(saved) is None
    with pytest.raises(ArtifactError, match=r"'/not/there' is not there"):
        find_artifact(empty, "/not/there")
