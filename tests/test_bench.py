"""The benchmark, as far as it needs no GPU: command line, cases, timing, records, reports, figures."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gc
import itertools
import json
import math
import operator
import os
import shutil
import signal
import subprocess
import sys
import types
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_attn import decode as cute_attn_decode
from cute_attn import flash, reference
from cute_attn.bench import __main__ as cli
from cute_attn.bench import cases, decode, figures, lengths, overhead, peers, record, report, timing
from cute_attn.kernels.config import DecodeConfig, FwdConfig, QuantizeConfig
from cute_attn.plan16 import forward16_config

CASE = cases.Case(batch=2, seqlen_q=200, seqlen_k=200, heads_q=4, heads_k=2, head_dim=64, causal=True)
FWD = FwdConfig(128, 128, 128, 256, 2, "e4m3", "code", True, "bf16")
QUANTIZE = QuantizeConfig(128, 128, "bf16", "e4m3", "token", "block64", "block", rotate=True, smooth=True)


def meta(**git: Any) -> dict[str, Any]:
    state = {"commit": None, "dirty": None, "kernels": None, "cute_attn": None} | git
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "gpu": None,
        "driver": None,
        "cuda": None,
        "torch": "2.13.0",
        "cutlass_dsl": "4.8.1",
        "command": "python -m cute_attn.bench",
        "git": state,
    }


def timed_row(provider: str, speed: float, **fields: Any) -> dict[str, Any]:
    """A forward row of CASE with the given TFLOP/s."""
    ours = provider == peers.OURS
    ms = CASE.flops / speed / 1e9
    base = {
        "provider": provider,
        "kernel": f"{provider}_kernel",
        "backend": "sm90",
        "phase": "forward",
        "dtype": "fp8",
        "recipe": "accurate" if ours else None,
        **CASE.fields,
        "ms": ms,
        "ms_min": ms * 0.9,
        "ms_max": ms * 1.1,
        "tflops": speed,
        "peak_bytes": 2**20,
        "rel_rmse": 0.02,
    }
    return record.make_row(**(base | fields))


# --- command line


def test_parser_defaults_are_the_papers_grid() -> None:
    options = cli.build_parser().parse_args([])
    run = cli.Run(options, None, None)
    cells = run.cells()
    assert len(cells) == 6 * 3 * 2
    assert {case.batch * case.seqlen_q for case in cells} == {16384}
    assert {case.heads_q * case.head_dim for case in cells} == {2048}
    assert {(case.seqlen_k, case.batch) for case in cells} >= {(512, 32), (16384, 1)}
    assert [c.label for c in run.contenders()] == [
        "cute_attn accurate",  # the name behind "default"
        "fa3 fp8",
        "cudnn fp8",
        "fa3 bf16",
        "sdpa_flash bf16",
    ]


def test_parser_overrides() -> None:
    words = "--seqlen 100,300 --head-dim 64 --causal 1 --batch 3 --heads 6 --heads-k 2"
    cells = cli.Run(cli.build_parser().parse_args(words.split()), None, None).cells()
    assert cells == [cases.Case(3, n, n, 6, 2, 64, True) for n in (100, 300)]


def test_any_head_dim_fills_the_hidden_size() -> None:
    """As many heads as fit: 2048 columns are 25 heads of 80."""
    words = "--head-dim 32,48,80,96,240 --seqlen 512 --causal 0"
    cells = cli.Run(cli.build_parser().parse_args(words.split()), None, None).cells()
    assert [(case.head_dim, case.heads_q) for case in cells] == [
        (32, 64),
        (48, 42),
        (80, 25),
        (96, 21),
        (240, 8),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dtype int4", "--dtype"),
        ("--seqlen 0", "at least 1"),
        ("--seqlen 128,x", "got 'x'"),
        ("--head-dim 100", "a multiple of 16 from 32 to 256, got 100"),
        ("--head-dim 64,272", "a multiple of 16 from 32 to 256, got 272"),
        ("--causal 2", "--causal"),
        ("--providers fa3,nobody", "unknown 'nobody'; choose from"),
        ("--providers fa3,fa3", "names something twice"),
        ("--phase sideways", "unknown 'sideways'"),
        ("--phase backward", "phase backward times 16-bit kernels, not dtype fp8"),
        ("--dtype bf16 --phase train --providers cudnn", "nothing to time for cudnn"),
        ("--phase prefill", "phase prefill times 16-bit kernels, not dtype fp8"),
        ("--dtype bf16 --phase prefill --providers sdpa_math", "nothing to time for sdpa_math"),
        ("--report everything", "--report"),
        ("--json /no/such/folder/x.json", "cannot write"),
        ("--recipe magic", "magic"),
        ("--recipe default,accurate", "one recipe twice"),
        ("--min-batch-ms 0", "must be positive"),
        ("--tensors /no/such.safetensors", "no file /no/such.safetensors"),
        ("--hidden 100", "hidden must be at least head_dim, got hidden 100 and head_dim 128"),
        ("--heads 6 --heads-k 4", "heads_k must divide"),
        ("--dtype bf16 --providers cudnn,fa3", "nothing to time for cudnn"),
        ("--backend sm70", "invalid choice: 'sm70'"),
        ("--backend sm80", "backend sm80 has 16-bit kernels, not dtype fp8"),
        ("--backend sm80 --dtype bf16 --report memory", "argument --backend: sm80 has no report memory"),
    ],
)
def test_bad_command_lines_name_the_option(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["speed", "overhead"])
def test_timing_without_hopper_is_an_error(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (False, "no CUDA GPU is visible to torch"))
    with pytest.raises(SystemExit):
        cli.main(["--report", name])
    assert f"--report {name} needs a Hopper GPU" in capsys.readouterr().err


def test_the_mma_sync_kernel_is_timed_where_it_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--dtype", "bf16", "--backend", "sm80", "--providers", "cute_attn,sdpa_flash"]
    monkeypatch.setattr(cli, "_device", lambda: (None, "no CUDA GPU is visible to torch"))
    with pytest.raises(SystemExit):
        cli.main(words)
    assert "needs a GPU of compute capability 8.0 to 8.9, 9.x or 12.x: no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(cli, "_device", lambda: ((8, 6), "a GPU of this test"))
    seen = set()

    def time_cell(case: cases.Case, group: list[peers.Contender], **options: Any) -> list[dict[str, Any]]:
        seen.update((each.provider, each.dtype, each.backend) for each in group)
        return []

    monkeypatch.setattr(timing, "time_cell", time_cell)
    assert cli.main(words) == 0
    assert seen == {("cute_attn", "bf16", "sm80"), ("sdpa_flash", "bf16", peers.BACKEND)}


def test_the_backend_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def name(*tensors: Any, backend: str, **options: Any) -> str:
        asked.append(backend)
        return "kernel"

    monkeypatch.setattr("cute_attn.flash.flash_attn_kernel", name)
    monkeypatch.setattr("cute_attn.decode_kernel", name)
    for phase, backend in itertools.product(("forward", "decode"), (None, "sm80")):
        [contender] = peers.contenders("bf16", [phase], [], ["cute_attn"], backend)
        q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
        assert peers.prepare(contender, cases.Case(1, 8, 8, 2, 2, 64, False), q, q, q).backend == asked[-1]
    assert asked == ["sm90", "sm80"] * 2


# --- cases


def test_flops_follow_the_papers() -> None:
    full = cases.Case(1, 16384, 16384, 16, 16, 128, False)
    assert full.flops == 4 * 16384**2 * 128 * 16
    assert cases.Case(1, 16384, 16384, 16, 16, 128, True).flops == full.flops / 2
    assert full.score_bytes == 4 * 16 * 16384**2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (90, 333), (300, 40), (1, 1)])
def test_sampled_rows_equal_the_reference(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    case = cases.Case(2, seqlen_q, seqlen_k, 4, 2, 64, causal)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cpu")
    found = cases.sample(q, k, v, causal=causal)
    exact, _ = reference.attention(q, k, v, causal=causal)
    assert {0, seqlen_q - 1} <= set(found.rows.tolist())
    assert {(0, 0), (1, 3)} <= set(found.heads)
    for values, (b, h) in zip(found.values, found.heads, strict=True):
        torch.testing.assert_close(values, exact[b, found.rows, h], rtol=1e-10, atol=1e-12)
    error = cases.output_error(exact.float(), found)
    assert error.finite and error.worst_row < 1e-6 and error.rel_rmse < 1e-6


def test_output_error_sees_one_bad_row_and_any_nan() -> None:
    q, k, v = cases.make_inputs(CASE, torch.bfloat16, "cpu")
    found = cases.sample(q, k, v, causal=True)
    exact, _ = reference.attention(q, k, v, causal=True)
    bad = exact.float()
    bad[0, 199, 0] = 0
    error = cases.output_error(bad, found)
    assert error.worst_row == pytest.approx(1)
    assert error.rel_rmse < 0.1  # which is why the verdict is not left to the mean
    unseen = next(row for row in range(200) if row not in found.rows)
    bad = exact.float()
    bad[1, unseen, 2, 5] = math.nan
    assert not cases.output_error(bad, found).finite
    rounded = exact.float().to(torch.float8_e4m3fn)
    assert 0.01 < cases.output_error(rounded, found).rel_rmse < 0.05


# --- timing


def test_interleaved_rotates_and_takes_the_median() -> None:
    calls: list[tuple[str, int, int]] = []
    durations = {"a": [1.0, 1.0, 9.0, 2.0], "b": [4.0, 4.0, 5.0, 4.0]}  # the first is the estimate
    left = {key: iter(values) for key, values in durations.items()}

    def time_batch(launch: Any, count: int, untimed: int) -> float:
        key = launch()
        calls.append((key, count, untimed))
        return next(left[key]) * count

    found = timing.interleaved(
        {"a": lambda: "a", "b": lambda: "b"},
        rounds=3,
        min_batch_ms=8.0,
        settle_ms=40.0,
        time_batch=time_batch,
    )
    a, b = ("a", 8, 40), ("b", 2, 10)
    assert calls == [("a", 2, 1), ("b", 2, 1), a, b, b, a, a, b]
    assert found["a"] == timing.Timing(2.0, 1.0, 9.0, launches=8, times=(1.0, 9.0, 2.0))
    assert found["b"] == timing.Timing(4.0, 4.0, 5.0, launches=2, times=(4.0, 5.0, 4.0))
    assert found["a"].rounds == 3


def test_interleaved_goes_on_without_who_fails() -> None:
    left = iter([1.0, 1.0])

    def flaky() -> float:
        try:
            return next(left)
        except StopIteration:
            raise RuntimeError("third time unlucky") from None

    failures: list[tuple[str, str]] = []
    found = timing.interleaved(
        {"good": lambda: 1.0, "flaky": flaky},
        rounds=4,
        min_batch_ms=1.0,
        time_batch=lambda launch, count, untimed: launch() * count,
        on_failure=lambda key, error: failures.append((key, str(error))),
    )
    assert list(found) == ["good"] and found["good"].rounds == 4
    assert failures == [("flaky", "third time unlucky")]
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        timing.interleaved({}, rounds=0, min_batch_ms=1.0)
    with pytest.raises(ValueError, match="settle_ms not negative, got 1, 1\\.0 and -1"):
        timing.interleaved({}, rounds=1, min_batch_ms=1.0, settle_ms=-1.0)


def test_time_cell_gives_every_contender_a_row() -> None:
    names = ["right", "wrong", "nan", "absent", "broken", "flaky"]
    group = [peers.Contender(name, "fp8", "forward") for name in names]

    def prepare(contender: Any, case: Any, q: Any, k: Any, v: Any) -> peers.Prepared:
        out, _ = reference.attention(q, k, v, causal=case.causal)
        if contender.provider == "wrong":
            out = reference.attention(q, k, v, causal=False)[0]
        elif contender.provider == "nan":
            out[0, 0, 0, 0] = math.nan
        elif contender.provider == "absent":
            raise peers.NotRun("unavailable", "cannot import absent")
        elif contender.provider == "broken":
            raise RuntimeError("no kernel\nfor this shape")
        return peers.Prepared(lambda: out, f"{contender.provider} 1.0", "sm90", cases.output_error, 4_000_000)

    def time_batch(launch: Any, count: int, untimed: int) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:  # the second to be timed is the flaky one
            raise RuntimeError("launch failed")
        return 2.0 * count

    calls = 0
    rows = timing.time_cell(CASE, group, rounds=3, device="cpu", prepare=prepare, time_batch=time_batch)
    assert [row["provider"] for row in rows] == names
    by_name = {row["provider"]: row for row in rows}
    assert by_name["right"]["status"] == "ok" and by_name["right"]["ms"] == 2.0
    assert by_name["right"]["ms_of_rounds"] == "2 2 2"
    assert by_name["right"]["tflops"] == pytest.approx(CASE.flops / 2e9)
    assert by_name["right"]["tbps"] == pytest.approx(0.002)
    assert by_name["right"]["kernel"] == "right 1.0" and by_name["right"]["rel_rmse"] < 1e-6
    assert by_name["wrong"]["status"] == "wrong" and "worst sampled row" in by_name["wrong"]["reason"]
    assert by_name["nan"]["status"] == "wrong" and "NaN" in by_name["nan"]["reason"]
    assert (by_name["absent"]["status"], by_name["absent"]["reason"]) == (
        "unavailable",
        "cannot import absent",
    )
    assert by_name["broken"]["reason"] == "RuntimeError: no kernel for this shape"
    assert (by_name["flaky"]["status"], by_name["flaky"]["ms"]) == ("failed", None)
    record.validate(meta(), rows)


def test_a_lost_device_stops_the_run_and_keeps_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    group = [peers.Contender(name, "fp8", "forward") for name in ("first", "second")]

    def prepare(*_: Any) -> peers.Prepared:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def lost(device: torch.device) -> None:
        raise timing.DeviceLost("CUDA error")

    monkeypatch.setattr(timing, "_synchronize", lost)
    with pytest.raises(timing.DeviceLost) as stop:
        timing.time_cell(CASE, group, rounds=1, device="cpu", prepare=prepare)
    assert [row["status"] for row in stop.value.rows] == ["failed", "failed"]
    assert "illegal memory access" in stop.value.rows[0]["reason"]
    assert "lost in first fp8" in stop.value.rows[1]["reason"]
    record.validate(meta(), stop.value.rows)


# --- peers


def test_contenders_by_dtype_and_phase() -> None:
    def labels(dtype: str, phase: str, *providers: str) -> list[str]:
        return [c.label for c in peers.contenders(dtype, [phase], ["fp8", "accurate"], providers or None)]

    assert labels("fp8", "quantize") == ["cute_attn fp8", "cute_attn accurate", "copy fp8"]
    whole = labels("fp8", "whole_call")
    assert whole[:2] == ["cute_attn fp8", "cute_attn accurate"] and "fa3 fp8" not in whole
    assert {"fa3 bf16", "fa4 bf16", "sdpa_cudnn bf16"} <= set(whole)
    assert labels("fp8", "forward", "fa4", "cudnn") == ["cudnn fp8", "fa4 bf16"]
    sixteen = labels("fp16", "forward")
    assert sixteen and all(label.endswith(" fp16") for label in sixteen)
    assert labels("bf16", "forward", "fa3", "cute_attn") == ["fa3 bf16", "cute_attn bf16"]
    assert labels("bf16", "whole_call", "cute_attn") == ["cute_attn bf16"]
    assert labels("fp8", "decode") == [
        "cute_attn fp8",
        "fa3 fp8",
        "flashinfer fp8",
        "copy fp8",
        "copy_cache fp8",
        "fa3 bf16",
        "flashinfer bf16",
        "sdpa_flash bf16",
        "sdpa_cudnn bf16",
    ]
    assert labels("bf16", "decode")[0] == "cute_attn bf16" and labels("bf16", "decode")[-2:] == [
        "copy bf16",
        "copy_cache bf16",
    ]
    with pytest.raises(
        ValueError, match="nothing to time for a default provider with dtype bf16 in phase quantize"
    ):
        labels("bf16", "quantize")
    with pytest.raises(ValueError, match="unknown provider nobody"):
        labels("fp8", "forward", "nobody")
    with pytest.raises(ValueError, match="nothing to time for copy"):
        labels("fp8", "forward", "fa3", "copy")


@pytest.mark.parametrize(
    ("provider", "dtype", "module"),
    [
        ("fa3", "fp8", "flash_attn_interface"),
        ("fa3", "bf16", "flash_attn_interface"),
        ("fa4", "bf16", "flash_attn.cute"),
        ("cudnn", "fp8", "cudnn"),
    ],
)
def test_an_absent_peer_is_a_row_with_the_reason(
    provider: str, dtype: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises, installed or not
    peers._import.cache_clear()
    rows = timing.time_cell(CASE, [peers.Contender(provider, dtype, "forward")], rounds=1, device="cpu")
    peers._import.cache_clear()
    assert rows[0]["status"] == "unavailable" and rows[0]["ms"] is None
    assert f"cannot import {module}" in rows[0]["reason"]


def test_unfused_attention_is_skipped_where_s_is_too_big() -> None:
    big = cases.Case(1, 16384, 16384, 32, 32, 64, False)
    small = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(peers.NotRun, match=r"S would take 32\.0 GiB") as stop:
        peers.prepare(peers.Contender("sdpa_math", "bf16", "forward"), big, small, small, small)
    assert stop.value.status == "skipped"


def test_sdpa_math_runs_and_is_right() -> None:
    contender = peers.Contender("sdpa_math", "bf16", "forward")
    rows = timing.time_cell(
        CASE, [contender], rounds=1, device="cpu", time_batch=lambda launch, count, untimed: 1.0 * count
    )
    assert rows[0]["status"] == "ok" and rows[0]["rel_rmse"] < 0.01
    assert torch.__version__ in rows[0]["kernel"]


@pytest.mark.parametrize("phase", ["forward", "quantize", "whole_call"])
def test_our_contender_runs_what_the_plan_says(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BACKEND", "emulator")  # the same calls as on the GPU, but for this
    contender = peers.Contender(peers.OURS, "fp8", phase, "accurate")
    rows = timing.time_cell(
        CASE, [contender], rounds=1, device="cpu", time_batch=lambda launch, count, untimed: 1.0 * count
    )
    row = rows[0]
    record.validate(meta(), rows)
    assert (row["status"], row["backend"], row["recipe"]) == ("ok", "emulator", "accurate"), row["reason"]
    assert 0.001 < row["rel_rmse"] < 0.05
    assert ("fwd_sm90_int8_d64_causal" in row["kernel"]) == (phase != "quantize")
    assert ("quantize_bf16_int8_d64" in row["kernel"]) == (phase != "forward")
    if phase == "quantize":
        # 16 bits read and 8 written for each element, then scales: token, 64 keys, 256 keys; q . mean
        elements = 2 * 200 * 64 * 4 + 2 * 2 * 200 * 64 * 2
        padding = 2 * 2 * 64 * 8  # V^T is padded from 200 to 208 keys
        scales = 4 * (2 * 2 * 4 * 200 + 2 * 2 * 4 + 2 * 2 * 1)
        assert row["tbps"] == pytest.approx((3 * elements + padding + scales) / 1e9)
        assert row["tflops"] is None
    else:
        assert row["tflops"] == pytest.approx(CASE.flops / 1e9)


# --- sequences of unlike length, sliding windows


def test_the_mix_of_lengths() -> None:
    found = cases.mixed_lengths()
    assert found == cases.mixed_lengths() != cases.mixed_lengths(seed=1)
    assert sum(found) == 65536 and found[:3] == (5573, 3060, 295)  # the same on every machine
    assert max(found) <= 16384 and all(length >= 16 for length in found[:-1])
    many = cases.mixed_lengths(tokens=10_000_000)
    halves = sum(length < 512 for length in many) / len(many)  # 512 is the middle of the logarithms
    assert 0.46 < halves < 0.54


def test_prefill_cells() -> None:
    found = cases.prefill(head_dims=[64, 128])
    kinds = [(case.head_dim, case.causal, case.window, len(case.lengths) > 0) for case in found]
    assert kinds == [
        (d, causal, window, mixed)
        for d in (64, 128)
        for causal, window, mixed in (
            (False, (-1, -1), True),
            (True, (-1, -1), True),
            (True, (1024, 0), False),
            (True, (-1, -1), False),
            (True, (-1, -1), False),
        )
    ]
    cached = [case for case in found if case.over_cache]
    assert [
        (case.seqlen_q, case.seqlen_k, case.heads_q, case.heads_k, case.page_size) for case in cached[:2]
    ] == [(4096, 32768, 64, 8, pages) for pages in (None, 64)]
    mix, window = found[0], found[2]
    assert mix.fields["tokens"] == 65536 and mix.seqlen_q == mix.seqlen_k == max(mix.lengths)
    assert mix.batch == len(mix.lengths) and mix.heads_q * mix.head_dim == 2048
    assert mix.flops == 4 * 2048 * sum(n * n for n in mix.lengths) == 2 * found[1].flops
    assert (window.seqlen_q, window.batch) == (16384, 1)
    assert window.flops == 4 * 2048 * sum(min(i + 1, 1025) for i in range(16384))
    assert window.fields["window_left"] == 1024 and "window_left" not in mix.fields
    assert len({str(case) for case in found}) == len(found)


MIX = cases.Case(3, 200, 200, 4, 2, 64, True, lengths=(130, 1, 200))
WINDOWED = dataclasses.replace(CASE, window=(50, 0))


@pytest.mark.parametrize("case", [MIX, dataclasses.replace(MIX, causal=False), WINDOWED], ids=str)
def test_sampled_rows_of_prefill_equal_the_reference(case: cases.Case) -> None:
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cpu")
    found = cases.sample(q, k, v, causal=case.causal, window=case.window, lengths=case.lengths)
    out = exact_prefill(case, q, k, v)
    error = cases.output_error(out.float(), found)
    assert error.finite and error.worst_row < 1e-6
    if case.lengths:
        assert {0, 129, 130, 131, 330} <= set(found.rows.tolist()) and out.shape == (331, 4, 64)
    wrong = exact_prefill(dataclasses.replace(case, causal=not case.causal, window=(-1, -1)), q, k, v)
    assert cases.output_error(wrong.float(), found).worst_row > 0.5


def exact_prefill(case: cases.Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in float64, each sequence by itself."""
    options = {"softmax_scale": 1 / math.sqrt(case.head_dim), "dtype": torch.float64}
    window = (case.window[0], 0 if case.causal else case.window[1])
    if not case.lengths:
        return flash.reference(q, k, v, window=window, **options)[0]
    parts = zip(*(x.split(case.lengths) for x in (q, k, v)), strict=True)
    outs = [flash.reference(*(x[None] for x in part), window=window, **options)[0][0] for part in parts]
    return torch.cat(outs)


