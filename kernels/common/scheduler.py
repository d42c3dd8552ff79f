"""Which tile a CTA works on, and which keys that tile needs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def tile_coord(work: Int32, m_blocks: Int32, heads_q: Int32, causal: cutlass.Constexpr):
    """Linear CTA index -> (m_block, head, batch).

    One grid dimension serves any batch and head count (y and z stop at 65535). Query blocks of a head are
    neighbours, so its K and V stay in L2 while they are needed; heads of a GQA group follow one another. With
    a causal mask the longest block of each head comes first and the short ones fill the end of the wave.
    """
    head_index = work // m_blocks
    m_block = work - head_index * m_blocks
    if cutlass.const_expr(causal):
        m_block = m_blocks - 1 - m_block
    batch = head_index // heads_q
    head = head_index - batch * heads_q
    return m_block, head, batch


@cute.jit
def key_blocks(
    m_block: Int32,
    seqlen_q: Int32,
    seqlen_k: Int32,
    tile_m: cutlass.Constexpr,
    tile_n: cutlass.Constexpr,
    causal: cutlass.Constexpr,
):
    """(blocks to visit, blocks of them that need a mask), the masked ones being those of the highest keys.

    At least one block is visited, so that a query tile that sees no key still runs the loop once, fully
    masked, and ends with an empty sum.
    """
    if cutlass.const_expr(causal):
        shift = seqlen_k - seqlen_q  # bottom-right: query i sees keys j <= i + shift
        seen_by_last = cutlass.min(seqlen_k, (m_block + 1) * tile_m + shift)
        seen_by_first = cutlass.min(seqlen_k, m_block * tile_m + 1 + shift)
    else:
        seen_by_last = seqlen_k
        seen_by_first = seqlen_k
    blocks = cutlass.max((cutlass.max(seen_by_last, 0) + tile_n - 1) // tile_n, 1)
    unmasked = cutlass.max(seen_by_first, 0) // tile_n
    return blocks, blocks - cutlass.min(unmasked, blocks)
