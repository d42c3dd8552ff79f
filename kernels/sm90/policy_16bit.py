"""What makes the Hopper forward a 16-bit one: operands, softmax, accumulation.

FlashAttention-3's forward (arXiv 2407.08608, sections 3.1 and 3.2); softmax and its numerics are in
common/softmax_16bit.py, but for m_i. Here the reference of a row is an earlier largest score as long as no score is
more than LAZY_OCTAVES above it. P, and in float32 l and O, reach 2^LAZY_OCTAVES of what they are there, which cancels
in O / l. So most steps need no maximum over the four lanes of a row, and no factor for l and O. What it costs: the
largest P of a row, which was 1, is rounded to 16 bits like the others.

Operands: Q and K are K-major as they come; V, as it comes, is the MN-major B operand (rows of head_dim_v contiguous);
P goes from registers, where the accumulator of S lies as the A operand wants it: register i of a lane l in warp w holds
row 16w + l/4 + 8*((i/2)%2), column 8*(i/4) + 2*(l%4) + i%2, in both.

Shared memory of V: (v_columns, tile_n, kv_stages), swizzled rows of `v_columns`, keys first.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.floats import bf16_pair, fp16_pair, product_rn
from ..common.scores import rows
from ..common.softmax_16bit import HUGE, Softmax16bit
from ..common.warp import quad_max
from ..config import Fwd16Config
from .operands import ELEMENTS, column_major_atom, opaque_zero

LAZY_OCTAVES = 8.0  # of 16 in fp16, whose range P has to stay in


class Policy16bit(Softmax16bit):
    """Matrix products, beside the softmax, of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: Fwd16Config):
        super().__init__(cfg)
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

    # -- softmax ----------------------------------------------------------------------------------------------

    def new_state(self):
        """As the base class, of which the first is the reference, before its factor; and the score up to which that
        stays, (2,)."""
        limit = cute.make_rmem_tensor(2, Float32)
        limit.fill(-Float32.inf)
        return (*super().new_state(), limit)

    @cute.jit
    def softmax(self, masking: cutlass.Constexpr, acc: cute.Tensor, state, scale: Float32):
        """As the base class, which serves tiles that need a mask. In the others a thread compares its own columns with
        the limits of its rows, and the lanes of a warp look for new references together where one is passed."""
        if const_expr(masking):
            super().softmax(masking, acc, state[:3], scale)
            self.set_limits(state, scale)
        else:
            self.lazy_softmax(acc, state, scale)

    @cute.jit
    def set_limits(self, state, scale: Float32):
        """The limits of new references: -inf, which every score passes, of rows that are huge or have seen no key."""
        reference, limit = state[0], state[3]
        margin = Float32(LAZY_OCTAVES) * cute.arch.rcp_approx(scale)
        for r in cutlass.range_constexpr(2):
            octaves = product_rn(reference[r], scale)
            huge = cute.arch.fmax(octaves, -octaves) >= Float32(HUGE)
            limit[r] = -Float32.inf if huge else reference[r] + margin

    @cute.jit
    def lazy_softmax(self, acc: cute.Tensor, state, scale: Float32):
        reference, _, rescale, limit = state
        s = rows(acc)
        columns = cute.size(s, mode=[1])
        top, offset = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        factor = cute.make_rmem_tensor(1, Float32)
        factor[0] = scale
        for r in cutlass.range_constexpr(2):
            own = s[r, 0]
            for i in cutlass.range_constexpr(1, columns):
                own = cute.arch.fmax(own, s[r, i])
            top[r] = own
            rescale[r] = Float32(1.0)
            offset[r] = -product_rn(reference[r], scale)
        if cute.arch.vote_any_sync((top[0] > limit[0]) | (top[1] > limit[1])):
            self.move_references(s, top, state, offset, factor)
        self.exponentials(s, state, factor, offset)

    @cute.jit
    def move_references(self, s, top, state, offset, factor):
        """The references of both rows become their largest scores; top (2,) is that of the thread's columns."""
        reference, _, rescale, _ = state
        scale = factor[0]
        before = cute.make_rmem_tensor(2, Float32)
        size = Float32(0.0)
        for r in cutlass.range_constexpr(2):
            before[r] = reference[r]
            reference[r] = quad_max(cute.arch.fmax(reference[r], top[r]))
            octaves = product_rn(reference[r], scale)
            rescale[r] = cute.math.exp2(product_rn(before[r], scale) - octaves, fastmath=True)
            offset[r] = -octaves
            size = cute.arch.fmax(size, cute.arch.fmax(octaves, -octaves))
        if cute.arch.vote_any_sync(size >= Float32(HUGE)):
            self.subtract_first(s, before, reference, rescale, offset, factor)
        self.set_limits(state, scale)

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

    @cute.jit
    def pack(self, acc: cute.Tensor, p: cute.Tensor):
        """Round P to the A operand; call it only when no WGMMA that reads `p` is in flight (else C7513 serialises)."""
        pair = bf16_pair if const_expr(self.cfg.dtype == "bf16") else fp16_pair
        for w in cutlass.range_constexpr(cute.size(p)):
            p[w] = pair(acc[2 * w], acc[2 * w + 1])

    @cute.jit
    def rescale(self, out: list, state):
        """O <- O * 2^(r_old - r); where no row of the warp has a new reference, O stays as it is."""
        factors = state[2]
        o = rows(out[0])
        if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    o[r, i] = o[r, i] * factors[r]
