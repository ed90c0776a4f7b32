"""K's bias is taken out as the model rotates it, or the model is refused in words."""

from __future__ import annotations

import contextlib

import models
import pytest
import torch
import transformers
from cache_cases import DENSE_TOKEN_BYTES, FMT, kl, prompt, stepwise_logits
from models import BOS, VOCAB

from turboquant.cache import turboquant_cache
from turboquant.cache_layer import TurboQuantLayer
from turboquant.formats import PRESETS
from turboquant.key_bias import MissingKeyMeanError, check_no_hidden_bias
from turboquant.kv_quantizer import make_params

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad", "window_off")

THETA = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
QUARTER = {**THETA, "partial_rotary_factor": 0.25}
# Their head_dim is hidden_size / heads.
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# id: (class name, changes of its config). All of them have a k_proj; with_key_bias gives it its bias.
BIASED = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"attention_bias": True}),
    "llama-yarn": ("Llama", {"attention_bias": True, "rope_parameters": YARN}),
    "glm-interleaved": ("Glm", {"attention_bias": True, "rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    "glm4-interleaved": ("Glm4", {"attention_bias": True, "rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    "starcoder2": ("Starcoder2", {}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING}),
    "phi-partial": ("Phi", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}, **TWO_HEADS}),
    "stablelm-partial": ("StableLm", {"use_qkv_bias": True, "rope_parameters": QUARTER, **TWO_HEADS}),
    "smollm3-without-rope": ("SmolLM3", {"attention_bias": True, "no_rope_layers": [0, 0]}),
    "cohere2-without-rope": ("Cohere2", {"attention_bias": True, "logit_scale": 1.0, **ALTERNATING}),
    "qwen2-dynamic-rope": ("Qwen2", {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}),
}  # fmt: skip


def biased_model(kind: str, changes: dict) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**{**models.COMMON, **models.DENSE, **changes})
    config.head_dim = models.DENSE["head_dim"]
    return models.with_key_bias(models.build(getattr(transformers, f"{kind}ForCausalLM"), config))


@pytest.mark.parametrize(("kind", "changes"), BIASED.values(), ids=BIASED.keys())
def test_a_key_bias_is_taken_out_or_the_model_is_refused(monkeypatch, kind, changes):
    """In every layer what is quantised is the rest of K: a tenth of that is lost, times YaRN's scaling of up to 1.4.

    A mean that is not rotated as the model rotates K stays in it, and costs a tenth of something 20 times as large.
    """
    model, ids = biased_model(kind, changes), prompt(100)
    exact = model(ids).logits
    errors = watch_key_errors(model, monkeypatch)
    try:
        with turboquant_cache(model, FMT) as session:
            logits = model(ids).logits
    except ValueError as error:
        assert "default cache" in str(error) or "key_mean" in str(error)
        return
    distance = kl(exact, logits)
    print(f"\nKL {kind}: {distance:.4f}; error of K a layer: {', '.join(f'{error:.3f}' for error in errors)}")
    assert all(params.key_mean is not None for params in session.params.values())
    assert len(errors) == len(session.params)
    assert max(errors) < 0.2
    assert distance < 0.1


def watch_key_errors(model, monkeypatch) -> list[float]:
    """Fills while a model runs: for each compressed layer, the error in K against K without its bias."""
    rest, errors, update = [], [], TurboQuantLayer.update
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            module.register_forward_hook(lambda module, _, output: rest.append(output - module.bias))

    def watched(self, key, value, *args, **kwargs):
        returned = update(self, key, value, *args, **kwargs)
        error = (returned[0] - key).transpose(1, 2).flatten(2)
        errors.append((error[:, 1:].norm() / rest[-1][:, 1:].norm()).item())
        return returned

    monkeypatch.setattr(TurboQuantLayer, "update", watched)
    return errors


def test_without_the_mean_such_a_model_collapses(qwen2, monkeypatch):
    """The mean is what keeps it: this is what is refused when no mean can be had."""
    ids = prompt(100)
    exact = qwen2(ids).logits
    with turboquant_cache(qwen2, FMT) as session:
        with_mean = kl(exact, qwen2(ids).logits)
    monkeypatch.setattr("turboquant.cache.layer_params", lambda *args, **kwargs: {
        i: make_params(PRESETS[FMT], 64) for i in session.params
    })  # fmt: skip
    with turboquant_cache(qwen2, FMT):
        without = kl(exact, qwen2(ids).logits)
    print(f"\nKL with the mean {with_mean:.4f}, without {without:.4f}")
    assert with_mean < 0.1
    assert without > 4 * with_mean


@pytest.mark.parametrize("sinks", [[], [0], [0, 20, 21, 63]], ids=str)
def test_sinks_may_stand_anywhere(qwen2, sinks):
    """A key without the bias in it, first, later or nowhere: each is quantised at its own length."""
    ids = torch.randint(2, VOCAB, (1, 64), generator=torch.Generator().manual_seed(5))
    ids[:, sinks] = BOS
    exact = qwen2(ids).logits
    with turboquant_cache(qwen2, FMT):
        distance = kl(exact, qwen2(ids).logits)
    print(f"\nKL with sinks at {sinks}: {distance:.4f}")
    assert distance < 0.1


def test_the_mean_is_the_bias(qwen2):
    with turboquant_cache(qwen2, FMT) as session:
        for index, params in session.params.items():
            bias = qwen2.model.layers[index].self_attn.k_proj.bias
            assert torch.equal(params.key_mean, bias.float().view(2, 64))
            assert not params.rope.interleaved


