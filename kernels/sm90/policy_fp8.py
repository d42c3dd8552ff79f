"""What makes the Hopper forward an 8-bit one: operands, scales, P, accumulation.

Numerics (docs/numerics.md has the derivation). For query row i, key j of K scale group g and V scale group u:

    x_ij = S_ij * s_ig - m_i          s_ig = q_scale_i * k_scale_g * softmax_scale * log2(e)
    P_ij = e4m3(2^(x_ij + 8))         2^8 lifts P out of e4m3's subnormals; the largest is 2^8.5 <= 448
    T    = P V8 of one key tile       in the tensor core, whose accumulator keeps about 14 bits
    O    = O * 2^(m_old - m) * v_old / v_u + T      in FP32: two-level accumulation, V's scale for free
    l    = l * 2^(m_old - m) + rowsum(P)            the row sum is column head_dim of T, by a row of ones in V^T

The reference m is the running row maximum rounded to an integer. Any m is exact in mathematics; an integral one
makes every rescale a power of two and every shift of P's code a multiple of eight, so that the order of key tiles
does not change what is rounded.

Accumulator layout (WGMMA, one warpgroup, 64 rows): register i of a lane l in warp w holds row
16w + l/4 + 8*((i/2)%2), column 8*(i/4) + 2*(l%4) + i%2. `rows` views it as (2, columns of the lane). The A operand
of an 8-bit WGMMA wants other keys in the same registers; the quantiser permutes V's keys instead (see
kernels/any/quantize.py), so P's bytes are the accumulator's values in order.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int8, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wg

from ..config import K_SCALE_GROUP, SUM_ROWS, FwdConfig

F8 = cutlass.Float8E4M3FN

# An s32 accumulator that starts at the bits of 12582912.0f (1.5 * 2^23) ends as the float 12582912 + dot, for
# |dot| < 2^22 (127^2 * 256 = 4129024 fits): no conversion instruction. The FMA that applies the scale drops it.
INT8_OFFSET = 12582912.0
INT8_OFFSET_BITS = 0x4B400000

# P's e4m3 code without exp2. An e4m3 byte, read as a number, is 8 * (log2(value) + 7) with the fraction bent:
# mantissa steps are linear in value, not in its log. round(8 * log2(P * 2^8) + 56 - 0.34375) is the code whose
# value is nearest on average; 8 * 8 + 56 - 0.34375 = 119.65625 is a multiple of 2^-5, exact in sums with m.
CODE_BIAS = 119.65625
EX2_BIAS = 8.0
CODE_LSE_BIAS = 0.0
ROUND_LIMIT = 4194304.0  # 2^22: beyond it adding and subtracting 1.5 * 2^23 no longer rounds to an integer


@cute.jit
def pack_codes(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four values 8 * log2(P) + bias -> four e4m3 codes in one register.

    cvt.relu clamps what is too small (and -inf) to code 0 and keeps NaN; adding 1024 in f16 rounds to an integer
    that then is the low byte (NaN: 0xff, the e4m3 NaN). Per four values 2 F2FP, 2 HADD2, 1 PRMT; no ex2.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 u, v, k; mov.b32 k, 0x64006400;"
        " cvt.rn.relu.f16x2.f32 u, {$r1}, {$r0}; cvt.rn.relu.f16x2.f32 v, {$r3}, {$r2};"
        " add.rn.f16x2 u, u, k; add.rn.f16x2 v, v, k; prmt.b32 {$w0}, u, v, 0x6420; }",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


@cute.jit
def rows(acc: cute.Tensor) -> cute.Tensor:
    """A warpgroup accumulator ((2, 2, n/8), 1, 1) as (2 rows, (2, n/8) columns) of the thread."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, acc.shape[0][2])), stride=(2, (1, 4))))


