"""Gradients of 16-bit attention without a GPU: the definition, the operators, the plan, the compiled code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import figures_of, no_spills
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cute_attn import (
    flash,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_autograd,
    launch_backward,
    plan16,
)
from cute_attn.compile import KernelFigures
from cute_attn.flash import masked_scores, reference
from cute_attn.flash_autograd import runs_directly
from cute_attn.flash_backward import reference_backward
from cute_attn.kernels.config import HEAD_DIMS_16BIT, REGISTERS_PER_SM, SMEM_LIMIT, Bwd16Config
from cute_attn.launch import LOG2_E
from cute_attn.plan16 import backward16_config
from cute_attn.remember import Remembered

BF16, FP16 = torch.bfloat16, torch.float16
FORWARD = torch.ops.cute_attn.flash_attn_forward.default
BACKWARD = torch.ops.cute_attn.flash_attn_backward.default

# softmax_scale, window, softcap, alibi_slopes, sinks
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"window": (-1, 0)},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "negative scale": {"softmax_scale": -0.6},
    "all": {"window": (2, 0), "softcap": 1.5, "alibi_slopes": True, "sinks": True},
}
# seqlen_q, seqlen_k, heads_q, heads_k; of six queries over four keys a causal mask leaves two without a key
SHAPES = ((3, 5, 2, 1), (6, 4, 3, 3))


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, head_dim: int = 3, head_dim_v: int = 2
) -> list[Tensor]:
    seqlen_q, seqlen_k, heads_q, heads_k = shape
    sizes = ((seqlen_q, heads_q, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    return [torch.randn(2, *size).to(dtype).requires_grad_() for size in sizes]


def bf16_inputs(shape: tuple[int, ...] = (5, 7, 4, 2)) -> list[Tensor]:
    return inputs(shape, BF16, 32, 40)


class Definition(torch.autograd.Function):
    """`reference` with the gradient of `reference_backward`, in float64."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, options):
        out, lse = reference(q, k, v, sinks=sinks, dtype=torch.float64, **options)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.options = options
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # differences of infinities would be NaN

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
        gradients = reference_backward(
            q, k, v, out, lse, dout, dlse, sinks=sinks, dtype=torch.float64, **ctx.options
        )
        return *gradients, None


# --- the definition


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name: str, shape: tuple[int, ...]) -> None:
    options = {"softmax_scale": 0.8, **OPTIONS[name]}
    q, k, v = inputs(shape, torch.float64)
    sinks = (
        torch.randn(shape[2], dtype=torch.float64, requires_grad=True) if options.pop("sinks", 0) else None
    )
    if options.pop("alibi_slopes", False):
        options["alibi_slopes"] = torch.rand(2, shape[2], dtype=torch.float64)
    assert torch.autograd.gradcheck(Definition.apply, (q, k, v, sinks, options))


def test_rows_without_keys_add_nothing() -> None:
    q, k, v = inputs((6, 4, 2, 2), torch.float64)
    options: dict[str, Any] = {"softmax_scale": 1.0, "window": (-1, 0), "dtype": torch.float64}
    out, lse = reference(q, k, v, **options)
    assert bool((lse[..., :2] == -torch.inf).all())
    dq, dk, dv, dsinks = reference_backward(q, k, v, out, lse, torch.randn_like(out), lse, **options)
    assert dsinks is None and bool((dq[:, :2] == 0).all()) and bool(dq[:, 2:].ne(0).all())
    assert bool(dk.isfinite().all()) and bool(dv.isfinite().all())


