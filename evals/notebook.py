"""What the notebooks share: how much they do, and one call that measures caches on the demo model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from turboquant.artifact import ARTIFACT_ENV
from turboquant.demo.model import ensure_demo_model
from turboquant.evals.backends import model_length
from turboquant.evals.candidates import Candidate
from turboquant.evals.divergence import load_model
from turboquant.evals.hf_backend import HFBackend
from turboquant.evals.report_rows import Group, groups_of
from turboquant.evals.results import Results
from turboquant.evals.suite import Suite
from turboquant.evals.tasks import Request

QUICK_ENV = "TURBOQUANT_NOTEBOOK_QUICK"


def quick() -> bool:
    """Only as much as shows that a notebook runs? By TURBOQUANT_NOTEBOOK_QUICK=1."""
    return os.environ.get(QUICK_ENV, "0") not in ("", "0")


def measure(
    caches: Sequence[str],
    folder: Path | str,
    *,
    tasks: Sequence[str] = ("divergence",),
    text: str = "source",
    artifact: Path | str = "none",
    **request: Any,
) -> list[Group]:
    """`turboquant eval` on the demo model.

    Args:
        caches: names, see `Candidate.parse`.
        folder: of results; finished cells are not computed again.
        artifact: a calibration, or "none".
        request: fields of `turboquant.evals.tasks.Request`.

    Returns:
        All that the folder holds, table by table.
    """
    path = ensure_demo_model()
    backend = HFBackend(_model(path), max_length=model_length(path))
    with _artifact(str(artifact)):
        suite = Suite(
            backend, Request(path, backend.max_length, **request), [Candidate.parse(name) for name in caches],
            list(tasks), [text], results=Results(Path(folder)),
        )  # fmt: skip
        for _ in suite.run():
            pass
    return groups_of(Results(Path(folder)).all())


def show(lines: Iterable[str]) -> Any:
    """Markdown, as the tables of a report are."""
    from IPython.display import Markdown

    return Markdown("\n".join(lines))


def picture(draw: Callable[[Any, Path], None], what: Any) -> Any:
    """What `draw(what, path)` draws."""
    from IPython.display import Image

    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(what, path)
        return Image(path.read_bytes(), format="png", embed=True, width=800)


@functools.cache
def _model(path: Path) -> Any:
    return load_model(path, "float32")


@contextmanager
def _artifact(given: str) -> Iterator[None]:
    before = os.environ.get(ARTIFACT_ENV)
    os.environ[ARTIFACT_ENV] = given
    try:
        yield
    finally:
        if before is None:
            del os.environ[ARTIFACT_ENV]
        else:
            os.environ[ARTIFACT_ENV] = before
