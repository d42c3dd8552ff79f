"""Public functions: check, plan, quantise, attend.

The path of a call is validate -> plan -> (quantise) -> launch. Arguments that were accepted once are
recognised by their signature (shapes, dtypes, devices, options): where kernels run, it finds a call that is ready
(see `cute_attn.launch`), so that a repeated call pays one dictionary look-up for validation and planning.

The method is FlashAttention-3's 8-bit forward (arXiv 2407.08608, section 3.3: block quantisation and
incoherent processing) with the K smoothing and two-level accumulation of SageAttention (arXiv 2410.02367,
2411.10958).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
from torch import Tensor

from cute_attn import validate
from cute_attn.plan import Plan, make_plan
from cute_attn.problem import Features, Problem, device_capability
from cute_attn.quantize import (
    Fp8Recipe,
    QuantizedQKV,
    Rotary,
    Stored,
    check_rotary,
    from_fp8,
    quantize_reference,
    resolve_recipe,
)
from cute_attn.remember import Key, Remembered
from cute_attn.tiles import transpose_config
from cute_attn.tracing import untraced, warn_once

if TYPE_CHECKING:
    from cute_attn.launch import Forward

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
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    rotary_interleaved: bool = ...,
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
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    rotary_interleaved: bool = ...,
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T + bias + mask) v with 8-bit operands, from 16-bit tensors.

    Quantises q, k and v by `recipe`, then runs the forward kernel (FlashAttention-3, arXiv 2407.08608,
    section 3.3). Softmax and accumulation are float32; neither scores nor probabilities are written to
    memory.

    Where q, k, v or sinks require grad, out and lse are differentiable, once, by the 16-bit backward on the 16-bit q, k
    and v: rounding to 8 bits counts as the identity (a straight-through estimator). The backward takes out and lse from
    the 8-bit forward and scores s from 16 bits, so its probabilities exp(s - lse) add up to 1 in a row but for the
    error of lse, and gradients have an error of the forward's size. Under
    torch.use_deterministic_algorithms(True) they are the same, bit for bit, in every run. torch.compile traces the call
    as one operator.

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
        softmax_scale: factor of q k^T, finite, of any sign; default 1/sqrt(head_dim). One <= 0 costs a pass over q.
        window_size: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q +
            right; -1 for no end. With `causal`, right is 0. Tiles of keys that no row of a tile sees are not visited.
        softcap: where > 0, scores become softcap * tanh(score / softcap), before bias and mask.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32: subtracts slope * |i + seqlen_k - seqlen_q - j| from a
            score (ALiBi, arXiv 2108.12409).
        sinks: (heads_q,) float32: one more logit in the softmax of every row of a head, which has no value.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), dtype and device of q, last stride 1: rotary position
            embedding of q and k (arXiv 2104.09864), applied while they are quantised. Row j serves position j, that
            of key j; the last query is at the position of the last key. seqlen_ro >= seqlen_k >= seqlen_q;
            rotary_dim, a multiple of 16, is at most head_dim, and columns past it stay as they are. Default: none.
        rotary_interleaved: pairs are columns 2 i and 2 i + 1 (GPT-J), else i and i + rotary_dim / 2 (GPT-NeoX).
        return_lse: also return the log-sum-exp of each row's scaled scores.
        backend: "auto", "sm90" (the Hopper kernels) or "emulator" (torch, any device, with the kernels'
            roundings). "auto" is "sm90" for tensors on a GPU of compute capability 9.x, else "emulator", with
            one warning.
        out_dtype: float16 or bfloat16; default that of q.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) of `out_dtype`; with `return_lse` also lse (batch, heads_q,
        seqlen_q) float32, natural log. A row that sees no key has out 0, and lse -inf or its sink. A NaN or infinity in
        an input makes NaN every output that depends on its scale group; it never becomes a plausible number.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: grad mode is on, and alibi_slopes or a rotary table requires grad, or another input does
            and out_dtype is not that of q.
    """
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    kind = _rotary_kind(*rotary)
    given = (window_size, softcap, alibi_slopes, sinks)
    traced = torch.compiler.is_compiling()
    if not traced:
        asked = _signature(given)
        options = (
            recipe,
            causal,
            type(causal),
            softmax_scale,
            type(softmax_scale),
            kind,
            backend,
            out_dtype,
            asked,
        )
        key, call = _ready_call(q, k, v, options)
        if call is None:
            plan = _plan_inputs(q, k, v, recipe, causal, backend, out_dtype, kind, given)
    if traced or (
        torch.is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sinks is not None and sinks.requires_grad)
        )
    ):
        from cute_attn.fp8_autograd import attend

        if not traced and call is None and _launches(plan):
            _calls.keep(key, _prepare_attention(q, k, plan, softmax_scale))  # so that it is checked once
        out, lse = attend(
            q,
            k,
            v,
            recipe=recipe,
            causal=causal,
            softmax_scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            rotary=rotary,
            backend=backend,
            out_dtype=out_dtype,
        )
        return (out, lse) if return_lse else out
    tables = None if kind == "none" else _check_tables(q, k, rotary)
    plain = alibi_slopes is None and sinks is None
    side = (None, None) if plain else _side_tensors(q, alibi_slopes, sinks)
    if call is None:
        if not _launches(plan):
            prepare = functools.partial(_reference, q, k, v, plan.recipe, rotary)
            return _attend(prepare, plan, q.device, softmax_scale, side, return_lse, backend)
        call = _calls.keep(key, _prepare_attention(q, k, plan, softmax_scale))
    return call(q, k, v, return_lse, tables, *side)


