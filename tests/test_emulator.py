"""The emulator of the forward kernel against float64 attention of the same quantised inputs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_attn import emulator
from cute_attn.emulator import _codes, _half_codes, _half_units, _hopper_matmul, emulate_forward, p_code
from cute_attn.kernels import config
from cute_attn.kernels.config import (
    CODE_BIAS,
    CODE_LSE_BIAS,
    CODE_MAX,
    CODE_UNIT,
    E4M3_MAX,
    FIRST_ABOVE,
    HALF_BIAS,
    HALF_LSE_BIAS,
    HALF_UNSET_SHIFT,
    HEAD_DIMS,
    LIFT,
    UNSET_SHIFT,
    narrow_max,
)
from cute_attn.quantize import PRESETS, Fp8Recipe, QuantizedQKV, from_fp8, quantize_reference

E4M3 = torch.float8_e4m3fn
NAMED = ["naive", "paper", "fp8", "accurate"]

# The presets, and exp2 with the lift, which none of them takes.
EX2 = {
    "fp8 ex2": dataclasses.replace(PRESETS["fp8"], name="fp8 ex2", p_rounding="ex2"),
    "accurate ex2": dataclasses.replace(PRESETS["accurate"], name="accurate ex2", p_rounding="ex2"),
}
RECIPES = {**PRESETS, **EX2}
ALL = [*NAMED, *EX2]

# The rounding of P: its greatest relative error, the root mean square of it (over a uniform fractional
# exponent, the mean taken out), and the greatest absolute error of a P * 2^lift too small for that bound.
P_MAX_ERROR = {"code": 0.0752, "ex2": 0.0625, "cast": 0.0625}
P_RMS_ERROR = {"code": 0.0314, "ex2": 0.0265, "cast": 0.0265}
P_FLOOR = {"code": 2.0 ** ((0.5 - CODE_BIAS) / 8 + LIFT["code"]), "ex2": 2.0**-10, "cast": 2.0**-10}
# The reference is the maximum rounded to an integer, by code an octave above it or less: the largest P * 2^lift is at
# least this.
P_LARGEST = {p: 2.0 ** (lift - 0.5 - (FIRST_ABOVE if p == "code" else 0.0)) for p, lift in LIFT.items()}


@dataclasses.dataclass
class Exact:
    """float64 attention of what the codes stand for, and how the rounding of softmax weights w moves it."""

    weights: Tensor  # (b, h, sq, sk)
    v: Tensor  # (b, sk, h, d)
    out: Tensor  # (b, sq, h, d)
    lse: Tensor  # (b, h, sq)
    keys: Tensor  # (sq,) number of visible keys

    def worst_error(self, relative: float, absolute: float) -> Tensor:
        """Bound of |out' - out| if each w errs by `relative` of itself or `absolute` of the row's largest."""
        largest = self.weights.amax(dim=-1, keepdim=True)
        error = relative * self.weights + absolute * largest
        # error @ |v - out|, one row at a time: the differences are (b, sk, h, d)
        rows = [
            torch.einsum("bhj,bjhd->bhd", error[:, :, i], (self.v - self.out[:, i, None]).abs())
            for i in range(self.out.shape[1])
        ]
        return torch.stack(rows, dim=1) / (1 - relative)

    def noise(self) -> Tensor:
        """Standard deviation of out' for independent relative errors of w of standard deviation 1."""
        w2 = self.weights**2
        mean, square = (torch.einsum("bhij,bjhd->bihd", w2, x) for x in (self.v, self.v**2))
        total = w2.sum(dim=-1).transpose(1, 2).unsqueeze(-1)
        return (square - 2 * self.out * mean + self.out**2 * total).clamp(min=0).sqrt()


def exact_attention(qkv: QuantizedQKV, causal: bool = False, softmax_scale: float | None = None) -> Exact:
    q, k, v = qkv.dequantize()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    seen = (j <= i + seqlen_k - seqlen_q) if causal else (j <= i + seqlen_k)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~seen, 0.0)  # NaN of rows without keys too
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    if qkv.q_dot_mean is not None:
        lse = lse + qkv.q_dot_mean.double() * scale
    return Exact(weights, v, out, lse, seen.sum(dim=-1))


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def check_against_exact(qkv: QuantizedQKV, out: Tensor, lse: Tensor, exact: Exact) -> None:
    """Bounds that follow from the rounding of P alone, for every element; `out` is float32."""
    p = qkv.recipe.p_rounding
    # In float16 a score and its unit are each rounded by 2^-11 of their size; those 9 below the largest make no P.
    of_scores = 2.0**-10 * (exact.lse.abs() + 9.0) if qkv.recipe.half_scores else torch.zeros_like(exact.lse)
    largest = float(of_scores[exact.lse != -math.inf].max()) if bool((exact.lse != -math.inf).any()) else 0.0
    p_error = (1 + P_MAX_ERROR[p]) * math.exp(largest) - 1
    worst = exact.worst_error(p_error, P_FLOOR[p] / P_LARGEST[p])
    excess = (out.double() - exact.out).abs() - worst
    assert float(excess.max()) <= 1e-5 * float(exact.v.abs().amax())
    empty = exact.keys == 0
    assert (out[:, empty] == 0).all() and (lse[..., empty] == -math.inf).all()
    got, want = lse[..., ~empty].double(), exact.lse[..., ~empty]
    low, high = math.log(1 - P_MAX_ERROR[p]), math.log(1 + P_MAX_ERROR[p])
    bias = CODE_LSE_BIAS if p == "code" else 0.0
    lost = P_FLOOR[p] / P_LARGEST[p] * exact.keys[~empty] / (1 - P_MAX_ERROR[p])  # tiny P, at most so many
    slack = 1e-5 * (1 + want.abs()) + of_scores[..., ~empty]
    assert ((got - want >= low - bias - lost - slack) & (got - want <= high - bias + slack)).all()


