"""Reading of compiled code: instruction counts, resources, and the compiler's report."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from dsl_samples import Exp2Scaled, RowSpread, compile_sample

from cute_attn.cache import COMPILE_LOCK
from cute_attn.sass import COUNTED, KernelSass, compile_and_disassemble, disassemble, find_tool, parse_ptxas


def inspect(sample: Exp2Scaled) -> KernelSass:
    with COMPILE_LOCK:
        return compile_and_disassemble(lambda options: compile_sample(sample, options))


def test_counts_of_a_small_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    sass = inspect(Exp2Scaled())
    assert len(sass.kernels) == 1 and "Exp2Scaled" in sass.kernels[0]
    # y[i] = exp2(x[i]) * scale: one of each, and nothing else that is counted
    expected = {"LDG": 1, "STG": 1, "MUFU.EX2": 1, "MUFU": 1, "FMUL": 1}
    assert sass.counts == {name: expected.get(name, 0) for name in COUNTED}
    assert sass.total == sum(sass.opcodes.values()) and 10 < sass.total < 40
    assert "NOP" not in sass.opcodes and "MUFU.EX2" in sass.opcodes
    assert (sass.stack_bytes, sass.static_smem_bytes) == (0, 0)
    assert sass.ptxas is not None and sass.ptxas.registers == sass.registers
    assert 4 < sass.registers <= 32
    assert sass.ptxas.kernels == sass.kernels
    assert (sass.ptxas.spill_store_bytes, sass.ptxas.spill_load_bytes, sass.ptxas.notes) == (0, 0, ())
    assert sass.compile_seconds is not None and sass.compile_seconds > 0
    assert capsys.readouterr().err == "", "the compiler's report is not shown to the user"


def test_counts_follow_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    awkward = tmp_path / "a temporary folder"
    awkward.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(awkward))
    sass = inspect(RowSpread())
    assert list(awkward.iterdir()) == [], "what the compiler dumped is removed"
    for name, count in {
        "LDG": 128,
        "STG": 1,
        "FMNMX": 128,
        "FFMA": 128,
        "FADD": 128,
        "LDL": 0,
        "STL": 0,
    }.items():
        assert sass.counts[name] == count, name
    assert sass.registers > 128, "128 values are alive at once"
    assert sass.ptxas is not None
    assert (sass.stack_bytes, sass.ptxas.spill_store_bytes, sass.ptxas.spill_load_bytes) == (0, 0, 0)


def test_spills_are_seen() -> None:
    sass = inspect(RowSpread(threads=1024))  # 64 registers for 128 values
    assert sass.registers == 64
    assert sass.ptxas is not None and sass.ptxas.registers == 64
    assert sass.stack_bytes == sass.ptxas.stack_bytes > 200
    # Every spill of this kernel is one register wide, so the report and the code must agree to the byte.
    assert sass.ptxas.spill_store_bytes == 4 * sass.counts["STL"] > 0
    assert sass.ptxas.spill_load_bytes == 4 * sass.counts["LDL"] > 0
    assert not sass.ptxas.serialized_wgmma


# As the DSL prints it for a Hopper kernel with too few registers; names shortened.
SPILLING = """\
\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills

  --> fwd.py:129:12
      in function `\x1b[92mkernel\x1b[0m(...)`:
> 129 |             acc_o.fill(0.0)
  \x1b[96mremark:\x1b[0m Spilled values are placed in local memory and can add memory traffic and latency.
          ptxas reports spill usage at kernel granularity; the source frame marks a likely pressure
          region, not an exact spill instruction.

          ptxas output:
          ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
          serialized due to insufficient register resources for the function
          'kernel_attention_0'
          ptxas info    : 0 bytes gmem
          ptxas info    : Compiling entry function
          'kernel_attention_0'
          for 'sm_90a'
          ptxas info    : Function properties for
          kernel_attention_0
          ptxas         .     600 bytes stack frame, 804 bytes spill
          stores, 848 bytes spill loads
          ptxas info    : Used 128 registers, used 16 barriers, 600 bytes cumulative stack size
          ptxas info    : Compile time = 172.782 ms
  \x1b[92msuggestion:\x1b[0m reduce live ranges in the reported kernel / likely pressure region
"""

TWO_KERNELS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 16 bytes cumulative stack size
"""


def test_report_with_spills_and_serialised_wgmma() -> None:
    report = parse_ptxas(SPILLING)
    assert report.kernels == ("kernel_attention_0",)
    assert (report.registers, report.stack_bytes) == (128, 600)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (804, 848)
    assert report.notes == (
        "C7512: Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient "
        "register resources for the function 'kernel_attention_0'",
    )
    assert report.serialized_wgmma


def test_report_on_two_kernels_repeated() -> None:
    report = parse_ptxas(TWO_KERNELS + TWO_KERNELS)
    assert report.kernels == ("first", "second")
    assert (report.registers, report.stack_bytes) == (168, 16)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (12, 8)
    assert report.notes == () and not report.serialized_wgmma


@pytest.mark.parametrize(
    "text", ["", "remark: nothing to say", "Used 168 registers", SPILLING.split("Used")[0]]
)
def test_text_without_a_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no ptxas report"):
        parse_ptxas(text)


def test_options_that_are_not_passed_on_are_noticed() -> None:
    with COMPILE_LOCK, pytest.raises(RuntimeError, match="must pass its options on"):
        compile_and_disassemble(lambda options: compile_sample(Exp2Scaled()))


def test_errors_of_the_compiler_are_passed_on() -> None:
    def fail(options: str) -> object:
        print("about to fail", file=sys.stderr)
        raise ZeroDivisionError(options)

    with pytest.raises(ZeroDivisionError, match="--keep-cubin"):
        compile_and_disassemble(fail)


def test_bad_cubins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        disassemble(tmp_path / "none.cubin")
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(RuntimeError, match=r"broken\.cubin"):
        disassemble(broken)


def test_tools_come_from_the_wheels_then_path_then_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvdisasm", "cuobjdump"):
        in_wheel = find_tool(name)
        assert in_wheel.name == name and in_wheel.is_file()
        assert any(
            in_wheel == Path(str(f.locate())) for f in importlib.metadata.files(f"nvidia-cuda-{name}") or ()
        )

    monkeypatch.setattr(importlib.metadata, "files", lambda package: None)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    tool = tmp_path / "cuda" / "bin" / "nvdisasm"
    tool.parent.mkdir(parents=True)
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert find_tool("nvdisasm") == tool
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-cuobjdump"):
        find_tool("cuobjdump")
    on_path = shutil.copy(tool, tmp_path / "nvdisasm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tool("nvdisasm") == Path(on_path)
