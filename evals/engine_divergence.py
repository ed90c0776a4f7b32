"""The divergence task on the real vLLM engine, several caches in one run against the same exact engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig

from turboquant.artifact import config_fingerprint
from turboquant.evals.candidates import Candidate
from turboquant.evals.divergence import Divergence
from turboquant.evals.scores import compare_states, next_tokens, summary
from turboquant.evals.vllm_backend import Reader, engine, reading_back
from turboquant.formats import BF16_BYTES

EXACT = Candidate(None, 0)


def engine_divergence(
    model_dir: Path | str,
    candidates: list[Candidate],
    texts: dict[str, torch.Tensor],
    *,
    dtype: str = "float32",
    key_mean: str = "auto",
    kv_cache_memory_bytes: int = 1 << 30,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Iterator[tuple[str, Divergence]]:
    """Measure caches by what the engine makes of whole prompts in strict mode.

    Args:
        candidates: formats of ours are served; rivals are simulated in an engine with an exact cache.
        texts: token ids int64 [num_contexts, context_length] by name.
        dtype: the model's.
        key_mean: the engine's option of this name.
        kv_cache_memory_bytes: pool of each engine.
        on_progress: told what is being run.

    Yields:
        (name of the text, figures) for every candidate and text.

    Raises:
        ValueError: a rival with a window, or one that is no function of single tokens: Transformers measures these.
    """
    windowed = [c.label for c in candidates if c.simulated and c.window]
    if windowed:
        raise ValueError(f"{', '.join(windowed)}: vLLM gives a window to our formats only: use --backend hf for these.")
    grouped = [c.label for c in candidates if c.simulated and not c.cache.by_token]
    if grouped:
        raise ValueError(f"{', '.join(grouped)}: the engine simulates token by token and all layers: use --backend hf.")
    head_dim = config_fingerprint(AutoConfig.from_pretrained(model_dir).get_text_config())["head_dim"]
    exact_bytes = getattr(torch, dtype).itemsize
    settings = {"dtype": dtype, "kv_cache_memory_bytes": kv_cache_memory_bytes}
    exact = {}
    for candidate in (EXACT, *candidates):
        on_progress(candidate.label)
        for name, contexts, reader in _served(model_dir, candidate, texts, settings, key_mean):
            states = [reader.states(context) for context in contexts]
            if candidate is EXACT:
                exact[name] = states
                continue
            rows = [
                compare_states(p, q, next_tokens(ids)[:-1], reader.logits)
                for p, q, ids in zip(exact[name], states, contexts, strict=True)
            ]
            length = contexts.shape[1]
            yield (
                name,
                Divergence(
                    **summary(torch.cat(rows, dim=1)),
                    bits_per_element=candidate.bits_per_element(head_dim, exact_bytes),
                    bits_per_element_with_window=candidate.bits_with_window(head_dim, exact_bytes, length),
                    bits_at_16=candidate.bits_with_window(head_dim, BF16_BYTES, length),
                    window=candidate.window,
                    kv_cache_dtype=candidate.name,
                    num_tokens=contexts.numel(),
                    context_length=length,
                    backend="vllm",
                    simulated=candidate.simulated,
                ),
            )


def _served(model_dir, candidate: Candidate, texts: dict[str, torch.Tensor], settings: dict, key_mean: str):
    """(name, contexts, reader) of every text, in one engine."""
    ours = candidate.cache is not None and not candidate.simulated
    options = {"window": candidate.window, "prefill_reads": "packed", "key_mean": key_mean}
    length = max(contexts.shape[1] for contexts in texts.values()) + 1
    with (
        reading_back(candidate.cache if candidate.simulated else None),
        engine(
            model_dir, candidate.name if ours else "auto", max_model_len=length,
            additional_config={"turboquant": options} if ours else {}, **settings,
        ) as llm,
    ):  # fmt: skip
        reader = Reader(llm)
        for name, contexts in texts.items():
            yield name, contexts, reader
