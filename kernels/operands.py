"""Where the operands of the forward kernel lie, as integers: what Python and the compiled host functions agree on.

No import of the CuTe DSL: Python fills a `Layout` with ints, the host entries (entry.py) read the same fields at run
time.
"""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Sizes that the output does not show, and of each operand the offset in bytes and the strides in elements.

    Offsets count from one base address: that of a workspace which holds all parts, or 0 where the parts are tensors
    of their own and the offsets their addresses. The last stride of q, k, vt, k_scale and v_scale is 1. Shapes are
    those of `cute_attn.quantize.QuantizedQKV`.
    """

    seqlen_k: int
    heads_k: int
    q: int
    q_batch: int
    q_row: int
    q_head: int
    k: int
    k_batch: int
    k_row: int
    k_head: int
    vt: int
    vt_batch: int
    vt_head: int
    vt_dim: int
    q_scale: int
    q_scale_batch: int
    q_scale_head: int
    q_scale_row: int
    k_scale: int
    k_scale_batch: int
    k_scale_head: int
    v_scale: int
    v_scale_batch: int
    v_scale_head: int
    q_dot: int  # of the quantiser; the forward kernel gets an address of its own for it
    q_dot_batch: int
    q_dot_head: int
    q_dot_row: int
    sums: int  # of the quantiser alone: (batch, chunks, heads_k, head_dim) float32, contiguous
