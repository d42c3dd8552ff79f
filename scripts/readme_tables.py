"""Tables of README and docs/, made from the records that they name.

    python scripts/readme_tables.py            rewrite them
    python scripts/readme_tables.py --check    only say whether they are those of the records

A table is known by its first line; its text around stays as it is.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
OURS = "cute_attn"
RECIPES = {"fp8": "ours, fp8", "accurate": "ours, accurate"}
LONGEST = 16384


@functools.cache
def rows_that_ran(record: str) -> pd.DataFrame:
    """Of a record, read once."""
    rows = pd.DataFrame(json.loads((ROOT / f"perf/records/{record}.json").read_text())["rows"])
    return rows[rows["status"] == "ok"]


def rows_of(record: str, **wanted: Any) -> pd.DataFrame:
    """Rows of a record that ran, with these values."""
    rows = rows_that_ran(record)
    for name, value in wanted.items():
        rows = rows[rows[name] == value]
    return rows


def tflops(rows: pd.DataFrame) -> float:
    """Of the fastest of some rows."""
    return float(rows["tflops"].max())


def cells(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(head_dim and mask, its rows) in the order of the tables."""
    return [
        (f"{head_dim} {'causal' if causal else 'full'}", group)
        for (head_dim, causal), group in rows.groupby(["head_dim", "causal"])
    ]


def table(headers: list[str], lines: list[list[str]]) -> list[str]:
    """Lines of Markdown, without the rule under the headers."""
    return [f"| {' | '.join(line)} |" for line in (headers, *lines)]


def forward_longest() -> list[str]:
    """TFLOP/s of the 8-bit forward at the longest length."""
    rows = rows_of("forward_grid", seqlen_k=LONGEST)
    peers = {
        "FA3 FP8": (rows["provider"] == "fa3") & (rows["dtype"] == "fp8"),
        "cuDNN FP8": rows["provider"] == "cudnn",
        "FA3 bf16": (rows["provider"] == "fa3") & (rows["dtype"] == "bf16"),
    }
    lines = []
    for name, group in cells(rows):
        ours = [
            tflops(group[(group["provider"] == OURS) & (group["recipe"] == recipe)]) for recipe in RECIPES
        ]
        theirs = [tflops(group[chosen.reindex(group.index)]) for chosen in peers.values()]
        best = max(theirs[:2])
        lines.append([name, *(f"{x:.0f}" for x in (*ours, *theirs)), *(f"{x / best:.2f}" for x in ours)])
    headers = ["head_dim, mask", *RECIPES.values(), *peers, "fp8 / best peer", "accurate / best peer"]
    return table(headers, lines)


def by_length(rows: pd.DataFrame, text: Callable[[pd.DataFrame], str]) -> list[str]:
    """A column for each length, in it what `text` makes of the rows of one cell."""
    lengths = sorted(set(rows["seqlen_k"]))
    lines = []
    for name, group in cells(rows):
        found = [group[group["seqlen_k"] == length] for length in lengths]
        lines.append([name, *("-" if cell.empty else text(cell) for cell in found)])
    return table(["head_dim, mask", *(f"{length:,}" for length in lengths)], lines)


def over_best(cell: pd.DataFrame) -> str:
    """Both recipes over the best peer."""
    best = tflops(cell[cell["provider"] != OURS])
    return " / ".join(f"{tflops(cell[cell['recipe'] == recipe]) / best:.2f}" for recipe in RECIPES)


def beside_best(cell: pd.DataFrame) -> str:
    """TFLOP/s of ours / the best peer = the ratio."""
    ours, best = tflops(cell[cell["provider"] == OURS]), tflops(cell[cell["provider"] != OURS])
    return f"{ours:.0f} / {best:.0f} = {ours / best:.2f}"


def in_order(cell: pd.DataFrame) -> str:
    """TFLOP/s of ours with an order of dQ's sums; over those without."""
    ordered = cell["deterministic"].notna()  # a field that rows of the others lack
    return f"{tflops(cell[ordered]):.0f}; {tflops(cell[ordered]) / tflops(cell[~ordered]):.2f}"


