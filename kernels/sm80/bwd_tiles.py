"""Where a tile of 16-bit elements lies in shared memory, and which part of it a lane loads or stores.

Rows lie behind one another; a row is chunks of 16 bytes, and chunk c of row r lies in place c ^ f(r) of its `group` of
chunks, so that eight rows of one chunk meet all banks: eight chunks and f(r) = r % 8 where a row is a multiple of 128
bytes, else four and r // 2 % 4. Columns are shared among warps in blocks of 16, two chunks: warp w of n takes blocks
w, w + n and so on, n a power of two. A block is an exchange of bits and a constant away from the lane's place in block
0, so one register, or a few, serve all loads of an operand. Rows go in blocks of 16, too, which do not change f.

All is arithmetic on integers, of Python or of the device.
"""

from __future__ import annotations


class Tile:
    """A tile of rows of `columns` elements, a multiple of 32. Its address is a multiple of 128 bytes."""

    def __init__(self, columns: int):
        if columns % 32:
            raise ValueError(f"columns must be a multiple of 32, got {columns}")
        self.columns = columns
        self.pitch = 2 * columns  # bytes between rows
        self.group = 8 if columns % 64 == 0 else 4  # chunks of a row that are exchanged

    def exchange(self, row):
        """f(row), see above."""
        return row & 7 if self.group == 8 else row >> 1 & 3

    def chunk(self, row, chunk):
        """Offset of a chunk of the first group of a row."""
        return row * self.pitch + (chunk ^ self.exchange(row)) * 16

    def tall(self, lane):
        """Offset of a lane's row for ldmatrix of a 16 x 16 block: rows 0 to 7, 8 to 15 of its first eight columns, then
        of the others. As stored, that is an A operand whose rows are rows; transposed, a B operand of depth rows."""
        return self.chunk(lane & 15, lane >> 4)

    def wide(self, lane):
        """Likewise: rows 0 to 7 of the first and of the other columns, then rows 8 to 15. As stored, that is a B
        operand of depth columns; transposed, an A operand whose rows are columns."""
        return self.chunk((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1)

    def accumulator(self, lane):
        """Offset of the word of float 0 and 1 of a C fragment; that of 2 and 3 lies 8 rows on."""
        return self.chunk(lane >> 2, 0) + (lane & 3) * 4

    def of_warp(self, offset, warp, count: int):
        """`offset` in the first of the blocks of columns that `warp` of `count` takes."""
        pairs = self.group // 2
        if count <= pairs:
            return offset ^ (warp * 32)
        return (offset ^ ((warp & (pairs - 1)) * 32)) + warp // pairs * (16 * self.group)

    def block(self, offset, index: int, count: int = 1, half: int = 0):
        """`offset` from `of_warp` in block `index` of the warp; of accumulators `half` 1 is the block's other chunk."""
        index, pairs = index * count, self.group // 2
        exchanged = index % pairs * 32 + half * 16
        offset = offset ^ exchanged if exchanged else offset
        return offset + index // pairs * (16 * self.group)
