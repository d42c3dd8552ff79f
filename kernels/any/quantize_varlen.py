"""The quantiser for sequences of unlike length, whose rows stand behind one another.

What is computed is that of quantize.py for each sequence by itself, bit for bit. Only the device knows the lengths, so
CTAs are launched for all *slots* that blocks of rows may have (see common/varlen.py), find their block by its slot,
and leave where it has none.

Tensors, last stride 1, every other stride dynamic:

    q (total_q, heads_q, head_dim), k (total_k, heads_k, head_dim), v (total_k, heads_k, head_dim_v)    bf16 or fp16
    cu_seqlens_q, cu_seqlens_k (batch + 1,) int32; batch is at least 1
    signs (head_dim,) float32 +-1
    sums (slots of MEAN_SPAN keys, heads_k, head_dim) float32
    q8, k8 like q, k in e4m3 or int8
    vt (heads_k, head_dim_v, 256 for each slot of 256 keys) e4m3: keys of a sequence from its first slot on, zeros
        behind them to the end of their last slot
    k_scale (1, heads_k, 4 for each slot of 256 keys), v_scale (1, heads_k, slots of 256 keys) float32, likewise
    q_scale, q_dot (1, heads_q, total_q) float32

What belongs to no row, key or block of keys is not written. The modes of one have stride 0.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..common.varlen import block_of_slot, first_slot
from ..config import (
    K_SCALE_GROUP,
    MEAN_CHUNKS,
    MEAN_LANES,
    MEAN_SPAN,
    MEAN_STRIDE,
    MEAN_UNROLL,
    QUANTIZE_SPAN,
    V_SCALE_GROUP,
    QuantizeConfig,
)
from .key_sums import KeySums
from .quantize import FULL, SMEM_CARVEOUT, Quantize

MEAN_SHIFT = MEAN_SPAN.bit_length() - 1
SPAN_SHIFT = QUANTIZE_SPAN.bit_length() - 1
V_SHIFT = V_SCALE_GROUP.bit_length() - 1


@cute.jit
def chunks_of(keys: Int32):
    """(samples, samples of a chunk, chunks) of a sequence, in the steps of `cute_attn.quantize.mean_chunks`."""
    samples = (keys + (MEAN_STRIDE - 1)) // MEAN_STRIDE
    step = MEAN_LANES * MEAN_UNROLL
    chunk = cutlass.max((samples + (step * MEAN_CHUNKS - 1)) // (step * MEAN_CHUNKS), 1) * step
    return samples, chunk, (samples + (chunk - 1)) // chunk


@cute.jit
def rows_from(x: cute.Tensor, head: Int32, row: Int32, rows: Int32) -> cute.Tensor:
    """(rows, dim) of one head of x (total, heads, dim), from `row` on."""
    start = cute.domain_offset((row, 0), x[None, head, None])
    return cute.make_tensor(start.iterator, cute.make_layout((rows, x.shape[2]), stride=start.stride))


@cute.jit
def entries_from(x: cute.Tensor, entry: Int32, entries: Int32) -> cute.Tensor:
    """(1, heads, entries) of x (1, heads, total), from `entry` on."""
    start = cute.domain_offset((0, 0, entry), x)
    return cute.make_tensor(start.iterator, cute.make_layout((1, x.shape[1], entries), stride=x.stride))


class QuantizeVarlen(Quantize):
    """Host entry of one configuration: at most two launches on one stream."""

    def __init__(self, cfg: QuantizeConfig):
        super().__init__(cfg)
        self.key_sums = KeySumsVarlen(cfg)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        ends_q: cute.Tensor,
        ends_k: cute.Tensor,
        signs: cute.Tensor,
        sums: cute.Tensor,
        q8: cute.Tensor,
        k8: cute.Tensor,
        vt: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        q_dot: cute.Tensor,
        stream,
    ):
        if const_expr(self.smooth):
            self.key_sums.launch_varlen(k, ends_k, sums, stream)
        heads, batch = q.shape[1] + k.shape[1], ends_q.shape[0] - 1
        # Slots of QUANTIZE_SPAN rows, of Q or of K. Of blocks half as long there are at most twice as many slots.
        spans = (max(q.shape[0], k.shape[0]) >> SPAN_SHIFT) + batch
        halved = Int32(0)
        for step in cutlass.range_constexpr(self.halvings):
            if heads * spans << step < FULL * self.ctas_per_sm:
                halved = Int32(step + 1)
        tasks = (heads << halved) + k.shape[1] * (QUANTIZE_SPAN // V_SCALE_GROUP)
        self.varlen_kernel(
            q,
            k,
            v,
            ends_q,
            ends_k,
            signs,
            sums,
            q8,
            k8,
            vt,
            q_scale,
            k_scale,
            v_scale,
            q_dot,
            q.shape[1] // k.shape[1],
            halved,
        ).launch(
            grid=[tasks, spans, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT,
            use_pdl=self.smooth,
        )

    @cute.kernel
    def varlen_kernel(
        self,
        m_q: cute.Tensor,  # (total_q, heads_q, head_dim)
        m_k: cute.Tensor,  # (total_k, heads_k, head_dim)
        m_v: cute.Tensor,  # (total_k, heads_k, head_dim_v)
        ends_q: cute.Tensor,  # (batch + 1,)
        ends_k: cute.Tensor,
        m_signs: cute.Tensor,  # (head_dim,)
        m_sums: cute.Tensor,  # (slots of MEAN_SPAN keys, heads_k, head_dim)
        m_q8: cute.Tensor,  # (total_q, heads_q, head_dim)
        m_k8: cute.Tensor,  # (total_k, heads_k, head_dim)
        m_vt: cute.Tensor,  # (heads_k, head_dim_v, 256 slots)
        m_q_scale: cute.Tensor,  # (1, heads_q, total_q)
        m_k_scale: cute.Tensor,  # (1, heads_k, 4 slots)
        m_v_scale: cute.Tensor,  # (1, heads_k, slots)
        m_dot: cute.Tensor,  # (1, heads_q, total_q)
        group: Int32,  # query heads of a kv head
        halved: Int32,  # how often QUANTIZE_SPAN is halved
    ):
        # Tasks as in quantize.py. A role gets its block as a sequence of its own, which ends where the sequence does.
        task, span, _ = cute.arch.block_idx()
        heads_q, heads_k = m_q.shape[1], m_k.shape[1]
        of_v = heads_k * (QUANTIZE_SPAN // V_SCALE_GROUP)
        smem = SmemAllocator()
        stage_words = max(self.q_rows.ring_words, self.values.tile_words)
        stage = smem.allocate_tensor(Uint32, cute.make_layout(stage_words), 1024)
        columns = smem.allocate_tensor(Float32, cute.make_layout(2 * self.q_rows.width), 16)
        warps = self.threads // 32
        scratch = smem.allocate_tensor(Float32, cute.make_layout((2, warps), stride=(warps, 1)), 16)
        side = smem.allocate_tensor(Float32, cute.make_layout(self.q_rows.side_floats), 16)
        if task < of_v:
            head = task % heads_k
            slot = span * (QUANTIZE_SPAN // V_SCALE_GROUP) + task // heads_k
            _, row, left = block_of_slot(slot, ends_k, V_SHIFT)
            if left > 0:
                m_vt_head = cute.domain_offset((0, slot * V_SCALE_GROUP), m_vt[head, None, None])
                vt_layout = cute.make_layout((m_vt.shape[1], V_SCALE_GROUP), stride=m_vt_head.stride)
                self.values.run(
                    rows_from(m_v, head, row, left),
                    Float32(0.0),  # no amax is given
                    cute.make_tensor(m_vt_head.iterator, vt_layout),
                    entries_from(m_v_scale, slot, Int32(1))[0, head, None],
                    Int32(0),
                    stage,
                    scratch,
                )
        else:
            task = task - of_v
            head = task % (heads_q + heads_k)
            shift = SPAN_SHIFT - halved
            slot = (span << halved) + task // (heads_q + heads_k)
            if head < heads_q:
                sequence, row, left = block_of_slot(slot, ends_q, shift)
                if left > 0:
                    head_k = head // group
                    samples, m_sum = self.sums_of(m_sums, ends_k, sequence, head_k)
                    self.q_rows.run(
                        rows_from(m_q, head, row, left),
                        m_signs,
                        m_sum,
                        Float32(0.0),
                        rows_from(m_q8, head, row, left),
                        entries_from(m_q_scale, row, left),
                        entries_from(m_dot, row, left),
                        Int32(0),
                        head,
                        None,
                        None,
                        Int32(0),
                        None,
                        samples,
                        Int32(0),
                        Int32(0),
                        self.whole_passes(self.q_rows, left, shift),
                        stage,
                        columns,
                        scratch,
                        side,
                    )
            else:
                head = head - heads_q
                sequence, row, left = block_of_slot(slot, ends_k, shift)
                if left > 0:
                    samples, m_sum = self.sums_of(m_sums, ends_k, sequence, head)
                    key0 = ends_k[sequence]
                    first = first_slot(key0, sequence, V_SHIFT) * (V_SCALE_GROUP // K_SCALE_GROUP)
                    groups = (left + (K_SCALE_GROUP - 1)) // K_SCALE_GROUP
                    m_scale = entries_from(m_k_scale, first + (row - key0) // K_SCALE_GROUP, groups)
                    self.k_rows.run(
                        rows_from(m_k, head, row, left),
                        m_signs,
                        m_sum,
                        Float32(0.0),
                        rows_from(m_k8, head, row, left),
                        m_scale,
                        m_scale,
                        Int32(0),
                        head,
                        None,
                        None,
                        Int32(0),
                        None,
                        samples,
                        Int32(0),
                        Int32(0),
                        self.whole_passes(self.k_rows, left, shift),
                        stage,
                        columns,
                        scratch,
                        side,
                    )

    @cute.jit
    def whole_passes(self, role, left: Int32, shift: Int32) -> Int32:
        """Rows that a CTA takes of a block with `left` rows: whole groups of passes, no more than it needs."""
        least = role.pass_rows * role.group_passes
        return cutlass.min((left + (least - 1)) // least * least, Int32(1) << shift)

    @cute.jit
    def sums_of(self, m_sums: cute.Tensor, ends_k: cute.Tensor, sequence: Int32, head: Int32):
        """(samples, sums (chunks, head_dim)) of a head's keys of a sequence, for the mean.

        Without keys there is one chunk that nobody has written; `Rows.prepare_columns` reads it, to no effect.
        """
        key0 = ends_k[sequence]
        samples, _, chunks = chunks_of(ends_k[sequence + 1] - key0)
        chunks = cutlass.max(chunks, 1)
        return samples, rows_from(m_sums, head, first_slot(key0, sequence, MEAN_SHIFT), chunks)


class KeySumsVarlen(KeySums):
    """`KeySums` of each sequence. Chunks are blocks of MEAN_SPAN keys or longer, so there is a slot for each."""

    @cute.jit
    def launch_varlen(self, k: cute.Tensor, ends_k: cute.Tensor, sums: cute.Tensor, stream):
        self.varlen_kernel(k, ends_k, sums).launch(
            grid=[sums.shape[0] * k.shape[1], 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def varlen_kernel(
        self,
        m_k: cute.Tensor,  # (total_k, heads_k, head_dim)
        ends_k: cute.Tensor,  # (batch + 1,)
        m_sums: cute.Tensor,  # (slots of MEAN_SPAN keys, heads_k, head_dim)
    ):
        cute.arch.griddepcontrol_launch_dependents()  # as in `KeySums.kernel`
        tid, _, _ = cute.arch.thread_idx()
        work, _, _ = cute.arch.block_idx()
        head = work % m_k.shape[1]
        slot = work // m_k.shape[1]
        sequence, _, left = block_of_slot(slot, ends_k, MEAN_SHIFT)
        if left > 0:
            key0 = ends_k[sequence]
            keys = ends_k[sequence + 1] - key0
            _, chunk, chunks = chunks_of(keys)
            index = slot - first_slot(key0, sequence, MEAN_SHIFT)
            if index < chunks:
                own = rows_from(m_k, head, key0, keys)
                self.sum_chunk(own, m_sums, (slot, head), None, None, index, chunk, tid)
