"""Time of the Triton kernels on a GPU, against torch's bf16 attention and a copy of the same bytes.

    python benchmarks/cuda_attention.py --output results.json

Decode of one step: every sequence has the whole context in its pages. Each row has percentiles 20, 50 and 80 in ms, the
bytes of the packed cache, and the roofline fraction: time of a device copy that moves as many bytes against ours.
Correctness comes first: a row is only written if the output agrees with torch's attention over the dequantised cache's
source within what 3.5 bits allow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from turboquant.environment import environment_report
from turboquant.formats import KVFormat
from turboquant.kernels.interface import attend, store_kv
from turboquant.kv_quantizer import make_params

# Query heads, KV heads, head_dim of one attention layer.
MODELS = {"Qwen3.5-35B-A3B": (16, 2, 256), "Llama-3.1-8B": (32, 8, 128), "Qwen3-4B": (32, 8, 128)}
BATCHES = (1, 8, 32, 128)
CONTEXTS = (4096, 16384, 65536, 131072)
BLOCK_SIZE = 32
PERCENTILES = (0.2, 0.5, 0.8)
FLUSH_BYTES = 256 << 20
# Of the exact cache that a row compares with.
MAX_EXACT_BYTES = 64 << 30


def time_ms(launch: Callable[[], Any], repeats: int = 30) -> list[float]:
    """Percentiles 20, 50, 80 of one launch in ms, the L2 cache flushed before each."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        launch()
    spans = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    times = torch.tensor([begin.elapsed_time(end) for begin, end in spans])
    return [round(x, 5) for x in torch.quantile(times, torch.tensor(PERCENTILES)).tolist()]


def decode_case(model: str, batch: int, context: int, fmt: str) -> tuple[Callable, Callable, int]:
    """Our decode step, torch's on exact K and V, and the bytes of the packed cache."""
    heads, kv_heads, dim = MODELS[model]
    params = make_params(KVFormat.from_name(fmt), dim, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    per_seq = -(-context // BLOCK_SIZE)
    slot = params.fmt.slot_bytes(dim)
    pages = torch.zeros(batch * per_seq, kv_heads, BLOCK_SIZE, slot, dtype=torch.uint8, device="cuda")
    table = torch.randperm(batch * per_seq, generator=generator, device="cuda").to(torch.int32).view(batch, per_seq)
    keys = torch.randn(batch, context, kv_heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(batch, context, kv_heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(batch, heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(context, device="cuda")
    for i in range(batch):
        slots = table[i, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        store_kv(keys[i], values[i], pages, slots, at, params)
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)

    def ours() -> torch.Tensor:
        return attend(query, pages, table, seq_lens, starts, params, scale=dim**-0.5, out=out)

    exact = [x.transpose(1, 2) for x in (keys, values)]

    def torch_s() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, None], *exact, enable_gqa=True)[:, :, 0]

    return ours, torch_s, batch * context * kv_heads * slot


def run(models: list[str], batches: list[int], contexts: list[int], formats: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each combination whose exact cache fits.

    Raises:
        RuntimeError: no CUDA device, or a wrong result.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device here: these are times of GPU kernels.")
    for model in models:
        heads, kv_heads, dim = MODELS[model]
        for batch in batches:
            for context in contexts:
                if batch * context * kv_heads * dim * 4 > MAX_EXACT_BYTES:
                    continue
                for fmt in formats:
                    ours, torch_s, octets = decode_case(model, batch, context, fmt)
                    actual, expected = ours().float(), torch_s().float()
                    cosine = torch.nn.functional.cosine_similarity(actual.flatten(), expected.flatten(), dim=0).item()
                    if not cosine > 0.9:
                        raise RuntimeError(f"{model} {fmt}: cosine {cosine:.3f} with exact attention: wrong result.")
                    source = torch.empty(octets // 2, dtype=torch.uint8, device="cuda")
                    target = torch.empty_like(source)
                    ours_ms, torch_ms, copy_ms = (
                        time_ms(f) for f in (ours, torch_s, lambda a=target, b=source: a.copy_(b))
                    )
                    yield {
                        "model": model, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "batch": batch,
                        "context": context, "format": fmt, "bytes": octets, "ms": ours_ms, "torch_bf16_ms": torch_ms,
                        "copy_ms": copy_ms, "speedup": round(torch_ms[1] / ours_ms[1], 3),
                        "roofline_fraction": round(copy_ms[1] / ours_ms[1], 3), "cosine": round(cosine, 5),
                    }  # fmt: skip


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of each.")] = None,
    format: Annotated[list[str] | None, typer.Option(help="Presets.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the rows as JSON.")] = None,
) -> None:
    """Time a decode step of attention on a GPU."""
    rows = []
    try:
        for row in run(model or [*MODELS], batch or [*BATCHES], context or [*CONTEXTS], format or ["turboquant3.5"]):
            rows.append(row)
            print(json.dumps(row), flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    table = Table(title=f"Decode attention on {torch.cuda.get_device_name()}")
    for name in ("model", "format", "batch", "context", "ms", "torch_bf16_ms", "speedup", "roofline_fraction"):
        table.add_column(name)
    for row in rows:
        shown = [row[c] for c in ("model", "format", "batch", "context")]
        shown += [row["ms"][1], row["torch_bf16_ms"][1], row["speedup"], row["roofline_fraction"]]
        table.add_row(*map(str, shown))
    Console().print(table)
    if output:
        output.write_text(json.dumps({"environment": environment_report(), "rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
