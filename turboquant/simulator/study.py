"""A study: the same requests replayed with several cache dtypes, and where the throughput of each has its peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turboquant.planner.plan import FormatPlan, Plan
from turboquant.simulator.costs import Costs, MeasuredCosts
from turboquant.simulator.replay import PoolTooSmall, Replay
from turboquant.simulator.result import Outcome
from turboquant.simulator.trace import Trace

ASSUMPTIONS = (
    "A simulation: nothing here was measured on the device.",
    "vLLM's scheduler in its default policy, without prefix hits, speculation and asynchronous overlap.",
    "A sequence holds the blocks that it holds while it decodes, also while its prompt is computed.",
)
ROOFLINE = (
    "Step times are the roofline of turboquant/planner/roofline.py, at an efficiency of {efficiency:g} and with "
    "{overhead:g} ms a step: at 1 and 0, a bound that no real kernel reaches; traffic between devices is not counted."
)
MEASURED = "Step times are weighted sums of five numbers, fitted to measured steps of an engine."


@dataclass(frozen=True)
class Run:
    """One replay; the outcome is None where a request does not fit into the pool."""

    kv_cache_dtype: str
    max_concurrency: int | None
    outcome: Outcome | None

    def to_dict(self) -> dict[str, Any]:
        name = {"kv_cache_dtype": self.kv_cache_dtype, "max_concurrency": self.max_concurrency}
        return {**name, **self.outcome.figures()} if self.outcome else {**name, "too_small": True}


@dataclass(frozen=True)
class Study:
    """Replays one plan's formats.

    Attributes:
        efficiency, overhead_s: of the roofline.
        measured: costs by cache dtype, in place of the roofline.
    """

    plan: Plan
    efficiency: float = 1.0
    overhead_s: float = 0.0
    measured: Mapping[str, MeasuredCosts] | None = None

    def costs(self, of_format: FormatPlan) -> Costs:
        """Raises:
        ValueError: there is neither a GPU nor a measurement of this cache dtype.
        """
        name = of_format.cache.name
        if self.measured is not None:
            if name not in self.measured:
                raise ValueError(f"the costs hold {', '.join(self.measured)}, but not {name!r}: measure it, too.")
            return self.measured[name]
        if of_format.roofline is None:
            raise ValueError("give --gpu for the roofline, or --costs with measured steps.")
        return replace(of_format.roofline, efficiency=self.efficiency, overhead_s=self.overhead_s)

    def assumptions(self) -> list[str]:
        if self.measured is not None:
            return [*ASSUMPTIONS, MEASURED]
        return [*ASSUMPTIONS, ROOFLINE.format(efficiency=self.efficiency, overhead=1e3 * self.overhead_s)]

    def run(
        self,
        make_trace: Callable[[int | None], Trace],
        max_concurrency: Sequence[int | None],
        report: Callable[[str], None] = lambda _: None,
    ) -> list[Run]:
        """Every format at every concurrency."""
        runs = []
        for of_format in self.plan.formats:
            costs, paging = self.costs(of_format), of_format.paging
            blocks = of_format.pool // paging.block_bytes - 1
            for limit in max_concurrency:
                report(f"{of_format.cache.name}, {limit or 'all'} at once")
                try:
                    outcome = Replay(make_trace(limit), paging, blocks, costs, limit).run()
                except PoolTooSmall:
                    outcome = None
                runs.append(Run(of_format.cache.name, limit, outcome))
        return runs


def peaks(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By cache dtype, the run with the highest steady throughput: the least concurrent one within half a per cent."""
    found = {}
    for name in dict.fromkeys(run.kv_cache_dtype for run in runs):
        done = [run for run in runs if run.kv_cache_dtype == name and run.outcome]
        if not done:
            continue
        speeds = [run.outcome.steady_tokens_per_s() for run in done]
        best = next(run for run, speed in zip(done, speeds, strict=True) if speed >= 0.995 * max(speeds))
        found[name] = best.to_dict()
    return found
