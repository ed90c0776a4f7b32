"""Zeros, extreme norms, NaN, infinities and padding: zero stays zero, and only readers of a broken value see it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_cases import (
    HALF,
    READS,
    TOLERANCES,
    Case,
    Step,
    assert_close,
    build,
    cached_by_hand,
    mean_of,
    naive_attend,
    store,
    token_by_hand,
    token_spans,
)

from turboquant.kernels import coding
from turboquant.kernels.interface import store_kv

pytestmark = pytest.mark.usefixtures("poison_empty", "one_thread", "kernels")


@pytest.mark.parametrize("mean", [0.0, 30.0], ids="mean{:.0f}".format)
def test_zero_stays_exactly_zero(mean):
    """A key of zeros beside a mean, too: its scale is -0, and nothing is added back."""
    step = build(Case(seqs=((3, 20),), mean=mean, rope=HALF))
    step.keys[0] = torch.zeros_like(step.keys[0])
    step.values[0][::2] = 0
    step.pages.fill_(0xFF)
    store(step)
    keys, values = cached_by_hand(step, 0)
    assert (keys == 0).all()
    assert (values[::2] == 0).all()
    # All keys weigh the same: the mean of all values so far.
    for j, length in enumerate((18, 19, 20)):
        expected = torch.from_numpy(values[:length].mean(0)).repeat_interleave(2, dim=0)
        assert_close(step.attend()[j], expected, *TOLERANCES[torch.float32])


def test_a_key_that_is_the_mean_comes_back_exactly():
    """What is left to quantise is zero, and its scale is +0: the mean is added back."""
    step = build(Case(seqs=((3, 20),), mean=30.0, rope=HALF))
    step.keys[0] = coding.mean_at(step.params, torch.arange(20))
    step.pages.fill_(0xFF)
    store(step)
    assert (cached_by_hand(step, 0)[0] == mean_of(step.params, 20)).all()
    assert_close(step.attend(), naive_attend(step), *TOLERANCES[torch.float32])


@pytest.mark.parametrize("power", [-12, -6, 0, 4], ids="1e{}".format)
def test_scales_of_every_size(power):
    """From fp16's smallest numbers to its largest; below, a vector becomes zero, and nothing becomes NaN."""
    step = build(Case(seqs=((1, 20),)))
    step.values[0] = step.values[0] / step.values[0].norm(dim=-1, keepdim=True) * 10.0**power
    step.pages.fill_(0xFF)
    store(step)
    _, values = cached_by_hand(step, 0)
    norms = np.linalg.norm(values, axis=-1)
    # fp16 has steps of 6e-8 at its lower end.
    np.testing.assert_allclose(norms, 10.0**power, rtol=1e-3, atol=3.1e-8)


def test_a_norm_beyond_fp16_saturates():
    step = build(Case(seqs=((1, 2),)))
    step.values[0][1] *= 1e6
    store(step)
    _, values = cached_by_hand(step, 0)
    assert np.isfinite(values).all()
    assert np.linalg.norm(values[1], axis=-1) == pytest.approx(65504, rel=0.1)


def test_a_large_finite_vector_is_not_a_nan():
    """bf16 holds 1e25; its square overflows float32."""
    step = build(Case(seqs=((1, 2),)))
    step.values[0][1] = 1e25
    store(step)
    assert np.isfinite(cached_by_hand(step, 0)[1]).all()


BROKEN = pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
WHICH = pytest.mark.parametrize("which", ["keys", "values"])


def poisoned(case: Case, which: str, broken: float, position: int) -> tuple[Step, Step]:
    """The same batch twice; in the second, one element of KV head 1 of one token of sequence 0 is broken."""
    clean, dirty = build(case), build(case)
    getattr(dirty, which)[0][position, 1, 3] = broken
    dirty.pages.fill_(0xFF)
    store(dirty)
    return clean, dirty


