"""The step loop: vLLM's continuous batching over a pool of blocks.

One step, as in vLLM's scheduler (v1/core/sched/scheduler.py, policy fcfs):
- running requests come first, in order of admission: one token each that decodes, what the token budget leaves for
  prompts;
- where blocks are missing, the request admitted last is preempted: its blocks are freed, it is computed again later;
- if nothing was preempted, waiting requests are admitted while the budget, max_num_seqs and the pool allow, and only if
  the whole of what is known of them fits.

Steps in which nothing but decoding happens are taken together up to the next event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from turboquant.planner.pages import Paging
from turboquant.planner.roofline import Work
from turboquant.planner.shape import RECURRENT
from turboquant.simulator.costs import Costs
from turboquant.simulator.result import Outcome, Timeline
from turboquant.simulator.trace import Trace, check_lengths


class PoolTooSmall(ValueError):
    """A request does not fit into the pool even alone."""


def block_table(paging: Paging, longest: int) -> np.ndarray:
    """int64 [longest + 1]: blocks that a sequence of so many tokens holds."""
    sizes = {group.block_size for group in paging.groups if group.kind != RECURRENT}
    starts = sorted({1, *(n for size in sizes for n in range(1, longest + 1, size))})
    counts = np.array([0, *(paging.blocks(n) for n in starts)])
    return np.repeat(counts, np.diff([0, *starts, longest + 1]))


@dataclass
class Replay:
    """One run. Arrays are by request, in order of arrival.

    Args:
        blocks: of the pool, without the one that vLLM keeps back.
        max_concurrency: requests in the system at a time; further ones arrive when one ends. None: as in the trace.
    """

    trace: Trace
    paging: Paging
    blocks: int
    costs: Costs
    max_concurrency: int | None = None
    now: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        serving, count = self.paging.serving, len(self.trace)
        check_lengths(self.trace, serving.max_model_len)
        self.max_num_seqs, self.budget = serving.max_num_seqs, serving.max_num_batched_tokens
        totals = self.trace.prompt_tokens + self.trace.output_tokens
        self.table = block_table(self.paging, int(totals.max()))
        if self.table[totals].max() > self.blocks:
            raise PoolTooSmall(
                f"a request of {int(totals.max()):,} tokens takes {int(self.table[totals].max()):,} blocks of "
                f"{self.paging.block_bytes:,} B, and the pool has {self.blocks:,}: more memory, or shorter requests."
            )
        self.arrival = self.trace.arrival_s.astype(float).copy()
        self.computed, self.generated, self.held = (np.zeros(count, np.int64) for _ in range(3))
        self.first_token, self.finish = np.full(count, np.nan), np.full(count, np.nan)
        self.free, self.preemptions, self.arrived = self.blocks, 0, 0
        self.running: list[int] = []
        self.waiting: deque[int] = deque()
        self.timeline = Timeline()

    def run(self) -> Outcome:
        """Replay everything."""
        while self.running or self.waiting or self.arrived < len(self.trace):
            self._receive()
            if not self.running and not self.waiting:
                self.now = self.arrival[self.arrived]
                continue
            self._step()
        return Outcome(self.trace, self.arrival, self.first_token, self.finish, self.preemptions, self.timeline)

    def _receive(self) -> None:
        limit = len(self.trace) if self.max_concurrency is None else self.max_concurrency
        while self.arrived < len(self.trace) and len(self.running) + len(self.waiting) < limit:
            if self.max_concurrency is not None:
                self.arrival[self.arrived] = max(self.now, self.trace.arrival_s[self.arrived])
            if self.arrival[self.arrived] > self.now:
                break
            self.waiting.append(self.arrived)
            self.arrived += 1

    def _step(self) -> None:
        new, growth, preempted = self._schedule_running()
        if not preempted:
            new += self._admit(self.budget - sum(new), self.free - growth)
        ids, new = np.array(self.running), np.array(new)
        steps, seconds = self._seconds(ids, new)
        self.computed[ids] += new if steps == 1 else steps
        wanted = self.table[self.computed[ids]]
        self.free -= int((wanted - self.held[ids]).sum())
        self.held[ids] = wanted
        self.now += seconds
        self._emit(ids, steps)

    def _known(self, ids: np.ndarray) -> np.ndarray:
        """Prompt and generated tokens; all but the newest are computed already while a request decodes."""
        return self.trace.prompt_tokens[ids] + self.generated[ids]

    def _schedule_running(self) -> tuple[list[int], int, bool]:
        """Tokens of this step for every running request, the blocks that they take, and whether any was preempted."""
        preempted = False
        while self.running:
            ids = np.array(self.running)
            wanted = self._known(ids) - self.computed[ids]
            new = np.clip(self.budget - (np.cumsum(wanted) - wanted), 0, wanted)
            growth = int((self.table[self.computed[ids] + new] - self.held[ids]).sum())
            if growth <= self.free:
                return new.tolist(), growth, preempted
            last = self.running.pop()
            self.free += int(self.held[last])
            self.held[last] = self.computed[last] = 0
            self.waiting.appendleft(last)
            self.preemptions += 1
            preempted = True
        return [], 0, preempted

    def _admit(self, budget: int, room: int) -> list[int]:
        """Move waiting requests into `running` while tokens and blocks last: tokens of this step for each."""
        taken = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            head = self.waiting[0]
            known = int(self._known(np.array([head]))[0])
            if self.table[known] > room:
                break
            tokens = min(known, budget)
            room -= int(self.table[tokens])
            budget -= tokens
            self.running.append(self.waiting.popleft())
            taken.append(tokens)
        return taken

    def _seconds(self, ids: np.ndarray, new: np.ndarray) -> tuple[int, float]:
        """How many steps to take together, and how long they take."""
        decoding = (self._known(ids) - self.computed[ids] == 1) & (self.computed[ids] > 0)
        contexts = self.computed[ids][decoding & (new > 0)] + 1
        prefills = [(int(c), int(n)) for c, n in zip(self.computed[ids[~decoding]], new[~decoding], strict=True) if n]
        once = self.costs.step_seconds(Work(contexts, prefills))
        if prefills or not (new > 0).all():
            return 1, once
        steps = self._steps_without_event(ids, once)
        last = self.costs.step_seconds(Work(contexts + steps - 1)) if steps > 1 else once
        return steps, steps * (once + last) / 2

    def _steps_without_event(self, ids: np.ndarray, seconds: float) -> int:
        """Steps until a request ends, a new one arrives, or blocks run short. What waits was refused, and stays so."""
        steps = int((self.trace.output_tokens[ids] - self.generated[ids]).min())
        if self.arrived < len(self.trace) and self.max_concurrency is None:
            steps = min(steps, max(1, int((self.arrival[self.arrived] - self.now) / seconds)))
        while steps > 1 and (self.table[self.computed[ids] + steps] - self.held[ids]).sum() > self.free:
            steps //= 2
        return max(1, steps)

    def _emit(self, ids: np.ndarray, steps: int) -> None:
        """Tokens of this step's requests whose known tokens are all computed; the finished ones leave."""
        ready = ids[self.computed[ids] >= self._known(ids) + steps - 1]
        self.generated[ready] += steps
        fresh = ready[np.isnan(self.first_token[ready])]
        self.first_token[fresh] = self.now
        self.timeline.add(self.now, len(ids), len(self.waiting), self.blocks - self.free, steps * len(ready))
        done = ready[self.generated[ready] >= self.trace.output_tokens[ready]]
        self.finish[done] = self.now
        if len(done):
            self.free += int(self.held[done].sum())
            self.held[done] = 0
            gone = set(done.tolist())
            self.running = [request for request in self.running if request not in gone]
