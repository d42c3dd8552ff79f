"""What one warp does in an instruction: matrix loads, products, conversions, asynchronous copies.

Fragments of m16n8k16, for lane l with g = l / 4 and q = l % 4, two 16-bit elements a word:

    A  word 0 row g, k 2q and 2q + 1; word 1 row g + 8; words 2 and 3 the same at k 2q + 8, 2q + 9
    B  word 0 column g, k 2q and 2q + 1; word 1 at k 2q + 8, 2q + 9
    C  float 0 and 1 row g, columns 2q and 2q + 1; 2 and 3 row g + 8
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr


@cute.jit
def load_matrices(address: Int32):
    """Four 8 x 8 matrices of 16-bit elements from shared memory, a word of each: row l / 4, elements 2 (l % 4) and the
    next. `address` is that of a row: lane l gives row l % 8 of matrix l / 8."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_matrices_transposed(address: Int32):
    """Likewise, of each matrix a word with column l / 4 of rows 2 (l % 4) and the next."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def multiply_add(c: cute.Tensor, a: cute.Tensor, b0: Uint32, b1: Uint32, element: cutlass.Constexpr):
    """c += a b for fragments c (4,) float32, a (4,) words and the words of b, elements "bf16" or "fp16"."""
    kind = "bf16" if const_expr(element == "bf16") else "f16"
    c[0], c[1], c[2], c[3] = cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " { {$w0}, {$w1}, {$w2}, {$w3} }, { {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} },"
        " { {$r6}, {$r7}, {$r8}, {$r9} };",
        write_only_types=[Float32] * 4,
        read_only_args=[a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
    )


@cute.jit
def e4m3_to_fp16(codes: Uint32):
    """Four e4m3 as two words of fp16, the low two first; exact, NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[codes],
    )


@cute.jit
def interleave_bytes(word: Uint32) -> Uint32:
    """Bytes 0, 1, 2, 3 -> 0, 2, 1, 3."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, 0, 0x3120;", write_only_types=[Uint32], read_only_args=[word]
    )


@cute.jit
def copy_16_bytes(target: Int32, source: Int64):
    """Starts the copy of 16 bytes from global `source` to shared `target`, in the thread's current group."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])


@cute.jit
def copy_16_bytes_if(target: Int32, source: Int64, wanted: Boolean):
    """`copy_16_bytes` where `wanted`, else nothing."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source], predicate=wanted
    )


@cute.jit
def copy_16_bytes_or_zeros(target: Int32, source: Int64, size: Int32):
    """`copy_16_bytes` with `size` 16; with 0 nothing is read and zeros are written."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size]
    )


@cute.jit
def copy_4_bytes_or_zeros(target: Int32, source: Int64, size: Int32):
    """Starts the copy of 4 bytes from global `source` to shared `target`, in the thread's current group; with `size` 0
    instead of 4 nothing is read and zeros are written."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", read_only_args=[target, source, size]
    )


def store_word(address: Int32, word: Uint32) -> None:
    """A word to shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def load_words(address: Int32) -> tuple:
    """Four integers from shared memory, at a multiple of 16 bytes."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


@cute.jit
def store_16_bytes_if(target: Int64, words: cute.Tensor, wanted: Boolean):
    """Four words to global memory, at a multiple of 16 bytes, where `wanted`: without a branch, so that the loads and
    addresses of several stores go on side by side."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[target, words[0], words[1], words[2], words[3]],
        predicate=wanted,
    )


@cute.jit
def store_float_if(target: Int64, value: Float32, wanted: Boolean):
    """Likewise a float."""
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[target, value], predicate=wanted)


@cute.jit
def opaque(a: Uint32) -> Uint32:
    """a, of which the compiler knows nothing: what is computed from it stays in the loop where it is."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[a])


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that hold a row."""
    for step in cutlass.range_constexpr(2):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Maximum over them; a NaN counts only where all are NaN."""
    for step in cutlass.range_constexpr(2):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step))
    return value


@cute.jit
def turns_if_any(condition: Boolean) -> Int32:
    """1 where `condition` holds for any lane, else 0, for a loop of as many turns around what is seldom wanted.

    A loop is a branch for certain. Of an `if` the assembler makes predicates of a hundred instructions, which then
    take their time whether or not they do anything.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred p; vote.sync.any.pred p, {$r0}, 0xffffffff; selp.s32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[condition],
    )
