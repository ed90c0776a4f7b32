"""Which window blocks a sequence holds: its first, and those of its newest tokens; for the rest the null block stands.

- A long prefill chunk gets blocks for its tail only: no later query reads the others exactly.
- Only block 0 enters the prefix cache, so exact pages do not push packed ones out of it.
- After a prefix hit the table has block 0, if it was still cached, and null blocks. On models without recurrent state
  the scheduler computes the hit's last W tokens again (`prefix_replay_tokens`), which fills the window; on hybrids the
  kernels read packed copies until W new tokens have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from turboquant.window import window_blocks


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Pages of exact K and V.

    Attributes:
        replay_tokens: tokens at the end of a prefix hit that are computed again; 0 for none.
        margin_tokens: how many more than W keep their blocks: rejected drafts move the end of a sequence back.
        max_batches: steps of the engine that can be in flight at a time.
    """

    replay_tokens: int = 0
    margin_tokens: int = 0
    max_batches: int = 1

    @property
    def held_tokens(self) -> int:
        return self.sliding_window + self.margin_tokens

    @property
    def prefix_replay_tokens(self) -> int:
        return self.replay_tokens

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """While a prompt is computed in chunks, the tails of the steps in flight and of the one before are held."""
        return window_blocks(max_model_len, self.held_tokens, self.block_size, tails=1 + self.max_batches)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What one sequence of full length takes: at its peak while the pool is being sized, so that it always fits;
        once the pool stands, what it holds while it decodes, which is what counts for how many fit.
        """
        max_model_len = vllm_config.model_config.max_model_len
        tails = 1 if vllm_config.cache_config.num_gpu_blocks is not None else 1 + self.max_batches
        return window_blocks(max_model_len, self.held_tokens, self.block_size, tails) * self.page_size_bytes


class WindowManager(SlidingWindowManager):
    """vLLM's sliding-window manager with the rules above."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        # A running request has blocks; whether any is in the prefix cache yet does not matter here.
        held = len(self.req_to_blocks.get(request_id, ())) or self._first_block_after_hit(total_computed_tokens)
        needed = sum(self._is_held(block, num_tokens) for block in range(held, cdiv(num_tokens, self.block_size)))
        if apply_admission_cap and self.max_admission_blocks_per_request is not None:
            needed = min(needed, self.max_admission_blocks_per_request)
        return needed + self._get_num_evictable_blocks(new_computed_blocks[:1])

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        wanted = [self._is_held(b, num_tokens) for b in range(len(blocks), cdiv(num_tokens, self.block_size))]
        fresh = iter(self.block_pool.get_new_blocks(sum(wanted)))
        new = [next(fresh) if real else self._null_block for real in wanted]
        blocks.extend(new)
        return new

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        blocks = self.req_to_blocks[request_id]
        assert not blocks
        count = self._first_block_after_hit(num_local_computed_tokens + num_external_computed_tokens)
        blocks.extend([self._null_block] * count)
        if count and new_computed_blocks and not new_computed_blocks[0].is_null:
            self.block_pool.touch(new_computed_blocks[:1])
            blocks[0] = new_computed_blocks[0]
        self.num_cached_block[request_id] = count

    def allocate_external_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Tokens that a connector brings have no exact copies: null blocks stand for them already."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        blocks = self.req_to_blocks.get(request_id, [])
        skipped = (processed_computed_tokens - self.kv_cache_spec.held_tokens) // self.block_size
        gone = [b for b in range(1, min(skipped, len(blocks))) if not blocks[b].is_null]
        self.block_pool.free_blocks([blocks[b] for b in reversed(gone)])
        for block in gone:
            blocks[block] = self._null_block

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Never shortens a hit: where the window is missing, packed copies are read."""
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        hit = max_length // alignment_tokens * alignment_tokens
        computed = tuple([block_pool.null_block] * (hit // kv_cache_spec.block_size) for _ in kv_cache_group_ids)
        if hit and (cached := block_pool.get_cached_block(hashes[0], kv_cache_group_ids)):
            for blocks, first in zip(computed, cached, strict=True):
                blocks[0] = first
        return computed, hit

    @classmethod
    def reachable_block_mask(cls, start_block: int, end_block: int, *args: Any, **kwargs: Any) -> list[bool]:
        return [block == 0 for block in range(start_block, end_block)]

    def _is_held(self, block: int, num_tokens: int) -> bool:
        """Does a sequence of num_tokens hold this block: the first, or one of the tail?"""
        return block == 0 or (block + 1) * self.block_size > num_tokens - self.kv_cache_spec.held_tokens

    def _first_block_after_hit(self, computed_tokens: int) -> int:
        """Blocks below this one are not, or not wholly, written after a prefix hit of so many tokens."""
        return cdiv(max(0, computed_tokens - self.kv_cache_spec.prefix_replay_tokens), self.block_size)


def register_window() -> None:
    """Tell vLLM which manager allocates window pages. Idempotent."""
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, uniform_type_base_spec=SlidingWindowSpec)
