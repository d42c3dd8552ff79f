"""`sdpa`, its region, and torch's registry, beside torch's own function."""

from __future__ import annotations

import concurrent.futures
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cute_attn
from cute_attn import AttentionLog, dispatch, explain_sdpa, sdpa, sdpa_region, torch_sdpa
from cute_attn.bench.accuracy import error_metrics
from cute_attn.dispatch import TORCH

BF16 = torch.bfloat16
TORCHS = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dispatch._choices.clear()
    torch_sdpa.sdpa_log.calls.clear()
    yield


def tensors(
    seqlen_q: int = 40,
    seqlen_k: int = 40,
    heads_q: int = 4,
    heads_k: int = 4,
    head_dim: int = 64,
    head_dim_v: int = 64,
    dtype: torch.dtype = BF16,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return (
        normal(2, heads_q, seqlen_q, head_dim),
        normal(2, heads_k, seqlen_k, head_dim),
        normal(2, heads_k, seqlen_k, head_dim_v),
    )


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return TORCHS(q.double(), k.double(), v.double(), **options)


@pytest.mark.parametrize("precision", ["bf16", "accurate"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (40, 70), (70, 40), (1, 40), (40, 1)])
def test_agrees_with_torch(seqlen_q: int, seqlen_k: int, is_causal: bool, precision: str) -> None:
    """Top-left alignment for a causal mask, whichever of the lengths is larger."""
    q, k, v = tensors(seqlen_q, seqlen_k)
    log = AttentionLog()
    out = sdpa(q, k, v, is_causal=is_causal, precision=precision, backend="emulator", log=log)
    expected = exact(q, k, v, is_causal=is_causal)
    assert out.shape == expected.shape and out.dtype == BF16
    assert error_metrics(out, expected)["rel_rmse"] < (0.006 if precision == "bf16" else 0.05)
    assert TORCH not in log.kernels and log.total == 1


def test_grouped_heads_scale_and_head_dim_v() -> None:
    q, k, v = tensors(heads_q=6, heads_k=2, head_dim_v=32)
    options: dict[str, Any] = {"enable_gqa": True, "scale": 0.3}
    out = sdpa(q, k, v, **options, backend="emulator")
    assert error_metrics(out, exact(q, k, v, **options))["rel_rmse"] < 0.006


def test_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels get views of the caller's memory, and the result is a view of what they return."""
    q, k, v = tensors(heads_q=4, heads_k=4)
    given: list[Tensor] = []

    def record(*args: Tensor, **more: Any) -> Tensor:
        given.extend(args)
        return torch.zeros(2, 40, 4, 64, dtype=BF16)

    monkeypatch.setattr(dispatch.flash, "flash_attn_func", record)
    out = sdpa(q, k, v, backend="emulator")
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in (q, k, v)]
    assert [tuple(x.shape) for x in given] == [(2, 40, 4, 64)] * 3
    assert out.shape == (2, 4, 40, 64) and not out.is_contiguous() and out.stride(-1) == 1


