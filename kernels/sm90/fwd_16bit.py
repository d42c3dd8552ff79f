"""Forward attention on Hopper, operands of 16 bits: the entries that are compiled. Tensors are listed in fwd.py."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common.varlen import one_batch
from ..config import Fwd16Config
from ..decode.combine import CombineShares, Results
from .fwd import FwdSm90
from .mainloop import Mainloop16bit
from .policy_16bit import Policy16bit


class Fwd16bitSm90(FwdSm90):
    """One 16-bit configuration. Call it inside `cute.compile` with (fake) tensors."""

    def __init__(self, cfg: Fwd16Config):
        cfg.check()
        policy = Policy16bit(cfg)
        super().__init__(cfg, policy, Mainloop16bit(cfg, policy))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        slopes: cute.Tensor,
        sinks: cute.Tensor,
        softmax_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        sms: Int32,
        turn: Int32,
        stream,
    ):
        side = (slopes, sinks, softcap_factor, window_left, window_right)
        v = cute.make_tensor(v.iterator, cute.select(v.layout, [3, 1, 2, 0]))  # (d, s, h, b)
        self.launch(q, k, v, side, o, lse, softmax_scale_log2, sms, turn, stream)


class Fwd16bitVarlenSm90(Fwd16bitSm90):
    """One 16-bit configuration for sequences of unlike length. Call it inside `cute.compile` with (fake) tensors."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (rows, heads_q, head_dim)
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,  # (heads_q, rows)
        slopes: cute.Tensor,
        sinks: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,  # (batch,), or anything where has_used is 0
        counter: cute.Tensor,
        softmax_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        has_used: Int32,  # 2: seqused_k alone says how many keys, cu_seqlens_k where they begin, in any order
        sms: Int32,
        keys_in_turn: Int32,  # under a causal mask, keys of all heads whose tiles are mixed in the order of work
        stream,
    ):
        side = (slopes, sinks, softcap_factor, window_left, window_right)
        q, k, v, o, lse = one_batch(q), one_batch(k), one_batch(v), one_batch(o), one_batch(lse)
        v = cute.make_tensor(v.iterator, cute.select(v.layout, [3, 1, 2, 0]))  # (d, s, h, b)
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k, has_used, counter, keys_in_turn)
        self.launch(q, k, v, side, o, lse, softmax_scale_log2, sms, Int32(1), stream, lengths)


class Fwd16bitSplitSm90(Fwd16bitSm90):
    """One 16-bit configuration for few tiles and many keys: shares of a tile's keys are units of work of their own, and
    a second kernel adds up their parts (Flash-Decoding). Call it inside `cute.compile` with (fake) tensors.

    Queries are of one number for each sequence. The workspace has room for the parts of O, (splits, rows, heads_q,
    head_dim_v) float32, and behind these for maximum and sum of each row, (splits, rows, heads_q, 2).
    """

    def __init__(self, cfg: Fwd16Config):
        super().__init__(
            dataclasses.replace(cfg, sinks=False)
        )  # a sink counts once, where parts are added up
        self.out_type = Float32
        self.combine = CombineShares(cfg)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (rows, heads_q, head_dim)
        k: cute.Tensor,  # likewise
        v: cute.Tensor,
        o: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q)
        slopes: cute.Tensor,
        sinks: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,  # as in `Fwd16bitVarlenSm90`
        counter: cute.Tensor,
        workspace: Int64,  # address, of 16 bytes
        softmax_scale_log2: Float32,
        softcap_factor: Float32,
        window_left: Int32,
        window_right: Int32,
        has_used: Int32,
        sms: Int32,
        splits: Int32,
        stream,
    ):
        side = (slopes, sinks, softcap_factor, window_left, window_right)
        rows, heads, d_v = q.shape[0], q.shape[1], self.cfg.head_dim_v
        pairs = Int64(rows) * heads  # of a row and a head
        base = cute.make_ptr(Float32, workspace, cute.AddressSpace.gmem, assumed_align=16)
        ml = cute.make_ptr(
            Float32, workspace + 4 * splits * pairs * d_v, cute.AddressSpace.gmem, assumed_align=16
        )
        parts_o = cute.make_tensor(
            base, cute.make_layout((1, splits * rows, heads, d_v), stride=(0, Int64(heads) * d_v, d_v, 1))
        )
        parts_ml = cute.make_tensor(
            ml, cute.make_layout((1, heads, splits * rows), stride=(0, 2, Int64(heads) * 2))
        )
        q, k, v = one_batch(q), one_batch(k), one_batch(v)
        v = cute.make_tensor(v.iterator, cute.select(v.layout, [3, 1, 2, 0]))  # (d, s, h, b)
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k, has_used, counter, Int32(1), splits)
        self.launch(q, k, v, side, parts_o, parts_ml, softmax_scale_log2, sms, Int32(1), stream, lengths)
        results = Results(
            o,
            lse,
            sinks,
            cute.make_tensor(ml, cute.make_layout((splits, rows * heads, 2), stride=(pairs * 2, 2, 1))),
            cute.make_tensor(
                base, cute.make_layout((splits, rows * heads, d_v), stride=(pairs * d_v, Int64(d_v), 1))
            ),
            softmax_scale_log2,
        )
        self.combine.launch(results, splits, stream)
