"""`store_kv` and `attend` against bytes read by hand and a softmax written as a loop, in float64.

Nothing here uses the code under test to find out what is right: pages are read with numpy at the documented offsets,
RoPE is complex multiplication, attention is one query, one head and a list of visible positions at a time. Every byte
that a test does not write is 0xFF, which makes a scale NaN; block-table entries that must not be read are absurd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from turboquant.formats import PRESETS
from turboquant.kernels import interface, reference
from turboquant.kernels.interface import KVParams, attend, store_kv
from turboquant.kv_quantizer import KVQuantizer, make_params
from turboquant.rope import Rope

pytestmark = pytest.mark.usefixtures("poison_empty", "one_thread")

ABSURD_BLOCK = 2**30
# RMS error ratio and 1 - cosine allowed against float64.
TOLERANCES = {torch.float32: (5e-6, 1e-10), torch.bfloat16: (4e-3, 2e-5), torch.float16: (5e-4, 3e-7)}


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


def naive_attend(step: Step, fresh: bool = False) -> torch.Tensor:
    """One query and one head at a time; where `fresh`, this step's own tokens are exact."""
    options = step.options
    window = options.get("sliding_window")
    out, row = np.zeros(step.query.shape), 0
    for i, (count, length) in enumerate(step.case.seqs):
        first = 0 if window is None else max(0, length - count - window + 1)
        keys, values = cached_by_hand(step, i, first)
        if fresh:
            keys[length - count :] = step.keys[i][length - count :].double().numpy()
            values[length - count :] = step.values[i][length - count :].double().numpy()
        for position in range(length - count, length):
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


@EVERY_CASE
@READS
def test_attend_is_softmax_over_the_page_s_own_bytes(case, fresh):
    step = build(case)
    assert_close(step.attend(fresh), naive_attend(step, fresh), *TOLERANCES[torch.float32])


@READS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attend_in_16_bits(dtype, fresh):
    """Only the result is rounded: everything between is float32."""
    step = build(Case(dtype=dtype, mean=4.0, rope=HALF))
    out = step.attend(fresh)
    assert out.dtype == dtype
    assert_close(out, naive_attend(step, fresh), *TOLERANCES[dtype])


@READS
def test_a_large_mean_does_not_drown_the_rest(fresh):
    """100 times the rest of K: the logits' own rounding is then the limit, a few parts in 1e5."""
    step = build(Case(mean=100.0, rope=HALF, options={"scale": 0.02}))
    assert_close(step.attend(fresh), naive_attend(step, fresh), 1e-4, 1e-8)


@READS
@pytest.mark.parametrize("name", ["mixed", "window-5", "all", "bidirectional"])
@pytest.mark.parametrize("max_logits", [1, 300, 5000], ids="max{}".format)
def test_tiles_of_queries_change_nothing(monkeypatch, name, fresh, max_logits):
    step = build(CASES[name])
    whole = step.attend(fresh)
    monkeypatch.setattr(reference, "MAX_LOGITS", max_logits)
    assert_close(step.attend(fresh), whole, 1e-6, 1e-11)


