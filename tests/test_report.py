"""`turboquant report`: figures, intervals and paired tests from cells that are made up here, of every kind of task."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy.stats import wilcoxon
from typer.testing import CliRunner

from turboquant.cli.main import app
from turboquant.evals.report import write_report
from turboquant.evals.report_rows import better, groups_of
from turboquant.evals.results import BLOCK, Cell, Results, interval

POSITIONS = 8 * BLOCK
TEXTS = ("source", "/some/where/GPL-3")


def kl(scale: float, seed: int) -> torch.Tensor:
    """Scores of a divergence cell: positions are alike whatever the cache, as in life."""
    hard = torch.rand(POSITIONS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise = torch.rand(POSITIONS, generator=torch.Generator().manual_seed(int(1e6 * scale)), dtype=torch.float64)
    loss = scale * (hard + 0.05 * noise)
    return torch.stack((loss, loss < 0.5 * scale, hard, hard + loss, loss < 0.8 * scale)).double()


def save(results: Results, task: str, cache: str, text: str, scores: torch.Tensor, metrics: dict, **settings):
    shared = {"num_tokens": POSITIONS, "context_length": 4 * BLOCK, "dtype": "float32", "position_offset": 0,
              "tokens_sha256": f"hash of {text}", "calibration": None}  # fmt: skip
    cell = Cell("model", "hf", task, text, cache, tuple(sorted((shared | settings).items())))
    results.save(
        cell, {"bits_per_element": 3.75, "bits_per_element_with_window": 4.5, "simulated": False, **metrics}, scores
    )


@pytest.fixture
def folder(tmp_path):
    results = Results(tmp_path / "results")
    losses = {"auto": 0.0, "turboquant3.5@64": 0.02, "fp8": 0.03, "turboquant_4bit_nc+boundary": 0.05}
    for seed, text in enumerate(TEXTS):
        for cache, loss in losses.items():
            scores = kl(loss, seed)
            save(
                results, "divergence", cache, text, scores,
                {"task": "divergence", "primary": "kl_mean", "kl_mean": scores[0].mean().item(), "block": BLOCK,
                 "primary_interval": interval(scores[0]), "bits_at_16": 4.0 + loss,
                 "window": 64 * cache.endswith("@64"), "simulated": cache.startswith(("fp8", "turboquant_"))},
            )  # fmt: skip
        calibrated = kl(0.01, seed)
        save(results, "divergence", "turboquant3.5@64", text, calibrated,
             {"kl_mean": calibrated[0].mean().item(), "kl_interval": interval(calibrated[0])},
             calibration="ab" * 32)  # fmt: skip
    for cache, found in (("auto", 1.0), ("turboquant3.5@64", 0.5)):
        grid = [{"length": n, "depth": d, "accuracy": found} for n in (1024, 2048) for d in (0.0, 1.0)]
        save(results, "needle", cache, "source", torch.tensor([[1.0, found] * 10]).double(),
             {"primary": "accuracy", "accuracy": (1 + found) / 2, "higher_is_better": True, "block": 1, "grid": grid,
              "primary_interval": (0.2, 0.9), "accuracy_interval": (0.2, 0.9), "answer_logprob": -0.25,
              "answer_logprob_interval": (-0.5, -0.125)}, context_length=1990)  # fmt: skip
    save(results, "layers", "fp8", "source", torch.full((4, POSITIONS), 0.1).double(),
         {"primary": "kl_sum", "kl_sum": 0.3, "primary_interval": (0.2, 0.4), "block": BLOCK, "layers": [0, 1, 3],
          "kl_by_layer": [0.2, 0.06, 0.04]})  # fmt: skip
    return results.folder


def run(*arguments: object):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def table_row(page: str, *begin: str) -> list[str]:
    """The cells of the first row of a table that begins so."""
    line = next(line for line in page.splitlines() if line.startswith("| " + " | ".join(begin) + " |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_page_of_every_task(folder, tmp_path):
    result = run(folder, "--output", tmp_path / "page.md")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.md").read_text()
    ours = table_row(page, "turboquant3.5@64")
    assert ours[1:3] == ["3.750", "4.020"]
    expected = torch.cat([kl(0.02, seed)[0] for seed in (1, 0)])  # GPL-3, source
    low, high = interval(expected)
    assert ours[3] == f"{expected.mean():.4f} ({low:.4f} to {high:.4f})"
    # By quality, the exact one first.
    names = re.findall(r"^\| ([\w.@+ ()]+) \| [\d.]+ \| [\d.]+ \|", page.partition("## divergence")[2], re.MULTILINE)
    assert names[:5] == [
        "auto", "turboquant3.5@64 (calibrated)", "turboquant3.5@64", "fp8 (simulated)",
        "turboquant_4bit_nc+boundary (simulated)",
    ]  # fmt: skip
    assert table_row(page, "auto")[1:3] == ["16.000", "16.000"]
    # Cells of the first version count exact tokens in float32.
    assert table_row(page, "turboquant3.5@64 (calibrated)")[2] == "4.125"
    assert "| needle | " in page
    assert "0.7500 (0.2000 to 0.9000)" in page
    assert "-0.2500 (-0.5000 to -0.1250)" in page
    assert table_row(page, "fp8", "0.2000")[1:] == ["0.2000", "0.0600", "0.0400"]
    assert "`hash of /some/where/GPL-3`" in page
    assert "/some/where/GPL-3 |" not in page
    for name in ("page", "page-needles", "page-layers"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_by_position(folder, tmp_path):
    write_report([folder], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text().partition("by position")[2]
    scores = torch.stack([kl(0.03, seed)[0] for seed in (0, 1)]).view(4, -1)
    expected = [f"{part.mean():.4f}" for part in scores.tensor_split(8, dim=1)]
    assert table_row(text, "fp8", expected[0])[1:] == expected


def test_one_file_of_html(folder, tmp_path):
    assert run(folder, "--output", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('src="data:image/png;base64,') == 3
    assert "<td>fp8 (simulated)</td>" in page
    assert [path.name for path in tmp_path.glob("page*")] == ["page.html"]


def test_pairs_by_hand(folder, tmp_path):
    pair = ("--compare", "turboquant3.5@64 (calibrated):turboquant_4bit_nc+boundary", "--compare", "fp8:auto")
    assert run(folder, "--output", tmp_path / "page.md", *pair).exit_code == 0
    page = (tmp_path / "page.md").read_text()
    first = table_row(page, "turboquant3.5@64 (calibrated)", "turboquant_4bit_nc+boundary (simulated)")
    mine, theirs = (
        np.concatenate([kl(loss, seed)[0].view(-1, BLOCK).mean(1) for seed in (0, 1)]) for loss in (0.01, 0.05)
    )
    assert first[2] == "divergence, GPL-3, source"
    assert first[4] == f"{mine.mean():.4f} / {theirs.mean():.4f}"
    assert first[6:] == ["16", "100%", f"{wilcoxon(mine, theirs, alternative='less').pvalue:.2g}"]
    assert table_row(page, "fp8 (simulated)", "auto")[-2:] == ["0%", "1"]


def test_where_more_is_better_the_test_turns_round(folder):
    (needle,) = (group for group in groups_of(Results(folder).all()) if group.task == "needle")
    exact, ours = needle.rows
    assert exact.label == "auto"
    assert better(exact, ours) < 0.01 < 0.9 < better(ours, exact)


def test_a_cache_without_one_of_the_texts(folder):
    """What is taken together are the texts that every cache has."""
    scores = kl(0.04, 0)
    save(Results(folder), "divergence", "int4", "source", scores, {"kl_mean": scores[0].mean().item()})
    group = next(group for group in groups_of(Results(folder).all()) if group.task == "divergence")
    assert group.texts == ["GPL-3", "source"]
    assert {row.pooled for row in group.rows} == {("source",)}
    assert group.find("fp8").divergence()["kl_mean"] == pytest.approx(kl(0.03, 0)[0].mean().item())
    # A pair has what both have.
    assert (
        better(group.find("turboquant3.5@64"), group.find("fp8")) < 1e-4 < better(group.find("fp8"), group.find("int4"))
    )


def test_two_calibrations_are_told_apart(folder):
    scores = kl(0.015, 0)
    save(Results(folder), "divergence", "turboquant3.5@64", "source", scores, {"kl_mean": 0.0075, "kl_interval": None},
         calibration="cd" * 32)  # fmt: skip
    labels = {row.label for group in groups_of(Results(folder).all()) for row in group.rows}
    assert {"turboquant3.5@64 (calibrated ababab)", "turboquant3.5@64 (calibrated cdcdcd)"} <= labels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compare", "fp8"), "two caches with a colon"),
        (("--compare", "fp8:fp9"), "fp8:fp9: no task has both"),
        (("--output", "page.pdf"), ".md or .html"),
    ],
)
def test_what_cannot_be_reported(folder, arguments, message):
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_report_of_nothing(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "no finished results" in " ".join(result.output.split())
