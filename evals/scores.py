"""How far one model's next-token distributions are from another's, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

ROWS = 256  # positions whose whole-vocabulary distributions are compared at once
TOP = 5
BUCKETS = 8


def compare(exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Score logits against exact ones.

    Args:
        exact, other: [T, vocabulary].
        targets: [T] int64, the next tokens; -1 where there is none.

    Returns:
        float64 [5, T] on the CPU: KL in nats, same top-1 (0 or 1), exact and other NLL of the target (NaN without one),
        share of the exact five most likely tokens that are among the other's five.
    """
    tiles = zip(exact.split(ROWS), other.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([_compare(*tile) for tile in tiles], dim=1).cpu()


def compare_states(
    exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor, readout: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """As `compare`, from final hidden states [T, hidden] and the model's own way from those to logits."""
    tiles = zip(exact.split(ROWS), other.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([_compare(readout(p), readout(q), target) for p, q, target in tiles], dim=1).cpu()


def next_tokens(ids: torch.Tensor) -> torch.Tensor:
    """[T] token ids to [T] targets: the token behind each, -1 behind the last."""
    return torch.cat((ids[1:], ids.new_full((1,), -1)))


def summary(scores: torch.Tensor) -> dict[str, float]:
    """Figures over all positions of float64 [5, n] scores."""
    kl, same_top, exact_nll, other_nll, same_top5 = scores
    return {
        "kl_mean": kl.mean().item(),
        "kl_median": kl.median().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "kl_max": kl.max().item(),
        "top1": same_top.mean().item(),
        "top5": same_top5.mean().item(),
        "delta_ppl": (other_nll.nanmean() - exact_nll.nanmean()).expm1().item(),
    }


def by_position(values: torch.Tensor, num_contexts: int, buckets: int = BUCKETS) -> list[float]:
    """Means over equal ranges of the context.

    Args:
        values: [n], one context behind the other.
        num_contexts: equally long ones.
        buckets: how many ranges; fewer if a context has fewer positions.

    Returns:
        One mean for each range, from the start of the contexts to their end.
    """
    rows = values.double().view(num_contexts, -1)
    return [part.mean().item() for part in rows.tensor_split(min(buckets, rows.shape[1]), dim=1)]


def _compare(exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_p, log_q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    top_p, top_q = (x.topk(min(TOP, x.shape[-1])).indices for x in (log_p, log_q))
    same_top = (top_p[:, 0] == top_q[:, 0]).double()
    same_top5 = (top_p[:, :, None] == top_q[:, None]).any(-1).double().mean(-1)
    last = targets.clamp(min=0)[:, None]
    nll = [-x.gather(-1, last).squeeze(-1).masked_fill(targets < 0, torch.nan) for x in (log_p, log_q)]
    return torch.stack((kl, same_top, *nll, same_top5))
