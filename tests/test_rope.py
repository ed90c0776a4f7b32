"""RoPE against complex multiplication, against Transformers' own modules, and far out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, Glm4Config, GptOssConfig, LlamaConfig, Phi3Config, Qwen2Config
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2

from turboquant.rope import Rope, rope_from_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e6}


def random_x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frequencies(rotary_dim: int, theta: float = 10000.0) -> torch.Tensor:
    return torch.tensor([theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)], dtype=torch.float64)


def rotate_by_complex_numbers(x: np.ndarray, position: int, rope: Rope) -> np.ndarray:
    """x [D] float64: pair i becomes (a + ib)·exp(i·p·ω_i)·scaling; elements past R stay."""
    out = x.copy()
    half = rope.rotary_dim // 2
    for i, omega in enumerate(rope.inv_freq.tolist()):
        first, second = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        turned = complex(x[first], x[second]) * rope.attention_scaling
        turned *= complex(math.cos(position * omega), math.sin(position * omega))
        out[first], out[second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 80), (128, 32), (96, 24), (256, 64), (6, 2)], ids=str)
@pytest.mark.parametrize("scaling", [1.0, 1.3688879], ids="scaling{:.2f}".format)
def test_rotate_multiplies_complex_numbers(dim, rotary_dim, interleaved, scaling):
    rope = Rope(frequencies(rotary_dim), scaling, interleaved)
    assert rope.rotary_dim == rotary_dim
    positions = torch.tensor([0, 1, 2, 17, 1000, 131071])
    x = random_x(len(positions), dim)
    rotated = rope.rotate(x, positions)
    assert rotated.dtype == torch.float32
    for row, position in enumerate(positions.tolist()):
        expected = rotate_by_complex_numbers(x[row].double().numpy(), position, rope)
        np.testing.assert_allclose(rotated[row].numpy(), expected, atol=2e-6)


def test_rotation_keeps_norms_and_relative_angles():
    rope = Rope(frequencies(64))
    q, k = random_x(64), random_x(64, seed=1)
    at = torch.arange(0, 4000, 37)
    torch.testing.assert_close(rope.rotate(q, at).norm(dim=-1), q.norm().expand(len(at)))
    products = (rope.rotate(q, at + 5) * rope.rotate(k, at)).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(len(at)), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("x_shape", "positions_shape"),
    [((2, 64), (7, 1)), ((64,), (7,)), ((7, 1, 64), (3,)), ((64,), ()), ((5, 64), (5,)), ((1, 64), (0, 1))],
    ids=str,
)
@pytest.mark.parametrize("rotary_dim", [64, 16], ids="r{}".format)
def test_positions_broadcast(x_shape, positions_shape, rotary_dim):
    rope = Rope(frequencies(rotary_dim))
    x = random_x(*x_shape)
    positions = torch.arange(max(1, math.prod(positions_shape)))[: math.prod(positions_shape)].reshape(positions_shape)
    rotated = rope.rotate(x, positions)
    full = torch.broadcast_shapes(x_shape[:-1], positions_shape)
    assert rotated.shape == (*full, 64)
    wide_x, wide_at = x.expand(*full, 64).reshape(-1, 64), positions.expand(full).reshape(-1)
    one_by_one = [rope.rotate(row, at) for row, at in zip(wide_x, wide_at, strict=True)]
    if one_by_one:
        torch.testing.assert_close(rotated.reshape(-1, 64), torch.stack(one_by_one))


@pytest.mark.parametrize("position", [10**6, 2**24 + 1], ids="p{}".format)
def test_angles_are_exact_far_out(position):
    """In float32 the angle of the fastest pairs would be off by up to 0.03 at 1e6, and 2**24 + 1 would not exist."""
    rope = Rope(frequencies(128))
    omega = np.longdouble(10000.0) ** (-np.arange(0, 128, 2, dtype=np.longdouble) / 128)
    cos, sin = rope.cos_sin(torch.tensor([position]))
    assert cos.dtype == sin.dtype == torch.float32
    np.testing.assert_allclose(cos[0].double().numpy(), np.cos(position * omega).astype(float), atol=1e-7)
    np.testing.assert_allclose(sin[0].double().numpy(), np.sin(position * omega).astype(float), atol=1e-7)


def test_default_frequencies_are_exact_far_out():
    """The same through a config: the frequencies must not have passed through float32."""
    rope = rope_from_config(LlamaConfig(head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}), 128)
    assert rope.inv_freq.dtype == torch.float64
    expected = np.longdouble(1e6) ** (-np.arange(0, 128, 2, dtype=np.longdouble) / 128)
    np.testing.assert_allclose(rope.inv_freq.numpy(), expected.astype(float), rtol=1e-15)


def test_to_moves_the_frequencies_and_keeps_the_rest():
    rope = Rope(frequencies(8), 1.5, interleaved=True)
    moved = rope.to("meta")
    assert moved.inv_freq.device.type == "meta"
    assert (moved.attention_scaling, moved.interleaved) == (1.5, True)


# id: (config, head_dim, layer type, embedding class, module that rotates, interleaved)
THEIRS = {
    "llama-default": (LlamaConfig(head_dim=64), 64, None, modeling_llama.LlamaRotaryEmbedding, modeling_llama, False),
    "llama-linear": (
        LlamaConfig(head_dim=64, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        64, None, modeling_llama.LlamaRotaryEmbedding, modeling_llama, False,
    ),
    "llama3": (
        LlamaConfig(head_dim=128, rope_parameters=LLAMA3),
        128, None, modeling_llama.LlamaRotaryEmbedding, modeling_llama, False,
    ),
    "qwen2-yarn": (
        Qwen2Config(hidden_size=256, num_attention_heads=4, rope_parameters=YARN),
        64, None, modeling_qwen2.Qwen2RotaryEmbedding, modeling_qwen2, False,
    ),
    "phi3-partial": (
        Phi3Config(
            hidden_size=384, num_attention_heads=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        ),
        96, None, modeling_phi3.Phi3RotaryEmbedding, modeling_phi3, False,
    ),
    "glm4-partial-interleaved": (
        Glm4Config(
            hidden_size=256, num_attention_heads=4, head_dim=64,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        64, None, modeling_glm4.Glm4RotaryEmbedding, modeling_glm4, True,
    ),
    **{
        f"gemma3-{layer_type}": (
            Gemma3TextConfig(
                head_dim=256,
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                },
            ),
            256, layer_type, modeling_gemma3.Gemma3RotaryEmbedding, modeling_gemma3, False,
        )
        for layer_type in ("sliding_attention", "full_attention")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", THEIRS.values(), ids=THEIRS.keys())
def test_rotation_is_transformers_own(case):
    config, head_dim, layer_type, embedding_class, module, interleaved = case
    rope = rope_from_config(config, head_dim, layer_type=layer_type)
    rope = Rope(rope.inv_freq, rope.attention_scaling, interleaved)
    positions = torch.tensor([[0, 1, 2, 3, 60, 127, 600]])
    x = random_x(1, 2, positions.shape[1], head_dim)
    extra = (layer_type,) if layer_type else ()
    cos, sin = embedding_class(config)(x, positions, *extra)
    theirs = module.apply_rotary_pos_emb(x, x, cos, sin)[1]
    torch.testing.assert_close(rope.rotate(x, positions[:, None]), theirs, atol=1e-4, rtol=1e-4)
    # A scaling that is left out would also leave position 0 unturned; a wrong one shows there alone.
    torch.testing.assert_close(rope.rotate(x, positions[:, None])[:, :, 0], theirs[:, :, 0], atol=1e-6, rtol=1e-6)


LENGTH_DEPENDENT = {
    "dynamic": LlamaConfig(head_dim=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    "longrope": Phi3Config(
        hidden_size=384, num_attention_heads=4, max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 2048,
            "short_factor": [1.0 + i / 48 for i in range(48)], "long_factor": [2.0 + i for i in range(48)],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rope_type", "config"), LENGTH_DEPENDENT.items(), ids=LENGTH_DEPENDENT.keys())
def test_angles_that_change_with_the_running_length_are_refused(rope_type, config):
    with pytest.raises(ValueError, match=f"'{rope_type}'.*running length"):
        rope_from_config(config, 64)


def test_yarn_scales_attention():
    """0.1·ln(factor) + 1, as in the YaRN paper: with the scaling of 1 a mean would be too short by 14 %."""
    rope = rope_from_config(Qwen2Config(hidden_size=256, num_attention_heads=4, rope_parameters=YARN), 64)
    assert rope.attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1)


def test_gpt_oss_yarn_without_truncation():
    config = GptOssConfig(head_dim=64)
    rope = rope_from_config(config, 64, layer_type="full_attention")
    assert rope.rotary_dim == 64
    assert rope.attention_scaling == pytest.approx(0.1 * math.log(config.rope_parameters["factor"]) + 1)


def test_layer_types_of_gemma_3_differ():
    config = THEIRS["gemma3-full_attention"][0]
    full, local = (rope_from_config(config, 256, layer_type=kind) for kind in ("full_attention", "sliding_attention"))
    assert full.inv_freq[0].item() == pytest.approx(1 / 8)
    assert local.inv_freq[0].item() == pytest.approx(1.0)


@pytest.mark.parametrize("layer_type", [None, "linear_attention"], ids=str)
def test_nested_parameters_without_this_layer_type(layer_type):
    with pytest.raises(ValueError, match=f"Gemma3TextConfig has no rope_parameters for layer type {layer_type!r}"):
        rope_from_config(THEIRS["gemma3-full_attention"][0], 256, layer_type=layer_type)


def test_a_config_without_rope():
    from transformers import GPT2Config

    with pytest.raises(ValueError, match="GPT2Config has no rope_parameters"):
        rope_from_config(GPT2Config(), 64)
