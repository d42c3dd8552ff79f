"""Recipes and the torch reference of the quantiser."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_attn.kernels.config import HEAD_DIMS, rotation_block
from cute_attn.quantize import (
    E4M3_MAX,
    INT8_MAX,
    PI,
    PRESETS,
    Fp8Recipe,
    QuantizedQKV,
    Rotary,
    amax_scale,
    check_rotary,
    from_fp8,
    mean_chunks,
    mean_key,
    permute_v,
    quantize_reference,
    resolve_recipe,
    rotation_signs,
    scale_norm,
    static_amax,
    to_e4m3,
    to_int8,
    unpermute_v,
    walsh_hadamard,
)

E4M3 = torch.float8_e4m3fn
NAMED = ["naive", "paper", "fp8", "accurate"]
FINITE_CODES = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)


def inputs(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    head_dim_v: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype)
    k = (torch.randn(batch, seqlen_k, heads_k, head_dim) + torch.randn(head_dim)).to(dtype)
    v = torch.randn(batch, seqlen_k, heads_k, head_dim_v or head_dim).to(dtype)
    return q, k, v


# -- recipes -------------------------------------------------------------------------------------------------


def test_presets_are_the_documented_ones() -> None:
    assert PRESETS["naive"] == Fp8Recipe(
        "naive", "e4m3", "tensor", "tensor", 64, "tensor", "none", 0, smooth_k=False, p_rounding="cast"
    )
    assert PRESETS["paper"] == Fp8Recipe(
        "paper", "e4m3", "block", "block", 128, "block", "hadamard", 0, smooth_k=False, p_rounding="cast"
    )
    assert PRESETS["fp8"] == Fp8Recipe(
        "fp8", "e4m3", "token", "block", 64, "block", "hadamard", 0, smooth_k=True, p_rounding="code"
    )
    assert PRESETS["accurate"] == dataclasses.replace(PRESETS["fp8"], name="accurate", qk_dtype="int8")
    assert PRESETS["default"] is PRESETS["accurate"]
    assert set(PRESETS) == {*NAMED, "default"}


def test_resolve_recipe() -> None:
    custom = Fp8Recipe(k_block=128)
    assert resolve_recipe(custom) is custom
    assert resolve_recipe("default").name == "accurate"
    assert Fp8Recipe.preset("paper") is PRESETS["paper"]
    with pytest.raises(ValueError, match=r"'fast'.*'naive', 'paper', 'fp8', 'accurate', 'default'"):
        resolve_recipe("fast")
    with pytest.raises(TypeError, match=r"int.*Fp8Recipe"):
        resolve_recipe(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("name", "", "non-empty"),
        ("name", 3, "non-empty"),
        ("qk_dtype", "e5m2", "'e4m3', 'int8'"),
        ("q_scale", "row", "'tensor', 'head', 'block', 'token'"),
        ("k_scale", "token", "'tensor', 'head', 'block'"),
        ("k_block", 32, "64, 128"),
        ("k_block", 64.0, "64, 128"),
        ("v_scale", "channel", "'tensor', 'head', 'block'"),
        ("rotation", True, "'none', 'hadamard'"),
        ("rotation_seed", -1, "an int from 0"),
        ("rotation_seed", 2**63, "an int from 0"),
        ("rotation_seed", True, "an int from 0"),
        ("smooth_k", 1, "True, False"),
        ("p_rounding", "rne", "'code', 'ex2', 'cast'"),
    ],
)
def test_bad_recipe_names_field_value_and_choices(field: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"Fp8Recipe.{field} is ") as caught:
        Fp8Recipe(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value) and allowed in str(caught.value)


def test_int8_is_never_cast() -> None:
    """ "cast" is a baseline, and the baselines multiply in e4m3."""
    with pytest.raises(ValueError, match=r"Fp8Recipe.qk_dtype is 'int8' with p_rounding 'cast'; allowed: "):
        Fp8Recipe(p_rounding="cast")
    with pytest.raises(ValueError, match="'int8' with p_rounding 'cast'"):
        dataclasses.replace(PRESETS["naive"], qk_dtype="int8")
    assert Fp8Recipe(qk_dtype="e4m3", p_rounding="cast").p_rounding == "cast"
    assert Fp8Recipe(qk_dtype="int8", p_rounding="ex2").p_rounding == "ex2"


def test_recipe_is_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["fp8"].k_block = 128  # type: ignore[misc]
    assert len({PRESETS[name] for name in NAMED}) == 4


# -- arithmetic ----------------------------------------------------------------------------------------------


def test_e4m3_keeps_every_code() -> None:
    values = FINITE_CODES.view(E4M3).float()
    assert torch.equal(to_e4m3(values).view(torch.uint8), FINITE_CODES)


def test_e4m3_rounds_to_nearest_even() -> None:
    codes = torch.arange(0x7E, dtype=torch.uint8)
    low, high = codes.view(E4M3).float(), (codes + 1).view(E4M3).float()
    middle = (low + high) / 2
    for sign, bit in ((1.0, 0), (-1.0, 0x80)):
        at = [
            (middle, codes + codes % 2),
            (torch.nextafter(middle, low), codes),
            (torch.nextafter(middle, high), codes + 1),
        ]
        for x, want in at:
            assert torch.equal(to_e4m3(sign * x).view(torch.uint8), want | bit)


def test_e4m3_saturates_and_keeps_nan() -> None:
    inf = math.inf
    x = torch.tensor([448.0, 464.0, 465.0, 1e30, inf, -465.0, -inf, math.nan, -math.nan])
    want = torch.tensor([0x7E] * 5 + [0xFE] * 2 + [0x7F] * 2, dtype=torch.uint8)
    assert torch.equal(to_e4m3(x).view(torch.uint8), want)


def test_int8_rounds_to_even_and_saturates() -> None:
    x = torch.tensor([0.5, 1.5, -0.5, -2.5, 126.5, 127.4, 127.6, -128.0, 1e30, -math.inf, math.nan])
    want = torch.tensor([0, 2, 0, -2, 126, 127, 127, -127, 127, -127, 0], dtype=torch.int8)
    assert torch.equal(to_int8(x), want)


@given(st.lists(st.floats(0, width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
@settings(deadline=None)
def test_amax_scale_is_single_float32_operations(amax: list[float]) -> None:
    for qmax, norm in ((E4M3_MAX, 1.0), (INT8_MAX, 1 / math.sqrt(128))):
        inv, scale = amax_scale(torch.tensor(amax, dtype=torch.float32), qmax, norm)
        a = np.maximum(np.array(amax, dtype=np.float32), np.float32(2.0**-100))
        zero = np.array(amax) == 0
        with np.errstate(over="ignore"):
            want_inv = np.where(zero, np.float32(1), np.float32(qmax) / a)
            want_scale = np.where(zero, np.float32(1), a * np.float32(norm / qmax))
        assert inv.dtype == scale.dtype == torch.float32
        assert np.array_equal(inv.numpy(), want_inv) and np.array_equal(scale.numpy(), want_scale)
        assert bool(inv.isfinite().all() and (scale > 0).all())


def test_amax_scale_of_non_finite_groups_is_nan() -> None:
    inv, scale = amax_scale(torch.tensor([math.nan, math.inf]), 448.0, 1.0)
    assert scale.isnan().all() and inv[0].isnan() and inv[1] == 0


@pytest.mark.parametrize("n", [1, 2, 16, 64, 128, 256])
def test_walsh_hadamard_is_the_sylvester_matrix(n: int) -> None:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    assert torch.equal(walsh_hadamard(torch.eye(n, dtype=torch.float64)), h)
    assert torch.equal(h @ h.T, n * torch.eye(n, dtype=torch.float64))
    x = torch.randn(3, 5, n, dtype=torch.float64)
    torch.testing.assert_close(walsh_hadamard(x), x @ h, rtol=1e-13, atol=1e-12)


def test_walsh_hadamard_order_of_stages() -> None:
    """Distance 1 before distance 2: where float32 rounds, another order has other sums."""
    big = 2.0**24
    x = torch.tensor([big, 1.0, -big, 1.0])
    # big + 1 and -big - 1 round to even, +-big; big - 1 and -big + 1 are exact; 2 big - 1 rounds to 2 big.
    assert walsh_hadamard(x).tolist() == [1.0, -1.0, 2 * big, 2 * big]
    # Distance 2 first would give [0, 2, 2 big, 0] and then:
    assert walsh_hadamard(x[[0, 2, 1, 3]])[[0, 2, 1, 3]].tolist() == [2.0, -2.0, 2 * big, 2 * big]


@pytest.mark.parametrize(("n", "block"), [(48, 16), (80, 16), (96, 32), (160, 32), (192, 64), (240, 16)])
def test_walsh_hadamard_in_blocks(n: int, block: int) -> None:
    assert rotation_block(n) == block
    x = torch.randn(3, n)
    parts = [walsh_hadamard(part) for part in x.split(block, dim=-1)]
    assert torch.equal(walsh_hadamard(x), torch.cat(parts, dim=-1))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_preserves_products(head_dim: int) -> None:
    q, k = torch.randn(2, 7, head_dim, dtype=torch.float64)
    signs = rotation_signs(head_dim, 3).double()
    rotated_q, rotated_k = walsh_hadamard(q * signs), walsh_hadamard(k * signs)
    norm = scale_norm(head_dim, "hadamard")
    torch.testing.assert_close((rotated_q * norm) @ (rotated_k * norm).T, q @ k.T, rtol=1e-12, atol=1e-12)


def test_rotation_signs_are_pinned() -> None:
    """Stored tensors and compiled kernels of different machines rely on these bits."""
    got = "".join("+" if s > 0 else "-" for s in rotation_signs(64, 0).tolist())
    assert got == "-++-+++++++--+-----+-++--++++-+-+-++-++--+-+++++-+-++++-+--++-+-"
    assert torch.equal(rotation_signs(64, 0), rotation_signs(64, 0))
    assert not torch.equal(rotation_signs(64, 0), rotation_signs(64, 1))
    assert rotation_signs(256, 5).abs().unique().tolist() == [1.0]


# -- V's layout ----------------------------------------------------------------------------------------------


def test_permutation_is_the_accumulator_order() -> None:
    assert list(PI) == [8 * ((p % 4) // 2) + 2 * (p // 4) + p % 2 for p in range(16)]
    # Lane q of four holds accumulator columns 8 j + 2 q + {0, 1}; its A operand wants positions 4 q .. + 3.
    for lane in range(4):
        held = [8 * j + 2 * lane + i for j in range(2) for i in range(2)]
        assert [PI[4 * lane + b] for b in range(4)] == held


@pytest.mark.parametrize("seqlen", [0, 1, 15, 16, 17, 100, 256])
def test_permute_v_round_trip(seqlen: int) -> None:
    v8 = torch.randint(1, 0x7F, (2, seqlen, 3, 8), dtype=torch.uint8).view(E4M3)
    vt = permute_v(v8)
    padded = -(-seqlen // 16) * 16
    assert vt.shape == (2, 3, 8, padded) and vt.is_contiguous() and vt.dtype == E4M3
    back = unpermute_v(vt, seqlen)
    assert torch.equal(back.view(torch.uint8), v8.view(torch.uint8))
    bytes_, source = vt.view(torch.uint8), v8.view(torch.uint8)
    for position in range(padded):
        key = position // 16 * 16 + PI[position % 16]
        want = source[:, key] if key < seqlen else torch.zeros(2, 3, 8, dtype=torch.uint8)
        assert torch.equal(bytes_[..., position], want)


def test_permute_v_refuses_wide_elements() -> None:
    with pytest.raises(ValueError, match=r"v8 is 4-D torch\.float32"):
        permute_v(torch.zeros(1, 2, 3, 4))


# -- the quantiser -------------------------------------------------------------------------------------------


def by_definition(x: Tensor, rows: int, qmax: float, norm: float) -> tuple[Tensor, Tensor]:
    """Codes (float32) and row scales of one head (seqlen, head_dim), group by group, in numpy float32."""
    codes, scales = torch.empty_like(x), torch.empty(x.shape[0])
    for start in range(0, x.shape[0], rows):
        part = x[start : start + rows].numpy()
        amax = np.abs(part).max()
        a = np.maximum(amax, np.float32(2.0**-100))
        inv = np.float32(1) if amax == 0 else np.float32(qmax) / a
        scale = np.float32(1) if amax == 0 else a * np.float32(norm / qmax)
        scaled = torch.from_numpy(part * inv)
        codes[start : start + rows] = to_int8(scaled).float() if qmax == 127 else to_e4m3(scaled).float()
        scales[start : start + rows] = float(scale)
    return codes, scales


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (96, 48), (80, 256)])
@pytest.mark.parametrize(
    "recipe", [PRESETS["paper"], PRESETS["fp8"], PRESETS["accurate"]], ids=lambda r: r.name
)
def test_reference_is_its_definition(recipe: Fp8Recipe, head_dim: int, head_dim_v: int) -> None:
    q, k, v = inputs(2, 200, 300, 4, 2, head_dim, head_dim_v=head_dim_v)
    got = quantize_reference(q, k, v, recipe)
    assert got.vt.shape == (2, 2, head_dim_v, 304)
    signs = rotation_signs(head_dim, 0)
    norm = 1 / math.sqrt({64: 64, 96: 32, 80: 16}[head_dim])
    mean = k[:, ::16].float().mean(dim=1)
    # e4m3 codes are small where scores are summed in float16
    small = {64: (28.0, 28.0), 96: (28.0, 14.0), 80: (28.0, 14.0)}[head_dim]
    q_max, k_max = {"paper": (448.0, 448.0), "fp8": small, "accurate": (127.0, 127.0)}[recipe.name]
    q_rows = 1 if recipe.q_scale == "token" else 128
    v8 = unpermute_v(got.vt, 300)
    for b in range(2):
        for h in range(4):
            codes, scales = by_definition(walsh_hadamard(q[b, :, h].float() * signs), q_rows, q_max, norm)
            assert torch.equal(got.q[b, :, h].float(), codes)
            assert torch.equal(got.q_scale[b, h], scales)
        for h in range(2):
            x = k[b, :, h].float() - mean[b, h] if recipe.smooth_k else k[b, :, h].float()
            codes, scales = by_definition(walsh_hadamard(x * signs), recipe.k_block, k_max, norm)
            assert torch.equal(got.k[b, :, h].float(), codes)
            assert torch.equal(got.k_scale[b, h], scales[::64])
            codes, scales = by_definition(v[b, :, h].float(), 256, 448.0, 1.0)
            assert torch.equal(v8[b, :, h].float(), codes)
            assert torch.equal(got.v_scale[b, h], scales[::256])


@pytest.mark.parametrize("mode", ["tensor", "head"])
def test_static_scales_are_expanded(mode: str) -> None:
    options = {"q_scale": mode, "k_scale": mode, "v_scale": mode}
    recipe = Fp8Recipe(**options, rotation="none", smooth_k=False)  # type: ignore[arg-type]
    q, k, v = inputs(2, 70, 300, 4, 2, 64)
    got = quantize_reference(q, k, v, recipe)
    for x, scale, shape, qmax in (
        (q, got.q_scale, (2, 4, 70), 127.0),
        (k, got.k_scale, (2, 2, 5), 127.0),
        (v, got.v_scale, (2, 2, 2), 448.0),
    ):
        assert scale.shape == shape and scale.stride(-1) == 0
        amax = (
            x.float().abs().amax(dim=(1, 3)) if mode == "head" else x.float().abs().amax().expand(shape[:2])
        )
        torch.testing.assert_close(scale[..., 0], amax / qmax, rtol=2e-7, atol=0)


def test_static_amax_by_chunks_equals_the_whole() -> None:
    k = torch.randn(2, 4100, 3, 16).half()  # crosses the boundary of a chunk
    k[1, 4099, 2, 7] = 100.0
    mean, signs = mean_key(k), rotation_signs(16, 0)
    whole = walsh_hadamard((k.float() - mean[:, None]) * signs).abs()
    assert torch.equal(static_amax(k, "head", mean=mean, signs=signs), whole.amax(dim=(1, 3)))
    tensor = static_amax(k, "tensor", mean=mean, signs=signs)
    assert tensor.shape == (2, 3) and tensor.stride() == (0, 0) and tensor[0, 0] == whole.max()
    k[0, 4098, 1, 3] = math.nan
    assert static_amax(k, "head").isnan().tolist() == [[False, True, False], [False] * 3]
    assert static_amax(k, "tensor").isnan().all()


@pytest.mark.parametrize("name", NAMED)
@given(
    seqlen_q=st.integers(1, 150),
    seqlen_k=st.integers(1, 300),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([32, 64, 80, 128, 192]),
    log_scale=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=12)
def test_dequantized_error_is_bounded(
    name: str,
    seqlen_q: int,
    seqlen_k: int,
    group: int,
    head_dim: int,
    log_scale: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """e4m3: half a step, 2^-4 of the value, or half a subnormal step; int8: half a step of the scale."""
    torch.manual_seed(seed)
    recipe = PRESETS[name]
    scale = 2.0 ** (log_scale if dtype != torch.float16 else log_scale // 4)
    q, k, v = (x.float().mul(scale).to(dtype) for x in inputs(1, seqlen_q, seqlen_k, group, 1, head_dim))
    got = quantize_reference(q, k, v, recipe)
    assert all(s.isfinite().all() and (s > 0).all() for s in (got.q_scale, got.k_scale, got.v_scale))
    signs = rotation_signs(head_dim, 0)
    exact = [q.float(), k.float() - mean_key(k)[:, None] if recipe.smooth_k else k.float(), v.float()]
    if recipe.rotation == "hadamard":
        exact[:2] = [walsh_hadamard(x * signs) for x in exact[:2]]
    norms = [scale_norm(head_dim, recipe.rotation)] * 2 + [1.0]
    scales = [
        got.q_scale,
        got.k_scale.repeat_interleave(64, -1)[..., :seqlen_k],
        got.v_scale.repeat_interleave(256, -1)[..., :seqlen_k],
    ]
    for i, (x, norm, row_scale, back) in enumerate(zip(exact, norms, scales, got.dequantize(), strict=True)):
        x = x.double() * norm
        unit = row_scale.double().transpose(1, 2).unsqueeze(-1)
        if recipe.qk_dtype == "int8" and i < 2:
            bound = unit / 2
        else:
            bound = torch.maximum(x.abs() * 2.0**-4, unit * 2.0**-10)
        slack = 4 * 2.0**-24 * (x.abs() + unit)  # of the float32 factors: inv, x * inv, scale
        assert bool(((back - x).abs() <= bound + slack).all())


def test_smoothing_term_and_mean() -> None:
    q, k, v = inputs(2, 33, 50, 6, 2, 64)
    got = quantize_reference(q, k, v, PRESETS["accurate"])
    mean = k[:, [0, 16, 32, 48]].double().mean(dim=1)
    torch.testing.assert_close(mean_key(k).double(), mean, rtol=1e-6, atol=1e-6)
    want = torch.einsum("bshd,bhd->bhs", q.double(), mean.repeat_interleave(3, dim=1))
    assert got.q_dot_mean is not None and got.q_dot_mean.shape == (2, 6, 33)
    torch.testing.assert_close(got.q_dot_mean.double(), want, rtol=1e-5, atol=1e-5)
    assert quantize_reference(q, k, v, PRESETS["paper"]).q_dot_mean is None
    other = torch.randn(2, 2, 64)
    shifted = quantize_reference(q, k, v, PRESETS["accurate"], k_mean=other)
    back = quantize_reference(
        q, (k.float() - other[:, None]), v, dataclasses.replace(PRESETS["accurate"], smooth_k=False)
    )
    assert torch.equal(shifted.k, back.k) and torch.equal(shifted.k_scale, back.k_scale)


@pytest.mark.parametrize("seqlen", [1, 16, 17, 300, 1024, 1025, 5000, 16384, 16385, 40000])
def test_mean_key_is_summed_in_the_documented_order(seqlen: int) -> None:
    """Lanes step by step, the lanes of a chunk, the chunks, one division: as scalars, and near the exact mean."""
    k = (torch.randn(1, seqlen, 1, 4) + 2.0).bfloat16()
    chunk, chunks = mean_chunks(seqlen)
    samples = k[0, ::16, 0].float().numpy()
    assert chunk % 64 == 0 and chunks <= 16 and (chunks - 1) * chunk < len(samples) <= chunks * chunk
    total = np.zeros(4, np.float32)
    for start in range(0, len(samples), chunk):
        part = np.zeros(4, np.float32)
        for lane in range(16):
            of_lane = np.zeros(4, np.float32)
            for sample in samples[start : start + chunk][lane::16]:
                of_lane += sample
            part += of_lane
        total += part
    mean = mean_key(k)[0, 0]
    assert np.array_equal(mean.numpy(), total / np.float32(len(samples)))
    torch.testing.assert_close(mean.double(), k[0, ::16, 0].double().mean(dim=0), rtol=1e-6, atol=1e-6)


def test_mean_key_of_no_keys_and_of_bad_keys() -> None:
    assert torch.equal(mean_key(torch.zeros(2, 0, 3, 8).half()), torch.zeros(2, 3, 8))
    k = torch.zeros(1, 3000, 2, 8)
    k[0, 16 * 100, 1, 3] = math.nan
    k[0, 17, 0, 0] = math.inf  # no sample
    want = torch.zeros(1, 2, 8)
    want[0, 1, 3] = math.nan
    torch.testing.assert_close(mean_key(k), want, equal_nan=True, rtol=0, atol=0)


def test_smoothing_removes_a_common_key() -> None:
    k = torch.randn(64).half().expand(1, 40, 1, 64)
    got = quantize_reference(
        torch.randn(1, 4, 1, 64).half(), k, torch.randn(1, 40, 1, 64).half(), PRESETS["accurate"]
    )
    # The mean of equal float16 values is exact up to their float32 sum: at most 2^-20 of them is left.
    assert got.dequantize()[1].abs().max() <= 2.0**-20 * k.abs().max()


def test_k_mean_errors() -> None:
    q, k, v = inputs(1, 4, 4, 2, 2, 64)
    with pytest.raises(ValueError, match=r"k_mean.*smooth_k is False"):
        quantize_reference(q, k, v, PRESETS["paper"], k_mean=torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match=r"k_mean is \(1, 2, 32\).*\(1, 2, 64\)"):
        quantize_reference(q, k, v, PRESETS["fp8"], k_mean=torch.zeros(1, 2, 32))
    with pytest.raises(ValueError, match=r"v is torch.float64; allowed: float16"):
        quantize_reference(q, k, v.double(), PRESETS["fp8"])
    with pytest.raises(ValueError, match=r"k is 3-D"):
        quantize_reference(q, k[0], v, PRESETS["fp8"])


# -- degenerate inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("zero", ["v channel", "v", "q", "k"])
def test_zero_groups_have_scale_one(name: str, zero: str) -> None:
    """Zeros in a channel, a block or a whole tensor: never 0/0."""
    q, k, v = inputs(1, 300, 300, 8, 2, 128)
    if zero == "v channel":
        v[:, :, 0, 5] = 0
    else:
        {"q": q, "k": k, "v": v}[zero].zero_()
    got = quantize_reference(q, k, v, PRESETS[name])
    scales = {"q": got.q_scale, "k": got.k_scale, "v": got.v_scale}
    assert all(s.isfinite().all() and (s > 0).all() for s in scales.values())
    if zero == "v channel":
        assert (got.dequantize()[2][:, :, 0, 5] == 0).all()
    else:
        assert (scales[zero] == 1).all()
        assert (dict(zip("qkv", got.dequantize(), strict=True))[zero] == 0).all()


def test_a_zero_block_between_others() -> None:
    q, k, v = inputs(1, 130, 600, 1, 1, 64)
    k[:, 64:128], v[:, 256:512], q[:, 7] = 0, 0, 0
    recipe = dataclasses.replace(PRESETS["accurate"], smooth_k=False)
    got = quantize_reference(q, k, v, recipe)
    assert (got.k_scale[0, 0] == 1).tolist() == [i == 1 for i in range(10)]
    assert (got.v_scale[0, 0] == 1).tolist() == [False, True, False]
    assert (got.q_scale[0, 0] == 1).tolist() == [i == 7 for i in range(130)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMED)
def test_non_finite_groups_have_nan_scales_and_no_others(name: str, bad: float) -> None:
    recipe = dataclasses.replace(PRESETS[name], smooth_k=False)
    q, k, v = inputs(2, 200, 300, 2, 2, 64)
    q[1, 150, 0, 3] = k[1, 130, 0, 5] = v[1, 290, 0, 7] = bad
    got = quantize_reference(q, k, v, recipe)
    if name == "naive":
        assert got.q_scale.isnan().all() and got.k_scale.isnan().all() and got.v_scale.isnan().all()
        return
    q_nan = torch.zeros(2, 2, 200, dtype=torch.bool)
    q_nan[1, 0, 128:200] = True
    if recipe.q_scale == "token":
        q_nan[:] = False
        q_nan[1, 0, 150] = True
    k_nan = torch.zeros(2, 2, 5, dtype=torch.bool)
    k_nan[1, 0, 2:4] = True
    k_nan[1, 0, 3] = recipe.k_block == 128
    v_nan = torch.zeros(2, 2, 2, dtype=torch.bool)
    v_nan[1, 0, 1] = True
    for scale, want in ((got.q_scale, q_nan), (got.k_scale, k_nan), (got.v_scale, v_nan)):
        assert torch.equal(scale.isnan(), want)
    assert got.dequantize()[2][1, 256:, 0].isnan().all()


def test_extreme_magnitudes_stay_finite() -> None:
    for magnitude in (3e38, 1e-38, 1e-45):
        x = torch.full((1, 20, 1, 64), magnitude)
        got = quantize_reference(x, x, x, PRESETS["naive"])
        assert all(s.isfinite().all() and (s > 0).all() for s in (got.q_scale, got.k_scale, got.v_scale))
        if magnitude > 1e-30:
            torch.testing.assert_close(got.dequantize()[0], x.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_tensors(name: str, shape: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = shape
    got = quantize_reference(*inputs(batch, seqlen_q, seqlen_k, 4, 2, 64), PRESETS[name])
    assert got.q.shape == (batch, seqlen_q, 4, 64) and got.k.shape == (batch, seqlen_k, 2, 64)
    assert got.q_scale.shape == (batch, 4, seqlen_q)
    assert got.k_scale.shape == got.v_scale.shape == (batch, 2, 1 if seqlen_k else 0)
    assert [x.shape[1] for x in got.dequantize()] == [seqlen_q, seqlen_k, seqlen_k]


# -- tensors that are FP8 already ----------------------------------------------------------------------------


def fp8_inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs(2, 33, 300, 6, 2, 64)
    return q.to(E4M3), k.to(E4M3), v.to(E4M3)


def test_from_fp8_serves_each_group_its_descale() -> None:
    q, k, v = fp8_inputs()
    descales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    got = from_fp8(q, k, v, *descales)
    assert isinstance(got, QuantizedQKV) and got.dtype == torch.bfloat16 and got.recipe.name == "fp8_tensors"
    assert got.q is q and got.k is k and got.q_dot_mean is None
    assert (
        got.q_scale.shape == (2, 6, 33) and got.k_scale.shape == (2, 2, 5) and got.v_scale.shape == (2, 2, 2)
    )
    assert all(s.stride(-1) == 0 for s in (got.q_scale, got.k_scale, got.v_scale))
    dq, dk, dv = got.dequantize()
    for h in range(6):
        want = q[:, :, h].double() * descales[0][:, None, h // 3, None].double()
        assert torch.equal(dq[:, :, h], want)
    assert torch.equal(dk, k.double() * descales[1][:, None, :, None].double())
    assert torch.equal(dv, v.double() * descales[2][:, None, :, None].double())


def test_from_fp8_defaults_to_one() -> None:
    q, k, v = fp8_inputs()
    got = from_fp8(q, k, v)
    for back, x in zip(got.dequantize(), (q, k, v), strict=True):
        assert torch.equal(back, x.double())


def test_from_fp8_takes_a_ready_transpose() -> None:
    q, k, v = fp8_inputs()
    vt = permute_v(v)
    got = from_fp8(q, k, v, vt=vt)
    assert got.vt is vt
    assert torch.equal(got.dequantize()[2], v.double())
    assert got.recipe.p_rounding == "code"


def test_from_fp8_errors() -> None:
    q, k, v = fp8_inputs()
    vt = permute_v(v)
    for wrong in (vt[..., :300], vt.float(), vt[:1]):
        with pytest.raises(ValueError, match=r"vt is \(.*\) .*; allowed: \(2, 2, 64, 304\) float8_e4m3fn"):
            from_fp8(q, k, v, vt=wrong)
    with pytest.raises(ValueError, match=r"k is 4-D torch.bfloat16; allowed: 4-D float8_e4m3fn"):
        from_fp8(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match=r"v_descale is \(2, 6\) torch.float32; allowed: \(2, 2\) float32"):
        from_fp8(q, k, v, None, None, torch.ones(2, 6))


# -- rotary position embedding -------------------------------------------------------------------------------


def angles(seqlen: int, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin as models make them."""
    frequencies = 10000.0 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    phase = torch.arange(seqlen)[:, None] * frequencies
    return phase.cos().to(dtype), phase.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (80, 32), (96, 96)])
