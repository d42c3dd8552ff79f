"""Problem -> Plan: which backend, which kernel, which tiles, and why.

Planning is a pure function of plain data: it asks no GPU, so that the whole table can be printed, tested and
precompiled anywhere. `cute_attn.explain` shows a plan to users.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Final

import torch

from cute_attn.kernels.config import (
    HEAD_DIMS_16BIT,
    SMEM_LIMIT,
    WARPGROUP,
    Fwd16Config,
    FwdConfig,
    QuantizeConfig,
)
from cute_attn.problem import Problem
from cute_attn.quantize import PRESETS, Fp8Recipe
from cute_attn.validate import HEAD_DIMS, check_backend

DTYPE_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
P_ROUNDINGS: Final = ("code", "ex2", "cast")
P_ROUNDINGS_OF: Final = {"e4m3": P_ROUNDINGS, "int8": ("code", "ex2")}
"""Roundings of P that kernels exist for, by the operands of Q K^T: "cast" is a baseline, of e4m3 alone."""
QK_DTYPES: Final = tuple(P_ROUNDINGS_OF)


# ------------------------------------------------------------------------------------------------------------
# Tile table
# ------------------------------------------------------------------------------------------------------------


_TileKey = tuple[int, str, bool, str]


@dataclass(frozen=True)
class Tile:
    """One row of the tile table: what it serves, the choices, and the reason for them.

    It serves each combination of `head_dim`, `qk_dtypes`, `causals` and `p_roundings` that kernels exist for
    (see `P_ROUNDINGS_OF`). `tile_m`, `tile_n`, `kv_stages`, `qk_splits`, `pv_splits`, `check_keys`
    and the register counts are those of `FwdConfig`.
    """

    head_dim: int
    why: str
    tile_n: int
    qk_dtypes: tuple[str, ...] = QK_DTYPES
    causals: tuple[bool, ...] = (False, True)
    p_roundings: tuple[str, ...] = P_ROUNDINGS
    tile_m: int = 128
    kv_stages: int = 2
    qk_splits: int = 1
    pv_splits: int = 1
    check_keys: int = 64
    consumer_regs: int = 240
    producer_regs: int = 24

    @property
    def keys(self) -> list[_TileKey]:
        """What the row serves, as (head_dim, qk_dtype, causal, p_rounding)."""
        return [
            (self.head_dim, qk_dtype, causal, p_rounding)
            for qk_dtype, causal, p_rounding in itertools.product(
                self.qk_dtypes, self.causals, self.p_roundings
            )
            if p_rounding in P_ROUNDINGS_OF[qk_dtype]
        ]


_D64_FULL: Final = (
    "at head_dim 64 the chain of product, softmax and product is long against the tensor core's work in it: a "
    "third consumer warpgroup fills the gaps, and 128 keys a step keep the scores within the 160 registers "
    "that three leave to a thread"
)
_D64_CAUSAL: Final = (
    "a block of rows also computes keys that its diagonal tiles hide: blocks of 192 rows waste more there "
    "than their third consumer warpgroup gains"
)
_D128: Final = (
    "256 keys a step halve what a key pays for waits, folds of P V into O and checks for overflow; the scores "
    "share registers with the fresh accumulator of P V"
)
_D256: Final = "O takes 128 registers a thread, so P V is accumulated one part of head_dim after the other"
_HALVES: Final = "Q K^T comes in halves, softmax of one under the product of the other"
_WHOLE: Final = "exp2 wants the maximum over the tile, so Q K^T comes in one piece"
_EX2: Final = ("ex2", "cast")

TILES: Final = (
    Tile(
        head_dim=64,
        causals=(False,),
        p_roundings=("code",),
        tile_m=192,
        tile_n=128,
        kv_stages=4,
        qk_splits=2,
        consumer_regs=160,
        producer_regs=32,
        why=f"{_D64_FULL}; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        causals=(False,),
        p_roundings=_EX2,
        tile_m=192,
        tile_n=128,
        kv_stages=4,
        consumer_regs=160,
        producer_regs=32,
        why=f"{_D64_FULL}; {_WHOLE}",
    ),
    Tile(
        head_dim=64,
        causals=(True,),
        p_roundings=("code",),
        tile_n=256,
        qk_splits=2,
        why=f"{_D64_CAUSAL}; O is small enough for 256 keys a step, which halve the waits; {_HALVES}",
    ),
    Tile(
        head_dim=64,
        qk_dtypes=("e4m3",),
        causals=(True,),
        p_roundings=_EX2,
        tile_n=256,
        why=f"{_D64_CAUSAL}; O is small enough for 256 keys a step, which halve the waits; {_WHOLE}",
    ),
    Tile(
        head_dim=64,
        qk_dtypes=("int8",),
        causals=(True,),
        p_roundings=_EX2,
        tile_n=128,
        kv_stages=4,
        why=f"{_D64_CAUSAL}; exp2 of int8 scores would spill registers at 256 keys a step, so it takes 128; "
        f"{_WHOLE}",
    ),
    Tile(
        head_dim=128,
        p_roundings=("code",),
        tile_n=256,
        qk_splits=2,
        why=f"{_D128}; {_HALVES}",
    ),
    Tile(
        head_dim=128,
        p_roundings=_EX2,
        tile_n=256,
        why=f"{_D128}; {_WHOLE}",
    ),
    Tile(
        head_dim=256,
        p_roundings=("code",),
        tile_n=128,
        qk_splits=2,
        pv_splits=4,
        why=f"{_D256}, in quarters, each folded under the product of the next; {_HALVES}",
    ),
    Tile(
        head_dim=256,
        p_roundings=_EX2,
        tile_n=128,
        pv_splits=2,
        why=f"{_D256}, in halves; {_WHOLE}",
    ),
)
"""Every (head_dim, qk_dtype, causal, p_rounding) that kernels exist for is served by exactly one row.

