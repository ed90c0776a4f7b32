"""What the window's manager says that a step will take is what the step takes.

If it says more, the scheduler preempts requests in a pool that has room; if less, allocation fails inside the engine.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from turboquant.vllm.window_manager import WindowManager, WindowSpec

BLOCKS, BLOCK_SIZE, WINDOW = 64, 8, 32


def manager_of(replay: int, caching: bool) -> WindowManager:
    spec = WindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=WINDOW,
        replay_tokens=replay,
    )  # fmt: skip
    pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=caching, hash_block_size=BLOCK_SIZE)
    return WindowManager(
        spec, block_pool=pool, enable_caching=caching, kv_cache_group_id=0, scheduler_block_size=BLOCK_SIZE
    )


def step(manager: WindowManager, computed: int, tokens: int, hit: list) -> tuple[int, int]:
    """Blocks that a step up to `tokens` was said to take, and that it took."""
    manager.remove_skipped_blocks("r", computed)
    said = manager.get_num_blocks_to_allocate("r", tokens, hit, computed, computed if hit else 0, tokens)
    free = manager.block_pool.get_num_free_blocks()
    if hit:
        manager.add_local_computed_blocks("r", hit, computed, 0)
    manager.allocate_new_blocks("r", tokens, tokens)
    return said, free - manager.block_pool.get_num_free_blocks()


@settings(deadline=None, max_examples=300)
@given(
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    hit_blocks=st.integers(0, 12),
    replay=st.sampled_from([0, WINDOW]),
    caching=st.booleans(),
)
def test_what_is_said_is_taken(chunks, hit_blocks, replay, caching):
    manager = manager_of(replay, caching)
    computed = hit_blocks * BLOCK_SIZE
    hit = [manager._null_block] * hit_blocks
    for chunk in chunks:
        said, taken = step(manager, computed, computed + chunk, hit)
        assert said == taken
        computed, hit = computed + chunk, []
    held = [block for block in manager.req_to_blocks["r"] if not block.is_null]
    manager.free("r")
    assert manager.block_pool.get_num_free_blocks() == BLOCKS - 1  # one is the null block
    assert len(held) <= manager.kv_cache_spec.max_admission_blocks_per_request(max(chunks), 1 << 20)


def test_a_decoding_request_without_prefix_caching_takes_a_block_every_block_size_tokens():
    manager = manager_of(WINDOW, caching=False)
    step(manager, 0, 100, [])
    steps = [step(manager, tokens, tokens + 1, []) for tokens in range(100, 100 + 4 * BLOCK_SIZE)]
    assert sum(said for said, _ in steps) == sum(taken for _, taken in steps) == 4
