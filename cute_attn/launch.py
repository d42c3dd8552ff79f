"""Calls of the compiled kernels: outputs, workspace and constants of one shape, made ready for many calls.

A call allocates the output, and a workspace with all 8-bit operands and their scales. When it returns, torch's
allocator has the workspace back, for later work of the same stream. What a shape, a recipe and a device fix
(sizes, offsets, compiled functions, factors) is worked out once, by `Quantiser`, `Forward` and `Attention`.

The compiled functions check dtype, rank, shape and strides of the torch tensors that they take (TVM-FFI), make the
tensors' device current and launch on its current stream. Nothing here synchronises, but for the constants that a
device gets at its first call.
"""

from __future__ import annotations

import functools
import math
import operator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn import validate
from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import (
    K_SCALE_GROUP,
    K_SCALE_PAD,
    QUANTIZE_ROWS_LIMIT,
    V_KEY_PERMUTATION,
    V_SCALE_GROUP,
    Fwd16Config,
    Fwd16Sm80Config,
    FwdConfig,
    MergeConfig,
    QuantizeConfig,
)
from cute_attn.kernels.operands import Layout
from cute_attn.memory import current_device, new_empty, on_device, raw_alloc, raw_delete, raw_stream
from cute_attn.problem import NO_FEATURES, Features
from cute_attn.quantize import (
    Fp8Recipe,
    QuantizedQKV,
    Rotary,
    mean_chunks,
    mean_key,
    rotation_signs,
    static_amax,
    with_positive_scale,
)
from cute_attn.schedule import heads_in_turn
from cute_attn.tiles import DTYPE_NAMES

LOG2_E = math.log2(math.e)

_ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_ALIGNMENT = 16  # bytes: what TMA and 16-byte accesses want of addresses and strides
_BYTES_IN_TURN = (
    32 << 20
)  # of K and V whose tiles are worked on side by side: they stay in the L2 cache of 50 MB
_PART_ALIGNMENT = 128  # bytes, of the parts of a workspace: a line of the L2 cache


_Amax = tuple[Tensor | None, Tensor | None, Tensor | None]  # of q, k, v
_NO_AMAX: _Amax = (None, None, None)
_NO_STRIDES = (0, 0, 0)


@lru_cache(maxsize=64)
def _zero(device: torch.device) -> Tensor:
    """One float32 zero, which the forward kernel reads as q . mean key of every row where K was not smoothed. No fill:
    it would come before later launches of the current stream alone.
    """
    return on_device(torch.zeros(1, dtype=torch.float32, device="cpu"), device)


@lru_cache(maxsize=64)
def _signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    return rotation_signs(head_dim, seed, device=device)


@lru_cache(maxsize=64)
def _sms(device: torch.device) -> int:
    """SMs of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy where its address or a stride is no multiple of 16 bytes."""
    bits = functools.reduce(operator.or_, x.stride()[:-1])
    if (x.data_ptr() | bits * x.element_size()) % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _shape_object(layout: Layout) -> object:
    """The layout as an object that the compiled functions read as it is; a tuple is converted in every call."""
    from tvm_ffi import Shape

    return Shape(layout)


# ------------------------------------------------------------------------------------------------------------
# From 16-bit tensors
# ------------------------------------------------------------------------------------------------------------


