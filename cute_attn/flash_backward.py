"""Gradients of 16-bit attention: the definition."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from cute_attn.flash import masked_scores

__all__ = ["reference_backward", "reference_varlen_backward"]


def reference_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    softmax_scale: float,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of `flash.reference` by their definition, with the scores in memory.

    FlashAttention-2 (arXiv 2307.08691, section 2.2). With P = exp(scores - lse), the scores those after softcap, bias
    and mask, and D = rowsum(dout * out) - dlse (a row of lse has the gradient P of its scores):

        dV = P^T dO     dP = dO V^T     dS = P (dP - D) [1 - tanh^2]
        dQ = softmax_scale dS K     dK = softmax_scale dS^T Q

    The softmax's Jacobian takes D from every column, also from that of a sink, whose dP is 0: its gradient is
    -sum(exp(sink - lse) D) over the rows of its head.

    Args:
        q, k, v, softmax_scale, window, softcap, alibi_slopes, sinks: as in `flash.reference`.
        out, lse: what it returned.
        dout: gradient of out, of its shape.
        dlse: gradient of lse, of its shape; None: zero. That of a row with lse -inf, which sees no key, counts for
            nothing.
        dtype: of the arithmetic.

    Returns:
        (dq, dk, dv, dsinks) of `dtype` and the shapes of q, k, v and sinks; dsinks None without sinks. A row that sees
        no key adds nothing to them but, with dlse, to dsinks. alibi_slopes have no gradient.
    """
    heads_q, heads_k = q.shape[2], k.shape[2]
    group = heads_q // heads_k
    q, k, v, out, dout = (x.transpose(1, 2).to(dtype) for x in (q, k, v, out, dout))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    lse = lse.to(dtype)
    scores, hidden, tanh = masked_scores(q, k, softmax_scale, window, softcap, alibi_slopes)
    p = torch.exp(scores - lse.unsqueeze(3)).masked_fill(hidden, 0.0)  # also where lse is -inf
    d = (dout * out).sum(3)
    if dlse is not None:
        d = d - dlse.to(dtype)
    d = d.masked_fill(lse == -torch.inf, 0.0)
    ds = p * (dout @ v.transpose(2, 3) - d.unsqueeze(3))
    if tanh is not None:
        ds = ds * (1.0 - tanh * tanh)
    dq = ds @ k * softmax_scale
    dk = ds.transpose(2, 3) @ q * softmax_scale
    dv = p.transpose(2, 3) @ dout
    dk, dv = (x.unflatten(1, (heads_k, group)).sum(2) for x in (dk, dv))
    dsinks = None
    if sinks is not None:
        share = torch.exp(sinks.to(dtype).view(1, heads_q, 1) - lse)
        share = share.masked_fill(lse == -torch.inf, 0.0)  # a sink of -inf alone in its row
        dsinks = -(share * d).sum((0, 2))
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv, dsinks


def reference_varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of `flash_varlen.reference_varlen`: `reference_backward` of each sequence by itself.

    Reads the lengths on the host.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k: as in `flash_attn_varlen_func`.
        out, lse, dout, dlse: of the shapes of its results; dlse may be None.
        alibi_slopes: (batch, heads_q).
        sinks, dtype, options: as in `reference_backward`.

    Returns:
        (dq, dk, dv, dsinks) of `dtype`, as there; 0 in rows of no sequence and of keys that do not count.
    """
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros(sinks.shape, dtype=dtype, device=sinks.device)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    used = None if seqused_k is None else seqused_k.tolist()
    for b, (first, end) in enumerate(itertools.pairwise(ends_q)):
        first_k, end_k = ends_k[b], ends_k[b + 1]
        if used is not None:
            end_k = min(end_k, first_k + max(used[b], 0))
        rows, keys = slice(first, end), slice(first_k, end_k)
        *parts, part_sinks = reference_backward(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            lse[None, :, rows],
            dout[None, rows],
            None if dlse is None else dlse[None, :, rows],
            alibi_slopes=None if alibi_slopes is None else alibi_slopes[b : b + 1],
            sinks=sinks,
            dtype=dtype,
            **options,
        )
        dq[rows], dk[keys], dv[keys] = (part[0] for part in parts if part is not None)
        if dsinks is not None and part_sinks is not None:
            dsinks += part_sinks
    return dq, dk, dv, dsinks