def make(
    recipe: str | Fp8Recipe,
    batch: int = 1,
    seqlen_q: int = 64,
    seqlen_k: int = 300,
    heads_q: int = 2,
    heads_k: int = 1,
    head_dim: int = 64,
    v_mean: float = 0.0,
    head_dim_v: int | None = None,
) -> QuantizedQKV:
    q = torch.randn(batch, seqlen_q, heads_q, head_dim).bfloat16()
    k = (torch.randn(batch, seqlen_k, heads_k, head_dim) + torch.randn(head_dim)).bfloat16()
    v = (torch.randn(batch, seqlen_k, heads_k, head_dim_v or head_dim) + v_mean).bfloat16()
    return quantize_reference(q, k, v, RECIPES[recipe] if isinstance(recipe, str) else recipe)


# -- P -------------------------------------------------------------------------------------------------------


def test_constants_are_the_kernels() -> None:
    from cute_attn.kernels.sm90 import policy_fp8, softmax_fp8

    of_kernel = {**vars(policy_fp8), **vars(softmax_fp8)}
    for name in (
        "LIFT",
        "CODE_BIAS",
        "CODE_MAX",
        "CODE_UNIT",
        "UNSET_SHIFT",
        "ROUND_LIMIT",
        "SMALLEST_FACTOR",
        "CODE_LSE_BIAS",
    ):
        assert of_kernel[name] == getattr(emulator, name) == getattr(config, name)


@pytest.mark.parametrize(
    ("code_bias", "lse_bias"), [(CODE_BIAS, CODE_LSE_BIAS), (HALF_BIAS, HALF_LSE_BIAS)], ids=["code", "half"]
)
def test_lse_bias_is_the_mean_over_a_period(code_bias: float, lse_bias: float) -> None:
    """Softmax mass is spread over many values of log2 P, so that its fractional part is close to uniform, and the
    row sum of the rounded P is the exact sum times the mean of (rounded P) / P over one period, eight codes.

    The byte n is chosen for z within 1/2 of n. The ratio value(n) / 2^((z - code_bias)/8 + 7) has an elementary
    integral. The period taken is 112..119, where value(n) is 128 + 16 (n - 112).
    """
    total = 0.0
    for n in range(112, 120):
        low, high = ((z - code_bias) / 8 + LIFT["code"] for z in (n - 0.5, n + 0.5))
        total += (128 + 16 * (n - 112)) * (2.0**-low - 2.0**-high) / math.log(2)
    assert abs(math.log(total) - lse_bias) < 1e-9


def test_p_code_is_the_bits_of_a_subnormal_half() -> None:
    """The kernel rounds z 2^-24 to float16 and takes the low byte."""
    z = torch.cat(
        (torch.linspace(-20, 126.4, 200_001), torch.arange(0, 126.5, 1 / 64), torch.tensor([-math.inf]))
    )
    want = (z * CODE_UNIT).half().clamp(min=0).view(torch.int16)
    assert torch.equal(p_code(z), want.to(torch.uint8))


def test_p_code_is_the_low_byte_beyond_a_thousand() -> None:
    """From scores in float16 the kernel adds 1024 in float16 and takes the low byte."""
    v = torch.arange(0, 126.5 + 2**-6, 2**-6).half().relu()
    assert torch.equal(p_code(v.float()), (v + 1024).view(torch.int16).to(torch.uint8))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_of_narrow_codes_are_in_the_range_of_float16(head_dim: int) -> None:
    q_max, k_max = narrow_max(head_dim)
    assert q_max * k_max * head_dim <= torch.finfo(torch.float16).max
    for largest in (q_max, k_max):  # the codes are those of 448, a power of two smaller
        assert math.log2(E4M3_MAX / largest).is_integer()


@pytest.mark.parametrize("check_keys", [32, 64])
@pytest.mark.parametrize("unit", [0.125, 3.0, 4096.0, 1e6])
def test_half_codes(unit: float, check_keys: int) -> None:
    """Codes are those of the last reference, and rise with the score; `unit` is the logit of a unit of S, in codes."""
    scores = torch.randn(6, 256) * 40 / unit
    scores[1] += torch.linspace(-30, 30, 256) / unit
    scores[2, :100] = -math.inf
    scores[3] += 3e4 / max(unit, 1.0)  # its reference is beyond what float16 adds, but for the smallest unit
    scores[4] = 7.0
    scores[5] = -math.inf
    scores = scores.half().float()
    factor = _half_units(torch.full((6, 1), unit), torch.ones(6, 4))
    shift = torch.full((6,), HALF_UNSET_SHIFT)
    p8, moved, corr = _half_codes(scores, factor, shift, check_keys)
    codes = p8.view(torch.uint8).int()
    assert moved[5] == HALF_UNSET_SHIFT and not codes[5].any()
    assert bool((((moved[:5] - HALF_BIAS) / 8) % 1 == 0).all())
    assert bool((corr <= 1).all()) and corr[4] == 1
    z = scores.double() * factor[:, :1].double() + moved[:, None].double()
    off = (codes - p_code(z.float()).int()).abs()
    # a code falls by whole octaves with its reference, and a large one is rounded where it is relative to the largest
    assert bool((off <= (1 if unit <= 3 else 2)).all())
    assert int(codes[:5].amax(dim=1).min()) > 80
    of_checks = codes[4].view(-1, check_keys)  # a huge reference is rounded between checks
    assert bool((of_checks == of_checks[:, :1]).all())


