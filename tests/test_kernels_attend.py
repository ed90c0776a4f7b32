"""`attend` is softmax over the pages' own bytes: any shape, option, window, layout and batch, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_cases import (
    ABSURD_BLOCK,
    CASES,
    EVERY_CASE,
    HALF,
    READS,
    TOLERANCES,
    Case,
    assert_close,
    build,
    naive_attend,
    store,
)

from turboquant.kernels import reference
from turboquant.kernels.interface import attend
from turboquant.kv_quantizer import KVQuantizer

pytestmark = pytest.mark.usefixtures("poison_empty", "one_thread", "kernels")


@EVERY_CASE
@READS
def test_attend_is_softmax_over_the_page_s_own_bytes(case, fresh):
    step = build(case)
    assert_close(step.attend(fresh), naive_attend(step, fresh), *TOLERANCES[torch.float32])


@READS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attend_in_16_bits(dtype, fresh):
    """Only the result is rounded: everything between is float32."""
    step = build(Case(dtype=dtype, mean=4.0, rope=HALF))
    out = step.attend(fresh)
    assert out.dtype == dtype
    assert_close(out, naive_attend(step, fresh), *TOLERANCES[dtype])


@READS
def test_a_large_mean_does_not_drown_the_rest(fresh):
    """100 times the rest of K: the logits' own rounding is then the limit, a few parts in 1e5."""
    step = build(Case(mean=100.0, rope=HALF, options={"scale": 0.02}))
    assert_close(step.attend(fresh), naive_attend(step, fresh), 1e-4, 1e-8)


@READS
@pytest.mark.parametrize("name", ["mixed", "window-5", "all", "bidirectional"])
@pytest.mark.parametrize("max_logits", [1, 300, 5000], ids="max{}".format)
def test_tiles_of_queries_change_nothing(monkeypatch, name, fresh, max_logits):
    step = build(CASES[name])
    whole = step.attend(fresh)
    monkeypatch.setattr(reference, "MAX_LOGITS", max_logits)
    assert_close(step.attend(fresh), whole, 1e-6, 1e-11)


