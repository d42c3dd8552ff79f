"""The parameter grid of FlashAttention-3's public forward tests, run through this library's kernels.

    python perf/fa3_grid.py RECORD.json                       every cell
    python perf/fa3_grid.py RECORD.json --seconds 60 --seed 1   what fits into a minute, in a random order
    python perf/fa3_grid.py --list                            how many cells there are; needs no GPU

The cells are those of `test_flash_attn_output` and `test_flash_attn_varlen_output` in hopper/test_flash_attn.py of
Dao-AILab/flash-attention: lengths of 1 to 4224 with odd pairs, head dimensions and another one of V, MHA, GQA and MQA,
masks, windows, softcap, and sequences of unlike length with empty ones and unused keys among them. Left out is what
this library does not have: a second query (`qv`), attention in chunks, 512 columns of V, splits of the keys, unused
queries.

Processes share the GPU. Each takes groups of cells that need the same kernels; others compile for it while it runs
cells whose kernels are there. Every output is compared with float64 on the device (a Hopper GPU has the arithmetic for
it). The largest error of a batch, or of each sequence of unlike length, may be twice that of torch's own attention in
16 bits on the same inputs, scores in memory, plus one step of the output's dtype; with e4m3 operands three times that
of attention with P in e4m3. lse is good to 1e-3, of e4m3 operands to 0.1; rows without keys are 0 and -inf. Memory for
results is NaN until a kernel has written it.

RECORD.json has a row for each group and number of key heads, with counts of its cells and the worst errors, and one for
each cell that was wrong or failed. RECORD.json.cells has what came of every cell: those that this tree of sources has
run are not run again, nor one that did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fa3_cells import (
    HEADS,
    HEADS_K,
    LSE_ERROR,
    SOFTCAP,
    Cell,
    Group,
    call,
    cells,
    compare,
    draw_sizes,
    make_inputs,
    poisoned,
    recorded_kernels,
)

from cute_attn.bench import record
from cute_attn.compile import compile_kernel

AHEAD = 400  # cells that a process plans before it has run them, so that it always has kernels to compile
CELL_LIMIT = 120.0  # seconds: a cell on a GPU that takes longer hangs
GRACE = 20.0  # seconds past the time limit for the cells under way
MEMORY = 0.9  # of the GPU's, for all processes
LOST = 3  # exit status of a process whose CUDA context is gone

Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------
# What came of the cells, on disk
# ------------------------------------------------------------------------------------------------------------


def cells_file(path: Path, process: int | None = None) -> Path:
    """What came of the cells, beside the record at `path`; of one process while it runs.

    Lines of JSON: first the source trees, then {"begin": cell} before a cell runs, and its row behind it.
    """
    return path.with_name(f"{path.name}.cells" + ("" if process is None else f".{process}"))


def process_files(path: Path) -> list[Path]:
    """Those of single processes."""
    return sorted(path.parent.glob(f"{path.name}.cells.[0-9]*"))


def read_cells(file: Path, trees: Row) -> tuple[dict[str, Row], str | None]:
    """(rows by cell, the cell that began and did not end) of a file of `cells_file` that these sources made."""
    rows: dict[str, Row] = {}
    begun = None
    with file.open(encoding="utf-8") as lines:
        if json.loads(next(lines, "null")) != trees:
            return {}, None
        for line in lines:
            if not line.endswith("\n"):
                break  # the process was killed while it wrote
            row = json.loads(line)
            begun = row.get("begin")
            if begun is None:
                rows[row["cell"]] = row
    return rows, begun


def read_all(files: Iterable[Path], trees: Row) -> dict[str, Row]:
    """Rows of several files, those of later ones first. A cell that did not end counts as failed."""
    found: dict[str, Row] = {}
    for file in files:
        if file.exists():
            rows, begun = read_cells(file, trees)
            found |= rows
            if begun is not None:
                reason = "did not end: the process was killed while it ran"
                found[begun] = {"cell": begun, "status": "failed", "reason": reason}
    return found


def save(path: Path, meta: Row, rows: dict[str, Row], options: argparse.Namespace) -> None:
    """Write the record and its file of cells, which takes the place of those of single processes."""
    file = cells_file(path)
    scratch = file.with_name(f"{file.name}.tmp")
    scratch.write_text("".join(json.dumps(x) + "\n" for x in (source_trees(meta), *rows.values())))
    scratch.replace(file)
    for part in process_files(path):
        part.unlink()
    record.write(path, meta, record_rows(rows, options))


def source_trees(meta: Row) -> Row:
    """What names the sources."""
    return {tree: meta["git"][tree] for tree in record.TREES}


def record_rows(rows: dict[str, Row], options: argparse.Namespace) -> list[Row]:
    """A row for each group and kind of heads of which a cell was run or skipped, then the cells with faults."""
    groups: dict[tuple[Group, str], list[Cell]] = defaultdict(list)
    for cell in cells():
        groups[cell.group, cell.heads].append(cell)
    found, faults = [], []
    for members in groups.values():
        done = [(cell, rows[cell.name]) for cell in members if cell.name in rows]
        if done:
            found.append(group_row(members, [row for _, row in done], options))
            faults += [
                fault_row(cell, row, options) for cell, row in done if row["status"] in ("wrong", "failed")
            ]
    return found + faults


def about(cell: Cell, options: argparse.Namespace, **more: Any) -> Row:
    """The fields of a record's row that a cell shares with its group."""
    return record.make_row(
        provider="cute_attn",
        backend=options.backend,
        phase="accuracy_kernel",
        dtype="fp8" if cell.dtype == "e4m3" else cell.dtype,
        heads_q=HEADS,
        heads_k=HEADS_K[cell.heads],
        head_dim=cell.head_dim,
        causal=cell.causal,
        head_dim_v=cell.head_dim_v,
        local=cell.local,
        softcap=SOFTCAP if cell.softcap else 0.0,
        varlen=cell.varlen,
        **more,
    )


