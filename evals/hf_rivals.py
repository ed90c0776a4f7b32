"""Rivals in a Transformers cache, with or without the same exact window as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from turboquant.cache import CacheSession, compressing
from turboquant.cache_layer import TurboQuantLayer
from turboquant.evals.hf_grouped import GroupedRivalLayer
from turboquant.evals.rivals import Rival
from turboquant.formats import BF16_BYTES, PRESETS
from turboquant.hf_model import compressed_modules, text_config
from turboquant.hf_window import WindowedLayer
from turboquant.kernels.interface import KVParams
from turboquant.kv_quantizer import make_params

# The layers at a model's ends that a rival leaves alone. They are part of it, so they count as in a 16-bit model.
UNTOUCHED = Rival("16 bits", lambda x: x, lambda x: x, lambda dim: 2 * dim * BF16_BYTES, "as it is")
RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


class _ReadBack:
    """Keeps what a rival's cache would return, [B, T, Hkv, D] of K and V, in place of packed codes."""

    rival: Rival
    read: list[torch.Tensor]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.read = [states[:, :, :0].transpose(1, 2) for states in (key_states, value_states)]
        self.is_initialized = True

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.next_positions = None
        fresh = self.rival.read_back(key_states.transpose(1, 2), value_states.transpose(1, 2))
        self.read = [torch.cat(pair, dim=1) for pair in zip(self.read, fresh, strict=True)]

    def get_seq_length(self) -> int:
        return self.read[0].shape[1] if self.is_initialized else 0

    @property
    def packed_nbytes(self) -> int:
        """Bytes that the rival's own cache would take."""
        batch, tokens, heads, dim = self.read[0].shape
        return batch * tokens * heads * self.rival.slot_bytes(dim)

    @property
    def num_elements(self) -> int:
        return 2 * self.read[0].numel()

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            self.read = [fn(x) for x in self.read]


class RivalLayer(_ReadBack, TurboQuantLayer):
    """Every query reads what the rival's cache returns, of its own token, too."""

    def __init__(self, params: KVParams, rival: Rival) -> None:
        super().__init__(params)
        self.rival = rival

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.append(key_states, value_states)
        return tuple(x.transpose(1, 2) for x in self.read)


class WindowedRivalLayer(_ReadBack, WindowedLayer):
    """The same beside an exact window."""

    def __init__(self, params: KVParams, rival: Rival, window: int) -> None:
        super().__init__(params, window)
        self.rival = rival

    def packed(self, row: int):
        keys, values = (x[row].transpose(0, 1).float() for x in self.read)
        return keys, values, None, torch.eye(keys.shape[-1], device=keys.device)


class RivalSession(CacheSession):
    """As a `CacheSession`, with layers of a rival; those in `untouched` are exact."""

    def __init__(self, rival: Rival, params: dict[int, KVParams], window: int, untouched: set[int]) -> None:
        # Its own residual is a window, too: every query has another one.
        super().__init__(PRESETS["turboquant4"], params, window or rival.residual)
        self.rival, self.exact_window, self.untouched = rival, window, untouched

    @property
    def label(self) -> str:
        return f"{self.rival.name} with a window of {self.exact_window}"

    @property
    def exact_nbytes(self) -> int:
        return sum(getattr(x, "exact_nbytes", x.nbytes - x.packed_nbytes) for x in self.layers)

    def new_layer(self, index: int) -> TurboQuantLayer:
        params, rival = self.params[index], self.rival
        if index in self.untouched:
            return RivalLayer(params, UNTOUCHED)
        if rival.key_group > 1:
            return GroupedRivalLayer(params, rival, self.exact_window)
        return WindowedRivalLayer(params, rival, self.exact_window) if self.exact_window else RivalLayer(params, rival)


@contextmanager
def rival_cache(model: PreTrainedModel, rival: Rival, window: int) -> Iterator[RivalSession]:
    """Keep K and V as a rival would in every forward pass of `model` inside this block; arguments as there."""
    # Which layers hold K and V is the same for all; their parameters are not used.
    fmt = PRESETS["turboquant4"]
    params = {i: make_params(fmt, module.head_dim) for i, module in compressed_modules(model).items()}
    session = RivalSession(rival, params, window, boundary_layers(model, rival.boundary))
    with compressing(model, session):
        yield session


def boundary_layers(model: PreTrainedModel, each: int) -> set[int]:
    """Indices of the first and last `each` layers, as vLLM skips them for its own presets: none of a model with
    recurrent layers, and never more than half on a side."""
    types, _ = get_layer_types_and_kwargs(text_config(model))
    each = min(each, len(types) // 2)
    if RECURRENT & set(types):
        return set()
    return {*range(each), *range(len(types) - each, len(types))}
