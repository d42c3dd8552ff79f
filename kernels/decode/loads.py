"""Copies of K, V and their scales from a cache to a warp's ring in shared memory.

A warp copies what it alone reads, by cp.async: keys key0 to key0 + 15 of one step into one stage of its ring, K, then
V, then, with a scale for each token, 16 scales of K and 16 of V, of both heads of a pair. The caller commits the copies
of a step as a group and waits for it (attend.py).

Of slots outside of [first, end) the copy writes zeros and reads nothing, nor is their page number read.

In shared memory piece c of 16 bytes of row r lies where piece c ^ turn(r) would: among `turned_pieces` of them
(config/caches.py), so that lines of memory stay lines, and one piece of eight rows is in eight places of a line.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..common.warp import copy_4_bytes_or_zeros, copy_16_bytes_or_zeros, opaque
from ..config import DECODE_KEYS, DecodeConfig
from ..config.caches import turned_pieces


class Cache(NamedTuple):
    """A KV cache; what a configuration has no use for is None."""

    k: cute.Tensor  # (sequences or pages, slots, heads_k, head_dim)
    v: cute.Tensor  # (sequences or pages, slots, heads_k, head_dim_v)
    batch_idx: cute.Tensor | None  # (batch,) int32: sequence of the cache
    block_table: cute.Tensor | None  # (batch, blocks) int32: pages
    k_scale: cute.Tensor | None  # float32, (batch, heads_k) or (sequences or pages, slots, heads_k)
    v_scale: cute.Tensor | None


class Keys(NamedTuple):
    """Where the keys of a piece lie, and which of them are read: slots first to end - 1."""

    batch: Int32  # of the queries: row of the block table
    sequence: Int32  # of the cache, where that is not paged
    head: Int32  # of K and V, or a pair of them
    first: Int32
    end: Int32


class Cursor(NamedTuple):
    """Where a lane's first copies of a step come from, and how far on those of the next step are."""

    k: Int64
    v: Int64
    scale: Int64
    k_step: Int64
    v_step: Int64
    scale_step: Int64
    scale_apart: Int64  # from a scale to that of the other head of a pair


@cute.jit
def inside(key: Int32, first: Int32, end: Int32):
    """Whether first <= key < end, by one comparison. The compiler may not know what is compared: with fixed shares it
    took the difference for one that is never negative, and compared with a sign."""
    return opaque(Uint32(key - first)) < Uint32(cutlass.max(end - first, 0))


def turn(row, chunks: int):
    """By which the pieces of a row of `chunks` pieces are exchanged: 0 to turned_pieces - 1."""
    among = turned_pieces(chunks)
    return (row if among == 8 else row >> 1) & (among - 1)  # two rows of 64 bytes share a line


def place_of(row, column, pitch: int, chunks: int):
    """Bytes from the first row of a tile to piece `column` of row `row`."""
    return row * pitch + 16 * (column ^ turn(row, chunks))


def turned(place: Int32, by: int) -> Int32:
    """The place of the piece with number c ^ by in the row of piece c, which is at `place`; by < turned_pieces."""
    return place ^ (16 * by) if by else place


def piece_from(place: Int32, count: int, chunks: int) -> Int32:
    """The place of piece c + count in the row of piece c, which is at `place`, if no bit of count is set in c."""
    near = count % turned_pieces(chunks)
    return turned(place, near) + 16 * (count - near)


