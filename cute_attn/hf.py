"""Attention implementations for transformers: no change of a model, only a name.

    from cute_attn import hf
    log = hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="cute_attn_accurate")

"cute_attn" is the 16-bit kernel, exact; "cute_attn_accurate" and "cute_attn_fp8" are the 8-bit kernels with the recipe
of that name; "cute_attn_policy" takes the precision of each layer from a `LayerPolicy`. What serves each call is in the
log.

transformers asks a mask function once for each forward pass, and the attention function in each layer. Ours turns a
padding mask, a sliding window and a cache's unused tail into a few numbers for each sequence: its first key, the end
of its keys, and where the queries stand. The attention function then passes the visible part of each sequence to a
kernel: those of all sequences at once, or one after another where a gradient is wanted in 8 bits. Few queries behind a
cache, as in a decoding step, go to the decoding kernel, in 16 bits: it reads the cache where it is. A mask that is more
than that (packed sequences, image tokens that see each other, padding in the middle) becomes a tensor, and torch
attends.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cute_attn import dispatch, flash
from cute_attn.decode import decode_kernel, flash_attn_with_kvcache
from cute_attn.dispatch import EXACT, TORCH, AttentionLog, Choice
from cute_attn.flash_varlen import flash_attn_varlen_func, flash_attn_varlen_kernel
from cute_attn.fp8_varlen import fp8_attention_varlen, fp8_attention_varlen_kernel, takes_recipe
from cute_attn.policy import LayerPolicy
from cute_attn.quantize import resolve_recipe
from cute_attn.remember import Remembered
from cute_attn.tracing import untraced

__all__ = ["IMPLEMENTATIONS", "register"]

IMPLEMENTATIONS: Final = {"cute_attn": EXACT, "cute_attn_fp8": "fp8", "cute_attn_accurate": "accurate"}
"""Precision by name of the implementation; beside them there is "cute_attn_policy"."""

POLICY_NAME: Final = "cute_attn_policy"
_DECODE_ROWS: Final = 64  # of queries that share a key head: fewer are the decoding kernel's
_FEW_QUERIES: Final = "few queries meet a cache, and quantising all its keys would cost more than it saves"


def register(
    *,
    policy: LayerPolicy | str | os.PathLike[str] | None = None,
    backend: str = "auto",
    fallback: str = "torch",
) -> AttentionLog:
    """Make this library's attention known to transformers, as the implementations of `IMPLEMENTATIONS`.

    May be called again, with other options; models that exist use the new ones.

    Args:
        policy: a `LayerPolicy` or the path of its file; with it there is "cute_attn_policy", too.
        backend: "auto" (kernels of the GPU at hand, else torch), "sm90" (an error without a Hopper GPU), "sm80" (the
            16-bit kernel of compute capability 8; an error elsewhere) or "emulator" (the kernels' stand-ins in torch,
            on any device).
        fallback: "torch", or "error" to refuse what no kernel takes.

    Returns:
        the log of what serves attention calls from now on.

    Raises:
        ImportError: transformers is not installed or has no such interfaces.
        ValueError: an unknown backend or fallback, or a file that holds no policy.
    """
    dispatch.check_options(EXACT, backend, fallback)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"cute_attn.hf needs transformers with AttentionMaskInterface ({error}): pip install 'cute-attn[models]'"
        ) from error
    log = AttentionLog()
    policies = {name: LayerPolicy(precision) for name, precision in IMPLEMENTATIONS.items()}
    if policy is not None:
        policies[POLICY_NAME] = policy if isinstance(policy, LayerPolicy) else LayerPolicy.load(policy)
    for name, each in policies.items():
        function = functools.partial(
            _attention_forward, policy=each, backend=backend, fallback=fallback, log=log
        )
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask_function)
    return log


# ------------------------------------------------------------------------------------------------------------
# Masks
# ------------------------------------------------------------------------------------------------------------


class Pattern(NamedTuple):
    """What each query of a batch sees, where that is one range of keys a sequence, a window and the causal order.

    Query i stands at `start` + i among the keys. It sees key j of sequence b if spans[b][0] <= j < spans[b][1], and
    where `causal` only j <= start + i, and where window >= 0 only keys at most so far from its own position.
    """

    spans: tuple[tuple[int, int], ...]  # (first key, end of keys) of each sequence
    start: int
    window: int  # keys before its own position, and behind it where not causal, that a query sees; -1: all
    causal: bool

    def tensor(self, device: torch.device | str) -> Tensor:
        """(batch, 1, 1, 5) int64, as transformers passes masks of four dimensions on as they are."""
        rows = [[first, end, self.start, self.window, int(self.causal)] for first, end in self.spans]
        encoded = torch.tensor(rows, dtype=torch.int64).to(device).view(len(rows), 1, 1, 5)
        encoded.cute_attn_pattern = self  # type: ignore[attr-defined]  # saves reading it back from the device
        return encoded

    @classmethod
    def of(cls, mask: Tensor) -> Pattern:
        """The pattern that `tensor` has encoded, also from a copy of the tensor."""
        found = getattr(mask, "cute_attn_pattern", None)
        if isinstance(found, cls):
            return found
        rows = mask.view(-1, 5).tolist()
        _, _, start, window, causal = rows[0]
        return cls(tuple((first, end) for first, end, *_ in rows), start, window, bool(causal))

    def mask(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
        """(batch, 1, seqlen_q, seqlen_k) bool, True: visible."""
        position = self.start + torch.arange(seqlen_q, device=device).view(1, 1, -1, 1)
        keys = torch.arange(seqlen_k, device=device).view(1, 1, 1, -1)
        first, end = torch.tensor(self.spans, device=device).view(-1, 2, 1, 1, 1).unbind(1)
        visible = (keys >= first) & (keys < end)
        if self.causal:
            visible = visible & (keys <= position)
        if self.window >= 0:
            visible = visible & ((keys - position).abs() <= self.window)
        return visible.expand(len(self.spans), 1, seqlen_q, seqlen_k)

    def for_torch(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[Tensor | None, bool]:
        """(attn_mask, is_causal) of torch's SDPA: without a mask tensor where it needs none."""
        if set(self.spans) == {(0, seqlen_k)} and not 0 <= self.window < seqlen_k - 1:
            if not self.causal or (seqlen_q == 1 and self.start == seqlen_k - 1):
                return None, False
            if seqlen_q == seqlen_k and self.start == 0:
                return None, True
        return self.mask(seqlen_q, seqlen_k, device), False


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """The mask of a forward pass, by the interface of `transformers.AttentionMaskInterface`.

    Args:
        batch_size, q_length, kv_length: sizes of the call.
        q_offset, kv_offset: positions of the first query and key in the sequence.
        mask_function: of transformers, what is visible without padding.
        attention_mask: (batch, positions) bool, False: padding.
        local_size: of a sliding window or chunk.
        config: of the model.

    Returns:
        None where all is as `flash_attn_func` has it (causal, aligned bottom-right, or full), a `Pattern` as a tensor,
        or a bool tensor (batch, 1, q_length, kv_length).
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    kind = None
    if mask_function is None or mask_function is causal_mask_function:
        kind = "causal"
    elif mask_function is bidirectional_mask_function:
        kind = "full"
    elif allow_is_causal_skip and local_size is not None and _slides(config, local_size):
        kind = "window"
    pattern = None
    if kind is not None:
        start = int(q_offset) - kv_offset
        pattern = _pattern(
            kind, batch_size, q_length, kv_length, start, kv_offset, attention_mask, local_size
        )
    if pattern is None:
        mask: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=int(q_offset),
            kv_offset=kv_offset,
            mask_function=causal_mask_function if mask_function is None else mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            device=device,
            **{**more, "allow_is_bidirectional_skip": False},
        )
        return mask
    plain = all(span == (0, kv_length) for span in pattern.spans)
    cut = 0 <= pattern.window < kv_length - 1
    if plain and not cut and (not pattern.causal or pattern.start + q_length == kv_length):
        return None
    return pattern.tensor(device)


def _slides(config: Any, local_size: int) -> bool:
    """Whether a local size is that of a sliding window and not of a chunk."""
    window = getattr(config, "sliding_window", None)
    return window == local_size and getattr(config, "attention_chunk_size", None) is None


def _pattern(
    kind: str,
    batch: int,
    q_length: int,
    kv_length: int,
    start: int,
    kv_offset: int,
    attention_mask: Tensor | None,
    local_size: int | None,
) -> Pattern | None:
    """The pattern of a mask; None where a sequence has padding between its keys."""
    causal = kind != "full"
    end = min(kv_length, start + q_length) if causal else kv_length
    window = local_size - 1 if kind == "window" and local_size is not None else -1
    if attention_mask is None:
        return Pattern(((0, end),) * batch, start, window, causal)
    visible = attention_mask[:, kv_offset : kv_offset + end].bool()
    count = visible.sum(1)
    first = visible.int().argmax(1)
    last = visible.shape[1] - 1 - visible.flip(1).int().argmax(1) if visible.shape[1] else first
    spans = []
    for one, other, keys in torch.stack([first, last, count], 1).tolist():  # the one wait for the device
        if keys and other - one + 1 != keys:
            return None
        spans.append((one, other + 1) if keys else (0, 0))
    return Pattern(tuple(spans), start, window, causal)


# ------------------------------------------------------------------------------------------------------------
# Attention
# ------------------------------------------------------------------------------------------------------------


@untraced
def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    policy: LayerPolicy,
    backend: str,
    fallback: str,
    log: AttentionLog,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention by the interface of `transformers.AttentionInterface`.

    query is (batch, heads_q, seqlen_q, head_dim), key and value are (batch, heads_k, seqlen_k, head_dim); out is
    (batch, seqlen_q, heads_q, head_dim_v). Under a causal mask rows of padding are 0 where a kernel runs.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    asked = policy.precision(getattr(module, "layer_idx", None))
    pattern = None
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window = -1 if sliding_window is None else sliding_window - 1
        pattern = Pattern(((0, seqlen_k),) * query.shape[0], seqlen_k - seqlen_q, window, causal)
    elif attention_mask.dtype == torch.int64 and attention_mask.shape[1:] == (1, 1, 5):
        pattern = Pattern.of(attention_mask)
    few = seqlen_q < seqlen_k and seqlen_q * query.shape[1] // key.shape[1] < _DECODE_ROWS
    precision, reason = (EXACT, _FEW_QUERIES) if few and asked != EXACT else (asked, None)
    why_torch = _needs_torch(attention_mask, pattern, dropout, position_bias)
    if why_torch is None:
        assert pattern is not None
        call = _Call(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            precision,
            backend,
            scaling,
            softcap or 0.0,
            None if s_aux is None else s_aux.float(),
        )
        parts = _parts(pattern, seqlen_q)
        chosen = [call.choose(part, pattern) for part in parts[:1]]  # of a precision, all of them or none
        if chosen and chosen[0].kernel != TORCH:
            gradient, used = call.wants_gradient(), chosen[0].precision
            found = call.run_cached(pattern) if few and not gradient else None
            if found is None and len(parts) > 1 and _packs(used) and (used == EXACT or not gradient):
                found = call.run_packed(parts, pattern, used)
            if found is not None:
                kernel, out = found
                log.record(kernel, chosen[0].reason or reason)
                return out, None
        chosen += [call.choose(part, pattern) for part in parts[1:]]
        why_torch = next((each.reason for each in chosen if each.kernel == TORCH), None)
        if why_torch is None:
            for each in chosen:
                log.record(each.kernel, each.reason or reason)
            return call.run(parts, chosen, pattern), None
    if fallback == "error":
        raise NotImplementedError(f"no kernel takes this call: {why_torch}")
    for name, given in (("softcap", softcap), ("sinks", s_aux)):
        if given is not None:
            raise NotImplementedError(
                f"{name} are given and torch, which has none, would attend, because {why_torch}; allowed: "
                "attn_implementation='eager'"
            )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    log.record(TORCH, why_torch)
    if pattern is not None:
        attention_mask, is_causal = pattern.for_torch(seqlen_q, seqlen_k, query.device)
    out = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        position_bias=position_bias,
        **more,
    )[0]
    return out, None


def _needs_torch(
    attention_mask: Tensor | None, pattern: Pattern | None, dropout: float, position_bias: Tensor | None
) -> str | None:
    """Why no kernel can serve a call, whatever its tensors are; None where one may."""
    if pattern is None:
        assert attention_mask is not None
        return f"the mask is a tensor ({attention_mask.dtype}), and no kernel takes one"
    if dropout:
        return f"dropout is {dropout}, and no kernel has dropout"
    return None if position_bias is None else "position_bias is given, and no kernel takes a bias tensor"


class _Part(NamedTuple):
    """Some sequences, their rows of queries, and their keys; the last row and the last key belong together."""

    batch: slice
    rows: slice
    keys: slice


def _parts(pattern: Pattern, seqlen_q: int) -> list[_Part]:
    """What attends to what: one part where all sequences are alike, else one a sequence that sees anything."""
    same = len(set(pattern.spans)) == 1
    parts = []
    for number, (first, end) in enumerate(pattern.spans[:1] if same else pattern.spans):
        rows = slice(0, seqlen_q)
        if pattern.causal or pattern.window >= 0:  # the mask is aligned at the last row and key
            rows = slice(max(0, first - pattern.start), max(0, min(seqlen_q, end - pattern.start)))
        if rows.start < rows.stop and first < end:
            keys = slice(first, pattern.start + rows.stop if pattern.causal else end)
            parts.append(_Part(slice(None) if same else slice(number, number + 1), rows, keys))
    return parts


def _packs(precision: dispatch.Precision) -> bool:
    """Whether sequences of unlike length can be attended in one call."""
    return precision == EXACT or takes_recipe(resolve_recipe(precision))


_cached_kernels: Remembered[str | None] = (
    Remembered()
)  # what runs few queries behind a cache, if something does


class _Call(NamedTuple):
    """A call of the attention function, in the layout of the kernels, (batch, seqlen, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    precision: str
    backend: str
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None

    def _arguments(
        self, part: _Part, pattern: Pattern
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        tensors = (
            self.q[part.batch, part.rows],
            self.k[part.batch, part.keys],
            self.v[part.batch, part.keys],
        )
        return tensors, self._options(pattern)

    def _options(self, pattern: Pattern) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "causal": pattern.causal,
            "softmax_scale": self.softmax_scale,
            "window": (pattern.window, -1 if pattern.causal else pattern.window),
            "softcap": self.softcap,
            "sinks": self.sinks,
        }

    def _options_of_one(self, pattern: Pattern) -> dict[str, Any]:
        """Of the functions in 16 bits that take all sequences in one call, but for the scale."""
        options = self._options(pattern)
        del options["softmax_scale"]
        options["window_size"] = options.pop("window")
        options["backend"] = "reference" if self.backend == "emulator" else self.backend
        return options

    def choose(self, part: _Part, pattern: Pattern) -> Choice:
        """What serves a part."""
        tensors, options = self._arguments(part, pattern)
        return dispatch.choose(*tensors, precision=self.precision, **options)

    def wants_gradient(self) -> bool:
        return flash._wants_gradient(self.q, self.k, self.v, self.sinks)

    def run_cached(self, pattern: Pattern) -> tuple[str, Tensor] | None:
        """Attend few queries at the end of a cache in the decoding kernel, without a gradient.

        Returns:
            the kernel's name, and (batch, seqlen_q, heads_q, head_dim_v); None where that kernel cannot: another mask,
            or a cache whose address or strides are no multiples of 16 bytes.
        """
        length = pattern.start + self.q.shape[1]
        if not pattern.causal or any(first < end and end != length for first, end in pattern.spans):
            return None
        if self.k.data_ptr() % 16 or self.v.data_ptr() % 16:
            return None
        firsts = tuple(first if first < end else length for first, end in pattern.spans)
        options = self._options_of_one(pattern)
        options["cache_seqlens"] = length
        options["cache_leftpad"] = _lengths(firsts, self.q.device) if any(firsts) else None
        signature = dispatch.signature(self.q, self.k, self.v, self.sinks)
        asked = (signature, length, any(firsts), pattern.window, self.softcap, self.backend)
        if asked not in _cached_kernels:
            try:
                kernel = decode_kernel(self.q, self.k, self.v, **options)
            except (TypeError, ValueError, NotImplementedError):
                kernel = None
            _cached_kernels.keep(asked, kernel)
        kernel = _cached_kernels[asked]
        if kernel is None:
            return None
        out = flash_attn_with_kvcache(self.q, self.k, self.v, softmax_scale=self.softmax_scale, **options)
        assert isinstance(out, Tensor)
        return kernel, out

    def run_packed(
        self, parts: list[_Part], pattern: Pattern, precision: dispatch.Precision
    ) -> tuple[str, Tensor]:
        """Attend all parts, one a sequence, in one call of a kernel; in 8 bits without a gradient.

        Rows of a sequence begin at its first: those of padding before the first key see no key of a causal mask.

        Returns:
            the kernel's name, and (batch, seqlen_q, heads_q, head_dim_v).
        """
        options = self._options_of_one(pattern)
        name: Callable[..., str] = flash_attn_varlen_kernel
        function: Callable[..., Tensor | tuple[Tensor, Tensor]] = flash_attn_varlen_func
        if precision != EXACT:
            options |= {"recipe": precision, "backend": self.backend}
            name, function = fp8_attention_varlen_kernel, fp8_attention_varlen
        keys = [part.keys for part in parts]
        k, v = (torch.cat([x[p.batch, p.keys].squeeze(0) for p in parts]) for x in (self.k, self.v))
        q = torch.cat([self.q[p.batch, : p.rows.stop].squeeze(0) for p in parts])
        rows = [part.rows.stop for part in parts]
        longest = max(each.stop - each.start for each in keys)
        ends = (
            _running_sum(tuple(rows), q.device),
            _running_sum(tuple(each.stop - each.start for each in keys), q.device),
        )
        kernel = name(q, k, v, *ends, **options)
        result = function(q, k, v, *ends, max(rows), longest, softmax_scale=self.softmax_scale, **options)
        assert isinstance(result, Tensor)
        batch, seqlen_q = self.q.shape[:2]
        if rows == [seqlen_q] * batch:
            return kernel, result.unflatten(0, (batch, seqlen_q))
        padding = result.new_zeros((seqlen_q, *result.shape[1:]))
        found = {part.batch.start: rest for part, rest in zip(parts, result.split(rows), strict=True)}
        pieces = []
        for number in range(batch):
            attended = found.get(number, padding[:0])
            pieces += [attended, padding[len(attended) :]]
        return kernel, torch.cat(pieces).unflatten(0, (batch, seqlen_q))

    def run(self, parts: list[_Part], chosen: list[Choice], pattern: Pattern) -> Tensor:
        """Attend all parts, each in a call of its own: (batch, seqlen_q, heads_q, head_dim_v)."""
        results = []
        for part, choice in zip(parts, chosen, strict=True):
            tensors, options = self._arguments(part, pattern)
            results.append(dispatch.attend(*tensors, choice, **options))
        shape = (*self.q.shape[:3], self.v.shape[3])
        if len(results) == 1 and results[0].shape == shape:
            return results[0]
        out = self.q.new_zeros(shape)
        for part, result in zip(parts, results, strict=True):
            out[part.batch, part.rows] = result
        return out


@functools.lru_cache(maxsize=64)  # every layer of a model asks for the same
def _running_sum(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """0 and the sums of the first so many lengths, as `cu_seqlens` of `flash_attn_varlen_func`."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=64)
def _lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=device)
