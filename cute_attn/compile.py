"""Config -> compiled kernel, without data and without a GPU.

The arguments are fake tensors whose sizes and strides are symbols, and integers, so that one compilation serves
every shape. The result takes torch tensors through TVM-FFI and launches on torch's current stream.

`compile_kernel` is what the launches call: a look-up where the process has the kernel, else a file of the
disk cache (see `cute_attn.cache`), else the compiler. `inspect` says what the compiler made of a kernel. The
DSL, half a second of import, is imported only where a kernel is not in memory.

    python -m cute_attn.compile [--recipe NAMES] [--head-dim SIZES] [--dtype NAMES] [--mask NAMES] [--features NAMES]
        [--pack-gqa GROUPS] [--varlen] [--backward] [--cache FORMS] [--jobs N]
    python -m cute_attn.compile --model NAME_OR_FOLDER [--recipe NAMES] [--seqlen LENGTHS] [--varlen] [--backward]
        [--cache FORMS] [--jobs N]

fills the disk cache ahead of use, also on a machine without a GPU, for example while an image is built. The second form
compiles what a model of transformers calls; `cute_attn.warmup` does the same from Python.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_attn import cache, decode_plan, plan16, plan_sm80, sass, tiles
from cute_attn.backward_tiles import backward16_sm80_config
from cute_attn.dispatch import EXACT
from cute_attn.kernels.config import (
    HEAD_DIMS,
    HEAD_DIMS_16BIT,
    SM80_ARCHS,
    AppendConfig,
    Bwd16Config,
    Bwd16Sm80Config,
    DecodeConfig,
    Fwd16Config,
    Fwd16Sm80Config,
    FwdConfig,
    MergeConfig,
    QuantizeConfig,
    UnpackConfig,
)
from cute_attn.kernels.operands import Layout
from cute_attn.quantize import PRESETS

__all__ = [
    "ARCH",
    "KernelConfig",
    "KernelFigures",
    "build",
    "compile_kernel",
    "configurations",
    "fill_cache",
    "inspect",
    "main",
]

KernelConfig = (
    FwdConfig
    | Fwd16Config
    | Fwd16Sm80Config
    | Bwd16Config
    | Bwd16Sm80Config
    | QuantizeConfig
    | DecodeConfig
    | AppendConfig
    | UnpackConfig
    | MergeConfig
)

ARCH = "sm_90a"  # WGMMA and setmaxnreg exist for this exact target only
# Above -O1 the assembler moves the loads of the quantiser's loops up until it has to spill their counters, and puts
# each shuffle next to its use. In crowded decoding kernels it spills likewise.
LESS_MOTION = "--ptxas-options '-O1'"


def build(config: KernelConfig, options: str = "") -> Any:
    """Compile `config` for sm_90a, past all caches. Takes two to five seconds.

    Not thread-safe, as the DSL aborts the process when two threads compile at once: call under
    `cache.COMPILE_LOCK`, as `compile_kernel` and `inspect` do.

    Args:
        config: what to compile.
        options: appended to the options of `cute.compile`.

    Returns:
        what `cute.compile` returns: callable, and exportable with `export_to_c`.

    Raises:
        ValueError: `config` breaks a limit, see its `check`.
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

    def integers(size: Any) -> Any:
        return make_fake_tensor(cutlass.Int32, (size,), (1,), assumed_align=4)

    f8 = cutlass.Float8E4M3FN
    batch, ends, seqlen_q, seqlen_k, heads_q, heads_k, padded_k = (cute.sym_int32() for _ in range(7))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    d, d_v = config.head_dim, config.head_dim_v
    address, layout = cutlass.Int64(0), tuple(cutlass.Int64(0) for _ in Layout._fields)
    entry: Any
    args: list[Any]
    arch = ARCH
    if isinstance(config, DecodeConfig):
        entry, args = _decode_arguments(config, wide, scalars)
        arch = config.arch
        options = f"{LESS_MOTION} {options}" if config.crowded else options
    elif isinstance(config, AppendConfig):
        entry, args = _append_arguments(config, wide, scalars)
        arch = config.arch
    elif isinstance(config, UnpackConfig):
        entry, args = _unpack_arguments(config, wide, scalars)
        arch = config.arch
    elif isinstance(config, MergeConfig):
        from cute_attn.kernels.any.merge import Merge
        from cute_attn.kernels.any.vectors import IN_TYPES

        element = IN_TYPES[config.dtype]
        before, out = (cutlass.Float32 if x else element for x in (config.wide_before, config.wide_out))
        entry = Merge(config)
        args = [
            *(wide(x, batch, seqlen_q, heads_q, d_v) for x in (before, element, out)),
            *(scalars(batch, heads_q, seqlen_q) for _ in range(3)),
        ]
    elif isinstance(config, Fwd16Config | Fwd16Sm80Config):
        element = cutlass.BFloat16 if config.dtype == "bf16" else cutlass.Float16
        of_batch = () if config.varlen else (batch,)
        args = [
            wide(element, *of_batch, seqlen_q, heads_q, d),
            wide(element, *of_batch, seqlen_k, heads_k, d),
            wide(element, *of_batch, seqlen_k, heads_k, d_v),
            wide(element, *of_batch, seqlen_q, heads_q, d_v),
            scalars(*of_batch, heads_q, seqlen_q),
            scalars(batch, heads_q),
            scalars(heads_q),
        ]
        if config.varlen:
            args += [integers(ends), integers(ends), integers(cute.sym_int32())]
        scores = [cutlass.Float32(1.0), cutlass.Float32(1.0), cutlass.Int32(1), cutlass.Int32(1)]
        if isinstance(config, Fwd16Config):
            from cute_attn.kernels.sm90.fwd_16bit import Fwd16bitSm90, Fwd16bitSplitSm90, Fwd16bitVarlenSm90

            entry = Fwd16bitVarlenSm90(config) if config.varlen else Fwd16bitSm90(config)
            args += [integers(1)] if config.varlen else []
            if config.split_keys:
                rows, entry = cute.sym_int32(), Fwd16bitSplitSm90(config)
                args[0] = wide(element, rows, heads_q, d)
                args[3:5] = wide(element, batch, seqlen_q, heads_q, d_v), scalars(batch, heads_q, seqlen_q)
                args += [address]
            args += [*scores, *[cutlass.Int32(1)] * (3 if config.varlen else 2)]
        else:
            from cute_attn.kernels.sm80.fwd import Fwd16bitSm80, Fwd16bitVarlenSm80

            entry, arch = Fwd16bitVarlenSm80(config) if config.varlen else Fwd16bitSm80(config), config.arch
            args += [*scores, *[cutlass.Int32(1)] * (2 if config.varlen else 1)]
    elif isinstance(config, Bwd16Config | Bwd16Sm80Config):
        element = cutlass.BFloat16 if config.dtype == "bf16" else cutlass.Float16
        if isinstance(config, Bwd16Config):
            from cute_attn.kernels.sm90.bwd_16bit import Bwd16bitSm90, Bwd16bitVarlenSm90

            entry = Bwd16bitVarlenSm90(config) if config.varlen else Bwd16bitSm90(config)
        else:
            from cute_attn.kernels.sm80.bwd import Bwd16bitSm80, Bwd16bitVarlenSm80

            entry, arch = Bwd16bitVarlenSm80(config) if config.varlen else Bwd16bitSm80(config), config.arch
        rows, blocks = (cute.sym_int32() for _ in range(2))
        of_batch = () if config.varlen else (batch,)
        args = [
            wide(element, *of_batch, seqlen_q, heads_q, d),
            wide(element, *of_batch, seqlen_k, heads_k, d),
            wide(element, *of_batch, seqlen_k, heads_k, d_v),
            wide(element, *of_batch, seqlen_q, heads_q, d_v),
            wide(element, *of_batch, seqlen_q, heads_q, d_v),
            scalars(*of_batch, heads_q, seqlen_q),
            scalars(*of_batch, heads_q, seqlen_q),
            scalars(batch, heads_q),
            wide(element, *of_batch, seqlen_q, heads_q, d),
            wide(element, *of_batch, seqlen_k, heads_k, d),
            wide(element, *of_batch, seqlen_k, heads_k, d_v),
            wide(cutlass.Float32, *of_batch, heads_q, rows),
            wide(cutlass.Float32, *of_batch, heads_q, rows),
            wide(cutlass.Float32, *of_batch, heads_q, blocks, config.tile_m * config.qk_columns),
            _int32(*of_batch, heads_q, cute.sym_int32(), config.dq_parts),
        ]
        if config.varlen:
            args += [integers(ends), integers(ends), integers(cute.sym_int32())]
        args += [*[cutlass.Float32(1.0)] * 3, *[cutlass.Int32(1)] * 4]
    elif isinstance(config, FwdConfig):
        from cute_attn.kernels.entry import FwdEntry, FwdVarlenEntry
        from cute_attn.kernels.sm90.fwd_8bit import Fwd8bitSm90, Fwd8bitVarlenSm90

        out = cutlass.BFloat16 if config.out_dtype == "bf16" else cutlass.Float16
        entry = FwdEntry(Fwd8bitSm90(config), config)
        args = [
            wide(out, batch, seqlen_q, heads_q, d_v),
            address,
            address,
            address,
            layout,
            cutlass.Float32(1.0),
            cutlass.Float32(1.0),
            cutlass.Int32(1),
            cutlass.Int32(1),
            scalars(batch, heads_q) if config.alibi else None,
            scalars(heads_q) if config.sinks else None,
            cutlass.Float32(1.0) if config.softcap else None,
            *[cutlass.Int32(1) if config.window else None] * 2,
        ]
        if config.varlen:
            entry = FwdVarlenEntry(Fwd8bitVarlenSm90(config), config)
            args[:5] = [
                wide(out, seqlen_q, heads_q, d_v),
                integers(ends),
                integers(ends),
                *[address] * 4,
                layout,
                cutlass.Int32(1),
            ]
    else:
        from cute_attn.kernels.any.quantize import Quantize, TransposeV
        from cute_attn.kernels.any.quantize_varlen import QuantizeVarlen
        from cute_attn.kernels.any.vectors import IN_TYPES
        from cute_attn.kernels.entry import QuantizeEntry, QuantizeVarlenEntry

        element = IN_TYPES[config.in_dtype]
        v = fake(element, (batch, seqlen_k, heads_k, d_v), 8, element.width)  # eight elements a load
        if config.in_dtype == "e4m3":
            entry, args = TransposeV(config), [v, wide(f8, batch, heads_k, d_v, padded_k)]
        elif config.varlen:
            entry = QuantizeVarlenEntry(QuantizeVarlen(config), config)
            args = [
                wide(element, seqlen_q, heads_q, d),
                wide(element, seqlen_k, heads_k, d),
                wide(element, seqlen_k, heads_k, d_v),
                integers(ends),
                integers(ends),
                scalars(d) if config.rotate else None,
                address,
                layout,
                cutlass.Int32(1),
            ]
        else:
            entry = QuantizeEntry(Quantize(config), config)
            angles = None  # cos and sin, of the dtype of q
            if config.rotary != "none":
                angles = wide(element, cute.sym_int32(), cute.sym_int32())
            args = [
                wide(element, batch, seqlen_q, heads_q, d),
                wide(element, batch, seqlen_k, heads_k, d),
                v,
                scalars(d) if config.rotate else None,
                scalars(batch, heads_q) if config.q_mode == "static" else None,
                scalars(batch, heads_k) if config.k_mode == "static" else None,
                scalars(batch, heads_k) if config.v_mode == "static" else None,
                address,
                layout,
                angles,
                angles,
                *[cutlass.Int32(0)] * 3,
            ]
        options = f"{LESS_MOTION} {options}"
    return cute.compile(entry, *args, stream, options=f"--enable-tvm-ffi --gpu-arch {arch} {options}")


