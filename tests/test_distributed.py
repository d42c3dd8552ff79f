"""Attention over several ranks, on CPUs by gloo: 4 processes that run all of tests/distributed_cases.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import distributed_cases

pytestmark = pytest.mark.skipif(
    not __import__("torch").distributed.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each case said on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(
        distributed_cases.run_rank,
        args=(str(folder),),
        nprocs=distributed_cases.WORLD,
        start_method="spawn",
    )
    return folder


@pytest.mark.parametrize("name", distributed_cases.names())
def test_on_every_rank(name: str, results: Path) -> None:
    for rank in range(distributed_cases.WORLD):
        path = results / f"{name}.{rank}"
        assert path.is_file(), f"rank {rank} never got there"
        text = path.read_text()
        assert not text, text


def test_a_dead_rank_is_an_error(tmp_path: Path) -> None:
    start = time.monotonic()
    mp.start_processes(
        distributed_cases.run_until_one_dies, args=(str(tmp_path),), nprocs=2, start_method="spawn"
    )
    assert (tmp_path / "error").read_text()
    assert time.monotonic() - start < 120
