"""The calibration artifact: what serving needs to know of a model, in two files beside it.

    turboquant.safetensors      layers.<i>.key_mean [num_kv_heads, head_dim] float32: μ, K's mean before RoPE
    turboquant.json             what it was made for and from, and what it is predicted to gain

They lie in the folder `turboquant` of the model's folder, or directly in it. (Loaders that know nothing of them may
take every .safetensors file beside a config for weights; the vLLM plugin leaves ours out.)

One artifact serves every preset. It fits one model (by its config, weights of a fine-tune or a quantised copy may
differ) under one rotary scaling; whatever does not fit is an error that names both sides.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from turboquant.rope import rope_from_config

FORMAT_VERSION = 1
TRANSFORM = "signed-hadamard-1"
CODEBOOK = "lloyd-max-beta-1"
ARTIFACT_ENV = "TURBOQUANT_ARTIFACT"
NONE = "none"
SUBFOLDER = "turboquant"
JSON_NAME, TENSORS_NAME = "turboquant.json", "turboquant.safetensors"
# What makes K and V what they are; quantisation and serving options may differ.
SHAPE_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size",
)  # fmt: skip


class ArtifactError(ValueError):
    """An artifact that cannot be read, or that is not for this model."""


class LayerInfo(BaseModel):
    """Figures of one layer; lists have one entry a KV head.

    Attributes:
        energy_left: E‖k − RoPE(μ)‖² / E‖k‖² on the data that μ came from; K's quantisation error is in proportion.
        held_out_energy_left: the same on held-out data; None where there was none.
        key_rms, key_max, value_rms, value_max, query_rms: of the elements, for finding outliers.
    """

    model_config = ConfigDict(extra="forbid")

    energy_left: list[float] | None = None
    held_out_energy_left: list[float] | None = None
    key_rms: list[float] | None = None
    key_max: list[float] | None = None
    value_rms: list[float] | None = None
    value_max: list[float] | None = None
    query_rms: list[float] | None = None


class DataInfo(BaseModel):
    """One shard of the data: source, SHA-256 of its token ids, and how much of it there was."""

    model_config = ConfigDict(extra="forbid")

    source: str
    sha256: str
    samples: int
    tokens: int
    max_seq_len: int
    seed: int


class ArtifactInfo(BaseModel):
    """The JSON half."""

    model_config = ConfigDict(extra="forbid")

    format_version: int
    transform: str
    codebook: str
    presets: list[str]
    rotation_seed: int
    model: str
    model_type: str
    config: dict[str, Any]
    rope: dict[str, str]
    data: list[DataInfo]
    layers: dict[int, LayerInfo]
    versions: dict[str, str]
    tensors_sha256: str = ""


@dataclass(frozen=True)
class Artifact:
    """A calibration of one model.

    Attributes:
        info: the JSON half.
        key_means: μ [num_kv_heads, D] float32 by layer index, of the whole model.
        path: the JSON file that it came from.
    """

    info: ArtifactInfo
    key_means: dict[int, torch.Tensor]
    path: Path | None = None

    def save(self, folder: Path) -> Path:
        """Write both files; each replaces its predecessor in one step. Returns the JSON file."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"layers.{i}.key_mean": mean.contiguous() for i, mean in sorted(self.key_means.items())}
        temporary = folder / (TENSORS_NAME + ".part")
        save_file(tensors, temporary, metadata={"format_version": str(FORMAT_VERSION)})
        temporary.chmod(0o644)  # safetensors writes for the owner alone, and servers run as other users
        info = self.info.model_copy(update={"tensors_sha256": _sha256(temporary)})
        os.replace(temporary, folder / TENSORS_NAME)
        temporary = folder / (JSON_NAME + ".part")
        temporary.write_text(json.dumps(info.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")
        os.replace(temporary, folder / JSON_NAME)
        return folder / JSON_NAME

    @classmethod
    def load(cls, path: Path | str) -> Artifact:
        """Read an artifact, given its folder or one of its files.

        Raises:
            ArtifactError: not there, damaged, or of another version.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        for name in (JSON_NAME, TENSORS_NAME):
            if not (folder / name).is_file():
                raise ArtifactError(
                    f"no artifact at {str(path)!r}: {folder / name} is missing. Calibrate, or fix the path."
                )
        info = _read_info(folder / JSON_NAME)
        if _sha256(folder / TENSORS_NAME) != info.tensors_sha256:
            raise ArtifactError(
                f"artifact {folder / TENSORS_NAME} is damaged, or not the one that {JSON_NAME} describes: its SHA-256 "
                "is another. Copy both files again, or calibrate again."
            )
        try:
            tensors = load_file(folder / TENSORS_NAME)
        except SafetensorError as error:
            raise ArtifactError(f"artifact {folder / TENSORS_NAME} is damaged: {error}. Calibrate again.") from error
        means = {int(name.split(".")[1]): tensor for name, tensor in tensors.items()}
        if means.keys() != info.layers.keys() or not all(mean.isfinite().all() for mean in means.values()):
            raise ArtifactError(
                f"artifact {folder} is damaged: its tensors are not those of its layers. Calibrate again."
            )
        return cls(info, means, folder / JSON_NAME)

    def check(self, config: Any) -> None:
        """Hold the artifact against a model's text config.

        Raises:
            ArtifactError: another model or another rotary scaling; both sides are named.
        """
        theirs = config_fingerprint(config)
        wrong = [
            f"{name} {self.info.config.get(name)!r} there, {theirs.get(name)!r} here"
            for name in sorted({*self.info.config, *theirs})
            if self.info.config.get(name) != theirs.get(name)
        ]
        if wrong:
            raise ArtifactError(
                f"artifact {self.path} is of another model, {self.info.model}: {'; '.join(wrong)}. {_REMEDY}"
            )
        here = rope_fingerprint(config)
        if here != self.info.rope:
            raise ArtifactError(
                f"artifact {self.path} was made under another rotary scaling: {self.info.rope} there, {here} here. "
                f"Calibrate with the scaling that you serve with (--hf-overrides), {_REMEDY[0].lower()}{_REMEDY[1:]}"
            )

    def key_mean(self, layer: int, num_kv_heads: int, *, tp_rank: int = 0, tp_size: int = 1) -> torch.Tensor:
        """μ of the KV heads of one tensor-parallel rank, [num_kv_heads, D].

        Args:
            num_kv_heads: heads on this rank; where there are fewer heads than ranks, vLLM replicates them.

        Raises:
            ArtifactError: the artifact lacks this layer, or its heads are not this layer's.
        """
        if layer not in self.key_means:
            raise ArtifactError(f"artifact {self.path} has no layer {layer}, only {sorted(self.key_means)}. {_REMEDY}")
        mean = self.key_means[layer]
        total = len(mean)
        begin = tp_rank * total // tp_size
        if max(1, total // tp_size) != num_kv_heads or begin + num_kv_heads > total:
            raise ArtifactError(
                f"artifact {self.path} has {total} KV heads in layer {layer}, the model has {num_kv_heads} on each of "
                f"{tp_size} ranks. {_REMEDY}"
            )
        return mean[begin : begin + num_kv_heads]


_REMEDY = f"Calibrate again, remove it, or set {ARTIFACT_ENV}={NONE} to serve without."


def find_artifact(model: str | Path, given: str | None = None, revision: str | None = None) -> Path | None:
    """Where the artifact of a model is.

    Args:
        model: a folder, or the id of a hub model, whose local copy is searched.
        given: a file or folder to take in place of looking, or "none"; TURBOQUANT_ARTIFACT if None.

    Returns:
        The path, or None for no artifact: none found, or "none" given.

    Raises:
        ArtifactError: what was given is not there.
    """
    given = os.environ.get(ARTIFACT_ENV) or None if given is None else given
    if given == NONE:
        return None
    if given is not None:
        if not Path(given).exists():
            raise ArtifactError(f"artifact {given!r} is not there: give a file or a folder, or {NONE!r} for none.")
        return Path(given)
    if Path(model).exists():
        folders = (Path(model), Path(model) / SUBFOLDER)
        return next((f / JSON_NAME for f in folders if any((f / n).is_file() for n in (JSON_NAME, TENSORS_NAME))), None)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        names = (JSON_NAME, f"{SUBFOLDER}/{JSON_NAME}")
        cached = (try_to_load_from_cache(str(model), name, revision=revision) for name in names)
        return next((Path(path) for path in cached if isinstance(path, str)), None)
    except HFValidationError:
        return None


def config_fingerprint(config: Any) -> dict[str, Any]:
    """What tells a text config from another model's."""
    fields = {name: getattr(config, name, None) for name in SHAPE_FIELDS}
    if fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return {name: value for name, value in fields.items() if isinstance(value, int)}


def rope_fingerprint(config: Any) -> dict[str, str]:
    """SHA-256 of the rotary angles and their scaling, by layer type; "none" for one that has no fixed angles."""
    head_dim = config_fingerprint(config)["head_dim"]
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [None] if "rope_type" in parameters or not parameters else sorted(parameters)
    found = {}
    for kind in kinds:
        try:
            rope = rope_from_config(config, head_dim, layer_type=kind)
        except ValueError:
            found[kind or "all"] = NONE
            continue
        text = " ".join(f"{x:.9e}" for x in (*rope.inv_freq.tolist(), rope.attention_scaling))
        found[kind or "all"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _read_info(path: Path) -> ArtifactInfo:
    try:
        raw = json.loads(path.read_text())
        versions = {"format_version": FORMAT_VERSION, "transform": TRANSFORM, "codebook": CODEBOOK}
        for name, ours in versions.items():
            if raw[name] != ours:
                raise ArtifactError(
                    f"artifact {path} has {name} {raw[name]!r}, this version of turboquant-toolkit reads {ours!r}. "
                    + _REMEDY
                )
        return ArtifactInfo.model_validate(raw)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"artifact {path} is damaged: {error}. Copy it again, or calibrate again.") from error


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
