"""Run tasks on caches, cell by cell: what is finished is not computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from turboquant.artifact import Artifact, find_artifact
from turboquant.evals.candidates import Candidate
from turboquant.evals.divergence import Divergence, divergence, load_model, repeated, tokenize
from turboquant.evals.results import Cell, Results
from turboquant.text import load_text

TASKS = ("divergence", "copying")
BACKENDS = ("hf", "vllm")


@dataclass(frozen=True)
class Suite:
    """What `turboquant eval` was asked for; see there.

    Raises:
        ValueError: a task or a combination that there is not.
    """

    model: Path
    candidates: list[Candidate]
    tasks: list[str]
    texts: list[str]
    num_tokens: int
    context_length: int
    backend: str = "hf"
    dtype: str = "float32"
    key_mean: str = "auto"
    position_offset: int = 0
    results: Results | None = None
    on_cell: Callable[[str, int, int], None] = field(default=lambda what, done, total: None)

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not a task; allowed: {', '.join(TASKS)}.")
        if self.backend == "vllm" and (self.tasks != ["divergence"] or self.position_offset):
            raise ValueError("--backend vllm measures divergence at a text's own positions: use hf for the rest.")

    def run(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(task, text, figures) of every cell, measured or found finished."""
        contexts = {
            name: tokenize(self.model, load_text(name), self.num_tokens, self.context_length) for name in self.texts
        }
        cells = {
            (task, text, candidate): self._cell(task, text, candidate, contexts[text])
            for task in self.tasks
            for candidate in self.candidates
            for text in self.texts
        }
        finished = {}
        if self.results is not None:
            finished = {key: found.metrics for key, cell in cells.items() if (found := self.results.load(cell))}
        todo = [key for key in cells if key not in finished]
        measured = self._transformers(todo, contexts) if self.backend == "hf" else self._engine(todo, contexts)
        for key, figures in finished.items():
            yield key[0], key[1], figures
        for key, row in measured:
            if self.results is not None:
                self.results.save(cells[key], row.figures(), row.scores)
            yield key[0], key[1], row.figures()

    def _cell(self, task: str, text: str, candidate: Candidate, contexts: torch.Tensor) -> Cell:
        settings = {
            "num_tokens": self.num_tokens,
            "context_length": contexts.shape[1],
            "dtype": self.dtype,
            "key_mean": self.key_mean,
            "position_offset": self.position_offset,
            "tokens_sha256": hashlib.sha256(contexts.numpy().tobytes()).hexdigest(),
            "calibration": calibration(self.model),
        }
        return Cell(self.model.name, self.backend, task, text, candidate.label, tuple(sorted(settings.items())))

    def _transformers(self, todo, contexts) -> Iterator[tuple[tuple, Divergence]]:
        if not todo:
            return
        model = load_model(self.model, self.dtype)
        for done, (task, text, candidate) in enumerate(todo):
            self.on_cell(f"{task} of {candidate.label} on {text}", done, len(todo))
            ids = repeated(contexts[text]) if task == "copying" else contexts[text]
            yield (task, text, candidate), divergence(
                model, candidate, ids, key_mean=self.key_mean, position_offset=self.position_offset,
                score_from=ids.shape[1] // 2 if task == "copying" else 0,
            )  # fmt: skip
        self.on_cell("done", len(todo), len(todo))

    def _engine(self, todo, contexts) -> Iterator[tuple[tuple, Divergence]]:
        from turboquant.evals.engine_divergence import engine_divergence

        candidates = [candidate for candidate in self.candidates if any(key[2] == candidate for key in todo)]
        if not candidates:
            return
        rows = engine_divergence(
            self.model, candidates, contexts, dtype=self.dtype, key_mean=self.key_mean,
            on_progress=lambda what: self.on_cell(f"engine with {what}", 0, len(todo)),
        )  # fmt: skip
        by_label = {(candidate.name, candidate.window): candidate for candidate in candidates}
        for text, row in rows:
            yield ("divergence", text, by_label[row.kv_cache_dtype, row.window]), row


def calibration(model: Path) -> str | None:
    """SHA-256 of the means that this model is measured with; None without an artifact."""
    path = find_artifact(model)
    return None if path is None else Artifact.load(path).info.tensors_sha256
