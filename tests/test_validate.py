"""Every refusal: the message names the argument, what came, and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn import api, validate
from cute_attn.kernels.config import HEAD_DIMS
from cute_attn.remember import Remembered

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32).to(dtype)


def inputs(dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Small arguments that every function accepts; each test spoils one."""
    return {
        "q": tensor(2, 5, 4, 64, dtype=dtype),
        "k": tensor(2, 7, 2, 64, dtype=dtype),
        "v": tensor(2, 7, 2, 64, dtype=dtype),
        "backend": "emulator",
    }


class Spoiled:
    """Arguments changed from the good ones, the error they raise, and what its message must say."""

    def __init__(self, name: str, error: type[Exception], *says: str, **changed: Any) -> None:
        self.name, self.error, self.says, self.changed = name, error, says, changed

    def __repr__(self) -> str:
        return self.name

    def check(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        arguments.update(self.changed)
        for _ in range(2):  # a refusal must not be forgotten by the second call
            with pytest.raises(self.error) as caught:
                function(**arguments)
            message = str(caught.value)
            assert all(text in message for text in self.says), message


# What 16-bit and e4m3 inputs are refused for alike; `make` builds a tensor of the function's dtype.
def shape_cases(dtype: torch.dtype) -> list[Spoiled]:
    def make(*shape: int) -> Tensor:
        return tensor(*shape, dtype=dtype)

    good = make(2, 7, 2, 64)
    strided = make(2, 7, 2, 128)[..., ::2]
    odd = {"q": make(2, 5, 4, 100), "k": make(2, 7, 2, 100)}
    small = {"q": make(2, 5, 4, 16), "k": make(2, 7, 2, 16), "v": make(2, 7, 2, 16)}
    large = {"q": make(2, 5, 4, 512), "k": make(2, 7, 2, 512), "v": make(2, 7, 2, 512)}
    none = {"q": make(2, 5, 4, 0), "k": make(2, 7, 2, 0), "v": make(2, 7, 2, 0)}
    return [
        Spoiled("q not a tensor", TypeError, "q is a list", "allowed: a torch.Tensor", q=[1.0]),
        Spoiled("k None", TypeError, "k is a NoneType", "allowed: a torch.Tensor", k=None),
        Spoiled(
            "q float32",
            TypeError,
            "q has dtype torch.float32",
            f"allowed: {_names(dtype)}",
            q=make(2, 5, 4, 64).float(),
        ),
        Spoiled(
            "v int8", TypeError, "v has dtype torch.int8", f"allowed: {_names(dtype)}", v=good.to(torch.int8)
        ),
        Spoiled(
            "q rank 3",
            ValueError,
            "q has 3 dimensions",
            "(5, 4, 64)",
            "allowed: 4, (batch, seqlen",
            q=make(5, 4, 64),
        ),
        Spoiled("v rank 5", ValueError, "v has 5 dimensions", "allowed: 4", v=make(1, 2, 7, 2, 64)),
        Spoiled("k rank 0", ValueError, "k has 0 dimensions", "allowed: 4", k=make(1)[0]),
        Spoiled(
            "q last stride",
            ValueError,
            "q has strides",
            "allowed: a last stride of 1",
            q=make(2, 5, 4, 128)[..., ::2],
        ),
        Spoiled(
            "v last stride", ValueError, "v has strides (1792, 256, 128, 2)", "last stride of 1", v=strided
        ),
        Spoiled("k batch", ValueError, "batch of k is 3", "allowed: that of q, 2", k=make(3, 7, 2, 64)),
        Spoiled("v batch", ValueError, "batch of v is 1", "allowed: that of q, 2", v=make(1, 7, 2, 64)),
        Spoiled(
            "k head_dim", ValueError, "head_dim of k is 128", "allowed: that of q, 64", k=make(2, 7, 2, 128)
        ),
        Spoiled("v seqlen", ValueError, "seqlen of v is 6", "allowed: that of k, 7", v=make(2, 6, 2, 64)),
        Spoiled("v heads", ValueError, "heads of v is 4", "allowed: that of k, 2", v=make(2, 7, 4, 64)),
        Spoiled(
            "heads ratio",
            ValueError,
            "heads of q is 5",
            "a multiple of the heads of k, 2",
            q=make(2, 5, 5, 64),
        ),
        Spoiled("no q heads", ValueError, "heads of q is 0", "a multiple of", q=make(2, 5, 0, 64)),
        Spoiled(
            "no k heads",
            ValueError,
            "heads of k is 0",
            "at least 1",
            k=make(2, 7, 0, 64),
            v=make(2, 7, 0, 64),
        ),
        Spoiled(
            "head_dim 100",
            ValueError,
            "head_dim of q is 100",
            "allowed: a multiple of 16 from 32 to 256",
            "the nearest to pad to is 112: q and k with zeros",
            "softmax_scale=1/sqrt(100)",
            **odd,
        ),
        Spoiled("head_dim 16", ValueError, "head_dim of q is 16", "the nearest to pad to is 32", **small),
        Spoiled("head_dim 512", ValueError, "head_dim of q is 512", "the nearest is 256", **large),
        Spoiled("head_dim 0", ValueError, "head_dim of q is 0", "from 32 to 256", **none),
        Spoiled(
            "head_dim_v 72",
            ValueError,
            "head_dim of v is 72",
            "allowed: a multiple of 16 from 32 to 256",
            "the nearest to pad to is 80: v with zeros",
            "the first 72 columns",
            v=make(2, 7, 2, 72),
        ),
        Spoiled(
            "head_dim_v 264", ValueError, "head_dim of v is 264", "the nearest is 256", v=make(2, 7, 2, 264)
        ),
        Spoiled("head_dim_v 0", ValueError, "head_dim of v is 0", "from 32 to 256", v=make(2, 7, 2, 0)),
        Spoiled(
            "q on meta",
            ValueError,
            "q is on device meta",
            "allowed: cpu, cuda",
            q=make(2, 5, 4, 64).to("meta"),
        ),
        Spoiled(
            "q sparse",
            ValueError,
            "q is a torch.sparse",
            "allowed: a dense one",
            q=torch.zeros(2, 5, 4, 64).to_sparse(),
        ),
        Spoiled(
            "backend", ValueError, "backend is 'cuda'", "allowed: 'auto', 'sm90', 'emulator'", backend="cuda"
        ),
        Spoiled("backend list", ValueError, "backend is ['sm90']", "allowed: 'auto'", backend=["sm90"]),
        Spoiled(
            "sm90 on the CPU", ValueError, "backend is 'sm90'", "no NVIDIA GPU", "9.x (Hopper", backend="sm90"
        ),
    ]


def _names(dtype: torch.dtype) -> str:
    return "torch.float8_e4m3fn" if dtype == E4M3 else "torch.float16, torch.bfloat16"


OPTION_CASES = [
    Spoiled("causal 1", TypeError, "causal is a int", "True or False", causal=1),
    Spoiled(
        "causal mask",
        TypeError,
        "causal is a Tensor",
        "True or False",
        causal=torch.ones(5, 7, dtype=torch.bool),
    ),
    Spoiled("scale NaN", ValueError, "softmax_scale is nan", "a finite number", softmax_scale=math.nan),
    Spoiled("scale inf", ValueError, "softmax_scale is inf", "a finite number", softmax_scale=math.inf),
    Spoiled("window int", TypeError, "window_size is 5", "a tuple (left, right)", window_size=5),
    Spoiled("window of three", TypeError, "window_size is (1, 2, 3)", "(left, right)", window_size=(1, 2, 3)),
    Spoiled(
        "window of floats",
        TypeError,
        "window_size is (1.0, 2), with a float",
        "two ints",
        window_size=(1.0, 2),
    ),
    Spoiled("window of bools", TypeError, "with a bool", "two ints", window_size=(True, 2)),
    Spoiled("window None", TypeError, "window_size is None", "a tuple (left, right)", window_size=None),
    Spoiled(
        "window -2", ValueError, "window_size is (-2, 0)", "ends >= 0, or -1 for none", window_size=(-2, 0)
    ),
    Spoiled("softcap None", TypeError, "softcap is a NoneType", "a float >= 0", softcap=None),
    Spoiled("softcap < 0", ValueError, "softcap is -1.0", "0 (none), or finite and > 0", softcap=-1.0),
    Spoiled("softcap inf", ValueError, "softcap is inf", "0 (none), or finite and > 0", softcap=math.inf),
    Spoiled("softcap bool", TypeError, "softcap is a bool", "a float >= 0", softcap=True),
    Spoiled("slopes list", TypeError, "alibi_slopes is a list", "float32", alibi_slopes=[0.5] * 4),
    Spoiled(
        "slopes dtype",
        TypeError,
        "alibi_slopes has dtype",
        "torch.float32",
        alibi_slopes=torch.zeros(4).half(),
    ),
    Spoiled(
        "slopes shape",
        ValueError,
        "alibi_slopes has shape (3,)",
        "(4,) or (2, 4)",
        alibi_slopes=torch.zeros(3),
    ),
    Spoiled(
        "sinks dtype",
        TypeError,
        "sinks has dtype torch.float64",
        "torch.float32",
        sinks=torch.zeros(4).double(),
    ),
    Spoiled("sinks shape", ValueError, "sinks has shape (2, 4)", "(4,)", sinks=torch.zeros(2, 4)),
    Spoiled(
        "sinks device",
        ValueError,
        "sinks is on device meta",
        "that of q, cpu",
        sinks=torch.zeros(4, device="meta"),
    ),
    Spoiled(
        "scale subnormal in float32", ValueError, "softmax_scale is 1e-40", "float32", softmax_scale=1e-40
    ),
    Spoiled("scale infinite in float32", ValueError, "softmax_scale is 1e+39", "float32", softmax_scale=1e39),
    Spoiled("scale str", TypeError, "softmax_scale is a str", "a float or None", softmax_scale="1"),
    Spoiled("scale bool", TypeError, "softmax_scale is a bool", "a float or None", softmax_scale=True),
    Spoiled(
        "scale tensor",
        TypeError,
        "softmax_scale is a Tensor",
        "a float or None",
        softmax_scale=torch.tensor(1.0),
    ),
    Spoiled(
        "out float32",
        TypeError,
        "out_dtype is torch.float32",
        "torch.float16, torch.bfloat16",
        out_dtype=torch.float32,
    ),
    Spoiled(
        "out e4m3",
        TypeError,
        "out_dtype is torch.float8_e4m3fn",
        "torch.float16, torch.bfloat16",
        out_dtype=E4M3,
    ),
    Spoiled("out str", TypeError, "out_dtype is 'bf16'", "torch.float16, torch.bfloat16", out_dtype="bf16"),
]

RECIPE_CASES = [
    Spoiled(
        "recipe unknown",
        ValueError,
        "recipe is 'fp4'",
        "'naive', 'paper', 'fp8', 'accurate', 'default'",
        recipe="fp4",
    ),
    Spoiled("recipe type", TypeError, "recipe is a dict", "an Fp8Recipe", recipe={"qk_dtype": "int8"}),
    Spoiled("recipe None", TypeError, "recipe is a NoneType", "an Fp8Recipe", recipe=None),
]

SIXTEEN_BIT_CASES = [
    Spoiled("e4m3", TypeError, "q has dtype torch.float8_e4m3fn", "flash_attn_fp8_func", **inputs(E4M3)),
    Spoiled(
        "k fp16, q bf16",
        TypeError,
        "k has dtype torch.float16",
        "that of q, torch.bfloat16",
        k=tensor(2, 7, 2, 64, dtype=FP16),
    ),
    Spoiled(
        "v fp16, q bf16",
        TypeError,
        "v has dtype torch.float16",
        "that of q, torch.bfloat16",
        v=tensor(2, 7, 2, 64, dtype=FP16),
    ),
]

DESCALE_CASES = [
    Spoiled(
        "bf16",
        TypeError,
        "q has dtype torch.bfloat16",
        "torch.float8_e4m3fn",
        "fp8_attention",
        **inputs(BF16),
    ),
    Spoiled(
        "q_descale heads",
        ValueError,
        "q_descale has shape (2, 4)",
        "(batch, heads_k) = (2, 2)",
        q_descale=torch.ones(2, 4),
    ),
    Spoiled(
        "k_descale rank",
        ValueError,
        "k_descale has shape (1,)",
        "(batch, heads_k) = (2, 2)",
        k_descale=torch.ones(1),
    ),
    Spoiled(
        "v_descale dtype",
        TypeError,
        "v_descale has dtype torch.bfloat16",
        "torch.float32",
        v_descale=torch.ones(2, 2, dtype=BF16),
    ),
    Spoiled(
        "q_descale float", TypeError, "q_descale is a float", "float32 torch.Tensor or None", q_descale=1.0
    ),
    Spoiled(
        "k_descale device",
        ValueError,
        "k_descale is on device meta",
        "that of q, cpu",
        k_descale=torch.ones(2, 2, device="meta"),
    ),
]


@pytest.mark.parametrize(
    "case", shape_cases(BF16) + SIXTEEN_BIT_CASES + OPTION_CASES + RECIPE_CASES, ids=repr
)
def test_fp8_attention_refuses(case: Spoiled) -> None:
    case.check(cute_attn.fp8_attention, inputs())


@pytest.mark.parametrize("case", shape_cases(BF16) + SIXTEEN_BIT_CASES + RECIPE_CASES, ids=repr)
def test_quantize_refuses(case: Spoiled) -> None:
    case.check(cute_attn.quantize, inputs())


@pytest.mark.parametrize("case", shape_cases(BF16) + SIXTEEN_BIT_CASES + RECIPE_CASES, ids=repr)
def test_explain_refuses(case: Spoiled) -> None:
    case.check(cute_attn.explain, inputs())


@pytest.mark.parametrize("case", shape_cases(E4M3) + DESCALE_CASES + OPTION_CASES, ids=repr)
def test_flash_attn_fp8_func_refuses(case: Spoiled) -> None:
    case.check(cute_attn.flash_attn_fp8_func, inputs(E4M3))


@pytest.mark.parametrize("case", OPTION_CASES, ids=repr)
def test_fp8_attention_quantized_refuses(case: Spoiled) -> None:
    qkv = cute_attn.quantize(**inputs())
    case.check(cute_attn.fp8_attention_quantized, {"qkv": qkv, "backend": "emulator"})


PART_CASES = [
    Spoiled(
        "q dtype",
        TypeError,
        "qkv.q has dtype torch.float8_e4m3fn",
        "torch.int8",
        q=tensor(2, 5, 4, 64, dtype=E4M3),
    ),
    Spoiled(
        "k dtype",
        TypeError,
        "qkv.k has dtype torch.float8_e4m3fn",
        "torch.int8",
        k=tensor(2, 7, 2, 64, dtype=E4M3),
    ),
    Spoiled(
        "vt dtype",
        TypeError,
        "qkv.vt has dtype torch.int8",
        "float8_e4m3fn",
        vt=tensor(2, 2, 64, 16, dtype=torch.int8),
    ),
    Spoiled(
        "vt not padded",
        ValueError,
        "qkv.vt has shape (2, 2, 64, 7)",
        "(2, 2, 64, 16)",
        vt=tensor(2, 2, 64, 7, dtype=E4M3),
    ),
    Spoiled(
        "k batch",
        ValueError,
        "qkv.k has shape (1, 7, 2, 64)",
        "(2, 7, 2, 64)",
        k=tensor(1, 7, 2, 64, dtype=torch.int8),
    ),
    Spoiled(
        "q head_dim",
        ValueError,
        "head_dim of q is 40",
        "the nearest to pad to is 48",
        q=tensor(2, 5, 4, 40, dtype=torch.int8),
    ),
    Spoiled(
        "k head_dim",
        ValueError,
        "qkv.k has shape (2, 7, 2, 80)",
        "(2, 7, 2, 64)",
        k=tensor(2, 7, 2, 80, dtype=torch.int8),
    ),
    Spoiled(
        "vt head_dim",
        ValueError,
        "head_dim of v is 24",
        "the nearest to pad to is 32",
        vt=tensor(2, 2, 24, 16, dtype=E4M3),
    ),
    Spoiled(
        "q heads", ValueError, "heads of q is 3", "the heads of k, 2", q=tensor(2, 5, 3, 64, dtype=torch.int8)
    ),
    Spoiled(
        "q_scale shape",
        ValueError,
        "qkv.q_scale has shape (2, 5, 4)",
        "(2, 4, 5)",
        q_scale=torch.ones(2, 5, 4),
    ),
    Spoiled(
        "k_scale dtype",
        TypeError,
        "qkv.k_scale has dtype torch.float64",
        "torch.float32",
        k_scale=torch.ones(2, 2, 1).double(),
    ),
    Spoiled("v_scale type", TypeError, "qkv.v_scale is a float", "float32 torch.Tensor", v_scale=1.0),
    Spoiled(
        "v_scale device",
        ValueError,
        "qkv.v_scale is on device meta",
        "that of qkv.q, cpu",
        v_scale=torch.ones(2, 2, 1, device="meta"),
    ),
    Spoiled("no q_dot_mean", TypeError, "qkv.q_dot_mean is None", "smooth_k", q_dot_mean=None),
    Spoiled("seqlen_k", ValueError, "qkv.seqlen_k is 8", "the seqlen of qkv.k, 7", seqlen_k=8),
    Spoiled("recipe", TypeError, "qkv.recipe is a str", "an Fp8Recipe", recipe="accurate"),
]


@pytest.mark.parametrize("case", PART_CASES, ids=repr)
def test_quantized_parts_are_refused(case: Spoiled) -> None:
    qkv = dataclasses.replace(cute_attn.quantize(**inputs()), **case.changed)
    unchanged = Spoiled(case.name, case.error, *case.says)
    unchanged.check(cute_attn.fp8_attention_quantized, {"qkv": qkv, "backend": "emulator"})
    unchanged.check(cute_attn.explain, {"q": qkv})


def test_quantized_refuses_other_objects_and_a_stray_mean() -> None:
    with pytest.raises(TypeError, match="qkv is a tuple; allowed: a QuantizedQKV"):
        cute_attn.fp8_attention_quantized((1, 2, 3))  # type: ignore[call-overload]
    qkv = cute_attn.quantize(**inputs(), recipe="naive")
    stray = dataclasses.replace(qkv, q_dot_mean=torch.zeros(2, 4, 5))
    with pytest.raises(
        ValueError, match=r"qkv.q_dot_mean is given; allowed without qkv.recipe.smooth_k: None"
    ):
        cute_attn.fp8_attention_quantized(stray, backend="emulator")


def test_explain_refuses_what_a_quantized_input_contradicts() -> None:
    qkv = cute_attn.quantize(**inputs())
    with pytest.raises(TypeError, match="k and v are given beside a QuantizedQKV"):
        cute_attn.explain(qkv, tensor(2, 7, 2, 64))
    with pytest.raises(ValueError, match="recipe is 'naive'; allowed: that of the QuantizedQKV, 'accurate'"):
        cute_attn.explain(qkv, recipe="naive")


@pytest.mark.parametrize("name", ["k", "v"])
def test_device_mismatch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(validate, "DEVICES", ("cpu", "cuda", "meta"))  # a second device on any machine
    arguments = inputs()
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} is on device meta; allowed: that of q, cpu"):
        cute_attn.fp8_attention(**arguments)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_sm90_on_another_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(api, "_calls", Remembered())
    monkeypatch.setattr("cute_attn.problem.device_capability", lambda device: capability)
    dotted = f"{capability[0]}.{capability[1]}"
    with pytest.raises(
        ValueError, match=rf"compute capability {dotted}; allowed: .* 9\.x \(Hopper: H100, H200\)"
    ):
        cute_attn.fp8_attention(**{**inputs(), "backend": "sm90"})


