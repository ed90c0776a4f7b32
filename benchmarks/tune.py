"""Choose tilings of the packed kernel on the GPU at hand, by time, and write them where the kernels look for them.

    python benchmarks/tune.py

A decode step of a few layer shapes; the fastest of a small set of tilings each. Without a GPU there is nothing to
measure, and the built-in choice (by instruction counts) stays.
"""

from __future__ import annotations

import itertools
import sys

import torch
import typer
from cuda_attention import decode_case, time_ms

from turboquant.kernels.triton import config
from turboquant.kernels.triton.config import Tiling

TOKENS, WARPS, STAGES = (16, 32, 64), (1, 2, 4), (1, 2, 3, 4)
MODELS = ("Qwen3.5-35B-A3B", "Llama-3.1-8B")
BATCH, CONTEXT = 8, 16384


def candidates(head_dim: int) -> list[Tiling]:
    """Pruned: more than 32 tokens spill at D=128 with one warp, and four warps have work for two at most."""
    return [
        Tiling(n, w, s)
        for n, w, s in itertools.product(TOKENS, WARPS, STAGES)
        if w <= (2 if head_dim > 128 else 1) * (2 if n == 64 else 1) and n * s <= 128
    ]


def main() -> None:
    """Measure and write the tuned tilings of this GPU."""
    if not torch.cuda.is_available():
        print("error: no CUDA device here; the built-in tilings stay in use.", file=sys.stderr)
        raise typer.Exit(1)
    best = {}
    for model in MODELS:
        ours, _, _ = decode_case(model, BATCH, CONTEXT, "turboquant3.5")
        head_dim = 256 if model == "Qwen3.5-35B-A3B" else 128
        times = {}
        for tiling in candidates(head_dim):
            with config.forced(tiling):
                times[tiling] = time_ms(ours)[1]
            print(f"{model} {tiling}: {times[tiling]:.4f} ms", flush=True)
        best[str(head_dim)] = min(times, key=times.get)
    print(f"written: {config.write_tuned(best)}")


if __name__ == "__main__":
    typer.run(main)
