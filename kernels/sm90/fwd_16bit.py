"""Forward attention on Hopper, operands of 16 bits: the entries that are compiled. Tensors are listed in fwd.py."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.varlen import one_batch
from ..config import Fwd16Config
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