def _decode_arguments(
    config: DecodeConfig, wide: Callable[..., Any], scalars: Callable[..., Any]
) -> tuple[Any, list[Any]]:
    """Host entry of a decoding kernel, and what `build` compiles it with; `wide` and `scalars` are of `build`."""
    import cutlass
    import cutlass.cute as cute

    from cute_attn.kernels.any.vectors import IN_TYPES
    from cute_attn.kernels.decode.attend import Decode

    element = IN_TYPES[config.dtype]
    cached = cutlass.Float8E4M3FN if config.cache == "e4m3" else element
    batch, seqlen_q, heads_q, heads_k, sequences, slots, blocks = (cute.sym_int32() for _ in range(7))
    d, d_v = config.head_dim, config.head_dim_v

    scales: Any = {"none": None, "head": (batch, heads_k), "token": (sequences, slots, heads_k)}[
        config.scales
    ]
    paged = config.paging != "none"
    args = [
        wide(cached if config.query == "e4m3" else element, batch, seqlen_q, heads_q, d),
        wide(cached, sequences, slots, heads_k, d),
        wide(cached, sequences, slots, heads_k, d_v),
        wide(element, batch, seqlen_q, heads_q, d_v),
        scalars(batch, heads_q, seqlen_q),
        _int32(batch),
        _int32(batch) if config.batch_idx else None,
        _int32(batch) if config.leftpad else None,
        _int32(batch, blocks) if paged else None,
        None if scales is None else scalars(*scales),
        None if scales is None else scalars(*scales),
        scalars(batch, heads_q) if config.alibi else None,
        scalars(heads_q) if config.sinks else None,
        scalars(batch, heads_k) if config.query == "e4m3" else None,
        cutlass.Int64(0),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1) for _ in range(7)),
    ]
    return Decode(config), args