@overload
def fp8_attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
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
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    out_dtype: torch.dtype | None = ...,
) -> Tensor: ...


@untraced
def fp8_attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`fp8_attention` on operands that `quantize` has prepared (arXiv 2407.08608, section 3.3).

    Args:
        qkv: of `quantize`, for batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim and head_dim_v as in
            `fp8_attention`.
        causal, softmax_scale, window_size, softcap, alibi_slopes, sinks, return_lse, backend: as in `fp8_attention`.
            A softmax_scale <= 0 costs a pass over the codes of q.
        out_dtype: float16 or bfloat16; default `qkv.dtype`, that of the tensors it was made from.

    Returns:
        As `fp8_attention`.

    Raises:
        TypeError: an argument, or a part of `qkv`, of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: grad mode is on and a part of `qkv` requires grad.
    """
    given = (window_size, softcap, alibi_slopes, sinks)
    asked = _signature(given)
    options = (causal, type(causal), softmax_scale, type(softmax_scale), backend, out_dtype, asked)
    stored = qkv.untouched if isinstance(qkv, QuantizedQKV) else None
    if stored is not None and alibi_slopes is None and sinks is None:
        ready = _ready_untouched_call(stored, qkv.dtype, options, given)
        if ready is not None:
            return ready(stored, return_lse)
    key, call = _ready_quantized_call(qkv, options)
    plan = None if call is not None else _plan_quantized(qkv, causal, backend, out_dtype, given)
    validate.check_forward_only(
        "prepared 8-bit",
        q_scale=qkv.q_scale,
        k_scale=qkv.k_scale,
        v_scale=qkv.v_scale,
        q_dot_mean=qkv.q_dot_mean,
    )
    side = _side_tensors(qkv.q, alibi_slopes, sinks)
    if call is None:
        assert plan is not None
        if not _launches(plan):
            return _attend(lambda: qkv, plan, qkv.q.device, softmax_scale, side, return_lse, backend)
        call = _calls.keep(key, _prepare_forward(qkv, plan, softmax_scale))
    out, lse = call(qkv, *side)
    return (out, lse) if return_lse else out


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
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
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
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    out_dtype: torch.dtype = ...,
) -> Tensor: ...


@untraced
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
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
        window_size, softcap, alibi_slopes, sinks: as in `fp8_attention`.
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
    validate.check_forward_only("prepared 8-bit", q=q, k=k, v=v, **descales)
    given = (window_size, softcap, alibi_slopes, sinks)
    # refuse before V is transposed
    validate.check_causal(causal)
    _check_features(q, given)
    validate.check_softmax_scale(softmax_scale, q.shape[3])
    side = _side_tensors(q, alibi_slopes, sinks)
    validate.check_out_dtype(out_dtype, torch.bfloat16)
    validate.check_backend(backend, device_capability(q.device))
    qkv = from_fp8(q, k, v, q_descale, k_descale, v_descale, vt=_transpose_v(q, v, backend))
    plan = _plan_quantized(qkv, causal, backend, out_dtype, given)
    if not _launches(plan):
        return _attend(lambda: qkv, plan, q.device, softmax_scale, side, return_lse, backend)
    out, lse = _prepare_forward(qkv, plan, softmax_scale)(qkv, *side)
    return (out, lse) if return_lse else out


@untraced
def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: str | Fp8Recipe = "default",
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    backend: str = "auto",
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
        rotary_cos, rotary_sin, rotary_interleaved: rotary position embedding of q and k, as in `fp8_attention`.
        backend: "auto", "sm90" or "emulator" (here the torch reference), as in `fp8_attention`.

    Returns:
        A `QuantizedQKV` on the device of q; of the kernel, all parts are views of one allocation. A group of zeros
        has scale 1; a group with a NaN or infinity has scale NaN.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: grad mode is on and an input requires grad.
    """
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    kind = _rotary_kind(*rotary)
    key, call = _ready_call(q, k, v, (recipe, kind, backend))
    if call is None:
        plan = _plan_inputs(q, k, v, recipe, False, backend, None, kind, _NOTHING)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        validate.check_forward_only("prepared 8-bit", q=q, k=k, v=v)
    tables = None if kind == "none" else _check_tables(q, k, rotary)
    if call is None:
        if not _launches(plan):
            return _reference(q, k, v, plan.recipe, rotary)
        call = _calls.keep(key, _prepare_quantize(q, k, plan))
    return call(q, k, v, tables)


