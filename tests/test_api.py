"""The public functions: results against float64, shapes, strides, warnings, and what reaches a launch."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cute_attn
from cute_attn import Fp8Recipe, QuantizedQKV, api, tracing
from cute_attn.quantize import PRESETS, permute_v, quantize_reference
from cute_attn.reference import attention
from cute_attn.remember import Remembered
from cute_attn.tiles import transpose_config

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# Bounds of the relative rms error that rounding P to e4m3 leaves in an output of zero-mean V. It is that of
# one rounding, because the errors of keys add up as the terms of the output do: 2.98e-2 by code and 2.45e-2
# by ex2 over uniform log2 P, and up to 12% more where few keys have most of the weight. By cast P below 2^-6
# is a subnormal of e4m3, which errs by 2^-10 instead of a part of itself: 2% more here.
P_ERROR = {"code": 3.35e-2, "ex2": 2.8e-2, "cast": 2.85e-2}


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call remembered, no warning given yet."""
    monkeypatch.setattr(api, "_calls", Remembered())
    monkeypatch.setattr(tracing, "_said", set())


class Shape(NamedTuple):
    batch: int = 1
    seqlen_q: int = 192
    seqlen_k: int = 192
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int = 0  # 0: that of q and k

    def tensors(self, dtype: torch.dtype = BF16, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        columns = (self.head_dim, self.head_dim_v or self.head_dim)
        k, v = (torch.randn(self.batch, self.seqlen_k, self.heads_k, d) for d in columns)
        return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def one_ulp(actual: Tensor, expected: Tensor) -> None:
    """Equal up to one rounding of bf16: float32 sums of another shape may end on the other side of a tie."""
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------
# The package
# ------------------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """Output of a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light() -> None:
    code = """
import sys, cute_attn
assert not {'torch', 'cutlass', 'numpy'} & set(sys.modules)
assert set(cute_attn.__all__) <= set(dir(cute_attn))
import cute_attn.kernels.config
assert not {'torch', 'cutlass'} & set(sys.modules)
import torch
x = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
cute_attn.fp8_attention(x, x, x, backend='emulator')
print(cute_attn.explain(x, x, x))
assert 'cutlass' not in sys.modules and 'cute_attn.launch' not in sys.modules
"""
    assert "emulator" in python(code)


@pytest.mark.parametrize(
    "first",
    [
        "import cute_attn.quantize",
        "from cute_attn.quantize import PRESETS",
        "from cute_attn import quantize",
        "",
    ],
)
def test_quantize_is_the_function_whatever_was_imported_first(first: str) -> None:
    code = f"""
{first}
import cute_attn
from cute_attn import quantize
from cute_attn.quantize import quantize_reference
import cute_attn.api
assert cute_attn.quantize is quantize is cute_attn.api.quantize
assert callable(quantize_reference)
"""
    python(code)


def test_names() -> None:
    for name in cute_attn.__all__:
        assert getattr(cute_attn, name) is not None
    with pytest.raises(AttributeError, match="module 'cute_attn' has no attribute 'attention'"):
        cute_attn.attention  # type: ignore[attr-defined]  # noqa: B018


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(vars(cute_attn), "__version__", raising=False)
    assert cute_attn.__version__ == importlib.metadata.version("cute-attn")
    monkeypatch.delitem(vars(cute_attn), "__version__")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert cute_attn.__version__ == "0+unknown"
    monkeypatch.delitem(vars(cute_attn), "__version__")


# ------------------------------------------------------------------------------------------------------------
# Results
# ------------------------------------------------------------------------------------------------------------

# Bounds of the relative rms error against float64 on N(0, 1) inputs, 10% above the largest of two seeds.
# Rounding V and P is worth 4e-2 of it; e4m3 Q K^T adds the rest.
TOTAL_ERROR = {"naive": 6.2e-2, "paper": 6.2e-2, "fp8": 6.4e-2, "accurate": 4.8e-2}
# Bounds of the absolute error of lse. Rows of few keys have the largest: rounding one P by code is worth
# 0.086 at most; e4m3 adds the error of a q . k of standard deviation 1, the extreme of hundreds.
LSE_ERROR = {"naive": 0.15, "paper": 0.15, "fp8": 0.15, "accurate": 0.09}

SHAPES = [
    Shape(),
    Shape(batch=2, seqlen_q=130, seqlen_k=321, heads_q=2, heads_k=1, head_dim=128),
    Shape(seqlen_q=300, seqlen_k=200, heads_q=2, heads_k=1, head_dim=256),
    Shape(seqlen_q=64, seqlen_k=1024),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("recipe", ["naive", "paper", "fp8", "accurate"])
def test_against_float64(recipe: str, shape: Shape, causal: bool) -> None:
    q, k, v = shape.tensors()
    out, lse = cute_attn.fp8_attention(
        q, k, v, recipe=recipe, causal=causal, return_lse=True, backend="emulator"
    )
    exact, exact_lse = attention(q, k, v, causal=causal, return_lse=True)
    assert rms(out - exact) <= TOTAL_ERROR[recipe] * rms(exact)

    # The error of the kernel alone, against exact attention of the same codes: rotation and smoothing cancel.
    codes = cute_attn.quantize(q, k, v, recipe, backend="emulator")
    of_codes = attention(*codes.dequantize(), causal=causal, return_lse=False)
    assert rms(out - of_codes) <= P_ERROR[PRESETS[recipe].p_rounding] * rms(exact)

    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert bool((out.transpose(1, 2)[empty] == 0).all())
    assert (lse - exact_lse)[~empty].abs().max() <= LSE_ERROR[recipe]


def test_softmax_scale() -> None:
    q, k, v = Shape().tensors()
    for scale in (0.01, 0.3):
        out, lse = cute_attn.fp8_attention(q, k, v, softmax_scale=scale, return_lse=True, backend="emulator")
        exact, exact_lse = attention(q, k, v, softmax_scale=scale, return_lse=True)
        assert rms(out - exact) <= TOTAL_ERROR["accurate"] * rms(exact)
        assert (lse - exact_lse).abs().max() <= LSE_ERROR["accurate"]


def test_one_call_is_quantize_then_attend() -> None:
    q, k, v = Shape(seqlen_k=300, heads_q=4).tensors()
    for recipe in ("naive", "accurate", Fp8Recipe(rotation_seed=3, v_scale="head")):
        whole = cute_attn.fp8_attention(q, k, v, recipe=recipe, return_lse=True, backend="emulator")
        codes = cute_attn.quantize(q, k, v, recipe, backend="emulator")
        parts = cute_attn.fp8_attention_quantized(codes, return_lse=True, backend="emulator")
        assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_default_is_accurate() -> None:
    q, k, v = Shape().tensors()
    default = cute_attn.fp8_attention(q, k, v, backend="emulator")
    assert torch.equal(default, cute_attn.fp8_attention(q, k, v, recipe="accurate", backend="emulator"))
    assert torch.equal(default, cute_attn.fp8_attention(q, k, v, recipe=Fp8Recipe(), backend="emulator"))


@pytest.mark.parametrize("recipe", ["naive", "accurate"])
def test_quantize_is_the_reference(recipe: str) -> None:
    q, k, v = Shape(seqlen_q=5, seqlen_k=70).tensors(FP16)
    made = cute_attn.quantize(q, k, v, recipe, backend="emulator")
    expected = quantize_reference(q, k, v, PRESETS[recipe])
    for field in dataclasses.fields(QuantizedQKV):
        got, want = getattr(made, field.name), getattr(expected, field.name)
        if isinstance(want, Tensor):
            assert got.dtype == want.dtype and torch.equal(got.float(), want.float())
        else:
            assert got == want


@pytest.mark.parametrize("in_dtype", [BF16, FP16])
@pytest.mark.parametrize("out_dtype", [None, BF16, FP16])
def test_shapes_and_dtypes(in_dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    q, k, v = Shape(batch=2, seqlen_q=5, seqlen_k=70, heads_q=6, heads_k=3).tensors(in_dtype)
    out, lse = cute_attn.fp8_attention(q, k, v, out_dtype=out_dtype, return_lse=True, backend="emulator")
    assert out.shape == q.shape and out.dtype == (out_dtype or in_dtype) and out.is_contiguous()
    assert lse.shape == (2, 6, 5) and lse.dtype == torch.float32
    alone = cute_attn.fp8_attention(q, k, v, out_dtype=out_dtype, backend="emulator")
    assert isinstance(alone, Tensor) and torch.equal(alone, out)
    codes = cute_attn.quantize(q, k, v, backend="emulator")
    prepared = cute_attn.fp8_attention_quantized(codes, out_dtype=out_dtype, backend="emulator")
    assert torch.equal(prepared, out)


# Rotation is the quantiser's matter, tested there for every head_dim.
UNROTATED = [dataclasses.replace(PRESETS[name], rotation="none") for name in ("fp8", "accurate")]


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(32, 0), (48, 0), (80, 96), (112, 64), (192, 128), (208, 0), (64, 256)]
)
def test_head_dims(head_dim: int, head_dim_v: int) -> None:
    shape = Shape(2, 17, 130, 4, 2, head_dim, head_dim_v)
    q, k, v = shape.tensors()
    for causal, recipe in zip((False, True), UNROTATED, strict=True):
        options = {"causal": causal, "return_lse": True, "backend": "emulator"}
        out, lse = cute_attn.fp8_attention(q, k, v, recipe=recipe, **options)
        assert out.shape == (2, 17, 4, head_dim_v or head_dim) and lse.shape == (2, 4, 17)
        exact, exact_lse = attention(q, k, v, causal=causal)
        assert rms(out - exact) <= TOTAL_ERROR[recipe.name] * rms(exact)
        assert (lse - exact_lse).abs().max() <= LSE_ERROR[recipe.name]
        codes = cute_attn.quantize(q, k, v, recipe, backend="emulator")
        parts = cute_attn.fp8_attention_quantized(codes, **options)
        assert torch.equal(parts[0], out) and torch.equal(parts[1], lse)
    q8, k8, v8 = (x.to(E4M3) for x in (q, k, v))
    out = cute_attn.flash_attn_fp8_func(q8, k8, v8, backend="emulator")
    exact = attention(q8, k8, v8, return_lse=False)
    assert out.shape == exact.shape and rms(out - exact) <= P_ERROR["code"] * rms(exact)


def test_padding_with_zeros_is_what_the_refusal_says() -> None:
    """head_dim 72 of q and k, 40 of v: padded to 80 and 48, with the scale of 72."""
    q, k, v = (x.to(E4M3) for x in Shape(1, 17, 130, 2, 1, 72, 40).tensors())
    with pytest.raises(ValueError, match=r"pad to is 80: .* softmax_scale=1/sqrt\(72\)"):
        cute_attn.flash_attn_fp8_func(q, k, v, backend="emulator")
    wide = [
        torch.nn.functional.pad(x.view(torch.uint8), (0, 8)).view(E4M3) for x in (q, k, v)
    ]  # a zero byte is e4m3's zero
    with pytest.raises(ValueError, match=r"head_dim of v is 40; .* pad to is 48: "):
        cute_attn.flash_attn_fp8_func(*wide[:2], v, backend="emulator")
    out = cute_attn.flash_attn_fp8_func(*wide, softmax_scale=72**-0.5, backend="emulator")
    exact = attention(q, k, v, return_lse=False)
    assert rms(out[..., :40] - exact) <= P_ERROR["code"] * rms(exact)
    assert bool((out[..., 40:] == 0).all())


def test_few_queries_of_many_heads_are_packed() -> None:
    """The plan packs their rows, and the result is that of the heads by themselves."""
    q, k, v = Shape(seqlen_q=3, seqlen_k=150, heads_q=16, heads_k=2).tensors()
    for causal in (False, True):
        assert cute_attn.explain(q, k, v, causal=causal).config.pack_gqa == 8
        out, lse = cute_attn.fp8_attention(q, k, v, causal=causal, return_lse=True, backend="emulator")
        k_all, v_all = k.repeat_interleave(8, dim=2), v.repeat_interleave(8, dim=2)
        assert cute_attn.explain(q, k_all, v_all, causal=causal).config.pack_gqa == 1
        alone, alone_lse = cute_attn.fp8_attention(
            q, k_all, v_all, causal=causal, return_lse=True, backend="emulator"
        )
        one_ulp(out, alone)
        torch.testing.assert_close(lse, alone_lse, rtol=1e-5, atol=1e-5)


def test_query_heads_share_key_heads_in_groups() -> None:
    q, k, v = Shape(seqlen_q=40, seqlen_k=90, heads_q=6, heads_k=2).tensors()
    grouped, grouped_lse = cute_attn.fp8_attention(q, k, v, return_lse=True, backend="emulator")
    k_all, v_all = k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2)
    single, single_lse = cute_attn.fp8_attention(q, k_all, v_all, return_lse=True, backend="emulator")
    one_ulp(grouped, single)
    torch.testing.assert_close(grouped_lse, single_lse, rtol=1e-5, atol=1e-5)


