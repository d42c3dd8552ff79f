"""8-bit attention over sequences of unlike length: `fp8_attention` of each, in one call.

The rows of all sequences stand behind one another, without padding, as in `cute_attn.flash_varlen`. Where kernels run
they alone read the lengths: nothing here waits for the device. The emulator reads them on the host.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from cute_attn import plan, tiles, validate
from cute_attn.api import _warn_emulator
from cute_attn.flash_varlen import _check_lengths, _check_max
from cute_attn.kernels.config import FwdConfig, QuantizeConfig
from cute_attn.problem import Features, cutting_ends, device_capability
from cute_attn.quantize import Fp8Recipe, quantize_reference, resolve_recipe
from cute_attn.remember import Remembered

if TYPE_CHECKING:
    from cute_attn.launch_varlen import VarlenAttention

__all__ = ["fp8_attention_varlen", "fp8_attention_varlen_kernel"]


def fp8_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    recipe: str | Fp8Recipe = "default",
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`fp8_attention` for each of several sequences of unlike length (FlashAttention-3, arXiv 2407.08608, section 3.3).

    Scales, mean keys, masks and biases are those of `fp8_attention` for each sequence by itself.

    Args:
        q: (total_q, heads_q, head_dim) float16 or bfloat16, the rows of all sequences behind one another; head_dim and
            strides as in `fp8_attention`.
        k: (total_k, heads_k, head_dim), likewise.
        v: (total_k, heads_k, head_dim_v), likewise.
        cu_seqlens_q: (batch + 1,) int32, contiguous, on the device of q: sequence b has rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of q. Values lie between 0 and total_q and never fall; a sequence may be empty. They
            cannot be checked without waiting for the device, so they are not: with others the result is undefined.
        cu_seqlens_k: (batch + 1,) int32, likewise for k and v.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, as flash-attn wants it. Nothing depends on them: the
            kernels read the lengths.
        recipe: as in `fp8_attention`, but for scales of a whole tensor or head ("naive").
        causal, softmax_scale, window_size, softcap, sinks, out_dtype: as in `fp8_attention`.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32, likewise.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: as in `fp8_attention`; the emulator takes the sequences in turn, and waits for their lengths.

    Returns:
        out (total_q, heads_q, head_dim_v) of `out_dtype`; with `return_lse` also lse (heads_q, total_q) float32,
        natural log. A row that sees no key has out 0, and lse -inf or its sink. Rows before the first sequence and
        behind the last are not written. A NaN or infinity makes NaN what depends on its scale group, in its sequence
        alone.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or "sm90" without a Hopper GPU.
        NotImplementedError: the recipe has scales of a whole tensor or head, or grad mode is on and an input requires
            grad.
    """
    ends: dict[str, Tensor | None] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    side: dict[str, Tensor | None] = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    asked = (
        recipe,
        causal,
        window_size,
        softcap,
        softmax_scale,
        backend,
        out_dtype,
        max_seqlen_q,
        max_seqlen_k,
    )
    key, call = _calls.find((q, k, v, *ends.values(), *side.values()), asked, window_size)
    found, scale = None, 0.0
    if call is None:
        _check_max("max_seqlen_q", max_seqlen_q)
        _check_max("max_seqlen_k", max_seqlen_k)
        found = _plan(
            q, k, v, ends, recipe, causal, window_size, softcap, alibi_slopes, sinks, backend, out_dtype
        )
        scale = validate.check_softmax_scale(softmax_scale, q.shape[2])
        if found.backend == "sm90" and not found.is_empty:
            call = _calls.keep(key, _prepare(found, q.shape, k.shape, scale, q.device))
    validate.check_forward_only(q=q, k=k, v=v, **side)
    slopes = None if alibi_slopes is None else alibi_slopes.expand(len(cu_seqlens_q) - 1, q.shape[1])
    if call is not None:
        return call(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse, slopes, sinks)
    assert found is not None
    if backend == "auto" and not found.is_empty:
        _warn_emulator(found.reason)
    out, lse = _emulate(q, k, v, cu_seqlens_q, cu_seqlens_k, found, scale, slopes, sinks)
    return (out, lse) if return_lse else out


def fp8_attention_varlen_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    recipe: str | Fp8Recipe = "default",
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> str:
    """Name of the forward kernel that `fp8_attention_varlen` runs with these arguments, without running it.

    Args: as those of `fp8_attention_varlen`, with the same shapes.

    Returns:
        the kernel's name, "emulator(...)" around it where the emulator runs, or "none" where nothing is launched.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fp8_attention_varlen`.
    """
    ends: dict[str, Tensor | None] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    found = _plan(
        q, k, v, ends, recipe, causal, window_size, softcap, alibi_slopes, sinks, backend, out_dtype
    )
    if found.is_empty:
        return "none"
    return found.config.name if found.backend == "sm90" else f"emulator({found.config.name})"


# ------------------------------------------------------------------------------------------------------------
# Checks and plan
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VarlenPlan:
    backend: str  # "sm90" or "emulator"
    reason: str  # for it
    recipe: Fp8Recipe
    quantize_config: QuantizeConfig
    config: FwdConfig
    features: Features  # the window with causal's end in it
    batch: int
    is_empty: bool  # no row sees a key, whatever the lengths, which would have to be awaited


