"""perf/train_blocks.py and perf/train_chars.py at tiny sizes, the definitions in place of the kernels."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from script_modules import load_script

from cute_attn.bench import record

PERF = Path(__file__).parents[1] / "perf"


@pytest.fixture(autouse=True)
def perf_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PERF))


def script(name: str) -> ModuleType:
    return load_script(f"perf/{name}.py")


def test_attentions_are_one_function() -> None:
    """But for rounding; the heads of a block are those of its projection."""
    gpt = script("gpt")
    q, k, v = (torch.randn(1, 40, 2, 64).to(torch.bfloat16) for _ in range(3))
    exact = gpt.attention("sdpa", "cpu")(*(x.double() for x in (q, k, v)))
    for provider in gpt.PROVIDERS:
        out = gpt.attention(provider, "cpu")(q, k, v)
        assert out.shape == q.shape and out.dtype == torch.bfloat16
        error = (out.double() - exact).abs().max().item()
        assert error < (0.15 if provider == "cute_attn fp8" else 0.02), provider
    block = gpt.Block(128, 2)
    x = torch.randn(1, 9, 128)
    kept, swapped = (block(x, lambda q, k, v, n=n: v.roll(n, 2)) for n in (0, 1))
    assert not torch.allclose(kept, swapped)
    assert torch.allclose(kept, block(x, lambda q, k, v: v))


def test_train_blocks(tmp_path: Path) -> None:
    blocks, path = script("train_blocks"), tmp_path / "blocks.json"
    words = "--device cpu --layers 2 --d-model 64 --shapes 1x16x64 --rounds 1 --steps 2 --json"
    assert blocks.main([*words.split(), str(path)]) == 0
    found = record.read(path)
    assert found.meta["command"].startswith("python perf/train_blocks.py --device cpu")
    assert [row["kernel"] for row in found.rows] == list(blocks.PROVIDERS)
    assert all(row["status"] == "ok" and row["ms"] > 0 and row["layers"] == 2 for row in found.rows)


def test_a_failure_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, path = script("train_blocks"), tmp_path / "blocks.json"
    whole = blocks.gpt.attention

    def attention(provider: str, device: str) -> object:
        def fails(*tensors: object) -> None:
            raise RuntimeError("no such kernel")

        return fails if provider == "cute_attn" else whole(provider, device)

    monkeypatch.setattr(blocks.gpt, "attention", attention)
    words = "--device cpu --layers 1 --d-model 64 --shapes 1x16x64 --rounds 1 --steps 1 --json"
    assert blocks.main([*words.split(), str(path)]) == 1
    rows = record.read(path).rows
    assert [row["status"] for row in rows] == ["failed", "ok", "ok", "ok"] and rows[0][
        "reason"
    ] == "no such kernel"


def test_train_chars(tmp_path: Path) -> None:
    chars, path = script("train_chars"), tmp_path / "chars.json"
    words = "--device cpu --steps 3 --seqlen 16 --batch 2 --layers 1 --d-model 64 --json"
    assert chars.main([*words.split(), str(path)]) == 0
    rows = {(row["kernel"], row["order"]): row for row in record.read(path).rows}
    assert list(rows) == list(chars.RUNS)
    curves = {run: list(map(float, row["losses"].split())) for run, row in rows.items()}
    assert all(len(curve) == 2 and curve[1] < curve[0] for curve in curves.values())
    assert rows["sdpa_flash", 0]["rms_to_flash"] == 0.0
    ours = rows["cute_attn", 0]
    assert ours["rms_to_flash"] < 0.1 * ours["noise_order"]  # three steps: the same but for rounding
    assert chars.rms([1.0, 2.0], [1.0, 4.0]) == pytest.approx(2.0**0.5)
