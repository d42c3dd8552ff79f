"""What the launches hand to the compiled kernels, with the kernels left out."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_memory import HostMemory
from torch import Tensor

from cute_attn import api, launch, memory, problem
from cute_attn.kernels.config import K_SCALE_PAD, QUANTIZE_ROWS_LIMIT, FwdConfig, QuantizeConfig
from cute_attn.kernels.operands import Layout
from cute_attn.quantize import (
    PRESETS,
    Fp8Recipe,
    QuantizedQKV,
    Rotary,
    from_fp8,
    mean_chunks,
    mean_key,
    permute_v,
)
from cute_attn.remember import Remembered
from cute_attn.tiles import forward_config, quantize_config, transpose_config

SHAPE = (2, 130, 333, 4, 2, 64)  # batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PER_HEAD = Fp8Recipe(q_scale="head", k_scale="head", v_scale="head")


def quantiser_of(recipe: Fp8Recipe, head_dim: int = 64) -> QuantizeConfig:
    return quantize_config(recipe, head_dim, head_dim, "bf16")


def forward_of(recipe: Fp8Recipe, head_dim: int = 64) -> FwdConfig:
    return forward_config(head_dim, head_dim, recipe.qk_dtype, True, recipe.p_rounding, "bf16")


class Compiled:
    """Stands for the compiled functions on a GPU that is not there; remembers the arguments of each call.

    Refuses, like them, tensors that are not aligned or not of the dtype planned for.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.looked_up = 0
        self.memory: HostMemory

    def __call__(self, config: Any) -> Callable[..., None]:
        self.looked_up += 1

        def kernel(*args: Any) -> None:
            inputs = [x for x in args[:3] if isinstance(x, Tensor) and x.dim() == 4]
            for x in inputs:
                strides = [s * x.element_size() for s in x.stride()[:-1]]
                if x.dtype in (torch.float16, torch.float32):
                    raise ValueError("Mismatched Tensor")
                if x.data_ptr() % 16 or any(s % 16 for s in strides):
                    raise ValueError("Misaligned Tensor data")
            self.calls.append(args)

        return kernel


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    found = Compiled()
    found.memory = HostMemory(monkeypatch)
    monkeypatch.setattr(launch, "compile_kernel", found)
    monkeypatch.setattr(launch, "_sms", lambda device: 132)
    yield found


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim = SHAPE
    q = torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=BF16)
    k, v = (torch.randn(batch, seqlen_k, heads_k, head_dim, dtype=BF16) for _ in range(2))
    return q, k, v


def attention(recipe: Fp8Recipe, softmax_scale: float = 0.125) -> launch.Attention:
    q, k, _ = inputs()
    configs = quantiser_of(recipe), forward_of(recipe)
    return launch.Attention(q.shape, k.shape, recipe, *configs, softmax_scale, q.device)


# ------------------------------------------------------------------------------------------------------------
# The workspace
# ------------------------------------------------------------------------------------------------------------


def parts(quantiser: launch.Quantiser) -> list[tuple[int, int]]:
    """(first byte, end) of all parts of a workspace."""
    at, config = quantiser.layout, quantiser.config
    batch, heads_q, heads_k = quantiser.batch, quantiser.heads_q, quantiser.heads_k
    found = [
        (at.q, batch * at.q_batch),
        (at.k, batch * at.k_batch),
        (at.vt, batch * at.vt_batch),
        (at.q_scale, 4 * batch * at.q_scale_batch),
        (at.k_scale, 4 * batch * at.k_scale_batch),
        (at.v_scale, 4 * batch * at.v_scale_batch),
        (quantiser.lse, 4 * batch * heads_q * quantiser.seqlen_q),
    ]
    if config.smooth:
        chunks = mean_chunks(quantiser.seqlen_k)[1]
        found.append((at.q_dot, 4 * batch * at.q_dot_batch))
        found.append((at.sums, 4 * batch * chunks * heads_k * config.head_dim))
    return [(first, first + size) for first, size in found]


