"""What the planner reads from a config: layers, parameters, quantisation; and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from planner_cases import FAMILIES, GDN, QWEN35, SMALL, saved
from typer.testing import CliRunner

from turboquant.cli.main import app
from turboquant.planner import PlanError, source
from turboquant.planner.memory import GIB
from turboquant.planner.plan import Wish, make_plan
from turboquant.planner.serving import Serving
from turboquant.planner.shape import FULL, RECURRENT, SLIDING, read_shape
from turboquant.planner.source import load
from turboquant.planner.weights import count_weights


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_transformers(name, tmp_path):
    of_file = saved(tmp_path, name)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = count_weights(of_file, read_shape(of_file), "bfloat16")
    assert weights.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert weights.total_bytes == 2 * weights.total_parameters
    assert weights.source == "counted from the config"


LAYERS = {
    "mistral": (0, 4, 0),
    "gemma2": (2, 2, 0),
    "gemma3": (0, 4, 0),
    "gpt_oss": (2, 2, 0),
    "qwen3_next": (1, 0, 3),
    "qwen3_5_moe": (1, 0, 3),
    "bamba": (1, 0, 3),
    "granite hybrid": (1, 0, 3),
    "qwen2": (4, 0, 0),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("with_transformers", [True, False])
def test_which_layers_hold_what(name, with_transformers, tmp_path, monkeypatch):
    """By the class's own list, and by the rules of the file alone where Transformers does not know the model."""
    if not with_transformers:
        monkeypatch.setattr(source, "_class_values", lambda path, config: {})
    shape = read_shape(saved(tmp_path, name))
    assert (shape.count(FULL), shape.count(SLIDING), shape.count(RECURRENT)) == LAYERS[name]


def test_rules_in_place_of_a_list(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_class_values", lambda path, config: {})
    base = {**SMALL, "num_hidden_layers": 12, "model_type": "unheard_of"}
    for rule, expected in (
        ({"full_attention_interval": 4, **GDN}, (3, 0, 9)),
        ({"sliding_window": 64, "sliding_window_pattern": 6}, (2, 10, 0)),
        ({"sliding_window": 64, "use_sliding_window": False}, (12, 0, 0)),
        ({"sliding_window": 64, "max_window_layers": 8}, (8, 4, 0)),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**base, **rule}))
        shape = read_shape(load(str(tmp_path)))
        assert tuple(shape.count(kind) for kind in (FULL, SLIDING, RECURRENT)) == expected


QUANTISED = {
    "fp8": ({"quant_method": "fp8"}, 8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    "mxfp4": ({"quant_method": "mxfp4"}, 4.25),
    "compressed": (
        {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 32}}}},
        4 + 20 / 32,
    ),
}


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_checkpoints(method, tmp_path):
    settings, bits = QUANTISED[method]
    config = json.loads(QWEN35.read_text())
    config["quantization_config"] = {**settings, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_file = load(str(tmp_path))
    weights = count_weights(of_file, read_shape(of_file), "bfloat16")
    assert weights.bits == bits
    assert weights.bytes_by_part["experts"] == int(weights.parameters["experts"] * bits / 8)
    # Kept out by name, and what is never quantised.
    for part in ("attention", "embeddings", "head", "router"):
        assert weights.bytes_by_part[part] == 2 * weights.parameters[part]


def test_an_unknown_quantisation_is_named(tmp_path):
    config = {**json.loads(QWEN35.read_text()), "quantization_config": {"quant_method": "magic"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_file = load(str(tmp_path))
    with pytest.raises(PlanError, match=r"'magic' is not known.*--weights"):
        count_weights(of_file, read_shape(of_file), "bfloat16")


def test_a_checkpoint_s_index_beats_the_count(tmp_path):
    (tmp_path / "config.json").write_text(QWEN35.read_text())
    (tmp_path / source.INDEX).write_text(json.dumps({"metadata": {"total_size": 70_000_000_000}}))
    of_file = load(str(tmp_path))
    weights = count_weights(of_file, read_shape(of_file), "bfloat16")
    assert weights.total_bytes == pytest.approx(70e9, rel=1e-6)
    assert "checkpoint" in weights.source


def test_an_fp8_cache_that_the_checkpoint_brings(tmp_path):
    config = json.loads(QWEN35.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_file = load(str(tmp_path))
    result = make_plan(of_file, Serving("bfloat16", 4096), Wish(("auto",), pool=8 * GIB)).to_dict()
    assert result["formats"][0]["kv_bytes_per_token"] == 10240


UNPLANNED = {
    "MLA": ({"kv_lora_rank": 512}, "MLA"),
    "shared caches": ({"num_kv_shared_layers": 8}, "share another layer"),
    "unknown layers": ({"layer_types": ["full_attention"] * 3 + ["conv"]}, "conv"),
    "no heads": ({"num_attention_heads": None}, "num_attention_heads is None"),
    "no attention": ({"layer_types": ["linear_attention"] * 4, **GDN}, "holds no KV cache"),
}


@pytest.mark.parametrize("case", UNPLANNED)
def test_models_that_are_not_planned(case, tmp_path):
    settings, message = UNPLANNED[case]
    config = {**SMALL, "model_type": "unheard_of", "head_dim": 64, **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=message):
        make_plan(load(str(tmp_path)), Serving("bfloat16", 1024), Wish(("auto",), pool=GIB))


def test_models_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(PlanError, match="does not exist"):
        load(str(tmp_path / "none.json"))
    with pytest.raises(PlanError, match=r"no config\.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="no model_type"):
        load(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PlanError, match="Offline, give a model's folder"):
        load("nobody/nothing-of-the-kind")


def test_a_length_that_the_config_does_not_say(tmp_path):
    """Defaults of classes are not taken: they are shorter than their published models."""
    config = json.loads(QWEN35.read_text())
    del config["text_config"]["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpu", "B300"])
    assert result.exit_code == 2 and "give --max-model-len" in " ".join(result.output.split())
    config["text_config"] |= {
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(load(str(tmp_path))).max_model_len == 4 * 262144
