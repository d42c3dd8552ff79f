"""A sample of the kernels compiles for sm_90a, and their code keeps the limits. Needs no GPU.

`tiles.all_forward_configs` says what is sampled. The compilations run once for all tests, in two processes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compiled import figures_of, no_spills

from cute_attn import cache, decode_plan, plan, plan16, plan_sm80, tiles
from cute_attn import compile as compiler
from cute_attn.backward_tiles import backward16_sm80_config
from cute_attn.compile import KernelFigures
from cute_attn.kernels.config import (
    HEAD_DIMS,
    HEAD_DIMS_16BIT,
    SMEM_LIMIT,
    Bwd16Config,
    FwdConfig,
    QuantizeConfig,
)
from cute_attn.problem import Features, Problem
from cute_attn.quantize import PRESETS

FORWARD, QUANTISE = tiles.all_forward_configs(), tiles.all_quantize_configs()

Figures = Callable[[FwdConfig | QuantizeConfig], KernelFigures]


@pytest.fixture(scope="session")
def figures() -> Iterator[Figures]:
    with figures_of([*FORWARD, *QUANTISE]) as result:
        yield result


@pytest.mark.parametrize("config", FORWARD, ids=lambda config: config.name)
def test_forward_kernel(config: FwdConfig, figures: Figures) -> None:
    found = figures(config)
    assert found.name == config.name
    no_spills(found)
    assert not found.serialized_wgmma
    # Steps of k = 32: Q K^T takes head_dim / 32 of them, rounded up, for each of its parts, P V one for 32
    # keys and part of head_dim_v.
    steps_qk = config.qk_splits * (config.head_dim_padded // 32)
    steps_pv = len(config.pv_parts) * (config.tile_n // 32)
    # The code holds whole copies of the loop's step, at least one.
    if config.qk_dtype == "int8":
        copies, rest = divmod(found.counts["QGMMA"], steps_pv)
        assert copies >= 1 and rest == 0 and found.counts["IGMMA"] == copies * steps_qk
    else:
        copies, rest = divmod(found.counts["QGMMA"], steps_qk + steps_pv)
        assert copies >= 1 and rest == 0 and found.counts["IGMMA"] == 0
    assert found.counts["HGMMA"] == 0
    assert found.counts["UTMALDG"] >= 3  # Q, K and V
    assert found.counts["UTMASTG"] >= 1  # O
    assert found.counts["USETMAXREG"] == 2  # the producer gives registers, the consumers take them
    # All threads start with an equal share, in steps of 8; setmaxnreg deals it out again.
    assert found.registers == config.launch_regs  # what `check` counts on
    assert config.producer_regs <= found.registers <= config.consumer_regs
    assert found.smem_bytes <= SMEM_LIMIT == 232_448
    assert found.smem_bytes == config.smem_bytes  # what the launch asks for is what the plan says


@pytest.mark.parametrize("config", QUANTISE, ids=lambda config: config.name)
def test_quantiser(config: QuantizeConfig, figures: Figures) -> None:
    found = figures(config)
    assert found.name == config.name
    no_spills(found)
    assert found.counts["LDG"] > 0 and found.counts["STG"] > 0
    assert found.registers <= 255 and 0 < found.smem_bytes <= SMEM_LIMIT


def test_configurations_are_the_sample() -> None:
    configs = compiler.configurations()
    assert len(set(configs)) == len(configs) and set(configs) == {
        *FORWARD,
        *QUANTISE,
        *plan16.all_forward16_configs(),
        *plan_sm80.all_forward16_sm80_configs(),
        *decode_plan.all_decode_configs(),
    }


def test_figures_can_be_sent_between_processes() -> None:
    found = KernelFigures("k", 168, 0, 0, 0, 1024, False, {"LDL": 0}, 10, 1.5)
    assert pickle.loads(pickle.dumps(found)) == found


def test_shared_memory_of_the_launch_is_not_guessed() -> None:
    with pytest.raises(RuntimeError, match="no launch"):
        compiler._dynamic_smem("module {}")
    launch = (
        "%9 = llvm.getelementptr %5[0, 2] : (!llvm.ptr) -> !llvm.ptr, "
        "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>\n  llvm.store %4, %9 : i64"
    )
    with pytest.raises(RuntimeError, match="something else than a constant"):
        compiler._dynamic_smem(f"%4 = llvm.add %1, %2 : i64\n{launch}")
    one, two = (f"%4 = llvm.mlir.constant({size} : i64) : i64\n{launch}\n" for size in (4096, 512))
    assert compiler._dynamic_smem(one + two) == [4096, 512]  # two functions may use the same names


# --- caches


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no kernel in memory yet."""
    monkeypatch.setattr(compiler, "_compiled", {})


