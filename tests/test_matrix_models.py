"""Hybrids under pressure, 16-bit models, adapters."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("vllm")

from engine import ALL_PACKED, assert_same_answers, engine, greedy, greedy_with_gaps, random_prompts
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest
from window_oracle import Oracle, assert_nothing_leaked

from turboquant.vllm.summary import layer_specs

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]

FMT = "turboquant3.5"
LENGTHS = (1, 6, 41, 130, 201)
RANK = 4


@pytest.mark.engine_full
@pytest.mark.matrix(feature="chunked prefill, prefix caching, preemption", shape="qwen3.5 MoE hybrid")
def test_a_hybrid_under_pressure(qwen35_moe_dir, monkeypatch, record_property):
    """In bfloat16, whose roundings differ between batches: first tokens' log-probabilities are compared."""
    oracle, settings = Oracle(monkeypatch), {"dtype": "bfloat16", "skip_tokenizer_init": True}
    prompts = [*random_prompts(301, 400, 410, 350), random_prompts(301)[0][:280]]
    with engine(qwen35_moe_dir, FMT, max_num_seqs=1, **settings) as llm:
        alone = greedy(llm, prompts, 8)
        record_property("pages", pages(llm))
    with engine(
        qwen35_moe_dir, FMT, enable_prefix_caching=True, max_num_batched_tokens=576, max_num_seqs=5,
        num_gpu_blocks_override=36, **settings,
    ) as llm:  # fmt: skip
        oracle.watch_blocks(llm)
        busy, again = greedy(llm, prompts, 8), greedy(llm, prompts, 8)
        assert_nothing_leaked(llm)
    assert (oracle.bad, oracle.freed) == (0, 0)
    assert oracle.preemptions > 0
    record_property("preemptions", oracle.preemptions)
    for reference, *others in zip(alone, busy, again, strict=True):
        assert [other[1][0] for other in others] == pytest.approx([reference[1][0]] * 2, abs=0.2)


def pages(llm) -> str:
    """What the pages of each kind of layer hold."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    kinds = {}
    for name, spec in layer_specs(config).items():
        content = getattr(spec, "real_page_size_bytes", None) or sum(
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        kind = type(spec).__name__ + (" (window)" if name.endswith(".window") else "")
        kinds[kind] = f"{kind}: blocks of {spec.block_size} tokens, {content:,} of {spec.page_size_bytes:,} bytes used"
    return "; ".join(kinds.values())


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.engine_full)])
@pytest.mark.matrix(feature="model in {dtype}", shape="llama")
def test_models_of_16_bits(llama_dir, dtype):
    prompts = random_prompts(*LENGTHS)
    with engine(llama_dir, "auto", dtype=dtype, skip_tokenizer_init=True) as llm:
        exact = greedy(llm, prompts, 8)
    with engine(llama_dir, FMT, dtype=dtype, skip_tokenizer_init=True) as llm:
        ours = greedy(llm, prompts, 8)
    # A whole prompt reads its own tokens exactly by default, and up to W more tokens stay exact in the window.
    short = sum(len(prompt) + 8 <= 64 for prompt in prompts)
    firsts = [[logprobs[0] for _, logprobs in answers] for answers in (ours, exact)]
    assert firsts[0] == pytest.approx(firsts[1], abs=0.05)
    assert sum(a[0] == b[0] for a, b in zip(ours[:short], exact[:short], strict=True)) >= short - 1


def save_adapter(folder, model_dir) -> dict[str, torch.Tensor]:
    """A random LoRA adapter of q, k, v and o, and what it adds to the weights."""
    generator, weights, added = torch.Generator().manual_seed(3), {}, {}
    for name, weight in load_file(model_dir / "model.safetensors").items():
        if "self_attn" in name and name.endswith("_proj.weight"):
            down = torch.randn(RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
            key = "base_model.model." + name.removesuffix(".weight")
            weights[f"{key}.lora_A.weight"], weights[f"{key}.lora_B.weight"] = down, up
            added[name] = up @ down
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "task_type": "CAUSAL_LM"}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
    return added


@pytest.mark.engine_full
@pytest.mark.matrix(feature="LoRA", shape="llama")
def test_an_adapter_equals_its_merged_weights(llama_dir, tmp_path):
    import shutil

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    shutil.copytree(llama_dir, merged)
    added = save_adapter(adapter, llama_dir)
    weights = load_file(llama_dir / "model.safetensors")
    save_file(
        {name: weight + added.get(name, 0) for name, weight in weights.items()}, merged / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    prompts, settings = random_prompts(*LENGTHS), {"skip_tokenizer_init": True, "additional_config": ALL_PACKED}
    with engine(merged, FMT, **settings) as llm:
        expected = greedy_with_gaps(llm, prompts, 8)
    with engine(llama_dir, FMT, enable_lora=True, max_lora_rank=8, **settings) as llm:
        plain = greedy(llm, prompts, 8)
        generate = llm.generate
        llm.generate = lambda *args, **kwargs: generate(*args, lora_request=LoRARequest("a", 1, str(adapter)), **kwargs)
        adapted = greedy(llm, prompts, 8)
    assert_same_answers(adapted, expected, tolerance=0.02)
    assert [tokens for tokens, _ in plain] != [tokens for tokens, _ in adapted]
