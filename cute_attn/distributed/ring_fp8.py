"""The forward of a ring in 8 bits: each rank quantises its K and V once, and codes and scales go round.

Scales of tokens and blocks are those of one GPU, bit for bit, as no block straddles ranks (`Sharding.multiple`). So is
the mean key that smoothing subtracts: its samples, every 16th key, are gathered from all ranks, and each rank sums them
in the order of `quantize.mean_key`. A mean of means would do as well for the output and would cost less than their 1/16
of K in 16 bits, but then codes would depend on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from cute_attn.api import fp8_attention_quantized
from cute_attn.distributed.exchange import Ring, traffic
from cute_attn.distributed.merge import Merged
from cute_attn.distributed.ring import RingProblem
from cute_attn.distributed.sharding import Sharding
from cute_attn.kernels.config import MEAN_STRIDE
from cute_attn.problem import device_capability
from cute_attn.quantize import (
    K_GROUP,
    V_BLOCK,
    QuantizedQKV,
    mean_of_samples,
    quantize_reference,
)
from cute_attn.tiles import DTYPE_NAMES, quantize_config

__all__ = ["forward", "mean_keys", "part_of", "quantize_shard"]

_ALIGNMENT = 128  # bytes: of the parts of a message


def forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring, problem: RingProblem, merged: Merged) -> None:
    """Attention of this rank's rows by `problem.recipe`; shapes as in `ring.attend`."""
    means = _means(k, ring, problem)
    operands = _quantize_keys(k, v, means, ring, problem)
    own = _packed(operands, k, v, problem, ring.rank) if ring.size > 1 else k.new_empty(0, dtype=torch.uint8)
    sizes = [_layout(k, v, problem, rank)[1] for rank in range(ring.size)]
    for step, block in ring.blocks(own, sizes):
        if step == 0:
            # Now, as the first message is posted: its kernel gets its SMs between the short CTAs of the quantiser,
            # before attention takes all SMs until it ends.
            operands = _add_queries(q, operands, means, ring, problem)
        if block is None:
            continue
        owner = ring.owner(step)
        views = operands if step == 0 else _unpacked(block, operands, k, v, problem, owner)
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
    means = _means(k, ring, problem)
    return _add_queries(q, _quantize_keys(k, v, means, ring, problem), means, ring, problem)


def _means(k: Tensor, ring: Ring, problem: RingProblem) -> dict[int, Tensor]:
    assert problem.recipe is not None
    return mean_keys(k, problem.k, ring) if problem.recipe.smooth_k else {}


def _quantize_keys(
    k: Tensor, v: Tensor, means: dict[int, Tensor], ring: Ring, problem: RingProblem
) -> dict[int, QuantizedQKV]:
    """Of each sequence that this rank has rows or keys of; without queries yet."""
    rows, keys = _counts(problem.q, ring.rank), _counts(problem.k, ring.rank)
    first = _first_rows(problem.k, ring.rank)
    found = {}
    for s in sorted(rows.keys() | keys.keys()):
        start, count = first.get(s, 0), keys.get(s, 0)
        k_s, v_s = (_at_least_one(x[:, start : start + count]) for x in (k, v))
        q_s = k.new_zeros(k.shape[0], 1, *k.shape[2:])
        found[s] = part_of(_quantize(q_s, k_s, v_s, problem, means.get(s)), 0, 0, 0, count)
    return found


def _add_queries(
    q: Tensor,
    operands: dict[int, QuantizedQKV],
    means: dict[int, Tensor],
    ring: Ring,
    problem: RingProblem,
) -> dict[int, QuantizedQKV]:
    """The operands of `_quantize_keys` with this rank's queries."""
    rows, first = _counts(problem.q, ring.rank), _first_rows(problem.q, ring.rank)
    found = {}
    for s, keys in operands.items():
        start, count = first.get(s, 0), rows.get(s, 0)
        q_s = _at_least_one(q[:, start : start + count])
        heads_k, head_dim_v = keys.vt.shape[1:3]
        k_s, v_s = (q.new_zeros(q.shape[0], 1, heads_k, dim) for dim in (q.shape[3], head_dim_v))
        whole = part_of(_quantize(q_s, k_s, v_s, problem, means.get(s)), 0, count, 0, 0)
        found[s] = replace(keys, q=whole.q, q_scale=whole.q_scale, q_dot_mean=whole.q_dot_mean)
    return found


def _at_least_one(x: Tensor) -> Tensor:
    """A rank may have rows of a sequence and none of its keys, or keys alone; the quantiser wants one of each."""
    return x if x.shape[1] else x.new_zeros(x.shape[0], 1, *x.shape[2:])


def _quantize(q: Tensor, k: Tensor, v: Tensor, problem: RingProblem, k_mean: Tensor | None) -> QuantizedQKV:
    assert problem.recipe is not None
    capability = device_capability(q.device)
    if problem.backend == "emulator" or capability is None or capability[0] != 9:
        return quantize_reference(q, k, v, problem.recipe, k_mean=k_mean)
    from cute_attn.launch import launch_quantize

    config = quantize_config(problem.recipe, q.shape[3], v.shape[3], DTYPE_NAMES[q.dtype])
    return launch_quantize(q, k, v, problem.recipe, config, k_mean=k_mean)


