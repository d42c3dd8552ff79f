"""Window, softcap, ALiBi, sinks and scales of any sign in the emulator of the 8-bit forward, against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from rounding_bounds import check_lse
from torch import Tensor

from cute_attn.emulator import emulate_forward
from cute_attn.flash import reference
from cute_attn.quantize import (
    PRESETS,
    Fp8Recipe,
    QuantizedQKV,
    quantize_reference,
    unpermute_v,
    with_positive_scale,
)

RECIPES = {
    "accurate": PRESETS["accurate"],  # int8, smoothed keys, P by code
    "fp8": PRESETS["fp8"],
    "paper": PRESETS["paper"],  # no smoothing, P by a cast
    "ex2": Fp8Recipe(p_rounding="ex2"),
}
BATCH, HEADS, HEADS_K, HEAD_DIM = 2, 4, 2, 64
P_ERROR, P_STEP = 4.5e-2, 0.086  # what rounding P leaves of the output (relative rms, few keys) and of lse
EXACT = 1e-5


def operands(recipe: str, seqlen_q: int, seqlen_k: int) -> QuantizedQKV:
    """Keys have a mean that queries see, so that its share of a score matters."""
    q = torch.randn(BATCH, seqlen_q, HEADS, HEAD_DIM) * 1.5 + 0.3
    k = torch.randn(BATCH, seqlen_k, HEADS_K, HEAD_DIM) + torch.randn(HEAD_DIM)
    v = torch.randn(BATCH, seqlen_k, HEADS_K, HEAD_DIM) + 0.5
    return quantize_reference(q.bfloat16(), k.bfloat16(), v.bfloat16(), RECIPES[recipe])


def exact_attention(qkv: QuantizedQKV, softmax_scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    """Float64 (out, lse) on what the operands stand for, with the share of the mean key in every score."""
    q, k, v = qkv.dequantize()
    if qkv.q_dot_mean is not None:
        q = torch.cat([q, qkv.q_dot_mean.double().transpose(1, 2).unsqueeze(-1)], dim=3)
        k = torch.cat([k, torch.ones_like(k[..., :1])], dim=3)
    return reference(q, k, v, softmax_scale=softmax_scale, dtype=torch.float64, **options)


def check(qkv: QuantizedQKV, softmax_scale: float, tile_n: int = 64, **options: Any) -> None:
    """Rounding of P is all that the emulator may add; rows without keys are exact."""
    out, lse = emulate_forward(qkv, softmax_scale=softmax_scale, tile_m=64, tile_n=tile_n, **options)
    exact, exact_lse = exact_attention(qkv, softmax_scale, **options)
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    seen = exact_lse != -math.inf
    assert bool((out.transpose(1, 2)[~seen] == 0).all())
    assert bool(out.isfinite().all()) and bool(lse[seen].isfinite().all())
    difference = (out.double() - exact).square().mean().sqrt()
    assert float(difference) <= P_ERROR * float(exact.square().mean().sqrt()) + EXACT
    # in float16 a score and its unit are each rounded by 2^-11 of their size
    adjusts = options.get("softcap", 0.0) > 0 or options.get("alibi_slopes") is not None
    half = qkv.recipe.half_scores and not adjusts
    bound = P_STEP + 1e-3 + (2.0**-10 * exact_lse.abs() if half else 0.0)
    assert bool(((lse - exact_lse).abs() <= bound)[seen].all())


def side() -> dict[str, Any]:
    return {
        "window": (70, 5),
        "softcap": 4.0,
        "alibi_slopes": torch.rand(BATCH, HEADS) * 0.1,
        "sinks": torch.randn(HEADS) * 3,
    }


PAIRS = [(), *itertools.combinations(side(), 1), *itertools.combinations(side(), 2), tuple(side())]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize("recipe", RECIPES)
def test_features_are_exact_up_to_p(recipe: str, names: tuple[str, ...]) -> None:
    options = {name: value for name, value in side().items() if name in names}
    for seqlen_q, seqlen_k in ((70, 333), (150, 60), (1, 200)):
        check(operands(recipe, seqlen_q, seqlen_k), HEAD_DIM**-0.5, **options)


@pytest.mark.parametrize("softmax_scale", [-0.1, 0.0, 1e-30, 2.0])
@pytest.mark.parametrize("recipe", RECIPES)
def test_softmax_scale_of_any_sign(recipe: str, softmax_scale: float) -> None:
    qkv = operands(recipe, 40, 150)
    check(qkv, softmax_scale)
    check(qkv, softmax_scale, softcap=3.0)


@pytest.mark.parametrize(
    "window", [(0, 0), (17, 0), (-1, 40), (100, -1), (90, 90), (5000, 5000), (-1, -1)], ids=str
)
@pytest.mark.parametrize("tile_n", [64, 256])
def test_windows(window: tuple[int, int], tile_n: int) -> None:
    for seqlen_q, seqlen_k in ((200, 333), (300, 100), (70, 700)):
        check(operands("accurate", seqlen_q, seqlen_k), HEAD_DIM**-0.5, tile_n, window=window)


def test_causal_is_a_window_without_right_end() -> None:
    qkv = operands("accurate", 100, 130)
    for left in (-1, 20):
        got = emulate_forward(qkv, causal=True, window=(left, 9))
        assert all(map(torch.equal, got, emulate_forward(qkv, window=(left, 0))))


def test_chunks_of_rows_change_nothing() -> None:
    qkv, options = operands("accurate", 300, 500), side()
    whole = emulate_forward(qkv, tile_m=64, tile_n=64, row_chunk=300, **options)
    for row_chunk in (7, 64, 100):
        assert all(
            map(
                torch.equal, whole, emulate_forward(qkv, tile_m=64, tile_n=64, row_chunk=row_chunk, **options)
            )
        )


def test_tiles_outside_a_window_are_not_read() -> None:
    """A NaN there reaches no row; in a tile that is read it reaches the rows of the tile's block."""
    qkv = operands("accurate", 256, 256)
    clean = emulate_forward(qkv, tile_m=64, tile_n=64, window=(10, 0))
    qkv.v_scale[:] = 1.0
    vt = qkv.vt.view(torch.uint8)
    assert unpermute_v(qkv.vt, 256).shape[1] == 256
    vt[..., :64] = 0x7F  # e4m3's NaN, in the keys of the first tile
    out, _ = emulate_forward(qkv, tile_m=64, tile_n=64, window=(10, 0))
    # rows 64 .. 127 see keys from 54 on
    assert bool(out[:, :128].isnan().all()) and bool(out[:, 128:].isfinite().all())
    assert torch.isfinite(clean[0]).all()


