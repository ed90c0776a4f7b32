"""The evaluation on the real engine: the same figures as through Transformers, task by task, rivals included."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from turboquant.evals.backends import make_backend
from turboquant.evals.candidates import Candidate
from turboquant.evals.results import Results
from turboquant.evals.suite import Suite
from turboquant.evals.tasks import Request
from turboquant.evals.vllm_backend import VllmBackend
from turboquant.kernels.interface import FORCE_ENV

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

CACHES = ("turboquant2.5@32", "turboquant2.5", "turboquant_3bit_nc")
TASKS = ["divergence", "copying", "perplexity", "needle", "longgen"]


@pytest.fixture(scope="module")
def cells(worded_llama_dir, tmp_path_factory):
    """Finished cells of both back ends by task and cache."""
    request = Request(worded_llama_dir, 1024, context_length=256, limit=2, lengths=(256,), max_new_tokens=12)
    candidates = [Candidate.parse(name, window=0) for name in CACHES]
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # The specification itself, in the engine as in Transformers: equal to a few parts in a million.
        patch.setenv(FORCE_ENV, "reference")
        for name in ("hf", "vllm"):
            results = Results(tmp_path_factory.mktemp(name))
            backend = make_backend(name, worded_llama_dir, candidates)
            for _ in Suite(backend, request, candidates, TASKS, ["pydoc"], results=results).run():
                pass
            found[name] = {(cell.config["task"], cell.config["cache"]): cell for cell in results.all()}
    return found


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("task", ["divergence", "copying"])
def test_both_measure_the_same_divergence(cells, task, cache):
    here, served = (cells[name][task, cache].metrics for name in ("hf", "vllm"))
    assert (here["backend"], served["backend"]) == ("hf", "vllm")
    assert served["kl_mean"] == pytest.approx(here["kl_mean"], rel=0.05)
    low, high = here["kl_interval"]
    assert low <= served["kl_mean"] <= high
    assert served["top1"] == pytest.approx(here["top1"], abs=0.02)
    for bits in ("bits_per_element", "bits_per_element_with_window", "bits_at_16"):
        assert served[bits] == pytest.approx(here[bits], rel=0.01)


def test_the_window_is_closer(cells):
    windowed, packed = (cells["vllm"]["divergence", cache].metrics["kl_mean"] for cache in CACHES[:2])
    assert 0 < windowed < packed


@pytest.mark.parametrize("cache", ["auto", *CACHES])
def test_both_score_the_same(cells, cache):
    """Log-probabilities of every token of a text, and of the answers to be found in it."""
    for task, row in (("perplexity", 0), ("needle", 1)):
        here, served = (cells[name][task, cache].scores[row] for name in ("hf", "vllm"))
        assert served.mean().item() == pytest.approx(here.mean().item(), abs=5e-3)
        assert (served - here).abs().median() < 1e-3
    same_top = [cells[name]["perplexity", cache].scores[3] for name in ("hf", "vllm")]
    assert torch.eq(*same_top).double().mean() > 0.98


@pytest.mark.parametrize("cache", ["auto", *CACHES])
def test_both_generate_the_same(cells, cache):
    here, served = ([s["tokens"] for s in cells[name]["longgen", cache].samples] for name in ("hf", "vllm"))
    # Of two answers one may part where two tokens tie.
    assert any(a == b for a, b in zip(here, served, strict=True))


@pytest.mark.parametrize("name", ["fp8@64", "turboquant_3bit_nc+boundary"])
def test_what_no_engine_can_do_is_refused(llama_dir, name):
    candidate = Candidate.parse(name)
    with pytest.raises(ValueError, match="--backend hf"):
        VllmBackend(llama_dir).check([candidate])
