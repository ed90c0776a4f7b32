"""Attention on the CPU: our kernels, vLLM's, torch's SDPA and our reference, on one problem and one set of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from turboquant.formats import KVFormat
from turboquant.kernels import reference
from turboquant.kernels.cpu import attend, library, store_kv
from turboquant.kernels.interface import ExactWindow, KVParams
from turboquant.kv_quantizer import make_params
from turboquant.rope import Rope
from turboquant.window import FIRST_TOKENS

BLOCK, WINDOW_BLOCK = 128, 32
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Problem:
    """`batch` sequences of `context` tokens in the cache, `queries` of them new in this step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    batch: int = 1
    queries: int = 1
    fmt: str = "turboquant3.5"
    window: int = 64
    mean: bool = False

    @property
    def shape(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"

    @property
    def packed_bytes(self) -> int:
        """What the packed kernel reads."""
        slot = KVFormat.from_name(self.fmt).slot_bytes(self.head_dim)
        return self.batch * self.context * self.num_kv_heads * slot

    @property
    def bf16_bytes(self) -> int:
        return self.batch * self.context * self.num_kv_heads * self.head_dim * 4


class Batch:
    """The tensors that every candidate shares: random tokens, blocks in random order."""

    def __init__(self, problem: Problem) -> None:
        self.problem = p = problem
        generator = torch.Generator().manual_seed(0)
        self.key = torch.randn(p.context, p.num_kv_heads, p.head_dim, generator=generator)
        self.value = torch.randn(p.context, p.num_kv_heads, p.head_dim, generator=generator)
        self.query = torch.randn(p.batch * p.queries, p.num_heads, p.head_dim, generator=generator)
        self.blocks = -(-p.context // BLOCK)
        order = torch.randperm(self.blocks * p.batch, generator=generator, dtype=torch.int32)
        self.table = order.view(p.batch, self.blocks)
        self.seq_lens = torch.full((p.batch,), p.context, dtype=torch.int32)
        self.starts = torch.arange(p.batch + 1, dtype=torch.int32) * p.queries
        self.scale = p.head_dim**-0.5

    def slots(self, i: int) -> torch.Tensor:
        at = torch.arange(self.problem.context)
        return self.table[i].long()[at // BLOCK] * BLOCK + at % BLOCK


class Ours:
    """Our kernels, or another implementation with their signature."""

    def __init__(self, batch: Batch, kernels=None, dtype: torch.dtype = torch.bfloat16) -> None:
        p, self.batch = batch.problem, batch
        self.attend = attend if kernels is None else kernels.attend
        fmt = KVFormat.from_name(p.fmt)
        exponents = torch.arange(0, p.head_dim, 2, dtype=torch.float64) / p.head_dim
        mean = torch.randn(p.num_kv_heads, p.head_dim) if p.mean else None
        self.params: KVParams = make_params(fmt, p.head_dim, key_mean=mean, rope=Rope(ROPE_THETA**-exponents))
        shape = (batch.blocks * p.batch, p.num_kv_heads, BLOCK, fmt.slot_bytes(p.head_dim))
        self.pages = torch.zeros(shape, dtype=torch.uint8)
        for i in range(p.batch):
            store_kv(batch.key, batch.value, self.pages, batch.slots(i), torch.arange(p.context), self.params)
        self.query, self.out = batch.query.to(dtype), torch.empty_like(batch.query, dtype=dtype)
        newest = slice(p.context - p.queries, p.context)
        self.fresh = tuple(x[newest].repeat(p.batch, 1, 1).to(dtype) for x in (batch.key, batch.value))
        self.window = self._window(dtype) if p.window else None

    def _window(self, dtype: torch.dtype) -> ExactWindow:
        p, batch = self.batch.problem, self.batch
        past = p.context - p.queries
        columns = -(-p.context // WINDOW_BLOCK)
        newest = range(max(1, (past - p.window) // WINDOW_BLOCK), columns)
        held = [0, *newest]
        table = torch.zeros(p.batch, columns, dtype=torch.int32)
        pages = torch.zeros(1 + p.batch * len(held), p.num_kv_heads, WINDOW_BLOCK, 2 * p.head_dim, dtype=dtype)
        both = torch.cat((batch.key, batch.value), dim=-1).transpose(0, 1).to(dtype)
        for i in range(p.batch):
            for n, column in enumerate(held):
                table[i, column] = number = 1 + i * len(held) + n
                tokens = both[:, column * WINDOW_BLOCK : (column + 1) * WINDOW_BLOCK]
                pages[number, :, : tokens.shape[1]] = tokens
        return ExactWindow(pages, table, p.window, FIRST_TOKENS)

    def __call__(self) -> torch.Tensor:
        batch = self.batch
        self.attend(
            self.query, self.pages, batch.table, batch.seq_lens, batch.starts, self.params, scale=batch.scale,
            causal=True, sliding_window=None, softcap=0.0, sinks=None, fresh=self.fresh, window=self.window,
            strict=False, out=self.out,
        )  # fmt: skip
        return self.out

    def store(self) -> None:
        """This step's own tokens into their slots."""
        p, batch = self.batch.problem, self.batch
        slots = torch.cat([batch.slots(i)[p.context - p.queries :] for i in range(p.batch)])
        positions = torch.arange(p.context - p.queries, p.context).repeat(p.batch)
        store_kv(*self.fresh, self.pages, slots, positions, self.params)


class Vllm:
    """vLLM's own CPU attention over its own cache, called as its backend calls it."""

    def __init__(self, batch: Batch, dtype: torch.dtype) -> None:
        from vllm import _custom_ops
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        current_platform.import_kernels()
        self.ops, self.batch, p = _custom_ops, batch, batch.problem
        self.isa = _get_attn_isa(dtype, BLOCK, p.head_dim)
        cache = torch.zeros(batch.blocks * p.batch, p.num_kv_heads, 2 * BLOCK, p.head_dim, dtype=dtype)
        self.cache = cache.chunk(2, dim=2)
        self.own = tuple(x.to(dtype) for x in (batch.key, batch.value))
        for i in range(p.batch):
            self._store(*self.own, batch.slots(i))
        self.query, self.out = batch.query.to(dtype), torch.empty_like(batch.query, dtype=dtype)
        self.metadata = self.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=p.batch, num_heads=p.num_heads, num_kv_heads=p.num_kv_heads, head_dim=p.head_dim,
            seq_lens=batch.seq_lens, dtype=dtype, query_start_loc=batch.starts, causal=True, sliding_window_size=-1,
            isa=self.isa, enable_kv_split=True,
        )  # fmt: skip

    def _store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self.ops.cpu_attn_reshape_and_cache(key, value, *self.cache, slots, self.isa)

    def store(self) -> None:
        p = self.batch.problem
        newest = slice(p.context - p.queries, p.context)
        for i in range(p.batch):
            self._store(*(x[newest] for x in self.own), self.batch.slots(i)[newest])

    def __call__(self) -> torch.Tensor:
        batch = self.batch
        self.ops.cpu_attention_with_kv_cache(
            query=self.query, key_cache=self.cache[0], value_cache=self.cache[1], output=self.out,
            query_start_loc=batch.starts, seq_lens=batch.seq_lens, scale=batch.scale, causal=True, alibi_slopes=None,
            sliding_window=-1, block_table=batch.table, softcap=0.0, scheduler_metadata=self.metadata, s_aux=None,
        )  # fmt: skip
        return self.out


class Sdpa:
    """torch's attention on contiguous bf16 K and V, which no paged cache has at hand."""

    def __init__(self, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> None:
        p = batch.problem
        key, value = (x.transpose(0, 1).to(dtype).expand(p.batch, -1, -1, -1) for x in (batch.key, batch.value))
        self.key, self.value = key.contiguous(), value.contiguous()
        self.query = batch.query.view(p.batch, p.queries, p.num_heads, p.head_dim).transpose(1, 2).to(dtype)
        at = torch.arange(p.context)
        self.mask = None if p.queries == 1 else at <= at[p.context - p.queries :, None]

    def __call__(self) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            self.query, self.key, self.value, attn_mask=self.mask, enable_gqa=True
        )


def candidates(problem: Problem, *, fp32: bool, sdpa: bool, with_reference: bool) -> dict[str, Callable]:
    """What to run for attention, by the name that results have; `ours` and `vllm_bf16` always."""
    batch = Batch(problem)
    chosen: dict[str, Callable] = {"ours": Ours(batch), "vllm_bf16": Vllm(batch, torch.bfloat16)}
    if fp32:
        chosen["vllm_fp32"] = Vllm(batch, torch.float32)
    if sdpa:
        chosen["sdpa"] = Sdpa(batch)
    if with_reference:
        chosen["reference"] = Ours(batch, reference)
    check(chosen)
    return chosen


def check(chosen: dict[str, Callable]) -> None:
    """No figure without agreement: our result is that of the exact cache but for quantisation, and near the reference.

    Raises:
        RuntimeError: it is not.
    """
    ours = chosen["ours"]().float()
    limits = {"vllm_bf16": 0.5, "reference": 5e-3}
    for name, limit in limits.items():
        if name in chosen:
            other = chosen[name]().float()
            error = float((ours - other).norm() / other.norm())
            if not error < limit:
                raise RuntimeError(
                    f"our result is {error:.2e} away from {name}: more than {limit:g}. Nothing is timed."
                )


def kernels_in_use() -> dict[str, str]:
    return {"isa": library.selected()}
