"""Forward attention by mma.sync, for GPUs without WGMMA: FlashAttention-2's forward (arXiv 2307.08691, section 3.1).

    O = softmax(softmax_scale * Q K^T + mask) V,  lse = log sum exp of the scores, per (batch, head)

Tensors (the natural layouts of the caller; every stride is dynamic, the last one is 1; addresses and strides are
multiples of 16 bytes):

    q        (batch, seqlen_q, heads_q, head_dim)   bf16 or fp16
    k        (batch, seqlen_k, heads_k, head_dim)   as q
    v        (batch, seqlen_k, heads_k, head_dim_v) as q
    o        (batch, seqlen_q, heads_q, head_dim_v) as q
    lse      (batch, heads_q, seqlen_q)             float32
    slopes   (batch, heads_q)                       float32, of ALiBi; may be expanded, read only by its configurations
    sinks    (heads_q,)                             float32, likewise

and of sequences of unlike length (`varlen`; the rows of all behind one another), without a mode for the batch and lse
(heads_q, rows)

    cu_seqlens_q, cu_seqlens_k  (batch + 1,) int32, where sequences begin and end in q and in k
    seqused_k                   (batch,) int32, keys that count of those a sequence has; may be absent

A CTA takes one tile of tile_m rows of one head; with pack_gqa, of one head of K: row r is query r // pack_gqa, head
r % pack_gqa of the group. Tiles that take longest start first. With `varlen` there are as many CTAs as tiles at most,
and those without one end at once.

The rows are shared out among the warps, 16 or 32 for each, so that a warp has whole rows of S and needs no other for
its softmax. It computes S = Q K^T of tile_n keys by m16n8k16 products, makes P of it in place, which lies as the A
operand of P V wants it, and adds P V to O in registers. 32 rows use each fragment of K and V that ldmatrix brings
twice, for shared memory would otherwise be busier than the tensor cores. Softmax: common/softmax_16bit.py.

Shared memory: Q (tile_m rows), the stages of K and of V (tile_n rows each), see tile.py, and where the tile is, for its
end. O is staged where Q was.
cp.async fills it; the thread that copies waits for its own copies, and a barrier of the CTA makes them everybody's.
With two stages, step j of the loop over key tiles is

    wait: own copies of K and V of this tile have arrived
    sync_threads: so have all; and all warps are done with the tile before, whose stage is free
    Q K^T, between whose products the copies of the next tile's K and V are issued
    softmax; P V

and with one

    wait, sync_threads: K of this tile is there, and all are done with V of the tile before
    Q K^T, between whose products the copies of this tile's V are issued
    wait, sync_threads: V is there, and all are done with K; copies of the next tile's K are issued
    softmax; P V

Key tiles are visited from the highest keys down, so that only the first one may have keys that do not exist. There
copies write zeros instead; in all others none is checked.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..common.floats import bf16_pair, fp16_pair
from ..common.mask import ROW_STEP, mask_scores
from ..common.scheduler import key_blocks, unit_coord
from ..common.scores import rows
from ..common.softmax_16bit import Softmax16bit
from ..common.varlen import find_sequence, one_batch, unit_of_sequence
from ..common.warp import (
    load_words,
    multiply_add,
    store_16_bytes_if,
    store_float_if,
    store_word,
    turns_if_any,
)
from ..config import Fwd16Sm80Config
from .tile import Tile


class Copies(NamedTuple):
    """Where a thread's copies of K and V go, and where they come from beside an address that all threads share."""

    k_to: Int32  # shared addresses in the first stage
    v_to: Int32
    k_own: Int32  # bytes from the first row of a pass to the thread's piece, in the source
    v_own: Int32
    k_step: Int64  # bytes from pass to pass there
    v_step: Int64


class Work(NamedTuple):
    """What the loop over key tiles has of a tile; one of each for every 16 rows of the warp where it says so."""

    limits: tuple  # for each: see `first_hidden_key`
    inputs: tuple  # for each: see `Softmax16bit.tile_inputs`
    states: tuple  # for each: see `Softmax16bit.new_state`
    o: cute.Tensor  # (4, n_tiles, m_tiles) float32: C fragments
    q: cute.Tensor  # (4, q_in_regs or 1, m_tiles) words: A fragments that stay in registers
    q_at: Int32  # shared addresses for this lane's fragments of Q, of K and of V in the first stage
    k_at: Int32
    v_at: Int32
    seqlen_k: Int32


