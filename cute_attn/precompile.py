"""The kernels that a model calls, compiled before its first call.

A kernel compiles in seconds when it is first used. `warmup` does that ahead, in parallel processes, from shapes or from
the configuration of a model of transformers; `python -m cute_attn.compile --model` does it on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from cute_attn import cache, decode_plan, dispatch, flash, fp8_varlen, plan, prefill, tiles
from cute_attn import compile as compiler
from cute_attn.compile import KernelConfig
from cute_attn.dispatch import EXACT
from cute_attn.flash_autograd import backward_config
from cute_attn.kernels.config import (
    E4M3_ARCHS,
    HEAD_DIMS,
    AppendConfig,
    DecodeConfig,
    Fwd16Config,
    Fwd16Sm80Config,
)
from cute_attn.problem import ARCHS, Features, Problem
from cute_attn.quantize import Fp8Recipe, resolve_recipe

__all__ = ["SEQLENS", "ModelShapes", "kernels", "model_shapes", "warmup"]

SEQLENS: Final = (*range(1, 2048), *range(2048, 16385, 64), 32768)
"""Numbers of queries of a call that stand for all: a decoding step, and prefills of any length. Kernels differ in
whether query heads share tiles and CTAs are paired, and both hang on how many tiles the queries fill."""


@dataclass(frozen=True)
class ModelShapes:
    """What a model's attention calls have in common.

    Attributes:
        heads_q, heads_k, head_dim, head_dim_v: as in `flash_attn_func`.
        dtype: float16 or bfloat16, of the tensors.
        causal: whether prefills are causal.
        windows: (left, right) of the layers, (-1, -1) for those without a sliding window.
        softcap: of the scores, 0 for none.
        sinks: whether layers have sinks.

    Raises:
        TypeError: another dtype.
    """

    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    windows: tuple[tuple[int, int], ...] = ((-1, -1),)
    softcap: float = 0.0
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in tiles.DTYPE_NAMES:
            raise TypeError(f"dtype is {self.dtype}; allowed: torch.float16, torch.bfloat16")


def model_shapes(model: Any) -> ModelShapes:
    """Shapes of a model of transformers.

    Args:
        model: a model, its configuration, or a name or folder that `AutoConfig` finds.

    Raises:
        ImportError: transformers is not installed, and a name or folder is given.
        OSError: there is no such model.
        ValueError: the configuration names no heads.
    """
    config = getattr(model, "config", model)
    if isinstance(config, (str, os.PathLike)):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(config)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    heads_q = getattr(config, "num_attention_heads", None)
    if not heads_q:
        raise ValueError(f"{type(config).__name__} has no num_attention_heads; give ModelShapes instead")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads_q
    rotary = getattr(config, "qk_rope_head_dim", None)  # multi-head latent attention: two parts of a head
    head_dim_v = head_dim
    if rotary is not None:
        head_dim, head_dim_v = config.qk_nope_head_dim + rotary, config.v_head_dim
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        windows: tuple[tuple[int, int], ...] = ((-1, -1),)
    elif kinds and "sliding_attention" not in kinds:
        windows = ((-1, -1),)
    else:
        windows = ((window - 1, -1),) + (((-1, -1),) if "full_attention" in kinds else ())
    dtype = getattr(config, "dtype", None)
    return ModelShapes(
        heads_q=heads_q,
        heads_k=heads_q if rotary is not None else getattr(config, "num_key_value_heads", None) or heads_q,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype if dtype in tiles.DTYPE_NAMES else torch.bfloat16,
        causal=_is_causal(config),
        windows=windows,
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        sinks=getattr(config, "model_type", "") == "gpt_oss",
    )


def _is_causal(config: Any) -> bool:
    """Whether a configuration is that of a decoder."""
    if getattr(config, "is_causal", True) is False or getattr(config, "is_decoder", True) is False:
        return False
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as decoders
    except ImportError:
        return True
    return getattr(config, "model_type", "") in decoders


def kernels(
    shapes: ModelShapes,
    precisions: Sequence[str | Fp8Recipe] = (EXACT,),
    seqlens: Sequence[int] = SEQLENS,
    *,
    varlen: bool = False,
    backward: bool = False,
    caches: Sequence[str] = (),
    arch: str = compiler.ARCH,
) -> list[KernelConfig]:
    """The kernels that calls of these shapes use, each once.

    Where a decoder has a call of one query, they include the decoding kernels over a 16-bit cache, which `cute_attn.hf`
    calls whatever the precision. Which of them a call takes hangs on the batch and the keys: all.

    Args:
        shapes: of the model.
        precisions: "bf16" (the 16-bit kernel), names of recipes, or recipes. A head_dim that no 8-bit kernel has uses
            the 16-bit kernel.
        seqlens: numbers of queries of a call; one query sees all keys, more of them as `shapes.causal` says.
        varlen: also the kernels for sequences of unlike length: those of `flash_attn_varlen_func` and
            `fp8_attention_varlen`, which `cute_attn.hf` calls for a padded batch. A sequence has one of `seqlens`
            queries on average.
        backward: also what training calls: the 16-bit backward, whatever the precisions.
        caches: also what `flash_attn_with_kvcache`, `append_kv` and `KVCache` call, with `seqlens` queries, for caches
            of these forms: "16bit", "16bit-paged", "e4m3" and "e4m3-paged", those of e4m3 with a scale for each token,
            pages of a multiple of 16 slots. Not with a rotary embedding in the call.

        arch: that of Hopper, or one of `SM80_ARCHS`, which has 16-bit kernels alone: they serve every precision.

    Raises:
        TypeError, ValueError: an unknown precision, architecture or form of a cache, or shapes that have no kernel.
    """
    found: dict[KernelConfig, None] = {}
    asked = [dispatch.check_options(precision, "auto", "error") for precision in precisions]
    lengths = [(window, *each) for window in shapes.windows for each in _lengths(seqlens, window[0])]
    eight = arch == compiler.ARCH and {shapes.head_dim, shapes.head_dim_v} <= set(HEAD_DIMS)
    for precision in asked:
        if precision != EXACT and eight:
            for window, seqlen, cuts in lengths:
                problem = _problem(shapes, precision, window, seqlen, cuts)
                chosen = plan.make_plan(problem)
                assert chosen.quantize_config is not None
                found[chosen.quantize_config] = None
                found[chosen.config] = None
                if varlen and fp8_varlen.takes_recipe(problem.recipe):
                    mixed = _varlen_plan(replace(problem, causal=shapes.causal))
                    found[mixed.quantize_config] = None
                    found[mixed.config] = None
    if EXACT in asked or not eight:
        for _, seqlen, cuts in lengths:
            found[_config16(shapes, seqlen, cuts, arch)] = None
            if varlen:
                found[_config16(shapes, seqlen, cuts, arch, varlen=True)] = None
    if shapes.causal and 1 in seqlens:
        for leftpad in (False, True) if varlen else (False,):
            step = _decode_config(shapes, leftpad, arch)
            found |= dict.fromkeys(decode_plan.kernels(step, shapes.heads_q // shapes.heads_k))
    if backward:
        for (_, seqlen, cuts), packed in itertools.product(lengths, (False, True) if varlen else (False,)):
            if seqlen > 1:
                forward = _config16(shapes, seqlen, cuts, arch, varlen=packed)
                found[backward_config(forward, seqlen_q=seqlen)] = None
    for form in caches:
        if form not in decode_plan.FORMS:
            raise ValueError(f"cache is {form!r}; allowed: {', '.join(map(repr, decode_plan.FORMS))}")
        if "e4m3" in form and arch not in E4M3_ARCHS:
            raise ValueError(
                f"cache is {form!r}; allowed on {arch}, which has no conversions of e4m3: a 16-bit form"
            )
        found |= dict.fromkeys(_cache_kernels(shapes, form, lengths, arch))
    return list(found)


def _cache_kernels(
    shapes: ModelShapes, form: str, lengths: Sequence[tuple[tuple[int, int], int, bool]], arch: str
) -> Iterator[KernelConfig]:
    """Those for a cache of a form. Which of the three that attend takes many queries hangs on the batch: all."""
    dims = (shapes.head_dim, shapes.head_dim_v, tiles.DTYPE_NAMES[shapes.dtype])
    options = decode_plan.FORMS[form]
    paged = "page_size" in options
    for index in (False,) if paged else (False, True):
        for window, seqlen, _ in lengths:
            ends = (window[0], 0 if shapes.causal else window[1])
            packed = seqlen * (shapes.heads_q // shapes.heads_k)
            split = decode_plan.decode_config(
                *dims,
                **options,
                rows=packed,
                row_ends=seqlen > 1 and ends != (-1, -1),
                softcap=shapes.softcap > 0,
                sinks=shapes.sinks,
                batch_idx=index,
                arch=arch,
            )
            yield from decode_plan.kernels(split, packed)
            if seqlen > 1 and arch == compiler.ARCH:
                keys = 1 << 20  # more than a window, so that it cuts
                rows = None if options else keys
                of_call = (1, shapes.heads_q, shapes.heads_k, seqlen, keys, keys, ends, rows, 1)
                forward = prefill.make_prefill(split, *of_call)
                yield from (
                    forward.config,
                    dataclasses.replace(forward.config, split_keys=True),
                    forward.unpack,
                )
        codes = {name: x for name, x in options.items() if name != "page_size"}
        new = AppendConfig(*dims, **codes, paged=paged, batch_idx=index, arch=arch)
        yield new
        if codes:
            yield dataclasses.replace(new, rotate=True)
            yield dataclasses.replace(new, rotate=True, queries=True)
            yield dataclasses.replace(
                new, rotate=True, queries=True, keys=False, paged=False, batch_idx=False
            )


def _config16(
    shapes: ModelShapes, seqlen: int, cuts: bool, arch: str, varlen: bool = False
) -> Fwd16Config | Fwd16Sm80Config:
    # One query sees all keys; of sequences of unlike length nobody knows that they have one.
    causal = shapes.causal and (varlen or seqlen > 1)
    return flash.kernel_config(
        "sm90" if arch == compiler.ARCH else arch,
        shapes.head_dim,
        shapes.head_dim_v,
        tiles.DTYPE_NAMES[shapes.dtype],
        causal=causal and not cuts,
        window=cuts,
        softcap=shapes.softcap > 0,
        sinks=shapes.sinks,
        group=shapes.heads_q // shapes.heads_k,
        seqlen_q=seqlen,
        varlen=varlen,
    )


def _varlen_plan(problem: Problem) -> fp8_varlen.VarlenPlan:
    """The plan of two sequences, each of the problem's lengths on average."""
    assert problem.in_dtype is not None
    window = problem.features.window
    return fp8_varlen.choose(
        (2 * problem.seqlen_q, problem.heads_q, problem.head_dim),
        (2 * problem.seqlen_k, problem.heads_k, problem.head_dim_v),
        problem.in_dtype,
        2,
        problem.recipe,
        replace(problem.features, window=(window[0], 0) if problem.causal else window),
        problem.capability,
        "auto",
        problem.out_dtype,
    )


