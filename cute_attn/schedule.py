"""The order in which persistent CTAs take work tiles under a causal mask: chosen once for a shape, on the host.

Tiles differ in length there. They are numbered (kernels/common/scheduler.py) by sections of a few key heads whose K and
V have room in the L2 cache together, the longest tiles of a section first, and go in this order each to the cluster
that will be free first: list scheduling (Graham, Bounds on multiprocessing timing anomalies, 1969) with lengths counted
in steps, as the device would give them out by a counter in memory. But a counter has to be asked a tile ahead, while
nobody knows yet who will be free first, and to be reset for each launch and stream. So who takes what is a table.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from cute_attn.kernels.config import Fwd16Config, Fwd16Sm80Config, FwdConfig

BYTES_IN_TURN: Final = 32 << 20
"""Of K and V whose tiles are worked on side by side: they stay in the L2 cache of 50 MB."""
TILE_COST: Final = 0.7  # what a tile costs beside its keys, in steps of 256 keys
ROUNDS: Final = 256  # of a table at most: of more, dealt out one by one, the last is little against the rest


def heads_in_turn(config: FwdConfig | Fwd16Config | Fwd16Sm80Config, heads: int, seqlen_k: int) -> int:
    """Key heads whose tiles are mixed in the order of work; 1 without a causal mask, where tiles are equal.

    Of as many as `BYTES_IN_TURN` has room for, the most that divide `heads`, the key heads of all sequences: a last
    section of fewer heads would begin with long tiles when few are left to even them out.
    """
    if not config.causal:
        return 1
    size = 1 if isinstance(config, FwdConfig) else 2  # bytes of an element
    most = max(BYTES_IN_TURN // (size * max(seqlen_k, 1) * (config.head_dim + config.head_dim_v)), 1)
    divisors = (d for i in range(1, math.isqrt(heads) + 1) if heads % i == 0 for d in (i, heads // i))
    return max(d for d in divisors if d <= most)


def tile_table(
    config: FwdConfig | Fwd16Config,
    batch: int,
    heads_q: int,
    heads_k: int,
    seqlen_q: int,
    seqlen_k: int,
    sms: int,
) -> Tensor | None:
    """Who takes which unit of work, as `scheduler.unit_in_round` reads it: (rounds, clusters) int32 on the CPU.

    None where units are equal, where no cluster has two, or where each has more than `ROUNDS`.

    Args:
        config: of the kernel.
        batch, heads_q, heads_k, seqlen_q, seqlen_k: of the problem, none of them 0.
        sms: SMs of the GPU.
    """
    rows, clusters = config.tile_m * config.cluster, sms // config.cluster
    units = -(-seqlen_q * config.pack_gqa // rows)  # of a head, or a pack of them
    group, heads = heads_q // heads_k // config.pack_gqa, batch * heads_k
    if not config.causal or not clusters < units * group * heads <= ROUNDS * clusters:
        return None
    cost = []  # longest first
    for unit in reversed(range(1, units + 1)):
        last = (unit * rows - 1) // config.pack_gqa  # query
        keys = min(max(last + 1 + seqlen_k - seqlen_q, 1), seqlen_k)
        cost.append(-(-keys // config.tile_n) + TILE_COST * 256 / config.tile_n)
    turn = heads_in_turn(config, heads, seqlen_k)
    return as_table(_dealt(_in_order(cost, turn, group, heads), clusters))


def as_table(taken: Sequence[Sequence[int]]) -> Tensor:
    """The table for the units of each cluster, of which the first has the cluster's own number."""
    rows = itertools.zip_longest(*([len(units), *units[1:], -1] for units in taken), fillvalue=-1)
    return torch.tensor(list(rows), dtype=torch.int32, device="cpu")  # whatever torch's default device is


def _in_order(cost: Sequence[float], turn: int, group: int, heads: int) -> Iterator[float]:
    """Costs of all units in the order of their numbers, for those of a query head, longest first."""
    for first in range(0, heads, turn):
        for amount in cost:
            yield from itertools.repeat(amount, min(turn, heads - first) * group)


def _dealt(costs: Iterator[float], clusters: int) -> list[list[int]]:
    """Numbers of the units of each cluster, in ascending order; unit i < clusters is the first of cluster i."""
    taken: list[list[int]] = [[] for _ in range(clusters)]
    free = [(0.0, cluster) for cluster in range(clusters)]  # (when, who), a heap
    for unit, amount in enumerate(costs):
        when, who = free[0]
        taken[who].append(unit)
        heapq.heapreplace(free, (when + amount, who))
    return taken
