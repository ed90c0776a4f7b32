"""What is refused at start-up, with a message that says what to do; and what vLLM itself cannot do on a CPU."""

from __future__ import annotations

import json

import models
import pytest

pytest.importorskip("vllm")

from engine import engine
from transformers import DeepseekV2Config, Gemma3nTextConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

pytestmark = pytest.mark.engine

FMT = "turboquant3.5"
NO_WEIGHTS = {"skip_tokenizer_init": True, "load_format": "dummy"}


def config_only(folder, config, architecture: str):
    """A model's folder without weights, which must not be reached."""
    config.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "architectures": [architecture]}))
    return folder


def refused(model_dir, message: str, error: type[Exception] = NotImplementedError, **settings) -> None:
    with pytest.raises(error, match=message), engine(model_dir, FMT, **{**NO_WEIGHTS, **settings}):
        pass


@pytest.mark.matrix(feature="MLA", shape="deepseek-v2", verdict="refused")
def test_mla(tmp_path):
    shape = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    sizes = {**models.COMMON, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 2}
    config = DeepseekV2Config(**sizes, **shape, **experts, intermediate_size=64)
    folder = config_only(tmp_path, config, "DeepseekV2ForCausalLM")
    refused(folder, r"layers\.0.*does not support MLA .*kv_cache_dtype='auto'")


@pytest.mark.matrix(feature="KV sharing between layers", shape="gemma-3n", verdict="refused")
def test_kv_sharing(tmp_path):
    sizes = {**models.COMMON, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 64}
    config = Gemma3nTextConfig(
        **sizes, num_key_value_heads=1, intermediate_size=64, hidden_size_per_layer_input=16, laurel_rank=8,
        vocab_size_per_layer_input=512, num_kv_shared_layers=2, layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    folder = config_only(tmp_path, config, "Gemma3nForCausalLM")
    refused(folder, r"layers\.2\..*does not support KV sharing between layers.*--kv-cache-dtype-skip-layers")


@pytest.mark.matrix(feature="head_dim that is no multiple of 8", shape="llama, head_dim 36", verdict="refused")
def test_odd_head_dim(tmp_path):
    folder = config_only(tmp_path, models.llama_config(head_dim=36), "LlamaForCausalLM")
    refused(folder, r"head_dim 36 cannot be stored: allowed are multiples of 8", ValueError)


@pytest.mark.matrix(feature="ALiBi", shape="bloom", verdict="refused")
def test_alibi(tmp_path):
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=512, hidden_size=128, n_layer=2, n_head=2)
    refused(config_only(tmp_path, config, "BloomForCausalLM"), r"does not support ALiBi")


@pytest.mark.matrix(feature="an unknown name of a format", shape="turboquant3.6", verdict="refused")
def test_unknown_name(llama_dir):
    with pytest.raises(ValueError, match=r"turboquant3\.5"), engine(llama_dir, "turboquant3.6", **NO_WEIGHTS):
        pass


@pytest.mark.matrix(feature="a window for which blocks are too small", shape="llama, block size 16", verdict="refused")
def test_small_blocks(llama_dir):
    message = r"block size 16 is too small for an exact window.*--block-size.*TURBOQUANT_WINDOW=0"
    refused(llama_dir, message, ValueError, block_size=16)


@pytest.mark.parametrize("dtype", ["auto", FMT])
@pytest.mark.matrix(feature="sleep and wake", shape="on a CPU, cache {dtype}", verdict="vllm")
def test_sleep_mode(llama_dir, dtype, record_property):
    with (
        pytest.raises(ValueError, match=r"(?i)sleep mode") as error,
        engine(llama_dir, dtype, enable_sleep_mode=True, **NO_WEIGHTS),
    ):
        pass
    record_property("evidence", evidence(error))


@pytest.mark.parametrize("dtype", ["auto", FMT])
@pytest.mark.matrix(feature="OffloadingConnector", shape="on a CPU, cache {dtype}", verdict="vllm")
def test_offloading(llama_dir, dtype, record_property):
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24, "num_cpu_blocks": 64},
    }
    try:
        with (
            pytest.raises(Exception, match="CPU Offloading is currently only supported on") as error,
            engine(llama_dir, dtype, kv_transfer_config=transfer, **NO_WEIGHTS),
        ):
            pass
    finally:
        ensure_kv_transfer_shutdown()
    record_property("evidence", evidence(error))


def evidence(error: pytest.ExceptionInfo) -> str:
    """What was raised, in a line, and where."""
    place = error.traceback[-1]
    said = " ".join(str(error.value).split())[:240]
    return f"{error.typename}: {said} ({place.path.name}:{place.lineno + 1})"
