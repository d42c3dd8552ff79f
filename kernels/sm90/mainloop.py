"""Producer and consumer of the Hopper forward: the loop over key tiles.

Rings (PipelineTmaAsync; an mbarrier pair "full" / "empty" for each stage):

    name  stages     producer              full: arrives, bytes                 empty: arrives
    Q     q_stages   warp 0 of producer    TMA, tile_m * head_dim_padded        one lane of each consumer warp
    K     kv_stages  warp 0 of producer    TMA, tile_n * head_dim_padded        one lane of each consumer warp
    V     kv_stages  warp 0 of producer    TMA, v_columns * tile_n (the 8-bit   one lane of each consumer warp
                                           sum rows are written once)
    tile  1          warp 1 of producer    all its lanes, behind their writes   all threads of the consumers

Bytes are elements times their size. The last ring is for where a tile is (`FwdSm90.place`) and, in 8 bits, the scales
it begins with (`Fp8Policy.stage_inputs`); with `varlen` there is another one for the place, common/varlen.py. Named
barriers: see `Barrier`. The rings go on from one work tile to the next: the producer fetches Q, K and V of the next
tile while the consumers finish this one, and the warpgroups do not wait for each other but for their turns, where they
have them.

8 bits. Steady state of one consumer warpgroup, key tiles n = last .. 0:

    QK(n) | softmax(n), pack(n) | PV(n) | fold(n)

A product with nothing queued behind it costs its drain, so two splits fill the chain's gaps (see FwdConfig):

    qk_splits   QK of a tile is issued in parts of its keys: softmax of a part runs under the product of the next
    pv_part     PV in parts of the value dimension; of four parts, one is folded under the product of the next

S of a tile and the parts of T = P V share registers; O and P are there all along. The tensor core interleaves the
products of the warpgroups as it likes.

16 bits, with overlap (FlashAttention-3, arXiv 2407.08608, algorithm 2); nothing is in flight where the loop turns:

    tensor core   QK(n) PV(n+1) .............| QK(n-1) PV(n)
    warpgroup           | softmax(n) ....... | pack(n), rescale O |

and with ping-pong (section 3.1), a warpgroup issues QK(n) and PV(n+1) in its turn, which it then gives to the next: the
softmax of one runs under the products of the others. Without overlap a step is QK(n), softmax(n), PV(n), and a turn is
PV(n) and QK(n-1).
"""

from __future__ import annotations

import enum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.mask import mask_half_scores, mask_scores
from ..common.scores import rows
from ..common.varlen import FAR, ragged_coord
from ..config import V_SCALE_GROUP, Fwd16Config, FwdConfig
from .policy_16bit import Policy16bit
from .policy_fp8 import Fp8Policy

V_SCALE_SHIFT = V_SCALE_GROUP.bit_length() - 1  # key position -> its V scale


class Barrier(enum.IntEnum):
    """Named barriers of the CTA (0 is sync_threads)."""

    # + warpgroup: its 128 threads; the rows of O staged before have left, or those of now are staged
    STORE = 1
    TURN = 5  # + warpgroup: it and the one before it, 256 threads; the warpgroup may issue its products


