"""What the compiler made of a kernel: registers, spills, instruction counts of its code. Needs no GPU.

Counts are static: how often an instruction stands in the code, not how often it runs. They come from
`nvdisasm` and `cuobjdump`, looked for in the pip wheels that cute_attn depends on, then on the PATH, then in
a CUDA toolkit. Spill traffic and serialised WGMMA are not in the binary; the compiler reports them, and
`parse_ptxas` reads that report.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["KernelSass", "PtxasReport", "compile_and_disassemble", "disassemble", "find_tool", "parse_ptxas"]

# Counted instructions. An opcode counts for a name if it is the name or continues it with a dot.
COUNTED = (
    "QGMMA",  # 8-bit floating-point WGMMA
    "IGMMA",  # int8 WGMMA
    "HGMMA",  # 16-bit WGMMA
    "HMMA",  # 16-bit products of a warp
    "WARPGROUP",  # many more than WGMMA groups: the compiler has serialised them
    "UTMALDG",  # TMA load
    "UTMASTG",  # TMA store
    "UTMAREDG",  # TMA reduction
    "LDL",  # loads and stores of local memory: spills, or arrays indexed at run time
    "STL",
    "LDG",
    "LDGSTS",  # asynchronous copies to shared memory
    "STG",
    "LDS",
    "STS",
    "LDSM",
    "STSM",
    "MUFU.EX2",  # exp2
    "MUFU",  # all of the special function unit, exp2 included
    "FFMA",
    "FMUL",
    "FADD",
    "FMNMX",
    "HFMA2",
    "HADD2",
    "F2FP",  # conversion and packing of floats
    "I2F",
    "I2FP",
    "PRMT",
    "SHFL",
    "BAR",
    "SYNCS",  # mbarrier operations
    "USETMAXREG",
)

_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
)
_SECTION = re.compile(r'^\s*\.section\s+"?([^",\s]+)')
_RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
# Read after runs of white space have been made single blanks: the DSL wraps the compiler's lines.
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_NOTE = re.compile(r"\((C\d{4})\) (.*?)(?= ptxas |$)")


@dataclass(frozen=True)
class PtxasReport:
    """What ptxas said about the kernels of one compilation.

    Registers and stack are the largest of the kernels; spills are added up.
    """

    kernels: tuple[str, ...]
    registers: int  # a thread
    stack_bytes: int  # a thread
    spill_store_bytes: int  # a thread, by static count
    spill_load_bytes: int
    notes: tuple[
        str, ...
    ]  # "C7512: Potential Performance Loss: wgmma.mma_async instructions are serialized ..."

    @property
    def serialized_wgmma(self) -> bool:
        """Whether ptxas put a wait after WGMMA instructions that were meant to overlap (C7510 to C7514)."""
        return any("wgmma" in note and "serialized" in note for note in self.notes)


@dataclass(frozen=True)
class KernelSass:
    """Figures of one compilation, which may hold several kernels: see `kernels`.

    registers, stack_bytes and static_smem_bytes are the largest of the kernels; counts are added up. Where a
    kernel changes its register number by setmaxnreg, `registers` is what it starts with. Dynamic shared
    memory is an argument of the launch and not known here.
    """

    kernels: tuple[str, ...]
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    counts: dict[str, int]  # for each name of COUNTED
    total: int  # instructions, without the padding behind the last one
    opcodes: dict[str, int] = field(repr=False)  # full opcode, such as "QGMMA.64x128x32.F32.E4M3.E4M3"
    ptxas: PtxasReport | None = None  # with `compile_and_disassemble` only
    compile_seconds: float | None = None  # likewise; the first in a process includes the import of the DSL


def find_tool(name: str) -> Path:
    """Path of `name` ("nvdisasm" or "cuobjdump").

    Raises FileNotFoundError, saying what to install, where there is none.
    """
    package = f"nvidia-cuda-{name}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(package) or ():
            if file.name == name and (path := Path(str(file.locate()))).is_file():
                return path
    if found := shutil.which(name):
        return Path(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if (home := os.environ.get(variable)) and (path := Path(home, "bin", name)).is_file():
            return path
    raise FileNotFoundError(
        f"{name} not found in the package {package}, on PATH or in CUDA_HOME: `pip install {package}`"
    )


def disassemble(cubin: Path) -> KernelSass:
    """Count the instructions of a .cubin file and read its resources.

    Raises:
        FileNotFoundError: no such file, or no disassembler installed.
        RuntimeError: the file is not a cubin, or holds no kernel.
    """
    if not cubin.is_file():
        raise FileNotFoundError(f"cubin: no such file: {cubin}")
    opcodes: dict[str, Counter[str]] = {}
    section: Counter[str] | None = None
    for line in _run(find_tool("nvdisasm"), "-c", cubin).splitlines():
        if named := _SECTION.match(line):
            name = named.group(1)
            section = opcodes.setdefault(name[6:], Counter()) if name.startswith(".text.") else None
        elif section is not None and (instruction := _INSTRUCTION.match(line)):
            section[instruction.group(1)] += 1
    resources = {
        kernel: tuple(map(int, numbers))
        for kernel, *numbers in _RESOURCES.findall(
            " ".join(_run(find_tool("cuobjdump"), "--dump-resource-usage", cubin).split())
        )
    }
    if not opcodes or opcodes.keys() != resources.keys():
        raise RuntimeError(
            f"{cubin}: nvdisasm shows the kernels {sorted(opcodes)} and cuobjdump {sorted(resources)}; "
            "expected the same, and at least one"
        )
    merged = sum(opcodes.values(), Counter[str]())
    del merged["NOP"]  # padding; a Counter needs no such key to be there
    return KernelSass(
        kernels=tuple(opcodes),
        registers=max(r for r, _, _ in resources.values()),
        stack_bytes=max(s for _, s, _ in resources.values()),
        static_smem_bytes=max(s for _, _, s in resources.values()),
        counts={
            name: sum(n for opcode, n in merged.items() if opcode == name or opcode.startswith(name + "."))
            for name in COUNTED
        },
        total=merged.total(),
        opcodes=dict(merged.most_common()),
    )


def parse_ptxas(text: str) -> PtxasReport:
    """Read what ptxas reports in its verbose mode, as such or as wrapped by the DSL's `remarks{ptx}`.

    Raises ValueError if `text` does not report on any kernel.
    """
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    entries = list(_ENTRY.finditer(text))
    ends = [entry.start() for entry in entries[1:]] + [len(text)]
    figures: dict[str, tuple[int, ...]] = {}  # by kernel: the DSL may show the same report more than once
    for entry, end in zip(entries, ends, strict=False):
        part = text[entry.end() : end]
        spills, registers = _SPILLS.search(part), _REGISTERS.search(part)
        if spills and registers:
            figures[entry.group(1)] = tuple(map(int, (registers.group(1), *spills.groups())))
    if not figures:
        raise ValueError(f"no ptxas report on a kernel in {text[:200]!r}")
    registers_, stack, stores, loads = zip(*figures.values(), strict=True)
    return PtxasReport(
        kernels=tuple(figures),
        registers=max(registers_),
        stack_bytes=max(stack),
        spill_store_bytes=sum(stores),
        spill_load_bytes=sum(loads),
        notes=tuple(dict.fromkeys(f"{code}: {message.strip()}" for code, message in _NOTE.findall(text))),
    )


def compile_and_disassemble(compile_fn: Callable[[str], object]) -> KernelSass:
    """Compile a kernel once for its figures and throw the result away.

    Args:
        compile_fn: compiles one kernel with `cute.compile`, adding the string it is given to the `options`.
            Call under `cache.COMPILE_LOCK`.

    Returns:
        the counts of the sm_90a code, with `ptxas` and `compile_seconds` set.

    Raises whatever `compile_fn` raises; RuntimeError if the DSL left no cubin or no report.

    While it compiles, `sys.stderr` is replaced, since that is where the DSL prints the compiler's report;
    what else is printed there meanwhile is lost.
    """
    # A folder of its own: dump files are named after function and argument types, so that two configurations
    # of one kernel would overwrite each other.
    with tempfile.TemporaryDirectory(prefix="cute_attn-sass-") as folder:
        report = io.StringIO()
        start = time.perf_counter()
        with contextlib.redirect_stderr(report), _no_locations():
            compile_fn(f"--dump-dir {shlex.quote(folder)} --keep-cubin remarks{{ptx}}")
        seconds = time.perf_counter() - start
        cubins = sorted(Path(folder).rglob("*.cubin"))
        if len(cubins) != 1:
            raise RuntimeError(
                f"expected one cubin from the compiler, found {len(cubins)}: "
                "compile_fn must pass its options on to cute.compile"
            )
        try:
            ptxas = parse_ptxas(report.getvalue())
        except ValueError as error:
            raise RuntimeError(f"the compiler's report cannot be read: {error}") from error
        return replace(disassemble(cubins[0]), ptxas=ptxas, compile_seconds=seconds)


@contextlib.contextmanager
def _no_locations() -> Iterator[None]:
    """Operations are not told their lines of Python, which the DSL does with its remarks on.

    It walks the stack for each of them: a third of a compilation, for nothing that the report says, and nothing that a
    compilation for use does. Where the DSL has no such switch, it only takes longer.
    """
    import cutlass.base_dsl.dsl as dsl

    name = "_set_enable_frame_filtering"
    switch = getattr(dsl, name, None)
    if switch is None:
        yield
        return
    setattr(dsl, name, lambda enable: switch(False))
    try:
        yield
    finally:
        setattr(dsl, name, switch)


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr or done.stdout).strip()[:300]
        raise RuntimeError(f"{Path(str(command[0])).name} failed on {command[-1]}: {message}")
    return done.stdout
