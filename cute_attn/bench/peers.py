"""Who is timed, and how each one is called: this library and the attention libraries it compares with.

A *contender* is a provider with a precision, a phase and, for this library, a recipe. Phases:

forward
    ready operands to a 16-bit output. 8-bit contenders start from prepared 8-bit tensors.
quantize
    16-bit Q, K, V to prepared 8-bit tensors.
whole_call
    16-bit Q, K, V to a 16-bit output, quantising included. For a 16-bit contender this is its forward.
prefill
    the forward of 16 bits beyond the papers' grid: sequences of unlike length, a sliding window, many queries over a
    KV cache.
backward
    the gradients of 16-bit Q, K and V, after a forward that is not timed.
train
    forward and backward. An 8-bit contender has a forward of its own and the 16-bit backward.
decode
    one query for each sequence against a KV cache of 16 bits, or of e4m3, ours with a scale for each token and head.

The 8-bit peers get N(0, 1) tensors cast to e4m3 with all scales 1, which is the cheapest that they can be
asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_attn.bench import cases, gradients
from cute_attn.bench.record import package_version

if TYPE_CHECKING:
    from cute_attn.plan import Plan

OURS = "cute_attn"
PHASES = ("forward", "quantize", "whole_call", "prefill", "decode", "backward", "train")
ONLY_16BIT = ("prefill", "backward")
SIXTEEN_BIT = ("bf16", "fp16")
BACKENDS = ("sm90", "sm80")  # of ours; not "auto", which would time the emulator as if it were the kernel
BACKEND = "sm90"  # where a contender names none

# An unfused implementation holds about three float32 tensors of the size of S; above this bound one of them
# is too big.
MATH_SCORE_LIMIT = 4 << 30  # bytes


class NotRun(Exception):
    """A contender that takes no part; `status` is "unavailable" (not installed) or "skipped" (by choice)."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Contender:
    """One column of the speed table."""

    provider: str
    dtype: str  # "fp8" for every 8-bit mixture, "bf16" or "fp16"
    phase: str
    recipe: str | None = None
    asked: str | None = None  # the backend of ours, of BACKENDS; None for BACKEND
    deterministic: bool = False  # gradients that are the same, bit for bit, in every run

    @property
    def label(self) -> str:
        """Short name for tables: provider, then the recipe of ours or the precision of a peer."""
        return f"{self.provider} {self.recipe or self.dtype}" + (
            " deterministic" if self.deterministic else ""
        )

    @property
    def backend(self) -> str:
        """Of ours."""
        return self.asked or BACKEND


@dataclass(frozen=True)
class Prepared:
    """A contender ready to be launched on one case."""

    launch: Callable[[], Any]
    kernel: str  # what runs: our kernel's name, or the library with its version
    backend: str
    # takes what `launch` returned, and `cases.SampledRows` or `gradients.SampledGradients`
    check: Callable[[Any, Any], cases.OutputError] | None
    bytes_moved: int | None = None  # to and from device memory, where that is what limits the phase
    held_bytes: int = 0  # of an output that is allocated once and not by the call
    graph_calls: int = 0  # where `launch` replays a CUDA graph: the calls in it


