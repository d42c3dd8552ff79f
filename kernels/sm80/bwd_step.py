"""One query tile of the 16-bit backward of mma.sync: its five products and what is between them.

The warps share every product (`Bwd16Sm80Config`). S = Q K^T and dP = dO V^T have queries as rows; P and dS go through
shared memory, (tile_m, tile_n), where dV += P^T dO and dK += dS^T Q read them transposed and dQ = dS K as they are. dK
and dV stay in registers; dQ of the step is added to its sum in global memory.

One step, all warps alike; | is a barrier of the CTA:

    | S; exp, P -> shared memory under dP; dS -> shared memory | dV; dQ; dK, under which dQ leaves

The first barrier says that the copies of Q and dO of the step have arrived and that the step before reads shared memory
no more; behind it those of the next step start, into the other buffers. The second says that P and dS are written. What
has one buffer is copied when dV, and dK if it is Q, is done, behind a barrier more; then dQ comes last and the copies
run under it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..common.floats import bf16_pair, fp16_pair
from ..common.scores import tanh_of
from ..common.turns import await_turn, end_turn
from ..common.warp import load_matrices, load_matrices_transposed, multiply_add, store_word
from ..config import Bwd16Sm80Config
from .bwd_tiles import Tile

LOG2_E = math.log2(math.e)


class Shared(NamedTuple):
    """Shared addresses. Buffers of Q and dO, and of their rows of lse2 and D, lie behind one another."""

    k: Int32
    v: Int32
    q: Int32
    do: Int32
    p: Int32
    ds: Int32
    lse2: Int32
    d_rows: Int32
    key_tile: Int32


class Scoring(NamedTuple):
    """What of a call makes P of products Q K^T."""

    scale: Float32  # of a score: softmax_scale * log2(e), with softcap softcap * log2(e)
    softcap_factor: Float32  # 2 * log2(e) * softmax_scale / softcap
    seqlen_k: Int32
    shift: Int32  # seqlen_k - seqlen_q
    left: Int32  # keys before and behind a query's own position that it sees
    right: Int32


class Lane(NamedTuple):
    """Offsets in tiles of what a thread loads and stores, of the first block of its warp."""

    s_q: Int32  # Q as A of S
    s_do: Int32  # dO as A of dP
    s_k: Int32  # K as B of S
    s_v: Int32  # V as B of dP
    p: Int32  # where its P and dS go
    row: Int32  # of its first accumulator of S
    key: Int32  # likewise
    gradient: Int32  # P and dS as A of dV and dK
    dv_do: Int32  # dO as B of dV
    dk_q: Int32  # Q as B of dK
    dq_ds: Int32  # dS as A of dQ
    dq_k: Int32  # K as B of dQ
    dq: Int32  # bytes to its first accumulator of dQ in the sum of a tile


class Place(NamedTuple):
    """Where a thread's first accumulator of S is. Of the one c queries and j keys on, the score is hidden unless
    first <= j - c <= last and j <= tail."""

    first: Int32
    last: Int32
    tail: Int32
    ahead: Float32  # keys from its key to its query's own


def add_to_memory(address: Int64, offset: int, value: Float32) -> None:
    """global [address + offset] += value, which nobody waits for."""
    cute.arch.inline_ptx(
        f"red.relaxed.gpu.global.add.f32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, value]
    )


def load_float(address: Int32) -> Float32:
    """A float from shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


