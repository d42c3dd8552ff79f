"""The 16-bit forward kernels on a Hopper GPU, that of Hopper and that by mma.sync, against float64.

The bound of an error is that of torch's own arithmetic in 16 bits on the same inputs: both round P and O, the kernel
nothing else. Outputs are poisoned before every launch: what the kernel does not write stays NaN.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from poison import PoisonedTorch, poison_memory
from torch import Tensor

from cute_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, launch
from cute_attn.flash import kernel_config, reference
from cute_attn.kernels.config import Fwd16Config
from cute_attn.plan16 import forward16_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bf16", FP16: "fp16"}
LSE_ERROR = 1e-3  # absolute, and relative to lse

# (head_dim, head_dim_v)
DIMS = (
    (32, 32),
    (40, 72),
    (64, 64),
    (80, 80),
    (96, 96),
    (120, 128),
    (128, 128),
    (136, 136),
    (160, 64),
    (192, 128),
)
DIMS += ((192, 192), (224, 248), (256, 256))
DIMS_SM80 = ((32, 32), (40, 72), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # a tile each
BACKENDS = ("sm90", "sm80")
# batch, seqlen_q, seqlen_k, heads_q, heads_k
SHAPES = (
    (1, 1, 1, 1, 1),
    (2, 200, 333, 4, 2),
    (1, 300, 100, 2, 1),
    (1, 130, 1000, 6, 2),
    (1, 1, 257, 8, 1),
    (2, 128, 512, 3, 3),
    (1, 65, 63, 8, 1),
    (3, 129, 129, 1, 1),
)
WINDOWS = ((0, 0), (17, 0), (200, 31), (-1, 40), (100, -1), (5000, 5000))

VARIANTS = [
    replace(forward16_config(d, d, "bf16", causal=causal), overlap=overlap, pingpong=pingpong)
    for d in (64, 128, 256)
    for causal in (False, True)
    for overlap, pingpong in itertools.product((False, True), repeat=2)
]
# four consumer warpgroups, with a causal mask each with its own keys; two with their own keys, without and with
# clusters; two as for long sequences, but without clusters
SHORT = [
    forward16_config(64, 64, dtype, causal=causal, seqlen_q=1024)
    for dtype in ("bf16", "fp16")
    for causal in (False, True)
]
SHORT += [
    replace(SHORT[1], head_dim_v=40),
    forward16_config(256, 256, "bf16", causal=True, seqlen_q=512),
    *(forward16_config(256, 256, dtype, causal=True, seqlen_q=1024) for dtype in ("bf16", "fp16")),
    forward16_config(128, 128, "bf16", causal=True, seqlen_q=1024),
]
CLUSTERS = [
    replace(forward16_config(d, d, "bf16", causal=causal), cluster=2)
    for d in (64, 128, 256)
    for causal in (False, True)
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch, launch)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tensors(
    shape: tuple[int, ...], head_dim: int, head_dim_v: int, dtype: torch.dtype = BF16
) -> list[Tensor]:
    """N(0, 1) q, k, v; V has a mean, so that errors of the row sum show."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
    q, k, v = (
        torch.randn(batch, s, h, d, device=DEVICE)
        for s, h, d in (
            (seqlen_q, heads_q, head_dim),
            (seqlen_k, heads_k, head_dim),
            (seqlen_k, heads_k, head_dim_v),
        )
    )
    return [q.to(dtype), k.to(dtype), (v + 0.5).to(dtype)]


def check(got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """`got` (out, lse) against float64; errors at most twice those of torch in 16 bits."""
    out, lse = got
    options.setdefault("softmax_scale", 1.0 / math.sqrt(q.shape[3]))
    exact, exact_lse = reference(q, k, v, dtype=torch.float64, **options)
    rough, _ = reference(q, k, v, dtype=q.dtype, **options)
    assert out.dtype == q.dtype and out.shape == exact.shape and lse.dtype == torch.float32
    bound = (rough.double() - exact).abs().max().item()
    step = torch.finfo(q.dtype).eps * exact.abs().max().item()  # where torch happens to be exact
    error = (out.double() - exact).abs().max().item()
    assert error <= 2.0 * bound + step, f"error {error:.3e}, torch's {bound:.3e}"
    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert bool((out.transpose(1, 2)[empty] == 0).all())
    assert torch.allclose(lse[~empty].double(), exact_lse[~empty], rtol=LSE_ERROR, atol=LSE_ERROR)


def test_poison_is_nan() -> None:
    assert bool(PoisonedTorch().empty((2, 3), dtype=BF16, device=DEVICE).isnan().all())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("backend", "dims"), [("sm90", dims) for dims in DIMS] + [("sm80", dims) for dims in DIMS_SM80], ids=str
)
def test_head_dims(backend: str, dims: tuple[int, int], causal: bool) -> None:
    for shape in SHAPES:
        q, k, v = tensors(shape, *dims)
        got = flash_attn_func(q, k, v, causal=causal, return_lse=True, backend=backend)
        check(got, q, k, v, window=(-1, 0 if causal else -1))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp16(head_dim: int, causal: bool, backend: str) -> None:
    for shape in SHAPES:
        q, k, v = tensors(shape, head_dim, head_dim, FP16)
        check(
            flash_attn_func(q, k, v, causal=causal, return_lse=True, backend=backend),
            q,
            k,
            v,
            window=(-1, 0 if causal else -1),
        )


