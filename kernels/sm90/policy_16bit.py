"""What makes the Hopper forward a 16-bit one: operands, softmax, accumulation.

FlashAttention-3's forward (arXiv 2407.08608, sections 3.1 and 3.2). For query row i and key j, with
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

Operands: Q and K are K-major as they come; V, as it comes, is the MN-major B operand (rows of head_dim_v contiguous);
P goes from registers, where the accumulator of S lies as the A operand wants it: register i of a lane l in warp w holds
row 16w + l/4 + 8*((i/2)%2), column 8*(i/4) + 2*(l%4) + i%2, in both.

Shared memory of V: (v_columns, tile_n, kv_stages), swizzled rows of `v_columns`, keys first.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.floats import bf16_pair, fp16_pair, product_rn
from ..common.mask import ROW_STEP, sees_keys
from ..common.scores import subtract_distance, tanh_of
from ..config import Fwd16Config
from .operands import ELEMENTS, column_major_atom, opaque_zero, row_max, rows

LOG2_E = math.log2(math.e)
HUGE = 2.0**15  # octaves: a row whose reference is beyond takes the slow path


class Policy16bit:
    """Matrix products and softmax of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: Fwd16Config):
        self.cfg = cfg
        self.qk_type = self.v_type = ELEMENTS[cfg.dtype]

    # -- operands ---------------------------------------------------------------------------------------------

    def qk_mma(self) -> cute.TiledMma:
        k_major = OperandMajorMode.K
        shape = (64, self.cfg.tile_n)
        op = wg.MmaF16BF16Op(self.qk_type, Float32, shape, wg.OperandSource.SMEM, k_major, k_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def pv_op(self, n: int) -> wg.MmaF16BF16Op:
        source = wg.OperandSource.RMEM
        return wg.MmaF16BF16Op(self.v_type, Float32, (64, n), source, OperandMajorMode.K, OperandMajorMode.MN)

    def pv_mma(self) -> cute.TiledMma:
        op = self.pv_op(self.cfg.v_columns)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def one_warpgroup(self, n: int) -> cute.TiledMma:
        """A product of 64 rows and n columns, for its accumulator's layout."""
        return cute.make_tiled_mma(cute.make_mma_atom(self.pv_op(n)))

    def v_layouts(self):
        """Shared memory of V: the ring (v_columns, tile_n, kv_stages), and one TMA box of it, which is a stage."""
        cfg = self.cfg
        atom = column_major_atom(self.v_type, cfg.v_columns)
        ring = cute.tile_to_shape(atom, (cfg.v_columns, cfg.tile_n, cfg.kv_stages), order=(1, 0, 2))
        return ring, cute.select(ring, [0, 1])

    def prepare(self, s_v: cute.Tensor, tid: Int32) -> None:
        """TMA writes all of V's ring."""

    def v_fragments(self, s_v: cute.Tensor, tid: Int32) -> cute.Tensor:
        """B fragments of V; s_v is (v_columns, tile_n, kv_stages) in shared memory."""
        mma = self.pv_mma()
        return mma.make_fragment_B(mma.get_slice(tid).partition_B(s_v))

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

    def new_scores(self) -> cute.Tensor:
        """Accumulator of S."""
        shape = self.qk_mma().get_slice(0).partition_shape_C((self.cfg.tile_m, self.cfg.tile_n))
        return cute.make_rmem_tensor(shape, Float32)

    def new_output(self, tid: Int32) -> list:
        """The accumulator of O, zeroed; a list as other policies have several."""
        shape = self.pv_mma().get_slice(tid).partition_shape_C((self.cfg.tile_m, self.cfg.v_columns))
        acc = cute.make_rmem_tensor(shape, Float32)
        for i in range(cute.size(acc)):
            acc[i] = opaque_zero()
        return [acc]

    def new_p(self) -> cute.Tensor:
        """P of one tile, two elements a word, in the order of the A operand of P V.

        Words, for a loop carries 16-bit elements in registers of their own where tile_n is no power of two: packing
        them between the products makes the assembler wait for each product.
        """
        return cute.make_rmem_tensor(self.cfg.tile_n // 4, Uint32)

    def new_state(self):
        """State of a work tile: largest score, sum of P over this thread's columns, last rescale factor, (2,) each."""
        maximum, total, rescale = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        rescale.fill(1.0)
        return maximum, total, rescale

    # -- products ---------------------------------------------------------------------------------------------

    @cute.jit
    def scores(self, acc: cute.Tensor, q_frag: cute.Tensor, k_frag: cute.Tensor, stage: Int32):
        """Issue S = Q K^T of the tile in `stage` (not waited for)."""
        mma = self.qk_mma()  # a fresh atom: ACCUMULATE set here must not leak out of a loop body
        mma.set(wg.Field.ACCUMULATE, False)
        wg.fence()  # softmax has read and written these registers: the product may not overtake it
        for kb in cutlass.range_constexpr(cute.size(q_frag, mode=[2])):
            cute.gemm(mma, acc, q_frag[None, None, kb], k_frag[None, None, kb, stage], acc)
            mma.set(wg.Field.ACCUMULATE, True)
        wg.commit_group()  # a group of its own, which the main loop waits for by itself

    @cute.jit
    def product(self, p: cute.Tensor, v_frag: cute.Tensor, stage: Int32, out: list):
        """Issue O += P V for the tile in `stage` (not waited for)."""
        mma = self.pv_mma()
        mma.set(wg.Field.ACCUMULATE, True)
        acc = out[0]
        shape = mma.partition_shape_A((self.cfg.tile_m, self.cfg.tile_n))
        p = cute.make_tensor(cute.recast_ptr(p.iterator, dtype=self.v_type), cute.make_layout(shape))
        wg.fence()  # P has been written and O rescaled: the product may not overtake them
        for kb in cutlass.range_constexpr(cute.size(p, mode=[2])):
            cute.gemm(mma, acc, p[None, None, kb], v_frag[None, None, kb, stage], acc)
        wg.commit_group()  # likewise

    # -- softmax ----------------------------------------------------------------------------------------------

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
        maximum, total, rescale = state
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
            top = row_max(top)
            maximum[r] = top
            if const_expr(masking):
                top = Float32(0.0) if top == -Float32.inf else top
            finite[r] = top
            # Both products rounded by themselves: equal maxima must give equal references, and a factor of 1.
            reference = product_rn(top, scale)
            rescale[r] = cute.math.exp2(product_rn(before[r], scale) - reference, fastmath=True)
            offset[r] = -reference
            size = cute.arch.fmax(size, cute.arch.fmax(reference, -reference))
        if cute.arch.vote_any_sync(size >= Float32(HUGE)):
            for r in cutlass.range_constexpr(2):
                rescale[r] = cute.math.exp2((before[r] - finite[r]) * scale, fastmath=True)
                for i in cutlass.range_constexpr(columns):
                    s[r, i] = (s[r, i] - finite[r]) * scale
                offset[r] = Float32(0.0)
            factor[0] = Float32(1.0)
        for r in cutlass.range_constexpr(2):
            partial = cute.make_rmem_tensor(2, Float32)  # two chains of additions
            partial[0] = total[r] * rescale[r]
            partial[1] = Float32(0.0)
            for i in cutlass.range_constexpr(columns):
                s[r, i] = cute.math.exp2(s[r, i] * factor[0] + offset[r], fastmath=True)
                partial[i % 2] = partial[i % 2] + s[r, i]
            total[r] = partial[0] + partial[1]

    @cute.jit
    def pack(self, acc: cute.Tensor, p: cute.Tensor):
        """Round P to the A operand; call it only when no WGMMA that reads `p` is in flight (else C7513 serialises)."""
        pair = bf16_pair if const_expr(self.cfg.dtype == "bf16") else fp16_pair
        for w in cutlass.range_constexpr(cute.size(p)):
            p[w] = pair(acc[2 * w], acc[2 * w + 1])

    @cute.jit
    def rescale(self, out: list, state):
        """O <- O * 2^(r_old - r); where no row of the warp has a new maximum, O stays as it is."""
        _, _, factors = state
        o = rows(out[0])
        if const_expr(self.cfg.skip_rescale):
            moved = (factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))
            if cute.arch.vote_any_sync(moved):
                for r in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                        o[r, i] = o[r, i] * factors[r]
        else:
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    o[r, i] = o[r, i] * factors[r]

    # -- finish -----------------------------------------------------------------------------------------------

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
        maximum, total, _ = state
        o = rows(out[0])
        g = self.cfg.pack_gqa
        for r in cutlass.range_constexpr(2):
            sum_row = total[r]
            for step in cutlass.range_constexpr(2):
                sum_row = sum_row + cute.arch.shuffle_sync_bfly(sum_row, offset=1 << step)
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
                o[r, i] = Float32(0.0) if empty else o[r, i] * inverse

    def final_lse(self, lse: Float32, seen, side, query: Int32, head_q: Int32, batch: Int32) -> Float32:
        """lse as it is."""
        return lse