@BROKEN
@WHICH
def test_a_broken_token_spoils_no_other_byte(which, broken):
    clean, dirty = poisoned(Case(mean=4.0, rope=HALF), which, broken, position=11)
    different = (clean.pages != dirty.pages).nonzero()
    slot = clean.slots(0)[11].item()
    size, width = clean.case.block_size, clean.pages.shape[-1]
    assert len(different)
    allowed = token_spans(clean.case, slot % size)
    for block, head, row, column in different.tolist():
        byte = row * width + column
        assert (block, head) == (slot // size, 1)
        assert any(span.start <= byte < span.stop for name, span in allowed.items() if name[:3] == which[:3])
    token = token_by_hand(dirty, slot, 1)
    assert math.isnan(token.key_scale if which == "keys" else token.value_scale)


@BROKEN
@WHICH
@READS
@pytest.mark.parametrize("window", [None, 4], ids="window{}".format)
def test_a_broken_token_is_seen_by_those_who_read_it_only(which, broken, fresh, window):
    options = {"sliding_window": window} if window else {}
    clean, dirty = poisoned(Case(seqs=((20, 30), (3, 9)), options=options), which, broken, position=17)
    before, after = clean.attend(fresh), dirty.attend(fresh)
    reads = torch.zeros(before.shape[:2], dtype=torch.bool)
    # Queries stand at 10..29; heads 2 and 3 read KV head 1.
    reads[7 : 20 if window is None else 7 + window, 2:] = True
    # Exact values may answer an infinity with an infinity, or with nothing at all.
    if not fresh or math.isnan(broken):
        assert after[reads].isnan().all()
    assert after[~reads].isfinite().all()
    assert_close(after[~reads], before[~reads], 1e-6, 1e-11)


@READS
def test_a_broken_value_that_weighs_nothing_is_still_seen(fresh):
    """0 · NaN is NaN in an exact cache, too: an underflow does not hide it."""
    step = build(Case(seqs=((1, 20),), group=1, options={"scale": 100.0}))
    step.keys[0][5] = -step.query[0] * 10
    step.values[0][5] = math.nan
    store(step)
    assert step.attend(fresh).isnan().all()


@READS
def test_a_broken_query_spoils_its_own_row_only(fresh):
    step = build(Case())
    before = step.attend(fresh)
    step.query[3, 1, 0] = math.nan
    after = step.attend(fresh)
    assert after[3, 1].isnan().all()
    after[3, 1] = before[3, 1]
    assert torch.equal(after, before)


def test_padding_is_not_stored():
    step = build(Case(seqs=((1, 5),)))
    before = step.pages.clone()
    garbage = torch.full((4, 2, 64), torch.nan)
    store_kv(garbage, garbage, step.pages, torch.full((4,), -1), torch.zeros(4, dtype=torch.int64), step.params)
    assert torch.equal(step.pages, before)


def test_padding_between_real_tokens():
    step = build(Case(seqs=((1, 5),)))
    before = step.pages.clone()
    step.pages.fill_(0xFF)
    rows = torch.tensor([0, 2, 3, 5, 6])
    key, value = torch.full((8, 2, 64), torch.nan), torch.full((8, 2, 64), torch.nan)
    key[rows], value[rows] = step.keys[0], step.values[0]
    slots, positions = torch.full((8,), -1), torch.full((8,), 10**9)
    slots[rows], positions[rows] = step.slots(0), torch.arange(5)
    store_kv(key, value, step.pages, slots, positions, step.params)
    assert torch.equal(step.pages, before)


@READS
def test_padded_rows_of_the_query_are_left_alone(fresh):
    step = build(Case())
    expected = step.attend(fresh)
    rows = len(expected)
    garbage = torch.full((3, *expected.shape[1:]), torch.nan)
    step.query = torch.cat((step.query, garbage))
    own = {"fresh": tuple(torch.cat((x, garbage[:, :2])) for x in step.fresh())} if fresh else {}
    allocated = step.attend(**own)
    assert torch.equal(allocated[:rows], expected)
    assert (allocated[rows:] == 0).all()
    out = torch.full_like(step.query, 7.0)
    assert step.attend(out=out, **own) is out
    assert torch.equal(out[:rows], expected)
    assert (out[rows:] == 7.0).all()
