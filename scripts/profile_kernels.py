"""Counters of the forward kernels, and of FlashAttention-3's FP8 kernel, by Nsight Compute on a Hopper GPU.

    python scripts/profile_kernels.py OUT.json [--head-dim 128] [--seqlen 16384] [--qk e4m3,int8] [--causal 0]

The cells are those of the benchmark's grid: 16,384 tokens, heads * head_dim 2,048. Each contender runs in a process of
its own under `ncu`, and there in each cell once to warm up and once between cudaProfilerStart and cudaProfilerStop.
The counters take several passes, so that launch is replayed; clocks and caches are left as they are. A single launch
runs in a burst, at a clock that sustained ones do not reach: compare shares of peak, and take times from the benchmark.

The rows go to OUT.json, a record of phase "profile", the table to the terminal. A counter that this version of `ncu`
does not know is named there, and null in the rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cute_attn.bench import cases, record
from cute_attn.bench.cases import Case
from cute_attn.bench.report import Grid

KERNEL = "Fwd(8bit)?Sm90"  # in the names of this library's kernel and of FlashAttention-3's
CHIP = "gh100"
PEAK = "avg.pct_of_peak_sustained_active"
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "gmma",
    "long_scoreboard",
    "math_pipe_throttle",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "wait",
    "warpgroup_arrive",
)
# field of a row -> counter of Nsight Compute, in base units
METRICS: dict[str, str] = {
    "duration_ns": "gpu__time_duration.sum",
    "sm_clock_hz": "sm__cycles_elapsed.avg.per_second",
    "cycles": "sm__cycles_elapsed.max",
    "tensor_pct": f"sm__pipe_tensor_cycles_active.{PEAK}",
    "tensor_inst": "sm__inst_executed_pipe_tensor.sum",
    "issue_pct": f"sm__inst_issued.{PEAK}",
    "inst": "sm__inst_executed.sum",
    "alu_pct": f"sm__inst_executed_pipe_alu.{PEAK}",
    "fma_pct": f"sm__inst_executed_pipe_fma.{PEAK}",
    "fp16_pct": f"sm__inst_executed_pipe_fp16.{PEAK}",
    "xu_pct": f"sm__inst_executed_pipe_xu.{PEAK}",
    "lsu_pct": f"sm__inst_executed_pipe_lsu.{PEAK}",
    "uniform_pct": f"sm__inst_executed_pipe_uniform.{PEAK}",
    "warps_pct": f"sm__warps_active.{PEAK}",
    "l2_bytes": "lts__t_bytes.sum",
    "l2_bytes_per_s": "lts__t_bytes.sum.per_second",
    "l2_pct": "lts__t_bytes.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "dram_bytes_per_s": "dram__bytes.sum.per_second",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    **{
        f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS
    },
    "local_loads": "smsp__inst_executed_op_local_ld.sum",
    "local_stores": "smsp__inst_executed_op_local_st.sum",
    "registers": "launch__registers_per_thread",
    "smem_bytes": "launch__shared_mem_per_block_dynamic",
    "grid": "launch__grid_size",
}


def parse_csv(text: str) -> list[dict[str, Any]]:
    """What `ncu --csv` printed: for each profiled launch "kernel" and counters by their names, None for "n/a".

    Raises:
        ValueError: there is no table, or one without the columns that are read.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = " ".join(line for line in lines if line.startswith("==ERROR==")) or text.strip()[-300:]
        raise ValueError(f"ncu printed no table: {said or 'nothing at all'}")
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        try:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
            name, value = row["Metric Name"], row["Metric Value"]
        except KeyError as missing:
            raise ValueError(f"ncu's table has no column {missing}, only {', '.join(row)}") from None
        number = value.replace(",", "")  # thousands are set apart
        launch[name] = None if number in ("", "n/a", "nan") else float(number)
    return list(launches.values())


def known_metrics(text: str) -> set[str]:
    """Names of counters, without what is asked of them, in what `ncu --query-metrics` printed."""
    return set(re.findall(r"^([a-z0-9]+__[a-z0-9_]+)\b", text, flags=re.MULTILINE))


def choose_metrics(known: set[str]) -> tuple[dict[str, str], list[str]]:
    """(those of METRICS that exist, fields of the others); launch properties are no counters, they always do."""
    present = {
        field: name
        for field, name in METRICS.items()
        if name.startswith("launch__") or name.split(".")[0] in known
    }
    return present, [field for field in METRICS if field not in present]


def ncu_command(worker: Sequence[str], metrics: Iterable[str], log: Path) -> list[str]:
    """The command that profiles the launches that `worker` asks for."""
    return [
        "ncu",
        *("--csv", "--print-units", "base", "--log-file", str(log)),
        *("--clock-control", "none", "--cache-control", "none"),
        *("--kernel-name-base", "demangled", "-k", f"regex:{KERNEL}"),
        *("--profile-from-start", "off"),
        *("--metrics", ",".join(metrics)),
        *worker,
    ]


def metrics_grid(rows: Sequence[dict[str, Any]], missing: Sequence[str]) -> Grid:
    """A line for each counter, a column for each contender."""
    labels = [f"{row['provider']} {row['recipe'] or row['dtype']}" for row in rows]
    grid = Grid("Counters of one launch", ["counter", *labels])
    for field in METRICS:
        values = [row.get(field) for row in rows]
        if any(value is not None for value in values):
            grid.lines.append([field, *("-" if x is None else f"{x:,.4g}" for x in values)])
    grid.notes += [
        f"{label}: {row['reason']}" for label, row in zip(labels, rows, strict=True) if row["reason"]
    ]
    if missing:
        grid.notes.append(f"This ncu does not know: {', '.join(missing)}")
    return grid


# --- what runs under ncu


