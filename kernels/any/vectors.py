"""Pieces of the quantiser's roles: magnitudes and scales, conversions, addresses of 16 bytes."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr

from ..config import SMALLEST_AMAX, QuantizeConfig

F8 = cutlass.Float8E4M3FN
IN_TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": F8}


def padded_width(head_dim: int) -> int:
    """Columns for which threads are laid out: the next of 64, 128 and 256."""
    return max(64, 1 << (head_dim - 1).bit_length())


def thread_count(cfg: QuantizeConfig) -> int:
    """Threads of a CTA: two for each column, so that 64 rows, a scale of K, are a pass of `Rows`.

    The wider of the two head dimensions counts. Where it is V's, a pass has more rows.
    """
    return 2 * max(padded_width(cfg.head_dim), padded_width(cfg.head_dim_v))


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
def warp_max(a: Float32) -> Float32:
    """Maximum over a warp of floats without signs, NaN if any is: as integers they are in order, NaN above infinity."""
    return cute.arch.warp_redux_sync(a.bitcast(Uint32), kind="max").bitcast(Float32)


@cute.jit
def product(a: Float32, b: Float32) -> Float32:
    """a * b, but 0 without a sign where a or b is 0."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, 0f00000000;", write_only_types=[Float32], read_only_args=[a, b]
    )


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
    """A pointer to 16 bytes, or to eight e4m3, known to be aligned to as many."""
    return cute.make_ptr(element, address, space, assumed_align=16)


@cute.jit
def vector(t: cute.Tensor, n: cutlass.Constexpr) -> cute.Tensor:
    """The first n elements of `t`, 16 bytes, known to be aligned to as many."""
    return cute.make_tensor(address_of(t.element_type, t.iterator.toint(), t.memspace), cute.make_layout(n))


@cute.jit
def block_max(value: Float32, scratch: cute.Tensor, slot: Int32, warps: cutlass.Constexpr) -> Float32:
    """abs_max over each `warps` neighbouring warps, for all of their threads. `scratch` is (slots, warps of the CTA).

    One barrier. Calls in a row take turns with two slots: a slot is written again only behind the barrier of the call
    between, and before that one every thread has read it.

    The whole CTA waits for this chain, so within a warp it is the instruction that reduces integers, one instead of
    five shuffles behind one another.
    """
    top = warp_max(magnitude(value))
    tid, _, _ = cute.arch.thread_idx()
    if tid % 32 == 0:  # not warp_idx() in here: it synchronises the warp, of which one lane has come
        scratch[slot, tid // 32] = top
    cute.arch.sync_threads()  # all threads: every warp has left its maximum
    first = 0 if const_expr(warps == scratch.shape[1]) else tid // 32 // warps * warps
    return warp_max(scratch[slot, first + tid % warps])
