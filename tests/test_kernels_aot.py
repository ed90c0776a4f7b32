"""The Triton kernels compile for GPUs that are not here: no spills, within shared memory, few instructions.

In processes of their own, as in this one Triton may have been imported for its interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(*command: str) -> object:
    env = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-W", "ignore", *command], env=env, capture_output=True, text=True)
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        pytest.fail(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


@pytest.mark.parametrize("target", ["sm_90", "sm_86"])
def test_every_kernel_compiles_within_the_chip_s_limits(target):
    lines = run("-m", "turboquant.kernels.triton.report", "--target", target, "--quick", "--json")
    assert {line["kernel"] for line in lines} == {"packed", "store", "store_window", "rotate", "exact", "combine"}
    assert not [line for line in lines if line["problem"]]


@pytest.mark.parametrize("target", ["sm_90", "sm_103"])
def test_the_inner_loop_of_decode_stays_cheap(target):
    found = run(
        str(BENCHMARKS / "sass.py"), "--format", "turboquant3.5", "--head-dim", "256", "--gqa", "8", "--target", target,
        "--json",
    )  # fmt: skip
    assert found["lane_instructions_per_element"] <= 4
    assert found["spills"] == 0
    if found["upstream_lane_instructions_per_element"] is not None:
        assert found["ratio"] >= 30
