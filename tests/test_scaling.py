"""scripts/scaling_model.py: the model's limits, and that docs/scaling.md shows what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return load_script("scripts/scaling_model.py")


def test_the_page_shows_what_it_prints(model: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    model.main([])
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert f"<!-- scaling model -->\n\n{capsys.readouterr().out.strip()}\n\n<!-- end -->" in page


def test_limits(model: ModuleType) -> None:
    problem = model.Problem(1 << 18, 32, 8, 128, True, 1, 1000.0)
    one = 2.0 * 2.0**36 * 32 * 128 / 1e15
    assert problem.seconds == pytest.approx(one)
    free = model.Machine(1e30, 1e30, 8, 0.0)
    for ring, ulysses in ((4, 1), (1, 4), (16, 8)):
        found = model.estimate(problem, free, ring, ulysses)
        assert found.seconds == pytest.approx(one / (ring * ulysses))
    # Where a step takes as long as its message, a little less bandwidth begins to show.
    rows = problem.seqlen / 16
    bandwidth = problem.key_bytes * 8 / 32 * 1e15 / rows
    assert model.hiding_rows(problem, bandwidth) == pytest.approx(rows)
    assert model.hiding_rows(replace(problem, causal=False), bandwidth) == pytest.approx(rows / 2)
    for factor, hidden in ((1.01, 1.0), (0.5, 0.5)):
        machine = model.Machine(bandwidth * factor, bandwidth * factor, 8, 0.0)
        assert model.estimate(problem, machine, 16, 1).hidden == pytest.approx(hidden)
    # K and V of all others in a ring; of an eighth of the heads in a mesh, and heads for rows.
    machine = model.Machine(4e11, 4e10, 8, 1e-5)
    assert model.estimate(problem, machine, 16, 1).bytes_sent == 15 / 16 * 2.0**18 * 8 * 128 * 2
    mesh = model.estimate(problem, machine, 2, 8)
    assert mesh.bytes_sent == 2.0**17 * 128 * 2 + 7 / 8 * 2.0**14 * 40 * 128 * 4
    assert {(e.ring, e.ulysses) for e in model.choices(problem, machine, 16)} == {
        (16, 1),
        (8, 2),
        (4, 4),
        (2, 8),
    }


def test_it_draws(model: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model.main(["--recipe", "bf16", "--full", "--plot", str(tmp_path / "scaling.svg")])
    assert "<svg" in (tmp_path / "scaling.svg").read_text()


def test_speeds_that_no_record_has(model: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        model.main(["--head-dim", "96"])
    assert "has no row of accurate, head_dim 96" in capsys.readouterr().err
