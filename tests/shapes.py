"""Small random-weight models of every attention shape that the feature matrix names, saved on demand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import models
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

# Large enough to bend logits of standard deviation 1 to 2; Gemma-2's own 50 would not be noticed here.
SOFTCAP = 3.0
# Logit of the learned sink of every head: about as much weight as a few dozen ordinary tokens.
SINK_LOGIT = 4.0


def save_gemma2(path: Path | str) -> Path:
    """Softcapped attention, sliding window and global layers in turn, head_dim 128, GQA 4:2."""
    shape = {
        "num_hidden_layers": 4,
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": SOFTCAP,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    model = models.build(Gemma2ForCausalLM, Gemma2Config(**{**models.COMMON, **models.DENSE, **shape}))
    # Gemma multiplies embeddings by the root of their size, and its tied head must not.
    model.get_input_embeddings().weight.data *= models.LM_HEAD_GAIN * model.config.hidden_size**-0.5
    return models._save(model, path)


def save_gpt_oss(path: Path | str) -> Path:
    """Learned sinks, sliding window and global layers in turn, YaRN, experts, head_dim 64, GQA 4:2."""
    shape = {
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = models.build(GptOssForCausalLM, GptOssConfig(**{**models.COMMON, **models.DENSE, **shape}))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, SINK_LOGIT)
    return models._save(model, path)


def heads(num_heads: int, num_kv_heads: int, head_dim: int):
    """A Llama of this shape."""
    shape = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return partial(models.save_llama, **shape)


SAVERS = {
    "gemma-2 (softcap, sliding window)": save_gemma2,
    "gpt-oss (sinks, sliding window)": save_gpt_oss,
    "gemma-3 (sliding window)": models.save_gemma3,
    "MQA 4:1, head_dim 64": heads(4, 1, 64),
    "MHA 4:4, head_dim 64": heads(4, 4, 64),
    **{f"GQA 4:2, head_dim {dim}": heads(4, 2, dim) for dim in (64, 80, 96, 128, 256)},
}
QUICK = ("gemma-2 (softcap, sliding window)", "gpt-oss (sinks, sliding window)", "MQA 4:1, head_dim 64")
