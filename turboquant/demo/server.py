"""A real `vllm serve` as a context manager: started, waited for, asked about its cache, ended in every case.

with VllmServer(ServerOptions(model, kv_cache_dtype="turboquant3.5"), log_path) as server:
    pool = server.kv_pool()
    client = OpenAI(base_url=server.base_url, api_key="none")
"""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape

from turboquant.demo.launch import (
    HOST,
    ServerError,
    ServerOptions,
    check_memory,
    check_port,
    environment,
    serve_command,
)
from turboquant.demo.processes import end_group, termination_as_exception

BOOT_LIMIT_S = 900  # a quiet machine needs 25 s
POLL_S = 0.25
LOG_TAIL_LINES = 25

# The server is on this machine: a proxy for the outside must not get its requests.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class KVPool:
    """The server's KV cache, as it reports it."""

    tokens: int
    memory_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Of all layers together; what rounding to whole blocks leaves unused counts, too."""
        return self.memory_bytes / self.tokens


@dataclass
class VllmServer:
    """Runs `vllm serve` while the `with` block runs.

    Args:
        options: what to serve.
        log_path: file for everything that the server prints.
        console: where the spinner and the messages go.
        command: runs instead of vLLM (for tests).
    """

    options: ServerOptions
    log_path: Path
    console: Console = field(default_factory=Console)
    command: list[str] | None = None
    boot_seconds: float = field(default=0.0, init=False)
    process: subprocess.Popen | None = field(default=None, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.options.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client wants."""
        return f"{self.url}/v1"

    def __enter__(self) -> VllmServer:
        check_port(self.options.port)
        check_memory(self.options)
        with ExitStack() as stack:  # ends the server if it does not become ready
            stack.enter_context(termination_as_exception())
            stack.callback(self._end)
            self._start()
            self._wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def kv_pool(self) -> KVPool:
        """Capacity of the KV cache, from the server's own metrics.

        The tokens are those that requests of `max_model_len` tokens can hold at once; vLLM counts all groups of layers.
        """
        with _direct.open(f"{self.url}/metrics", timeout=30) as response:
            return parse_pool(response.read().decode())

    def _start(self) -> None:
        command = self.command or serve_command(self.options)
        for line in (f"Starting {' '.join(command)}", f"Its log: {self.log_path}"):
            self.console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True
            )

    def _wait(self) -> None:
        started = time.monotonic()
        with self.console.status("Starting vLLM") as status:
            while not answers(f"{self.url}/health"):
                seconds = time.monotonic() - started
                if self.process.poll() is not None:
                    raise ServerError(self.failure(f"vLLM ended with code {self.process.returncode} while starting"))
                if seconds > BOOT_LIMIT_S:
                    raise ServerError(self.failure(f"vLLM was not ready after {BOOT_LIMIT_S} s"))
                status.update(f"Starting vLLM, {seconds:.0f} s: {escape(last_line(self.log_path))}")
                time.sleep(POLL_S)
        self.boot_seconds = time.monotonic() - started
        self.console.print(f"Ready after {self.boot_seconds:.0f} s", style="dim")

    def failure(self, what: str) -> str:
        """An error message: what went wrong, then the end of the server's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"{what}. The end of its log, {self.log_path}:\n" + "\n".join(f"  {line}" for line in lines)

    def _end(self) -> None:
        if self.process is not None:
            with self.console.status("Ending the server"):
                end_group(self.process)


def answers(url: str) -> bool:
    """Does this address answer with success?"""
    try:
        with _direct.open(url, timeout=5) as response:
            return response.status == 200
    except OSError:  # refused, reset, timed out, or an HTTP error
        return False


def last_line(path: Path, width: int = 90) -> str:
    """The last line of a log that is not empty, without vLLM's prefix (process, level, time, file)."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return re.sub(r"^.*?\[[\w.]+:\d+\] ", "", lines[-1])[:width] if lines else "importing"


def parse_pool(metrics: str) -> KVPool:
    """Read `vllm:cache_config_info`, a metric whose labels are the cache's settings.

    Raises:
        ServerError: the metric is not there or lacks the cache's size.
    """
    line = next((line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")), "")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    try:
        return KVPool(int(labels["kv_cache_size_tokens"]), int(labels["kv_cache_memory_bytes"]))
    except (KeyError, ValueError) as error:
        raise ServerError(f"vLLM's metrics do not tell the size of its KV cache: {line or 'no such metric'}") from error
