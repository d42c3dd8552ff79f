"""torch's `scaled_dot_product_attention`, served by this library's kernels.

Three ways in: `sdpa`, a function of torch's signature; `sdpa_region`, within which every call of torch's function
comes here; and `register_flash_attention_impl`, which makes the 16-bit kernel one of the flash implementations that
torch lets a program choose from. What no kernel takes (masks, dropout, float32, ...) is left to torch, with the reason
counted in a log and a warning the first time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn import dispatch
from cute_attn.dispatch import EXACT, TORCH, AttentionLog, Choice
from cute_attn.quantize import Fp8Recipe
from cute_attn.tracing import untraced

__all__ = ["SdpaPlan", "explain_sdpa", "register_flash_attention_impl", "sdpa", "sdpa_log", "sdpa_region"]

_TORCH_SDPA: Final = F.scaled_dot_product_attention

sdpa_log: Final = AttentionLog()
"""What served the calls of `sdpa` that named no log of their own."""


@untraced
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str | Fp8Recipe = EXACT,
    backend: str = "auto",
    fallback: str = "torch",
    log: AttentionLog | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by its signature, layout and conventions.

    The tensors are views in the kernels' layout, and are not copied for it. Gradients are those of `flash_attn_func`,
    or with an 8-bit precision those of `fp8_attention`: the 16-bit backward, with the result of the 8-bit forward. In
    code that torch.compile traces it ends a graph, and runs as anywhere else.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim), any strides with a last one of 1.
        key: (batch, heads_k, seqlen_k, head_dim); value: (batch, heads_k, seqlen_k, head_dim_v).
        attn_mask: bool (True: visible) or float (added to scores), as in torch. No kernel takes one: torch runs it.
        dropout_p: probability of dropout; torch runs a call with dropout.
        is_causal: hide key j from query i unless j <= i, counted from the first key, as torch does: where there are
            more keys than queries the rest is never seen. `flash_attn_func` counts from the last key instead.
        scale: factor of q k^T; default 1/sqrt(head_dim).
        enable_gqa: allow heads_q to be a multiple of heads_k.
        precision: "bf16" (the 16-bit kernel, exact, in the dtype of the tensors), or the name of a recipe ("accurate",
            "fp8", ...) or an `Fp8Recipe` for the 8-bit kernels.
        backend: "auto" (kernels of the GPU at hand, else torch), "sm90" (an error without a Hopper GPU), "sm80" (the
            16-bit kernel of compute capability 8, which runs on Hopper, too; an error elsewhere) or "emulator" (the
            kernels' stand-ins in torch, on any device).
        fallback: "torch", or "error" to refuse what no kernel takes.
        log: counts what ran; default `sdpa_log`.

    Returns:
        (batch, heads_q, seqlen_q, head_dim_v) of query's dtype; a view of a tensor (batch, seqlen_q, heads_q,
        head_dim_v) where a kernel ran.

    Raises:
        TypeError: precision of a wrong type.
        ValueError: both attn_mask and is_causal, an unknown precision, backend or fallback, or "sm90" or "sm80" without
            a GPU for it.
        NotImplementedError: fallback is "error" and no kernel takes the call; the text is the reason.
        RuntimeError, TypeError: of torch, for what torch does not take either.
    """
    dispatch.check_options(precision, backend, fallback)
    plan = explain_sdpa(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        precision=precision,
        backend=backend,
    )
    if plan.kernel == TORCH and fallback == "error":
        raise NotImplementedError(f"no kernel takes this call: {plan.reason}")
    (sdpa_log if log is None else log).record(plan.kernel, plan.reason)
    if plan.kernel == TORCH:
        return _TORCH_SDPA(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    chosen = Choice(plan.kernel, plan.precision)
    outs = []
    for part in plan.parts:
        seen = slice(0, part.keys)
        rows = q[:, part.first_row : part.end_row]
        outs.append(
            dispatch.attend(
                rows, k[:, seen], v[:, seen], chosen, backend=backend, causal=part.causal, softmax_scale=scale
            )
        )
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)).transpose(1, 2)


