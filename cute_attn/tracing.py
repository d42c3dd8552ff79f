"""Frames of calls: functions that torch.compile does not trace, and the line that a warning names."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

__all__ = ["caller_level", "untraced", "warn_once"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, which torch.compile calls as it is, between two graphs.

    Traced, its checks would see stand-ins for tensors, and what they remember for later calls would be of these. With
    fullgraph=True it is an error of torch. A plain call has one more frame, and no other cost.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            return _between_graphs(function, args, kwargs)
        return function(*args, **kwargs)

    return call


@_disable_dynamo  # as torch.compiler.disable, which would import the compiler here: seconds
def _between_graphs(function: Callable[..., _T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _T:
    return function(*args, **kwargs)


def caller_level() -> int:
    """`stacklevel` for a warning of the function that asks: it then names the line that called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "cute_attn":
        frame, level = frame.f_back, level + 1
    return level


_said: set[str] = set()


def warn_once(kind: str, message: str) -> None:
    """A UserWarning that names the line that called this package, the first time that one of its kind comes up."""
    if kind not in _said:
        _said.add(kind)
        warnings.warn(message, UserWarning, stacklevel=caller_level())