def test_p_code_edges() -> None:
    z = torch.tensor(
        [-math.inf, -1.0, 0.5, 0.51, 1.5, 119.4, 119.65625, 126.5, 300.0, 1e30, math.inf, math.nan]
    )
    assert p_code(z).tolist() == [0, 0, 0, 1, 2, 119, 120, 126, 126, 126, 126, 0x7F]


def test_p_code_is_near_exp2() -> None:
    log2_p = torch.linspace(-12.8, 1.8, 100_000, dtype=torch.float64)
    value = p_code((8 * log2_p + CODE_BIAS).float()).view(E4M3).double()
    ratio = value / torch.exp2(log2_p + LIFT["code"])
    assert ratio.max() - 1 <= P_MAX_ERROR["code"] and 1 - ratio.min() <= P_MAX_ERROR["code"]
    assert ratio.max() - 1 >= 0.075  # the bound is not slack


def test_lse_bias_is_the_mean_ratio() -> None:
    z = torch.linspace(112 - 1 / 2, 120 - 1 / 2, 1_600_001, dtype=torch.float64)[:-1]
    ratio = p_code(z.float()).view(E4M3).double() / torch.exp2((z - CODE_BIAS) / 8 + LIFT["code"])
    assert abs(float(ratio.mean().log()) - CODE_LSE_BIAS) < 1e-6
    assert abs(float(ratio.std() / ratio.mean()) - P_RMS_ERROR["code"]) < 1e-4


# -- the reference of P by code ------------------------------------------------------------------------------


