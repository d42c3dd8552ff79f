"""perf/fa3_grid.py, as far as it needs no GPU: the cells, what counts as wrong, records that go on."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cute_attn import flash, launch
from cute_attn.bench import record

SCRIPT = Path(__file__).parents[1] / "perf" / "fa3_grid.py"


@pytest.fixture(scope="module")
def grid() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fa3_grid", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fa3_grid"] = module
    spec.loader.exec_module(module)
    return module


def run(grid: ModuleType, path: Path, only: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
    words = [str(path), "--device", "cpu", "--backend", "reference", "--only", only, *more]
    return grid.main(words), record.read(path).rows


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


def test_sequences_of_unlike_length(grid: ModuleType) -> None:
    import random

    for unused in (False, True):
        cell = grid.Cell("bf16", "gqa", 64, 256, 113, 203, True, True, False, varlen=True, unused=unused)
        x = grid.make_inputs(cell, "meta", random.Random(1))
        assert x.q.shape == (sum(x.lengths_q), 6, 64) and x.v.shape == (sum(x.room_k), 2, 256)
        assert len(x.lengths_q) == 9 and all(93 <= n <= 113 for n in x.lengths_q)
        assert [i for i, n in enumerate(x.room_k) if n == 0] == [0, 5, 8]
        assert all(n <= room for n, room in zip(x.lengths_k, x.room_k, strict=True))
        assert (x.lengths_k != x.room_k) == unused


def test_cells_on_the_cpu_and_again(
    grid: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.json"
    only = "^(bf16-gqa-d96|fp16-mqa-d64v256)-(1x1|113x128|64x128)(-|$)"
    status, rows = run(grid, path, only, "--cells", "12")
    assert status == 0 and len(rows) == 12
    text = capsys.readouterr().out
    assert "12 cells" in text and "worst error over torch's" in text
    for row in rows:
        if row["status"] == "ok":
            assert row["max_error"] <= row["allowed_error"] and row["lse_error"] < 1e-5
        else:
            assert row["status"] == "skipped" and row["varlen"]
    first = {row["cell"]: row for row in rows}
    status, rows = run(grid, path, only, "--cells", "3")  # others, which join them
    assert status == 0 and len(rows) == 15 and all(row == first.get(row["cell"], row) for row in rows)
    assert "3 cells" in (text := capsys.readouterr().out) and "12 cells were in" in text
    assert not grid.running_file(path).exists()
    running = next(c.name for c in grid.cells() if c.name not in {row["cell"] for row in rows})
    grid.running_file(path).write_text(running)
    status, rows = run(grid, path, "^nothing$")
    assert [row["cell"] for row in rows if row["status"] == "failed"] == [running]


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
    status, (row,) = run(grid, tmp_path / "x.json", "^bf16-mha-d64-239x1-causal$")
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


def test_calls_are_planned_without_a_launch(grid: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    monkeypatch.setattr(flash, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "_sms", lambda device: 132)
    cell = grid.Cell("bf16", "mqa", 192, 128, 113, 203, False, True, True)
    x = grid.make_inputs(cell, "cpu", random.Random(0))
    with grid.recorded_kernels() as asked:
        grid.call(cell, x, "sm90")
    (config,) = asked
    assert (config.head_dim, config.head_dim_v, config.softcap, config.pack_gqa) == (192, 128, True, 1)
    assert launch.compile_kernel.__module__ == "cute_attn.compile"


def test_poison(grid: ModuleType) -> None:
    with grid.Poison():
        assert bool(torch.empty(3, 2, dtype=torch.bfloat16).isnan().all())
        assert torch.empty(0).numel() == 0


def test_e4m3_probabilities(grid: ModuleType) -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 64)
    options = {"softmax_scale": 0.125, "window": (-1, 0), "softcap": 0.0}
    exact, _ = flash.reference(q, k, v, **options)
    rough = grid.in_e4m3(q, k, v, options)
    error = ((rough - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert 0.005 < error < 0.05
