"""Compile the kernels for a target without having it, and say what they take: registers, spills, shared memory.

Triton's wheel carries ptxas, so NVIDIA targets need no GPU and no CUDA toolkit; AMD targets are compiled by LLVM. What
is compiled is what `attend` and `store_kv` would launch for a layer of the given shape.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from turboquant.formats import KVFormat
from turboquant.kernels.triton.attend import EXACT_TILE, compile_options, packed_constants, rotation_options
from turboquant.kernels.triton.combine import combine_kernel, rotate_kernel
from turboquant.kernels.triton.config import Plan, Tiling, default_tiling, prefill_columns
from turboquant.kernels.triton.exact import exact_kernel
from turboquant.kernels.triton.packed import packed_kernel
from turboquant.kernels.triton.store import store_kernel
from turboquant.kernels.triton.store_window import store_window_kernel
from turboquant.kv_quantizer import make_params
from turboquant.rope import Rope

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
AMD = ("gfx942", "gfx950")
KIB = 1024
SHARED_LIMIT = {
    "sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB,
    "sm_103": 227 * KIB, "sm_120": 99 * KIB, "gfx942": 64 * KIB, "gfx950": 160 * KIB,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A layer and how it is called."""

    fmt: str = "turboquant3.5"
    head_dim: int = 128
    gqa: int = 4
    block_size: int = 128
    dtype: str = "bf16"
    prefill: bool = False
    mean: bool = False
    window: bool = False


@dataclass(frozen=True)
class Compiled:
    """One kernel on one target. Of AMD targets only the shared memory is known.

    Attributes:
        sass: disassembly, empty for AMD.
    """

    kernel: str
    target: str
    registers: int | None
    spills: int | None
    shared_bytes: int
    sass: str


def gpu_target(name: str) -> GPUTarget:
    """Raises:
    ValueError: no such target.
    """
    if name in NVIDIA:
        return GPUTarget("cuda", int(name[3:]), 32)
    if name in AMD:
        return GPUTarget("hip", name, 64)
    raise ValueError(f"target {name!r} is not known: allowed are {', '.join(NVIDIA + AMD)}.")


