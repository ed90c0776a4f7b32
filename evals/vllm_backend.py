"""The vLLM engine as an instrument: the final hidden states of whole prompts, as its own cache makes them.

The engine runs in this process, one prompt at a time, every prompt in chunks. With `prefill_reads="packed"` each query
reads what a decode step at its position would read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from turboquant.evals.rivals import Rival

CHUNK = 1024


@contextmanager
def running(model_dir: Path | str, **settings: Any) -> Iterator:
    """vLLM's `LLM` with these settings, taken down at the end of the block."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(str(model_dir), **settings)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def engine(model_dir: Path | str, kv_cache_dtype: str, *, dtype: str, max_model_len: int, **settings: Any):
    """A context manager: the engine in this process, one prompt at a time."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return running(
        model_dir, kv_cache_dtype=kv_cache_dtype, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1,
        max_num_batched_tokens=CHUNK, enable_prefix_caching=False, skip_tokenizer_init=True,
        distributed_executor_backend="uni", disable_log_stats=True, enforce_eager=True, **settings,
    )  # fmt: skip


class Reader:
    """Reads an engine's model: hidden states of prompts, and the logits that it makes of such states."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._seen: list[torch.Tensor] = []
        self._readout: Callable[[torch.Tensor], torch.Tensor] | None = None
        llm.apply_model(self._watch)

    def _watch(self, model: torch.nn.Module) -> None:
        self._readout = model.compute_logits

        def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
            self._seen.append(hidden_states.detach().clone())
            return self._readout(hidden_states, *args, **kwargs)

        model.compute_logits = compute_logits

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._readout(states)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] token ids to the final hidden states [T - 1, hidden] of all positions but the last.

        Raises:
            RuntimeError: vLLM did not compute the prompt as expected.
        """
        from vllm import SamplingParams

        self._seen.clear()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._llm.generate([{"prompt_token_ids": ids.tolist()}], params, use_tqdm=False)
        # One row is the next token's, computed at the end of each chunk.
        states = torch.cat([rows for rows in self._seen if len(rows) > 1])
        if len(states) != len(ids) - 1:
            raise RuntimeError(f"vLLM scored {len(states)} of {len(ids) - 1} positions of a prompt.")
        return states


@contextmanager
def reading_back(rival: Rival | None) -> Iterator[None]:
    """Let every attention layer store and read what a rival's cache would return, in an engine with an exact cache."""
    if rival is None:
        yield
        return
    from vllm.model_executor.layers.attention import Attention

    forward = Attention.forward

    def forward_read_back(self, query, key, value, *args, **kwargs):
        heads = (-1, self.num_kv_heads, self.head_size)
        read = rival.read_back(key.reshape(heads), value.reshape(heads))
        return forward(
            self, query, *(x.reshape(y.shape) for x, y in zip(read, (key, value), strict=True)), *args, **kwargs
        )

    Attention.forward = forward_read_back
    try:
        yield
    finally:
        Attention.forward = forward
