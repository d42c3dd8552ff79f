"""A causal language model with its attention in several precisions, beside the same model with exact attention.

All passes see the same tokens, and everything but attention is the same. Exact attention is the definition in float32.
For each precision: the KL divergence of its next-token distribution from the exact one, how often both name the same
most likely token, and the perplexity. For each layer: the error of the attention output on the exact inputs, and, for a
policy, the KL divergence with that layer alone in 8 bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import dispatch, flash, hf
from cute_attn.dispatch import EXACT, TORCH, AttentionLog
from cute_attn.policy import LayerPolicy

__all__ = ["PRECISIONS", "Evaluation", "LayerError", "Quality", "choose_policy", "evaluate"]

PRECISIONS: Final = (EXACT, "accurate", "fp8", "paper", "naive")
IMPLEMENTATION: Final = "cute_attn_eval"


@dataclass(frozen=True)
class Quality:
    """Predictions of a model with attention in one precision.

    Attributes:
        precision: "exact", "bf16", a recipe, or "policy".
        kl: mean over positions of KL(exact || this) of the next-token distributions, in nats.
        top1: share of positions where the most likely token is that of exact attention.
        perplexity: exp of the mean negative log-likelihood of the text's tokens.
        positions: predictions that the means are over.
        kernels: what served the attention calls, by number of calls.
        fallbacks: calls that another precision served, by reason.
    """

    precision: str
    kl: float
    top1: float
    perplexity: float
    positions: int
    kernels: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerError:
    """Error of a layer's attention output in a precision, on the inputs of the exact pass.

    `rel_rmse` is relative to the root mean square of the exact output. `kl` is that of the model with this layer alone
    in the precision, where it was measured.
    """

    layer: int
    precision: str
    rel_rmse: float
    kl: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """All that `evaluate` found; `qualities` begin with exact attention."""

    qualities: tuple[Quality, ...]
    layers: tuple[LayerError, ...]


class _Attention:
    """Attention function for transformers: exact, or a precision by layer; may measure precisions beside the exact."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.precisions: Callable[[int], str | None] = lambda layer: None  # None: exact
        self.probes: Sequence[str] = ()
        self.squares: dict[tuple[int, str], list[float]] = defaultdict(
            lambda: [0.0, 0.0]
        )  # of error, of output
        self.log = AttentionLog()

    def __call__(
        self,
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
        **more: Any,
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        window = -1 if sliding_window is None else sliding_window - 1
        if attention_mask is not None:
            if attention_mask.dtype != torch.int64:
                raise ValueError(
                    f"layer {layer} of the model has a mask tensor; allowed: causal attention, with or without a window"
                )
            window = hf.Pattern.of(attention_mask).window
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scale = 1.0 / math.sqrt(q.shape[3]) if scaling is None else float(scaling)
        features: dict[str, Any] = {
            "softmax_scale": scale,
            "softcap": softcap or 0.0,
            "sinks": None if s_aux is None else s_aux.float(),
        }
        precision = self.precisions(layer)
        if precision is not None:
            return self._attend(layer, q, k, v, precision, window, features, self.log).to(query.dtype), None
        out = flash.reference(q, k, v, window=(window, 0), **features)[0]
        for probe in self.probes:
            got = self._attend(layer, q, k, v, probe, window, features, AttentionLog())
            sums = self.squares[layer, probe]
            sums[0] += float((got.double() - out.double()).square().sum())
            sums[1] += float(out.double().square().sum())
        return out.to(query.dtype), None

    def _attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        precision: str,
        window: int,
        features: Mapping[str, Any],
        log: AttentionLog,
    ) -> Tensor:
        if q.dtype == torch.float32:
            q, k, v = (x.bfloat16() for x in (q, k, v))
        options: dict[str, Any] = {
            "backend": self.backend,
            "causal": True,
            "window": (window, -1),
            **features,
        }
        chosen = dispatch.choose(q, k, v, precision=precision, **options)
        if chosen.kernel == TORCH:
            raise ValueError(f"no kernel serves layer {layer}: {chosen.reason}")
        log.record(chosen.kernel, chosen.reason)
        return dispatch.attend(q, k, v, chosen, **options)


