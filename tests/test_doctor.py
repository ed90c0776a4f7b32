"""`turboquant doctor`: finds what is right, and names what is wrong with what to do."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from turboquant.artifact import TENSORS_NAME
from turboquant.calibration.solve import solve_from_biases
from turboquant.cli.main import app
from turboquant.vllm import plugin


def examine(*arguments: object) -> tuple[int, dict[str, dict]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    return result.exit_code, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_this_installation(llama_dir):
    code, found = examine(llama_dir)
    problems = [finding for finding in found.values() if finding["status"] == "problem"]
    assert (code, problems) == (0, [])
    assert "turboquant3.5" in found["vLLM"]["found"]
    assert found["vllm.general_plugins"]["found"] == "turboquant.vllm.plugin:register"
    assert "turboquant calibrate" in found["calibration"]["remedy"]


def test_an_unsupported_vllm(monkeypatch):
    monkeypatch.setattr(plugin.metadata, "version", lambda name: "0.99.0")
    code, found = examine()
    assert code == 1
    assert "vLLM 0.99.0 is not supported" in found["vLLM"]["found"]


def test_a_plugin_that_is_left_out(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    code, found = examine()
    assert (code, found["vllm.general_plugins"]["status"]) == (1, "problem")


def test_slow_kernels(monkeypatch):
    from turboquant.kernels import interface

    monkeypatch.setattr(interface, "_default", lambda device_type: "reference")
    code, found = examine()
    assert code == 1
    assert "turboquant.kernels.cpu.build" in found["kernels for cpu"]["remedy"]


def test_a_damaged_calibration(llama_dir, tmp_path):
    from transformers import AutoConfig

    model = shutil.copytree(llama_dir, tmp_path / "model")
    solve_from_biases({}, AutoConfig.from_pretrained(model), "model").save(model / "turboquant")
    assert examine(model)[1]["calibration"]["status"] == "ok"
    (model / "turboquant" / TENSORS_NAME).write_bytes(b"")
    code, found = examine(model)
    assert code == 1
    assert "is damaged" in found["calibration"]["found"]


def test_as_a_table():
    result = CliRunner().invoke(app, ["doctor"])
    assert "kernels for cpu" in result.output
