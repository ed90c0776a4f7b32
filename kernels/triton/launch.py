"""Where kernels run, and what every launcher shares."""

from __future__ import annotations

from typing import Any

import torch

from triton.runtime.interpreter import InterpretedFunction
from turboquant.kernels.interface import KVParams
from turboquant.kernels.triton.tables import Prepared, prepare


def constants(params: KVParams, anchor: torch.Tensor) -> Prepared:
    """`prepare`, once the device is known to be one that the kernels run on.

    Raises:
        ValueError: a CPU tensor without the interpreter.
    """
    from turboquant.kernels.triton.store import store_kernel

    if on_host(anchor) and not isinstance(store_kernel, InterpretedFunction):
        raise ValueError(
            "the Triton kernels need CUDA tensors, got CPU ones: move them, choose TURBOQUANT_KERNELS=reference, or "
            "set TRITON_INTERPRET=1 before Python starts to run these kernels in Triton's interpreter."
        )
    return prepare(params)


def on_host(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def dot_precision(device: torch.device) -> str:
    """How float32 operands are multiplied: three TF32 products where there are TF32 tensor cores."""
    return "tf32x3" if is_nvidia(device) else "ieee"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](...) on the device of the first argument."""
    device = args[0].device
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)
