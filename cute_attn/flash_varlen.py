"""16-bit attention over sequences of unlike length, with flash-attn's functions; `cute_attn.flash` has the rest.

The rows of all sequences stand behind one another, without padding: sequence b has rows cu_seqlens_q[b] to
cu_seqlens_q[b + 1] of q and cu_seqlens_k[b] to cu_seqlens_k[b + 1] of k and v. The kernel alone reads the lengths:
nothing here waits for the device.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import flash, validate
from cute_attn.flash import _Plan
from cute_attn.problem import cutting_ends
from cute_attn.remember import Remembered
from cute_attn.tiles import DTYPE_NAMES

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_varlen_kernel",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "reference_varlen",
]

_ROWS_LIMIT: Final = 2**31  # rows times heads of q are counted in int32


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` for each of several sequences of unlike length, by flash-attn's signature and conventions.

    FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2; backward: appendix B.1). Masks and biases are those of
    `flash_attn_func` with the lengths of the sequence: a causal mask, for example, is aligned to its last key. Where q,
    k, v or sinks require grad, out and lse are differentiable, once: what does not count (rows of no sequence, rows
    that see no key, keys behind `seqused_k`) has gradient 0. torch.compile traces it as one operator.

    Args:
        q: (total_q, heads_q, head_dim), the rows of all sequences behind one another; dtype, head_dim and strides as in
            `flash_attn_func`.
        k: (total_k, heads_k, head_dim), likewise.
        v: (total_k, heads_k, head_dim_v), likewise.
        cu_seqlens_q: (batch + 1,) int32, contiguous, on the device of q: sequence b has rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of q. Values lie between 0 and total_q and never fall; a sequence may be empty. They
            cannot be checked without waiting for the device, so they are not: with others the result is undefined.
        cu_seqlens_k: (batch + 1,) int32, likewise for k and v.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, as flash-attn wants it. Nothing depends on them: the
            kernel reads the lengths.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as in
            `flash_attn_func`.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32, likewise.
        block_table: None; `flash_attn_with_kvcache` reads pages.
        seqused_k: (batch,) int32, contiguous, on the device of q: only the first seqused_k[b] keys of sequence b
            count, as if it had no others. Values below 0 count as 0, above its length as its length.
        return_lse: also return the log-sum-exp of each row's scores.
        sinks: (heads_q,) float32, as in `flash_attn_func`.
        backend: likewise; "reference" reads the lengths on the host and waits for them.

    Returns:
        out (total_q, heads_q, head_dim_v) of q's dtype; with `return_lse` also lse (heads_q, total_q) float32, natural
        log. A row that sees no key has out 0 and lse -inf, or its sink. Rows before the first sequence and behind the
        last are not written.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or a backend that was named and has no kernel
            for the GPU.
        NotImplementedError: dropout, return_attn_probs, block_table, or grad mode is on and alibi_slopes require grad.
    """
    if block_table is not None:
        raise NotImplementedError(
            "block_table is given, but pages are read by flash_attn_with_kvcache alone; allowed: None"
        )
    _check_max("max_seqlen_q", max_seqlen_q)
    _check_max("max_seqlen_k", max_seqlen_k)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    side = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    options = (dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs, window_size)
    out, lse = _run(q, k, v, lengths, side, options, backend)
    return (out, lse) if return_lse else out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: dict[str, Tensor | None],
    side: dict[str, Tensor | None],
    options: tuple[Any, ...],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse), of which autograd knows the gradient where one is wanted."""
    if torch.compiler.is_compiling() or flash._wants_gradient(q, k, v, *side.values()):
        from cute_attn.flash_varlen_autograd import attend

        return attend(q, k, v, lengths, side, options, backend)
    plan = _find_plan(q, k, v, lengths, side, options, backend)
    return _attend(q, k, v, plan, **lengths, **side)  # type: ignore[arg-type]  # cu_seqlens are no None any more


def _find_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: dict[str, Tensor | None],
    side: dict[str, Tensor | None],
    options: tuple[Any, ...],
    backend: str,
) -> _Plan:
    """`_plan`, once for a signature."""
    given = (q, k, v, *lengths.values(), *side.values())
    key, plan = _plans.find(given, (*options, backend), options[-1])
    return _plans.keep(key, _plan(q, k, v, lengths, side, options, backend)) if plan is None else plan


def attend_used(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    side: dict[str, Tensor | None],
    options: tuple[Any, ...],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_func` with `seqused_k`: (out, lse)."""
    out, lse = _run(*_as_sequences(q, k, v, seqused_k), side, options, backend)
    batch, seqlen_q, heads_q, _ = q.shape
    return out.unflatten(0, (batch, seqlen_q)), lse.view(heads_q, batch, seqlen_q).transpose(0, 1)


