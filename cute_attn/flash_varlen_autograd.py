"""16-bit attention over sequences of unlike length as operators that autograd and torch.compile know.

`flash_attn_varlen_func`, and `flash_attn_func` with `seqused_k`, come here as `flash_attn_func` comes to
`flash_autograd`, which has the rest. The operators are `cute_attn::flash_attn_varlen_forward`, whose gradient is
`cute_attn::flash_attn_varlen_backward`; neither has a second derivative.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import flash, flash_varlen, validate
from cute_attn.flash_autograd import (
    backward_config,
    gradient_runs_directly,
    loaded,
    operator_options,
    runs_directly,
    sinks_gradient,
)
from cute_attn.flash_backward import reference_backward, reference_varlen_backward

__all__ = ["attend"]

_INPUTS: Final = 8  # tensors of the forward, some of which may be None
_OPTIONS: Final = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, Tensor? alibi_slopes, Tensor? sinks, "
    "float? softmax_scale, bool causal, int left, int right, float softcap, bool deterministic, str backend"
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: dict[str, Tensor | None],
    side: dict[str, Tensor | None],
    options: tuple[Any, ...],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_varlen.flash_attn_varlen_func`, of which autograd knows the gradient.

    Args:
        q, k, v, backend: as there.
        lengths: cu_seqlens_q, cu_seqlens_k and seqused_k, in this order.
        side: alibi_slopes and sinks.
        options: see `flash.flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: as there.
    """
    plan = None
    if not torch.compiler.is_compiling():
        plan = flash_varlen._find_plan(q, k, v, lengths, side, options, backend)  # which checks all arguments
    slopes, sinks = side["alibi_slopes"], side["sinks"]
    validate.check_no_gradient(alibi_slopes=slopes)
    given = (q, k, v, *lengths.values(), slopes, sinks)
    if plan is not None and runs_directly(*given):
        return _Attend.apply(*given, plan, options, backend)
    return torch.ops.cute_attn.flash_attn_varlen_forward(*given, *operator_options(options), backend)


def _planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: dict[str, Tensor | None],
    side: dict[str, Tensor | None],
    scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    backend: str,
) -> flash._Plan:
    options = (0.0, scale, causal, softcap, deterministic, False, (left, right))
    return flash_varlen._find_plan(q, k, v, lengths, side, options, backend)


