"""The 16-bit backward on a Hopper GPU, against float64: the Hopper kernel, and the one by mma.sync.

The bound of an error is that of torch's own gradients in 16 bits on the same inputs, twice. Outputs and workspace are
poisoned before every launch: what the kernels do not write stays NaN.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from gradient_bounds import check
from poison import poison_memory
from torch import Tensor

from cute_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    launch,
    launch_backward,
    plan16,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bf16", FP16: "fp16"}

# batch, seqlen_q, seqlen_k, heads_q, heads_k
SHAPES = (
    (1, 1, 1, 1, 1),
    (2, 200, 333, 4, 2),
    (1, 300, 100, 2, 1),
    (1, 130, 1000, 6, 2),
    (1, 1, 257, 8, 1),
    (1, 65, 63, 8, 1),
    (3, 129, 129, 1, 1),
)
# head_dim, head_dim_v, dtype and what the call has. A covering table: each pair of two features, and of a feature and
# a head_dim of each kernel, is in a row.
CASES = (
    (64, 64, BF16, ""),
    (64, 64, FP16, "causal deterministic"),
    (64, 64, BF16, "window deterministic sinks"),
    (64, 64, FP16, "softcap alibi"),
    (64, 64, BF16, "causal softcap sinks"),
    (64, 64, BF16, "window alibi"),
    (128, 128, BF16, ""),
    (128, 128, FP16, "deterministic long"),
    (128, 128, FP16, "long"),
    (128, 128, BF16, "causal long"),
    (120, 96, FP16, "causal long deterministic"),
    (128, 128, FP16, "causal sinks"),
    (128, 128, BF16, "window softcap"),
    (128, 128, BF16, "causal alibi deterministic"),
    (128, 128, FP16, "softcap deterministic"),
    (128, 128, BF16, "window alibi sinks"),
    (256, 256, FP16, ""),
    (256, 256, BF16, "causal"),
    (256, 256, BF16, "window softcap alibi deterministic sinks"),
    (256, 256, BF16, "deterministic"),
    (32, 32, BF16, "causal"),
    (40, 72, BF16, "causal"),
    (96, 80, BF16, "long"),
    (120, 128, BF16, "causal"),
    (136, 136, BF16, ""),
    (160, 64, BF16, ""),
    (192, 128, BF16, "causal"),
    (224, 248, BF16, "causal"),
)
# Likewise for the tiles of the kernel by mma.sync, on Hopper.
CASES_SM80 = (
    (64, 64, BF16, "causal softcap sinks"),
    (64, 64, FP16, "window alibi deterministic"),
    (128, 128, FP16, "causal sinks"),
    (128, 128, BF16, "window softcap alibi"),
    (256, 256, BF16, "causal deterministic"),
    (256, 256, FP16, "window softcap sinks"),
    (40, 72, BF16, "causal"),
    (96, 80, BF16, ""),
    (160, 64, BF16, ""),
    (224, 248, BF16, "causal alibi"),
)
RUNS = [("sm90", case) for case in CASES] + [("sm80", case) for case in CASES_SM80]
BACKENDS = pytest.mark.parametrize("backend", ["sm90", "sm80"])
WINDOW = (100, 31)


def masks(features: str) -> dict[str, bool]:
    return {name: name in features for name in ("causal", "window", "softcap", "alibi")}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch, launch, launch_backward)


def tensors(
    shape: tuple[int, ...], head_dim: int, head_dim_v: int, dtype: torch.dtype = BF16
) -> list[Tensor]:
    """N(0, 1) q, k, v; V has a mean, so that D is not small."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
    sizes = ((seqlen_q, heads_q, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    q, k, v = (torch.randn(batch, *size, device=DEVICE) for size in sizes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v + 0.5)]


def name(run: tuple[str, tuple[int, int, torch.dtype, str]]) -> str:
    backend, (d, d_v, dtype, features) = run
    return f"{backend}-{d}-{d_v}-{NAMES[dtype]}-{features}"


@pytest.mark.parametrize("run", RUNS, ids=name)
def test_features(
    run: tuple[str, tuple[int, int, torch.dtype, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """out and lse are both differentiated; GQA, tails, rows without keys. "long": in tiles of long sequences."""
    backend, (d, v, dtype, features) = run
    if "long" in features:
        monkeypatch.setattr(plan16, "LONG_QUERIES_BACKWARD", 1)
        monkeypatch.setattr(plan16, "SHORT_QUERIES_BACKWARD", 0)
    for shape in SHAPES:
        inputs = tensors(shape, d, v, dtype)
        batch, heads = shape[0], shape[3]
        options: dict[str, Any] = {}
        if "softcap" in features:
            options["softcap"] = 5.0
        if "alibi" in features:
            options["alibi_slopes"] = torch.rand(batch, heads, device=DEVICE) * 0.2
        sinks = torch.randn(heads, device=DEVICE).requires_grad_() if "sinks" in features else None
        on = masks(features)
        out, lse = flash_attn_func(
            *inputs,
            causal=on["causal"],
            window_size=WINDOW if on["window"] else (-1, -1),
            deterministic="deterministic" in features,
            return_lse=True,
            sinks=sinks,
            backend=backend,
            **options,
        )
        gradients = (torch.randn_like(out), torch.randn_like(lse))
        leaves = [*inputs, *([] if sinks is None else [sinks])]
        got = list(torch.autograd.grad((out, lse), leaves, gradients))
        window = (-1, 0) if on["causal"] else WINDOW if on["window"] else (-1, -1)
        check(got, inputs, gradients, sinks, window=window, **options)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), WINDOW], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_that_other_ctas_clear(
    head_dim: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one head in turn, CTAs of each head clear the sum of dQ of the next one, which in other tests is cleared
    beforehand. GQA, tails, rows without keys; the last shape has too few keys for that."""
    monkeypatch.setattr(launch_backward, "_bytes_in_turn", lambda config, queries: 1)
    monkeypatch.setattr(
        launch_backward, "_sms", lambda device: 5
    )  # of persistent ones each has several tiles
    for shape in ((2, 321, 455, 6, 3), (3, 500, 135, 4, 2), (1, 705, 701, 8, 8), (2, 1300, 150, 2, 2)):
        inputs = tensors(shape, head_dim, head_dim)
        out, lse = flash_attn_func(*inputs, window_size=window, return_lse=True)
        gradients = (torch.randn_like(out), torch.randn_like(lse))
        for _ in range(3):
            got = list(torch.autograd.grad((out, lse), inputs, gradients, retain_graph=True))
            check(got, inputs, gradients, None, window=window)


@pytest.mark.parametrize(("head_dim", "backend"), [(64, "sm90"), (128, "sm90"), (256, "sm90"), (128, "sm80")])
def test_runs_are_equal_to_the_bit(head_dim: int, backend: str) -> None:
    """Always dk and dv; dq if deterministic. Many key tiles add to each query tile."""
    inputs = tensors((2, 1000, 1500, 4, 2), head_dim, head_dim)
    for causal in (False, True):
        out = flash_attn_func(*inputs, causal=causal, deterministic=True, backend=backend)
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for _ in range(50):
            again = torch.autograd.grad(out, inputs, dout, retain_graph=True)
            assert all(map(torch.equal, first, again))
        free = torch.autograd.grad(flash_attn_func(*inputs, causal=causal, backend=backend), inputs, dout)
        assert all(map(torch.equal, first[1:], free[1:]))
        torch.testing.assert_close(first[0], free[0], rtol=2e-2, atol=1e-3)


@BACKENDS
def test_strided_expanded_and_odd_tensors(backend: str) -> None:
    qkv = torch.randn(2, 300, 3, 4, 64, device=DEVICE).to(BF16).requires_grad_()
    out, lse = flash_attn_qkvpacked_func(qkv, causal=True, return_lse=True, backend=backend)
    parts = [x.detach() for x in qkv.unbind(2)]
    for dout in (
        torch.randn_like(out),
        torch.ones(1, 1, 1, 1, device=DEVICE, dtype=BF16).expand_as(out),
        torch.randn(2, 4, 300, 64, device=DEVICE).to(BF16).transpose(1, 2),
        torch.randn(2, 300, 4, 65, device=DEVICE).to(BF16)[..., 1:],
        torch.randn(2, 300, 64, 4, device=DEVICE).to(BF16).transpose(2, 3),
    ):
        dlse = torch.zeros_like(lse)
        (got,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
        check(list(got.unbind(2)), parts, (dout, dlse), window=(-1, 0))
        (got,) = torch.autograd.grad(
            (out, lse), qkv, (dout, torch.ones((), device=DEVICE).expand_as(lse)), retain_graph=True
        )
        check(list(got.unbind(2)), parts, (dout, torch.ones_like(lse)), window=(-1, 0))
    kv = qkv.detach()[:, :, 1:].requires_grad_()
    out = flash_attn_kvpacked_func(parts[0], kv, causal=True, backend=backend)
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, kv, dout)
    leaves = [x.requires_grad_() for x in parts]
    dq, dk, dv = torch.autograd.grad(flash_attn_func(*leaves, causal=True, backend=backend), leaves, dout)
    assert torch.equal(got, torch.stack([dk, dv], dim=2)) and dq.is_contiguous()
    odd = torch.randn(2, 300, 4, 67, device=DEVICE).to(BF16)[..., 3:].requires_grad_()  # not for TMA
    shared = torch.randn(1, 300, 4, 64, device=DEVICE).to(BF16).requires_grad_()
    out = flash_attn_func(odd, shared.expand(2, -1, -1, -1), odd, causal=True, backend=backend)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (odd, shared), dout)
    copies = [x.detach().clone().requires_grad_() for x in (odd, shared.expand(2, -1, -1, -1), odd)]
    out = flash_attn_func(*copies, causal=True, backend=backend)
    a, b, c = torch.autograd.grad(out, copies, dout)
    torch.testing.assert_close(got[0], a + c, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[1], b.sum(0, keepdim=True), rtol=2e-2, atol=2e-2)


def test_graph_is_kept_and_parts_are_left_out() -> None:
    q, k, v = tensors((1, 300, 300, 4, 4), 128, 128)
    out, lse = flash_attn_func(q, k, v, causal=True, deterministic=True, return_lse=True)
    loss = (out.float() ** 2).sum() + lse.sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (q, k, v))))
    only = flash_attn_func(q.detach(), k, v.detach(), causal=True, deterministic=True)
    (only.float() ** 2).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.0])
def test_softmax_scale_of_any_sign(scale: float) -> None:
    inputs = tensors((1, 200, 300, 2, 2), 128, 128)
    out = flash_attn_func(*inputs, softmax_scale=scale)
    dout = torch.randn_like(out)
    got = list(torch.autograd.grad(out, inputs, dout))
    check(got, inputs, (dout, torch.zeros(1, 2, 200, device=DEVICE)), softmax_scale=scale)


@BACKENDS
def test_nothing_is_read_past_the_end(backend: str) -> None:
    """What lies behind q, k, v and dout in memory is NaN."""
    for d in (64, 128, 256):
        parts = []
        for s in (130, 200, 200, 130):
            room = torch.full((s * d + 4096,), math.nan, dtype=BF16, device=DEVICE)
            room[: s * d] = torch.randn(s * d, device=DEVICE).to(BF16)
            parts.append(room[: s * d].view(1, s, 1, d))
        inputs = [x.requires_grad_() for x in parts[:3]]
        got = torch.autograd.grad(flash_attn_func(*inputs, backend=backend), inputs, parts[3])
        check(list(got), inputs, (parts[3], torch.zeros(1, 1, 130, device=DEVICE)))


def test_long_sequences_and_linear_memory() -> None:
    peaks = []
    for seqlen in (8192, 16384):
        inputs = tensors((1, seqlen, seqlen, 2, 2), 128, 128)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flash_attn_func(*inputs, causal=True)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert all(bool(x.isfinite().all()) for x in gradients)
    assert peaks[1] < 2.1 * peaks[0]
    inputs = tensors((1, 4096, 4096, 2, 2), 128, 128)
    out = flash_attn_func(*inputs, causal=True)
    dout = torch.randn_like(out)
    got = list(torch.autograd.grad(out, inputs, dout))
    check(got, inputs, (dout, torch.zeros(1, 2, 4096, device=DEVICE)), window=(-1, 0))


@BACKENDS
def test_torch_compile_and_graphs(backend: str) -> None:
    q, k, v = tensors((1, 300, 300, 4, 4), 64, 64)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q * 2, k, v, causal=True, deterministic=True, backend=backend)
        return out.float().sum()

    want = torch.autograd.grad(run(q, k, v), (q, k, v))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, want, torch.autograd.grad(compiled(q, k, v), (q, k, v))))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(run(q, k, v), (q, k, v))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(run(q, k, v), (q, k, v))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, want, captured))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_persistent_ctas_in_replayed_graphs_and_side_by_side(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of key tiles begins at zero in every replay, and two streams have one each. dk and dv are sums in a
    fixed order, so they are equal to the bit."""
    monkeypatch.setattr(launch_backward, "_sms", lambda device: 5)
    config = plan16.backward16_config(head_dim, head_dim, "bf16", causal=True, seqlen_q=700)
    assert config.persistent
    calls, want, graphs, captured, streams = [], [], [], [], []
    for _ in range(2):
        q, k, v = (x.detach() for x in tensors((2, 700, 900, 4, 2), head_dim, head_dim))
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        plan = launch_backward.Backward16(
            q.shape, v.shape, config, q.device, batch=2, softmax_scale=head_dim**-0.5
        )
        call = functools.partial(plan, q, k, v, out, lse, torch.randn_like(out))
        calls.append(call)
        want.append([x.clone() for x in call()[:3]])
    torch.cuda.synchronize()
    for call in calls:
        streams.append(torch.cuda.Stream())
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=streams[-1]):
            captured.append(call()[:3])
    for _ in range(5):
        for gradient in itertools.chain.from_iterable(captured):
            gradient.fill_(math.nan)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(captured, want, strict=True):
            assert all(map(torch.equal, got[1:], expected[1:]))
            torch.testing.assert_close(got[0], expected[0], rtol=2e-2, atol=1e-3)
