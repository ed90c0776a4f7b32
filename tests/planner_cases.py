"""Configs for tests of the planner: one of every family that it counts, and Qwen3.5-35B-A3B."""

from __future__ import annotations

from pathlib import Path

import transformers

from turboquant.planner.source import Source, load

QWEN35 = Path(__file__).parent / "data" / "qwen3.5-35b-a3b.json"
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 200,
}  # fmt: skip
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
# Family: its config class, and what makes it what it is.
FAMILIES = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "llama, biased and tied": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", MOE),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "shared_expert_intermediate_size": None}),
    "gemma2": ("Gemma2Config", {"head_dim": 32}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4}),
    "qwen3_next": ("Qwen3NextConfig", {**GDN, **MOE}),
    "qwen3_5": ("Qwen3_5TextConfig", GDN),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**GDN, **MOE}),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [2]}),
    "granite hybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "layer_types": ["mamba"] * 3 + ["attention"], "num_local_experts": 4, "shared_intermediate_size": 48},
    ),
}


def saved(tmp_path: Path, name: str) -> Source:
    kind, settings = FAMILIES[name]
    getattr(transformers, kind)(**{**SMALL, **settings}).save_pretrained(tmp_path)
    return load(str(tmp_path))
