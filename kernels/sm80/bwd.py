"""Main kernel of the 16-bit backward of mma.sync: set-up, launch, copies, loop, epilogue.

For each (batch, head), with P = exp(S - lse) recomputed from Q, K and lse, and D = rowsum(dO * O) - dlse from the pass
before (FlashAttention-2, arXiv 2307.08691, algorithm 2):

    dV = P^T dO      dP = dO V^T      dS = P * (dP - D)      dQ = softmax_scale * dS K      dK = softmax_scale * dS^T Q

Tensors and workspace are those of the Hopper kernel (sm90/bwd.py), also of sequences of unlike length, with one count
of `turns` for each query tile and the sum of dQ in the order of this kernel's accumulators (`BwdStep.add_dq`).

A CTA takes tile_n keys of one head of K and all query heads of its group: dK and dV are sums over them in registers. K
and V stay in shared memory, Q and dO pass through with their rows of lse2 and D; columns past head_dim and rows past
the end hold zeros. The step is in bwd_step.py. At the end dK and dV lie where K and V were and leave in rows.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..any.bwd_passes import BwdEpilogue, BwdPrologue
from ..common.pointers import aligned
from ..common.scheduler import key_block_coord, key_block_order, query_blocks, tiles_before
from ..common.varlen import first_slot, key_tile, slot_shift, slots_of
from ..common.warp import copy_16_bytes, copy_16_bytes_or_zeros, load_words, store_word
from ..config import Bwd16Sm80Config
from ..sm90.bwd_16bit import Bwd16bitSm90, Bwd16bitVarlenSm90
from .bwd_step import LOG2_E, BwdStep, Lane, Scoring, Shared


class Queries(NamedTuple):
    """What a query tile is read from and added to; the workspace, contiguous, by its global addresses."""

    q: cute.Tensor
    do: cute.Tensor
    tiles: Int32  # query tiles, or slots of them, of a head
    lse2: Int64
    d_rows: Int64
    dq_sum: Int64
    turns: Int64


class KeyTile(NamedTuple):
    """A CTA's key tile, of which `varlen.key_tile` says more. It lies in shared memory, where each step reads what it
    wants of it: accumulators and fragments leave no registers for it. Behind it lie head_k and, for Q and for dO, where
    the rows of the entry's head 0 begin and how many bytes they are apart."""

    n_block: Int32
    entry: Int32  # of the batch, 0 with `varlen`
    head: Int32  # query head of the step
    end_head: Int32  # of the query heads
    visited: Int32  # seqlen_q, or 0 where no query sees the tile
    seqlen_q: Int32
    seqlen_k: Int32
    sequence: Int32
    row0: Int32  # first row in q
    slot: Int32  # first of the sequence's query tiles in the workspace
    key0: Int32  # first key in k
    stored: Int32  # keys from the tile's first to the end in k


