"""The exact window on the real engine: held by vLLM's allocator, read as in Transformers, never read wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from engine import assert_same_answers, engine, greedy, random_prompts, through_transformers
from models import build, llama_config
from transformers import LlamaForCausalLM
from vllm import SamplingParams
from window_oracle import Oracle, assert_nothing_leaked

from turboquant.formats import PRESETS
from turboquant.window import DEFAULT_WINDOW, CacheLayout

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]

FMT = "turboquant2.5"  # the coarsest: what is read packed shows
WINDOW = 32
LENGTHS = (1, 6, 41, 130, 201, 301)
PRESSURE = {
    "plain": {},
    "chunks above W": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "chunks below W": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks_override": 34, "max_num_seqs": 6, "block_size": 64},
    "compiled": {"enforce_eager": False},
}
# Rows of the matrix that these are, too.
NAMED = {
    "preempted": pytest.mark.matrix(feature="preemption and recompute in a pool too small", shape="llama"),
    "compiled": pytest.mark.matrix(feature="torch.compile", shape="llama"),
}


@pytest.fixture(scope="module")
def expected(llama_dir):
    return through_transformers(llama_dir, random_prompts(*LENGTHS), 16, FMT, window=WINDOW)


def options(window: int, prefill_reads: str = "packed") -> dict:
    return {"turboquant": {"window": window, "prefill_reads": prefill_reads}}


def answers(model_dir, fmt: str, window: int | None, max_tokens: int = 16, oracle=None, **overrides) -> list:
    """Greedy answers of one engine."""
    extra = {} if window is None else {"additional_config": options(window)}
    with engine(model_dir, fmt, skip_tokenizer_init=True, **extra, **overrides) as llm:
        if oracle is not None:
            oracle.watch_blocks(llm)
        ours = greedy(llm, random_prompts(*LENGTHS), max_tokens)
        assert_nothing_leaked(llm)
    return ours


@pytest.mark.matrix(feature="exact window: {pressure}", shape="llama")
@pytest.mark.parametrize("pressure", [pytest.param(name, marks=NAMED.get(name, ())) for name in PRESSURE])
def test_the_engine_reads_what_transformers_reads(llama_dir, monkeypatch, expected, pressure):
    oracle = Oracle(monkeypatch, corrupt=pressure == "plain")
    ours = answers(llama_dir, FMT, WINDOW, oracle=oracle, **PRESSURE[pressure])
    assert_same_answers(ours, expected)
    assert (oracle.bad, oracle.freed) == (0, 0)
    assert oracle.reads > 1000
    assert (oracle.preemptions > 0) == (pressure == "preempted")
    if oracle.corrupt:
        assert oracle.moved_by_packed < 1e-5 < 0.01 < oracle.moved_by_window


@pytest.mark.matrix(feature="exact window", shape="qwen2")
def test_a_key_bias_under_the_window(qwen2_dir):
    ours = answers(qwen2_dir, FMT, WINDOW)
    theirs = through_transformers(qwen2_dir, random_prompts(*LENGTHS), 16, FMT, window=WINDOW)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _, _ in theirs]


def test_a_window_over_everything_is_the_uncompressed_engine(llama_dir):
    ours, exact = answers(llama_dir, FMT, 512), answers(llama_dir, "auto", None)
    for (tokens, logprobs), (exact_tokens, exact_logprobs) in zip(ours, exact, strict=True):
        assert tokens == exact_tokens
        assert logprobs == pytest.approx(exact_logprobs, abs=1e-3)


@pytest.mark.matrix(feature="exact window: prefix hits, beside longer fresh prompts and in chunks", shape="llama")
def test_prefix_hits_are_rebuilt(llama_dir, monkeypatch):
    """After a hit the last tokens are computed again and the first ones found: near to the first answer.

    Hits of whole prompts, of a part of one, at the edges of packed and of window blocks; in batches with longer fresh
    prompts, and in chunks.
    """
    oracle = Oracle(monkeypatch)
    (base,) = random_prompts(420)
    fresh = random_prompts(400, 333, 256, 255, 130)
    edges = (127, 128, 129, 255, 256, 257, 272, 383, 384, 385, 40)
    hits = [*([*base[:n], 7, 8, 9] for n in edges), base[:256], base]
    with engine(
        llama_dir, FMT, skip_tokenizer_init=True, additional_config=options(WINDOW), enable_prefix_caching=True,
        max_num_batched_tokens=96, max_num_seqs=6,
    ) as llm:  # fmt: skip
        oracle.watch_blocks(llm)
        first = greedy(llm, [base, *fresh], 16)
        again = greedy(llm, [base, *fresh], 16)
        others = greedy(llm, hits, 16)
        cached = llm.generate(
            [{"prompt_token_ids": p} for p in hits], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
        )
        assert sum((output.num_cached_tokens or 0) > 0 for output in cached) >= 10
        assert_nothing_leaked(llm)
    assert (oracle.bad, oracle.freed) == (0, 0)
    with engine(llama_dir, FMT, skip_tokenizer_init=True, additional_config=options(WINDOW)) as llm:
        unhit = greedy(llm, hits, 16)
    with engine(llama_dir, FMT, skip_tokenizer_init=True, additional_config=options(0)) as llm:
        packed, packed_hits = greedy(llm, [base, *fresh], 16), greedy(llm, hits, 16)
    assert moved(first, again) < 0.2 * moved(first, packed)
    assert moved(unhit, others) < 0.2 * moved(unhit, packed_hits)


def moved(some: list, others: list) -> float:
    """How far the log-probabilities of first tokens lie apart, in all."""
    return sum(abs(a[1][0] - b[1][0]) for a, b in zip(some, others, strict=True))


@pytest.mark.matrix(feature="aborts in every phase", shape="llama")
def test_aborted_requests_leave_nothing_behind(llama_dir, monkeypatch):
    """Requests are aborted in every phase, and others take over their blocks."""
    oracle = Oracle(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = random_prompts(300, 200, 41, 130, 301, 150, 90, 260)
    with engine(
        llama_dir, FMT, skip_tokenizer_init=True, additional_config=options(WINDOW), num_gpu_blocks_override=60,
        max_num_batched_tokens=64, max_num_seqs=4, block_size=64,
    ) as llm:  # fmt: skip
        oracle.watch_blocks(llm)
        core, finished = llm.llm_engine, {}
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), {"prompt_token_ids": prompt}, params)
        for step in range(400):
            for output in core.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            if step in (2, 9, 17):
                core.abort_request([str({2: 0, 9: 1, 17: 4}[step])], internal=False)
            if not core.has_unfinished_requests():
                break
        assert_nothing_leaked(llm)
        alone = greedy(llm, [prompts[7], prompts[5]], 24)
    assert (oracle.bad, oracle.freed) == (0, 0)
    assert {"2", "3", "5", "6", "7"} <= {*finished}
    assert [finished["7"], finished["5"]] == [tokens for tokens, _ in alone]


def test_a_window_does_not_push_prefixes_out_of_the_cache(llama_dir):
    """Conversations of 24 pages, each come back to: how many of their tokens a short pool still has.

    A cached prefix costs one exact page, that of its first tokens, whatever its length.
    """
    rows = [{"prompt_token_ids": row} for row in random_prompts(*[24 * 160 + 1] * 8)]
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    found = {}
    for window in (WINDOW, 0):
        with engine(
            llama_dir, "turboquant3.5", skip_tokenizer_init=True, additional_config=options(window), block_size=160,
            enable_prefix_caching=True, num_gpu_blocks_override=130, max_num_seqs=1, max_model_len=4096,
            hf_overrides={"max_position_embeddings": 4096},
        ) as llm:  # fmt: skip
            llm.generate(rows, params, use_tqdm=False)
            cached = [output.num_cached_tokens or 0 for output in llm.generate(rows[::-1], params, use_tqdm=False)]
            # What is computed again after a hit was found all the same.
            replayed = llm.llm_engine.engine_core.engine_core.scheduler.prefix_replay_tokens
            found[window] = sum(tokens + replayed for tokens in cached if tokens)
    print(f"tokens found in the prefix cache by window: {found}")
    assert found[0] > 15_000
    assert found[WINDOW] >= 0.9 * found[0]


@pytest.mark.matrix(feature="exact window: the pool is the formula", shape="llama, head_dim 128")
def test_the_pool_is_the_arithmetic(tmp_path):
    """At head_dim 128, in blocks of 160, against bf16: within one page of what `CacheLayout` says."""
    shape = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "max_position_embeddings": 32768}
    build(LlamaForCausalLM, llama_config(**shape)).bfloat16().save_pretrained(tmp_path)
    memory = 128 << 20
    for length, least in ((4096, 3.7), (32768, 4.3)):
        tokens = {}
        for fmt, more in (("auto", {}), ("turboquant3.5", {"block_size": 160})):
            with engine(tmp_path, fmt, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=length,
                        kv_cache_memory_bytes=memory, **more) as llm:  # fmt: skip
                tokens[fmt] = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        layout = CacheLayout(PRESETS["turboquant3.5"], 128, 160, DEFAULT_WINDOW)
        pages = memory // (2 * 2 * layout.page_bytes)
        assert tokens["turboquant3.5"] == pytest.approx(pages / layout.sequence_pages(length) * length, abs=160)
        assert tokens["turboquant3.5"] / tokens["auto"] >= least


@pytest.mark.matrix(feature="exact window", shape="qwen3.5 MoE hybrid (GDN + attention)")
def test_a_hybrid_holds_a_window(qwen35_moe_dir, monkeypatch):
    oracle = Oracle(monkeypatch)
    prompts = random_prompts(41, 201, 150)
    with engine(
        qwen35_moe_dir, "turboquant3.5", dtype="bfloat16", additional_config=options(WINDOW), skip_tokenizer_init=True,
        enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        oracle.watch_blocks(llm)
        ours, _ = greedy(llm, prompts, 8), greedy(llm, prompts, 8)
    theirs = through_transformers(qwen35_moe_dir, prompts, 8, dtype=torch.bfloat16, window=WINDOW)
    for (_, logprobs), (_, hf_logprobs, _) in zip(ours, theirs, strict=True):
        assert logprobs[0] == pytest.approx(hf_logprobs[0], abs=0.15)
    assert (oracle.bad, oracle.freed) == (0, 0)
    assert oracle.reads > 100


@pytest.mark.matrix(feature="hybrid KV cache manager off (no window, which the log says)", shape="llama")
def test_without_the_hybrid_manager_there_is_no_window(llama_dir):
    off = answers(llama_dir, FMT, WINDOW, disable_hybrid_kv_cache_manager=True)
    none = answers(llama_dir, FMT, 0)
    assert off == none