def evaluate(
    model: Any,
    ids: Tensor,
    precisions: Sequence[str] = PRECISIONS,
    *,
    backend: str = "auto",
    policy: LayerPolicy | None = None,
    layer_kl: str | None = None,
    on_done: Callable[[str], None] = lambda what: None,
) -> Evaluation:
    """Run a model of transformers over token windows with exact attention and in every precision.

    The model's attention implementation is another one meanwhile and is set back.

    Args:
        model: a causal language model, in float32, bfloat16 or float16. Tensors of a float32 model are rounded to
            bfloat16 for the kernels.
        ids: (windows, tokens) int64; each row is a text of its own, without padding.
        precisions: "bf16" (the 16-bit kernel) and names of recipes.
        backend: "auto", "sm90" or "emulator", as in `cute_attn.sdpa`; "auto" is "emulator" without a Hopper GPU.
        policy: also evaluate this policy, as precision "policy".
        layer_kl: also run the model with each layer alone in this precision, a pass for each layer.
        on_done: called with a word on each pass that is done.

    Raises:
        ValueError: ids that are no (windows, tokens >= 2), a model with mask tensors, or a layer that no kernel serves.
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if ids.dim() != 2 or ids.shape[1] < 2:
        raise ValueError(
            f"ids have shape {tuple(ids.shape)}; allowed: (windows, tokens) with at least 2 tokens"
        )
    for precision in precisions:
        dispatch.check_options(precision, backend, "error")
    device = next(model.parameters()).device
    ids = ids.to(device)
    if backend == "auto":
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        backend = "sm90" if hopper else "emulator"
    attention = _Attention(backend)
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, hf.mask_function)
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation(IMPLEMENTATION)
    model.eval()
    try:
        with torch.inference_mode():
            attention.probes = tuple(precisions)
            exact = [_log_probabilities(model, row) for row in ids]
            attention.probes = ()
            on_done("exact")
            qualities = [_quality("exact", ids, exact, exact, attention.log)]

            def measure(name: str, by_layer: Callable[[int], str | None]) -> Quality:
                attention.precisions, attention.log = by_layer, AttentionLog()
                passes = (_log_probabilities(model, row) for row in ids)
                found = _quality(name, ids, exact, passes, attention.log)
                on_done(name)
                return found

            for precision in precisions:
                qualities.append(measure(precision, LayerPolicy(precision).precision))
            if policy is not None:
                qualities.append(measure("policy", policy.precision))
            alone = {}
            if layer_kl is not None:
                for one in sorted({layer for layer, _ in attention.squares}):
                    only = {one: layer_kl}
                    alone[one, layer_kl] = measure(f"{layer_kl} in layer {one}", only.get).kl
    finally:
        model.set_attn_implementation(before)
        model.train(training)
    layers = [
        LayerError(layer, name, math.sqrt(error / size) if size else 0.0, alone.get((layer, name)))
        for (layer, name), (error, size) in sorted(
            attention.squares.items(), key=lambda item: (item[0][0], list(precisions).index(item[0][1]))
        )
    ]
    return Evaluation(tuple(qualities), tuple(layers))


def _log_probabilities(model: Any, row: Tensor) -> Tensor:
    """(tokens - 1, vocabulary) float32: of the token after each one but the last."""
    logits: Tensor = model(row[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def _quality(name: str, ids: Tensor, exact: Sequence[Tensor], passes: Any, log: AttentionLog) -> Quality:
    divergence = likelihood = 0.0
    same = positions = 0
    for row, wanted, got in zip(ids, exact, passes, strict=True):
        divergence += float((wanted.exp() * (wanted - got)).sum(-1).double().sum())
        likelihood += float(got.gather(1, row[1:, None]).double().sum())
        same += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        positions += row.shape[0] - 1
    return Quality(
        precision=name,
        kl=divergence / positions,
        top1=same / positions,
        perplexity=math.exp(-likelihood / positions),
        positions=positions,
        kernels=log.kernels,
        fallbacks=log.fallbacks,
    )


def choose_policy(
    layers: Sequence[LayerError], precision: str, budget: float, about: Mapping[str, Any] | None = None
) -> LayerPolicy:
    """The policy with as many layers in `precision` as a budget of KL divergence allows, the others in 16 bits.

    Layers are taken by their own KL divergence, the smallest first, while the sum is within the budget. Divergences of
    single layers do not add up exactly: evaluate the policy before it is used.

    Args:
        layers: of `evaluate` with `layer_kl=precision`.
        precision: a recipe.
        budget: nats, >= 0.
        about: goes into the policy.

    Raises:
        ValueError: a negative budget, or no layer with a KL divergence in that precision.
    """
    if not budget >= 0:
        raise ValueError(f"budget is {budget}; allowed: 0 or more nats")
    measured = [error for error in layers if error.precision == precision and error.kl is not None]
    if not measured:
        raise ValueError(
            f"no layer was measured alone in {precision!r}; call evaluate with layer_kl={precision!r}"
        )
    chosen: dict[int, str] = {}
    spent = 0.0
    for error in sorted(measured, key=lambda each: (each.kl, each.layer)):
        assert error.kl is not None
        cost = max(error.kl, 0.0)  # rounding may leave it below 0
        fits = spent + cost <= budget
        spent += cost if fits else 0.0
        chosen[error.layer] = precision if fits else EXACT
    return LayerPolicy(EXACT, dict(sorted(chosen.items())), about or {})
