"""Attention over all keys from attention over two parts of them, in one pass over their outputs.

    lse_out = log(e^lse_before + e^lse)
    out = before + (part - before) e^(lse - lse_out)

Tensors, last stride 1 of the first three, every other stride dynamic:

    before, part, out (batch, rows, heads, head_dim_v)    float32, bf16 or fp16, see MergeConfig
    lse_before, lse, lse_out (batch, heads, rows) float32, -inf where a row has seen no key

out may be before, and lse_out lse_before: a thread reads its elements before it writes them, and a warp its lse. Where
one lse is -inf the other part comes out as it is. Where both are, out is before.

Bound by bandwidth. A CTA takes PASSES passes over rows of one head, eight elements a thread. Heads are fastest among
CTAs: neighbours in memory run together.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.floats import bf16_pair, fp16_pair
from ..common.pointers import aligned
from ..config import MergeConfig
from .vectors import IN_TYPES, widen

THREADS = 256
PASSES = 4  # of a CTA over as many rows as it has threads for; their loads are in flight together
LOG2_E = math.log2(math.e)


class Merge:
    """Host entry of one configuration, and its kernel."""

    def __init__(self, cfg: MergeConfig):
        cfg.check()
        self.cfg = cfg
        self.element = IN_TYPES[cfg.dtype]
        self.pair = bf16_pair if cfg.dtype == "bf16" else fp16_pair
        vectors = cfg.head_dim_v // 8
        self.lanes = 1 << (vectors - 1).bit_length()  # of one row, 4 to 32; those past head_dim_v do nothing
        self.pass_rows = THREADS // self.lanes
        self.rows = PASSES * self.pass_rows

    @cute.jit
    def __call__(
        self,
        before: cute.Tensor,
        part: cute.Tensor,
        out: cute.Tensor,
        lse_before: cute.Tensor,
        lse: cute.Tensor,
        lse_out: cute.Tensor,
        stream,
    ):
        batch, rows, heads, _ = out.shape
        blocks = cute.ceil_div(rows, self.rows)
        self.kernel(before, part, out, lse_before, lse, lse_out).launch(
            grid=[heads * blocks * batch, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        m_before: cute.Tensor,
        m_part: cute.Tensor,
        m_out: cute.Tensor,
        m_lse_before: cute.Tensor,
        m_lse: cute.Tensor,
        m_lse_out: cute.Tensor,
    ):
        cfg = self.cfg
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        _, rows, heads, _ = m_out.shape
        blocks = cute.ceil_div(rows, self.rows)
        head, block, batch = cta % heads, cta // heads % blocks, cta // heads // blocks
        before, part, out = (x[batch, None, head, None] for x in (m_before, m_part, m_out))
        lse_before, lse, lse_out = (x[batch, head, None] for x in (m_lse_before, m_lse, m_lse_out))
        column = tid % self.lanes * 8
        # Passes past the last row, and lanes past head_dim_v, read what is there and write nothing: without a branch
        # all loads are in flight.
        at = min(column, cfg.head_dim_v - 8)
        a = cute.make_rmem_tensor((8, PASSES), Float32)
        b = cute.make_rmem_tensor((8, PASSES), Float32)
        old = cute.make_rmem_tensor(PASSES, Float32)
        new = cute.make_rmem_tensor(PASSES, Float32)
        for p in cutlass.range_constexpr(PASSES):
            row = min(block * self.rows + p * self.pass_rows + tid // self.lanes, rows - 1)
            old[p], new[p] = lse_before[row], lse[row]
            self.load(before, row, at, a[None, p], cfg.wide_before)
            self.load(part, row, at, b[None, p], False)
        cute.arch.sync_warp()  # a row's lanes are of one warp: all have read what one of them overwrites
        for p in cutlass.range_constexpr(PASSES):
            row = block * self.rows + p * self.pass_rows + tid // self.lanes
            total, share = self.weigh(old[p], new[p])
            if row < rows:
                if tid % self.lanes == 0:
                    lse_out[row] = total
                if column < cfg.head_dim_v:
                    self.store(out, row, column, a[None, p], b[None, p], share)

    @cute.jit
    def weigh(self, old: Float32, new: Float32):
        """(lse of both, share of the new part). NaN of either is NaN of both."""
        top = cute.arch.fmax(old, new)
        less = cute.math.exp2(-cute.math.absf(old - new) * Float32(LOG2_E), fastmath=True)  # e^ of minus it
        sum_of_both = Float32(1.0) + less
        total = top + cute.math.log2(sum_of_both, fastmath=True) * Float32(math.log(2.0))
        share = (Float32(1.0) if new >= old else less) / sum_of_both
        unseen = (old == -Float32.inf) & (new == -Float32.inf)  # their difference is NaN
        return (old if unseen else total), (Float32(0.0) if unseen else share)

    @cute.jit
    def load(self, x: cute.Tensor, row: Int32, column: Int32, target: cute.Tensor, wide: cutlass.Constexpr):
        """Eight elements of x (rows, head_dim_v) as float32 into target (8,)."""
        first = cute.domain_offset((row, column), x).iterator
        if const_expr(wide):
            for half in cutlass.range_constexpr(2):
                source = cute.make_tensor(aligned(first + 4 * half, 16), cute.make_layout(4))
                cute.autovec_copy(source, cute.make_tensor(target.iterator + 4 * half, cute.make_layout(4)))
        else:
            words = cute.make_rmem_tensor(4, Uint32)
            pointer = aligned(cute.recast_ptr(first, dtype=Uint32), 16)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)
            for w in cutlass.range_constexpr(4):
                target[2 * w], target[2 * w + 1] = widen(words[w], self.element)

    @cute.jit
    def store(
        self, x: cute.Tensor, row: Int32, column: Int32, a: cute.Tensor, b: cute.Tensor, share: Float32
    ):
        """a + (b - a) share, eight elements, to x (rows, head_dim_v)."""
        mixed = cute.make_rmem_tensor(8, Float32)
        near = share < Float32(0.5)  # to a; counted from the nearer of both, a share of 0 or 1 rounds nothing
        step = share if near else share - Float32(1.0)
        for i in cutlass.range_constexpr(8):
            mixed[i] = (a[i] if near else b[i]) + (b[i] - a[i]) * step
        first = cute.domain_offset((row, column), x).iterator
        if const_expr(self.cfg.wide_out):
            for half in cutlass.range_constexpr(2):
                source = cute.make_tensor(mixed.iterator + 4 * half, cute.make_layout(4))
                cute.autovec_copy(
                    source, cute.make_tensor(aligned(first + 4 * half, 16), cute.make_layout(4))
                )
        else:
            words = cute.make_rmem_tensor(4, Uint32)
            for w in cutlass.range_constexpr(4):
                words[w] = self.pair(mixed[2 * w], mixed[2 * w + 1])
            pointer = aligned(cute.recast_ptr(first, dtype=Uint32), 16)
            cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(4)))
