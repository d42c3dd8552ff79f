"""The forward of a ring in 8 bits: each rank quantises its K and V once, and codes and scales go round.

Scales of tokens and blocks are those of one GPU, bit for bit, as no block straddles ranks (`Sharding.multiple`). So is
the mean key that smoothing subtracts, whose order of summation `quantize.mean_key` defines. Where no chunk of that sum
straddles ranks, each rank sums its own, and the sums are gathered: a ten-thousandth of K. Else the samples are, every
16th key, 1/16 of K in 16 bits, and each rank sums them all. A mean of means would do as well for the output, but then
codes would depend on the number of ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cute_attn.api import fp8_attention_quantized
from cute_attn.distributed.exchange import Ring, traffic
from cute_attn.distributed.merge import Merged
from cute_attn.distributed.ring import RingProblem
from cute_attn.distributed.sharding import Sharding
from cute_attn.kernels.config import K_SCALE_PAD, MEAN_STRIDE, QuantizeConfig
from cute_attn.problem import device_capability
from cute_attn.quantize import (
    K_GROUP,
    V_BLOCK,
    QuantizedQKV,
    mean_chunks,
    mean_of_samples,
    mean_of_sums,
    quantize_reference,
    sums_of_samples,
)
from cute_attn.tiles import DTYPE_NAMES, quantize_config

__all__ = ["forward", "part_of", "quantize_shard"]

_ALIGNMENT = 128  # bytes: of the parts of a message
# What newer torch calls otherwise.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring, problem: RingProblem, merged: Merged) -> None:
    """Attention of this rank's rows by `problem.recipe`; shapes as in `ring.attend`."""
    shard = _Shard(q, k, v, ring, problem)
    own = shard.quantize_keys()
    sizes = [shard.slots(rank)[1] for rank in range(ring.size)]
    for step, block in ring.blocks(own, sizes):
        if step == 0:
            # Now, as the first message is posted: its kernel gets its SMs between the short CTAs of the quantiser,
            # before attention takes all SMs until it ends.
            shard.quantize_queries()
        if block is None:
            continue
        owner = ring.owner(step)
        views = shard.operands(block, owner)
        _attend_to(views, ring.rank, owner, problem, merged)
        del block, views  # the memory is for the block after the next


def _attend_to(
    operands: dict[int, QuantizedQKV], rank: int, owner: int, problem: RingProblem, merged: Merged
) -> None:
    """Merge what one owner's keys give."""
    first_row, first_key = _first_rows(problem.q, rank), _first_rows(problem.k, owner)
    for call in problem.calls(rank, owner, V_BLOCK):
        s = call.sequence
        part = part_of(
            operands[s],
            *(row - first_row[s] for row in call.rows),
            *(key - first_key[s] for key in call.keys),
        )
        out, lse = fp8_attention_quantized(
            part,
            softmax_scale=problem.softmax_scale,
            window_size=call.window,
            softcap=problem.softcap,
            return_lse=True,
            backend=problem.backend,
        )
        merged.add(slice(*call.rows), out, lse)


def quantize_shard(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring, problem: RingProblem
) -> dict[int, QuantizedQKV]:
    """8-bit operands of this rank's part of each sequence that it has rows or keys of; collective."""
    shard = _Shard(q, k, v, ring, problem)
    own = shard.quantize_keys()
    shard.quantize_queries()
    return shard.operands(own, ring.rank)


class _Queries(NamedTuple):
    """Q of some rows of a sequence, as in `QuantizedQKV`."""

    q: Tensor
    q_scale: Tensor
    q_dot_mean: Tensor | None

    def first(self) -> _Queries:
        """The first row; views."""
        dot = self.q_dot_mean
        return _Queries(self.q[:, :1], self.q_scale[..., :1], None if dot is None else dot[..., :1])


class _Keys(NamedTuple):
    """K and V of some keys of a sequence, likewise."""

    k: Tensor
    vt: Tensor
    k_scale: Tensor
    v_scale: Tensor


