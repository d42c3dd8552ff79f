"""The parameter grid of FlashAttention-3's public forward tests, run through this library's kernels.

    python perf/fa3_grid.py RECORD.json                       every cell
    python perf/fa3_grid.py RECORD.json --seconds 60 --seed 1   what fits into a minute, in a random order
    python perf/fa3_grid.py --list                            how many cells there are; needs no GPU

The cells are those of `test_flash_attn_output` and `test_flash_attn_varlen_output` in hopper/test_flash_attn.py of
Dao-AILab/flash-attention: lengths of 1 to 4224 with odd pairs, head dimensions and another one of V, MHA, GQA and MQA,
masks, windows, softcap, and sequences of unlike length with empty ones and unused keys among them. Left out is what
this library does not have: a second query (`qv`), attention in chunks, 512 columns of V, splits of the keys, unused
queries.

Kernels compile in processes while cells run whose kernels are ready. Every output is compared with float64 on the
device (a Hopper GPU has the arithmetic for it). Its largest error may be twice that of torch's own attention in 16
bits on the same inputs, scores in memory, plus one step of the output's dtype; with e4m3 operands three times that of
attention with P in e4m3. lse is good to 1e-3; rows without keys are 0 and -inf. What `torch.empty` returns is NaN
until a kernel has written it.

RECORD.json is read first if it is there: cells that this tree of sources has run are not run again, nor one that did
not end (RECORD.json.running names it).
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
import re
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import cute_attn
from cute_attn import api, launch
from cute_attn.bench import record
from cute_attn.compile import compile_kernel
from cute_attn.flash import reference

LENGTHS = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
)  # fmt: skip
VARLEN_LENGTHS = (
    (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217), (113, 211),
    (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
    (4096, 4096),
)  # fmt: skip
HEAD_DIMS = {64: (256, 64), 96: (96,), 128: (128,), 192: (128, 192), 256: (256,)}  # of Q and K: those of V
HEADS = 6
HEADS_K = {"mha": 6, "gqa": 2, "mqa": 1}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
SOFTCAP = 15.0
# Of torch's error. P in e4m3 by its code is 1.2 times as far off as by conversion, and largest errors scatter.
ALLOWED = {"bf16": 2.0, "fp16": 2.0, "e4m3": 3.0}
LSE_ERROR = {"bf16": 1e-3, "fp16": 1e-3, "e4m3": 0.1}  # relative where lse exceeds 1
SAVE_EVERY = 30.0  # seconds


@dataclass(frozen=True)
class Cell:
    """One call of the grid."""

    dtype: str
    heads: str  # "mha", "gqa" or "mqa"
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    local: bool
    softcap: bool
    varlen: bool = False
    unused: bool = False  # keys behind those that count, in every sequence

    @property
    def name(self) -> str:
        """Unique; --only searches it."""
        masks = (name for name in ("causal", "local", "softcap", "varlen", "unused") if getattr(self, name))
        dims = f"d{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}")
        return "-".join([self.dtype, self.heads, dims, f"{self.seqlen_q}x{self.seqlen_k}", *masks])

    @property
    def batch(self) -> int:
        """Sequences."""
        return 9 if (self.seqlen_q if self.varlen else self.seqlen_k) <= 2048 else 2


def cells() -> list[Cell]:
    """The whole grid. Of e4m3 operands V has the head dimension of Q."""
    found = []
    flags = (False, True)
    for varlen in flags:
        for dtype, heads, (head_dim, of_v), lengths, causal, local, softcap in itertools.product(
            DTYPES, HEADS_K, HEAD_DIMS.items(), VARLEN_LENGTHS if varlen else LENGTHS, flags, flags, flags
        ):
            for head_dim_v, unused in itertools.product(
                (head_dim,) if dtype == "e4m3" else of_v, flags if varlen else (False,)
            ):
                found.append(
                    Cell(dtype, heads, head_dim, head_dim_v, *lengths, causal, local, softcap, varlen, unused)
                )
    return found


# ------------------------------------------------------------------------------------------------------------
# One cell
# ------------------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Tensors and options of a call; without `lengths` a batch, else sequences one behind another."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: tuple[int, int]
    softcap: float
    descales: tuple[Tensor, ...] | None
    lengths_q: list[int]
    lengths_k: list[int]  # of the keys that count
    room_k: list[int]  # with those behind them


def make_inputs(cell: Cell, device: str, generator: random.Random) -> Inputs:
    """Random tensors of a cell. With softcap scores reach its range."""

    def below(low: int, high: int) -> int:
        return generator.randint(low, max(low, high))

    batch, heads_k = cell.batch, HEADS_K[cell.heads]
    lengths_q, room_k = [cell.seqlen_q] * batch, [cell.seqlen_k] * batch
    lengths_k = room_k
    if cell.varlen:
        lengths_q = [below(max(1, cell.seqlen_q - 20), cell.seqlen_q) for _ in range(batch)]
        room_k = [below(max(0, cell.seqlen_k - 20), cell.seqlen_k) for _ in range(batch)]
        # every fifth sequence is empty, and the last
        room_k = [0 if i % 5 == 0 or i == batch - 1 else room for i, room in enumerate(room_k)]
        lengths_k = [below(room // 3, room) for room in room_k] if cell.unused else room_k
    shapes = [
        (sum(lengths_q), HEADS, cell.head_dim),
        (sum(room_k), heads_k, cell.head_dim),
        (sum(room_k), heads_k, cell.head_dim_v),
    ]
    q, k, v = (torch.randn(shape, device=device) for shape in shapes)
    if cell.softcap:
        q *= SOFTCAP / 4
    q, k, v = (x.to(DTYPES[cell.dtype]) for x in (q, k, v))
    if not cell.varlen:
        q, k, v = (x.unflatten(0, (batch, x.shape[0] // batch)) for x in (q, k, v))
    window = (-1, -1)
    if cell.local:
        window = (below(0, cell.seqlen_k - 1), below(0, cell.seqlen_k - 1))
    descales = None
    if cell.dtype == "e4m3":
        descales = tuple(torch.rand(batch, heads_k, device=device) * 2 for _ in range(3))
    softcap = SOFTCAP if cell.softcap else 0.0
    return Inputs(q, k, v, window, softcap, descales, lengths_q, lengths_k, room_k)


def call(cell: Cell, x: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of the library.

    Raises NotImplementedError, with the reason, where it has no such function or option.
    """
    options: dict[str, Any] = {"causal": cell.causal, "return_lse": True, "backend": backend}
    if cell.local:
        options["window_size"] = x.window
    if x.softcap:
        options["softcap"] = x.softcap
    if x.descales is not None:
        if cell.varlen:
            raise NotImplementedError("no function takes ready e4m3 tensors of unlike length")
        options |= dict(zip(("q_descale", "k_descale", "v_descale"), x.descales, strict=True))
        return cute_attn.flash_attn_fp8_func(x.q, x.k, x.v, **options)
    if not cell.varlen:
        return cute_attn.flash_attn_func(x.q, x.k, x.v, **options)  # type: ignore[return-value]

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(x.q.device)

    if cell.unused:
        options["seqused_k"] = torch.tensor(x.lengths_k, dtype=torch.int32).to(x.q.device)
    longest = max(x.lengths_q), max(x.room_k)
    return cute_attn.flash_attn_varlen_func(
        x.q, x.k, x.v, starts(x.lengths_q), starts(x.room_k), *longest, **options
    )


