"""Which rank holds which rows of a sequence. Plain data: every rank works out the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cute_attn.distributed.groups import Group, group_of
from cute_attn.quantize import V_BLOCK

__all__ = ["Piece", "Sharding"]

ORDERS: Final = ("zigzag", "contiguous")


class Piece(NamedTuple):
    """Neighbouring rows of one sequence.

    Attributes:
        sequence: its number.
        start, stop: first row, and the one behind the last, counted in the sequence.
    """

    sequence: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Rows."""
        return self.stop - self.start


@dataclass(frozen=True, init=False)
class Sharding:
    """How the rows of sequences are dealt out to ring * ulysses ranks.

    The order is that of ring attention (arXiv 2310.01889) and, zigzag, of its balanced form for causal masks (striped
    attention, arXiv 2311.09431, by chunks): each sequence is cut into 2 * ring chunks, and ring rank r holds chunks r
    and 2 * ring - 1 - r, so that every rank sees as many keys under a causal mask. "contiguous" cuts into `ring`
    chunks: the one for sliding windows, whose ends only neighbours then share, and as good as any for a full mask.
    Ulysses (arXiv 2309.14509) divides the rows of a ring rank, in their order, between the `ulysses` ranks of its
    group. Rank ring_rank * ulysses + ulysses_rank of a mesh holds part ulysses_rank of shard ring_rank.

    Attributes:
        seqlens: rows of each sequence; an int is one sequence, for tensors (batch, seqlen, heads, head_dim) of any
            batch. Several are for tensors (total, heads, head_dim), whose sequences stand behind one another.
        ring: ranks that K and V go round.
        ulysses: ranks that exchange heads for rows.
        order: "zigzag" or "contiguous".
        multiple: chunks begin at multiples of it. The default is the largest block that the quantiser scales, so
            that no block straddles ranks; 16-bit attention takes any.

    Raises:
        TypeError: a field of a wrong type.
        ValueError: a negative length, a size below 1, or an unknown order.
    """

    seqlens: tuple[int, ...]
    ring: int
    ulysses: int
    order: str
    multiple: int

    def __init__(
        self,
        seqlens: int | Sequence[int],
        ring: int,
        ulysses: int = 1,
        order: str = "zigzag",
        multiple: int = V_BLOCK,
    ):
        """Check the fields; see the class."""
        lengths: object = (seqlens,) if isinstance(seqlens, int) else seqlens
        if not isinstance(lengths, Sequence) or isinstance(lengths, str):
            raise TypeError(f"seqlens is a {type(seqlens).__name__}; allowed: an int or a sequence of ints")
        sizes: dict[str, object] = {"ring": ring, "ulysses": ulysses, "multiple": multiple}
        for name, values, least in (
            ("seqlens", tuple(lengths), 0),
            *((name, (size,), 1) for name, size in sizes.items()),
        ):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"{name} holds a {type(value).__name__}; allowed: an int >= {least}")
                if value < least:
                    raise ValueError(f"{name} holds {value}; allowed: an int >= {least}")
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; allowed: {', '.join(map(repr, ORDERS))}")
        for name, value in {"seqlens": tuple(lengths), **sizes, "order": order}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | Sequence[int],
        ring: int,
        ulysses: int = 1,
        order: str = "zigzag",
        multiple: int = V_BLOCK,
    ) -> Sharding:
        """Of sequences with rows cu_seqlens[b] to cu_seqlens[b + 1]. A tensor is read on the host.

        Raises:
            ValueError: no end at all, a first one that is not 0, or ends that fall.
        """
        ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        if not ends or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
            raise ValueError(f"cu_seqlens is {ends}; allowed: ends from 0 on that never fall")
        return cls(tuple(b - a for a, b in itertools.pairwise(ends)), ring, ulysses, order, multiple)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.ring * self.ulysses

    @property
    def total(self) -> int:
        """Rows of all sequences."""
        return sum(self.seqlens)

    def pieces(self, ring_rank: int) -> tuple[Piece, ...]:
        """What ring rank `ring_rank` and its Ulysses group hold, in the order of its rows. Empty ones are left out."""
        return _pieces(self, ring_rank)

    def length(self, rank: int) -> int:
        """Rows of rank `rank` of the mesh."""
        start, stop = self._part(rank)
        return stop - start

    def _part(self, rank: int) -> tuple[int, int]:
        """Of the rows of its ring rank, the first of `rank`, and the one behind its last."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}; allowed: 0 to {self.world - 1}")
        ring_rank, part = divmod(rank, self.ulysses)
        rows = sum(piece.length for piece in self.pieces(ring_rank))
        return part * rows // self.ulysses, (part + 1) * rows // self.ulysses

    def rows(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """(length(rank),) int64: where each of its rows stands among those of all sequences behind one another."""
        return self._numbers(rank, device, list(itertools.accumulate(self.seqlens, initial=0)))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """(length(rank),) int64: the place of each row in its sequence, for position embeddings."""
        return self._numbers(rank, device, [0] * len(self.seqlens))

    def _numbers(self, rank: int, device: torch.device | str, first: list[int]) -> Tensor:
        start, stop = self._part(rank)
        ranges = [
            torch.arange(first[s] + a, first[s] + b, device=device)
            for s, a, b in self.pieces(rank // self.ulysses)
        ]
        return torch.cat([torch.arange(0, device=device), *ranges])[start:stop]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The rows of `rank`, a copy; autograd knows it.

        Args:
            x: any tensor with all rows in dimension `dim`: 1 of (batch, seqlen, ...), 0 of (total, ...).

        Raises:
            ValueError: another number of rows, or no such rank.
        """
        if x.shape[dim] != self.total:
            raise ValueError(f"x has {x.shape[dim]} rows in dimension {dim}; allowed: {self.total}")
        return x.index_select(dim, self.rows(rank, x.device))

    @torch.no_grad()
    def unshard(self, x: Tensor, group: Group = None, dim: int = 1) -> Tensor:
        """All rows on every rank, from those of each. Collective; it has no gradient.

        Args:
            x: rows of this rank in dimension `dim`; the other dimensions are alike on all ranks.
            group: the ranks, in the order of the mesh; default all.

        Raises:
            ValueError: another number of rows or ranks.
        """
        process_group = group_of(group)
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        if world != self.world:
            raise ValueError(f"group has {world} ranks; allowed: those of the sharding, {self.world}")
        lengths = [self.length(r) for r in range(world)]
        if x.shape[dim] != lengths[rank]:
            raise ValueError(f"x has {x.shape[dim]} rows in dimension {dim}; allowed: {lengths[rank]}")
        padded = x.new_zeros((max(lengths), *x.movedim(dim, 0).shape[1:]))
        padded[: lengths[rank]] = x.movedim(dim, 0)
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=process_group)
        whole = padded.new_empty((self.total, *padded.shape[1:]))
        for r, part in enumerate(parts):
            whole[self.rows(r, x.device)] = part[: lengths[r]]
        return whole.movedim(0, dim).contiguous()


@lru_cache(maxsize=4096)
def _pieces(sharding: Sharding, ring_rank: int) -> tuple[Piece, ...]:
    chunks = 2 * sharding.ring if sharding.order == "zigzag" else sharding.ring
    mine = (ring_rank, chunks - 1 - ring_rank) if sharding.order == "zigzag" else (ring_rank,)
    found, before = [], 0
    for sequence, length in enumerate(sharding.seqlens):
        units = -(-length // sharding.multiple)
        # Chunks differ by one unit at most. Which of them get one more goes on from sequence to sequence, so that many
        # short ones do not all fall to the same rank.
        turn = before % chunks
        for chunk in mine:
            start, stop = (
                min((i * units + turn) // chunks * sharding.multiple, length) for i in (chunk, chunk + 1)
            )
            if start < stop:
                found.append(Piece(sequence, start, stop))
        before += units
    return tuple(found)
