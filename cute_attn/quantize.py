"""Recipes, quantised tensors, and the torch reference of the quantiser.

A *recipe* says how 16-bit Q, K and V become 8-bit operands: the scale granularity of each tensor, whether Q
and K are rotated ("incoherent processing", FlashAttention-3, arXiv 2407.08608, section 3.3), whether the mean
key is subtracted (SageAttention, arXiv 2410.02367), and which 8-bit type carries Q K^T.

`quantize_reference` is the definition of the quantiser's arithmetic. Every operation is a single float32
operation rounded to nearest even, in a fixed order, so the device kernel can (and must) agree bit for bit:

    x      = float32(input)
    x      = a cos - b sin, b cos + a sin      Q and K, with rotary embedding, for each pair (a, b) of columns
    x      = x * sign                          Q and K, with rotation
    x      = x - mean * sign                   K only, with smooth_k; sign is 1 without rotation
    x      = FWHT(x)                           Q and K, with rotation, in blocks of `rotation_block(head_dim)`
                                               columns; 1/sqrt(block) is in the scale
    amax   = max |x| over the scale group
    a      = max(amax, 2^-100)
    inv    = QMAX / a                          IEEE division
    scale  = a * float32(norm / QMAX) + (a - a)
    code   = round(x * inv)                    e4m3 (QMAX 448, see below) or int8 (127), to nearest even, saturating

With `Fp8Recipe.half_scores` QMAX of Q and K is 28 or 14 (`narrow_max`), 448 over a power of two: only codes that
become subnormal differ, those of a thousandth of their group's largest or less.

With rotation, x * inv is fused with the addition of 0: where one of the two is 0 the code is 0 without a sign.
A group of zeros has `inv = scale = 1`. `(a - a)` is zero for a finite group and NaN for any other, so a NaN
or an infinity makes the scale of its group NaN, and every output that depends on the group is NaN: bad input
stays visible and never becomes a plausible number.

Tensors are (batch, seqlen, heads, head_dim) unless said otherwise; V's head_dim_v may be another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn.kernels.config import (
    E4M3_MAX,
    INT8_MAX,
    K_SCALE_GROUP,
    MEAN_CHUNKS,
    MEAN_LANES,
    MEAN_STRIDE,
    MEAN_UNROLL,
    SMALLEST_AMAX,
    V_SCALE_GROUP,
    narrow_max,
    rotation_block,
)

__all__ = [
    "E4M3_MAX",
    "INT8_MAX",
    "K_GROUP",
    "PI",
    "PRESETS",
    "Q_BLOCK",
    "V_BLOCK",
    "Fp8Recipe",
    "QuantizedQKV",
    "Rotary",
    "Stored",
    "amax_scale",
    "check_rotary",
    "from_fp8",
    "mean_chunks",
    "mean_key",
    "mean_of_samples",
    "mean_of_sums",
    "permute_v",
    "quantize_reference",
    "resolve_recipe",
    "rotation_signs",
    "scale_norm",
    "static_amax",
    "sums_of_samples",
    "to_e4m3",
    "to_int8",
    "unpermute_v",
    "walsh_hadamard",
    "with_positive_scale",
]

Q_BLOCK: Final = 128  # query rows that share a scale with q_scale="block"
K_GROUP: Final = K_SCALE_GROUP  # keys of one entry of QuantizedQKV.k_scale
V_BLOCK: Final = V_SCALE_GROUP  # keys of one entry of QuantizedQKV.v_scale

PI: Final = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Key order inside each group of 16 of the transposed V: `vt[..., 16 m + p] = v[16 m + PI[p]]`.

With it the float32 accumulator registers of S, taken in order and converted, are the 8-bit A fragment of P.
"""

# Rows of the sequence that static_amax transforms at a time, to bound its float32 workspace.
_STATIC_CHUNK: Final = 4096


# ------------------------------------------------------------------------------------------------------------
# Recipes
# ------------------------------------------------------------------------------------------------------------

_ALLOWED: Final[Mapping[str, tuple[object, ...]]] = {
    "qk_dtype": ("e4m3", "int8"),
    "q_scale": ("tensor", "head", "block", "token"),
    "k_scale": ("tensor", "head", "block"),
    "k_block": (64, 128),
    "v_scale": ("tensor", "head", "block"),
    "rotation": ("none", "hadamard"),
    "smooth_k": (True, False),
    "p_rounding": ("code", "ex2", "cast"),
}