@pytest.mark.parametrize(
    "shape", [SHAPE, (1, 1, 1, 1, 1, 64), (3, 7, 5000, 6, 3, 128), (1, 40, 16385, 2, 1, 64)]
)
@pytest.mark.parametrize("name", ["naive", "fp8", "accurate"])
def test_parts_of_a_workspace(name: str, shape: tuple[int, ...], compiled: Compiled) -> None:
    """They do not overlap, are aligned and end inside; K's scales are readable to a multiple of K_SCALE_PAD."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim = shape
    recipe = PRESETS[name]
    sizes = (batch, seqlen_q, heads_q), (batch, seqlen_k, heads_k)
    quantiser = launch.Quantiser(*sizes, recipe, quantiser_of(recipe, head_dim), torch.device("cpu"))
    workspace = quantiser._new_workspace()
    found = sorted(parts(quantiser))
    assert found[0][0] == 0 and found[-1][1] <= workspace.numel() < found[-1][1] + 128
    assert all(first % 128 == 0 for first, _ in found)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(found))
    # Nothing is as large as the inputs but the codes.
    codes = batch * (seqlen_q * heads_q + 2 * (seqlen_k + 15) * heads_k) * head_dim
    rows = 4 * batch * (3 * seqlen_q * heads_q + (seqlen_k // 50 + 17 * head_dim + 8) * heads_k)
    assert workspace.numel() <= codes + rows + 9 * 128
    qkv = quantiser.operands(workspace, BF16)
    assert launch._padded_rows(qkv.k_scale) is qkv.k_scale


@pytest.mark.parametrize("name", ["naive", "accurate"])
def test_operands_are_views_of_the_workspace(name: str, compiled: Compiled) -> None:
    q, k, v = inputs()
    recipe = PRESETS[name]
    quantiser = launch.Quantiser(q.shape, k.shape, recipe, quantiser_of(recipe), q.device)
    workspace = quantiser(q, k, v)
    qkv, at = quantiser.operands(workspace, q.dtype), quantiser.layout
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim = SHAPE
    code = torch.int8 if recipe.qk_dtype == "int8" else E4M3
    f32 = torch.float32
    for field, shape, dtype in (
        ("q", (batch, seqlen_q, heads_q, head_dim), code),
        ("k", (batch, seqlen_k, heads_k, head_dim), code),
        ("vt", (batch, heads_k, head_dim, 336), E4M3),
        ("q_scale", (batch, heads_q, seqlen_q), f32),
        ("k_scale", (batch, heads_k, 6), f32),
        ("v_scale", (batch, heads_k, 2), f32),
    ):
        x = getattr(qkv, field)
        assert (tuple(x.shape), x.dtype) == (shape, dtype)
        assert x.data_ptr() == workspace.data_ptr() + getattr(at, field)
        assert x.is_contiguous() or field == "k_scale"
    assert qkv.k_scale.stride() == (16, 8, 1)
    assert (qkv.q_dot_mean is None) == (not recipe.smooth_k)
    if qkv.q_dot_mean is not None:
        assert qkv.q_dot_mean.data_ptr() == workspace.data_ptr() + at.q_dot and qkv.q_dot_mean.is_contiguous()
    assert (qkv.seqlen_k, qkv.recipe, qkv.dtype) == (seqlen_k, recipe, BF16)


# ------------------------------------------------------------------------------------------------------------
# Arguments of the compiled functions
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [torch.float32, BF16, torch.float64])
@pytest.mark.parametrize("recipe", [*PRESETS.values(), PER_HEAD], ids=lambda recipe: recipe.name)
def test_arguments_of_a_call(recipe: Fp8Recipe, default: torch.dtype, compiled: Compiled) -> None:
    """One workspace for both functions; constants and amax are float32, whatever torch's default dtype is."""
    q, k, v = inputs()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        call = attention(recipe)
        out, lse = call(q, k, v, True)  # type: ignore[misc]
    finally:
        torch.set_default_dtype(before)
    (
        (*tensors, base, layout, _, _, given, samples, only_chunk),
        (o, base_again, lse_at, lse_add, layout_again, scale, log2, *order),
    ) = compiled.calls
    assert all(x is y for x, y in zip(tensors[:3], (q, k, v), strict=True))
    static = recipe.q_scale in ("tensor", "head")
    assert [None if x is None else (tuple(x.shape), x.dtype) for x in tensors[3:]] == [
        ((64,), torch.float32) if recipe.rotation == "hadamard" else None,
        *(((2, heads), torch.float32) if static else None for heads in (4, 2, 2)),
    ]
    assert given == samples == int(static and recipe.smooth_k)  # the passes for amax need the mean first
    assert only_chunk == 0
    assert o is out and (tuple(out.shape), out.dtype) == ((2, 130, 4, 64), BF16)
    assert (tuple(lse.shape), lse.dtype, lse_at) == ((2, 4, 130), torch.float32, lse.data_ptr())
    assert base == base_again and Layout(*layout) == Layout(*layout_again)
    assert (scale, log2, order) == (
        0.125,
        pytest.approx(0.125 * 1.4426950408889634),
        [132, 1, *[None] * 5],  # no slopes, sinks, softcap, window
    )
    at = Layout(*layout)
    if recipe.smooth_k:
        assert lse_add == base + at.q_dot and (at.q_dot_batch, at.q_dot_head, at.q_dot_row) == (520, 130, 1)
    else:
        zero = launch._zero(q.device)
        assert lse_add == zero.data_ptr() and float(zero) == 0.0 and zero.dtype == torch.float32
        assert (at.q_dot_batch, at.q_dot_head, at.q_dot_row) == (0, 0, 0)


