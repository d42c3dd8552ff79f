"""Memory that a kernel does not write shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def poison_memory(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """All memory that these modules allocate is as that of `PoisonedTorch`."""
    for module in modules:
        monkeypatch.setattr(module, "torch", PoisonedTorch())
        if hasattr(module, "new_empty"):
            monkeypatch.setattr(module, "new_empty", _new_empty)
        if hasattr(module, "raw_alloc"):
            monkeypatch.setattr(module, "raw_alloc", functools.partial(_raw_alloc, module.raw_alloc))


def _new_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    return functools.partial(PoisonedTorch().empty, shape, dtype=dtype, device=device)


def _raw_alloc(alloc: Callable[[int, int], int], size: int, stream: int) -> int:
    from cuda.bindings import driver

    address = alloc(size, stream)
    (error,) = driver.cuMemsetD8Async(address, 0xFF, size, stream)
    assert error == driver.CUresult.CUDA_SUCCESS
    return address


class PoisonedTorch:
    """torch, but what `empty` returns holds NaN, in bytes 0xFF, or an integer that nobody writes or counts to."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        x = torch.empty(*args, **options)
        if not x.numel():
            return x
        if x.dtype == torch.int8:
            return x.fill_(-128)
        if x.is_floating_point() or x.dtype == torch.uint8:
            x.view(torch.uint8).fill_(0xFF)
            return x
        return x.fill_(0x7F7F7F)

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, dtype=x.dtype, device=x.device)
