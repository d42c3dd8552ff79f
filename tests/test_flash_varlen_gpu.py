"""The 16-bit forward over sequences of unlike length, on a Hopper GPU against float64.

The bound of an error is that of torch's own arithmetic in 16 bits on the same inputs. Outputs and the counter of tiles
are poisoned before every launch.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from poison import poison_memory
from torch import Tensor

from cute_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    launch,
)
from cute_attn.flash import kernel_config
from cute_attn.flash_varlen import reference_varlen
from cute_attn.kernels.config import Fwd16Config, Fwd16Sm80Config
from cute_attn.plan16 import forward16_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bf16", FP16: "fp16"}
LSE_ERROR = 1e-3  # absolute, and relative to lse

# --- tables

# (queries, keys) of the sequences: empty ones first, between and last, tails of every kind, rows without keys
LENGTHS = ((0, 0), (1, 1), (7, 300), (128, 128), (0, 5), (129, 127), (200, 333), (300, 40), (64, 0), (0, 0))
LENGTHS += ((1, 700), (333, 333), (0, 0), (2, 1), (65, 257), (260, 900), (1, 128), (5, 0))


def many(count: int, longest: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Log-uniform lengths, a fifth of them 0: more sequences than a warp has lanes."""
    draw = random.Random(seed)

    def length() -> int:
        return 0 if draw.random() < 0.2 else int(math.exp(draw.uniform(0.0, math.log(longest + 1))))

    return tuple((length(), length()) for _ in range(count))


@dataclass(frozen=True)
class Case:
    """Features of a call, one value of each of `FEATURES`."""

    dims: tuple[int, int]
    window: tuple[int, int]
    softcap: float
    slopes: str
    sinks: bool
    heads: tuple[int, int]  # of queries and of keys
    pack: bool
    used: bool
    dtype: torch.dtype

    def config(self, arch: str) -> Fwd16Config | Fwd16Sm80Config:
        """For a target of `flash.target`."""
        heads_q, heads_k = self.heads
        causal = self.window == (-1, 0)
        return kernel_config(
            arch,
            *self.dims,
            NAMES[self.dtype],
            causal=causal,
            window=not causal and self.window != (-1, -1),
            softcap=self.softcap > 0,
            alibi=self.slopes != "none",
            sinks=self.sinks,
            group=heads_q // heads_k,
            seqlen_q=1 if self.pack else 1 << 20,
            varlen=True,
        )

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)).replace(" ", "") for name in FEATURES)


FEATURES: dict[str, tuple[Any, ...]] = {
    "dims": ((128, 128), (64, 64), (256, 256), (192, 128), (40, 72)),
    "window": ((-1, 0), (-1, -1), (100, 20), (-1, 30), (64, -1)),
    "softcap": (0.0, 12.0),
    "slopes": ("none", "heads", "batch"),
    "sinks": (False, True),
    "heads": ((8, 2), (3, 3), (4, 1)),
    "pack": (False, True),
    "used": (False, True),
    "dtype": (BF16, FP16),
}


def pairs_of(case: Case) -> set[tuple[str, Any, str, Any]]:
    return {(a, getattr(case, a), b, getattr(case, b)) for a, b in itertools.combinations(FEATURES, 2)}


