"""Tables, files and plots of benchmark rows."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from cute_attn.bench.gradients import FLOP_FACTORS
from cute_attn.bench.peers import COPIES, OURS
from cute_attn.bench.record import ROW_FIELDS

Row = Mapping[str, Any]
# head_dim, causal, seqlen_k, seqlen_q, batch, heads_q, heads_k, window_left, window_right, tokens, page_size; a
# window's end is -1 where there is none, tokens are 0 but for sequences of unlike length, page_size is 0 without pages
CaseKey = tuple[int, bool, int, int, int, int, int, int, int, int, int]

TITLES = {
    "forward": "Forward, prepared operands to output",
    "quantize": "Quantiser, 16-bit Q, K, V to 8-bit operands",
    "whole_call": "Whole call, 16-bit Q, K, V to output",
    "prefill": "Forward over sequences of unlike length, with a sliding window, over a KV cache",
    "decode": "One query for each sequence against a KV cache, bytes of the cache",
    "backward": "Backward, the gradients of 16-bit Q, K, V",
    "train": "Forward and backward, 16-bit Q, K, V to their gradients",
}


# by length; prefill has none, decode another batch for each
PLOTTED = ("forward", "quantize", "whole_call", "backward", "train")
BY_BYTES = ("quantize", "decode")  # phases whose speed is TB/s


def label(row: Row) -> str:
    """Column of a row: provider, then the recipe of ours or the precision of a peer."""
    kind = " deterministic" if row.get("deterministic") else ""
    return f"{row['provider']} {row['recipe'] or row['dtype']}{kind}"


def case_key(row: Row) -> CaseKey:
    """What makes two rows cells of the same line."""
    return (
        row["head_dim"],
        row["causal"],
        row["seqlen_k"],
        row["seqlen_q"],
        row["batch"],
        row["heads_q"],
        row["heads_k"],
        row.get("window_left", -1),
        row.get("window_right", -1),
        row.get("tokens", 0),
        row.get("page_size", 0),
    )


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean, None of nothing.

    Raises:
        ValueError: a value is not positive.
    """
    found = list(values)
    if any(not value > 0 for value in found):
        raise ValueError(f"a geometric mean needs positive values, got {found}")
    return math.exp(math.fsum(math.log(value) for value in found) / len(found)) if found else None


@dataclass(frozen=True)
class Pivot:
    """Speed of one phase as a table: a line for each case, a column for each contender."""

    phase: str
    unit: str  # "TFLOP/s" or "TB/s"
    lines: list[CaseKey]
    ours: list[str]  # labels
    peers: list[str]
    rows: dict[tuple[CaseKey, str], Row]

    def speed(self, line: CaseKey, column: str) -> float | None:
        """The value of a cell, None where the contender was not timed."""
        row = self.rows.get((line, column))
        if row is None:
            return None
        value: float | None = row["tbps" if self.unit == "TB/s" else "tflops"]
        return value

    def rate(self, line: CaseKey, column: str) -> float | None:
        """What contenders are compared by: the speed, or in phase decode, whose caches differ in bytes, calls in a time
        (as FLOP, of which a copy has none)."""
        if self.phase != "decode":
            return self.speed(line, column)
        row = self.rows.get((line, column))
        value: float | None = None if row is None else row["tflops"]
        return value

    def best_peer(self, line: CaseKey) -> tuple[str, float] | None:
        """The fastest peer of a line, of any precision."""
        timed = [(peer, rate) for peer in self.peers if (rate := self.rate(line, peer)) is not None]
        return max(timed, key=lambda item: item[1]) if timed else None

    def ratio(self, line: CaseKey, column: str, peer: str | None = None) -> float | None:
        """Speed of `column` over that of `peer`, or of the best peer of the line."""
        own = self.rate(line, column)
        if peer is None:
            best = self.best_peer(line)
            other = None if best is None else best[1]
        else:
            other = self.rate(line, peer)
        return None if own is None or other is None else own / other


