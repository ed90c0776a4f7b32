"""Speculative decoding on a compressed cache: the same tokens, whatever was drafted and rejected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import drafts
import models
import speculate
from engine import assert_same_answers, engine, greedy_with_gaps

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]

FMT = "turboquant2.5"
N_GRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def speculated(model_dir, window: int, config: dict, **settings) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "speculate", str(model_dir), FMT, str(window), json.dumps(config)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(
        [*command, json.dumps(settings)], capture_output=True, text=True, timeout=300, env=environment
    )


def check(model_dir, window: int, config: dict, tolerance: float = 1e-3, kept: bool = True, **settings) -> None:
    """The answers are those of an engine without speculation, and no exact read went wrong."""
    run = speculated(model_dir, window, config, **settings)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = json.loads(run.stdout.strip().splitlines()[-1])
    options = {"turboquant": {"window": window if kept else 0, "prefill_reads": "packed"}}
    with engine(model_dir, FMT, skip_tokenizer_init=True, additional_config=options, **settings) as llm:
        plain = greedy_with_gaps(llm, speculate.prompts(), speculate.MAX_TOKENS)
    assert_same_answers(seen["answers"], plain, tolerance)
    assert seen["drafted"] > seen["accepted"] > 0
    assert (seen["bad"], seen["freed"]) == (0, 0)
    assert (seen["reads"] > 1000) == (window > 0 and kept)
    assert ("no exact window, because vLLM serves draft models" in run.stdout + run.stderr) == (not kept)


@pytest.mark.parametrize("window", [32, pytest.param(0, marks=pytest.mark.engine_full)])
@pytest.mark.matrix(feature="speculation: n-gram", shape="llama, window {window}")
def test_n_gram_drafts_change_nothing(llama_dir, window):
    check(llama_dir, window, N_GRAM)


@pytest.mark.engine_full
@pytest.mark.matrix(feature="speculation: EAGLE", shape="llama")
def test_eagle_drafts_change_nothing(llama_dir, tmp_path):
    head = drafts.save_eagle(tmp_path, llama_dir)
    check(llama_dir, 32, {"method": "eagle", "model": str(head), "num_speculative_tokens": 3})


@pytest.mark.engine_full
@pytest.mark.matrix(feature="speculation: MTP", shape="qwen3.5 MoE hybrid")
def test_multi_token_prediction_changes_nothing(qwen35_moe_dir, tmp_path):
    """In bfloat16, whose roundings differ between a verified batch and a decode step."""
    model_dir = drafts.save_with_mtp(tmp_path, qwen35_moe_dir)
    check(model_dir, 32, {"method": "mtp", "num_speculative_tokens": 1}, tolerance=0.2, dtype="bfloat16")


@pytest.mark.engine_full
@pytest.mark.matrix(feature="speculation: draft model of a quarter of the layers", shape="llama")
def test_a_small_draft_model_leaves_the_window(tmp_path):
    target = models.save_llama(tmp_path / "target", num_hidden_layers=4)
    draft = drafts.save_draft_llama(tmp_path / "draft", target, num_layers=1)
    check(target, 32, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3})


@pytest.mark.engine_full
@pytest.mark.matrix(feature="speculation: draft model of all layers (no window, which the log says)", shape="llama")
def test_a_large_draft_model_takes_the_window(llama_dir, tmp_path):
    draft = drafts.save_draft_llama(tmp_path, llama_dir, num_layers=2)
    check(llama_dir, 32, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}, kept=False)


@pytest.mark.engine_full
@pytest.mark.matrix(feature="speculation: draft model", shape="gemma-3 (several cache groups)", verdict="refused")
def test_a_draft_model_beside_sliding_layers_is_refused(gemma3_dir, llama_dir, tmp_path):
    draft = drafts.save_draft_llama(tmp_path, llama_dir, num_layers=1)
    run = speculated(gemma3_dir, 32, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3})
    assert run.returncode != 0
    assert (
        "NotImplementedError: kv_cache_dtype='turboquant2.5': the draft model's layers are in KV cache group"
        in run.stderr
    )