# provider -> (precisions it runs in, phases it has)
_SIXTEEN = (SIXTEEN_BIT, ("forward", "whole_call", "decode", "backward", "train"))
_FLASH = ("forward", "whole_call", "prefill", "backward", "train")
PROVIDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    OURS: (("fp8", *SIXTEEN_BIT), PHASES),
    "fa3": (("fp8", *SIXTEEN_BIT), (*_FLASH, "decode")),
    "fa4": (SIXTEEN_BIT, _FLASH),
    "cudnn": (("fp8",), ("forward",)),
    "sdpa_flash": _SIXTEEN,
    "sdpa_cudnn": _SIXTEEN,
    "sdpa_efficient": _SIXTEEN,
    "sdpa_math": _SIXTEEN,
    "flashinfer": (("fp8", *SIXTEEN_BIT), ("decode",)),
    "copy": (("fp8", *SIXTEEN_BIT), ("quantize", "decode")),
    "copy_cache": (("fp8", *SIXTEEN_BIT), ("decode",)),
}
COPIES = ("copy", "copy_cache")  # which attend to nothing
_DEFAULT_FP8 = {
    "forward": (OURS, "fa3", "cudnn", "sdpa_flash"),
    "quantize": (OURS, "copy"),
    "whole_call": (OURS, "fa3", "fa4", "sdpa_flash", "sdpa_cudnn"),
    "train": (OURS, "fa3", "fa4", "sdpa_flash", "sdpa_cudnn"),
    "decode": (OURS, "fa3", "flashinfer", "sdpa_flash", "sdpa_cudnn", *COPIES),
}
_DEFAULT_16BIT = (OURS, "fa3", "fa4", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")
_DEFAULT_GRADIENTS = _DEFAULT_FP8["train"]
DETERMINISTIC = (OURS, "fa4")  # whose 16-bit gradients can be had the same, bit for bit, in every run


def contenders(
    dtype: str,
    phases: Sequence[str],
    recipes: Sequence[str],
    providers: Sequence[str] | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> list[Contender]:
    """Who takes part.

    Args:
        dtype: "fp8" times the 8-bit kernels of this library and its peers, and the 16-bit peers in bf16; "bf16" and
            "fp16" the 16-bit kernels.
        providers: names from `PROVIDERS`; None takes a default for each phase.
        backend: of this library's kernels, of `BACKENDS`; None for that of Hopper.
        deterministic: in phases backward and train those of `DETERMINISTIC` take part twice, also with gradients that
            are the same, bit for bit, in every run.

    Raises:
        ValueError: an unknown provider, or one that has no part in any of the phases at this precision, or 8 bits of a
            backend that has none, or deterministic gradients of phases or providers that have none.
    """
    if deterministic and not any(phase in gradients.FLOP_FACTORS for phase in phases):
        allowed = ", ".join(gradients.FLOP_FACTORS)
        raise ValueError(
            f"phase {', '.join(phases)} has no gradients to be deterministic; allowed: {allowed}"
        )
    if backend == "sm80" and dtype == "fp8":
        raise ValueError("backend sm80 has 16-bit kernels, not dtype fp8; allowed: bf16, fp16")
    unknown = [name for name in providers or () if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"unknown provider {', '.join(unknown)}; known are {', '.join(PROVIDERS)}")
    found: list[Contender] = []
    for phase in phases:
        if phase in ONLY_16BIT and dtype == "fp8":
            raise ValueError(f"phase {phase} times 16-bit kernels, not dtype fp8; allowed: bf16, fp16")
        if dtype == "fp8":
            chosen = _DEFAULT_FP8[phase] if providers is None else providers
            wanted: tuple[str, ...] = ("fp8", "bf16")
        else:
            default = _DEFAULT_GRADIENTS if phase in gradients.FLOP_FACTORS else _DEFAULT_16BIT
            default = _DEFAULT_FP8[phase] if phase == "decode" else default
            chosen = default if providers is None else providers
            wanted = (dtype,)
        eight_bit = [name for name in chosen if "fp8" in PROVIDERS[name][0]]
        for precision in wanted:
            for name in eight_bit if precision == "fp8" else chosen:
                precisions, its_phases = PROVIDERS[name]
                if precision not in precisions or phase not in its_phases:
                    continue
                if phase in ("whole_call", "train") and precision == "fp8" and name != OURS:
                    continue  # FA3's FP8 kernel takes 8-bit tensors; it has no quantiser and no backward
                if name in (OURS, *COPIES) and precision != "fp8" and (dtype == "fp8" or phase == "quantize"):
                    continue
                by_recipe = name == OURS and precision == "fp8" and phase != "decode"
                for recipe in recipes if by_recipe else (None,):
                    asked = backend if name == OURS else None
                    found.append(Contender(name, precision, phase, recipe, asked))
                    differentiated = phase in gradients.FLOP_FACTORS and precision != "fp8"
                    if deterministic and differentiated and name in DETERMINISTIC:
                        found.append(replace(found[-1], deterministic=True))
    running = {contender.provider for contender in found}
    idle = [name for name in providers or () if name not in running]
    if idle or not found:
        names = ", ".join(idle) or "a default provider"
        raise ValueError(f"nothing to time for {names} with dtype {dtype} in phase {', '.join(phases)}")
    if deterministic and not any(contender.deterministic for contender in found):
        raise ValueError(
            f"no provider with deterministic gradients among {', '.join(running)}; allowed: {', '.join(DETERMINISTIC)}"
        )
    return found


def prepare(contender: Contender, case: cases.Case, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    """Make `contender` ready for 16-bit inputs q (batch, seqlen_q, heads_q, head_dim), k and v on the GPU.

    Raises:
        NotRun: the library is not installed, or the case is left out on purpose.
        Exception: whatever the library raises.
    """
    if contender.phase in gradients.FLOP_FACTORS:
        return _prepare_gradients(contender, case, q, k, v)
    over_cache = contender.phase == "prefill" and case.over_cache
    if over_cache and contender.provider == "fa4" and case.page_size is not None:
        raise NotRun("skipped", "timed without pages alone")
    if contender.phase == "decode" or (over_cache and contender.provider in (OURS, "fa3")):
        from cute_attn.bench import decode

        return decode.prepare(contender, case, q, k, v)
    if contender.provider == OURS:
        return _prepare_ours(contender, case, q, k, v)
    if contender.provider == "copy":
        return _prepare_copy(case, q)
    if contender.provider == "fa3":
        return _prepare_fa3(contender, case, q, k, v)
    if contender.provider == "fa4":
        return _prepare_fa4(case, q, k, v)
    if contender.provider == "cudnn":
        q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        run = cudnn_fp8_runner(q8, k8, v8, causal=case.causal, softmax_scale=1 / math.sqrt(case.head_dim))
        library = need("cudnn").backend_version_string()
        name = f"cuDNN {library} FP8 SDPA graph, e4m3 output (frontend {_version('nvidia-cudnn-frontend')})"
        return Prepared(run, name, "cudnn", cases.output_error, held_bytes=q8.numel())
    return _prepare_sdpa(contender.provider, case, q, k, v)


def _prepare_gradients(contender: Contender, case: cases.Case, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    """The forward of a contender, differentiated."""
    if contender.provider == OURS:
        from cute_attn import api, flash
        from cute_attn.flash_autograd import backward_config

        stand_in = "reference" if contender.backend == "emulator" else contender.backend
        options: dict[str, Any] = {"causal": case.causal, "backend": stand_in}
        plan = flash.flash_attn_explain(q, k, v, **options)
        kernel = "reference"
        if plan.config is not None:
            kernel = backward_config(plan.config, contender.deterministic, q.shape[1]).name
        ran = plan.backend
        function: Callable[..., Any] = flash.flash_attn_func
        if contender.dtype == "fp8":
            options |= {"recipe": contender.recipe or "default", "backend": contender.backend}
            function, whole = api.fp8_attention, api.explain(q, k, v, **options)
            kernel, ran = f"{_quantiser_name(whole)} + {whole.kernel} + {kernel}", whole.backend
        elif contender.phase == "train":
            kernel = f"{plan.kernel} + {kernel}"
    elif contender.provider in _SDPA:
        function, kernel, ran = _sdpa_function(contender.provider, case)
        options = {}
    else:
        module, name = _FLASH_LIBRARIES[contender.provider]
        function, kernel, ran = need(module).flash_attn_func, name(), "sm90"
        options = {"causal": case.causal}
    if contender.deterministic:
        options["deterministic"] = True
    launch = gradients.launcher(
        contender.phase, lambda q, k, v: first(function(q, k, v, **options)), case, q, k, v
    )
    return Prepared(launch, kernel, ran, partial(gradients.error, dtype=contender.dtype))


# --- this library


def _prepare_ours(contender: Contender, case: cases.Case, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    from cute_attn import api, flash

    options: dict[str, Any]
    if contender.dtype != "fp8":
        options = {"causal": case.causal, "window_size": case.window, "backend": contender.backend}
        if case.lengths:
            return _prepare_our_mix(case, q, k, v, options)
        kernel = flash.flash_attn_kernel(q, k, v, **options)
        return Prepared(
            lambda: flash.flash_attn_func(q, k, v, **options),
            kernel,
            contender.backend,
            cases.output_error,
        )
    recipe = contender.recipe or "default"
    options = {"backend": contender.backend}
    if contender.phase == "quantize":
        plan = api.explain(q, k, v, recipe=recipe, causal=case.causal, **options)
        ready = api.quantize(q, k, v, recipe, **options)
        read = 2 * (q.numel() + k.numel() + v.numel())
        return Prepared(
            lambda: api.quantize(q, k, v, recipe, **options),
            _quantiser_name(plan),
            plan.backend,
            _quantized_error,
            read + _stored_bytes(ready),
        )
    if contender.phase == "forward":
        qkv = api.quantize(q, k, v, recipe, **options)
        plan = api.explain(qkv, causal=case.causal, out_dtype=q.dtype, **options)
        kernel = plan.kernel

        def launch() -> Any:
            return api.fp8_attention_quantized(qkv, causal=case.causal, out_dtype=q.dtype, **options)
    else:
        plan = api.explain(q, k, v, recipe=recipe, causal=case.causal, **options)
        kernel = f"{_quantiser_name(plan)} + {plan.kernel}"

        def launch() -> Any:
            return api.fp8_attention(q, k, v, recipe=recipe, causal=case.causal, **options)

    return Prepared(launch, kernel, plan.backend, cases.output_error)


def _prepare_our_mix(case: cases.Case, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Prepared:
    import cute_attn

    if not hasattr(cute_attn, "flash_attn_varlen_func"):
        raise NotRun("unavailable", "cute_attn has no function for sequences of unlike length")
    mix = _mix(case, q)
    starts = (mix["cu_seqlens_q"], mix["cu_seqlens_k"])
    kernel = cute_attn.flash_attn_varlen_kernel(q, k, v, *starts, **options)
    return Prepared(
        lambda: cute_attn.flash_attn_varlen_func(q, k, v, **mix, **options),
        kernel,
        options["backend"],
        cases.output_error,
    )


def _mix(case: cases.Case, q: Tensor) -> dict[str, Any]:
    """The arguments that say where sequences begin, by the names that all libraries give them."""
    starts = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32).to(q.device)
    longest = max(case.lengths)
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _quantiser_name(plan: Plan) -> str:
    assert plan.quantize_config is not None, "a plan from 16-bit tensors quantises"
    return plan.quantize_config.name


def _stored_bytes(qkv: Any) -> int:
    """Bytes of the quantised tensors in memory; an expanded scale counts what it holds, not its shape."""

    def held(x: Tensor) -> int:
        kept = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
        return x.element_size() * math.prod(kept)

    tensors = (qkv.q, qkv.k, qkv.vt, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.q_dot_mean)
    return sum(held(x) for x in tensors if x is not None)


def _quantized_error(qkv: Any, reference: cases.SampledRows) -> cases.OutputError:
    """Error of exact attention on the quantised tensors: rotation and smoothing do not change it."""
    q, k, v = qkv.dequantize()
    values = cases.exact_rows(q, k, v, reference.heads, reference.rows, causal=reference.causal)
    return cases.compare(values, reference.values)


def _prepare_copy(case: cases.Case, like: Tensor) -> Prepared:
    """A copy of as many bytes as quantising moves at least: 2 read and 1 written for each element."""
    elements_q, elements_kv = case.elements
    moved = 3 * (elements_q + 2 * elements_kv)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=like.device)
    target = torch.empty_like(source)
    return Prepared(lambda: target.copy_(source), f"torch {torch.__version__} copy_", "cuda", None, moved)


# --- peers


@cache
def _import(module: str) -> Any | str:
    """The module, or why it cannot be imported; tried once, since a failing import can take seconds."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken extension raises anything, OSError and AttributeError included
        return f"cannot import {module}: " + " ".join(f"{type(error).__name__}: {error}".split())[:250]


def need(module: str) -> Any:
    """The module; raises NotRun where it cannot be imported."""
    found = _import(module)
    if isinstance(found, str):
        raise NotRun("unavailable", found)
    return found


@cache
def _version(*distributions: str, module: str | None = None) -> str:
    """Version of an installed distribution, found by the module it provides where its name varies."""
    found = package_version(*distributions)
    if found is None and module is not None:
        for name in importlib.metadata.packages_distributions().get(module, ()):
            found = f"{package_version(name)} from {name}"
    return found or "of unknown version"


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version()
    return (
        "of unknown version" if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    )


def first(result: Any) -> Tensor:
    """The output alone: releases differ in whether the log-sum-exp comes with it."""
    return result[0] if isinstance(result, (tuple, list)) else result


def fa3_name() -> str:
    """FlashAttention-3 with its version."""
    return f"FlashAttention-3 {_version('flash-attn-3', module='flash_attn_interface')}"


def _fa4_name() -> str:
    return f"FlashAttention-4 CuTe {_version('flash-attn-4')}"


# provider -> (module, what it is)
_FLASH_LIBRARIES: dict[str, tuple[str, Callable[[], str]]] = {
    "fa3": ("flash_attn_interface", fa3_name),
    "fa4": ("flash_attn.cute", _fa4_name),
}


def _prepare_fa3(contender: Contender, case: cases.Case, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    fa3 = need("flash_attn_interface")
    name = fa3_name()
    if contender.dtype == "fp8":
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        one = torch.ones(case.batch, case.heads_k, device=q.device)
        return Prepared(
            lambda: first(
                fa3.flash_attn_func(q, k, v, causal=case.causal, q_descale=one, k_descale=one, v_descale=one)
            ),
            f"{name}, e4m3",
            "sm90",
            cases.output_error,
        )
    options: dict[str, Any] = {"causal": case.causal}
    if case.window != cases.NO_WINDOW:
        options["window_size"] = case.window
    function = fa3.flash_attn_func
    if case.lengths:
        function = fa3.flash_attn_varlen_func
        options |= _mix(case, q)
    return Prepared(lambda: first(function(q, k, v, **options)), name, "sm90", cases.output_error)


def _prepare_fa4(case: cases.Case, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    fa4 = need("flash_attn.cute")
    name = _fa4_name()
    options: dict[str, Any] = {"causal": case.causal}
    if case.window != cases.NO_WINDOW:
        left, right = (None if end < 0 else end for end in case.window)
        options["window_size"] = (left, right)
    function = fa4.flash_attn_func
    if case.lengths:
        function = fa4.flash_attn_varlen_func
        options |= _mix(case, q)
    return Prepared(lambda: first(function(q, k, v, **options)), name, "sm90", cases.output_error)


# provider -> (torch's name, what it is, backend)
_SDPA = {
    "sdpa_flash": (SDPBackend.FLASH_ATTENTION, "flash (FlashAttention-2)", "sm80"),
    "sdpa_cudnn": (SDPBackend.CUDNN_ATTENTION, "cuDNN", "cudnn"),
    "sdpa_efficient": (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient", "sm80"),
    "sdpa_math": (SDPBackend.MATH, "math (unfused)", "cublas"),
}


def _prepare_sdpa(provider: str, case: cases.Case, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    function, name, ran = _sdpa_function(provider, case)
    return Prepared(lambda: function(q, k, v), name, ran, cases.output_error)


def _sdpa_function(
    provider: str, case: cases.Case
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str, str]:
    """torch's attention by this backend, of tensors (batch, seqlen, heads, head_dim); what it is, and its backend."""
    backend, what, ran = _SDPA[provider]
    if backend is SDPBackend.MATH and case.score_bytes > MATH_SCORE_LIMIT:
        raise NotRun(
            "skipped",
            f"S would take {case.score_bytes / 2**30:.1f} GiB in float32, above the bound of "
            f"{MATH_SCORE_LIMIT / 2**30:.0f} GiB",
        )
    if case.causal and case.seqlen_q != case.seqlen_k:
        raise NotRun("skipped", "torch aligns the causal mask to the top left, which is another problem")
    name = f"torch {torch.__version__} SDPA {what}"
    if backend is SDPBackend.CUDNN_ATTENTION:
        name += f" {_cudnn_version()}"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # torch wants (batch, heads, seqlen, head_dim); views, no copies
        qt, kt, vt = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(backend):  # this backend or an error, never another one in silence
            return F.scaled_dot_product_attention(
                qt, kt, vt, is_causal=case.causal, enable_gqa=case.heads_q != case.heads_k
            ).transpose(1, 2)

    return attend, name, ran


def cudnn_fp8_runner(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float
) -> Callable[[], Tensor]:
    """cuDNN's FP8 attention through the graph API of its Python front end, all scales 1.

    The output is e4m3 as well: this form of the graph is the one known to be accepted on Hopper. It writes
    half the bytes of a 16-bit output, which favours cuDNN by little.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) e4m3, contiguous; k, v: (batch, seqlen_k, heads_k, head_dim)
        likewise.

    Returns:
        A function that runs the graph and returns the output, (batch, seqlen_q, heads_q, head_dim) e4m3,
        always the same tensor.

    Raises:
        NotRun: the front end cannot be imported.
        Exception: cuDNN has no plan for this case.
    """
    cudnn = need("cudnn")
    kind = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kind.FP8_E4M3, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT
    )

    def geometry(x: Tensor) -> tuple[list[int], list[int]]:
        """Sizes and strides in cuDNN's order (batch, heads, seqlen, head_dim)."""
        batch, seqlen, heads, head_dim = x.shape
        return [batch, heads, seqlen, head_dim], [seqlen * heads * head_dim, head_dim, heads * head_dim, 1]

    def operand(name: str, x: Tensor) -> Any:
        dim, stride = geometry(x)
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=kind.FP8_E4M3)

    def scalar() -> Any:
        return graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind.FLOAT)

    gq, gk, gv = operand("Q", q), operand("K", k), operand("V", v)
    scales = {
        name: scalar() for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    }
    go, _, amax_s, amax_o = graph.sdpa_fp8(
        q=gq,
        k=gk,
        v=gv,
        **scales,
        is_inference=True,
        attn_scale=softmax_scale,
        use_causal_mask=causal,
        name="sdpa",
    )
    out = torch.empty_like(q)
    dim, stride = geometry(q)
    go.set_output(True).set_dim(dim).set_stride(stride)
    for amax in (amax_s, amax_o):
        amax.set_output(False).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    one = torch.ones(1, 1, 1, 1, device=q.device)
    pack = {gq: q, gk: k, gv: v, go: out, amax_s: torch.zeros_like(one), amax_o: torch.zeros_like(one)}
    pack |= dict.fromkeys(scales.values(), one)
    workspace = torch.empty(graph.get_workspace_size(), device=q.device, dtype=torch.uint8)

    def run() -> Tensor:
        graph.execute(pack, workspace)
        return out

    return run