# --- the functions


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_the_function(name: str) -> None:
    """Of flash_attn_func with backend="reference", against torch's own through the same formulas in float64."""
    options = {"softmax_scale": 0.3, **OPTIONS[name]}
    q, k, v = bf16_inputs()
    sinks = torch.randn(4, requires_grad=True) if options.pop("sinks", False) else None
    slopes = torch.rand(4) if options.pop("alibi_slopes", False) else None
    window = options.pop("window", (-1, -1))
    out, lse = flash_attn_func(
        q, k, v, window_size=window, alibi_slopes=slopes, sinks=sinks, return_lse=True, backend="reference", **options
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = [q, k, v] + ([] if sinks is None else [sinks])
    got = torch.autograd.grad((out, lse), wanted, (dout, dlse))

    exact = [x.detach().double().requires_grad_() for x in wanted]
    q, k, v = (x.transpose(1, 2) for x in exact[:3])
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    expanded = None if slopes is None else slopes.double().expand(2, 4)
    scores, _, _ = masked_scores(
        q, k, options["softmax_scale"], window, options.get("softcap", 0.0), expanded
    )
    if sinks is not None:
        scores = torch.cat([scores, exact[3].view(1, 4, 1, 1).expand(2, 4, 5, 1)], dim=3)
    p = torch.softmax(scores, dim=3)[..., :7]
    want = torch.autograd.grad(
        ((p @ v).transpose(1, 2), torch.logsumexp(scores, dim=3)), exact, (dout.double(), dlse.double())
    )
    for x, gradient, expected in zip(wanted, got, want, strict=True):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
        # out and the gradients are rounded to bf16
        assert (gradient.double() - expected).norm() <= 1e-2 * expected.norm()


def test_packed_forms() -> None:
    qkv = torch.randn(2, 6, 3, 4, 32).to(BF16).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, causal=True, backend="reference")
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, qkv, dout)
    parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    want = torch.autograd.grad(flash_attn_func(*parts, causal=True, backend="reference"), parts, dout)
    assert torch.equal(got, torch.stack(want, dim=2))
    q, kv = parts[0], torch.stack(parts[1:], dim=2).detach().requires_grad_()
    (dkv,) = torch.autograd.grad(flash_attn_kvpacked_func(q, kv, causal=True, backend="reference"), kv, dout)
    assert torch.equal(dkv, torch.stack(want[1:], dim=2))


def test_only_what_is_needed_has_a_gradient() -> None:
    for needs in itertools.product((False, True), repeat=3):
        tensors = [x.requires_grad_(need) for x, need in zip(bf16_inputs(), needs, strict=True)]
        out = flash_attn_func(*tensors, backend="reference")
        assert out.requires_grad == any(needs)
        if any(needs):
            out.float().sum().backward()  # the gradient of out is expanded
            assert [x.grad is not None for x in tensors] == list(needs)


def test_graph_is_kept_and_outputs_serve_twice() -> None:
    q, k, v = bf16_inputs()
    out, lse = flash_attn_func(q, k, v, return_lse=True, backend="reference")
    loss = (out.float() ** 2).sum() + lse.sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (q, k, v))))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, q)
    alone = flash_attn_func(q, k, v, return_lse=True, backend="reference")[1]
    (dv,) = torch.autograd.grad(alone.sum(), v)
    assert bool((dv == 0).all())  # lse does not depend on v


