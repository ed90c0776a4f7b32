"""What the library wants to know of a layer besides its tensors: the rotation's structure and tables of RoPE.

Tables are float64 where a position goes in, and are shared by all layers with the same RoPE.
"""

from __future__ import annotations

import functools
import weakref

import torch

from turboquant.kernels.cpu.library import SMOOTH, TILE
from turboquant.kernels.interface import KVParams
from turboquant.rope import Rope

PADDING = 16  # floats: the widest vector that reads a table
MAX_TABLE_TILES = 2**14  # positions up to a million; beyond, angles are computed one by one


class RopeTables:
    """Angles of one RoPE.

    Attributes:
        inv_freq: [P] float64.
        local: [TILE, P, 2] float64, cos and sin at -TILE/2 .. TILE/2 - 1.
        tile_angles: [tiles, P, 2] float64, cos and sin at the middle of each tile; grows.
        num_fast: how many leading pairs have basis rows of their own.
        basis: [2·num_fast + SMOOTH, TILE] float32: the fast pairs' cos, their sin, then Chebyshev polynomials.
        smooth: [SMOOTH, P - num_fast or more] float32: the other pairs in those polynomials, their cos in even terms,
            sin in odd ones; the rest is zero.
    """

    def __init__(self, inv_freq: torch.Tensor) -> None:
        half = TILE // 2
        self.inv_freq = inv_freq
        self.local = self._cos_sin(torch.arange(-half, half))
        fast = (inv_freq * half > 1).nonzero().flatten().tolist()
        self.num_fast = fast[-1] + 1 if fast else 0
        x = torch.arange(-half, half, dtype=torch.float64) / half
        polynomials = torch.cos(torch.arange(SMOOTH, dtype=torch.float64)[:, None] * torch.arccos(x))
        slow = self.local[:, self.num_fast :]
        count = slow.shape[1]
        self.smooth = torch.zeros(SMOOTH, -(-count // PADDING) * PADDING)
        for parity in (0, 1):
            terms = polynomials[parity::2].T.contiguous()
            if count:
                fitted = torch.linalg.lstsq(terms, slow[..., parity].contiguous()).solution
                self.smooth[parity::2, :count] = fitted.float()
        waves = self.local[:, : self.num_fast].permute(2, 1, 0).flatten(0, 1)
        self.basis = torch.cat((waves, polynomials)).float().contiguous()
        self.tile_angles = self._cos_sin(torch.arange(0))
        self.grow(TILE * 64)

    def grow(self, length: int) -> None:
        """Cover positions below `length`, as far as tables go."""
        tiles = min(-(-length // TILE), MAX_TABLE_TILES)
        if tiles > len(self.tile_angles):
            self.tile_angles = self._cos_sin(torch.arange(1 << (tiles - 1).bit_length()) * TILE + TILE // 2)

    def _cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].double() * self.inv_freq
        return torch.stack((angles.cos(), angles.sin()), dim=-1).contiguous()


_rope_tables: dict[bytes, RopeTables] = {}


def rope_tables(rope: Rope | None) -> RopeTables:
    """The tables of this RoPE; without RoPE, those of one that turns nothing."""
    inv_freq = torch.zeros(0, dtype=torch.float64) if rope is None else rope.inv_freq.double().contiguous()
    key = inv_freq.numpy().tobytes()
    if key not in _rope_tables:
        _rope_tables[key] = RopeTables(inv_freq)
    return _rope_tables[key]


class LayerTables:
    """The values of `library.LAYER` for some parameters, and the tensors that they point into."""

    def __init__(self, params: KVParams) -> None:
        self.keep = [
            x.detach().float().contiguous()
            for x in (params.rotation, params.key_centroids, params.value_centroids)
        ]  # fmt: skip
        rotation, key_centroids, value_centroids = (x.data_ptr() for x in self.keep)
        signs = rotation if is_butterfly(self.keep[0]) else 0  # its first row: H begins with a row of ones
        self.tensors = (params.head_dim, params.fmt.key_bits, params.fmt.value_bits, rotation, signs, key_centroids)
        self.tensors += (value_centroids,)
        self.rope: RopeTables | None = None
        self.values = (*self.tensors, *(0,) * 7, 1.0, *(0,) * 5)
        if params.key_mean is not None:
            self._add_mean(params.key_mean.detach().float().contiguous(), params.rope)

    def _add_mean(self, mean: torch.Tensor, rope: Rope | None) -> None:
        self.rope = rope_tables(rope)
        nonzero = mean.any(-1).to(torch.uint8)
        self.keep += [mean, nonzero]
        self.mean = (mean.data_ptr(), nonzero.data_ptr(), len(self.rope.inv_freq))
        self.interleaved = int(rope is not None and rope.interleaved)
        self.attention_scaling = 1.0 if rope is None else rope.attention_scaling
        self.angles: torch.Tensor | None = None
        self.cover(0)

    def cover(self, length: int) -> tuple:
        """The values, with angles of positions below `length`."""
        if self.rope is not None:
            self.rope.grow(length)
            if self.angles is not self.rope.tile_angles:
                self.angles = self.rope.tile_angles
                self.values = self._with_mean(self.rope, self.angles)
        return self.values

    def _with_mean(self, rope: RopeTables, angles: torch.Tensor) -> tuple:
        pointers = (x.data_ptr() for x in (rope.inv_freq, angles, rope.local, rope.basis, rope.smooth))
        numbers = (self.interleaved, rope.num_fast, rope.smooth.shape[1], len(angles), self.attention_scaling)
        return (*self.tensors, *self.mean, *numbers, *pointers)


_layer_tables: dict[int, tuple[weakref.ref, LayerTables]] = {}


def layer_tables(params: KVParams) -> LayerTables:
    """The tables of these very parameters, made at first sight."""
    key = id(params)
    known = _layer_tables.get(key)
    if known is not None and known[0]() is params:
        return known[1]
    tables = LayerTables(params)
    _layer_tables[key] = (weakref.ref(params, lambda _: _layer_tables.pop(key, None)), tables)
    return tables


def is_butterfly(rotation: torch.Tensor) -> bool:
    """Is rotation [D, D] Sylvester's Hadamard matrix behind signs, so that additions alone apply it?"""
    dim = rotation.shape[0]
    return not dim & (dim - 1) and torch.equal(rotation, _sylvester(dim) * rotation[0])


@functools.cache
def _sylvester(dim: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix
