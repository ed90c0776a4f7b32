"""How far a model moves when its cache is compressed: KL divergence from the same model with an exact cache.

Teacher-forced: one forward pass a context, every key and value that a query reads taken from the packed cache, its own
token's included (but for an exact window, if there is one). That is what decoding from this cache would see at each
position, all at once.

    KL_i = Σ_v p_i(v) · log(p_i(v) / q_i(v))      p: exact cache, q: compressed, at position i, over the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from turboquant.cache import turboquant_cache
from turboquant.formats import KVFormat
from turboquant.window import window_size

ROWS = 256  # positions whose whole-vocabulary distributions are compared at once


@dataclass(frozen=True)
class Divergence:
    """Figures over all scored positions.

    Attributes:
        kl_mean, kl_median, kl_p99, kl_max: of KL, in nats.
        top1: share of positions where both models have the same most likely token, 0 to 1.
        delta_ppl: relative change of perplexity, 0.01 for one per cent more.
        bits_per_element: of the packed tokens, scales included, measured from the bytes that the cache holds.
        bits_per_element_with_window: of all that it holds at this context length: exact tokens in the model's dtype,
            too.
        window: how many of the newest tokens were read exactly, the first few with them; 0 for none.
        kv_cache_dtype, num_tokens, context_length: what was measured.
    """

    kl_mean: float
    kl_p99: float
    top1: float
    delta_ppl: float
    bits_per_element: float
    kl_median: float
    kl_max: float
    bits_per_element_with_window: float
    window: int
    kv_cache_dtype: str
    num_tokens: int
    context_length: int


def divergence(
    model_dir: Path | str,
    kv_cache_dtype: str,
    text: str,
    *,
    num_tokens: int,
    context_length: int = 1024,
    dtype: str = "float32",
    key_mean: str = "auto",
    window: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Divergence:
    """Measure `kv_cache_dtype` on the model in `model_dir`.

    Args:
        text: what to read; its first `num_tokens` tokens are cut into contexts.
        num_tokens: tokens to score, rounded down to whole contexts (one shorter context if fewer than one).
        context_length: tokens in one forward pass.
        dtype: the model's, "float32", "bfloat16" or "float16".
        key_mean, window: see `turboquant.cache.turboquant_cache`.
        on_progress: called with contexts done and in all.

    Raises:
        ValueError: an unknown format or dtype, a text too short, or a model that cannot have such a cache.
    """
    fmt = KVFormat.from_name(kv_cache_dtype)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r} is not known: allowed are float32, bfloat16, float16.")
    contexts = tokenize(model_dir, text, num_tokens, context_length)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    window = window_size(window)
    rows, bits = [], (0.0, 0.0)
    for done, context in enumerate(contexts):
        on_progress(done, len(contexts))
        scores, bits = _score_context(model, fmt, context[None], key_mean, window)
        rows.append(scores)
    on_progress(len(contexts), len(contexts))
    kl, same_top, exact_nll, packed_nll = torch.cat(rows, dim=1)
    return Divergence(
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        top1=same_top.mean().item(),
        delta_ppl=(packed_nll.nanmean() - exact_nll.nanmean()).expm1().item(),
        bits_per_element=bits[0],
        kl_median=kl.median().item(),
        kl_max=kl.max().item(),
        bits_per_element_with_window=bits[1],
        window=window,
        kv_cache_dtype=fmt.name,
        num_tokens=contexts.numel(),
        context_length=contexts.shape[1],
    )


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


@torch.inference_mode()
def _score_context(model: PreTrainedModel, fmt: KVFormat, ids: torch.Tensor, key_mean: str, window: int):
    """Of one context [1, T]: float64 [4, T] (KL, same top-1, exact and packed NLL of the next token), and the bits."""
    ids = ids.to(model.device)
    exact = model(input_ids=ids).logits[0]
    with turboquant_cache(model, fmt, key_mean=key_mean, window=window) as session:
        packed = model(input_ids=ids).logits[0]
    elements = sum(2 * layer.params.head_dim * layer.encoded.key_scales.numel() for layer in session.layers)
    targets = torch.cat((ids[0, 1:], ids.new_full((1,), -1)))
    tiles = zip(exact.split(ROWS), packed.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([_compare(*tile) for tile in tiles], dim=1).cpu(), (
        8 * session.packed_nbytes / elements,
        8 * session.nbytes / elements,
    )


def _compare(exact: torch.Tensor, packed: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """float64 [4, rows] from two sets of logits [rows, vocabulary] and the next tokens [rows] (-1: there is none)."""
    log_p, log_q = exact.double().log_softmax(-1), packed.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same_top = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    last = targets.clamp(min=0)[:, None]
    nll = [-x.gather(-1, last).squeeze(-1).masked_fill(targets < 0, torch.nan) for x in (log_p, log_q)]
    return torch.stack((kl, same_top, *nll))
