"""Which tiles a CTA works on, in which order, and which keys a tile needs.

CTAs of a cluster take neighbouring tiles of one head in the same round, a *unit*; without clusters a unit is a tile.
The order of units is static: cute_attn/schedule.py chooses `turn` so that CTAs end together.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..config import Bwd16Config, FwdConfig


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
    unit: Int32,
    m_units: Int32,
    group: Int32,
    heads_k: Int32,
    batches: Int32,
    turn: Int32,
    cfg: FwdConfig,
    to_and_fro: cutlass.Constexpr = True,
):
    """Number in the order of work -> (unit of the head, head, batch); head is one of K where rows are packed.

    Without a mask the units of a head are neighbours, so that its K and V stay in L2 while they are needed, and so are
    the heads of a GQA group. With a causal mask they differ in length: `turn` key heads go together, and of all their
    units the longest come first, or last, in turns; always first unless `to_and_fro`.
    """
    per_head = m_units * group  # units of a key head
    section = unit // (turn * per_head)
    first = section * turn
    heads = cutlass.min(turn, heads_k * batches - first)
    rest = unit - first * per_head
    if cutlass.const_expr(cfg.causal):
        m_unit = rest // (heads * group)
        index = rest - m_unit * (heads * group)  # query head in the section
        backwards = m_units - 1 - m_unit
        if cutlass.const_expr(to_and_fro):
            m_unit = m_unit if section % 2 == 1 else backwards
        else:
            m_unit = backwards
    else:
        index = rest // m_units
        m_unit = rest - index * m_units
    head_index = first * group + index
    heads_all = heads_k * group
    batch = head_index // heads_all
    return m_unit, head_index - batch * heads_all, batch


@cute.jit
def key_blocks(m_block: Int32, seqlen_q: Int32, seqlen_k: Int32, window, cfg: FwdConfig, warpgroup=None):
    """Key blocks of a tile, or of the 64 rows of a warpgroup, visited from the highest keys down: (end, passed, masked,
    plain_end, first).

    Blocks first .. end - 1 are those of the unit: all CTAs of a cluster load them, and a tile or warpgroup passes over
    the highest `passed`, of which it sees no key. Of the rest, counted in the order of visits, those before `masked`
    and, with a window (left, right), those from `plain_end` on need a mask. At least one block is visited, so that a
    query tile that sees no key still runs the loop once, fully masked, and ends with an empty sum.

    warpgroup  read with a causal mask only; None for the tile
    """
    tile_n = cfg.tile_n
    first_row = m_block * cfg.tile_m // cfg.pack_gqa  # query of the tile's first row
    start = Int32(0)
    if cutlass.const_expr(cfg.window):
        left, right = window
        shift = seqlen_k - seqlen_q
        last_row = cutlass.min(((m_block + 1) * cfg.tile_m - 1) // cfg.pack_gqa, seqlen_q - 1)
        end = cutlass.min(seqlen_k, last_row + 1 + shift + right)
        end = cutlass.max((cutlass.max(end, 0) + tile_n - 1) // tile_n, 1)
        start = cutlass.min(cutlass.max(first_row + shift - left, 0) // tile_n, end - 1)
        own = end
        seen_by_first = cutlass.min(seqlen_k, first_row + 1 + shift + right)
        # first block without a left end
        seen_by_last = (cutlass.max(last_row + shift - left, 0) + tile_n - 1) // tile_n
    elif cutlass.const_expr(cfg.causal):
        end = blocks_seen((m_block // cfg.cluster + 1) * cfg.cluster * cfg.tile_m, seqlen_q, seqlen_k, cfg)
        own = end
        if cutlass.const_expr(warpgroup is not None):
            rows_before = m_block * cfg.tile_m + warpgroup * 64
            first_row = rows_before // cfg.pack_gqa
            own = blocks_seen(rows_before + 64, seqlen_q, seqlen_k, cfg)
        elif cutlass.const_expr(cfg.cluster > 1):
            own = blocks_seen((m_block + 1) * cfg.tile_m, seqlen_q, seqlen_k, cfg)
        seen_by_first = cutlass.min(seqlen_k, first_row + 1 + seqlen_k - seqlen_q)
    else:
        end = cutlass.max((seqlen_k + tile_n - 1) // tile_n, 1)
        own = end
        seen_by_first = seqlen_k
    unmasked = cutlass.max(seen_by_first, 0) // tile_n
    masked = own - cutlass.max(cutlass.min(unmasked, own), start)
    plain_end = own - start
    if cutlass.const_expr(cfg.window):
        plain_end = cutlass.max(own - cutlass.max(cutlass.min(seen_by_last, own), start), masked)
    return end, end - own, masked, plain_end, start


@cute.jit
def share_start(total: Int32, parts: Int32, index: Int32) -> Int32:
    """First item of share `index` when `parts` share `total` items: the first `total % parts` get one more."""
    each = total // parts
    return index * each + cutlass.min(index, total - each * parts)


@cute.jit
def split_blocks(blocks, split: Int32, splits: Int32):
    """Of a tile's `key_blocks` those of one of `splits` shares, likewise, and whether the share is empty.

    There are no clusters. Where the tile has fewer blocks than shares, an empty share visits one block that is not its
    own, as every tile visits one.
    """
    end, passed, masked, plain_end, start = blocks
    total = end - start
    first = cutlass.min(start + share_start(total, splits, split), end - 1)
    last = cutlass.max(start + share_start(total, splits, split + 1), first + 1)
    plain_end = last - (end - plain_end)
    masked = cutlass.min(cutlass.max(last - (end - masked), 0), last - first)
    plain_end = cutlass.min(cutlass.max(plain_end, masked), last - first)
    return (last, passed, masked, plain_end, first), split >= total


@cute.jit
def blocks_seen(row_end: Int32, seqlen_q: Int32, seqlen_k: Int32, cfg: FwdConfig) -> Int32:
    """Key blocks that the rows before `row_end` see under a causal mask, at least 1."""
    last = (row_end - 1) // cfg.pack_gqa  # bottom-right: query i sees keys j <= i + seqlen_k - seqlen_q
    seen = cutlass.min(seqlen_k, last + 1 + seqlen_k - seqlen_q)
    return cutlass.max((cutlass.max(seen, 0) + cfg.tile_n - 1) // cfg.tile_n, 1)


@cute.jit
def query_blocks(n_block: Int32, seqlen_q: Int32, seqlen_k: Int32, window, cfg: Bwd16Config):
    """Query blocks that see keys of key tile n_block, (first, plain, plain_end, end): first .. end - 1, of which those
    before `plain` and from `plain_end` on need a mask; none where first = end.

    window is (left, right), read only by configurations with one. A tile with keys past seqlen_k needs masks
    throughout: without one the zeros there might make an infinite P.
    """
    tile_m, shift = cfg.tile_m, seqlen_k - seqlen_q
    first_key = n_block * cfg.tile_n
    last_key = cutlass.min(first_key + cfg.tile_n, seqlen_k) - 1
    end = (seqlen_q + tile_m - 1) // tile_m
    first, plain = Int32(0), Int32(0)
    if cutlass.const_expr(cfg.causal or cfg.window):
        right = window[1] if cutlass.const_expr(cfg.window) else Int32(0)
        # query i sees keys up to i + shift + right
        first = cutlass.max(first_key - shift - right, 0) // tile_m
        plain = (cutlass.max(last_key - shift - right, 0) + tile_m - 1) // tile_m
    plain_end = end
    if cutlass.const_expr(cfg.window):
        # and from i + shift - left on
        end = cutlass.min(end, cutlass.max(last_key - shift + window[0] + tile_m, 0) // tile_m)
        plain_end = cutlass.max(first_key - shift + window[0] + 1, 0) // tile_m
    if first_key + cfg.tile_n > seqlen_k:
        plain = end
    first = cutlass.min(first, end)
    plain = cutlass.min(cutlass.max(plain, first), end)
    return first, plain, cutlass.max(cutlass.min(plain_end, end), plain), end


@cute.jit
def tiles_before(
    m: Int32, n_block: Int32, seqlen_k: Int32, shift: Int32, right: Int32, cfg: Bwd16Config
) -> Int32:
    """Key tiles that add to dQ of query block m before key tile n_block does, where their order is fixed.

    It is the order in which their CTAs start, see `key_block_coord`, so that a tile waits for CTAs that run or have
    ended. Under a mask key tile n begins at its diagonal: where tiles add from the last that sees a query block to the
    first, each comes to it a step after the one before, and nobody waits. Ascending, each would wait for those of lower
    index to come down to its diagonal. shift is seqlen_k - seqlen_q.
    """
    before = n_block
    if cutlass.const_expr(descending(cfg)):
        end = (m + 1) * cfg.tile_m + shift  # of the keys seen
        if cutlass.const_expr(cfg.window):
            end = end + right
        before = (cutlass.min(end, seqlen_k) - 1) // cfg.tile_n - n_block
    return before


def descending(cfg: Bwd16Config) -> bool:
    """Whether the key tiles of a head start from the last to the first."""
    return cfg.deterministic and (cfg.causal or cfg.window)


def sectioned(cfg: Bwd16Config) -> bool:
    """Whether tiles of several heads take turns: under a causal mask, and where those of a head add in their order, so
    that one does not start with the next, which would wait for it in each step."""
    return cfg.causal or cfg.deterministic


def key_block_order(n_blocks: Int32, batches: Int32, heads_k: Int32, turn: Int32, cfg: Bwd16Config):
    """Divisors for `key_block_coord`, made on the host, as three divisions in a row would delay a CTA's first load.

    They are heads_k, and n_blocks, or where `sectioned` the tiles of a section of `turn` heads, `turn`, the heads of
    the last section, which may have fewer, and its index; behind them n_blocks itself.
    """
    divisor = cute.FastDivmodDivisorV2
    if not sectioned(cfg):
        return divisor(heads_k), divisor(n_blocks), n_blocks
    heads = heads_k * batches
    whole = heads // turn
    last = cutlass.max(heads - whole * turn, 1)
    return divisor(heads_k), divisor(turn * n_blocks), divisor(turn), divisor(last), whole, n_blocks


@cute.jit
def key_block_coord(cta: Int32, order, cfg: Bwd16Config):
    """CTA -> (key block, head of K, batch), in the order in which CTAs start; `order`: see `key_block_order`.

    The blocks of a head are neighbours, so that Q, dO and the sum of dQ stay in L2, and ascend. Where `sectioned`,
    those of `turn` heads take turns: under a causal mask, where the first keys are seen by most queries, the longest
    of them come first, so that CTAs end together. With an order of dQ blocks descend under a mask, see `tiles_before`:
    all slots, where sequences are of unlike length.
    """
    if cutlass.const_expr(sectioned(cfg)):
        of_heads, of_sections, of_turn, of_last, whole, n_blocks = order
        section, rest = divmod(cta, of_sections)
        n_block, head = divmod(rest, of_turn)
        if section == whole:
            n_block, head = divmod(rest, of_last)
        head = head + section * of_turn.divisor
    else:
        of_heads, of_blocks, n_blocks = order
        head, n_block = divmod(cta, of_blocks)
    if cutlass.const_expr(descending(cfg)):
        n_block = n_blocks - 1 - n_block
    batch, head_k = divmod(head, of_heads)
    return n_block, head_k, batch
