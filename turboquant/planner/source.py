"""Where a config comes from: a folder, a config.json, or a hub id; and what it leaves to its class's defaults.

Many published configs leave out what their class in Transformers has as default, head counts included. Where
Transformers is installed and knows the type, such gaps are filled from there; without it, a gap is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from turboquant.planner import PlanError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Multimodal configs hold the decoder's under one of these.
TEXT_KEYS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class Source:
    """A config as published.

    Attributes:
        name: what the user called it.
        path: of the file.
        config: the whole file.
        checkpoint_bytes: of all weights, by the index or the file beside the config; None where there is neither.
    """

    name: str
    path: Path
    config: dict[str, Any]
    checkpoint_bytes: int | None = None

    @property
    def own_text(self) -> dict[str, Any]:
        """The decoder's part as written, the outer file's keys where it has none of its own."""
        nested = next((self.config[key] for key in TEXT_KEYS if isinstance(self.config.get(key), dict)), {})
        return {**{k: v for k, v in self.config.items() if k not in TEXT_KEYS}, **nested}

    @cached_property
    def text(self) -> dict[str, Any]:
        """The decoder's part with its class's defaults."""
        return {**self.own_text, **_class_values(self.path, self.config)}

    @property
    def quantisation(self) -> dict[str, Any]:
        """How the checkpoint is quantised; empty where it is not."""
        return self.config.get("quantization_config") or self.own_text.get("quantization_config") or {}

    @property
    def fp8_cache(self) -> bool:
        """Does the checkpoint bring scales of an fp8 KV cache?"""
        return bool(self.quantisation.get("kv_cache_scheme"))

    @property
    def vision(self) -> dict[str, Any]:
        return self.config.get("vision_config") or {}


def load(model: str) -> Source:
    """Read the config of a model.

    Args:
        model: a folder with a config.json, such a file, or a hub id.

    Raises:
        PlanError: there is none, it is no JSON object, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PlanError(f"{path} holds no config.json: give a model's folder, its config.json, or a hub id.")
        path = path / "config.json"
    elif not path.is_file():
        if path.suffix == ".json" or model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise PlanError(
                f"{model!r} does not exist: give a model's folder, its config.json, or a hub id (org/name)."
            )
        path = _from_hub(model, "config.json")
        return Source(model, path, _read(path), _index_bytes(_from_hub(model, INDEX, required=False)))
    return Source(model, path, _read(path), _checkpoint_bytes(path.parent))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise PlanError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict) or not ("model_type" in config or any(key in config for key in TEXT_KEYS)):
        raise PlanError(f"{path} is no model's config: it has no model_type.")
    return config


def _from_hub(repo: str, file: str, required: bool = True) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(hf_hub_download(repo, file))
    except (EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if not required:
            return None
        raise PlanError(
            f"cannot get {file} of {repo!r} from the hub ({type(error).__name__}), and it is not in the local cache. "
            "Offline, give a model's folder or its config.json."
        ) from error


def _checkpoint_bytes(folder: Path) -> int | None:
    if (folder / INDEX).is_file():
        return _index_bytes(folder / INDEX)
    return (folder / SINGLE).stat().st_size if (folder / SINGLE).is_file() else None


def _index_bytes(path: Path | None) -> int | None:
    size = None if path is None else json.loads(path.read_text()).get("metadata", {}).get("total_size")
    return None if size is None else int(size)


def _class_values(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What Transformers makes of a config; nothing where it is not installed or does not know the type."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError:
        return {}
    if config.get("model_type") not in CONFIG_MAPPING:
        return {}
    try:
        values = AutoConfig.from_pretrained(path).get_text_config(decoder=True).to_dict()
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(f"Transformers refuses {path}: {error}") from error
    return {key: value for key, value in values.items() if key not in ("dtype", "max_position_embeddings")}
