"""New keys and values into a KV cache, and the queries that are to meet them.

    K    rotary embedding, then for a rotated e4m3 cache signs and Hadamard transform, then the cache's dtype
    V    the cache's dtype
    Q    embedding and rotation as K, 1 / sqrt(block) of the transform, then its own dtype again

The arithmetic of a row is that of `cute_attn.quantize`, step by step, with a row of a head as the group of a scale:
what a row becomes does not depend on which rows came with it.

Tensors, last stride 1, other strides free:

    k (batch, seqlen_new, heads_k, head_dim), v (..., head_dim_v), q (batch, seqlen_q, heads_q, head_dim)  bf16 or fp16
    caches, block_table, scales: as in attend.py
    cos, sin (seqlen_ro, rotary_dim / 2), of the dtype of k; signs (head_dim,) float32

Row i of K and V of a sequence goes to slot seqlens + i, and is embedded at that position; rows past the last slot are
not stored. Row i of Q is at position seqlens + i * q_step.

A thread takes eight columns of a row, 16 bytes; the lanes of a row, a power of two of them, are neighbours in a warp.
The CTAs of each tensor have a block index y of their own.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..any.rotary import Rotary
from ..any.vectors import F8, IN_TYPES, abs_max, magnitude, scales_of, widen
from ..common.floats import bf16_pair, fp16_pair
from ..config import E4M3_MAX, AppendConfig, rotation_block

THREADS = 128  # of a CTA
WIDTH = 8  # columns of a thread


def lanes_of(columns: int) -> int:
    """Lanes of a row: the power of two that has room for it."""
    return 1 << (-(-columns // WIDTH) - 1).bit_length()


@cute.jit
def row_address(t: cute.Tensor, at, column) -> Int64:
    """Global address of (*at, column) of a tensor of rows, or with column 0 of `at` of one without columns, in 64 bits:
    caches are large."""
    offset = Int64(column)
    for i in cutlass.range_constexpr(len(at)):
        offset = offset + Int64(at[i]) * t.stride[i]
    return t.iterator.toint() + offset * (t.element_type.width // 8)


@cute.jit
def words_at(address: Int64, count: cutlass.Constexpr) -> cute.Tensor:
    """`count` words of global memory at an address that is a multiple of as many bytes."""
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


class Append:
    """Host entry of one configuration. What it has no use for is None."""

    def __init__(self, cfg: AppendConfig):
        cfg.check()
        self.cfg = cfg
        self.element = IN_TYPES[cfg.in_dtype]
        self.fp8 = cfg.cache == "e4m3"
        self.rotary = Rotary(cfg)
        self.block = rotation_block(cfg.head_dim)
        self.norm = 1.0 / math.sqrt(self.block) if cfg.rotate else 1.0
        self.pair = bf16_pair if cfg.in_dtype == "bf16" else fp16_pair

    @cute.jit
    def __call__(
        self,
        q,  # with `queries`
        q_out,
        k,  # with `keys`
        v,
        k_cache,
        v_cache,
        seqlens: cute.Tensor,  # (batch,) int32
        batch_idx,  # (batch,) int32
        block_table,  # (batch, blocks) int32
        k_scale,  # e4m3: read where it is of a head, else written
        v_scale,
        cos,
        sin,
        signs,
        q_step: Int32,
        stream,
    ):
        cfg = self.cfg
        ctas = Int32(0)
        if const_expr(cfg.keys):
            rows = k.shape[0] * k.shape[1] * k.shape[2]
            ctas = cutlass.max(
                cute.ceil_div(rows, THREADS // lanes_of(cfg.head_dim)),
                cute.ceil_div(rows, THREADS // lanes_of(cfg.head_dim_v)),
            )
        if const_expr(cfg.queries):
            rows = q.shape[0] * q.shape[1] * q.shape[2]
            ctas = cutlass.max(ctas, cute.ceil_div(rows, THREADS // lanes_of(cfg.head_dim)))
        roles = 2 * cfg.keys + cfg.queries
        self.kernel(
            q,
            q_out,
            k,
            v,
            k_cache,
            v_cache,
            seqlens,
            batch_idx,
            block_table,
            k_scale,
            v_scale,
            cos,
            sin,
            signs,
            q_step,
        ).launch(grid=[ctas, roles, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        m_q,
        m_q_out,
        m_k,
        m_v,
        m_k_cache,
        m_v_cache,
        m_seqlens: cute.Tensor,
        m_batch_idx,
        m_table,
        m_k_scale,
        m_v_scale,
        m_cos,
        m_sin,
        m_signs,
        q_step: Int32,
    ):
        cfg = self.cfg
        _, role, _ = cute.arch.block_idx()
        if const_expr(cfg.keys):
            places = (m_seqlens, m_batch_idx, m_table)
            if role == 0:
                self.append(m_k, m_k_cache, m_k_scale, places, m_cos, m_sin, m_signs, cfg.head_dim, True)
            if role == 1:
                self.append(m_v, m_v_cache, m_v_scale, places, None, None, None, cfg.head_dim_v, False)
        if const_expr(cfg.queries):
            if role == 2 * cfg.keys:
                self.prepare(m_q, m_q_out, m_seqlens, m_cos, m_sin, m_signs, q_step)

    @cute.jit
    def row_of(self, m_x: cute.Tensor, columns: cutlass.Constexpr):
        """This thread's row of (batch, seqlen, heads, columns): (batch, token, head), whether it is one, first column.
        Threads past the end have the last row, so that warps are whole."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lanes = lanes_of(columns)
        rows = m_x.shape[0] * m_x.shape[1] * m_x.shape[2]
        index = cta * (THREADS // lanes) + tid // lanes
        row = cutlass.min(index, rows - 1)
        token = row // m_x.shape[2]
        b = token // m_x.shape[1]
        at = (b, token - b * m_x.shape[1], row - token * m_x.shape[2])
        return at, index < rows, tid % lanes * WIDTH

    @cute.jit
    def load(
        self, m_x: cute.Tensor, at, column: Int32, columns: cutlass.Constexpr, m_cos, m_sin, position: Int32
    ) -> cute.Tensor:
        """Eight columns as float32, embedded where tables are given; zeros past the last."""
        inside = cutlass.min(column, columns - WIDTH)
        own = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(words_at(row_address(m_x, at, inside), 4), own)
        x = cute.make_rmem_tensor(WIDTH, Float32)
        if const_expr(m_cos is not None):
            pairs = m_cos.shape[1]
            position = cutlass.max(cutlass.min(position, m_cos.shape[0] - 1), 0)
            cos = self.rotary.angles(self.rotary.row_of(m_cos, position), pairs, inside)
            sin = self.rotary.angles(self.rotary.row_of(m_sin, position), pairs, inside)
            other = cute.make_rmem_tensor(4, Uint32)
            if const_expr(self.rotary.half):
                partner = self.rotary.partner(pairs, inside)
                cute.autovec_copy(words_at(row_address(m_x, at, partner), 4), other)
            self.rotary.embed(own, other, cos, sin, pairs, inside, x)
        else:
            for w in cutlass.range_constexpr(4):
                x[2 * w], x[2 * w + 1] = widen(own[w], self.element)
        if const_expr(columns < WIDTH * lanes_of(columns)):
            for i in cutlass.range_constexpr(WIDTH):
                x[i] = x[i] if column < columns else Float32(0.0)
        return x

    @cute.jit
    def rotate(self, x: cute.Tensor, m_signs: cute.Tensor, column: Int32):
        """Signs and unnormalised Walsh-Hadamard transform of each block of a row, over its lanes; in place."""
        for i in cutlass.range_constexpr(WIDTH):
            x[i] = x[i] * m_signs[cutlass.min(column, self.cfg.head_dim - WIDTH) + i]
        for level in cutlass.range_constexpr(3):  # distances 1, 2, 4
            for i in cutlass.range_constexpr(WIDTH):
                if const_expr(i & (1 << level) == 0):
                    a, b = x[i], x[i + (1 << level)]
                    x[i] = a + b
                    x[i + (1 << level)] = a - b
        for level in cutlass.range_constexpr((self.block // WIDTH).bit_length() - 1):  # 8, .. block / 2
            sign = Float32(1.0) if column & (WIDTH << level) == 0 else Float32(-1.0)
            for i in cutlass.range_constexpr(WIDTH):
                other = cute.arch.shuffle_sync_bfly(x[i], offset=1 << level)
                x[i] = x[i] * sign + other  # lower lane a + b, upper lane a - b; the product is exact

    @cute.jit
    def store(self, x: cute.Tensor, address: Int64):
        """Eight columns in the inputs' dtype."""
        words = cute.make_rmem_tensor(4, Uint32)
        for w in cutlass.range_constexpr(4):
            words[w] = self.pair(x[2 * w], x[2 * w + 1])
        cute.autovec_copy(words, words_at(address, 4))

    @cute.jit
    def append(
        self,
        m_x: cute.Tensor,
        m_cache: cute.Tensor,
        m_scale,
        places,
        m_cos,
        m_sin,
        m_signs,
        columns: cutlass.Constexpr,
        keys: cutlass.Constexpr,
    ):
        cfg = self.cfg
        m_seqlens, m_batch_idx, m_table = places
        at, stored, column = self.row_of(m_x, columns)
        b, token, head = at
        slots = m_cache.shape[1]
        capacity = slots * m_table.shape[1] if const_expr(cfg.paged) else slots
        slot = m_seqlens[b] + token
        x = self.load(m_x, at, column, columns, m_cos, m_sin, slot)
        stored = stored & (slot >= 0) & (slot < capacity)
        sequence = b
        if const_expr(cfg.batch_idx):
            sequence = m_batch_idx[b]
        if const_expr(cfg.paged):
            sequence = Int32(0)
            if stored:
                sequence = m_table[b, slot // slots]
            slot = slot % slots
        place = (sequence, slot, head)
        norm = 1.0
        if const_expr(keys and cfg.rotate):
            self.rotate(x, m_signs, column)
            norm = self.norm
        if const_expr(not self.fp8):
            if stored & (column < columns):
                self.store(x, row_address(m_cache, place, column))
        else:
            factor, scale = Float32(1.0), Float32(1.0)
            if const_expr(cfg.scales == "token"):
                top = x[0]
                for i in cutlass.range_constexpr(1, WIDTH):
                    top = abs_max(top, x[i])
                for step in cutlass.range_constexpr(lanes_of(columns).bit_length() - 1):
                    top = abs_max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
                factor, scale = scales_of(magnitude(top), E4M3_MAX, norm)
            else:
                factor = cute.arch.inline_ptx(
                    "div.rn.f32 {$w0}, {$r0}, {$r1};",
                    write_only_types=[Float32],
                    read_only_args=[Float32(float(np.float32(norm))), m_scale[b, head]],
                )
            if stored & (column < columns):
                codes = cute.make_rmem_tensor(WIDTH, F8)
                y = cute.make_rmem_tensor(WIDTH, Float32)
                for i in cutlass.range_constexpr(WIDTH):
                    y[i] = x[i] * factor
                codes.store(y.load().to(F8))
                cute.autovec_copy(
                    cute.recast_tensor(codes, Uint32), words_at(row_address(m_cache, place, column), 2)
                )
                if const_expr(cfg.scales == "token"):
                    if column == 0:
                        words_at(row_address(m_scale, place, 0), 1)[0] = scale.bitcast(Uint32)

    @cute.jit
    def prepare(
        self,
        m_q: cute.Tensor,
        m_out: cute.Tensor,
        m_seqlens: cute.Tensor,
        m_cos,
        m_sin,
        m_signs,
        q_step: Int32,
    ):
        at, stored, column = self.row_of(m_q, self.cfg.head_dim)
        x = self.load(m_q, at, column, self.cfg.head_dim, m_cos, m_sin, m_seqlens[at[0]] + at[1] * q_step)
        if const_expr(self.cfg.rotate):
            self.rotate(x, m_signs, column)
            for i in cutlass.range_constexpr(WIDTH):
                x[i] = x[i] * Float32(float(np.float32(self.norm)))
        if stored & (column < self.cfg.head_dim):
            self.store(x, row_address(m_out, at, column))
