"""Which kernel serves a problem of the 8-bit path: the tile table, and what the quantiser is compiled for.

Pure functions of plain data, as those of plan.py, which asks them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from cute_attn.kernels.config import HEAD_DIMS, WARPGROUP, FwdConfig, QuantizeConfig
from cute_attn.quantize import PRESETS, Fp8Recipe

DTYPE_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
P_ROUNDINGS: Final = ("half", "code", "ex2", "cast")
P_ROUNDINGS_OF: Final = {"e4m3": P_ROUNDINGS, "int8": ("code", "ex2")}
"""Roundings of P that kernels exist for, by the operands of Q K^T: "cast" is a baseline, of e4m3 alone."""
QK_DTYPES: Final = tuple(P_ROUNDINGS_OF)


@dataclass(frozen=True)
class Tile:
    """One row of the tile table: what it serves, the choices, and the reason for them.

    It serves each combination of `qk_dtypes`, `causals`, `windows` and `p_roundings` that kernels exist for (see
    `P_ROUNDINGS_OF`; a window counts as a causal mask), up to `head_dim` columns of Q and K, `head_dim_v` of V and
    `seqlen_k` keys of a sequence,
    unless a row above it does.
    `tile_m`, `tile_n`, `kv_stages`, `qk_splits`, `pv_part`, `check_keys` and the register counts are those of
    `FwdConfig`.
    """

    head_dim: int
    head_dim_v: int
    why: str
    tile_n: int
    qk_dtypes: tuple[str, ...] = QK_DTYPES
    causals: tuple[bool, ...] = (False, True)
    windows: tuple[bool, ...] = (False, True)
    p_roundings: tuple[str, ...] = P_ROUNDINGS
    seqlen_k: float = math.inf
    tile_m: int = 128
    kv_stages: int = 2
    qk_splits: int = 1
    pv_part: int = 256
    check_keys: int = 64
    consumer_regs: int = 240
    producer_regs: int = 24
    cluster: int = 1  # where a head has tiles enough, see `choose_cluster`

    def serves(
        self,
        head_dim: int,
        head_dim_v: int,
        qk_dtype: str,
        causal: bool,
        p_rounding: str,
        seqlen_k: float,
        window: bool = False,
    ) -> bool:
        """Whether its limits hold; the first row of `TILES` that says so is the one that counts."""
        return (
            head_dim <= self.head_dim
            and head_dim_v <= self.head_dim_v
            and seqlen_k <= self.seqlen_k
            and qk_dtype in self.qk_dtypes
            and (causal or window) in self.causals
            and window in self.windows
            and p_rounding in self.p_roundings
            and p_rounding in P_ROUNDINGS_OF[qk_dtype]
        )


SHORT_KEYS: Final = 1024
"""Keys of a sequence up to which some 8-bit kernels take other tiles (perf/log.md, runs 13 and 18)."""

LONG_KEYS: Final = 4096
"""Keys of a causal sequence from which on three consumer warpgroups gain more than their rows waste on the diagonal."""

LENGTHS: Final = (SHORT_KEYS, LONG_KEYS, math.inf)
"""Keys of a sequence up to which tiles are chosen."""

_SMALL_FULL: Final = (
    "up to head_dim 64 the chain of product, softmax and product is long beside the tensor core's work: "
    "a third consumer warpgroup fills the gaps, and 128 keys a step keep the scores within the 160 registers "
    "that three leave to a thread"
)
_SHORT_FULL: Final = (
    f"up to {SHORT_KEYS} keys what a tile costs beside its keys counts, and so does what its last rows waste: 128 rows "
    "divide more lengths than 192, and 256 keys a step halve the waits"
)
_SMALL_CAUSAL: Final = (
    "a block of rows also computes keys that its diagonal tiles hide: blocks of 192 rows waste more there "
    "than their third consumer warpgroup gains"
)
_SHORT_CAUSAL: Final = (
    f"up to {SHORT_KEYS} keys much of a head lies on the diagonal, where 256 keys a step compute twice what 128 do "
    "for nothing"
)
_MIDDLE: Final = (
    "256 keys a step halve what a key pays for waits, folds of P V into O and checks for overflow; the scores "
    "share registers with the fresh accumulator of P V, and two stages of K and V fit up to head_dim 192 "
    "with 128 columns of V"
)
_LARGE: Final = (
    "two stages of K and V, up to 256 columns wide, leave room for 128 keys a step, and O takes up to 128 "
    "registers a thread"
)
_HALVES: Final = "Q K^T comes in halves, softmax of one under the product of the other"
_WHOLE: Final = "exp2 wants the maximum over the tile, so Q K^T comes in one piece"
_EX2: Final = ("ex2", "cast")
_BY_CODE: Final = ("code", "half")
_HALF_FULL: Final = (
    "up to head_dim 64 a third consumer warpgroup fills the gaps of a chain that is long beside the tensor core's "
    "work; scores in float16 leave room for 256 keys a step in the 160 registers that three leave to a thread"
)

TILES: Final = (
    Tile(
        head_dim=64,
        head_dim_v=64,
        causals=(False,),
        p_roundings=("half",),
        tile_m=192,
        tile_n=256,
        qk_splits=2,
        consumer_regs=160,
        producer_regs=32,
        why=f"{_HALF_FULL}; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        causals=(False,),
        p_roundings=("code",),
        seqlen_k=SHORT_KEYS,
        tile_n=256,
        qk_splits=2,
        why=f"{_SHORT_FULL}; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        causals=(False,),
        p_roundings=("code",),
        tile_m=192,
        tile_n=128,
        kv_stages=4,
        qk_splits=2,
        consumer_regs=160,
        producer_regs=32,
        why=f"{_SMALL_FULL}; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        causals=(False,),
        p_roundings=_EX2,
        tile_m=192,
        tile_n=128,
        kv_stages=4,
        consumer_regs=160,
        producer_regs=32,
        why=f"{_SMALL_FULL}; {_WHOLE}",
    ),
    Tile(
        head_dim=128,
        head_dim_v=128,
        causals=(True,),
        p_roundings=_BY_CODE,
        windows=(False,),
        seqlen_k=SHORT_KEYS,
        tile_n=128,
        kv_stages=4,
        qk_splits=2,
        why=f"{_SHORT_CAUSAL}; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        causals=(True,),
        p_roundings=("half",),
        windows=(False,),
        seqlen_k=LONG_KEYS,
        tile_n=256,
        qk_splits=2,
        why=f"up to {LONG_KEYS} keys {_SMALL_CAUSAL}; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        causals=(True,),
        p_roundings=("half",),
        windows=(False,),
        tile_m=192,
        tile_n=256,
        qk_splits=2,
        consumer_regs=160,
        producer_regs=32,
        why=f"{_HALF_FULL}; of more than {LONG_KEYS} keys few are on the diagonal; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        causals=(True,),
        p_roundings=_BY_CODE,
        tile_n=256,
        qk_splits=2,
        why=f"{_SMALL_CAUSAL}; O is small enough for 256 keys a step, which halve the waits; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        qk_dtypes=("e4m3",),
        causals=(True,),
        p_roundings=_EX2,
        tile_n=256,
        why=f"{_SMALL_CAUSAL}; O is small enough for 256 keys a step, which halve the waits; {_WHOLE}",
    ),
    Tile(
        head_dim=64,
        head_dim_v=64,
        qk_dtypes=("int8",),
        causals=(True,),
        p_roundings=_EX2,
        tile_n=128,
        kv_stages=4,
        why=f"{_SMALL_CAUSAL}; exp2 of int8 scores would spill registers at 256 keys a step, so it takes "
        f"128; {_WHOLE}",
    ),
    Tile(
        head_dim=192,
        head_dim_v=128,
        p_roundings=_BY_CODE,
        tile_n=256,
        qk_splits=2,
        cluster=2,
        why=f"{_MIDDLE}; {_HALVES}",
    ),
    Tile(
        head_dim=192,
        head_dim_v=128,
        p_roundings=_EX2,
        tile_n=256,
        why=f"{_MIDDLE}; {_WHOLE}",
    ),
    Tile(
        head_dim=256,
        head_dim_v=256,
        windows=(True,),
        p_roundings=_BY_CODE,
        tile_n=128,
        pv_part=64,
        why=f"{_LARGE}, so P V is accumulated 64 columns at a time, each part folded under the product of "
        "the next; with halves of Q K^T the two ends of a window would spill registers, so it comes in one piece",
    ),
    Tile(
        head_dim=256,
        head_dim_v=256,
        causals=(False,),
        p_roundings=("half",),
        tile_n=128,
        qk_splits=2,
        pv_part=128,
        cluster=2,
        why=f"{_LARGE}; scores in float16 leave room for P V of 128 columns at a time; {_HALVES}",
    ),
    Tile(
        head_dim=256,
        head_dim_v=256,
        windows=(False,),
        p_roundings=_BY_CODE,
        tile_n=128,
        qk_splits=2,
        pv_part=64,
        cluster=2,
        why=f"{_LARGE}, so P V is accumulated 64 columns at a time, each part folded under the product of "
        f"the next; {_HALVES}",
    ),
    Tile(
        head_dim=256,
        head_dim_v=256,
        p_roundings=_EX2,
        tile_n=128,
        pv_part=128,
        why=f"{_LARGE}, so P V is accumulated 128 columns at a time; {_WHOLE}",
    ),
)
"""The first row whose limits hold serves: there is one for every (head_dim, head_dim_v) of `HEAD_DIMS`, mask,
operands of Q K^T and rounding of P that exist.

