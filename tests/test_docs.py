"""The documentation: its commands are run as they stand, its links lead somewhere.

A fenced block of commands says in its info string what it is: `sh runnable` and `python runnable` are run, in order, in
one empty folder a document, with MODEL set to the demo model's; `sh served` is a server that runs beside what follows;
`sh setup` and `sh gpu` need what a test does not have.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = {"sh": {"runnable", "served", "setup", "gpu"}, "python": {"runnable", "excerpt"}}
COMMANDS = re.compile(r"^\s*(turboquant|vllm|pip|make|python|git|curl)\b", re.MULTILINE)
BOOT_SECONDS, SECONDS = 600, 1200


def blocks(document: Path) -> list[tuple[str, list[str], str]]:
    """(language, marks, content) of every fenced block."""
    fences = [token for token in MarkdownIt().parse(document.read_text()) if token.type == "fence"]
    return [(*_split(token.info), token.content) for token in fences]


def _split(info: str) -> tuple[str, list[str]]:
    language, *marks = info.split() or [""]
    return language, marks


def runs(document: Path) -> bool:
    return any("runnable" in marks for _, marks, _ in blocks(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_of_commands_says_whether_it_is_run(document):
    for language, marks, content in blocks(document):
        if language in MARKS:
            assert len(marks) == 1 and marks[0] in MARKS[language], f"{language} {marks}: {content}"
        else:
            assert not COMMANDS.search(content), f"commands without a mark: {content}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target or target.startswith("#"):
            continue
        assert (document.parent / target.partition("#")[0]).exists(), target


@pytest.mark.engine
@pytest.mark.parametrize("document", [*filter(runs, DOCUMENTS)], ids=lambda path: path.name)
def test_commands_run(document, demo_model_dir, tmp_path):
    pytest.importorskip("vllm")
    environment = {
        **os.environ, "MODEL": str(demo_model_dir), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TURBOQUANT_WINDOW": "64",
    }  # fmt: skip
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with ExitStack() as servers:
        for language, marks, content in blocks(document):
            if marks == ["served"]:
                _serve(content, environment, tmp_path, servers)
            elif marks == ["runnable"]:
                command = ["bash", "-ec", content] if language == "sh" else [sys.executable, "-c", content]
                done = subprocess.run(
                    command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=SECONDS
                )
                assert done.returncode == 0, f"{content}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def _serve(content: str, environment: dict[str, str], folder: Path, servers: ExitStack) -> None:
    """Start a server and wait until it answers; it is stopped when `servers` is closed."""
    log = folder / "server.log"
    process = subprocess.Popen(
        ["bash", "-ec", content], cwd=folder, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    servers.callback(_stop, process)
    port = re.search(r"--port (\d+)", content)[1]
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"http://localhost:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail(f"{content} did not answer within {BOOT_SECONDS} s:\n{log.read_text()[-3000:]}")


def _stop(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
