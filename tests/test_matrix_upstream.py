"""Two bugs of vLLM's own `turboquant_*` presets, held against ours: what fails there passes here.

The expectation is turned round for vLLM's presets, so that a test fails when they are mended.
"""

from __future__ import annotations

from types import SimpleNamespace

import models
import pytest
import torch

pytest.importorskip("vllm")

from engine import engine, greedy, random_prompts
from torch.nn.functional import scaled_dot_product_attention
from vllm import SamplingParams

from turboquant.formats import PRESETS
from turboquant.kernels.interface import attend, store_kv
from turboquant.kv_quantizer import make_params

pytestmark = pytest.mark.engine

UPSTREAM, OURS = "turboquant_4bit_nc", "turboquant3.5"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16
CACHED, NEW, FRESH = 64, 4, 100


def log_probabilities(model_dir, fmt: str, rows: list[list[int]], count: int) -> torch.Tensor:
    """Of the last `count` tokens of every row, as this cache scores them in chunks of 64."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with engine(model_dir, fmt, skip_tokenizer_init=True, max_num_batched_tokens=64, max_num_seqs=8) as llm:
        outputs = llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
    steps = [
        zip(row[-count:], output.prompt_logprobs[-count:], strict=True)
        for row, output in zip(rows, outputs, strict=True)
    ]
    return torch.tensor([[at[token].logprob for token, at in row] for row in steps])


@pytest.mark.matrix(feature="no silent garbage on a CPU (vLLM's own presets give it)", shape="llama, 8 layers")
def test_answers_of_an_exact_cache_are_near(tmp_path, record_property):
    """Upstream's presets start on a CPU without a word and write K and V into bytes; ours must stay near the truth."""
    model_dir = models.save_llama(tmp_path, num_hidden_layers=8)
    prompts = random_prompts(100, 130, 201)
    with engine(model_dir, "auto", skip_tokenizer_init=True) as llm:
        rows = [prompt + tokens for prompt, (tokens, _) in zip(prompts, greedy(llm, prompts, 16), strict=True)]
    exact = log_probabilities(model_dir, "auto", rows, 16)
    ours = (log_probabilities(model_dir, OURS, rows, 16) - exact).abs().mean().item()
    theirs = (log_probabilities(model_dir, UPSTREAM, rows, 16) - exact).abs().mean().item()
    record_property("mean_change_of_a_log_probability", f"{ours:.3f} with {OURS}, {theirs:.3f} with {UPSTREAM}")
    assert 5 * ours < theirs
    assert ours < 0.15


def causal(query, key, value) -> torch.Tensor:
    """Exact attention of the last tokens of one sequence, [n, H, D]."""
    mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    heads = (x.transpose(0, 1) for x in (query, key, value))
    return scaled_dot_product_attention(*heads, attn_mask=mask, scale=HEAD_DIM**-0.5, enable_gqa=True).transpose(0, 1)


@pytest.fixture
def batch():
    """A request with a cached prefix beside a longer fresh one: queries, and each request's whole K and V."""
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(n, NUM_HEADS, HEAD_DIM, generator=generator) for n in (NEW, FRESH)]
    states = [torch.randn(2, n, NUM_KV_HEADS, HEAD_DIM, generator=generator) for n in (CACHED + NEW, FRESH)]
    return queries, states


def upstream_prefill(batch, monkeypatch) -> torch.Tensor:
    """vLLM's own prefill, with torch in place of FlashAttention, which a CPU lacks. It gets no cache to read."""
    from vllm.v1.attention.backends import turboquant_attn as upstream

    def varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, **_):
        spans = [slice(a, b) for a, b in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)]
        return torch.cat([causal(q[s], k[s], v[s]) for s in spans])

    monkeypatch.setattr(upstream, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(upstream.TurboQuantAttentionImpl, "_flash_attn_varlen", varlen)
    queries, states = batch
    starts, lengths = torch.tensor([0, NEW, NEW + FRESH]), torch.tensor([CACHED + NEW, FRESH])
    metadata = SimpleNamespace(
        query_start_loc=starts, seq_lens=lengths, max_query_len=FRESH, max_seq_len=FRESH,
        query_start_loc_cpu=starts, seq_lens_cpu=lengths,
    )  # fmt: skip
    impl = object.__new__(upstream.TurboQuantAttentionImpl)
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale = NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5
    key, value = (torch.cat([states[0][i, CACHED:], states[1][i]]) for i in (0, 1))
    return impl._prefill_attention(torch.cat(queries), key, value, None, metadata, None, None)


def our_prefill(batch) -> torch.Tensor:
    queries, states = batch
    params = make_params(PRESETS["turboquant4"], HEAD_DIM)
    pages = torch.zeros(16, NUM_KV_HEADS, BLOCK, PRESETS["turboquant4"].slot_bytes(HEAD_DIM), dtype=torch.uint8)
    table = torch.tensor([[1, 2, 3, 4, 5, 0, 0], [6, 7, 8, 9, 10, 11, 12]], dtype=torch.int32)
    for blocks, (key, value) in zip(table, states, strict=True):
        at = torch.arange(len(key))
        store_kv(key, value, pages, blocks[at // BLOCK].long() * BLOCK + at % BLOCK, at, params)
    query, fresh = torch.cat(queries), [torch.cat([states[0][i, CACHED:], states[1][i]]) for i in (0, 1)]
    return attend(
        query, pages, table, torch.tensor([CACHED + NEW, FRESH], dtype=torch.int32),
        torch.tensor([0, NEW, NEW + FRESH], dtype=torch.int32), params, scale=HEAD_DIM**-0.5,
        fresh=tuple(fresh), out=torch.empty_like(query),
    )  # fmt: skip


@pytest.mark.matrix(
    feature="a cached prefix survives a longer fresh prompt beside it (vLLM bug 46460: not in vLLM's own presets)",
    shape="GQA 4:2",
)
def test_a_prefix_beside_a_longer_prompt(batch, monkeypatch):
    """On a CPU vLLM's preset is noise whatever the batch, so its prefill is called by itself."""
    queries, states = batch
    true, lost = causal(queries[0], *states[0]), causal(queries[0], *states[0][:, CACHED:])
    theirs, ours = upstream_prefill(batch, monkeypatch)[:NEW], our_prefill(batch)[:NEW]
    assert torch.allclose(theirs, lost, atol=1e-5)
    assert not torch.allclose(theirs, true, atol=0.1)
    assert (ours - true).norm() < 0.2 * true.norm() < 0.5 * (lost - true).norm()
