"""Ending a process together with everything that it started.

An engine is a tree of processes: a front end, an engine core, workers, now and then a compiler. The tree is started in
a process group of its own, so one signal reaches all of it, also those whose parent has died already.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

POLL_S = 0.1


def end_group(process: subprocess.Popen, grace_s: float = 5.0) -> None:
    """End the process group of `process`: ask, wait `grace_s` seconds, then kill. Returns when nothing of it runs.

    The process must lead its own group (`start_new_session=True`). An interruption of the waiting kills at once.
    """
    try:
        signal_group(process, signal.SIGTERM, grace_s)
    finally:
        signal_group(process, signal.SIGKILL, 5.0)


def signal_group(process: subprocess.Popen, number: int, wait_s: float) -> None:
    """Send a signal to what still runs of the group, and wait until nothing does or the time is over."""
    deadline = time.monotonic() + wait_s
    if group_members(process.pid):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    while group_members(process.pid) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    process.poll()  # reaps the leader


def group_members(group: int) -> list[int]:
    """Ids of the processes of this group that still run. A zombie does not run: it only waits for its parent."""
    members = []
    for process in psutil.process_iter(["pid", "status"]):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.info["pid"]) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.info["pid"])
    return members


@contextmanager
def termination_as_exception() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit while this is open, so that `finally` blocks run.

    Python turns Ctrl-C into an exception by itself. Outside the main thread, where no handler can be set, does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _raise_exit) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
