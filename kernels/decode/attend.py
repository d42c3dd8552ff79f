"""Few queries against a KV cache: split-KV attention bound by the memory that K and V come from.

    S = softmax_scale Q K^T [softcap] [ALiBi], masked      P = softmax(S)      O = P V

FlashAttention-2's online softmax (arXiv 2307.08691, section 3.1) with the keys of a head split over CTAs and, inside
them, over warps (Flash-Decoding). Where a CTA has not seen all keys of its rows, it leaves O, the maximum and the sum
for combine.py, see split.py for who takes what.

Tensors, last stride 1 unless said, other strides free:

    q (batch, seqlen_q, heads_q, head_dim), out (batch, seqlen_q, heads_q, head_dim_v)    bf16 or fp16
    k_cache (sequences, slots, heads_k, head_dim), v_cache (..., head_dim_v)    of that dtype or e4m3
        paged: (pages, page_size, heads_k, ...), block_table (batch, blocks) int32
    k_scale, v_scale float32, of e4m3: (batch, heads_k), or (sequences or pages, slots, heads_k), any strides
    lse (batch, heads_q, seqlen_q) float32

A CTA takes `rows` packed rows: row r is query r // group with query head r % group of the group of its key head. Keys
come in steps of 16 for each warp: step t of a unit is keys 16 (warps t + w) and on for warp w. A warp copies its K and
V by cp.async into a ring of its own, `stages` deep, computes on one stage while the others are in flight, and meets the
other warps only at the end of a piece. So the loop has no barrier but the warp's own.

Slots outside of [first, end) of `Splits.key_range` are not read: the copy writes zeros, so that NaN there never meets a
product. Page numbers of such slots are not read either.

16-bit caches: operands as they lie. e4m3: codes become fp16 in registers, exactly, and all products are fp16. Q is
rounded to fp16 with a power of two for each row that brings its largest element below 2^15; scales of K multiply
scores. A scale of V for each token multiplies P, over a power of two R at least as large as all scales so far, so that
P does not leave fp16; O counts in units of R.

Inside 16 columns of an e4m3 row, the order of products Q K^T is that of the loads: lane q of four takes columns 4q ..
4q + 3, in Q, too. Of the products P V, word c of V's loads holds two neighbouring columns of two keys: one product
takes the even columns, one the odd ones, and lane q gets columns 4q .. 4q + 3 of O.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from ..any.vectors import copy_16_bytes_or_zeros, widen
from ..common.floats import bf16_pair, fp16_pair
from ..config import DECODE_KEYS, DecodeConfig
from .combine import Combine, finish
from .split import Splits, share_start
from .warp import (
    copy_4_bytes_or_zeros,
    e4m3_to_fp16,
    interleave_bytes,
    load_matrices,
    load_matrices_transposed,
    multiply_add,
    quad_max,
    quad_sum,
)

LOG2_E = math.log2(math.e)
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
SMALLEST_UNIT = 2.0**-100  # of O with scales for each token


@cute.jit
def power_of_two(exponent: Int32) -> Float32:
    """2^(exponent - 127) for a biased exponent from 1 to 254."""
    return (exponent << 23).bitcast(Float32)


class Decode:
    """Host entry of one configuration: the splitting kernel, and the combining one unless work is never split."""

    def __init__(self, cfg: DecodeConfig):
        cfg.check()
        self.cfg = cfg
        self.element = ELEMENTS[cfg.dtype]
        self.fp8 = cfg.cache == "e4m3"
        self.token_scales = cfg.scales == "token"
        self.product = "fp16" if self.fp8 else cfg.dtype  # elements of the products
        self.k_steps = -(-cfg.head_dim // 16)
        self.n_tiles = cfg.head_dim_v // 8
        self.adjusted = cfg.softcap or cfg.alibi  # scores are scaled before the softmax
        self.splits = Splits(cfg)
        self.combine = Combine(cfg)
        self.pdl = cfg.arch == "sm_90a"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        seqlens: cute.Tensor,  # (batch,) int32
        batch_idx,  # (batch,) int32 or None
        leftpad,  # likewise
        block_table,  # (batch, blocks) int32 with paging, else None
        k_scale,
        v_scale,
        slopes,  # (batch, heads_q) float32 with alibi
        sinks,  # (heads_q,) float32 with sinks
        workspace: Int64,  # address: (slots, rows, 2), then (slots, rows, head_dim_v) float32
        slots: Int32,
        softmax_scale_log2: Float32,  # > 0; with softcap softcap * log2(e)
        softcap_factor: Float32,  # 2 log2(e) softmax_scale / softcap
        seqlen_new: Int32,
        left: Int32,  # keys before and behind a query's own position that it sees
        right: Int32,
        ctas: Int32,
        splits: Int32,  # of a unit; 0: balanced
        least: Int32,  # tiles of a CTA at least, where balanced
        together: Int32,  # neighbouring key heads that are taken in step
        stream,
    ):
        cfg = self.cfg
        partial_ml = cute.make_tensor(
            cute.make_ptr(Float32, workspace, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((slots, cfg.rows, 2), stride=(Int64(cfg.rows * 2), 2, 1)),
        )
        partial_o = cute.make_tensor(
            cute.make_ptr(
                Float32,
                workspace + Int64(slots) * (cfg.rows * 8),
                cute.AddressSpace.gmem,
                assumed_align=16,
            ),
            cute.make_layout(
                (slots, cfg.rows, cfg.head_dim_v),
                stride=(Int64(cfg.rows * cfg.head_dim_v), cfg.head_dim_v, 1),
            ),
        )
        capacity = k_cache.shape[1]
        if const_expr(cfg.paging != "none"):
            capacity = k_cache.shape[1] * block_table.shape[1]
        shares = (ctas, splits, least, together)
        lengths = (seqlens, leftpad, q.shape[0], seqlen_new, capacity, q.shape[1], left)
        factor = Float32(1.0) if self.adjusted else softmax_scale_log2
        self.kernel(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            batch_idx,
            block_table,
            k_scale,
            v_scale,
            slopes,
            sinks,
            partial_ml,
            partial_o,
            lengths,
            shares,
            softmax_scale_log2,
            softcap_factor,
            factor,
            right,
        ).launch(grid=[ctas, 1, 1], block=[cfg.threads, 1, 1], stream=stream)
        if splits != 1:
            self.combine.launch(
                out, lse, sinks, partial_ml, partial_o, lengths, shares, factor, k_cache.shape[2], stream
            )

    # -- copies -----------------------------------------------------------------------------------------------

    @cute.jit
    def page_of(self, m_table, keys_seen, key0: Int32, page_size: Int32, b: Int32, lane: Int32) -> Int32:
        """Page of a step's keys, or of key `lane` of the step where pages are small. 0 where it is not wanted."""
        first, end = keys_seen
        page = Int32(0)
        if const_expr(self.cfg.paging == "block"):
            if (key0 < end) & (key0 + DECODE_KEYS > first):
                page = m_table[b, key0 // page_size]
        elif const_expr(self.cfg.paging == "token"):
            key = key0 + lane % DECODE_KEYS
            if (key < end) & (key >= first):
                page = m_table[b, key // page_size]
        return page

    @cute.jit
    def fetch_rows(
        self,
        m_x: cute.Tensor,  # (sequences or pages, slots, heads_k, columns)
        chunks: cutlass.Constexpr,  # pieces of 16 bytes of a row
        pitch: cutlass.Constexpr,
        sequence: Int32,
        head: Int32,
        key0: Int32,
        page: Int32,
        keys_seen,
        target: Int32,
        lane: Int32,
    ):
        """Starts the copies of a step's rows of K or V."""
        cfg = self.cfg
        first, end = keys_seen
        size_x = cfg.element_bytes
        strides = m_x.stride
        base = m_x.iterator.toint() + Int64(head) * strides[2] * size_x
        row_bytes = strides[1] * size_x
        if const_expr(cfg.paging == "none"):
            base = base + Int64(sequence) * strides[0] * size_x + Int64(key0) * row_bytes
        elif const_expr(cfg.paging == "block"):
            base = base + Int64(page) * strides[0] * size_x + Int64(key0 % m_x.shape[1]) * row_bytes
        else:
            # Of each row its own: lane r has the offset of row r.
            own = Int64(page) * strides[0] * size_x
            own = own + Int64((key0 + lane % DECODE_KEYS) % m_x.shape[1]) * row_bytes
        pieces = DECODE_KEYS * chunks
        # Where the lanes take whole rows, each piece of a lane is as many rows behind the one before: addresses are not
        # kept apart, for which there are no registers.
        apart = 32 // chunks if 32 % chunks == 0 and cfg.paging != "token" else 0
        source = base
        if const_expr(apart > 0):
            source = base + Int64(lane // chunks) * row_bytes + 16 * (lane % chunks)
        for i in cutlass.range_constexpr(-(-pieces // 32)):
            piece = 32 * i + lane
            row = piece // chunks
            column = piece - row * chunks
            if const_expr(apart > 0):
                if const_expr(i > 0):
                    source = source + Int64(apart) * row_bytes
            elif const_expr(cfg.paging == "token"):
                source = base + cute.arch.shuffle_sync(own, row % DECODE_KEYS) + 16 * column
            else:
                source = base + Int64(row) * row_bytes + 16 * column
            key = key0 + row
            size = 16 if (key < end) & (key >= first) else 0
            place = target + row * pitch + 16 * column
            if const_expr(32 * (i + 1) <= pieces):
                copy_16_bytes_or_zeros(place, source, size)
            elif piece < pieces:
                copy_16_bytes_or_zeros(place, source, size)

    @cute.jit
    def fetch_scales(
        self,
        m_k_scale: cute.Tensor,  # (sequences or pages, slots, heads_k)
        m_v_scale: cute.Tensor,
        sequence: Int32,
        head: Int32,
        key0: Int32,
        page: Int32,
        keys_seen,
        target: Int32,
        lane: Int32,
    ):
        """Starts the copies of a step's scales: lanes 0 to 15 those of K, the others those of V."""
        first, end = keys_seen
        key = key0 + lane % DECODE_KEYS
        place, slot = sequence, key
        if const_expr(self.cfg.paging != "none"):
            place, slot = page, key % m_k_scale.shape[1]
        # A lane has either K's or V's: chosen before the products with what changes, which so are done once.
        of_k = m_k_scale.iterator.toint() + 4 * Int64(head) * m_k_scale.stride[2]
        of_v = m_v_scale.iterator.toint() + 4 * Int64(head) * m_v_scale.stride[2]
        source = of_k if lane < DECODE_KEYS else of_v
        far = m_k_scale.stride[0] if lane < DECODE_KEYS else m_v_scale.stride[0]
        near = m_k_scale.stride[1] if lane < DECODE_KEYS else m_v_scale.stride[1]
        source = source + 4 * (Int64(place) * far + Int64(slot) * near)
        copy_4_bytes_or_zeros(target + 4 * lane, source, 4 if (key < end) & (key >= first) else 0)

    @cute.jit
    def fetch(
        self,
        m_k: cute.Tensor,
        m_v: cute.Tensor,
        m_k_scale,
        m_v_scale,
        sequence: Int32,
        head: Int32,
        key0: Int32,
        page: Int32,
        keys_seen,
        stage: Int32,
        lane: Int32,
    ):
        """Starts the copies of a step into the stage at shared address `stage`: K, V, scales."""
        cfg = self.cfg
        place_v = stage + DECODE_KEYS * cfg.k_pitch
        place = (sequence, head, key0, page, keys_seen)
        self.fetch_rows(m_k, cfg.k_chunks, cfg.k_pitch, *place, stage, lane)
        self.fetch_rows(m_v, cfg.v_chunks, cfg.v_pitch, *place, place_v, lane)
        if const_expr(self.token_scales):
            self.fetch_scales(m_k_scale, m_v_scale, *place, place_v + DECODE_KEYS * cfg.v_pitch, lane)

    # -- queries ----------------------------------------------------------------------------------------------

    @cute.jit
    def load_queries(
        self,
        m_q: cute.Tensor,
        b: Int32,
        head: Int32,
        row0: Int32,
        group: Int32,
        lane: Int32,
        q_frag: cute.Tensor,
        unit,
    ):
        """A fragments of Q, (4, k_steps, m_tiles) words, of the packed rows from row0 on; zeros past the last.

        unit  e4m3: (2, m_tiles) float32, set to the power of two by which products of a row are too small
        """
        cfg = self.cfg
        rows = m_q.shape[1] * group
        q_frag.fill(0)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            # Both halves always: zeros of which the assembler knew would be made anew for each product.
            for h in cutlass.range_constexpr(2):
                row = row0 + 16 * mt + 8 * h + lane // 4
                if const_expr(self.fp8):
                    unit[h, mt] = Float32(1.0)
                if row < rows:
                    source = cute.domain_offset(
                        (b, row // group, head * group + row % group, 0), m_q
                    ).iterator.toint()
                    if const_expr(self.fp8):
                        for s in cutlass.range_constexpr(self.k_steps):
                            words = cute.make_rmem_tensor(2, Uint32)
                            at = cute.make_ptr(
                                Uint32,
                                source + 32 * s + 8 * (lane % 4),
                                cute.AddressSpace.gmem,
                                assumed_align=8,
                            )
                            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(2)), words)
                            q_frag[h, s, mt], q_frag[2 + h, s, mt] = words[0], words[1]
                    else:
                        for s in cutlass.range_constexpr(self.k_steps):
                            for half in cutlass.range_constexpr(2):
                                if const_expr(16 * s + 8 * half < cfg.head_dim):
                                    at = cute.make_ptr(
                                        Uint32,
                                        source + 32 * s + 16 * half + 4 * (lane % 4),
                                        cute.AddressSpace.gmem,
                                        assumed_align=4,
                                    )
                                    q_frag[2 * half + h, s, mt] = cute.make_tensor(at, cute.make_layout(1))[0]
                if const_expr(self.fp8):
                    self.to_fp16(q_frag, unit, h, mt)

    @cute.jit
    def to_fp16(self, q_frag: cute.Tensor, unit: cute.Tensor, h: cutlass.Constexpr, mt: cutlass.Constexpr):
        """A row of Q, words of its dtype, to fp16 with a power of two of its own."""
        top = Float32(0.0)
        for s in cutlass.range_constexpr(self.k_steps):
            for half in cutlass.range_constexpr(2):
                x, y = widen(q_frag[2 * half + h, s, mt], self.element)
                top = cute.arch.fmax(top, cute.arch.fmax(cute.arch.fmax(x, -x), cute.arch.fmax(y, -y)))
        top = quad_max(top)
        # The largest element comes to 2^14 or more, below 2^15. An exponent with which the factor or its inverse is no
        # normal number counts as the nearest with which both are.
        exponent = cutlass.min(cutlass.max(top.bitcast(Int32) >> 23, 15), 253)
        factor = power_of_two(254 + 14 - exponent)
        unit[h, mt] = power_of_two(exponent - 14)
        for s in cutlass.range_constexpr(self.k_steps):
            for half in cutlass.range_constexpr(2):
                x, y = widen(q_frag[2 * half + h, s, mt], self.element)
                q_frag[2 * half + h, s, mt] = fp16_pair(x * factor, y * factor)

    @cute.jit
    def share_queries(self, q_frag: cute.Tensor, place: Int32, warp: Int32, lane: Int32):
        """Fragments of Q, which all warps have, to shared memory: each warp stores some steps."""
        cfg = self.cfg
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for s in cutlass.range_constexpr(self.k_steps):
                if warp == s % cfg.warps:
                    at = place + 16 * (32 * (mt * self.k_steps + s) + lane)
                    target = cute.make_ptr(Uint32, at, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(q_frag[None, s, mt], cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def query(
        self, q_frag: cute.Tensor, place: Int32, s: cutlass.Constexpr, mt: cutlass.Constexpr, lane: Int32
    ) -> cute.Tensor:
        """(4,) words: a fragment of Q."""
        if const_expr(self.cfg.q_in_smem):
            words = cute.make_rmem_tensor(4, Uint32)
            at = place + 16 * (32 * (mt * self.k_steps + s) + lane)
            source = cute.make_ptr(Uint32, at, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
        else:
            words = q_frag[None, s, mt]
        return words

    # -- one step ---------------------------------------------------------------------------------------------

    @cute.jit
    def scores(self, q_frag: cute.Tensor, q_place: Int32, stage: Int32, lane: Int32, s: cute.Tensor):
        """Q K^T of a step into s (4, 2, m_tiles): C fragments of keys 0 to 7 and 8 to 15."""
        cfg = self.cfg
        s.fill(0.0)
        # Matrices of a load: keys 0 to 7 and 8 to 15, of each two pieces of 16 bytes.
        address = stage + (lane // 16 * 8 + lane % 8) * cfg.k_pitch + lane // 8 % 2 * 16
        if const_expr(self.fp8):
            for pair in cutlass.range_constexpr(-(-self.k_steps // 2)):
                words = load_matrices(address + 32 * pair)
                for i in cutlass.range_constexpr(2):
                    step = 2 * pair + i
                    if const_expr(step < self.k_steps):
                        q = [self.query(q_frag, q_place, step, mt, lane) for mt in range(cfg.m_tiles)]
                        for j in cutlass.range_constexpr(2):
                            b0, b1 = e4m3_to_fp16(words[2 * j + i])
                            for mt in cutlass.range_constexpr(cfg.m_tiles):
                                multiply_add(s[None, j, mt], q[mt], b0, b1, self.product)
        else:
            for step in cutlass.range_constexpr(self.k_steps):
                words = load_matrices(address + 32 * step)
                q = [self.query(q_frag, q_place, step, mt, lane) for mt in range(cfg.m_tiles)]
                for j in cutlass.range_constexpr(2):
                    b0, b1 = words[2 * j], words[2 * j + 1]
                    if const_expr(16 * step + 8 >= cfg.head_dim):
                        b1 = Uint32(0)  # the next row's, of which 0 times Q's padding might be NaN
                    for mt in cutlass.range_constexpr(cfg.m_tiles):
                        multiply_add(s[None, j, mt], q[mt], b0, b1, self.product)

    @cute.jit
    def adjust(self, s: cute.Tensor, key0: Int32, k_scale: cute.Tensor, inputs, keys_seen, lane: Int32):
        """Scales, softcap, ALiBi and mask of a step's scores, in place.

        k_scale  (2, 2): of this thread's two keys in either half of the step; e4m3
        inputs   (factor (2, m_tiles), softcap_factor, scale, slope (2, m_tiles), position (2, m_tiles) int32, left,
                 right): of the thread's rows; slopes in octaves
        """
        cfg = self.cfg
        factor, softcap_factor, scale, slope, position, left, right = inputs
        column = key0 + 2 * (lane % 4)  # key of element 0; element i of half j is 8 j + i % 2 on
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                first, end = keys_seen
                if const_expr(cfg.row_ends):
                    # Anew in each step: there are no registers to keep them.
                    first = cutlass.max(first, position[h, mt] - left)
                    end = cutlass.min(end, position[h, mt] + right + 1)
                for j in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        x = s[2 * h + e, j, mt]
                        if const_expr(self.fp8):
                            x = x * k_scale[e, j]
                        if const_expr(cfg.softcap):
                            # tanh(x) = 1 - 2 / (1 + e^2x): the hardware's tanh is 11 bits, which softcap would multiply
                            grown = x * softcap_factor
                            if const_expr(self.fp8):
                                grown = grown * factor[h, mt]
                            grown = cute.math.exp2(grown, fastmath=True)
                            x = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(grown + Float32(1.0))
                            x = x * scale
                        elif const_expr(cfg.alibi):
                            x = x * factor[h, mt]
                        if const_expr(cfg.alibi):
                            distance = (column + (8 * j + e) - position[h, mt]).to(Float32)
                            x = x - slope[h, mt] * cute.arch.fmax(distance, -distance)
                        key = column + (8 * j + e)
                        s[2 * h + e, j, mt] = x if (key < end) & (key >= first) else -Float32.inf

    @cute.jit
    def softmax(self, s: cute.Tensor, factor: cute.Tensor, state, rescale: cute.Tensor):
        """Scores -> P in place; maximum and this thread's part of the sum of each row go on, rescale is set."""
        cfg = self.cfg
        maximum, total = state
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                top = cute.arch.fmax(
                    cute.arch.fmax(s[2 * h, 0, mt], s[2 * h + 1, 0, mt]),
                    cute.arch.fmax(s[2 * h, 1, mt], s[2 * h + 1, 1, mt]),
                )
                top = cute.arch.fmax(maximum[h, mt], quad_max(top))
                finite = Float32(0.0) if top == -Float32.inf else top
                f = Float32(1.0) if const_expr(self.adjusted) else factor[h, mt]
                # The difference comes before the factor: the largest score gives 1, whatever its size.
                rescale[h, mt] = cute.math.exp2((maximum[h, mt] - finite) * f, fastmath=True)
                maximum[h, mt] = top
                row = total[h, mt] * rescale[h, mt]
                for j in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        p = cute.math.exp2((s[2 * h + e, j, mt] - finite) * f, fastmath=True)
                        s[2 * h + e, j, mt] = p
                        row = row + p
                total[h, mt] = row

    @cute.jit
    def scale_p(self, p: cute.Tensor, v_scale: cute.Tensor, unit_o: cute.Tensor, rescale: cute.Tensor):
        """P times the scales of V over R, in place; R and `rescale`, that of O, follow. v_scale is (2, 2)."""
        cfg = self.cfg
        top = unit_o[0]
        for j in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                top = cute.arch.fmax(top, cute.arch.fmax(v_scale[e, j], -v_scale[e, j]))
        top = quad_max(top)
        # Rounded up to a power of two; one that is infinite or nearly so is taken for 2^126
        exponent = cutlass.min((top.bitcast(Int32) + Int32(0x7FFFFF)) >> 23, 253)
        inverse = power_of_two(254 - exponent)
        shrink = unit_o[0] * inverse
        unit_o[0] = power_of_two(exponent)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                rescale[h, mt] = rescale[h, mt] * shrink
                for j in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        p[2 * h + e, j, mt] = p[2 * h + e, j, mt] * (v_scale[e, j] * inverse)

    @cute.jit
    def accumulate(self, p: cute.Tensor, rescale: cute.Tensor, stage_v: Int32, lane: Int32, o: cute.Tensor):
        """O <- O * rescale + P V; o is (4, n_tiles, m_tiles). O stays where no row of the warp has a factor but 1."""
        cfg = self.cfg
        moved = rescale[0, 0] != Float32(1.0)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                moved = moved | (rescale[h, mt] != Float32(1.0))
        if cute.arch.vote_any_sync(moved):
            for mt in cutlass.range_constexpr(cfg.m_tiles):
                for n in cutlass.range_constexpr(self.n_tiles):
                    for i in cutlass.range_constexpr(2 * cfg.halves):  # a half that is left out stays 0
                        o[i, n, mt] = o[i, n, mt] * rescale[i // 2, mt]
        pair = bf16_pair if const_expr(self.product == "bf16") else fp16_pair
        words = cute.make_rmem_tensor((4, cfg.m_tiles), Uint32)
        words.fill(0)
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for j in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(cfg.halves):
                    words[2 * j + h, mt] = pair(p[2 * h, j, mt], p[2 * h + 1, j, mt])
        # Matrices of a load: keys 0 to 7 and 8 to 15 of a piece of 16 bytes, then of the next piece.
        address = stage_v + lane % 16 * cfg.v_pitch + lane // 16 * 16
        for c in cutlass.range_constexpr(0, cfg.v_chunks, 2):
            loaded = load_matrices_transposed(address + 16 * c)
            for i in cutlass.range_constexpr(2):
                if const_expr(c + i < cfg.v_chunks):
                    if const_expr(self.fp8):
                        even0, odd0 = e4m3_to_fp16(interleave_bytes(loaded[2 * i]))
                        even1, odd1 = e4m3_to_fp16(interleave_bytes(loaded[2 * i + 1]))
                        for mt in cutlass.range_constexpr(cfg.m_tiles):
                            n = 2 * (c + i)
                            multiply_add(o[None, n, mt], words[None, mt], even0, even1, self.product)
                            multiply_add(o[None, n + 1, mt], words[None, mt], odd0, odd1, self.product)
                    else:
                        for mt in cutlass.range_constexpr(cfg.m_tiles):
                            multiply_add(
                                o[None, c + i, mt],
                                words[None, mt],
                                loaded[2 * i],
                                loaded[2 * i + 1],
                                self.product,
                            )

    # -- the end of a piece -----------------------------------------------------------------------------------

    @cute.jit
    def leave(self, o: cute.Tensor, state, units, o_factor: Float32, place: Int32, lane: Int32):
        """O, maxima and sums of a warp to its part of shared memory, at `place`: O (rows, o_pitch), then (rows, 2)."""
        cfg = self.cfg
        maximum, total = state
        left = cute.make_tensor(
            cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16),
            cute.make_layout((cfg.rows, cfg.o_pitch), stride=(cfg.o_pitch, 1)),
        )
        left_ml = cute.make_tensor(
            cute.make_ptr(
                Float32, place + 4 * cfg.rows * cfg.o_pitch, cute.AddressSpace.smem, assumed_align=8
            ),
            cute.make_layout((cfg.rows, 2), stride=(2, 1)),
        )
        q = lane % 4
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                row = 16 * mt + 8 * h + lane // 4
                row_sum = quad_sum(total[h, mt])
                if q == 0:
                    top = maximum[h, mt]
                    if const_expr(self.fp8 and not self.adjusted):
                        top = top * units[h, mt]  # in units that all rows share
                    left_ml[row, 0] = top
                    left_ml[row, 1] = row_sum
                if const_expr(self.fp8):
                    for c in cutlass.range_constexpr(self.n_tiles // 2):
                        left[row, 16 * c + 4 * q] = o[2 * h, 2 * c, mt] * o_factor
                        left[row, 16 * c + 4 * q + 1] = o[2 * h, 2 * c + 1, mt] * o_factor
                        left[row, 16 * c + 4 * q + 2] = o[2 * h + 1, 2 * c, mt] * o_factor
                        left[row, 16 * c + 4 * q + 3] = o[2 * h + 1, 2 * c + 1, mt] * o_factor
                else:
                    for n in cutlass.range_constexpr(self.n_tiles):
                        left[row, 8 * n + 2 * q] = o[2 * h, n, mt]
                        left[row, 8 * n + 2 * q + 1] = o[2 * h + 1, n, mt]

    @cute.jit
    def gather(
        self,
        base: Int32,
        m_out: cute.Tensor,
        m_lse: cute.Tensor,
        m_sinks,
        m_ml: cute.Tensor,  # (slots, rows, 2)
        m_o: cute.Tensor,  # (slots, rows, head_dim_v)
        slot: Int32,
        whole,
        factor: Float32,
        b: Int32,
        head: Int32,
        row0: Int32,
        group: Int32,
        tid: Int32,
    ):
        """What the warps left, added up: to the output where `whole`, else to a slot."""
        cfg = self.cfg
        vectors = cfg.head_dim_v // 4
        packed = m_out.shape[1] * group
        for index in cutlass.range(tid, cfg.rows * vectors, cfg.threads, unroll=1):
            row = index // vectors
            column = 4 * (index - row * vectors)
            if row0 + row < packed:
                tops = cute.make_rmem_tensor(cfg.warps, Float32)
                top = -Float32.inf
                for w in cutlass.range_constexpr(cfg.warps):
                    place = base + w * cfg.warp_bytes + 4 * cfg.rows * cfg.o_pitch + 8 * row
                    tops[w] = cute.make_tensor(
                        cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=8),
                        cute.make_layout(1),
                    )[0]
                    top = cute.arch.fmax(top, tops[w])
                finite = Float32(0.0) if top == -Float32.inf else top
                total = Float32(0.0)
                o = cute.make_rmem_tensor(4, Float32)
                o.fill(0.0)
                for w in cutlass.range_constexpr(cfg.warps):
                    weight = cute.math.exp2((tops[w] - finite) * factor, fastmath=True)
                    place = base + w * cfg.warp_bytes + 4 * cfg.rows * cfg.o_pitch + 8 * row + 4
                    total = (
                        total
                        + weight
                        * cute.make_tensor(
                            cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=4),
                            cute.make_layout(1),
                        )[0]
                    )
                    part = cute.make_rmem_tensor(4, Float32)
                    place = base + w * cfg.warp_bytes + 4 * (row * cfg.o_pitch + column)
                    cute.autovec_copy(
                        cute.make_tensor(
                            cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16),
                            cute.make_layout(4),
                        ),
                        part,
                    )
                    for i in cutlass.range_constexpr(4):
                        o[i] = o[i] + weight * part[i]
                if whole:
                    finish(
                        cfg, m_out, m_lse, m_sinks, b, head, row0 + row, group, column, top, total, o, factor
                    )
                else:
                    target = cute.domain_offset((slot, row, column), m_o).iterator
                    target = cute.make_ptr(Float32, target.toint(), cute.AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(o, cute.make_tensor(target, cute.make_layout(4)))
                    if column == 0:
                        m_ml[slot, row, 0] = top
                        m_ml[slot, row, 1] = total

    # -- kernel -----------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        m_q: cute.Tensor,
        m_k: cute.Tensor,
        m_v: cute.Tensor,
        m_out: cute.Tensor,
        m_lse: cute.Tensor,
        m_batch_idx,
        m_table,
        m_k_scale,
        m_v_scale,
        m_slopes,
        m_sinks,
        m_ml: cute.Tensor,
        m_o: cute.Tensor,
        lengths,
        shares,
        scale: Float32,
        softcap_factor: Float32,
        factor: Float32,
        right: Int32,
    ):
        cfg = self.cfg
        if const_expr(self.pdl):
            # The combining grid may come up: it waits for the end of this one before it reads.
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        ctas, splits, least, together = shares
        heads_k = m_k.shape[2]
        group = m_q.shape[2] // heads_k
        m_blocks = (m_q.shape[1] * group + (cfg.rows - 1)) // cfg.rows
        units = heads_k * m_blocks  # of a sequence
        smem = SmemAllocator().allocate_tensor(cutlass.Uint8, cute.make_layout(cfg.smem_bytes), 128)
        base = smem.iterator.toint()

        # Tiles pos to end - 1 of the heads that are taken in step, the first of sequence b at `start`; or units pos,
        # pos + ctas and so on below end.
        b, start, pos, end = Int32(0), Int32(0), Int32(0), Int32(0)
        side, apart, whole = Int32(0), Int32(1), Int32(0)  # head among those in step, how many they are
        if splits == 0:
            total, _, longest = self.splits.tiles_before(lengths, Int32(0), units)
            whole = self.splits.whole(total, longest, units * m_q.shape[0], ctas)
            if whole != 0:
                pos, end, b = cta, units * m_q.shape[0], cta // units
            else:
                apart = together
                side = cta % together
                total = total // together
                sharers = self.splits.sharers(total, ctas // together, least)
                if cta // together < sharers:
                    pos = share_start(total, sharers, cta // together)
                    end = share_start(total, sharers, cta // together + 1)
                    b, start = self.splits.locate(lengths, pos, units // together)
        else:
            unit = cta // splits
            b = unit // units
            tiles = self.splits.tiles_of(lengths, b)
            pos = (unit - b * units) * tiles
            end = pos + share_start(tiles, splits, cta - unit * splits + 1)
            pos = pos + share_start(tiles, splits, cta - unit * splits)
        slot = cta
        while pos < end:
            tiles = self.splits.tiles_of(lengths, b)
            unit, tile, count = pos - b * units, Int32(0), tiles
            if whole == 0:
                unit = (pos - start) // tiles
                tile = pos - start - unit * tiles
                count = cutlass.min(tiles - tile, end - pos)
            head = unit // m_blocks
            row0 = (unit - head * m_blocks) * cfg.rows
            head = head * apart + side
            self.piece(
                m_q,
                m_k,
                m_v,
                m_out,
                m_lse,
                m_batch_idx,
                m_table,
                m_k_scale,
                m_v_scale,
                m_slopes,
                m_sinks,
                m_ml,
                m_o,
                lengths,
                scale,
                softcap_factor,
                factor,
                right,
                b,
                head,
                row0,
                group,
                tile,
                count,
                count == tiles,
                slot,
                base,
                tid,
                lane,
                warp,
            )
            slot = cta + ctas
            if whole == 0:
                pos = pos + count
                if pos == start + tiles * (units // apart):
                    start = pos
                    b = b + 1
            else:
                pos = pos + ctas
                b = pos // units

    @cute.jit
    def piece(
        self,
        m_q: cute.Tensor,
        m_k: cute.Tensor,
        m_v: cute.Tensor,
        m_out: cute.Tensor,
        m_lse: cute.Tensor,
        m_batch_idx,
        m_table,
        m_k_scale,
        m_v_scale,
        m_slopes,
        m_sinks,
        m_ml: cute.Tensor,
        m_o: cute.Tensor,
        lengths,
        scale: Float32,
        softcap_factor: Float32,
        factor: Float32,
        right: Int32,
        b: Int32,
        head: Int32,
        row0: Int32,
        group: Int32,
        tile: Int32,  # of the unit, the first
        count: Int32,
        whole,
        slot: Int32,
        base: Int32,
        tid: Int32,
        lane: Int32,
        warp: Int32,
    ):
        """Tiles `tile` to tile + count - 1 of a unit, to the output or a slot."""
        cfg = self.cfg
        first, end = self.splits.key_range(lengths, b)
        keys_seen = (first, end)
        seqlen_q, left = lengths[5], lengths[6]
        sequence = b
        if const_expr(m_batch_idx is not None):
            sequence = m_batch_idx[b]
        page_size = m_k.shape[1]
        # Step i of this warp starts at key key0 + i * tile_keys.
        key0 = (first // cfg.tile_keys + tile) * cfg.tile_keys + warp * DECODE_KEYS
        ring = base + warp * cfg.warp_bytes

        page = self.page_of(m_table, keys_seen, key0, page_size, b, lane)
        for i in cutlass.range_constexpr(cfg.stages - 1):
            if i < count:
                key = key0 + i * cfg.tile_keys
                stage = ring + i * cfg.stage_bytes
                self.fetch(m_k, m_v, m_k_scale, m_v_scale, sequence, head, key, page, keys_seen, stage, lane)
                page = self.page_of(m_table, keys_seen, key + cfg.tile_keys, page_size, b, lane)
            cute.arch.cp_async_commit_group()

        q_frag = cute.make_rmem_tensor((4, self.k_steps, cfg.m_tiles), Uint32)
        pair = (2, cfg.m_tiles)
        unit_q, row_factor, slope = [cute.make_rmem_tensor(pair, Float32) for _ in range(3)]
        position = cute.make_rmem_tensor(pair, Int32)
        self.load_queries(m_q, b, head, row0, group, lane, q_frag, unit_q)
        q_place = base + cfg.warps * cfg.warp_bytes
        if const_expr(cfg.q_in_smem):
            self.share_queries(q_frag, q_place, warp, lane)
            cute.arch.sync_threads()  # all threads: every step's fragments are there
        for mt in cutlass.range_constexpr(cfg.m_tiles):
            for h in cutlass.range_constexpr(cfg.halves):
                row = row0 + 16 * mt + 8 * h + lane // 4
                query = cutlass.min(row // group, seqlen_q - 1)
                position[h, mt] = query + end - seqlen_q
                row_factor[h, mt] = scale
                if const_expr(self.fp8):
                    row_factor[h, mt] = unit_q[h, mt] if const_expr(cfg.softcap) else scale * unit_q[h, mt]
                if const_expr(cfg.alibi):
                    slope[h, mt] = m_slopes[b, head * group + row % group] * Float32(LOG2_E)
        inputs = (row_factor, softcap_factor, scale, slope, position, left, right)

        maximum, total, rescale = [cute.make_rmem_tensor(pair, Float32) for _ in range(3)]
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        state = (maximum, total)
        o = cute.make_rmem_tensor((4, self.n_tiles, cfg.m_tiles), Float32)
        o.fill(0.0)
        o_factor = Float32(1.0)
        k_scale, v_scale = [cute.make_rmem_tensor((2, 2), Float32) for _ in range(2)]
        unit_o = cute.make_rmem_tensor(2, Float32)  # R in the first
        unit_o.fill(SMALLEST_UNIT)
        if const_expr(cfg.scales == "head"):
            k_scale.fill(m_k_scale[b, head])
            o_factor = m_v_scale[b, head]

        stage, ahead = Int32(0), Int32((cfg.stages - 1) * cfg.stage_bytes)
        for i in cutlass.range(count, unroll=1):
            own = lane
            if const_expr(cfg.crowded):
                # The same, of which the compiler knows nothing: what is computed from it is not kept over the loop.
                own = cute.arch.shuffle_sync(lane, lane)
            cute.arch.cp_async_wait_group(cfg.stages - 2)
            # The warp: what its lanes have copied for this step is there, and all have done with the step before.
            cute.arch.sync_warp()
            if i + (cfg.stages - 1) < count:
                key = key0 + (i + (cfg.stages - 1)) * cfg.tile_keys
                self.fetch(
                    m_k, m_v, m_k_scale, m_v_scale, sequence, head, key, page, keys_seen, ring + ahead, own
                )
                page = self.page_of(m_table, keys_seen, key + cfg.tile_keys, page_size, b, own)
            cute.arch.cp_async_commit_group()  # empty at the end: keeps the number of groups in flight
            place = ring + stage
            place_v = place + DECODE_KEYS * cfg.k_pitch
            if const_expr(self.token_scales):
                for j in cutlass.range_constexpr(2):
                    at = place_v + DECODE_KEYS * cfg.v_pitch + 4 * (8 * j + 2 * (own % 4))
                    for x, offset in ((k_scale, 0), (v_scale, 4 * DECODE_KEYS)):
                        source = cute.make_ptr(Float32, at + offset, cute.AddressSpace.smem, assumed_align=8)
                        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), x[None, j])
            s = cute.make_rmem_tensor((4, 2, cfg.m_tiles), Float32)
            self.scores(q_frag, q_place, place, own, s)
            self.adjust(s, key0 + i * cfg.tile_keys, k_scale, inputs, keys_seen, own)
            self.softmax(s, row_factor, state, rescale)
            if const_expr(self.token_scales):
                self.scale_p(s, v_scale, unit_o, rescale)
            self.accumulate(s, rescale, place_v, own, o)
            stage = stage + cfg.stage_bytes if stage < (cfg.stages - 1) * cfg.stage_bytes else Int32(0)
            ahead = ahead + cfg.stage_bytes if ahead < (cfg.stages - 1) * cfg.stage_bytes else Int32(0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()  # the warp: no lane still reads the ring, where O goes now
        if const_expr(self.token_scales):
            o_factor = unit_o[0]
        self.leave(o, state, unit_q, o_factor, ring, lane)
        cute.arch.sync_threads()  # all threads: every warp has left its part
        self.gather(base, m_out, m_lse, m_sinks, m_ml, m_o, slot, whole, factor, b, head, row0, group, tid)
        cute.arch.sync_threads()  # all threads: the parts are read, rings may be filled again
