"""The float64 reference against torch, its tiled forms against it, their memory traffic against formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cute_attn import flash
from cute_attn.reference import (
    IOCount,
    attention,
    attention_backward,
    block_sizes,
    flash_attention_1,
    flash_attention_2,
    standard_attention_io,
)


def assert_same(got: Any, expected: Any) -> None:
    """Equal but for the order of a float64 sum over a few keys of size one."""
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Case:
    """One small problem: sizes, mask, and the seed of its N(0, 1) inputs."""

    batch: int = 1
    heads_k: int = 1
    group: int = 1
    seqlen_q: int = 4
    seqlen_k: int = 4
    head_dim: int = 4
    head_dim_v: int = 4
    causal: bool = False
    mask_shape: tuple[bool, bool, bool, bool] | None = None  # which dimensions of the mask are not broadcast
    softmax_scale: float | None = None
    seed: int = 0

    def randn(self, *shape: int, offset: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 16 + offset)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    @property
    def heads_q(self) -> int:
        return self.heads_k * self.group

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.randn(self.batch, self.seqlen_q, self.heads_q, self.head_dim, offset=0),
            self.randn(self.batch, self.seqlen_k, self.heads_k, self.head_dim, offset=1),
            self.randn(self.batch, self.seqlen_k, self.heads_k, self.head_dim_v, offset=2),
        )

    def dout(self) -> Tensor:
        return self.randn(self.batch, self.seqlen_q, self.heads_q, self.head_dim_v, offset=3)

    def mask(self) -> Tensor | None:
        if self.mask_shape is None:
            return None
        full = (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k)
        shape = [size if kept else 1 for size, kept in zip(full, self.mask_shape, strict=True)]
        return self.randn(*shape, offset=4) > 0

    def visible(self) -> Tensor:
        """Which keys each query sees, straight from the definition: (batch, heads_q, seqlen_q, seqlen_k)."""
        shift = self.seqlen_k - self.seqlen_q
        rows = [
            [not self.causal or j <= i + shift for j in range(self.seqlen_k)] for i in range(self.seqlen_q)
        ]
        seen = torch.tensor(rows, dtype=torch.bool).reshape(1, 1, self.seqlen_q, self.seqlen_k)
        mask = self.mask()
        seen = seen if mask is None else seen & mask
        return seen.expand(self.batch, self.heads_q, self.seqlen_q, self.seqlen_k)

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "softmax_scale": self.softmax_scale}


def torch_attention(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own attention and logsumexp on the same inputs; a row without key is defined as 0 and -inf."""
    seen = case.visible()
    k, v = (x.repeat_interleave(case.group, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=case.softmax_scale)
    out = torch.where(seen.any(-1, keepdim=True), out, 0.0).transpose(1, 2)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    scores = (scale * torch.einsum("bhid,bhjd->bhij", q, k)).masked_fill(~seen, -math.inf)
    return out, torch.logsumexp(scores, dim=-1)


sizes = st.integers(1, 7)
unmasked_cases = st.builds(
    Case,
    batch=st.integers(1, 2),
    heads_k=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=sizes,
    seqlen_k=sizes,
    head_dim=sizes,
    head_dim_v=sizes,
    causal=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.3, 2.0]),
    seed=st.integers(0, 1000),
)
cases = st.builds(
    lambda case, mask_shape: Case(**{**vars(case), "mask_shape": mask_shape}),
    unmasked_cases,
    st.none() | st.tuples(*[st.booleans()] * 4),
)
# No deadline: the first call of a process pays torch's lazy initialisation.
small = settings(max_examples=120, deadline=None)


# ---- attention ---------------------------------------------------------------------------------------------


@small
@given(cases, st.integers(1, 8))
def test_attention_is_torchs(case: Case, row_chunk: int) -> None:
    q, k, v = case.qkv()
    expected_out, expected_lse = torch_attention(case, q, k, v)
    for chunk in (None, row_chunk):
        out, lse = attention(q, k, v, mask=case.mask(), row_chunk=chunk, **case.options)
        assert out.dtype == lse.dtype == torch.float64
        assert_same(out, expected_out)
        assert_same(lse, expected_lse)


