"""Figures of the compiled kernels and the time that they imply, for machines without a Hopper GPU.

Every configuration is compiled for sm_90a and its machine code read; a roofline model then says about how
long the largest shape of the grid would take. Nothing here is measured: the times are what is left if every
unit but the slowest is free. Four units are looked at:

tensor
    the multiply-adds of all key tiles that the kernel visits, the row-sum rows of 8 bits included, at the dense peak
    of the data sheet.
issue
    instructions of a main-loop step at one a clock and scheduler. The code holds a few copies of the step
    (with and without mask, prologue); their number follows from the count of WGMMA instructions, and all
    instructions of the kernel are shared out over them. Prologue, epilogue and mask code are thus counted
    as if they ran with every tile, which makes this an estimate from above, unlike the others.
MUFU
    special functions (exp2, reciprocal) likewise, at 16 a clock and SM.
HBM
    each operand and output moved once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from cute_attn.bench import record
from cute_attn.bench.cases import Case
from cute_attn.bench.peers import OURS
from cute_attn.bench.report import Grid
from cute_attn.kernels.config import (
    K_SCALE_GROUP,
    SUM_ROWS,
    V_SCALE_GROUP,
    Fwd16Config,
    FwdConfig,
    QuantizeConfig,
)

Forward = FwdConfig | Fwd16Config
Config = Forward | QuantizeConfig

# NVIDIA's data sheets of H100 SXM and H200 SXM (same chip): 132 SMs, 1979 TFLOP/s dense FP8, so 8192 FLOP a
# clock and SM at 1.83 GHz, and half of that in 16 bits. HBM is H200's.
SM_COUNT = 132
TENSOR_FLOPS = 1979e12
CLOCK_HZ = TENSOR_FLOPS / (SM_COUNT * 8192)
HBM_BYTES = 4.8e12  # a second
SCHEDULERS = 4  # of an SM; one instruction a clock each
MUFU_CLOCKS = 8  # a warp instruction occupies its scheduler's quarter of the 16 lanes

IMPLIED = "implied, not measured"


@dataclass(frozen=True)
class Roofline:
    """Milliseconds that each unit is busy; None where the counts do not tell."""

    tensor_ms: float | None
    issue_ms: float | None
    mufu_ms: float | None
    hbm_ms: float

    @property
    def bounds(self) -> dict[str, float]:
        """Known times by unit."""
        named = {"tensor": self.tensor_ms, "issue": self.issue_ms, "MUFU": self.mufu_ms, "HBM": self.hbm_ms}
        return {unit: ms for unit, ms in named.items() if ms is not None}

    @property
    def unit(self) -> str:
        """The slowest unit."""
        return max(self.bounds, key=lambda unit: self.bounds[unit])

    @property
    def ms(self) -> float:
        """Implied milliseconds: those of the slowest unit."""
        return self.bounds[self.unit]


def tile_steps(config: Forward, case: Case) -> int:
    """Key tiles that all tiles of query rows visit together: from the first key that a tile's rows see to the last."""
    rows = case.seqlen_q * config.pack_gqa
    left, right = case.window if config.window else (-1, 0 if config.causal else -1)
    shift = case.seqlen_k - case.seqlen_q
    steps = 0
    for block in range(-(-rows // config.tile_m)):
        first, end = 0, case.seqlen_k
        if right >= 0:
            last_query = (min((block + 1) * config.tile_m, rows) - 1) // config.pack_gqa
            end = min(end, max(0, last_query + 1 + shift + right))
        if left >= 0:
            first = max(0, block * config.tile_m // config.pack_gqa + shift - left)
        steps += max(0, -(-end // config.tile_n) - first // config.tile_n)
    return steps * case.heads_q // config.pack_gqa * case.batch


def _bits(config: Forward) -> int:
    return 16 if isinstance(config, Fwd16Config) else 8


def step_copies(config: Forward, counts: dict[str, int]) -> float:
    """How often a main-loop step stands in the code, by the WGMMA instructions it takes: 32 bytes of k each."""
    k = 256 // _bits(config)
    steps_qk = (config.qk_splits if isinstance(config, FwdConfig) else 1) * (config.head_dim_padded // k)
    steps_pv = len(config.pv_parts) * (config.tile_n // k)
    return sum(counts.get(name, 0) for name in ("QGMMA", "IGMMA", "HGMMA")) / (steps_qk + steps_pv)


def _elements(config: Config, case: Case) -> tuple[int, int, int, int]:
    """Elements of Q, K, V and the output, with the columns of `config`."""
    rows_q = case.batch * case.heads_q * case.seqlen_q
    rows_k = case.batch * case.heads_k * case.seqlen_k
    columns = config.head_dim, config.head_dim_v
    return rows_q * columns[0], rows_k * columns[0], rows_k * columns[1], rows_q * columns[1]


def forward_roofline(
    config: Forward, case: Case, counts: dict[str, int], instructions: int | None
) -> Roofline:
    """Bounds of the forward kernel on `case`; `instructions` are all of the kernel's, padding left out."""
    steps = tile_steps(config, case)
    columns = config.head_dim_padded + config.v_columns + (SUM_ROWS if isinstance(config, FwdConfig) else 0)
    work = steps * 2.0 * config.tile_m * config.tile_n * columns
    copies = step_copies(config, counts)

    def clocks_to_ms(clocks_of_a_step: float) -> float:
        return steps * clocks_of_a_step / SM_COUNT / CLOCK_HZ * 1e3

    # The four warps of a warpgroup sit on four schedulers, so a scheduler runs one warp of each consumer
    # warpgroup.
    warps = config.consumer_warpgroups * 4 // SCHEDULERS
    issue = mufu = None
    if copies:
        if instructions is not None:
            issue = clocks_to_ms(warps * instructions / copies)
        mufu = clocks_to_ms(warps * MUFU_CLOCKS * counts.get("MUFU", 0) / copies)
    q, k, v, out = _elements(config, case)
    rows = case.batch * case.heads_q * case.seqlen_q
    heads_k = case.batch * case.heads_k
    moved = _bits(config) // 8 * (q + k + v) + 2 * out + 4 * rows
    if isinstance(config, FwdConfig):
        groups = -(-case.seqlen_k // K_SCALE_GROUP) + -(-case.seqlen_k // V_SCALE_GROUP)
        moved += 4 * (rows + heads_k * groups)
    tensor = work / TENSOR_FLOPS * _bits(config) / 8
    return Roofline(tensor * 1e3, issue, mufu, moved / HBM_BYTES * 1e3)


def quantize_bytes(config: QuantizeConfig, case: Case) -> int:
    """Bytes that the quantiser of `config` reads and writes on `case`."""
    q, k, v, _ = _elements(config, case)
    if config.in_dtype == "e4m3":  # the transposing pre-pass of ready e4m3 tensors touches V alone
        return 2 * v
    heads_k = case.batch * case.heads_k
    rows = case.batch * case.heads_q * case.seqlen_q
    scales = (
        rows + heads_k * -(-case.seqlen_k // K_SCALE_GROUP) + heads_k * -(-case.seqlen_k // V_SCALE_GROUP)
    )
    extra = rows if config.smooth else 0  # q . mean
    return 3 * (q + k + v) + 4 * (scales + extra)


def _inspect(config: Config) -> Any:
    """Runs in a worker process: figures of one configuration, or the reason why there are none."""
    try:
        from cute_attn import compile as compiler

        return compiler.inspect(config)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def inspect_all(
    configs: Sequence[Config],
    *,
    jobs: int | None = None,
    inspect: Callable[[Config], Any] = _inspect,
    on_done: Callable[[], None] = lambda: None,
) -> list[Any]:
    """`inspect` of every configuration, in their order, in up to `jobs` worker processes (default: the CPUs,
    at most 4).

    Processes and not threads, as the DSL aborts when two threads compile at once. A result is a KernelFigures
    or, as text, the reason why there is none; a worker that dies costs its own configuration only.
    """
    jobs = min(os.cpu_count() or 1, 4) if jobs is None else jobs
    context = multiprocessing.get_context("spawn")  # forking a process that holds torch's threads is unsafe
    results: dict[int, Any] = {}

    def run(numbers: Sequence[int], workers: int) -> None:
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = {pool.submit(inspect, configs[number]): number for number in numbers}
            for future in concurrent.futures.as_completed(futures):
                try:
                    results[futures[future]] = future.result()
                    on_done()
                except BrokenProcessPool:
                    continue  # which of the configurations killed the worker is found out below

    run(range(len(configs)), jobs)
    for number in range(len(configs)):
        if number not in results:
            run([number], 1)
            if number not in results:
                results[number] = "the compiler process died"
                on_done()
    return [results[number] for number in range(len(configs))]


def shape_key(config: Config) -> tuple[int, str]:
    """What a configuration's shape is looked up by: head_dim, and the mask: "full", "causal" or "window"."""
    if isinstance(config, QuantizeConfig):
        return config.head_dim, "full"
    return config.head_dim, "causal" if config.causal else "window" if config.window else "full"


def figure_shapes(cells: Sequence[Case], window: tuple[int, int]) -> dict[tuple[int, str], Case]:
    """Shapes by `shape_key` from one cell for each head_dim and mask; a windowed one is made from the full one."""
    shapes = {(case.head_dim, "causal" if case.causal else "full"): case for case in cells}
    windowed = {
        (case.head_dim, "window"): dataclasses.replace(case, window=window)
        for case in cells
        if not case.causal
    }
    return shapes | windowed


def figure_rows(
    configs: Sequence[Config], figures: Sequence[Any], shapes: dict[tuple[int, str], Case]
) -> list[dict]:
    """Rows of phase "figures"; `shapes` gives the case of each `shape_key` that the roofline is for.

    `ms` stays empty, as nothing ran: the times are in the fields that begin with `implied_`.
    """
    rows = []
    for config, figure in zip(configs, figures, strict=True):
        forward = not isinstance(config, QuantizeConfig)
        case = shapes[shape_key(config)]
        row = record.make_row(
            provider=OURS,
            kernel=config.name,
            backend="sm90",
            phase="figures",
            dtype=config.dtype if isinstance(config, Fwd16Config) else "fp8",
            head_dim_v=config.head_dim_v,
            **(case.fields | {"causal": None if isinstance(config, QuantizeConfig) else config.causal}),
        )
        if isinstance(figure, str):
            row.update(status="failed", reason=figure)
            rows.append(row)
            continue
        counts = figure.counts
        instructions = getattr(figure, "total", None)
        if isinstance(config, QuantizeConfig):
            bounds = Roofline(None, None, None, quantize_bytes(config, case) / HBM_BYTES * 1e3)
        else:
            bounds = forward_roofline(config, case, counts, instructions)
        flops = case.flops * (config.head_dim + config.head_dim_v) / (2 * config.head_dim)
        names = ("QGMMA", "IGMMA", "HGMMA", "UTMALDG", "MUFU", "LDL", "STL")
        row.update(
            registers=figure.registers,
            stack_bytes=figure.stack_bytes,
            spill_store_bytes=figure.spill_store_bytes,
            spill_load_bytes=figure.spill_load_bytes,
            smem_bytes=figure.smem_bytes,
            serialized_wgmma=figure.serialized_wgmma,
            compile_seconds=figure.compile_seconds,
            instructions=instructions,
            **{name: counts.get(name, 0) for name in names},
            mufu_ex2=counts.get("MUFU.EX2", 0),
            implied_tensor_ms=bounds.tensor_ms,
            implied_issue_ms=bounds.issue_ms,
            implied_mufu_ms=bounds.mufu_ms,
            implied_hbm_ms=bounds.hbm_ms,
            implied_ms=bounds.ms,
            implied_bound=bounds.unit,
            implied_tflops=flops / bounds.ms / 1e9 if forward else None,
        )
        rows.append(row)
    return rows


def figure_grids(rows: Sequence[dict[str, Any]]) -> list[Grid]:
    """Tables of the forward kernels of each precision and of the quantisers."""
    found = [row for row in rows if row["phase"] == "figures"]
    kinds: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
        "Forward kernels, 8 bits": (
            [row for row in found if row["causal"] is not None and row["dtype"] == "fp8"],
            ("QGMMA", "IGMMA"),
        ),
        "Forward kernels, 16 bits": ([row for row in found if row["dtype"] != "fp8"], ("HGMMA",)),
        "Quantisers": ([row for row in found if row["causal"] is None], ()),
    }
    grids = []
    for title, (group, products) in kinds.items():
        group.sort(key=lambda row: row["head_dim"])  # stable: the order within one head_dim stays
        if not group:
            continue
        forward = bool(products)
        shape = group[0]
        hidden = shape["heads_q"] * shape["head_dim"]
        size = f"seqlen {shape['seqlen_k']}, batch {shape['batch']}, heads x head_dim {hidden}"
        grid = Grid(
            f"{title}: sm_90a code, and its roofline time at {size} ({IMPLIED})",
            ["kernel", "regs", "spill B", "smem KiB"],
        )
        if forward:
            grid.headers += [
                *products,
                "UTMALDG",
                "MUFU",
                "tensor us",
                "issue us",
                "MUFU us",
                "HBM us",
            ]
            grid.headers += ["bound", "TFLOP/s"]
        else:
            grid.headers += ["MUFU", "HBM us"]
        for number, row in enumerate(group):
            if number and row["head_dim"] != group[number - 1]["head_dim"]:
                grid.sections.add(number - 1)
            grid.lines.append(_figure_line(row, len(grid.headers), products))
            if row["status"] != "ok":
                grid.notes.append(f"{row['kernel']}: {row['reason']}")
            elif row["serialized_wgmma"]:
                grid.notes.append(f"{row['kernel']}: the compiler serialised its WGMMA instructions")
        if forward:
            eight = "QGMMA" in products
            grid.notes.append(
                f"Roofline of H200 SXM: {TENSOR_FLOPS / 1e12 / (1 if eight else 2):.0f} TFLOP/s dense "
                f"{8 if eight else 16}-bit, {SM_COUNT} SMs at "
                f"{CLOCK_HZ / 1e9:.2f} GHz, {HBM_BYTES / 1e12} TB/s. The slowest unit bounds; times are "
                f"{IMPLIED}: waits, wave tails and clock throttling come on top, while issue counts "
                "prologue, epilogue and mask code with every tile and is an estimate from above."
            )
            windows = {
                (row["window_left"], row["window_right"])
                for row in group
                if row.get("window_left") is not None
            }
            grid.notes += [f"Windowed kernels: window ({left}, {right})." for left, right in sorted(windows)]
        grids.append(grid)
    return grids


def _figure_line(row: dict[str, Any], width: int, products: tuple[str, ...]) -> list[str]:
    if row["status"] != "ok":
        return [row["kernel"], row["status"], *[""] * (width - 2)]

    def micros(key: str) -> str:
        return "-" if row[key] is None else f"{row[key] * 1e3:.0f}"

    spill = row["spill_store_bytes"] + row["spill_load_bytes"]
    cells = [row["kernel"], str(row["registers"]), str(spill), f"{row['smem_bytes'] / 1024:.0f}"]
    if not products:
        return [*cells, str(row["MUFU"]), micros("implied_hbm_ms")]
    cells += [str(row[name]) for name in (*products, "UTMALDG", "MUFU")]
    cells += [micros(f"implied_{unit}_ms") for unit in ("tensor", "issue", "mufu", "hbm")]
    return [*cells, row["implied_bound"], f"{row['implied_tflops']:.0f}"]
