"""The static order of causal tiles: CTAs end together, by counting."""

from __future__ import annotations

import pytest
import torch

from cute_attn import schedule
from cute_attn.kernels.config import FwdConfig
from cute_attn.schedule import heads_in_turn
from cute_attn.tiles import forward_config

SMS = 132


def config(head_dim: int, pack_gqa: int = 1, cluster: int = 1, causal: bool = True) -> FwdConfig:
    return forward_config(head_dim, head_dim, "e4m3", causal, "code", "bf16", pack_gqa, cluster)


def dealt(cost: list[float], turn: int, group: int, heads: int, clusters: int) -> list[float]:
    """Work of each cluster when the units are dealt out one by one, as common/scheduler.py numbers them.

    cost: of a unit, from the first queries of a head to the last.
    """
    order = []
    for section, first in enumerate(range(0, heads, turn)):
        levels = cost if section % 2 else cost[::-1]
        order += [level for level in levels for _ in range(min(turn, heads - first) * group)]
    work = [0.0] * clusters
    for unit, amount in enumerate(order):
        r, place = divmod(unit, clusters)
        work[clusters - 1 - place if r % 2 else place] += amount
    return work


@pytest.mark.parametrize("turn", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("units", "group", "heads"), [(7, 1, 9), (16, 2, 8), (5, 4, 3), (1, 1, 40), (3, 1, 8)]
)
def test_counting_is_dealing(turn: int, units: int, group: int, heads: int) -> None:
    cost = torch.arange(1, units + 1) + 0.5
    work = dealt(cost.tolist(), turn, group, heads, clusters=11)
    assert schedule._longest(cost, turn, group, heads, 11) == pytest.approx(max(work) / sum(work) * 11)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ctas_end_together(head_dim: int, seqlen: int, cluster: int) -> None:
    chosen = config(head_dim, cluster=cluster)
    batch, heads = 16384 // seqlen, 2048 // head_dim
    turn = heads_in_turn(chosen, batch, heads, heads, seqlen, seqlen, SMS)
    assert turn in schedule.TURNS
    rows, clusters = 128 * cluster, SMS // cluster
    cost = [
        -(-(unit + 1) * rows // chosen.tile_n) + schedule.TILE_COST * 256 / chosen.tile_n
        for unit in range(seqlen // rows)
    ]
    work = dealt(cost, turn, 1, batch * heads, clusters)
    # 15.5 rounds of equal units would take 16
    assert max(work) < 1.035 * sum(work) / clusters


def test_without_a_mask_or_with_few_tiles_heads_go_one_by_one() -> None:
    assert heads_in_turn(config(128, causal=False), 4, 16, 16, 4096, 4096, SMS) == 1
    assert heads_in_turn(config(128), 1, 16, 16, 1024, 1024, SMS) == 1  # 128 tiles


def test_packed_rows_and_lengths_that_differ() -> None:
    for seqlen_q, seqlen_k in ((100, 5000), (5000, 100), (1, 1), (4097, 4097), (3, 0)):
        turn = heads_in_turn(config(128, pack_gqa=8), 16, 64, 8, seqlen_q, seqlen_k, SMS)
        assert 1 <= turn <= 128


def test_torch_defaults_change_nothing() -> None:
    about = (config(128), 4, 16, 16, 4096, 4096, SMS)
    heads_in_turn.cache_clear()
    want = heads_in_turn(*about)
    before = torch.get_default_dtype()
    heads_in_turn.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            assert heads_in_turn(*about) == want
    finally:
        torch.set_default_dtype(before)


def test_many_tiles_are_not_all_counted() -> None:
    turn = heads_in_turn(config(64), 4096, 128, 128, 4096, 4096, SMS)
    assert turn in schedule.TURNS
