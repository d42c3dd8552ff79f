"""16-bit attention with flash-attn's functions: FlashAttention-3's forward (arXiv 2407.08608, sections 3.1 and 3.2).

The path of a call is check -> plan (`plan.forward16_config`) -> launch. There is no emulator of the 16-bit kernel:
away from a Hopper GPU a call is an error unless `backend="reference"` asks for the definition in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import validate
from cute_attn.kernels.config import HEAD_DIMS_16BIT, Fwd16Config
from cute_attn.plan import DTYPE_NAMES, forward16_config
from cute_attn.problem import device_capability

__all__ = [
    "flash_attn_func",
    "flash_attn_kernel",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "reference",
]

BACKENDS: Final = ("auto", "sm90", "reference")
_FLOAT32: Final = torch.finfo(torch.float32)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T + bias + mask) v, exactly, by flash-attn's signature and conventions.

    FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2; backward: appendix B.1). Where q, k, v or sinks require
    grad, out and lse are differentiable, once. torch.compile traces it as one operator.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float16 or bfloat16, last stride 1; head_dim a multiple of 8 from 32 to
            256. Other strides are free; a tensor whose address or strides are no multiples of 16 bytes, or that is
            expanded, is copied first.
        k: (batch, seqlen_k, heads_k, head_dim), dtype and device of q. heads_q is a multiple of heads_k: query head h
            uses key head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v), likewise; head_dim_v as head_dim, and may differ from it.
        dropout_p: 0.0; dropout is not there.
        softmax_scale: factor of q k^T, finite, of any sign; default 1/sqrt(head_dim). One <= 0 costs a pass over q.
        causal: hide key j from query i unless j <= i + seqlen_k - seqlen_q (bottom-right alignment).
        window_size: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q +
            right; -1 for no end. With `causal`, right is 0.
        softcap: where > 0, scores become softcap * tanh(score / softcap), before bias and mask.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32: adds -slope * |i + seqlen_k - seqlen_q - j| to a score.
        deterministic: key tiles add to the gradient of q in their order, so that it is the same, bit for bit, in every
            run, and wait for one another; all else always is.
        return_attn_probs: False; probabilities are never in memory.
        return_lse: also return the log-sum-exp of each row's scores.
        sinks: (heads_q,) float32: one more logit in the softmax of every row of a head, which has no value.
        backend: "auto" or "sm90" (the Hopper kernel), or "reference" (torch in float32, any device, with the scores in
            memory).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) of q's dtype; with `return_lse` also lse (batch, heads_q, seqlen_q)
        float32, natural log. A row that sees no key has out 0 and lse -inf, or its sink.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or no Hopper GPU.
        NotImplementedError: dropout, return_attn_probs, or grad mode is on and alibi_slopes require grad.
    """
    side = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    options = (dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs, window_size)
    if torch.compiler.is_compiling() or _wants_gradient(q, k, v, *side.values()):
        from cute_attn.flash_autograd import attend

        out, lse = attend(q, k, v, side, options, backend)
    else:
        plan = _find_plan(q, k, v, side, options, backend)
        out, lse = _attend(q, k, v, plan, alibi_slopes, sinks)
    return (out, lse) if return_lse else out


def _wants_gradient(*tensors: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def _find_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: dict[str, Tensor | None],
    options: tuple[Any, ...],
    backend: str,
) -> _Plan:
    """`_plan`, once for a signature. options are in the order of `flash_attn_func`, with window_size last."""
    try:
        tensors = [None if x is None else _signature(x) for x in (q, k, v, *side.values())]
        kinds = map(type, (*options, *options[-1]))  # True equals 1 and is not allowed for it
        key: tuple[object, ...] = (*tensors, *options, *kinds, backend)
        plan = _plans.get(key)
    except (AttributeError, RuntimeError, TypeError):
        key, plan = (), None  # not a dense tensor, or unhashable: the checks below name the argument
    if plan is None:
        plan = _plan(q, k, v, side, options, backend)
        if key:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def flash_attn_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> str:
    """Name of the kernel that `flash_attn_func` runs with these arguments, without running it.

    Args: as those of `flash_attn_func`, with the same shapes. The name holds what the kernel is compiled for: operands,
    head_dim, mask, features, tile, options of the main loop; "reference" where no kernel runs.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.
    """
    side = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    plan = _plan(q, k, v, side, (0.0, None, causal, softcap, False, False, window_size), backend)
    return "reference" if plan.config is None else plan.config.name


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` with k and v in one tensor, which is not copied (arXiv 2407.08608).

    Args:
        q: as there.
        kv: (batch, seqlen_k, 2, heads_k, head_dim): k, then v.
        more: its keyword-only arguments. All others as there.

    Returns, Raises: as there.
    """
    k, v = _parts("kv", kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **more,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` with q, k and v in one tensor, which is not copied (arXiv 2407.08608).

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim): q, k, then v.
        more: its keyword-only arguments. All others as there.

    Returns, Raises: as there.
    """
    q, k, v = _parts("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **more,
    )


def _parts(name: str, x: object, count: int) -> tuple[Tensor, ...]:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
    if x.dim() != 5 or x.shape[2] != count:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; allowed: (batch, seqlen, {count}, heads, head_dim)"
        )
    return x.unbind(2)


# ------------------------------------------------------------------------------------------------------------
# From arguments to a plan: once for a signature
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What a call with these shapes, strides and options does."""

    config: Fwd16Config | None  # None: the reference
    softmax_scale: float
    softcap: float
    window: tuple[int, int]  # -1 without an end
    loadable: tuple[bool, bool, bool]  # whether TMA can read tensors of the strides of q, k, v


