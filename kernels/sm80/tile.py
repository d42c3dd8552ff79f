"""A tile of 16-bit rows in shared memory: where its elements lie, how cp.async fills it and ldmatrix reads it.

A row is cut into lines of 128 bytes, or 64 where 128 do not divide it, and the lines of all rows with the same columns
are a block: line r of block b begins at b * block_bytes + r * line_bytes. Inside a line the pieces of 16 bytes are
swizzled: piece w lies at w ^ s(r), s(r) = r % 8 for lines of eight pieces, (r / 2) % 4 for those of four. So any eight
rows that follow one another, from a multiple of eight on, have one piece in eight different bank groups: the rows of a
matrix of ldmatrix do not collide, nor do the pieces of a line that cp.async writes.

s depends on the row modulo 8 alone, so a lane's address changes with the row tile by a constant, and with the columns
by an exclusive or that is the same for all row tiles (`Tile.near`). Tiles begin at multiples of 128 bytes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ..common.warp import (
    copy_16_bytes,
    copy_16_bytes_if,
    copy_16_bytes_or_zeros,
    load_matrices,
    load_matrices_transposed,
)
from ..config import line_columns, padded_columns


class Tile:
    """Rows by columns, a multiple of 8, of 16-bit elements; columns up to the next multiple of 32 are zeros.

    Args:
        rows: a multiple of `pass_rows`.
        threads: of the CTA, all of which copy.
    """

    def __init__(self, rows: int, columns: int, threads: int):
        self.rows, self.columns = rows, columns
        self.pieces = line_columns(columns) // 8  # of a line
        self.line_bytes = 16 * self.pieces
        self.blocks = padded_columns(columns) // line_columns(columns)
        self.block_bytes = rows * self.line_bytes
        self.bytes = self.blocks * self.block_bytes
        self.pass_rows = threads // self.pieces  # of which each thread copies a piece, in each block
        self.passes = rows // self.pass_rows
        # pieces of the last block that hold columns; the others are zeros
        self.last_pieces = columns // 8 - self.pieces * (self.blocks - 1)

    # -- addresses --------------------------------------------------------------------------------------------

    @cute.jit
    def at(self, row: Int32, piece: Int32) -> Int32:
        """Offset in bytes of a piece of the first block."""
        swizzle = row // (8 // self.pieces) % self.pieces
        return row * self.line_bytes + (piece ^ swizzle) * 16

    def near(self, address: Int32) -> list[Int32]:
        """Addresses of the pairs of pieces 0 and 1, 2 and 3, ... of a line, from that of piece 0 or 1."""
        return [address ^ (32 * i) for i in range(self.pieces // 2)]

    def offset(self, pair: int) -> tuple[int, int]:
        """(index in `near`, bytes beside it) of pair `pair` of a row's pieces."""
        block, i = divmod(pair, self.pieces // 2)
        return i, block * self.block_bytes

    # -- from global memory -----------------------------------------------------------------------------------

    @cute.jit
    def target(self, base: Int32, tid: Int32) -> Int32:
        """Shared address of the piece that a thread copies in pass 0 of block 0; pass i is i * pass_bytes on."""
        return base + self.at(tid // self.pieces, tid % self.pieces)

    @property
    def pass_bytes(self) -> int:
        return self.pass_rows * self.line_bytes

    @cute.jit
    def source_offset(self, stride: Int64, tid: Int32) -> Int32:
        """Bytes from the first row of a pass in the source to that piece, for rows `stride` elements apart."""
        return tid // self.pieces * Int32(2 * stride) + tid % self.pieces * 16

    @cute.jit
    def copy_pass(self, target: Int32, i: cutlass.Constexpr, source: Int64, tid: Int32, wanted):
        """Starts a thread's copies of pass i, of a row that exists, where `wanted`; else the tile is of no use.

        target  see there
        source  global address of the thread's piece of block 0
        wanted  Boolean, or None for always
        """
        for b in cutlass.range_constexpr(self.blocks):
            place = target + (i * self.pass_bytes + b * self.block_bytes)
            here = source + 16 * self.pieces * b
            if const_expr(b == self.blocks - 1 and self.last_pieces < self.pieces):
                there = tid % self.pieces < self.last_pieces
                if const_expr(wanted is not None):
                    there = there & wanted
                copy_16_bytes_or_zeros(place, here, Int32(16) if there else Int32(0))
            elif const_expr(wanted is not None):
                copy_16_bytes_if(place, here, wanted)
            else:
                copy_16_bytes(place, here)

    @cute.jit
    def copy_pass_or_zeros(
        self, target: Int32, i: cutlass.Constexpr, source: Int64, tid: Int32, there: Boolean
    ):
        """Likewise, with zeros of a row that does not exist and in place of columns past the last."""
        for b in cutlass.range_constexpr(self.blocks):
            place = target + (i * self.pass_bytes + b * self.block_bytes)
            size = Int32(16) if there else Int32(0)
            if const_expr(b == self.blocks - 1 and self.last_pieces < self.pieces):
                size = size if tid % self.pieces < self.last_pieces else Int32(0)
            copy_16_bytes_or_zeros(place, source + 16 * self.pieces * b, size)

    # -- to fragments -----------------------------------------------------------------------------------------

    @cute.jit
    def a_address(self, base: Int32, row0: Int32, lane: Int32) -> Int32:
        """A lane's address for `load_a` of the 16 rows from row0 on, a multiple of 16: (rows, k) as they lie."""
        return base + self.at(row0 + lane % 16, lane // 16)

    @cute.jit
    def b_address(self, base: Int32, lane: Int32) -> Int32:
        """For `load_b`: (n, k) as they lie; of two times 8 rows the pieces of one step of k."""
        return base + self.at(lane // 16 * 8 + lane % 8, lane // 8 % 2)

    @cute.jit
    def b_transposed_address(self, base: Int32, lane: Int32) -> Int32:
        """For `load_b_transposed`: (k, n) as they lie; of 16 rows two pieces."""
        return base + self.at(lane % 16, lane // 16)

    def load_a(self, near: list, step: int, row: int = 0):
        """A fragment of 16 rows and columns 16 step to 16 step + 15, `row` rows behind those of `near`."""
        i, more = self.offset(step)
        return load_matrices(near[i] + (more + row * self.line_bytes))

    def load_b(self, near: list, step: int, row: int):
        """Words of two B fragments: columns n are rows row to row + 7, and row + 8 to row + 15; k as in `load_a`."""
        return self.load_a(near, step, row)

    def load_b_transposed(self, near: list, pair: int, row: int):
        """Words of two B fragments: k are rows row to row + 15, columns n the pieces 2 pair and 2 pair + 1."""
        i, more = self.offset(pair)
        return load_matrices_transposed(near[i] + (more + row * self.line_bytes))
