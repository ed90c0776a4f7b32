"""The KV quantiser that serving uses, as an object: one attention layer's K and V to packed codes and back.

    x' = R·x          R = Hadamard · random signs / sqrt(D), one for all layers and heads
    K: subtract RoPE_p(μ) first, where that makes it shorter; Lloyd-Max codes of x'/‖x'‖; one fp16 scale that matches
       the norm, its sign saying whether the mean was subtracted
    V: the same without a mean

The paper's Algorithm 1 with three changes: a Hadamard rotation in place of a dense one, the matched-norm scale, and K's
mean, which models with a K bias cannot do without. The arithmetic is `kernels/coding.py`; this class checks input.
"""

from __future__ import annotations

import functools

import torch

from turboquant.codebook import lloyd_max
from turboquant.formats import KVFormat, check_head_dim
from turboquant.kernels.checks import check_mean_heads
from turboquant.kernels.coding import EncodedKV, decode_kv, encode_kv
from turboquant.kernels.interface import KVParams
from turboquant.rope import Rope
from turboquant.rotation import hadamard_rotation

DEFAULT_SEED = 0


def make_params(
    fmt: KVFormat,
    head_dim: int,
    *,
    key_mean: torch.Tensor | None = None,
    rope: Rope | None = None,
    seed: int = DEFAULT_SEED,
    device: torch.device | str = "cpu",
) -> KVParams:
    """The kernels' parameters of one layer.

    Args:
        key_mean: μ before RoPE, [num_kv_heads, head_dim], or None.
        rope: the layer's RoPE; needed with a mean unless the layer has none.
        seed: of the rotation's signs. Pages can only be read with the seed that they were written with.

    Raises:
        ValueError: head_dim cannot be stored or has no Hadamard matrix, or key_mean does not fit or is not finite.
    """
    check_head_dim(head_dim)
    if key_mean is not None:
        if key_mean.ndim != 2 or key_mean.shape[1] != head_dim:
            raise ValueError(f"key_mean has shape {tuple(key_mean.shape)}: expected [num_kv_heads, {head_dim}].")
        if not key_mean.isfinite().all():
            raise ValueError("key_mean has NaN or infinite entries: calibrate again, or pass None for no mean.")
        key_mean = key_mean.to(device, torch.float32) if key_mean.any() else None
    return KVParams(
        fmt=fmt,
        rotation=_rotation(head_dim, seed).to(device),
        key_centroids=lloyd_max(head_dim, fmt.key_bits).centroid_tensor(device),
        value_centroids=lloyd_max(head_dim, fmt.value_bits).centroid_tensor(device),
        key_mean=key_mean,
        rope=rope.to(device) if rope is not None and key_mean is not None else None,
    )


@functools.cache
def _rotation(head_dim: int, seed: int) -> torch.Tensor:
    try:
        return hadamard_rotation(head_dim, seed)
    except ValueError as error:
        raise ValueError(
            f"head_dim {head_dim} cannot be rotated: no Hadamard matrix of this order can be made. "
            "Keep this layer in its own precision (in vLLM: --kv-cache-dtype-skip-layers)."
        ) from error


class KVQuantizer:
    """Quantise K and V of one attention layer.

    Args:
        fmt: a preset or its name.
        head_dim: D.
        key_mean, rope, seed, device: see `make_params`.

    Example:
        >>> quantizer = KVQuantizer("turboquant3.5", head_dim=128)
        >>> encoded = quantizer.quantize(key, value)        # [num_tokens, num_kv_heads, 128] each
        >>> key_hat, value_hat = quantizer.dequantize(encoded)
    """

    def __init__(
        self,
        fmt: KVFormat | str,
        head_dim: int,
        *,
        key_mean: torch.Tensor | None = None,
        rope: Rope | None = None,
        seed: int = DEFAULT_SEED,
        device: torch.device | str = "cpu",
    ) -> None:
        fmt = KVFormat.from_name(fmt) if isinstance(fmt, str) else fmt
        self.params = make_params(fmt, head_dim, key_mean=key_mean, rope=rope, seed=seed, device=device)

    def quantize(self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor | None = None) -> EncodedKV:
        """Packed codes and scales of K (after RoPE) and V.

        Args:
            key, value: [num_tokens, num_kv_heads, head_dim] float.
            positions: [num_tokens] int64, index of each token in its sequence; 0, 1, 2, ... if None.

        Raises:
            ValueError: wrong shapes, or NaN or infinite entries (named, with the first one's place).
            TypeError: not a floating-point tensor.
        """
        for name, x in (("key", key), ("value", value)):
            _check_vectors(name, x, self.params.head_dim)
        if key.shape != value.shape:
            raise ValueError(f"value has shape {tuple(value.shape)}, key {tuple(key.shape)}: they must be equal.")
        check_mean_heads(self.params, key.shape[1])
        return encode_kv(key, value, self._positions(key.shape[0], key.device, positions), self.params)

    def dequantize(
        self, encoded: EncodedKV, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V back, two float32 [num_tokens, num_kv_heads, head_dim]; `positions` as they were stored with."""
        num_tokens, device = encoded.key_scales.shape[0], encoded.key_scales.device
        return decode_kv(encoded, self._positions(num_tokens, device, positions), self.params)

    @staticmethod
    def _positions(num_tokens: int, device: torch.device, positions: torch.Tensor | None) -> torch.Tensor:
        if positions is None:
            return torch.arange(num_tokens, device=device)
        if positions.shape != (num_tokens,):
            raise ValueError(f"positions has shape {tuple(positions.shape)}: expected [{num_tokens}].")
        return positions


def _check_vectors(name: str, x: torch.Tensor, head_dim: int) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}: expected a floating-point tensor.")
    if x.ndim != 3 or x.shape[-1] != head_dim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected [num_tokens, num_kv_heads, {head_dim}].")
    broken = ~x.isfinite()
    if broken.any():
        first = tuple(broken.nonzero()[0].tolist())
        raise ValueError(
            f"{name} has {int(broken.sum())} NaN or infinite entries, the first at {first}: "
            "find out where the model produces them; a cache cannot store them."
        )
