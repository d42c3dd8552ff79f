"""Launches of the 16-bit backward: gradients and workspace of one call."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import Bwd16Config, Bwd16Sm80Config
from cute_attn.launch import LOG2_E, _window_ends, _zero
from cute_attn.launch_varlen import slots

# Of Q, dO and the sum of dQ of the heads whose tiles are mixed under a causal mask: they stay in the L2 cache of 50 MB.
_BYTES_IN_TURN = 32 << 20


def launch_backward16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    config: Bwd16Config | Bwd16Sm80Config,
    *,
    dlse: Tensor | None = None,
    softmax_scale: float,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the compiled 16-bit backward of `config`.

    Args:
        q, k, v, out, dout: (batch, seqlen, heads, dim) of the dtype of `config` on a CUDA device, last stride 1,
            addresses and strides multiples of 16 bytes, no empty dimension; out is that of the forward.
        lse: (batch, heads_q, seqlen_q) float32, of the forward, any strides.
        dlse: gradient of lse, likewise; None: zero.
        softmax_scale, softcap, window, alibi_slopes: those of the forward, see `launch.Forward16`.

    Returns:
        (dq, dk, dv, d): gradients of the shapes and dtype of q, k, v, contiguous; d (batch, heads_q, seqlen_q) float32,
        rowsum(dout * out) - dlse.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    device = q.device
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    blocks = -(-seqlen_q // config.tile_m)
    rows = torch.empty((2, batch, heads_q, blocks * config.tile_m), dtype=torch.float32, device=device)
    dq_sum = torch.empty(
        (batch, heads_q, blocks, config.tile_m * config.qk_columns), dtype=torch.float32, device=device
    )
    # of each part: key tiles that have added to it, or of each head: CTAs that have cleared a share of its sum
    shape = (batch, heads_q, blocks if config.deterministic else 1, config.dq_parts)
    counted = config.deterministic or config.clears_ahead
    turns = torch.empty(shape if counted else (1, 1, 1, 1), dtype=torch.int32, device=device)
    zero = _zero(device)
    compile_kernel(config)(
        q,
        k,
        v,
        out,
        dout,
        lse,
        zero.expand(batch, heads_q, seqlen_q) if dlse is None else dlse,
        zero.expand(batch, heads_q) if alibi_slopes is None else alibi_slopes,
        dq,
        dk,
        dv,
        rows[0],
        rows[1],
        dq_sum,
        turns.expand(shape),
        *_factors(softmax_scale, softcap),
        *_window_ends(window, seqlen_q, seqlen_k),
        _heads_in_turn(config, batch * heads_k, heads_q // heads_k * seqlen_q),
    )
    return dq, dk, dv, rows[1, :, :, :seqlen_q]


def launch_backward16_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    config: Bwd16Config | Bwd16Sm80Config,
    *,
    seqused_k: Tensor | None = None,
    dlse: Tensor | None = None,
    softmax_scale: float,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the compiled 16-bit backward of `config`, which is one of sequences of unlike length.

    Args:
        q, k, v, out, dout: (total, heads, dim), otherwise as in `launch_backward16`.
        lse, dlse: (heads_q, total_q) float32, likewise.
        cu_seqlens_q, cu_seqlens_k, seqused_k: as in `flash_attn_varlen_func`.
        softmax_scale, softcap, window, alibi_slopes: those of the forward, see `launch.launch_forward16_varlen`.

    Returns:
        (dq, dk, dv, rows): gradients of the shapes and dtype of q, k, v, contiguous, 0 in rows of no sequence and of
        keys that do not count; rows (2, heads_q, slots) float32 is lse * log2(e) and d, of `launch_backward16`, in an
        order of the kernel's: slots of no row, and of rows that see no key, have inf and 0.
    """
    total_q, heads_q, _ = q.shape
    total_k, heads_k = k.shape[:2]
    batch, device = cu_seqlens_q.shape[0] - 1, q.device
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    blocks = slots(total_q, batch, config.tile_m)
    rows = torch.empty((2, heads_q, blocks * config.tile_m), dtype=torch.float32, device=device)
    dq_sum = torch.empty(
        (heads_q, blocks, config.tile_m * config.qk_columns), dtype=torch.float32, device=device
    )
    shape = (heads_q, blocks, config.dq_parts)
    turns = torch.empty(shape if config.deterministic else (1, 1, 1), dtype=torch.int32, device=device)
    zero = _zero(device)
    compile_kernel(config)(
        q,
        k,
        v,
        out,
        dout,
        lse,
        zero.expand(heads_q, total_q) if dlse is None else dlse,
        zero.expand(batch, heads_q) if alibi_slopes is None else alibi_slopes,
        dq,
        dk,
        dv,
        rows[0],
        rows[1],
        dq_sum,
        turns.expand(shape),
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k if seqused_k is None else seqused_k,
        *_factors(softmax_scale, softcap),
        *_window_ends(window, total_q, total_k),
        int(seqused_k is not None),
        _heads_in_turn(config, heads_k, heads_q // heads_k * -(-total_q // batch)),
    )
    return dq, dk, dv, rows


def _factors(softmax_scale: float, softcap: float) -> tuple[float, float, float]:
    """(softmax_scale, score_scale_log2, softcap_factor) of the kernel."""
    return (
        softmax_scale,
        (softcap or softmax_scale) * LOG2_E,
        2.0 * LOG2_E * softmax_scale / softcap if softcap else 0.0,
    )


def _heads_in_turn(config: Bwd16Config | Bwd16Sm80Config, heads: int, rows: int) -> int:
    """Of `heads` heads of K, those whose tiles are mixed under a causal mask; each has `rows` rows of queries."""
    row_bytes = (
        2 * (config.head_dim + config.head_dim_v) + 4 * config.qk_columns
    )  # of Q, dO and the sum of dQ
    return min(max(_BYTES_IN_TURN // (rows * row_bytes), 1), heads)
