"""What every kernel takes and gives: the parameters of a layer, the signatures, checks and dispatch.

`store_kv`, `store_window` and `attend` check their arguments once, here, and hand over to an implementation of the same
signature. `kernels/reference.py` is the specification; an implementation is a module with these three functions.

    key, value      [num_tokens, num_kv_heads, head_dim] float
    query           [num_tokens, num_heads, head_dim] float, head h reads KV head h // (num_heads / num_kv_heads)
    pages           [num_blocks, num_kv_heads, block_size, slot_bytes] uint8, outer strides free
    slot_mapping    [num_tokens] int64: block · block_size + offset, or -1 for padding
    positions       [num_tokens] int64: index of each token in its own sequence
    block_table     [num_seqs, max_blocks] int32
    seq_lens        [num_seqs] int32: tokens in the cache, those of this step included
    query_start_loc [num_seqs + 1] int32: rows of `query` that belong to each sequence
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from turboquant.formats import KVFormat
from turboquant.kernels.checks import (
    check_devices,
    check_integers,
    check_pages,
    check_shape,
    check_vectors,
    check_window,
    check_window_pages,
)
from turboquant.rope import Rope
from turboquant.window import FIRST_TOKENS

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = {
    "reference": "turboquant.kernels.reference",
    "cpu": "turboquant.kernels.cpu",
    "triton": "turboquant.kernels.triton",
}
FORCE_ENV = "TURBOQUANT_KERNELS"


@dataclass(frozen=True)
class KVParams:
    """Everything that the kernels of one attention layer need besides K, V and pages.

    Attributes:
        fmt: the cache format.
        rotation: R, orthonormal, [D, D] float32; x' = R·x.
        key_centroids: [2**key_bits] float32, ascending, in the scale of a unit vector's coordinates.
        value_centroids: [2**value_bits] float32.
        key_mean: μ, K's mean before RoPE, [num_kv_heads, D] float32, or None for no mean.
        rope: where μ turns with the position; None for a layer without RoPE.
    """

    fmt: KVFormat
    rotation: torch.Tensor
    key_centroids: torch.Tensor
    value_centroids: torch.Tensor
    key_mean: torch.Tensor | None = None
    rope: Rope | None = None

    @property
    def head_dim(self) -> int:
        return self.rotation.shape[0]


@dataclass(frozen=True)
class ExactWindow:
    """Exact K and V of the first and of the newest tokens of each sequence, in pages of their own.

    Attributes:
        pages: [num_blocks, num_kv_heads, block_size, 2·D] float, K then V of each token; outer strides free. This
            block_size may differ from that of the packed pages.
        block_table: [num_seqs, max_blocks] int32, one entry for each block_size positions; 0 where none is held.
        size: W. A query at position p reads exactly the positions above p - W, and the first ones.
        first: how many those are, at most block_size.
    """

    pages: torch.Tensor
    block_table: torch.Tensor
    size: int
    first: int = FIRST_TOKENS


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    params: KVParams,
) -> None:
    """Quantise K and V of new tokens and write them into their slots.

    K's mean is taken out of a key where that makes it shorter; the sign of the key's scale records it (negative: the
    mean is still in the key). A zero vector stays exactly zero. A token with a NaN or an infinity is stored as NaN:
    whoever attends to it sees NaN, as with an exact cache, and no other token's bytes change.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit (see the module's table).
        IndexError: a slot lies outside `pages`.
    """
    check_pages(pages, params)
    for name, tensor in (("key", key), ("value", value)):
        check_vectors(name, tensor, params.head_dim, num_heads=pages.shape[1])
    check_shape("value", value, key.shape, "the shape of key")
    for name, tensor in (("slot_mapping", slot_mapping), ("positions", positions)):
        check_integers(name, tensor)
        check_shape(name, tensor, key.shape[:1], "one entry a token")
    check_devices(key, value=value, pages=pages, slot_mapping=slot_mapping, positions=positions)
    check_devices(key, rotation=params.rotation)
    implementation(key.device).store_kv(key, value, pages, slot_mapping, positions, params)


def store_window(key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write exact K and V of new tokens into their slots of the window's pages.

    Args:
        key, value: [num_tokens, num_kv_heads, D] float.
        pages: [num_blocks, num_kv_heads, block_size, 2·D] float, see `ExactWindow`.
        slot_mapping: [num_tokens] int64. A slot in block 0, or -1, holds nothing: such a token is not written.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
        IndexError: a slot lies outside `pages`.
    """
    check_window_pages(pages, key.shape[-1], key.shape[1])
    for name, tensor in (("key", key), ("value", value)):
        check_vectors(name, tensor, pages.shape[3] // 2, num_heads=pages.shape[1])
    check_shape("value", value, key.shape, "the shape of key")
    check_integers("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping, key.shape[:1], "one entry a token")
    check_devices(key, value=value, pages=pages, slot_mapping=slot_mapping)
    implementation(key.device).store_window(key, value, pages, slot_mapping)


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    params: KVParams,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: ExactWindow | None = None,
    strict: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this step's queries over packed pages. Decode, verify, chunked prefill and mixes are one call.

    The queries of a sequence are its last ones: query row j of Tq stands at position seq_len - Tq + j.

    Args:
        scale: factor on the logits, usually head_dim ** -0.5.
        causal: a query reads no later position.
        sliding_window: a query at p reads positions p - sliding_window + 1 .. p only.
        softcap: logits become softcap · tanh(logits / softcap); 0 for none.
        sinks: [num_heads] float, a logit in the softmax that reads no value (gpt-oss).
        fresh: this step's own (key, value), [num_tokens, num_kv_heads, head_dim], read exactly in place of their
            packed copies; without it everything comes from pages.
        window: exact tokens of earlier steps; needs `fresh` for those of this one. Where the window has no value for a
            position that it covers, the packed copy is read.
        strict: every query reads what a decode step at its position would read: fresh tokens exactly only where the
            window covers them, and without a window not at all.
        out: where to write; allocated if None.

    Returns:
        [num_tokens, num_heads, head_dim] in query's dtype. Rows past query_start_loc[-1] (padding) are left as they
        are in `out`, and are zero in a fresh tensor.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit (see the module's table).
    """
    check_pages(pages, params)
    check_vectors("query", query, params.head_dim, multiple_of=pages.shape[1])
    for name, tensor in zip(("fresh key", "fresh value"), fresh or (), strict=False):
        check_vectors(name, tensor, params.head_dim, num_heads=pages.shape[1])
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} has {tensor.shape[0]} tokens: expected {query.shape[0]}, as many as query.")
        check_devices(query, **{name: tensor})
    indices = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    for name, tensor in indices.items():
        check_integers(name, tensor)
    if block_table.ndim != 2 or seq_lens.shape != block_table.shape[:1]:
        raise ValueError(
            f"block_table {tuple(block_table.shape)} and seq_lens {tuple(seq_lens.shape)} do not fit: "
            "expected [num_seqs, max_blocks] and [num_seqs]."
        )
    if query_start_loc.shape != (len(seq_lens) + 1,):
        raise ValueError(
            f"query_start_loc has {len(query_start_loc)} entries: expected {len(seq_lens) + 1}, num_seqs + 1."
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window {sliding_window} is not allowed: at least 1, or None for no window.")
    if window is not None:
        check_window(window, params.head_dim, pages.shape[1], seq_lens)
        check_devices(query, **{"window pages": window.pages, "window block_table": window.block_table})
        if fresh is None:
            raise ValueError("window without fresh: this step's tokens are not in the window yet, so pass them, too.")
    if sinks is not None:
        check_shape("sinks", sinks, query.shape[1:2], "one logit a head")
        check_devices(query, sinks=sinks)
    if out is not None:
        check_shape("out", out, query.shape, "the shape of query")
        check_vectors("out", out, params.head_dim)
        check_devices(query, out=out)
    check_devices(query, pages=pages, rotation=params.rotation, **indices)
    out = torch.zeros_like(query) if out is None else out
    implementation(query.device).attend(
        query, pages, block_table, seq_lens, query_start_loc, params, scale=scale, causal=causal,
        sliding_window=sliding_window, softcap=softcap, sinks=sinks, fresh=fresh, window=window, strict=strict, out=out,
    )  # fmt: skip
    return out


def implementation(device: torch.device) -> ModuleType:
    """The kernels for this device, or those that TURBOQUANT_KERNELS forces.

    Raises:
        ValueError: TURBOQUANT_KERNELS names none.
    """
    name = os.environ.get(FORCE_ENV) or _default(device.type)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{FORCE_ENV}={name!r} is not known: allowed are {', '.join(IMPLEMENTATIONS)}, or unset it.")
    return _module(IMPLEMENTATIONS[name])


def prepare(params: KVParams) -> None:
    """Make what the kernels of this layer's device need before the first call: constants, scratch memory.

    Afterwards neither function allocates memory of its own on a GPU nor reads from it, so that CUDA graphs can be
    captured.
    """
    device = params.rotation.device
    kernels = implementation(device)
    for step, argument in (("prepare", params), ("reserve", device)):
        if hasattr(kernels, step):
            getattr(kernels, step)(argument)


def graph_safe(device: torch.device) -> bool:
    """Can the kernels for this device be captured into a CUDA graph?"""
    return device.type == "cuda" and hasattr(implementation(device), "reserve")


_module = functools.cache(import_module)  # a step asks once a layer and more


@functools.cache
def _default(device_type: str) -> str:
    """The fastest kernels that can run on such a device; where they are missing, a warning says how to get them."""
    if device_type != "cpu":
        return "triton" if device_type == "cuda" else "reference"
    from turboquant.kernels.cpu.library import LibraryMissing, load

    try:
        load()
    except LibraryMissing as error:
        logger.warning("%s. Until then the reference kernels serve, which are many times slower.", error)
        return "reference"
    return "cpu"