class Quantiser:
    """The quantiser for one shape, recipe and device: `quantiser(q, k, v)` is a workspace with the operands.

    Attributes:
        layout: where the operands lie in a workspace.
        layout_object: the same, for compiled functions.
        bytes: of a workspace.
        static: whether passes in torch go before the kernel, which want the workspace as a tensor.
        lse: offset in bytes of room for (batch, heads_q, seqlen_q) float32, which the quantiser leaves alone.
        q_dot: offset of the products of queries with the mean key; None where there is none.

    Raises:
        ValueError: more rows than the quantiser's grid covers.
    """

    def __init__(
        self,
        shape_q: tuple[int, ...],
        shape_k: tuple[int, ...],
        recipe: Fp8Recipe,
        config: QuantizeConfig,
        device: torch.device,
    ):
        """
        Args:
            shape_q: batch, seqlen_q, heads_q and more.
            shape_k: batch, seqlen_k, heads_k and more.
            recipe: what `config` was planned from.
        """
        self.batch, self.seqlen_q, self.heads_q = shape_q[:3]
        self.seqlen_k, self.heads_k = shape_k[1:3]
        for name, seqlen in (("q", self.seqlen_q), ("k", self.seqlen_k)):
            if seqlen > QUANTIZE_ROWS_LIMIT:
                raise ValueError(
                    f"{name} has {seqlen} rows; the quantiser takes at most {QUANTIZE_ROWS_LIMIT}"
                )
        self.recipe, self.config = recipe, config
        self._kernel = compile_kernel(config)
        self._signs = _signs(config.head_dim, recipe.rotation_seed, device) if config.rotate else None
        self.static = "static" in (config.q_mode, config.k_mode, config.v_mode)
        self.layout, self.lse, self.bytes = self._lay_out()
        self.q_dot = self.layout.q_dot if config.smooth else None
        self.layout_object = _shape_object(self.layout)
        self._new_workspace = new_empty((self.bytes,), torch.uint8, device)

    def _lay_out(self) -> tuple[Layout, int, int]:
        """(layout, offset of lse, bytes) of a workspace. Parts are contiguous, but for the padding of K's scales."""
        config, size = self.config, 0

        def part(*extents: int, item: int) -> tuple[int, ...]:
            """Offset and strides, the last one (1) left out."""
            nonlocal size
            offset = _ceil_div(size, _PART_ALIGNMENT) * _PART_ALIGNMENT
            size = offset + item * math.prod(extents)
            return offset, *(math.prod(extents[i + 1 :]) for i in range(len(extents) - 1))

        batch, seqlen_q, heads_q = self.batch, self.seqlen_q, self.heads_q
        seqlen_k, heads_k = self.seqlen_k, self.heads_k
        padded_k = _ceil_div(seqlen_k, V_KEY_PERMUTATION) * V_KEY_PERMUTATION
        k_groups = _ceil_div(seqlen_k, K_SCALE_GROUP * K_SCALE_PAD) * K_SCALE_PAD
        layout = Layout._make(
            (
                seqlen_k,
                heads_k,
                *part(batch, seqlen_q, heads_q, config.head_dim, item=1),
                *part(batch, seqlen_k, heads_k, config.head_dim, item=1),
                *part(batch, heads_k, config.head_dim_v, padded_k, item=1),
                *part(batch, heads_q, seqlen_q, item=4),
                1,
                *part(batch, heads_k, k_groups, item=4),
                *part(batch, heads_k, _ceil_div(seqlen_k, V_SCALE_GROUP), item=4),
                *(0, 0, 0, 0, 0),  # nothing of the mean key
            )
        )
        if config.smooth:
            q_dot, q_dot_batch, q_dot_head = part(batch, heads_q, seqlen_q, item=4)
            sums = part(batch, mean_chunks(seqlen_k)[1], heads_k, config.head_dim, item=4)[0]
            layout = layout._replace(
                q_dot=q_dot, q_dot_batch=q_dot_batch, q_dot_head=q_dot_head, q_dot_row=1, sums=sums
            )
        lse = part(batch, heads_q, seqlen_q, item=4)[0]
        return layout, lse, _ceil_div(size, _PART_ALIGNMENT) * _PART_ALIGNMENT

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_mean: Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """Quantise q (batch, seqlen_q, heads_q, head_dim), k and v, of the shapes, dtype and device planned for.

        A tensor whose address or strides are no multiples of 16 bytes is copied first. The compiled function
        tells: it checks them in every call anyway.

        Args:
            k_mean: (batch, heads_k, head_dim) float32 to subtract from K where the recipe smooths; default
                `mean_key(k)`.
            rotary: what `config.rotary` names, from `check_rotary`.

        Returns:
            The workspace, see `layout`.

        Raises:
            TypeError, ValueError: a tensor is none of those planned for; nothing was launched.
        """
        workspace = self._new_workspace()
        amax, given = _NO_AMAX, 0
        if self.static or k_mean is not None:
            amax, given = self._passes_before(q, k, v, k_mean, rotary, workspace)
        self.fill(workspace.data_ptr(), q, k, v, rotary, amax, given)
        return workspace

    def fill(
        self,
        base: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | None = None,
        amax: _Amax = _NO_AMAX,
        given: int = 0,
    ) -> None:
        """A call for a workspace at the address `base`; amax and given: of `_passes_before`, where `static` is true.

        A given mean is one sum of one sample.
        """
        cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
        try:
            self._kernel(q, k, v, self._signs, *amax, base, self.layout_object, cos, sin, given, given, 0)
            return
        except Exception:  # not bound to a name: with its traceback it would hold this frame, and the inputs
            validate.check_inputs(
                q, k, v
            )  # names the argument, unless it is one that only needs another place
            inputs = (q, k, v, cos, sin)
            aligned = [None if x is None else _aligned(x) for x in inputs]
            if all(x is y for x, y in zip(aligned, inputs, strict=True)):
                raise
        *qkv, cos, sin = aligned
        self._kernel(*qkv, self._signs, *amax, base, self.layout_object, cos, sin, given, given, 0)

    def _passes_before(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_mean: Tensor | None,
        rotary: Rotary | None,
        workspace: Tensor,
    ) -> tuple[_Amax, int]:
        """What is wanted before the kernel runs: largest magnitudes, and whether the mean key is in the workspace."""
        validate.check_inputs(q, k, v)
        smooth = self.recipe.smooth_k
        if smooth and k_mean is None and self.config.k_mode == "static":
            k_mean = mean_key(k, rotary)
        amax = self._largest(q, k, v, k_mean, rotary)
        if not smooth or k_mean is None:
            return amax, 0
        shape, at = k_mean.shape, self.layout.sums
        workspace[at : at + 4 * k_mean.numel()].view(torch.float32).view(shape).copy_(k_mean)
        return amax, 1

    def _largest(
        self, q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, rotary: Rotary | None
    ) -> _Amax:
        """Largest magnitudes (batch, heads) of the tensors whose scale wants them before the kernel runs."""
        config, recipe, signs = self.config, self.recipe, self._signs
        amax_q = amax_k = amax_v = None
        if config.q_mode == "static":
            first = self.seqlen_k - self.seqlen_q  # position of the first query
            amax_q = static_amax(q, recipe.q_scale, signs=signs, rotary=rotary, first=first)  # type: ignore[arg-type]
        if config.k_mode == "static":
            amax_k = static_amax(k, recipe.k_scale, mean=k_mean, signs=signs, rotary=rotary)  # type: ignore[arg-type]
        if config.v_mode == "static":
            amax_v = static_amax(v, recipe.v_scale)  # type: ignore[arg-type]
        return amax_q, amax_k, amax_v

    def operands(self, workspace: Tensor, dtype: torch.dtype) -> QuantizedQKV:
        """The operands in a workspace; `dtype` is that of q, k, v."""
        return QuantizedQKV.in_workspace(Workspace(self, workspace), self.seqlen_k, self.recipe, dtype)

    def tensors(self, workspace: Tensor) -> dict[str, Tensor | None]:
        """The operands in a workspace as tensors, which are views of it."""
        at, config = self.layout, self.config
        codes, e4m3 = workspace.view(_CODES[config.qk_dtype]), workspace.view(torch.float8_e4m3fn)
        floats = workspace.view(torch.float32)
        batch, heads_q, heads_k = self.batch, self.heads_q, self.heads_k
        seqlen_q, seqlen_k = self.seqlen_q, self.seqlen_k
        rows = (batch, heads_q, seqlen_q)
        k_groups, v_groups = _ceil_div(seqlen_k, K_SCALE_GROUP), _ceil_div(seqlen_k, V_SCALE_GROUP)
        padded_k = _ceil_div(seqlen_k, V_KEY_PERMUTATION) * V_KEY_PERMUTATION
        return {
            "q": codes.as_strided(
                (batch, seqlen_q, heads_q, config.head_dim), (at.q_batch, at.q_row, at.q_head, 1), at.q
            ),
            "k": codes.as_strided(
                (batch, seqlen_k, heads_k, config.head_dim), (at.k_batch, at.k_row, at.k_head, 1), at.k
            ),
            "vt": e4m3.as_strided(
                (batch, heads_k, config.head_dim_v, padded_k), (at.vt_batch, at.vt_head, at.vt_dim, 1), at.vt
            ),
            "q_scale": floats.as_strided(rows, (at.q_scale_batch, at.q_scale_head, 1), at.q_scale // 4),
            "k_scale": floats.as_strided(
                (batch, heads_k, k_groups), (at.k_scale_batch, at.k_scale_head, 1), at.k_scale // 4
            ),
            "v_scale": floats.as_strided(
                (batch, heads_k, v_groups), (at.v_scale_batch, at.v_scale_head, 1), at.v_scale // 4
            ),
            "q_dot_mean": floats.as_strided(rows, (at.q_dot_batch, at.q_dot_head, 1), at.q_dot // 4)
            if config.smooth
            else None,
        }


class Workspace(NamedTuple):
    """Operands in a workspace that a quantiser has filled."""

    quantiser: Quantiser
    memory: Tensor

    def tensors(self) -> dict[str, Tensor | None]:
        """See `Quantiser.tensors`."""
        return self.quantiser.tensors(self.memory)


def launch_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Fp8Recipe,
    config: QuantizeConfig,
    *,
    k_mean: Tensor | None = None,
    rotary: Rotary | None = None,
) -> QuantizedQKV:
    """Quantise with the compiled kernels of `config`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) bf16 or fp16 on a CUDA device, last stride 1.
        k, v: (batch, seqlen_k, heads_k, head_dim), likewise; head_dim_v of v is that of `config`.
        recipe: what `config` was planned from.
        k_mean: (batch, heads_k, head_dim) float32 to subtract from K where the recipe smooths; default
            `mean_key(k)`.
        rotary: what `config.rotary` names, from `check_rotary`.

    Raises:
        ValueError: more rows than the quantiser's grid covers.
    """
    quantiser = Quantiser(q.shape, k.shape, recipe, config, q.device)
    return quantiser.operands(quantiser(q, k, v, k_mean, rotary), q.dtype)


def launch_key_sums(
    k: Tensor, v: Tensor, recipe: Fp8Recipe, config: QuantizeConfig, chunk: int, sums: Tensor
) -> None:
    """Sums of the samples of each chunk, in the order of `quantize.sums_of_samples`, of keys that begin with a chunk.

    Args:
        k: (batch, keys, heads_k, head_dim) bf16 or fp16 on a CUDA device, last stride 1.
        v: (batch, keys, heads_k, head_dim_v), likewise; not read.
        recipe: what `config` was planned from; it smooths.
        chunk: samples of one, of `quantize.mean_chunks` of the whole sequence.
        sums: (batch, chunks, heads_k, head_dim) float32, contiguous: where they go.
    """
    k, v = _aligned(k), _aligned(v)
    layout = (k.shape[1], k.shape[2], *[0] * (len(Layout._fields) - 3), sums.data_ptr())  # as in `Forward`
    signs = _signs(config.head_dim, recipe.rotation_seed, k.device) if config.rotate else None
    compile_kernel(config)(k, k, v, signs, *_NO_AMAX, 0, layout, None, None, 0, 0, chunk)


def launch_quantize_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Fp8Recipe,
    config: QuantizeConfig,
    into: QuantizedQKV,
    sums: Tensor | None,
    samples: int,
) -> None:
    """Quantise into tensors that are there, with sums of samples that need not be of these keys.

    Args:
        q, k, v, recipe, config: as in `launch_quantize`, without scales of whole tensors or heads.
        into: tensors of the shapes that `launch_quantize` gives, addresses and strides multiples of 16 bytes, rows of
            k_scale readable to a multiple of K_SCALE_PAD. Products with the mean key where the recipe smooths.
        sums: (batch, chunks, heads_k, head_dim) float32, contiguous, where the recipe smooths: their sum in this order
            over `samples` is the mean key. Else None.
    """
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    dot = into.q_dot_mean
    layout = (  # the fields of Layout, likewise
        k.shape[1],
        k.shape[2],
        into.q.data_ptr(),
        *into.q.stride()[:3],
        into.k.data_ptr(),
        *into.k.stride()[:3],
        into.vt.data_ptr(),
        *into.vt.stride()[:3],
        into.q_scale.data_ptr(),
        *into.q_scale.stride(),
        into.k_scale.data_ptr(),
        *into.k_scale.stride()[:2],
        into.v_scale.data_ptr(),
        *into.v_scale.stride()[:2],
        *((0, *_NO_STRIDES) if dot is None else (dot.data_ptr(), *dot.stride())),
        0 if sums is None else sums.data_ptr(),
    )
    signs = _signs(config.head_dim, recipe.rotation_seed, q.device) if config.rotate else None
    given = 0 if sums is None else sums.shape[1]
    compile_kernel(config)(q, k, v, signs, *_NO_AMAX, 0, layout, None, None, given, samples, 0)


