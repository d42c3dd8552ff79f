"""Main kernel of the 16-bit backward on Hopper: set-up, launch, roles.

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
             `ahead` heads of K: each CTA clears a share of that of the head as many heads on, see
             `BwdProducer.clear_ahead`
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
produces: its first warp issues the TMA loads, and one for each consumer warpgroup sends its part of dQ, or, where the
consumers add to dQ themselves (`dq_direct`) in a fixed order, keeps its turns; another one may clear sums. K and V stay
in shared memory, Q and dO pass through rings with their rows of lse2 and D. What the producer does, warp by warp, is in
bwd_producer.py, the main loop of the consumers in bwd_mainloop.py, their end in
bwd_store.py, and the entries that are compiled, with the passes before and behind, in bwd_16bit.py.

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
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..common.scheduler import key_block_coord, key_block_order, query_blocks
from ..common.varlen import (
    END,
    PLACE,
    STAGES,
    first_slot,
    key_tile,
    place_ring,
    ragged,
    ragged_load,
    slot_shift,
    slots_of,
    take_place,
)
from ..config import Bwd16Config, swizzle_columns
from .bwd_mainloop import BwdMainloop
from .bwd_producer import BwdProducer, from_slot
from .bwd_store import BwdStore
from .operands import ELEMENTS, row_major_atom


def rows_first(x: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, dim) -> (seqlen, dim, heads, batch)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))


class Bwd16Main:
    """One configuration of the main kernel."""

    def __init__(self, cfg: Bwd16Config):
        cfg.check()
        self.cfg = cfg
        self.dtype = ELEMENTS[cfg.dtype]
        self.mainloop = BwdMainloop(cfg)
        self.producer = BwdProducer(cfg, self.mainloop)
        self.out = BwdStore(cfg, self.mainloop)

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

        place, group, loads, rows  see `BwdProducer`; stores: (copy atom, tensor) of dK, dV
        stored                     see `varlen.key_tile`; read with `varlen`
        ahead                      see `BwdProducer.clear_ahead`
        layouts                    of Q, K, V, dO, dS in shared memory
        scalars                    softmax_scale to window_right, see `launch`
        """
        cfg = self.cfg
        _, (_, m_k), _, _ = loads
        _, _, m_dq_sum, _, m_turns = rows
        softmax_scale, _, _, *window = scalars
        n_block, head_k, batch, row0, seqlen_q, key0, seqlen_k = place
        tid, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        queries = seqlen_q
        slots = (batch, Int32(0))  # of what has slots: entry of the batch, first slot of the sequence
        if const_expr(cfg.varlen):
            # a tile of keys that do not count is seen by none
            queries = seqlen_q if n_block * cfg.tile_n < seqlen_k else Int32(0)
            slots = (Int32(0), first_slot(row0, batch, slot_shift(cfg.tile_m)))
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
                first_full = (storage.bar_q.data_ptr(), storage.bar_do.data_ptr())
                self.producer.load_tile(
                    place, slots, blocks, group, loads, tiles, rows, s_rows, pipes, first_full
                )
            if const_expr(cfg.deterministic or not cfg.dq_direct):
                part = warp_idx - 4 * cfg.consumer_warpgroups - 1
                if part >= 0 and part < cfg.consumer_warpgroups:
                    self.producer.send_heads(
                        place, slots, blocks, group, ahead, m_k, rows, s_dq, window, part
                    )
            if const_expr(cfg.clears_ahead):
                if warp_idx == 4 * cfg.consumer_warpgroups + 3:
                    self.producer.clear_ahead((n_block, head_k, batch), group, ahead, m_k, m_dq_sum, m_turns)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_regs)
            if const_expr(cfg.varlen):
                # ptxas keeps minima and maxima in registers of each thread, where there is none left, and what was
                # loaded in uniform ones
                blocks = [cute.arch.make_warp_uniform(s_place[i]) for i in range(4)]
            frags = self.mainloop.fragments(s_q, s_k, s_v, s_do, s_ds, warpgroup)
            gradients = self.mainloop.new_gradients()
            states = (
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.q_stages),
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.do_stages),
            )
            more = (frags, (*s_rows, s_ds, s_dq), rows, scalars, pipes)
            self.consume_heads(place, slots, blocks, group, gradients, states, None, *more)
            if const_expr(cfg.varlen):
                place = (*place[:5], cute.arch.make_warp_uniform(s_place[4]), seqlen_k)
            self.out.epilogue(gradients, softmax_scale, (s_k, s_v), stores, place, stored)

    @cute.jit
    def work_by_count(
        self, order, count: Int32, group: Int32, ahead: Int32, loads, stores, layouts, rows, scalars
    ):
        """With `persistent`: a CTA's key tiles, given out by a count.

        So the tiles before one belong to CTAs that run, on which `BwdProducer.await_cleared` relies, however many CTAs
        find room. The producer looks for the next tile when it has issued all loads of one, and tells the other warps
        by a ring of places. The rings of Q and dO go on from tile to tile; K and V have one stage, given back in the
        last step.

        count: key tiles of all heads. Other arguments see `work`.
        """
        cfg = self.cfg
        (_, m_q), (_, m_k), _, _ = loads
        _, _, m_dq_sum, _, m_turns = rows
        softmax_scale, _, _, *window = scalars
        seqlen_q, seqlen_k = m_q.shape[0], m_k.shape[0]
        tid, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        if warp_idx == 4 * cfg.consumer_warpgroups:
            for atom, _ in (*loads, *stores):
                cpasync.prefetch_descriptor(atom)

        storage, tiles, s_ds, s_dq, s_rows, pipes = self.memory(layouts)
        s_q, s_k, s_v, s_do = tiles
        places = storage.places.get_tensor(cute.make_layout((PLACE, STAGES)))
        # warps that read places: consumers, senders, and the one that clears
        ring = place_ring(storage.bar_places.data_ptr(), 5 * cfg.consumer_warpgroups + 1)
        # K and V: "empty" alone, at which consumers arrive and the producer waits; "full" are the barriers of Q and dO
        arrivals = (128 if cfg.early_keys else 4) * cfg.consumer_warpgroups
        keys = pl.PipelineAsync.create(
            num_stages=1,
            producer_group=pl.CooperativeGroup(pl.Agent.Thread),
            consumer_group=pl.CooperativeGroup(pl.Agent.Thread, arrivals),
            barrier_storage=storage.bar_keys.data_ptr(),
            defer_sync=True,
        )
        pl.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pl.pipeline_init_wait(cluster_shape_mn=(1, 1))  # all threads: mbarriers are written
        slot = pl.make_pipeline_state(pl.PipelineUserType.Consumer, STAGES)

        if warpgroup == cfg.consumer_warpgroups:
            cute.arch.setmaxregister_decrease(cfg.producer_regs)
            if warp_idx == 4 * cfg.consumer_warpgroups:
                of_places, more = (places, ring), (loads, tiles, rows, s_rows, pipes, keys)
                self.producer.load_by_count(
                    order, count, of_places, (seqlen_q, seqlen_k), window, group, *more
                )
            part = warp_idx - 4 * cfg.consumer_warpgroups - 1
            if part >= 0 and part < cfg.consumer_warpgroups:
                at = take_place(places, ring, slot)
                while at[0] != END:
                    place = (*at[:3], Int32(0), seqlen_q, Int32(0), seqlen_k)
                    slots = (at[2], Int32(0))
                    self.producer.send_heads(
                        place, slots, at[3:7], group, ahead, m_k, rows, s_dq, window, part
                    )
                    slot.advance()
                    at = take_place(places, ring, slot)
            if warp_idx == 4 * cfg.consumer_warpgroups + 3:
                at = take_place(places, ring, slot)
                while at[0] != END:
                    self.producer.clear_ahead(at[:3], group, ahead, m_k, m_dq_sum, m_turns)
                    slot.advance()
                    at = take_place(places, ring, slot)
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
            behind = cfg.tile_n * cfg.qk_columns if const_expr(cfg.out_stages == 2) else 0
            s_dk = cute.make_tensor(cute.recast_ptr(out, layout_k.inner), layout_k.outer)
            s_dv = cute.make_tensor(cute.recast_ptr(out + behind, layout_v.inner), layout_v.outer)
            more = (frags, (*s_rows, s_ds, s_dq), rows, scalars, pipes)
            at = take_place(places, ring, slot)
            while at[0] != END:
                place = (*at[:3], Int32(0), seqlen_q, Int32(0), seqlen_k)
                slots, blocks = (at[2], Int32(0)), at[3:7]
                gradients = self.mainloop.new_gradients()
                end_keys = (keys, state_keys) if const_expr(cfg.early_keys) else None
                states = self.consume_heads(place, slots, blocks, group, gradients, states, end_keys, *more)
                if blocks[0] < blocks[3]:  # else no K and V came
                    if const_expr(not cfg.early_keys):
                        with cute.arch.elect_one():
                            keys.consumer_release(state_keys)  # each warp: no product reads K and V any more
                    state_keys.advance()
                self.out.epilogue(gradients, softmax_scale, (s_dk, s_dv), stores, place, Int32(0))
                slot.advance()
                at = take_place(places, ring, slot)
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def consume_heads(
        self,
        place,
        slots,
        blocks,
        group: Int32,
        gradients,
        states,
        end_keys,
        frags,
        shared,
        rows,
        scalars,
        pipes,
    ):
        """All query heads of a key tile, see `BwdMainloop.consume`. Returns the states of the rings of Q and dO.

        place, slots, blocks, group, rows and pipes see `BwdProducer`; gradients, states, frags and shared `consume`;
        scalars `work`. end_keys: None, or the ring of K and V, which are given back in the last step, and its state.
        """
        cfg = self.cfg
        _, _, m_dq_sum, slopes, m_turns = rows
        _, score_scale_log2, softcap_factor, *window = scalars
        n_block, head_k, batch, _, seqlen_q, _, seqlen_k = place
        entry, slot = slots
        tid, _, _ = cute.arch.thread_idx()
        warp_keys = tid % 128 // 32 * 16 if const_expr(cfg.shared_keys) else tid // 32 * 16
        first_key = n_block * cfg.tile_n + warp_keys + tid % 32 // 4  # of the thread's first row of S^T
        limits = (first_key, seqlen_k, seqlen_k - seqlen_q, *window, n_block)
        for h in cutlass.range(group, unroll=1):
            head = head_k * group + h
            slope = Float32(0.0)
            if const_expr(cfg.alibi):
                slope = slopes[batch, head]
            end = None
            if const_expr(end_keys is not None):
                end = (*end_keys, blocks[3] - 1 if h == group - 1 else Int32(-1))
            states = self.mainloop.consume(
                frags,
                shared,
                (score_scale_log2, softcap_factor, slope),
                limits,
                from_slot(m_dq_sum[entry, head, None, None], slot, cfg.varlen),
                from_slot(m_turns[entry, head, None, None], slot, cfg.varlen),
                gradients,
                pipes,
                states,
                blocks,
                end,
            )
        return states

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
