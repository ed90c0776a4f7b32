"""What users would take in place of our formats, quantised and dequantised to the byte.

Most rivals are a pure function of one token's K or V in one KV head, so they can stand in any cache: the engine lacks
some of these on some platforms, and serves others wrong. KIVI's K is one of a whole group of tokens, and vLLM's own
presets leave some layers exact; Transformers measures these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from scipy.linalg import hadamard
from scipy.stats import norm

FP8_MAX = 448.0
GROUP = 64  # of KIVI in tokens and channels, and of Transformers' quantised caches in channels
BOUNDARY = 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Rival:
    """One other way to store K and V.

    Attributes:
        name: as in --kv-cache-dtype.
        key, value: float32 [..., D] to what is read back, [..., D]. With a key_group G, `key` takes [..., G, D].
        slot_bytes: of head_dim: one token in one KV head, K and V, scales included.
        what: one line for tables.
        key_group: how many tokens of K are quantised together; those of a group that is not full yet are exact.
        residual: how many of the newest tokens' V the rival itself keeps exact.
        boundary: how many attention layers at each end of a model stay exact, 16 bits an element.
        requires: the distribution that its routine comes from; empty for none.
    """

    name: str
    key: Callable[[torch.Tensor], torch.Tensor]
    value: Callable[[torch.Tensor], torch.Tensor]
    slot_bytes: Callable[[int], int]
    what: str
    key_group: int = 1
    residual: int = 0
    boundary: int = 0
    requires: str = ""

    @property
    def by_token(self) -> bool:
        """Is what is read of a token in any layer a function of this token alone?"""
        return self.key_group == 1 and not self.boundary

    def bits_per_element(self, head_dim: int) -> float:
        """All-inclusive, as for our formats; of a compressed layer."""
        return 8 * self.slot_bytes(head_dim) / (2 * head_dim)

    def read_back(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [..., D] as a cache of this kind returns them, in the dtype that they came in.

        With a key_group: [..., T, Hkv, D], from the start of a sequence, and the K of the last group exact if not full.
        """
        read = self._read_groups(key.float()) if self.key_group > 1 else self.key(key.float())
        return read.to(key.dtype), self.value(value.float()).to(value.dtype)

    def _read_groups(self, key: torch.Tensor) -> torch.Tensor:
        full = key.shape[-3] // self.key_group * self.key_group
        groups = key[..., :full, :, :].unflatten(-3, (-1, self.key_group)).transpose(-3, -2)
        read = self.key(groups).transpose(-3, -2).flatten(-4, -3)
        return torch.cat((read, key[..., full:, :, :]), dim=-3)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with scale 1, which is what vLLM does without calibrated scales."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def symmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers with one fp16 scale for each vector."""
    top = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(-1, keepdim=True) / top).half().float()
    return torch.where(scale > 0, (x / scale).round().clamp(-top, top) * scale, 0.0)


def asymmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers between the vector's extremes, with an fp16 step and an fp16 minimum."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    codes = ((x - low) / step + 0.5).floor().clamp(0, 2**bits - 1)
    return codes * step.half().float() + low.half().float()


def per_channel(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Tokens [..., G, D] with a step and a minimum for each channel."""
    return asymmetric(x.transpose(-1, -2), bits).transpose(-1, -2)


def grouped(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Each vector in groups of `group_of` channels, each with a step and a minimum."""
    return asymmetric(x.unflatten(-1, (-1, group_of(x.shape[-1]))), bits).flatten(-2)


def group_of(head_dim: int) -> int:
    """64 channels, or all of a head_dim that is no multiple of it."""
    return head_dim if head_dim % GROUP else GROUP


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1 in blocks of 16 with an E4M3 scale, without the second, global scale."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = fp8(blocks.abs().amax(-1, keepdim=True) / E2M1[-1])
    grid = torch.tensor(E2M1, device=x.device)
    units = torch.where(scale > 0, blocks / scale, 0.0)
    nearest = torch.bucketize(units.abs(), (grid[1:] + grid[:-1]) / 2)
    return (grid[nearest] * units.sign() * scale).flatten(-2)


def lloyd_max_key(x: torch.Tensor, bits: int) -> torch.Tensor:
    """K of vLLM's own `turboquant_*_nc` presets: Hadamard without signs, Gaussian Lloyd-Max, fp16 norm, and the read
    vector brought back to unit length."""
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(f"vLLM's turboquant_* presets cannot do head_dim {dim}: powers of two only.")
    rotation = torch.tensor(hadamard(dim) / dim**0.5, dtype=torch.float32, device=x.device)
    length = x.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, x / length, 0.0) @ rotation
    centroids = gaussian_codebook(bits).to(x.device) / dim**0.5
    read = centroids[torch.bucketize(unit, (centroids[1:] + centroids[:-1]) / 2)]
    return (read / read.norm(dim=-1, keepdim=True)) @ rotation * length.half().float()


