"""Producer and consumer of the Hopper forward: the loop over key tiles.

Rings (PipelineTmaAsync; an mbarrier pair "full" / "empty" for each stage):

    name  stages     producer              full: arrives, bytes                 empty: arrives
    Q     q_stages   warp 0 of producer    TMA, tile_m * head_dim_padded        one lane of each consumer warp
    K     kv_stages  warp 0 of producer    TMA, tile_n * head_dim_padded        one lane of each consumer warp
    V     kv_stages  warp 0 of producer    TMA, head_dim_v * tile_n (the sum    one lane of each consumer warp
                                           rows of the tile are written once)

Named barriers: see `Barrier`. The rings go on from one work tile to the next: the producer fetches Q, K and V of the
next tile while the consumers finish this one, and the warpgroups do not wait for each other.

Steady state of one consumer warpgroup, key tiles n = last .. 0:

    QK(n) | softmax(n), pack(n) | PV(n) | fold(n)

A product with nothing queued behind it costs its drain, so two splits fill the chain's gaps (see FwdConfig):

    qk_splits   QK of a tile is issued in parts of its keys: softmax of a part runs under the product of the next
    pv_splits   PV in parts of the value dimension; of four parts, one is folded under the product of the next

S of a tile and the parts of T = P V share registers; O and P are there all along. The tensor core interleaves the
products of the warpgroups as it likes.
"""

from __future__ import annotations

import enum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.mask import mask_scores
from ..config import V_SCALE_GROUP, FwdConfig
from .policy_fp8 import Fp8Policy, rows

V_SCALE_SHIFT = V_SCALE_GROUP.bit_length() - 1  # key position -> its V scale


class Barrier(enum.IntEnum):
    """Named barriers of the CTA (0 is sync_threads)."""

    STORE = (
        1  # + warpgroup: its 128 threads; the rows of O staged before have left, or those of now are staged
    )