@dataclass(frozen=True)
class Fp8Recipe:
    """How Q, K, V and P are brought to 8 bits. Immutable and hashable.

    Attributes:
        name: label used in reports and plans.
        qk_dtype: operands of Q K^T. "int8" has 7 bits of mantissa against the 3 of "e4m3", at the same speed.
        q_scale: one scale for each "tensor", "head" (batch, head), "block" of 128 query rows, or "token".
        k_scale: one scale for each "tensor", "head" or "block" of `k_block` keys.
        k_block: keys of one K scale when `k_scale` is "block": 64 or 128.
        v_scale: one scale for each "tensor", "head" or "block" of 256 keys. V is always e4m3.
        rotation: "hadamard" multiplies Q and K by random signs and a Hadamard matrix (arXiv 2407.08608,
            section 3.3), block-diagonal where head_dim is not a power of two (see `walsh_hadamard`).
        rotation_seed: seed of the signs, a non-negative int below 2**63.
        smooth_k: subtract a mean key of each head (SageAttention, arXiv 2410.02367). Exact for the output.
        p_rounding: how P becomes e4m3. "code" rounds its base-2 logarithm to an e4m3 byte, without exp2.
            "ex2" computes exp2 and casts, P lifted by 2^8 so that small P keep their bits. "cast" is "ex2"
            without the lift, the naive way and that of arXiv 2407.08608: P below about 2^-10 of the row's
            largest become 0. It is there as a baseline, for e4m3 operands only.

    Raises:
        ValueError: a field holds a value that is not allowed; the message names field, value and choices. Or
            `qk_dtype` is "int8" with `p_rounding` "cast".
    """

    name: str = "custom"
    qk_dtype: Literal["e4m3", "int8"] = "int8"
    q_scale: Literal["tensor", "head", "block", "token"] = "token"
    k_scale: Literal["tensor", "head", "block"] = "block"
    k_block: int = 64
    v_scale: Literal["tensor", "head", "block"] = "block"
    rotation: Literal["none", "hadamard"] = "hadamard"
    rotation_seed: int = 0
    smooth_k: bool = True
    p_rounding: Literal["code", "ex2", "cast"] = "code"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Fp8Recipe.name is {self.name!r}; allowed: a non-empty str")
        for field, allowed in _ALLOWED.items():
            value = getattr(self, field)
            # The type is compared too: 1 == True and 64.0 == 64, but they are not the documented values.
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                raise ValueError(f"Fp8Recipe.{field} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
        seed = self.rotation_seed
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"Fp8Recipe.rotation_seed is {seed!r}; allowed: an int from 0 to 2**63 - 1")
        if self.qk_dtype == "int8" and self.p_rounding == "cast":
            raise ValueError(
                "Fp8Recipe.qk_dtype is 'int8' with p_rounding 'cast'; "
                "allowed: p_rounding 'code', 'ex2' with 'int8', any with 'e4m3'"
            )

    @property
    def half_scores(self) -> bool:
        """Whether Q K^T is summed in float16, of e4m3 codes that are small enough for that.

        Where P is made by code of operands with scales of their own for blocks or tokens. One scale for a whole head
        or tensor wants e4m3's full range, and codes of the caller's own have it.
        """
        return (
            self.qk_dtype == "e4m3"
            and self.p_rounding == "code"
            and self.q_scale in ("block", "token")
            and self.k_scale == "block"
        )

    def qk_max(self, head_dim: int) -> tuple[float, float]:
        """Largest codes of Q and of K."""
        if self.half_scores:
            return narrow_max(head_dim)
        largest = E4M3_MAX if self.qk_dtype == "e4m3" else INT8_MAX
        return largest, largest

    @classmethod
    def preset(cls, name: str) -> Fp8Recipe:
        """Returns the preset of this name ("naive", "paper", "fp8", "accurate" or "default").

        Raises:
            ValueError: no preset has this name.
        """
        try:
            return PRESETS[name]
        except KeyError:
            raise ValueError(f"recipe is {name!r}; allowed: {', '.join(map(repr, PRESETS))}") from None


_NAIVE: Final = Fp8Recipe(
    name="naive",
    qk_dtype="e4m3",
    q_scale="tensor",
    k_scale="tensor",
    v_scale="tensor",
    rotation="none",
    smooth_k=False,
    p_rounding="cast",
)
_PAPER: Final = Fp8Recipe(
    name="paper", qk_dtype="e4m3", q_scale="block", k_block=128, smooth_k=False, p_rounding="cast"
)
_FP8: Final = Fp8Recipe(name="fp8", qk_dtype="e4m3")
_ACCURATE: Final = Fp8Recipe(name="accurate")

PRESETS: Final[Mapping[str, Fp8Recipe]] = {
    "naive": _NAIVE,
    "paper": _PAPER,
    "fp8": _FP8,
    "accurate": _ACCURATE,
    "default": _ACCURATE,
}
"""The named recipes. "default" is an alias: its recipe is the one called "accurate"."""

_FP8_TENSORS: Final = Fp8Recipe(
    name="fp8_tensors",
    qk_dtype="e4m3",
    q_scale="head",
    k_scale="head",
    v_scale="head",
    rotation="none",
    smooth_k=False,
)