def _mask(dtype: torch.dtype) -> Tensor:
    visible = torch.rand(40, 40) < 0.7
    visible[:, 0] = True
    return visible if dtype == torch.bool else torch.where(visible, 0.5, -math.inf).to(dtype)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (tensors, {"attn_mask": _mask(torch.bool)}, r"attn_mask is given \(torch.bool\)"),
        (tensors, {"attn_mask": _mask(BF16)}, r"attn_mask is given \(torch.bfloat16\)"),
        (
            lambda: tensors(dtype=torch.float32),
            {},
            "q has dtype torch.float32; allowed: torch.float16, torch.bf",
        ),
        (lambda: tensors(head_dim=20, head_dim_v=20), {}, "head_dim of q is 20; allowed: multiples of 8"),
        (lambda: tuple(x[:, 0] for x in tensors()), {}, "query, key and value have 3, 3 and 3 dimensions"),
        (lambda: (tensors()[0], *(x[:, :1] for x in tensors()[1:])), {}, "key has 1 heads and query 4"),
    ],
)
def test_left_to_torch(make: Callable[[], Any], options: dict[str, Any], reason: str) -> None:
    """torch's result, a warning once, the reason in the log; or an error where that is asked for."""
    q, k, v = make()
    log = AttentionLog()
    with pytest.warns(UserWarning, match=reason):
        out = sdpa(q, k, v, **options, backend="emulator", log=log)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa(q, k, v, **options, backend="emulator", log=log)
    assert torch.equal(out, TORCHS(q, k, v, **options))
    assert log.kernels == {TORCH: 2}
    [(found, count)] = log.fallbacks.items()
    assert (
        count == 2
        and found in str(log)
        and found in str(explain_sdpa(q, k, v, **options, backend="emulator"))
    )
    with pytest.raises(NotImplementedError, match=reason):
        sdpa(q, k, v, **options, backend="emulator", fallback="error")


def test_dropout_is_left_to_torch() -> None:
    q, k, v = tensors()
    with pytest.warns(UserWarning, match=r"dropout_p is 0.5"):
        sdpa(q, k, v, dropout_p=0.5, backend="emulator")
    assert cute_attn.sdpa_log.kernels == {TORCH: 1}


def test_auto_without_a_hopper_gpu_is_torch() -> None:
    q, k, v = tensors()
    with pytest.warns(UserWarning, match="q is on cpu, and the kernels need a GPU of compute capability"):
        out = sdpa(q, k, v, precision="fp8")
    assert torch.equal(out, TORCHS(q, k, v))


def test_what_no_8bit_kernel_takes_goes_to_the_16bit_one() -> None:
    q, k, v = tensors(head_dim=40, head_dim_v=40)
    log = AttentionLog()
    out = sdpa(q, k, v, precision="fp8", backend="emulator", log=log)
    assert error_metrics(out, exact(q, k, v))["rel_rmse"] < 0.006
    [(ran, count)] = log.calls.items()
    assert ran.kernel == "reference" and count == 1
    assert ran.reason is not None and ran.reason.startswith("head_dim of q is 40; allowed: a multiple of 16")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "fp4"}, ValueError, "precision is 'fp4'; allowed: 'bf16', 'naive'"),
        ({"precision": 8}, TypeError, "precision is a int"),
        ({"backend": "sm70"}, ValueError, "backend is 'sm70'; allowed: 'auto', 'sm90', 'sm80', 'emulator'"),
        ({"backend": "sm90"}, ValueError, "backend is 'sm90' but q is on a device that is no NVIDIA GPU"),
        ({"fallback": "silent"}, ValueError, "fallback is 'silent'; allowed: 'torch', 'error'"),
        (
            {"attn_mask": torch.ones(40, 40), "is_causal": True},
            ValueError,
            "attn_mask is given and is_causal is True",
        ),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = tensors()
    with pytest.raises(error, match=message):
        sdpa(q, k, v, **options)
    region = {name: options[name] for name in options if name in ("precision", "backend", "fallback")}
    if region and options != {"backend": "sm90"}:
        with pytest.raises(error, match=message), sdpa_region(**region):
            pass


def test_torch_raises_its_own_errors() -> None:
    q, k, v = tensors()
    with pytest.warns(UserWarning), pytest.raises(RuntimeError):
        sdpa(q, k[..., :32], v, backend="emulator")
    with pytest.warns(UserWarning), pytest.raises(TypeError):
        sdpa(q, k, 3)  # type: ignore[arg-type]