def test_there_is_no_second_derivative() -> None:
    q, k, v = bf16_inputs()
    out = flash_attn_func(q, k, v, backend="reference")
    (dq,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attn_backward"):
        dq.float().sum().backward()


class Seen(TorchDispatchMode):
    """Names of the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("cute_attn::"))
        return func(*args, **(kwargs or {}))


def test_who_sees_operators() -> None:
    """Dispatch modes, in the forward and in the backward, and transforms; nobody else."""
    names = {"flash_attn_forward", "flash_attn_backward"}
    q, k, v = bf16_inputs()
    dout = torch.randn(2, 5, 4, 40).to(BF16)

    def out(*tensors: Tensor) -> Tensor:
        return flash_attn_func(*tensors, causal=True, backend="reference")  # type: ignore[return-value]

    direct = out(q, k, v)
    assert type(direct.grad_fn).__name__ == "_AttendBackward"
    want = torch.autograd.grad(direct, (q, k, v), dout, retain_graph=True)
    with Seen() as seen:
        got = torch.autograd.grad(direct, (q, k, v), dout, retain_graph=True)
    assert seen.names & names == {"flash_attn_backward"} and all(map(torch.equal, got, want))
    with Seen() as seen:
        got = torch.autograd.grad(out(q, k, v), (q, k, v), dout)
    assert names <= seen.names and all(map(torch.equal, got, want))
    assert not runs_directly(q, torch.nn.Buffer(k), torch.empty(3, device="meta").as_subclass(Other))
    assert runs_directly(q, None, torch.nn.Parameter(k))

    answers: list[bool] = []
    torch.vmap(lambda x: answers.append(runs_directly(x)) or x)(dout)
    assert answers == [False]
    batch = torch.autograd.grad(
        direct, (q, k, v), torch.stack([dout, -dout]), is_grads_batched=True, retain_graph=True
    )
    assert all(torch.equal(x[0], y) and torch.equal(x[1], -y) for x, y in zip(batch, want, strict=True))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        assert out(*fakes).shape == direct.shape


class Other(Tensor):
    """Tensors of another kind."""


def test_selective_checkpoint_keeps_the_operator() -> None:
    q, k, v = bf16_inputs()
    runs: list[None] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        runs.append(None)
        return flash_attn_func(q * 2, k, v, backend="reference") * 2  # type: ignore[operator, return-value]

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    want = torch.autograd.grad(block(q, k, v).float().sum(), (q, k, v))
    for context in ({}, {"context_fn": contexts}):
        out = checkpoint(block, q, k, v, use_reentrant=False, **context)
        assert all(map(torch.equal, torch.autograd.grad(out.float().sum(), (q, k, v)), want))
    assert len(runs) == 5


def test_saved_memory_is_linear() -> None:
    def saved(seqlen: int) -> int:
        sizes: list[int] = []
        q, k, v = bf16_inputs((seqlen, seqlen, 4, 2))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
            flash_attn_func(q, k, v, backend="reference")
        return sum(sizes)

    assert saved(256) == 4 * saved(64)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": 3}, TypeError, "k is a int; allowed: a torch.Tensor"),
        ({"v": torch.zeros(2, 8, 2, 40).to(BF16)}, ValueError, "seqlen of v is 8; allowed: that of k, 7"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, r"alibi_slopes has shape \(3,\)"),
        (
            {"alibi_slopes": torch.zeros(4, requires_grad=True)},
            NotImplementedError,
            "alibi_slopes requires grad, but there is no gradient of it",
        ),
        ({"softcap": True}, TypeError, "softcap is a bool"),
        ({"deterministic": 1}, TypeError, "deterministic is a int"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p is 0.1"),
        ({"backend": "sm90"}, ValueError, "q is on device cpu"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = bf16_inputs()
    with pytest.raises(error, match=message):
        flash_attn_func(**{"q": q, "k": k, "v": v, "backend": "reference", **changed})


def test_no_gradient_wanted_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(flash_autograd, "attend", never)
    q, k, v = bf16_inputs()
    with torch.no_grad():
        assert not flash_attn_func(q, k, v, backend="reference").requires_grad
    assert not flash_attn_func(q.detach(), k.detach(), v.detach(), backend="reference").requires_grad


# --- the operators


def test_opcheck() -> None:
    q, k, v = bf16_inputs()
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4)
    for side, options in (
        ((slopes, sinks), (None, True, -1, -1, 3.0, False, "reference")),
        ((None, None), (0.3, False, 2, 1, 0.0, True, "reference")),
    ):
        opcheck(FORWARD, (q, k, v, *side, *options))
        with torch.no_grad():
            out, lse = FORWARD(q, k, v, *side, *options)
        detached = [None if x is None else x.detach() for x in (q, k, v, out, lse, *side)]
        opcheck(BACKWARD, (torch.randn_like(out), torch.randn_like(lse), *detached, *options))
        opcheck(BACKWARD, (torch.randn_like(out), None, *detached, *options))


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_one_graph(dynamic: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, lse = flash_attn_func(
            q * 2, k, v, causal=True, softcap=3.0, sinks=sinks, return_lse=True, backend="reference"
        )
        return out.float().sum() + lse.sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seqlen in (5, 9):
        tensors = [*bf16_inputs((seqlen, 9, 4, 2)), torch.randn(4, requires_grad=True)]
        want = torch.autograd.grad(run(*tensors), tensors)
        assert all(map(torch.equal, want, torch.autograd.grad(compiled(*tensors), tensors)))


def test_what_the_backward_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and their arguments, on a Hopper GPU that is not there."""
    calls: list[tuple[Bwd16Config, dict[str, Any]]] = []
    made: list[Bwd16Config] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *side: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(
            q.shape[0], q.shape[2], q.shape[1]
        )

    def prepared(
        shape_q: Any, shape_v: Any, config: Bwd16Config, device: torch.device, **about: Any
    ) -> Callable[..., tuple[Tensor, ...]]:
        made.append(config)

        def backward(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, **options: Any
        ) -> tuple[Tensor, ...]:
            assert (q.shape, v.shape, about["batch"]) == (shape_q, shape_v, 2)
            assert all(flash._loadable(x) and x.stride(3) == 1 for x in (q, k, v, out, dout))
            calls.append((config, about | options))
            d = torch.full((2, 4, 320), 1.0)  # rows of whole tiles
            d[:, :, 300:] = torch.nan
            return *(torch.zeros_like(x) for x in (q, k, v)), torch.full_like(d, torch.nan), d

        return backward

    monkeypatch.setattr("cute_attn.launch.Forward16", lambda *given, **options: forward)
    monkeypatch.setattr("cute_attn.launch_backward.Backward16", prepared)
    monkeypatch.setattr(flash, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "_plans", Remembered())
    q, k, v = inputs((300, 200, 4, 2), BF16, 64, 40)
    sinks = torch.zeros(4, requires_grad=True)

    def launched(**options: Any) -> tuple[Bwd16Config, dict[str, Any]]:
        flash_attn_func(q, k, v, **options).sum().backward()
        return calls[-1]

    config, given = launched(causal=True)
    assert config == backward16_config(64, 40, "bf16", causal=True) and given["window"] == (-1, 0)
    assert given["softmax_scale"] == 0.125 and given["dlse"] is None
    launched(causal=True)
    assert (len(made), len(calls)) == (1, 2)  # made ready once
    config, given = launched(window_size=(7, 9), deterministic=True, softcap=2.0, alibi_slopes=torch.zeros(4))
    assert config.window and config.deterministic and config.softcap and config.alibi
    assert (given["window"], given["softcap"], given["alibi_slopes"].shape) == ((7, 9), 2.0, (2, 4))
    launched(sinks=sinks)
    assert torch.equal(sinks.grad, torch.full((4,), -600.0))  # exp(0 - 0) * 1 of 2 * 300 rows


def test_arguments_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launch_backward, "compile_kernel", lambda config: lambda *given: seen.append(given))
    q, k, v = (x.detach() for x in inputs((300, 200, 4, 2), BF16, 64, 40))
    out, lse = torch.zeros(2, 300, 4, 40, dtype=BF16), torch.zeros(2, 4, 300)
    for deterministic in (False, True):
        config = backward16_config(64, 40, "bf16", window=True, deterministic=deterministic)
        backward = launch_backward.Backward16(
            q.shape, v.shape, config, q.device, batch=2, softmax_scale=0.5, softcap=2.0, window=(-1, 3)
        )
        dq, dk, dv, lse2, d = backward(q, k, v, out, lse, out)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        assert (dq.dtype, dk.dtype, dv.dtype) == (BF16, BF16, BF16)
        at = seen[-1]
        assert at[:6] == (q, k, v, out, out, lse)
        assert at[6].shape == lse.shape and at[7].shape == (2, 4) and not at[6].any() and not at[7].any()
        assert at[8] is dq and at[9] is dk and at[10] is dv and at[11] is lse2 and at[12] is d
        assert lse2.shape == d.shape == (2, 4, 384)
        assert at[13].shape == (2, 4, 3, 128 * 64)
        # turns of the parts of three query tiles, or counts of heads
        assert at[14].shape == (2, 4, 3 if deterministic else 1, 2)
        assert at[14].dtype == torch.int32 and at[14].is_contiguous()
        # all four heads of K fit; not as many CTAs as SMs
        assert at[15:] == (0.5, 2.0 * LOG2_E, 0.5 * LOG2_E, 200, 3, 4, 0)
        again = backward(q, k, v, out, lse, out, dlse=lse, alibi_slopes=lse[:, :, 0])
        assert seen[-1][6] is lse and seen[-1][7].shape == (2, 4)
        assert not {x.data_ptr() for x in again} & {x.data_ptr() for x in (dq, dk, dv, lse2, d)}
    monkeypatch.setattr(launch_backward, "_sms", lambda device: 132)
    config = replace(backward16_config(64, 40, "bf16", causal=True), persistent=True)
    backward = launch_backward.Backward16(q.shape, v.shape, config, q.device, batch=2, softmax_scale=0.5)
    backward(q, k, v, out, lse, out)
    assert seen[-1][14].shape == (2, 4, 1, 2) and seen[-1][20:] == (4, 132)


