"""What the phases "backward" and "train" time, and a sampled float64 check of the gradients.

The FLOP count is that of the FlashAttention papers: a backward has five products where a forward has two, 2.5 times as
many (FlashAttention-2, arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cute_attn.bench import cases

FLOP_FACTORS: Final = {"backward": 2.5, "train": 3.5}  # phase -> operations over those of a forward

_CHUNK = 1 << 25  # scores that the float64 check holds at a time

# See `error`. With an 8-bit forward D has the error of its output, which few keys do not average out.
_FLOORS: Final = {"bf16": 0.05, "fp16": 0.05, "fp8": 1.0}


@dataclass(frozen=True)
class SampledGradients:
    """Exact rows of the gradients of some heads."""

    heads: tuple[tuple[int, int], ...]  # (batch, key head); dq is that of its first query head
    queries: Tensor  # (rows,) int64, positions of the rows of dq
    seen: Tensor  # (rows,) int64, keys that these queries see
    keys: Tensor  # (rows,) int64, of those of dk and dv
    dq: Tensor  # (heads, rows, head_dim) float64
    dk: Tensor
    dv: Tensor


def make_dout(case: cases.Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    """An N(0, 1) gradient of the output, (batch, seqlen_q, heads_q, head_dim)."""
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def sample(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> SampledGradients:
    """Exact gradients in float64 of the first and the last key head, at about 48 queries and keys.

    The mask is aligned to the bottom right and the scale is 1/sqrt(head_dim). It is one more attention over the heads
    sampled, in chunks of queries.

    Args:
        q, dout: (batch, seqlen_q, heads_q, head_dim).
        k, v: (batch, seqlen_k, heads_k, head_dim).
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    group, scale, shift = heads_q // heads_k, 1 / math.sqrt(head_dim), seqlen_k - seqlen_q
    heads = tuple(dict.fromkeys(((0, 0), (batch - 1, heads_k - 1))))
    queries, keys = (cases.sampled_positions(length, q.device) for length in (seqlen_q, seqlen_k))
    columns = torch.arange(seqlen_k, device=q.device)
    step = max(1, _CHUNK // seqlen_k)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for b, kv in heads:
        of_k, of_v = k[b, :, kv].double(), v[b, :, kv].double()
        dk, dv = torch.zeros_like(of_k[keys]), torch.zeros_like(of_v[keys])
        dq = torch.zeros(len(queries), head_dim, dtype=torch.float64, device=q.device)
        for h in range(kv * group, (kv + 1) * group):
            for rows in torch.arange(seqlen_q, device=q.device).split(step):
                of_q, of_dout = q[b, rows, h].double(), dout[b, rows, h].double()
                score = of_q @ of_k.T * scale
                if causal:
                    score.masked_fill_(columns > rows[:, None] + shift, -math.inf)
                p = torch.softmax(score, dim=1).nan_to_num_(0.0)  # a row without keys
                dp = of_dout @ of_v.T
                ds = p * (dp - (p * dp).sum(dim=1, keepdim=True))
                dv += p[:, keys].T @ of_dout
                dk += ds[:, keys].T @ of_q * scale
                if h == kv * group:
                    chosen = (queries >= rows[0]) & (queries <= rows[-1])
                    dq[chosen] = ds[queries[chosen] - rows[0]] @ of_k * scale
        found.append((dq, dk, dv))
    dq, dk, dv = (torch.stack(parts) for parts in zip(*found, strict=True))
    seen = (queries + shift + 1).clamp(0, seqlen_k) if causal else torch.full_like(queries, seqlen_k)
    return SampledGradients(heads, queries, seen, keys, dq, dk, dv)


def error(
    gradients: tuple[Tensor, Tensor, Tensor], exact: SampledGradients, dtype: str = "bf16"
) -> cases.OutputError:
    """Error of (dq, dk, dv), of the shapes of q, k and v, on the sampled rows; `dtype` is that of the forward.

    Each gradient counts relative to its own root mean square; the worst row is relative to itself, or to a part of what
    is usual, see `_FLOORS`, if that is larger. In a row of dq with n keys, the median of size sqrt(n) over sqrt(n) is
    usual: dq can be 0 where few keys are seen, and what remains there of dP - D, with D of a rounded output, goes with
    n likewise.
    """
    dq, dk, dv = gradients
    group = dq.shape[2] // dk.shape[2]
    pairs = (
        (torch.stack([dq[b, exact.queries, kv * group] for b, kv in exact.heads]), exact.dq, exact.seen),
        (torch.stack([dk[b, exact.keys, kv] for b, kv in exact.heads]), exact.dk, torch.ones(())),
        (torch.stack([dv[b, exact.keys, kv] for b, kv in exact.heads]), exact.dv, torch.ones(())),
    )
    squares, worst = [], []
    for got, want, seen in pairs:
        difference = got.double() - want
        squares.append(difference.square().mean() / want.square().mean())
        size = want.square().mean(dim=-1).sqrt()
        weight = seen.clamp(min=1).to(size).sqrt()
        usual = (size * weight).median() / weight
        worst.append((difference.square().mean(dim=-1).sqrt() / size.maximum(_FLOORS[dtype] * usual)).max())
    relative = torch.stack(squares).mean().sqrt()
    finite = all(bool(x.isfinite().all()) for x in gradients)
    largest = torch.stack(worst).max()
    return cases.OutputError(
        rmse=float(relative),
        rel_rmse=float(relative),
        worst_row=float(largest),
        finite=finite and bool(largest.isfinite()),
    )


def launcher(
    phase: str,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    case: cases.Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Callable[[], tuple[Tensor, ...]]:
    """What a phase times: a function that returns (dq, dk, dv).

    Args:
        phase: "backward": the forward has run once, and its graph is kept; "train": forward and backward.
        attend: 16-bit q, k and v to the output, both as in `cases.make_inputs`; differentiable.
    """
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    dout = make_dout(case, q.dtype, q.device)
    if phase == "train":

        def train() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(attend(*leaves), leaves, dout)

        return train
    with torch.enable_grad():
        out = attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return backward