@functools.cache
def gaussian_codebook(bits: int) -> torch.Tensor:
    """Lloyd-Max centroids of N(0, 1), float32 [2**bits]."""
    import numpy as np

    centroids = np.linspace(-3.0, 3.0, 2**bits)
    for _ in range(2000):
        edges = np.concatenate(([-np.inf], (centroids[1:] + centroids[:-1]) / 2, [np.inf]))
        centroids = -np.diff(norm.pdf(edges)) / np.diff(norm.cdf(edges))
    return torch.tensor(centroids, dtype=torch.float32)


def _upstream(name: str, key_bits: int, value_bits: int) -> Rival:
    exact_key = key_bits == 8
    return Rival(
        name,
        fp8 if exact_key else functools.partial(lloyd_max_key, bits=key_bits),
        functools.partial(asymmetric, bits=value_bits),
        lambda dim: (dim if exact_key else -(-dim * key_bits // 8) + 2) + -(-dim * value_bits // 8) + 4,
        f"vLLM's own preset: K {'fp8' if exact_key else f'{key_bits} bits'}, V {value_bits} bits",
    )


def _with_boundary(rival: Rival) -> Rival:
    what = f"{rival.what}; the first and last {BOUNDARY} layers exact, as vLLM does for models without recurrent layers"
    return replace(rival, name=f"{rival.name}+boundary", boundary=BOUNDARY, what=what)


def _kivi(bits: int) -> Rival:
    """KIVI (arXiv 2402.02750): groups of 64, and the shortest residual that these allow."""
    return Rival(
        f"kivi{bits}",
        functools.partial(per_channel, bits=bits),
        functools.partial(grouped, bits=bits),
        lambda dim: 2 * dim * bits // 8 + -(-4 * dim // GROUP) + 4 * dim // group_of(dim),
        f"K a channel over {GROUP} tokens, V a token; K of the group not yet full and V of {GROUP} newest tokens exact",
        key_group=GROUP,
        residual=GROUP,
    )


def _transformers(backend: str, bits: int) -> Rival:
    """Transformers' QuantizedCache of this backend as its documentation recommends it; see `hf_quantized`."""

    def read(x: torch.Tensor) -> torch.Tensor:
        from turboquant.evals.hf_quantized import quantize_dequantize

        return quantize_dequantize(x, backend, bits, group_of(x.shape[-1]))

    return Rival(
        f"{backend}{bits}",
        read,
        read,
        lambda dim: 2 * (dim * bits // 8 + 4 * dim // group_of(dim)),
        f"Transformers' QuantizedCache, {backend}, groups of {GROUP}, without its residual of unquantised tokens",
        requires={"quanto": "optimum-quanto", "hqq": "hqq"}[backend],
    )


def _same(name: str, read: Callable[[torch.Tensor], torch.Tensor], half_slot: Callable[[int], int], what: str) -> Rival:
    return Rival(name, read, read, lambda dim: 2 * half_slot(dim), what)


_UPSTREAM = (
    _upstream("turboquant_k8v4", 8, 4),
    _upstream("turboquant_4bit_nc", 4, 4),
    _upstream("turboquant_k3v4_nc", 3, 4),
    _upstream("turboquant_3bit_nc", 3, 3),
)

RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        _same("fp8", fp8, lambda dim: dim, "E4M3, scale 1"),
        _same("int8", functools.partial(symmetric, bits=8), lambda dim: dim + 2, "a scale for each token and head"),
        _same("int4", functools.partial(asymmetric, bits=4), lambda dim: dim // 2 + 4, "a step and a minimum likewise"),
        _same("nvfp4", nvfp4, lambda dim: dim // 2 + dim // 16, "E2M1 in blocks of 16 with an E4M3 scale"),
        *(_kivi(bits) for bits in (4, 2)),
        *(_transformers(backend, bits) for backend in ("quanto", "hqq") for bits in (4, 2)),
        *_UPSTREAM,
        *map(_with_boundary, _UPSTREAM),
    )
}