def group_row(members: list[Cell], done: list[Row], options: argparse.Namespace) -> Row:
    """Counts and worst errors of the cells of a group and a kind of heads."""
    counts = Counter(row["status"] for row in done)
    worst = max(done, key=over_torch)
    errors = [row["lse_error"] for row in done if row.get("lse_error") is not None]
    status = next(status for status in ("failed", "wrong", "ok", "skipped") if counts[status])
    reason = None
    if status != "ok":
        reason = next(f"{row['cell']}: {row['reason']}" for row in done if row["status"] == status)
    return about(
        members[0],
        options,
        status=status,
        reason=reason,
        **{f"cells_{name}": counts[name] for name in ("ok", "wrong", "failed", "skipped")},
        cells_not_run=len(members) - len(done),
        worst_over_torch=finite(round(over_torch(worst), 3)) if over_torch(worst) else None,
        worst_cell=worst["cell"] if over_torch(worst) else None,
        worst_lse_error=max(errors, default=None),
    )


def fault_row(cell: Cell, row: Row, options: argparse.Namespace) -> Row:
    """All about a cell that was wrong or failed."""
    seed = row.get("seed", options.seed)
    left, right = draw_sizes(cell, seed).window
    sizes = {"batch": cell.batch, "seqlen_q": cell.seqlen_q, "seqlen_k": cell.seqlen_k}
    return about(cell, options, **sizes, window_left=left, window_right=right) | {"seed": seed} | row


def over_torch(row: Row) -> float:
    """Error over that of torch's attention; 0 where there is none of it."""
    if not row.get("torch_error"):
        return 0.0
    return math.inf if row["max_error"] is None else row["max_error"] / row["torch_error"]


def finite(x: float) -> float | None:
    """A number that JSON has."""
    return x if math.isfinite(x) else None


# ------------------------------------------------------------------------------------------------------------
# One process
# ------------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """What the processes of a run have in common."""

    record: str
    groups: list[list[str]]  # names of cells
    trees: Row
    device: str
    backend: str
    seed: int
    processes: int
    jobs: int  # of each
    end: float | None  # by time.time()
    parent: int


def compile_one(config: Any) -> None:
    """Compile into the disk cache. For a process of its own: a kernel does not travel between them."""
    compile_kernel(config)


