"""Calls of the compiled kernels: outputs, scratch, device and stream.

The compiled functions take torch tensors as they are (TVM-FFI), check dtype, rank, shape and strides, and
launch on the current stream of the tensors' device. Nothing here synchronises, but for the constants that
a device gets at its first call.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import (
    K_SCALE_GROUP,
    K_SCALE_PAD,
    MEAN_STRIDE,
    QUANTIZE_ROWS_LIMIT,
    V_KEY_PERMUTATION,
    V_SCALE_GROUP,
    Fwd16Config,
    FwdConfig,
    QuantizeConfig,
)
from cute_attn.quantize import (
    Fp8Recipe,
    QuantizedQKV,
    mean_chunks,
    mean_key,
    rotation_signs,
    static_amax,
)
from cute_attn.schedule import heads_in_turn

LOG2_E = math.log2(math.e)

_ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current for a launch; free where it already is."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


@lru_cache(maxsize=64)
def _zero(device: torch.device) -> Tensor:
    """One float32 zero, expanded wherever a kernel wants a tensor that this call has no use for.

    Copied from the host, which waits for it: a fill would come before later launches of the current stream
    alone, and this tensor serves every stream.
    """
    return torch.zeros(1, dtype=torch.float32, device="cpu").to(device)


@lru_cache(maxsize=64)
def _signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    return rotation_signs(head_dim, seed, device=device)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def launch_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Fp8Recipe,
    config: QuantizeConfig,
    *,
    k_mean: Tensor | None = None,
) -> QuantizedQKV:
    """Quantise with the compiled kernels of `config`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) bf16 or fp16 on a CUDA device, last stride 1.
        k, v: (batch, seqlen_k, heads_k, head_dim), likewise.
        recipe: what `config` was planned from.
        k_mean: (batch, heads_k, head_dim) float32 to subtract from K where the recipe smooths; default
            `mean_key(k)`.

    Raises:
        ValueError: more rows than the quantiser's grid covers.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, _ = k.shape
    for name, seqlen in (("q", seqlen_q), ("k", seqlen_k)):
        if seqlen > QUANTIZE_ROWS_LIMIT:
            raise ValueError(f"{name} has {seqlen} rows; the quantiser takes at most {QUANTIZE_ROWS_LIMIT}")
    device = q.device
    with _on(device):
        zero = _zero(device)
        rotate = recipe.rotation == "hadamard"
        signs = _signs(head_dim, recipe.rotation_seed, device) if rotate else zero.expand(head_dim)
        if recipe.smooth_k and k_mean is None and config.k_mode == "static":
            k_mean = mean_key(k)  # wanted below, before any kernel runs
        # What the mean key is made of: its sums over chunks, which the kernels leave there, or itself, as one sum.
        chunk, count = 0, 1
        if not recipe.smooth_k:
            sums = zero.expand(batch, 1, heads_k, head_dim)
        elif k_mean is not None:
            sums = k_mean.unsqueeze(1)
        else:
            chunk, chunks = mean_chunks(seqlen_k)
            count = _ceil_div(seqlen_k, MEAN_STRIDE)
            sums = torch.empty((batch, chunks, heads_k, head_dim), dtype=torch.float32, device=device)
        amax_q = amax_k = amax_v = None
        if config.q_mode == "static":
            amax_q = static_amax(q, recipe.q_scale, signs=signs if rotate else None)  # type: ignore[arg-type]
        if config.k_mode == "static":
            amax_k = static_amax(
                k,
                recipe.k_scale,  # type: ignore[arg-type]
                mean=k_mean,
                signs=signs if rotate else None,
            )
        if config.v_mode == "static":
            amax_v = static_amax(v, recipe.v_scale)  # type: ignore[arg-type]
        code = _CODES[recipe.qk_dtype]
        q8 = torch.empty((batch, seqlen_q, heads_q, head_dim), dtype=code, device=device)
        k8 = torch.empty((batch, seqlen_k, heads_k, head_dim), dtype=code, device=device)
        padded = _ceil_div(seqlen_k, V_KEY_PERMUTATION) * V_KEY_PERMUTATION
        vt = torch.empty((batch, heads_k, head_dim, padded), dtype=torch.float8_e4m3fn, device=device)
        q_scale = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=device)
        q_dot = torch.empty_like(q_scale) if recipe.smooth_k else q_scale  # else not written
        k_groups, v_groups = _ceil_div(seqlen_k, K_SCALE_GROUP), _ceil_div(seqlen_k, V_SCALE_GROUP)
        k_width = _ceil_div(k_groups, K_SCALE_PAD) * K_SCALE_PAD
        k_scale = torch.empty((batch, heads_k, k_width), dtype=torch.float32, device=device)[..., :k_groups]
        v_scale = torch.empty((batch, heads_k, v_groups), dtype=torch.float32, device=device)
        compile_kernel(config)(
            q,
            k,
            v,
            signs,
            sums,
            zero.expand(batch, heads_q) if amax_q is None else amax_q,
            zero.expand(batch, heads_k) if amax_k is None else amax_k,
            zero.expand(batch, heads_k) if amax_v is None else amax_v,
            q8,
            k8,
            vt,
            q_scale,
            k_scale,
            v_scale,
            q_dot,
            chunk,
            count,
        )
    return QuantizedQKV(
        q=q8,
        k=k8,
        vt=vt,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        q_dot_mean=q_dot if recipe.smooth_k else None,
        seqlen_k=seqlen_k,
        recipe=recipe,
        dtype=q.dtype,
    )


