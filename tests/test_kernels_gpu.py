"""The compiled kernels on a Hopper GPU, against float64 and against their two references in torch.

The quantiser must equal `quantize_reference` bit for bit. The forward kernel must be as near to float64
attention on its own quantised operands as the emulator is. Outputs are poisoned before every launch: what a
kernel does not write stays NaN (or a code that it cannot produce), so that each test also shows that every
element is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from poison import PoisonedTorch, poison_memory
from rounding_bounds import check_lse, error_ratio
from torch import Tensor

import cute_attn
from cute_attn import Fp8Recipe, QuantizedQKV, emulator, launch
from cute_attn.kernels.config import FwdConfig, QuantizeConfig
from cute_attn.quantize import PRESETS, Rotary, mean_key, permute_v, quantize_reference
from cute_attn.reference import attention
from cute_attn.tiles import forward_config, quantize_config, transpose_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPE_NAMES = {BF16: "bf16", FP16: "fp16"}
HEAD_DIMS = (64, 128, 256)
# (head_dim, head_dim_v): of the quantiser's widths, between them, and unlike ones. Where V's is the wider, a pass of
# the rows of Q and K holds several scales.
QUANTISER_DIMS = (
    *((d, d) for d in (32, 48, 64, 80, 96, 112, 128, 160, 192, 208, 240, 256)),
    (64, 80),
    (64, 256),
    (96, 48),
    (128, 176),
    (192, 128),
    (256, 32),
)
# (head_dim, rotary_dim)
ROTARY_DIMS = ((32, 32), (64, 16), (80, 32), (128, 128), (192, 64), (208, 208), (256, 128))
RECIPES = ("naive", "paper", "fp8", "accurate")
ROTATED = ("paper", "accurate")  # scales of blocks in e4m3, of tokens in int8 beside a mean key
BY_CODE = {"int8": "code", "e4m3": "half"}  # how the presets have P made
RECIPE_OF = {
    ("int8", "code"): PRESETS["accurate"],
    ("e4m3", "half"): PRESETS["fp8"],
    # scales of whole heads want e4m3's full range, and scores in float32
    ("e4m3", "code"): replace(PRESETS["fp8"], name="heads", q_scale="head", k_scale="head"),
}
PLAIN = {
    qk: Fp8Recipe(f"plain_{qk}", qk_dtype=qk, rotation="none", smooth_k=False)  # type: ignore[arg-type]
    for qk in BY_CODE
}

# Relative rms error of the output that rounding P by code leaves at most, and the largest error of lse, where
# one key has all the weight: half a step of its e4m3 code (both derived in test_api.py and tests/cases).
P_ERROR = 3.35e-2
FEW_KEYS_ERROR = 4.5e-2  # the same where half a dozen keys have all the weight, over a few thousand values
P_STEP = 0.086
# Largest error of lse by the least number of visible keys, whose errors average out: a third above what the
# emulator has on the shapes below.
LSE_ERROR = {128: 3e-2, 500: 1.5e-2}
# Likewise of scores in float16, above an emulator that cuts them off after every 32 columns, as the tensor core may.
HALF_LSE_ERROR = {128: 3e-2, 500: 1.8e-2}

# batch, seqlen_q, seqlen_k, heads_q, heads_k
Shape = tuple[int, int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, 1, 1, 1, 1),
    (2, 200, 333, 4, 2),
    (1, 300, 100, 2, 1),
    (1, 130, 1000, 6, 2),
)
FORWARD_SHAPES: tuple[Shape, ...] = (
    *SHAPES,
    (1, 1, 257, 8, 1),
    (2, 128, 512, 3, 3),
    (1, 257, 64, 2, 2),
    (1, 65, 63, 8, 1),
    (3, 129, 129, 1, 1),
)


# ------------------------------------------------------------------------------------------------------------
# Compilation ahead, poison, comparisons
# ------------------------------------------------------------------------------------------------------------

FORWARD = [
    forward_config(d, d, qk, causal, rounding, "bf16")
    for d in HEAD_DIMS
    for qk, rounding in BY_CODE.items()
    for causal in (False, True)
]
FORWARD.append(forward_config(64, 64, "e4m3", True, "half", "bf16", seqlen_k=4096))  # tiles of 128 rows
FORWARD += [
    forward_config(d, d, "e4m3", causal, "code", "bf16")
    for d, causal in zip(HEAD_DIMS, (False, True, False), strict=True)
]
# The same in clusters of two CTAs, where plans take them.
CLUSTERED = [replace(config, cluster=2) for config in FORWARD if config.head_dim > 64]
# Widths between those, and unlike ones; operands of Q K^T take turns.
FORWARD_DIMS = (*((d, d) for d in (32, 48, 80, 96, 112, 160, 208, 240)), (192, 128), (64, 256))
OF_TURN = [("e4m3", "half"), ("int8", "code")]
FORWARD_OF_DIMS = [
    forward_config(*dims, qk, causal, rounding, "bf16", cluster=1 + turn % 2)
    for turn, dims in enumerate(FORWARD_DIMS)
    for causal in (False, True)
    for qk, rounding in (OF_TURN[(turn + causal) % 2],)
]
# Query heads of a key head in the rows of a tile, by class of tiles and at widths between.
PACKED = [
    forward_config(*dims, qk, causal, rounding, "bf16", pack_gqa=group)
    for turn, (group, dims) in enumerate(
        [
            (2, (64, 64)),
            (4, (128, 128)),
            (8, (64, 64)),
            (8, (192, 128)),
            (16, (256, 256)),
            (64, (128, 128)),
            (64, (80, 80)),
        ]
    )
    for causal in (False, True)
    for qk, rounding in (OF_TURN[(turn + causal) % 2],)
]
PACKED += [replace(config, cluster=2) for config in PACKED if config.head_dim in (128, 192)]
BY_EXP2 = [
    forward_config(64, 64, qk, False, p, "bf16")
    for qk, p in (("e4m3", "ex2"), ("e4m3", "cast"), ("int8", "ex2"))
]
FP16_OUT = forward_config(128, 128, "int8", True, "code", "fp16")
QUANTISERS = [
    quantize_config(PRESETS[name], *dims, "bf16")
    for name in RECIPES
    for dims in QUANTISER_DIMS
    if name in ROTATED or dims[0] in HEAD_DIMS
]
QUANTISER_FP16 = quantize_config(PRESETS["accurate"], 64, 64, "fp16")
ROTARIES = [
    replace(quantize_config(PRESETS[name], d, d, "bf16"), rotary=kind)
    for name in ROTATED
    for d, _ in ROTARY_DIMS
    for kind in ("half", "interleaved")
]
TRANSPOSES = [transpose_config(d) for d in (32, 48, 64, 80, 96, 128, 160, 176, 208, 256)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch, launch)


def test_poison_is_nan() -> None:
    for dtype in (torch.float32, BF16, FP16, E4M3):
        assert bool(PoisonedTorch().empty((2, 3), dtype=dtype, device=DEVICE).float().isnan().all())
    assert bool((PoisonedTorch().empty((2, 3), dtype=torch.int8, device=DEVICE) == -128).all())


def tensors(
    shape: Shape, head_dim: int, dtype: torch.dtype = BF16, head_dim_v: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) q, k, v."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
    q, k, v = (
        torch.randn(batch, s, h, d, device=DEVICE).to(dtype)
        for s, h, d in (
            (seqlen_q, heads_q, head_dim),
            (seqlen_k, heads_k, head_dim),
            (seqlen_k, heads_k, head_dim_v or head_dim),
        )
    )
    return q, k, v


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """Whether (out, lse) agree to the bit."""
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# ------------------------------------------------------------------------------------------------------------
# Quantiser
# ------------------------------------------------------------------------------------------------------------


def check_quantiser(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Fp8Recipe,
    *,
    k_mean: Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Kernels against the reference, each with its own mean key where none is given: equal bits."""
    config = quantize_config(recipe, q.shape[3], v.shape[3], DTYPE_NAMES[q.dtype])
    if rotary is None:
        want = quantize_reference(q, k, v, recipe, k_mean=k_mean)
    else:
        config = replace(config, rotary="interleaved" if rotary.interleaved else "half")
        tables = {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin}
        want = quantize_reference(
            q, k, v, recipe, k_mean=k_mean, **tables, rotary_interleaved=rotary.interleaved
        )
    got = launch.launch_quantize(q, k, v, recipe, config, k_mean=k_mean, rotary=rotary)
    for name in ("q", "k", "vt"):
        x, y = getattr(got, name), getattr(want, name)
        assert x.dtype == y.dtype and x.shape == y.shape, name
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
    for name in ("q_scale", "k_scale", "v_scale"):
        x, y = getattr(got, name), getattr(want, name)
        assert x.dtype == y.dtype and x.shape == y.shape, name
        assert torch.equal(x.isnan(), y.isnan()), name
        x, y = (s.masked_fill(s.isnan(), 0.0).contiguous().view(torch.int32) for s in (x, y))
        assert torch.equal(x, y), name
    if want.q_dot_mean is None:
        assert got.q_dot_mean is None
    else:
        assert got.q_dot_mean is not None
        # float32 sums in another order: the bound is that of the terms, which may cancel
        mean = mean_key(k, rotary) if k_mean is None else k_mean
        rows = q if rotary is None else rotary.embed(q, k.shape[1] - q.shape[1])
        terms = rows.double() * mean.repeat_interleave(q.shape[2] // k.shape[2], dim=1).unsqueeze(1)
        exact, size = (x.sum(dim=-1).transpose(1, 2) for x in (terms, terms.abs()))
        assert torch.equal(got.q_dot_mean.isfinite(), want.q_dot_mean.isfinite())
        off = (got.q_dot_mean - exact).abs() > q.shape[3] * 2.0**-24 * size + 1e-30
        assert not bool((off & want.q_dot_mean.isfinite()).any())
    assert (got.seqlen_k, got.recipe, got.dtype) == (want.seqlen_k, want.recipe, want.dtype)


@pytest.mark.parametrize(
    ("name", "dims"),
    [(name, dims) for name in RECIPES for dims in QUANTISER_DIMS if name in ROTATED or dims[0] in HEAD_DIMS],
)
def test_quantiser(name: str, dims: tuple[int, int]) -> None:
    for shape in (*SHAPES, (1, 513, 512, 3, 3)):
        for gain in (1.0, 300.0):
            inputs = tensors(shape, dims[0], head_dim_v=dims[1])
            check_quantiser(*(gain * x for x in inputs), PRESETS[name])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (64, 256), (192, 128)])
