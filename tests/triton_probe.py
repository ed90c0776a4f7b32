"""Prints, as JSON, the operations that `dequant` compiles to: run by `test_kernels_dequant.py`."""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl
from triton.compiler import ASTSource

from turboquant.kernels.triton import aot
from turboquant.kernels.triton.dequant import dequant


@triton.jit
def probe(words, out, LOW: tl.constexpr, HIGH: tl.constexpr, MIRROR_LOW: tl.constexpr, MIRROR_HIGH: tl.constexpr,
          BITS: tl.constexpr):  # fmt: skip
    index = tl.arange(0, 32)
    x0, x1, x2, x3, x4, x5, x6, x7 = dequant(tl.load(words + index), LOW, HIGH, MIRROR_LOW, MIRROR_HIGH, BITS)
    tl.store(out + index, x0)
    tl.store(out + 32 + index, x1)
    tl.store(out + 64 + index, x2)
    tl.store(out + 96 + index, x3)
    tl.store(out + 128 + index, x4)
    tl.store(out + 160 + index, x5)
    tl.store(out + 192 + index, x6)
    tl.store(out + 224 + index, x7)


def main() -> None:
    texts = {}
    for bits, word in ((2, "i16"), (3, "i32"), (4, "i16")):
        table = ("0x04030201", "0x08070605", "0x14131211", "0x18171615")
        values = {(i + 2,): x for i, x in enumerate((*table, bits))}
        signature = {"words": f"*{word}", "out": "*fp16"} | dict.fromkeys(probe.arg_names[2:], "constexpr")
        compiled = triton.compile(ASTSource(probe, signature, values), target=aot.gpu_target("sm_90"))
        texts[bits] = compiled.asm["ttir"]
    json.dump(texts, sys.stdout)


main()
