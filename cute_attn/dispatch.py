"""Which code serves an attention call of the integrations (SDPA, transformers), and a log of what ran.

What was asked for comes first: the 8-bit kernels of a recipe, or the 16-bit kernel; with gradients, too, which 8 bits
have by the 16-bit backward. What no 8-bit kernel takes goes to the 16-bit kernel, which is exact, and what no kernel
takes goes to torch. Every step down has its reason, the text of the refusal, and is counted in an `AttentionLog`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cute_attn import api, flash, validate
from cute_attn.problem import ARCHS, CAPABILITIES, device_capability, dotted
from cute_attn.quantize import PRESETS, Fp8Recipe, resolve_recipe
from cute_attn.remember import Remembered
from cute_attn.tracing import caller_level

__all__ = [
    "EXACT",
    "FALLBACKS",
    "TORCH",
    "AttentionLog",
    "Choice",
    "Ran",
    "attend",
    "check_options",
    "choose",
    "not_dense",
    "signature",
]

EXACT: Final = "bf16"  # the 16-bit kernel, in the dtype of the tensors
BACKENDS: Final = ("auto", "sm90", "sm80", "emulator")
TORCH: Final = "torch.nn.functional.scaled_dot_product_attention"
FALLBACKS: Final = ("torch", "error")

Precision = str | Fp8Recipe
_TENSOR_TYPES: Final = (Tensor, torch.nn.Parameter)


class Choice(NamedTuple):
    """What runs a call.

    Attributes:
        kernel: name of the kernel, or `TORCH`. With the stand-ins of backend "emulator": "emulator(NAME)", "reference".
        precision: of what runs: "bf16" (the 16-bit kernel), a recipe, or "torch".
        reason: why it is not what was asked for; None where it is.
    """

    kernel: str
    precision: Precision
    reason: str | None = None


class Ran(NamedTuple):
    """One line of an `AttentionLog`: what ran, and why not what was asked for, if it was not."""

    kernel: str
    reason: str | None


@dataclass
class AttentionLog:
    """Counts of what served attention calls.

    `print(log)` is the readable form. The first call with a new reason to leave the kernels for torch warns once.

    Attributes:
        calls: number of calls for each (kernel, reason).
    """

    calls: Counter[Ran] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Calls in all."""
        return sum(self.calls.values())

    @property
    def kernels(self) -> dict[str, int]:
        """Calls by what ran, the most frequent first."""
        found: Counter[str] = Counter()
        for ran, count in self.calls.items():
            found[ran.kernel] += count
        return dict(found.most_common())

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that something else served than was asked for, by reason."""
        found: Counter[str] = Counter()
        for ran, count in self.calls.items():
            if ran.reason is not None:
                found[ran.reason] += count
        return dict(found.most_common())

    def record(self, kernel: str, reason: str | None) -> None:
        """Count one call. Warns where torch ran it for a reason that this log has not seen."""
        ran = Ran(kernel, reason)
        if kernel == TORCH and ran not in self.calls:
            warnings.warn(
                f"cute_attn leaves an attention call to torch, because {reason}. The log counts such calls; "
                "fallback='error' refuses them.",
                UserWarning,
                stacklevel=caller_level(),
            )
        self.calls[ran] += 1

    def __str__(self) -> str:
        if not self.calls:
            return "no attention call"
        lines = [f"{self.total} attention calls"]
        for ran, count in self.calls.most_common():
            lines.append(
                f"{count:>8}  {ran.kernel}" + (f"\n          because {ran.reason}" if ran.reason else "")
            )
        return "\n".join(lines)


def check_options(precision: object, backend: object, fallback: object) -> Precision:
    """`precision` itself, or its recipe's name for "default".

    Raises:
        TypeError: precision is neither a str nor an `Fp8Recipe`.
        ValueError: unknown precision, backend or fallback.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback is {fallback!r}; allowed: {', '.join(map(repr, FALLBACKS))}")
    if isinstance(precision, Fp8Recipe):
        return precision
    if not isinstance(precision, str):
        raise TypeError(f"precision is a {type(precision).__name__}; allowed: a name (str) or an Fp8Recipe")
    if precision == EXACT:
        return EXACT
    if precision not in PRESETS:
        raise ValueError(f"precision is {precision!r}; allowed: {', '.join(map(repr, (EXACT, *PRESETS)))}")
    return resolve_recipe(precision).name


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    precision: Precision,
    backend: str = "auto",
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Choice:
    """What serves softmax(softmax_scale q k^T + mask) v: the first of `precision`, "bf16" and torch that can.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim) as in `flash_attn_func`; what is not allowed there goes to torch.
        precision: "bf16" or a recipe, of `check_options`.
        backend: "auto" (the kernels of the GPU at hand, else torch: on Hopper those of 8 and 16 bits, on compute
            capability 8 the 16-bit one), "sm90" (the same on a Hopper GPU, else an error), "sm80" (the 16-bit kernel of
            compute capability 8, which runs on Hopper, too, and an error elsewhere) or "emulator" (the kernels'
            stand-ins in torch: the emulator of the 8-bit kernels, and for the 16-bit one the definition in float32).
        causal, softmax_scale, window, softcap, sinks: as in `flash_attn_func` (window: `window_size`).

    Raises:
        ValueError: backend "sm90" or "sm80" and q is not on a GPU that it has kernels for.
    """
    described = signature(q, k, v, sinks)
    options = (precision, backend, causal, type(causal), softmax_scale, type(softmax_scale), window, softcap)
    if described is None:
        return _choose(q, k, v, precision, backend, causal, softmax_scale, window, softcap, sinks)
    try:
        found = _choices.get((described, options))
    except TypeError:  # unhashable: the checks name the argument
        return _choose(q, k, v, precision, backend, causal, softmax_scale, window, softcap, sinks)
    if found is None:
        found = _choose(q, k, v, precision, backend, causal, softmax_scale, window, softcap, sinks)
        _choices.keep((described, options), found)
    return found


