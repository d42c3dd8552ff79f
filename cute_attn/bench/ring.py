"""Phase ring: attention over one sequence on several ranks, beside one GPU and beside all-gather and one kernel.

Started by torchrun, a process for each rank; rank 0 reports. On a machine without a Hopper GPU the stand-ins in torch
run over gloo, which shows that it works and what is sent, and times nothing that means anything.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from cute_attn.bench import cases, record, report
from cute_attn.distributed import Sharding, ring_attention, ulysses_attention
from cute_attn.distributed.exchange import traffic
from cute_attn.distributed.ring_fp8 import part_of
from cute_attn.distributed.schedule import Mask, calls_between
from cute_attn.quantize import V_BLOCK, resolve_recipe

SEQLENS: Final = (131072,)
SEQLENS_CPU: Final = (1024,)
HEAD_DIMS: Final = (128,)
METHODS: Final = ("one_gpu", "ring", "ulysses", "all_gather")
ROUNDS: Final = 5
CALLS: Final = 3  # of a round


@dataclass(frozen=True)
class Cell:
    """One sequence of queries, keys and values."""

    seqlen: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of both products, the half of them under a causal mask."""
        full = 4.0 * self.seqlen**2 * self.heads_q * self.head_dim
        return full / 2 if self.causal else full


