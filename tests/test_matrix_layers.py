"""Layers left exact, and the line in the log that says which are compressed and what that costs."""

from __future__ import annotations

import logging

import models
import pytest

pytest.importorskip("vllm")

from engine import ALL_PACKED, POOL_BYTES, assert_same_answers, engine, greedy, greedy_with_gaps, random_prompts
from test_matrix_shapes import FLIP, FMT, ReadBack

from turboquant.evals.vllm_backend import reading_back
from turboquant.formats import PRESETS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, LENGTH = 8, 2, 64, 4096
EXACT_BYTES, SLOT = 2 * HEAD_DIM * 4, PRESETS[FMT].slot_bytes(HEAD_DIM)


class ReadBackSome(ReadBack):
    """What a cache would return whose layers in `skipped` are exact."""

    def __init__(self, skipped: list[int], num_layers: int = NUM_LAYERS) -> None:
        self.skipped, self.num_layers, self.calls = skipped, num_layers, 0

    def read_back(self, key, value):
        layer, self.calls = self.calls % self.num_layers, self.calls + 1
        return (key, value) if layer in self.skipped else super().read_back(key, value)


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory):
    return models.save_llama(
        tmp_path_factory.mktemp("deep"), num_hidden_layers=NUM_LAYERS, max_position_embeddings=LENGTH
    )


@pytest.fixture
def log():
    """The lines of the plugin's logger. A filter sees them: vLLM takes handlers away when it sets up logging."""
    lines: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.turboquant")
    logger.addFilter(note)
    yield lines
    logger.removeFilter(note)


def tokens_that_fit(llm) -> int:
    return llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens


@pytest.mark.parametrize("skipped", [[0, 7], pytest.param([3], marks=pytest.mark.engine_full)])
@pytest.mark.matrix(
    feature="kv_cache_dtype_skip_layers (the platform's own backend beside ours)", shape="llama, {skipped}"
)
def test_skipped_layers_stay_exact(deep_dir, log, record_property, skipped):
    prompts = random_prompts(1, 6, 41, 130, 201)
    settings = {"skip_tokenizer_init": True, "max_model_len": LENGTH}
    skip = {"kv_cache_dtype_skip_layers": [str(layer) for layer in skipped], **settings}
    with engine(deep_dir, "auto", **settings) as llm, reading_back(ReadBackSome(skipped)):
        expected = greedy_with_gaps(llm, prompts, 8)
        exact_pool = tokens_that_fit(llm)
    with engine(deep_dir, FMT, additional_config=ALL_PACKED, **skip) as llm:
        assert_same_answers(greedy(llm, prompts, 8), expected, tolerance=FLIP)
        pool = tokens_that_fit(llm)
    left = ", ".join(f"model.layers.{layer}.self_attn.attn" for layer in skipped)
    content = NUM_KV_HEADS * ((NUM_LAYERS - len(skipped)) * SLOT + len(skipped) * EXACT_BYTES)
    assert f"{FMT} in {NUM_LAYERS - len(skipped)} of {NUM_LAYERS} attention layers" in "\n".join(log)
    assert f"(in their own precision: {left}); {content:,} bytes a token" in "\n".join(log)
    by_bytes = POOL_BYTES / content
    record_property("tokens_that_fit", f"{pool:,} of {by_bytes:,.0f} by bytes alone; all exact {exact_pool:,}")
    assert pool > 0.8 * by_bytes
    with engine(deep_dir, FMT, enable_prefix_caching=True, max_num_batched_tokens=96, max_num_seqs=4, **skip) as llm:
        first, again = greedy(llm, prompts, 8), greedy(llm, prompts, 8)
    assert [logprobs[0] for _, logprobs in again] == pytest.approx([p[0] for _, p in first], abs=0.3)


@pytest.mark.engine_full
@pytest.mark.matrix(feature="kv_cache_dtype_skip_layers sliding_window", shape="gemma-3")
def test_sliding_layers_stay_exact(gemma3_dir, log):
    prompts, settings = random_prompts(1, 6, 41, 130, 201), {"skip_tokenizer_init": True}
    with engine(gemma3_dir, "auto", **settings) as llm, reading_back(ReadBackSome([0, 1], num_layers=3)):
        expected = greedy_with_gaps(llm, prompts, 8)
    skip = {"kv_cache_dtype_skip_layers": ["sliding_window"], **settings}
    with engine(gemma3_dir, FMT, additional_config=ALL_PACKED, **skip) as llm:
        assert_same_answers(greedy(llm, prompts, 8), expected, tolerance=FLIP)
    assert any(f"{FMT} in 1 of 3 attention layers" in line for line in log)


@pytest.mark.matrix(feature="one line at start-up: preset, layers, bytes, calibration, window, pool", shape="llama")
def test_the_log_says_what_is_served(deep_dir, log):
    with engine(deep_dir, "turboquant3.5", skip_tokenizer_init=True) as llm:
        pool, blocks = tokens_that_fit(llm), llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    (line,) = {line for line in log if "TurboQuant serves" in line}
    assert line == (
        "TurboQuant serves turboquant3.5 in 8 of 8 attention layers (in their own precision: none); "
        "960 bytes a token in 960 bytes of pages (bf16: 4,096); "
        f"calibration: none; exact window: 64 tokens; the pool holds {pool:,} tokens in {blocks:,} blocks."
    )
