"""What all calls on a KV cache have in common: checks of the cache and of where its sequences lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from cute_attn import validate
from cute_attn.kernels.config import E4M3_ARCHS, HEAD_DIMS_16BIT
from cute_attn.memory import on_device
from cute_attn.problem import ARCHS, device_capability, place_text, warn_reference

BACKENDS: Final = ("auto", "sm90", "sm80", "reference")
E4M3: Final = torch.float8_e4m3fn

INDICES: Final = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
SCALES: Final = ("k_descale", "v_descale")

_LENGTHS: Final = 1 << 18  # a MiB; longer caches take so long that a fill is nothing beside them
_numbers: Final[dict[torch.device, Tensor]] = {}
"""0 .. _LENGTHS - 1 on each device: a length that the host knows is there, and wants no kernel that writes it."""


def target(backend: object, name: str, x: Tensor, cached: torch.dtype) -> str | None:
    """Architecture of the kernels for a backend and tensor `x`, called `name`; None for the reference, which "auto" is
    where there is no kernel, with a warning the first time.

    Raises:
        ValueError: an unknown backend, one that was named and has no kernel for the GPU, or a GPU without conversions
            of the cache's dtype.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    if backend == "reference":
        return None
    capability = device_capability(x.device)
    arch = None if capability is None else ARCHS.get(capability)
    place = place_text(x.device, capability)
    if arch is None and backend == "auto":
        warn_reference(name, place)
        return None
    if arch is None or (backend == "sm90" and arch != "sm_90a"):
        allowed = "9.0" if backend == "sm90" else ", ".join(f"{a}.{b}" for a, b in ARCHS)
        raise ValueError(
            f"{name} is on {place}; allowed: a GPU of compute capability {allowed}, or backend='reference'"
        )
    if cached == E4M3 and arch not in E4M3_ARCHS:
        raise ValueError(
            f"k_cache has dtype {cached} and {name} is on {x.device}, a GPU without conversions of it; allowed: "
            "compute capability 8.9, 9.0 or 12.x, or a 16-bit cache"
        )
    return arch


