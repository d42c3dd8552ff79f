"""New keys and values into a KV cache: checks, plan, launch, and the definition in torch.

`append_kv` is the call by itself; `flash_attn_with_kvcache` does the same before it attends. One kernel
(kernels/decode/append.py) writes K and V and prepares Q. Its arithmetic is that of `cute_attn.quantize`, with one scale
for each token and head, or with the scales of heads that the caller gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from cute_attn import kv, validate
from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import E4M3_MAX, AppendConfig
from cute_attn.quantize import (
    Rotary,
    _float32,
    _transform,
    amax_scale,
    check_tables,
    scale_norm,
    to_e4m3,
)
from cute_attn.tiles import DTYPE_NAMES

__all__ = ["append_kv"]

TENSORS: Final = ("k", "v", "rotary_cos", "rotary_sin", "rotation_signs")  # what an append adds to a call


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: int | Tensor,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    rotation_signs: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write new keys and values into a cache, as `flash_attn_with_kvcache` does before it attends.

    What a token becomes does not depend on the tokens that come with it: a cache filled token by token equals one
    filled at once, bit for bit. Tokens past the last slot of a sequence are not written.

    Args:
        k: (batch, seqlen_new, heads_k, head_dim) float16 or bfloat16, last stride 1.
        v: (batch, seqlen_new, heads_k, head_dim_v), dtype of k.
        cache_seqlens: tokens that each sequence has: (batch,) int32 on the device of k, or an int. They stay as they
            are.
        k_cache, v_cache, cache_batch_idx, block_table, rotary_cos, rotary_sin, rotary_interleaved, rotation_signs: as
            those of `flash_attn_with_kvcache`.
        k_descale, v_descale: likewise; scales of tokens are written, those of heads are read.
        backend: as that of `flash_attn_with_kvcache`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_with_kvcache`.
    """
    kv.check_caches("k", k, k_cache, v_cache)
    side: dict[str, Tensor | None] = {
        "cache_seqlens": cache_seqlens if isinstance(cache_seqlens, Tensor) else None,
        "cache_batch_idx": cache_batch_idx,
        "block_table": block_table,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    capacity = kv.check_places("k", k, k_cache, side)
    new: dict[str, Tensor | None] = {
        "k": k,
        "v": v,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotation_signs": rotation_signs,
    }
    check_append("k", k, k_cache, v_cache, capacity, new, rotary_interleaved)
    arch = kv.target(backend, "k", k, k_cache.dtype)
    validate.check_forward_only("cached", **new, k_cache=k_cache, v_cache=v_cache)
    if isinstance(cache_seqlens, Tensor):
        seqlens = cache_seqlens
    else:
        length = kv.check_length(cache_seqlens, capacity, k.shape[1])
        seqlens = kv.lengths_of(length, k.shape[0], k.device)
    places = {**side, "cache_seqlens": seqlens}
    if 0 in k.shape:
        return
    if arch is None:
        append_reference(k_cache, v_cache, new, places, rotary_interleaved)
        return
    config = append_config(k, k_cache, v_cache, new, side, rotary_interleaved, queries=False, arch=arch)
    launch_append(None, k_cache, v_cache, config, new, places)


def check_append(
    name: str,
    x: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    capacity: int,
    new: Mapping[str, Tensor | None],
    rotary_interleaved: object,
) -> None:
    """Refuse `new` (`TENSORS`) that does not fit the tensor `x`, called `name`, and the caches, which are checked.

    Args:
        capacity: slots of a sequence.

    Raises:
        TypeError, ValueError: as `flash_attn_with_kvcache`.
    """
    k, v, cos, sin, signs = (new[each] for each in TENSORS)
    for given, missing in (("k", "v"), ("v", "k")):
        if new[given] is not None and new[missing] is None:
            raise ValueError(f"{given} is given and {missing} is None; allowed: both or none")
    for each, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if t is None:
            continue
        validate._check_tensor(each, t, (x.dtype,), f", that of {name}")
        if t.device != x.device:
            raise ValueError(f"{each} is on device {t.device}; allowed: that of {name}, {x.device}")
        for i, what, owner, allowed in (
            (0, "batch", name, x.shape[0]),
            (2, "heads", f"{each}_cache", cache.shape[2]),
            (3, "head_dim", f"{each}_cache", cache.shape[3]),
        ):
            if t.shape[i] != allowed:
                raise ValueError(f"{what} of {each} is {t.shape[i]}; allowed: that of {owner}, {allowed}")
    if k is not None and v is not None and v.shape[1] != k.shape[1]:
        raise ValueError(f"seqlen of v is {v.shape[1]}; allowed: that of k, {k.shape[1]}")
    if type(rotary_interleaved) is not bool:
        raise TypeError(f"rotary_interleaved is {rotary_interleaved!r}; allowed: a bool")
    if cos is not None or sin is not None:
        if k is None:
            table = "rotary_sin" if cos is None else "rotary_cos"
            raise ValueError(f"{table} is given and k is None; allowed: with k")
        check_tables(x, capacity, "the slots of a sequence", cos, sin)
    if signs is not None:
        if not isinstance(signs, Tensor):
            raise TypeError(
                f"rotation_signs is a {type(signs).__name__}; allowed: a float32 torch.Tensor or None"
            )
        if k_cache.dtype != kv.E4M3:
            raise ValueError(
                f"rotation_signs is given with a cache of {k_cache.dtype}; allowed: with {kv.E4M3}"
            )
        if signs.dtype != torch.float32:
            raise TypeError(f"rotation_signs has dtype {signs.dtype}; allowed: torch.float32")
        if tuple(signs.shape) != (x.shape[3],):
            raise ValueError(
                f"rotation_signs has shape {tuple(signs.shape)}; allowed: (head_dim,) = ({x.shape[3]},)"
            )
        if signs.device != x.device:
            raise ValueError(
                f"rotation_signs is on device {signs.device}; allowed: that of {name}, {x.device}"
            )


def append_config(
    x: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: Mapping[str, Tensor | None],
    side: Mapping[str, Tensor | None],
    rotary_interleaved: bool,
    *,
    queries: bool,
    arch: str,
) -> AppendConfig:
    """The kernel that appends `new` to the caches; `queries`: that also embeds and rotates Q."""
    keys = new["k"] is not None
    fp8 = k_cache.dtype == kv.E4M3
    descale = side["k_descale"]
    return AppendConfig(
        head_dim=k_cache.shape[3],
        head_dim_v=v_cache.shape[3],
        in_dtype=DTYPE_NAMES[x.dtype],
        cache="e4m3" if fp8 else "16bit",
        scales="none" if not fp8 else "token" if descale is not None and descale.dim() == 3 else "head",
        paged=keys and side["block_table"] is not None,
        rotary="none" if new["rotary_cos"] is None else "interleaved" if rotary_interleaved else "half",
        rotate=new["rotation_signs"] is not None,
        batch_idx=keys and side["cache_batch_idx"] is not None,
        keys=keys,
        queries=queries,
        arch=arch,
    )


def launch_append(
    q: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    config: AppendConfig,
    new: Mapping[str, Tensor | None],
    side: Mapping[str, Tensor | None],
    *,
    q_step: int = 1,
) -> Tensor | None:
    """Run the compiled kernel of `config`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) with `config.queries`.
        new, side: as those of `append_config`, checked; side["cache_seqlens"] is a tensor.
        q_step: positions between rows of q: 1, or 0 where all are at that of the first new key.

    Returns:
        q embedded and rotated, contiguous; None without.
    """
    k, v, cos, sin, signs = (new[each] for each in TENSORS)
    q_out = None
    if config.queries:
        assert q is not None
        q = kv.aligned(q)
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        q = None
    if not config.keys:
        k = v = None
        side = {"cache_seqlens": side["cache_seqlens"]}
    compile_kernel(config)(
        q,
        q_out,
        None if k is None else kv.aligned(k),
        None if v is None else kv.aligned(v),
        k_cache if config.keys else None,
        v_cache if config.keys else None,
        side["cache_seqlens"],
        *(side.get(name) for name in ("cache_batch_idx", "block_table", "k_descale", "v_descale")),
        None if cos is None else kv.aligned(cos),
        None if sin is None else kv.aligned(sin),
        signs,
        q_step,
    )
    return q_out


def _places(
    cache: Tensor, b: int, first: int, end: int, side: Mapping[str, Tensor | None]
) -> tuple[Tensor | int, Tensor | slice]:
    """Index of slots first to end - 1 of sequence b in a cache, or in scales of tokens."""
    table, index = side["block_table"], side["cache_batch_idx"]
    if table is None:
        return b if index is None else int(index[b]), slice(first, end)
    slot = torch.arange(first, end, device=cache.device)
    return table[b, slot // cache.shape[1]].long(), slot % cache.shape[1]


def append_reference(
    k_cache: Tensor,
    v_cache: Tensor,
    new: Mapping[str, Tensor | None],
    side: Mapping[str, Tensor | None],
    rotary_interleaved: bool,
) -> None:
    """What the kernel writes, bit for bit, sequence by sequence in torch; arguments as those of `launch_append`."""
    k, v = new["k"], new["v"]
    seqlens, table = side["cache_seqlens"], side["block_table"]
    assert k is not None and v is not None and seqlens is not None
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    for b in range(k.shape[0]):
        length = int(seqlens[b])
        start, end = max(length, 0), min(length + k.shape[1], capacity)
        if start >= end:
            continue
        rows = slice(start - length, end - length)
        place = _places(k_cache, b, start, end, side)
        positions = torch.arange(start, end, device=k.device)
        keys = _turn(k[b : b + 1, rows], new, rotary_interleaved, positions)
        norm = scale_norm(k.shape[3], "none" if new["rotation_signs"] is None else "hadamard")
        _store(k_cache, side["k_descale"], place, b, keys, norm)
        _store(v_cache, side["v_descale"], place, b, v[b : b + 1, rows].float(), 1.0)


def _turn(x: Tensor, new: Mapping[str, Tensor | None], rotary_interleaved: bool, positions: Tensor) -> Tensor:
    """x (1, rows, heads, head_dim) in float32, embedded at its positions and rotated, without the norm."""
    cos, sin = new["rotary_cos"], new["rotary_sin"]
    rotary = None
    if cos is not None and sin is not None:
        rotary = Rotary(cos[positions], sin[positions], rotary_interleaved)
    return _transform(x, None, new["rotation_signs"], rotary)


def _store(
    cache: Tensor,
    descale: Tensor | None,
    place: tuple[Tensor | int, Tensor | slice],
    b: int,
    x: Tensor,
    norm: float,
) -> None:
    """x (1, rows, heads, columns) float32 into the cache, as codes where that is e4m3, whose scales of tokens are
    written too."""
    rows = x[0]
    if descale is None:
        cache[place] = rows.to(cache.dtype)
        return
    if descale.dim() == 3:
        inverse, scale = amax_scale(rows.abs().amax(dim=-1), E4M3_MAX, norm)
        descale[place] = scale
    else:
        inverse = (torch.full_like(descale[b], _float32(norm)) / descale[b]).expand(rows.shape[:2])
    codes = to_e4m3(rows * inverse.unsqueeze(-1))
    cache.view(torch.uint8)[place] = codes.view(torch.uint8)  # not all of torch indexes e4m3


def queries_reference(
    q: Tensor,
    new: Mapping[str, Tensor | None],
    seqlens: Tensor,
    rotary_interleaved: bool,
    q_step: int,
) -> Tensor:
    """q (batch, seqlen_q, heads_q, head_dim) as the kernel embeds and rotates it."""
    cos, signs = new["rotary_cos"], new["rotation_signs"]
    out = torch.empty_like(q)
    norm = scale_norm(q.shape[3], "none" if signs is None else "hadamard")
    for b in range(q.shape[0]):
        positions = int(seqlens[b]) + q_step * torch.arange(q.shape[1], device=q.device)
        if cos is not None:
            positions = positions.clamp(0, cos.shape[0] - 1)
        x = _turn(q[b : b + 1], new, rotary_interleaved, positions)
        out[b] = (x[0] if signs is None else x[0] * _float32(norm)).to(q.dtype)
    return out