def pivot(rows: Iterable[Row], phase: str) -> Pivot:
    """Arrange the rows of `phase`; lines are sorted by head_dim, mask and length, columns stay in order of
    appearance.

    Raises:
        ValueError: two rows fall into one cell.
    """
    cells: dict[tuple[CaseKey, str], Row] = {}
    columns: dict[str, bool] = {}  # label -> ours
    for row in rows:
        if row["phase"] != phase:
            continue
        key = (case_key(row), label(row))
        if key in cells:
            raise ValueError(f"two rows for {label(row)} at {case_key(row)}")
        cells[key] = row
        columns[label(row)] = row["provider"] == OURS
    return Pivot(
        phase=phase,
        unit="TB/s" if phase in BY_BYTES else "TFLOP/s",
        lines=sorted({line for line, _ in cells}),
        ours=[name for name, own in columns.items() if own],
        peers=[name for name, own in columns.items() if not own],
        rows=cells,
    )


@dataclass
class Grid:
    """A table independent of where it is shown."""

    title: str
    headers: list[str]
    lines: list[list[str]] = field(default_factory=list)
    sections: set[int] = field(default_factory=set)  # lines that a rule follows
    notes: list[str] = field(default_factory=list)
    text_columns: int = 1  # leading columns that are aligned to the left

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(
            title=self.title,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            title_style="bold",
            caption_justify="left",
        )
        for position, header in enumerate(self.headers):
            left = position < self.text_columns
            table.add_column(header, justify="left" if left else "right", overflow="fold")
        for number, line in enumerate(self.lines):
            table.add_row(*line, end_section=number in self.sections)
        table.caption = "\n".join(self.notes) or None
        return table

    def markdown(self) -> str:
        """For a document."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

        rule = ["---" if i < self.text_columns else "---:" for i in range(len(self.headers))]
        parts = [f"### {self.title}", "", line(self.headers), line(rule), *map(line, self.lines), ""]
        for note in self.notes:
            parts += [note, ""]
        return "\n".join(parts)


def _number(value: float | None, unit: str = "TFLOP/s") -> str:
    return "-" if value is None else f"{value:.2f}" if unit == "TB/s" else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _cell(result: Pivot, line: CaseKey, column: str) -> str:
    row = result.rows.get((line, column))
    if row is not None and row["status"] != "ok":
        return "n/a" if row["status"] == "unavailable" else str(row["status"])
    return _number(result.speed(line, column), result.unit)


def speed_grids(rows: Sequence[Row]) -> list[Grid]:
    """Tables of all timed phases: speed by case, speed relative to each peer, and what ran."""
    grids: list[Grid] = []
    for phase in dict.fromkeys(row["phase"] for row in rows if row["phase"] in TITLES):
        result = pivot(rows, phase)
        grids.append(_speed_grid(result))
        if result.ours and result.peers:
            grids.append(_relative_grid(result))
        if phase == "decode":
            grids.append(_latency_grid(result))
        grids.append(_what_ran_grid(result))
    return grids


def _speed_grid(result: Pivot) -> Grid:
    compared = bool(result.ours and result.peers)
    grid = Grid(
        f"{TITLES[result.phase]}: {result.unit}",
        ["d", "mask", "seqlen", "b x h", *result.ours, *result.peers],
        text_columns=2,
    )
    if compared:
        many = len(result.ours) > 1
        grid.headers += ["best peer", *(f"{name} / best" if many else "ours / best" for name in result.ours)]
    if result.ours:
        grid.headers += [f"{name} rel RMSE" if len(result.ours) > 1 else "rel RMSE" for name in result.ours]
    for number, line in enumerate(result.lines):
        head_dim, causal, seqlen_k, seqlen_q, batch, heads_q, heads_k, left, right, tokens, pages = line
        length = str(seqlen_k) if seqlen_q == seqlen_k else f"{seqlen_q}x{seqlen_k}"
        length += f", pages of {pages}" if pages else ""
        length = f"<= {seqlen_k}, {tokens} in all" if tokens else length
        heads = str(heads_q) if heads_q == heads_k else f"{heads_q}/{heads_k}"
        mask = "causal" if causal else "full"
        mask += f", window {left},{right}" if (left, right) != (-1, -1) else ""
        cells = [str(head_dim), mask, length, f"{batch} x {heads}"]
        cells += [_cell(result, line, column) for column in result.ours + result.peers]
        if compared:
            best = result.best_peer(line)
            cells.append("-" if best is None else best[0])
            cells += [_ratio(result.ratio(line, column)) for column in result.ours]
        for column in result.ours:
            error = result.rows[line, column]["rel_rmse"] if (line, column) in result.rows else None
            cells.append("-" if error is None else f"{error:.2%}")
        grid.lines.append(cells)
        if number + 1 < len(result.lines) and result.lines[number + 1][:2] != line[:2]:
            grid.sections.add(number)
    if result.unit == "TFLOP/s":
        operations = 4 * FLOP_FACTORS.get(result.phase, 1.0)
        grid.notes.append(
            f"FLOP = {operations:g} x seqlen_q x seqlen_k x head_dim x heads x batch, half of it for a causal mask"
            + (
                "; of the pairs that a window leaves, and of each sequence by itself."
                if result.phase == "prefill"
                else "."
            )
        )
    if result.ours:
        what = "gradients" if result.phase in FLOP_FACTORS else "output"
        grid.notes.append(
            f"rel RMSE: error of our {what} on N(0, 1) inputs against float64, on sampled rows."
        )
    return grid


def _latency_grid(result: Pivot) -> Grid:
    """Microseconds of a call, and our share of what the copy moved in the same rounds."""
    copies = [name for name in result.peers if name.split()[0] in COPIES]
    contenders = [name for name in result.ours + result.peers if name not in copies]
    grid = Grid(
        f"{TITLES[result.phase]}: microseconds of a call",
        [
            "d",
            "seqlen",
            "b x h",
            *contenders,
            *(f"{name} / {copy.split()[0]}" for name in result.ours for copy in copies),
        ],
        text_columns=1,
    )
    for line in result.lines:
        head_dim, _, seqlen_k, _, batch, heads_q, heads_k, *_, pages = line
        heads = str(heads_q) if heads_q == heads_k else f"{heads_q}/{heads_k}"
        length = str(seqlen_k) + (f", pages of {pages}" if pages else "")
        cells = [str(head_dim), length, f"{batch} x {heads}"]
        for name in contenders:
            ms = result.rows[line, name]["ms"] if (line, name) in result.rows else None
            cells.append("-" if ms is None else f"{ms * 1e3:.1f}")
        for name in result.ours:
            for copy in copies:
                own, copied = result.speed(line, name), result.speed(line, copy)
                cells.append(_ratio(own / copied if own and copied else None))
        grid.lines.append(cells)
    grid.notes.append(
        "By a CUDA graph, without the host; small caches in turn, so that L2 does not hold them. The copy reads 1 GiB "
        "and writes as much: both count. copy_cache reads and writes as many bytes as the cache has, in such a graph."
    )
    if any(row.get("full_caches") for row in result.rows.values()):
        grid.notes.append("Nobody was given lengths: all caches are full.")
    return grid


def _relative_grid(result: Pivot) -> Grid:
    """Geometric means of our speed over each peer's, on the cells where both were timed."""
    head_dims = sorted({line[0] for line in result.lines})
    grid = Grid(
        f"{TITLES[result.phase]}: our speed over theirs, geometric mean",
        ["ours", "peer", *(f"d {d}" for d in head_dims), "all", "seqlen >= 4096", "cells"],
        text_columns=2,
    )
    for number, column in enumerate(result.ours):
        for peer in (None, *result.peers):
            ratios = {
                line: ratio
                for line in result.lines
                if (ratio := result.ratio(line, column, peer)) is not None
            }
            if not ratios:
                continue
            groups = [[r for line, r in ratios.items() if line[0] == d] for d in head_dims]
            groups += [list(ratios.values()), [r for line, r in ratios.items() if line[2] >= 4096]]
            grid.lines.append(
                [
                    column,
                    peer or "best of the cell",
                    *(_ratio(geometric_mean(g)) for g in groups),
                    str(len(ratios)),
                ]
            )
        if grid.lines and number + 1 < len(result.ours):
            grid.sections.add(len(grid.lines) - 1)
    return grid