class Mainloop:
    """What is the same for every precision; methods are traced into the kernel. A subclass has `consume`."""

    def __init__(self, cfg: FwdConfig | Fwd16Config, policy: Fp8Policy | Policy16bit):
        self.cfg = cfg
        self.policy = policy
        # Q is released under the last step: where it has one stage, that of the next tile comes in time
        self.q_early = cfg.q_stages == 1 and (cfg.overlap if isinstance(cfg, Fwd16Config) else not cfg.window)
        # CTAs that a load of K or V goes to
        self.receivers = None if cfg.cluster == 1 else cutlass.Int16((1 << cfg.cluster) - 1)

    # -- producer ---------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, load_q, load_k, load_v, pipes, states, blocks: Int32, first: Int32, keys):
        """Issue the TMA loads of one work tile, key blocks blocks - 1 .. first; returns the pipeline states. Called by
        one whole warp.

        load_q/k/v are (copy atom, global partition, shared partition); V's tile comes in boxes of `v_box` keys.
        pipes are those of Q, K, V (and more), states the producer's of Q and of K and V. keys is (first key, keys),
        which the loads need with `varlen`.
        """
        atom_q, gq, sq = load_q
        pipe_q = pipes[0]
        state_q, state = states
        # Q after the first K: where Q has one stage, it is free only when the tile before has had its last product.
        self.load_keys(load_k, pipes, state, blocks - 1, keys)
        pipe_q.producer_acquire(state_q)  # waits until all consumer warps have released the stage's Q
        cute.copy(atom_q, gq, sq[None, state_q.index], tma_bar_ptr=pipe_q.producer_get_barrier(state_q))
        state_q.advance()
        self.load_values(load_v, pipes, state, blocks - 1, keys)
        state.advance()
        for j in cutlass.range(1, blocks - first, unroll=1):
            self.load_keys(load_k, pipes, state, blocks - 1 - j, keys)
            self.load_values(load_v, pipes, state, blocks - 1 - j, keys)
            state.advance()
        return state_q, state

    @cute.jit
    def source(self, g: cute.Tensor, n: Int32, box: cutlass.Constexpr, keys) -> cute.Tensor:
        """Box n of K or V, of `box` keys, in the global partition; keys None where that begins with the sequence."""
        if const_expr(self.cfg.varlen and keys is not None):
            key0, seqlen_k = keys
            found = g[(None, *ragged_coord(key0, seqlen_k, n * box, box, FAR), FAR)]
        else:
            found = g[None, n]
        return found

    @cute.jit
    def load_keys(self, load, pipes, state, n: Int32, keys):
        """K of key tile n into the stage of `state`."""
        atom, g, s = load
        pipes[1].producer_acquire(state)  # waits until all consumer warps have released this stage's K
        cute.copy(
            atom,
            self.source(g, n, self.cfg.tile_n, keys),
            s[None, state.index],
            tma_bar_ptr=pipes[1].producer_get_barrier(state),
            mcast_mask=self.receivers,
        )

    @cute.jit
    def load_values(self, load, pipes, state, n: Int32, keys):
        """V of key tile n into the stage of `state`."""
        atom, g, s = load
        boxes = cute.size(s, mode=[1])
        keys = None if const_expr(self.cfg.padded_v) else keys
        pipes[2].producer_acquire(state)  # waits until all consumer warps have released this stage's V
        for c in cutlass.range_constexpr(boxes):
            cute.copy(
                atom,
                self.source(g, n * boxes + c, self.cfg.v_box, keys),
                s[None, c, state.index],
                tma_bar_ptr=pipes[2].producer_get_barrier(state),
                mcast_mask=self.receivers,
            )

    # -- consumer ---------------------------------------------------------------------------------------------

    def start(self):
        """What the consumers do before their first work tile."""

    @cute.jit
    def begin(self, frags, pipes, states, key_blocks):
        """Begin a work tile, whose Q is there. Returns (fragments with this Q, K/V stage of its first block, that block
        + 1)."""
        _, pipe_k, pipe_v = pipes[:3]
        state_q, stage = states
        blocks, passed = key_blocks[0], key_blocks[1]
        q_frag, k_frag, v_frags = frags
        if const_expr(self.cfg.skips_keys or (self.cfg.cluster > 1 and self.cfg.causal)):
            # Blocks for other warpgroups, or another tile of the unit: the TMA loads of both CTAs fill them here, too,
            # and the producers of both wait for all warps to release them, unread or not.
            for _ in cutlass.range(passed, unroll=1):
                pipe_k.consumer_wait(stage)
                pipe_k.consumer_release(stage)
                pipe_v.consumer_wait(stage)
                pipe_v.consumer_release(stage)
                stage.advance()
            blocks = blocks - passed
        return (q_frag[None, None, None, state_q.index], k_frag, v_frags), stage, blocks

    @cute.jit
    def end(self, pipes, states):
        """Let Q of a later work tile in."""
        state_q, stage = states
        if const_expr(not self.q_early):
            pipes[0].consumer_release(state_q)  # one lane of each warp: it reads this Q no more
        state_q.advance()
        return state_q, stage