CONFIG = tiles.transpose_config(64)  # the quickest to compile


def test_memory_comes_first(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(compiler, "_load_or_build", lambda config: calls.append(config) or print)
    assert compiler.compile_kernel(CONFIG) is print
    assert compiler.compile_kernel(tiles.transpose_config(64)) is print  # equal, not the same
    assert calls == [CONFIG]
    monkeypatch.setattr(cache, "COMPILE_LOCK", None)  # known kernels take no lock
    assert compiler.compile_kernel(CONFIG) is print


def test_threads_compile_a_kernel_once(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    inside = threading.Event()

    def slow(config: Any) -> Any:
        calls.append(config)
        inside.wait(0.2)  # time for the other threads to arrive
        return print

    monkeypatch.setattr(compiler, "_load_or_build", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compiler.compile_kernel, [CONFIG] * 4))
    assert results == [print] * 4 and calls == [CONFIG]


def test_failed_compilations_are_not_remembered(fresh: None, cache_folder: Path) -> None:
    impossible = FwdConfig(64, 64, 128, 192, 2, "e4m3", "code", False, "bf16")
    for _ in range(2):
        with pytest.raises(ValueError, match="tile_n must be a multiple of 64 that divides 256, got 192"):
            compiler.compile_kernel(impossible)
    assert not list(cache_folder.glob("*.o"))


# A process of its own, without a GPU and without CUDA tensors: gets a kernel and calls it with CPU tensors.
PROCESS = """
import time
from cute_attn import compile as compiler
from cute_attn import tiles
import cutlass.cute, torch
from cute_attn.kernels.operands import Layout

build, built = compiler.build, []
def counted(config, options=""):
    built.append(config.name)
    return build(config, options)
compiler.build = counted

config = {config}
start = time.perf_counter()
kernel = compiler.compile_kernel(config)
print(len(built), time.perf_counter() - start)
assert compiler.compile_kernel(config) is kernel
f8 = torch.float8_e4m3fn
args = {args}
try:
    kernel(*args)
except ValueError as error:
    print(error)
"""
TRANSPOSE = (
    "tiles.transpose_config(64)",
    "[torch.zeros(1, 16, 1, 64).to(f8), torch.zeros(1, 1, 64, 16).to(f8)]",
)
ATTEND = (
    "tiles.forward_config(64, 64, 'e4m3', False, 'ex2', 'fp16')",
    "[torch.zeros(1, 16, 1, 64).half(), 0, 0, 0, Layout(*[0] * len(Layout._fields)), 0.125, 0.125, 132, 1]"
    " + [None] * 5",
)


@pytest.mark.parametrize(("config", "args"), [TRANSPOSE, ATTEND], ids=["transpose", "forward"])
def test_next_process_loads_from_disk(config: str, args: str, cache_folder: Path) -> None:
    def run() -> tuple[int, float, str]:
        done = subprocess.run(
            [sys.executable, "-c", PROCESS.format(config=config, args=args)],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        figures, error = done.stdout.split("\n", 1)
        builds, seconds = figures.split()
        return int(builds), float(seconds), error

    first, second = run(), run()
    assert (first[0], second[0]) == (1, 0)
    assert second[1] < 2.0  # seconds
    [entry] = cache_folder.glob("*.o")
    # The kernel knows its arguments and checks them before any launch, the loaded one like the compiled one.
    assert "expected device_type=cuda" in first[2]
    assert second[2] == first[2]
    assert entry.with_suffix(".json").is_file()


# -- ahead of use --------------------------------------------------------------------------------------------


def test_command_fills_the_cache(
    cache_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the six kernels that the default recipe wants for one head_dim and dtype, and again from disk."""
    wanted = compiler._chosen(["default"], [(64, 64)], ["bf16"], ["full", "causal"], [frozenset()], [1])
    assert [config.name for config in wanted] == [
        tiles.quantize_config(PRESETS["default"], 64, 64, "bf16").name,
        tiles.forward_config(64, 64, "int8", False, "code", "bf16", seqlen_k=tiles.SHORT_KEYS).name,
        tiles.forward_config(64, 64, "int8", False, "code", "bf16").name,
        tiles.forward_config(64, 64, "int8", True, "code", "bf16", seqlen_k=tiles.SHORT_KEYS).name,
        tiles.forward_config(64, 64, "int8", True, "code", "bf16").name,
        tiles.transpose_config(64).name,
    ]
    monkeypatch.setattr(compiler, "_chosen", lambda *args: [wanted[0], wanted[-1]])
    for _ in range(2):
        assert compiler.main(["--head-dim", "64", "--dtype", "bf16", "--jobs", "2"]) == 0
        text = capfd.readouterr().out
        assert f"2 of 2 kernels for sm_90a in {cache_folder}" in text and wanted[0].name in text
        assert len(list(cache_folder.glob("*.o"))) == 2


def test_chosen_kernels_are_those_that_plans_name() -> None:
    """For every preset, head_dim, pair of them, dtype, mask, number of queries and of query heads of a key head."""
    pairs = [(192, 128), *((d, d) for d in HEAD_DIMS)]
    features = [frozenset[str](), frozenset({"softcap"}), frozenset({"alibi", "sinks"})]
    chosen = set(compiler._chosen(list(PRESETS), pairs, ["bf16", "fp16"], compiler.MASKS, features, [1, 8]))
    planned: set[Any] = {tiles.transpose_config(head_dim_v) for _, head_dim_v in pairs}
    some = itertools.product(
        tiles.DTYPE_NAMES, compiler.MASKS, (1, 8), (3, 260, 4096)
    )  # packed, both, in clusters
    for (head_dim, head_dim_v), recipe, rest in itertools.product(pairs, PRESETS.values(), some):
        dtype, mask, heads_k, queries = rest
        names = random.choice(features)
        shape = (1, queries, 5000, 8, heads_k, head_dim, head_dim_v)
        asked = Features(
            (100, 0) if mask == "window" else (-1, -1),
            30.0 if "softcap" in names else 0.0,
            "alibi" in names,
            "sinks" in names,
        )
        made = plan.make_plan(Problem(*shape, dtype, dtype, mask == "causal", recipe, (9, 0), features=asked))
        planned |= {made.config, made.quantize_config}
    assert planned <= chosen


def test_chosen_16_bit_kernels_are_those_that_plans_name() -> None:
    pairs = [(192, 128), (40, 72), *((d, d) for d in HEAD_DIMS_16BIT)]
    features = [frozenset[str](), frozenset({"softcap"}), frozenset({"alibi", "sinks"})]
    chosen = set(compiler._chosen16(pairs, ["bf16", "fp16"], compiler.MASKS, features, [1, 8]))
    planned = {
        plan16.forward16_config(
            *pair,
            dtype,
            causal=mask == "causal",
            window=mask == "window",
            softcap="softcap" in some,
            alibi="alibi" in some,
            sinks="sinks" in some,
            group=group,
            seqlen_q=queries,
        )
        for pair, dtype, mask, some, group, queries in itertools.product(
            pairs, ("bf16", "fp16"), compiler.MASKS, features, (1, 8), (3, 260, 4096, 5000, 20000)
        )
    }
    assert planned <= chosen
    # the rest: packed rows of long sequences, of which only some lengths have any
    assert all(config.pack_gqa == 8 for config in chosen - planned)


def test_chosen_kernels_of_unlike_lengths_and_gradients() -> None:
    common = (
        [(64, 64), (128, 128), (192, 128)],
        ["bf16"],
        compiler.MASKS,
        [frozenset[str](), frozenset({"sinks"})],
        [1, 8],
    )
    dense = compiler._chosen16(*common)
    more = compiler._chosen16(*common, True, True)
    assert set(dense) <= set(more) and len(set(more)) == len(more)
    for pair, mask in itertools.product(common[0], compiler.MASKS):
        options = {} if mask == "full" else {mask: True}
        for group, queries in itertools.product((1, 8), (3, 5000)):
            assert (
                plan16.forward16_config(*pair, "bf16", **options, group=group, seqlen_q=queries, varlen=True)
                in more
            )
        for unlike in (False, True):
            for queries in (512, 5000, 8192):
                back = plan16.backward16_config(*pair, "bf16", **options, varlen=unlike, seqlen_q=queries)
                assert back in more
    # sinks need none of their own; at head_dim 128 long sequences have another tile, and short ones persistent CTAs
    assert sum(isinstance(config, Bwd16Config) for config in more) == 21


def test_command_takes_both_precisions(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def chosen(*args: Any) -> list[Any]:
        seen.append(args)
        return [tiles.transpose_config(64)]

    monkeypatch.setattr(compiler, "_chosen", chosen)
    monkeypatch.setattr(compiler, "_chosen16", chosen)
    words = "--recipe bf16,default --head-dim 64 --dtype bf16 --mask window --features none,softcap+sinks --jobs 1"
    assert compiler.main(words.split()) == 0
    sets = [frozenset(), frozenset({"softcap", "sinks"})]
    assert seen == [
        (["default"], [(64, 64)], ["bf16"], ["window"], sets, [1]),
        ([(64, 64)], ["bf16"], ["window"], sets, [1], False, False),
    ]
    seen.clear()
    words = "--recipe bf16 --head-dim 72:40 --varlen --backward --jobs 1"
    assert compiler.main(words.split()) == 0
    assert seen == [([(72, 40)], ["bf16", "fp16"], ["full", "causal"], [frozenset()], [1], True, True)]


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("96", [(96, 96)]),
        ("64,192:128, 32", [(64, 64), (192, 128), (32, 32)]),
        (" 64 : 256 ", [(64, 256)]),
        (",".join(map(str, HEAD_DIMS)), [(d, d) for d in HEAD_DIMS]),
    ],
)
def test_command_takes_any_head_dim(
    text: str,
    pairs: list[tuple[int, int]],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def chosen(*args: Any) -> list[Any]:
        seen.extend(args)
        return [tiles.transpose_config(64)]

    monkeypatch.setattr(compiler, "_chosen", chosen)
    assert compiler.main(["--head-dim", text, "--pack-gqa", "1,8", "--jobs", "1"]) == 0
    assert seen == [["default"], pairs, ["bf16", "fp16"], ["full", "causal"], [frozenset()], [1, 8]]


def test_command_for_other_gpus(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fill(configs: list[Any], jobs: int) -> list[Any]:
        seen.extend(configs)
        return []

    monkeypatch.setattr(compiler, "fill_cache", fill)
    words = "--arch sm_86 --head-dim 64,192:128 --dtype bf16 --mask causal,window --pack-gqa 1,4 --varlen --backward"
    assert compiler.main(words.split()) == 0
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * (2 + 1)
    for (d, d_v), mask, varlen in itertools.product(
        ((64, 64), (192, 128)), ("causal", "window"), (False, True)
    ):
        wanted = plan_sm80.forward16_sm80_config(d, d_v, "bf16", arch="sm_86", **{mask: True}, varlen=varlen)
        assert wanted in seen and replace(wanted, pack_gqa=4) in seen
        assert backward16_sm80_config(d, d_v, "bf16", arch="sm_86", **{mask: True}, varlen=varlen) in seen


def test_command_says_what_failed(
    cache_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impossible = FwdConfig(64, 64, 128, 192, 2, "e4m3", "code", False, "bf16")
    monkeypatch.setattr(compiler, "_chosen", lambda *args: [impossible])
    assert compiler.main(["--jobs", "1"]) == 1
    text = capfd.readouterr().out
    assert "FAILED: ValueError: tile_n must be a multiple of 64" in text and "0 of 1 kernels" in text


def test_command_without_a_cache_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUTE_ATTN_DISABLE_DISK_CACHE", "1")
    assert compiler.main([]) == 1
    assert "the disk cache is off" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (["--arch", "sm_75"], "sm_75"),
        (["--arch", "sm_80", "--recipe", "bf16,fp8"], "argument --recipe: sm_80 has 16-bit kernels alone"),
        (["--recipe", "fast"], "'fast' is not among bf16, naive, paper, fp8, accurate, default"),
        (
            ["--head-dim", "64,100"],
            "'100' is no multiple of 8 from 32 to 256, nor two of them as HEAD_DIM:HEAD",
        ),
        (["--head-dim", "192:100"], "'192:100' is no multiple of 8 from 32 to 256"),
        (["--head-dim", "192:128:64"], "'192:128:64' is no multiple of 8"),
        (["--head-dim", "64,"], "'' is no multiple of 8"),
        (["--head-dim", "64,128:72"], "recipes of 8 bits take multiples of 16, got 128:72"),
        (["--mask", "full,block"], "'block' is not among full, causal, window"),
        (["--features", "softcap+bias"], "'softcap+bias' is neither none nor some of softcap, alibi, sinks"),
        (["--pack-gqa", "3"], "3 is not among 1, 2, 4, 8, 16, 32, 64"),
        (["--dtype", "bf16,fp8"], "'fp8' is not among bf16, fp16"),
        (["--varlen"], "argument --varlen: only 16-bit kernels; name bf16 in --recipe"),
        (["--backward", "--recipe", "fp8"], "argument --backward: only 16-bit kernels"),
        (["--jobs", "0"], "must be at least 1, got 0"),
    ],
)
def test_command_refuses(argument: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compiler.main(argument)
    assert caught.value.code == 2
    assert message in capfd.readouterr().err
