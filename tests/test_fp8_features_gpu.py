"""Window, softcap, ALiBi and sinks of the 8-bit forward kernel on a Hopper GPU, against float64 and the emulator.

The bounds are those of test_kernels_gpu.py: the kernel must be as near to float64 attention on its own quantised
operands as the emulator is; rounding_bounds.py has them. Outputs are poisoned before every launch.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from poison import poison_memory
from rounding_bounds import check_agreement, check_lse, doubled_lse, error_ratio, exact_attention
from torch import Tensor

import cute_attn
from cute_attn import QuantizedQKV, emulator, launch
from cute_attn.compile import compile_kernel
from cute_attn.flash import reference
from cute_attn.kernels.config import FwdConfig
from cute_attn.problem import Features
from cute_attn.quantize import PRESETS, quantize_reference
from cute_attn.tiles import forward_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
RECIPE_OF = {"int8": PRESETS["accurate"], "e4m3": PRESETS["fp8"]}

Shape = tuple[int, int, int, int, int]  # batch, seqlen_q, seqlen_k, heads_q (unless packed), heads_k
SHAPES: tuple[Shape, ...] = (
    (1, 1, 1, 1, 1),
    (2, 200, 333, 2, 2),
    (1, 300, 100, 2, 1),
    (1, 130, 1000, 6, 2),
    (1, 1, 257, 3, 1),
    (2, 129, 1300, 3, 3),
)
WINDOWS = ((0, 0), (17, 0), (200, 31), (-1, 40), (100, -1), (600, 300), (5000, 5000))

OTHERS = {"softcap": True, "alibi": True, "sinks": True}
ALL = {"window": True, **OTHERS}
CONFIGS = [
    # one by one
    forward_config(128, 128, "int8", False, "code", "bf16", window=True),
    forward_config(256, 256, "e4m3", False, "half", "bf16", window=True),
    forward_config(64, 64, "e4m3", False, "half", "bf16", window=True, sinks=True),
    forward_config(128, 128, "e4m3", True, "half", "bf16", 1, 2, sinks=True),
    forward_config(128, 128, "int8", True, "code", "bf16", softcap=True),
    forward_config(64, 64, "e4m3", False, "code", "bf16", softcap=True),
    forward_config(128, 128, "e4m3", False, "code", "bf16", alibi=True),
    forward_config(256, 256, "int8", True, "code", "bf16", alibi=True),
    forward_config(128, 128, "int8", False, "code", "bf16", sinks=True),
    # together, by class of tiles
    forward_config(64, 64, "int8", False, "code", "bf16", **ALL),
    forward_config(128, 128, "int8", False, "code", "bf16", **ALL),
    forward_config(256, 256, "int8", False, "code", "bf16", **ALL),
    forward_config(64, 64, "e4m3", False, "code", "bf16", **OTHERS),
    forward_config(128, 128, "int8", True, "code", "bf16", 1, 2, **OTHERS),
    forward_config(256, 256, "int8", False, "code", "bf16", 1, 2, **OTHERS),
    # packed heads, by exp2 and by a cast
    forward_config(192, 128, "int8", False, "code", "bf16", 8, **ALL),
    forward_config(64, 64, "e4m3", True, "code", "bf16", 2, **OTHERS),
    forward_config(128, 128, "e4m3", False, "code", "bf16", 64, **ALL),
    forward_config(128, 128, "e4m3", False, "ex2", "bf16", **ALL),
    forward_config(128, 128, "e4m3", False, "cast", "bf16", **ALL),
]


def compile_one(config: FwdConfig) -> None:
    """Compile into the disk cache. A kernel itself does not travel between processes."""
    compile_kernel(config)


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Kernels compiled side by side. A failure is left to the test that needs the kernel, which compiles it again."""
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_one, config) for config in CONFIGS]:
            future.exception()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch, launch)


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def tensors(shape: Shape, config: FwdConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v; keys have a mean that queries see, so that its share of a score matters, values one, too."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
    d, d_v = config.head_dim, config.head_dim_v
    heads_q = heads_q if config.pack_gqa == 1 else heads_k * config.pack_gqa
    q = torch.randn(batch, seqlen_q, heads_q, d, device=DEVICE) * 1.5 + 0.2
    k = torch.randn(batch, seqlen_k, heads_k, d, device=DEVICE) + torch.randn(d, device=DEVICE)
    v = torch.randn(batch, seqlen_k, heads_k, d_v, device=DEVICE) + 0.5
    return q.to(BF16), k.to(BF16), v.to(BF16)


def operands(shape: Shape, config: FwdConfig) -> QuantizedQKV:
    recipe = RECIPE_OF[config.qk_dtype]
    if not config.by_code:
        recipe = replace(recipe, name="custom", p_rounding=config.p_rounding)  # type: ignore[arg-type]
    return quantize_reference(*tensors(shape, config), recipe)


def features_of(config: FwdConfig, batch: int, heads_q: int) -> dict[str, Any]:
    """Random values of what `config` has, but for the window."""
    options: dict[str, Any] = {}
    if config.softcap:
        options["softcap"] = 8.0
    if config.alibi:
        options["alibi_slopes"] = torch.rand(batch, heads_q, device=DEVICE).square() * 0.3
    if config.sinks:
        options["sinks"] = torch.randn(heads_q, device=DEVICE) * 4
    return options


def attend(qkv: QuantizedQKV, config: FwdConfig, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the compiled kernel of `config`."""
    features = Features(
        options.get("window", (-1, -1)), options.get("softcap", 0.0), config.alibi, config.sinks
    )
    return launch.launch_forward(
        qkv,
        config,
        causal=config.causal,
        softmax_scale=options.get("softmax_scale", config.head_dim**-0.5),
        out_dtype=BF16,
        features=features,
        alibi_slopes=options.get("alibi_slopes"),
        sinks=options.get("sinks"),
    )


def check(
    qkv: QuantizedQKV, config: FwdConfig, *, alike: bool = False, **options: Any
) -> tuple[float, float]:
    """Kernel against float64 and, for how far from it, against the emulator: relative rms errors of both.

    alike: the scores of a row are equal, and so is the rounding of all P, which does not average out: lse is compared
    with the emulator's alone.
    """
    out, lse = attend(qkv, config, **options)
    if config.causal:
        options["window"] = (-1, 0)
    exact, exact_lse = exact_attention(qkv, **options)
    emulated, emulated_lse = emulator.emulate_forward(
        qkv,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        check_keys=config.check_keys,
        out_dtype=BF16,
        pack_gqa=config.pack_gqa,
        **options,
    )
    where = f"{tuple(qkv.q.shape)} x {qkv.seqlen_k} keys, window {options.get('window')}"
    assert out.shape == exact.shape and lse.shape == exact_lse.shape and lse.dtype == torch.float32
    # a row without keys: all that a window hides, with sinks also in lse
    left, right = options.get("window", (-1, -1))
    position = torch.arange(out.shape[1], device=DEVICE) + (qkv.seqlen_k - out.shape[1])
    last = (position + right if right >= 0 else torch.full_like(position, qkv.seqlen_k)).clamp(
        max=qkv.seqlen_k - 1
    )
    empty = last < ((position - left) if left >= 0 else position * 0).clamp(min=0)
    bad = (~out.isfinite()).any(dim=3).any(dim=2) | ~(lse.isfinite().all(dim=1) | empty)
    assert not bool(bad.any()), f"{where}: not finite at {bad.nonzero()[:3].tolist()}"
    assert bool((out[:, empty] == 0).all()), where
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf), where
    error, of_emulator = (rms(x - exact) / max(rms(exact), 1e-30) for x in (out, emulated))
    if error > error_ratio(config.qk_dtype, lse.numel()) * of_emulator + 1e-5:
        off = (out - emulated).abs().amax(dim=3)
        worst_at = (off == off.max()).nonzero()[0].tolist()
        raise AssertionError(
            f"{where}: {error:.3e} against {of_emulator:.3e}, worst at (batch, row, head) {worst_at}"
        )
    about = (lse, emulated_lse, exact_lse, doubled_lse(qkv, options), config.qk_dtype, where)
    if alike:
        check_agreement(*about)
    else:
        check_lse(*about, half=config.half_scores)
    return error, of_emulator


def check_shape(shape: Shape, config: FwdConfig) -> list[tuple[float, float]]:
    """`check` with random features, and with every window where the configuration has one."""
    qkv = operands(shape, config)
    options = features_of(config, *qkv.q.shape[::2])
    if not config.window:
        return [check(qkv, config, **options)]
    return [check(qkv, config, window=window, **options) for window in WINDOWS]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_features(config: FwdConfig) -> None:
    for shape in SHAPES:
        check_shape(shape, config)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_few_ctas_take_many_tiles(config: FwdConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who computes a tile, and after which others, changes no bit of it."""
    check_few_ctas(config, monkeypatch)


def check_few_ctas(config: FwdConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = operands((2, 700, 900, 3, 3), config)
    options = features_of(config, *qkv.q.shape[::2])
    if config.window:
        options["window"] = (150, 20)
    check(qkv, config, **options)
    expected = attend(qkv, config, **options)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_sms", lambda device: 6)
        got = attend(qkv, config, **options)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("qk_dtype", ["int8", "e4m3"])
@pytest.mark.parametrize("softcap", [4.0, 0.5])
def test_scores_at_the_cap(softcap: float, qk_dtype: str) -> None:
    """Hundreds of keys of a row have nearly one score, and one rounding of P: lse is that of the emulator."""
    config = forward_config(128, 128, qk_dtype, False, "code", "bf16", softcap=True)
    qkv, options = operands((2, 700, 900, 3, 3), config), {"softcap": softcap}
    out, lse = attend(qkv, config, **options)
    exact, exact_lse = exact_attention(qkv, **options)
    emulated, emulated_lse = emulator.emulate_forward(
        qkv,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        check_keys=config.check_keys,
        out_dtype=BF16,
        **options,
    )
    assert rms(out - exact) <= error_ratio(qk_dtype, lse.numel()) * rms(emulated - exact) + 1e-5 * rms(exact)
    check_agreement(lse, emulated_lse, exact_lse, doubled_lse(qkv, options), qk_dtype, f"softcap {softcap}")


@pytest.mark.parametrize("softmax_scale", [-0.1, 0.0, 1e-30])
@pytest.mark.parametrize("qk_dtype", ["int8", "e4m3"])
def test_softmax_scale_of_any_sign(qk_dtype: str, softmax_scale: float) -> None:
    for options in ({}, {"softcap": True}):
        rounding = "half" if qk_dtype == "e4m3" and not options else "code"
        config = forward_config(128, 128, qk_dtype, False, rounding, "bf16", **options)
        qkv = operands((1, 200, 333, 2, 1), config)
        # of float32 scores the rounding that equal ones share is within the bound
        alike = config.half_scores and softmax_scale >= 0
        check(qkv, config, alike=alike, softmax_scale=softmax_scale, **features_of(config, 1, 2))


@pytest.mark.parametrize("softmax_scale", [None, -0.1, 0.0])
def test_whole_call(softmax_scale: float | None) -> None:
    """Public functions, against float64 on the 16-bit inputs, within the bounds of test_api.py."""
    config = forward_config(128, 128, "int8", False, "code", "bf16")
    q, k, v = tensors((2, 300, 700, 4, 2), config)
    slopes, sinks = torch.rand(4, device=DEVICE) * 0.1, torch.randn(4, device=DEVICE)
    scale = 128**-0.5 if softmax_scale is None else softmax_scale
    for options in (
        {"window_size": (128, 0)},
        {"softcap": 5.0, "causal": True},
        {"alibi_slopes": slopes, "sinks": sinks, "window_size": (300, 20), "softcap": 10.0},
    ):
        plan = cute_attn.explain(q, k, v, **options)
        out, lse = cute_attn.fp8_attention(
            q, k, v, softmax_scale=softmax_scale, return_lse=True, backend="sm90", **options
        )
        codes = cute_attn.quantize(q, k, v)
        again = cute_attn.fp8_attention_quantized(
            codes, softmax_scale=softmax_scale, return_lse=True, backend="sm90", **options
        )
        given = {name: options[name] for name in ("softcap", "sinks") if name in options}
        if "alibi_slopes" in options:
            given["alibi_slopes"] = slopes.expand(2, 4)
        exact, exact_lse = reference(
            q, k, v, softmax_scale=scale, window=plan.problem.ends, dtype=torch.float64, **given
        )
        for x, y in ((out, lse), again):
            assert rms(x - exact) <= 4.8e-2 * rms(exact), plan.kernel
            assert (y - exact_lse).abs().max().item() <= 0.12, plan.kernel


def test_fp8_tensors() -> None:
    config = forward_config(64, 64, "e4m3", False, "code", "bf16")
    q, k, v = (x.to(E4M3) for x in tensors((2, 300, 700, 4, 2), config))
    out, lse = cute_attn.flash_attn_fp8_func(
        q, k, v, window_size=(200, 10), softcap=6.0, backend="sm90", return_lse=True
    )
    exact, exact_lse = reference(
        q, k, v, softmax_scale=0.125, window=(200, 10), softcap=6.0, dtype=torch.float64
    )
    assert rms(out - exact) <= 3.35e-2 * rms(exact)
    assert (lse - exact_lse).abs().max().item() <= 0.088
    plain = cute_attn.flash_attn_fp8_func(q, k, v, backend="sm90")
    assert torch.equal(
        cute_attn.flash_attn_fp8_func(q, k, v, None, False, None, None, None, (-1, -1), 0.0), plain
    )


@pytest.mark.parametrize("qk_dtype", ["int8", "e4m3"])
def test_rows_without_keys_have_their_sink(qk_dtype: str) -> None:
    rounding = "half" if qk_dtype == "e4m3" else "code"
    config = forward_config(64, 64, qk_dtype, True, rounding, "bf16", sinks=True)
    qkv = operands((1, 200, 60, 2, 2), config)
    sinks = torch.tensor([1.5, -math.inf], device=DEVICE)
    out, lse = attend(qkv, config, sinks=sinks)
    assert bool((out[:, :140] == 0).all())
    assert torch.allclose(lse[0, 0, :140], sinks[0]) and bool((lse[0, 1, :140] == -math.inf).all())
    check(qkv, config, sinks=sinks)


def test_non_finite_input_stays_visible() -> None:
    """Every output that depends on a spoilt scale group is NaN, as in the emulator; tiles outside a window do not."""
    config = forward_config(128, 128, "int8", False, "code", "bf16", **ALL)
    for name, where in (("q", (0, 77, 1, 3)), ("k", (0, 130, 0, 5)), ("v", (0, 300, 1, 9))):
        inputs = dict(zip("qkv", tensors((1, 400, 1500, 2, 2), config), strict=True))
        inputs[name][where] = math.nan
        qkv = quantize_reference(*inputs.values(), RECIPE_OF["int8"])
        options = {"window": (250, 0), **features_of(config, 1, 2)}
        got = attend(qkv, config, **options)
        emulated = emulator.emulate_forward(
            qkv, tile_m=config.tile_m, tile_n=config.tile_n, out_dtype=BF16, **options
        )
        for x, y in zip(got, emulated, strict=True):
            assert torch.equal(x.isnan(), y.isnan()), name
