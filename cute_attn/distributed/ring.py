"""The part of a rank: its rows attend to the keys of all ranks in turn; forward and backward.

FlashAttention's rescale makes attention over all keys from attention over parts (see `merge`), and with the lse and out
over all keys a backward over a part of the keys gives its part of the gradients (FlashAttention-2, arXiv 2307.08691,
section 3.1.2: P = exp(S - lse)). Kernels and gradients are those of one GPU: `flash_attn_func` and the operator of its
gradient.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import cute_attn.flash_varlen_autograd  # noqa: F401  # has the operator of the gradient
from cute_attn.distributed.exchange import Ring
from cute_attn.distributed.merge import Merged
from cute_attn.distributed.schedule import Call, Mask, calls_between, partners
from cute_attn.distributed.sharding import Sharding
from cute_attn.flash import flash_attn_func
from cute_attn.flash_autograd import sinks_gradient  # beside the operator of the gradient
from cute_attn.flash_varlen import flash_attn_varlen_func
from cute_attn.quantize import V_BLOCK, Fp8Recipe

__all__ = ["RingProblem", "attend"]


@dataclass(frozen=True)
class RingProblem:
    """What all calls of one ring attention share.

    Attributes:
        q, k: where rows of q and of k and v are; their `ulysses` does not count here.
        mask: over whole sequences.
        softmax_scale, softcap, deterministic: as in `flash_attn_func`.
        recipe: of the forward in 8 bits; None for 16.
        backend: of the forward.
        backward: backend of the 16-bit backward, as in `flash_attn_func`.
    """

    q: Sharding
    k: Sharding
    mask: Mask
    softmax_scale: float
    softcap: float
    deterministic: bool
    recipe: Fp8Recipe | None
    backend: str
    backward: str

    def ring(self, group: dist.ProcessGroup | None) -> Ring:
        """This rank, and who sees whose keys."""
        return Ring(group, partners(self.q, self.k, self.mask))

    def keys_of(self, rank: int) -> int:
        """Keys that ring rank `rank` holds."""
        return sum(piece.length for piece in self.k.pieces(rank))

    def calls(self, rank: int, owner: int, granule: int = 1) -> tuple[Call, ...]:
        """See `schedule.calls_between`."""
        return calls_between(self.q, self.k, self.mask, rank, owner, granule)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    group: dist.ProcessGroup | None,
    problem: RingProblem,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows; collective in `group`, forward and backward.

    Args:
        q, k, v: (batch, rows of this ring rank, heads, dim).
        sinks: (heads_q,) float32.
        group: None for a ring of one.

    Returns:
        out (batch, rows, heads_q, head_dim_v) of q's dtype, lse (batch, heads_q, rows) float32.
    """
    out, lse = _Attend.apply(q, k, v, sinks, group, problem)
    return out, lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        group: dist.ProcessGroup | None,
        problem: RingProblem,
    ) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = q.shape
        ring = problem.ring(group)
        parts = _parts(problem, ring.rank, batch, q.device) + (sinks is not None)
        merged = Merged(batch, rows, heads, v.shape[3], q.device, parts)
        if problem.recipe is None:
            _forward(q, k, v, ring, problem, merged)
        else:
            from cute_attn.distributed.ring_fp8 import forward

            forward(q, k, v, ring, problem, merged)
        if sinks is not None:
            merged.add_sinks(sinks)
        out, lse = merged.out.to(q.dtype), merged.lse
        ctx.group, ctx.problem = group, problem
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)  # lse is seldom differentiated
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 6
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = _backward(q, k, v, out, lse, dout, dlse, ctx.problem.ring(ctx.group), ctx.problem)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            d = (dout.float() * out.float()).sum(3).transpose(1, 2)
            d = d if dlse is None else d - dlse
            dsinks = sinks_gradient(sinks, lse, d)
        return *gradients, dsinks, None, None


def _parts(problem: RingProblem, rank: int, batch: int, device: torch.device) -> int:
    """Launches whose results a rank merges."""
    owners = range(problem.k.ring)
    if problem.recipe is not None:
        return sum(len(problem.calls(rank, owner, V_BLOCK)) for owner in owners)
    return sum(len(_batches(problem.calls(rank, owner), batch, device)) for owner in owners)


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring, problem: RingProblem, merged: Merged) -> None:
    for step, block in ring.blocks(*_packed(k, v, ring, problem)):
        if block is None:
            continue
        owner = ring.owner(step)
        keys = (k, v) if step == 0 else _unpacked(block, k, v, problem.keys_of(owner))
        _attend_to(q, *keys, problem.calls(ring.rank, owner), problem, merged)
        del block, keys  # the memory is for the block after the next


def _attend_to(
    q: Tensor, k: Tensor, v: Tensor, calls: tuple[Call, ...], problem: RingProblem, merged: Merged
) -> None:
    """Merge what one owner's keys give."""
    for batch in _batches(calls, q.shape[0], q.device):
        options: dict[str, Any] = {
            "softmax_scale": problem.softmax_scale,
            "window_size": batch.window,
            "softcap": problem.softcap,
            "return_lse": True,
            "backend": problem.backend,
        }
        rows, keys, values = q[:, batch.rows], k[:, batch.keys], v[:, batch.keys]
        if batch.lengths is None:
            out, lse = flash_attn_func(rows, keys, values, **options)
        else:
            out, lse = flash_attn_varlen_func(rows[0], keys[0], values[0], *batch.lengths, **options)
            out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        merged.add(batch.rows, out, lse)


