"""Memory of a GPU by the shortest way: torch's caching allocator without its dispatcher, at half of the host's time.

The functions of torch are those that its own compiler's code calls. They take the current device, which callers compare
with the one that they want. In a torch without CUDA they are missing, and nothing asks for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda

__all__ = ["current_device", "new_empty", "raw_alloc", "raw_delete", "raw_stream"]

if TYPE_CHECKING or hasattr(torch._C, "_cuda_getDevice"):
    current_device = torch._C._cuda_getDevice
    raw_stream = torch._C._cuda_getCurrentRawStream  # of a device
    raw_alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc  # (bytes, stream): address
    raw_delete = torch._C._cuda_cudaCachingAllocator_raw_delete  # for later work of that stream
else:

    def current_device(*args: object) -> int:
        raise RuntimeError("this torch was built without CUDA")

    raw_stream = raw_alloc = raw_delete = current_device


def new_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes contiguous tensors of that shape, dtype and device, with any contents."""
    usual = functools.partial(torch.empty, shape, dtype=dtype, device=device)
    if device.type != "cuda":
        return usual
    shape, index = tuple(shape), device.index
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    def new() -> Tensor:
        return _empty_strided_cuda(shape, strides, dtype) if current_device() == index else usual()

    return new
