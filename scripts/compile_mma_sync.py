"""Compile the kernels by mma.sync for GPUs that need not be here, and list registers and spills.

    nice python scripts/compile_mma_sync.py [--arch sm_80,sm_86] [--kind forward] [--all] [--jobs 4] [--json FILE]

Forward, backward and the kernels of KV caches, at head dimensions of every row of the tile tables. By default a table
of cases in which every pair of two features occurs, another one for each architecture; `--all` takes every
combination, thousands of kernels of some seconds each. The exit status is 1 where a kernel spills or does not compile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from covering import covering

from cute_attn import decode_plan
from cute_attn.backward_tiles import backward16_sm80_config
from cute_attn.compile import inspect
from cute_attn.kernels.config import E4M3_ARCHS, SM80_ARCHS, Bwd16Sm80Config, DecodeConfig, Fwd16Sm80Config
from cute_attn.plan_sm80 import forward16_sm80_config

KINDS = ("forward", "backward", "cache")
ARCHS = [arch for arch in SM80_ARCHS if arch != "sm_90a"]
DIMS = ((40, 72), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_BOTH = (False, True)
_SCORES = {"softcap": _BOTH, "alibi": _BOTH}
FEATURES: dict[str, dict[str, Sequence[Any]]] = {
    "forward": {
        "dims": DIMS,
        "dtype": ("bf16", "fp16"),
        "mask": ("full", "causal", "window"),
        **_SCORES,
        "sinks": _BOTH,
        "varlen": _BOTH,
        "group": (1, 4),
    },
    "backward": {
        "dims": DIMS,
        "dtype": ("bf16", "fp16"),
        "mask": ("full", "causal", "window"),
        **_SCORES,
        "varlen": _BOTH,
        "deterministic": _BOTH,
    },
    "cache": {
        "dims": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
        "dtype": ("bf16", "fp16"),
        "form": tuple(decode_plan.FORMS),
        "rows": (1, 16, 64),
        "row_ends": _BOTH,
        **_SCORES,
        "sinks": _BOTH,
    },
}

Config = Fwd16Sm80Config | Bwd16Sm80Config | DecodeConfig


def configuration(kind: str, case: Mapping[str, Any], arch: str) -> Config | None:
    """The kernel of a case of `FEATURES`; None where the architecture has none."""
    options = dict(case, arch=arch)
    sizes = (*options.pop("dims"), options.pop("dtype"))
    if kind == "cache":
        form = decode_plan.FORMS[options.pop("form")]
        if form.get("cache") == "e4m3" and arch not in E4M3_ARCHS:
            return None
        return decode_plan.decode_config(*sizes, **form, **options)
    mask = options.pop("mask")
    options |= {} if mask == "full" else {mask: True}
    if kind == "backward":
        return backward16_sm80_config(*sizes, **options)
    return forward16_sm80_config(*sizes, seqlen_q=1 if options["group"] > 1 else 1 << 20, **options)


def chosen(archs: Sequence[str], kinds: Sequence[str], everything: bool) -> list[tuple[str, str, Config]]:
    """(architecture, kind, kernel), each once."""
    found: dict[Config, tuple[str, str, Config]] = {}
    for (place, arch), kind in itertools.product(enumerate(archs), kinds):
        features = FEATURES[kind]
        cases: Iterator[dict[str, Any]] | list[dict[str, Any]] = covering(features, seed=place)
        if everything:
            cases = (
                dict(zip(features, values, strict=True)) for values in itertools.product(*features.values())
            )
        for case in cases:
            config = configuration(kind, case, arch)
            if config is not None:
                found[config] = (arch, kind, config)
    return list(found.values())


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default=",".join(ARCHS), help="default: %(default)s")
    parser.add_argument("--kind", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="every combination of features")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the figures of every kernel there")
    options = parser.parse_args()
    archs, kinds = options.arch.split(","), options.kind.split(",")
    for name, given, allowed in (("arch", archs, ARCHS), ("kind", kinds, KINDS)):
        if not set(given) <= set(allowed):
            parser.error(f"argument --{name}: {','.join(given)} is not among {', '.join(allowed)}")
    kernels = chosen(archs, kinds, options.all)
    rows: list[dict[str, Any]] = []
    failed = 0
    spawn = multiprocessing.get_context("spawn")  # the DSL aborts where two threads compile at once
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        jobs = {pool.submit(inspect, config): (arch, kind, config) for arch, kind, config in kernels}
        for job in concurrent.futures.as_completed(jobs):
            arch, kind, config = jobs[job]
            error = job.exception()
            if error is not None:
                failed += 1
                print(f"{config.name}  FAILED: {type(error).__name__}: {error}", flush=True)
                continue
            found = job.result()
            spills = found.stack_bytes, found.spill_store_bytes, found.spill_load_bytes
            text = f"{found.registers} registers, {found.smem_bytes} bytes of shared memory"
            if any(spills) or found.counts["LDL"] or found.counts["STL"]:
                failed += 1
                text += ", SPILLS: stack {}, stores {}, loads {} bytes".format(*spills)
            print(f"{config.name}  {text}", flush=True)
            rows.append(
                {
                    "arch": arch,
                    "kind": kind,
                    "kernel": config.name,
                    "registers": found.registers,
                    "smem_bytes": found.smem_bytes,
                    "stack_bytes": found.stack_bytes,
                    "spill_bytes": found.spill_store_bytes + found.spill_load_bytes,
                    "HMMA": found.counts["HMMA"],
                }
            )
    for arch, kind in itertools.product(archs, kinds):
        count = sum(row["arch"] == arch and row["kind"] == kind for row in rows)
        print(f"{arch} {kind}: {count} kernels compiled")
    print(f"{failed} of {len(kernels)} failed or spill")
    if options.json is not None:
        rows.sort(key=lambda row: row["kernel"])
        options.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
