"""The CPU kernels against the reference: every instruction set, thread count and cut of the work; bad indices."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from kernel_cases import HALF, INTERLEAVED, PARTIAL, Case, Step, build, store
from test_kernels_window import window_of

from turboquant.formats import PRESETS
from turboquant.kernels import interface, reference
from turboquant.kernels.cpu import library
from turboquant.kernels.interface import FORCE_ENV, KVParams
from turboquant.rotation import haar_rotation

try:
    ISAS = library.available()
except library.LibraryMissing as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("poison_empty", "one_thread")

RATIO = 1e-3  # RMS error ratio against the reference; 5e-3 is the promise
THREADS_RATIO = 1e-5
LENGTHS = ((1, 1), (1, 63), (1, 65), (1, 333), (5, 200), (33, 97), (70, 70))


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch) -> str:
    monkeypatch.setenv(FORCE_ENV, "cpu")
    before = library.selected()
    library.select(request.param)
    yield request.param
    library.select(before)


@pytest.fixture
def best_isa(monkeypatch):
    monkeypatch.setenv(FORCE_ENV, "cpu")


def sampled(count: int) -> list[Case]:
    """A fixed sample of the product of everything that a case may have."""
    axes = {
        "fmt": PRESETS, "dim": (64, 80, 96, 128, 256), "group": (1, 3, 4, 8), "kv_heads": (1, 2),
        "block_size": (16, 48, 128), "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "mean": (0.0, 4.0), "rope": (None, HALF, PARTIAL, INTERLEAVED), "sinks": (False, True),
        "options": ({}, {"softcap": 3.0}, {"sliding_window": 40}, {"sliding_window": 70, "softcap": 5.0}),
    }  # fmt: skip
    draw = random.Random(0)
    cases = []
    for i in range(count):
        chosen = {name: draw.choice(list(values)) for name, values in axes.items()}
        chosen["fmt"] = list(PRESETS)[i % 4]
        chosen["dim"] = axes["dim"][i % 5]
        cases.append(Case(seqs=tuple(draw.sample(LENGTHS, 3)), **chosen))
    return cases


SAMPLE = pytest.mark.parametrize("case", sampled(40), ids=lambda c: f"{c.fmt}-D{c.dim}-G{c.group}-B{c.block_size}")


def reads(case: Case):
    """Every way to read: packed only, fresh, with a window, strict."""
    yield {}
    yield {"read_fresh": True}
    for window, strict in itertools.product(((64, 32), (5, 8)), (False, True)):
        yield {"read_fresh": True, "window": window, "strict": strict}


def both(step: Step, how: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the kernels in use, and the reference's."""
    how = dict(how)
    if "window" in how:
        how["window"] = window_of(step, *how["window"])
    actual = step.attend(**how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "implementation", lambda device: reference)
        return actual, step.attend(**how)


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


@SAMPLE
def test_attend_is_near_the_reference(case, isa):
    rounding = {torch.float32: 0, torch.bfloat16: 3e-3, torch.float16: 4e-4}[case.dtype]
    step = build(case)
    for how in reads(case):
        actual, expected = both(step, how)
        assert error_ratio(actual, expected) <= RATIO + rounding, how


@SAMPLE
def test_store_writes_the_reference_s_bytes(case, isa):
    """But for ties of rounding: a rotation by additions rounds otherwise than one by products."""
    step = build(case)
    ours = step.pages.clone()
    step.pages.fill_(0xFF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "implementation", lambda device: reference)
        store(step)
    assert int((ours != step.pages).sum()) <= max(2, step.pages.numel() // 10000)


@pytest.mark.parametrize("group", range(1, 13), ids="G{}".format)
def test_any_number_of_rows(group, isa):
    """Blocks of rows have sizes of their own."""
    step = build(Case(seqs=((1, 150), (3, 80)), group=group, kv_heads=1))
    assert error_ratio(*both(step, {"read_fresh": True})) <= RATIO


@pytest.mark.parametrize("dim", [16, 24, 40, 48, 72, 112, 160, 192, 320, 512], ids="D{}".format)
@pytest.mark.parametrize("fmt", PRESETS)
def test_any_head_dim(dim, fmt, isa):
    """Loads that would pass the end of a page are made from copies, of each tile; no rotation need be a butterfly."""
    tokens = 150
    step = build(Case(seqs=((1, tokens),), dim=64, fmt=fmt, kv_heads=1))
    centroids = step.params
    params = KVParams(PRESETS[fmt], haar_rotation(dim, 3), centroids.key_centroids, centroids.value_centroids)
    step.case = replace(step.case, dim=dim, block_size=2)
    generator = torch.Generator().manual_seed(dim)
    step.keys, step.values = ([torch.randn(tokens, 1, dim, generator=generator)] for _ in range(2))
    step.query = torch.randn(1, 2, dim, generator=generator)
    step.options = {"scale": dim**-0.5}
    step.params, step.block_table = params, torch.randperm(tokens // 2, generator=generator, dtype=torch.int32)[None]
    step.pages = torch.full((tokens // 2, 1, 2, PRESETS[fmt].slot_bytes(dim)), 0xFF, dtype=torch.uint8)
    store(step)
    assert error_ratio(*both(step, {})) <= RATIO


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_results_do_not_depend_on_the_number_of_threads(threads, best_isa):
    step = build(Case(seqs=((1, 5000), (1, 3), (40, 700)), mean=4.0, rope=HALF))
    alone = step.attend(read_fresh=True)
    torch.set_num_threads(threads)
    try:
        together = step.attend(read_fresh=True)
        pages = step.pages.clone()
        step.pages.fill_(0xFF)
        store(step)
    finally:
        torch.set_num_threads(1)
    assert error_ratio(together, alone) <= THREADS_RATIO
    assert torch.equal(step.pages, pages)


def test_a_long_sequence_in_chunks(isa):
    step = build(Case(seqs=((1, 4500),), sinks=True, mean=4.0, rope=HALF))
    assert error_ratio(*both(step, {"read_fresh": True, "window": (64, 32)})) <= RATIO


def test_positions_beyond_the_tables(isa, monkeypatch):
    """Angles of far positions are computed one by one."""
    from turboquant.kernels.cpu import tables

    monkeypatch.setattr(tables, "MAX_TABLE_TILES", 1)
    monkeypatch.setattr(tables, "_rope_tables", {})
    step = build(Case(seqs=((1, 333),), mean=4.0, rope=HALF))
    assert error_ratio(*both(step, {})) <= RATIO


@pytest.mark.parametrize("block", [-1, 10**6, 2**31 - 1])
def test_a_block_outside_the_pages_is_not_followed(block, isa):
    step = build(Case(seqs=((1, 40), (1, 70))))
    step.block_table[1, 2] = block
    with pytest.raises(IndexError, match=f"block {block} of sequence 1 lies outside the pages: {len(step.pages)}"):
        step.attend()


def test_a_block_table_that_is_too_short(isa):
    step = build(Case(seqs=((1, 40),)))
    step.block_table = step.block_table[:, :2]
    with pytest.raises(IndexError, match="sequence 0 needs 3 blocks, block_table has 2 columns"):
        step.attend()


@pytest.mark.parametrize("block", [-1, 10**6])
def test_a_window_block_outside_its_pages_is_not_followed(block, isa):
    step = build(Case(seqs=((1, 90),)))
    window = window_of(step, 16, 8)
    window.block_table[0, 10] = block
    with pytest.raises(IndexError, match=f"window block {block} of sequence 0"):
        step.attend(read_fresh=True, window=window)


@pytest.mark.parametrize(
    ("starts", "message"),
    [([0, 1, 3], "query_start_loc 1 .. 3"), ([1, 0, 2], "query_start_loc 1 .. 0"), ([-1, 1, 2], "begins with -1")],
    ids=str,
)
def test_rows_outside_the_query(starts, message, isa):
    step = build(Case(seqs=((1, 40), (1, 30))))
    step.query_start_loc = torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(IndexError, match=message):
        step.attend()


def test_more_queries_than_tokens(isa):
    step = build(Case(seqs=((3, 40),)))
    step.seq_lens[0] = 2
    with pytest.raises(ValueError, match="sequence 0 has 3 queries and only 2 tokens"):
        step.attend()


def test_tensors_without_a_contiguous_last_axis(best_isa):
    step = build(Case())
    expected = step.attend(read_fresh=True)
    spaced = torch.zeros(*step.query.shape, 2)[..., 0]
    step.query = spaced.copy_(step.query)
    out = torch.full((*step.query.shape, 2), 7.0)
    step.attend(read_fresh=True, out=out[..., 0])
    assert torch.equal(out[..., 0], expected)
    assert (out[..., 1] == 7.0).all()


def test_a_mean_in_some_heads_only(isa):
    step = build(Case(mean=4.0, rope=HALF))
    mean = step.params.key_mean.clone()
    mean[1] = 0
    step.params = replace(step.params, key_mean=mean)
    store(step)
    assert error_ratio(*both(step, {})) <= RATIO


def test_naming_an_instruction_set_that_is_not_there():
    with pytest.raises(ValueError, match=r"instruction set 'sse' is not available: allowed are .*scalar"):
        library.select("sse")


def test_the_environment_chooses_the_instruction_set():
    code = "from turboquant.kernels.cpu import library; print(library.selected())"
    out = subprocess.run([sys.executable, "-c", code], env={library.ISA_ENV: "scalar"}, capture_output=True, text=True)
    assert out.stdout.split() == ["scalar"], out.stderr


def test_without_the_library_the_reference_serves_and_says_so_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv(library.LIBRARY_ENV, str(tmp_path / "none.so"))
    monkeypatch.delenv(FORCE_ENV, raising=False)
    library.load.cache_clear()
    interface._default.cache_clear()
    try:
        for _ in range(3):
            assert interface.implementation(torch.device("cpu")) is reference
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
        interface._default.cache_clear()
    assert caplog.text.count("python -m turboquant.kernels.cpu.build") == 1


def test_by_default_these_kernels_serve_cpu_tensors(monkeypatch):
    monkeypatch.delenv(FORCE_ENV, raising=False)
    assert interface.implementation(torch.device("cpu")).__name__ == "turboquant.kernels.cpu"


def test_other_devices_are_refused(best_isa):
    from turboquant.kernels import cpu

    with pytest.raises(ValueError, match="asked for a tensor on meta"):
        cpu.store_kv(torch.zeros(1, 1, 64, device="meta"), *[None] * 5)