class Bwd16Sm80Main:
    """One configuration of the main kernel."""

    def __init__(self, cfg: Bwd16Sm80Config):
        cfg.check()
        self.cfg = cfg
        self.step = BwdStep(cfg)

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        lse2: cute.Tensor,
        d_rows: cute.Tensor,
        dq_sum: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        slopes: cute.Tensor,
        turns: cute.Tensor,
        softmax_scale: Float32,
        score_scale_log2: Float32,  # see Scoring
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        turn: Int32,  # heads of K whose tiles are mixed, see `key_block_coord`
        ahead: Int32,  # not read, nor is the next
        ctas: Int32,
        stream,
        lengths=(),  # with `varlen`, see `kernel`; batch is 1 then
    ):
        shift = k.shape[1] - q.shape[1]
        scoring = Scoring(score_scale_log2, softcap_factor, k.shape[1], shift, window_left, window_right)
        n_blocks = cute.ceil_div(k.shape[1], self.cfg.tile_n)
        if const_expr(self.cfg.varlen):
            n_blocks = slots_of(k.shape[1], lengths[1], self.cfg.tile_n)
        order = key_block_order(n_blocks, k.shape[0], k.shape[2], turn, self.cfg)
        self.kernel(
            q,
            k,
            v,
            dout,
            lse2,
            d_rows,
            dq_sum,
            dk,
            dv,
            slopes,
            turns,
            scoring,
            softmax_scale,
            order,
            lengths,
        ).launch(
            grid=[n_blocks * k.shape[2] * k.shape[0], 1, 1],
            block=[self.cfg.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        m_q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        m_k: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_v: cute.Tensor,
        m_do: cute.Tensor,
        m_lse2: cute.Tensor,  # (batch, heads_q, rows)
        m_d_rows: cute.Tensor,
        m_dq_sum: cute.Tensor,  # (batch, heads_q, blocks, tile_m * qk_columns)
        m_dk: cute.Tensor,
        m_dv: cute.Tensor,
        m_slopes: cute.Tensor,  # (batch, heads_q)
        m_turns: cute.Tensor,  # (batch, heads_q, blocks, 1)
        scoring: Scoring,
        softmax_scale: Float32,
        order,  # of key tiles, see `key_block_order`
        # with `varlen` (cu_seqlens_q, cu_seqlens_k, seqused_k, whether that counts); else ()
        lengths,
    ):
        """With `varlen`, all but slopes has a batch of one; blocks and `order` are of slots of query and key tiles."""
        cfg = self.cfg
        cta, _, _ = cute.arch.block_idx()
        n_block, head_k, batch = key_block_coord(cta, order, cfg)
        more = (
            (m_q, m_k, m_v, m_do),
            (m_lse2, m_d_rows, m_dq_sum, m_turns),
            (m_dk, m_dv),
            m_slopes,
            softmax_scale,
        )
        if const_expr(cfg.varlen):
            place, stored = key_tile(n_block, head_k, cfg.tile_n, lengths)
            if stored > 0:  # the same in all threads
                self.work(place, stored, scoring, *more)
        else:
            place = (n_block, head_k, batch, Int32(0), m_q.shape[1], Int32(0), m_k.shape[1])
            self.work(place, m_k.shape[1] - n_block * cfg.tile_n, scoring, *more)

    @cute.jit
    def work(
        self,
        place,
        stored: Int32,
        scoring: Scoring,
        operands,
        workspace,
        gradients,
        m_slopes: cute.Tensor,
        softmax_scale: Float32,
    ):
        """A CTA's key tile. place and stored see `varlen.key_tile`; first row and key are 0 without `varlen`."""
        cfg, step = self.cfg, self.step
        m_q, m_k, m_v, m_do = operands
        n_block, head_k, batch, row0, seqlen_q, key0, seqlen_k = place
        tid, _, _ = cute.arch.thread_idx()
        group = m_q.shape[2] // m_k.shape[2]
        visited, entry, slot = seqlen_q, batch, Int32(0)
        if const_expr(cfg.varlen):
            # a tile of keys that do not count is seen by none
            visited = seqlen_q if n_block * cfg.tile_n < seqlen_k else Int32(0)
            entry, slot = Int32(0), first_slot(row0, batch, slot_shift(cfg.tile_m))
        end_head = head_k * group + group
        lengths = (visited, seqlen_q, seqlen_k, batch, row0, slot, key0, stored)
        of_cta = KeyTile(n_block, entry, head_k * group, end_head, *lengths)
        blocks = self.blocks(of_cta, scoring)

        smem = SmemAllocator().allocate_tensor(cutlass.Uint8, cute.make_layout(cfg.smem_bytes), 128)
        shared = self.share(smem.iterator.toint())
        queries = Queries(m_q, m_do, workspace[2].shape[2], *[x.iterator.toint() for x in workspace])
        if tid == 0:
            for i in cutlass.range_constexpr(12):
                store_word(shared.key_tile + 4 * i, of_cta[i])
            store_word(shared.key_tile + 48, head_k)
            for i in cutlass.range_constexpr(2):
                rows = (m_q, m_do)[i][entry, None, 0, None]
                for j in cutlass.range_constexpr(2):
                    long = (rows.iterator.toint(), Int64(rows.stride[0]) * 2)[j]
                    store_word(shared.key_tile + (64 + 16 * i + 8 * j), Int32(long))
                    store_word(shared.key_tile + (68 + 16 * i + 8 * j), Int32(long >> 32))
        cute.arch.sync_threads()  # all threads: the key tile is written, which the copies of queries read
        for tensor, tile, base, dim in (
            (m_k, step.qk, shared.k, cfg.head_dim),
            (m_v, step.v, shared.v, cfg.head_dim_v),
        ):
            rows, key = tensor[entry, None, head_k, None], key0 + n_block * cfg.tile_n
            source = (rows.iterator.toint(), Int64(rows.stride[0]) * 2)
            self.copy_rows(tile, cfg.tile_n, dim, base, source, key, key0 + seqlen_k, tid)
        if blocks[0] < blocks[3]:
            for of_do in cutlass.range_constexpr(2):
                first = (of_cta, of_cta.head, blocks[0])
                stage = self.stage(of_cta, blocks[0], blocks)
                if const_expr((cfg.q_stages, cfg.do_stages)[of_do] == 1):
                    stage = Int32(0)
                self.copy_queries(of_do, queries, first, shared, stage, tid)
        cute.arch.cp_async_commit_group()

        dk, dv = step.new_accumulators(step.dk_blocks), step.new_accumulators(step.dv_blocks)
        while self.heads_left(shared) > 0:
            slope = Float32(0.0)
            if const_expr(cfg.alibi):
                at = self.key_tile(shared)
                slope = m_slopes[at.sequence, at.head] * Float32(LOG2_E)
            more = (shared, queries, scoring, slope, dk, dv)
            m = self.blocks(self.key_tile(shared), scoring)[0]
            while m < self.blocks(self.key_tile(shared), scoring)[1]:
                self.take(True, m, *more)
                m += 1
            while m < self.blocks(self.key_tile(shared), scoring)[2]:
                self.take(False, m, *more)
                m += 1
            if const_expr(cfg.window):
                while m < self.blocks(self.key_tile(shared), scoring)[3]:
                    self.take(True, m, *more)
                    m += 1
            cute.arch.sync_threads()  # all threads: nobody reads the head any more
            if self.thread() == 0:
                store_word(shared.key_tile + 8, self.key_tile(shared).head + 1)
            cute.arch.sync_threads()  # all threads: the next one is written

        for i in cutlass.range_constexpr(cute.size(dk)):
            dk[i] = dk[i] * softmax_scale
        # The thread: its copies have arrived, of K and V where there was no step.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # all threads: nobody reads or fills K and V any more
        tid, at, head_k = self.thread(), self.key_tile(shared), load_words(shared.key_tile + 48)[0]
        warp = cute.arch.make_warp_uniform(tid >> 5)
        self.leave(dk, step.qk, shared.k, tid % 32, warp)
        self.leave(dv, step.v, shared.v, tid % 32, warp)
        cute.arch.sync_threads()  # all threads: dK and dV are written
        for tensor, tile, base, dim in (
            (gradients[0], step.qk, shared.k, cfg.head_dim),
            (gradients[1], step.v, shared.v, cfg.head_dim_v),
        ):
            target, key = tensor[at.entry, None, head_k, None], at.key0 + at.n_block * cfg.tile_n
            self.store_rows(tile, dim, base, target, key, key + at.stored, tid)

    @cute.jit
    def share(self, base: Int32) -> Shared:
        """How shared memory is shared out."""
        cfg, step = self.cfg, self.step
        sizes = (
            cfg.tile_n * step.qk.pitch,
            cfg.tile_n * step.v.pitch,
            cfg.q_stages * cfg.tile_m * step.qk.pitch,
            cfg.do_stages * cfg.tile_m * step.v.pitch,
            cfg.tile_m * step.scores.pitch,
            cfg.tile_m * step.scores.pitch,
            cfg.q_stages * cfg.tile_m * 4,
            cfg.do_stages * cfg.tile_m * 4,
            96,
        )
        assert sum(sizes) == cfg.smem_bytes
        return Shared(*[base + sum(sizes[:i]) for i in range(len(sizes))])

    # -- copies -----------------------------------------------------------------------------------------------

    @cute.jit
    def copy_rows(
        self,
        tile: cutlass.Constexpr,
        rows: cutlass.Constexpr,
        dim: cutlass.Constexpr,
        base: Int32,
        source,  # address of row 0, bytes between rows
        row0: Int32,
        seqlen: Int32,
        tid: Int32,
    ):
        """Starts the copy of rows row0 .. row0 + rows - 1 to a tile; zeros past seqlen and past dim."""
        group = tile.group
        chunk, row, together = tid & (group - 1), tid >> (group.bit_length() - 1), self.cfg.threads // group
        target = base + tile.chunk(row, chunk)
        start, row_bytes = source
        address = start + Int64(row0 + row) * row_bytes + 16 * chunk
        for i in cutlass.range_constexpr(-(-rows // together)):
            for j in cutlass.range_constexpr(tile.columns // (8 * group)):
                inside = row0 + row + i * together < seqlen
                if const_expr(8 * group * (j + 1) > dim):
                    inside = inside & (8 * (chunk + group * j) < dim)
                place = target + i * together * tile.pitch + 16 * group * j
                here = address + i * together * row_bytes + 16 * group * j
                size = 16 if inside else 0
                if const_expr(rows % together == 0):
                    copy_16_bytes_or_zeros(place, here, size)
                elif row + i * together < rows:
                    copy_16_bytes_or_zeros(place, here, size)

    @cute.jit
    def copy_queries(
        self,
        of_do: cutlass.Constexpr,
        queries: Queries,
        query_tile,  # key tile, head, query tile
        shared: Shared,
        stage: Int32,
        tid: Int32,
    ):
        """Starts the copies of a query tile of Q with lse2, or of dO with D, to a buffer."""
        cfg, step = self.cfg, self.step
        tile = step.v if const_expr(of_do) else step.qk
        dim = cfg.head_dim_v if const_expr(of_do) else cfg.head_dim
        base, rows_base = (shared.do, shared.d_rows) if const_expr(of_do) else (shared.q, shared.lse2)
        at, head, m = query_tile
        words = load_words(shared.key_tile + (64 + 16 * of_do))
        start, row_bytes = [(Int64(words[i + 1]) << 32) | Int64(Uint32(words[i])) for i in (0, 2)]
        source = (start + Int64(head) * queries[of_do].stride[2] * 2, row_bytes)
        rows = queries.d_rows if const_expr(of_do) else queries.lse2
        base = base + stage * (cfg.tile_m * tile.pitch)
        self.copy_rows(
            tile, cfg.tile_m, dim, base, source, at.row0 + m * cfg.tile_m, at.row0 + at.seqlen_q, tid
        )
        if tid < cfg.tile_m // 4:
            address = rows + Int64(self.unit(queries, query_tile)) * (cfg.tile_m * 4) + tid * 16
            copy_16_bytes(rows_base + stage * (cfg.tile_m * 4) + tid * 16, address)

    def unit(self, queries: Queries, query_tile) -> Int32:
        """Number of a query tile in the workspace; query_tile see `copy_queries`."""
        at, head, m = query_tile
        return (at.entry * queries.q.shape[2] + head) * queries.tiles + at.slot + m

    @cute.jit
    def thread(self) -> Int32:
        """Index of the thread, of which the compiler knows nothing: offsets are computed anew where they are wanted and
        do not fill registers for the length of the loop, or it spills."""
        tid, _, _ = cute.arch.thread_idx()
        return cute.arch.shuffle_sync(tid, cute.arch.lane_idx())

    @cute.jit
    def key_tile(self, shared: Shared) -> KeyTile:
        """The CTA's, from shared memory."""
        words = [load_words(shared.key_tile + 16 * i) for i in range(3)]
        return KeyTile(*words[0], *words[1], *words[2])

    @cute.jit
    def heads_left(self, shared: Shared) -> Int32:
        at = self.key_tile(shared)
        return at.end_head - at.head

    def stage(self, at: KeyTile, m: Int32, blocks) -> Int32:
        """Buffer of query tile m where there are two: that of the step before was the other one."""
        return ((at.end_head - at.head) * (blocks[3] - blocks[0]) - m + blocks[0]) & 1

    @cute.jit
    def behind(self, at: KeyTile, m: Int32, scoring: Scoring):
        """The query tile behind m, as `copy_queries` takes it, and whether there is one."""
        blocks = self.blocks(at, scoring)
        head, m = at.head, m + 1
        if m == blocks[3]:
            head, m = head + 1, blocks[0]
        return (at, head, m), head < at.end_head

    @cute.jit
    def blocks(self, at: KeyTile, scoring: Scoring):
        """`query_blocks` of the key tile."""
        window = (scoring.left, scoring.right)
        return query_blocks(at.n_block, at.visited, at.seqlen_k, window, self.cfg)

    # -- loop -------------------------------------------------------------------------------------------------

    @cute.jit
    def take(
        self,
        masking: cutlass.Constexpr,
        m: Int32,
        shared: Shared,
        queries: Queries,
        scoring: Scoring,
        slope: Float32,
        dk: cute.Tensor,
        dv: cute.Tensor,
    ):
        """Query tile m of the head; dk and dv grow in place."""
        cfg, step = self.cfg, self.step
        tid, at = self.thread(), self.key_tile(shared)
        lane = step.lane(tid & 31, cute.arch.make_warp_uniform(tid >> 5))
        scoring = scoring._replace(seqlen_k=at.seqlen_k, shift=at.seqlen_k - at.seqlen_q)
        stage = self.stage(at, m, self.blocks(at, scoring))
        following = Int32(1) - stage
        q_stage, q_next = (stage, following) if const_expr(cfg.q_stages == 2) else (Int32(0), Int32(0))
        do_stage, do_next = (stage, following) if const_expr(cfg.do_stages == 2) else (Int32(0), Int32(0))
        stages = (q_stage, do_stage)
        next_tile, more = self.behind(at, m, scoring)

        # The thread: its copies of this step have arrived.
        cute.arch.cp_async_wait_group(0)
        # All threads: so have those of the others, and nobody reads P, dS and the other buffers of Q and dO any more.
        cute.arch.sync_threads()
        if more:
            if const_expr(cfg.q_stages == 2):
                self.copy_queries(0, queries, next_tile, shared, q_next, tid)
            if const_expr(cfg.do_stages == 2):
                self.copy_queries(1, queries, next_tile, shared, do_next, tid)
        cute.arch.cp_async_commit_group()
        step.compute_scores(
            masking, shared, lane, stages, m * cfg.tile_m, at.n_block * cfg.tile_n, scoring, slope
        )
        cute.arch.sync_threads()  # all threads: P and dS are written
        tid, at = self.thread(), self.key_tile(shared)
        lane = step.lane(tid & 31, cute.arch.make_warp_uniform(tid >> 5))
        step.add_dv(dv, shared, lane, stages)
        unit = Int64(self.unit(queries, (at, at.head, m)))
        address = queries.dq_sum + unit * (cfg.tile_m * cfg.qk_columns * 4) + lane.dq
        if const_expr(cfg.q_stages == 1):
            step.add_dk(dk, shared, lane, stages)
        if const_expr(cfg.do_stages == 1):
            cute.arch.sync_threads()  # all threads: nobody reads dO, and with one buffer Q, any more
            next_tile, more = self.behind(at, m, scoring)
            if more:
                if const_expr(cfg.q_stages == 1):
                    self.copy_queries(0, queries, next_tile, shared, q_next, tid)
                self.copy_queries(1, queries, next_tile, shared, do_next, tid)
            cute.arch.cp_async_commit_group()
        dq = step.make_dq(shared, lane)
        if const_expr(cfg.deterministic):
            shift = at.seqlen_k - at.seqlen_q
            before = tiles_before(m, at.n_block, at.seqlen_k, shift, scoring.right, cfg)
            step.add_dq_in_turn(dq, address, (queries.turns + unit * 4, before))
        if const_expr(cfg.q_stages == 2):
            self.add_dk_under_dq(dk, dq, address, shared, lane, stages)
        elif const_expr(not cfg.deterministic):
            step.add_dq(dq, address, 0, cute.size(dq))

    def add_dk_under_dq(self, dk, dq, address, shared: Shared, lane: Lane, stages) -> None:
        """dK of the step; meanwhile dQ leaves, unless it has in its turn."""
        steps = self.cfg.tile_m // 16
        size = self.cfg.dq_registers

        def send(step: int) -> None:
            if not self.cfg.deterministic:
                self.step.add_dq(dq, address, size * step // steps, size * (step + 1) // steps)

        self.step.add_dk(dk, shared, lane, stages, send)

    # -- epilogue ---------------------------------------------------------------------------------------------

    @cute.jit
    def leave(self, acc: cute.Tensor, tile: cutlass.Constexpr, base: Int32, lane: Int32, warp: Int32):
        """A warp's part of dK or dV, in 16 bits, to a tile (tile_n, columns)."""
        cfg, columns = self.cfg, self.step.kv_columns
        own = tile.of_warp(tile.accumulator(lane), warp // cfg.kv_rows, columns)
        row = base + warp % cfg.kv_rows * (16 * tile.pitch)
        for n in cutlass.range_constexpr(acc.shape[1]):
            place = tile.block(own, n // 2, columns, n % 2) + row
            for m in cutlass.range_constexpr(acc.shape[2]):
                for r in cutlass.range_constexpr(2):
                    word = self.step.pair(acc[2 * r, n, m], acc[2 * r + 1, n, m])
                    store_word(place + (16 * cfg.kv_rows * m + 8 * r) * tile.pitch, word)

    @cute.jit
    def store_rows(
        self,
        tile: cutlass.Constexpr,
        dim: cutlass.Constexpr,
        base: Int32,
        target: cute.Tensor,  # (seqlen_k, dim)
        row0: Int32,
        seqlen: Int32,
        tid: Int32,
    ):
        """A tile (tile_n, columns) to rows row0 and on, but for those past seqlen and columns past dim."""
        group = tile.group
        chunk, row, together = tid & (group - 1), tid >> (group.bit_length() - 1), self.cfg.threads // group
        source = base + tile.chunk(row, chunk)
        for i in cutlass.range_constexpr(-(-self.cfg.tile_n // together)):
            for j in cutlass.range_constexpr(tile.columns // (8 * group)):
                of_tile, column = row + i * together, 8 * (chunk + group * j)
                if (row0 + of_tile < seqlen) & (of_tile < self.cfg.tile_n) & (column < dim):
                    words = cute.make_rmem_tensor(4, Uint32)
                    here = source + i * together * tile.pitch + 16 * group * j
                    pointer = cute.make_ptr(Uint32, here, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)
                    place = cute.domain_offset((row0 + of_tile, column), target).iterator
                    place = aligned(cute.recast_ptr(place, dtype=Uint32), 16)
                    cute.autovec_copy(words, cute.make_tensor(place, cute.make_layout(4)))


class BwdSm80Epilogue(BwdEpilogue):
    """The sum of dQ, in the order of `BwdStep.add_dq`, to dQ."""

    @cute.jit
    def place(self, index: Int32, i: cutlass.Constexpr):
        cfg, step = self.cfg, BwdStep(self.cfg)
        lane, element = index * 4 % 32, index // 8 % cfg.dq_registers
        warp = index // (8 * cfg.dq_registers)
        tile, r = element // 4, element % 4
        n, m = tile % (2 * step.dq_blocks[1]), tile // (2 * step.dq_blocks[1])
        row = 16 * (m * cfg.dq_rows + warp % cfg.dq_rows) + lane // 4 + r // 2 * 8
        column = 16 * (n // 2 * step.dq_columns + warp // cfg.dq_rows) + n % 2 * 8 + r % 2 + 2 * i
        return row, column


class Bwd16bitSm80(Bwd16bitSm90):
    """One 16-bit configuration: three launches on one stream. Call it inside `cute.compile` with (fake) tensors."""

    def __init__(self, cfg: Bwd16Sm80Config):
        self.main = Bwd16Sm80Main(cfg)
        self.before = BwdPrologue(cfg)
        self.behind = BwdSm80Epilogue(cfg)


class Bwd16bitVarlenSm80(Bwd16bitSm80, Bwd16bitVarlenSm90):
    """Likewise for sequences of unlike length."""
