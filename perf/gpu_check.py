"""The GPU tests and compute-sanitizer, in one bounded run on a Hopper GPU.

    python perf/gpu_check.py FOLDER       everything; logs, a summary and the record gpu_tests.json go to FOLDER
    python perf/gpu_check.py FOLDER --files test_flash_gpu,test_decode_gpu -k "not sm80" --parts 16-bit,cache
                                          what a change concerns: of these files the tests that pytest's -k chooses,
                                          sanitizers of these parts
    python perf/gpu_check.py --small PART the small launches that the sanitizers watch, once: of the part "8-bit",
                                          "16-bit" or "cache"

The tests run in several processes (pytest-xdist), since compiling is what takes the time, and the sanitizers beside
them. Each child has a time limit and is killed with all its own children when it passes it: no hung kernel can hold the
machine for longer than `LIMITS` says. Exit status 1 if anything failed or did not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"pytest": 560, "test": 120, "sanitizer": 300}  # seconds
TOOLS = ("memcheck", "racecheck")
WORKERS = max(1, min(24, (os.cpu_count() or 1) - 2))
SMALL = (1, 200, 333, 2, 1)  # batch, seqlen_q, seqlen_k, heads_q, heads_k


def small_8bit() -> None:
    """8-bit forward kernels, a quantiser and the transpose of V."""
    import torch

    from cute_attn import launch
    from cute_attn.compile import compile_kernel
    from cute_attn.launch import launch_forward, launch_quantize, launch_transpose_v
    from cute_attn.quantize import PRESETS, QuantizedQKV, Rotary, permute_v, quantize_reference
    from cute_attn.reference import attention
    from cute_attn.tiles import forward_config, quantize_config, transpose_config

    def on_gpu(qkv: QuantizedQKV) -> QuantizedQKV:
        parts = {field.name: getattr(qkv, field.name) for field in fields(qkv)}
        return replace(qkv, **{k: x.cuda() for k, x in parts.items() if isinstance(x, torch.Tensor)})

    forwards = [
        forward_config(64, 64, "e4m3", False, "half", "bf16"),
        forward_config(128, 128, "int8", True, "code", "bf16", cluster=2),
        forward_config(256, 256, "int8", False, "code", "bf16", cluster=2),
        forward_config(96, 80, "e4m3", True, "half", "bf16", pack_gqa=2),
    ]
    launch._sms = lambda device: 2  # few CTAs, so that each takes several tiles
    recipe = PRESETS["accurate"]
    quantiser, transpose = quantize_config(recipe, 64, 64, "bf16", "half"), transpose_config(64)
    for config in (*forwards, quantiser, transpose):
        compile_kernel(config)

    torch.manual_seed(0)
    batch, seqlen_q, seqlen_k, heads_q, heads_k = SMALL

    def inputs(head_dim: int, head_dim_v: int) -> list[torch.Tensor]:
        shapes = (
            (seqlen_q, heads_q, head_dim),
            (seqlen_k, heads_k, head_dim),
            (seqlen_k, heads_k, head_dim_v),
        )
        return [torch.randn(batch, *shape).bfloat16() for shape in shapes]

    # All but the launches under test stays on the CPU: a sanitizer makes every other kernel slow as well.
    for config in forwards:
        codes = quantize_reference(
            *inputs(config.head_dim, config.head_dim_v),
            PRESETS["fp8"] if config.qk_dtype == "e4m3" else recipe,
        )
        out, lse = launch_forward(
            on_gpu(codes),
            config,
            causal=config.causal,
            softmax_scale=config.head_dim**-0.5,
            out_dtype=torch.bfloat16,
        )
        exact, _ = attention(*codes.dequantize(), causal=config.causal)
        error = relative_error(out, exact)
        print(f"{config.name}: relative error {error:.2e}", flush=True)
        assert error < 0.04 and bool(lse.cpu().isfinite().all())
    q, k, v = inputs(64, 64)
    rotary = Rotary(*(torch.randn(seqlen_k, 16).bfloat16() for _ in range(2)), False)
    expected = quantize_reference(q, k, v, recipe, rotary_cos=rotary.cos, rotary_sin=rotary.sin)
    tables = Rotary(rotary.cos.cuda(), rotary.sin.cuda(), False)
    got = launch_quantize(q.cuda(), k.cuda(), v.cuda(), recipe, quantiser, rotary=tables)
    assert torch.equal(got.q.cpu(), expected.q) and torch.equal(got.k.cpu(), expected.k)
    assert torch.equal(got.vt.cpu().view(torch.uint8), expected.vt.view(torch.uint8))
    print(f"{quantiser.name}: codes are equal", flush=True)
    v8 = v.to(torch.float8_e4m3fn)
    got_vt = launch_transpose_v(v8.cuda(), transpose).cpu()
    assert torch.equal(got_vt.view(torch.uint8), permute_v(v8).view(torch.uint8))
    print(f"{transpose.name}: equal", flush=True)


def small_16bit() -> None:
    """16-bit forward, of equal and of unlike lengths, and its gradients, with an order of their sums and without."""
    import torch

    from cute_attn import flash_attn_func, flash_attn_varlen_func, launch, launch_backward

    launch._sms = launch_backward._sms = lambda device: 2  # few CTAs, so that each takes several tiles
    torch.manual_seed(0)
    batch, seqlen_q, seqlen_k, heads_q, heads_k = SMALL

    def inputs(head_dim: int) -> list[torch.Tensor]:
        shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, heads_q))
        return [torch.randn(batch, *shape, head_dim).bfloat16() for shape in shapes]

    cases = (
        (64, "sm90", {"causal": True}),
        (128, "sm90", {"window_size": (100, 31), "deterministic": True}),
        (128, "sm90", {}),
        (256, "sm90", {"causal": True, "softcap": 8.0}),
        (64, "sm80", {"window_size": (100, 31), "deterministic": True}),
        (128, "sm80", {"causal": True}),
    )
    for head_dim, kernel, options in cases:
        *qkv, dout = inputs(head_dim)
        results = []
        for device, backend in (("cuda", kernel), ("cpu", "reference")):
            leaves = [x.to(device).requires_grad_() for x in qkv]
            out = flash_attn_func(*leaves, backend=backend, **options)  # type: ignore[arg-type]
            results.append([out, *torch.autograd.grad(out, leaves, dout.to(device))])
        errors = [relative_error(got, exact) for got, exact in zip(*results, strict=True)]
        print(f"16 bits, {kernel}, head_dim {head_dim}, {options}: out, dq, dk, dv {errors}", flush=True)
        assert max(errors) < 0.02
    for causal in (False, True):  # four consumer warpgroups
        q, k, v = (torch.randn(1, 520, 1, 64).bfloat16() for _ in range(3))
        got = flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=causal)
        error = relative_error(got, flash_attn_func(q, k, v, causal=causal, backend="reference"))
        print(f"16 bits, 520 queries, causal {causal}: {error}", flush=True)
        assert error < 0.02
    q, k, v, _ = (x.squeeze(0) for x in inputs(128))
    ends_q, ends_k = (torch.tensor([0, 70, 70, n], dtype=torch.int32) for n in (seqlen_q, seqlen_k))
    sizes = (seqlen_q, seqlen_k)
    got = flash_attn_varlen_func(*(x.cuda() for x in (q, k, v, ends_q, ends_k)), *sizes, causal=True)
    exact = flash_attn_varlen_func(q, k, v, ends_q, ends_k, *sizes, causal=True, backend="reference")
    error = relative_error(got, exact)
    print(f"16 bits, three sequences: {error}", flush=True)
    assert error < 0.02


def small_cache() -> None:
    """Attention against a cache in parts, contiguous in 16 bits and in pages of e4m3, and appending to both."""
    import torch

    from cute_attn import flash_attn_with_kvcache

    torch.manual_seed(0)
    lengths = torch.tensor([300, 37], dtype=torch.int32)
    table = torch.randperm(10).view(2, 5).to(torch.int32)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        paged = dtype != torch.bfloat16
        slots = (10, 64) if paged else (2, 320)
        caches = [torch.randn(*slots, 2, 128).to(dtype) for _ in range(2)]
        q, new_k, new_v = (torch.randn(2, 3, heads, 128).bfloat16() for heads in (8, 2, 2))
        # the scale of each token and head
        scales = [torch.rand(*slots, 2) + 0.5 for _ in range(2)] if paged else [None, None]
        results = []
        for device, backend in (("cuda", "auto"), ("cpu", "reference")):
            side = [None if x is None else x.clone().to(device) for x in (*scales, table if paged else None)]
            out = flash_attn_with_kvcache(
                q.to(device),
                *(x.clone().to(device) for x in caches),
                new_k.to(device),
                new_v.to(device),
                cache_seqlens=lengths.to(device),
                block_table=side[2],
                k_descale=side[0],
                v_descale=side[1],
                causal=True,
                backend=backend,
            )
            results.append(out)
        error = relative_error(*results)
        print(f"cache of {dtype}: {error}", flush=True)
        assert error < 0.02


SMALL_PARTS = {"8-bit": small_8bit, "16-bit": small_16bit, "cache": small_cache}


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean square of the difference, over that of `exact`."""
    got, exact = got.detach().cpu().double(), exact.detach().cpu().double()
    return ((got - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


@dataclass
class Child:
    """A process group with a time limit, whose output goes to a log."""

    name: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    start: float
    limit: float

    def wait(self) -> str:
        """Wait until it ends or its time is up; returns what became of it."""
        try:
            status = self.process.wait(max(self.start + self.limit - time.monotonic(), 0.1))
            result = "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            result = f"killed after {self.limit:.0f} s"
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                result += ", still there"
        self.log.close()
        return f"{self.name}: {result}, {time.monotonic() - self.start:.1f} s"


def start(name: str, command: list[str], folder: Path, limit: float) -> Child:
    """Start `command` in the root of the repository, as a process group of its own."""
    log = (folder / f"{name}.log").open("wb")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Child(name, process, log, time.monotonic(), limit)


def summary_of(log: Path) -> list[str]:
    """The lines of a log that say how it ended."""
    wanted = re.compile(
        r"^=+ .*\b(passed|failed|error|skipped)\b|^FAILED|^ERROR|(ERROR|RACECHECK) SUMMARY|not supported"
    )
    lines = [line for line in log.read_text(errors="replace").splitlines() if wanted.search(line)]
    return lines[-40:]


def rows_of_log(log: str) -> list[dict[str, object]]:
    """A row for each outcome of a test in pytest's log, for a run that was ended before its report.

    pytest writes a blank behind a name and starts a new line only before the next one: a name with neither behind it is
    cut off, and left out.
    """
    found = re.findall(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) tests/(.*?)\.py(::.*?)(?: +$|\n)", log, re.MULTILINE)
    return [
        {
            "tool": "pytest -m gpu",
            "name": path.replace("/", ".") + name,
            "outcome": outcome.lower(),
            "seconds": None,
        }
        for outcome, path, name in found
    ]


def write_record(folder: Path, results: list[str], command: str) -> None:
    """One row for each test and each sanitizer, from the JUnit report and `results`."""
    from cute_attn.bench.record import collect_meta

    rows: list[dict[str, object]] = []
    if (folder / "junit.xml").exists():
        for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
            bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
            row = {
                "tool": "pytest -m gpu",
                "name": f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}",
                "outcome": {"failure": "failed", "error": "error"}.get(bad[0].tag, bad[0].tag)
                if bad
                else "passed",
                "seconds": float(case.get("time", "nan")),
            }
            rows.append(row | ({"message": bad[0].get("message", "")[:500]} if bad else {}))
    else:
        rows += rows_of_log((folder / "pytest.log").read_text(errors="replace"))
    for result in results[1:]:
        name, _, outcome = result.partition(": ")
        tool, _, part = name.partition("_")  # no part where there is no sanitizer
        log = folder / f"{name}.log"
        found = re.findall(
            r"(?:ERROR|RACECHECK) SUMMARY: .*", log.read_text(errors="replace") if log.exists() else ""
        )
        rows.append(
            {
                "tool": f"compute-sanitizer {tool}",
                "name": (SMALL_PARTS[part].__doc__ or "").strip() if part else tool,
                "outcome": outcome.partition(",")[0],
                "message": found[-1] if found else None,
            }
        )
    record = {"meta": collect_meta(command), "rows": rows}
    (folder / "gpu_tests.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Run all of it; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--files", help="names of test files, comma-separated (default: all that have GPU tests)"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="of these, the tests that pytest's -k chooses")
    parser.add_argument(
        "--parts",
        default=",".join(SMALL_PARTS),
        help="of the sanitizers, comma-separated (default: %(default)s)",
    )
    parser.add_argument("--small", choices=SMALL_PARTS, help="only these small launches, in this process")
    args = parser.parse_args()
    if args.small:
        SMALL_PARTS[args.small]()
        return 0
    if args.folder is None:
        parser.error("FOLDER or --small is needed")
    parts = args.parts.split(",")
    if not set(parts) <= SMALL_PARTS.keys():
        parser.error(f"argument --parts: expected some of {', '.join(SMALL_PARTS)}, got {args.parts}")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    results: list[str] = []
    paths = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text()]
    command = "python perf/gpu_check.py FOLDER"
    if args.files:
        names = args.files.split(",")
        unknown = set(names) - {path.stem for path in paths}
        if unknown:
            parser.error(f"argument --files: no GPU tests in {', '.join(sorted(unknown))}")
        paths = [path for path in paths if path.stem in names]
        command += f" --files {args.files}"
    if args.k:
        command += f" -k {shlex.quote(args.k)}"
    if parts != list(SMALL_PARTS):
        command += f" --parts {args.parts}"
    tests = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *map(str, paths), "--durations=25"]
    tests += ["--tb=short", "--continue-on-collection-errors", f"--junitxml={folder / 'junit.xml'}"]
    # A test that hangs costs its worker.
    tests += ["-n", str(WORKERS), "--dist", "worksteal", "--timeout", str(LIMITS["test"])]
    # As in pyproject.toml but for --strict-config: the machine may lack a plugin that a setting is for.
    tests += ["-o", "addopts=-ra"]
    tests += ["-k", args.k] if args.k else []
    running = start("pytest", tests, folder, LIMITS["pytest"])
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    checks = []
    if Path(sanitizer).exists():
        # Beside the tests: both wait for the compiler most of the time.
        watched = [sanitizer, "--target-processes", "all", "--error-exitcode", "1"]
        for tool in TOOLS:
            for part in parts:
                # The CUDA bindings ask whether the driver has functions of later releases: errors of the API, expected.
                quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
                small = [*watched, "--tool", tool, *quiet, sys.executable, __file__, "--small", part]
                checks.append(start(f"{tool}_{part}", small, folder, LIMITS["sanitizer"]))
    else:
        results += [f"{tool}: failed, compute-sanitizer is not installed" for tool in TOOLS]
    result = running.wait()
    if not re.search(
        r"^=+ .*\b\d+ passed", (folder / "pytest.log").read_text(errors="replace"), re.MULTILINE
    ):
        result = result.replace(": passed", ": failed, no test ran to its end")  # all skipped: no GPU
    results = [result, *results, *(check.wait() for check in checks)]

    text = []
    for result in results:
        log = folder / f"{result.partition(':')[0]}.log"
        text += [result, *(f"    {line}" for line in (summary_of(log) if log.exists() else []))]
    (folder / "summary.txt").write_text("\n".join(text) + "\n")
    write_record(folder, results, command)
    print("\n".join(text), flush=True)
    return 0 if all(": passed" in result for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
