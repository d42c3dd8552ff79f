"""Q as A fragments of the products Q K^T (see common/warp.py), in registers or shared memory.

Every warp has all rows of the CTA. For a 16-bit cache a fragment has the elements as they lie. For one of e4m3 lane q
of four takes columns 4q .. 4q + 3 of each 16, the order in which K's codes are loaded, and Q is rounded to fp16 with a
power of two for each row, which `Query.unit` undoes. Codes of an e4m3 Q become fp16 exactly, without one. Of a pair of
heads a row has zeros in the columns of the head that is not its own.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..any.vectors import IN_TYPES, widen
from ..common.floats import fp16_pair, power_of_two
from ..common.warp import e4m3_to_fp16, quad_max
from ..config import DecodeConfig
from .split import Piece


class Query(NamedTuple):
    """Q of a piece."""

    words: cute.Tensor  # (4, k_steps, m_tiles) Uint32: A fragments
    # (2, m_tiles) float32, set for e4m3 only: the power of two by which products of a row are too small
    unit: cute.Tensor
    place: Int32  # shared address of the fragments, where `cfg.q_in_smem`


class Queries:
    """Q of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: DecodeConfig):
        self.cfg = cfg
        self.element = IN_TYPES[cfg.dtype]

    @cute.jit
    def load(self, m_q: cute.Tensor, piece: Piece, place: Int32, lane: Int32) -> Query:
        """The packed rows from piece.row0 on, zeros past the last. m_q (batch, seqlen_q, heads_q, head_dim)."""
        cfg = self.cfg
        group = piece.group
        q_frag = cute.make_rmem_tensor((4, cfg.k_steps, cfg.m_tiles), Uint32)
        unit = cute.make_rmem_tensor((2, cfg.m_tiles), Float32)
        rows = m_q.shape[1] * group.divisor
        q_frag.fill(0)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            # Both halves always: zeros of which the assembler knew would be made anew for each product.
            for h in cutlass.range_constexpr(2):
                row = piece.row0 + 16 * mt + 8 * h + lane // 4
                if const_expr(cfg.fp8):
                    unit[h, mt] = Float32(1.0)
                if row < rows:
                    query, rest = divmod(row, group)
                    source = cute.domain_offset(
                        (piece.batch, query, piece.head * group.divisor + rest, 0), m_q
                    ).iterator.toint()
                    if const_expr(cfg.query == "e4m3"):
                        for s in cutlass.range_constexpr(cfg.k_steps):
                            at = source + 16 * s + 4 * (lane % 4)
                            at = cute.make_ptr(Uint32, at, cute.AddressSpace.gmem, assumed_align=4)
                            codes = cute.make_tensor(at, cute.make_layout(1))[0]
                            q_frag[h, s, mt], q_frag[2 + h, s, mt] = e4m3_to_fp16(codes)
                    elif const_expr(cfg.fp8):
                        side = Int32(0)
                        if const_expr(cfg.heads == 2):
                            side = Int32(1) if rest >= group.divisor // 2 else Int32(0)
                        for s in cutlass.range_constexpr(cfg.k_steps // cfg.heads):
                            words = cute.make_rmem_tensor(2, Uint32)
                            at = cute.make_ptr(
                                Uint32,
                                source + 32 * s + 8 * (lane % 4),
                                cute.AddressSpace.gmem,
                                assumed_align=8,
                            )
                            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(2)), words)
                            if const_expr(cfg.heads == 2):
                                for half in cutlass.range_constexpr(2):
                                    to = s + half * (cfg.k_steps // 2)
                                    q_frag[h, to, mt] = words[0] if side == half else Uint32(0)
                                    q_frag[2 + h, to, mt] = words[1] if side == half else Uint32(0)
                            else:
                                q_frag[h, s, mt], q_frag[2 + h, s, mt] = words[0], words[1]
                    else:
                        for s in cutlass.range_constexpr(cfg.k_steps):
                            for half in cutlass.range_constexpr(2):
                                if const_expr(16 * s + 8 * half < cfg.head_dim):
                                    at = cute.make_ptr(
                                        Uint32,
                                        source + 32 * s + 16 * half + 4 * (lane % 4),
                                        cute.AddressSpace.gmem,
                                        assumed_align=4,
                                    )
                                    q_frag[2 * half + h, s, mt] = cute.make_tensor(at, cute.make_layout(1))[0]
                if const_expr(cfg.fp8 and cfg.query == "16bit"):
                    self.to_fp16(q_frag, unit, h, mt)
        return Query(q_frag, unit, place)

    @cute.jit
    def to_fp16(self, q_frag: cute.Tensor, unit: cute.Tensor, h: cutlass.Constexpr, mt: cutlass.Constexpr):
        """A row of Q, words of its dtype, to fp16 with a power of two of its own."""
        top = Float32(0.0)
        for s in cutlass.range_constexpr(self.cfg.k_steps):
            for half in cutlass.range_constexpr(2):
                x, y = widen(q_frag[2 * half + h, s, mt], self.element)
                top = cute.arch.fmax(top, cute.arch.fmax(cute.arch.fmax(x, -x), cute.arch.fmax(y, -y)))
        top = quad_max(top)
        # The largest element comes to 2^14 or more, below 2^15. An exponent with which the factor or its inverse is no
        # normal number counts as the nearest with which both are.
        exponent = cutlass.min(cutlass.max(top.bitcast(Int32) >> 23, 15), 253)
        factor = power_of_two(254 + 14 - exponent)
        unit[h, mt] = power_of_two(exponent - 14)
        for s in cutlass.range_constexpr(self.cfg.k_steps):
            for half in cutlass.range_constexpr(2):
                x, y = widen(q_frag[2 * half + h, s, mt], self.element)
                q_frag[2 * half + h, s, mt] = fp16_pair(x * factor, y * factor)

    @cute.jit
    def share(self, q: Query, warp: Int32, lane: Int32):
        """Fragments of Q, which all warps have, to shared memory: each warp stores some steps.

        The caller lets all threads meet before the first `fragment`.
        """
        cfg = self.cfg
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for s in cutlass.range_constexpr(cfg.k_steps):
                if warp == s % cfg.warps:
                    at = q.place + 16 * (32 * (mt * cfg.k_steps + s) + lane)
                    target = cute.make_ptr(Uint32, at, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(q.words[None, s, mt], cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def fragment(self, q: Query, s: cutlass.Constexpr, mt: cutlass.Constexpr, lane: Int32) -> cute.Tensor:
        """(4,) words: the fragment of Q for columns 16 s to 16 s + 15 of tile mt."""
        if const_expr(self.cfg.q_in_smem):
            words = cute.make_rmem_tensor(4, Uint32)
            at = q.place + 16 * (32 * (mt * self.cfg.k_steps + s) + lane)
            source = cute.make_ptr(Uint32, at, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
        else:
            words = q.words[None, s, mt]
        return words
