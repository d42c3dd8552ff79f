"""Rotary position embedding (Su et al., arXiv 2104.09864) of rows of Q and K, eight columns at a time.

With the angles of a row's position, pair (a, b) of its columns becomes

    a cos - b sin, b cos + a sin        each product and then the sum rounded to float32 by itself

"half": columns i and i + rotary_dim / 2 are a pair; "interleaved": columns 2 i and 2 i + 1. Pair i takes column i of
cos and sin. rotary_dim is a multiple of 16, so that eight columns have their partners in eight columns, too, and their
angles side by side. Columns past it stay as they are.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..common.floats import product_rn
from ..config import AppendConfig, QuantizeConfig
from .vectors import IN_TYPES, address_in, row_offset, widen


class Rotary:
    """What all that embeds rows has in common of it."""

    def __init__(self, cfg: QuantizeConfig | AppendConfig):
        self.on = cfg.rotary != "none"
        self.half = cfg.rotary == "half"
        self.in_type = IN_TYPES[cfg.in_dtype]

    @cute.jit
    def first_angle(self, pairs: Int32, column: Int32) -> Int32:
        """Column of cos and sin for the eight columns of a row from `column` on; of `pairs` there are."""
        if const_expr(self.half):
            # column where that is below `pairs`: else the difference, which otherwise wraps, is the smaller
            at = Int32(min(Uint32(column), Uint32(column - pairs)))
        else:
            at = column // 2
        return at

    @cute.jit
    def partner(self, pairs: Int32, column: Int32) -> Int32:
        """ "half": first of the eight columns that are partners of those from `column` on. Past rotary_dim: any."""
        return self.first_angle(pairs, column) + (pairs if column < pairs else Int32(0))

    @cute.jit
    def row_of(self, m_table: cute.Tensor, position: Int32) -> Int64:
        """Address of the cosines or sines, (seqlen_ro, rotary_dim / 2), of a position."""
        return address_in(m_table, 0, 0) + row_offset(m_table, position)

    @cute.jit
    def angles(self, row: Int64, pairs: Int32, column: Int32) -> cute.Tensor:
        """Cosines or sines, of `row_of`, for the eight columns from `column` on: (words,), four for "half" and two for
        interleaved pairs. Past rotary_dim: any."""
        count = 4 if self.half else 2
        at = min(self.first_angle(pairs, column), pairs - 2 * count)
        source = cute.make_ptr(Uint32, row + 2 * at, cute.AddressSpace.gmem, assumed_align=4 * count)
        words = cute.make_rmem_tensor(count, Uint32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), words)
        return words

    @cute.jit
    def embed(
        self,
        own: cute.Tensor,  # (4,) words: eight columns
        other: cute.Tensor,  # "half": (4,) words, their partners
        cos: cute.Tensor,  # of `angles`
        sin: cute.Tensor,
        pairs: Int32,
        column: Int32,  # the first of the eight
        x: cute.Tensor,  # (8,) float32, the result
    ):
        inside = column < 2 * pairs
        # The product with the sine is subtracted in the first of a pair: as if the sine had the other sign.
        flip = Uint32(0x80008000) if column < pairs else Uint32(0)
        for w in cutlass.range_constexpr(4):
            a, b = widen(own[w], self.in_type)
            if const_expr(self.half):
                cos_a, cos_b = widen(cos[w], self.in_type)
                sin_a, sin_b = widen(sin[w] ^ flip, self.in_type)
                other_a, other_b = widen(other[w], self.in_type)
                new_a = product_rn(a, cos_a) + product_rn(other_a, sin_a)
                new_b = product_rn(b, cos_b) + product_rn(other_b, sin_b)
            else:
                cos_w = widen(cos[w // 2], self.in_type)[w % 2]
                sin_w = widen(sin[w // 2], self.in_type)[w % 2]
                new_a = product_rn(a, cos_w) - product_rn(b, sin_w)
                new_b = product_rn(b, cos_w) + product_rn(a, sin_w)
            x[2 * w] = new_a if inside else a
            x[2 * w + 1] = new_b if inside else b