class Fp8Policy:
    """Matrix products and softmax of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: FwdConfig):
        self.cfg = cfg
        self.qk_type = F8 if cfg.qk_dtype == "e4m3" else Int8
        self.int8 = cfg.qk_dtype == "int8"
        self.code = cfg.p_rounding == "code"
        self.lse_bias = CODE_LSE_BIAS if self.code else 0.0
        # rows of V^T that each partial product takes; the last one has the rows of ones and zeros
        part = cfg.head_dim // cfg.pv_splits
        self.pv_rows = [part] * (cfg.pv_splits - 1) + [part + SUM_ROWS]
        self.sum_column = part // 8 * 2  # index, in `rows` of the last part, of the row sum (lanes l % 4 == 0)

    # -- operands ---------------------------------------------------------------------------------------------

    def qk_mma(self) -> cute.TiledMma:
        shape = (64, self.cfg.tile_n)
        k_major = OperandMajorMode.K
        if self.int8:
            op = wg.MmaI8Op(Int8, Int8, Int32, shape, wg.OperandSource.SMEM, k_major, k_major)
        else:
            op = wg.MmaF8Op(F8, F8, Float32, shape, wg.OperandSource.SMEM, k_major, k_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def pv_mma(self, n: int) -> cute.TiledMma:
        k_major = OperandMajorMode.K
        op = wg.MmaF8Op(F8, F8, Float32, (64, n), wg.OperandSource.RMEM, k_major, k_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def v_fragments(self, sv: cute.Tensor, tid: Int32) -> list:
        """B fragments of V^T for each part: sv is (head_dim + SUM_ROWS, tile_n, kv_stages) in shared memory.

        The smem layout is made of swizzle atoms of 8 rows x `chunk` keys, all rows of a key chunk first.
        """
        cfg = self.cfg
        chunk = min(cfg.tile_n, 128)
        atom = 8 * chunk
        atoms = (cfg.head_dim + SUM_ROWS) // 8
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

    @cute.jit
    def scores(self, q_frag: cute.Tensor, k_frag: cute.Tensor, stage: Int32) -> cute.Tensor:
        """Issue S = Q K^T of the tile in `stage` (not waited for). Returns the FP32 view of the accumulator."""
        mma = self.qk_mma()  # a fresh atom: ACCUMULATE set here must not leak out of a loop body
        shape = mma.get_slice(0).partition_shape_C((self.cfg.tile_m, self.cfg.tile_n))
        acc = cute.make_rmem_tensor(shape, Int32 if const_expr(self.int8) else Float32)
        if const_expr(self.int8):
            acc.fill(INT8_OFFSET_BITS)
        mma.set(wg.Field.ACCUMULATE, self.int8)
        wg.fence()
        for kb in cutlass.range_constexpr(cute.size(q_frag, mode=[2])):
            cute.gemm(mma, acc, q_frag[None, None, kb], k_frag[None, None, kb, stage], acc)
            mma.set(wg.Field.ACCUMULATE, True)
        wg.commit_group()
        return cute.recast_tensor(acc, Float32) if const_expr(self.int8) else acc

    @cute.jit
    def product(self, part: cutlass.Constexpr, p: cute.Tensor, v_frag: cute.Tensor, stage: Int32) -> cute.Tensor:
        """Issue T = P V of one part for the tile in `stage`, into a fresh accumulator (not waited for)."""
        n = self.pv_rows[part]
        mma = self.pv_mma(n)
        acc = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((self.cfg.tile_m, n)), Float32)
        mma.set(wg.Field.ACCUMULATE, False)
        wg.fence()
        for kb in cutlass.range_constexpr(cute.size(p, mode=[2])):
            cute.gemm(mma, acc, p[None, None, kb], v_frag[None, None, kb, stage], acc)
            mma.set(wg.Field.ACCUMULATE, True)
        wg.commit_group()
        return acc

    # -- softmax ----------------------------------------------------------------------------------------------

    @cute.jit
    def softmax(
        self, acc: cute.Tensor, row_max: cute.Tensor, rescale: cute.Tensor, q_scale: cute.Tensor, k_scale: cute.Tensor
    ):
        """Scores -> what `pack` turns into P, in place; updates the row reference and its rescale factor.

        acc      scores of the tile, masked ones -inf (int8: every one carries INT8_OFFSET)
        row_max  (2,) integral reference of each row, -inf before any visible key
        rescale  (2,) out: 2^(old reference - new one), 0 before any visible key
        q_scale  (2,) q_scale * softmax_scale * log2(e);  k_scale (tile_n / 64,)
        """
        s = rows(acc)
        per_group = K_SCALE_GROUP // 4  # columns of a K scale group in one thread
        groups = self.cfg.k_groups
        scale = cute.make_rmem_tensor((2, groups), Float32)
        for r in cutlass.range_constexpr(2):
            tile_max = -Float32.inf
            for g in cutlass.range_constexpr(groups):
                factor = q_scale[r] * k_scale[g]
                if const_expr(self.int8):
                    # two spare mantissa bits make INT8_OFFSET * factor exact, the same constant in every use
                    factor = (factor.bitcast(Int32) & Int32(-4)).bitcast(Float32)
                scale[r, g] = factor
                top = s[r, g * per_group]
                for i in cutlass.range_constexpr(1, per_group):
                    top = cute.arch.fmax(top, s[r, g * per_group + i])
                if const_expr(self.int8):
                    top = top - Float32(INT8_OFFSET)
                tile_max = cute.arch.fmax(tile_max, top * factor)
            for step in cutlass.range_constexpr(2):  # the four lanes of a row
                tile_max = cute.arch.fmax(tile_max, cute.arch.shuffle_sync_bfly(tile_max, offset=1 << step))
            rounded = (tile_max + Float32(INT8_OFFSET)) - Float32(INT8_OFFSET)
            small = cute.arch.fmax(tile_max, -tile_max) < Float32(ROUND_LIMIT)
            tile_max = rounded if small else tile_max
            new_max = cute.arch.fmax(row_max[r], tile_max)
            reference = Float32(0.0) if new_max == -Float32.inf else new_max
            rescale[r] = cute.math.exp2(row_max[r] - reference, fastmath=True)
            row_max[r] = new_max
            for g in cutlass.range_constexpr(groups):
                if const_expr(self.code):
                    factor = scale[r, g] * Float32(8.0)
                    shift = Float32(CODE_BIAS) - reference * Float32(8.0)
                else:
                    factor = scale[r, g]
                    shift = Float32(EX2_BIAS) - reference
                if const_expr(self.int8):
                    shift = shift - factor * Float32(INT8_OFFSET)
                for i in cutlass.range_constexpr(per_group):
                    x = s[r, g * per_group + i] * factor + shift
                    if const_expr(not self.code):
                        x = cute.math.exp2(x, fastmath=True)
                    s[r, g * per_group + i] = x

    @cute.jit
    def pack(self, acc: cute.Tensor, p: cute.Tensor):
        """Write P's e4m3 bytes; call it only when no WGMMA that reads `p` is in flight (else C7513 serialises)."""
        layout = cute.make_layout(
            (((2, 2), 2, 2), 1, p.shape[2]), stride=(((1, 4), 2, 8), 0, 16)
        )  # the accumulator's values in the order of the A operand's bytes
        values = cute.make_tensor(acc.iterator, layout)
        if const_expr(self.code):
            flat = cute.make_rmem_tensor(cute.size(values), Float32)
            flat.store(values.load())
            words = cute.recast_tensor(p, Uint32)
            for w in cutlass.range_constexpr(cute.size(words)):
                words[w] = pack_codes(flat[4 * w], flat[4 * w + 1], flat[4 * w + 2], flat[4 * w + 3])
        else:
            p.store(values.load().to(F8))

    @cute.jit
    def fold(self, part: cutlass.Constexpr, out: cute.Tensor, tile: cute.Tensor, rescale: cute.Tensor, v_ratio: Float32):
        """O <- O * rescale * v_ratio + T, the row sum without v_ratio: O is kept in units of this tile's V scale."""
        o, t = rows(out), rows(tile)
        last = part == len(self.pv_rows) - 1
        for r in cutlass.range_constexpr(2):
            factor = rescale[r] * v_ratio
            for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                if const_expr(last and i >= self.sum_column):
                    o[r, i] = o[r, i] * rescale[r] + t[r, i]
                else:
                    o[r, i] = o[r, i] * factor + t[r, i]

    # -- finish -----------------------------------------------------------------------------------------------

    @cute.jit
    def finish(self, out: list, row_max: cute.Tensor, lse: cute.Tensor, v_scale: Float32):
        """Divide by the row sum, apply the last V scale; lse (2,) in natural log, -inf for a row without keys."""
        last = rows(out[len(out) - 1])
        for r in cutlass.range_constexpr(2):
            total = last[r, self.sum_column]  # held by lanes with lane % 4 == 0
            total = cute.arch.shuffle_sync(total, offset=cute.arch.lane_idx() // 4 * 4)
            empty = total == Float32(0.0)
            inverse = Float32(0.0) if empty else v_scale * cute.arch.rcp_approx(total)
            log2_sum = row_max[r] + cute.math.log2(total, fastmath=True) - Float32(EX2_BIAS)
            lse[r] = -Float32.inf if empty else log2_sum * Float32(math.log(2.0)) - Float32(self.lse_bias)
            for part in cutlass.range_constexpr(len(out)):
                o = rows(out[part])
                for i in cutlass.range_constexpr(self.cfg.head_dim // self.cfg.pv_splits // 4):
                    o[r, i] = Float32(0.0) if empty else o[r, i] * inverse
