"""Lane-instructions per KV element of the decode kernel's inner loop, ours and upstream's, from the machine code.

    python benchmarks/sass.py                                      # the table of docs/kernels.md
    python benchmarks/sass.py --format turboquant3.5 --head-dim 256 --gqa 8 --target sm_103 --json

Compiles for the target with Triton's own ptxas: no GPU is needed, and none is used. Upstream's kernel is the decode
kernel of the installed vLLM with 4-bit keys and values, compiled as vLLM launches it; it reads a KV head once for every
query head, so its count per element is that of one query head times the group.

The predicted fraction of HBM bandwidth is min(1, time of the bytes / time of the instructions): each SM issues at most
4 warp instructions a cycle, and all of its loads hit memory at full speed. It is an upper bound, not a measurement.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib import util
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import typer
from rich.console import Console
from rich.table import Table
from triton.compiler import ASTSource

from turboquant.environment import write_figures
from turboquant.formats import PRESETS
from turboquant.kernels.triton import aot
from turboquant.kernels.triton.sass import main_loop, per_element

SHAPES = ((256, 8), (128, 4))
TARGETS = ("sm_90", "sm_103")
# Streaming multiprocessors, boost clock in GHz, memory bandwidth in TB/s. Instructions a cycle and SM: 4 warps' worth.
CHIPS = {"sm_90": ("H200", 132, 1.98, 4.8), "sm_103": ("B300", 160, 1.92, 8.0)}
LANES_PER_CYCLE = 4 * 32


@dataclass(frozen=True)
class Cost:
    """One row. Fields that end in `_per_element` are lane-instructions or bytes per stored number of K or V."""

    format: str
    head_dim: int
    gqa: int
    target: str
    lane_instructions_per_element: float
    upstream_lane_instructions_per_element: float | None
    ratio: float | None
    bytes_per_element: float
    registers: int
    spills: int
    shared_bytes: int
    upstream_registers: int | None
    loop_instructions: int
    tile_tokens: int
    num_warps: int
    chip: str | None
    predicted_bandwidth_fraction: float | None
    upstream_predicted_bandwidth_fraction: float | None
    opcodes: dict[str, int]


def cost(fmt: str, head_dim: int, gqa: int, target: str, block_size: int = 128) -> Cost:
    """Compile and count.

    Raises:
        ValueError: an unknown format or target.
    """
    if target not in aot.NVIDIA:
        raise ValueError(f"target {target!r} has no SASS: allowed are {', '.join(aot.NVIDIA)}.")
    shape = aot.Shape(fmt, head_dim, gqa, block_size)
    tiling = aot.layer_plan(shape, target).tiling
    compiled = aot.compile_packed(shape, target, tiling)
    loop = main_loop(compiled.sass)
    lanes = per_element(loop, tiling.num_warps, tiling.tokens, head_dim)
    octets = PRESETS[fmt].slot_bytes(head_dim) / (2 * head_dim)
    upstream = upstream_cost(head_dim, gqa, target)
    return Cost(
        format=fmt, head_dim=head_dim, gqa=gqa, target=target,
        lane_instructions_per_element=round(lanes, 3),
        upstream_lane_instructions_per_element=upstream and round(upstream[0], 1),
        ratio=upstream and round(upstream[0] / lanes, 1),
        bytes_per_element=round(octets, 4),
        registers=compiled.registers, spills=compiled.spills, shared_bytes=compiled.shared_bytes,
        upstream_registers=upstream and upstream[1],
        loop_instructions=len(loop), tile_tokens=tiling.tokens, num_warps=tiling.num_warps,
        chip=CHIPS[target][0] if target in CHIPS else None,
        predicted_bandwidth_fraction=bandwidth_fraction(target, lanes, octets),
        # Upstream's slot at 4 bits: codes of K and V, a norm, a scale and a zero in fp16.
        upstream_predicted_bandwidth_fraction=upstream
        and bandwidth_fraction(target, upstream[0], (head_dim + 6) / (2 * head_dim)),
        opcodes=dict(loop.opcodes().most_common()),
    )  # fmt: skip


def bandwidth_fraction(target: str, lanes: float, octets: float) -> float | None:
    """How much of the chip's memory bandwidth instructions leave time for, at most 1."""
    if target not in CHIPS:
        return None
    _, processors, gigahertz, terabytes = CHIPS[target]
    elements_per_ns = processors * gigahertz * LANES_PER_CYCLE / lanes
    return round(min(1.0, elements_per_ns * octets / (terabytes * 1000)), 3)