def test_plans_depend_on_all_that_they_read() -> None:
    q, k, v = tensors()
    log = AttentionLog()
    sdpa(q, k, v, backend="emulator", log=log)
    with torch.no_grad():
        sdpa(q.clone().requires_grad_(), k, v, backend="emulator", log=log)
    sdpa(q, k, v, precision="accurate", backend="emulator", log=log)
    sdpa(q, k, v, precision="fp8", backend="emulator", log=log)
    assert log.total == 4 and len(log.kernels) == 3 and not log.fallbacks
    grad = q.clone().requires_grad_()
    for precision in ("bf16", "fp8"):
        assert sdpa(grad, k, v, precision=precision, backend="emulator", log=log).requires_grad
    with torch.no_grad():
        assert not sdpa(grad, k, v, precision="fp8", backend="emulator", log=log).requires_grad
    assert len(log.kernels) == 3 and not log.fallbacks


def test_region_takes_every_call_and_ends() -> None:
    q, k, v = tensors()
    layer = torch.nn.MultiheadAttention(128, 2, batch_first=True).to(BF16)
    x = torch.randn(2, 40, 128).to(BF16)
    with torch.no_grad(), sdpa_region(precision="accurate", backend="emulator") as log:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scaled = F.scaled_dot_product_attention(q, k, v, scale=0.2)
        layer(x, x, x, need_weights=False)
    assert log.total == 3 and TORCH not in log.kernels and not log.fallbacks
    assert all(name.startswith("emulator(") for name in log.kernels)
    assert 0 < error_metrics(scaled, exact(q, k, v, scale=0.2))["rel_rmse"] < 0.05
    assert F.scaled_dot_product_attention is TORCHS
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCHS(q, k, v)) and log.total == 3
    assert "3 attention calls" in str(log) and str(AttentionLog()) == "no attention call"


def test_regions_nest() -> None:
    q, k, v = tensors()
    with sdpa_region(backend="emulator") as outer:
        with sdpa_region(precision="fp8", backend="emulator") as inner:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert inner.total == 1 and outer.kernels == {"reference": 1}


def test_region_ends_when_its_body_raises() -> None:
    with pytest.raises(ZeroDivisionError), sdpa_region(backend="emulator"):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCHS


def test_other_threads_keep_torchs_function() -> None:
    q, k, v = tensors()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, sdpa_region(backend="emulator") as log:
        out = pool.submit(lambda: F.scaled_dot_product_attention(q, k, v)).result()
    assert log.total == 0 and torch.equal(out, TORCHS(q, k, v))


def test_compiled_code_keeps_torchs_function() -> None:
    """Traced within a region, in one graph, and run in and out of it."""
    q, k, v = tensors()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1, backend="eager", fullgraph=True
    )
    with torch.no_grad(), sdpa_region(backend="emulator") as log:
        inside = compiled(q, k, v)
    assert log.total == 0
    assert torch.equal(inside, TORCHS(q, k, v) + 1) and torch.equal(inside, compiled(q, k, v))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 40), (40, 0)])
