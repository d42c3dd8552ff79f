"""What the policies of both precisions share: element types, layouts in shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup as wg
from cutlass.tensor_utils import LayoutEnum

ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def row_major_atom(dtype, columns: int):
    """Swizzle atom of a tile with `columns` contiguous elements a row."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
    return wg.make_smem_layout_atom(kind, dtype)


def column_major_atom(dtype, rows: int):
    """Swizzle atom of a tile with `rows` contiguous elements a column."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.COL_MAJOR, dtype, rows)
    return wg.make_smem_layout_atom(kind, dtype)


@cute.jit
def row_max(value: Float32, nan: cutlass.Constexpr = False) -> Float32:
    """Maximum over the four lanes that hold a row."""
    for step in cutlass.range_constexpr(2):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step), nan=nan)
    return value


@cute.jit
def opaque_zero() -> Float32:
    """Zero, set where it is called: a constant would be set behind the fence of the product that names it."""
    return cute.arch.inline_ptx("mov.f32 {$w0}, 0f00000000;", write_only_types=[Float32])


def heads_last(x: cute.Tensor) -> cute.Tensor:
    """(batch, heads, rows) -> (rows, heads, batch)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [2, 1, 0]))
