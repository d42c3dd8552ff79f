"""Host entries: functions of few arguments that are compiled with the kernels and give them their tensors.

Each tensor that crosses from Python costs a tenth of a microsecond, its allocation or view before that one to four, an
integer a fiftieth. So the 8-bit operands of a call lie in one workspace, whose address crosses as an integer, and all
offsets and strides as one `Layout`, which Python makes once for a shape. What crosses as an address is not checked
here: `cute_attn.launch` allocates it, or `cute_attn.validate` has checked it. The tensors that do cross are checked,
and say on which device and stream to launch.
"""

# Annotations are not postponed here: the DSL tells a `cute.Shape`, which may cross as one object, by the annotation.

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .common.varlen import one_batch
from .config import (
    K_SCALE_GROUP,
    K_SCALE_PAD,
    MEAN_CHUNKS,
    MEAN_LANES,
    MEAN_SPAN,
    MEAN_STRIDE,
    MEAN_UNROLL,
    V_KEY_PERMUTATION,
    V_SCALE_GROUP,
    FwdConfig,
    QuantizeConfig,
)
from .operands import Layout

F8 = cutlass.Float8E4M3FN
WIDE = 16  # bytes: what TMA and 16-byte accesses want of addresses and strides


def _tensor(element, address: Int64, shape: tuple, strides: tuple, align: int) -> cute.Tensor:
    """A tensor in global memory; address, and strides that are not constants, are multiples of `align` bytes."""
    pointer = cute.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=align)
    unit = align * 8 // element.width
    assumed = [s if isinstance(s, int) or unit == 1 else cute.assume(s, divby=unit) for s in strides]
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=tuple(assumed)))


class _Operands:
    """The parts that the quantiser writes and the forward kernel reads, by a `Layout` of run-time integers."""

    def __init__(
        self, cfg: FwdConfig | QuantizeConfig, base: Int64, layout, batch, seqlen_q, heads_q, slots=None
    ):
        at = Layout(*layout)
        seqlen_k, heads_k = Int32(at.seqlen_k), Int32(at.heads_k)
        stored = seqlen_k
        if const_expr(slots is not None):  # of 256 keys, of sequences that are one batch
            stored = slots * V_SCALE_GROUP
            at = _one_batch(at)
        groups = lambda keys: (stored + (keys - 1)) // keys
        code = F8 if cfg.qk_dtype == "e4m3" else cutlass.Int8
        self.q = _tensor(
            code,
            base + at.q,
            (batch, seqlen_q, heads_q, cfg.head_dim),
            (at.q_batch, at.q_row, at.q_head, 1),
            WIDE,
        )
        self.k = _tensor(
            code,
            base + at.k,
            (batch, seqlen_k, heads_k, cfg.head_dim),
            (at.k_batch, at.k_row, at.k_head, 1),
            WIDE,
        )
        self.vt = _tensor(
            F8,
            base + at.vt,
            (batch, heads_k, cfg.head_dim_v, groups(V_KEY_PERMUTATION) * V_KEY_PERMUTATION),
            (at.vt_batch, at.vt_head, at.vt_dim, 1),
            WIDE,
        )
        self.q_scale = _tensor(
            Float32,
            base + at.q_scale,
            (batch, heads_q, seqlen_q),
            (at.q_scale_batch, at.q_scale_head, at.q_scale_row),
            4,
        )
        self.k_scale = _tensor(
            Float32,
            base + at.k_scale,
            (batch, heads_k, groups(K_SCALE_GROUP)),
            (at.k_scale_batch, at.k_scale_head, 1),
            4 * K_SCALE_PAD,
        )
        self.v_scale = _tensor(
            Float32,
            base + at.v_scale,
            (batch, heads_k, groups(V_SCALE_GROUP)),
            (at.v_scale_batch, at.v_scale_head, 1),
            4,
        )


def _one_batch(at: Layout) -> Layout:
    """`at` for one batch: all is stored there, whatever the index of a sequence. (V^T is not indexed so.)"""
    names = ("q_batch", "k_batch", "q_scale_batch", "k_scale_batch", "v_scale_batch", "q_dot_batch")
    return at._replace(**dict.fromkeys(names, 0))