@small
@given(cases)
def test_attention_is_differentiable(case: Case) -> None:
    """Autograd through the reference itself, for both results: no NaN where a row sees no key."""
    q, k, v = (x.requires_grad_() for x in case.qkv())
    out, lse = attention(q, k, v, mask=case.mask(), row_chunk=3, **case.options)
    empty = ~case.visible().any(-1)
    got = torch.autograd.grad((out * case.dout()).sum() + lse.masked_fill(empty, 0.0).sum(), (q, k, v))
    out, lse = torch_attention(case, q, k, v)
    # torch's logsumexp of an all -inf row has no gradient worth the name, so it is kept out of the sum.
    expected = torch.autograd.grad((out * case.dout()).sum() + lse[~empty].sum(), (q, k, v))
    for mine, theirs in zip(got, expected, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("row_chunk", [None, 3])
@pytest.mark.parametrize("seqlens", [(7, 12), (12, 7), (1, 9)], ids=str)
def test_features_are_the_definition(seqlens: tuple[int, int], row_chunk: int | None) -> None:
    """Window, softcap, ALiBi and sinks, each and together, against the reference of the 16-bit functions."""
    case = Case(batch=2, heads_k=2, group=3, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    q, k, v = case.qkv()
    features: dict[str, Any] = {
        "window": (3, 1),
        "softcap": 0.7,
        "alibi_slopes": case.randn(2, 6, offset=4).abs(),
        "sinks": case.randn(6, offset=5) * 3,
    }
    for some in ({}, *({name: value} for name, value in features.items()), features):
        got = attention(q, k, v, softmax_scale=0.4, row_chunk=row_chunk, **some)
        expected = flash.reference(q, k, v, softmax_scale=0.4, dtype=torch.float64, **some)
        assert_same(got, expected)
    slopes = features["alibi_slopes"][0]
    got = attention(q, k, v, alibi_slopes=slopes, window=(-1, 0))
    assert_same(got, attention(q, k, v, alibi_slopes=slopes.expand(2, 6), causal=True))


def test_attention_without_lse_is_out_alone() -> None:
    q, k, v = Case(group=2, causal=True).qkv()
    out = attention(q, k, v, causal=True, return_lse=False)
    assert torch.equal(out, attention(q, k, v, causal=True)[0])


@pytest.mark.parametrize("row_chunk", [1, 7, 64, 129, 1000])
def test_row_chunks_change_nothing(row_chunk: int) -> None:
    case = Case(batch=2, heads_k=2, group=2, seqlen_q=129, seqlen_k=65, head_dim=16, causal=True)
    q, k, v = case.qkv()
    whole = attention(q, k, v, causal=True, row_chunk=case.seqlen_q)
    for chunked, expected in zip(attention(q, k, v, causal=True, row_chunk=row_chunk), whole, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-13, atol=1e-14)


def test_default_row_chunk_bounds_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(batch=2, heads_k=2, group=2, seqlen_q=50, seqlen_k=30)
    q, k, v = case.qkv()
    whole = attention(q, k, v)
    widths: list[int] = []
    einsum = torch.einsum

    def spy(equation: str, *operands: Tensor) -> Tensor:
        result = einsum(equation, *operands)
        widths.append(result.numel() if equation.endswith("bgrij") else 0)
        return result

    monkeypatch.setattr("cute_attn.reference._CHUNK_SCORES", 8 * 30 * 7 + 1)
    monkeypatch.setattr(torch, "einsum", spy)
    chunked = attention(q, k, v)
    assert max(widths) == 8 * 30 * 7
    assert_same(chunked, whole)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]
)
def test_narrow_inputs_are_widened_exactly(dtype: torch.dtype) -> None:
    q, k, v = ((4 * x).to(dtype) for x in Case(group=2, seqlen_k=9, head_dim=8).qkv())
    narrow, wide = attention(q, k, v), attention(q.double(), k.double(), v.double())
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def test_query_heads_share_key_heads_in_order() -> None:
    """One key: its value comes out, so the output names the key head that each query head read."""
    v = torch.arange(3.0).reshape(1, 1, 3, 1)
    out, _ = attention(torch.ones(1, 1, 12, 1), torch.ones(1, 1, 3, 1), v)
    assert out.flatten().tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("name", ["attention", "standard", "flash1", "flash2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_input_stays_visible(name: str, bad: float) -> None:
    q, k, v = Case(seqlen_q=5, seqlen_k=6).qkv()
    q[0, 2, 0, 1] = bad
    k[:, :, :, 1] = k[:, :, :, 1].abs()
    out, lse = FORWARDS[name](q, k, v)
    assert out.isnan().any(-1).flatten().tolist() == [False, False, True, False, False]
    assert not lse.flatten()[2].isfinite() and lse.isfinite().sum() == 4


# ---- tiled forwards ----------------------------------------------------------------------------------------


FORWARDS: dict[str, Any] = {
    "attention": attention,
    "standard": lambda *qkv, **options: standard_attention_io(*qkv, **options)[:2],
    "flash1": lambda *qkv, **options: flash_attention_1(*qkv, block_q=2, block_k=3, **options)[:2],
    "flash2": lambda *qkv, **options: flash_attention_2(*qkv, block_q=2, block_k=3, **options)[:2],
}


@small
@given(unmasked_cases, sizes, sizes)
def test_tiled_forwards_are_attention(case: Case, block_q: int, block_k: int) -> None:
    q, k, v = case.qkv()
    expected = attention(q, k, v, **case.options)
    tiles: dict[str, Any] = {"block_q": block_q, "block_k": block_k}
    for results in (
        standard_attention_io(q, k, v, **case.options),
        flash_attention_1(q, k, v, **tiles, **case.options),
        flash_attention_2(q, k, v, **tiles, **case.options),
    ):
        assert_same(results[:2], expected)


@small
@given(unmasked_cases, sizes, sizes)
def test_traffic_is_that_of_the_visible_tiles(case: Case, block_q: int, block_k: int) -> None:
    """The counts of the loops against sums over the tiles that hold a visible pair, by the dense mask."""
    q, k, v = case.qkv()
    d, dv, work = case.head_dim, case.head_dim_v, case.batch * case.heads_q
    sq, sk, seen = case.seqlen_q, case.seqlen_k, case.visible()[0, 0]
    pairs = [
        (len(tile), len(tile[0]))
        for rows in seen.split(block_q, dim=0)
        for tile in rows.split(block_k, dim=1)
        if tile.any()
    ]
    row_visits, key_visits = sum(rows for rows, _ in pairs), sum(keys for _, keys in pairs)

    *_, standard = standard_attention_io(q, k, v, **case.options)
    *_, flash1 = flash_attention_1(q, k, v, block_q=block_q, block_k=block_k, **case.options)
    *_, flash2 = flash_attention_2(q, k, v, block_q=block_q, block_k=block_k, **case.options)

    def per_work_item(count: IOCount) -> tuple[dict[str, float], dict[str, float]]:
        reads, writes = ({x: n / work for x, n in part.items() if n} for part in (count.reads, count.writes))
        return reads, writes

    assert per_work_item(standard) == (
        {"q": sq * d, "k": sk * d, "v": sk * dv, "s": sq * sk, "p": sq * sk},
        {"s": sq * sk, "p": sq * sk, "out": sq * dv, "lse": sq},
    )
    visits = {"q": row_visits * d, "out": row_visits * dv, "l": row_visits, "m": row_visits}
    assert per_work_item(flash1) == (
        {"k": sk * d, "v": sk * dv} | {x: n for x, n in visits.items() if n},
        {"out": (row_visits + sq) * dv, "l": row_visits + sq, "m": row_visits + sq},
    )
    assert per_work_item(flash2) == (
        {"q": sq * d, "k": key_visits * d, "v": key_visits * dv},
        {"out": sq * dv, "lse": sq},
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "d", "block"), [(96, 8, 16), (64, 4, 8)])
def test_traffic_closed_forms(n: int, d: int, block: int, causal: bool) -> None:
    """Square tiles that divide N: T = N / block a side, T (T + 1) / 2 of them visited if causal."""
    q, k, v = Case(seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=d).qkv()
    side = n // block
    visited = block * (side * (side + 1) // 2 if causal else side * side)  # rows (or keys) over all visits

    *_, standard = standard_attention_io(q, k, v, causal=causal)
    *_, flash1 = flash_attention_1(q, k, v, block_q=block, block_k=block, causal=causal)
    *_, flash2 = flash_attention_2(q, k, v, block_q=block, block_k=block, causal=causal)
    assert standard.total == 4 * n * d + 4 * n * n + n
    assert flash1.total == 2 * n * d + visited * (3 * d + 4) + n * (d + 2)
    assert flash2.total == 2 * n * d + visited * 2 * d + n
    assert flash2.total < flash1.total < standard.total


def test_more_sram_means_proportionally_less_traffic() -> None:
    """FlashAttention, Theorem 2: Theta(N^2 d^2 / M). The part that grows with N^2 halves when M doubles."""
    n, d = 256, 8
    q, k, v = Case(seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=d).qkv()
    quadratic = []
    for sram in (4 * d * 8, 4 * d * 16, 4 * d * 32):
        block_q, block_k = block_sizes(sram, d)
        *_, io = flash_attention_1(q, k, v, block_q=block_q, block_k=block_k)
        once = 2 * n * d + n * (d + 2)
        quadratic.append(io.total - once)
        assert quadratic[-1] == n * (n // block_k) * (3 * d + 4)
    assert quadratic[0] == 2 * quadratic[1] == 4 * quadratic[2]


@pytest.mark.parametrize(
    ("sram", "head_dim", "expected"),
    [(4096, 64, (16, 16)), (65536, 64, (64, 256)), (4097, 64, (17, 17)), (64, 64, (1, 1)), (8, 1, (1, 2))],
)
def test_block_sizes(sram: int, head_dim: int, expected: tuple[int, int]) -> None:
    assert block_sizes(sram, head_dim) == expected


# ---- backward ----------------------------------------------------------------------------------------------


@small
@given(cases, sizes, sizes)
def test_backward_is_autograds(case: Case, block_q: int, block_k: int) -> None:
    q, k, v = (x.requires_grad_() for x in case.qkv())
    dout = case.dout()
    expected = torch.autograd.grad(torch_attention(case, q, k, v)[0], (q, k, v), dout)
    options = {"mask": case.mask(), **case.options}
    out, lse = attention(q, k, v, **options)
    got = attention_backward(q, k, v, out, lse, dout, block_q=block_q, block_k=block_k, **options)
    for mine, theirs in zip(got, expected, strict=True):
        assert_same(mine, theirs)


class _Recomputed(torch.autograd.Function):
    """The reference's forward and backward tied together, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        return attention_backward(q, k, v, out, lse, dout, causal=True, block_q=2, block_k=2)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 5), (5, 3)])
def test_backward_is_the_finite_difference(seqlen_q: int, seqlen_k: int) -> None:
    inputs = Case(group=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=3, head_dim_v=2).qkv()
    assert torch.autograd.gradcheck(_Recomputed.apply, [x.requires_grad_() for x in inputs])


# ---- rows without keys, empty tensors, extreme logits ------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_no_keys(name: str, causal: bool) -> None:
    q, k, v = (x.bfloat16() for x in Case(batch=2, heads_k=8, seqlen_q=1, seqlen_k=0, head_dim_v=3).qkv())
    out, lse = FORWARDS[name](q, k, v, causal=causal)
    assert torch.equal(out, torch.zeros(2, 1, 8, 3, dtype=torch.float64))
    assert torch.equal(lse, torch.full((2, 8, 1), -math.inf, dtype=torch.float64))
    dq, dk, dv = attention_backward(q, k, v, out, lse, torch.ones_like(out), causal=causal)
    assert torch.equal(dq, torch.zeros(2, 1, 8, 4, dtype=torch.float64))
    assert dk.shape == k.shape and dv.shape == v.shape


@pytest.mark.parametrize("empty", [{"seqlen_q": 0}, {"batch": 0}, {"seqlen_q": 0, "seqlen_k": 0}])
@pytest.mark.parametrize("name", FORWARDS)
def test_no_rows(name: str, empty: dict[str, Any]) -> None:
    case = Case(group=3, head_dim_v=5, **empty)
    q, k, v = case.qkv()
    out, lse = FORWARDS[name](q, k, v)
    assert out.shape == (case.batch, case.seqlen_q, 3, 5) and lse.shape == (case.batch, 3, case.seqlen_q)
    dq, dk, dv = attention_backward(q, k, v, out, lse, out)
    assert dq.shape == q.shape
    assert torch.equal(dk, torch.zeros_like(k)) and torch.equal(dv, torch.zeros_like(v))


@pytest.mark.parametrize("name", FORWARDS)
def test_more_queries_than_keys(name: str) -> None:
    """Causal sequences of 76, 34 and 146 queries and one key: only the last row sees it; no NaN."""
    generator = torch.Generator().manual_seed(0)
    for seqlen_q in (76, 34, 146):
        q = (3 * torch.randn(1, seqlen_q, 1, 32, generator=generator)).half()
        k, v = ((3 * torch.randn(1, 1, 1, 32, generator=generator)).half() for _ in range(2))
        out, lse = FORWARDS[name](q, k, v, causal=True)
        assert torch.equal(out[0, -1, 0], v[0, 0, 0].double())
        assert torch.equal(out[:, :-1], torch.zeros(1, seqlen_q - 1, 1, 32, dtype=torch.float64))
        assert lse[0, 0, -1].isfinite() and bool((lse[0, 0, :-1] == -math.inf).all())
        dout = torch.ones_like(out)
        dq, dk, dv = attention_backward(q, k, v, out, lse, dout, causal=True, block_q=32, block_k=1)
        assert_same(dv, torch.ones_like(dv))
        for grad in (dq, dk):
            torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-11)


@pytest.mark.parametrize("seqlen_k", [1, 2, 5])
@pytest.mark.parametrize("name", FORWARDS)
def test_very_negative_logits(name: str, seqlen_k: int) -> None:
    """A raw score of -524288 is a score: weight 1 for one key, equal weights for more, in whatever tiles."""
    q = torch.full((1, 1, 32, 128), 64.0, dtype=torch.bfloat16)
    k = torch.full((1, seqlen_k, 32, 128), -64.0, dtype=torch.bfloat16)
    out, lse = FORWARDS[name](q, k, torch.ones_like(k))
    assert bool((out == 1.0).all())
    expected = -524288 / math.sqrt(128) + math.log(seqlen_k)
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-14, atol=0)


@pytest.mark.parametrize("seqlen_k", [1, 200])
@pytest.mark.parametrize("name", FORWARDS)
def test_huge_inputs(name: str, seqlen_k: int) -> None:
    q = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    k = q.expand(1, seqlen_k, 1, 64)
    out, lse = FORWARDS[name](q, k, k)
    assert bool((out.bfloat16() == 133120.0).all())
    # Standard attention rounds 1 / 200 before it multiplies: a float64 rounding for each key.
    rounding = 2.0**-53 * seqlen_k
    torch.testing.assert_close(out, torch.full_like(out, 133120.0), rtol=rounding, atol=0)
    expected = 133120.0**2 * 64 / 8 + math.log(seqlen_k)
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-15, atol=0)
    dq, _, dv = attention_backward(q, k, k, out, lse, torch.ones_like(out))
    # lse near 1.4e11 is a multiple of 2^-15, and P has the absolute error of lse as its relative error.
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / seqlen_k), rtol=2.0**-16, atol=0)
    # dS is 0 but for the rounding of D in dP - D, both 64 * 133120; dQ multiplies that by k / 8.
    assert dq.isfinite().all() and dq.abs().max() <= 2 * rounding * (64 * 133120) * 133120 / 8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [64, 192, 704])
def test_backward_of_rows_with_low_lse(seqlen: int, causal: bool) -> None:
    """Every logit near -120: exp of a score without its lse would vanish, without its sign overflow."""
    case = Case(seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64, head_dim_v=64, causal=causal)
    q, k, v = case.qkv()
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -960.0
    q, k, v = (x.bfloat16().double().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, causal=causal)
    assert lse.min() > -121 and lse.max() < -113
    expected = torch.autograd.grad(torch_attention(case, q, k, v)[0], (q, k, v), case.dout())
    got = attention_backward(q, k, v, out, lse, case.dout(), causal=causal)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


# ---- device ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_results_stay_on_the_device_of_the_inputs() -> None:
    case = Case(batch=2, heads_k=2, group=2, seqlen_q=33, seqlen_k=47, head_dim=16, causal=True)
    mask = case.randn(33, 47, offset=5) > -1

    def run(device: str) -> list[Tensor]:
        q, k, v, dout = (x.to(device) for x in (*case.qkv(), case.dout()))
        options: dict[str, Any] = {"causal": True, "mask": mask.to(device)}
        out, lse = attention(q, k, v, **options)
        grads = attention_backward(q, k, v, out, lse, dout, block_q=16, block_k=16, **options)
        return [out, lse, *grads]

    got = run("cuda")
    assert all(x.is_cuda for x in got)
    assert_same([x.cpu() for x in got], run("cpu"))


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(4, 2, 4)}, ValueError, r"q must be \(batch, seqlen, heads, head_dim\)"),
        ({"q": torch.zeros(1, 4, 2, 0), "k": torch.zeros(1, 4, 1, 0)}, ValueError, "head_dim"),
        ({"q": torch.zeros(1, 4, 2, 4, dtype=torch.complex64)}, TypeError, "q must have a real dtype"),
        ({"k": torch.zeros(2, 4, 1, 4)}, ValueError, "k must have shape"),
        ({"k": torch.zeros(1, 4, 1, 5)}, ValueError, "k must have shape"),
        ({"v": torch.zeros(1, 3, 1, 4)}, ValueError, "v must have shape"),
        ({"v": torch.zeros(1, 4, 1, 4, device="meta")}, ValueError, "v must be on the device of q"),
        ({"k": torch.zeros(1, 4, 3, 4), "v": torch.zeros(1, 4, 3, 4)}, ValueError, "heads of q .* 2 and 3"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite and positive, got nan"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale"),
        ({"mask": torch.zeros(4, 4)}, TypeError, "mask must be torch.bool"),
        ({"mask": torch.zeros(3, 4, dtype=torch.bool)}, ValueError, r"mask must broadcast to \(1, 2, 4, 4\)"),
        ({"row_chunk": 0}, ValueError, "row_chunk must be at least 1, got 0"),
        ({"window": (-2, 0)}, ValueError, r"window must have ends .* got \(-2, 0\)"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and at least 0, got -1.0"),
        ({"softcap": math.inf}, ValueError, "softcap"),
        ({"alibi_slopes": torch.zeros(1)}, ValueError, r"alibi_slopes must have shape \(2,\)"),
        ({"alibi_slopes": torch.zeros(2, 2)}, ValueError, r"alibi_slopes must have shape \(1, 2\)"),
        ({"sinks": torch.zeros(1, 2)}, ValueError, r"sinks must have shape \(2,\)"),
    ],
)
def test_attention_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = Case(group=2).qkv()
    with pytest.raises(error, match=message):
        attention(**{"q": q, "k": k, "v": v, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(1, 4, 1, 4)}, "out must have shape"),
        ({"dout": torch.zeros(1, 4, 2, 3)}, "dout must have shape"),
        ({"lse": torch.zeros(1, 4, 2)}, r"lse must have shape \(1, 2, 4\)"),
        ({"block_q": 0}, "block_q must be at least 1, got 0"),
        ({"block_k": -1}, "block_k must be at least 1, got -1"),
    ],
)
def test_backward_refuses(change: dict[str, Any], message: str) -> None:
    q, k, v = Case(group=2).qkv()
    out, lse = attention(q, k, v)
    with pytest.raises(ValueError, match=message):
        attention_backward(**{"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": out, **change})


@pytest.mark.parametrize("forward", [flash_attention_1, flash_attention_2])
def test_tiled_forwards_refuse_empty_tiles(forward: Any) -> None:
    q, k, v = Case().qkv()
    with pytest.raises(ValueError, match="block_q must be at least 1"):
        forward(q, k, v, block_q=0, block_k=1)
    with pytest.raises(ValueError, match="block_k must be at least 1"):
        forward(q, k, v, block_q=1, block_k=0)


def test_block_sizes_refuses() -> None:
    with pytest.raises(ValueError, match="sram_elements must be at least head_dim"):
        block_sizes(63, 64)
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        block_sizes(64, 0)
