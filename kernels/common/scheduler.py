"""Which tiles a CTA works on, in which order, and which keys a tile needs.

CTAs of a cluster take neighbouring tiles of one head in the same round, a *unit*; without clusters a unit is a tile.
The order of units is static: cute_attn/schedule.py chooses `turn` so that CTAs end together.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..config import FwdConfig


@cute.jit
def rounds_of(cluster: Int32, clusters: Int32, units: Int32, cfg: FwdConfig) -> Int32:
    """Units that a cluster takes, one in each round; see `unit_in_round`."""
    full = units // clusters
    place = unit_in_round(full, cluster, clusters, cfg) - full * clusters
    return full + (1 if place < units - full * clusters else 0)


@cute.jit
def unit_in_round(r: Int32, cluster: Int32, clusters: Int32, cfg: FwdConfig) -> Int32:
    """Number, in the order of work, of a cluster's unit of round `r`.

    With a causal mask neighbours in this order differ in length, so every other round goes backwards over the
    clusters: who had the longest unit of a round gets the shortest of the next.
    """
    place = cluster
    if cutlass.const_expr(cfg.causal):
        place = clusters - 1 - cluster if r % 2 == 1 else cluster
    return r * clusters + place


@cute.jit
def unit_coord(
    unit: Int32, m_units: Int32, group: Int32, heads_k: Int32, batches: Int32, turn: Int32, cfg: FwdConfig
):
    """Number in the order of work -> (unit of the head, head, batch); head is one of K where rows are packed.

    Without a mask the units of a head are neighbours, so that its K and V stay in L2 while they are needed, and so are
    the heads of a GQA group. With a causal mask they differ in length: `turn` key heads go together, and of all their
    units the longest come first, or last, in turns.
    """
    per_head = m_units * group  # units of a key head
    section = unit // (turn * per_head)
    first = section * turn
    heads = cutlass.min(turn, heads_k * batches - first)
    rest = unit - first * per_head
    if cutlass.const_expr(cfg.causal):
        m_unit = rest // (heads * group)
        index = rest - m_unit * (heads * group)  # query head in the section
        m_unit = m_unit if section % 2 == 1 else m_units - 1 - m_unit
    else:
        index = rest // m_units
        m_unit = rest - index * m_units
    head_index = first * group + index
    heads_all = heads_k * group
    batch = head_index // heads_all
    return m_unit, head_index - batch * heads_all, batch


@cute.jit
def key_blocks(m_block: Int32, seqlen_q: Int32, seqlen_k: Int32, cfg: FwdConfig):
    """Key blocks, from the highest keys down: (of the unit, of them not for this tile, of the tile with a mask).

    All CTAs of a cluster load all blocks of the unit; a tile passes over those of which it sees no key. At least one
    block is visited, so that a query tile that sees no key still runs the loop once, fully masked, and ends with an
    empty sum.
    """
    if cutlass.const_expr(cfg.causal):
        blocks = blocks_seen((m_block // cfg.cluster + 1) * cfg.cluster * cfg.tile_m, seqlen_q, seqlen_k, cfg)
        own = blocks
        if cutlass.const_expr(cfg.cluster > 1):
            own = blocks_seen((m_block + 1) * cfg.tile_m, seqlen_q, seqlen_k, cfg)
        first = (
            m_block * cfg.tile_m // cfg.pack_gqa
        )  # query of the tile's first row: it sees keys j <= first + shift
        seen_by_first = cutlass.min(seqlen_k, first + 1 + seqlen_k - seqlen_q)
    else:
        blocks = cutlass.max((seqlen_k + cfg.tile_n - 1) // cfg.tile_n, 1)
        own = blocks
        seen_by_first = seqlen_k
    unmasked = cutlass.max(seen_by_first, 0) // cfg.tile_n
    return blocks, blocks - own, own - cutlass.min(unmasked, own)


@cute.jit
def blocks_seen(row_end: Int32, seqlen_q: Int32, seqlen_k: Int32, cfg: FwdConfig) -> Int32:
    """Key blocks that the rows before `row_end` see under a causal mask, at least 1."""
    last = (row_end - 1) // cfg.pack_gqa  # bottom-right: query i sees keys j <= i + seqlen_k - seqlen_q
    seen = cutlass.min(seqlen_k, last + 1 + seqlen_k - seqlen_q)
    return cutlass.max((cutlass.max(seen, 0) + cfg.tile_n - 1) // cfg.tile_n, 1)
