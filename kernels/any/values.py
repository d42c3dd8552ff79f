"""V to e4m3 codes, transposed and permuted, the role of one CTA of the quantiser (see quantize.py).

Of four units of a thread, two wait for their scale in registers and two in shared memory, where the transposed tile
goes once all have been read.

Why the permutation: the FP32 accumulator of S gives lane q = l % 4 the columns 8 j + 2 q, + 1; the 8-bit A
operand of P V wants four neighbouring keys 4 q .. 4 q + 3 in the same register. Softmax over keys does not
care for their order, so V's keys are stored in the order in which the accumulator holds P: position p of a
group of 16 holds key PI[p] = 8 ((p % 4) / 2) + 2 (p / 4) + p % 2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..common.warp import copy_16_bytes
from ..config import E4M3_MAX, V_SCALE_GROUP, QuantizeConfig
from .vectors import (
    F8,
    IN_TYPES,
    abs_max,
    abs_max_pair,
    address_in,
    address_of,
    block_max,
    last_row,
    padded_width,
    row_offset,
    scales_of,
    vector,
    widen,
)

UNITS_KEPT = 2  # units of V that wait for their scale in the registers of a thread; others, in shared memory


class Values:
    """The role of a CTA that quantises 256 keys of one head of V and writes them transposed and permuted.

    A thread takes units of four keys (one word of the permuted order) by eight dims, so that the transposed
    tile in shared memory is written in whole words. A warp's unit is 8 runs of eight dims by 4 words: it
    reads 128 bytes of each of 16 keys, and its words fall into 32 different banks. Where head_dim_v is no multiple of
    64, the units reach past it: there they take copies of the last run, which change no largest magnitude and are not
    stored.
    """

    def __init__(self, cfg: QuantizeConfig, threads: int):
        self.d = cfg.head_dim_v
        self.in_type = IN_TYPES[cfg.in_dtype]
        self.static = cfg.v_mode == "static"
        self.threads = threads  # at least two for each column of padded_width
        self.warps = self.threads // 32
        self.runs = -(-self.d // 64)  # widths of a warp's unit
        assert threads >= 2 * padded_width(self.d), "units have room for four, and whole ones for every warp"
        self.units = self.runs * 16 // self.warps  # of a thread; 16 units of four words are 256 keys
        self.kept = min(self.units, UNITS_KEPT)
        self.tile_words = 64 * 64 * self.runs

    @cute.jit
    def place(self, unit: cutlass.Constexpr):
        """(run of eight dims, word of four keys) of a unit of this thread."""
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        index = unit * self.warps + tid // 32
        return lane % 8 + 8 * (index % self.runs), lane // 8 + 4 * (index // self.runs)

    @cute.jit
    def source(self, m_v: cute.Tensor, block: Int32, unit: cutlass.Constexpr, j: cutlass.Constexpr) -> Int64:
        """Address of eight dims of key j of a unit. For keys past the end: `last_row`."""
        run, word = self.place(unit)
        key = block * V_SCALE_GROUP + word // 4 * 16 + word % 4 * 2 + 8 * (j // 2) + j % 2
        column = 8 * run if const_expr(self.d % 64 == 0) else min(8 * run, self.d - 8)
        return address_in(m_v, 0, column) + row_offset(m_v, last_row(m_v, key))

    @cute.jit
    def load(self, m_v: cute.Tensor, block: Int32, unit: cutlass.Constexpr, raw: cute.Tensor):
        """A unit into raw (8 dims, 4 keys)."""
        for j in cutlass.range_constexpr(4):
            source = address_of(self.in_type, self.source(m_v, block, unit, j), cute.AddressSpace.gmem)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), raw[None, j])

    @cute.jit
    def staged(self, stage: cute.Tensor, unit: cutlass.Constexpr, j: cutlass.Constexpr) -> Int32:
        """Shared address of eight dims of key j of a unit past the kept ones; only this thread's."""
        tid, _, _ = cute.arch.thread_idx()
        return stage.iterator.toint() + 16 * (((unit - self.kept) * 4 + j) * self.threads + tid)

    @cute.jit
    def unstage(self, stage: cute.Tensor, unit: cutlass.Constexpr, raw: cute.Tensor):
        """A unit from shared memory into raw (8 dims, 4 keys)."""
        for j in cutlass.range_constexpr(4):
            source = address_of(self.in_type, self.staged(stage, unit, j), cute.AddressSpace.smem)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), raw[None, j])

    @cute.jit
    def largest_pair(self, raw: cute.Tensor, pair: Uint32) -> Uint32:
        """abs_max_pair of `pair` and all of raw: two elements an instruction, and exact."""
        pairs = cute.recast_tensor(raw, Uint32)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            pair = abs_max_pair(pair, pairs[i])
        return pair

    @cute.jit
    def encode(
        self, raw: cute.Tensor, factor: Float32, unit: cutlass.Constexpr, keys: Int32, words: cute.Tensor
    ):
        """Codes of raw (8, 4) to words (8,), one for each dim; zero for keys at or past `keys`, also where
        factor is NaN."""
        _, word = self.place(unit)
        pairs = cute.recast_tensor(raw, Uint32)
        mask = Uint32(0)
        for j in cutlass.range_constexpr(4):
            if word // 4 * 16 + word % 4 * 2 + 8 * (j // 2) + j % 2 < keys:
                mask = mask | Uint32(0xFF << 8 * j)
        for e in cutlass.range_constexpr(8):
            codes = cute.make_rmem_tensor(4, F8)
            if const_expr(self.in_type is not F8):
                four = cute.make_rmem_tensor(4, Float32)
                for j in cutlass.range_constexpr(4):
                    four[j] = widen(pairs[e // 2, j], self.in_type)[e % 2] * factor
                codes.store(four.load().to(F8))
            else:
                for j in cutlass.range_constexpr(4):
                    codes[j] = raw[e, j]
            words[e] = cute.recast_tensor(codes, Uint32)[0] & mask

    @cute.jit
    def write_tile(self, words: cute.Tensor, unit: cutlass.Constexpr, tile: cute.Tensor):
        """Codes of a unit, words (8,), to the transposed tile."""
        run, word = self.place(unit)
        for e in cutlass.range_constexpr(8):
            tile[8 * run + e, word ^ (4 * (run % 8))] = words[e]

    @cute.jit
    def store_tile(self, tile: cute.Tensor, block: Int32, m_vt: cute.Tensor):
        """The tile to global memory in pieces of 16 bytes, 16 in a row."""
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.sync_threads()  # all threads: the transposed tile is complete
        pieces = self.d * 16
        for t in cutlass.range_constexpr(-(-pieces // self.threads)):
            piece = t * self.threads + tid
            row = piece // 16
            column = piece % 16
            position = block * V_SCALE_GROUP + 16 * column
            stored = position < m_vt.shape[1]
            if const_expr((t + 1) * self.threads > pieces):
                stored = stored and piece < pieces
            if stored:
                source = cute.domain_offset((4 * (column ^ (row // 8 % 8)),), tile[row, None])
                words = cute.make_rmem_tensor(4, Uint32)
                cute.autovec_copy(vector(source, 4), words)
                target = cute.domain_offset((position,), m_vt[row, None])
                cute.autovec_copy(cute.recast_tensor(words, F8), vector(target, 16))

    @cute.jit
    def tile_of(self, stage: cute.Tensor) -> cute.Tensor:
        """(64 runs, 64 words of four keys); word w of row c stands at w ^ 4 (c / 8 % 8), see the class."""
        return cute.make_tensor(stage.iterator, cute.make_layout((64 * self.runs, 64), stride=(64, 1)))

    @cute.jit
    def run(
        self,
        m_v: cute.Tensor,  # (seqlen_k, head_dim_v)
        amax: Float32,
        m_vt: cute.Tensor,  # (head_dim_v, ceil16(seqlen_k))
        m_scale: cute.Tensor,  # (ceil(seqlen_k / 256),)
        block: Int32,
        stage: cute.Tensor,
        scratch: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        tile = self.tile_of(stage)
        raw = cute.make_rmem_tensor((8, 4, self.kept), self.in_type)
        for u in cutlass.range_constexpr(self.kept, self.units):
            for j in cutlass.range_constexpr(4):
                copy_16_bytes(self.staged(stage, u, j), self.source(m_v, block, u, j))
        cute.arch.cp_async_commit_group()
        for u in cutlass.range_constexpr(self.kept):
            self.load(m_v, block, u, raw[None, None, u])
        passing = cute.make_rmem_tensor((8, 4), self.in_type)
        if const_expr(not self.static):
            pair = cute.recast_tensor(raw, Uint32)[0] & Uint32(0x7FFF7FFF)
            pair = self.largest_pair(raw, pair)
            cute.arch.cp_async_wait_group(0)  # this thread's own copies, which no other thread reads
            for u in cutlass.range_constexpr(self.kept, self.units):
                self.unstage(stage, u, passing)
                pair = self.largest_pair(passing, pair)
            ends = cute.make_rmem_tensor(2, Uint32)  # two: a one-element tensor recasts with stride 0
            ends.fill(pair)
            both = cute.recast_tensor(ends, self.in_type)
            top = abs_max(both[0].to(Float32), both[1].to(Float32))
            amax = block_max(top, scratch, Int32(0), self.warps)
        factor, scale = scales_of(amax, E4M3_MAX, 1.0)
        if tid == 0:
            m_scale[block] = scale
        keys = m_v.shape[0] - block * V_SCALE_GROUP
        words = cute.make_rmem_tensor((8, self.units), Uint32)
        for u in cutlass.range_constexpr(self.kept):
            self.encode(raw[None, None, u], factor, u, keys, words[None, u])
        if const_expr(self.units > self.kept):
            cute.arch.cp_async_wait_group(0)  # again where the scale was given
            for u in cutlass.range_constexpr(self.kept, self.units):
                self.unstage(stage, u, passing)
                self.encode(passing, factor, u, keys, words[None, u])
            cute.arch.sync_threads()  # all threads: nothing staged is still to be read where the tile goes
        for u in cutlass.range_constexpr(self.units):
            self.write_tile(words[None, u], u, tile)
        self.store_tile(tile, block, m_vt)

    @cute.jit
    def transpose(self, m_v: cute.Tensor, m_vt: cute.Tensor, block: Int32, stage: cute.Tensor):
        """Codes as they are: m_v (seqlen_k, head_dim_v), m_vt (head_dim_v, ceil16(seqlen_k))."""
        tile = self.tile_of(stage)
        raw = cute.make_rmem_tensor((8, 4, self.units), self.in_type)
        for u in cutlass.range_constexpr(self.units):
            self.load(m_v, block, u, raw[None, None, u])
        keys = m_v.shape[0] - block * V_SCALE_GROUP
        words = cute.make_rmem_tensor(8, Uint32)
        for u in cutlass.range_constexpr(self.units):
            self.encode(raw[None, None, u], Float32(1.0), u, keys, words)
            self.write_tile(words, u, tile)
        self.store_tile(tile, block, m_vt)
