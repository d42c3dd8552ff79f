"""Which rows of a rank attend to which keys of another, and with which window: plain integers, no tensors.

The kernels align a mask bottom-right over the rows and keys of their call: row i of n sees keys i + m - n - left to
i + m - n + right of m. A rank holds pieces of sequences, and so do the keys that come to it. In the numbering of the
rank's own rows and keys, a pair of pieces of one sequence sees a band lo <= key - row <= hi, whose ends say where the
pieces stand in their sequence. Cut to the rows and keys that see anything, a band is a window with ends >= 0. Pairs
whose bands are one band, where they cut at all, are one call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cute_attn.distributed.sharding import Piece, Sharding
from cute_attn.problem import cutting_ends

__all__ = ["Call", "Mask", "calls_between", "partners"]


class Mask(NamedTuple):
    """(left, right) of a window over whole sequences, -1 without an end; (-1, 0) is causal."""

    left: int
    right: int


@dataclass(frozen=True)
class Call:
    """One call of a kernel.

    Attributes:
        sequence: whose rows and keys they are.
        rows: first row, and the one behind the last, counted in the rows of the rank that attends.
        keys: likewise in the keys of the rank that holds them.
        window: (left, right) for these rows and keys, bottom-right, -1 for an end that hides nothing.
    """

    sequence: int
    rows: tuple[int, int]
    keys: tuple[int, int]
    window: tuple[int, int]


class _Part(NamedTuple):
    """A piece, and the number of its first row among those of its rank."""

    piece: Piece
    first: int

    @property
    def end(self) -> int:
        return self.first + self.piece.length


@lru_cache(maxsize=4096)
def calls_between(
    q: Sharding, k: Sharding, mask: Mask, q_rank: int, k_rank: int, granule: int = 1
) -> tuple[Call, ...]:
    """The calls by which ring rank `q_rank` attends to the keys of ring rank `k_rank`; none where it sees none.

    Args:
        q, k: of as many sequences; the rows of a sequence are aligned bottom-right with its keys.
        granule: keys of a call begin at multiples of it, counted from the first that the rank has of the sequence;
            chunks must, too.
    """
    calls: list[Call] = []
    rows, keys = _by_sequence(q.pieces(q_rank)), _by_sequence(k.pieces(k_rank))
    for sequence in rows.keys() & keys.keys():
        shift = k.seqlens[sequence] - q.seqlens[sequence]
        lo = -math.inf if mask.left < 0 else shift - mask.left
        hi = math.inf if mask.right < 0 else shift + mask.right
        calls += _calls(sequence, rows[sequence], keys[sequence], lo, hi, granule)
    return tuple(sorted(calls, key=lambda call: (call.rows, call.keys)))


@lru_cache(maxsize=256)
def partners(q: Sharding, k: Sharding, mask: Mask) -> tuple[tuple[bool, ...], ...]:
    """[q_rank][k_rank]: whether ring rank q_rank sees any key of ring rank k_rank."""
    ranks = range(q.ring)
    return tuple(tuple(bool(calls_between(q, k, mask, a, b)) for b in ranks) for a in ranks)


def _by_sequence(pieces: Iterable[Piece]) -> dict[int, list[_Part]]:
    found: dict[int, list[_Part]] = {}
    first = 0
    for piece in pieces:
        found.setdefault(piece.sequence, []).append(_Part(piece, first))
        first += piece.length
    return found


def _calls(
    sequence: int, rows: Sequence[_Part], keys: Sequence[_Part], lo: float, hi: float, granule: int
) -> list[Call]:
    """The calls of rows and keys of one sequence, as few as may be."""
    rows = [r for r in rows if any(_sees(r, k, lo, hi) for k in keys)]
    keys = [k for k in keys if any(_sees(r, k, lo, hi) for r in rows)]
    if not rows:
        return []
    one = _one_call(sequence, rows, keys, lo, hi, granule)
    if one is not None:
        return [one]
    # One pair of pieces always is one call, so that this ends.
    split = rows if len(rows) > 1 else keys
    return [
        call
        for part in split
        for call in _calls(sequence, *(([part], keys) if split is rows else (rows, [part])), lo, hi, granule)
    ]


def _sees(r: _Part, k: _Part, lo: float, hi: float) -> bool:
    nearest, farthest = k.piece.start - (r.piece.stop - 1), k.piece.stop - 1 - r.piece.start
    return nearest <= hi and farthest >= lo


def _one_call(
    sequence: int, rows: Sequence[_Part], keys: Sequence[_Part], lo: float, hi: float, granule: int
) -> Call | None:
    """One band over all rows and keys, from the first to the last, that hides what the masks of all pairs hide."""
    for parts in (rows, keys):
        if any(a.end != b.first for a, b in itertools.pairwise(parts)):
            return None
    # Bounds of the band's ends, in the rank's own numbers: at_least <= end <= at_most.
    hi_least, hi_most, lo_least, lo_most = -math.inf, math.inf, -math.inf, math.inf
    for r, k in itertools.product(rows, keys):
        moved = (k.first - k.piece.start) - (r.first - r.piece.start)
        low, high = lo + moved, hi + moved
        least, most = k.first - (r.end - 1), k.end - 1 - r.first  # key - row of the pair
        if high < least:  # hidden: behind all rows
            hi_most = min(hi_most, least - 1)
            continue
        if low > most:  # hidden: before the window of all rows
            lo_least = max(lo_least, most + 1)
            continue
        if high >= most:
            hi_least = max(hi_least, most)
        else:
            hi_least, hi_most = max(hi_least, high), min(hi_most, high)
        if low <= least:
            lo_most = min(lo_most, least)
        else:
            lo_least, lo_most = max(lo_least, low), min(lo_most, low)
    if hi_least > hi_most or lo_least > lo_most:
        return None
    hi, lo = hi_most, lo_least  # an end that need not cut is infinite
    (row, row_end), (key, key_end) = ((p[0].first, p[-1].end) for p in (rows, keys))
    # To rows that see a key, and keys that are seen; then both ends of the window are >= 0.
    row, row_end = int(max(row, key - hi)), int(min(row_end, key_end - lo))
    unseen = max(0, int(max(key, rows[0].first + lo)) - key)
    key, key_end = key + unseen // granule * granule, int(min(key_end, rows[-1].end + hi))
    left = -1 if lo == -math.inf else int(key_end - row_end - lo)
    right = -1 if hi == math.inf else int(hi - key_end + row_end)
    window = cutting_ends((left, right), row_end - row, key_end - key)
    return Call(sequence, (row, row_end), (key, key_end), window)