@cache
def layer_params(shape: Shape):
    """Parameters of a layer of this shape, half of its dimensions rotary where it has a mean."""
    mean = rope = None
    if shape.mean:
        mean = torch.ones(2, shape.head_dim)
        rope = Rope(10000.0 ** -(torch.arange(0, shape.head_dim // 2, 2, dtype=torch.float64) / shape.head_dim * 2))
    return make_params(KVFormat.from_name(shape.fmt), shape.head_dim, key_mean=mean, rope=rope)


def layer_plan(shape: Shape, target: str, tiling: Tiling | None = None) -> Plan:
    """The plan of one decode step, or of a prefill with full tiles."""
    width = triton.next_power_of_2(shape.gqa)
    rows = max(1, prefill_columns(shape.head_dim, shape.mean) // width) if shape.prefill else 1
    padded = max(width, (16 if target in AMD else 8) // rows)
    capability = int(target[3:]) if target in NVIDIA else 0
    columns, is_float32 = rows * padded, shape.dtype == "fp32"
    chosen = tiling or default_tiling(shape.head_dim, columns, shape.mean, is_float32, capability)
    return Plan(rows, padded, 8, chosen)


def compile_packed(shape: Shape, target: str, tiling: Tiling | None = None) -> Compiled:
    how, params = layer_plan(shape, target, tiling), layer_params(shape)
    rotated = "fp32" if shape.dtype == "fp32" else "fp16"
    nvidia = target in NVIDIA
    constants = {
        **_common(shape, how),
        **packed_constants(params, how, shape.block_size, shape.head_dim % 32 == 0, shape.dtype == "fp32", nvidia),
        **_flags(shape), "HAS_FRESH": True, "SPLITS": 8, "BLOCK_SIZE": shape.block_size, "WINDOW_BLOCK": 32,
        "IP": _precision(target),
    }  # fmt: skip
    types = {
        "query": shape.dtype, "rotated": rotated, "pages": "u8", "block_table": "i32", "seq_lens": "i32",
        "query_start_loc": "i32", "window_table": "i32", "key_table": rotated, "value_table": rotated,
        "shifts": "i32", "frequency": "i64", "angles": rotated,
    }  # fmt: skip
    absent = () if shape.mean else ("mean", "frequency", "angles")
    absent += () if shape.window else ("window_table",)
    options = compile_options(nvidia, how.tiling.num_warps, how.tiling.num_stages)
    return _compile(packed_kernel, target, types, constants, absent, ("query_dim",), **options)


def compile_others(shape: Shape, target: str) -> list[Compiled]:
    """`store_kv`, `store_window`, the queries' rotation, exact attention and the merge."""
    how, params = layer_plan(shape, target), layer_params(shape)
    common, precision = {**_common(shape, how), "DP": _padded(shape.head_dim)}, _precision(target)
    rotated = "fp32" if shape.dtype == "fp32" else "fp16"
    indices = {"query_start_loc": "i32", "seq_lens": "i32", "window_table": "i32"}
    fmt, dim = params.fmt, shape.head_dim
    store = {
        "BLOCK_SIZE": shape.block_size, "KEY_BITS": fmt.key_bits, "VALUE_BITS": fmt.value_bits,
        "KEY_BYTES": fmt.key_code_bytes(dim), "VALUE_BYTES": fmt.value_code_bytes(dim), "HAS_MEAN": shape.mean,
        "ROTARY": dim // 2 if shape.mean else 0, "INTERLEAVED": False, "T": 16, "DP": _padded(dim), "C": 32,
        "IP": precision,
    }  # fmt: skip
    nvidia = target in NVIDIA
    around = rotation_options(dim, nvidia)
    options = {name: around.pop(name) for name in compile_options(nvidia, 8)}
    vectors = dict.fromkeys(("query", "key", "value", "out", "window_pages"), shape.dtype)
    integers = {**indices, "pages": "u8", "slot_mapping": "i64", "positions": "i64", "frequency": "i64"}
    types = {**vectors, **integers, "rotated": rotated}
    attends = {**common, **_flags(shape), "SPLITS": 8, "WINDOW_BLOCK": 32, "N": EXACT_TILE, "WIDEN": False}
    merges = {**common, **around, "SPLITS": 8, "VALUE_BITS": fmt.value_bits, "HAS_EXACT": 1, "HAS_SINKS": False}
    absent = () if shape.mean else ("mean", "frequency")
    return [
        _compile(store_kernel, target, types, store, absent, ("key_dim", "value_dim"), num_warps=4),
        _compile(
            store_window_kernel, target, {**types, "pages": shape.dtype},
            {"BLOCK_SIZE": 32, "T": 16, "DP": _padded(dim)}, (), ("key_dim", "value_dim"), num_warps=4,
        ),
        _compile(
            rotate_kernel, target, types, {**common, **around, "IP": precision}, (), ("query_dim",), **options
        ),
        _compile(
            exact_kernel, target, types, {**attends, "IP": precision}, () if shape.window else ("window_table",),
            ("query_dim", "key_dim", "value_dim", "window_dim"), **compile_options(nvidia, 4),
        ),
        _compile(
            combine_kernel, target, types, {**merges, "IP": precision}, ("sinks",), ("out_dim",), **options
        ),
    ]  # fmt: skip


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _common(shape: Shape, how: Plan) -> dict[str, Any]:
    padded = {"DP": _padded(shape.head_dim)}
    return {"GROUP": shape.gqa, "BQ": how.rows, "GP": how.padded_group, "D": shape.head_dim, **padded}


def _flags(shape: Shape) -> dict[str, bool]:
    return {"CAUSAL": True, "SLIDING": False, "SOFTCAP": False, "HAS_WINDOW": shape.window, "STRICT": False}


def _precision(target: str) -> str:
    return "tf32x3" if target in NVIDIA else "ieee"


# Integers that are multiples of 16 in every real call: Triton compiles loads for that.
_MULTIPLES = re.compile(r"(page|window|query|key|value|out)_(token|head|block|seq)|table_seq|dim|angle_rows")
_SCALARS = {"scale", "softcap", "key_gain", "value_gain", "rope_factor"}
_INTEGERS = re.compile(
    r".*_(token|head|block|dim|slot|seq)|num_.*|window_(size|first)|sliding|first_tile|dim|table_seq|angle_rows"
)


def _compile(kernel, target, types, constants, absent, ones, **options) -> Compiled:
    """Arguments that are neither in `constants` nor known by their name are pointers, to float32 unless in `types`."""
    names = kernel.arg_names
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(names):
        if name in constants or name in absent or name in ones:
            signature[name] = "constexpr"
            values[(i,)] = constants.get(name, 1 if name in ones else None)
        elif name in _SCALARS:
            signature[name] = "fp32"
        elif _INTEGERS.fullmatch(name) and name not in types:
            signature[name] = "i32"
            if _MULTIPLES.fullmatch(name):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "*" + types.get(name, "fp32")
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes), target=gpu_target(target), options=options
    )
    shared = compiled.metadata.shared
    name = kernel.__name__.removesuffix("_kernel")
    if target in AMD:
        return Compiled(name, target, None, None, shared, "")
    sass, registers, spills = disassemble(compiled)
    return Compiled(name, target, registers, spills, shared, sass)


def disassemble(compiled: Any) -> tuple[str, int, int]:
    """SASS of a compiled NVIDIA kernel, its registers, and how many instructions spill or read what was spilled."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", cubin)
        sass = _tool("nvdisasm", "-c", cubin)
    return sass, int(re.search(r"REG:(\d+)", usage)[1]), len(re.findall(r"\b(?:STL|LDL)\b", sass))


def _tool(name: str, *args: Any) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    done = subprocess.run([folder / name, *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
