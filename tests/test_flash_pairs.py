"""Every pair of features of `flash_attn_func`, against float64: a table of cases that covers them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import all_pairs, covering, pairs
from poison import poison_memory
from test_flash_gpu import check
from torch import Tensor

from cute_attn import flash, flash_attn_explain, flash_attn_func, launch

BF16, FP16 = torch.bfloat16, torch.float16
FEATURES: dict[str, tuple[Any, ...]] = {
    "dims": ((128, 128), (64, 64), (256, 256), (192, 128), (96, 96), (40, 72)),
    "lengths": ((300, 700), (700, 300), (257, 257), (1, 500), (5, 129)),
    "window": ((-1, 0), (-1, -1), (100, 20), (-1, 30), (64, -1)),
    "softcap": (0.0, 12.0),
    "slopes": ("none", "heads", "batch"),
    "sinks": (False, True),
    "heads": ((8, 2), (3, 3), (6, 1), (3, 1)),
    "scale": (None, -0.3, 0.0),
    "layout": ("contiguous", "heads first", "wide rows", "odd rows", "one batch entry"),
    "dtype": (BF16, FP16),
}
CASES = covering(FEATURES)


def name(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "").removeprefix("torch.") for value in case.values())


def laid_out(x: Tensor, layout: str) -> Tensor:
    """`x` with the strides that `layout` names."""
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout in ("wide rows", "odd rows"):
        room = torch.empty(*x.shape[:3], x.shape[3] + (8 if layout == "wide rows" else 3), dtype=x.dtype)
        room = room.to(x.device)
        room[..., : x.shape[3]] = x
        return room[..., : x.shape[3]]
    return x[:1].expand_as(x) if layout == "one batch entry" else x


def call(case: dict[str, Any], place: str) -> tuple[list[Tensor], dict[str, Any]]:
    """(q, k, v) and options of `flash_attn_func`."""
    (seqlen_q, seqlen_k), (heads_q, heads_k), (dim, dim_v) = case["lengths"], case["heads"], case["dims"]
    sizes = ((seqlen_q, heads_q, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v))
    q, k, v = (torch.randn(2, *size, device=place) for size in sizes)
    q, v = q * (3.0 if case["softcap"] else 1.0), v + 0.5
    tensors = [laid_out(x.to(case["dtype"]), case["layout"]) for x in (q, k, v)]
    slopes = {"none": None, "heads": torch.rand(heads_q), "batch": torch.rand(2, heads_q)}[case["slopes"]]
    options = {
        "softmax_scale": case["scale"],
        "window_size": case["window"],
        "softcap": case["softcap"],
        "alibi_slopes": None if slopes is None else slopes.to(place),
        "sinks": torch.randn(heads_q, device=place) * 3 if case["sinks"] else None,
    }
    return tensors, options


def check_call(case: dict[str, Any], place: str, backend: str) -> None:
    tensors, options = call(case, place)
    got = flash_attn_func(*tensors, **options, return_lse=True, backend=backend)
    batch, heads = tensors[0].shape[0], tensors[0].shape[2]
    about = {name: options[name] for name in ("softcap", "sinks")}
    if options["alibi_slopes"] is not None:
        about["alibi_slopes"] = options["alibi_slopes"].expand(batch, heads)
    if options["softmax_scale"] is not None:
        about["softmax_scale"] = options["softmax_scale"]
    q, k, v = tensors
    if options["sinks"] is None:
        check(got, q, k, v, window=case["window"], **about)
        return
    # `check` takes rows without keys for rows of lse -inf; a sink gives them its own
    seen = rows_with_keys(case)
    out, lse = got
    assert bool((out[:, ~seen] == 0).all())
    sinks = options["sinks"].view(1, -1, 1).expand(batch, heads, int((~seen).sum()))
    assert torch.allclose(lse[..., ~seen], sinks, atol=1e-5)
    check(got, q, k, v, window=case["window"], **about)


def rows_with_keys(case: dict[str, Any]) -> Tensor:
    (seqlen_q, seqlen_k), (left, right) = case["lengths"], case["window"]
    at = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    first = (at - left).clamp(min=0) if left >= 0 else torch.zeros_like(at)
    last = (at + right).clamp(max=seqlen_k - 1) if right >= 0 else torch.full_like(at, seqlen_k - 1)
    return last >= first


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_kernel(case: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch, launch)
    check_call(case, "cuda", backend)


@pytest.mark.parametrize("case", CASES[::4], ids=name)
def test_reference(case: dict[str, Any]) -> None:
    check_call(case, "cpu", "reference")


def test_the_table_covers_every_pair() -> None:
    places = [{name: FEATURES[name].index(case[name]) for name in FEATURES} for case in CASES]
    assert set().union(*map(pairs, places)) == all_pairs(FEATURES)
    assert len(all_pairs({"a": (1, 2), "b": (3, 4), "c": (5,)})) == 4 + 2 + 2
    assert len(CASES) < 60
    assert covering(FEATURES) == CASES


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (8, 6)], ids=str)
def test_every_case_has_a_kernel(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "device_capability", lambda device: capability)
    kernels = set()
    for case in CASES:
        tensors, options = call(case, "cpu")
        made = flash_attn_explain(*tensors, **options)
        assert made.config is not None
        kernels.add(made.kernel)
        odd = (
            ("odd rows", "one batch entry") if capability[0] == 9 else ("odd rows",)
        )  # TMA takes no stride 0
        assert made.problem.copied == (("q", "k", "v") if case["layout"] in odd else ())
    marks = ["_causal", "_full", "_window", "_softcap", "_alibi", "_sinks", "_g2", "_g4", "fp16"]
    for mark in [*marks, "_x2" if capability[0] == 9 else "_c2"]:
        assert any(mark in kernel for kernel in kernels), mark
