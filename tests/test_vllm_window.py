"""The exact window on the real engine: held by vLLM's allocator, read as in Transformers, never read wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from engine import assert_same_answers, engine, greedy, random_prompts, through_transformers

from turboquant.vllm import backend

pytestmark = pytest.mark.engine

FMT = "turboquant2.5"  # the coarsest: what is read packed shows
WINDOW = 32
LENGTHS = (1, 6, 41, 130, 201, 301)
PRESSURE = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks_override": 80, "max_num_seqs": 6},
}


def options(window: int, prefill_reads: str = "packed") -> dict:
    return {"turboquant": {"window": window, "prefill_reads": prefill_reads}}


def answers(model_dir, fmt: str, window: int | None, max_tokens: int = 16, reruns: int = 1, **overrides) -> list:
    """Greedy answers of one engine to the same prompts, `reruns` times."""
    extra = {} if window is None else {"additional_config": options(window)}
    with engine(model_dir, fmt, skip_tokenizer_init=True, **extra, **overrides) as llm:
        return [greedy(llm, random_prompts(*LENGTHS), max_tokens) for _ in range(reruns)]


class Oracle:
    """A shadow of exact K and V by layer and packed slot, against which all that attention can read exactly is held.

    Where vLLM copied a packed block (a prefix hit inside one), the exact values must be some that this layer stored at
    this position.
    """

    def __init__(self, monkeypatch) -> None:
        self.by_slot, self.by_position, self.reads, self.bad = {}, {}, 0, 0
        store_kv, attend = backend.store_kv, backend.attend

        def watched_store(key, value, pages, slot_mapping, positions, params):
            both = torch.cat((key, value), dim=-1)
            for slot, position, exact in zip(slot_mapping.tolist(), positions.tolist(), both, strict=True):
                self.by_slot[pages.data_ptr(), slot] = exact.clone()
                self.by_position.setdefault((pages.data_ptr(), position), []).append(exact.clone())
            store_kv(key, value, pages, slot_mapping, positions, params)

        def watched_attend(query, pages, block_table, seq_lens, query_start_loc, params, *, window, **kwargs):
            if window is not None:
                self.check(pages, block_table, seq_lens, query_start_loc, window)
            return attend(query, pages, block_table, seq_lens, query_start_loc, params, window=window, **kwargs)

        monkeypatch.setattr(backend, "store_kv", watched_store)
        monkeypatch.setattr(backend, "attend", watched_attend)

    def check(self, pages, block_table, seq_lens, query_start_loc, window) -> None:
        packed_size, block_size = pages.shape[2], window.pages.shape[2]
        for i, length in enumerate(seq_lens.tolist()):
            past = length - int(query_start_loc[i + 1] - query_start_loc[i])
            for at in {*range(min(window.first, past)), *range(max(0, past - window.size + 1), past)}:
                block = int(window.block_table[i, at // block_size])
                if block:
                    slot = int(block_table[i, at // packed_size]) * packed_size + at % packed_size
                    self.reads += 1
                    self.bad += not self.is_right(pages.data_ptr(), slot, at, window.pages[block, :, at % block_size])

    def is_right(self, layer: int, slot: int, position: int, held: torch.Tensor) -> bool:
        if (layer, slot) in self.by_slot:
            return torch.equal(held, self.by_slot[layer, slot])
        return any(torch.equal(held, exact) for exact in self.by_position[layer, position])


@pytest.mark.parametrize("pressure", PRESSURE.values(), ids=PRESSURE.keys())
def test_the_engine_reads_what_transformers_reads(llama_dir, monkeypatch, pressure):
    oracle = Oracle(monkeypatch)
    (ours,) = answers(llama_dir, FMT, WINDOW, **pressure)
    theirs = through_transformers(llama_dir, random_prompts(*LENGTHS), 16, FMT, window=WINDOW)
    assert_same_answers(ours, theirs)
    assert oracle.bad == 0
    assert oracle.reads > 1000


def test_a_key_bias_under_the_window(qwen2_dir):
    (ours,) = answers(qwen2_dir, FMT, WINDOW)
    theirs = through_transformers(qwen2_dir, random_prompts(*LENGTHS), 16, FMT, window=WINDOW)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _, _ in theirs]


def test_a_window_over_everything_is_the_uncompressed_engine(llama_dir):
    (ours,), (exact,) = answers(llama_dir, FMT, 512), answers(llama_dir, "auto", None)
    for (tokens, logprobs), (exact_tokens, exact_logprobs) in zip(ours, exact, strict=True):
        assert tokens == exact_tokens
        assert logprobs == pytest.approx(exact_logprobs, abs=1e-3)


def test_prefix_hits_are_rebuilt(llama_dir, monkeypatch):
    """After a hit the last tokens are computed again and the first ones found: near to the first answer."""
    oracle = Oracle(monkeypatch)
    first, again = answers(llama_dir, FMT, WINDOW, reruns=2, enable_prefix_caching=True)
    assert oracle.bad == 0
    (packed,) = answers(llama_dir, FMT, 0)
    moved = sum(abs(a[1][0] - b[1][0]) for a, b in zip(first, again, strict=True))
    assert moved < 0.2 * sum(abs(a[1][0] - b[1][0]) for a, b in zip(first, packed, strict=True))


def test_a_hybrid_holds_a_window(qwen35_moe_dir, monkeypatch):
    oracle = Oracle(monkeypatch)
    prompts = random_prompts(41, 201, 150)
    with engine(
        qwen35_moe_dir, "turboquant3.5", dtype="bfloat16", additional_config=options(WINDOW), skip_tokenizer_init=True,
        enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        ours, _ = greedy(llm, prompts, 8), greedy(llm, prompts, 8)
    theirs = through_transformers(qwen35_moe_dir, prompts, 8, dtype=torch.bfloat16, window=WINDOW)
    for (_, logprobs), (_, hf_logprobs, _) in zip(ours, theirs, strict=True):
        assert logprobs[0] == pytest.approx(hf_logprobs[0], abs=0.15)
    assert oracle.bad == 0
    assert oracle.reads > 100


def test_without_the_hybrid_manager_there_is_no_window(llama_dir):
    (off,) = answers(llama_dir, FMT, WINDOW, disable_hybrid_kv_cache_manager=True)
    (none,) = answers(llama_dir, FMT, 0)
    assert off == none