class FwdEntry:
    """Host entry of the forward kernel: operands by address and layout."""

    def __init__(self, kernel, cfg: FwdConfig):
        self.kernel = kernel  # a FwdSm90
        self.cfg = cfg

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v) bf16 or fp16
        base: Int64,  # what the offsets of `layout` count from
        lse: Int64,  # address of (batch, heads_q, seqlen_q) float32, contiguous
        lse_add: Int64,  # address of (batch, heads_q, seqlen_q) float32, strides as q_dot in `layout`
        layout: cute.Shape,  # see Layout
        softmax_scale: Float32,
        softmax_scale_log2: Float32,
        sms: Int32,  # SMs of the device
        turn: Int32,  # key heads whose tiles are mixed in the order of work
        slopes,  # (batch, heads_q) float32 with `alibi`, else None, as what follows
        sinks,  # (heads_q,) float32 with `sinks`
        softcap_factor,  # with `softcap`, see policy_fp8.py
        window_left,  # with `window`
        window_right,
        stream,
    ):
        batch, seqlen_q, heads_q = o.shape[0], o.shape[1], o.shape[2]
        parts = _Operands(self.cfg, base, layout, batch, seqlen_q, heads_q)
        at = Layout(*layout)
        rows = (batch, heads_q, seqlen_q)
        self.kernel(
            parts.q,
            parts.k,
            parts.vt,
            parts.q_scale,
            parts.k_scale,
            parts.v_scale,
            _tensor(Float32, lse_add, rows, (at.q_dot_batch, at.q_dot_head, at.q_dot_row), 4),
            o,
            _tensor(Float32, lse, rows, (Int64(heads_q) * seqlen_q, Int64(seqlen_q), 1), 4),
            softmax_scale,
            softmax_scale_log2,
            sms,
            turn,
            slopes,
            sinks,
            softcap_factor,
            window_left,
            window_right,
            stream,
        )


class FwdVarlenEntry:
    """`FwdEntry` for sequences of unlike length, whose rows stand behind one another."""

    def __init__(self, kernel, cfg: FwdConfig):
        self.kernel = kernel  # a Fwd8bitVarlenSm90
        self.cfg = cfg

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,  # (total_q, heads_q, head_dim_v) bf16 or fp16
        cu_seqlens_q: cute.Tensor,  # (batch + 1,) int32
        cu_seqlens_k: cute.Tensor,
        base: Int64,  # what the offsets of `layout` count from
        counter: Int64,  # address of an int32, of the tiles that have been given out
        lse: Int64,  # address of (heads_q, total_q) float32, contiguous
        lse_add: Int64,  # address of (heads_q, total_q) float32, strides as q_dot in `layout`
        layout: cute.Shape,  # see Layout; seqlen_k is total_k, strides of a batch, but for V^T, are not read
        slots: Int32,  # of 256 keys, see common/varlen.py
        softmax_scale: Float32,
        softmax_scale_log2: Float32,
        sms: Int32,  # SMs of the device
        keys_in_turn: Int32,  # under a causal mask, keys of all heads whose tiles are mixed in the order of work
        slopes,  # (batch, heads_q) float32 with `alibi`, else None, as what follows
        sinks,  # (heads_q,) float32 with `sinks`
        softcap_factor,  # with `softcap`, see policy_fp8.py
        window_left,  # with `window`
        window_right,
        stream,
    ):
        total_q, heads_q = o.shape[0], o.shape[1]
        parts = _Operands(self.cfg, base, layout, 1, total_q, heads_q, slots)
        at = _one_batch(Layout(*layout))
        rows = (1, heads_q, total_q)
        self.kernel(
            parts.q,
            parts.k,
            parts.vt,
            parts.q_scale,
            parts.k_scale,
            parts.v_scale,
            _tensor(Float32, lse_add, rows, (at.q_dot_batch, at.q_dot_head, at.q_dot_row), 4),
            one_batch(o),
            _tensor(Float32, lse, rows, (0, Int64(total_q), 1), 4),
            cu_seqlens_q,
            cu_seqlens_k,
            _tensor(Int32, counter, (1,), (1,), 4),
            softmax_scale,
            softmax_scale_log2,
            sms,
            keys_in_turn,
            slopes,
            sinks,
            softcap_factor,
            window_left,
            window_right,
            stream,
        )


