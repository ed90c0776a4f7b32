"""`turboquant doctor`: finds what is right, and names what is wrong with what to do."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from turboquant.artifact import TENSORS_NAME
from turboquant.calibration.solve import solve_from_biases
from turboquant.cli.main import app


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


def plant(site, name: str, version: str, record: str = "") -> None:
    """A distribution as pip leaves it."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text(record)


def test_an_unsupported_vllm(tmp_path, monkeypatch):
    plant(tmp_path, "vllm", "0.99.0")
    monkeypatch.syspath_prepend(tmp_path)
    code, found = examine()
    assert code == 1
    assert "vLLM 0.99.0 is not supported" in found["vLLM"]["found"]


def test_a_plugin_that_is_left_out(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    code, found = examine()
    assert (code, found["vllm.general_plugins"]["status"]) == (1, "problem")


def test_an_extension_that_is_missing(tmp_path, monkeypatch):
    from turboquant.kernels import interface
    from turboquant.kernels.cpu import library

    monkeypatch.setenv(library.LIBRARY_ENV, str(tmp_path / "none.so"))
    monkeypatch.setattr(interface, "_default", interface._default.__wrapped__)
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    code, found = examine()
    assert code == 1
    assert "none.so" in found["kernels for cpu"]["found"]
    assert "turboquant.kernels.cpu.build" in found["kernels for cpu"]["remedy"]


def test_another_distribution_of_our_package(tmp_path, monkeypatch):
    plant(tmp_path, "turboquant-rival", "1.0", "turboquant/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, found = examine()
    assert code == 1
    assert "also installed by: turboquant-rival" in found["package"]["found"]


def test_another_package_where_servers_start(tmp_path, monkeypatch):
    """`python -m vllm...` would import the one in the working directory."""
    (tmp_path / "turboquant").mkdir()
    (tmp_path / "turboquant" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    expected = "note" if sys.flags.safe_path else "problem"
    code, found = examine()
    assert (code, found["another turboquant"]["status"]) == (int(expected == "problem"), expected)
    assert str(tmp_path / "turboquant") in found["another turboquant"]["found"]


def test_a_calibration_of_another_model(llama_dir, qwen2_dir, tmp_path):
    from transformers import AutoConfig

    model = shutil.copytree(llama_dir, tmp_path / "model")
    solve_from_biases({}, AutoConfig.from_pretrained(qwen2_dir), "the other").save(model / "turboquant")
    code, found = examine(model)
    assert (code, found["calibration"]["status"]) == (1, "problem")
    assert "is of another model, the other: hidden_size 256 there, 128 here" in found["calibration"]["found"]


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
