"""The notebooks run from top to bottom in quick mode, and what is committed of them is the output of such a run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MACHINE_PATH = re.compile(r"/(?:root|home|tmp|usr|opt|work)/")
MAX_BYTES = 400_000
EVERY_NOTEBOOK = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_five():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@EVERY_NOTEBOOK
def test_what_is_committed_was_run(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    text = "\n".join(str(output) for cell in code for output in cell.outputs)
    assert not MACHINE_PATH.search(text)
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    assert path.stat().st_size < MAX_BYTES


@EVERY_NOTEBOOK
def test_it_runs(path, demo_model_dir, monkeypatch):
    monkeypatch.setenv("TURBOQUANT_NOTEBOOK_QUICK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The kernel must find the package, not the folders of the checkout.
    monkeypatch.setenv("PYTHONSAFEPATH", os.environ.get("PYTHONSAFEPATH", "1"))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    # The last cell has a table or a picture.
    assert len(shown) >= 4
    assert {"text/markdown", "image/png"} & set().union(*(output.get("data", {}) for output in shown))
