"""Problem -> Plan: which backend, which kernel, which tiles, and why.

Planning is a pure function of plain data: it asks no GPU, so that the whole table can be printed, tested and
precompiled anywhere. `cute_attn.explain` shows a plan to users. tiles.py has the tile table, plan16.py the 16-bit
kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cute_attn.kernels.config import SMEM_LIMIT, Fwd16Config, Fwd16Sm80Config, FwdConfig, QuantizeConfig
from cute_attn.problem import ARCHS, Features, Problem, dotted
from cute_attn.quantize import Fp8Recipe
from cute_attn.tiles import DTYPE_NAMES, find_tile, forward_config, quantize_config, rounding_of
from cute_attn.validate import check_backend

WARPGROUP_ROWS: Final = 64  # query rows of a consumer warpgroup; packed, it holds whole packs of heads

BREAK_EVEN_KEYS: Final = 2048
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


def choose_pack_gqa(group: int, seqlen_q: int, tile_m: int, varlen: bool = False) -> tuple[int, str | None]:
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


def choose_cluster(size: int, blocks: int, enough: int) -> tuple[int, str | None]:
    """(`cluster` of the kernel, the reason where there is one to give), for `blocks` tiles of a head or pack.

    `size` is that of the row of the tile table, `enough` the number of tiles from which it pays.
    """
    if size == 1 or blocks < enough or blocks % 2 * 8 > blocks:
        return 1, None
    return size, "two CTAs of neighbouring tiles each load half of the keys and values, for both"


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


def work_tiles(
    config: FwdConfig | Fwd16Config | Fwd16Sm80Config, batch: int, seqlen_q: int, heads_q: int, heads_k: int
) -> int:
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
    chosen, why_backend = choose_backend(problem.capability, backend)
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
    rounding = rounding_of(recipe, features.adjusts)
    key = (problem.head_dim, problem.head_dim_v, recipe.qk_dtype, causal, rounding)
    tile = find_tile(*key, problem.seqlen_k, window)
    reasons.append(f"tile {tile.tile_m} x {tile.tile_n}: {tile.why}")
    if window:
        reasons.append(f"tiles of keys outside the window {problem.ends} are not visited")
    if rounding == "half":
        reasons.append("codes of Q and K are small enough for Q K^T to be summed in float16")
    if features.adjusts:
        reasons.append("softcap and ALiBi change scores one by one, before P is made of them")
    group = problem.heads_q // problem.heads_k
    pack_gqa, why_pack = choose_pack_gqa(group, problem.seqlen_q, tile.tile_m)
    if why_pack is not None:
        reasons.append(why_pack)
    cluster = 1
    if not window:  # whose tiles do not read the same keys
        blocks = -(-problem.seqlen_q * pack_gqa // tile.tile_m)
        cluster, why_cluster = choose_cluster(tile.cluster, blocks, _CAUSAL_CLUSTER_BLOCKS if causal else 2)
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


def choose_backend(capability: tuple[int, int] | None, backend: str) -> tuple[str, str]:
    """(backend that runs, the reason), for a `backend` that `check_backend` accepted."""
    if backend != "auto":
        return backend, f"backend {backend!r} was asked for"
    if capability is None:
        return (
            "emulator",
            "the tensors are not on an NVIDIA GPU, and the kernels need one of Hopper's (H100, H200)",
        )
    where = f"compute capability {dotted(capability)}"
    if capability[0] != 9:
        also = "; flash_attn_func has a 16-bit kernel for it" if capability in ARCHS else ""
        return "emulator", f"the GPU has {where}, and the kernels need 9.x (Hopper: H100, H200){also}"
    return "sm90", f"the GPU has {where} (Hopper)"