@pytest.mark.parametrize("config", [*VARIANTS, *CLUSTERS, *SHORT], ids=lambda config: config.name)
def test_variants_and_several_tiles_a_cta(config: Fwd16Config) -> None:
    """Few CTAs, each with many tiles: rings, turns and the staging of O go on from tile to tile."""
    for shape, sms in (((2, 700, 1500, 4, 2), 4), ((1, 333, 90, 3, 1), 2), ((1, 2000, 2000, 3, 3), 6)):
        dtype = FP16 if config.dtype == "fp16" else BF16
        q, k, v = tensors(shape, config.head_dim, config.head_dim_v, dtype)
        forward = launch.Forward16(q.shape, v.shape, config, q.device, softmax_scale=0.1, sms=sms)
        got = forward(q, k, v)
        check(got, q, k, v, softmax_scale=0.1, window=(-1, 0 if config.causal else -1))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_of_four_warpgroups(causal: bool) -> None:
    """Rows of a group share tiles of 256, each warpgroup with its own keys."""
    config = forward16_config(64, 64, "bf16", causal=causal, group=8, seqlen_q=520)
    assert config.tile_m == 256 and config.pack_gqa > 1
    q, k, v = tensors((2, 520, 700, 16, 2), 64, 64)
    got = flash_attn_func(q, k, v, softmax_scale=0.1, causal=causal, return_lse=True)
    check(got, q, k, v, softmax_scale=0.1, window=(-1, 0 if causal else -1))


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_rows_are_the_same(group: int, causal: bool, backend: str) -> None:
    q, k, v = tensors((2, 77, 300, 16, 2), 128, 128)
    arch = "sm90" if backend == "sm90" else "sm_90a"
    config = replace(kernel_config(arch, 128, 128, "bf16", causal=causal), pack_gqa=group)
    got = launch.Forward16(q.shape, v.shape, config, q.device, softmax_scale=0.1)(q, k, v)
    check(got, q, k, v, softmax_scale=0.1, window=(-1, 0 if causal else -1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_window(window: tuple[int, int], head_dim: int, backend: str) -> None:
    for shape in (*SHAPES, (1, 1000, 1000, 4, 2), (1, 500, 2000, 2, 2)):
        q, k, v = tensors(shape, head_dim, head_dim)
        got = flash_attn_func(q, k, v, window_size=window, return_lse=True, backend=backend)
        check(got, q, k, v, window=window)
        got = flash_attn_func(q, k, v, causal=True, window_size=window, return_lse=True, backend=backend)
        check(got, q, k, v, window=(window[0], 0))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "features",
    [("softcap",), ("alibi_slopes",), ("sinks",), ("softcap", "alibi_slopes", "sinks")],
    ids="+".join,
)
def test_softcap_alibi_sinks(features: tuple[str, ...], head_dim: int, backend: str) -> None:
    """Without a mask, causal and with a window, GQA."""
    q, k, v = tensors((2, 300, 700, 8, 2), head_dim, head_dim)
    q = q * 3
    every = {
        "softcap": 10.0 if len(features) == 1 else 20.0,
        "alibi_slopes": torch.rand(2, 8, device=DEVICE),
        "sinks": torch.randn(8, device=DEVICE) * 4,
    }
    options = {name: every[name] for name in features}
    for window in ((-1, -1), (-1, 0), (100, 20)):
        got = flash_attn_func(q, k, v, window_size=window, return_lse=True, backend=backend, **options)
        check(got, q, k, v, window=window, **options)


def test_slopes_of_heads_serve_every_batch(backend: str) -> None:
    q, k, v = tensors((2, 100, 100, 4, 4), 64, 64)
    slopes = torch.rand(4, device=DEVICE)
    got = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True, backend=backend)
    check(got, q, k, v, window=(-1, 0), alibi_slopes=slopes.expand(2, 4))


def test_sinks_of_rows_without_keys(backend: str) -> None:
    q, k, v = tensors((1, 200, 60, 2, 2), 64, 64)
    sinks = torch.tensor([1.5, -math.inf], device=DEVICE)
    out, lse = flash_attn_func(q, k, v, causal=True, sinks=sinks, return_lse=True, backend=backend)
    assert bool((out[:, :140] == 0).all())
    assert torch.allclose(lse[0, 0, :140], torch.tensor(1.5, device=DEVICE))
    assert bool((lse[0, 1, :140] == -math.inf).all())
    check((out[:, 140:], lse[..., 140:]), q[:, 140:], k, v, window=(-1, 0), sinks=sinks)


