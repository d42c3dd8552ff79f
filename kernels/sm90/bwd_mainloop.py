"""Consumers of the 16-bit backward: the loop over query tiles.

Every warpgroup has 64 keys of the tile and computes S^T = K Q^T and dP^T = V dO^T for them and the tile_m queries of a
step. The accumulators of P^T and dS^T lie as the A operands of dV += P^T dO and dK += dS^T Q want them (see
policy_16bit.py), so both stay in registers. dQ = dS K sums over the keys of all warpgroups: dS goes through shared memory,
and each warpgroup makes its part of dQ (`Bwd16Config.dq_split`), which is added to the sum in memory.

Rings (PipelineTmaAsync; an mbarrier pair "full" / "empty" for each stage):

    name  stages     producer              full: arrives, bytes                        empty: arrives
    Q     q_stages   warp 0 of producer    TMA, tile_m * qk_columns * 2 + tile_m * 4   one lane of each consumer warp
    dO    do_stages  warp 0 of producer    TMA, tile_m * v_columns * 2 + tile_m * 4    one lane of each consumer warp
    K, V  1          warp 0 of producer    TMA, tile_n * columns * 2                   nobody

One step of a warpgroup:

    tensor core   S^T, dP^T ...|                       | dV ....... dQ, dK .........|
    warpgroup          | P ....| dS, pack, write dS, exchange |           | send dQ |

Operands: Q, K, V, dO are K-major for S^T and dP^T; as B of dK, dV and dQ, where they are read along the other mode,
MN-major. dS is stored (tile_m, tile_n), keys contiguous, by transposing stmatrix.
"""

from __future__ import annotations

import enum
import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.pointers import aligned
from ..config import Bwd16Config
from .operands import ELEMENTS, opaque_zero, rows
from .policy_16bit import bf16_pair, fp16_pair

LOG2_E = math.log2(math.e)
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


class BwdBarrier(enum.IntEnum):
    """Named barriers of the CTA (0 is sync_threads)."""

    EXCHANGE = 1  # all consumers: dS of the step is written, dQ of the step before has left
    REUSE = 2  # all consumers, with one buffer of dS: the products that read it are done
    START = 8  # + warpgroup: 256 threads; the warpgroup before has issued the products of its first step
    OWN = 3  # + warpgroup: its 128 threads have written what one of them now sends


def transposed(s: cute.Tensor) -> cute.Tensor:
    """The view of a tile in shared memory with its first two modes exchanged."""
    order = [1, 0, 2] if cute.rank(s) == 3 else [1, 0]
    return cute.make_tensor(s.iterator, cute.select(s.layout, order))


