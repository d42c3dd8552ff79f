"""Host time of a call: from Python's call to its return, while the GPU keeps up.

On tensors so small that the kernels end before the next call could launch more, the time between two
synchronisations is the host's. A batch is short against the queue of launches (about a thousand), which starts
empty. On short sequences, or where a GPU waits for Python, this is what a call costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn.bench import cases, peers, record, timing
from cute_attn.bench.report import Grid

CASE = cases.Case(batch=1, seqlen_q=64, seqlen_k=64, heads_q=2, heads_k=2, head_dim=128, causal=False)
CALLS = 50  # of a batch
BATCHES = 21
PHASE = "overhead"

_Call = Callable[[], Any]


def batch_times(
    call: _Call,
    *,
    batches: int = BATCHES,
    calls: int = CALLS,
    synchronize: _Call = torch.cuda.synchronize,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Microseconds of one call in each of `batches` batches, after one batch that is not counted."""
    times = []
    for _ in range(batches + 1):
        synchronize()
        start = clock()
        for _ in range(calls):
            call()
        times.append((clock() - start) / calls * 1e6)
    synchronize()
    return times[1:]


def _our_calls(recipe: str, q: Tensor, k: Tensor, v: Tensor, backend: str) -> dict[str, Callable[[], _Call]]:
    from cute_attn import api

    def quantized() -> _Call:
        qkv = api.quantize(q, k, v, recipe, backend=backend)
        return lambda: api.fp8_attention_quantized(qkv, backend=backend)

    options: dict[str, Any] = {"recipe": recipe, "backend": backend}
    return {
        "fp8_attention": lambda: lambda: api.fp8_attention(q, k, v, **options),
        "fp8_attention, lse": lambda: lambda: api.fp8_attention(q, k, v, return_lse=True, **options),
        "quantize": lambda: lambda: api.quantize(q, k, v, **options),
        "fp8_attention_quantized": quantized,
    }


def _other_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[tuple[str, str, str], Callable[[], _Call]]:
    """By provider, dtype and name."""

    def fa3(*tensors: Tensor, **descales: Tensor) -> _Call:
        function = peers.need("flash_attn_interface").flash_attn_func
        return lambda: function(*tensors, **descales)

    def fa3_fp8() -> _Call:
        one = torch.ones(CASE.batch, CASE.heads_k, device=q.device)
        codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        return fa3(*codes, q_descale=one, k_descale=one, v_descale=one)

    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    return {
        ("torch", "bf16", "x + x"): lambda: lambda: q + q,
        ("torch", "bf16", "scaled_dot_product_attention"): (
            lambda: lambda: F.scaled_dot_product_attention(qt, kt, vt)
        ),
        ("fa3", "bf16", "flash_attn_func"): lambda: fa3(q, k, v),
        ("fa3", "fp8", "flash_attn_func"): fa3_fp8,
    }


def measure(
    recipes: Sequence[str],
    *,
    backend: str = peers.BACKEND,
    device: torch.device | str = "cuda",
    synchronize: _Call = torch.cuda.synchronize,
    batches: int = BATCHES,
    calls: int = CALLS,
) -> list[dict[str, Any]]:
    """Rows of phase "overhead", `ms` the median of `batches`: calls of this library by recipe, then of others.

    `kernel` names the call. One that fails, or whose library is missing, gives a row with the reason.
    """
    q, k, v = cases.make_inputs(CASE, torch.bfloat16, device)
    found: list[tuple[dict[str, Any], Callable[[], _Call]]] = []
    for recipe in recipes:
        for name, make in _our_calls(recipe, q, k, v, backend).items():
            about = {
                "provider": peers.OURS,
                "kernel": name,
                "dtype": "fp8",
                "recipe": recipe,
                "backend": backend,
            }
            found.append((about, make))
    for (provider, dtype, name), make in _other_calls(q, k, v).items():
        found.append(({"provider": provider, "kernel": name, "dtype": dtype}, make))
    rows = []
    with torch.no_grad():
        for about, make in found:
            row = record.make_row(phase=PHASE, **CASE.fields, **about)
            rows.append(row)
            try:
                times = batch_times(make(), batches=batches, calls=calls, synchronize=synchronize)
            except peers.NotRun as error:
                row.update(status=error.status, reason=str(error))
            except Exception as error:
                row.update(status="failed", reason=timing.short_reason(error))
            else:
                ms, ms_min, ms_max = (f(times) / 1e3 for f in (statistics.median, min, max))
                row.update(ms=ms, ms_min=ms_min, ms_max=ms_max, calls=calls, rounds=batches)
    return rows


def overhead_grid(rows: Sequence[Mapping[str, Any]]) -> Grid | None:
    """The rows of `measure` as a table; None without any."""
    found = [row for row in rows if row["phase"] == PHASE]
    if not found:
        return None
    grid = Grid(
        "Host time of a call",
        ["provider", "call", "recipe", "us", "least", "most"],
        text_columns=3,
    )
    for number, row in enumerate(found):
        names = [row["provider"], row["kernel"], row["recipe"] or row["dtype"]]
        if row["status"] == "ok":
            grid.lines.append([*names, *(f"{row[key] * 1e3:.1f}" for key in ("ms", "ms_min", "ms_max"))])
        else:
            grid.lines.append([*names, row["status"], "", ""])
            grid.notes.append(f"{row['provider']} {row['kernel']} {row['dtype']}: {row['reason']}")
        if number + 1 < len(found) and (row["provider"] == peers.OURS) != (
            found[number + 1]["provider"] == peers.OURS
        ):
            grid.sections.add(number)
    grid.notes.append(
        f"Median of {BATCHES} batches of {CALLS} calls between synchronisations, on (batch, seqlen, heads, "
        f"head_dim) = ({CASE.batch}, {CASE.seqlen_q}, {CASE.heads_q}, {CASE.head_dim}): the GPU has nothing to do."
    )
    return grid