def test_empty(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = tensors(seqlen_q, seqlen_k)
    for is_causal in (False, True):
        out = sdpa(q, k, v, is_causal=is_causal, backend="emulator")
        assert out.shape == (2, 4, seqlen_q, 64) and not out.any()


@pytest.mark.parametrize("precision", ["bf16", "accurate"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (40, 70), (70, 40)])
def test_gradients_in_a_region(seqlen_q: int, seqlen_k: int, is_causal: bool, precision: str) -> None:
    """By the 16-bit backward, with the result of the forward that was asked for."""
    inputs = [x.requires_grad_() for x in tensors(seqlen_q, seqlen_k, heads_q=4, heads_k=2)]
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    wanted = exact(*inputs, **options)
    weights = torch.randn_like(wanted)
    with sdpa_region(precision=precision, backend="emulator", fallback="error") as log:
        out = F.scaled_dot_product_attention(*inputs, **options)
    assert not log.fallbacks
    assert all(kernel.startswith("emulator(") == (precision != "bf16") for kernel in log.kernels)
    got = torch.autograd.grad((out * weights).sum(), inputs)
    want = torch.autograd.grad((wanted * weights).sum(), inputs)
    for mine, theirs in zip(
        got, want, strict=True
    ):  # in 8 bits rows that see few keys have most of the error
        assert error_metrics(mine, theirs)["rel_rmse"] < (0.02 if precision == "bf16" else 0.05)


# --- torch's registry


def test_registered_and_not_activated() -> None:
    attention = pytest.importorskip("torch.nn.attention", reason="torch has no registry")
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash implementations")
    cute_attn.register_flash_attention_impl()
    assert "cute_attn" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None


def test_no_registry_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.nn.attention.register_flash_attention_impl", raising=False)
    with pytest.raises(NotImplementedError, match="has no registry of flash implementations"):
        cute_attn.register_flash_attention_impl()


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_operator(is_causal: bool) -> None:
    """The nine results of torch's operator, from the stand-in of the kernel."""
    q, k, v = tensors(heads_q=4, heads_k=2)
    results = torch_sdpa._flash_sdpa(q.requires_grad_(), k, v, 0.0, is_causal, scale=0.2, backend="emulator")
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, debug = results
    expected = exact(q.detach(), k, v, is_causal=is_causal, enable_gqa=True, scale=0.2)
    assert error_metrics(out, expected)["rel_rmse"] < 0.006 and not out.requires_grad
    scores = q.detach().double() @ k.double().repeat_interleave(2, 1).mT * 0.2
    if is_causal:
        scores = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-4) and lse.dtype == torch.float32
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 40, 40)
    assert seed.dtype == offset.dtype == torch.uint64 and debug.numel() == 0


# --- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "accurate", "fp8"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (200, 500), (500, 200)])
def test_kernels_agree_with_torch(seqlen_q: int, seqlen_k: int, is_causal: bool, precision: str) -> None:
    q, k, v = tensors(seqlen_q, seqlen_k, heads_q=8, heads_k=2, head_dim=128, head_dim_v=128, device="cuda")
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    out = sdpa(q, k, v, **options, precision=precision, backend="sm90", fallback="error")
    error = error_metrics(out, exact(q, k, v, **options))["rel_rmse"]
    assert error < {"bf16": 0.006, "accurate": 0.05, "fp8": 0.09}[precision]


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "limit"), [("bf16", 0.02), ("accurate", 0.05)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (500, 200)])
def test_gradients_of_the_kernels(seqlen_q: int, seqlen_k: int, precision: str, limit: float) -> None:
    inputs = [
        x.requires_grad_()
        for x in tensors(
            seqlen_q, seqlen_k, heads_q=8, heads_k=2, head_dim=128, head_dim_v=128, device="cuda"
        )
    ]
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    wanted = exact(*inputs, **options)
    weights = torch.randn_like(wanted)
    with sdpa_region(precision=precision, backend="sm90", fallback="error") as log:
        out = F.scaled_dot_product_attention(*inputs, **options)
    assert not log.fallbacks
    got = torch.autograd.grad((out * weights).sum(), inputs)
    want = torch.autograd.grad((wanted * weights).sum(), inputs)
    for mine, theirs in zip(got, want, strict=True):
        assert error_metrics(mine, theirs)["rel_rmse"] < limit


@pytest.mark.gpu
def test_torch_chooses_the_registered_kernel() -> None:
    """Forward by the kernel, backward by torch from its out and log-sum-exp."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash implementations")
    q, k, v = (x.requires_grad_() for x in tensors(300, 300, head_dim=128, head_dim_v=128, device="cuda"))
    wanted = exact(q, k, v, is_causal=True)
    want = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    cute_attn.register_flash_attention_impl()
    attention.activate_flash_attention_impl("cute_attn")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    finally:
        attention.restore_flash_attention_impl()
    assert error_metrics(out, wanted)["rel_rmse"] < 0.006 and bool(dropped.isfinite().all())
    for mine, theirs in zip(got, want, strict=True):
        assert error_metrics(mine, theirs)["rel_rmse"] < 0.02
