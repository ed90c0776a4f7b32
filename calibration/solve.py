"""From moments to an artifact: μ of every KV head, and what it is worth."""

from __future__ import annotations

from typing import Any

import torch

from turboquant.artifact import (
    CODEBOOK,
    FORMAT_VERSION,
    TRANSFORM,
    Artifact,
    ArtifactInfo,
    DataInfo,
    LayerInfo,
    config_fingerprint,
    rope_fingerprint,
)
from turboquant.calibration.capture import CalibrationError
from turboquant.calibration.moments import LayerMoments, Moments
from turboquant.environment import installed_version
from turboquant.formats import PRESETS
from turboquant.kv_quantizer import DEFAULT_SEED

# A mean over n tokens of vectors that vary by σ² is off by σ²/n, and neighbouring tokens are alike: with this many
# for each element of a head, the error is far below what μ takes away.
TOKENS_PER_ELEMENT = 4
VERSIONED = ("turboquant-toolkit", "torch", "transformers")


def solve(moments: Moments, config: Any, model: str, data: list[DataInfo]) -> Artifact:
    """μ = E[k before RoPE] of each KV head, float64, position 0 left out; 0 where held-out text gains nothing by it.

    Args:
        config: the model's text config.
        model: its name, for messages.
        data: what the moments were read from.

    Raises:
        CalibrationError: too few tokens.
    """
    means, layers = {}, {}
    for index, fit in moments.fit.items():
        head_dim = fit.key_sum.shape[1]
        needed = TOKENS_PER_ELEMENT * head_dim
        if fit.count < needed:
            raise CalibrationError(
                f"{int(fit.count)} tokens are too few for means of head_dim {head_dim}: at least {needed} are needed. "
                "Give more samples or longer ones (--num-samples, --max-seq-len)."
            )
        held_out = moments.held_out[index]
        mean = fit.key_mean
        if held_out.count:
            gains = held_out.energy_without(mean) < held_out.key_energy
            mean = torch.where(gains[:, None], mean, 0.0)
        means[index] = mean.float()
        layers[index] = _layer_info(fit, held_out, mean)
    return Artifact(_info(config, model, data, layers), means)


def solve_from_biases(biases: dict[int, torch.Tensor], config: Any, model: str) -> Artifact:
    """μ = the k_proj bias, without any data.

    Args:
        biases: [num_kv_heads, D] by layer index.
    """
    means = {index: bias.float() for index, bias in biases.items()}
    return Artifact(_info(config, model, [], {index: LayerInfo() for index in means}), means)


def _layer_info(fit: LayerMoments, held_out: LayerMoments, mean: torch.Tensor) -> LayerInfo:
    head_dim = fit.key_sum.shape[1]

    def left(moments: LayerMoments) -> list[float]:
        return (moments.energy_without(mean) / moments.key_energy.clamp(min=1e-30)).tolist()

    def rms(squares: torch.Tensor) -> list[float]:
        return (squares.sum(-1) / fit.count / head_dim).sqrt().tolist()

    return LayerInfo(
        energy_left=left(fit),
        held_out_energy_left=left(held_out) if held_out.count else None,
        key_rms=rms(fit.key_squares),
        key_max=fit.key_max.tolist(),
        value_rms=rms(fit.value_squares),
        value_max=fit.value_max.tolist(),
        query_rms=rms(fit.query_squares),
    )


def _info(config: Any, model: str, data: list[DataInfo], layers: dict[int, LayerInfo]) -> ArtifactInfo:
    return ArtifactInfo(
        format_version=FORMAT_VERSION,
        transform=TRANSFORM,
        codebook=CODEBOOK,
        presets=[*PRESETS],
        rotation_seed=DEFAULT_SEED,
        model=model,
        model_type=config.model_type,
        config=config_fingerprint(config),
        rope=rope_fingerprint(config),
        data=data,
        layers=layers,
        versions={name: version for name in VERSIONED if (version := installed_version(name))},
    )