class FakeLibrary:
    """A module with the functions of FA3 or FA4 that notes how it was called."""

    def __init__(self, case: cases.Case):
        self.case = case
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def flash_attn_func(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        self.calls.append(("flash_attn_func", options))
        return exact_prefill(self.case, q, k, v).to(q.dtype), None

    def flash_attn_varlen_func(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> Any:
        self.calls.append(("flash_attn_varlen_func", options))
        return exact_prefill(self.case, q, k, v).to(q.dtype)

    def flash_attn_varlen_kernel(self, *args: Any, **options: Any) -> str:
        return "kernel"


@pytest.mark.parametrize("case", [MIX, WINDOWED], ids=str)
@pytest.mark.parametrize("provider", ["cute_attn", "fa3", "fa4"])
def test_prefill_calls(provider: str, case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary(case)
    monkeypatch.setattr(peers, "need", lambda module: library)
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_varlen_kernel"):
        monkeypatch.setattr(f"cute_attn.{name}", getattr(library, name), raising=False)
    monkeypatch.setattr(
        flash, "flash_attn_func", lambda *qkv, **more: library.flash_attn_func(*qkv, **more)[0]
    )
    monkeypatch.setattr(flash, "flash_attn_kernel", library.flash_attn_varlen_kernel)
    rows = timing.time_cell(
        case,
        [peers.Contender(provider, "bf16", "prefill")],
        rounds=1,
        device="cpu",
        time_batch=lambda launch, count, untimed: 1.0 * count,
    )
    record.validate(meta(), rows)
    assert rows[0]["status"] == "ok", rows[0]["reason"]
    assert rows[0]["rel_rmse"] < 0.01 and rows[0]["tflops"] == pytest.approx(case.flops / 1e9)
    name, options = library.calls[-1]
    assert options["causal"] is True
    if case.lengths:
        assert name == "flash_attn_varlen_func" and rows[0]["tokens"] == 331
        assert options["cu_seqlens_q"].tolist() == options["cu_seqlens_k"].tolist() == [0, 130, 131, 331]
        assert options["cu_seqlens_q"].dtype == torch.int32
        assert options["max_seqlen_q"] == options["max_seqlen_k"] == 200
    else:
        assert name == "flash_attn_func" and options["window_size"] == (50, 0)
        assert rows[0]["window_left"] == 50


def test_a_missing_function_of_ours_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("cute_attn.flash_attn_varlen_func", raising=False)
    monkeypatch.setattr("cute_attn._HOME", {})
    rows = timing.time_cell(MIX, [peers.Contender("cute_attn", "bf16", "prefill")], rounds=1, device="cpu")
    assert rows[0]["status"] == "unavailable" and "unlike length" in rows[0]["reason"]


# --- phase decode


def test_decode_cells() -> None:
    found = decode.cells()
    assert {case.seqlen_q for case in found} == {1} and {case.causal for case in found} == {False}
    assert {(case.heads_q, case.heads_k, case.head_dim) for case in found} == {
        (*heads, dim) for heads in ((64, 8), (32, 32)) for dim in (64, 128, 256)
    }
    shapes = [(1, 1024), (16, 1024), (128, 1024), (1, 8192), (16, 8192), (128, 8192), (1, 131072)]
    assert [(case.batch, case.seqlen_k) for case in found[:7]] == shapes and len(found) == 7 * 6
    paged = decode.cells(seqlens=[1024], head_dims=[64], heads_k=8, page_sizes=(16, 256))
    assert [(case.page_size, case.batch) for case in paged] == [
        (n, b) for n in (16, 256) for b in (1, 16, 128)
    ]
    with pytest.raises(ValueError, match="page_size must divide the seqlen, 1024, got 100"):
        decode.cells(seqlens=[1024], page_sizes=(100,))
    with pytest.raises(ValueError, match="tokens must be at least the seqlen, 1024, got 1000"):
        decode.cells(tokens=1000)
    assert decode.cells(seqlens=[100], head_dims=[64], batch=3, heads=6) == [
        cases.Case(3, 1, 100, 6, 6, 64, False)
    ]
    with pytest.raises(ValueError, match="heads_k must divide the 6 heads"):
        decode.cells(heads=6, heads_k=4)


class FakeCaches:
    """FA3's function, ours, and FlashInfer's wrapper, by the reference; it notes how it was called."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def flash_attn_with_kvcache(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        self.options.append(options)
        kept = {
            {"page_table": "block_table"}.get(name, name): x
            for name, x in options.items()
            if name not in ("num_splits", "backend", "causal")
        }
        kept["window"] = (-1, 0 if options.get("causal") else -1)
        scale = 1 / math.sqrt(q.shape[3])
        return cute_attn_decode.reference(q, k, v, softmax_scale=scale, **kept)[0].to(torch.bfloat16)

    def BatchDecodeWithPagedKVCacheWrapper(
        self, workspace: torch.Tensor, layout: str, **options: Any
    ) -> FakeCaches:
        assert workspace.dtype == torch.uint8 and not workspace.any() and layout == "NHD"
        assert options["use_cuda_graph"] and options["use_tensor_cores"]
        buffers = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        self.buffers = [options[name] for name in buffers]
        return self

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        given = (indptr, indices, last_page_len)
        assert [x.shape for x in given] == [x.shape for x in self.buffers]
        assert {x.dtype for x in given} == {torch.int32}
        pages = int(indptr[1])
        assert indptr.tolist() == [pages * b for b in range(len(indptr))]
        lengths = (pages - 1) * page_size + last_page_len
        self.planned = {"cache_seqlens": lengths, "block_table": indices.view(-1, pages)}
        self.shape = (page_size, num_kv_heads, head_dim)
        self.dtypes, self.heads = (q_data_type, kv_data_type), num_qo_heads

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.shape[1] == self.heads and self.dtypes == (q.dtype, caches[0].dtype)
        assert all(x.shape[1:] == self.shape for x in caches)
        return self.flash_attn_with_kvcache(q.unsqueeze(1), *caches, **self.planned).squeeze(1)


@pytest.mark.parametrize("page_size", [None, 50], ids=["contiguous", "pages"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("provider", ["cute_attn", "fa3", "flashinfer", "copy", "copy_cache", "sdpa_math"])
def test_decode_calls(
    provider: str, dtype: str, page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases.Case(3, 1, 200, 8, 2, 64, False, page_size=page_size)
    library = FakeCaches()
    monkeypatch.setattr(peers, "need", lambda module: library)
    monkeypatch.setattr("cute_attn.flash_attn_with_kvcache", library.flash_attn_with_kvcache, raising=False)
    monkeypatch.setattr("cute_attn.decode_kernel", lambda *args, **options: "kernel", raising=False)
    rows = timing.time_cell(
        case,
        [peers.Contender(provider, "bf16" if provider == "sdpa_math" else dtype, "decode")],
        rounds=1,
        device="cpu",
        time_batch=lambda launch, count, untimed: 1.0 * count,
    )
    record.validate(meta(), rows)
    if provider == "sdpa_math" and page_size is not None:
        assert rows[0]["status"] == "skipped" and "no pages" in rows[0]["reason"]
        return
    assert rows[0]["status"] == "ok", rows[0]["reason"]
    assert rows[0].get("page_size") == page_size
    if provider == "copy":
        assert rows[0]["tflops"] is None and rows[0]["tbps"] == pytest.approx(2 * 1024 / 1e9)
        return
    ours = provider == "cute_attn"
    keys = 2 * 3 * 200 * 2  # of K and of V, in all heads
    scales = 4 * (provider in ("cute_attn", "copy_cache"))
    expected = keys * (64 * 2 if rows[0]["dtype"] == "bf16" else 64 + scales)
    assert rows[0]["tbps"] == pytest.approx(expected / 1e9)
    if provider == "copy_cache":
        assert rows[0]["tflops"] is None
        return
    assert rows[0]["rel_rmse"] < (0.01 if rows[0]["dtype"] == "bf16" else 0.1)
    if provider == "sdpa_math":
        return
    options = library.options[-1]
    assert options["cache_seqlens"].tolist() == [200] * 3 and options["cache_seqlens"].dtype == torch.int32
    assert options.get("num_splits") == (0 if provider == "fa3" else None)
    assert options.get("backend") == ("sm90" if ours else None)
    table = options.get("page_table" if provider == "fa3" else "block_table")
    assert (table is not None) == (page_size is not None or provider == "flashinfer")
    if dtype == "fp8" and ours:
        shape = (3, 200, 2) if page_size is None else (12, 50, 2)
        assert options["k_descale"].shape == shape and options["k_descale"].stride(1) == 1
    if dtype == "fp8" and provider == "fa3":
        assert options["q_descale"].shape == (3, 2)


@pytest.mark.parametrize("page_size", [None, 50], ids=["contiguous", "pages"])
def test_many_queries_over_a_cache(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FA4 has keys without a cache, and no pages."""
    case = cases.Case(1, 70, 200, 8, 2, 64, True, page_size=page_size)
    assert case.flops == 4 * 64 * 8 * sum(range(131, 201))
    library = FakeCaches()
    monkeypatch.setattr(peers, "need", lambda module: library)
    monkeypatch.setattr("cute_attn.flash_attn_with_kvcache", library.flash_attn_with_kvcache, raising=False)
    monkeypatch.setattr("cute_attn.decode_kernel", lambda *args, **options: "kernel", raising=False)
    group = [peers.Contender(name, "bf16", "prefill") for name in ("cute_attn", "fa3", "fa4")]
    rows = timing.time_cell(
        case, group, rounds=1, device="cpu", time_batch=lambda launch, count, untimed: 1.0 * count
    )
    record.validate(meta(), rows)
    for row in rows[:2]:
        assert row["status"] == "ok" and row["rel_rmse"] < 0.01, row["reason"]
    if page_size is not None:
        assert rows[2]["status"] == "skipped" and "without pages" in rows[2]["reason"]


def test_a_graph_of_several_calls_counts_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = peers.Prepared(lambda: torch.zeros(1), "kernel", "sm90", None, 12, graph_calls=3)
    rows = timing.time_cell(
        CASE,
        [peers.Contender("cute_attn", "bf16", "decode")],
        rounds=2,
        device="cpu",
        prepare=lambda *args: ready,
        time_batch=lambda launch, count, untimed: 6.0 * count,
    )
    assert rows[0]["ms"] == 2.0 and rows[0]["tbps"] == 12 / 2.0 / 1e9
    assert rows[0]["launches"] % 3 == 0 and rows[0]["peak_bytes"] is None


def test_what_a_graph_reads_lives_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds addresses, and no tensor."""

    class Graph:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    caches = [torch.ones(2), torch.full((2,), 3.0)]
    read = [weakref.ref(x) for x in caches]
    launch = decode._Graph([functools.partial(torch.neg, x) for x in caches])
    del caches
    gc.collect()
    assert launch().tolist() == [-1, -1] and all(x() is not None for x in read)
    del launch
    gc.collect()
    assert all(x() is None for x in read)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_decode_kernels_are_those_of_the_calls(
    monkeypatch: pytest.MonkeyPatch, dtype: str, page_size: int | None
) -> None:
    monkeypatch.setattr(cute_attn_decode.kv, "target", lambda *_: "sm_90a")
    monkeypatch.setattr(cute_attn_decode, "_sms", lambda _: 132)
    monkeypatch.setattr(cute_attn_decode, "_plans", type(cute_attn_decode._plans)())
    contender = peers.Contender("cute_attn", dtype, "decode")
    for case in decode.cells(
        seqlens=[64], head_dims=[64, 256], batch=2, page_sizes=[page_size], heads=8, heads_k=1
    ):
        q, k, v = cases.make_inputs(case, torch.bfloat16, "cpu")
        names = [config.name for config in decode.kernels([case], [dtype])]
        assert decode.prepare(contender, case, q, k, v).kernel in names
        if page_size:
            assert len(names) == (2 if dtype == "fp8" else 1)
        else:
            assert len(names) == {("fp8", 64): 12, ("bf16", 64): 7}.get((dtype, case.head_dim), 6)


@pytest.mark.parametrize("full", [False, True])
def test_full_caches_have_no_lengths(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    given: list[Any] = []

    def name(*tensors: Any, cache_seqlens: Any, **options: Any) -> str:
        given.append(cache_seqlens)
        return "kernel"

    monkeypatch.setattr("cute_attn.decode_kernel", name)
    fake = types.SimpleNamespace(flash_attn_with_kvcache=lambda *tensors, **options: options["cache_seqlens"])
    monkeypatch.setattr(peers, "need", lambda name: fake)
    (case,) = decode.cells(seqlens=[64], head_dims=[64], batch=2, heads=4, full=full)
    assert case.fields.get("full_caches", False) == full
    assert str(case).endswith(" without lengths") == full
    tensors = cases.make_inputs(case, torch.bfloat16, "cpu")
    peers.prepare(peers.Contender("cute_attn", "bf16", "decode"), case, *tensors)
    given.append(peers.prepare(peers.Contender("fa3", "bf16", "decode"), case, *tensors).launch())
    assert [x is None or x.tolist() for x in given] == [full or [64, 64]] * 2


def test_decode_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (True, "a GPU of this test"))

    def time_cell(case: cases.Case, group: list[peers.Contender], **_: Any) -> list[dict[str, Any]]:
        speeds = {"cute_attn": 4.0, "fa3": 3.2, "copy": 5.0, "copy_cache": 4.5}
        return [
            timed_row(
                c.provider,
                1.0,
                dtype=c.dtype,
                phase=c.phase,
                recipe=None,
                tbps=speeds.get(c.provider, 2.0),
                tflops=None if c.provider in peers.COPIES else speeds.get(c.provider, 2.0),
                **case.fields,
            )
            for c in group
        ]

    compiled: list[DecodeConfig] = []
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))  # holds none
    monkeypatch.setattr("cute_attn.compile.fill_cache", lambda todo, jobs: compiled.extend(todo) or iter(()))
    monkeypatch.setattr(timing, "time_cell", time_cell)
    path = tmp_path / "x.json"
    words = "--report speed --dtype bf16 --phase decode --seqlen 8192 --head-dim 128 --batch 16 --heads-k 8"
    assert cli.main([*words.split(), "--page-size", "64", "--json", str(path)]) == 0
    found = record.read(path).rows
    assert {row["page_size"] for row in found} == {64} and len(found) == 7
    assert [(c.head_dim, c.rows, c.paging, c.cache) for c in compiled] == [(128, 8, "block", "16bit")]
    assert "One query for each sequence against a KV cache" in capsys.readouterr().out
    speed, _, latency, _ = report.speed_grids(found)
    assert speed.lines[0][2:5] == ["1x8192, pages of 64", "16 x 64/8", "4.00"]
    assert "fa3 bf16" in speed.lines[0] and "1.25x" in speed.lines[0]  # the copy is no peer
    assert latency.headers[-2:] == ["cute_attn bf16 / copy", "cute_attn bf16 / copy_cache"]
    assert latency.lines[0][-2:] == ["0.80x", "0.89x"] and "copy_cache bf16" not in latency.headers
    said = "Nobody was given lengths: all caches are full."
    assert said not in latency.notes
    assert said in report.speed_grids([row | {"full_caches": True} for row in found])[2].notes
    with pytest.raises(SystemExit):
        cli.main(["--report", "speed", "--dtype", "bf16", "--phase", "decode", "--plot", "x.png"])


def test_prefill_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (True, "a GPU of this test"))
    seen: list[tuple[str, str]] = []

    def time_cell(case: cases.Case, group: list[peers.Contender], **_: Any) -> list[dict[str, Any]]:
        seen.append((group[0].phase, str(case)))
        return [
            timed_row(c.provider, 600.0, dtype=c.dtype, phase=c.phase, recipe=None, **case.fields)
            for c in group
        ]

    monkeypatch.setattr(timing, "time_cell", time_cell)
    path = tmp_path / "x.json"
    words = "--report speed --dtype bf16 --phase forward,prefill --seqlen 512 --causal 1 --head-dim 128"
    assert cli.main([*words.split(), "--json", str(path)]) == 0
    assert [phase for phase, _ in seen] == ["forward", *["prefill"] * 4]
    assert {row["provider"] for row in record.read(path).rows if row["phase"] == "prefill"} == {
        "cute_attn",
        "fa3",
        "fa4",
    }
    text = " ".join(capsys.readouterr().out.split())
    assert "Forward over sequences of unlike length" in text and "600" in text
    speed = report.speed_grids(record.read(path).rows)[3]
    assert [line[1:4] for line in speed.lines] == [
        ["causal", "<= 14541, 65536 in all", "22 x 16"],
        ["causal, window 1024,0", "16384", "1 x 16"],
        ["causal", "4096x32768", "1 x 64/8"],
        ["causal", "4096x32768, pages of 64", "1 x 64/8"],
    ]
    with pytest.raises(SystemExit):
        cli.main(["--report", "speed", "--dtype", "bf16", "--phase", "prefill", "--plot", "x.png"])


# --- records


def git(folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A committed tree with what makes ids hard: nesting, sorting, an executable, ignored files."""
    root = tmp_path / "repository"
    for name, text in {
        "kernels/a.py": "1\n",
        "kernels/a/b.py": "2\n",
        "kernels/a-b.py": "3\n",
        "cute_attn/api.py": "4\n",
        "cute_attn/data/x.bin": "\x00\x01",
        "cute_attn/kept.log": "ignored but tracked\n",
        ".gitignore": "__pycache__/\n*.pyc\n*.log\n",
        "other.txt": "5\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "cute_attn/api.py").chmod(0o755)
    (root / "kernels/__pycache__").mkdir()
    (root / "kernels/__pycache__/a.cpython-312.pyc").write_text("x")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "add", "-f", "cute_attn/kept.log")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_tree_ids_equal_git_of_a_clean_tree(repository: Path) -> None:
    assert record.git_state(repository) == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "dirty": False,
        "kernels": git(repository, "rev-parse", "HEAD:kernels"),
        "cute_attn": git(repository, "rev-parse", "HEAD:cute_attn"),
    }


def test_tree_ids_are_of_the_files_on_disk_and_leave_git_alone(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD:kernels")
    (repository / "kernels/a.py").write_text("changed\n")
    (repository / "kernels/new.py").write_text("new\n")
    (repository / "cute_attn/data/x.bin").unlink()

    def snapshot() -> dict[str, bytes]:
        files = (p for p in (repository / ".git").rglob("*") if p.is_file())
        return {str(p): p.read_bytes() for p in files}

    before = snapshot()
    state = record.git_state(repository)
    assert snapshot() == before
    assert state["dirty"] is True and state["kernels"] != first
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "second")
    assert state["kernels"] == git(repository, "rev-parse", "HEAD:kernels")
    assert state["cute_attn"] == git(repository, "rev-parse", "HEAD:cute_attn")


@pytest.mark.parametrize("kind", ["no history", "no commit", "inside another repository"])
def test_tree_ids_of_a_copy(repository: Path, tmp_path: Path, kind: str) -> None:
    (repository / "cute_attn/kept.log").unlink()  # an ignored file is not in a copy's tree
    git(repository, "commit", "-q", "-a", "-m", "second")
    outer = tmp_path / "outer"
    copy = outer / "copy"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git"))
    if kind == "no commit":
        git(copy, "init", "-q")
    elif kind == "inside another repository":
        git(outer, "init", "-q")
    state = record.git_state(copy)
    assert state["commit"] is None and state["dirty"] is None
    for tree in ("kernels", "cute_attn"):
        assert state[tree] == git(repository, "rev-parse", f"HEAD:{tree}")


def test_tree_ids_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {tree: git(repository, "rev-parse", f"HEAD:{tree}") for tree in ("kernels", "cute_attn")}
    monkeypatch.setattr(record.shutil, "which", lambda name: None)
    assert record.git_state(repository) == {"commit": None, "dirty": None} | expected


def test_tree_ids_of_nothing(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("commit", "dirty", "kernels", "cute_attn"))
    assert record.git_state(None) == nothing
    assert record.git_state(tmp_path) == nothing


def test_record_round_trip(tmp_path: Path) -> None:
    rows = [
        timed_row("cute_attn", 1000.0),
        timed_row("fa3", 800.0),
        record.make_row(
            provider="cudnn", phase="forward", dtype="fp8", status="unavailable", reason="not there"
        ),
        record.make_row(
            provider="cute_attn", phase="accuracy_total", dtype="fp8", rmse=0.1, rel_rmse=0.02, layer=3
        ),
    ]
    path = tmp_path / "record.json"
    record.write(path, meta(kernels="a" * 40), rows)
    found = record.read(path)
    assert found.rows == rows and found.meta == meta(kernels="a" * 40)
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
    assert set(json.loads(path.read_text())) == {"meta", "rows"}
    record.write(path, meta(), [])
    assert record.read(path).rows == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "sideways"}, "row 0: phase must be one of forward"),
        ({"dtype": "fp4"}, "dtype must be one of"),
        ({"provider": None}, "provider must not be null"),
        ({"batch": 1.5}, "batch must be int"),
        ({"batch": True}, "batch must be int"),
        ({"causal": 1}, "causal must be bool"),
        ({"tflops": math.nan}, "tflops must be finite"),
        ({"extra": [1, 2]}, "extra must be flat"),
        ({"ms": 0.0, "ms_min": 0.0}, "ms must be positive"),
        ({"ms_max": 0.0}, "ms_min <= ms <= ms_max"),
        ({"ms_min": None}, "ms_min <= ms <= ms_max"),
        ({"status": "wrong", "reason": "x"}, "must have no time"),
        ({"status": "failed", "ms": None}, "needs a reason"),
    ],
)
def test_validation_names_row_and_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    row = timed_row("cute_attn", 1000.0) | change
    with pytest.raises(ValueError, match=message):
        record.write(tmp_path / "x.json", meta(), [row])
    assert not (tmp_path / "x.json").exists()


