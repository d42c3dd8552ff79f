"""Batches of sequences of unlike length: which tiles there are, and who takes them when.

The rows of all sequences stand behind one another, sequence b from row cu_seqlens[b] to row cu_seqlens[b + 1]. Only the
device knows the lengths. Units of work (one tile each, there are no clusters here) are numbered sequence by sequence;
CTA c begins with unit c and takes the next one by a counter in memory, as lengths in an order of the caller's defeat
every order fixed beforehand. A unit's sequence is found by a warp: 32 sequences a step, each lane the units of one, a
prefix sum over the lanes, and a vote on who lies before the unit. A CTA's units ascend, so the search goes on
where it ended, and a sequence without rows costs a lane of one step.

The producer's first warp does that one tile ahead and leaves the place of the tile in shared memory, in a ring of
STAGES places with mbarriers of its own (mainloop.py lists the others):

    full   arrives: one lane of the producer's warp, the place is written
    empty  arrives: one lane of each consumer warp, it has read the place for the last time (before it stores O)

Tensors keep no bound between two sequences, so TMA gets one for K, V and O, see `ragged`. Rows of Q behind the end of a
sequence are of the next one, or zeros: they are worked on, and O and lse of them are not stored.

What the quantiser writes for each block of 2^shift keys or rows of a sequence (a scale, a sum of keys, a block of V^T)
has a *slot*: those of sequence b begin at slot `first_slot`, block i of it has the i-th from there. A sequence of n
rows that begins at row r has room for its blocks, as (r + n) >> shift is at least (r >> shift) + (n >> shift), and the
next sequence begins one slot further than that. So there are (rows >> shift) + batch slots, which the host knows
without the lengths, and block, sequence and slot are found from one another with nothing stored.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Int32

from ..config import FwdConfig

STAGES = 2  # places: of the tile that is worked on, and of the next
PLACE = 8  # words of a place: (m_block or END, head, sequence, first row, rows, first key, keys, share of the keys)
END = -1  # there is no tile any more
FAR = 2**30  # rows that `ragged_load` goes back


# ------------------------------------------------------------------------------------------------------------
# Tensors
# ------------------------------------------------------------------------------------------------------------


def ragged(x: cute.Tensor, mode: int, box: int) -> cute.Tensor:
    """A tensor of all sequences' rows, so that a TMA store stops where a sequence ends.

    x     (..., rows, ..., any) with the rows as `mode`; its last mode is dropped
    box   rows that one TMA box has at most

    The result is (..., box, ..., rows + 1): `mode` and the last one both step over rows, from an origin that lies `box`
    rows before x. A box that shall begin at row r and see `left` of the rows from there, 0 <= left <= box, is that at
    coordinates box - left of `mode` and r + left of the last mode: it begins at (box - left) + (r + left) - box = r,
    and its rows from the `left`-th on lie past the end of `mode`, where TMA writes nothing. The origin may lie before
    the allocation, which a store never accesses. A load may, see `ragged_load`.
    """
    step = x.stride[mode]
    shape = (*x.shape[:mode], box, *x.shape[mode + 1 : -1], x.shape[mode] + 1)
    stride = (*x.stride[:-1], step)
    origin = (x.iterator - box * step).align(16)
    return cute.make_tensor(origin, cute.make_layout(shape, stride=stride))


def ragged_load(x: cute.Tensor, mode: int) -> cute.Tensor:
    """Likewise for loads, which get zeros from behind the end of a sequence, and for which an origin in memory that is
    not mapped is an illegal access, though the box holds nothing of it.

    The result is (..., FAR, ..., rows + 1, more): its origin is that of x, and a last mode at coordinate FAR takes the
    place of the moved origin. Its stride is 2^64 / FAR elements less a row, so that it goes FAR rows back: addresses
    wrap at 2^64. (The ragged descriptors of Triton, triton/tools/ragged_tma.py, do this.)
    """
    step = x.stride[mode]
    shape = (*x.shape[:mode], FAR, *x.shape[mode + 1 : -1], x.shape[mode] + 1, FAR + 1)
    stride = (*x.stride[:-1], step, 2**64 // FAR - step)
    return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=stride))


@cute.jit
def ragged_coord(row0: Int32, rows: Int32, first: Int32, box: cutlass.Constexpr, end: cutlass.Constexpr):
    """Coordinates of a box in a ragged tensor: (of the mode of rows, of the mode behind it).

    row0, rows  first row of the sequence, and its rows
    first       row of the sequence at which the box begins; may lie past its end, the box is then empty
    box         rows of the box
    end         extent of the mode of rows: that of the store's boxes, or FAR
    """
    left = cutlass.min(cutlass.max(rows - first, 0), box)
    return end - left, row0 + first + left


def one_batch(x: cute.Tensor) -> cute.Tensor:
    """x with a mode of one batch in front."""
    return cute.make_tensor(x.iterator, cute.make_layout((1, *x.shape), stride=(0, *x.stride)))


def steps_of(tile: cute.Tensor, x: cute.Tensor, mode: int) -> cute.Tensor:
    """A box of K or V, (rows, columns) in either order, with three modes more that move it: by the two coordinates of
    `ragged_coord`, and by FAR. x is what `ragged_load` made of K or V, `mode` its mode of rows.
    """
    shape = (*tile.shape, x.shape[mode], x.shape[3], x.shape[4])
    stride = (*tile.stride, x.stride[mode], x.stride[3], x.stride[4])
    return cute.make_tensor(tile.iterator, cute.make_layout(shape, stride=stride))


# ------------------------------------------------------------------------------------------------------------
# Slots of the blocks of sequences
# ------------------------------------------------------------------------------------------------------------


def slot_shift(block: int) -> int:
    """The shift of blocks of `block` rows, a power of two."""
    return block.bit_length() - 1


def slots_of(total: Int32, ends: cute.Tensor, block: int) -> Int32:
    """Slots of blocks of `block` rows, of `total` rows in sequences that begin and end at `ends`, (batch + 1,)."""
    return (total >> slot_shift(block)) + (ends.shape[0] - 1)


@cute.jit
def first_slot(row: Int32, sequence: Int32, shift) -> Int32:
    """Slot of the first block, of 2^shift rows, of a sequence that begins at `row`; see the module."""
    return (row >> shift) + sequence


@cute.jit
def block_of_slot(slot: Int32, ends: cute.Tensor, shift):
    """Block of a slot, by a whole warp: (sequence, first row of the block, rows from there to the sequence's end).

    ends  (batch + 1,) int32, where sequences begin and end; batch is at least 1

    The rows are 0 where the slot has no block. First slots ascend, and the lanes test 32 of them at once: the sequence
    is the last one that begins no later than `slot`.
    """
    lane = cute.arch.lane_idx()
    first, count = Int32(0), ends.shape[0] - 1  # sequences that it may be
    while count > 1:
        step = (count + 31) // 32
        at = first + cutlass.min(lane * step, count - 1)
        before = first_slot(ends[at], at, shift) <= slot
        lanes = cute.arch.popc(cute.arch.vote_ballot_sync(before))  # the first ones
        past = cutlass.min(cutlass.max(lanes - 1, 0) * step, count - 1)
        first = first + past
        count = cutlass.min(step, count - past)
    row0, end = ends[first], ends[first + 1]
    block = slot - first_slot(row0, first, shift)
    row = row0 + (cutlass.max(block, 0) << shift)
    left = cutlass.max(end - row, 0) if block >= 0 else Int32(0)
    return tuple([cute.arch.make_warp_uniform(x) for x in (first, row, left)])


@cute.jit
def key_tile(slot: Int32, head_k: Int32, tile_n: cutlass.Constexpr, lengths):
    """Key tile of a slot, by whole warps: (place, stored).

    lengths is (cu_seqlens_q, cu_seqlens_k, seqused_k, whether that counts), place (key tile of the sequence, head of K,
    sequence, first row in q, seqlen_q, first key in k, seqlen_k). stored is how many keys the sequence has from the
    tile on, 0 where the slot has no tile, whether they count or not.
    """
    cu_q, cu_k, used_k, has_used = lengths
    sequence, key, stored = block_of_slot(slot, cu_k, slot_shift(tile_n))
    row0, key0 = cu_q[sequence], cu_k[sequence]
    rows, keys = cu_q[sequence + 1] - row0, key + stored - key0
    if has_used != 0:
        keys = cutlass.min(keys, cutlass.max(used_k[sequence], 0))
    found = ((key - key0) // tile_n, head_k, sequence, row0, rows, key0, keys)
    return tuple([cute.arch.make_warp_uniform(x) for x in found]), stored


# ------------------------------------------------------------------------------------------------------------
# Order of work
# ------------------------------------------------------------------------------------------------------------


@cute.jit
def find_sequence(unit: Int32, search, lengths, heads: Int32, cfg: FwdConfig):
    """The sequence of a unit, by a whole warp: (search, found, unit of the sequence, place).

    search   (first sequence of the lanes, units of the sequences before it), from the call before, for a lower unit
    lengths  see `FwdSm90.kernel`
    heads    units of a tile's rows, one for each head or pack of heads, or for each share of the keys of these
    found    whether there is such a unit
    place    (sequence, first row, rows, first key, keys)
    """
    cu_q, cu_k, used_k, has_used = lengths[:4]
    first, before = search
    batch = cu_q.shape[0] - 1
    lane = cute.arch.lane_idx()
    found = Int32(0)
    row0, rows, key0, keys, ahead, at = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    while found == 0 and first < batch:
        row0, rows, key0, keys = Int32(0), Int32(0), Int32(0), Int32(0)
        if first + lane < batch:
            row0, key0 = cu_q[first + lane], cu_k[first + lane]
            rows, keys = cu_q[first + lane + 1] - row0, cu_k[first + lane + 1] - key0
            if has_used != 0:
                bound = Int32(2**31 - 1) if has_used == 2 else keys  # 2: nothing says where they end
                keys = cutlass.min(bound, cutlass.max(used_k[first + lane], 0))
        units = (rows * cfg.pack_gqa + (cfg.tile_m - 1)) // cfg.tile_m * heads
        ahead = units  # of this lane's sequence and those of the lanes before it
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(ahead, offset=1 << step)
            ahead = ahead + (other if lane >= 1 << step else 0)
        at = cute.arch.popc(cute.arch.vote_ballot_sync(before + ahead <= unit))
        if at == 32:  # all of these end before the unit
            first = first + 32
            before = before + cute.arch.shuffle_sync(ahead, 31)
        else:
            found = Int32(1)
            ahead = ahead - units
    rest = unit - before - cute.arch.shuffle_sync(ahead, at)
    place = tuple([first + at, *[cute.arch.shuffle_sync(x, at) for x in (row0, rows, key0, keys)]])
    return (first, before), found, rest, place


@cute.jit
def unit_of_sequence(
    rest: Int32, rows: Int32, keys: Int32, group: Int32, heads_k: Int32, keys_in_turn: Int32, cfg: FwdConfig
):
    """Unit of a sequence -> (m_block, head); head is one of K where rows are packed. Where keys are split, `group` has
    a member for each share, and `head` counts these.

    Without a causal mask the units of a head are neighbours, so that its K and V stay in L2 while they are needed. With
    one the longest units come first, of as many key heads at a time as have room in L2: `keys_in_turn` keys.
    """
    m_blocks = (rows * cfg.pack_gqa + (cfg.tile_m - 1)) // cfg.tile_m
    if cutlass.const_expr(cfg.causal and not cfg.split_keys):
        turn = cutlass.min(cutlass.max(keys_in_turn // cutlass.max(keys, 1), 1), heads_k)
        section = rest // (turn * m_blocks * group)
        rest = rest - section * (turn * m_blocks * group)
        heads = cutlass.min(turn, heads_k - section * turn) * group
        level = rest // heads
        m_block, head = m_blocks - 1 - level, section * turn * group + rest - level * heads
    else:
        head = rest // m_blocks
        m_block = rest - head * m_blocks
    return m_block, head


def place_ring(barriers, consumer_warps: int):
    """The ring of places. Its barriers are initialised with those of the other rings."""
    return pl.PipelineAsync.create(
        num_stages=STAGES,
        producer_group=pl.CooperativeGroup(pl.Agent.Thread),
        consumer_group=pl.CooperativeGroup(pl.Agent.Thread, consumer_warps),
        barrier_storage=barriers,
        defer_sync=True,
    )


@cute.jit
def put_place(at, places: cute.Tensor, pipe, slot):
    """Tell the consumer warps where their next tile is, the words of a place; by the producer's warp."""
    pipe.producer_acquire(slot)  # waits until all consumer warps have read the place before last
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(at)):
            places[i, slot.index] = at[i]
        pipe.producer_commit(slot)  # by the one lane that wrote


@cute.jit
def take_place(places: cute.Tensor, pipe, slot):
    """The first seven words of the next tile's place, by one whole warp, which gives the place back at once."""
    pipe.consumer_wait(slot)  # the producer has written the place
    words = cute.make_rmem_tensor(PLACE, Int32)
    words.fill(0)
    # By the lane that gives the place back, so that no other's reads have to come before that.
    if cute.arch.lane_idx() == 0:
        cute.autovec_copy(places[None, slot.index], words)
        pipe.consumer_release(slot)
    return [cute.arch.make_warp_uniform(cute.arch.shuffle_sync(words[i], 0)) for i in range(7)]


@cute.jit
def take_unit(counter: cute.Tensor) -> Int32:
    """In lane 0, how many units have been given out beside the first of each CTA, which is its own number."""
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return taken
