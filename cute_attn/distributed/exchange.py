"""What goes between ranks: blocks of keys from their owners, gradients back to them, heads for rows.

In step t rank r of a ring works on the keys of rank r - t, modulo the ranks, and they come straight from there. Every
rank sends and receives as much as if blocks were handed on from neighbour to neighbour. On a switch (NVLink, or one
network adapter for each GPU) it takes as long, and it is better in three ways: a block that a rank does not see is not
sent to it, no block waits for the rank before, and gradients go straight home, as the kernels make them, in 16 bits,
where handing on sums would want them in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ring", "Traffic", "heads_for_rows", "rows_for_heads", "traffic"]


@dataclass
class Traffic:
    """Bytes that this rank has sent to others, for the benchmark and for tests."""

    keys: int = 0  # K and V, with their scales
    gradients: int = 0  # of K and V
    heads: int = 0  # heads for rows, and back
    means: int = 0  # samples of K for the mean key


traffic = Traffic()


@dataclass
class _Transfer:
    """Messages under way. Their tensors are held until they have arrived: the library reads and writes them."""

    works: list[Any] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        """On CUDA the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.works, self.held = [], []


class Ring:
    """This rank among those that K and V go round.

    Attributes:
        rank, size: of this rank, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None, needs: Sequence[Sequence[bool]]):
        """
        Args:
            group: None for a ring of one.
            needs: [rank][owner], alike on all ranks: whether a rank works on the keys of an owner.
        """
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.needs = needs

    def _post(self, send: tuple[Tensor, int] | None, receive: tuple[Tensor, int] | None) -> _Transfer:
        """Start a message to, and one from, another rank. On CUDA they run in the stream of the process group, after
        what the current stream has been given so far."""
        ops, held = [], []
        for op, message in ((dist.isend, send), (dist.irecv, receive)):
            if message is None or message[0].numel() == 0:
                continue
            peer = dist.get_global_rank(self.group, message[1])  # type: ignore[arg-type]
            data = message[0].view(torch.uint8)  # any backend sends bytes
            ops.append(dist.P2POp(op, data, peer, self.group))
            held.append(data)
        return _Transfer(dist.batch_isend_irecv(ops) if ops else [], held)

    def blocks(self, own: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor | None]]:
        """(step, block) of every step, from 0, the own block, on; the next block is under way meanwhile.

        In step t it is the block of rank `owner(t)`; None where this rank does not work on it. At most two blocks of
        others are in memory, if the caller keeps none. Every rank must go through all steps: messages between two
        ranks are matched by their order.

        Args:
            own: block of this rank, 1-D, contiguous.
            sizes: elements of each rank's block.
        """
        posted = self._ask(own, sizes, 1)
        yield 0, own if self.needs[self.rank][self.rank] else None
        for step in range(1, self.size):
            transfer, block = posted
            transfer.wait()
            posted = self._ask(own, sizes, step + 1)
            yield step, block
            del block

    def owner(self, step: int) -> int:
        """The rank whose block this one works on in a step."""
        return (self.rank - step) % self.size

    def _ask(self, own: Tensor, sizes: Sequence[int], step: int) -> tuple[_Transfer, Tensor | None]:
        """Send the own block to the rank `step` places on, and receive that of the rank `step` places before."""
        if step >= self.size:
            return _Transfer(), None
        owner, to = self.owner(step), (self.rank + step) % self.size
        block = own.new_empty(sizes[owner]) if self.needs[self.rank][owner] else None
        send = None
        if self.needs[to][self.rank]:
            send = own, to
            traffic.keys += own.numel() * own.element_size()
        return self._post(send, None if block is None else (block, owner)), block

    def send_home(self, gradient: Tensor | None, own: Tensor, step: int) -> tuple[_Transfer, Tensor | None]:
        """Start to send the gradient of this step's block to its owner, and to receive one of the own block.

        Args:
            gradient: like the block; None where this rank does not work on it.
            own: block of this rank.
            step: 1 or more; every rank calls it once in every step.

        Returns:
            (transfer, gradient of the own block); None where the rank that would send it does not work on it.
        """
        worker = (self.rank + step) % self.size
        received = torch.empty_like(own) if self.needs[worker][self.rank] else None
        send = None
        if gradient is not None:
            send = gradient, self.owner(step)
            traffic.gradients += gradient.numel() * gradient.element_size()
        return self._post(send, None if received is None else (received, worker)), received


# ------------------------------------------------------------------------------------------------------------
# Ulysses
# ------------------------------------------------------------------------------------------------------------


class _Heads(torch.autograd.Function):
    """(batch, own rows, all heads, ...) of some tensors to (batch, all rows, own heads, ...); backward the way back.

    The other class is this one with forward and backward exchanged.
    """

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, lengths: Sequence[Sequence[int]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.lengths = group, lengths
        return _gather_rows(group, lengths, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_gather_heads(ctx.group, ctx.lengths, gradients)


class _Rows(torch.autograd.Function):
    """The way back of `_Heads`."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, lengths: Sequence[Sequence[int]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.lengths = group, lengths
        return _gather_heads(group, lengths, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_gather_rows(ctx.group, ctx.lengths, gradients)


def heads_for_rows(
    group: dist.ProcessGroup, lengths: Sequence[Sequence[int]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """All rows of some heads from some rows of all heads, in one all-to-all; differentiable.

    Args:
        group: its ranks get heads in their order.
        lengths: of each tensor, the rows of each rank.
        tensors: (batch, own rows, heads, width); heads a multiple of the ranks. One dtype.

    Returns:
        (batch, rows of all ranks in their order, heads / ranks, width) of each.
    """
    found: tuple[Tensor, ...] = _Heads.apply(group, lengths, *tensors)
    return found


def rows_for_heads(
    group: dist.ProcessGroup, lengths: Sequence[Sequence[int]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """The way back of `heads_for_rows`: its results to its arguments."""
    found: tuple[Tensor, ...] = _Rows.apply(group, lengths, *tensors)
    return found


def _gather_rows(
    group: dist.ProcessGroup, lengths: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = [x.unflatten(2, (size, -1)).unbind(2) for x in tensors]  # of each tensor, for each rank
    shapes = [
        [(x.shape[0], rows, x.shape[2] // size, x.shape[3]) for rows in of_ranks]
        for x, of_ranks in zip(tensors, lengths, strict=True)
    ]
    received = _all_to_all(group, rank, list(zip(*parts, strict=True)), list(zip(*shapes, strict=True)))
    return tuple(torch.cat(of_ranks, dim=1) for of_ranks in zip(*received, strict=True))


def _gather_heads(
    group: dist.ProcessGroup, lengths: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = [x.split(list(of_ranks), dim=1) for x, of_ranks in zip(tensors, lengths, strict=True)]
    shapes = [
        [(x.shape[0], of_ranks[rank], *x.shape[2:])] * size
        for x, of_ranks in zip(tensors, lengths, strict=True)
    ]
    received = _all_to_all(group, rank, list(zip(*parts, strict=True)), list(zip(*shapes, strict=True)))
    return tuple(torch.cat(of_ranks, dim=2) for of_ranks in zip(*received, strict=True))


def _all_to_all(
    group: dist.ProcessGroup,
    rank: int,
    send: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
) -> list[list[Tensor]]:
    """Some tensors to each rank, as one message; those of each rank, whose shapes are given, come back."""
    packed = [torch.cat([x.reshape(-1) for x in to_one]) for to_one in send]
    sizes = [[math.prod(shape) for shape in from_one] for from_one in shapes]
    received = packed[0].new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received.view(torch.uint8),
        torch.cat(packed).view(torch.uint8),
        [sum(of_one) * received.element_size() for of_one in sizes],
        [x.numel() * x.element_size() for x in packed],
        group=group,
    )
    traffic.heads += sum(x.numel() * x.element_size() for to, x in enumerate(packed) if to != rank)
    of_ranks = received.split([sum(of_one) for of_one in sizes])
    return [
        [x.view(shape) for x, shape in zip(data.split(counts), wanted, strict=True)]
        for data, counts, wanted in zip(of_ranks, sizes, shapes, strict=True)
    ]
