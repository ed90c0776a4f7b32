"""How a launch is cut into programs: from shapes and the device alone, never from lengths on the device."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import triton

MIN_COLUMNS = 8  # a tensor core's width
PREFILL_COLUMNS = {128: 32, 256: 16, 1024: 8}  # by head_dim, as far as registers reach
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64

_forced: Tiling | None = None


@dataclass(frozen=True)
class Tiling:
    """How `packed_kernel` is compiled.

    Attributes:
        tokens: N, tokens in a tile.
        num_warps, num_stages: as Triton has them.
    """

    tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """One launch.

    Attributes:
        rows: BQ, query rows in a tile.
        padded_group: GP, columns that a query row's heads take up.
        splits: into how many parts a sequence's pages go.
        tiling: of the packed pages.
    """

    rows: int
    padded_group: int
    splits: int
    tiling: Tiling

    @property
    def columns(self) -> int:
        return self.rows * self.padded_group


# float32 queries at head dims above 128 fit no chip's registers with any one tiling; by compute capability.
WIDE_FLOAT32 = {100: Tiling(64, 8, 1), 120: Tiling(16, 8, 2)}


def default_tiling(head_dim: int, columns: int, has_mean: bool, is_float32: bool, capability: int = 0) -> Tiling:
    """Chosen by counting instructions and registers of the compiled kernels (docs/kernels.md).

    Args:
        capability: compute capability times ten, 0 for none.
    """
    if is_float32 and head_dim > 128:
        return WIDE_FLOAT32.get(capability, Tiling(tokens=32, num_warps=16, num_stages=1))
    if is_float32:
        return Tiling(tokens=32, num_warps=8, num_stages=1)
    if has_mean and (columns > 8 or head_dim > 128):
        return Tiling(tokens=32, num_warps=8, num_stages=2)
    if columns > 8:
        return Tiling(tokens=32, num_warps=4, num_stages=2)
    return Tiling(tokens=32, num_warps=2 if head_dim > 128 else 1, num_stages=2)


def prefill_columns(head_dim: int, has_mean: bool) -> int:
    """M of a full tile of queries."""
    if has_mean and head_dim > 128:
        return MIN_COLUMNS
    return next((columns for dim, columns in PREFILL_COLUMNS.items() if head_dim <= dim), MIN_COLUMNS)


def plan(
    num_rows: int, num_seqs: int, num_kv_heads: int, group: int, head_dim: int, block_size: int, max_blocks: int,
    device: torch.device, has_mean: bool, is_float32: bool,
) -> Plan:  # fmt: skip
    """For `num_rows` query rows of `num_seqs` sequences, whose block tables are `max_blocks` wide."""
    width = triton.next_power_of_2(group)
    least = 16 if torch.version.hip else MIN_COLUMNS
    per_seq = triton.next_power_of_2(max(1, num_rows // max(num_seqs, 1)))
    rows = min(per_seq, max(1, prefill_columns(head_dim, has_mean) // width))
    padded = max(width, least // rows)
    tiles = num_rows if rows == 1 else num_rows // rows + num_seqs
    programs = max(1, tiles * num_kv_heads)
    wanted = -(-programs_that_fill(device) // programs)
    most = max(1, max_blocks * block_size // MIN_SPLIT_TOKENS)
    tiling = default_tiling(head_dim, rows * padded, has_mean, is_float32, capability(device))
    if rows == 1 and not has_mean and not is_float32:
        tiling = _forced or tuned(device).get(head_dim, tiling)
    return Plan(rows, padded, max(1, min(wanted, most, MAX_SPLITS)), tiling)


def capability(device: torch.device) -> int:
    """Compute capability times ten; 0 where there is none."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def programs_that_fill(device: torch.device) -> int:
    """About how many programs of `packed_kernel` keep a device busy; in the interpreter two, so that splits occur."""
    if device.type != "cuda":
        return 2
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def forced(tiling: Tiling) -> Iterator[None]:
    """Every plan of one query row a tile takes this tiling."""
    global _forced
    _forced = tiling
    try:
        yield
    finally:
        _forced = None


def tuned_file(gpu: str) -> Path:
    """Where this GPU's tilings are kept."""
    return Path(__file__).parent / "tuned" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def write_tuned(best: dict[str, Tiling]) -> Path:
    """Keep the best tiling by head_dim for the current GPU."""
    file = tuned_file(torch.cuda.get_device_name())
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({dim: asdict(tiling) for dim, tiling in best.items()}, indent=1) + "\n")
    tuned.cache_clear()
    return file


@functools.cache
def tuned(device: torch.device) -> dict[int, Tiling]:
    """Measured tilings of decode by head_dim; empty where this GPU has not been tuned, or is none."""
    if device.type != "cuda":
        return {}
    file = tuned_file(torch.cuda.get_device_name(device))
    if not file.exists():
        return {}
    return {int(dim): Tiling(**fields) for dim, fields in json.loads(file.read_text()).items()}