def codes_of(log2_p: Tensor, check_keys: int, shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`_codes` for rows of base-2 logits (rows, keys): bytes, references m, rescale factors."""
    if shift is None:
        shift = torch.full(log2_p.shape[:1], UNSET_SHIFT)
    factor = torch.full((log2_p.shape[0], log2_p.shape[1] // 64), 8 * CODE_UNIT)
    p8, shift, corr = _codes(log2_p, factor, shift, check_keys)
    return p8.view(torch.uint8), (CODE_BIAS - shift / CODE_UNIT) / 8, corr


@pytest.mark.parametrize("check_keys", [32, 64])
def test_rising_logits_move_the_reference_within_a_tile(check_keys: int) -> None:
    """All codes end as if the last reference had been known from the start: moves are whole octaves."""
    log2_p = torch.linspace(-20, 12, 256).expand(5, 256) + torch.randn(5, 256)
    log2_p = (log2_p * 64).round() / 64  # so that z is exact, and no tie depends on its roundings
    codes, m, corr = codes_of(log2_p, check_keys)
    assert torch.equal(m, m.round())
    lag = log2_p.amax(dim=1) - m
    assert bool((lag <= (CODE_MAX - CODE_BIAS) / 8).all())
    first = log2_p[:, :check_keys].amax(dim=1).round() + FIRST_ABOVE
    assert bool((m >= first + 20).all())
    assert torch.equal(corr, torch.exp2(first - m))
    z = 8 * (log2_p - m[:, None]) + CODE_BIAS
    off_tie = ((z - z.floor()) - 0.5).abs() > 2.0**-9  # the first keys of a row carry 2^-10 of the mark
    off_tie[:, check_keys:] = True
    assert bool((codes == p_code(z))[off_tie].all())
    assert int((codes == 0).sum()) > 50 and int(codes.max()) <= 126


def test_the_reference_lags_until_a_code_would_overflow() -> None:
    """1.855 octaves above the reference still fit; one step more moves it, to the nearest integer."""
    top = (CODE_MAX - CODE_BIAS) / 8
    shift = torch.full((2,), CODE_BIAS * CODE_UNIT)
    log2_p = torch.full((2, 64), -3.0)
    log2_p[0, 7], log2_p[1, 7] = top, top + 2.0**-10
    codes, m, corr = codes_of(log2_p, 64, shift)
    assert m.tolist() == [0.0, 2.0] and corr.tolist() == [1.0, 0.25]
    assert codes[0, 7] == 126 and codes[1, 7] == 111  # 126.5078 - 16
    assert codes[0, 0] == round(CODE_BIAS - 24) and codes[1, 0] == round(CODE_BIAS - 40)


@pytest.mark.parametrize("check_keys", [32, 64])
def test_a_row_is_set_at_its_first_visible_keys(check_keys: int) -> None:
    log2_p = torch.full((3, 128), -math.inf)
    log2_p[1, 40:] = torch.linspace(-1000.25, -1000.0, 88)
    log2_p[2, 100:] = 300.0
    codes, m, corr = codes_of(log2_p, check_keys)
    assert m.tolist() == [
        -(2.0**-13),
        -1000.0 + FIRST_ABOVE,
        300.0 + FIRST_ABOVE,
    ]  # the first still bears the mark of an unset row
    assert torch.equal(corr, torch.ones(3))  # there is nothing to rescale at the first keys
    assert not codes[0].any() and not codes[1, :40].any() and not codes[2, :100].any()
    assert set(codes[1, 40:].tolist()) == {102, 103, 104} and set(codes[2, 100:].tolist()) == {104}


def test_equal_keys_of_one_check_are_equal_however_huge() -> None:
    for log2_p in (-(2.0**60), -(2.0**22) - 3, 2.0**19 + 0.5, 2.0**21 + 1.25, 2.0**23 + 5, 2.0**90):
        codes, m, _ = codes_of(torch.full((1, 64), log2_p), 64)
        assert len(set(codes[0].tolist())) == 1 and 107 - 8 * FIRST_ABOVE <= int(codes[0, 0]) <= 116
        assert abs(float(m[0]) - FIRST_ABOVE - log2_p) <= 0.5 + 2.0**-22 * abs(log2_p)


# -- against float64 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward_is_exact_attention_up_to_p(name: str, head_dim: int, causal: bool) -> None:
    qkv = make(name, batch=2, seqlen_q=40, seqlen_k=300, heads_q=4, heads_k=2, head_dim=head_dim)
    out, lse = emulate_forward(qkv, causal=causal, out_dtype=torch.float32)
    assert out.shape == (2, 40, 4, head_dim) and lse.shape == (2, 4, 40) and lse.dtype == torch.float32
    exact = exact_attention(qkv, causal)
    check_against_exact(qkv, out, lse, exact)
    # Not only within the worst case: the error has the size that rounding P alone gives.
    measured = rms(out - exact.out) / (P_RMS_ERROR[qkv.recipe.p_rounding] * rms(exact.noise()))
    assert 0.8 < measured < 1.2


# Rotation is the quantiser's matter.
UNROTATED = {
    name: dataclasses.replace(RECIPES[name], name=f"{name} unrotated", rotation="none") for name in ALL
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(32, 32), (48, 80), (80, 48), (192, 128), (64, 256), (256, 32), (240, 240)]
)
def test_any_head_dims(head_dim: int, head_dim_v: int, causal: bool) -> None:
    for name in ("fp8", "accurate ex2"):
        qkv = make(UNROTATED[name], 2, 40, 300, 4, 2, head_dim=head_dim, head_dim_v=head_dim_v)
        out, lse = emulate_forward(qkv, causal=causal, out_dtype=torch.float32)
        assert out.shape == (2, 40, 4, head_dim_v) and lse.shape == (2, 4, 40)
        check_against_exact(qkv, out, lse, exact_attention(qkv, causal))


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("accumulator", ["fp32", "hopper"])
def test_head_dims_with_every_accumulator(accumulator: str, two_level: bool) -> None:
    """Columns of V are sums of their own: all of them at once, or some."""
    qkv = make(UNROTATED["fp8"], 1, 20, 300, head_dim=80, head_dim_v=112)
    narrow = dataclasses.replace(qkv, vt=qkv.vt[:, :, 16:64])
    (out, lse), (part, part_lse) = (
        emulate_forward(
            x,
            out_dtype=torch.float32,
            two_level=two_level,
            accumulator=accumulator,  # type: ignore[arg-type]
        )
        for x in (qkv, narrow)
    )
    torch.testing.assert_close(part, out[..., 16:64], rtol=1e-5, atol=1e-6)
    assert torch.equal(part_lse, lse)


@pytest.mark.parametrize("seqlen_q", [1, 3, 17, 100])
@pytest.mark.parametrize(("heads_q", "heads_k", "pack"), [(2, 1, 2), (8, 2, 4), (12, 2, 2), (64, 1, 64)])
def test_packed_heads_change_finite_results_by_nothing(
    seqlen_q: int, heads_q: int, heads_k: int, pack: int
) -> None:
    qkv = make("accurate", 1, seqlen_q, 200, heads_q, heads_k)
    for causal in (False, True):
        alone, packed = (
            emulate_forward(qkv, causal=causal, pack_gqa=heads, out_dtype=torch.float32)
            for heads in (1, pack)
        )
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("group", "tile_m", "pack_gqa", "first"),
    [(64, 128, 64, 64), (64, 128, 1, 0), (8, 192, 8, 48), (8, 192, 1, 0), (2, 128, 2, 64)],
)
def test_a_tile_is_as_long_as_its_last_query_wants(
    group: int, tile_m: int, pack_gqa: int, first: int
) -> None:
    """A NaN in V spoils all queries of a tile that visits its keys: tile_m / pack_gqa of them."""
    qkv = make("accurate", 1, 256, 256, group, 1)
    qkv.vt.view(torch.uint8)[..., 127] = (
        0x7F  # some key of 112 to 127, which only query 112 and later ones see
    )
    out, _ = emulate_forward(qkv, causal=True, tile_m=tile_m, tile_n=64, pack_gqa=pack_gqa)
    assert bool(out[:, first:].isnan().all()) and bool(out[:, :first].isfinite().all())


@given(
    name=st.sampled_from(ALL),
    seqlen_q=st.integers(1, 80),
    seqlen_k=st.integers(1, 400),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (6, 2)]),
    causal=st.booleans(),
    tile_n=st.sampled_from([64, 128, 256]),
    check_keys=st.sampled_from([32, 64]),
    tile_m=st.sampled_from([16, 64, 128, 192]),
    row_chunk=st.sampled_from([None, 7, 64]),
    softmax_scale=st.sampled_from([None, 0.01, 1.0]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_any_shape(
    name: str,
    seqlen_q: int,
    seqlen_k: int,
    heads: tuple[int, int],
    causal: bool,
    tile_n: int,
    check_keys: int,
    tile_m: int,
    row_chunk: int | None,
    softmax_scale: float | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    qkv = make(name, 1, seqlen_q, seqlen_k, *heads, head_dim=32)
    out, lse = emulate_forward(
        qkv,
        causal=causal,
        softmax_scale=softmax_scale,
        tile_m=tile_m,
        tile_n=tile_n,
        check_keys=check_keys,
        out_dtype=torch.float32,
        row_chunk=row_chunk,
    )
    check_against_exact(qkv, out, lse, exact_attention(qkv, causal, softmax_scale))


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_and_row_blocks_change_nothing(causal: bool) -> None:
    qkv = make("accurate", batch=2, seqlen_q=300, seqlen_k=333, heads_q=4, heads_k=2)
    out, lse = emulate_forward(qkv, causal=causal, out_dtype=torch.float32)
    for chunk, tile_m in ((1 << 20, 128), (50, 128), (128, 64), (33, 192)):
        other, other_lse = emulate_forward(
            qkv, causal=causal, out_dtype=torch.float32, row_chunk=chunk, tile_m=tile_m
        )
        torch.testing.assert_close(other, out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other_lse, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["paper", "accurate"])
def test_tile_n_matters_only_by_rounding(name: str) -> None:
    """The reference of a row is an integer, so other tiles and checks move codes by whole octaves only."""
    qkv = make(name, seqlen_q=128, seqlen_k=2000)
    exact = exact_attention(qkv)
    results = [
        emulate_forward(qkv, tile_n=n, check_keys=c, out_dtype=torch.float32)
        for n, c in ((64, 64), (128, 64), (256, 64), (128, 32))
    ]
    error = rms(results[0][0] - exact.out)
    for out, lse in results[1:]:
        assert rms(out - results[0][0]) < 0.1 * error
        assert (lse - results[0][1]).abs().max() < 1e-3


@pytest.mark.parametrize("name", ALL)
def test_lse_has_no_bias(name: str) -> None:
    qkv = make(name, seqlen_q=128, seqlen_k=2048)
    error = emulate_forward(qkv)[1].double() - exact_attention(qkv).lse
    assert abs(float(error.mean())) < 1.5e-3 and float(error.abs().max()) < 0.02


def test_out_dtype_is_one_rounding() -> None:
    qkv = make("fp8")
    wide = emulate_forward(qkv, out_dtype=torch.float32)[0]
    assert emulate_forward(qkv)[0].dtype == torch.bfloat16
    assert torch.equal(emulate_forward(qkv)[0], wide.bfloat16())
    assert torch.equal(emulate_forward(qkv, out_dtype=torch.float16)[0], wide.half())


def test_fp8_descales_serve_their_group() -> None:
    q, k, v = (torch.randn(2, n, h, 64).to(E4M3) for n, h in ((40, 6), (200, 2), (200, 2)))
    qkv = from_fp8(q, k, v, *(torch.rand(2, 2) * 2 + 0.1 for _ in range(3)))
    out, lse = emulate_forward(qkv, out_dtype=torch.float32)
    check_against_exact(qkv, out, lse, exact_attention(qkv))
    alone = from_fp8(
        q[1:, :, 3:4],
        k[1:, :, 1:],
        v[1:, :, 1:],
        qkv.q_scale[1:, 3:4, 0],
        qkv.k_scale[1:, 1:, 0],
        qkv.v_scale[1:, 1:, 0],
    )
    torch.testing.assert_close(
        emulate_forward(alone, out_dtype=torch.float32)[0], out[1:, :, 3:4], rtol=1e-5, atol=1e-6
    )


# -- masks and empty rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 130), (256, 3), (5, 1), (130, 400)])
def test_causal_is_bottom_right(name: str, seqlen_q: int, seqlen_k: int) -> None:
    qkv = make(name, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64)
    out, lse = emulate_forward(qkv, causal=True, out_dtype=torch.float32)
    exact = exact_attention(qkv, causal=True)
    assert int((exact.keys == 0).sum()) == max(seqlen_q - seqlen_k, 0)
    check_against_exact(qkv, out, lse, exact)
    if seqlen_q >= seqlen_k:  # the first row with a key has only that one: its output is that value
        v = qkv.dequantize()[2]
        torch.testing.assert_close(out[:, seqlen_q - seqlen_k, 0], v[:, 0, 0].float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_tensors(shape: tuple[int, int, int]) -> None:
    qkv = make("accurate", *shape)
    out, lse = emulate_forward(qkv, causal=True)
    assert out.shape == (shape[0], shape[1], 2, 64) and (out == 0).all()
    assert lse.shape == (shape[0], 2, shape[1]) and (lse == -math.inf).all()


# -- extreme logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("keys", [1, 300])
def test_very_negative_logits_are_not_masked(name: str, keys: int) -> None:
    """A raw score of -524288 at head_dim 128: no finite stand-in for -inf may swallow it."""
    q = torch.full((1, 1, 32, 128), 64.0).bfloat16()
    v = torch.ones(1, keys, 32, 128).bfloat16()
    qkv = quantize_reference(q, torch.full_like(v, -64.0), v, RECIPES[name])
    out, lse = emulate_forward(qkv)
    assert (out == 1.0).all()
    # Equal keys: exp(lse) is off by the rounding of one P, lse by that of float32.
    slack = P_MAX_ERROR[qkv.recipe.p_rounding] + CODE_LSE_BIAS + 0.01
    assert (lse - exact_attention(qkv).lse).abs().max() <= slack
    if name != "paper":  # one e4m3 vector of many equal values is exact, a rotated one is not
        assert (lse - (-524288 / math.sqrt(128) + math.log(keys))).abs().max() <= slack


# Recipes that leave logits as large as they are: smoothing makes those of equal keys zero.
LARGE = {
    **{name: RECIPES[name] for name in ALL},
    "fp8 plain": dataclasses.replace(PRESETS["fp8"], rotation="none", smooth_k=False),
    "int8 plain": dataclasses.replace(PRESETS["accurate"], rotation="none", smooth_k=False),
    "int8 rotated": dataclasses.replace(PRESETS["accurate"], smooth_k=False),
    "int8 rotated ex2": dataclasses.replace(EX2["accurate ex2"], smooth_k=False),
}


@pytest.mark.parametrize("name", list(LARGE))
@pytest.mark.parametrize("keys", [1, 200])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("tile_n", "check_keys"), [(128, 64), (128, 32), (256, 64), (256, 32)])
def test_huge_equal_inputs(name: str, keys: int, sign: float, tile_n: int, check_keys: int) -> None:
    """Logits of 1.4e11: the maximum and the exponent must round alike, else P is 0 or beyond e4m3."""
    big = torch.full((1, keys, 1, 64), 133120.0).bfloat16()
    qkv = quantize_reference(big[:, :1] * sign, big, big, LARGE[name])
    out, lse = emulate_forward(qkv, tile_n=tile_n, check_keys=check_keys)
    assert (out == 133120.0).all()
    torch.testing.assert_close(lse.double(), exact_attention(qkv).lse, rtol=1e-6, atol=0)
    if qkv.recipe.rotation == "none" or qkv.recipe.smooth_k:  # else rounded in another basis
        torch.testing.assert_close(lse, torch.full_like(lse, sign * 133120.0**2 * 8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("log2_logit", [12, 18, 21, 22, 23, 30, 60])
def test_large_distinct_logits_pick_the_right_keys(name: str, log2_logit: int) -> None:
    """Softmax of huge logits is a hard maximum: a row returns the value of the key with the greatest."""
    torch.manual_seed(log2_logit)
    q, k = torch.randn(1, 40, 1, 64), torch.randn(1, 500, 1, 64)
    scale = 2.0 ** ((log2_logit - 2) / 2)
    v = torch.randn(1, 500, 1, 64).bfloat16()
    qkv = quantize_reference((q * scale).bfloat16(), (k * scale).bfloat16(), v, RECIPES[name])
    out, lse = emulate_forward(qkv, out_dtype=torch.float32)
    dq, dk, dv = (x[0, :, 0] for x in qkv.dequantize())
    scores = dq @ dk.T / 8
    best = scores.amax(dim=-1, keepdim=True)
    # Keys within the rounding of logits of the maximum (and those with a real share) may take part: of float32, or of
    # a score and its unit in float16.
    half = qkv.recipe.half_scores
    near = scores >= best - 20 - 2 * (2.0**-10 if half else 2.0**-21) * scores.abs().amax()
    inside = (out[0, :, 0] - dv[scores.argmax(dim=-1)].float()).abs().amax(dim=-1) < 1e-3
    only = near.sum(dim=-1) == 1
    assert int(only.sum()) > 5
    assert bool(inside[only].all())
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    exact = exact_attention(qkv)
    error = (lse.double() - exact.lse).abs()
    assert bool((error <= 0.1 + (2.0**-10 if half else 2.0**-20) * scores.abs().amax()).all())


@pytest.mark.parametrize("name", ALL)
def test_equal_huge_keys_of_a_tile_share_the_weight(name: str) -> None:
    """Logits around 2^22 octaves, from where references are no integers. By code: the keys of one check."""
    recipe = dataclasses.replace(RECIPES[name], rotation="none", smooth_k=False)
    keys = 64 if recipe.p_rounding == "code" else 250
    for factor in (0.98, 0.999, 1.001, 1.02, 2.0, 1e6):
        x = math.sqrt(factor * 2.0**22 * math.log(2) * 8 / 64)
        q = torch.full((1, 1, 1, 64), x)
        k = torch.full((1, keys, 1, 64), x)
        v = torch.randn(1, keys, 1, 64)
        qkv = quantize_reference(q, k, v, recipe)
        out, _ = emulate_forward(qkv, tile_n=256, out_dtype=torch.float32)
        torch.testing.assert_close(
            out, qkv.dequantize()[2].mean(dim=1, keepdim=True).float(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", ALL)
def test_tiny_scales_do_not_meet_the_mask(name: str) -> None:
    """Scales whose product underflows: 0 * -inf must not make a masked score NaN."""
    q, k, v = (torch.randn(1, 70, 1, 64) for _ in range(3))
    qkv = quantize_reference((q * 1e-24).bfloat16(), (k * 1e-24).bfloat16(), v.bfloat16(), RECIPES[name])
    out, lse = emulate_forward(qkv, causal=True, out_dtype=torch.float32)
    check_against_exact(qkv, out, lse, exact_attention(qkv, causal=True))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_beyond_float32_are_nan(sign: float) -> None:
    x = torch.full((1, 10, 1, 64), 1e25)
    out, lse = emulate_forward(quantize_reference(x * sign, x, torch.randn(1, 10, 1, 64), PRESETS["naive"]))
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("logit_std", [0.25, 0.5, 1.0, 1.5, 2.0])
def test_error_is_flat_over_logit_spread(logit_std: float) -> None:
    """P lifted by 2^8 must never clip against a stale maximum: 8192 keys, values clamped to +-3."""
    q, k, v = (torch.randn(1, n, 1, 128).clamp(-3, 3).to(E4M3) for n in (64, 8192, 8192))
    qkv = from_fp8(q, k, v)
    raw = (q[0, :, 0].double() @ k[0, :, 0].double().T).std()
    scale = logit_std / float(raw)
    out, _ = emulate_forward(qkv, softmax_scale=scale, out_dtype=torch.float32)
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) * scale
    want = scores.softmax(dim=-1) @ v[0, :, 0].double()
    assert 0.015 < rms(out[0, :, 0] - want) / rms(want) < 0.04


# -- what may not happen silently ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_non_finite_input_makes_its_outputs_nan(name: str, where: str, bad: float) -> None:
    q, k, v = (torch.randn(2, n, 2, 64) for n in (200, 700, 700))
    {"q": q, "k": k, "v": v}[where][1, 150, 0, 9] = bad
    qkv = quantize_reference(q, k, v, RECIPES[name])
    out, lse = emulate_forward(qkv, tile_n=64)
    rows = slice(150, 151) if where == "q" else slice(None)
    assert out[1, rows, 0].isnan().all()
    if where != "v":
        assert lse[1, 0, rows].isnan().all()
    if name != "naive":  # one scale for all spreads it to all
        assert out[0].isfinite().all() and out[1, :, 1].isfinite().all()
    if where == "q" and RECIPES[name].q_scale == "token":
        assert out[1, :150].isfinite().all() and out[1, 151:].isfinite().all()


@pytest.mark.parametrize("where", ["k", "v"])
def test_causal_rows_before_a_non_finite_block_are_clean(where: str) -> None:
    q, k, v = (torch.randn(1, 512, 1, 64) for _ in range(3))
    {"k": k, "v": v}[where][0, 500] = math.nan
    out, lse = emulate_forward(quantize_reference(q, k, v, PRESETS["paper"]), causal=True)
    assert out[0, :256].isfinite().all() and lse[..., :256].isfinite().all()
    assert out[0, 500:].isnan().all()


@pytest.mark.parametrize("name", NAMED)
def test_keys_whose_weights_are_lost_give_nan_not_zero(name: str) -> None:
    """Every logit is below float32: such a row has keys but no sum, which is not a row without keys."""
    recipe = dataclasses.replace(RECIPES[name], rotation="none", smooth_k=False)
    x = torch.full((1, 10, 1, 64), 1e25)
    qkv = quantize_reference(-x, x, torch.randn(1, 10, 1, 64), recipe)
    out, lse = emulate_forward(qkv, causal=True)
    assert out.isnan().all() and lse.isnan().all()


def test_rows_without_keys_stay_empty_beside_nan() -> None:
    q, k, v = (torch.randn(1, n, 1, 64) for n in (100, 40, 40))
    k[0, 3], v[0, 5] = math.nan, math.inf
    out, lse = emulate_forward(quantize_reference(q, k, v, PRESETS["fp8"]), causal=True)
    assert (out[0, :60] == 0).all() and (lse[..., :60] == -math.inf).all()
    assert out[0, 60:].isnan().all()


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("zero", ["v channel", "v", "q", "k"])
def test_zero_tensors(name: str, zero: str) -> None:
    q, k, v = (torch.randn(1, n, h, 128).bfloat16() for n, h in ((20, 8), (300, 2), (300, 2)))
    if zero == "v channel":
        v[:, :, 0, 5] = 0
    else:
        {"q": q, "k": k, "v": v}[zero].zero_()
    qkv = quantize_reference(q, k, v, RECIPES[name])
    out, lse = emulate_forward(qkv, out_dtype=torch.float32)
    check_against_exact(qkv, out, lse, exact_attention(qkv))
    if zero == "v channel":
        assert (out[:, :, :4, 5] == 0).all() and (out[:, :, 4:, 5] != 0).all()
    elif zero == "v":
        assert (out == 0).all()
    else:
        mean = qkv.dequantize()[2].mean(dim=1, keepdim=True).repeat_interleave(4, dim=2).float()
        torch.testing.assert_close(out, mean.expand_as(out), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(300)), rtol=0, atol=0.09)


def test_v_scales_may_jump_between_blocks() -> None:
    q, k, v = (torch.randn(1, n, 1, 64) for n in (64, 1200, 1200))
    for block, size in enumerate((1e-3, 1e4, 0.0, 1.0, 1e-6)):
        v[:, 256 * block : 256 * block + 256] *= size
    qkv = quantize_reference(q, k, v, PRESETS["accurate"])
    for tile_n in (64, 128, 256):
        out, lse = emulate_forward(qkv, causal=True, tile_n=tile_n, out_dtype=torch.float32)
        check_against_exact(qkv, out, lse, exact_attention(qkv, causal=True))


# -- smoothing and rotation ----------------------------------------------------------------------------------


def test_smoothing_leaves_output_and_lse() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, 2, 64).half() for n in (64, 500, 500))
    k = (k + 10 * torch.randn(64)).half()  # a strong common key
    wide = QuantizedQKV(  # float32 in place of codes: smoothing alone, without quantisation
        q.float(),
        k.float(),
        quantize_reference(q, k, v, PRESETS["accurate"]).vt,
        torch.ones(1, 2, 64),
        torch.ones(1, 2, 8),
        torch.ones(1, 2, 2),
        None,
        500,
        PRESETS["fp8"],
        torch.float16,
    )
    mean = k[:, ::16].float().mean(dim=1)
    dot = torch.einsum("bshd,bhd->bhs", q.float(), mean)
    smooth = dataclasses.replace(wide, k=k.float() - mean[:, None], q_dot_mean=dot)
    exact = exact_attention(wide)
    for qkv in (wide, smooth):
        out, lse = emulate_forward(qkv, out_dtype=torch.float32)
        check_against_exact(wide, out, lse, exact)
    # With quantisation, it takes the common key out of the scale: most of the error goes.
    reference = torch.einsum("bhij,bjhd->bihd", exact_weights(q, k), v.double())
    errors = []
    for smooth_k in (False, True):
        recipe = dataclasses.replace(PRESETS["fp8"], rotation="none", smooth_k=smooth_k)
        qkv = quantize_reference(q, k, v, recipe)
        out, lse = emulate_forward(qkv, out_dtype=torch.float32)
        errors.append(rms(out - reference))
        if smooth_k:
            scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8
            assert (lse - scores.logsumexp(dim=-1)).abs().max() < 0.1
    assert errors[1] < 0.4 * errors[0]


def exact_weights(q: Tensor, k: Tensor) -> Tensor:
    return (torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])).softmax(dim=-1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_order_of_the_presets_on_outliers(head_dim: int) -> None:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), the outliers of arXiv 2407.08608."""

    def outliers() -> Tensor:
        shape = (1, 1024, 2, head_dim)
        return (torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)).bfloat16()

    q, k, v = outliers(), outliers(), outliers()
    reference = torch.einsum("bhij,bjhd->bihd", exact_weights(q, k), v.double())
    error = {}
    for name in NAMED:
        out, _ = emulate_forward(quantize_reference(q, k, v, RECIPES[name]), out_dtype=torch.float32)
        error[name] = rms(out - reference)
    assert error["naive"] > 1.3 * error["fp8"] and error["naive"] > 1.3 * error["paper"]
    assert error["fp8"] > 1.4 * error["accurate"]


