"""16-bit attention with flash-attn's functions: FlashAttention-3's forward (arXiv 2407.08608, sections 3.1 and 3.2) on
Hopper GPUs, FlashAttention-2's (arXiv 2307.08691) on those of compute capability 8 and 12.

The path of a call is check -> plan (`plan16.forward16_config`, `plan_sm80.forward16_sm80_config`) -> launch. There is
no emulator of the 16-bit kernels: away from these GPUs the definition in float32 runs, for backend "auto" with a
warning the first time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from cute_attn import validate
from cute_attn.kernels.config import HEAD_DIMS_16BIT, Fwd16Config, Fwd16Sm80Config
from cute_attn.plan16 import Plan16, Problem16, forward16_config, make_plan16
from cute_attn.plan_sm80 import forward16_sm80_config
from cute_attn.problem import (
    ARCHS,
    CAPABILITIES,
    cutting_ends,
    device_capability,
    place_text,
    warn_reference,
)
from cute_attn.remember import Remembered
from cute_attn.tiles import DTYPE_NAMES

if TYPE_CHECKING:
    from cute_attn.launch import Forward16
    from cute_attn.launch_backward import Backward16

__all__ = [
    "flash_attn_explain",
    "flash_attn_func",
    "flash_attn_kernel",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "reference",
]

BACKENDS: Final = ("auto", "sm90", "sm80", "reference")

_LONG_ROWS: Final = 2**25
"""Elements from row to row from which the mma.sync kernel does not read k and v where they are: it counts the bytes of
a few rows in int32."""


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
    seqused_k: Tensor | None = None,
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
        deterministic: key tiles add to the gradient of q in a fixed order, so that it is the same, bit for bit, in
            every run, and wait for one another; all else always is.
        return_attn_probs: False; probabilities are never in memory.
        seqused_k: (batch,) int32, contiguous, on the device of q: only the first seqused_k[b] keys of entry b count,
            as if it had no others. Values below 0 count as 0, above seqlen_k as seqlen_k. The kernel of
            `flash_attn_varlen_func` runs; a tensor whose batch and rows are not one dimension in memory is copied.
        return_lse: also return the log-sum-exp of each row's scores.
        sinks: (heads_q,) float32: one more logit in the softmax of every row of a head, which has no value.
        backend: "auto" (the kernel for the GPU at hand, or, with a warning the first time, "reference" where there is
            none), "sm90" (the Hopper kernel), "sm80" (the mma.sync kernel of compute capability 8 and 12, which runs
            on Hopper, too), or "reference" (torch in float32, any device, with the scores in memory).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) of q's dtype; with `return_lse` also lse (batch, heads_q, seqlen_q)
        float32, natural log. A row that sees no key has out 0 and lse -inf, or its sink.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or a backend that was named and has no kernel
            for the GPU.
        NotImplementedError: dropout, return_attn_probs, or grad mode is on and alibi_slopes require grad.
    """
    side = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    options = (dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs, window_size)
    if seqused_k is not None:
        from cute_attn.flash_varlen import attend_used

        out, lse = attend_used(q, k, v, seqused_k, side, options, backend)
        return (out, lse) if return_lse else out
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
    key, plan = _plans.find((q, k, v, *side.values()), (*options, backend), options[-1])
    return _plans.keep(key, _plan(q, k, v, side, options, backend)) if plan is None else plan