def explain(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    recipe: str | Fp8Recipe = "default",
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Plan:
    """What `fp8_attention` would do with these arguments, without doing it: backend, kernel, tiles, and why.

    `print(explain(q, k, v))` is the readable form. Nothing is compiled or launched, and no data is read.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) as in `fp8_attention`; or a `QuantizedQKV`, alone, for
            `fp8_attention_quantized`.
        k, v: (batch, seqlen_k, heads_k, head_dim or head_dim_v) as in `fp8_attention`.
        recipe, causal, window_size, softcap, alibi_slopes, sinks, backend, out_dtype: as in `fp8_attention`. A
            `QuantizedQKV` brings its recipe along.
        rotary_cos, rotary_sin, rotary_interleaved: as in `fp8_attention`; none with a `QuantizedQKV`.

    Returns:
        The plan.

    Raises:
        TypeError, ValueError: as the function that it explains.
    """
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    kind = _rotary_kind(*rotary)
    given = (window_size, softcap, alibi_slopes, sinks)
    if not isinstance(q, QuantizedQKV):
        plan = _plan_inputs(q, k, v, recipe, causal, backend, out_dtype, kind, given)
        assert k is not None
        check_rotary(q, k, *rotary)
        return plan
    if kind != "none":
        raise ValueError(
            "rotary_cos is given beside a QuantizedQKV, which is embedded already; allowed: None"
        )
    if k is not None or v is not None:
        raise TypeError("k and v are given beside a QuantizedQKV, which holds its own; allowed: None")
    if recipe != "default" and resolve_recipe(recipe) != q.recipe:
        raise ValueError(f"recipe is {recipe!r}; allowed: that of the QuantizedQKV, {q.recipe.name!r}")
    return _plan_quantized(q, causal, backend, out_dtype, given)


# ------------------------------------------------------------------------------------------------------------
# From arguments to a call that is ready, or to a plan
# ------------------------------------------------------------------------------------------------------------

_Call = Callable[..., Any]
_calls: Remembered[_Call] = Remembered()


def _ready_call(q: Any, k: Any, v: Any, options: Key) -> tuple[Key, _Call | None]:
    """(key, call) for 16-bit inputs and options that were accepted before; call is None where they were not.

    The key leaves out what the compiled quantiser checks by itself in every call: dtype and device of k and v,
    strides and addresses (see `launch.Quantiser`).
    """
    try:
        key = (q.shape, k.shape, v.shape, q.dtype, q.device, type(q), type(k), type(v), options)
        return key, _calls.get(key)
    except (AttributeError, RuntimeError, TypeError):
        return (), None  # not a dense tensor, or unhashable: the checks name the argument


def _ready_quantized_call(qkv: QuantizedQKV, options: Key) -> tuple[Key, _Call | None]:
    """Likewise for prepared operands. The key holds all that is checked of their parts."""
    try:
        parts = (qkv.q, qkv.k, qkv.vt, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.q_dot_mean)
        signatures = [  # what validation reads of a part
            None if x is None else (type(x), x.shape, x.dtype, x.device, x.stride(-1)) for x in parts
        ]
        key = (*signatures, qkv.seqlen_k, qkv.recipe, qkv.dtype, options)
        return key, _calls.get(key)
    except (AttributeError, LookupError, RuntimeError, TypeError):
        return (), None


def _ready_untouched_call(stored: Stored, dtype: torch.dtype, options: Key, given: _Given) -> _Call | None:
    """The call for operands as the quantiser left them; None where no kernel runs as they are.

    What is known of the quantiser's shapes, recipe and device holds for all its workspaces, so its identity is the key.
    """
    try:
        key = (stored.quantiser, dtype, options)
        call = _calls.get(key)
    except TypeError:
        return None  # unhashable: the checks name the argument
    if call is not None:
        return call
    causal, _, softmax_scale, _, backend, out_dtype, _ = options
    copy = stored.quantiser.operands(stored.memory, dtype)  # planning asks for its tensors
    plan = _plan_quantized(copy, causal, backend, out_dtype, given)  # type: ignore[arg-type]
    scale = validate.check_softmax_scale(softmax_scale, plan.problem.head_dim)
    if not _launches(plan) or scale <= 0:
        return None
    forward = _prepare_forward(copy, plan, scale)
    return _calls.keep(
        key,
        lambda stored, return_lse: forward.in_workspace(
            stored.quantiser, stored.memory.data_ptr(), return_lse
        ),
    )


def _plan_inputs(
    q: object,
    k: object,
    v: object,
    recipe: str | Fp8Recipe,
    causal: bool,
    backend: str,
    out_dtype: torch.dtype | None,
    rotary: str,
    given: _Given,
) -> Plan:
    """Check all about 16-bit inputs that a plan depends on, and plan."""
    validate.check_inputs(q, k, v)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    problem = Problem.from_tensors(
        q,
        k,
        v,
        resolve_recipe(recipe),
        causal=validate.check_causal(causal),
        out_dtype=validate.check_out_dtype(out_dtype, q.dtype),
        rotary=rotary,
        features=_check_features(q, given),
    )
    validate.check_backend(backend, problem.capability)
    return make_plan(problem, backend)


_Given = tuple[object, object, Tensor | None, Tensor | None]  # window_size, softcap, alibi_slopes, sinks
_NO_WINDOW: Final = (-1, -1)  # the compiler makes it one object with the functions' defaults
_NO_SOFTCAP: Final = 0.0
_NOTHING: Final[_Given] = (_NO_WINDOW, _NO_SOFTCAP, None, None)
_PLAIN_TYPES: Final = (int, int, float)


def _signature(given: _Given) -> object:
    """What checks and planning read of these arguments, unhashable where it is none that is allowed; None of none."""
    window_size: Any
    window_size, softcap, slopes, sinks = given
    plain = slopes is None and sinks is None
    if plain and window_size is _NO_WINDOW and softcap is _NO_SOFTCAP:
        return None  # the defaults
    try:
        left, right = window_size
        types = (type(left), type(right), type(softcap))
        if plain and types == _PLAIN_TYPES and left == right == -1 and not softcap:
            return None
        signatures = [None if x is None else (type(x), x.shape, x.dtype, x.device) for x in (slopes, sinks)]
    except (AttributeError, TypeError, ValueError):
        return []
    return (window_size, softcap, *types, *signatures)


def _check_features(q: Tensor, given: _Given) -> Features:
    window_size, softcap, alibi_slopes, sinks = given
    window, cap = validate.check_window_size(window_size), validate.check_softcap(softcap)
    validate.check_side_tensors(q.shape[0], q.shape[2], q.device, alibi_slopes, sinks)
    return Features(window, cap, alibi_slopes is not None, sinks is not None)


def _side_tensors(
    q: Tensor, alibi_slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Checked slopes as (batch, heads_q), and the sinks; in every call, as it is no matter of shapes: no gradients.

    `fp8_attention` has taken another way for sinks that require grad.
    """
    if alibi_slopes is None and sinks is None:
        return None, None
    validate.check_no_gradient(alibi_slopes=alibi_slopes)
    validate.check_forward_only("prepared 8-bit", sinks=sinks)
    return None if alibi_slopes is None else alibi_slopes.expand(q.shape[0], q.shape[2]), sinks


_RotaryArguments = tuple[Tensor | None, Tensor | None, bool]  # rotary_cos, rotary_sin, rotary_interleaved


def _rotary_kind(rotary_cos: object, rotary_sin: object, rotary_interleaved: object) -> str:
    """`Problem.rotary` for arguments that are not checked yet."""
    if rotary_cos is None and rotary_sin is None and rotary_interleaved is False:
        return "none"
    return "interleaved" if rotary_interleaved else "half"


def _check_tables(q: Tensor, k: Tensor, rotary: _RotaryArguments) -> Rotary | None:
    """The tables of an embedding, checked; in every call, as no key holds them."""
    tables = check_rotary(q, k, *rotary)
    validate.check_no_gradient(rotary_cos=rotary[0], rotary_sin=rotary[1])
    return tables


def _reference(q: Tensor, k: Tensor, v: Tensor, recipe: Fp8Recipe, rotary: _RotaryArguments) -> QuantizedQKV:
    cos, sin, interleaved = rotary
    return quantize_reference(q, k, v, recipe, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)


def _plan_quantized(
    qkv: QuantizedQKV, causal: bool, backend: str, out_dtype: torch.dtype | None, given: _Given
) -> Plan:
    """Likewise for prepared operands."""
    validate.check_quantized(qkv)
    problem = Problem.from_quantized(
        qkv,
        causal=validate.check_causal(causal),
        out_dtype=validate.check_out_dtype(out_dtype, qkv.dtype),
        features=_check_features(qkv.q, given),
    )
    validate.check_backend(backend, problem.capability)
    return make_plan(problem, backend)


# ------------------------------------------------------------------------------------------------------------
# From a plan to a result
# ------------------------------------------------------------------------------------------------------------


def _launches(plan: Plan) -> bool:
    """Whether kernels run; else the emulator does, or the result is known."""
    return plan.backend == "sm90" and not plan.problem.is_empty


def _prepare_attention(
    q: Tensor, k: Tensor, plan: Plan, softmax_scale: float | None
) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """The call of the kernels for 16-bit tensors of these shapes; the plan is one with launches."""
    assert plan.quantize_config is not None, "a plan for 16-bit inputs names a quantiser"
    scale = validate.check_softmax_scale(softmax_scale, plan.problem.head_dim)
    from cute_attn.launch import Attention

    features = plan.problem.cutting_features
    return Attention(
        q.shape, k.shape, plan.recipe, plan.quantize_config, plan.config, scale, q.device, features
    )


def _prepare_quantize(
    q: Tensor, k: Tensor, plan: Plan
) -> Callable[[Tensor, Tensor, Tensor, Rotary | None], QuantizedQKV]:
    assert plan.quantize_config is not None, "a plan for 16-bit inputs names a quantiser"
    from cute_attn.launch import Quantiser

    quantiser = Quantiser(q.shape, k.shape, plan.recipe, plan.quantize_config, q.device)
    return lambda q, k, v, rotary: quantiser.operands(quantiser(q, k, v, None, rotary), q.dtype)


def _prepare_forward(qkv: QuantizedQKV, plan: Plan, softmax_scale: float | None) -> Forward:
    """Likewise for operands with parts of these shapes."""
    scale = validate.check_softmax_scale(softmax_scale, plan.problem.head_dim)
    from cute_attn.launch import Forward

    shape, features = (*qkv.q.shape[:3], qkv.vt.shape[2]), plan.problem.cutting_features
    return Forward(shape, qkv.k.shape, plan.config, scale, qkv.q.device, features)


def _transpose_v(q: Tensor, v: Tensor, backend: str) -> Tensor | None:
    """V^T by the device kernel, for a checked `backend`; None where `from_fp8` is to make it in torch."""
    capability = device_capability(v.device)
    if backend == "emulator" or capability is None or capability[0] != 9 or not (q.numel() and v.numel()):
        return None
    from cute_attn.launch import launch_transpose_v

    return launch_transpose_v(v, transpose_config(v.shape[3]))


def _attend(
    prepare: Callable[[], QuantizedQKV],
    plan: Plan,
    device: torch.device,
    softmax_scale: float | None,
    side: tuple[Tensor | None, Tensor | None],
    return_lse: bool,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a plan without launches. `prepare` makes the operands; it is not called where the result is known."""
    problem, config = plan.problem, plan.config
    scale = validate.check_softmax_scale(softmax_scale, problem.head_dim)
    if problem.is_empty:
        out, lse = _empty_result(problem, device, side[1])
    else:
        if backend == "auto":
            _warn_emulator(plan.reasons[0])
        from cute_attn.emulator import emulate_forward

        out, lse = emulate_forward(
            prepare(),
            softmax_scale=scale,
            window=problem.ends,
            softcap=problem.features.softcap,
            alibi_slopes=side[0],
            sinks=side[1],
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            pack_gqa=config.pack_gqa,
            check_keys=config.check_keys,
            out_dtype=problem.out_dtype,
        )
    return (out, lse) if return_lse else out


def _empty_result(problem: Problem, device: torch.device, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeros, and lse -inf or the sinks: what rows without keys give, however many rows there are."""
    rows, heads = problem.seqlen_q, problem.heads_q
    shape = (problem.batch, rows, heads, problem.head_dim_v)
    out = torch.zeros(shape, dtype=problem.out_dtype, device=device)
    lse = torch.full((problem.batch, heads, rows), -math.inf, dtype=torch.float32, device=device)
    return out, lse if sinks is None else lse.copy_(sinks[:, None])


def _warn_emulator(reason: str) -> None:
    """Say once that "auto" did not mean a GPU kernel, and why."""
    warn_once(
        "emulator",
        f"cute_attn runs the emulator of its Hopper kernel, because {reason}. The emulator "
        "reproduces the kernel's rounding, not its speed. To silence this warning pass backend='emulator'.",
    )
