"""What makes the Hopper forward an 8-bit one: operands, scales, P, accumulation.

Numerics (docs/numerics.md has the derivation). For query row i, key j of K scale group g and V scale group u:

    y_ij = S_ij * s_ig - m_i          s_ig = q_scale_i * k_scale_g * softmax_scale * log2(e)
    P_ij = e4m3(2^(y_ij + lift))      a power of two that cancels with the row sum and keeps P out of the subnormals
    T    = P V8 of one key tile       in the tensor core, whose accumulator keeps about 14 bits
    O    = O * 2^(m_old - m) * v_old / v_u + T      in FP32: two-level accumulation, V's scale for free
    l    = l * 2^(m_old - m) + rowsum(P)            the row sum is column head_dim_v of T, by a row of ones in V^T

The reference m_i is an integer near the row maximum. Any m is exact in mathematics; an integral one makes every
rescale a power of two and every shift of P's code a multiple of eight, so the order of tiles rounds nothing anew.
How S becomes P is in softmax_fp8.py.

Accumulator layout (WGMMA, one warpgroup, 64 rows): register i of a lane l in warp w holds row
16w + l/4 + 8*((i/2)%2), column 8*(i/4) + 2*(l%4) + i%2. `rows` views it as (2, columns of the lane). The A operand
of an 8-bit WGMMA wants other keys in the same registers; the quantiser permutes V's keys instead (see
kernels/any/values.py), so P's bytes are the accumulator's values in order.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int8, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.mask import ROW_STEP, clear_empty_rows, first_hidden_key, first_key
from ..common.scores import rows
from ..common.warp import copy_4_bytes_or_zeros
from ..config import SUM_ROWS, V_SCALE_GROUP, FwdConfig
from .operands import opaque_zero, row_major_atom
from .softmax_fp8 import F8, Fp8Softmax
from .softmax_half import HalfSoftmax

LOG2_E = math.log2(math.e)


class Fp8Policy(Fp8Softmax):
    """Operands, matrix products and end of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: FwdConfig):
        super().__init__(cfg)
        self.qk_type = F8 if cfg.qk_dtype == "e4m3" else Int8
        self.v_type = F8
        self.int8 = cfg.qk_dtype == "int8"
        self.score_type = Float16 if cfg.half_scores else Float32
        # rows of V^T that each partial product takes; the last one has the rows of ones and zeros
        self.pv_rows = [*cfg.pv_parts[:-1], cfg.pv_parts[-1] + SUM_ROWS]
        self.pv_depth = 1 if len(cfg.pv_parts) <= 2 else 2  # products P V in flight
        # index, in `rows` of the last part, of the row sum (lanes l % 4 == 0)
        self.sum_column = cfg.pv_parts[-1] // 8 * 2

    # -- operands ---------------------------------------------------------------------------------------------

    def qk_mma(self) -> cute.TiledMma:
        shape = (64, self.part_keys)
        k_major = OperandMajorMode.K
        if self.int8:
            op = wg.MmaI8Op(Int8, Int8, Int32, shape, wg.OperandSource.SMEM, k_major, k_major)
        else:
            op = wg.MmaF8Op(F8, F8, self.score_type, shape, wg.OperandSource.SMEM, k_major, k_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def pv_mma(self, n: int) -> cute.TiledMma:
        k_major = OperandMajorMode.K
        op = wg.MmaF8Op(F8, F8, Float32, (64, n), wg.OperandSource.RMEM, k_major, k_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def window(self, side):
        """(left, right): keys before and behind a query's own position that it sees; () without a window."""
        return (side[8], side[9]) if self.cfg.window else ()

    def one_warpgroup(self, n: int) -> cute.TiledMma:
        """A product of 64 rows and n columns, for its accumulator's layout."""
        k_major = OperandMajorMode.K
        op = wg.MmaF8Op(F8, F8, Float32, (64, n), wg.OperandSource.RMEM, k_major, k_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def v_layouts(self):
        """Shared memory of V^T: the ring (head_dim_v + SUM_ROWS, tile_n, kv_stages), and one TMA box of it."""
        cfg = self.cfg
        atom = row_major_atom(F8, cfg.tile_n)
        ring = cute.tile_to_shape(
            atom, (cfg.head_dim_v + SUM_ROWS, cfg.tile_n, cfg.kv_stages), order=(0, 1, 2)
        )
        return ring, cute.tile_to_shape(atom, (cfg.head_dim_v, cfg.v_box), order=(0, 1))

    @cute.jit
    def prepare(self, s_v: cute.Tensor, tid: Int32):
        """Rows head_dim_v .. head_dim_v + 7 of every V^T stage: ones, then zeros. TMA never writes them.

        The row of ones yields the row sum of P as a column of P V.
        """
        cfg = self.cfg
        total = SUM_ROWS * cfg.tile_n * cfg.kv_stages
        for t in cutlass.range_constexpr(cute.ceil_div(total, cfg.threads)):
            i = t * cfg.threads + tid
            if i < total:
                row = i % SUM_ROWS
                key = i // SUM_ROWS % cfg.tile_n
                value = Float32(1.0) if row == 0 else Float32(0.0)
                s_v[cfg.head_dim_v + row, key, i // (SUM_ROWS * cfg.tile_n)] = value.to(F8)
        cute.arch.fence_proxy("async.shared", space="cta")  # WGMMA reads through the async proxy

    @cute.jit
    def stage_inputs(self, side, at, n: Int32, staged: cute.Tensor):
        """Bring what a work tile begins with to shared memory, by one whole warp: from memory it would take as long
        as a third of a key tile, for which nothing is under way to wait with.

        at      (m_block, head, batch, head of K) of the tile
        n       its first key tile
        staged  (tile_m + tile_n / 64 + 1,) out: scales of its rows of Q, of that key tile, and of its V

        lse_add, which the end of the tile wants, goes to L2.
        """
        m_q_scale, m_k_scale, m_v_scale, m_lse_add = side[:4]
        m_block, head, batch, head_k = at
        cfg, g = self.cfg, self.cfg.pack_gqa
        lane = cute.arch.lane_idx()
        # a lane for 32 queries of a head, a line of memory
        query = m_block * (cfg.tile_m // g) + lane // g * 32
        if lane // g * 32 < cfg.tile_m // g:
            if query < m_lse_add.shape[0]:
                line = cute.domain_offset((query, head * g + lane % g, batch), m_lse_add)
                cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[line.iterator.toint()])
        for i in cutlass.range(cfg.tile_m // 32, unroll=1):
            row = m_block * cfg.tile_m + 32 * i + lane
            query = cutlass.min(row // g, m_q_scale.shape[0] - 1)
            source = cute.domain_offset((query, head * g + row % g, batch), m_q_scale)
            target = staged.iterator.toint() + 4 * (32 * i + lane)
            copy_4_bytes_or_zeros(target, source.iterator.toint(), Int32(4))
        target = staged.iterator.toint() + 4 * (cfg.tile_m + lane)
        if lane < cfg.k_groups:
            group = n * cfg.k_groups + lane
            if group < m_k_scale.shape[0]:
                source = cute.domain_offset((group, head_k, batch), m_k_scale)
                copy_4_bytes_or_zeros(target, source.iterator.toint(), Int32(4))
            else:  # what is found there must not make NaN of a masked score
                staged[cfg.tile_m + lane] = Float32(1.0)
        if lane == cfg.k_groups:
            source = cute.domain_offset((n * cfg.tile_n // V_SCALE_GROUP, head_k, batch), m_v_scale)
            copy_4_bytes_or_zeros(target, source.iterator.toint(), Int32(4))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)  # each lane for its own copies, which it then announces

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
        staged=None,
    ):
        """What the softmax of a work tile reads: (scales of this thread's two rows of Q, with all that multiplies a
        score; scales of K; of V), and with softcap or ALiBi what `adjust` wants.

        staged is what `stage_inputs` wrote; it is not there with `varlen`, and scales of keys then come later.
        side is (q_scale, k_scale, v_scale, lse_add, softmax_scale, slopes, sinks, softcap_factor, window_left,
        window_right), each of the first four (rows or groups, heads, batch). What a configuration has no use for is
        None.
        """
        m_q_scale, m_k_scale, m_v_scale, _, _, m_slopes, _, softcap_factor, _, _ = side
        cfg, g = self.cfg, self.cfg.pack_gqa
        q_scale = cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range_constexpr(2):
            if const_expr(cfg.varlen):
                row = row0 + ROW_STEP * i
                query = cutlass.min(row // g, seqlen_q - 1)
                scale = m_q_scale[query, head * g + row % g, batch]
            else:
                tid, _, _ = cute.arch.thread_idx()
                scale = staged[tid // 32 * 16 + tid % 32 // 4 + ROW_STEP * i]
            if const_expr(cfg.softcap):
                q_scale[i] = scale * softcap_factor
            else:
                q_scale[i] = scale * softmax_scale_log2 * Float32(self.score_unit)
        # of the key tile to come, see `Mainloop8bit.load_scales`
        k_scale, v_scale = cute.make_rmem_tensor(cfg.k_groups, Float32), cute.make_rmem_tensor(1, Float32)
        if const_expr(not cfg.varlen):
            for i in cutlass.range_constexpr(cfg.k_groups):
                k_scale[i] = staged[cfg.tile_m + i]
            v_scale[0] = staged[cfg.tile_m + cfg.k_groups]
        inputs = (q_scale, k_scale, v_scale, m_k_scale[None, head_k, batch], m_v_scale[None, head_k, batch])
        if const_expr(cfg.softcap):
            constant = cute.make_rmem_tensor(2, Float32)
            for i in cutlass.range_constexpr(2):
                constant[i] = self.of_mean(side, row0 + ROW_STEP * i, head, batch) * softcap_factor
            inputs = (*inputs, softmax_scale_log2 * Float32(self.score_unit), constant)
        if const_expr(cfg.alibi):
            slope = cute.make_rmem_tensor(2 if ROW_STEP % g else 1, Float32)  # or both rows are of one head
            for i in cutlass.range_constexpr(cute.size(slope)):
                row = row0 + ROW_STEP * i
                slope[i] = m_slopes[batch, head * g + row % g] * Float32(LOG2_E * self.score_unit)
            inputs = (*inputs, slope)
        return inputs

    @cute.jit
    def of_mean(self, side, row: Int32, head: Int32, batch: Int32) -> Float32:
        """q . mean key of a row of the tile, 0 where K was not smoothed."""
        m_lse_add, g = side[3], self.cfg.pack_gqa
        query = cutlass.min(row // g, m_lse_add.shape[0] - 1)
        return m_lse_add[query, head * g + row % g, batch]

    def v_fragments(self, sv: cute.Tensor, tid: Int32) -> list:
        """B fragments of V^T for each part: sv is (head_dim_v + SUM_ROWS, tile_n, kv_stages) in shared memory.

        The smem layout is made of swizzle atoms of 8 rows x `chunk` keys, all rows of a key chunk first.
        """
        cfg = self.cfg
        chunk = cfg.v_box
        atom = 8 * chunk
        atoms = (cfg.head_dim_v + SUM_ROWS) // 8
        out = []
        row = 0
        for n in self.pv_rows:
            layout = cute.make_layout(
                ((8, n // 8), (chunk, cfg.tile_n // chunk), cfg.kv_stages),
                stride=((chunk, atom), (1, atoms * atom), atoms * atom * (cfg.tile_n // chunk)),
            )
            part = cute.make_tensor(sv.iterator + (row // 8) * atom, layout)  # (n, tile_n, kv_stages)
            mma = self.pv_mma(n)
            out.append(mma.make_fragment_B(mma.get_slice(tid).partition_B(part)))
            row += n
        return out

    def new_output(self, tid: Int32) -> list:
        """FP32 accumulators of O and of the row sum, one for each part of the value dimension, zeroed."""
        out = []
        for n in self.pv_rows:
            shape = self.pv_mma(n).get_slice(tid).partition_shape_C((self.cfg.tile_m, n))
            acc = cute.make_rmem_tensor(shape, Float32)
            acc.fill(0.0)
            out.append(acc)
        return out

    def new_p(self) -> cute.Tensor:
        """P of one tile as the A operand of P V, e4m3."""
        shape = self.pv_mma(self.pv_rows[0]).partition_shape_A((self.cfg.tile_m, self.cfg.tile_n))
        return cute.make_rmem_tensor(shape, F8)

    # -- products ---------------------------------------------------------------------------------------------

    def new_scores(self) -> list:
        """Accumulators of S, one for each part of the keys, float32 or float16; see `to_float`."""
        shape = self.qk_mma().get_slice(0).partition_shape_C((self.cfg.tile_m, self.part_keys))
        return [cute.make_rmem_tensor(shape, self.score_type) for _ in range(self.cfg.qk_splits)]

    def new_slots(self) -> list:
        """Registers for the parts of T = P V that are in flight; part i goes to slot i % pv_depth."""
        slots = []
        for first in range(self.pv_depth):
            of_slot = self.pv_rows[first :: self.pv_depth]
            slot = cute.make_rmem_tensor(max(of_slot) // 2, Float32)
            # A longer part after a shorter one names registers that have held nothing: they are set, or to the
            # compiler they are in use since the start of the kernel, and products wait for one another.
            for i in range(of_slot[0] // 2, max(of_slot) // 2):
                slot[i] = opaque_zero()
            slots.append(slot)
        return slots

    def slot_view(self, slot: cute.Tensor, part: int) -> cute.Tensor:
        """The accumulator of one part of T in a slot."""
        n = self.pv_rows[part]
        return cute.make_tensor(
            slot.iterator, cute.make_layout(((2, 2, n // 8), 1, 1), stride=((1, 2, 4), 0, 0))
        )

    @cute.jit
    def to_float(self, s: cute.Tensor):
        """int32 results of an int8 product, exact in float32, converted in place; nothing to do for e4m3."""
        if const_expr(self.int8):
            ints = cute.recast_tensor(s, Int32)
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = ints[i].to(Float32)

    @cute.jit
    def scores(
        self,
        part: cutlass.Constexpr,
        acc: cute.Tensor,
        q_frag: cute.Tensor,
        k_frag: cute.Tensor,
        stage: Int32,
    ):
        """Issue S = Q K^T of one part of the keys of the tile in `stage` (not waited for)."""
        mma = self.qk_mma()  # a fresh atom: ACCUMULATE set here must not leak out of a loop body
        if const_expr(self.int8):
            acc = cute.recast_tensor(acc, Int32)
        mma.set(wg.Field.ACCUMULATE, False)
        wg.fence()  # softmax has read and written these registers: the product may not overtake it
        for kb in cutlass.range_constexpr(cute.size(q_frag, mode=[2])):
            keys = k_frag[None, part, kb, stage]  # one part is one atom: the mode that gemm loops over is 1
            keys = cute.make_tensor(keys.iterator, cute.append(keys.layout, cute.make_layout(1)))
            cute.gemm(mma, acc, q_frag[None, None, kb], keys, acc)
            mma.set(wg.Field.ACCUMULATE, True)
        wg.commit_group()  # a group of its own, which `Mainloop.step` waits for by itself

    @cute.jit
    def product(
        self,
        part: cutlass.Constexpr,
        p: cute.Tensor,
        v_frag: cute.Tensor,
        stage: Int32,
        slot: cute.Tensor,
        reuse,
    ):
        """Issue T = P V of one part for the tile in `stage` (not waited for).

        reuse  None, or a run-time False where the slot held a part that has been folded. As the value of "accumulate"
               it makes the old part an operand that is not used: so the compiler overwrites its registers, and only
               when the fold has read them. With a constant it issues first and wants registers for a third part.
        """
        mma = self.pv_mma(self.pv_rows[part])
        acc = self.slot_view(slot, part)
        mma.set(wg.Field.ACCUMULATE, False if const_expr(reuse is None) else reuse)
        wg.fence()  # P's registers have been written, the slot's read by the fold: the product may not overtake them
        for kb in cutlass.range_constexpr(cute.size(p, mode=[2])):
            cute.gemm(mma, acc, p[None, None, kb], v_frag[None, None, kb, stage], acc)
            mma.set(wg.Field.ACCUMULATE, True)
        wg.commit_group()  # likewise

    @cute.jit
    def fold(
        self,
        part: cutlass.Constexpr,
        out: cute.Tensor,
        slot: cute.Tensor,
        rescale: cute.Tensor,
        v_ratio: Float32,
    ):
        """O <- O * rescale * v_ratio + T, the row sum without v_ratio: O is kept in units of this tile's V scale."""
        last = part == len(self.pv_rows) - 1
        o, t = rows(out), rows(slot)  # the slot may be longer than this part
        for r in cutlass.range_constexpr(2):
            factor = rescale[r] * v_ratio
            for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                if const_expr(last and i >= self.sum_column):
                    o[r, i] = o[r, i] * rescale[r] + t[r, i]
                else:
                    o[r, i] = o[r, i] * factor + t[r, i]

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
        """Divide by the row sum, apply the last V scale; lse (2,) in natural log, with the share of the mean key, which
        may be NaN.

        A row without keys gives 0, and -inf or its sink. One with keys whose sum is 0 has left float32's range: NaN,
        not 0.
        """
        reference, _, _, v_scale = state[:4]
        last = rows(out[len(out) - 1])
        # the loads for both rows first: they take longer than all the rest
        share = cute.make_rmem_tensor(2, Float32)
        if const_expr(not self.cfg.softcap):  # else scores have it
            for r in cutlass.range_constexpr(2):
                share[r] = side[4] * self.of_mean(side, row0 + ROW_STEP * r, head, batch)
        for r in cutlass.range_constexpr(2):
            total = last[r, self.sum_column]  # held by lanes with lane % 4 == 0
            total = cute.arch.shuffle_sync(total, offset=cute.arch.lane_idx() // 4 * 4)
            empty = first_hidden_key(limits, r, self.cfg) <= first_key(limits, r, self.cfg)
            inverse = v_scale[0] * cute.arch.rcp_approx(total)  # 0 * inf below: NaN
            ref = reference[r]
            if const_expr(self.code):
                ref = self.octaves_of(ref)
            if const_expr(self.cfg.sinks):
                total = Float32.nan if total == Float32(0.0) else total
                total = Float32(0.0) if empty else total
                ref = -Float32.inf if empty else ref - Float32(self.lift)
                sink = self.sink(side, row0 + ROW_STEP * r, head, empty, share[r])
                top = cute.arch.fmax(ref, sink, nan=True)
                top = Float32(0.0) if top == -Float32.inf else top  # a sink of -inf takes no share
                factor = cute.math.exp2(ref - top, fastmath=True)
                total = total * factor + cute.math.exp2(sink - top, fastmath=True)
                inverse = v_scale[0] * factor * cute.arch.rcp_approx(total)
                log2_sum = top + cute.math.log2(total, fastmath=True)
                lse[r] = log2_sum * Float32(math.log(2.0)) - Float32(self.lse_bias)
            else:
                log2_sum = ref + cute.math.log2(total, fastmath=True) - Float32(self.lift)
                value = log2_sum * Float32(math.log(2.0)) - Float32(self.lse_bias)
                value = Float32.nan if total == Float32(0.0) else value
                lse[r] = -Float32.inf if empty else value
            if const_expr(not self.cfg.softcap):
                lse[r] = lse[r] if empty else lse[r] + share[r]
            for part in cutlass.range_constexpr(len(out)):
                o = rows(out[part])
                for i in cutlass.range_constexpr(self.cfg.pv_parts[part] // 4):
                    o[r, i] = o[r, i] * inverse
        clear_empty_rows(out, self.cfg.pv_parts, limits, self.cfg)

    @cute.jit
    def sink(self, side, row: Int32, head: Int32, empty, share: Float32) -> Float32:
        """The sink of a row as a reference, in octaves: of the sums of rounded P, and beside scores as they are here.

        share is that of the mean key. That of a row without keys is the sink itself, but for what `finish` takes off.
        """
        sinks, g = side[6], self.cfg.pack_gqa
        sink = sinks[head * g + row % g] + Float32(self.lse_bias)
        if const_expr(not self.cfg.softcap):  # scores lack it
            sink = sink if empty else sink - share
        return sink * Float32(LOG2_E)


class HalfPolicy(HalfSoftmax, Fp8Policy):
    """`Fp8Policy` with scores in float16."""