class Loads:
    """The copies of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: DecodeConfig):
        self.cfg = cfg

    @cute.jit
    def page_of(self, cache: Cache, keys: Keys, key0: Int32, lane: Int32) -> Int32:
        """Page of a step's keys, or of key `lane` of the step where pages are small. 0 where it is not wanted."""
        m_table, page_size = cache.block_table, cache.k.shape[1]
        page = Int32(0)
        if const_expr(self.cfg.paging == "block"):
            if (key0 < keys.end) & (key0 + DECODE_KEYS > keys.first):
                page = m_table[keys.batch, key0 // page_size]
        elif const_expr(self.cfg.paging == "token"):
            key = key0 + lane % DECODE_KEYS
            if (key < keys.end) & (key >= keys.first):
                page = m_table[keys.batch, key // page_size]
        return page

    @cute.jit
    def fetch(self, cache: Cache, keys: Keys, key0: Int32, page: Int32, stage: Int32, lane: Int32, at=None):
        """Starts the copies of a step into the stage at shared address `stage`: K, V, scales.

        page  of `page_of`
        at    the step's place, from `cursor` and `next`; with `lean`
        """
        cfg = self.cfg
        stage_v = stage + DECODE_KEYS * cfg.k_pitch
        if const_expr(cfg.lean):
            self.go_on_rows(cache.k, cfg.k_chunks, cfg.k_pitch, keys, key0, at.k, stage, lane)
            self.go_on_rows(cache.v, cfg.v_chunks, cfg.v_pitch, keys, key0, at.v, stage_v, lane)
            if const_expr(cfg.token_scales):
                size = 4 if inside(key0 + lane % DECODE_KEYS, keys.first, keys.end) else 0
                target = stage_v + DECODE_KEYS * cfg.v_pitch + 4 * lane
                copy_4_bytes_or_zeros(target, at.scale, size)
                if const_expr(cfg.heads == 2):
                    copy_4_bytes_or_zeros(target + 8 * DECODE_KEYS, at.scale + at.scale_apart, size)
        else:
            self.fetch_rows(cache.k, cfg.k_chunks, cfg.k_pitch, keys, key0, page, stage, lane)
            self.fetch_rows(cache.v, cfg.v_chunks, cfg.v_pitch, keys, key0, page, stage_v, lane)
            if const_expr(cfg.token_scales):
                self.fetch_scales(cache, keys, key0, page, stage_v + DECODE_KEYS * cfg.v_pitch, lane)

    @cute.jit
    def cursor(self, cache: Cache, keys: Keys, key0: Int32, step: Int32, lane: Int32) -> Cursor:
        """Of the step at key0, with the next one `step` keys further, where no page is looked up and lanes take whole
        rows (`lean`)."""
        found, heads = [], self.cfg.heads
        for m_x, chunks in ((cache.k, self.cfg.k_chunks), (cache.v, self.cfg.v_chunks)):
            size, strides = self.cfg.element_bytes, m_x.stride
            row = Int64(keys.sequence) * strides[0] + Int64(key0 + lane // chunks) * strides[1]
            # Of a pair a lane's piece is of the head that has it, wherever that lies.
            head, piece = keys.head * heads + lane % chunks // (chunks // heads), lane % (chunks // heads)
            offset = (row + Int64(head) * strides[2]) * size + 16 * piece
            found.append((m_x.iterator.toint() + offset, Int64(step * size) * strides[1]))
        scale, scale_step, apart = Int64(0), Int64(0), Int64(0)
        if const_expr(self.cfg.token_scales):
            of_k, of_v = cache.k_scale, cache.v_scale
            from_k, from_v = of_k.iterator.toint(), of_v.iterator.toint()
            is_k = lane < DECODE_KEYS
            place = Int64(keys.sequence) * (of_k.stride[0] if is_k else of_v.stride[0])
            near = of_k.stride[1] if is_k else of_v.stride[1]
            far = of_k.stride[2] if is_k else of_v.stride[2]
            place = place + Int64(keys.head * heads) * far
            apart = Int64(4) * far
            scale = (from_k if is_k else from_v) + 4 * (place + Int64(key0 + lane % DECODE_KEYS) * near)
            scale_step = Int64(4 * step) * near
        return Cursor(found[0][0], found[1][0], scale, found[0][1], found[1][1], scale_step, apart)

    @cute.jit
    def next(self, at: Cursor, steps: cutlass.Constexpr = 1) -> Cursor:
        """The same of the step behind it, or `steps` behind it."""
        return Cursor(
            at.k + steps * at.k_step,
            at.v + steps * at.v_step,
            at.scale + steps * at.scale_step,
            at.k_step,
            at.v_step,
            at.scale_step,
            at.scale_apart,
        )

    @cute.jit
    def go_on_rows(
        self,
        m_x: cute.Tensor,
        chunks: cutlass.Constexpr,
        pitch: cutlass.Constexpr,
        keys: Keys,
        key0: Int32,
        source: Int64,
        target: Int32,
        lane: Int32,
    ):
        """`fetch_rows` from the lane's first address on."""
        apart = 32 // chunks
        further = Int64(apart * self.cfg.element_bytes) * m_x.stride[1]
        row = lane // chunks
        place = target + place_of(row, lane % chunks, pitch, chunks)
        for i in cutlass.range_constexpr(DECODE_KEYS // apart):
            size = 16 if inside(key0 + row + apart * i, keys.first, keys.end) else 0
            # row < apart, a power of two: what turns the sum of the rows is what turns one and then the other.
            copy_16_bytes_or_zeros(turned(place, turn(apart * i, chunks)) + apart * i * pitch, source, size)
            source = source + further

    @cute.jit
    def fetch_rows(
        self,
        m_x: cute.Tensor,  # (sequences or pages, slots, heads_k, columns)
        chunks: cutlass.Constexpr,  # pieces of 16 bytes of a row
        pitch: cutlass.Constexpr,
        keys: Keys,
        key0: Int32,
        page: Int32,
        target: Int32,
        lane: Int32,
    ):
        """Starts the copies of a step's rows of K or V to shared address `target`, `pitch` bytes apart."""
        cfg = self.cfg
        size_x = cfg.element_bytes
        strides = m_x.stride
        base = m_x.iterator.toint() + Int64(keys.head) * strides[2] * size_x
        row_bytes = strides[1] * size_x
        if const_expr(cfg.paging == "none"):
            base = base + Int64(keys.sequence) * strides[0] * size_x + Int64(key0) * row_bytes
        elif const_expr(cfg.paging == "block"):
            base = base + Int64(page) * strides[0] * size_x + Int64(key0 % m_x.shape[1]) * row_bytes
        else:
            # Of each row its own: lane r has the offset of row r.
            own = Int64(page) * strides[0] * size_x
            own = own + Int64((key0 + lane % DECODE_KEYS) % m_x.shape[1]) * row_bytes
        pieces = DECODE_KEYS * chunks
        # Where the lanes take whole rows, each piece of a lane is as many rows behind the one before: addresses are not
        # kept apart, for which there are no registers.
        apart = 32 // chunks if 32 % chunks == 0 and cfg.paging != "token" else 0
        source = base
        if const_expr(apart > 0):
            source = base + Int64(lane // chunks) * row_bytes + 16 * (lane % chunks)
        for i in cutlass.range_constexpr(-(-pieces // 32)):
            piece = 32 * i + lane
            row = piece // chunks
            column = piece - row * chunks
            if const_expr(apart > 0):
                if const_expr(i > 0):
                    source = source + Int64(apart) * row_bytes
            elif const_expr(cfg.paging == "token"):
                source = base + cute.arch.shuffle_sync(own, row % DECODE_KEYS) + 16 * column
            else:
                source = base + Int64(row) * row_bytes + 16 * column
            key = key0 + row
            size = 16 if (key < keys.end) & (key >= keys.first) else 0
            place = target + place_of(row, column, pitch, chunks)
            if const_expr(32 * (i + 1) <= pieces):
                copy_16_bytes_or_zeros(place, source, size)
            elif piece < pieces:
                copy_16_bytes_or_zeros(place, source, size)

    @cute.jit
    def fetch_scales(
        self,
        cache: Cache,
        keys: Keys,
        key0: Int32,
        page: Int32,
        target: Int32,
        lane: Int32,
    ):
        """Starts the copies of a step's scales: lanes 0 to 15 those of K, the others those of V."""
        m_k_scale, m_v_scale = cache.k_scale, cache.v_scale  # (sequences or pages, slots, heads_k)
        key = key0 + lane % DECODE_KEYS
        place, slot = keys.sequence, key
        if const_expr(self.cfg.paging != "none"):
            place, slot = page, key % m_k_scale.shape[1]
        # A lane has either K's or V's: chosen before the products with what changes, which so are done once.
        of_k = m_k_scale.iterator.toint() + 4 * Int64(keys.head) * m_k_scale.stride[2]
        of_v = m_v_scale.iterator.toint() + 4 * Int64(keys.head) * m_v_scale.stride[2]
        source = of_k if lane < DECODE_KEYS else of_v
        far = m_k_scale.stride[0] if lane < DECODE_KEYS else m_v_scale.stride[0]
        near = m_k_scale.stride[1] if lane < DECODE_KEYS else m_v_scale.stride[1]
        source = source + 4 * (Int64(place) * far + Int64(slot) * near)
        copy_4_bytes_or_zeros(target + 4 * lane, source, 4 if (key < keys.end) & (key >= keys.first) else 0)

    @cute.jit
    def read_scales(self, place: Int32, k_scale: cute.Tensor, v_scale: cute.Tensor, lane: Int32):
        """A head's scales of a step from shared memory to registers, (2, 2) each: of this thread's two keys in either
        half.

        place  their shared address
        """
        for j in cutlass.range_constexpr(2):
            at = place + 4 * (8 * j + 2 * (lane % 4))
            for x, offset in ((k_scale, 0), (v_scale, 4 * DECODE_KEYS)):
                source = cute.make_ptr(Float32, at + offset, cute.AddressSpace.smem, assumed_align=8)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), x[None, j])
