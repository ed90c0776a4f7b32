"""The real vLLM engine on a packed cache: the pool's arithmetic, and the same answers as through Transformers.

A change of 1e-6 in a key (another matrix product, another batch size) now and then moves a coordinate over a codebook
boundary, and in a deep model that one code moves logits by tenths: on the demo model Transformers disagrees with
itself about as often when only the batch size changes. Two-layer models are too shallow for that and must agree token
by token.
"""

from __future__ import annotations

import math

import pytest
import torch

vllm = pytest.importorskip("vllm")

from engine import (  # noqa: E402
    ALL_PACKED,
    POOL_BYTES,
    assert_same_answers,
    engine,
    first_difference,
    greedy,
    pool,
    random_prompts,
    through_transformers,
)
from transformers import AutoTokenizer  # noqa: E402

from turboquant.formats import PRESETS  # noqa: E402
from turboquant.key_bias import MissingKeyMeanError  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]

SMOL_LAYERS, SMOL_KV_HEADS, SMOL_HEAD_DIM = 30, 3, 64
TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,",
    "In 1969, humans first",
    "SELECT name FROM users WHERE",
    "To make bread, first",
]
# The most that a flipped code was seen to do to a log-probability of the demo model.
FLIP = 0.7


def tokens_that_fit(slot_bytes: int) -> float:
    return POOL_BYTES / (SMOL_LAYERS * SMOL_KV_HEADS * slot_bytes)


@pytest.mark.matrix(feature="`LLM`: answers as in Transformers, the pool by the formula", shape="SmolLM2-135M")
def test_pool_and_answers_on_the_demo_model(demo_model_dir, one_thread):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    with engine(demo_model_dir, "turboquant3.5", additional_config=ALL_PACKED) as llm:
        tokens, block_size = pool(llm)
        ours = greedy(llm, prompts, 8)
    slot = PRESETS["turboquant3.5"].slot_bytes(SMOL_HEAD_DIM)
    assert 0 <= tokens_that_fit(slot) - tokens < block_size

    theirs = through_transformers(demo_model_dir, prompts, 8)
    same_start = same_tokens = 0
    for text, (tokens, logprobs), (hf_tokens, hf_logprobs, hf_gaps) in zip(TEXTS, ours, theirs, strict=True):
        first = first_difference(tokens, hf_tokens)
        print(f"{text!r}: first difference {first}, gap {None if first is None else hf_gaps[first]}")
        assert first is None or hf_gaps[first] < FLIP
        same_start += math.isclose(logprobs[0], hf_logprobs[0], abs_tol=1e-3)
        same_tokens += first is None
    assert same_start >= 5
    assert same_tokens >= 6


def test_pool_of_the_uncompressed_cache(demo_model_dir):
    with engine(demo_model_dir, "auto") as llm:
        tokens, block_size = pool(llm)
    assert 0 <= tokens_that_fit(2 * SMOL_HEAD_DIM * 4) - tokens < block_size


@pytest.mark.matrix(feature="preset {fmt}", shape="llama")
@pytest.mark.parametrize("fmt", [*PRESETS, "turboquant35"])
def test_every_preset_serves_and_agrees_with_transformers(llama_dir, fmt):
    prompts = random_prompts(1, 6, 41, 130, 200, 7, 33, 64)
    with engine(llama_dir, fmt, additional_config=ALL_PACKED, skip_tokenizer_init=True) as llm:
        ours = greedy(llm, prompts, 12)
    assert_same_answers(ours, through_transformers(llama_dir, prompts, 12, fmt))


@pytest.mark.matrix(feature="chunked prefill", shape="llama")
@pytest.mark.matrix(feature="prefix caching", shape="llama")
def test_chunked_prefill_and_prefix_hits_change_nothing(llama_dir):
    prompts = random_prompts(200, 300)
    shared = [prompts[1][:256] + tail for tail in ([5, 6, 7], [8, 9])]
    with engine(llama_dir, "turboquant3.5", additional_config=ALL_PACKED, skip_tokenizer_init=True) as llm:
        whole = greedy(llm, prompts + shared, 12)
    with engine(
        llama_dir, "turboquant3.5", additional_config=ALL_PACKED, skip_tokenizer_init=True,
        enable_prefix_caching=True, max_num_batched_tokens=64, max_num_seqs=4,
    ) as llm:  # fmt: skip
        chunked = greedy(llm, prompts + shared, 12)
        hits = greedy(llm, prompts + shared, 12)
    for reference, other, again in zip(whole, chunked, hits, strict=True):
        assert other[0] == reference[0] == again[0]
        assert other[1] == pytest.approx(reference[1], abs=1e-3)
        assert again[1] == pytest.approx(reference[1], abs=1e-3)


def test_exact_prefill_is_closer_to_the_exact_cache(llama_dir):
    prompts = random_prompts(60, 61, 62, 63)
    logprobs = {}
    for name, fmt, options in (
        ("exact", "auto", {}),
        ("fresh", "turboquant2.5", {"turboquant": {"prefill_reads": "exact"}}),
        ("packed", "turboquant2.5", ALL_PACKED),
    ):
        with engine(llama_dir, fmt, additional_config=options, skip_tokenizer_init=True) as llm:
            logprobs[name] = [out[1][0] for out in greedy(llm, prompts, 1)]
    # The first token comes from the prefill alone, which read nothing but exact values.
    assert logprobs["fresh"] == pytest.approx(logprobs["exact"], abs=1e-3)
    assert logprobs["packed"] != pytest.approx(logprobs["exact"], abs=1e-2)


@pytest.mark.matrix(feature="K bias", shape="qwen2")
@pytest.mark.matrix(feature="K bias with key_mean=none", shape="qwen2", verdict="refused")
def test_key_bias_is_the_mean_and_cannot_be_forgone(qwen2_dir):
    prompts = random_prompts(6, 41, 200)
    with engine(qwen2_dir, "turboquant3.5", additional_config=ALL_PACKED, skip_tokenizer_init=True) as llm:
        ours = greedy(llm, prompts, 12)
    for (tokens, logprobs), (hf_tokens, hf_logprobs, _) in zip(
        ours, through_transformers(qwen2_dir, prompts, 12), strict=True
    ):
        assert tokens == hf_tokens
        assert logprobs == pytest.approx(hf_logprobs, abs=1e-3)
    refused = {"turboquant": {"key_mean": "none"}}
    with (
        pytest.raises(MissingKeyMeanError, match=r"layers\.0\.self_attn.*key_mean='none'"),
        engine(qwen2_dir, "turboquant3.5", additional_config=refused, skip_tokenizer_init=True),
    ):
        pass


@pytest.mark.matrix(feature="attention", shape="qwen3.5 MoE hybrid (GDN + attention)")
def test_hybrid_of_gated_delta_net_and_attention(qwen35_moe_dir):
    """Qwen3.5's shape: 3 linear-attention layers to 1 of attention, head_dim 256, 2 KV heads, GQA 8, experts."""
    prompts = random_prompts(41, 201, 150)
    with engine(
        qwen35_moe_dir, "turboquant3.5", dtype="bfloat16", additional_config=ALL_PACKED, skip_tokenizer_init=True
    ) as llm:
        ours = greedy(llm, prompts, 8)
    theirs = through_transformers(qwen35_moe_dir, prompts, 8, dtype=torch.bfloat16)
    for (_, logprobs), (_, hf_logprobs, _) in zip(ours, theirs, strict=True):
        # bfloat16 on both sides, with other roundings; a broken cache is off by whole nats.
        assert logprobs[0] == pytest.approx(hf_logprobs[0], abs=0.15)
