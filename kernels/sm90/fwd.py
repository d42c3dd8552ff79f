"""Forward attention on Hopper with 8-bit operands: set-up, launch and roles.

    O = softmax(softmax_scale * Q K^T + mask) V,  lse = log sum exp of the scores, per (batch, head)

Tensors (the natural layouts of the caller; every stride is dynamic, the last one is 1):

    q        (batch, seqlen_q, heads_q, head_dim)   e4m3 or int8
    k        (batch, seqlen_k, heads_k, head_dim)   e4m3 or int8
    vt       (batch, heads_k, head_dim, >= seqlen_k) e4m3, keys permuted in groups of 16, zeros past seqlen_k
    q_scale  (batch, heads_q, seqlen_q)             float32, may be expanded (stride 0)
    k_scale  (batch, heads_k, ceil(seqlen_k / 64))  float32, last stride 1, rows readable to a multiple of 4
    v_scale  (batch, heads_k, ceil(seqlen_k / 256)) float32, last stride 1
    lse_add  (batch, heads_q, seqlen_q)             float32, times softmax_scale added to lse (K smoothing's share)
    o        (batch, seqlen_q, heads_q, head_dim)   bf16 or fp16
    lse      (batch, heads_q, seqlen_q)             float32

One CTA a work tile: tile_m query rows of one head. Warpgroups 0 .. n-1 consume (64 rows each, most registers),
the last one produces: its first warp issues the TMA loads, the others leave at once. Loops, rings and timeline are
in mainloop.py, numerics in policy_fp8.py.

Shared memory: Q (tile_m, head_dim), K ring (tile_n, head_dim, kv_stages), V^T ring (head_dim + 8, tile_n, kv_stages)
whose last eight rows are a row of ones (the row sum of P falls out of P V) and seven of zeros; O is staged in the K
ring once every consumer is past its last Q K^T.

Limits: head_dim 64, 128, 256; seqlen up to 2^31 - 1, CTAs up to 2^31 - 1; TMA wants 16-byte strides and addresses.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.nvgpu import warpgroup as wg
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ..common.mask import ROW_STEP, first_hidden_key
from ..common.scheduler import key_blocks, tile_coord
from ..config import SUM_ROWS, FwdConfig
from .mainloop import Barrier, Mainloop
from .policy_fp8 import F8, Fp8Policy


def _swizzled(dtype, contiguous: int):
    """Swizzle atom of a K-major tile whose contiguous extent is `contiguous` elements."""
    return wg.make_smem_layout_atom(
        hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, contiguous), dtype
    )


class FwdSm90:
    """One configuration of the kernel. Call it inside `cute.compile` with (fake) tensors."""

    def __init__(self, cfg: FwdConfig):
        cfg.check()
        self.cfg = cfg
        self.policy = Fp8Policy(cfg)
        self.mainloop = Mainloop(cfg, self.policy)
        self.out_type = cutlass.BFloat16 if cfg.out_dtype == "bf16" else cutlass.Float16

    # -- host -------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        vt: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        lse_add: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        softmax_scale: Float32,
        softmax_scale_log2: Float32,
        stream,
    ):
        cfg = self.cfg
        tile_m, tile_n, d = cfg.tile_m, cfg.tile_n, cfg.head_dim
        rows_first = lambda t: cute.make_tensor(
            t.iterator, cute.select(t.layout, [1, 3, 2, 0])
        )  # (s, d, h, b)
        q, k, o = rows_first(q), rows_first(k), rows_first(o)
        vt = cute.make_tensor(vt.iterator, cute.select(vt.layout, [2, 3, 1, 0]))  # (d, s, h, b)
        scales_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, [2, 1, 0]))  # (s, h, b)
        q_scale, k_scale, v_scale, lse_add, lse = [
            scales_first(t) for t in (q_scale, k_scale, v_scale, lse_add, lse)
        ]

        qk_type = self.policy.qk_type
        layout_q = cute.tile_to_shape(_swizzled(qk_type, d), (tile_m, d), order=(0, 1))
        layout_k = cute.tile_to_shape(_swizzled(qk_type, d), (tile_n, d, cfg.kv_stages), order=(0, 1, 2))
        layout_v = cute.tile_to_shape(
            _swizzled(F8, tile_n), (d + SUM_ROWS, tile_n, cfg.kv_stages), order=(0, 1, 2)
        )
        layout_v_box = cute.tile_to_shape(_swizzled(F8, tile_n), (d, cfg.v_box), order=(0, 1))
        layout_o = cute.tile_to_shape(
            _swizzled(self.out_type, d), (64, d, cfg.consumer_warpgroups), order=(0, 1, 2)
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q = cpasync.make_tiled_tma_atom(load, q, layout_q, (tile_m, d))
        tma_k = cpasync.make_tiled_tma_atom(load, k, cute.select(layout_k, [0, 1]), (tile_n, d))
        tma_v = cpasync.make_tiled_tma_atom(load, vt, layout_v_box, (d, cfg.v_box))
        store = cpasync.CopyBulkTensorTileS2GOp()
        tma_o = cpasync.make_tiled_tma_atom(store, o, cute.select(layout_o, [0, 1]), (64, d))

        @cute.struct
        class Storage:
            bar_q: cute.struct.MemRange[cutlass.Int64, 2]
            bar_k: cute.struct.MemRange[cutlass.Int64, 2 * cfg.kv_stages]
            bar_v: cute.struct.MemRange[cutlass.Int64, 2 * cfg.kv_stages]
            q: cute.struct.Align[cute.struct.MemRange[qk_type, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[qk_type, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[F8, cute.cosize(layout_v)], 1024]

        self.storage = Storage
        m_blocks = cute.ceil_div(q.shape[0], tile_m)
        self.kernel(
            tma_q.atom,
            tma_q.tma_tensor,
            tma_k.atom,
            tma_k.tma_tensor,
            tma_v.atom,
            tma_v.tma_tensor,
            tma_o.atom,
            tma_o.tma_tensor,
            layout_q,
            layout_k,
            layout_v,
            layout_o,
            q_scale,
            k_scale,
            v_scale,
            lse_add,
            lse,
            softmax_scale,
            softmax_scale_log2,
            m_blocks,
            k.shape[0],
        ).launch(
            grid=[m_blocks * q.shape[2] * q.shape[3], 1, 1],
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
        m_v: cute.Tensor,  # (head_dim, padded seqlen_k, heads_k, batch)
        atom_o: cute.CopyAtom,
        m_o: cute.Tensor,  # (seqlen_q, head_dim, heads_q, batch)
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_o: cute.ComposedLayout,
        m_q_scale: cute.Tensor,  # (seqlen_q, heads_q, batch)
        m_k_scale: cute.Tensor,  # (groups of 64 keys, heads_k, batch)
        m_v_scale: cute.Tensor,  # (groups of 256 keys, heads_k, batch)
        m_lse_add: cute.Tensor,  # (seqlen_q, heads_q, batch)
        m_lse: cute.Tensor,  # (seqlen_q, heads_q, batch)
        softmax_scale: Float32,
        softmax_scale_log2: Float32,
        m_blocks: Int32,
        seqlen_k: Int32,
    ):
        cfg = self.cfg
        tile_m, tile_n, d = cfg.tile_m, cfg.tile_n, cfg.head_dim
        tid, _, _ = cute.arch.thread_idx()
        work, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        seqlen_q, heads_q = m_q.shape[0], m_q.shape[2]
        m_block, head, batch = tile_coord(work, m_blocks, heads_q, cfg.causal)
        head_k = head // (heads_q // m_k.shape[2])
        blocks, masked_blocks = key_blocks(m_block, seqlen_q, seqlen_k, tile_m, tile_n, cfg.causal)

        if warp_idx == 4 * cfg.consumer_warpgroups:
            for atom in (atom_q, atom_k, atom_v, atom_o):
                cpasync.prefetch_descriptor(atom)

        storage = SmemAllocator().allocate(self.storage)
        s_q = storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)  # (tile_m, d)
        s_k = storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner)  # (tile_n, d, stages)
        s_v = storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner)  # (d + 8, tile_n, stages)
        s_o = cute.make_tensor(
            cute.recast_ptr(storage.k.data_ptr(), layout_o.inner, dtype=self.out_type), layout_o.outer
        )  # (64, d, warpgroups)
        pipe_q = self.ring(storage.bar_q.data_ptr(), 1, tile_m * d)
        pipe_k = self.ring(storage.bar_k.data_ptr(), cfg.kv_stages, tile_n * d)
        pipe_v = self.ring(storage.bar_v.data_ptr(), cfg.kv_stages, tile_n * d)
        self.fill_sum_rows(s_v, tid)
        pl.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pl.pipeline_init_wait(cluster_shape_mn=(1, 1))
        cute.arch.sync_threads()  # all threads: mbarriers are initialised, the sum rows are written

        if warpgroup == cfg.consumer_warpgroups:
            cute.arch.setmaxregister_decrease(cfg.producer_regs)
            if warp_idx == 4 * cfg.consumer_warpgroups:
                pair = lambda t: cute.group_modes(t, 0, 2)
                whole = cute.make_layout(1)
                g_q = cute.local_tile(m_q[None, None, head, batch], (tile_m, d), (m_block, 0))
                g_k = cute.local_tile(m_k[None, None, head_k, batch], (tile_n, d), (None, 0))
                g_v = cute.local_tile(m_v[None, None, head_k, batch], (d, cfg.v_box), (0, None))
                boxes = cute.local_tile(s_v, (d, cfg.v_box, cfg.kv_stages), (0, None, 0))  # sum rows left out
                boxes = cute.make_tensor(boxes.iterator, cute.select(boxes.layout, [0, 1, 3, 2]))
                tq_s, tq_g = cpasync.tma_partition(atom_q, 0, whole, pair(s_q), pair(g_q))
                tk_s, tk_g = cpasync.tma_partition(atom_k, 0, whole, pair(s_k), pair(g_k))
                tv_s, tv_g = cpasync.tma_partition(atom_v, 0, whole, pair(boxes), pair(g_v))
                self.mainloop.produce(
                    (atom_q, tq_g, tq_s),
                    (atom_k, tk_g, tk_s),
                    (atom_v, tv_g, tv_s),
                    pipe_q,
                    pipe_k,
                    pipe_v,
                    blocks,
                )
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
            lane = cute.arch.lane_idx()
            row0 = m_block * tile_m + warp_idx * 16 + lane // 4  # this thread's rows: row0 and row0 + 8
            g_q_scale = m_q_scale[None, head, batch]
            q_scale = cute.make_rmem_tensor(2, Float32)
            limits = (
                row0 + 1 + seqlen_k - seqlen_q,
                seqlen_k,
            )  # causal is bottom-right; see first_hidden_key
            for r in cutlass.range_constexpr(2):
                row = row0 + ROW_STEP * r
                scale = g_q_scale[cutlass.min(row, seqlen_q - 1)] * softmax_scale_log2
                q_scale[r] = scale * Float32(policy.score_unit)
            state = policy.new_state()
            out = policy.new_output(tid)
            v_scale = self.mainloop.consume(
                frags,
                (q_scale, m_k_scale[None, head_k, batch], m_v_scale[None, head_k, batch]),
                (state, limits),
                out,
                pipe_q,
                pipe_k,
                pipe_v,
                blocks,
                masked_blocks,
            )
            self.epilogue(
                out, state[0], limits, v_scale, softmax_scale, row0, warpgroup, warp_idx, tid,
                s_o, atom_o, m_o[None, None, head, batch], m_block,
                m_lse[None, head, batch], m_lse_add[None, head, batch],
            )  # fmt: skip

    def ring(self, barriers, stages: int, tx_bytes: int):
        """A TMA ring: one producer thread arrives with the byte count, one lane of each consumer warp releases."""
        return pl.PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=pl.CooperativeGroup(pl.Agent.Thread),
            consumer_group=pl.CooperativeGroup(pl.Agent.Thread, 4 * self.cfg.consumer_warpgroups),
            tx_count=tx_bytes,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            mcast_mode_mn=(0, 1),
            defer_sync=True,  # one fence and one CTA barrier for all rings, in the kernel
        )

    @cute.jit
    def fill_sum_rows(self, s_v: cute.Tensor, tid: Int32):
        """Rows head_dim .. head_dim + 7 of every V^T stage: ones, then zeros. TMA never writes them."""
        cfg = self.cfg
        total = SUM_ROWS * cfg.tile_n * cfg.kv_stages
        for t in cutlass.range_constexpr(cute.ceil_div(total, cfg.threads)):
            i = t * cfg.threads + tid
            if i < total:
                row = i % SUM_ROWS
                key = i // SUM_ROWS % cfg.tile_n
                value = Float32(1.0) if row == 0 else Float32(0.0)
                s_v[cfg.head_dim + row, key, i // (SUM_ROWS * cfg.tile_n)] = value.to(F8)
        cute.arch.fence_proxy("async.shared", space="cta")  # WGMMA reads through the async proxy

    @cute.jit
    def epilogue(
        self,
        out,
        reference: cute.Tensor,
        limits,
        v_scale: Float32,
        softmax_scale: Float32,
        row0: Int32,
        warpgroup: Int32,
        warp_idx: Int32,
        tid: Int32,
        s_o: cute.Tensor,
        atom_o: cute.CopyAtom,
        g_o: cute.Tensor,
        m_block: Int32,
        g_lse: cute.Tensor,
        g_lse_add: cute.Tensor,
    ):
        """Normalise, write lse, and send O registers -> shared memory -> TMA store, each warpgroup its 64 rows.

        TMA drops rows past seqlen_q. g_o is (seqlen_q, head_dim), g_lse and g_lse_add (seqlen_q,).
        """
        cfg, policy = self.cfg, self.policy
        lse = cute.make_rmem_tensor(2, Float32)
        policy.finish(out, reference, limits, lse, v_scale)
        if cute.arch.lane_idx() % 4 == 0:  # the four lanes of a row hold the same value
            for r in cutlass.range_constexpr(2):
                row = row0 + ROW_STEP * r
                if row < g_lse.shape[0]:
                    shifted = lse[r] + softmax_scale * g_lse_add[row]  # may be NaN; a row without keys is not
                    g_lse[row] = shifted if first_hidden_key(limits, r, cfg.causal) > 0 else lse[r]
        # all consumers: none reads the K ring any more, where O goes
        pl.NamedBarrier(
            barrier_id=Barrier.EPILOGUE, num_threads=128 * cfg.consumer_warpgroups
        ).arrive_and_wait()
        part = cfg.head_dim // cfg.pv_splits
        copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_type)
        one_warpgroup = cute.make_tiled_mma(
            cute.make_mma_atom(wg.MmaF8Op(F8, F8, Float32, (64, part), wg.OperandSource.RMEM,
                                          cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.K))
        )  # fmt: skip
        tiled_copy = cute.make_tiled_copy_C(copy_atom, one_warpgroup).get_slice(tid % 128)
        for i in cutlass.range_constexpr(cfg.pv_splits):
            values = cute.make_tensor(
                out[i].iterator, cute.make_layout(((2, 2, part // 8), 1, 1), stride=((1, 2, 4), 0, 0))
            )  # without the sum columns
            narrow = cute.make_rmem_tensor_like(values, self.out_type)
            narrow.store(values.load().to(self.out_type))
            target = cute.local_tile(s_o[None, None, warpgroup], (64, part), (0, i))
            cute.copy(copy_atom, tiled_copy.retile(narrow), tiled_copy.partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")  # the TMA store reads through the async proxy
        cute.arch.barrier(
            barrier_id=Barrier.STORE + warpgroup, number_of_threads=128
        )  # the warpgroup has staged
        if warp_idx % 4 == 0:
            g_tile = cute.local_tile(
                g_o, (64, cfg.head_dim), (m_block * cfg.consumer_warpgroups + warpgroup, 0)
            )
            t_s, t_g = cpasync.tma_partition(
                atom_o, 0, cute.make_layout(1), cute.group_modes(s_o[None, None, warpgroup], 0, 2),
                cute.group_modes(g_tile, 0, 2),
            )  # fmt: skip
            cute.copy(atom_o, t_s, t_g)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the read
