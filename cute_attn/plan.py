"""Problem -> Plan: which backend, which kernel, which tiles, and why.

Planning is a pure function of plain data: it asks no GPU, so that the whole table can be printed, tested and
precompiled anywhere. `cute_attn.explain` shows a plan to users.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from cute_attn.kernels.config import (
    HEAD_DIMS,
    HEAD_DIMS_16BIT,
    SMEM_LIMIT,
    WARPGROUP,
    Bwd16Config,
    Fwd16Config,
    FwdConfig,
    QuantizeConfig,
)
from cute_attn.problem import Features, Problem
from cute_attn.quantize import PRESETS, Fp8Recipe
from cute_attn.validate import check_backend

DTYPE_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
P_ROUNDINGS: Final = ("code", "ex2", "cast")
P_ROUNDINGS_OF: Final = {"e4m3": P_ROUNDINGS, "int8": ("code", "ex2")}
"""Roundings of P that kernels exist for, by the operands of Q K^T: "cast" is a baseline, of e4m3 alone."""
QK_DTYPES: Final = tuple(P_ROUNDINGS_OF)
WARPGROUP_ROWS: Final = 64  # query rows of a consumer warpgroup; packed, it holds whole packs of heads


# ------------------------------------------------------------------------------------------------------------
# Tile table
# ------------------------------------------------------------------------------------------------------------


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
    cluster: int = 1  # where a head has tiles enough, see `_choose_cluster`

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
"""Keys of a causal sequence up to which a step of the 8-bit kernel takes fewer of them (perf/log.md, run 13)."""
SHORT_QUERIES: Final = 2048
"""Queries of a causal sequence up to which a tile of the 16-bit kernel has fewer of them (likewise)."""

_SMALL_FULL: Final = (
    "up to head_dim 64 the chain of product, softmax and product is long beside the tensor core's work: "
    "a third consumer warpgroup fills the gaps, and 128 keys a step keep the scores within the 160 registers "
    "that three leave to a thread"
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

TILES: Final = (
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
        p_roundings=("code",),
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
        p_roundings=("code",),
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
        p_roundings=("code",),
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
        p_roundings=("code",),
        tile_n=128,
        pv_part=64,
        why=f"{_LARGE}, so P V is accumulated 64 columns at a time, each part folded under the product of "
        "the next; with halves of Q K^T the two ends of a window would spill registers, so it comes in one piece",
    ),
    Tile(
        head_dim=256,
        head_dim_v=256,
        windows=(False,),
        p_roundings=("code",),
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

    - head_dim 64, 128 and 256, the tuned ones: every mask, operand type and rounding of P; output in fp16,
      which changes only the last conversion, with P by code alone.
    - Every other head_dim, since widths, swizzles and parts of P V depend on it: P by code, two kernels each, in
      clusters where the tile has them. The pairs (e4m3 full, int8 causal) and (int8 full, e4m3 causal) take turns.
    - Some pairs of unlike head_dim and head_dim_v likewise, and 128, 256 and 192/128 (prefill of multi-head latent
      attention) with every mask and operand type.
    - Packed GQA, for each class of tiles and the smallest, a middle and the largest group.
    - Short causal sequences, where they have tiles of their own, for each operand type.
    - Window, softcap, ALiBi and sinks: each by itself, all together with each mask, and in clusters or packed.

    Everything else is compiled on first use by the same code.
    """
    masks = (False, True)
    configs = [
        forward_config(d, d, qk_dtype, causal, p_rounding, out_dtype)
        for d, qk_dtype, causal in itertools.product(TUNED_HEAD_DIMS, QK_DTYPES, masks)
        for p_rounding in P_ROUNDINGS_OF[qk_dtype]
        for out_dtype in (DTYPE_NAMES.values() if p_rounding == "code" else ("bf16",))
    ]
    clustered = list(itertools.product(((128, 128), (192, 128), (256, 256)), QK_DTYPES, masks))
    others = [(d, d) for d in HEAD_DIMS if d not in TUNED_HEAD_DIMS]
    for turn, pair in enumerate((*others, *_MIXED_HEAD_DIMS)):
        clustered += [(pair, QK_DTYPES[(turn + causal) % 2], causal) for causal in masks]
    for pair, qk_dtype, causal in clustered:
        cluster = find_tile(*pair, qk_dtype, causal, "code").cluster
        configs.append(forward_config(*pair, qk_dtype, causal, "code", "bf16", cluster=cluster))
    for turn, (d, group) in enumerate(itertools.product(TUNED_HEAD_DIMS, (2, 8, 64))):
        configs.append(
            forward_config(d, d, QK_DTYPES[turn % 2], bool(turn // 2 % 2), "code", "bf16", pack_gqa=group)
        )
    configs += [
        forward_config(d, d, qk_dtype, True, "code", "bf16", seqlen_k=SHORT_KEYS)
        for d, qk_dtype in itertools.product(TUNED_HEAD_DIMS, QK_DTYPES)
    ]
    features = ("window", "softcap", "alibi", "sinks")
    every = dict.fromkeys(features, True)
    for turn, (d, feature) in enumerate(itertools.product(TUNED_HEAD_DIMS, features)):
        causal = feature != "window" and bool(turn % 2)
        some = {feature: True}
        configs.append(forward_config(d, d, QK_DTYPES[turn // 2 % 2], causal, "code", "bf16", **some))
    for turn, (d, qk_dtype) in enumerate(itertools.product(TUNED_HEAD_DIMS, QK_DTYPES)):
        configs.append(forward_config(d, d, qk_dtype, False, "code", "bf16", **every))
        some, cluster = {**every, "window": False}, 1 if d == 64 else 2
        configs.append(forward_config(d, d, qk_dtype, bool(turn % 2), "code", "bf16", 1, cluster, **some))
    configs.append(forward_config(192, 128, "int8", False, "code", "bf16", 8, **every))
    for p_rounding in ("ex2", "cast"):
        configs.append(forward_config(128, 128, "e4m3", False, p_rounding, "bf16", **every))
    return list(dict.fromkeys(configs))


def all_quantize_configs() -> list[QuantizeConfig]:
    """The quantisers that every test run compiles and checks, without duplicates.

    head_dim 64, 128 and 256: those of the named recipes, from both input dtypes. Every other head_dim, and
    192/128: that of the default recipe from bf16. Some with rotary embedding. For each head_dim the one that
    transposes ready e4m3 tensors. Everything else, a recipe of one's own for example, is compiled on first use
    by the same code.
    """
    configs = [
        quantize_config(recipe, d, d, in_dtype)
        for recipe in PRESETS.values()
        for d in TUNED_HEAD_DIMS
        for in_dtype in DTYPE_NAMES.values()
    ]
    configs += [
        quantize_config(PRESETS["default"], d, dv, "bf16")
        for d, dv in (*zip(HEAD_DIMS, HEAD_DIMS, strict=True), (192, 128))
    ]
    configs += [
        quantize_config(PRESETS["default"], d, d, "bf16", rotary)
        for d, rotary in itertools.product((*TUNED_HEAD_DIMS, 80), ("half", "interleaved"))
    ]
    configs += [transpose_config(d) for d in HEAD_DIMS]
    return list(dict.fromkeys(configs))


def tile_table(head_dims: Iterable[tuple[int, int]]) -> list[dict[str, object]]:
    """What serves each (head_dim, head_dim_v), one flat dict for each mask, operand type and rounding of P,
    with what it costs: for printing and for tests."""
    rows: list[dict[str, object]] = []
    lengths = (SHORT_KEYS, math.inf)
    for (head_dim, head_dim_v), qk_dtype, causal in itertools.product(head_dims, QK_DTYPES, (False, True)):
        for p_rounding, seqlen_k in itertools.product(P_ROUNDINGS_OF[qk_dtype], lengths):
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


# ------------------------------------------------------------------------------------------------------------
# Plan
# ------------------------------------------------------------------------------------------------------------

BREAK_EVEN_KEYS: Final = 4096
"""Keys of full self-attention from which quantising and attending in one call beats the best 16-bit kernel on an
H200 (perf/records/whole_call.json). Quantising costs what reading and writing the operands once costs."""


_CAUSAL_CLUSTER_BLOCKS: Final = 16
"""Tiles of a head from which clusters pay under a causal mask (perf/log.md, run 10)."""


def _equivalent_keys(problem: Problem) -> int:
    """Keys of full self-attention, as many key as query heads, with the same work an element of Q, K, V."""
    queries, keys = problem.seqlen_q, problem.seqlen_k
    left, right = problem.ends

    def keys_before(first: int) -> int:
        """Sum over queries i of the keys before position i + first."""

        def below(n: int) -> int:  # sum of x, at most `keys`, over 0 < x < n
            small = max(min(n - 1, keys), 0)
            return small * (small + 1) // 2 + max(n - 1 - keys, 0) * keys

        return below(first + queries) - below(first)

    shift = keys - queries
    pairs = queries * keys if right < 0 else keys_before(shift + right + 1)
    pairs -= 0 if left < 0 else keys_before(shift - left)
    wide, wide_v = problem.head_dim, problem.head_dim_v
    elements = queries * problem.heads_q * wide + keys * problem.heads_k * (wide + wide_v)
    return 3 * pairs * problem.heads_q * (wide + wide_v) // max(2 * elements, 1)


def _tiles(seqlen_q: int, group: int, pack_gqa: int, tile_m: int, varlen: bool = False) -> int:
    """Tiles of one batch entry and key head, whose `group` query heads share them `pack_gqa` at a time.

    With `varlen`, about those of a sequence of `seqlen_q` queries on average: half a tile is not full.
    """
    rows, packs = seqlen_q * pack_gqa, group // pack_gqa
    return max(round((rows / tile_m + 0.5) * packs), 1) if varlen else -(-rows // tile_m) * packs


_PACK_SAVES: Final = 10
"""Packing must save more than one tile of this many.

Time follows the rounds of tiles that an SM takes: what saved rounds was 1.8 to 14 times as fast, what saved an eighth
to a half of the tiles but no round 0.94 to 1.04 (perf/tuning/packed_gqa.txt). Less is a round in few shapes, and was
not measured."""


def _choose_pack_gqa(group: int, seqlen_q: int, tile_m: int, varlen: bool = False) -> tuple[int, str | None]:
    """(`pack_gqa` of the kernel, the reason where there is one to give), for `group` query heads of a key head.

    As many heads as the largest power of two that divides the group, at most the rows of a warpgroup: 8 of 8, 4 of
    12, 64 of 128, 1 of 3.
    """
    heads = min(group & -group, WARPGROUP_ROWS)
    alone = _tiles(seqlen_q, group, 1, tile_m, varlen)
    shared = f"{group} query heads share a key head"
    if heads == 1:
        would_pay = (alone - _tiles(seqlen_q, group, group, tile_m, varlen)) * _PACK_SAVES > alone
        return 1, (
            f"{shared}: an odd number does not divide the {WARPGROUP_ROWS} rows of a warpgroup, so each has tiles of "
            "its own"
            if would_pay
            else None
        )
    packed = _tiles(seqlen_q, group, heads, tile_m, varlen)
    if (alone - packed) * _PACK_SAVES <= alone:
        return 1, None
    return heads, (
        f"{shared}: with the rows of {heads} in shared tiles they need {packed} of them instead of {alone}, and each "
        "tile reads the keys anew"
    )


def _choose_cluster(tile: Tile | Tile16, blocks: int, causal: bool) -> tuple[int, str | None]:
    """(`cluster` of the kernel, the reason where there is one to give), for `blocks` tiles of a head or pack."""
    enough = _CAUSAL_CLUSTER_BLOCKS if causal else 2
    if tile.cluster == 1 or blocks < enough or blocks % 2 * 8 > blocks:
        return 1, None
    return tile.cluster, "two CTAs of neighbouring tiles each load half of the keys and values, for both"


@dataclass(frozen=True)
class Plan:
    """What one call will do. `str(plan)` is the readable form.

    Attributes:
        backend: "sm90" (the Hopper kernels) or "emulator" (torch, with the kernels' roundings).
        kernel: name of the forward kernel that runs; with the emulator "emulator(NAME)" of the one it
            reproduces.
        config: what the forward kernel is compiled for; the emulator takes its tiles from it too.
        quantize_config: what the quantiser is compiled for; None where the operands are already quantised.
        recipe: the resolved recipe.
        reasons: one sentence for each choice.
        smem_bytes: shared memory of one CTA of the forward kernel.
        work_tiles: tiles of query rows of the forward kernel, which at most one CTA an SM takes in turns; 0
            where nothing is launched.
        problem: what was planned for.
    """

    backend: str
    kernel: str
    config: FwdConfig
    quantize_config: QuantizeConfig | None
    recipe: Fp8Recipe
    reasons: tuple[str, ...]
    smem_bytes: int
    work_tiles: int
    problem: Problem

    def __str__(self) -> str:
        problem, config, recipe = self.problem, self.config, self.recipe
        k_scale = f"block of {recipe.k_block}" if recipe.k_scale == "block" else recipe.k_scale
        of_kernel = " (of the kernel that is emulated)" if self.backend == "emulator" else ""
        quantiser = "none: operands are already 8-bit"
        if self.quantize_config is not None:
            quantiser = self.quantize_config.name
            if self.backend == "emulator":
                quantiser = f"torch reference of {quantiser}"
        lines = {
            "backend": self.backend,
            "kernel": self.kernel,
            "quantiser": quantiser,
            "problem": f"batch {problem.batch}, seqlen_q {problem.seqlen_q}, seqlen_k {problem.seqlen_k}, "
            f"heads_q {problem.heads_q}, heads_k {problem.heads_k}, head_dim {problem.head_dim}, "
            + (f"head_dim_v {problem.head_dim_v}, " if problem.head_dim_v != problem.head_dim else "")
            + f"{'causal' if problem.causal else 'full'}{_described(problem.features)}, output {problem.out_dtype}",
            "recipe": f"{recipe.name}: Q K^T in {recipe.qk_dtype}, P V in e4m3; scales Q {recipe.q_scale}, "
            f"K {k_scale}, V {recipe.v_scale}; rotation {recipe.rotation}; "
            f"{'' if recipe.smooth_k else 'no '}K smoothing; P by {recipe.p_rounding}",
            "tiles": tiles_text(
                config, f"Q K^T in {_parts(config.qk_splits)}; P V in {_parts(len(config.pv_parts))}"
            ),
            "smem": f"{self.smem_bytes} of {SMEM_LIMIT} bytes{of_kernel}",
            "work tiles": f"{self.work_tiles}{of_kernel}",
        }
        return report_text(lines, self.reasons)


def report_text(lines: dict[str, str], reasons: Iterable[str]) -> str:
    """What `explain` prints, of either precision."""
    text = [f"{key:<10} {value}" for key, value in lines.items()]
    return "\n".join([*text, "because", *(f"  - {reason}" for reason in reasons)])


def tiles_text(config: FwdConfig | Fwd16Config, steps: str) -> str:
    """The tiles of a kernel in words; `steps` says how the products of a step are issued."""
    return (
        f"{config.tile_m} queries x {config.tile_n} keys, {config.kv_stages} K/V stages, "
        f"{config.consumer_warpgroups} consumer warpgroups of {config.consumer_regs} registers; {steps}"
        + (f"; rows of {config.pack_gqa} query heads packed" if config.pack_gqa > 1 else "")
        + (f"; clusters of {config.cluster}" if config.cluster > 1 else "")
    )


def work_tiles(config: FwdConfig | Fwd16Config, batch: int, seqlen_q: int, heads_q: int, heads_k: int) -> int:
    """Tiles of query rows that the kernel of `config` computes."""
    return _tiles(seqlen_q, heads_q // heads_k, config.pack_gqa, config.tile_m) * heads_k * batch


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Problem, backend: str = "auto") -> Plan:
    """Choose backend, kernel and tiles. Pure: equal arguments give equal plans, on any machine.

    Args:
        problem: what to compute, from checked inputs.
        backend: "auto", "sm90" or "emulator". "auto" is "sm90" where `problem.capability` is 9.x, else
            "emulator".

    Raises:
        ValueError: unknown backend, or "sm90" where the problem's tensors are not on a Hopper GPU.
    """
    check_backend(backend, problem.capability)
    recipe = problem.recipe
    chosen, why_backend = _choose_backend(problem.capability, backend)
    reasons = [
        why_backend,
        f"recipe {recipe.name!r} asks for Q K^T in {recipe.qk_dtype} and P by {recipe.p_rounding}",
    ]

    features = problem.features
    causal = problem.ends == (-1, 0)
    window = not causal and problem.ends != (-1, -1)
    if problem.causal and problem.seqlen_q == 1:
        reasons.append(
            "one query row sees every key: the causal mask hides nothing, so the kernel without one serves"
        )
    if features.window != (-1, -1) and not window:
        reasons.append(
            f"the window {features.window} hides nothing beside the causal mask"
            if causal
            else f"the window {features.window} hides no key"
        )
    key = (problem.head_dim, problem.head_dim_v, recipe.qk_dtype, causal, recipe.p_rounding)
    tile = find_tile(*key, problem.seqlen_k, window)
    reasons.append(f"tile {tile.tile_m} x {tile.tile_n}: {tile.why}")
    if window:
        reasons.append(f"tiles of keys outside the window {problem.ends} are not visited")
    if features.softcap > 0 or features.alibi:
        reasons.append("softcap and ALiBi change scores one by one, before P is made of them")
    group = problem.heads_q // problem.heads_k
    pack_gqa, why_pack = _choose_pack_gqa(group, problem.seqlen_q, tile.tile_m)
    if why_pack is not None:
        reasons.append(why_pack)
    cluster = 1
    if not window:  # whose tiles do not read the same keys
        blocks = -(-problem.seqlen_q * pack_gqa // tile.tile_m)
        cluster, why_cluster = _choose_cluster(tile, blocks, causal)
        if why_cluster is not None:
            reasons.append(why_cluster)
    config = forward_config(
        *key,
        DTYPE_NAMES[problem.out_dtype],
        pack_gqa,
        cluster,
        problem.seqlen_k,
        window=window,
        softcap=features.softcap > 0,
        alibi=features.alibi,
        sinks=features.sinks,
    )

    quantiser = None
    if problem.in_dtype is not None:
        quantiser = quantize_config(
            recipe, problem.head_dim, problem.head_dim_v, DTYPE_NAMES[problem.in_dtype], problem.rotary
        )
        keys = _equivalent_keys(problem)
        if chosen == "sm90" and not problem.is_empty and keys < BREAK_EVEN_KEYS:
            reasons.append(
                f"as much work for each operand as full self-attention over {keys} keys: below about "
                f"{BREAK_EVEN_KEYS} a 16-bit kernel is faster than quantising and attending in one call; operands "
                "that `quantize` has prepared do not pay that"
            )
        if "static" in (quantiser.q_mode, quantiser.k_mode, quantiser.v_mode):
            reasons.append(
                "scales of a whole tensor or head need a pass for the largest magnitude before the quantiser"
            )
    tiles = work_tiles(config, problem.batch, problem.seqlen_q, problem.heads_q, problem.heads_k)
    if problem.is_empty:
        tiles = 0
        reasons.append(
            "nothing is launched: " + ("there are no keys" if problem.seqlen_k == 0 else "there is no output")
        )
    return Plan(
        backend=chosen,
        kernel=config.name if chosen == "sm90" else f"emulator({config.name})",
        config=config,
        quantize_config=quantiser,
        recipe=recipe,
        reasons=tuple(reasons),
        smem_bytes=config.smem_bytes,
        work_tiles=tiles,
        problem=problem,
    )


def _described(features: Features) -> str:
    """Features in the text of a plan, each behind a comma."""
    window, softcap = features.window, features.softcap
    return (
        (f", window {window}" if window != (-1, -1) else "")
        + (f", softcap {softcap:g}" if softcap else "")
        + (", ALiBi" if features.alibi else "")
        + (", sinks" if features.sinks else "")
    )


def _parts(n: int) -> str:
    return "one piece" if n == 1 else f"{n} parts"


def _choose_backend(capability: tuple[int, int] | None, backend: str) -> tuple[str, str]:
    """(backend that runs, the reason), for a `backend` that `check_backend` accepted."""
    if backend != "auto":
        return backend, f"backend {backend!r} was asked for"
    if capability is None:
        return (
            "emulator",
            "the tensors are not on an NVIDIA GPU, and the kernels need one of Hopper's (H100, H200)",
        )
    where = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] != 9:
        return "emulator", f"the GPU has {where}, and the kernels need 9.x (Hopper: H100, H200)"
    return "sm90", f"the GPU has {where} (Hopper)"


# ------------------------------------------------------------------------------------------------------------
# 16-bit forward
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile16:
    """One row of the 16-bit tile table; the sizes are those of `Fwd16Config`.

    It serves heads whose larger of `head_dim` and `head_dim_v`, rounded up to a multiple of 32, is at most `columns`.
    """

    columns: int
    why: str
    plain: bool | None = None  # only without (True) or with (False) a mask, softcap or ALiBi; None: both
    short: bool = False  # only causal sequences of at most SHORT_QUERIES queries
    tile_m: int = 128
    tile_n: int = 128
    consumer_regs: int = 240
    producer_regs: int = 24
    pingpong: bool = False  # turns of the warpgroups at the tensor core
    cluster: int = 2  # where a head has tiles enough, see `_choose_cluster`


# a consumer's and the producer's where two consume and the producer looks for tiles, too; 240 would leave it 24
_REGS_VARLEN: Final = (232, 40)
_BOUND_16: Final = "what two stages of K and V leave room for in shared memory"

TILES_16: Final = (
    Tile16(
        columns=64,
        short=True,
        pingpong=True,
        cluster=1,
        why="a block of rows also computes keys that its diagonal tiles hide: blocks of 192 rows waste more there "
        "than their third consumer warpgroup gains",
    ),
    Tile16(
        columns=64,
        tile_m=192,
        consumer_regs=160,
        producer_regs=32,
        pingpong=True,
        cluster=1,
        why="three consumer warpgroups in turns, for at 64 columns exp2 takes as long as the products; more keys "
        "a step do not fit into the 160 registers that three leave to a thread",
    ),
    Tile16(
        columns=96,
        plain=True,
        tile_n=192,
        why="S, P and O of 192 keys fit into 240 registers; a third warpgroup would leave room for 112",
    ),
    Tile16(
        columns=128,
        why="176 keys a step would fit into 240 registers, but not O beside Q in shared memory; measured, they gain "
        "nothing",
    ),
    Tile16(columns=192, tile_n=112, why=_BOUND_16),
    Tile16(columns=256, tile_n=80, why=_BOUND_16),
)
"""Rows in the order of `columns`: the first that serves a problem is taken. Those of 64, 128 and 256 columns
were measured on an H200 (perf/log.md, run 11), the others follow them."""


@functools.lru_cache(maxsize=4096)
def forward16_config(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    group: int = 1,
    seqlen_q: int = 1 << 20,
    varlen: bool = False,
) -> Fwd16Config:
    """The 16-bit forward kernel for these properties of a problem. Pure.

    Args:
        head_dim, head_dim_v: multiples of 8 from 32 to 256.
        dtype: "bf16" or "fp16".
        causal, window, softcap, alibi, sinks: as in `Fwd16Config`; causal and window exclude each other.
        group: query heads of a key head.
        seqlen_q: queries of a sequence, with `varlen` on average; with few of them the rows of a group share tiles, or
            tiles have fewer rows.
        varlen: sequences of unlike length.

    Raises:
        ValueError: a head_dim or dtype for which there is no kernel.
    """
    return forward16_choice(
        head_dim, head_dim_v, dtype, causal, window, softcap, alibi, sinks, group, seqlen_q, varlen
    )[0]


def forward16_choice(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    causal: bool,
    window: bool,
    softcap: bool,
    alibi: bool,
    sinks: bool,
    group: int,
    seqlen_q: int,
    varlen: bool = False,
) -> tuple[Fwd16Config, tuple[str, ...]]:
    """What `forward16_config` returns, and the reasons, one sentence for each choice."""
    columns = -(-max(head_dim, head_dim_v) // 32) * 32
    plain = not (causal or window or softcap or alibi)
    short = causal and seqlen_q <= SHORT_QUERIES
    tile = next(
        t for t in TILES_16 if columns <= t.columns and t.plain in (None, plain) and (short or not t.short)
    )
    pack_gqa, why_pack = _choose_pack_gqa(group, seqlen_q, tile.tile_m, varlen)
    consumer_regs, producer_regs = tile.consumer_regs, tile.producer_regs
    if varlen and tile.tile_m == 128:
        consumer_regs, producer_regs = _REGS_VARLEN
    cluster, why_cluster = 1, None
    if not (window or varlen):  # whose tiles do not read the same keys, or are given out one by one
        cluster, why_cluster = _choose_cluster(tile, -(-seqlen_q * pack_gqa // tile.tile_m), causal)
    config = _fitted(
        Fwd16Config(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            tile_m=tile.tile_m,
            tile_n=tile.tile_n,
            kv_stages=2,
            dtype=dtype,
            causal=causal,
            window=window,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            consumer_regs=consumer_regs,
            producer_regs=producer_regs,
            pingpong=tile.pingpong,
            cluster=cluster,
            pack_gqa=pack_gqa,
            varlen=varlen,
        )
    )
    why_tile = f"tile {config.tile_m} x {config.tile_n}: {tile.why}"
    if config.tile_n < tile.tile_n:
        why_tile += f"; {config.tile_n} keys a step, as shared memory does not hold {tile.tile_n}"
    if config.o_in_q:
        why_tile += "; O is staged where Q was, so Q of the next tile is loaded after this one's end"
    return config, tuple(why for why in (why_tile, why_pack, why_cluster) if why is not None)


def _fitted(config: Fwd16Config) -> Fwd16Config:
    """`config` with as many keys a step as shared memory holds."""
    while config.smem_bytes > SMEM_LIMIT or not config.o_fits_q:
        config = dataclasses.replace(config, tile_n=config.tile_n - 16)
    config.check()
    return config


def backward16_config(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    deterministic: bool = False,
) -> Bwd16Config:
    """The 16-bit backward for these properties of a problem. Pure. sinks need no kernel of their own.

    Args:
        head_dim, head_dim_v: multiples of 8 from 32 to 256.
        dtype: "bf16" or "fp16".
        causal, window, softcap, alibi, deterministic: as in `Bwd16Config`; causal and window exclude each other.

    Raises:
        ValueError: a head_dim or dtype for which there is no kernel.
    """
    config = Bwd16Config(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        tile_m=64,
        tile_n=128,
        dtype=dtype,
        causal=causal,
        dq_split="columns",
        window=window,
        softcap=softcap,
        alibi=alibi,
        deterministic=deterministic,
    )
    columns = max(head_dim, head_dim_v)
    if columns > 128:  # accumulators of 128 keys do not fit, nor dQ beside two stages of Q and dO
        config = dataclasses.replace(config, tile_n=64, shared_keys=True, dq_direct=True, ds_stages=1)
    elif columns <= 64 and not (softcap or alibi):  # whose values beside twice the scores would not fit
        config = dataclasses.replace(config, tile_m=128, dq_split="rows")
    config.check()
    return config


def all_forward16_configs() -> list[Fwd16Config]:
    """A sample of the 16-bit kernels, for ahead-of-use compilation and tests: the common ones, each feature once."""
    common = [
        forward16_config(head_dim, head_dim, dtype, causal=causal)
        for head_dim in (64, 96, 128, 192, 256)
        for dtype in DTYPE_NAMES.values()
        for causal in (False, True)
    ]
    features = [
        forward16_config(head_dim, head_dim, "bf16", **{"window": True, feature: True})
        for head_dim in (64, 128, 256)
        for feature in ("window", "softcap", "alibi", "sinks")
    ]
    others = [
        forward16_config(192, 128, "bf16", causal=True),
        forward16_config(40, 72, "fp16"),
        forward16_config(128, 128, "bf16", causal=True, group=8, seqlen_q=1),
        forward16_config(64, 64, "bf16", causal=True, seqlen_q=SHORT_QUERIES),
    ]
    varlen = [
        forward16_config(64, 64, "bf16", causal=True, varlen=True),
        forward16_config(128, 128, "bf16", causal=True, varlen=True),
        forward16_config(256, 256, "bf16", varlen=True),
        forward16_config(128, 128, "bf16", causal=True, group=8, seqlen_q=1, varlen=True),
        forward16_config(256, 256, "bf16", window=True, softcap=True, alibi=True, sinks=True, varlen=True),
    ]
    return list(dict.fromkeys([*common, *features, *others, *varlen]))


def tile16_table() -> list[dict[str, object]]:
    """Tiles by head_dim (of Q, K and V alike) and mask, one flat dict each, for printing and for tests."""
    rows: list[dict[str, object]] = []
    for head_dim, causal in itertools.product(HEAD_DIMS_16BIT, (False, True)):
        config = forward16_config(head_dim, head_dim, "bf16", causal=causal)
        rows.append(
            {
                "head_dim": head_dim,
                "causal": causal,
                "tile_m": config.tile_m,
                "tile_n": config.tile_n,
                "kv_stages": config.kv_stages,
                "q_stages": config.q_stages,
                "o_in_q": config.o_in_q,
                "smem_bytes": config.smem_bytes,
            }
        )
    return rows


def all_backward16_configs() -> list[Bwd16Config]:
    """A sample of the 16-bit backward, as `all_forward16_configs`."""
    common = [
        backward16_config(head_dim, head_dim, dtype, causal=causal)
        for head_dim in (64, 128, 256)
        for dtype, causal in (("bf16", False), ("bf16", True), ("fp16", True))
    ]
    features = [
        backward16_config(head_dim, head_dim, "bf16", **{feature: True})
        for head_dim in (64, 128, 256)
        for feature in ("window", "softcap", "alibi", "deterministic")
    ]
    every = {"window": True, "softcap": True, "alibi": True, "deterministic": True}
    others = [backward16_config(head_dim, head_dim, "fp16", **every) for head_dim in (64, 128, 256)]
    others += [backward16_config(192, 128, "bf16", causal=True), backward16_config(40, 72, "bf16")]
    return list(dict.fromkeys([*common, *features, *others]))