def _named(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The lengths and the side tensors of an operator, as `flash_varlen` takes them."""
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    return lengths, {"alibi_slopes": slopes, "sinks": sinks}


@torch.library.custom_op(
    "cute_attn::flash_attn_varlen_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    lengths, side = _named(*more[:5])
    plan = _planned(q, k, v, lengths, side, *more[5:])
    return flash_varlen._attend(q, k, v, plan, **lengths, **side)  # type: ignore[arg-type]  # see `flash_varlen._run`


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    lengths, side = _named(*more[:5])
    batch = flash_varlen._check_shapes(q, k, v, lengths)  # so that tracing names a wrong argument
    total_q, heads_q, _ = q.shape
    validate.check_side_tensors(batch, heads_q, q.device, **side)
    out = q.new_empty((total_q, heads_q, v.shape[2]))
    return out, q.new_empty((heads_q, total_q), dtype=torch.float32)


@torch.library.custom_op(
    "cute_attn::flash_attn_varlen_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths, side = _named(*more[:5])
    plan = _planned(q, k, v, lengths, side, *more[5:])
    given = (q, k, v, out, lse, dout, dlse)
    dq, dk, dv, dsinks = _gradients(*given, plan, lengths, side, deterministic=more[10])
    return dq, dk, dv, lse.new_empty((0,)) if dsinks is None else dsinks


@_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = more[4]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty((0,) if sinks is None else sinks.shape)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    plan: flash._Plan,
    lengths: dict[str, Tensor | None],
    side: dict[str, Tensor | None],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and sinks (None without), of the dtypes of these.

    Args:
        q, k, v, lengths, side: of the forward, `plan` its plan, out and lse its results.
        dout, dlse: gradients of out and lse, any strides; dlse may be None.
        deterministic: whether the sums of dq have an order.
    """
    cu_q, cu_k, used = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], lengths["seqused_k"]
    assert cu_q is not None and cu_k is not None
    slopes, sinks = side["alibi_slopes"], side["sinks"]
    batch, heads_q = cu_q.shape[0] - 1, q.shape[1]
    slopes = None if slopes is None else slopes.expand(batch, heads_q)
    options: dict[str, Any] = {
        "softmax_scale": plan.softmax_scale,
        "softcap": plan.softcap,
        "window": plan.window,
        "alibi_slopes": slopes,
    }
    if 0 in (batch, q.shape[0], k.shape[0]):  # as in the forward, whatever the lengths: no row sees a key
        one = (q[None], k[None, :0], v[None, :0], out[None], lse[None], dout[None])
        options = {"softmax_scale": plan.softmax_scale, "sinks": sinks}
        dq, _, _, dsinks = reference_backward(*one, None if dlse is None else dlse[None], **options)
        return dq[0].to(q.dtype), torch.zeros_like(k), torch.zeros_like(v), dsinks
    if plan.config is None:
        given = (q, k, v, out, lse, dout, dlse, cu_q, cu_k)
        dq, dk, dv, dsinks = reference_varlen_backward(*given, seqused_k=used, sinks=sinks, **options)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks
    from cute_attn.launch import LOG2_E
    from cute_attn.launch_backward import Backward16

    launch = plan.backward
    if launch is None:
        launch = plan.backward = Backward16(
            q.shape,
            v.shape,
            backward_config(plan.config, deterministic),
            q.device,
            batch=batch,
            softmax_scale=plan.softmax_scale,
            softcap=plan.softcap,
            window=plan.window,
        )
    q, k, v, out, dout = loaded(q, k, v, out, dout, plan)
    dq, dk, dv, lse2, d = launch(q, k, v, out, lse, dout, (cu_q, cu_k, used), dlse=dlse, alibi_slopes=slopes)
    if sinks is None:
        return dq, dk, dv, None
    return dq, dk, dv, sinks_gradient(sinks, lse2[None] / LOG2_E, d[None])


def _save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], plan: flash._Plan | None = None
) -> None:
    ctx.options, ctx.plan = inputs[_INPUTS:], plan
    ctx.save_for_backward(*inputs[:_INPUTS], *output)
    ctx.set_materialize_grads(False)  # lse is seldom differentiated


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *more, out, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    none = (None,) * (len(needed) - _INPUTS)
    if dout is None and dlse is None:
        return (None,) * _INPUTS + none
    dout = torch.zeros_like(out) if dout is None else dout
    given = (q, k, v, out, lse, dout, dlse)
    if ctx.plan is None or not gradient_runs_directly(dout, dlse, out, q, k, v, lse, *more):
        dq, dk, dv, dsinks = torch.ops.cute_attn.flash_attn_varlen_backward(
            dout, dlse, q, k, v, out, lse, *more, *ctx.options
        )
    else:
        dq, dk, dv, dsinks = _gradients(*given, ctx.plan, *_named(*more), deterministic=ctx.options[5])
    gradients = (dq, dk, dv, None, None, None, None, dsinks)
    return tuple(x if needs else None for x, needs in zip(gradients, needed, strict=False)) + none


_forward.register_autograd(_differentiate, setup_context=_save)


class _Attend(torch.autograd.Function):
    """The operator with its gradient, where it runs directly."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, plan, options, backend = given
        q, k, v, *more = tensors
        lengths, side = _named(*more)
        output = flash_varlen._attend(q, k, v, plan, **lengths, **side)  # type: ignore[arg-type]  # see `flash_varlen._run`
        _save(ctx, (*tensors, *operator_options(options), backend), output, plan)
        return output

    backward = staticmethod(_differentiate)
