"""The engine on the C++ kernels, which serve CPUs by default: the answers of the reference, and no read gone wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from engine import engine, greedy, random_prompts
from window_oracle import Oracle, assert_nothing_leaked

from turboquant.kernels.cpu.library import LibraryMissing, load
from turboquant.kernels.interface import FORCE_ENV, implementation

try:
    load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = pytest.mark.engine

LENGTHS = (1, 6, 41, 130, 201, 301)


def answers(model_dir, fmt: str, oracle=None, **overrides) -> list:
    with engine(model_dir, fmt, skip_tokenizer_init=True, **overrides) as llm:
        if oracle is not None:
            oracle.watch_blocks(llm)
        ours = greedy(llm, random_prompts(*LENGTHS), 12)
        assert_nothing_leaked(llm)
    return ours


def test_they_are_the_default_on_cpus(monkeypatch):
    monkeypatch.delenv(FORCE_ENV, raising=False)
    assert implementation(torch.device("cpu")).__name__ == "turboquant.kernels.cpu"


@pytest.mark.matrix(feature="C++ kernels: chunks, batches, prefix caching; {fmt}", shape="{model}")
@pytest.mark.parametrize("fmt", ["turboquant2.5", "turboquant3.5", "turboquant4"])
@pytest.mark.parametrize("model", ["llama_dir", "qwen2_dir"])
def test_the_answers_of_the_reference(request, monkeypatch, model, fmt):
    """Log-probabilities until the tokens part: the kernels may be off by 1.5e-3 of what they return."""
    model_dir = request.getfixturevalue(model)
    pressure = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_prefix_caching": True}
    monkeypatch.setenv(FORCE_ENV, "reference")
    expected = answers(model_dir, fmt, **pressure)
    monkeypatch.setenv(FORCE_ENV, "cpu")
    oracle = Oracle(monkeypatch)
    ours = answers(model_dir, fmt, oracle, **pressure)
    assert (oracle.bad, oracle.freed) == (0, 0)
    assert oracle.reads > 1000
    for (tokens, logprobs), (their_tokens, their_logprobs) in zip(ours, expected, strict=True):
        same = next((i for i, pair in enumerate(zip(tokens, their_tokens, strict=True)) if pair[0] != pair[1]), 12)
        assert logprobs[:same] == pytest.approx(their_logprobs[:same], abs=0.05)
    assert sum(a[0] == b[0] for a, b in zip(ours, expected, strict=True)) >= len(LENGTHS) - 1


@pytest.mark.matrix(feature="C++ kernels", shape="qwen3.5 MoE hybrid (GDN + attention)")
def test_a_hybrid(qwen35_moe_dir, monkeypatch):
    monkeypatch.setenv(FORCE_ENV, "cpu")
    ours = answers(qwen35_moe_dir, "turboquant3.5", dtype="bfloat16")
    monkeypatch.setenv(FORCE_ENV, "reference")
    expected = answers(qwen35_moe_dir, "turboquant3.5", dtype="bfloat16")
    for (_, logprobs), (_, their_logprobs) in zip(ours, expected, strict=True):
        assert logprobs[0] == pytest.approx(their_logprobs[0], abs=0.15)
