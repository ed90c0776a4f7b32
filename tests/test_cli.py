"""The command, as scripts call it: exact JSON keys, and errors that say what to do."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import turboquant
from turboquant.cli.main import app
from turboquant.formats import PRESETS


def run(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_version():
    assert run("--version").output == f"turboquant-toolkit {turboquant.__version__}\n"


def test_formats_as_json():
    rows = json.loads(run("formats", "--json").output)
    assert [(row["name"], row["head_dim"]) for row in rows] == [(n, d) for n in PRESETS for d in (64, 128, 256)]
    for row in rows:
        assert [*row] == [
            "name", "key_bits", "value_bits", "head_dim", "slot_bytes", "bits_per_element", "ratio_vs_bf16", "window",
            "block_size", "ratio_vs_bf16_at",
        ]  # fmt: skip
    served = next(row for row in rows if (row["name"], row["head_dim"]) == ("turboquant3.5", 256))
    assert (served["slot_bytes"], served["bits_per_element"]) == (228, 3.5625)
    assert served["ratio_vs_bf16"] == pytest.approx(4.49, abs=0.005)


def test_formats_as_a_table():
    output = run("formats", "--head-dim", 80).output
    assert "turboquant3.5" in output
    assert "74" in output


def test_formats_show_what_the_window_costs():
    (row,) = [row for row in json.loads(run("formats", "--head-dim", 128, "--json").output) if row["key_bits"] == 4][:1]
    assert row["window"] == 64
    assert [row["ratio_vs_bf16_at"][n] for n in ("4096", "32768", "131072")] == pytest.approx(
        [3.77, 4.33, 4.39], abs=0.005
    )
    assert "3.77x" in run("formats", "--head-dim", 128).output
    assert "no exact window" in run("formats", "--window", 0).output


def test_formats_of_a_window_that_no_page_holds():
    result = run("formats", "--block-size", 16)
    assert result.exit_code == 2
    assert "too small for an exact window" in " ".join(result.output.split())


def test_formats_of_an_impossible_head_dim():
    result = run("formats", "--head-dim", 60)
    assert result.exit_code == 2
    assert "multiples of 8" in result.output


def test_theory_as_json():
    rows = json.loads(run("theory", "--head-dim", 64, "--bits", 2, "--num-vectors", 256, "--json").stdout)
    assert {row["variant"] for row in rows} == {"mse", "prod"}
    for row in rows:
        assert {*row} == {"head_dim", "bits", "variant", "measured", "theory", "lower_bound"}
        assert row["measured"] > row["lower_bound"]


def test_eval_of_an_unknown_format(llama_dir):
    result = run("eval", "--model", llama_dir, "--kv-cache-dtype", "turboqant4")
    assert result.exit_code == 2
    assert "turboquant4" in result.output


def test_eval_of_an_unknown_task(llama_dir):
    from turboquant.evals.tasks import TASKS

    result = run("eval", "--model", llama_dir, "--kv-cache-dtype", "turboquant4", "--tasks", "divergance")
    assert result.exit_code == 2
    told = " ".join(result.output.replace("│", " ").split())
    assert f"'divergance' is not a task; allowed: {', '.join(TASKS)}, ruler_offline" in told


def test_the_window_is_closer_on_the_demo_model(demo_model_dir, one_thread):
    """By default the newest 64 tokens and the first four are exact: measured 15 to 20 times closer than without."""
    result = run(
        "eval", "--model", demo_model_dir, "--kv-cache-dtype", "turboquant3.5", "--num-tokens", 1024, "--json"
    )  # fmt: skip
    figures = json.loads(result.stdout)
    assert 0 < figures["kl_mean"] < 0.01
    assert (figures["window"], figures["bits_per_element"]) == (64, 3.75)
    assert figures["bits_per_element_with_window"] == pytest.approx(3.75 + 32 * (4 + 63) / 1024)


def test_quality_on_the_demo_model(demo_model_dir, tmp_path, one_thread, window_off):
    """Uncalibrated, all tokens from the packed cache, at a context of 1,024 tokens."""
    result = run(
        "eval", "--tasks", "divergence", "--model", demo_model_dir, "--kv-cache-dtype", "turboquant3.5", "--text",
        "pydoc", "--num-tokens", 1024, "--json", "--output", tmp_path / "result.json",
    )  # fmt: skip
    figures = json.loads(result.stdout)
    assert {"kl_mean", "kl_p99", "top1", "delta_ppl", "bits_per_element"} <= {*figures}
    assert figures["bits_per_element"] == 3.75
    # Far below the lower figure, something exact would have leaked into the packed run.
    assert 0.03 < figures["kl_mean"] < 0.09
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["result"] == figures
    assert written["environment"]["versions"]["torch"]
