"""RoPE of a fixed vector at many positions: what K's mean looks like at position p.

A model rotates pair i of K by the angle p·ω_i. The mean that a K bias puts into every key is rotated with it, so the
mean to subtract at position p is RoPE_p(μ), μ taken before RoPE. Read and store use the same p, which makes the pair
exact for every μ and p; a p that is also the model's own makes it good.

Layouts of the pairs: "half" (Llama, Qwen: element i with i + R/2) and interleaved (GPT-J, GLM: 2i with 2i + 1). Only
the first R of the D elements rotate; the others pass through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

LENGTH_DEPENDENT = {"dynamic", "longrope"}


@dataclass(frozen=True)
class Rope:
    """One layer's rotary embedding.

    Attributes:
        inv_freq: angles per position ω, [R/2] float64.
        attention_scaling: factor on cos and sin (YaRN's mscale).
        interleaved: pairs are neighbours; otherwise element i pairs with i + R/2.
    """

    inv_freq: torch.Tensor
    attention_scaling: float = 1.0
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """R: how many leading elements rotate."""
        return 2 * self.inv_freq.numel()

    def to(self, device: torch.device | str) -> Rope:
        return replace(self, inv_freq=self.inv_freq.to(device))

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at integer positions [...]: two float32 [..., R/2], scaled."""
        # float64: at position 1e6 a float32 angle is off by up to 0.03.
        angles = positions[..., None].to(torch.float64) * self.inv_freq
        return (angles.cos() * self.attention_scaling).float(), (angles.sin() * self.attention_scaling).float()

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE_p(x).

        Args:
            x: float32 [..., D], D >= R.
            positions: integers, broadcast against the leading axes of x.

        Returns:
            float32 [..., D] of the broadcast shape.
        """
        cos, sin = self.cos_sin(positions)
        rotary, passed = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        first, second = rotary.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else rotary.chunk(2, dim=-1)
        pairs = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, dim=-1)
        return torch.cat((rotated, passed.expand(*rotated.shape[:-1], -1)), dim=-1)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`: what x was before RoPE at these positions."""
        return replace(self, attention_scaling=1 / self.attention_scaling).rotate(x, -positions)


def rope_from_config(config: Any, head_dim: int, *, layer_type: str | None = None) -> Rope:
    """The rotary embedding that a Transformers text config describes, in the half layout.

    Every rope_type that Transformers knows (linear, yarn, llama3, ...) goes through its own initialiser. The layout of
    the pairs is not in any config: see `Rope.interleaved`.

    Args:
        config: a text config with `rope_parameters` (Transformers 5).
        head_dim: D.
        layer_type: which entry of `rope_parameters` to take where it has one for each layer type (Gemma 3).

    Raises:
        ValueError: the config has no rope_parameters, none for this layer type, or a type whose angles change with the
            running length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = bool(parameters) and "rope_type" not in parameters
    if nested:
        parameters = parameters.get(layer_type) or {}
    if "rope_type" not in parameters:
        raise ValueError(
            f"{type(config).__name__} has no rope_parameters for layer type {layer_type!r}: "
            "cannot place K's mean. Use its default cache."
        )
    if parameters["rope_type"] in LENGTH_DEPENDENT:
        raise ValueError(
            f"rope_type {parameters['rope_type']!r} turns keys by angles that change with the running length, so K's "
            "mean has no fixed place: use this model's default cache."
        )
    if parameters["rope_type"] == "default":
        factor = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        rotary_dim = int(head_dim * factor)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return Rope(inv_freq=float(parameters["rope_theta"]) ** -exponents)

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kwargs = {"layer_type": layer_type} if nested else {}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", **kwargs)
    return Rope(inv_freq=inv_freq.double(), attention_scaling=float(scaling))
