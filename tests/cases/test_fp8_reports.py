"""Faults that users of other attention libraries reported, restated for the 8-bit path.

Each test stands for a kind of fault, named in its docstring. Right values follow from the definition.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn import Fp8Recipe
from cute_attn.quantize import PRESETS
from cute_attn.reference import attention

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

RECIPES = ["naive", "paper", "fp8", "accurate"]

# The presets; and int8 without smoothing, which leaves the logits as large as they are. Only rotation makes
# constant inputs something that has to be rounded.
LOGIT_RECIPES = [
    *(PRESETS[name] for name in RECIPES),
    Fp8Recipe("int8_plain", rotation="none", smooth_k=False),
    Fp8Recipe("int8_rotated", smooth_k=False, p_rounding="ex2"),
]
ROUNDS_CONSTANTS = ("paper", "int8_rotated")

# Largest error of lse that rounding a single P leaves, in natural log: half a step of its e4m3 code.
P_STEP = {"ex2": math.log(1 + 2.0**-4), "cast": math.log(1 + 2.0**-4), "code": 0.086}


@pytest.fixture(params=["emulator", pytest.param("sm90", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a call, and the device of its tensors, on each backend."""
    return {"backend": request.param, "device": "cuda" if request.param == "sm90" else "cpu"}


def attend(where: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) on the CPU."""
    moved = (x.to(where["device"]) for x in (q, k, v))
    call = cute_attn.flash_attn_fp8_func if q.dtype == E4M3 else cute_attn.fp8_attention
    out, lse = call(*moved, return_lse=True, backend=where["backend"], **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_keys(where: dict[str, Any], recipe: str, causal: bool) -> None:
    """Dense K and V of length 0: illegal instruction, or a division by zero on the host."""
    q, k, v = torch.randn(2, 1, 8, 128), torch.empty(2, 0, 8, 128), torch.empty(2, 0, 8, 128)
    out, lse = attend(where, q.to(BF16), k.to(BF16), v.to(BF16), recipe=recipe, causal=causal)
    assert out.shape == (2, 1, 8, 128) and bool((out == 0).all())
    assert lse.shape == (2, 8, 1) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("keys", [1, 2, 300])
@pytest.mark.parametrize("recipe", LOGIT_RECIPES, ids=lambda recipe: recipe.name)
def test_very_negative_logits(where: dict[str, Any], recipe: Fp8Recipe, keys: int) -> None:
    """A finite stand-in for -inf: a row whose logits are below it comes out 0, with a clamped lse."""
    q = torch.full((1, 1, 32, 128), 64.0, dtype=BF16)
    k = torch.full((1, keys, 32, 128), -64.0, dtype=BF16)
    v = torch.ones(1, keys, 32, 128, dtype=BF16)
    out, lse = attend(where, q, k, v, recipe=recipe)
    # The tensor core cuts off what its 8-bit accumulator has no room for, at most one bf16 step here.
    assert (out - 1.0).abs().max() <= (2.0**-8 if where["backend"] == "sm90" else 0.0)
    if recipe.name in ROUNDS_CONSTANTS:
        expected = of_codes(q, k, v, recipe)
    else:
        expected = torch.tensor(-524288.0 / math.sqrt(128) + math.log(keys)).double()  # -46340.95 for one key
    tolerance = P_STEP[recipe.p_rounding] + 46341 * 2.0**-22  # scales and logits are float32
    assert (lse - expected).abs().max() <= tolerance


def of_codes(q: Tensor, k: Tensor, v: Tensor, recipe: Fp8Recipe) -> Tensor:
    """lse of exact attention on what quantisation left of the inputs; for recipes without smoothing."""
    return attention(*cute_attn.quantize(q, k, v, recipe).dequantize())[1]


@pytest.mark.parametrize("keys", [1, 200])
@pytest.mark.parametrize("recipe", LOGIT_RECIPES, ids=lambda recipe: recipe.name)
def test_huge_inputs(where: dict[str, Any], recipe: Fp8Recipe, keys: int) -> None:
    """The scaled maximum and the fused multiply-add round differently, by more than exp2 can take."""
    q = torch.full((1, 1, 1, 64), 133120.0, dtype=BF16)
    k, v = (torch.full((1, keys, 1, 64), 133120.0, dtype=BF16) for _ in range(2))
    out, lse = attend(where, q, k, v, recipe=recipe)
    assert bool((out == 133120.0).all())
    expected = 64 * 133120.0**2 / 8
    if recipe.name in ROUNDS_CONSTANTS:
        expected = of_codes(q, k, v, recipe).item()
    assert lse.item() == pytest.approx(expected, rel=1e-6)


def test_error_is_flat_over_the_spread_of_logits(where: dict[str, Any]) -> None:
    """P scaled against a stale maximum clips at 448, so that numerator and row sum disagree."""
    q, k, v = (torch.randn(1, n, 1, 128).clamp(-3, 3).to(E4M3) for n in (64, 8192, 8192))
    logits = (q.double()[0, :, 0] @ k.double()[0, :, 0].T).std().item()
    for std in (0.25, 0.5, 1.0, 1.5, 2.0):
        out, _ = attend(where, q, k, v, softmax_scale=std / logits)
        exact, _ = attention(q, k, v, softmax_scale=std / logits)
        error = ((out - exact).pow(2).mean() / exact.pow(2).mean()).sqrt()
        # One rounding of P, see test_api.py; clipping gave ten times that.
        assert error <= 3.35e-2, std


ZEROS = {
    "a channel of V": lambda q, k, v: v[:, :, 0, 5].zero_(),
    "V": lambda q, k, v: v.zero_(),
    "Q": lambda q, k, v: q.zero_(),
    "K": lambda q, k, v: k.zero_(),
}


@pytest.mark.parametrize("zero", list(ZEROS))
@pytest.mark.parametrize("recipe", [*RECIPES, "head scales"])
def test_zero_blocks(where: dict[str, Any], recipe: str | Fp8Recipe, zero: str) -> None:
    """The quantiser divides 0 by 0 where a whole block or channel is zero."""
    if recipe == "head scales":
        recipe = Fp8Recipe(q_scale="head", k_scale="head", v_scale="head")
    q, k, v = (torch.randn(1, n, heads, 128).to(BF16) for n, heads in ((40, 8), (300, 2), (300, 2)))
    before = attend(where, q, k, v, recipe=recipe)[0] if zero == "a channel of V" else None
    ZEROS[zero](q, k, v)
    codes = cute_attn.quantize(q, k, v, recipe)
    for scale in (codes.q_scale, codes.k_scale, codes.v_scale):
        assert bool(scale.isfinite().all()) and bool((scale > 0).all())
    out, lse = attend(where, q, k, v, recipe=recipe)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    if before is not None:
        assert bool((out[:, :, :4, 5] == 0).all())
        rest = torch.ones(8, 128, dtype=torch.bool)
        rest[:4, 5] = False
        assert torch.equal(out[:, :, rest], before[:, :, rest])
    elif zero == "V":
        assert bool((out == 0).all())
    else:
        # All keys weigh the same, exactly: the mean of the rounded V, rounded once to bf16.
        mean = codes.dequantize()[2].mean(dim=1, keepdim=True).repeat_interleave(4, dim=2)
        # The tensor core cuts small products 13 bits below the largest sum or product beside them.
        atol = 1e-4 if where["backend"] == "sm90" else 1e-6
        torch.testing.assert_close(out.double(), mean.expand_as(out), rtol=2.0**-8, atol=atol)
        bound = P_STEP["code"] if zero == "Q" else 2 * P_STEP["code"]
        assert (lse - math.log(300)).abs().max() <= bound


@pytest.mark.gpu
def test_heads_beyond_65535_are_right() -> None:
    """A head count over 65535 exceeds the limit of a grid's y and z: heads beyond it are as each alone."""
    q, k, v = (torch.rand(1, 3, 71280, 128, device="cuda").to(BF16) for _ in range(3))
    out, lse = cute_attn.fp8_attention(q, k, v, return_lse=True)
    for head in (0, 65535, 65536, 71279):
        some = slice(head, head + 1)
        alone, alone_lse = cute_attn.fp8_attention(
            q[:, :, some], k[:, :, some], v[:, :, some], return_lse=True
        )
        assert torch.equal(out[:, :, some], alone)
        assert torch.equal(lse[:, some], alone_lse)
