"""A plan: one model on one kind of device, for several cache dtypes. See docs/planning.md for every figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from turboquant.planner import PlanError
from turboquant.planner.gpus import Gpu
from turboquant.planner.memory import Budget, make_budget
from turboquant.planner.pages import Paging, make_paging, ssm_dtype, state_bytes
from turboquant.planner.roofline import Roofline
from turboquant.planner.serving import CacheDtype, Serving, cache_dtype
from turboquant.planner.shape import FULL, RECURRENT, SLIDING, Shape, read_shape
from turboquant.planner.source import Source
from turboquant.planner.weights import Weights, count_weights

PAYS = 0.05  # a step shorter by this share is worth a change of cache
PAYS_WITHIN = 65536  # how far the last length without a saving is looked for
GIB = 2**30


@dataclass(frozen=True)
class Wish:
    """What a user asks for; bytes are of one device.

    Attributes:
        memory: of the device, where there is no `gpu`.
        pool: for the KV cache alone, in place of everything that is computed from the memory.
        weights: of the whole model, in place of the count.
        reserve: in place of the rule for activations and runtime.
        concurrency: sequences that decode together.
        contexts: lengths at which sequences and speed are shown.
    """

    kv_cache_dtypes: Sequence[str]
    gpu: Gpu | None = None
    memory: int | None = None
    pool: int | None = None
    utilization: float = 0.92
    reserve: int | None = None
    weights: int | None = None
    concurrency: int = 32
    contexts: Sequence[int] = ()


@dataclass(frozen=True)
class FormatPlan:
    """One cache dtype."""

    cache: CacheDtype
    paging: Paging
    pool: int
    roofline: Roofline | None

    @property
    def tokens_that_fit(self) -> int:
        return self.paging.reported_tokens(self.pool)

    def at(self, context: int, concurrency: int, auto: Paging) -> dict[str, Any]:
        """Memory and speed at one context length."""
        fit = self.paging.sequences(self.pool, context)
        batch = min(concurrency, fit)
        seconds = self.roofline.decode_seconds(batch, context) if self.roofline and batch else None
        bytes_here = self.paging.sequence_bytes(context)
        return {
            "context": context,
            "sequence_bytes": bytes_here,
            "saved_against_auto": 1 - bytes_here / auto.sequence_bytes(context),
            "sequences": fit,
            "batch": batch,
            "decode_ms": seconds and 1e3 * seconds,
            "tokens_per_s": seconds and batch / seconds,
        }


@dataclass(frozen=True)
class Plan:
    """The result; `to_dict` is what `--json` prints."""

    source: Source
    shape: Shape
    serving: Serving
    weights: Weights
    budget: Budget
    wish: Wish
    auto: FormatPlan
    formats: tuple[FormatPlan, ...]

    def memory_pays_from(self, plan: FormatPlan) -> int | None:
        """Shortest length from which on a sequence always takes less memory than in `auto`; None if it never does."""
        longest = self.serving.max_model_len
        if plan.paging.sequence_bytes(longest) >= self.auto.paging.sequence_bytes(longest):
            return None
        step = min(group.block_size for group in self.auto.paging.groups if group.block_size)
        ends = range(min(longest, PAYS_WITHIN) // step * step, 0, -step)
        saves = (plan.paging.sequence_bytes(n) < self.auto.paging.sequence_bytes(n) for n in ends)
        worse = next((n for n, saved in zip(ends, saves, strict=True) if not saved), 0)
        return worse + 1

    def decode_pays_from(self, plan: FormatPlan) -> int | None:
        """Shortest context at which a decode step is a twentieth shorter than in `auto`; None if it never is."""
        if plan.roofline is None:
            return None

        def pays(context: int) -> bool:
            ours, theirs = (p.roofline.decode_seconds(self.wish.concurrency, context) for p in (plan, self.auto))
            return ours <= (1 - PAYS) * theirs

        low, high = 1, self.serving.max_model_len
        if not pays(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle + 1, high)
        return low

    def to_dict(self) -> dict[str, Any]:
        shape, serving = self.shape, self.serving
        return {
            "model": self.source.name,
            "model_type": shape.model_type,
            "gpu": self.wish.gpu and self.wish.gpu.name,
            **asdict(serving),
            "concurrency": self.wish.concurrency,
            "layers": {kind: shape.count(kind) for kind in (FULL, SLIDING, RECURRENT)},
            "kv_layers": shape.kv_layers,
            "heads": {"query": shape.num_heads, "kv": shape.num_kv_heads, "head_dim": shape.head_dim},
            "sliding_window": shape.sliding_window,
            "state": self.state(),
            "weights": {
                "parameters": self.weights.total_parameters,
                "bytes": self.weights.total_bytes,
                "source": self.weights.source,
                "bytes_by_part": {part: size for part, size in self.weights.bytes_by_part.items() if size},
                "bytes_at_bits": {str(bits): self.weights.total_parameters * bits // 8 for bits in (16, 8, 4)},
            },
            "budget": asdict(self.budget),
            "formats": [self.format_dict(plan) for plan in self.formats],
        }

    def state(self) -> dict[str, Any] | None:
        """Constant memory of a sequence, of all layers on one device."""
        if not self.shape.recurrent:
            return None
        layers = self.shape.count(RECURRENT)
        conv, recurrent = state_bytes(self.shape, self.serving)
        return {
            "kind": self.shape.recurrent.kind,
            "layers": layers,
            "bytes_per_sequence": layers * (conv + recurrent),
            "conv_bytes_per_layer": conv,
            "recurrent_bytes_per_layer": recurrent,
            "recurrent_dtype": ssm_dtype(self.shape, self.serving),
        }

    def format_dict(self, plan: FormatPlan) -> dict[str, Any]:
        paging, slot = plan.paging, plan.cache.slot_bytes(self.shape.head_dim)
        longest = self.serving.max_model_len
        return {
            "kv_cache_dtype": plan.cache.name,
            "kv_bytes_per_token": self.shape.count(FULL) * self.shape.num_kv_heads * slot,
            "sliding_kv_bytes_per_token": self.shape.count(SLIDING) * self.shape.num_kv_heads * slot,
            "bits_per_element": 8 * slot / (2 * self.shape.head_dim),
            "tokens_that_fit": plan.tokens_that_fit,
            "max_concurrency": paging.concurrency(plan.pool),
            "starts": paging.starts(plan.pool),
            "block_size": paging.block_size,
            "page_bytes": paging.page_bytes,
            "block_bytes": paging.block_bytes,
            "groups": [asdict(group) for group in paging.groups],
            "all_inclusive_bytes_per_token": paging.sequence_bytes(longest) / longest,
            "memory_pays_from_tokens": self.memory_pays_from(plan),
            "decode_pays_from_tokens": self.decode_pays_from(plan),
            "contexts": [plan.at(n, self.wish.concurrency, self.auto.paging) for n in self.wish.contexts],
        }


def make_plan(source: Source, serving: Serving, wish: Wish) -> Plan:
    """Plan a model.

    Raises:
        PlanError: the model, a dtype or a size cannot be planned.
    """
    shape = read_shape(source)
    if not shape.kv_layers:
        raise PlanError(f"{source.name} has no attention layers, so it holds no KV cache.")
    shape.check_tp(serving.tp)
    weights = count_weights(source, shape, serving.dtype)
    if wish.weights is not None:
        weights = replace(weights, bytes_by_part=_scaled(weights, wish.weights), source="given")
    budget = _budget(shape, serving, weights, wish)
    contexts = tuple(dict.fromkeys(min(n, serving.max_model_len) for n in wish.contexts))
    plans = {}
    for name in ("auto", *wish.kv_cache_dtypes):
        cache = cache_dtype(name, serving.dtype, source.fp8_cache)
        roofline = Roofline(shape, serving, cache, weights, wish.gpu) if wish.gpu else None
        plans[cache.name] = FormatPlan(cache, make_paging(shape, cache, serving), budget.pool, roofline)
    asked = tuple(
        plans[name] for name in dict.fromkeys(cache_dtype(n, serving.dtype).name for n in wish.kv_cache_dtypes)
    )
    return Plan(source, shape, serving, weights, budget, replace(wish, contexts=contexts), plans["auto"], asked)


def _scaled(weights: Weights, total: int) -> dict[str, int]:
    return {part: size * total // weights.total_bytes for part, size in weights.bytes_by_part.items()}


def _budget(shape: Shape, serving: Serving, weights: Weights, wish: Wish) -> Budget:
    if wish.pool is not None:
        return Budget(wish.pool)
    memory = wish.gpu.memory_bytes if wish.memory is None and wish.gpu else wish.memory
    if memory is None:
        raise PlanError("give --gpu, --memory of a device, or --kv-cache-memory of the pool alone.")
    budget = make_budget(shape, serving, weights, memory, wish.utilization, wish.reserve)
    if budget.pool <= 0:
        raise PlanError(
            f"nothing is left for the KV cache: {memory / GIB:.1f} GiB at {wish.utilization:.0%}, less "
            f"{budget.weights / GIB:.1f} GiB of weights, {budget.activations / GIB:.1f} GiB of activations and "
            f"{budget.runtime / GIB:.1f} GiB of runtime. Use more devices (--tp) or a quantised checkpoint."
        )
    return budget
