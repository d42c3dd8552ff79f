"""Calls of the 16-bit backward: gradients and workspace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import Bwd16Config, Bwd16Sm80Config
from cute_attn.launch import _ELEMENTS, LOG2_E, _sms, _window_ends, _zero
from cute_attn.launch_varlen import slots
from cute_attn.memory import new_empty

# Queries of a head up to which, and from which at head_dim 64, fewer heads are mixed, see `_bytes_in_turn`
_SHORT_HEADS, _LONG_HEADS = 512, 16384


class Backward16:
    """The 16-bit backward of one configuration, shape, mask, scale and device, made ready for many calls.

    `backward(q, k, v, out, lse, dout)` launches it. What a call allocates is its gradients and its workspace, nothing
    else runs in torch.
    """

    def __init__(
        self,
        shape_q: tuple[int, ...],
        shape_v: tuple[int, ...],
        config: Bwd16Config | Bwd16Sm80Config,
        device: torch.device,
        *,
        batch: int,
        softmax_scale: float,
        softcap: float = 0.0,
        window: tuple[int, int] = (-1, -1),
    ):
        """
        Args:
            shape_q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) of sequences of unlike
                length, no dimension empty.
            shape_v: (batch, seqlen_k, heads_k, head_dim_v), or (total_k, heads_k, head_dim_v), likewise.
            batch: sequences.
            softmax_scale, softcap, window: those of the forward, see `launch.Forward16`.
        """
        *of_batch, rows_q, heads_q, head_dim = shape_q
        rows_k, heads_k, _ = shape_v[-3:]
        if config.varlen:
            blocks, heads, queries = slots(rows_q, batch, config.tile_m), heads_k, -(-rows_q // batch)
        else:
            blocks, heads, queries = -(-rows_q // config.tile_m), batch * heads_k, rows_q
        self._varlen = config.varlen
        self._kernel = compile_kernel(config)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
            return new_empty((*of_batch, *shape), dtype, device)

        element = _ELEMENTS[config.dtype]
        self._new_dq = new(rows_q, heads_q, head_dim, dtype=element)
        self._new_dk = new(rows_k, heads_k, head_dim, dtype=element)
        self._new_dv = new(*shape_v[-3:], dtype=element)
        self._new_rows = new(heads_q, blocks * config.tile_m)
        self._new_sum = new(heads_q, blocks, config.tile_m * config.qk_columns)
        # of each part of a tile of dQ: key tiles that have added to it; or of each head: CTAs that have cleared a share
        turns = (heads_q, blocks if config.deterministic else 1, config.dq_parts)
        if config.deterministic or config.clears_ahead:
            self._new_turns = new(*turns, dtype=torch.int32)
        else:
            nothing = _zero(device).view(torch.int32).expand(*of_batch, *turns)
            self._new_turns = lambda: nothing
        self._no_dlse = _zero(device).expand(*of_batch, heads_q, rows_q)
        self._no_slopes = _zero(device).expand(batch, heads_q)
        self._scalars = (*_factors(softmax_scale, softcap), *_window_ends(window, rows_q, rows_k))
        self._turn = _heads_in_turn(config, heads, heads_q // heads_k, queries)
        self._ctas: tuple[int, ...] = ()
        if not config.varlen:
            persistent = isinstance(config, Bwd16Config) and config.persistent
            self._ctas = (_sms(device) if persistent else 0,)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        lengths: tuple[Tensor, Tensor, Tensor | None] | None = None,
        *,
        dlse: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Run the kernels.

        Args:
            q, k, v, out, dout: of the shapes planned for and the dtype of the configuration on the device, last stride
                1, addresses and strides multiples of 16 bytes; out is that of the forward.
            lse: (batch, heads_q, seqlen_q), or (heads_q, total_q), float32, of the forward, any strides.
            lengths: cu_seqlens_q, cu_seqlens_k and seqused_k as in `flash_attn_varlen_func`, of sequences of unlike
                length; else None.
            dlse: gradient of lse, likewise; None: zero.
            alibi_slopes: (batch, heads_q) float32, any strides, where the configuration has ALiBi; else None.

        Returns:
            (dq, dk, dv, lse2, d): gradients of the shapes and dtype of q, k, v, contiguous, of unlike lengths 0 in rows
            of no sequence and of keys that do not count; lse * log2(e) and rowsum(dout * out) - dlse, both float32
            (batch, heads_q, rows), of which the first seqlen_q count, or of unlike lengths (heads_q, slots) in an order
            of the kernel's: slots of no row, and of rows that see no key, have inf and 0.
        """
        dq, dk, dv = self._new_dq(), self._new_dk(), self._new_dv()
        lse2, d = self._new_rows(), self._new_rows()
        ends: tuple[Tensor, ...] = ()
        used: tuple[int, ...] = ()
        if self._varlen:
            assert lengths is not None
            cu_q, cu_k, used_k = lengths
            ends, used = (cu_q, cu_k, cu_k if used_k is None else used_k), (int(used_k is not None),)
        self._kernel(
            q,
            k,
            v,
            out,
            dout,
            lse,
            self._no_dlse if dlse is None else dlse,
            self._no_slopes if alibi_slopes is None else alibi_slopes,
            dq,
            dk,
            dv,
            lse2,
            d,
            self._new_sum(),
            self._new_turns(),
            *ends,
            *self._scalars,
            *used,
            self._turn,
            *self._ctas,
        )
        return dq, dk, dv, lse2, d


def _factors(softmax_scale: float, softcap: float) -> tuple[float, float, float]:
    """(softmax_scale, score_scale_log2, softcap_factor) of the kernel."""
    return (
        softmax_scale,
        (softcap or softmax_scale) * LOG2_E,
        2.0 * LOG2_E * softmax_scale / softcap if softcap else 0.0,
    )


def _heads_in_turn(config: Bwd16Config | Bwd16Sm80Config, heads: int, group: int, queries: int) -> int:
    """Of `heads` heads of K, those whose tiles are mixed where `scheduler.sectioned`; each has `group` heads of
    `queries`."""
    rows = group * queries
    # of Q, dO and the sum of dQ
    row_bytes = 2 * (config.head_dim + config.head_dim_v) + 4 * config.qk_columns
    most = _bytes_in_turn(config, queries)
    return min(max(most // (rows * row_bytes), 1), heads)


def _bytes_in_turn(config: Bwd16Config | Bwd16Sm80Config, queries: int) -> int:
    """Of Q, dO and the sum of dQ of the heads whose tiles are mixed, so that they stay in the L2 cache of 50 MB beside
    what is cleared ahead, K, V, dK and dV. Short heads have many of these (perf/log.md, run 22).
    """
    hopper = isinstance(config, Bwd16Config)  # with the other kernel not measured
    if hopper and queries <= _SHORT_HEADS:
        return 8 << 20
    return (16 if hopper and config.qk_columns <= 64 and queries >= _LONG_HEADS else 32) << 20