The sizes are those of the fastest variants with P by code at head_dim 64, 128 and 256 on an H200
(scripts/tune.py). Other head dimensions take those of the next larger one; the other roundings, which are
there for comparison, take the same where it compiles without spills.
"""


_REGS_VARLEN_8BIT: Final = (232, 40)  # of two consumer warpgroups, and of the producer


def rounding_of(recipe: Fp8Recipe, adjusts: bool) -> str:
    """How the kernel makes P for a recipe; `adjusts`: with softcap or ALiBi, which work on scores in float32."""
    return "half" if recipe.half_scores and not adjusts else recipe.p_rounding


def find_tile(
    head_dim: int,
    head_dim_v: int,
    qk_dtype: str,
    causal: bool,
    p_rounding: str,
    seqlen_k: float = math.inf,
    window: bool = False,
) -> Tile:
    """The row of `TILES` that serves these properties of a problem; `seqlen_k` by default of a long one.

    Raises KeyError where there is none: for a head_dim that `HEAD_DIMS` does not hold, or a rounding that
    does not exist for `qk_dtype`, which no recipe asks for (see `P_ROUNDINGS_OF`).
    """
    if head_dim in HEAD_DIMS and head_dim_v in HEAD_DIMS:
        for tile in TILES:
            if tile.serves(head_dim, head_dim_v, qk_dtype, causal, p_rounding, seqlen_k, window):
                return tile
    raise KeyError((head_dim, head_dim_v, qk_dtype, causal, p_rounding, window))


def forward_config(
    head_dim: int,
    head_dim_v: int,
    qk_dtype: str,
    causal: bool,
    p_rounding: str,
    out_dtype: str,
    pack_gqa: int = 1,
    cluster: int = 1,
    seqlen_k: float = math.inf,
    *,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    varlen: bool = False,
) -> FwdConfig:
    """The forward kernel for these properties of a problem; `out_dtype` is "bf16" or "fp16", `seqlen_k` by default
    that of a long one.

    A window takes the tiles of a causal mask; the other features change none. With `varlen`, for sequences of unlike
    length, the producer also looks for tiles, so it has some of the registers of two consumer warpgroups.

    Raises KeyError where no such kernel exists, see `find_tile`.
    """
    tile = find_tile(head_dim, head_dim_v, qk_dtype, causal, p_rounding, seqlen_k, window)
    regs = (tile.consumer_regs, tile.producer_regs)
    if varlen and tile.tile_m == 128:
        regs = _REGS_VARLEN_8BIT
    return FwdConfig(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        kv_stages=tile.kv_stages,
        qk_dtype=qk_dtype,
        p_rounding=p_rounding,
        causal=causal,
        out_dtype=out_dtype,
        consumer_regs=regs[0],
        producer_regs=regs[1],
        check_keys=tile.check_keys,
        qk_splits=tile.qk_splits,
        pv_part=tile.pv_part,
        pack_gqa=pack_gqa,
        cluster=cluster,
        window=window,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        varlen=varlen,
    )


def quantize_config(
    recipe: Fp8Recipe,
    head_dim: int,
    head_dim_v: int,
    in_dtype: str,
    rotary: str = "none",
    varlen: bool = False,
) -> QuantizeConfig:
    """The quantiser for a recipe; `in_dtype` is "bf16" or "fp16", `rotary` "none", "half" or "interleaved".

    Scales of a tensor or a head need the largest magnitude before the kernel runs: to it both are "static".
    """
    return QuantizeConfig(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        in_dtype=in_dtype,
        qk_dtype=recipe.qk_dtype,
        q_mode=recipe.q_scale if recipe.q_scale in ("token", "block") else "static",
        k_mode=f"block{recipe.k_block}" if recipe.k_scale == "block" else "static",
        v_mode="block" if recipe.v_scale == "block" else "static",
        rotate=recipe.rotation == "hadamard",
        smooth=recipe.smooth_k,
        rotary=rotary,
        varlen=varlen,
        narrow=recipe.half_scores,
    )


def transpose_config(head_dim_v: int) -> QuantizeConfig:
    """The quantiser that only transposes a ready e4m3 V; its other fields carry no choice."""
    return QuantizeConfig(
        head_dim=head_dim_v,
        head_dim_v=head_dim_v,
        in_dtype="e4m3",
        qk_dtype="e4m3",
        q_mode="static",
        k_mode="static",
        v_mode="static",
        rotate=False,
        smooth=False,
    )


TUNED_HEAD_DIMS: Final = (64, 128, 256)
"""The head dimensions whose tiles were chosen by measurement; the others take a row of theirs."""

# Unlike (head_dim, head_dim_v) that the sample below takes: edges and insides of the tile classes.
_MIXED_HEAD_DIMS: Final = ((64, 256), (256, 64), (96, 64), (32, 128), (208, 144), (256, 240))


def all_forward_configs() -> list[FwdConfig]:
    """The forward kernels that every test run compiles and checks, of the thousands that a plan can name.

    - head_dim 64, 128 and 256, the tuned ones: every mask and operand type, with the roundings of P that recipes have;
      "ex2", which none has, with one of the masks; output in fp16, which changes only the last conversion, once.
    - Every other head_dim, since widths, swizzles and parts of P V depend on it: P by code, in clusters where the tile
      has them. Masks and operand types take turns.
    - Some pairs of unlike head_dim and head_dim_v likewise, and 128, 256 and 192/128 (prefill of multi-head latent
      attention) with every mask and operand type.
    - Packed GQA, for each class of tiles, with the smallest, a middle or the largest group.
    - Short causal sequences, where they have tiles of their own.
    - Window, softcap, ALiBi and sinks: each by itself, all together with each mask, and in clusters or packed.

    Everything else is compiled on first use by the same code.
    """
    masks = (False, True)
    configs = [
        forward_config(d, d, qk_dtype, causal, p_rounding, "bf16")
        for turn, (d, qk_dtype) in enumerate(itertools.product(TUNED_HEAD_DIMS, QK_DTYPES))
        for p_rounding in P_ROUNDINGS_OF[qk_dtype]
        for causal in (masks if p_rounding != "ex2" else (bool(turn // 2 % 2) ^ bool(turn % 2),))
    ]
    by_code = {"e4m3": "half", "int8": "code"}  # what the recipes take without softcap and ALiBi
    for turn, d in enumerate(TUNED_HEAD_DIMS):
        qk_dtype = QK_DTYPES[turn % 2]
        configs.append(forward_config(d, d, qk_dtype, turn == 0, by_code[qk_dtype], "fp16"))
    clustered = list(itertools.product(((128, 128), (192, 128), (256, 256)), QK_DTYPES, masks))
    others = [(d, d) for d in HEAD_DIMS if d not in TUNED_HEAD_DIMS]
    for turn, pair in enumerate((*others, *_MIXED_HEAD_DIMS)):
        clustered.append((pair, QK_DTYPES[turn % 2], bool(turn // 2 % 2)))
    for pair, qk_dtype, causal in clustered:
        key = (*pair, qk_dtype, causal, by_code[qk_dtype])
        configs.append(forward_config(*key, "bf16", cluster=find_tile(*key).cluster))
    for turn, (d, group) in enumerate(((64, 8), (64, 64), (128, 2), (128, 8), (256, 64))):
        qk_dtype = QK_DTYPES[turn % 2]
        key = (d, d, qk_dtype, bool(turn // 2 % 2), by_code[qk_dtype])
        configs.append(forward_config(*key, "bf16", pack_gqa=group))
    configs += [
        forward_config(d, d, qk_dtype, True, by_code[qk_dtype], "bf16", seqlen_k=SHORT_KEYS)
        for d, qk_dtype in zip(TUNED_HEAD_DIMS, QK_DTYPES, strict=False)
    ]
    configs.append(forward_config(64, 64, "e4m3", True, "half", "bf16", seqlen_k=LONG_KEYS))
    features = ("window", "softcap", "alibi", "sinks")
    every = dict.fromkeys(features, True)
    for turn, feature in enumerate(features):
        causal = feature != "window" and bool(turn % 2)
        d = TUNED_HEAD_DIMS[turn % 3]
        for p_rounding in ("code", "half") if feature in ("window", "sinks") else ("code",):
            qk_dtype = "e4m3" if p_rounding == "half" else QK_DTYPES[turn // 2 % 2]
            configs.append(forward_config(d, d, qk_dtype, causal, p_rounding, "bf16", **{feature: True}))
    for turn, d in enumerate(TUNED_HEAD_DIMS):
        qk_dtype = QK_DTYPES[turn % 2]
        configs.append(forward_config(d, d, qk_dtype, False, "code", "bf16", **every))
        some, cluster = {**every, "window": False}, 1 if d == 64 else 2
        configs.append(forward_config(d, d, qk_dtype, bool(turn % 2), "code", "bf16", 1, cluster, **some))
    configs.append(forward_config(192, 128, "int8", False, "code", "bf16", 8, **every))
    for d in TUNED_HEAD_DIMS:
        configs.append(forward_config(d, d, "e4m3", False, "half", "bf16", window=True, sinks=True))
    for p_rounding in ("ex2", "cast"):
        configs.append(forward_config(128, 128, "e4m3", False, p_rounding, "bf16", **every))
    return list(dict.fromkeys(configs))


def all_quantize_configs() -> list[QuantizeConfig]:
    """The quantisers that every test run compiles and checks, without duplicates.

    head_dim 64, 128 and 256: those of the named recipes, the input dtypes taking turns, of the default recipe both. It
    from bf16, too, for every second other head_dim and 192/128, and with rotary embeddings. The narrowest, the widest
    and some between of those that transpose ready e4m3 tensors. Everything else, a recipe of one's own for example, is
    compiled on first use by the same code.
    """
    dtypes = list(DTYPE_NAMES.values())
    configs = [
        quantize_config(recipe, d, d, dtypes[(turn + place) % 2])
        for turn, recipe in enumerate(PRESETS.values())
        for place, d in enumerate(TUNED_HEAD_DIMS)
    ]
    others = [d for d in HEAD_DIMS if d not in TUNED_HEAD_DIMS]
    configs += [
        quantize_config(PRESETS["default"], d, dv, "bf16")
        for d, dv in (*zip(others[::2], others[::2], strict=True), (192, 128))
    ]
    configs += [
        quantize_config(PRESETS["default"], d, d, "bf16", ("half", "interleaved")[turn % 2])
        for turn, d in enumerate((*TUNED_HEAD_DIMS, 80))
    ]
    configs += [transpose_config(d) for d in (32, 64, 80, 128, 144, 240, 256)]
    return list(dict.fromkeys(configs))


def tile_table(head_dims: Iterable[tuple[int, int]]) -> list[dict[str, object]]:
    """What serves each (head_dim, head_dim_v), one flat dict for each mask, operand type and rounding of P,
    with what it costs: for printing and for tests."""
    rows: list[dict[str, object]] = []
    for (head_dim, head_dim_v), qk_dtype, causal in itertools.product(head_dims, QK_DTYPES, (False, True)):
        for p_rounding, seqlen_k in itertools.product(P_ROUNDINGS_OF[qk_dtype], LENGTHS):
            key = (head_dim, head_dim_v, qk_dtype, causal, p_rounding)
            tile = find_tile(*key, seqlen_k)
            if seqlen_k != tile.seqlen_k:  # the row for all lengths serves here, too
                continue
            config = forward_config(*key, "bf16", seqlen_k=seqlen_k)
            rows.append(
                {
                    "head_dim": head_dim,
                    "head_dim_v": head_dim_v,
                    "qk_dtype": qk_dtype,
                    "causal": causal,
                    "p_rounding": p_rounding,
                    "seqlen_k": tile.seqlen_k,
                    "tile_m": config.tile_m,
                    "tile_n": config.tile_n,
                    "kv_stages": config.kv_stages,
                    "qk_splits": config.qk_splits,
                    "pv_parts": "+".join(map(str, config.pv_parts)),
                    "check_keys": config.check_keys,
                    "smem_bytes": config.smem_bytes,
                    "registers": WARPGROUP
                    * (config.consumer_regs * config.consumer_warpgroups + config.producer_regs),
                    "why": tile.why,
                }
            )
    return rows