def _decode_config(shapes: ModelShapes, leftpad: bool, arch: str) -> DecodeConfig:
    return decode_plan.decode_config(
        shapes.head_dim,
        shapes.head_dim_v,
        tiles.DTYPE_NAMES[shapes.dtype],
        rows=shapes.heads_q // shapes.heads_k,
        softcap=shapes.softcap > 0,
        sinks=shapes.sinks,
        leftpad=leftpad,
        arch=arch,
    )


def _problem(
    shapes: ModelShapes, precision: str | Fp8Recipe, window: tuple[int, int], seqlen: int, cuts: bool
) -> Problem:
    return Problem(
        batch=1,
        seqlen_q=seqlen,
        seqlen_k=max(seqlen, window[0] + 2) if cuts else seqlen,
        heads_q=shapes.heads_q,
        heads_k=shapes.heads_k,
        head_dim=shapes.head_dim,
        head_dim_v=shapes.head_dim_v,
        in_dtype=shapes.dtype,
        out_dtype=shapes.dtype,
        causal=shapes.causal and seqlen > 1,
        recipe=resolve_recipe(precision),
        capability=(9, 0),
        features=Features(window if cuts else (-1, -1), shapes.softcap, False, shapes.sinks),
    )


def _arch() -> str:
    """Target of the kernels for torch's current GPU; Hopper's where there is none that has kernels of its own."""
    there = torch.cuda.is_available() and torch.version.cuda is not None
    return ARCHS.get(torch.cuda.get_device_capability(), compiler.ARCH) if there else compiler.ARCH


