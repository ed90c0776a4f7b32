"""Compile every kernel for every target and check registers, spills and shared memory: `make kernels-aot`.

    python -m turboquant.kernels.triton.report [--target sm_90 --target sm_103] [--quick] [--json]

Exits with 1 where a kernel spills or needs more shared memory than the chip has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import typer
from rich.console import Console
from rich.table import Table

from turboquant.environment import write_figures
from turboquant.formats import PRESETS
from turboquant.kernels.triton import aot
from turboquant.kernels.triton.aot import AMD, NVIDIA, SHARED_LIMIT, Compiled, Shape

HYBRID, DENSE, SMALL = (256, 8), (128, 4), (64, 3)


@dataclass(frozen=True)
class Line:
    """One compiled kernel; `problem` is empty where all is well."""

    target: str
    kernel: str
    variant: str
    registers: int | None
    spills: int | None
    shared_bytes: int | None
    problem: str


def variants(quick: bool = False) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of what is compiled: every format for three head_dims, and every feature for two."""
    for dim, gqa in (HYBRID, DENSE) if quick else (HYBRID, DENSE, SMALL):
        for fmt in PRESETS:
            yield f"{fmt} D{dim} gqa{gqa}", Shape(fmt, dim, gqa)
    for dim, gqa in (DENSE,) if quick else (HYBRID, DENSE):
        shape = Shape("turboquant3.5", dim, gqa)
        name = f"{shape.fmt} D{dim} gqa{gqa}"
        yield f"{name} prefill", replace(shape, prefill=True)
        yield f"{name} mean", replace(shape, mean=True)
        yield f"{name} window", replace(shape, window=True)
        if not quick:
            yield f"{name} block16", replace(shape, block_size=16)
            yield f"{name} fp32", replace(shape, dtype="fp32")
            yield f"{name} mean prefill window", replace(shape, mean=True, prefill=True, window=True)


def compile_all(target: str, quick: bool = False) -> Iterator[Line]:
    """Every kernel of every variant for one target."""
    for name, shape in variants(quick):
        yield _line(target, "packed", name, lambda shape=shape: [aot.compile_packed(shape, target)])
    for dim, gqa in (DENSE,) if quick else (HYBRID, DENSE):
        for prefill in (False, True):
            shape = Shape("turboquant3.5", dim, gqa, prefill=prefill, window=True, mean=True)
            for compiled in aot.compile_others(shape, target):
                name = f"{shape.fmt} D{dim} gqa{gqa}{' prefill' if prefill else ''}"
                yield _line(target, compiled.kernel, name, lambda compiled=compiled: [compiled])


def _line(target: str, kernel: str, name: str, make) -> Line:
    try:
        (compiled,) = make()
    except Exception as error:  # whatever the compiler says belongs into the table
        return Line(
            target, kernel, name, None, None, None, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        )
    return Line(
        target, kernel, name, compiled.registers, compiled.spills, compiled.shared_bytes, _problem(target, compiled)
    )


def _problem(target: str, compiled: Compiled) -> str:
    problems = []
    if compiled.spills:
        problems.append("spills")
    if compiled.shared_bytes > SHARED_LIMIT[target]:
        problems.append(f"more than {SHARED_LIMIT[target]} bytes of shared memory")
    return ", ".join(problems)


def main(
    target: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(NVIDIA + AMD)}; all by default.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer variants.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the figures, with versions, to this file.")] = None,
) -> None:
    """Compile every kernel and check registers, spills and shared memory."""
    lines = []
    for chip in target or NVIDIA + AMD:
        for line in compile_all(chip, quick):
            lines.append(line)
            if line.problem and not json_output:
                print(f"{line.target} {line.kernel} {line.variant}: {line.problem}", flush=True)
    if output:
        write_figures(output, [asdict(line) for line in lines])
    if json_output:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)
    if any(line.problem for line in lines):
        raise typer.Exit(1)


def show(lines: list[Line]) -> None:
    """The worst of each kernel on each target."""
    table = Table(title="Kernels compiled ahead of time: the most that any variant takes")
    for column in ("target", "kernel", "variants", "registers", "spills", "shared bytes", "limit", "problems"):
        table.add_column(column, justify="left" if column in ("target", "kernel") else "right")
    for target in dict.fromkeys(line.target for line in lines):
        for kernel in dict.fromkeys(line.kernel for line in lines):
            group = [line for line in lines if (line.target, line.kernel) == (target, kernel)]
            if group:
                most = [
                    max((getattr(x, f) or 0 for x in group), default=0) for f in ("registers", "spills", "shared_bytes")
                ]
                shown = [str(x) if target in NVIDIA or i == 2 else "-" for i, x in enumerate(most)]
                bad = sum(bool(line.problem) for line in group)
                table.add_row(target, kernel, str(len(group)), *shown, str(SHARED_LIMIT[target]), str(bad))
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