def _append_arguments(
    config: AppendConfig, wide: Callable[..., Any], scalars: Callable[..., Any]
) -> tuple[Any, list[Any]]:
    """Likewise of a kernel that appends."""
    import cutlass
    import cutlass.cute as cute

    from cute_attn.kernels.any.vectors import IN_TYPES
    from cute_attn.kernels.decode.append import Append

    element = IN_TYPES[config.in_dtype]
    cached = cutlass.Float8E4M3FN if config.cache == "e4m3" else element
    batch, seqlen_q, heads_q, heads_k, sequences, slots, blocks, new = (cute.sym_int32() for _ in range(8))
    d, d_v = config.head_dim, config.head_dim_v
    scales: Any = {"none": None, "head": (batch, heads_k), "token": (sequences, slots, heads_k)}[
        config.scales
    ]
    keys, scaled = config.keys, config.keys and scales is not None
    angles = wide(element, cute.sym_int32(), cute.sym_int32()) if config.rotary != "none" else None
    args = [
        wide(element, batch, seqlen_q, heads_q, d) if config.queries else None,
        wide(element, batch, seqlen_q, heads_q, d) if config.queries else None,
        wide(element, batch, new, heads_k, d) if keys else None,
        wide(element, batch, new, heads_k, d_v) if keys else None,
        wide(cached, sequences, slots, heads_k, d) if keys else None,
        wide(cached, sequences, slots, heads_k, d_v) if keys else None,
        _int32(batch),
        _int32(batch) if config.batch_idx else None,
        _int32(batch, blocks) if config.paged else None,
        scalars(*scales) if scaled else None,
        scalars(*scales) if scaled else None,
        angles,
        angles,
        scalars(d) if config.rotate else None,
        cutlass.Int32(1),
    ]
    return Append(config), args


