"""How much of a prefill is storing and attending? Whole layers in the real engine, random weights of a real shape.

    python benchmarks/prefill_share.py --shape llama-8b --layers 2 --context 8192 --output out/prefill-share.json

A layer's store and matmuls cost the same whatever its weights are, so that a few layers tell the share of all of them:
the embedding and the output head, which are left small here, would only lower it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

# hidden size, intermediate size, heads, KV heads
SHAPES = {"llama-8b": (4096, 14336, 32, 8), "llama-1b": (2048, 8192, 32, 8)}
VOCABULARY, POOL_BYTES = 1024, 2 << 30


def save(shape: str, layers: int, context: int, folder: Path) -> None:
    """A Llama of this shape with saved random weights, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, heads, kv_heads = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=kv_heads,
        num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=2 * context,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def timed(owner: Any, name: str, spent: dict[str, float]) -> None:
    """From now on, add the seconds that calls of owner.name take to spent[name]."""
    run: Callable = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = run(*args, **kwargs)
        spent[name] += time.perf_counter() - begin
        return result

    setattr(owner, name, wrapper)


def prefill(folder: Path, kv_cache_dtype: str, context: int, threads: int) -> dict[str, float]:
    """Seconds of one prompt's first token, and of what runs inside."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import SamplingParams

    from turboquant.evals.vllm_backend import running
    from turboquant.vllm import backend

    spent: dict[str, float] = defaultdict(float)
    for name in ("store_kv", "store_window", "attend"):
        timed(backend, name, spent)
    settings = {
        "kv_cache_dtype": kv_cache_dtype, "dtype": "float32", "max_model_len": context + 64, "max_num_seqs": 1,
        "kv_cache_memory_bytes": POOL_BYTES, "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "enforce_eager": True, "distributed_executor_backend": "uni", "disable_log_stats": True,
    }  # fmt: skip
    with running(folder, **settings) as llm:
        torch.set_num_threads(threads)
        tokens = torch.randint(10, VOCABULARY, (context,), generator=torch.Generator().manual_seed(0)).tolist()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": tokens[:64]}], params, use_tqdm=False)
        spent.clear()
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return {"total": time.perf_counter() - begin, **spent}


def main(
    shape: Annotated[str, typer.Option(help=f"Of the layers: {', '.join(SHAPES)}.")] = "llama-8b",
    layers: Annotated[int, typer.Option(min=1, help="How many; 0.9 GB each for llama-8b.")] = 2,
    context: Annotated[int, typer.Option(min=128, help="Tokens of the prompt.")] = 8192,
    kv_cache_dtype: Annotated[str, typer.Option(help="Format of the cache.")] = "turboquant3.5",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch and of the kernels.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file.")] = None,
) -> None:
    """Print what share of a prefill storing and attending take."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is no shape: choose one of {', '.join(SHAPES)}.")
    from turboquant.environment import environment_report

    with tempfile.TemporaryDirectory() as folder:
        save(shape, layers, context, Path(folder))
        seconds = prefill(Path(folder), kv_cache_dtype, context, threads)
    share = {name: round(value / seconds["total"], 5) for name, value in seconds.items() if name != "total"}
    result = {
        "shape": shape, "layers": layers, "context": context, "kv_cache_dtype": kv_cache_dtype, "threads": threads,
        "seconds": {name: round(value, 4) for name, value in seconds.items()}, "share_of_prefill": share,
        "environment": environment_report(),
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    typer.run(main)
