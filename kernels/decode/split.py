"""Which keys a CTA takes: work in tiles of keys, shared out evenly by the lengths that stand on the device.

A *unit* is a block of packed query rows of one key head of one sequence. It has a tile for each `tile_keys` keys from
the first that any query sees to the last, at least one, so that every unit is visited and its output written. Tiles of
all units are numbered in a row: those of a unit are neighbours, so are the units of a sequence.

*Balanced* (splits == 0): of `total` tiles each CTA takes an equal share, whatever unit they are of. A CTA so has
*pieces*: the end of one unit, whole units, the start of another one. *Fixed* (splits > 0): CTA i takes share
i % splits of unit i // splits. With `DecodeConfig.fixed` share s has tiles s, s + splits and so on: where it begins
hangs on no length, and CTAs of a unit read side by side what lies side by side. Else shares are of neighbouring tiles.
`DecodeConfig.whole` is the same with one share, known at compile time: CTA i takes unit i.

*Whole*: where rounds of whole units, CTA i with unit i, i + ctas and so on, last no longer than an equal share and a
sixteenth, balanced work is done in these, for then there is nothing to combine.

*Together*: `together` neighbouring key heads, whose rows share lines of 128 bytes, are taken in step, each by a CTA of
its own: CTA `together` * i + j takes share i of the tiles of one head in so many, for head j of each such group. What
one of them brings to L2 with its own rows the others find there, where at another time they would load it again. With
whole units and fixed splits neighbours run at about the same time as they are.

A piece that is a whole unit becomes output at once. Any other leaves O, maximum and sum of its rows in a slot, for the
combining kernel (combine.py): slot i for the first piece of CTA i, ctas + i for another one, which is its last.

*Pairs* (`DecodeConfig.heads` 2): what is called a key head here is two neighbouring ones, and their query heads are
its group.

cute_attn/decode_plan.py has the same in Python.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..config import DecodeConfig


@cute.jit
def share_of(total: Int32, parts: Int32, item: Int32) -> Int32:
    """The share that holds an item; inverse of `share_start`."""
    each = total // parts
    longer = (total - each * parts) * (each + 1)  # items of the shares that have one more
    return (
        item // (each + 1)
        if item < longer
        else total - each * parts + (item - longer) // cutlass.max(each, 1)
    )


class Lengths(NamedTuple):
    """From which keys are shared out."""

    seqlens: cute.Tensor  # (batch,) int32: slots in use, without the new tokens
    leftpad: cute.Tensor | None  # (batch,) int32: first slots
    batch: Int32
    seqlen_new: Int32  # tokens that this call has appended to each sequence
    capacity: Int32  # slots of a sequence
    seqlen_q: Int32
    left: Int32  # keys before its own position that a query sees


class Shares(NamedTuple):
    """How they are shared out, see `cute_attn.decode_plan.Shares`."""

    ctas: Int32
    splits: Int32  # of a unit; 0: balanced
    least: Int32  # tiles of a CTA at least, where balanced
    together: Int32  # neighbouring key heads that are taken in step


class Divisors(NamedTuple):
    """What CTAs divide by, made on the host: divisions one behind another would delay a CTA's first load."""

    group: cute.FastDivmodDivisorV2  # query heads of a key head
    blocks: cute.FastDivmodDivisorV2  # units of a key head
    units: cute.FastDivmodDivisorV2  # of a sequence
    splits: cute.FastDivmodDivisorV2  # of a unit, 1 where balanced
    ctas: cute.FastDivmodDivisorV2
    together: cute.FastDivmodDivisorV2
    least: cute.FastDivmodDivisorV2


@cute.jit
def divisors_of(seqlen_q: Int32, heads_q: Int32, heads_k: Int32, shares: Shares, rows: cutlass.Constexpr):
    """`Divisors` of a call with `rows` packed rows a unit. heads_k: pairs of them with `DecodeConfig.heads` 2, as
    everywhere else in this file."""
    group = heads_q // heads_k
    blocks = (seqlen_q * group + (rows - 1)) // rows
    divisor = cute.FastDivmodDivisorV2
    return Divisors(
        divisor(group),
        divisor(blocks),
        divisor(heads_k * blocks),
        divisor(cutlass.max(shares.splits, 1)),
        divisor(shares.ctas),
        divisor(shares.together),
        divisor(shares.least),
    )


