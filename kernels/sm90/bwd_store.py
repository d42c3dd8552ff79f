"""End of the main kernel of the 16-bit backward: dK and dV from accumulators to memory. Tensors see bwd.py."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from ..common.varlen import ragged_coord
from ..config import Bwd16Config, swizzle_columns
from .bwd_mainloop import BwdBarrier, BwdMainloop
from .operands import ELEMENTS


class BwdStore:
    """The epilogue of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: Bwd16Config, mainloop: BwdMainloop):
        self.cfg = cfg
        self.dtype = ELEMENTS[cfg.dtype]
        self.mainloop = mainloop

    @cute.jit
    def epilogue(self, gradients, softmax_scale: Float32, shared, stores, place, stored: Int32):
        """dK and dV, registers -> shared memory -> TMA store, each warpgroup its accumulators.

        gradients are the accumulators of dK and dV, shared their tiles in shared memory (without `persistent` K and V,
        which nobody reads any more), stores (copy atom, tensor) of each; place see `BwdProducer`, stored
        `varlen.key_tile`. TMA drops what lies past the keys of the sequence and head_dim.
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
                self.store((i,), own, shared, stores, place, stored)
                if const_expr(i == 0):
                    # the warpgroup: dK has left, and dV comes to its place
                    if warp_idx % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.barrier(barrier_id=BwdBarrier.OWN + warpgroup, number_of_threads=128)
        if const_expr(cfg.out_stages != 1):
            self.store((0, 1), own, shared, stores, place, stored)
        if const_expr(not cfg.persistent):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def store(self, which: cutlass.Constexpr, own, shared, stores, place, stored: Int32):
        """TMA stores of the warpgroup's part of the gradients in `which`, a tuple of 0 (dK) and 1 (dV), which it has
        written to shared memory; own is its tile there. Other arguments see `epilogue`."""
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
            for i in which:
                atom, target = stores[i]
                if const_expr(cfg.varlen):
                    behind = block * 64 - n_block * cfg.tile_n  # keys of the tile before this warpgroup's
                    offset, last = ragged_coord(key0 + n_block * cfg.tile_n, stored, behind, 64, 64)
                    keys = cute.domain_offset((offset, 0), target[None, None, head_k, last])
                    number = Int32(0)
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
