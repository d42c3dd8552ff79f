"""Memory and traffic tables, the HTML page, and the comparison of two runs."""

from __future__ import annotations

import html.parser as html_parser
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import reference
from cute_attn.bench import __main__ as command
from cute_attn.bench import cases, compare, html, memory, record
from cute_attn.bench.report import Grid
from cute_attn.quantize import quantize_reference, resolve_recipe

META: dict[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "gpu": "some GPU",
    "driver": "1",
    "cuda": "13.0",
    "torch": "2.11",
    "cutlass_dsl": "4.8.1",
    "python": "3.11",
    "command": "bench",
    "git": {"commit": None, "dirty": None, "kernels": None, "cute_attn": None},
}


def timed(ms: float, spread: float = 0.01, **more: Any) -> dict[str, Any]:
    fields = {
        "provider": "cute_attn",
        "phase": "forward",
        "dtype": "fp8",
        "recipe": "fp8",
        "batch": 1,
        "seqlen_q": 4096,
        "seqlen_k": 4096,
        "heads_q": 16,
        "heads_k": 16,
        "head_dim": 128,
        "causal": False,
        "ms": ms,
        "ms_min": ms * (1 - spread),
        "ms_max": ms * (1 + spread),
        "tflops": 100 / ms,
        "rel_rmse": 0.04,
    }
    return record.make_row(**{**fields, **more})


# --- memory


@pytest.mark.parametrize("recipe", ["accurate", "fp8"])
def test_bytes_of_8bit_operands(recipe: str) -> None:
    """What is worked out is what the quantised tensors hold, beside output and lse."""
    case = cases.Case(2, 300, 1000, 4, 2, 64, False)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cpu")
    qkv = quantize_reference(q, k, v, resolve_recipe(recipe))
    parts = (qkv.q, qkv.k, qkv.vt, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.q_dot_mean)
    held = sum(x.numel() * x.element_size() for x in parts if x is not None)
    assert memory.ours_bytes(case, recipe) == held + 2 * q.numel() + 4 * 2 * 4 * 300
    assert memory.ours_bytes(case, None) == 2 * q.numel() + 4 * 2 * 4 * 300


def test_memory_table() -> None:
    shapes = cases.grid(seqlens=(1024, 131072), head_dims=(128,), causal=(False,), batch=1)
    rows = memory.memory_rows(shapes, ["accurate"], measured=False)
    record.validate(META, rows)
    assert [row["model_bytes"] for row in rows if row["provider"] == "standard"] == [1 << 26, 1 << 40]
    grid = memory.memory_grid(rows)
    assert grid is not None and grid.lines[1][4] == "1.0 TiB" and "measured" not in " ".join(grid.headers)
    rows[3].update(status="unavailable", reason=memory.OUT_OF_MEMORY)
    rows[4].update(peak_bytes=5 << 20)
    grid = memory.memory_grid(rows)
    assert (
        grid is not None and grid.lines[1][4] == "1.0 TiB (out of memory)" and "(5.0 MiB)" in grid.lines[1][5]
    )
    assert memory.memory_grid([]) is None


def test_memory_of_training() -> None:
    shapes = cases.grid(seqlens=(1024,), head_dims=(128,), causal=(False,), batch=1)
    rows = memory.memory_rows(shapes, ["accurate"], measured=False, call="train")
    record.validate(META, rows)
    inputs = 1024 * 2048  # elements of q
    assert rows[0]["model_bytes"] == 4 * 2 * 16 * 1024 * 1024 + 4 * inputs
    # Out, three gradients and the float32 sum of dQ; lse, and two numbers of each row beside it. Of the sum and the
    # two numbers rows of whole tiles, here 16 of 64.
    in_tiles = 16 * 64
    expected = 8 * inputs + 4 * in_tiles * 2048 + 16 * (4 * 1024 + 8 * in_tiles)
    assert rows[1]["model_bytes"] == rows[2]["model_bytes"] == expected
    assert memory.memory_grid(rows) is None
    grid = memory.memory_grid(rows, "train")
    assert grid is not None and "backward" in grid.title and grid.lines[0][4] == "136 MiB"
    whole, longer = (
        memory.ours_train_bytes(cases.Case(1, n, n, 16, 16, 128, True), None) for n in (1024, 1025)
    )
    assert longer - whole > 63 * 16 * 128 * 4  # a tile more of the sum of dQ


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (150 << 20, "150 MiB"), (3 << 40, "3.0 TiB")]
)
def test_readable(size: int, text: str) -> None:
    assert memory.readable(size) == text


def _bytes(count: reference.IOCount) -> int:
    """16-bit tensors, with the softmax's state and lse in float32."""
    wide = ("lse", "l", "m")
    moved = [*count.reads.items(), *count.writes.items()]
    return sum(number * (4 if name in wide else 2) for name, number in moved)


@pytest.mark.parametrize(("n", "d"), [(96, 16), (100, 32)])
def test_traffic_is_what_the_algorithms_count(n: int, d: int) -> None:
    q, k, v = (torch.randn(1, n, 1, d) for _ in range(3))
    assert sum(memory.standard_io(n, d).values()) == _bytes(reference.standard_attention_io(q, k, v)[2])
    for block in (16, 33):
        first = reference.flash_attention_1(q, k, v, block_q=16, block_k=block)[2]
        second = reference.flash_attention_2(q, k, v, block_q=block, block_k=16)[2]
        assert sum(memory.flash1_io(n, d, block).values()) == _bytes(first)
        assert sum(memory.flash2_io(n, d, block).values()) == _bytes(second)


