"""Masks on the accumulator of S, by true key positions."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..config import FwdConfig
from .scores import rows

ROW_STEP = 8  # a thread's second accumulator row lies this many rows of the tile below its first


@cute.jit
def first_hidden_key(limits, r: cutlass.Constexpr, cfg: FwdConfig) -> Int32:
    """Position of the first key that row `r` (0 or 1) of this thread must not see; keys before it are visible.

    limits is (query + 1 + seqlen_k - seqlen_q, seqlen_k), for the query of the thread's first row: one register
    beside the uniform length instead of one for each row. Of packed rows, `pack_gqa` in turn are of one query. With a
    sliding window it is (..., ..., right, left), see `first_seen_key`.
    """
    end, seqlen_k = limits[0], limits[1]
    if cutlass.const_expr(cfg.window):
        end = end + limits[2]
    limit = seqlen_k
    if cutlass.const_expr(cfg.causal or cfg.window):
        limit = cutlass.min(seqlen_k, end + r * (ROW_STEP // cfg.pack_gqa))
    return limit


@cute.jit
def first_seen_key(limits, r: cutlass.Constexpr, cfg: FwdConfig) -> Int32:
    """Position of the first key that row `r` of this thread may see, by the left end of a window; may be below 0."""
    return limits[0] - 1 - limits[3] + r * (ROW_STEP // cfg.pack_gqa)


@cute.jit
def first_key(limits, r: cutlass.Constexpr, cfg: FwdConfig) -> Int32:
    """Position of the first key that row `r` of this thread sees, if it sees any."""
    first = Int32(0)
    if cutlass.const_expr(cfg.window):
        first = cutlass.max(first_seen_key(limits, r, cfg), 0)
    return first


@cute.jit
def sees_keys(limits, r: cutlass.Constexpr, cfg: FwdConfig):
    """Whether row `r` (0 or 1) of this thread sees any key."""
    return first_hidden_key(limits, r, cfg) > first_key(limits, r, cfg)


@cute.jit
def clear_empty_rows(out: list, columns, limits, cfg: FwdConfig):
    """Zero in the rows of O that see no key, whatever stands there: NaN, after a division by their empty sum.

    out      accumulators of parts of O, `columns` of each part; behind them there may be others
    limits   see `first_hidden_key`

    A branch of the warp, as a selection for each element would cost all tiles as much as the division.
    """
    empty = not (sees_keys(limits, 0, cfg) and sees_keys(limits, 1, cfg))
    if cute.arch.vote_any_sync(empty):
        for r in cutlass.range_constexpr(2):
            seen = sees_keys(limits, r, cfg)
            for part in cutlass.range_constexpr(len(out)):
                o = rows(out[part])
                for i in cutlass.range_constexpr(columns[part] // 4):
                    o[r, i] = o[r, i] if seen else Float32(0.0)


@cute.jit
def mask_scores(scores: cute.Tensor, limits, column0: Int32, cfg: FwdConfig):
    """Set hidden scores to -inf.

    scores   (2, columns) view of a thread's accumulator, one row of it for each row of the thread
    limits   see `first_hidden_key`
    column0  key position of the thread's first element; element i lies 8 * (i // 2) + i % 2 behind it, a
             constant, so each element costs one compare with an immediate and one select
    """
    for r in cutlass.range_constexpr(2):
        limit = first_hidden_key(limits, r, cfg) - column0
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, i] = -Float32.inf if limit <= 8 * (i // 2) + i % 2 else scores[r, i]
        if cutlass.const_expr(cfg.window):
            first = first_seen_key(limits, r, cfg) - column0
            for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, i] = -Float32.inf if first > 8 * (i // 2) + i % 2 else scores[r, i]


@cute.jit
def half_bits(keys: Int32) -> Int32:
    """16 bits for each key, of a number of keys that may be far beyond a tile."""
    return cutlass.max(cutlass.min(keys, 1 << 24), -(1 << 24)) * 16


@cute.jit
def bits_from(bit: Int32) -> Uint32:
    """Ones from a bit on, which may lie before or behind the word."""
    return cute.arch.inline_ptx(
        "{ .reg .s32 n; max.s32 n, {$r0}, 0; shl.b32 {$w0}, 0xffffffff, n; }",
        write_only_types=[Uint32],
        read_only_args=[bit],
    )  # a shift of 32 or more leaves nothing


@cute.jit
def mask_half_scores(words: cute.Tensor, limits, column0: Int32, cfg: FwdConfig):
    """As `mask_scores`, of scores in float16: word w is of row w % 2, two columns from 8 * (w // 2) on."""
    for r in cutlass.range_constexpr(2):
        limit = half_bits(first_hidden_key(limits, r, cfg) - column0)
        if cutlass.const_expr(cfg.window):
            first = half_bits(first_seen_key(limits, r, cfg) - column0)
        for i in cutlass.range_constexpr(cute.size(words) // 2):
            hidden = bits_from(limit - 128 * i)
            if cutlass.const_expr(cfg.window):
                hidden = hidden | ~bits_from(first - 128 * i)
            words[2 * i + r] = (words[2 * i + r] & ~hidden) | (Uint32(0xFC00FC00) & hidden)  # -inf