def flash_attn_explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Plan16:
    """What `flash_attn_func` would do with these arguments, without doing it: kernel, tiles, and why.

    `print(flash_attn_explain(q, k, v))` is the readable form; `.kernel` is the name of the kernel, which holds what it
    is compiled for: operands, head_dim, mask, features, tile, options of the main loop. Nothing is compiled or
    launched, and no data is read.

    Args: as those of `flash_attn_func`, with the same shapes; all but q, k and v by name.

    Returns:
        The plan.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.
    """
    side = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    plan = _plan(q, k, v, side, (0.0, softmax_scale, causal, softcap, False, False, window_size), backend)
    left, right = window_size
    problem = Problem16(
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        heads_q=q.shape[2],
        heads_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        window=(left, 0 if causal else right),
        softmax_scale=plan.softmax_scale,
        softcap=plan.softcap,
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
        copied=tuple(
            name
            for name, x, loadable in zip(("q", "k", "v"), (q, k, v), plan.loadable, strict=True)
            if not _read_in_place(x, loadable)
        ),
        capability=device_capability(q.device),
    )
    return make_plan16(problem, plan.config, backend)


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
    seqused_k: Tensor | None = None,
) -> str:
    """Name of the kernel that `flash_attn_func` runs with these arguments: `flash_attn_explain(...).kernel`.

    Args, Raises: as there.
    """
    if seqused_k is not None:
        from cute_attn.flash_varlen import kernel_used

        side = {"alibi_slopes": alibi_slopes, "sinks": sinks}
        options = (0.0, None, causal, softcap, False, False, window_size)
        return kernel_used(q, k, v, seqused_k, side, options, backend)
    return flash_attn_explain(
        q,
        k,
        v,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        backend=backend,
    ).kernel


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
    k, v = _parts("kv", kv, "batch, seqlen", 2)
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
    q, k, v = _parts("qkv", qkv, "batch, seqlen", 3)
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


