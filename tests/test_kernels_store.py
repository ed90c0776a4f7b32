"""`store_kv` writes the nearest codes and matched norms, takes a mean out where that helps, and only its own bytes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_cases import (
    CASES,
    FORMATS,
    HALF,
    INTERLEAVED,
    Case,
    build,
    cached_by_hand,
    mean_of,
    random,
    store,
    token_by_hand,
    turned,
)

from turboquant.formats import PRESETS
from turboquant.kernels.interface import store_kv
from turboquant.kv_quantizer import make_params

pytestmark = pytest.mark.usefixtures("poison_empty", "one_thread", "kernels")


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
