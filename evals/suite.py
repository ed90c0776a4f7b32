"""Run tasks on caches, cell by cell: what is finished is not computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turboquant.artifact import Artifact, find_artifact
from turboquant.evals.candidates import Candidate
from turboquant.evals.results import Cell, Results
from turboquant.evals.serving import EXACT_CACHE, Backend, Served
from turboquant.evals.tasks import Request, Task, find_tasks
from turboquant.evals.tasks.base import Sample, digest

NO_TEXT = "-"


@dataclass(frozen=True)
class Key:
    """A cell among those that were asked for."""

    task: str
    text: str
    candidate: Candidate


class Suite:
    """What `turboquant eval` was asked for; see there.

    Args:
        backend: serves the model.
        request: how much of which data.
        candidates: caches to measure.
        tasks: names, see `tasks.find_tasks`.
        texts: names, see `turboquant.text.load_text`.
        results: where finished cells are kept and found.
        on_cell: told what is measured, how many cells are done, and of how many.
        on_sample: told how many of a cell's samples are done, and of how many.

    Raises:
        ValueError: a task or a combination that there is not; before anything is computed.
    """

    def __init__(
        self,
        backend: Backend,
        request: Request,
        candidates: list[Candidate],
        tasks: list[str],
        texts: list[str],
        *,
        results: Results | None = None,
        on_cell: Callable[[str, int, int], None] = lambda what, done, total: None,
        on_sample: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.backend, self.request, self.candidates = backend, request, candidates
        self.results, self.on_cell, self.on_sample = results, on_cell, on_sample
        backend.check(candidates)
        found = [task for name in tasks for task in find_tasks(name, request)]
        for task in found:
            _check(task, backend)
        self.tasks = {task.name: task for task in found}
        self.data = {
            (task.name, text): task.samples(request, text)
            for task in self.tasks.values()
            for text in (texts if task.has_text else [NO_TEXT])
        }

    def wanted(self) -> list[Key]:
        """Every cell that was asked for, in order."""
        return [Key(*which, candidate) for which in self.data for candidate in self.candidates]

    def run(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Figures of every cell, measured or found finished."""
        finished = {}
        for key in self.wanted():
            found = self.results and self.results.load(self.cell(key))
            if found:
                finished[key] = found.metrics
        yield from finished.items()
        yield from _Run(self, [key for key in self.wanted() if key not in finished]).run()

    def cell(self, key: Key) -> Cell:
        """The cell's full name."""
        samples = self.data[key.task, key.text]
        lengths = [len(sample.prompt) + len(sample.answer) for sample in samples]
        settings = {
            "num_tokens": sum(lengths),
            "context_length": max(lengths),
            **self.backend.settings,
            **self.tasks[key.task].settings(self.request),
            "tokens_sha256": digest(samples),
            "calibration": calibration(self.request.model),
        }
        name = self.request.model.resolve().name
        return Cell(name, self.backend.name, key.task, key.text, key.candidate.label, tuple(sorted(settings.items())))