class _Batch(NamedTuple):
    """Calls of one window, of different sequences, that one launch serves."""

    rows: slice | Tensor
    keys: slice | Tensor
    window: tuple[int, int]
    lengths: (
        tuple[Tensor, Tensor, int, int] | None
    )  # as `flash_attn_varlen_func` wants them; None of one call


@lru_cache(maxsize=1024)  # what is on the device is put there once
def _batches(calls: tuple[Call, ...], batch: int, device: torch.device) -> tuple[_Batch, ...]:
    """Calls in as few launches as may be: those of several sequences together, where there is a batch of one."""
    groups: dict[object, list[Call]] = {}
    seen: Counter[tuple[int, tuple[int, int]]] = Counter()
    for number, call in enumerate(calls):
        # Two calls of one sequence may share rows, which one launch must not have twice.
        seen[call.sequence, call.window] += 1
        key = (call.window, seen[call.sequence, call.window]) if batch == 1 else number
        groups.setdefault(key, []).append(call)
    found = []
    for group in groups.values():
        rows, keys = [call.rows for call in group], [call.keys for call in group]
        lengths = None
        if len(group) > 1:
            counts = [[end - first for first, end in ranges] for ranges in (rows, keys)]
            ends_q, ends_k = (
                torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device) for x in counts
            )
            lengths = ends_q, ends_k, max(counts[0]), max(counts[1])
        found.append(_Batch(_joined(rows, device), _joined(keys, device), group[0].window, lengths))
    return tuple(found)


def _joined(ranges: Sequence[tuple[int, int]], device: torch.device) -> slice | Tensor:
    """Ranges as a slice, where each begins at the end of the one before, or as numbers."""
    if all(a[1] == b[0] for a, b in itertools.pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(*each) for each in ranges]).to(device)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    ring: Ring,
    problem: RingProblem,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). Sums are in float32. What a rank adds to the gradient of another's keys comes in 16 bits."""
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    own, sizes = _packed(k, v, ring, problem)
    coming = None
    for step, block in ring.blocks(own, sizes):
        owner = ring.owner(step)
        gradient = None
        if block is not None:
            keys = (k, v) if step == 0 else _unpacked(block, k, v, problem.keys_of(owner))
            of_keys = (dk, dv) if step == 0 else [torch.zeros_like(x, dtype=torch.float32) for x in keys]
            calls = problem.calls(ring.rank, owner)
            _differentiate(q, *keys, out, lse, dout, dlse, calls, problem, (dq, *of_keys))
            if step > 0:
                gradient = torch.cat([x.to(k.dtype).reshape(-1) for x in of_keys])
            del keys, of_keys
        del block
        if step > 0:
            sent = ring.send_home(gradient, own, step)
            _arrive(coming, dk, dv)
            coming = sent
    _arrive(coming, dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    calls: tuple[Call, ...],
    problem: RingProblem,
    sums: Sequence[Tensor],
) -> None:
    """Add the gradients that one owner's keys give to those of q, k and v, float32."""
    for batch in _batches(calls, q.shape[0], q.device):
        rows, keys = batch.rows, batch.keys
        given = [
            dout[:, rows],
            None if dlse is None else dlse[:, :, rows],
            q[:, rows],
            k[:, keys],
            v[:, keys],
            out[:, rows],
            lse[:, :, rows],
        ]
        options = (
            None,  # no ALiBi, and sinks are not the kernel's
            None,
            problem.softmax_scale,
            False,
            *batch.window,
            problem.softcap,
            problem.deterministic,
            problem.backward,
        )
        if batch.lengths is None:
            more = torch.ops.cute_attn.flash_attn_backward(*given, *options)
        else:
            first = (None if x is None else x[0] for x in given)
            ends = batch.lengths[:2]
            more = torch.ops.cute_attn.flash_attn_varlen_backward(*first, *ends, None, *options)
            more = [x.unsqueeze(0) for x in more]
        for total, part, where in zip(sums, more, (rows, keys, keys), strict=False):
            total[:, where] += part


def _arrive(coming: Any, dk: Tensor, dv: Tensor) -> None:
    """Add what another rank has sent home."""
    if coming is None:
        return
    transfer, gradient = coming
    transfer.wait()
    if gradient is not None:
        more_k, more_v = _unpacked(gradient, dk, dv, dk.shape[1])
        dk += more_k
        dv += more_v


def _packed(k: Tensor, v: Tensor, ring: Ring, problem: RingProblem) -> tuple[Tensor, Sequence[int]]:
    """K and V of this rank in one message, and the elements of those of all ranks."""
    if ring.size == 1:
        return k.new_empty(0), [0]
    batch, _, heads_k, head_dim = k.shape
    of_key = batch * heads_k * (head_dim + v.shape[3])
    own = torch.cat([k.reshape(-1), v.reshape(-1)])
    return own, [of_key * problem.keys_of(rank) for rank in range(ring.size)]


def _unpacked(block: Tensor, k: Tensor, v: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The parts of a block of so many keys; views, otherwise shaped like k and v."""
    shapes = [(x.shape[0], keys, *x.shape[2:]) for x in (k, v)]
    of_k = shapes[0][0] * keys * shapes[0][2] * shapes[0][3]
    return block[:of_k].view(shapes[0]), block[of_k:].view(shapes[1])
