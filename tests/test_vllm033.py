"""The hooks for vLLM 0.33 against its real Python sources: `make test-vllm033` unpacks them.

No engine runs: the package's compiled parts and what it depends on are missing. What runs is its registration of cache
dtypes, its validation of their names, and its choice of a backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = os.environ.get("TURBOQUANT_VLLM033")

pytestmark = pytest.mark.skipif(not SOURCES, reason="runs in `make test-vllm033`, which unpacks vLLM 0.33.0")

CHECK = """
import sys
import vllm
assert vllm.__file__.startswith(sys.argv[1]), vllm.__file__
from packaging.version import Version
from turboquant.formats import ALIASES, PRESETS
from turboquant.vllm import plugin

plugin.vllm_version = lambda: Version("0.33.0")
plugin.register_names()
plugin.register_names()

import torch
from vllm.config import CacheConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention import selector

for name in [*PRESETS, *ALIASES]:
    assert CacheConfig(cache_dtype=name).cache_dtype == name
try:
    CacheConfig(cache_dtype="turboquant3.6")
except ValueError as error:
    assert "turboquant3.6" in str(error)
else:
    raise AssertionError("turboquant3.6 was accepted")
assert hasattr(selector._cached_get_attn_backend, "turboquant")
print("registered", sorted(PRESETS))
"""


@pytest.mark.matrix(feature="vLLM 0.33.0: names registered and validated (its Python sources; no engine)", shape="any")
def test_names_are_registered_and_validated():
    environment = {**os.environ, "PYTHONPATH": SOURCES, "VLLM_PLUGINS": ""}
    run = subprocess.run(
        [sys.executable, "-c", CHECK, str(Path(SOURCES).resolve())], capture_output=True, text=True, timeout=300,
        env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "registered ['turboquant2.5', 'turboquant3', 'turboquant3.5', 'turboquant4']" in run.stdout