def test_validation_of_meta_and_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="meta lacks 'gpu'"):
        record.validate({"date": "now"}, [])
    with pytest.raises(ValueError, match="tree id or null, got 'HEAD'"):
        record.validate(meta(kernels="HEAD"), [])
    with pytest.raises(ValueError, match="row 0 lacks 'kernel'"):
        record.validate(meta(), [{"provider": "fa3"}])
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json"):
        record.read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="'meta' and 'rows'"):
        record.read(path)


def test_collected_meta_is_valid() -> None:
    found = record.collect_meta("python -m cute_attn.bench")
    record.validate(found, [])
    assert found["torch"] == torch.__version__ and found["command"] == "python -m cute_attn.bench"
    assert json.loads(json.dumps(found)) == found


# --- reports


def made_up_rows() -> list[dict[str, Any]]:
    """Two cells; peers of ratio 2 and 0.5, then one that misses a cell."""
    longer = {"seqlen_q": 8192, "seqlen_k": 8192}
    return [
        timed_row("cute_attn", 1000.0),
        timed_row("fa3", 500.0),
        timed_row("fa3", 400.0, dtype="bf16"),
        timed_row("cudnn", 250.0),
        timed_row("cute_attn", 1200.0, **longer),
        timed_row("fa3", 600.0, **longer),
        timed_row("fa3", 2400.0, dtype="bf16", **longer),
        record.make_row(
            **{k: timed_row("cudnn", 1.0, **longer)[k] for k in ("provider", "phase", "dtype", *CASE.fields)},
            status="failed",
            reason="no plan",
        ),
    ]