# -- accumulation --------------------------------------------------------------------------------------------


def test_hopper_matmul_is_its_definition() -> None:
    """Against integer arithmetic of Python, element by element."""
    codes = torch.randint(0, 256, (2, 7, 70), dtype=torch.uint8)
    a = codes.masked_fill(codes & 0x7F == 0x7F, 0).view(E4M3).float()
    b = (torch.randn(2, 70, 5) * 3).to(E4M3).float()
    a[0, 0], b[1, :, 0] = 0, 0
    acc = torch.randn(2, 7, 5) * 1000
    got = _hopper_matmul(a, b, acc)
    for z in range(2):
        for i in range(7):
            for j in range(5):
                total = float(acc[z, i, j])
                for start in (0, 32, 64):
                    terms = [
                        float(x) * float(y)
                        for x, y in zip(a[z, i, start : start + 32], b[z, start : start + 32, j], strict=True)
                    ]
                    terms.append(total)
                    top = max(abs(t) for t in terms)
                    unit = 2.0 ** (math.frexp(top)[1] - 1 - 13) if top else 1.0
                    total = sum(math.trunc(t / unit) for t in terms) * unit
                assert float(got[z, i, j]) == total


def test_hopper_matmul_keeps_nan() -> None:
    a = torch.ones(1, 64)
    a[0, 3] = math.nan
    assert _hopper_matmul(a, torch.ones(64, 2)).isnan().all()
    assert torch.equal(_hopper_matmul(torch.ones(1, 64), torch.ones(64, 2)), torch.full((1, 2), 64.0))


