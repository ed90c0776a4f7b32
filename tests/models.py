"""Tiny random-weight models on disc, for tests of the cache and of the engine.

Random weights of the usual 0.02 make attention almost uniform: a broken cache would change nothing. Here logits of
attention have a standard deviation of 1 to 2, each branch adds as much as the residual stream holds, and the model's
own logits have a standard deviation of about 2: what attention reads decides what the model says.

Nothing here needs a tokenizer: feed token ids below `VOCAB`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)

VOCAB = 512
BOS = 0
# What every model here shares.
COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": 1,
}
# GQA 4:2 with head_dim 64.
DENSE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Standard deviation of the output of a projection, for inputs of standard deviation 1.
QUERY_KEY_GAIN, LM_HEAD_GAIN = 1.0, 1.5
# Norm of the K bias against the norm of what the projection itself puts into a key.
BIAS_RATIO, FAST_PAIRS_RATIO = 24.0, 16.0
BOS_CHANNEL = 12.0


def build(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model: matrices drawn anew with std gain / sqrt(fan_in), biases zero, norms as the class has them."""
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "conv1d" in name:
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
            continue
        gain = next((g for part, g in _gains().items() if part in name), 1.0)
        fan_in = 1 if "embed" in name else parameter.shape[-1]
        torch.nn.init.normal_(parameter, std=gain * fan_in**-0.5, generator=generator)
    return model


def with_key_bias(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """Give every k_proj a bias as Qwen2's have it: far larger than the rest of K, and absent from the first token.

    Most of it lies in the slow pairs of the rotary embedding, which add nearly the same logit at every position; the
    fast pairs hold enough of it that a mean rotated in another layout, or to another position, is no mean. Real models
    of this kind cancel the bias in the key of their first token, an attention sink: here token `BOS` alone lives in
    hidden channel 0, and k_proj reads the negative bias from it. A prompt that resembles theirs begins with `BOS`.
    """
    generator = torch.Generator().manual_seed(seed)
    projections = [module for name, module in model.named_modules() if name.endswith("k_proj")]
    for projection in projections:
        projection.bias.data.copy_(_key_bias(projection.out_features, model.config.head_dim, generator))
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj", "dense", "fc2")):
            module.weight.data[0] = 0
    embedding = model.get_input_embeddings().weight.data
    embedding[:, 0] = 0
    embedding[BOS, 0] = BOS_CHANNEL
    for projection, channel in zip(projections, _channel_at(model, projections), strict=True):
        projection.weight.data[:, 0] = -projection.bias.data / channel
    return model


def _key_bias(size: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """[size], a bias for heads whose pairs are elements i and i + head_dim / 2, slow pairs last."""
    bias = torch.randn(size // head_dim, 2, head_dim // 2, generator=generator)
    slow = torch.arange(head_dim // 2) >= 3 * head_dim // 8
    for part, ratio in ((slow, BIAS_RATIO), (~slow, FAST_PAIRS_RATIO)):
        rest_of_key = QUERY_KEY_GAIN * head_dim**0.5
        bias[..., part] *= ratio * rest_of_key / bias[..., part].norm(dim=(1, 2), keepdim=True)
    return bias.flatten()


@torch.no_grad()
def _channel_at(model: PreTrainedModel, projections: list[torch.nn.Module]) -> list[float]:
    """Hidden channel 0 of a leading BOS at the input of every projection."""
    seen = []
    hooks = [p.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, 0, 0].item())) for p in projections]
    model(torch.tensor([[BOS]]))
    for hook in hooks:
        hook.remove()
    return seen


def llama_config(**changes) -> LlamaConfig:
    """GQA 4:2, head_dim 64."""
    return LlamaConfig(**{**COMMON, **DENSE, **changes})


def qwen2_config(**changes) -> Qwen2Config:
    """GQA 4:2, head_dim 64, biases on q, k and v. vLLM takes Qwen2's head_dim from its hidden size."""
    return Qwen2Config(**{**COMMON, **DENSE, "hidden_size": 256, **changes})


def qwen35_moe_config(**changes) -> Qwen3_5MoeTextConfig:
    """Three linear-attention layers to one full-attention layer, twice; head_dim 256, GQA 16:2, a few small experts."""
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
    }
    return Qwen3_5MoeTextConfig(**{**COMMON, **shape, **changes})


def save_llama(path: Path | str, **changes) -> Path:
    return _save(build(LlamaForCausalLM, llama_config(**changes)), path)


def save_worded_llama(path: Path | str, demo_model_dir: Path) -> Path:
    """A small random Llama with the demo model's tokenizer, so that it reads text."""
    folder = save_llama(path, vocab_size=49152)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (demo_model_dir / name).is_file():
            shutil.copy(demo_model_dir / name, folder)
    return folder


def save_qwen2_with_key_bias(path: Path | str, **changes) -> Path:
    return _save(with_key_bias(build(Qwen2ForCausalLM, qwen2_config(**changes))), path)


def save_qwen35_moe(path: Path | str, **changes) -> Path:
    return _save(build(Qwen3_5MoeForCausalLM, qwen35_moe_config(**changes)), path)


def save_gemma3(path: Path | str, **changes) -> Path:
    """Two sliding-window layers to one global one, head_dim 256, one KV head, norms on queries and keys."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    }
    return _save(build(Gemma3ForCausalLM, Gemma3TextConfig(**{**COMMON, **shape, **changes})), path)


def _gains() -> dict[str, float]:
    return {"q_proj": QUERY_KEY_GAIN, "k_proj": QUERY_KEY_GAIN, "lm_head": LM_HEAD_GAIN}


def _save(model: PreTrainedModel, path: Path | str) -> Path:
    model.save_pretrained(path)
    return Path(path)
