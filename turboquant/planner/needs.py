"""What a pool of a wanted size takes: bytes by cache dtype, and which GPUs hold it, alone or several together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from turboquant.planner import PlanError
from turboquant.planner.gpus import GPUS, Gpu
from turboquant.planner.plan import Plan, make_plan
from turboquant.planner.serving import Serving

GIB = 2**30
DEVICES = (1, 2, 4, 8)


def default_batch(gpu: Gpu | None) -> tuple[int, int]:
    """vLLM's max_num_batched_tokens and max_num_seqs for `vllm serve` (EngineArgs.get_batch_defaults)."""
    if gpu is None or gpu.memory_bytes < 70 * GIB or gpu.name.startswith("A100"):
        return 2048, 256
    return (16384 if gpu.memory_bytes >= 160 * GIB else 8192), 1024


def pool_needs(plan: Plan, tokens: int) -> dict[str, Any]:
    """By cache dtype: bytes of a pool that vLLM reports as `tokens`, and devices of each GPU; None for more than 8."""
    rows = []
    for of_format in plan.formats:
        paging = of_format.paging
        blocks = math.ceil(tokens / plan.serving.max_model_len * paging.counted_blocks)
        rows.append(
            {
                "kv_cache_dtype": of_format.cache.name,
                "pool_bytes": max(blocks, paging.peak_blocks + 1) * paging.block_bytes,
                "devices": {name: _devices(plan, of_format.cache.name, tokens, gpu) for name, gpu in GPUS.items()},
            }
        )
    return {"tokens": tokens, "formats": rows}


def _devices(plan: Plan, kv_cache_dtype: str, tokens: int, gpu: Gpu) -> int | None:
    batched, sequences = default_batch(gpu)
    wish = replace(plan.wish, kv_cache_dtypes=(kv_cache_dtype,), gpu=gpu, memory=None, pool=None, contexts=())
    for tp in DEVICES:
        serving: Serving = replace(plan.serving, tp=tp, max_num_batched_tokens=batched, max_num_seqs=sequences)
        try:
            (of_format,) = make_plan(plan.source, serving, wish).formats
        except PlanError:  # too small, or heads that do not divide
            continue
        if of_format.paging.starts(of_format.pool) and of_format.tokens_that_fit >= tokens:
            return tp
    return None