def kernel_used(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    side: dict[str, Tensor | None],
    options: tuple[Any, ...],
    backend: str,
) -> str:
    """Name of the kernel that `attend_used` runs."""
    plan = _plan(*_as_sequences(q, k, v, seqused_k), side, options, backend)
    return "reference" if plan.config is None else plan.config.name


def _as_sequences(
    q: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
    """A batch as sequences of equal length: q, k, v and the lengths of `_plan`."""
    flash._check_tensors(q, k, v)
    ends = [torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * x.shape[1] for x in (q, k)]
    lengths: dict[str, Tensor | None] = {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_k": ends[1],
        "seqused_k": seqused_k,
    }
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), lengths


def flash_attn_varlen_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> str:
    """Name of the kernel that `flash_attn_varlen_func` runs with these arguments, without running it.

    Args: as those of `flash_attn_varlen_func`, with the same shapes; see `flash_attn_kernel` for the name.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_varlen_func`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": None}
    side = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    plan = _plan(q, k, v, lengths, side, (0.0, None, causal, softcap, False, False, window_size), backend)
    return "reference" if plan.config is None else plan.config.name


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    """`flash_attn_varlen_func` with k and v in one tensor, which is not copied (arXiv 2407.08608).

    Args:
        q: as there.
        kv: (total_k, 2, heads_k, head_dim): k, then v.
        more: its keyword-only arguments. All others as there.

    Returns, Raises: as there.
    """
    k, v = flash._parts("kv", kv, "total_k", 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
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


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
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
    """`flash_attn_varlen_func` with q, k and v in one tensor, which is not copied (arXiv 2407.08608).

    Args:
        qkv: (total, 3, heads, head_dim): q, k, then v.
        cu_seqlens: (batch + 1,) int32, of q, k and v alike.
        max_seqlen: likewise.
        more: keyword-only arguments of `flash_attn_varlen_func`. All others as there.

    Returns, Raises: as there.
    """
    q, k, v = flash._parts("qkv", qkv, "total", 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
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


# ------------------------------------------------------------------------------------------------------------
# Checks and plan
# ------------------------------------------------------------------------------------------------------------


_plans: Remembered[_Plan] = Remembered()


def _check_max(name: str, x: object) -> None:
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: an int >= 0")
    if x < 0:
        raise ValueError(f"{name} is {x}; allowed: an int >= 0")


def _check_rows(name: str, x: object) -> Tensor:
    """A tensor of rows as one of a batch of one, for the checks of `flash`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
    if x.layout == torch.strided and not x.is_nested and x.dim() != 3:
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; allowed: 3, (total, heads, head_dim)"
        )
    return x.unsqueeze(0) if x.layout == torch.strided and not x.is_nested else x


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Tensor | None]) -> int:
    """All tensors but the side ones; returns the batch."""
    flash._check_tensors(*(_check_rows(name, x) for name, x in (("q", q), ("k", k), ("v", v))))
    return _check_lengths(q, lengths)


