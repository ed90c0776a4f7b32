"""How far one model's next-token distributions are from another's, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

ROWS = 256  # positions whose whole-vocabulary distributions are compared at once


def compare(exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Score logits against exact ones.

    Args:
        exact, other: [T, vocabulary].
        targets: [T] int64, the next tokens; -1 where there is none.

    Returns:
        float64 [4, T] on the CPU: KL in nats, same top-1 (0 or 1), exact and other NLL of the target (NaN without one).
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
    """Figures over all positions of float64 [4, n] scores."""
    kl, same_top, exact_nll, other_nll = scores
    return {
        "kl_mean": kl.mean().item(),
        "kl_median": kl.median().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "kl_max": kl.max().item(),
        "top1": same_top.mean().item(),
        "delta_ppl": (other_nll.nanmean() - exact_nll.nanmean()).expm1().item(),
    }


def _compare(exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_p, log_q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same_top = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    last = targets.clamp(min=0)[:, None]
    nll = [-x.gather(-1, last).squeeze(-1).masked_fill(targets < 0, torch.nan) for x in (log_p, log_q)]
    return torch.stack((kl, same_top, *nll))
