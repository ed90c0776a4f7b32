"""The tables of a report, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from turboquant.evals.report_rows import EXACT, Group, Row, better
from turboquant.evals.results import CONFIDENCE, Finished, interval
from turboquant.evals.scores import BUCKETS, by_position

PERCENT = f"{100 * CONFIDENCE:.0f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown, with an empty line behind it."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def divergence_tables(group: Group) -> list[str]:
    """Over all texts, by text, and by position."""
    figures = (f"mean KL ({PERCENT})", "p99 KL", "same top-1", "top-5", "perplexity", "p")
    head = ("cache", "bits per element", "all held", *figures)
    rows = []
    for row, behind in zip(group.rows, [*group.rows[1:], None], strict=True):
        figures = row.divergence()
        rows.append((
            _name(row), f"{row.bits:.3f}", f"{row.bits_at_16:.3f}", _with_spread(figures["kl_mean"], row.spread),
            f"{figures['kl_p99']:.3f}", f"{figures['top1']:.1%}", _share(figures["top5"]),
            f"{figures['delta_ppl']:+.2%}", "" if behind is None else _p(better(row, behind)),
        ))  # fmt: skip
    lines = [f"Over {_over(group)}:", "", *table(head, rows)]
    if len(group.texts) > 1:
        lines += ["Mean KL by text:", "", *_by_text(group)]
    return [*lines, *position_table(group)]


def generic_table(group: Group) -> list[str]:
    """The primary figure of each text."""
    name = group.rows[0].primary.replace("_", " ")
    head = ("cache", "bits per element", "all held", *(f"{name}, {text} ({PERCENT})" for text in group.texts), "p")
    rows = [
        (_name(row), f"{row.bits:.3f}", f"{row.bits_at_16:.3f}", *_cells(group, row),
         "" if behind is None else _p(better(row, behind)))
        for row, behind in zip(group.rows, [*group.rows[1:], None], strict=True)
    ]  # fmt: skip
    return [*table(head, rows), *others_table(group)]


def others_table(group: Group) -> list[str]:
    """What else has an interval: means over texts."""
    primary = group.rows[0].primary
    names = [name.removesuffix("_interval") for name in group.rows[0].any.metrics if name.endswith("_interval")]
    names = [name for name in names if name not in ("primary", primary) and name in group.rows[0].any.metrics]
    rows = []
    for row in group.rows:
        cells = list(row.cells.values())
        spread = len(cells) == 1
        values = [[cell.metrics.get(name) for cell in cells] for name in names]
        rows.append((_name(row), *(
            "" if None in value else _with_spread(value[0], cells[0].metrics[f"{name}_interval"]) if spread
            else _number(sum(value) / len(value))
            for name, value in zip(names, values, strict=True)
        )))  # fmt: skip
    return table(("cache", *(name.replace("_", " ") for name in names)), rows) if names else []


def position_table(group: Group) -> list[str]:
    """Mean KL over equal ranges of the context."""
    rows, width = [], 0
    for row in group.rows:
        if row.label == EXACT or not (parts := _positions(row)):
            continue
        width = max(width, len(parts))
        rows.append((row.label, *(_number(x) for x in parts)))
    if not rows:
        return []
    head = ("cache", *(f"{i + 1}/{width}" for i in range(width)))
    return [
        f"Mean KL by position, from the start of the contexts to their end, {_over(group)}:",
        "",
        *table(head, rows),
    ]


def layers_table(group: Group) -> list[str]:
    """Mean KL with a single layer compressed."""
    found = [row for row in group.rows if row.any.metrics["layers"]]
    if not found:
        return []
    rows, layers = [], found[0].any.metrics["layers"]
    for row in found:
        means = [cell.metrics["kl_by_layer"] for cell in row.cells.values()]
        rows.append((row.label, *(_number(sum(column) / len(means)) for column in zip(*means, strict=True))))
    return ["Mean KL with one layer alone compressed:", "", *table(("cache", *map(str, layers)), rows)]


def pairs_section(groups: list[Group], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """One-sided paired tests.

    Raises:
        ValueError: a pair that no table has.
    """
    rows = []
    for first, second in pairs:
        found = [(group, a, b) for group in groups if (a := group.find(first)) and (b := group.find(second))]
        if not found:
            known = sorted({row.label for group in groups for row in group.rows})
            raise ValueError(f"{first}:{second}: no task has both caches. There are: {', '.join(known)}.")
        rows += [_pair(group, a, b) for group, a, b in found]
    figures = ("figures", f"difference ({PERCENT})", "blocks", "first better in", "p, first no better")
    head = ("first", "second", "on", "all held, bits", *figures)
    lines = ["## Paired tests", "", "The same blocks of the same texts, read from one cache and from the other."]
    return [*lines, "", *table(head, rows)]


def _pair(group: Group, a: Row, b: Row) -> tuple[str, ...]:
    texts = sorted(set(a.cells) & set(b.cells))
    mine, theirs = a.blocks(texts), b.blocks(texts)
    wins = (mine > theirs if a.higher_is_better else mine < theirs).double().mean().item()
    difference = mine - theirs
    return (
        _name(a), _name(b), f"{group.task}, {', '.join(texts)}", f"{a.bits_at_16:.3f} / {b.bits_at_16:.3f}",
        f"{_number(mine.mean().item())} / {_number(theirs.mean().item())}",
        _with_spread(difference.mean().item(), interval(difference, block=1)), str(len(mine)), f"{wins:.0%}",
        _p(better(a, b)),
    )  # fmt: skip


def conditions(cells: list[Finished]) -> list[str]:
    """Where the figures come from."""
    sources = {(Path(c.config["text"] or "").name, c.config["task"], digest) for c in cells if (digest := _digest(c))}
    calibrations = {c for cell in cells if (c := cell.config["settings"].get("calibration"))}
    machines = {
        f"{e['machine']} ({e['cpu_capability']}, {e['cpu_count']} cores, GPU: {e['gpu'] or 'none'}), "
        f"Python {e['python']}, " + ", ".join(f"{name} {version}" for name, version in e["versions"].items())
        for e in (cell.environment for cell in cells)
    }
    dtypes = sorted({d for cell in cells if (d := cell.config["settings"].get("dtype"))})
    lines = ["## What was measured, and on what", "", *LEGEND]
    lines += table(("data", "task", "SHA-256 of its tokens"), [(n, t, f"`{d}`") for n, t, d in sorted(sources)])
    lines += [f"- The models ran in {', '.join(dtypes)}."] if dtypes else []
    lines += [f"- Calibration: tensors with SHA-256 `{digest}`." for digest in sorted(calibrations)]
    return [*lines, *(f"- {machine}" for machine in sorted(machines))]


LEGEND = [
    "- KL in nats to the same model with an exact cache, over all scored positions; top-5: share of the exact model's "
    "five most likely tokens that are among the other's five; perplexity: its relative change.",
    f"- Intervals: {PERCENT}, bootstrap over blocks of neighbouring positions, or over samples. p: Wilcoxon's "
    "signed-rank test over the same blocks, one-sided, each row against the next one.",
    "- Bits per element: of a packed token, scales included, mean over layers. All held: at this context length, exact "
    "tokens at 16 bits, whatever the model ran in.",
    "- NAME@64: the newest 64 tokens and the first 4 exact. kivi without it: its own residual of up to 64. +boundary: "
    "the first and the last two layers exact. quanto, hqq: what Transformers' caches give back of a prompt in later "
    "steps; in its own forward pass they return it as it came in. Simulated: quantised and dequantised in an exact "
    "cache.",
    "",
]


def _over(group: Group) -> str:
    """The texts whose figures are taken together."""
    pooled = {row.pooled for row in group.rows}
    return ", ".join(pooled.pop()) if len(pooled) == 1 else "the texts of each row, which are not the same"


def _digest(cell: Finished) -> str | None:
    return cell.config["settings"].get("tokens_sha256")


def _name(row: Row) -> str:
    return f"{row.label} (simulated)" if row.simulated else row.label


def _by_text(group: Group) -> list[str]:
    rows = [(_name(row), *_cells(group, row)) for row in group.rows]
    return table(("cache", *(f"{text} ({PERCENT})" for text in group.texts)), rows)


def _cells(group: Group, row: Row) -> list[str]:
    cells = []
    for text in group.texts:
        metrics = row.cells[text].metrics if text in row.cells else None
        spread = metrics and metrics.get("primary_interval", metrics.get("kl_interval"))
        cells.append("" if metrics is None else _with_spread(metrics[row.primary], spread))
    return cells


def _positions(row: Row) -> list[float]:
    """Pooled over texts; empty where contexts are not equally long."""
    parts = []
    for cell in (row.cells[text] for text in row.pooled):
        settings = cell.config["settings"]
        contexts = settings["num_tokens"] // settings["context_length"]
        if not contexts or cell.scores.shape[1] % contexts:
            return []
        parts.append(by_position(cell.scores[0], contexts, BUCKETS))
    return [sum(column) / len(parts) for column in zip(*parts, strict=True)]


def _with_spread(value: float, spread: Sequence[float] | None) -> str:
    return f"{_number(value)} ({'too few' if spread is None else f'{_number(spread[0])} to {_number(spread[1])}'})"


def _number(value: float) -> str:
    """Four digits behind the point, or four in all for large ones."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1%}"


def _p(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2g}"