def test_a_model_without_a_bias_has_no_mean(llama):
    for key_mean in ("auto", "none"):
        with turboquant_cache(llama, FMT, key_mean=key_mean) as session:
            assert all(params.key_mean is None for params in session.params.values())


def test_a_bias_of_zeros_is_no_bias():
    model = models.build(transformers.Qwen2ForCausalLM, models.qwen2_config())
    with turboquant_cache(model, FMT, key_mean="none") as session:
        model(prompt(10))
    assert all(params.key_mean is None for params in session.params.values())


def test_a_bias_without_its_mean_is_refused(qwen2):
    message = r"Qwen2Attention 0 adds a bias to K, and key_mean='none' forbids.*key_mean='auto'"
    with pytest.raises(MissingKeyMeanError, match=message), turboquant_cache(qwen2, FMT, key_mean="none"):
        pass


def test_a_norm_after_the_bias_is_refused():
    model = biased_model("Qwen3", {"attention_bias": True})
    with pytest.raises(MissingKeyMeanError, match="k_norm comes after it"), turboquant_cache(model, FMT):
        pass


def test_a_norm_that_adds_a_bias_itself_is_refused():
    """Nothing in the projection, a large constant in every key all the same."""
    changes = {"qk_layernorm": True, "rope_parameters": {**THETA, "partial_rotary_factor": 0.5}, **TWO_HEADS}
    config = transformers.PhiConfig(**{**models.COMMON, **models.DENSE, **changes})
    model = models.build(transformers.PhiForCausalLM, config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_layernorm.bias, std=20.0)
    with pytest.raises(ValueError, match="k_layernorm"), turboquant_cache(model, FMT):
        pass


def fused(model: transformers.PreTrainedModel, bias: bool) -> transformers.PreTrainedModel:
    """Phi-3's fused projection, with a bias as none of the published ones has it."""
    for layer in model.model.layers:
        old = layer.self_attn.qkv_proj
        layer.self_attn.qkv_proj = torch.nn.Linear(old.in_features, old.out_features, bias=bias)
    return model


@pytest.mark.parametrize("bias", [True, False], ids=["biased", "unbiased"])
def test_a_fused_projection(bias):
    config = transformers.Phi3Config(**{**models.COMMON, **models.DENSE, "rope_parameters": THETA})
    config.head_dim = 64
    model = fused(models.build(transformers.Phi3ForCausalLM, config), bias)
    if not bias:
        with turboquant_cache(model, FMT) as session:
            model(prompt(10))
        assert session.nbytes == 10 * DENSE_TOKEN_BYTES
        return
    with pytest.raises(MissingKeyMeanError, match="its projection 'qkv_proj'"), turboquant_cache(model, FMT):
        pass


SMALL = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
# id: (class name, config). Each adds a bias to K somewhere out of reach, or positions that are no RoPE, or no K at all.
UNKNOWN = {
    "gpt-neox": ("GPTNeoX", {**SMALL, "intermediate_size": 128}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 2, "n_head": 2}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 128}),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 128, "n_layer": 2, "n_head": 2}),
    "falcon-alibi": ("Falcon", {**SMALL, "bias": True, "alibi": True}),
    "mamba": ("Mamba", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}),
    "mistral-all-sliding": ("Mistral", {**SMALL, "num_key_value_heads": 2, "sliding_window": 8}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "config"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_model_out_of_reach_is_refused_in_words(kind, config):
    suffix = {"GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}{suffix}")(getattr(transformers, f"{kind}Config")(**config)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    with pytest.raises(ValueError, match=r"default cache|key_mean|cannot place K's mean"), turboquant_cache(model, FMT):
        pass


@pytest.mark.parametrize(
    ("children", "refused"),
    [
        ({"qkv_proj": torch.nn.Linear(8, 24)}, "qkv_proj"),
        ({"c_attn": transformers.pytorch_utils.Conv1D(24, 8)}, "c_attn"),
        ({"query_key_value": torch.nn.Linear(8, 24), "dense": torch.nn.Linear(8, 8)}, "query_key_value"),
        ({"key": torch.nn.Linear(8, 8)}, "key"),
        ({"attention": torch.nn.Sequential(torch.nn.Linear(8, 24))}, "attention"),
        ({"qkv_proj": torch.nn.Linear(8, 24, bias=False), "dense": torch.nn.Linear(8, 8)}, None),
        ({"o_proj": torch.nn.Linear(8, 8), "q_proj": torch.nn.Linear(8, 8), "norm": torch.nn.LayerNorm(8)}, None),
    ],
    ids=["fused", "conv1d", "neox", "separate-key", "one-level-down", "unbiased", "output-and-norm"],
)
def test_hidden_biases(children, refused):
    module = torch.nn.ModuleDict(children)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    with pytest.raises(MissingKeyMeanError, match=refused) if refused else contextlib.nullcontext():
        check_no_hidden_bias("layer 0", module)


def test_sliding_layers_stay_as_they_are():
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING}
    model, ids = biased_model("GptOss", changes), prompt(40)
    with turboquant_cache(model, FMT) as session:
        cache = model(ids, use_cache=True).past_key_values
        whole = model(ids).logits
        torch.testing.assert_close(stepwise_logits(model, ids, [1] * 40), whole, atol=1e-3, rtol=0)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "TurboQuantLayer"]
    assert cache.layers[0].keys.shape[2] == 15
    assert session.nbytes == 40 * 2 * PRESETS[FMT].slot_bytes(64)
