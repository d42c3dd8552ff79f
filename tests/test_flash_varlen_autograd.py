"""Gradients of `flash_attn_varlen_func` without a GPU: the definition, the operators, the launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from cute_attn import (
    flash,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_varlen,
    flash_varlen_autograd,
    launch_backward,
)
from cute_attn.flash_backward import reference_varlen_backward
from cute_attn.flash_varlen import reference_varlen
from cute_attn.kernels.config import Bwd16Config
from cute_attn.launch import LOG2_E
from cute_attn.plan16 import backward16_config
from cute_attn.remember import Remembered

BF16 = torch.bfloat16
FORWARD, BACKWARD = flash_varlen_autograd._forward, flash_varlen_autograd._backward

# Queries and keys of each sequence: none, few keys, so that a causal mask leaves rows without one, and many.
LENGTHS = ((3, 4), (0, 2), (5, 0), (4, 2), (0, 0), (6, 9))
USED = (4, 1, 0, -3, 5, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"window": (-1, 0)},
    "window": {"window": (2, 1)},
    "all": {"window": (2, 0), "softcap": 1.5, "alibi_slopes": True, "sinks": True, "used": True},
    "used": {"used": True},
}


def ends(lengths: Any, first: int = 0) -> Tensor:
    return torch.tensor([first, *(first + x for x in itertools.accumulate(lengths))], dtype=torch.int32)


def inputs(dtype: torch.dtype = BF16, head_dim_v: int = 32, outside: int = 0) -> list[Any]:
    """q, k, v, which require grad, and where their sequences end; `outside` rows of none before and behind."""
    queries, keys = zip(*LENGTHS, strict=True)
    rows, columns = sum(queries) + 2 * outside, sum(keys) + 2 * outside
    tensors = (torch.randn(rows, 4, 64), torch.randn(columns, 2, 64), torch.randn(columns, 2, head_dim_v))
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    return [*leaves, ends(queries, outside), ends(keys, outside)]


def attend(given: list[Any], **options: Any) -> Any:
    return flash_attn_varlen_func(*given, 6, 9, backend="reference", **options)


# --- the definition


@pytest.mark.parametrize("name", OPTIONS)
def test_reference_is_the_gradient(name: str) -> None:
    """Against autograd through the forward's definition in float64, with rows of no sequence."""
    *tensors, cu_q, cu_k = inputs(torch.float64, outside=2)
    options = {"softmax_scale": 0.3, **OPTIONS[name]}
    used = torch.tensor(USED, dtype=torch.int32) if options.pop("used", False) else None
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(6, 4)
    if "sinks" in options:
        options["sinks"] = torch.randn(4, dtype=torch.float64, requires_grad=True)
        tensors.append(options["sinks"])
    out, lse = reference_varlen(*tensors[:3], cu_q, cu_k, seqused_k=used, dtype=torch.float64, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    seen = lse.isfinite()  # autograd makes NaN of a row without keys
    want = torch.autograd.grad((out, torch.where(seen, lse, 0.0)), tensors, (dout, dlse), retain_graph=True)
    detached = [x.detach() for x in (*tensors[:3], out, lse)]
    got = reference_varlen_backward(
        *detached, dout, dlse, cu_q, cu_k, seqused_k=used, dtype=torch.float64, **options
    )
    for x, y in zip(got, want, strict=False):
        torch.testing.assert_close(x, y.nan_to_num(0.0), atol=1e-10, rtol=1e-10)
    for x, cu in zip(got[:3], (cu_q, cu_k, cu_k), strict=True):
        assert bool((x[: cu[0]] == 0).all()) and bool((x[cu[-1] :] == 0).all())


# --- the operators


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_each_sequence(causal: bool) -> None:
    *tensors, cu_q, cu_k = inputs(outside=1)
    used, slopes = torch.tensor(USED, dtype=torch.int32), torch.rand(6, 4)
    sinks = torch.randn(4, requires_grad=True)
    options: dict[str, Any] = {"causal": causal, "softcap": 2.0, "sinks": sinks, "return_lse": True}
    given = [*tensors, cu_q, cu_k]
    out, lse = attend(given, seqused_k=used, alibi_slopes=slopes, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), [*tensors, sinks], (dout, dlse))
    want = [torch.zeros_like(x) for x in (*tensors, sinks)]
    for b in range(6):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        keys = slice(int(cu_k[b]), min(int(cu_k[b + 1]), int(cu_k[b]) + max(USED[b], 0)))
        parts = [
            x.detach()[None, at].requires_grad_() for x, at in zip(tensors, (rows, keys, keys), strict=True)
        ]
        one, one_lse = flash_attn_func(*parts, alibi_slopes=slopes[b], backend="reference", **options)
        found = torch.autograd.grad((one, one_lse), [*parts, sinks], (dout[None, rows], dlse[None, :, rows]))
        want[0][rows], want[1][keys], want[2][keys] = (x[0] for x in found[:3])
        want[3] += found[3]
    assert all(map(torch.equal, got[:3], want[:3]))
    torch.testing.assert_close(got[3], want[3])
    with torch.no_grad():
        again, again_lse = attend(given, seqused_k=used, alibi_slopes=slopes, **options)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_only_what_is_needed_and_once() -> None:
    q, k, v, *cu = inputs()
    out = attend([q.detach(), k, v.detach(), *cu])
    (dk,) = torch.autograd.grad(out.float().sum(), k, create_graph=True)  # the gradient of out is expanded
    with pytest.raises(RuntimeError, match="flash_attn_varlen_backward"):
        dk.float().sum().backward()
    _, lse = attend([q, k, v, *cu], causal=True, return_lse=True)
    dq, dv = torch.autograd.grad(lse[:, -6:].sum(), (q, v))
    assert bool((dv == 0).all()) and bool((dq[:-6] == 0).all()) and bool((dq[-6:] != 0).any())
    with torch.no_grad():
        assert not attend([q, k, v, *cu]).requires_grad
    with pytest.raises(
        NotImplementedError, match="alibi_slopes requires grad, but there is no gradient of it"
    ):
        attend([q, k, v, *cu], alibi_slopes=torch.zeros(4, requires_grad=True))