def _unpack_arguments(
    config: UnpackConfig, wide: Callable[..., Any], scalars: Callable[..., Any]
) -> tuple[Any, list[Any]]:
    """Likewise of a kernel that makes rows of a cache."""
    import cutlass
    import cutlass.cute as cute

    from cute_attn.kernels.any.vectors import IN_TYPES
    from cute_attn.kernels.decode.unpack import Unpack

    element = IN_TYPES[config.dtype]
    cached = cutlass.Float8E4M3FN if config.cache == "e4m3" else element
    batch, heads_k, sequences, slots, rows = (cute.sym_int32() for _ in range(5))
    scales: Any = {"none": None, "head": (batch, heads_k), "token": (sequences, slots, heads_k)}[
        config.scales
    ]
    args = [
        wide(cached, sequences, slots, heads_k, config.head_dim) if config.copy else None,
        wide(cached, sequences, slots, heads_k, config.head_dim_v) if config.copy else None,
        wide(element, rows, heads_k, config.head_dim) if config.copy else None,
        wide(element, rows, heads_k, config.head_dim_v) if config.copy else None,
        _int32(3, cute.sym_int32()),
        _int32(batch),
        _int32(batch) if config.batch_idx else None,
        _int32(batch) if config.leftpad else None,
        _int32(batch, cute.sym_int32()) if config.paged else None,
        None if scales is None else scalars(*scales),
        None if scales is None else scalars(*scales),
        scalars(batch, heads_k) if config.query_scale else None,
        *(cutlass.Int32(1) for _ in range(6)),
    ]
    return Unpack(config), args


