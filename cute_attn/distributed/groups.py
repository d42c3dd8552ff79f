"""Process groups, and the check that all ranks ask for the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "agree", "group_of", "groups_of"]

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""A process group, a DeviceMesh of one dimension, or None for all ranks."""

_T = TypeVar("_T")


def group_of(group: Group) -> dist.ProcessGroup:
    """The process group.

    Raises:
        TypeError: neither a group, nor a mesh, nor None.
        ValueError: a mesh of several dimensions, a group that this rank is not in, or no torch.distributed.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "torch.distributed has no process group; allowed: a call after torch.distributed.init_process_group"
        )
    if group is None:
        found = dist.group.WORLD
        assert found is not None
        return found
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a mesh of {group.ndim} dimensions; allowed: one")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}; allowed: a ProcessGroup, a DeviceMesh or None")
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in group; allowed: a group that it is in")
    return group


def groups_of(mesh: object) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(ring, Ulysses) groups of this rank in a mesh of these two dimensions.

    Raises:
        TypeError: no mesh.
        ValueError: not two dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; allowed: a DeviceMesh")
    if mesh.ndim != 2:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; allowed: 2, (ring, ulysses)")
    return mesh.get_group(0), mesh.get_group(1)


_agreed: WeakKeyDictionary[dist.ProcessGroup, set[object]] = WeakKeyDictionary()


def agree(groups: tuple[dist.ProcessGroup, ...], check: Callable[[], tuple[Mapping[str, object], _T]]) -> _T:
    """Check the arguments of this rank, and that they are those of all others, once for a set of them.

    A rank whose arguments are wrong tells the others, so that all of them raise. Later calls with arguments that passed
    here cost no message, and so a rank that then comes with others is found by the timeout of the group alone.

    Args:
        groups: of a mesh, the innermost last; every rank is in one group of each dimension.
        check: refuses wrong arguments of this rank; returns those that must be alike, by name, hashable, and a result
            that they determine.

    Returns:
        The result of `check`.

    Raises:
        ValueError: ranks differ, or another one has refused its arguments; the text says which and why.
        Exception: what `check` raised.
    """
    mine: Mapping[str, object] | None = None
    refused: Exception | None = None
    try:
        mine, result = check()
        key = tuple(mine.items())
        if all(key in _agreed.get(group, ()) for group in groups):
            return result
    except Exception as error:
        refused = error
    found: list[tuple[dict[str, str] | None, str]] = [
        (None, str(refused)) if mine is None else ({name: str(x) for name, x in mine.items()}, "")
    ]
    try:
        for group in reversed(groups):  # a rank's order in the end is that of the mesh
            parts: list[list[tuple[dict[str, str] | None, str]]] = [
                [] for _ in range(dist.get_world_size(group))
            ]
            dist.all_gather_object(parts, found, group=group)
            found = [entry for part in parts for entry in part]
    except Exception:  # the others are elsewhere: say what is wrong here
        if refused is None:
            raise
    if refused is not None:
        raise refused
    assert mine is not None
    for rank, (fields, reason) in enumerate(found):
        if fields is None:
            raise ValueError(f"rank {rank} has refused its arguments: {reason}")
    for name in mine:
        values = [str(fields.get(name)) for fields, _ in found if fields is not None]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
            raise ValueError(f"{name} differs between ranks: {listed}; allowed: one for all")
    for group in groups:
        _agreed.setdefault(group, set()).add(key)
    return result
