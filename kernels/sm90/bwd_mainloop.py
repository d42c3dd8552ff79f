"""Consumers of the 16-bit backward: the loop over query tiles.

Every warpgroup has 64 keys of the tile and computes S^T = K Q^T and dP^T = V dO^T for them and the tile_m queries of a
step. The accumulators of P^T and dS^T lie as the A operands of dV += P^T dO and dK += dS^T Q want them (see
policy_16bit.py), so both stay in registers. dQ = dS K sums over the keys of all warpgroups: dS goes through shared
memory, and each warpgroup makes its part of dQ (`Bwd16Config.dq_split`), which is added to the sum in memory.

With `shared_keys` both warpgroups have the same 64 keys, and each half the queries of S^T and dP^T. Then P goes through
shared memory too, and each warpgroup makes dK and dV of half their columns.

Rings (PipelineTmaAsync; an mbarrier pair "full" / "empty" for each stage):

    name  stages     producer              full: arrives, bytes                        empty: arrives
    Q     q_stages   warp 0 of producer    TMA, tile_m * qk_columns * 2 + tile_m * 4   all threads of the consumers
    dO    do_stages  warp 0 of producer    TMA, tile_m * v_columns * 2 + tile_m * 4    all threads of the consumers

K comes with the first Q and V with the first dO, whose barriers expect tile_n * columns * 2 bytes more then. Both stay,
so that no later step waits for them.

One step of a warpgroup:

    tensor core   S^T, dP^T ...|                       | dV ....... dQ, dK .........|
    warpgroup          | P ....| dS, pack, write dS, exchange |           | send dQ |

With `first_blocks` the arithmetic of the step's last queries runs under dV and dK of the first:

    tensor core   S^T, dP^T ...|           | dV, dK of the first |    | dV of the rest ...... dQ, dK of the rest ...|
    warpgroup          | P ....| dS, pack  | P, dS of the rest ..|pack|  write dS, exchange |          | send dQ |

Operands: Q, K, V, dO are K-major for S^T and dP^T; as B of dK, dV and dQ, where they are read along the other mode,
MN-major. dS is stored (tile_m, tile_n), keys contiguous, by transposing stmatrix.
"""

from __future__ import annotations

import enum
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp
from cutlass.cute.nvgpu import warpgroup as wg

from ..common.pointers import aligned
from ..common.scheduler import tiles_before
from ..common.scores import rows
from ..common.turns import await_turn, end_turn
from ..config import Bwd16Config
from .operands import ELEMENTS, opaque_zero
from .policy_16bit import bf16_pair, fp16_pair

LOG2_E = math.log2(math.e)
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