def test_rotary_is_single_float32_operations(interleaved: bool, head_dim: int, rotary_dim: int) -> None:
    x = torch.randn(1, 7, 2, head_dim).bfloat16()
    cos, sin = angles(21, rotary_dim, torch.bfloat16)
    got = Rotary(cos, sin, interleaved).embed(x, first=2, step=3).numpy()
    for row, head in np.ndindex(7, 2):
        values, want = x[0, row, head].float().numpy(), x[0, row, head].float().numpy().copy()
        for i in range(rotary_dim // 2):
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
            c, s = (np.float32(table[2 + 3 * row, i].item()) for table in (cos, sin))
            want[one] = values[one] * c - values[two] * s
            want[two] = values[two] * c + values[one] * s
        assert np.array_equal(got[0, row, head], want)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_comes_before_everything_else(name: str, interleaved: bool) -> None:
    """Codes are those of the embedded float32 tensors, the last query at the position of the last key."""
    q, k, v = inputs(2, 33, 50, 4, 2, 80)
    cos, sin = angles(64, 48, torch.bfloat16)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    got = quantize_reference(q, k, v, PRESETS[name], **rotary)  # type: ignore[arg-type]
    embed = Rotary(cos, sin, interleaved).embed
    want = quantize_reference(embed(q, first=17), embed(k), v, PRESETS[name])
    assert got.dtype == torch.bfloat16
    for field in ("q", "k", "vt", "q_scale", "k_scale", "v_scale", "q_dot_mean"):
        x, y = getattr(got, field), getattr(want, field)
        assert (x is None and y is None) or torch.equal(x.float(), y.float()), field
    for mode in ("head", "tensor"):
        amax = static_amax(q, mode, rotary=Rotary(cos, sin, interleaved), first=17)
        assert torch.equal(amax, static_amax(embed(q, first=17), mode))


def test_rotary_makes_products_depend_on_distance() -> None:
    x, y = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64).float()
    for interleaved in (False, True):
        rotary = Rotary(*angles(40, 64, torch.float32), interleaved)
        products = [(rotary.embed(x, i + 3) * rotary.embed(y, i)).sum().item() for i in (0, 5, 30)]
        assert products == pytest.approx([products[0]] * 3, rel=1e-4)
        assert (rotary.embed(x, 4) * rotary.embed(y, 0)).sum().item() != pytest.approx(products[0], rel=1e-4)


