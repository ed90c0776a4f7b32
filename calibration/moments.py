"""Streaming moments of K, V and the queries of each attention layer: sums alone, never the activations.

Keys and queries are counted as they are before RoPE (turned back by their position), where a mean has one meaning at
all positions. Position 0 is left out: its key is an attention sink, unlike the others. Sums are float64, so that
shards of the data can be added in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from turboquant.rope import Rope


@dataclass
class LayerMoments:
    """Sums over the counted tokens of one layer, float64 on the CPU. Hkv KV heads, D = head_dim.

    Attributes:
        count: [] tokens.
        key_sum, value_sum: [Hkv, D].
        key_squares, value_squares, query_squares: [Hkv, D]; of queries, the mean over the heads of each group.
        key_max, value_max, query_max: [Hkv] largest absolute element, as the cache holds it.
    """

    count: torch.Tensor
    key_sum: torch.Tensor
    key_squares: torch.Tensor
    value_sum: torch.Tensor
    value_squares: torch.Tensor
    query_squares: torch.Tensor
    key_max: torch.Tensor
    value_max: torch.Tensor
    query_max: torch.Tensor

    @classmethod
    def zeros(cls, num_kv_heads: int, head_dim: int) -> LayerMoments:
        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        sums = (empty(num_kv_heads, head_dim) for _ in range(5))
        return cls(empty(), *sums, *(empty(num_kv_heads) for _ in range(3)))

    @classmethod
    def of(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, rope: Rope | None
    ) -> LayerMoments:
        """Moments of some tokens.

        Args:
            query: [num_tokens, num_heads, D], key, value: [num_tokens, num_kv_heads, D], after RoPE.
            positions: [num_tokens] int64.
            rope: of the layer, None for one without.
        """
        groups = query.shape[1] // key.shape[1]
        query, key, value = query.float(), key.float(), value.float()
        before_query, before_key = (_unrotate(x, positions, rope) for x in (query, key))

        def total(x: torch.Tensor) -> torch.Tensor:
            return x.sum(0, dtype=torch.float64)

        def largest(x: torch.Tensor) -> torch.Tensor:
            return x.abs().amax((0, 2)) if len(x) else x.new_zeros(x.shape[1])

        moments = (
            torch.tensor(float(len(key))),
            total(before_key), total(before_key.square()), total(value), total(value.square()),
            total(before_query.square().unflatten(1, (-1, groups)).mean(2)),
            largest(key), largest(value), largest(query).unflatten(0, (-1, groups)).amax(1),
        )  # fmt: skip
        return cls(*(x.double().cpu() for x in moments))

    def add(self, other: LayerMoments) -> None:
        """Add the sums of other tokens; keep the larger extremes."""
        for name, mine, theirs in self.tensors(other):
            combine = torch.maximum if name.endswith("_max") else torch.add
            setattr(self, name, combine(mine, theirs))

    def tensors(self, *others: LayerMoments) -> Iterable[tuple]:
        """(name, tensor) of every field; with the same of others behind, if given."""
        for field in fields(self):
            yield (field.name, *(getattr(moments, field.name) for moments in (self, *others)))

    @property
    def key_mean(self) -> torch.Tensor:
        """[Hkv, D]; zero without tokens."""
        return self.key_sum / self.count.clamp(min=1)

    @property
    def key_energy(self) -> torch.Tensor:
        """Mean ‖k‖², [Hkv]."""
        return self.key_squares.sum(-1) / self.count.clamp(min=1)

    def energy_without(self, mean: torch.Tensor) -> torch.Tensor:
        """Mean ‖k − RoPE(μ)‖² for μ [Hkv, D], [Hkv]: the quantisation error of K is in proportion to it."""
        return self.key_energy - 2 * (self.key_mean * mean).sum(-1) + mean.square().sum(-1)


@dataclass
class Moments:
    """Of all layers, of the samples that μ is taken from and of those that it is tested on.

    Attributes:
        fit, held_out: by layer index.
        samples, tokens: read so far.
    """

    fit: dict[int, LayerMoments]
    held_out: dict[int, LayerMoments]
    samples: int = 0
    tokens: int = 0

    @classmethod
    def zeros(cls, shapes: dict[int, tuple[int, int]]) -> Moments:
        """From (num_kv_heads, head_dim) by layer index."""
        return cls(*({i: LayerMoments.zeros(*shape) for i, shape in shapes.items()} for _ in range(2)))

    def add(self, other: Moments) -> None:
        """Add the moments of other samples of the same model.

        Raises:
            ValueError: other layers or shapes.
        """
        if self.shapes != other.shapes:
            raise ValueError(f"moments of different models: layers and shapes {self.shapes} and {other.shapes}.")
        for mine, theirs in ((self.fit, other.fit), (self.held_out, other.held_out)):
            for index, moments in mine.items():
                moments.add(theirs[index])
        self.samples += other.samples
        self.tokens += other.tokens

    @property
    def shapes(self) -> dict[int, tuple[int, int]]:
        return {index: tuple(moments.key_sum.shape) for index, moments in self.fit.items()}

    def as_tensors(self) -> dict[str, torch.Tensor]:
        """Flat, for a file."""
        parts = {"fit": self.fit, "held_out": self.held_out}
        flat = {
            f"{part}.{index}.{name}": tensor
            for part, layers in parts.items()
            for index, moments in layers.items()
            for name, tensor in moments.tensors()
        }
        return {**flat, "samples": torch.tensor(self.samples), "tokens": torch.tensor(self.tokens)}

    @classmethod
    def from_tensors(cls, flat: dict[str, torch.Tensor]) -> Moments:
        """The inverse of `as_tensors`."""
        parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {"fit": {}, "held_out": {}}
        for key, tensor in flat.items():
            if key not in ("samples", "tokens"):
                part, index, name = key.split(".")
                parts[part].setdefault(int(index), {})[name] = tensor
        fit, held_out = (
            {index: LayerMoments(**layers[index]) for index in sorted(layers)} for layers in parts.values()
        )
        return cls(fit, held_out, int(flat["samples"]), int(flat["tokens"]))


def _unrotate(x: torch.Tensor, positions: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """What RoPE made of it, undone: [num_tokens, heads, D]."""
    return x if rope is None else rope.unrotate(x, positions[:, None])
