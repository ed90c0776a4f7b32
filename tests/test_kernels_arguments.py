"""Wrong arguments of `store_kv` and `attend` are named, and nothing is stored; dispatch passes the right ones on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import Case, build, store

from turboquant.kernels import interface
from turboquant.kernels.interface import KVParams, attend, store_kv

pytestmark = pytest.mark.usefixtures("poison_empty", "one_thread")

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
