"""16-bit attention as operators that autograd and torch.compile know.

`flash_attn_func` comes here where a gradient is wanted or torch.compile traces it; other calls take the shorter way.
`flash_varlen_autograd` has the operators of sequences of unlike length.
The operators are `cute_attn::flash_attn_forward`, whose gradient is `cute_attn::flash_attn_backward`; neither has a
second derivative. Where nothing asks for operators (see `runs_directly`), `_Attend` does the same without them: torch's
layers about a Python operator cost more host time than all else of a call. Between forward and backward live q, k, v,
out and lse: memory is linear in the lengths.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import flash, validate
from cute_attn.backward_tiles import backward16_sm80_config
from cute_attn.flash_backward import reference_backward
from cute_attn.kernels.config import Bwd16Config, Bwd16Sm80Config, Fwd16Config, Fwd16Sm80Config
from cute_attn.plan16 import backward16_config

__all__ = [
    "attend",
    "backward",
    "backward_config",
    "gradient_runs_directly",
    "gradients",
    "loaded",
    "operator_options",
    "runs_directly",
    "sinks_gradient",
]

_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter, type(None)))
_OPTIONS: Final = (
    "Tensor? alibi_slopes, Tensor? sinks, float? softmax_scale, bool causal, int left, int right, float softcap, "
    "bool deterministic, str backend"
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: dict[str, Tensor | None],
    options: tuple[Any, ...],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash.flash_attn_func`, of which autograd knows the gradient.

    Args:
        q, k, v, backend: as there.
        side: alibi_slopes and sinks.
        options: see `flash.flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: as there.
    """
    slopes, sinks = side["alibi_slopes"], side["sinks"]
    plan = None
    if not torch.compiler.is_compiling():
        plan = flash._find_plan(q, k, v, side, options, backend)  # which checks all arguments
    validate.check_no_gradient(alibi_slopes=slopes)
    if plan is not None and runs_directly(q, k, v, slopes, sinks):
        return _Attend.apply(q, k, v, slopes, sinks, plan, options, backend)
    return torch.ops.cute_attn.flash_attn_forward(q, k, v, slopes, sinks, *operator_options(options), backend)


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether nothing has to see an operator: no tracing, no dispatch mode (fake tensors, selective checkpoints, counts
    of operations), no transform of torch.func, no subclass of tensors."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and _PLAIN.issuperset(map(type, tensors))
    )


def gradient_runs_directly(dout: Tensor, dlse: Tensor | None, out: Tensor, *saved: Tensor | None) -> bool:
    """Likewise in a backward. With grad mode on it does not: the operator says that it has no derivative.

    Args:
        dout, dlse: gradients; those that are not of the kind of `out` (batched by `is_grads_batched`, or zeros without
            memory) are for the operator.
        out: of the forward.
        saved: all else that is read.
    """
    if torch.is_grad_enabled() or not runs_directly(dout, dlse, out, *saved):
        return False
    kind = torch._C._dispatch_keys(out).raw_repr()
    return torch._C._dispatch_keys(dout).raw_repr() == kind and (
        dlse is None or torch._C._dispatch_keys(dlse).raw_repr() == kind
    )


def operator_options(options: tuple[Any, ...]) -> tuple[float | None, bool, int, int, float, bool]:
    """The options of `flash.flash_attn_func`, checked, as operators take them: see `_OPTIONS`."""
    dropout_p, scale, causal, _, deterministic, _, window_size = options
    (left, right), softcap = flash._check_options(dropout_p, *options[2:])
    if scale is not None:
        scale = validate.check_number("softmax_scale", scale, "a float or None")
    right = window_size[1] if causal else right  # `causal` says the rest
    return scale, causal, left, right, softcap, deterministic


def _planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    backend: str,
) -> flash._Plan:
    options = (0.0, scale, causal, softcap, deterministic, False, (left, right))
    return flash._find_plan(q, k, v, {"alibi_slopes": slopes, "sinks": sinks}, options, backend)