def _plan(
    q: object,
    k: object,
    v: object,
    ends: dict[str, Tensor | None],
    recipe: str | Fp8Recipe,
    causal: bool,
    window_size: object,
    softcap: object,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    backend: str,
    out_dtype: torch.dtype | None,
) -> VarlenPlan:
    """Check everything but the scale, and plan."""
    one = [_as_batch(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    validate.check_inputs(*one)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    batch = _check_lengths(q, ends)
    left, right = validate.check_window_size(window_size)
    if validate.check_causal(causal):
        right = 0
    cap = validate.check_softcap(softcap)
    validate.check_side_tensors(batch, q.shape[1], q.device, alibi_slopes, sinks)
    features = Features((left, right), cap, alibi_slopes is not None, sinks is not None)
    capability = device_capability(q.device)
    validate.check_backend(backend, capability)
    return choose(
        tuple(q.shape),
        tuple(v.shape),
        q.dtype,
        batch,
        resolve_recipe(recipe),
        features,
        capability,
        backend,
        validate.check_out_dtype(out_dtype, q.dtype),
    )


def _as_batch(name: str, x: object) -> object:
    """Rows of all sequences as a batch of one, for the checks of a batch."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        return x
    if x.dim() != 3:
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; allowed: 3, (total, heads, head_dim)"
        )
    return x.unsqueeze(0)


_OF_MANY: Final = ("tensor", "head")  # scales that sequences of unlike length do not have


def _scales(recipe: Fp8Recipe) -> dict[str, str]:
    return {"q_scale": recipe.q_scale, "k_scale": recipe.k_scale, "v_scale": recipe.v_scale}


def takes_recipe(recipe: Fp8Recipe) -> bool:
    """Whether `fp8_attention_varlen` takes a recipe."""
    return not any(mode in _OF_MANY for mode in _scales(recipe).values())


@functools.lru_cache(maxsize=4096)
def choose(
    shape_q: tuple[int, ...],
    shape_v: tuple[int, ...],
    dtype: torch.dtype,
    batch: int,
    recipe: Fp8Recipe,
    features: Features,
    capability: tuple[int, int] | None,
    backend: str,
    out_dtype: torch.dtype,
) -> VarlenPlan:
    """The kernels, as if all sequences had the mean length. Pure."""
    for name, mode in _scales(recipe).items():
        if mode in _OF_MANY:
            raise NotImplementedError(
                f"recipe {recipe.name!r} has {name} {mode!r}, which sequences of unlike length do not have; allowed: "
                "scales of tokens and blocks"
            )
    (total_q, heads_q, head_dim), (total_k, heads_k, head_dim_v) = shape_q, shape_v
    left, right = cutting_ends(
        features.window, total_q, total_k
    )  # as if of one sequence: the others are shorter
    causal = (left, right) == (-1, 0)
    window = not causal and (left, right) != (-1, -1)
    seqlen_q, seqlen_k = (-(-total // max(batch, 1)) for total in (total_q, total_k))
    rounding = tiles.rounding_of(recipe, features.adjusts)
    key = (head_dim, head_dim_v, recipe.qk_dtype, causal, rounding)
    tile = tiles.find_tile(*key, seqlen_k, window)
    pack_gqa, _ = plan.choose_pack_gqa(heads_q // heads_k, seqlen_q, tile.tile_m, True)
    config = tiles.forward_config(
        *key,
        tiles.DTYPE_NAMES[out_dtype],
        pack_gqa,
        seqlen_k=seqlen_k,
        window=window,
        softcap=features.softcap > 0,
        alibi=features.alibi,
        sinks=features.sinks,
        varlen=True,
    )
    chosen, reason = plan.choose_backend(capability, backend)
    return VarlenPlan(
        backend=chosen,
        reason=reason,
        recipe=recipe,
        quantize_config=tiles.quantize_config(
            recipe, head_dim, head_dim_v, tiles.DTYPE_NAMES[dtype], varlen=True
        ),
        config=config,
        features=Features((left, right), features.softcap, features.alibi, features.sinks),
        batch=batch,
        is_empty=0 in (batch, total_q, total_k),
    )


# ------------------------------------------------------------------------------------------------------------
# From a plan to a result
# ------------------------------------------------------------------------------------------------------------

_calls: Remembered[VarlenAttention] = Remembered()


def _prepare(
    found: VarlenPlan, shape_q: torch.Size, shape_k: torch.Size, scale: float, device: torch.device
) -> VarlenAttention:
    """The call of the kernels for these shapes, made ready."""
    from cute_attn.launch_varlen import VarlenAttention

    return VarlenAttention(
        shape_q,
        shape_k,
        found.batch,
        found.recipe,
        found.quantize_config,
        found.config,
        scale,
        device,
        found.features,
    )


def _emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    found: VarlenPlan,
    scale: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Each sequence by itself, by the emulator; (out, lse). Rows of no sequence are as those without keys."""
    from cute_attn.emulator import emulate_forward

    config, heads_q = found.config, q.shape[1]
    dtype = torch.bfloat16 if config.out_dtype == "bf16" else torch.float16
    out = torch.zeros(q.shape[0], heads_q, v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full((heads_q, q.shape[0]), -math.inf, dtype=torch.float32, device=q.device)
    if sinks is not None:
        lse.copy_(sinks[:, None])
    if found.is_empty:
        return out, lse
    ends = (itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
    for b, ((row, row_end), (key, key_end)) in enumerate(zip(*ends, strict=True)):
        if row == row_end or key == key_end:
            continue
        rows, keys = slice(row, row_end), slice(key, key_end)
        part, part_lse = emulate_forward(
            quantize_reference(q[None, rows], k[None, keys], v[None, keys], found.recipe),
            softmax_scale=scale,
            window=found.features.window,
            softcap=found.features.softcap,
            alibi_slopes=None if slopes is None else slopes[b : b + 1],
            sinks=sinks,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            pack_gqa=config.pack_gqa,
            check_keys=config.check_keys,
            out_dtype=dtype,
        )
        out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse
