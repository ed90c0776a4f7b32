"""The exact window: which tokens are read exactly, from where, and that nothing else of the window is looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import HALF, TOLERANCES, Case, Step, assert_close, build, naive_attend, store

from turboquant.kernels.interface import ExactWindow
from turboquant.window import FIRST_TOKENS

pytestmark = pytest.mark.usefixtures("poison_empty", "one_thread", "kernels")

SEQS = ((1, 90), (5, 60), (40, 100), (7, 7), (1, 1), (64, 64))
CASES = {
    "plain": Case(seqs=SEQS),
    "mean-gqa": Case(seqs=SEQS, mean=20.0, rope=HALF, group=3),
    "sliding": Case(seqs=SEQS, options={"sliding_window": 30}),
    "softcap-sinks": Case(seqs=SEQS, sinks=True, options={"softcap": 4.0}),
    "D256-gqa8": Case(seqs=((1, 50), (9, 70)), dim=256, group=8),
    "D80-block48": Case(seqs=((3, 100), (1, 33)), dim=80, block_size=48),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["fresh-exact", "strict"])


def window_of(step: Step, size: int, block_size: int, fill: float = torch.nan) -> ExactWindow:
    """A window as an allocator keeps it: the first tokens, and the last `size` tokens before this step.

    Everything else is `fill`: freed blocks, whose numbers stay in the table, and the parts of blocks not yet written.
    """
    dim, heads = step.case.dim, step.case.kv_heads
    counts = [-(-max(length, 1) // block_size) for _, length in step.case.seqs]
    pages = torch.full((1 + sum(counts), heads, block_size, 2 * dim), fill)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for i, (queries, length) in enumerate(step.case.seqs):
        past = length - queries
        for block in range(counts[i]):
            number = 1 + sum(counts[:i]) + block
            table[i, block] = number
            for at in range(block * block_size, min((block + 1) * block_size, past)):
                if at < FIRST_TOKENS or at > past - size:
                    both = (step.keys[i][at], step.values[i][at])
                    pages[number, :, at % block_size] = torch.cat([x.float() for x in both], dim=-1)
    return ExactWindow(pages, table, size)


def rule(step: Step, window: ExactWindow, strict: bool):
    block_size = window.pages.shape[2]

    def reads_exactly(i: int, query_at: int, at: int) -> bool:
        queries, length = step.case.seqs[i]
        past = length - queries
        wanted = at > query_at - window.size or at < window.first or (at >= past and not strict)
        return wanted and (at >= past or bool(window.block_table[i, at // block_size]))

    return reads_exactly


@EVERY_CASE
@STRICT
@pytest.mark.parametrize(("size", "block_size"), [(16, 8), (1, 16), (64, 32), (1000, 16)], ids="W{}".format)
def test_attend_reads_exactly_what_the_window_covers(case, strict, size, block_size):
    step = build(case)
    store(step)
    window = window_of(step, size, block_size)
    actual = step.attend(read_fresh=True, window=window, strict=strict)
    assert_close(actual, naive_attend(step, reads_exactly=rule(step, window, strict)), *TOLERANCES[torch.float32])


@STRICT
@pytest.mark.parametrize("max_logits", [1, 300, 5000], ids="max{}".format)
def test_tiles_of_queries_change_nothing(monkeypatch, strict, max_logits):
    from turboquant.kernels import reference

    step = build(CASES["mean-gqa"])
    store(step)
    window = window_of(step, 16, 8)
    whole = step.attend(read_fresh=True, window=window, strict=strict)
    monkeypatch.setattr(reference, "MAX_LOGITS", max_logits)
    assert_close(step.attend(read_fresh=True, window=window, strict=strict), whole, 1e-5, 1e-9)


@STRICT
def test_where_nothing_is_held_the_packed_copy_is_read(strict):
    """After a prefix hit the table has null blocks."""
    step = build(CASES["plain"])
    store(step)
    full = window_of(step, 32, 8)
    table = full.block_table.clone()
    table[:, ::2] = 0
    window = replace(full, block_table=table)
    actual = step.attend(read_fresh=True, window=window, strict=strict)
    assert_close(actual, naive_attend(step, reads_exactly=rule(step, window, strict)), *TOLERANCES[torch.float32])
    assert not torch.allclose(actual, step.attend(read_fresh=True, window=full, strict=strict), atol=1e-3)


def test_a_window_over_everything_is_an_exact_cache():
    """Packed pages full of garbage are not looked at."""
    step = build(CASES["plain"])
    window = window_of(step, 1000, 16)
    exact = naive_attend(step, reads_exactly=lambda *_: True)
    for strict in (False, True):
        actual = step.attend(read_fresh=True, window=window, strict=strict)
        assert_close(actual, exact, *TOLERANCES[torch.float32])


def test_one_decode_step_equals_the_strict_chunk():
    """Strict means: what a decode step at that position would read, whatever the chunk."""
    chunk = build(Case(seqs=((20, 80),)))
    store(chunk)
    strict = chunk.attend(read_fresh=True, window=window_of(chunk, 16, 8), strict=True)
    for row in (0, 7, 19):
        length = 80 - 19 + row
        single = build(Case(seqs=((1, length),)))
        for name in ("keys", "values"):
            setattr(single, name, [getattr(chunk, name)[0][:length]])
        single.query = chunk.query[row : row + 1]
        store(single)
        alone = single.attend(read_fresh=True, window=window_of(single, 16, 8))
        assert_close(alone, strict[row : row + 1], 1e-5, 1e-9)


def test_without_a_window_strict_reads_packed_copies_only():
    step = build(CASES["plain"])
    store(step)
    assert torch.equal(step.attend(read_fresh=True, strict=True), step.attend())


WRONG = {
    "dtype": ({"pages": lambda x: x.to(torch.uint8)}, TypeError, "window pages have dtype torch.uint8"),
    "width": ({"pages": lambda x: x[..., :64]}, ValueError, r"window pages have shape .* expected .*128"),
    "heads": ({"pages": lambda x: x[:, :1]}, ValueError, r"window pages have shape"),
    "table-dtype": ({"block_table": lambda x: x.float()}, TypeError, "window block_table has dtype"),
    "table-rows": ({"block_table": lambda x: x[:2]}, ValueError, "window block_table has shape .* one row a sequence"),
    "size": ({"size": lambda _: 0}, ValueError, "window size 0"),
    "first": ({"first": lambda _: 9}, ValueError, "window first 9 .* 0 to 8"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_window(changes, error, message):
    step = build(CASES["plain"])
    store(step)
    window = window_of(step, 16, 8)
    window = replace(window, **{name: change(getattr(window, name)) for name, change in changes.items()})
    with pytest.raises(error, match=message):
        step.attend(read_fresh=True, window=window)


def test_a_window_needs_this_step_s_own_tokens():
    step = build(CASES["plain"])
    store(step)
    with pytest.raises(ValueError, match="window without fresh"):
        step.attend(window=window_of(step, 16, 8))