def test_a_dispatch_mode_sees_operators() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    given = inputs()
    want = torch.autograd.grad(attend(given).float().sum(), given[:3])
    with Seen():
        out = attend(given)
        got = torch.autograd.grad(out.float().sum(), given[:3])
    assert all(map(torch.equal, got, want))
    assert {f"cute_attn::flash_attn_varlen_{x}" for x in ("forward", "backward")} <= set(names)


def test_packed_forms() -> None:
    lengths = (5, 0, 2)
    cu = ends(lengths)
    qkv = torch.randn(7, 3, 4, 64).to(BF16).requires_grad_()
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(1))
    more: dict[str, Any] = {"causal": True, "backend": "reference"}
    out = flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, **more)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), dout)
    (got,) = torch.autograd.grad(flash_attn_varlen_qkvpacked_func(qkv, cu, 5, **more), qkv, dout)
    assert torch.equal(got, torch.stack(want, dim=1))
    kv = qkv.detach()[:, 1:].requires_grad_()
    (got,) = torch.autograd.grad(
        flash_attn_varlen_kvpacked_func(q.detach(), kv, cu, cu, 5, 5, **more), kv, dout
    )
    assert torch.equal(got, torch.stack(want[1:], dim=1))


def test_used_keys_of_a_batch() -> None:
    q, k, v = (torch.randn(3, n, h, 64).to(BF16).requires_grad_() for n, h in ((5, 4), (7, 2), (7, 2)))
    used = torch.tensor([7, 0, 3], dtype=torch.int32)
    out, lse = flash_attn_func(q, k, v, causal=True, seqused_k=used, return_lse=True, backend="reference")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for b, n in enumerate(used.tolist()):
        parts = [x.detach()[b : b + 1].requires_grad_() for x in (q, k[:, :n], v[:, :n])]
        one = flash_attn_func(*parts, causal=True, return_lse=True, backend="reference")
        want = torch.autograd.grad(one, parts, (dout[b : b + 1], dlse[b : b + 1]))
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x[b, : y.shape[1]], y[0]) and bool((x[b, y.shape[1] :] == 0).all())


