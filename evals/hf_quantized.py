"""Transformers' own quantised caches as rivals: their routine, there and back.

On its first forward pass a `QuantizedCache` returns K and V as they came in and keeps the quantised ones for later
steps: perplexity or divergence over one forward pass then measures an exact cache. Here every query reads what the
cache would give back in a later step. Left out are the residual of up to 128 unquantised tokens, which grows while
decoding only, and that all tokens are quantised once more whenever it is full.
"""

from __future__ import annotations

import functools

import torch

# As recommended in the documentation of each: a group is a run of channels of one token either way.
AXIS = {"quanto": 0, "hqq": 1}


def quantize_dequantize(x: torch.Tensor, backend: str, bits: int, group: int) -> torch.Tensor:
    """float32 [..., D] as a cache of this backend keeps and returns it, in float16 with its float16 scales.

    Args:
        backend: "quanto" (optimum-quanto) or "hqq".
        bits: 4 or 2.
        group: channels that share a scale.

    Raises:
        ImportError: the package of this backend is not installed; the message says which.
    """
    head_dim = x.shape[-1]
    layer = _layer(backend, bits, group)
    rows = x.reshape(-1, head_dim)
    # HQQ packs two or four rows into one.
    padded = torch.cat((rows, rows[-1:].expand(-len(rows) % 4, -1)))
    states = padded.half()[None, None].contiguous()
    layer.lazy_initialization(states, states)
    read = layer._dequantize(layer._quantize(states, axis=AXIS[backend]))
    return read[0, 0, : len(rows)].float().view_as(x)


@functools.cache
def _layer(backend: str, bits: int, group: int):
    from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

    kind = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}[backend]
    return kind(nbits=bits, axis_key=AXIS[backend], axis_value=AXIS[backend], q_group_size=group)
