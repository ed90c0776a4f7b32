"""How long a step takes at best: bytes over bandwidth, operations over peak, instructions over issue rate.

A step reads the weights once (of a mixture of experts, those that its tokens are expected to choose), the KV cache of
every sequence, and reads and writes every recurrent state. Each kind of work takes the longest of what its bytes, its
operations and its instructions need; the kinds follow each other:

    step = max(weights / bandwidth, 2 · parameters · tokens / peak)
         + max(KV / bandwidth, elements · lane-instructions / issue rate, 4 · heads · D · products / peak)
         + 2 · states / bandwidth + overhead

Unpacking costs instructions in our kernels alone (counted in the compiled code, `docs/kernels.md`); vLLM's own are
taken to be bound by bandwidth. Kernels reach a part of this: `efficiency` scales every rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from turboquant.planner.gpus import Gpu, lanes_per_element
from turboquant.planner.pages import state_bytes
from turboquant.planner.serving import CacheDtype, Serving
from turboquant.planner.shape import FULL, RECURRENT, SLIDING, Shape
from turboquant.planner.weights import Weights
from turboquant.window import FIRST_TOKENS, CacheLayout


@dataclass(frozen=True)
class Work:
    """What one step does.

    Attributes:
        decodes: int64 [num_decodes], context length of every sequence that decodes one token, itself included.
        prefills: (tokens already in the cache, tokens of this step) of every chunk of a prompt.
    """

    decodes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    prefills: Sequence[tuple[int, int]] = ()

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(new for _, new in self.prefills)


@dataclass(frozen=True)
class Roofline:
    """Step times on `serving.tp` devices; traffic between them is not counted."""

    shape: Shape
    serving: Serving
    cache: CacheDtype
    weights: Weights
    gpu: Gpu
    efficiency: float = 1.0
    overhead_s: float = 0.0

    def step_seconds(self, work: Work) -> float:
        """Seconds of one step, at least."""
        return (
            self.overhead_s + (self._weights_s(work) + self._attention_s(work) + self._states_s(work)) / self.efficiency
        )

    def decode_seconds(self, sequences: int, context: int) -> float:
        """A step in which every one of `sequences` decodes at this context length."""
        return self.step_seconds(Work(np.full(sequences, context)))

    def _weights_s(self, work: Work) -> float:
        peak = self.gpu.fp8_flops if (self.weights.bits or 16) <= 8 else self.gpu.bf16_flops
        read = self.weights.read_bytes(work.tokens) / self.gpu.bandwidth
        return max(read, 2 * self.weights.active_parameters * work.tokens / peak) / self.serving.tp

    def _attention_s(self, work: Work) -> float:
        shape, gpu = self.shape, self.gpu
        heads, dim = shape.local_kv_heads(self.serving.tp), shape.head_dim
        seconds = 0.0
        for kind, limit in ((FULL, None), (SLIDING, shape.sliding_window)):
            layers = shape.count(kind)
            if not layers:
                continue
            packed, exact, products = self._tokens_read(work, limit)
            slots = layers * heads
            read = slots * (packed * self.cache.slot_bytes(dim) + exact * self._exact_bytes) / gpu.bandwidth
            operations = 4 * layers * shape.num_heads // self.serving.tp * dim * products / gpu.bf16_flops
            unpack = 0.0
            if self.cache.fmt:
                lanes = lanes_per_element(self.cache.fmt, dim, gpu)
                unpack = slots * packed * 2 * dim * lanes / gpu.lane_instructions
            seconds += max(read, operations, unpack)
        return seconds

    @property
    def _exact_bytes(self) -> int:
        layout = CacheLayout(self.cache.fmt, self.shape.head_dim, 1, 0, self.cache.element_bytes)
        return layout.exact_token_bytes

    def _tokens_read(self, work: Work, limit: int | None) -> tuple[int, int, int]:
        """Tokens read from packed pages, read exactly, and products of a query and a token, of one layer."""
        window = self.serving.window + FIRST_TOKENS if self.cache.fmt and self.serving.window else 0
        contexts = work.decodes if limit is None else np.minimum(work.decodes, limit)
        products = int(contexts.sum())
        exact = int(np.minimum(contexts, window).sum())
        packed = products - exact
        for cached, new in work.prefills:
            seen = min(cached, limit or cached)
            packed += seen
            products += new * seen + new * new // 2
        return packed, exact, products

    def _states_s(self, work: Work) -> float:
        if not self.shape.recurrent:
            return 0.0
        of_sequence = self.shape.count(RECURRENT) * sum(state_bytes(self.shape, self.serving))
        return 2 * of_sequence * (len(work.decodes) + len(work.prefills)) / self.gpu.bandwidth