def kernel_error(qkv: QuantizedQKV, **options: object) -> float:
    """Error relative to the rms of the exact output of the same codes."""
    want = exact_weights(*qkv.dequantize()[:2])
    want = torch.einsum("bhij,bjhd->bihd", want, qkv.dequantize()[2])
    out, _ = emulate_forward(qkv, out_dtype=torch.float32, **options)  # type: ignore[arg-type]
    return rms(out - want) / rms(want)


@pytest.mark.parametrize("name", ["fp8", "accurate"])
def test_two_level_accumulation_survives_long_sequences(name: str) -> None:
    """V of mean 0.5: one accumulator over all keys loses what is 13 bits below it, a fresh one a tile not."""
    one_level = []
    for seqlen_k in (4096, 16384):
        qkv = make(name, seqlen_q=8, seqlen_k=seqlen_k, heads_q=1, head_dim=64, v_mean=0.5)
        float32 = kernel_error(qkv)
        assert float32 < 0.005
        assert kernel_error(qkv, accumulator="hopper") < 1.15 * float32 + 1e-4
        assert kernel_error(qkv, two_level=False) < 1.01 * float32
        one_level.append(kernel_error(qkv, accumulator="hopper", two_level=False))
    assert 0.015 < one_level[0] < 0.05 and 0.06 < one_level[1] < 0.2


