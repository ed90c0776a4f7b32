"""The one part of the build that pyproject.toml cannot say: the CPU kernels' shared library.

It is optional. Without a compiler the package installs all the same, and the reference kernels serve.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path(__file__).resolve().parent / "kernels" / "cpu"


def load_builder():
    """`kernels/cpu/build.py`, which runs without the package."""
    spec = importlib.util.spec_from_file_location("turboquant_cpu_build", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Builds the library by the same function as `python -m turboquant.kernels.cpu.build`."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1]) / load_builder().LIBRARY)

    def build_extension(self, ext):
        builder = load_builder()
        try:
            builder.build(Path(self.get_ext_fullpath(ext.name)))
        except builder.BuildError as error:
            print(f"warning: the CPU kernels were not built: {error}", file=sys.stderr)
            raise CompileError(str(error)) from error


class AnyPythonWheel(bdist_wheel):
    """The library knows neither Python nor torch: one wheel a platform."""

    def get_tag(self):
        _, _, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


sources = [str(path.relative_to(Path(__file__).resolve().parent)) for path in sorted((FOLDER / "src").glob("*.cpp"))]
setup(
    ext_modules=[Extension("turboquant.kernels.cpu._library", sources, optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
