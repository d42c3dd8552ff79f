"""Memory of a GPU by the shortest way: torch's caching allocator without its dispatcher.

The functions of torch are those that its own compiler's code calls. They take the current device, which callers compare
with the one that they want. In a torch without CUDA they are missing, and nothing asks for them. They are private to
torch: one that has CUDA and lacks them says so at the first call.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

__all__ = ["current_device", "new_empty", "raw_alloc", "raw_delete", "raw_stream", "zeros_to_count_in"]


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


_FEWEST: Final = 1024  # counters that a stream has
_RESERVE: Final = 1 << 18  # counters of a device that are set aside for captured calls, 1 MiB
# (device, stream) -> its counters
_of_stream: dict[tuple[int, int], Tensor] = {}
# Of a device: zeros that no captured call has, then all zeros that were set aside, which captured calls keep part of
_set_aside: dict[int, list[Tensor]] = {}
_lock = threading.Lock()


def zeros_to_count_in(count: int, device: torch.device) -> Tensor:
    """(count,) int32 of zeros for a kernel on the current stream that leaves them at zero again.

    Kernels of a stream run one after another, so they share theirs. A graph may be replayed on any stream, beside
    others, so a captured call has counters that no other call is given, for good: out of zeros that were set aside
    before. Where there are none, as in a process whose first call is captured, the graph sets them to zero each time.
    """
    assert device.index is not None
    index = device.index
    with _lock:
        spare = _set_aside.get(index)
        if torch.cuda.is_current_stream_capturing():
            if spare is None or spare[0].numel() < count:
                return torch.zeros(count, dtype=torch.int32, device=device)
            taken, spare[0] = spare[0][:count], spare[0][count:]
            return taken
        key = (index, raw_stream(index))
        found = _of_stream.get(key)
        if found is None or found.numel() < count:
            found = torch.zeros(max(count, _FEWEST), dtype=torch.int32, device=device)
            _of_stream[key] = found
        if spare is None or spare[0].numel() < _RESERVE // 4:
            more = torch.zeros(_RESERVE, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # whichever stream a graph runs on finds zeros
            _set_aside[index] = [more, *([] if spare is None else spare[1:]), more]
        return found[:count]
