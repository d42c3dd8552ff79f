"""Sums of sampled keys, of which the quantiser makes the mean key (see quantize.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..config import MEAN_LANES, MEAN_STRIDE, MEAN_UNROLL, QuantizeConfig
from .rotary import Rotary
from .vectors import IN_TYPES, address_in, address_of, vector, widen


class KeySums:
    """Sums of every MEAN_STRIDE-th key over chunks of the sequence, in the order of `quantize.mean_key`.

    One CTA for a chunk of one head, 2 * head_dim threads: thread t takes the eight columns from
    8 (t % (head_dim / 8)) of every MEAN_LANES-th sample, the first t // (head_dim / 8) of the chunk.
    """

    def __init__(self, cfg: QuantizeConfig):
        self.d = cfg.head_dim
        self.in_type = IN_TYPES[cfg.in_dtype]
        self.rotary = Rotary(cfg)
        self.threads = MEAN_LANES * self.d // 8
        self.lane_floats = MEAN_LANES * self.d  # of `sum_lanes`

    @cute.jit
    def launch(
        self, k: cute.Tensor, sums: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, chunk: Int32, stream
    ):
        self.kernel(k, sums, cos, sin, chunk).launch(
            grid=[sums.shape[1] * k.shape[2] * k.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.jit
    def load(self, keys: cute.Tensor, key: Int32, column: Int32, words: cute.Tensor):
        """Eight columns of a key into words (4,)."""
        source = address_of(Uint32, address_in(keys, key, column), cute.AddressSpace.gmem)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)

    @cute.kernel
    def kernel(
        self,
        m_k: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_sums: cute.Tensor,  # (batch, chunks, heads_k, head_dim)
        m_cos: cute.Tensor,  # (seqlen_ro, rotary_dim / 2)
        m_sin: cute.Tensor,
        chunk: Int32,  # samples, a multiple of MEAN_LANES * MEAN_UNROLL
    ):
        # The quantising grid may come up at once: its roles of Q and K fetch their rows, then wait for the end of this
        # grid (`Rows.prepare_columns`). What it writes has no reader or writer among grids before: this one began
        # when those had ended.
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        work, _, _ = cute.arch.block_idx()
        heads, chunks = m_k.shape[2], m_sums.shape[1]
        head = work % heads
        index = work // heads % chunks
        batch = work // heads // chunks
        keys = m_k[batch, None, head, None]
        self.sum_chunk(keys, m_sums, (batch, index, head), m_cos, m_sin, index, chunk, tid)

    @cute.jit
    def sum_chunk(
        self,
        keys: cute.Tensor,  # (seqlen_k, head_dim)
        m_sums: cute.Tensor,  # (..., head_dim)
        where,  # coordinates in m_sums, but the last
        m_cos: cute.Tensor,
        m_sin: cute.Tensor,
        index: Int32,  # of the chunk
        chunk: Int32,
        tid: Int32,
    ):
        lanes = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.lane_floats), 16)
        self.sum_lanes(keys, lanes, m_cos, m_sin, index, chunk, tid, MEAN_UNROLL)
        cute.arch.sync_threads()  # all threads: the sums of all lanes are there
        if tid < self.d:
            m_sums[(*where, tid)] = self.total(lanes, tid)

    @cute.jit
    def sum_lanes(
        self,
        keys: cute.Tensor,  # (seqlen_k, head_dim)
        lanes: cute.Tensor,  # (MEAN_LANES * head_dim,) float32 in shared memory: the results
        m_cos: cute.Tensor,
        m_sin: cute.Tensor,
        index: Int32,  # of the chunk
        chunk: Int32,
        tid: Int32,  # below `threads`
        together: cutlass.Constexpr,  # samples of a lane in flight, a divisor of MEAN_UNROLL
    ):
        """Sums of the chunk's samples of each lane."""
        column = 8 * (tid % (self.d // 8))
        lane = tid // (self.d // 8)
        samples = cute.ceil_div(keys.shape[0], MEAN_STRIDE)
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        for step in cutlass.range(chunk // (MEAN_LANES * together), unroll=1):
            raw = cute.make_rmem_tensor((4, together), Uint32)
            other = cute.make_rmem_tensor((4, together), Uint32)
            for i in cutlass.range_constexpr(together):
                sample = index * chunk + (step * together + i) * MEAN_LANES + lane
                # Past the end the last sample is read, not taken: without a branch all loads are in flight.
                key = min(sample, samples - 1) * MEAN_STRIDE
                self.load(keys, key, column, raw[None, i])
                if const_expr(self.rotary.half):
                    self.load(keys, key, self.rotary.partner(m_cos.shape[1], column), other[None, i])
            for i in cutlass.range_constexpr(together):
                sample = index * chunk + (step * together + i) * MEAN_LANES + lane
                taken = sample < samples
                if const_expr(self.rotary.on):
                    key = min(sample, samples - 1) * MEAN_STRIDE
                    pairs = m_cos.shape[1]
                    cos = self.rotary.angles(self.rotary.row_of(m_cos, key), pairs, column)
                    sin = self.rotary.angles(self.rotary.row_of(m_sin, key), pairs, column)
                    x = cute.make_rmem_tensor(8, Float32)
                    self.rotary.embed(raw[None, i], other[None, i], cos, sin, pairs, column, x)
                    for e in cutlass.range_constexpr(8):
                        total[e] = total[e] + (x[e] if taken else Float32(0.0))
                else:
                    for w in cutlass.range_constexpr(4):
                        low, high = widen(raw[w, i] if taken else Uint32(0), self.in_type)
                        total[2 * w] = total[2 * w] + low
                        total[2 * w + 1] = total[2 * w + 1] + high
        for half in cutlass.range_constexpr(2):
            part = cute.make_tensor(total.iterator + 4 * half, cute.make_layout(4))
            at = lane * self.d + column + 4 * half
            cute.autovec_copy(part, vector(cute.domain_offset(at, lanes), 4))

    @cute.jit
    def total(self, lanes: cute.Tensor, column: Int32) -> Float32:
        """Of a column, over the lanes."""
        value = lanes[column]
        for i in cutlass.range_constexpr(1, MEAN_LANES):
            value = value + lanes[i * self.d + column]
        return value
