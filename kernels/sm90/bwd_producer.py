"""Producer of the 16-bit backward: what the warps of the last warpgroup do.

    warp            does
    0               issues the TMA loads; with `persistent` it takes key tiles by a count and tells the others where
    1 + warpgroup   sends that consumer warpgroup's part of dQ; with `dq_direct` keeps its turns if they have an order
    3               with `clears_ahead`, clears a share of the sum of dQ of a later head

Tensors see bwd.py, the rings of Q and dO bwd_mainloop.py. With `persistent` there are two more: of places
(common/varlen.py), and of K and V, with one stage, which is given back to the producer before the next tile's come.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..common.pointers import aligned
from ..common.scheduler import key_block_coord, query_blocks
from ..common.turns import await_turn, end_turn
from ..common.varlen import END, FAR, STAGES, put_place, ragged_coord, steps_of, take_unit
from ..config import Bwd16Config
from .bwd_mainloop import BwdMainloop


@cute.jit
def heads_ahead(turn: Int32, q: cute.Tensor, k: cute.Tensor) -> Int32:
    """How many heads of K on a CTA clears the sum of dQ, see `BwdProducer.clear_ahead`; `turn` as in
    `key_block_coord`. Of q, k (batch, seqlen, heads, dim)."""
    ahead = turn
    # with so many queries a CTA would clear a large share, and there are few CTAs before those that wait
    if q.shape[1] > 8 * k.shape[1]:
        ahead = k.shape[0] * k.shape[2]  # none
    return ahead


def from_slot(x: cute.Tensor, first: Int32, varlen: bool) -> cute.Tensor:
    """x from `first` of its first mode on; without `varlen` as it is."""
    if not varlen:
        return x
    return cute.domain_offset((first,) if cute.rank(x) == 1 else (first, 0), x)


class BwdProducer:
    """Loads, sends and zeros of one configuration; methods are traced into the kernel. Their arguments:

    place   (key tile of the sequence, head of K, sequence, first row in q, seqlen_q, first key in k, seqlen_k), of
            which the first row and key are 0 without `varlen`
    slots   of what has slots, the entry of the batch and the first slot of the sequence; without `varlen` (sequence, 0)
    blocks  see `query_blocks`
    group   query heads of a key head
    loads   (copy atom, tensor) of Q, K, V, dO; tiles: Q, K, V, dO in shared memory
    rows    lse2, D, sum of dQ, slopes, turns in global memory; s_rows: lse2 and D in shared memory
    pipes   the rings of Q and dO
    """

    def __init__(self, cfg: Bwd16Config, mainloop: BwdMainloop):
        self.cfg = cfg
        self.mainloop = mainloop

    # -- loads ------------------------------------------------------------------------------------------------

    @cute.jit
    def load_tile(self, place, slots, blocks, group: Int32, loads, tiles, rows, s_rows, pipes, first_full):
        """Issue all loads of a CTA that has one key tile; by one whole warp. first_full: the barriers of the first
        stages of Q and dO."""
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.qk_columns, cfg.v_columns
        (atom_q, m_q), (atom_k, m_k), (atom_v, m_v), (atom_do, m_do) = loads
        s_q, s_k, s_v, s_do = tiles
        n_block, head_k, batch, row0, seqlen_q, key0, seqlen_k = place
        entry, slot = slots
        of_keys, of_queries = (key0, seqlen_k), (row0, seqlen_q)
        full_q, full_do = first_full
        state_q = pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.q_stages)
        state_do = pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.do_stages)
        if blocks[0] < blocks[3]:  # else nobody would wait for K and V
            # The first stages of Q and dO are full when K and V are there, too: their barriers expect these bytes
            # beside those of `load`, whose arrival is still to come, so that no phase can end before.
            with cute.arch.elect_one():  # the lane that arrives in `load`
                cute.arch.mbarrier_expect_tx(full_q, tile_n * d * 2)
                cute.arch.mbarrier_expect_tx(full_do, tile_n * d_v * 2)
            tk_s, tk_g = self.boxes(atom_k, m_k, head_k, batch, s_k, (tile_n, d))
            tv_s, tv_g = self.boxes(atom_v, m_v, head_k, batch, s_v, (tile_n, d_v))
            cute.copy(atom_k, self.box(tk_g, n_block, tile_n, of_keys), tk_s, tma_bar_ptr=full_q)
            cute.copy(atom_v, self.box(tv_g, n_block, tile_n, of_keys), tv_s, tma_bar_ptr=full_do)
        for h in cutlass.range(group, unroll=1):
            head = head_k * group + h
            tq_s, tq_g = self.boxes(atom_q, m_q, head, batch, s_q, (tile_m, d))
            tdo_s, tdo_g = self.boxes(atom_do, m_do, head, batch, s_do, (tile_m, d_v))
            lse2, d_rows = [from_slot(x[entry, head, None], slot * tile_m, cfg.varlen) for x in rows[:2]]
            tile_q, tile_do = (atom_q, tq_s, tq_g), (atom_do, tdo_s, tdo_g)
            for m in cutlass.range(blocks[0], blocks[3], unroll=1):
                state_q = self.load(m, tile_q, (s_rows[0], lse2), of_queries, pipes[0], state_q)
                state_do = self.load(m, tile_do, (s_rows[1], d_rows), of_queries, pipes[1], state_do)

    @cute.jit
    def load_by_count(
        self,
        order,
        count: Int32,
        of_places,
        seqlens,
        window,
        group: Int32,
        loads,
        tiles,
        rows,
        s_rows,
        pipes,
        keys,
    ):
        """With `persistent`: take key tiles by the count in memory, of `count` in all, tell the other warps where each
        is, and issue its loads; by one whole warp.

        order see `key_block_order`; of_places: places and their ring, see common/varlen.py; seqlens: seqlen_q and
        seqlen_k; keys: the ring of K and V.
        """
        cfg = self.cfg
        places, ring = of_places
        counter = rows[4][0, 0, 0, None]
        counter = cute.make_tensor(counter.iterator + 1, cute.make_layout(1))
        states = (
            pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.q_stages),
            pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.do_stages),
            pl.make_pipeline_state(pl.PipelineUserType.Producer, 1),
        )
        put = pl.make_pipeline_state(pl.PipelineUserType.Producer, STAGES)
        tile = cute.arch.shuffle_sync(take_unit(counter), 0)
        while tile < count:
            n_block, head_k, batch = [
                cute.arch.make_warp_uniform(x) for x in key_block_coord(tile, order, cfg)
            ]
            blocks = [cute.arch.make_warp_uniform(x) for x in query_blocks(n_block, *seqlens, window, cfg)]
            put_place((n_block, head_k, batch, *blocks), places, ring, put)
            put.advance()
            at = (n_block, head_k, batch)
            states = self.load_next_tile(at, blocks, group, loads, tiles, rows, s_rows, pipes, keys, states)
            tile = cute.arch.shuffle_sync(take_unit(counter), 0)
        put_place((Int32(END), *[Int32(0)] * 6), places, ring, put)

    @cute.jit
    def load_next_tile(self, tile, blocks, group: Int32, loads, tiles, rows, s_rows, pipes, keys, states):
        """Issue all loads of a key tile, (key tile, head of K, batch), with `persistent`; by one whole warp. keys: the
        ring of K and V. Returns the states of the rings of Q, dO and keys."""
        cfg = self.cfg
        tile_m, tile_n, d, d_v = cfg.tile_m, cfg.tile_n, cfg.qk_columns, cfg.v_columns
        (atom_q, m_q), (atom_k, m_k), (atom_v, m_v), (atom_do, m_do) = loads
        s_q, s_k, s_v, s_do = tiles
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
                full_q = pipes[0].producer_get_barrier(state_q)
                full_do = pipes[1].producer_get_barrier(state_do)
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
            # the phase cannot have ended: the bytes of this load are still to come
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(barrier, more)
        cute.copy(atom, self.box(g, m, tile_m, queries), s[None, state.index], tma_bar_ptr=barrier)
        with cute.arch.elect_one():
            bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=tile_m * 32)
            source = cute.local_tile(g_row, (tile_m,), (m,))
            source = cute.make_tensor(aligned(source.iterator, 16), source.layout)
            cute.copy(bulk, source, s_row[None, state.index], mbar_ptr=barrier)
        state.advance()
        return state

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

    # -- sum of dQ --------------------------------------------------------------------------------------------

    @cute.jit
    def send_heads(
        self, place, slots, blocks, group: Int32, ahead: Int32, m_k, rows, s_dq, window, part: Int32
    ):
        """Send part `part` of dQ of all query heads of a key tile, see `BwdMainloop.send`, or with `dq_direct` keep its
        turns; by one whole warp. ahead see `clear_ahead`."""
        cfg = self.cfg
        n_block, head_k, batch, _, seqlen_q, _, seqlen_k = place
        entry, slot = slots
        _, _, m_dq_sum, _, m_turns = rows
        if const_expr(cfg.clears_ahead):
            self.await_cleared((n_block, head_k, batch), group, ahead, m_k, m_turns)
        for h in cutlass.range(group, unroll=1):
            head = head_k * group + h
            limits = (Int32(0), seqlen_k, seqlen_k - seqlen_q, *window, n_block)
            turns = from_slot(m_turns[entry, head, None, None], slot, cfg.varlen)
            if const_expr(cfg.dq_direct):
                self.mainloop.keep_turns(limits, turns, blocks, part)
            else:
                dq_sum = from_slot(m_dq_sum[entry, head, None, None], slot, cfg.varlen)
                self.mainloop.send(s_dq, limits, dq_sum, turns, blocks, part)

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