def test_traffic_tables(tmp_path: Path) -> None:
    rows = memory.io_rows((1024, 16384), (64, 128))
    grid = memory.io_grid(rows)
    assert grid is not None and len(grid.lines) == 4 and grid.lines[3][6] == "2.0x"
    record.write(tmp_path / "io.json", META, rows)
    assert memory.io_grid(record.read(tmp_path / "io.json").rows) == grid
    with pytest.raises(ValueError, match="sram_elements must be at least head_dim"):
        memory.io_rows((1024,), (64,), 100)
    assert memory.io_grid([]) is None
    assert memory.measured_io_grid([]) is None
    path = memory.profile_record()
    assert path is not None
    counted = memory.measured_io_grid(record.read(path).rows)
    assert counted is not None and counted.lines[0][0] == "cute_attn fp8"


@pytest.mark.gpu
@pytest.mark.parametrize("call", memory.CALLS)
def test_memory_on_the_gpu(call: str) -> None:
    shapes = cases.grid(seqlens=(4096,), head_dims=(128,), causal=(False,), batch=1)
    for row in memory.memory_rows(shapes, ["accurate"], measured=True, call=call):
        assert row["status"] == "ok" and row["model_bytes"] <= row["peak_bytes"] < 1.1 * row[
            "model_bytes"
        ] + (4 << 20)


# --- HTML


class Balance(html_parser.HTMLParser):
    """Every element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        values = dict(attrs)
        self.loads += [values[name] or "" for name in ("src", "href") if name in values]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_loads_nothing() -> None:
    grid = Grid("Speed <&>", ["d", "<b>"], [["64", "1 < 2"]], {0}, ["a & b"])
    rows = [timed(1.0), timed(2.0, seqlen_q=8192, seqlen_k=8192), timed(1.5, provider="fa3", recipe=None)]
    pytest.importorskip("matplotlib")
    text = html.page("A <title>", ["first & line"], [grid], rows)
    parser = Balance()
    parser.feed(text)
    assert not parser.open and all(load.startswith("#") for load in parser.loads)
    assert "<svg" in text and "1 &lt; 2" in text and "A &lt;title&gt;" in text and "a &amp; b" in text
    assert 'name="viewport"' in text and "<script" not in text and not re.search(r'<svg[^>]* width="', text)


def test_page_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(rows: object) -> None:
        raise ImportError("no matplotlib")

    monkeypatch.setattr(html, "speed_panels", missing)
    assert "matplotlib is not installed" in html.page("title", [], [], [timed(1.0)])


def test_render_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files of a record that exists: nothing is measured."""
    saved, page = tmp_path / "run.json", tmp_path / "run.html"
    record.write(saved, META, [timed(1.0), timed(1.5, provider="fa3", recipe=None)])
    assert (
        command.main(["--render", str(saved), "--html", str(page), "--markdown", str(tmp_path / "run.md")])
        == 0
    )
    assert "cute_attn fp8" in page.read_text() and "some GPU" in page.read_text()
    assert "Forward, prepared operands to output" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--render", str(page)])


# --- comparison


def test_compare() -> None:
    before = record.Record(
        META, [timed(1.0), timed(2.0, causal=True), timed(1.0, provider="fa3", recipe=None)]
    )
    slower = timed(2.1, spread=0.2, causal=True)
    broken = timed(1.0, provider="fa3", recipe=None)
    broken |= {"ms": None, "ms_min": None, "ms_max": None, "status": "failed", "reason": "no"}
    after = record.Record({**META, "torch": "2.12"}, [timed(0.8), slower, broken, timed(3.0, head_dim=64)])
    meta, summary, moved = compare.compare_grids(before, after)
    assert ["torch", "2.11", "2.12"] in meta.lines and ["gpu", "some GPU", "same"] in meta.lines
    assert summary.lines[0] == ["forward", "cute_attn fp8", "time", "0.917", "0.800", "1.050", "2"]
    assert summary.lines[1][2:4] == ["relative RMSE", "1.000"]
    assert "3 rows in both runs, 0 in the first alone, 1 in the second alone." in summary.notes
    assert "fa3 fp8, d 128 full 4096, 1 x 16/16: ok -> failed: no" in summary.notes
    assert [line[-1] for line in moved.lines] == ["0.800"]  # 5% slower is within what rounds differ


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, page = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "compared.html"
    record.write(one, META, [timed(1.0)])
    record.write(two, {**META, "gpu": "another GPU"}, [timed(2.0)])
    assert command.main(["--compare", str(one), str(two), "--html", str(page)]) == 0
    assert "The GPUs differ" in capsys.readouterr().out and "2.000" in page.read_text()
    with pytest.raises(SystemExit):
        command.main(["--compare", str(one), str(tmp_path / "none.json")])


def test_reports_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "memory.json"
    arguments = [
        "--report",
        "memory",
        "--seqlen",
        "1024",
        "--json",
        str(saved),
        "--html",
        str(tmp_path / "m.html"),
    ]
    assert command.main(arguments) == 0
    assert {row["phase"] for row in record.read(saved).rows} == {"memory"}
    assert command.main(["--report", "io", "--seqlen", "1024", "--head-dim", "64"]) == 0
    assert "FLOP / byte" in capsys.readouterr().out
