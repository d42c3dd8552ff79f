"""What a warp computes of the 16 keys of one step: S = Q K^T, its scales and mask, the online softmax, O += P V.

All of it is in registers but K, V and, where there is no room, Q. Row h of a lane l in tile mt, h 0 or 1, is packed row
16 mt + 8 h + l / 4 of the CTA; with `half_tile` there is no h = 1. Fragments are those of common/warp.py: element i of
a C fragment is of row i / 2 and column i % 2 of the lane's two.

e4m3: codes become fp16 in registers, exactly. Inside 16 columns the order of products Q K^T is that of the loads, in Q,
too (queries.py). Of the products P V, word c of V's loads holds two neighbouring columns of two keys: one product takes
the even columns, one the odd ones, and lane q gets columns 4q .. 4q + 3 of O. `gather.leave` puts them in order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.floats import bf16_pair, fp16_pair, power_of_two
from ..common.warp import (
    e4m3_to_fp16,
    interleave_bytes,
    load_matrices,
    load_matrices_transposed,
    multiply_add,
    quad_max,
)
from ..config import DecodeConfig
from .loads import Keys, inside, piece_from, place_of
from .queries import Queries, Query
from .split import Lengths, Piece

LOG2_E = math.log2(math.e)
SMALLEST_UNIT = 2.0**-100  # of O with scales for each token


class Scoring(NamedTuple):
    """What of a call makes scores of products Q K^T, for all rows."""

    slopes: cute.Tensor | None  # (batch, heads_q) float32 with ALiBi
    scale: Float32  # softmax_scale * log2(e), > 0; with softcap softcap * log2(e)
    softcap_factor: Float32  # 2 log2(e) softmax_scale / softcap
    right: Int32  # keys behind a query's own position that it sees
    q_scale: cute.Tensor | None  # (batch, heads_k) float32, of an e4m3 Q


class Rows(NamedTuple):
    """What makes scores of products, for the rows of a thread: tensors are (2, m_tiles)."""

    factor: cute.Tensor  # of a product: to octaves, or with softcap or ALiBi what `adjust` wants
    softcap_factor: Float32
    scale: Float32
    slope: cute.Tensor  # in octaves a key
    position: cute.Tensor  # int32: slot of the query's own key
    left: Int32  # keys before and behind it that the query sees
    right: Int32
    side: cute.Tensor  # (2,) int32, set for a pair of heads only: which of them a row is of


class State(NamedTuple):
    """What goes on from step to step, of the rows of a thread: (2, m_tiles) float32 if not said otherwise."""

    maximum: cute.Tensor  # of the scores so far
    total: cute.Tensor  # this thread's part of the sum of P
    rescale: cute.Tensor  # by which O and the sum of earlier steps change
    o: cute.Tensor  # (4, n_tiles, m_tiles): C fragments
    unit_o: cute.Tensor  # (scale_sets,): R, in which O counts where each token has a scale


class Step:
    """The computation of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: DecodeConfig):
        self.cfg = cfg
        self.queries = Queries(cfg)
        self.product = "fp16" if cfg.fp8 else cfg.dtype  # elements of the products
        # Scales of keys that a thread has: of a pair of heads those of each of its rows, else the same for all
        self.scale_sets = cfg.halves if cfg.heads == 2 else 1

    def scale_set(self, h: int) -> int:
        """The set of the rows h of a thread."""
        return min(h, self.scale_sets - 1)

    @cute.jit
    def rows_of(
        self, scoring: Scoring, lengths: Lengths, piece: Piece, keys: Keys, q: Query, lane: Int32
    ) -> Rows:
        """The thread's rows of a piece."""
        cfg = self.cfg
        group = piece.group
        factor, slope = [cute.make_rmem_tensor((2, cfg.m_tiles), Float32) for _ in range(2)]
        position = cute.make_rmem_tensor((2, cfg.m_tiles), Int32)
        side = cute.make_rmem_tensor(2, Int32)
        side.fill(0)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                row = piece.row0 + 16 * mt + 8 * h + lane // 4
                query = cutlass.min(row // group, lengths.seqlen_q - 1)
                if const_expr(cfg.heads == 2):
                    side[h] = Int32(1) if row % group >= group.divisor // 2 else Int32(0)
                position[h, mt] = query + keys.end - lengths.seqlen_q
                factor[h, mt] = scoring.scale
                if const_expr(cfg.fp8):
                    factor[h, mt] = (
                        q.unit[h, mt] if const_expr(cfg.softcap) else scoring.scale * q.unit[h, mt]
                    )
                if const_expr(cfg.alibi):
                    head_q = piece.head * group.divisor + row % group
                    slope[h, mt] = scoring.slopes[piece.batch, head_q] * Float32(LOG2_E)
        return Rows(
            factor, scoring.softcap_factor, scoring.scale, slope, position, lengths.left, scoring.right, side
        )

    @cute.jit
    def new_state(self) -> State:
        """Before the first step."""
        cfg = self.cfg
        maximum, total, rescale = [cute.make_rmem_tensor((2, cfg.m_tiles), Float32) for _ in range(3)]
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        o = cute.make_rmem_tensor((4, cfg.n_tiles, cfg.m_tiles), Float32)
        o.fill(0.0)
        unit_o = cute.make_rmem_tensor(self.scale_sets, Float32)
        unit_o.fill(SMALLEST_UNIT)
        return State(maximum, total, rescale, o, unit_o)

    @cute.jit
    def scores(self, q: Query, stage: Int32, lane: Int32, s: cute.Tensor):
        """Q K^T of a step into s (4, 2, m_tiles): C fragments of keys 0 to 7 and 8 to 15.

        stage  shared address of the step's K
        """
        cfg = self.cfg
        s.fill(0.0)
        # A chain of products in each, added up at the end
        sums = [s, *[cute.make_rmem_tensor((4, 2, cfg.m_tiles), Float32) for _ in range(cfg.chains - 1)]]
        for other in sums[1:]:
            other.fill(0.0)
        # Matrices of a load: keys 0 to 7 and 8 to 15, of each two pieces of 16 bytes.
        row = lane // 16 * 8 + lane % 8
        address = stage + place_of(row, lane // 8 % 2, cfg.k_pitch, cfg.k_chunks)
        if const_expr(cfg.fp8):
            for pair in cutlass.range_constexpr(-(-cfg.k_steps // 2)):
                words = load_matrices(piece_from(address, 2 * pair, cfg.k_chunks))
                for i in cutlass.range_constexpr(2):
                    step = 2 * pair + i
                    if const_expr(step < cfg.k_steps):
                        a = [self.queries.fragment(q, step, mt, lane) for mt in range(cfg.m_tiles)]
                        for j in cutlass.range_constexpr(2):
                            b0, b1 = e4m3_to_fp16(words[2 * j + i])
                            for mt in cutlass.range_constexpr(cfg.m_tiles):
                                multiply_add(
                                    sums[step % cfg.chains][None, j, mt], a[mt], b0, b1, self.product
                                )
        else:
            for step in cutlass.range_constexpr(cfg.k_steps):
                words = load_matrices(piece_from(address, 2 * step, cfg.k_chunks))
                a = [self.queries.fragment(q, step, mt, lane) for mt in range(cfg.m_tiles)]
                for j in cutlass.range_constexpr(2):
                    b0, b1 = words[2 * j], words[2 * j + 1]
                    if const_expr(16 * step + 8 >= cfg.head_dim):
                        b1 = Uint32(0)  # the next row's, of which 0 times Q's padding might be NaN
                    for mt in cutlass.range_constexpr(cfg.m_tiles):
                        multiply_add(sums[step % cfg.chains][None, j, mt], a[mt], b0, b1, self.product)
        for other in sums[1:]:
            for mt in cutlass.range_constexpr(cfg.m_tiles):
                for j in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2 * cfg.halves):
                        s[i, j, mt] = s[i, j, mt] + other[i, j, mt]

    @cute.jit
    def adjust(self, s: cute.Tensor, key0: Int32, k_scale: cute.Tensor, rows: Rows, keys: Keys, lane: Int32):
        """Scales, softcap, ALiBi and mask of a step's scores, in place.

        k_scale  (2, 2, scale_sets): of this thread's two keys in either half of the step; e4m3
        """
        cfg = self.cfg
        factor, softcap_factor, scale, slope, position, left, right, _ = rows
        column = key0 + 2 * (lane % 4)  # key of element 0; element i of half j is 8 j + i % 2 on
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                first, end = keys.first, keys.end
                if const_expr(cfg.row_ends):
                    # Anew in each step: there are no registers to keep them.
                    first = cutlass.max(first, position[h, mt] - left)
                    end = cutlass.min(end, position[h, mt] + right + 1)
                for j in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        x = s[2 * h + e, j, mt]
                        if const_expr(cfg.fp8):
                            x = x * k_scale[e, j, self.scale_set(h)]
                        if const_expr(cfg.softcap):
                            # tanh(x) = 1 - 2 / (1 + e^2x): the hardware's tanh is 11 bits, which softcap would multiply
                            grown = x * softcap_factor
                            if const_expr(cfg.fp8):
                                grown = grown * factor[h, mt]
                            grown = cute.math.exp2(grown, fastmath=True)
                            x = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(grown + Float32(1.0))
                            x = x * scale
                        elif const_expr(cfg.alibi):
                            x = x * factor[h, mt]
                        if const_expr(cfg.alibi):
                            distance = (column + (8 * j + e) - position[h, mt]).to(Float32)
                            x = x - slope[h, mt] * cute.arch.fmax(distance, -distance)
                        key = column + (8 * j + e)
                        if const_expr(cfg.lean):
                            s[2 * h + e, j, mt] = x if inside(key, first, end) else -Float32.inf
                        else:
                            s[2 * h + e, j, mt] = x if (key < end) & (key >= first) else -Float32.inf

    @cute.jit
    def softmax(self, s: cute.Tensor, rows: Rows, state: State):
        """Scores -> P in place; maximum and this thread's part of the sum of each row go on, rescale is set."""
        cfg = self.cfg
        factor, maximum, total, rescale = rows.factor, state.maximum, state.total, state.rescale
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                top = cute.arch.fmax(
                    cute.arch.fmax(s[2 * h, 0, mt], s[2 * h + 1, 0, mt]),
                    cute.arch.fmax(s[2 * h, 1, mt], s[2 * h + 1, 1, mt]),
                )
                top = cute.arch.fmax(maximum[h, mt], quad_max(top))
                finite = Float32(0.0) if top == -Float32.inf else top
                f = Float32(1.0) if const_expr(cfg.adjusted) else factor[h, mt]
                # The difference comes before the factor: the largest score gives 1, whatever its size.
                rescale[h, mt] = cute.math.exp2((maximum[h, mt] - finite) * f, fastmath=True)
                maximum[h, mt] = top
                row = total[h, mt] * rescale[h, mt]
                for j in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        p = cute.math.exp2((s[2 * h + e, j, mt] - finite) * f, fastmath=True)
                        s[2 * h + e, j, mt] = p
                        row = row + p
                total[h, mt] = row

    @cute.jit
    def scale_p(self, p: cute.Tensor, v_scale: cute.Tensor, state: State):
        """P times the scales of V over R, in place; R and `rescale`, that of O, follow.

        v_scale  (2, 2, scale_sets)
        """
        cfg = self.cfg
        unit_o, rescale = state.unit_o, state.rescale
        for i in cutlass.range_constexpr(self.scale_sets):
            top = unit_o[i]
            for j in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    top = cute.arch.fmax(top, cute.arch.fmax(v_scale[e, j, i], -v_scale[e, j, i]))
            top = quad_max(top)
            # Rounded up to a power of two; one that is infinite or nearly so is taken for 2^126
            exponent = cutlass.min((top.bitcast(Int32) + Int32(0x7FFFFF)) >> 23, 253)
            inverse = power_of_two(254 - exponent)
            shrink = unit_o[i] * inverse
            unit_o[i] = power_of_two(exponent)
            for mt in cutlass.range_constexpr(cfg.m_tiles):
                for h in cutlass.range_constexpr(cfg.halves):
                    if const_expr(self.scale_set(h) == i):
                        rescale[h, mt] = rescale[h, mt] * shrink
                        for j in cutlass.range_constexpr(2):
                            for e in cutlass.range_constexpr(2):
                                p[2 * h + e, j, mt] = p[2 * h + e, j, mt] * (v_scale[e, j, i] * inverse)

    @cute.jit
    def accumulate(self, p: cute.Tensor, state: State, stage_v: Int32, lane: Int32):
        """O <- O * rescale + P V. O stays where no row of the warp has a factor but 1.

        stage_v  shared address of the step's V
        """
        cfg = self.cfg
        rescale, o = state.rescale, state.o
        moved = rescale[0, 0] != Float32(1.0)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                moved = moved | (rescale[h, mt] != Float32(1.0))
        if cute.arch.vote_any_sync(moved):
            for mt in cutlass.range_constexpr(cfg.m_tiles):
                for n in cutlass.range_constexpr(cfg.n_tiles):
                    for i in cutlass.range_constexpr(2 * cfg.halves):  # a half that is left out stays 0
                        o[i, n, mt] = o[i, n, mt] * rescale[i // 2, mt]
        pair = bf16_pair if const_expr(self.product == "bf16") else fp16_pair
        words = cute.make_rmem_tensor((4, cfg.m_tiles), Uint32)
        words.fill(0)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for j in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(cfg.halves):
                    words[2 * j + h, mt] = pair(p[2 * h, j, mt], p[2 * h + 1, j, mt])
        # Matrices of a load: keys 0 to 7 and 8 to 15 of a piece of 16 bytes, then of the next piece.
        address = stage_v + place_of(lane % 16, lane // 16, cfg.v_pitch, cfg.v_chunks)
        for c in cutlass.range_constexpr(0, cfg.v_chunks, 2):
            loaded = load_matrices_transposed(piece_from(address, c, cfg.v_chunks))
            for i in cutlass.range_constexpr(2):
                if const_expr(c + i < cfg.v_chunks):
                    if const_expr(cfg.fp8):
                        even0, odd0 = e4m3_to_fp16(interleave_bytes(loaded[2 * i]))
                        even1, odd1 = e4m3_to_fp16(interleave_bytes(loaded[2 * i + 1]))
                        for mt in cutlass.range_constexpr(cfg.m_tiles):
                            n = 2 * (c + i)
                            multiply_add(o[None, n, mt], words[None, mt], even0, even1, self.product)
                            multiply_add(o[None, n + 1, mt], words[None, mt], odd0, odd1, self.product)
                    else:
                        for mt in cutlass.range_constexpr(cfg.m_tiles):
                            multiply_add(
                                o[None, c + i, mt],
                                words[None, mt],
                                loaded[2 * i],
                                loaded[2 * i + 1],
                                self.product,
                            )
