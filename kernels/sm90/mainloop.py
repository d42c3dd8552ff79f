"""Producer and consumer of the Hopper forward: the loop over key tiles.

Rings (PipelineTmaAsync; an mbarrier pair "full" / "empty" for each stage):

    name  stages     producer              full: arrives, bytes                 empty: arrives
    Q     1          warp 0 of producer    TMA, tile_m * head_dim               never reused
    K     kv_stages  warp 0 of producer    TMA, tile_n * head_dim               one lane of each consumer warp
    V     kv_stages  warp 0 of producer    TMA, head_dim * tile_n (the sum      one lane of each consumer warp
                                           rows of the tile are written once)

Named barriers: see `Barrier`.

Steady state of one consumer warpgroup, key tiles n = last .. 0:

    serial    QK(n) | softmax(n), pack(n) | PV(n) | fold(n)
    overlap   softmax(n), pack(n) | issue PV(n), QK(n-1) | fold(n) under QK(n-1)

Overlap keeps a block of two products queued behind one another, long enough for the other warpgroup's softmax; it
needs S, T, O and P in registers at once. Serial needs S or T, so a tile can be twice as wide.

With ping-pong the warpgroups take turns at the tensor core: a turn is P V of a tile and the issue of the next Q K^T, so
that the softmax of one warpgroup runs under the products of the other. A turn ends

    serial    when Q K^T of the next tile has been issued (it goes on under the other's P V)
    overlap   when P V is complete (Q K^T, queued behind it, goes on)

Without ping-pong the hardware interleaves the products of the warpgroups as it likes.
"""

from __future__ import annotations

import enum

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.mask import mask_scores
from ..config import V_SCALE_GROUP, FwdConfig
from .policy_fp8 import Fp8Policy, rows


class Barrier(enum.IntEnum):
    """Named barriers of the CTA (0 is sync_threads)."""

    EPILOGUE = 1  # all consumers: the K ring is no longer read, O may be staged in it
    STORE = 2  # + warpgroup: the 128 threads of it have staged their rows of O
    TURN = 6  # + warpgroup: its turn at the tensor core; waited for by it, arrived at by its predecessor


