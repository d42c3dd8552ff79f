"""Shardings and the calls of each step, beside their definitions; no processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.distributed.schedule import Mask, calls_between, partners
from cute_attn.distributed.sharding import Sharding

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    seqlens=st.tuples(lengths, lengths, st.booleans()),
    ring=st.integers(1, 5),
    orders=st.tuples(*[st.sampled_from(["zigzag", "contiguous"])] * 2),
    multiple=st.sampled_from([1, 2, 4, 8]),
    mask=st.tuples(st.sampled_from([-1, 0, 3, 9, 50]), st.sampled_from([-1, 0, 2, 7])),
    whole=st.booleans(),
)
def test_calls_of_all_ranks_are_the_mask(
    seqlens: tuple[list[int], list[int], bool],
    ring: int,
    orders: tuple[str, str],
    multiple: int,
    mask: tuple[int, int],
    whole: bool,
) -> None:
    """Every visible pair of a row and a key is in one call, and no other is."""
    of_q, of_k, alike = seqlens
    count = min(len(of_q), len(of_k))
    of_q, of_k = of_q[:count], (of_q if alike else of_k)[:count]
    q, k = (Sharding(s, ring, order=o, multiple=multiple) for s, o in zip((of_q, of_k), orders, strict=True))
    sequence_q, sequence_k = (torch.cat([torch.full((n,), s) for s, n in enumerate(x)]) for x in (of_q, of_k))
    at_q, at_k = (torch.cat([torch.arange(n) for n in x]) for x in (of_q, of_k))
    place = at_q + (torch.tensor(of_k) - torch.tensor(of_q))[sequence_q]
    visible = sequence_q[:, None] == sequence_k
    behind = at_k - place[:, None]
    visible &= (behind >= -mask[0]) | (mask[0] < 0)
    visible &= (behind <= mask[1]) | (mask[1] < 0)
    found = torch.zeros_like(visible, dtype=torch.int64)
    for rank in range(ring):
        for owner in range(ring):
            calls = calls_between(q, k, Mask(*mask), rank, owner, multiple if whole else 1)
            assert partners(q, k, Mask(*mask))[rank][owner] == bool(calls)
            for call in calls:
                (row, row_end), (key, key_end) = call.rows, call.keys
                assert row < row_end and key < key_end and min(call.window) >= -1
                n, m = row_end - row, key_end - key
                off = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
                seen = torch.ones(n, m, dtype=torch.bool)
                if call.window[0] >= 0:
                    seen &= off >= -call.window[0]
                if call.window[1] >= 0:
                    seen &= off <= call.window[1]
                assert bool(seen.any())
                rows, keys = q.rows(rank)[row:row_end], k.rows(owner)[key:key_end]
                found[rows[:, None], keys] += seen
    assert torch.equal(found, visible.long())


@pytest.mark.parametrize("ulysses", [1, 3])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_every_row_is_somewhere_once(order: str, ulysses: int) -> None:
    for seqlens in (1, 7, 4096, 10_000, (5, 0, 300, 1), (256,) * 11):
        sharding = Sharding(seqlens, 4, ulysses, order)  # type: ignore[arg-type]
        rows = torch.cat([sharding.rows(rank) for rank in range(sharding.world)])
        assert sorted(rows.tolist()) == list(range(sharding.total))
        for rank in range(4):
            assert all(piece.start % 256 == 0 for piece in sharding.pieces(rank))
        for rank in range(sharding.world):
            assert sharding.length(rank) == len(sharding.positions(rank))


def test_zigzag_is_balanced() -> None:
    """Causal work of a rank, in visible pairs; chunks of a rank are one call with each other rank."""
    sharding = Sharding(64 * 1024, 8)
    mask = Mask(-1, 0)

    def pairs(rank: int) -> int:
        total = 0
        for owner in range(8):
            [call] = calls_between(sharding, sharding, mask, rank, owner)
            n, m = call.rows[1] - call.rows[0], call.keys[1] - call.keys[0]
            total += n * (n + 1) // 2 if call.window == (-1, 0) else n * m
        return total

    assert len({pairs(rank) for rank in range(8)}) == 1


def test_many_short_sequences_are_spread() -> None:
    counts = [Sharding((200,) * 64, 4).length(rank) for rank in range(4)]
    assert max(counts) == min(counts)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"seqlens": -1}, ValueError, "seqlens holds -1"),
        ({"seqlens": 1.5}, TypeError, "seqlens is a float"),
        ({"seqlens": [True]}, TypeError, "seqlens holds a bool"),
        ({"ring": 0}, ValueError, "ring holds 0"),
        ({"ulysses": "2"}, TypeError, "ulysses holds a str"),
        ({"order": "striped"}, ValueError, "order is 'striped'"),
        ({"multiple": 0}, ValueError, "multiple holds 0"),
    ],
)
def test_shardings_that_are_refused(changed: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Sharding(**{"seqlens": 8, "ring": 2, **changed})  # type: ignore[arg-type]


def test_rows_that_are_refused() -> None:
    sharding = Sharding(8, 2, multiple=1)
    with pytest.raises(ValueError, match="x has 9 rows in dimension 1; allowed: 8"):
        sharding.shard(torch.zeros(1, 9), 0)
    with pytest.raises(ValueError, match="rank is 2; allowed: 0 to 1"):
        sharding.length(2)
    with pytest.raises(ValueError, match="ends from 0 on that never fall"):
        Sharding.from_cu_seqlens([0, 5, 3], 2)
