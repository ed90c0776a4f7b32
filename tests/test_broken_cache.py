"""A cache that is broken in one layer is caught by every task, on the real small model."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from turboquant.cache import CacheSession
from turboquant.cache_layer import TurboQuantLayer
from turboquant.evals.candidates import Candidate
from turboquant.evals.hf_backend import HFBackend
from turboquant.evals.results import Results, paired_p
from turboquant.evals.suite import Suite
from turboquant.evals.tasks import Request

pytestmark = pytest.mark.usefixtures("one_thread")

# Of 30 layers. This model looks needles up with the one; without the other it speaks no sense.
LOOKING_UP, SPEAKING = 16, 1
BLOCK = 16
INTACT = Candidate.parse("turboquant4@0")
TASKS = ["divergence", "copying", "perplexity", "needle", "longgen"]


@contextmanager
def without_values(broken: int):
    """The cache's V of this layer is zero."""
    new_layer = CacheSession.new_layer

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        TurboQuantLayer.append(self, key_states, torch.zeros_like(value_states))

    def new_or_broken(self, index):
        layer = new_layer(self, index)
        if index == broken:
            layer.__class__ = type("Broken", (type(layer),), {"append": append})
        return layer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheSession, "new_layer", new_or_broken)
        yield


@pytest.fixture(scope="module")
def cells(demo_model_dir, tmp_path_factory):
    """(the exact cache's, the intact format's, the broken one's) finished cells by task."""
    backend = HFBackend(demo_model_dir)
    request = Request(
        demo_model_dir, 1024, context_length=128, limit=2, lengths=(256,), depths=(0.2, 0.5), max_new_tokens=12
    )

    def measured(candidates, tasks):
        results = Results(tmp_path_factory.mktemp("results"))
        list(Suite(backend, request, candidates, tasks, ["pydoc"], results=results).run())
        return {(cell.config["task"], cell.config["cache"]): cell for cell in results.all()}

    intact = measured([Candidate.parse("auto"), INTACT], TASKS)
    with without_values(LOOKING_UP):
        broken = measured([INTACT], TASKS[:-1])
    with without_values(SPEAKING):
        broken |= measured([INTACT], TASKS[-1:])
    return {task: (intact[task, "auto"], intact[task, INTACT.label], broken[task, INTACT.label]) for task in TASKS}


@pytest.mark.parametrize("task", ["divergence", "copying", "perplexity"])
def test_tasks_on_text_catch_it(cells, task):
    """By a paired test over stretches of positions, against the intact format."""
    _, intact, broken = cells[task]
    good, bad = intact.scores[0], broken.scores[0]
    assert paired_p(good, bad, block=BLOCK) < 0.05
    assert (bad - good).mean() > 0.02


def test_needles_catch_it(cells):
    """By the log-probability of every answer, in nats."""
    _, intact, broken = cells["needle"]
    assert (intact.scores[1] - broken.scores[1]).min() > 2.0
    assert broken.metrics["logprob_change"] < -2.0 < intact.metrics["logprob_change"]


def test_long_generation_catches_it(cells):
    exact, intact, broken = cells["longgen"]
    assert exact.metrics["equal_tokens"] == 1.0
    assert broken.metrics["equal_tokens"] < intact.metrics["equal_tokens"]
    assert broken.metrics["first_difference"] < intact.metrics["first_difference"]


def test_the_exact_cache_is_the_model_itself(cells):
    assert cells["divergence"][0].metrics["kl_max"] < 1e-6
    assert cells["copying"][0].metrics["kl_max"] < 1e-6
    needle = cells["needle"][0].metrics
    assert (needle["kept"], needle["logprob_change"]) == (1.0, 0.0)
    assert needle["accuracy"] == needle["exact_accuracy"] == 1.0  # all that is asked for
    # The perplexity of two independent ways to it.
    nll, other = (cells[task][0].scores[row] for task, row in (("perplexity", 0), ("divergence", 2)))
    torch.testing.assert_close(nll, other[~other.isnan()], atol=1e-4, rtol=1e-4)
