"""scripts/profile_kernels.py, as far as it needs neither a GPU nor Nsight Compute: commands, parsing, records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_modules import load_script

from cute_attn.bench import record

SCRIPT = Path(__file__).parents[1] / "scripts" / "profile_kernels.py"
NAMES = (
    "python",
    "127.0.0.1",
    "kernel_cutlass_kernel_FwdSm90_0",
    "1",
    "7",
    "(384, 1, 1)",
    "(1024, 1, 1)",
    "0",
    "9.0",
)


def table(*metrics: tuple[str, str, str], launch: int = 0) -> str:
    """Lines as ncu prints them with --csv and --metrics."""
    head = "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC"
    columns = [*head.split(","), "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    rows = [columns] + [
        [str(launch), "4242", *NAMES, "Command line profiler metrics", *metric] for metric in metrics
    ]
    return "\n".join(",".join(f'"{value}"' for value in row) for row in rows)


CANNED = (
    "==PROF== Connected to process 4242 (/usr/bin/python3.11)\n"
    '==PROF== Profiling "kernel_cutlass_kernel_FwdSm90_0": 0%....50%....100% - 9 passes\n'
    "==PROF== Disconnected from process 4242\n"
    + table(
        ("gpu__time_duration.sum", "nsecond", "1,921,504"),
        ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "58.31"),
        ("launch__registers_per_thread", "register/thread", "168"),
        ("smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio", "warp", "n/a"),
    )
    + "\n"
)
QUERY = """Device NVIDIA GH100
------------------------------------------------- ---------- ------------- ---------------------------
Metric Name                                       Metric Type Metric Unit  Metric Description
------------------------------------------------- ---------- ------------- ---------------------------
gpu__time_duration                                Counter    nsecond       incremental duration
sm__pipe_tensor_cycles_active                     Counter    cycle         # of cycles
smsp__average_warps_issue_stalled_gmma_per_issue_active Ratio
"""


@pytest.fixture
def script() -> ModuleType:
    return load_script("scripts/profile_kernels.py")


def test_parsing(script: ModuleType) -> None:
    (launch,) = script.parse_csv(CANNED)
    assert launch == {
        "kernel": "kernel_cutlass_kernel_FwdSm90_0",
        "gpu__time_duration.sum": 1921504.0,
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 58.31,
        "launch__registers_per_thread": 168.0,
        "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": None,
    }
    two = CANNED + "\n".join(table(("gpu__time_duration.sum", "nsecond", "7"), launch=1).splitlines()[1:])
    assert [launch["gpu__time_duration.sum"] for launch in script.parse_csv(two)] == [1921504.0, 7.0]


def test_what_is_no_table(script: ModuleType) -> None:
    for text in ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM no permission\n", ""):
        with pytest.raises(ValueError, match=r"ncu printed no table: .*(no permission|nothing at all)"):
            script.parse_csv(text)
    with pytest.raises(ValueError, match="ncu's table has no column 'Metric Name', only ID, Kernel Name"):
        script.parse_csv('"ID","Kernel Name"\n"0","x"\n')


def test_metrics_that_ncu_does_not_know_are_left_out_by_name(script: ModuleType) -> None:
    known = script.known_metrics(QUERY)
    assert known == {
        "gpu__time_duration",
        "sm__pipe_tensor_cycles_active",
        "smsp__average_warps_issue_stalled_gmma_per_issue_active",
    }
    present, missing = script.choose_metrics(known)
    assert set(present) == {"duration_ns", "tensor_pct", "stall_gmma", "registers", "smem_bytes", "grid"}
    assert set(missing) | set(present) == set(script.METRICS) and "dram_pct" in missing


def test_command_profiles_what_is_asked_for_and_leaves_the_clocks_alone(script: ModuleType) -> None:
    command = script.ncu_command(["python", "x.py"], ["a.sum", "b.avg"], Path("log.csv"))
    words = " ".join(command)
    assert command[0] == "ncu" and command[-2:] == ["python", "x.py"]
    assert "--clock-control none" in words and "--profile-from-start off" in words
    assert (
        "-k regex:Fwd(8bit)?Sm90" in words
        and "--metrics a.sum,b.avg" in words
        and "--log-file log.csv" in words
    )


@pytest.mark.parametrize("works", [True, False])
def test_a_run(
    works: bool,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "--version" in command:
            return subprocess.CompletedProcess(
                command, 0, "NVIDIA (R) Nsight Compute\nVersion 2025.3.1.0 (build 1)\n"
            )
        if "--query-metrics" in command:
            return subprocess.CompletedProcess(command, 0, QUERY)
        job = json.loads(command[-1])
        if not works and job["contender"] == "fa3":
            return subprocess.CompletedProcess(command, 1, "", "ModuleNotFoundError: flash_attn_interface\n")
        # the first of two cells could not be launched
        Path(job["out"]).write_text(json.dumps(["RuntimeError: no room"] * (len(job["cells"]) - 1) + [None]))
        Path(command[command.index("--log-file") + 1]).write_text(CANNED)
        return subprocess.CompletedProcess(command, 0, "", "")

    meta = record.collect_meta("command of this test")
    monkeypatch.setattr(record, "collect_meta", lambda command: meta | {"command": command})
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(script.subprocess, "run", run)
    out = tmp_path / "profile.json"
    assert script.main([str(out), "--qk", "int8"]) == (0 if works else 1)
    found = record.read(out)
    assert found.meta["ncu"] == "2025.3.1.0" and "profile_kernels.py" in found.meta["command"]
    ours, fa3 = found.rows
    assert (ours["provider"], ours["recipe"], ours["phase"]) == ("cute_attn", "accurate", "profile")
    assert (ours["seqlen_k"], ours["heads_q"], ours["head_dim"], ours["causal"]) == (16384, 16, 128, False)
    assert (ours["duration_ns"], ours["tensor_pct"], ours["registers"]) == (1921504.0, 58.31, 168.0)
    assert ours["dram_pct"] is None and ours["ms"] is None
    assert fa3["status"] == ("ok" if works else "failed")
    text = capsys.readouterr().out
    assert "duration_ns" in text and "This ncu does not know: " in text
    assert works or "ModuleNotFoundError: flash_attn_interface" in text
    # the counters of the second cell are not taken for those of the first
    assert script.main([str(out), "--qk", "int8", "--seqlen", "512,16384"]) == 1
    short, long, *_ = record.read(out).rows
    assert (short["batch"], short["status"], short["reason"]) == (32, "failed", "RuntimeError: no room")
    assert short["tensor_pct"] is None and (long["batch"], long["tensor_pct"]) == (1, 58.31)


def test_without_ncu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "x.json")],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "ncu (Nsight Compute) is not on the PATH" in done.stderr
