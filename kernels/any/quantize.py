"""16-bit Q, K, V to the operands of the 8-bit forward kernel.

Q, K:   x = float32(input) [signs] [- signs mean of the head's keys] [Walsh-Hadamard]
        amax over the scale group
        code = round(x * (QMAX / amax)), scale = amax * norm / QMAX
V:      e4m3 with one scale for 256 keys, transposed to (head_dim, keys), keys permuted in groups of 16

The arithmetic is that of `cute_attn.quantize.quantize_reference`, bit for bit: float32, round to nearest, the
same order of butterflies. A group of zeros gets scale 1; a NaN or inf in a group makes its scale NaN.

Tensors, last stride 1, every other stride dynamic:

    q (batch, seqlen_q, heads_q, head_dim), k, v (batch, seqlen_k, heads_k, head_dim)    bf16 or fp16
    signs (head_dim,) float32 +-1
    sums (batch, chunks, heads_k, head_dim) float32: what the mean is made of, see below
    amax_q, amax_k, amax_v (batch, heads) float32: given amax of the "static" modes, may be expanded
    q8, k8 like q, k in e4m3 or int8; vt (batch, heads_k, head_dim, ceil16(seqlen_k)) e4m3
    q_scale, q_dot (batch, heads_q, seqlen_q); k_scale (batch, heads_k, ceil(seqlen_k / 64));
    v_scale (batch, heads_k, ceil(seqlen_k / 256)), all float32

Two launches at most. `KeySums`, where K is smoothed and no mean is given, leaves sums of every 16th key over
chunks of the sequence. The second grid has CTAs of 2 head_dim threads, 1024 threads to an SM, each in a role:
`Rows` for up to 512 rows of one head of Q or K, `Values` for 256 keys of one head of V. It may start before
the sums are there: the roles of Q and K first fetch their rows, then wait for the sums and finish the mean,
each CTA for itself.

`Rows`: 32 neighbouring elements of a row a thread, in passes of 64 rows. Besides the issue of instructions,
this role is bound by the pipe that shuffles and shared memory have in common, so a thread takes as many
elements as 64 registers hold: butterflies of distance 1 to 16 stay inside a thread, the others are shuffles
among the head_dim / 32 lanes of a row. Rows come through shared memory, two passes in flight without holding
a register. What a CTA does once, some 450 instructions a thread, is a sixth of its work at 256 rows.

`Values`: four keys by eight dims a thread and unit. Of four units, two wait for their scale in registers and
two in shared memory, where the transposed tile goes once all have been read.

Why the permutation: the FP32 accumulator of S gives lane q = l % 4 the columns 8 j + 2 q, + 1; the 8-bit A
operand of P V wants four neighbouring keys 4 q .. 4 q + 3 in the same register. Softmax over keys does not
care for their order, so V's keys are stored in the order in which the accumulator holds P: position p of a
group of 16 holds key PI[p] = 8 ((p % 4) / 2) + 2 (p / 4) + p % 2.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr
from cutlass.memory import SmemAllocator

from ..config import (
    K_SCALE_GROUP,
    MEAN_CHUNKS,
    MEAN_LANES,
    MEAN_STRIDE,
    MEAN_UNROLL,
    QUANTIZE_SPAN,
    V_SCALE_GROUP,
    QuantizeConfig,
)

F8 = cutlass.Float8E4M3FN
HALVINGS = 2  # of QUANTIZE_SPAN, where there are few CTAs
FULL = 3 * 132  # CTAs of Q and K, for each CTA that an SM takes, from which it is not halved: three rounds
WIDTH = 32  # elements of a row that a thread takes: the more, the less shuffles
THREADS = {64: 128, 128: 256, 256: 512}  # of a CTA, by head_dim: 64 rows, a scale of K, in a pass
THREADS_PER_SM = 1024  # that registers shall allow: 64 for each
RING_BYTES = 128  # of a thread, for its rows in flight: two passes
UNITS_KEPT = 2  # units of V that wait for their scale in the registers of a thread; others, in shared memory
SMEM_CARVEOUT = 86  # per cent of the L1 cache and shared memory: room for all these CTAs
SMALLEST_AMAX = 2.0**-100  # keeps QMAX / amax finite
E4M3_MAX = 448.0
INT8_MAX = 127.0

IN_TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": F8}


@cute.jit
def abs_max(a: Float32, b: Float32) -> Float32:
    """max(|a|, |b|) up to its sign, NaN if either is: one instruction. `magnitude` drops the sign."""
    return cute.arch.fmax(a, b, abs=True, nan=True)


@cute.jit
def abs_max_pair(a: Uint32, b: Uint32) -> Uint32:
    """max(a, |b|) of two packed bf16 or fp16 pairs, a without signs: as integers, NaN is above infinity."""
    return cute.arch.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[a, b & Uint32(0x7FFF7FFF)],
    )


@cute.jit
def magnitude(a: Float32) -> Float32:
    """|a|, also of a NaN."""
    return (a.bitcast(Int32) & Int32(0x7FFFFFFF)).bitcast(Float32)


@cute.jit
def quotient(a: cutlass.Constexpr, b: Float32) -> Float32:
    """a / b to nearest for a constant a from 1 to 448 and b from 2^-100, also infinite or NaN.

    The steps are those of the compiler's own division, which besides checks its operands and calls a function
    for the extreme ones: its registers are wanted for the rows. Here a power of two keeps all steps in range.
    """
    down = Float32(2.0**-64) if b > Float32(1.0) else Float32(1.0)
    q = cute.arch.inline_ptx(
        "{ .reg .f32 c, r, e, q; neg.f32 c, {$r1}; rcp.approx.ftz.f32 r, {$r1};"
        " fma.rn.f32 e, c, r, 0f3F800000; fma.rn.f32 r, r, e, r;"
        " mul.rn.f32 q, {$r0}, r; fma.rn.f32 e, c, q, {$r0}; fma.rn.f32 {$w0}, e, r, q; }",
        write_only_types=[Float32],
        read_only_args=[Float32(a), b * down],
    )
    q = q * down
    return Float32(0.0) if b == Float32(math.inf) else q


@cute.jit
def scales_of(amax: Float32, qmax: cutlass.Constexpr, norm: cutlass.Constexpr):
    """amax of a group -> (factor to codes, scale back); the reference is `cute_attn.quantize.amax_scale`."""
    safe = cute.arch.fmax(amax, Float32(SMALLEST_AMAX), nan=True)
    inverse = quotient(qmax, safe)
    scale = safe * Float32(float(np.float32(norm / qmax))) + (amax - amax)  # the last term: NaN unless finite
    zero = amax == Float32(0.0)
    return Float32(1.0) if zero else inverse, Float32(1.0) if zero else scale


@cute.jit
def int8_word(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four floats -> four int8 (round to nearest even, saturated, NaN -> 0) in one register."""
    return cute.arch.inline_ptx(
        "{ .reg .s32 a, b, c, d, t; cvt.rni.s32.f32 a, {$r0}; cvt.rni.s32.f32 b, {$r1};"
        " cvt.rni.s32.f32 c, {$r2}; cvt.rni.s32.f32 d, {$r3};"
        " cvt.pack.sat.s8.s32.b32 t, d, c, 0; cvt.pack.sat.s8.s32.b32 {$w0}, b, a, t; }",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


@cute.jit
def widen(pair: Uint32, element: cutlass.Constexpr):
    """The two bf16 or fp16 of a register as float32, the low one first."""
    if const_expr(element is cutlass.BFloat16):
        return (pair << 16).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)
    return cute.arch.inline_ptx(
        "{ .reg .f16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


@cute.jit
def address_in(t: cute.Tensor, row: Int32, column: Int32) -> Int64:
    """Global address of an element of a tensor of rows."""
    return cute.domain_offset((row, column), t).iterator.toint()


@cute.jit
def row_offset(t: cute.Tensor, row: Int32) -> Int64:
    """Bytes from row 0 of a tensor of rows to `row`, which is not negative.

    Strides of inputs are multiples of eight elements: in that unit they fit in 32 bits, and the product is
    short.
    """
    step = Uint32(t.stride[0] // 8)
    return Int64(Uint64(Uint32(row)) * Uint64(step) * t.element_type.width)


@cute.jit
def last_row(t: cute.Tensor, row: Int32) -> Int32:
    """`row`, or the last one of t if it is past the end.

    Blocks that reach past the end take copies of the last row, which is one of theirs: no load waits for a
    branch, and the largest magnitude of a group stays what it is. Their codes are not stored.
    """
    return min(row, t.shape[0] - 1)


@cute.jit
def address_of(element: cutlass.Constexpr, address, space: cutlass.Constexpr) -> cute.Pointer:
    """A pointer that is known to be aligned to 16 bytes, or to eight e4m3."""
    return cute.make_ptr(element, address, space, assumed_align=16)


@cute.jit
def vector(t: cute.Tensor, n: cutlass.Constexpr) -> cute.Tensor:
    """The first n elements of `t`, known to be aligned to their total size (at most 16 bytes)."""
    return cute.make_tensor(address_of(t.element_type, t.iterator.toint(), t.memspace), cute.make_layout(n))


@cute.jit
def block_max(value: Float32, scratch: cute.Tensor, slot: Int32, warps: cutlass.Constexpr) -> Float32:
    """abs_max over the CTA, for every thread. `scratch` is (slots, warps); ends with a CTA barrier passed."""
    for step in cutlass.range_constexpr(5):
        value = abs_max(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step))
    tid, _, _ = cute.arch.thread_idx()
    if tid % 32 == 0:  # not warp_idx() in here: it synchronises the warp, of which one lane has come
        scratch[slot, tid // 32] = value
    cute.arch.sync_threads()  # all threads: every warp has left its maximum
    total = scratch[slot, tid % warps]
    for step in cutlass.range_constexpr(warps.bit_length() - 1):
        total = abs_max(total, cute.arch.shuffle_sync_bfly(total, offset=1 << step))
    return magnitude(total)


class Quantize:
    """Host entry of one configuration: at most two launches on one stream."""

    def __init__(self, cfg: QuantizeConfig):
        cfg.check()
        self.smooth = cfg.smooth
        self.threads = THREADS[cfg.head_dim]
        self.q_rows = Rows(cfg, cfg.q_mode, keys=False)
        self.k_rows = Rows(cfg, cfg.k_mode, keys=True)
        self.values = Values(cfg)
        self.key_sums = KeySums(cfg)
        # Registers are limited only where the rows of a scale leave room.
        held = max(self.q_rows.group_passes, self.k_rows.group_passes) * WIDTH
        self.ctas_per_sm = THREADS_PER_SM // self.threads // (1 if held <= 32 else 2)

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
        chunk: Int32,
        count: Int32,
        stream,
    ):
        summing = chunk > 0
        if const_expr(self.smooth):
            if summing:
                self.key_sums.launch(k, sums, chunk, stream)
        heads = q.shape[2] + k.shape[2]
        spans = cute.ceil_div(max(q.shape[1], k.shape[1]), QUANTIZE_SPAN)
        halved = Int32(0)
        for step in cutlass.range_constexpr(HALVINGS):
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
        m_v: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_signs: cute.Tensor,  # (head_dim,)
        m_sums: cute.Tensor,  # (batch, chunks, heads_k, head_dim)
        m_amax_q: cute.Tensor,  # (batch, heads_q)
        m_amax_k: cute.Tensor,  # (batch, heads_k)
        m_amax_v: cute.Tensor,  # (batch, heads_k)
        m_q8: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        m_k8: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_vt: cute.Tensor,  # (batch, heads_k, head_dim, ceil16(seqlen_k))
        m_q_scale: cute.Tensor,  # (batch, heads_q, seqlen_q)
        m_k_scale: cute.Tensor,  # (batch, heads_k, ceil(seqlen_k / 64))
        m_v_scale: cute.Tensor,  # (batch, heads_k, ceil(seqlen_k / 256))
        m_dot: cute.Tensor,  # (batch, heads_q, seqlen_q)
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
        columns = smem.allocate_tensor(Float32, cute.make_layout(2 * self.values.d), 16)
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
                        m_q_scale[batch, head, None],
                        m_dot[batch, head, None],
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
                        m_k_scale[batch, head, None],
                        m_k_scale[batch, head, None],
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
        self.values = Values(cfg)

    @cute.jit
    def __call__(self, v: cute.Tensor, vt: cute.Tensor, stream):
        blocks = cute.ceil_div(v.shape[1], V_SCALE_GROUP)
        self.kernel(v, vt, blocks).launch(
            grid=[blocks * v.shape[2] * v.shape[0], 1, 1], block=[self.values.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        m_v: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_vt: cute.Tensor,  # (batch, heads_k, head_dim, ceil16(seqlen_k))
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
        self.threads = MEAN_LANES * self.d // 8

    @cute.jit
    def launch(self, k: cute.Tensor, sums: cute.Tensor, chunk: Int32, stream):
        self.kernel(k, sums, chunk).launch(
            grid=[sums.shape[1] * k.shape[2] * k.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        m_k: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        m_sums: cute.Tensor,  # (batch, chunks, heads_k, head_dim)
        chunk: Int32,  # samples, a multiple of MEAN_LANES * MEAN_UNROLL
    ):
        # The quantising grid may come up at once: it fetches its inputs, then waits for the end of this one.
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        work, _, _ = cute.arch.block_idx()
        heads, chunks = m_k.shape[2], m_sums.shape[1]
        head = work % heads
        index = work // heads % chunks
        batch = work // heads // chunks
        column = 8 * (tid % (self.d // 8))
        lane = tid // (self.d // 8)
        keys = m_k[batch, None, head, None]
        samples = cute.ceil_div(m_k.shape[1], MEAN_STRIDE)
        rows = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((MEAN_LANES, self.d), stride=(self.d, 1)), 16
        )
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        for step in cutlass.range(chunk // (MEAN_LANES * MEAN_UNROLL), unroll=1):
            raw = cute.make_rmem_tensor((4, MEAN_UNROLL), Uint32)
            for i in cutlass.range_constexpr(MEAN_UNROLL):
                sample = index * chunk + (step * MEAN_UNROLL + i) * MEAN_LANES + lane
                # Past the end the last sample is read, not taken: without a branch all loads are in flight.
                source = address_in(keys, min(sample, samples - 1) * MEAN_STRIDE, column)
                pointer = address_of(Uint32, source, cute.AddressSpace.gmem)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), raw[None, i])
            for i in cutlass.range_constexpr(MEAN_UNROLL):
                taken = index * chunk + (step * MEAN_UNROLL + i) * MEAN_LANES + lane < samples
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
            m_sums[batch, index, head, tid] = value


class Rows:
    """The role of a CTA that quantises up to QUANTIZE_SPAN rows of one head of K (`keys`) or of Q."""

    def __init__(self, cfg: QuantizeConfig, mode: str, keys: bool):
        self.d = cfg.head_dim
        self.in_type = IN_TYPES[cfg.in_dtype]
        self.int8 = cfg.qk_dtype == "int8"
        self.code_type = cutlass.Int8 if self.int8 else F8
        self.mode = mode
        self.keys = keys
        self.rotate = cfg.rotate
        self.smooth = cfg.smooth
        self.width = WIDTH
        self.lanes = self.d // self.width  # of one row
        self.levels = self.lanes.bit_length() - 1
        self.threads = THREADS[self.d]
        self.pass_rows = self.threads // self.lanes
        self.slot_bytes = 64 * self.width  # of a warp and pass
        self.slots = RING_BYTES // (2 * self.width)  # passes in flight
        self.ring_words = RING_BYTES // 4 * self.threads
        self.qmax = INT8_MAX if self.int8 else E4M3_MAX
        self.norm = 1.0 / math.sqrt(self.d) if cfg.rotate else 1.0
        # passes whose rows share a scale and are held at a time; a token's scale needs no other row
        group = {"block64": 64, "block128": 128, "block": 128}.get(mode, self.pass_rows)
        self.group_passes = group // self.pass_rows

    @cute.jit
    def fetch(self, m_x: cute.Tensor, column: Int32, row: Int32, target: Int32):
        """Starts the copy of a lane's pieces of a pass: 16 bytes from (row, column) to shared `target`, and
        the same of rows 256 / head_dim further on each to the next 512 bytes. For rows past the end:
        `last_row`."""
        for i in cutlass.range_constexpr(self.width // 8):
            of = last_row(m_x, row + i * (256 // self.d))
            source = address_in(m_x, 0, column) + row_offset(m_x, of)
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[target + 512 * i, source],
            )

    @cute.jit
    def prepare_columns(self, m_signs: cute.Tensor, m_sums: cute.Tensor, count: Int32, columns: cute.Tensor):
        """Signs and mean of all columns into shared memory, (2 head_dim,), as lanes read them."""
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(self.rotate):
            index = tid - self.d  # threads that have no column of the mean
            if index >= 0 and index < 8 * self.lanes:
                # Words 8 p + i, i < 8, of the lanes at place p: the signs of pair i of their elements in bits
                # 15 and 31, and those of pair i + 8 in bits 14 and 30.
                word = Uint32(0)
                for e in cutlass.range_constexpr(self.width // 8):
                    column = index // 8 * self.width + index % 8 * 2 + e // 2 * 16 + e % 2
                    bit = m_signs[column].bitcast(Uint32) & Uint32(1 << 31)
                    word = word | bit >> (16 * (1 - e % 2) + e // 2)
                columns[index] = word.bitcast(Float32)
        if const_expr(self.smooth):
            if tid < self.d:
                sign = m_signs[tid] if const_expr(self.rotate) else Float32(1.0)
                cute.arch.griddepcontrol_wait()  # the sums of KeySums, where it was launched before this grid
                chunks = m_sums.shape[0]
                # 32 bits hold the stride of what KeySums wrote; where it did not run, there is one chunk.
                step = Uint32(m_sums.stride[0])
                part = cute.make_rmem_tensor(MEAN_CHUNKS, Float32)
                for i in cutlass.range_constexpr(MEAN_CHUNKS):  # all loads in flight together
                    offset = Int64(Uint64(Uint32(min(i, chunks - 1))) * Uint64(step) * 4)
                    pointer = cute.make_ptr(
                        Float32, address_in(m_sums, 0, tid) + offset, cute.AddressSpace.gmem, assumed_align=4
                    )
                    part[i] = cute.make_tensor(pointer, cute.make_layout(1))[0]
                total = part[0]
                for i in cutlass.range_constexpr(1, MEAN_CHUNKS):
                    total = total + part[i] if i < chunks else total
                # A rotated row meets the mean after its signs. Of a query, the product with the mean is the
                # same, term by term. Column width p + 4 j + i stands at 4 lanes j + 4 p + i of the second
                # half: the lanes of a row read 16 bytes side by side.
                at = tid // 4 % (self.width // 4) * (4 * self.lanes) + tid // self.width * 4 + tid % 4
                columns[self.d + at] = total / Float32(count) * sign

    @cute.jit
    def own_mean(self, columns: cute.Tensor, eight: cutlass.Constexpr, place: Int32) -> cute.Tensor:
        """Eight of the thread's columns of the mean."""
        mine = cute.make_rmem_tensor(8, Float32)
        for j in cutlass.range_constexpr(2):
            start = self.d + 4 * self.lanes * (2 * eight + j) + 4 * place
            part = cute.make_tensor(mine.iterator + 4 * j, cute.make_layout(4))
            cute.autovec_copy(vector(cute.domain_offset(start, columns), 4), part)
        return mine

    @cute.jit
    def own_flips(self, columns: cute.Tensor, place: Int32) -> cute.Tensor:
        """Signs of the thread's columns, (8,) Uint32, see `prepare_columns`."""
        flips = cute.make_rmem_tensor(8, Uint32)
        words = cute.recast_tensor(flips, Float32)
        for j in cutlass.range_constexpr(2):
            part = cute.make_tensor(words.iterator + 4 * j, cute.make_layout(4))
            cute.autovec_copy(vector(cute.domain_offset(8 * place + 4 * j, columns), 4), part)
        return flips

    @cute.jit
    def read_slot(self, address: Int32, flips: cute.Tensor, x: cute.Tensor):
        """The elements at shared `address` ^ 0, 16, .. with the signs of the rotation, as float32 into x
        (width,); flips: see `own_flips`."""
        for eight in cutlass.range_constexpr(self.width // 8):
            words = cute.make_rmem_tensor(4, Uint32)
            source = address_of(Uint32, address ^ (16 * eight), cute.AddressSpace.smem)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
            for i in cutlass.range_constexpr(4):
                pair = words[i]
                if const_expr(self.rotate):
                    pair = pair ^ (flips[(4 * eight + i) % 8] << eight // 2) & Uint32(0x80008000)
                x[8 * eight + 2 * i], x[8 * eight + 2 * i + 1] = widen(pair, self.in_type)

    @cute.jit
    def rotate_row(self, x: cute.Tensor, place: Int32):
        """Unnormalised Walsh-Hadamard transform of a row over its lanes; x (width,), in place."""
        for level in cutlass.range_constexpr(self.width.bit_length() - 1):  # distances 1, 2, .. width / 2
            for i in cutlass.range_constexpr(self.width):
                if const_expr(i & (1 << level) == 0):
                    a, b = x[i], x[i + (1 << level)]
                    x[i] = a + b
                    x[i + (1 << level)] = a - b
        for level in cutlass.range_constexpr(self.levels):  # distances width, .. d / 2: among lanes
            sign = Float32(1.0) if place & (1 << level) == 0 else Float32(-1.0)
            for i in cutlass.range_constexpr(self.width):
                other = cute.arch.shuffle_sync_bfly(x[i], offset=1 << level)
                x[i] = x[i] * sign + other  # lower lane a + b, upper lane a - b; the product is exact

    @cute.jit
    def largest(self, x: cute.Tensor) -> Float32:
        """abs_max of x, an rmem tensor (a power of two,), in a tree: a chain would wait for each result."""
        tops = cute.make_rmem_tensor(cute.size(x) // 2, Float32)
        for i in cutlass.range_constexpr(cute.size(tops)):
            tops[i] = abs_max(x[2 * i], x[2 * i + 1])
        for level in cutlass.range_constexpr(cute.size(tops).bit_length() - 1):
            for i in cutlass.range_constexpr(cute.size(tops) >> (level + 1)):
                tops[i] = abs_max(tops[2 * i], tops[2 * i + 1])
        return tops[0]

    @cute.jit
    def encode(self, x: cute.Tensor, factor: Float32, place: Int32) -> cute.Tensor:
        """Codes of x (width,) in words, in the order in which `run` stores them."""
        code = cute.make_rmem_tensor(self.width, self.code_type)
        words = cute.recast_tensor(code, Uint32)
        y = cute.make_rmem_tensor(self.width, Float32)
        for i in cutlass.range_constexpr(self.width):
            y[i] = x[i] * factor
        if const_expr(self.int8):
            for w in cutlass.range_constexpr(self.width // 4):
                words[w] = int8_word(y[4 * w], y[4 * w + 1], y[4 * w + 2], y[4 * w + 3])
        else:
            code.store(y.load().to(F8))
        if const_expr(self.width == 32):
            # Two neighbours swap halves: of either store, 16 bytes a lane, they fill a sector of 32 bytes.
            odd = place % 2 == 1
            for w in cutlass.range_constexpr(4):
                given = words[w] if odd else words[w + 4]
                other = cute.arch.shuffle_sync_bfly(given, offset=1)
                words[w], words[w + 4] = other if odd else words[w], words[w + 4] if odd else other
        return words

    @cute.jit
    def run(
        self,
        m_x: cute.Tensor,  # (seqlen, head_dim)
        m_signs: cute.Tensor,  # (head_dim,)
        m_sums: cute.Tensor,  # (chunks, head_dim)
        amax: Float32,
        m_codes: cute.Tensor,  # (seqlen, head_dim)
        m_scale: cute.Tensor,  # (seqlen,) or (groups of 64,)
        m_dot: cute.Tensor,  # (seqlen_q,)
        count: Int32,
        block: Int32,
        rows: Int32,  # of the CTA
        stage: cute.Tensor,
        columns: cute.Tensor,
        scratch: cute.Tensor,
        side: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        seqlen = m_x.shape[0]
        passes = rows // self.pass_rows
        # The copies: a warp's slot is 32 n pieces of 16 bytes, n = width / 8, its rows of a pass one after
        # the other. A lane copies pieces `lane`, 32 + lane, .. coalesced, and computes on n lane, n lane + 1,
        # .. Piece i stands at i ^ (i / 8 % n), so that the eight lanes of a shared-memory phase read eight
        # different banks of 16 bytes.
        n = self.width // 8
        first = block * rows + tid // 32 * (32 // self.lanes) + lane // (self.d // 8)
        column = lane % (self.d // 8) * 8
        slots = stage.iterator.toint() + tid // 32 * (self.slot_bytes * self.slots)
        target = slots + 16 * (lane ^ (lane // 8 % n))
        own = slots + 16 * (n * lane ^ (n * lane // 8 % n))
        for p in cutlass.range_constexpr(self.slots):
            if p < passes:
                self.fetch(m_x, column, first + p * self.pass_rows, target + self.slot_bytes * p)
            cute.arch.cp_async_commit_group()
        self.prepare_columns(m_signs, m_sums, count, columns)
        cute.arch.sync_threads()  # all threads: signs and mean are in shared memory

        place = tid % self.lanes
        local = tid // self.lanes  # row of the thread in the CTA
        # Of the pair of lanes that `encode` lets swap, each stores 16 bytes of either's 32.
        pair = self.width // 16
        codes = address_in(
            m_codes, block * rows + local, self.width * (place // pair * pair) + 16 * (place % pair)
        )
        codes_step = Int64(m_codes.stride[0]) * self.pass_rows
        flips = self.own_flips(columns, place)
        x = cute.make_rmem_tensor((self.width, self.group_passes), Float32)
        factor, scale = Float32(1.0), Float32(1.0)
        if const_expr(self.mode == "static"):
            factor, scale = scales_of(amax, self.qmax, self.norm)
        for group in cutlass.range(passes // self.group_passes, unroll=1):
            for g in cutlass.range_constexpr(self.group_passes):
                p = group * self.group_passes + g
                mine = x[None, g]
                slot = p % self.slots * self.slot_bytes
                cute.arch.cp_async_wait_group(self.slots - 1)
                cute.arch.sync_warp()  # the warp: the pieces that its other lanes have copied are there
                self.read_slot(own + slot, flips, mine)
                cute.arch.sync_warp()  # the warp: all lanes have read the slot
                ahead = p + self.slots
                if ahead < passes:
                    self.fetch(m_x, column, first + ahead * self.pass_rows, target + slot)
                cute.arch.cp_async_commit_group()  # empty at the end: keeps the number of groups in flight
                if const_expr(self.smooth):
                    # The mean comes from shared memory every time: `width` registers less than if held.
                    if const_expr(self.keys):
                        for eight in cutlass.range_constexpr(n):
                            mean = self.own_mean(columns, eight, place)
                            for i in cutlass.range_constexpr(8):
                                mine[8 * eight + i] = mine[8 * eight + i] - mean[i]
                            cute.arch.sync_warp()  # for the compiler, which would fetch all of it at once
                    else:
                        dot = self.dot(mine, columns, place)
                        if place == 0:
                            side[1, local + g * self.pass_rows] = dot
                if const_expr(self.rotate):
                    self.rotate_row(mine, place)
            if const_expr(self.mode != "static"):
                top = self.largest(
                    cute.make_tensor(x.iterator, cute.make_layout(self.width * self.group_passes))
                )
                if const_expr(self.mode == "token"):
                    for level in cutlass.range_constexpr(self.levels):
                        top = abs_max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << level))
                    top = magnitude(top)
                else:
                    top = block_max(top, scratch, group % 2, self.threads // 32)
                factor, scale = scales_of(top, self.qmax, self.norm)
            for g in cutlass.range_constexpr(self.group_passes):
                row = local + g * self.pass_rows
                if place == 0:
                    side[0, row] = scale
                words = self.encode(x[None, g], factor, place)
                if block * rows + row < seqlen:
                    for piece in cutlass.range_constexpr(pair):
                        address = codes + g * codes_step + 32 * piece
                        target_codes = address_of(Uint32, address, cute.AddressSpace.gmem)
                        part = cute.make_tensor(words.iterator + 4 * piece, cute.make_layout(4))
                        cute.autovec_copy(part, cute.make_tensor(target_codes, cute.make_layout(4)))
            local += self.group_passes * self.pass_rows
            codes += self.group_passes * codes_step
        cute.arch.sync_threads()  # all threads: scales and products of all rows are in shared memory
        step = K_SCALE_GROUP if self.keys else 1  # rows of a scale in storage
        for i in cutlass.range_constexpr(max(1, QUANTIZE_SPAN // step // self.threads)):
            index = i * self.threads + tid
            entry = block * (rows // step) + index
            if index < rows // step and entry < m_scale.shape[0]:
                m_scale[entry] = side[0, index * step]
                if const_expr(self.smooth and not self.keys):
                    m_dot[entry] = side[1, index]

    @cute.jit
    def dot(self, x: cute.Tensor, columns: cute.Tensor, place: Int32) -> Float32:
        """Product of a query row with the mean key, over the lanes of the row; x (width,)."""
        total = Float32(0.0)
        for eight in cutlass.range_constexpr(self.width // 8):
            mean = self.own_mean(columns, eight, place)
            for i in cutlass.range_constexpr(8):
                total = total + x[8 * eight + i] * mean[i]
            cute.arch.sync_warp()  # for the compiler, which would fetch all of it at once
        for level in cutlass.range_constexpr(self.levels):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << level)
        return total


class Values:
    """The role of a CTA that quantises 256 keys of one head of V and writes them transposed and permuted.

    A thread takes units of four keys (one word of the permuted order) by eight dims, so that the transposed
    tile in shared memory is written in whole words. A warp's unit is 8 runs of eight dims by 4 words: it
    reads 128 bytes of each of 16 keys, and its words fall into 32 different banks.
    """

    def __init__(self, cfg: QuantizeConfig):
        self.d = cfg.head_dim
        self.in_type = IN_TYPES[cfg.in_dtype]
        self.static = cfg.v_mode == "static"
        self.threads = THREADS[self.d]
        self.warps = self.threads // 32
        self.runs = self.d // 64  # widths of a warp's unit
        self.units = self.d // 4 // self.warps  # of a thread
        self.kept = min(self.units, UNITS_KEPT)
        self.tile_words = 64 * self.d

    @cute.jit
    def place(self, unit: cutlass.Constexpr):
        """(run of eight dims, word of four keys) of a unit of this thread."""
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        index = unit * self.warps + tid // 32
        return lane % 8 + 8 * (index % self.runs), lane // 8 + 4 * (index // self.runs)

    @cute.jit
    def source(self, m_v: cute.Tensor, block: Int32, unit: cutlass.Constexpr, j: cutlass.Constexpr) -> Int64:
        """Address of eight dims of key j of a unit. For keys past the end: `last_row`."""
        run, word = self.place(unit)
        key = block * V_SCALE_GROUP + word // 4 * 16 + word % 4 * 2 + 8 * (j // 2) + j % 2
        return address_in(m_v, 0, 8 * run) + row_offset(m_v, last_row(m_v, key))

    @cute.jit
    def load(self, m_v: cute.Tensor, block: Int32, unit: cutlass.Constexpr, raw: cute.Tensor):
        """A unit into raw (8 dims, 4 keys)."""
        for j in cutlass.range_constexpr(4):
            source = address_of(self.in_type, self.source(m_v, block, unit, j), cute.AddressSpace.gmem)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), raw[None, j])

    @cute.jit
    def staged(self, stage: cute.Tensor, unit: cutlass.Constexpr, j: cutlass.Constexpr) -> Int32:
        """Shared address of eight dims of key j of a unit past the kept ones; only this thread's."""
        tid, _, _ = cute.arch.thread_idx()
        return stage.iterator.toint() + 16 * (((unit - self.kept) * 4 + j) * self.threads + tid)

    @cute.jit
    def unstage(self, stage: cute.Tensor, unit: cutlass.Constexpr, raw: cute.Tensor):
        """A unit from shared memory into raw (8 dims, 4 keys)."""
        for j in cutlass.range_constexpr(4):
            source = address_of(self.in_type, self.staged(stage, unit, j), cute.AddressSpace.smem)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), raw[None, j])

    @cute.jit
    def largest_pair(self, raw: cute.Tensor, pair: Uint32) -> Uint32:
        """abs_max_pair of `pair` and all of raw: two elements an instruction, and exact."""
        pairs = cute.recast_tensor(raw, Uint32)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            pair = abs_max_pair(pair, pairs[i])
        return pair

    @cute.jit
    def encode(
        self, raw: cute.Tensor, factor: Float32, unit: cutlass.Constexpr, keys: Int32, words: cute.Tensor
    ):
        """Codes of raw (8, 4) to words (8,), one for each dim; zero for keys at or past `keys`, also where
        factor is NaN."""
        _, word = self.place(unit)
        pairs = cute.recast_tensor(raw, Uint32)
        mask = Uint32(0)
        for j in cutlass.range_constexpr(4):
            if word // 4 * 16 + word % 4 * 2 + 8 * (j // 2) + j % 2 < keys:
                mask = mask | Uint32(0xFF << 8 * j)
        for e in cutlass.range_constexpr(8):
            codes = cute.make_rmem_tensor(4, F8)
            if const_expr(self.in_type is not F8):
                four = cute.make_rmem_tensor(4, Float32)
                for j in cutlass.range_constexpr(4):
                    four[j] = widen(pairs[e // 2, j], self.in_type)[e % 2] * factor
                codes.store(four.load().to(F8))
            else:
                for j in cutlass.range_constexpr(4):
                    codes[j] = raw[e, j]
            words[e] = cute.recast_tensor(codes, Uint32)[0] & mask

    @cute.jit
    def write_tile(self, words: cute.Tensor, unit: cutlass.Constexpr, tile: cute.Tensor):
        """Codes of a unit, words (8,), to the transposed tile."""
        run, word = self.place(unit)
        for e in cutlass.range_constexpr(8):
            tile[8 * run + e, word ^ (4 * (run % 8))] = words[e]

    @cute.jit
    def store_tile(self, tile: cute.Tensor, block: Int32, m_vt: cute.Tensor):
        """The tile to global memory in pieces of 16 bytes, 16 in a row."""
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.sync_threads()  # all threads: the transposed tile is complete
        for t in cutlass.range_constexpr(self.d * 16 // self.threads):
            piece = t * self.threads + tid
            row = piece // 16
            column = piece % 16
            position = block * V_SCALE_GROUP + 16 * column
            if position < m_vt.shape[1]:
                source = cute.domain_offset((4 * (column ^ (row // 8 % 8)),), tile[row, None])
                words = cute.make_rmem_tensor(4, Uint32)
                cute.autovec_copy(vector(source, 4), words)
                target = cute.domain_offset((position,), m_vt[row, None])
                cute.autovec_copy(cute.recast_tensor(words, F8), vector(target, 16))

    @cute.jit
    def tile_of(self, stage: cute.Tensor) -> cute.Tensor:
        """(head_dim, 64 words of four keys); word w of row c stands at w ^ 4 (c / 8 % 8), see the class."""
        return cute.make_tensor(stage.iterator, cute.make_layout((self.d, 64), stride=(64, 1)))

    @cute.jit
    def run(
        self,
        m_v: cute.Tensor,  # (seqlen_k, head_dim)
        amax: Float32,
        m_vt: cute.Tensor,  # (head_dim, ceil16(seqlen_k))
        m_scale: cute.Tensor,  # (ceil(seqlen_k / 256),)
        block: Int32,
        stage: cute.Tensor,
        scratch: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        tile = self.tile_of(stage)
        raw = cute.make_rmem_tensor((8, 4, self.kept), self.in_type)
        for u in cutlass.range_constexpr(self.kept, self.units):
            for j in cutlass.range_constexpr(4):
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                    read_only_args=[self.staged(stage, u, j), self.source(m_v, block, u, j)],
                )
        cute.arch.cp_async_commit_group()
        for u in cutlass.range_constexpr(self.kept):
            self.load(m_v, block, u, raw[None, None, u])
        passing = cute.make_rmem_tensor((8, 4), self.in_type)
        if const_expr(not self.static):
            pair = cute.recast_tensor(raw, Uint32)[0] & Uint32(0x7FFF7FFF)
            pair = self.largest_pair(raw, pair)
            cute.arch.cp_async_wait_group(0)  # this thread's own copies, which no other thread reads
            for u in cutlass.range_constexpr(self.kept, self.units):
                self.unstage(stage, u, passing)
                pair = self.largest_pair(passing, pair)
            ends = cute.make_rmem_tensor(2, Uint32)  # two: a one-element tensor recasts with stride 0
            ends.fill(pair)
            both = cute.recast_tensor(ends, self.in_type)
            top = abs_max(both[0].to(Float32), both[1].to(Float32))
            amax = block_max(top, scratch, Int32(0), self.warps)
        factor, scale = scales_of(amax, E4M3_MAX, 1.0)
        if tid == 0:
            m_scale[block] = scale
        keys = m_v.shape[0] - block * V_SCALE_GROUP
        words = cute.make_rmem_tensor((8, self.units), Uint32)
        for u in cutlass.range_constexpr(self.kept):
            self.encode(raw[None, None, u], factor, u, keys, words[None, u])
        if const_expr(self.units > self.kept):
            cute.arch.cp_async_wait_group(0)
            for u in cutlass.range_constexpr(self.kept, self.units):
                self.unstage(stage, u, passing)
                self.encode(passing, factor, u, keys, words[None, u])
            cute.arch.sync_threads()  # all threads: nothing staged is still to be read where the tile goes
        for u in cutlass.range_constexpr(self.units):
            self.write_tile(words[None, u], u, tile)
        self.store_tile(tile, block, m_vt)

    @cute.jit
    def transpose(self, m_v: cute.Tensor, m_vt: cute.Tensor, block: Int32, stage: cute.Tensor):
        """Codes as they are: m_v (seqlen_k, head_dim), m_vt (head_dim, ceil16(seqlen_k))."""
        tile = self.tile_of(stage)
        raw = cute.make_rmem_tensor((8, 4, self.units), self.in_type)
        for u in cutlass.range_constexpr(self.units):
            self.load(m_v, block, u, raw[None, None, u])
        keys = m_v.shape[0] - block * V_SCALE_GROUP
        words = cute.make_rmem_tensor(8, Uint32)
        for u in cutlass.range_constexpr(self.units):
            self.encode(raw[None, None, u], Float32(1.0), u, keys, words)
            self.write_tile(words, u, tile)
        self.store_tile(tile, block, m_vt)
