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
each CTA for itself. Where there is one chunk and all CTAs run at once, they sum, too, and the first launch is saved.
Where keys are on several GPUs, each first launches `KeySums` alone, and the second grid then gets the sums of all.

The pieces: vectors.py, then the roles in rows.py and values.py and the sums in key_sums.py, each to be read by itself;
here are the grids.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..config import QUANTIZE_SPAN, V_SCALE_GROUP, QuantizeConfig
from .key_sums import KeySums
from .rows import WIDTH, Rows
from .values import Values
from .vectors import padded_width, thread_count

HALVINGS = 2  # of QUANTIZE_SPAN at most, where there are few CTAs
SMS = 132  # of the GPU, for the choices below
FULL = 3 * SMS  # CTAs of Q and K, for each CTA that an SM takes, from which it is not halved: three rounds
ALONE = SMS  # CTAs, likewise, up to which those of Q and K sum the keys themselves: one round
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
        count: Int32,  # samples of the mean; 0: the sums are all that is wanted
        stream,
    ):
        heads = q.shape[2] + k.shape[2]
        spans = cute.ceil_div(max(q.shape[1], k.shape[1]), QUANTIZE_SPAN)
        halved = Int32(0)
        for step in cutlass.range_constexpr(self.halvings):
            if heads * q.shape[0] * spans << step < FULL * self.ctas_per_sm:
                halved = Int32(step + 1)
        tasks = (heads << halved) + k.shape[2] * (QUANTIZE_SPAN // V_SCALE_GROUP)
        summing = chunk > 0  # else the mean is given, as one sum
        few = tasks * q.shape[0] * spans <= ALONE * self.ctas_per_sm
        alone = summing and sums.shape[1] == 1 and few and count > 0
        behind = summing and not alone
        if const_expr(self.smooth):
            if behind:
                self.key_sums.launch(k, sums, cos, sin, chunk, stream)
        if count > 0:
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
                chunk if alone else Int32(0),
                q.shape[2] // k.shape[2],
                halved,
            ).launch(
                grid=[tasks * q.shape[0], spans, 1],
                block=[self.threads, 1, 1],
                stream=stream,
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=SMEM_CARVEOUT,
                use_pdl=behind if self.smooth else False,
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
        chunk: Int32,  # samples of the one chunk that every CTA sums by itself; 0: `m_sums` has or will have the sums
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
        side = smem.allocate_tensor(Float32, cute.make_layout(self.q_rows.side_floats), 16)
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
                        m_k[batch, None, head // group if self.smooth else 0, None],
                        count,
                        chunk,
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
                        m_k[batch, None, head, None],
                        count,
                        chunk,
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