def _lengths(seqlens: Sequence[int], left: int) -> Iterator[tuple[int, bool]]:
    """(queries, whether the window hides a key) of calls: few queries may meet few keys or many."""
    for seqlen in seqlens:
        if left < 0 or seqlen <= left:
            yield seqlen, False
        if left >= 0:
            yield seqlen, True


def warmup(
    model: Any,
    precisions: Sequence[str | Fp8Recipe] = (EXACT,),
    seqlens: Sequence[int] = SEQLENS,
    *,
    varlen: bool = False,
    backward: bool = False,
    caches: Sequence[str] = (),
    jobs: int | None = None,
) -> dict[str, float]:
    """Compile the kernels that a model calls on this machine's GPU, and load them into this process.

    On a GPU of compute capability 8 these are 16-bit kernels, whatever the precisions. Without a GPU they
    are those of Hopper.

    Args:
        model: `ModelShapes`, or what `model_shapes` takes: a model of transformers, its configuration, name or folder.
        precisions: "bf16" (the 16-bit kernel), names of recipes, or recipes.
        seqlens: numbers of queries of a call; default: any.
        varlen: also for padded batches, `flash_attn_varlen_func` and `fp8_attention_varlen`.
        backward: also for training.
        caches: also for KV caches of these forms: "16bit", "16bit-paged", "e4m3", "e4m3-paged".
        jobs: processes that compile into the disk cache (default: CPUs, at most 8). Without a disk cache this process
            compiles one after another.

    Returns:
        seconds by name of the kernel: of its compilation, or of loading it where it was compiled before.

    Raises:
        TypeError, ValueError, OSError, ImportError: as `model_shapes` and `kernels`.
        RuntimeError: a kernel did not compile.
    """
    shapes = model if isinstance(model, ModelShapes) else model_shapes(model)
    configs = kernels(
        shapes, precisions, seqlens, varlen=varlen, backward=backward, caches=caches, arch=_arch()
    )
    seconds: dict[str, float] = {}
    if cache.cache_dir() is not None and jobs != 1:
        for config, done in compiler.fill_cache(configs, jobs):
            if isinstance(done, BaseException):
                raise RuntimeError(f"{config.name} did not compile: {done}") from done
            seconds[config.name] = done
    for config in configs:
        start = time.perf_counter()
        compiler.compile_kernel(config)
        seconds.setdefault(config.name, time.perf_counter() - start)
    return seconds