def mean_keys(k: Tensor, sharding: Sharding, ring: Ring) -> dict[int, Tensor]:
    """`quantize.mean_key` of each sequence over all ranks, bit for bit; collective.

    Args:
        k: (batch, keys of this rank, heads_k, head_dim).

    Returns:
        of each sequence that has keys, (batch, heads_k, head_dim) float32.
    """
    parts = [_samples(sharding, rank) for rank in range(ring.size)]
    # Chunks begin at multiples of MEAN_STRIDE, which divides V_BLOCK.
    own = torch.cat(
        [k[:, :0], *(k[:, first:end:MEAN_STRIDE] for _, _, _, first, end in parts[ring.rank])], dim=1
    )
    counts = [sum(count for _, _, count, _, _ in of_rank) for of_rank in parts]
    shards = [own]
    if ring.size > 1:
        padded = own.new_zeros(max(counts), *own.movedim(1, 0).shape[1:])
        padded[: counts[ring.rank]] = own.movedim(1, 0)
        gathered = [torch.empty_like(padded) for _ in range(ring.size)]
        dist.all_gather(gathered, padded, group=ring.group)
        traffic.means += (ring.size - 1) * padded.numel() * padded.element_size()
        shards = [x[:count].movedim(0, 1) for x, count in zip(gathered, counts, strict=True)]
    sums = {}
    for s, length in enumerate(sharding.seqlens):
        if length:
            shape = (k.shape[0], -(-length // MEAN_STRIDE), *k.shape[2:])
            sums[s] = torch.empty(shape, dtype=torch.float32, device=k.device)
    for of_rank, shard in zip(parts, shards, strict=True):
        at = 0
        for s, start, count, _, _ in of_rank:
            sums[s][:, start : start + count] = shard[:, at : at + count]
            at += count
    return {s: mean_of_samples(x, sharding.seqlens[s]) for s, x in sums.items()}


def _samples(sharding: Sharding, rank: int) -> list[tuple[int, int, int, int, int]]:
    """Of each piece of a rank: (sequence, its first sample, samples, its first row on the rank, the one behind)."""
    found, first = [], 0
    for piece in sharding.pieces(rank):
        count = -(-piece.length // MEAN_STRIDE)
        found.append((piece.sequence, piece.start // MEAN_STRIDE, count, first, first + piece.length))
        first += piece.length
    return found


def _counts(sharding: Sharding, rank: int) -> dict[int, int]:
    """Rows that a ring rank has of each sequence."""
    found: dict[int, int] = {}
    for piece in sharding.pieces(rank):
        found[piece.sequence] = found.get(piece.sequence, 0) + piece.length
    return found


def _first_rows(sharding: Sharding, rank: int) -> dict[int, int]:
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

_Slots = list[tuple[int, tuple[int, tuple[int, ...], torch.dtype]]]


def _layout(k: Tensor, v: Tensor, problem: RingProblem, rank: int) -> tuple[_Slots, int]:
    """Where codes and scales of a rank's keys lie in its message.

    Returns:
        ([(sequence, (offset, shape, dtype))], bytes): of each sequence k, vt, k_scale and v_scale in turn.
    """
    assert problem.recipe is not None
    batch, _, heads, head_dim = k.shape
    code = torch.int8 if problem.recipe.qk_dtype == "int8" else torch.float8_e4m3fn
    slots: _Slots = []
    size = 0
    for s, keys in _counts(problem.k, rank).items():
        for shape, dtype in (
            ((batch, keys, heads, head_dim), code),
            ((batch, heads, v.shape[3], -(-keys // 16) * 16), torch.float8_e4m3fn),
            ((batch, heads, -(-keys // K_GROUP)), torch.float32),
            ((batch, heads, -(-keys // V_BLOCK)), torch.float32),
        ):
            slots.append((s, (size, shape, dtype)))
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return slots, size


def _packed(
    operands: dict[int, QuantizedQKV], k: Tensor, v: Tensor, problem: RingProblem, rank: int
) -> Tensor:
    """The message of this rank, uint8."""
    slots, size = _layout(k, v, problem, rank)
    message = torch.zeros(size, dtype=torch.uint8, device=k.device)
    views = _views(message, slots)
    for s, targets in views.items():
        qkv = operands[s]
        for target, source in zip(targets, (qkv.k, qkv.vt, qkv.k_scale, qkv.v_scale), strict=True):
            target.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))
    return message


def _views(message: Tensor, slots: _Slots) -> dict[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    for s, (offset, shape, dtype) in slots:
        part = message[offset : offset + math.prod(shape) * dtype.itemsize]
        found.setdefault(s, []).append(part.view(dtype).view(shape))
    return found


def _unpacked(
    block: Tensor,
    operands: dict[int, QuantizedQKV],
    k: Tensor,
    v: Tensor,
    problem: RingProblem,
    owner: int,
) -> dict[int, QuantizedQKV]:
    """This rank's queries of each sequence beside the keys of a message; views."""
    slots, _ = _layout(k, v, problem, owner)
    return {
        s: replace(
            operands[s],
            k=parts[0],
            vt=parts[1],
            k_scale=parts[2],
            v_scale=parts[3],
            seqlen_k=parts[0].shape[1],
        )
        for s, parts in _views(block, slots).items()
        if s in operands
    }
