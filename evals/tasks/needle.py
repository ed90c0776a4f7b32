"""Needles in a haystack: numbers hidden in real text, asked for by name at its end, in the model's chat format.

Two scores: whether the greedy answer has the right digits, and the log-probability of the right answer, which moves
long before an answer flips and tells something of models that seldom answer right. What a model cannot do with an
exact cache says nothing of a cache: the exact cache's answers stand beside all figures.

The question's wording is repeated in the needle, so that small models can answer by looking up and copying.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

import torch

from turboquant.evals.results import Finished, interval
from turboquant.evals.serving import Served
from turboquant.evals.tasks.base import Measured, Request, Sample, Task

KEYS = (
    "amber", "anchor", "basket", "beacon", "bridge", "candle", "canyon", "castle", "cedar", "circus", "cobalt",
    "comet", "copper", "coral", "desert", "dragon", "eagle", "ember", "falcon", "forest", "garden", "glacier",
    "hammer", "harbor", "hazel", "island", "ivory", "jungle", "kettle", "lantern", "lemon", "maple", "marble",
    "meadow", "mirror", "nectar", "ocean", "olive", "orchid", "palace", "pepper", "planet", "quartz", "raven",
    "ribbon", "river", "saddle", "silver", "temple", "thunder", "tunnel", "valley", "velvet", "violet", "walnut",
    "willow", "winter", "zebra",
)  # fmt: skip
INTRO = "Some special magic numbers are hidden within the following text. Make sure to memorize them."
FACT = "The special magic number for {key} is: "
QUESTION = "What is the special magic number for {key}?"
DIGITS = 6
ANSWER_ROOM = 16  # tokens that a greedy answer may take
ROOM = 2 * ANSWER_ROOM  # kept free for the right answer and the greedy one
TRIES = 8


class Needle(Task):
    """One needle in each haystack, on a grid of lengths and depths."""

    name = "needle"
    primary = "accuracy"
    shown = ("accuracy", "exact_accuracy", "kept", "answer_logprob", "exact_answer_logprob")
    higher_is_better = True
    rows = ("correct", "answer_logprob", "exact_correct", "exact_answer_logprob", "length", "depth")

    def samples(self, request: Request, text: str) -> list[Sample]:
        """As many as `request.limit` says, or one for each length and depth; a prefix of them covers all lengths."""
        lengths = [n for n in request.lengths if n <= request.max_length]
        if not lengths:
            raise ValueError(
                f"{self.name}: this model reads {request.max_length} tokens, fewer than any of "
                f"{', '.join(map(str, request.lengths))}: give --lengths."
            )
        haystack = request.tokens(text)
        depths = request.depths
        grid = [(n, depths[(i + j) % len(depths)]) for i in range(len(depths)) for j, n in enumerate(lengths)]
        count = request.limit or len(grid)
        chosen = sorted((i // len(grid), *grid[i % len(grid)]) for i in range(count))
        return self.build(request, haystack, chosen)

    def build(self, request: Request, haystack: list[int], chosen: list[tuple[int, int, float]]) -> list[Sample]:
        """Samples for (repeat, length, depth), all tokens below `length` with the answer."""
        samples = []
        for repeat, length, depth in chosen:
            random = Random(f"{request.seed}/{repeat}/{length}/{depth}")
            ((key, value),) = _facts(random, 1)
            prompt = _prompt(request, random, haystack, length, {depth: (key, value)}, key)
            samples.append(_sample(request, prompt, length, depth, key, value, shared=len(prompt) - 1))
        return samples

    def extra_tokens(self, request: Request) -> int:
        return ANSWER_ROOM

    def settings(self, request: Request) -> dict[str, Any]:
        return {"seed": request.seed}

    def observe(self, served: Served, sample: Sample, request: Request) -> dict[str, Any]:
        """Log-probability of the answer in nats, and the greedy answer."""
        served.hold(sample.prompt[: sample.shared])
        logprob = served.score(sample.prompt, sample.answer).logprobs.sum().item()
        text = request.tokenizer.decode(served.generate(sample.prompt, ANSWER_ROOM), skip_special_tokens=True)
        return {"answer_logprob": logprob, "text": text, "correct": _number(text) == sample.about["value"]}

    def judge(self, samples: list[Sample], exact: list[dict] | None, seen: list[dict], served: Served) -> Measured:
        unknown = {"correct": torch.nan, "answer_logprob": torch.nan}
        columns = [
            (*_pair(b), *_pair(a), sample.about["length"], sample.about["depth"])
            for sample, a, b in zip(samples, exact or [unknown] * len(seen), seen, strict=True)
        ]
        scores = torch.tensor(columns, dtype=torch.float64).T
        figures = {**self.mean("accuracy", scores[0]), **self.mean("answer_logprob", scores[1])}
        if exact is not None:
            figures |= _beside_exact(scores)
        records = [{**s.about, "prompt_tokens": len(s.prompt), **b} for s, b in zip(samples, seen, strict=True)]
        return Measured({**figures, "grid": _grid(scores)}, scores, records)

    def recall(self, finished: Finished, samples: list[Sample]) -> list[dict]:
        return finished.samples


class MultiNeedle(Needle):
    """A needle at every depth of the same haystack, each asked for in turn: the others distract.

    Questions share all tokens before them, so that a back end that holds a prefix reads each haystack once.
    """

    name = "multineedle"

    def build(self, request: Request, haystack: list[int], chosen: list[tuple[int, int, float]]) -> list[Sample]:
        samples = []
        for (repeat, length), group in itertools.groupby(chosen, key=lambda one: one[:2]):
            facts = _facts(Random(f"{request.seed}/{repeat}/{length}"), len(request.depths))
            needles = dict(zip(request.depths, facts, strict=True))
            same = []
            for _, _, depth in group:
                random = Random(f"{request.seed}/{repeat}/{length}")
                prompt = _prompt(request, random, haystack, length, needles, needles[depth][0])
                same.append(_sample(request, prompt, length, depth, *needles[depth]))
            shared = _common([s.prompt for s in same])
            samples += [replace(s, shared=shared) for s in same]
        return samples


def _facts(random: Random, count: int) -> list[tuple[str, str]]:
    """Different keys, each with a number."""
    if count > len(KEYS):
        raise ValueError(f"{count} depths are more than the {len(KEYS)} names of needles: give fewer --depths.")
    low, high = 10 ** (DIGITS - 1), 10**DIGITS - 1
    return [(key, str(random.randint(low, high))) for key in random.sample(KEYS, count)]


def _common(prompts: list[list[int]]) -> int:
    """How many tokens all of them begin with; all but the last of a single one."""
    differ = (i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    return next(differ, min(map(len, prompts)) - 1)


def _sample(request: Request, prompt: list[int], length: int, depth: float, key: str, value: str, shared: int = 0):
    # A number behind a colon: the space before it belongs to the answer, as the model would write it.
    answer = request.tokenizer(" " + value, add_special_tokens=False).input_ids
    return Sample(prompt, answer, {"length": length, "depth": depth, "key": key, "value": value}, shared)


def _prompt(
    request: Request, random: Random, haystack: list[int], length: int, needles: dict[float, tuple[str, str]], key: str
) -> list[int]:
    """Token ids of a chat with a haystack that asks for `key`, at most length - ROOM of them and nearly so many.

    Raises:
        ValueError: the text is too short for it.
    """
    goal = length - ROOM
    # All questions to one haystack cut the same piece out of the text.
    longest = max((k for k, _ in needles.values()), key=len)
    count = goal - len(_encode(request, _chat(request, "", needles, longest)))
    if not 0 < count <= len(haystack):
        raise ValueError(
            f"a haystack of {length} tokens needs {max(count, 1)} tokens of text, and there are {len(haystack)}: give "
            "a longer text or other --lengths."
        )
    start = random.randint(0, len(haystack) - count)
    for _ in range(TRIES):
        text = request.tokenizer.decode(haystack[start : start + count])
        over = max(len(_encode(request, _chat(request, text, needles, k))) for k, _ in needles.values()) - goal
        if over <= 0:
            return _encode(request, _chat(request, text, needles, key))
        count -= over
    raise ValueError(f"no haystack of {length} tokens could be cut out of this text: give another one.")


def _chat(request: Request, text: str, needles: dict[float, tuple[str, str]], key: str) -> str:
    """The whole chat up to the number that is asked for."""
    content = "\n\n".join((INTRO, _hide(text, needles), QUESTION.format(key=key)))
    begun = FACT.format(key=key).rstrip()
    if not request.tokenizer.chat_template:
        return f"{content}\n\n{begun}"
    chat = request.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return chat + begun


def _encode(request: Request, chat: str) -> list[int]:
    """A chat template writes its own special tokens."""
    return request.tokenizer(
        chat, add_special_tokens=not request.tokenizer.chat_template, verbose=False
    ).input_ids  # fmt: skip


def _hide(text: str, needles: dict[float, tuple[str, str]]) -> str:
    """Put each needle behind the sentence that ends nearest to its depth."""
    ends = [match.end() for match in re.finditer(r"[.!?]\s+|\n", text)] or [len(text)]
    total = len(text)
    for depth in sorted(needles, reverse=True):
        key, value = needles[depth]
        wanted = depth * total
        # The very start and the very end are no sentences' ends.
        at = round(wanted) if depth in (0, 1) else min(ends, key=lambda end: abs(end - wanted))
        text = f"{text[:at].rstrip(' ')} {FACT.format(key=key)}{value}. {text[at:]}".lstrip(" ")
    return text


def _pair(observed: dict[str, Any]) -> tuple[float, float]:
    return observed["correct"], observed["answer_logprob"]


def _number(text: str) -> str | None:
    """The first number of an answer, written with or without commas."""
    found = re.search(r"\d[\d,]*", text)
    return found and found[0].replace(",", "")


def _beside_exact(scores: torch.Tensor) -> dict[str, Any]:
    correct, logprob, exact_correct, exact_logprob = scores[:4]
    able = exact_correct == 1
    return {
        "exact_accuracy": exact_correct.mean().item(),
        "exact_answer_logprob": exact_logprob.mean().item(),
        # Of what the model itself can do.
        "kept": correct[able].mean().item() if able.any() else None,
        "logprob_change": (logprob - exact_logprob).mean().item(),
        "logprob_change_interval": interval(logprob - exact_logprob, block=1),
    }


def _grid(scores: torch.Tensor) -> list[dict[str, Any]]:
    """Means by length and depth."""
    groups = defaultdict(list)
    for column in scores.T.tolist():
        groups[int(column[4]), column[5]].append(column)
    names = ("accuracy", "answer_logprob", "exact_accuracy", "exact_answer_logprob")
    return [
        {"length": n, "depth": d, "samples": len(rows), **{k: _mean(rows, i) for i, k in enumerate(names)}}
        for (n, d), rows in sorted(groups.items())
    ]


def _mean(rows: list[list[float]], index: int) -> float | None:
    mean = sum(row[index] for row in rows) / len(rows)
    return None if mean != mean else mean
