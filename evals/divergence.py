"""How far a model moves when its cache is compressed: KL divergence from the same model with an exact cache.

Teacher-forced: one forward pass a context, every key and value that a query reads taken from the packed cache, its own
token's included (but for an exact window, if there is one). That is what decoding from this cache would see at each
position, all at once.

    KL_i = Σ_v p_i(v) · log(p_i(v) / q_i(v))      p: exact cache, q: compressed, at position i, over the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from turboquant.cache import turboquant_cache
from turboquant.evals.candidates import Candidate
from turboquant.evals.hf_rivals import rival_cache
from turboquant.evals.results import interval
from turboquant.evals.rivals import Rival
from turboquant.evals.scores import compare, next_tokens, summary
from turboquant.formats import BF16_BYTES

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Divergence:
    """Figures over all scored positions.

    Attributes:
        kl_mean, kl_median, kl_p99, kl_max: of KL, in nats.
        top1: share of positions where both models have the same most likely token, 0 to 1.
        top5: share of the exact model's five most likely tokens that are among the other's five, 0 to 1.
        delta_ppl: relative change of perplexity, 0.01 for one per cent more.
        bits_per_element: of the packed tokens, scales included, measured from the bytes that the cache holds.
        bits_per_element_with_window: of all that it holds at this context length: exact tokens in the model's dtype,
            too.
        bits_at_16: the same with exact tokens of 16 bits an element, as models are served, whatever this one runs in.
        window: how many of the newest tokens were read exactly, the first few with them; 0 for none.
        kv_cache_dtype, num_tokens, context_length: what was measured.
        backend: "hf" for Transformers, "vllm" for the engine.
        simulated: K and V were quantised and dequantised in an exact cache, in place of being kept in this format.
        kl_interval: 95 % bootstrap interval of kl_mean; None for too few positions.
        scores: float64 [5, n], see `scores.compare`.
    """

    kl_mean: float
    kl_p99: float
    top1: float
    top5: float
    delta_ppl: float
    bits_per_element: float
    kl_median: float
    kl_max: float
    bits_per_element_with_window: float
    bits_at_16: float
    window: int
    kv_cache_dtype: str
    num_tokens: int
    context_length: int
    backend: str = "hf"
    simulated: bool = False
    kl_interval: tuple[float, float] | None = None
    scores: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def figures(self) -> dict[str, Any]:
        """All but the scores, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "scores"}


def divergence(
    model: PreTrainedModel,
    candidate: Candidate,
    contexts: torch.Tensor,
    *,
    key_mean: str = "auto",
    score_from: int = 0,
    position_offset: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Divergence:
    """Measure a cache on a Transformers model.

    Args:
        contexts: token ids int64 [num_contexts, context_length], each read in one forward pass.
        key_mean: see `turboquant.cache.turboquant_cache`.
        score_from: first position of each context that counts.
        position_offset: added to all positions; RoPE being relative, the exact model does not mind.
        on_progress: called with contexts done and in all.

    Raises:
        ValueError: a model that cannot have such a cache.
    """
    rows, bits = [], (0.0, 0.0, 0.0)
    for done, context in enumerate(contexts):
        on_progress(done, len(contexts))
        scores, bits = _score_context(model, candidate, context[None], key_mean, position_offset)
        rows.append(scores[:, score_from:])
    on_progress(len(contexts), len(contexts))
    scores = torch.cat(rows, dim=1)
    return Divergence(
        **summary(scores),
        kl_interval=interval(scores[0]),
        scores=scores,
        bits_per_element=bits[0],
        bits_per_element_with_window=bits[1],
        bits_at_16=bits[2],
        window=candidate.window,
        kv_cache_dtype=candidate.name,
        num_tokens=contexts[:, score_from:].numel(),
        context_length=contexts.shape[1],
        simulated=candidate.simulated,
    )


def load_model(model_dir: Path | str, dtype: str) -> PreTrainedModel:
    """A model in "float32", "bfloat16" or "float16".

    Raises:
        ValueError: another dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known: allowed are {', '.join(DTYPES)}.")
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()


def tokenize(model_dir: Path | str, text: str, num_tokens: int, context_length: int) -> torch.Tensor:
    """The first tokens of a text, cut into contexts: int64 [num_contexts, context_length].

    Raises:
        ValueError: the text has fewer tokens than asked for.
    """
    context_length = min(context_length, num_tokens)
    tokens = AutoTokenizer.from_pretrained(model_dir)(text, return_tensors="pt", verbose=False).input_ids[0]
    usable = num_tokens // context_length * context_length
    if len(tokens) < usable:
        raise ValueError(f"the text has {len(tokens)} tokens, {usable} are needed: give a longer one or fewer tokens.")
    return tokens[:usable].view(-1, context_length)


def repeated(contexts: torch.Tensor) -> torch.Tensor:
    """Contexts [n, T] whose second half is their first half again: what is copied was read T / 2 tokens before."""
    half = contexts[:, : contexts.shape[1] // 2]
    return torch.cat((half, half), dim=1)


@torch.inference_mode()
def _score_context(model: PreTrainedModel, candidate: Candidate, ids: torch.Tensor, key_mean: str, offset: int):
    """Scores of one context [1, T] (`scores.compare`); bits per element packed, with exact tokens, with these at 16."""
    ids = ids.to(model.device)
    positions = torch.arange(offset, offset + ids.shape[1], device=ids.device)[None]
    exact = model(input_ids=ids, position_ids=positions).logits[0]
    if candidate.cache is None:
        again = model(input_ids=ids, position_ids=positions).logits[0]
        bits = 8.0 * model.dtype.itemsize
        return compare(exact, again, next_tokens(ids[0])), (bits, bits, 8.0 * BF16_BYTES)
    with holding(model, candidate, key_mean) as session:
        packed = model(input_ids=ids, position_ids=positions).logits[0]
    elements = sum(layer.num_elements for layer in session.layers)
    at_16 = session.nbytes - session.exact_nbytes * (1 - BF16_BYTES / model.dtype.itemsize)
    bits = tuple(8 * nbytes / elements for nbytes in (session.packed_nbytes, session.nbytes, at_16))
    return compare(exact, packed, next_tokens(ids[0])), bits


def holding(model: PreTrainedModel, candidate: Candidate, key_mean: str = "auto"):
    """A context manager in which the model keeps its cache as the candidate does; gives the session, None if exact."""
    if candidate.cache is None:
        return nullcontext()
    if isinstance(candidate.cache, Rival):
        return rival_cache(model, candidate.cache, candidate.window)
    return turboquant_cache(model, candidate.cache, key_mean=key_mean, window=candidate.window)
