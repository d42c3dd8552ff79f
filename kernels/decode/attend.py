"""Few queries against a KV cache: split-KV attention bound by the memory that K and V come from.

    S = softmax_scale Q K^T [softcap] [ALiBi], masked      P = softmax(S)      O = P V

FlashAttention-2's online softmax (arXiv 2307.08691, section 3.1) with the keys of a head split over CTAs and, inside
them, over warps (Flash-Decoding). Where a CTA has not seen all keys of its rows, it leaves O, the maximum and the sum
for combine.py, see split.py for who takes what.

Tensors, last stride 1 unless said, other strides free:

    q (batch, seqlen_q, heads_q, head_dim), out (batch, seqlen_q, heads_q, head_dim_v)    bf16 or fp16
        q may be of e4m3, with q_scale (batch, heads_k) float32, where the cache is
    k_cache (sequences, slots, heads_k, head_dim), v_cache (..., head_dim_v)    of that dtype or e4m3
        paged: (pages, page_size, heads_k, ...), block_table (batch, blocks) int32
    k_scale, v_scale float32, of e4m3: (batch, heads_k), or (sequences or pages, slots, heads_k), any strides
    lse (batch, heads_q, seqlen_q) float32

A CTA takes `rows` packed rows: row r is query r // group with query head r % group of the group of its key head. Keys
come in steps of 16 for each warp: step t of a unit is keys 16 (warps t + w) and on for warp w. A warp copies its K and
V by cp.async into a ring of its own, `stages` deep, computes on one stage while the others are in flight, and meets the
other warps only where a piece ends, and where it begins if Q is in shared memory. So the loop has no barrier but the
warp's own.

Slots outside of [first, end) of `Splits.key_range` are not read, or read and overwritten with zeros (`early`): NaN
there never meets a product.

16-bit caches: operands as they lie. e4m3: codes become fp16 in registers, exactly, and all products are fp16. A 16-bit
Q is rounded to fp16 with a power of two for each row that brings its largest element below 2^15; codes of an e4m3 Q
become fp16 as those of K do. Scales of K and of an e4m3 Q multiply scores. A scale of V for each token multiplies P,
over a power of two R at least as large as all scales so far, so that P does not leave fp16; O counts in units of R.

Pairs (`heads` 2): a row of K of a narrow head is half of a line of L2, which two CTAs would load at two times. Here
one CTA takes two heads, whose K side by side is that of one head with twice the columns: a row of Q has its own
columns in its head's half and zeros in the other one, and of a row of P V its head's half is O. Scales are those of the
row's head, and so is R. NaN in K of one head so reaches the rows of both.

What a CTA does, and where it stands: it finds its pieces of work (`Decode.kernel`, split.py). Of each it loads Q
(queries.py), fetches K and V step by step (loads.py) and computes (step.py). At the end it adds up what its warps have
(gather.py), to the output or to a slot for the combining kernel (combine.py). common/warp.py has the instructions.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from ..common.scheduler import share_start
from ..config import DECODE_KEYS, DecodeConfig
from .combine import Combine, Results
from .gather import Gather
from .loads import Cache, Cursor, Keys, Loads
from .queries import Queries
from .split import Divisors, Lengths, Piece, Shares, Splits, divisors_of
from .step import Scoring, Step

LARGEST = 2**31 - 1


class Decode:
    """Host entry of one configuration: the splitting kernel, and the combining one unless work is never split."""

    def __init__(self, cfg: DecodeConfig):
        cfg.check()
        self.cfg = cfg
        self.splits = Splits(cfg)
        self.loads = Loads(cfg)
        self.queries = Queries(cfg)
        self.step = Step(cfg)
        self.gather = Gather(cfg)
        self.combine = Combine(cfg)
        self.pdl = cfg.arch == "sm_90a"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        seqlens: cute.Tensor,  # (batch,) int32
        batch_idx,  # (batch,) int32 or None
        leftpad,  # likewise
        block_table,  # (batch, blocks) int32 with paging, else None
        k_scale,  # with e4m3, see Cache
        v_scale,
        slopes,  # (batch, heads_q) float32 with alibi
        sinks,  # (heads_q,) float32 with sinks
        q_scale,  # (batch, heads_k) float32 with an e4m3 Q
        workspace: Int64,  # address: (slots, rows, 2), then (slots, rows, head_dim_v) float32
        slots: Int32,
        softmax_scale_log2: Float32,  # > 0; with softcap softcap * log2(e)
        softcap_factor: Float32,  # 2 log2(e) softmax_scale / softcap
        seqlen_new: Int32,
        left: Int32,  # keys before and behind a query's own position that it sees
        right: Int32,
        ctas: Int32,
        splits: Int32,  # of a unit; 0: balanced
        least: Int32,  # tiles of a CTA at least, where balanced
        together: Int32,  # neighbouring key heads that are taken in step
        stream,
    ):
        cfg = self.cfg
        partial_ml = cute.make_tensor(
            cute.make_ptr(Float32, workspace, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((slots, cfg.rows, 2), stride=(Int64(cfg.rows * 2), 2, 1)),
        )
        partial_o = cute.make_tensor(
            cute.make_ptr(
                Float32,
                workspace + Int64(slots) * (cfg.rows * 8),
                cute.AddressSpace.gmem,
                assumed_align=16,
            ),
            cute.make_layout(
                (slots, cfg.rows, cfg.head_dim_v),
                stride=(Int64(cfg.rows * cfg.head_dim_v), cfg.head_dim_v, 1),
            ),
        )
        capacity = k_cache.shape[1]
        if const_expr(cfg.paging != "none"):
            capacity = k_cache.shape[1] * block_table.shape[1]
        shares = Shares(ctas, splits, least, together)
        heads_k = k_cache.shape[2] // cfg.heads
        by = divisors_of(q.shape[1], q.shape[2], heads_k, shares, cfg.rows)
        lengths = Lengths(seqlens, leftpad, q.shape[0], seqlen_new, capacity, q.shape[1], left)
        factor = Float32(1.0) if cfg.adjusted else softmax_scale_log2
        # The assembler takes registers as for the CTAs on an SM, at least two: chosen by compiling, not timed. Left to
        # itself it has 78 for 124 at head_dim 64 and makes up to 7% more instructions.
        least_ctas = (
            max(2, cfg.ctas_by_smem) if const_expr(cfg.whole and cfg.warps == 4 and not cfg.fp8) else 0
        )
        # The carveout, per cent: an SM shall hold as many CTAs as decode_plan.py counts.
        self.kernel(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            batch_idx,
            block_table,
            k_scale,
            v_scale,
            slopes,
            sinks,
            q_scale,
            partial_ml,
            partial_o,
            lengths,
            shares,
            by,
            softmax_scale_log2,
            softcap_factor,
            factor,
            right,
        ).launch(
            grid=[ctas, 1, 1],
            block=[cfg.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=least_ctas,
            preferred_smem_carveout=100,
        )
        if const_expr(not cfg.whole):
            if splits != 1:
                results = Results(out, lse, sinks, partial_ml, partial_o, factor)
                self.combine.launch(results, lengths, shares, by, heads_k, stream)

    @cute.kernel
    def kernel(
        self,
        m_q: cute.Tensor,
        m_k: cute.Tensor,
        m_v: cute.Tensor,
        m_out: cute.Tensor,
        m_lse: cute.Tensor,
        m_batch_idx,
        m_table,
        m_k_scale,
        m_v_scale,
        m_slopes,
        m_sinks,
        m_q_scale,
        m_ml: cute.Tensor,
        m_o: cute.Tensor,
        lengths: Lengths,
        shares: Shares,
        by: Divisors,
        scale: Float32,
        softcap_factor: Float32,
        factor: Float32,
        right: Int32,
    ):
        """What a CTA takes: a unit or a share of one, or piece after piece."""
        cfg = self.cfg
        if const_expr(self.pdl and not cfg.whole):
            # Once every CTA has said so or ended, CTAs of the combining grid may start where there is room. They wait
            # for the end of this grid before they read what it writes (combine.py). None is launched where splits == 1.
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        cache = Cache(m_k, m_v, m_batch_idx, m_table, m_k_scale, m_v_scale)
        scoring = Scoring(m_slopes, scale, softcap_factor, right, m_q_scale)
        results = Results(m_out, m_lse, m_sinks, m_ml, m_o, factor)
        smem = SmemAllocator().allocate_tensor(cutlass.Uint8, cute.make_layout(cfg.smem_bytes), 128)
        base = smem.iterator.toint()

        if const_expr(cfg.whole or cfg.fixed):
            # Share `split` of a unit: its splits-th tiles from tile `split` on, of a whole unit all of them.
            unit, split, splits = cta, Int32(0), Int32(1)
            if const_expr(cfg.fixed):
                unit, split = divmod(cta, by.splits)
                splits = by.splits.divisor
            b, unit = divmod(unit, by.units)
            head, block = divmod(unit, by.blocks)
            started = Int32(0)
            if const_expr(cfg.early):
                # Without a window the unit begins with key 0. Its length comes while the first copies do, as if there
                # were no end of it.
                if (lengths.left >= lengths.capacity) & (lengths.capacity >= self.early_end(split, splits)):
                    started = Int32(1)
                    every = Keys(b, b, head, Int32(0), Int32(LARGEST))
                    key0, step = split * cfg.tile_keys + warp * DECODE_KEYS, splits * cfg.tile_keys
                    at = self.loads.cursor(cache, every, key0, step, lane)
                    ring = base + warp * cfg.warp_bytes
                    self.start(cache, every, key0, step, Int32(cfg.stages), ring, lane, at)
            tiles = self.splits.tiles_of(lengths, b)
            count = tiles
            if const_expr(cfg.fixed):
                each, more = divmod(tiles, by.splits)
                count = each + (Int32(1) if split < more else Int32(0))
            if count > 0:
                piece = Piece(b, head, block * cfg.rows, by.group, split, count, count == tiles, cta, splits)
                self.attend(m_q, cache, scoring, results, lengths, piece, started, base, tid, lane, warp)
            else:
                # The lane: none of its copies is under way when the CTA gives its memory back.
                cute.arch.cp_async_wait_group(0)
        else:
            self.shared_out(m_q, cache, scoring, results, lengths, shares, by, base, tid, lane, warp, cta)

    @cute.jit
    def shared_out(
        self,
        m_q: cute.Tensor,
        cache: Cache,
        scoring: Scoring,
        results: Results,
        lengths: Lengths,
        shares: Shares,
        by: Divisors,
        base: Int32,  # as `attend` has it
        tid: Int32,
        lane: Int32,
        warp: Int32,
        cta: Int32,
    ):
        """A CTA that takes piece after piece."""
        cfg = self.cfg
        ctas, splits, _, together = shares
        units = by.units.divisor  # of a sequence
        # Tiles pos to end - 1 of the heads that are taken in step, the first of sequence b at `start`; or units pos,
        # pos + ctas and so on below end.
        b, start, pos, end = Int32(0), Int32(0), Int32(0), Int32(0)
        side, apart, whole = Int32(0), Int32(1), Int32(0)  # head among those in step, how many they are
        in_step = units  # of a sequence for a CTA to share: of one of the heads in step
        if splits == 0:
            total, _, longest = self.splits.tiles_before(lengths, Int32(0), units)
            whole = self.splits.whole(total, longest, units * m_q.shape[0], by)
            if whole != 0:
                pos, end, b = cta, units * m_q.shape[0], cta // by.units
            else:
                share = cta
                if const_expr(not cfg.whole_lines):
                    apart = together
                    share, side = divmod(cta, by.together)
                    total = total // by.together
                    in_step = units // by.together
                sharers = self.splits.sharers(total, by)
                if share < sharers:
                    pos = share_start(total, sharers, share)
                    end = share_start(total, sharers, share + 1)
                    b, start = self.splits.locate(lengths, pos, in_step)
        else:
            unit, split = divmod(cta, by.splits)
            b, unit = divmod(unit, by.units)
            tiles = self.splits.tiles_of(lengths, b)
            each, more = divmod(tiles, by.splits)
            pos = unit * tiles + split * each + cutlass.min(split, more)
            end = pos + each + (Int32(1) if split < more else Int32(0))
        slot = cta
        while pos < end:
            tiles = self.splits.tiles_of(lengths, b)
            unit, tile, count = pos - b * units, Int32(0), tiles
            if whole == 0:
                unit = (pos - start) // tiles
                tile = pos - start - unit * tiles
                count = cutlass.min(tiles - tile, end - pos)
            head, block = divmod(unit, by.blocks)
            if const_expr(not cfg.whole_lines):
                head = head * apart + side
            piece = Piece(b, head, block * cfg.rows, by.group, tile, count, count == tiles, slot, Int32(1))
            self.attend(m_q, cache, scoring, results, lengths, piece, Int32(0), base, tid, lane, warp)
            slot = cta + ctas
            if whole == 0:
                pos = pos + count
                if pos == start + tiles * in_step:
                    start = pos
                    b = b + 1
            else:
                pos = pos + ctas
                b = pos // by.units

    @cute.jit
    def attend(
        self,
        m_q: cute.Tensor,
        cache: Cache,
        scoring: Scoring,
        results: Results,
        lengths: Lengths,
        piece: Piece,
        started: Int32,  # with `early`, 1: its first copies are under way, if it is long enough
        base: Int32,  # shared address: a ring for each warp, then Q
        tid: Int32,
        lane: Int32,
        warp: Int32,
    ):
        """One piece, to the output or a slot. All threads of the CTA call it, as often: it has barriers."""
        cfg = self.cfg
        sequence = piece.batch
        if const_expr(cfg.batch_idx):
            sequence = cache.batch_idx[piece.batch]
        ring = base + warp * cfg.warp_bytes
        first, end = self.splits.key_range(lengths, piece.batch)
        keys = Keys(piece.batch, sequence, piece.head, first, end)
        # Step i of this warp starts at key key0 + i * step.
        key0 = (first // cfg.tile_keys + piece.tile) * cfg.tile_keys + warp * DECODE_KEYS
        step = piece.apart * cfg.tile_keys

        page = self.loads.page_of(cache, keys, key0, lane)
        at = None
        if const_expr(cfg.lean):
            at = self.loads.cursor(cache, keys, key0, step, lane)
        # Each step is a group of copies, an empty one past the last: so step i is always group i.
        if const_expr(cfg.early):
            if (started == 0) | (end < self.early_end(piece.tile, piece.apart)):
                # The lane and the warp: no copy of theirs is under way, behind which another one might come.
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_warp()
                self.start(cache, keys, key0, step, piece.tiles, ring, lane, at)
            at = self.loads.next(at, cfg.stages - 1)
        else:
            for i in cutlass.range_constexpr(cfg.stages - 1):
                if i < piece.tiles:
                    key = key0 + i * step
                    self.loads.fetch(cache, keys, key, page, ring + i * cfg.stage_bytes, lane, at)
                    page = self.loads.page_of(cache, keys, key + step, lane)
                cute.arch.cp_async_commit_group()
                if const_expr(cfg.lean):
                    at = self.loads.next(at)

        q = self.queries.load(m_q, piece, base + cfg.warps * cfg.warp_bytes, lane)
        if const_expr(cfg.q_in_smem):
            self.queries.share(q, warp, lane)
            # All threads: each warp has stored its share of the fragments, which every warp reads from here on.
            cute.arch.sync_threads()
        rows = self.step.rows_of(scoring, lengths, piece, keys, q, lane)
        state = self.step.new_state()
        o_factor = cute.make_rmem_tensor(2, Float32)  # of a thread's rows: what O still wants
        o_factor.fill(1.0)
        k_scale, v_scale = [cute.make_rmem_tensor((2, 2, self.step.scale_sets), Float32) for _ in range(2)]
        q_scale = Float32(1.0)
        if const_expr(cfg.query == "e4m3"):
            q_scale = scoring.q_scale[piece.batch, piece.head]
        if const_expr(cfg.scales == "head"):
            k_scale.fill(cache.k_scale[piece.batch, piece.head] * q_scale)
            o_factor.fill(cache.v_scale[piece.batch, piece.head])

        # Offsets in the ring of the stage that is computed on, and of the one that is filled meanwhile.
        stage, ahead = Int32(0), Int32((cfg.stages - 1) * cfg.stage_bytes)
        for i in cutlass.range(piece.tiles, unroll=1):
            own = lane
            if const_expr(cfg.crowded):
                # The same, of which the compiler knows nothing: what is computed from it is not kept over the loop.
                own = cute.arch.shuffle_sync(lane, lane)
            # The lane: its copies of this step have arrived. Groups up to i + stages - 2 are committed, and only the
            # youngest stages - 2 of them, steps i + 1 and on, may still be under way.
            cute.arch.cp_async_wait_group(cfg.stages - 2)
            # The warp: so have those of the other lanes, which become visible, and none still reads the stage of step
            # i - 1, which is filled next.
            cute.arch.sync_warp()
            if i + (cfg.stages - 1) < piece.tiles:
                key = key0 + (i + (cfg.stages - 1)) * step
                self.loads.fetch(cache, keys, key, page, ring + ahead, own, at)
                page = self.loads.page_of(cache, keys, key + step, own)
            cute.arch.cp_async_commit_group()
            if const_expr(cfg.lean):
                at = self.loads.next(at)
            place = ring + stage
            place_v = place + DECODE_KEYS * cfg.k_pitch
            if const_expr(cfg.token_scales):
                for h in cutlass.range_constexpr(self.step.scale_sets):
                    scales = place_v + DECODE_KEYS * cfg.v_pitch
                    if const_expr(cfg.heads == 2):
                        scales = scales + rows.side[h] * (8 * DECODE_KEYS)
                    self.loads.read_scales(scales, k_scale[None, None, h], v_scale[None, None, h], own)
                if const_expr(cfg.query == "e4m3"):
                    for j in cutlass.range_constexpr(2):
                        for e in cutlass.range_constexpr(2):
                            k_scale[e, j, 0] = k_scale[e, j, 0] * q_scale
            s = cute.make_rmem_tensor((4, 2, cfg.m_tiles), Float32)
            self.step.scores(q, place, own, s)
            self.step.adjust(s, key0 + i * step, k_scale, rows, keys, own)
            self.step.softmax(s, rows, state)
            if const_expr(cfg.token_scales):
                self.step.scale_p(s, v_scale, state)
            self.step.accumulate(s, state, place_v, own)
            stage = stage + cfg.stage_bytes if stage < (cfg.stages - 1) * cfg.stage_bytes else Int32(0)
            ahead = ahead + cfg.stage_bytes if ahead < (cfg.stages - 1) * cfg.stage_bytes else Int32(0)
        # The lane: none of its copies is under way. Only empty groups are left by now.
        cute.arch.cp_async_wait_group(0)
        # The warp: no lane still reads the ring, where O goes now, or what the next piece loads.
        cute.arch.sync_warp()
        if const_expr(cfg.token_scales):
            for h in cutlass.range_constexpr(2):
                o_factor[h] = state.unit_o[self.step.scale_set(h)]
        self.gather.leave(state, rows, q, o_factor, ring, lane)
        # All threads: every warp has left its part, of which each thread reads some.
        cute.arch.sync_threads()
        self.gather.add_up(base, results, piece, tid)
        # All threads: the parts, and Q, are read; the next piece may fill rings and store its Q.
        cute.arch.sync_threads()

    @cute.jit
    def early_end(self, tile: Int32, apart: Int32) -> Int32:
        """Where the copies of `start` end, of steps of every apart-th tile from `tile` on: the slot behind the last."""
        return (tile + (self.cfg.stages - 2) * apart + 1) * self.cfg.tile_keys

    @cute.jit
    def start(
        self,
        cache: Cache,
        keys: Keys,
        key0: Int32,
        step: Int32,
        tiles: Int32,
        ring: Int32,
        lane: Int32,
        at: Cursor,
    ):
        """Starts the copies of as many steps as the ring holds ahead, of `tiles` at most; with `lean`."""
        cfg = self.cfg
        for i in cutlass.range_constexpr(cfg.stages - 1):
            key = key0 + i * step
            if i < tiles:
                self.loads.fetch(cache, keys, key, Int32(0), ring + i * cfg.stage_bytes, lane, at)
            cute.arch.cp_async_commit_group()
            at = self.loads.next(at)