class _Run:
    """The unfinished cells: the exact cache first, whose answers the others are held against, then cache by cache."""

    def __init__(self, suite: Suite, todo: list[Key]) -> None:
        self.suite, self.todo = suite, todo
        self.done, self.exact = 0, {}

    def run(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        references = self._references()
        order = dict.fromkeys([EXACT_CACHE] if references else [], None) | dict.fromkeys(k.candidate for k in self.todo)
        for candidate in order:
            keys = [key for key in self.todo if key.candidate == candidate]
            longest = max(self._longest(key) for key in [*keys, *(references if candidate == EXACT_CACHE else [])])
            with self.suite.backend.serve(candidate, longest) as served:
                if candidate == EXACT_CACHE:
                    for key in references:
                        self._refer(served, key, asked=key in keys)
                for key in keys:
                    yield key, self._measure(served, key)
        self.suite.on_cell("done", self.done, len(self.todo))

    def _references(self) -> list[Key]:
        """Cells of the exact cache whose answers are needed and not kept."""
        if not self.suite.backend.has(EXACT_CACHE):
            return []
        needed = dict.fromkeys(Key(k.task, k.text, EXACT_CACHE) for k in self.todo if self._task(k).uses_exact)
        for key in needed:
            found = self.suite.results and self.suite.results.load(self.suite.cell(key))
            if found:
                self.exact[key.task, key.text] = self._task(key).recall(found, self._samples(key))
        return [key for key in needed if self.exact.get((key.task, key.text)) is None]

    def _refer(self, served: Served, key: Key, asked: bool) -> None:
        """The exact cache's answers, kept where they can be read again."""
        seen = self._observe(served, key, "reference for ")
        self.exact[key.task, key.text] = seen
        if not asked and not self._task(key).needs_states:
            self._save(served, key, seen)

    def _measure(self, served: Served, key: Key) -> dict[str, Any]:
        exact = self.exact.get((key.task, key.text))
        # Distributions are compared with those of a second run, which shows what comparing itself gets wrong.
        again = key.candidate != EXACT_CACHE or self._task(key).needs_states or exact is None
        figures = self._save(served, key, self._observe(served, key) if again else exact)
        self.done += 1
        return figures

    def _observe(self, served: Served, key: Key, what: str = "") -> list[Any]:
        on = f" on {Path(key.text).name}" if key.text != NO_TEXT else ""
        self.suite.on_cell(f"{what}{key.task} of {key.candidate.label}{on}", self.done, len(self.todo))
        samples, on_sample = self._samples(key), self.suite.on_sample
        on_sample(0, len(samples))
        return self._task(key).observe_all(
            served, samples, self.suite.request, lambda done: on_sample(done, len(samples))
        )  # fmt: skip

    def _save(self, served: Served, key: Key, seen: list[Any]) -> dict[str, Any]:
        suite, task, samples = self.suite, self._task(key), self._samples(key)
        measured = task.judge(samples, self.exact.get((key.task, key.text)), seen, served)
        cell = suite.cell(key)
        settings = dict(cell.settings)
        figures = {
            "task": task.name,
            "primary": task.primary,
            "higher_is_better": task.higher_is_better,
            "rows": list(task.rows),
            "block": task.block,
            **measured.figures,
            "primary_interval": measured.figures.get(task.interval_name),
            **served.bits(settings["context_length"] or suite.request.max_length),
            "kv_cache_dtype": key.candidate.name,
            "window": key.candidate.window,
            "simulated": key.candidate.simulated,
            "num_tokens": settings["num_tokens"],
            "context_length": settings["context_length"],
            "backend": suite.backend.name,
        }
        if suite.results is not None:
            suite.results.save(cell, figures, measured.scores, measured.samples)
        return figures

    def _longest(self, key: Key) -> int:
        """Tokens of the longest sequence that a cell makes."""
        if not self._task(key).has_text:
            return self.suite.request.max_length - 1
        lengths = [len(sample.prompt) + len(sample.answer) for sample in self._samples(key)]
        return max(lengths) + self._task(key).extra_tokens(self.suite.request)

    def _task(self, key: Key) -> Task:
        return self.suite.tasks[key.task]

    def _samples(self, key: Key) -> list[Sample]:
        return self.suite.data[key.task, key.text]


def _check(task: Task, backend: Backend) -> None:
    """Raises:
    ValueError: this task cannot be run on this back end.
    """
    if task.needs_states and not backend.has_states:
        raise ValueError(
            f"{task.name} compares whole distributions, which the API of a server does not give: use --backend hf or "
            "vllm, or perplexity, which tells the same top-1 and the change of perplexity there, too."
        )
    if task.needs_exact and not backend.has(EXACT_CACHE):
        raise ValueError(
            f"{task.name} is nothing without the exact cache's answers: add auto to --kv-cache-dtype, and a server of "
            "it to --base-url."
        )
    if backend.settings["position_offset"] and not task.moves:
        raise ValueError(f"{task.name} reads a text at its own positions: leave --position-offset out.")


def calibration(model: Path) -> str | None:
    """SHA-256 of the means that this model is measured with; None without an artifact."""
    path = find_artifact(model)
    return None if path is None else Artifact.load(path).info.tensors_sha256
