"""What tests of the Transformers cache share: prompts for the tiny models of `models.py`, and ways to run them.

The models themselves are fixtures in `conftest.py`. Dense ones run in float64: quantisation is a step function, and a
rounding error of 1e-16 hardly ever carries a coordinate across a step.
"""

from __future__ import annotations

import pytest
import torch
from models import BOS, VOCAB

from turboquant.formats import PRESETS

FMT = "turboquant3.5"
# What one token costs in all layers of the dense models: 2 layers, 2 KV heads, head_dim 64.
DENSE_TOKEN_BYTES = 2 * 2 * PRESETS[FMT].slot_bytes(64)
SAME = 1e-4
ONE_CODE = 5e-3  # what one code or scale may do that falls to the other side of a boundary in another matrix product

EVERY_MODEL = pytest.mark.parametrize("model", ["llama", "qwen2", "qwen35"], indirect=True)
DENSE_MODELS = pytest.mark.parametrize("model", ["llama", "qwen2"], indirect=True)


def prompt(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """BOS and random tokens, [batch, length]."""
    ids = torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = BOS
    return ids


def pad_left(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts [1, L] of different lengths to one batch, padded with BOS, which a mask must hide."""
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), BOS)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :], mask[i, width - row.shape[1] :] = row[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def kl(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Mean divergence of next-token distributions, in nats."""
    p, q = exact.double().log_softmax(-1), approximate.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def generate(model, **kwargs) -> torch.Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, **kwargs}
    if "attention_mask" not in options:
        options["attention_mask"] = torch.ones_like(options["input_ids"])
    return model.generate(**options)


def stepwise_logits(model, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of a sequence fed in pieces of these sizes."""
    cache, logits = None, []
    for piece in ids.split(sizes, dim=1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