def test_quantiser_with_more_rows_of_a_cta(dims: tuple[int, int]) -> None:
    """So many CTAs that QUANTIZE_SPAN is halved once, and not at all; the other tests have it halved twice."""
    from cute_attn.kernels.any.quantize import FULL, Quantize  # imports the DSL

    full = FULL * Quantize(quantize_config(PRESETS["accurate"], *dims, "bf16")).ctas_per_sm
    for halved in (1, 0):
        heads = full // (2 << halved) // 5 * 4 + 4  # a quarter more with those of K; over two spans
        inputs = tensors((1, 600, 1000, heads, heads // 4), dims[0], head_dim_v=dims[1])
        check_quantiser(*inputs, PRESETS["accurate"])


@pytest.mark.parametrize("head_dim", (*HEAD_DIMS, 48, 96, 208))
def test_mean_key_of_the_kernel(head_dim: int) -> None:
    """Sums over one chunk and many, of one step and several; and a given mean, which is none of K's own."""
    for seqlen_k in (1, 16, 17, 1024, 1025, 4000, 16384, 16385, 50000):
        q, k, v = tensors((2, 3, seqlen_k, 2, 1), head_dim)
        check_quantiser(q, k + 3.0, v, PRESETS["accurate"])
    q, k, v = tensors((2, 130, 333, 4, 2), head_dim)
    given = torch.randn(2, head_dim, 2, device=DEVICE).transpose(1, 2)
    check_quantiser(q, k, v, PRESETS["fp8"], k_mean=given)


def test_quantiser_of_fp16() -> None:
    for shape in SHAPES:
        check_quantiser(*tensors(shape, 64, FP16), PRESETS["accurate"])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", RECIPES)
def test_quantiser_of_strided_tensors(name: str, head_dim: int) -> None:
    """A slice of a fused qkv tensor, and heads before the sequence."""
    fused = torch.randn(2, 133, 8, head_dim, device=DEVICE).to(BF16)
    check_quantiser(fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:], PRESETS[name])
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(SHAPES[1], head_dim))
    assert q.stride(2) > q.stride(1)
    check_quantiser(q, k, v, PRESETS[name])


