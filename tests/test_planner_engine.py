"""The plan's pool is the engine's: the very number that vLLM reports, on four shapes, hybrids among them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engine import POOL_BYTES, engine

from turboquant.planner.plan import FormatPlan, Wish, make_plan
from turboquant.planner.serving import Serving
from turboquant.planner.source import load

pytestmark = pytest.mark.engine

# Model, cache dtype, model dtype (vLLM's GDN wants 16 bits on CPUs), prefix caching.
CASES = {
    "dense, packed": ("llama_dir", "turboquant3.5", "float32", False),
    "biased, auto": ("qwen2_dir", "auto", "float32", False),
    "sliding, auto": ("gemma3_dir", "auto", "float32", False),
    "sliding, packed": ("gemma3_dir", "turboquant3.5", "float32", False),
    "hybrid, auto": ("qwen35_moe_dir", "auto", "bfloat16", True),
    "hybrid, packed": ("qwen35_moe_dir", "turboquant3.5", "bfloat16", True),
}


def planned(model, kv_cache_dtype: str, dtype: str, prefix_caching: bool, config) -> FormatPlan:
    """With the settings that the engine chose by itself: batch, steps in flight, dtype of recurrent states."""
    ssm = config.cache_config.mamba_ssm_cache_dtype
    serving = Serving(
        dtype, config.model_config.max_model_len, device="cpu", prefix_caching=prefix_caching,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        batches_in_flight=config.max_concurrent_batches, mamba_ssm_dtype=None if ssm == "auto" else ssm,
    )  # fmt: skip
    (of_format,) = make_plan(load(str(model)), serving, Wish((kv_cache_dtype,), pool=POOL_BYTES)).formats
    return of_format


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_what_vllm_reports(case, request):
    """Equal: kv_cache_size_tokens, which the log calls "KV cache size", and the log's "Maximum concurrency"."""
    fixture, kv_cache_dtype, dtype, prefix_caching = CASES[case]
    model = request.getfixturevalue(fixture)
    options = {"dtype": dtype, "enable_prefix_caching": prefix_caching, "skip_tokenizer_init": True}
    with engine(model, kv_cache_dtype, **options) as llm:
        config = llm.llm_engine.vllm_config
        cache = config.cache_config
        of_format = planned(model, kv_cache_dtype, dtype, prefix_caching, config)
        assert of_format.tokens_that_fit == cache.kv_cache_size_tokens
        assert of_format.paging.concurrency(POOL_BYTES) == pytest.approx(cache.kv_cache_max_concurrency)
        assert POOL_BYTES // of_format.paging.block_bytes == cache.num_gpu_blocks
        assert of_format.paging.starts(POOL_BYTES)


def test_what_the_plan_says_does_not_start_does_not(llama_dir):
    """One sequence at its peak, and the block that is never given out: one block fewer, and vLLM refuses."""
    serving = Serving("float32", 512, device="cpu", batches_in_flight=1)
    (of_format,) = make_plan(load(str(llama_dir)), serving, Wish(("turboquant3.5",), pool=POOL_BYTES)).formats
    pool = of_format.paging.peak_blocks * of_format.paging.block_bytes
    assert not of_format.paging.starts(pool)
    assert of_format.paging.starts(pool + of_format.paging.block_bytes)
    with (
        pytest.raises(ValueError, match="max seq len"),
        engine(llama_dir, "turboquant3.5", kv_cache_memory_bytes=pool, skip_tokenizer_init=True),
    ):
        pass