class Piece(NamedTuple):
    """Tiles of one unit, for one CTA."""

    batch: Int32
    head: Int32  # of K and V
    row0: Int32  # packed row of the key head at which the unit begins
    group: cute.FastDivmodDivisorV2  # query heads of a key head
    tile: Int32  # the first, counted from the unit's first
    tiles: Int32  # how many
    whole: cutlass.Boolean  # these are all of the unit
    slot: Int32  # of the workspace, if they are not
    apart: Int32  # from one tile to the next, more than 1 with `fixed` only


class Splits:
    """The numbering for one configuration."""

    def __init__(self, cfg: DecodeConfig):
        self.cfg = cfg

    @cute.jit
    def key_range(self, lengths: Lengths, b: Int32):
        """Slots of a sequence that any of its queries sees: (first, end). end is the length of the sequence."""
        end = cutlass.max(cutlass.min(lengths.seqlens[b] + lengths.seqlen_new, lengths.capacity), 0)
        first = cutlass.max(end - lengths.seqlen_q - lengths.left, 0)
        if const_expr(lengths.leftpad is not None):
            first = cutlass.max(first, lengths.leftpad[b])
        return first, end

    @cute.jit
    def tiles_of(self, lengths: Lengths, b: Int32) -> Int32:
        """Tiles of each unit of a sequence."""
        first, end = self.key_range(lengths, b)
        keys = self.cfg.tile_keys
        return cutlass.max((end + (keys - 1)) // keys - first // keys, 1)

    @cute.jit
    def tiles_before(self, lengths: Lengths, b: Int32, units: Int32):
        """(tiles of all units, of the units of sequences before b, of the longest unit), for all lanes of the warp."""
        batch = lengths.batch
        total, before, longest = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), batch, 32):
            tiles = self.tiles_of(lengths, i)
            total += tiles
            before += tiles if i < b else 0
            longest = cutlass.max(longest, tiles)
        for step in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
            before += cute.arch.shuffle_sync_bfly(before, offset=1 << step)
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, offset=1 << step))
        return total * units, before * units, longest

    @cute.jit
    def locate(self, lengths: Lengths, item: Int32, units: Int32):
        """(sequence, its first tile) of a tile, for all lanes of the warp, which is whole."""
        batch = lengths.batch
        lane = cute.arch.lane_idx()
        b, start, before = Int32(0), Int32(0), Int32(0)
        for chunk in cutlass.range((batch + 31) // 32, unroll=1):
            i = chunk * 32 + lane
            tiles = Int32(0)
            if i < batch:
                tiles = self.tiles_of(lengths, i) * units
            ends = tiles
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync(ends, cutlass.max(lane - (1 << step), 0))
                ends += other if lane >= 1 << step else 0
            ends += before
            passed = cute.arch.popc(cute.arch.vote_ballot_sync((i < batch) & (ends <= item)))
            last = cute.arch.shuffle_sync(ends, 31)
            if (item >= before) & (item < last):
                b = chunk * 32 + passed
                start = before
            own = cute.arch.shuffle_sync(ends, cutlass.max(passed - 1, 0))
            start = own if (item >= before) & (item < last) & (passed > 0) else start
            before = last
        return b, start

    @cute.jit
    def whole(self, total: Int32, longest: Int32, units: Int32, by: Divisors) -> Int32:
        """1 where balanced work is done in whole units, of which there are `units` in all sequences; else 0."""
        up = by.ctas.divisor - 1
        each = (total + up) // by.ctas
        return Int32(1) if (units + up) // by.ctas * longest <= each + each // 16 else Int32(0)

    @cute.jit
    def sharers(self, total: Int32, by: Divisors) -> Int32:
        """CTAs that take part where work is balanced, for each of the heads that are taken in step: each shall have
        `least` tiles, of the `total` of such a head."""
        return cutlass.max(cutlass.min(by.ctas.divisor // by.together, total // by.least), 1)
