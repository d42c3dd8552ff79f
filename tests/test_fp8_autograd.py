"""Gradients of 8-bit attention without a GPU: those of exact attention but for the forward's rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from cute_attn import api, flash, fp8_attention, fp8_autograd, problem
from cute_attn.flash import masked_scores
from cute_attn.quantize import PRESETS, Fp8Recipe
from cute_attn.remember import Remembered

BF16, FP16 = torch.bfloat16, torch.float16
FORWARD = torch.ops.cute_attn.fp8_attention_forward.default
BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_K, HEAD_DIM = 2, 130, 300, 4, 2, 64

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 10)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "negative scale": {"softmax_scale": -0.2},
    "rotary": {"rotary_interleaved": False},
    "interleaved rotary": {"rotary_interleaved": True, "causal": True},
    "all": {"window_size": (90, 0), "softcap": 3.0, "alibi_slopes": True, "sinks": True},
}


def inputs(dtype: torch.dtype = BF16, seqlen_q: int = SEQLEN_Q, seqlen_k: int = SEQLEN_K) -> list[Tensor]:
    sizes = ((seqlen_q, HEADS_Q), (seqlen_k, HEADS_K), (seqlen_k, HEADS_K))
    q, k, v = (torch.randn(BATCH, *size, HEAD_DIM) for size in sizes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v + 0.5)]  # V has a mean, so that D is not small


def options_of(name: str, dtype: torch.dtype = BF16) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if options.pop("alibi_slopes", False):
        options["alibi_slopes"] = torch.rand(BATCH, HEADS_Q) * 0.1
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(HEADS_Q, requires_grad=True)
    if "rotary_interleaved" in options:
        angle = torch.outer(torch.arange(SEQLEN_K), torch.exp(-torch.arange(16) / 4.0))
        options |= {"rotary_cos": angle.cos().to(dtype), "rotary_sin": angle.sin().to(dtype)}
    return options


def embed(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rows of x (batch, seqlen, heads, head_dim) at the last positions of the tables, in float64."""
    turned, rest = x[..., :32], x[..., 32:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :16], turned[..., 16:])
    cos, sin = (table[-x.shape[1] :].double().unsqueeze(1) for table in (cos, sin))
    c, d = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack((c, d), -1).flatten(-2) if interleaved else torch.cat((c, d), -1)
    return torch.cat((pairs, rest), -1)