class BwdMainloop:
    """Products and arithmetic of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: Bwd16Config):
        self.cfg = cfg
        self.dtype = ELEMENTS[cfg.dtype]

    # -- operands ---------------------------------------------------------------------------------------------

    def op(self, n: int, source, major_a, major_b) -> wg.MmaF16BF16Op:
        return wg.MmaF16BF16Op(self.dtype, Float32, (64, n), source, major_a, major_b)

    def scores_mma(self) -> cute.TiledMma:
        """S^T and dP^T: 64 keys a warpgroup."""
        op = self.op(self.cfg.tile_m, wg.OperandSource.SMEM, K_MAJOR, K_MAJOR)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def gradient_op(self, columns: int) -> wg.MmaF16BF16Op:
        """dK and dV: P^T or dS^T from registers."""
        return self.op(columns, wg.OperandSource.RMEM, K_MAJOR, MN_MAJOR)

    def gradient_mma(self, columns: int) -> cute.TiledMma:
        op = self.gradient_op(columns)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.cfg.consumer_warpgroups, 1, 1))

    def one_warpgroup(self, columns: int) -> cute.TiledMma:
        """A product of 64 rows, for its accumulator's layout."""
        return cute.make_tiled_mma(cute.make_mma_atom(self.gradient_op(columns)))

    def dq_mma(self) -> cute.TiledMma:
        cfg, warpgroups, smem = self.cfg, self.cfg.consumer_warpgroups, wg.OperandSource.SMEM
        if cfg.dq_split == "rows":
            op, atoms = self.op(cfg.qk_columns, smem, K_MAJOR, MN_MAJOR), (warpgroups, 1, 1)
        elif cfg.dq_split == "columns":
            op, atoms = self.op(cfg.qk_columns // warpgroups, smem, K_MAJOR, MN_MAJOR), (1, warpgroups, 1)
        else:
            op, atoms = self.op(cfg.tile_m, smem, MN_MAJOR, K_MAJOR), (warpgroups, 1, 1)
        return cute.make_tiled_mma(cute.make_mma_atom(op), atoms)

    def fragments(self, s_q, s_k, s_v, s_do, s_ds, warpgroup: Int32):
        """Operands in shared memory of this warpgroup: of S^T, dP^T (A, B), of dV, dK (B), of dQ (A, B)."""
        cfg = self.cfg
        first = warpgroup * 128  # uniform in a warp, and so are the descriptors
        mma = self.scores_mma()
        part = mma.get_slice(first)
        frag_a, frag_b = mma.make_fragment_A, mma.make_fragment_B
        scores = (frag_a(part.partition_A(s_k)), frag_b(part.partition_B(s_q)))
        dp = (frag_a(part.partition_A(s_v)), frag_b(part.partition_B(s_do)))
        gradients = []
        for columns, s in ((cfg.v_columns, s_do), (cfg.qk_columns, s_q)):
            mma = self.gradient_mma(columns)
            gradients.append(mma.make_fragment_B(mma.get_slice(first).partition_B(transposed(s))))
        mma = self.dq_mma()
        part = mma.get_slice(first)
        a, b = (transposed(s_k), s_ds) if cfg.dq_split == "transposed" else (s_ds, transposed(s_k))
        dq = (mma.make_fragment_A(part.partition_A(a)), mma.make_fragment_B(part.partition_B(b)))
        return scores, dp, gradients, dq

    def new_scores(self) -> cute.Tensor:
        shape = self.scores_mma().get_slice(0).partition_shape_C((self.cfg.tile_n, self.cfg.tile_m))
        return cute.make_rmem_tensor(shape, Float32)

    def new_gradients(self):
        """The accumulators of dK and dV, zeroed."""
        cfg, result = self.cfg, []
        for columns in (cfg.qk_columns, cfg.v_columns):
            shape = self.gradient_mma(columns).get_slice(0).partition_shape_C((cfg.tile_n, columns))
            acc = cute.make_rmem_tensor(shape, Float32)
            for i in range(cute.size(acc)):
                acc[i] = opaque_zero()
            result.append(acc)
        return result

    def new_dq(self) -> cute.Tensor:
        cfg = self.cfg
        extents = (cfg.tile_m, cfg.qk_columns)
        extents = extents[::-1] if cfg.dq_split == "transposed" else extents
        return cute.make_rmem_tensor(self.dq_mma().get_slice(0).partition_shape_C(extents), Float32)

    def new_operand(self) -> cute.Tensor:
        """P^T or dS^T in 16 bits, two elements a word, in the order of the A operand."""
        return cute.make_rmem_tensor(self.cfg.tile_m // 4, Uint32)

    # -- products ---------------------------------------------------------------------------------------------

    def issue(self, mma: cute.TiledMma, acc, a, b, accumulate: bool) -> None:
        """Issue acc (+)= a b as a group of its own (not waited for). `mma` must be fresh: ACCUMULATE set here must not
        leak out of a loop body."""
        mma.set(wg.Field.ACCUMULATE, accumulate)
        wg.fence()  # these registers have been read and written: the product may not overtake it
        for kb in range(cute.size(a, mode=[2])):
            cute.gemm(mma, acc, a[None, None, kb], b[None, None, kb], acc)
            mma.set(wg.Field.ACCUMULATE, True)
        wg.commit_group()

    def issue_gradient(self, acc, words, b, columns: int) -> None:
        """Issue acc += words b: dV or dK."""
        mma = self.gradient_mma(columns)
        shape = mma.partition_shape_A((self.cfg.tile_n, self.cfg.tile_m))
        a = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), cute.make_layout(shape))
        self.issue(mma, acc, a, b, True)

    # -- arithmetic -------------------------------------------------------------------------------------------

    @cute.jit
    def row_values(self, s_row: cute.Tensor, stage: Int32) -> cute.Tensor:
        """The values of the thread's queries, (tile_m / 4,), from (tile_m, stages) in shared memory."""
        values = cute.make_rmem_tensor(self.cfg.tile_m // 4, Float32)
        first = s_row.iterator + stage * self.cfg.tile_m + cute.arch.lane_idx() % 4 * 2
        for j in cutlass.range_constexpr(self.cfg.tile_m // 8):
            source = cute.make_tensor(aligned(first + 8 * j, 8), cute.make_layout(2))
            target = cute.make_tensor(values.iterator + 2 * j, cute.make_layout(2))
            cute.autovec_copy(source, target)
        return values

    @cute.jit
    def probabilities(self, masking: cutlass.Constexpr, m: Int32, acc, slope_acc, lse2, inputs, place):
        """S^T -> P^T in place; with softcap also its slope 1 - tanh^2 into `slope_acc`.

        Row r of the thread is key key0 + 8 r, column i query m * tile_m + 2 (lane % 4) + 8 (i // 2) + i % 2. Key j is
        seen by query i iff i - left <= j - shift <= i + right.
        """
        cfg = self.cfg
        scale, softcap_factor, slope = inputs
        key0, seqlen_k, shift, left, right = place
        column0 = m * cfg.tile_m + cute.arch.lane_idx() % 4 * 2
        s = rows(acc)
        columns = cute.size(s, mode=[1])
        for r in cutlass.range_constexpr(2):
            key = key0 + 8 * r
            if const_expr(cfg.softcap):
                u = rows(slope_acc)
                for i in cutlass.range_constexpr(columns):
                    # tanh(x) = 1 - 2 / (1 + e^2x), as in the forward
                    grown = cute.math.exp2(s[r, i] * softcap_factor, fastmath=True)
                    s[r, i] = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(grown + Float32(1.0))
                    u[r, i] = Float32(1.0) - s[r, i] * s[r, i]
            if const_expr(cfg.alibi):
                distance = (column0 + shift - key).to(Float32)
                per_key = slope * Float32(LOG2_E)
                for i in cutlass.range_constexpr(columns):
                    here = distance + Float32(8 * (i // 2) + i % 2)
                    bias = per_key * cute.arch.fmax(here, -here) + lse2[i]
                    s[r, i] = cute.math.exp2(s[r, i] * scale - bias, fastmath=True)
            else:
                for i in cutlass.range_constexpr(columns):
                    s[r, i] = cute.math.exp2(s[r, i] * scale - lse2[i], fastmath=True)
            if const_expr(masking):
                first = Int32(0)
                if const_expr(cfg.causal):
                    first = key - shift - column0
                if const_expr(cfg.window):
                    first = key - shift - right - column0
                first = first if key < seqlen_k else Int32(cfg.tile_m)
                for i in cutlass.range_constexpr(columns):
                    s[r, i] = Float32(0.0) if first > 8 * (i // 2) + i % 2 else s[r, i]
                if const_expr(cfg.window):
                    last = key - shift + left - column0
                    for i in cutlass.range_constexpr(columns):
                        s[r, i] = Float32(0.0) if last < 8 * (i // 2) + i % 2 else s[r, i]

    @cute.jit
    def score_gradients(self, p_acc, slope_acc, acc, d_rows):
        """dP^T -> dS^T in place."""
        p, s = rows(p_acc), rows(acc)
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
                s[r, i] = p[r, i] * (s[r, i] - d_rows[i])
        if const_expr(self.cfg.softcap):
            u = rows(slope_acc)
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, i] = s[r, i] * u[r, i]

    @cute.jit
    def pack(self, acc: cute.Tensor, words: cute.Tensor):
        """Round to the A operand; only when no WGMMA is in flight, or C7513 serialises."""
        pair = bf16_pair if const_expr(self.cfg.dtype == "bf16") else fp16_pair
        for w in cutlass.range_constexpr(cute.size(words)):
            words[w] = pair(acc[2 * w], acc[2 * w + 1])

    @cute.jit
    def write_ds(self, words: cute.Tensor, s_ds: cute.Tensor, stage: Int32, warpgroup: Int32):
        """dS^T of the warpgroup's keys to its columns of dS (tile_m, tile_n, ds_stages)."""
        tid, _, _ = cute.arch.thread_idx()
        copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        op = self.op(self.cfg.tile_m, wg.OperandSource.SMEM, K_MAJOR, K_MAJOR)
        mma = cute.make_tiled_mma(cute.make_mma_atom(op))
        tiled_copy = cute.make_tiled_copy_C(copy_atom, mma).get_slice(tid % 128)
        own = cute.local_tile(transposed(s_ds), (64, self.cfg.tile_m, self.cfg.ds_stages), (warpgroup, 0, 0))
        shape = self.new_scores().shape
        values = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), cute.make_layout(shape))
        cute.copy(copy_atom, tiled_copy.retile(values), tiled_copy.partition_D(own[None, None, stage]))

    @cute.jit
    def send_dq(self, acc: cute.Tensor, s_dq: cute.Tensor, target_address: Int64, some, warpgroup: Int32):
        """Add the warpgroup's part of dQ to the sum in memory.

        Both are in the order of accumulators: element i of vector v of thread t of warpgroup w, register 4 v + i, at
        ((w * registers / 4 + v) * 128 + t) * 4 + i. So shared memory is written without bank conflicts, and one bulk
        reduction takes the part as it is. target_address is that of the query tile's sum; unless `some`, nothing is added.
        """
        tid, _, _ = cute.arch.thread_idx()
        count = self.cfg.dq_registers
        start = warpgroup * (count * 128)
        target = s_dq.iterator + start + tid % 128 * 4
        for v in cutlass.range_constexpr(count // 4):
            source = cute.make_tensor(acc.iterator + 4 * v, cute.make_layout(4))
            cute.autovec_copy(
                source, cute.make_tensor(aligned(target + v * 512, 16), cute.make_layout(4))
            )
        cute.arch.fence_proxy("async.shared", space="cta")  # the reduction reads through the async proxy
        # the warpgroup: all of it has written, and its first thread may send
        cute.arch.barrier(barrier_id=BwdBarrier.OWN + warpgroup, number_of_threads=128)
        if (tid % 128 == 0) & some:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=[
                    target_address + Int64(start * 4),
                    (s_dq.iterator + start).toint(),
                    Int32(count * 512),
                ],
            )
            cute.arch.cp_async_bulk_commit_group()

    # -- steps ------------------------------------------------------------------------------------------------

    @cute.jit
    def step(
        self,
        masking: cutlass.Constexpr,
        m: Int32,
        frags,
        shared,
        inputs,
        place,
        g_dq: cute.Tensor,
        gradients,
        pipes,
        states,
        warpgroup: Int32,
    ):
        """Query tile m; no product is in flight before or after. Returns the next states of the rings of Q and dO."""
        cfg = self.cfg
        (k_frag, q_frag), (v_frag, do_frag), (dv_b, dk_b), (dq_a, dq_b) = frags
        s_lse2, s_d_rows, s_ds, s_dq, _ = shared
        dk, dv = gradients
        pipe_q, pipe_do = pipes[0], pipes[1]
        state_q, state_do, count, before = states
        ds_stage = state_q.index if const_expr(cfg.ds_stages == cfg.q_stages) else Int32(0)
        s, dp, words_p, words_ds = self.new_scores(), self.new_scores(), self.new_operand(), self.new_operand()
        slope_acc = self.new_scores() if const_expr(cfg.softcap) else s

        pipe_q.consumer_wait(state_q)  # TMA has filled Q and lse2 of this tile
        self.issue(self.scores_mma(), s, k_frag, q_frag[None, None, None, state_q.index], False)
        pipe_do.consumer_wait(state_do)  # TMA has filled dO and D of this tile
        self.issue(self.scores_mma(), dp, v_frag, do_frag[None, None, None, state_do.index], False)
        wg.wait_group(1)  # S^T is complete, dP^T goes on
        lse2 = self.row_values(s_lse2, state_q.index)
        self.probabilities(masking, m, s, slope_acc, lse2, inputs, place)
        wg.wait_group(0)  # dP^T is complete
        d_rows = self.row_values(s_d_rows, state_do.index)
        self.score_gradients(s, slope_acc, dp, d_rows)
        self.pack(s, words_p)
        self.pack(dp, words_ds)

        self.issue_gradient(dv, words_p, dv_b[None, None, None, state_do.index], cfg.v_columns)
        if const_expr(cfg.ds_stages == 1):
            # all consumers: their dQ of the step before is complete
            cute.arch.barrier(barrier_id=BwdBarrier.REUSE, number_of_threads=128 * cfg.consumer_warpgroups)
        self.write_ds(words_ds, s_ds, ds_stage, warpgroup)
        cute.arch.fence_proxy("async.shared", space="cta")  # products read through the async proxy
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the thread that sends: dQ of the step before has left
        # All consumers: dS is written. With two buffers, a warpgroup that comes here has done its products of the step
        # before, so the buffer of that step may be written in the next.
        cute.arch.barrier(barrier_id=BwdBarrier.EXCHANGE, number_of_threads=128 * cfg.consumer_warpgroups)
        dq = self.new_dq()
        if const_expr(cfg.dq_split == "transposed"):
            self.issue(self.dq_mma(), dq, dq_a, dq_b[None, None, None, ds_stage], False)
        else:
            self.issue(self.dq_mma(), dq, dq_a[None, None, None, ds_stage], dq_b, False)
        self.issue_gradient(dk, words_ds, dk_b[None, None, None, state_q.index], cfg.qk_columns)
        wg.wait_group(2)  # dV is complete
        pipe_do.consumer_release(state_do)  # one lane of each warp: it reads this dO no more
        wg.wait_group(1)  # dQ is complete
        self.send_dq(dq, s_dq, g_dq[m, None].iterator.toint(), Boolean(True), warpgroup)
        wg.wait_group(0)  # dK is complete
        pipe_q.consumer_release(state_q)  # likewise this Q
        state_q.advance()
        state_do.advance()
        return state_q, state_do, count, before

    @cute.jit
    def late_step(
        self,
        masking: cutlass.Constexpr,
        m: Int32,
        frags,
        shared,
        inputs,
        place,
        g_dq: cute.Tensor,
        gradients,
        pipes,
        states,
        warpgroup: Int32,
    ):
        """Query tile m, and dQ of the step before; no product is in flight before or after. Returns the next states."""
        cfg = self.cfg
        (k_frag, q_frag), (v_frag, do_frag), (dv_b, dk_b), _ = frags
        s_lse2, s_d_rows, s_ds, s_dq, ds_full = shared
        dk, dv = gradients
        pipe_q, pipe_do = pipes[0], pipes[1]
        state_q, state_do, count, before = states
        s, dp, words_p, words_ds = self.new_scores(), self.new_scores(), self.new_operand(), self.new_operand()
        slope_acc = self.new_scores() if const_expr(cfg.softcap) else s

        pipe_q.consumer_wait(state_q)  # TMA has filled Q and lse2 of this tile
        self.issue(self.scores_mma(), s, k_frag, q_frag[None, None, None, state_q.index], False)
        pipe_do.consumer_wait(state_do)  # TMA has filled dO and D of this tile
        self.issue(self.scores_mma(), dp, v_frag, do_frag[None, None, None, state_do.index], False)
        wg.wait_group(1)  # S^T is complete, dP^T goes on
        lse2 = self.row_values(s_lse2, state_q.index)
        self.probabilities(masking, m, s, slope_acc, lse2, inputs, place)
        wg.wait_group(0)  # dP^T is complete
        if const_expr(cfg.stagger):
            if (count == 1) & (warpgroup < cfg.consumer_warpgroups - 1):
                cute.arch.barrier_arrive(
                    barrier_id=BwdBarrier.START + warpgroup + 1, number_of_threads=256
                )
        d_rows = self.row_values(s_d_rows, state_do.index)
        self.score_gradients(s, slope_acc, dp, d_rows)
        self.pack(s, words_p)
        self.pack(dp, words_ds)
        self.issue_gradient(dv, words_p, dv_b[None, None, None, state_do.index], cfg.v_columns)
        dq = self.issue_dq(frags, ds_full, count)
        # All have written dS of the step before, so they have ended the one before that, in which they read, as dQ of an
        # earlier step, the buffer of this one.
        self.write_ds(words_ds, s_ds, count % 3, warpgroup)
        cute.arch.fence_proxy("async.shared", space="cta")  # products read through the async proxy
        cute.arch.sync_warp()  # the warp: all of it has written
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(ds_full + count % 3)
        self.issue_gradient(dk, words_ds, dk_b[None, None, None, state_q.index], cfg.qk_columns)
        wg.wait_group(2)  # dV is complete
        pipe_do.consumer_release(state_do)  # one lane of each warp: it reads this dO no more
        wg.wait_group(1)  # dQ is complete
        self.send_late(dq, s_dq, before, count, warpgroup)
        wg.wait_group(0)  # dK is complete
        pipe_q.consumer_release(state_q)  # likewise this Q
        state_q.advance()
        state_do.advance()
        return state_q, state_do, count + 1, g_dq[m, None].iterator.toint()

    @cute.jit
    def issue_dq(self, frags, ds_full, count: Int32) -> cute.Tensor:
        """Issue dQ of step count - 1 as soon as all warpgroups have written its dS; of step -1, of what lies there."""
        cfg = self.cfg
        dq_a, dq_b = frags[3]
        stage = (count - 1) % 3
        # one lane of each consumer warp arrives, when it has written its part
        cute.arch.mbarrier_wait(ds_full + stage, (count - 1) // 3 % 2)
        dq = self.new_dq()
        if const_expr(cfg.dq_split == "transposed"):
            self.issue(self.dq_mma(), dq, dq_a, dq_b[None, None, None, stage], False)
        else:
            self.issue(self.dq_mma(), dq, dq_a[None, None, None, stage], dq_b, False)
        return dq

    @cute.jit
    def send_late(self, dq: cute.Tensor, s_dq: cute.Tensor, before: Int64, count: Int32, warpgroup: Int32):
        """Add dQ of step count - 1 to its sum at address `before`; of step -1 not."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the thread that sends: the part before has left
        cute.arch.barrier(barrier_id=BwdBarrier.OWN + warpgroup, number_of_threads=128)  # the warpgroup: likewise
        self.send_dq(dq, s_dq, before, count > 1, warpgroup)

    @cute.jit
    def last_dq(self, frags, shared, states, warpgroup: Int32):
        """dQ of the last step of all."""
        _, _, count, before = states
        dq = self.issue_dq(frags, shared[4], count)
        wg.wait_group(0)  # dQ is complete
        self.send_late(dq, shared[3], before, count, warpgroup)

    @cute.jit
    def consume(
        self, frags, shared, inputs, place, g_dq: cute.Tensor, gradients, pipes, states, blocks
    ):
        """All query tiles of one query head.

        frags from `fragments`; shared: lse2, D, dS, dQ; inputs: scale of a score, softcap's factor, slope of ALiBi; place:
        position of the thread's first key, seqlen_k, seqlen_k - seqlen_q, window; g_dq (tiles, tile_m * qk_columns);
        gradients: accumulators of dK and dV, updated in place; blocks see `query_blocks`. Returns the states of the
        rings.
        """
        cfg = self.cfg
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        more = (frags, shared, inputs, place, g_dq, gradients, pipes)
        step = self.late_step if const_expr(cfg.late_dq) else self.step
        for m in cutlass.range(blocks[0], blocks[1], unroll=1):
            states = step(True, m, *more, states, warpgroup)
        for m in cutlass.range(blocks[1], blocks[2], unroll=1):
            states = step(False, m, *more, states, warpgroup)
        if const_expr(cfg.window):
            for m in cutlass.range(blocks[2], blocks[3], unroll=1):
                states = step(True, m, *more, states, warpgroup)
        return states
