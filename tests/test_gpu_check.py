"""perf/gpu_check.py, as far as it needs no GPU: the rows of a log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

SCRIPT = Path(__file__).parents[1] / "perf" / "gpu_check.py"

# As pytest -v with xdist writes it, with a blank behind each name
LOG = """\
============================= test session starts ==============================
created: 2/2 workers
scheduling tests via WorkStealingScheduling

tests/test_decode_gpu.py::test_lengths[bf16 d64]@
tests/distributed/test_ring.py::test_parts[c[d]]@
[gw0] [  6%] PASSED tests/test_decode_gpu.py::test_lengths[bf16 d64]@
[gw11] [ 12%] FAILED tests/distributed/test_ring.py::test_parts[c[d]]@
[gw0] [ 18%] SKIPPED tests/test_decode_gpu.py::TestPages::test_one@
tests/test_decode_gpu.py::test_last@
[gw0] [ 25%] PASSED tests/test_decode_gpu.py::test_last@
[gw0] [ 25%] ERROR tests/test_decode_gpu.py::test_last@
[gw0] linux -- Python 3.12.3 /usr/bin/python3
tests/test_decode_gpu.py:12: in test_last
[gw1] [100%] PASSED tests/test_decode_gpu.py::test_whole[1-""".replace("@\n", " \n")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("perf/gpu_check.py")


def test_rows_of_a_log_that_breaks_off(script: ModuleType) -> None:
    rows = script.rows_of_log(LOG)
    assert [(row["outcome"], row["name"]) for row in rows] == [
        ("passed", "test_decode_gpu::test_lengths[bf16 d64]"),
        ("failed", "distributed.test_ring::test_parts[c[d]]"),
        ("skipped", "test_decode_gpu::TestPages::test_one"),
        ("passed", "test_decode_gpu::test_last"),
        ("error", "test_decode_gpu::test_last"),  # while it was torn down
    ]
    assert all(row["tool"] == "pytest -m gpu" and row["seconds"] is None for row in rows)


@pytest.mark.parametrize(
    ("end", "names"),
    [
        ("", []),
        (" ", ["test_decode_gpu::test_whole[1-2]"]),
        (" \n", ["test_decode_gpu::test_whole[1-2]"]),
        ("\n", ["test_decode_gpu::test_whole[1-2]"]),  # without the blanks at the ends of lines
    ],
)
def test_the_last_line_of_a_log(script: ModuleType, end: str, names: list[str]) -> None:
    rows = script.rows_of_log("[gw3] [ 99%] PASSED tests/test_decode_gpu.py::test_whole[1-2]" + end)
    assert [row["name"] for row in rows] == names


@pytest.mark.parametrize(
    "log", ["", "[gw3] [ 99%]", "[gw3] [ 99%] PASSED", "[gw3] [ 99%] PASSED tests/test_de"]
)
def test_a_line_without_a_name_is_no_row(script: ModuleType, log: str) -> None:
    assert script.rows_of_log(log) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--files", "test_decode_gpu,test_nothing"], "argument --files: no GPU tests in test_nothing"),
        (
            ["--parts", "cache,32-bit"],
            "argument --parts: expected some of 8-bit, 16-bit, cache, got cache,32-bit",
        ),
    ],
)
def test_only_some_files_and_parts(
    script: ModuleType,
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path), *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_what_was_asked_for_is_what_runs(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, list[str]] = {}

    class Passed:
        def __init__(self, name: str):
            self.name = name

        def wait(self) -> str:
            return f"{self.name}: passed, 1.0 s"

    def start(name: str, command: list[str], folder: Path, limit: float) -> Passed:
        started[name] = command
        (folder / f"{name}.log").write_text("=== 3 passed in 1.0s ===\n")
        return Passed(name)

    monkeypatch.setattr(script, "start", start)
    monkeypatch.setattr(script.shutil, "which", lambda name: sys.executable)
    asked = ["--files", "test_merge", "-k", "not sm80", "--parts", "cache"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path), *asked])
    assert script.main() == 0
    assert set(started) == {"pytest", "memcheck_cache", "racecheck_cache"}
    assert [word for word in started["pytest"] if word.endswith(".py")] == [
        str(script.ROOT / "tests" / "test_merge.py")
    ]
    assert started["pytest"][-2:] == ["-k", "not sm80"]
    record = json.loads((tmp_path / "gpu_tests.json").read_text())
    assert record["meta"]["command"] == (
        "python perf/gpu_check.py FOLDER --files test_merge -k 'not sm80' --parts cache"
    )