def _what_ran_grid(result: Pivot) -> Grid:
    """One line for each contender: kernels, errors, memory; reasons of the cells without a time follow."""
    grid = Grid(
        f"{TITLES[result.phase]}: what ran",
        ["contender", "kernel", "timed", "rel RMSE max", "peak memory max"],
        text_columns=2,
    )
    for column in result.ours + result.peers:
        rows = [result.rows[line, column] for line in result.lines if (line, column) in result.rows]
        kernels = list(dict.fromkeys(row["kernel"] for row in rows if row["kernel"]))
        errors = [row["rel_rmse"] for row in rows if row["rel_rmse"] is not None]
        peaks = [row["peak_bytes"] for row in rows if row["peak_bytes"] is not None]
        grid.lines.append(
            [
                column,
                "\n".join(kernels) or "-",
                f"{sum(row['status'] == 'ok' for row in rows)} of {len(rows)}",
                f"{max(errors):.2%}" if errors else "-",
                f"{max(peaks) / 2**20:.0f} MiB" if peaks else "-",
            ]
        )
        reasons: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row["status"] != "ok":
                reasons.setdefault((row["status"], row["reason"]), []).append(row)
        for (status, reason), group in reasons.items():
            where = "all cells" if len(group) == len(rows) else _where(group)
            grid.notes.append(f"{column}, {where}: {status}: {reason}")
    return grid


