"""One attention call as plain data: what planning may depend on, and nothing else.

A `Problem` holds no tensor, so it can be hashed, cached, and written by hand for a GPU that is not there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from cute_attn.quantize import Fp8Recipe, QuantizedQKV
from cute_attn.tracing import warn_once


@dataclass(frozen=True)
class Features:
    """What is done to scores beside scale and causal mask.

    Attributes:
        window: (left, right): keys before and behind a query's own position i + seqlen_k - seqlen_q that it sees; -1
            for all.
        softcap: where > 0, a score becomes softcap * tanh(score / softcap).
        alibi: whether slope * |key position - query position| is subtracted, a slope for each head or batch and head.
        sinks: whether each head has one more logit, without a value.
    """

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False

    @property
    def adjusts(self) -> bool:
        """Whether scores are changed one by one, beside the mask."""
        return self.softcap > 0 or self.alibi


NO_FEATURES: Final = Features()

ARCHS: Final = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}
"""Targets of the kernels that need no Hopper GPU, by compute capability: 16-bit attention by mma.sync, KV caches."""

CAPABILITIES: Final = "8.0 to 8.9, 9.x or 12.x"
"""Compute capabilities of GPUs with a 16-bit kernel, in words."""


def cutting_ends(window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(left, right) of a window, -1 in place of an end that hides no key from any query.

    (-1, 0), the causal mask, hides none from a single query.
    """
    left, right = window
    return -1 if left >= seqlen_k - 1 else left, -1 if right >= seqlen_q - 1 else right


@dataclass(frozen=True)
class Problem:
    """Shapes, dtypes, mask, recipe and device of one call.

    Attributes:
        batch: sequences.
        seqlen_q, seqlen_k: queries and keys of each sequence.
        heads_q, heads_k: query heads, and the key/value heads that groups of them share.
        head_dim: of q and k.
        head_dim_v: of v and the output.
        in_dtype: float16 or bfloat16 where the call quantises; None where it starts from quantised operands.
        out_dtype: float16 or bfloat16.
        causal: key j is visible to query i iff j <= i + seqlen_k - seqlen_q.
        recipe: how Q, K, V and P become 8-bit.
        rotary: rotary embedding of Q and K by the quantiser: "none", "half" or "interleaved".
        features: what else is done to scores.
        capability: CUDA compute capability of the tensors' device; None for CPU tensors and GPUs of other
            makers.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    in_dtype: torch.dtype | None
    out_dtype: torch.dtype
    causal: bool
    recipe: Fp8Recipe
    capability: tuple[int, int] | None
    rotary: str = "none"
    features: Features = NO_FEATURES

    @property
    def ends(self) -> tuple[int, int]:
        """(left, right) of window and causal mask, -1 where the end hides nothing."""
        left, right = self.features.window
        return cutting_ends((left, 0 if self.causal else right), self.seqlen_q, self.seqlen_k)

    @property
    def cutting_features(self) -> Features:
        """`features` with `ends` for its window."""
        return replace(self.features, window=self.ends)

    @property
    def is_empty(self) -> bool:
        """Whether the result is known without arithmetic: no output element, or no key that could be seen."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        recipe: Fp8Recipe,
        *,
        causal: bool,
        out_dtype: torch.dtype,
        rotary: str = "none",
        features: Features = NO_FEATURES,
    ) -> Problem:
        """The problem of 16-bit q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k,
        head_dim) and v (batch, seqlen_k, heads_k, head_dim_v), checked by `validate.check_inputs`.
        """
        batch, seqlen_q, heads_q, head_dim = q.shape
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1],
            heads_q=heads_q,
            heads_k=k.shape[2],
            head_dim=head_dim,
            head_dim_v=v.shape[3],
            in_dtype=q.dtype,
            out_dtype=out_dtype,
            causal=causal,
            recipe=recipe,
            capability=device_capability(q.device),
            rotary=rotary,
            features=features,
        )

    @classmethod
    def from_quantized(
        cls,
        qkv: QuantizedQKV,
        *,
        causal: bool,
        out_dtype: torch.dtype,
        features: Features = NO_FEATURES,
    ) -> Problem:
        """The problem of prepared operands, checked by `validate.check_quantized`."""
        batch, seqlen_q, heads_q, head_dim = qkv.q.shape
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=qkv.seqlen_k,
            heads_q=heads_q,
            heads_k=qkv.k.shape[2],
            head_dim=head_dim,
            head_dim_v=qkv.vt.shape[2],
            in_dtype=None,
            out_dtype=out_dtype,
            causal=causal,
            recipe=qkv.recipe,
            capability=device_capability(qkv.q.device),
            features=features,
        )


@functools.lru_cache(maxsize=64)
def device_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability (major, minor) of `device`; None if it is not an NVIDIA GPU.

    torch's ROCm builds call their GPUs "cuda" too and give them capabilities of another meaning: (9, 4) there
    is no Hopper.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def dotted(capability: tuple[int, int]) -> str:
    """(9, 0) as "9.0"."""
    return f"{capability[0]}.{capability[1]}"


def place_text(device: torch.device, capability: tuple[int, int] | None) -> str:
    """Where a tensor is, for messages: "device cuda:0, a GPU of compute capability 7.5"."""
    kind = "" if capability is None else f", a GPU of compute capability {dotted(capability)}"
    return f"device {device}{kind}"


def warn_reference(name: str, place: str) -> None:
    """Say once that "auto" did not mean a kernel, as the tensor called `name` is where there is none: `place_text`."""
    warn_once(
        "reference",
        f"cute_attn runs plain PyTorch in float32, with all scores in memory, because {name} is on "
        f"{place}, and the 16-bit kernels need a GPU of compute capability {CAPABILITIES}. To silence this warning "
        "pass backend='reference'.",
    )