AHEAD = 3  # loads of two fragments of K or V, of 16 keys and columns, under way while products run
AHEAD_Q = 1  # likewise, of the products before which fragments of Q are loaded that these want


class Fwd16bitSm80:
    """One configuration. Call it inside `cute.compile` with (fake) tensors."""

    def __init__(self, cfg: Fwd16Sm80Config):
        cfg.check()
        self.cfg = cfg
        self.softmax = Softmax16bit(cfg)
        self.q = Tile(cfg.tile_m, cfg.head_dim, cfg.threads)
        self.k = Tile(cfg.tile_n, cfg.head_dim, cfg.threads)
        self.v = Tile(cfg.tile_n, cfg.head_dim_v, cfg.threads)
        self.o = Tile(cfg.tile_m, cfg.head_dim_v, cfg.threads)
        self.k_base = max(self.q.bytes, self.o.bytes)  # shared offsets
        self.v_base = self.k_base + cfg.kv_stages * self.k.bytes

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        slopes: cute.Tensor,
        sinks: cute.Tensor,
        softmax_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        turn: Int32,  # key heads whose tiles are mixed in the order of work, see common/scheduler.py
        stream,
    ):
        cfg = self.cfg
        side = (slopes, sinks, softcap_factor, window_left, window_right)
        m_blocks = cute.ceil_div(q.shape[1] * cfg.pack_gqa, cfg.tile_m)
        ctas = m_blocks * (q.shape[2] // cfg.pack_gqa) * q.shape[0]
        self.launch(q, k, v, o, lse, side, softmax_scale_log2, m_blocks, turn, (), ctas, stream)

    @cute.jit
    def launch(
        self, q, k, v, o, lse, side, softmax_scale_log2: Float32, m_blocks, turn, lengths, ctas, stream
    ):
        cfg = self.cfg
        group = q.shape[2] // cfg.pack_gqa // k.shape[2]
        self.kernel(q, k, v, o, lse, side, softmax_scale_log2, m_blocks, group, turn, lengths).launch(
            grid=[ctas, 1, 1],
            block=[cfg.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=100,  # per cent; else the DSL asks the driver, which need not be there
        )

    @cute.kernel
    def kernel(
        self,
        m_q: cute.Tensor,
        m_k: cute.Tensor,
        m_v: cute.Tensor,
        m_o: cute.Tensor,
        m_lse: cute.Tensor,
        side,  # see `Softmax16bit.tile_inputs`
        softmax_scale_log2: Float32,
        m_blocks: Int32,
        group: Int32,  # query heads, or packs of them, of a key head
        turn: Int32,
        # with `varlen` (cu_seqlens_q, cu_seqlens_k, seqused_k, whether that counts, 0, keys of the heads whose tiles
        # are mixed); m_blocks and turn are not read then, and the tensors have a batch of one; else ()
        lengths,
    ):
        """Which tile a CTA takes, if any."""
        cfg = self.cfg
        cta, _, _ = cute.arch.block_idx()
        smem = SmemAllocator().allocate_tensor(cutlass.Uint8, cute.make_layout(cfg.smem_bytes), 1024)
        base = smem.iterator.toint()
        order = (m_blocks, group, m_k.shape[2], m_q.shape[0], turn)
        place = self.place(cta, order, m_q.shape[1], m_k.shape[1], lengths)
        tensors = (m_q, m_k, m_v, m_o, m_lse)
        if const_expr(cfg.varlen):
            if place[0] >= 0:
                self.attend(tensors, side, softmax_scale_log2, group, place, base)
        else:
            self.attend(tensors, side, softmax_scale_log2, group, place, base)

    @cute.jit
    def place(self, cta: Int32, order, seqlen_q: Int32, seqlen_k: Int32, lengths):
        """(m_block, head or pack, batch of tensors, sequence, its first row, rows, first key, keys) of a CTA's tile.

        order    arguments of `unit_coord`
        lengths  see `kernel`

        With `varlen` by whole warps; m_block is -1 where there is no tile.
        """
        m_blocks, group, heads_k, _, _ = order
        zero = Int32(0)
        if const_expr(self.cfg.varlen):
            _, found, rest, seq = find_sequence(cta, (zero, zero), lengths, group * heads_k, self.cfg)
            rows_there = cutlass.max(seq[2], 1)  # by whose tiles it divides, also where there is none
            m_block, head = unit_of_sequence(rest, rows_there, seq[4], group, heads_k, lengths[5], self.cfg)
            m_block = m_block if found != 0 else Int32(-1)
            place = (m_block, head, zero, *seq)
            place = tuple([cute.arch.make_warp_uniform(x) for x in place])
        else:
            if const_expr(self.cfg.causal):
                m_block, head, batch = unit_coord(cta, *order, self.cfg, to_and_fro=False)
            else:  # the same order, by two divisions, one behind the other, instead of three
                heads = group * heads_k
                index = cta // m_blocks
                batch = index // heads
                m_block, head = cta - index * m_blocks, index - batch * heads
            place = (m_block, head, batch, batch, zero, seqlen_q, zero, seqlen_k)
        return place

    @cute.jit
    def attend(self, tensors, side, softmax_scale_log2: Float32, group: Int32, place, base: Int32):
        """This CTA's tile; place see there, base is a shared address."""
        cfg = self.cfg
        m_q, m_k, m_v, m_o, m_lse = tensors
        m_block, head, batch, sequence, first_row, seqlen_q, first_key, seqlen_k = place
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        window = self.softmax.window(side)
        of_mask = m_block
        if const_expr(cfg.causal and not cfg.varlen):
            # The same in all lanes, which the compiler cannot know of a quotient: so what follows from it takes uniform
            # registers over the loop.
            of_mask = cute.arch.make_warp_uniform(m_block)
        blocks, _, masked, plain_end, first = key_blocks(of_mask, seqlen_q, seqlen_k, window, cfg)
        steps = blocks - first

        self.load_q(m_q, m_block, head, batch, first_row, seqlen_q, base, tid)
        last_row = first_key + blocks * cfg.tile_n
        k_from = global_address(m_k, batch, last_row - self.k.pass_rows, head // group)
        v_from = global_address(m_v, batch, last_row - self.v.pass_rows, head // group)
        copies = Copies(
            self.k.target(base + self.k_base, tid),
            self.v.target(base + self.v_base, tid),
            self.k.source_offset(m_k.stride[1], tid),
            self.v.source_offset(m_v.stride[1], tid),
            m_k.stride[1] * (2 * self.k.pass_rows),
            m_v.stride[1] * (2 * self.v.pass_rows),
        )
        n = blocks - 1
        k_from = self.copy_checked(self.k, copies.k_to, k_from, copies.k_own, copies.k_step, n, seqlen_k, tid)
        if const_expr(cfg.kv_stages == 2):
            v_from = self.copy_checked(
                self.v, copies.v_to, v_from, copies.v_own, copies.v_step, n, seqlen_k, tid
            )
        cute.arch.cp_async_commit_group()
        # For `finish`: there are no registers to keep it in over the loop.
        place_at = base + (cfg.smem_bytes - cfg.PLACE_BYTES)
        if tid == 0:
            for i in cutlass.range_constexpr(len(place)):
                store_word(place_at + 4 * i, place[i])

        row0 = m_block * cfg.tile_m + warp * (16 * cfg.m_tiles) + lane // 4
        work = Work(
            tuple([self.limits_of(row0 + 16 * mt, seqlen_q, seqlen_k, window) for mt in range(cfg.m_tiles)]),
            tuple(
                [
                    self.softmax.tile_inputs(
                        side,
                        softmax_scale_log2,
                        row0 + 16 * mt,
                        head,
                        head // group,
                        sequence,
                        seqlen_q,
                        seqlen_k,
                    )
                    for mt in range(cfg.m_tiles)
                ]
            ),
            tuple([self.softmax.new_state() for _ in range(cfg.m_tiles)]),
            cute.make_rmem_tensor((4, cfg.n_tiles, cfg.m_tiles), Float32),
            cute.make_rmem_tensor((4, max(cfg.q_in_regs, 1), cfg.m_tiles), Uint32),
            self.q.a_address(base, warp * (16 * cfg.m_tiles), lane),
            self.k.b_address(base + self.k_base, lane),
            self.v.b_transposed_address(base + self.v_base, lane),
            seqlen_k,
        )
        work.o.fill(0.0)
        if const_expr(cfg.q_in_regs > 0):
            cute.arch.cp_async_wait_group(0)  # the thread: its copies of Q have arrived
            cute.arch.sync_threads()  # all threads: so have all others'
            near = self.q.near(work.q_at)
            for mt in cutlass.range_constexpr(cfg.m_tiles):
                for step in cutlass.range_constexpr(cfg.q_in_regs):
                    words = self.q.load_a(near, step, 16 * mt)
                    for i in cutlass.range_constexpr(4):
                        work.q[i, step, mt] = words[i]

        stage = Int32(0)
        for j in cutlass.range(masked, unroll=1):
            k_from, v_from, stage = self.step(
                True, blocks - 1 - j, first, work, copies, k_from, v_from, stage, tid
            )
        for j in cutlass.range(masked, plain_end, unroll=1):
            k_from, v_from, stage = self.step(
                False, blocks - 1 - j, first, work, copies, k_from, v_from, stage, tid
            )
        if const_expr(cfg.window):
            for j in cutlass.range(plain_end, steps, unroll=1):
                k_from, v_from, stage = self.step(
                    True, blocks - 1 - j, first, work, copies, k_from, v_from, stage, tid
                )
        # Thread 0 has written it before the barriers of the loop, which all threads pass: there is a step at least.
        place = (*load_words(place_at), *load_words(place_at + 16))
        self.finish(work, side, softmax_scale_log2, m_o, m_lse, place, base, warp, lane)

    # -- copies -----------------------------------------------------------------------------------------------

    @cute.jit
    def load_q(
        self,
        m_q: cute.Tensor,
        m_block: Int32,
        head: Int32,
        batch: Int32,
        first_row: Int32,
        seqlen_q: Int32,
        base: Int32,
        tid: Int32,
    ):
        """Starts the copies of a tile of Q; rows past the last are zeros."""
        cfg = self.cfg
        target = self.q.target(base, tid)
        for i in cutlass.range_constexpr(self.q.passes):
            row = m_block * cfg.tile_m + i * self.q.pass_rows + tid // self.q.pieces
            at = (batch, first_row + row // cfg.pack_gqa, head * cfg.pack_gqa + row % cfg.pack_gqa)
            source = global_address(m_q, *at) + tid % self.q.pieces * 16
            self.q.copy_pass_or_zeros(target, i, source, tid, row // cfg.pack_gqa < seqlen_q)

    @cute.jit
    def copy_checked(
        self,
        tile: cutlass.Constexpr,
        target: Int32,
        source: Int64,
        own: Int32,
        step: Int64,
        n: Int32,
        seqlen_k: Int32,
        tid: Int32,
    ) -> Int64:
        """Starts the copies of key tile n, rows from high to low, with zeros of keys past the last.

        source     global address of the first row of the last pass
        own, step  see `Copies`

        Returns the source of the tile of lower keys.
        """
        for p in cutlass.range_constexpr(tile.passes):
            i = tile.passes - 1 - p
            row = n * self.cfg.tile_n + i * tile.pass_rows + tid // tile.pieces
            tile.copy_pass_or_zeros(target, i, source + own, tid, row < seqlen_k)
            source = source - step
        return source

    # -- one key tile -----------------------------------------------------------------------------------------
    #
    # Without @cute.jit: what follows is unrolled, and holds no branch that the device decides.

    def step(
        self,
        masking: bool,
        n: Int32,
        first: Int32,
        work: Work,
        copies: Copies,
        k_from: Int64,
        v_from: Int64,
        stage: Int32,
        tid: Int32,
    ):
        """Key tile n, of tiles down to `first`; the module says who waits for what.

        k_from, v_from  global addresses of the first row of the last pass of the tiles that are copied next

        Returns these and the stage of the next tile.
        """
        cfg = self.cfg
        more = n > first
        two = cfg.kv_stages == 2
        following = 1 - stage if two else stage
        k_to, v_to = copies.k_to + following * self.k.bytes, copies.v_to + following * self.v.bytes
        s = cute.make_rmem_tensor((4, cfg.tile_n // 8, cfg.m_tiles), Float32)
        s.fill(0.0)

        # The thread: its copies of this tile have arrived, with one stage those of K.
        cute.arch.cp_async_wait_group(0)
        # All threads: so have the others', and nobody reads any more what is copied to from here on.
        cute.arch.sync_threads()
        k_passes = list(reversed(range(self.k.passes))) if two else []
        v_passes = list(reversed(range(self.v.passes)))
        count = len(k_passes) + len(v_passes)
        items = cfg.k_steps * (cfg.tile_n // 16)
        issued = 0
        for item in self.score_products(s, work, stage):
            while issued < count and issued * items <= item * count:
                issued += 1
                if k_passes:
                    self.k.copy_pass(k_to, k_passes.pop(0), k_from + copies.k_own, tid, more)
                    k_from = k_from - copies.k_step
                    continue
                i = v_passes.pop(0)
                if two:
                    self.v.copy_pass(v_to, i, v_from + copies.v_own, tid, more)
                elif masking:  # perhaps the tile with keys that do not exist
                    row = n * cfg.tile_n + i * self.v.pass_rows + tid // self.v.pieces
                    self.v.copy_pass_or_zeros(v_to, i, v_from + copies.v_own, tid, row < work.seqlen_k)
                else:
                    self.v.copy_pass(v_to, i, v_from + copies.v_own, tid, None)
                v_from = v_from - copies.v_step
        cute.arch.cp_async_commit_group()
        if not two:
            # The thread: its copies of V have arrived. All threads: so have the others', and K is read.
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            for i in reversed(range(self.k.passes)):
                self.k.copy_pass(k_to, i, k_from + copies.k_own, tid, more)
                k_from = k_from - copies.k_step
            cute.arch.cp_async_commit_group()

        for mt in range(cfg.m_tiles):
            acc = s[None, None, mt]
            self.softmax.adjust(acc, n, work.inputs[mt])
            if masking:
                lane = cute.arch.lane_idx()
                limits = work.limits[mt]
                if cfg.causal:
                    # The lane's own, of which the compiler cannot know that it is the same in each step: else it keeps
                    # the limits of all rows over the loop, for which there are no registers.
                    limits = (cute.arch.shuffle_sync(limits[0], lane), *limits[1:])
                mask_scores(rows(acc), limits, n * cfg.tile_n + lane % 4 * 2, cfg)
            self.softmax.softmax(masking, acc, work.states[mt], work.inputs[mt][0])
        pair = bf16_pair if cfg.dtype == "bf16" else fp16_pair
        p = [  # P, rounded: A fragments of 16 keys and rows
            [
                [
                    pair(s[2 * h, j, mt], s[2 * h + 1, j, mt])
                    for j in (2 * group, 2 * group + 1)
                    for h in (0, 1)
                ]
                for mt in range(cfg.m_tiles)
            ]
            for group in range(cfg.tile_n // 16)
        ]
        self.rescale(work.o, tuple([state[2] for state in work.states]))
        self.value_products(p, work, stage)
        return k_from, v_from, following

    def score_products(self, s: cute.Tensor, work: Work, stage: Int32):
        """S += Q K^T of the tile in `stage`. A generator: it yields behind the products of 16 keys and columns, their
        number."""
        cfg = self.cfg
        pairs = cfg.tile_n // 16
        items = [(step, pair) for step in range(cfg.k_steps) for pair in range(pairs)]
        q_near, k_near = self.q.near(work.q_at), self.k.near(work.k_at + stage * self.k.bytes)
        a, b = {}, {}
        for item in range(-AHEAD, len(items)):
            if item + AHEAD_Q < len(items) and item + AHEAD_Q >= 0:
                step, pair = items[item + AHEAD_Q]
                if pair == 0:
                    a[step] = [
                        work.q[None, step, mt]
                        if step < cfg.q_in_regs
                        else self.q.load_a(q_near, step, 16 * mt)
                        for mt in range(cfg.m_tiles)
                    ]
            if item + AHEAD < len(items):
                step, pair = items[item + AHEAD]
                b[item + AHEAD] = self.k.load_b(k_near, step, 16 * pair)
            if item < 0:
                continue
            step, pair = items[item]
            words = b.pop(item)
            for mt in range(cfg.m_tiles):
                for i in range(2):
                    multiply_add(
                        s[None, 2 * pair + i, mt], a[step][mt], words[2 * i], words[2 * i + 1], cfg.dtype
                    )
            yield item

    def value_products(self, p: list, work: Work, stage: Int32) -> None:
        """O += P V of the tile in `stage`; p[group][mt] is the A fragment of 16 keys and rows."""
        cfg = self.cfg
        pairs = -(-cfg.n_tiles // 2)  # of 8 columns
        items = [(group, pair) for group in range(cfg.tile_n // 16) for pair in range(pairs)]
        v_near = self.v.near(work.v_at + stage * self.v.bytes)
        b = {}
        for item in range(-AHEAD, len(items)):
            if item + AHEAD < len(items):
                group, pair = items[item + AHEAD]
                b[item + AHEAD] = self.v.load_b_transposed(v_near, pair, 16 * group)
            if item < 0:
                continue
            group, pair = items[item]
            words = b.pop(item)
            for mt in range(cfg.m_tiles):
                for i in range(2):
                    n = 2 * pair + i
                    if n < cfg.n_tiles:
                        c = work.o[None, n, mt]
                        multiply_add(c, p[group][mt], words[2 * i], words[2 * i + 1], cfg.dtype)

    @cute.jit
    def rescale(self, o: cute.Tensor, factors):
        """O <- O * 2^(r_old - r); where no row of the warp has a new maximum, O stays as it is."""
        moved = factors[0][0] != Float32(1.0)
        for mt in cutlass.range_constexpr(self.cfg.m_tiles):
            for r in cutlass.range_constexpr(2):
                moved = moved | (factors[mt][r] != Float32(1.0))
        for _ in cutlass.range(turns_if_any(moved), unroll=1):
            for mt in cutlass.range_constexpr(self.cfg.m_tiles):
                for n in cutlass.range_constexpr(self.cfg.n_tiles):
                    for i in cutlass.range_constexpr(4):
                        o[i, n, mt] = o[i, n, mt] * factors[mt][i // 2]

    @cute.jit
    def limits_of(self, row: Int32, seqlen_q: Int32, seqlen_k: Int32, window):
        """Limits of the mask for a thread's row and the one ROW_STEP below, bottom-right: see `first_hidden_key`."""
        limits = (row // self.cfg.pack_gqa + 1 + seqlen_k - seqlen_q, seqlen_k)
        if const_expr(self.cfg.window):
            left, right = window
            limits = (*limits, right, left)
        return limits

    # -- the end of a tile ------------------------------------------------------------------------------------

    @cute.jit
    def finish(
        self,
        work,
        side,
        softmax_scale_log2: Float32,
        m_o: cute.Tensor,
        m_lse: cute.Tensor,
        place,
        base: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """Normalise; write lse, and O through shared memory, each warp its own rows."""
        cfg, g = self.cfg, self.cfg.pack_gqa
        m_block, head, batch, sequence, first_row, seqlen_q, _, seqlen_k = place
        row0 = m_block * cfg.tile_m + warp * (16 * cfg.m_tiles) + lane // 4
        cute.arch.cp_async_wait_group(0)  # the lane: no copy is under way
        if const_expr(cfg.head_dim == cfg.head_dim_v):
            cute.arch.sync_warp()  # the warp: its rows of Q are read, in whose place its rows of O go
        else:
            cute.arch.sync_threads()  # all threads: Q is read, in whose place O goes, in lines of another length
        own = base + self.o.at(warp * (16 * cfg.m_tiles) + lane // 4, Int32(0)) + lane % 4 * 4
        pair = bf16_pair if const_expr(cfg.dtype == "bf16") else fp16_pair
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            o, lse = work.o[None, None, mt], cute.make_rmem_tensor(2, Float32)
            row = row0 + 16 * mt
            limits = self.limits_of(row, seqlen_q, seqlen_k, self.softmax.window(side))
            self.softmax.finish(
                [o], work.states[mt], limits, softmax_scale_log2, side, row, head, sequence, lse
            )
            for h in cutlass.range_constexpr(2):
                query, head_q = (row + ROW_STEP * h) // g, head * g + (row + ROW_STEP * h) % g
                to = cute.domain_offset((batch, head_q, first_row + query), m_lse).iterator.toint()
                # the four lanes of a row hold the same value
                store_float_if(to, lse[h], (lane % 4 == 0) & (query < seqlen_q))
                # A row tile and a half are multiples of eight rows, which do not change the swizzle.
                there = own + (16 * mt + ROW_STEP * h) * self.o.line_bytes
                for n in cutlass.range_constexpr(cfg.n_tiles):
                    block, piece = n // self.o.pieces, n % self.o.pieces
                    at = (there ^ (16 * piece)) + block * self.o.block_bytes
                    target = cute.make_ptr(Uint32, at, cute.AddressSpace.smem, assumed_align=4)
                    cute.make_tensor(target, cute.make_layout(1))[0] = pair(o[2 * h, n], o[2 * h + 1, n])
        cute.arch.sync_warp()  # the warp: all lanes have stored their part of its rows
        pass_rows = 32 // self.o.pieces
        piece = lane % self.o.pieces
        for i in cutlass.range_constexpr(16 * cfg.m_tiles // pass_rows):
            row = warp * (16 * cfg.m_tiles) + i * pass_rows + lane // self.o.pieces
            packed = m_block * cfg.tile_m + row
            query = packed // g
            there = base + self.o.at(row, piece)
            to = global_address(m_o, batch, first_row + query, head * g + packed % g) + 16 * piece
            for b in cutlass.range_constexpr(self.o.blocks):
                words = cute.make_rmem_tensor(4, Uint32)
                source = cute.make_ptr(
                    Uint32, there + b * self.o.block_bytes, cute.AddressSpace.smem, assumed_align=16
                )
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
                wanted = query < seqlen_q
                if const_expr(b == self.o.blocks - 1 and self.o.last_pieces < self.o.pieces):
                    wanted = wanted & (piece < self.o.last_pieces)
                store_16_bytes_if(to + b * self.o.line_bytes, words, wanted)


@cute.jit
def global_address(x: cute.Tensor, batch: Int32, row: Int32, head: Int32) -> Int64:
    """Of the first element of a row of (batch, rows, heads, columns), 16 bits each."""
    return cute.domain_offset((batch, row, head, 0), x).iterator.toint()


class Fwd16bitVarlenSm80(Fwd16bitSm80):
    """One configuration for sequences of unlike length. Call it inside `cute.compile` with (fake) tensors."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (rows, heads_q, head_dim)
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,  # (heads_q, rows)
        slopes: cute.Tensor,
        sinks: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,  # (batch,), or anything where has_used is 0
        softmax_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        has_used: Int32,
        keys_in_turn: Int32,  # under a causal mask, keys of all heads whose tiles are mixed in the order of work
        stream,
    ):
        cfg = self.cfg
        side = (slopes, sinks, softcap_factor, window_left, window_right)
        # An upper bound: each sequence has one tile at most that is not full.
        tiles = q.shape[0] * cfg.pack_gqa // cfg.tile_m + (cu_seqlens_q.shape[0] - 1)
        ctas = tiles * (q.shape[1] // cfg.pack_gqa)
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k, has_used, Int32(0), keys_in_turn)
        tensors = [one_batch(x) for x in (q, k, v, o, lse)]
        self.launch(*tensors, side, softmax_scale_log2, Int32(1), Int32(1), lengths, ctas, stream)
