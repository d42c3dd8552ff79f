"""Attention over all keys from attention over parts: which dtype is when, and the kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled import figures_of, no_spills
from torch import Tensor

from cute_attn.compile import KernelFigures
from cute_attn.distributed import merge
from cute_attn.distributed.merge import Merged
from cute_attn.kernels.config import MergeConfig

CONFIGS = [
    *(MergeConfig(128, "bf16", *wide) for wide in itertools.product((False, True), repeat=2)),
    MergeConfig(40, "fp16", True, False),
    MergeConfig(256, "fp16", True, True),
]


def parts_of(
    count: int, rows: int, dtype: torch.dtype, device: str = "cpu", d: int = 128
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of parts with 2 batches and 3 heads. Some rows do not see some of them."""
    found = []
    for _ in range(count):
        lse = 3.0 * torch.randn(2, 3, rows, device=device)
        unseen = torch.rand_like(lse) < 0.2
        out = torch.randn(2, rows, 3, d, device=device).masked_fill(unseen.transpose(1, 2).unsqueeze(3), 0.0)
        found.append((out.to(dtype), lse.masked_fill(unseen, -torch.inf)))
    return found


def exact(parts: list[tuple[slice, Tensor, Tensor]], rows: int) -> tuple[Tensor, Tensor]:
    """Sums of all parts in float64."""
    batch, _, heads, d = parts[0][1].shape
    device = parts[0][1].device
    lses = torch.full((len(parts), batch, heads, rows), -torch.inf, dtype=torch.float64, device=device)
    outs = torch.zeros(len(parts), batch, rows, heads, d, dtype=torch.float64, device=device)
    for i, (where, out, lse) in enumerate(parts):
        lses[i][:, :, where], outs[i][:, where] = lse.double(), out.double()
    total = lses.logsumexp(0)
    shares = (lses - total).exp().nan_to_num(0.0)
    return (outs * shares.transpose(2, 3).unsqueeze(4)).sum(0), total


def check(parts: list[tuple[slice, Tensor, Tensor]], rows: int, more: int, dtype: torch.dtype) -> None:
    batch, _, heads, d = parts[0][1].shape
    out, lse = exact(parts, rows)
    merged = Merged(batch, rows, heads, d, parts[0][1].device, len(parts) + more)
    for where, *part in parts:
        merged.add(where, *(x.clone() for x in part))
    assert merged.out.dtype == dtype
    # One rounding to 16 bits, and float32 arithmetic on numbers of about 1.
    rounding = 0.0 if dtype == torch.float32 else 0.51 * torch.finfo(dtype).eps
    assert bool(((merged.out.double() - out).abs() <= rounding * out.abs() + 4e-6).all())
    assert torch.equal(merged.lse.isinf(), lse.isinf())
    assert bool(
        (
            (merged.lse.double() - lse).nan_to_num(0.0).abs()
            <= 2e-6 * (1.0 + lse.nan_to_num(0.0, 0.0, 0.0).abs())
        ).all()
    )


ALL, HALF = slice(0, 70), slice(35, 70)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("where", "more", "narrow"),
    [
        ([ALL], 0, True),
        ([ALL, ALL], 0, True),
        ([ALL, HALF], 0, True),  # of the other rows nothing was rounded twice
        ([ALL, ALL], 1, False),  # sinks come
        ([ALL, ALL, ALL], 0, True),
        ([ALL, HALF, ALL, HALF], 0, False),
        ([HALF, ALL], 0, True),
        ([HALF, slice(0, 35)], 0, False),
    ],
)
def test_the_dtype_of_sums(where: list[slice], more: int, narrow: bool, dtype: torch.dtype) -> None:
    """Rounded to 16 bits once, by the last part."""
    parts = [
        (rows, out[:, rows], lse[..., rows])
        for rows, (out, lse) in zip(where, parts_of(len(where), 70, dtype), strict=True)
    ]
    check(parts, 70, more, dtype if narrow else torch.float32)


def test_rows_by_number() -> None:
    """Those of several sequences that one launch served."""
    (first, first_lse), (second, second_lse) = parts_of(2, 70, torch.float16)
    numbers = torch.tensor([3, 4, 5, 60, 61])
    for more in (0, 1):
        one, two = (Merged(2, 70, 3, 128, torch.device("cpu"), 2 + more) for _ in range(2))
        for merged in (one, two):
            merged.add(ALL, first.clone(), first_lse.clone())
        one.add(numbers, second[:, numbers], second_lse[..., numbers])
        unseen = torch.full_like(second_lse, -torch.inf)
        unseen[..., numbers] = second_lse[..., numbers]
        two.add(ALL, second.clone(), unseen)
        assert (
            one.out.dtype == two.out.dtype and torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)
        )


def test_nothing_is_merged_without_parts() -> None:
    merged = Merged(1, 5, 2, 32, torch.device("cpu"), 0)
    assert not merged.out.any() and bool((merged.lse == -torch.inf).all())


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[Any], KernelFigures]]:
    with figures_of(CONFIGS) as found:
        yield found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_the_kernel(config: MergeConfig, figures: Callable[[Any], KernelFigures]) -> None:
    found = figures(config)
    no_spills(found)
    assert found.registers <= 128  # two CTAs of 256 threads an SM


@pytest.mark.parametrize(("field", "value"), [("head_dim_v", 36), ("head_dim_v", 264), ("dtype", "fp32")])
def test_configurations_that_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        MergeConfig(
            **{"head_dim_v": 64, "dtype": "bf16", "wide_before": False, "wide_out": False, field: value}
        ).check()  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("d", [32, 40, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel_on_a_gpu(dtype: torch.dtype, d: int) -> None:
    """Rows that fill no CTA, parts of rows, in place and not; and against torch, which serves elsewhere."""
    for rows, where in ((1, [slice(0, 1)] * 2), (70, [ALL, HALF]), (1000, [slice(0, 1000)] * 3)):
        for more in (0, 1):
            given = parts_of(len(where), rows, dtype, "cuda", d)
            parts = [(at, out[:, at], lse[..., at]) for at, (out, lse) in zip(where, given, strict=True)]
            check(parts, rows, more, torch.float32 if more else dtype)
    (before, lse_before), (part, lse) = parts_of(2, 500, dtype, "cuda", d)
    results = []
    for device_capability in (merge.device_capability, lambda device: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merge, "device_capability", device_capability)
            out, total = torch.empty_like(before), lse_before.clone()
            merge._merge(before, total, part, lse, out)
            results.append((out, total))
    (out, total), (wanted, wanted_total) = results
    assert bool(
        (
            (out.double() - wanted.double()).abs() <= torch.finfo(dtype).eps * (wanted.double().abs() + 1e-3)
        ).all()
    )
    torch.testing.assert_close(total, wanted_total, rtol=1e-6, atol=1e-6)
