"""Calls like this one: what checks and planning made of a call's arguments, kept for the next with the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

__all__ = ["Key", "Remembered", "signature"]

Key = tuple[object, ...]
T = TypeVar("T")


def signature(x: Tensor) -> Key:
    """All that checks and planning read of a tensor. Raises one of several errors for anything but a dense tensor."""
    return type(x), x.shape, x.stride(), x.dtype, x.device


class Remembered(dict[Key, T]):
    """A dict of at most `limit` entries, which then starts anew: a server that sees ever new lengths must not grow
    without bound."""

    def __init__(self, limit: int = 4096):
        super().__init__()
        self.limit = limit

    def find(
        self, given: Iterable[object], options: Key, more: Iterable[object] = ()
    ) -> tuple[Key, T | None]:
        """(key, what was kept under it) of a call; the key is empty where an argument is none that is allowed.

        Args:
            given: tensors, or None.
            options: the other arguments.
            more: parts of options whose types count, too, as the ends of a window.
        """
        try:
            tensors = [None if x is None else signature(x) for x in given]  # type: ignore[arg-type]
            key = (
                *tensors,
                *options,
                *map(type, (*options, *more)),
            )  # True equals 1 and is not allowed for it
            return key, self.get(key)
        except (AttributeError, RuntimeError, TypeError):
            return (), None  # not a dense tensor, or unhashable: the checks name the argument

    def keep(self, key: Key, value: T) -> T:
        """Keep a value, unless the key is empty; returns it."""
        if key:
            if len(self) >= self.limit:
                self.clear()
            self[key] = value
        return value
