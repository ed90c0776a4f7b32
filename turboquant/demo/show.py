"""The demonstration's result as tables: the two caches side by side, then their answers side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

FIGURES = (
    ("tokens that fit", "kv_tokens", ",.0f"),
    ("bytes per token", "kv_bytes_per_token", ",.0f"),
    ("tokens/s, all prompts", "tokens_per_second", ".1f"),
    ("tokens/s, short prompts", "short_tokens_per_second", ".1f"),
)


def show_report(report: dict[str, Any], console: Console) -> None:
    """Print what `run_demo` returned."""
    console.print()
    console.print(figures_table(report))
    console.print(answers_table(report))
    definitions = [f"{name}: {text}." for name, text in report["definitions"].items()]
    for line in (*definitions, *report["notes"]):
        console.print(line, style="dim", highlight=False)


def figures_table(report: dict[str, Any]) -> Table:
    """One row a figure, one column a cache."""
    exact, compressed = report["runs"]
    memory_mib = exact["kv_memory_bytes"] / 2**20
    table = Table(title=f"{report['model']}: {memory_mib:.0f} MiB of KV cache", title_justify="left")
    table.add_column("")
    for run in (exact, compressed):
        table.add_column(run["kv_cache_dtype"], justify="right")
    table.add_column("ratio", justify="right")
    for label, key, form in FIGURES:
        left, right = exact[key], compressed[key]
        table.add_row(label, format(left, form), format(right, form), f"{right / left:.2f}x")
    found = ["found" if run["passkey_found"] else "not found" for run in (exact, compressed)]
    table.add_row(f"passkey {report['passkey']}", *found, "")
    table.add_row("equal greedy tokens", "", f"{report['greedy_agreement']:.1%}", "")
    return table


def answers_table(report: dict[str, Any]) -> Table:
    """One row a prompt: both answers, and how many of their tokens are equal."""
    exact, compressed = report["runs"]
    table = Table(show_lines=True, title="Answers to the same prompts", title_justify="left")
    table.add_column("prompt", ratio=2)
    for run in (exact, compressed):
        table.add_column(run["kv_cache_dtype"], ratio=6)
    table.add_column("equal", justify="right", min_width=6)
    for left, right in zip(exact["outputs"], compressed["outputs"], strict=True):
        name = f"{left['name']}\n({left['prompt_tokens']} tokens)"
        share = report["greedy_agreement_by_prompt"][left["name"]]
        table.add_row(name, escape(left["text"].strip()), escape(right["text"].strip()), f"{share:.0%}")
    return table
