"""What the compiler makes of a sample of kernels."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
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


def fullest(make: Callable[..., Any], tile: Sequence[str], options: Sequence[str]) -> list[Any]:
    """Of every tile that `make(head_dim, head_dim_v, dtype, arch=..., **options)` chooses on sm_80, sm_86 and sm_89 the
    configuration with the most features.

    Args:
        tile: fields of a configuration that make it another tile.
        options: features beside the mask.
    """
    found: dict[tuple[Any, ...], tuple[int, Any]] = {}
    dims = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
    masks: tuple[dict[str, bool], ...] = ({}, {"causal": True}, {"window": True})
    for arch, head_dims, mask in itertools.product(("sm_80", "sm_86", "sm_89"), dims, masks):
        for chosen in itertools.product((False, True), repeat=len(options)):
            config = make(*head_dims, "bf16", arch=arch, **mask, **dict(zip(options, chosen, strict=True)))
            key = (arch, *(getattr(config, name) for name in tile))
            features = sum(chosen) + len(mask)
            if key not in found or features > found[key][0]:
                found[key] = features, config
    return [config for _, config in found.values()]


def no_spills(found: KernelFigures) -> None:
    assert (found.stack_bytes, found.spill_store_bytes, found.spill_load_bytes) == (0, 0, 0)
    assert (found.counts["LDL"], found.counts["STL"]) == (0, 0)