def run_cell(cell: Cell, device: str, backend: str, seed: int) -> Row:
    """What came of a cell."""
    row: Row = {"cell": cell.name, "status": "ok", "seed": seed}
    try:
        x = make_inputs(cell, device, seed)
        with poisoned():
            out, lse = call(cell, x, backend)
        errors = compare(cell, x, out, lse)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return row | {"status": "failed", "reason": reason}
    wrong = errors.excess(LSE_ERROR[cell.dtype])
    row |= {
        "max_error": finite(errors.out),
        "torch_error": finite(errors.torch),
        "allowed_error": finite(errors.allowed),
        "lse_error": finite(errors.lse),
    }
    return row if wrong is None else row | {"status": "wrong", "reason": wrong}


def device_works(device: str) -> bool:
    """Whether the CUDA context still answers."""
    if not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class Run:
    """The part of one process in a task: groups that no other has taken, each cell when its kernels are compiled."""

    def __init__(self, task: Task, folder: Path, process: int):
        """
        Args:
            folder: where an empty file says that a group is taken.
            process: number of this one.
        """
        self.task, self.folder = task, folder
        self.by_name = {cell.name: cell for cell in cells()}
        self.groups = iter(enumerate(task.groups))
        self.more = True  # groups to take
        self.kernels: dict[Any, Future[None] | None] = {}
        self.waiting: dict[tuple[Any, ...], list[Cell]] = {}  # cells by the kernels that they need
        self.lost = False
        self.file = cells_file(Path(task.record), process)

    def loop(self) -> None:
        """Until all is done, the time is up, the parent gone, or the device lost."""
        with contextlib.ExitStack() as stack:
            pool = None
            if self.task.backend == "sm90":
                pool = ProcessPoolExecutor(self.task.jobs, mp_context=multiprocessing.get_context("spawn"))
                stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            self.out = stack.enter_context(self.file.open("w", encoding="utf-8"))
            self.write(self.task.trees)
            ahead = 1 if pool is None else AHEAD
            while (self.more or self.waiting) and not self.lost and not self.over():
                planned = sum(map(len, self.waiting.values()))
                ready = next((key for key in self.waiting if all(map(self.compiled, key))), None)
                if (
                    self.more
                    and (ready is None or planned < ahead)
                    and len(self.pending()) < 2 * self.task.jobs
                ):
                    self.take_group(pool)
                elif ready is not None:
                    self.run(self.waiting[ready].pop())
                    if not self.waiting[ready]:
                        del self.waiting[ready]
                else:
                    wait(self.pending(), timeout=1.0, return_when=FIRST_COMPLETED)

    def over(self) -> bool:
        late = self.task.end is not None and time.time() > self.task.end
        return late or self.task.parent not in (os.getpid(), os.getppid())

    def write(self, row: Row) -> None:
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()

    def take_group(self, pool: ProcessPoolExecutor | None) -> None:
        """Plan the cells of the next group that is free, and compile their kernels."""
        for number, names in self.groups:
            try:
                (self.folder / f"{number}.taken").touch(exist_ok=False)
            except FileExistsError:
                continue
            for cell in map(self.by_name.__getitem__, names):
                kernels = self.needs(cell) if pool is not None else ()
                self.waiting.setdefault(kernels, []).append(cell)
                for config in kernels:
                    if config not in self.kernels:
                        self.kernels[config] = self.submit(pool, config)
            return
        self.more = False

    def needs(self, cell: Cell) -> tuple[Any, ...]:
        """Configurations that the cell's call asks for."""
        x = make_inputs(cell, self.task.device, self.task.seed, contents=False)
        with recorded_kernels() as asked:
            try:
                call(cell, x, self.task.backend)
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                return ()  # running it says what is wrong
        return tuple(asked)

    def pending(self) -> list[Future[None]]:
        return [job for job in self.kernels.values() if job is not None and not job.done()]

    def submit(self, pool: ProcessPoolExecutor | None, config: Any) -> Future[None] | None:
        """The compilation of `config`; None where the cell has to do it, as the pool is gone."""
        try:
            return None if pool is None else pool.submit(compile_one, config)
        except BrokenProcessPool:
            return None

    def compiled(self, config: Any) -> bool:
        """Whether it need not be waited for: a failure shows again where the cell runs."""
        job = self.kernels[config]
        return job is None or job.done()

    def run(self, cell: Cell) -> None:
        """Run one cell, and note whether the device survived it."""
        self.write({"begin": cell.name})
        row = run_cell(cell, self.task.device, self.task.backend, self.task.seed)
        self.write(row)
        if row["status"] == "failed":
            self.lost = not device_works(self.task.device)