def test_what_the_kernel_cannot_read_is_copied() -> None:
    q, k, v = (x.detach() for x in inputs((6, 5, 4, 2), BF16, 64, 64))
    out = torch.zeros(2, 6, 4, 64, dtype=BF16)
    plan = flash._Plan(None, 1.0, 0.0, (-1, -1), (True, True, True))
    odd = torch.zeros(out.numel() + 1, dtype=BF16)[1:].view(out.shape)
    far = torch.zeros(2, 4, 6, 64, dtype=BF16).transpose(1, 2)
    for dout, copied in (
        (out, False),
        (far, False),
        (odd, True),
        (out[:, :1].expand(out.shape), True),
        (torch.zeros(2, 6, 64, 4, dtype=BF16).transpose(2, 3), True),
    ):
        got = flash_autograd.loaded(q, k, v, out, dout, plan)
        assert got[0] is q and got[1] is k and got[2] is v and got[3] is out
        assert (got[4] is dout) != copied and torch.equal(got[4], dout)
        assert flash._loadable(got[4]) and got[4].data_ptr() % 16 == 0 and got[4].stride(3) == 1
    plan.loadable = (False, True, True)
    got = flash_autograd.loaded(q, k, v, out, out, plan)
    assert got[0] is not q and torch.equal(got[0], q) and got[1] is k


