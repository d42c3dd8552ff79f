"""The 16-bit backward over sequences of unlike length, on a Hopper GPU against float64: the Hopper kernel, and the one
by mma.sync.

The bound of an error is that of torch's own gradients in 16 bits on the same sequence, twice. Outputs and workspace are
poisoned before every launch: what the kernels do not write stays NaN.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from gradient_bounds import check, exact_gradients
from poison import poison_memory
from torch import Tensor

from cute_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    launch,
    launch_backward,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bf16", FP16: "fp16"}
WINDOW = (100, 31)

# (queries, keys) of the sequences: empty ones first, between and last, tails of every kind, rows without keys
LENGTHS = ((0, 0), (1, 1), (200, 333), (0, 5), (300, 100), (64, 0), (130, 600), (0, 0), (1, 257), (65, 63))
LENGTHS += ((129, 129), (128, 128), (0, 140), (2, 1), (5, 0))
SOME = ((500, 700), (0, 9), (1000, 1500), (33, 1), (200, 200))
# head_dim, head_dim_v, dtype and what the call has; see test_flash_bwd_gpu.py
CASES = (
    (64, 64, BF16, ""),
    (64, 64, FP16, "causal deterministic used"),
    (64, 64, BF16, "window deterministic sinks"),
    (64, 64, BF16, "causal softcap sinks used"),
    (64, 64, FP16, "window alibi"),
    (128, 128, FP16, "used"),
    (128, 128, BF16, "causal sinks"),
    (128, 128, BF16, "window softcap used"),
    (128, 128, BF16, "causal alibi deterministic"),
    (128, 128, FP16, "softcap deterministic"),
    (256, 256, FP16, ""),
    (256, 256, BF16, "causal used"),
    (256, 256, BF16, "window softcap alibi deterministic sinks used"),
    (256, 256, BF16, "deterministic"),
    (40, 72, BF16, "causal used"),
    (120, 128, BF16, "window"),
    (192, 128, BF16, "causal"),
    (160, 64, BF16, "used"),
)
CASES_SM80 = (
    (64, 64, FP16, "causal deterministic used"),
    (64, 64, BF16, "window softcap alibi sinks"),
    (128, 128, BF16, "causal alibi deterministic"),
    (128, 128, FP16, "used"),
    (256, 256, BF16, "window softcap alibi deterministic sinks used"),
    (40, 72, BF16, "causal used"),
)
RUNS = [("sm90", case) for case in CASES] + [("sm80", case) for case in CASES_SM80]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch, launch, launch_backward)


def ends(lengths: Any, first: int = 0) -> Tensor:
    sums = itertools.accumulate(lengths, initial=first)
    return torch.tensor(list(sums), dtype=torch.int32, device=DEVICE)


def tensors(
    lengths: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = BF16,
    outside: int = 0,
) -> list[Tensor]:
    """N(0, 1) q, k, v, which require grad, and where their sequences end; `outside` rows of none on either side."""
    queries, keys = zip(*lengths, strict=True)
    rows, columns = sum(queries) + 2 * outside, sum(keys) + 2 * outside
    sizes = ((rows, heads[0], dims[0]), (columns, heads[1], dims[0]), (columns, heads[1], dims[1]))
    q, k, v = (torch.randn(size, device=DEVICE) for size in sizes)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v + 0.5)]  # V has a mean, so that D is not small
    return [*leaves, ends(queries, outside), ends(keys, outside)]


def attend(inputs: list[Tensor], **options: Any) -> Any:
    return flash_attn_varlen_func(*inputs, 1, 1, return_lse=True, **options)


def check_all(
    got: list[Tensor],
    inputs: list[Tensor],
    gradients: tuple[Tensor, Tensor],
    sinks: Tensor | None = None,
    used: Tensor | None = None,
    slopes: Tensor | None = None,
    **options: Any,
) -> None:
    """Each sequence by itself, sinks over all, and zeros in what does not count."""
    q, k, v, cu_q, cu_k = inputs
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    counted = [torch.zeros(len(x), dtype=torch.bool, device=DEVICE) for x in (q, k)]
    dsinks, bound = 0.0, 0.0
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        if used is not None:
            keys = slice(keys.start, min(keys.stop, keys.start + max(int(used[b]), 0)))
        dout, dlse = gradients[0][rows], gradients[1][:, rows]
        if rows.start == rows.stop or keys.start == keys.stop:
            if sinks is not None:
                dsinks = dsinks + dlse.double().sum(1)  # lse is the sink
            continue
        counted[0][rows], counted[1][keys] = True, True
        more = dict(options, alibi_slopes=slopes[b : b + 1]) if slopes is not None else options
        wanted = exact_gradients(
            [q[None, rows], k[None, keys], v[None, keys]], (dout[None], dlse[None]), sinks, **more
        )
        for name, x, (y, allowed) in zip(
            ("dq", "dk", "dv"), (got[0][rows], got[1][keys], got[2][keys]), wanted, strict=False
        ):
            wrong = (x.double() - y[0]).abs()
            error = wrong.max().item()
            assert error <= allowed, (
                f"sequence {b}, rows {rows}, keys {keys}, {name}: error {error:.3e}, "
                f"allowed {allowed:.3e}, first wrong at {(~(wrong <= allowed)).nonzero()[0].tolist()}"
            )
        if sinks is not None:
            dsinks, bound = dsinks + wanted[3][0], bound + wanted[3][1]
    for name, x, some in zip(("dq", "dk", "dv"), got, (counted[0], counted[1], counted[1]), strict=False):
        assert bool((x[~some] == 0).all()), f"{name} of what does not count: {x[~some].abs().max()}"
    if sinks is not None:
        error = (got[3].double() - dsinks).abs().max().item()
        assert error <= bound + 1e-5, f"dsinks: error {error:.3e}, allowed {bound:.3e}"


def name(run: tuple[str, tuple[int, int, torch.dtype, str]]) -> str:
    backend, (d, d_v, dtype, features) = run
    return f"{backend}-{d}-{d_v}-{NAMES[dtype]}-{features}"


@pytest.mark.parametrize("run", RUNS, ids=name)
def test_features(run: tuple[str, tuple[int, int, torch.dtype, str]]) -> None:
    """out and lse are both differentiated; rows of no sequence have NaN in all that is read."""
    backend, (d, d_v, dtype, features) = run
    for heads, outside in (((4, 2), 3), ((3, 3), 0), ((8, 1), 130)):
        inputs = tensors(LENGTHS, heads, (d, d_v), dtype, outside)
        with torch.no_grad():
            for x, cu in zip(inputs[:3], (inputs[3], inputs[4], inputs[4]), strict=True):
                x[: cu[0]], x[cu[-1] :] = math.nan, math.nan
        more: dict[str, Any] = {}
        checks: dict[str, Any] = {}
        if "softcap" in features:
            more["softcap"] = checks["softcap"] = 5.0
        if "alibi" in features:
            more["alibi_slopes"] = checks["slopes"] = torch.rand(len(LENGTHS), heads[0], device=DEVICE) * 0.2
        if "used" in features:
            lengths = [(n * 7 // 10, n, 0, n + 9, -1)[b % 5] for b, (_, n) in enumerate(LENGTHS)]
            more["seqused_k"] = checks["used"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        sinks = torch.randn(heads[0], device=DEVICE).requires_grad_() if "sinks" in features else None
        causal, window = "causal" in features, WINDOW if "window" in features else (-1, -1)
        out, lse = attend(
            inputs,
            causal=causal,
            window_size=window,
            deterministic="deterministic" in features,
            sinks=sinks,
            backend=backend,
            **more,
        )
        gradients = (torch.randn_like(out), torch.randn_like(lse))
        gradients[0][: inputs[3][0]], gradients[1][:, : inputs[3][0]] = math.nan, math.nan
        leaves = [*inputs[:3], *([] if sinks is None else [sinks])]
        got = list(torch.autograd.grad((out, lse), leaves, gradients))
        check_all(got, inputs, gradients, sinks, window=(-1, 0) if causal else window, **checks)


@pytest.mark.parametrize(("head_dim", "backend"), [(64, "sm90"), (128, "sm90"), (256, "sm90"), (128, "sm80")])
def test_neighbours_do_not_leak(head_dim: int, backend: str) -> None:
    """Every other sequence is NaN, and so are keys that do not count."""
    lengths = tuple((m + 1, n + 1) for m, n in LENGTHS)
    used = torch.tensor([n - n // 4 for _, n in lengths], dtype=torch.int32, device=DEVICE)
    for causal in (False, True):
        inputs = tensors(lengths, (4, 2), (head_dim, head_dim))
        q, k, v, cu_q, cu_k = (x.detach().clone() for x in inputs)
        dout = torch.randn_like(q)
        bad = dout.clone()
        good = [torch.zeros(len(x), dtype=torch.bool, device=DEVICE) for x in (q, k)]
        for b in range(1, len(lengths), 2):
            rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b] + used[b]))
            good[0][rows], good[1][keys] = True, True
        for x, some in ((q, good[0]), (bad, good[0]), (k, good[1]), (v, good[1])):
            x[~some] = math.nan
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = attend([*leaves, cu_q, cu_k], causal=causal, seqused_k=used, backend=backend)
        got = torch.autograd.grad(out, leaves, bad)
        for b in range(1, len(lengths), 2):
            rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b] + used[b]))
            one = [x[None, at] for x, at in zip(inputs[:3], (rows, keys, keys), strict=True)]
            found = [x[None, at] for x, at in zip(got, (rows, keys, keys), strict=True)]
            zeros = torch.zeros_like(lse[None, :, rows])
            window = (-1, 0 if causal else -1)
            check(found, one, (dout[None, rows], zeros), where=f"sequence {b}, ", window=window)
            rest = slice(keys.stop, int(cu_k[b + 1]))
            assert bool((got[1][rest] == 0).all()) and bool((got[2][rest] == 0).all())


def test_equal_lengths_are_a_batch() -> None:
    """With one order of all sums the gradients of a batch, bit for bit where tiles are those of the batch."""
    for seqlen, d, causal in ((256, 64, True), (640, 128, False), (320, 256, True)):
        q, k, v, *cu = tensors(((seqlen, seqlen),) * 3, (4, 2), (d, d))
        options: dict[str, Any] = {"causal": causal, "deterministic": True}
        out, _ = attend([q, k, v, *cu], **options)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), dout)
        leaves = [x.detach().unflatten(0, (3, seqlen)).requires_grad_() for x in (q, k, v)]
        same = torch.autograd.grad(
            flash_attn_func(*leaves, **options), leaves, dout.unflatten(0, (3, seqlen))
        )
        for x, y in zip(got, same, strict=True):
            torch.testing.assert_close(x, y.flatten(0, 1), rtol=2e-2, atol=2e-2)


def test_many_sequences_and_long_ones() -> None:
    draw = random.Random(0)

    def length() -> int:
        return 0 if draw.random() < 0.2 else int(math.exp(draw.uniform(0.0, math.log(301))))

    many = tuple((length(), length()) for _ in range(400))
    for lengths, d in (
        (many, 64),
        (many[:60], 256),
        (((5, 5), (3000, 3000), (1, 1), (40, 4000), (700, 100)), 128),
    ):
        inputs = tensors(lengths, (2, 1), (d, d))
        out, lse = attend(inputs, causal=True)
        gradients = (torch.randn_like(out), torch.randn_like(lse))
        got = list(torch.autograd.grad((out, lse), inputs[:3], gradients))
        check_all(got, inputs, gradients, window=(-1, 0))


def test_used_keys_of_a_batch() -> None:
    q, k, v = (
        torch.randn(3, n, h, 64, device=DEVICE).to(BF16).requires_grad_()
        for n, h in ((90, 4), (200, 2), (200, 2))
    )
    used = torch.tensor([200, 0, 77], dtype=torch.int32, device=DEVICE)
    out = flash_attn_func(q, k, v, causal=True, seqused_k=used)
    dout = torch.randn_like(out)
    got = [x.flatten(0, 1) for x in torch.autograd.grad(out, (q, k, v), dout)]
    inputs = [x.detach().flatten(0, 1) for x in (q, k, v)] + [ends([90] * 3), ends([200] * 3)]
    zeros = torch.zeros(4, 270, device=DEVICE)
    check_all(got, inputs, (dout.flatten(0, 1), zeros), used=used, window=(-1, 0))


def test_packed_and_strided() -> None:
    lengths = (130, 0, 77, 256)
    cu = ends(lengths)
    qkv = torch.randn(sum(lengths), 3, 4, 64, device=DEVICE).to(BF16).requires_grad_()
    out = flash_attn_varlen_qkvpacked_func(qkv, cu, 256, causal=True)
    inputs = [*(x.detach() for x in qkv.unbind(1)), cu, cu]
    zeros = torch.zeros(4, sum(lengths), device=DEVICE)
    for dout in (
        torch.randn_like(out),
        torch.ones(1, 1, 1, device=DEVICE, dtype=BF16).expand_as(out),
        torch.randn(4, sum(lengths), 64, device=DEVICE).to(BF16).transpose(0, 1),
        torch.randn(sum(lengths), 4, 65, device=DEVICE).to(BF16)[..., 1:],
    ):
        (got,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
        check_all(list(got.unbind(1)), inputs, (dout, zeros), window=(-1, 0))
    kv = qkv.detach()[:, 1:].requires_grad_()
    out = flash_attn_varlen_kvpacked_func(inputs[0], kv, cu, cu, 256, 256, causal=True)
    (again,) = torch.autograd.grad(out, kv, dout)
    torch.testing.assert_close(again, got[:, 1:], rtol=0.0, atol=0.0)  # dk and dv have one order of sums


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_runs_are_equal_to_the_bit(head_dim: int) -> None:
    """If deterministic."""
    inputs = tensors(SOME, (4, 2), (head_dim, head_dim))
    leaves = inputs[:3]
    for causal in (False, True):
        out, _ = attend(inputs, causal=causal, deterministic=True)
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for _ in range(50):
            again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_graph_takes_new_lengths(head_dim: int) -> None:
    """A leaf's gradient belongs to the stream of its first use while anything holds that: here none outlives a run."""
    inputs = tensors(SOME, (4, 2), (head_dim, head_dim))
    leaves = inputs[:3]
    dout = torch.randn(len(leaves[0]), 4, head_dim, device=DEVICE).to(BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(inputs, causal=True)[0], leaves, dout)

    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    inputs[3].copy_(ends([100, 900, 0, 700, 33]))
    inputs[4].copy_(ends([0, 800, 10, 1500, 100]))
    graph.replay()
    torch.cuda.synchronize()
    zeros = torch.zeros(4, len(inputs[0]), device=DEVICE)
    check_all(list(captured), inputs, (dout, zeros), window=(-1, 0))


def test_no_sequences_rows_or_keys() -> None:
    for lengths in (((3, 0), (200, 0)), ((0, 30), (0, 200))):
        *leaves, cu_q, cu_k = tensors(lengths, (2, 2), (64, 64))
        out, lse = attend([*leaves, cu_q, cu_k])
        got = torch.autograd.grad((out, lse), leaves, (torch.randn_like(out), torch.randn_like(lse)))
        assert all(bool((x == 0).all()) for x in got)
    *leaves, _, _ = tensors(((300, 300),), (2, 2), (64, 64))  # rows, but none of any sequence
    cu = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    out, _ = attend([*leaves, cu, cu])
    assert all(bool((x == 0).all()) for x in torch.autograd.grad(out, leaves, torch.zeros_like(out)))
