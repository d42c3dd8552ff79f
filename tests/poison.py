"""Memory that a kernel does not write shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PoisonedTorch:
    """torch, but what `empty` returns holds NaN, in bytes 0xFF, or an integer that nobody writes or counts to.

    For `monkeypatch.setattr(module, "torch", PoisonedTorch())`.
    """

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
