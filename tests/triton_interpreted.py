"""The Triton kernels against the reference, in the interpreter: store to the byte, attend by RMS error ratio.

Run by `test_kernels_triton.py`, or by hand with TRITON_INTERPRET=1 and this file's name. A sample of the product by
default; all of it with TURBOQUANT_FULL_TESTS=1 (`make test-full`).
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from kernel_cases import CASES, HALF, READS, Case, build, store
from test_kernels_store_window import WINDOW_STORES, check_store_window
from test_kernels_window import CASES as WINDOW_CASES
from test_kernels_window import STRICT, window_of
from triton_cases import FULL_ENV, RATIOS, error_ratio, moderate, product, sampled, through

from turboquant.kernels.interface import FORCE_ENV, attend, store_kv
from turboquant.kernels.triton import workspace
from turboquant.kernels.triton.tables import byte_table, prepare

pytestmark = [
    pytest.mark.usefixtures("poison_empty", "one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NaN in numpy
]

PRODUCT = sampled(product(), 24)
SHAPES = ["D64-decode", "D80-block48-gqa3", "D128-block160", "D256-gqa8", "D72-block1", "mixed", "mha-5-heads"]
OPTIONS = ["window-1", "window-17-block48", "scale", "bidirectional", "mean-rope-partial", "all"]
NAMED = {name: CASES[name] for name in (CASES if os.environ.get(FULL_ENV) else SHAPES + OPTIONS)}


@pytest.fixture(autouse=True)
def no_scratch_left_over():
    """Poisoned anew for every test."""
    workspace._buffers.clear()
    with mock.patch.object(workspace, "LIMIT_BYTES", 1 << 20):
        yield
    workspace._buffers.clear()


def assert_same(step, read_fresh=False, **changes):
    expected = through(step, "reference", read_fresh, **changes)
    actual = through(step, "triton", read_fresh, **changes)
    assert actual.isfinite().all()
    assert error_ratio(actual, expected) <= RATIOS[step.query.dtype]


@pytest.mark.parametrize("case", PRODUCT.values(), ids=PRODUCT.keys())
def test_the_product(case):
    step = moderate(case)
    assert_same(step, read_fresh=case.group % 2 == 0)


@WINDOW_STORES
def test_store_window(dtype, dim, monkeypatch):
    monkeypatch.setenv(FORCE_ENV, "triton")
    check_store_window(dtype, dim)


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED.keys())
@READS
def test_named_cases(case, fresh):
    assert_same(build(case), fresh)


@pytest.mark.parametrize("name", ["D256-gqa8", "D80-block48-gqa3", "all", "mean-rope-interleaved", "turboquant2.5"])
def test_stored_bytes_are_the_reference_s(name):
    step = build(CASES[name])
    expected = step.pages.clone()
    step.pages.fill_(0xFF)
    with mock.patch.dict(os.environ, {FORCE_ENV: "triton"}):
        store(step)
    assert torch.equal(step.pages, expected)  # what it must not touch is 0xFF in both


@pytest.mark.parametrize("name", ["plain", "mean-gqa", "sliding", "softcap-sinks"])
@STRICT
@pytest.mark.parametrize(("size", "block_size"), [(16, 8), (64, 32)], ids="W{}".format)
def test_the_exact_window(name, strict, size, block_size):
    step = build(WINDOW_CASES[name])
    store(step)
    window = window_of(step, size, block_size)
    window.block_table[:, 1::3] = 0
    assert_same(step, read_fresh=True, window=window, strict=strict)


@pytest.mark.parametrize("size", [1, 16], ids="W{}".format)
def test_the_exact_window_in_16_bits(size):
    step = moderate(replace(WINDOW_CASES["mean-gqa"], dtype=torch.bfloat16))
    store(step)
    assert_same(step, read_fresh=True, window=window_of(step, size, 8))


def test_rounds_of_tiles_change_nothing(monkeypatch):
    step = build(CASES["mixed"])
    whole = through(step, "triton", True)
    monkeypatch.setattr(workspace, "LIMIT_BYTES", 1)
    assert torch.equal(through(step, "triton", True), whole)


@pytest.mark.parametrize("splits", [1, 5], ids="splits{}".format)
def test_splits_change_nothing_but_rounding(monkeypatch, splits):
    from turboquant.kernels.triton import config

    monkeypatch.setattr(config, "programs_that_fill", lambda device: 1000)
    monkeypatch.setattr(config, "MIN_SPLIT_TOKENS", 1)
    monkeypatch.setattr(config, "MAX_SPLITS", splits)
    assert_same(build(Case(seqs=((1, 257), (2, 90), (1, 3)))))


def test_pages_with_free_outer_strides():
    step = build(Case(mean=4.0, rope=HALF))
    expected = through(step, "triton")
    blocks, heads, size, slot = step.pages.shape
    around = torch.full((blocks, 3, heads, size, slot), 0xFF, dtype=torch.uint8)
    dense, step.pages = step.pages, around[:, 1]
    with mock.patch.dict(os.environ, {FORCE_ENV: "triton"}):
        store(step)
    assert torch.equal(step.pages, dense)
    assert torch.equal(through(step, "triton"), expected)
    assert int((around != 0xFF).sum()) == int((dense != 0xFF).sum())


@READS
def test_padded_rows_are_left_alone(fresh):
    step = build(Case())
    expected = through(step, "triton", fresh)
    rows, garbage = len(expected), torch.full((3, *expected.shape[1:]), torch.nan)
    step.query = torch.cat((step.query, garbage))
    own = {"fresh": tuple(torch.cat((x, garbage[:, :2])) for x in step.fresh())} if fresh else {}
    out = torch.full_like(step.query, 7.0)
    through(step, "triton", out=out, **own)
    assert error_ratio(out[:rows], expected) < 1e-6
    assert (out[rows:] == 7.0).all()


def test_sequences_without_queries_and_empty_batches():
    assert_same(build(Case(seqs=((0, 20), (2, 17), (0, 0), (1, 5), (0, 0)), mean=4.0, rope=HALF)), True)
    assert through(build(Case(seqs=())), "triton").shape == (0, 4, 64)


@pytest.mark.parametrize("which", ["keys", "values"])
@READS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_broken_token_is_seen_by_those_who_read_it_only(which, fresh, dtype):
    case = Case(seqs=((20, 30), (3, 9)), dtype=dtype)
    clean, dirty = build(case), build(case)
    getattr(dirty, which)[0][17, 1, 3] = math.nan
    with mock.patch.dict(os.environ, {FORCE_ENV: "triton"}):
        store(dirty)
    before, after = through(clean, "triton", fresh), through(dirty, "triton", fresh)
    reads = torch.zeros(before.shape[:2], dtype=torch.bool)
    reads[7:20, 2:] = True  # queries stand at 10..29; heads 2 and 3 read KV head 1
    assert after[reads].isnan().all()
    assert torch.equal(after[~reads], before[~reads])


def test_padding_and_slots_outside():
    step = build(Case(seqs=((1, 5),)))
    before, none = step.pages.clone(), torch.zeros(4, dtype=torch.int64)
    garbage = torch.full((4, 2, 64), torch.nan)
    with mock.patch.dict(os.environ, {FORCE_ENV: "triton"}):
        store_kv(garbage, garbage, step.pages, none - 1, none, step.params)
        with pytest.raises(IndexError, match="lies outside the pages"):
            store_kv(garbage, garbage, step.pages, none + 10**6, none, step.params)
    assert torch.equal(step.pages, before)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_integers_of_either_width(index_dtype):
    step = build(Case(mean=4.0, rope=HALF))
    expected = through(step, "triton")
    for name in ("block_table", "seq_lens", "query_start_loc"):
        setattr(step, name, getattr(step, name).to(index_dtype))
    assert torch.equal(through(step, "triton"), expected)


def test_far_positions_turn_the_mean_as_exactly_as_near_ones():
    """Whole turns drop out of the integer phase: position 900,000 is as good as position 0."""
    case = Case(seqs=((1, 20),), mean=4.0, rope=HALF)
    step = build(case)
    offset = 900_000 // case.block_size * case.block_size
    far = torch.full((1, (offset + 20) // case.block_size + 2), -1, dtype=torch.int32)
    far[:, offset // case.block_size :][:, :2] = step.block_table[:, :2]
    slots = step.slots(0)
    store_kv(step.keys[0], step.values[0], step.pages, slots, offset + torch.arange(20), step.params)
    args = (step.query, step.pages, far, step.seq_lens + offset, step.query_start_loc, step.params)
    outs = {}
    for name in ("reference", "triton"):
        with mock.patch.dict(os.environ, {FORCE_ENV: name}):
            outs[name] = attend(*args, **step.options, sliding_window=20)
    assert error_ratio(outs["triton"], outs["reference"]) < 1e-4


def test_byte_tables():
    for dim in (64, 80, 96, 128, 256):
        for fmt in ("turboquant2.5", "turboquant4"):
            made = prepare(build(Case(seqs=((1, 1),), fmt=fmt, dim=dim)).params)
            for table in made.byte_tables:
                assert table.error < 4.2e-3
                assert max(map(abs, table.values)) < 128
    with pytest.raises(ValueError, match="not symmetric"):
        byte_table((-1.0, 0.0, 1.0, 3.0), 64)
