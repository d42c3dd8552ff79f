"""Online softmax on accumulators of S in registers, for 16-bit operands: what the forward of every GPU does to scores.

FlashAttention-2's softmax (arXiv 2307.08691, section 3.1). For query row i and key j, with
s = softmax_scale * log2(e) > 0 and m_i the largest score of the row so far:

    P_ij = 2^(S_ij * s - r_i)         r_i = m_i * s, rounded to float32; rounded to 16 bits for P V alone
    l    = l * 2^(r_old - r) + sum of P             in float32, each thread its columns, added up at the end
    O    = O * 2^(r_old - r) + P V                  in the tensor core's float32 accumulator

The product inside P's FMA is exact and r_i is not, so all P of a row share a factor 2^(m_i * s - r_i), which cancels
with l as long as it is in range. It is below 2^-10 octaves from 1 where |r_i| < 2^15; beyond, huge scores take a slow
path for their warp: (S_ij - m_i) * s, in which the largest score is 0 whatever its size.

Softcap makes S_ij = tanh(S_ij * softmax_scale / softcap) and s = softcap * log2(e); the kernel's `softcap_factor` is
2 * log2(e) * softmax_scale / softcap. ALiBi subtracts slope * |distance| * log2(e) / s from a score. A sink is one more
score of the row, whose P counts in l alone.

A thread has two rows of an accumulator, ROW_STEP apart, see `scores.rows`. Four lanes have the columns of a row.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..config import Fwd16Config, Fwd16Sm80Config
from .floats import product_rn
from .mask import ROW_STEP, clear_empty_rows, sees_keys
from .scores import rows, subtract_distance, tanh_of
from .warp import quad_max, quad_sum, turns_if_any

LOG2_E = math.log2(math.e)
HUGE = 2.0**15  # octaves: a row whose reference is beyond takes the slow path


class Softmax16bit:
    """The softmax of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: Fwd16Config | Fwd16Sm80Config):
        self.cfg = cfg

    def window(self, side):
        """(left, right): keys before and behind a query's own position that it sees; () without a window."""
        return (side[3], side[4]) if self.cfg.window else ()

    @cute.jit
    def tile_inputs(
        self,
        side,
        softmax_scale_log2: Float32,
        row0: Int32,
        head: Int32,
        head_k: Int32,
        batch: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
    ):
        """What `adjust` and `softmax` of a work tile read: (factor of a score, softcap's, slopes, positions).

        side is (slopes (batch, heads_q), sinks (heads_q,), softcap_factor, window_left, window_right). Slopes are in
        units of scores, positions those of this thread's rows among the keys, both for the two rows.
        """
        slopes, _, softcap_factor, _, _ = side
        inputs = (softmax_scale_log2, softcap_factor)
        if const_expr(self.cfg.alibi):
            g = self.cfg.pack_gqa
            slope, position = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
            for r in cutlass.range_constexpr(2):
                row = row0 + ROW_STEP * r
                slope[r] = slopes[batch, head * g + row % g] * Float32(LOG2_E) / softmax_scale_log2
                position[r] = (row // g + seqlen_k - seqlen_q).to(Float32)
            inputs = (softmax_scale_log2, softcap_factor, slope, position)
        return inputs

    def new_state(self):
        """State of a work tile: largest score, sum of P over this thread's columns, last rescale factor, (2,) each."""
        maximum, total, rescale = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        rescale.fill(1.0)
        return maximum, total, rescale

    @cute.jit
    def adjust(self, acc: cute.Tensor, n: Int32, inputs):
        """Softcap and ALiBi of key tile n, in place."""
        s = rows(acc)
        if const_expr(self.cfg.softcap):
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, i] = tanh_of(s[r, i] * inputs[1])
        if const_expr(self.cfg.alibi):
            column0 = (n * self.cfg.tile_n + cute.arch.lane_idx() % 4 * 2).to(Float32)
            position = inputs[3]
            subtract_distance(s, inputs[2], (column0 - position[0], column0 - position[1]))

    @cute.jit
    def softmax(self, masking: cutlass.Constexpr, acc: cute.Tensor, state, scale: Float32):
        """Scores -> P in place (float32, not yet rounded); updates maximum and sum of each row, sets its factor.

        masking  hidden scores of the tile are -inf, and a row may have seen no key yet
        """
        maximum, _, rescale = state
        s = rows(acc)
        columns = cute.size(s, mode=[1])
        offset = cute.make_rmem_tensor(2, Float32)
        factor = cute.make_rmem_tensor(1, Float32)
        before, finite = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        factor[0] = scale
        size = Float32(0.0)
        for r in cutlass.range_constexpr(2):
            before[r] = maximum[r]
            top = maximum[r]
            for i in cutlass.range_constexpr(columns):
                top = cute.arch.fmax(top, s[r, i])
            top = quad_max(top)
            maximum[r] = top
            if const_expr(masking):
                top = Float32(0.0) if top == -Float32.inf else top
            finite[r] = top
            # Both products rounded by themselves: equal maxima must give equal references, and a factor of 1.
            reference = product_rn(top, scale)
            rescale[r] = cute.math.exp2(product_rn(before[r], scale) - reference, fastmath=True)
            offset[r] = -reference
            size = cute.arch.fmax(size, cute.arch.fmax(reference, -reference))
        huge = size >= Float32(HUGE)
        slow = (s, before, finite, rescale, offset, factor)
        if const_expr(isinstance(self.cfg, Fwd16Config)):
            if cute.arch.vote_any_sync(huge):
                self.subtract_first(*slow)
        else:  # where the assembler would make no branch of that
            for _ in cutlass.range(turns_if_any(huge), unroll=1):
                self.subtract_first(*slow)
        self.exponentials(s, state, factor, offset)

    @cute.jit
    def exponentials(self, s, state, factor, offset):
        """P = 2^(S * factor + offset) in place, and its sums: s (2, columns), factor (1,), offset (2,)."""
        total, rescale = state[1], state[2]
        for r in cutlass.range_constexpr(2):
            partial = cute.make_rmem_tensor(2, Float32)  # two chains of additions
            partial[0] = total[r] * rescale[r]
            partial[1] = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
                s[r, i] = cute.math.exp2(s[r, i] * factor[0] + offset[r], fastmath=True)
                partial[i % 2] = partial[i % 2] + s[r, i]
            total[r] = partial[0] + partial[1]

    @cute.jit
    def subtract_first(self, s, before, finite, rescale, offset, factor):
        """The slow path of huge scores: the difference from the maximum comes before the scale, which is `factor`."""
        scale = factor[0]
        for r in cutlass.range_constexpr(2):
            rescale[r] = cute.math.exp2((before[r] - finite[r]) * scale, fastmath=True)
            for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
                s[r, i] = (s[r, i] - finite[r]) * scale
            offset[r] = Float32(0.0)
        factor[0] = Float32(1.0)

    @cute.jit
    def finish(
        self,
        out: list,
        state,
        limits,
        softmax_scale_log2: Float32,
        side,
        row0: Int32,
        head: Int32,
        batch: Int32,
        lse: cute.Tensor,
    ):
        """Divide by the row sum; lse (2,) in natural log. A row without keys gives 0, and -inf or its sink."""
        maximum, total = state[:2]
        o = rows(out[0])
        g = self.cfg.pack_gqa
        for r in cutlass.range_constexpr(2):
            sum_row = quad_sum(total[r])
            empty = not sees_keys(limits, r, self.cfg)
            reference = product_rn(maximum[r], softmax_scale_log2)
            factor = Float32(1.0)
            if const_expr(self.cfg.sinks):
                sink = side[1][head * g + (row0 + ROW_STEP * r) % g] * Float32(LOG2_E)
                top = cute.arch.fmax(reference, sink, nan=True)
                top = Float32(0.0) if top == -Float32.inf else top  # a sink of -inf takes no share
                factor = cute.math.exp2(reference - top, fastmath=True)
                sum_row = sum_row * factor + cute.math.exp2(sink - top, fastmath=True)
                reference = top
            inverse = factor * cute.arch.rcp_approx(sum_row)
            log2_sum = reference + cute.math.log2(sum_row, fastmath=True)
            if const_expr(not self.cfg.sinks):
                log2_sum = -Float32.inf if empty else log2_sum
            lse[r] = log2_sum * Float32(math.log(2.0))
            for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                o[r, i] = o[r, i] * inverse
        clear_empty_rows(out, (2 * cute.size(out[0]),), limits, self.cfg)