class BwdStep:
    """The computation of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: Bwd16Sm80Config):
        self.cfg = cfg
        self.qk, self.v, self.scores = Tile(cfg.qk_columns), Tile(cfg.v_columns), Tile(cfg.tile_n)
        # Warps along the columns of the results.
        self.s_columns = cfg.warps // cfg.s_rows
        self.kv_columns = cfg.warps // cfg.kv_rows
        self.dq_columns = cfg.warps // cfg.dq_rows
        # Blocks of 16 rows and of 16 columns of a warp.
        self.s_blocks = (cfg.tile_m // 16 // cfg.s_rows, cfg.tile_n // 16 // self.s_columns)
        self.dk_blocks = (cfg.tile_n // 16 // cfg.kv_rows, cfg.qk_columns // 16 // self.kv_columns)
        self.dv_blocks = (cfg.tile_n // 16 // cfg.kv_rows, cfg.v_columns // 16 // self.kv_columns)
        self.dq_blocks = (cfg.tile_m // 16 // cfg.dq_rows, cfg.qk_columns // 16 // self.dq_columns)

    # -- operands ---------------------------------------------------------------------------------------------

    @cute.jit
    def lane(self, lane: Int32, warp: Int32) -> Lane:
        """Of a thread."""
        cfg, qk, v, scores = self.cfg, self.qk, self.v, self.scores
        s_row, s_column = warp & (cfg.s_rows - 1), warp >> (cfg.s_rows.bit_length() - 1)
        kv_row, kv_column = warp & (cfg.kv_rows - 1), warp >> (cfg.kv_rows.bit_length() - 1)
        dq_row, dq_column = warp & (cfg.dq_rows - 1), warp >> (cfg.dq_rows.bit_length() - 1)
        return Lane(
            s_q=qk.tall(lane) + s_row * (16 * qk.pitch),
            s_do=v.tall(lane) + s_row * (16 * v.pitch),
            s_k=qk.wide(lane) + s_column * (16 * qk.pitch),
            s_v=v.wide(lane) + s_column * (16 * v.pitch),
            p=scores.of_warp(scores.accumulator(lane), s_column, self.s_columns)
            + s_row * (16 * scores.pitch),
            row=s_row * 16 + (lane >> 2),
            key=s_column * 16 + (lane & 3) * 2,
            gradient=scores.of_warp(scores.wide(lane), kv_row, cfg.kv_rows),
            dv_do=v.of_warp(v.tall(lane), kv_column, self.kv_columns),
            dk_q=qk.of_warp(qk.tall(lane), kv_column, self.kv_columns),
            dq_ds=scores.tall(lane) + dq_row * (16 * scores.pitch),
            dq_k=qk.of_warp(qk.tall(lane), dq_column, self.dq_columns),
            dq=warp * (cfg.dq_registers * 128) + lane * 4,
        )

    def along_rows(self, tile: Tile, base, offset, blocks: int, count: int):
        """Loads of an operand whose rows, shared by `count` warps, are rows of `tile`: step of depth -> fragments."""

        def load(step: int) -> list:
            address = tile.block(offset, step) + base
            return [load_matrices(address + i * count * (16 * tile.pitch)) for i in range(blocks)]

        return load

    def along_columns(self, tile: Tile, base, offset, blocks: int, count: int):
        """Likewise of one whose rows are columns of `tile`."""

        def load(step: int) -> list:
            places = [tile.block(offset, i, count) + base for i in range(blocks)]
            return [load_matrices_transposed(place + step * (16 * tile.pitch)) for place in places]

        return load

    def new_accumulators(self, blocks: tuple[int, int]) -> cute.Tensor:
        """(4, column tiles of 8, row tiles of 16), zeroed."""
        acc = cute.make_rmem_tensor((4, 2 * blocks[1], blocks[0]), Float32)
        acc.fill(0.0)
        return acc

    def product(self, acc: cute.Tensor, load_a, load_b, depth: int, behind=None) -> None:
        """acc += a b over `depth` steps of 16.

        behind  called with the number of each step when its products are issued
        """
        for step in range(depth):
            a, b = load_a(step), load_b(step)
            for n, words in enumerate(b):
                for half in range(2):
                    for m, fragment in enumerate(a):
                        c, b_words = acc[None, 2 * n + half, m], words[2 * half : 2 * half + 2]
                        multiply_add(c, fragment, *b_words, self.cfg.dtype)
            if behind is not None:
                behind(step)

    # -- arithmetic -------------------------------------------------------------------------------------------

    def pair(self, low: Float32, high: Float32) -> Uint32:
        return bf16_pair(low, high) if self.cfg.dtype == "bf16" else fp16_pair(low, high)

    @cute.jit
    def row_values(self, base: Int32, lane: Lane) -> cute.Tensor:
        """The values of the thread's rows, (2, m_tiles), from tile_m floats in shared memory."""
        values = cute.make_rmem_tensor((2, self.s_blocks[0]), Float32)
        for m in cutlass.range_constexpr(self.s_blocks[0]):
            for r in cutlass.range_constexpr(2):
                values[r, m] = load_float(base + (lane.row + (16 * self.cfg.s_rows * m + 8 * r)) * 4)
        return values

    @cute.jit
    def place(self, query0: Int32, key0: Int32, scoring: Scoring) -> Place:
        """query0 and key0 are the positions of the thread's first accumulator."""
        own = query0 + scoring.shift - key0
        right = scoring.right if const_expr(self.cfg.window) else Int32(0)
        return Place(own - scoring.left, own + right, scoring.seqlen_k - 1 - key0, own.to(Float32))

    def probabilities(
        self,
        masking: bool,
        n: int,
        m: int,
        s: cute.Tensor,
        target,
        lse2,
        place: Place,
        scoring: Scoring,
        slope,
    ) -> None:
        """Tile (n, m) of S, the accumulators of 8 keys and 16 queries, -> P, in 16 bits to shared address `target`.

        In place of S stays P, with softcap times its slope 1 - tanh^2.
        """
        cfg = self.cfg
        for r in range(2):
            pair = []
            for e in range(2):
                key = 16 * self.s_columns * (n // 2) + 8 * (n % 2) + e  # behind the thread's first
                beyond = key - 16 * cfg.s_rows * m - 8 * r
                score, bias = s[2 * r + e, n, m], lse2[r, m]
                if cfg.softcap:
                    score = tanh_of(score * scoring.softcap_factor)
                if cfg.alibi:
                    distance = place.ahead - Float32(beyond)
                    bias = slope * cute.arch.fmax(distance, -distance) + bias
                p = cute.math.exp2(score * scoring.scale - bias, fastmath=True)
                if masking:
                    seen = place.tail >= key
                    if cfg.causal or cfg.window:
                        seen = seen & (place.last >= beyond)
                    if cfg.window:
                        seen = seen & (place.first <= beyond)
                    p = self.where(seen, p)
                s[2 * r + e, n, m] = p * (Float32(1.0) - score * score) if cfg.softcap else p
                pair.append(p)
            store_word(target + 8 * r * self.scores.pitch, self.pair(*pair))

    @cute.jit
    def where(self, seen, p: Float32) -> Float32:
        return p if seen else Float32(0.0)

    def score_target(self, base, lane: Lane, n: int, m: int):
        """Shared address of what a thread stores of tile (n, m) of P or dS."""
        offset = self.scores.block(lane.p, n // 2, self.s_columns, n % 2)
        return offset + base + 16 * self.cfg.s_rows * m * self.scores.pitch

    @cute.jit
    def score_gradients(self, p: cute.Tensor, dp: cute.Tensor, d_rows: cute.Tensor, base: Int32, lane: Lane):
        """dS = P (dP - D), in 16 bits to shared memory; p is what `probabilities` leaves."""
        for n in cutlass.range_constexpr(2 * self.s_blocks[1]):
            for m in cutlass.range_constexpr(self.s_blocks[0]):
                target = self.score_target(base, lane, n, m)
                for r in cutlass.range_constexpr(2):
                    low, high = [p[2 * r + e, n, m] * (dp[2 * r + e, n, m] - d_rows[r, m]) for e in range(2)]
                    store_word(target + 8 * r * self.scores.pitch, self.pair(low, high))

    # -- the step ---------------------------------------------------------------------------------------------

    @cute.jit
    def compute_scores(
        self,
        masking: cutlass.Constexpr,
        shared: Shared,
        lane: Lane,
        stages,  # buffers of Q and dO
        query0: Int32,  # first of the tile
        key0: Int32,
        scoring: Scoring,
        slope: Float32,  # of ALiBi, in octaves a key
    ):
        """P and dS of the step, to shared memory."""
        cfg = self.cfg
        (rows, columns), s_rows, s_columns = self.s_blocks, cfg.s_rows, self.s_columns
        q = shared.q + stages[0] * (cfg.tile_m * self.qk.pitch)
        do = shared.do + stages[1] * (cfg.tile_m * self.v.pitch)
        lse2 = self.row_values(shared.lse2 + stages[0] * (cfg.tile_m * 4), lane)
        place = self.place(query0 + lane.row, key0 + lane.key, scoring)
        s, dp = self.new_accumulators(self.s_blocks), self.new_accumulators(self.s_blocks)
        self.product(
            s,
            self.along_rows(self.qk, q, lane.s_q, rows, s_rows),
            self.along_rows(self.qk, shared.k, lane.s_k, columns, s_columns),
            cfg.qk_columns // 16,
        )
        depth = cfg.v_columns // 16
        tiles = [(n, m) for n in range(2 * columns) for m in range(rows)]

        def exponentiate(step: int) -> None:
            for n, m in tiles[len(tiles) * step // depth : len(tiles) * (step + 1) // depth]:
                target = self.score_target(shared.p, lane, n, m)
                self.probabilities(masking, n, m, s, target, lse2, place, scoring, slope)

        self.product(
            dp,
            self.along_rows(self.v, do, lane.s_do, rows, s_rows),
            self.along_rows(self.v, shared.v, lane.s_v, columns, s_columns),
            depth,
            exponentiate,
        )
        d_rows = self.row_values(shared.d_rows + stages[1] * (cfg.tile_m * 4), lane)
        self.score_gradients(s, dp, d_rows, shared.ds, lane)

    @cute.jit
    def add_dv(self, dv: cute.Tensor, shared: Shared, lane: Lane, stages):
        """dV += P^T dO."""
        cfg = self.cfg
        do = shared.do + stages[1] * (cfg.tile_m * self.v.pitch)
        rows, columns = self.dv_blocks
        self.product(
            dv,
            self.along_columns(self.scores, shared.p, lane.gradient, rows, cfg.kv_rows),
            self.along_columns(self.v, do, lane.dv_do, columns, self.kv_columns),
            cfg.tile_m // 16,
        )

    def add_dk(self, dk: cute.Tensor, shared: Shared, lane: Lane, stages, behind=None) -> None:
        """dK += dS^T Q, before softmax_scale."""
        cfg = self.cfg
        q = shared.q + stages[0] * (cfg.tile_m * self.qk.pitch)
        rows, columns = self.dk_blocks
        self.product(
            dk,
            self.along_columns(self.scores, shared.ds, lane.gradient, rows, cfg.kv_rows),
            self.along_columns(self.qk, q, lane.dk_q, columns, self.kv_columns),
            cfg.tile_m // 16,
            behind,
        )

    @cute.jit
    def make_dq(self, shared: Shared, lane: Lane) -> cute.Tensor:
        """dS K of the key tile, before softmax_scale."""
        cfg = self.cfg
        rows, columns = self.dq_blocks
        dq = self.new_accumulators(self.dq_blocks)
        self.product(
            dq,
            self.along_rows(self.scores, shared.ds, lane.dq_ds, rows, cfg.dq_rows),
            self.along_columns(self.qk, shared.k, lane.dq_k, columns, self.dq_columns),
            cfg.tile_n // 16,
        )
        return dq

    @cute.jit
    def add_dq_in_turn(self, dq: cute.Tensor, address: Int64, turn):
        """Add the thread's accumulators to the sum, when the key tiles before this one have. All threads call it."""
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            await_turn(turn)
        cute.arch.sync_threads()  # all threads: the first has seen that it is the CTA's turn
        self.add_dq(dq, address, 0, cute.size(dq))
        cute.arch.fence_acq_rel_gpu()  # what this thread added comes before the next turn
        cute.arch.sync_threads()  # all threads: all have added, and the first may say so
        if tid == 0:
            end_turn(turn)

    def add_dq(self, dq: cute.Tensor, address, first: int, end: int) -> None:
        """Add accumulators first .. end - 1 of the thread; element e of lane l of warp w is at (w * size + e) * 32 + l,
        so that a warp adds to 128 bytes in a row."""
        for e in range(first, end):
            add_to_memory(address, 128 * e, dq[e])