def test_pivot_ratios_and_geometric_means() -> None:
    result = report.pivot(made_up_rows(), "forward")
    assert result.ours == ["cute_attn accurate"] and result.peers == ["fa3 fp8", "fa3 bf16", "cudnn fp8"]
    short, long = result.lines
    assert short[2] == 200 and long[2] == 8192
    assert result.best_peer(short) == ("fa3 fp8", 500.0)
    assert result.best_peer(long) == ("fa3 bf16", 2400.0)
    assert [result.ratio(line, "cute_attn accurate") for line in result.lines] == [2.0, 0.5]
    assert result.ratio(long, "cute_attn accurate", "fa3 fp8") == 2.0
    assert result.ratio(long, "cute_attn accurate", "cudnn fp8") is None
    assert report.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert report.geometric_mean([]) is None
    with pytest.raises(ValueError, match="positive"):
        report.geometric_mean([1.0, 0.0])
    with pytest.raises(ValueError, match="two rows"):
        report.pivot(made_up_rows()[:1] * 2, "forward")


def test_speed_grids_show_speed_ratio_and_reason() -> None:
    speed, relative, ran = report.speed_grids(made_up_rows())
    assert speed.headers[4:] == [
        "cute_attn accurate",
        "fa3 fp8",
        "fa3 bf16",
        "cudnn fp8",
        "best peer",
        "ours / best",
        "rel RMSE",
    ]
    assert speed.lines[0] == [
        "64", "causal", "200", "2 x 4/2", "1000", "500", "400", "250", "fa3 fp8", "2.00x", "2.00%"
    ]  # fmt: skip
    assert speed.lines[1][7:10] == ["failed", "fa3 bf16", "0.50x"]
    best = next(line for line in relative.lines if line[1] == "best of the cell")
    assert best == ["cute_attn accurate", "best of the cell", "1.00x", "1.00x", "0.50x", "2"]
    assert next(line for line in relative.lines if line[1] == "cudnn fp8")[2:] == ["4.00x", "4.00x", "-", "1"]
    assert "cudnn fp8, d 64 causal 8192: failed: no plan" in ran.notes
    assert next(line for line in ran.lines if line[0] == "cudnn fp8")[2] == "1 of 2"
    text = speed.markdown()
    assert text.splitlines()[2].startswith("| d | mask | seqlen |")
    assert text.splitlines()[3].count("---") == len(speed.headers)


