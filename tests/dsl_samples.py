"""A tiny kernel, to test what stands between the compiler and us without compiling a real one."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


class Exp2Scaled:
    """y[i] = exp2(x[i]) * scale for as many elements as threads."""

    def __init__(self, threads: int = 128):
        self.threads = threads  # 1024 leave 64 registers to each

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, stream):
        self.kernel(x, y, scale).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scale: Float32):
        i, _, _ = cute.arch.thread_idx()
        if i < cute.size(x):
            y[i] = cute.math.exp2(x[i], fastmath=True) * scale


class RowSpread(Exp2Scaled):
    """y[i] = sum over 128 values of (largest - value) * scale: all are alive when the largest is known."""

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scale: Float32):
        i, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(128, Float32)
        largest = Float32(0.0)
        for j in cutlass.range(128, unroll_full=True):
            values[j] = x[i + self.threads * j]
            largest = cute.arch.fmax(largest, values[j])
        total = Float32(0.0)
        for j in cutlass.range(128, unroll_full=True):
            total = total + (largest - values[j]) * scale
        y[i] = total


def compile_sample(sample: Exp2Scaled, options: str = "") -> Any:
    n = cute.sym_int32()
    x = make_fake_compact_tensor(Float32, (n,), assumed_align=16)
    y = make_fake_compact_tensor(Float32, (n,), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        sample, x, y, Float32(1.0), stream, options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}"
    )
