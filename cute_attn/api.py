"""Public functions: check, plan, quantise, attend.

The path of a call is validate -> plan -> (quantise) -> launch. Arguments that were accepted once are
recognised by their signature (shapes, dtypes, devices, options), so that a repeated call pays one dictionary
look-up for both validation and planning.

The method is FlashAttention-3's 8-bit forward (arXiv 2407.08608, section 3.3: block quantisation and
incoherent processing) with the K smoothing and two-level accumulation of SageAttention (arXiv 2410.02367,
2411.10958).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal, overload

import torch
from torch import Tensor

from cute_attn import validate
from cute_attn.plan import Plan, make_plan, transpose_config
from cute_attn.problem import Problem, device_capability
from cute_attn.quantize import Fp8Recipe, QuantizedQKV, from_fp8, quantize_reference, resolve_recipe

__all__ = ["explain", "flash_attn_fp8_func", "fp8_attention", "fp8_attention_quantized", "quantize"]


@overload
def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    recipe: str | Fp8Recipe = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
    out_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    recipe: str | Fp8Recipe = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    out_dtype: torch.dtype | None = ...,
) -> Tensor: ...


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    recipe: str | Fp8Recipe = "default",
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T + mask) v with 8-bit operands, from 16-bit tensors.

    Quantises q, k and v by `recipe`, then runs the forward kernel (FlashAttention-3, arXiv 2407.08608,
    section 3.3). Softmax and accumulation are float32; neither scores nor probabilities are written to
    memory.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float16 or bfloat16, last stride 1; head_dim a multiple of 16
            from 32 to 256. Other strides are free (slices of a fused qkv, transposed views); on the GPU a
            tensor whose address or strides are no multiples of 16 bytes is copied first.
        k: (batch, seqlen_k, heads_k, head_dim), dtype and device of q. heads_q is a multiple of heads_k:
            query head h uses key head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v), likewise; head_dim_v, too, a multiple of 16 from 32 to 256,
            often that of q (it is not in multi-head latent attention: 192 and 128).
        recipe: "naive", "paper", "fp8", "accurate", "default" (= "accurate": int8 Q K^T, e4m3 P V), or an
            `Fp8Recipe`.
        causal: hide key j from query i unless j <= i + seqlen_k - seqlen_q (bottom-right alignment).
        softmax_scale: factor of q k^T, finite and > 0; default 1/sqrt(head_dim).
        return_lse: also return the log-sum-exp of each row's scaled scores.
        backend: "auto", "sm90" (the Hopper kernels) or "emulator" (torch, any device, with the kernels'
            roundings). "auto" is "sm90" for tensors on a GPU of compute capability 9.x, else "emulator", with
            one warning.
        out_dtype: float16 or bfloat16; default that of q.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) of `out_dtype`; with `return_lse` also lse (batch, heads_q,
        seqlen_q) float32, natural log. A row that sees no key has out 0 and lse -inf. A NaN or infinity in an
        input makes NaN every output that depends on its scale group; it never becomes a plausible number.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: grad mode is on and an input requires grad (there is no 8-bit backward).
    """
    plan = _plan_inputs(q, k, v, recipe, causal, backend, out_dtype)
    validate.check_forward_only(q=q, k=k, v=v)
    return _attend(lambda: _quantize(q, k, v, plan), plan, q.device, softmax_scale, return_lse, backend)


@overload
def fp8_attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
    out_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def fp8_attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    out_dtype: torch.dtype | None = ...,
) -> Tensor: ...


def fp8_attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`fp8_attention` on operands that `quantize` has prepared (arXiv 2407.08608, section 3.3).

    Args:
        qkv: of `quantize`, for batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim and head_dim_v as in
            `fp8_attention`.
        causal, softmax_scale, return_lse, backend: as in `fp8_attention`.
        out_dtype: float16 or bfloat16; default `qkv.dtype`, that of the tensors it was made from.

    Returns:
        As `fp8_attention`.

    Raises:
        TypeError: an argument, or a part of `qkv`, of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: grad mode is on and a part of `qkv` requires grad.
    """
    plan = _plan_quantized(qkv, causal, backend, out_dtype)
    validate.check_forward_only(
        q_scale=qkv.q_scale, k_scale=qkv.k_scale, v_scale=qkv.v_scale, q_dot_mean=qkv.q_dot_mean
    )
    return _attend(
        lambda: _aligned_operands(qkv, plan), plan, qkv.q.device, softmax_scale, return_lse, backend
    )


@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    backend: str = ...,
    out_dtype: torch.dtype = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    out_dtype: torch.dtype = ...,
) -> Tensor: ...


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on e4m3 tensors that exist already, by the signature of FlashAttention-3's FP8 forward.

    Uses the scales as given: one for each (batch, head), FlashAttention-3's public granularity. Where the
    16-bit tensors are at hand, `fp8_attention` is more accurate: its recipes scale blocks and rotate (arXiv
    2407.08608, section 3.3).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float8_e4m3fn, last stride 1; head_dim a multiple of 16 from
            32 to 256.
        k: (batch, seqlen_k, heads_k, head_dim), likewise; heads_q is a multiple of heads_k.
        v: (batch, seqlen_k, heads_k, head_dim_v), likewise; head_dim_v another multiple of 16 from 32 to 256.
        softmax_scale, causal: as in `fp8_attention`.
        q_descale, k_descale, v_descale: (batch, heads_k) float32, > 0, any strides: factors from codes to
            values; default 1. That of q serves all query heads of its key head.
        return_lse, backend: as in `fp8_attention`.
        out_dtype: float16 or bfloat16.

    Returns:
        As `fp8_attention`.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: grad mode is on and an input requires grad.
    """
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    validate.check_fp8_inputs(q, k, v, descales)
    validate.check_forward_only(q=q, k=k, v=v, **descales)
    validate.check_causal(causal)
    validate.check_softmax_scale(softmax_scale, q.shape[3])  # refuse before V is transposed
    validate.check_out_dtype(out_dtype, torch.bfloat16)
    validate.check_backend(backend, device_capability(q.device))
    qkv = from_fp8(q, k, v, q_descale, k_descale, v_descale, vt=_transpose_v(q, v, backend))
    plan = _plan_quantized(qkv, causal, backend, out_dtype)
    return _attend(lambda: _aligned_operands(qkv, plan), plan, q.device, softmax_scale, return_lse, backend)


