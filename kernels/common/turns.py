"""Counts in memory by which CTAs wait for others: turns in which they add to a sum, so that its order is fixed."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def await_turn(turn):
    """Wait until all key tiles before this one have added. Called by one thread of those that share a turn.

    turn is (address of the count of tiles that have added, tiles before this one). A tile waits for tiles of the same
    head alone whose CTAs have started before its own, see `scheduler.tiles_before`.
    """
    address, before = turn
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    done = cute.arch.load(pointer, Int32, sem="acquire", scope="gpu")
    while done != before:
        done = cute.arch.load(pointer, Int32, sem="acquire", scope="gpu")


@cute.jit
def end_turn(turn):
    """Let the next key tile add. Called by one thread, when all adds of those that share the turn are done."""
    pointer = cute.make_ptr(Int32, turn[0], cute.AddressSpace.gmem, assumed_align=4)
    cute.arch.red(pointer, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
