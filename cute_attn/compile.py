"""Config -> compiled kernel, without data and without a GPU.

The arguments are fake tensors whose sizes and strides are symbols, so that one compilation serves every shape. The
result takes torch tensors through TVM-FFI and launches on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_attn.kernels.config import K_SCALE_PAD, FwdConfig, QuantizeConfig

KernelConfig = FwdConfig | QuantizeConfig

ARCH = "sm_90a"  # WGMMA and setmaxnreg exist for this exact target only


def build(config: KernelConfig, options: str = "") -> Any:
    """Compile `config` for sm_90a; `options` are appended to those of `cute.compile`.

    Imports the DSL (about half a second) and takes two to five seconds. Not thread-safe: the DSL aborts the process
    when two threads compile at once, so callers hold `cache.COMPILE_LOCK`.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    def fake(element: Any, shape: tuple[Any, ...], divisibility: int, align: int) -> Any:
        strides = [cute.sym_int64(divisibility=divisibility) for _ in shape[:-1]]
        return make_fake_tensor(element, shape, (*strides, 1), assumed_align=align)

    def wide(element: Any, *shape: Any) -> Any:  # rows that TMA or 16-byte accesses touch
        return fake(element, shape, 128 // element.width, 16)

    def scalars(*shape: Any) -> Any:  # float32 side tensors: any strides, also 0
        strides = tuple(cute.sym_int64() for _ in shape)
        return make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=4)

    def rows(groups: Any, divisibility: int, align: int) -> Any:  # scales of the key groups of a head, contiguous
        return fake(cutlass.Float32, (batch, heads_k, groups), divisibility, align)

    f8 = cutlass.Float8E4M3FN
    batch, seqlen_q, seqlen_k, heads_q, heads_k = (cute.sym_int32() for _ in range(5))
    padded_k, k_groups, v_groups = (cute.sym_int32() for _ in range(3))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    d = config.head_dim
    vt = wide(f8, batch, heads_k, d, padded_k)
    entry: Any
    args: list[Any]
    if isinstance(config, FwdConfig):
        from cute_attn.kernels.sm90.fwd import FwdSm90

        code = f8 if config.qk_dtype == "e4m3" else cutlass.Int8
        entry = FwdSm90(config)
        args = [
            wide(code, batch, seqlen_q, heads_q, d),
            wide(code, batch, seqlen_k, heads_k, d),
            vt,
            scalars(batch, heads_q, seqlen_q),
            rows(k_groups, K_SCALE_PAD, 4 * K_SCALE_PAD),
            rows(v_groups, 1, 4),
            scalars(batch, heads_q, seqlen_q),
            wide(cutlass.BFloat16 if config.out_dtype == "bf16" else cutlass.Float16, batch, seqlen_q, heads_q, d),
            scalars(batch, heads_q, seqlen_q),
            cutlass.Float32(1.0),
            cutlass.Float32(1.0),
        ]
    else:
        from cute_attn.kernels.any.quantize import IN_TYPES, Quantize, TransposeV

        element = IN_TYPES[config.in_dtype]
        v = fake(element, (batch, seqlen_k, heads_k, d), 8, element.width)  # eight elements a load
        v_scale = scalars(batch, heads_k, v_groups)
        if config.in_dtype == "e4m3":
            entry, args = TransposeV(config), [v, scalars(batch, heads_k), vt, v_scale]
        else:
            code = f8 if config.qk_dtype == "e4m3" else cutlass.Int8
            entry = Quantize(config)
            args = [
                wide(element, batch, seqlen_q, heads_q, d),
                wide(element, batch, seqlen_k, heads_k, d),
                v,
                scalars(d),
                scalars(batch, heads_k, d),
                scalars(batch, heads_q),
                scalars(batch, heads_k),
                scalars(batch, heads_k),
                wide(code, batch, seqlen_q, heads_q, d),
                wide(code, batch, seqlen_k, heads_k, d),
                vt,
                scalars(batch, heads_q, seqlen_q),
                scalars(batch, heads_k, k_groups),
                v_scale,
                scalars(batch, heads_q, seqlen_q),
            ]
    return cute.compile(entry, *args, stream, options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}")


_compiled: dict[KernelConfig, Callable[..., None]] = {}


def compile_kernel(config: KernelConfig) -> Callable[..., None]:
    found = _compiled.get(config)
    if found is None:
        found = _compiled[config] = build(config)
    return found
