"""How far gradients of the 16-bit kernels may be from float64: as far as those of torch, twice, and sums of fp32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cute_attn.flash import masked_scores, reference
from cute_attn.flash_backward import reference_backward


def torch_gradients(
    tensors: list[Tensor], sinks: Tensor | None, gradients: tuple[Tensor, Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """By autograd through the formulas in the dtype of the tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    extra = [] if sinks is None else [sinks.detach().clone().requires_grad_()]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores, hidden, _ = masked_scores(
        q,
        k,
        options["softmax_scale"],
        options["window"],
        options.get("softcap", 0.0),
        options.get("alibi_slopes"),
    )
    scores = scores.masked_fill(hidden, -3e4)
    everything = scores
    if extra:
        column = extra[0].to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        everything = torch.cat([scores, column], dim=3)
    p = torch.softmax(everything, dim=3)[..., : scores.shape[3]].masked_fill(hidden, 0.0)
    lse = torch.logsumexp(everything.float(), dim=3)
    if not extra:
        lse = lse.masked_fill(hidden.all(1), 0.0)
    return list(torch.autograd.grad(((p @ v).transpose(1, 2), lse), [*leaves, *extra], gradients))


def sums_error(
    tensors: list[Tensor],
    gradients: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[float, float]:
    """The largest errors of dq and dk that sums of fp32 in dP = dout v^T and D = rowsum(dout * out) - dlse make.

    A row that has its weight on one key has dP = D, but in two orders of the sum, so that dP - D is their errors; where
    torch takes both in one order it has the exact zero. The tensor core adds a product of 16 columns to the sum at a
    time, the kernel before it 8 columns by a thread, then those of up to 32 threads by 5 additions. Each addition is
    wrong by an eps of the sum of magnitudes at most.

    Args:
        tensors, gradients: as in `exact_gradients`.
        out, lse: float64, of the forward.
        softmax_scale, window, softcap, alibi_slopes: as in `reference`.
    """
    q, k, v, out, dout = (x.double().transpose(1, 2) for x in (*tensors, out, gradients[0]))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores, hidden, _ = masked_scores(q, k, softmax_scale, window, softcap, alibi_slopes)
    p = torch.exp(scores - lse.unsqueeze(3)).masked_fill(hidden, 0.0)
    rows = (dout * out).abs().sum(3) + gradients[1].double().abs()
    additions = v.shape[3] / 16 + 8 + 5
    eps = additions * torch.finfo(torch.float32).eps * abs(softmax_scale)
    ds = eps * p * (dout.abs() @ v.abs().transpose(2, 3) + rows.unsqueeze(3))
    dk = (ds.transpose(2, 3) @ q.abs()).unflatten(1, (tensors[1].shape[2], -1)).sum(2)
    return (ds @ k.abs()).max().item(), dk.max().item()


def exact_gradients(
    tensors: list[Tensor], gradients: tuple[Tensor, Tensor], sinks: Tensor | None = None, **options: Any
) -> list[tuple[Tensor, float]]:
    """Gradients of q, k, v and sinks in float64, each with the largest error that is allowed.

    It is twice that of torch in 16 bits. Or twice what the rounding of out alone makes of exact formulas: D is
    rowsum(dout * out), and where few keys and a sink share a row, what is left of dP - D is small beside it. torch has
    no out in that place. `sums_error` comes on top.

    Args:
        tensors: q, k, v (batch, seqlen, heads, dim), none empty.
        gradients: of out and lse.
        sinks, options: as in `reference`; softmax_scale is 1/sqrt(head_dim) where there is none.
    """
    q, k, v = (x.detach() for x in tensors)
    options = {"softmax_scale": 1.0 / math.sqrt(q.shape[3]), "window": (-1, -1), **options}
    fixed = None if sinks is None else sinks.detach()
    out, lse = reference(q, k, v, sinks=fixed, dtype=torch.float64, **options)
    exact = reference_backward(q, k, v, out, lse, *gradients, sinks=fixed, dtype=torch.float64, **options)
    rough = torch_gradients([q, k, v], fixed, gradients, options)
    stored = out.to(q.dtype).double()
    rounded = reference_backward(
        q, k, v, stored, lse, *gradients, sinks=fixed, dtype=torch.float64, **options
    )
    sums = (*sums_error([q, k, v], gradients, out, lse, **options), 0.0, 0.0)
    found = []
    for y, of_sums, *others in zip(exact, sums, rough, rounded, strict=False):
        bound = max((z.double() - y).abs().max().item() for z in others)
        step = torch.finfo(q.dtype).eps * y.abs().max().item()  # where torch happens to be exact
        found.append((y, 2.0 * bound + step + of_sums))
    return found


def check(
    got: list[Tensor],
    tensors: list[Tensor],
    gradients: tuple[Tensor, Tensor],
    sinks: Tensor | None = None,
    where: str = "",
    **options: Any,
) -> None:
    """Gradients of q, k, v and sinks against `exact_gradients`."""
    wanted = exact_gradients(tensors, gradients, sinks, **options)
    for name, x, (y, bound) in zip(("dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        error = (x.double() - y).abs().max().item()
        assert error <= bound, f"{where}{name}: error {error:.3e}, allowed {bound:.3e}"
