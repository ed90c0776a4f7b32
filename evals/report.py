"""One page from folders of results: tables, paired tests, and the picture of quality against bytes."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from turboquant.evals.plots import draw_layers, draw_needles, draw_pareto
from turboquant.evals.report_rows import Group, groups_of
from turboquant.evals.report_tables import conditions, divergence_tables, generic_table, layers_table, pairs_section
from turboquant.evals.results import Results

SUFFIXES = (".md", ".html")
TITLE = "Compressed KV caches beside the exact one"
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: 2px 8px; text-align: left; white-space: nowrap; }
img { max-width: 100%; }"""


def write_report(
    folders: Sequence[Path], page: Path, pairs: Sequence[tuple[str, str]] = (), title: str = TITLE
) -> Path:
    """Write a page, .md with its pictures beside it or .html with all in one file.

    Args:
        folders: what `turboquant eval --output` wrote.
        page: where to.
        pairs: labels of caches; is the first better than the second?
        title: of the page.

    Raises:
        ValueError: another kind of page, no finished cell in these folders, or a pair that is not there.
        ImportError: matplotlib or markdown-it-py is not installed.
    """
    if page.suffix not in SUFFIXES:
        raise ValueError(f"{page.name}: a page is written as {' or '.join(SUFFIXES)}.")
    cells = [cell for folder in folders for cell in Results(folder).all()]
    if not cells:
        raise ValueError(
            f"no finished results in {', '.join(map(str, folders))}: run `turboquant eval --output` first."
        )
    groups = groups_of(cells)
    tests = pairs_section(groups, pairs) if pairs else []
    page.parent.mkdir(parents=True, exist_ok=True)
    body = [line for group in groups for line in (f"## {group.title}", "", *_section(group))]
    with TemporaryDirectory() as scratch:
        # A .html holds its pictures.
        folder = page.parent if page.suffix == ".md" else Path(scratch)
        pictures = [f"![{what}]({name})\n" for name, what in _draw(groups, folder, page.stem)]
        text = "\n".join([f"# {title}\n", *pictures, *tests, *body, *conditions(cells), ""])
        page.write_text(text if page.suffix == ".md" else _as_html(text, title, folder))
    return page


def _section(group: Group) -> list[str]:
    if group.task == "layers":
        return [*generic_table(group), *layers_table(group)]
    return divergence_tables(group) if group.is_divergence else generic_table(group)


def _draw(groups: list[Group], folder: Path, stem: str) -> list[tuple[str, str]]:
    """The pictures that these results allow: their names in the folder, and what they show."""
    kinds = (
        ("", "Quality against bytes", draw_pareto, [g for g in groups if g.is_divergence]),
        ("-needles", "Needles found by length and depth", draw_needles, [g for g in groups if _has(g, "grid")]),
        ("-layers", "What each layer costs", draw_layers, [g for g in groups if _has(g, "kl_by_layer")]),
    )
    pictures = []
    for suffix, what, draw, chosen in kinds:
        if chosen:
            name = f"{stem}{suffix}.png"
            draw(chosen, folder / name)
            pictures.append((name, what))
    return pictures


def _has(group: Group, name: str) -> bool:
    return any(cell.metrics.get(name) for row in group.rows for cell in row.cells.values())


def _as_html(text: str, title: str, folder: Path) -> str:
    """One file, pictures in it."""
    try:
        from markdown_it import MarkdownIt
    except ImportError as error:
        raise ImportError("HTML pages need markdown-it-py: pip install markdown-it-py, or write a .md") from error
    body = MarkdownIt("commonmark").enable("table").render(text)

    def inline(match: re.Match) -> str:
        data = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = re.sub(r'src="([^"]+\.png)"', inline, body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>\n{STYLE}\n</style></head><body>\n{body}</body></html>\n"
    )
