"""Memory of the host in place of a GPU's, for launches whose kernels are left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_attn import launch


class HostMemory:
    """Serves `cute_attn.launch` as torch's caching allocator does; remembers what it has given.

    Attributes:
        held: memory that has not come back, by address.
        sizes: bytes of all that was asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.held: dict[int, Tensor] = {}
        self.sizes: list[int] = []
        monkeypatch.setattr(launch, "current_device", lambda: None)  # the index of torch.device("cpu")
        monkeypatch.setattr(launch, "raw_stream", lambda index: 0)
        monkeypatch.setattr(launch, "raw_alloc", self.alloc)
        monkeypatch.setattr(launch, "raw_delete", self.delete)

    def alloc(self, size: int, stream: int) -> int:
        x = torch.zeros(size + 127, dtype=torch.uint8)
        address = -(-x.data_ptr() // 128) * 128
        self.held[address] = x
        self.sizes.append(size)
        return address

    def delete(self, address: int) -> None:
        del self.held[address]
