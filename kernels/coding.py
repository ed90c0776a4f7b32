"""K and V of a layer to packed codes and back, in plain torch, float32: what every kernel must reproduce.

For one token and KV head (x is k − RoPE_p(μ), or v):

    y = R·x / ‖x‖      code_i = index of the centroid nearest to y_i      scale = ‖x‖ / ‖ŷ‖  (ŷ the centroids chosen)

so that x̂ = scale · Rᵀ·ŷ has the norm of x: reading is one multiply. μ is subtracted from a key only where that makes
it shorter, since the error is in proportion to what is left. Attention sinks (the first token, above all) are unlike μ
and carry up to a third of the attention: they keep their own length. The sign of a K scale says which was done:
negative, or -0, for a key stored without its mean taken out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from turboquant.kernels.interface import KVParams
from turboquant.packing import look_up, pack_codes

FP16_MAX = torch.finfo(torch.float16).max


class EncodedKV(NamedTuple):
    """Packed K and V with any leading axes [...]."""

    key_codes: torch.Tensor  # [..., key_code_bytes] uint8
    value_codes: torch.Tensor  # [..., value_code_bytes] uint8
    key_scales: torch.Tensor  # [...] float16
    value_scales: torch.Tensor  # [...] float16


def mean_at(params: KVParams, positions: torch.Tensor) -> torch.Tensor:
    """RoPE_p(μ): positions [...] to float32 [..., num_kv_heads, D]."""
    assert params.key_mean is not None
    at = positions[..., None]
    return params.rope.rotate(params.key_mean, at) if params.rope else params.key_mean.expand(*at.shape[:-1], -1, -1)


def encode_kv(key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, params: KVParams) -> EncodedKV:
    """Quantise and pack K and V.

    Args:
        key, value: [..., num_kv_heads, D] float.
        positions: [...] int64, index in the sequence.
    """
    key, keeps_mean = _take_out_mean(key.float(), positions, params)
    key_codes, key_scales = _encode(key @ params.rotation.T, params.key_centroids)
    value_codes, value_scales = _encode(value.float() @ params.rotation.T, params.value_centroids)
    return EncodedKV(
        pack_codes(key_codes, params.fmt.key_bits),
        pack_codes(value_codes, params.fmt.value_bits),
        torch.where(keeps_mean, -key_scales, key_scales),
        value_scales,
    )


def decode_rotated(encoded: EncodedKV, params: KVParams) -> tuple[torch.Tensor, torch.Tensor]:
    """|scale| · ŷ of K (a mean that was taken out is not in it) and V, in the rotated frame: two float32 [..., D]."""
    fmt, dim = params.fmt, params.head_dim
    key = look_up(encoded.key_codes, fmt.key_bits, dim, params.key_centroids)
    value = look_up(encoded.value_codes, fmt.value_bits, dim, params.value_centroids)
    return key * encoded.key_scales.float().abs()[..., None], value * encoded.value_scales.float()[..., None]


def taken_out(encoded: EncodedKV, positions: torch.Tensor, params: KVParams) -> torch.Tensor:
    """What to add back to K: RoPE_p(μ), or zero for a key that kept its mean. float32 [..., num_kv_heads, D].

    Args:
        positions: [...] int64, the ones that the keys were stored with.
    """
    return mean_at(params, positions).masked_fill(encoded.key_scales.signbit()[..., None], 0.0)


def decode_kv(encoded: EncodedKV, positions: torch.Tensor, params: KVParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `encode_kv`, up to the quantisation error: two float32 [..., num_kv_heads, D]."""
    key, value = (x @ params.rotation for x in decode_rotated(encoded, params))
    if params.key_mean is not None:
        key = key + taken_out(encoded, positions, params)
    return key, value


def _take_out_mean(key: torch.Tensor, positions: torch.Tensor, params: KVParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., Hkv, D] as they are quantised, and which of them [..., Hkv] kept their mean."""
    if params.key_mean is None:
        return key, torch.zeros(key.shape[:-1], dtype=torch.bool, device=key.device)
    centred = key - mean_at(params, positions)
    keeps_mean = _norm(key) <= _norm(centred)
    return torch.where(keeps_mean[..., None], key, centred), keeps_mean


def _norm(x: torch.Tensor) -> torch.Tensor:
    """‖x‖ over the last axis, float32. The squares of large bf16 values overflow float32."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).float()


def _encode(rotated: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., D] and scales float16 [...] of rotated vectors [..., D]."""
    norm = _norm(rotated)[..., None]
    finite = norm.isfinite()
    unit = torch.where(finite & (norm > 0), rotated / norm, 0.0)
    codes = torch.bucketize(unit, (centroids[1:] + centroids[:-1]) / 2)
    scale = norm / torch.linalg.vector_norm(centroids[codes], dim=-1, keepdim=True)
    scale = torch.where(finite, scale.clamp(max=FP16_MAX), torch.nan)
    return codes.to(torch.uint8), scale.squeeze(-1).half()
