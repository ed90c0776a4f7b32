"""The divergence task on the real engine: the same figures as through Transformers, and rivals in a real engine."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from engine import random_prompts

from turboquant.evals.candidates import Candidate
from turboquant.evals.divergence import divergence, load_model
from turboquant.evals.engine_divergence import engine_divergence

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread", "reference_kernels")]

POOL = 64 << 20


def contexts(*lengths: int) -> torch.Tensor:
    return torch.tensor(random_prompts(*lengths))


def test_the_engine_and_transformers_measure_the_same(llama_dir):
    ids = contexts(300, 300)
    candidates = [Candidate.parse(name) for name in ("turboquant2.5@32", "turboquant2.5@0")]
    served = [row for _, row in engine_divergence(llama_dir, candidates, {"random": ids}, kv_cache_memory_bytes=POOL)]
    model = load_model(llama_dir, "float32")
    for candidate, row in zip(candidates, served, strict=True):
        here = divergence(model, candidate, ids)
        assert (row.backend, here.backend, row.kv_cache_dtype) == ("vllm", "hf", here.kv_cache_dtype)
        assert row.kl_mean == pytest.approx(here.kl_mean, rel=0.05)
        assert row.top1 == pytest.approx(here.top1, abs=0.02)
        assert row.bits_per_element == pytest.approx(here.bits_per_element)
        assert row.bits_per_element_with_window == pytest.approx(here.bits_per_element_with_window, rel=0.01)
    assert served[0].kl_mean < served[1].kl_mean


def test_rivals_in_the_engine(llama_dir):
    candidates = [Candidate.parse(name) for name in ("int8", "turboquant_3bit_nc")]
    run = engine_divergence(llama_dir, candidates, {"a": contexts(120)}, kv_cache_memory_bytes=POOL)
    served = [row for _, row in run]
    assert [row.kv_cache_dtype for row in served] == ["int8", "turboquant_3bit_nc"]
    assert all(row.simulated for row in served)
    assert 0 < served[0].kl_mean < 0.1 * served[1].kl_mean


def test_a_rival_with_a_window_is_refused(llama_dir):
    with pytest.raises(ValueError, match=r"fp8@64.*--backend hf"):
        next(engine_divergence(llama_dir, [Candidate.parse("fp8@64")], {"a": contexts(20)}))