class Poison(TorchFunctionMode):
    """What `torch.empty` returns holds NaN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty and result.numel():
            result.view(torch.uint8).fill_(0xFF)
        return result


@dataclass
class Errors:
    """Largest errors of an output, and what is allowed."""

    out: float = 0.0
    allowed: float = 0.0
    torch: float = 0.0  # of torch's attention
    lse: float = 0.0  # absolute, or relative where lse exceeds 1
    where: str = ""  # of the first output that is too far off
    empty_rows: bool = True  # rows without keys are 0 and -inf

    def excess(self, limit_lse: float) -> str | None:
        """What is wrong; None if nothing is."""
        wrong = []
        if not self.out <= self.allowed:
            wrong.append(f"error {self.out:.3e}, allowed {self.allowed:.3e}, first at {self.where}")
        if not self.lse <= limit_lse:
            wrong.append(f"lse error {self.lse:.3e}, allowed {limit_lse:g}")
        if not self.empty_rows:
            wrong.append("a row without keys is not 0 and -inf")
        return "; ".join(wrong) or None


def compare(cell: Cell, x: Inputs, out: Tensor, lse: Tensor) -> Errors:
    """Errors of (out, lse) against float64, batch or sequence by sequence."""
    found = Errors()
    window = (x.window[0], 0) if cell.causal else x.window
    options: dict[str, Any] = {
        "softmax_scale": 1.0 / math.sqrt(cell.head_dim),
        "window": window,
        "softcap": x.softcap,
    }
    row = key = 0
    parts: list[tuple[Tensor, ...]] = []
    if cell.varlen:
        for n, room, m in zip(x.lengths_q, x.room_k, x.lengths_k, strict=True):
            rows, keys = slice(row, row + n), slice(key, key + m)
            row, key = row + n, key + room
            parts.append(
                tuple(y.unsqueeze(0) for y in (x.q[rows], x.k[keys], x.v[keys], out[rows], lse[:, rows]))
            )
    else:
        parts = [(x.q, x.k, x.v, out, lse)]
    for number, (q, k, v, got, got_lse) in enumerate(parts):
        if x.descales is not None:
            q, k, v = (
                y.float() * d.repeat_interleave(y.shape[2] // d.shape[1], dim=1)[:, None, :, None]
                for y, d in zip((q, k, v), x.descales, strict=True)
            )
        exact, exact_lse = reference(q, k, v, dtype=torch.float64, **options)
        if cell.dtype == "e4m3":
            rough = in_e4m3(q, k, v, options)
        else:
            rough = reference(q, k, v, dtype=q.dtype, **options)[0]
        if not exact.numel():
            continue
        theirs = (rough.double() - exact).abs().max().item()
        allowed = ALLOWED[cell.dtype] * theirs + torch.finfo(got.dtype).eps * exact.abs().max().item()
        difference = (got.double() - exact).abs()
        error = difference.nan_to_num(nan=math.inf).max().item()
        if error > allowed and not found.where:
            at = (~(difference <= allowed)).nonzero()[0].tolist()
            found.where = f"(batch, query, head, column) {[number + at[0], *at[1:]]}"
        if error - allowed >= found.out - found.allowed or not found.allowed:
            found.out, found.allowed, found.torch = error, allowed, theirs
        empty = exact_lse == -math.inf
        off = (got_lse.double() - exact_lse)[~empty].abs() / exact_lse[~empty].abs().clamp(min=1.0)
        if off.numel():
            found.lse = max(found.lse, off.nan_to_num(nan=math.inf).max().item())
        rows_empty = bool((got.transpose(1, 2)[empty] == 0).all()) and bool(
            (got_lse[empty] == -math.inf).all()
        )
        found.empty_rows = found.empty_rows and rows_empty
    return found


def in_e4m3(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention with P, of which the largest of a row is 1, rounded to e4m3. An identity for V gives P."""
    heads, seqlen_k = v.shape[2], v.shape[1]
    one = (
        torch.eye(seqlen_k, device=v.device).view(1, seqlen_k, 1, seqlen_k).expand(v.shape[0], -1, heads, -1)
    )
    p = reference(q, k, one, dtype=torch.float32, **options)[0]  # (batch, seqlen_q, heads_q, seqlen_k)
    p = (p / p.amax(dim=3, keepdim=True).clamp(min=1e-30)).transpose(1, 2)
    total = p.sum(dim=3, keepdim=True).clamp(min=1.0)
    values = v.float().transpose(1, 2).repeat_interleave(q.shape[2] // heads, dim=1)
    return ((p.to(torch.float8_e4m3fn).float() @ values) / total).transpose(1, 2).to(torch.bfloat16)


# ------------------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------------------


@contextmanager
def recorded_kernels() -> Iterator[list[Any]]:
    """Calls inside launch nothing; the list takes the configurations that they ask for."""
    asked: list[Any] = []

    def note(config: Any) -> Callable[..., None]:
        asked.append(config)
        return lambda *args: None

    kept, launch.compile_kernel = launch.compile_kernel, note
    try:
        yield asked
    finally:
        launch.compile_kernel = kept
        api._calls.clear()  # calls that were made ready hold what `note` returned


def compile_one(config: Any) -> None:
    """Compile into the disk cache. For a process of its own: a kernel does not travel between them."""
    compile_kernel(config)


def running_file(path: Path) -> Path:
    """Names the cell that runs, beside the record at `path`."""
    return path.with_name(f"{path.name}.running")


def about(cell: Cell, backend: str, seed: int) -> dict[str, Any]:
    """The row of a cell, as far as it is known before it runs."""
    window = make_inputs(cell, "meta", random.Random(f"{seed} {cell.name}")).window
    return record.make_row(
        provider="cute_attn",
        backend=backend,
        phase="accuracy_kernel",
        dtype="fp8" if cell.dtype == "e4m3" else cell.dtype,
        batch=cell.batch,
        seqlen_q=cell.seqlen_q,
        seqlen_k=cell.seqlen_k,
        heads_q=HEADS,
        heads_k=HEADS_K[cell.heads],
        head_dim=cell.head_dim,
        causal=cell.causal,
        cell=cell.name,
        head_dim_v=cell.head_dim_v,
        window_left=window[0],
        window_right=window[1],
        softcap=SOFTCAP if cell.softcap else 0.0,
        varlen=cell.varlen,
        seed=seed,
    )


def run_cell(cell: Cell, device: str, backend: str, seed: int) -> dict[str, Any]:
    """The row of a cell."""
    row = about(cell, backend, seed)
    torch.manual_seed(random.Random(f"{seed} {cell.name} tensors").getrandbits(60))
    x = make_inputs(cell, device, random.Random(f"{seed} {cell.name}"))
    try:
        with Poison():
            out, lse = call(cell, x, backend)
        errors = compare(cell, x, out, lse)
    except NotImplementedError as error:
        return row | {"status": "skipped", "reason": str(error)[:300]}
    except Exception as error:
        return row | {
            "status": "failed",
            "reason": " ".join(f"{type(error).__name__}: {error}".split())[:300],
        }
    reason = errors.excess(LSE_ERROR[cell.dtype])
    row |= {
        "max_error": finite(errors.out),
        "torch_error": finite(errors.torch),
        "allowed_error": finite(errors.allowed),
        "lse_error": finite(errors.lse),
    }
    return row if reason is None else row | {"status": "wrong", "reason": reason}


def finite(x: float) -> float | None:
    """A number that JSON has."""
    return x if math.isfinite(x) else None


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
    """Cells in the order given, each when its kernels are compiled."""

    def __init__(self, todo: list[Cell], options: argparse.Namespace):
        self.todo = deque(todo)
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.kernels: dict[Any, Future[None] | None] = {}
        self.waiting: deque[tuple[Cell, list[Any]]] = deque()
        self.lost = False

    def needs(self, cell: Cell) -> list[Any]:
        """Configurations that the cell's call asks for."""
        x = make_inputs(cell, self.options.device, random.Random(f"{self.options.seed} {cell.name}"))
        with recorded_kernels() as asked:
            try:
                call(cell, x, self.options.backend)
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                return []  # running it says what is wrong
        return asked

    def pending(self) -> list[Future[None]]:
        return [job for job in self.kernels.values() if job is not None and not job.done()]

    def loop(
        self, pool: ProcessPoolExecutor | None, end: float, save: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        """Until all is done, the time is up, or the device lost."""
        saved = time.monotonic()
        most = 2 * self.options.jobs
        while (self.todo or self.waiting) and time.monotonic() < end and not self.lost:
            ready = next((item for item in self.waiting if all(self.compiled(c) for c in item[1])), None)
            if ready is not None:
                self.waiting.remove(ready)
                self.run(ready[0])
            elif self.todo and len(self.pending()) < most:
                cell = self.todo.popleft()
                asked = self.needs(cell) if pool is not None else []
                for config in asked:
                    if config not in self.kernels:
                        self.kernels[config] = self.submit(pool, config)
                self.waiting.append((cell, asked))
            else:
                wait(self.pending(), timeout=1.0, return_when=FIRST_COMPLETED)
            if time.monotonic() - saved > SAVE_EVERY:
                save(self.rows)
                saved = time.monotonic()

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
        running = running_file(self.options.record)
        running.write_text(cell.name)
        row = run_cell(cell, self.options.device, self.options.backend, self.options.seed)
        running.unlink()
        self.rows.append(row)
        if row["status"] == "failed":
            self.lost = not device_works(self.options.device)


def summary(rows: list[dict[str, Any]], left: int, kernels: int, seconds: float) -> str:
    """What came of it, in a few lines."""
    counts = Counter(row["status"] for row in rows)
    text = [
        f"{len(rows)} cells in {seconds:.0f} s with {kernels} kernels: "
        + ", ".join(f"{n} {status}" for status, n in counts.items())
        + f"; {left} not run"
    ]
    done = [row for row in rows if row.get("torch_error")]
    groups: dict[str, list[float]] = {}
    for row in done:
        ratio = (row["max_error"] or math.inf) / row["torch_error"]
        names = [row["dtype"], f"d{row['head_dim']}"]
        names += ["causal"] if row["causal"] else []
        names += ["window"] if (row["window_left"], row["window_right"]) != (-1, -1) else []
        names += ["softcap"] if row["softcap"] else []
        names += ["varlen"] if row["varlen"] else []
        for name in names:
            groups.setdefault(name, []).append(ratio)
    worst = (f"{name} {max(ratios):.2f} ({len(ratios)})" for name, ratios in sorted(groups.items()))
    text += ["worst error over torch's, and cells: " + ", ".join(worst)] if groups else []
    errors = [row["lse_error"] for row in done if row["dtype"] != "fp8" and row["lse_error"] is not None]
    text += [f"worst lse error in 16 bits: {max(errors):.1e}"] if errors else []
    bad = [row for row in rows if row["status"] in ("wrong", "failed")]
    text += [f"{row['status']}: {row['cell']}: {row['reason']}" for row in bad[:12]]
    skipped = Counter(row["reason"] for row in rows if row["status"] == "skipped")
    text += [f"skipped {n}: {reason}" for reason, n in skipped.items()]
    return "\n".join(line[:400] for line in text)


def old_rows(path: Path, trees: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a record that these sources made."""
    if not path.exists():
        return []
    found = record.read(path)
    same = all(found.meta["git"][tree] == trees[tree] for tree in record.TREES)
    return found.rows if same else []


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
        help="stop after these, and the compilations under way (default: at the end)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of tensors, windows and order (default: 0)")
    parser.add_argument(
        "--only", type=re.compile, default=re.compile(""), help="regular expression for names of cells"
    )
    parser.add_argument("--cells", type=int, help="at most so many, at random")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes that compile"
    )
    parser.add_argument("--retry", action="store_true", help="also cells that failed or were wrong before")
    parser.add_argument("--list", action="store_true", help="print the number of cells of each kind and end")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument(
        "--backend", default="sm90", help="sm90; with --device cpu reference (16 bits) or emulator"
    )
    options = parser.parse_args(argv)
    if options.record is None and not options.list:
        parser.error("RECORD.json or --list is needed")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if a cell was wrong or failed."""
    options = parse(argv)
    todo = [cell for cell in cells() if options.only.search(cell.name)]
    if options.list:
        kinds = Counter((cell.dtype, "varlen" if cell.varlen else "batch") for cell in todo)
        print("\n".join(f"{dtype} {kind}: {n}" for (dtype, kind), n in kinds.items()) + f"\nall: {len(todo)}")
        return 0
    begin = time.monotonic()
    meta = record.collect_meta(
        shlex.join(["python", "perf/fa3_grid.py", *(sys.argv[1:] if argv is None else argv)])
    )
    before = old_rows(options.record, meta["git"])
    final = ("ok", "skipped") if options.retry else record.STATUSES
    kept = {row["cell"]: row for row in before if row["status"] in final}
    unfinished = running_file(options.record)
    if unfinished.exists():
        cell = next(cell for cell in cells() if cell.name == unfinished.read_text())
        reason = "did not end: the process was killed while it ran"
        kept[cell.name] = about(cell, options.backend, options.seed) | {"status": "failed", "reason": reason}
        unfinished.unlink()
    todo = [cell for cell in todo if cell.name not in kept]
    random.Random(options.seed).shuffle(todo)
    todo = todo[: options.cells]

    def save(rows: list[dict[str, Any]]) -> None:
        merged = kept | {row["cell"]: row for row in rows}
        record.write(options.record, meta, merged.values())

    run = Run(todo, options)
    end = begin + options.seconds
    if options.backend == "sm90":
        with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            run.loop(pool, end, save)
            pool.shutdown(wait=False, cancel_futures=True)
    else:
        run.loop(None, end, save)
    save(run.rows)
    left = len(run.todo) + len(run.waiting)
    print(summary(run.rows, left, len(run.kernels), time.monotonic() - begin), flush=True)
    if kept:
        bad = sum(row["status"] in ("wrong", "failed") for row in kept.values())
        print(f"{len(kept)} cells were in {options.record} already, {bad} of them wrong or failed")
    if run.lost:
        print("the CUDA context was lost: run the command again for the rest")
    return int(run.lost or any(row["status"] in ("wrong", "failed") for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