@pytest.mark.parametrize("lengths", [((3, 0), (2, 0)), ((0, 3), (0, 1)), ()], ids=str)
def test_no_sequences_rows_or_keys(lengths: tuple[tuple[int, int], ...]) -> None:
    rows, keys = (sum(x) for x in zip(*lengths, strict=True)) if lengths else (4, 4)
    q, k, v = (torch.randn(n, 4, 64).to(BF16).requires_grad_() for n in (rows, keys, keys))
    sinks = torch.randn(4, requires_grad=True)
    cu = [ends([x[i] for x in lengths]) for i in range(2)]
    out, lse = flash_attn_varlen_func(q, k, v, *cu, 3, 3, sinks=sinks, return_lse=True, backend="reference")
    dlse = torch.randn_like(lse)
    *gradients, dsinks = torch.autograd.grad((out, lse), (q, k, v, sinks), (torch.randn_like(out), dlse))
    assert all(bool((x == 0).all()) and x.shape == y.shape for x, y in zip(gradients, (q, k, v), strict=True))
    torch.testing.assert_close(dsinks, dlse.sum(1))  # lse is the sink


def test_opcheck() -> None:
    q, k, v, *cu = inputs()
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4)
    used = torch.tensor(USED, dtype=torch.int32)
    for side, options in (
        ((used, slopes, sinks), (None, True, -1, -1, 3.0, False, "reference")),
        ((None, None, None), (0.3, False, 2, 1, 0.0, True, "reference")),
    ):
        opcheck(FORWARD, (q, k, v, *cu, *side, *options))
        with torch.no_grad():
            out, lse = FORWARD(q, k, v, *cu, *side, *options)
        given = [None if x is None else x.detach() for x in (q, k, v, out, lse, *cu, *side)]
        opcheck(BACKWARD, (torch.randn_like(out), torch.randn_like(lse), *given, *options))
        opcheck(BACKWARD, (torch.randn_like(out), None, *given, *options))


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_one_graph(dynamic: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, sinks: Tensor) -> Tensor:
        out, lse = flash_attn_varlen_func(
            q * 2,
            k,
            v,
            cu,
            cu,
            longest,
            longest,
            causal=True,
            sinks=sinks,
            return_lse=True,
            backend="reference",
        )
        return out.float().sum() + lse.sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for lengths in ((5, 3), (9, 0, 4)):
        tensors = [torch.randn(sum(lengths), h, 64).to(BF16).requires_grad_() for h in (4, 2, 2)]
        sinks = torch.randn(4, requires_grad=True)
        given, leaves = (*tensors, ends(lengths), max(lengths), sinks), [*tensors, sinks]
        want = torch.autograd.grad(run(*given), leaves)
        assert all(map(torch.equal, want, torch.autograd.grad(compiled(*given), leaves)))


# --- the launch


