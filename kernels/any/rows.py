"""Rows of Q and K to 8-bit codes, the role of one CTA of the quantiser (see quantize.py).

32 neighbouring elements of a row a thread, in passes of 64 rows. Besides the issue of instructions, this role is bound
by the pipe that shuffles and shared memory have in common, so a thread takes as many elements as 64 registers hold:
butterflies of distance 1 to 16 stay inside a thread, for the others the lanes of a row exchange half of their elements.
Those are 2, 4 or 8 lanes, for 64, 128 or 256 columns: the ones past head_dim hold zeros, which no step changes, and are
not stored.
Rows come through shared memory, two passes in flight without holding a register. What a CTA does once, some 450
instructions a thread, is a sixth of its work at 256 rows.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr

from ..common.warp import copy_16_bytes, copy_16_bytes_or_zeros, opaque
from ..config import (
    E4M3_MAX,
    INT8_MAX,
    K_SCALE_GROUP,
    MEAN_CHUNKS,
    QUANTIZE_SPAN,
    QuantizeConfig,
    narrow_max,
    rotation_block,
)
from .key_sums import KeySums
from .rotary import Rotary
from .vectors import (
    F8,
    IN_TYPES,
    abs_max,
    address_in,
    address_of,
    block_max,
    int8_word,
    last_row,
    magnitude,
    padded_width,
    product,
    row_offset,
    scales_of,
    thread_count,
    vector,
    widen,
)

WIDTH = 32  # elements of a row that a thread takes: the more, the less shuffles
SUMMED = 2  # keys of the mean that a thread has in flight; registers are scarce
RING_BYTES = 128  # of a thread, for its rows in flight: two passes


class Rows:
    """The role of a CTA that quantises up to QUANTIZE_SPAN rows of one head of K (`keys`) or of Q."""

    def __init__(self, cfg: QuantizeConfig, mode: str, keys: bool):
        self.d = cfg.head_dim
        self.width = padded_width(self.d)  # columns that have threads
        self.in_type = IN_TYPES[cfg.in_dtype]
        self.int8 = cfg.qk_dtype == "int8"
        self.code_type = cutlass.Int8 if self.int8 else F8
        self.mode = mode
        self.keys = keys
        self.rotate = cfg.rotate
        self.smooth = cfg.smooth
        self.varlen = cfg.varlen
        self.rotary = Rotary(cfg)
        self.key_sums = KeySums(cfg)
        # Scales and products of all rows, or before them the sums of `KeySums.sum_lanes`.
        self.side_floats = max(
            2 * QUANTIZE_SPAN, self.key_sums.lane_floats if cfg.smooth and not cfg.varlen else 0
        )
        self.lanes = self.width // WIDTH  # of one row
        self.levels = self.lanes.bit_length() - 1
        self.block = rotation_block(self.d)
        # Levels of the transform across lanes, see `rotate_row`.
        self.exchanges = (self.block // WIDTH).bit_length() - 1 if cfg.rotate and self.block > WIDTH else 0
        # Whether the signs that `encode` undoes wait beside those of the rotation, in bits that are free there: eight
        # to ten instructions of 615 less a pass. At 128 columns it spills.
        self.keeps_signs = self.exchanges > 2 and not self.rotary.on
        self.threads = thread_count(cfg)
        self.pass_rows = self.threads // self.lanes
        self.slot_bytes = 64 * WIDTH  # of a warp and pass
        self.slots = RING_BYTES // (2 * WIDTH)  # passes in flight
        self.ring_words = RING_BYTES // 4 * self.threads
        self.qmax = INT8_MAX if self.int8 else E4M3_MAX
        if cfg.narrow:
            self.qmax = narrow_max(cfg.head_dim)[int(keys)]
        self.norm = 1.0 / math.sqrt(self.block) if cfg.rotate else 1.0
        # Rows that share a scale; a token's scale needs no other row. They are passes held at a time, or some of the
        # warps of one.
        group = {"block64": 64, "block128": 128, "block": 128}.get(mode, self.pass_rows)
        self.group_passes = max(1, group // self.pass_rows)
        self.group_warps = min(group, self.pass_rows) * self.lanes // 32

    @cute.jit
    def fetch(self, m_x: cute.Tensor, column: Int32, row: Int32, target: Int32):
        """Starts the copy of a lane's pieces of a pass: 16 bytes from (row, column) to shared `target`, and
        the same of rows 256 / width further on each to the next 512 bytes. For rows past the end:
        `last_row`. Columns past head_dim: zeros."""
        for i in cutlass.range_constexpr(WIDTH // 8):
            of = last_row(m_x, row + i * (256 // self.width))
            source = address_in(m_x, 0, column) + row_offset(m_x, of)
            if const_expr(self.d == self.width):
                copy_16_bytes(target + 512 * i, source)
            else:
                copy_16_bytes_or_zeros(target + 512 * i, source, Int32(16) if column < self.d else Int32(0))

    @cute.jit
    def prepare_columns(
        self,
        m_signs: cute.Tensor,
        m_sums: cute.Tensor,
        m_keys: cute.Tensor,  # (seqlen_k, head_dim)
        m_cos: cute.Tensor,
        m_sin: cute.Tensor,
        count: Int32,
        chunk: Int32,
        columns: cute.Tensor,
        lane_sums: cute.Tensor,  # shared memory for `KeySums.sum_lanes`
    ):
        """Signs and mean of all columns into shared memory, (2 width,), as lanes read them. Past head_dim the mean is 0
        and any sign will do."""
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(self.rotate):
            index = tid - self.width  # threads that have no column of the mean
            if index >= 0 and index < 8 * self.lanes:
                # Words 8 p + i, i < 8, of the lanes at place p, see `own_flips`.
                word = Uint32(0)
                for e in cutlass.range_constexpr(WIDTH // 8):
                    column = index // 8 * WIDTH + index % 8 * 2 + e // 2 * 16 + e % 2
                    if const_expr(self.d < self.width):
                        column = min(column, self.d - 1)
                    bit = m_signs[column].bitcast(Uint32) & Uint32(1 << 31)
                    word = word | bit >> (16 * (1 - e % 2) + 8 * (e // 2))
                if const_expr(self.keeps_signs):
                    low, high = self.reversed_halves(index // 8)
                    word = word | Uint32(low << 30 | high << 29) if index % 8 == 0 else word
                columns[index] = word.bitcast(Float32)
        if const_expr(self.smooth and not self.varlen):
            if chunk > 0:
                if tid < self.key_sums.threads:
                    self.key_sums.sum_lanes(m_keys, lane_sums, m_cos, m_sin, Int32(0), chunk, tid, SUMMED)
                cute.arch.sync_threads()  # all threads: the sums of all lanes are there
        if const_expr(self.smooth):
            if tid < self.width:
                column = tid if const_expr(self.d == self.width) else min(tid, self.d - 1)
                sign = m_signs[column] if const_expr(self.rotate) else Float32(1.0)
                total = Float32(0.0)
                if const_expr(self.varlen):
                    total = self.sum_of_chunks(m_sums, column)
                elif chunk > 0:
                    total = self.key_sums.total(lane_sums, column)
                else:
                    total = self.sum_of_chunks(m_sums, column)
                # A rotated row meets the mean after its signs. Of a query, the product with the mean is the
                # same, term by term. Column WIDTH p + 4 j + i stands at 4 lanes j + 4 p + i of the second
                # half: the lanes of a row read 16 bytes side by side.
                at = tid // 4 % (WIDTH // 4) * (4 * self.lanes) + tid // WIDTH * 4 + tid % 4
                mean = total / Float32(count) * sign
                if const_expr(self.varlen):  # a sequence without keys, whose sum nobody wrote
                    mean = mean if count > 0 else Float32(0.0)
                if const_expr(self.d < self.width):
                    mean = mean if tid < self.d else Float32(0.0)
                columns[self.width + at] = mean

    @cute.jit
    def sum_of_chunks(self, m_sums: cute.Tensor, column: Int32) -> Float32:
        """Of a column, from what `KeySums` has left."""
        cute.arch.griddepcontrol_wait()  # the sums of KeySums, where it was launched before this grid
        chunks = m_sums.shape[0]
        # 32 bits hold the stride of what KeySums wrote; where it did not run, there is one chunk.
        step = Uint32(m_sums.stride[0])
        part = cute.make_rmem_tensor(MEAN_CHUNKS, Float32)
        for i in cutlass.range_constexpr(MEAN_CHUNKS):  # all loads in flight together
            offset = Int64(Uint64(Uint32(min(i, chunks - 1))) * Uint64(step) * 4)
            address = address_in(m_sums, 0, column) + offset
            pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
            part[i] = cute.make_tensor(pointer, cute.make_layout(1))[0]
        total = part[0]
        for i in cutlass.range_constexpr(1, MEAN_CHUNKS):
            total = total + part[i] if i < chunks else total
        return total

    @cute.jit
    def own_mean(self, columns: cute.Tensor, eight: cutlass.Constexpr, place: Int32) -> cute.Tensor:
        """Eight of the thread's columns of the mean."""
        mine = cute.make_rmem_tensor(8, Float32)
        for j in cutlass.range_constexpr(2):
            start = self.width + 4 * self.lanes * (2 * eight + j) + 4 * place
            part = cute.make_tensor(mine.iterator + 4 * j, cute.make_layout(4))
            cute.autovec_copy(vector(cute.domain_offset(start, columns), 4), part)
        return mine

    @cute.jit
    def own_flips(self, columns: cute.Tensor, place: Int32) -> cute.Tensor:
        """Signs of the thread's columns, (8,) or (1,) Uint32: word i < 8 with those of pair i in bits 15 and 31 and of
        pair i + 8 in bits 7 and 23, or, seven registers and their gain in shifts less, one with those of pair i in bits
        15 - i and 31 - i. With `keeps_signs`, word 0 also has what `reversed_halves` says, in bits 30 and 29."""
        flips = cute.make_rmem_tensor(8, Uint32)
        words = cute.recast_tensor(flips, Float32)
        for j in cutlass.range_constexpr(2):
            part = cute.make_tensor(words.iterator + 4 * j, cute.make_layout(4))
            cute.autovec_copy(vector(cute.domain_offset(8 * place + 4 * j, columns), 4), part)
        if const_expr(self.rotary.on):
            for i in cutlass.range_constexpr(1, 8):
                flips[0] = flips[0] | flips[i] >> i
        return flips

    @cute.jit
    def flips_of(self, flips: cute.Tensor, pair: cutlass.Constexpr) -> Uint32:
        """Signs of a pair of `own_flips` in bits 15 and 31; other bits: any."""
        if const_expr(self.rotary.on):
            return flips[0] << pair
        return flips[pair % 8] << pair // 8 * 8

    @cute.jit
    def read_piece(self, address: Int32) -> cute.Tensor:
        """(4,) words: the 16 bytes at shared `address`."""
        words = cute.make_rmem_tensor(4, Uint32)
        source = address_of(Uint32, address, cute.AddressSpace.smem)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
        return words

    @cute.jit
    def read_slot(self, address: Int32, flips: cute.Tensor, x: cute.Tensor):
        """The elements at shared `address` ^ 0, 16, .. with the signs of the rotation, as float32 into x
        (WIDTH,); flips: see `own_flips`."""
        for eight in cutlass.range_constexpr(WIDTH // 8):
            words = self.read_piece(address ^ (16 * eight))
            for i in cutlass.range_constexpr(4):
                pair = words[i]
                if const_expr(self.rotate):
                    pair = pair ^ self.flips_of(flips, 4 * eight + i) & Uint32(0x80008000)
                x[8 * eight + 2 * i], x[8 * eight + 2 * i + 1] = widen(pair, self.in_type)

    @cute.jit
    def embed_slot(
        self,
        slot: Int32,  # shared address of the warp's pieces
        m_cos: cute.Tensor,  # (seqlen_ro, rotary_dim / 2)
        m_sin: cute.Tensor,
        position: Int32,  # of the thread's row
        flips: cute.Tensor,
        lane: Int32,
        x: cute.Tensor,  # (WIDTH,) float32, the result
    ):
        """`read_slot` with the rotary embedding, which comes before the signs of the rotation."""
        pairs = m_cos.shape[1]
        cos_row, sin_row = self.rotary.row_of(m_cos, position), self.rotary.row_of(m_sin, position)
        place = lane & (self.lanes - 1)
        row = slot + (lane >> self.levels) * (2 * self.width)
        for eight in cutlass.range_constexpr(WIDTH // 8):
            column = place * WIDTH + 8 * eight
            cos = self.rotary.angles(cos_row, pairs, column)
            sin = self.rotary.angles(sin_row, pairs, column)
            own = self.read_piece(self.staged(row + 2 * column))
            other = own
            if const_expr(self.rotary.half):
                other = self.read_piece(self.staged(row + 2 * self.rotary.partner(pairs, column)))
            eight_x = cute.make_tensor(x.iterator + 8 * eight, cute.make_layout(8))
            self.rotary.embed(own, other, cos, sin, pairs, column, eight_x)
            if const_expr(self.rotate):
                for i in cutlass.range_constexpr(4):
                    flip = self.flips_of(flips, 4 * eight + i)
                    for e in cutlass.range_constexpr(2):
                        bit = flip << 16 * (1 - e) & Uint32(0x80000000)
                        eight_x[2 * i + e] = (eight_x[2 * i + e].bitcast(Uint32) ^ bit).bitcast(Float32)
            cute.arch.sync_warp()  # for the compiler, which would fetch all of it at once

    @cute.jit
    def staged(self, address: Int32) -> Int32:
        """Where 16 bytes of a warp's slot stand that would be at `address` if they stood in order, see `run`."""
        return address ^ (address >> 3 & 16 * (WIDTH // 8 - 1))

    @cute.jit
    def rotate_row(self, x: cute.Tensor, place: Int32):
        """Unnormalised Walsh-Hadamard transform of each block of a row, over its lanes; x (WIDTH,), in place.

        Distances 1 to 8 stay inside a thread. From distance 16 on, of the pairs a + b and a - b that a level makes, a
        lane keeps the sums and gives its neighbour (of the next level) the differences, or the other way round: it so
        has both ends of all pairs of the next level, for half the shuffles that it would take to see the other ends.
        Which of the two it keeps is a sign in the FMA that makes it (the product is exact), and costs nothing.

        A lane that should subtract its own elements from its neighbour's subtracts the others instead; signs so
        reversed come back in `encode`, which also makes -0 of a difference 0. Afterwards the thread has 16 columns
        twice, see `own_column`.
        """
        inside = min(WIDTH, self.block)
        inside = inside // 2 if const_expr(self.exchanges > 0) else inside
        for level in cutlass.range_constexpr(inside.bit_length() - 1):  # distances 1, 2, .. inside / 2
            for i in cutlass.range_constexpr(WIDTH):
                if const_expr(i & (1 << level) == 0):
                    a, b = x[i], x[i + (1 << level)]
                    x[i] = a + b
                    x[i + (1 << level)] = a - b
        half = WIDTH // 2
        for level in cutlass.range_constexpr(self.exchanges):
            sign = Float32(1.0) if place & (1 << level) == 0 else Float32(-1.0)
            for i in cutlass.range_constexpr(half):
                a, b = x[i], x[i + half]
                x[i] = b * sign + a
                x[i + half] = cute.arch.shuffle_sync_bfly(b * -sign + a, offset=1 << level)
        if const_expr(self.exchanges > 0):
            for i in cutlass.range_constexpr(half):
                a, b = x[i], x[i + half]
                x[i] = a + b
                x[i + half] = a - b

    @cute.jit
    def reversed_halves(self, place: Int32):
        """1 for each of the two halves of x that `rotate_row` reversed, else 0.

        Exchange k leaves lanes with bit k - 1 of `place` set with reversed differences, which it is bit k that keeps.
        """
        mine = place & ((1 << self.exchanges) - 1)
        both = mine & mine >> 1
        low = (both ^ both >> 1) & 1
        return low, low ^ mine >> (self.exchanges - 1)

    @cute.jit
    def restored(self, factor: Float32, flips: cute.Tensor, place: Int32):
        """`factor` for the two halves of x, with the sign that undoes what `rotate_row` reversed."""
        if const_expr(self.keeps_signs):
            low, high = flips[0] << 1, flips[0] << 2
        else:
            low, high = self.reversed_halves(place)
            low, high = Uint32(low) << 31, Uint32(high) << 31
        bits, sign = factor.bitcast(Uint32), Uint32(1 << 31)
        return (bits ^ low & sign).bitcast(Float32), (bits ^ high & sign).bitcast(Float32)

    @cute.jit
    def largest(self, x: cute.Tensor) -> Float32:
        """abs_max of x, an rmem tensor (a power of two,), in a tree: a chain would wait for each result."""
        tops = cute.make_rmem_tensor(cute.size(x) // 2, Float32)
        for i in cutlass.range_constexpr(cute.size(tops)):
            tops[i] = abs_max(x[2 * i], x[2 * i + 1])
        for level in cutlass.range_constexpr(cute.size(tops).bit_length() - 1):
            for i in cutlass.range_constexpr(cute.size(tops) >> (level + 1)):
                tops[i] = abs_max(tops[2 * i], tops[2 * i + 1])
        return tops[0]

    @cute.jit
    def encode(self, x: cute.Tensor, factor: Float32, flips: cute.Tensor, place: Int32) -> cute.Tensor:
        """Codes of x (WIDTH,) in words, in the order in which `run` stores them."""
        code = cute.make_rmem_tensor(WIDTH, self.code_type)
        words = cute.recast_tensor(code, Uint32)
        y = cute.make_rmem_tensor(WIDTH, Float32)
        if const_expr(self.exchanges > 0):
            low, high = self.restored(factor, flips, place)
            for i in cutlass.range_constexpr(WIDTH):
                y[i] = product(x[i], low if const_expr(i < WIDTH // 2) else high)
        else:
            for i in cutlass.range_constexpr(WIDTH):
                y[i] = product(x[i], factor) if const_expr(self.rotate) else x[i] * factor
        if const_expr(self.int8):
            for w in cutlass.range_constexpr(WIDTH // 4):
                words[w] = int8_word(y[4 * w], y[4 * w + 1], y[4 * w + 2], y[4 * w + 3])
        else:
            code.store(y.load().to(F8))
        if const_expr(self.exchanges == 0):
            # Two neighbours swap halves: of either store, 16 bytes a lane, they fill a sector of 32 bytes.
            odd = place % 2 == 1
            for w in cutlass.range_constexpr(4):
                given = words[w] if odd else words[w + 4]
                other = cute.arch.shuffle_sync_bfly(given, offset=1)
                words[w], words[w + 4] = other if odd else words[w], words[w + 4] if odd else other
        return words

    @cute.jit
    def store_words(self, words: cute.Tensor, address: Int64):
        """16 bytes of codes, words (4,), to global memory."""
        target = address_of(Uint32, address, cute.AddressSpace.gmem)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def run(
        self,
        m_x: cute.Tensor,  # (seqlen, head_dim)
        m_signs: cute.Tensor,  # (head_dim,)
        m_sums: cute.Tensor,  # (chunks, head_dim)
        amax: Float32,
        m_codes: cute.Tensor,  # (seqlen, head_dim)
        m_scale: cute.Tensor,  # (batch, heads, seqlen or groups of 64)
        m_dot: cute.Tensor,  # (batch, heads_q, seqlen_q)
        batch: Int32,
        head: Int32,
        m_cos: cute.Tensor,  # (seqlen_ro, rotary_dim / 2)
        m_sin: cute.Tensor,
        offset: Int32,  # position of the first row
        m_keys: cute.Tensor,  # (seqlen_k, head_dim): of the mean
        count: Int32,  # of its samples, or 1 if it is given
        chunk: Int32,  # samples that the CTA sums itself, or 0
        block: Int32,
        rows: Int32,  # of the CTA
        stage: cute.Tensor,
        columns: cute.Tensor,
        scratch: cute.Tensor,
        side: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        seqlen = m_x.shape[0]
        passes = rows // self.pass_rows
        # Over the loop, batch and head take fewer registers than addresses: where the embedding wants them, sliced
        # behind it.
        if const_expr(not self.rotary.on):
            scales, dots = m_scale[batch, head, None], m_dot[batch, head, None]
        # The copies: a warp's slot is 32 n pieces of 16 bytes, n = WIDTH / 8, its rows of a pass one after
        # the other. A lane copies pieces `lane`, 32 + lane, .. coalesced, and computes on n lane, n lane + 1,
        # .. Piece i stands at i ^ (i / 8 % n), so that the eight lanes of a shared-memory phase read eight
        # different banks of 16 bytes.
        n = WIDTH // 8
        first = block * rows + tid // 32 * (32 // self.lanes) + lane // (self.width // 8)
        column = lane % (self.width // 8) * 8
        slots = stage.iterator.toint() + tid // 32 * (self.slot_bytes * self.slots)
        target = slots + 16 * (lane ^ (lane // 8 % n))
        own = slots + 16 * (n * lane ^ (n * lane // 8 % n))
        for p in cutlass.range_constexpr(self.slots):
            if p < passes:
                self.fetch(m_x, column, first + p * self.pass_rows, target + self.slot_bytes * p)
            cute.arch.cp_async_commit_group()
        self.prepare_columns(m_signs, m_sums, m_keys, m_cos, m_sin, count, chunk, columns, side)
        cute.arch.sync_threads()  # all threads: signs and mean are in shared memory

        place = tid % self.lanes
        local = tid // self.lanes  # row of the thread in the CTA
        # The lanes that exchanged elements, in `rotate_row` or in `encode`, have 16 columns each, side by side, and as
        # many `step` columns further on.
        pair = WIDTH // 16
        across = max(self.exchanges, 1)
        step = 16 << across
        own_column = 16 * (place & ((1 << across) - 1)) + (place >> across) * (2 * step)
        codes = address_in(m_codes, block * rows + local, own_column)
        codes_step = Int64(m_codes.stride[0]) * self.pass_rows
        flips = self.own_flips(columns, place)
        x = cute.make_rmem_tensor((WIDTH, self.group_passes), Float32)
        factor, scale = Float32(1.0), Float32(1.0)
        if const_expr(self.mode == "static"):
            factor, scale = scales_of(amax, self.qmax, self.norm)
        for group in cutlass.range(passes // self.group_passes, unroll=1):
            for g in cutlass.range_constexpr(self.group_passes):
                p = group * self.group_passes + g
                mine = x[None, g]
                slot = p % self.slots * self.slot_bytes
                cute.arch.cp_async_wait_group(self.slots - 1)
                cute.arch.sync_warp()  # the warp: the pieces that its other lanes have copied are there
                if const_expr(self.rotary.on):
                    # Addresses and signs are made anew in each pass: held over all, they would be spilled.
                    flips[0] = opaque(flips[0])
                    lane = Int32(opaque(Uint32(lane)))
                    place = lane % self.lanes
                    position = offset + last_row(m_x, block * rows + local + g * self.pass_rows)
                    self.embed_slot(slots + slot, m_cos, m_sin, position, flips, lane, mine)
                else:
                    self.read_slot(own + slot, flips, mine)
                cute.arch.sync_warp()  # the warp: all lanes have read the slot
                ahead = p + self.slots
                if ahead < passes:
                    self.fetch(m_x, column, first + ahead * self.pass_rows, target + slot)
                cute.arch.cp_async_commit_group()  # empty at the end: keeps the number of groups in flight
                if const_expr(self.smooth):
                    # The mean comes from shared memory every time: `WIDTH` registers less than if held.
                    if const_expr(self.keys):
                        for eight in cutlass.range_constexpr(n):
                            mean = self.own_mean(columns, eight, place)
                            for i in cutlass.range_constexpr(8):
                                mine[8 * eight + i] = mine[8 * eight + i] - mean[i]
                            cute.arch.sync_warp()  # for the compiler, which would fetch all of it at once
                    else:
                        dot = self.dot(mine, columns, place)
                        if place == 0:
                            side[QUANTIZE_SPAN + local + g * self.pass_rows] = dot
                if const_expr(self.rotate):
                    self.rotate_row(mine, place)
            if const_expr(self.mode != "static"):
                top = self.largest(cute.make_tensor(x.iterator, cute.make_layout(WIDTH * self.group_passes)))
                if const_expr(self.mode == "token"):
                    for level in cutlass.range_constexpr(self.levels):
                        top = abs_max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << level))
                    top = magnitude(top)
                else:
                    top = block_max(top, scratch, group % 2, self.group_warps)
                factor, scale = scales_of(top, self.qmax, self.norm)
            for g in cutlass.range_constexpr(self.group_passes):
                row = local + g * self.pass_rows
                if place == 0:
                    side[row] = scale
                words = self.encode(x[None, g], factor, flips, place)
                if block * rows + row < seqlen:
                    for piece in cutlass.range_constexpr(pair):
                        part = cute.make_tensor(words.iterator + 4 * piece, cute.make_layout(4))
                        address = codes + g * codes_step + step * piece
                        if const_expr(self.d == self.width):
                            self.store_words(part, address)
                        elif own_column + step * piece < self.d:
                            self.store_words(part, address)
            local += self.group_passes * self.pass_rows
            codes += self.group_passes * codes_step
        cute.arch.sync_threads()  # all threads: scales and products of all rows are in shared memory
        stored = K_SCALE_GROUP if self.keys else 1  # rows of a scale in storage
        if const_expr(self.rotary.on):
            scales, dots = m_scale[batch, head, None], m_dot[batch, head, None]
        for i in cutlass.range_constexpr(max(1, QUANTIZE_SPAN // stored // self.threads)):
            index = i * self.threads + tid
            entry = block * rows // stored + index
            if index < rows // stored and entry < scales.shape[0]:
                scales[entry] = side[index * stored]
                if const_expr(self.smooth and not self.keys):
                    dots[entry] = side[QUANTIZE_SPAN + index]

    @cute.jit
    def dot(self, x: cute.Tensor, columns: cute.Tensor, place: Int32) -> Float32:
        """Product of a query row with the mean key, over the lanes of the row; x (WIDTH,)."""
        total = Float32(0.0)
        for eight in cutlass.range_constexpr(WIDTH // 8):
            mean = self.own_mean(columns, eight, place)
            for i in cutlass.range_constexpr(8):
                total = total + x[8 * eight + i] * mean[i]
            cute.arch.sync_warp()  # for the compiler, which would fetch all of it at once
        for level in cutlass.range_constexpr(self.levels):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << level)
        return total
