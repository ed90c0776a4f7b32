"""The byte permutes of `dequant`, executed on a model of a lane: what the compiler is given decodes every word rightly.

The interpreter cannot run assembly, so the operations are taken from Triton's intermediate code, and each of the few
PTX instructions is written out here, from NVIDIA's description of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
TABLE, MIRROR = np.arange(1, 9), np.arange(0x11, 0x19)
CODES = {2: 8, 3: 8, 4: 4}  # in a word


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    env = {**os.environ}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("triton_probe.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def prmt(a, b, selector):
    """Each nibble of the selector picks one of eight bytes; its bit 3 replicates that byte's sign bit instead."""
    octets = [(a >> (8 * i)) & 0xFF for i in range(4)] + [(b >> (8 * i)) & 0xFF for i in range(4)]
    result = np.zeros_like(a | b | selector)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 0xF
        octet = np.choose(nibble & 7, np.broadcast_arrays(*octets, nibble)[:8])
        octet = np.where(nibble & 8, np.where(octet & 0x80, 0xFF, 0), octet)
        result = result | (octet << (8 * i))
    return result


def run_ptx(text: str, registers: dict[str, np.ndarray]) -> None:
    """Instructions on 32-bit registers, each an int64 array with a lane an entry."""

    def value(operand: str) -> np.ndarray:
        if operand == "%lanemask_lt":
            return (1 << np.arange(32, dtype=np.int64)) - 1
        return registers[operand] if operand in registers else np.int64(int(operand, 0))

    for statement in text.strip("{} ").split(";"):
        opcode, *rest = statement.strip(" {}").split(None, 1)[:2] or [""]
        if not opcode or opcode == ".reg":
            continue
        target, *operands = [x.strip() for x in rest[0].split(",")]
        x = [value(operand) for operand in operands]
        operation = {
            "mov": lambda a: a,
            "and": lambda a, b: a & b,
            "xor": lambda a, b: a ^ b,
            "shr": lambda a, b: a >> b,
            "setp": lambda a, b: a == b,
            "selp": lambda a, b, p: np.where(p, a, b),
            "prmt": prmt,
        }[opcode.split(".")[0]]
        registers[target] = np.broadcast_to(np.asarray(operation(*x)), (32,))


def run_ttir(text: str, words: np.ndarray) -> list[np.ndarray]:
    """What the program stores, in order; words and integers as their low bits in int64. 32 elements, each its own lane.

    With packed_element = 2, an element's partner is the next one: both are computed in the lane of the even one.
    """
    values: dict[str, np.ndarray] = {}
    stored = []
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" = ")
        if "tt.load" in rest:
            values[name] = words
        elif "arith.constant" in rest and (found := re.search(r"dense<(-?\d+)>|constant (-?\d+) ", rest)):
            values[name] = np.int64(int(found[1] or found[2])) & 0xFFFFFFFF
        elif found := re.match(r"arith\.(\w+) (%\w+), (%\w+)", rest):
            if found[2] in values and found[3] in values:
                a, b = values[found[2]], values[found[3]]
                operation = {"andi": a & b, "addi": a + b, "muli": a * b, "shrsi": a >> b}[found[1]]
                values[name] = operation & 0xFFFFFFFF
        elif "tt.elementwise_inline_asm" in rest:
            values[name] = inline(rest, values)
        elif name.startswith("tt.store"):
            stored.append(values[re.match(r"tt\.store %\w+, (%\w+)", name)[1]])
    return stored


def inline(line: str, values: dict[str, np.ndarray]) -> np.ndarray:
    asm, pack = re.search(r'inline_asm "(.*?)" \{', line)[1], int(re.search(r"packed_element = (\d)", line)[1])
    (argument,) = re.findall(r"(%\w+)", line.split("}", asm.count("}") + 1)[-1].split(":")[0])
    x, kinds = values[argument], re.findall(r"tensor<32x(\w+)>", line)
    num_out = re.search(r'constraints = "(.*?)"', line)[1].count("=")
    pair = [x[0::2].repeat(2), x[1::2].repeat(2)]
    inputs = [x] if pack == 1 else [pair[0] | pair[1] << 16] if kinds[0] == "i16" else pair
    registers = {f"${num_out + i}": register for i, register in enumerate(inputs)}
    run_ptx(asm, registers)
    even = np.arange(32) % 2 == 0
    if pack == 1:
        return registers["$0"]
    if kinds[1] == "i32":
        return np.where(even, registers["$0"], registers["$1"])
    return np.where(even, registers["$0"] & 0xFFFF, registers["$0"] >> 16)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_code_in_every_place(programs, bits):
    rng = np.random.default_rng(0)
    for _ in range(200):
        codes = rng.integers(0, 2**bits, (32, CODES[bits]))
        words = (codes << (bits * np.arange(CODES[bits]))).sum(1)
        if bits == 3:
            words |= rng.integers(0, 256, 32) << 24  # what is above does not matter
        found = run_ttir(programs[str(bits)], words.astype(np.int64))
        assert len(found) == 8
        if bits == 4:
            positive = np.where(codes >= 8, TABLE[codes & 7], 0)
            negative = np.where(codes < 8, MIRROR[codes & 7], 0)
            expected = [*positive.T, *negative.T]
        else:
            expected = TABLE[codes].T
        for ours, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, right)