def test_an_absent_provider_stays_in_the_table() -> None:
    absent = {"status": "unavailable", "reason": "cannot import"}
    rows = [
        timed_row("cute_attn", 1000.0),
        record.make_row(provider="fa4", phase="forward", dtype="bf16", **absent, **CASE.fields),
    ]
    speed, *_, ran = report.speed_grids(rows)
    assert "fa4 bf16" in speed.headers and "n/a" in speed.lines[0]
    assert ran.notes == ["fa4 bf16, all cells: unavailable: cannot import"]


def test_quantiser_rows_are_shown_in_bytes_a_second() -> None:
    rows = [
        timed_row("cute_attn", 1.0, phase="quantize", tflops=None, tbps=3.9),
        timed_row("copy", 1.0, phase="quantize", tflops=None, tbps=4.1, rel_rmse=None),
    ]
    speed, relative, _ = report.speed_grids(rows)
    assert "TB/s" in speed.title and speed.lines[0][4:6] == ["3.90", "4.10"]
    assert relative.lines[0][2] == "0.95x"


def test_csv_holds_every_field(tmp_path: Path) -> None:
    rows = [timed_row("cute_attn", 1000.0, rounds=7), timed_row("fa3", 500.0)]
    report.write_csv(tmp_path / "x.csv", rows)
    with open(tmp_path / "x.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == [*record.ROW_FIELDS, "rounds"]
    assert float(found[1]["tflops"]) == 500.0 and found[1]["recipe"] == "" and found[0]["rounds"] == "7"


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "speed.png", made_up_rows(), "title")
    error = record.make_row(
        provider="cute_attn", phase="accuracy_total", dtype="fp8", recipe="fp8", rel_rmse=0.1, input="x"
    )
    report.plot(tmp_path / "error.svg", [error, error | {"recipe": "naive", "rel_rmse": 0.2}], "title")
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "error.svg").read_text()
    with pytest.raises(ValueError, match="nothing to draw"):
        report.plot(tmp_path / "none.png", [], "title")


