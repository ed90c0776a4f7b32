"""Runs the CPU kernels' tests on a library built with the address and undefined-behaviour sanitisers.

    python scripts/sanitize.py [pytest's arguments]

Python itself is not built with them, so their runtime is loaded before everything else (LD_PRELOAD). Leaks are not
looked for: the interpreter and torch keep what they have until the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from turboquant.kernels.cpu import build

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
TESTS = ("tests/test_kernels_cpu.py", "tests/test_kernels_bad_values.py", "tests/test_kernels_window.py")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ[build.FLAGS_ENV] = FLAGS
        library = build.build(Path(folder) / build.LIBRARY)
        runtime = subprocess.check_output([*build.find_compiler(), "-print-file-name=libasan.so"], text=True).strip()
        environment = {
            **os.environ,
            "LD_PRELOAD": str(Path(runtime).resolve()),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TURBOQUANT_CPU_LIBRARY": str(library),
        }
        command = [sys.executable, "-m", "pytest", "-q", *(sys.argv[1:] or TESTS)]
        return subprocess.call(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
