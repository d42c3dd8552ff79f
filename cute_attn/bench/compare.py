"""Two saved runs side by side: `python -m cute_attn.bench --compare before.json after.json`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

from cute_attn.bench.record import Record
from cute_attn.bench.report import Grid, Row, case_key, geometric_mean, label

META: Final = ("gpu", "driver", "cuda", "torch", "cutlass_dsl", "python", "date", "command")
# What tells rows of one phase and case apart, beside provider, dtype and recipe.
_MORE_KEYS: Final = ("input", "v_mean", "backend", "task", "layer", "call", "full_caches")
_KINDS: Final = {"ms": "time", "rel_rmse": "relative RMSE", "kl": "KL", "peak_bytes": "peak memory"}


def _key(row: Row) -> Hashable:
    return (row["phase"], row["dtype"], label(row), case_key(row), *(row.get(name) for name in _MORE_KEYS))


def matched(before: Record, after: Record) -> tuple[list[tuple[Row, Row]], int, int]:
    """(pairs of rows that measure the same, rows of `before` alone, rows of `after` alone).

    Rows that cannot be told apart are paired in order.
    """
    waiting: dict[Hashable, list[Row]] = {}
    for row in before.rows:
        waiting.setdefault(_key(row), []).append(row)
    pairs: list[tuple[Row, Row]] = []
    alone = 0
    for row in after.rows:
        same = waiting.get(_key(row))
        if same:
            pairs.append((same.pop(0), row))
        else:
            alone += 1
    return pairs, sum(map(len, waiting.values())), alone


def compare_grids(before: Record, after: Record) -> list[Grid]:
    """Tables: what was measured on what, ratios by contender, and each cell that moved by more than it varies."""
    pairs, only_before, only_after = matched(before, after)
    grids = [_meta_grid(before, after)]
    summary = Grid(
        "After over before, geometric mean (below 1: faster, more accurate, smaller)",
        ["phase", "contender", "what", "after / before", "smallest", "largest", "rows"],
        text_columns=3,
    )
    for phase, name in dict.fromkeys((row["phase"], label(row)) for _, row in pairs):
        group = [pair for pair in pairs if (pair[1]["phase"], label(pair[1])) == (phase, name)]
        for field, kind in _KINDS.items():
            ratios = [ratio for pair in group if (ratio := _ratio(*pair, field)) is not None]
            if ratios:
                mean = geometric_mean(ratios)
                numbers = [f"{x:.3f}" for x in (mean, min(ratios), max(ratios)) if x is not None]
                summary.lines.append([phase, name, kind, *numbers, str(len(ratios))])
    summary.notes.append(
        f"{len(pairs)} rows in both runs, {only_before} in the first alone, {only_after} in the second alone."
    )
    changed = []
    for old, row in pairs:
        if old["status"] != row["status"]:
            why = f": {row['reason']}" if row["reason"] else ""
            changed.append(f"{label(row)}, {_where(row)}: {old['status']} -> {row['status']}{why}")
    summary.notes += changed[:20] + ([f"and {len(changed) - 20} more"] if len(changed) > 20 else [])
    grids.append(summary)
    moved = _moved_grid(pairs)
    if moved.lines:
        grids.append(moved)
    return grids


def _ratio(before: Row, after: Row, field: str) -> float | None:
    old, new = before.get(field), after.get(field)
    return new / old if old and new and old > 0 and new > 0 else None


def _where(row: Row) -> str:
    head_dim, causal, seqlen_k, seqlen_q, batch, heads_q, heads_k, left, right, tokens, pages = case_key(row)
    length = str(seqlen_k) if seqlen_q == seqlen_k else f"{seqlen_q} x {seqlen_k}"
    length += f", {tokens} tokens of unlike lengths" if tokens else ""
    length += f", pages of {pages}" if pages else ""
    length += f", window ({left}, {right})" if (left, right) != (-1, -1) else ""
    return f"d {head_dim} {'causal' if causal else 'full'} {length}, {batch} x {heads_q}/{heads_k}"


def _meta_grid(before: Record, after: Record) -> Grid:
    grid = Grid("What was measured on what", ["", "before", "after"], text_columns=3)
    rows: list[tuple[str, Any, Any]] = [(name, before.meta.get(name), after.meta.get(name)) for name in META]
    for name in ("commit", "kernels", "cute_attn"):
        rows.append((f"git {name}", before.meta["git"].get(name), after.meta["git"].get(name)))
    for name, old, new in rows:
        texts = ["-" if value is None else str(value) for value in (old, new)]
        grid.lines.append([name, texts[0], "same" if texts[0] == texts[1] != "-" else texts[1]])
    if before.meta["gpu"] != after.meta["gpu"]:
        grid.notes.append("The GPUs differ: compare ratios within a run, not times.")
    return grid


def _moved_grid(pairs: Sequence[tuple[Row, Row]]) -> Grid:
    """Timed cells whose spans of rounds, shortest to longest, do not overlap."""
    grid = Grid(
        "Times that moved by more than the rounds of a run differ",
        ["phase", "contender", "case", "before ms", "after ms", "after / before"],
        text_columns=3,
    )
    found = []
    for old, new in pairs:
        ratio = _ratio(old, new, "ms")
        if ratio is not None and (new["ms_min"] > old["ms_max"] or new["ms_max"] < old["ms_min"]):
            found.append((ratio, old, new))
    for ratio, old, new in sorted(found, key=lambda item: -item[0]):
        times = [f"{old['ms']:.4f}", f"{new['ms']:.4f}", f"{ratio:.3f}"]
        grid.lines.append([new["phase"], label(new), _where(new), *times])
    return grid
