"""What the ranks of tests/test_distributed.py run: every public function named `case_...`, in this order, on all ranks.

A rank's process imports this module alone. Each case works out the whole problem by itself and asserts about its part.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import functools
import itertools
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first backward imports it: here once for all ranks
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cute_attn
import cute_attn.bench.__main__ as bench
from cute_attn import reference
from cute_attn.bench import peers, ring  # noqa: F401  # imported by the benchmark when it runs: here once for all ranks
from cute_attn.distributed import (
    Sharding,
    context_parallel_region,
    mesh_attention,
    ring_attention,
    ulysses_attention,
)
from cute_attn.distributed.exchange import traffic
from cute_attn.distributed.ring import RingProblem
from cute_attn.distributed.ring_fp8 import quantize_shard
from cute_attn.distributed.schedule import Mask, partners
from cute_attn.quantize import quantize_reference, resolve_recipe, unpermute_v

WORLD = 4


def run_rank(rank: int, folder: str) -> None:
    """All cases on one of `WORLD` ranks; leaves the text of each failure in `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    timeout = datetime.timedelta(seconds=40)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    pair()  # made by all ranks, before any of them
    mesh()
    for name in names():
        try:
            torch.manual_seed(0)
            globals()[name]()
            text = ""
        except Exception:
            text = f"rank {rank}\n{traceback.format_exc()}"
        Path(folder, f"{name}.{rank}").write_text(text)
        dist.barrier()
    dist.destroy_process_group()


def names() -> list[str]:
    return [name for name in globals() if name.startswith("case_")]


@functools.cache
def pair() -> dist.ProcessGroup:
    """This rank's group of two."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


@functools.cache
def mesh() -> dist.DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))


def group_for(world: int) -> dist.ProcessGroup:
    whole = dist.group.WORLD
    assert whole is not None
    return whole if world == WORLD else pair()


def tensors(
    seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, batch: int = 2, head_dim: int = 32
) -> list[Tensor]:
    """q, k, v and a gradient of the output, fp16."""
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, heads_q))
    return [torch.randn(batch, seqlen, heads, head_dim).half() for seqlen, heads in shapes]


Found = tuple[Tensor, ...]  # out, lse, dq, dk, dv


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, **options: Any) -> Found:
    """float64: out, lse and gradients of sum(out dout) + sum(lse dlse)."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    sinks = options.pop("sinks", None)
    extra = [] if sinks is None else [sinks.double().requires_grad_()]
    out, lse = reference.attention(*leaves, sinks=extra[0] if extra else None, **options)
    finite = lse.isfinite()
    ((out * dout.double()).sum() + (lse[finite] * dlse.double()[finite]).sum()).backward()
    return (out.detach(), lse.detach(), *(x.grad for x in leaves + extra))  # type: ignore[return-value]


def assert_close(found: Tensor, wanted: Tensor, eps: float) -> None:
    """To a few roundings of the type, against the typical size of what is wanted."""
    assert found.shape == wanted.shape
    infinite = wanted.isinf()
    assert torch.equal(infinite, found.isinf())
    error = (found.double() - wanted).masked_fill(infinite, 0.0).abs()
    size = wanted.masked_fill(infinite, 0.0)
    bound = eps * (size.abs() + size.square().mean().sqrt() if size.numel() else size)
    worst = (error - bound).max() if error.numel() else torch.tensor(0.0)
    assert bool((error <= bound).all()), (
        f"{float(worst):.2e} over the bound, {int((error > bound).sum())} elements"
    )


def compare(
    run: Any,
    sharding: Sharding,
    sharding_k: Sharding,
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    wanted: Found,
    dlse: Tensor,
    sinks: Tensor | None = None,
    dim: int = 1,
    eps: float = 4 * 2.0**-10,
    eps_dq: float | None = None,
    **options: Any,
) -> Found:
    """One rank's results, forward and backward, beside its part of `wanted`."""
    mine = [s.shard(x, rank, dim) for s, x in ((sharding, q), (sharding_k, k), (sharding_k, v))]
    leaves = [x.requires_grad_() for x in mine]
    if sinks is not None:
        sinks = sinks.clone().requires_grad_()
    out, lse = run(*leaves, sharding, sharding_k=sharding_k, sinks=sinks, return_lse=True, **options)
    rows = sharding.shard(dlse, rank, dim=dlse.dim() - 1)
    loss = (out.float() * sharding.shard(dout, rank, dim).float()).sum()
    (loss + (lse * rows).masked_fill(~lse.isfinite(), 0.0).sum()).backward()
    if sinks is not None:
        total = sinks.grad.double()  # type: ignore[union-attr]
        dist.all_reduce(total, group=options.get("group"))
    # Nothing is asserted before the last message: the other ranks would wait for it.
    out, lse = out.detach(), lse.detach()
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert_close(out, sharding.shard(wanted[0], rank, dim), eps)
    assert_close(lse, sharding.shard(wanted[1], rank, dim=lse.dim() - 1), 1e-5)
    assert_close(leaves[0].grad, sharding.shard(wanted[2], rank, dim), eps_dq or eps)  # type: ignore[arg-type]
    for leaf, gradient in zip(leaves[1:], wanted[3:], strict=False):
        assert_close(leaf.grad, sharding_k.shard(gradient, rank, dim), eps)  # type: ignore[arg-type]
    if sinks is not None:
        assert_close(total, wanted[5], 1e-3)
    return (out.detach(), lse.detach(), *(x.grad for x in leaves))  # type: ignore[return-value]


def check_ring(
    world: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: tuple[int, int],
    order: str = "zigzag",
    multiple: int = 8,
    window: tuple[int, int] = (-1, -1),
    causal: bool = False,
    sinks: bool = False,
    **more: Any,
) -> None:
    q, k, v, dout = tensors(seqlen_q, seqlen_k, *heads)
    dlse = torch.randn(2, heads[0], seqlen_q)
    logits = torch.randn(heads[0]) if sinks else None
    wanted = exact(q, k, v, dout, dlse, causal=causal, window=window, sinks=logits, **more)
    shardings = [Sharding(s, world, order=order, multiple=multiple) for s in (seqlen_q, seqlen_k)]
    group = group_for(world)
    options = dict(group=group, causal=causal, window_size=window, backend="reference", **more)
    compare(ring_attention, *shardings, dist.get_rank(group), q, k, v, dout, wanted, dlse, logits, **options)


# ------------------------------------------------------------------------------------------------------------
# Rings
# ------------------------------------------------------------------------------------------------------------


def case_causal_zigzag_of_two_with_grouped_heads() -> None:
    check_ring(2, 93, 93, (4, 2), causal=True)


def case_causal_zigzag_of_four() -> None:
    check_ring(4, 130, 130, (2, 2), causal=True)


def case_full_of_four_with_uneven_shards() -> None:
    check_ring(4, 75, 75, (2, 1), order="contiguous", multiple=16)


def case_fewer_rows_than_chunks() -> None:
    """Some ranks hold nothing, and take part all the same."""
    check_ring(4, 11, 11, (2, 1), causal=True)


def case_more_keys_than_queries() -> None:
    check_ring(4, 50, 120, (2, 2), causal=True)


def case_more_queries_than_keys() -> None:
    """The first rows see no key."""
    check_ring(2, 90, 40, (2, 2), causal=True)


def case_window_of_four() -> None:
    check_ring(4, 120, 120, (2, 1), order="contiguous", window=(17, 5))


def case_causal_window_zigzag() -> None:
    check_ring(4, 120, 120, (2, 1), window=(23, 0))


def case_softcap_sinks_and_scale() -> None:
    check_ring(2, 60, 60, (4, 2), causal=True, sinks=True, softcap=3.0, softmax_scale=0.4)


def case_gradients_are_deterministic() -> None:
    q, k, v, dout = tensors(64, 64, 2, 2)
    sharding = Sharding(64, 4, multiple=8)
    found = []
    for _ in range(2):
        leaves = [sharding.shard(x, dist.get_rank()).requires_grad_() for x in (q, k, v)]
        out = ring_attention(*leaves, sharding, causal=True, deterministic=True, backend="reference")
        out.backward(sharding.shard(dout, dist.get_rank()))  # type: ignore[union-attr]
        found.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


@functools.cache
def packed_problem() -> tuple[list[Tensor], Tensor, Found, tuple[int, ...]]:
    """Sequences of unlike length, one empty, one of a single row; causal."""
    lengths = (37, 0, 70, 1, 12)
    q, k, v, dout = (x[0] for x in tensors(sum(lengths), sum(lengths), 4, 2, batch=1))
    dlse = torch.randn(4, sum(lengths))
    wanted = packed_reference(q, k, v, dout, dlse, lengths, causal=True)
    return [q, k, v, dout], dlse, wanted, lengths


def packed_reference(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, lengths: tuple[int, ...], **options: Any
) -> Found:
    """`exact` of each sequence by itself."""
    parts = [
        exact(*(x[None, b:e] for x in (q, k, v, dout)), dlse[None, :, b:e], **options)
        for b, e in itertools.pairwise(itertools.accumulate(lengths, initial=0))
        if e > b
    ]
    return tuple(torch.cat([part[i][0] for part in parts], dim=1 if i == 1 else 0) for i in range(5))


def case_sequences_of_unlike_length() -> None:
    (q, k, v, dout), dlse, wanted, lengths = packed_problem()
    ends = torch.tensor([0, *itertools.accumulate(lengths)])
    sharding = Sharding.from_cu_seqlens(ends, 4, multiple=4)
    assert sharding.seqlens == lengths
    rank = dist.get_rank()
    options: dict[str, Any] = {"causal": True, "backend": "reference"}
    compare(ring_attention, sharding, sharding, rank, q, k, v, dout, wanted, dlse, dim=0, **options)


def case_windows_in_sequences_of_unlike_length() -> None:
    """Several calls of one sequence in a step; those of all sequences with one window are one launch."""
    (q, k, v, dout), dlse, _, lengths = packed_problem()
    wanted = packed_reference(q, k, v, dout, dlse, lengths, window=(9, 3))
    options: dict[str, Any] = {"window_size": (9, 3), "backend": "reference"}
    for order in ("zigzag", "contiguous"):
        sharding = Sharding(lengths, 4, order=order, multiple=4)
        compare(
            ring_attention, sharding, sharding, dist.get_rank(), q, k, v, dout, wanted, dlse, dim=0, **options
        )


def case_windows_skip_ranks() -> None:
    """A rank sends its keys to those that see some alone."""
    rank, sharding = dist.get_rank(), Sharding(128, 4, order="contiguous", multiple=8)
    q, k, v, dout = (sharding.shard(x, rank) for x in tensors(128, 128, 2, 1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    traffic.keys = traffic.gradients = 0
    out = ring_attention(*leaves, sharding, causal=True, window_size=(20, 0), backend="reference")
    sent = traffic.keys
    out.backward(dout)  # type: ignore[union-attr]
    block = 2 * k.numel() * k.element_size()
    assert sent == (block if rank < 3 else 0)  # the next rank alone looks back so far
    assert traffic.keys == (2 * block if rank < 3 else 0)
    assert traffic.gradients == (block if rank > 0 else 0)


# ------------------------------------------------------------------------------------------------------------
# 8 bits
# ------------------------------------------------------------------------------------------------------------


def problem_of(sharding: Sharding, recipe: str) -> RingProblem:
    mask = Mask(-1, 0)
    return RingProblem(
        sharding, sharding, mask, 0.2, 0.0, False, resolve_recipe(recipe), "emulator", "reference"
    )


def check_codes(recipe: str, lengths: tuple[int, int] = (1300, 300), multiple: int = 256) -> None:
    """Codes, scales and mean products of a rank are those of one process, bit for bit."""
    rank = dist.get_rank()
    q, k, v, _ = (x[0] for x in tensors(sum(lengths), sum(lengths), 2, 1, batch=1))
    sharding = Sharding(lengths, 4, multiple=multiple)
    problem = problem_of(sharding, recipe)
    mine = [sharding.shard(x, rank, 0)[None] for x in (q, k, v)]
    found = quantize_shard(*mine, problem.ring(dist.group.WORLD), problem)
    first = dict(zip(range(2), (0, lengths[0]), strict=True))
    assert set(found) == {piece.sequence for piece in sharding.pieces(rank)}
    for s, got in found.items():
        rows = slice(first[s], first[s] + lengths[s])
        whole = quantize_reference(q[None, rows], k[None, rows], v[None, rows], problem.recipe)  # type: ignore[arg-type]
        at = torch.cat([torch.arange(p.start, p.stop) for p in sharding.pieces(rank) if p.sequence == s])
        for name in ("q", "k"):
            one, many = (getattr(x, name).view(torch.uint8) for x in (whole, got))
            assert torch.equal(one[:, at], many), name
        for name in ("q_scale", "q_dot_mean"):
            if getattr(whole, name) is not None:
                assert torch.equal(getattr(whole, name)[..., at], getattr(got, name)), name
        for name, group in (("k_scale", 64), ("v_scale", 256)):
            starts = torch.unique(at // group)
            assert torch.equal(getattr(whole, name)[..., starts], getattr(got, name)), name
        one = unpermute_v(whole.vt, lengths[s]).view(torch.uint8)
        assert torch.equal(one[:, at], unpermute_v(got.vt, len(at)).view(torch.uint8))


def case_codes_are_those_of_one_process() -> None:
    check_codes("accurate")


def case_codes_where_each_rank_sums_whole_chunks() -> None:
    """The mean key from sums of ranks: of a sequence they have in turns, and of one that a single rank has."""
    before = traffic.means
    check_codes("accurate", (6000, 1000), multiple=1024)
    # Ranks have 1 to 3 chunks of a head, in float32; all send as many as the one that has most.
    assert traffic.means - before == 3 * 3 * 32 * 4


def case_sums_of_several_batches() -> None:
    """Shards of one process are those of its whole batch."""
    rank, sharding = dist.get_rank(), Sharding(5000, 4, order="contiguous", multiple=1024)
    q, k, v, _ = tensors(5000, 5000, 2, 2, batch=2)
    problem = problem_of(sharding, "accurate")
    found = quantize_shard(
        *(sharding.shard(x, rank) for x in (q, k, v)), problem.ring(dist.group.WORLD), problem
    )
    whole = quantize_reference(q, k, v, problem.recipe)  # type: ignore[arg-type]
    for piece in sharding.pieces(rank):
        one, many = (x.view(torch.uint8) for x in (whole.k[:, piece.start : piece.stop], found[0].k))
        assert torch.equal(one, many)


def case_codes_of_blocks_of_queries() -> None:
    check_codes("paper")


def check_fp8(recipe: str, world: int, **options: Any) -> None:
    """The result of one process, to the rounding of parts; gradients are those of the 16-bit backward."""
    group = group_for(world)
    rank, sharding = dist.get_rank(group), Sharding(1300, world, order=options.pop("order", "zigzag"))
    q, k, v, dout = tensors(1300, 1300, 2, 1, batch=1)
    v += 0.5
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    one, one_lse = cute_attn.fp8_attention(
        *leaves, recipe=recipe, return_lse=True, backend="emulator", **options
    )
    one.backward(dout)
    mine = [sharding.shard(x, rank).requires_grad_() for x in (q, k, v)]
    traffic.keys = 0
    out, lse = ring_attention(
        *mine, sharding, group=group, recipe=recipe, return_lse=True, backend="emulator", **options
    )
    sent = traffic.keys
    out.backward(sharding.shard(dout, rank))
    out, lse = out.detach(), lse.detach()
    whole = (-1, 0) if options.get("causal") else options["window_size"]
    receivers = sum(row[rank] for row in partners(sharding, sharding, Mask(*whole))) - 1
    codes = mine[1].numel() + mine[2].numel()
    assert receivers * codes <= sent <= 1.1 * receivers * codes  # a byte an element, and scales
    of_one = sharding.shard(one.detach().double(), rank)
    error = (out - of_one).square().mean().sqrt() / of_one.square().mean().sqrt()
    assert error < 2.0**-11
    assert_close(out, of_one, 2.0**-5)
    assert_close(lse, sharding.shard(one_lse.detach().double(), rank, dim=2), 2.0**-9)
    # Roundings of the parts, and what P = exp(S - lse) and D = rowsum(dO O) make of the other lse and out, whose P has
    # been rounded otherwise (see above for how much).
    for leaf, of_one in zip(mine, leaves, strict=True):
        assert_close(leaf.grad, sharding.shard(of_one.grad.double(), rank), 12 * 2.0**-10)  # type: ignore[union-attr, arg-type]


def case_int8_of_two() -> None:
    check_fp8("accurate", 2, causal=True)


def case_e4m3_of_four() -> None:
    check_fp8("fp8", 4, causal=True, softcap=5.0)


def case_e4m3_window_whose_keys_begin_within_blocks() -> None:
    check_fp8("fp8", 2, window_size=(300, 40), order="contiguous")


# ------------------------------------------------------------------------------------------------------------
# Ulysses, and both
# ------------------------------------------------------------------------------------------------------------


def case_ulysses_is_bit_equal() -> None:
    q, k, v, dout = tensors(61, 61, 8, 4)
    sharding, rank = Sharding(61, 1, WORLD, multiple=8), dist.get_rank()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    one, one_lse = cute_attn.flash_attn_func(*leaves, causal=True, return_lse=True, backend="reference")
    one.backward(dout)
    mine = [sharding.shard(x, rank).requires_grad_() for x in (q, k, v)]
    out, lse = ulysses_attention(*mine, sharding, causal=True, return_lse=True, backend="reference")
    out.backward(sharding.shard(dout, rank))
    assert torch.equal(out, sharding.shard(one, rank))
    assert torch.equal(lse, sharding.shard(one_lse, rank, dim=2))
    for leaf, of_one in zip(mine, leaves, strict=True):
        assert torch.equal(leaf.grad, sharding.shard(of_one.grad, rank))  # type: ignore[arg-type]


def case_ulysses_in_8_bits_is_bit_equal() -> None:
    q, k, v, _ = tensors(300, 300, 4, 4, batch=1)
    sharding, rank = Sharding(300, 1, WORLD), dist.get_rank()
    one = cute_attn.fp8_attention(q, k, v, causal=True, backend="emulator")
    mine = [sharding.shard(x, rank) for x in (q, k, v)]
    out = ulysses_attention(*mine, sharding, causal=True, recipe="default", backend="emulator")
    assert torch.equal(out, sharding.shard(one, rank))  # type: ignore[arg-type]


def case_mesh_of_rings_and_ulysses() -> None:
    q, k, v, dout = tensors(101, 101, 4, 2)
    dlse, sinks = torch.randn(2, 4, 101), torch.randn(4)
    wanted = exact(q, k, v, dout, dlse, causal=True, sinks=sinks)
    sharding = Sharding(101, 2, 2, multiple=8)
    run = functools.partial(mesh_attention, mesh=mesh())
    options: dict[str, Any] = {"causal": True, "backend": "reference"}
    compare(run, sharding, sharding, dist.get_rank(), q, k, v, dout, wanted, dlse, sinks, **options)


def case_mesh_with_sequences_of_unlike_length() -> None:
    (q, k, v, dout), dlse, wanted, lengths = packed_problem()
    sharding = Sharding(lengths, 2, 2, multiple=4)
    run = functools.partial(mesh_attention, mesh=mesh())
    options: dict[str, Any] = {"causal": True, "backend": "reference"}
    compare(run, sharding, sharding, dist.get_rank(), q, k, v, dout, wanted, dlse, dim=0, **options)


# ------------------------------------------------------------------------------------------------------------
# Refusals, on every rank
# ------------------------------------------------------------------------------------------------------------


def refused(message: str, run: Any = ring_attention, rank: int | None = None, **changed: Any) -> None:
    """`rank` alone has other arguments (None: all do), and every rank raises an error with `message`."""
    world = {"ring": 1, "ulysses": WORLD} if run is ulysses_attention else {"ring": WORLD}
    given: dict[str, Any] = {"heads": 4, "heads_k": 4, "head_dim": 32, "dtype": torch.float16, "rows": 16}
    options: dict[str, Any] = {"backend": "reference"}
    if rank is None or rank == dist.get_rank():
        for name, value in changed.items():
            (given if name in given else options)[name] = value
    sharding = options.pop("sharding", Sharding(64, multiple=8, **world))
    q, k = (
        torch.zeros(1, given["rows"], given[heads], given["head_dim"], dtype=given["dtype"])
        for heads in ("heads", "heads_k")
    )
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        run(q, k, k, sharding, **options)


def case_mismatches_raise_on_every_rank() -> None:
    refused("heads of q differs between ranks: rank 0 4, rank 1 8, rank 2 4", rank=1, heads=8)
    refused("dtype of q differs between ranks", rank=3, dtype=torch.bfloat16)
    refused("window differs", rank=2, causal=True)
    refused("softmax_scale differs", rank=0, softmax_scale=0.5)
    of_16 = Sharding(64, WORLD, order="contiguous", multiple=16)  # as many rows on each rank
    refused("sharding differs", rank=0, sharding=of_16)


def case_what_one_rank_refuses_raises_on_every_rank() -> None:
    refused(r"q has 17 rows on rank 2; allowed: sharding.length\(2\), 16|rank 2 has refused", rank=2, rows=17)
    refused("head_dim of q is 33|rank 1 has refused its arguments: head_dim of q is 33", rank=1, head_dim=33)
    refused("softcap is -1|rank 0 has refused", rank=0, softcap=-1.0)


def case_what_is_not_allowed() -> None:
    refused("q has 6 heads; allowed: a multiple of the 4 ranks", ulysses_attention, heads=6, heads_k=2)
    refused("k has 2 heads; allowed: a multiple of the 4 ranks", ulysses_attention, heads_k=2)
    refused("sharding.ring is 2; allowed: the size of its group, 4", sharding=Sharding(64, 2))
    refused("sharding is a int; allowed: a Sharding", sharding=4)
    refused(
        "multiple of a sharding is 8; allowed with a recipe: multiples of 256",
        recipe="fp8",
        backend="emulator",
    )
    refused("scales of tokens and blocks", recipe="naive", backend="emulator")
    refused("mesh has 1 dimensions", functools.partial(mesh_attention, mesh=init_device_mesh("cpu", (4,))))
    refused("group is a str", group="all")


def case_unshard_undoes_shard() -> None:
    for sharding in (Sharding(50, 4, multiple=4), Sharding((9, 0, 30), 2, 2, multiple=4)):
        x = torch.randn(3, sharding.total, 2)
        found = sharding.unshard(sharding.shard(x, dist.get_rank()))
        assert torch.equal(found, x)


def case_in_place_of_torchs_function() -> None:
    """Within torch's context-parallel region, whose sharding it takes; and where it is not to be used."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    q, k, v, _ = (x.transpose(1, 2).contiguous() for x in tensors(64, 64, 4, 4))
    whole = init_device_mesh("cpu", (WORLD,))
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    mine = [x.clone() for x in (q, k, v)]
    with (
        context_parallel(whole, buffers=mine, buffer_seq_dims=[2, 2, 2]),
        context_parallel_region(whole, backend="reference") as log,
    ):
        out = F.scaled_dot_product_attention(*mine, is_causal=True)
        with pytest.raises(NotImplementedError, match="dropout_p is 0"):
            F.scaled_dot_product_attention(*mine, dropout_p=0.5)
        with pytest.raises(NotImplementedError, match="attn_mask is given"):
            F.scaled_dot_product_attention(*mine, torch.ones(1, dtype=torch.bool))
        [found] = context_parallel_unshard(whole, [out], [2])
    assert_close(found, wanted, 2.0**-9)
    assert log.kernels == {"ring_attention(4 ranks)": 1}
    assert F.scaled_dot_product_attention(q, k, v).shape == q.shape  # torch's again


# ------------------------------------------------------------------------------------------------------------
# Programs
# ------------------------------------------------------------------------------------------------------------


def run_programs(rank: int, folder: str, ports: list[int]) -> None:
    """The example and the benchmark, as torchrun starts them."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(ports[0])
    sys.stdout = Path(folder, f"out.{rank}").open("w")  # noqa: SIM115  # until the end of the process
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_ring.py"))
    losses = example["main"](["--seqlen", "388", "--steps", "6"])
    Path(folder, f"losses.{rank}").write_text(repr(losses))
    os.environ["MASTER_PORT"] = str(ports[1])
    given = [
        "--phase",
        "ring",
        "--world",
        "2",
        "--seqlen",
        "512",
        "--head-dim",
        "32",
        "--rounds",
        "1",
        "--causal",
        "1",
    ]
    for name in ("json", "markdown", "csv"):
        given += [f"--{name}", f"{folder}/ring.{name}"]
    assert bench.main(given) == 0
    sys.stdout.close()


# ------------------------------------------------------------------------------------------------------------
# A rank that dies
# ------------------------------------------------------------------------------------------------------------


def run_until_one_dies(rank: int, folder: str) -> None:
    """Two ranks; the second ends between two calls, without a word."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    timeout = datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    sharding = Sharding(64, 2, multiple=8)
    x = torch.zeros(1, 32, 2, 32, dtype=torch.float16)
    attend = functools.partial(ring_attention, x, x, x, sharding, backend="reference")
    attend()
    if rank == 1:
        os._exit(0)
    try:
        attend()
    except RuntimeError as error:
        Path(folder, "error").write_text(str(error))
    os._exit(0)  # not by way of a group of which one half is dead


# ------------------------------------------------------------------------------------------------------------
# On GPUs
# ------------------------------------------------------------------------------------------------------------


GPU_LIMIT = 180  # seconds of all ranks; kernels that are not in the disk cache compile meanwhile
GPU_TIMEOUT = 30  # of a message


def run_gpu_rank(rank: int, folder: str, ranks: int) -> None:
    """The kernels, keys sent by NCCL: beside float64, and in 8 bits beside one call."""
    begin = time.monotonic()

    def say(what: str) -> None:
        print(f"rank {rank} of {ranks}, {time.monotonic() - begin:5.1f} s: {what}", flush=True)

    faulthandler.dump_traceback_later(GPU_TIMEOUT + 10, repeat=True)  # one that hangs says where
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    timeout = datetime.timedelta(seconds=GPU_TIMEOUT)
    dist.init_process_group(
        "nccl",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        device_id=torch.device("cuda", rank),
    )
    say("NCCL is there")
    try:
        on_gpu(rank, ranks, say)
        text = ""
    except Exception:
        text = f"rank {rank}\n{traceback.format_exc()}"
        say(text)
    Path(folder, f"gpu.{rank}").write_text(text)
    if text:
        os._exit(1)  # not by way of a group of which others wait for this rank
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    say("done")


def check_gpu_codes(rank: int, ranks: int) -> None:
    """Where each rank sums whole chunks of the mean key, codes, scales and mean products are those of one call."""
    seqlen = 8192
    torch.manual_seed(1)  # ranks that are threads have one generator
    q, k, v, _ = (x.cuda() for x in tensors(seqlen, seqlen, 4, 2, head_dim=128))
    whole, sharding = cute_attn.quantize(q, k, v, "accurate"), Sharding(seqlen, ranks)
    problem = dataclasses.replace(problem_of(sharding, "accurate"), backend="auto")
    ring_of = problem.ring(dist.group.WORLD if ranks > 1 else None)
    got = quantize_shard(*(sharding.shard(x, rank) for x in (q, k, v)), ring_of, problem)[0]
    for name in ("q", "k"):
        one, many = (getattr(x, name).view(torch.uint8) for x in (whole, got))
        assert torch.equal(sharding.shard(one, rank), many), name
    for name in ("q_scale", "q_dot_mean"):
        assert torch.equal(sharding.shard(getattr(whole, name), rank, 2), getattr(got, name)), name
    positions = sharding.positions(rank).to(q.device)
    for name, group in (("k_scale", 64), ("v_scale", 256)):
        assert torch.equal(getattr(whole, name)[..., torch.unique(positions // group)], getattr(got, name)), (
            name
        )
    one, many = (
        unpermute_v(vt, n).view(torch.uint8) for vt, n in ((whole.vt, seqlen), (got.vt, len(positions)))
    )
    assert torch.equal(sharding.shard(one, rank), many)


def assert_near(found: Tensor, wanted: Tensor, bound: float, name: str, say: Callable[[str], None]) -> None:
    """What a rank has in 8 bits, beside the part of one call; both may be empty."""
    error, size = float((found.double() - wanted.double()).norm()), float(wanted.double().norm())
    say(f"{name}: {error / (size or 1.0):.1e} from one call")
    assert found.shape == wanted.shape and error <= bound * size, f"{name}: {error} of {size}"


def check_gpu_packed(rank: int, ranks: int, say: Callable[[str], None]) -> None:
    """Sequences of unlike length; causal. In 8 bits beside a call for each."""
    lengths = (700, 0, 1, 1300)
    torch.manual_seed(2)  # ranks that are threads have one generator
    q, k, v, dout = (x[0].cuda() for x in tensors(sum(lengths), sum(lengths), 4, 2, batch=1, head_dim=128))
    dlse = torch.randn(4, sum(lengths)).cuda()
    wanted = packed_reference(q, k, v, dout, dlse, lengths, causal=True)
    sharding = Sharding(lengths, ranks)
    options: dict[str, Any] = {"causal": True, "dim": 0, "eps": 2.0**-7}
    compare(ring_attention, sharding, sharding, rank, q, k, v, dout, wanted, dlse, **options)
    say("16 bits, packed")
    out = ring_attention(
        *(sharding.shard(x, rank, 0) for x in (q, k, v)), sharding, recipe="accurate", causal=True
    )
    parts = [[x[None] for x in of_one] for of_one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    calls = [cute_attn.fp8_attention(*x, recipe="accurate", causal=True) for x in parts if x[0].numel()]
    one = torch.cat([x[0] for x in calls])  # type: ignore[misc]
    assert_near(out, sharding.shard(one, rank, 0), 2.0**-8, "accurate, packed", say)  # type: ignore[arg-type]


def on_gpu(rank: int, ranks: int, say: Callable[[str], None]) -> None:
    seqlen = 1100
    torch.manual_seed(0)
    q, k, v, dout = (x.cuda() for x in tensors(seqlen, seqlen, 4, 2, head_dim=128))
    dlse = torch.randn(2, 4, seqlen).cuda()
    sharding, in_order = Sharding(seqlen, ranks), Sharding(seqlen, ranks, order="contiguous")
    for window in ((-1, 0), (300, 20), (-1, -1)):
        wanted = exact(q, k, v, dout, dlse, window=window)
        compare(
            ring_attention,
            sharding,
            sharding,
            rank,
            q,
            k,
            v,
            dout,
            wanted,
            dlse,
            eps=2.0**-7,
            # P, O and dS rounded to fp16, in float64 else, are 1.07 * 2^-7 off in dQ of the sixth row: D is of that O
            eps_dq=2.0**-6,
            window_size=window,
        )
        say(f"16 bits, window {window}")
    for recipe, shards, window in (
        ("accurate", sharding, (-1, 0)),
        ("fp8", sharding, (-1, 0)),
        ("paper", sharding, (-1, 0)),
        ("accurate", in_order, (-1, -1)),
        ("fp8", in_order, (300, 40)),
    ):
        one = cute_attn.fp8_attention(q, k, v, recipe=recipe, window_size=window)
        mine = [shards.shard(x, rank) for x in (q, k, v)]
        out = ring_attention(*mine, shards, recipe=recipe, window_size=window)
        # Two roundings to 16 bits more, and P near e4m3's smallest, as each part has a reference of its own.
        assert_near(out, shards.shard(one, rank), 2.0**-8, f"{recipe}, window {window}", say)  # type: ignore[arg-type]
    check_gpu_packed(rank, ranks, say)
    check_gpu_codes(rank, ranks)
    say("codes where each rank sums whole chunks")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cute_attn.fp8_attention(*leaves, causal=True).backward(dout)
    mine = [sharding.shard(x, rank).requires_grad_() for x in (q, k, v)]
    ring_attention(*mine, sharding, recipe="default", causal=True).backward(sharding.shard(dout, rank))  # type: ignore[union-attr]
    for leaf, of_one in zip(mine, leaves, strict=True):
        assert_near(leaf.grad, sharding.shard(of_one.grad, rank), 2.0**-7, "gradient with a recipe", say)  # type: ignore[arg-type]
    across = Sharding(seqlen, 1, ranks)
    if ranks <= 2:
        mine = [across.shard(x, rank) for x in (q, k, v)]
        one = cute_attn.fp8_attention(q, k, v, causal=True)
        out = ulysses_attention(*mine, across, recipe="default", causal=True)
        assert torch.equal(out, across.shard(one, rank))  # type: ignore[arg-type]
        say("heads for rows")