class Mainloop8bit(Mainloop):
    """Consumer of 8-bit operands."""

    @cute.jit
    def load_scales(self, n: Int32, scales):
        """Scales of key tile n: (tile_n / 64,) of K and (1,) of V; scales see `consume`.

        One vector load of K's; it may reach past the last group (the caller pads the row).
        """
        k_scales, v_scales = scales[3:5]
        groups = self.cfg.k_groups
        k_scale, v_scale = cute.make_rmem_tensor(groups, Float32), cute.make_rmem_tensor(1, Float32)
        wide = 4 * (groups & -groups)  # bytes that every tile's first scale is aligned to
        source = (k_scales.iterator + n * groups).align(wide)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(groups)), k_scale)
        v_scale[0] = v_scales[(n * self.cfg.tile_n) >> V_SCALE_SHIFT]
        return k_scale, v_scale

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
        pipes,
        state_q,
        stage,
    ):
        """One key tile; nothing is in flight before or after. Returns the next stage.

        stage is the consumer's pipeline state of K and V, whose rings go in step.
        """
        cfg, policy = self.cfg, self.policy
        pipe_q, pipe_k, pipe_v = pipes[:3]
        q_frag, k_frag, v_frags = frags
        q_scale, k_scale, v_scale = scales[:3]
        state, limits = softmax_state
        scores = policy.new_scores()
        pairs = policy.new_pairs()
        # Scales are loaded a tile ahead: what a step reads for itself, the assembler waits for before it issues Q K^T.
        # Under the last part's softmax; S in one piece leaves no registers for them until it is packed. The last step
        # reads the first tile's once more.
        ahead = cfg.qk_splits > 1
        pipe_k.consumer_wait(stage)  # TMA has filled K of this tile
        for part in cutlass.range_constexpr(cfg.qk_splits):
            policy.scores(part, scores[part], q_frag, k_frag, stage.index)
        for part in cutlass.range_constexpr(cfg.qk_splits):
            wg.wait_group(cfg.qk_splits - 1 - part)  # S of this part is complete, those behind it go on
            if const_expr(part == cfg.qk_splits - 1):
                pipe_k.consumer_release(stage)  # one lane of each warp: it reads this K no more
                if const_expr(self.q_early):
                    if n == 0:
                        pipe_q.consumer_release(state_q)  # likewise Q, under the rest of the last step
                if const_expr(ahead):
                    next_scales = self.load_scales(cutlass.max(n - 1, 0), scales)
            s = scores[part]
            policy.to_float(s)
            if const_expr(cfg.adjusts):
                policy.adjust(part, s, n, k_scale, scales, limits)
            if const_expr(masking):
                column0 = n * cfg.tile_n + part * policy.part_keys + cute.arch.lane_idx() % 4 * 2
                if const_expr(cfg.half_scores):
                    mask_half_scores(cute.recast_tensor(s, Uint32), limits, column0, cfg)
                else:
                    mask_scores(rows(s), limits, column0, cfg)
            policy.softmax(part, s, pairs, state, q_scale, k_scale)
        policy.pack(scores[0], pairs, p)
        if const_expr(not ahead):
            next_scales = self.load_scales(cutlass.max(n - 1, 0), scales)
        v_unit = state[3]
        ratio = v_unit[0] * cute.arch.rcp_approx(v_scale[0])
        v_unit[0] = v_scale[0]
        v_scale[0] = next_scales[1][0]
        for g in cutlass.range_constexpr(cfg.k_groups):
            k_scale[g] = next_scales[0][g]
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
        return stage

    @cute.jit
    def consume(self, frags, scales, softmax_state, out, pipes, states, key_blocks):
        """All key tiles of one work tile, from the highest keys down.

        frags (Q, K, V parts), scales (q_scale (2,), scales of the key tile to come, (tile_n / 64,) of K and (1,) of V,
        those of all, and what else `Fp8Policy.tile_inputs` returns), softmax_state (the policy's state, limits of the
        mask), out: FP32 accumulators, updated in place. pipes are those of Q, K, V, states the consumer's of Q and of K
        and V, key_blocks see scheduler.py. Returns the states.
        """
        state_q, _ = states
        p = self.policy.new_p()
        frags, stage, blocks = self.begin(frags, pipes, states, key_blocks)
        _, _, masked, plain_end, last = key_blocks
        if const_expr(not self.cfg.window):
            plain_end = blocks
        state, _ = softmax_state
        k_scale, v_scale, k_scales = scales[1:4]
        if const_expr(self.cfg.varlen):
            found, first_v_scale = self.load_scales(blocks - 1, scales)
            v_scale[0] = first_v_scale[0]
            for g in cutlass.range_constexpr(self.cfg.k_groups):
                # see `Fp8Policy.stage_inputs`
                seen = (blocks - 1) * self.cfg.k_groups + g < k_scales.shape[0]
                k_scale[g] = found[g] if seen else Float32(1.0)
        state[3][0] = v_scale[0]
        for j in cutlass.range(masked, unroll=1):
            stage = self.step(
                True, blocks - 1 - j, frags, scales, softmax_state, out, p, pipes, state_q, stage
            )
        for j in cutlass.range(masked, plain_end, unroll=1):
            stage = self.step(
                False, blocks - 1 - j, frags, scales, softmax_state, out, p, pipes, state_q, stage
            )
        if const_expr(self.cfg.window):
            for j in cutlass.range(plain_end, blocks - last, unroll=1):
                stage = self.step(
                    True, blocks - 1 - j, frags, scales, softmax_state, out, p, pipes, state_q, stage
                )
        return self.end(pipes, (state_q, stage))