def check_caches(
    name: str,
    x: object,
    k_cache: object,
    v_cache: object,
    dtypes: tuple[torch.dtype, ...] = validate.IN_DTYPES,
) -> None:
    """Refuse a cache that the tensor `x`, called `name`, of one of `dtypes`, cannot go with.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: rank, device, layout, strides or shapes that are not allowed.
    """
    validate._check_tensor(name, x, dtypes)
    for each, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        validate._check_tensor(each, cache, (*validate.IN_DTYPES, E4M3))
    assert isinstance(x, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
    for each, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.device != x.device:
            raise ValueError(f"{each} is on device {cache.device}; allowed: that of {name}, {x.device}")
        if cache.dtype not in (x.dtype, E4M3):
            allowed = f"that of {name}, {x.dtype}" + ("" if x.dtype == E4M3 else f", or {E4M3}")
            raise TypeError(f"{each} has dtype {cache.dtype}; allowed: {allowed}")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache has dtype {v_cache.dtype}; allowed: that of k_cache, {k_cache.dtype}")
    if k_cache.shape[3] != x.shape[3]:
        raise ValueError(f"head_dim of k_cache is {k_cache.shape[3]}; allowed: that of {name}, {x.shape[3]}")
    step = 16 if k_cache.dtype == E4M3 else 8
    for each, dim in ((name, x.shape[3]), ("v_cache", v_cache.shape[3])):
        if dim not in HEAD_DIMS_16BIT or dim % step:
            raise ValueError(f"head_dim of {each} is {dim}; allowed: multiples of {step} from 32 to 256")
    for i, what in ((0, "first size"), (1, "second size"), (2, "heads")):
        if v_cache.shape[i] != k_cache.shape[i]:
            raise ValueError(
                f"{what} of v_cache is {v_cache.shape[i]}; allowed: that of k_cache, {k_cache.shape[i]}"
            )
    if k_cache.shape[1] < 1:
        raise ValueError(f"second size of k_cache is {k_cache.shape[1]}; allowed: at least 1")
    for each, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        size = cache.element_size()
        strides = [stride * size for stride, n in zip(cache.stride()[:3], cache.shape, strict=False) if n > 1]
        if cache.data_ptr() % 16 or any(stride % 16 for stride in strides):
            raise ValueError(
                f"{each} has strides {cache.stride()} and address {cache.data_ptr():#x}; allowed: multiples of 16 "
                "bytes, as the kernel uses the cache where it is"
            )


def check_places(name: str, x: Tensor, k_cache: Tensor, side: Mapping[str, Tensor | None]) -> int:
    """Refuse lengths, indices, pages and scales (`INDICES`, `SCALES`) that do not fit `x`, called `name`, and a cache.

    Returns:
        slots of a sequence.

    Raises:
        TypeError, ValueError: as `flash_attn_with_kvcache`.
    """
    batch = x.shape[0]
    sequences, slots, heads_k, _ = k_cache.shape
    table = side["block_table"]
    for each in INDICES:
        t = side.get(each)
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{each} is a {type(t).__name__}; allowed: an int32 torch.Tensor or None")
        if t.dtype != torch.int32:
            raise TypeError(f"{each} has dtype {t.dtype}; allowed: torch.int32")
        if t.device != x.device:
            raise ValueError(f"{each} is on device {t.device}; allowed: that of {name}, {x.device}")
        if each == "block_table":
            if t.dim() != 2 or t.shape[0] != batch or t.shape[1] < 1:
                raise ValueError(
                    f"block_table has shape {tuple(t.shape)}; allowed: (batch, blocks), batch {batch}"
                )
        elif tuple(t.shape) != (batch,):
            raise ValueError(f"{each} has shape {tuple(t.shape)}; allowed: (batch,) = ({batch},)")
    if table is not None and side["cache_batch_idx"] is not None:
        raise ValueError("cache_batch_idx is given with a block_table; allowed: one of them")
    if table is None and side["cache_batch_idx"] is None and sequences != batch:
        raise ValueError(
            f"batch of k_cache is {sequences}; allowed: that of {name}, {batch}, without cache_batch_idx or "
            "block_table"
        )
    shapes = ((batch, heads_k), (sequences, slots, heads_k))
    for each in SCALES:
        t = side[each]
        if k_cache.dtype != E4M3:
            if t is not None:
                raise ValueError(f"{each} is given with a cache of {k_cache.dtype}; allowed: with {E4M3}")
            continue
        if not isinstance(t, Tensor):
            what = "None" if t is None else f"a {type(t).__name__}"
            raise TypeError(f"{each} is {what}; allowed with a cache of {E4M3}: a float32 torch.Tensor")
        if t.dtype != torch.float32:
            raise TypeError(f"{each} has dtype {t.dtype}; allowed: torch.float32")
        if tuple(t.shape) not in shapes:
            raise ValueError(f"{each} has shape {tuple(t.shape)}; allowed: {shapes[0]} or {shapes[1]}")
        if t.device != x.device:
            raise ValueError(f"{each} is on device {t.device}; allowed: that of {name}, {x.device}")
    k_descale, v_descale = (side[each] for each in SCALES)
    if k_descale is not None and v_descale is not None and v_descale.shape != k_descale.shape:
        raise ValueError(
            f"v_descale has shape {tuple(v_descale.shape)}; allowed: that of k_descale, {tuple(k_descale.shape)}"
        )
    return slots if table is None else slots * table.shape[1]


def check_query_scale(q: Tensor, heads_k: int, q_descale: object) -> None:
    """Refuse scales that do not fit q; those of an e4m3 q must be there.

    Raises:
        TypeError, ValueError: as `flash_attn_with_kvcache`.
    """
    if q.dtype != E4M3:
        if q_descale is not None:
            raise ValueError(f"q_descale is given with q of {q.dtype}; allowed: with {E4M3}")
        return
    if not isinstance(q_descale, Tensor):
        what = "None" if q_descale is None else f"a {type(q_descale).__name__}"
        raise TypeError(f"q_descale is {what}; allowed with q of {E4M3}: a float32 torch.Tensor")
    if q_descale.dtype != torch.float32:
        raise TypeError(f"q_descale has dtype {q_descale.dtype}; allowed: torch.float32")
    if tuple(q_descale.shape) != (q.shape[0], heads_k):
        raise ValueError(
            f"q_descale has shape {tuple(q_descale.shape)}; allowed: (batch, heads_k) = {(q.shape[0], heads_k)}"
        )
    if q_descale.device != q.device:
        raise ValueError(f"q_descale is on device {q_descale.device}; allowed: that of q, {q.device}")


def check_length(length: object, capacity: int, seqlen_new: int | None = None) -> int:
    """cache_seqlens where it is no tensor: an int, or None for all slots, of which there are `capacity`.

    Args:
        seqlen_new: tokens that are appended; None without.

    Raises:
        TypeError, ValueError: as `flash_attn_with_kvcache`.
    """
    if length is None and seqlen_new is None:
        return capacity
    if isinstance(length, bool) or not isinstance(length, int):
        allowed = "an int32 torch.Tensor or an int" + ("" if seqlen_new is not None else ", or None")
        what = "None" if length is None else f"a {type(length).__name__}"
        raise TypeError(f"cache_seqlens is {what}; allowed: {allowed}")
    most = capacity - (seqlen_new or 0)
    if not 0 <= length <= most:
        behind = "" if not seqlen_new else f" without the {seqlen_new} of k"
        raise ValueError(f"cache_seqlens is {length}; allowed: 0 to the slots of a sequence{behind}, {most}")
    return length


def _under_graph() -> bool:
    """Whether what this thread calls becomes a part of a CUDA graph, or of one of torch.compile."""
    return torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()


def lengths_of(length: int, batch: int, device: torch.device) -> Tensor:
    """(batch,) int32: `length` for each sequence; not to be written to.

    An element of `_numbers`, with stride 0. A kernel writes it where these end before it, or have not come to the
    device yet and cannot now, as a CUDA graph is captured or torch.compile traces.
    """
    numbers = _numbers.get(device)
    if numbers is None and device.type == "cuda" and not _under_graph():
        made = on_device(torch.arange(_LENGTHS, dtype=torch.int32, device="cpu"), device)
        numbers = _numbers.setdefault(device, made)
    if numbers is None or length >= _LENGTHS:
        return torch.full((batch,), length, dtype=torch.int32, device=device)
    return numbers.as_strided((batch,), (0,), length)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where its address or strides are no multiples of 16 bytes."""
    step = 16 // x.element_size()
    if x.data_ptr() % 16 or any(stride % step for stride in x.stride()[:-1]):
        return x.clone(memory_format=torch.contiguous_format)
    return x