def _where(rows: Sequence[Row]) -> str:
    """Cells in words, few of them by name."""
    names = [f"d {r['head_dim']} {'causal' if r['causal'] else 'full'} {r['seqlen_k']}" for r in rows]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def error_grid(rows: Sequence[Row]) -> Grid | None:
    """Error of the kernel alone by number of keys, from the rows of `lengths.measure`; None without any."""
    found = [row for row in rows if row["phase"] == "accuracy_kernel" and row.get("v_mean") is not None]
    if not found:
        return None
    lengths = sorted({row["seqlen_k"] for row in found})
    grid = Grid(
        "Error of the kernel alone by number of keys, relative to the rms of the output",
        ["recipe", "d", "V mean", "what ran", *map(str, lengths)],
        text_columns=4,
    )
    groups: dict[tuple[str, int, float, str], dict[int, Row]] = {}
    for row in found:
        key = (row["recipe"], row["head_dim"], row["v_mean"], row["backend"])
        groups.setdefault(key, {})[row["seqlen_k"]] = row
    for (recipe, head_dim, mean, backend), by_length in groups.items():
        cells = [by_length.get(length) for length in lengths]
        grid.lines.append(
            [recipe, str(head_dim), f"{mean:g}", backend]
            + ["-" if row is None or row["rel_rmse"] is None else f"{row['rel_rmse']:.2e}" for row in cells]
        )
    grid.notes.append(
        "Against float64 attention on the dequantised operands: what quantising Q, K, V cost is not in it."
    )
    return grid


def accuracy_grid(rows: Sequence[Row]) -> Grid | None:
    """Total error by input and recipe, for documents; None where there are no such rows."""
    found = [row for row in rows if row["phase"] == "accuracy_total"]
    if not found:
        return None
    grid = Grid(
        "Error of 8-bit attention against float64",
        ["input", "recipe", "what ran", "RMSE", "rel RMSE", "max error", "cosine", "vs naive"],
        text_columns=3,
    )
    for row in found:
        numbers = (
            row["rmse"],
            row["rel_rmse"],
            row.get("max_abs_err"),
            row.get("cosine"),
            row.get("ratio_to_naive"),
        )
        formats = ("{:.3e}", "{:.2%}", "{:.3e}", "{:.6f}", "{:.2f}x")
        shown = ["-" if x is None else f.format(x) for x, f in zip(numbers, formats, strict=True)]
        grid.lines.append([str(row.get("input", "")), row["recipe"], row["backend"], *shown])
    groups: dict[tuple[str, str], list[float]] = {}
    for row in found:
        if row.get("ratio_to_naive"):
            groups.setdefault((str(row.get("source", "")), row["recipe"]), []).append(row["ratio_to_naive"])
    for (source, recipe), ratios in groups.items():
        grid.notes.append(
            f"Geometric mean over {len(ratios)} {source} inputs, {recipe}: {geometric_mean(ratios):.2f}x."
        )
    return grid


# --- files


def write_csv(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """The rows as CSV: the record's fields, then whatever else the rows hold."""
    extra = dict.fromkeys(key for row in rows for key in row if key not in ROW_FIELDS)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*ROW_FIELDS, *extra], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_markdown(path: str | os.PathLike[str], head: Sequence[str], grids: Sequence[Grid]) -> None:
    """A document: what was measured on what, then the tables."""
    text = "\n".join(["## cute_attn benchmark", "", *(f"- {line}" for line in head), ""])
    Path(path).write_text(text + "\n" + "\n".join(grid.markdown() for grid in grids), encoding="utf-8")


class PlotUnavailable(RuntimeError):
    """matplotlib is not installed."""