def test_causal_is_bottom_right() -> None:
    """Each row equals full attention to the keys that it may see."""
    q, k, v = Shape(seqlen_q=7, seqlen_k=4, heads_q=1, heads_k=1).tensors()
    out, lse = cute_attn.fp8_attention(
        q, k, v, recipe="naive", causal=True, return_lse=True, backend="emulator"
    )
    assert bool((out[:, :3] == 0).all()) and bool((lse[:, :, :3] == -math.inf).all())
    codes = cute_attn.quantize(q, k, v, "naive", backend="emulator")
    for row in range(3, 7):
        dq, dk, dv = codes.dequantize()
        keys = row - 2
        alone, alone_lse = attention(dq[:, row : row + 1], dk[:, :keys], dv[:, :keys], return_lse=True)
        assert rms(out[:, row : row + 1] - alone) <= 2.0**-4 * dv.abs().max()
        torch.testing.assert_close(
            lse[:, :, row].double(), alone_lse[:, :, 0], rtol=0, atol=LSE_ERROR["naive"]
        )
    # One key has one weight, whatever its rounding.
    torch.testing.assert_close(out[0, 3, 0].double(), dv[0, 0, 0], rtol=2.0**-8, atol=0)


def test_one_causal_query_sees_all_keys() -> None:
    q, k, v = Shape(seqlen_q=1, seqlen_k=300).tensors()
    masked = cute_attn.fp8_attention(q, k, v, causal=True, return_lse=True, backend="emulator")
    full = cute_attn.fp8_attention(q, k, v, causal=False, return_lse=True, backend="emulator")
    assert torch.equal(masked[0], full[0]) and torch.equal(masked[1], full[1])


