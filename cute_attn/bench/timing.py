"""Interleaved timing: in every round each contender of a cell is timed once, so that all of them see the same
temperature.

One measurement is a batch of launches between two CUDA events. Untimed launches of the same contender go before it, for
`settle_ms`: they bring its code and data back into the caches, fill the queue, and let the GPU's power control settle
to it. Most of these kernels reach the power limit, each at a clock of its own. From rest, or behind a kernel that needs
less, a GPU runs at its highest clock for some 50 ms, then below what it can keep, and it takes 100 to 300 ms until the
speed is that of an hour; behind one that needs more it is slow for 100 ms. With 15 ms untimed and as many timed the
ratio of two kernels hung by up to 7% on which contender came before (perf/log.md, run 23). L2 is not flushed between
launches: the operands of the default grid's cells (96 MiB at 8 bits, outputs apart) exceed it.
"""

from __future__ import annotations

import gc
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cute_attn.bench import cases, gradients, peers, record

Key = TypeVar("Key")
# (launch, count, untimed) -> milliseconds of `count` launches behind `untimed` others
TimeBatch = Callable[[Callable[[], Any], int, int], float]

MAX_LAUNCHES = 1000  # of one batch
MAX_UNTIMED = 5000  # of those before it: where a launch is that short, the host or memory bounds it
SETTLE_MS = 250.0  # of untimed launches before a batch


class DeviceLost(RuntimeError):
    """The CUDA context no longer works (an illegal address, say): this process can measure nothing more.

    `rows` holds those of the cell at hand.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.rows: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch over the rounds."""

    ms: float  # median
    ms_min: float
    ms_max: float
    launches: int  # in one round
    times: tuple[float, ...]  # of each round, in their order

    @classmethod
    def of(cls, times: Sequence[float], launches: int) -> Timing:
        """From the milliseconds of each round."""
        return cls(statistics.median(times), min(times), max(times), launches, tuple(times))

    def per_call(self, calls: int) -> Timing:
        """Of one call, where a launch makes so many."""
        return Timing.of([ms / calls for ms in self.times], self.launches * calls)

    @property
    def rounds(self) -> int:
        """How many of them."""
        return len(self.times)


def time_batch_cuda(launch: Callable[[], Any], count: int, untimed: int) -> float:
    """Milliseconds of `count` launches between two events on the current stream, behind `untimed` ones."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(untimed):
        launch()
    start.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(
    launches: Mapping[Key, Callable[[], Any]],
    *,
    rounds: int,
    min_batch_ms: float,
    settle_ms: float = SETTLE_MS,
    time_batch: TimeBatch = time_batch_cuda,
    on_failure: Callable[[Key, Exception], None] = lambda key, error: None,
) -> dict[Key, Timing]:
    """Time every launch, round-robin; another one comes first in each round, after the last of the round before. A
    launch that raises is reported to `on_failure` and left out from then on.

    Raises:
        ValueError: rounds < 1, min_batch_ms is not positive or settle_ms is negative.
    """
    if rounds < 1 or not min_batch_ms > 0 or not settle_ms >= 0:
        raise ValueError(
            "rounds must be at least 1, min_batch_ms positive and settle_ms not negative, "
            f"got {rounds}, {min_batch_ms} and {settle_ms}"
        )
    counts: dict[Key, tuple[int, int]] = {}  # timed and untimed launches
    times: dict[Key, list[float]] = {}
    for key, launch in launches.items():
        try:
            estimate = max(time_batch(launch, 2, 1) / 2, 1e-6)
        except Exception as error:
            on_failure(key, error)
            continue
        counts[key] = (
            min(MAX_LAUNCHES, max(2, math.ceil(min_batch_ms / estimate))),
            min(MAX_UNTIMED, max(2, math.ceil(settle_ms / estimate))),
        )
        times[key] = []

    def run(key: Key) -> float | None:
        """Milliseconds of a launch in a batch of `key`; None where it failed."""
        try:
            return time_batch(launches[key], *counts[key]) / counts[key][0]
        except Exception as error:
            del times[key]
            on_failure(key, error)
            return None

    for number in range(rounds):
        order = list(times)
        shift = number % len(order) if order else 0
        for key in order[shift:] + order[:shift]:
            found = run(key)
            if found is not None:
                times[key].append(found)
    return {key: Timing.of(found, counts[key][0]) for key, found in times.items()}


def short_reason(error: BaseException, limit: int = 300) -> str:
    """An exception as one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _synchronize(device: torch.device) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(short_reason(error)) from error


