"""All tasks by name. Another task is another file here and another entry below."""

from __future__ import annotations

from turboquant.evals.tasks.base import Request, Task
from turboquant.evals.tasks.copying import Copying
from turboquant.evals.tasks.divergence import Divergence
from turboquant.evals.tasks.layers import Layers
from turboquant.evals.tasks.lm_eval import INSTALL, PREFIX, lm_eval_tasks
from turboquant.evals.tasks.longgen import LongGeneration
from turboquant.evals.tasks.needle import MultiNeedle, Needle
from turboquant.evals.tasks.perplexity import Perplexity

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Divergence, Copying, Layers, Perplexity, Needle, MultiNeedle, LongGeneration)
}


def find_tasks(name: str, request: Request) -> list[Task]:
    """The tasks behind a name; several for a group of lm-eval's.

    Args:
        name: one of ours, or `lm_eval:NAME`, or a NAME that lm-eval knows.
        request: for tasks that generate their prompts when they are made.

    Raises:
        ValueError: there is none, or its data cannot be had.
    """
    if name in TASKS:
        return [TASKS[name]()]
    found = lm_eval_tasks(name.removeprefix(PREFIX), request)
    if found:
        return found
    raise ValueError(
        f"{name!r} is not a task; allowed: {', '.join(TASKS)}, ruler_offline, and any task of lm-eval by its name "
        f"(`turboquant lm-eval ls tasks` lists them; {INSTALL})."
    )
