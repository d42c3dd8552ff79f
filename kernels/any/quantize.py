"""16-bit Q, K, V to the operands of the 8-bit forward kernel.

Q, K:   x = float32(input) [signs] [- signs mean of the head's keys] [Walsh-Hadamard]
        amax over the scale group
        code = round(x * (QMAX / amax)), scale = amax * norm / QMAX
V:      e4m3 with one scale for 256 keys, transposed to (head_dim, keys), keys permuted in groups of 16

The arithmetic is that of `cute_attn.quantize.quantize_reference`, bit for bit: float32, round to nearest, the
same order of butterflies, in blocks of `rotation_block(head_dim)` columns. A group of zeros gets scale 1; a NaN
or inf in a group makes its scale NaN.

Tensors, last stride 1, every other stride dynamic:

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim),
    v (batch, seqlen_k, heads_k, head_dim_v)    bf16 or fp16
    signs (head_dim,) float32 +-1
    sums (batch, chunks, heads_k, head_dim) float32: what the mean is made of, see below
    amax_q, amax_k, amax_v (batch, heads) float32: given amax of the "static" modes, may be expanded
    q8, k8 like q, k in e4m3 or int8; vt (batch, heads_k, head_dim_v, ceil16(seqlen_k)) e4m3
    q_scale, q_dot (batch, heads_q, seqlen_q); k_scale (batch, heads_k, ceil(seqlen_k / 64));
    v_scale (batch, heads_k, ceil(seqlen_k / 256)), all float32

Two launches at most. `KeySums`, where K is smoothed and no mean is given, leaves sums of every 16th key over
chunks of the sequence. The second grid has CTAs of `thread_count`, 1024 threads to an SM, each in a role:
`Rows` for up to 512 rows of one head of Q or K, `Values` for 256 keys of one head of V. It may start before
the sums are there: the roles of Q and K first fetch their rows, then wait for the sums and finish the mean,
each CTA for itself.

The pieces: vectors.py, then the roles in rows.py and values.py, each to be read by itself; here are the grids and
the sums.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..config import MEAN_LANES, MEAN_STRIDE, MEAN_UNROLL, QUANTIZE_SPAN, V_SCALE_GROUP, QuantizeConfig
from .rotary import Rotary
from .rows import WIDTH, Rows
from .values import Values
from .vectors import IN_TYPES, address_in, address_of, padded_width, thread_count, vector, widen

HALVINGS = 2  # of QUANTIZE_SPAN at most, where there are few CTAs
FULL = 3 * 132  # CTAs of Q and K, for each CTA that an SM takes, from which it is not halved: three rounds
THREADS_PER_SM = 1024  # that registers shall allow: 64 for each
SMEM_CARVEOUT = 86  # per cent of the L1 cache and shared memory: room for all these CTAs


class Quantize:
    """Host entry of one configuration: at most two launches on one stream."""

    def __init__(self, cfg: QuantizeConfig):
        cfg.check()
        self.smooth = cfg.smooth
        self.threads = thread_count(cfg)
        self.q_rows = Rows(cfg, cfg.q_mode, keys=False)
        self.k_rows = Rows(cfg, cfg.k_mode, keys=True)
        self.values = Values(cfg, self.threads)
        self.key_sums = KeySums(cfg)
        # A CTA takes whole passes.
        least = max(rows.pass_rows * rows.group_passes for rows in (self.q_rows, self.k_rows))
        self.halvings = min(HALVINGS, (QUANTIZE_SPAN // least).bit_length() - 1)
        # Registers are limited only where the rows of a scale leave room.
        held = max(self.q_rows.group_passes, self.k_rows.group_passes) * WIDTH
        allowed = THREADS_PER_SM if held <= 32 else THREADS_PER_SM // 2
        if self.q_rows.rotary.half:  # 80 registers; CTAs of 512 threads, which 64 would make spill, are alone
            allowed = min(allowed, THREADS_PER_SM * 3 // 4)
        self.ctas_per_sm = allowed // self.threads

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        signs: cute.Tensor,
        sums: cute.Tensor,
        amax_q: cute.Tensor,
        amax_k: cute.Tensor,
        amax_v: cute.Tensor,
        q8: cute.Tensor,
        k8: cute.Tensor,
        vt: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        q_dot: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        chunk: Int32,
        count: Int32,
        stream,
    ):
        summing = chunk > 0
        if const_expr(self.smooth):
            if summing:  # else the mean is given, as one sum
                self.key_sums.launch(k, sums, cos, sin, chunk, stream)
        heads = q.shape[2] + k.shape[2]
        spans = cute.ceil_div(max(q.shape[1], k.shape[1]), QUANTIZE_SPAN)
        halved = Int32(0)
        for step in cutlass.range_constexpr(self.halvings):
            if heads * q.shape[0] * spans << step < FULL * self.ctas_per_sm:
                halved = Int32(step + 1)
        tasks = (heads << halved) + k.shape[2] * (QUANTIZE_SPAN // V_SCALE_GROUP)
        self.kernel(
            q,
            k,
            v,
            signs,
            sums,
            amax_q,
            amax_k,
            amax_v,
            q8,
            k8,
            vt,
            q_scale,
            k_scale,
            v_scale,
            q_dot,
            cos,
            sin,
            count,
            q.shape[2] // k.shape[2],
            halved,
        ).launch(
            grid=[tasks * q.shape[0], spans, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT,
            use_pdl=summing if self.smooth else False,
        )

    @cute.kernel
    def kernel(
        self,
        m_q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        m_k: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_v: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        m_signs: cute.Tensor,  # (head_dim,)
        m_sums: cute.Tensor,  # (batch, chunks, heads_k, head_dim)
        m_amax_q: cute.Tensor,  # (batch, heads_q)
        m_amax_k: cute.Tensor,  # (batch, heads_k)
        m_amax_v: cute.Tensor,  # (batch, heads_k)
        m_q8: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        m_k8: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_vt: cute.Tensor,  # (batch, heads_k, head_dim_v, ceil16(seqlen_k))
        m_q_scale: cute.Tensor,  # (batch, heads_q, seqlen_q)
        m_k_scale: cute.Tensor,  # (batch, heads_k, ceil(seqlen_k / 64))
        m_v_scale: cute.Tensor,  # (batch, heads_k, ceil(seqlen_k / 256))
        m_dot: cute.Tensor,  # (batch, heads_q, seqlen_q)
        m_cos: cute.Tensor,  # (seqlen_ro, rotary_dim / 2)
        m_sin: cute.Tensor,  # (seqlen_ro, rotary_dim / 2)
        count: Int32,
        group: Int32,  # query heads of a kv head
        halved: Int32,  # how often QUANTIZE_SPAN is halved
    ):
        # Heads of Q, K and V fastest: neighbours in memory run together, and so do the three roles, of which
        # those of Q and K are heavier on the instruction units and that of V on memory. V first: it needs no
        # sums.
        work, span, _ = cute.arch.block_idx()
        heads_q, heads_k = m_q.shape[2], m_k.shape[2]
        of_v = heads_k * (QUANTIZE_SPAN // V_SCALE_GROUP)
        tasks = ((heads_q + heads_k) << halved) + of_v
        task = work % tasks
        batch = work // tasks
        rows = Int32(QUANTIZE_SPAN) >> halved
        smem = SmemAllocator()
        stage_words = max(self.q_rows.ring_words, self.values.tile_words)
        stage = smem.allocate_tensor(Uint32, cute.make_layout(stage_words), 1024)
        columns = smem.allocate_tensor(Float32, cute.make_layout(2 * self.q_rows.width), 16)
        warps = self.threads // 32
        scratch = smem.allocate_tensor(Float32, cute.make_layout((2, warps), stride=(warps, 1)), 16)
        side = smem.allocate_tensor(
            Float32, cute.make_layout((2, QUANTIZE_SPAN), stride=(QUANTIZE_SPAN, 1)), 16
        )
        if task < of_v:
            head = task % heads_k
            block = span * (QUANTIZE_SPAN // V_SCALE_GROUP) + task // heads_k
            if block * V_SCALE_GROUP < m_v.shape[1]:
                self.values.run(
                    m_v[batch, None, head, None],
                    m_amax_v[batch, head],
                    m_vt[batch, head, None, None],
                    m_v_scale[batch, head, None],
                    block,
                    stage,
                    scratch,
                )
        else:
            task = task - of_v
            head = task % (heads_q + heads_k)
            block = (span << halved) + task // (heads_q + heads_k)
            if head < heads_q:
                if block * rows < m_q.shape[1]:
                    self.q_rows.run(
                        m_q[batch, None, head, None],
                        m_signs,
                        m_sums[batch, None, head // group if self.smooth else 0, None],
                        m_amax_q[batch, head],
                        m_q8[batch, None, head, None],
                        m_q_scale,
                        m_dot,
                        batch,
                        head,
                        m_cos,
                        m_sin,
                        m_k.shape[1] - m_q.shape[1],
                        count,
                        block,
                        rows,
                        stage,
                        columns,
                        scratch,
                        side,
                    )
            else:
                head = head - heads_q
                if block * rows < m_k.shape[1]:
                    self.k_rows.run(
                        m_k[batch, None, head, None],
                        m_signs,
                        m_sums[batch, None, head, None],
                        m_amax_k[batch, head],
                        m_k8[batch, None, head, None],
                        m_k_scale,
                        m_k_scale,
                        batch,
                        head,
                        m_cos,
                        m_sin,
                        Int32(0),
                        count,
                        block,
                        rows,
                        stage,
                        columns,
                        scratch,
                        side,
                    )


class TransposeV:
    """Host entry for ready e4m3 V: only the transposition and the permutation."""

    def __init__(self, cfg: QuantizeConfig):
        cfg.check()
        self.values = Values(cfg, 2 * padded_width(cfg.head_dim_v))

    @cute.jit
    def __call__(self, v: cute.Tensor, vt: cute.Tensor, stream):
        blocks = cute.ceil_div(v.shape[1], V_SCALE_GROUP)
        self.kernel(v, vt, blocks).launch(
            grid=[blocks * v.shape[2] * v.shape[0], 1, 1], block=[self.values.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        m_v: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        m_vt: cute.Tensor,  # (batch, heads_k, head_dim_v, ceil16(seqlen_k))
        blocks: Int32,
    ):
        work, _, _ = cute.arch.block_idx()
        heads = m_v.shape[2]
        head = work % heads
        block = work // heads % blocks
        batch = work // heads // blocks
        stage = SmemAllocator().allocate_tensor(Uint32, cute.make_layout(self.values.tile_words), 16)
        self.values.transpose(m_v[batch, None, head, None], m_vt[batch, head, None, None], block, stage)


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
        column = 8 * (tid % (self.d // 8))
        lane = tid // (self.d // 8)
        samples = cute.ceil_div(keys.shape[0], MEAN_STRIDE)
        rows = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((MEAN_LANES, self.d), stride=(self.d, 1)), 16
        )
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        for step in cutlass.range(chunk // (MEAN_LANES * MEAN_UNROLL), unroll=1):
            raw = cute.make_rmem_tensor((4, MEAN_UNROLL), Uint32)
            other = cute.make_rmem_tensor((4, MEAN_UNROLL), Uint32)
            for i in cutlass.range_constexpr(MEAN_UNROLL):
                sample = index * chunk + (step * MEAN_UNROLL + i) * MEAN_LANES + lane
                # Past the end the last sample is read, not taken: without a branch all loads are in flight.
                key = min(sample, samples - 1) * MEAN_STRIDE
                self.load(keys, key, column, raw[None, i])
                if const_expr(self.rotary.half):
                    self.load(keys, key, self.rotary.partner(m_cos.shape[1], column), other[None, i])
            for i in cutlass.range_constexpr(MEAN_UNROLL):
                sample = index * chunk + (step * MEAN_UNROLL + i) * MEAN_LANES + lane
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
            cute.autovec_copy(part, vector(cute.domain_offset((column + 4 * half,), rows[lane, None]), 4))
        cute.arch.sync_threads()  # all threads: the sums of all lanes are there
        if tid < self.d:
            value = rows[0, tid]
            for i in cutlass.range_constexpr(1, MEAN_LANES):
                value = value + rows[i, tid]
            m_sums[(*where, tid)] = value
