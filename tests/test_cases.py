"""Faults that users of other attention libraries have reported, as small inputs: those that concern the forward.

Each test names its case by what went wrong there. It runs on the CPU (the 16-bit reference, the 8-bit emulator) and,
with the marker `gpu`, the kernels. Where a whole kind of fault has tests elsewhere, these are the places:

- sizes, offsets and strides past 31 bits, head counts past 16 bits, graphs and streams, results that repeat to the bit,
  8 bits: test_kernels_gpu.py
- kernels on disk under several processes, damaged files, forks: test_cache.py
- sequences of unlike lengths: test_cases_varlen.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from poison import poison_memory
from test_flash_gpu import check
from torch import Tensor

import cute_attn
from cute_attn import flash_attn_func, fp8_attention, launch
from cute_attn.flash import reference

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
PLACES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="kernel", marks=pytest.mark.gpu)]
RECIPES = ("accurate", "fp8", "paper")
gpu = pytest.mark.gpu
places = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    poison_memory(monkeypatch, launch)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_attn_func`: the kernel, or the reference for tensors on the CPU."""
    backend = "sm90" if q.is_cuda else "reference"
    return flash_attn_func(q, k, v, return_lse=True, backend=backend, **options)  # type: ignore[return-value]


def attend8(q: Tensor, k: Tensor, v: Tensor, recipe: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Likewise of `fp8_attention`: the kernels, or the emulator."""
    backend = "sm90" if q.is_cuda else "emulator"
    return fp8_attention(q, k, v, recipe=recipe, return_lse=True, backend=backend, **options)


def normal(
    place: str,
    seqlen_q: int,
    seqlen_k: int,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 64,
    dtype: torch.dtype = BF16,
    batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) q, k, v."""
    q = torch.randn(batch, seqlen_q, heads[0], head_dim, device=place)
    k, v = torch.randn(2, batch, seqlen_k, heads[1], head_dim, device=place)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """RMSE over the root mean square of `exact`."""
    return ((got.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# --- rows and tensors without keys


@places
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_no_keys_at_all(place: str, causal: bool) -> None:
    """K and V of length 0 crashed: an illegal instruction without a mask, a division by zero on the host with one."""
    q, k, v = normal(place, 1, 0, (8, 8), 128, batch=2)
    results = [attend(q, k, v, causal=causal)]
    results += [attend8(q, k, v, recipe, causal=causal) for recipe in RECIPES]
    for out, lse in results:
        assert out.shape == q.shape and bool((out == 0).all())
        assert lse.shape == (2, 8, 1) and bool((lse == -math.inf).all())
    if place == "cuda":
        torch.cuda.synchronize()


@places
@pytest.mark.parametrize("lengths", [(76, 1), (34, 1), (300, 3), (700, 129)], ids=str)
def test_more_queries_than_keys(place: str, lengths: tuple[int, int]) -> None:
    """Most rows of a causal mask saw no key, and NaN came of it: such rows are exactly 0, lse -inf.

    (In the report the sequences were packed and the NaN in the gradients.)
    """
    seqlen_q, seqlen_k = lengths
    q, k, v = (x * 3 for x in normal(place, seqlen_q, seqlen_k, (2, 1), 32, FP16))
    empty = seqlen_q - seqlen_k
    for out, lse in (attend(q, k, v, causal=True), attend8(q, k, v, "accurate", causal=True)):
        assert bool((out[:, :empty] == 0).all()) and bool((lse[..., :empty] == -math.inf).all())
        assert bool(out.isfinite().all()) and bool(lse[..., empty:].isfinite().all())
    check(attend(q, k, v, causal=True), q, k, v, window=(-1, 0))
    first = attend(q, k, v, causal=True)[0][:, empty]  # sees one key
    assert torch.equal(first, v[:, 0].expand_as(first))


# --- extreme logits


def low_scores(place: str, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every score is -524288 before the scale."""
    q = torch.full((1, 1, 32, 128), 64.0, dtype=BF16, device=place)
    k = torch.full((1, keys, 32, 128), -64.0, dtype=BF16, device=place)
    return q, k, torch.ones_like(k)


@places
@pytest.mark.parametrize("keys", [1, 2, 300])
def test_scores_below_a_finite_stand_in_for_minus_infinity(place: str, keys: int) -> None:
    """Rows whose scores all were below -5e4 came out 0, with a clamped lse: one key, and keys of several tiles."""
    q, k, v = low_scores(place, keys)
    lse_exact = -524288.0 / math.sqrt(128) + math.log(keys)
    for causal in (False, True):
        out, lse = attend(q, k, v, causal=causal)
        assert bool((out == 1.0).all())
        assert torch.allclose(lse.double(), torch.tensor(lse_exact, device=place).double(), atol=0.02)
    for recipe in RECIPES:
        out, lse = attend8(q, k, v, recipe)
        assert bool((out == 1.0).all()), recipe
        # smoothing takes these keys to 0, and leaves lse exact but for P's rounding; else scores are rounded
        off = {"atol": 0.12, "rtol": 0.05 if recipe == "paper" else 0.0}
        assert torch.allclose(lse.double(), torch.tensor(lse_exact, device=place).double(), **off), recipe


@places
def test_keys_of_low_scores_in_two_tiles(place: str) -> None:
    """Likewise with two keys that count, 400 others far below them between."""
    q, k, v = low_scores(place, 402)
    k[:, 1:-1] *= 2  # -1048576
    v[:, 0], v[:, -1] = 2.0, 4.0
    for (out, lse), off in ((attend(q, k, v), 1e-6), (attend8(q, k, v, "fp8"), 0.05)):
        assert bool((out == 3.0).all())
        assert torch.allclose(lse, torch.tensor(-46340.95 + math.log(2), device=place), rtol=off)


@places
@pytest.mark.parametrize("keys", [1, 200, 1000])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_huge_equal_scores(place: str, keys: int, dtype: torch.dtype) -> None:
    """Huge inputs made NaN, as the scaled maximum and the fused multiply-add were rounded apart."""
    value = 133120.0 if dtype == BF16 else 60000.0
    x = torch.full((1, keys, 1, 64), value, dtype=dtype, device=place)
    out, lse = attend(x[:, :1], x, x)
    assert bool((out == value).all())
    expected = torch.tensor(value * value * 8.0 + math.log(keys), dtype=torch.float64, device=place)
    assert torch.allclose(lse.double(), expected, rtol=1e-6)
    for recipe in RECIPES:
        out, lse = attend8(x[:, :1], x, x, recipe)
        assert bool(out.isfinite().all()) and bool(lse.isfinite().all()), recipe
        assert torch.allclose(out.double(), torch.full_like(out, value).double(), rtol=0.01), recipe
        assert torch.allclose(lse.double(), expected, rtol=0.05), recipe


@places
@pytest.mark.parametrize("seqlen", [704, 64, 192, 832, 640, 768])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_low_rows_beside_the_tail_of_a_tile(place: str, seqlen: int, dtype: torch.dtype) -> None:
    """Columns past the last key were scored 0, which is far above rows whose scores are all below -100.

    (In the report the exponential of those overflowed in the backward.)
    """
    q, k, v = (x * 0.1 for x in normal(place, seqlen, seqlen, (1, 1), 64, dtype))
    q[..., 0], k[..., 0] = 1.0, -960.0
    v = v * 10
    for causal in (False, True):
        out, lse = attend(q, k, v, causal=causal)
        check((out, lse), q, k, v, window=(-1, 0 if causal else -1))
        assert lse.min().item() > -121.0 and lse.max().item() < -112.0


@places
@pytest.mark.parametrize("spread", [1.0, 50.0])
def test_softcap(place: str, spread: float) -> None:
    """softcap hung, in the backward of the report; here also where tanh saturates."""
    shape = (1024, 1024, (32, 32)) if place == "cuda" else (130, 130, (2, 2))
    q, k, v = normal(place, *shape, 128, batch=2)
    q = (q * spread).to(BF16)
    got = attend(q, k, v, causal=True, softcap=10.0)
    assert bool(got[0].isfinite().all()) and bool(got[1].isfinite().all())
    check(got, q, k, v, window=(-1, 0), softcap=10.0)


# --- 8 bits


@places
def test_error_does_not_grow_with_the_spread_of_scores(place: str) -> None:
    """P was scaled by 2^8 against a maximum that was out of date, and clipped at 448 while the row sum was not.

    The error was 0.14 to 0.36 instead of 0.03, for some spreads of the scores alone.
    """
    seqlen = 8192 if place == "cuda" else 1024
    q, k, v = (x.clamp(-3, 3).to(E4M3) for x in normal(place, seqlen, seqlen, (1, 1), 128, torch.float32))
    wide = [x.double() for x in (q, k, v)]
    spread = (wide[0][0, :512, 0] @ wide[1][0, :, 0].T).std().item()
    backend = "sm90" if place == "cuda" else "emulator"
    errors = []
    for std in (0.25, 0.5, 1.0, 1.5, 2.0):
        scale = std / spread
        out, lse = cute_attn.flash_attn_fp8_func(
            q, k, v, softmax_scale=scale, return_lse=True, backend=backend
        )
        exact, exact_lse = reference(*wide, softmax_scale=scale, dtype=torch.float64)
        errors.append(relative_error(out, exact))
        # of rows in which one key has nearly all the weight, by docs/numerics.md: what rounding its P may change
        assert (lse - exact_lse).abs().max().item() < 0.09
    assert max(errors) < 0.05 and max(errors) < 1.3 * min(errors), errors


@places
@pytest.mark.parametrize("recipe", (*RECIPES, "naive"))
@pytest.mark.parametrize("zero", ["column of v", "v", "q", "k"])
def test_zeros_in_the_quantiser(place: str, zero: str, recipe: str) -> None:
    """A whole column of V, or a whole tensor, was zero, and its scale 0 / 0."""
    q, k, v = normal(place, 300, 300, (8, 2), 128)
    if zero == "column of v":
        v[:, :, 0, 5] = 0
    else:
        {"v": v, "q": q, "k": k}[zero].zero_()
    out, lse = attend8(q, k, v, recipe)
    qkv = cute_attn.quantize(q, k, v, recipe, backend="sm90" if place == "cuda" else "emulator")
    for scale in (qkv.q_scale, qkv.k_scale, qkv.v_scale):
        assert bool(scale.isfinite().all()) and bool((scale > 0).all())
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    exact = reference(q, k, v, softmax_scale=128**-0.5, dtype=torch.float64)[0]
    if zero == "v":
        assert bool((out == 0).all())
        return
    if zero == "column of v":
        assert bool((out[..., :4, 5] == 0).all())
    else:
        mean = v.double().mean(dim=1, keepdim=True).repeat_interleave(4, dim=2)
        assert torch.allclose(exact, mean.expand_as(exact))
    assert relative_error(out, exact) < (0.12 if recipe in ("naive", "paper") else 0.08)


# --- windows


@places
@pytest.mark.parametrize("tokens", [256, 257, 1024])
def test_a_window_that_cuts_nothing(place: str, tokens: int) -> None:
    """With 511 keys to the left and more than 256 tokens the kernel hung; up to 512 the window cuts nothing.

    (In the report with e4m3 Q and a paged cache.)
    """
    q, k, v = (x * 0.05 for x in normal(place, tokens, tokens, (64, 8) if place == "cuda" else (8, 1), 128))
    got = attend(q, k, v, causal=True, window_size=(511, 0))
    if tokens <= 512:
        assert same(got, attend(q, k, v, causal=True))
    check(got, q, k, v, window=(511, 0))


@places
@pytest.mark.parametrize("tokens", [256, 257, 1024])
def test_a_window_that_cuts_nothing_in_8_bits(place: str, tokens: int) -> None:
    """Likewise with e4m3 operands, without the cache."""
    heads = (64, 8) if place == "cuda" else (8, 1)
    q, k, v = ((x * 0.05).to(E4M3) for x in normal(place, tokens, tokens, heads, 128))
    options: dict[str, Any] = {"return_lse": True, "backend": "sm90" if place == "cuda" else "emulator"}
    got = cute_attn.flash_attn_fp8_func(q, k, v, causal=True, window_size=(511, 0), **options)
    if tokens <= 512:
        assert same(got, cute_attn.flash_attn_fp8_func(q, k, v, causal=True, **options))
    wide = [x.double() for x in (q, k, v)]
    exact, exact_lse = reference(*wide, softmax_scale=128**-0.5, window=(511, 0), dtype=torch.float64)
    assert relative_error(got[0], exact) < 0.05 and (got[1] - exact_lse).abs().max().item() < 0.09


# --- head dimensions


def at_the_end(x: Tensor) -> Tensor:
    """A copy of `x` whose last element is that of its allocation, with NaN before it: of 12 MiB and more, which torch's
    allocator asks CUDA for by themselves, in steps of 2 MiB."""
    bytes_ = max(12 * 2**20, -(-x.numel() * x.element_size() // 2**21) * 2**21)
    room = torch.full((bytes_ // x.element_size(),), math.nan, dtype=x.dtype, device=x.device)
    room[-x.numel() :] = x.flatten()
    return room[-x.numel() :].view(x.shape)


@places
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [72, 136, 40, 80, 96, 120, 200])
def test_head_dims_that_are_no_power_of_two(place: str, head_dim: int, causal: bool) -> None:
    """They went unchecked: wrong results in silence, or accesses past the tensors' end."""
    heads = (8, 2) if place == "cuda" else (2, 1)
    q, k, v = (at_the_end(x) for x in normal(place, 256, 256, heads, head_dim, FP16))
    check(attend(q, k, v, causal=causal), q, k, v, window=(-1, 0 if causal else -1))
    if head_dim % 16:
        with pytest.raises(ValueError, match=f"head_dim of q is {head_dim}; allowed: a multiple of 16"):
            attend8(q, k, v, "accurate", causal=causal)
        return
    out, _ = attend8(q, k, v, "accurate", causal=causal)
    window = (-1, 0 if causal else -1)
    exact = reference(q, k, v, softmax_scale=head_dim**-0.5, window=window, dtype=torch.float64)[0]
    assert relative_error(out, exact) < 0.05


@pytest.mark.parametrize("head_dim", [1, 4, 28, 36, 100, 132, 260, 264, 512])
def test_other_head_dims_are_refused_before_a_launch(head_dim: int) -> None:
    q, k, v = normal("cpu", 3, 5, head_dim=head_dim)
    for call in (attend, lambda *qkv: attend8(*qkv, "accurate")):
        with pytest.raises(
            ValueError, match=f"head_dim of q is {head_dim}; allowed: (a multiple|multiples) of"
        ):
            call(q, k, v)


# --- limits of a launch, offsets past 31 bits


@gpu
def test_more_heads_than_16_bits() -> None:
    """71,280 heads are more than a grid's second or third dimension takes."""
    q, k, v = (torch.rand(1, 3, 71280, 128, device="cuda").to(BF16) for _ in range(3))
    out, lse = attend(q, k, v)
    for head in (0, 65535, 65536, 71279):
        one = slice(head, head + 1)
        alone = attend(*(x[:, :, one].contiguous() for x in (q, k, v)))
        assert same((out[:, :, one], lse[:, one]), alone)
        check(alone, *(x[:, :, one] for x in (q, k, v)))


@gpu
def test_rows_far_apart() -> None:
    """Row 225,304 of a tensor with 9,728 elements from row to row begins past 2^31 elements: the offset wrapped.

    (In the report that of the gradient of the output.)
    """
    rows, width, heads, head_dim = 410_923, 9728, 16, 96
    buffer = torch.empty(rows, width, dtype=BF16, device="cuda").normal_()
    far = buffer[:, : heads * head_dim].view(rows, heads, head_dim).unsqueeze(0)
    assert far.stride(1) * 225_304 > 2**31
    near = far.contiguous()
    q, k, v = normal("cuda", 64, 64, (heads, heads), head_dim)
    assert same(attend(far, k, v), attend(near, k, v))  # as queries
    assert same(attend(q, far, far), attend(q, near, near))  # as keys and values
    del buffer, far, near
    torch.cuda.empty_cache()


@gpu
def test_batch_entries_far_apart() -> None:
    """Batch entries 2^30 elements apart, five of them: offsets wrapped, and the wrong entry was used.

    (In the report appended keys went to entry 0 of a cache.)
    """
    room = torch.zeros(5 * 2**30, dtype=FP16, device="cuda")
    far = room.as_strided((5, 4096, 32, 128), (2**30, 4096, 128, 1))
    far.copy_(torch.randn(5, 4096, 32, 128, device="cuda"))
    near = far.contiguous()
    q = torch.randn(5, 3, 32, 128, device="cuda").to(FP16)
    assert same(attend(q, far, far, causal=True), attend(q, near, near, causal=True))
    assert same(attend(far[:, :300], near, near), attend(near[:, :300], near, near))
    del room, far, near
    torch.cuda.empty_cache()


# --- streams, graphs, repeatability


@gpu
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 1024, 1024, (12, 12), 64, FP16), {}),
        ((2, 512, 512, (8, 8), 64, FP16), {}),
        ((1, 2048, 2048, (16, 2), 128, BF16), {"causal": True}),
        ((1, 2048, 2048, (16, 2), 128, BF16), {"window_size": (128, 0)}),
    ],
    ids=str,
)
def test_runs_repeat_to_the_bit(shape: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Results differed from run to run (in the report those of the backward): 30 runs, and 30 beside another stream."""
    batch, seqlen_q, seqlen_k, heads, head_dim, dtype = shape
    q, k, v = normal("cuda", seqlen_q, seqlen_k, heads, head_dim, dtype, batch)
    first = attend(q, k, v, **options)
    assert all(same(first, attend(q, k, v, **options)) for _ in range(30))
    load, other = torch.randn(4096, 4096, device="cuda", dtype=BF16), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(60):
            load @ load
    results = [attend(q, k, v, **options) for _ in range(30)]
    torch.cuda.synchronize()
    assert all(same(first, result) for result in results)


def in_8_bits(*qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return attend8(*qkv, "fp8", **options)


@gpu
@pytest.mark.parametrize("call", [attend, in_8_bits], ids=["16 bits", "8 bits"])
def test_graphs_and_streams(call: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Launches went to another stream than the current one: a replayed graph returned what it had before."""
    inputs = normal("cuda", 512, 512, (8, 8), 128)
    news = normal("cuda", 512, 512, (8, 8), 128)
    expected = call(*news)
    old = call(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*inputs)
    for x, new in zip(inputs, news, strict=True):
        x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, expected) and not same(captured, old)

    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # clock cycles, about 30 ms
        for x, new in zip(late, news, strict=True):
            x.copy_(new)
        got = call(*late)
    side.synchronize()
    assert same(got, expected)