_choices: Remembered[Choice] = Remembered()


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Precision,
    backend: str,
    causal: bool,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
) -> Choice:
    reason = not_dense(q=q, k=k, v=v)
    if reason is not None:
        return Choice(TORCH, "torch", reason)
    capability = device_capability(q.device)
    eight = backend != "sm80"  # whether there are 8-bit kernels
    if backend == "sm80":
        flash.target(backend, q)  # which refuses GPUs without them
    else:
        validate.check_backend(backend, capability)
    if backend == "auto" and (capability is None or capability[0] != 9):
        where = q.device if capability is None else f"a GPU of compute capability {dotted(capability)}"
        if capability not in ARCHS:
            need = f"the kernels need a GPU of compute capability {CAPABILITIES}"
            return Choice(TORCH, "torch", f"q is on {where}, and {need}")
        eight = False
    for candidate in dict.fromkeys((precision, EXACT)):
        if candidate != EXACT and not eight:
            reason = "the 8-bit kernels need a Hopper GPU (H100, H200) and backend 'auto' or 'sm90'"
            continue
        try:
            kernel = _kernel(q, k, v, candidate, backend, causal, softmax_scale, window, softcap, sinks)
        except (TypeError, ValueError, NotImplementedError) as error:
            reason = reason or str(error)
            continue
        return Choice(kernel, candidate, reason)
    return Choice(TORCH, "torch", reason)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Precision,
    backend: str,
    causal: bool,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None = None,
) -> str:
    """Name of what serves a call in this precision. Raises what the function of that precision raises."""
    if precision == EXACT:
        flash._check_options(0.0, causal, softcap, False, False, window)
        stand_in = "reference" if backend == "emulator" else backend
        kernel = flash.flash_attn_kernel(q, k, v, causal, window, softcap, alibi_slopes, sinks, stand_in)
    else:
        kernel = api.explain(
            q,
            k,
            v,
            recipe=precision,
            causal=causal,
            window_size=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            backend=backend,
        ).kernel
    validate.check_softmax_scale(softmax_scale, q.shape[3])
    return kernel