@pytest.mark.parametrize("dims", [*((d, d) for d in HEAD_DIMS), (48, 256), (192, 80)])
@pytest.mark.parametrize("name", RECIPES)
def test_quantiser_of_zeros_and_non_finite_values(name: str, dims: tuple[int, int]) -> None:
    recipe, shape, (head_dim, head_dim_v) = PRESETS[name], (2, 200, 600, 4, 2), dims
    q, k, v = tensors(shape, head_dim, head_dim_v=head_dim_v)
    q[:, 5], q[0, 128:], k[:, 64:128], v[0, :256], v[1, 256:] = 0.0, 0.0, 0.0, 0.0, 0.0
    check_quantiser(q, k, v, recipe)
    check_quantiser(*(torch.zeros_like(x) for x in (q, k, v)), recipe)
    check_quantiser(*(torch.full_like(x, 2.0**-120) for x in (q, k, v)), recipe)  # below the floor of amax
    # Key 130 is none of those that the mean key is made of, so that one group is spoilt and not the head.
    q[0, 3, 1, 7], q[1, 199, 0, 0] = math.nan, math.inf
    k[0, 130, 0, 3], k[1, 599, 1, head_dim - 1] = math.nan, -math.inf
    v[0, 300, 1, 1], v[1, 5, 0, head_dim_v - 1] = math.inf, math.nan
    check_quantiser(q, k, v, recipe)


