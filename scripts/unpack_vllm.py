"""Unpack vLLM's Python sources, without what they depend on: enough to register a cache dtype and to validate its name.

python scripts/unpack_vllm.py 0.33.0 out/vllm-0.33.0
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(version: str, folder: Path) -> None:
    if (folder / "vllm" / "__init__.py").is_file():
        return
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
        # The wheel is for another platform than a CPU's, and only its Python files are used.
        platform = ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux1_x86_64"]
        subprocess.run([*pip, *platform, f"vllm=={version}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                folder, [name for name in archive.namelist() if name.endswith((".py", ".json", "METADATA"))]
            )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
