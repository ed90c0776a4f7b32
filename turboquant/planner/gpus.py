"""GPUs: memory, bandwidth and peak rates, from data sheets; and how fast our kernels' instructions let them read.

Memory is what `nvidia-smi` reports as total. Peak rates are dense. Nothing here was measured by this project.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from turboquant.formats import KVFormat
from turboquant.planner import PlanError

MIB = 2**20
# Lanes that a multiprocessor issues to in a cycle: 4 warps of 32.
LANES = 128


@dataclass(frozen=True)
class Gpu:
    """One device.

    Attributes:
        memory_mib: as nvidia-smi reports it.
        bandwidth: of its memory, bytes/s.
        bf16_flops, fp8_flops: dense, per second; fp8 is that of bf16 where there are no fp8 tensor cores.
        processors: streaming multiprocessors.
        clock_hz: boost clock.
        target: compute capability, as in sm_90.
    """

    name: str
    memory_mib: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    processors: int
    clock_hz: float
    target: int

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    @property
    def lane_instructions(self) -> float:
        """Lane-instructions per second, at most."""
        return self.processors * LANES * self.clock_hz


GPUS = {
    gpu.name: gpu
    for gpu in (
        # HGX B300 data sheet: 36 PFLOPS of sparse bf16 in 8 GPUs, 8 TB/s each. 148 multiprocessors.
        Gpu("B300", 275_040, 8.0e12, 2250e12, 4500e12, 148, 1.92e9, 103),
        # HGX B200 data sheet.
        Gpu("B200", 183_359, 8.0e12, 2250e12, 4500e12, 148, 1.85e9, 100),
        # H200 and H100 SXM data sheets.
        Gpu("H200", 143_771, 4.8e12, 989e12, 1979e12, 132, 1.98e9, 90),
        Gpu("H100", 81_559, 3.35e12, 989e12, 1979e12, 132, 1.98e9, 90),
        # A100 SXM data sheet.
        Gpu("A100", 81_920, 2.039e12, 312e12, 312e12, 108, 1.41e9, 80),
        Gpu("A100-40GB", 40_960, 1.555e12, 312e12, 312e12, 108, 1.41e9, 80),
        # L40S and L4 data sheets, half of the sparse figures.
        Gpu("L40S", 46_068, 0.864e12, 362e12, 733e12, 142, 2.52e9, 89),
        Gpu("L4", 23_034, 0.300e12, 121e12, 242e12, 58, 2.04e9, 89),
        # RTX A6000 data sheet; GeForce figures from the Ada and Blackwell white papers, fp32 accumulation.
        Gpu("A6000", 49_140, 0.768e12, 155e12, 155e12, 84, 1.80e9, 86),
        Gpu("RTX4090", 24_564, 1.008e12, 165e12, 330e12, 128, 2.52e9, 89),
        Gpu("RTX5090", 32_607, 1.792e12, 210e12, 419e12, 170, 2.41e9, 120),
    )
}

# Lane-instructions of the compiled decode kernel for each stored element of K or V, at head_dim 128 and 256 (GQA 4 and
# 8), by docs/results/kernels-sass.json: on sm_90 (taken for all older chips, too) and on sm_103.
LANES_PER_ELEMENT = {
    "turboquant2.5": {90: (3.184, 2.984), 103: (3.105, 2.945)},
    "turboquant3": {90: (3.738, 3.652), 103: (3.652, 3.605)},
    "turboquant3.5": {90: (3.574, 3.363), 103: (3.512, 3.316)},
    "turboquant4": {90: (3.375, 3.062), 103: (3.316, 3.047)},
}


def find_gpu(name: str) -> Gpu:
    """Raises:
    PlanError: not in the table; the message lists it.
    """
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    key = name.lower().replace(" ", "")
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {known[close[0]].name}?" if close else ""
        raise PlanError(
            f"unknown GPU {name!r}.{hint} Known: {', '.join(GPUS)}. For others give --memory, such as 48GiB."
        )
    return known[key]


def lanes_per_element(fmt: KVFormat, head_dim: int, gpu: Gpu) -> float:
    """Lane-instructions to unpack and use one stored element."""
    return LANES_PER_ELEMENT[fmt.name][103 if gpu.target >= 100 else 90][head_dim >= 256]