class Support(NamedTuple):
    """Answer of `is_supported`: true where a kernel serves the call; `reason` says why not, and what would be."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return f"supported: {self.reason}" if self.ok else f"not supported: {self.reason}"


def is_supported(
    precision: Precision = EXACT,
    *,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    heads_q: int = 1,
    heads_k: int = 1,
    seqlen_q: int = 1024,
    seqlen_k: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    attn_mask: bool = False,
    dropout_p: float = 0.0,
    requires_grad: bool = False,
    capability: tuple[int, int] | None = None,
) -> Support:
    """Whether a kernel serves such a call, and why not. No tensors are needed, and nothing is compiled.

    Args:
        precision: "bf16" (the 16-bit kernel, in `dtype`), the name of a recipe, or an `Fp8Recipe`.
        head_dim, head_dim_v, heads_q, heads_k, seqlen_q, seqlen_k: shapes as in `flash_attn_func`; head_dim_v is
            head_dim unless given.
        dtype: of q, k and v.
        causal, window_size, softcap: as in `flash_attn_func`; alibi, sinks: whether there are any.
        attn_mask: whether a mask tensor goes with the call.
        dropout_p: probability of dropout.
        requires_grad: whether a gradient is wanted.
        capability: compute capability of the GPU; default that of torch's current one.

    Returns:
        a `Support`, true or false, with `reason`: the text of the refusal, or what would run.

    Raises:
        TypeError, ValueError: an unknown precision.
    """
    precision = check_options(precision, "auto", "error")
    if capability is None:
        there = torch.cuda.is_available() and torch.version.cuda is not None
        capability = torch.cuda.get_device_capability() if there else None
    hopper = capability is not None and capability[0] == 9
    if not hopper and (capability not in ARCHS or precision != EXACT):
        where = "there is no NVIDIA GPU" if capability is None else f"the GPU is of {dotted(capability)}"
        allowed = CAPABILITIES if precision == EXACT else "9.x (Hopper: H100, H200)"
        return Support(False, f"{where}; allowed: compute capability {allowed}")
    if attn_mask:
        return Support(False, "a mask tensor is given; allowed: causal, window_size")
    if dropout_p:
        return Support(False, f"dropout_p is {dropout_p}, and no kernel has dropout; allowed: 0.0")

    def row(seqlen: int, heads: int, size: int) -> Tensor:
        """Of that shape, in the memory of one row."""
        return torch.zeros(max(size, 1), dtype=dtype).as_strided((1, seqlen, heads, size), (0, 0, 0, 1))

    q = row(seqlen_q, heads_q, head_dim).requires_grad_(requires_grad)
    k = row(seqlen_k, heads_k, head_dim)
    v = row(seqlen_k, heads_k, head_dim if head_dim_v is None else head_dim_v)
    slopes, sink = (torch.zeros(heads_q) if given else None for given in (alibi, sinks))
    options = (precision, "emulator", causal, None, window_size, softcap, sink, slopes)
    try:
        with torch.enable_grad():
            _kernel(q, k, v, *options)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Support(False, str(error))
    if precision == EXACT:
        return Support(True, "the 16-bit kernel" if hopper else "the 16-bit kernel by mma.sync")
    return Support(True, f"the 8-bit kernels, recipe {resolve_recipe(precision).name!r}")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Choice,
    *,
    backend: str = "auto",
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run what `choose` found for these arguments, which is not torch.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v).
    """
    assert chosen.kernel != TORCH
    out: Any
    if chosen.precision == EXACT:
        out = flash.flash_attn_func(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            sinks=sinks,
            backend="reference" if backend == "emulator" else backend,
        )
    else:
        out = api.fp8_attention(
            q,
            k,
            v,
            recipe=chosen.precision,
            causal=causal,
            softmax_scale=softmax_scale,
            window_size=window,
            softcap=softcap,
            sinks=sinks,
            backend=backend,
        )
    assert isinstance(out, Tensor)
    return out


def signature(*tensors: Tensor | None) -> tuple[object, ...] | None:
    """All that a choice depends on, as a key; None for a tensor that has no such description."""
    try:
        grad = torch.is_grad_enabled()
        return tuple(
            None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad)
            for x in tensors
        )
    except (AttributeError, RuntimeError, TypeError):
        return None


def not_dense(**tensors: object) -> str | None:
    """Why one of these is nothing that a kernel could read, such as a traced or nested tensor; else None."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or type(x) not in _TENSOR_TYPES:
            return f"{name} is a {type(x).__name__}, and kernels take a torch.Tensor alone"
        if x.is_nested or x.layout != torch.strided:
            return f"{name} is a {'nested' if x.is_nested else x.layout} tensor, and kernels take dense ones"
    return None