def calls_over_best(cell: pd.DataFrame) -> str:
    """TFLOP/s of the best peer; both recipes over it."""
    return f"{tflops(cell[cell['provider'] != OURS]):.0f}; {over_best(cell)}"


def counters(cell: pd.DataFrame) -> str:
    """fp8 over the best peer; shares of the tensor pipe, fp8 / accurate; of the issue slots."""
    like = {name: cell[name].iloc[0] for name in ("head_dim", "causal", "seqlen_k")}
    timed = rows_of("forward_grid", dtype="fp8", **like)
    best = tflops(timed[timed["provider"] != OURS])
    fp8, accurate = (cell[cell["recipe"] == recipe].iloc[0] for recipe in RECIPES)
    return (
        f"{tflops(timed[timed['recipe'] == 'fp8']) / best:.2f}; {fp8['tensor_pct']:.0f} / "
        f"{accurate['tensor_pct']:.0f}; {fp8['issue_pct']:.0f} / {accurate['issue_pct']:.0f}"
    )


def cached(record: str) -> list[str]:
    """Of one query over caches, a column for each number of sequences and of keys: times of the fastest peer that
    attends, and of a copy that moves as many bytes, over ours."""
    rows = rows_of(record, phase="decode")
    sizes = sorted(set(zip(rows["seqlen_k"], rows["batch"], strict=True)))
    lines = []
    for (head_dim, heads, heads_k), group in rows.groupby(["head_dim", "heads_q", "heads_k"]):
        line = [f"{head_dim}, {heads} / {heads_k}"]
        for keys, batch in sizes:
            cell = group[(group["seqlen_k"] == keys) & (group["batch"] == batch)].set_index("provider")["ms"]
            peers = cell.drop([OURS, "copy", "copy_cache"], errors="ignore")
            line.append(f"{peers.min() / cell[OURS]:.2f}; {cell['copy_cache'] / cell[OURS]:.2f}")
        lines.append(line)
    return table(["head_dim, heads", *(f"{batch} x {keys:,}" for keys, batch in sizes)], lines)


# page -> what stands some lines before a table, and what makes it
README: dict[str, Callable[[], list[str]]] = {
    "TFLOP/s at seqlen 16,384:": forward_longest,
    "and the ratio to the better of": lambda: by_length(rows_of("forward_grid", dtype="fp8"), over_best),
    "The whole call from 16-bit tensors": lambda: by_length(
        rows_of("whole_call", phase="whole_call"), calls_over_best
    ),
    "`flash_attn_func`, bf16, TFLOP/s": lambda: by_length(
        rows_of("forward_16bit", phase="forward"), beside_best
    ),
    "Its gradients, beside": lambda: by_length(rows_of("backward_16bit", phase="backward"), beside_best),
    "an e4m3 cache (`perf/records/decode_fp8.json`)": lambda: cached("decode_fp8"),
    "against a bf16 cache (`perf/records/decode_16bit.json`)": lambda: cached("decode_16bit"),
    "(`perf/records/decode_16bit_full.json`)": lambda: cached("decode_16bit_full"),
}
PAGES = {
    "README.md": README,
    "docs/backward.md": {
        "(`perf/records/backward_deterministic.json`)": lambda: by_length(
            rows_of("backward_deterministic"), in_order
        )
    },
    "docs/performance.md": {"**Cell by cell**": lambda: by_length(rows_of("profile"), counters)},
}


def rewritten(text: str, tables: dict[str, Callable[[], list[str]]]) -> str:
    """A page with the tables of the records."""
    lines = text.splitlines()
    for before, make in tables.items():
        at = next(i for i, line in enumerate(lines) if before in line)
        first = next(i for i in range(at, len(lines)) if lines[i].startswith("|"))
        end = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
        made = make()
        rule = f"|{'---|' * (made[0].count('|') - 1)}"
        lines[first:end] = [made[0], rule, *made[1:]]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite or check; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where tables differ")
    check = parser.parse_args().check
    differ = False
    for name, tables in PAGES.items():
        path = ROOT / name
        text = path.read_text()
        new = rewritten(text, tables)
        differ |= new != text
        if not check:
            path.write_text(new)
    return int(check and differ)


if __name__ == "__main__":
    sys.exit(main())
