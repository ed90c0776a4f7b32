"""Counting machine instructions: what the inner loop of a compiled kernel costs per element of the KV cache.

A lane-instruction is one instruction of one lane: an instruction of a warp counts 32. An element is one stored number
of K or V, so a tile of N tokens has 2·N·D of them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

WARP = 32
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)(.*)")


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions in order, opcode and operands."""

    instructions: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.instructions)

    def count(self, *prefixes: str) -> int:
        return sum(opcode.startswith(prefixes) for opcode, _ in self.instructions)

    def opcodes(self) -> Counter[str]:
        return Counter(opcode.split(".")[0] for opcode, _ in self.instructions)


def innermost_loops(sass: str) -> list[Loop]:
    """Bodies of all backward branches that contain no other backward branch, from nvdisasm's text."""
    labels, instructions = {}, []
    for line in sass.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append((found[1], found[2]))
    spans = []
    for i, (opcode, operands) in enumerate(instructions):
        target = re.search(r"\.L_x_\d+", operands) if opcode.startswith("BRA") else None
        if target and labels.get(target[0], i + 1) <= i:
            spans.append((labels[target[0]], i + 1))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [Loop(tuple(instructions[begin:end])) for begin, end in inner]


def main_loop(sass: str) -> Loop:
    """The loop that does the work of most tiles.

    With tensor cores: the shortest that uses them (ours has a second one, with masks, for the edges). Without: the
    longest.

    Raises:
        ValueError: there is none.
    """
    loops = innermost_loops(sass)
    if not loops:
        raise ValueError("no loop in the disassembly: was the kernel unrolled?")
    with_tensor_cores = [loop for loop in loops if loop.count("HMMA", "HGMMA", "QMMA", "IMMA", "UTCHMMA")]
    return min(with_tensor_cores, key=len) if with_tensor_cores else max(loops, key=len)


def per_element(loop: Loop, num_warps: int, tokens: int, head_dim: int) -> float:
    """Lane-instructions per element where one pass of `loop` does `tokens` tokens of one KV head."""
    return len(loop) * WARP * num_warps / (2 * tokens * head_dim)
