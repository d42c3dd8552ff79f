"""Attention over several ranks, on CPUs by gloo: processes that run tests/distributed_cases.py; on GPUs by NCCL."""

from __future__ import annotations

import ast
import contextlib
import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_cases
import pytest
import thread_ranks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import cute_attn.bench.__main__ as bench
from cute_attn import compile as compiler
from cute_attn.bench import record, ring
from cute_attn.kernels.config import MergeConfig

no_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def start(target: Callable[..., Any], folder: Path, count: int, *more: Any) -> None:
    """`count` processes that run target(rank, folder), forked from one that has imported all and done nothing."""
    multiprocessing.set_forkserver_preload(["distributed_cases"])
    mp.start_processes(target, args=(str(folder), *more), nprocs=count, start_method="forkserver")


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


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the example and the benchmark left on two ranks."""
    folder = tmp_path_factory.mktemp("programs")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    start(distributed_cases.run_programs, folder, 2, ports)
    return folder


@no_gloo
def test_the_example_trains(programs: Path) -> None:
    losses = [ast.literal_eval((programs / f"losses.{rank}").read_text()) for rank in range(2)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0] - 0.2, losses[0]


@no_gloo
def test_the_benchmark_reports(programs: Path) -> None:
    rows = record.read(programs / "ring.json").rows
    assert [row["kernel"] for row in rows] == ["one_gpu", "ring", "ulysses", "all_gather"]
    by = {row["kernel"]: row for row in rows}
    assert by["one_gpu"]["bytes_sent"] == 0 and by["ulysses"]["rel_rmse"] == 0.0
    # half of the keys to the other rank: in 8 bits with scales and samples of the mean, or in 16
    codes = 2 * 256 * 2 * 32
    assert codes < by["ring"]["bytes_sent"] < 1.2 * codes and by["all_gather"]["bytes_sent"] == 2 * codes
    assert all(row["world"] == 2 and row["hidden"] is None and row["rel_rmse"] < 2e-2 for row in rows)
    assert "x one GPU" in (programs / "ring.markdown").read_text()
    assert (programs / "ring.csv").read_text().count("\n") == 5


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        ([], {}, "torchrun --nproc-per-node 2"),
        (["--world", "4"], {"RANK": "0", "WORLD_SIZE": "2"}, "--world is 4, and torchrun has started 2"),
        (["--phase", "ring,forward"], {"RANK": "0", "WORLD_SIZE": "2"}, "ring runs alone"),
    ],
)
def test_the_benchmark_refuses(
    given: list[str],
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        bench.main(["--phase", "ring", *given])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_hidden_share() -> None:
    assert ring.hidden_share(([(0, 10), (5, 20)], [(0, 5), (4, 6), (15, 40)])) == (6 + 5) / 20
    assert ring.hidden_share(([(0, 10)], [])) == 0.0
    assert ring.hidden_share(([], [(0, 1)])) is None


def test_messages_begin_when_all_ranks_have_begun() -> None:
    """One that has ended before another rank says that it began took no time."""
    messages = [(0.0, 10.0), (20.0, 30.0), (40.0, 41.0)]
    starts = [[0.0, 20.0, 40.0], [4.0, 15.0, 41.5]]
    assert ring.begun_by_all(messages, starts) == [(4.0, 10.0), (20.0, 30.0), (41.0, 41.0)]


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels of `distributed_cases.on_gpu` in the disk cache: ranks would compile one after the other."""
    names = ["--recipe", "accurate,fp8,paper,bf16", "--dtype", "fp16", "--head-dim", "128"]
    jobs = str(min(24, os.cpu_count() or 1))
    compiler.main([*names, "--mask", "full,causal,window", "--varlen", "--backward", "--jobs", jobs])
    for wide in itertools.product((False, True), repeat=2):
        compiler.compile_kernel(MergeConfig(128, "fp16", *wide))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus(ranks: int, tmp_path: Path, compiled: None) -> None:
    """NCCL and the kernels; a ring of one on one GPU. What the ranks print says how far they have come."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPU; {ranks} are needed")
    begin = time.monotonic()
    processes = mp.start_processes(
        distributed_cases.run_gpu_rank,
        args=(str(tmp_path), ranks),
        nprocs=ranks,
        start_method="spawn",
        join=False,
    )
    assert processes is not None
    while not processes.join(timeout=1):
        if time.monotonic() - begin > distributed_cases.GPU_LIMIT:
            for process in processes.processes:
                process.kill()
            pytest.fail(f"the ranks do not end within {distributed_cases.GPU_LIMIT} s")
    for rank in range(ranks):
        assert (tmp_path / f"gpu.{rank}").read_text() == ""


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_one_gpu(ranks: int, compiled: None) -> None:
    """The kernels of several ranks, whose messages are copies on the one GPU."""

    def of_one(rank: int) -> None:
        distributed_cases.on_gpu(
            rank, ranks, lambda what: print(f"rank {rank} of {ranks}: {what}", flush=True)
        )

    thread_ranks.Ranks(ranks).run(of_one)


@pytest.mark.parametrize(
    "case",
    [
        distributed_cases.case_causal_zigzag_of_four,
        distributed_cases.case_windows_skip_ranks,
        distributed_cases.case_codes_where_each_rank_sums_whole_chunks,
        distributed_cases.case_e4m3_of_four,
        distributed_cases.case_ulysses_is_bit_equal,
    ],
)
def test_on_threads(case: Callable[[], None]) -> None:
    """The stand-in of `test_on_one_gpu`."""

    def of_one(rank: int) -> None:
        torch.manual_seed(0)
        case()

    thread_ranks.Ranks(distributed_cases.WORLD).run(of_one)


@pytest.mark.parametrize(
    ("size", "change", "message"), [(4, 1, "changed"), (3, 0, "3 of torch.uint8 is expected")]
)
def test_threads_find_wrong_messages(size: int, change: int, message: str) -> None:
    ranks = thread_ranks.Ranks(2)

    def of_one(rank: int) -> None:
        own, found = torch.zeros(4, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        pairs = ((ranks.isend, own), (ranks.irecv, found))
        works = ranks.batch_isend_irecv([ranks.P2POp(op, x, 1 - rank, ranks.group.WORLD) for op, x in pairs])
        own += change
        for work in works:
            work.wait()

    with pytest.raises(AssertionError, match=message):
        ranks.run(of_one)


def test_calls_without_a_process_group_are_refused() -> None:
    from cute_attn.distributed import Sharding, ring_attention

    assert not dist.is_initialized() and os.environ.get("RANK") is None
    x = torch.zeros(1, 8, 2, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match="has no process group"):
        ring_attention(x, x, x, Sharding(8, 1), backend="reference")