def _int32(*shape: Any) -> Any:
    """A tensor of lengths, indices or pages: any strides."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(cutlass.Int32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)


_compiled: dict[KernelConfig, Callable[..., None]] = {}


def compile_kernel(config: KernelConfig) -> Callable[..., None]:
    """The compiled kernel of `config`: from memory, else from disk, else from the compiler.

    Needs no GPU. Thread-safe, and processes that ask for the same kernel at the same time compile it once.

    Returns:
        a function with the arguments that `build` lists (see `cute_attn.kernels.entry`), its tensors on one
        CUDA device. It checks their number, device, dtype, rank, shape, strides and alignment (TypeError,
        ValueError), makes their device current while it runs, and launches on its current stream. What crosses
        as an address it does not check.

    Raises:
        ValueError: `config` breaks a limit, see its `check`.
    """
    found = _compiled.get(config)
    if found is None:
        with cache.COMPILE_LOCK:
            found = _compiled.get(config)  # another thread may have compiled it while this one waited
            if found is None:
                found = _compiled[config] = _load_or_build(config)
    return found


def _load_or_build(config: KernelConfig) -> Callable[..., None]:
    key = cache.cache_key(config, ARCH)
    name = f"k_{key[:16]}"  # a symbol of the object file; each needs its own where one process loads several

    def build_object(path: Path) -> None:
        build(config).export_to_c(object_file_path=str(path), function_name=name)

    def load(path: Path) -> Callable[..., None]:
        import cutlass.cute as cute

        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), name)

    return cache.load_or_build(key, build_object, load, cache.describe(config, ARCH))


def configurations() -> list[KernelConfig]:
    """The kernels that every test run compiles and checks: samples, see `tiles.all_forward_configs` and its like."""
    return [
        *tiles.all_forward_configs(),
        *tiles.all_quantize_configs(),
        *plan16.all_forward16_configs(),
        *plan_sm80.all_forward16_sm80_configs(),
        *decode_plan.all_decode_configs(),
    ]


@dataclass(frozen=True)
class KernelFigures:
    """What the compiler made of one configuration.

    A quantiser is several kernels: `counts`, `total` and the spills are summed over them, the rest is the
    largest.
    """

    name: str  # of the configuration
    registers: int  # a thread at entry; the forward kernel's warpgroups then trade them by setmaxnreg
    stack_bytes: int  # a thread
    spill_store_bytes: int  # a thread, by static count
    spill_load_bytes: int
    smem_bytes: int  # dynamic shared memory of a CTA, as the compiled launch asks for it
    serialized_wgmma: bool  # the compiler put waits between WGMMA instructions that were meant to overlap
    counts: dict[str, int]  # instructions in the code, for each name of `sass.COUNTED`
    total: int  # all instructions, padding left out
    compile_seconds: float  # the first in a process includes the import of the DSL


def inspect(config: KernelConfig) -> KernelFigures:
    """Compile `config`, past all caches, and read its machine code. Needs no GPU; takes two to five seconds.

    Raises:
        ValueError: `config` breaks a limit, see its `check`.
        FileNotFoundError: `nvdisasm` or `cuobjdump` is not installed.
        RuntimeError: the compiler left no code, no report or no launch that can be read.
    """
    launched: list[int] = []

    def compile_with(options: str) -> None:
        launched.extend(_dynamic_smem(str(build(config, options).ir_module)))

    with cache.COMPILE_LOCK:
        code = sass.compile_and_disassemble(compile_with)
    assert code.ptxas is not None and code.compile_seconds is not None  # set by compile_and_disassemble
    return KernelFigures(
        name=config.name,
        registers=code.registers,
        stack_bytes=code.stack_bytes,
        spill_store_bytes=code.ptxas.spill_store_bytes,
        spill_load_bytes=code.ptxas.spill_load_bytes,
        smem_bytes=max(launched),
        serialized_wgmma=code.ptxas.serialized_wgmma,
        counts=code.counts,
        total=code.total,
        compile_seconds=code.compile_seconds,
    )


# Host code as LLVM IR: a launch fills a struct of grid, block, dynamic shared memory, attributes, stream and
# number of attributes; the third member is set from a constant of the function.
_SMEM_STORE = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\s+"
    r"llvm\.store (%\w+), \1 : i64"
)


def _dynamic_smem(ir: str) -> list[int]:
    """Bytes of dynamic shared memory of every launch in a compiled module, from its textual IR."""
    sizes = []
    for store in _SMEM_STORE.finditer(ir):
        constant = rf"{store[2]} = llvm\.mlir\.constant\((\d+) : i64\)"
        before = re.findall(constant, ir[: store.start()])  # names are of the function: the last one counts
        if not before:
            raise RuntimeError(
                "the compiled launch takes its shared memory from something else than a constant"
            )
        sizes.append(int(before[-1]))
    if not sizes:
        raise RuntimeError("no launch found in the compiled module")
    return sizes


# ------------------------------------------------------------------------------------------------------------
# Ahead of use
# ------------------------------------------------------------------------------------------------------------


MASKS = ("full", "causal", "window")
FEATURES = ("softcap", "alibi", "sinks")


def _chosen(
    recipes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    masks: Sequence[str],
    features: Sequence[frozenset[str]],
    groups: Sequence[int],
) -> list[KernelConfig]:
    """8-bit forward kernels and quantisers of these recipes, (head_dim, head_dim_v), dtypes ("bf16", "fp16"), masks,
    sets of features and `pack_gqa`.

    For long sequences and, where they have tiles of their own, for short ones, with and without clusters.
    """
    configs: dict[KernelConfig, None] = {}
    for name, (head_dim, head_dim_v), dtype in itertools.product(recipes, head_dims, dtypes):
        recipe = PRESETS[name]
        configs[tiles.quantize_config(recipe, head_dim, head_dim_v, dtype)] = None
        for mask, chosen, group in itertools.product(masks, features, groups):
            rounding = tiles.rounding_of(recipe, bool({"softcap", "alibi"} & chosen))
            key = (head_dim, head_dim_v, recipe.qk_dtype, mask == "causal", rounding)
            window = mask == "window"
            options: dict[str, Any] = dict.fromkeys(chosen, True)
            for seqlen_k in tiles.LENGTHS:
                clusters = (1,) if window else (1, tiles.find_tile(*key, seqlen_k).cluster)
                for cluster in clusters:
                    config = tiles.forward_config(
                        *key, dtype, group, cluster, seqlen_k, window=window, **options
                    )
                    configs[config] = None
    for _, head_dim_v in head_dims:
        configs[tiles.transpose_config(head_dim_v)] = None
    return list(configs)


def _chosen16(
    head_dims: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    masks: Sequence[str],
    features: Sequence[frozenset[str]],
    groups: Sequence[int],
    varlen: bool = False,
    backward: bool = False,
) -> list[KernelConfig]:
    """16-bit kernels of these (head_dim, head_dim_v), dtypes, masks, sets of features and `pack_gqa`.

    Forward kernels for long sequences and, where they have tiles of their own, for short ones, with and without
    clusters; with `varlen` also those for sequences of unlike length, with `backward` also the backward ones, but for
    the deterministic.
    """
    configs: dict[KernelConfig, None] = {}
    for (head_dim, head_dim_v), dtype, mask, chosen in itertools.product(head_dims, dtypes, masks, features):
        options = dict.fromkeys(chosen, True) | ({} if mask == "full" else {mask: True})
        lengths = (*plan16.SHORT_QUERIES, 1 << 20)
        for unlike, seqlen_q in itertools.product((False, True) if varlen else (False,), lengths):
            config = plan16.forward16_config(
                head_dim, head_dim_v, dtype, **options, seqlen_q=seqlen_q, varlen=unlike
            )
            for group, cluster in itertools.product(groups, (1, config.cluster)):
                configs[dataclasses.replace(config, pack_gqa=group, cluster=cluster)] = None
        if backward:
            options.pop("sinks", None)  # which need no kernel of their own
            ends = (
                plan16.SHORT_QUERIES_BACKWARD,
                plan16.LONG_QUERIES_BACKWARD - 1,
                plan16.LONG_QUERIES_BACKWARD,
            )
            for unlike, seqlen_q in itertools.product((False, True) if varlen else (False,), ends):
                back = plan16.backward16_config(
                    head_dim, head_dim_v, dtype, **options, varlen=unlike, seqlen_q=seqlen_q
                )
                configs[back] = None
    return list(configs)


def _chosen_decode(
    head_dims: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    features: Sequence[frozenset[str]],
    groups: Sequence[int],
    caches: Sequence[str],
    arch: str,
) -> list[KernelConfig]:
    """Kernels for one query of each of these groups of heads against caches of these forms (`decode_plan.FORMS`), and
    those that append to them."""
    configs: dict[KernelConfig, None] = {}
    for (head_dim, head_dim_v), dtype, form in itertools.product(head_dims, dtypes, caches):
        options: dict[str, Any] = decode_plan.FORMS[form]
        for chosen, group in itertools.product(features, groups):
            given = options | dict.fromkeys(chosen, True)
            config = decode_plan.decode_config(head_dim, head_dim_v, dtype, rows=group, arch=arch, **given)
            configs |= dict.fromkeys(decode_plan.kernels(config, group))
        codes = {name: x for name, x in options.items() if name != "page_size"}
        append = AppendConfig(head_dim, head_dim_v, dtype, **codes, paged="page_size" in options, arch=arch)
        configs[append] = None
    return list(configs)


def _chosen_sm80(
    arch: str,
    head_dims: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    masks: Sequence[str],
    features: Sequence[frozenset[str]],
    groups: Sequence[int],
    varlen: bool = False,
    backward: bool = False,
) -> list[KernelConfig]:
    """The 16-bit kernels by mma.sync for `arch`; otherwise as `_chosen16`."""
    configs: dict[KernelConfig, None] = {}
    for (head_dim, head_dim_v), dtype, mask, chosen in itertools.product(head_dims, dtypes, masks, features):
        options = dict.fromkeys(chosen, True) | ({} if mask == "full" else {mask: True})
        lengths = (1 << 20, plan_sm80.SHORT_QUERIES)
        for unlike, group, seqlen_q in itertools.product(
            (False, True) if varlen else (False,), groups, lengths
        ):
            config = plan_sm80.forward16_sm80_config(
                head_dim,
                head_dim_v,
                dtype,
                arch=arch,
                **options,
                varlen=unlike,
                group=group,
                seqlen_q=1 if group > 1 else seqlen_q,
            )
            configs[config] = None
        if backward:
            options.pop("sinks", None)  # as in `_chosen16`
            for unlike in (False, True) if varlen else (False,):
                gradients = backward16_sm80_config(
                    head_dim, head_dim_v, dtype, arch=arch, **options, varlen=unlike
                )
                configs[gradients] = None
    return list(configs)


def fill_cache(
    configs: Sequence[KernelConfig], jobs: int | None = None
) -> Iterator[tuple[KernelConfig, float | BaseException]]:
    """Compile into the disk cache in processes of their own; (config, seconds or error) as each is done.

    Args:
        configs: what to compile; what the cache holds already is loaded instead.
        jobs: processes; default: CPUs, at most 8.
    """
    if not configs:
        return
    jobs = min(8, os.cpu_count() or 1) if jobs is None else jobs
    context = multiprocessing.get_context("spawn")  # the DSL aborts where two threads compile at once
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(configs)), mp_context=context) as pool:
        running = {pool.submit(_compile_one, config): config for config in configs}
        for job in concurrent.futures.as_completed(running):
            error = job.exception()
            yield running[job], job.result() if error is None else error


def _compile_one(config: KernelConfig) -> float:
    """Seconds until `config` was in memory. For a process of its own."""
    start = time.perf_counter()
    compile_kernel(config)
    return time.perf_counter() - start


def _several(allowed: Sequence[Any]) -> Callable[[str], list[Any]]:
    kind = type(allowed[0])

    def parse(text: str) -> list[Any]:
        try:
            values = [kind(part.strip()) for part in text.split(",")]
        except ValueError:
            values = [text]
        for value in values:
            if value not in allowed:
                raise argparse.ArgumentTypeError(f"{value!r} is not among {', '.join(map(str, allowed))}")
        return values

    return parse


def _features(text: str) -> list[frozenset[str]]:
    """ "none,softcap+sinks" as [{}, {softcap, sinks}]."""
    sets = []
    for part in text.split(","):
        names = frozenset(name.strip() for name in part.split("+"))
        if names != {"none"} and not names <= set(FEATURES):
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} is neither none nor some of {', '.join(FEATURES)}, joined by +"
            )
        sets.append(names - {"none"})
    return sets


def _lengths(text: str) -> list[int]:
    """ "1,4096" as [1, 4096]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers > 0")
    return [int(part) for part in parts]


