"""Forward attention on Hopper, operands of 8 bits: the entries that are compiled. Tensors are listed in fwd.py."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.varlen import first_slot
from ..config import K_SCALE_GROUP, V_SCALE_GROUP, FwdConfig
from .fwd import FwdSm90
from .mainloop import V_SCALE_SHIFT, Mainloop8bit
from .operands import heads_last
from .policy_fp8 import Fp8Policy, HalfPolicy


class Fwd8bitSm90(FwdSm90):
    """One 8-bit configuration. Call it inside `cute.compile` with (fake) tensors."""

    def __init__(self, cfg: FwdConfig):
        cfg.check()
        policy = HalfPolicy(cfg) if cfg.half_scores else Fp8Policy(cfg)
        super().__init__(cfg, policy, Mainloop8bit(cfg, policy))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        vt: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        lse_add: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        softmax_scale: Float32,
        softmax_scale_log2: Float32,
        sms: Int32,
        turn: Int32,
        slopes,
        sinks,
        softcap_factor,
        window_left,
        window_right,
        stream,
    ):
        """Arguments from slopes on are None where the configuration has no use for them."""
        vt = cute.make_tensor(vt.iterator, cute.select(vt.layout, [2, 3, 1, 0]))  # (d, s, h, b)
        side = (*[heads_last(t) for t in (q_scale, k_scale, v_scale, lse_add)], softmax_scale)
        side = (*side, slopes, sinks, softcap_factor, window_left, window_right)
        self.launch(q, k, vt, side, o, lse, softmax_scale_log2, sms, turn, stream)


class Fwd8bitVarlenSm90(Fwd8bitSm90):
    """One 8-bit configuration for sequences of unlike length. Call it inside `cute.compile` with (fake) tensors."""

    @cute.jit
    def __call__(
        self,
        # with a mode of one batch, of stride 0, in front of all that has one in `Fwd8bitSm90`
        q: cute.Tensor,
        k: cute.Tensor,
        vt: cute.Tensor,  # (1, heads_k, head_dim_v, slots of 256 keys), see common/varlen.py for slots
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,  # (1, heads_k, slots of 256 keys, in each 4 scales)
        v_scale: cute.Tensor,  # (1, heads_k, slots of 256 keys)
        lse_add: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        counter: cute.Tensor,
        softmax_scale: Float32,
        softmax_scale_log2: Float32,
        sms: Int32,
        keys_in_turn: Int32,
        slopes,
        sinks,
        softcap_factor,
        window_left,
        window_right,
        stream,
    ):
        vt = cute.make_tensor(vt.iterator, cute.select(vt.layout, [2, 3, 1, 0]))  # (d, s, h, b)
        side = (*[heads_last(t) for t in (q_scale, k_scale, v_scale, lse_add)], softmax_scale)
        side = (*side, slopes, sinks, softcap_factor, window_left, window_right)
        lengths = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k, Int32(0), counter, keys_in_turn)
        self.launch(q, k, vt, side, o, lse, softmax_scale_log2, sms, Int32(1), stream, lengths)

    @cute.jit
    def side_of(
        self, side, batch: Int32, first_row: Int32, seqlen_q: Int32, first_key: Int32, seqlen_k: Int32
    ):
        q_scale, k_scale, v_scale, lse_add = side[:4]
        slot = first_slot(first_key, batch, V_SCALE_SHIFT)
        groups = (seqlen_k + (K_SCALE_GROUP - 1)) // K_SCALE_GROUP
        return (
            rows_between(q_scale, first_row, seqlen_q),
            rows_between(k_scale, slot * (V_SCALE_GROUP // K_SCALE_GROUP), groups),
            rows_between(v_scale, slot, v_scale.shape[0] - slot),
            rows_between(lse_add, first_row, seqlen_q),
            *side[4:],
        )


def rows_between(x: cute.Tensor, first: Int32, rows: Int32) -> cute.Tensor:
    """`rows` rows of (rows, heads, batch) from row `first` on."""
    start = cute.domain_offset((first, 0, 0), x).iterator
    return cute.make_tensor(start, cute.make_layout((rows, *x.shape[1:]), stride=x.stride))
