"""Adds up the parts of a unit in the CTA that leaves the last of them (see split.py), without a kernel of its own.

A CTA leaves two parts at most, of the unit that it begins within and of the one that it ends within. It notes them in
shared memory, and when it has done all its work it tells the counter of either unit. The CTA that finds all other parts
of a unit told adds up all of them, in their order, whichever it is: so results are the same each time.

A unit's counter is the one with the number of its first part's slot. Counters are zero before a launch, and after it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..config import DecodeConfig
from .combine import Results, finish, row_of
from .split import Divisors, Parts, Piece, Splits

# Words of a note: the unit's batch, head, row0, first tile, tiles (0: no note), then place of its parts, and whether
# this CTA adds them up. A third note has what is shared out: tiles, and CTAs that take part.
NOTE = 10
MOST = 16  # parts whose loads are in flight together, and lanes that weigh them


class Join:
    """The end of one configuration's CTAs; methods are traced into the kernel."""

    def __init__(self, cfg: DecodeConfig):
        self.cfg = cfg
        self.splits = Splits(cfg)
        self.vectors = cfg.head_dim_v // 4  # of a row
        # Rows and columns that a thread adds up together, for their loads' sake
        self.items = min(2, -(-cfg.rows * self.vectors // cfg.threads))

    @cute.jit
    def notes(self, base: Int32) -> cute.Tensor:
        """(2 * NOTE + 2,) int32 in shared memory. base: where the CTA's begins."""
        place = cute.make_ptr(Int32, base + self.cfg.notes_place, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(place, cute.make_layout(2 * NOTE + 2))

    @cute.jit
    def begin(self, base: Int32, total: Int32, sharers: Int32, tid: Int32):
        """Before the first piece. total, sharers: what `Splits.parts` wants where work is balanced."""
        if tid == 0:
            notes = self.notes(base)
            for i in cutlass.range_constexpr(2):
                notes[i * NOTE + 4] = Int32(0)
            notes[2 * NOTE], notes[2 * NOTE + 1] = total, sharers

    @cute.jit
    def note(self, base: Int32, piece: Piece, first: Int32, tiles: Int32, which: Int32, tid: Int32):
        """A part is left in its slot. first, tiles: of its unit; which: 1 for a CTA's second, else 0."""
        if tid == 0:
            notes = self.notes(base)
            words = (piece.batch, piece.head, piece.row0, first, tiles)
            for i in cutlass.range_constexpr(len(words)):
                notes[which * NOTE + i] = words[i]

    @cute.jit
    def end(
        self,
        base: Int32,
        results: Results,
        counters: Int64,
        splits: Int32,
        heads_k: Int32,
        by: Divisors,
        tid: Int32,
    ):
        """Behind the last piece; all threads of the CTA."""
        notes = self.notes(base)
        # All threads: what others have left in slots and noted is seen.
        cute.arch.sync_threads()
        if tid < 2:
            at = tid * NOTE
            tiles = notes[at + 4]
            adds = Int32(0)
            if tiles > 0:
                batch, head, row0, first = notes[at], notes[at + 1], notes[at + 2], notes[at + 3]
                parts = Parts(Int32(0), Int32(1), cutlass.min(splits, tiles), Int32(0))
                if splits == 0:
                    side = head % by.together
                    parts = self.splits.parts(notes[2 * NOTE], notes[2 * NOTE + 1], first, tiles, side, by)
                else:
                    unit = (batch * heads_k + head) * by.blocks.divisor + row0 // self.cfg.rows
                    parts = Parts(unit * splits, Int32(1), cutlass.min(splits, tiles), Int32(0))
                place = counters + Int64(4) * (parts.slot + parts.later)
                place = cute.make_ptr(Int32, place, cute.AddressSpace.gmem, assumed_align=4)
                # What all threads of the CTA have left, by the barrier above, is seen by who finds it counted; and what
                # was counted is seen by all of them, behind the barrier below.
                told = cute.arch.atomic_add(place, Int32(1), sem="acq_rel", scope="gpu")
                if told == parts.count - 1:
                    cute.make_tensor(place, cute.make_layout(1))[0] = Int32(0)
                    adds = Int32(1)
                words = (*parts,)
                for i in cutlass.range_constexpr(4):
                    notes[at + 5 + i] = words[i]
            notes[at + 9] = adds
        # All threads: which units this CTA adds up.
        cute.arch.sync_threads()
        for which in cutlass.range(2, unroll=1):
            at = which * NOTE
            if notes[at + 9] != 0:
                parts = Parts(*[notes[at + 5 + i] for i in range(4)])
                self.add_up(base, results, notes[at], notes[at + 1], notes[at + 2], parts, by, tid)

    @cute.jit
    def add_up(
        self,
        base: Int32,
        results: Results,
        batch: Int32,
        head: Int32,
        row0: Int32,
        parts: Parts,
        by: Divisors,
        tid: Int32,
    ):
        """A unit, all threads of the CTA: each takes four columns of a row, or of several."""
        cfg = self.cfg
        rows = cutlass.min(results.out.shape[1] * by.group.divisor - row0, cfg.rows)
        # Where the rings were: weights of MOST parts of each row, then its State
        weights = self.shared(base, (cfg.rows, MOST))
        state = self.shared(base + 4 * cfg.rows * MOST, (cfg.rows, 4))
        slot_bytes = 16 * cfg.rows * self.vectors  # a slot's O is one behind another
        step = Int64(parts.apart) * slot_bytes
        first_o = results.partial_o.iterator.toint() + Int64(parts.slot) * slot_bytes
        for index in cutlass.range(tid, rows * self.vectors + tid, self.items * cfg.threads, unroll=1):
            o = cute.make_rmem_tensor((4, self.items), Float32)
            o.fill(0.0)
            # Past the last row its last columns once more, which are not written
            piece = [cutlass.min(index + k * cfg.threads, rows * self.vectors - 1) for k in range(self.items)]
            row = [piece[k] // self.vectors for k in range(self.items)]
            source = [first_o + 16 * piece[k] for k in range(self.items)]
            for i0 in cutlass.range(0, parts.count, MOST, unroll=1):
                pieces = cute.make_rmem_tensor((4, MOST, self.items), Float32)
                pieces.fill(0.0)  # what is no part has no weight
                further = Int64(i0) * step
                for j in cutlass.range_constexpr(MOST):
                    if i0 + j < parts.count:
                        later = Int64(0)
                        if const_expr(j == 0):
                            later = Int64(parts.later) * slot_bytes if i0 == 0 else later
                        for k in cutlass.range_constexpr(self.items):
                            at = source[k] + further + later
                            at = cute.make_ptr(Float32, at, cute.AddressSpace.gmem, assumed_align=16)
                            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), pieces[None, j, k])
                    further = further + step
                self.weigh(results, parts, i0, rows, weights, state, tid)
                # All threads: weights and state of all rows are there.
                cute.arch.sync_threads()
                for k in cutlass.range_constexpr(self.items):
                    weight = cute.make_rmem_tensor(MOST, Float32)
                    cute.autovec_copy(weights[row[k], None], weight)
                    before = state[row[k], 0]
                    for e in cutlass.range_constexpr(4):
                        o[e, k] = o[e, k] * before
                        for j in cutlass.range_constexpr(MOST):
                            o[e, k] = o[e, k] + weight[j] * pieces[e, j, k]
                top = [state[row[k], 1] for k in range(self.items)]
                total = [state[row[k], 2] for k in range(self.items)]
                if i0 + MOST >= parts.count:
                    for k in cutlass.range_constexpr(self.items):
                        if index + k * cfg.threads < rows * self.vectors:
                            at = row_of(batch, head, row0 + row[k], by.group)
                            column = 4 * (piece[k] % self.vectors)
                            finish(cfg, results, at, column, top[k], total[k], o[None, k])
                # All threads: weights and state are read; those of the next parts, or of the next unit, may come.
                cute.arch.sync_threads()

    @cute.jit
    def weigh(
        self,
        results: Results,
        parts: Parts,
        i0: Int32,
        rows: Int32,
        weights: cute.Tensor,  # (rows, MOST)
        state: cute.Tensor,  # (rows, 4): by what sums so far change, maximum and sum so far
        tid: Int32,
    ):
        """Weights of parts i0 to i0 + MOST - 1 for all rows: a lane has one of a row."""
        i = i0 + tid % MOST
        for row in cutlass.range(tid // MOST, (rows + 1) // 2 * 2, self.cfg.threads // MOST, unroll=1):
            m, total = -Float32.inf, Float32(0.0)
            if (i < parts.count) & (row < rows):
                slot = self.slot(parts, i)
                m, total = results.partial_ml[slot, row, 0], results.partial_ml[slot, row, 1]
            old, so_far = -Float32.inf, Float32(0.0)
            if i0 > 0:
                old, so_far = state[row, 1], state[row, 2]
            top = cute.arch.fmax(m, old)
            for step in cutlass.range_constexpr(4):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
            finite = Float32(0.0) if top == -Float32.inf else top
            weight = cute.math.exp2((m - finite) * results.factor, fastmath=True)
            before = cute.math.exp2((old - finite) * results.factor, fastmath=True)
            total = total * weight
            for step in cutlass.range_constexpr(4):
                total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
            weights[row, tid % MOST] = weight
            # The warp: its lanes have read the state, which one of them changes.
            cute.arch.sync_warp()
            if tid % MOST == 0:
                state[row, 0], state[row, 1], state[row, 2] = before, top, so_far * before + total

    @cute.jit
    def slot(self, parts: Parts, i: Int32) -> Int32:
        """Of part i."""
        return parts.slot + i * parts.apart + (parts.later if i == 0 else 0)

    @cute.jit
    def shared(self, place: Int32, shape: cutlass.Constexpr) -> cute.Tensor:
        """Floats at a shared address, the last index fastest."""
        place = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(place, cute.make_layout(shape, stride=(shape[1], 1)))