def rotary_tables(seqlen: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype = BF16) -> Rotary:
    """cos and sin as models make them."""
    frequencies = 10000.0 ** (-torch.arange(rotary_dim // 2, device=DEVICE) / (rotary_dim // 2))
    phase = torch.arange(seqlen, device=DEVICE)[:, None] * frequencies
    return Rotary(phase.cos().to(dtype), phase.sin().to(dtype), interleaved)


@pytest.mark.parametrize("kind", ["half", "interleaved"])
@pytest.mark.parametrize("dims", ROTARY_DIMS)
@pytest.mark.parametrize("name", ROTATED)
def test_quantiser_with_rotary_embedding(name: str, dims: tuple[int, int], kind: str) -> None:
    """All columns and some of them; as many queries as keys, fewer, one; zeros and values that are not finite."""
    head_dim, rotary_dim = dims
    for shape in ((1, 1, 1, 1, 1), (2, 200, 333, 4, 2), (1, 1, 700, 6, 2), (1, 1300, 1300, 3, 3)):
        rotary = rotary_tables(shape[2] + 5, rotary_dim, kind == "interleaved")
        q, k, v = tensors(shape, head_dim)
        check_quantiser(q, k + 3.0, v, PRESETS[name], rotary=rotary)
        q[:, -1], k[:, :64] = 0.0, 0.0
        check_quantiser(q, k, v, PRESETS[name], rotary=rotary)
        if shape[2] > 300:
            # Neither in a sampled key nor in the first rows. A column past rotary_dim has no partner to spoil.
            q[0, -1, 0, head_dim - 1], k[0, -1, 0, head_dim - 1] = math.nan, -math.inf
            q[0, shape[1] // 2, 0, 3], k[0, shape[2] // 2 | 1, 0, 9] = math.inf, math.nan
            check_quantiser(q, k, v, PRESETS[name], rotary=rotary)


def test_rotary_embedding_of_fp16_with_many_keys_and_wide_tables() -> None:
    """A mean key of many chunks; tables that are columns of a wider one; a mean that is given."""
    for seqlen_k in (1025, 16385, 40000):
        wide = rotary_tables(seqlen_k, 192, False, FP16)
        rotary = Rotary(wide.cos[:, 16:80], wide.sin[:, 32:96], False)
        q, k, v = tensors((2, 70, seqlen_k, 4, 2), 128, FP16)
        check_quantiser(q, k + 1.0, v, PRESETS["accurate"], rotary=rotary)
    given = torch.randn(2, 2, 128, device=DEVICE)
    check_quantiser(q, k, v, PRESETS["accurate"], k_mean=given, rotary=rotary)


@pytest.mark.parametrize("config", TRANSPOSES, ids=lambda config: config.name)
def test_transpose_of_ready_codes(config: QuantizeConfig) -> None:
    for batch, seqlen, heads in ((1, 1, 1), (2, 333, 3), (1, 512, 2), (1, 257, 1)):
        v = torch.randint(0, 256, (batch, seqlen, 2 * heads, config.head_dim_v), device=DEVICE)
        v = v.to(torch.uint8)[:, :, heads:].view(E4M3)
        got = launch.launch_transpose_v(v, config)
        assert torch.equal(got.view(torch.uint8), permute_v(v).view(torch.uint8))


# ------------------------------------------------------------------------------------------------------------
# Forward kernel
# ------------------------------------------------------------------------------------------------------------


def attend(qkv: QuantizedQKV, config: FwdConfig) -> tuple[Tensor, Tensor]:
    """(out, lse) of the compiled kernel of `config`."""
    return launch.launch_forward(
        qkv,
        config,
        causal=config.causal,
        softmax_scale=config.head_dim**-0.5,
        out_dtype=BF16 if config.out_dtype == "bf16" else FP16,
    )


def exact_attention(
    qkv: QuantizedQKV, causal: bool, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Float64 (out, lse) on what the operands stand for; lse with the share of the mean key."""
    scale = qkv.q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = attention(*qkv.dequantize(), causal=causal, softmax_scale=scale)
    if qkv.q_dot_mean is not None:
        lse = lse + qkv.q_dot_mean.double() * scale
    return out, lse


def emulate(qkv: QuantizedQKV, config: FwdConfig, accumulator: str = "fp32") -> tuple[Tensor, Tensor]:
    """What the kernel of `config` should give, up to the order of sums."""
    return emulator.emulate_forward(
        qkv,
        causal=config.causal,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        check_keys=config.check_keys,
        out_dtype=BF16 if config.out_dtype == "bf16" else FP16,
        pack_gqa=config.pack_gqa,
        accumulator=accumulator,  # type: ignore[arg-type]
    )


def check_forward(qkv: QuantizedQKV, config: FwdConfig, *, accumulator: str = "fp32") -> float:
    """Kernel against float64 and, for how far from it, against the emulator. Returns the relative rms error.

    Bounds are those of rounding_bounds.py: 1.1 times the emulator's error, and more where e4m3 has few rows. What is
    added serves where that is zero.
    """
    out, lse = attend(qkv, config)
    exact, exact_lse = exact_attention(qkv, config.causal)
    emulated, emulated_lse = emulate(qkv, config, accumulator)
    where = f"{tuple(qkv.q.shape)} x {qkv.seqlen_k} keys"
    assert out.shape == exact.shape and lse.shape == exact_lse.shape and lse.dtype == torch.float32
    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty), where
    assert bool((out.transpose(1, 2)[empty] == 0).all()), where
    assert bool(out.isfinite().all()) and bool(lse[~empty].isfinite().all()), where

    error, of_emulator = (rms(x - exact) / rms(exact) for x in (out, emulated))
    bound = error_ratio(config.qk_dtype, lse.numel()) * of_emulator + 1e-5
    assert error <= bound, f"{where}: {error:.3e} against {of_emulator:.3e}"

    rows = torch.arange(out.shape[1], device=out.device) + (qkv.seqlen_k - out.shape[1] + 1)
    keys = rows.clamp(max=qkv.seqlen_k) if config.causal else torch.full_like(rows, qkv.seqlen_k)
    keys = keys.expand_as(lse)
    doubled = exact_attention(qkv, config.causal, 2 * config.head_dim**-0.5)[1]
    check_lse(lse, emulated_lse, exact_lse, doubled, config.qk_dtype, where, half=config.half_scores)
    lse_errors = (lse - exact_lse)[~empty].abs()
    for least, allowed in (HALF_LSE_ERROR if config.half_scores else LSE_ERROR).items():
        many = lse_errors[keys[~empty] >= least]
        assert many.numel() == 0 or many.max().item() <= allowed, f"{where}: lse of {least} keys and more"
    return error


def operands(shape: Shape, config: FwdConfig, recipe: Fp8Recipe | None = None) -> QuantizedQKV:
    """N(0, 1) tensors of the widths of `config`, quantised by `recipe`, or by the preset of its operands."""
    q, k, v = tensors(shape, config.head_dim, head_dim_v=config.head_dim_v)
    return quantize_reference(q, k, v, recipe or recipe_of(config))


def recipe_of(config: FwdConfig) -> Fp8Recipe:
    """The preset of its operands, or the recipe of a user whose plans take `config`."""
    if config.by_code:
        return RECIPE_OF[config.qk_dtype, config.p_rounding]
    preset = RECIPE_OF[config.qk_dtype, BY_CODE[config.qk_dtype]]
    return replace(preset, name="custom", p_rounding=config.p_rounding)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [*FORWARD, *CLUSTERED, *FORWARD_OF_DIMS], ids=lambda config: config.name)
def test_forward(config: FwdConfig) -> None:
    for shape in FORWARD_SHAPES:
        check_forward(operands(shape, config), config)


@pytest.mark.parametrize("config", PACKED, ids=lambda config: config.name)
def test_forward_of_packed_heads(config: FwdConfig) -> None:
    """Few queries in a part of a tile, groups across tiles, and more queries than keys."""
    group = config.pack_gqa
    for seqlen_q, seqlen_k in ((1, 1), (1, 333), (3, 333), (17, 64), (100, 333), (100, 40)):
        for heads_k in (1, 3):
            check_forward(operands((2, seqlen_q, seqlen_k, group * heads_k, heads_k), config), config)


@pytest.mark.parametrize("config", PACKED[:4], ids=lambda config: config.name)
def test_packs_of_a_part_of_the_heads(config: FwdConfig) -> None:
    """Three packs to a key head: the group is no power of two."""
    heads = 3 * config.pack_gqa
    for seqlen_q, seqlen_k in ((1, 333), (100, 333), (100, 40)):
        check_forward(operands((2, seqlen_q, seqlen_k, 2 * heads, 2), config), config)


@pytest.mark.parametrize("config", PACKED[:4], ids=lambda config: config.name)
def test_many_packed_tiles(config: FwdConfig) -> None:
    """More tiles than SMs: each CTA takes several, of other heads and batch entries."""
    check_forward(operands((3, 300, 300, 12 * config.pack_gqa, 12), config), config)


@pytest.mark.parametrize("sms", [2, 6, 30])
@pytest.mark.parametrize("config", [*FORWARD, *CLUSTERED, *PACKED[-4:]], ids=lambda config: config.name)
def test_few_ctas_take_many_tiles(config: FwdConfig, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who computes a tile, and after which others, changes no bit of it; nor does the order of work."""
    group = config.pack_gqa
    for seqlen_q, seqlen_k, heads_k in ((300, 300, 5), (1000, 700, 3), (130, 1500, 2)):
        qkv = operands((2, seqlen_q, seqlen_k, group * heads_k, heads_k), config)
        expected = attend(qkv, config)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "_sms", lambda device: sms)
            for turn in (1, 2, 3, 16):
                patch.setattr(launch, "heads_in_turn", lambda *about, turn=turn: turn)
                assert same(attend(qkv, config), expected), (seqlen_q, seqlen_k, turn)


@pytest.mark.parametrize("config", BY_EXP2, ids=lambda config: config.name)
def test_forward_by_exp2(config: FwdConfig) -> None:
    """P by exp2, and "cast": without the power of two that keeps P out of e4m3's subnormal numbers."""
    for shape in FORWARD_SHAPES:
        check_forward(operands(shape, config), config)


def test_forward_to_fp16() -> None:
    for shape in SHAPES:
        qkv = quantize_reference(*tensors(shape, FP16_OUT.head_dim, FP16), PRESETS["accurate"])
        check_forward(qkv, FP16_OUT)
        assert attend(qkv, FP16_OUT)[0].dtype == FP16


@pytest.mark.parametrize("config", [*FORWARD, *FORWARD_OF_DIMS, *PACKED[:2]], ids=lambda config: config.name)
def test_forward_with_other_scales_and_strides(config: FwdConfig) -> None:
    """Scales of stride 0, which is how one for a whole tensor is held; operands inside wider tensors."""
    recipe = replace(recipe_of(config), name="custom", v_scale="head")
    if config.half_scores:
        recipe = replace(recipe, q_scale="block", k_block=128)
    else:
        recipe = replace(recipe, q_scale="tensor", k_scale="tensor")
    qkv = operands((2, 200, 333, 4, 2), config, recipe)
    check_forward(qkv, config)
    q, k, vt = (torch.cat([x.view(torch.uint8)] * 2, dim=2) for x in (qkv.q, qkv.k, qkv.vt))
    wider = replace(
        qkv,
        q=q[:, :, 4:].view(qkv.q.dtype),
        k=k[:, :, :2].view(qkv.k.dtype),
        vt=vt[:, :, config.head_dim_v :].view(E4M3),
    )
    assert same(attend(wider, config), attend(qkv, config))


JUMPS: dict[str, list[int]] = {
    # octaves of the groups of 64 keys; the last keys are visited first
    "rises by tile": [900] * 4 + [400] * 4 + [0] * 4 + [-700] * 4,
    "falls by tile": [-700] * 4 + [0] * 4 + [400] * 4 + [900] * 4,
    "rises by group": list(range(800, -800, -100)),
    "to and fro": [700, -800, 500, -300, 800, 100, -600, 300, 0, 600, -700, -100, 750, -200, 200, -500],
    "one tile far below": [0] * 15 + [-900],
}


@pytest.mark.parametrize("jump", list(JUMPS))
@pytest.mark.parametrize("config", [*FORWARD, *CLUSTERED], ids=lambda config: config.name)
def test_rows_whose_reference_jumps(config: FwdConfig, jump: str) -> None:
    """Logits hundreds of octaves apart, in opposite directions for neighbouring rows, for some not at all."""
    d = config.head_dim
    q, k, v = tensors((1, 130, 1024, 2, 1), d)
    if config.qk_dtype == "e4m3":  # the tensor core would cut small products beside those of the jumps
        q[..., 1:], k[..., 1:] = 0.0, 0.0
    direction = torch.tensor([8.0, -8.0, 0.0, 4.0], device=DEVICE).repeat(33)[:130]
    q[..., 0] = direction[:, None].to(BF16)
    octaves = torch.tensor(JUMPS[jump], dtype=torch.float32, device=DEVICE).repeat_interleave(64)
    k[0, :, 0, 0] = (octaves * math.log(2.0) * math.sqrt(d) / 8.0).to(BF16)
    qkv = quantize_reference(q, k, v, PLAIN[config.qk_dtype])
    out, lse = attend(qkv, config)
    exact, exact_lse = exact_attention(qkv, config.causal)
    for row in range(4):  # each direction by itself: one that is wrong must not hide behind the others
        assert rms((out - exact)[:, row::4]) <= FEW_KEYS_ERROR * rms(exact[:, row::4]), row
    # int8 products are scaled in float32 beside 1.5 * 2^23: half a unit of the product may be lost. In float16 a score
    # and its unit are each rounded by 2^-11 of their size.
    unit = (qkv.q_scale.max() * qkv.k_scale.max()).item() / math.sqrt(d)
    bound = P_STEP + 1e-3 + unit / 2 + (2.0**-10 * exact_lse.abs() if config.half_scores else 0.0)
    assert bool(((lse - exact_lse).abs() <= bound).all())


@pytest.mark.parametrize("config", [*FORWARD, *CLUSTERED, *PACKED[:2]], ids=lambda config: config.name)
def test_non_finite_input_stays_visible(config: FwdConfig) -> None:
    """Every output that depends on a spoilt scale group is NaN, as in the emulator.

    The others are as before but for ties: a row that must move its reference, as one with NaN always must,
    has its whole warp compute codes by another order of operations.
    """
    recipe, shape = recipe_of(config), (1, 200, 700, 2 * config.pack_gqa, 2)
    for name, where in (("q", (0, 77, 1, 3)), ("k", (0, 130, 0, 5)), ("v", (0, 300, 1, 9))):
        for value in (math.nan, math.inf):
            inputs = dict(zip("qkv", tensors(shape, config.head_dim), strict=True))
            clean = attend(quantize_reference(*inputs.values(), recipe), config)
            inputs[name][where] = value
            qkv = quantize_reference(*inputs.values(), recipe)
            got = attend(qkv, config)
            for x, y, before in zip(got, emulate(qkv, config), clean, strict=True):
                assert torch.equal(x.isnan(), y.isnan()), (name, value)
                fine = ~x.isnan()
                assert rms((x - before)[fine]) <= 1e-2 * rms(before[fine]), (name, value)
            assert bool(got[0].isnan().any()) and not bool(got[0].isnan().all())


# ------------------------------------------------------------------------------------------------------------
# Long context
# ------------------------------------------------------------------------------------------------------------

LONG = [
    ("int8", 128, 4096),
    ("int8", 128, 32768),
    ("int8", 128, 131072),
    ("int8", 128, 524288),
    ("e4m3", 128, 131072),
    ("e4m3", 64, 4096),
    ("e4m3", 64, 524288),
    ("int8", 256, 32768),
]


@pytest.mark.parametrize(("qk_dtype", "head_dim", "keys"), LONG)
def test_long_context(qk_dtype: str, head_dim: int, keys: int) -> None:
    """The tensor core's 8-bit accumulator is reduced in precision: across tiles the sum is float32.

    V of mean 0.5 shows it, since its output does not shrink with the number of keys. There the fair emulator
    is the one with the tensor core's accumulator; it is slow, so the longest has only the absolute bound.
    """
    config = forward_config(head_dim, head_dim, qk_dtype, False, BY_CODE[qk_dtype], "bf16")
    recipe = recipe_of(config)
    q, k, v = tensors((1, 128, keys, 1, 1), head_dim)
    check_forward(quantize_reference(q, k, v, recipe), config)

    qkv = quantize_reference(q, k, v + 0.5, recipe)
    if keys <= 131072:
        error = check_forward(qkv, config, accumulator="hopper")
    else:
        exact, _ = exact_attention(qkv, False)
        error = rms(attend(qkv, config)[0] - exact) / rms(exact)
    assert error <= 5e-3


# ------------------------------------------------------------------------------------------------------------
# Repetition, streams, graphs
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*FORWARD, *CLUSTERED, *PACKED[:2]], ids=lambda config: config.name)
def test_runs_are_bitwise_equal(config: FwdConfig) -> None:
    """Also beside another stream that keeps the GPU busy."""
    qkv = operands((2, 1000, 1000, 8, 4), config)
    first = attend(qkv, config)
    assert all(same(attend(qkv, config), first) for _ in range(5))
    load, side = torch.randn(4096, 4096, device=DEVICE, dtype=BF16), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            load @ load
    results = [attend(qkv, config) for _ in range(5)]
    torch.cuda.synchronize()
    assert all(same(result, first) for result in results)


@pytest.mark.parametrize("recipe", RECIPES)
def test_current_stream(recipe: str) -> None:
    """Kernels run on the stream that is current: behind a slow producer they see what it writes."""
    q, k, v = tensors((1, 512, 512, 8, 8), 128)
    expected = cute_attn.fp8_attention(q, k, v, recipe=recipe, return_lse=True)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles, about 30 ms
        for x, y in zip(late, (q, k, v), strict=True):
            x.copy_(y)
        got = cute_attn.fp8_attention(*late, recipe=recipe, return_lse=True)
    stream.synchronize()
    assert same(got, expected)


def check_graph(run: Callable[[], tuple[Tensor, Tensor]], renew: Callable[[], None]) -> None:
    """A captured `run` replayed after `renew` has overwritten its inputs equals an eager one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    before = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    renew()
    graph.replay()
    torch.cuda.synchronize()
    eager = run()
    assert same(captured, eager)
    assert not torch.equal(eager[0], before[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_graph_of_the_whole_call(recipe: str) -> None:
    inputs = tensors((1, 512, 512, 8, 8), 128)

    def renew() -> None:
        for x in inputs:
            x.copy_(torch.randn(x.shape, device=DEVICE))

    check_graph(lambda: cute_attn.fp8_attention(*inputs, recipe=recipe, causal=True, return_lse=True), renew)


@pytest.mark.parametrize("recipe", ["fp8", "accurate"])
def test_graph_of_a_call_on_prepared_operands(recipe: str) -> None:
    shape = (1, 512, 512, 8, 2)
    qkv = cute_attn.quantize(*tensors(shape, 128), recipe)

    def renew() -> None:
        new = cute_attn.quantize(*tensors(shape, 128), recipe)
        for field in dataclasses.fields(qkv):
            old = getattr(qkv, field.name)
            if isinstance(old, Tensor):
                old.copy_(getattr(new, field.name))

    check_graph(lambda: cute_attn.fp8_attention_quantized(qkv, causal=True, return_lse=True), renew)


# ------------------------------------------------------------------------------------------------------------
# Sizes beyond 16 and 31 bits
# ------------------------------------------------------------------------------------------------------------


def check_heads_alone(q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, ...], recipe: str) -> None:
    """Some heads of a call equal each of them alone. With one key head all query heads share it."""
    out, lse = cute_attn.fp8_attention(q, k, v, recipe=recipe, return_lse=True)
    for head in heads:
        some = slice(head, head + 1)
        keys = some if k.shape[2] > 1 else slice(None)
        alone = cute_attn.fp8_attention(
            q[:, :, some].contiguous(), k[:, :, keys], v[:, :, keys], recipe=recipe, return_lse=True
        )
        assert same((out[:, :, some], lse[:, some]), alone), head


@pytest.mark.parametrize("recipe", ["fp8", "accurate"])
def test_more_heads_than_16_bits(recipe: str) -> None:
    heads = (0, 65535, 65536, 71279)
    check_heads_alone(*tensors((1, 3, 3, 71280, 71280), 64), heads, recipe)


def test_more_batches_than_16_bits() -> None:
    q, k, v = tensors((70000, 2, 3, 1, 1), 64)
    together = cute_attn.fp8_attention(q, k, v, causal=True, return_lse=True)
    for batch in (0, 65535, 65536, 69999):
        some = slice(batch, batch + 1)
        alone = cute_attn.fp8_attention(q[some], k[some], v[some], causal=True, return_lse=True)
        assert same((together[0][some], together[1][some]), alone), batch


def test_more_elements_than_31_bits() -> None:
    """q, its codes and out of 2^31 elements and more: 11 GB, freed at once."""
    heads = 2**22 + 96
    q = torch.randn(1, 8, heads, 64, device=DEVICE, dtype=BF16)
    k, v = torch.randn(2, 1, 70, 1, 64, device=DEVICE, dtype=BF16)
    assert q.numel() > 2**31
    check_heads_alone(q, k, v, (0, 2**21, heads - 97, heads - 1), "accurate")
    del q
    torch.cuda.empty_cache()


@pytest.mark.parametrize("position", [0, 1], ids=["batch", "seqlen"])
def test_strides_beyond_31_bits(position: int) -> None:
    """q, k and v inside buffers of more than 2^31 elements, reached by the stride of batch or of seqlen."""
    shape = (2, 70, 1, 64)
    strides = [(2**31, 64, 64, 1), (64, 2**25, 64, 1)][position]
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    assert size > 2**31
    buffer = torch.empty(size, device=DEVICE, dtype=BF16)
    far = buffer.as_strided(shape, strides)
    near = torch.randn(shape, device=DEVICE).to(BF16)
    far.copy_(near)
    got, expected = (cute_attn.fp8_attention(x, x, x, causal=True, return_lse=True) for x in (far, near))
    assert same(got, expected)
    del far, buffer
    torch.cuda.empty_cache()


def test_strides_of_codes_beyond_31_bits() -> None:
    """Operands that a user has, read by TMA where they are: rows 2^25 bytes apart."""
    shape = (2, 70, 1, 128)
    strides = (128, 2**25, 128, 1)
    buffer = torch.empty(1 + 69 * 2**25 + 255, device=DEVICE, dtype=torch.uint8)
    near = torch.randn(shape, device=DEVICE).to(E4M3)
    far = buffer.as_strided(shape, strides)
    far.copy_(near.view(torch.uint8))
    codes = far.view(E4M3)
    got, expected = (cute_attn.flash_attn_fp8_func(x, x, x, return_lse=True) for x in (codes, near))
    assert same(got, expected)
    del far, codes, buffer
    torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------
# Public functions
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [*((d, d) for d in HEAD_DIMS), (96, 96), (192, 128)])
@pytest.mark.parametrize(("seqlen_q", "heads_q"), [(300, 4), (3, 16)], ids=["many queries", "few"])
def test_default_recipe(dims: tuple[int, int], causal: bool, seqlen_q: int, heads_q: int) -> None:
    """Plan, and error against float64 on the 16-bit inputs, within the bounds of test_api.py."""
    q, k, v = tensors((2, seqlen_q, 500, heads_q, 2), dims[0], head_dim_v=dims[1])
    plan = cute_attn.explain(q, k, v, causal=causal)
    mask, of_v = "causal" if causal else "full", "" if dims[0] == dims[1] else f"v{dims[1]}"
    assert plan.backend == "sm90" and "(Hopper)" in plan.reasons[0]
    assert plan.kernel.startswith(f"fwd_sm90_int8_d{dims[0]}{of_v}_{mask}_code_bf16")
    if seqlen_q == 3:
        assert plan.config.pack_gqa == 8 and "in shared tiles" in str(plan)
    out, lse = cute_attn.fp8_attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == (2, seqlen_q, heads_q, dims[1]) and out.dtype == BF16 and out.device == q.device
    exact, exact_lse = attention(q, k, v, causal=causal)
    assert rms(out - exact) <= 4.8e-2 * rms(exact)
    assert (lse - exact_lse).abs().max().item() <= 0.09
    codes = cute_attn.quantize(q, k, v)
    assert same(cute_attn.fp8_attention_quantized(codes, causal=causal, return_lse=True), (out, lse))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fp8_tensors_with_descales(head_dim: int) -> None:
    q, k, v = (x.to(E4M3) for x in tensors((2, 130, 300, 4, 2), head_dim))
    factors = torch.rand(3, 2, 4, device=DEVICE)[:, :, ::2] + 0.5  # (batch, heads_k) each, not contiguous
    q_descale, k_descale, v_descale = factors
    out, lse = cute_attn.flash_attn_fp8_func(
        q, k, v, None, True, q_descale, k_descale, v_descale, return_lse=True
    )
    values = (
        x.double() * y.repeat_interleave(x.shape[2] // 2, dim=1)[:, None, :, None]
        for x, y in ((q, q_descale), (k, k_descale), (v, v_descale))
    )
    exact, exact_lse = attention(*values, causal=True)
    assert rms(out - exact) <= P_ERROR * rms(exact)
    assert (lse - exact_lse).abs().max().item() <= P_STEP + 2e-3
    with pytest.raises(ValueError, match="k_descale is on device cpu"):
        cute_attn.flash_attn_fp8_func(q, k, v, None, True, q_descale, k_descale.cpu(), v_descale)
