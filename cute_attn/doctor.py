"""`python -m cute_attn.doctor`: whether this machine can run the kernels, and what to do if not.

Looks at versions, GPU, driver, the folder of compiled kernels and settings of the environment. Nothing is compiled or
launched, unless `--compile` asks for one kernel. `python -m cute_attn.selftest` then checks results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

__all__ = ["Finding", "examine", "main", "support_table"]

Status = Literal["ok", "note", "problem"]
MIN_DRIVER: Final = 580  # of CUDA 13, which the compiled kernels' runtime is
_OPTIONAL: Final = {
    "transformers": "attention for transformers (cute_attn.hf)",
    "matplotlib": "plots of the benchmark",
}
_STYLES: Final = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        status: "ok", "note" (works, or is only missed by some) or "problem" (kernels do not run).
        found: what is there.
        advice: what to do; empty where there is nothing to do.
    """

    what: str
    status: Status
    found: str
    advice: str = ""


def support_table() -> list[tuple[str, str, str]]:
    """(feature, "yes" or "no" for 16 bits, likewise for 8 bits) on a Hopper GPU, each as `is_supported` answers."""
    import torch

    from cute_attn.dispatch import is_supported

    features: dict[str, dict[str, Any]] = {
        "full attention": {},
        "causal mask": {"causal": True},
        "sliding window": {"window_size": (128, 0)},
        "softcap": {"softcap": 30.0},
        "ALiBi": {"alibi": True},
        "sinks": {"sinks": True},
        "grouped heads (GQA, MQA)": {"heads_q": 8, "heads_k": 1},
        "float16": {"dtype": torch.float16},
        "float32": {"dtype": torch.float32},
        "head_dim 40": {"head_dim": 40},
        "head_dim 64, 128, 256": {"head_dim": 256},
        "head_dim 96": {"head_dim": 96},
        "head_dim 192, of V 128": {"head_dim": 192, "head_dim_v": 128},
        "head_dim 512": {"head_dim": 512},
        "mask tensors": {"attn_mask": True},
        "dropout": {"dropout_p": 0.1},
        "gradients": {"requires_grad": True},
    }
    rows = []
    for feature, options in features.items():
        answers = [is_supported(name, **options, capability=(9, 0)) for name in ("bf16", "accurate")]
        exact, eight = ("yes" if answer else "no" for answer in answers)
        rows.append((feature, exact, eight))
    return rows


def examine(compile_one: bool = False) -> list[Finding]:
    """Look at everything. Raises nothing for what is wrong: that is a finding.

    Args:
        compile_one: also compile a kernel, past the disk cache (some seconds).
    """
    findings = [*_platform(), *_packages(), *_gpu(), *_cache(), *_settings()]
    if compile_one:
        findings.append(_compile())
    return findings


