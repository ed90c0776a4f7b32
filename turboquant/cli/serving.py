"""Options that `plan` and `simulate` share: a model, and how it would be served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from turboquant.planner.gpus import Gpu
    from turboquant.planner.serving import Serving
    from turboquant.planner.source import Source

Model = Annotated[str, typer.Argument(help="Folder of a model, its config.json, or a hub id.")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="B300, B200, H200, H100, A100, L40S, L4, RTX4090, ...")]
Memory = Annotated[str | None, typer.Option(help="Memory of a device, such as 288GiB, in place of --gpu's.")]
KvCacheMemory = Annotated[
    str | None, typer.Option(help="The pool alone, such as 64MiB: vLLM's --kv-cache-memory-bytes.")
]
Tp = Annotated[int, typer.Option(min=1, help="Devices of tensor parallelism.")]
KvCacheDtypes = Annotated[str, typer.Option("--kv-cache-dtype", help="Cache dtypes, comma-separated.")]
MaxModelLen = Annotated[str | None, typer.Option(help="Longest sequence; else the config's.")]
Dtype = Annotated[str, typer.Option(help="Of the model: auto, bfloat16, float16, float32.")]
Window = Annotated[
    int | None, typer.Option(min=0, help="Exact recent window.", show_default="64, or TURBOQUANT_WINDOW")
]
BlockSize = Annotated[int | None, typer.Option(min=1, help="vLLM's --block-size; else vLLM's default.")]
Device = Annotated[str, typer.Option(help="cuda or cpu: vLLM's default blocks differ.")]
PrefixCaching = Annotated[bool, typer.Option(help="As served; hybrids keep a second state with it.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(min=1, help="Else vLLM's default.")]
MaxNumSeqs = Annotated[int | None, typer.Option(min=1, help="Else vLLM's default.")]
MambaSsmDtype = Annotated[str | None, typer.Option(help="Of recurrent states; else the config's.")]
Utilization = Annotated[float, typer.Option("--gpu-memory-utilization", min=0.01, max=1, help="As vLLM's.")]
WeightsSize = Annotated[
    str | None, typer.Option("--weights", help="Size of the weights, such as 35GB, if not as counted.")
]
Reserve = Annotated[
    str | None, typer.Option(help="For activations, graphs and runtime, such as 6GiB, in place of the rule.")
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def make_serving(
    source: Source,
    gpu: Gpu | None,
    *,
    max_model_len: str | None,
    dtype: str,
    tp: int,
    device: str,
    block_size: int | None,
    window: int | None,
    prefix_caching: bool,
    max_num_batched_tokens: int | None,
    max_num_seqs: int | None,
    mamba_ssm_dtype: str | None,
) -> Serving:
    """As given, else as vLLM would serve this config.

    Raises:
        ValueError: the config has no length, or a value is unknown.
    """
    from turboquant.cli.sizes import parse_count
    from turboquant.planner.needs import default_batch
    from turboquant.planner.serving import Serving
    from turboquant.planner.shape import read_shape
    from turboquant.window import window_size

    shape = read_shape(source)
    length = parse_count("--max-model-len", max_model_len) if max_model_len else shape.max_model_len
    if not length:
        raise ValueError(f"{source.name} has no max_position_embeddings: give --max-model-len.")
    # vLLM serves float32 checkpoints in 16 bits unless told otherwise.
    served = ("bfloat16" if shape.dtype == "float32" else shape.dtype) if dtype == "auto" else dtype
    batched, sequences = default_batch(gpu)
    return Serving(
        served, length, tp, device, block_size, window_size(window), prefix_caching, max_num_batched_tokens or batched,
        max_num_seqs or sequences, mamba_ssm_dtype=mamba_ssm_dtype,
    )  # fmt: skip