def exact(leaves: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of float64 leaves: q, k, v and sinks."""
    q, k, v = leaves[:3]
    if "rotary_cos" in options:
        tables = (options["rotary_cos"], options["rotary_sin"], options["rotary_interleaved"])
        q, k = embed(q, *tables), embed(k, *tables)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS_Q // HEADS_K, dim=1) for x in (k, v))
    window = (-1, 0) if options.get("causal") else options.get("window_size", (-1, -1))
    slopes = options.get("alibi_slopes")
    scores, _, _ = masked_scores(
        q,
        k,
        options.get("softmax_scale", HEAD_DIM**-0.5),
        window,
        options.get("softcap", 0.0),
        None if slopes is None else slopes.double(),
    )
    keys = scores.shape[3]
    if len(leaves) > 3:
        sinks = leaves[3].view(1, HEADS_Q, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=3)
    out = torch.softmax(scores, dim=3)[..., :keys] @ v
    return out.transpose(1, 2), torch.logsumexp(scores, dim=3)


# --- the values


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("recipe", ["accurate", "fp8"])
def test_gradients_are_close_to_those_of_exact_attention(recipe: str, name: str, dtype: torch.dtype) -> None:
    """In float64. The bound is a few times the error of the output, by which D is off as well."""
    leaves, options = inputs(dtype), options_of(name, dtype)
    out, lse = fp8_attention(*leaves, recipe=recipe, return_lse=True, backend="emulator", **options)
    leaves += [options["sinks"]] if "sinks" in options else []
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    outputs = exact(doubles, options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for weight in (0.0, 1.0):  # of the gradient of lse
        gradients = (dout, None) if weight == 0.0 else (dout, dlse)
        wanted = torch.autograd.grad(
            outputs, doubles, (dout.double(), weight * dlse.double()), retain_graph=True
        )
        got = torch.autograd.grad(
            (out, lse)[: 1 + bool(weight)], leaves, gradients[: 1 + bool(weight)], retain_graph=True
        )
        for which, x, gradient, want in zip("qkvs", leaves, got, wanted, strict=False):
            assert gradient.dtype == x.dtype and gradient.shape == x.shape
            error = float((gradient.double() - want).norm() / want.norm())
            assert error < (0.03 if recipe == "accurate" else 0.05), (which, weight, error)


def test_a_row_without_keys_adds_nothing() -> None:
    q, k, v = inputs(seqlen_q=200, seqlen_k=100)
    out, lse = fp8_attention(q, k, v, causal=True, return_lse=True, backend="emulator")
    assert bool((lse[..., :100] == -torch.inf).all())
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert bool((dq[:, :100] == 0).all()) and all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    empty = torch.zeros(BATCH, 0, HEADS_K, HEAD_DIM, dtype=BF16)
    out = fp8_attention(q, empty, empty, backend="emulator")
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert bool((dq == 0).all())


# --- the function


def test_no_gradient_wanted_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(fp8_autograd, "attend", never)
    q, k, v = inputs()
    with torch.no_grad():
        assert not fp8_attention(q, k, v, backend="emulator").requires_grad
    assert not fp8_attention(q.detach(), k.detach(), v.detach(), backend="emulator").requires_grad


def test_the_forward_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(PRESETS["fp8"], name="mine", rotation_seed=5)
    q, k, v = inputs()
    with torch.no_grad():
        want = fp8_attention(q, k, v, recipe=recipe, return_lse=True, backend="emulator")
    got = fp8_attention(q, k, v, recipe=recipe, return_lse=True, backend="emulator")
    assert all(x.requires_grad for x in got) and all(map(torch.equal, want, got))


def test_only_what_is_needed_has_a_gradient() -> None:
    q, k, v = inputs()
    sinks = torch.zeros(HEADS_Q, requires_grad=True)
    out = fp8_attention(q.detach(), k, v.detach(), backend="emulator")
    (dk,) = torch.autograd.grad(out.float().sum(), k)
    assert dk.shape == k.shape
    out = fp8_attention(q.detach(), k.detach(), v.detach(), sinks=sinks, backend="emulator")
    (dsinks,) = torch.autograd.grad(out.float().sum(), sinks)
    assert bool((dsinks < 0).all())  # a larger sink takes weight from values with a positive mean


def test_graph_is_kept_and_there_is_no_second_derivative() -> None:
    q, k, v = inputs()
    loss = fp8_attention(q, k, v, backend="emulator").float().square().sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (q, k, v), create_graph=True)))
    out = fp8_attention(q, k, v, backend="emulator")
    (dq,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attn_backward"):
        dq.float().sum().backward()


def test_saved_memory_is_linear() -> None:
    def saved(seqlen: int) -> int:
        sizes: list[int] = []
        q, k, v = inputs(seqlen_q=seqlen, seqlen_k=seqlen)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
            fp8_attention(q, k, v, backend="emulator")
        return sum(sizes)

    assert saved(256) == 4 * saved(64)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": 3}, TypeError, "k is a int; allowed: a torch.Tensor"),
        ({"causal": 1}, TypeError, "causal is a int"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale is a str"),
        ({"recipe": "good"}, ValueError, "recipe is 'good'"),
        ({"recipe": 8}, TypeError, "recipe is a int"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"window_size": (1.0, 2)}, TypeError, "window_size is"),
        ({"out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32"),
        ({"out_dtype": FP16}, NotImplementedError, "out_dtype is torch.float16, and a gradient is wanted"),
        (
            {"alibi_slopes": torch.zeros(HEADS_Q, requires_grad=True)},
            NotImplementedError,
            r"alibi_slopes requires grad.*alibi_slopes\.detach",
        ),
        ({"rotary_cos": torch.zeros(300, 16, dtype=BF16)}, ValueError, "rotary_cos is given and rotary_sin"),
        ({"rotary_interleaved": True}, ValueError, "rotary_interleaved is True and rotary_cos is None"),
        ({"backend": "reference"}, ValueError, "backend is 'reference'"),
        ({"backend": "sm90"}, ValueError, "backend is 'sm90' but q is on"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = inputs()
    with pytest.raises(error, match=message):
        fp8_attention(**{"q": q, "k": k, "v": v, "backend": "emulator", **changed})


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin"])
def test_rotary_tables_have_no_gradient(name: str) -> None:
    options = options_of("rotary")
    options[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"{name} requires grad.*{name}\.detach"):
        fp8_attention(*inputs(), backend="emulator", **options)


# --- the operator


def test_every_field_of_a_recipe_reaches_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Fp8Recipe("a name", "e4m3", "head", "tensor", 128, "head", "none", 7, False, "cast")
    assert all(getattr(odd, x.name) != x.default for x in fields(Fp8Recipe))
    assert fp8_autograd._RECIPE.split(", ") == [
        f"{type(x.default).__name__} {x.name}" for x in fields(Fp8Recipe)
    ]
    given: list[Fp8Recipe] = []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, recipe: Fp8Recipe, **options: Any
    ) -> tuple[Tensor, Tensor]:
        given.append(recipe)
        return torch.zeros_like(q), torch.zeros(BATCH, HEADS_Q, q.shape[1])

    q, k, v = inputs()
    monkeypatch.setattr(api, "fp8_attention", forward)
    fp8_attention(q, k, v, recipe=odd, backend="emulator")
    assert given == [odd]


@pytest.mark.parametrize("name", ["causal", "interleaved rotary", "all"])
def test_opcheck(name: str) -> None:
    options = options_of(name)
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    cos, sin = options.get("rotary_cos"), options.get("rotary_sin")
    arguments = (
        *inputs(),
        *(slopes, sinks, cos, sin, options.get("rotary_interleaved", False), BF16, 0.2),
        *(options.get("causal", False), *options.get("window_size", (-1, -1)), options.get("softcap", 0.0)),
        *(False, "emulator"),
        *(getattr(PRESETS["fp8"], x.name) for x in fields(Fp8Recipe)),
    )
    opcheck(FORWARD, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", replace(PRESETS["fp8"], name="mine")], ids=["preset", "recipe"])
def test_torch_compile_traces_one_graph(recipe: str | Fp8Recipe, dynamic: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, tables: dict[str, Any]) -> Tensor:
        out, lse = fp8_attention(
            q * 2, k, v, recipe=recipe, causal=True, softcap=3.0, sinks=sinks, return_lse=True,
            backend="emulator", **tables,
        )  # fmt: skip
        return out.float().sum() + lse.sum()

    torch._dynamo.reset()  # each case counts towards the limit of recompilations of `run`
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    tables = options_of("rotary")
    for seqlen in (40, 70):
        tensors = [*inputs(seqlen_q=seqlen, seqlen_k=90), torch.randn(HEADS_Q, requires_grad=True)]
        want = torch.autograd.grad(run(*tensors, tables), tensors)
        assert all(map(torch.equal, want, torch.autograd.grad(compiled(*tensors, tables), tensors)))
        with torch.no_grad():
            assert torch.equal(run(*tensors, tables), compiled(*tensors, tables))


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU that is not there: the 8-bit forward, then the 16-bit backward with its results."""
    backwards: list[dict[str, Any]] = []
    forwards: list[tuple[Any, ...]] = []

    def attention(*about: Any) -> Callable[..., Any]:
        def call(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, rotary: Any, *side: Any) -> Any:
            forwards.append(about)
            return torch.ones_like(q), torch.full((BATCH, HEADS_Q, q.shape[1]), 2.0)

        return call

    def prepared(shape_q: Any, shape_v: Any, config: Any, device: Any, **about: Any) -> Callable[..., Any]:
        def backward(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, **options: Any
        ) -> Any:
            assert bool((out == 1).all()) and bool((lse == 2).all())
            backwards.append({"q": q, "config": config, **about, **options})
            return *(torch.zeros_like(x) for x in (q, k, v)), torch.zeros_like(lse), torch.zeros_like(lse)

        return backward

    monkeypatch.setattr("cute_attn.launch.Attention", attention)
    monkeypatch.setattr("cute_attn.launch_backward.Backward16", prepared)
    for module in (api, flash, fp8_autograd, problem):
        monkeypatch.setattr(module, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "_plans", Remembered())
    monkeypatch.setattr(api, "_calls", Remembered())
    q, k, v = inputs()
    fp8_attention(q, k, v, causal=True, softmax_scale=0.3).sum().backward()
    (given,) = backwards
    assert len(forwards) == 1 and torch.equal(given["q"], q)
    assert given["config"].causal and not given["config"].deterministic
    assert (given["softmax_scale"], given["window"], given["dlse"]) == (0.3, (-1, 0), None)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        fp8_attention(q, k, v, causal=True, softmax_scale=0.3).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert backwards[1]["config"].deterministic
    with torch.no_grad():
        fp8_attention(q, k, v, causal=True, softmax_scale=0.3)
    assert len(forwards) == 3
    assert len(api._calls) == 2  # one for the check and one within the operator, however often