def test_lse_that_nobody_asked_for_is_in_the_workspace(compiled: Compiled) -> None:
    call = attention(PRESETS["accurate"])
    out = call(*inputs(), False)
    assert isinstance(out, Tensor)
    base, lse_at = compiled.calls[1][1:3]
    assert lse_at == base + call._quantiser.lse


class CountAllocations:
    """torch for memory.py, with the allocations counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        x = torch.empty(*args, **options)
        self.sizes.append(x.numel() * x.element_size())
        return x


def test_a_ready_call_allocates_output_and_workspace(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = CountAllocations()
    monkeypatch.setattr(memory, "torch", counted)
    call, tensors = attention(PRESETS["accurate"]), inputs()
    looked_up = compiled.looked_up
    for return_lse, count in ((False, 1), (True, 2)):
        counted.sizes.clear()
        compiled.memory.sizes.clear()
        call(*tensors, return_lse)
        assert len(counted.sizes) == count and compiled.memory.sizes == [call._quantiser.bytes]
    assert compiled.looked_up == looked_up


def test_nothing_is_held_between_calls(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    class Watched(CountAllocations):
        def empty(self, *args: Any, **options: Any) -> Tensor:
            x = torch.empty(*args, **options)
            made.append(weakref.ref(x))
            return x

    monkeypatch.setattr(memory, "torch", Watched())
    call, tensors = attention(PRESETS["accurate"]), inputs()
    for _ in range(3):
        call(*tensors, True)
        compiled.calls.clear()
    gc.collect()
    assert len(made) == 6 and all(x() is None for x in made)
    assert len(compiled.memory.sizes) == 3 and not compiled.memory.held


def test_the_workspace_goes_back_behind_both_kernels(compiled: Compiled) -> None:
    """It is there while they are called, and goes back, too, where one refuses its arguments."""
    call, (q, k, v) = attention(PRESETS["accurate"]), inputs()
    held: list[set[int]] = []
    for part, name in ((call._quantiser, "_kernel"), (call._forward, "kernel")):
        kernel = getattr(part, name)
        setattr(
            part, name, lambda *args, kernel=kernel: held.append({*compiled.memory.held}) or kernel(*args)
        )
    call(q, k, v, False)
    base = compiled.calls[0][-7]
    assert held == [{base}, {base}] and compiled.calls[1][1] == base and not compiled.memory.held
    with pytest.raises(TypeError, match="k has dtype"):
        call(q, k.half(), v, False)
    assert len(held) == 3 and not compiled.memory.held


def test_another_current_device_is_left_for_the_call(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [3]
    entered: list[torch.device] = []

    class Guard:
        def __init__(self, device: torch.device):
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)
            self.before, current[0] = current[0], self.device.index

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(launch, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    call, tensors = attention(PRESETS["accurate"]), inputs()
    assert isinstance(call(*tensors, False), Tensor)
    assert entered == [torch.device("cpu")] and current == [3] and len(compiled.calls) == 2


@pytest.mark.parametrize("recipe", [PRESETS["accurate"], PER_HEAD], ids=["accurate", "per head"])
def test_what_the_mean_key_is_made_of(recipe: Fp8Recipe, compiled: Compiled) -> None:
    """The quantiser makes it, but a given one, or one that was wanted before, lies in the workspace."""
    q, k, v = inputs()
    quantiser = launch.Quantiser(q.shape, k.shape, recipe, quantiser_of(recipe), q.device)
    given = torch.randn(2, 64, 2).transpose(1, 2)
    for k_mean in (None, given):
        workspace = quantiser(q, k, v, k_mean)
        want = mean_key(k) if k_mean is None and recipe is PER_HEAD else k_mean
        assert compiled.calls[-1][-3:] == (*[int(want is not None)] * 2, 0)
        if want is not None:
            at = quantiser.layout.sums
            found = workspace[at : at + 4 * want.numel()].view(torch.float32).view(2, 2, 64)
            assert torch.equal(found, want)


# ------------------------------------------------------------------------------------------------------------
# Tensors that the compiled functions refuse
# ------------------------------------------------------------------------------------------------------------


def padded_rows(x: Tensor, elements: int) -> Tensor:
    """`x` with rows that are `elements` longer in memory."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + elements, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def shifted(x: Tensor) -> Tensor:
    """`x` at an address one element past a multiple of 16 bytes."""
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


