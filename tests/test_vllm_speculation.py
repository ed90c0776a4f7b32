"""Speculative decoding on a compressed cache: the same tokens, whatever was drafted and rejected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import speculate
from engine import engine, greedy

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]


@pytest.mark.parametrize("window", [32, 0])
def test_n_gram_drafts_change_nothing(llama_dir, window):
    command = [sys.executable, "-m", "speculate", str(llama_dir), "turboquant2.5", str(window)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = json.loads(run.stdout.strip().splitlines()[-1])
    options = {"turboquant": {"window": window, "prefill_reads": "packed"}}
    with engine(llama_dir, "turboquant2.5", skip_tokenizer_init=True, additional_config=options) as llm:
        plain = [tokens for tokens, _ in greedy(llm, speculate.prompts(), speculate.MAX_TOKENS)]
    assert seen["answers"] == plain
    assert seen["drafted"] > seen["accepted"] > 0
    assert (seen["bad"], seen["freed"]) == (0, 0)
    assert (seen["reads"] > 1000) == (window > 0)