class Mainloop16bit(Mainloop):
    """Consumer of 16-bit operands."""

    @cute.jit
    def await_turn(self):
        """With ping-pong, wait until the warpgroup before this one has issued its products."""
        if const_expr(self.cfg.pingpong):
            # with the arrivals of `pass_turn`: 128 threads that wait, 128 that do not
            cute.arch.barrier(barrier_id=Barrier.TURN + self.warpgroup(), number_of_threads=256)

    @cute.jit
    def pass_turn(self):
        """With ping-pong, let the warpgroup behind this one issue its products."""
        if const_expr(self.cfg.pingpong):
            behind = (self.warpgroup() + 1) % self.cfg.consumer_warpgroups
            cute.arch.barrier_arrive(barrier_id=Barrier.TURN + behind, number_of_threads=256)

    @cute.jit
    def start(self):
        """The last warpgroup gives the first its first turn; at the end of the kernel one turn is left over."""
        if const_expr(self.cfg.pingpong):
            if self.warpgroup() == self.cfg.consumer_warpgroups - 1:
                self.pass_turn()

    @cute.jit
    def warpgroup(self) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4

    @cute.jit
    def scores(self, masking: cutlass.Constexpr, n: Int32, s: cute.Tensor, limits, inputs, state):
        """S of key tile n, complete, -> P in place."""
        self.policy.adjust(s, n, inputs)
        if const_expr(masking):
            column0 = n * self.cfg.tile_n + cute.arch.lane_idx() % 4 * 2
            mask_scores(rows(s), limits, column0, self.cfg)
        self.policy.softmax(masking, s, state, inputs[0])

    @cute.jit
    def first_step(self, n: Int32, frags, inputs, softmax_state, p: cute.Tensor, pipes, stage):
        """With overlap: Q K^T and softmax of the first key tile. Returns the next stage of K."""
        policy = self.policy
        pipe_k = pipes[1]
        q_frag, k_frag, _ = frags
        state, limits = softmax_state
        s = policy.new_scores()
        pipe_k.consumer_wait(stage)  # TMA has filled K of this tile
        policy.scores(s, q_frag, k_frag, stage.index)
        wg.wait_group(0)  # S is complete
        pipe_k.consumer_release(stage)  # one lane of each warp: it reads this K no more
        self.scores(True, n, s, limits, inputs, state)
        policy.pack(s, p)
        stage.advance()
        return stage

    @cute.jit
    def overlapped_step(
        self,
        masking: cutlass.Constexpr,
        n: Int32,
        frags,
        inputs,
        softmax_state,
        out,
        p: cute.Tensor,
        pipes,
        stages,
    ):
        """Q K^T and softmax of key tile n, and P V of the tile before, whose P is in `p`; nothing is in flight before
        or after. Returns the next stages of K and V.
        """
        policy = self.policy
        _, pipe_k, pipe_v = pipes[:3]
        q_frag, k_frag, v_frag = frags
        state, limits = softmax_state
        stage_k, stage_v = stages
        s = policy.new_scores()
        pipe_k.consumer_wait(stage_k)  # TMA has filled K of this tile
        self.await_turn()
        policy.scores(s, q_frag, k_frag, stage_k.index)
        pipe_v.consumer_wait(stage_v)  # TMA has filled V of the tile before
        policy.product(p, v_frag, stage_v.index, out)
        self.pass_turn()
        wg.wait_group(1)  # S is complete, P V goes on
        pipe_k.consumer_release(stage_k)  # one lane of each warp: it reads this K no more
        self.scores(masking, n, s, limits, inputs, state)
        wg.wait_group(0)  # P V is complete: O and P are free
        pipe_v.consumer_release(stage_v)  # likewise its V
        policy.pack(s, p)  # before O: what is behind a branch is also behind the last exponential
        policy.rescale(out, state)
        stage_k.advance()
        stage_v.advance()
        return stage_k, stage_v

    @cute.jit
    def last_step(self, frags, out, p: cute.Tensor, pipes, stage):
        """With overlap: P V of the last key tile."""
        pipe_v = pipes[2]
        pipe_v.consumer_wait(stage)  # TMA has filled V of the last tile
        self.policy.product(p, frags[2], stage.index, out)
        wg.wait_group(0)  # O is complete
        pipe_v.consumer_release(stage)  # one lane of each warp: it reads this V no more

    @cute.jit
    def step(
        self,
        masking: cutlass.Constexpr,
        n: Int32,
        frags,
        inputs,
        softmax_state,
        out,
        p: cute.Tensor,
        pipes,
        stage,
    ):
        """Without overlap: key tile n; nothing is in flight before or after. Returns the next stage of K and V."""
        policy = self.policy
        _, pipe_k, pipe_v = pipes[:3]
        q_frag, k_frag, v_frag = frags
        state, limits = softmax_state
        s = policy.new_scores()
        pipe_k.consumer_wait(stage)  # TMA has filled K of this tile
        policy.scores(s, q_frag, k_frag, stage.index)
        self.pass_turn()
        wg.wait_group(0)  # S is complete
        pipe_k.consumer_release(stage)  # one lane of each warp: it reads this K no more
        self.scores(masking, n, s, limits, inputs, state)
        policy.pack(s, p)
        policy.rescale(out, state)
        pipe_v.consumer_wait(stage)  # TMA has filled V of this tile
        self.await_turn()  # for this product and Q K^T of the next tile
        policy.product(p, v_frag, stage.index, out)
        wg.wait_group(0)  # P V is complete: O and P are free
        pipe_v.consumer_release(stage)  # likewise its V
        stage.advance()
        return stage

    @cute.jit
    def consume(self, frags, inputs, softmax_state, out, pipes, states, key_blocks):
        """All key tiles of one work tile, from the highest keys down; arguments as those of `Mainloop8bit.consume`."""
        cfg = self.cfg
        state_q, _ = states
        p = self.policy.new_p()
        frags, stage, blocks = self.begin(frags, pipes, states, key_blocks)
        _, _, masked, plain_end, last = key_blocks
        steps = blocks - last
        if const_expr(cfg.overlap):
            stages = (stage, stage.clone())
            stage = self.first_step(blocks - 1, frags, inputs, softmax_state, p, pipes, stages[0])
            stages = (stage, stages[1])
            first = cutlass.max(masked, 1)
            if const_expr(cfg.causal or cfg.window):  # else one block at most has a mask
                for j in cutlass.range(1, first, unroll=1):
                    stages = self.overlapped_step(
                        True, blocks - 1 - j, frags, inputs, softmax_state, out, p, pipes, stages
                    )
            for j in cutlass.range(first, plain_end, unroll=1):
                stages = self.overlapped_step(
                    False, blocks - 1 - j, frags, inputs, softmax_state, out, p, pipes, stages
                )
            if const_expr(cfg.window):
                for j in cutlass.range(cutlass.max(first, plain_end), steps, unroll=1):
                    stages = self.overlapped_step(
                        True, blocks - 1 - j, frags, inputs, softmax_state, out, p, pipes, stages
                    )
            stage, stage_v = stages
            if const_expr(self.q_early):
                pipes[0].consumer_release(state_q)  # one lane of each warp: it reads this Q no more
            self.last_step(frags, out, p, pipes, stage_v)
        else:
            self.await_turn()
            for j in cutlass.range(masked, unroll=1):
                stage = self.step(True, blocks - 1 - j, frags, inputs, softmax_state, out, p, pipes, stage)
            for j in cutlass.range(masked, plain_end, unroll=1):
                stage = self.step(False, blocks - 1 - j, frags, inputs, softmax_state, out, p, pipes, stage)
            if const_expr(cfg.window):
                for j in cutlass.range(plain_end, steps, unroll=1):
                    stage = self.step(
                        True, blocks - 1 - j, frags, inputs, softmax_state, out, p, pipes, stage
                    )
            self.pass_turn()
        return self.end(pipes, (state_q, stage))