def quantize(
    q: Tensor, k: Tensor, v: Tensor, recipe: str | Fp8Recipe = "default", *, backend: str = "auto"
) -> QuantizedQKV:
    """8-bit operands of `fp8_attention_quantized` (rotation and block scales of arXiv 2407.08608, section
    3.3).

    The kernel on Hopper and the torch reference elsewhere agree bit for bit, so there is nothing to warn
    about.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float16 or bfloat16, last stride 1; head_dim a multiple of 16
            from 32 to 256.
        k: (batch, seqlen_k, heads_k, head_dim), dtype and device of q; heads_q is a multiple of heads_k.
        v: (batch, seqlen_k, heads_k, head_dim_v), likewise; head_dim_v another multiple of 16 from 32 to 256.
        recipe: name of a preset, or an `Fp8Recipe`.
        backend: "auto", "sm90" or "emulator" (here the torch reference), as in `fp8_attention`.

    Returns:
        A `QuantizedQKV` on the device of q. A group of zeros has scale 1; a group with a NaN or infinity has
        scale NaN.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: grad mode is on and an input requires grad.
    """
    plan = _plan_inputs(q, k, v, recipe, False, backend, None)
    validate.check_forward_only(q=q, k=k, v=v)
    return _quantize(q, k, v, plan)


