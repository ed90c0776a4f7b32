"""Runs `triton_interpreted.py` in a process of its own.

Triton's own functions choose between compiler and interpreter when they are first imported, and in this process other
tests may have imported them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_in_the_interpreter():
    file = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout[-2000:])


def test_cpu_tensors_without_the_interpreter_are_refused():
    code = (
        "import torch; from turboquant.kernels.interface import store_kv;"
        "from turboquant.kv_quantizer import make_params;"
        "from turboquant.formats import PRESETS; n = torch.zeros(1, dtype=torch.int64); x = torch.zeros(1, 1, 64);"
        "store_kv(x, x, torch.zeros(1, 1, 16, 60, dtype=torch.uint8), n, n, make_params(PRESETS['turboquant3.5'], 64))"
    )
    env = {**os.environ, "TURBOQUANT_KERNELS": "triton"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode
    assert "the Triton kernels need CUDA tensors, got CPU ones" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr
