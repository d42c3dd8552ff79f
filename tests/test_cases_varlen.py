"""Faults that users of other attention libraries have reported, as small inputs: those of sequences of unlike lengths.

As in test_cases.py: the reference on the CPU and, with the marker `gpu`, the kernel.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from poison import poison_memory
from test_flash_gpu import check
from torch import Tensor

import cute_attn
from cute_attn import launch

BF16, FP16 = torch.bfloat16, torch.float16
PLACES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="kernel", marks=pytest.mark.gpu)]
gpu = pytest.mark.gpu
places = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    poison_memory(monkeypatch, launch)


def starts(lengths: list[int], place: str) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=place)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: list[int],
    lengths_k: list[int],
    max_q: int | None = None,
    max_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse): (total_q, heads_q, head_dim_v), (heads_q, total_q)."""
    place = q.device.type
    return cute_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        starts(lengths_q, place),
        starts(lengths_k, place),
        max(lengths_q) if max_q is None else max_q,
        max(lengths_k) if max_k is None else max_k,
        return_lse=True,
        backend="sm90" if q.is_cuda else "reference",
        **options,
    )


def check_each(
    got: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: list[int],
    lengths_k: list[int],
    **options: Any,
) -> None:
    """Every sequence against float64 by itself."""
    out, lse = got
    assert out.shape == (sum(lengths_q), q.shape[1], v.shape[2]) and lse.shape == (q.shape[1], sum(lengths_q))
    row, key = 0, 0
    for n, m in zip(lengths_q, lengths_k, strict=True):
        rows, keys = slice(row, row + n), slice(key, key + m)
        row, key = rows.stop, keys.stop
        if n and m:
            part = out[rows].unsqueeze(0), lse[:, rows].unsqueeze(0)
            check(part, *(x.unsqueeze(0) for x in (q[rows], k[keys], v[keys])), **options)
        else:
            assert bool((out[rows] == 0).all()) and bool((lse[:, rows] == -math.inf).all())


@places
def test_many_more_queries_than_keys(place: str) -> None:
    """Most rows saw no key under the causal mask, and their gradients were NaN. `max_seqlen` is larger than need be."""
    q, k, v = ((torch.randn(n, 1, 32, device=place) * 3).to(FP16) for n in (256, 3, 3))
    lengths_q, lengths_k = [76, 34, 146], [1, 1, 1]
    out, lse = attend(q, k, v, lengths_q, lengths_k, 256, 3, causal=True)
    seen = torch.zeros(256, dtype=torch.bool, device=place)
    seen[[75, 109, 255]] = True
    assert torch.equal(out[seen], v) and bool((out[~seen] == 0).all())
    assert bool((lse[:, ~seen] == -math.inf).all()) and bool(lse[:, seen].isfinite().all())
    check_each((out, lse), q, k, v, lengths_q, lengths_k, window=(-1, 0))


@places
def test_a_sequence_without_keys_between_others(place: str) -> None:
    """lse is (heads_q, total_q), without gaps; -inf of an empty sequence was written where a padded lse has it."""
    q = torch.randn(12, 8, 128, device=place).to(FP16)
    k, v = torch.randn(2, 128, 2, 128, device=place).to(FP16)
    lengths_q, lengths_k = [4, 4, 4], [64, 0, 64]
    for causal in (False, True):
        out, lse = attend(q, k, v, lengths_q, lengths_k, causal=causal)
        empty = torch.zeros(12, dtype=torch.bool, device=place)
        empty[4:8] = True
        assert bool((lse[:, empty] == -math.inf).all()) and bool(lse[:, ~empty].isfinite().all())
        check_each((out, lse), q, k, v, lengths_q, lengths_k, window=(-1, 0 if causal else -1))


@places
@pytest.mark.parametrize("scale", [math.sqrt(120), 1 / math.sqrt(120)])
def test_fewer_tokens_than_sequences(place: str, scale: float) -> None:
    """Folding the heads of a group into rows took every sequence to have a token, where max_seqlen_q was 1.

    Three of four sequences are empty, a group has 3 heads, and head_dim is 120.
    """
    q = torch.randn(1, 21, 120, device=place).to(BF16)
    k, v = torch.randn(2, 1, 7, 120, device=place).to(BF16)
    out, lse = attend(q, k, v, [0, 0, 0, 1], [0, 0, 0, 1], softmax_scale=scale)
    assert torch.equal(out, v.repeat_interleave(3, dim=1))
    scores = scale * (q.double() * k.double().repeat_interleave(3, dim=1)).sum(dim=2)
    assert torch.allclose(lse.double(), scores.T, rtol=1e-5, atol=1e-3)


@places
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_empty_sequences_at_both_ends(place: str, causal: bool) -> None:
    """Likewise with empty ones first, last and together, of queries, of keys and of both."""
    lengths_q, lengths_k = [0, 0, 5, 0, 130, 1, 0], [0, 3, 0, 0, 200, 1, 70]
    q = torch.randn(sum(lengths_q), 6, 64, device=place).to(BF16)
    k, v = torch.randn(2, sum(lengths_k), 2, 64, device=place).to(BF16)
    got = attend(q, k, v, lengths_q, lengths_k, causal=causal)
    check_each(got, q, k, v, lengths_q, lengths_k, window=(-1, 0 if causal else -1))


@places
@pytest.mark.parametrize("which", ["nothing", "no queries", "no keys"])
def test_nothing_to_do(place: str, which: str) -> None:
    """No token at all, on either side."""
    lengths_q = [0, 0] if which != "no keys" else [3, 2]
    lengths_k = [0, 0] if which != "no queries" else [3, 2]
    q = torch.randn(sum(lengths_q), 4, 64, device=place).to(BF16)
    k, v = torch.randn(2, sum(lengths_k), 2, 64, device=place).to(BF16)
    out, lse = attend(q, k, v, lengths_q, lengths_k, causal=True)
    check_each((out, lse), q, k, v, lengths_q, lengths_k)


@places
def test_a_neighbour_holds_nan(place: str) -> None:
    """A tile that reaches into the next sequence multiplies its keys by 0, which NaN survives."""
    lengths = [100, 60, 130]
    q, k, v = (torch.randn(290, 2, 64, device=place).to(BF16) for _ in range(3))
    q[100:160], k[100:160], v[100:160] = math.nan, math.nan, math.nan
    out, lse = attend(q, k, v, lengths, lengths, causal=True)
    assert bool(out[100:160].isnan().all())
    good = torch.cat([torch.arange(100), torch.arange(160, 290)]).to(place)
    parts = [x[good] for x in (q, k, v)]
    check_each((out[good], lse[:, good]), *parts, [100, 130], [100, 130], window=(-1, 0))


@gpu
def test_more_heads_than_16_bits() -> None:
    """71,280 heads are more than a grid's second or third dimension takes."""
    q, k, v = (torch.rand(3, 71280, 128, device="cuda").to(BF16) for _ in range(3))
    out, lse = attend(q, k, v, [3], [3])
    for head in (0, 65535, 65536, 71279):
        one = slice(head, head + 1)
        parts = [x[:, one].contiguous() for x in (q, k, v)]
        check_each((out[:, one], lse[one]), *parts, [3], [3])


@gpu
@pytest.mark.parametrize("far", ["q", "k and v"])
def test_rows_far_apart(far: str) -> None:
    """Row 225,304 of a tensor with 9,728 elements from row to row begins past 2^31 elements: the offset wrapped.

    A sequence begins there, others every 512 rows.
    """
    rows, width, heads, head_dim = 410_923, 9728, 16, 96
    ends = sorted({*range(512, rows, 512), 225_304, rows})
    lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
    buffer = torch.empty(rows, width, dtype=BF16, device="cuda").normal_()
    apart = buffer[:, : heads * head_dim].view(rows, heads, head_dim)
    near = apart.contiguous()
    q, kv = (apart, near) if far == "q" else (near, apart)
    got = attend(q, kv, kv, lengths, lengths, causal=True)
    expected = attend(near, near, near, lengths, lengths, causal=True)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    del buffer, apart, near, q, kv
    torch.cuda.empty_cache()


@gpu
def test_lengths_of_a_replayed_graph() -> None:
    """A graph reads the lengths anew: those of its capture are not baked in."""
    q, k, v = (torch.randn(700, 8, 128, device="cuda").to(BF16) for _ in range(3))
    lengths = [[300, 0, 400], [1, 500, 199], [700, 0, 0]]
    cu = starts(lengths[0], "cuda")

    def run() -> tuple[Tensor, Tensor]:
        return cute_attn.flash_attn_varlen_func(q, k, v, cu, cu, 700, 700, causal=True, return_lse=True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for each in (*lengths[1:], lengths[0]):
        cu.copy_(starts(each, "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        eager = run()
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
        check_each((out, lse), q, k, v, each, each, window=(-1, 0))


@gpu
def test_runs_repeat_to_the_bit() -> None:
    lengths = [512, 1, 0, 2048, 300]
    q, k, v = (torch.randn(sum(lengths), h, 128, device="cuda").to(BF16) for h in (16, 2, 2))
    first = attend(q, k, v, lengths, lengths, causal=True)
    for _ in range(30):
        again = attend(q, k, v, lengths, lengths, causal=True)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
