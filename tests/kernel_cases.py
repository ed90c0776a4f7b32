"""Batches for tests of `store_kv` and `attend`, their pages read by hand, and a softmax written as a loop, in float64.

Nothing here uses the code under test to find out what is right: pages are read with numpy at the documented offsets,
RoPE is complex multiplication, attention is one query, one head and a list of visible positions at a time. Every byte
that a test does not write is 0xFF, which makes a scale NaN; block-table entries that must not be read are absurd.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from turboquant.formats import PRESETS
from turboquant.kernels.interface import FORCE_ENV, KVParams, attend, store_kv
from turboquant.kv_quantizer import make_params
from turboquant.rope import Rope

ABSURD_BLOCK = 2**30
# RMS error ratio and 1 - cosine allowed against float64.
TOLERANCES = {torch.float32: (5e-6, 1e-10), torch.bfloat16: (4e-3, 2e-5), torch.float16: (5e-4, 3e-7)}

# An implementation that computes on integers is allowed this much in any comparison of results.
FLOORS = {"cpu": (1.5e-3, 2e-6)}


@dataclass(frozen=True)
class Case:
    """A batch: for each sequence its queries in this step and its tokens in the cache, those of this step included."""

    seqs: tuple[tuple[int, int], ...] = ((1, 17), (5, 40), (33, 33), (1, 1), (20, 63))
    fmt: str = "turboquant3.5"
    dim: int = 64
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    mean: float = 0.0  # norm of μ against that of the rest of K
    rope: Rope | None = None
    dtype: torch.dtype = torch.float32
    sinks: bool = False
    options: dict = field(default_factory=dict)  # of attend


@dataclass
class Step:
    """One batch in its pages, ready to attend."""

    case: Case
    params: KVParams
    keys: list[torch.Tensor]  # [L, Hkv, D] of each sequence
    values: list[torch.Tensor]
    query: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    options: dict

    def attend(self, read_fresh: bool = False, **changes) -> torch.Tensor:
        own = {"fresh": self.fresh()} if read_fresh else {}
        args = (self.query, self.pages, self.block_table, self.seq_lens, self.query_start_loc, self.params)
        return attend(*args, **{**self.options, **own, **changes})

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of this step's own tokens."""
        rows = [slice(length - queries, length) for queries, length in self.case.seqs]
        return tuple(
            torch.cat([x[at] for x, at in zip(all_x, rows, strict=True)]) for all_x in (self.keys, self.values)
        )

    def slots(self, i: int) -> torch.Tensor:
        """Slot of every token of sequence i."""
        at = torch.arange(len(self.keys[i]))
        return self.block_table[i].long()[at // self.case.block_size] * self.case.block_size + at % self.case.block_size


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frequencies(rotary_dim: int) -> torch.Tensor:
    return torch.tensor([10000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)], dtype=torch.float64)


def turned(x: np.ndarray, positions: np.ndarray, rope: Rope | None) -> np.ndarray:
    """RoPE of x [H, D] at positions [L] by complex numbers: [L, H, D] float64."""
    out = np.repeat(x[None].astype(np.float64), len(positions), axis=0)
    if rope is None:
        return out
    half = rope.rotary_dim // 2
    first, second = slice(half), slice(half, 2 * half)
    if rope.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    phase = np.exp(1j * positions[:, None, None] * rope.inv_freq.numpy())
    pairs = (out[..., first] + 1j * out[..., second]) * phase * rope.attention_scaling
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def mean_of(params: KVParams, length: int) -> np.ndarray:
    """RoPE_p(μ) at positions 0, 1, ...: [L, Hkv, D], or zero."""
    if params.key_mean is None:
        return np.zeros((length, 1, 1))
    return turned(params.key_mean.numpy(), np.arange(length), params.rope)