_plans: dict[tuple[object, ...], _Plan] = {}
_MAX_PLANS: Final = 4096  # a server that sees ever new lengths must not grow without bound


def _signature(x: Tensor) -> tuple[object, ...]:
    """All that checks and planning read of a tensor. Raises one of several errors for anything but a dense tensor."""
    return type(x), x.shape, x.stride(), x.dtype, x.device


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: dict[str, Tensor | None],
    options: tuple[object, ...],
    backend: str,
) -> _Plan:
    """Check everything, and plan."""
    scale, window, softcap = _check_options(*options)
    _check_tensors(q, k, v)
    _check_side(q, side)
    _check_backend(backend, q)
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    loadable = (_loadable(q), _loadable(k), _loadable(v))
    if backend == "reference" or 0 in (batch, seqlen_q, seqlen_k):
        return _Plan(None, scale, softcap, window, loadable)
    left, right = window
    left = -1 if left >= seqlen_k else left  # such an end cuts nothing
    right = -1 if right >= seqlen_q else right
    # One row sees every key under the bottom-right mask.
    causal = left < 0 and right == 0 and seqlen_q != 1
    config = forward16_config(
        head_dim,
        head_dim_v,
        DTYPE_NAMES[q.dtype],
        causal=causal,
        window=not causal and (left >= 0 or (right >= 0 and seqlen_q != 1)),
        softcap=softcap > 0.0,
        alibi=side["alibi_slopes"] is not None,
        sinks=side["sinks"] is not None,
        group=heads_q // heads_k,
        seqlen_q=seqlen_q,
    )
    return _Plan(config, scale, softcap, (left, right), loadable)


def _loadable(x: Tensor) -> bool:
    """Whether TMA can read a tensor of these strides: multiples of 16 bytes, none 0."""
    return all(
        stride * x.element_size() % 16 == 0 and (stride > 0 or size <= 1)
        for stride, size in zip(x.stride()[:-1], x.shape, strict=False)
    )


# ------------------------------------------------------------------------------------------------------------
# Checks
# ------------------------------------------------------------------------------------------------------------


def _number(name: str, x: object, allowed: str) -> float:
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return float(x)  # torch.compile traces this test, and not the next one
    if isinstance(x, (bool, str, Tensor)) or not hasattr(x, "__float__"):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: {allowed}")
    return float(x)


def _check_options(
    dropout_p: object,
    softmax_scale: object,
    causal: object,
    softcap: object,
    deterministic: object,
    return_attn_probs: object,
    window_size: object,
) -> tuple[float | None, tuple[int, int], float]:
    """(softmax_scale, window, softcap); the window is (left, right), -1 without an end."""
    dropout = _number("dropout_p", dropout_p, "0.0")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout_p is {dropout}; allowed: 0.0")
    if dropout > 0.0:
        raise NotImplementedError(f"dropout_p is {dropout}, but there is no dropout; allowed: 0.0")
    scale = None
    if softmax_scale is not None:
        scale = _number("softmax_scale", softmax_scale, "a float or None")
        size = abs(scale) * math.log2(math.e)
        if not (scale == 0.0 or _FLOAT32.tiny <= size <= _FLOAT32.max):
            raise ValueError(
                f"softmax_scale is {scale}; allowed: a finite number, 0 or normal in float32, or None"
            )
    for name, flag in (
        ("causal", causal),
        ("deterministic", deterministic),
        ("return_attn_probs", return_attn_probs),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is a {type(flag).__name__}; allowed: True or False")
    if return_attn_probs:
        raise NotImplementedError(
            "return_attn_probs is True, but probabilities are never in memory; allowed: False (return_lse=True "
            "returns the log-sum-exp)"
        )
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
    cap = _number("softcap", softcap, "a float >= 0")
    if not (cap == 0.0 or _FLOAT32.tiny <= cap <= _FLOAT32.max / 2):
        raise ValueError(f"softcap is {cap}; allowed: 0 (none), or finite and > 0")
    return scale, (left, 0 if causal else right), cap


def _check_tensors(q: object, k: object, v: object) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate._check_tensor(name, x, validate.IN_DTYPES)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"{name} is on device {x.device}; allowed: that of q, {q.device}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: that of q, {q.dtype}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"batch of {name} is {x.shape[0]}; allowed: that of q, {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"head_dim of k is {k.shape[3]}; allowed: that of q, {q.shape[3]}")
    for name, dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if dim not in HEAD_DIMS_16BIT:
            raise ValueError(f"head_dim of {name} is {dim}; allowed: multiples of 8 from 32 to 256")
    for i, what in ((1, "seqlen"), (2, "heads")):
        if v.shape[i] != k.shape[i]:
            raise ValueError(f"{what} of v is {v.shape[i]}; allowed: that of k, {k.shape[i]}")
    validate._check_heads(q.shape[2], k.shape[2])


def _check_side(q: Tensor, side: dict[str, Tensor | None]) -> None:
    """`alibi_slopes` and `sinks`."""
    batch, heads = q.shape[0], q.shape[2]
    shapes = {"alibi_slopes": ((heads,), (batch, heads)), "sinks": ((heads,),)}
    for name, x in side.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a float32 torch.Tensor or None")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: torch.float32")
        if tuple(x.shape) not in shapes[name]:
            allowed = " or ".join(map(str, shapes[name]))
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {allowed}")
        if x.device != q.device:
            raise ValueError(f"{name} is on device {x.device}; allowed: that of q, {q.device}")


