"""`turboquant calibrate`, `merge` and `inspect` as users run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from turboquant.artifact import JSON_NAME, TENSORS_NAME, Artifact
from turboquant.calibration.run import MOMENTS_NAME, load_moments
from turboquant.cli.main import app

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ("--num-samples", "40", "--max-seq-len", "48", "--dtype", "float32")


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def artifact_bytes(folder) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (JSON_NAME, TENSORS_NAME)]


@pytest.fixture(scope="module")
def calibrated(worded_llama_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    result = run("calibrate", worded_llama_dir, *SMALL, "--output", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_an_artifact_is_made(calibrated, worded_llama_dir):
    artifact = Artifact.load(calibrated)
    info = artifact.info
    assert (info.model, [*info.layers]) == (str(worded_llama_dir), [0, 1])
    (data,) = info.data
    assert (data.source, data.samples, data.max_seq_len, data.seed) == ("pydoc", 40, 48, 0)
    assert data.tokens == 40 * 48
    assert all(0 < x <= 1 for layer in info.layers.values() for x in layer.energy_left)
    assert info.layers[0].held_out_energy_left is not None
    assert artifact.key_means[0].shape == (2, 64)


def test_it_is_deterministic(calibrated, worded_llama_dir, tmp_path):
    assert run("calibrate", worded_llama_dir, *SMALL, "--output", tmp_path).exit_code == 0
    assert artifact_bytes(tmp_path) == artifact_bytes(calibrated)


def test_killed_and_resumed_it_writes_the_same_bytes(worded_llama_dir, tmp_path):
    options = (
        worded_llama_dir, "--num-samples", "300", "--max-seq-len", "128", "--dtype", "float32",
        "--checkpoint-seconds", "0", "--output",
    )  # fmt: skip
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "turboquant.cli.main", "calibrate", *map(str, options), str(killed)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 120
    while time.monotonic() < until and not (killed / MOMENTS_NAME).is_file():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    moments, info = load_moments(killed)
    assert 0 < moments.samples < 300
    assert not info.done
    assert not (killed / JSON_NAME).exists()
    assert run("calibrate", *options, killed, "--resume").exit_code == 0
    assert run("calibrate", *options, whole).exit_code == 0
    assert artifact_bytes(killed) == artifact_bytes(whole)


def test_shards_merge_into_the_whole(calibrated, worded_llama_dir, tmp_path):
    parts = [tmp_path / str(i) for i in (1, 2)]
    for i, part in enumerate(parts, 1):
        assert run("calibrate", worded_llama_dir, *SMALL, "--shard", f"{i}/2", "--output", part).exit_code == 0
    assert run("merge", *parts, "--output", tmp_path / "joint").exit_code == 0
    joint, whole = Artifact.load(tmp_path / "joint"), Artifact.load(calibrated)
    for index, mean in whole.key_means.items():
        torch.testing.assert_close(joint.key_means[index], mean, rtol=0, atol=1e-6)
    assert sum(data.samples for data in joint.info.data) == 40
    assert "twice" in said(run("merge", parts[0], parts[0], "--output", tmp_path / "no"))
    assert not (tmp_path / "no").exists()


def test_another_run_is_not_gone_on_with(calibrated, worded_llama_dir, tmp_path):
    for name in (MOMENTS_NAME,):
        (tmp_path / name).write_bytes((calibrated / name).read_bytes())
    result = run("calibrate", worded_llama_dir, *SMALL, "--seed", 1, "--output", tmp_path, "--resume")
    assert result.exit_code == 2
    assert "of another run: data differ" in said(result)


def test_inspect_shows_it(calibrated, tmp_path):
    result = run("inspect", calibrated, "--plot", tmp_path / "picture.png")
    assert "40 samples, 1,920 tokens of pydoc" in result.output
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert json.loads(run("inspect", calibrated / TENSORS_NAME, "--json").stdout)["format_version"] == 1


@pytest.mark.parametrize(
    ("kind", "content", "options"),
    [
        ("text.txt", "The quick brown fox jumps over the lazy dog. " * 200, ()),
        ("records.jsonl", "\n".join(json.dumps({"text": f"Record {i}: " + "some words " * 30}) for i in range(30)), ()),
        (
            "chats.jsonl",
            "\n".join(json.dumps({"messages": [{"role": "user", "content": "why? " * 40}]}) for _ in range(30)),
            ("--chat-template",),
        ),
    ],
)
def test_local_files(worded_llama_dir, tmp_path, kind, content, options):
    (tmp_path / kind).write_text(content)
    result = run(
        "calibrate",
        worded_llama_dir,
        *SMALL,
        "--dataset",
        tmp_path / kind,
        "--output",
        tmp_path,
        "--batch-size",
        8,
        *options,
    )
    assert result.exit_code == 0, result.output
    assert Artifact.load(tmp_path).info.data[0].samples >= 20


REFUSED = {
    "too few tokens": (
        ("--num-samples", "2", "--max-seq-len", "16"),
        r"30 tokens are too few .* at least 256 are needed",
    ),
    "dtype": (("--dtype", "int8"), "allowed are auto, float32"),
    "shard": (("--shard", "3/2"), "'3/2' is no shard"),
    "missing file": (("--dataset", "not-there.jsonl"), "is not there"),
    "overrides": (("--hf-overrides", '{"rope_factor": 4}'), "has no field 'rope_factor'"),
    "no bias": (("--from-weights",), "has no K bias"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused_and_writes_nothing(worded_llama_dir, tmp_path, options, message):
    result = run("calibrate", worded_llama_dir, "--output", tmp_path / "out", *options)
    assert result.exit_code == 2
    import re

    assert re.search(message, said(result)), result.output
    assert not (tmp_path / "out" / JSON_NAME).exists()


def test_rotary_scaling_as_it_will_be_served(worded_llama_dir, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    overrides = json.dumps({"rope_parameters": yarn})
    result = run("calibrate", worded_llama_dir, *SMALL, "--hf-overrides", overrides, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(worded_llama_dir)
    with pytest.raises(ValueError, match="another rotary scaling"):
        Artifact.load(tmp_path).check(config)
    config.rope_parameters = yarn
    Artifact.load(tmp_path).check(config)


def test_from_weights(qwen2_dir, tmp_path):
    result = run("calibrate", qwen2_dir, "--from-weights", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(qwen2_dir)
    bias = model.model.layers[1].self_attn.k_proj.bias.detach().float().view(2, 64)
    assert torch.equal(Artifact.load(tmp_path).key_means[1], bias)
