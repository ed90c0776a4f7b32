"""The pictures of a report: quality against bytes, needles by length and depth, and what each layer costs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from turboquant.evals.report_rows import EXACT, Group, Row

OURS, CALIBRATED, UPSTREAM, OTHERS = "tab:cyan", "tab:blue", "tab:red", "tab:gray"
SMALL = 7
FLOOR = 1e-9  # of a logarithmic axis


def draw_pareto(groups: list[Group], path: Path) -> None:
    """Mean KL against all bits that are held, a panel for each group."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(10, 6.5 * len(groups)), squeeze=False, constrained_layout=True
    )
    for group, axis in zip(groups, axes[:, 0], strict=True):
        rows = [row for row in group.rows if row.label != EXACT]
        for row in rows:
            face = _colour(row) if row.any.metrics.get("window") else "white"
            marker = "s" if "+boundary" in row.label else "o"
            axis.plot(row.bits_at_16, max(row.value, FLOOR), marker, color=_colour(row), markerfacecolor=face)
            axis.annotate(
                short_name(row.label), (row.bits_at_16, max(row.value, FLOOR)), xytext=(4, 3),
                textcoords="offset points", fontsize=SMALL, color=_colour(row),
            )  # fmt: skip
        for line in _series(rows):
            axis.plot([r.bits_at_16 for r in line], [r.value for r in line], color=_colour(line[0]), linewidth=0.7)
        front = _front(rows)
        axis.step([r.bits_at_16 for r in front], [r.value for r in front], where="post", color="black", linestyle=":")
        axis.set(yscale="log", xlabel="bits per element, all that is held", ylabel="mean KL, nats", title=group.title)
        axis.title.set_fontsize(9)
        axis.legend(handles=_legend(pyplot), fontsize=SMALL, loc="upper right")
    _save(figure, path)


def draw_needles(groups: list[Group], path: Path) -> None:
    """One map for each cache and task: the share of needles found by length and depth."""
    pyplot = _pyplot()
    maps = [(group, row, text) for group in groups for row in group.rows for text in row.cells]
    columns = min(4, len(maps))
    lines = -(-len(maps) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(3.2 * columns, 2.8 * lines), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat[len(maps) :]:
        axis.set_axis_off()
    for (group, row, text), axis in zip(maps, axes.flat, strict=False):
        grid = row.cells[text].metrics["grid"]
        lengths, depths = (sorted({entry[name] for entry in grid}) for name in ("length", "depth"))
        found = {(entry["length"], entry["depth"]): entry["accuracy"] for entry in grid}
        image = [[found.get((length, depth), float("nan")) for length in lengths] for depth in depths]
        shown = axis.imshow(image, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=SMALL)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=SMALL)
        axis.set_title(f"{group.task}: {row.label}\n{text}", fontsize=8)
    figure.colorbar(shown, ax=axes, label="needles found", shrink=0.6)
    _save(figure, path)


def draw_layers(groups: list[Group], path: Path) -> None:
    """Mean KL with a single layer compressed."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(10, 4 * len(groups)), squeeze=False, constrained_layout=True
    )
    for group, axis in zip(groups, axes[:, 0], strict=True):
        for row in group.rows:
            for text, cell in row.cells.items():
                kl = [max(x, FLOOR) for x in cell.metrics["kl_by_layer"]]
                axis.plot(cell.metrics["layers"], kl, marker=".", label=f"{row.label}, {text}")
        axis.set(yscale="log", xlabel="layer", ylabel="mean KL, nats", title=group.title)
        axis.legend(fontsize=SMALL)
    _save(figure, path)


def short_name(label: str) -> str:
    """Without what colour and shape tell already."""
    name = label.partition("@")[0].partition(" ")[0]
    return name.removeprefix("turboquant").removeprefix("_").removesuffix("+boundary")


def _colour(row: Row) -> str:
    if "turboquant_" in row.label:
        return UPSTREAM
    if row.any.metrics.get("simulated"):
        return OTHERS
    return CALIBRATED if "calibrated" in row.label else OURS


def _series(rows: list[Row]) -> list[list[Row]]:
    """Our presets of one kind, to be joined by a line."""
    series = defaultdict(list)
    for row in rows:
        if not row.any.metrics.get("simulated"):
            series[_colour(row), row.any.metrics.get("window")].append(row)
    return [sorted(found, key=lambda row: row.bits_at_16) for found in series.values()]


def _front(rows: list[Row]) -> list[Row]:
    """Those that no other row beats in both bits and quality."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.bits_at_16, row.value)):
        if not front or row.value < front[-1].value:
            front.append(row)
    return front


def _legend(pyplot: Any) -> list[Any]:
    def entry(colour: str, label: str, marker: str = "o", face: str | None = None):
        return pyplot.Line2D(
            [], [], color=colour, marker=marker, linestyle="", label=label, markerfacecolor=face or colour
        )

    return [
        entry(CALIBRATED, "turboquant, calibrated"),
        entry(OURS, "turboquant, uncalibrated"),
        entry(UPSTREAM, "vLLM's turboquant_*"),
        entry(OTHERS, "others"),
        entry("black", "without a window", face="white"),
        entry("black", "with an exact window"),
        entry("black", "first and last layers exact", marker="s", face="white"),
        pyplot.Line2D([], [], color="black", linestyle=":", label="no other is better in both"),
    ]


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the report's pictures need matplotlib: pip install 'turboquant-toolkit[eval]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