def _check_backend(backend: object, q: Tensor) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    if backend == "reference":
        return
    capability = device_capability(q.device)
    if capability is None or capability[0] != 9:
        where = f"device {q.device}"
        if capability is not None:
            where += f", a GPU of compute capability {capability[0]}.{capability[1]}"
        raise ValueError(
            f"q is on {where}; allowed: a GPU of compute capability 9.x (Hopper: H100, H200), or "
            "backend='reference'"
        )


# ------------------------------------------------------------------------------------------------------------
# From a plan to a result
# ------------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, plan: _Plan, alibi_slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    slopes = None if alibi_slopes is None else alibi_slopes.expand(q.shape[0], q.shape[2])
    if plan.config is None:
        out, lse = reference(
            q,
            k,
            v,
            softmax_scale=plan.softmax_scale,
            window=plan.window,
            softcap=plan.softcap,
            alibi_slopes=slopes,
            sinks=sinks,
        )
        return out.to(q.dtype), lse
    from cute_attn.launch import launch_forward16

    q, k, v = (_loaded(x, loadable) for x, loadable in zip((q, k, v), plan.loadable, strict=True))
    return launch_forward16(
        q,
        k,
        v,
        plan.config,
        softmax_scale=plan.softmax_scale,
        softcap=plan.softcap,
        window=plan.window,
        alibi_slopes=slopes,
        sinks=sinks,
    )


def _loaded(x: Tensor, loadable: bool) -> Tensor:
    """`x`, or a contiguous copy where TMA cannot read it: by its strides, or as its address is odd."""
    return x if loadable and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The definition, with the scores in memory.

    Args:
        q, k, v, softmax_scale, softcap, sinks: as in `flash_attn_func`.
        window: (left, right), -1 without an end; (-1, 0) is causal.
        alibi_slopes: (batch, heads_q).
        dtype: of the arithmetic.

    Returns:
        (out, lse) of `dtype`: (batch, seqlen_q, heads_q, head_dim_v), (batch, heads_q, seqlen_q).
    """
    batch, seqlen_q, heads_q, _ = q.shape
    group = heads_q // k.shape[2]
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores, hidden, _ = masked_scores(q, k, softmax_scale, window, softcap, alibi_slopes)
    everything = scores
    if sinks is not None:
        extra = sinks.to(dtype).view(1, heads_q, 1, 1).expand(batch, heads_q, seqlen_q, 1)
        everything = torch.cat([scores, extra], dim=3)
    lse = torch.logsumexp(everything, dim=3)
    p = torch.exp(scores - lse.unsqueeze(3))
    p = p.masked_fill(hidden, 0.0)  # also where lse is -inf
    return (p @ v).transpose(1, 2).contiguous(), lse.to(dtype)


def masked_scores(
    q: Tensor,
    k: Tensor,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `reference` takes the softmax of.

    Args:
        q, k: (batch, heads_q, seqlen, head_dim).
        softmax_scale, window, softcap, alibi_slopes: as in `reference`.

    Returns:
        (scores, hidden, tanh): (batch, heads_q, seqlen_q, seqlen_k), -inf where hidden; (seqlen_q, seqlen_k) bool; with
        softcap tanh(score / softcap) of every score, else None.
    """
    scores = q @ k.transpose(2, 3) * softmax_scale
    tanh = None
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores = softcap * tanh
    seqlen_q, seqlen_k = scores.shape[2:]
    position = torch.arange(seqlen_q, device=q.device).unsqueeze(1) + (seqlen_k - seqlen_q)
    # of a query's own position, (seqlen_q, seqlen_k)
    behind = torch.arange(seqlen_k, device=q.device) - position
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * behind.abs().to(q.dtype)
    left, right = window
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left >= 0:
        hidden |= behind < -left
    if right >= 0:
        hidden |= behind > right
    return scores.masked_fill(hidden, -math.inf), hidden, tanh
