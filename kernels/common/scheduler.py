"""Which tiles a CTA works on, in which order, and which keys a tile needs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..config import FwdConfig

L2_SHARE = 32 << 20  # bytes of K and V that CTAs which run together may read in turn: they stay in L2 meanwhile


@cute.jit
def heads_in_turn(seqlen_k: Int32, heads: Int32, cfg: FwdConfig) -> Int32:
    """Key heads (of all batches) whose tiles are mixed in the order of work, see `tile_coord`."""
    if cutlass.const_expr(not cfg.causal):
        turn = Int32(1)
    else:
        keys = L2_SHARE // (cfg.head_dim + cfg.head_dim_v)  # that fit
        turn = cutlass.max(1, cutlass.min(heads, keys // cutlass.max(seqlen_k, 1)))
    return turn


@cute.jit
def rounds_of(cta: Int32, ctas: Int32, tiles: Int32, cfg: FwdConfig) -> Int32:
    """Tiles that a CTA takes, one in each round; see `tile_in_round`."""
    full = tiles // ctas
    place = tile_in_round(full, cta, ctas, cfg) - full * ctas
    return full + (1 if place < tiles - full * ctas else 0)


@cute.jit
def tile_in_round(r: Int32, cta: Int32, ctas: Int32, cfg: FwdConfig) -> Int32:
    """Number, in the order of work, of a CTA's tile of round `r`.

    With a causal mask the order is from long to short, so every other round goes backwards over the CTAs: who had the
    longest tile of a round gets the shortest of the next.
    """
    place = cta
    if cutlass.const_expr(cfg.causal):
        place = ctas - 1 - cta if r % 2 == 1 else cta
    return r * ctas + place


@cute.jit
def tile_coord(
    work: Int32, m_blocks: Int32, group: Int32, heads_k: Int32, batches: Int32, turn: Int32, cfg: FwdConfig
):
    """Number of a tile in the order of work -> (m_block, head, batch); head is one of K where rows are packed.

    Without a mask the query blocks of a head are neighbours, so that its K and V stay in L2 while they are needed,
    and so are the heads of a GQA group. With a causal mask blocks differ in length: `turn` key heads go together,
    as many as fit in L2, and of all their blocks the longest come first.
    """
    per_head = m_blocks * group  # tiles of a key head
    section = work // (turn * per_head)
    first = section * turn
    heads = cutlass.min(turn, heads_k * batches - first)
    rest = work - first * per_head
    if cutlass.const_expr(cfg.causal):
        m_block = rest // (heads * group)
        index = rest - m_block * (heads * group)  # query head in the section
        m_block = m_blocks - 1 - m_block
    else:
        index = rest // m_blocks
        m_block = rest - index * m_blocks
    head_index = first * group + index
    heads_all = heads_k * group
    batch = head_index // heads_all
    return m_block, head_index - batch * heads_all, batch


@cute.jit
def key_blocks(m_block: Int32, seqlen_q: Int32, seqlen_k: Int32, cfg: FwdConfig):
    """(blocks to visit, blocks of them that need a mask), the masked ones being those of the highest keys.

    At least one block is visited, so that a query tile that sees no key still runs the loop once, fully
    masked, and ends with an empty sum.
    """
    if cutlass.const_expr(cfg.causal):
        shift = seqlen_k - seqlen_q  # bottom-right: query i sees keys j <= i + shift
        last = ((m_block + 1) * cfg.tile_m - 1) // cfg.pack_gqa  # queries of the tile's last and first row
        first = m_block * cfg.tile_m // cfg.pack_gqa
        seen_by_last = cutlass.min(seqlen_k, last + 1 + shift)
        seen_by_first = cutlass.min(seqlen_k, first + 1 + shift)
    else:
        seen_by_last = seqlen_k
        seen_by_first = seqlen_k
    blocks = cutlass.max((cutlass.max(seen_by_last, 0) + cfg.tile_n - 1) // cfg.tile_n, 1)
    unmasked = cutlass.max(seen_by_first, 0) // cfg.tile_n
    return blocks, blocks - cutlass.min(unmasked, blocks)