class Mainloop:
    """Roles of one CTA for one work tile after the other; methods are traced into the kernel."""

    def __init__(self, cfg: FwdConfig, policy: Fp8Policy):
        self.cfg = cfg
        self.policy = policy
        self.receivers = (
            None if cfg.cluster == 1 else cutlass.Int16((1 << cfg.cluster) - 1)
        )  # CTAs that a load of K or V goes to

    # -- producer ---------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, load_q, load_k, load_v, pipes, states, blocks: Int32):
        """Issue the TMA loads of one work tile; returns the pipeline states. Called by one whole warp.

        load_q/k/v are (copy atom, global partition, shared partition); V's tile comes in boxes of `v_box` keys.
        pipes are those of Q, K, V, states the producer's of Q and of K and V.
        """
        atom_q, gq, sq = load_q
        pipe_q, _, _ = pipes
        state_q, state = states
        # Q after the first K: where Q has one stage, it is free only when the tile before has had its last product.
        self.load_keys(load_k, pipes, state, blocks - 1)
        pipe_q.producer_acquire(state_q)  # waits until all consumer warps have released the stage's Q
        cute.copy(atom_q, gq, sq[None, state_q.index], tma_bar_ptr=pipe_q.producer_get_barrier(state_q))
        state_q.advance()
        self.load_values(load_v, pipes, state, blocks - 1)
        state.advance()
        for j in cutlass.range(1, blocks, unroll=1):
            self.load_keys(load_k, pipes, state, blocks - 1 - j)
            self.load_values(load_v, pipes, state, blocks - 1 - j)
            state.advance()
        return state_q, state

    @cute.jit
    def load_keys(self, load, pipes, state, n: Int32):
        """K of key tile n into the stage of `state`."""
        atom, g, s = load
        pipes[1].producer_acquire(state)  # waits until all consumer warps have released this stage's K
        cute.copy(
            atom,
            g[None, n],
            s[None, state.index],
            tma_bar_ptr=pipes[1].producer_get_barrier(state),
            mcast_mask=self.receivers,
        )

    @cute.jit
    def load_values(self, load, pipes, state, n: Int32):
        """V of key tile n into the stage of `state`."""
        atom, g, s = load
        boxes = cute.size(s, mode=[1])
        pipes[2].producer_acquire(state)  # waits until all consumer warps have released this stage's V
        for c in cutlass.range_constexpr(boxes):
            cute.copy(
                atom,
                g[None, n * boxes + c],
                s[None, c, state.index],
                tma_bar_ptr=pipes[2].producer_get_barrier(state),
                mcast_mask=self.receivers,
            )

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
        return k_scale, v_scales[(n * self.cfg.tile_n) >> V_SCALE_SHIFT]

    @cute.jit
    def step(
        self,
        masking: cutlass.Constexpr,
        n: Int32,
        frags,
        scales,
        softmax_state,
        out: list,
        p: cute.Tensor,
        v_prev: Float32,
        pipes,
        stage,
    ):
        """One key tile; nothing is in flight before or after. Returns (V scale of the tile, next stage).

        stage is the consumer's pipeline state of K and V, whose rings go in step.
        """
        cfg, policy = self.cfg, self.policy
        _, pipe_k, pipe_v = pipes
        q_frag, k_frag, v_frags = frags
        q_scale, k_scales, v_scales = scales
        state, limits = softmax_state
        k_scale, v_scale = self.tile_scales(masking, n, k_scales, v_scales)  # the loads land under Q K^T
        scores = policy.new_scores()
        pairs = policy.new_pairs()
        pipe_k.consumer_wait(stage)  # TMA has filled K of this tile
        for part in cutlass.range_constexpr(cfg.qk_splits):
            policy.scores(part, scores[part], q_frag, k_frag, stage.index)
        for part in cutlass.range_constexpr(cfg.qk_splits):
            wg.wait_group(cfg.qk_splits - 1 - part)  # S of this part is complete, those behind it go on
            if const_expr(part == cfg.qk_splits - 1):
                pipe_k.consumer_release(stage)  # one lane of each warp: it reads this K no more
            s = scores[part]
            policy.to_float(s)
            if const_expr(masking):
                column0 = n * cfg.tile_n + part * policy.part_keys + cute.arch.lane_idx() % 4 * 2
                mask_scores(rows(s), limits, column0, cfg)
            policy.softmax(part, s, pairs, state, q_scale, k_scale)
        policy.pack(scores[0], pairs, p)
        ratio = v_prev * cute.arch.rcp_approx(v_scale)
        pipe_v.consumer_wait(stage)  # TMA has filled V of this tile
        depth, pv_parts = policy.pv_depth, len(cfg.pv_parts)
        slots = policy.new_slots()
        for part in cutlass.range_constexpr(1 - depth, pv_parts):  # the part that is folded
            issue = part + depth - 1
            if const_expr(issue < pv_parts):
                reuse = n < 0 if const_expr(issue >= depth) else None  # False, which the compiler cannot know
                policy.product(issue, p, v_frags[issue], stage.index, slots[issue % depth], reuse)
            if const_expr(part >= 0):
                wg.wait_group(min(issue, pv_parts - 1) - part)  # this part of T is complete
                if const_expr(part == pv_parts - 1):
                    pipe_v.consumer_release(stage)  # likewise its V
                policy.fold(part, out[part], slots[part % depth], state[1], ratio)
        stage.advance()
        return v_scale, stage

    @cute.jit
    def consume(self, frags, scales, softmax_state, out, pipes, states, key_blocks):
        """All key tiles of one work tile, from the highest keys down.

        frags (Q, K, V parts), scales (q_scale (2,), k_scale (groups,), v_scale (groups,)), softmax_state
        (the policy's state, limits of the mask), out: FP32 accumulators, updated in place. pipes are those of Q, K, V,
        states the consumer's of Q and of K and V, key_blocks see scheduler.py. Returns the V scale O is in units of,
        and the states.
        """
        cfg, policy = self.cfg, self.policy
        pipe_q, pipe_k, pipe_v = pipes
        state_q, stage = states
        blocks, passed, masked = key_blocks
        p = policy.new_p()
        pipe_q.consumer_wait(state_q)  # TMA has filled Q
        q_frag, k_frag, v_frags = frags
        frags = (q_frag[None, None, None, state_q.index], k_frag, v_frags)
        if const_expr(cfg.cluster > 1 and cfg.causal):
            for _ in cutlass.range(passed, unroll=1):  # blocks of another tile of the unit
                pipe_k.consumer_wait(stage)
                pipe_k.consumer_release(stage)
                pipe_v.consumer_wait(stage)
                pipe_v.consumer_release(stage)
                stage.advance()
            blocks = blocks - passed
        v_prev = scales[2][((blocks - 1) * cfg.tile_n) >> V_SCALE_SHIFT]
        for j in cutlass.range(masked, unroll=1):
            v_prev, stage = self.step(
                True, blocks - 1 - j, frags, scales, softmax_state, out, p, v_prev, pipes, stage
            )
        for j in cutlass.range(masked, blocks, unroll=1):
            v_prev, stage = self.step(
                False, blocks - 1 - j, frags, scales, softmax_state, out, p, v_prev, pipes, stage
            )
        pipe_q.consumer_release(state_q)  # one lane of each warp: it reads this Q no more
        state_q.advance()
        return v_prev, (state_q, stage)
