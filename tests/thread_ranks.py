"""Ranks that are threads of one process: what `cute_attn.distributed` takes from torch.distributed, on one GPU.

NCCL refuses two ranks on one GPU, and gloo sends no CUDA tensors. Only one rank runs at a time, until it waits for a
message: so no two of them draw, launch or compile at once. All are in one stream, so what waits for which stream is not
tested; that a message is waited for is.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import distributed_cases
import pytest
import torch
from torch import Tensor

from cute_attn.distributed import attention, exchange, groups, ring_fp8

TIMEOUT = 60  # seconds that a rank waits for a message, while others run


class Group:
    """All ranks, as one of them sees them; each has its own, as in processes, and so agrees with the others itself."""

    def __init__(self, rank: int):
        self.rank = rank


class _Traffic(threading.local):
    """`exchange.Traffic` of a rank."""

    keys = gradients = heads = means = 0


def _receive(tensor: Tensor, take: Callable[[], Tensor]) -> None:
    tensor.copy_(take())


class Ranks:
    """In place of the module torch.distributed."""

    ProcessGroup, isend, irecv = Group, "isend", "irecv"

    def __init__(self, size: int):
        self.size, self.group = size, threading.local()  # its WORLD
        self._turn = threading.Condition()  # who holds its lock runs; `_take` lends it to the others
        self._errors: list[BaseException] = []  # the first is the cause of the others
        # (kind, what) from one rank to another, in order; None once it has been taken.
        self._sent: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
        self._expected: Counter[tuple[int, int]] = Counter()

    is_available = is_initialized = staticmethod(lambda: True)
    get_global_rank = staticmethod(lambda group, rank: rank)
    P2POp = staticmethod(lambda *op: op)  # isend or irecv, bytes, the other rank, group

    def get_rank(self, group: Group | None = None) -> int:
        return (group or self.group.WORLD).rank

    def get_world_size(self, group: Group | None = None) -> int:
        return self.size

    def _send(self, kind: str, what: Any, to: int) -> None:
        self._sent[self.get_rank(), to].append((kind, what))
        self._turn.notify_all()

    def _expect(self, kind: str, owner: int) -> Callable[[], Any]:
        """A place in the order of messages; the result waits for the message that gets it."""
        way = owner, self.get_rank()
        self._expected[way] += 1
        return functools.partial(self._take, kind, way, self._expected[way] - 1)

    def _take(self, kind: str, way: tuple[int, int], place: int) -> Any:
        sent = self._sent[way]
        self._turn.wait_for(lambda: len(sent) > place or self._errors, TIMEOUT)
        name = f"message {place} of rank {way[0]} to rank {way[1]}"
        if len(sent) <= place:
            raise TimeoutError(f"{name}, {kind}, has not come")
        found, what = sent[place]
        sent[place] = None
        assert found == kind, f"{name} is {found}, and {kind} is expected"
        return what

    def batch_isend_irecv(self, ops: Sequence[Any]) -> list[Any]:
        """A message is not there before `wait`, and until then its sender must not change it: both are checked."""
        works = []
        for op, tensor, peer, _ in ops:
            kind = f"{tensor.numel()} of {tensor.dtype}"
            if op == self.isend:
                copy = tensor.clone()
                self._send(kind, copy, peer)
                wait: Any = functools.partial(
                    torch.testing.assert_close, tensor, copy, msg="changed under way"
                )
            else:
                tensor.fill_(0xFF)  # bytes; NaN as floats of any type
                wait = functools.partial(_receive, tensor, self._expect(kind, peer))
            works.append(SimpleNamespace(wait=wait))
        return works

    def _exchange(self, kind: str, what: Sequence[Any]) -> list[Any]:
        """One thing to each rank, and one from each."""
        for to, each in enumerate(what):
            self._send(kind, each, to)
        return [take() for take in [self._expect(kind, owner) for owner in range(self.size)]]

    def all_gather_object(self, found: list[Any], own: Any, group: Group) -> None:
        found[:] = self._exchange("object", [own] * self.size)

    def all_gather_into_tensor(self, found: Tensor, own: Tensor, group: Group) -> None:
        parts = self._exchange(f"part of {found.numel()}", [own.clone()] * self.size)
        found.copy_(torch.cat(parts).view_as(found))

    def all_to_all_single(self, found: Tensor, own: Tensor, *sizes: list[int], group: Group) -> None:
        parts = self._exchange("heads", [part.clone() for part in own.split(sizes[1])])
        assert [len(part) for part in parts] == sizes[0]
        found.copy_(torch.cat(parts))

    def run(self, function: Callable[[int], None]) -> None:
        """function(rank) on each, with these ranks for those of `cute_attn.distributed`. Raises the first error."""
        traffic = _Traffic()
        make = functools.partial(threading.Thread, target=self._run, daemon=True)
        threads = [make(args=(function, rank)) for rank in range(self.size)]
        with pytest.MonkeyPatch.context() as patch:
            for module in (attention, exchange, groups, distributed_cases):
                patch.setattr(module, "dist", self)
            for module in (exchange, ring_fp8, distributed_cases):
                patch.setattr(module, "traffic", traffic)
            patch.setattr(ring_fp8, "_all_gather", self.all_gather_into_tensor)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]
        assert all(x is None for sent in self._sent.values() for x in sent), "a message that nobody expects"

    def _run(self, function: Callable[[int], None], rank: int) -> None:
        self.group.WORLD = Group(rank)
        torch.set_num_threads(1)
        # Else a single thread of autograd does the backward of all ranks of a GPU, and waits there for itself.
        with self._turn, torch.autograd.set_multithreading_enabled(False):
            try:
                function(rank)
            except BaseException as error:
                self._errors.append(error)
                self._turn.notify_all()