def test_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        cli.main(["--plot", "x.png"])
    assert "pip install 'cute-attn[plot]'" in capsys.readouterr().err


# --- figures


def kernel_figures(config: Any, **changes: Any) -> SimpleNamespace:
    counts = {"QGMMA": 24, "UTMALDG": 5, "MUFU": 12, "MUFU.EX2": 8, "LDL": 0, "STL": 0}
    values = {
        "name": config.name,
        "registers": 168,
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "smem_bytes": 100 * 1024,
        "serialized_wgmma": False,
        "counts": counts,
        "total": 2000,
        "compile_seconds": 1.5,
    }
    return SimpleNamespace(**(values | changes))


def test_tile_steps_count_what_the_mask_leaves() -> None:
    case = cases.Case(1, 1024, 1024, 2, 2, 128, True)
    full = FwdConfig(128, 128, 128, 256, 2, "e4m3", "code", False, "bf16")
    assert figures.tile_steps(full, case) == 2 * 8 * 4
    assert figures.tile_steps(FWD, case) == 2 * (1 + 1 + 2 + 2 + 3 + 3 + 4 + 4)
    packed = dataclasses.replace(FWD, pack_gqa=2)  # two heads in a tile: 64 queries of each
    steps = [-(-(64 * (i + 1)) // 256) for i in range(16)]
    assert figures.tile_steps(packed, dataclasses.replace(case, heads_k=1)) == sum(steps)
    # 100 queries at the end of 300 keys see 201 to 300 of them; 300 queries over 100 keys: 200 rows see none
    assert figures.tile_steps(FWD, cases.Case(1, 100, 300, 1, 1, 128, True)) == 2
    assert figures.tile_steps(FWD, cases.Case(1, 300, 100, 1, 1, 128, True)) == 0 + 1 + 1


def test_roofline_arithmetic() -> None:
    case = cases.Case(1, 1024, 1024, 2, 2, 128, True)
    # 128 / 32 + 256 / 32 = 12 WGMMA instructions a step, 24 in the code: two copies of 1200 instructions
    assert figures.step_copies(FWD, {"QGMMA": 24}) == 2
    assert figures.step_copies(FWD, {"QGMMA": 16, "IGMMA": 8}) == 2
    # head_dim 80 takes 3 steps for each half of the keys, head_dim_v 144 in parts of 64, 64 and 16: 6 + 3 * 8
    parts = dataclasses.replace(FWD, head_dim=80, head_dim_v=144, qk_splits=2, pv_part=64)
    assert figures.step_copies(parts, {"QGMMA": 60}) == 2
    bounds = figures.forward_roofline(FWD, case, {"QGMMA": 24, "MUFU": 12}, 2400)
    steps, clock = 40, 132 * 1979e12 / (132 * 8192)
    assert bounds.tensor_ms == pytest.approx(steps * 2 * 128 * 256 * (256 + 8) / 1979e12 * 1e3)
    assert bounds.issue_ms == pytest.approx(steps * 2 * 1200 / clock * 1e3)
    assert bounds.mufu_ms == pytest.approx(steps * 2 * 6 * 8 / clock * 1e3)
    elements = 1024 * 2 * 128
    assert bounds.hbm_ms == pytest.approx((5 * elements + 4 * (2 * 2048 + 2 * 16 + 2 * 4)) / 4.8e12 * 1e3)
    assert bounds.unit == "issue" and bounds.ms == bounds.issue_ms
    other = dataclasses.replace(FWD, head_dim=80, head_dim_v=112)
    wide = figures.forward_roofline(other, dataclasses.replace(case, head_dim=80), {}, None)
    assert wide.tensor_ms == pytest.approx(steps * 2 * 128 * 256 * (96 + 112 + 8) / 1979e12 * 1e3)
    moved = 1024 * 2 * (80 + 80 + 112 + 2 * 112) + 4 * (2 * 2048 + 2 * 16 + 2 * 4)
    assert wide.hbm_ms == pytest.approx(moved / 4.8e12 * 1e3)
    blind = figures.forward_roofline(FWD, case, {}, None)
    assert blind.issue_ms is None and blind.mufu_ms is None and blind.unit in ("tensor", "HBM")


def test_quantiser_bytes() -> None:
    case = cases.Case(1, 512, 512, 4, 2, 128, False)
    scales = 4 * 512 + 2 * 8 + 2 * 2
    assert figures.quantize_bytes(QUANTIZE, case) == 3 * 512 * 128 * (4 + 2 * 2) + 4 * (scales + 4 * 512)
    transpose = QuantizeConfig(
        128, 128, "e4m3", "e4m3", "token", "block64", "block", rotate=False, smooth=False
    )
    assert figures.quantize_bytes(transpose, case) == 2 * 512 * 128 * 2
    narrow = dataclasses.replace(QUANTIZE, head_dim_v=64)
    saved = 3 * 512 * 64 * 2
    assert figures.quantize_bytes(narrow, case) == figures.quantize_bytes(QUANTIZE, case) - saved


def test_figure_rows_and_grids() -> None:
    cells = [cases.Case(1, 16384, 16384, 16, 16, 128, causal) for causal in (False, True)]
    shapes = figures.figure_shapes(cells, cases.WINDOW)
    configs = [FWD, FWD, QUANTIZE]
    found = [kernel_figures(FWD), "RuntimeError: ptxas said no", kernel_figures(QUANTIZE, counts={"MUFU": 3})]
    rows = figures.figure_rows(configs, found, shapes)
    record.validate(meta(), rows)
    assert rows[0]["ms"] is None and rows[0]["QGMMA"] == 24 and rows[0]["mufu_ex2"] == 8
    assert all(row["head_dim_v"] == 128 for row in rows)
    mixed = dataclasses.replace(FWD, head_dim_v=64)
    (row,) = figures.figure_rows([mixed], [kernel_figures(mixed)], shapes)
    assert row["implied_tflops"] == pytest.approx(0.75 * cells[1].flops / row["implied_ms"] / 1e9)
    assert rows[0]["implied_tflops"] == pytest.approx(cells[1].flops / rows[0]["implied_ms"] / 1e9)
    assert (rows[1]["status"], rows[1]["reason"]) == ("failed", "RuntimeError: ptxas said no")
    assert rows[2]["implied_bound"] == "HBM" and rows[2]["causal"] is None
    forward, quantisers = figures.figure_grids(rows)
    assert "implied, not measured" in forward.title
    assert forward.lines[0][:4] == [FWD.name, "168", "0", "100"]
    assert len(forward.lines[1]) == len(forward.headers) and forward.lines[1][1] == "failed"
    assert quantisers.lines[0][0] == QUANTIZE.name


def test_figures_of_16_bit_kernels() -> None:
    """Half the peak, half the depth of a product, no scales and no row of ones; steps that a window leaves."""
    case = cases.Case(1, 1024, 1024, 2, 2, 128, False)
    full, causal, window = (
        forward16_config(128, 128, "bf16", seqlen_q=1024, **options)
        for options in ({}, {"causal": True}, {"window": True})
    )
    assert figures.tile_steps(full, case) == 2 * 8 * 8
    assert figures.tile_steps(causal, case) == 2 * sum(range(1, 9))
    windowed = dataclasses.replace(case, window=(300, 0))
    # rows 128 i to 128 i + 127 see keys from 128 i - 300 on
    assert figures.tile_steps(window, windowed) == 2 * (1 + 2 + 3 + 4 * 5)
    assert figures.tile_steps(window, dataclasses.replace(case, window=(-1, 0))) == 2 * sum(range(1, 9))
    assert figures.step_copies(full, {"HGMMA": 32}) == 2  # 128 / 16 + 128 / 16 for a step
    bounds = figures.forward_roofline(full, case, {"HGMMA": 32, "MUFU": 12}, 2400)
    steps = 2 * 8 * 8
    assert bounds.tensor_ms == pytest.approx(steps * 2 * 128 * 128 * 256 / (1979e12 / 2) * 1e3)
    assert bounds.hbm_ms == pytest.approx((4 * 2 * 1024 * 2 * 128 + 4 * 2048) / 4.8e12 * 1e3)

    shapes = figures.figure_shapes([case, dataclasses.replace(case, causal=True)], (300, 0))
    configs = [causal, window, FWD]
    found = [kernel_figures(config, counts={"HGMMA": 32, "QGMMA": 0, "MUFU": 12}) for config in configs]
    rows = figures.figure_rows(configs, found, shapes)
    record.validate(meta(), rows)
    assert [row["dtype"] for row in rows] == ["bf16", "bf16", "fp8"] and rows[0]["HGMMA"] == 32
    assert (rows[1]["window_left"], rows[1]["window_right"]) == (300, 0) and "window_left" not in rows[0]
    flops = 4.0 * 128 * 2 * cases.window_pairs(1024, 1024, (300, 0))
    assert rows[1]["implied_tflops"] == pytest.approx(flops / rows[1]["implied_ms"] / 1e9)
    eight, sixteen = figures.figure_grids(rows)
    assert "8 bits" in eight.title and "16 bits" in sixteen.title
    assert sixteen.headers[4:6] == ["HGMMA", "UTMALDG"] and len(sixteen.lines) == 2
    assert sixteen.notes[0].startswith("Roofline of H200 SXM: 990 TFLOP/s dense 16-bit")
    assert sixteen.notes[1] == "Windowed kernels: window (300, 0)."


def test_pairs_that_a_window_leaves() -> None:
    for (seqlen_q, seqlen_k), (left, right) in itertools.product(
        ((5, 9), (9, 5), (4, 4)), itertools.product((-1, 0, 2, 20), repeat=2)
    ):
        q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]
        behind = k - (q + seqlen_k - seqlen_q)
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        seen &= (behind >= -left) if left >= 0 else True
        seen &= (behind <= right) if right >= 0 else True
        assert cases.window_pairs(seqlen_q, seqlen_k, (left, right)) == int(seen.sum())


def test_inspect_all_survives_a_worker_that_dies() -> None:
    # A stand-in for a configuration is a call; the second one ends its process as a compiler abort would.
    configs: list[Any] = [
        functools.partial(int, 1),
        functools.partial(os._exit, 3),
        functools.partial(int, 2),
    ]
    done: list[None] = []
    found = figures.inspect_all(
        configs, jobs=1, inspect=operator.methodcaller("__call__"), on_done=lambda: done.append(None)
    )
    assert found == [1, "the compiler process died", 2]
    assert len(done) == 3


# --- whole command


def small_inputs(device: str = "cpu") -> list[Any]:
    from cute_attn.bench.data import LayerTensors

    case = cases.Case(1, 70, 70, 2, 1, 64, True)
    return [LayerTensors("tiny", *cases.make_inputs(case, torch.bfloat16, device), source="synthetic")]


def stub_kernels(monkeypatch: pytest.MonkeyPatch, configs: list[Any], result: Any) -> None:
    from cute_attn import compile as compiler

    monkeypatch.setattr(compiler, "configurations", lambda: configs, raising=False)
    monkeypatch.setattr(figures, "inspect_all", lambda found, **_: [result(config) for config in found])
    monkeypatch.setattr("cute_attn.bench.data.default_inputs", small_inputs)


def test_run_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cli, "hopper_device", lambda: (False, "no CUDA GPU is visible to torch"))
    others = [dataclasses.replace(FWD, pack_gqa=8), dataclasses.replace(FWD, head_dim=96, head_dim_v=96)]
    stub_kernels(monkeypatch, [FWD, QUANTIZE, *others], kernel_figures)  # others: not of the default shapes
    files = {name: tmp_path / f"x.{name}" for name in ("json", "csv", "markdown", "plot")}
    files["plot"] = tmp_path / "x.png"
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("No Hopper GPU: no CUDA GPU is visible to torch.")
    assert "EMULATOR" in text and "tiny" in text and "implied, not measured" in text and FWD.name in text
    found = record.read(files["json"])
    assert {row["phase"] for row in found.rows} == {"accuracy_total", "accuracy_kernel", "figures"}
    assert [row["kernel"] for row in found.rows if row["phase"] == "figures"] == [FWD.name, QUANTIZE.name]
    errors = {row["recipe"]: row for row in found.rows if row["phase"] == "accuracy_total"}
    assert list(errors) == ["naive", "naive-lifted", "paper", "fp8", "accurate"]
    assert all(row["backend"] == "emulator" and row["rel_rmse"] > 0 for row in errors.values())
    assert errors["accurate"]["rmse"] < errors["naive"]["rmse"]
    assert len(files["csv"].read_text().splitlines()) == 1 + len(found.rows)
    markdown = files["markdown"].read_text()
    assert "No Hopper GPU" in markdown and "| tiny | naive | emulator |" in markdown and FWD.name in markdown
    assert files["plot"].read_bytes()[:4] == b"\x89PNG"


