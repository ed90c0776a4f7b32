"""Lets torchvision, torchaudio and torchcodec stand in an environment where their compiled parts do not load.

vLLM asks for all three, and what pip finds may be a CUDA build of each beside a CPU-only torch. Their compiled parts
then do not load, and each fails in another way: torchvision goes on to describe two operators that nobody declared
(`operator torchvision::nms does not exist`), torchaudio and torchcodec let the loader's OSError through. Transformers
and vLLM import all three, although serving text calls none of them, so nothing can be served.

`setup_env.py` copies this file into the environment's site-packages with a `.pth` beside it, so that every process of
that environment runs `install()` at its start: engines start helper processes, and each of them imports Transformers.
`install` only adds an import hook; torch is not imported before one of the three is. Where the compiled parts load,
the hook changes nothing. Where they do not, the packages import and their operators stay unusable.
"""

import sys
from importlib.machinery import PathFinder

OPERATORS = ("nms", "qnms")
ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_libraries = []  # a torch.library.Library withdraws its operators when it is collected


def declare_missing():
    """Declare those of torchvision's `OPERATORS` that torch does not know; return their names."""
    import torch

    missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _libraries.append(library)
        for name in missing:
            library.define(name + ARGUMENTS)
    return missing


def run_torchvision_extension(run_module, module):
    """Run the module that loads torchvision's compiled part, then make up for what it did not bring."""
    run_module(module)
    declare_missing()


def run_torchaudio_loader(run_module, module):
    """Run the module that knows how to load torchaudio's compiled parts; let one that fails to load count as absent."""
    run_module(module)
    load = module._load_lib

    def load_or_report(lib):
        try:
            return load(lib)
        except OSError:
            return False

    module._load_lib = load_or_report


def run_torchcodec(run_module, module):
    """Run torchcodec; turn a failure to load its compiled part into the ImportError that its users expect."""
    try:
        run_module(module)
    except OSError as error:
        raise ImportError(f"torchcodec cannot be used here: {error}") from error


WATCHED = {
    "torchvision.extension": run_torchvision_extension,
    "torchaudio._extension.utils": run_torchaudio_loader,
    "torchcodec": run_torchcodec,
}


class ShimFinder:
    """Import hook: finds a watched module as Python would, and runs it inside its function from `WATCHED`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in WATCHED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module
            spec.loader.exec_module = lambda module: WATCHED[name](run_module, module)
        return spec


def install():
    """Put the hook first among the finders, once."""
    if ShimFinder not in sys.meta_path:
        sys.meta_path.insert(0, ShimFinder)