def explain(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    recipe: str | Fp8Recipe = "default",
    causal: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Plan:
    """What `fp8_attention` would do with these arguments, without doing it: backend, kernel, tiles, and why.

    `print(explain(q, k, v))` is the readable form. Nothing is compiled or launched, and no data is read.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) as in `fp8_attention`; or a `QuantizedQKV`, alone, for
            `fp8_attention_quantized`.
        k, v: (batch, seqlen_k, heads_k, head_dim or head_dim_v) as in `fp8_attention`.
        recipe, causal, backend, out_dtype: as in `fp8_attention`. A `QuantizedQKV` brings its recipe along.

    Returns:
        The plan.

    Raises:
        TypeError, ValueError: as the function that it explains.
    """
    if not isinstance(q, QuantizedQKV):
        return _plan_inputs(q, k, v, recipe, causal, backend, out_dtype)
    if k is not None or v is not None:
        raise TypeError("k and v are given beside a QuantizedQKV, which holds its own; allowed: None")
    if recipe != "default" and resolve_recipe(recipe) != q.recipe:
        raise ValueError(f"recipe is {recipe!r}; allowed: that of the QuantizedQKV, {q.recipe.name!r}")
    return _plan_quantized(q, causal, backend, out_dtype)


# ------------------------------------------------------------------------------------------------------------
# From arguments to a plan
# ------------------------------------------------------------------------------------------------------------

_Key = tuple[object, ...]
_plans: dict[_Key, Plan] = {}
_MAX_PLANS: Final = 4096  # a server that sees ever new lengths must not grow without bound


def _plan_inputs(
    q: object,
    k: object,
    v: object,
    recipe: str | Fp8Recipe,
    causal: bool,
    backend: str,
    out_dtype: torch.dtype | None,
) -> Plan:
    """Check all about 16-bit inputs that a plan depends on, and plan; both only once for a signature."""
    try:
        key: _Key = (
            *_signature(q),
            *_signature(k),
            *_signature(v),
            recipe,
            type(causal),
            causal,
            backend,
            out_dtype,
        )
        known = _plans.get(key)
    except (AttributeError, LookupError, RuntimeError, TypeError):
        key, known = (), None  # not a dense tensor, or unhashable: the checks below name the argument
    if known is not None:
        return known
    validate.check_inputs(q, k, v)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    problem = Problem.from_tensors(
        q,
        k,
        v,
        resolve_recipe(recipe),
        causal=validate.check_causal(causal),
        out_dtype=validate.check_out_dtype(out_dtype, q.dtype),
    )
    validate.check_backend(backend, problem.capability)
    return _remember(key, make_plan(problem, backend))


def _plan_quantized(qkv: QuantizedQKV, causal: bool, backend: str, out_dtype: torch.dtype | None) -> Plan:
    """Likewise for prepared operands, all of whose parts are in the signature."""
    try:
        parts = (qkv.q, qkv.k, qkv.vt, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.q_dot_mean)
        signatures = [None if part is None else _signature(part) for part in parts]
        key: _Key = (
            *signatures,
            qkv.seqlen_k,
            qkv.recipe,
            qkv.dtype,
            type(causal),
            causal,
            backend,
            out_dtype,
        )
        known = _plans.get(key)
    except (AttributeError, LookupError, RuntimeError, TypeError):
        key, known = (), None
    if known is not None:
        return known
    validate.check_quantized(qkv)
    problem = Problem.from_quantized(
        qkv,
        causal=validate.check_causal(causal),
        out_dtype=validate.check_out_dtype(out_dtype, qkv.dtype),
    )
    validate.check_backend(backend, problem.capability)
    return _remember(key, make_plan(problem, backend))


def _signature(x: Any) -> _Key:
    """What validation reads of a tensor. Raises one of several errors for anything but a dense tensor."""
    return type(x), x.shape, x.dtype, x.device, x.stride(-1)


def _remember(key: _Key, plan: Plan) -> Plan:
    if key:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


# ------------------------------------------------------------------------------------------------------------
# From a plan to a result
# ------------------------------------------------------------------------------------------------------------


def _quantize(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> QuantizedQKV:
    assert plan.quantize_config is not None, "a plan for 16-bit inputs names a quantiser"
    if plan.backend == "emulator" or plan.problem.is_empty:
        return quantize_reference(q, k, v, plan.recipe)
    from cute_attn.launch import launch_quantize

    return launch_quantize(_aligned(q), _aligned(k), _aligned(v), plan.recipe, plan.quantize_config)


def _transpose_v(q: Tensor, v: Tensor, backend: str) -> Tensor | None:
    """V^T by the device kernel, for a checked `backend`; None where `from_fp8` is to make it in torch."""
    capability = device_capability(v.device)
    if backend == "emulator" or capability is None or capability[0] != 9 or not (q.numel() and v.numel()):
        return None
    from cute_attn.launch import launch_transpose_v

    return launch_transpose_v(_aligned(v), transpose_config(v.shape[3]))


_ALIGNMENT: Final = 16  # bytes: what TMA and 16-byte accesses want of addresses and strides


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy where its address or a stride is no multiple of 16 bytes."""
    batch, seqlen, heads, _ = x.stride()
    if (x.data_ptr() | (batch | seqlen | heads) * x.element_size()) % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _aligned_operands(qkv: QuantizedQKV, plan: Plan) -> QuantizedQKV:
    if plan.backend == "emulator":
        return qkv
    q, k, vt = _aligned(qkv.q), _aligned(qkv.k), _aligned(qkv.vt)
    if q is qkv.q and k is qkv.k and vt is qkv.vt:
        return qkv
    return dataclasses.replace(qkv, q=q, k=k, vt=vt)


def _attend(
    prepare: Callable[[], QuantizedQKV],
    plan: Plan,
    device: torch.device,
    softmax_scale: float | None,
    return_lse: bool,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a plan. `prepare` makes the operands; it is not called where the result is known without them.

    Public functions call this directly: the warning names the line that called them.
    """
    problem, config = plan.problem, plan.config
    scale = validate.check_softmax_scale(softmax_scale, problem.head_dim)
    if problem.is_empty:
        out, lse = _empty_result(problem, device)
    elif plan.backend == "emulator":
        if backend == "auto":
            _warn_emulator(plan)
        from cute_attn.emulator import emulate_forward

        out, lse = emulate_forward(
            prepare(),
            causal=config.causal,
            softmax_scale=scale,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            pack_gqa=config.pack_gqa,
            check_keys=config.check_keys,
            out_dtype=problem.out_dtype,
        )
    else:
        from cute_attn.launch import launch_forward

        out, lse = launch_forward(
            prepare(), config, causal=config.causal, softmax_scale=scale, out_dtype=problem.out_dtype
        )
    return (out, lse) if return_lse else out


def _empty_result(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros and lse -inf: what rows without keys give, however many rows there are."""
    rows, heads = problem.seqlen_q, problem.heads_q
    shape = (problem.batch, rows, heads, problem.head_dim_v)
    out = torch.zeros(shape, dtype=problem.out_dtype, device=device)
    return out, torch.full((problem.batch, heads, rows), -math.inf, dtype=torch.float32, device=device)


_warned = False


def _warn_emulator(plan: Plan) -> None:
    """Say once that "auto" did not mean a GPU kernel."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"cute_attn runs the emulator of its Hopper kernel, because {plan.reasons[0]}. The emulator "
        "reproduces the kernel's rounding, not its speed. To silence this warning pass backend='emulator'.",
        UserWarning,
        stacklevel=4,
    )
