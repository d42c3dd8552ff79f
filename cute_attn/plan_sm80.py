"""Tiles of the 16-bit forward kernel by mma.sync, for GPUs from sm_80 on.

Pure functions of plain data, as those of plan16.py.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Final

from cute_attn.kernels.config import SM80_ARCHS, Fwd16Sm80Config
from cute_attn.plan import choose_pack_gqa

__all__ = [
    "TILES_SM80",
    "TileSm80",
    "all_forward16_sm80_configs",
    "forward16_sm80_choice",
    "forward16_sm80_config",
]

SMALL: Final = 100 << 10
"""Shared memory of an SM, in bytes, up to which it counts as little (sm_86, sm_89, sm_120)."""

SHORT_QUERIES: Final = 512
"""A number of queries, taken for one of keys, that tiles of 96 keys fill badly: for kernels compiled ahead of use."""

BADLY_FILLED: Final = 1.03
"""Keys in whole tiles over those in whole tiles of 64 keys, above which tiles of more keys are slower."""


@dataclass(frozen=True)
class TileSm80:
    """One row of the tile table; the sizes are those of `Fwd16Sm80Config`.

    It serves heads whose larger of `head_dim` and `head_dim_v`, rounded up to a multiple of 32, is at most `columns`,
    where shared memory has room for its CTAs, with two stages of K and V or with one.
    """

    columns: int
    why: str
    two_stages: bool = False  # only where there is room for two stages
    small: bool = False  # only SMs with little shared memory
    window: bool = False  # only with a sliding window
    alibi: bool = True  # also with ALiBi
    causal: bool | None = None  # only with or without a causal mask; None: both
    filled: bool = False  # without a causal mask only for lengths that fill its last tile, see `BADLY_FILLED`
    # only with at most so many of window, softcap, ALiBi and unlike lengths, as each takes registers; ALiBi counts
    # three times where heads share a tile, as each row of a thread has a slope of its own then
    features: int = 6
    tile_m: int = 128
    tile_n: int = 64
    warps: int = 4
    ctas: int = 2
    q_in_regs: int = 0


TILES_SM80: Final = (
    TileSm80(
        columns=64,
        filled=True,
        features=1,
        alibi=False,
        tile_n=96,
        two_stages=True,
        why="32 rows a warp: each fragment of K and V that is read serves two products; S of 96 keys and O leave no "
        "register for more than one feature, nor for slopes",
    ),
    TileSm80(
        columns=64,
        q_in_regs=4,
        why="fragments of Q fit into registers beside S and O, so that shared memory is read for K and V alone; a last "
        "tile of 64 keys is fuller than one of 96",
    ),
    TileSm80(columns=96, why="two CTAs of 4 warps an SM: one multiplies while the other has its softmax"),
    TileSm80(
        columns=128,
        two_stages=True,
        features=2,
        why="32 rows a warp: each fragment of K and V that is read serves two products; S of 64 keys and O leave no "
        "register for more",
    ),
    TileSm80(
        columns=128,
        features=0,
        why="32 rows a warp: each fragment of K and V that is read serves two products; S of 64 keys, O and the copies "
        "of one stage leave no register for more",
    ),
    TileSm80(
        columns=128,
        small=True,
        causal=True,
        tile_m=64,
        why="what two CTAs have room for in shared memory; a square tile hides least under a causal mask",
    ),
    TileSm80(
        columns=128,
        two_stages=True,
        causal=False,
        features=1,
        tile_n=48,
        why="32 rows a warp; two CTAs have room for two stages of 48 keys in shared memory, and one feature has "
        "registers",
    ),
    TileSm80(
        columns=128,
        window=True,
        two_stages=True,
        tile_m=64,
        why="both ends of a window and a feature beside it leave no registers for 32 rows a warp",
    ),
    TileSm80(
        columns=128,
        features=3,
        tile_n=32,
        why="S of 64 keys would leave no registers for the features, or two CTAs no room in shared memory",
    ),
    TileSm80(
        columns=192,
        two_stages=True,
        tile_m=64,
        q_in_regs=12,
        why="O of 32 rows a warp would not fit into registers; that of 16 leaves room for Q; two CTAs an SM: one "
        "starts or ends a tile while the other multiplies",
    ),
    TileSm80(
        columns=192,
        filled=True,
        causal=False,
        features=0,
        tile_m=64,
        tile_n=96,
        q_in_regs=8,
        why="16 rows a warp and two CTAs an SM; of S of 96 keys, O and Q two thirds of Q fit into registers",
    ),
    TileSm80(
        columns=192,
        tile_m=64,
        q_in_regs=12,
        why="O of 32 rows a warp would not fit into registers; that of 16 leaves room for Q; two CTAs an SM: one waits "
        "for its copies, starts or ends a tile while the other multiplies",
    ),
    TileSm80(
        columns=192,
        warps=8,
        ctas=1,
        q_in_regs=12,
        why="O of 32 rows a warp would not fit into registers; that of 16 leaves room for Q",
    ),
    TileSm80(
        columns=256,
        causal=False,
        features=0,
        tile_m=64,
        q_in_regs=10,
        why="as with half of Q in registers, and two more of its fragments where there is no mask that wants any",
    ),
    TileSm80(
        columns=256,
        features=1,
        tile_m=64,
        q_in_regs=8,
        why="O of 32 rows a warp would not fit into registers; that of 16 leaves room for half of Q; two CTAs an SM: "
        "one starts or ends a tile while the other multiplies",
    ),
    TileSm80(
        columns=256,
        tile_m=64,
        why="O of 32 rows a warp would not fit into registers; two CTAs an SM: one starts or ends a tile while the "
        "other multiplies",
    ),
    TileSm80(
        columns=256,
        features=1,
        warps=8,
        ctas=1,
        q_in_regs=8,
        why="O of 32 rows a warp would not fit into registers; that of 16 leaves room for half of Q",
    ),
    TileSm80(columns=256, warps=8, ctas=1, why="O of 32 rows a warp would not fit into registers"),
    TileSm80(columns=256, tile_m=64, ctas=1, why="all that shared memory holds"),
)
"""Rows in order: the first that serves a problem is taken."""


@functools.lru_cache(maxsize=4096)
def forward16_sm80_config(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    arch: str,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    group: int = 1,
    seqlen_q: int = 1 << 20,
    varlen: bool = False,
) -> Fwd16Sm80Config:
    """The kernel for these properties of a problem and an architecture of `SM80_ARCHS`. Pure.

    Args: otherwise as those of `plan16.forward16_config`.

    Raises:
        ValueError: a head_dim, dtype or architecture for which there is no kernel.
    """
    return forward16_sm80_choice(
        head_dim, head_dim_v, dtype, arch, causal, window, softcap, alibi, sinks, group, seqlen_q, varlen
    )[0]


def forward16_sm80_choice(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    arch: str,
    causal: bool,
    window: bool,
    softcap: bool,
    alibi: bool,
    sinks: bool,
    group: int,
    seqlen_q: int,
    varlen: bool = False,
) -> tuple[Fwd16Sm80Config, tuple[str, ...]]:
    """What `forward16_sm80_config` returns, and the reasons, one sentence for each choice."""
    if arch not in SM80_ARCHS:
        raise ValueError(f"arch must be one of {tuple(SM80_ARCHS)}, got {arch!r}")
    columns = min(-(-max(head_dim, head_dim_v) // 32) * 32, 256)  # `check` refuses more
    small = SM80_ARCHS[arch].smem_bytes <= SMALL
    limit = BADLY_FILLED * _in_tiles(seqlen_q, 64, varlen)
    for tile in TILES_SM80:
        pack_gqa, why_pack = choose_pack_gqa(group, seqlen_q, tile.tile_m, varlen)
        features = window + softcap + varlen + alibi * (3 if pack_gqa > 1 else 1)
        serves = columns <= tile.columns and features <= tile.features and small >= tile.small
        if not serves or tile.causal not in (None, causal) or tile.window > window or alibi > tile.alibi:
            continue
        if tile.filled and not causal and _in_tiles(seqlen_q, tile.tile_n, varlen) > limit:
            continue
        chosen = Fwd16Sm80Config(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            tile_m=tile.tile_m,
            tile_n=tile.tile_n,
            warps=tile.warps,
            kv_stages=2,
            dtype=dtype,
            causal=causal,
            window=window,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            pack_gqa=pack_gqa,
            varlen=varlen,
            q_in_regs=min(tile.q_in_regs, -(-head_dim // 16)),
            ctas=tile.ctas,
            arch=arch,
        )
        if not (chosen.fits or tile.two_stages):
            chosen = dataclasses.replace(chosen, kv_stages=1)
        if chosen.fits:
            break
    chosen.check()
    stages = (
        "two stages of K and V: the next tile arrives under the products of this one"
        if chosen.kv_stages == 2
        else f"one stage of K and V, as shared memory of {arch} does not hold two: V arrives under Q K^T, the next K "
        "under P V"
    )
    why = (f"tile {chosen.tile_m} x {chosen.tile_n}: {tile.why}", stages)
    return chosen, why if why_pack is None else (*why, why_pack)


def _in_tiles(keys: int, tile_n: int, varlen: bool) -> int:
    """Keys in whole tiles; of sequences of unlike length, `keys` at most, in as many and one more."""
    return keys + tile_n if varlen else -(-keys // tile_n) * tile_n


def all_forward16_sm80_configs() -> list[Fwd16Sm80Config]:
    """A sample that every test run compiles: each kind of tile, each size of shared memory, each feature."""
    every = {"softcap": True, "alibi": True, "sinks": True}
    return [
        forward16_sm80_config(64, 64, "bf16", arch="sm_80"),
        forward16_sm80_config(64, 64, "fp16", arch="sm_89", window=True, varlen=True, **every),
        forward16_sm80_config(96, 72, "bf16", arch="sm_90a", causal=True, group=4, seqlen_q=1),
        forward16_sm80_config(128, 128, "bf16", arch="sm_90a", causal=True, **every),
        forward16_sm80_config(128, 128, "bf16", arch="sm_89", causal=True),
        forward16_sm80_config(120, 128, "bf16", arch="sm_86", window=True, varlen=True, **every),
        forward16_sm80_config(192, 128, "fp16", arch="sm_86", causal=True, varlen=True),
        forward16_sm80_config(256, 256, "bf16", arch="sm_80", causal=True, sinks=True),
        forward16_sm80_config(192, 192, "bf16", arch="sm_90a"),
        forward16_sm80_config(192, 192, "fp16", arch="sm_80", causal=True, varlen=True, sinks=True),
        forward16_sm80_config(128, 128, "bf16", arch="sm_80", varlen=True),
        forward16_sm80_config(256, 256, "bf16", arch="sm_90a", causal=True),
        forward16_sm80_config(256, 256, "bf16", arch="sm_90a", window=True, varlen=True, **every),
        forward16_sm80_config(128, 128, "bf16", arch="sm_80", window=True, alibi=True, group=4, seqlen_q=1),
    ]