@pytest.mark.parametrize("recipe", ["naive", "accurate"])
def test_only_tensors_that_are_not_aligned_are_copied(recipe: str, compiled: Compiled) -> None:
    q, k, v = inputs()
    call = attention(PRESETS[recipe])
    for given in ((padded_rows(q, 8), k, v), (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)):
        call(*given, False)
        assert all(x is y for x, y in zip(compiled.calls[-2][:3], given, strict=True))
    for given in ((padded_rows(q, 1), k, v), (q, shifted(k), v), (q, k, padded_rows(shifted(v), 4))):
        call(*given, False)
        for x, y, value in zip(compiled.calls[-2][:3], given, (q, k, v), strict=True):
            assert torch.equal(x, value) and (x is y) == (y is value)
    assert len(compiled.calls) == 10


@pytest.mark.parametrize("recipe", ["naive", "accurate"])
def test_refusals_name_the_argument(recipe: str, compiled: Compiled) -> None:
    """The look-up of a call does not see dtype and strides of k and v: the compiled quantiser does."""
    q, k, v = inputs()
    call = attention(PRESETS[recipe])
    with pytest.raises(TypeError, match=r"k has dtype torch\.float16; allowed: that of q"):
        call(q, k.half(), v, False)
    with pytest.raises(ValueError, match=r"v is a torch\.sparse_coo tensor"):
        call(q, k, v.to_sparse(), False)
    assert not compiled.calls