def fused_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one (batch, seqlen, 3, heads, head_dim) tensor."""
    return torch.stack((q, k, v), dim=2).unbind(dim=2)  # type: ignore[return-value]


def head_major(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transposed views of (batch, heads, seqlen, head_dim) tensors."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))  # type: ignore[return-value]


def wide_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of rows that are longer, from an offset that is no multiple of 16 bytes."""

    def view(x: Tensor) -> Tensor:
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 6), math.nan)
        wide[..., 3:-3] = x
        return wide[..., 3:-3]

    return view(q), view(k), view(v)


@pytest.mark.parametrize("view", [fused_qkv, head_major, wide_rows])
@pytest.mark.parametrize("recipe", ["naive", "accurate"])
def test_strides_do_not_matter(view: Callable[..., tuple[Tensor, Tensor, Tensor]], recipe: str) -> None:
    tensors = Shape(batch=2, seqlen_q=70, seqlen_k=70).tensors()
    views = view(*tensors)
    assert all(x.stride(-1) == 1 and not x.is_contiguous() for x in views)
    for causal in (False, True):
        contiguous, strided = (
            cute_attn.fp8_attention(*x, recipe=recipe, causal=causal, return_lse=True, backend="emulator")
            for x in (tensors, views)
        )
        assert torch.equal(contiguous[0], strided[0]) and torch.equal(contiguous[1], strided[1])


def test_expanded_batch() -> None:
    q, k, v = Shape(seqlen_q=5, seqlen_k=9).tensors()
    alone = cute_attn.fp8_attention(q, k, v, backend="emulator")
    many = cute_attn.fp8_attention(*(x.expand(3, -1, -1, -1) for x in (q, k, v)), backend="emulator")
    for one in many.split(1):
        one_ulp(one, alone)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("recipe", list(PRESETS))
