"""Producer and consumer of the Hopper forward: the loop over key tiles.

Rings (PipelineTmaAsync; an mbarrier pair "full" / "empty" for each stage):

    name  stages     producer              full: arrives, bytes                 empty: arrives
    Q     1          warp 0 of producer    TMA, tile_m * head_dim               never reused
    K     kv_stages  warp 0 of producer    TMA, tile_n * head_dim               one lane of each consumer warp
    V     kv_stages  warp 0 of producer    TMA, head_dim * tile_n (the sum      one lane of each consumer warp
                                           rows of the tile are written once)

Named barriers: see `Barrier`.

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
import cutlass.pipeline as pl
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.mask import mask_scores
from ..config import V_SCALE_GROUP, FwdConfig
from .policy_fp8 import Fp8Policy, rows

V_SCALE_SHIFT = V_SCALE_GROUP.bit_length() - 1  # key position -> its V scale


class Barrier(enum.IntEnum):
    """Named barriers of the CTA (0 is sync_threads)."""

    EPILOGUE = 1  # all consumers: the K ring is no longer read, O may be staged in it
    STORE = 2  # + warpgroup: the 128 threads of it have staged their rows of O


class Mainloop:
    """Roles of one CTA for one work tile; methods are traced into the kernel."""

    def __init__(self, cfg: FwdConfig, policy: Fp8Policy):
        self.cfg = cfg
        self.policy = policy

    # -- producer ---------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, load_q, load_k, load_v, pipe_q, pipe_k, pipe_v, blocks: Int32):
        """Issue every TMA load of the tile. Called by one whole warp.

        load_q/k/v are (copy atom, global partition, shared partition); V's tile comes in boxes of `v_box` keys.
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
        pipe_k,
        pipe_v,
        state_k,
        state_v,
    ):
        """One key tile; nothing is in flight before or after. Returns (V scale of the tile, pipeline states)."""
        cfg, policy = self.cfg, self.policy
        q_frag, k_frag, v_frags = frags
        q_scale, k_scales, v_scales = scales
        state, limits = softmax_state
        k_scale, v_scale = self.tile_scales(masking, n, k_scales, v_scales)  # the loads land under Q K^T
        scores = policy.new_scores()
        pairs = policy.new_pairs()
        pipe_k.consumer_wait(state_k)  # TMA has filled K of this tile
        for part in cutlass.range_constexpr(cfg.qk_splits):
            policy.scores(part, scores[part], q_frag, k_frag, state_k.index)
        for part in cutlass.range_constexpr(cfg.qk_splits):
            wg.wait_group(cfg.qk_splits - 1 - part)  # S of this part is complete, those behind it go on
            if const_expr(part == cfg.qk_splits - 1):
                pipe_k.consumer_release(state_k)  # one lane of each warp: it reads this K no more
                state_k.advance()
            s = scores[part]
            policy.to_float(s)
            if const_expr(masking):
                column0 = n * cfg.tile_n + part * policy.part_keys + cute.arch.lane_idx() % 4 * 2
                mask_scores(rows(s), limits, column0, cfg.causal)
            policy.softmax(part, s, pairs, state, q_scale, k_scale)
        policy.pack(scores[0], pairs, p)
        ratio = v_prev * cute.arch.rcp_approx(v_scale)
        pipe_v.consumer_wait(state_v)  # TMA has filled V of this tile
        depth = policy.pv_depth
        slots = policy.new_slots()
        for part in cutlass.range_constexpr(1 - depth, cfg.pv_splits):  # the part that is folded
            issue = part + depth - 1
            if const_expr(issue < cfg.pv_splits):
                reuse = n < 0 if const_expr(issue >= depth) else None  # False, which the compiler cannot know
                policy.product(issue, p, v_frags[issue], state_v.index, slots[issue % depth], reuse)
            if const_expr(part >= 0):
                wg.wait_group(min(issue, cfg.pv_splits - 1) - part)  # this part of T is complete
                if const_expr(part == cfg.pv_splits - 1):
                    pipe_v.consumer_release(state_v)  # likewise its V
                    state_v.advance()
                policy.fold(part, out[part], slots[part % depth], state[1], ratio)
        return v_scale, state_k, state_v

    @cute.jit
    def consume(
        self,
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
        pipe_q.consumer_wait(pl.make_pipeline_state(pl.PipelineUserType.Consumer, 1))  # TMA has filled Q
        v_prev = scales[2][((blocks - 1) * cfg.tile_n) >> V_SCALE_SHIFT]
        for j in cutlass.range(masked_blocks, unroll=1):
            v_prev, state_k, state_v = self.step(
                True, blocks - 1 - j, frags, scales, softmax_state, out, p, v_prev,
                pipe_k, pipe_v, state_k, state_v,
            )  # fmt: skip
        for j in cutlass.range(masked_blocks, blocks, unroll=1):
            v_prev, state_k, state_v = self.step(
                False, blocks - 1 - j, frags, scales, softmax_state, out, p, v_prev,
                pipe_k, pipe_v, state_k, state_v,
            )  # fmt: skip
        return v_prev
