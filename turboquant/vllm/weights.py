"""Keep calibration artifacts out of the weights: vLLM loads every .safetensors file of a folder without an index."""

from __future__ import annotations

import os
from typing import Any

import wrapt

from turboquant.artifact import TENSORS_NAME

LOADER = "vllm.model_executor.model_loader.default_loader"


def leave_out_artifacts() -> None:
    """Wrap vLLM's choice of weight files, now or when it is imported. Idempotent."""
    wrapt.register_post_import_hook(_wrap, LOADER)


def _wrap(loader: Any) -> None:
    choose = loader.filter_duplicate_safetensors_files
    if hasattr(choose, "turboquant"):
        return

    def choose_weights(files: list[str], *args: Any, **kwargs: Any) -> list[str]:
        return [file for file in choose(files, *args, **kwargs) if os.path.basename(file) != TENSORS_NAME]

    choose_weights.turboquant = True
    loader.filter_duplicate_safetensors_files = choose_weights