def need_matplotlib() -> None:
    """Raise PlotUnavailable, naming the extra to install, where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotUnavailable(
            f"--plot needs matplotlib ({error}): pip install 'cute-attn[plot]', or leave --plot out"
        ) from error


def plot(path: str | os.PathLike[str], rows: Sequence[Row], title: str) -> None:
    """Draw speed by length (a panel for each phase, head_dim and mask); where nothing was timed, error by
    recipe.

    Raises:
        PlotUnavailable: matplotlib is not installed.
        ValueError: there is nothing to draw, or the file's type is unknown to matplotlib.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["phase"] in PLOTTED and row["ms"] is not None]
    errors = [row for row in rows if row["phase"] == "accuracy_total" and row["rel_rmse"]]
    if timed:
        figure = _plot_speed(Figure, timed)
    elif errors:
        figure = _plot_errors(Figure, errors)
    else:
        raise ValueError("nothing to draw: no contender was timed and no error was measured")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def speed_panels(rows: Sequence[Row]) -> list[tuple[str, Any]]:
    """(title, figure) of speed by length, one for each phase, head_dim and mask; for a page that wraps them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["phase"] in TITLES and row["ms"] is not None]
    labels = list(dict.fromkeys(label(row) for row in timed))
    panels = []
    for panel in sorted({(row["phase"], row["head_dim"], row["causal"]) for row in timed}):
        figure = Figure(figsize=(4.8, 3.4), layout="constrained")
        axes = figure.add_subplot()
        _speed_panel(axes, timed, panel, labels)
        axes.legend(fontsize=7, loc="lower right")
        panels.append((axes.get_title(), figure))
    return panels


def error_figure(rows: Sequence[Row]) -> Any:
    """Figure of errors by input and recipe; None where there are none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    errors = [row for row in rows if row["phase"] == "accuracy_total" and row["rel_rmse"]]
    if not errors:
        return None
    figure = _plot_errors(Figure, errors)
    figure.set_size_inches(max(4.8, 0.8 * len({row.get("input") for row in errors})), 3.4)
    figure.set_layout_engine("constrained")
    return figure


def _speed_panel(axes: Any, rows: Sequence[Row], panel: tuple[str, int, bool], labels: Sequence[str]) -> None:
    phase, head_dim, causal = panel
    value = "tbps" if phase in BY_BYTES else "tflops"
    for name in labels:
        points = sorted(
            (row["seqlen_k"], row[value])
            for row in rows
            if (row["phase"], row["head_dim"], row["causal"], label(row)) == (phase, head_dim, causal, name)
        )
        if points:
            own = name.split()[0] == OURS
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                label=name,
                color=f"C{labels.index(name) % 10}",
                linewidth=2.2 if own else 1.2,
                linestyle="-" if own else "--",
            )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{phase}, head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=9)
    axes.set_xlabel("seqlen")
    axes.set_ylabel("TB/s" if phase in BY_BYTES else "TFLOP/s")
    axes.grid(alpha=0.3)


def _plot_speed(figure_type: Any, rows: Sequence[Row]) -> Any:
    panels = sorted({(row["phase"], row["head_dim"], row["causal"]) for row in rows})
    columns = min(len(panels), 2)  # full and causal side by side
    height = math.ceil(len(panels) / columns)
    figure = figure_type(figsize=(5 * columns, 3.4 * height))
    labels = list(dict.fromkeys(label(row) for row in rows))
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(height, columns, number + 1)
        _speed_panel(axes, rows, panel, labels)
        if number == 0:
            axes.legend(fontsize=7, loc="lower right")
    return figure


def _plot_errors(figure_type: Any, rows: Sequence[Row]) -> Any:
    inputs = list(dict.fromkeys(str(row.get("input", "")) for row in rows))
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    figure = figure_type(figsize=(max(6.0, 1.6 * len(inputs)), 4))
    axes = figure.add_subplot(1, 1, 1)
    width = 0.8 / len(recipes)
    for number, recipe in enumerate(recipes):
        found = {str(row.get("input", "")): row["rel_rmse"] for row in rows if row["recipe"] == recipe}
        positions = [
            i + (number - (len(recipes) - 1) / 2) * width for i, name in enumerate(inputs) if name in found
        ]
        axes.bar(positions, [found[name] for name in inputs if name in found], width, label=recipe)
    axes.set_xticks(range(len(inputs)), inputs, rotation=20, ha="right", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("relative RMSE against float64")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="y")
    return figure