def test_run_without_a_gpu_reports_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (False, "no CUDA GPU is visible to torch"))
    both = forward16_config(128, 128, "bf16"), forward16_config(128, 128, "fp16")
    stub_kernels(monkeypatch, [FWD, *both], lambda config: "RuntimeError: ptxas said no")
    for dtype, name in (("bf16", both[0].name), ("fp8", FWD.name)):
        assert cli.main(["--report", "figures", "--dtype", dtype]) == 1
        text = " ".join(capsys.readouterr().out.split())
        assert ("no emulator" in text) == (dtype == "bf16")
        assert f"{name}: RuntimeError: ptxas said no" in text
        assert "1 results of cute_attn are missing or wrong" in text


def test_run_on_a_hopper_gpu_times_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (True, "a GPU of this test"))
    seen: list[tuple[str, int, bool]] = []

    def time_cell(case: cases.Case, group: list[peers.Contender], **options: Any) -> list[dict[str, Any]]:
        assert options == {"rounds": 2, "min_batch_ms": 50.0, "settle_ms": 250.0}
        seen.append((group[0].phase, case.seqlen_k, case.causal))
        return [
            timed_row(
                c.provider, 900.0, dtype=c.dtype, phase=c.phase, recipe=c.recipe, tbps=3.0, **case.fields
            )
            for c in group
        ]

    monkeypatch.setattr(timing, "time_cell", time_cell)
    path = tmp_path / "x.json"
    words = "--report speed --seqlen 512,1024 --head-dim 128 --phase forward,quantize --rounds 2 --recipe fp8"
    assert cli.main([*words.split(), "--json", str(path)]) == 0
    assert seen == [(p, n, c) for c in (False, True) for n in (512, 1024) for p in ("forward", "quantize")]
    found = record.read(path)
    assert {row["recipe"] for row in found.rows if row["provider"] == "cute_attn"} == {"fp8"}
    assert found.meta["command"].endswith(f"{words} --json {path}")
    text = capsys.readouterr().out
    assert "Forward, prepared operands to output: TFLOP/s" in text and "best of the cell" in text