# --- the plan


def test_every_head_dim_has_a_backward() -> None:
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS_16BIT, HEAD_DIMS_16BIT):
        for options in ({}, {"causal": True}, {"window": True, "alibi": True}, {"softcap": True}):
            config = backward16_config(head_dim, head_dim_v, "bf16", **options)
            assert config.smem_bytes <= SMEM_LIMIT
            assert config.qk_columns >= head_dim and config.v_columns >= head_dim_v
            assert config.dq_registers * 128 * config.consumer_warpgroups == config.tile_m * config.qk_columns


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 36}, "head_dim must be a multiple of 8 from 32 to 256, got 36"),
        ({"head_dim_v": 264}, "head_dim_v must be a multiple of 8 from 32 to 256, got 264"),
        ({"dtype": "fp32"}, "dtype must be 'bf16' or 'fp16', got 'fp32'"),
        ({"causal": True, "window": True}, "causal must be False with a window"),
        ({"tile_n": 96}, "tile_n must be 64, 128 or 192, got 96"),
        ({"tile_m": 72}, "tile_m must be a multiple of 16 from 16 to 128, got 72"),
        ({"tile_m": 128}, "dq_split must be 'rows' with tile_m = tile_n"),
        (
            {"head_dim": 192, "dq_split": "transposed"},
            "'transposed' with at most 64 columns of head_dim a warpgroup, got 'transposed', 64 x 128, head_dim 192",
        ),
        ({"tile_n": 192, "varlen": True}, "tiles must be powers of two with varlen, got 64 x 192"),
        ({"shared_keys": True}, "shared_keys wants a tile of 64 x 64"),
        ({"head_dim": 256}, "dK and dV of head_dim 256 and 128 take 192 registers a thread; allowed: 128"),
        ({"q_stages": 5}, "shared memory 248832 bytes exceeds 232448"),
        (
            {"persistent": True, "deterministic": True},
            "persistent wants two warpgroups of 64 keys each at most",
        ),
        ({"persistent": True, "tile_n": 192}, "persistent wants two warpgroups of 64 keys each at most"),
        ({"persistent": True, "head_dim_v": 96}, "laid out alike, got head_dim 128 and 96"),
        ({"early_keys": True}, "early_keys wants persistent"),
        ({"consumer_regs": 256}, "68608 registers exceed 65536"),
    ],
)
def test_impossible_configurations(changed: dict[str, Any], message: str) -> None:
    good = backward16_config(128, 128, "bf16", window=True)
    with pytest.raises(ValueError, match=message):
        replace(good, **changed).check()


