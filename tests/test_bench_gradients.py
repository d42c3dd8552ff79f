"""The benchmark of backward and train: exact gradients, who is called how, the report."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import flash
from cute_attn.bench import __main__ as cli
from cute_attn.bench import cases, gradients, peers, record, report, timing

CASE = cases.Case(batch=2, seqlen_q=200, seqlen_k=200, heads_q=4, heads_k=2, head_dim=64, causal=True)
FULL = dataclasses.replace(CASE, causal=False, seqlen_k=300)
LEAVES_A_ROW_WITHOUT_KEYS = dataclasses.replace(CASE, seqlen_q=300)


def attend(case: cases.Case, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Differentiable attention of (batch, seqlen, heads, head_dim)."""
    window = (-1, 0 if case.causal else -1)
    out, _ = flash.reference(q, k, v, softmax_scale=1 / math.sqrt(case.head_dim), window=window, dtype=dtype)
    return out.to(q.dtype)


def backend_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BACKEND", "emulator")


def timed(contenders: list[peers.Contender], case: cases.Case = CASE) -> list[dict[str, Any]]:
    return timing.time_cell(
        case, contenders, rounds=1, device="cpu", time_batch=lambda launch, count, untimed: 1.0 * count
    )


# --- the check


@pytest.mark.parametrize("case", [CASE, FULL, LEAVES_A_ROW_WITHOUT_KEYS], ids=str)
def test_sampled_gradients_are_those_of_autograd(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_CHUNK", 30 * case.seqlen_k)  # chunks of 30 queries
    q, k, v = cases.make_inputs(case, torch.float64, "cpu")
    dout = gradients.make_dout(case, torch.float64, "cpu")
    found = gradients.sample(q, k, v, dout, causal=case.causal)
    assert found.heads == ((0, 0), (1, 1)) and {0, case.seqlen_q - 1} <= set(found.queries.tolist())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(attend(case, *leaves, dtype=torch.float64), leaves, dout)
    error = gradients.error(got, found)
    assert error.finite and error.worst_row < 1e-9 and error.rel_rmse < 1e-12


@pytest.mark.parametrize("which", range(3))
def test_a_wrong_gradient_is_seen(which: int) -> None:
    q, k, v = cases.make_inputs(CASE, torch.float64, "cpu")
    dout = gradients.make_dout(CASE, torch.float64, "cpu")
    found = gradients.sample(q, k, v, dout, causal=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    good = torch.autograd.grad(attend(CASE, *leaves, dtype=torch.float64), leaves, dout)
    for spoil in (lambda x: x[1, 199].neg_(), lambda x: x[1, 199].zero_(), lambda x: x[0, 64].mul_(1.1)):
        bad = [x.clone() for x in good]
        spoil(bad[which])
        assert gradients.error(tuple(bad), found).worst_row > 0.05
    bad[which][0, 2] = math.nan  # no row of the sample
    assert not gradients.error(tuple(bad), found).finite


# --- who is called how


@pytest.mark.parametrize("phase", ["backward", "train"])
@pytest.mark.parametrize("provider", ["cute_attn", "sdpa_math"])
def test_what_runs_on_the_cpu_is_right(provider: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_of_the_cpu(monkeypatch)
    (row,) = timed([peers.Contender(provider, "bf16", phase)])
    assert row["status"] == "ok" and 0 < row["rel_rmse"] < 0.02, row["reason"]
    assert row["tflops"] == pytest.approx((2.5 if phase == "backward" else 3.5) * CASE.flops / 1e9)
    record.validate(_meta(), [row])


def test_the_8_bit_forward_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_of_the_cpu(monkeypatch)
    (row,) = timed([peers.Contender("cute_attn", "fp8", "train", "accurate")])
    assert (row["status"], row["backend"]) == ("ok", "emulator"), row["reason"]
    assert 0 < row["rel_rmse"] < 0.06 and row["worst_row_rel_rmse"] < 0.35
    assert row["tflops"] == pytest.approx(3.5 * CASE.flops / 1e9)
    assert "quantize_bf16_int8_d64" in row["kernel"] and "fwd_sm90_int8_d64_causal" in row["kernel"]


class FakeLibrary:
    """A module with the function of FA3 or FA4."""

    def __init__(self, wrong: bool = False):
        self.wrong = wrong
        self.calls: list[dict[str, Any]] = []

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        self.calls.append(options)
        assert torch.is_grad_enabled() and q.requires_grad and k.requires_grad and v.requires_grad
        out = attend(CASE, q, k, v)
        return (out.detach() * 0 + q if self.wrong else out), None


@pytest.mark.parametrize(
    ("provider", "module"), [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")]
)
@pytest.mark.parametrize("phase", ["backward", "train"])
def test_peers_are_differentiated(
    provider: str, module: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLibrary()
    monkeypatch.setattr(peers, "need", lambda name: {module: fake}[name])
    (row,) = timed([peers.Contender(provider, "bf16", phase)])
    assert row["status"] == "ok" and row["rel_rmse"] < 0.02, row["reason"]
    assert set(map(str, fake.calls)) == {"{'causal': True}"}
    assert len(fake.calls) == (1 if phase == "backward" else 2)  # one graph serves every launch


def test_wrong_gradients_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "need", lambda name: FakeLibrary(wrong=True))
    (row,) = timed([peers.Contender("fa4", "bf16", "train")])
    assert row["status"] == "failed" and "not have been used" in row["reason"] and row["ms"] is None


def test_our_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "flash_attn_func", lambda q, k, v, **options: attend(CASE, q, k, v))
    tensors = cases.make_inputs(CASE, torch.bfloat16, "cpu")
    names = {
        phase: peers.prepare(peers.Contender("cute_attn", "bf16", phase), CASE, *tensors).kernel
        for phase in ("backward", "train")
    }
    assert names["backward"].startswith("bwd_sm90_bf16_d64_causal"), names
    assert names["train"].endswith(" + " + names["backward"]) and names["train"].startswith(
        "fwd_sm90_bf16_d64_causal"
    )


def test_who_takes_part() -> None:
    def labels(*arguments: Any) -> list[str]:
        return [contender.label for contender in peers.contenders(*arguments)]

    five = ["cute_attn bf16", "fa3 bf16", "fa4 bf16", "sdpa_flash bf16", "sdpa_cudnn bf16"]
    assert labels("bf16", ["backward"], ["accurate"]) == five
    assert labels("bf16", ["backward", "train"], ["accurate"]) == 2 * five
    assert labels("fp8", ["train"], ["accurate"]) == ["cute_attn accurate", *five[1:]]
    with pytest.raises(ValueError, match="phase backward times 16-bit kernels"):
        peers.contenders("fp8", ["backward"], ["accurate"])


def test_deterministic_contenders() -> None:
    def labels(dtype: str, phase: str, *providers: str) -> list[str]:
        found = peers.contenders(dtype, [phase], ["fp8"], providers or None, deterministic=True)
        return [contender.label for contender in found]

    ours, fa4 = (["cute_attn bf16", "cute_attn bf16 deterministic"], ["fa4 bf16", "fa4 bf16 deterministic"])
    assert labels("bf16", "backward") == [*ours, "fa3 bf16", *fa4, "sdpa_flash bf16", "sdpa_cudnn bf16"]
    assert labels("fp8", "train", "cute_attn", "fa4") == ["cute_attn fp8", *fa4]
    with pytest.raises(
        ValueError, match="phase forward has no gradients to be deterministic; allowed: backward, train"
    ):
        labels("bf16", "forward")
    with pytest.raises(
        ValueError, match="no provider with deterministic gradients among sdpa_flash; allowed: cute_attn"
    ):
        labels("bf16", "backward", "sdpa_flash")


def test_deterministic_reaches_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_of_the_cpu(monkeypatch)
    calls: list[bool] = []
    attend = flash.flash_attn_func

    def noted(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append(options.get("deterministic", False))
        return attend(q, k, v, **options)

    monkeypatch.setattr(flash, "flash_attn_func", noted)
    rows = timed(peers.contenders("bf16", ["backward"], [], ["cute_attn"], deterministic=True))
    assert [row["status"] for row in rows] == ["ok", "ok"], rows
    assert [row.get("deterministic", False) for row in rows] == [False, True]
    assert set(calls) == {False, True}


# --- the report


def test_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    backend_of_the_cpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # importing it raises, installed or not
    peers._import.cache_clear()
    monkeypatch.setattr(cli, "hopper_device", lambda: (True, "a Hopper GPU"))
    small = [dataclasses.replace(CASE, seqlen_q=n, seqlen_k=n) for n in (70, 90)]
    monkeypatch.setattr(cases, "grid", lambda **options: small)
    time_cell = timing.time_cell
    monkeypatch.setattr(
        timing,
        "time_cell",
        lambda case, group, **options: time_cell(
            case, group, rounds=1, device="cpu", time_batch=lambda launch, count, untimed: 1.0 * count
        ),
    )
    path, text = tmp_path / "x.json", tmp_path / "x.md"
    words = f"--report speed --dtype bf16 --phase backward,train --providers cute_attn,sdpa_math,fa4 --json {path}"
    assert cli.main([*words.split(), "--markdown", str(text)]) == 0
    peers._import.cache_clear()
    rows = record.read(path).rows
    assert [row["phase"] for row in rows] == 2 * (3 * ["backward"] + 3 * ["train"])
    assert {row["status"] for row in rows if row["provider"] == "fa4"} == {"unavailable"}
    tables = text.read_text()
    assert report.TITLES["backward"] in tables and report.TITLES["train"] in tables
    assert "FLOP = 10 x seqlen_q" in tables and "FLOP = 14 x seqlen_q" in tables
    assert "error of our gradients" in tables and "error of our output" not in tables


def _meta() -> dict[str, Any]:
    names = ("date", "gpu", "driver", "cuda", "torch", "cutlass_dsl", "command")
    return {**dict.fromkeys(names), "git": dict.fromkeys(record.GIT_FIELDS)}