def resolve_recipe(recipe: str | Fp8Recipe) -> Fp8Recipe:
    """Returns the recipe itself, or the preset of that name.

    Raises:
        ValueError: no preset has this name.
        TypeError: `recipe` is neither a str nor an Fp8Recipe.
    """
    if isinstance(recipe, Fp8Recipe):
        return recipe
    if isinstance(recipe, str):
        return Fp8Recipe.preset(recipe)
    raise TypeError(f"recipe is a {type(recipe).__name__}; allowed: a preset name (str) or an Fp8Recipe")


# ------------------------------------------------------------------------------------------------------------
# Quantised tensors
# ------------------------------------------------------------------------------------------------------------


class Stored(Protocol):
    """Operands in a workspace, see `launch.Workspace`."""

    @property
    def quantiser(self) -> Any: ...

    @property
    def memory(self) -> Tensor: ...

    def tensors(self) -> dict[str, Tensor | None]:
        """The first seven fields of `QuantizedQKV`."""


_PARTS: Final = ("q", "k", "vt", "q_scale", "k_scale", "v_scale", "q_dot_mean")


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """8-bit Q, K, V as the forward kernel reads them, with their float32 dequantisation factors.

    Attributes:
        q: (batch, seqlen_q, heads_q, head_dim) e4m3fn or int8, last stride 1, in rotated space.
        k: (batch, seqlen_k, heads_k, head_dim), dtype of `q`, rotated and smoothed.
        vt: (batch, heads_k, head_dim_v, ceil16(seqlen_k)) e4m3fn: V transposed, keys permuted by `PI` inside
            groups of 16, zeros after the last key.
        q_scale: (batch, heads_q, seqlen_q) float32. Scales may be expanded (stride 0).
        k_scale: (batch, heads_k, ceil(seqlen_k / 64)) float32, one for each group of 64 keys.
        v_scale: (batch, heads_k, ceil(seqlen_k / 256)) float32, one for each group of 256 keys.
        q_dot_mean: (batch, heads_q, seqlen_q) float32, q . mean_key before softmax_scale, which lse adds
            back; None without smoothing.
        seqlen_k: number of true keys in `vt`.
        recipe: how the tensors were made.
        dtype: dtype of the tensors they were made from; the default dtype of the output.

    The kernel leaves all tensors in one workspace. Of these operands, tensors are made when somebody first asks for
    one: seven views cost more than their attention does on the host.
    """

    q: Tensor
    k: Tensor
    vt: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    q_dot_mean: Tensor | None
    seqlen_k: int
    recipe: Fp8Recipe
    dtype: torch.dtype

    @classmethod
    def in_workspace(
        cls, stored: Stored, seqlen_k: int, recipe: Fp8Recipe, dtype: torch.dtype
    ) -> QuantizedQKV:
        """Operands whose tensors are those of `stored.tensors()`."""
        qkv = object.__new__(cls)
        qkv.__dict__.update(seqlen_k=seqlen_k, recipe=recipe, dtype=dtype, _stored=stored)
        return qkv

    @property
    def untouched(self) -> Stored | None:
        """Where the operands are, as long as nobody has asked for a tensor, which he could have changed in place."""
        found: Stored | None = self.__dict__.get("_stored")
        return found

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            stored = self.__dict__.get("_stored")
            if stored is not None and name in _PARTS:
                for part, x in stored.tensors().items():  # two threads may ask at once, and get the same
                    self.__dict__.setdefault(part, x)
                self.__dict__.pop("_stored", None)
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def dequantize(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the codes stand for: float64 (q, k, v), each (batch, seqlen, heads, head_dim or head_dim_v).

        q and k stay in the rotated, smoothed space (their products are those of the original space up to
        rounding and, with smoothing, one constant for each row); the key permutation of V is undone.
        """
        k_rows = _expand_groups(self.k_scale, K_GROUP, self.seqlen_k)
        v_rows = _expand_groups(self.v_scale, V_BLOCK, self.seqlen_k)
        v8 = unpermute_v(self.vt, self.seqlen_k)
        return (
            self.q.double() * _as_rows(self.q_scale).double(),
            self.k.double() * _as_rows(k_rows).double(),
            v8.double() * _as_rows(v_rows).double(),
        )


def _as_rows(x: Tensor) -> Tensor:
    """(batch, heads, seqlen) -> (batch, seqlen, heads, 1), to multiply codes with."""
    return x.transpose(1, 2).unsqueeze(-1)


def _expand_groups(x: Tensor, group: int, length: int) -> Tensor:
    """(..., groups) -> (..., length): each entry repeated `group` times, the last one as often as needed."""
    return x.repeat_interleave(group, dim=-1)[..., :length]


def with_positive_scale(qkv: QuantizedQKV, softmax_scale: float) -> tuple[QuantizedQKV, float]:
    """Operands and a softmax_scale > 0 that give the same attention, exactly.

    The forward takes maxima of products before their scale, so it wants one > 0. The sign goes to the codes of Q, and
    for a scale of 0 they become 0; codes that are NaN stay. Nothing is copied where softmax_scale is > 0.
    """
    if softmax_scale > 0:
        return qkv, softmax_scale
    factor = -1.0 if softmax_scale else 0.0
    if qkv.q.dtype == torch.int8:
        q = qkv.q * int(factor)
    else:
        bits = qkv.q.view(torch.uint8)
        if factor:
            bits = bits ^ 0x80
        else:
            bits = bits.masked_fill((bits & 0x7F) != 0x7F, 0)
        q = bits.view(qkv.q.dtype)
    q_dot = None if qkv.q_dot_mean is None else qkv.q_dot_mean * factor
    return replace(qkv, q=q, q_dot_mean=q_dot), -softmax_scale or 1.0


def permute_v(v8: Tensor) -> Tensor:
    """Transposes 8-bit V and permutes its keys, as the forward kernel reads it.

    Args:
        v8: (batch, seqlen_k, heads_k, head_dim_v), one-byte elements.

    Returns:
        (batch, heads_k, head_dim_v, ceil16(seqlen_k)), contiguous: keys in the order `PI` inside each group of
        16, zeros past the last key.

    Raises:
        ValueError: `v8` is not a 4-D tensor of one-byte elements.
    """
    if v8.dim() != 4 or v8.element_size() != 1:
        raise ValueError(f"v8 is {v8.dim()}-D {v8.dtype}; allowed: 4-D with one-byte elements")
    batch, seqlen, heads, head_dim = v8.shape
    padded = F.pad(v8.view(torch.uint8), (0, 0, 0, 0, 0, -seqlen % 16))
    groups = padded.permute(0, 2, 3, 1).reshape(batch, heads, head_dim, (seqlen + 15) // 16, 16)
    order = torch.tensor(PI, device=v8.device)
    return groups[..., order].reshape(batch, heads, head_dim, -(-seqlen // 16) * 16).view(v8.dtype)


def unpermute_v(vt: Tensor, seqlen_k: int) -> Tensor:
    """Inverse of `permute_v`: back to (batch, seqlen_k, heads_k, head_dim_v)."""
    batch, heads, head_dim, padded = vt.shape
    inverse = torch.tensor([PI.index(i) for i in range(16)], device=vt.device)
    groups = vt.view(torch.uint8).reshape(batch, heads, head_dim, padded // 16, 16)[..., inverse]
    return (
        groups.reshape(batch, heads, head_dim, padded)[..., :seqlen_k]
        .permute(0, 3, 1, 2)
        .contiguous()
        .view(vt.dtype)
    )


# ------------------------------------------------------------------------------------------------------------
# Arithmetic
# ------------------------------------------------------------------------------------------------------------


def _float32(x: float) -> float:
    """The double rounded once to float32."""
    return float(torch.tensor(x, dtype=torch.float32, device="cpu"))


def scale_norm(head_dim: int, rotation: str) -> float:
    """The `norm` of `amax_scale` for Q and K: 1/sqrt(block) undoes the gain of the transform; else 1."""
    return 1.0 / math.sqrt(rotation_block(head_dim)) if rotation == "hadamard" else 1.0


def amax_scale(amax: Tensor, qmax: float, norm: float) -> tuple[Tensor, Tensor]:
    """Scales of groups from their largest magnitudes.

    Args:
        amax: float32, any shape; max |x| of each scale group, NaN where the group holds a NaN.
        qmax: largest code, see `Fp8Recipe.qk_max`; 448 for V.
        norm: factor folded into the dequantisation scale (see `scale_norm`); 1 for V.

    Returns:
        (inv, scale), float32, shape of `amax`: codes are round(x * inv), values are code * scale. A zero
        group gives (1, 1); a non-finite one gives a NaN scale.
    """
    a = amax.clamp(min=SMALLEST_AMAX)  # keeps NaN
    # Not `qmax / a`: torch computes number / tensor as a reciprocal and a product, which rounds twice.
    inv = torch.full_like(a, qmax) / a
    scale = a * _float32(norm / qmax) + (a - a)
    zero = amax == 0
    return inv.masked_fill(zero, 1.0), scale.masked_fill(zero, 1.0)


def to_e4m3(x: Tensor) -> Tensor:
    """float32 -> e4m3fn, to nearest even, saturating at +-448; every NaN becomes the byte 0x7f."""
    # Clamped first because older torch turns values beyond 448 into NaN; clamp keeps NaN.
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.masked_fill(x.isnan(), 0x7F).view(torch.float8_e4m3fn)


def to_int8(x: Tensor) -> Tensor:
    """float32 -> int8, to nearest even, saturating at +-127; NaN becomes 0 (its group's scale is NaN)."""
    return x.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(nan=0.0).to(torch.int8)


def rotation_signs(head_dim: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Random signs of the rotation: (head_dim,) float32, +1 or -1, drawn on the CPU for any device."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (head_dim,), generator=generator, device="cpu") * 2 - 1
    return signs.to(device=device, dtype=torch.float32)


def walsh_hadamard(x: Tensor) -> Tensor:
    """Unnormalised fast Walsh-Hadamard transform of the last dimension, stages at distance 1, 2, 4, ...

    The order of the stages is part of the definition: float32 sums depend on it. Each block of
    `rotation_block(x.shape[-1])` columns is transformed by itself: 96 columns are 3 blocks of 32, 192 are 3 of 64, a
    power of two is one block.
    """
    n = x.shape[-1]
    block = rotation_block(n)
    shape = x.shape
    h = 1
    while h < block:
        a, b = x.reshape(*shape[:-1], n // (2 * h), 2, h).unbind(dim=-2)
        x = torch.stack((a + b, a - b), dim=-2).reshape(shape)
        h *= 2
    return x


def mean_chunks(seqlen_k: int) -> tuple[int, int]:
    """(samples of a chunk, chunks) of the sum in `mean_key`: at most MEAN_CHUNKS chunks of whole steps."""
    samples = -(-seqlen_k // MEAN_STRIDE)
    step = MEAN_LANES * MEAN_UNROLL
    chunk = step * max(1, -(-samples // (step * MEAN_CHUNKS)))
    return chunk, max(1, -(-samples // chunk))


class Rotary(NamedTuple):
    """Rotary position embedding (Su et al., arXiv 2104.09864) of Q and K, as `check_rotary` lets it pass.

    Attributes:
        cos, sin: (seqlen_ro, rotary_dim / 2), of the dtype of Q and K; row j serves position j.
        interleaved: pairs are columns 2 i and 2 i + 1 (GPT-J), else i and i + rotary_dim / 2 (GPT-NeoX). Columns past
            rotary_dim stay as they are.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def embed(self, x: Tensor, first: int = 0, step: int = 1) -> Tensor:
        """x (batch, seqlen, heads, head_dim) in float32, embedded: its row i is at position first + step * i."""
        x, pairs = x.float(), self.cos.shape[1]
        end = first + step * x.shape[1]
        cos, sin = (table[first:end:step].float().unsqueeze(1) for table in (self.cos, self.sin))
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = turned.unflatten(-1, (pairs, 2)).unbind(-1) if self.interleaved else turned.chunk(2, dim=-1)
        new = (a * cos - b * sin, b * cos + a * sin)
        embedded = torch.stack(new, dim=-1).flatten(-2) if self.interleaved else torch.cat(new, dim=-1)
        return torch.cat((embedded, rest), dim=-1)


def check_rotary(
    q: Tensor, k: Tensor, rotary_cos: Tensor | None, rotary_sin: Tensor | None, rotary_interleaved: bool
) -> Rotary | None:
    """The arguments of a rotary position embedding, checked; None where there is none.

    Key j has position j and query i position i + seqlen_k - seqlen_q: the last of each are aligned.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim), seqlen_k at least seqlen_q.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), dtype and device of `q`, last stride 1; seqlen_ro at least
            seqlen_k, rotary_dim a multiple of 16 up to head_dim. Or both None.
        rotary_interleaved: see `Rotary`.

    Raises:
        TypeError: a table has another dtype than `q`, or `rotary_interleaved` is no bool.
        ValueError: one table without the other, `rotary_interleaved` without tables, a shape, stride or device that is
            not allowed, or fewer keys than queries.
    """
    if type(rotary_interleaved) is not bool:
        raise TypeError(f"rotary_interleaved is {rotary_interleaved!r}; allowed: a bool")
    if rotary_cos is None and rotary_sin is None:
        if rotary_interleaved:
            raise ValueError(
                "rotary_interleaved is True and rotary_cos is None; allowed: False without tables"
            )
        return None
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    cos, sin = check_tables(q, seqlen_k, "the keys", rotary_cos, rotary_sin)
    if seqlen_q > seqlen_k:
        raise ValueError(
            f"q has {seqlen_q} rows and k {seqlen_k}; allowed with rotary_cos: at most as many queries as keys, as the "
            "last query is at the position of the last key"
        )
    return Rotary(cos, sin, rotary_interleaved)


def check_tables(
    q: Tensor, positions: int, what: str, rotary_cos: Tensor | None, rotary_sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotary position embedding, checked: see `check_rotary`.

    Args:
        positions: how many the tables must have; `what` says in words what these are.
    """
    if rotary_cos is None or rotary_sin is None:
        given, missing = ("cos", "sin") if rotary_sin is None else ("sin", "cos")
        raise ValueError(f"rotary_{given} is given and rotary_{missing} is None; allowed: both or none")
    head_dim = q.shape[3]
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: {q.dtype}, as q")
        if x.dim() != 2 or x.shape[0] < positions or x.shape[1] % 8 or not 8 <= x.shape[1] <= head_dim // 2:
            raise ValueError(
                f"{name} is {tuple(x.shape)}; allowed: (seqlen_ro, rotary_dim / 2), seqlen_ro at least {positions} "
                f"({what}), rotary_dim a multiple of 16 from 16 to {head_dim // 16 * 16}"
            )
        if x.shape[1] != rotary_cos.shape[1]:
            raise ValueError(
                f"{name} has {x.shape[1]} columns; allowed: {rotary_cos.shape[1]}, as rotary_cos"
            )
        if x.stride(1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; allowed: a last stride of 1")
        if x.device != q.device:
            raise ValueError(f"{name} is on device {x.device}; allowed: {q.device}, that of q")
    return rotary_cos, rotary_sin


def mean_key(k: Tensor, rotary: Rotary | None = None) -> Tensor:
    """The key that smoothing subtracts: the mean of every 16th key of a head.

    The order of the sum is part of the definition. Sample i is key 16 i. The samples are cut into chunks of
    `mean_chunks(seqlen_k)[0]`, and in each chunk sample i belongs to lane i % 16. In float32, from 0: the samples
    of a lane are added one after the other, then the lanes of a chunk, then the chunks; then one division.

    Args:
        k: (batch, seqlen_k, heads_k, head_dim), any float dtype.
        rotary: embedding of the keys, which comes first.

    Returns:
        (batch, heads_k, head_dim) float32; zero where there are no keys. A NaN or infinity in a sampled key
        spreads to the whole head.

    Any vector gives the same output exactly (softmax ignores a constant added to a row), so a subsample
    serves, at a sixteenth of the cost of a pass.
    """
    sample = k[:, ::MEAN_STRIDE]
    sample = sample.float() if rotary is None else rotary.embed(sample, step=MEAN_STRIDE)
    return mean_of_samples(sample, k.shape[1])


def mean_of_samples(sample: Tensor, seqlen_k: int) -> Tensor:
    """`mean_key` of seqlen_k keys from every 16th of them, (batch, ceil(seqlen_k / 16), heads_k, head_dim) float32."""
    count = sample.shape[1]
    if count == 0:
        return sample.new_zeros(sample.shape[0], *sample.shape[2:])
    return mean_of_sums(sums_of_samples(sample, mean_chunks(seqlen_k)[0]), count)


def sums_of_samples(sample: Tensor, chunk: int) -> Tensor:
    """(batch, samples, heads_k, head_dim) float32 to (batch, ceil(samples / chunk), ..): the sums of `mean_key`."""
    chunks = -(-sample.shape[1] // chunk)
    # zeros change no sum that starts from 0
    sample = F.pad(sample, (0, 0, 0, 0, 0, chunk * chunks - sample.shape[1]))
    parts = sample.unflatten(1, (chunks, chunk // MEAN_LANES, MEAN_LANES))
    return _added(_added(parts, 2), 2)  # the steps of a lane, the lanes


def mean_of_sums(sums: Tensor, count: int) -> Tensor:
    """`mean_key` of `count` samples from the sums of their chunks, (batch, chunks, heads_k, head_dim) float32."""
    total = _added(sums, 1)
    # A tensor as the divisor: torch multiplies by the reciprocal of a number, which rounds twice.
    return total / torch.full_like(total, count)


def _added(parts: Tensor, dim: int) -> Tensor:
    """Their sum over a dimension, one after the other, from 0."""
    total = torch.zeros_like(parts.select(dim, 0))
    for part in parts.unbind(dim):
        total = total + part
    return total


def _transform(
    x: Tensor, mean: Tensor | None, signs: Tensor | None, rotary: Rotary | None = None, first: int = 0
) -> Tensor:
    """float32, embedded from position `first` on, minus the mean key, rotated: what is then scaled and rounded."""
    x = x.float() if rotary is None else rotary.embed(x, first)
    if signs is not None:
        x = x * signs
    if mean is not None:
        # After the signs: (x - mean) * sign, except for the sign of a zero.
        x = x - (mean if signs is None else mean * signs).unsqueeze(1)
    return x if signs is None else walsh_hadamard(x)


def static_amax(
    x: Tensor,
    mode: Literal["tensor", "head"],
    *,
    mean: Tensor | None = None,
    signs: Tensor | None = None,
    rotary: Rotary | None = None,
    first: int = 0,
) -> Tensor:
    """Largest magnitude for the scale modes that need a pass of their own, after embedding, smoothing and rotation.

    Args:
        x: (batch, seqlen, heads, head_dim), fp16, bf16 or fp32.
        mode: "head": one value for each (batch, head); "tensor": one for all.
        mean: (batch, heads, head_dim) float32 to subtract first (`mean_key`), or None.
        signs: (head_dim,) float32 (`rotation_signs`) of the rotation, or None.
        rotary: embedding of the rows, or None.
        first: position of the first row.

    Returns:
        (batch, heads) float32; with "tensor" every entry is the same (stride 0). NaN propagates.
    """
    batch, seqlen, heads, _ = x.shape
    amax = torch.zeros(batch, heads, dtype=torch.float32, device=x.device)
    for start in range(0, seqlen, _STATIC_CHUNK):
        part = _transform(x[:, start : start + _STATIC_CHUNK], mean, signs, rotary, first + start)
        amax = torch.maximum(amax, part.abs().amax(dim=(1, 3)))
    if mode == "tensor" and amax.numel():
        amax = amax.amax().expand(batch, heads)
    return amax


def _group_amax(x: Tensor, group: int) -> Tensor:
    """max |x| over `group` rows and head_dim: (batch, seqlen, heads, head_dim) -> (batch, heads, groups)."""
    rows = x.abs().amax(dim=-1).transpose(1, 2)
    groups = -(-rows.shape[-1] // group)
    return F.pad(rows, (0, -rows.shape[-1] % group)).unflatten(-1, (groups, group)).amax(dim=-1)


def _quantize(
    x: Tensor,
    mode: Literal["tensor", "head", "block", "token"],
    block: int,
    dtype: Literal["e4m3", "int8"],
    qmax: float,
    norm: float,
    rotated: bool = False,
) -> tuple[Tensor, Tensor, int | None]:
    """Quantises a transformed tensor.

    Returns the codes (shape of x), the scales (batch, heads, groups), and the rows of a group, or None where
    one scale serves the whole sequence.
    """
    seqlen = x.shape[1]
    if mode == "tensor" or mode == "head":
        inv, scale = amax_scale(static_amax(x, mode).unsqueeze(-1), qmax, norm)
        inv_rows, group = inv, None
    else:
        group = 1 if mode == "token" else block
        inv, scale = amax_scale(_group_amax(x, group), qmax, norm)
        inv_rows = _expand_groups(inv, group, seqlen)
    inv_rows = _as_rows(inv_rows)
    scaled = x * inv_rows
    if rotated:  # see the module; a product that underflows keeps its sign
        scaled = torch.where((x == 0) | (inv_rows == 0), scaled + 0.0, scaled)
    return to_e4m3(scaled) if dtype == "e4m3" else to_int8(scaled), scale, group


def _spread(scale: Tensor, group: int | None, unit: int, entries: int) -> Tensor:
    """Scales at one entry for each `unit` rows, (batch, heads, entries), from scales of `group` rows."""
    if group is None:
        return scale.expand(-1, -1, entries)
    return _expand_groups(scale, group // unit, entries)


def quantize_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Fp8Recipe,
    *,
    k_mean: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> QuantizedQKV:
    """Quantises Q, K, V in torch, with exactly the arithmetic of the device kernel (see the module).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16, bf16 or fp32, CPU or CUDA.
        k: (batch, seqlen_k, heads_k, head_dim).
        v: (batch, seqlen_k, heads_k, head_dim_v).
        recipe: how to quantise.
        k_mean: (batch, heads_k, head_dim) float32 subtracted from every key when `recipe.smooth_k`, for example
            that of a cache; default `mean_key(k)`, of the embedded keys.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), dtype of `q`: rotary position embedding of q and k before
            anything else, see `check_rotary`; default none.
        rotary_interleaved: pairs of columns are neighbours, see `Rotary`.

    Returns:
        QuantizedQKV on the device of the inputs. A scale group with a NaN or an infinity in it has scale NaN.

    Raises:
        ValueError: a dtype or rank is not allowed, or `k_mean` is given without smoothing or with a wrong shape,
            or the rotary embedding is not (see `check_rotary`).
        TypeError: likewise of `check_rotary`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} is {x.dim()}-D; allowed: 4-D (batch, seqlen, heads, head_dim)")
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"{name} is {x.dtype}; allowed: float16, bfloat16, float32")
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, dtype = k.shape[1], k.shape[2], q.dtype
    if k_mean is not None:
        if not recipe.smooth_k:
            raise ValueError("k_mean is given but recipe.smooth_k is False; allowed: None")
        if k_mean.shape != (batch, heads_k, head_dim) or k_mean.dtype != torch.float32:
            want = (batch, heads_k, head_dim)
            raise ValueError(f"k_mean is {tuple(k_mean.shape)} {k_mean.dtype}; allowed: {want} float32")
    rotary = check_rotary(q, k, rotary_cos, rotary_sin, rotary_interleaved)
    if recipe.smooth_k and k_mean is None:
        k_mean = mean_key(k, rotary)
    if rotary is not None:
        q, k = rotary.embed(q, seqlen_k - seqlen_q), rotary.embed(k)

    signs = (
        rotation_signs(head_dim, recipe.rotation_seed, q.device) if recipe.rotation == "hadamard" else None
    )
    norm = scale_norm(head_dim, recipe.rotation)
    rotated = signs is not None
    q_max, k_max = recipe.qk_max(head_dim)
    q8, q_scale, q_group = _quantize(
        _transform(q, None, signs), recipe.q_scale, Q_BLOCK, recipe.qk_dtype, q_max, norm, rotated
    )
    k8, k_scale, k_group = _quantize(
        _transform(k, k_mean, signs), recipe.k_scale, recipe.k_block, recipe.qk_dtype, k_max, norm, rotated
    )
    v8, v_scale, v_group = _quantize(
        _transform(v, None, None), recipe.v_scale, V_BLOCK, "e4m3", E4M3_MAX, 1.0
    )

    q_dot_mean = None
    if k_mean is not None:
        of_query_head = k_mean.repeat_interleave(heads_q // heads_k, dim=1)
        q_dot_mean = (q.float() * of_query_head.unsqueeze(1)).sum(dim=-1).transpose(1, 2).contiguous()
    return QuantizedQKV(
        q=q8,
        k=k8,
        vt=permute_v(v8),
        q_scale=_spread(q_scale, q_group, 1, seqlen_q),
        k_scale=_spread(k_scale, k_group, K_GROUP, -(-seqlen_k // K_GROUP)),
        v_scale=_spread(v_scale, v_group, V_BLOCK, -(-seqlen_k // V_BLOCK)),
        q_dot_mean=q_dot_mean,
        seqlen_k=seqlen_k,
        recipe=recipe,
        dtype=dtype,
    )


def from_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    *,
    vt: Tensor | None = None,
) -> QuantizedQKV:
    """Wraps e4m3 tensors that a user already has (FlashAttention-3's signature); only V is copied.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float8_e4m3fn.
        k: (batch, seqlen_k, heads_k, head_dim) float8_e4m3fn.
        v: (batch, seqlen_k, heads_k, head_dim_v) float8_e4m3fn.
        q_descale, k_descale, v_descale: (batch, heads_k) float32, positive, default 1. That of a kv head
            serves all query heads of its group. Scales are expanded with stride 0, not written out.
        vt: (batch, heads_k, head_dim_v, ceil16(seqlen_k)) float8_e4m3fn, `permute_v(v)` where it has been made
            already (by the device kernel); default: made here.

    Returns:
        QuantizedQKV with dtype bfloat16 and the recipe "fp8_tensors" (no rotation, no smoothing, P by code).

    Raises:
        ValueError: a tensor is not 4-D e4m3, or a descale or `vt` has another shape or dtype.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} is {x.dim()}-D {x.dtype}; allowed: 4-D float8_e4m3fn")
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_k = k.shape[1], k.shape[2]
    if vt is None:
        vt = permute_v(v)
    elif vt.dtype != v.dtype or vt.shape != (batch, heads_k, v.shape[3], -(-seqlen_k // 16) * 16):
        want = (batch, heads_k, v.shape[3], -(-seqlen_k // 16) * 16)
        raise ValueError(f"vt is {tuple(vt.shape)} {vt.dtype}; allowed: {want} float8_e4m3fn")

    def descale(name: str, x: Tensor | None) -> Tensor:
        if x is None:
            return torch.ones((), dtype=torch.float32, device=q.device).expand(batch, heads_k)
        if x.shape != (batch, heads_k) or x.dtype != torch.float32:
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}; allowed: {(batch, heads_k)} float32")
        return x

    q_heads = descale("q_descale", q_descale).repeat_interleave(heads_q // heads_k, dim=1)
    return QuantizedQKV(
        q=q,
        k=k,
        vt=vt,
        q_scale=q_heads.unsqueeze(-1).expand(-1, -1, seqlen_q),
        k_scale=descale("k_descale", k_descale).unsqueeze(-1).expand(-1, -1, -(-seqlen_k // K_GROUP)),
        v_scale=descale("v_descale", v_descale).unsqueeze(-1).expand(-1, -1, -(-seqlen_k // V_BLOCK)),
        q_dot_mean=None,
        seqlen_k=seqlen_k,
        recipe=_FP8_TENSORS,
        dtype=torch.bfloat16,
    )
