"""Memory of a GPU: torch's caching allocator by the shortest way, without its dispatcher; constants for all streams.

The functions of torch's allocator are those that its own compiler's code calls. They take the current device, which
callers compare with the one that they want. In a torch without CUDA they are missing, and nothing asks for them. They
are private to torch: one that has CUDA and lacks them says so at the first call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

__all__ = ["current_device", "new_empty", "on_device", "raw_alloc", "raw_delete", "raw_stream"]


def _missing(*args: object) -> Any:
    raise RuntimeError(
        f"torch {torch.__version__} lacks functions of its CUDA allocator that cute_attn calls: it was built without "
        "CUDA, or has changed them"
    )


current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", _missing)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _missing)  # of a device
# (bytes, stream) -> address, of the current device; what is deleted serves later work of that stream.
raw_alloc: Callable[[int, int], int] = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", _missing)
raw_delete: Callable[[int], None] = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", _missing)


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


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy on a device of a tensor of the host, or `x` if it is there, for all streams.

    The host waits for the copy, but for no work that streams had before: it has a stream of its own. To be kept, as its
    memory, once freed, is taken anew without a wait for the streams that read it. Not while a graph is captured.
    """
    if device == x.device:
        return x
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return x.to(device)