def run_child(folder: Path, process: int) -> None:
    """One of several processes; its task is in `folder`. Ends it without a wait for compilations under way: the parent
    ends them."""
    task = Task(**json.loads((folder / "task.json").read_text()))
    if task.device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(MEMORY / task.processes)
    run = Run(task, folder, process)
    run.loop()
    os._exit(LOST if run.lost else 0)


# ------------------------------------------------------------------------------------------------------------
# All processes
# ------------------------------------------------------------------------------------------------------------


def run_processes(task: Task, folder: Path) -> list[str]:
    """Run a task; what went wrong with its processes. Where nothing compiles, one is this process."""
    if task.processes == 1 and task.backend != "sm90":
        Run(task, folder, 0).loop()
        return []
    (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", str(folder)]
    children = [  # each with a process group of its own, which has those that compile for it, too
        subprocess.Popen([*command, str(i)], env=environment, start_new_session=True)
        for i in range(task.processes)
    ]
    wrong: list[str] = []
    running = dict(enumerate(children))
    try:
        while running:
            time.sleep(0.2)
            for i, child in list(running.items()):
                status = child.poll()
                if status is not None:
                    del running[i]
                    kill_group(child)
                    if status:
                        what = "lost its CUDA context" if status == LOST else f"ended with status {status}"
                        wrong.append(f"process {i} {what}")
                elif task.end is not None and time.time() > task.end + GRACE:
                    wrong.append(f"process {i} was killed: it did not end in time")
                    kill_group(child)
                    del running[i]
                elif task.device.startswith("cuda") and hangs(cells_file(Path(task.record), i), task.trees):
                    wrong.append(f"process {i} was killed: its cell took over {CELL_LIMIT:.0f} s")
                    kill_group(child)
                    del running[i]
    finally:
        for child in running.values():
            kill_group(child)
    return wrong


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """End a child, if it has not ended, and those that compile for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def hangs(file: Path, trees: Row) -> bool:
    """Whether the process that writes `file` has been at one cell for too long."""
    if not file.exists() or time.time() - file.stat().st_mtime < CELL_LIMIT:
        return False
    return read_cells(file, trees)[1] is not None


def summary(rows: Iterable[Row], left: int, seconds: float) -> str:
    """What came of cells, in a few lines."""
    rows, by_name = list(rows), {cell.name: cell for cell in cells()}
    counts = Counter(row["status"] for row in rows)
    text = [
        f"{len(rows)} cells in {seconds:.0f} s: "
        + ", ".join(f"{n} {status}" for status, n in counts.items())
        + f"; {left} not run"
    ]
    kinds: dict[str, list[float]] = {}
    for row in rows:
        if over_torch(row):
            cell = by_name[row["cell"]]
            flags = [name for name in ("causal", "local", "softcap", "varlen") if getattr(cell, name)]
            for name in (cell.dtype, f"d{cell.head_dim}", *flags):
                kinds.setdefault(name, []).append(over_torch(row))
    worst = (f"{name} {max(ratios):.2f} ({len(ratios)})" for name, ratios in sorted(kinds.items()))
    text += ["worst error over torch's, and cells: " + ", ".join(worst)] if kinds else []
    errors = [
        row["lse_error"]
        for row in rows
        if row.get("lse_error") is not None and by_name[row["cell"]].dtype != "e4m3"
    ]
    text += [f"worst lse error in 16 bits: {max(errors):.1e}"] if errors else []
    bad = [row for row in rows if row["status"] in ("wrong", "failed")]
    text += [f"{row['status']}: {row['cell']}: {row['reason']}" for row in bad[:12]]
    skipped = Counter(row["reason"] for row in rows if row["status"] == "skipped")
    text += [f"skipped {n}: {reason}" for reason, n in skipped.items()]
    return "\n".join(line[:400] for line in text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, nargs="?", help="file to write, and to go on from")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="stop after these, and the cells under way (default: at the end)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of tensors, windows and order (default: 0)")
    parser.add_argument(
        "--only", type=re.compile, default=re.compile(""), help="regular expression for names of cells"
    )
    parser.add_argument("--cells", type=int, help="at most so many, at random")
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes",
        type=int,
        help="that run cells (default: one for two CPUs, at most 12; 1 where no kernels run)",
    )
    parser.add_argument("--jobs", type=int, default=cpus, help="processes that compile (default: CPUs)")
    parser.add_argument("--retry", action="store_true", help="also cells that failed or were wrong before")
    parser.add_argument("--list", action="store_true", help="print the number of cells of each kind and end")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument(
        "--backend", default="sm90", help="sm90; with --device cpu reference (16 bits) or emulator"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # folder and number, see `run_processes`
    options = parser.parse_args(argv)
    if options.record is None and not options.list and options.child is None:
        parser.error("RECORD.json or --list is needed")
    if options.processes is None:
        options.processes = min(12, max(1, cpus // 2)) if options.backend == "sm90" else 1
    return options


def choose(options: argparse.Namespace, before: dict[str, Row]) -> tuple[list[list[Cell]], dict[str, Row]]:
    """(groups of cells to run, in a random order; rows of those that are skipped)."""
    final = ("ok", "skipped") if options.retry else record.STATUSES
    kept = {name for name, row in before.items() if row["status"] in final}
    todo = [cell for cell in cells() if cell.name not in kept and options.only.search(cell.name)]
    generator = random.Random(options.seed)
    generator.shuffle(todo)
    groups: dict[Group, list[Cell]] = defaultdict(list)
    skipped = {}
    for cell in todo[: options.cells]:
        if cell.unsupported is None:
            groups[cell.group].append(cell)
        else:
            skipped[cell.name] = {"cell": cell.name, "status": "skipped", "reason": cell.unsupported}
    return list(groups.values()), skipped


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if a cell was wrong or failed, or a process did."""
    options = parse(argv)
    if options.child is not None:
        run_child(Path(options.child[0]), int(options.child[1]))
    if options.list:
        found = [cell for cell in cells() if options.only.search(cell.name)]
        kinds = Counter((cell.dtype, "varlen" if cell.varlen else "batch") for cell in found)
        print(
            "\n".join(f"{dtype} {kind}: {n}" for (dtype, kind), n in kinds.items()) + f"\nall: {len(found)}"
        )
        return 0
    begin = time.time()
    meta = record.collect_meta(
        shlex.join(["python", "perf/fa3_grid.py", *(sys.argv[1:] if argv is None else argv)])
    )
    trees = source_trees(meta)
    path = options.record.resolve()
    before = read_all([cells_file(path), *process_files(path)], trees)
    if process_files(path):  # of a run that was killed
        save(path, meta, before, options)
    groups, skipped = choose(options, before)
    processes = min(options.processes, max(1, len(groups)))
    task = Task(
        record=str(path),
        groups=[[cell.name for cell in group] for group in groups],
        trees=trees,
        device=options.device,
        backend=options.backend,
        seed=options.seed,
        processes=processes,
        jobs=max(1, options.jobs // processes),
        end=finite(begin + options.seconds),
        parent=os.getpid(),
    )
    wrong: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="fa3_grid_") as folder:
            wrong = run_processes(task, Path(folder)) if groups else []
    finally:
        new = read_all(process_files(path), trees)
        save(path, meta, before | skipped | new, options)
    done = [*skipped.values(), *new.values()]
    left = sum(map(len, groups)) + len(skipped) - len(done)
    print(summary(done, left, time.time() - begin), flush=True)
    others = [row for name, row in before.items() if name not in new]
    if others:
        bad = sum(row["status"] in ("wrong", "failed") for row in others)
        print(f"{len(others)} cells were in {options.record} already, {bad} of them wrong or failed")
    if wrong:
        print("\n".join([*wrong, "run the command again for the rest"]))
    return int(bool(wrong) or any(row["status"] in ("wrong", "failed") for row in done))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children end with their parent
    sys.exit(main())