class BwdBarrier(enum.IntEnum):
    """Named barriers of the CTA (0 is sync_threads)."""

    EXCHANGE = 1  # all consumers: dS of the step is written
    # all consumers, with one buffer of dS: the products of the step before, which read it, are done
    REUSE = 2
    OWN = 3  # + warpgroup: its 128 threads, at the end of a tile, see `BwdStore`
    # + warpgroup, of its 128 threads and the 32 of the warp that sends its part of dQ, see `send`, or, with `dq_direct`
    # and `deterministic`, that keeps its turns, see `keep_turns`
    DQ_FREE = 6  # the warp arrives, the warpgroup waits: the part of the step before has left shared memory; its turn
    DQ_WRITTEN = 9  # the warpgroup arrives, the warp waits: the part of this step is there; it has added


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
        op = self.op(self.cfg.own_queries, wg.OperandSource.SMEM, K_MAJOR, K_MAJOR)
        return cute.make_tiled_mma(cute.make_mma_atom(op), self.warpgroups())

    def warpgroups(self) -> tuple[int, int, int]:
        """How they divide S^T, dK and dV."""
        return (1, 2, 1) if self.cfg.shared_keys else (self.cfg.consumer_warpgroups, 1, 1)

    def gradient_op(self, part: int) -> wg.MmaF16BF16Op:
        """`part` columns of dK or dV: P^T or dS^T from registers, or where both warpgroups want all of it from shared
        memory, whose queries are rows."""
        if self.cfg.shared_keys:
            return self.op(part, wg.OperandSource.SMEM, MN_MAJOR, MN_MAJOR)
        return self.op(part, wg.OperandSource.RMEM, K_MAJOR, MN_MAJOR)

    def gradient_mma(self, part: int) -> cute.TiledMma:
        return cute.make_tiled_mma(cute.make_mma_atom(self.gradient_op(part)), self.warpgroups())

    def one_warpgroup(self, part: int) -> cute.TiledMma:
        """A product of 64 rows, for its accumulator's layout."""
        return cute.make_tiled_mma(cute.make_mma_atom(self.gradient_op(part)))

    def dq_mma(self) -> cute.TiledMma:
        cfg, warpgroups, smem = self.cfg, self.cfg.consumer_warpgroups, wg.OperandSource.SMEM
        if cfg.dq_split == "rows":
            op, atoms = self.op(cfg.qk_columns, smem, K_MAJOR, MN_MAJOR), (warpgroups, 1, 1)
        elif cfg.dq_split == "transposed":  # dQ^T = K^T dS^T
            op, atoms = self.op(cfg.tile_m, smem, MN_MAJOR, K_MAJOR), (warpgroups, 1, 1)
        else:
            op, atoms = self.op(cfg.qk_columns // warpgroups, smem, K_MAJOR, MN_MAJOR), (1, warpgroups, 1)
        return cute.make_tiled_mma(cute.make_mma_atom(op), atoms)

    def fragments(self, s_q, s_k, s_v, s_do, s_ds, warpgroup: Int32):
        """Operands in shared memory of this warpgroup: of S^T, dP^T (A, B), of dV, dK (A or None, B), of dQ (A, B)."""
        cfg = self.cfg
        first = warpgroup * 128  # uniform in a warp, and so are the descriptors
        mma = self.scores_mma()
        part = mma.get_slice(first)
        frag_a, frag_b = mma.make_fragment_A, mma.make_fragment_B
        scores = (frag_a(part.partition_A(s_k)), frag_b(part.partition_B(s_q)))
        dp = (frag_a(part.partition_A(s_v)), frag_b(part.partition_B(s_do)))
        gradients = []
        for columns, s in ((cfg.dv_part, s_do), (cfg.dk_part, s_q)):
            mma = self.gradient_mma(columns)
            part = mma.get_slice(first)
            a = mma.make_fragment_A(part.partition_A(transposed(s_ds))) if cfg.shared_keys else None
            gradients.append((a, mma.make_fragment_B(part.partition_B(transposed(s)))))
        mma = self.dq_mma()
        part = mma.get_slice(first)
        if cfg.dq_split == "transposed":
            a, b = transposed(s_k), s_ds
        else:
            a, b = s_ds, transposed(s_k)
        dq = (mma.make_fragment_A(part.partition_A(a)), mma.make_fragment_B(part.partition_B(b)))
        return scores, dp, gradients, dq

    def new_scores(self) -> cute.Tensor:
        shape = self.scores_mma().get_slice(0).partition_shape_C((self.cfg.tile_n, self.cfg.tile_m))
        return cute.make_rmem_tensor(shape, Float32)

    def new_gradients(self):
        """The accumulators of dK and dV, zeroed."""
        cfg, result = self.cfg, []
        for part, columns in ((cfg.dk_part, cfg.qk_columns), (cfg.dv_part, cfg.v_columns)):
            shape = self.gradient_mma(part).get_slice(0).partition_shape_C((cfg.tile_n, columns))
            acc = cute.make_rmem_tensor(shape, Float32)
            for i in range(cute.size(acc)):
                acc[i] = opaque_zero()
            result.append(acc)
        return result

    def new_dq(self) -> cute.Tensor:
        cfg = self.cfg
        extents = (cfg.tile_m, cfg.qk_columns)
        if cfg.dq_split == "transposed":
            extents = (cfg.qk_columns, cfg.tile_m)
        return cute.make_rmem_tensor(self.dq_mma().get_slice(0).partition_shape_C(extents), Float32)

    def new_operand(self) -> cute.Tensor:
        """P^T or dS^T in 16 bits, two elements a word, in the order of the A operand."""
        return cute.make_rmem_tensor(self.cfg.own_queries // 4, Uint32)

    # -- products ---------------------------------------------------------------------------------------------

    def issue(self, mma: cute.TiledMma, acc, a, b, accumulate: bool, blocks: range | None = None) -> None:
        """Issue acc (+)= a b, of all terms or those in `blocks` of 16, as a group of its own (not waited for). `mma`
        must be fresh: ACCUMULATE set here must not leak out of a loop body."""
        mma.set(wg.Field.ACCUMULATE, accumulate)
        wg.fence()  # these registers have been read and written: the product may not overtake it
        for kb in range(cute.size(a, mode=[2])) if blocks is None else blocks:
            cute.gemm(mma, acc, a[None, None, kb], b[None, None, kb], acc)
            mma.set(wg.Field.ACCUMULATE, True)
        wg.commit_group()

    def issue_gradient(self, acc, words, operands, stages, part: int, blocks: range | None = None) -> None:
        """Issue acc += P^T dO or dS^T Q: dV or dK, of all queries or those in `blocks` of 16. A comes from `words`, or
        from stages[0] of operands[0]."""
        mma = self.gradient_mma(part)
        a, b = operands
        if self.cfg.shared_keys:
            a = a[None, None, None, stages[0]]
        else:
            shape = mma.partition_shape_A((self.cfg.tile_n, self.cfg.tile_m))
            a = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), cute.make_layout(shape))
        self.issue(mma, acc, a, b[None, None, None, stages[1]], True, blocks)

    # -- arithmetic -------------------------------------------------------------------------------------------

    @cute.jit
    def first_query(self, warpgroup: Int32) -> Int32:
        """Row of the tile of the thread's first query."""
        first = cute.arch.lane_idx() % 4 * 2
        if const_expr(self.cfg.shared_keys):
            first = first + warpgroup * self.cfg.own_queries
        return first

    @cute.jit
    def row_values(
        self, s_row: cute.Tensor, stage: Int32, warpgroup: Int32, blocks: cutlass.Constexpr
    ) -> cute.Tensor:
        """The values of the thread's queries, (own_queries / 4,), from (tile_m, stages) in shared memory: of those in
        `blocks` of 16."""
        values = cute.make_rmem_tensor(self.cfg.own_queries // 4, Float32)
        first = s_row.iterator + stage * self.cfg.tile_m + self.first_query(warpgroup)
        for j in cutlass.range_constexpr(2 * blocks.start, 2 * blocks.stop):
            source = cute.make_tensor(aligned(first + 8 * j, 8), cute.make_layout(2))
            target = cute.make_tensor(values.iterator + 2 * j, cute.make_layout(2))
            cute.autovec_copy(source, target)
        return values

    @cute.jit
    def probabilities(
        self,
        masking: cutlass.Constexpr,
        query0: Int32,
        acc,
        words_p,
        lse2,
        inputs,
        place,
        blocks: cutlass.Constexpr,
    ):
        """S^T -> P^T in place, of the queries in `blocks` of 16. With softcap P^T goes to `words_p`, rounded, and
        P^T (1 - tanh^2) stays in its place.

        Row r of the thread is key key0 + 8 r, column i query query0 + 8 (i // 2) + i % 2. Key j is seen by query i iff
        i - left <= j - shift <= i + right.
        """
        cfg = self.cfg
        scale, softcap_factor, slope = inputs
        key0, seqlen_k, shift, left, right, _ = place
        pair = bf16_pair if const_expr(cfg.dtype == "bf16") else fp16_pair
        s = rows(acc)
        for r in cutlass.range_constexpr(2):
            key = key0 + 8 * r
            first, last, distance, per_key = Int32(0), Int32(0), Float32(0.0), slope * Float32(LOG2_E)
            if const_expr(masking):
                if const_expr(cfg.causal):
                    first = key - shift - query0
                if const_expr(cfg.window):
                    first = key - shift - right - query0
                    last = key - shift + left - query0
                first = first if key < seqlen_k else Int32(cfg.tile_m)
            if const_expr(cfg.alibi):
                distance = (query0 + shift - key).to(Float32)
            for i in cutlass.range_constexpr(4 * blocks.start, 4 * blocks.stop):
                behind = 8 * (i // 2) + i % 2  # queries behind the first
                bias = lse2[i]
                if const_expr(cfg.alibi):
                    here = distance + Float32(behind)
                    bias = per_key * cute.arch.fmax(here, -here) + bias
                score = s[r, i]
                if const_expr(cfg.softcap):
                    # tanh(x) = 1 - 2 / (1 + e^2x), as in the forward
                    grown = cute.math.exp2(score * softcap_factor, fastmath=True)
                    score = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(grown + Float32(1.0))
                p = cute.math.exp2(score * scale - bias, fastmath=True)
                if const_expr(masking):
                    p = Float32(0.0) if first > behind else p
                    if const_expr(cfg.window):
                        p = Float32(0.0) if last < behind else p
                s[r, i] = p
                if const_expr(cfg.softcap):
                    s[r, i] = p * (Float32(1.0) - score * score)
                    if const_expr(i % 2 == 0):
                        even = p
                    else:
                        words_p[r + i - 1] = pair(even, p)

    @cute.jit
    def score_gradients(self, p_acc, acc, d_rows, blocks: cutlass.Constexpr):
        """dP^T -> dS^T in place, of the queries in `blocks` of 16; p_acc is P^T, with softcap times its slope."""
        p, s = rows(p_acc), rows(acc)
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4 * blocks.start, 4 * blocks.stop):
                s[r, i] = p[r, i] * (s[r, i] - d_rows[i])

    @cute.jit
    def pack(self, acc: cute.Tensor, words: cute.Tensor, blocks: cutlass.Constexpr):
        """Round to the A operand, of the queries in `blocks` of 16; only when no WGMMA is in flight, or C7513
        serialises."""
        pair = bf16_pair if const_expr(self.cfg.dtype == "bf16") else fp16_pair
        for w in cutlass.range_constexpr(4 * blocks.start, 4 * blocks.stop):
            words[w] = pair(acc[2 * w], acc[2 * w + 1])

    @cute.jit
    def write_transposed(self, words: cute.Tensor, s_ds: cute.Tensor, stage: Int32, warpgroup: Int32):
        """dS^T or P^T of the warpgroup to its part of a stage (tile_m, tile_n) of dS."""
        tid, _, _ = cute.arch.thread_idx()
        copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        cfg = self.cfg
        if const_expr(cfg.softcap):
            # From a number that the compiler cannot know to be tid, or it keeps the address over the loop and spills.
            tid = cute.arch.shuffle_sync(tid, cute.arch.lane_idx())
        op = self.op(cfg.own_queries, wg.OperandSource.SMEM, K_MAJOR, K_MAJOR)
        mma = cute.make_tiled_mma(cute.make_mma_atom(op))
        tiled_copy = cute.make_tiled_copy_C(copy_atom, mma).get_slice(tid % 128)
        place = (0, warpgroup) if const_expr(cfg.shared_keys) else (warpgroup, 0)
        own = cute.local_tile(transposed(s_ds[None, None, stage]), (64, cfg.own_queries), place)
        shape = self.new_scores().shape
        values = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), cute.make_layout(shape))
        cute.copy(copy_atom, tiled_copy.retile(values), tiled_copy.partition_D(own))

    @cute.jit
    def add_dq(self, acc: cute.Tensor, target: Int64, warpgroup: Int32):
        """With `dq_direct`: each thread adds its vectors of the warpgroup's part of dQ to the sum of its query tile,
        which begins at address `target`.

        The sum is in the order of accumulators: element i of vector v of thread t of warpgroup w, register 4 v + i, at
        ((w * registers / 4 + v) * 128 + t) * 4 + i. `hand_dq` writes shared memory likewise.
        """
        cfg = self.cfg
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(cfg.deterministic):
            # the warpgroup waits, the warp that keeps its turns arrives: it is its turn
            cute.arch.barrier(barrier_id=BwdBarrier.DQ_FREE + warpgroup, number_of_threads=160)
        address = target + Int64((warpgroup * (cfg.dq_registers * 128) + tid % 128 * 4) * 4)
        for v in cutlass.range_constexpr(cfg.dq_registers // 4):
            cute.arch.inline_ptx(
                f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}}+{2048 * v}], "
                "{{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[address, *(acc[4 * v + i] for i in range(4))],
            )

    @cute.jit
    def say_added(self, warpgroup: Int32):
        """With `dq_direct` and `deterministic`: what the warpgroup has added to dQ until now is there. Called in the
        next step, when the fence has nothing left to wait for, and behind the last one."""
        cute.arch.fence_acq_rel_gpu()  # what this thread added comes before the next turn
        # the warpgroup arrives, the warp that keeps its turns waits: all of it has added
        cute.arch.barrier_arrive(barrier_id=BwdBarrier.DQ_WRITTEN + warpgroup, number_of_threads=160)

    @cute.jit
    def keep_turns(self, place, g_turns: cute.Tensor, blocks, part: Int32):
        """With `dq_direct` and `deterministic`: await and end the turns of part `part` of dQ of all query tiles of one
        query head, for the warpgroup that adds. Called by one whole warp of the producers, so that neither the look at
        the count nor the end of the adds takes time from products."""
        lane = cute.arch.lane_idx()
        for m in cutlass.range(blocks[0], blocks[3], unroll=1):
            # the warp waits, the consumers arrive, within their step: what they added in the step before is there
            cute.arch.barrier(barrier_id=BwdBarrier.DQ_WRITTEN + part, number_of_threads=160)
            if lane == 0:
                if m > blocks[0]:
                    end_turn(self.turn(m - 1, place, g_turns, part))
                await_turn(self.turn(m, place, g_turns, part))
            cute.arch.sync_warp()  # the warp: its first lane has seen the turn
            # the warp arrives, the consumers wait: they may add
            cute.arch.barrier_arrive(barrier_id=BwdBarrier.DQ_FREE + part, number_of_threads=160)
        # the warp waits, the consumers arrive behind their last step
        cute.arch.barrier(barrier_id=BwdBarrier.DQ_WRITTEN + part, number_of_threads=160)
        if blocks[0] < blocks[3] and lane == 0:
            end_turn(self.turn(blocks[3] - 1, place, g_turns, part))

    @cute.jit
    def hand_dq(self, acc: cute.Tensor, s_dq: cute.Tensor, warpgroup: Int32):
        """The warpgroup's part of dQ to shared memory, in the order of `add_dq`, for its sender: so there are no bank
        conflicts, and one bulk reduction takes the part as it is."""
        tid, _, _ = cute.arch.thread_idx()
        first = warpgroup * (self.cfg.dq_registers * 128) + tid % 128 * 4
        # the warpgroup waits, its sender arrives: the part of the step before has been read
        cute.arch.barrier(barrier_id=BwdBarrier.DQ_FREE + warpgroup, number_of_threads=160)
        for v in cutlass.range_constexpr(self.cfg.dq_registers // 4):
            source = cute.make_tensor(acc.iterator + 4 * v, cute.make_layout(4))
            place = aligned(s_dq.iterator + first + v * 512, 16)
            cute.autovec_copy(source, cute.make_tensor(place, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")  # the reduction reads through the async proxy
        # the warpgroup arrives behind its fence, its sender waits: the part is written
        cute.arch.barrier_arrive(barrier_id=BwdBarrier.DQ_WRITTEN + warpgroup, number_of_threads=160)

    @cute.jit
    def reduce_part(self, s_dq: cute.Tensor, target: Int64, part: Int32):
        """Start the reduction of one part of dQ. Called by one thread, which has to wait for the group before the part
        in shared memory is written anew. See `hand_dq`."""
        count = self.cfg.dq_registers
        start = part * (count * 128)
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[
                target + Int64(start * 4),
                (s_dq.iterator + start).toint(),
                Int32(count * 512),
            ],
        )
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def end_part(self, turn):
        """Deterministic: let the next key tile add to the part whose reduction this thread started last."""
        cute.arch.cp_async_bulk_wait_group(0)  # its adds are done, not only read
        cute.arch.fence_proxy("async")  # before the count that lets the next tile add
        end_turn(turn)

    @cute.jit
    def turn(self, m: Int32, place, g_turns: cute.Tensor, part: Int32):
        """Turn of part `part` of dQ of query tile m, see `await_turn`; with `deterministic`."""
        _, seqlen_k, shift, _, right, n_block = place
        before = tiles_before(m, n_block, seqlen_k, shift, right, self.cfg)
        return g_turns[m, None].iterator.toint() + Int64(part * 4), before

    @cute.jit
    def send(self, s_dq: cute.Tensor, place, g_dq: cute.Tensor, g_turns: cute.Tensor, blocks, part: Int32):
        """Send part `part` of dQ of all query tiles of one query head. Called by one whole warp, whose first thread
        waits for each reduction to have read shared memory, also for the last one, as the CTA's memory must outlive it.
        The consumers go over the same tiles, so that every arrival is waited for once.

        Deterministic: a turn ends, and the next is awaited, while the consumers make the next part."""
        lane = cute.arch.lane_idx()
        for m in cutlass.range(blocks[0], blocks[3], unroll=1):
            # the warp arrives, the consumers wait: what was read before, at first nothing, may be written over
            cute.arch.barrier_arrive(barrier_id=BwdBarrier.DQ_FREE + part, number_of_threads=160)
            if const_expr(self.cfg.deterministic):
                if lane == 0:
                    if m > blocks[0]:
                        self.end_part(self.turn(m - 1, place, g_turns, part))
                    await_turn(self.turn(m, place, g_turns, part))
                    cute.arch.fence_proxy("async")  # the adds of the turn before, then those of this one
                cute.arch.sync_warp()  # the warp: its first lane has seen the turn
            # the warp waits, the consumers arrive: the part of this tile is written
            cute.arch.barrier(barrier_id=BwdBarrier.DQ_WRITTEN + part, number_of_threads=160)
            if lane == 0:
                self.reduce_part(s_dq, g_dq[m, None].iterator.toint(), part)
            # the first thread: its reduction has read the part
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(self.cfg.deterministic):
            if blocks[0] < blocks[3] and lane == 0:
                self.end_part(self.turn(blocks[3] - 1, place, g_turns, part))

    @cute.jit
    def release(self, pipe, state):
        """Arrive at the "empty" barrier of the stage. All threads do: each has read rows of lse2 or D that TMA writes
        next, and an arrival of one lane would not order the reads of the others."""
        pipe.sync_object_empty.arrive_mbarrier(state.index)

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
        g_turns: cute.Tensor,
        gradients,
        pipes,
        states,
        warpgroup: Int32,
        end_keys=None,
    ):
        """Query tile m; no product is in flight before or after. Returns the next states of the rings of Q and dO.
        end_keys: see `consume`."""
        cfg = self.cfg
        (k_frag, q_frag), (v_frag, do_frag), (dv_operands, dk_operands), (dq_a, dq_b) = frags
        s_lse2, s_d_rows, s_ds, s_dq = shared
        dk, dv = gradients
        pipe_q, pipe_do = pipes[0], pipes[1]
        state_q, state_do = states
        if const_expr(cfg.one_state):
            state_do = state_q
        ds_stage = state_q.index if const_expr(cfg.ds_stages > 1) else Int32(0)
        p_stage = ds_stage + cfg.ds_stages  # with `shared_keys`
        stages_v, stages_k = (p_stage, state_do.index), (ds_stage, state_q.index)
        s, dp, words_p, words_ds = (
            self.new_scores(),
            self.new_scores(),
            self.new_operand(),
            self.new_operand(),
        )
        query0 = m * cfg.tile_m + self.first_query(warpgroup)
        end = cfg.own_queries // 16
        every, first = range(end), range(cfg.first_blocks or end)
        later = range(first.stop, end)  # blocks of 16 queries whose arithmetic runs under products of `first`
        # of all terms without `first_blocks`: with `shared_keys` they are the queries of both warpgroups
        rest = later if const_expr(cfg.first_blocks) else None

        pipe_q.consumer_wait(state_q)  # TMA has filled Q and lse2 of this tile, before the first step K too
        self.issue(self.scores_mma(), s, k_frag, q_frag[None, None, None, state_q.index], False)
        pipe_do.consumer_wait(state_do)  # TMA has filled dO and D of this tile, before the first step V too
        do_part = do_frag[None, None, None, state_do.index]
        lse2 = self.row_values(s_lse2, state_q.index, warpgroup, first)
        if const_expr(cfg.softcap):
            wg.wait_group(0)  # S^T is complete
            # P is rounded before dP^T is in flight, which would serialise
            self.probabilities(masking, query0, s, words_p, lse2, inputs, place, every)
            self.issue(self.scores_mma(), dp, v_frag, do_part, False)
            if const_expr(not cfg.shared_keys):
                # so that P is gone when dS wants its registers
                self.issue_gradient(dv, words_p, dv_operands, stages_v, cfg.dv_part)
        else:
            self.issue(self.scores_mma(), dp, v_frag, do_part, False)
            wg.wait_group(1)  # S^T is complete, dP^T goes on
            self.probabilities(masking, query0, s, words_p, lse2, inputs, place, first)
        if const_expr(cfg.ds_stages == 1):
            # all consumers: their products of the step before are complete
            cute.arch.barrier(barrier_id=BwdBarrier.REUSE, number_of_threads=128 * cfg.consumer_warpgroups)
        if const_expr(cfg.shared_keys):
            if const_expr(not cfg.softcap):
                self.pack(s, words_p, every)
            self.write_transposed(words_p, s_ds, p_stage, warpgroup)
        wg.wait_group(0)  # dP^T is complete, with softcap dV too
        d_rows = self.row_values(s_d_rows, state_do.index, warpgroup, first)
        self.score_gradients(s, dp, d_rows, first)
        if const_expr(not (cfg.shared_keys or cfg.softcap)):
            self.pack(s, words_p, first)
        self.pack(dp, words_ds, first)
        if const_expr(cfg.first_blocks):
            lse2 = self.row_values(s_lse2, state_q.index, warpgroup, later)
            d_rows = self.row_values(s_d_rows, state_do.index, warpgroup, later)
            self.issue_gradient(dv, words_p, dv_operands, stages_v, cfg.dv_part, first)
            self.issue_gradient(dk, words_ds, dk_operands, stages_k, cfg.dk_part, first)
            self.probabilities(masking, query0, s, words_p, lse2, inputs, place, later)
            self.score_gradients(s, dp, d_rows, later)
            wg.wait_group(0)  # dV and dK of the first queries are complete
            self.pack(s, words_p, later)
            self.pack(dp, words_ds, later)

        if const_expr(cfg.dq_split == "transposed"):
            # ahead of dV, or ptxas serialises the products of 80 queries
            self.write_transposed(words_ds, s_ds, ds_stage, warpgroup)
        if const_expr(not (cfg.shared_keys or cfg.softcap)):
            self.issue_gradient(dv, words_p, dv_operands, stages_v, cfg.dv_part, rest)
        if const_expr(cfg.dq_split != "transposed"):
            self.write_transposed(words_ds, s_ds, ds_stage, warpgroup)
        cute.arch.fence_proxy("async.shared", space="cta")  # products read through the async proxy
        # All consumers: dS, and P if it is shared, is written. With two buffers, a warpgroup that comes here has done
        # its products of the step before, so the buffer of that step may be written in the next.
        cute.arch.barrier(barrier_id=BwdBarrier.EXCHANGE, number_of_threads=128 * cfg.consumer_warpgroups)
        if const_expr(cfg.dq_direct and cfg.deterministic):
            self.say_added(warpgroup)  # of the step before, if there was one
        if const_expr(cfg.shared_keys):
            self.issue_gradient(dv, words_p, dv_operands, stages_v, cfg.dv_part)
        dq = self.new_dq()
        if const_expr(cfg.dq_split == "transposed"):
            dq_b = dq_b[None, None, None, ds_stage]
        else:
            dq_a = dq_a[None, None, None, ds_stage]
        self.issue(self.dq_mma(), dq, dq_a, dq_b, False)
        self.issue_gradient(dk, words_ds, dk_operands, stages_k, cfg.dk_part, rest)
        wg.wait_group(2)  # dV is complete
        self.release(pipe_do, state_do)  # all threads: they read this dO and D no more
        wg.wait_group(1)  # dQ is complete
        if const_expr(end_keys is not None):
            if m == end_keys[2]:
                end_keys[0].consumer_release(end_keys[1])  # all threads: no product reads K and V any more
        if const_expr(cfg.dq_direct):
            self.add_dq(dq, g_dq[m, None].iterator.toint(), warpgroup)
        else:
            self.hand_dq(dq, s_dq, warpgroup)
        wg.wait_group(0)  # dK is complete
        self.release(pipe_q, state_q)  # likewise this Q and lse2
        state_q.advance()
        if const_expr(not cfg.one_state):
            state_do.advance()
        return state_q, state_do

    @cute.jit
    def consume(
        self,
        frags,
        shared,
        inputs,
        place,
        g_dq: cute.Tensor,
        g_turns: cute.Tensor,
        gradients,
        pipes,
        states,
        blocks,
        end_keys=None,
    ):
        """All query tiles of one query head.

        frags from `fragments`; shared: lse2, D, dS, dQ; inputs: scale of a score, softcap's factor, slope of ALiBi;
        place: position of the thread's first key, seqlen_k, seqlen_k - seqlen_q, window, key tile;
        g_dq (tiles, tile_m * qk_columns); g_turns (tiles, warpgroups), read with `deterministic`; gradients:
        accumulators of dK and dV, updated in place; blocks see `query_blocks`; end_keys: None, or the ring of K and V,
        its state, and the query tile whose products are the last to read them. Returns the states of the rings.
        """
        cfg = self.cfg
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        more = (frags, shared, inputs, place, g_dq, g_turns, gradients, pipes)
        for m in cutlass.range(blocks[0], blocks[1], unroll=1):
            states = self.step(True, m, *more, states, warpgroup, end_keys)
        for m in cutlass.range(blocks[1], blocks[2], unroll=1):
            states = self.step(False, m, *more, states, warpgroup, end_keys)
        if const_expr(cfg.window):
            for m in cutlass.range(blocks[2], blocks[3], unroll=1):
                states = self.step(True, m, *more, states, warpgroup, end_keys)
        if const_expr(cfg.dq_direct and cfg.deterministic):
            self.say_added(warpgroup)
        return states
