"""Masks on the accumulator of S, by true key positions."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def first_hidden_key(
    row: Int32, seqlen_q: Int32, seqlen_k: Int32, causal: cutlass.Constexpr
) -> Int32:
    """Position of the first key that query `row` must not see (keys before it are visible)."""
    limit = seqlen_k
    if cutlass.const_expr(causal):
        limit = cutlass.min(seqlen_k, row + 1 + seqlen_k - seqlen_q)
    return limit


@cute.jit
def mask_scores(scores: cute.Tensor, first_hidden: cute.Tensor, column0: Int32):
    """Set hidden scores to -inf.

    scores        (2, columns) view of a thread's accumulator, one row of it for each query row of the thread
    first_hidden  (2,) Int32, see `first_hidden_key`
    column0       key position of the thread's first element; element i lies 8 * (i // 2) + i % 2 behind it,
                  a constant, so each element costs one compare with an immediate and one select
    """
    for r in cutlass.range_constexpr(2):
        limit = first_hidden[r] - column0
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, i] = -Float32.inf if limit <= 8 * (i // 2) + i % 2 else scores[r, i]