def test_a_lost_device_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (True, "a GPU of this test"))

    def time_cell(case: cases.Case, group: list[peers.Contender], **_: Any) -> list[dict[str, Any]]:
        lost = timing.DeviceLost("CUDA error: an illegal memory access was encountered")
        lost.rows = [
            timed_row("cute_attn", 900.0, ms=None, tflops=None, status="failed", reason="illegal access")
        ]
        raise lost

    monkeypatch.setattr(timing, "time_cell", time_cell)
    assert cli.main(["--report", "all", "--seqlen", "512"]) == 1
    text = capsys.readouterr().out
    assert "The CUDA context was lost" in text and "illegal access" in text
    assert "Error of 8-bit attention" not in text


def test_a_run_that_is_told_to_end_writes_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (True, "a GPU of this test"))
    cells = []

    def time_cell(case: cases.Case, group: list[peers.Contender], **_: Any) -> list[dict[str, Any]]:
        if cells:
            signal.raise_signal(signal.SIGTERM)
        cells.append(case)
        return [timed_row("cute_attn", 900.0)]

    monkeypatch.setattr(timing, "time_cell", time_cell)
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "speed.json"
    assert (
        cli.main(["--report", "speed", "--seqlen", "512,1024", "--head-dim", "64", "--json", str(path)]) == 1
    )
    assert signal.getsignal(signal.SIGTERM) == before
    assert "what was timed until then" in capsys.readouterr().out
    assert len(cells) == len(record.read(path).rows) == 1


def test_kernel_error_by_length_runs_on_any_backend() -> None:
    rows = lengths.measure(
        ["fp8"], lengths=(1, 300), head_dims=(64,), v_means=(0.5,), backends=("emulator",), device="cpu"
    )
    record.validate(meta(), rows)
    assert [row["seqlen_k"] for row in rows] == [1, 300]
    assert all(row["phase"] == "accuracy_kernel" and row["status"] == "ok" for row in rows)
    assert rows[0]["rel_rmse"] < 0.005 and rows[1]["rel_rmse"] < 0.01
    grid = report.error_grid(rows)
    assert grid is not None and grid.lines[0][:4] == ["fp8", "64", "0.5", "emulator"]


# --- host time


def test_host_time_is_that_of_a_call_in_a_batch() -> None:
    now, made, waited = [0.0], [0], [0]

    def call() -> None:
        made[0] += 1
        now[0] += 3e-6 if waited[0] < 3 else 7e-6  # the second of two counted batches is slower

    def synchronize() -> None:
        waited[0] += 1
        now[0] += 1.0  # not in the time

    times = overhead.batch_times(call, batches=2, calls=10, synchronize=synchronize, clock=lambda: now[0])
    assert times == pytest.approx([3.0, 7.0]) and made[0] == 30 and waited[0] == 4


def test_host_time_on_any_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def need(module: str) -> Any:
        raise peers.NotRun("unavailable", f"cannot import {module}")

    monkeypatch.setattr(peers, "need", need)
    options: dict[str, Any] = {"backend": "emulator", "device": "cpu", "synchronize": lambda: None}
    rows = overhead.measure(["fp8"], batches=1, calls=1, **options)
    record.validate(meta(), rows)
    assert [(row["provider"], row["kernel"], row["status"]) for row in rows] == [
        ("cute_attn", "fp8_attention", "ok"),
        ("cute_attn", "fp8_attention, lse", "ok"),
        ("cute_attn", "quantize", "ok"),
        ("cute_attn", "fp8_attention_quantized", "ok"),
        ("torch", "x + x", "ok"),
        ("torch", "scaled_dot_product_attention", "ok"),
        ("fa3", "flash_attn_func", "unavailable"),
        ("fa3", "flash_attn_func", "unavailable"),
    ]
    rows[0].update(ms=0.0234, ms_min=0.021, ms_max=0.03)
    rows[1].update(ms=None, ms_min=None, ms_max=None, status="failed", reason="RuntimeError: no")
    grid = overhead.overhead_grid(rows)
    assert grid is not None and overhead.overhead_grid([]) is None
    assert grid.lines[0] == ["cute_attn", "fp8_attention", "fp8", "23.4", "21.0", "30.0"]
    assert grid.lines[1][2:] == ["fp8", "failed", "", ""] and grid.sections == {3}
    assert grid.notes[0] == "cute_attn fp8_attention, lse fp8: RuntimeError: no"


def test_overhead_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "hopper_device", lambda: (True, "a GPU of this test"))
    asked: list[list[str]] = []

    def measure(recipes: list[str]) -> list[dict[str, Any]]:
        asked.append(recipes)
        shape = overhead.CASE.fields
        row = record.make_row(provider="cute_attn", kernel="quantize", phase="overhead", dtype="fp8", **shape)
        return [row | {"ms": 0.02, "ms_min": 0.02, "ms_max": 0.02}]

    monkeypatch.setattr(overhead, "measure", measure)
    path = tmp_path / "x.json"
    assert cli.main(["--report", "overhead", "--json", str(path), "--markdown", str(tmp_path / "x.md")]) == 0
    assert asked == [["accurate"]] and record.read(path).rows[0]["phase"] == "overhead"
    assert "Host time of a call" in capsys.readouterr().out
    assert "Host time of a call" in (tmp_path / "x.md").read_text()


def test_stored_bytes_are_those_of_the_parts() -> None:
    """Not those of the storage that the parts of a quantised tensor share, nor of what an expanded scale repeats."""
    storage = torch.zeros(4096, dtype=torch.uint8)
    floats = storage.view(torch.float32)
    qkv = SimpleNamespace(
        q=storage[:1024].view(1, 4, 2, 128),
        k=storage[1024:1536].view(1, 2, 2, 128),
        vt=storage[1536:2048].view(1, 2, 128, 2),
        q_scale=floats[512:520].view(1, 2, 4),
        k_scale=torch.ones(1, 2, 1).expand(1, 2, 50),
        v_scale=torch.ones(()).expand(1, 2, 50),
        q_dot_mean=None,
    )
    assert peers._stored_bytes(qkv) == 1024 + 512 + 512 + 32 + 8 + 4
