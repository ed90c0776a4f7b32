"""What one step's attention needs to know, built once a step from vLLM's common metadata."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from turboquant.kernels.interface import graph_safe


@dataclass
class TurboQuantMetadata:
    """One step.

    Attributes:
        num_actual_tokens: tokens without padding.
        query_start_loc: [num_seqs + 1] int32.
        seq_lens: [num_seqs] int32, this step's tokens included.
        block_table: [num_seqs, max_blocks] int32.
        slot_mapping: [num_tokens] int64.
        positions: [num_actual_tokens] int64, index of each token in its sequence. Not the model's rotary positions,
            which multimodal inputs bend: what counts is that a token is read at the position it was stored at.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor


def token_positions(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Index of every token of the step in its own sequence: int64 [num_tokens]."""
    starts = query_start_loc[:-1].long()
    query_lens = query_start_loc[1:].long() - starts
    first = seq_lens.long() - query_lens - starts
    offsets = torch.repeat_interleave(first, query_lens, output_size=num_tokens)
    return offsets + torch.arange(num_tokens, device=offsets.device)


class PagesBackend(AttentionBackend):
    """What all our pages have in common, packed and exact ones."""

    @staticmethod
    def get_builder_cls() -> type[TurboQuantMetadataBuilder]:
        return TurboQuantMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A page is one run of bytes of one KV head.
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class TurboQuantMetadataBuilder(AttentionMetadataBuilder[TurboQuantMetadata]):
    """vLLM calls `build` once a step for each KV cache group."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # A captured graph reads this memory again at every replay.
        size = vllm_config.scheduler_config.max_num_batched_tokens
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Decode and verify steps with kernels that read nothing on the host; never with the others."""
        safe = graph_safe(torch.device(vllm_config.device_config.device))
        return AttentionCGSupport.UNIFORM_BATCH if safe else AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TurboQuantMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("a turboquant KV cache serves causal attention only: use kv_cache_dtype='auto'.")
        num_tokens = int(common.query_start_loc_cpu[-1])
        positions = self.positions[:num_tokens]
        positions.copy_(token_positions(common.query_start_loc, common.seq_lens, num_tokens))
        return TurboQuantMetadata(
            num_actual_tokens=num_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            positions=positions,
        )