def _parts(name: str, x: object, rows: str, count: int) -> tuple[Tensor, ...]:
    """The parts of a tensor (rows, count, heads, head_dim); `rows` names its first dimensions, as "batch, seqlen"."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
    dim = len(rows.split(","))
    if x.dim() != dim + 3 or x.shape[dim] != count:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: ({rows}, {count}, heads, head_dim)")
    return x.unbind(dim)


# ------------------------------------------------------------------------------------------------------------
# From arguments to a plan: once for a signature
# ------------------------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """What a call with these shapes, strides and options does."""

    config: Fwd16Config | Fwd16Sm80Config | None  # None: the reference
    softmax_scale: float
    softcap: float
    window: tuple[int, int]  # -1 without an end
    loadable: tuple[bool, bool, bool]  # whether the kernel can read tensors of the strides of q, k, v
    forward: Forward16 | None = None  # the kernel's calls, from the first one on
    backward: Backward16 | None = None  # likewise


_plans: Remembered[_Plan] = Remembered()


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: dict[str, Tensor | None],
    options: tuple[object, ...],
    backend: str,
) -> _Plan:
    """Check everything, and plan."""
    dropout_p, softmax_scale, *others = options
    window, softcap = _check_options(dropout_p, *others)
    _check_tensors(q, k, v)
    scale = validate.check_softmax_scale(softmax_scale, q.shape[3])
    validate.check_side_tensors(q.shape[0], q.shape[2], q.device, **side)
    arch = target(backend, q)
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    loadable = all_loadable(q, k, v, arch)
    if arch == "reference" or 0 in (batch, seqlen_q, seqlen_k):
        return _Plan(None, scale, softcap, window, loadable)
    left, right = cutting_ends(window, seqlen_q, seqlen_k)
    causal = (left, right) == (-1, 0)
    config = kernel_config(
        arch,
        head_dim,
        head_dim_v,
        DTYPE_NAMES[q.dtype],
        causal=causal,
        window=not causal and (left, right) != (-1, -1),
        softcap=softcap > 0.0,
        alibi=side["alibi_slopes"] is not None,
        sinks=side["sinks"] is not None,
        group=heads_q // heads_k,
        seqlen_q=seqlen_q,
    )
    return _Plan(config, scale, softcap, (left, right), loadable)


def kernel_config(arch: str, *sizes: Any, **properties: Any) -> Fwd16Config | Fwd16Sm80Config:
    """Configuration of the forward kernel for a target of `target`; arguments of `plan16.forward16_config`."""
    if arch == "sm90":
        return forward16_config(*sizes, **properties)
    return forward16_sm80_config(*sizes, arch=arch, **properties)


def all_loadable(q: Tensor, k: Tensor, v: Tensor, arch: str) -> tuple[bool, bool, bool]:
    """Whether the kernel for a target of `target` can read tensors of the strides of q, k and v."""
    if arch == "sm90":
        return _loadable(q), _loadable(k), _loadable(v)

    def by_copies(x: Tensor) -> bool:
        return all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])

    def near(x: Tensor) -> bool:  # tensors of rows are (..., rows, heads, head_dim)
        return x.stride(-3) < _LONG_ROWS

    return by_copies(q), by_copies(k) and near(k), by_copies(v) and near(v)


def _loadable(x: Tensor) -> bool:
    """Whether TMA can read a tensor of these strides: multiples of 16 bytes, none 0."""
    return all(
        stride * x.element_size() % 16 == 0 and (stride > 0 or size <= 1)
        for stride, size in zip(x.stride()[:-1], x.shape, strict=False)
    )


# ------------------------------------------------------------------------------------------------------------
# Checks
# ------------------------------------------------------------------------------------------------------------


def _check_options(
    dropout_p: object,
    causal: object,
    softcap: object,
    deterministic: object,
    return_attn_probs: object,
    window_size: object,
) -> tuple[tuple[int, int], float]:
    """(window, softcap); the window is (left, right), -1 without an end."""
    dropout = validate.check_number("dropout_p", dropout_p, "0.0")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout_p is {dropout}; allowed: 0.0")
    if dropout > 0.0:
        raise NotImplementedError(f"dropout_p is {dropout}, but there is no dropout; allowed: 0.0")
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
    left, right = validate.check_window_size(window_size)
    return (left, 0 if causal else right), validate.check_softcap(softcap)


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


def target(backend: object, q: Tensor) -> str:
    """What a call of this backend runs: "sm90", "reference", or the architecture of a mma.sync kernel, as "sm_80".

    "auto" is the reference where there is no kernel, with a warning the first time.

    Raises:
        ValueError: an unknown backend, or one that was named and has no kernel for the GPU.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    if backend == "reference":
        return "reference"
    capability = device_capability(q.device)
    if capability is not None and capability[0] == 9 and backend != "sm80":
        return "sm90"
    if capability in ARCHS and backend != "sm90":
        return ARCHS[capability]
    place = place_text(q.device, capability)
    if backend == "auto":
        warn_reference("q", place)
        return "reference"
    allowed = "9.x (Hopper: H100, H200)" if backend == "sm90" else CAPABILITIES
    raise ValueError(
        f"q is on {place}; allowed: a GPU of compute capability {allowed}, or backend='reference'"
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
    if not (all(plan.loadable) and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0):
        q, k, v = (_loaded(x, loadable) for x, loadable in zip((q, k, v), plan.loadable, strict=True))
    forward = plan.forward
    if forward is None:
        from cute_attn.launch import Forward16

        forward = plan.forward = Forward16(
            q.shape,
            v.shape,
            plan.config,
            q.device,
            softmax_scale=plan.softmax_scale,
            softcap=plan.softcap,
            window=plan.window,
        )
    return forward(q, k, v, slopes, sinks)


def _loaded(x: Tensor, loadable: bool) -> Tensor:
    """`x`, or a contiguous copy where the kernel cannot read it: by its strides, or as its address is odd."""
    return x if _read_in_place(x, loadable) else x.clone(memory_format=torch.contiguous_format)


def _read_in_place(x: Tensor, loadable: bool) -> bool:
    return loadable and x.data_ptr() % 16 == 0


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
    scores, _, _ = masked_scores(q, k, softmax_scale, window, softcap, alibi_slopes)
    extra = torch.full((heads_q,), -math.inf, device=q.device) if sinks is None else sinks
    scores = torch.cat(
        [scores, extra.to(dtype).view(1, heads_q, 1, 1).expand(batch, -1, seqlen_q, -1)], dim=3
    )
    # The maximum comes off first: of scores so large that lse rounds by more than log(2), exp(score - lse) is no share.
    top = scores.amax(dim=3, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    p = torch.exp(scores - top)
    total = p.sum(dim=3, keepdim=True)
    lse = (top + torch.log(total)).squeeze(3)
    p = p[..., :-1] / total.masked_fill(total == 0.0, 1.0)
    return (p @ v).transpose(1, 2).contiguous(), lse


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