The sizes are those of the fastest variants with P by code on an H200 (scripts/tune.py); the other roundings,
which are there for comparison, take the same where it compiles without spills.
"""

_TILE_OF: Final[dict[_TileKey, Tile]] = {key: tile for tile in TILES for key in tile.keys}


def forward_config(head_dim: int, qk_dtype: str, causal: bool, p_rounding: str, out_dtype: str) -> FwdConfig:
    """The forward kernel for these properties of a problem; `out_dtype` is "bf16" or "fp16".

    Raises KeyError where no such kernel exists, which no recipe asks for (see `P_ROUNDINGS_OF`).
    """
    tile = _TILE_OF[head_dim, qk_dtype, causal, p_rounding]
    return FwdConfig(
        head_dim=head_dim,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        kv_stages=tile.kv_stages,
        qk_dtype=qk_dtype,
        p_rounding=p_rounding,
        causal=causal,
        out_dtype=out_dtype,
        consumer_regs=tile.consumer_regs,
        producer_regs=tile.producer_regs,
        check_keys=tile.check_keys,
        qk_splits=tile.qk_splits,
        pv_splits=tile.pv_splits,
    )


def quantize_config(recipe: Fp8Recipe, head_dim: int, in_dtype: str) -> QuantizeConfig:
    """The quantiser for a recipe; `in_dtype` is "bf16" or "fp16".

    Scales of a tensor or a head need the largest magnitude before the kernel runs: to it both are "static".
    """
    return QuantizeConfig(
        head_dim=head_dim,
        in_dtype=in_dtype,
        qk_dtype=recipe.qk_dtype,
        q_mode=recipe.q_scale if recipe.q_scale in ("token", "block") else "static",
        k_mode=f"block{recipe.k_block}" if recipe.k_scale == "block" else "static",
        v_mode="block" if recipe.v_scale == "block" else "static",
        rotate=recipe.rotation == "hadamard",
        smooth=recipe.smooth_k,
    )


def transpose_config(head_dim: int) -> QuantizeConfig:
    """The quantiser that only transposes a ready e4m3 V; its other fields carry no choice."""
    return QuantizeConfig(
        head_dim=head_dim,
        in_dtype="e4m3",
        qk_dtype="e4m3",
        q_mode="static",
        k_mode="static",
        v_mode="static",
        rotate=False,
        smooth=False,
    )


def all_forward_configs() -> list[FwdConfig]:
    """Every forward kernel that a plan can name."""
    return [
        forward_config(head_dim, qk_dtype, causal, p_rounding, out_dtype)
        for head_dim, qk_dtype, causal, p_rounding in _TILE_OF
        for out_dtype in DTYPE_NAMES.values()
    ]


def all_quantize_configs() -> list[QuantizeConfig]:
    """The quantisers of the named recipes and of ready e4m3 tensors, without duplicates.

    A recipe of one's own may need another one; it is compiled on first use like these.
    """
    configs = [
        quantize_config(recipe, head_dim, in_dtype)
        for recipe in PRESETS.values()
        for head_dim in HEAD_DIMS
        for in_dtype in DTYPE_NAMES.values()
    ]
    configs += [transpose_config(head_dim) for head_dim in HEAD_DIMS]
    return list(dict.fromkeys(configs))


def tile_table() -> list[dict[str, object]]:
    """The tile table, one flat dict for each key, with what it costs: for printing and for tests."""
    rows: list[dict[str, object]] = []
    for (head_dim, qk_dtype, causal, p_rounding), tile in _TILE_OF.items():
        config = forward_config(head_dim, qk_dtype, causal, p_rounding, "bf16")
        rows.append(
            {
                "head_dim": head_dim,
                "qk_dtype": qk_dtype,
                "causal": causal,
                "p_rounding": p_rounding,
                "tile_m": config.tile_m,
                "tile_n": config.tile_n,
                "kv_stages": config.kv_stages,
                "qk_splits": config.qk_splits,
                "pv_splits": config.pv_splits,
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


def _equivalent_keys(problem: Problem) -> int:
    """Keys of full self-attention, as many key as query heads, with the same work for each row of Q, K and V."""
    queries, keys = problem.seqlen_q, problem.seqlen_k
    pairs = queries * keys
    if problem.causal:  # the newest keys are hidden from a triangle of queries
        corner = min(queries, keys)
        pairs -= corner * (corner - 1) // 2 + max(queries - keys, 0) * keys
    rows = queries * problem.heads_q + 2 * keys * problem.heads_k
    return 3 * pairs * problem.heads_q // max(rows, 1)


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
        grid: CTAs of the forward kernel; (0, 1, 1) where nothing is launched.
        problem: what was planned for.
    """

    backend: str
    kernel: str
    config: FwdConfig
    quantize_config: QuantizeConfig | None
    recipe: Fp8Recipe
    reasons: tuple[str, ...]
    smem_bytes: int
    grid: tuple[int, int, int]
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
            f"{'causal' if problem.causal else 'full'}, output {problem.out_dtype}",
            "recipe": f"{recipe.name}: Q K^T in {recipe.qk_dtype}, P V in e4m3; scales Q {recipe.q_scale}, "
            f"K {k_scale}, V {recipe.v_scale}; rotation {recipe.rotation}; "
            f"{'' if recipe.smooth_k else 'no '}K smoothing; P by {recipe.p_rounding}",
            "tiles": f"{config.tile_m} queries x {config.tile_n} keys, {config.kv_stages} K/V stages, "
            f"{config.consumer_warpgroups} consumer warpgroups of {config.consumer_regs} registers"
            + f"; Q K^T in {_parts(config.qk_splits)}"
            + f"; P V in {_parts(config.pv_splits)}",
            "smem": f"{self.smem_bytes} of {SMEM_LIMIT} bytes{of_kernel}",
            "grid": f"{self.grid} CTAs of {config.threads} threads{of_kernel}",
        }
        text = [f"{key:<10} {value}" for key, value in lines.items()]
        return "\n".join([*text, "because", *(f"  - {reason}" for reason in self.reasons)])


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

    # One row sees every key under the bottom-right mask: the kernel without a mask does the same work.
    causal = problem.causal and problem.seqlen_q != 1
    if causal != problem.causal:
        reasons.append(
            "one query row sees every key: the causal mask hides nothing, so the kernel without one serves"
        )
    config = forward_config(
        problem.head_dim, recipe.qk_dtype, causal, recipe.p_rounding, DTYPE_NAMES[problem.out_dtype]
    )
    tile = _TILE_OF[problem.head_dim, recipe.qk_dtype, causal, recipe.p_rounding]
    reasons.append(f"tile {config.tile_m} x {config.tile_n}: {tile.why}")

    quantiser = None
    if problem.in_dtype is not None:
        quantiser = quantize_config(recipe, problem.head_dim, DTYPE_NAMES[problem.in_dtype])
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
    grid = (-(-problem.seqlen_q // config.tile_m) * problem.heads_q * problem.batch, 1, 1)
    if problem.is_empty:
        grid = (0, 1, 1)
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
        grid=grid,
        problem=problem,
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
    tile_m: int = 128
    tile_n: int = 128
    consumer_regs: int = 240
    producer_regs: int = 24


_MASKED_16: Final = (
    "a diagonal tile computes keys that it hides, so keys a step are fewer than without a mask"
)

TILES_16: Final = (
    Tile16(
        columns=64,
        tile_m=192,
        consumer_regs=160,
        producer_regs=32,
        why="three consumer warpgroups, for at 64 columns exp2 takes as long as the products; more keys a step do not "
        "fit into the 160 registers that three leave to a thread",
    ),
    Tile16(
        columns=96,
        plain=True,
        tile_n=192,
        why="S, P and O of 192 keys fit into 240 registers; a third warpgroup would leave room for 112",
    ),
    Tile16(columns=96, plain=False, why=_MASKED_16),
    Tile16(columns=128, plain=True, tile_n=176, why="S, P and O of 176 keys are what 240 registers hold"),
    Tile16(columns=128, plain=False, why=_MASKED_16),
    Tile16(columns=192, tile_n=112, why="what two stages of K and V leave room for in shared memory"),
    Tile16(columns=256, tile_n=80, why="what two stages of K and V leave room for in shared memory"),
)
"""Rows in the order of `columns`: the first that serves a problem is taken. Tiles after FlashAttention-3's."""


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
) -> Fwd16Config:
    """The 16-bit forward kernel for these properties of a problem. Pure.

    Args:
        head_dim, head_dim_v: multiples of 8 from 32 to 256.
        dtype: "bf16" or "fp16".
        causal, window, softcap, alibi, sinks: as in `Fwd16Config`; causal and window exclude each other.
        group: query heads of a key head.
        seqlen_q: queries of a sequence; with few of them the rows of a group share tiles.

    Raises:
        ValueError: a head_dim or dtype for which there is no kernel.
    """
    columns = -(-max(head_dim, head_dim_v) // 32) * 32
    plain = not (causal or window or softcap or alibi)
    tile = next((t for t in TILES_16 if columns <= t.columns and t.plain in (None, plain)), TILES_16[-1])
    return _fitted(
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
            consumer_regs=tile.consumer_regs,
            producer_regs=tile.producer_regs,
            pack_gqa=_packed_heads(group, seqlen_q, tile.tile_m),
        )
    )


def _fitted(config: Fwd16Config) -> Fwd16Config:
    """`config` with as many keys a step as shared memory holds."""
    while config.smem_bytes > SMEM_LIMIT or not config.o_fits_q:
        config = dataclasses.replace(config, tile_n=config.tile_n - 16)
    config.check()
    return config


def _packed_heads(group: int, seqlen_q: int, tile_m: int) -> int:
    """Query heads whose rows share a tile: 1 unless that fills tiles clearly better."""
    heads = group & -group  # the largest power of two that divides the group
    while 64 % heads:
        heads //= 2

    def filled(rows: int) -> float:
        return rows / (-(-rows // tile_m) * tile_m)

    return heads if seqlen_q and filled(seqlen_q) < 0.9 * filled(seqlen_q * heads) else 1


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
    ]
    return list(dict.fromkeys([*common, *features, *others]))


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
