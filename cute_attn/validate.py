"""Refusals: every bad argument is named, with what came and what is allowed, before any work starts.

A wrong type or dtype raises TypeError, everything else that is wrong raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from cute_attn.kernels.config import HEAD_DIMS
from cute_attn.problem import dotted
from cute_attn.quantize import K_GROUP, V_BLOCK, Fp8Recipe, QuantizedQKV

IN_DTYPES: Final = (torch.float16, torch.bfloat16)
OUT_DTYPES: Final = (torch.float16, torch.bfloat16)
BACKENDS: Final = ("auto", "sm90", "emulator")
DEVICES: Final = ("cpu", "cuda")

_FLOAT32: Final = torch.finfo(torch.float32)
_LOG2_E: Final = math.log2(math.e)


def _one_of(choices: Iterable[object]) -> str:
    return ", ".join(choice if isinstance(choice, str) else str(choice) for choice in choices)


def _check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], hint: str = "") -> None:
    """A dense 4-D tensor of one of `dtypes` on a supported device, with unit last stride."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise ValueError(f"{name} is a {kind} tensor; allowed: a dense one (torch.strided)")
    if x.dim() != 4:
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; allowed: 4, "
            "(batch, seqlen, heads, head_dim)"
        )
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: {_one_of(dtypes)}{hint}")
    if x.device.type not in DEVICES:
        raise ValueError(f"{name} is on device {x.device}; allowed: {_one_of(DEVICES)}")
    if x.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {x.stride()}; allowed: a last stride of 1 (call {name}.contiguous(), or "
            "transpose dimensions other than head_dim)"
        )


def _check_head_dims(head_dim: int, head_dim_v: int) -> None:
    """Refuse a head_dim of q and k, or of v, that no kernel takes, and say how padding serves it exactly."""
    allowed = f"a multiple of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    for name, size in (("q", head_dim), ("v", head_dim_v)):
        if size in HEAD_DIMS:
            continue
        message = f"head_dim of {name} is {size}; allowed: {allowed}"
        padded = next((each for each in HEAD_DIMS if each > size), None)
        if padded is None:
            message += f"; the nearest is {HEAD_DIMS[-1]}"
        elif size > 0:
            message += f"; the nearest to pad to is {padded}: "
            if name == "q":
                message += (
                    f"q and k with zeros up to {padded} columns and softmax_scale=1/sqrt({size}) are exactly "
                    "the same attention"
                )
            else:
                message += (
                    f"v with zeros up to {padded} columns gives exactly the same in the first {size} columns "
                    "of the output"
                )
        raise ValueError(message)


