"""Pages of a served cache: how vLLM 0.32 and 0.33 cut a model's layers into groups of equal pages, and what those cost.

vLLM keeps one pool of blocks. A block is one page in each layer of a group; all pages are as large as the largest,
smaller ones are padded. Layers of a kind form one or more groups, as many layers in each as the rarest kind has:

    dense                    all layers in one group
    sliding and full         Gemma-3: 5 full layers to a group, so 1 group of full and 5 of sliding layers
    hybrid                   Qwen3.5: 10 attention layers, 30 recurrent ones in 3 groups; a page holds one layer's state
    with an exact window     one more layer beside each attention layer, whose pages hold exact K and V

Rules: `unify_kv_cache_spec_page_size`, `_get_kv_cache_groups_uniform_page_size` (v1/core/kv_cache_utils.py) and
`_align_hybrid_block_size` (platforms/interface.py). A window's own arithmetic is `turboquant.window`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from turboquant.planner import PlanError
from turboquant.planner.serving import BLOCK_SIZES, OUR_BLOCK_ON_CUDA, OUR_KERNEL_BLOCK, CacheDtype, Serving
from turboquant.planner.shape import DTYPE_BYTES, FULL, RECURRENT, SLIDING, Shape
from turboquant.window import CacheLayout, window_blocks

WINDOW = "window"


@dataclass(frozen=True)
class Group:
    """Layers of one kind.

    Attributes:
        kind: full, sliding, recurrent or window.
        layers: how many there are.
        block_size: tokens in a page; 0 for recurrent layers, whose page is a state.
        page_bytes: what is used of a page.
        held_tokens: what sliding and window layers hold.
        states: pages of a recurrent layer and sequence.
        count: groups that vLLM makes of the layers.
    """

    kind: str
    layers: int
    block_size: int
    page_bytes: int
    held_tokens: int = 0
    states: int = 0
    count: int = 1

    def pages(self, num_tokens: int) -> int:
        """Pages of a sequence of this length in one of the groups, while it decodes."""
        if self.kind == RECURRENT:
            return self.states
        if self.kind == WINDOW:
            return window_blocks(num_tokens, self.held_tokens, self.block_size)
        every = -(-num_tokens // self.block_size)
        if self.kind == SLIDING:
            return min(every, -(-(self.held_tokens - 1) // self.block_size) + 1)
        return every

    def counted_pages(self, serving: Serving) -> int:
        """Pages that vLLM counts for one sequence of max_model_len tokens, when it reports how many fit."""
        if self.kind != SLIDING:
            return self.pages(serving.max_model_len)
        in_flight = serving.batches_in_flight * serving.max_num_batched_tokens
        held = min(self.held_tokens - 1 + in_flight, serving.max_model_len)
        return -(-held // self.block_size) + 1

    def peak_pages(self, serving: Serving) -> int:
        """Pages that a sequence of max_model_len may take while its prompt is computed in chunks."""
        if self.kind != WINDOW:
            return self.counted_pages(serving)
        tails = 1 + serving.batches_in_flight
        return window_blocks(serving.max_model_len, self.held_tokens, self.block_size, tails)


@dataclass(frozen=True)
class Paging:
    """The pool's blocks.

    Attributes:
        block_size: vLLM's: tokens in a page of full attention.
        page_bytes: of every page of every layer.
        layers_per_group: layers that a block has a page in.
        groups: by kind.
    """

    block_size: int
    page_bytes: int
    layers_per_group: int
    groups: tuple[Group, ...]
    serving: Serving

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.layers_per_group

    def blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence of this length while it decodes."""
        return sum(group.count * group.pages(num_tokens) for group in self.groups)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Memory of a sequence, all included: padding, part-filled pages, states, windows."""
        return self.blocks(num_tokens) * self.block_bytes

    @property
    def counted_blocks(self) -> int:
        return sum(group.count * group.counted_pages(self.serving) for group in self.groups)

    @property
    def peak_blocks(self) -> int:
        return sum(group.count * group.peak_pages(self.serving) for group in self.groups)

    def reported_tokens(self, pool_bytes: int) -> int:
        """What vLLM logs as "KV cache size" and publishes as kv_cache_size_tokens for such a pool."""
        return int(self.concurrency(pool_bytes) * self.serving.max_model_len)

    def concurrency(self, pool_bytes: int) -> float:
        """What vLLM logs as "Maximum concurrency"."""
        return pool_bytes // self.block_bytes / self.counted_blocks

    def starts(self, pool_bytes: int) -> bool:
        """Does one sequence of max_model_len fit? vLLM refuses to start otherwise. One block is never given out."""
        return self.peak_blocks <= pool_bytes // self.block_bytes - 1

    def sequences(self, pool_bytes: int, num_tokens: int) -> int:
        """Sequences of this length that decode at the same time."""
        return max(0, pool_bytes // self.block_bytes - 1) // self.blocks(num_tokens)


def make_paging(shape: Shape, cache: CacheDtype, serving: Serving) -> Paging:
    """The blocks of this model's cache.

    Raises:
        PlanError: a block too small for an exact window.
    """
    token_bytes = shape.local_kv_heads(serving.tp) * cache.slot_bytes(shape.head_dim)
    block_size, smallest = _block_size(cache, serving)
    groups = []
    if shape.recurrent:
        state = sum(state_bytes(shape, serving))
        unit = max(smallest, block_size)
        block_size = max(block_size, unit * -(-state // (unit * token_bytes)))
        groups.append(Group(RECURRENT, shape.count(RECURRENT), 0, state, states=2 if serving.prefix_caching else 1))
    if full := shape.count(FULL):
        groups.append(Group(FULL, full, block_size, block_size * token_bytes))
    if sliding := shape.count(SLIDING):
        size = max(smallest, block_size // smallest * smallest)
        groups.append(Group(SLIDING, sliding, size, size * token_bytes, shape.sliding_window))
    if cache.fmt and serving.window:
        groups.append(_window_group(shape, cache, serving, block_size))
    return _unified(groups, block_size, serving)


def state_bytes(shape: Shape, serving: Serving) -> tuple[int, int]:
    """Convolution and recurrent state of one layer and sequence, on each device."""
    return shape.recurrent.state_bytes(serving.tp, DTYPE_BYTES[serving.dtype], DTYPE_BYTES[ssm_dtype(shape, serving)])


def ssm_dtype(shape: Shape, serving: Serving) -> str:
    """As vLLM takes it: what the user says, else what Qwen3.5's config says, else the model's dtype."""
    stated = shape.text.get("mamba_ssm_dtype") if shape.model_type.startswith("qwen3_5") else None
    return serving.mamba_ssm_dtype or stated or serving.dtype


def _block_size(cache: CacheDtype, serving: Serving) -> tuple[int, int]:
    """Tokens in a block before pages are unified, and the unit that kernels want."""
    default, smallest = BLOCK_SIZES[serving.device]
    if cache.fmt:
        smallest = OUR_KERNEL_BLOCK
        if serving.device == "cuda" and serving.window:
            default = OUR_BLOCK_ON_CUDA
    return serving.block_size or default, smallest


def _window_group(shape: Shape, cache: CacheDtype, serving: Serving, block_size: int) -> Group:
    layout = CacheLayout(cache.fmt, shape.head_dim, block_size, serving.window, cache.element_bytes)
    try:
        size = layout.window_block_size()
    except ValueError as error:
        raise PlanError(str(error)) from error
    page = size * shape.local_kv_heads(serving.tp) * layout.exact_token_bytes
    return Group(WINDOW, shape.kv_layers, size, page, serving.window)


def _unified(groups: list[Group], block_size: int, serving: Serving) -> Paging:
    """Pages of one size: a smaller one that divides it gets a larger block, any other is padded."""
    page = max(group.page_bytes for group in groups)
    fewest, most = min(group.layers for group in groups), max(group.layers for group in groups)
    per_group = most if most < 1.5 * fewest else fewest
    unified = []
    for group in groups:
        larger = 1 if group.kind == RECURRENT or page % group.page_bytes else page // group.page_bytes
        unified.append(replace(group, block_size=group.block_size * larger, count=-(-group.layers // per_group)))
    return Paging(block_size, page, per_group, tuple(unified), serving)