def covering() -> list[Case]:
    """Cases in which every pair of values of two features occurs."""
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(FEATURES, 2)
        for x, y in itertools.product(FEATURES[a], FEATURES[b])
    }
    draw, found = random.Random(1), []
    while missing:
        tried = [Case(**{name: draw.choice(values) for name, values in FEATURES.items()}) for _ in range(400)]
        found.append(max(tried, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(found[-1])
    return found


CASES = covering()
PLAIN = [
    forward16_config(*dims, "bf16", causal=causal, varlen=True)
    for dims in FEATURES["dims"]
    for causal in (False, True)
]
OTHERS = [
    replace(forward16_config(d, d, "bf16", causal=True, varlen=True), overlap=overlap, pingpong=pingpong)
    for d, overlap, pingpong in ((64, False, True), (128, True, True), (256, False, False))
]
MMA_SYNC = [
    kernel_config("sm_90a", d, d_v, "bf16", causal=causal, varlen=True)
    for d, d_v, causal in (
        (64, 64, True),
        (64, 64, False),
        (192, 128, False),
        (256, 256, True),
        (40, 72, True),
    )
]


# --- tools


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_memory(monkeypatch, launch)


@pytest.fixture(params=["sm90", "sm80"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ends(lengths: Any) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def tensors(
    lengths: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = BF16,
) -> list[Tensor]:
    """q, k, v of N(0, 1), V with a mean, so that errors of the row sum show; cu_seqlens_q, cu_seqlens_k."""
    queries, keys = zip(*lengths, strict=True)
    q, k, v = (
        torch.randn(sum(rows), h, d, device=DEVICE)
        for rows, h, d in (
            (queries, heads[0], dims[0]),
            (keys, heads[1], dims[0]),
            (keys, heads[1], dims[1]),
        )
    )
    return [q.to(dtype), k.to(dtype), (v + 0.5).to(dtype), ends(queries), ends(keys)]


def check(
    got: tuple[Tensor, Tensor], inputs: list[Tensor], rows: Tensor | None = None, **options: Any
) -> None:
    """`got` (out, lse) against float64; errors at most twice those of torch in 16 bits.

    rows: bool (total_q,), those that count; the others are not looked at.
    """
    out, lse = got
    options.setdefault("softmax_scale", 1.0 / math.sqrt(inputs[0].shape[2]))
    exact, exact_lse = reference_varlen(*inputs, dtype=torch.float64, **options)
    rough, _ = reference_varlen(*inputs, dtype=out.dtype, **options)
    assert out.dtype == inputs[0].dtype and out.shape == exact.shape
    assert lse.dtype == torch.float32 and lse.shape == exact_lse.shape
    rows = torch.ones(len(out), dtype=torch.bool, device=DEVICE) if rows is None else rows
    out, exact, rough, lse, exact_lse = out[rows], exact[rows], rough[rows], lse[:, rows], exact_lse[:, rows]
    difference = (out.double() - exact).abs().nan_to_num(math.inf)
    bound = (rough.double() - exact).abs().max().item()
    step = torch.finfo(out.dtype).eps * exact.abs().max().item()  # where torch happens to be exact
    error = difference.max().item()
    if not error <= 2.0 * bound + step:
        row, head, column = (int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
        first = int((difference.amax((1, 2)) > 2.0 * bound + step).nonzero()[0])
        pytest.fail(f"error {error:.3e}, torch's {bound:.3e}, at {row, head, column}, first bad row {first}")
    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert bool((out.transpose(0, 1)[empty] == 0).all())
    assert torch.allclose(lse[~empty].double(), exact_lse[~empty], rtol=LSE_ERROR, atol=LSE_ERROR)


def attend(inputs: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Through the API; max_seqlen are wrong, as nothing depends on them."""
    return flash_attn_varlen_func(*inputs, 1, 1, return_lse=True, **options)


# --- tests


def test_table_covers_pairs() -> None:
    seen = set().union(*map(pairs_of, CASES))
    assert len(seen) == sum(
        len(FEATURES[a]) * len(FEATURES[b]) for a, b in itertools.combinations(FEATURES, 2)
    )


@pytest.mark.parametrize(
    ("config", "sms"),
    [*itertools.product([*PLAIN, *OTHERS], (None, 3)), *((config, None) for config in MMA_SYNC)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_masks(config: Fwd16Config | Fwd16Sm80Config, sms: int | None) -> None:
    """Hopper's also on few CTAs, which take many tiles each: rings, turns and the staging of O go on from tile to
    tile."""
    for lengths in (LENGTHS, many(100, 600)):
        inputs = tensors(lengths, (4, 2), (config.head_dim, config.head_dim_v))
        got = launch.launch_forward16_varlen(*inputs, config, softmax_scale=0.1, sms=sms)
        check(got, inputs, softmax_scale=0.1, window=(-1, 0 if config.causal else -1))


@pytest.mark.parametrize("arch", ["sm90", "sm_90a"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_features(case: Case, arch: str) -> None:
    for lengths in (LENGTHS, many(70, 900, 1)):
        inputs = tensors(lengths, case.heads, case.dims, case.dtype)
        batch, heads = len(lengths), case.heads[0]
        inputs[0] = inputs[0] * 2
        options: dict[str, Any] = {"softcap": case.softcap, "softmax_scale": 0.11}
        if case.slopes != "none":
            slopes = torch.rand(batch, heads, device=DEVICE)
            options["alibi_slopes"] = slopes[0].expand(batch, heads) if case.slopes == "heads" else slopes
        if case.sinks:
            options["sinks"] = torch.randn(heads, device=DEVICE) * 3
        if case.used:  # also below 0 and above the length
            options["seqused_k"] = torch.tensor(
                [(n * 7 // 10, n, 0, n + 9, -1)[b % 5] for b, (_, n) in enumerate(lengths)],
                dtype=torch.int32,
                device=DEVICE,
            )
        got = launch.launch_forward16_varlen(*inputs, case.config(arch), window=case.window, **options)
        check(got, inputs, window=case.window, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_api(head_dim: int, causal: bool, backend: str) -> None:
    """The kernel that is planned: heads packed for short sequences, not for long ones; kinds of slopes."""
    run = partial(attend, causal=causal, backend=backend)
    window = (-1, 0 if causal else -1)
    for lengths in (LENGTHS, ((1, 300),) * 40, ((1500, 1500), (700, 2000))):
        inputs = tensors(lengths, (8, 2), (head_dim, head_dim))
        check(run(inputs), inputs, window=window)
    slopes = torch.rand(8, device=DEVICE)
    got = run(inputs, alibi_slopes=slopes)
    check(got, inputs, window=window, alibi_slopes=slopes.expand(2, 8))


@pytest.mark.parametrize("config", [*PLAIN[:6], *MMA_SYNC], ids=lambda config: config.name)
def test_neighbours_do_not_leak(config: Fwd16Config | Fwd16Sm80Config) -> None:
    """Every other sequence is NaN, and so are rows before the first and behind the last, which are not written."""
    for lengths in (LENGTHS, many(60, 400, 2)):
        lengths = tuple((m + 1, n + 1) for m, n in lengths)
        inputs = tensors(lengths, (4, 2), (config.head_dim, config.head_dim_v))
        q, k, v, cu_q, cu_k = (x.clone() for x in inputs)
        good = torch.zeros(len(q), dtype=torch.bool, device=DEVICE)
        for b in range(1, len(lengths) - 1, 2):
            good[int(cu_q[b]) : int(cu_q[b + 1])] = True
        for b in range(0, len(lengths), 2):
            q[int(cu_q[b]) : int(cu_q[b + 1])] = math.nan
            k[int(cu_k[b]) : int(cu_k[b + 1])] = math.nan
            v[int(cu_k[b]) : int(cu_k[b + 1])] = math.nan
        inner = (cu_q[1:-1].contiguous(), cu_k[1:-1].contiguous())
        for sms in (None, 5):
            got = launch.launch_forward16_varlen(q, k, v, *inner, config, softmax_scale=0.1, sms=sms)
            check(got, inputs, good, softmax_scale=0.1, window=(-1, 0 if config.causal else -1))
            outside = torch.ones_like(good)
            outside[int(inner[0][0]) : int(inner[0][-1])] = False
            assert bool(got[0][outside].isnan().all()) and bool(got[1][:, outside].isnan().all())


def test_equal_lengths_are_a_batch(backend: str) -> None:
    for seqlen_q, seqlen_k, heads in ((300, 500, (4, 4)), (1, 900, (8, 1)), (640, 640, (4, 2))):
        inputs = tensors(((seqlen_q, seqlen_k),) * 3, heads, (128, 128))
        out, lse = attend(inputs, causal=True, backend=backend)
        q, k, v = (x.view(3, -1, *x.shape[1:]) for x in inputs[:3])
        same, same_lse = flash_attn_func(q, k, v, causal=True, return_lse=True, backend=backend)
        assert torch.allclose(out, same.flatten(0, 1), atol=2e-2, rtol=2e-2)
        assert torch.allclose(lse, same_lse.transpose(0, 1).flatten(1), atol=1e-4)


def test_used_keys_of_a_batch(backend: str) -> None:
    """Keys that do not count are NaN."""
    q, k, v = (torch.randn(4, n, h, 128, device=DEVICE).to(BF16) for n, h in ((3, 8), (700, 2), (700, 2)))
    used = torch.tensor([700, 0, 1, 300], dtype=torch.int32, device=DEVICE)
    inputs = [x.flatten(0, 1) for x in (q, k, v)] + [ends([3] * 4), ends([700] * 4)]
    bad_k, bad_v = k.clone(), v.clone()
    for b, n in enumerate(used.tolist()):
        bad_k[b, n:] = bad_v[b, n:] = math.nan
    more: dict[str, Any] = {"causal": True, "return_lse": True, "backend": backend}
    out, lse = flash_attn_func(q, bad_k, bad_v, seqused_k=used, **more)
    got = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    check(got, inputs, window=(-1, 0), seqused_k=used)


def test_packed_and_strided(backend: str) -> None:
    more: dict[str, Any] = {"return_lse": True, "backend": backend}
    lengths = tuple((n, n) for n, _ in many(20, 500, 3))
    cu = ends([n for n, _ in lengths])
    qkv = torch.randn(int(cu[-1]), 3, 4, 64, device=DEVICE).to(BF16)
    inputs = [*qkv.unbind(1), cu, cu]
    check(flash_attn_varlen_qkvpacked_func(qkv, cu, 9, causal=True, **more), inputs, window=(-1, 0))
    got = flash_attn_varlen_kvpacked_func(inputs[0], qkv[:, 1:], cu, cu, 9, 9, **more)
    check(got, inputs)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3]]
    check(attend([*heads_first, cu, cu], backend=backend), inputs)
    odd = torch.randn(int(cu[-1]), 4, 67, device=DEVICE).to(BF16)[
        ..., 3:
    ]  # neither address nor strides for a kernel
    check(attend([odd, odd, odd, cu, cu], backend=backend), [odd, odd, odd, cu, cu])


@pytest.mark.parametrize("config", [PLAIN[3], MMA_SYNC[0]], ids=lambda config: config.name)
def test_no_sequences_rows_or_keys(config: Fwd16Config | Fwd16Sm80Config) -> None:
    run = partial(attend, backend="sm90" if isinstance(config, Fwd16Config) else "sm80")
    inputs = tensors(((0, 0), (0, 0)), (2, 2), (64, 64))
    assert run(inputs)[0].shape == (0, 2, 64)
    inputs = tensors(((3, 0), (200, 0)), (2, 2), (64, 64))
    check(run(inputs), inputs)
    inputs = tensors(((0, 30), (0, 200)), (2, 2), (64, 64))
    assert run(inputs)[1].shape == (2, 0)
    cu = torch.zeros(40, dtype=torch.int32, device=DEVICE)  # rows, but none of any sequence
    q = torch.randn(300, 2, config.head_dim, device=DEVICE).to(BF16)
    out, lse = launch.launch_forward16_varlen(q, q, q, cu, cu, config, softmax_scale=0.1)
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


def test_long_sequences_beside_short_ones(backend: str) -> None:
    inputs = tensors(((5, 5), (5000, 5000), (1, 1), (40, 9000), (0, 0), (700, 100)), (2, 1), (128, 128))
    check(attend(inputs, causal=True, backend=backend), inputs, window=(-1, 0))
    check(attend(inputs, window_size=(500, 100), backend=backend), inputs, window=(500, 100))


def test_runs_repeat_to_the_bit_and_follow_the_stream(backend: str) -> None:
    """Tiles go to other CTAs in each run, and a graph takes new lengths."""
    inputs = tensors(many(90, 900, 4), (8, 2), (128, 128))
    run = partial(attend, causal=True, backend=backend)
    first = run(inputs)
    for _ in range(20):
        again = run(inputs)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs)
    for seed in (5, 6):
        for given, total in zip(inputs[3:], (len(inputs[0]), len(inputs[1])), strict=True):
            cuts = sorted(random.Random(seed).choices(range(total + 1), k=len(given) - 2))
            given.copy_(torch.tensor([0, *cuts, total], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        check(captured, inputs, window=(-1, 0))
