"""perf/fa3_grid.py, as far as it needs no GPU: the cells, what counts as wrong, records that go on."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from script_modules import load_script

from cute_attn import api, flash, launch, memory
from cute_attn.bench import record

SCRIPT = Path(__file__).parents[1] / "perf" / "fa3_grid.py"


@pytest.fixture(scope="module")
def grid() -> ModuleType:
    return load_script("perf/fa3_grid.py")


@pytest.fixture(scope="module")
def parts(grid: ModuleType) -> ModuleType:
    return sys.modules["fa3_cells"]  # which the script has imported from its folder


def run(grid: ModuleType, path: Path, only: str, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """(status, rows by cell) of a command."""
    words = [str(path), "--device", "cpu", "--backend", "reference", "--only", only, *more]
    status = grid.main(words)
    assert not grid.process_files(path)
    trees = {tree: record.read(path).meta["git"][tree] for tree in record.TREES}
    rows, begun = grid.read_cells(grid.cells_file(path), trees)
    assert begun is None
    return status, rows


def test_the_grid(grid: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = grid.cells()
    assert len({cell.name for cell in found}) == len(found) > 20_000
    batches = [cell for cell in found if not cell.varlen]
    # dtypes, kinds of heads, softcap, window, causal, (head_dim, head_dim_v), lengths
    assert len([cell for cell in batches if cell.dtype != "e4m3"]) == 2 * 3 * 2 * 2 * 2 * 7 * 20
    assert len([cell for cell in batches if cell.dtype == "e4m3"]) == 3 * 2 * 2 * 2 * 5 * 20
    assert {(cell.seqlen_q, cell.seqlen_k) for cell in batches} >= {(1, 1), (799, 3), (4224, 4224)}
    assert grid.main(["--list"]) == 0
    assert f"all: {len(found)}" in capsys.readouterr().out


def test_sequences_of_unlike_length(parts: ModuleType) -> None:
    for unused in (False, True):
        cell = parts.Cell("bf16", "gqa", 64, 256, 113, 203, True, True, False, varlen=True, unused=unused)
        x = parts.make_inputs(cell, "meta", 1)
        sizes = x.sizes
        assert x.q.shape == (sum(sizes.lengths_q), 6, 64) and x.v.shape == (sum(sizes.room_k), 2, 256)
        assert len(sizes.lengths_q) == 9 and all(93 <= n <= 113 for n in sizes.lengths_q)
        assert [i for i, n in enumerate(sizes.room_k) if n == 0] == [0, 5, 8]
        assert all(n <= room for n, room in zip(sizes.lengths_k, sizes.room_k, strict=True))
        assert (sizes.lengths_k != sizes.room_k) == unused
        bare = parts.make_inputs(cell, "meta", 1, contents=False)
        assert bare.sizes == sizes and (bare.q.shape, bare.v.dtype) == (x.q.shape, x.v.dtype)


def test_cells_on_the_cpu_and_again(
    grid: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.json"
    only = "^((bf16-gqa-d96|fp16-mqa-d64v256)-(1x1|64x128|128x217)(-|$)|e4m3-gqa-d96-1x1-.*varlen)"
    status, rows = run(grid, path, only, "--cells", "24")
    assert status == 0 and len(rows) == 24
    text = capsys.readouterr().out
    assert "24 cells" in text and "worst error over torch's" in text
    for name, row in rows.items():
        if row["status"] == "ok":
            assert row["max_error"] <= row["allowed_error"] and row["lse_error"] < 1e-5
        else:
            assert row["status"] == "skipped" and name.startswith("e4m3") and "varlen" in name
    assert {row["status"] for row in rows.values()} == {"ok", "skipped"}
    first = rows
    status, rows = run(grid, path, only, "--cells", "3")  # others, which join them
    assert status == 0 and len(rows) == 27 and first.items() <= rows.items()
    assert "3 cells" in (text := capsys.readouterr().out) and "24 cells were in" in text
    # of a run that was killed: a cell that was done, one that was not, one that was half written
    names = [cell.name for cell in grid.cells() if cell.name not in rows][:3]
    trees = grid.cells_file(path).read_text().splitlines()[0]
    done = {"cell": names[0], "status": "ok", "torch_error": 0.0, "lse_error": 0.0}
    lines = [trees, json.dumps({"begin": names[0]}), json.dumps(done), json.dumps({"begin": names[1]})]
    grid.cells_file(path, 0).write_text("\n".join(lines) + "\n" + '{"cell": ')
    status, rows = run(grid, path, "^nothing$")
    assert status == 0 and len(rows) == 29 and rows[names[0]] == done
    assert rows[names[1]]["status"] == "failed" and "did not end" in rows[names[1]]["reason"]
    status, rows = run(grid, path, f"^{names[1]}$", "--retry")
    assert status == 0 and len(rows) == 29 and rows[names[1]]["status"] == "ok"
    # other sources start anew
    grid.cells_file(path).write_text(json.dumps({"kernels": "other", "cute_attn": "other"}) + "\n" + lines[2])
    assert run(grid, path, "^nothing$") == (0, {})


def test_the_record_counts_cells(grid: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, path = flash.flash_attn_func, tmp_path / "grid.json"

    def faulty(q: Any, *args: Any, **options: Any) -> Any:
        out, lse = right(q, *args, **options)
        if q.shape[1] == 239:
            lse += 1.0
        return out, lse

    monkeypatch.setattr("cute_attn.flash_attn_func", faulty, raising=False)
    assert run(grid, path, "^bf16-(mha|gqa)-d64-(1x1|239x1|113x203)-causal$")[0] == 1
    assert run(grid, path, "^e4m3-mha-d64-1x1-varlen$")[0] == 0
    mha, gqa, skipped, *faults = record.read(path).rows
    counts = ("ok", "wrong", "failed", "skipped", "not_run")
    for row, heads_k in ((mha, 6), (gqa, 2)):
        assert (row["heads_k"], row["causal"], row["local"], row["varlen"]) == (heads_k, True, False, False)
        assert [row[f"cells_{name}"] for name in counts] == [2, 1, 0, 0, 17]
        assert row["status"] == "wrong" and "239x1" in row["reason"] and row["worst_lse_error"] > 0.1
        assert row["worst_over_torch"] > 0 and row["worst_cell"].endswith("113x203-causal")
    assert skipped["status"] == "skipped" and skipped["cells_skipped"] == 1
    assert [row["cell"] for row in faults] == [f"bf16-{heads}-d64-239x1-causal" for heads in ("mha", "gqa")]
    assert all((row["batch"], row["seqlen_q"], row["seqlen_k"]) == (9, 239, 1) for row in faults)


def test_several_processes(grid: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "^(bf16|fp16)-mqa-d96-(1x1|64x128)(-|$)"
    status, rows = run(grid, tmp_path / "x.json", only, "--processes", "2")
    names = {cell.name for cell in grid.cells() if grid.re.search(only, cell.name)}
    assert status == 0 and rows.keys() == names and {row["status"] for row in rows.values()} == {"ok"}
    assert f"{len(names)} cells" in capsys.readouterr().out


def test_a_process_that_dies(grid: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"  # its process 0 ends as one that lost its context, 1 hangs, 2 is killed
    script.write_text(
        "import os, sys, time\nprocess = int(sys.argv[3])\n"
        "if process == 0: sys.exit(3)\nif process == 1: time.sleep(100)\nos.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(grid, "__file__", str(script))
    monkeypatch.setattr(grid, "GRACE", 1.0)
    task = grid.Task(
        str(tmp_path / "x.json"), [["a"]] * 3, {}, "cpu", "reference", 0, 3, 1, time.time(), os.getpid()
    )
    assert sorted(grid.run_processes(task, tmp_path)) == [
        "process 0 lost its CUDA context",
        "process 1 was killed: it did not end in time",
        "process 2 ended with status -9",
    ]
    file = tmp_path / "x.json.cells.0"
    file.write_text('{}\n{"begin": "a"}\n')
    assert not grid.hangs(file, {})
    os.utime(file, (0, 0))
    assert grid.hangs(file, {})
    file.write_text('{}\n{"begin": "a"}\n{"cell": "a"}\n')
    os.utime(file, (0, 0))
    assert not grid.hangs(file, {})


def test_groups_are_taken_once_and_in_time(grid: ModuleType, tmp_path: Path) -> None:
    names = [[cell.name] for cell in grid.cells() if grid.re.search("^bf16-mha-d64-1x1(-|$)", cell.name)]
    task = grid.Task(
        str(tmp_path / "x.json"), names, {}, "cpu", "reference", 0, 2, 1, time.time() + 600, os.getpid()
    )
    (tmp_path / "1.taken").touch()
    grid.Run(task, tmp_path, 0).loop()
    rows, _ = grid.read_cells(grid.cells_file(tmp_path / "x.json", 0), {})
    assert list(rows) == [name for i, (name,) in enumerate(names) if i != 1]
    late = dataclasses.replace(task, end=time.time() - 1)
    grid.Run(late, tmp_path, 1).loop()
    assert grid.read_cells(grid.cells_file(tmp_path / "x.json", 1), {}) == ({}, None)


@pytest.mark.parametrize("fault", ["value", "nan", "lse", "empty row", "exception"])
def test_a_fault_is_found(
    grid: ModuleType,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = flash.flash_attn_func

    def faulty(*args: Any, **options: Any) -> Any:
        if fault == "exception":
            raise RuntimeError("no kernel")
        out, lse = right(*args, **options)
        if fault == "value":
            out[3, 238, 1, 7] += 0.5
        elif fault == "nan":
            out[3, 238, 1, 7] = math.nan
        elif fault == "lse":
            lse[3, 1, 238] += 0.1
        else:
            out[0, 0, 0, 0] = 1e-6
        return out, lse

    monkeypatch.setattr("cute_attn.flash_attn_func", faulty, raising=False)
    status, rows = run(grid, tmp_path / "x.json", "^bf16-mha-d64-239x1-causal$")
    (row,) = rows.values()
    assert status == 1
    assert row["status"] == ("failed" if fault == "exception" else "wrong")
    said = {
        "value": "(batch, query, head, column) [3, 238, 1, 7]",
        "nan": "[3, 238, 1, 7]",
        "lse": "lse error",
        "empty row": "a row without keys is not 0 and -inf",
        "exception": "RuntimeError: no kernel",
    }[fault]
    assert said in row["reason"] and said in capsys.readouterr().out


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU count as those of a Hopper GPU."""
    for module in (api, flash):
        monkeypatch.setattr(module, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr("cute_attn.problem.device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "_sms", lambda device: 132)


@pytest.mark.usefixtures("hopper")
def test_calls_are_planned_without_a_launch(parts: ModuleType) -> None:
    cell = parts.Cell("bf16", "mqa", 192, 128, 113, 203, False, True, True)
    x = parts.make_inputs(cell, "cpu", 0, contents=False)
    with parts.recorded_kernels() as asked:
        parts.call(cell, x, "sm90")
    (config,) = asked
    assert (config.head_dim, config.head_dim_v, config.softcap, config.pack_gqa) == (192, 128, True, 1)
    assert launch.compile_kernel.__module__ == "cute_attn.compile"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["batch", "varlen", "e4m3"])
def test_planned_calls_are_forgotten(parts: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = "e4m3" if kind == "e4m3" else "fp16"
    cell = parts.Cell(dtype, "gqa", 64, 64, 113, 203, True, False, False, varlen=kind == "varlen")
    x = parts.make_inputs(cell, "cpu", 0)
    launched: list[Any] = []
    monkeypatch.setattr(launch, "compile_kernel", lambda config: lambda *args: launched.append(config))
    with parts.recorded_kernels() as asked:
        parts.call(cell, x, "sm90")
    assert asked and not launched
    parts.call(cell, x, "sm90")
    assert launched == asked


def test_poison(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def new(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype).as_strided(shape, strides)

    monkeypatch.setattr(memory, "_empty_strided_cuda", new)
    monkeypatch.setattr(memory, "current_device", lambda: 0)
    make = memory.new_empty((3, 2), torch.float16, torch.device("cuda", 0))
    with parts.poisoned():
        assert bool(torch.empty(3, 2, dtype=torch.bfloat16).isnan().all())
        assert torch.empty(0).numel() == 0
        assert bool(make().isnan().all())
    assert memory._empty_strided_cuda is new and bool((make() == 0).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_the_reference(parts: ModuleType, causal: bool, local: bool) -> None:
    """That of the grid, of all sequences at once, is that of the package, of each."""
    cell = parts.Cell("bf16", "gqa", 64, 96, 40, 70, causal, local, True, varlen=True, unused=True)
    x = parts.make_inputs(cell, "cpu", 3)
    sizes = x.sizes
    q = parts.padded(x.q, sizes.lengths_q)
    k, v = (parts.padded(y, sizes.room_k) for y in (x.k, x.v))
    hidden = parts.hidden_keys(cell, sizes, q.device)
    options: dict[str, Any] = {"softmax_scale": 0.125, "softcap": 15.0, "dtype": torch.float64}
    out, lse = parts.attention(q, k, v, hidden, **options)
    left, right = sizes.window
    options["window"] = (left, 0) if causal else (left, right)
    for i, (n, m) in enumerate(zip(sizes.lengths_q, sizes.lengths_k, strict=True)):
        expected, expected_lse = flash.reference(
            q[i : i + 1, :n], k[i : i + 1, :m], v[i : i + 1, :m], **options
        )
        torch.testing.assert_close(out[i, :n], expected[0])
        torch.testing.assert_close(lse[i, :n].T, expected_lse[0])


def test_e4m3_probabilities(parts: ModuleType) -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 64)
    cell = parts.Cell("e4m3", "mha", 64, 64, 20, 20, True, False, False)
    hidden = parts.hidden_keys(cell, parts.Sizes((-1, -1), [20], [20], [20]), q.device)
    options: dict[str, Any] = {"softmax_scale": 0.125, "softcap": 0.0, "dtype": torch.float32}
    exact, _ = parts.attention(q, k, v, hidden, **options)
    rough, _ = parts.attention(q, k, v, hidden, **options, p_dtype=torch.float8_e4m3fn)
    error = ((rough - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert 0.005 < error < 0.05
