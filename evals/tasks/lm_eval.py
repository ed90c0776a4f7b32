"""Any task of lm-evaluation-harness as a task of ours, on every back end.

Of RULER, six tasks generate their data and need no network (RULER_OFFLINE); the others take text from the hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from turboquant.evals.serving import Served
from turboquant.evals.tasks.base import Measured, Request, Sample, Task

PREFIX = "lm_eval:"
# As in lm-eval. "ruler_offline" stands for these; ruler_cwe and the niah ones need the package wonderwords.
RULER_OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
NAMES = {"ruler_offline": list(RULER_OFFLINE)}
RULER = ("ruler", "niah_")
RULER_LEAST = 1024  # below, some of its generators never end
INSTALL = "pip install 'turboquant-toolkit[eval]'"


class LmEvalTask(Task):
    """One task of lm-eval, as it is: its prompts, few-shot examples and metrics.

    Attributes:
        task: lm-eval's own object, with its data.
        manager: lm-eval's index of tasks.
    """

    has_text = False
    uses_exact = False

    def __init__(self, name: str, task: Any, manager: Any) -> None:
        self.name, self.task, self.manager = PREFIX + name, task, manager
        better = task.higher_is_better()
        metric = next(iter(better))
        # RULER's metrics are lengths, each of the samples that have it.
        self._by_length = all(name.isdecimal() for name in better)
        self.primary = "score" if self._by_length else metric
        self.higher_is_better = better[metric] is not False
        self.rows = self.shown = (self.primary,)
        # Before a run, which writes defaults into it.
        config = json.dumps(task.config.to_dict(), sort_keys=True, default=str)
        self._settings = {
            "lm_eval_config_sha256": hashlib.sha256(config.encode()).hexdigest(),
            "num_fewshot": task.get_config("num_fewshot") or 0,
        }

    def samples(self, request: Request, text: str) -> list[Sample]:
        """The task's documents; prompts are made of them by lm-eval."""
        docs = list(self.task.eval_docs)[: request.limit]
        return [Sample([], about={"doc": json.loads(json.dumps(doc, default=str))}) for doc in docs]

    def settings(self, request: Request) -> dict[str, Any]:
        return self._settings

    def observe_all(
        self, served: Served, samples: list[Sample], request: Request, on_sample: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """lm-eval's record of each document; with several filters those of the first."""
        from lm_eval.evaluator import simple_evaluate

        from turboquant.evals.lm_eval_model import ServedLM

        # A server that scores a prompt generates one more token.
        lm = ServedLM(served, request.tokenizer, request.max_length - 1, on_sample)
        results = simple_evaluate(
            lm, tasks=[self.task], task_manager=self.manager, limit=request.limit, bootstrap_iters=0
        )  # fmt: skip
        (records,) = results["samples"].values()
        (figures,) = results["results"].values()
        first = [record for record in records if record["filter"] == records[0]["filter"]]
        numbers = {name.split(",")[0]: x for name, x in figures.items() if isinstance(x, int | float)}
        return [{**record, "figures": numbers} for record in first]

    def judge(self, samples: list[Sample], exact: None, seen: list[dict[str, Any]], served: Served) -> Measured:
        scores = torch.tensor([self._score(record) for record in seen], dtype=torch.float64)
        figures = self.mean(self.primary, scores)
        if self._by_length:
            lengths = torch.tensor([record["doc"]["max_length"] for record in seen])
            figures |= {f"score_{n}": scores[lengths == n].mean().item() for n in lengths.unique().tolist()}
        else:
            # A mean over documents is not what every metric is: lm-eval's own figure stands.
            figures |= seen[0]["figures"]
        kept = ("doc_id", "target", "filtered_resps", "doc_hash")
        records = [
            {**{key: _plain(record[key]) for key in kept if key in record}, self.primary: score}
            for record, score in zip(seen, scores.tolist(), strict=True)
        ]
        return Measured({**figures, "num_samples": len(seen)}, scores[None], records)

    def _score(self, record: dict[str, Any]) -> float:
        if self._by_length:
            return float(record[str(record["doc"]["max_length"])])
        value = record[self.primary]
        if isinstance(value, tuple | list):  # of a whole document: log-likelihood and how many words or bytes
            return -value[0] / value[1]
        return float(value)


def lm_eval_tasks(name: str, request: Request) -> list[LmEvalTask]:
    """The tasks of lm-eval behind a name, a group, a tag or the path of a .yaml; none if it knows no such name.

    Raises:
        ValueError: the data of one cannot be had, with which and why; or lengths that RULER cannot do.
    """
    if find_spec("lm_eval") is None:
        return []
    from lm_eval.tasks import TaskManager

    lengths = [n for n in request.lengths if n <= request.max_length]
    if name.startswith(RULER) and min(lengths, default=0) < RULER_LEAST:
        raise ValueError(
            f"{name}: RULER makes prompts of {RULER_LEAST} to, for this model, {request.max_length} tokens: give other "
            "--lengths."
        )
    names = NAMES.get(name, [name])
    paths = all(one.endswith((".yaml", ".yml")) for one in names)
    # Its index of all tasks takes seconds.
    manager = TaskManager(
        include_defaults=not paths, metadata={"max_seq_lengths": lengths, "pretrained": str(request.model)}
    )
    if not paths and any(one not in manager.all_tasks for one in names):
        return []
    try:
        found = manager.load(names)["tasks"]
    except Exception as error:
        # Whatever a task's own code raises.
        raise ValueError(_cannot_load(name, error)) from error
    return [LmEvalTask(one, task, manager) for one, task in found.items()]


def _cannot_load(name: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"lm-eval's task {name} needs another package ({error}): {INSTALL}."
    reason = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
    return (
        f"lm-eval cannot load {name}: {type(error).__name__}: {reason}. A task whose data lies on the Hugging Face hub "
        f"needs it in reach. Of RULER, {', '.join(RULER_OFFLINE)} need no network: all of them are ruler_offline."
    )


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