@pytest.mark.parametrize("window", [1, 7, 16, 40], ids="window{}".format)
@READS
def test_blocks_that_left_the_window_are_not_read(window, fresh):
    """vLLM frees them and puts anything into the table."""
    step = build(Case(seqs=((1, 257), (20, 100), (3, 49), (50, 50)), options={"sliding_window": window}))
    expected = step.attend(fresh)
    for i, (count, length) in enumerate(step.case.seqs):
        oldest_read = max(0, length - count - window + 1)
        step.block_table[i, : oldest_read // step.case.block_size] = ABSURD_BLOCK
    assert torch.equal(step.attend(fresh), expected)


@READS
def test_what_was_in_the_pages_before_does_not_leak(fresh):
    case = CASES["mixed"]
    outs = [build(case, fill=fill).attend(fresh) for fill in (0x00, 0xFF, 0x7C, 0xAB)]
    assert all(torch.equal(out, outs[0]) for out in outs)


@READS
def test_a_sequence_does_not_depend_on_its_batch(fresh):
    step = build(CASES["mixed"])
    together = step.attend(fresh)
    for i, (begin, end) in enumerate(pairwise(step.query_start_loc.tolist())):
        own = {"fresh": tuple(x[begin:end] for x in step.fresh())} if fresh else {}
        alone = attend(
            step.query[begin:end], step.pages, step.block_table[i : i + 1], step.seq_lens[i : i + 1],
            torch.tensor([0, end - begin], dtype=torch.int32), step.params, **step.options, **own,
        )  # fmt: skip
        assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize("name", ["plain", "window-5", "mean-rope", "sinks"])
def test_a_chunk_reads_what_single_decode_steps_read(name):
    """Without `fresh`, a query of a chunk sees exactly what a decode step at its position sees."""
    case = replace(CASES[name], seqs=((20, 50),))
    step = build(case)
    chunk = step.attend()
    for j in range(20):
        single = attend(
            step.query[j : j + 1], step.pages, step.block_table, torch.tensor([31 + j], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32), step.params, **step.options,
        )  # fmt: skip
        assert_close(single, chunk[j : j + 1], 2e-6, 1e-11)


@pytest.mark.parametrize("name", ["plain", "mean-rope", "mean-rope-partial", "D128-block160"])
def test_the_cache_means_the_same_everywhere(name):
    """Attend over pages is SDPA over what KVQuantizer gives back for the same K and V."""
    step = build(case := CASES[name])
    quantizer = KVQuantizer(case.fmt, case.dim, key_mean=step.params.key_mean, rope=case.rope, seed=5)
    starts = step.query_start_loc.tolist()
    for i, (count, length) in enumerate(case.seqs):
        key, value = quantizer.dequantize(quantizer.quantize(step.keys[i], step.values[i]))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[length - count :]
        expected = torch.nn.functional.scaled_dot_product_attention(
            step.query[starts[i] : starts[i + 1]].transpose(0, 1)[None].double(),
            *(x.transpose(0, 1)[None].double() for x in (key, value)), attn_mask=mask, enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
        assert_close(step.attend()[starts[i] : starts[i + 1]], expected, 1e-5, 1e-10)


def test_out_may_be_strided():
    step = build(Case())
    wide = torch.full((*step.query.shape[:2], 100), torch.nan)
    step.attend(out=wide[..., 10:74])
    assert torch.equal(wide[..., 10:74], step.attend())
    assert wide[..., :10].isnan().all()
    assert wide[..., 74:].isnan().all()


@pytest.mark.parametrize("layout", ["heads-outermost", "layer-between", "pitch"])
@READS
def test_pages_with_free_outer_strides(layout, fresh):
    step = build(Case(mean=4.0, rope=HALF))
    expected, shape = step.attend(fresh), step.pages.shape
    blocks, heads, size, slot = shape
    if layout == "heads-outermost":
        around = torch.full((heads, blocks, size, slot), 0xFF, dtype=torch.uint8)
        pages = around.transpose(0, 1)
    elif layout == "layer-between":
        around = torch.full((blocks, 3, heads, size, slot), 0xFF, dtype=torch.uint8)
        pages = around[:, 1]
    else:
        around = torch.full((blocks, heads * size * slot + 128), 0xFF, dtype=torch.uint8)
        pages = around[:, 64 : 64 + heads * size * slot].unflatten(1, (heads, size, slot))
    dense, step.pages = step.pages, pages
    store(step)
    assert torch.equal(pages, dense)
    assert torch.equal(step.attend(fresh), expected)
    assert int((around != 0xFF).sum()) == int((dense != 0xFF).sum())


@READS
def test_an_empty_batch(fresh):
    step = build(Case(seqs=()))
    own = {"fresh": (torch.zeros(0, 2, 64), torch.zeros(0, 2, 64))} if fresh else {}
    assert step.attend(**own).shape == (0, 4, 64)


@READS
def test_sequences_without_queries(fresh):
    """A batch padded with empty sequences, as CUDA graphs pad it."""
    step = build(Case(seqs=((0, 20), (2, 17), (0, 0), (1, 5), (0, 0)), mean=4.0, rope=HALF))
    assert_close(step.attend(fresh), naive_attend(step, fresh), *TOLERANCES[torch.float32])


def test_sinks_take_weight():
    step = build(Case(sinks=True))
    step.options["sinks"] = torch.full((4,), 200.0)
    assert step.attend().abs().max() < 1e-30
    step.options["sinks"] = torch.full((4,), -200.0)
    assert torch.equal(step.attend(), step.attend(sinks=None))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_integers_of_either_width(index_dtype):
    step = build(Case(mean=4.0, rope=HALF))
    expected = step.attend()
    for name in ("block_table", "seq_lens", "query_start_loc"):
        setattr(step, name, getattr(step, name).to(index_dtype))
    assert torch.equal(step.attend(), expected)