def test_rotary_refusals() -> None:
    q, k, _ = inputs(1, 5, 9, 2, 2, 64)
    cos, sin = angles(9, 64, torch.bfloat16)
    assert check_rotary(q, k, None, None, False) is None
    assert check_rotary(q, k, cos, sin, True) == (cos, sin, True)
    for arguments, message in (
        ((cos, None, False), "rotary_cos is given and rotary_sin is None"),
        ((None, sin, False), "rotary_sin is given and rotary_cos is None"),
        ((None, None, True), "rotary_interleaved is True and rotary_cos is None"),
        ((cos[:8], sin, False), r"rotary_cos is \(8, 32\); .* seqlen_ro at least 9"),
        ((cos, sin[:8], False), r"rotary_sin is \(8, 32\)"),
        ((cos[:, :12], sin, False), r"rotary_cos is \(9, 12\); .*multiple of 16 from 16 to 64"),
        ((torch.cat((cos, cos), 1), sin, False), r"rotary_cos is \(9, 64\)"),
        ((cos, sin[:, :16], False), "rotary_sin has 16 columns; allowed: 32"),
        ((cos[None], sin, False), r"rotary_cos is \(1, 9, 32\)"),
        ((cos, sin.t().contiguous().t(), False), r"rotary_sin has strides \(1, 9\)"),
        ((cos.to("meta"), sin, False), "rotary_cos is on device meta; allowed: cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            check_rotary(q, k, *arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rotary_sin has dtype torch.float32; allowed: torch.bfloat16"):
        check_rotary(q, k, cos, sin.float(), False)
    with pytest.raises(TypeError, match="rotary_interleaved is 1"):
        check_rotary(q, k, cos, sin, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q has 9 rows and k 5"):
        check_rotary(k, q, cos, sin, False)
