"""Main kernel of the 16-bit backward on Hopper: set-up, launch, roles, producer, epilogue.

For each (batch, head), with P = exp(S - lse) recomputed from Q, K and lse, and D = rowsum(dO * O) from the pass before
(FlashAttention-2, arXiv 2307.08691, algorithm 2; FlashAttention-3, arXiv 2407.08608, section 3 and appendix B.1):

    dV = P^T dO      dP = dO V^T      dS = P * (dP - D)      dQ = softmax_scale * dS K      dK = softmax_scale * dS^T Q

Tensors (every stride is dynamic, the last one is 1):

    q, dout  (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_q, heads_q, head_dim_v)   bf16 or fp16
    k, v     (batch, seqlen_k, heads_k, head_dim), (batch, seqlen_k, heads_k, head_dim_v)   as q
    dk, dv   of the shapes of k and v                                                       as q
    lse2, d  (batch, heads_q, rows)                  float32; rows is a multiple of tile_m, those past seqlen_q have
                                                     lse2 = inf, which makes their P 0, and D = 0
    dq_sum   (batch, heads_q, rows / tile_m, tile_m * qk_columns) float32: sum of dS K before softmax_scale, in the
             order of accumulators (see `BwdMainloop.add_dq`). Zeroed, but where `clears_ahead` only that of the first
             `ahead` heads of K: each CTA clears a share of that of the head as many heads on, see `clear_ahead`
    slopes   (batch, heads_q)                        float32, of ALiBi; read only by its configurations
    turns    int32, zeroed. If deterministic, (batch, heads_q, rows / tile_m, consumer warpgroups): how many key tiles
             have added to a part of the sum of dQ. Where `clears_ahead`, (batch, heads_q, 1, consumer warpgroups), of
             which the first entry of the first head of a group counts key tiles whose CTAs have cleared their share of
             the group's; with `persistent` the second one of the very first head counts the key tiles given out

and of sequences of unlike length (`varlen`; the rows of all behind one another, see common/varlen.py), without a mode
for the batch in all but slopes

    cu_seqlens_q, cu_seqlens_k  (batch + 1,) int32, where sequences begin and end in q and in k
    seqused_k                   (batch,) int32, keys that count of those a sequence has; may be absent

What belongs to query tiles (lse2, d, dq_sum, turns) has a slot for each tile of a sequence then, so that `rows` is
tile_m times the slots; CTAs are given out by the slots of key tiles, and those whose slot has none leave at once.

A CTA takes tile_n keys of one head of K and all query heads of its group: dK and dV are sums over them in registers.
Its consumer warpgroups take 64 keys each, or share 64 keys and divide the columns of dK and dV; a last warpgroup
produces: its first warp issues the TMA loads, and, but with `dq_direct`, one for each consumer warpgroup sends its part
of dQ; the others leave at once. K and V stay in shared memory, Q and dO pass through rings with their rows of lse2 and
D. The main loop is in bwd_mainloop.py.

Shared memory: K (tile_n, qk_columns), V (tile_n, v_columns), Q (tile_m, qk_columns, q_stages), dO (tile_m, v_columns,
do_stages), dS (tile_m, tile_n, ds_stages) and with `shared_keys` as many stages of P, dQ in float32 unless it leaves
from registers, lse2 and D; columns past head_dim hold zeros, which TMA writes. At the end dK and dV lie where K and V
were, and TMA stores them.

Limits: those of the forward.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from ..any.bwd_passes import BwdEpilogue, BwdPrologue
from ..common.pointers import aligned
from ..common.scheduler import key_block_coord, key_block_order, query_blocks
from ..common.turns import await_turn, end_turn
from ..common.varlen import (
    END,
    FAR,
    PLACE,
    STAGES,
    first_slot,
    key_tile,
    one_batch,
    place_ring,
    put_place,
    ragged,
    ragged_coord,
    ragged_load,
    slot_shift,
    slots_of,
    steps_of,
    take_unit,
)
from ..config import Bwd16Config, swizzle_columns
from .bwd_mainloop import BwdBarrier, BwdMainloop
from .operands import ELEMENTS, row_major_atom


def rows_first(x: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, dim) -> (seqlen, dim, heads, batch)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))


@cute.jit
def heads_ahead(turn: Int32, q: cute.Tensor, k: cute.Tensor) -> Int32:
    """How many heads of K on a CTA clears the sum of dQ, see `Bwd16Main.clear_ahead`; `turn` as in `key_block_coord`.
    Of q, k (batch, seqlen, heads, dim)."""
    ahead = turn
    if (
        q.shape[1] > 8 * k.shape[1]
    ):  # a CTA would clear a large share, and there are few CTAs before those that wait
        ahead = k.shape[0] * k.shape[2]  # none
    return ahead


class Bwd16Main:
    """One configuration of the main kernel."""

    def __init__(self, cfg: Bwd16Config):
        cfg.check()
        self.cfg = cfg
        self.dtype = ELEMENTS[cfg.dtype]
        self.mainloop = BwdMainloop(cfg)

    # -- host -------------------------------------------------------------------------------------------------

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
        score_scale_log2: Float32,  # of a score: softmax_scale * log2(e), with softcap softcap * log2(e)
        softcap_factor: Float32,  # 2 * log2(e) * softmax_scale / softcap
        window_left: Int32,
        window_right: Int32,
        turn: Int32,  # heads of K whose tiles are mixed, see `key_block_coord`
        ahead: Int32,  # heads of K, see `clear_ahead`
        ctas: Int32,  # at most, with `persistent`
        stream,
        lengths=(),  # with `varlen`, see `kernel`; batch is 1 then
    ):
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.qk_columns, cfg.v_columns
        q, k, v, dout, dk, dv = [rows_first(x) for x in (q, k, v, dout, dk, dv)]
        n_blocks, heads_k, batches = cute.ceil_div(k.shape[0], tile_n), k.shape[2], k.shape[3]
        group = q.shape[2] // heads_k  # query heads of a key head
        if const_expr(cfg.varlen):
            n_blocks = slots_of(k.shape[0], lengths[1], tile_n)
            q, k, v, dout = [ragged_load(x, 0) for x in (q, k, v, dout)]
            dk, dv = [ragged(x, 0, 64) for x in (dk, dv)]
        # A warpgroup's part of a B operand is whole swizzle rows.
        atom_q, atom_v = row_major_atom(self.dtype, cfg.dk_part), row_major_atom(self.dtype, cfg.dv_part)
        atom_k = row_major_atom(self.dtype, cfg.k_part)
        layout_q = cute.tile_to_shape(atom_q, (tile_m, d, cfg.q_stages), order=(0, 1, 2))
        layout_do = cute.tile_to_shape(atom_v, (tile_m, d_v, cfg.do_stages), order=(0, 1, 2))
        layout_k = cute.tile_to_shape(atom_k, (tile_n, d), order=(0, 1))
        layout_v = cute.tile_to_shape(atom_v, (tile_n, d_v), order=(0, 1))
        atom_ds = row_major_atom(self.dtype, tile_n)
        ds_stages = cfg.ds_stages * (2 if const_expr(cfg.shared_keys) else 1)  # P behind dS
        layout_ds = cute.tile_to_shape(atom_ds, (tile_m, tile_n, ds_stages), order=(0, 1, 2))

        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q = cpasync.make_tiled_tma_atom(load, q, cute.select(layout_q, [0, 1]), (tile_m, d))
        tma_do = cpasync.make_tiled_tma_atom(load, dout, cute.select(layout_do, [0, 1]), (tile_m, d_v))
        tma_k = cpasync.make_tiled_tma_atom(load, k, layout_k, (tile_n, d))
        tma_v = cpasync.make_tiled_tma_atom(load, v, layout_v, (tile_n, d_v))
        store = cpasync.CopyBulkTensorTileS2GOp()
        box_k, box_v = swizzle_columns(cfg.k_part, 2), swizzle_columns(cfg.dv_part, 2)
        tma_dk = cpasync.make_tiled_tma_atom(
            store, dk, cute.tile_to_shape(atom_k, (64, box_k), order=(0, 1)), (64, box_k)
        )
        tma_dv = cpasync.make_tiled_tma_atom(
            store, dv, cute.tile_to_shape(atom_v, (64, box_v), order=(0, 1)), (64, box_v)
        )

        dq_size = 4 if const_expr(cfg.dq_direct) else tile_m * d
        out_size = (0, tile_n * max(d, d_v), tile_n * (d + d_v))[cfg.out_stages]
        tiles = n_blocks * heads_k * batches
        grid = tiles
        if const_expr(cfg.persistent):
            grid = cutlass.min(tiles, ctas)

        @cute.struct
        class Storage:
            bar_q: cute.struct.MemRange[cutlass.Int64, 2 * cfg.q_stages]
            bar_do: cute.struct.MemRange[cutlass.Int64, 2 * cfg.do_stages]
            bar_keys: cute.struct.MemRange[cutlass.Int64, 2 if cfg.persistent else 0]
            bar_places: cute.struct.MemRange[cutlass.Int64, 2 * STAGES if cfg.persistent else 0]
            place: cute.struct.MemRange[Int32, 5 if cfg.varlen else 0]
            places: cute.struct.Align[
                cute.struct.MemRange[Int32, PLACE * STAGES if cfg.persistent else 0], 16
            ]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_do)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ds)], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, dq_size], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.dtype, out_size], 1024]
            lse2: cute.struct.Align[cute.struct.MemRange[Float32, tile_m * cfg.q_stages], 1024]
            d_rows: cute.struct.Align[cute.struct.MemRange[Float32, tile_m * cfg.do_stages], 16]

        self.storage = Storage
        self.kernel(
            tma_q.atom,
            tma_q.tma_tensor,
            tma_k.atom,
            tma_k.tma_tensor,
            tma_v.atom,
            tma_v.tma_tensor,
            tma_do.atom,
            tma_do.tma_tensor,
            tma_dk.atom,
            tma_dk.tma_tensor,
            tma_dv.atom,
            tma_dv.tma_tensor,
            layout_q,
            layout_k,
            layout_v,
            layout_do,
            layout_ds,
            lse2,
            d_rows,
            dq_sum,
            slopes,
            turns,
            softmax_scale,
            score_scale_log2,
            softcap_factor,
            window_left,
            window_right,
            key_block_order(n_blocks, batches, heads_k, turn, cfg),
            group,
            ahead,
            tiles,
            lengths,
        ).launch(
            grid=[grid, 1, 1],
            block=[cfg.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    # -- device -----------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        atom_q: cute.CopyAtom,
        m_q: cute.Tensor,  # (seqlen_q, head_dim, heads_q, batch)
        atom_k: cute.CopyAtom,
        m_k: cute.Tensor,  # (seqlen_k, head_dim, heads_k, batch)
        atom_v: cute.CopyAtom,
        m_v: cute.Tensor,
        atom_do: cute.CopyAtom,
        m_do: cute.Tensor,
        atom_dk: cute.CopyAtom,
        m_dk: cute.Tensor,
        atom_dv: cute.CopyAtom,
        m_dv: cute.Tensor,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_do: cute.ComposedLayout,
        layout_ds: cute.ComposedLayout,
        m_lse2: cute.Tensor,  # (batch, heads_q, rows)
        m_d_rows: cute.Tensor,  # likewise
        m_dq_sum: cute.Tensor,  # (batch, heads_q, blocks, tile_m * qk_columns)
        slopes: cute.Tensor,  # (batch, heads_q)
        m_turns: cute.Tensor,  # (batch, heads_q, blocks or 1, warpgroups)
        softmax_scale: Float32,
        score_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        order,  # of key tiles, see `key_block_order`
        group: Int32,  # query heads of a key head
        ahead: Int32,
        tiles: Int32,  # of keys, of all heads; read with `persistent`
        # with `varlen` (cu_seqlens_q, cu_seqlens_k, seqused_k, whether that counts); else ()
        lengths,
    ):
        """With `varlen`, q, k, v and dout are what `ragged_load` and dk and dv what `ragged` makes of them, with modes
        of rows for the batch; what has slots has a batch of one; `order` is that of the slots of key tiles.
        """
        cfg = self.cfg
        cta, _, _ = cute.arch.block_idx()
        if const_expr(cfg.softcap):
            # with the argument ptxas spills 8 bytes at head dimension 128 under a causal mask
            group = m_q.shape[2] // m_k.shape[2]
        more = (
            ((atom_q, m_q), (atom_k, m_k), (atom_v, m_v), (atom_do, m_do)),
            ((atom_dk, m_dk), (atom_dv, m_dv)),
            (layout_q, layout_k, layout_v, layout_do, layout_ds),
            (m_lse2, m_d_rows, m_dq_sum, slopes, m_turns),
            (softmax_scale, score_scale_log2, softcap_factor, window_left, window_right),
        )
        if const_expr(cfg.persistent):
            self.work_by_count(order, tiles, group, ahead, *more)
        else:
            n_block, head_k, batch = [
                cute.arch.make_warp_uniform(x) for x in key_block_coord(cta, order, cfg)
            ]
            if const_expr(cfg.varlen):
                place, stored = key_tile(n_block, head_k, cfg.tile_n, lengths)
                if stored > 0:  # the same in all threads
                    self.work(place, stored, group, ahead, *more)
            else:
                place = (n_block, head_k, batch, Int32(0), m_q.shape[0], Int32(0), m_k.shape[0])
                self.work(place, Int32(0), group, ahead, *more)

    @cute.jit
    def work(self, place, stored: Int32, group: Int32, ahead: Int32, loads, stores, layouts, rows, scalars):
        """A CTA's key tile.

        place   (key tile of the sequence, head of K, sequence, first row in q, seqlen_q, first key in k, seqlen_k), of
                which the first row and key are 0 without `varlen`
        stored  see `varlen.key_tile`; read with `varlen`
        group   query heads of a key head
        ahead   see `clear_ahead`
        loads   (copy atom, tensor) of Q, K, V, dO; stores likewise of dK, dV
        """
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.qk_columns, cfg.v_columns
        (atom_q, m_q), (atom_k, m_k), (atom_v, m_v), (atom_do, m_do) = loads
        m_lse2, m_d_rows, m_dq_sum, slopes, m_turns = rows
        softmax_scale, score_scale_log2, softcap_factor, window_left, window_right = scalars
        n_block, head_k, batch, row0, seqlen_q, key0, seqlen_k = place
        tid, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        window = (window_left, window_right)
        queries = seqlen_q
        entry, slot = batch, Int32(0)  # of what has slots: entry of the batch, first slot of the sequence
        if const_expr(cfg.varlen):
            # a tile of keys that do not count is seen by none
            queries = seqlen_q if n_block * tile_n < seqlen_k else Int32(0)
            entry, slot = Int32(0), first_slot(row0, batch, slot_shift(tile_m))
        blocks = [
            cute.arch.make_warp_uniform(x) for x in query_blocks(n_block, queries, seqlen_k, window, cfg)
        ]

        if warp_idx == 4 * cfg.consumer_warpgroups:
            for atom, _ in (*loads, *stores):
                cpasync.prefetch_descriptor(atom)

        storage, tiles, s_ds, s_dq, s_rows, pipes = self.memory(layouts)
        s_q, s_k, s_v, s_do = tiles
        if const_expr(cfg.varlen):
            s_place = storage.place.get_tensor(cute.make_layout(5))
            if tid == 0:
                for i in cutlass.range_constexpr(4):
                    s_place[i] = blocks[i]
                s_place[4] = key0  # for the end: over the loop there is no register to keep it in
        pl.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pl.pipeline_init_wait(cluster_shape_mn=(1, 1))  # all threads: mbarriers and s_place are written

        if warpgroup == cfg.consumer_warpgroups:
            cute.arch.setmaxregister_decrease(cfg.producer_regs)
            if warp_idx == 4 * cfg.consumer_warpgroups:
                of_keys, of_queries = (key0, seqlen_k), (row0, seqlen_q)
                first_q, first_do = storage.bar_q.data_ptr(), storage.bar_do.data_ptr()
                state_q = pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.q_stages)
                state_do = pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.do_stages)
                if blocks[0] < blocks[3]:  # else nobody would wait for K and V
                    # The first stages of Q and dO are full when K and V are there, too: their barriers expect these
                    # bytes beside those of `load`, whose arrival is still to come, so that no phase can end before.
                    with cute.arch.elect_one():  # the lane that arrives in `load`
                        cute.arch.mbarrier_expect_tx(first_q, tile_n * d * 2)
                        cute.arch.mbarrier_expect_tx(first_do, tile_n * d_v * 2)
                    tk_s, tk_g = self.boxes(atom_k, m_k, head_k, batch, s_k, (tile_n, d))
                    tv_s, tv_g = self.boxes(atom_v, m_v, head_k, batch, s_v, (tile_n, d_v))
                    cute.copy(atom_k, self.box(tk_g, n_block, tile_n, of_keys), tk_s, tma_bar_ptr=first_q)
                    cute.copy(atom_v, self.box(tv_g, n_block, tile_n, of_keys), tv_s, tma_bar_ptr=first_do)
                for h in cutlass.range(group, unroll=1):
                    head = head_k * group + h
                    tq_s, tq_g = self.boxes(atom_q, m_q, head, batch, s_q, (tile_m, d))
                    tdo_s, tdo_g = self.boxes(atom_do, m_do, head, batch, s_do, (tile_m, d_v))
                    lse2, d_rows = [
                        self.from_slot(x[entry, head, None], slot * tile_m) for x in (m_lse2, m_d_rows)
                    ]
                    for m in cutlass.range(blocks[0], blocks[3], unroll=1):
                        state_q = self.load(
                            m, (atom_q, tq_s, tq_g), (s_rows[0], lse2), of_queries, pipes[0], state_q
                        )
                        state_do = self.load(
                            m, (atom_do, tdo_s, tdo_g), (s_rows[1], d_rows), of_queries, pipes[1], state_do
                        )
            if const_expr(not cfg.dq_direct):
                part = warp_idx - 4 * cfg.consumer_warpgroups - 1
                if part >= 0 and part < cfg.consumer_warpgroups:
                    if const_expr(cfg.clears_ahead):
                        self.await_cleared((n_block, head_k, batch), group, ahead, m_k, m_turns)
                    for h in cutlass.range(group, unroll=1):
                        head = head_k * group + h
                        self.mainloop.send(
                            s_dq,
                            (Int32(0), seqlen_k, seqlen_k - seqlen_q, *window, n_block),
                            self.from_slot(m_dq_sum[entry, head, None, None], slot),
                            self.from_slot(m_turns[entry, head, None, None], slot),
                            blocks,
                            part,
                        )
            if const_expr(cfg.clears_ahead):
                if warp_idx == 4 * cfg.consumer_warpgroups + 3:
                    self.clear_ahead((n_block, head_k, batch), group, ahead, m_k, m_dq_sum, m_turns)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_regs)
            if const_expr(cfg.varlen):
                # ptxas keeps minima and maxima in registers of each thread, where there is none left, and what was
                # loaded in uniform ones
                blocks = [cute.arch.make_warp_uniform(s_place[i]) for i in range(4)]
            frags = self.mainloop.fragments(s_q, s_k, s_v, s_do, s_ds, warpgroup)
            dk, dv = self.mainloop.new_gradients()
            states = (
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.q_stages),
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.do_stages),
            )
            warp_keys = tid % 128 // 32 * 16 if const_expr(cfg.shared_keys) else tid // 32 * 16
            first_key = n_block * tile_n + warp_keys + tid % 32 // 4  # of the thread's first row of S^T
            limits = (first_key, seqlen_k, seqlen_k - seqlen_q, *window, n_block)
            for h in cutlass.range(group, unroll=1):
                head = head_k * group + h
                slope = Float32(0.0)
                if const_expr(cfg.alibi):
                    slope = slopes[batch, head]
                states = self.mainloop.consume(
                    frags,
                    (*s_rows, s_ds, s_dq),
                    (score_scale_log2, softcap_factor, slope),
                    limits,
                    self.from_slot(m_dq_sum[entry, head, None, None], slot),
                    self.from_slot(m_turns[entry, head, None, None], slot),
                    (dk, dv),
                    pipes,
                    states,
                    blocks,
                )
            if const_expr(cfg.varlen):
                place = (*place[:5], cute.arch.make_warp_uniform(s_place[4]), seqlen_k)
            self.epilogue((dk, dv), softmax_scale, (s_k, s_v), stores, place, stored)

    @cute.jit
    def work_by_count(
        self, order, tiles: Int32, group: Int32, ahead: Int32, loads, stores, layouts, rows, scalars
    ):
        """With `persistent`: a CTA's key tiles, given out by a count.

        So the tiles before one belong to CTAs that run, on which `await_cleared` relies, however many CTAs find room.
        The producer looks for the next tile when it has issued all loads of one, and tells the other warps by a ring
        of places. The rings of Q and dO go on from tile to tile; K and V have one stage, given back in the last step.

        tiles: of keys, of all heads. Other arguments see `work`.
        """
        cfg = self.cfg
        tile_n, d = cfg.tile_n, cfg.qk_columns
        (_, m_q), (_, m_k), _, _ = loads
        _, _, m_dq_sum, slopes, m_turns = rows
        softmax_scale, score_scale_log2, softcap_factor, window_left, window_right = scalars
        seqlen_q, seqlen_k = m_q.shape[0], m_k.shape[0]
        window = (window_left, window_right)
        tid, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        if warp_idx == 4 * cfg.consumer_warpgroups:
            for atom, _ in (*loads, *stores):
                cpasync.prefetch_descriptor(atom)

        storage, in_smem, s_ds, s_dq, s_rows, pipes = self.memory(layouts)
        s_q, s_k, s_v, s_do = in_smem
        places = storage.places.get_tensor(cute.make_layout((PLACE, STAGES)))
        # warps that read places: consumers, senders, and the one that clears
        ring = place_ring(storage.bar_places.data_ptr(), 5 * cfg.consumer_warpgroups + 1)
        # K and V: "empty" alone, at which consumers arrive and the producer waits; "full" are the barriers of Q and dO
        keys = pl.PipelineAsync.create(
            num_stages=1,
            producer_group=pl.CooperativeGroup(pl.Agent.Thread),
            consumer_group=pl.CooperativeGroup(
                pl.Agent.Thread, (128 if cfg.early_keys else 4) * cfg.consumer_warpgroups
            ),
            barrier_storage=storage.bar_keys.data_ptr(),
            defer_sync=True,
        )
        pl.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pl.pipeline_init_wait(cluster_shape_mn=(1, 1))  # all threads: mbarriers are written
        slot = pl.make_pipeline_state(pl.PipelineUserType.Consumer, STAGES)

        if warpgroup == cfg.consumer_warpgroups:
            cute.arch.setmaxregister_decrease(cfg.producer_regs)
            if warp_idx == 4 * cfg.consumer_warpgroups:
                counter = m_turns[0, 0, 0, None]
                counter = cute.make_tensor(counter.iterator + 1, cute.make_layout(1))
                states = (
                    pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.q_stages),
                    pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.do_stages),
                    pl.make_pipeline_state(pl.PipelineUserType.Producer, 1),
                )
                put = pl.make_pipeline_state(pl.PipelineUserType.Producer, STAGES)
                tile = cute.arch.shuffle_sync(take_unit(counter), 0)
                while tile < tiles:
                    n_block, head_k, batch = [
                        cute.arch.make_warp_uniform(x) for x in key_block_coord(tile, order, cfg)
                    ]
                    blocks = [
                        cute.arch.make_warp_uniform(x)
                        for x in query_blocks(n_block, seqlen_q, seqlen_k, window, cfg)
                    ]
                    put_place((n_block, head_k, batch, *blocks), places, ring, put)
                    put.advance()
                    states = self.load_tile(
                        (n_block, head_k, batch),
                        blocks,
                        group,
                        loads,
                        in_smem,
                        rows,
                        s_rows,
                        pipes,
                        keys,
                        states,
                    )
                    tile = cute.arch.shuffle_sync(take_unit(counter), 0)
                end = (Int32(END), *[Int32(0)] * 6)
                put_place(end, places, ring, put)
            part = warp_idx - 4 * cfg.consumer_warpgroups - 1
            if part >= 0 and part < cfg.consumer_warpgroups:
                at = self.take_place(places, ring, slot)
                while at[0] != END:
                    n_block, head_k, batch = at[:3]
                    self.await_cleared((n_block, head_k, batch), group, ahead, m_k, m_turns)
                    for h in cutlass.range(group, unroll=1):
                        head = head_k * group + h
                        self.mainloop.send(
                            s_dq,
                            (Int32(0), seqlen_k, seqlen_k - seqlen_q, *window, n_block),
                            m_dq_sum[batch, head, None, None],
                            m_turns[batch, head, None, None],
                            at[3:7],
                            part,
                        )
                    slot.advance()
                    at = self.take_place(places, ring, slot)
            if warp_idx == 4 * cfg.consumer_warpgroups + 3:
                at = self.take_place(places, ring, slot)
                while at[0] != END:
                    self.clear_ahead((at[0], at[1], at[2]), group, ahead, m_k, m_dq_sum, m_turns)
                    slot.advance()
                    at = self.take_place(places, ring, slot)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_regs)
            frags = self.mainloop.fragments(s_q, s_k, s_v, s_do, s_ds, warpgroup)
            states = (
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.q_stages),
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.do_stages),
            )
            state_keys = pl.make_pipeline_state(pl.PipelineUserType.Consumer, 1)
            _, layout_k, layout_v, _, _ = layouts
            out = storage.out.data_ptr()
            behind = tile_n * d if const_expr(cfg.out_stages == 2) else 0
            s_dk = cute.make_tensor(cute.recast_ptr(out, layout_k.inner), layout_k.outer)
            s_dv = cute.make_tensor(cute.recast_ptr(out + behind, layout_v.inner), layout_v.outer)
            at = self.take_place(places, ring, slot)
            while at[0] != END:
                n_block, head_k, batch = at[:3]
                blocks = at[3:7]
                dk, dv = self.mainloop.new_gradients()
                first_key = (
                    n_block * tile_n + tid // 32 * 16 + tid % 32 // 4
                )  # of the thread's first row of S^T
                limits = (first_key, seqlen_k, seqlen_k - seqlen_q, *window, n_block)
                for h in cutlass.range(group, unroll=1):
                    head = head_k * group + h
                    slope = Float32(0.0)
                    if const_expr(cfg.alibi):
                        slope = slopes[batch, head]
                    states = self.mainloop.consume(
                        frags,
                        (*s_rows, s_ds, s_dq),
                        (score_scale_log2, softcap_factor, slope),
                        limits,
                        m_dq_sum[batch, head, None, None],
                        m_turns[batch, head, None, None],
                        (dk, dv),
                        pipes,
                        states,
                        blocks,
                        (keys, state_keys, blocks[3] - 1 if h == group - 1 else Int32(-1))
                        if const_expr(cfg.early_keys)
                        else None,
                    )
                if blocks[0] < blocks[3]:  # else no K and V came
                    if const_expr(not cfg.early_keys):
                        with cute.arch.elect_one():
                            keys.consumer_release(state_keys)  # each warp: no product reads K and V any more
                    state_keys.advance()
                place = (n_block, head_k, batch, Int32(0), seqlen_q, Int32(0), seqlen_k)
                self.epilogue((dk, dv), softmax_scale, (s_dk, s_dv), stores, place, Int32(0))
                slot.advance()
                at = self.take_place(places, ring, slot)
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def load_tile(self, tile, blocks, group: Int32, loads, in_smem, rows, s_rows, pipes, keys, states):
        """Issue all loads of a key tile, (key tile, head of K, batch), with `persistent`; by one whole warp. keys: the
        ring of K and V. Returns the states of the rings of Q, dO and keys."""
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.qk_columns, cfg.v_columns
        (atom_q, m_q), (atom_k, m_k), (atom_v, m_v), (atom_do, m_do) = loads
        s_q, s_k, s_v, s_do = in_smem
        n_block, head_k, batch = tile
        state_q, state_do, state_keys = states
        queries = (Int32(0), m_q.shape[0])
        tk_s, tk_g = self.boxes(atom_k, m_k, head_k, batch, s_k, (tile_n, d))
        tv_s, tv_g = self.boxes(atom_v, m_v, head_k, batch, s_v, (tile_n, d_v))
        if blocks[0] < blocks[3]:  # else nobody reads K and V
            # to L2, while consumers still read those of the tile before
            cute.prefetch(atom_k, tk_g[None, n_block])
            cute.prefetch(atom_v, tv_g[None, n_block])
        for h in cutlass.range(group, unroll=1):
            head = head_k * group + h
            tq_s, tq_g = self.boxes(atom_q, m_q, head, batch, s_q, (tile_m, d))
            tdo_s, tdo_g = self.boxes(atom_do, m_do, head, batch, s_do, (tile_m, d_v))
            lse2, d_rows = rows[0][batch, head, None], rows[1][batch, head, None]
            for m in cutlass.range(blocks[0], blocks[3], unroll=1):
                first = (h == 0) & (m == blocks[0])
                # the first stages of Q and dO are full when K and V are there, too
                of_k = Int32(tile_n * d * 2) if first else Int32(0)
                of_v = Int32(tile_n * d_v * 2) if first else Int32(0)
                full_q, full_do = (
                    pipes[0].producer_get_barrier(state_q),
                    pipes[1].producer_get_barrier(state_do),
                )
                tile_q, tile_do = (atom_q, tq_s, tq_g), (atom_do, tdo_s, tdo_g)
                state_q = self.load(m, tile_q, (s_rows[0], lse2), queries, pipes[0], state_q, of_k)
                state_do = self.load(m, tile_do, (s_rows[1], d_rows), queries, pipes[1], state_do, of_v)
                if first:
                    keys.producer_acquire(state_keys)  # waits for all consumers: they read K and V no more
                    cute.copy(atom_k, tk_g[None, n_block], tk_s, tma_bar_ptr=full_q)
                    cute.copy(atom_v, tv_g[None, n_block], tv_s, tma_bar_ptr=full_do)
                    state_keys.advance()
        return state_q, state_do, state_keys

    @cute.jit
    def take_place(self, places: cute.Tensor, ring, slot):
        """(key tile or END, head of K, batch, four ends of `query_blocks`) of the next tile, by one whole warp."""
        ring.consumer_wait(slot)  # the producer has written the place
        words = cute.make_rmem_tensor(PLACE, Int32)
        words.fill(0)
        # By the lane that gives the place back, so that no other's reads have to come before that.
        if cute.arch.lane_idx() == 0:
            cute.autovec_copy(places[None, slot.index], words)
            ring.consumer_release(slot)
        return [cute.arch.make_warp_uniform(cute.arch.shuffle_sync(words[i], 0)) for i in range(7)]

    def memory(self, layouts):
        """Shared memory: the storage; Q (tile_m, d, q_stages), K (tile_n, d), V (tile_n, d_v), dO (tile_m, d_v,
        do_stages); dS (tile_m, tile_n, ds_stages); dQ; rows of lse2 and D; the rings of Q and dO."""
        cfg = self.cfg
        tile_m, d, d_v = cfg.tile_m, cfg.qk_columns, cfg.v_columns
        layout_q, layout_k, layout_v, layout_do, layout_ds = layouts
        storage = SmemAllocator().allocate(self.storage)
        tiles = tuple(
            x.get_tensor(layout.outer, swizzle=layout.inner)
            for x, layout in (
                (storage.q, layout_q),
                (storage.k, layout_k),
                (storage.v, layout_v),
                (storage.do, layout_do),
            )
        )
        s_ds = storage.ds.get_tensor(layout_ds.outer, swizzle=layout_ds.inner)
        s_dq = storage.dq.get_tensor(cute.make_layout(4 if cfg.dq_direct else tile_m * d))
        s_lse2 = storage.lse2.get_tensor(cute.make_layout((tile_m, cfg.q_stages)))
        s_d_rows = storage.d_rows.get_tensor(cute.make_layout((tile_m, cfg.do_stages)))
        pipes = (
            self.ring(storage.bar_q.data_ptr(), cfg.q_stages, tile_m * d * 2 + tile_m * 4),
            self.ring(storage.bar_do.data_ptr(), cfg.do_stages, tile_m * d_v * 2 + tile_m * 4),
        )
        return storage, tiles, s_ds, s_dq, (s_lse2, s_d_rows), pipes

    @cute.jit
    def clear_ahead(self, tile, group: Int32, ahead: Int32, m_k, m_dq_sum: cute.Tensor, m_turns: cute.Tensor):
        """Clear this CTA's share of the sum of dQ of the group of query heads `ahead` heads of K on, if there is one.

        CTAs start in the order of heads, so those of that group start when these have, and memory has time for zeros
        while the tensor cores work. Called by one whole warp. tile is (key tile, head of K, batch).
        """
        n_block, head_k, batch = tile
        heads_k, batches = m_k.shape[2], m_k.shape[3]
        n_blocks = cute.ceil_div(m_k.shape[0], self.cfg.tile_n)
        target = batch * heads_k + head_k + ahead
        if target < heads_k * batches:
            size = m_dq_sum.shape[2] * (self.cfg.tile_m * self.cfg.qk_columns // 4)  # vectors of a query head
            share = cute.ceil_div(size * group, n_blocks)
            end = cutlass.min(share * (n_block + 1), size * group)
            first = m_dq_sum.iterator + Int64(target) * Int64(group) * Int64(size) * Int64(4)
            zeros = cute.make_rmem_tensor(4, Float32)
            zeros.fill(0.0)
            for i in cutlass.range(share * n_block + cute.arch.lane_idx(), end, 32, unroll=4):
                vector = aligned(first + Int64(i) * Int64(4), 16)
                cute.autovec_copy(zeros, cute.make_tensor(vector, cute.make_layout(4)))
            cute.arch.fence_proxy("async")  # each thread: its zeros, then what bulk reductions add
            cute.arch.sync_warp()  # all of them have written
            if cute.arch.lane_idx() == 0:
                end_turn((self.cleared(target, group, heads_k, m_turns), n_blocks))

    @cute.jit
    def await_cleared(self, tile, group: Int32, ahead: Int32, m_k, m_turns: cute.Tensor):
        """Wait until all shares of the sum of dQ of this CTA's query heads are cleared, by CTAs that started before
        it (`persistent`: took their tile before) and wait for nobody in front of that. Called by one whole warp, whose
        first thread adds. tile: see above.
        """
        _, head_k, batch = tile
        head = batch * m_k.shape[2] + head_k
        if head >= ahead and cute.arch.lane_idx() == 0:
            n_blocks = cute.ceil_div(m_k.shape[0], self.cfg.tile_n)
            await_turn((self.cleared(head, group, m_k.shape[2], m_turns), n_blocks))
            cute.arch.fence_proxy("async")  # the zeros, then what this CTA adds

    def cleared(self, head: Int32, group: Int32, heads_k: Int32, m_turns: cute.Tensor) -> Int64:
        """Address of the count of cleared shares of head of K number `head` of all batches."""
        counts = m_turns[head // heads_k, head % heads_k * group, 0, None]
        return counts.iterator.toint()

    def from_slot(self, x: cute.Tensor, first: Int32) -> cute.Tensor:
        """x from `first` of its first mode on; without `varlen` as it is."""
        if const_expr(not self.cfg.varlen):
            return x
        return cute.domain_offset((first,) if cute.rank(x) == 1 else (first, 0), x)

    def boxes(self, atom: cute.CopyAtom, x: cute.Tensor, head: Int32, batch: Int32, s: cute.Tensor, tile):
        """Shared and global partitions of a head of an operand, for loads of `tile`; see `box`."""
        if const_expr(self.cfg.varlen):
            g = steps_of(cute.local_tile(x[None, None, head, 0, 0], tile, (0, 0)), x, 0)
        else:
            g = cute.local_tile(x[None, None, head, batch], tile, (None, 0))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
        )

    def box(self, g: cute.Tensor, n: Int32, size: int, rows) -> cute.Tensor:
        """Tile n of a global partition, of `size` rows; rows is (first row, rows) of the sequence, whose end the load
        passes with zeros."""
        if const_expr(self.cfg.varlen):
            return g[(None, *ragged_coord(*rows, n * size, size, FAR), FAR)]
        return g[None, n]

    def ring(self, barriers, stages: int, tx_bytes: int):
        """A TMA ring: one producer thread arrives with the byte count, all threads of the consumers release."""
        return pl.PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=pl.CooperativeGroup(pl.Agent.Thread),
            consumer_group=pl.CooperativeGroup(pl.Agent.Thread, 128 * self.cfg.consumer_warpgroups),
            tx_count=tx_bytes,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,  # one fence and one barrier for all rings, in the kernel
        )

    @cute.jit
    def load(self, m: Int32, tile, row, queries, pipe, state, more=None):
        """Queries m * tile_m and on of Q with lse2, or of dO with D, into the stage of `state`; returns the next one.

        tile is (copy atom, shared partition, global partition), row (shared (tile_m, stages), global (rows,)), queries
        see `box`; more: bytes that another load brings to the same barrier. Called by one whole warp.
        """
        atom, s, g = tile
        s_row, g_row = row
        tile_m = self.cfg.tile_m
        pipe.producer_acquire(state)  # waits until all consumers have released the stage
        barrier = pipe.producer_get_barrier(state)
        if const_expr(more is not None):
            with (
                cute.arch.elect_one()
            ):  # the phase cannot have ended: the bytes of this load are still to come
                cute.arch.mbarrier_expect_tx(barrier, more)
        cute.copy(atom, self.box(g, m, tile_m, queries), s[None, state.index], tma_bar_ptr=barrier)
        with cute.arch.elect_one():
            bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=tile_m * 32)
            source = cute.local_tile(g_row, (tile_m,), (m,))
            source = cute.make_tensor(aligned(source.iterator, 16), source.layout)
            cute.copy(bulk, source, s_row[None, state.index], mbar_ptr=barrier)
        state.advance()
        return state

    @cute.jit
    def epilogue(self, gradients, softmax_scale: Float32, shared, stores, place, stored: Int32):
        """dK and dV, registers -> shared memory, in place of K and V -> TMA store, each warpgroup its accumulators.

        TMA drops what lies past the keys of the sequence and head_dim. stores, place and stored see `work`.
        """
        cfg = self.cfg
        tid, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = warp_idx // 4
        if const_expr(cfg.persistent):
            # the warpgroup: its first warp's stores of the tile before have read what is written next
            if warp_idx % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=BwdBarrier.OWN + warpgroup, number_of_threads=128)
        else:
            # all consumers: nobody reads K and V any more
            cute.arch.barrier(barrier_id=BwdBarrier.EXCHANGE, number_of_threads=128 * cfg.consumer_warpgroups)
        copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        # The warpgroup's tile among those of (64, part) of the CTA.
        own = (0, warpgroup) if const_expr(cfg.shared_keys) else (warpgroup, 0)
        for i in cutlass.range_constexpr(2):
            acc, s, part = gradients[i], shared[i], (cfg.dk_part, cfg.dv_part)[i]
            if const_expr(i == 0):
                for j in cutlass.range_constexpr(cute.size(acc)):
                    acc[j] = acc[j] * softmax_scale
            narrow = cute.make_rmem_tensor_like(acc, self.dtype)
            narrow.store(acc.load().to(self.dtype))
            mma = self.mainloop.one_warpgroup(part)
            tiled_copy = cute.make_tiled_copy_C(copy_atom, mma).get_slice(tid % 128)
            staged = cute.local_tile(s, (64, part), own)
            cute.copy(copy_atom, tiled_copy.retile(narrow), tiled_copy.partition_D(staged))
            if const_expr(cfg.out_stages == 1):
                self.store(i, own, shared, stores, place, stored)
                if const_expr(i == 0):
                    # the warpgroup: dK has left, and dV comes to its place
                    if warp_idx % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.barrier(barrier_id=BwdBarrier.OWN + warpgroup, number_of_threads=128)
        if const_expr(cfg.out_stages != 1):
            self.store(None, own, shared, stores, place, stored)
        if const_expr(not cfg.persistent):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def store(self, which: cutlass.Constexpr, own, shared, stores, place, stored: Int32):
        """TMA stores of the warpgroup's part of dK (`which` is 0), of dV (1) or of both (None), which it has written to
        shared memory; own is its tile there. Other arguments see `epilogue`."""
        cfg = self.cfg
        n_block, head_k, batch, _, _, key0, _ = place
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = warp_idx // 4
        block = n_block if const_expr(cfg.shared_keys) else n_block * cfg.consumer_warpgroups + warpgroup
        boxes = (swizzle_columns(cfg.k_part, 2), swizzle_columns(cfg.dv_part, 2))
        cute.arch.fence_proxy("async.shared", space="cta")  # the TMA store reads through the async proxy
        # the warpgroup: all of it has written, and its first warp may store
        cute.arch.barrier(barrier_id=BwdBarrier.OWN + warpgroup, number_of_threads=128)
        if warp_idx % 4 == 0:
            for i in cutlass.range_constexpr(2):
                if const_expr(which is None or i == which):
                    atom, target = stores[i]
                    if const_expr(cfg.varlen):
                        behind = block * 64 - n_block * cfg.tile_n  # keys of the tile before this warpgroup's
                        offset, last = ragged_coord(key0 + n_block * cfg.tile_n, stored, behind, 64, 64)
                        keys, number = (
                            cute.domain_offset((offset, 0), target[None, None, head_k, last]),
                            Int32(0),
                        )
                    else:
                        keys, number = target[None, None, head_k, batch], block
                    count = (cfg.dk_part, cfg.dv_part)[i] // boxes[i]
                    for c in cutlass.range_constexpr(count):
                        column = own[1] * count + c
                        s_box = cute.local_tile(shared[i], (64, boxes[i]), (own[0], column))
                        g_box = cute.local_tile(keys, (64, boxes[i]), (number, column))
                        t_s, t_g = cpasync.tma_partition(
                            atom,
                            0,
                            cute.make_layout(1),
                            cute.group_modes(s_box, 0, 2),
                            cute.group_modes(g_box, 0, 2),
                        )
                        cute.copy(atom, t_s, t_g)
            cute.arch.cp_async_bulk_commit_group()


class Bwd16bitSm90:
    """One 16-bit configuration: three launches on one stream. Call it inside `cute.compile` with (fake) tensors."""

    def __init__(self, cfg: Bwd16Config):
        self.main = Bwd16Main(cfg)
        self.before = BwdPrologue(cfg)
        self.behind = BwdEpilogue(cfg)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        dout: cute.Tensor,
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) float32, natural log
        dlse: cute.Tensor,  # likewise, may be expanded
        slopes: cute.Tensor,
        dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        dk: cute.Tensor,
        dv: cute.Tensor,
        lse2: cute.Tensor,  # these three: workspace, see above
        d_rows: cute.Tensor,
        dq_sum: cute.Tensor,
        turns: cute.Tensor,
        softmax_scale: Float32,
        score_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        turn: Int32,
        ctas: Int32,
        stream,
    ):
        self.run(
            q, k, v, out, dout, lse, dlse, slopes, dq, dk, dv, lse2, d_rows, dq_sum, turns,
            softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, ctas, stream,
        )  # fmt: skip

    def run(
        self, q, k, v, out, dout, lse, dlse, slopes, dq, dk, dv, lse2, d_rows, dq_sum, turns,
        softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, ctas, stream, lengths=(),
    ):  # fmt: skip
        """The three launches. lengths: see `Bwd16Main.kernel`."""
        ahead, group = heads_ahead(turn, q, k), q.shape[2] // k.shape[2]
        self.before.launch(
            out,
            dout,
            lse,
            dlse,
            lse2,
            d_rows,
            dq_sum,
            turns,
            ahead * group,
            stream,
            (dq, dk, dv),
            lengths[:2],
        )
        self.main.launch(
            q, k, v, dout, lse2, d_rows, dq_sum, dk, dv, slopes, turns,
            softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, ahead, ctas, stream,
            lengths,
        )  # fmt: skip
        self.behind.launch(dq_sum, dq, softmax_scale, stream, lengths[:1])


class Bwd16bitVarlenSm90(Bwd16bitSm90):
    """Likewise for sequences of unlike length."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (total_q, heads_q, head_dim)
        k: cute.Tensor,  # (total_k, heads_k, head_dim)
        v: cute.Tensor,
        out: cute.Tensor,  # (total_q, heads_q, head_dim_v)
        dout: cute.Tensor,
        lse: cute.Tensor,  # (heads_q, total_q) float32, natural log
        dlse: cute.Tensor,  # likewise, may be expanded
        slopes: cute.Tensor,  # (batch, heads_q)
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lse2: cute.Tensor,  # these two (heads_q, slots * tile_m)
        d_rows: cute.Tensor,
        dq_sum: cute.Tensor,  # (heads_q, slots, tile_m * qk_columns)
        turns: cute.Tensor,  # (heads_q, slots, warpgroups)
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,  # (batch,), or anything where has_used is 0
        softmax_scale: Float32,
        score_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        has_used: Int32,
        turn: Int32,
        stream,
    ):
        rows = [one_batch(x) for x in (q, k, v, out, dout, lse, dlse)]
        work = [one_batch(x) for x in (dq, dk, dv, lse2, d_rows, dq_sum, turns)]
        self.run(
            *rows, slopes, *work,
            softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, Int32(0), stream,
            (cu_seqlens_q, cu_seqlens_k, seqused_k, has_used),
        )  # fmt: skip