@pytest.mark.parametrize("window", [1, 7, 16, 40], ids="window{}".format)
@READS
def test_blocks_that_left_the_window_are_not_read(window, fresh):
    """vLLM frees them and puts anything into the table."""
    step = build(Case(seqs=((1, 257), (20, 100), (3, 49), (50, 50)), options={"sliding_window": window}))
    expected = step.attend(fresh)
    for i, (count, length) in enumerate(step.case.seqs):
        oldest_read = max(0, length - count - window + 1)
        step.block_table[i, : oldest_read // step.case.block_size] = ABSURD_BLOCK
    assert torch.equal(step.attend(fresh), expected)


@READS
def test_what_was_in_the_pages_before_does_not_leak(fresh):
    case = CASES["mixed"]
    outs = [build(case, fill=fill).attend(fresh) for fill in (0x00, 0xFF, 0x7C, 0xAB)]
    assert all(torch.equal(out, outs[0]) for out in outs)


@READS
def test_a_sequence_does_not_depend_on_its_batch(fresh):
    step = build(CASES["mixed"])
    together = step.attend(fresh)
    for i, (begin, end) in enumerate(pairwise(step.query_start_loc.tolist())):
        own = {"fresh": tuple(x[begin:end] for x in step.fresh())} if fresh else {}
        alone = attend(
            step.query[begin:end], step.pages, step.block_table[i : i + 1], step.seq_lens[i : i + 1],
            torch.tensor([0, end - begin], dtype=torch.int32), step.params, **step.options, **own,
        )  # fmt: skip
        assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize("name", ["plain", "window-5", "mean-rope", "sinks"])
def test_a_chunk_reads_what_single_decode_steps_read(name):
    """Without `fresh`, a query of a chunk sees exactly what a decode step at its position sees."""
    case = replace(CASES[name], seqs=((20, 50),))
    step = build(case)
    chunk = step.attend()
    for j in range(20):
        single = attend(
            step.query[j : j + 1], step.pages, step.block_table, torch.tensor([31 + j], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32), step.params, **step.options,
        )  # fmt: skip
        assert_close(single, chunk[j : j + 1], 2e-6, 1e-11)


@pytest.mark.parametrize("name", ["plain", "mean-rope", "mean-rope-partial", "D128-block160"])
def test_the_cache_means_the_same_everywhere(name):
    """Attend over pages is SDPA over what KVQuantizer gives back for the same K and V."""
    step = build(case := CASES[name])
    quantizer = KVQuantizer(case.fmt, case.dim, key_mean=step.params.key_mean, rope=case.rope, seed=5)
    starts = step.query_start_loc.tolist()
    for i, (count, length) in enumerate(case.seqs):
        key, value = quantizer.dequantize(quantizer.quantize(step.keys[i], step.values[i]))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[length - count :]
        expected = torch.nn.functional.scaled_dot_product_attention(
            step.query[starts[i] : starts[i + 1]].transpose(0, 1)[None].double(),
            *(x.transpose(0, 1)[None].double() for x in (key, value)), attn_mask=mask, enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
        assert_close(step.attend()[starts[i] : starts[i + 1]], expected, 1e-5, 1e-10)


@pytest.mark.parametrize("name", [*FORMATS, "mean-rope", "mean-rope-interleaved", "D80-block48-gqa3", "D256-gqa8"])
def test_stored_bytes_are_nearest_codes_and_matched_norms(name):
    step = build(CASES[name])
    rotation = step.params.rotation.double().numpy()
    kept = []
    for i, key in enumerate(step.keys):
        whole = key.double().numpy()
        centred = whole - mean_of(step.params, len(key))
        for position, slot in enumerate(step.slots(i).tolist()):
            for head in range(step.case.kv_heads):
                token = vars(token_by_hand(step, slot, head))
                kept.append(token["kept_mean"])
                exact = {
                    "key": (whole if token["kept_mean"] else centred, step.params.key_centroids),
                    "value": (step.values[i].double().numpy(), step.params.value_centroids),
                }
                for which, (x, centroids) in exact.items():
                    x, centroids = x[position, head], centroids.double().numpy()
                    unit = rotation @ x / np.linalg.norm(x)
                    chosen = centroids[token[f"{which}_codes"]]
                    nearest = np.abs(unit[:, None] - centroids).min(-1)
                    assert (np.abs(unit - chosen) <= nearest + 1e-5).all()
                    restored = token[f"{which}_scale"] * np.linalg.norm(chosen)
                    assert restored == pytest.approx(np.linalg.norm(x), rel=6e-4)
    assert any(kept) == bool(step.case.mean)
    assert not all(kept)


@pytest.mark.parametrize("rope", [None, HALF, INTERLEAVED], ids=["no-rope", "half", "interleaved"])
def test_the_mean_is_taken_out_only_where_that_makes_a_key_shorter(rope):
    """The error is in proportion to what is quantised, and a sink, unlike the mean, would grow, wherever it stands."""
    mean = 3 * random(2, 64, seed=0)
    params = make_params(PRESETS["turboquant4"], 64, key_mean=mean, rope=rope)
    share = torch.linspace(-1, 2, 40).double()  # of the mean in a key; from one half on, it is worth taking out
    rotated = torch.as_tensor(turned(mean.numpy(), np.arange(40), rope))
    rest = random(40, 2, 64, seed=1).double()
    rest -= (rest * rotated).sum(-1, keepdim=True) / rotated.square().sum(-1, keepdim=True) * rotated
    key = (share[:, None, None] * rotated + rest).float()
    pages = torch.full((3, 2, 16, 68), 0xFF, dtype=torch.uint8)
    store_kv(key, key, pages, torch.arange(40), torch.arange(40), params)
    case = Case(seqs=((1, 40),), fmt="turboquant4")
    step = SimpleNamespace(case=case, params=params, pages=pages, keys=[key], slots=lambda i: torch.arange(40))
    for position in range(40):
        for head in range(2):
            assert token_by_hand(step, position, head).kept_mean == (share[position] < 0.5)
    error = np.linalg.norm(cached_by_hand(step, 0)[0] - key.double().numpy(), axis=-1)
    shorter = torch.minimum(key.double().norm(dim=-1), (key.double() - rotated).norm(dim=-1)).numpy()
    assert (error < 0.25 * shorter).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_inputs_are_stored_as_their_exact_values(dtype):
    step = build(Case(dtype=dtype, mean=4.0, rope=HALF))
    wide = build(Case(dtype=dtype, mean=4.0, rope=HALF))
    wide.pages.fill_(0xFF)
    wide.keys, wide.values = ([x.float() for x in xs] for xs in (wide.keys, wide.values))
    store(wide)
    assert torch.equal(step.pages, wide.pages)


@pytest.mark.parametrize("mean", [0.0, 30.0], ids="mean{:.0f}".format)
def test_zero_stays_exactly_zero(mean):
    """A key of zeros beside a mean, too: its scale is -0, and nothing is added back."""
    step = build(Case(seqs=((3, 20),), mean=mean, rope=HALF))
    step.keys[0] = torch.zeros_like(step.keys[0])
    step.values[0][::2] = 0
    step.pages.fill_(0xFF)
    store(step)
    keys, values = cached_by_hand(step, 0)
    assert (keys == 0).all()
    assert (values[::2] == 0).all()
    # All keys weigh the same: the mean of all values so far.
    for j, length in enumerate((18, 19, 20)):
        expected = torch.from_numpy(values[:length].mean(0)).repeat_interleave(2, dim=0)
        assert_close(step.attend()[j], expected, *TOLERANCES[torch.float32])


def test_a_key_that_is_the_mean_comes_back_exactly():
    """What is left to quantise is zero, and its scale is +0: the mean is added back."""
    step = build(Case(seqs=((3, 20),), mean=30.0, rope=HALF))
    step.keys[0] = reference.mean_at(step.params, torch.arange(20))
    step.pages.fill_(0xFF)
    store(step)
    assert (cached_by_hand(step, 0)[0] == mean_of(step.params, 20)).all()
    assert_close(step.attend(), naive_attend(step), *TOLERANCES[torch.float32])


@pytest.mark.parametrize("power", [-12, -6, 0, 4], ids="1e{}".format)
def test_scales_of_every_size(power):
    """From fp16's smallest numbers to its largest; below, a vector becomes zero, and nothing becomes NaN."""
    step = build(Case(seqs=((1, 20),)))
    step.values[0] = step.values[0] / step.values[0].norm(dim=-1, keepdim=True) * 10.0**power
    step.pages.fill_(0xFF)
    store(step)
    _, values = cached_by_hand(step, 0)
    norms = np.linalg.norm(values, axis=-1)
    # fp16 has steps of 6e-8 at its lower end.
    np.testing.assert_allclose(norms, 10.0**power, rtol=1e-3, atol=3.1e-8)


def test_a_norm_beyond_fp16_saturates():
    step = build(Case(seqs=((1, 2),)))
    step.values[0][1] *= 1e6
    store(step)
    _, values = cached_by_hand(step, 0)
    assert np.isfinite(values).all()
    assert np.linalg.norm(values[1], axis=-1) == pytest.approx(65504, rel=0.1)


def test_a_large_finite_vector_is_not_a_nan():
    """bf16 holds 1e25; its square overflows float32."""
    step = build(Case(seqs=((1, 2),)))
    step.values[0][1] = 1e25
    store(step)
    assert np.isfinite(cached_by_hand(step, 0)[1]).all()


BROKEN = pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
WHICH = pytest.mark.parametrize("which", ["keys", "values"])


def poisoned(case: Case, which: str, broken: float, position: int) -> tuple[Step, Step]:
    """The same batch twice; in the second, one element of KV head 1 of one token of sequence 0 is broken."""
    clean, dirty = build(case), build(case)
    getattr(dirty, which)[0][position, 1, 3] = broken
    dirty.pages.fill_(0xFF)
    store(dirty)
    return clean, dirty


@BROKEN
@WHICH
def test_a_broken_token_spoils_no_other_byte(which, broken):
    clean, dirty = poisoned(Case(mean=4.0, rope=HALF), which, broken, position=11)
    different = (clean.pages != dirty.pages).nonzero()
    slot = clean.slots(0)[11].item()
    size, width = clean.case.block_size, clean.pages.shape[-1]
    assert len(different)
    allowed = token_spans(clean.case, slot % size)
    for block, head, row, column in different.tolist():
        byte = row * width + column
        assert (block, head) == (slot // size, 1)
        assert any(span.start <= byte < span.stop for name, span in allowed.items() if name[:3] == which[:3])
    token = token_by_hand(dirty, slot, 1)
    assert math.isnan(token.key_scale if which == "keys" else token.value_scale)


@BROKEN
@WHICH
@READS
@pytest.mark.parametrize("window", [None, 4], ids="window{}".format)
def test_a_broken_token_is_seen_by_those_who_read_it_only(which, broken, fresh, window):
    options = {"sliding_window": window} if window else {}
    clean, dirty = poisoned(Case(seqs=((20, 30), (3, 9)), options=options), which, broken, position=17)
    before, after = clean.attend(fresh), dirty.attend(fresh)
    reads = torch.zeros(before.shape[:2], dtype=torch.bool)
    # Queries stand at 10..29; heads 2 and 3 read KV head 1.
    reads[7 : 20 if window is None else 7 + window, 2:] = True
    # Exact values may answer an infinity with an infinity, or with nothing at all.
    if not fresh or math.isnan(broken):
        assert after[reads].isnan().all()
    assert after[~reads].isfinite().all()
    assert_close(after[~reads], before[~reads], 1e-6, 1e-11)


@READS
def test_a_broken_value_that_weighs_nothing_is_still_seen(fresh):
    """0 · NaN is NaN in an exact cache, too: an underflow does not hide it."""
    step = build(Case(seqs=((1, 20),), group=1, options={"scale": 100.0}))
    step.keys[0][5] = -step.query[0] * 10
    step.values[0][5] = math.nan
    store(step)
    assert step.attend(fresh).isnan().all()


@READS
def test_a_broken_query_spoils_its_own_row_only(fresh):
    step = build(Case())
    before = step.attend(fresh)
    step.query[3, 1, 0] = math.nan
    after = step.attend(fresh)
    assert after[3, 1].isnan().all()
    after[3, 1] = before[3, 1]
    assert torch.equal(after, before)


def test_padding_is_not_stored():
    step = build(Case(seqs=((1, 5),)))
    before = step.pages.clone()
    garbage = torch.full((4, 2, 64), torch.nan)
    store_kv(garbage, garbage, step.pages, torch.full((4,), -1), torch.zeros(4, dtype=torch.int64), step.params)
    assert torch.equal(step.pages, before)


def test_padding_between_real_tokens():
    step = build(Case(seqs=((1, 5),)))
    before = step.pages.clone()
    step.pages.fill_(0xFF)
    rows = torch.tensor([0, 2, 3, 5, 6])
    key, value = torch.full((8, 2, 64), torch.nan), torch.full((8, 2, 64), torch.nan)
    key[rows], value[rows] = step.keys[0], step.values[0]
    slots, positions = torch.full((8,), -1), torch.full((8,), 10**9)
    slots[rows], positions[rows] = step.slots(0), torch.arange(5)
    store_kv(key, value, step.pages, slots, positions, step.params)
    assert torch.equal(step.pages, before)


@READS
def test_padded_rows_of_the_query_are_left_alone(fresh):
    step = build(Case())
    expected = step.attend(fresh)
    rows = len(expected)
    garbage = torch.full((3, *expected.shape[1:]), torch.nan)
    step.query = torch.cat((step.query, garbage))
    own = {"fresh": tuple(torch.cat((x, garbage[:, :2])) for x in step.fresh())} if fresh else {}
    allocated = step.attend(**own)
    assert torch.equal(allocated[:rows], expected)
    assert (allocated[rows:] == 0).all()
    out = torch.full_like(step.query, 7.0)
    assert step.attend(out=out, **own) is out
    assert torch.equal(out[:rows], expected)
    assert (out[rows:] == 7.0).all()


def test_out_may_be_strided():
    step = build(Case())
    wide = torch.full((*step.query.shape[:2], 100), torch.nan)
    step.attend(out=wide[..., 10:74])
    assert torch.equal(wide[..., 10:74], step.attend())
    assert wide[..., :10].isnan().all()
    assert wide[..., 74:].isnan().all()


@pytest.mark.parametrize("layout", ["heads-outermost", "layer-between", "pitch"])
@READS
def test_pages_with_free_outer_strides(layout, fresh):
    step = build(Case(mean=4.0, rope=HALF))
    expected, shape = step.attend(fresh), step.pages.shape
    blocks, heads, size, slot = shape
    if layout == "heads-outermost":
        around = torch.full((heads, blocks, size, slot), 0xFF, dtype=torch.uint8)
        pages = around.transpose(0, 1)
    elif layout == "layer-between":
        around = torch.full((blocks, 3, heads, size, slot), 0xFF, dtype=torch.uint8)
        pages = around[:, 1]
    else:
        around = torch.full((blocks, heads * size * slot + 128), 0xFF, dtype=torch.uint8)
        pages = around[:, 64 : 64 + heads * size * slot].unflatten(1, (heads, size, slot))
    dense, step.pages = step.pages, pages
    store(step)
    assert torch.equal(pages, dense)
    assert torch.equal(step.attend(fresh), expected)
    assert int((around != 0xFF).sum()) == int((dense != 0xFF).sum())


def test_storing_again_overwrites():
    """A slot is reused by other sequences: nothing of its first content may stay."""
    step = build(Case())
    expected = step.attend()
    other = build(Case(), seed=100)
    other.pages, other.block_table = step.pages, step.block_table
    store(other)
    assert not torch.equal(step.attend(), expected)
    store(step)
    assert torch.equal(step.attend(), expected)


def test_storing_in_chunks_writes_the_same_bytes():
    step = build(Case(seqs=((1, 63),), mean=4.0, rope=HALF))
    whole = step.pages.clone()
    step.pages.fill_(0xFF)
    for begin, end in ((0, 1), (1, 17), (17, 60), (60, 63)):
        key, value, slots = (x[begin:end] for x in (step.keys[0], step.values[0], step.slots(0)))
        store_kv(key, value, step.pages, slots, torch.arange(begin, end), step.params)
    assert torch.equal(step.pages, whole)


@pytest.mark.parametrize("beyond", [0, 1, 10**6])
def test_a_slot_outside_the_pages(beyond):
    step = build(Case(seqs=((1, 5),)))
    before = step.pages.clone()
    slots = step.slots(0)
    slots[2] = last = step.pages.shape[0] * 16 + beyond
    with pytest.raises(IndexError, match=f"slot {last} lies outside the pages: {len(before)} blocks of 16 tokens"):
        store_kv(step.keys[0], step.values[0], step.pages, slots, torch.arange(5), step.params)
    assert torch.equal(step.pages, before)


def test_nothing_to_store():
    step = build(Case(mean=4.0, rope=HALF))
    before, none = step.pages.clone(), torch.zeros(0, dtype=torch.int64)
    store_kv(torch.zeros(0, 2, 64), torch.zeros(0, 2, 64), step.pages, none, none, step.params)
    assert torch.equal(step.pages, before)


@READS
def test_an_empty_batch(fresh):
    step = build(Case(seqs=()))
    own = {"fresh": (torch.zeros(0, 2, 64), torch.zeros(0, 2, 64))} if fresh else {}
    assert step.attend(**own).shape == (0, 4, 64)


@READS
def test_sequences_without_queries(fresh):
    """A batch padded with empty sequences, as CUDA graphs pad it."""
    step = build(Case(seqs=((0, 20), (2, 17), (0, 0), (1, 5), (0, 0)), mean=4.0, rope=HALF))
    assert_close(step.attend(fresh), naive_attend(step, fresh), *TOLERANCES[torch.float32])


def test_sinks_take_weight():
    step = build(Case(sinks=True))
    step.options["sinks"] = torch.full((4,), 200.0)
    assert step.attend().abs().max() < 1e-30
    step.options["sinks"] = torch.full((4,), -200.0)
    assert torch.equal(step.attend(), step.attend(sinks=None))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_integers_of_either_width(index_dtype):
    step = build(Case(mean=4.0, rope=HALF))
    expected = step.attend()
    for name in ("block_table", "seq_lens", "query_start_loc"):
        setattr(step, name, getattr(step, name).to(index_dtype))
    assert torch.equal(step.attend(), expected)


META = torch.device("meta")


def rotation_on_meta(params: KVParams) -> KVParams:
    return replace(params, rotation=params.rotation.to(META))


# id: (argument -> its wrong value from the right one, error, message)
WRONG_STORE = {
    "key-2d": ({"key": lambda x: x[0]}, ValueError, r"key has shape \(2, 64\)"),
    "key-heads": ({"key": lambda x: x[:, :1]}, ValueError, "key has 1 heads.* 2"),
    "key-dim": ({"key": lambda x: x[..., :32]}, ValueError, r"key has shape \(5, 2, 32\): expected .*64"),
    "key-int": ({"key": lambda x: x.int()}, TypeError, r"key has dtype torch\.int32"),
    "key-float64": ({"key": lambda x: x.double()}, TypeError, r"key has dtype torch\.float64: allowed are .*bfloat16"),
    "value-int": ({"value": lambda x: x.int()}, TypeError, r"value has dtype torch\.int32"),
    "value-short": ({"value": lambda x: x[:4]}, ValueError, r"value has shape \(4, 2, 64\): expected .*5, 2, 64"),
    "value-heads": ({"value": lambda x: x[:, :1]}, ValueError, "value has 1 heads"),
    "pages-int8": ({"pages": lambda x: x.view(torch.int8)}, TypeError, r"pages must be a 4-D uint8 .*torch\.int8"),
    "pages-5d": ({"pages": lambda x: x[None]}, TypeError, "pages must be a 4-D uint8 tensor, got 5-D"),
    "pages-slot": ({"pages": lambda x: x.new_zeros(4, 2, 16, 64)}, ValueError, "slots of 64 bytes; .* needs 60"),
    "slots-short": ({"slot_mapping": lambda x: x[:4]}, ValueError, r"slot_mapping has shape \(4,\): .*\[5\]"),
    "slots-2d": ({"slot_mapping": lambda x: x[None]}, ValueError, r"slot_mapping has shape \(1, 5\)"),
    "slots-float": ({"slot_mapping": lambda x: x.float()}, TypeError, r"slot_mapping .*torch\.float32"),
    "slots-bool": ({"slot_mapping": lambda x: x > 0}, TypeError, r"slot_mapping .*torch\.bool"),
    "positions-short": ({"positions": lambda x: x[:4]}, ValueError, r"positions has shape \(4,\)"),
    "positions-float": ({"positions": lambda x: x.float()}, TypeError, r"positions .*torch\.float32"),
    "value-meta": ({"value": lambda x: x.to(META)}, ValueError, "value is on meta, the rest on cpu"),
    "pages-meta": ({"pages": lambda x: x.to(META)}, ValueError, "pages is on meta"),
    "slots-meta": ({"slot_mapping": lambda x: x.to(META)}, ValueError, "slot_mapping is on meta"),
    "positions-meta": ({"positions": lambda x: x.to(META)}, ValueError, "positions is on meta"),
    "rotation-meta": (
        {"params": rotation_on_meta},
        ValueError,
        "rotation is on meta",
    ),
    "mean-one-head": ({"params": lambda p: replace(p, key_mean=torch.ones(1, 64))}, ValueError, "key_mean"),
    "mean-three-heads": ({"params": lambda p: replace(p, key_mean=torch.ones(3, 64))}, ValueError, "key_mean"),
}
WRONG_ATTEND = {
    "query-2d": ({"query": lambda x: x[0]}, ValueError, r"query has shape \(4, 64\)"),
    "query-heads": ({"query": lambda x: x[:, :3]}, ValueError, "query has 3 heads.*multiple.* 2"),
    "query-dim": ({"query": lambda x: x[..., :32]}, ValueError, r"query has shape .*32\): expected .*64"),
    "query-int": ({"query": lambda x: x.int()}, TypeError, r"query has dtype torch\.int32"),
    "pages-float": ({"pages": lambda x: x.float()}, TypeError, r"pages must be a 4-D uint8 tensor.*float32"),
    "pages-slot": ({"pages": lambda x: x.new_zeros(4, 2, 16, 64)}, ValueError, "slots of 64 bytes; .* needs 60"),
    "table-1d": ({"block_table": lambda x: x[0]}, ValueError, "block_table"),
    "table-rows": ({"block_table": lambda x: x[:2]}, ValueError, "block_table .* seq_lens"),
    "table-float": ({"block_table": lambda x: x.float()}, TypeError, r"block_table .*torch\.float32"),
    "lens-2d": ({"seq_lens": lambda x: x[:, None]}, ValueError, "seq_lens"),
    "starts-short": ({"query_start_loc": lambda x: x[1:]}, ValueError, "query_start_loc .* 4 .* 5"),
    "window-0": ({"sliding_window": lambda _: 0}, ValueError, "sliding_window 0 is not allowed: at least 1"),
    "window-negative": ({"sliding_window": lambda _: -1}, ValueError, "sliding_window -1"),
    "sinks-short": ({"sinks": lambda _: torch.zeros(3)}, ValueError, r"sinks .*\(3,\)"),
    "sinks-one": ({"sinks": lambda _: torch.zeros(1)}, ValueError, r"sinks .*\(1,\)"),
    "fresh-heads": ({"fresh": lambda _: (torch.zeros(56, 1, 64),) * 2}, ValueError, "fresh key has 1 heads"),
    "fresh-short": ({"fresh": lambda _: (torch.zeros(5, 2, 64),) * 2}, ValueError, "fresh key"),
    "fresh-int": (
        {"fresh": lambda _: (torch.zeros(56, 2, 64), torch.zeros(56, 2, 64).int())}, TypeError, "fresh value has dtype"
    ),
    "out-shape": ({"out": lambda _: torch.zeros(56, 1, 64)}, ValueError, r"out .*\(56, 1, 64\)"),
    "out-integers": ({"out": lambda _: torch.zeros(56, 4, 64, dtype=torch.int32)}, TypeError, "out .*int32"),
    "pages-meta": ({"pages": lambda x: x.to(META)}, ValueError, "pages is on meta, the rest on cpu"),
    "table-meta": ({"block_table": lambda x: x.to(META)}, ValueError, "block_table is on meta"),
    "lens-meta": ({"seq_lens": lambda x: x.to(META)}, ValueError, "seq_lens is on meta"),
    "starts-meta": ({"query_start_loc": lambda x: x.to(META)}, ValueError, "query_start_loc is on meta"),
    "rotation-meta": ({"params": rotation_on_meta}, ValueError, "rotation is on meta"),
    "sinks-meta": ({"sinks": lambda _: torch.zeros(4, device=META)}, ValueError, "sinks is on meta"),
    "fresh-meta": ({"fresh": lambda _: (torch.zeros(56, 2, 64, device=META),) * 2}, ValueError, "fresh key is on meta"),
    "out-meta": ({"out": lambda _: torch.zeros(56, 4, 64, device=META)}, ValueError, "out is on meta"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_STORE.values(), ids=WRONG_STORE.keys())
def test_wrong_arguments_of_store(changes, error, message):
    step = build(Case(seqs=((1, 5),)))
    before = step.pages.clone()
    args = {
        "key": step.keys[0], "value": step.values[0], "pages": step.pages, "slot_mapping": step.slots(0),
        "positions": torch.arange(5), "params": step.params,
    }  # fmt: skip
    args.update({name: change(args[name]) for name, change in changes.items()})
    with pytest.raises(error, match=message):
        store_kv(**args)
    assert torch.equal(step.pages, before)


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_ATTEND.values(), ids=WRONG_ATTEND.keys())
def test_wrong_arguments_of_attend(changes, error, message):
    step = build(Case(seqs=((1, 17), (30, 40), (23, 33), (2, 9))))
    args = {
        "query": step.query, "pages": step.pages, "block_table": step.block_table, "seq_lens": step.seq_lens,
        "query_start_loc": step.query_start_loc, "params": step.params, **step.options,
    }  # fmt: skip
    assert attend(**args).isfinite().all()
    args.update({name: change(args.get(name)) for name, change in changes.items()})
    with pytest.raises(error, match=message):
        attend(**args)


@pytest.mark.parametrize("forced", ["", "reference"], ids=repr)
def test_forcing_an_implementation(monkeypatch, forced):
    monkeypatch.setenv("TURBOQUANT_KERNELS", forced)
    if forced:
        assert interface.implementation(torch.device("cpu")).__name__.endswith(forced)
    assert build(Case()).attend().isfinite().all()


@pytest.mark.parametrize("call", ["store", "attend"])
def test_forcing_an_unknown_implementation(monkeypatch, call):
    step = build(Case())
    monkeypatch.setenv("TURBOQUANT_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"TURBOQUANT_KERNELS='cuda' is not known: allowed are .*reference"):
        store(step) if call == "store" else step.attend()


def test_dispatch_passes_every_argument_on(monkeypatch):
    """An implementation of another name gets the checked arguments, and its answer comes back."""
    step = build(Case(options={"sliding_window": 3, "softcap": 2.0}, sinks=True))
    seen = {}
    fake = SimpleNamespace(attend=lambda *args, **kwargs: (seen.update(kwargs), kwargs["out"].fill_(3.0)))
    monkeypatch.setattr(interface, "implementation", lambda device: fake)
    assert (step.attend(True, causal=False) == 3.0).all()
    assert (seen["sliding_window"], seen["softcap"], seen["causal"]) == (3, 2.0, False)
    assert seen["scale"] == 64**-0.5
    assert len(seen["fresh"]) == 2
    assert torch.equal(seen["sinks"], step.options["sinks"])