def _head_dims(text: str) -> list[tuple[int, int]]:
    """ "128,192:128" as [(128, 128), (192, 128)]."""
    pairs = []
    for part in text.split(","):
        sizes = [size.strip() for size in part.split(":")]
        if len(sizes) > 2 or not all(size.isdecimal() and int(size) in HEAD_DIMS_16BIT for size in sizes):
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} is no multiple of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, nor two of "
                "them as HEAD_DIM:HEAD_DIM_V"
            )
        pairs.append((int(sizes[0]), int(sizes[-1])))
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if a kernel did not compile or there is no disk cache to fill.

    Raises SystemExit(2) for a bad command line.
    """
    names, dtypes = [EXACT, *PRESETS], list(tiles.DTYPE_NAMES.values())
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn.compile", description="Compile kernels into the disk cache. Needs no GPU."
    )
    parser.add_argument(
        "--arch",
        choices=(ARCH, *(arch for arch in SM80_ARCHS if arch != ARCH)),
        default=ARCH,
        help=f"target; others than {ARCH} have 16-bit kernels alone (default: %(default)s)",
    )
    parser.add_argument(
        "--recipe",
        type=_several(names),
        help=f"of {', '.join(names)}; {EXACT} stands for the 16-bit kernels (default: default; with --model also "
        f"{EXACT})",
    )
    tuned = tiles.TUNED_HEAD_DIMS
    parser.add_argument(
        "--head-dim",
        type=_head_dims,
        default=[(d, d) for d in tuned],
        help="of Q, K, V, or D:DV where V has another, like 192:128; multiples of 16, or of 8 with 16 bits (default: "
        f"{','.join(map(str, tuned))})",
    )
    parser.add_argument("--dtype", type=_several(dtypes), default=dtypes, help="default: bf16,fp16")
    parser.add_argument(
        "--pack-gqa",
        type=_several((1, 2, 4, 8, 16, 32, 64)),
        default=[1],
        help="query heads of a key head whose rows are packed, as for few queries (default: 1, none)",
    )
    parser.add_argument(
        "--mask",
        type=_several(MASKS),
        default=["full", "causal"],
        help="of full, causal, window (default: full,causal)",
    )
    parser.add_argument(
        "--features",
        type=_features,
        default=[frozenset()],
        metavar="NAMES",
        help="of none, softcap, alibi, sinks, and those joined by +, like none,softcap+sinks (default: none)",
    )
    parser.add_argument(
        "--model", help="name or folder of a model of transformers: its shapes, dtype and features"
    )
    parser.add_argument(
        "--seqlen",
        type=_lengths,
        help="with --model: numbers of queries of a call, comma-separated (default: a decoding step and prefills)",
    )
    parser.add_argument(
        "--varlen",
        action="store_true",
        help="also the 16-bit kernels for sequences of unlike length, such as those of a padded batch",
    )
    parser.add_argument(
        "--backward", action="store_true", help="also the 16-bit kernels of the gradients, for training"
    )
    parser.add_argument(
        "--cache",
        type=_several(list(decode_plan.FORMS)),
        default=[],
        metavar="FORMS",
        help=f"also the kernels for KV caches of these forms, of {', '.join(decode_plan.FORMS)}: for one query, with "
        "--model for as many as --seqlen says",
    )
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"argument --jobs: must be at least 1, got {args.jobs}")
    folder = cache.cache_dir()
    if folder is None:
        print("the disk cache is off, there is nothing to fill", file=sys.stderr)
        return 1
    if args.arch != ARCH:
        if set(args.recipe or [EXACT]) != {EXACT}:
            parser.error(f"argument --recipe: {args.arch} has 16-bit kernels alone; allowed: {EXACT}")
        args.recipe = [EXACT]
    if args.model is None:
        names = args.recipe or ["default"]
        recipes = [name for name in names if name != EXACT]
        odd = [dims for dims in args.head_dim if recipes and not set(dims) <= set(HEAD_DIMS)]
        if odd:
            parser.error(
                f"argument --head-dim: recipes of 8 bits take multiples of 16, got {odd[0][0]}:{odd[0][1]}"
            )
        if EXACT not in names:
            for option in ("varlen", "backward"):
                if getattr(args, option):
                    parser.error(f"argument --{option}: only 16-bit kernels; name {EXACT} in --recipe")
        common = (args.head_dim, args.dtype, args.mask, args.features, args.pack_gqa)
        configs = _chosen(recipes, *common) if recipes else []
        if args.arch != ARCH:
            configs += _chosen_sm80(args.arch, *common, args.varlen, args.backward)
        elif EXACT in names:
            configs += _chosen16(*common, args.varlen, args.backward)
        configs += _chosen_decode(
            args.head_dim, args.dtype, args.features, args.pack_gqa, args.cache, args.arch
        )
    else:
        from cute_attn import precompile

        try:
            shapes = precompile.model_shapes(args.model)
        except (ImportError, OSError, ValueError) as error:
            parser.error(f"argument --model: {error}")
        configs = precompile.kernels(
            shapes,
            args.recipe or [EXACT, "default"],
            args.seqlen or precompile.SEQLENS,
            varlen=args.varlen,
            backward=args.backward,
            caches=args.cache,
            arch=args.arch,
        )
    start, failed = time.perf_counter(), 0
    for config, done in fill_cache(configs, args.jobs):
        failed += isinstance(done, BaseException)
        result = f"{done:.1f} s" if isinstance(done, float) else f"FAILED: {type(done).__name__}: {done}"
        print(f"{config.name}  {result}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(configs) - failed} of {len(configs)} kernels for {args.arch} in {folder}, {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    from cute_attn.compile import (
        main as imported,
    )  # functions of this run's own module would not reach the pool

    sys.exit(imported())
