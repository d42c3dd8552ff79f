"""Float arithmetic whose rounding must not depend on what the compiler makes of it, and on the bits of floats."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32


@cute.jit
def product_rn(a: Float32, b: Float32) -> Float32:
    """a * b rounded by itself, not contracted into an FMA with what it is added to."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def bf16_pair(low: Float32, high: Float32) -> Uint32:
    """Two values, rounded to bf16, in a word."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


@cute.jit
def fp16_pair(low: Float32, high: Float32) -> Uint32:
    """Likewise to fp16."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


@cute.jit
def power_of_two(exponent: Int32) -> Float32:
    """2^(exponent - 127) for a biased exponent from 1 to 254."""
    return (exponent << 23).bitcast(Float32)
