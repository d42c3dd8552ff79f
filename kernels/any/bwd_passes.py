"""The passes before and behind the main kernel of the backward (sm90/bwd.py has the tensors and the formulas).

Before (`BwdPrologue`): D = rowsum(dO * O) - dlse and lse2 = lse * log2(e) of every query row, for rows that are padded
to a multiple of tile_m; and zeros for the sum of dQ, with `clears_ahead` of the first heads, and its turns. Behind
(`BwdEpilogue`): dQ = softmax_scale * sum, rounded to 16 bits and brought from the order of accumulators into rows. Both
are bound by bandwidth; a CTA takes tile_m rows of one head, of a slot where there are sequences of unlike length
(common/varlen.py). Rows of no sequence, before the first and behind the last, have no slot: the pass before clears
their gradients.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..common.pointers import aligned
from ..common.varlen import block_of_slot, slot_shift
from ..config import Bwd16Config
from .vectors import IN_TYPES, widen

THREADS = 256
LOG2_E = math.log2(math.e)


@cute.jit
def load_words(x: cute.Tensor, row: Int32, column: Int32, inside) -> cute.Tensor:
    """Eight 16-bit elements of row `row` of x (rows, dim) as four words; zeros where not `inside`."""
    words = cute.make_rmem_tensor(4, Uint32)
    words.fill(0)
    if inside:
        pointer = cute.recast_ptr(cute.domain_offset((row, column), x).iterator, dtype=Uint32)
        cute.autovec_copy(cute.make_tensor(aligned(pointer, 16), cute.make_layout(4)), words)
    return words


class BwdPrologue:
    """D, lse2 and zeros, see above."""

    def __init__(self, cfg: Bwd16Config):
        self.cfg = cfg
        self.element = IN_TYPES[cfg.dtype]
        vectors = -(-cfg.head_dim_v // 8)
        self.lanes = 1 << (vectors - 1).bit_length()  # of one row, 4 to 32; those past head_dim_v have zeros
        self.pass_rows = THREADS // self.lanes

    @cute.jit
    def launch(
        self,
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        dout: cute.Tensor,  # likewise
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q)
        dlse: cute.Tensor,  # likewise, may be expanded
        lse2: cute.Tensor,  # (batch, heads_q, rows)
        d_rows: cute.Tensor,  # likewise
        dq_sum: cute.Tensor,  # (batch, heads_q, blocks, tile_m * qk_columns)
        turns: cute.Tensor,  # (batch, heads_q, rows, dq_parts), see sm90/bwd.py
        clear_heads: Int32,  # of all batches, whose sum of dQ is cleared; read with `clears_ahead`
        stream,
        gradients=(),  # dq, dk, dv (batch, seqlen, heads, dim); read with `varlen`
        lengths=(),  # with `varlen` (cu_seqlens_q, cu_seqlens_k); blocks are slots then
    ):
        batch, heads, blocks, _ = dq_sum.shape
        gradients = gradients if const_expr(self.cfg.varlen) else ()
        self.kernel(
            out, dout, lse, dlse, lse2, d_rows, dq_sum, turns, clear_heads, gradients, lengths
        ).launch(grid=[blocks * heads * batch, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        m_out: cute.Tensor,
        m_dout: cute.Tensor,
        m_lse: cute.Tensor,
        m_dlse: cute.Tensor,
        m_lse2: cute.Tensor,
        m_d_rows: cute.Tensor,
        m_dq_sum: cute.Tensor,
        m_turns: cute.Tensor,
        clear_heads: Int32,
        gradients,
        lengths,
    ):
        cfg = self.cfg
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        _, heads, blocks, _ = m_dq_sum.shape
        block, head, batch = cta % blocks, cta // blocks % heads, cta // blocks // heads
        first, end = Int32(0), m_out.shape[1]  # with `varlen`, row of the block, and of the sequence's end
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        dq_sum = m_dq_sum[batch, head, block, None]
        count = cfg.tile_m * cfg.qk_columns // 4
        if const_expr(cfg.clears_ahead):
            count = Int32(count) if batch * heads + head < clear_heads else Int32(0)
            if (block == 0) & (tid < cfg.dq_parts):
                m_turns[batch, head, 0, tid] = Int32(0)
        if const_expr(cfg.varlen):
            _, first, left = block_of_slot(block, lengths[0], slot_shift(cfg.tile_m))
            end = first + left
            count = Int32(count) if left > 0 else Int32(0)
            self.clear_outside(gradients[0], lengths[0])
            self.clear_outside(gradients[1], lengths[1])
            self.clear_outside(gradients[2], lengths[1])
        for i in cutlass.range(tid, count, THREADS, unroll=4):
            target = aligned(dq_sum.iterator + 4 * i, 16)
            cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))
        if const_expr(cfg.deterministic):
            if tid < cfg.dq_parts:
                m_turns[batch, head, block, tid] = Int32(0)
        out, dout = m_out[batch, None, head, None], m_dout[batch, None, head, None]
        column = tid % self.lanes * 8
        for p in cutlass.range_constexpr(-(-cfg.tile_m // self.pass_rows)):
            of_tile = p * self.pass_rows + tid // self.lanes
            place = block * cfg.tile_m + of_tile
            row = first + of_tile if const_expr(cfg.varlen) else place
            inside = (row < end) & (of_tile < cfg.tile_m)
            some = inside & (column < cfg.head_dim_v)
            o, do = load_words(out, row, column, some), load_words(dout, row, column, some)
            total = Float32(0.0)
            for w in cutlass.range_constexpr(4):
                o_low, o_high = widen(o[w], self.element)
                do_low, do_high = widen(do[w], self.element)
                total = total + o_low * do_low
                total = total + o_high * do_high
            for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
            if (tid % self.lanes == 0) & (of_tile < cfg.tile_m):
                d, log_sum = Float32(0.0), Float32(math.inf)  # of a row past the end: P = 0
                if inside:
                    natural = m_lse[batch, head, row]
                    if natural != -Float32.inf:  # else a row that sees no key: likewise
                        d = total - m_dlse[batch, head, row]
                        log_sum = natural * Float32(LOG2_E)
                m_d_rows[batch, head, place] = d
                m_lse2[batch, head, place] = log_sum

    @cute.jit
    def clear_outside(self, m_x: cute.Tensor, ends: cute.Tensor):
        """Zeros to the rows of a gradient (1, rows, heads, dim) that are of no sequence, by all CTAs; often none is."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        before, last = ends[0], ends[ends.shape[0] - 1]
        vectors = m_x.shape[3] // 8
        zeros = cute.make_rmem_tensor(4, Uint32)
        zeros.fill(0)
        for r in cutlass.range(cta, before + m_x.shape[1] - last, ctas, unroll=1):
            row = r if r < before else r - before + last
            for i in cutlass.range(tid, m_x.shape[2] * vectors, THREADS, unroll=1):
                target = cute.domain_offset((row, i // vectors, i % vectors * 8), m_x[0, None, None, None])
                pointer = cute.recast_ptr(target.iterator, dtype=Uint32)
                cute.autovec_copy(zeros, cute.make_tensor(aligned(pointer, 16), cute.make_layout(4)))


class BwdEpilogue:
    """The sum of dQ to dQ, see above."""

    def __init__(self, cfg: Bwd16Config):
        self.cfg = cfg
        self.element = IN_TYPES[cfg.dtype]
        self.pitch = cfg.qk_columns + 8  # elements of a row in shared memory: rows begin four banks apart

    @cute.jit
    def launch(
        self,
        dq_sum: cute.Tensor,  # (batch, heads_q, blocks, tile_m * qk_columns)
        dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        softmax_scale: Float32,
        stream,
        lengths=(),  # with `varlen` (cu_seqlens_q,)
    ):
        cfg = self.cfg

        @cute.struct
        class Storage:
            tile: cute.struct.Align[cute.struct.MemRange[self.element, cfg.tile_m * self.pitch], 16]

        self.storage = Storage
        batch, heads, blocks, _ = dq_sum.shape
        self.kernel(dq_sum, dq, softmax_scale, lengths).launch(
            grid=[blocks * heads * batch, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, m_dq_sum: cute.Tensor, m_dq: cute.Tensor, softmax_scale: Float32, lengths):
        cfg = self.cfg
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        _, heads, blocks, _ = m_dq_sum.shape
        block, head, batch = cta % blocks, cta // blocks % heads, cta // blocks // heads
        storage = SmemAllocator().allocate(self.storage)
        tile = storage.tile.get_tensor(cute.make_layout((cfg.tile_m, cfg.qk_columns), stride=(self.pitch, 1)))
        source = m_dq_sum[batch, head, block, None]
        first, end = Int32(0), m_dq.shape[1]  # with `varlen`, row of the block, and of the sequence's end
        count = cfg.tile_m * cfg.qk_columns // 4
        if const_expr(cfg.varlen):
            _, first, left = block_of_slot(block, lengths[0], slot_shift(cfg.tile_m))
            end = first + left
            count = Int32(count) if left > 0 else Int32(0)
        for index in cutlass.range(tid, count, THREADS, unroll=4):
            values = cute.make_rmem_tensor(4, Float32)
            pointer = aligned(source.iterator + 4 * index, 16)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), values)
            for i in cutlass.range_constexpr(4):
                tile[self.place(index, i)] = (values[i] * softmax_scale).to(self.element)
        cute.arch.sync_threads()  # all threads: the tile is written
        dq = m_dq[batch, None, head, None]
        lanes = cfg.qk_columns // 8
        for index in cutlass.range(tid, cfg.tile_m * lanes, THREADS, unroll=2):
            of_tile, column = index // lanes, index % lanes * 8
            row = (first if const_expr(cfg.varlen) else block * cfg.tile_m) + of_tile
            if (row < end) & (column < cfg.head_dim):
                words = cute.make_rmem_tensor(4, Uint32)
                pointer = cute.recast_ptr(cute.domain_offset((of_tile, column), tile).iterator, dtype=Uint32)
                cute.autovec_copy(cute.make_tensor(aligned(pointer, 16), cute.make_layout(4)), words)
                pointer = cute.recast_ptr(cute.domain_offset((row, column), dq).iterator, dtype=Uint32)
                cute.autovec_copy(words, cute.make_tensor(aligned(pointer, 16), cute.make_layout(4)))

    @cute.jit
    def place(self, index: Int32, i: cutlass.Constexpr):
        """(row, column) in the tile of value i of vector `index` of the sum, see `BwdMainloop.add_dq`."""
        cfg = self.cfg
        # Vector v of thread t of warpgroup w: registers 4 v .. 4 v + 3 of its accumulator, two columns of two rows.
        vectors = cfg.dq_registers // 4
        thread, v, w = index % 128, index // 128 % vectors, index // 128 // vectors
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2)
        column = v * 8 + thread % 4 * 2 + i % 2
        if const_expr(cfg.dq_split == "rows"):
            return row + 64 * w, column
        if const_expr(cfg.dq_split == "transposed"):  # rows of the accumulator are columns of dQ
            return column, row + 64 * w
        return row, column + w * (cfg.qk_columns // cfg.consumer_warpgroups)
