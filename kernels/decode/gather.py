"""The end of a piece: what the warps of a CTA have of its rows meets in shared memory and is added up.

`leave` puts a warp's part where its ring was; all threads meet (attend.py); `add_up` weights the parts by their maxima.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.warp import quad_sum
from ..config import DecodeConfig
from .combine import Results, finish, row_of
from .queries import Query
from .split import Piece
from .step import Rows, State


class Gather:
    """The end of one configuration's pieces; methods are traced into the kernel."""

    def __init__(self, cfg: DecodeConfig):
        self.cfg = cfg

    @cute.jit
    def own_column(
        self,
        state: State,
        rows: Rows,
        i: cutlass.Constexpr,
        n: cutlass.Constexpr,
        h: cutlass.Constexpr,
        mt: cutlass.Constexpr,
    ) -> Float32:
        """Element i of C fragment n of a thread's row in half h: of the n that its head has, if it is one of a pair."""
        value = state.o[i, n, mt]
        if const_expr(self.cfg.heads == 2):
            other = state.o[i, n + self.cfg.n_tiles // 2, mt]
            value = value if rows.side[h] == 0 else other
        return value

    @cute.jit
    def leave(self, state: State, rows: Rows, q: Query, o_factor: cute.Tensor, place: Int32, lane: Int32):
        """O, maxima and sums of a warp to its part of shared memory, at `place`: O (rows, o_pitch), then (rows, 2).

        o_factor  (2,) float32: what O of a thread's rows still wants; e4m3
        """
        cfg = self.cfg
        maximum, total, o = state.maximum, state.total, state.o
        left = cute.make_tensor(
            cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16),
            cute.make_layout((cfg.rows, cfg.o_pitch), stride=(cfg.o_pitch, 1)),
        )
        left_ml = cute.make_tensor(
            cute.make_ptr(
                Float32, place + 4 * cfg.rows * cfg.o_pitch, cute.AddressSpace.smem, assumed_align=8
            ),
            cute.make_layout((cfg.rows, 2), stride=(2, 1)),
        )
        quad = lane % 4
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                row = 16 * mt + 8 * h + lane // 4
                row_sum = quad_sum(total[h, mt])
                if quad == 0:
                    top = maximum[h, mt]
                    if const_expr(cfg.fp8 and not cfg.adjusted):
                        top = top * q.unit[h, mt]  # in units that all rows share
                    left_ml[row, 0] = top
                    left_ml[row, 1] = row_sum
                if const_expr(cfg.fp8):
                    for c in cutlass.range_constexpr(cfg.head_dim_v // 16):
                        for i in cutlass.range_constexpr(4):
                            x = self.own_column(state, rows, 2 * h + i // 2, 2 * c + i % 2, h, mt)
                            left[row, 16 * c + 4 * quad + i] = x * o_factor[h]
                else:
                    for n in cutlass.range_constexpr(cfg.n_tiles):
                        left[row, 8 * n + 2 * quad] = o[2 * h, n, mt]
                        left[row, 8 * n + 2 * quad + 1] = o[2 * h + 1, n, mt]

    @cute.jit
    def add_up(self, base: Int32, results: Results, piece: Piece, tid: Int32):
        """What the warps left, added up: to the output where the piece is whole, else to its slot."""
        cfg = self.cfg
        vectors = cfg.head_dim_v // 4
        packed = results.out.shape[1] * piece.group.divisor
        for index in cutlass.range(tid, cfg.rows * vectors, cfg.threads, unroll=1):
            row = index // vectors
            column = 4 * (index - row * vectors)
            if piece.row0 + row < packed:
                tops = cute.make_rmem_tensor(cfg.warps, Float32)
                top = -Float32.inf
                for w in cutlass.range_constexpr(cfg.warps):
                    place = base + w * cfg.warp_bytes + 4 * cfg.rows * cfg.o_pitch + 8 * row
                    tops[w] = cute.make_tensor(
                        cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=8),
                        cute.make_layout(1),
                    )[0]
                    top = cute.arch.fmax(top, tops[w])
                finite = Float32(0.0) if top == -Float32.inf else top
                total = Float32(0.0)
                o = cute.make_rmem_tensor(4, Float32)
                o.fill(0.0)
                for w in cutlass.range_constexpr(cfg.warps):
                    weight = cute.math.exp2((tops[w] - finite) * results.factor, fastmath=True)
                    place = base + w * cfg.warp_bytes + 4 * cfg.rows * cfg.o_pitch + 8 * row + 4
                    total = (
                        total
                        + weight
                        * cute.make_tensor(
                            cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=4),
                            cute.make_layout(1),
                        )[0]
                    )
                    part = cute.make_rmem_tensor(4, Float32)
                    place = base + w * cfg.warp_bytes + 4 * (row * cfg.o_pitch + column)
                    cute.autovec_copy(
                        cute.make_tensor(
                            cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16),
                            cute.make_layout(4),
                        ),
                        part,
                    )
                    for i in cutlass.range_constexpr(4):
                        o[i] = o[i] + weight * part[i]
                if piece.whole:
                    at = row_of(piece.batch, piece.head, piece.row0 + row, piece.group)
                    finish(cfg, results, at, column, top, total, o)
                else:
                    target = cute.domain_offset((piece.slot, row, column), results.partial_o).iterator
                    target = cute.make_ptr(Float32, target.toint(), cute.AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(o, cute.make_tensor(target, cute.make_layout(4)))
                    if column == 0:
                        results.partial_ml[piece.slot, row, 0] = top
                        results.partial_ml[piece.slot, row, 1] = total
