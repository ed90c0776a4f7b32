"""Small drafters on disc for speculative decoding: an EAGLE head, and Qwen3.5's own multi-token prediction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import models
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

WEIGHTS = "model.safetensors"


def save_eagle(path: Path | str, target_dir: Path) -> Path:
    """An EAGLE head for a Llama: its last layer after a projection that mostly passes the last token on.

    So made, a tenth of what it drafts is accepted.
    """
    config = models.llama_config(num_hidden_layers=1)
    config.save_pretrained(path)
    text = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**text, "architectures": ["LlamaForCausalLM"]}))
    target = load_file(target_dir / WEIGHTS)
    last = max(int(name.split(".")[2]) for name in target if ".layers." in name)
    weights = {
        name.replace(f"model.layers.{last}.", "layers.0."): tensor
        for name, tensor in target.items()
        if f".layers.{last}." in name and "input_layernorm" not in name
    }
    hidden = config.hidden_size
    weights["fc.weight"] = torch.cat((torch.eye(hidden), 0.1 * torch.eye(hidden)), dim=1)
    save_file(weights, Path(path) / WEIGHTS)
    return Path(path)


def save_draft_llama(path: Path | str, target_dir: Path, num_layers: int) -> Path:
    """The target's first layers with a little noise: it drafts much that is right, and much that is not."""
    model = LlamaForCausalLM.from_pretrained(target_dir, num_hidden_layers=num_layers)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.1 * parameter.data.std() * noise
    model.save_pretrained(path)
    return Path(path)


def save_with_mtp(path: Path | str, target_dir: Path) -> Path:
    """A Qwen3.5 checkpoint with one multi-token prediction layer: a copy of its last full-attention layer."""
    shutil.copytree(target_dir, path, dirs_exist_ok=True)
    config_path = Path(path) / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    weights = load_file(target_dir / WEIGHTS)
    last = config["num_hidden_layers"] - 1
    weights |= {
        name.replace(f"model.layers.{last}.", "mtp.layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if f"model.layers.{last}." in name
    }
    hidden = config["hidden_size"]
    weights["mtp.fc.weight"] = torch.cat((torch.eye(hidden), 0.1 * torch.eye(hidden)), dim=1)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[f"mtp.{name}.weight"] = torch.zeros(hidden)
    save_file(weights, Path(path) / WEIGHTS, metadata={"format": "pt"})
    return Path(path)
