"""A real vLLM engine inside the test process, and the pieces that engine tests share."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from turboquant.cache import turboquant_cache
from turboquant.evals.vllm_backend import running

# One process: errors at start-up keep their type, and a boot takes seconds. `vllm serve` is tested as it is served.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

POOL_BYTES = 64 << 20
ALL_PACKED = {"turboquant": {"prefill_reads": "packed", "window": 0}}


def engine(model, kv_cache_dtype: str, **overrides):
    """A context manager: an `LLM` on `model`, taken down at the end of the block."""
    settings = {
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory_bytes": POOL_BYTES,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
    }
    return running(model, kv_cache_dtype=kv_cache_dtype, **{**settings, **overrides})


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


def greedy_with_gaps(
    llm, prompts: list[list[int]], max_tokens: int
) -> list[tuple[list[int], list[float], list[float]]]:
    """As `greedy`, and the gap to the second-best token at every step: what a reference must tell."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    results = []
    for output in outputs:
        best = [sorted((at.logprob for at in step.values()), reverse=True) for step in output.outputs[0].logprobs]
        results.append((list(output.outputs[0].token_ids), [b[0] for b in best], [b[0] - b[1] for b in best]))
    return results


def _tokens_and_logprobs(completion) -> tuple[list[int], list[float]]:
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return list(completion.token_ids), [step[token].logprob for token, step in steps]


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [[0, *torch.randint(2, 512, (n - 1,), generator=generator).tolist()] for n in lengths]


def through_transformers(path, prompts, max_tokens, fmt="turboquant3.5", dtype=torch.float32, window=0):
    """Greedy continuations with our cache: tokens, log-probability of each, gap to the second-best token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with turboquant_cache(model, fmt, window=window):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        top = torch.stack(out.logits)[:, 0].float().log_softmax(-1).topk(2).values
        results.append((out.sequences[0, len(prompt) :].tolist(), top[:, 0].tolist(), (top[:, 0] - top[:, 1]).tolist()))
    return results


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)


def assert_same_answers(ours: list, theirs: list, tolerance: float = 1e-3) -> None:
    """Answers of `greedy`, and of a reference with gaps: equal, or different first where two tokens nearly tie."""
    for (tokens, logprobs), (hf_tokens, hf_logprobs, gaps) in zip(ours, theirs, strict=True):
        first = first_difference(tokens, hf_tokens)
        assert first is None or gaps[first] < tolerance
        same = len(tokens) if first is None else first
        assert logprobs[:same] == pytest.approx(hf_logprobs[:same], abs=tolerance)
