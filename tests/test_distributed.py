"""Attention over several ranks, on CPUs by gloo: 4 processes that run all of tests/distributed_cases.py; on GPUs by NCCL."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import distributed_cases

no_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def start(target: Callable[..., Any], folder: Path, count: int) -> None:
    """`count` processes that run target(rank, folder), forked from one that has imported all and done nothing."""
    multiprocessing.set_forkserver_preload(["distributed_cases"])
    mp.start_processes(target, args=(str(folder),), nprocs=count, start_method="forkserver")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each case said on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    start(distributed_cases.run_rank, folder, distributed_cases.WORLD)
    return folder


@no_gloo
@pytest.mark.parametrize("name", distributed_cases.names())
def test_on_every_rank(name: str, results: Path) -> None:
    for rank in range(distributed_cases.WORLD):
        path = results / f"{name}.{rank}"
        assert path.is_file(), f"rank {rank} never got there"
        text = path.read_text()
        assert not text, text


@no_gloo
def test_a_dead_rank_is_an_error(tmp_path: Path) -> None:
    begin = time.monotonic()
    start(distributed_cases.run_until_one_dies, tmp_path, 2)
    assert (tmp_path / "error").read_text()
    assert time.monotonic() - begin < 120


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus(ranks: int, tmp_path: Path) -> None:
    """NCCL and the kernels; a ring of one on one GPU."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPU; {ranks} are needed")
    mp.start_processes(
        distributed_cases.run_gpu_rank, args=(str(tmp_path), ranks), nprocs=ranks, start_method="spawn"
    )
    for rank in range(ranks):
        assert (tmp_path / f"gpu.{rank}").read_text() == ""


def test_calls_without_a_process_group_are_refused() -> None:
    from cute_attn.distributed import Sharding, ring_attention

    assert not dist.is_initialized() and os.environ.get("RANK") is None
    x = torch.zeros(1, 8, 2, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match="torch.distributed has no process group"):
        ring_attention(x, x, x, Sharding(8, 1), backend="reference")
