"""Forward attention on Hopper: set-up, launch and roles, for operands of 8 and of 16 bits.

    O = softmax(softmax_scale * Q K^T + mask) V,  lse = log sum exp of the scores, per (batch, head)

Tensors (the natural layouts of the caller; every stride is dynamic, the last one is 1):

    q        (batch, seqlen_q, heads_q, head_dim)   e4m3, int8, bf16 or fp16
    k        (batch, seqlen_k, heads_k, head_dim)   as q
    o        (batch, seqlen_q, heads_q, head_dim_v) bf16 or fp16
    lse      (batch, heads_q, seqlen_q)             float32
    slopes   (batch, heads_q)                       float32, of ALiBi; may be expanded, read only by its configurations
    sinks    (heads_q,)                             float32, likewise

and of 16 bits

    v        (batch, seqlen_k, heads_k, head_dim_v) as q

of 8 bits

    vt       (batch, heads_k, head_dim_v, >= seqlen_k) e4m3, keys permuted in groups of 16, zeros past seqlen_k
    q_scale  (batch, heads_q, seqlen_q)             float32, may be expanded (stride 0)
    k_scale  (batch, heads_k, ceil(seqlen_k / 64))  float32, last stride 1, rows readable to a multiple of 4
    v_scale  (batch, heads_k, ceil(seqlen_k / 256)) float32, last stride 1
    lse_add  (batch, heads_q, seqlen_q)             float32, times softmax_scale added to lse (K smoothing's share)

and of sequences of unlike length (`varlen`; the rows of all behind one another, see common/varlen.py), without a mode
for the batch in the others and lse (heads_q, rows)

    cu_seqlens_q, cu_seqlens_k  (batch + 1,) int32, where sequences begin and end in q and in k
    seqused_k                   (batch,) int32, keys that count of those a sequence has; may be absent
    counter                     (1,) int32, of the tiles that have been given out

In 8 bits V^T and the scales of K and V then have slots for blocks of keys, and there is no seqused_k.

A work tile is tile_m rows of one head; with pack_gqa, of one head of K: row r is query r // pack_gqa, head
r % pack_gqa of the group. At most one CTA an SM runs, and takes tiles in turn (common/scheduler.py, or by a counter,
common/varlen.py). Warpgroups
0 .. n-1 consume (64 rows each, most registers), the last one produces: its first warp issues the TMA loads, its second
says where a tile is and brings what it begins with (not with `varlen`, where the first says where), the others leave at
once. Loops, rings and timeline are in mainloop.py, numerics in policy_fp8.py and policy_16bit.py.

Shared memory: Q (tile_m, head_dim, q_stages) and K ring (tile_n, head_dim, kv_stages), where TMA fills columns from
head_dim to the next multiple of 32 with zeros; the ring of V, see the policies; O (tile_m, head_dim_v), from where TMA
stores it while the next tile begins. Where there is no room for O, it goes to memory from registers (`o_direct`).

Limits: head_dim and head_dim_v see config/; seqlen and work tiles up to 2^31 - 1; TMA wants 16-byte strides and
addresses.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from ..common import scores
from ..common.mask import ROW_STEP
from ..common.scheduler import key_blocks, rounds_of, split_blocks, unit_coord, unit_in_round
from ..common.varlen import (
    END,
    PLACE,
    STAGES,
    find_sequence,
    first_slot,
    place_ring,
    put_place,
    ragged,
    ragged_coord,
    ragged_load,
    steps_of,
    take_unit,
    unit_of_sequence,
)
from ..common.warp import quad_sum
from ..config import V_SCALE_GROUP, Fwd16Config, FwdConfig
from .mainloop import V_SCALE_SHIFT, Barrier, Mainloop
from .operands import ELEMENTS, heads_last, row_major_atom
from .policy_16bit import Policy16bit
from .policy_fp8 import Fp8Policy


class FwdSm90:
    """What is the same for every precision. A subclass has the entry, which brings tensors into one form."""

    def __init__(self, cfg: FwdConfig | Fwd16Config, policy: Fp8Policy | Policy16bit, mainloop: Mainloop):
        self.cfg = cfg
        self.policy = policy
        self.mainloop = mainloop
        self.out_type = ELEMENTS[cfg.out_dtype]
        # Places of tiles in shared memory. That of a tile is written when all consumers have begun the one before, and
        # some may still be at the end of the one before that; with `varlen` see common/varlen.py.

    # -- host -------------------------------------------------------------------------------------------------

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        v: cute.Tensor,  # (head_dim_v, keys, heads_k, batch)
        side,  # tuple of what else the policy reads
        o: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q)
        softmax_scale_log2: Float32,
        sms: Int32,  # CTAs at most
        turn: Int32,  # key heads whose tiles are mixed in the order of work, see common/scheduler.py
        stream,
        lengths=(),  # with `varlen`, see `kernel`; batch is 1 then, and `turn` in keys, see common/varlen.py
    ):
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.head_dim_padded, cfg.v_columns
        k = cute.make_tensor(k.iterator, cute.select(k.layout, [1, 3, 2, 0]))  # (s, d, h, b)
        q, o = self.packed(q), self.packed(o)  # (g, s, d, h, b)
        lse = heads_last(lse)
        m_units = cute.ceil_div(q.shape[1] * cfg.pack_gqa, tile_m * cfg.cluster)  # the last may have no rows
        units, seqlen_k = m_units * q.shape[3] * q.shape[4], k.shape[0]
        if cutlass.const_expr(cfg.varlen):
            # an upper bound: each sequence has one unit at most that is not full
            batch = lengths[0].shape[0] - 1
            units = (q.shape[1] * cfg.pack_gqa // tile_m + batch) * q.shape[3]
            units = units * lengths[6] if cutlass.const_expr(cfg.split_keys) else units
            rows = tile_m // cfg.pack_gqa
            o = o if cutlass.const_expr(cfg.o_direct) else ragged(o, 1, rows)
            k = ragged_load(k, 0)
            v = v if cutlass.const_expr(cfg.padded_v) else ragged_load(v, 1)
            self.reset(lengths[4]).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

        qk_type, v_type = self.policy.qk_type, self.policy.v_type
        atom_qk = row_major_atom(qk_type, d)
        layout_q = cute.tile_to_shape(atom_qk, (tile_m, d, cfg.q_stages), order=(0, 1, 2))
        layout_k = cute.tile_to_shape(atom_qk, (tile_n, d, cfg.kv_stages), order=(0, 1, 2))
        layout_v, layout_v_box = self.policy.v_layouts()
        atom_o = row_major_atom(self.out_type, cfg.o_box)
        layout_o = cute.tile_to_shape(atom_o, (tile_m, d_v), order=(0, 1))
        layout_o_box = cute.tile_to_shape(atom_o, (64, cfg.o_box), order=(0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q = cpasync.make_tiled_tma_atom(
            load, q, self.packed_rows(cute.select(layout_q, [0, 1]), tile_m, d), self.box(tile_m, d)
        )
        shared = load if cfg.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        tma_k = cpasync.make_tiled_tma_atom(
            shared, k, cute.select(layout_k, [0, 1]), (tile_n, d), num_multicast=cfg.cluster
        )
        tma_v = cpasync.make_tiled_tma_atom(
            shared, v, layout_v_box, (d_v, cfg.v_box), num_multicast=cfg.cluster
        )
        store_o, m_o = None, o
        if cutlass.const_expr(not cfg.o_direct):
            tma_o = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                o,
                self.packed_rows(layout_o_box, 64, cfg.o_box),
                self.box(64, cfg.o_box),
            )
            store_o, m_o = tma_o.atom, tma_o.tma_tensor

        @cute.struct
        class Storage:
            bar_q: cute.struct.MemRange[cutlass.Int64, 2 * cfg.q_stages]
            bar_k: cute.struct.MemRange[cutlass.Int64, 2 * cfg.kv_stages]
            bar_v: cute.struct.MemRange[cutlass.Int64, 2 * cfg.kv_stages]
            bar_place: cute.struct.MemRange[cutlass.Int64, 2 * (STAGES if cfg.varlen else 1)]
            places: cute.struct.Align[cute.struct.MemRange[Int32, PLACE * STAGES], 16]
            side: cute.struct.Align[cute.struct.MemRange[Float32, cfg.side_words], 16]
            q: cute.struct.Align[cute.struct.MemRange[qk_type, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[qk_type, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[v_type, cute.cosize(layout_v)], 1024]
            o: cute.struct.Align[
                cute.struct.MemRange[self.out_type, 0 if cfg.o_direct else cute.cosize(layout_o)], 1024
            ]

        self.storage = Storage
        self.kernel(
            tma_q.atom,
            tma_q.tma_tensor,
            tma_k.atom,
            tma_k.tma_tensor,
            tma_v.atom,
            tma_v.tma_tensor,
            store_o,
            m_o,
            layout_q,
            layout_k,
            layout_v,
            layout_o,
            side,
            lse,
            softmax_scale_log2,
            m_units,
            turn,
            units,
            seqlen_k,
            lengths,
        ).launch(
            grid=[cutlass.min(units, sms // cfg.cluster) * cfg.cluster, 1, 1],
            block=[cfg.threads, 1, 1],
            cluster=None if cfg.cluster == 1 else [cfg.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=cfg.varlen,
        )

    def packed(self, x: cute.Tensor) -> cute.Tensor:
        """(batch, seqlen, heads, dim) -> (pack_gqa, seqlen, dim, heads / pack_gqa, batch)."""
        g = self.cfg.pack_gqa
        batch, seqlen, heads, dim = x.shape
        of_batch, of_row, of_head, of_dim = x.stride
        return cute.make_tensor(
            x.iterator,
            cute.make_layout(
                (g, seqlen, dim, heads // g, batch), stride=(of_head, of_row, of_dim, of_head * g, of_batch)
            ),
        )

    def box(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Extents of a tile of `rows` rows in what `packed` returns."""
        return self.cfg.pack_gqa, rows // self.cfg.pack_gqa, columns

    def packed_rows(self, layout, rows: int, columns: int):
        """The layout of a tile in shared memory, (rows, columns), as (pack_gqa, rows / pack_gqa, columns)."""
        g = self.cfg.pack_gqa
        return cute.composition(layout, cute.make_layout(self.box(rows, columns), stride=(1, g, rows)))

    # -- device -----------------------------------------------------------------------------------------------

    @cute.kernel
    def reset(self, counter: cute.Tensor):
        """No tile has been given out yet. One thread writes; the grid that counts comes up meanwhile."""
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            counter[0] = Int32(0)

    @cute.kernel
    def kernel(
        self,
        atom_q: cute.CopyAtom,
        m_q: cute.Tensor,  # (pack_gqa, seqlen_q, head_dim, heads_q / pack_gqa, batch)
        atom_k: cute.CopyAtom,
        m_k: cute.Tensor,  # (seqlen_k, head_dim, heads_k, batch)
        atom_v: cute.CopyAtom,
        m_v: cute.Tensor,  # (head_dim_v, keys, heads_k, batch)
        atom_o,  # copy atom, None with `o_direct`
        m_o: cute.Tensor,  # (pack_gqa, seqlen_q, head_dim_v, heads_q / pack_gqa, batch)
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_o: cute.ComposedLayout,
        side,  # tuple, the policy's
        m_lse: cute.Tensor,  # (seqlen_q, heads_q, batch)
        softmax_scale_log2: Float32,
        m_units: Int32,
        turn: Int32,
        units: Int32,
        seqlen_k: Int32,
        # with `varlen` (cu_seqlens_q, cu_seqlens_k, seqused_k, whether that counts, counter, keys of the heads whose
        # tiles are mixed, and with `split_keys` shares of the keys of a tile); else ()
        lengths,
    ):
        """With `varlen`, o is what `ragged` and k and v (of 16 bits) are what `ragged_load` makes of them, with modes
        of rows for the batch, and q has a batch of one; m_units, turn, units and seqlen_k are not read.
        """
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.head_dim_padded, cfg.v_columns
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        seqlen_q, heads_k = m_q.shape[1], m_k.shape[2]
        group = m_q.shape[3] // heads_k  # query heads, or packs of them, of a key head
        window = self.policy.window(side)
        order = (m_units, group, heads_k, m_k.shape[3], turn)
        rounds, splits = Int32(0), Int32(1)
        if cutlass.const_expr(cfg.split_keys):
            cute.arch.griddepcontrol_launch_dependents()  # what adds up waits for the end of this grid
            splits = lengths[6]
        if cutlass.const_expr(not cfg.varlen):
            rounds = rounds_of(cta // cfg.cluster, ctas // cfg.cluster, units, cfg)

        if warp_idx == 4 * cfg.consumer_warpgroups:
            for atom in (atom_q, atom_k, atom_v, *(() if cfg.o_direct else (atom_o,))):
                cpasync.prefetch_descriptor(atom)

        storage = SmemAllocator().allocate(self.storage)
        s_q = storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)  # (tile_m, d, q_stages)
        s_k = storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner)  # (tile_n, d, kv_stages)
        s_v = storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner)  # (rows, tile_n, kv_stages)
        s_o = None
        if cutlass.const_expr(not cfg.o_direct):
            s_o = storage.o.get_tensor(layout_o.outer, swizzle=layout_o.inner)  # (tile_m, d_v)
        qk_bytes, v_bytes = self.policy.qk_type.width // 8, self.policy.v_type.width // 8
        places = storage.places.get_tensor(cute.make_layout((PLACE, STAGES)))
        pipes = (
            self.ring(storage.bar_q.data_ptr(), cfg.q_stages, tile_m * d * qk_bytes, shared=False),
            self.ring(storage.bar_k.data_ptr(), cfg.kv_stages, tile_n * d * qk_bytes, shared=True),
            self.ring(storage.bar_v.data_ptr(), cfg.kv_stages, tile_n * d_v * v_bytes, shared=True),
        )
        if cutlass.const_expr(cfg.varlen):
            pipes = (*pipes, place_ring(storage.bar_place.data_ptr(), 4 * cfg.consumer_warpgroups))
        else:
            pipes = (*pipes, self.tile_ring(storage.bar_place.data_ptr()))
        staged = ()
        if cutlass.const_expr(cfg.side_words):
            staged = (storage.side.get_tensor(cute.make_layout(cfg.side_words)),)
        self.policy.prepare(s_v, tid)
        # all CTAs of the cluster: none signals or fills another's ring before its mbarriers are initialised
        pl.pipeline_init_arrive(cluster_shape_mn=(cfg.cluster, 1), is_relaxed=True)
        pl.pipeline_init_wait(cluster_shape_mn=(cfg.cluster, 1))
        cute.arch.sync_threads()  # all threads: mbarriers are initialised, the policy's rows are written

        if warpgroup == cfg.consumer_warpgroups:
            cute.arch.setmaxregister_decrease(cfg.producer_regs)
            if warp_idx == 4 * cfg.consumer_warpgroups:
                # without the policy's rows
                boxes = cute.local_tile(s_v, (d_v, cfg.v_box, cfg.kv_stages), (0, None, 0))
                boxes = cute.make_tensor(boxes.iterator, cute.select(boxes.layout, [0, 1, 3, 2]))
                boxes = cute.group_modes(boxes, 0, 2)
                loads = ((atom_q, m_q, s_q), (atom_k, m_k, s_k), (atom_v, m_v, boxes))
                state_q = pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.q_stages)
                state = pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.kv_stages)
                if cutlass.const_expr(cfg.varlen):
                    slot = pl.make_pipeline_state(pl.PipelineUserType.Producer, STAGES)
                    search, unit = (Int32(0), Int32(0)), cta
                    shares = group * splits  # of a key head
                    search, found, rest, seq = find_sequence(unit, search, lengths, shares * heads_k, cfg)
                    while found != 0:
                        m_block, head = unit_of_sequence(
                            rest, seq[2], seq[4], shares, heads_k, lengths[5], cfg
                        )
                        share = ()  # of the keys
                        if cutlass.const_expr(cfg.split_keys):
                            share = (head % splits,)
                            head = head // splits
                        at = (m_block, head, *seq)
                        put_place((*at, *share), places, pipes[3], slot)
                        at = (*at, head // group, *share)
                        slot.advance()
                        state_q, state = self.load_tile(at, loads, pipes, (state_q, state), window, splits)
                        cute.arch.griddepcontrol_wait()  # for the counter's reset, which the first tile does not need
                        # Only now: with the next tile in hand before this one's loads, the CTAs that end a round first
                        # would take two each, and of few tiles leave none to the others.
                        unit = ctas + cute.arch.shuffle_sync(take_unit(lengths[4]), 0)
                        search, found, rest, seq = find_sequence(unit, search, lengths, shares * heads_k, cfg)
                    # also in a CTA without a tile: this grid may not end, and the counter be freed, before the reset
                    cute.arch.griddepcontrol_wait()
                    end = (Int32(END), *[Int32(0)] * 6)
                    put_place(end, places, pipes[3], slot)
                else:
                    for r in cutlass.range(rounds, unroll=1):
                        at = self.tile(r, order)
                        at = (*at[:3], Int32(0), seqlen_q, Int32(0), seqlen_k, at[3])
                        state_q, state = self.load_tile(at, loads, pipes, (state_q, state), window, splits)
                # The producer may not leave before its last loads have been consumed, by the other CTA of its cluster,
                # too, whose warps signal the mbarriers here.
                state_v = state.clone()
                pipes[0].producer_tail(state_q)
                pipes[1].producer_tail(state)
                pipes[2].producer_tail(state_v)
            elif warp_idx == 4 * cfg.consumer_warpgroups + 1 and cutlass.const_expr(not cfg.varlen):
                for r in cutlass.range(rounds, unroll=1):
                    at = [cute.arch.make_warp_uniform(word) for word in self.tile(r, order)]
                    blocks, passed, _, _, _ = key_blocks(at[0], seqlen_q, seqlen_k, window, cfg)
                    # one stage: its phase follows from the round, so none is kept; the first wait is for nobody
                    slot = pl.PipelineState(1, Int32(0), Int32(0), 1 - (r & 1))
                    pipes[3].producer_acquire(slot)  # waits until all consumers have begun the tile before
                    if cute.arch.lane_idx() == 0:
                        for i in cutlass.range_constexpr(4):
                            places[i, r & (STAGES - 1)] = at[i]
                    if cutlass.const_expr(cfg.side_words):
                        self.policy.stage_inputs(side, at, blocks - passed - 1, *staged)
                    pipes[3].producer_commit(slot)  # by all lanes, each for what it wrote
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_regs)
            policy = self.policy
            qk_mma = policy.qk_mma()
            qk_thread = qk_mma.get_slice(warpgroup * 128)  # uniform in a warp, and so are Q's descriptors
            frags = (
                qk_mma.make_fragment_A(qk_thread.partition_A(s_q)),
                qk_mma.make_fragment_B(qk_thread.partition_B(s_k)),
                policy.v_fragments(s_v, tid),
            )
            states = (
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.q_stages),
                pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.kv_stages),
            )
            self.mainloop.start()
            consume = lambda at, states: self.attend_tile(
                at,
                (places, seqlen_q, seqlen_k, group),
                staged,
                frags,
                pipes,
                states,
                window,
                side,
                softmax_scale_log2,
                (s_o, atom_o, m_o, m_lse),
                splits,
            )
            if cutlass.const_expr(cfg.varlen):
                slot = pl.make_pipeline_state(pl.PipelineUserType.Consumer, STAGES)
                pipes[3].consumer_wait(slot)  # the producer has written the place of the first tile
                while cute.arch.make_warp_uniform(places[0, slot.index]) != END:
                    states = consume(slot, states)
                    slot.advance()
                    pipes[3].consumer_wait(slot)  # likewise of the next tile
            else:
                for r in cutlass.range(rounds, unroll=1):
                    states = consume(r, states)
            if cutlass.const_expr(not cfg.o_direct):
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def load_tile(self, at, loads, pipes, states, window, splits: Int32):
        """Issue all loads of a tile, by one whole warp. Returns the states of Q's and of the other rings.

        at     see `place`
        loads  (copy atom, global tensor, shared tensor) of Q, K, V
        splits shares of the keys, with `split_keys`
        """
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.head_dim_padded, cfg.v_columns
        (atom_q, m_q, s_q), (atom_k, m_k, s_k), (atom_v, m_v, boxes) = loads
        rows = lambda t: cute.group_modes(t, 0, cute.rank(t) - 1)
        whole, parts = cute.make_layout(1), cute.make_layout(cfg.cluster)
        rank = 0 if cutlass.const_expr(cfg.cluster == 1) else cute.arch.block_idx_in_cluster()
        m_block, head, batch, row0, seqlen_q, key0, seqlen_k, head_k = at[:8]
        blocks = key_blocks(m_block, seqlen_q, seqlen_k, window, cfg)
        if cutlass.const_expr(cfg.split_keys):
            blocks, _ = split_blocks(blocks, at[8], splits)
        blocks, _, _, _, first = blocks
        if cutlass.const_expr(cfg.varlen):
            first_row = row0 + m_block * (tile_m // cfg.pack_gqa)
            q_from = cute.domain_offset((0, first_row, 0), m_q[None, None, None, head, 0])
            g_q = cute.local_tile(q_from, self.box(tile_m, d), (0, 0, 0))
            g_k = steps_of(cute.local_tile(m_k[None, None, head_k, 0, 0], (tile_n, d), (0, 0)), m_k, 0)
            if cutlass.const_expr(cfg.padded_v):
                key_v = first_slot(key0, batch, V_SCALE_SHIFT) * V_SCALE_GROUP
                own_v = cute.domain_offset((0, key_v), m_v[None, None, head_k, 0])
                g_v = cute.local_tile(own_v, (d_v, cfg.v_box), (0, None))
            else:
                tile_v = cute.local_tile(m_v[None, None, head_k, 0, 0], (d_v, cfg.v_box), (0, 0))
                g_v = steps_of(tile_v, m_v, 1)
            rows_kv = lambda t: cute.group_modes(t, 0, 2)
        else:
            g_q = cute.local_tile(m_q[None, None, None, head, batch], self.box(tile_m, d), (0, m_block, 0))
            g_k = cute.local_tile(m_k[None, None, head_k, batch], (tile_n, d), (None, 0))
            g_v = cute.local_tile(m_v[None, None, head_k, batch], (d_v, cfg.v_box), (0, None))
            rows_kv = rows
        tq_s, tq_g = cpasync.tma_partition(atom_q, 0, whole, rows(s_q), cute.group_modes(g_q, 0, 3))
        tk_s, tk_g = cpasync.tma_partition(atom_k, rank, parts, rows(s_k), rows_kv(g_k))
        tv_s, tv_g = cpasync.tma_partition(atom_v, rank, parts, boxes, rows_kv(g_v))
        return self.mainloop.produce(
            (atom_q, tq_g, tq_s),
            (atom_k, tk_g, tk_s),
            (atom_v, tv_g, tv_s),
            pipes,
            states,
            blocks,
            first,
            (key0, seqlen_k),
        )

    @cute.jit
    def attend_tile(
        self,
        at,
        where,
        staged,
        frags,
        pipes,
        states,
        window,
        side,
        softmax_scale_log2: Float32,
        output,
        splits: Int32,
    ):
        """A consumer warpgroup's part of a tile. Returns the states of Q's and the other rings.

        at      round of the tile, or with `varlen` the consumer's state of the ring of places
        where   see `place`
        staged  (what `Fp8Policy.stage_inputs` writes,); () of 16 bits and with `varlen`
        output  (O in shared memory, its copy atom, O, lse); with `split_keys` the last are O and maxima of all parts
        splits  shares of the keys, with `split_keys`
        """
        cfg = self.cfg
        tid, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        s_o, atom_o, m_o, m_lse = output
        index = at.index if cutlass.const_expr(cfg.varlen) else at
        if cutlass.const_expr(not cfg.varlen):
            slot = pl.PipelineState(1, Int32(0), Int32(0), at & 1)  # one stage, of a phase for each round
            pipes[3].consumer_wait(slot)  # the producer's second warp has written place and `staged`
        found = self.place(index, where)
        m_block, head, batch, first_row, seqlen_q, first_key, seqlen_k, head_k = found[:8]
        row0, limits = self.rows_of(m_block, seqlen_q, seqlen_k, window)
        of_all = side
        side = self.side_of(of_all, batch, first_row, seqlen_q, first_key, seqlen_k)
        own = warpgroup if cutlass.const_expr(cfg.skips_keys) else None
        blocks = key_blocks(m_block, seqlen_q, seqlen_k, window, cfg, own)
        if cutlass.const_expr(cfg.split_keys):
            blocks, _ = split_blocks(blocks, found[8], splits)
        inputs = self.policy.tile_inputs(
            side, softmax_scale_log2, row0, head, head_k, batch, seqlen_q, seqlen_k, *staged
        )
        if cutlass.const_expr(not cfg.varlen):
            pipes[3].consumer_release(slot)  # by each thread, for what it read
        state = self.policy.new_state()
        out = self.policy.new_output(tid)
        pipes[0].consumer_wait(states[0])  # TMA has filled Q
        states = self.mainloop.consume(frags, inputs, (state, limits), out, pipes, states, blocks)
        # Read again, from a number that the compiler cannot know to be `index`: at head_dim_v 256 there
        # is no register to keep them in over the loop.
        found = self.place(cute.arch.shuffle_sync(index, 0), where)
        m_block, head, batch, first_row, seqlen_q, first_key, seqlen_k, _ = found[:8]
        row0, limits = self.rows_of(m_block, seqlen_q, seqlen_k, window)
        side = self.side_of(of_all, batch, first_row, seqlen_q, first_key, seqlen_k)
        if cutlass.const_expr(cfg.varlen):
            if cute.arch.lane_idx() == 0:  # it alone has read the place, for the warp
                pipes[3].consumer_release(at)  # to the producer, which writes the place after next there
            if cutlass.const_expr(cfg.o_direct):
                g_o = cute.domain_offset((0, first_row, 0), m_o[None, None, None, head, 0])
            else:
                g_o = self.rows_from(m_o, head, m_block, first_row, seqlen_q)
            g_lse = cute.domain_offset((first_row, 0), m_lse[None, None, 0])
            o_block, rows = Int32(0), seqlen_q
        else:
            g_o, g_lse = m_o[None, None, None, head, batch], m_lse[None, None, batch]
            o_block, rows = m_block, g_lse.shape[0]
        if cutlass.const_expr(cfg.split_keys):
            _, empty = split_blocks(key_blocks(m_block, seqlen_q, seqlen_k, window, cfg), found[8], splits)
            part = found[8] * (m_o.shape[1] // splits)  # rows of the parts before this share's
            g_o, g_lse = cute.domain_offset((0, part, 0), g_o), cute.domain_offset((part, 0), g_lse)
            self.store_part(out, state, empty, g_o, g_lse, row0, rows, head)
        else:
            self.epilogue(
                out, state, limits, softmax_scale_log2, side, row0, warpgroup, warp_idx, tid,
                s_o, atom_o, g_o, o_block, g_lse, rows, head, batch,
            )  # fmt: skip
        return states

    @cute.jit
    def place(self, at: Int32, where):
        """(m_block, head, batch, first row in q, seqlen_q, first key in k, seqlen_k, head of K) of a tile; with
        `split_keys` its share of the keys, too.

        at     round of this CTA, or with `varlen` a stage of the ring of places
        where  (places, seqlen_q, seqlen_k, query heads or packs of a key head); places is that ring or, of which nobody
               gives one back, those of the last `STAGES` rounds: a later one is written when all have begun the next
        """
        places, seqlen_q, seqlen_k, group = where
        words = cute.make_rmem_tensor(PLACE if self.cfg.varlen else 4, Int32)
        if cutlass.const_expr(self.cfg.varlen):
            words.fill(0)
            # By the lane that gives the place back, so that no other's reads have to come before that.
            if cute.arch.lane_idx() == 0:
                cute.autovec_copy(places[None, at], words)
            count = 8 if self.cfg.split_keys else 7
            found = [cute.arch.make_warp_uniform(cute.arch.shuffle_sync(words[i], 0)) for i in range(count)]
            found = (*found[:7], found[1] // group, *found[7:])
        else:
            source = (places.iterator + (at & (STAGES - 1)) * PLACE).align(16)
            cute.autovec_copy(cute.make_tensor(source, words.layout), words)
            found = [cute.arch.make_warp_uniform(words[i]) for i in range(4)]
            found = (*found[:3], Int32(0), seqlen_q, Int32(0), seqlen_k, found[3])
        return found

    def side_of(self, side, batch, first_row, seqlen_q, first_key, seqlen_k):
        """What the policy reads beside the tiles, of one sequence; see `place`."""
        return side

    @cute.jit
    def rows_from(self, x: cute.Tensor, head: Int32, m_block: Int32, row0: Int32, rows: Int32) -> cute.Tensor:
        """(pack_gqa, rows, dim) of o from the first row of a tile on, which end where the sequence ends.

        x is what `ragged` made, row0 the sequence's first row in it, `rows` its rows.
        """
        box = self.cfg.tile_m // self.cfg.pack_gqa
        offset, last = ragged_coord(row0, rows, m_block * box, box, box)
        return cute.domain_offset((0, offset, 0), x[None, None, None, head, last])

    @cute.jit
    def tile(self, r: Int32, order):
        """(m_block, head, batch, head of K) of this CTA's tile of round r.

        CTAs of a cluster change places from round to round: with a causal mask the first has less to do.
        """
        size = self.cfg.cluster
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        unit = unit_in_round(r, cta // size, ctas // size, self.cfg)
        m_unit, head, batch = unit_coord(unit, *order, self.cfg)
        return m_unit * size + (cta + r) % size, head, batch, head // order[1]

    @cute.jit
    def rows_of(self, m_block: Int32, seqlen_q: Int32, seqlen_k: Int32, window):
        """This thread's first row of the head, the second is ROW_STEP below; limits of the mask, bottom-right.

        See `first_hidden_key` for the limits; window is (left, right), () without one.
        """
        tid, _, _ = cute.arch.thread_idx()
        row0 = m_block * self.cfg.tile_m + tid // 32 * 16 + tid % 32 // 4
        limits = (row0 // self.cfg.pack_gqa + 1 + seqlen_k - seqlen_q, seqlen_k)
        if cutlass.const_expr(self.cfg.window):
            left, right = window
            limits = (*limits, right, left)
        return row0, limits

    def tile_ring(self, barriers):
        """One stage for what a tile begins with: a warp of producers, all consumer threads. Without `varlen`."""
        return pl.PipelineAsync.create(
            num_stages=1,
            producer_group=pl.CooperativeGroup(pl.Agent.Thread, 32),
            consumer_group=pl.CooperativeGroup(pl.Agent.Thread, 128 * self.cfg.consumer_warpgroups),
            barrier_storage=barriers,
            defer_sync=True,
        )

    def ring(self, barriers, stages: int, tx_bytes: int, shared: bool):
        """A TMA ring: one producer thread arrives with the byte count, one lane of each consumer warp releases.

        shared: each CTA of the cluster fills a part of every CTA's stage, so its producer waits for all consumers.
        """
        cluster = self.cfg.cluster
        consumers = 4 * self.cfg.consumer_warpgroups * (cluster if shared else 1)
        return pl.PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=pl.CooperativeGroup(pl.Agent.Thread),
            consumer_group=pl.CooperativeGroup(pl.Agent.Thread, consumers),
            tx_count=tx_bytes,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, cluster, 1, 1)),
            mcast_mode_mn=(0, 1) if shared else (1, 0),
            defer_sync=True,  # one fence and one barrier for all rings, in the kernel
        )

    @cute.jit
    def epilogue(
        self,
        out,
        state,
        limits,
        softmax_scale_log2: Float32,
        side,
        row0: Int32,
        warpgroup: Int32,
        warp_idx: Int32,
        tid: Int32,
        s_o,
        atom_o,
        g_o: cute.Tensor,
        m_block: Int32,
        g_lse: cute.Tensor,
        rows: Int32,
        head: Int32,
        batch: Int32,
    ):
        """Normalise, write lse, and send O registers -> shared memory -> TMA store, each warpgroup its 64 rows, or
        registers -> memory.

        TMA drops what lies past the rows of the sequence and head_dim_v. g_o is (pack_gqa, seqlen_q, head_dim_v), in
        which the tile is number m_block, g_lse (seqlen_q, heads_q), of which `rows` are written.
        """
        cfg, g = self.cfg, self.cfg.pack_gqa
        lse = cute.make_rmem_tensor(2, Float32)
        self.policy.finish(out, state, limits, softmax_scale_log2, side, row0, head, batch, lse)
        if cutlass.const_expr(cfg.o_direct):
            self.store_rows(out, g_o, row0, rows)
        else:
            self.stage_and_store(out, s_o, atom_o, g_o, m_block, warpgroup, warp_idx, tid)
        # after O, whose fence would wait for these stores
        if cute.arch.lane_idx() % 4 == 0:  # the four lanes of a row hold the same value
            for r in cutlass.range_constexpr(2):
                row = row0 + ROW_STEP * r
                if row // g < rows:
                    g_lse[row // g, head * g + row % g] = lse[r]

    @cute.jit
    def store_part(
        self, out, state, empty, g_o: cute.Tensor, g_ml: cute.Tensor, row0: Int32, rows: Int32, head: Int32
    ):
        """What a share of the keys gave: O, not divided, and maximum and sum of each row, from registers to memory.

        empty  whether the share is empty
        g_o    (pack_gqa, seqlen_q, head_dim_v) float32
        g_ml   (seqlen_q, heads_q), where maximum and sum are side by side
        """
        cfg, g = self.cfg, self.cfg.pack_gqa
        maximum, total = state[:2]
        o = scores.rows(out[0])
        lane = cute.arch.lane_idx()
        for r in cutlass.range_constexpr(2):
            row = row0 + ROW_STEP * r
            query, head_q = row // g, head * g + row % g
            top, sum_row = maximum[r], quad_sum(total[r])
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0] = -Float32.inf if empty else top
            pair[1] = Float32(0.0) if empty else sum_row
            if query < rows:
                own = cute.domain_offset((row % g, query, lane % 4 * 2), g_o).iterator
                if lane % 4 == 0:
                    at = cute.domain_offset((query, head_q), g_ml).iterator.align(8)
                    cute.autovec_copy(pair, cute.make_tensor(at, cute.make_layout(2)))
                for j in cutlass.range_constexpr(cfg.head_dim_v // 8):
                    for e in cutlass.range_constexpr(2):
                        pair[e] = Float32(0.0) if empty else o[r, 2 * j + e]
                    cute.autovec_copy(pair, cute.make_tensor((own + 8 * j).align(8), cute.make_layout(2)))

    @cute.jit
    def store_rows(self, out, g_o: cute.Tensor, row0: Int32, rows: Int32):
        """O from registers to the `rows` rows of g_o, 16 bytes a lane and access.

        Of the four lanes of a row, lane q has columns 2q and 2q + 1 of every 8, a word. They exchange the words of 32
        columns, so that lane q gets all four of the q-th 8 columns: with the lane that differs in bit 0, then in bit 1.
        """
        cfg, g = self.cfg, self.cfg.pack_gqa
        values = cute.make_tensor(out[0].iterator, cute.make_layout(cute.size(out[0])))
        narrow = cute.make_rmem_tensor_like(values, self.out_type)
        narrow.store(values.load().to(self.out_type))
        words = cute.recast_tensor(narrow, Uint32)  # word r + 2 j: row ROW_STEP r, of columns 8 j to 8 j + 7
        lane = cute.arch.lane_idx()
        low, first = lane % 2 == 0, lane % 4 < 2
        for r in cutlass.range_constexpr(2):
            row = row0 + ROW_STEP * r
            query = row // g
            own = cute.domain_offset((row % g, query, lane % 4 * 8), g_o)
            for c in cutlass.range_constexpr(cfg.v_columns // 32):
                pairs = []
                for j in cutlass.range_constexpr(4 * c, 4 * c + 4, 2):
                    a, b = words[r + 2 * j], words[r + 2 * j + 2]
                    other = cute.arch.shuffle_sync_bfly(b if low else a, offset=1)
                    pairs.append((a if low else other, other if low else b))
                mine = cute.make_rmem_tensor(4, Uint32)
                for i in cutlass.range_constexpr(2):
                    other = cute.arch.shuffle_sync_bfly(pairs[1][i] if first else pairs[0][i], offset=2)
                    mine[i] = pairs[0][i] if first else other
                    mine[i + 2] = other if first else pairs[1][i]
                if query < rows and lane % 4 * 8 + 32 * c < cfg.head_dim_v:
                    at = (own.iterator + 32 * c).align(16)
                    cute.autovec_copy(
                        cute.recast_tensor(mine, self.out_type), cute.make_tensor(at, cute.make_layout(8))
                    )

    @cute.jit
    def stage_and_store(
        self,
        out,
        s_o: cute.Tensor,
        atom_o: cute.CopyAtom,
        g_o: cute.Tensor,
        m_block: Int32,
        warpgroup: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """O from registers to shared memory, and by TMA to tile m_block of g_o; see `epilogue`."""
        cfg = self.cfg
        # the warp that stores waits until the last tile's O has been read, the warpgroup for that warp; then it writes
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=Barrier.STORE + warpgroup, number_of_threads=128)
        # From a number that the compiler cannot know to be tid, or it computes all addresses before the loops.
        tid = cute.arch.shuffle_sync(tid, cute.arch.lane_idx())
        copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_type)
        own = cute.local_tile(s_o, (64, cfg.v_columns), (warpgroup, 0))
        start = 0
        for i, part in enumerate(cfg.pv_parts):
            tiled_copy = cute.make_tiled_copy_C(copy_atom, self.policy.one_warpgroup(part)).get_slice(
                tid % 128
            )
            values = cute.make_tensor(
                out[i].iterator, cute.make_layout(((2, 2, part // 8), 1, 1), stride=((1, 2, 4), 0, 0))
            )  # without the sum columns
            narrow = cute.make_rmem_tensor_like(values, self.out_type)
            narrow.store(values.load().to(self.out_type))
            target = cute.local_tile(cute.domain_offset((0, start), own), (64, part), (0, 0))
            cute.copy(copy_atom, tiled_copy.retile(narrow), tiled_copy.partition_D(target))
            start += part
        cute.arch.fence_proxy("async.shared", space="cta")  # the TMA store reads through the async proxy
        # the warpgroup: all of it has staged, and its first warp may store
        cute.arch.barrier(barrier_id=Barrier.STORE + warpgroup, number_of_threads=128)
        if warp_idx % 4 == 0:
            block = m_block * cfg.consumer_warpgroups + warpgroup
            for c in cutlass.range_constexpr(cfg.v_columns // cfg.o_box):
                s_box = cute.local_tile(s_o, (64, cfg.o_box), (warpgroup, c))
                g_box = cute.local_tile(g_o, self.box(64, cfg.o_box), (0, block, c))
                t_s, t_g = cpasync.tma_partition(
                    atom_o,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(s_box, 0, 2),
                    cute.group_modes(g_box, 0, 3),
                )
                cute.copy(atom_o, t_s, t_g)
            cute.arch.cp_async_bulk_commit_group()
