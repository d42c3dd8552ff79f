"""8-bit attention as an operator that autograd and torch.compile know: an 8-bit forward, a 16-bit backward.

`fp8_attention` comes here where a gradient is wanted or torch.compile traces it; other calls take the shorter way. The
operator is `cute_attn::fp8_attention_forward`. Its gradient is `cute_attn::flash_attn_backward` on the 16-bit q, k
and v, with the out and lse of the 8-bit forward: rounding to 8 bits counts as the identity (a straight-through
estimator, arXiv 1308.3432). Between the two live q, k, v, out and lse: memory is linear in the lengths.

With 16-bit scores s, the backward's P is exp(s - lse). lse is that of the 8-bit scores, so a row of P sums to
exp(lse of s - lse), which is not exactly 1, and D = rowsum(dout * out) is not exactly the mean of dP under P: where the
gradients of a row's scores should add up to 0, they add up to the error of the two. Both errors are of the forward's
own size; docs/backward.md says where they show most.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import flash_autograd, validate
from cute_attn.problem import device_capability
from cute_attn.quantize import Fp8Recipe, Rotary, check_rotary, resolve_recipe

__all__ = ["attend"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    recipe: str | Fp8Recipe,
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rotary: tuple[Tensor | None, Tensor | None, bool],
    backend: str,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `api.fp8_attention`, of which autograd knows the gradient.

    Args, Raises: as there; `rotary` is (rotary_cos, rotary_sin, rotary_interleaved).
    """
    r = resolve_recipe(recipe)
    left, right = validate.check_window_size(window_size)
    if softmax_scale is not None:
        softmax_scale = validate.check_number("softmax_scale", softmax_scale, "a float or None")
    if rotary != (None, None, False):
        validate.check_inputs(q, k, v)
        check_rotary(q, k, *rotary)
    validate.check_no_gradient(alibi_slopes=alibi_slopes, rotary_cos=rotary[0], rotary_sin=rotary[1])
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if wanted and out_dtype not in (None, q.dtype):
        raise NotImplementedError(
            f"out_dtype is {out_dtype}, and a gradient is wanted; allowed: that of q, {q.dtype}, or None"
        )
    cos, sin, interleaved = rotary
    given = (
        q,
        k,
        v,
        alibi_slopes,
        sinks,
        cos,
        sin,
        interleaved,
        out_dtype,
        softmax_scale,
        validate.check_causal(causal),
        left,
        right,
        validate.check_softcap(softcap),
        torch.are_deterministic_algorithms_enabled(),
        backend,
        *(r.name, r.qk_dtype, r.q_scale, r.k_scale, r.k_block),
        *(r.v_scale, r.rotation, r.rotation_seed, r.smooth_k, r.p_rounding),
    )
    if flash_autograd.runs_directly(q, k, v, alibi_slopes, sinks, cos, sin):
        return _Attend.apply(*given)
    return torch.ops.cute_attn.fp8_attention_forward(*given)


# Fields of `Fp8Recipe`, in their order.
_RECIPE: Final = (
    "str name, str qk_dtype, str q_scale, str k_scale, int k_block, str v_scale, str rotation, int rotation_seed, "
    "bool smooth_k, str p_rounding"
)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    out_dtype: torch.dtype | None,
    scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    backend: str,
    *recipe: Any,
) -> tuple[Tensor, Tensor]:
    from cute_attn.api import fp8_attention

    with torch.no_grad():  # the operator has the gradient
        return fp8_attention(
            q,
            k,
            v,
            recipe=Fp8Recipe(*recipe),
            causal=causal,
            softmax_scale=scale,
            window_size=(left, right),
            softcap=softcap,
            alibi_slopes=slopes,
            sinks=sinks,
            rotary_cos=cos,
            rotary_sin=sin,
            rotary_interleaved=interleaved,
            return_lse=True,
            backend=backend,
            out_dtype=out_dtype,
        )


_forward = torch.library.custom_op(
    "cute_attn::fp8_attention_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? sinks, Tensor? rotary_cos, "
    "Tensor? rotary_sin, bool rotary_interleaved, ScalarType? out_dtype, float? softmax_scale, bool causal, "
    f"int left, int right, float softcap, bool deterministic, str backend, {_RECIPE}) -> (Tensor, Tensor)",
)(_run)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    validate.check_inputs(q, k, v)  # so that tracing names a wrong argument
    validate.check_side_tensors(q.shape[0], q.shape[2], q.device, slopes, sinks)
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads_q, v.shape[3]), dtype=options[3] or q.dtype)
    return out, q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.interleaved, ctx.options, ctx.inputs = inputs[7], inputs[9:16], len(inputs)
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.set_materialize_grads(False)  # lse is seldom differentiated


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slopes, sinks, cos, sin, out, lse = ctx.saved_tensors
    none = (None,) * (ctx.inputs - 5)
    if dout is None and dlse is None:
        return (None,) * 5 + none
    *options, backend = ctx.options
    capability = device_capability(q.device)
    hopper = backend != "emulator" and capability is not None and capability[0] == 9
    first = k.shape[1] - q.shape[1]  # position of the first query
    if cos is not None:
        rotary = Rotary(cos, sin, ctx.interleaved)
        q, k = rotary.embed(q, first).to(q.dtype), rotary.embed(k).to(k.dtype)
    dq, dk, dv, dsinks = flash_autograd.gradients(
        dout, dlse, q, k, v, out, lse, slopes, sinks, *options, "sm90" if hopper else "reference"
    )
    if cos is not None:  # a rotation's transpose is the rotation back
        back = Rotary(cos, -sin, ctx.interleaved)
        dq, dk = back.embed(dq, first).to(dq.dtype), back.embed(dk).to(dk.dtype)
    gradients = (dq, dk, dv, None, dsinks)
    return (
        tuple(x if needs else None for x, needs in zip(gradients, ctx.needs_input_grad, strict=False)) + none
    )


_forward.register_autograd(_differentiate, setup_context=_save)


class _Attend(torch.autograd.Function):
    """The operator with its gradient, where it runs directly (see `flash_autograd.runs_directly`)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        output = _run(*given)
        _save(ctx, given, output)
        return output

    backward = staticmethod(_differentiate)