@pytest.mark.parametrize("scale", [1.0, -0.2, 0.0, 1e-30, 30.0])
def test_softmax_scale_of_any_sign(scale: float, backend: str) -> None:
    q, k, v = tensors((1, 200, 300, 2, 1), 128, 128)
    got = flash_attn_func(q, k, v, softmax_scale=scale, return_lse=True, backend=backend)
    check(got, q, k, v, softmax_scale=scale)


@pytest.mark.parametrize("size", [50.0, 500.0, 5000.0])
def test_large_logits_across_tiles(size: float, backend: str) -> None:
    """Rows that take the slow path beside rows that do not, maxima that move between tiles."""
    q, k, v = tensors((1, 300, 1000, 2, 2), 64, 64)
    q[:, ::3] *= size
    k *= torch.linspace(0.1, 3.0, 1000, device=DEVICE).view(1, -1, 1, 1).to(BF16)
    got = flash_attn_func(q, k, v, causal=True, return_lse=True, backend=backend)
    check(got, q, k, v, window=(-1, 0))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("octaves", [0.5, 6.0, 9.0, 40.0])
def test_references_that_lag(octaves: float, head_dim: int, causal: bool, backend: str) -> None:
    """Scores grow with each 128 keys on the way that the kernels take, from the last key to the first: in steps below
    the margin in which a reference may lag, which add up beyond it, and in steps above it."""
    seqlen = 1500
    q, k, v = tensors((1, seqlen, seqlen, 2, 2), head_dim, head_dim)
    way = torch.randn(head_dim, device=DEVICE).sign()
    step = (
        octaves * math.log(2.0) / math.sqrt(head_dim)
    )  # of a score by 1 / sqrt(head_dim) and the length of `way`
    steps = torch.arange(seqlen, 0, -1, device=DEVICE) // 128 * step
    k = (k.float() * 0.1 + way * steps.view(1, -1, 1, 1)).to(BF16)
    q = (q.float() * 0.1 + way).to(BF16)
    got = flash_attn_func(q, k, v, causal=causal, return_lse=True, backend=backend)
    check(got, q, k, v, window=(-1, 0 if causal else -1))


def test_strided_views(backend: str) -> None:
    more: dict[str, Any] = {"return_lse": True, "backend": backend}
    qkv = torch.randn(2, 300, 3, 4, 64, device=DEVICE).to(BF16)
    q, k, v = qkv.unbind(2)
    check(flash_attn_qkvpacked_func(qkv, causal=True, **more), q, k, v, window=(-1, 0))
    check(flash_attn_kvpacked_func(q, qkv[:, :, 1:], **more), q, k, v)
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
    )  # (batch, heads, seqlen, dim)
    check(flash_attn_func(q, k, v, **more), q, k, v)
    odd = torch.randn(2, 300, 4, 67, device=DEVICE).to(BF16)[
        ..., 3:
    ]  # neither address nor strides for a kernel
    check(flash_attn_func(odd, odd, odd, **more), odd, odd, odd)
    shared = k[:1].expand(2, -1, -1, -1)
    check(flash_attn_func(q, shared, shared, **more), q, shared, shared)


def test_nothing_is_read_past_the_end(backend: str) -> None:
    """What lies behind q, k and v in memory is NaN."""
    for d in (40, 72, 128):
        parts = []
        for s in (130, 200, 200):
            room = torch.full((s * d + 4096,), math.nan, dtype=BF16, device=DEVICE)
            room[: s * d] = torch.randn(s * d, device=DEVICE).to(BF16)
            parts.append(room[: s * d].view(1, s, 1, d))
        check(flash_attn_func(*parts, return_lse=True, backend=backend), *parts)


def test_nan_stays_visible(backend: str) -> None:
    q, k, v = tensors((1, 200, 300, 1, 1), 128, 128)
    q[0, 5] = math.nan
    out, lse = flash_attn_func(q, k, v, return_lse=True, backend=backend)
    assert bool(out[0, 5].isnan().all()) and bool(lse[0, 0, 5].isnan())
    rest = torch.arange(200, device=DEVICE) != 5
    check((out[:, rest], lse[..., rest]), q[:, rest], k, v)


def test_no_keys_and_no_rows(backend: str) -> None:
    q, k, v = tensors((2, 8, 0, 4, 2), 128, 64)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, backend=backend)
    assert out.shape == (2, 8, 4, 64) and bool((out == 0).all()) and bool((lse == -math.inf).all())
    assert flash_attn_func(q[:0], k[:0], v[:0], backend=backend).shape == (0, 8, 4, 64)


def test_the_plain_tile_and_shape_that_benchmarks_use(backend: str) -> None:
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            q, k, v = tensors((1, 4096, 4096, 2, 2), head_dim, head_dim)
            got = flash_attn_func(q, k, v, causal=causal, return_lse=True, backend=backend)
            check(got, q, k, v, window=(-1, 0 if causal else -1))
