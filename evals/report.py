"""One page from folders of results: tables, paired tests, and the picture of quality against bytes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from turboquant.evals.results import CONFIDENCE, Finished, Results, paired_p


def write_report(folders: list[Path], page: Path) -> Path:
    """Write a Markdown page and, beside it, its picture.

    Raises:
        ValueError: no finished cell in these folders.
        ImportError: matplotlib is not installed.
    """
    cells = [cell for folder in folders for cell in Results(folder).all()]
    if not cells:
        raise ValueError(
            f"no finished results in {', '.join(map(str, folders))}: run `turboquant eval --output` first."
        )
    groups = defaultdict(list)
    for cell in cells:
        groups[_what(cell)].append(cell)
    picture = page.with_suffix(".png")
    _draw(groups, picture)
    lines = ["# Divergence from the exact cache", "", f"![Quality against bytes]({picture.name})", ""]
    for what, members in sorted(groups.items()):
        lines += [f"## {what}", "", *_table(members), ""]
    lines += _conditions(cells)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines) + "\n")
    return page


def _what(cell: Finished) -> str:
    """What is comparable: the same task on the same text, model and back end."""
    config, settings = cell.config, cell.config["settings"]
    backend = {"hf": "Transformers", "vllm": "the vLLM engine"}[config["backend"]]
    shift = f", positions shifted by {settings['position_offset']:,}" if settings["position_offset"] else ""
    text = f"{config['task']} on {Path(config['text']).name}, {settings['context_length']:,} tokens{shift}"
    return f"{text}: {config['model']}, {backend}"


def _label(cell: Finished) -> str:
    calibrated = cell.config["settings"]["calibration"] and not cell.metrics["simulated"]
    notes = ["simulated"] * cell.metrics["simulated"] + ["calibrated"] * bool(calibrated)
    return cell.config["cache"] + (f" ({', '.join(notes)})" if notes else "")


def _table(cells: list[Finished]) -> list[str]:
    """Rows by quality; p is of the hypothesis that a row is no better than the next one."""
    cells = sorted(cells, key=lambda cell: cell.metrics["kl_mean"])
    percent = f"{CONFIDENCE:.0%}".replace("%", " %")
    head = (
        "cache",
        "bits per element",
        "with window",
        f"mean KL ({percent})",
        "p99 KL",
        "same top-1",
        "perplexity",
        "p",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell, behind in zip(cells, [*cells[1:], None], strict=True):
        m = cell.metrics
        p = "" if behind is None else f"{paired_p(cell.scores[0], behind.scores[0]):.2g}"
        spread = "too few" if m["kl_interval"] is None else "{:.4f} to {:.4f}".format(*m["kl_interval"])
        row = (
            _label(cell), f"{m['bits_per_element']:.3f}",
            f"{m['bits_per_element_with_window']:.3f}", f"{m['kl_mean']:.4f} ({spread})",
            f"{m['kl_p99']:.3f}", f"{m['top1']:.1%}", f"{m['delta_ppl']:+.2%}", p,
        )  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _conditions(cells: list[Finished]) -> list[str]:
    """Where the figures come from."""
    lines = [
        "KL in nats to the same model with an exact cache, over all scored positions; intervals by bootstrap over "
        "blocks of neighbouring positions; p by Wilcoxon's signed-rank test over the same blocks, each row against the "
        "next. Bits per element, scales included. NAME@64: the newest 64 tokens and the first 4 exact. Simulated: "
        "quantised and dequantised in an exact cache.",
        "",
        "| text | tokens, SHA-256 |",
        "|---|---|",
    ]
    hashes = {(Path(c.config["text"]).name, c.config["settings"]["tokens_sha256"]) for c in cells}
    lines += [f"| {name} | `{digest}` |" for name, digest in sorted(hashes)]
    machines = {
        f"{e['machine']} ({e['cpu_capability']}, {e['cpu_count']} cores, GPU: {e['gpu'] or 'none'}), "
        f"Python {e['python']}, " + ", ".join(f"{name} {version}" for name, version in e["versions"].items())
        for e in (cell.environment for cell in cells)
    }
    return [*lines, "", *(f"- {machine}" for machine in sorted(machines))]


def _draw(groups: dict[str, list[Finished]], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("the report's picture needs matplotlib: pip install 'turboquant-toolkit[eval]'") from error
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(8, 4.5 * len(groups)), squeeze=False, constrained_layout=True
    )
    for (what, cells), axis in zip(sorted(groups.items()), axes[:, 0], strict=True):
        for cell in cells:
            m = cell.metrics
            x, y = m["bits_per_element_with_window"], max(m["kl_mean"], 1e-9)
            axis.plot(x, y, "s" if m["simulated"] else "o", color="tab:gray" if m["simulated"] else "tab:blue")
            axis.annotate(_label(cell), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
        axis.set(yscale="log", xlabel="bits per element, window included", ylabel="mean KL, nats", title=what)
        axis.title.set_fontsize(8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
