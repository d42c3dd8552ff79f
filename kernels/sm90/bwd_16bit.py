"""The 16-bit backward on Hopper: the entries that are compiled. Tensors are listed in bwd.py."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..any.bwd_passes import BwdEpilogue, BwdPrologue
from ..common.varlen import one_batch
from ..config import Bwd16Config
from .bwd import Bwd16Main
from .bwd_producer import heads_ahead


class Bwd16bitSm90:
    """One 16-bit configuration: three launches on one stream. Call it inside `cute.compile` with (fake) tensors."""

    def __init__(self, cfg: Bwd16Config):
        self.main = Bwd16Main(cfg)
        self.before = BwdPrologue(cfg)
        self.behind = BwdEpilogue(cfg)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        dout: cute.Tensor,
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) float32, natural log
        dlse: cute.Tensor,  # likewise, may be expanded
        slopes: cute.Tensor,
        dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        dk: cute.Tensor,
        dv: cute.Tensor,
        lse2: cute.Tensor,  # these three: workspace, see bwd.py
        d_rows: cute.Tensor,
        dq_sum: cute.Tensor,
        turns: cute.Tensor,
        softmax_scale: Float32,
        score_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        turn: Int32,
        ctas: Int32,
        stream,
    ):
        self.run(
            q, k, v, out, dout, lse, dlse, slopes, dq, dk, dv, lse2, d_rows, dq_sum, turns,
            softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, ctas, stream,
        )  # fmt: skip

    def run(
        self, q, k, v, out, dout, lse, dlse, slopes, dq, dk, dv, lse2, d_rows, dq_sum, turns,
        softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, ctas, stream, lengths=(),
    ):  # fmt: skip
        """The three launches. lengths: see `Bwd16Main.kernel`."""
        ahead, group = heads_ahead(turn, q, k), q.shape[2] // k.shape[2]
        self.before.launch(
            out,
            dout,
            lse,
            dlse,
            lse2,
            d_rows,
            dq_sum,
            turns,
            ahead * group,
            stream,
            (dq, dk, dv),
            lengths[:2],
        )
        self.main.launch(
            q, k, v, dout, lse2, d_rows, dq_sum, dk, dv, slopes, turns,
            softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, ahead, ctas, stream,
            lengths,
        )  # fmt: skip
        self.behind.launch(dq_sum, dq, softmax_scale, stream, lengths[:1])


class Bwd16bitVarlenSm90(Bwd16bitSm90):
    """Likewise for sequences of unlike length."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (total_q, heads_q, head_dim)
        k: cute.Tensor,  # (total_k, heads_k, head_dim)
        v: cute.Tensor,
        out: cute.Tensor,  # (total_q, heads_q, head_dim_v)
        dout: cute.Tensor,
        lse: cute.Tensor,  # (heads_q, total_q) float32, natural log
        dlse: cute.Tensor,  # likewise, may be expanded
        slopes: cute.Tensor,  # (batch, heads_q)
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lse2: cute.Tensor,  # these two (heads_q, slots * tile_m)
        d_rows: cute.Tensor,
        dq_sum: cute.Tensor,  # (heads_q, slots, tile_m * qk_columns)
        turns: cute.Tensor,  # (heads_q, slots, warpgroups)
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,  # (batch,), or anything where has_used is 0
        softmax_scale: Float32,
        score_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        has_used: Int32,
        turn: Int32,
        stream,
    ):
        rows = [one_batch(x) for x in (q, k, v, out, dout, lse, dlse)]
        work = [one_batch(x) for x in (dq, dk, dv, lse2, d_rows, dq_sum, turns)]
        self.run(
            *rows, slopes, *work,
            softmax_scale, score_scale_log2, softcap_factor, window_left, window_right, turn, Int32(0), stream,
            (cu_seqlens_q, cu_seqlens_k, seqused_k, has_used),
        )  # fmt: skip