@pytest.mark.parametrize("causal", [False, True])
def test_persistent_ctas_and_heads_in_turn(causal: bool) -> None:
    """Where measured to gain, and nowhere else (perf/log.md, run 22)."""

    def chosen(head_dim: int, seqlen_q: int, **options: bool) -> tuple[bool, bool]:
        config = backward16_config(head_dim, head_dim, "bf16", seqlen_q=seqlen_q, **options)
        return config.persistent, config.early_keys

    for queries in (1, 512, 1024, 1025, 1 << 20):
        assert chosen(64, queries, causal=causal) == (True, True)
        assert chosen(128, queries, causal=causal) == (queries <= 1024, False)
        assert chosen(256, queries, causal=causal) == (False, False)
    for feature in ("softcap", "alibi", "deterministic", "varlen"):
        for head_dim in (64, 128):
            assert chosen(head_dim, 512, causal=causal, **{feature: True}) == (False, False)
    for head_dim in (64, 128):
        assert chosen(head_dim, 512, window=True) == (False, False)
    for head_dim, queries, megabytes in (
        (64, 512, 8), (64, 513, 32), (64, 16383, 32), (64, 16384, 16), (128, 512, 8), (128, 513, 32), (128, 16384, 32),
    ):  # fmt: skip
        config = backward16_config(head_dim, head_dim, "bf16", causal=causal, seqlen_q=queries)
        assert launch_backward._bytes_in_turn(config, queries) == megabytes << 20


def test_names_tell_configurations_apart() -> None:
    configs = plan16.all_backward16_configs()
    assert len({config.name for config in configs}) == len(configs) == len(set(configs))
    good = backward16_config(128, 128, "bf16")
    changes: list[dict[str, Any]] = [
        {},
        {"q_stages": 3},
        {"do_stages": 1},
        {"ds_stages": 1},
        {"dq_direct": True},
        {"dq_split": "columns"},
        {"deterministic": True},
        {"varlen": True},
        {"first_blocks": 2},
        {"persistent": True},
        {"persistent": True, "early_keys": True},
        {"consumer_regs": 232},
    ]
    assert len({replace(good, **changed).name for changed in changes}) == len(changes)


# --- compiled code

SAMPLE = plan16.all_backward16_configs()


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[Bwd16Config], KernelFigures]]:
    with figures_of(SAMPLE) as result:
        yield result


@pytest.mark.parametrize("config", SAMPLE, ids=lambda config: config.name)
def test_compiled_kernel(config: Bwd16Config, figures: Callable[[Bwd16Config], KernelFigures]) -> None:
    found = figures(config)
    assert found.name == config.name
    no_spills(found)
    assert not found.serialized_wgmma
    # Steps of k = 16 of the five products; loops: masked, plain and with a window masked again.
    loops = 2 + config.window
    steps = (config.qk_columns + config.v_columns) // 16 + 2 * config.tile_m // 16 + config.tile_n // 16
    assert found.counts["HGMMA"] == loops * steps
    # One arrival for each product, and five waits: more would be products that wait for one another. With
    # `first_blocks` dV and dK are two products each, and there is a wait more.
    assert found.counts["WARPGROUP"] == (13 if config.first_blocks else 10) * loops
    assert found.counts["USETMAXREG"] == 2
    assert found.registers <= REGISTERS_PER_SM // config.threads
    assert found.smem_bytes == config.smem_bytes <= SMEM_LIMIT