def _check_lengths(q: Tensor, lengths: dict[str, Tensor | None]) -> int:
    """`cu_seqlens_q`, `cu_seqlens_k`, `seqused_k`; returns the batch. Values are not looked at."""
    batch = -1
    for name, x in lengths.items():
        if x is None and name == "seqused_k":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: an int32 torch.Tensor")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: torch.int32")
        if x.layout != torch.strided or x.dim() != 1 or not x.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, layout {x.layout}; allowed: one dimension, contiguous"
            )
        if name == "cu_seqlens_q":
            if x.shape[0] < 1:
                raise ValueError(f"{name} has shape (0,); allowed: (batch + 1,)")
            batch = x.shape[0] - 1
        size = batch if name == "seqused_k" else batch + 1
        if x.shape[0] != size:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: ({size},)")
        if x.device != q.device:
            raise ValueError(f"{name} is on device {x.device}; allowed: that of q, {q.device}")
    return batch


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: dict[str, Tensor | None],
    side: dict[str, Tensor | None],
    options: tuple[object, ...],
    backend: str,
) -> _Plan:
    """Check everything, and plan."""
    dropout_p, softmax_scale, *others = options
    window, softcap = flash._check_options(dropout_p, *others)
    batch = _check_shapes(q, k, v, lengths)
    (total_q, heads_q, head_dim), (total_k, heads_k, head_dim_v) = q.shape, v.shape
    scale = validate.check_softmax_scale(softmax_scale, head_dim)
    validate.check_side_tensors(batch, heads_q, q.device, **side)
    if total_q * heads_q >= _ROWS_LIMIT or total_k >= _ROWS_LIMIT:
        raise ValueError(f"q has {total_q} rows of {heads_q} heads, k {total_k} rows; allowed: below 2^31")
    arch = flash.target(backend, q)
    loadable = flash.all_loadable(q, k, v, arch)
    if arch == "reference" or 0 in (batch, total_q, total_k):
        return _Plan(None, scale, softcap, window, loadable)
    left, right = cutting_ends(window, total_q, total_k)  # as if of one sequence: the others are shorter
    causal = (left, right) == (-1, 0)
    config = flash.kernel_config(
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
        seqlen_q=-(-total_q // batch),
        varlen=True,
    )
    return _Plan(config, scale, softcap, (left, right), loadable)


# ------------------------------------------------------------------------------------------------------------
# From a plan to a result
# ------------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: _Plan,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch = cu_seqlens_q.shape[0] - 1
    slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, q.shape[1])
    if 0 in (
        batch,
        q.shape[0],
        k.shape[0],
    ):  # no row sees a key, whatever the lengths, which would have to be awaited
        out, lse = flash.reference(
            q[None],
            k[None, :0],
            v[None, :0],
            softmax_scale=plan.softmax_scale,
            softcap=plan.softcap,
            sinks=sinks,
        )
        return out[0].to(q.dtype), lse[0]
    if plan.config is None:
        out, lse = reference_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k=seqused_k,
            softmax_scale=plan.softmax_scale,
            window=plan.window,
            softcap=plan.softcap,
            alibi_slopes=slopes,
            sinks=sinks,
        )
        return out.to(q.dtype), lse
    from cute_attn.launch import launch_forward16_varlen

    q, k, v = (flash._loaded(x, loadable) for x, loadable in zip((q, k, v), plan.loadable, strict=True))
    return launch_forward16_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        plan.config,
        seqused_k=seqused_k,
        softmax_scale=plan.softmax_scale,
        softcap=plan.softcap,
        window=plan.window,
        alibi_slopes=slopes,
        sinks=sinks,
    )


def reference_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The definition: `flash.reference` of each sequence by itself. Reads the lengths on the host.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k: as in `flash_attn_varlen_func`.
        alibi_slopes: (batch, heads_q).
        dtype: of the arithmetic.
        options: the other arguments of `flash.reference`.

    Returns:
        (out, lse) of `dtype`: (total_q, heads_q, head_dim_v), (heads_q, total_q); rows of no sequence are 0.
    """
    total_q, heads_q, _ = q.shape
    out = torch.zeros(total_q, heads_q, v.shape[2], dtype=dtype, device=q.device)
    lse = torch.zeros(heads_q, total_q, dtype=dtype, device=q.device)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    used = None if seqused_k is None else seqused_k.tolist()
    for b, (first, end) in enumerate(itertools.pairwise(ends_q)):
        first_k, end_k = ends_k[b], ends_k[b + 1]
        if used is not None:
            end_k = min(end_k, first_k + max(used[b], 0))
        rows, keys = slice(first, end), slice(first_k, end_k)
        slopes = None if alibi_slopes is None else alibi_slopes[b : b + 1]
        one = (q[None, rows], k[None, keys], v[None, keys])
        part, part_lse = flash.reference(*one, alibi_slopes=slopes, dtype=dtype, **options)
        out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse
