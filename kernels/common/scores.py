"""Softcap and ALiBi on the accumulator of S, for operands of every precision."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, n/8), ...), of a warpgroup or a warp, as (2 rows, (2, n/8) columns) of the thread."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, cute.size(acc) // 4)), stride=(2, (1, 4))))


@cute.jit
def tanh_of(exponent: Float32) -> Float32:
    """tanh(x) for exponent = 2 x log2(e).

    1 - 2 / (1 + e^2x), good to 2e-7: the hardware's tanh is 11 bits, which softcap would multiply.
    """
    grown = cute.math.exp2(exponent, fastmath=True)
    return Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(grown + Float32(1.0))


@cute.jit
def subtract_distance(scores: cute.Tensor, slope, ahead):
    """ALiBi (arXiv 2108.12409): scores - slope * |key position - query position|, in place.

    scores  (2, columns) view of a thread's accumulator, one row of it for each row of the thread
    slope   (2,) of the rows, in units of the scores
    ahead   (2,) keys from each row's query to the thread's first element, which element i lies 8 * (i // 2) + i % 2
            behind
    """
    for r in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            here = ahead[r] + Float32(8 * (i // 2) + i % 2)
            scores[r, i] = scores[r, i] - slope[r] * cute.arch.fmax(here, -here)
