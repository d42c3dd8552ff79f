"""Pointers with a promise."""

from __future__ import annotations

import cutlass.cute as cute


def aligned(pointer: cute.Pointer, size: int) -> cute.Pointer:
    """The same address, of which the caller knows that it is a multiple of `size` bytes.

    `pointer.align` is no promise: it rounds the address up at run time.
    """
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=size)
