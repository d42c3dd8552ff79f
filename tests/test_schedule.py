"""The order of causal tiles: each is taken once, and CTAs end together, by counting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_attn import schedule
from cute_attn.kernels.config import Fwd16Config, FwdConfig
from cute_attn.plan16 import forward16_config
from cute_attn.plan_sm80 import forward16_sm80_config
from cute_attn.schedule import heads_in_turn, tile_table
from cute_attn.tiles import forward_config

SMS = 132


def config(head_dim: int, pack_gqa: int = 1, cluster: int = 1, causal: bool = True) -> FwdConfig:
    return forward_config(head_dim, head_dim, "e4m3", causal, "code", "bf16", pack_gqa, cluster)


def units_of(table: Tensor) -> list[list[int]]:
    """The units of each cluster, as scheduler.py reads a table: its own number, then column `cluster`."""
    taken = []
    for cluster, (rounds, *later) in enumerate(table.T.tolist()):
        units, r = [cluster], 0
        while later[r] != -1:  # one row more than rounds is there
            units.append(later[r])
            r += 1
        assert len(units) == rounds and set(later[r:]) == {-1}
        taken.append(units)
    return taken


def keys_of_units(
    chosen: FwdConfig | Fwd16Config, group: int, heads: int, seqlen_q: int, seqlen_k: int
) -> list[int]:
    """Steps of the units in the order of their numbers, see `scheduler.unit_coord`."""
    rows = chosen.tile_m * chosen.cluster
    of_head = []
    for first in range(0, seqlen_q * chosen.pack_gqa, rows):
        last = (first + rows - 1) // chosen.pack_gqa
        of_head.append(-(-max(min(seqlen_k, last + 1 + seqlen_k - seqlen_q), 1) // chosen.tile_n))
    turn, steps = heads_in_turn(chosen, heads, seqlen_k), []
    for first in range(0, heads, turn):
        for m_unit in reversed(range(len(of_head))):
            steps += [of_head[m_unit]] * (min(turn, heads - first) * group)
    return steps


@pytest.mark.parametrize(
    ("pack_gqa", "cluster", "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "sms"),
    [
        (1, 1, 2, 5, 5, 1000, 1000, 10),
        (1, 2, 3, 4, 2, 1000, 700, 13),
        (8, 1, 16, 64, 8, 100, 5000, SMS),
        (4, 1, 1, 24, 2, 5000, 100, 30),
        (1, 1, 7, 6, 3, 130, 1, 2),
        (1, 2, 1, 3, 1, 4097, 4097, 2),
    ],
)
def test_each_unit_is_taken_once(
    pack_gqa: int,
    cluster: int,
    batch: int,
    heads_q: int,
    heads_k: int,
    seqlen_q: int,
    seqlen_k: int,
    sms: int,
) -> None:
    chosen = config(128, pack_gqa, cluster)
    table = tile_table(chosen, batch, heads_q, heads_k, seqlen_q, seqlen_k, sms)
    assert table is not None and table.dtype == torch.int32 and table.shape[1] == sms // cluster
    taken = units_of(table)
    steps = keys_of_units(chosen, heads_q // heads_k // pack_gqa, batch * heads_k, seqlen_q, seqlen_k)
    assert sorted(unit for units in taken for unit in units) == list(range(len(steps)))
    assert all(units == sorted(units) for units in taken)


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["8 bits", "8 bits in clusters", "16 bits"])
def test_ctas_end_together(kind: str, head_dim: int, seqlen: int) -> None:
    chosen: FwdConfig | Fwd16Config = config(head_dim, cluster=2 if kind.endswith("clusters") else 1)
    if kind == "16 bits":
        chosen = forward16_config(head_dim, head_dim, "bf16", causal=True, seqlen_q=seqlen)
    batch, heads = 16384 // seqlen, 2048 // head_dim
    table = tile_table(chosen, batch, heads, heads, seqlen, seqlen, SMS)
    assert table is not None
    beside = schedule.TILE_COST * 256 / chosen.tile_n
    steps = keys_of_units(chosen, 1, batch * heads, seqlen, seqlen)
    work = [sum(steps[unit] + beside for unit in units) for units in units_of(table)]
    # 15.5 or 7.75 rounds of equal units would take 16 or 8: 1.03
    longest = max(work) * len(work) / sum(work)
    assert longest < (1.035 if seqlen < 4096 else 1.02)


def test_heads_in_turn_have_room_and_divide_all() -> None:
    for chosen, size in (
        (config(128), 1),
        (forward16_config(128, 128, "bf16", causal=True), 2),
        (forward16_sm80_config(128, 128, "bf16", causal=True, arch="sm_80"), 2),
    ):
        for heads in (1, 7, 32, 40, 4096 * 128):
            for seqlen_k in (1, 1000, 8192, 1 << 20):
                turn = heads_in_turn(chosen, heads, seqlen_k)
                room = max(schedule.BYTES_IN_TURN // (size * seqlen_k * 256), 1)
                assert turn == max(n for n in range(1, min(room, heads) + 1) if heads % n == 0)
    assert heads_in_turn(config(128, causal=False), 64, 4096) == 1


def test_no_table() -> None:
    assert tile_table(config(128, causal=False), 4, 16, 16, 4096, 4096, SMS) is None
    assert tile_table(config(128), 1, 16, 16, 1024, 1024, SMS) is None  # 128 tiles
    assert tile_table(config(128), 1, 17, 17, 1024, 1024, SMS) is not None  # 136
    assert tile_table(config(64), 4096, 128, 128, 4096, 4096, SMS) is None  # many
    assert tile_table(config(128), 1, 256, 256, SMS * 128, SMS * 128, SMS) is not None  # 256 rounds
    assert tile_table(config(128), 1, 257, 257, SMS * 128, SMS * 128, SMS) is None


def test_torch_defaults_change_nothing() -> None:
    about = (config(128), 4, 16, 16, 4096, 4096, SMS)
    want = tile_table(*about)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            found = tile_table(*about)
    finally:
        torch.set_default_dtype(before)
    assert want is not None and found is not None and torch.equal(found, want)
