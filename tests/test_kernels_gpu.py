"""On a CUDA device: the compiled Triton kernels against the reference on the CPU, and CUDA graphs."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from kernel_cases import CASES, Case, Step, build
from test_kernels_window import CASES as WINDOW_CASES
from test_kernels_window import window_of
from triton_cases import RATIOS, error_ratio, moderate, product, through

from turboquant.kernels.interface import FORCE_ENV, KVParams, attend, store_kv

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(params: KVParams) -> KVParams:
    names = ("rotation", "key_centroids", "value_centroids", "key_mean")
    moved = {name: x.cuda() for name in names if (x := getattr(params, name)) is not None}
    return replace(params, **moved, rope=params.rope and params.rope.to("cuda"))


def moved(step: Step) -> Step:
    """The same batch on the GPU."""
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in step.options.items()}
    tensors = {
        name: getattr(step, name).cuda() for name in ("query", "pages", "block_table", "seq_lens", "query_start_loc")
    }
    kv = {name: [x.cuda() for x in getattr(step, name)] for name in ("keys", "values")}
    return replace(step, params=on_gpu(step.params), options=options, **tensors, **kv)


def assert_equal_on_gpu(step: Step, fresh: bool, **changes) -> None:
    expected = through(step, "reference", fresh, **changes)
    if window := changes.get("window"):
        changes["window"] = replace(window, pages=window.pages.cuda(), block_table=window.block_table.cuda())
    actual = through(moved(step), "triton", fresh, **changes).cpu()
    assert actual.isfinite().all()
    assert error_ratio(actual, expected) <= RATIOS[step.query.dtype]


@pytest.mark.parametrize("case", product().values(), ids=product().keys())
def test_the_product(case):
    assert_equal_on_gpu(moderate(case), fresh=case.group % 2 == 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("fresh", [False, True], ids=["packed", "fresh"])
def test_named_cases(case, fresh):
    assert_equal_on_gpu(build(case), fresh)


@pytest.mark.parametrize("case", WINDOW_CASES.values(), ids=WINDOW_CASES.keys())
@pytest.mark.parametrize("strict", [False, True], ids=["fresh-exact", "strict"])
def test_the_exact_window(case, strict):
    step = build(case)
    assert_equal_on_gpu(step, True, window=window_of(step, 16, 8), strict=strict)


@pytest.mark.parametrize("name", CASES)
def test_stored_bytes(name):
    """Sums are taken in another order: a coordinate on a boundary may fall on the other side."""
    step = build(CASES[name])
    if not step.keys:
        return
    gpu = moved(step)
    gpu.pages.fill_(0xFF)
    slots = torch.cat([step.slots(i) for i in range(len(step.keys))]).cuda()
    positions = torch.cat([torch.arange(len(key)) for key in step.keys]).cuda()
    with mock.patch.dict(os.environ, {FORCE_ENV: "triton"}):
        store_kv(torch.cat(gpu.keys), torch.cat(gpu.values), gpu.pages, slots, positions, gpu.params)
    assert (gpu.pages.cpu() != step.pages).float().mean() < 1e-3


def test_a_graph_replays_with_other_lengths():
    """Captured once with the longest lengths in mind, replayed with shorter ones and other pages."""
    case = Case(seqs=((1, 257), (1, 90), (1, 33)), dim=128, group=4, dtype=torch.bfloat16)
    step = moved(build(case))
    out = torch.empty_like(step.query)

    def launch() -> None:
        args = (step.query, step.pages, step.block_table, step.seq_lens, step.query_start_loc, step.params)
        attend(*args, **step.options, out=out)

    with mock.patch.dict(os.environ, {FORCE_ENV: "triton"}):
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        for lengths in ((257, 90, 33), (17, 1, 32), (200, 64, 5)):
            step.seq_lens.copy_(torch.tensor(lengths))
            graph.replay()
            replayed = out.clone()
            launch()
            assert torch.equal(replayed, out)