def test_values_of_mean_one_half_stay_exact_at_length() -> None:
    """The goal for the kernel: 0.5 % of the rms from 4096 keys on. Also one pass over many tiles."""
    qkv = make("accurate", seqlen_q=4, seqlen_k=65536, heads_q=1, head_dim=64, v_mean=0.5)
    assert kernel_error(qkv, tile_n=256) < 0.002


def test_matmuls_are_true_float32_and_settings_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    during: list[str] = []

    def spy(z: Tensor) -> Tensor:
        during.extend(backend.fp32_precision for backend in backends)
        return p_code(z)

    monkeypatch.setattr(emulator, "p_code", spy)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32"
        emulate_forward(make("fp8"))
        assert during and set(during) == {"ieee"}
        assert [backend.fp32_precision for backend in backends] == ["tf32", "tf32"]
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("softmax_scale", math.nan),
        ("softmax_scale", math.inf),
        ("softcap", -1.0),
        ("softcap", math.inf),
        ("window", (-2, 0)),
        ("tile_n", 96),
        ("check_keys", 16),
        ("tile_m", 0),
        ("pack_gqa", 4),
        ("accumulator", "fp16"),
        ("row_chunk", 0),
    ],
)
def test_bad_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{argument} is .*; allowed: "):
        emulate_forward(make("fp8", seqlen_q=2, seqlen_k=2), **{argument: value})  # type: ignore[arg-type]


def test_tiles_hold_whole_groups() -> None:
    qkv = make("fp8", heads_q=8)
    with pytest.raises(ValueError, match="tile_m is 100; allowed: a multiple of pack_gqa, 8"):
        emulate_forward(qkv, tile_m=100, pack_gqa=8)
