"""What a KV cache holds of its sequences, for a kernel that takes rows one behind another (sm90/fwd.py with `varlen`).

    place   where the rows of each sequence are, how many, and where those of its queries begin
    copy    K and V of a sequence as rows of 16 bits: out of pages, and e4m3 codes times their scales, rounded once

Tensors of the cache as in attend.py, and

    k_rows (rows, heads_k, head_dim), v_rows (rows, heads_k, head_dim_v)    bf16 or fp16, last stride 1
    q_scale (batch, heads_k) float32, of an e4m3 Q, any strides: a factor of K as k_scale is one
    places (3, batch + 1) int32: first row of a sequence, rows of it, first row of its queries

Sequence b has slots first to end - 1 of `Splits.key_range`; no other is read. With `copy` slot `first` goes to row
b * stride. Without, the cache itself is the rows, slot s of sequence i of it being row i * stride + s.

A chunk of `tile_keys` slots of one sequence is a tile of split.py. CTAs take K's or V's chunks in turn, so that all
have about as many bytes whatever the lengths are. A thread takes pieces of eight elements, AHEAD of them at a time.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..any.vectors import widen
from ..common.floats import bf16_pair, fp16_pair
from ..common.warp import e4m3_to_fp16
from ..config import UnpackConfig
from .append import row_address, words_at
from .split import Lengths, Splits

THREADS = 256  # of a CTA
WIDTH = 8  # elements of a piece: 16 bytes of the rows
AHEAD = 4  # pieces of a thread that are loaded before the first of them is stored


class Unpack:
    """Host entry of one configuration. What it has no use for is None."""

    def __init__(self, cfg: UnpackConfig):
        cfg.check()
        self.cfg = cfg
        self.fp8 = cfg.cache == "e4m3"
        self.splits = Splits(cfg)
        self.pair = bf16_pair if cfg.dtype == "bf16" else fp16_pair

    @cute.jit
    def __call__(
        self,
        k_cache,  # with `copy`
        v_cache,
        k_rows,
        v_rows,
        places: cute.Tensor,
        seqlens: cute.Tensor,  # (batch,) int32
        batch_idx,  # (batch,) int32 or None
        leftpad,  # likewise
        block_table,  # (batch, blocks) int32 where the cache is paged
        k_scale,  # of an e4m3 cache
        v_scale,
        q_scale,  # with `query_scale`
        seqlen_new: Int32,  # keys behind those that seqlens counts
        capacity: Int32,  # slots of a sequence
        seqlen_q: Int32,
        left: Int32,  # keys before its own position that a query sees
        stride: Int32,  # rows from one sequence to the next
        ctas: Int32,  # that copy K, and as many that copy V
        stream,
    ):
        lengths = Lengths(seqlens, leftpad, seqlens.shape[0], seqlen_new, capacity, seqlen_q, left)
        self.place(lengths, batch_idx, places, stride).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )
        if const_expr(self.cfg.copy):
            of_k, of_v = (k_cache, k_rows, k_scale, q_scale), (v_cache, v_rows, v_scale, None)
            self.copy(of_k, of_v, lengths, batch_idx, block_table, stride, ctas).launch(
                grid=[ctas, 2, 1], block=[THREADS, 1, 1], stream=stream
            )

    @cute.kernel
    def place(self, lengths: Lengths, m_batch_idx, m_places: cute.Tensor, stride: Int32):
        """A sequence a thread, in turn; one CTA."""
        tid, _, _ = cute.arch.thread_idx()
        for b in cutlass.range(tid, lengths.batch + 1, THREADS, unroll=1):
            row, rows = (
                Int32(0),
                Int32(0),
            )  # of what ends the last sequence: the forward reads, but does not use them
            if b < lengths.batch:
                first, end = self.splits.key_range(lengths, b)
                rows = cutlass.max(end - first, 0)
                row = b * stride
                if const_expr(not self.cfg.copy):
                    if const_expr(self.cfg.batch_idx):
                        row = m_batch_idx[b] * stride
                    row = row + end - rows
            m_places[0, b] = row
            m_places[1, b] = rows
            m_places[2, b] = b * lengths.seqlen_q

    @cute.kernel
    def copy(self, of_k, of_v, lengths: Lengths, m_batch_idx, m_table, stride: Int32, ctas: Int32):
        """Chunk after chunk of K, or of V. of_k, of_v: (cache, rows, scale, another scale)."""
        cta, role, _ = cute.arch.block_idx()
        keys = self.cfg.tile_keys
        chunks, _, _ = self.splits.tiles_before(lengths, Int32(0), Int32(1))
        for chunk in cutlass.range(cta, chunks, ctas, unroll=1):
            b, start = self.splits.locate(lengths, chunk, Int32(1))
            first, end = self.splits.key_range(lengths, b)
            slot = (first // keys + chunk - start) * keys
            slots = (cutlass.max(slot, first), cutlass.min(slot + keys, end))
            sequence = b
            if const_expr(self.cfg.batch_idx):
                sequence = m_batch_idx[b]
            where = (b, sequence, m_table, b * stride - first)
            if role == 0:
                self.copy_slots(of_k, where, slots, self.cfg.head_dim)
            else:
                self.copy_slots(of_v, where, slots, self.cfg.head_dim_v)

    @cute.jit
    def copy_slots(self, of_x, where, slots, columns: cutlass.Constexpr):
        """Slots slots[0] to slots[1] - 1 of a sequence, of K or of V, by all threads of the CTA.

        where  (row of the batch, sequence of the cache, block table, row of slot 0)
        """
        cfg = self.cfg
        m_x, m_rows, m_scale, m_factor = of_x
        b, sequence, m_table, row0 = where
        tid, _, _ = cute.arch.thread_idx()
        count, words = (
            columns // WIDTH,
            WIDTH * m_x.element_type.width // 32,
        )  # pieces of a row, words of a piece
        of_slot = m_x.shape[2] * count
        pieces = cutlass.max(slots[1] - slots[0], 0) * of_slot
        for begin in cutlass.range(tid, pieces, THREADS * AHEAD, unroll=1):
            loaded = cute.make_rmem_tensor((words, AHEAD), Uint32)
            scale = cute.make_rmem_tensor(AHEAD, Float32)
            target = cute.make_rmem_tensor(AHEAD, Int64)
            for i in cutlass.range_constexpr(AHEAD):
                index = cutlass.min(
                    begin + THREADS * i, pieces - 1
                )  # past the end the last piece, which is not stored
                slot = slots[0] + index // of_slot
                rest = index % of_slot
                head, column = rest // count, rest % count * WIDTH
                place = (sequence, slot, head)
                if const_expr(cfg.paged):
                    place = (m_table[b, slot // m_x.shape[1]], slot % m_x.shape[1], head)
                cute.autovec_copy(words_at(row_address(m_x, place, column), words), loaded[None, i])
                if const_expr(self.fp8):
                    if const_expr(cfg.scales == "head"):
                        scale[i] = m_scale[b, head]
                    else:
                        scale[i] = words_at(row_address(m_scale, place, 0), 1)[0].bitcast(Float32)
                    if const_expr(m_factor is not None):
                        scale[i] = scale[i] * m_factor[b, head]
                target[i] = row_address(m_rows, (row0 + slot, head), column)
            for i in cutlass.range_constexpr(AHEAD):
                if begin + THREADS * i < pieces:
                    x = loaded[None, i]
                    if const_expr(self.fp8):
                        x = self.scaled(x, scale[i])
                    cute.autovec_copy(x, words_at(target[i], 4))

    @cute.jit
    def scaled(self, codes: cute.Tensor, scale: Float32) -> cute.Tensor:
        """Eight e4m3 in two words, times their scale, as eight elements of 16 bits in four."""
        x = cute.make_rmem_tensor(4, Uint32)
        for w in cutlass.range_constexpr(2):
            for h, pair in enumerate(e4m3_to_fp16(codes[w])):  # exact, and so is the float32
                low, high = widen(pair, cutlass.Float16)
                x[2 * w + h] = self.pair(low * scale, high * scale)
        return x