def _check_agreement(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Devices, dtypes and shapes of q, k, v against each other."""
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"{name} is on device {x.device}; allowed: that of q, {q.device}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: that of q, {q.dtype}")
    batch, _, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, _ = k.shape
    _check_head_dims(head_dim, v.shape[3])
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch:
            raise ValueError(f"batch of {name} is {x.shape[0]}; allowed: that of q, {batch}")
    if k.shape[3] != head_dim:
        raise ValueError(f"head_dim of k is {k.shape[3]}; allowed: that of q, {head_dim}")
    if v.shape[1] != seqlen_k:
        raise ValueError(f"seqlen of v is {v.shape[1]}; allowed: that of k, {seqlen_k}")
    if v.shape[2] != heads_k:
        raise ValueError(f"heads of v is {v.shape[2]}; allowed: that of k, {heads_k}")
    _check_heads(heads_q, heads_k)


def _check_heads(heads_q: int, heads_k: int) -> None:
    if heads_k < 1:
        raise ValueError(f"heads of k is {heads_k}; allowed: at least 1")
    if heads_q < 1 or heads_q % heads_k:
        raise ValueError(f"heads of q is {heads_q}; allowed: a multiple of the heads of k, {heads_k}")


def check_inputs(q: object, k: object, v: object) -> None:
    """Refuse 16-bit inputs that no kernel takes.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float16 or bfloat16, last stride 1, CPU or CUDA; head_dim a
            multiple of 16 from 32 to 256.
        k: (batch, seqlen_k, heads_k, head_dim), dtype and device of q; heads_q a multiple of heads_k.
        v: (batch, seqlen_k, heads_k, head_dim_v), likewise; head_dim_v another such multiple of 16.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: rank, device, layout, strides or shapes that are not allowed.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        ready = isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn
        hint = " (for e4m3 tensors call flash_attn_fp8_func)" if ready else ""
        _check_tensor(name, x, IN_DTYPES, hint)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    _check_agreement(q, k, v)


def check_fp8_inputs(q: object, k: object, v: object, descales: Mapping[str, object]) -> None:
    """Refuse e4m3 inputs that no kernel takes.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float8_e4m3fn, last stride 1, CPU or CUDA.
        k: (batch, seqlen_k, heads_k, head_dim), likewise; v: (batch, seqlen_k, heads_k, head_dim_v).
        descales: by argument name, (batch, heads_k) float32 on the device of q, or None.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: rank, device, layout, strides or shapes that are not allowed.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        sixteen = isinstance(x, Tensor) and x.dtype in IN_DTYPES
        hint = " (for 16-bit tensors call fp8_attention, which quantises them)" if sixteen else ""
        _check_tensor(name, x, (torch.float8_e4m3fn,), hint)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    _check_agreement(q, k, v)
    shape = (q.shape[0], k.shape[2])
    for name, x in descales.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a float32 torch.Tensor or None")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: torch.float32")
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: (batch, heads_k) = {shape}")
        if x.device != q.device:
            raise ValueError(f"{name} is on device {x.device}; allowed: that of q, {q.device}")


def check_quantized(qkv: object) -> None:
    """Refuse a `QuantizedQKV` whose parts do not fit each other; what `quantize` returns always does.

    Raises:
        TypeError: not a QuantizedQKV, or a part with a wrong type or dtype.
        ValueError: a part with a wrong shape, device or stride.
    """
    if not isinstance(qkv, QuantizedQKV):
        raise TypeError(f"qkv is a {type(qkv).__name__}; allowed: a QuantizedQKV (see cute_attn.quantize)")
    if not isinstance(qkv.recipe, Fp8Recipe):
        raise TypeError(f"qkv.recipe is a {type(qkv.recipe).__name__}; allowed: an Fp8Recipe")
    code = torch.int8 if qkv.recipe.qk_dtype == "int8" else torch.float8_e4m3fn
    for name, x in (("qkv.q", qkv.q), ("qkv.k", qkv.k)):
        _check_tensor(name, x, (code,), f", by qkv.recipe.qk_dtype {qkv.recipe.qk_dtype!r}")
    _check_tensor("qkv.vt", qkv.vt, (torch.float8_e4m3fn,))
    batch, seqlen_q, heads_q, head_dim = qkv.q.shape
    seqlen_k, heads_k = qkv.k.shape[1], qkv.k.shape[2]
    head_dim_v = qkv.vt.shape[2]
    _check_head_dims(head_dim, head_dim_v)
    _check_heads(heads_q, heads_k)
    if qkv.seqlen_k != seqlen_k:
        raise ValueError(f"qkv.seqlen_k is {qkv.seqlen_k!r}; allowed: the seqlen of qkv.k, {seqlen_k}")
    padded = -(-seqlen_k // 16) * 16
    codes: tuple[tuple[str, Tensor, tuple[int, ...]], ...] = (
        ("qkv.k", qkv.k, (batch, seqlen_k, heads_k, head_dim)),
        ("qkv.vt", qkv.vt, (batch, heads_k, head_dim_v, padded)),
    )
    scales: tuple[tuple[str, Tensor, tuple[int, ...]], ...] = (
        ("qkv.q_scale", qkv.q_scale, (batch, heads_q, seqlen_q)),
        ("qkv.k_scale", qkv.k_scale, (batch, heads_k, -(-seqlen_k // K_GROUP))),
        ("qkv.v_scale", qkv.v_scale, (batch, heads_k, -(-seqlen_k // V_BLOCK))),
    )
    if qkv.recipe.smooth_k:
        if qkv.q_dot_mean is None:
            raise TypeError(
                "qkv.q_dot_mean is None; allowed with qkv.recipe.smooth_k: a float32 torch.Tensor"
            )
        scales += (("qkv.q_dot_mean", qkv.q_dot_mean, (batch, heads_q, seqlen_q)),)
    elif qkv.q_dot_mean is not None:
        raise ValueError("qkv.q_dot_mean is given; allowed without qkv.recipe.smooth_k: None")
    for name, x, _ in scales:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a float32 torch.Tensor")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: torch.float32")
    for name, x, shape in codes + scales:
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {shape}")
        if x.device != qkv.q.device:
            raise ValueError(f"{name} is on device {x.device}; allowed: that of qkv.q, {qkv.q.device}")


def check_backend(backend: object, capability: tuple[int, int] | None) -> None:
    """Refuse an unknown backend, and "sm90" where the tensors are not on a Hopper GPU.

    Args:
        backend: "auto", "sm90" or "emulator".
        capability: compute capability of the tensors' device, None if it is not an NVIDIA GPU.

    Raises:
        ValueError: unknown, or not possible on this device.
    """
    if backend not in BACKENDS:
        why = ", which has 16-bit kernels alone, of flash_attn_func" if backend == "sm80" else ""
        raise ValueError(f"backend is {backend!r}{why}; allowed: {', '.join(map(repr, BACKENDS))}")
    if backend == "sm90" and (capability is None or capability[0] != 9):
        where = (
            "a device that is no NVIDIA GPU"
            if capability is None
            else f"a GPU of compute capability {dotted(capability)}"
        )
        raise ValueError(
            f"backend is 'sm90' but q is on {where}; allowed: a GPU of compute capability 9.x (Hopper: H100, "
            "H200), or backend='emulator'"
        )


def check_causal(causal: object) -> bool:
    """`causal` itself. Raises TypeError unless it is a bool: a mask tensor, say, is not one."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal is a {type(causal).__name__}; allowed: True or False")
    return causal


