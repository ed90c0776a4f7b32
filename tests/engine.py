"""A real vLLM engine inside the test process, and the pieces that engine tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# One process: errors at start-up keep their type, and a boot takes seconds. `vllm serve` is tested as it is served.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

POOL_BYTES = 64 << 20
ALL_PACKED = {"turboquant": {"prefill_reads": "packed"}}


@contextmanager
def engine(model, kv_cache_dtype: str, **overrides) -> Iterator:
    """An `LLM` on `model`, taken down at the end of the block."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    settings = {
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory_bytes": POOL_BYTES,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
    }
    llm = None
    try:
        llm = LLM(str(model), kv_cache_dtype=kv_cache_dtype, **{**settings, **overrides})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def pool(llm) -> tuple[int, int]:
    """Tokens that the engine says it can hold, and its block size."""
    config = llm.llm_engine.vllm_config.cache_config
    return config.num_gpu_blocks * config.block_size, config.block_size


def greedy(llm, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
    """Greedy continuations: token ids, and the log-probability of each."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [_tokens_and_logprobs(output.outputs[0]) for output in outputs]


def _tokens_and_logprobs(completion) -> tuple[list[int], list[float]]:
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return list(completion.token_ids), [step[token].logprob for token, step in steps]
