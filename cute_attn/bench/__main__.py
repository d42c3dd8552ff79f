"""`python -m cute_attn.bench`: speed beside the peers and error beside the naive baseline.

On a Hopper GPU the default run times the papers' grid and reports the error. Elsewhere it reports the error
of the emulator, and registers, spills, instruction counts and the roofline time of every compiled kernel.

Exit status: 0; 1 if this library was wrong or failed somewhere; 2 if the command cannot be run as given.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

EPILOG = """examples:
  python -m cute_attn.bench --dtype fp8
  python -m cute_attn.bench --seqlen 4096,16384 --head-dim 128 --causal 0 --recipe accurate,fp8
  python -m cute_attn.bench --phase forward,quantize,whole_call --json speed.json --markdown speed.md
  python -m cute_attn.bench --report accuracy --tensors my_layers.safetensors
  python -m cute_attn.bench --report overhead --json overhead.json
  python -m cute_attn.bench --report speed --dtype bf16 --phase prefill --json prefill.json
  python -m cute_attn.bench --report speed --dtype bf16 --phase backward,train --json train.json
  python -m cute_attn.bench --report speed --dtype bf16 --phase decode --json decode.json
  torchrun --nproc-per-node 2 -m cute_attn.bench --phase ring --world 2 --json ring.json
  python -m cute_attn.bench --report memory --phase forward,train --html memory.html
  python -m cute_attn.bench --render speed.json --html speed.html
  python -m cute_attn.bench --compare before.json after.json
