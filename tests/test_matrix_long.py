"""Long contexts: a real model stretched by YaRN, and the launch line of a million tokens as a checked recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engine import engine, greedy
from transformers import AutoTokenizer

from turboquant.formats import PRESETS
from turboquant.text import load_text
from turboquant.vllm.summary import layer_specs

pytestmark = [pytest.mark.engine, pytest.mark.engine_full]

FMT = "turboquant3.5"
YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 8192}
MILLION = 1_010_000
# Qwen's own recipe for a million tokens, in the text part of its config.
MILLION_OVERRIDES = {
    "text_config": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "factor": 4.0,
            "original_max_position_embeddings": 262144,
        }
    }
}


@pytest.mark.matrix(feature="YaRN x4 to 32k tokens, a prompt of 8,400", shape="SmolLM2-135M")
def test_a_prompt_beyond_the_trained_length(demo_model_dir, record_property):
    ids = AutoTokenizer.from_pretrained(demo_model_dir)(load_text("pydoc")[:60_000]).input_ids[:8400]
    settings = {
        "hf_overrides": {"rope_parameters": YARN, "max_position_embeddings": 32768},
        "max_model_len": 32768,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 2 << 30,
    }
    found = {}
    for fmt in ("auto", FMT):
        with engine(demo_model_dir, fmt, **settings) as llm:
            ((tokens, logprobs),) = greedy(llm, [ids], 12)
        found[fmt] = (tokens, logprobs)
    same = sum(a == b for a, b in zip(found["auto"][0], found[FMT][0], strict=True))
    record_property("equal_greedy_tokens_of_12", same)
    assert found[FMT][1][0] == pytest.approx(found["auto"][1][0], abs=0.5)
    assert same >= 3


@pytest.mark.matrix(
    feature="launch line with YaRN to 1,010,000 tokens: config, pages, pool", shape="qwen3.5-35b-a3b, cut down"
)
def test_a_million_tokens_fit_as_planned(tmp_path, record_property, monkeypatch):
    """Four of its 40 layers, 8 of its 256 experts and a small vocabulary, without weights: sizes, not answers."""
    config = json.loads((Path(__file__).parent / "data" / "qwen3.5-35b-a3b.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "layer_types": text["layer_types"][:4], "num_experts": 8, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**text, "architectures": ["Qwen3_5MoeForCausalLM"]}))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # part of Qwen's recipe
    memory = 1 << 30
    with engine(
        tmp_path, FMT, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=MILLION,
        hf_overrides=MILLION_OVERRIDES["text_config"], kv_cache_memory_bytes=memory, max_num_batched_tokens=2048,
        enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        settings = llm.llm_engine.vllm_config
        specs = layer_specs(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config)
        tokens = settings.cache_config.kv_cache_size_tokens
        greedy(llm, [[5, 6, 7]], 2)
    assert settings.model_config.max_model_len == MILLION
    assert settings.model_config.hf_text_config.rope_parameters["factor"] == 4.0
    (packed,) = [spec for name, spec in specs.items() if name.endswith(".attn")]
    slot = PRESETS[FMT].slot_bytes(256)
    assert slot == 228
    assert packed.real_page_size_bytes == packed.block_size * text["num_key_value_heads"] * slot
    assert packed.page_size_bytes <= 1.05 * packed.real_page_size_bytes
    # One attention layer here; three of state, the window and rounding take a few pages a sequence.
    by_bytes = memory / (text["num_key_value_heads"] * slot)
    record_property(
        "tokens_that_fit_in_1_GiB", f"{tokens:,} of {by_bytes:,.0f} by bytes alone, blocks of {packed.block_size}"
    )
    assert MILLION < tokens < by_bytes