def test_what_the_backward_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and its arguments, on a Hopper GPU that is not there."""
    calls: list[tuple[Bwd16Config, dict[str, Any]]] = []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, config: Any, **options: Any
    ) -> Any:
        return torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype), torch.zeros(q.shape[1], q.shape[0])

    def prepared(
        shape_q: Any, shape_v: Any, config: Bwd16Config, device: torch.device, **about: Any
    ) -> Callable[..., tuple[Tensor, ...]]:
        def backward(*given: Any, **options: Any) -> tuple[Tensor, ...]:
            *tensors, (cu_q, cu_k, used) = given
            assert len(tensors) == 6 and cu_q is cu[0] and cu_k is cu[1] and about["batch"] == 6
            assert (tensors[0].shape, tensors[2].shape) == (shape_q, shape_v)
            assert all(flash._loadable(x) and x.stride(2) == 1 for x in (*tensors[:4], tensors[5]))
            calls.append((config, {**about, **options, "seqused_k": used}))
            lse2, d = torch.zeros(4, 128), torch.zeros(4, 128)
            lse2[:, ::2] = torch.inf  # slots without a row
            d[:, 1::2] = 1.0
            return *(torch.zeros_like(x) for x in tensors[:3]), lse2, d

        return backward

    monkeypatch.setattr("cute_attn.launch.launch_forward16_varlen", forward)
    monkeypatch.setattr("cute_attn.launch_backward.Backward16", prepared)
    monkeypatch.setattr(flash, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_varlen, "_plans", Remembered())
    *tensors, cu_q, cu_k = inputs(head_dim_v=40)
    cu = (cu_q, cu_k)
    sinks = torch.zeros(4, requires_grad=True)

    def launched(**options: Any) -> tuple[Bwd16Config, dict[str, Any]]:
        flash_attn_varlen_func(*tensors, *cu, 6, 9, **options).sum().backward()
        return calls[-1]

    config, options = launched(causal=True)
    assert config == backward16_config(64, 40, "bf16", causal=True, varlen=True)
    assert options["window"] == (-1, 0) and options["softmax_scale"] == 0.125
    assert options["dlse"] is None and options["seqused_k"] is None and options["alibi_slopes"] is None
    used = torch.tensor(USED, dtype=torch.int32)
    more: dict[str, Any] = {"deterministic": True, "softcap": 2.0, "alibi_slopes": torch.zeros(4)}
    config, options = launched(window_size=(7, 9), seqused_k=used, **more)
    assert config.window and config.deterministic and config.softcap and config.alibi and config.varlen
    assert (options["window"], options["softcap"]) == ((7, 9), 2.0)
    assert options["alibi_slopes"].shape == (6, 4) and torch.equal(options["seqused_k"], used)
    launched(sinks=sinks)
    assert torch.equal(sinks.grad, torch.full((4,), -64.0))  # exp(0 - 0) * 1 of 64 rows


def test_arguments_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launch_backward, "compile_kernel", lambda config: lambda *given: seen.append(given))
    q, k, v, cu_q, cu_k = [x.detach() for x in inputs(head_dim_v=40)]
    out, lse = torch.zeros(18, 4, 40, dtype=BF16), torch.zeros(4, 18)
    used = torch.tensor(USED, dtype=torch.int32)
    for deterministic in (False, True):
        config = backward16_config(64, 40, "bf16", window=True, deterministic=deterministic, varlen=True)
        backward = launch_backward.Backward16(
            q.shape, v.shape, config, q.device, batch=6, softmax_scale=0.5, window=(-1, 3)
        )
        dq, dk, dv, lse2, d = backward(q, k, v, out, lse, out, (cu_q, cu_k, used))
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        assert (dq.dtype, dk.dtype, dv.dtype) == (BF16, BF16, BF16)
        slots = 18 // 128 + 6
        assert lse2.shape == d.shape == (4, slots * 128)
        at = seen[-1]
        assert at[:6] == (q, k, v, out, out, lse) and at[6].shape == (4, 18) and at[7].shape == (6, 4)
        assert at[8] is dq and at[9] is dk and at[10] is dv and at[11] is lse2 and at[12] is d
        assert at[13].shape == (4, slots, 128 * 64) and at[14].shape == (4, slots if deterministic else 1, 2)
        assert at[14].dtype == torch.int32 and at[14].is_contiguous() == deterministic
        assert at[15] is cu_q and at[16] is cu_k and at[17] is used
        # two heads of K: both fit, by the average length of three rows
        assert at[18:] == (0.5, 0.5 * LOG2_E, 0.0, 17, 3, 1, 2)
    backward = launch_backward.Backward16(
        q.shape, v.shape, config, q.device, batch=6, softmax_scale=0.5, softcap=2.0
    )
    backward(q, k, v, out, lse, out, (cu_q, cu_k, None), dlse=lse)
    at = seen[-1]
    assert at[6] is lse and at[17] is cu_k
    assert at[18:] == (0.5, 2.0 * LOG2_E, 0.5 * LOG2_E, 17, 18, 0, 2)