"""
REPORTS = ("accuracy", "speed", "figures", "overhead", "memory", "io", "all")
QUICK_SEQLENS = (1024, 16384)
QUICK_ROUNDS = 3
ROUNDS = 5


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("expected a comma-separated list")
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names something twice")
    return names


def _choices(*allowed: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = _names(text)
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; choose from {', '.join(allowed)}")
        return names

    return parse


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def _sizes(text: str) -> list[int]:
    return [_positive(name) for name in _names(text)]


def _head_dims(text: str) -> list[int]:
    from cute_attn.kernels.config import HEAD_DIMS

    values = _sizes(text)
    for value in values:
        if value not in HEAD_DIMS:
            raise argparse.ArgumentTypeError(
                f"head_dim must be a multiple of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, got {value}"
            )
    return values


def _output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: it is a folder, or its folder does not exist"
        )
    return path


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    from cute_attn.bench import cases, peers, timing

    def comma(values: Sequence[object]) -> str:
        return ",".join(map(str, values))

    parser = argparse.ArgumentParser(
        prog="python -m cute_attn.bench",
        description="Speed of 8-bit attention beside its peers, and its error beside the naive baseline. "
        "Without a Hopper GPU: the error of the emulator, and the figures of every compiled kernel.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what")
    shapes = parser.add_argument_group("shapes (default: the grid of the FlashAttention papers)")
    run = parser.add_argument_group("how")
    files = parser.add_argument_group("files")

    def option(group: Any, flag: str, text: str, **more: Any) -> None:
        group.add_argument(flag, help=text, **more)

    def count(group: Any, flag: str, text: str, **more: Any) -> None:
        option(group, flag, text, type=_positive, metavar="N", **more)

    dtypes = ("fp8", "bf16", "fp16")
    option(what, "--dtype", "default fp8", choices=dtypes, default="fp8")
    text = "default: accuracy, and speed on a Hopper GPU or figures elsewhere"
    option(what, "--report", text, choices=REPORTS)
    text = "8-bit recipes, comma-separated (default: default is timed, errors are reported for every preset "
    text += "and for naive with P lifted)"
    option(what, "--recipe", text, type=_names, metavar="NAMES")
    text = f"of {comma(peers.PHASES)} (default forward); or ring, alone and under torchrun: several GPUs"
    option(what, "--phase", text, type=_choices(*peers.PHASES, "ring"), default=["forward"], metavar="NAMES")
    text = f"of {comma(list(peers.PROVIDERS))} (default: by dtype and phase)"
    option(what, "--providers", text, type=_choices(*peers.PROVIDERS), metavar="NAMES")
    text = "kernels of cute_attn: of Hopper, or of 16 bits by mma.sync, whose speed alone is reported (default sm90)"
    option(what, "--backend", text, choices=peers.BACKENDS)
    text = "in phases backward and train, 16 bits, also with gradients that are the same bit for bit in every run, of "
    option(what, "--deterministic", text + comma(peers.DETERMINISTIC), action="store_true")
    text = "safetensors file with q, k, v or NAME.q, NAME.k, NAME.v: report errors on these"
    option(what, "--tensors", text, type=Path, metavar="FILE")

    text = "two records, of --json: what changed from the first to the second; nothing is measured"
    render = "a record, of --json: its tables, and the files asked for; nothing is measured"
    option(what, "--render", render, type=Path, metavar="RECORD")
    option(what, "--compare", text, type=Path, nargs=2, metavar=("BEFORE", "AFTER"))

    option(shapes, "--seqlen", f"default {comma(cases.SEQLENS)}", type=_sizes, metavar="N,...")
    text = f"multiples of 16 from 32 to 256 (default {comma(cases.HEAD_DIMS)})"
    head_dims = list(cases.HEAD_DIMS)
    option(shapes, "--head-dim", text, type=_head_dims, default=head_dims, metavar="N,...")
    option(shapes, "--causal", "default both", choices=("0", "1", "both"), default="both")
    count(shapes, "--tokens", "batch x seqlen (default %(default)s)", default=cases.TOKENS)
    text = "heads x head_dim; where head_dim does not divide it, less (default %(default)s)"
    count(shapes, "--hidden", text, default=cases.HIDDEN)
    count(shapes, "--batch", "instead of --tokens")
    count(shapes, "--heads", "heads of Q, instead of --hidden")
    count(shapes, "--heads-k", "heads of K and V (default: as many as Q has)")
    text = "in phase decode: slots of a page of the cache (default: contiguous caches)"
    option(shapes, "--page-size", text, type=_sizes, metavar="N,...")
    text = "in phase decode: no lengths are given, as caches are full, which torch's SDPA takes them to be"
    option(shapes, "--full-caches", text, action="store_true")

    count(run, "--rounds", f"timed rounds (default {ROUNDS})")
    count(run, "--world", "with --phase ring: processes that torchrun has started")
    text = "length of one timed batch (default %(default)s)"
    option(run, "--min-batch-ms", text, type=float, default=50.0, metavar="MS")
    text = "untimed launches before each, until the GPU's clock is that of its load (default %(default)s)"
    option(run, "--settle-ms", text, type=float, default=timing.SETTLE_MS, metavar="MS")
    text = "fewer lengths, rounds and inputs; one kernel for each head_dim and kind of operands"
    option(run, "--quick", text, action="store_true")
    count(
        run, "--jobs", "processes that compile (default: CPUs; at most 4 for the figures, 8 for phase decode)"
    )

    for flag, text in (
        ("--json", "record: meta and rows"),
        ("--csv", "rows"),
        ("--markdown", "tables"),
        ("--html", "tables and plots in one file"),
        ("--plot", "speed by length, or error by recipe (.png, .pdf, .svg)"),
    ):
        option(files, flag, text, type=_output, metavar="PATH")
    return parser


def hopper_device() -> tuple[bool, str]:
    """Whether the current CUDA device is a Hopper GPU, and in words what is there."""
    capability, there = _device()
    return capability is not None and capability[0] == 9, there


def mma_sync_device() -> tuple[bool, str]:
    """Likewise, whether backend "sm80" runs on it."""
    from cute_attn.problem import ARCHS

    capability, there = _device()
    return capability in ARCHS, there


def _device() -> tuple[tuple[int, int] | None, str]:
    """Compute capability of the current CUDA device, None without one; in words what is there."""
    import torch

    if not torch.cuda.is_available():
        return None, "no CUDA GPU is visible to torch"
    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    return (major, minor), f"{name}, compute capability {major}.{minor}"


def header_lines(meta: dict[str, Any]) -> list[str]:
    """What was measured on what."""
    import cute_attn

    git = meta["git"]
    state = "" if git["dirty"] is None else ", with changes" if git["dirty"] else ""
    lines = []
    if meta["gpu"] is not None:
        details = [f"driver {meta['driver'] or 'unknown'}"]
        if meta.get("multiprocessors"):
            details.append(f"{meta['multiprocessors']} SMs")
        if meta.get("power_limit_w"):
            details.append(f"power limit {meta['power_limit_w']:.0f} W")
        if meta.get("sm_clock_max_mhz"):
            now = meta.get("sm_clock_mhz") or 0
            details.append(f"SM clock {now:.0f} MHz now, {meta['sm_clock_max_mhz']:.0f} at most")
        if meta.get("l2_bytes"):
            details.append(f"L2 {meta['l2_bytes'] / 2**20:.0f} MiB")
        lines.append(f"GPU: {meta['gpu']} ({', '.join(details)})")
    lines.append(
        f"cute_attn {cute_attn.__version__} (commit {(git['commit'] or 'unknown')[:12]}{state}), "
        f"torch {meta['torch']}, CUDA {meta['cuda'] or 'none'}, "
        f"nvidia-cutlass-dsl {meta['cutlass_dsl'] or 'missing'}, Python {meta['python']}"
    )
    lines.append(f"{meta['date']}: {meta['command']}")
    return lines


def accuracy_rows(table: Any) -> list[dict[str, Any]]:
    """An accuracy table as rows of a record; a NaN becomes null, and the row wrong if it is the error."""
    from cute_attn.bench import accuracy, record

    rows = []
    for fields in accuracy.record_rows(table):
        clean = {
            key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in fields.items()
        }
        row = record.make_row(**clean)
        if row["rmse"] is None:
            row.update(status="wrong", reason="the error is not finite")
        rows.append(row)
    return rows


@contextlib.contextmanager
def ended_as_by_hand() -> Iterator[None]:
    """Inside, SIGTERM, as `timeout` sends it, raises KeyboardInterrupt, so that what was found is not lost."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Run:
    """One run of the command: options, where it prints, what it found."""

    def __init__(self, options: argparse.Namespace, console: Any, progress_console: Any):
        self.options = options
        self.console = console
        self.progress_console = progress_console
        self.rows: list[dict[str, Any]] = []
        self.grids: list[Any] = []  # tables that are no matter of rows alone
        self.incomplete = False

    def progress(self) -> Any:
        """A progress bar on standard error, gone when it is done."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.progress_console,
            transient=True,
        )

    def cells(self) -> list[Any]:
        """The cases of the shape options."""
        from cute_attn.bench import cases

        options = self.options
        return cases.grid(
            seqlens=options.seqlen or (QUICK_SEQLENS if options.quick else cases.SEQLENS),
            head_dims=options.head_dim,
            causal={"0": (False,), "1": (True,), "both": (False, True)}[options.causal],
            tokens=options.tokens,
            hidden=options.hidden,
            batch=options.batch,
            heads=options.heads,
            heads_k=options.heads_k,
        )

    def prefill_cells(self) -> list[Any]:
        """The cases of phase prefill; lengths and batches are its own."""
        from cute_attn.bench import cases

        options = self.options
        return cases.prefill(
            head_dims=options.head_dim,
            causal={"0": (False,), "1": (True,), "both": (False, True)}[options.causal],
            hidden=options.hidden,
            heads=options.heads,
            heads_k=options.heads_k,
        )

    def decode_cells(self) -> list[Any]:
        """The cases of phase decode; lengths, tokens and heads have defaults of their own."""
        from cute_attn.bench import cases, decode

        options = self.options
        return decode.cells(
            seqlens=options.seqlen or decode.SEQLENS,
            head_dims=options.head_dim,
            tokens=decode.TOKENS if options.tokens == cases.TOKENS else options.tokens,
            batch=options.batch,
            heads=options.heads,
            heads_k=options.heads_k,
            page_sizes=options.page_size or (None,),
            full=options.full_caches,
        )

    def compile_decode(self, contenders: Sequence[Any]) -> None:
        """Kernels of phase decode to the disk cache, in several processes; else each cell would wait for its own. What
        fails here fails again in its cell, which says so."""
        from cute_attn import cache
        from cute_attn import compile as compiler
        from cute_attn.bench import decode, peers

        ours = [contender for contender in contenders if contender.provider == peers.OURS]
        if cache.cache_dir() is None or any(contender.backend != peers.BACKEND for contender in ours):
            return
        wanted = decode.kernels(self.decode_cells(), list(dict.fromkeys(c.dtype for c in ours)))
        todo = [config for config in wanted if not cache.holds(cache.cache_key(config, compiler.ARCH))]
        with self.progress() as progress:
            task = progress.add_task("compiling", total=len(todo))
            for _ in compiler.fill_cache(todo, self.options.jobs):
                progress.advance(task)

    def contenders(self) -> list[Any]:
        """Who is timed."""
        from cute_attn.bench import peers
        from cute_attn.quantize import resolve_recipe

        options = self.options
        recipes = options.recipe or [resolve_recipe("default").name]
        return peers.contenders(
            options.dtype,
            options.phase,
            recipes,
            options.providers,
            options.backend,
            deterministic=options.deterministic,
        )

    def speed(self) -> None:
        """Time the grid."""
        from cute_attn.bench import report, timing

        options, found = self.options, self.contenders()
        rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
        start = len(self.rows)
        own = ("prefill", "decode")  # with cases of their own
        todo = [(case, phase) for case in self.cells() for phase in options.phase if phase not in own]
        if "prefill" in options.phase:
            todo += [(case, "prefill") for case in self.prefill_cells()]
        if "decode" in options.phase:
            todo += [(case, "decode") for case in self.decode_cells()]
            self.compile_decode([contender for contender in found if contender.phase == "decode"])
        try:
            with ended_as_by_hand(), self.progress() as progress:
                task = progress.add_task("timing", total=len(todo))
                for case, phase in todo:
                    progress.update(task, description=f"{phase} {case}")
                    group = [contender for contender in found if contender.phase == phase]
                    self.rows += timing.time_cell(
                        case,
                        group,
                        rounds=rounds,
                        min_batch_ms=options.min_batch_ms,
                        settle_ms=options.settle_ms,
                    )
                    progress.advance(task)
        except timing.DeviceLost as lost:
            self.rows += lost.rows
            self.incomplete = True
            self.console.print(f"The CUDA context was lost, so the run stops here: {lost}", style="bold red")
        except KeyboardInterrupt:
            self.incomplete = True
            self.console.print("Interrupted: what was timed until then follows.", style="bold red")
        for grid in report.speed_grids(self.rows[start:]):
            self.console.print(grid.rich())
        self.console.print(
            f"Median of {rounds} interleaved rounds, each a batch of launches of at least "
            f"{options.min_batch_ms:g} ms (or {timing.MAX_LAUNCHES}) between CUDA events, behind "
            f"{options.settle_ms:g} ms (or {timing.MAX_UNTIMED}) untimed; L2 is not flushed. "
            "Peak memory: what one call needs beyond its operands, its output included."
        )

    def accuracy(self, hopper: bool) -> None:
        """Error by input and recipe and, on a Hopper GPU, of the kernel alone by number of keys."""
        from cute_attn.bench import accuracy, data, lengths, report

        options = self.options
        device = "cuda" if hopper else "cpu"
        if options.tensors is not None:
            inputs = data.load_user_tensors(options.tensors, device)
        else:
            inputs = data.default_inputs(device)
            if options.quick:  # the first of each kind
                inputs = [
                    next(x for x in inputs if x.source == kind)
                    for kind in dict.fromkeys(x.source for x in inputs)
                ]
        recipes = options.recipe or list(accuracy.DEFAULT_RECIPES)
        import pandas as pd

        tables = []
        with self.progress() as progress:
            task = progress.add_task("accuracy", total=len(inputs))
            with warnings.catch_warnings():
                # "auto" warns that the emulator runs; the table's title says it.
                warnings.filterwarnings("ignore", category=UserWarning, module="cute_attn")
                for layer in inputs:
                    progress.update(task, description=f"accuracy: {layer.name}")
                    backend = "sm90" if hopper else "emulator"
                    tables.append(accuracy.accuracy_table([layer], recipes, backend=backend))
                    progress.advance(task)
        table = pd.concat(tables, ignore_index=True)
        self.rows += accuracy_rows(table)
        accuracy.render_accuracy(table, self.console)
        if not hopper or options.tensors is not None:
            return
        names = options.recipe or ["fp8", "accurate"]
        sizes = lengths.LENGTHS if not options.quick else (1, 300, 4096, 131072)
        with self.progress() as progress:
            task = progress.add_task(
                "kernel error by length", total=len(names) * len(options.head_dim) * len(sizes) * 2
            )
            found = lengths.measure(
                names, lengths=sizes, head_dims=options.head_dim, on_done=lambda: progress.advance(task)
            )
        self.rows += found
        grid = report.error_grid(found)
        if grid is not None:
            self.console.print(grid.rich())

    def figures(self) -> None:
        """Registers, spills and counts of the compiled kernels of the precision asked for, and their roofline times.

        Kernels that pack GQA are left out: the shapes of the grid do not call them.
        """
        from cute_attn import compile as compiler
        from cute_attn.bench import cases, figures
        from cute_attn.kernels.config import Fwd16Config, FwdConfig, QuantizeConfig

        options = self.options
        sixteen = options.dtype != "fp8"
        configs = [
            config
            for config in compiler.configurations()
            if isinstance(config, (FwdConfig, QuantizeConfig) if not sixteen else Fwd16Config)
            and (not isinstance(config, Fwd16Config) or config.dtype == options.dtype)
            and {config.head_dim, config.head_dim_v} <= set(options.head_dim)
            and getattr(config, "pack_gqa", 1) == 1
        ]
        if options.quick:  # one kernel for each head_dim and kind of operands
            seen: dict[Any, Any] = {}
            for config in configs:
                traits = (getattr(config, name, None) for name in ("qk_dtype", "p_rounding"))
                seen.setdefault((type(config), config.head_dim, *traits), config)
            configs = list(seen.values())
        seqlen = max(options.seqlen or cases.SEQLENS)
        cells = cases.grid(
            seqlens=[seqlen],
            head_dims=options.head_dim,
            tokens=max(options.tokens, seqlen),
            hidden=options.hidden,
            batch=options.batch,
            heads=options.heads,
            heads_k=options.heads_k,
        )
        shapes = figures.figure_shapes(cells, cases.WINDOW)
        with self.progress() as progress:
            task = progress.add_task("compiling for sm_90a", total=len(configs))
            found = figures.inspect_all(configs, jobs=options.jobs, on_done=lambda: progress.advance(task))
        rows = figures.figure_rows(configs, found, shapes)
        self.rows += rows
        for grid in figures.figure_grids(rows):
            self.console.print(grid.rich())

    def overhead(self) -> None:
        """Host time of calls on tiny tensors."""
        from cute_attn.bench import overhead
        from cute_attn.quantize import resolve_recipe

        recipes = self.options.recipe or [resolve_recipe("default").name]
        found = overhead.measure(recipes)
        self.rows += found
        grid = overhead.overhead_grid(found)
        if grid is not None:
            self.console.print(grid.rich())

    def memory(self, hopper: bool) -> None:
        """Memory that a call needs: worked out, and measured on a Hopper GPU."""
        from cute_attn.bench import cases, memory
        from cute_attn.quantize import resolve_recipe

        options = self.options
        shapes = cases.grid(
            seqlens=options.seqlen or memory.SEQLENS,
            head_dims=options.head_dim if options.head_dim != list(cases.HEAD_DIMS) else [128],
            causal=(False,),
            hidden=options.hidden,
            batch=options.batch or 1,
            heads=options.heads,
            heads_k=options.heads_k,
        )
        recipes = options.recipe or [resolve_recipe("default").name]
        calls = [phase for phase in options.phase if phase in memory.CALLS] or ["forward"]
        found = []
        with self.progress() as progress:
            task = progress.add_task("memory", total=len(shapes) * len(calls))
            for call in calls:
                found += memory.memory_rows(
                    shapes, recipes, measured=hopper, call=call, on_done=lambda: progress.advance(task)
                )
        self.rows += found
        for call in calls:
            grid = memory.memory_grid(found, call)
            if grid is not None:
                self.console.print(grid.rich())

    def io(self) -> None:
        """The model of memory traffic, and what was counted beside it."""
        from cute_attn.bench import memory, record

        options = self.options
        found = memory.io_rows(options.seqlen or memory.SEQLENS, options.head_dim)
        self.rows += found
        path = memory.profile_record()
        counted = None if path is None else memory.measured_io_grid(record.read(path).rows)
        if counted is not None:
            self.grids.append(counted)  # of another record's rows
        for grid in (memory.io_grid(found), counted):
            if grid is not None:
                self.console.print(grid.rich())

    def all_grids(self) -> list[Any]:
        """Every table, for the files."""
        from cute_attn.bench import figures, memory, overhead, report

        found = (
            report.accuracy_grid(self.rows),
            report.error_grid(self.rows),
            overhead.overhead_grid(self.rows),
            *(memory.memory_grid(self.rows, call) for call in memory.CALLS),
            memory.io_grid(self.rows),
            memory.measured_io_grid(self.rows),
        )
        grids = report.speed_grids(self.rows) + [grid for grid in found if grid is not None]
        return [*grids, *figures.figure_grids(self.rows), *self.grids]

    def write(self, meta: dict[str, Any], head: Sequence[str]) -> None:
        """The files asked for."""
        from cute_attn.bench import html, record, report

        options = self.options
        if options.json:
            record.write(options.json, meta, self.rows)
        if options.csv:
            report.write_csv(options.csv, self.rows)
        if options.markdown:
            report.write_markdown(options.markdown, head, self.all_grids())
        if options.html:
            html.write(options.html, "cute_attn benchmark", head, self.all_grids(), self.rows)
        if options.plot:
            report.plot(options.plot, self.rows, head[0])
        for path in (options.json, options.csv, options.markdown, options.html, options.plot):
            if path is not None:
                self.console.print(f"wrote {path}")


def compare(options: argparse.Namespace, console: Any) -> int:
    """Print, and write, what changed between two records."""
    from cute_attn.bench import compare, html, record, report

    before, after = (record.read(path) for path in options.compare)
    grids = compare.compare_grids(before, after)
    for grid in grids:
        console.print(grid.rich())
    head = [f"before: {options.compare[0]}", f"after: {options.compare[1]}"]
    if options.markdown:
        report.write_markdown(options.markdown, head, grids)
    if options.html:
        html.write(
            options.html, "cute_attn: two runs compared", head, grids, after.rows, "Plots of the second"
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    options = parser.parse_args(argv)

    from rich.console import Console

    from cute_attn.bench import data, peers, record, report
    from cute_attn.problem import CAPABILITIES
    from cute_attn.quantize import resolve_recipe

    # Tables are about 170 columns wide; a pipe has no width of its own and would get 80.
    console = Console(width=None if sys.stdout.isatty() else max(180, int(os.environ.get("COLUMNS", 0) or 0)))
    if options.compare is not None:
        try:
            return compare(options, console)
        except (OSError, ValueError) as error:
            parser.error(f"argument --compare: {error}")
    run = Run(options, console, Console(stderr=True))
    if options.render is not None:
        try:
            found = record.read(options.render)
            run.rows = found.rows
            for grid in run.all_grids():
                console.print(grid.rich())
            run.write(found.meta, header_lines(found.meta))
            return 0
        except (OSError, ValueError, report.PlotUnavailable) as error:
            parser.error(f"argument --render: {error}")
    hopper, device = mma_sync_device() if options.backend == "sm80" else hopper_device()
    if options.backend == "sm80":
        if options.report not in (None, "speed"):
            parser.error(f"argument --backend: sm80 has no report {options.report}, only speed")
        options.report = "speed"
    if "ring" in options.phase or options.world:
        from cute_attn.bench import ring

        try:
            return ring.main(options, console, argv, hopper)
        except ValueError as error:
            parser.error(str(error))
    reports = {
        None: ["speed", "accuracy"] if hopper else ["accuracy", "figures"],
        "all": ["speed", "overhead", "accuracy", "figures", "memory", "io"]
        if hopper
        else ["accuracy", "figures", "memory", "io"],
    }.get(options.report, [options.report])
    try:
        if options.recipe:
            names = [resolve_recipe(name).name for name in options.recipe]
            if len(set(names)) != len(names):
                raise ValueError(f"--recipe names one recipe twice: {', '.join(options.recipe)}")
            options.recipe = names
        if not options.min_batch_ms > 0:
            raise ValueError(f"--min-batch-ms must be positive, got {options.min_batch_ms:g}")
        if not options.settle_ms >= 0:
            raise ValueError(f"--settle-ms must not be negative, got {options.settle_ms:g}")
        run.cells()
        if "decode" in options.phase:
            run.decode_cells()
        run.contenders()
        if options.plot:
            report.need_matplotlib()
            if options.report == "speed" and set(options.phase) <= {"prefill", "decode"}:
                raise ValueError("--plot draws speed by length, of which phase prefill and decode have none")
        if options.tensors is not None:
            data.load_user_tensors(options.tensors)  # refused now and not after the timing
        if options.report in ("speed", "overhead") and not hopper:
            raise ValueError(
                f"--report {options.report} needs "
                + (
                    f"a GPU of compute capability {CAPABILITIES}"
                    if options.backend == "sm80"
                    else "a Hopper GPU (compute capability 9.x)"
                )
                + f": {device}"
            )
    except (ValueError, FileNotFoundError, report.PlotUnavailable) as error:
        parser.error(str(error))  # exits with status 2

    meta = record.collect_meta(shlex.join(["python", "-m", "cute_attn.bench", *argv]))
    head = header_lines(meta)
    if not hopper:
        notice = (
            f"No Hopper GPU: {device}. Nothing is timed; errors come from the emulator, kernel figures from "
            "the compiled sm_90a code."
        )
        if options.dtype != "fp8":
            notice += " The 16-bit kernels have no emulator: the errors are those of the 8-bit ones."
        head.insert(0, notice)
        console.print(notice, style="bold yellow")
    for line in head if hopper else head[1:]:
        console.print(line, highlight=False)
    console.print()
    for name in reports:
        if name == "speed":
            run.speed()
        elif name == "overhead":
            run.overhead()
        elif name == "accuracy":
            run.accuracy(hopper)
        elif name == "memory":
            run.memory(hopper)
        elif name == "io":
            run.io()
        else:
            run.figures()
        if run.incomplete:
            break
    run.write(meta, head)
    bad = [row for row in run.rows if row["provider"] == peers.OURS and row["status"] in ("failed", "wrong")]
    if bad:
        console.print(f"{len(bad)} results of cute_attn are missing or wrong, see above.", style="bold red")
    return 1 if bad or run.incomplete else 0


if __name__ == "__main__":
    sys.exit(main())
