"""The table of measured against predicted distortions, and the command that prints it."""

from __future__ import annotations

import json
import math

import pytest
import typer
from typer.testing import CliRunner

import turboquant.theory
from turboquant.cli.theory import theory
from turboquant.codebook import lloyd_max
from turboquant.theory import measure, mse_theory, prod_theory

KEYS = {"head_dim", "bits", "variant", "measured", "theory", "lower_bound"}


@pytest.fixture(scope="module")
def rows():
    return measure(dims=(64, 96, 256), num_vectors=2000) + measure(dims=(1536,), num_vectors=300)


def test_rows_come_in_order_with_exactly_these_keys(rows):
    assert all(set(row) == KEYS for row in rows)
    order = [(row["head_dim"], row["bits"], row["variant"]) for row in rows]
    assert order == [(d, b, v) for d in (64, 96, 256, 1536) for b in (1, 2, 3, 4) for v in ("mse", "prod")]


def test_measurement_agrees_with_the_theory(rows):
    """MSE within 1.5 %, Prod within 4 sqrt(2) / d of the drawn sketch, 2/(pi d) of the mean, and 1.5 %.

    The squared length of the one sketch of each dimension has the relative deviation sqrt(2) / d.
    """
    for row in rows:
        dim = row["head_dim"]
        tolerance = 0.015 if row["variant"] == "mse" else 0.015 + (4 * math.sqrt(2) + 2 / math.pi) / dim
        assert row["measured"] == pytest.approx(row["theory"], rel=tolerance), row


def test_large_dimension_has_the_published_values(rows):
    found = {(row["variant"], row["bits"]): row["measured"] for row in rows if row["head_dim"] == 1536}
    for bits, mse, prod in zip((1, 2, 3, 4), (0.363, 0.1175, 0.0345, 0.0095), (1.57, 0.56, 0.184, 0.054), strict=True):
        assert found["mse", bits] == pytest.approx(mse, rel=0.02)
        assert found["prod", bits] == pytest.approx(prod, rel=0.05)


def test_nothing_beats_the_lower_bound(rows):
    for row in rows:
        assert row["lower_bound"] == 4.0 ** -row["bits"]
        assert row["measured"] > row["lower_bound"]


def test_predictions():
    assert mse_theory(128, 0) == 1
    assert mse_theory(128, 3) == lloyd_max(128, 3).distortion
    assert prod_theory(128, 1) == pytest.approx(math.pi / 2)
    assert prod_theory(1536, 2) == pytest.approx(0.5705, abs=2e-4)
    assert prod_theory(128, 4) == pytest.approx(math.pi / 2 * 0.03397, rel=1e-3)


def test_progress_hears_of_every_row():
    heard = []
    rows = measure(dims=(12, 20), bits=(1, 3), num_vectors=10, progress=heard.append)
    assert heard == rows
    assert len(rows) == 8


def test_seeds_decide():
    once, again, other = (measure((24,), (2,), num_vectors=50, seed=seed) for seed in (3, 3, 4))
    assert once == again
    assert once != other


def test_vectors_pass_in_chunks(monkeypatch):
    seen = []
    draw = turboquant.theory.random_unit_vectors

    def spy(count, dim, generator):
        seen.append(count)
        return draw(count, dim, generator)

    monkeypatch.setattr(turboquant.theory, "random_unit_vectors", spy)
    monkeypatch.setattr(turboquant.theory, "_CHUNK_ELEMENTS", 64 * 300)
    (row,) = (row for row in measure((64,), (2,), num_vectors=1000) if row["variant"] == "mse")
    assert seen[:4] == [300, 300, 300, 100]
    assert row["measured"] == pytest.approx(row["theory"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_vectors": 0}, "num_vectors=0: at least one"),
        ({"bits": (9,)}, "bits=9"),
        ({"dims": (1,)}, "dim=1"),
        ({"seed": -2}, "seed=-2"),
    ],
    ids=["vectors", "bits", "dims", "seed"],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(**{"dims": (16,), "bits": (2,), "num_vectors": 4, **arguments})


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(theory)
    return lambda *arguments: CliRunner().invoke(app, arguments)


SMALL = ("--head-dim", "16", "--head-dim", "20", "--bits", "2", "--num-vectors", "200", "--seed", "5")


def test_command_prints_json_alone_on_standard_output(run):
    result = run(*SMALL, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == measure((16, 20), (2,), num_vectors=200, seed=5)


def test_command_prints_a_table(run):
    result = run(*SMALL)
    assert result.exit_code == 0
    for row in measure((16, 20), (2,), num_vectors=200, seed=5):
        ratio = row["measured"] / row["theory"]
        cells = (row["head_dim"], row["variant"], f"{row['measured']:.5f}", f"{row['theory']:.5f}", f"{ratio:.3f}")
        (line,) = (line for line in result.stdout.splitlines() if cells[2] in line)
        assert all(str(cell) in line for cell in cells)


def test_command_explains_a_bad_value(run):
    result = run("--head-dim", "16", "--bits", "9")
    assert result.exit_code == 2
    assert "bits=9" in result.stderr
    assert result.stdout == ""