def _first_calls(prepared: peers.Prepared, device: torch.device) -> tuple[Any, int | None]:
    """The result of a warmed-up call, and the bytes of memory that it needs beyond its operands."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            prepared.launch()  # compiles, tunes, allocates workspaces
        except RuntimeError as error:
            # torch's SDPA says why a backend refuses in warnings, and raises a bare "No available kernel".
            said = "; ".join(
                dict.fromkeys(str(warning.message).split("(Triggered")[0].strip() for warning in caught)
            )
            raise RuntimeError(f"{error} {said}".strip()) from error
    if device.type != "cuda":
        return prepared.launch(), None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = prepared.launch()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before + prepared.held_bytes


def _reference(
    case: cases.Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, differentiated: bool
) -> cases.SampledRows | gradients.SampledGradients:
    if differentiated:
        dout = gradients.make_dout(case, q.dtype, q.device)
        return gradients.sample(q, k, v, dout, causal=case.causal)
    return cases.sample(q, k, v, causal=case.causal, window=case.window, lengths=case.lengths)


def time_cell(
    case: cases.Case,
    contenders: Sequence[peers.Contender],
    *,
    rounds: int,
    min_batch_ms: float = 50.0,
    settle_ms: float = SETTLE_MS,
    device: torch.device | str = "cuda",
    seed: int = 0,
    prepare: Callable[..., peers.Prepared] = peers.prepare,
    time_batch: TimeBatch = time_batch_cuda,
) -> list[dict[str, Any]]:
    """One row for each contender, in their order: timed, or with the reason why not.

    Every output, or gradient, is compared with float64 on sampled rows first. One whose worst row exceeds
    `cases.WORST_ROW_LIMIT`, or that holds a non-finite value, is not timed: its row has status "wrong".

    Raises:
        DeviceLost: the CUDA context broke; `rows` of the exception holds what was finished of this cell.
    """
    device = torch.device(device)
    rows = {
        contender: record.make_row(
            provider=contender.provider,
            phase=contender.phase,
            dtype=contender.dtype,
            recipe=contender.recipe,
            **({"deterministic": True} if contender.deterministic else {}),
            **case.fields,
        )
        for contender in contenders
    }
    launches: dict[peers.Contender, Callable[[], Any]] = {}
    moved: dict[peers.Contender, int | None] = {}
    calls: dict[peers.Contender, int] = {}

    def fail(contender: peers.Contender, status: str, reason: str) -> None:
        rows[contender].update(status=status, reason=reason)

    def settle(contender: peers.Contender, error: Exception) -> None:
        """Note a failure; go on only where the device still answers."""
        if isinstance(error, peers.NotRun):
            fail(contender, error.status, str(error))
            return
        fail(contender, "failed", short_reason(error))
        try:
            _synchronize(device)
        except DeviceLost as lost:
            lost.rows = finished(f"not run: the CUDA context was lost in {contender.label}")
            raise

    def finished(reason: str) -> list[dict[str, Any]]:
        for row in rows.values():
            if row["status"] == "ok" and row["ms"] is None:
                row.update(status="failed", reason=reason)
        return list(rows.values())

    inputs: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    references: dict[tuple[str, bool], cases.SampledRows | gradients.SampledGradients] = {}
    with torch.no_grad():
        for contender in contenders:
            storage = "bf16" if contender.dtype == "fp8" else contender.dtype
            try:
                if storage not in inputs:
                    inputs[storage] = cases.make_inputs(case, cases.TORCH_DTYPES[storage], device, seed)
                differentiated = contender.phase in gradients.FLOP_FACTORS
                wanted = (storage, differentiated)
                if wanted not in references:
                    references[wanted] = _reference(case, *inputs[storage], differentiated)
                prepared = prepare(contender, case, *inputs[storage])
                rows[contender].update(kernel=prepared.kernel, backend=prepared.backend)
                result, peak = _first_calls(prepared, device)
                rows[contender]["peak_bytes"] = (
                    None if prepared.graph_calls else peak
                )  # a graph has its own memory
                error = None if prepared.check is None else prepared.check(result, references[wanted])
                del result
                if error is not None:
                    limit = cases.WORST_ROW_LIMIT[contender.dtype]
                    if not error.finite:
                        fail(contender, "wrong", "the output holds NaN or infinity; not timed")
                        continue
                    rows[contender].update(
                        rmse=error.rmse, rel_rmse=error.rel_rmse, worst_row_rel_rmse=error.worst_row
                    )
                    if error.worst_row > limit:
                        reason = f"relative RMSE {error.worst_row:.2g} in the worst sampled row"
                        fail(contender, "wrong", f"{reason}, above {limit}; not timed")
                        continue
                launches[contender] = prepared.launch
                moved[contender] = prepared.bytes_moved
                calls[contender] = max(1, prepared.graph_calls)
            except Exception as problem:
                settle(contender, problem)
        timed = interleaved(
            launches,
            rounds=rounds,
            min_batch_ms=min_batch_ms,
            settle_ms=settle_ms,
            time_batch=time_batch,
            on_failure=settle,
        )
        for contender, batch in timed.items():
            timing = batch.per_call(calls[contender])
            bytes_moved = moved[contender]
            attends = contender.phase != "quantize" and contender.provider not in peers.COPIES
            flops = case.flops * gradients.FLOP_FACTORS.get(contender.phase, 1.0)
            rows[contender].update(
                ms=timing.ms,
                ms_min=timing.ms_min,
                ms_max=timing.ms_max,
                tflops=flops / timing.ms / 1e9 if attends else None,
                tbps=None if bytes_moved is None else bytes_moved / timing.ms / 1e9,
                launches=timing.launches,
                rounds=timing.rounds,
                ms_of_rounds=" ".join(f"{ms:.5g}" for ms in timing.times),
            )
    launches.clear()
    inputs.clear()
    if device.type == "cuda":
        gc.collect()  # an exception kept a contender's tensors alive through its traceback
        torch.cuda.empty_cache()
    return finished("not timed")
