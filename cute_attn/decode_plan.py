"""Problem -> kernel and shares of work, for attention against a KV cache: pure functions of plain data.

How work is shared out. The lengths of sequences stand on the device and change under a CUDA graph, so the host fixes
only the number of CTAs: as many as the GPU holds at once, or fewer where a full cache has fewer tiles of keys. Each
CTA takes the same number of tiles, from the lengths that it reads, or, where that takes hardly longer, whole units
(kernels/decode/split.py); `pieces` and `parts` below are the same in Python. Where the host knows the lengths and units
stay whole, there is a CTA for each, and no combining kernel. With `num_splits` > 0 each unit instead is split into so
many shares, by its own length alone: then results of a sequence do not depend on the others.

Where units in equal shares fill the SMs, there are no more CTAs than that (`even_splits`). Then fewer parts are added
up, and CTAs begin and end with units: each piece more of a CTA fills its ring anew. Units of one length, those of one
sequence or of lengths that the host knows, and units of caches with room for few keys have a fixed number of shares,
for which neither kernel reads what other sequences have.

Many short units, or units of one length, have a CTA each by a kernel for that (`whole_units`). Nothing is added up
then, no CTA reads the lengths of other sequences, and its first copies start before it has read that of its own. A CTA
that ends makes room for the next unit, and heads of a sequence are read side by side.

Units in a fixed number of shares have a kernel, too (`fixed`): share s has every so many-th tile from tile s on, so its
first copies start before it has read the length. CTAs of long shares are of eight warps (`wide`).

Of narrow heads' codes two neighbouring key heads are one (`pair`): what is said of key heads, units and rows above is
then said of pairs of them. Rows of K and V of a pair fill a line of L2, which otherwise is loaded for one half of it
and again, or at another place, for the other one; and a step has two thirds of the instructions for as many bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cute_attn.kernels.config import (
    DECODE_KEYS,
    REGISTERS_PER_SM,
    SM80_ARCHS,
    SMEM_LIMIT,
    SMEM_RESERVED,
    AppendConfig,
    DecodeConfig,
    UnpackConfig,
)

MOST_STAGES: Final = 8
LEAST_STAGES: Final = 3  # two in flight while one is computed on
LEAST_TILES: Final = 2  # of a CTA: a shorter share costs more in the combining kernel than it saves
EVEN: Final = 15 / 16  # of the SMs, or of what they hold, that even shares leave busy at least
LIGHT_CODES: Final = 256  # bytes of a key and its value from which one CTA on an SM is enough
SHORT: Final = 8  # tiles of a CTA up to which one CTA on an SM is enough for every kernel
NARROW: Final = 64  # head_dim of 16 bits up to which rows are narrow
SHORT_TILES: Final = 16  # of a unit of narrow rows of 16 bits up to which an SM has two of its shares
# Up to which a unit's CTAs are its own: beyond, lengths that differ are better shared out
OWN_KEYS: Final = 2048
WIDE_TILES: Final = 8  # of a CTA of eight warps from which it is taken for other than narrow codes
UNITS: Final = 4  # of narrow rows of 16 bits that an SM takes at a time, where there are as many
# Of a CTA, from which two steps of the widest rows are enough of a ring; of a CTA and a unit, from which codes in pages
# want eight warps
LONG_TILES: Final = 32
PAIRED_KEYS: Final = 4096  # for an SM, of all heads, from which two heads are taken as one
LINE: Final = 128  # bytes of a line of L2, which a copy of a part of it loads whole


# Forms of a cache by name, as options of `decode_config`: pages of a multiple of 16 slots share a kernel
FORMS: Final[dict[str, dict[str, Any]]] = {
    "16bit": {},
    "16bit-paged": {"page_size": DECODE_KEYS},
    "e4m3": {"cache": "e4m3", "scales": "token"},
    "e4m3-paged": {"cache": "e4m3", "scales": "token", "page_size": DECODE_KEYS},
}


@dataclass(frozen=True)
class Shares:
    """How a launch shares out its work.

    Attributes:
        ctas: CTAs of the grid.
        splits: shares of each unit; 0: work is balanced over all CTAs.
        least: tiles of a CTA at least, where balanced.
        slots: of the workspace, for parts of rows.
        together: neighbouring key heads that CTAs side by side take in step, where balanced.
    """

    ctas: int
    splits: int
    least: int
    slots: int
    together: int = 1


def decode_config(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    cache: str = "16bit",
    scales: str = "none",
    query: str = "16bit",
    page_size: int | None = None,
    rows: int = 1,
    row_ends: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    batch_idx: bool = False,
    leftpad: bool = False,
    arch: str = "sm_90a",
) -> DecodeConfig:
    """The kernel for `rows` packed rows (queries times heads of a group) and pages of `page_size` slots, None without.

    Half a tile of 16 rows, or as many tiles as there are, up to what O may take of the registers: 256 columns in all,
    or 128 where scales of tokens or pages, and changes of scores, want theirs; half a tile of the widest heads where
    rows have ends and both changes. The ring is as deep as shared memory allows for two CTAs on an SM, or, where that
    is less than three stages, for one, at the worst of half the warps.
    """
    changed = row_ends and (softcap or alibi)
    wide = max(head_dim, head_dim_v)
    columns = 128 if changed and (scales == "token" or page_size is not None) else 256
    m_tiles = 1
    while m_tiles * 16 < rows and 2 * m_tiles * wide <= columns:
        m_tiles *= 2
    paging = "none" if page_size is None else "token" if page_size % DECODE_KEYS else "block"
    config = DecodeConfig(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        cache=cache,
        scales=scales,
        paging=paging,
        query=query,
        m_tiles=m_tiles,
        half_tile=rows <= 8 or wide > columns or (wide > 240 and row_ends and softcap and alibi),
        row_ends=row_ends,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        batch_idx=batch_idx,
        leftpad=leftpad,
        arch=arch,
    )
    for warps, ctas, least in ((4, 2, LEAST_STAGES), (4, 1, LEAST_STAGES), (4, 1, 2), (2, 1, 2)):
        found = _deepest(config, warps, ctas, least)
        if found is not None:
            return found
    raise AssertionError("two warps with two stages fit in every architecture's shared memory")


def _deepest(config: DecodeConfig, warps: int, ctas: int, least: int = LEAST_STAGES) -> DecodeConfig | None:
    """`config` with CTAs of `warps` and the deepest ring of which an SM holds `ctas`; None below `least` stages."""
    limit = min(SM80_ARCHS[config.arch].smem_bytes // ctas - SMEM_RESERVED, SMEM_LIMIT)
    for stages in range(MOST_STAGES, least - 1, -1):
        found = dataclasses.replace(config, warps=warps, stages=stages)
        if found.smem_bytes <= limit:
            return found
    return None


def ctas_per_sm(config: DecodeConfig) -> int:
    """CTAs that an SM holds, if each thread has all registers that it can have."""
    by_registers = REGISTERS_PER_SM // (256 * config.threads)
    return max(1, min(by_registers, config.ctas_by_smem))


def _narrow(config: DecodeConfig) -> bool:
    """Whether the codes of a key and its value are few: they want as many warps as an SM holds."""
    return config.fp8 and config.k_columns + config.v_columns < LIGHT_CODES


def _narrow_rows(config: DecodeConfig) -> bool:
    """Whether rows of 16 bits are narrow: an SM then takes more of their units, and shares of short ones."""
    return not config.fp8 and max(config.head_dim, config.head_dim_v) <= NARROW


def whole_units(config: DecodeConfig) -> DecodeConfig:
    """The kernel of which each CTA has a unit, in place of `config`."""
    return dataclasses.replace(config, whole=True)


def four_units(config: DecodeConfig) -> DecodeConfig | None:
    """That of which an SM holds `UNITS` CTAs with a unit each, in place of `config`; None where registers or shared
    memory have no room for them."""
    if config.arch != "sm_90a" or not (_narrow_rows(config) and config.lean):
        return None
    found = _deepest(config, 4, UNITS)
    return found and whole_units(found)


def fixed(config: DecodeConfig) -> DecodeConfig | None:
    """The kernel for a fixed number of shares of each unit, which starts to copy before it knows the length; None where
    there is none."""
    return dataclasses.replace(config, fixed=True) if config.lean and config.arch == "sm_90a" else None


def _of_units(config: DecodeConfig) -> bool:
    """Whether many units may have a CTA of `config` each."""
    return config.paging == "none" and config.arch == "sm_90a"


def wide(config: DecodeConfig) -> DecodeConfig | None:
    """The kernel for long shares in place of `config`; None where there is none.

    It is of eight warps, one CTA on an SM: as many as two CTAs of four, and half as many parts to add up. Rows of which
    shared memory does not hold so many have a ring of two steps: memory is faster with fewer of their bytes on the way.
    Codes in pages have such a kernel, too; rows of 16 bits in pages would gain nothing.
    """
    paged_codes = config.fp8 and config.paging == "block" and config.m_tiles == 1
    if config.arch != "sm_90a" or not (config.lean or paged_codes):
        return None
    return _deepest(config, 8, 1) or dataclasses.replace(config, stages=2)


def pair(config: DecodeConfig, rows: int) -> DecodeConfig | None:
    """The kernel that takes two neighbouring key heads as one, in place of `config`, where each has `rows` packed rows;
    None where there is none, or where rows of both do not fit in a tile: they would read all keys once more."""
    half = config.fp8 and 2 * (config.k_columns + config.v_columns) <= LIGHT_CODES
    if config.arch != "sm_90a" or not half or not config.lean or 2 * rows > 16:
        return None
    if config.scales != "token" or config.query != "16bit" or config.head_dim % 32 or config.head_dim_v % 32:
        return None
    found = dataclasses.replace(config, heads=2, half_tile=2 * rows <= 8)
    return _deepest(found, 4, 2) if found.lean else None


def kernels(config: DecodeConfig, rows: int) -> list[DecodeConfig]:
    """All that calls of a configuration may take, by their shapes, with `rows` packed rows for each key head."""
    found = []
    for base in (config, pair(config, rows)):
        if base is not None:
            for each in (base, wide(base)):
                if each is not None:
                    found += [each, fixed(each), whole_units(each) if _of_units(each) else None]
            found.append(four_units(base))
    return [each for each in found if each is not None]


def heads_in_step(config: DecodeConfig, heads_k: int) -> int:
    """Neighbouring key heads whose rows, one behind another, end at the end of a line of L2; 1 where such groups do not
    divide the heads."""
    of_k, of_v = (columns * config.element_bytes for columns in (config.k_columns, config.v_columns))
    count = 1
    while count * of_k % LINE or count * of_v % LINE:
        count *= 2
    return count if heads_k % count == 0 else 1


def even_splits(config: DecodeConfig, units: int, tiles: int, sms: int) -> int:
    """Equal shares of each of `units` units, of `tiles` tiles, that fill the SMs. 0 where too many would be idle.

    An SM has one CTA where that keeps it busy, as it does for up to 16 rows of queries where rows lie one behind
    another and are of 16 bits, or of codes of 256 bytes for a key and its value. Narrow codes want more instructions a
    byte, as do pairs of them with more than 8 rows, pages are looked up, and more rows take more products: there memory
    waits for a lone CTA, which counts where it has many tiles, and an SM has as many as it holds. So it has of narrow
    rows of 16 bits where units of few tiles are shared at all.
    """
    light = config.cache == "16bit" or config.k_columns + config.v_columns >= LIGHT_CODES
    light = (
        light
        and config.paging == "none"
        and config.m_tiles == 1
        and not (config.heads == 2 and config.rows == 16)
    )
    lone = light or units * tiles <= SHORT * sms
    held = sms * ctas_per_sm(config)
    most = sms if lone else held
    if light and _narrow_rows(config) and units <= sms // 2 and tiles <= SHORT_TILES:
        most = held
    splits = most // units
    if config.arch != "sm_90a" or units * splits < EVEN * most:
        return 0
    return max(min(splits, tiles // LEAST_TILES), 1)


def _own(config: DecodeConfig, batch: int, capacity: int, seen: tuple[int, int] | None) -> bool:
    """Whether even shares are of each unit's own tiles, whatever other sequences have: of units of one length, and of
    short ones."""
    short = capacity <= OWN_KEYS and config.lean and config.arch == "sm_90a"
    return batch == 1 or seen is not None or short


def shares(
    config: DecodeConfig,
    batch: int,
    heads_k: int,
    rows: int,
    capacity: int,
    num_splits: int,
    sms: int,
    seen: tuple[int, int] | None = None,
) -> Shares:
    """How to share out `batch` sequences of up to `capacity` keys with `rows` packed rows for each key head.

    seen: slots (first, end) that the queries of each sequence see, where the host knows them.
    """
    units = batch * heads_k * -(-rows // config.rows)
    if num_splits:
        ctas = units * num_splits
        return Shares(ctas, num_splits, 1, ctas if num_splits > 1 else 0)
    tiles = max(1, -(-capacity // config.tile_keys)) if seen is None else tiles_of(config, *seen)
    splits = even_splits(config, units, tiles, sms)
    if splits and _own(config, batch, capacity, seen):
        ctas = units * splits
        return Shares(ctas, splits, 1, ctas if splits > 1 else 0)
    ctas = units * splits if splits else min(sms * ctas_per_sm(config), units * tiles)
    if seen is not None and whole(ctas, [tiles] * batch, units // batch):
        return Shares(units, 1, 1, 0)
    return Shares(ctas, 0, LEAST_TILES, 2 * ctas, heads_in_step(config, heads_k))


def chosen(
    config: DecodeConfig,
    batch: int,
    heads_k: int,
    rows: int,
    capacity: int,
    num_splits: int,
    sms: int,
    seen: tuple[int, int] | None = None,
) -> tuple[DecodeConfig, Shares]:
    """The kernel and how to share out its work; arguments as those of `shares`.

    A CTA for each unit of a cache without pages where sequences are short or of one length and the last round of CTAs
    over the SMs is nearly full; on an SM four of them where rows are narrow and there are as many. CTAs of eight warps
    for long shares of units of one length, and of long units of codes in pages; for narrow codes without pages where
    they are sure to begin and end with units, or have few tiles: where sequences of unlike length are shared out
    evenly, theirs begin within units, and each that does costs eight warps a start. All of it hangs on shapes alone: a
    graph may be replayed with other lengths.
    """
    if num_splits:
        return config, shares(config, batch, heads_k, rows, capacity, num_splits, sms, seen)
    keys = capacity if seen is None else seen[1] - seen[0]
    both = pair(config, rows) if heads_k % 2 == 0 else None
    if both is not None and batch * heads_k * keys >= PAIRED_KEYS * sms:
        config, heads_k, rows = both, heads_k // 2, 2 * rows
    units = batch * heads_k * -(-rows // config.rows)
    alike = batch == 1 or seen is not None
    if (keys <= OWN_KEYS or alike) and _of_units(config):
        four = four_units(config)
        if four is not None and _rounds_are_full(units, UNITS * sms):
            return four, Shares(units, 1, 1, 0)
        if _rounds_are_full(units, ctas_per_sm(config) * sms):
            return whole_units(config), Shares(units, 1, 1, 0)
    other = wide(config)
    if other is not None:
        of_unit = -(-keys // other.tile_keys)
        tiles = units * of_unit
        if other.warps == config.warps:
            taken = tiles >= LONG_TILES * sms
        elif config.paging == "block":
            taken = tiles >= LONG_TILES * sms and of_unit >= LONG_TILES
        elif _narrow(config):
            taken = alike or tiles <= SHORT * sms
        else:
            even = even_splits(other, units, of_unit, sms) > 0
            taken = alike and even and tiles >= WIDE_TILES * sms
        config = other if taken else config
    plan = shares(config, batch, heads_k, rows, capacity, num_splits, sms, seen)
    if plan.splits > 1:
        config = fixed(config) or config
    elif plan.splits == 1 and _of_units(config):
        config = whole_units(config)
    return config, plan


def _rounds_are_full(units: int, held: int) -> bool:
    """Whether a CTA for each unit leaves few of `held` places on the SMs empty in the last round."""
    return units >= EVEN * -(-units // held) * held


def all_decode_configs() -> list[DecodeConfig | AppendConfig | UnpackConfig]:
    """A sample of the kernels for ahead-of-use compilation and tests: the common ones, and those short of registers."""
    everything: dict[str, Any] = dict.fromkeys(("row_ends", "softcap", "alibi", "sinks", "leftpad"), True)
    token: dict[str, Any] = {"cache": "e4m3", "scales": "token"}
    attend = [
        *(decode_config(d, d, "bf16", rows=8) for d in (64, 128, 256)),
        decode_config(128, 128, "bf16", page_size=64, rows=8),
        decode_config(40, 72, "fp16", page_size=1, rows=32, row_ends=True),
        decode_config(64, 64, "bf16", rows=64, row_ends=True),
        decode_config(128, 128, "bf16", rows=16),
        decode_config(128, 128, "fp16", rows=4, batch_idx=True, cache="e4m3", scales="head"),
        decode_config(128, 128, "bf16", rows=8, **token),
        decode_config(256, 256, "bf16", rows=8, page_size=1, **token, **everything),
        decode_config(256, 256, "bf16", rows=8, page_size=1, query="e4m3", **token, **everything),
        decode_config(256, 256, "bf16", rows=8, page_size=16, **everything),
        decode_config(256, 256, "bf16", rows=16, page_size=1, **everything),
        decode_config(64, 64, "bf16", rows=64, **token, **everything),
        decode_config(192, 128, "bf16", rows=8),
        decode_config(128, 128, "bf16", rows=8, arch="sm_80"),
        decode_config(256, 256, "fp16", rows=8, page_size=64, arch="sm_86"),
        decode_config(256, 256, "bf16", rows=16, row_ends=True, softcap=True, alibi=True, arch="sm_86"),
        decode_config(64, 64, "bf16", rows=8, arch="sm_89", **token),
    ]
    for dim in (64, 128, 256):
        attend += kernels(decode_config(dim, dim, "bf16", rows=8), 8)
    for options in ({}, {"query": "e4m3"}, {"sinks": True, "leftpad": True, "batch_idx": True}):
        for dim in (64, 128, 256):
            attend += kernels(decode_config(dim, dim, "bf16", rows=8, **token, **options), 8)
    attend += kernels(
        decode_config(64, 64, "bf16", rows=4, row_ends=True, alibi=True, softcap=True, **token), 4
    )
    attend += kernels(decode_config(64, 64, "bf16", rows=1, **token), 1)
    attend += kernels(decode_config(64, 64, "bf16", rows=16, **everything), 16)
    attend += kernels(decode_config(128, 128, "bf16", rows=8, page_size=64, **token), 8)
    attend += kernels(decode_config(256, 256, "bf16", rows=8, page_size=16, **token, **everything), 8)
    append = [
        AppendConfig(128, 128, "bf16", paged=True),
        AppendConfig(40, 72, "fp16", batch_idx=True, rotary="interleaved", queries=True),
        AppendConfig(128, 128, "bf16", **token, paged=True, rotary="half", rotate=True, queries=True),
        AppendConfig(256, 64, "bf16", cache="e4m3", scales="head", rotate=True, queries=True),
        AppendConfig(96, 96, "bf16", cache="e4m3", scales="head", rotate=True, keys=False, queries=True),
        AppendConfig(128, 128, "bf16", rotary="half", queries=True, arch="sm_80"),
    ]
    unpack = [
        UnpackConfig(128, 128, "bf16", paged=True),
        UnpackConfig(128, 64, "bf16", **token, paged=True, query_scale=True, leftpad=True),
        UnpackConfig(128, 128, "bf16", copy=False, leftpad=True, batch_idx=True),
    ]
    return [*dict.fromkeys(attend), *append, *unpack]


# ------------------------------------------------------------------------------------------------------------
# The device's numbering, in Python
# ------------------------------------------------------------------------------------------------------------


def share_start(total: int, parts: int, index: int) -> int:
    """First item of share `index` when `parts` share `total` items."""
    each, more = divmod(total, parts)
    return index * each + min(index, more)


def share_of(total: int, parts: int, item: int) -> int:
    """The share that holds an item."""
    each, more = divmod(total, parts)
    longer = more * (each + 1)
    return item // (each + 1) if item < longer else more + (item - longer) // max(each, 1)


def tiles_of(config: DecodeConfig, first: int, end: int) -> int:
    """Tiles of each unit of a sequence whose queries see slots `first` to `end` - 1."""
    keys = config.tile_keys
    return max(-(-end // keys) - first // keys, 1)


def whole(ctas: int, tiles: Sequence[int], units: int) -> bool:
    """Whether balanced work is done in whole units; tiles: of a unit, for each sequence; units: of a sequence."""
    each = -(-sum(tiles) * units // ctas)
    return -(-len(tiles) * units // ctas) * max(tiles) <= each + each // 16


@dataclass(frozen=True)
class Piece:
    """Tiles `tile` to tile + count - 1 of a unit of sequence `batch`, for one CTA. slot: -1 where that is all of it."""

    cta: int
    batch: int
    unit: int
    tile: int
    count: int
    slot: int


def pieces(plan: Shares, tiles: Sequence[int], units: int, m_blocks: int = 1) -> list[Piece]:
    """What each CTA does; tiles: of a unit, for each sequence; units: of a sequence; m_blocks: units of a key head."""
    found = []
    if plan.splits == 0 and whole(plan.ctas, tiles, units):
        for unit in range(len(tiles) * units):
            b = unit // units
            found.append(Piece(unit % plan.ctas, b, unit - b * units, 0, tiles[b], -1))
        return found
    apart = 1 if plan.splits else plan.together
    total, own = sum(tiles) * units // apart, units // apart
    sharers = max(min(plan.ctas // apart, total // plan.least), 1)
    for cta in range(plan.ctas):
        b = start = pos = end = 0
        share, side = divmod(cta, apart)
        if plan.splits == 0:
            if share < sharers:
                pos, end = share_start(total, sharers, share), share_start(total, sharers, share + 1)
                while start + tiles[b] * own <= pos:
                    start += tiles[b] * own
                    b += 1
        else:
            unit, split = divmod(cta, plan.splits)
            b, unit = divmod(unit, units)
            pos = unit * tiles[b] + share_start(tiles[b], plan.splits, split)
            end = unit * tiles[b] + share_start(tiles[b], plan.splits, split + 1)
        slot = cta
        while pos < end:
            unit, tile = divmod(pos - start, tiles[b])
            count = min(tiles[b] - tile, end - pos)
            head, block = divmod(unit, m_blocks)
            unit = (head * apart + side) * m_blocks + block
            found.append(Piece(cta, b, unit, tile, count, -1 if count == tiles[b] else slot))
            pos += count
            slot = cta + plan.ctas
            if pos == start + tiles[b] * own:
                start = pos
                b += 1
    return found


def parts(
    plan: Shares, tiles: Sequence[int], units: int, batch: int, unit: int, m_blocks: int = 1
) -> list[int]:
    """Slots whose parts the combining kernel adds up for a unit; none where it leaves the unit alone."""
    apart = 1
    if plan.splits:
        first = (batch * units + unit) * plan.splits
        count, later = min(plan.splits, tiles[batch]), 0
    elif whole(plan.ctas, tiles, units):
        return []
    else:
        apart = plan.together
        head, block = divmod(unit, m_blocks)
        total = sum(tiles) * units // apart
        sharers = max(min(plan.ctas // apart, total // plan.least), 1)
        at = sum(tiles[:batch]) * units // apart + (head // apart * m_blocks + block) * tiles[batch]
        share = share_of(total, sharers, at)
        count = share_of(total, sharers, at + tiles[batch] - 1) - share + 1
        later = plan.ctas if share_start(total, sharers, share) < at else 0
        first = share * apart + head % apart
    return [first + i * apart + (later if i == 0 else 0) for i in range(count)] if count > 1 else []