def test_bad_values_stay_visible(name: str, bad: float, recipe: str) -> None:
    """One bad element of head 1: outputs that depend on it become NaN, never something plausible."""
    tensors = dict(zip("qkv", Shape(seqlen_q=40, seqlen_k=40).tensors(), strict=True))
    tensors[name][0, 3, 1, 5] = bad
    out = cute_attn.fp8_attention(**tensors, recipe=recipe, backend="emulator")
    rows = out[0, 3, 1] if name == "q" else out[0, :, 1]
    assert bool(rows.isnan().all())
    whole_tensor = getattr(PRESETS[recipe], f"{name}_scale") == "tensor"
    assert bool(out[0, :, 0].isnan().any()) == whole_tensor


def test_grad_mode_and_inference_mode_leave_results_alone() -> None:
    q, k, v = Shape(seqlen_q=5, seqlen_k=9).tensors()
    plain = cute_attn.fp8_attention(q, k, v, backend="emulator")
    with torch.inference_mode():
        assert torch.equal(cute_attn.fp8_attention(q, k, v, backend="emulator"), plain)


# ------------------------------------------------------------------------------------------------------------
# e4m3 tensors that exist already
# ------------------------------------------------------------------------------------------------------------


def test_fp8_tensors_with_descales() -> None:
    q, k, v = (x.to(E4M3) for x in Shape(batch=2, seqlen_q=130, seqlen_k=257, heads_q=4).tensors())
    descales = {name: torch.rand(2, 2) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    for causal in (False, True):
        out, lse = cute_attn.flash_attn_fp8_func(
            q, k, v, causal=causal, **descales, return_lse=True, backend="emulator"
        )
        assert out.dtype == BF16 and out.shape == q.shape and lse.shape == (2, 4, 130)
        heads = {
            name: x.repeat_interleave(2, dim=1)[:, None, :, None].double() for name, x in descales.items()
        }
        exact, exact_lse = attention(
            q.double() * heads["q_descale"],
            k.double() * descales["k_descale"][:, None, :, None].double(),
            v.double() * descales["v_descale"][:, None, :, None].double(),
            causal=causal,
            return_lse=True,
        )
        assert rms(out - exact) <= P_ERROR["code"] * rms(exact)
        assert (lse - exact_lse).abs().max() <= LSE_ERROR["accurate"]


def test_fp8_descales_default_to_one_and_may_be_expanded() -> None:
    q, k, v = (x.to(E4M3) for x in Shape(batch=2, seqlen_q=9, seqlen_k=17).tensors())
    plain = cute_attn.flash_attn_fp8_func(q, k, v, backend="emulator")
    one = torch.ones(1).expand(2, 2)
    assert torch.equal(
        plain, cute_attn.flash_attn_fp8_func(q, k, v, None, False, one, one, one, backend="emulator")
    )
    doubled = cute_attn.flash_attn_fp8_func(q, k, v, v_descale=2 * one, backend="emulator")
    assert torch.equal(doubled, 2 * plain)


def test_fp8_positional_arguments_are_those_of_flash_attention_3() -> None:
    q, k, v = (x.to(E4M3) for x in Shape(seqlen_q=9, seqlen_k=17).tensors())
    positional = cute_attn.flash_attn_fp8_func(q, k, v, 0.2, True, backend="emulator")
    named = cute_attn.flash_attn_fp8_func(q, k, v, softmax_scale=0.2, causal=True, backend="emulator")
    assert torch.equal(positional, named)
    assert cute_attn.flash_attn_fp8_func(q, k, v, out_dtype=FP16, backend="emulator").dtype == FP16


# ------------------------------------------------------------------------------------------------------------
# Nothing to compute
# ------------------------------------------------------------------------------------------------------------

EMPTY = [
    Shape(batch=0),
    Shape(seqlen_q=0),
    Shape(seqlen_k=0),
    Shape(seqlen_q=0, seqlen_k=0),
    Shape(batch=0, seqlen_k=0, heads_q=4, head_dim=256),
    Shape(seqlen_k=0, head_dim=128, head_dim_v=96),
]


@pytest.mark.parametrize("shape", EMPTY, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("causal", [False, True])
def test_empty(shape: Shape, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = shape.tensors()
    codes = {recipe: cute_attn.quantize(q, k, v, recipe) for recipe in PRESETS}

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("there is nothing to compute")

    monkeypatch.setattr("cute_attn.emulator.emulate_forward", fail)
    results = [cute_attn.fp8_attention(q, k, v, causal=causal, return_lse=True)]
    results += [cute_attn.fp8_attention_quantized(x, causal=causal, return_lse=True) for x in codes.values()]
    e4m3 = [x.to(E4M3) for x in (q, k, v)]
    results += [cute_attn.flash_attn_fp8_func(*e4m3, causal=causal, return_lse=True)]
    for out, lse in results:
        assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == BF16 and bool((out == 0).all())
        assert lse.shape == (shape.batch, shape.heads_q, shape.seqlen_q) and lse.dtype == torch.float32
        assert bool((lse == -math.inf).all())


# ------------------------------------------------------------------------------------------------------------
# Warnings
# ------------------------------------------------------------------------------------------------------------


def test_auto_says_once_that_it_chose_the_emulator() -> None:
    q, k, v = Shape(seqlen_q=1, seqlen_k=1).tensors()
    e4m3 = [x.to(E4M3) for x in (q, k, v)]
    codes = cute_attn.quantize(q, k, v)
    for call in (
        lambda: cute_attn.fp8_attention(q, k, v),
        lambda: cute_attn.fp8_attention_quantized(codes),
        lambda: cute_attn.flash_attn_fp8_func(*e4m3),
    ):
        tracing._said.clear()
        with pytest.warns(
            UserWarning, match=r"the emulator .* not on an NVIDIA GPU.* backend='emulator'"
        ) as caught:
            call()
        assert caught[0].filename == __file__, "the warning names the caller's line"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


def test_the_emulator_is_silent_where_it_was_asked_for() -> None:
    q, k, v = Shape(seqlen_q=1, seqlen_k=1).tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cute_attn.fp8_attention(q, k, v, backend="emulator")
        cute_attn.quantize(q, k, v)
        cute_attn.explain(q, k, v)


# ------------------------------------------------------------------------------------------------------------
# explain
# ------------------------------------------------------------------------------------------------------------


def test_explain_plans_what_the_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = Shape(seqlen_k=77, heads_q=4).tensors()
    seen: dict[str, Any] = {}
    emulator = importlib.import_module("cute_attn.emulator")
    real = emulator.emulate_forward

    def spy(qkv: QuantizedQKV, **options: Any) -> tuple[Tensor, Tensor]:
        seen.update(options, recipe=qkv.recipe)
        return real(qkv, **options)

    monkeypatch.setattr(emulator, "emulate_forward", spy)
    for recipe in ("paper", "accurate"):
        plan = cute_attn.explain(q, k, v, recipe=recipe, causal=True, out_dtype=FP16, backend="emulator")
        cute_attn.fp8_attention(q, k, v, recipe=recipe, causal=True, out_dtype=FP16, backend="emulator")
        assert seen == {
            "window": (-1, 0),
            "softcap": 0.0,
            "alibi_slopes": None,
            "sinks": None,
            "softmax_scale": 0.125,
            "tile_m": plan.config.tile_m,
            "tile_n": plan.config.tile_n,
            "pack_gqa": plan.config.pack_gqa,
            "check_keys": plan.config.check_keys,
            "out_dtype": FP16,
            "recipe": plan.recipe,
        }


def test_explain_of_prepared_operands() -> None:
    q, k, v = Shape(seqlen_k=77, heads_q=4).tensors()
    codes = cute_attn.quantize(q, k, v, "paper")
    plan = cute_attn.explain(codes, causal=True)
    whole = cute_attn.explain(q, k, v, recipe="paper", causal=True)
    v_wide = torch.cat((v, v), dim=3)
    wide = cute_attn.explain(cute_attn.quantize(q, k, v_wide, "paper"), causal=True)
    assert wide.config == cute_attn.explain(q, k, v_wide, recipe="paper", causal=True).config
    assert (wide.config.head_dim, wide.config.head_dim_v) == (64, 128)
    assert plan.config == whole.config and plan.recipe == whole.recipe == PRESETS["paper"]
    assert plan.quantize_config is None and whole.quantize_config is not None
    assert cute_attn.explain(codes, recipe="paper", causal=True) is plan


def test_explain_accepts_inputs_that_require_grad() -> None:
    q, k, v = Shape(seqlen_q=1).tensors()
    assert cute_attn.explain(q.requires_grad_(), k, v).backend == "emulator"


# ------------------------------------------------------------------------------------------------------------
# What reaches a launch, without a GPU
# ------------------------------------------------------------------------------------------------------------


class Launches:
    """Stands for launch.py on a Hopper GPU that is not there; remembers what is prepared and called."""

    def __init__(self) -> None:
        self.prepared: list[tuple[Any, ...]] = []
        self.attention: list[tuple[Any, ...]] = []
        self.quantize: list[tuple[Any, ...]] = []
        self.rotary: list[Any] = []  # of every call from 16-bit tensors
        self.forward: list[tuple[QuantizedQKV, Any, float]] = []
        self.transpose: list[tuple[Tensor, Any]] = []
        self.codes: QuantizedQKV | None = None

    def new_attention(self, *about: Any) -> Callable[..., Any]:
        self.prepared.append(about)

        def call(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, rotary: Any, *side: Any) -> Any:
            self.rotary.append(rotary)
            assert side == (None, None)
            self.attention.append((q, k, v, *about[2:-2]))
            return (q, q) if return_lse else q

        return call

    def new_quantiser(self, shape_q: Any, shape_k: Any, recipe: Fp8Recipe, config: Any, device: Any) -> Any:
        self.prepared.append((shape_q, shape_k, recipe, config, device))

        class Quantiser:
            def __call__(
                quantiser, q: Tensor, k: Tensor, v: Tensor, k_mean: Any, rotary: Any
            ) -> QuantizedQKV:
                self.rotary.append(rotary)
                assert k_mean is None
                self.quantize.append((q, k, v, recipe, config))
                return quantize_reference(q, k, v, recipe) if self.codes is None else self.codes

            def operands(quantiser, workspace: QuantizedQKV, dtype: torch.dtype) -> QuantizedQKV:
                return workspace

        return Quantiser()

    def new_forward(
        self, shape_out: Any, shape_k: Any, config: Any, softmax_scale: float, device: Any, features: Any
    ) -> Callable[..., Any]:
        self.prepared.append((shape_out, shape_k, config, softmax_scale, device))

        def call(qkv: QuantizedQKV, *side: Any) -> tuple[Tensor, Tensor]:
            assert side == (None, None)
            assert tuple(shape_out) == (*qkv.q.shape[:3], qkv.vt.shape[2]) and shape_k == qkv.k.shape
            self.forward.append((qkv, config, softmax_scale))
            return qkv.q, qkv.q_scale

        return call

    def launch_transpose_v(self, v: Tensor, config: Any) -> Tensor:
        self.transpose.append((v, config))
        return permute_v(v)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    fake = Launches()
    monkeypatch.setattr("cute_attn.problem.device_capability", lambda device: (9, 0))
    monkeypatch.setattr(api, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr("cute_attn.launch.Attention", fake.new_attention)
    monkeypatch.setattr("cute_attn.launch.Quantiser", fake.new_quantiser)
    monkeypatch.setattr("cute_attn.launch.Forward", fake.new_forward)
    monkeypatch.setattr("cute_attn.launch.launch_transpose_v", fake.launch_transpose_v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no word of the emulator
        yield fake


@pytest.mark.parametrize("backend", ["auto", "sm90"])
@pytest.mark.parametrize("causal", [False, True])
def test_sm90_launches_the_plan(launches: Launches, backend: str, causal: bool) -> None:
    q, k, v = Shape(seqlen_k=77, heads_q=4).tensors()
    options = {"recipe": "paper", "causal": causal, "out_dtype": FP16, "backend": backend}
    plan = cute_attn.explain(q, k, v, **options)
    assert plan.backend == "sm90" and plan.kernel == plan.config.name
    cute_attn.fp8_attention(q, k, v, softmax_scale=0.3, **options)
    assert launches.attention == [(q, k, v, PRESETS["paper"], plan.quantize_config, plan.config, 0.3)]
    assert plan.config.causal == causal and plan.config.out_dtype == "fp16"


def test_sm90_takes_prepared_operands_as_they_are(launches: Launches) -> None:
    q, k, v = Shape(seqlen_q=1, seqlen_k=77).tensors()
    codes = cute_attn.quantize(q, k, v)
    cute_attn.fp8_attention_quantized(codes, causal=True)
    assert launches.forward[0][0] is codes
    assert launches.forward[0][1].causal is False
    assert launches.forward[0][2] == 64**-0.5

    e4m3 = [x.to(E4M3) for x in (q, k, v)]
    cute_attn.flash_attn_fp8_func(*e4m3)
    assert launches.forward[1][0].q is e4m3[0] and launches.forward[1][0].k is e4m3[1]
    assert len(launches.quantize) == 1


@pytest.mark.parametrize("backend", ["auto", "sm90"])
def test_sm90_transposes_ready_v_on_the_device(launches: Launches, backend: str) -> None:
    q, k, v = (x.to(E4M3) for x in Shape(batch=2, seqlen_q=9, seqlen_k=77, head_dim=128).tensors())
    cute_attn.flash_attn_fp8_func(q, k, v, backend=backend)
    ((given, config),) = launches.transpose
    assert config == transpose_config(128) and given is v
    qkv = launches.forward[0][0]
    assert torch.equal(qkv.vt.float(), permute_v(v).float())
    cute_attn.flash_attn_fp8_func(q, k, v, backend="emulator")
    assert len(launches.transpose) == len(launches.forward) == 1


def test_sm90_launches_nothing_for_empty_inputs(launches: Launches) -> None:
    for shape in EMPTY:
        q, k, v = shape.tensors()
        cute_attn.fp8_attention(q, k, v)
        cute_attn.fp8_attention_quantized(cute_attn.quantize(q, k, v))
        cute_attn.flash_attn_fp8_func(*(x.to(E4M3) for x in (q, k, v)))
    assert not launches.prepared and not launches.transpose


def test_sm90_prepares_a_call_once(launches: Launches) -> None:
    """And again for whatever the launch depends on: shapes, dtypes, options; not for strides and addresses."""
    q, k, v = Shape(batch=2, seqlen_q=17, seqlen_k=17).tensors()

    def calls() -> list[Callable[[], object]]:
        attend, codes = cute_attn.fp8_attention, cute_attn.quantize(q, k, v)
        attend_codes = cute_attn.fp8_attention_quantized
        return [
            lambda: attend(q, k, v),
            lambda: attend(q, k, v, causal=True),
            lambda: attend(q, k, v, softmax_scale=0.5),
            lambda: attend(q, k, v, softmax_scale=1.0),
            lambda: attend(q, k, v, recipe="fp8"),
            lambda: attend(q, k, v, out_dtype=FP16),
            lambda: attend(q[:, :16], k, v),
            lambda: attend(q, k[:, :, :1], v[:, :, :1]),
            lambda: attend(*(x.half() for x in (q, k, v))),
            lambda: cute_attn.quantize(q, k, v, "fp8"),
            lambda: attend_codes(codes),
            lambda: attend_codes(codes, causal=True),
            lambda: attend_codes(codes, softmax_scale=0.5),
            lambda: attend_codes(codes, out_dtype=FP16),
        ]

    for call in calls():
        before = len(launches.prepared)
        for _ in range(3):
            call()
        assert len(launches.prepared) == before + 1
    before = len(launches.prepared)
    for call in calls():
        call()
    cute_attn.fp8_attention(*head_major(q, k, v), return_lse=True)
    assert len(launches.prepared) == before


@pytest.mark.parametrize(
    "bad", [{"causal": 1}, {"softmax_scale": True}, {"recipe": "none"}, {"backend": "gpu"}]
)
def test_sm90_refuses_what_only_compares_equal(launches: Launches, bad: dict[str, Any]) -> None:
    """1 == True, and both hash to the same."""
    q, k, v = Shape(seqlen_q=5, seqlen_k=9).tensors()
    good = {"causal": True, "softmax_scale": 1.0}
    codes = cute_attn.quantize(q, k, v)
    cute_attn.fp8_attention(q, k, v, **good)
    cute_attn.fp8_attention_quantized(codes, **good)
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        cute_attn.fp8_attention(q, k, v, **good | bad)
    if "recipe" not in bad:
        with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
            cute_attn.fp8_attention_quantized(codes, **good | bad)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_sm90_refuses_gradients_in_every_call(launches: Launches, name: str) -> None:
    tensors = dict(zip("qkv", Shape(seqlen_q=5, seqlen_k=9).tensors(), strict=True))
    cute_attn.quantize(**tensors)
    wanting = tensors | {name: tensors[name].clone().requires_grad_()}
    with pytest.raises(NotImplementedError, match=f"{name} requires grad"):
        cute_attn.quantize(**wanting)
    with torch.no_grad():
        cute_attn.quantize(**wanting)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", ["naive", "paper", "fp8", "accurate"])
def test_the_default_dtype_changes_nothing(recipe: str, dtype: torch.dtype) -> None:
    """Loaders of models set torch's default dtype for a while."""
    q, k, v = Shape(seqlen_q=130, seqlen_k=300).tensors()

    def call() -> tuple[Tensor, Tensor]:
        return cute_attn.fp8_attention(
            q, k, v, recipe=recipe, causal=True, return_lse=True, backend="emulator"
        )

    out, lse = call()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        out_there, lse_there = call()
    finally:
        torch.set_default_dtype(before)
    assert out_there.dtype == out.dtype and torch.equal(out_there, out)
    assert lse_there.dtype == lse.dtype and torch.equal(lse_there, lse)


class CountOps(TorchDispatchMode):
    """Counts the torch operations that are dispatched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_host_path_runs_no_torch_operation(launches: Launches) -> None:
    """Validation and planning read attributes: an operation costs microseconds, perhaps even a wait."""
    q, k, v = Shape(seqlen_k=77).tensors()
    launches.codes = codes = cute_attn.quantize(q, k, v)
    for _ in range(2):  # before and after the plan is known
        with CountOps() as ops:
            cute_attn.fp8_attention(q, k, v, return_lse=True)
            cute_attn.fp8_attention_quantized(codes, return_lse=True)
            cute_attn.explain(q, k, v)
        assert ops.count == 0
    assert len(launches.attention) == len(launches.forward) == 2


def test_remembered_calls_are_bounded(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api._calls, "limit", 8)
    x = torch.zeros(1, 40, 1, 64, dtype=BF16)
    for seqlen in range(1, 41):
        cute_attn.fp8_attention(x[:, :seqlen], x, x)
        assert launches.prepared[-1][0][1] == seqlen
        assert len(api._calls) <= 8


# ------------------------------------------------------------------------------------------------------------
# On the GPU
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("recipe", ["naive", "paper", "fp8", "accurate"])
def test_gpu_against_float64(recipe: str, shape: Shape, causal: bool) -> None:
    q, k, v = shape.tensors(device="cuda")
    assert cute_attn.explain(q, k, v, recipe=recipe, causal=causal).backend == "sm90"
    out, lse = cute_attn.fp8_attention(q, k, v, recipe=recipe, causal=causal, return_lse=True)
    exact, exact_lse = attention(q, k, v, causal=causal, return_lse=True)
    assert rms(out - exact) <= TOTAL_ERROR[recipe] * rms(exact)
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("view", [fused_qkv, head_major, wide_rows])
def test_gpu_strides_do_not_matter(view: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    tensors = Shape(batch=2, seqlen_q=70, seqlen_k=70).tensors(device="cuda")
    contiguous, strided = (
        cute_attn.fp8_attention(*x, causal=True, return_lse=True) for x in (tensors, view(*tensors))
    )
    assert torch.equal(contiguous[0], strided[0]) and torch.equal(contiguous[1], strided[1])


@pytest.mark.gpu
def test_gpu_fp8_tensors() -> None:
    q, k, v = (x.to(E4M3) for x in Shape(seqlen_q=130, seqlen_k=257, heads_q=4).tensors(device="cuda"))
    out = cute_attn.flash_attn_fp8_func(q, k, v)
    exact = attention(q, k, v, return_lse=False)
    assert rms(out - exact) <= P_ERROR["code"] * rms(exact)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["naive", "accurate"])
def test_gpu_repeated_calls(recipe: str) -> None:
    """A call that is ready gives what the first one gave, holds no memory, and looks at its tensors anew."""
    q, k, v = Shape(batch=2, seqlen_q=70, seqlen_k=133, heads_q=4).tensors(device="cuda")

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return cute_attn.fp8_attention(*tensors, recipe=recipe, return_lse=True)

    first = call(q, k, v)
    before = torch.cuda.memory_allocated()
    for given in ((q, k, v), head_major(q, k, v), wide_rows(q, k, v)):
        out, lse = call(*given)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])
        assert torch.equal(cute_attn.fp8_attention(*given, recipe=recipe), first[0])
        del given, out, lse
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(TypeError, match=r"k has dtype torch\.float16; allowed: that of q"):
        call(q, k.half(), v)
    with pytest.raises(ValueError, match="v is on device cpu"):
        call(q, k, v.cpu())
    codes = cute_attn.quantize(q, k, v, recipe)
    for _ in range(2):
        out, lse = cute_attn.fp8_attention_quantized(codes, return_lse=True)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


@pytest.mark.gpu
def test_gpu_that_is_not_current() -> None:
    """The compiled functions make the device of their tensors current, and the old one again."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = Shape(seqlen_q=70, seqlen_k=133).tensors(device="cuda:0")
    want = cute_attn.fp8_attention(*tensors, return_lse=True)
    there = [x.to("cuda:1") for x in tensors]
    with torch.cuda.device(0):
        for _ in range(2):
            out, lse = cute_attn.fp8_attention(*there, return_lse=True)
            assert torch.cuda.current_device() == 0 and out.device == lse.device == there[0].device
            assert torch.equal(out.cpu(), want[0].cpu()) and torch.equal(lse.cpu(), want[1].cpu())
        codes = cute_attn.quantize(*there)
        assert torch.equal(cute_attn.fp8_attention_quantized(codes).cpu(), want[0].cpu())
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v"])
def test_gpu_device_mismatch(name: str) -> None:
    tensors = dict(zip("qkv", Shape(seqlen_q=5, seqlen_k=9).tensors(device="cuda"), strict=True))
    tensors[name] = tensors[name].cpu()
    with pytest.raises(ValueError, match=f"{name} is on device cpu; allowed: that of q, cuda:0"):
        cute_attn.fp8_attention(**tensors)


# ------------------------------------------------------------------------------------------------------------
# Rotary position embedding
# ------------------------------------------------------------------------------------------------------------


def angles(seqlen: int, pairs: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    turn = torch.arange(seqlen)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    return turn.cos().to(dtype), turn.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_is_that_of_embedded_tensors(interleaved: bool) -> None:
    q, k, v = Shape(seqlen_q=65, seqlen_k=130).tensors()
    cos, sin = angles(200, 16)
    out = cute_attn.fp8_attention(
        q,
        k,
        v,
        causal=True,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        backend="emulator",
    )

    def embedded(x: Tensor, first: int) -> Tensor:
        """By complex numbers: column pair i of a row at position j turns by its angle."""
        pairs = x[..., :32].double()
        pairs = (
            pairs.unflatten(-1, (16, 2)) if interleaved else pairs.unflatten(-1, (2, 16)).transpose(-1, -2)
        )
        rows = slice(first, first + x.shape[1])
        turn = torch.complex(cos[rows].double(), sin[rows].double())[:, None]
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
        return torch.cat((turned, x[..., 32:].double()), dim=-1)

    want, _ = attention(embedded(q, 65), embedded(k, 0), v, causal=True, softmax_scale=q.shape[3] ** -0.5)
    assert (out.double() - want).pow(2).mean().sqrt() < 0.05 * want.pow(2).mean().sqrt()
    without = cute_attn.fp8_attention(q, k, v, causal=True, backend="emulator")
    assert (without.double() - want).pow(2).mean().sqrt() > 0.2 * want.pow(2).mean().sqrt()


def test_rotary_embedding_reaches_the_launch(launches: Launches) -> None:
    q, k, v = Shape().tensors()
    cos, sin = angles(k.shape[1], 8)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    cute_attn.fp8_attention(q, k, v, **rotary)  # type: ignore[call-overload]
    cute_attn.fp8_attention(q, k, v)
    cute_attn.quantize(q, k, v, rotary_interleaved=True, **rotary)  # type: ignore[arg-type]
    assert [None if x is None else (x.cos is cos, x.sin is sin, x.interleaved) for x in launches.rotary] == [
        (True, True, False),
        None,
        (True, True, True),
    ]
    assert [
        config.rotary for about in launches.prepared for config in about if hasattr(config, "rotary")
    ] == [
        "half",
        "none",
        "interleaved",
    ]
    plan = cute_attn.explain(q, k, v, **rotary)  # type: ignore[arg-type]
    assert "rotary_half" in str(plan)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rotary_sin": None}, ValueError, "rotary_cos is given and rotary_sin is None"),
        ({"rotary_cos": None, "rotary_sin": None, "rotary_interleaved": True}, ValueError, "allowed: False"),
        ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved is 1; allowed: a bool"),
        ({"rotary_cos": 3}, TypeError, "rotary_cos is a int; allowed: a torch.Tensor"),
        ({"rotary_sin": torch.zeros(200, 8)}, TypeError, "rotary_sin has dtype torch.float32"),
        ({"rotary_cos": torch.zeros(3, 8, dtype=torch.bfloat16)}, ValueError, r"rotary_cos is \(3, 8\)"),
    ],
)
def test_rotary_arguments_are_checked_in_every_call(
    launches: Launches, known: bool, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v = Shape().tensors()
    cos, sin = angles(k.shape[1], 8)
    good = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    for function in (cute_attn.fp8_attention, cute_attn.quantize):
        if known:
            function(q, k, v, **good)  # type: ignore[operator]
        before = len(launches.rotary)
        with pytest.raises(error, match=message):
            function(q, k, v, **{**good, **change})  # type: ignore[operator]
        assert len(launches.rotary) == before
    with pytest.raises(error, match=message):
        cute_attn.explain(q, k, v, **{**good, **change})  # type: ignore[arg-type]


def test_gradients_of_rotary_tables_are_refused(launches: Launches) -> None:
    q, k, v = Shape().tensors()
    cos, sin = angles(k.shape[1], 8)
    with pytest.raises(NotImplementedError, match="rotary_cos"):
        cute_attn.fp8_attention(q, k, v, rotary_cos=cos.requires_grad_(), rotary_sin=sin)