def launch_transpose_v(v: Tensor, config: QuantizeConfig) -> Tensor:
    """Ready e4m3 V (batch, seqlen_k, heads_k, head_dim) to the forward kernel's operand.

    Returns:
        (batch, heads_k, head_dim, seqlen_k rounded up to a multiple of V_KEY_PERMUTATION) e4m3.
    """
    batch, seqlen_k, heads_k, head_dim = v.shape
    padded = _ceil_div(seqlen_k, V_KEY_PERMUTATION) * V_KEY_PERMUTATION
    vt = torch.empty((batch, heads_k, head_dim, padded), dtype=v.dtype, device=v.device)
    compile_kernel(config)(_aligned(v), vt)
    return vt


# ------------------------------------------------------------------------------------------------------------
# From 8-bit operands
# ------------------------------------------------------------------------------------------------------------


def _padded_rows(k_scale: Tensor) -> Tensor:
    """K scales with contiguous rows that are readable to a multiple of K_SCALE_PAD; copied if need be."""
    batch, heads, groups = k_scale.shape
    width = _ceil_div(groups, K_SCALE_PAD) * K_SCALE_PAD
    s0, s1, s2 = k_scale.stride()
    end = k_scale.storage_offset() + (batch - 1) * s0 + (heads - 1) * s1 + width
    aligned = s2 == 1 and s0 % K_SCALE_PAD == 0 and s1 % K_SCALE_PAD == 0 and k_scale.data_ptr() % 16 == 0
    if aligned and 4 * end <= k_scale.untyped_storage().nbytes():
        return k_scale
    padded = torch.nn.functional.pad(k_scale, (0, width - groups), value=1.0).contiguous()
    return padded[..., :groups]