def _platform() -> Iterator[Finding]:
    system, machine = platform.system(), platform.machine()
    linux = system == "Linux"
    yield Finding(
        "platform",
        "ok" if linux else "problem",
        f"{system} {machine}, Python {platform.python_version()}",
        "" if linux else "The kernels need Linux.",
    )


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires("cute-attn") or []
        yield Finding("cute_attn", "ok", importlib.metadata.version("cute-attn"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "cute_attn",
            "note",
            "not installed, so the versions that it asks for are not known",
            "Install it: pip install -e . in its source tree.",
        )
        return
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                requirement.name,
                "problem",
                "missing",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        advice = (
            ""
            if fits
            else f"Outside of what was tested: pip install '{requirement.name}{requirement.specifier}'"
        )
        yield Finding(requirement.name, "ok" if fits else "problem", version, advice)
    for name, use in _OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        found = importlib.metadata.version(name) if there else "not installed"
        yield Finding(name, "ok" if there else "note", found, "" if there else f"Only for {use}.")


def _gpu() -> Iterator[Finding]:
    import torch

    from cute_attn.bench.record import gpu_state
    from cute_attn.problem import ARCHS, CAPABILITIES

    if torch.version.cuda is None:
        yield Finding(
            "GPU",
            "problem",
            f"torch {torch.__version__} is built without CUDA",
            "Without a GPU the emulator runs; for the kernels install torch with CUDA (pytorch.org, Get started).",
        )
        return
    if not torch.cuda.is_available():
        yield Finding(
            "GPU",
            "problem",
            f"torch {torch.__version__} with CUDA {torch.version.cuda} sees no GPU",
            "Check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, whether it was started with GPUs.",
        )
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        advice = ""
        if (major, minor) in ARCHS and major != 9:
            advice = (
                "Its kernels are of 16 bits. 8-bit calls run the emulator; sdpa and hf run them in 16 bits."
            )
        elif major != 9:
            advice = "No kernel for it: its tensors are left to torch or the emulator."
        yield Finding(f"GPU {index}", "note" if advice else "ok", found, advice)
    there = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if not any(each in ARCHS or each[0] == 9 for each in there):
        yield Finding(
            "GPU with kernels",
            "problem",
            "none",
            f"The kernels need an H100 or H200, or in 16 bits a GPU of compute capability {CAPABILITIES}.",
        )
    driver = str(gpu_state()["driver"] or "")
    known = driver.split(".")[0].isdecimal()
    recent = known and int(driver.split(".")[0]) >= MIN_DRIVER
    yield Finding(
        "driver",
        "ok" if recent else "note",
        driver or "unknown (nvidia-smi does not answer)",
        "" if recent else f"The kernels are built for CUDA 13, whose drivers are {MIN_DRIVER} and later.",
    )


def _cache() -> Iterator[Finding]:
    from cute_attn import cache

    folder = cache.cache_dir()
    if folder is None:
        yield Finding(
            "compiled kernels",
            "note",
            "not kept on disk",
            "Every process compiles anew: unset CUTE_ATTN_DISABLE_DISK_CACHE, or name a folder in CUTE_ATTN_CACHE_DIR.",
        )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(
            "compiled kernels",
            "note",
            f"{folder}: {error.strerror or error}",
            "Every process compiles anew: make the folder writable, or name another in CUTE_ATTN_CACHE_DIR.",
        )
        return
    objects = list(folder.glob("*.o"))
    size = sum(path.stat().st_size for path in objects) / 2**20
    found = f"{folder}: {len(objects)} kernels, {size:.1f} MiB"
    mode = folder.stat()
    shared = bool(mode.st_mode & stat.S_IWOTH) or mode.st_uid not in (os.getuid(), 0)
    advice = "Others may write there, and its files are run as code: chmod 700, or CUTE_ATTN_CACHE_DIR."
    yield Finding("compiled kernels", "problem" if shared else "ok", found, advice if shared else "")


def _settings() -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(("CUTE_ATTN_", "CUTE_DSL_")):
            wrong = name == "CUTE_DSL_ARCH" and value != "sm_90a"
            yield Finding(
                name,
                "problem" if wrong else "ok",
                value,
                "Unset it: the kernels are for sm_90a." if wrong else "",
            )


def _compile() -> Finding:
    from cute_attn import cache, plan16
    from cute_attn import compile as compiler

    config = plan16.forward16_config(64, 64, "bf16")
    start = time.perf_counter()
    try:
        with cache.COMPILE_LOCK:
            compiler.build(config)
    except Exception as error:
        return Finding(
            "compiler", "problem", f"{type(error).__name__}: {error}", "Check the DSL's version above."
        )
    return Finding("compiler", "ok", f"{config.name} in {time.perf_counter() - start:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 where there is a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn.doctor",
        description="Whether the kernels can run here, and what to do if not.",
    )
    parser.add_argument("--compile", action="store_true", help="also compile a kernel (some seconds)")
    parser.add_argument("--json", action="store_true", help="findings as JSON, for a bug report")
    parser.add_argument(
        "--support", action="store_true", help="only print what the kernels support, as a table"
    )
    options = parser.parse_args(argv)
    if options.support:
        print("| feature | 16 bits | 8 bits |\n|---|---|---|")
        print("\n".join(f"| {' | '.join(row)} |" for row in support_table()))
        return 0
    findings = examine(options.compile)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return int(any(finding.status == "problem" for finding in findings))


def _show(findings: Sequence[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table: Any = Table(box=box.SIMPLE_HEAD)
    for header in ("what", "", "found", "what to do"):
        table.add_column(header, overflow="fold", no_wrap=header in ("what", ""))
    for finding in findings:
        style = _STYLES[finding.status]
        table.add_row(finding.what, f"[{style}]{finding.status}[/{style}]", finding.found, finding.advice)
    console = Console()
    console.print(table)
    problems = sum(finding.status == "problem" for finding in findings)
    console.print(
        f"{problems} problem{'s' if problems != 1 else ''}: the kernels do not run here."
        if problems
        else "The kernels can run here. python -m cute_attn.selftest checks their results."
    )


if __name__ == "__main__":
    sys.exit(main())
