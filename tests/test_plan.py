"""Planning: the tile table and its budgets, purity, and the texts of `explain`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_attn import plan, plan16, tiles
from cute_attn.kernels.config import HEAD_DIMS, REGISTERS_PER_SM, SMEM_LIMIT, FwdConfig
from cute_attn.plan import Plan, make_plan
from cute_attn.problem import Problem, device_capability
from cute_attn.quantize import PRESETS, Fp8Recipe

HOPPER = (9, 0)


def problem(**changed: Any) -> Problem:
    """A problem on a Hopper GPU that is not there."""
    fields: dict[str, Any] = {
        "batch": 2,
        "seqlen_q": 1000,
        "seqlen_k": 3000,
        "heads_q": 8,
        "heads_k": 2,
        "head_dim": 128,
        "head_dim_v": 128,
        "in_dtype": torch.bfloat16,
        "out_dtype": torch.bfloat16,
        "causal": False,
        "recipe": PRESETS["default"],
        "capability": HOPPER,
    }
    return Problem(**{**fields, **changed})


# (qk_dtype, causal, p_rounding) that kernels exist for, with every pair of head_dim and head_dim_v
KEYS = [
    (qk_dtype, causal, p_rounding)
    for qk_dtype, causal, p_rounding in itertools.product(
        ("e4m3", "int8"), (False, True), ("half", "code", "ex2", "cast")
    )
    if qk_dtype == "e4m3" or p_rounding not in ("half", "cast")
]
PAIRS = list(itertools.product(HEAD_DIMS, repeat=2))

RECIPES = st.builds(
    Fp8Recipe,
    qk_dtype=st.sampled_from(["e4m3", "int8"]),
    q_scale=st.sampled_from(["tensor", "head", "block", "token"]),
    k_scale=st.sampled_from(["tensor", "head", "block"]),
    k_block=st.sampled_from([64, 128]),
    v_scale=st.sampled_from(["tensor", "head", "block"]),
    rotation=st.sampled_from(["none", "hadamard"]),
    smooth_k=st.booleans(),
    p_rounding=st.sampled_from(["code", "ex2"]),
) | st.sampled_from([PRESETS[name] for name in PRESETS])
PROBLEMS = st.builds(
    Problem,
    batch=st.integers(0, 70_000),
    seqlen_q=st.integers(0, 600_000),
    seqlen_k=st.integers(0, 600_000),
    heads_q=st.integers(1, 80_000) | st.sampled_from([2, 4, 8, 16, 32, 64]),
    heads_k=st.just(1),
    head_dim=st.sampled_from(HEAD_DIMS),
    head_dim_v=st.sampled_from(HEAD_DIMS),
    in_dtype=st.sampled_from([torch.float16, torch.bfloat16, None]),
    out_dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    causal=st.booleans(),
    recipe=RECIPES,
    capability=st.sampled_from([None, (7, 5), (8, 9), HOPPER, (10, 0)]),
    rotary=st.sampled_from(["none", "half", "interleaved"]),
)


def test_print_the_tile_table() -> None:
    """Run with -s to see it."""
    rows = tiles.tile_table([(192, 128), *((d, d) for d in HEAD_DIMS)])
    columns = [name for name in rows[0] if name != "why"]
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in columns}
    print()
    print("  ".join(name.rjust(widths[name]) for name in columns), " why")
    for row in rows:
        print("  ".join(str(row[name]).rjust(widths[name]) for name in columns), "", row["why"])
    names = ("head_dim", "head_dim_v", "qk_dtype", "causal", "p_rounding", "seqlen_k")
    assert len(rows) == len({tuple(row[name] for name in names) for row in rows})
    assert sum(row["seqlen_k"] == math.inf for row in rows) == 16 * len(KEYS)
    short = {(row["head_dim"], row["head_dim_v"]) for row in rows if row["seqlen_k"] == tiles.SHORT_KEYS}
    assert short == {(d, d) for d in HEAD_DIMS if d <= 128}
    long = {
        (row["head_dim"], row["p_rounding"], row["causal"])
        for row in rows
        if row["seqlen_k"] == tiles.LONG_KEYS
    }
    assert long == {(d, "half", True) for d in HEAD_DIMS if d <= 64}


def test_every_pair_of_head_dims_has_a_kernel_that_can_be_built() -> None:
    """The first row that is wide enough serves, and no row is in vain."""
    used: dict[tiles.Tile, int] = {}
    lengths = (1, 1024, 1025, 4096, math.inf)
    for (head_dim, head_dim_v), key, window, seqlen_k in itertools.product(
        PAIRS, KEYS, (False, True), lengths
    ):
        if window and key[1]:
            continue  # a window is not causal
        config = tiles.forward_config(head_dim, head_dim_v, *key, "bf16", seqlen_k=seqlen_k, window=window)
        config.check()
        assert sum(config.pv_parts) == head_dim_v
        tile = tiles.find_tile(head_dim, head_dim_v, *key, seqlen_k, window)
        used[tile] = used.get(tile, 0) + 1
        wide_enough = [
            other
            for other in tiles.TILES
            if other.head_dim >= head_dim
            and other.head_dim_v >= head_dim_v
            and other.serves(other.head_dim, other.head_dim_v, *key, seqlen_k, window)
        ]
        assert tile == wide_enough[0]
        # Rows of one key are ordered by what they cost, that for short sequences apart: no later one would have
        # been smaller.
        assert tile.seqlen_k < math.inf or all(
            tile.head_dim * tile.head_dim_v <= other.head_dim * other.head_dim_v for other in wide_enough
        )
    assert set(used) == set(tiles.TILES)


@pytest.mark.parametrize(
    ("head_dims", "tile"),
    [
        ((32, 32), (192, 128, 4, [32])),
        ((64, 64), (192, 128, 4, [64])),
        ((64, 80), (128, 256, 2, [80])),
        ((80, 64), (128, 256, 2, [64])),
        ((128, 128), (128, 256, 2, [128])),
        ((192, 128), (128, 256, 2, [128])),  # prefill of multi-head latent attention
        ((192, 144), (128, 128, 2, [16, 64, 64])),
        ((208, 128), (128, 128, 2, [64, 64])),
        ((64, 256), (128, 128, 2, [64] * 4)),
        ((256, 256), (128, 128, 2, [64] * 4)),
    ],
)
def test_classes_of_head_dims(head_dims: tuple[int, int], tile: tuple[int, int, int, list[int]]) -> None:
    config = tiles.forward_config(*head_dims, "int8", False, "code", "bf16")
    assert (config.tile_m, config.tile_n, config.kv_stages, sorted(config.pv_parts)) == tile


def test_int8_has_no_cast_without_lift() -> None:
    for (head_dim, head_dim_v), causal in itertools.product(PAIRS, (False, True)):
        tiles.forward_config(head_dim, head_dim_v, "e4m3", causal, "cast", "bf16").check()
        with pytest.raises(KeyError):
            tiles.forward_config(head_dim, head_dim_v, "int8", causal, "cast", "bf16")


@pytest.mark.parametrize("head_dims", [(16, 64), (64, 16), (100, 128), (128, 100), (272, 64), (64, 512)])
def test_other_head_dims_have_no_kernel(head_dims: tuple[int, int]) -> None:
    with pytest.raises(KeyError):
        tiles.forward_config(*head_dims, "int8", False, "code", "bf16")


def test_every_choice_of_a_row_reaches_the_kernel() -> None:
    chosen = {field.name for field in dataclasses.fields(tiles.Tile)} & {
        field.name for field in dataclasses.fields(FwdConfig)
    }
    chosen -= {"head_dim", "head_dim_v", "cluster"}  # the largest that the row serves, not a choice
    keys = {"head_dim", "head_dim_v", "qk_dtype", "causal", "p_rounding", "out_dtype", "pack_gqa", "cluster"}
    features = {"window", "softcap", "alibi", "sinks", "varlen"}
    assert chosen | keys | features == {field.name for field in dataclasses.fields(FwdConfig)}
    for pair, key in itertools.product(PAIRS, KEYS):
        tile = tiles.find_tile(*pair, *key)
        config = tiles.forward_config(*pair, *key, "fp16", pack_gqa=4, cluster=2)
        assert {name: getattr(config, name) for name in chosen} == {
            name: getattr(tile, name) for name in chosen
        }
        assert (config.head_dim, config.head_dim_v) == pair
        assert (config.qk_dtype, config.causal, config.p_rounding) == key
        assert (config.out_dtype, config.pack_gqa, config.cluster) == ("fp16", 4, 2)


@pytest.mark.parametrize("config", tiles.all_forward_configs(), ids=lambda config: config.name)
def test_forward_configs_keep_the_budgets(config: FwdConfig) -> None:
    config.check()
    assert config.smem_bytes <= SMEM_LIMIT == 232_448
    # What the warpgroups want is there among what they start with; else the last of them would wait for ever.
    assert config.launch_regs == {384: 168, 512: 128}[config.threads]
    wanted = config.consumer_regs * config.consumer_warpgroups + config.producer_regs
    assert wanted == config.launch_regs * (config.consumer_warpgroups + 1)
    # setmaxnreg takes multiples of 8 up to 255; the kernel starts with an equal share for every thread.
    assert config.consumer_regs % 8 == config.producer_regs % 8 == 0
    assert config.producer_regs <= REGISTERS_PER_SM // config.threads <= config.consumer_regs <= 255
    assert config.tile_n % 64 == 0  # whole K scale groups
    assert 256 % config.tile_n == 0  # one V scale for each tile


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 100}, "head_dim must be a multiple of 16 from 32 to 256, got 100"),
        ({"head_dim_v": 16}, "head_dim_v must be a multiple of 16 from 32 to 256, got 16"),
        ({"tile_m": 320}, "tile_m must be 64, 128, 192 or 256, got 320"),
        ({"tile_n": 96}, "tile_n must be a multiple of 64 that divides 256, got 96"),
        ({"pv_part": 40}, "pv_part must be a multiple of 16, got 40"),
        ({"pack_gqa": 3}, "pack_gqa must divide the 64 rows of a warpgroup, got 3"),
        ({"qk_splits": 3}, "qk_splits must leave a multiple of 64 keys, got 3"),
        ({"qk_splits": 8}, "qk_splits must leave a multiple of 64 keys, got 8"),
        ({"qk_splits": 2, "p_rounding": "ex2"}, "qk_splits must be 1 with 'ex2'"),
        ({"kv_stages": 4}, "shared memory [0-9]+ bytes exceeds 232448"),
        (
            {"consumer_regs": 248},
            "of 248 registers and a producer of 24 want 520, more than the 504 registers",
        ),
        (
            {"producer_regs": 32},
            "of 240 registers and a producer of 32 want 512, more than the 504 registers",
        ),
    ],
)
def test_configs_that_cannot_be_built_are_refused(changed: dict[str, Any], message: str) -> None:
    good = FwdConfig(128, 128, 128, 256, 2, "e4m3", "code", False, "bf16")
    good.check()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **changed).check()


def test_rows_say_why() -> None:
    for tile in tiles.TILES:
        assert len(tile.why) > 40, tile
        assert not tile.why.endswith("."), "it becomes part of a list"


def test_configs_are_distinct_and_valid() -> None:
    forward, quantise = tiles.all_forward_configs(), tiles.all_quantize_configs()
    for config in (*forward, *quantise):
        config.check()
    names = [config.name for config in (*forward, *quantise)]
    assert len(set(names)) == len(names)
    # naive, paper, fp8; the default from both dtypes, for other head dims and 192/128, with rotary; V transposed
    assert len(quantise) == 3 * 3 + 3 * 2 + 6 + 1 + 4 + 7
    assert {(c.qk_dtype, c.in_dtype) for c in quantise if not c.name.startswith("transpose")} == {
        *itertools.product(("e4m3", "int8"), ("bf16", "fp16"))
    }
    assert {c.rotary for c in quantise} == {"none", "half", "interleaved"}


def test_checked_kernels_are_a_sample_of_all() -> None:
    """Each head_dim by itself; each tile row, mask, operand type, rounding; packing in each class."""
    forward = tiles.all_forward_configs()
    assert 70 <= len(forward) <= 90, "a test run compiles them all"
    assert {config.head_dim for config in forward if config.head_dim == config.head_dim_v} == set(HEAD_DIMS)
    alike = [c for c in forward if c.head_dim_v == c.head_dim and c.head_dim in tiles.TUNED_HEAD_DIMS]
    served = {(c.head_dim, c.qk_dtype, c.causal, c.p_rounding) for c in alike}
    tuned = {(d, *key) for d in tiles.TUNED_HEAD_DIMS for key in KEYS}
    assert {key for key in tuned if key[3] != "ex2"} <= served
    assert {(d, qk, p) for d, qk, _, p in tuned} == {(d, qk, p) for d, qk, _, p in served}
    assert {(qk, causal) for _, qk, causal, p in served if p == "ex2"} == {
        (qk, causal) for _, qk, causal, _ in tuned
    }
    assert {c.head_dim for c in alike if c.out_dtype == "fp16"} == set(tiles.TUNED_HEAD_DIMS)
    for low, high in ((16, 64), (64, 128), (128, 192), (192, 256)):  # classes of widths
        within = [c for c in forward if low < max(c.head_dim, c.head_dim_v) <= high]
        assert {(c.qk_dtype, c.causal) for c in within} == {(qk, causal) for _, qk, causal, _ in tuned}
    assert {(c.qk_dtype, c.causal) for c in forward if (c.head_dim, c.head_dim_v) == (192, 128)} == {
        (qk_dtype, causal) for qk_dtype, causal, _ in KEYS
    }
    packed = [config for config in forward if config.pack_gqa > 1]
    assert {config.pack_gqa for config in packed} == {2, 8, 64}
    assert {(config.tile_m, config.tile_n) for config in packed} == {
        *((192, 256), (192, 128), (128, 256), (128, 128))
    }
    assert {config.causal for config in packed} == {False, True}
    assert {config.qk_dtype for config in packed} == {"e4m3", "int8"}


@given(PROBLEMS, st.sampled_from(["auto", "emulator"]))
def test_plans_name_kernels_that_can_be_built(case: Problem, backend: str) -> None:
    made = make_plan(case, backend)
    made.config.check()
    assert made.backend == ("sm90" if backend == "auto" and case.capability == HOPPER else "emulator")
    assert made.kernel == (made.config.name if made.backend == "sm90" else f"emulator({made.config.name})")
    assert made.config.qk_dtype == case.recipe.qk_dtype
    adjusts = case.features.softcap > 0 or case.features.alibi
    assert made.config.p_rounding == tiles.rounding_of(case.recipe, adjusts)
    assert (made.config.head_dim, made.config.head_dim_v) == (case.head_dim, case.head_dim_v)
    assert case.heads_q // case.heads_k % made.config.pack_gqa == 0
    assert made.smem_bytes == made.config.smem_bytes
    assert (made.quantize_config is None) == (case.in_dtype is None)
    if made.quantize_config is not None:
        made.quantize_config.check()
        sizes = (made.quantize_config.head_dim, made.quantize_config.head_dim_v)
        assert sizes == (case.head_dim, case.head_dim_v)
        assert made.quantize_config.rotate == (case.recipe.rotation == "hadamard")
        assert made.quantize_config.smooth == case.recipe.smooth_k
        assert made.quantize_config.qk_dtype == case.recipe.qk_dtype
        assert made.quantize_config.rotary == case.rotary


@given(PROBLEMS)
def test_work_tiles_cover_every_row(case: Problem) -> None:
    """Packed, the rows of a key head are those of all its query heads."""
    made = make_plan(case, "emulator")
    if case.is_empty:
        assert made.work_tiles == 0
        return
    pack = made.config.pack_gqa
    heads = case.batch * case.heads_q // pack
    assert made.work_tiles % heads == 0
    tiles = made.work_tiles // heads
    assert (tiles - 1) * made.config.tile_m < case.seqlen_q * pack <= tiles * made.config.tile_m


@given(
    st.integers(1, 200),
    st.integers(0, 5000),
    st.sampled_from([64, 128, 192]),
    st.sampled_from([64, 128, 256]),
)
def test_rows_are_packed_where_that_saves_more_than_a_tenth_of_the_tiles(
    group: int, seqlen_q: int, tile_m: int, head_dim: int
) -> None:
    """One rule for both precisions: as many heads as a power of two divides them by."""
    heads = math.gcd(group, 64)
    alone = -(-seqlen_q // tile_m) * group
    packed = -(-seqlen_q * heads // tile_m) * (group // heads)
    pays = 10 * packed < 9 * alone
    found, why = plan.choose_pack_gqa(group, seqlen_q, tile_m)
    assert found == (heads if pays else 1)
    assert why is None or f"{group} query heads share a key head" in why
    assert (why is None) == (not pays) or group % 2  # an odd number is told why not
    eight = make_plan(problem(seqlen_q=seqlen_q, heads_q=group, heads_k=1, head_dim=head_dim), "auto").config
    sixteen = plan16.forward16_config(head_dim, head_dim, "bf16", group=group, seqlen_q=seqlen_q)
    for config in (eight, sixteen):
        assert config.pack_gqa == plan.choose_pack_gqa(group, seqlen_q, config.tile_m)[0]


@pytest.mark.parametrize(
    ("seqlen_q", "heads", "pack", "tiles"),
    [
        (1, (8, 1), 8, 1),
        (1, (64, 1), 64, 1),
        (1, (8, 8), 1, 8),
        (1, (16, 2), 8, 2),
        (3, (64, 1), 64, 2),  # 192 rows
        (60, (4, 1), 4, 2),  # 240 rows
        (100, (4, 1), 1, 4),  # 400 rows take four tiles, too
        (128, (4, 1), 1, 4),
        (129, (4, 1), 4, 5),
        (1500, (2, 1), 1, 24),  # and 24 tiles packed
        (1160, (4, 1), 1, 40),  # 37 tiles packed: less than a tenth saved
        (513, (2, 1), 1, 10),  # 9 tiles packed: a tenth, no more
        (1, (3, 1), 1, 3),  # 3 does not divide 64
        (1, (6, 1), 2, 3),
        (1, (12, 1), 4, 3),
        (1, (128, 1), 64, 2),
    ],
)
def test_packing_of_query_heads(seqlen_q: int, heads: tuple[int, int], pack: int, tiles: int) -> None:
    heads_q, heads_k = heads
    made = make_plan(
        problem(batch=5, seqlen_q=seqlen_q, heads_q=heads_q, heads_k=heads_k, causal=True), "auto"
    )
    assert made.config.tile_m == 128
    assert (made.config.pack_gqa, made.work_tiles) == (pack, 5 * tiles)
    assert (f"_g{pack}" in made.kernel) == (pack > 1)
    assert ("an odd number does not divide the 64 rows of a warpgroup" in text_of(made)) == (heads_q == 3)
    assert (f"rows of {pack} query heads packed" in text_of(made)) == (pack > 1)


@given(PROBLEMS, st.sampled_from(["auto", "emulator"]))
def test_planning_is_pure(case: Problem, backend: str) -> None:
    again = dataclasses.replace(case)
    assert again == case and hash(again) == hash(case)
    uncached = make_plan.__wrapped__
    assert uncached(case, backend) == uncached(again, backend) == make_plan(case, backend)


def test_planning_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("planning asked for the device")

    for name in ("get_device_capability", "is_available", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, fail)
    uncached = make_plan.__wrapped__
    assert uncached(problem(), "auto").backend == "sm90"
    assert uncached(problem(), "sm90").backend == "sm90"


def test_emulator_has_the_tiles_of_the_kernel() -> None:
    """Else their results could differ: rounding depends on the order of tiles."""
    for (head_dim, head_dim_v), recipe in itertools.product(PAIRS, PRESETS.values()):
        case = problem(head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=1, recipe=recipe)
        on_cpu = dataclasses.replace(case, capability=None)
        assert make_plan(case, "auto").config == make_plan(on_cpu, "auto").config


def test_quantiser_modes_follow_the_recipe() -> None:
    def modes(**fields: Any) -> tuple[str, str, str]:
        config = tiles.quantize_config(Fp8Recipe(**fields), 64, 64, "fp16")
        return config.q_mode, config.k_mode, config.v_mode

    assert modes() == ("token", "block64", "block")
    assert modes(q_scale="block", k_block=128) == ("block", "block128", "block")
    assert modes(q_scale="tensor", k_scale="head", v_scale="head") == ("static", "static", "static")


def test_one_query_needs_no_causal_kernel() -> None:
    made = make_plan(problem(causal=True, seqlen_q=1), "auto")
    assert not made.config.causal and made.problem.causal
    assert any("one query row sees every key" in reason for reason in made.reasons)
    assert make_plan(problem(causal=True, seqlen_q=2), "auto").config.causal


@pytest.mark.parametrize(
    ("capability", "backend", "chosen", "why"),
    [
        (HOPPER, "auto", "sm90", "the GPU has compute capability 9.0 (Hopper)"),
        (HOPPER, "sm90", "sm90", "backend 'sm90' was asked for"),
        (HOPPER, "emulator", "emulator", "backend 'emulator' was asked for"),
        ((8, 9), "auto", "emulator", "the GPU has compute capability 8.9, and the kernels need 9.x"),
        ((10, 0), "auto", "emulator", "the GPU has compute capability 10.0, and the kernels need 9.x"),
        (None, "auto", "emulator", "the tensors are not on an NVIDIA GPU"),
    ],
)
def test_backend_and_its_reason(
    capability: tuple[int, int] | None, backend: str, chosen: str, why: str
) -> None:
    made = make_plan(problem(capability=capability), backend)
    assert made.backend == chosen
    assert why in made.reasons[0]


@pytest.mark.parametrize(
    ("capability", "backend", "message"),
    [
        (
            HOPPER,
            "sm80",
            "'sm80', which has 16-bit kernels alone, of flash_attn_func; allowed: 'auto', 'sm90'",
        ),
        (None, "sm90", "backend is 'sm90' but q is on a device that is no NVIDIA GPU"),
        ((8, 0), "sm90", "backend is 'sm90' but q is on a GPU of compute capability 8.0"),
    ],
)
def test_impossible_backends(capability: tuple[int, int] | None, backend: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_plan(problem(capability=capability), backend)
    assert message in str(caught.value)


def text_of(made: Plan) -> str:
    return " ".join(str(made).split())


def test_text_on_hopper() -> None:
    made = make_plan(problem(causal=True), "auto")
    text = text_of(made)
    for part in (
        "backend sm90",
        f"kernel {made.config.name}",
        f"quantiser {made.quantize_config.name if made.quantize_config else None}",
        "batch 2, seqlen_q 1000, seqlen_k 3000, heads_q 8, heads_k 2, head_dim 128, causal",
        "output torch.bfloat16",
        "accurate: Q K^T in int8, P V in e4m3; scales Q token, K block of 64, V block; rotation hadamard",
        f"{made.config.tile_m} queries x {made.config.tile_n} keys",
        f"{made.smem_bytes} of 232448 bytes",
        f"work tiles {-(-1000 // made.config.tile_m) * 8 * 2}",
        *made.reasons,
    ):
        assert part in text
    assert "emulat" not in text


def test_text_names_a_head_dim_of_its_own_for_v() -> None:
    made = make_plan(problem(head_dim=192), "auto")
    assert "head_dim 192, head_dim_v 128, full" in text_of(made)
    assert made.kernel.startswith("fwd_sm90_int8_d192v128_full_code_bf16")


def test_text_of_the_emulator_says_so() -> None:
    text = text_of(make_plan(problem(capability=None, recipe=PRESETS["naive"]), "auto"))
    for part in (
        "backend emulator",
        f"kernel emulator(fwd_sm90_e4m3_d128_full_{PRESETS['naive'].p_rounding}",
        "quantiser torch reference of quantize_bf16_e4m3_d128_qstatic_kstatic_vstatic",
        "(of the kernel that is emulated)",
        "the tensors are not on an NVIDIA GPU",
        "scales of a whole tensor or head need a pass for the largest magnitude",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"seqlen_k": 0}, "nothing is launched: there are no keys"),
        ({"seqlen_q": 0}, "nothing is launched: there is no output"),
        ({"batch": 0}, "nothing is launched: there is no output"),
    ],
)
def test_text_of_an_empty_problem(changed: dict[str, int], why: str) -> None:
    made = make_plan(problem(**changed), "auto")
    assert made.work_tiles == 0
    assert why in text_of(made)


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"seqlen_q": 1000, "seqlen_k": 1000, "heads_k": 8}, 1000),
        ({"seqlen_q": 4096, "seqlen_k": 4096, "heads_k": 8}, None),
        ({"seqlen_q": 4097, "seqlen_k": 4097, "heads_k": 8, "causal": True}, 2049),
        ({"seqlen_q": 8192, "seqlen_k": 8192, "heads_k": 8, "causal": True}, None),
        ({"seqlen_q": 1, "seqlen_k": 100_000, "heads_k": 8}, 1),  # one query: all keys quantised for nothing
        ({"seqlen_q": 2048, "seqlen_k": 2048, "heads_k": 1}, 4915),  # few key heads: little to quantise
        ({"seqlen_q": 3000, "seqlen_k": 1000, "heads_k": 8, "causal": True}, 300),  # 2000 queries see nothing
        ({"seqlen_q": 1000, "seqlen_k": 1000, "heads_k": 8, "head_dim": 256, "head_dim_v": 64}, 833),
        ({"seqlen_q": 1000, "seqlen_k": 1000, "in_dtype": None}, None),
        ({"seqlen_q": 1000, "seqlen_k": 1000, "capability": None}, None),
    ],
)
def test_short_calls_are_told_what_quantising_costs(changed: dict[str, Any], keys: int | None) -> None:
    made = make_plan(problem(**{"causal": False, **changed}), "auto")
    found = [reason for reason in made.reasons if "a 16-bit kernel is faster" in reason]
    assert found == [] if keys is None or keys >= plan.BREAK_EVEN_KEYS else f"over {keys} keys" in found[0]


def test_work_of_a_call_counted_pair_by_pair() -> None:
    for queries, keys in itertools.product((1, 3, 7), repeat=2):
        case = problem(seqlen_q=queries, seqlen_k=keys, heads_q=4, heads_k=2, causal=True)
        pairs = sum(j <= i + keys - queries for i in range(queries) for j in range(keys))
        assert plan._equivalent_keys(case) == 3 * pairs * 4 // (queries * 4 + 2 * keys * 2)


def test_text_of_ready_operands() -> None:
    assert "quantiser none: operands are already 8-bit" in text_of(make_plan(problem(in_dtype=None), "auto"))


def test_devices_that_are_no_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_capability(torch.device("cpu")) is None
    # ROCm's torch says "cuda" too, and capability (9, 4) for a GPU that is no Hopper.
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert device_capability.__wrapped__(torch.device("cuda", 0)) is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert device_capability.__wrapped__(torch.device("cuda", 0)) == (9, 4)