def launch_transpose_v(v: Tensor, config: QuantizeConfig) -> Tensor:
    """Ready e4m3 V (batch, seqlen_k, heads_k, head_dim) to the forward kernel's operand.

    Returns:
        (batch, heads_k, head_dim, seqlen_k rounded up to a multiple of V_KEY_PERMUTATION) e4m3.
    """
    batch, seqlen_k, heads_k, head_dim = v.shape
    padded = _ceil_div(seqlen_k, V_KEY_PERMUTATION) * V_KEY_PERMUTATION
    with _on(v.device):
        vt = torch.empty((batch, heads_k, head_dim, padded), dtype=v.dtype, device=v.device)
        compile_kernel(config)(v, vt)
    return vt


def _padded_rows(k_scale: Tensor) -> Tensor:
    """K scales with contiguous rows that are readable to a multiple of K_SCALE_PAD; copied if need be."""
    batch, heads, groups = k_scale.shape
    width = _ceil_div(groups, K_SCALE_PAD) * K_SCALE_PAD
    s0, s1, s2 = k_scale.stride()
    end = k_scale.storage_offset() + (batch - 1) * s0 + (heads - 1) * s1 + width
    aligned = s2 == 1 and s0 % K_SCALE_PAD == 0 and s1 % K_SCALE_PAD == 0 and k_scale.data_ptr() % 16 == 0
    if aligned and 4 * end <= k_scale.untyped_storage().nbytes():
        return k_scale
    return torch.nn.functional.pad(k_scale, (0, width - groups), value=1.0).contiguous()[..., :groups]


def launch_forward(
    qkv: QuantizedQKV, config: FwdConfig, *, causal: bool, softmax_scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run the compiled forward kernel of `config`.

    Returns:
        (out, lse): (batch, seqlen_q, heads_q, head_dim) of `out_dtype`, (batch, heads_q, seqlen_q) float32.
    """
    assert config.causal == causal and _ELEMENTS[config.out_dtype] == out_dtype, "plan and call disagree"
    q = qkv.q
    batch, seqlen_q, heads_q, head_dim = q.shape
    device = q.device
    with _on(device):
        out = torch.empty((batch, seqlen_q, heads_q, head_dim), dtype=out_dtype, device=device)
        lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=device)
        lse_add = qkv.q_dot_mean
        if lse_add is None:
            lse_add = _zero(device).expand(batch, heads_q, seqlen_q)
        compile_kernel(config)(
            q,
            qkv.k,
            qkv.vt,
            qkv.q_scale,
            _padded_rows(qkv.k_scale),
            qkv.v_scale if qkv.v_scale.stride(2) == 1 else qkv.v_scale.contiguous(),
            lse_add,
            out,
            lse,
            softmax_scale,
            softmax_scale * LOG2_E,
        )
    return out, lse


@lru_cache(maxsize=64)
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_forward16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: Fwd16Config,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the compiled 16-bit forward kernel of `config`.

    Args:
        q, k, v: (batch, seqlen, heads, dim) of the dtype of `config` on a CUDA device, last stride 1, addresses and
            strides multiples of 16 bytes, no empty dimension.
        softmax_scale: any finite factor.
        softcap: > 0 where `config` has it.
        window: keys before and behind a query's own position, -1 for all; read where `config` has it.
        alibi_slopes: (batch, heads_q) float32, any strides, where `config` has it.
        sinks: (heads_q,) float32, likewise.
        sms: CTAs at most; default the SMs of the device.

    Returns:
        (out, lse): (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, (batch, heads_q, seqlen_q) float32.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    device = q.device
    with _on(device):
        # The kernel takes the maximum of scores before the scale, which must be > 0 for that. Signs and zero go to Q.
        if softmax_scale <= 0:
            q = q * math.copysign(1.0, softmax_scale) if softmax_scale else q * 0.0
            softmax_scale = -softmax_scale or 1.0
        out = torch.empty((batch, seqlen_q, heads_q, head_dim_v), dtype=q.dtype, device=device)
        lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=device)
        left, right = window
        sms = _sm_count(device) if sms is None else sms
        compile_kernel(config)(
            q,
            k,
            v,
            out,
            lse,
            _zero(device).expand(batch, heads_q) if alibi_slopes is None else alibi_slopes,
            _zero(device).expand(heads_q) if sinks is None else sinks,
            (softcap or softmax_scale) * LOG2_E,
            2.0 * LOG2_E * softmax_scale / softcap if softcap else 0.0,
            seqlen_k if left < 0 else min(left, seqlen_k),  # beyond, a window cuts nothing
            seqlen_q if right < 0 else min(right, seqlen_q),
            sms,
            heads_in_turn(config, batch, heads_q, heads_k, seqlen_q, seqlen_k, sms),
        )
    return out, lse
