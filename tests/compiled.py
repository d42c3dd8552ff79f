"""What the compiler makes of a sample of kernels."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cute_attn.compile import KernelFigures, inspect


@contextlib.contextmanager
def figures_of(sample: Sequence[Any]) -> Iterator[Callable[[Any], KernelFigures]]:
    """`inspect` of a configuration of the sample. The first request compiles all of them, in processes, as the DSL
    aborts where two threads compile at once."""
    jobs: dict[Any, concurrent.futures.Future[KernelFigures]] = {}
    pool = concurrent.futures.ProcessPoolExecutor(
        min(2, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    )

    def result(config: Any) -> KernelFigures:
        if not jobs:
            jobs.update({each: pool.submit(inspect, each) for each in sample})
        return jobs[config].result()

    yield result
    pool.shutdown(cancel_futures=True)


def no_spills(found: KernelFigures) -> None:
    assert (found.stack_bytes, found.spill_store_bytes, found.spill_load_bytes) == (0, 0, 0)
    assert (found.counts["LDL"], found.counts["STL"]) == (0, 0)
