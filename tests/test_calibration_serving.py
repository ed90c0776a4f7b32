"""Calibrated models served: the same means in Transformers and in vLLM, and nothing that does not fit."""

from __future__ import annotations

import shutil

import pytest
import torch
from engine import assert_same_answers, engine, greedy, random_prompts, through_transformers
from transformers import AutoModelForCausalLM

from turboquant.artifact import JSON_NAME, TENSORS_NAME, Artifact, ArtifactError
from turboquant.cache import turboquant_cache
from turboquant.calibration.capture import layers_of
from turboquant.calibration.moments import Moments
from turboquant.calibration.run import read
from turboquant.calibration.solve import solve

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread", "reference_kernels")]

PACKED = {"window": 0, "prefill_reads": "packed"}


def calibrate(model_dir, folder) -> Artifact:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    shapes, ropes = layers_of(model)
    moments, samples = Moments.zeros(shapes), random_prompts(*[150] * 12)
    read(model, samples, [*range(len(samples))], moments, ropes, batch_size=4)
    artifact = solve(moments, model.config.get_text_config(), str(model_dir), [])
    artifact.save(folder)
    return Artifact.load(folder)


@pytest.mark.matrix(feature="calibrated", shape="{shape}")
@pytest.mark.parametrize("shape", ["llama_dir", "qwen2_dir", "worded_llama_dir"])
def test_both_paths_give_the_same_tokens(request, tmp_path, monkeypatch, shape):
    model_dir = request.getfixturevalue(shape)
    calibrate(model_dir, tmp_path)
    monkeypatch.setenv("TURBOQUANT_ARTIFACT", str(tmp_path))
    prompts = random_prompts(6, 41, 130)
    with engine(model_dir, "turboquant3.5", skip_tokenizer_init=True, additional_config={"turboquant": PACKED}) as llm:
        ours = greedy(llm, prompts, 12)
    assert_same_answers(ours, through_transformers(model_dir, prompts, 12))


@pytest.mark.matrix(feature="calibrated", shape="{shape}")
@pytest.mark.parametrize("shape", ["qwen35_moe_dir", "gemma3_dir"])
def test_other_shapes_calibrate_and_serve(request, tmp_path, shape):
    """A hybrid (layers by their index in the model), and sliding beside global layers of one KV head."""
    model_dir = request.getfixturevalue(shape)
    artifact = calibrate(model_dir, tmp_path)
    prompts, dtype = random_prompts(41, 130), torch.bfloat16 if "moe" in shape else torch.float32
    options = {"turboquant": {"artifact": str(tmp_path)}}
    with engine(
        model_dir, "turboquant4", dtype=str(dtype)[6:], skip_tokenizer_init=True, additional_config=options
    ) as llm:
        (impls,) = llm.apply_model(attention_means)
        ours = greedy(llm, prompts, 4)
    assert len(impls) == len(artifact.key_means)
    for index, mean in impls.items():
        assert torch.equal(mean, artifact.key_means[index])
    with engine(model_dir, "auto", dtype=str(dtype)[6:], skip_tokenizer_init=True) as llm:
        exact = greedy(llm, prompts, 4)
    for (_, logprobs), (_, exact_logprobs) in zip(ours, exact, strict=True):
        assert logprobs[0] == pytest.approx(exact_logprobs[0], abs=0.6)


def attention_means(model) -> dict[int, torch.Tensor]:
    """K's mean of every turboquant layer, by layer index."""
    from vllm.model_executor.models.utils import extract_layer_index

    layers = [module for module in model.modules() if getattr(getattr(module, "impl", None), "params", None)]
    return {extract_layer_index(layer.layer_name): layer.impl.params.key_mean.cpu() for layer in layers}


@pytest.mark.parametrize("where", [".", "turboquant"])
def test_an_artifact_in_the_model_s_folder_is_found(llama_dir, tmp_path, monkeypatch, where):
    """And its tensors are not taken for weights."""
    monkeypatch.delenv("TURBOQUANT_ARTIFACT", raising=False)
    model_dir = shutil.copytree(llama_dir, tmp_path / "model")
    artifact = calibrate(model_dir, model_dir / where)
    with engine(model_dir, "turboquant3.5", skip_tokenizer_init=True) as llm:
        (means,) = llm.apply_model(attention_means)
    assert torch.equal(means[1], artifact.key_means[1])
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with turboquant_cache(model, "turboquant3.5") as session:
        assert session.artifact.path == model_dir / where / JSON_NAME
        assert torch.equal(session.params[0].key_mean, artifact.key_means[0])
    with turboquant_cache(model, "turboquant3.5", artifact="none") as session:
        assert session.params[0].key_mean is None


def damaged(folder) -> None:
    (folder / TENSORS_NAME).write_bytes((folder / TENSORS_NAME).read_bytes()[:-100])


def stale(folder) -> None:
    text = (folder / JSON_NAME).read_text()
    (folder / JSON_NAME).write_text(text.replace("signed-hadamard-1", "signed-hadamard-0"))


def foreign(folder) -> None:
    text = (folder / JSON_NAME).read_text()
    (folder / JSON_NAME).write_text(text.replace('"hidden_size": 128', '"hidden_size": 256'))


@pytest.mark.matrix(feature="a calibration that is {spoil.__name__}", shape="llama", verdict="refused")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [(damaged, "is damaged"), (stale, "transform"), (foreign, "another model.*256 there, 128 here")],
)
def test_an_artifact_that_does_not_fit_never_serves(llama_dir, tmp_path, spoil, message):
    calibrate(llama_dir, tmp_path)
    spoil(tmp_path)
    options = {"turboquant": {"artifact": str(tmp_path)}}
    with (
        pytest.raises(ArtifactError, match=message),
        engine(llama_dir, "turboquant3.5", skip_tokenizer_init=True, additional_config=options),
    ):
        pass
    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    with pytest.raises(ArtifactError, match=message), turboquant_cache(model, "turboquant3.5", artifact=tmp_path):
        pass


@pytest.mark.matrix(feature="a calibration of another rotary scaling", shape="llama", verdict="refused")
def test_another_rotary_scaling_never_serves(llama_dir, tmp_path):
    calibrate(llama_dir, tmp_path)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    with (
        pytest.raises(ArtifactError, match="another rotary scaling"),
        engine(
            llama_dir, "turboquant3.5", skip_tokenizer_init=True, hf_overrides={"rope_parameters": yarn},
            additional_config={"turboquant": {"artifact": str(tmp_path)}},
        ),
    ):  # fmt: skip
        pass