def run_worker(contender: str, cells: Sequence[Sequence[Any]], out: str) -> None:
    """Launch the forward of `contender` ("e4m3", "int8" or "fa3") twice in each cell (head_dim, seqlen, causal), the
    second time for the profiler; write why a cell was not launched, or None, to `out`."""
    import torch

    reasons: list[str | None] = []
    for head_dim, seqlen, causal in cells:
        try:
            launch = prepare(contender, make_case(head_dim, seqlen, causal))
            launch()
            torch.cuda.synchronize()
        except Exception as error:  # the other cells can still be measured
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        torch.cuda.profiler.start()
        launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        reasons.append(None)
    Path(out).write_text(json.dumps(reasons))


def prepare(contender: str, case: Case) -> Callable[[], Any]:
    """What launches the forward of `contender` on random tensors of `case`."""
    import torch

    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    if contender == "fa3":
        import flash_attn_interface as fa3

        codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        one = torch.ones(case.batch, case.heads_k, device="cuda")
        return lambda: fa3.flash_attn_func(
            *codes, causal=case.causal, q_descale=one, k_descale=one, v_descale=one
        )
    from cute_attn import api

    recipe = {"e4m3": "fp8", "int8": "accurate"}[contender]
    qkv = api.quantize(q, k, v, recipe, backend="sm90")
    return lambda: api.fp8_attention_quantized(qkv, causal=case.causal, backend="sm90")


# --- rows


def make_case(head_dim: int, seqlen: int, causal: bool) -> Case:
    """The cell of the benchmark's grid."""
    (case,) = cases.grid(seqlens=[seqlen], head_dims=[head_dim], causal=[causal])
    return case


def make_row(contender: str, case: Case) -> dict[str, Any]:
    """A row without counters."""
    ours = contender != "fa3"
    row = record.make_row(
        provider="cute_attn" if ours else "fa3",
        backend="sm90",
        phase="profile",
        dtype="fp8",
        recipe={"e4m3": "fp8", "int8": "accurate"}.get(contender),
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        heads_q=case.heads_q,
        heads_k=case.heads_k,
        head_dim=case.head_dim,
        causal=case.causal,
    )
    return dict.fromkeys(METRICS) | row


def profile(contender: str, found: Sequence[Case], metrics: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of one contender."""
    rows = [make_row(contender, case) for case in found]
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as folder:
        log, out = Path(folder) / "ncu.csv", Path(folder) / "reasons.json"
        job = {
            "contender": contender,
            "cells": [[case.head_dim, case.seqlen_q, case.causal] for case in found],
            "out": str(out),
        }
        worker = [sys.executable, __file__, "--worker", json.dumps(job)]
        done = subprocess.run(
            ncu_command(worker, metrics.values(), log), capture_output=True, text=True, check=False
        )
        text = log.read_text() if log.is_file() else ""
        reasons = json.loads(out.read_text()) if out.is_file() else []
    try:
        if done.returncode:
            raise ValueError(
                f"ncu ended with {done.returncode}: {(done.stderr or done.stdout or text).strip()[-300:]}"
            )
        launched = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
        launches = parse_csv(text) if launched else []
        if len(launches) != len(launched):
            raise ValueError(
                f"ncu profiled {len(launches)} launches of a kernel named {KERNEL}, not {len(launched)}"
            )
    except ValueError as error:
        for row in rows:
            row.update(status="failed", reason=" ".join(str(error).split()))
        return rows
    for row, reason in zip(rows, reasons, strict=True):
        if reason is not None:
            row.update(status="failed", reason=" ".join(reason.split())[:300])
    for row, launch in zip(launched, launches, strict=True):
        row.update(kernel=launch["kernel"], **{field: launch.get(name) for field, name in metrics.items()})
    return rows


def _list(kind: type, allowed: Sequence[Any]) -> Any:
    def parse(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            values = [text]
        for value in values:
            if value not in allowed:
                raise argparse.ArgumentTypeError(f"{value!r} is not among {', '.join(map(str, allowed))}")
        return values

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if a contender was not profiled."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--worker"]:
        run_worker(**json.loads(argv[1]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--head-dim", type=_list(int, (64, 128, 256)), default=[128])
    parser.add_argument("--seqlen", type=_list(int, cases.SEQLENS), default=[16384])
    parser.add_argument("--qk", type=_list(str, ("e4m3", "int8")), default=["e4m3", "int8"])
    parser.add_argument("--causal", type=_list(int, (0, 1)), default=[0])
    args = parser.parse_args(argv)
    if shutil.which("ncu") is None:
        parser.error("ncu (Nsight Compute) is not on the PATH")
    from rich.console import Console

    def ask(*words: str) -> str:
        return subprocess.run(["ncu", *words], capture_output=True, text=True, check=True).stdout

    version = re.search(r"Version (\S+)", ask("--version"))
    metrics, missing = choose_metrics(known_metrics(ask("--query-metrics", "--chips", CHIP)))
    meta = record.collect_meta(shlex.join(["python", "scripts/profile_kernels.py", *argv]))
    meta["ncu"] = version[1] if version else None
    found = cases.grid(seqlens=args.seqlen, head_dims=args.head_dim, causal=map(bool, args.causal))
    rows: list[dict[str, Any]] = []
    by_contender = []
    for contender in (*args.qk, "fa3"):
        by_contender.append(profile(contender, found, metrics))
        rows += by_contender[-1]
        record.write(args.out, meta, rows)
    console = Console(width=None if sys.stdout.isatty() else 180)
    for case, group in zip(found, zip(*by_contender, strict=True), strict=True):
        mask = "causal" if case.causal else "full"
        console.print(f"head_dim {case.head_dim}, {mask}, seqlen {case.seqlen_q}")
        console.print(metrics_grid(group, missing).rich())
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
