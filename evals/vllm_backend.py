"""The vLLM engine as a back end, in this process, one prompt at a time, every prompt in chunks.

Formats of ours are served with `prefill_reads="packed"`: each query reads what a decode step at its position would
read. Rivals are simulated in an engine with an exact cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from turboquant.artifact import config_fingerprint
from turboquant.evals.candidates import Candidate
from turboquant.evals.rivals import Rival
from turboquant.evals.serving import UNBOUNDED, Scored
from turboquant.formats import BF16_BYTES

CHUNK = 1024
POOL_BYTES = 1 << 30


class VllmBackend:
    """The engine on one cache after the other.

    Args:
        model: folder.
        dtype: the model's.
        key_mean: the engine's option of this name.
        max_length: tokens that the model can read.
        kv_cache_memory_bytes: pool of each engine.
        skip_tokenizer_init: for models without a tokenizer, which cannot stop at a text.
    """

    name = "vllm"
    has_states = True

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "float32",
        key_mean: str = "auto",
        max_length: int = UNBOUNDED,
        kv_cache_memory_bytes: int = POOL_BYTES,
        skip_tokenizer_init: bool = False,
    ) -> None:
        self._model, self._dtype, self._key_mean = model, dtype, key_mean
        self.max_length = max_length
        self._engine = {
            "dtype": dtype, "kv_cache_memory_bytes": kv_cache_memory_bytes, "skip_tokenizer_init": skip_tokenizer_init,
        }  # fmt: skip
        self.settings: dict[str, Any] = {"dtype": dtype, "key_mean": key_mean, "position_offset": 0}

    def check(self, candidates: list[Candidate]) -> None:
        windowed = [c.label for c in candidates if c.simulated and c.window]
        if windowed:
            raise ValueError(
                f"{', '.join(windowed)}: vLLM gives a window to our formats only: use --backend hf for these."
            )
        grouped = [c.label for c in candidates if c.simulated and not c.cache.by_token]
        if grouped:
            raise ValueError(
                f"{', '.join(grouped)}: the engine simulates token by token and all layers: use --backend hf."
            )

    def has(self, candidate: Candidate) -> bool:
        return True

    @contextmanager
    def serve(self, candidate: Candidate, max_tokens: int) -> Iterator[VllmServed]:
        if max_tokens >= self.max_length:
            raise ValueError(
                f"vLLM scores {self.max_length - 1} tokens of this model, and {max_tokens} are asked for: ask for "
                "fewer, or use --backend hf."
            )
        ours = candidate.cache is not None and not candidate.simulated
        options = {"window": candidate.window, "prefill_reads": "packed", "key_mean": self._key_mean}
        with (
            reading_back(candidate.cache if candidate.simulated else None),
            engine(
                self._model, candidate.name if ours else "auto", max_model_len=max_tokens + 1,
                additional_config={"turboquant": options} if ours else {}, **self._engine,
            ) as llm,
        ):  # fmt: skip
            yield VllmServed(llm, candidate, self._model, self._dtype)


class VllmServed:
    """An engine that runs; see `serving.Served` for the methods."""

    def __init__(self, llm: Any, candidate: Candidate, model: Path, dtype: str) -> None:
        self._llm, self.candidate = llm, candidate
        self._reader = Reader(llm)
        self._head_dim = config_fingerprint(AutoConfig.from_pretrained(model).get_text_config())["head_dim"]
        self._exact_bytes = getattr(torch, dtype).itemsize

    def hold(self, prefix: list[int]) -> None:
        """Nothing: vLLM reads a prompt anew where it is asked for a prompt's log-probabilities."""

    def score(self, prompt: list[int], continuation: list[int]) -> Scored:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        (output,) = self._llm.generate(
            [{"prompt_token_ids": [*prompt, *continuation]}], params, use_tqdm=False
        )  # fmt: skip
        at = list(zip(continuation, output.prompt_logprobs[len(prompt) :], strict=True))
        return Scored(
            torch.tensor([found[token].logprob for token, found in at], dtype=torch.float64),
            torch.tensor([next(i for i, entry in found.items() if entry.rank == 1) for _, found in at]),
        )

    def generate(
        self, prompt: list[int], max_tokens: int, *, stop: tuple[str, ...] = (), ignore_eos: bool = False
    ) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, stop=list(stop) or None, detokenize=bool(stop)
        )
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Of all positions but the last: [T - 1, hidden]."""
        return self._reader.states(ids)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._reader.logits(states)

    def bits(self, num_tokens: int) -> dict[str, float]:
        of = self.candidate
        return {
            "bits_per_element": of.bits_per_element(self._head_dim, self._exact_bytes),
            "bits_per_element_with_window": of.bits_with_window(self._head_dim, self._exact_bytes, num_tokens),
            "bits_at_16": of.bits_with_window(self._head_dim, BF16_BYTES, num_tokens),
        }


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
        max_num_batched_tokens=CHUNK, enable_prefix_caching=False,
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
