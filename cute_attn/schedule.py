"""The order in which persistent CTAs take work tiles under a causal mask: chosen once for a shape, on the host.

Tiles differ in length there, and the order is static (kernels/common/scheduler.py): sections of `turn` key heads, the
longest tiles of a section first and last in turns, dealt out to and fro. Which `turn` makes all CTAs end together
depends on how the tiles of a head divide among them, so a few are tried. A counter in memory, the usual way, would need
a launch of its own to reset it.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

from cute_attn.kernels.config import Fwd16Config, FwdConfig

TURNS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Few heads at a time: several CTAs then read the same K and V, from L2."""
SLACK: Final = 1.005  # a larger turn must be better by this
TILE_COST: Final = 0.7  # what a tile costs beside its keys, in steps of 256 keys
ROUNDS: Final = 64  # that are tried at most: what later ones may lose is little against them


@functools.lru_cache(maxsize=4096)
def heads_in_turn(
    config: FwdConfig | Fwd16Config,
    batch: int,
    heads_q: int,
    heads_k: int,
    seqlen_q: int,
    seqlen_k: int,
    sms: int,
) -> int:
    """`turn` for the launch of a forward kernel; 1 without a causal mask, where tiles are equal.

    Args:
        config: of the kernel.
        batch, heads_q, heads_k, seqlen_q, seqlen_k: of the problem, none of them 0.
        sms: SMs of the GPU.
    """
    if not config.causal:
        return 1
    clusters = sms // config.cluster
    rows = config.tile_m * config.cluster
    units = -(-seqlen_q * config.pack_gqa // rows)
    group = heads_q // heads_k // config.pack_gqa
    heads = batch * heads_k
    if units * group * heads <= clusters:
        return 1
    # On the CPU and in float64 whatever torch's defaults are: this may run while a CUDA graph is captured.
    last = (torch.arange(1, units + 1, device="cpu") * rows - 1) // config.pack_gqa
    keys = (last + 1 + seqlen_k - seqlen_q).clamp(1, max(seqlen_k, 1))
    blocks = (keys + config.tile_n - 1) // config.tile_n
    cost = blocks.double() + TILE_COST * 256 / config.tile_n  # of a unit, shortest first
    best, best_span = 1, float("inf")
    for turn in TURNS:
        if turn > heads:
            break
        span = _longest(cost, turn, group, heads, clusters)
        if span * SLACK < best_span:
            best, best_span = turn, span
    return best


def _longest(cost: torch.Tensor, turn: int, group: int, heads: int, clusters: int) -> float:
    """Work of the cluster that has most, over its share of all, for unit costs (units,) in ascending order."""
    tried = min(heads, max(turn, -(-ROUNDS * clusters // (cost.numel() * group))))
    whole, rest = divmod(tried, turn)
    both = torch.cat([x.repeat_interleave(turn * group) for x in (cost.flip(0), cost)])
    work = both.repeat(-(-whole // 2))[: whole * turn * group * cost.numel()]
    if rest:
        last = cost if whole % 2 else cost.flip(0)
        work = torch.cat([work, last.repeat_interleave(rest * group)])
    rounds = torch.nn.functional.pad(work, (0, -work.numel() % clusters)).view(-1, clusters)
    rounds[1::2] = rounds[1::2].flip(1)
    return float(rounds.sum(0).max() / work.sum() * clusters)