class Mainloop:
    """Roles of one CTA for one work tile; methods are traced into the kernel."""

    def __init__(self, cfg: FwdConfig, policy: Fp8Policy):
        self.cfg = cfg
        self.policy = policy

    # -- producer ---------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, load_q, load_k, load_v, pipe_q, pipe_k, pipe_v, blocks: Int32):
        """Issue every TMA load of the tile. Called by one whole warp.

        load_q/k/v are (copy atom, global partition, shared partition); V's tile comes in boxes of 128 keys.
        """
        cfg = self.cfg
        atom_q, gq, sq = load_q
        atom_k, gk, sk = load_k
        atom_v, gv, sv = load_v
        boxes = cute.size(sv, mode=[1])
        state_q = pl.make_pipeline_state(pl.PipelineUserType.Producer, 1)
        pipe_q.producer_acquire(state_q)
        cute.copy(atom_q, gq, sq, tma_bar_ptr=pipe_q.producer_get_barrier(state_q))
        state = pl.make_pipeline_state(pl.PipelineUserType.Producer, cfg.kv_stages)
        for j in cutlass.range(blocks, unroll=1):
            n = blocks - 1 - j
            pipe_k.producer_acquire(state)  # waits until all consumer warps have released this stage's K
            cute.copy(
                atom_k, gk[None, n], sk[None, state.index], tma_bar_ptr=pipe_k.producer_get_barrier(state)
            )
            pipe_v.producer_acquire(state)  # likewise its V
            for c in cutlass.range_constexpr(boxes):
                cute.copy(
                    atom_v,
                    gv[None, n * boxes + c],
                    sv[None, c, state.index],
                    tma_bar_ptr=pipe_v.producer_get_barrier(state),
                )
            state.advance()
        # the producer may not leave before its last loads have been consumed
        state_v = state.clone()
        pipe_k.producer_tail(state)
        pipe_v.producer_tail(state_v)

    # -- turns ------------------------------------------------------------------------------------------------

    @cute.jit
    def take_turn(self, warpgroup: Int32):
        """Wait for the predecessor's `give_turn` (256 threads: 128 that wait here, 128 that arrive there)."""
        if const_expr(self.cfg.pingpong):
            cute.arch.barrier(barrier_id=Barrier.TURN + warpgroup, number_of_threads=256)

    @cute.jit
    def give_turn(self, warpgroup: Int32):
        """Let the next warpgroup issue its products."""
        if const_expr(self.cfg.pingpong):
            following = warpgroup + 1
            if following == self.cfg.consumer_warpgroups:
                following = Int32(0)
            cute.arch.barrier_arrive(barrier_id=Barrier.TURN + following, number_of_threads=256)

    # -- consumer ---------------------------------------------------------------------------------------------

    @cute.jit
    def tile_scales(self, masking: cutlass.Constexpr, n: Int32, k_scales: cute.Tensor, v_scales: cute.Tensor):
        """Scales of key tile n: ((tile_n / 64,) of K, one of V).

        One vector load; it may reach past the last group (the caller pads the row), and what it finds there must
        not make NaN of a masked score.
        """
        groups = self.cfg.k_groups
        k_scale = cute.make_rmem_tensor(groups, Float32)
        wide = 4 * (groups & -groups)  # bytes that every tile's first scale is aligned to
        source = (k_scales.iterator + n * groups).align(wide)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(groups)), k_scale)
        if const_expr(masking):
            for g in cutlass.range_constexpr(groups):
                k_scale[g] = k_scale[g] if n * groups + g < k_scales.shape[0] else Float32(1.0)
        return k_scale, v_scales[(n * self.cfg.tile_n) >> (V_SCALE_GROUP.bit_length() - 1)]

    @cute.jit
    def masked(self, masking: cutlass.Constexpr, acc: cute.Tensor, n: Int32, limits):
        if const_expr(masking):
            column0 = n * self.cfg.tile_n + cute.arch.lane_idx() % 4 * 2
            mask_scores(rows(acc), limits, column0, self.cfg.causal)

    @cute.jit
    def serial_step(
        self,
        masking: cutlass.Constexpr,
        n: Int32,
        warpgroup: Int32,
        frags,
        scales,
        softmax_state,
        out,
        p: cute.Tensor,
        v_prev: Float32,
        pipe_k,
        pipe_v,
        state_k,
        state_v,
    ):
        """One key tile, its products one after the other. Returns (V scale of the tile, pipeline states)."""
        policy = self.policy
        q_frag, k_frag, v_frags = frags
        q_scale, k_scales, v_scales = scales
        state, limits = softmax_state
        k_scale, v_scale = self.tile_scales(masking, n, k_scales, v_scales)  # the loads land under Q K^T
        acc = policy.new_scores()
        pairs = policy.new_pairs()
        pipe_k.consumer_wait(state_k)  # TMA has filled K of this tile
        policy.scores(acc, q_frag, k_frag, state_k.index)
        self.give_turn(warpgroup)  # taken before the P V of the tile before, or before the loop
        wg.wait_group(0)
        pipe_k.consumer_release(state_k)
        state_k.advance()
        s = policy.as_float(acc)
        self.masked(masking, s, n, limits)
        policy.softmax(s, pairs, state, q_scale, k_scale)
        policy.pack(s, pairs, p)
        ratio = v_prev * cute.arch.rcp_approx(v_scale)
        pipe_v.consumer_wait(state_v)  # TMA has filled V of this tile
        self.take_turn(warpgroup)  # kept over the folds until the next Q K^T is issued
        for part in cutlass.range_constexpr(self.cfg.pv_splits):
            tile = policy.product(part, p, v_frags[part], state_v.index)
            wg.wait_group(0)
            policy.fold(part, out[part], tile, state[1], ratio)
        pipe_v.consumer_release(state_v)
        state_v.advance()
        return v_scale, state_k, state_v

    @cute.jit
    def overlap_step(
        self,
        masking: cutlass.Constexpr,
        last: cutlass.Constexpr,
        n: Int32,
        warpgroup: Int32,
        frags,
        scales,
        softmax_state,
        acc: cute.Tensor,
        out,
        p: cute.Tensor,
        v_prev: Float32,
        pipe_k,
        pipe_v,
        state_k,
        state_v,
    ):
        """One key tile whose Q K^T is in flight on entry; issues that of the next tile unless this is the last.

        Returns (V scale of the tile, pipeline states).
        """
        policy = self.policy
        q_frag, k_frag, v_frags = frags
        q_scale, k_scales, v_scales = scales
        state, limits = softmax_state
        k_scale, v_scale = self.tile_scales(masking, n, k_scales, v_scales)  # the loads land under Q K^T
        pairs = policy.new_pairs()
        wg.wait_group(0)  # S of tile n
        pipe_k.consumer_release(state_k)
        state_k.advance()
        s = policy.as_float(acc)
        self.masked(masking, s, n, limits)
        policy.softmax(s, pairs, state, q_scale, k_scale)
        policy.pack(s, pairs, p)
        ratio = v_prev * cute.arch.rcp_approx(v_scale)
        pipe_v.consumer_wait(state_v)  # TMA has filled V of this tile
        self.take_turn(warpgroup)
        tile = policy.product(0, p, v_frags[0], state_v.index)
        if const_expr(not last):
            pipe_k.consumer_wait(state_k)  # TMA has filled K of the next tile
            policy.scores(acc, q_frag, k_frag, state_k.index)
        wg.wait_group(0 if const_expr(last) else 1)  # P V of tile n; Q K^T of the next goes on
        self.give_turn(warpgroup)
        pipe_v.consumer_release(state_v)
        state_v.advance()
        policy.fold(0, out[0], tile, state[1], ratio)
        return v_scale, state_k, state_v

    @cute.jit
    def consume(
        self,
        warpgroup: Int32,
        frags,
        scales,
        softmax_state,
        out,
        pipe_q,
        pipe_k,
        pipe_v,
        blocks: Int32,
        masked_blocks: Int32,
    ):
        """All key tiles of the work tile, from the highest keys down. Returns the V scale O is in units of.

        frags (Q, K, V parts), scales (q_scale (2,), k_scale (groups,), v_scale (groups,)), softmax_state
        (the policy's state, limits of the mask), out: FP32 accumulators, updated in place.
        """
        cfg, policy = self.cfg, self.policy
        state_k = pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.kv_stages)
        state_v = pl.make_pipeline_state(pl.PipelineUserType.Consumer, cfg.kv_stages)
        p = policy.new_p()
        if const_expr(cfg.pingpong):
            if warpgroup == cfg.consumer_warpgroups - 1:
                self.give_turn(Int32(cfg.consumer_warpgroups - 1))  # warpgroup 0 goes first
        pipe_q.consumer_wait(pl.make_pipeline_state(pl.PipelineUserType.Consumer, 1))  # TMA has filled Q
        v_prev = scales[2][(blocks - 1) * cfg.tile_n // V_SCALE_GROUP]
        if const_expr(cfg.overlap):
            acc = policy.new_scores()
            pipe_k.consumer_wait(state_k)  # TMA has filled K of the first tile
            policy.scores(acc, frags[0], frags[1], state_k.index)
            body = blocks - 1
            masked_body = cutlass.min(masked_blocks, body)
            for j in cutlass.range(masked_body, unroll=1):
                v_prev, state_k, state_v = self.overlap_step(
                    True, False, blocks - 1 - j, warpgroup, frags, scales, softmax_state, acc, out, p, v_prev,
                    pipe_k, pipe_v, state_k, state_v,
                )  # fmt: skip
            for j in cutlass.range(masked_body, body, unroll=1):
                v_prev, state_k, state_v = self.overlap_step(
                    False, False, blocks - 1 - j, warpgroup, frags, scales, softmax_state, acc, out, p, v_prev,
                    pipe_k, pipe_v, state_k, state_v,
                )  # fmt: skip
            # masked always: it is one tile, not worth a copy of the code without
            v_prev, state_k, state_v = self.overlap_step(
                True, True, Int32(0), warpgroup, frags, scales, softmax_state, acc, out, p, v_prev,
                pipe_k, pipe_v, state_k, state_v,
            )  # fmt: skip
        else:
            self.take_turn(warpgroup)  # for the first Q K^T
            for j in cutlass.range(masked_blocks, unroll=1):
                v_prev, state_k, state_v = self.serial_step(
                    True, blocks - 1 - j, warpgroup, frags, scales, softmax_state, out, p, v_prev,
                    pipe_k, pipe_v, state_k, state_v,
                )  # fmt: skip
            for j in cutlass.range(masked_blocks, blocks, unroll=1):
                v_prev, state_k, state_v = self.serial_step(
                    False, blocks - 1 - j, warpgroup, frags, scales, softmax_state, out, p, v_prev,
                    pipe_k, pipe_v, state_k, state_v,
                )  # fmt: skip
            self.give_turn(warpgroup)  # taken before the last P V
        if const_expr(cfg.pingpong):
            if warpgroup == 0:
                self.take_turn(Int32(0))  # absorbs the last arrival: the barrier ends as it began
        return v_prev