class Forward:
    """The forward kernel for one shape of the output, mask, scale and device: `forward(qkv)` is (out, lse).

    Attributes:
        kernel: the compiled function, see `FwdEntry`; addresses that it gets must hold until it returns.
        new_out, new_lse: allocate results.
        zero: address of a zero, for rows that have no product with a mean key.
        factors: arguments of `kernel` behind the layout, up to ALiBi's slopes and the sinks.
        ends: those behind them.
    """

    def __init__(
        self,
        shape_out: tuple[int, ...],
        shape_k: tuple[int, ...],
        config: FwdConfig,
        softmax_scale: float,
        device: torch.device,
        features: Features = NO_FEATURES,
    ):
        """
        Args:
            shape_out: (batch, seqlen_q, heads_q, head_dim_v).
            shape_k: batch, seqlen_k, heads_k and more.
            softmax_scale: any finite factor.
            features: window and softcap, where `config` has them.
        """
        batch, seqlen_q, heads_q, _ = shape_out
        sms = _sms(device)
        turn = heads_in_turn(config, batch, heads_q, shape_k[2], seqlen_q, shape_k[1], sms)
        self.kernel = compile_kernel(config)
        self.new_out = new_empty(shape_out, _ELEMENTS[config.out_dtype], device)
        self.new_lse = new_empty((batch, heads_q, seqlen_q), torch.float32, device)
        self._zero = _zero(device)  # held as long as its address
        self.zero = self._zero.data_ptr()
        self._given_scale = softmax_scale
        scale = abs(softmax_scale) or 1.0  # see `with_positive_scale`
        softcap = features.softcap if config.softcap else 0.0
        self.factors = (scale, (softcap or scale) * LOG2_E, sms, turn)
        factor = 2.0 * LOG2_E * scale / softcap if softcap else None
        window = _window_ends(features.window, seqlen_q, shape_k[1]) if config.window else (None, None)
        self.ends = (factor, *window)

    def __call__(
        self, qkv: QuantizedQKV, slopes: Tensor | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """For operands that `validate.check_quantized` accepts.

        Args:
            slopes: (batch, heads_q) float32, any strides, where the configuration has ALiBi; else None.
            sinks: (heads_q,) float32, likewise where it has sinks.
        """
        qkv, _ = with_positive_scale(qkv, self._given_scale)
        q, k, vt = _aligned(qkv.q), _aligned(qkv.k), _aligned(qkv.vt)
        k_scale = _padded_rows(qkv.k_scale)
        v_scale = qkv.v_scale if qkv.v_scale.stride(2) == 1 else qkv.v_scale.contiguous()
        dot = qkv.q_dot_mean
        layout = (  # the fields of Layout; as it is made anew in every call, a tuple serves
            qkv.seqlen_k,
            k.shape[2],
            q.data_ptr(),
            *q.stride()[:3],
            k.data_ptr(),
            *k.stride()[:3],
            vt.data_ptr(),
            *vt.stride()[:3],
            qkv.q_scale.data_ptr(),
            *qkv.q_scale.stride(),
            k_scale.data_ptr(),
            *k_scale.stride()[:2],
            v_scale.data_ptr(),
            *v_scale.stride()[:2],
            0,
            *(_NO_STRIDES if dot is None else dot.stride()),
            0,
        )
        out, lse = self.new_out(), self.new_lse()
        lse_add = self.zero if dot is None else dot.data_ptr()
        self.kernel(out, 0, lse.data_ptr(), lse_add, layout, *self.factors, slopes, sinks, *self.ends)
        return out, lse

    def in_workspace(
        self,
        quantiser: Quantiser,
        base: int,
        return_lse: bool,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Out, or (out, lse), for the operands in a workspace of the quantiser, for a softmax_scale > 0.

        Args:
            base: address of the workspace.
            slopes, sinks: as those of a call.
        """
        out = self.new_out()
        lse = self.new_lse() if return_lse else None
        lse_at = base + quantiser.lse if lse is None else lse.data_ptr()
        lse_add = self.zero if quantiser.q_dot is None else base + quantiser.q_dot
        layout = quantiser.layout_object
        self.kernel(out, base, lse_at, lse_add, layout, *self.factors, slopes, sinks, *self.ends)
        return out if lse is None else (out, lse)


def launch_merge(
    before: Tensor, lse_before: Tensor, part: Tensor, lse: Tensor, out: Tensor, lse_out: Tensor
) -> None:
    """Merge attention over two parts of the keys with the compiled kernel, see any/merge.py.

    Args:
        before, out: (batch, rows, heads, head_dim_v) float32 or of the dtype of `part`; out may be before.
        part: likewise, float16 or bfloat16.
        lse_before, lse, lse_out: (batch, heads, rows) float32, any strides; lse_out may be lse_before.
    """
    wide = (x.dtype == torch.float32 for x in (before, out))
    config = MergeConfig(part.shape[3], DTYPE_NAMES[part.dtype], *wide)
    compile_kernel(config)(before, part, out, lse_before, lse, lse_out)


def _window_ends(window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(left, right) as kernels take them: they count keys, and none is a number that hides nothing."""
    left, right = window
    return seqlen_k if left < 0 else min(left, seqlen_k), seqlen_q if right < 0 else min(right, seqlen_q)


def launch_forward(
    qkv: QuantizedQKV,
    config: FwdConfig,
    *,
    causal: bool,
    softmax_scale: float,
    out_dtype: torch.dtype,
    features: Features = NO_FEATURES,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the compiled forward kernel of `config`.

    Args: as those of `Forward`.

    Returns:
        (out, lse): (batch, seqlen_q, heads_q, head_dim_v) of `out_dtype`, (batch, heads_q, seqlen_q) float32.
    """
    assert config.causal == causal and _ELEMENTS[config.out_dtype] == out_dtype, "plan and call disagree"
    shape = (*qkv.q.shape[:3], config.head_dim_v)
    forward = Forward(shape, qkv.k.shape, config, softmax_scale, qkv.q.device, features)
    return forward(qkv, alibi_slopes, sinks)


# ------------------------------------------------------------------------------------------------------------
# Both
# ------------------------------------------------------------------------------------------------------------


class Attention:
    """Quantising and attending for one shape, recipe, mask, scale and device, with the operands in a workspace."""

    def __init__(
        self,
        shape_q: tuple[int, ...],
        shape_k: tuple[int, ...],
        recipe: Fp8Recipe,
        quantize_config: QuantizeConfig,
        config: FwdConfig,
        softmax_scale: float,
        device: torch.device,
        features: Features = NO_FEATURES,
    ):
        """
        Args:
            shape_q: batch, seqlen_q, heads_q and more.
            shape_k: batch, seqlen_k, heads_k and more.
            recipe, quantize_config, config, features: of one plan.
            softmax_scale: any finite factor.
        """
        self._quantiser = Quantiser(shape_q, shape_k, recipe, quantize_config, device)
        shape_out = (*shape_q[:3], config.head_dim_v)
        self._forward = Forward(shape_out, shape_k, config, softmax_scale, device, features)
        # Q carries the sign of the scale, or 0: exact, as rounding is symmetric.
        self._q_factor = None if softmax_scale > 0 else -1.0 if softmax_scale else 0.0
        self._device, self._index = device, device.index

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_lse: bool,
        rotary: Rotary | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Out (batch, seqlen_q, heads_q, head_dim_v), or (out, lse).

        slopes and sinks are as those of `Forward.__call__`, errors as those of `Quantiser.__call__`.
        """
        index = self._index
        if current_device() != index:  # the workspace is for the current one
            with torch.cuda.device(self._device):
                return self(q, k, v, return_lse, rotary, slopes, sinks)
        quantiser, forward = self._quantiser, self._forward
        if self._q_factor is not None:
            q = q * self._q_factor
        if quantiser.static:
            workspace = quantiser(q, k, v, None, rotary)
            return forward.in_workspace(quantiser, workspace.data_ptr(), return_lse, slopes, sinks)
        base = raw_alloc(quantiser.bytes, raw_stream(index))
        try:
            quantiser.fill(base, q, k, v, rotary)
            return forward.in_workspace(quantiser, base, return_lse, slopes, sinks)
        finally:
            raw_delete(base)


# ------------------------------------------------------------------------------------------------------------
# 16 bits
# ------------------------------------------------------------------------------------------------------------


class Forward16:
    """The 16-bit forward kernel for one shape, mask, scale and device: `forward(q, k, v)` is (out, lse)."""

    def __init__(
        self,
        shape_q: tuple[int, ...],
        shape_v: tuple[int, ...],
        config: Fwd16Config | Fwd16Sm80Config,
        device: torch.device,
        *,
        softmax_scale: float,
        softcap: float = 0.0,
        window: tuple[int, int] = (-1, -1),
        sms: int | None = None,
    ):
        """
        Args:
            shape_q: batch, seqlen_q, heads_q and more.
            shape_v: (batch, seqlen_k, heads_k, head_dim_v), no dimension empty, as those of q.
            softmax_scale: any finite factor.
            softcap: > 0 where `config` has it.
            window: keys before and behind a query's own position, -1 for all; read where `config` has it.
            sms: CTAs at most of the Hopper kernel; default the SMs of the device.
        """
        batch, seqlen_q, heads_q = shape_q[:3]
        _, seqlen_k, heads_k, head_dim_v = shape_v
        order: tuple[int, ...]
        if isinstance(config, Fwd16Config):
            sms = _sms(device) if sms is None else sms
            order = (sms, heads_in_turn(config, batch, heads_q, heads_k, seqlen_q, seqlen_k, sms))
        else:
            order = (_heads_together(config, batch * heads_k, seqlen_k),)
        self._kernel = compile_kernel(config)
        self._new_out = new_empty((batch, seqlen_q, heads_q, head_dim_v), _ELEMENTS[config.dtype], device)
        self._new_lse = new_empty((batch, heads_q, seqlen_q), torch.float32, device)
        self._no_slopes, self._no_sinks = _zero(device).expand(batch, heads_q), _zero(device).expand(heads_q)
        self._q_factor, *factors = _factors16(softmax_scale, softcap)
        self._rest = (*factors, *_window_ends(window, seqlen_q, seqlen_k), *order)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel.

        Args:
            q, k, v: (batch, seqlen, heads, dim) of the dtype of the configuration on the device, last stride 1,
                addresses and strides multiples of 16 bytes.
            slopes: (batch, heads_q) float32, any strides, where the configuration has ALiBi; else None.
            sinks: (heads_q,) float32, likewise where it has sinks.

        Returns:
            (out, lse): (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, (batch, heads_q, seqlen_q) float32.
        """
        if self._q_factor is not None:
            q = q * self._q_factor
        out, lse = self._new_out(), self._new_lse()
        slopes = self._no_slopes if slopes is None else slopes
        sinks = self._no_sinks if sinks is None else sinks
        self._kernel(q, k, v, out, lse, slopes, sinks, *self._rest)
        return out, lse


def _heads_together(config: Fwd16Sm80Config, heads: int, seqlen_k: int) -> int:
    """Of `heads` key heads of all sequences, those whose tiles are mixed, the longest first, under a causal mask: as
    many as keep their K and V in L2. A CTA starts where one has ended, so nothing else has to come out even."""
    head_bytes = 2 * seqlen_k * (config.head_dim + config.head_dim_v)
    return min(max(_BYTES_IN_TURN // head_bytes, 1), heads) if config.causal else 1


def launch_forward16_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    config: Fwd16Config | Fwd16Sm80Config,
    *,
    seqused_k: Tensor | None = None,
    softmax_scale: float,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sms: int | None = None,
    only_starts: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the compiled 16-bit forward kernel of `config`, which is one of sequences of unlike length.

    Args:
        q, k, v: (total, heads, dim), otherwise as in `Forward16`.
        cu_seqlens_q, cu_seqlens_k, seqused_k: as in `flash_attn_varlen_func`.
        softmax_scale, softcap, window, sms: as those of `Forward16`; alibi_slopes, sinks: as those of its calls.
        only_starts: `cu_seqlens_k` only says where sequences begin, in any order; `seqused_k`, which must be given,
            says how many keys they have.
        out, lse: where results go, of the shapes below; allocated where None. Strides of out as those of q.

    Returns:
        (out, lse): (total_q, heads_q, head_dim_v) of q's dtype, (heads_q, total_q) float32.
    """
    total_q, heads_q, head_dim = q.shape
    total_k, _, head_dim_v = v.shape
    batch, device = cu_seqlens_q.shape[0] - 1, q.device
    q_factor, *factors = _factors16(softmax_scale, softcap)
    if q_factor is not None:
        q = q * q_factor
    if out is None:
        out = torch.empty((total_q, heads_q, head_dim_v), dtype=q.dtype, device=device)
    if lse is None:
        lse = torch.empty((heads_q, total_q), dtype=torch.float32, device=device)
    hopper = isinstance(config, Fwd16Config)
    compile_kernel(config)(
        q,
        k,
        v,
        out,
        lse,
        _zero(device).expand(batch, heads_q) if alibi_slopes is None else alibi_slopes,
        _zero(device).expand(heads_q) if sinks is None else sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k if seqused_k is None else seqused_k,
        *([torch.empty((1,), dtype=torch.int32, device=device)] if hopper else []),  # counter of tiles
        *factors,
        *_window_ends(window, total_q, total_k),
        2 if only_starts else int(seqused_k is not None),
        *([_sms(device) if sms is None else sms] if hopper else []),
        _BYTES_IN_TURN // (2 * (head_dim + head_dim_v)),
    )
    return out, lse


def _factors16(softmax_scale: float, softcap: float) -> tuple[float | None, float, float]:
    """What the kernel wants of scores: (factor of q, None for 1; softmax_scale_log2; softcap_factor)."""
    # The kernel takes the maximum of scores before the scale, which must be > 0 for that. Signs and zero go to Q.
    q_factor = None
    if softmax_scale <= 0:
        q_factor = math.copysign(1.0, softmax_scale) if softmax_scale else 0.0
        softmax_scale = -softmax_scale or 1.0
    return (
        q_factor,
        (softcap or softmax_scale) * LOG2_E,
        2.0 * LOG2_E * softmax_scale / softcap if softcap else 0.0,
    )