@dataclass(frozen=True)
class _Part:
    """A call of a kernel for some rows of queries, with its mask aligned bottom-right over its own keys."""

    first_row: int
    end_row: int
    keys: int  # the first so many
    causal: bool


@dataclass(frozen=True)
class SdpaPlan:
    """What one call of `sdpa` does. `str(plan)` is the readable form.

    Attributes:
        kernel: name of the kernel, or of torch's function.
        precision: of what runs: "bf16", a recipe, or "torch".
        reason: why it is not what was asked for; None where it is.
        parts: calls of the kernel; more than one only for a causal mask over fewer keys than queries.
    """

    kernel: str
    precision: str | Fp8Recipe
    reason: str | None
    parts: tuple[_Part, ...]

    def __str__(self) -> str:
        name = self.precision.name if isinstance(self.precision, Fp8Recipe) else self.precision
        lines = [f"kernel     {self.kernel}", f"precision  {name}"]
        for part in self.parts:
            mask = "causal" if part.causal else "full"
            lines.append(f"call       queries {part.first_row} to {part.end_row}, {part.keys} keys, {mask}")
        return "\n".join(lines + ([] if self.reason is None else [f"because    {self.reason}"]))


def explain_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str | Fp8Recipe = EXACT,
    backend: str = "auto",
) -> SdpaPlan:
    """What `sdpa` does with these arguments, without doing it. Shapes are those of `sdpa`.

    Raises:
        TypeError, ValueError: as `sdpa`.
    """
    precision = dispatch.check_options(precision, backend, "torch")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask is given and is_causal is True; allowed: one of them")
    reason = dispatch.not_dense(query=query, key=key, value=value)
    if reason is not None:
        pass
    elif attn_mask is not None:
        reason = f"attn_mask is given ({attn_mask.dtype}), and no kernel takes a mask tensor"
    elif dropout_p != 0.0:
        reason = f"dropout_p is {dropout_p}, and no kernel has dropout"
    elif query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        ranks = f"{query.dim()}, {key.dim()} and {value.dim()}"
        reason = f"query, key and value have {ranks} dimensions, and kernels take 4"
    elif not enable_gqa and key.shape[1] != query.shape[1]:
        reason = f"key has {key.shape[1]} heads and query {query.shape[1]}, and enable_gqa is False"
    if reason is not None:
        return SdpaPlan(TORCH, "torch", reason, ())
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    parts = _causal_parts(q.shape[1], k.shape[1]) if is_causal else (_Part(0, q.shape[1], k.shape[1], False),)
    chosen = [
        dispatch.choose(
            q[:, part.first_row : part.end_row],
            k[:, : part.keys],
            v[:, : part.keys],
            precision=precision,
            backend=backend,
            causal=part.causal,
            softmax_scale=scale,
        )
        for part in parts
    ]
    if any(choice.kernel == TORCH for choice in chosen):
        return SdpaPlan(TORCH, "torch", chosen[0].reason, ())
    kernel = " + ".join(dict.fromkeys(choice.kernel for choice in chosen))
    return SdpaPlan(kernel, chosen[0].precision, chosen[0].reason, parts)


def _causal_parts(seqlen_q: int, seqlen_k: int) -> tuple[_Part, ...]:
    """torch's causal mask, aligned top-left, by calls whose masks are aligned bottom-right.

    Keys past the last query are never seen. Queries past the last key see every key.
    """
    square = _Part(0, min(seqlen_q, seqlen_k), min(seqlen_q, seqlen_k), True)
    if seqlen_q <= seqlen_k:
        return (square,)
    below = _Part(seqlen_k, seqlen_q, seqlen_k, False)
    return (below,) if seqlen_k == 0 else (square, below)


# ------------------------------------------------------------------------------------------------------------
# A region
# ------------------------------------------------------------------------------------------------------------


class _Regions(threading.local):
    """The regions that a thread is in, the innermost last: `sdpa` with their options."""

    def __init__(self) -> None:
        self.stack: list[Callable[..., Tensor]] = []


_regions = _Regions()
_lock = threading.Lock()
_open_regions = 0  # of all threads: torch's function is replaced while there is one


