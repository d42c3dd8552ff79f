"""A report as one HTML file: tables and plots without anything to load, for a phone as for a desktop."""

from __future__ import annotations

import html
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cute_attn.bench.report import Grid, Row, error_figure, speed_panels

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8885; --shade: #8881; --accent: #2a7; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 78rem; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
ul.head, ul.notes { padding-left: 1.1rem; margin: .3rem 0; font-size: .85rem; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .8rem 0; font-size: .9rem; }
a { color: var(--accent); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: Canvas; border-bottom-width: 2px; }
th.t, td.t { text-align: left; }
td.t { white-space: pre; }
tr:nth-child(even) td { background: var(--shade); }
tr.end td { border-bottom: 2px solid var(--line); }
@media (max-width: 40rem) { table { font-size: .78rem; } th, td { padding: .25rem .4rem; } }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: .8rem; }
.plots figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .3rem; }
.plots svg { width: 100%; height: auto; display: block; }
"""


def grid_html(grid: Grid, anchor: str) -> str:
    """A table as a section of the page."""

    def cell(tag: str, position: int, text: str) -> str:
        left = ' class="t"' if position < grid.text_columns else ""
        return f"<{tag}{left}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", position, text) for position, text in enumerate(grid.headers))
    body = []
    for number, line in enumerate(grid.lines):
        cells = "".join(cell("td", position, text) for position, text in enumerate(line))
        body.append(f"<tr{' class=end' if number in grid.sections else ''}>{cells}</tr>")
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in grid.notes)
    return (
        f'<section id="{anchor}"><h2>{html.escape(grid.title)}</h2>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + "</section>"
    )


def figure_svg(figure: Any, prefix: str) -> str:
    """A matplotlib figure as an SVG element; `prefix` keeps its ids apart from those of other figures."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(id=")', rf"\1{prefix}-", text)
    text = re.sub(r"(url\(#|xlink:href=\"#)", rf"\1{prefix}-", text)
    return re.sub(
        r'<svg([^>]*?) width="[^"]*"',
        r"<svg\1",
        re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1),
        count=1,
    )


def page(
    title: str, head: Sequence[str], grids: Sequence[Grid], rows: Sequence[Row] = (), plots: str = "Plots"
) -> str:
    """The document.

    Args:
        title: of the page.
        head: what was measured on what, a line each.
        grids: tables.
        rows: of the record; timed ones and errors are drawn, where matplotlib is installed.
        plots: title of their section.
    """
    figures: list[str] = []
    try:
        drawn = [figure for _, figure in speed_panels(rows)]
        errors = error_figure(rows)
        drawn += [] if errors is None else [errors]
        figures = [figure_svg(figure, f"f{number}") for number, figure in enumerate(drawn)]
        missing = ""
    except ImportError:
        missing = "Without plots: matplotlib is not installed (pip install 'cute-attn[plot]')."
    sections = [grid_html(grid, f"t{number}") for number, grid in enumerate(grids)]
    links = "".join(f'<a href="#t{n}">{html.escape(grid.title)}</a>' for n, grid in enumerate(grids))
    drawing = ""
    if figures:
        links += '<a href="#plots">' + html.escape(plots) + "</a>"
        drawing = f'<section id="plots"><h2>{html.escape(plots)}</h2><div class="plots">'
        drawing += "".join(f"<figure>{figure}</figure>" for figure in figures) + "</div></section>"
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in [*head, *([missing] if missing else [])])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>"
        f'<ul class="head">{lines}</ul><nav>{links}</nav>{drawing}\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def write(
    path: str | os.PathLike[str],
    title: str,
    head: Sequence[str],
    grids: Sequence[Grid],
    rows: Sequence[Row] = (),
    plots: str = "Plots",
) -> None:
    """Write `page`.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(page(title, head, grids, rows, plots), encoding="utf-8")
