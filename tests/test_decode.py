"""Attention against a KV cache away from a GPU: the reference, appending, refusals, and how work is shared out."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import figures_of, no_spills
from torch import Tensor

import cute_attn
from cute_attn import decode_plan, flash_attn_with_kvcache, kv
from cute_attn.append import TENSORS, append_kv
from cute_attn.compile import KernelFigures
from cute_attn.decode_plan import Shares
from cute_attn.kernels.config import SM80_ARCHS, SMEM_LIMIT, AppendConfig, DecodeConfig, UnpackConfig
from cute_attn.quantize import Rotary, rotation_signs, walsh_hadamard

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(seqlen_ro: int, rotary_dim: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    angles = torch.outer(
        torch.arange(seqlen_ro), 10000.0 ** -(torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return flash_attn_with_kvcache(
        q, k_cache, v_cache, backend="reference", return_softmax_lse=True, **options
    )


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = -1, right: int = -1
) -> tuple[Tensor, Tensor]:
    """One sequence, q (seqlen_q, heads_q, d), k and v (seqlen_k, heads_k, ..), row by row in float64."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        own = i + k.shape[0] - q.shape[0]
        keys = [
            j for j in range(k.shape[0]) if (left < 0 or j >= own - left) and (right < 0 or j <= own + right)
        ]
        if not keys:
            continue
        for h in range(q.shape[1]):
            s = scale * (k[keys, h // group].double() @ q[i, h].double())
            lse[h, i] = s.logsumexp(0)
            out[i, h] = s.softmax(0) @ v[keys, h // group].double()
    return out, lse


# -- the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 1)])
@pytest.mark.parametrize("form", ["contiguous", "batch_idx", "paged", "leftpad"])
def test_every_form_of_a_cache(form: str, window: tuple[int, int]) -> None:
    lengths = [0, 7, 20, 2]
    q = torch.randn(4, 3, 4, 32, dtype=FP16)
    k, v = torch.randn(4, 20, 2, 32, dtype=FP16), torch.randn(4, 20, 2, 48, dtype=FP16)
    first, options = [0] * 4, {}
    if form == "leftpad":
        first = [0, 2, 5, 2]
        options["cache_leftpad"] = int32(*first)
    exact = [
        by_hand(q[b], k[b, first[b] : n], v[b, first[b] : n], 32**-0.5, *window)
        for b, n in enumerate(lengths)
    ]
    for b, n in enumerate(lengths):
        for x in (k, v):
            x[b, n:] = math.nan
            x[b, : first[b]] = math.nan
    caches = [k, v]
    if form == "batch_idx":
        order = [4, 0, 5, 2]
        caches = [torch.full((6, *x.shape[1:]), math.nan, dtype=FP16) for x in (k, v)]
        for whole, x in zip(caches, (k, v), strict=True):
            whole[order] = x
        options["cache_batch_idx"] = int32(*order)
    if form == "paged":
        blocks = torch.randperm(25)[:20].view(4, 5).int()
        caches = [torch.full((25, 4, *x.shape[2:]), math.nan, dtype=FP16) for x in (k, v)]
        for whole, x in zip(caches, (k, v), strict=True):
            whole[blocks.flatten().long()] = x.reshape(20, 4, *x.shape[2:])
        for b, n in enumerate(lengths):
            blocks[b, -(-n // 4) :] = 1 << 30  # of slots that are not used: never looked at
        options["block_table"] = blocks
    out, lse = attend(q, *caches, cache_seqlens=int32(*lengths), window_size=window, **options)
    for b in range(4):
        assert torch.allclose(out[b].double(), exact[b][0], atol=2e-3)
        assert torch.allclose(lse[b].double(), exact[b][1], rtol=1e-5, atol=1e-5)
    assert bool((out[0] == 0).all()) and bool((lse[0] == -math.inf).all())


def test_lengths_may_be_one_number_or_none() -> None:
    q, k = torch.randn(2, 1, 2, 32, dtype=BF16), torch.randn(2, 9, 2, 32, dtype=BF16)
    for given, same in ((5, int32(5, 5)), (None, int32(9, 9)), (int32(99, -3), int32(9, 0))):
        one, other = (attend(q, k, k, cache_seqlens=each) for each in (given, same))
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("scales", ["head", "token"])
def test_scales_of_an_e4m3_cache(scales: str) -> None:
    q = torch.randn(2, 1, 4, 32, dtype=BF16)
    k, v = (torch.randn(2, 12, 2, 32).to(E4M3) for _ in range(2))
    shape = (2, 2) if scales == "head" else (2, 12, 2)
    k_scale, v_scale = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    out, lse = attend(q, k, v, cache_seqlens=int32(12, 5), k_descale=k_scale, v_descale=v_scale)
    for b, n in enumerate((12, 5)):
        full = [
            x[b, :n].double() * (s[b] if scales == "head" else s[b, :n]).unsqueeze(-1).double()
            for x, s in ((k, k_scale), (v, v_scale))
        ]
        exact = by_hand(q[b], *full, 32**-0.5)
        assert torch.allclose(out[b].double(), exact[0], atol=2e-2)
        assert torch.allclose(lse[b].double(), exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", ["head", "token"])
def test_a_query_of_e4m3(scales: str) -> None:
    q = torch.randn(2, 3, 4, 32).to(E4M3)
    k, v = (torch.randn(2, 12, 2, 32).to(E4M3) for _ in range(2))
    q_scale = torch.tensor([[0.5, 3.0], [-1.5, 0.0]])
    shape = (2, 2) if scales == "head" else (2, 12, 2)
    options = {"k_descale": torch.rand(shape) + 0.5, "v_descale": torch.rand(shape) + 0.5, "causal": True}
    out, lse = attend(q, k, v, cache_seqlens=int32(12, 5), q_descale=q_scale, **options)
    assert out.dtype == BF16
    whole = (q.float() * q_scale.repeat_interleave(2, 1)[:, None, :, None]).to(
        FP16
    )  # a product of few bits: exact
    want = attend(whole, k, v, cache_seqlens=int32(12, 5), **options)
    assert torch.allclose(out.float(), want[0].float(), rtol=5e-3) and torch.allclose(lse, want[1], atol=1e-6)


# -- appending ------------------------------------------------------------------------------------------------


class Caches:
    """A cache of every form, to be filled, and what to call with."""

    def __init__(self, form: str, cached: str, head_dim: int, head_dim_v: int, rotary: str = "none"):
        shape = {"contiguous": (3, 12), "batch_idx": (5, 12), "paged": (14, 3)}[form]
        dtype = FP16 if cached == "16bit" else E4M3
        self.k, self.v = (torch.zeros(*shape, 2, d).to(dtype) for d in (head_dim, head_dim_v))
        self.options: dict[str, Any] = {}
        if form == "batch_idx":
            self.options["cache_batch_idx"] = int32(4, 0, 2)
        if form == "paged":
            self.options["block_table"] = torch.arange(13, 1, -1).view(3, 4).int()
        if cached == "token":
            self.options |= {f"{n}_descale": torch.zeros(*shape, 2) for n in "kv"}
        if cached == "head":
            self.options |= {f"{n}_descale": torch.linspace(0.01, 0.03, 6).view(3, 2) for n in "kv"}
        if cached != "16bit":
            self.options["rotation_signs"] = rotation_signs(head_dim, 1)
        if rotary != "none":
            cos, sin = table(12, 16, FP16)
            self.options |= {
                "rotary_cos": cos,
                "rotary_sin": sin,
                "rotary_interleaved": rotary == "interleaved",
            }

    def tensors(self) -> list[Tensor]:
        found = [self.k.view(torch.uint8), self.v.view(torch.uint8)]
        return found + [self.options[n] for n in ("k_descale", "v_descale") if n in self.options]


@pytest.mark.parametrize("rotary", ["none", "half", "interleaved"])
@pytest.mark.parametrize("cached", ["16bit", "head", "token"])
@pytest.mark.parametrize("form", ["contiguous", "batch_idx", "paged"])
def test_token_by_token_equals_all_at_once(form: str, cached: str, rotary: str) -> None:
    k, v = torch.randn(3, 9, 2, 48, dtype=FP16), torch.randn(3, 9, 2, 32, dtype=FP16)
    start = [0, 5, 2]  # of the second sequence two tokens do not fit
    at_once, by_one = (Caches(form, cached, 48, 32, rotary) for _ in range(2))
    append_kv(k, v, at_once.k, at_once.v, cache_seqlens=int32(*start), backend="reference", **at_once.options)
    for i in range(9):
        lengths = int32(*(n + i for n in start))
        token = slice(i, i + 1)
        append_kv(
            k[:, token],
            v[:, token],
            by_one.k,
            by_one.v,
            cache_seqlens=lengths,
            backend="reference",
            **by_one.options,
        )
    for one, other in zip(at_once.tensors(), by_one.tensors(), strict=True):
        assert torch.equal(one, other)
    q = torch.randn(3, 2, 4, 48, dtype=FP16)
    alone, given = (Caches(form, cached, 48, 32, rotary) for _ in range(2))
    append_kv(k, v, alone.k, alone.v, cache_seqlens=int32(*start), backend="reference", **alone.options)
    attend(q, given.k, given.v, k=k, v=v, cache_seqlens=int32(*start), causal=True, **given.options)
    for one, other in zip(alone.tensors(), given.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_positions_of_rotary_embedding(causal: bool, interleaved: bool) -> None:
    """K at the slots it goes to; Q from the first of them on, or all at it without a mask."""
    q, k, v = (torch.randn(2, 3, 2, 32, dtype=FP16) for _ in range(3))
    caches = torch.randn(2, 10, 2, 32, dtype=FP16), torch.randn(2, 10, 2, 32, dtype=FP16)
    cos, sin = table(10, 16, FP16)
    rotary, lengths = Rotary(cos, sin, interleaved), [4, 0]
    exact = []
    for b, n in enumerate(lengths):
        turned = rotary.embed(q[b : b + 1], n)
        if not causal:
            turned = torch.cat([rotary.embed(q[b : b + 1, i : i + 1], n) for i in range(3)], dim=1)
        keys = torch.cat((caches[0][b, :n], rotary.embed(k[b : b + 1], n)[0].to(FP16)))
        values = torch.cat((caches[1][b, :n], v[b]))
        exact.append(by_hand(turned[0].to(FP16), keys, values, 32**-0.5, right=0 if causal else -1))
    out, lse = attend(
        q,
        *caches,
        k=k,
        v=v,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        cache_seqlens=int32(*lengths),
        causal=causal,
    )
    for b in range(2):
        assert torch.allclose(out[b].double(), exact[b][0], atol=2e-3)
        assert torch.allclose(lse[b].double(), exact[b][1], rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[1][0, 4:7], v[0])


def test_rotation_changes_nothing_but_rounding() -> None:
    """Scores in the rotated space are those of the original one."""
    q, k, v = (torch.randn(1, 12, 2, 64, dtype=FP16) for _ in range(3))
    exact = by_hand(q[0, :1], k[0], v[0], 0.125)
    cache = Caches("contiguous", "token", 64, 64)
    out, lse = attend(
        q[:, :1],
        cache.k[:1],
        cache.v[:1],
        k=k,
        v=v,
        cache_seqlens=0,
        **{n: x[:1] if "descale" in n else x for n, x in cache.options.items()},
    )
    assert (out[0].double() - exact[0]).abs().max() < 0.1
    assert (lse[0].double() - exact[1]).abs().max() < 0.05
    # The codes are those of the rotated keys.
    signs = cache.options["rotation_signs"]
    rotated = walsh_hadamard(k[0].float() * signs) / 8
    stored = cache.k[0].float() * cache.options["k_descale"][0].unsqueeze(-1)
    assert (
        (stored - rotated).abs() <= rotated.abs() / 16 + cache.options["k_descale"][0].unsqueeze(-1)
    ).all()


def test_nan_of_a_new_token_is_seen() -> None:
    k, v = torch.randn(3, 1, 2, 48, dtype=FP16), torch.randn(3, 1, 2, 32, dtype=FP16)
    k[1, 0, 1, 5] = math.inf
    cache = Caches("contiguous", "token", 48, 32)
    append_kv(k, v, cache.k, cache.v, cache_seqlens=0, backend="reference", **cache.options)
    scale = cache.options["k_descale"][:, 0]
    assert torch.equal(scale.isnan(), torch.tensor([[False, False], [False, True], [False, False]]))


# -- refusals -------------------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    q, k = torch.zeros(2, 1, 4, 64, dtype=BF16), torch.zeros(2, 32, 2, 64, dtype=BF16)
    return {"q": q, "k_cache": k, "v_cache": k.clone(), "cache_seqlens": int32(3, 4), "backend": "reference"}


def fp8() -> dict[str, Any]:
    case = good()
    case["k_cache"] = case["v_cache"] = case["k_cache"].to(E4M3)
    return case | {"k_descale": torch.ones(2, 2), "v_descale": torch.ones(2, 2)}


NEW = torch.zeros(2, 1, 2, 64, dtype=BF16)
COS = torch.zeros(32, 16, dtype=BF16)
Q8 = torch.zeros(2, 1, 4, 64).to(E4M3)


@pytest.mark.parametrize(
    ("base", "change", "error", "match"),
    [
        (good, {"q": 1}, TypeError, "q is a int"),
        (good, {"q": torch.zeros(2, 1, 4, 64)}, TypeError, "q has dtype torch.float32"),
        (good, {"q": torch.zeros(2, 1, 3, 64, dtype=BF16)}, ValueError, "heads of q is 3"),
        (good, {"q": torch.zeros(2, 1, 4, 32, dtype=BF16)}, ValueError, "head_dim of k_cache is 64"),
        (
            good,
            {"k_cache": torch.zeros(2, 32, 2, 64, dtype=FP16)},
            TypeError,
            "k_cache has dtype torch.float16",
        ),
        (
            good,
            {"v_cache": torch.zeros(2, 31, 2, 64, dtype=BF16)},
            ValueError,
            "second size of v_cache is 31",
        ),
        (good, {"v_cache": torch.zeros(2, 32, 2, 68, dtype=BF16)}, ValueError, "head_dim of v_cache is 68"),
        (good, {"v_cache": torch.zeros(2, 32, 2, 64).to(E4M3)}, TypeError, "v_cache has dtype"),
        (
            good,
            {"k_cache": torch.zeros(2, 32, 2, 65, dtype=BF16)[..., 1:]},
            ValueError,
            "k_cache has strides .* multiples of 16 bytes",
        ),
        (good, {"cache_seqlens": 33}, ValueError, "cache_seqlens is 33; allowed: 0 to .* 32"),
        (good, {"cache_seqlens": True}, TypeError, "cache_seqlens is a bool"),
        (good, {"cache_seqlens": torch.zeros(2)}, TypeError, "cache_seqlens has dtype torch.float32"),
        (good, {"cache_seqlens": int32(1)}, ValueError, r"cache_seqlens has shape \(1,\)"),
        (good, {"cache_batch_idx": int32(1)}, ValueError, r"cache_batch_idx has shape \(1,\)"),
        (good, {"cache_leftpad": 3}, TypeError, "cache_leftpad is a int"),
        (good, {"block_table": int32(1, 2)}, ValueError, r"block_table has shape \(2,\)"),
        (
            good,
            {"block_table": int32(1, 2).view(2, 1), "cache_batch_idx": int32(1, 0)},
            ValueError,
            "cache_batch_idx is given with a block_table",
        ),
        (
            good,
            {"q": torch.zeros(3, 1, 4, 64, dtype=BF16), "cache_seqlens": 3},
            ValueError,
            "batch of k_cache is 2",
        ),
        (
            good,
            {"k_descale": torch.ones(2, 2)},
            ValueError,
            "k_descale is given with a cache of torch.bfloat16",
        ),
        (good, {"num_splits": -1}, ValueError, "num_splits is -1"),
        (good, {"num_splits": 2.0}, TypeError, "num_splits is a float"),
        (
            good,
            {"backend": "sm80"},
            ValueError,
            "q is on device cpu; allowed: a GPU of compute capability 8.0, 8.6",
        ),
        (good, {"backend": "sm90"}, ValueError, "q is on device cpu; .* or backend='reference'"),
        (good, {"softcap": -1.0}, ValueError, "softcap is -1"),
        (good, {"window_size": 3}, TypeError, "window_size is 3"),
        (good, {"k": NEW}, ValueError, "k is given and v is None"),
        (good, {"v": NEW}, ValueError, "v is given and k is None"),
        (good, {"k": NEW.half(), "v": NEW}, TypeError, "k has dtype torch.float16"),
        (good, {"k": NEW, "v": NEW[..., :32].contiguous()}, ValueError, "head_dim of v is 32"),
        (good, {"k": NEW[:, :, :1], "v": NEW}, ValueError, "heads of k is 1"),
        (good, {"k": NEW[:1], "v": NEW}, ValueError, "batch of k is 1"),
        (good, {"k": NEW, "v": NEW.repeat(1, 2, 1, 1)}, ValueError, "seqlen of v is 2"),
        (good, {"k": NEW, "v": NEW, "cache_seqlens": None}, TypeError, "cache_seqlens is None"),
        (
            good,
            {"k": NEW, "v": NEW, "cache_seqlens": 32},
            ValueError,
            "cache_seqlens is 32; .* without the 1 of k, 31",
        ),
        (good, {"rotary_cos": COS, "rotary_sin": COS}, ValueError, "rotary_cos is given and k is None"),
        (
            good,
            {"k": NEW, "v": NEW, "rotary_sin": COS},
            ValueError,
            "rotary_sin is given and rotary_cos is None",
        ),
        (
            good,
            {"k": NEW, "v": NEW, "rotary_cos": COS[:31], "rotary_sin": COS},
            ValueError,
            "rotary_cos is .* at least 32",
        ),
        (good, {"rotary_interleaved": 1}, TypeError, "rotary_interleaved is 1"),
        (good, {"rotation_signs": torch.ones(64)}, ValueError, "rotation_signs is given with a cache of"),
        (fp8, {"rotation_signs": torch.ones(32)}, ValueError, r"rotation_signs has shape \(32,\)"),
        (fp8, {"rotation_signs": torch.ones(64, dtype=BF16)}, TypeError, "rotation_signs has dtype"),
        (fp8, {"k_descale": None}, TypeError, "k_descale is None"),
        (fp8, {"k_descale": torch.ones(2, 2, dtype=BF16)}, TypeError, "k_descale has dtype"),
        (
            fp8,
            {"k_descale": torch.ones(2, 4)},
            ValueError,
            r"k_descale has shape \(2, 4\); allowed: \(2, 2\) or",
        ),
        (fp8, {"k_descale": torch.ones(2, 32, 2)}, ValueError, "v_descale has shape"),
        (fp8, {"q": Q8}, TypeError, "q_descale is None"),
        (
            fp8,
            {"q": Q8, "q_descale": torch.ones(2, 4)},
            ValueError,
            r"q_descale has shape \(2, 4\); allowed: .*\(2, 2\)",
        ),
        (
            fp8,
            {"q": Q8, "q_descale": torch.ones(2, 2).half()},
            TypeError,
            "q_descale has dtype torch.float16",
        ),
        (fp8, {"q_descale": torch.ones(2, 2)}, ValueError, "q_descale is given with q of torch.bfloat16"),
        (
            good,
            {"q": Q8},
            TypeError,
            "k_cache has dtype torch.bfloat16; allowed: that of q, torch.float8_e4m3fn$",
        ),
        (
            fp8,
            {"q": Q8, "q_descale": torch.ones(2, 2), "k": NEW, "v": NEW},
            ValueError,
            "k is given with q of torch.float8_e4m3fn; allowed: None",
        ),
        (
            fp8,
            {
                "q": torch.zeros(2, 1, 4, 40, dtype=BF16),
                "k_cache": torch.zeros(2, 32, 2, 40).to(E4M3)[:, ::2].contiguous(),
                "v_cache": torch.zeros(2, 16, 2, 48).to(E4M3),
            },
            ValueError,
            "head_dim of q is 40; allowed: multiples of 16",
        ),
    ],
)
def test_refusals(base: Any, change: dict[str, Any], error: type[Exception], match: str) -> None:
    flash_attn_with_kvcache(**base())
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(**{**base(), **change})


def test_no_gradients_and_no_kernel_here() -> None:
    case = good()
    case["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="q requires grad"):
        flash_attn_with_kvcache(**case)
    del case["backend"], case["q"]
    named = cute_attn.decode_kernel(torch.zeros(2, 1, 4, 64, dtype=BF16), backend="reference", **case)
    assert named == "reference"


# -- how work is shared out -----------------------------------------------------------------------------------


def test_every_tile_is_done_once_and_every_part_added_up() -> None:
    for _ in range(2000):
        batch, units = random.randint(1, 6), random.randint(1, 5)
        tiles = [random.choice([1, 1, 2, 3, 7, 20]) for _ in range(batch)]
        m_blocks = 1
        if random.random() < 0.5:
            splits = random.randint(1, 5)
            ctas = batch * units * splits
            plan = Shares(ctas, splits, 1, ctas if splits > 1 else 0)
        else:
            ctas = random.randint(1, 40)
            together, m_blocks = random.choice((1, 1, 2, 4)), random.randint(1, 3)
            units = together * m_blocks * random.randint(1, 3)
            ctas = max(ctas, together)
            plan = Shares(ctas, 0, random.randint(1, 3), 2 * ctas, together)
        found = decode_plan.pieces(plan, tiles, units, m_blocks)
        done = {(p.batch, p.unit, i): p for p in found for i in range(p.tile, p.tile + p.count)}
        assert len(done) == sum(p.count for p in found) == sum(tiles) * units
        slots = [p.slot for p in found if p.slot >= 0]
        assert len(set(slots)) == len(slots) and all(slot < plan.slots for slot in slots)
        for b in range(batch):
            for unit in range(units):
                left = {done[b, unit, i].slot for i in range(tiles[b])}
                assert (left - {-1}) == set(decode_plan.parts(plan, tiles, units, b, unit, m_blocks))


def test_neighbouring_heads_are_read_in_step() -> None:
    """Where rows of heads share a line, CTAs side by side have the same tiles of them."""
    plan = Shares(12, 0, 2, 24, 4)
    found = decode_plan.pieces(plan, [11, 30, 2], 8)
    for cta in range(0, 12, 4):
        steps = [[(p.batch, p.tile, p.count) for p in found if p.cta == cta + i] for i in range(4)]
        assert steps[0] and steps.count(steps[0]) == 4
        heads = [{p.unit % 4 for p in found if p.cta == cta + i} for i in range(4)]
        assert heads == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "cache", "heads_k", "count"),
    [
        (64, 64, "e4m3", 8, 2),
        (32, 64, "e4m3", 8, 4),
        (128, 128, "e4m3", 8, 1),
        (64, 64, "16bit", 8, 1),
        (128, 64, "e4m3", 6, 2),
        (64, 64, "e4m3", 1, 1),
        (40, 128, "16bit", 8, 8),
        (40, 128, "16bit", 4, 1),
    ],
)
def test_heads_in_step_end_with_a_line(
    head_dim: int, head_dim_v: int, cache: str, heads_k: int, count: int
) -> None:
    scales = "token" if cache == "e4m3" else "none"
    config = decode_plan.decode_config(head_dim, head_dim_v, "bf16", cache=cache, scales=scales)
    assert decode_plan.heads_in_step(config, heads_k) == count


def test_units_stay_whole_where_that_takes_hardly_longer() -> None:
    assert decode_plan.whole(264, [128] * 64, 8)  # two rounds of 128 for shares of 249
    assert decode_plan.whole(264, [16] * 128, 8)
    assert not decode_plan.whole(264, [128] * 16, 8)  # half of the CTAs would have nothing
    assert not decode_plan.whole(264, [16] * 127 + [1600], 8)  # one sequence would take as long as all
    config = decode_plan.decode_config(128, 128, "bf16", rows=8)
    known = decode_plan.shares(config, 64, 8, 8, 8192, 0, 132, (0, 8192))
    assert known == Shares(512, 1, 1, 0)  # nothing to combine: that kernel is not launched
    assert decode_plan.shares(config, 64, 8, 8, 8192, 0, 132).splits == 0
    assert decode_plan.shares(config, 1, 8, 8, 8192, 0, 132, (0, 0)) == Shares(8, 1, 1, 0)


OF_CODES = {"cache": "e4m3", "scales": "token"}


@pytest.mark.parametrize(
    ("batch", "heads_k", "keys", "known", "form", "expected"),
    [
        (
            1,
            8,
            131072,
            False,
            {},
            Shares(128, 16, 1, 128),
        ),  # one sequence: whatever its length on the device is
        (1, 8, 1024, False, {}, Shares(64, 8, 1, 64)),  # two tiles each at least
        (1, 8, 64, False, {}, Shares(8, 1, 1, 0)),
        (1, 32, 8192, False, {}, Shares(128, 4, 1, 128)),
        (4, 8, 8192, True, {}, Shares(128, 4, 1, 128)),
        (4, 8, 8192, False, {}, Shares(128, 0, 2, 256)),  # sequences may be of unlike lengths
        (16, 8, 8192, False, {}, Shares(128, 0, 2, 256)),
        (16, 8, 8192, True, {}, Shares(128, 1, 1, 0)),
        (1, 96, 8192, False, {}, Shares(264, 0, 2, 528)),  # 96 or 192 of 132 SMs
        (64, 8, 8192, False, {}, Shares(264, 0, 2, 528)),
        (1, 8, 8192, False, OF_CODES, Shares(128, 16, 1, 128)),
        (1, 8, 131072, False, OF_CODES, Shares(128, 16, 1, 128)),
        (1, 8, 131072, False, {"page_size": 64}, Shares(264, 33, 1, 264)),
        (1, 8, 131072, False, {"rows": 32}, Shares(264, 33, 1, 264)),
        (16, 8, 8192, False, OF_CODES, Shares(128, 0, 2, 256)),
        (18, 8, 8192, False, OF_CODES, Shares(264, 0, 2, 528)),  # 144 of 264
        (1, 8, 131072, False, {"arch": "sm_80"}, Shares(132, 0, 2, 264)),
    ],
)
def test_ctas_where_shares_are_even(
    batch: int, heads_k: int, keys: int, known: bool, form: dict[str, Any], expected: Shares
) -> None:
    config = decode_plan.decode_config(128, 128, "bf16", **{"rows": 8, **form})
    seen = (0, keys) if known else None
    assert decode_plan.shares(config, batch, heads_k, form.get("rows", 8), keys, 0, 132, seen) == expected


@pytest.mark.parametrize(
    # units: 0 where work is in shares; pairs are of lengths on the device and of lengths that the host knows
    ("dim", "batch", "heads_k", "keys", "form", "warps", "units"),
    [
        (128, 128, 8, 1024, {}, 4, 1024),
        (128, 128, 8, 2048, {}, 4, 1024),
        (128, 128, 8, 2049, {}, 4, (0, 1024)),  # long units, of unlike lengths for all that is known
        (128, 256, 8, 1024, {}, 4, 2048),
        (128, 128, 32, 1024, {}, 4, 4096),
        (128, 16, 32, 1024, {}, 4, 512),
        (128, 150, 8, 1024, {}, 4, 0),  # the second round nearly empty
        (128, 16, 8, 1024, {}, 4, 128),
        (256, 128, 8, 1024, {}, 4, 1024),
        (64, 128, 8, 1024, {}, 4, 512),  # of two heads
        (64, 128, 32, 1024, {}, 4, 2048),
        (64, 128, 32, 1024, {"rows": 1}, 4, 2048),
        (64, 128, 33, 1024, {}, 4, 4224),  # heads in no pairs
        (64, 16, 8, 1024, {}, 8, 128),
        (64, 16, 8, 8192, {}, (4, 8), 0),  # of two heads
        (
            64,
            16,
            7,
            8192,
            {},
            (4, 8),
            0,
        ),  # even shares of lengths that only the device knows begin within units
        (64, 1, 8, 131072, {}, 8, 0),
        (64, 1, 8, 32768, {}, 8, 0),
        (128, 128, 8, 1024, {"query": "e4m3", "sinks": True, "leftpad": True, "batch_idx": True}, 4, 1024),
        (128, 128, 8, 1024, {"softcap": True}, 4, 1024),
        (64, 128, 8, 1024, {"softcap": True}, 4, 512),
        (64, 128, 33, 1024, {"softcap": True}, 4, 4224),
        (128, 128, 8, 1024, {"page_size": 64}, 4, 0),
        (128, 16, 8, 8192, {"page_size": 64}, 8, 0),  # long units in pages
        (128, 16, 8, 8192, {"page_size": 1}, 4, 0),
        (128, 16, 8, 8192, {"page_size": 64, "rows": 32}, 4, 0),
        (128, 16, 8, 8192, {"page_size": 64, "cache": "16bit", "scales": "none"}, 4, 0),
        (128, 128, 8, 1024, {"arch": "sm_89"}, 4, 0),
        (128, 128, 8, 1024, {"cache": "16bit", "scales": "none"}, 4, 1024),
        (128, 128, 8, 2049, {"cache": "16bit", "scales": "none"}, 4, (0, 1024)),
        (64, 128, 8, 1024, {"cache": "16bit", "scales": "none"}, 4, 1024),
        (64, 128, 32, 1024, {"cache": "16bit", "scales": "none"}, 4, 4096),
        (96, 128, 8, 1024, {}, 4, 1024),  # lanes do not take whole rows
        (192, 128, 8, 1024, {}, 4, 1024),
        (
            256,
            16,
            32,
            8192,
            {"cache": "16bit", "scales": "none"},
            4,
            (0, 512),
        ),  # a ring of two steps where CTAs have many
        (256, 1, 8, 131072, {"cache": "16bit", "scales": "none"}, 4, 0),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_many_short_units_have_a_cta_each(
    dim: int,
    batch: int,
    heads_k: int,
    keys: int,
    form: dict[str, Any],
    warps: int | tuple[int, int],
    units: int | tuple[int, int],
    known: bool,
) -> None:
    config = decode_plan.decode_config(dim, dim, "bf16", **{"rows": 8, **OF_CODES, **form})
    seen = (capacity := 100000, capacity + keys) if known else None
    rows, behind = form.get("rows", 8), (keys if seen is None else 2 * capacity, 0, 132, seen)
    kernel, plan = decode_plan.chosen(config, batch, heads_k, rows, *behind)
    assert kernel.warps == (warps[known] if isinstance(warps, tuple) else warps)
    assert kernel in decode_plan.kernels(config, rows)
    if isinstance(units, tuple):
        units = units[known]
    if units:
        assert plan == Shares(units, 1, 1, 0)  # no combining kernel, whatever the lengths are
        assert kernel.whole
    else:
        of_pairs = (batch, heads_k // kernel.heads, rows * kernel.heads)
        assert plan == decode_plan.shares(kernel, *of_pairs, *behind)
        assert not kernel.whole
    assert decode_plan.chosen(config, batch, heads_k, rows, keys, 2, 132)[0] == config


def test_narrow_codes_want_all_ctas_that_an_sm_holds() -> None:
    config = decode_plan.decode_config(64, 64, "bf16", rows=8, page_size=16, **OF_CODES)
    assert decode_plan.ctas_per_sm(config) == 2
    for tiles, splits in ((8 * 16, 16), (8 * 17, 33)):  # of one unit in eight; short, and not
        assert decode_plan.even_splits(config, 8, tiles, 132) == splits


def test_kernels_of_four_and_of_eight_warps() -> None:
    """Shares of any length, fixed ones, whole units; those of long shares; the same of two heads."""
    for form, warps in (
        ({"rows": 1}, [4, 4, 4, 8, 8, 8] * 2),
        ({"rows": 16, "softcap": True}, [4, 4, 4, 8, 8, 8]),
        ({"rows": 32}, [4, 4]),
        ({"page_size": 16}, [4, 8]),
        ({"page_size": 1}, [4]),
        ({"arch": "sm_89"}, [4]),
    ):
        config = decode_plan.decode_config(64, 64, "bf16", **{**OF_CODES, **form})
        assert [kernel.warps for kernel in decode_plan.kernels(config, form.get("rows", 8))] == warps
    config = decode_plan.decode_config(64, 64, "bf16", rows=8, **OF_CODES)
    _, fixed, whole, wide, *_ = decode_plan.kernels(config, 8)
    assert whole.whole and whole.early and fixed.fixed and fixed.early and not (wide.whole or wide.fixed)
    assert decode_plan.ctas_per_sm(wide) == 1
    assert decode_plan.shares(wide, 16, 8, 8, 8192, 0, 132) == Shares(128, 0, 2, 256, 2)
    widest = decode_plan.decode_config(256, 256, "bf16", rows=8)
    assert [kernel.stages for kernel in decode_plan.kernels(widest, 8)] == [3, 3, 3, 2, 2, 2]


def test_four_whole_units_of_narrow_rows_on_an_sm() -> None:
    """Where there are as many; else the ring is as deep as for two."""
    config = decode_plan.decode_config(64, 64, "bf16", rows=8)
    for batch, heads_k, keys, stages, warps in (
        (128, 8, 1024, 3, 4),
        (16, 32, 1024, 3, 4),  # 512 of 528 places
        (32, 8, 1024, 7, 4),  # 256 of 264
        (16, 8, 1024, 7, 4),
        (128, 8, 4096, 7, 4),  # long: not whole
    ):
        kernel, plan = decode_plan.chosen(config, batch, heads_k, 8, keys, 0, 132)
        assert (kernel.stages, kernel.warps) == (stages, warps)
        assert kernel.whole == (keys <= decode_plan.OWN_KEYS) == (plan.ctas == batch * heads_k)
        assert kernel in decode_plan.kernels(config, 8)
    assert decode_plan.four_units(config).ctas_by_smem == 4
    for dim, form in ((128, {}), (64, OF_CODES), (64, {"page_size": 16}), (48, {})):
        assert decode_plan.four_units(decode_plan.decode_config(dim, dim, "bf16", rows=8, **form)) is None


def test_two_short_shares_of_narrow_rows_on_an_sm() -> None:
    for dim, form, heads_k, tiles, splits in (
        (64, {}, 32, 16, 8),  # of 1,024 keys: two tiles a share
        (64, {}, 32, 17, 4),
        (64, {}, 66, 16, 4),
        (64, {}, 128, 16, 1),  # alone each fills an SM
        (128, {}, 32, 16, 4),
        (64, {"page_size": 16}, 32, 16, 4),
    ):
        config = decode_plan.decode_config(dim, dim, "bf16", rows=1, **form)
        assert decode_plan.even_splits(config, heads_k, tiles, 132) == splits


def test_even_shares_are_even() -> None:
    """Of units of one length; the parts of none are spread over more CTAs than it has shares."""
    config = decode_plan.decode_config(128, 128, "bf16", rows=8)
    for batch, heads_k in ((2, 8), (4, 8), (16, 8), (2, 32)):
        plan = decode_plan.shares(config, batch, heads_k, 8, 4096, 0, 132)
        tiles = -(-4096 // config.tile_keys)
        found = decode_plan.pieces(plan, [tiles] * batch, heads_k)
        splits = plan.ctas // (batch * heads_k)
        assert [p.count for p in found] == [tiles // splits] * plan.ctas == [tiles // splits] * len(found)


def test_shares_of_work_are_even() -> None:
    for total in range(60):
        for parts in range(1, 20):
            starts = [decode_plan.share_start(total, parts, i) for i in range(parts + 1)]
            sizes = [b - a for a, b in itertools.pairwise(starts)]
            assert starts[0] == 0 and starts[-1] == total and max(sizes) - min(sizes) <= 1
            for item in range(total):
                share = decode_plan.share_of(total, parts, item)
                assert starts[share] <= item < starts[share + 1]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
@pytest.mark.parametrize("dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("scales", ["none", "head", "token"])
def test_chosen_kernels_can_be_built(dim: int, scales: str, arch: str) -> None:
    if scales != "none" and arch in ("sm_80", "sm_86"):
        with pytest.raises(ValueError, match="arch must be one of"):
            decode_plan.decode_config(dim, dim, "bf16", cache="e4m3", scales=scales, arch=arch).check()
        return
    for rows in (1, 8, 16, 17, 64, 200):
        cache = "16bit" if scales == "none" else "e4m3"
        config = decode_plan.decode_config(dim, dim, "bf16", cache=cache, scales=scales, rows=rows, arch=arch)
        config.check()
        assert config.smem_bytes <= min(SMEM_LIMIT, SM80_ARCHS[arch].smem_bytes - 1024)
        shares = decode_plan.shares(config, 4, 8, rows, 100000, 0, 132)
        assert shares.ctas <= 132 * decode_plan.ctas_per_sm(config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"head_dim": 36}, "head_dim must be a multiple of 8"),
        ({"cache": "e4m3", "scales": "head", "head_dim": 40}, "head_dim must be a multiple of 16"),
        ({"cache": "e4m3"}, "scales must be one of"),
        ({"m_tiles": 4}, "m_tiles"),
        ({"stages": 1}, "stages"),
        ({"stages": 40}, "shared memory"),
        ({"paging": "some"}, "paging"),
        ({"query": "e4m3"}, "query must be one of"),
        ({"heads": 3}, "heads must be 1 or 2"),
        ({"whole": True, "fixed": True}, "fixed must be False"),
        ({"heads": 2, "head_dim": 64, "head_dim_v": 64}, "heads must be 1 but for"),
        ({"heads": 2, "cache": "e4m3", "scales": "token", "paging": "block"}, "heads must be 1 but for"),
        ({"heads": 2, "cache": "e4m3", "scales": "token", "head_dim": 256}, "m_tiles"),
    ],
)
def test_configs_that_cannot_be_built(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(DecodeConfig(128, 128, "bf16"), **change).check()


def test_names_tell_kernels_apart() -> None:
    base = DecodeConfig(128, 128, "bf16")
    changes: list[dict[str, Any]] = [
        {},
        {"head_dim_v": 64},
        {"dtype": "fp16"},
        {"cache": "e4m3", "scales": "head"},
        {"cache": "e4m3", "scales": "token"},
        {"cache": "e4m3", "scales": "token", "query": "e4m3"},
        {"cache": "e4m3", "scales": "token", "heads": 2},
        {"paging": "block"},
        {"paging": "token"},
        {"m_tiles": 2},
        {"warps": 8},
        {"stages": 2},
        {"arch": "sm_80"},
        *(
            {name: True}
            for name in ("row_ends", "softcap", "alibi", "sinks", "batch_idx", "leftpad", "whole", "fixed")
        ),
    ]
    assert len({replace(base, **change).name for change in changes}) == len(changes)
    new = AppendConfig(128, 128, "bf16")
    changes = [
        {},
        {"head_dim_v": 64},
        {"in_dtype": "fp16"},
        {"cache": "e4m3", "scales": "head"},
        {"cache": "e4m3", "scales": "token"},
        {"rotary": "half"},
        {"rotary": "interleaved"},
        {"keys": False},
        {"arch": "sm_80"},
        *({name: True} for name in ("paged", "rotate", "batch_idx", "queries")),
    ]
    assert len({replace(new, **change).name for change in changes}) == len(changes)
    assert TENSORS == ("k", "v", "rotary_cos", "rotary_sin", "rotation_signs")


# -- machine code ---------------------------------------------------------------------------------------------

SAMPLE = decode_plan.all_decode_configs()


@pytest.fixture(scope="session")
def figures() -> Iterator[Callable[[Any], KernelFigures]]:
    with figures_of(SAMPLE) as result:
        yield result


@pytest.mark.parametrize("config", SAMPLE, ids=lambda config: config.name)
def test_machine_code(
    config: DecodeConfig | AppendConfig | UnpackConfig, figures: Callable[[Any], KernelFigures]
) -> None:
    found = figures(config)
    assert found.name == config.name
    no_spills(found)
    assert found.counts["STG"] > 0 and found.registers <= 255
    if isinstance(config, DecodeConfig):
        assert found.smem_bytes == config.smem_bytes
        # One pass over the keys of a step: a load of 16 rows of K or V for each two pieces of 16 bytes.
        assert found.counts["LDSM"] == -(-config.k_chunks // 2) + -(-config.v_chunks // 2)
    else:
        assert found.counts["LDSM"] == 0


def test_lengths_that_the_host_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the numbers that a device has, where it has any that are large enough."""
    cpu = torch.device("cpu")
    assert kv.lengths_of(7, 2, cpu).tolist() == [7, 7] and cpu not in kv._numbers
    numbers = torch.arange(10, dtype=torch.int32)
    monkeypatch.setattr(kv, "_LENGTHS", 10)
    monkeypatch.setattr(kv, "_numbers", {cpu: numbers})
    for length in (0, 1, 9, 10, 1 << 20):
        found = kv.lengths_of(length, 3, cpu)
        assert found.dtype == torch.int32 and found.tolist() == [length] * 3
        assert (found.data_ptr() == numbers.data_ptr() + 4 * length) == (length < 10)