def _routed(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in for torch's function while a region is open; other threads, and tracing, get torch's."""
    if not _regions.stack or torch.compiler.is_compiling():
        return _TORCH_SDPA(*args, **kwargs)
    return _regions.stack[-1](*args, **kwargs)


@contextmanager
def sdpa_region(
    *, precision: str | Fp8Recipe = EXACT, backend: str = "auto", fallback: str = "torch"
) -> Iterator[AttentionLog]:
    """Within it, calls of `torch.nn.functional.scaled_dot_product_attention` in this thread run `sdpa`.

        with cute_attn.sdpa_region(precision="accurate") as log:
            model(x)
        print(log)

    torch's function is replaced in its module, so a model that has imported it by name before keeps torch's own. So
    does code that `torch.compile` traces.

    Args:
        precision, backend, fallback: as in `sdpa`.

    Yields:
        the log of what ran.

    Raises:
        TypeError, ValueError: as `sdpa`, on entry; inside, what `sdpa` raises.
    """
    dispatch.check_options(precision, backend, fallback)
    log = AttentionLog()
    _regions.stack.append(
        functools.partial(sdpa, precision=precision, backend=backend, fallback=fallback, log=log)
    )
    _count_regions(1)
    try:
        yield log
    finally:
        _count_regions(-1)
        _regions.stack.pop()


def _count_regions(change: int) -> None:
    global _open_regions
    with _lock:
        _open_regions += change
        F.scaled_dot_product_attention = _routed if _open_regions else _TORCH_SDPA


# ------------------------------------------------------------------------------------------------------------
# torch's registry of flash implementations
# ------------------------------------------------------------------------------------------------------------

IMPL_NAME: Final = "cute_attn"


def register_flash_attention_impl() -> None:
    """Make the 16-bit forward known to torch as the flash implementation "cute_attn"; nothing is activated.

        cute_attn.register_flash_attention_impl()
        torch.nn.attention.activate_flash_attention_impl("cute_attn")

    From then on torch's own choice of a backend for SDPA leads here wherever it picks flash attention on a CUDA
    device, for every thread, also for training: the backward is that of torch, from our out and log-sum-exp. What the
    kernels do not take (dropout, other GPUs) runs torch's kernel. `restore_flash_attention_impl` undoes it.

    Raises:
        NotImplementedError: this torch has no such registry.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl as register
    except ImportError:
        raise NotImplementedError(
            f"torch {torch.__version__} has no registry of flash implementations; allowed: torch with "
            "torch.nn.attention.register_flash_attention_impl, or cute_attn.sdpa_region"
        ) from None
    register(IMPL_NAME, register_fn=_activate)


class _Handle:
    """Keeps the override alive; torch calls `remove` to end it."""

    def __init__(self, library: torch.library.Library | None) -> None:
        self.library = library

    def remove(self) -> None:
        self.library = None


def _activate() -> _Handle:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("_scaled_dot_product_flash_attention", _flash_sdpa, "CUDA")
    return _Handle(library)


def _flash_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: (batch, heads, seqlen, head_dim) in, nine results out.

    torch picks flash attention for a causal mask over as many keys as queries alone, so that both alignments are one.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    options: dict[str, Any] = {"backend": backend, "causal": is_causal, "softmax_scale": scale}
    with torch.no_grad():  # below autograd: the gradient is that of the operator
        chosen = dispatch.choose(q, k, v, precision=EXACT, **options)
        if dropout_p != 0.0 or return_debug_mask or chosen.kernel == TORCH:
            out, lse, seed, offset, debug = torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, seqlen_q, seqlen_k, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        else:
            from cute_attn.flash import flash_attn_func

            out, lse = flash_attn_func(
                q,
                k,
                v,
                softmax_scale=scale,
                causal=is_causal,
                return_lse=True,
                backend="reference" if backend == "emulator" else backend,
            )
            # State of a dropout that there is none of, as torch's backward wants its shape and dtype.
            seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
            offset = torch.zeros((), dtype=torch.uint64, device=query.device)
            debug = torch.empty(0, dtype=query.dtype, device=query.device)
    return out.transpose(1, 2), lse, None, None, seqlen_q, seqlen_k, seed, offset, debug