def test_other_errors_stay_what_they_are(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right and aligned is not tried twice."""
    call = attention(PRESETS["accurate"])
    tries = []

    def broken(*args: Any) -> None:
        tries.append(args)
        raise RuntimeError("CUDA error: launch failed")

    monkeypatch.setattr(call._quantiser, "_kernel", broken)
    with pytest.raises(RuntimeError, match="CUDA error: launch failed"):
        call(*inputs(), False)
    assert len(tries) == 1


@pytest.mark.parametrize("name", ["q", "k"])
def test_sequences_past_the_grid_are_refused(name: str, compiled: Compiled) -> None:
    recipe = PRESETS["default"]
    rows = {"q": 1, "k": 1} | {name: QUANTIZE_ROWS_LIMIT + 1}
    q, k = (torch.empty(1, 1, 1, 64, dtype=BF16).expand(1, rows[x], 1, 64) for x in "qk")
    with pytest.raises(ValueError, match=f"{name} has 33553921 rows; the quantiser takes at most 33553920"):
        launch.launch_quantize(q, k, k, recipe, quantiser_of(recipe))
    assert not compiled.calls


# ------------------------------------------------------------------------------------------------------------
# Operands that a user has
# ------------------------------------------------------------------------------------------------------------


def attend(qkv: QuantizedQKV) -> tuple[Tensor, Tensor]:
    config = forward_of(qkv.recipe)
    return launch.launch_forward(qkv, config, causal=True, softmax_scale=0.25, out_dtype=BF16)


def test_operands_by_address_and_strides(compiled: Compiled) -> None:
    codes = [x.to(E4M3) for x in inputs()]
    codes[0] = codes[0].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
    qkv = from_fp8(*codes, torch.rand(2, 2), torch.rand(2, 2), None)
    out, lse = attend(qkv)
    o, base, lse_at, lse_add, layout, scale, _, *order = compiled.calls[0]
    at = Layout(*layout)
    assert (
        o is out
        and base == 0
        and lse_at == lse.data_ptr()
        and (scale, order) == (0.25, [132, 1, *[None] * 5])
    )
    assert lse_add == launch._zero(out.device).data_ptr()
    assert (at.seqlen_k, at.heads_k) == (333, 2)
    assert (at.q, at.q_batch, at.q_row, at.q_head) == (qkv.q.data_ptr(), *qkv.q.stride()[:3])
    assert (at.k, at.k_batch, at.k_row, at.k_head) == (qkv.k.data_ptr(), *qkv.k.stride()[:3])
    assert (at.vt, at.vt_batch, at.vt_head, at.vt_dim) == (qkv.vt.data_ptr(), *qkv.vt.stride()[:3])
    assert at.q_scale == qkv.q_scale.data_ptr()
    assert (at.q_scale_batch, at.q_scale_head, at.q_scale_row) == qkv.q_scale.stride() and at.q_scale_row == 0
    # The rows of K's and V's scales, expanded there, are written out.
    assert (at.k_scale_batch, at.k_scale_head) == (16, 8) and (at.v_scale_batch, at.v_scale_head) == (4, 2)


def test_operands_of_the_quantiser_are_taken_as_they_are(compiled: Compiled) -> None:
    """`quantize`, then attend, hands over what one call does, with addresses in place of offsets."""
    q, k, v = inputs()
    recipe = PRESETS["accurate"]
    qkv = launch.launch_quantize(q, k, v, recipe, quantiser_of(recipe))
    attend(qkv)
    (*_, base, layout, _, _, _, _, _), (_, zero, _, lse_add, absolute, *_) = compiled.calls
    assert zero == 0 and lse_add == base + Layout(*layout).q_dot
    for field, offset in Layout(*layout)._asdict().items():
        if field not in ("q_dot", "sums"):
            address = field in ("q", "k", "vt", "q_scale", "k_scale", "v_scale")
            assert getattr(Layout(*absolute), field) == offset + base * address, field


def test_operands_that_are_not_aligned_are_copied(compiled: Compiled) -> None:
    q, k, v = (x.to(E4M3) for x in inputs())
    odd = [shifted(x.view(torch.uint8)).view(E4M3) for x in (q, k, v)]
    kept: list[Tensor] = []
    aligned = launch._aligned
    qkv = from_fp8(*odd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_aligned", lambda x: kept.append(aligned(x)) or kept[-1])
        attend(qkv)
    at = Layout(*compiled.calls[-1][4])
    assert [at.q, at.k, at.vt] == [x.data_ptr() for x in kept]
    assert all(x.data_ptr() % 16 == 0 for x in kept) and kept[2] is qkv.vt
    for x, value in zip(kept, (q, k), strict=False):
        assert torch.equal(x.float(), value.float())


@pytest.mark.parametrize("padding", [0, 1, 16])
def test_ready_v_is_transposed_from_aligned_rows(padding: int, compiled: Compiled) -> None:
    """Rows of V that are `padding` bytes longer than head_dim; only what the kernel could not read is copied."""
    v = inputs()[2].to(E4M3)
    given = padded_rows(v.view(torch.uint8), padding).view(E4M3)
    vt = launch.launch_transpose_v(given, transpose_config(64))
    ((source, target),) = compiled.calls
    assert target is vt and (vt.shape, vt.dtype) == (permute_v(v).shape, E4M3)
    assert torch.equal(source.float(), v.float()) and (source is given) == (padding != 1)


def test_rows_of_k_scales_are_readable_to_the_pad(compiled: Compiled) -> None:
    """The forward kernel loads up to K_SCALE_PAD scales at once: 333 keys are 6 groups, in rows of 8."""
    q, k, v = inputs()
    codes = [x.to(E4M3) for x in (q, k, v)]
    k_descale = torch.tensor([[0.5, 2.0], [3.0, 0.25]], dtype=torch.float32)
    expanded = from_fp8(*codes, None, k_descale, None).k_scale
    for scales in (expanded, torch.rand(1, 1, 1), torch.rand(2, 3, 7), torch.rand(2, 3, 8)):
        padded = launch._padded_rows(scales)
        batch, heads, groups = padded.shape
        assert torch.equal(padded, scales) and padded.stride(2) == 1
        assert padded.stride(0) % K_SCALE_PAD == 0 and padded.stride(1) % K_SCALE_PAD == 0
        width = -(-groups // K_SCALE_PAD) * K_SCALE_PAD
        end = (
            padded.storage_offset() + (batch - 1) * padded.stride(0) + (heads - 1) * padded.stride(1) + width
        )
        assert end <= padded.untyped_storage().nbytes() // 4


def test_tables_of_a_rotary_embedding_reach_the_quantiser(compiled: Compiled) -> None:
    q, k, v = inputs()
    cos, sin = torch.rand(333, 16).to(BF16), torch.rand(333, 16).to(BF16)
    rotary = Rotary(cos, sin, True)
    config = quantize_config(PRESETS["accurate"], 64, 64, "bf16", "interleaved")
    launch.launch_quantize(q, k, v, PRESETS["accurate"], config, rotary=rotary)
    assert compiled.calls[0][-5] is cos and compiled.calls[0][-4] is sin
    odd = Rotary(shifted(cos), sin, True)
    launch.launch_quantize(shifted(q), k, v, PRESETS["accurate"], config, rotary=odd)
    copied = compiled.calls[-1][-5]
    assert copied.data_ptr() % 16 == 0 and torch.equal(copied, cos) and compiled.calls[-1][-4] is sin


@pytest.mark.parametrize("mode", ["q", "k"])
def test_static_scales_see_embedded_rows(compiled: Compiled, mode: str) -> None:
    """Largest magnitudes, and the mean key, are of what the kernel quantises."""
    q, k, v = inputs()
    cos, sin = torch.rand(333, 16).to(BF16), torch.rand(333, 16).to(BF16)
    recipe = Fp8Recipe(**{f"{mode}_scale": "head"}, rotation="none", smooth_k=True)  # type: ignore[arg-type]
    config = quantize_config(recipe, 64, 64, "bf16", "half")
    launch.launch_quantize(q, k, v, recipe, config, rotary=Rotary(cos, sin, False))
    amax = compiled.calls[0][4 if mode == "q" else 5]
    rotary = Rotary(cos, sin, False)
    keys = rotary.embed(k)
    rows = rotary.embed(q, 333 - 130) if mode == "q" else keys - mean_key(keys).unsqueeze(1)
    torch.testing.assert_close(amax, rows.abs().amax(dim=(1, 3)), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------------------
# Operands whose tensors nobody has asked for
# ------------------------------------------------------------------------------------------------------------


def operands(name: str = "accurate") -> QuantizedQKV:
    q, k, v = inputs()
    return launch.launch_quantize(q, k, v, PRESETS[name], quantiser_of(PRESETS[name]))


PARTS = ("q", "k", "vt", "q_scale", "k_scale", "v_scale", "q_dot_mean")


@pytest.mark.parametrize("part", [*PARTS, None])
def test_tensors_are_made_once_when_one_is_asked_for(part: str | None, compiled: Compiled) -> None:
    qkv = operands()
    assert qkv.untouched is not None and (qkv.seqlen_k, qkv.dtype) == (333, BF16)
    with pytest.raises(AttributeError, match="'QuantizedQKV' object has no attribute 'nothing'"):
        qkv.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert qkv.untouched is not None
    memory = qkv.untouched.memory
    if part is not None:
        assert getattr(qkv, part) is getattr(qkv, part)
        assert qkv.untouched is None
    found = [getattr(qkv, name) for name in PARTS]
    storage = memory.untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() == storage for x in found)


@pytest.mark.parametrize("how", ["copy", "deepcopy", "replace"])
@pytest.mark.parametrize("name", ["accurate", "paper"])
def test_copies_have_all_tensors(name: str, how: str, compiled: Compiled) -> None:
    qkv = operands(name)
    assert qkv.untouched is not None
    qkv.untouched.memory.random_(0, 100)
    made = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "replace": dataclasses.replace,
    }[how](qkv)
    assert type(made) is QuantizedQKV and made.untouched is None
    for part in PARTS:
        x, y = getattr(made, part), getattr(qkv, part)
        assert (x is None) == (y is None) == (part == "q_dot_mean" and name == "paper")
        if x is not None:
            assert x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            assert (x.data_ptr() == y.data_ptr()) == (how in ("copy", "replace"))
    assert (made.seqlen_k, made.recipe, made.dtype) == (qkv.seqlen_k, qkv.recipe, qkv.dtype)


def test_threads_that_ask_at_once_get_the_same_tensors(compiled: Compiled) -> None:
    for _ in range(20):
        qkv = operands()
        barrier = threading.Barrier(4)

        def ask(qkv: QuantizedQKV = qkv, barrier: threading.Barrier = barrier) -> list[int]:
            barrier.wait()
            return [id(getattr(qkv, part)) for part in PARTS]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            first, *others = [x.result() for x in [pool.submit(ask) for _ in range(4)]]
        assert all(x == first for x in others)


def test_a_tensor_that_somebody_asked_for_is_read_where_it_is(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untouched operands go by workspace and layout; from then on each part by its own address."""
    for module in (api, problem):
        monkeypatch.setattr(module, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(api, "_calls", Remembered())
    qkv = api.quantize(*inputs(), backend="sm90")
    assert qkv.untouched is not None
    memory = qkv.untouched.memory
    for _ in range(2):
        api.fp8_attention_quantized(qkv, backend="sm90")
        assert compiled.calls[-1][1] == memory.data_ptr() and qkv.untouched is not None
    api.fp8_attention_quantized(qkv, softmax_scale=-1.0, backend="sm90")  # wants other codes
    qkv.q.zero_()
    for _ in range(2):
        api.fp8_attention_quantized(qkv, backend="sm90")
        assert compiled.calls[-1][1] == 0 and Layout(*compiled.calls[-1][4]).q == qkv.q.data_ptr()
    changed = dataclasses.replace(qkv, q=qkv.q.clone())
    api.fp8_attention_quantized(changed, backend="sm90")
    assert Layout(*compiled.calls[-1][4]).q == changed.q.data_ptr() != qkv.q.data_ptr()
