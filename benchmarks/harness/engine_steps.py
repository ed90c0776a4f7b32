"""Drives a vLLM engine in this process through a trace of requests, and records what every step did and took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turboquant.planner.roofline import Work
from turboquant.simulator.trace import Trace

# "cpu" is the time that this process computes: on a machine that others use, too, what it would take alone.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Recorder:
    """Steps of an engine.

    Attributes:
        clock: in seconds.
        works, seconds: of every step that computed something.
        preemptions: so far.
    """

    clock: Callable[[], float] = time.perf_counter
    works: list[Work] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    preemptions: int = 0
    scheduled: Work | None = None

    def step(self, engine: Any) -> list[Any]:
        """One step of the engine."""
        self.scheduled = None
        begin = self.clock()
        outputs = engine.step()
        if self.scheduled is not None and self.scheduled.tokens:
            self.works.append(self.scheduled)
            self.seconds.append(self.clock() - begin)
        return outputs


@contextmanager
def recording(llm: Any, clock: str = "wall") -> Iterator[Recorder]:
    """Watch the scheduler of an engine that runs in this process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    recorder, schedule = Recorder(CLOCKS[clock]), scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        decodes, prefills = [], []
        for request, new in output.num_scheduled_tokens.items():
            cached = scheduler.requests[request].num_computed_tokens - new
            if new == 1 and cached:
                decodes.append(cached + 1)
            else:
                prefills.append((cached, new))
        recorder.scheduled = Work(np.array(decodes, np.int64), prefills)
        recorder.preemptions += len(output.preempted_req_ids or ())
        return output

    scheduler.schedule = watched
    try:
        yield recorder
    finally:
        scheduler.schedule = schedule


@dataclass(frozen=True)
class Played:
    """Times of a trace, seconds from its start."""

    first_token_s: np.ndarray
    finish_s: np.ndarray
    preemptions: int


def play(llm: Any, recorder: Recorder, trace: Trace, vocabulary: int, seed: int) -> Played:
    """Send the trace's requests to the engine when they arrive; time in which there is nothing to do is skipped.

    Prompts are random, so that they share no prefix.
    """
    from vllm import SamplingParams

    engine, rng, before = llm.llm_engine, np.random.default_rng(seed), recorder.preemptions
    first, finish = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    sent, begin = 0, recorder.clock()
    while sent < len(trace) or engine.has_unfinished_requests():
        now = recorder.clock() - begin
        if not engine.has_unfinished_requests() and trace.arrival_s[sent] > now:
            begin -= trace.arrival_s[sent] - now
            now = trace.arrival_s[sent]
        while sent < len(trace) and trace.arrival_s[sent] <= now:
            prompt = rng.integers(10, vocabulary, trace.prompt_tokens[sent]).tolist()
            params = SamplingParams(
                temperature=0, max_tokens=int(trace.output_tokens[sent]), ignore_eos=True, detokenize=False
            )
            engine.add_request(f"{seed}-{sent}", {"prompt_token_ids": prompt}, params)
            sent += 1
        outputs = recorder.step(engine)
        now = recorder.clock() - begin
        for output in outputs:
            request = int(output.request_id.split("-")[1])
            if output.outputs[0].token_ids and np.isnan(first[request]):
                first[request] = now
            if output.finished:
                finish[request] = now
    return Played(first, finish, recorder.preemptions - before)


def grid(batches: list[int], contexts: list[int], new_tokens: int) -> list[Trace]:
    """Traces for a fit: so many requests of a length at once, each decoding a few tokens."""
    return [
        Trace(np.zeros(batch), np.full(batch, context), np.full(batch, new_tokens))
        for context in contexts
        for batch in batches
    ]
