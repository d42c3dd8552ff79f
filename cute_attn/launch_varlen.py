"""Calls of the compiled 8-bit kernels for sequences of unlike length; `cute_attn.launch` has what is said of calls.

The rows of all sequences stand behind one another, and only the device knows where one ends. The host knows the totals,
which is enough to place the operands: of what belongs to blocks of keys of a sequence (V^T, scales of K and V, sums for
the mean key) there are `slots` (see kernels/common/varlen.py).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn import launch
from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import (
    K_SCALE_GROUP,
    MEAN_SPAN,
    QUANTIZE_SPAN,
    QUANTIZE_SPANS_LIMIT,
    V_KEY_PERMUTATION,
    V_SCALE_GROUP,
    FwdConfig,
    QuantizeConfig,
)
from cute_attn.kernels.operands import Layout
from cute_attn.launch import LOG2_E
from cute_attn.problem import Features
from cute_attn.quantize import Fp8Recipe, QuantizedQKV

_ROWS_LIMIT = 2**31  # rows and their heads are counted in int32


def slots(total: int, batch: int, block: int) -> int:
    """Slots of blocks of `block` rows, of `total` rows in `batch` sequences."""
    return total // block + batch


def first_slot(row: int, sequence: int, block: int) -> int:
    """Slot of the first block of a sequence that begins at `row`."""
    return row // block + sequence


class _Places(NamedTuple):
    """Where what Layout does not name lies in a workspace, in bytes."""

    counter: int  # of tiles
    lse: int  # room for (heads_q, total_q) float32
    size: int


class VarlenAttention:
    """Quantising and attending for one number of rows and sequences, recipe, mask, scale and device.

    Attributes:
        layout: where the operands lie in a workspace; strides of a batch are 0, but that of V^T.

    Raises:
        ValueError: more rows or sequences than the kernels' grids cover.
    """

    def __init__(
        self,
        shape_q: tuple[int, ...],
        shape_k: tuple[int, ...],
        batch: int,
        recipe: Fp8Recipe,
        quantize_config: QuantizeConfig,
        config: FwdConfig,
        softmax_scale: float,
        device: torch.device,
        features: Features,
    ):
        """
        Args:
            shape_q: total_q > 0, heads_q and more.
            shape_k: total_k > 0, heads_k and more.
            batch: sequences, at least 1.
            recipe, quantize_config, config, features: of one plan.
            softmax_scale: any finite factor.
        """
        self.total_q, self.heads_q = shape_q[:2]
        self.total_k, self.heads_k = shape_k[:2]
        self.batch, self.recipe, self.config = batch, recipe, quantize_config
        self._check_limits()
        self._slots = slots(self.total_k, batch, V_SCALE_GROUP)
        self.layout, self._places = self._lay_out()
        self._layout_object = launch._shape_object(self.layout)
        self._quantise, self._forward = compile_kernel(quantize_config), compile_kernel(config)
        rotates = quantize_config.rotate
        self._signs = (
            launch._signs(quantize_config.head_dim, recipe.rotation_seed, device) if rotates else None
        )
        new = functools.partial(torch.empty, device=device)
        self._new_workspace = functools.partial(new, self._places.size, dtype=torch.uint8)
        shape_out = (self.total_q, self.heads_q, config.head_dim_v)
        self._new_out = functools.partial(new, shape_out, dtype=launch._ELEMENTS[config.out_dtype])
        self._new_lse = functools.partial(new, (self.heads_q, self.total_q), dtype=torch.float32)
        self._zero = launch._zero(device)  # held as long as its address
        # Q carries the sign of the scale, or 0: exact, as rounding is symmetric.
        self._q_factor = None if softmax_scale > 0 else -1.0 if softmax_scale else 0.0
        scale = abs(softmax_scale) or 1.0
        softcap = features.softcap
        in_turn = launch._BYTES_IN_TURN // (config.head_dim + config.head_dim_v)
        self._factors = (scale, (softcap or scale) * LOG2_E, launch._sms(device), in_turn)
        window = (
            launch._window_ends(features.window, self.total_q, self.total_k)
            if config.window
            else (None, None)
        )
        self._ends = (2.0 * LOG2_E * scale / softcap if softcap else None, *window)

    def _check_limits(self) -> None:
        spans = slots(max(self.total_q, self.total_k), self.batch, QUANTIZE_SPAN)
        if spans > QUANTIZE_SPANS_LIMIT:
            raise ValueError(
                f"q has {self.total_q} rows, k {self.total_k}, in {self.batch} sequences; the quantiser takes at most "
                f"{QUANTIZE_SPANS_LIMIT} of {QUANTIZE_SPAN} rows each, one of every sequence not counted"
            )
        if self.total_q * self.heads_q >= _ROWS_LIMIT:
            raise ValueError(f"q has {self.total_q} rows of {self.heads_q} heads; allowed: below 2^31")

    def _lay_out(self) -> tuple[Layout, _Places]:
        config, size = self.config, 0

        def part(*extents: int, item: int) -> int:
            """Offset of a part."""
            nonlocal size
            offset = -(-size // launch._PART_ALIGNMENT) * launch._PART_ALIGNMENT
            size = offset + item * math.prod(extents)
            return offset

        total_q, heads_q, total_k, heads_k = self.total_q, self.heads_q, self.total_k, self.heads_k
        d, d_v = config.head_dim, config.head_dim_v
        keys = self._slots * V_SCALE_GROUP
        groups = keys // K_SCALE_GROUP
        layout = Layout(
            seqlen_k=total_k,
            heads_k=heads_k,
            q=part(total_q, heads_q, d, item=1),
            q_batch=0,
            q_row=heads_q * d,
            q_head=d,
            k=part(total_k, heads_k, d, item=1),
            k_batch=0,
            k_row=heads_k * d,
            k_head=d,
            vt=part(heads_k, d_v, keys, item=1),
            vt_batch=heads_k * d_v * keys,
            vt_head=d_v * keys,
            vt_dim=keys,
            q_scale=part(heads_q, total_q, item=4),
            q_scale_batch=0,
            q_scale_head=total_q,
            q_scale_row=1,
            k_scale=part(heads_k, groups, item=4),
            k_scale_batch=0,
            k_scale_head=groups,
            v_scale=part(heads_k, self._slots, item=4),
            v_scale_batch=0,
            v_scale_head=self._slots,
            q_dot=part(heads_q, total_q, item=4) if config.smooth else 0,
            q_dot_batch=0,
            q_dot_head=total_q if config.smooth else 0,
            q_dot_row=1 if config.smooth else 0,
            sums=part(slots(total_k, self.batch, MEAN_SPAN), heads_k, d, item=4) if config.smooth else 0,
        )
        counter, lse = part(1, item=4), part(heads_q, total_q, item=4)
        return layout, _Places(counter, lse, part(0, item=1))

    def quantise(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        """A workspace with the operands: q (total_q, heads_q, head_dim), k and v of the shapes planned for.

        A tensor whose address or strides are no multiples of 16 bytes is copied first.
        """
        workspace = self._new_workspace()
        self._quantise(
            launch._aligned(q),
            launch._aligned(k),
            launch._aligned(v),
            cu_seqlens_q,
            cu_seqlens_k,
            self._signs,
            workspace.data_ptr(),
            self._layout_object,
            self._slots,
        )
        return workspace

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        return_lse: bool,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Out (total_q, heads_q, head_dim_v), or (out, lse (heads_q, total_q) float32).

        Args:
            cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32.
            slopes: (batch, heads_q) float32, any strides, where the configuration has ALiBi; else None.
            sinks: (heads_q,) float32, likewise where it has sinks.
        """
        if self._q_factor is not None:
            q = q * self._q_factor
        workspace = self.quantise(q, k, v, cu_seqlens_q, cu_seqlens_k)
        base, places = workspace.data_ptr(), self._places
        out = self._new_out()
        lse = self._new_lse() if return_lse else None
        self._forward(
            out,
            cu_seqlens_q,
            cu_seqlens_k,
            base,
            base + places.counter,
            base + places.lse if lse is None else lse.data_ptr(),
            base + self.layout.q_dot if self.config.smooth else self._zero.data_ptr(),
            self._layout_object,
            self._slots,
            *self._factors,
            slopes,
            sinks,
            *self._ends,
        )
        return out if lse is None else (out, lse)

    def operands(
        self,
        workspace: Tensor,
        rows: tuple[int, int],
        keys: tuple[int, int],
        sequence: int,
        dtype: torch.dtype,
    ) -> QuantizedQKV:
        """The operands of one sequence in a workspace, a batch of one; views.

        Args:
            rows, keys: first row or key of the sequence, and the end of it, of which the caller knows.
            sequence: its number.
            dtype: that of q, k, v.
        """
        at, config = self.layout, self.config
        codes, e4m3 = workspace.view(launch._CODES[config.qk_dtype]), workspace.view(torch.float8_e4m3fn)
        floats = workspace.view(torch.float32)
        (row, row_end), (key, key_end) = rows, keys
        seqlen_q, seqlen_k, d = row_end - row, key_end - key, config.head_dim
        slot = first_slot(key, sequence, V_SCALE_GROUP)
        padded = -(-seqlen_k // V_KEY_PERMUTATION) * V_KEY_PERMUTATION
        k_groups, v_groups = -(-seqlen_k // K_SCALE_GROUP), -(-seqlen_k // V_SCALE_GROUP)

        def view(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
            return x.as_strided((1, *shape), (0, *strides), offset)

        of_rows, of_heads = (self.heads_q, seqlen_q), (at.q_scale_head, 1)
        return QuantizedQKV(
            q=view(codes, (seqlen_q, self.heads_q, d), (at.q_row, at.q_head, 1), at.q + row * at.q_row),
            k=view(codes, (seqlen_k, self.heads_k, d), (at.k_row, at.k_head, 1), at.k + key * at.k_row),
            vt=view(
                e4m3,
                (self.heads_k, config.head_dim_v, padded),
                (at.vt_head, at.vt_dim, 1),
                at.vt + slot * V_SCALE_GROUP,
            ),
            q_scale=view(floats, of_rows, of_heads, at.q_scale // 4 + row),
            k_scale=view(
                floats,
                (self.heads_k, k_groups),
                (at.k_scale_head, 1),
                at.k_scale // 4 + slot * (V_SCALE_GROUP // K_SCALE_GROUP),
            ),
            v_scale=view(floats, (self.heads_k, v_groups), (at.v_scale_head, 1), at.v_scale // 4 + slot),
            q_dot_mean=view(floats, of_rows, of_heads, at.q_dot // 4 + row) if config.smooth else None,
            seqlen_k=seqlen_k,
            recipe=self.recipe,
            dtype=dtype,
        )