def test_a_refused_call_is_refused_after_a_good_one_of_the_same_shapes() -> None:
    good = inputs()
    cute_attn.fp8_attention(**good, causal=True)
    with pytest.raises(TypeError, match="causal is a int"):
        cute_attn.fp8_attention(**good, causal=1)
    other_strides = tensor(2, 7, 2, 128)[..., ::2]
    with pytest.raises(ValueError, match="k has strides"):
        cute_attn.fp8_attention(**{**good, "k": other_strides}, causal=True)
    with pytest.raises(ValueError, match="softmax_scale is nan"):
        cute_attn.fp8_attention(**good, causal=True, softmax_scale=math.nan)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused_not_dropped(name: str) -> None:
    arguments = inputs()
    arguments[name].requires_grad_()
    with pytest.raises(
        NotImplementedError, match=rf"{name} requires grad.*torch\.no_grad\(\), or {name}\.detach"
    ):
        cute_attn.quantize(**arguments)
    with torch.no_grad():
        assert not cute_attn.quantize(**arguments).q_scale.requires_grad
    arguments[name] = arguments[name].detach()
    assert not cute_attn.quantize(**arguments).q_scale.requires_grad


def test_gradients_of_descales_are_refused() -> None:
    arguments = {**inputs(E4M3), "v_descale": torch.ones(2, 2, requires_grad=True)}
    with pytest.raises(NotImplementedError, match="v_descale requires grad"):
        cute_attn.flash_attn_fp8_func(**arguments)
    with torch.no_grad():
        assert not cute_attn.flash_attn_fp8_func(**arguments).requires_grad


@pytest.mark.parametrize("size", HEAD_DIMS)
def test_any_multiple_of_16_is_a_head_dim(size: int) -> None:
    q, k = tensor(2, 5, 4, size), tensor(2, 7, 2, size)
    for size_v in HEAD_DIMS:
        v = tensor(2, 7, 2, size_v)
        validate.check_inputs(q, k, v)
        validate.check_fp8_inputs(*(x.to(E4M3) for x in (q, k, v)), {})
    neighbours = [d for d in range(size - 15, size + 16) if d != size]
    for wrong in neighbours:
        with pytest.raises(ValueError, match=f"head_dim of q is {wrong};"):
            validate.check_inputs(tensor(2, 5, 4, wrong), tensor(2, 7, 2, wrong), v)


def test_softmax_scale_takes_any_real_number() -> None:
    assert validate.check_softmax_scale(None, 64) == 0.125
    assert validate.check_softmax_scale(2, 64) == 2.0
    assert validate.check_softmax_scale(torch.tensor([0.5]).numpy()[0], 64) == 0.5