@torch.library.custom_op(
    "cute_attn::flash_attn_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    plan = _planned(q, k, v, slopes, sinks, *options)
    return flash._attend(q, k, v, plan, slopes, sinks)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    flash._check_tensors(q, k, v)  # so that tracing names a wrong argument
    validate.check_side_tensors(q.shape[0], q.shape[2], q.device, slopes, sinks)
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads_q, v.shape[3]))
    return out, q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    plan: flash._Plan,
    slopes: Tensor | None,
    sinks: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and sinks (None without), of the dtypes of these.

    Args:
        q, k, v, slopes, sinks: of the forward, `plan` its plan, out and lse its results.
        dout, dlse: gradients of out and lse, any strides; dlse None: zero.
        deterministic: whether the sums of dq have an order; that of `plan`.
    """
    slopes = None if slopes is None else slopes.expand(q.shape[0], q.shape[2])
    if plan.config is None:
        dq, dk, dv, dsinks = reference_backward(
            q,
            k,
            v,
            out,
            lse,
            dout,
            dlse,
            softmax_scale=plan.softmax_scale,
            window=plan.window,
            softcap=plan.softcap,
            alibi_slopes=slopes,
            sinks=sinks,
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks
    launch = plan.backward
    if launch is None:
        from cute_attn.launch_backward import Backward16

        launch = plan.backward = Backward16(
            q.shape,
            v.shape,
            backward_config(plan.config, deterministic, seqlen_q=q.shape[1]),
            q.device,
            batch=q.shape[0],
            softmax_scale=plan.softmax_scale,
            softcap=plan.softcap,
            window=plan.window,
        )
    q, k, v, out, dout = loaded(q, k, v, out, dout, plan)
    dq, dk, dv, _, d = launch(q, k, v, out, lse, dout, dlse=dlse, alibi_slopes=slopes)
    return dq, dk, dv, None if sinks is None else sinks_gradient(sinks, lse, d[:, :, : q.shape[1]])


def loaded(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, plan: flash._Plan
) -> tuple[Tensor, ...]:
    """All but the plan, copied where the kernel cannot read them."""
    strides = out.stride()
    address = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()
    if all(plan.loadable) and dout.stride() == strides and address % 16 == 0 and flash._loadable(out):
        return q, k, v, out, dout
    fits = (*plan.loadable, flash._loadable(out), dout.stride(-1) == 1 and flash._loadable(dout))
    return tuple(flash._loaded(x, fit) for x, fit in zip((q, k, v, out, dout), fits, strict=True))


def backward_config(
    forward: Fwd16Config | Fwd16Sm80Config, deterministic: bool = False, seqlen_q: int = 1 << 20
) -> Bwd16Config | Bwd16Sm80Config:
    """The backward of what `forward` computes, by the instructions that it has. seqlen_q: see `backward16_config`."""
    dims = (forward.head_dim, forward.head_dim_v, forward.dtype)
    features = {name: getattr(forward, name) for name in ("causal", "window", "softcap", "alibi", "varlen")}
    if isinstance(forward, Fwd16Sm80Config):
        return backward16_sm80_config(*dims, arch=forward.arch, deterministic=deterministic, **features)
    return backward16_config(*dims, deterministic=deterministic, seqlen_q=seqlen_q, **features)


def sinks_gradient(sinks: Tensor, lse: Tensor, d: Tensor) -> Tensor:
    """-sum over batch and rows of exp(sink - lse) d, (heads_q,): see `reference_backward`.

    Args:
        sinks: (heads_q,).
        lse, d: (batch, heads_q, seqlen_q); d is rowsum(dout * out) - dlse.
    """
    share = torch.exp(sinks.view(1, -1, 1) - lse).masked_fill(lse == -torch.inf, 0.0)
    return -(share * d).sum((0, 2))


@torch.library.custom_op(
    "cute_attn::flash_attn_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _planned(q, k, v, slopes, sinks, *options)
    deterministic = options[5]
    dq, dk, dv, dsinks = backward(q, k, v, out, lse, dout, dlse, plan, slopes, sinks, deterministic)
    return dq, dk, dv, lse.new_empty((0,)) if dsinks is None else dsinks


@_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty((0,) if sinks is None else sinks.shape)


def gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
    plan: flash._Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) by `flash_attn_backward`, or without the operator where it runs directly.

    Args: those of the operator; dout None: zero; plan: that of the forward, None: not at hand.
    """
    dout = torch.zeros_like(out) if dout is None else dout
    given = (q, k, v, out, lse, dout, dlse)
    if not gradient_runs_directly(dout, dlse, out, q, k, v, lse, slopes, sinks):
        return torch.ops.cute_attn.flash_attn_backward(dout, dlse, q, k, v, out, lse, slopes, sinks, *options)
    plan = _planned(q, k, v, slopes, sinks, *options) if plan is None else plan
    return backward(*given, plan, slopes, sinks, options[5])


def _save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], plan: flash._Plan | None = None
) -> None:
    ctx.options, ctx.plan = inputs[5:], plan
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.set_materialize_grads(False)  # lse is seldom differentiated


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slopes, sinks, out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v, _, needs_sinks, *others = ctx.needs_input_grad
    none = (None,) * len(others)
    if dout is None and dlse is None:
        return (None,) * 5 + none
    given = (dout, dlse, q, k, v, out, lse, slopes, sinks)
    dq, dk, dv, dsinks = gradients(*given, *ctx.options, plan=ctx.plan)
    return (
        dq if needs_q else None,
        dk if needs_k else None,
        dv if needs_v else None,
        None,
        dsinks if needs_sinks else None,
        *none,
    )


_forward.register_autograd(_differentiate, setup_context=_save)


class _Attend(torch.autograd.Function):
    """The operator with its gradient, where it runs directly."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        plan: flash._Plan,
        options: tuple[Any, ...],
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        output = flash._attend(q, k, v, plan, slopes, sinks)
        _save(ctx, (q, k, v, slopes, sinks, *operator_options(options), backend), output, plan)
        return output

    backward = staticmethod(_differentiate)