def build(case: Case, seed: int = 0, fill: int = 0xFF) -> Step:
    mean = None
    if case.mean:
        mean = random(case.kv_heads, case.dim, seed=seed + 1)
        mean *= case.mean * math.sqrt(case.dim) / mean.norm(dim=-1, keepdim=True)
    params = make_params(PRESETS[case.fmt], case.dim, key_mean=mean, rope=case.rope, seed=5)

    keys, values = [], []
    for i, (_, length) in enumerate(case.seqs):
        spread = random(length, case.kv_heads, 1, seed=seed + 10 * i + 2).exp()
        key = (random(length, case.kv_heads, case.dim, seed=seed + 10 * i + 3) * spread).double()
        # Every seventh key is one without the mean in it, as attention sinks are: the first is.
        has_mean = torch.arange(length)[:, None, None] % 7 > 0
        keys.append((key + torch.as_tensor(mean_of(params, length)) * has_mean).to(case.dtype))
        values.append((random(length, case.kv_heads, case.dim, seed=seed + 10 * i + 4) * spread).to(case.dtype))

    counts = [-(-length // case.block_size) for _, length in case.seqs]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed + 5)).tolist()
    table = torch.full((len(counts), max(counts, default=0) + 2), ABSURD_BLOCK, dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    slot = PRESETS[case.fmt].slot_bytes(case.dim)
    pages = torch.full((sum(counts) + 3, case.kv_heads, case.block_size, slot), fill, dtype=torch.uint8)

    queries = [count for count, _ in case.seqs]
    heads = case.kv_heads * case.group
    options = {"scale": case.dim**-0.5, **case.options}
    if case.sinks:
        options["sinks"] = random(heads, seed=seed + 6)
    step = Step(
        case, params, keys, values, random(sum(queries), heads, case.dim, seed=seed + 7).to(case.dtype), pages, table,
        torch.tensor([length for _, length in case.seqs], dtype=torch.int32),
        torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32), options,
    )  # fmt: skip
    store(step, seed)
    return step


def store(step: Step, seed: int = 0) -> None:
    """All tokens of all sequences in one call, in random order."""
    if not step.keys:
        return
    order = torch.randperm(sum(map(len, step.keys)), generator=torch.Generator().manual_seed(seed + 8))
    slots = torch.cat([step.slots(i) for i in range(len(step.keys))])
    positions = torch.cat([torch.arange(len(key)) for key in step.keys])
    key, value = torch.cat(step.keys), torch.cat(step.values)
    store_kv(key[order], value[order], step.pages, slots[order], positions[order], step.params)


def codes_by_hand(raw: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [bytes] to codes: a little-endian bit stream."""
    stream = np.unpackbits(raw, bitorder="little")
    stream = stream[: len(stream) // bits * bits].reshape(-1, bits)
    return (stream * 2 ** np.arange(bits)).sum(-1)


def token_spans(case: Case, offset: int) -> dict[str, slice]:
    """The bytes of one token inside its page, by the documented order of the planes."""
    fmt, size = PRESETS[case.fmt], case.block_size
    key, value = case.dim * fmt.key_bits // 8, case.dim * fmt.value_bits // 8
    starts = {
        "key_codes": (offset * key, key),
        "value_codes": (size * key + offset * value, value),
        "key_scale": (size * (key + value) + 2 * offset, 2),
        "value_scale": (size * (key + value + 2) + 2 * offset, 2),
    }
    return {name: slice(begin, begin + length) for name, (begin, length) in starts.items()}


def token_by_hand(step: Step, slot: int, head: int) -> SimpleNamespace:
    """Codes and scales of one token in one KV head. A negative K scale says that the key kept its mean."""
    case, fmt = step.case, PRESETS[step.case.fmt]
    page = step.pages[slot // case.block_size, head].reshape(-1).numpy()
    at = token_spans(case, slot % case.block_size)
    key_scale = float(np.frombuffer(page[at["key_scale"]].tobytes(), "<f2")[0])
    return SimpleNamespace(
        key_codes=codes_by_hand(page[at["key_codes"]], fmt.key_bits),
        value_codes=codes_by_hand(page[at["value_codes"]], fmt.value_bits),
        key_scale=abs(key_scale),
        kept_mean=bool(np.signbit(key_scale)),
        value_scale=float(np.frombuffer(page[at["value_scale"]].tobytes(), "<f2")[0]),
    )


def cached_by_hand(step: Step, i: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """K and V of sequence i from its pages, dequantised: two [L, Hkv, D] float64; zero before position `first`."""
    length, heads, dim = step.keys[i].shape
    params = step.params
    rotation, key_centroids, value_centroids = (
        x.double().numpy() for x in (params.rotation, params.key_centroids, params.value_centroids)
    )
    key, value = np.zeros((length, heads, dim)), np.zeros((length, heads, dim))
    mean = np.broadcast_to(mean_of(params, length), key.shape)
    for position, slot in list(enumerate(step.slots(i).tolist()))[first:]:
        for head in range(heads):
            token = token_by_hand(step, slot, head)
            key[position, head] = token.key_scale * key_centroids[token.key_codes] @ rotation
            key[position, head] += 0 if token.kept_mean else mean[position, head]
            value[position, head] = token.value_scale * value_centroids[token.value_codes] @ rotation
    return key, value


def naive_attend(
    step: Step, fresh: bool = False, reads_exactly: Callable[[int, int, int], bool] | None = None
) -> torch.Tensor:
    """One query and one head at a time.

    Exact are this step's own tokens where `fresh`, or else those of which `reads_exactly(i, query_at, at)` says so.
    """
    options = step.options
    window = options.get("sliding_window")
    out, row = np.zeros(step.query.shape), 0
    for i, (count, length) in enumerate(step.case.seqs):
        first = 0 if window is None else max(0, length - count - window + 1)
        packed = cached_by_hand(step, i, first)
        exact = [x[i].double().numpy() for x in (step.keys, step.values)]
        for position in range(length - count, length):
            rule = reads_exactly or (lambda _i, _query_at, at, past=length - count: fresh and at >= past)
            takes_exact = np.array([rule(i, position, at) for at in range(length)])[:, None, None]
            keys, values = (np.where(takes_exact, *pair) for pair in zip(exact, packed, strict=True))
            visible = [
                at
                for at in range(length)
                if (at <= position or not options.get("causal", True)) and (window is None or at > position - window)
            ]
            for head in range(step.query.shape[1]):
                kv_head = head // step.case.group
                logits = keys[visible, kv_head] @ step.query[row, head].double().numpy() * options["scale"]
                if options.get("softcap"):
                    logits = options["softcap"] * np.tanh(logits / options["softcap"])
                exponents = np.append(logits, step.options["sinks"][head].item()) if step.case.sinks else logits
                weights = np.exp(logits - exponents.max()) / np.exp(exponents - exponents.max()).sum()
                out[row, head] = weights @ values[visible, kv_head]
            row += 1
    return torch.from_numpy(out)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, ratio: float, angle: float) -> None:
    """RMS of the error against the RMS of what is expected, of the whole and of the worst row; and the cosine."""
    floor = FLOORS.get(os.environ.get(FORCE_ENV), (0, 0))
    ratio, angle = max(ratio, floor[0]), max(angle, floor[1])
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    assert actual.isfinite().all()
    if not actual.numel():
        return
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= ratio, f"RMS error ratio {error:.2e}, allowed {ratio:.0e}"
    rows = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.max() <= 10 * ratio, f"RMS error ratio of the worst row {rows.max():.2e}, allowed {10 * ratio:.0e}"
    cosine = torch.nn.functional.cosine_similarity(actual.flatten(), expected.flatten(), dim=0)
    assert 1 - cosine <= angle, f"1 - cosine {1 - cosine:.2e}, allowed {angle:.0e}"


HALF = Rope(frequencies(64))
PARTIAL = Rope(frequencies(32), 1.2)
INTERLEAVED = Rope(frequencies(32), interleaved=True)

SHAPES = {
    "one-token": Case(seqs=((1, 1),), group=1),
    "D64-decode": Case(seqs=((1, 1), (1, 17), (1, 63), (1, 257), (1, 16))),
    "D64-prefill": Case(seqs=((63, 63), (1, 1), (17, 17)), group=1),
    "D80-block48-gqa3": Case(seqs=((2, 49), (48, 48), (1, 96)), dim=80, block_size=48, group=3),
    "D96-mqa8": Case(seqs=((1, 257), (9, 31)), dim=96, kv_heads=1, group=8),
    "D128-block160": Case(seqs=((1, 161), (40, 257), (3, 160)), dim=128, block_size=160),
    "D256-gqa8": Case(seqs=((1, 63), (17, 40)), dim=256, group=8),
    "D72-block1": Case(seqs=((1, 5), (3, 3)), dim=72, block_size=2, kv_heads=3, group=1),
    "verify": Case(seqs=((4, 70), (4, 17), (4, 4), (4, 33))),
    "chunked-prefill": Case(seqs=((31, 94),), block_size=48),
    "mixed": Case(seqs=((1, 257), (17, 17), (5, 63), (1, 1), (40, 90)), group=3),
    "mha-5-heads": Case(seqs=((1, 33), (12, 12)), kv_heads=5, group=1),
}
ATTENTION = {
    "plain": Case(),
    "window-1": Case(options={"sliding_window": 1}),
    "window-5": Case(options={"sliding_window": 5}),
    "window-16": Case(options={"sliding_window": 16}),
    "window-17-block48": Case(options={"sliding_window": 17}, block_size=48),
    "window-1000": Case(options={"sliding_window": 1000}),
    "softcap": Case(options={"softcap": 1.5}),
    "sinks": Case(sinks=True),
    "scale": Case(options={"scale": 0.4}),
    "bidirectional": Case(options={"causal": False}),
    "mean": Case(mean=4.0),
    "mean-rope": Case(mean=4.0, rope=HALF),
    "mean-rope-partial": Case(mean=4.0, rope=PARTIAL),
    "mean-rope-interleaved": Case(mean=4.0, rope=INTERLEAVED),
    "all": Case(
        mean=4.0, rope=HALF, sinks=True, fmt="turboquant3", options={"sliding_window": 9, "softcap": 3.0, "scale": 0.2}
    ),
}  # fmt: skip
FORMATS = {name: Case(seqs=((1, 33), (7, 20)), fmt=name) for name in PRESETS}
CASES = {**SHAPES, **ATTENTION, **FORMATS}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
READS = pytest.mark.parametrize("fresh", [False, True], ids=["packed", "fresh"])