def cells(options: argparse.Namespace, hopper: bool) -> list[Cell]:
    """The cells of the shape options, with defaults of this phase's own."""
    head_dims = HEAD_DIMS if options.head_dim == list(cases.HEAD_DIMS) else options.head_dim
    found = []
    for seqlen, head_dim, causal in itertools.product(
        options.seqlen or (SEQLENS if hopper else SEQLENS_CPU),
        head_dims,
        {"0": (False,), "1": (True,), "both": (False, True)}[options.causal],
    ):
        heads = options.heads or (max(1, options.hidden // head_dim) if hopper else 2)
        found.append(Cell(seqlen, heads, options.heads_k or heads, head_dim, causal))
    return found


def main(options: argparse.Namespace, console: Any, argv: Sequence[str], hopper: bool) -> int:
    """Run the phase on this rank.

    Raises:
        ValueError: not started by torchrun, by one of another size than --world, or with options that it has not.
    """
    world = int(os.environ.get("WORLD_SIZE", 0))
    if not world or "RANK" not in os.environ:
        raise ValueError(
            f"--phase ring runs in processes of torchrun: torchrun --nproc-per-node {options.world or 2} -m "
            f"cute_attn.bench --phase ring --world {options.world or 2}"
        )
    if options.world not in (None, world):
        raise ValueError(f"--world is {options.world}, and torchrun has started {world}")
    if options.phase != ["ring"]:
        raise ValueError(f"--phase is {','.join(options.phase)}; ring runs alone")
    names: list[str | None] = [None]
    if options.dtype == "fp8":
        names = [resolve_recipe(name).name for name in options.recipe or ["default"]]
    if hopper:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        # Messages start before the next kernel takes all SMs.
        priority = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", device_id=device, pg_options=priority)
    else:
        dist.init_process_group("gloo")
    try:
        rows = [
            row
            for cell, name in itertools.product(cells(options, hopper), names)
            for row in measure(cell, name, options.dtype, options.rounds or ROUNDS, hopper)
        ]
        if dist.get_rank() == 0:
            show(rows, options, console, argv)
        return 0
    finally:
        dist.destroy_process_group()


def show(rows: list[dict[str, Any]], options: argparse.Namespace, console: Any, argv: Sequence[str]) -> None:
    """Print the table and write the files asked for."""
    from cute_attn.bench.__main__ import header_lines

    meta = record.collect_meta(shlex.join(["torchrun", "-m", "cute_attn.bench", *argv]))
    head = header_lines(meta)
    found = grid(rows)
    for line in head:
        console.print(line, highlight=False)
    console.print(found.rich())
    if options.json:
        record.write(options.json, meta, rows)
    if options.csv:
        report.write_csv(options.csv, rows)
    if options.markdown:
        report.write_markdown(options.markdown, head, [found])


def grid(rows: Sequence[dict[str, Any]]) -> report.Grid:
    """One line for each method of a cell."""
    lines = []
    for row in rows:
        base = next(x["ms"] for x in rows if x["kernel"] == "one_gpu" and _cell_of(x) == _cell_of(row))
        lines.append(
            [
                row["kernel"],
                row["recipe"] or row["dtype"],
                "causal" if row["causal"] else "full",
                str(row["seqlen_q"]),
                str(row["world"]),
                f"{row['ms']:.2f}",
                f"{row['tflops']:.1f}",
                f"{base / row['ms']:.2f}",
                f"{row['bytes_sent'] / 2**20:.2f}",
                "-" if row["hidden"] is None else f"{100 * row['hidden']:.0f}%",
                f"{row['rel_rmse']:.1e}",
            ]
        )
    headers = ["method", "precision", "mask", "seqlen", "ranks", "ms", "TFLOP/s", "x one GPU", "MiB sent"]
    notes = [
        "Whole forward calls from 16-bit tensors, the slowest rank, median of rounds. Sent: by the rank that sends "
        "most, in one call. Hidden: part of the time of messages during which kernels compute, from the profiler, in "
        "calls as they are timed. A message counts from when all ranks have begun it: before, its kernel waits, and "
        "nothing is sent. "
        "Difference: RMS from one GPU, of its RMS."
    ]
    return report.Grid(
        "Several ranks", [*headers, "hidden", "difference"], lines, notes=notes, text_columns=3
    )


def _cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        row[name] for name in ("seqlen_q", "heads_q", "heads_k", "head_dim", "causal", "dtype", "recipe")
    )


def measure(cell: Cell, recipe: str | None, dtype: str, rounds: int, hopper: bool) -> list[dict[str, Any]]:
    """Rows of all methods for a cell; collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if hopper else torch.device("cpu")
    element = torch.float16 if dtype == "fp16" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, cell.seqlen, heads, cell.head_dim) for heads in (cell.heads_q, cell.heads_k, cell.heads_k)]
    whole = [torch.randn(shape, generator=generator, device=device).to(element) for shape in shapes]
    backend = "auto" if hopper else "reference" if recipe is None else "emulator"
    calls = methods(cell, whole, recipe, backend)
    one = calls["one_gpu"]()
    times: dict[str, list[float]] = {name: [] for name in calls}
    sent, difference, hidden = {}, {}, {}
    for name, call in calls.items():
        before = sum(vars(traffic).values())
        out = call()
        sent[name] = sum(vars(traffic).values()) - before
        difference[name] = _difference(
            out, shard_of(name, cell, world).shard(one, rank) if name != "one_gpu" else one
        )
        hidden[name] = _hidden(call) if hopper and name != "one_gpu" else None
    for number in range(rounds):
        order = list(calls)[number % len(calls) :] + list(calls)[: number % len(calls)]
        for name in order:
            times[name].append(_time(calls[name], alone=name == "one_gpu"))
    rows = []
    for name in calls:
        mine = torch.tensor(
            [sent[name], difference[name], hidden[name] or 0.0, *times[name]], dtype=torch.float64
        )
        mine = mine.to(device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        bytes_sent, worst, share, *ms = mine.tolist()
        median = sorted(ms)[len(ms) // 2]
        rows.append(
            record.make_row(
                provider="cute_attn",
                kernel=name,
                backend=backend if not hopper else "sm90",
                phase="ring",
                dtype=dtype,
                recipe=recipe,
                batch=1,
                seqlen_q=cell.seqlen,
                seqlen_k=cell.seqlen,
                heads_q=cell.heads_q,
                heads_k=cell.heads_k,
                head_dim=cell.head_dim,
                causal=cell.causal,
                ms=median,
                ms_min=min(ms),
                ms_max=max(ms),
                tflops=cell.flops / median / 1e9,
                rel_rmse=worst,
                world=world,
                bytes_sent=int(bytes_sent),
                hidden=share if hidden[name] is not None else None,
                rounds=rounds,
            )
        )
    return rows


def shard_of(method: str, cell: Cell, world: int) -> Sharding:
    """Where a method wants the rows."""
    if method == "ulysses":
        return Sharding(cell.seqlen, 1, world)
    return Sharding(cell.seqlen, world, order="zigzag" if cell.causal else "contiguous")


def methods(
    cell: Cell, whole: Sequence[Tensor], recipe: str | None, backend: str
) -> dict[str, Callable[[], Tensor]]:
    """Forward calls of this rank; of one GPU every rank makes its own, and rank 0 is timed."""
    from cute_attn import flash_attn_func, fp8_attention

    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Callable[[], Any]] = {}
    options: dict[str, Any] = {"causal": cell.causal, "backend": backend}
    q, k, v = whole
    if recipe is None:
        found["one_gpu"] = functools.partial(flash_attn_func, q, k, v, **options)
    else:
        found["one_gpu"] = functools.partial(fp8_attention, q, k, v, recipe=recipe, **options)
    options["recipe"] = recipe
    sharding = shard_of("ring", cell, world)
    q, k, v = (sharding.shard(x, rank) for x in whole)
    found["ring"] = functools.partial(ring_attention, q, k, v, sharding, **options)
    gathered = functools.partial(gather_and_attend, q, k, v, sharding, **options)
    if cell.heads_q % world == 0 and cell.heads_k % world == 0:
        sharding = shard_of("ulysses", cell, world)
        q, k, v = (sharding.shard(x, rank) for x in whole)
        found["ulysses"] = functools.partial(ulysses_attention, q, k, v, sharding, **options)
    found["all_gather"] = gathered
    return found


def gather_and_attend(
    q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, recipe: str | None, causal: bool, backend: str
) -> Tensor:
    """The simple way: K and V of all ranks on every rank, then one kernel (two under zigzag's causal mask)."""
    from cute_attn import flash_attn_func, fp8_attention_quantized, quantize

    rank = dist.get_rank()
    traffic.keys += (sharding.world - 1) * (k.numel() + v.numel()) * k.element_size()
    keys, values = sharding.unshard(k), sharding.unshard(v)
    all_keys = Sharding(sharding.seqlens, 1, order="contiguous")
    mask = Mask(-1, 0 if causal else -1)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    calls = calls_between(sharding, all_keys, mask, rank, 0, V_BLOCK)
    operands = None if recipe is None or not calls else quantize(q, keys, values, recipe, backend=backend)
    for call in calls:
        rows, seen = slice(*call.rows), slice(*call.keys)
        if operands is None:
            more = flash_attn_func(
                q[:, rows], keys[:, seen], values[:, seen], window_size=call.window, backend=backend
            )
        else:
            part = part_of(operands, *call.rows, *call.keys)
            more = fp8_attention_quantized(part, window_size=call.window, backend=backend)
        out[:, rows] = more  # type: ignore[assignment]
    return out


def _difference(out: Tensor, one: Tensor) -> float:
    if not out.numel():
        return 0.0
    size = one.double().square().mean().sqrt()
    return float((out.double() - one.double()).square().mean().sqrt() / size)


def _time(call: Callable[[], Any], alone: bool) -> float:
    """Milliseconds of one call of `CALLS`, from a common start; 0 on ranks that only wait."""
    dist.barrier()
    if alone and dist.get_rank() != 0:
        dist.barrier()
        return 0.0
    _wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    _wait()
    spent = time.perf_counter() - start
    dist.barrier()
    return 1e3 * spent / CALLS


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------
# From the profiler
# ------------------------------------------------------------------------------------------------------------

Interval = tuple[float, float]


def _hidden(call: Callable[[], Any]) -> float | None:
    """`hidden_share` of calls as `_time` makes them, with messages from when all ranks have begun them; collective."""
    messages, others = _intervals(call)
    starts: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(starts, [start for start, _ in messages])
    # Clocks of one machine are one. Where ranks differ in messages, whose begins are which is not known.
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") and len({*map(len, starts)}) == 1:
        messages = begun_by_all(messages, starts)
    return hidden_share((messages, others))


def _intervals(call: Callable[[], Any]) -> tuple[list[Interval], list[Interval]]:
    """(messages, other kernels) on the GPU in `CALLS` calls, in their order, in microseconds of the machine's clock."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # as its events are told apart
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    messages: list[Interval] = []
    others: list[Interval] = []
    # Those that torch.profiler makes of these events count from the start of each rank's own trace.
    for event in seen.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            kind = messages if "nccl" in event.name().lower() else others
            kind.append((event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3))
    return sorted(messages), sorted(others)


def begun_by_all(messages: Sequence[Interval], starts: Sequence[Sequence[float]]) -> list[Interval]:
    """Messages without the time that their kernels wait for other ranks.

    Args:
        messages: of this rank, in their order.
        starts: of each rank, when its messages start.
    """
    begun = map(max, zip(*starts, strict=True))
    return [(min(start, end), end) for start, (_, end) in zip(begun, messages, strict=True)]


def hidden_share(intervals: tuple[Iterable[Interval], Iterable[Interval]]) -> float | None:
    """The part of the time of messages during which another kernel runs; None without messages."""
    messages, others = (_union(x) for x in intervals)
    total = sum(end - start for start, end in messages)
    if not total:
        return None
    both = sum(
        max(0.0, min(end, other_end) - max(start, other))
        for (start, end), (other, other_end) in itertools.product(messages, others)
    )
    return both / total


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, as intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
