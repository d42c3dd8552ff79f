"""Launch of the 16-bit backward: gradients and workspace of one call."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import Bwd16Config, Bwd16Sm80Config
from cute_attn.launch import LOG2_E, _zero

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
        softmax_scale, softcap, window, alibi_slopes: those of the forward, see `launch.launch_forward16`.

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
    # of each part: key tiles that have added to it
    turns = torch.empty(
        (batch, heads_q, blocks, config.dq_parts) if config.deterministic else (1, 1, 1, 1),
        dtype=torch.int32,
        device=device,
    )
    if not config.deterministic:
        turns = turns.expand(batch, heads_q, blocks, config.dq_parts)
    row_bytes = 2 * (q.shape[3] + dout.shape[3]) + 4 * config.qk_columns  # of Q, dO and the sum of dQ
    head_bytes = heads_q // heads_k * seqlen_q * row_bytes
    left, right = window
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
        turns,
        softmax_scale,
        (softcap or softmax_scale) * LOG2_E,
        2.0 * LOG2_E * softmax_scale / softcap if softcap else 0.0,
        seqlen_k if left < 0 else min(left, seqlen_k),  # beyond, a window cuts nothing
        seqlen_q if right < 0 else min(right, seqlen_q),
        min(max(_BYTES_IN_TURN // head_bytes, 1), batch * heads_k),
    )
    return dq, dk, dv, rows[1, :, :, :seqlen_q]
