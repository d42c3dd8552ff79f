"""What the launches hand to the compiled kernels, with the kernels left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import launch
from cute_attn.kernels.config import K_SCALE_PAD, QUANTIZE_ROWS_LIMIT
from cute_attn.plan import forward_config, quantize_config
from cute_attn.quantize import PRESETS, from_fp8

SHAPE = (2, 130, 333, 4, 2, 64)  # batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of each call of a compiled kernel; nothing runs."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "compile_kernel", lambda config: lambda *args: found.append(args))
    monkeypatch.setattr(launch, "_on", lambda device: nullcontext())
    yield found


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim = SHAPE
    q = torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, seqlen_k, heads_k, head_dim, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["naive", "accurate"])
def test_dtypes_of_the_arguments(name: str, default: torch.dtype, calls: list[tuple[Any, ...]]) -> None:
    """Side tensors are float32 and operands one byte, whatever torch's default dtype is."""
    q, k, v = inputs()
    recipe = PRESETS[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        qkv = launch.launch_quantize(q, k, v, recipe, quantize_config(recipe, 64, 64, "bf16"))
        config = forward_config(64, 64, recipe.qk_dtype, True, recipe.p_rounding, "bf16")
        options = {"causal": True, "softmax_scale": 0.125, "out_dtype": torch.bfloat16}
        launch.launch_forward(qkv, config, **options)
    finally:
        torch.set_default_dtype(before)
    code = torch.int8 if recipe.qk_dtype == "int8" else torch.float8_e4m3fn
    operands = [code, code, torch.float8_e4m3fn]
    quantizing, forward = calls
    f32 = torch.float32
    *quantizing, chunk, count = quantizing
    assert [x.dtype for x in quantizing] == [torch.bfloat16] * 3 + [f32] * 5 + operands + [f32] * 4
    assert (chunk, count) == (
        (64, 21) if recipe.smooth_k else (0, 1)
    )  # 21 of 333 keys are samples: one chunk
    assert [x.dtype for x in forward[:9]] == [*operands, *[f32] * 4, torch.bfloat16, f32]


@pytest.mark.parametrize("given", [False, True])
def test_what_the_mean_key_is_made_of(given: bool, calls: list[tuple[Any, ...]]) -> None:
    """Room for the sums of the chunks, or the mean itself as the only sum of one sample."""
    q, k, v = inputs()
    k = k.repeat(1, 40, 1, 1)  # 13320 keys: 833 samples in 14 chunks
    v = v.repeat(1, 40, 1, 1)
    recipe = PRESETS["accurate"]
    mean = torch.randn(2, 2, 64, dtype=torch.float32) if given else None
    launch.launch_quantize(q, k, v, recipe, quantize_config(recipe, 64, 64, "bf16"), k_mean=mean)
    (args,) = calls
    sums, chunk, count = args[4], *args[-2:]
    if mean is None:
        assert (sums.shape, chunk, count) == ((2, 14, 2, 64), 64, 833)
    else:
        assert torch.equal(sums, mean.unsqueeze(1)) and (chunk, count) == (0, 1)


def test_rows_of_k_scales_are_readable_to_the_pad(calls: list[tuple[Any, ...]]) -> None:
    """The forward kernel loads up to K_SCALE_PAD scales at once: 333 keys are 6 groups, in rows of 8."""
    q, k, v = inputs()
    recipe = PRESETS["accurate"]
    qkv = launch.launch_quantize(q, k, v, recipe, quantize_config(recipe, 64, 64, "bf16"))
    qkv.k_scale.fill_(1.0)  # no kernel has
    assert launch._padded_rows(qkv.k_scale) is qkv.k_scale  # the quantiser's own are never copied
    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    k_descale = torch.tensor([[0.5, 2.0], [3.0, 0.25]], dtype=torch.float32)
    expanded = from_fp8(*codes, None, k_descale, None).k_scale
    for scales in (expanded, torch.rand(1, 1, 1), torch.rand(2, 3, 7), torch.rand(2, 3, 8), qkv.k_scale):
        padded = launch._padded_rows(scales)
        batch, heads, groups = padded.shape
        assert torch.equal(padded, scales) and padded.stride(2) == 1
        assert padded.stride(0) % K_SCALE_PAD == 0 and padded.stride(1) % K_SCALE_PAD == 0
        width = -(-groups // K_SCALE_PAD) * K_SCALE_PAD
        end = (
            padded.storage_offset() + (batch - 1) * padded.stride(0) + (heads - 1) * padded.stride(1) + width
        )
        assert end <= padded.untyped_storage().nbytes() // 4


@pytest.mark.parametrize("name", ["q", "k"])
def test_sequences_past_the_grid_are_refused(name: str, calls: list[tuple[Any, ...]]) -> None:
    config, recipe = quantize_config(PRESETS["default"], 64, 64, "bf16"), PRESETS["default"]
    rows = {"q": 1, "k": 1} | {name: QUANTIZE_ROWS_LIMIT + 1}
    q, k = (torch.empty(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, rows[x], 1, 64) for x in "qk")
    with pytest.raises(ValueError, match=f"{name} has 33553921 rows; the quantiser takes at most 33553920"):
        launch.launch_quantize(q, k, k, recipe, config)
    assert not calls
