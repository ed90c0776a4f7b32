"""The Triton kernels in Triton's interpreter, on CPU tensors, beside the reference."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from unittest import mock

import torch
from kernel_cases import HALF, INTERLEAVED, Case, Step, build

from turboquant.formats import PRESETS
from turboquant.kernels.interface import FORCE_ENV

FULL_ENV = "TURBOQUANT_FULL_TESTS"
# RMS error ratio against the reference.
RATIOS = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}

SEQS = ((1, 65), (3, 37), (17, 17), (1, 1))
FEATURES = {
    "plain": {},
    "mean": {"mean": 4.0, "rope": HALF},
    "mean-interleaved": {"mean": 4.0, "rope": INTERLEAVED},
    "sliding-softcap-sinks": {"sinks": True, "options": {"sliding_window": 21, "softcap": 3.0}},
}


def product() -> dict[str, Case]:
    """Every format, head_dim, group and block size, with and without everything else."""
    cases = {}
    for fmt, dim, group, size, (feature, extra), dtype in itertools.product(
        PRESETS, (64, 80, 96, 128, 256), (1, 3, 4, 8), (16, 48, 160), FEATURES.items(), (torch.float32, torch.bfloat16)
    ):
        name = f"{fmt}-D{dim}-gqa{group}-block{size}-{feature}-{str(dtype)[6:]}"
        cases[name] = Case(SEQS, fmt, dim, size, kv_heads=2 if group < 8 else 1, group=group, dtype=dtype, **extra)
    return cases


def sampled(cases: dict[str, Case], count: int) -> dict[str, Case]:
    """All of them where TURBOQUANT_FULL_TESTS is set; else some, in steps that share no factor with the product."""
    if os.environ.get(FULL_ENV):
        return cases
    names = list(cases)
    return {names[i * 631 % len(names)]: cases[names[i * 631 % len(names)]] for i in range(count)}


def moderate(case: Case) -> Step:
    """A batch whose queries give logits of a model's size: byte tables err in proportion to them."""
    return build(replace(case, options={"scale": 0.5 * case.dim**-0.5, **case.options}))


def through(step: Step, name: str, read_fresh: bool = False, **changes) -> torch.Tensor:
    """`step.attend` by an implementation, into an output of NaN."""
    out = torch.full_like(step.query, torch.nan)
    with mock.patch.dict(os.environ, {FORCE_ENV: name}):
        return step.attend(read_fresh, **{"out": out, **changes})


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference against the RMS of what is expected."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())