@cache
def upstream_cost(head_dim: int, gqa: int, target: str) -> tuple[float, int] | None:
    """Lane-instructions per KV element of vLLM's decode kernel, and its registers; None without vLLM or the kernel."""
    kernel = upstream_kernel()
    if kernel is None:
        return None
    half = head_dim // 2
    constants = {
        "NUM_KV_HEADS": 2, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "NUM_KV_SPLITS": 32, "KV_GROUP_SIZE": gqa,
        "MSE_BITS": 4, "MSE_BYTES": half, "KPS": half + 2, "VQB": 4, "VAL_DATA_BYTES": half,
        "ATTN_SCALE": head_dim**-0.5, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_KV": 4, "KEY_FP8": 0,
        "NORM_CORRECTION": 1, "FP8_E4B15": 0,
    }  # fmt: skip
    pointers = {"KV_cache_ptr": "*u8", "Block_table_ptr": "*i32", "Seq_lens_ptr": "*i32"}
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = pointers.get(name, "*fp32") if name.endswith("_ptr") else "i32"
            if name.endswith("_ptr") or name in ("stride_qb", "stride_qh", "stride_bt_b"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes), target=aot.gpu_target(target),
        options={"num_warps": 1, "num_stages": 1},
    )  # fmt: skip
    sass, registers, _ = aot.disassemble(compiled)
    return gqa * per_element(main_loop(sass), 1, constants["BLOCK_KV"], head_dim), registers


@cache
def upstream_kernel():
    """vLLM's `_tq_decode_stage1`, decorated here: on a machine without a GPU, vLLM replaces Triton by a placeholder."""
    spec = util.find_spec("vllm")
    file = Path(spec.origin).parent / "v1/attention/ops/triton_turboquant_decode.py" if spec and spec.origin else None
    if file is None or not file.exists():
        return None
    source = file.read_text()
    begin = source.index("@triton.jit\ndef _tq_decode_stage1")
    source = source[begin : source.index("\n# ----", begin)]
    # Triton reads a function's source again through inspect, which asks linecache.
    name = "<upstream _tq_decode_stage1>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {"triton": triton, "tl": triton.language, "__name__": "upstream"}
    exec(compile(source, name, "exec"), scope)
    return scope["_tq_decode_stage1"]


def main(
    format: Annotated[list[str] | None, typer.Option(help="Presets; all by default.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="With --gqa; 256 and 128 by default.")] = None,
    gqa: Annotated[int | None, typer.Option(help="Query heads to a KV head; 8 and 4 by default.")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(aot.NVIDIA)}.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 128,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON: one object, or a list of several.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the figures, with versions, to this file.")] = None,
) -> None:
    """Lane-instructions per KV element of the decode kernel, from its machine code."""
    if (head_dim is None) != (gqa is None):
        raise typer.BadParameter("give --head-dim and --gqa together")
    shapes = SHAPES if head_dim is None else ((head_dim, gqa),)
    try:
        rows = [
            cost(fmt, dim, group, chip, block_size)
            for dim, group in shapes
            for fmt in format or PRESETS
            for chip in target or TARGETS
        ]
    except (ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if output:
        write_figures(output, [asdict(row) for row in rows])
    if json_output:
        print(json.dumps(asdict(rows[0]) if len(rows) == 1 else [asdict(row) for row in rows], indent=1))
    else:
        show(rows)


def show(rows: list[Cost]) -> None:
    table = Table(title="Inner loop of decode: lane-instructions per KV element")
    for column in (
        "format", "D", "GQA", "target", "ours", "upstream", "ratio", "bytes", "registers", "spills", "shared B",
        "bandwidth at most", "upstream's",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("format", "target") else "right")
    for row in rows:
        fractions = (row.predicted_bandwidth_fraction, row.upstream_predicted_bandwidth_fraction)
        table.add_row(
            row.format, str(row.head_dim), str(row.gqa), row.target, f"{row.lane_instructions_per_element:.2f}",
            _number(row.upstream_lane_instructions_per_element), _number(row.ratio), f"{row.bytes_per_element:.3f}",
            str(row.registers), str(row.spills), str(row.shared_bytes),
            *("-" if x is None else f"{x:.0%}" for x in fractions),
        )  # fmt: skip
    Console(width=160).print(table)


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.1f}"


if __name__ == "__main__":
    typer.run(main)