class QuantizeEntry:
    """Host entry of the quantiser: inputs as tensors, results into a workspace.

    What a configuration has no use for is None. The kernel gets a tensor in its place that it does not read, with all
    strides 0.
    """

    def __init__(self, kernel, cfg: QuantizeConfig):
        self.kernel = kernel  # a Quantize
        self.cfg = cfg

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim) bf16 or fp16
        k: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        signs,  # (head_dim,) float32 with `rotate`
        amax_q,  # (batch, heads_q) float32 where q_mode is "static"
        amax_k,  # (batch, heads_k), likewise
        amax_v,
        base: Int64,  # address of the workspace
        layout: cute.Shape,  # see Layout
        cos,  # (seqlen_ro, rotary_dim / 2) of the dtype of q with `rotary`
        sin,
        given: Int32,  # with `smooth`: sums of the mean key that are there already; 0 if they are to be made
        samples: Int32,  # of which these are: their sum over it is the mean
        only_chunk: Int32,  # with `smooth`: > 0 if sums are all that is wanted, of chunks of so many samples
        stream,
    ):
        cfg = self.cfg
        batch, heads_q, heads_k = q.shape[0], q.shape[2], k.shape[2]
        parts = _Operands(cfg, base, layout, batch, q.shape[1], heads_q)
        at = Layout(*layout)
        unread = lambda *shape: _tensor(Float32, base, shape, (0,) * len(shape), 4)
        chunk, chunks, count = Int32(0), Int32(1), Int32(1)
        if const_expr(cfg.smooth):
            # In the steps of `cute_attn.quantize.mean_chunks`.
            own = (k.shape[1] + (MEAN_STRIDE - 1)) // MEAN_STRIDE
            step = MEAN_LANES * MEAN_UNROLL
            if given > 0:
                chunks, count = given, samples
            elif only_chunk > 0:
                chunk, count = only_chunk, Int32(0)
                chunks = (own + chunk - 1) // chunk
            else:
                chunk = (own + (step * MEAN_CHUNKS - 1)) // (step * MEAN_CHUNKS) * step
                chunks = (own + chunk - 1) // chunk
                count = own
            head = Int64(cfg.head_dim)
            sums = _tensor(
                Float32,
                base + at.sums,
                (batch, chunks, heads_k, cfg.head_dim),
                (head * heads_k * chunks, head * heads_k, head, 1),
                4,
            )
            q_dot = _tensor(
                Float32, base + at.q_dot, (batch, heads_q, q.shape[1]), (at.q_dot_batch, at.q_dot_head, 1), 4
            )
        else:
            sums = unread(batch, 1, heads_k, cfg.head_dim)
            q_dot = unread(batch, heads_q, q.shape[1])
        q_scale = cute.make_tensor(  # contiguous, as all that lies in a workspace
            parts.q_scale.iterator,
            cute.make_layout(parts.q_scale.shape, stride=(at.q_scale_batch, at.q_scale_head, 1)),
        )
        self.kernel(
            q,
            k,
            v,
            unread(cfg.head_dim) if const_expr(signs is None) else signs,
            sums,
            unread(batch, heads_q) if const_expr(amax_q is None) else amax_q,
            unread(batch, heads_k) if const_expr(amax_k is None) else amax_k,
            unread(batch, heads_k) if const_expr(amax_v is None) else amax_v,
            parts.q,
            parts.k,
            parts.vt,
            q_scale,
            parts.k_scale,
            parts.v_scale,
            q_dot,
            cos,
            sin,
            chunk,
            count,
            stream,
        )


class QuantizeVarlenEntry:
    """`QuantizeEntry` for sequences of unlike length, whose rows stand behind one another."""

    def __init__(self, kernel, cfg: QuantizeConfig):
        self.kernel = kernel  # a QuantizeVarlen
        self.cfg = cfg

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (total_q, heads_q, head_dim) bf16 or fp16
        k: cute.Tensor,  # (total_k, heads_k, head_dim)
        v: cute.Tensor,  # (total_k, heads_k, head_dim_v)
        cu_seqlens_q: cute.Tensor,  # (batch + 1,) int32
        cu_seqlens_k: cute.Tensor,
        signs,  # (head_dim,) float32 with `rotate`, else None
        base: Int64,  # address of the workspace
        layout: cute.Shape,  # see Layout; seqlen_k is total_k, strides of a batch, but for V^T, are not read
        slots: Int32,  # of 256 keys, see common/varlen.py
        stream,
    ):
        cfg = self.cfg
        total_q, heads_q, total_k, heads_k = q.shape[0], q.shape[1], k.shape[0], k.shape[1]
        parts = _Operands(cfg, base, layout, 1, total_q, heads_q, slots)
        at = _one_batch(Layout(*layout))
        sums = _tensor(Float32, base, (1, heads_k, cfg.head_dim), (0, 0, 0), 4)  # not read
        q_dot = _tensor(Float32, base, (1, heads_q, total_q), (0, 0, 0), 4)
        if const_expr(cfg.smooth):
            head = Int64(cfg.head_dim)
            chunk_slots = total_k // MEAN_SPAN + (cu_seqlens_k.shape[0] - 1)
            shape, strides = (chunk_slots, heads_k, cfg.head_dim), (head * heads_k, head, 1)
            sums = _tensor(Float32, base + at.sums, shape, strides, 4)
            q_dot = _tensor(Float32, base + at.q_dot, (1, heads_q, total_q), (0, at.q_dot_head, 1), 4)
        q_scale = cute.make_tensor(  # contiguous, as all that lies in a workspace
            parts.q_scale.iterator, cute.make_layout(parts.q_scale.shape, stride=(0, at.q_scale_head, 1))
        )
        self.kernel(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            self.no_signs(base) if const_expr(signs is None) else signs,
            sums,
            cute.make_tensor(parts.q.iterator, cute.select(parts.q.layout, [1, 2, 3])),
            cute.make_tensor(parts.k.iterator, cute.select(parts.k.layout, [1, 2, 3])),
            cute.make_tensor(parts.vt.iterator, cute.select(parts.vt.layout, [1, 2, 3])),
            q_scale,
            parts.k_scale,
            parts.v_scale,
            q_dot,
            stream,
        )

    def no_signs(self, base: Int64) -> cute.Tensor:
        return _tensor(Float32, base, (self.cfg.head_dim,), (0,), 4)
