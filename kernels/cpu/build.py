"""Builds the CPU kernels' shared library: `python -m turboquant.kernels.cpu.build`.

A C++17 compiler (CXX, else c++, g++ or clang++) is all it takes. Each instruction set is a translation unit with flags
of its own; which one runs is decided when the library is loaded. The package's build calls `build`, too: this file
must do without the rest of the package.

TURBOQUANT_CPU_CXXFLAGS adds flags, e.g. a sanitiser's.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = "libturboquant_cpu.so"
FLAGS_ENV = "TURBOQUANT_CPU_CXXFLAGS"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=256")
UNITS = {
    "x86_64": {"avx2": AVX2, "avx512": AVX512, "avx512vnni": (*AVX512, "-mavx512vnni")},
    "aarch64": {"neon": ()},
}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


class BuildError(RuntimeError):
    """The library could not be built; the message holds the compiler's."""


def find_compiler() -> list[str]:
    """The compiler's command.

    Raises:
        BuildError: there is none.
    """
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        command = shlex.split(candidate)
        if shutil.which(command[0]):
            return command
    raise BuildError(
        f"no C++ compiler found (looked for {named or ', '.join(COMPILERS)}): install one (Debian and Ubuntu: "
        "apt install g++) or name it with CXX."
    )


def build(target: Path, machine: str | None = None) -> Path:
    """Compile and link the library to `target`.

    Args:
        machine: the target's architecture where CXX is a cross compiler.

    Raises:
        BuildError: no compiler, or it fails.
    """
    compiler = find_compiler()
    machine = machine or platform.machine()
    units = {"scalar": (), **UNITS.get(MACHINES.get(machine, machine), {})}
    with tempfile.TemporaryDirectory() as folder:
        openmp = ("-fopenmp",) if _supports(compiler, "-fopenmp", folder) else ()
        jobs = {"driver": (SOURCES / "driver.cpp", openmp)}
        jobs |= {name: (SOURCES / f"kernel_{name}.cpp", flags) for name, flags in units.items()}
        objects = {name: Path(folder) / f"{name}.o" for name in jobs}
        extra = shlex.split(os.environ.get(FLAGS_ENV, ""))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = [
                pool.submit(_run, [*compiler, *FLAGS, *flags, *extra, "-c", str(source), "-o", str(objects[name])])
                for name, (source, flags) in jobs.items()
            ]
        for job in compiled:
            job.result()
        linked = Path(folder) / LIBRARY
        _run([*compiler, "-shared", *openmp, *extra, *map(str, objects.values()), "-o", str(linked), "-lm"])
        target.parent.mkdir(parents=True, exist_ok=True)
        # In one step: a process that has the old library mapped keeps it.
        staged = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copyfile(linked, staged)
        os.replace(staged, target)
    return target


def _supports(compiler: list[str], flag: str, folder: str) -> bool:
    source = Path(folder) / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [*compiler, flag, str(source), "-o", str(Path(folder) / "probe")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: Iterable[str]) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\nfailed with exit code {done.returncode}:\n{done.stderr.strip()}")


def main() -> int:
    try:
        print(build(HERE / LIBRARY))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