class _Shard:
    """What a rank quantises: keys into the message for the others, which it reads itself, and then its queries.

    The quantiser wants a row of each. So the first query comes with the keys, and once more with the queries, and a key
    comes with these and goes nowhere.

    Attributes:
        rows, keys: how many the rank has of each sequence.
        config: of the quantiser; None where the reference in torch serves.
        sums: of each sequence, what `launch_quantize_into` makes the mean key of; empty without smoothing.
        queries: of each sequence that the rank has rows of; to be filled.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, ring: Ring, problem: RingProblem):
        """Collective; arguments as those of `forward`."""
        assert problem.recipe is not None
        self._q, self._k, self._v = q, k, v
        self.rank, self.recipe, self.sharding = ring.rank, problem.recipe, problem.k
        self.rows, self._first_row = _counts(problem.q, ring.rank), _first_rows(problem.q, ring.rank)
        self.keys, self._first_key = _counts(problem.k, ring.rank), _first_rows(problem.k, ring.rank)
        self._code = torch.int8 if self.recipe.qk_dtype == "int8" else torch.float8_e4m3fn
        self.config: QuantizeConfig | None = None
        capability = device_capability(q.device)
        if problem.backend != "emulator" and capability is not None and capability[0] == 9:
            self.config = quantize_config(self.recipe, q.shape[3], v.shape[3], DTYPE_NAMES[q.dtype])
        self.sums = self._mean_sums(ring) if self.recipe.smooth_k else {}
        self.queries = {s: self._new_queries(count) for s, count in self.rows.items()}

    def slots(self, rank: int) -> tuple[_Slots, int]:
        """See `_slots`."""
        return _slots(tuple(_counts(self.sharding, rank).items()), *self._sizes())

    def _sizes(self) -> tuple[int, int, int, int, torch.dtype]:
        batch, _, heads, head_dim = self._k.shape
        return batch, heads, head_dim, self._v.shape[3], self._code

    def _new_queries(self, count: int) -> _Queries:
        batch, _, heads, head_dim = self._q.shape
        empty = functools.partial(torch.empty, device=self._q.device)
        scale, dot = (empty((batch, heads, count), dtype=torch.float32) for _ in range(2))
        codes = empty((batch, count, heads, head_dim), dtype=self._code)
        return _Queries(codes, scale, dot if self.recipe.smooth_k else None)

    def rows_of(self, s: int) -> Tensor:
        """Q of a sequence; a row of zeros where the rank has none."""
        first, count = self._first_row.get(s, 0), self.rows.get(s, 0)
        return _at_least_one(self._q[:, first : first + count])

    def keys_of(self, s: int) -> tuple[Tensor, Tensor]:
        """K and V, likewise."""
        first, count = self._first_key.get(s, 0), self.keys.get(s, 0)
        return _at_least_one(self._k[:, first : first + count]), _at_least_one(
            self._v[:, first : first + count]
        )

    def _mean_sums(self, ring: Ring) -> dict[int, tuple[Tensor, int]]:
        """(sums of chunks (batch, chunks, heads_k, head_dim) float32, samples) of each sequence that has keys anywhere,
        as one GPU has them, bit for bit. Where chunks straddle ranks (the mean, as one sum, 1). Collective."""
        batch, _, heads, head_dim = self._k.shape
        places = _places(self.sharding, batch, self._k.device)
        element = torch.float32 if places.whole else self._k.dtype
        own = torch.empty((places.most, heads, head_dim), dtype=element, device=self._k.device)
        at = 0
        for s, count in self.keys.items():
            rows = -(-count // places.spans[s])
            target = own[at : at + batch * rows].view(batch, rows, heads, head_dim)
            at += batch * rows
            self._sum(s, target, places)
        every = own
        if ring.size > 1:
            every = own.new_empty(ring.size * places.most, heads, head_dim)
            _all_gather(every, own, group=ring.group)
            traffic.means += (ring.size - 1) * own.numel() * own.element_size()
        found = {}
        for s, rows in enumerate(every.index_select(0, places.order).split(places.counts)):
            length = self.sharding.seqlens[s]
            if length:
                mine = rows.view(batch, -1, heads, head_dim)
                found[s] = (mine, -(-length // MEAN_STRIDE))
                if not places.whole:
                    found[s] = (mean_of_samples(mine.float(), length).unsqueeze(1), 1)
        return found

    def _sum(self, s: int, target: Tensor, places: _Places) -> None:
        """This rank's part of a sequence's sums, or of its samples."""
        k, v = self.keys_of(s)
        if not places.whole:  # chunks of a sharding begin at multiples of MEAN_STRIDE, which divides V_BLOCK
            target.copy_(k[:, ::MEAN_STRIDE])
            return
        chunk = places.spans[s] // MEAN_STRIDE
        if self.config is None:
            target.copy_(sums_of_samples(k[:, ::MEAN_STRIDE].float(), chunk))
            return
        from cute_attn.launch import launch_key_sums

        launch_key_sums(k, v, self.recipe, self.config, chunk, target)

    def quantize_keys(self) -> Tensor:
        """The message of this rank, uint8."""
        slots, size = self.slots(self.rank)
        message = torch.empty(size, dtype=torch.uint8, device=self._k.device)
        for s, keys in _views(message, slots).items():
            queries = self.queries[s].first() if s in self.queries else self._new_queries(1)
            self._quantize(s, self.rows_of(s)[:, :1], *self.keys_of(s), queries, keys)
        return message

    def quantize_queries(self) -> None:
        """Fill `queries`."""
        slots, size = _slots(((0, 1),), *self._sizes())
        (nowhere,) = _views(torch.empty(size, dtype=torch.uint8, device=self._k.device), slots).values()
        for s, queries in self.queries.items():
            if self.sharding.seqlens[s]:  # else nothing will ask for them
                k, v = self.keys_of(s)
                self._quantize(s, self.rows_of(s), k[:, :1], v[:, :1], queries, nowhere)

    def _quantize(self, s: int, q: Tensor, k: Tensor, v: Tensor, queries: _Queries, keys: _Keys) -> None:
        sums, samples = self.sums.get(s, (None, 0))
        into = self._both(queries, keys, k.shape[1])
        if self.config is not None:
            from cute_attn.launch import launch_quantize_into

            launch_quantize_into(q, k, v, self.recipe, self.config, into, sums, samples)
            return
        mean = None if sums is None else mean_of_sums(sums, samples)
        found = quantize_reference(q, k, v, self.recipe, k_mean=mean)
        for name in (*_Queries._fields, *_Keys._fields):
            target, source = getattr(into, name), getattr(found, name)
            if target is not None:  # torch copies few of its types of a byte
                of = torch.uint8 if target.element_size() == 1 else target.dtype
                target.view(of).copy_(source.view(of))

    def operands(self, message: Tensor, owner: int) -> dict[int, QuantizedQKV]:
        """Of each sequence, this rank's queries beside the keys of an owner's message; views."""
        keys = _views(message, self.slots(owner)[0])
        return {s: self._both(self.queries[s], x, x.k.shape[1]) for s, x in keys.items() if s in self.queries}

    def _both(self, queries: _Queries, keys: _Keys, seqlen_k: int) -> QuantizedQKV:
        return QuantizedQKV(
            **queries._asdict(), **keys._asdict(), seqlen_k=seqlen_k, recipe=self.recipe, dtype=self._q.dtype
        )


def _at_least_one(x: Tensor) -> Tensor:
    return x if x.shape[1] else x.new_zeros(x.shape[0], 1, *x.shape[2:])


# ------------------------------------------------------------------------------------------------------------
# The mean key
# ------------------------------------------------------------------------------------------------------------


class _Places(NamedTuple):
    """How what ranks know of the mean key is gathered. Each gives rows (heads_k, head_dim), those of a sequence side by
    side: (batch, its chunks or samples).

    Attributes:
        whole: each rank has whole chunks of every sequence, and rows are their sums; else they are samples.
        spans: of each sequence, keys of a row.
        most: rows of the rank that has most; the others' are padded to so many.
        order: rows of all sequences, each (batch, chunks or samples), among those of all ranks; on the device.
        counts: of each sequence, its rows.
    """

    whole: bool
    spans: tuple[int, ...]
    most: int
    order: Tensor
    counts: tuple[int, ...]


@lru_cache(maxsize=256)
def _places(sharding: Sharding, batch: int, device: torch.device) -> _Places:
    pieces = [sharding.pieces(rank) for rank in range(sharding.ring)]
    spans = tuple(MEAN_STRIDE * mean_chunks(length)[0] for length in sharding.seqlens)
    whole = all(piece.start % spans[piece.sequence] == 0 for of_rank in pieces for piece in of_rank)
    if not whole:
        spans = (MEAN_STRIDE,) * len(spans)
    of_ranks = [
        {s: -(-keys // spans[s]) for s, keys in _counts(sharding, rank).items()}
        for rank in range(sharding.ring)
    ]
    most = batch * max(sum(of_rank.values()) for of_rank in of_ranks)
    index = [
        torch.empty(batch, -(-length // span), dtype=torch.int64)
        for length, span in zip(sharding.seqlens, spans, strict=True)
    ]
    for rank, of_rank in enumerate(of_ranks):
        first = dict(zip(of_rank, itertools.accumulate(of_rank.values(), initial=0), strict=False))
        taken: Counter[int] = Counter()  # rows of the pieces before
        for piece in pieces[rank]:
            s = piece.sequence
            at, count = piece.start // spans[s], -(-piece.length // spans[s])
            for b in range(batch):
                start = rank * most + batch * first[s] + b * of_rank[s] + taken[s]
                index[s][b, at : at + count] = torch.arange(start, start + count)
            taken[s] += count
    every = torch.cat([x.flatten() for x in index]).to(device)
    return _Places(whole, spans, most, every, tuple(x.numel() for x in index))


@lru_cache(maxsize=4096)
def _counts(sharding: Sharding, rank: int) -> Mapping[int, int]:
    """Rows that a ring rank has of each sequence."""
    found: dict[int, int] = {}
    for piece in sharding.pieces(rank):
        found[piece.sequence] = found.get(piece.sequence, 0) + piece.length
    return found


@lru_cache(maxsize=4096)
def _first_rows(sharding: Sharding, rank: int) -> Mapping[int, int]:
    """The first of them, counted in the rows of the rank."""
    found, first = {}, 0
    for s, count in _counts(sharding, rank).items():
        found[s] = first
        first += count
    return found


def part_of(qkv: QuantizedQKV, row: int, row_end: int, key: int, key_end: int) -> QuantizedQKV:
    """Some rows, and some keys from a multiple of 256 on; views."""
    rows = slice(row, row_end)
    return replace(
        qkv,
        q=qkv.q[:, rows],
        q_scale=qkv.q_scale[:, :, rows],
        q_dot_mean=None if qkv.q_dot_mean is None else qkv.q_dot_mean[:, :, rows],
        k=qkv.k[:, key:key_end],
        vt=qkv.vt[..., key : -(-key_end // 16) * 16],
        k_scale=qkv.k_scale[..., key // K_GROUP : -(-key_end // K_GROUP)],
        v_scale=qkv.v_scale[..., key // V_BLOCK : -(-key_end // V_BLOCK)],
        seqlen_k=key_end - key,
    )


# ------------------------------------------------------------------------------------------------------------
# Messages
# ------------------------------------------------------------------------------------------------------------

_Slots = tuple[tuple[int, tuple[tuple[int, tuple[int, ...], torch.dtype], ...]], ...]


@lru_cache(maxsize=4096)
def _slots(
    counts: tuple[tuple[int, int], ...],
    batch: int,
    heads: int,
    head_dim: int,
    head_dim_v: int,
    code: torch.dtype,
) -> tuple[_Slots, int]:
    """Where codes and scales of keys lie in a message.

    Args:
        counts: (sequence, keys).

    Returns:
        (((sequence, ((offset, shape, dtype), ..)), ..), bytes): of each sequence k, vt, k_scale and v_scale. Rows of
        k_scale are padded, as kernels read them.
    """
    slots, size = [], 0
    for s, keys in counts:
        parts = []
        groups = -(-keys // K_GROUP)
        for shape, dtype in (
            ((batch, keys, heads, head_dim), code),
            ((batch, heads, head_dim_v, -(-keys // 16) * 16), torch.float8_e4m3fn),
            ((batch, heads, -(-groups // K_SCALE_PAD) * K_SCALE_PAD), torch.float32),
            ((batch, heads, -(-keys // V_BLOCK)), torch.float32),
        ):
            parts.append((size, shape, dtype))
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        slots.append((s, tuple(parts)))
    return tuple(slots), size


def _views(message: Tensor, slots: _Slots) -> dict[int, _Keys]:
    found = {}
    for s, parts in slots:
        k, vt, k_scale, v_scale = (
            message[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for offset, shape, dtype in parts
        )
        found[s] = _Keys(k, vt, k_scale[..., : -(-k.shape[1] // K_GROUP)], v_scale)
    return found