def check_number(name: str, x: object, allowed: str) -> float:
    """A real number as a float. Raises TypeError for anything else, also for a bool or a tensor."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return float(x)  # torch.compile traces this test, and not the next one
    if isinstance(x, (bool, str, Tensor)) or not hasattr(x, "__float__"):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: {allowed}")
    return float(x)


def check_softmax_scale(softmax_scale: object, head_dim: int) -> float:
    """The factor of Q K^T as a float; None means 1/sqrt(head_dim).

    Raises:
        TypeError: not a real number.
        ValueError: not finite, or neither 0 nor a normal number in float32, also times log2(e).
    """
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    scale = check_number("softmax_scale", softmax_scale, "a float or None")
    # Kernels take scale * log2(e) in float32; one that is 0 only there would turn a masked -inf into NaN.
    if not (scale == 0.0 or _FLOAT32.tiny <= abs(scale) * _LOG2_E <= _FLOAT32.max):
        raise ValueError(
            f"softmax_scale is {scale}; allowed: a finite number, 0 or normal in float32, or None"
        )
    return scale


def check_window_size(window_size: object) -> tuple[int, int]:
    """(left, right) as ints, -1 without an end.

    Raises:
        TypeError: not a tuple or list of two ints.
        ValueError: an end below -1.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; allowed: a tuple (left, right)")
    for end in window_size:
        if isinstance(end, bool) or not isinstance(end, int):
            raise TypeError(
                f"window_size is {tuple(window_size)}, with a {type(end).__name__}; allowed: two ints"
            )
        if end < -1:
            raise ValueError(f"window_size is {tuple(window_size)}; allowed: ends >= 0, or -1 for none")
    left, right = window_size
    return left, right


def check_softcap(softcap: object) -> float:
    """The bound of scores as a float, 0.0 for none.

    Raises:
        TypeError: not a real number.
        ValueError: negative, not finite, or too small or large for float32.
    """
    cap = check_number("softcap", softcap, "a float >= 0")
    if not (cap == 0.0 or _FLOAT32.tiny <= cap <= _FLOAT32.max / 2):
        raise ValueError(f"softcap is {cap}; allowed: 0 (none), or finite and > 0")
    return cap


def check_side_tensors(
    batch: int, heads: int, device: torch.device, alibi_slopes: object, sinks: object
) -> None:
    """Refuse what is no (heads_q,) or (batch, heads_q) of slopes, or no (heads_q,) of sinks, float32 beside q.

    Raises:
        TypeError: neither a tensor nor None, or not float32.
        ValueError: a wrong shape or device.
    """
    for name, x, shapes in (
        ("alibi_slopes", alibi_slopes, ((heads,), (batch, heads))),
        ("sinks", sinks, ((heads,),)),
    ):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a float32 torch.Tensor or None")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: torch.float32")
        if tuple(x.shape) not in shapes:
            allowed = " or ".join(map(str, shapes))
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {allowed}")
        if x.device != device:
            raise ValueError(f"{name} is on device {x.device}; allowed: that of q, {device}")


def check_out_dtype(out_dtype: object, default: torch.dtype) -> torch.dtype:
    """The dtype of the output; None means `default`.

    Raises:
        TypeError: neither float16 nor bfloat16.
    """
    chosen = default if out_dtype is None else out_dtype
    if not isinstance(chosen, torch.dtype) or chosen not in OUT_DTYPES:
        raise TypeError(
            f"out_dtype is {chosen!r}; allowed: {_one_of(OUT_DTYPES)}, or None for the inputs' own"
        )
    return chosen


def check_forward_only(kind: str = "8-bit", /, **tensors: Tensor | None) -> None:
    """Refuse inputs that autograd would want a gradient for: the forward of this `kind` has no backward.

    Detaching them silently would train a model with gradients that lack the attention.

    Raises:
        NotImplementedError: grad mode is on and a tensor requires grad.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad, but {kind} attention has no backward; allowed: a call under "
                f"torch.no_grad(), or {name}.detach()"
            )


def check_no_gradient(**tensors: Tensor | None) -> None:
    """Refuse arguments that autograd would want a gradient for and that have none, in a function that has others.

    Raises:
        NotImplementedError: grad mode is on and a tensor requires grad.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad, but there is no gradient of it; allowed: {name}.detach()"
            )
