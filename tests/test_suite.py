"""`turboquant eval` into a folder, `turboquant report` out of it, and the statistics on the way."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from turboquant.cli.main import app
from turboquant.evals.candidates import Candidate
from turboquant.evals.hf_backend import HFBackend
from turboquant.evals.results import BLOCK, Cell, Results, block_means, interval, paired_p
from turboquant.evals.suite import Suite
from turboquant.evals.tasks import TASKS, Request
from turboquant.evals.tasks.base import Task

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ("--limit", "2", "--context-length", "128")


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def evaluate(model, folder, caches: str, *more: object):
    return run("eval", "--model", model, "--kv-cache-dtype", caches, *SMALL, "--output", folder, "--json", *more)


@pytest.fixture(scope="module")
def folder(worded_llama_dir, tmp_path_factory):
    where = tmp_path_factory.mktemp("results")
    result = evaluate(
        worded_llama_dir, where, "turboquant3.5,turboquant2.5@0,fp8,auto", "--tasks", "divergence,copying"
    )
    assert result.exit_code == 0, result.output
    return where


def test_cells_hold_what_was_measured(folder):
    cells = Results(folder).all()
    assert len(cells) == 2 * 4
    for cell in cells:
        counted = 2 * 128 if cell.config["task"] == "divergence" else 128
        assert cell.scores.shape == (5, counted)
        low, high = cell.metrics["kl_interval"] or (0, np.inf)
        assert low <= cell.metrics["kl_mean"] <= high
        assert cell.metrics["kl_mean"] == pytest.approx(cell.scores[0].mean().item())
        assert cell.config["settings"]["tokens_sha256"]
        assert cell.environment["versions"]["torch"]


def test_the_exact_cache_is_exact(folder):
    exact = [cell for cell in Results(folder).all() if cell.config["cache"] == "auto"]
    assert [cell.metrics["kl_max"] < 1e-6 for cell in exact] == [True, True]
    assert all(cell.metrics["bits_per_element"] == 32 for cell in exact)


def test_what_is_finished_is_not_computed_again(folder, worded_llama_dir, observed):
    result = evaluate(worded_llama_dir, folder, "turboquant2.5@0,turboquant4,fp8")
    assert len(json.loads(result.stdout)) == 3
    # The exact distributions, which no cell keeps, and the cell that was not there.
    assert observed == ["divergence of auto", "divergence of turboquant4@64"]
    # A cell that was killed before its figures were written is no finished one.
    (cell,) = folder.glob("*divergence*turboquant4*")
    (cell / "metrics.json").unlink()
    evaluate(worded_llama_dir, folder, "turboquant4")
    assert observed == ["divergence of auto", "divergence of turboquant4@64"] * 2


def test_a_killed_run_goes_on(worded_llama_dir, tmp_path, observed, monkeypatch):
    """Each answer that a cell keeps is given once: also the exact cache's, which stand beside all others."""
    tasks = ["perplexity", "needle", "longgen"]
    request = Request(worded_llama_dir, 1024, context_length=64, limit=2, lengths=(256,), max_new_tokens=8)

    def suite() -> Suite:
        caches = [Candidate.parse(name) for name in ("turboquant2.5@0", "auto", "fp8")]
        return Suite(HFBackend(worded_llama_dir), request, caches, tasks, ["pydoc"], results=Results(tmp_path))

    kept = Results.save

    def save_then_die(self, cell, *args):
        kept(self, cell, *args)
        if "turboquant2.5__" in cell.folder and cell.task == "needle":
            raise KeyboardInterrupt

    monkeypatch.setattr(Results, "save", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        list(suite().run())
    monkeypatch.setattr(Results, "save", kept)
    figures = dict(suite().run())
    assert sorted(observed) == sorted(
        f"{task} of {cache}" for task in tasks for cache in ("auto", "turboquant2.5", "fp8")
    )
    again = dict(suite().run())
    as_json = [json.dumps([found[key] for key in figures], sort_keys=True) for found in (figures, again)]
    assert as_json[0] == as_json[1]
    for key, found in figures.items():
        if key.candidate.cache is None:
            assert found.get("kept") in (None, 1.0)
            assert found.get("equal_tokens", 1.0) == 1.0
            assert found.get("delta_ppl", 0.0) == 0.0
            assert found.get("logprob_change", 0.0) == 0.0


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_is_that_of_samples(worded_llama_dir, limit):
    request = Request(worded_llama_dir, 1024, context_length=64, limit=limit, lengths=(256, 512), max_new_tokens=8)
    for task in TASKS.values():
        assert len(task().samples(request, "pydoc")) == limit


@pytest.fixture
def observed(monkeypatch) -> list[str]:
    """What is computed, from now on."""
    seen = []
    observe_all = Task.observe_all

    def counted(self, served, *args):
        seen.append(f"{self.name} of {served.candidate.label}")
        return observe_all(self, served, *args)

    monkeypatch.setattr(Task, "observe_all", counted)
    return seen


def test_other_settings_are_another_cell(folder, worded_llama_dir):
    before = len(Results(folder).all())
    assert evaluate(worded_llama_dir, folder, "turboquant2.5@0", "--position-offset", 10).exit_code == 0
    assert len(Results(folder).all()) == before + 1


def test_the_report(folder, tmp_path):
    result = run("report", folder, "--output", tmp_path / "page.md")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.md").read_text()
    assert "## divergence, contexts of 128 tokens:" in page
    assert "| fp8 (simulated) | 8.000 |" in page
    assert page.index("| turboquant3.5@64 |") < page.index("| turboquant2.5 |")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_names_of_cells_are_readable_and_distinct():
    cell = Cell("model", "hf", "divergence", "/some/where/a text.txt", "turboquant3.5@64", (("dtype", "float32"),))
    assert cell.folder.startswith("model__hf__divergence__a-text.txt__turboquant3.5@64__")
    other = Cell("model", "hf", "divergence", "/else/where/a text.txt", "turboquant3.5@64", (("dtype", "float32"),))
    assert cell.folder != other.folder


def test_statistics_of_blocks():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(40 * BLOCK, generator=generator)
    assert len(block_means(values)) == 40
    low, high = interval(values)
    assert low < 0.5 < high
    assert high - low < 0.02
    assert paired_p(values * 0.9, values) < 1e-6
    assert paired_p(values, values * 0.9) > 0.99
    assert paired_p(values, values) == 1.0
    assert interval(values[:10]) is None