def test_sinks_of_rows_without_keys() -> None:
    qkv = operands("accurate", 200, 60)
    sinks = torch.tensor([1.5, -math.inf, 0.0, 7.0])
    for softcap in (0.0, 2.0):
        out, lse = emulate_forward(qkv, causal=True, sinks=sinks, softcap=softcap)
        assert bool((out[:, :140] == 0).all())
        assert torch.equal(lse[..., :140], sinks.view(1, 4, 1).expand(BATCH, 4, 140))


def test_a_scale_of_any_sign_is_exact() -> None:
    for recipe in ("accurate", "fp8"):
        qkv = operands(recipe, 5, 20)
        assert with_positive_scale(qkv, 0.5) == (qkv, 0.5)
        negative, scale = with_positive_scale(qkv, -0.5)
        assert scale == 0.5 and torch.equal(negative.q.float(), -qkv.q.float())
        assert qkv.q_dot_mean is not None and negative.q_dot_mean is not None
        assert torch.equal(negative.q_dot_mean, -qkv.q_dot_mean)
        zero, scale = with_positive_scale(qkv, 0.0)
        assert scale == 1.0 and bool((zero.q.float() == 0).all())
    codes = operands("fp8", 5, 20)
    codes.q.view(torch.uint8)[0, 0, 0, 0] = 0xFF
    for scale in (-1.0, 0.0):
        assert bool(with_positive_scale(codes, scale)[0].q.float().isnan().any())


# ------------------------------------------------------------------------------------------------------------
# The bounds of lse that tests of the kernel go by
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("window",), tuple(side())], ids="-".join)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bounds_of_lse(recipe: str, names: tuple[str, ...]) -> None:
    """The emulator with the tensor core's sums stands for the kernel: it keeps the bounds, and mistakes do not."""
    options = {name: value for name, value in side().items() if name in names}
    scale = HEAD_DIM**-0.5
    twice = {name: value for name, value in options.items() if name != "sinks"}
    for name in ("softcap", "alibi_slopes"):
        if name in twice:
            twice[name] = 2 * twice[name]
    for seqlen_q, seqlen_k in ((70, 333), (150, 60), (1, 200), (1, 1)):
        qkv = operands(recipe, seqlen_q, seqlen_k)
        exact = exact_attention(qkv, scale, **options)[1]
        doubled = exact_attention(qkv, 2 * scale, **twice)[1]
        emulated, lse = (
            emulate_forward(qkv, softmax_scale=scale, accumulator=accumulator, **options)[1]
            for accumulator in ("fp32", "hopper")
        )
        about = (exact, doubled, RECIPES[recipe].qk_dtype, "here")
        check_lse(lse, emulated, *about)
        seen = (doubled != -math.inf).nonzero()
        row = tuple(seen[-1].tolist())
        for wrong in (0.3, math.nan):  # of one row
            moved = lse.clone()
            moved[row] += wrong
            with pytest.raises(AssertionError, match=r"lse is off .* at \(batch, head, row\)"):
                check_lse(moved, emulated, *about)
        if len(seen) > 1000 and recipe == "accurate":  # a little, of all rows
            with pytest.raises(AssertionError, match="differs from the emulator's"):
                check_lse(lse + 8e-3, emulated, *about)
    empty = torch.full((1, 1, 3), -math.inf)
    check_lse(empty, empty, empty.double(), empty.double(), "int8", "here")
