"""`flash_attn_varlen_func` without a GPU: refusals, the reference, the plan, a launch, the kernel's index maths."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

import cute_attn
from cute_attn import (
    flash,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kernel,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_varlen,
    launch,
)
from cute_attn.flash_varlen import reference_varlen
from cute_attn.kernels.common.varlen import (
    FAR,
    one_batch,
    ragged,
    ragged_coord,
    ragged_load,
    unit_of_sequence,
)
from cute_attn.kernels.config import Fwd16Config
from cute_attn.plan16 import forward16_config
from cute_attn.remember import Remembered

BF16, FP16 = torch.bfloat16, torch.float16
HOST = cute.AddressSpace.generic
LENGTHS = ((3, 4), (0, 2), (5, 0), (1, 7), (0, 0), (6, 2))


def ends(lengths: Any) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def inputs(
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    heads_q: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int = 32,
    dtype: torch.dtype = BF16,
) -> dict[str, Any]:
    queries, keys = zip(*lengths, strict=True)
    return {
        "q": torch.randn(sum(queries), heads_q, head_dim).to(dtype),
        "k": torch.randn(sum(keys), heads_k, head_dim).to(dtype),
        "v": torch.randn(sum(keys), heads_k, head_dim_v).to(dtype),
        "cu_seqlens_q": ends(queries),
        "cu_seqlens_k": ends(keys),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
    }


# --- refusals


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": 3}, TypeError, "q is a int; allowed: a torch.Tensor"),
        (
            {"k": torch.zeros(2, 7, 2, 64)},
            ValueError,
            r"k has 4 dimensions, .*allowed: 3, \(total, heads, head_dim\)",
        ),
        ({"v": torch.zeros(15, 2, 32)}, TypeError, "v has dtype torch.float32"),
        ({"v": torch.zeros(14, 2, 32).to(BF16)}, ValueError, "seqlen of v is 14; allowed: that of k, 15"),
        ({"k": torch.zeros(15, 2, 72).to(BF16)}, ValueError, "head_dim of k is 72; allowed: that of q, 64"),
        ({"q": torch.zeros(15, 3, 64).to(BF16)}, ValueError, "heads of q is 3; allowed: a multiple"),
        ({"cu_seqlens_q": [0, 15]}, TypeError, "cu_seqlens_q is a list; allowed: an int32 torch.Tensor"),
        ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k is a NoneType"),
        (
            {"cu_seqlens_q": ends([3, 4]).long()},
            TypeError,
            "cu_seqlens_q has dtype torch.int64; allowed: torch.int32",
        ),
        (
            {"cu_seqlens_q": ends([3, 4])[None]},
            ValueError,
            r"cu_seqlens_q has shape \(1, 3\), .*one dimension",
        ),
        (
            {"cu_seqlens_q": ends([1] * 13)[::2]},
            ValueError,
            "cu_seqlens_q .*allowed: one dimension, contiguous",
        ),
        ({"cu_seqlens_q": ends([])[:0]}, ValueError, r"cu_seqlens_q has shape \(0,\); allowed: \(batch"),
        ({"cu_seqlens_k": ends([3, 4])}, ValueError, r"cu_seqlens_k has shape \(3,\); allowed: \(7,\)"),
        ({"seqused_k": ends([3, 4])}, ValueError, r"seqused_k has shape \(3,\); allowed: \(6,\)"),
        (
            {"seqused_k": torch.zeros(6)},
            TypeError,
            "seqused_k has dtype torch.float32; allowed: torch.int32",
        ),
        (
            {"cu_seqlens_k": torch.zeros(7, dtype=torch.int32, device="meta")},
            ValueError,
            "cu_seqlens_k is on device meta; allowed: that of q, cpu",
        ),
        ({"max_seqlen_q": 3.0}, TypeError, "max_seqlen_q is a float; allowed: an int >= 0"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1; allowed: an int >= 0"),
        ({"max_seqlen_k": True}, TypeError, "max_seqlen_k is a bool"),
        (
            {"block_table": torch.zeros(1)},
            NotImplementedError,
            "pages are read by flash_attn_with_kvcache alone; allowed: None",
        ),
        ({"dropout_p": 0.1}, NotImplementedError, "there is no dropout"),
        ({"return_attn_probs": True}, NotImplementedError, "probabilities are never in memory"),
        ({"window_size": (-2, 0)}, ValueError, "allowed: ends >= 0, or -1 for none"),
        (
            {"alibi_slopes": torch.zeros(2, 4)},
            ValueError,
            r"alibi_slopes has shape \(2, 4\); allowed: \(4,\) or \(6, 4\)",
        ),
        (
            {"backend": "sm80"},
            ValueError,
            "q is on device cpu; allowed: a GPU of compute capability 8.0 to 8.9",
        ),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**{"backend": "reference", **inputs(), **changed})


def test_too_many_rows_are_refused() -> None:
    x = torch.zeros(1, 1, 64, dtype=BF16).expand(2**28, 8, 64)
    cu = ends([3])
    with pytest.raises(ValueError, match="q has 268435456 rows of 8 heads"):
        flash_attn_varlen_func(x, x, x, cu, cu, 1, 1, backend="reference")


def test_packed_refusals() -> None:
    cu = ends([3])
    with pytest.raises(ValueError, match=r"qkv has shape \(5, 2, 4, 64\); allowed: \(total, 3, heads"):
        flash_attn_varlen_qkvpacked_func(torch.zeros(5, 2, 4, 64), cu, 3)
    with pytest.raises(ValueError, match=r"kv has shape \(5, 3, 4, 64\); allowed: \(total_k, 2, heads"):
        flash_attn_varlen_kvpacked_func(torch.zeros(5, 4, 64), torch.zeros(5, 3, 4, 64), cu, cu, 3, 3)


def test_signature_is_flash_attns() -> None:
    names = [
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "alibi_slopes",
        "deterministic",
        "return_attn_probs",
    ]
    defaults = [0.0, None, False, (-1, -1), 0.0, None, False, False]
    four = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    for function, first, last in (
        (flash_attn_varlen_func, ["q", "k", "v", *four], ["block_table"]),
        (flash_attn_varlen_kvpacked_func, ["q", "kv", *four], []),
        (flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen"], []),
    ):
        parameters = inspect.signature(function).parameters.values()
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in positional] == first + names + last
        want = [inspect.Parameter.empty] * len(first) + defaults + [None] * len(last)
        assert [p.default for p in positional] == want
        assert getattr(cute_attn, function.__name__) is function


# --- the reference


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("features", [False, True])
def test_reference_is_one_attention_with_a_mask(window: tuple[int, int], features: bool) -> None:
    """All rows and keys in one matrix, in which a row sees keys of its own sequence."""
    given = inputs()
    q, k, v = (given[name].double() for name in "qkv")
    used = torch.tensor([4, 9, 0, 3, -1, 2], dtype=torch.int32)
    sequence_q, place_q, sequence_k, place_k = [], [], [], []
    shift = []
    for b, (m, n) in enumerate(LENGTHS):
        sequence_q += [b] * m
        place_q += range(m)
        shift += [min(n, max(int(used[b]), 0)) - m] * m
        sequence_k += [b if j < used[b] else -1 for j in range(n)]
        place_k += range(n)
    position = torch.tensor(place_q) + torch.tensor(shift)
    behind = torch.tensor(place_k)[None] - position[:, None]
    hidden = torch.tensor(sequence_q)[:, None] != torch.tensor(sequence_k)[None]
    if window[0] >= 0:
        hidden |= behind < -window[0]
    if window[1] >= 0:
        hidden |= behind > window[1]
    slopes, sinks = torch.rand(6, 4), torch.randn(4)
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, dim=1)) * 0.2
    more: dict[str, Any] = {}
    if features:
        more = {"softcap": 1.5, "alibi_slopes": slopes, "sinks": sinks}
        bias = slopes.double()[sequence_q].T[:, :, None] * behind.abs()
        scores = 1.5 * torch.tanh(scores / 1.5) - bias
    weights = torch.exp(scores).masked_fill(hidden, 0.0)
    total = weights.sum(2) + (sinks.double().exp()[:, None] if features else 0.0)
    exact = torch.einsum(
        "hij,jhd->ihd", weights / total.clamp(min=1e-300)[..., None], v.repeat_interleave(2, dim=1)
    )
    lengths = (given["cu_seqlens_q"], given["cu_seqlens_k"])
    out, lse = reference_varlen(
        q, k, v, *lengths, seqused_k=used, softmax_scale=0.2, window=window, dtype=torch.float64, **more
    )
    assert torch.allclose(out, exact, atol=1e-12) and torch.allclose(lse, total.log(), atol=1e-12)
    got, got_lse = flash_attn_varlen_func(
        **given,
        seqused_k=used,
        softmax_scale=0.2,
        window_size=window,
        return_lse=True,
        backend="reference",
        **more,
    )
    assert got.dtype == BF16 and got_lse.dtype == torch.float32
    assert torch.allclose(got.double(), exact, atol=2e-2) and torch.allclose(
        got_lse.double(), total.log(), atol=1e-5
    )


def test_equal_lengths_are_a_batch() -> None:
    given = inputs(((5, 7),) * 3)
    options: dict[str, Any] = {"causal": True, "alibi_slopes": torch.rand(4), "backend": "reference"}
    out, lse = flash_attn_varlen_func(**given, return_lse=True, **options)
    q, k, v = (given[name].view(3, -1, *given[name].shape[1:]) for name in "qkv")
    same, same_lse = flash_attn_func(q, k, v, return_lse=True, **options)
    assert torch.equal(out, same.flatten(0, 1))
    assert torch.equal(lse, same_lse.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("causal", [False, True])
def test_used_keys_of_a_batch(causal: bool) -> None:
    q, k, v = (torch.randn(3, n, h, 64).to(BF16) for n, h in ((5, 4), (7, 2), (7, 2)))
    used = torch.tensor([7, 0, 3], dtype=torch.int32)
    slopes = torch.rand(3, 4)
    options: dict[str, Any] = {"causal": causal, "backend": "reference", "return_lse": True}
    out, lse = flash_attn_func(q, k, v, seqused_k=used, alibi_slopes=slopes, **options)
    assert out.shape == (3, 5, 4, 64) and lse.shape == (3, 4, 5)
    for b in range(3):
        one, n = slice(b, b + 1), int(used[b])
        same = flash_attn_func(q[one], k[one, :n], v[one, :n], alibi_slopes=slopes[one], **options)
        assert torch.equal(out[one], same[0]) and torch.equal(lse[one], same[1])
    with pytest.raises(ValueError, match=r"seqused_k has shape \(3,\); allowed: \(2,\)"):
        flash_attn_func(q[:2], k[:2], v[:2], seqused_k=used, **options)


def test_packed_forms() -> None:
    given = inputs(((5, 5), (0, 0), (2, 2)), heads_k=4, head_dim_v=64, dtype=FP16)
    q, k, v, cu = (given[name] for name in ("q", "k", "v", "cu_seqlens_q"))
    more: dict[str, Any] = {"causal": True, "softmax_scale": 0.3, "backend": "reference"}
    want = flash_attn_varlen_func(**given, **more)
    qkv = torch.stack([q, k, v], dim=1)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, cu, 5, **more), want)
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 5, 5, **more), want)


# --- plan and launch


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU that is not there, for planning."""
    monkeypatch.setattr(flash, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_varlen, "_plans", Remembered())


def test_what_a_call_launches(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    calls: list[tuple[Fwd16Config, dict[str, Any]]] = []

    def launched(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, config: Any, **options: Any
    ) -> Any:
        calls.append((config, options))
        return q, q

    monkeypatch.setattr("cute_attn.launch.launch_forward16_varlen", launched)

    def kind(**options: Any) -> tuple[str, tuple[int, int]]:
        flash_attn_varlen_func(**inputs(((300, 100), (1, 100))), **options)
        config, given = calls[-1]
        assert config.varlen and config.cluster == 1
        return "causal" if config.causal else "window" if config.window else "full", given["window"]

    assert kind() == ("full", (-1, -1))
    assert kind(causal=True) == kind(window_size=(-1, 0)) == ("causal", (-1, 0))
    assert kind(causal=True, window_size=(199, 9)) == ("causal", (-1, 0))  # longer than all keys together
    assert kind(causal=True, window_size=(198, 9)) == ("window", (198, 0))
    assert kind(window_size=(199, 300)) == ("full", (-1, -1))
    assert kind(window_size=(-1, 299)) == ("window", (-1, 299))
    count = len(flash_varlen._plans)
    kind(causal=True)
    assert len(flash_varlen._plans) == count
    used = torch.zeros(2, dtype=torch.int32)
    kind(seqused_k=used, alibi_slopes=torch.zeros(4), softcap=2.0, sinks=torch.zeros(4), softmax_scale=-0.5)
    config, given = calls[-1]
    assert config.softcap and config.alibi and config.sinks and given["seqused_k"] is used
    assert (given["softcap"], given["softmax_scale"], given["alibi_slopes"].shape) == (2.0, -0.5, (2, 4))
    count = len(calls)
    out, lse = flash_attn_varlen_func(**inputs(((3, 0), (2, 0))), return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all()) and len(calls) == count


def test_arguments_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launch, "compile_kernel", lambda config: lambda *given: seen.append(given))
    monkeypatch.setattr(launch, "_sms", lambda device: 132)
    given = inputs()
    q, k, v, cu_q, cu_k = (given[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    config = forward16_config(64, 32, "bf16", causal=True, varlen=True)
    out, lse = launch.launch_forward16_varlen(q, k, v, cu_q, cu_k, config, softmax_scale=0.5, window=(-1, 3))
    assert out.shape == (15, 4, 32) and lse.shape == (4, 15)
    at = seen[0]
    assert at[:3] == (q, k, v) and at[3] is out and at[4] is lse and at[7:10] == (cu_q, cu_k, cu_k)
    assert at[5].shape == (6, 4) and at[6].shape == (4,) and at[10].dtype == torch.int32
    assert at[11:] == (0.5 * launch.LOG2_E, 0.0, 15, 3, 0, 132, (32 << 20) // 192)
    used = torch.zeros(6, dtype=torch.int32)
    launch.launch_forward16_varlen(q, k, v, cu_q, cu_k, config, seqused_k=used, softmax_scale=0.5, sms=7)
    assert seen[1][9] is used and seen[1][15:17] == (1, 7)


def test_plan(hopper: None) -> None:
    def packed(group: int, seqlen_q: int) -> int:
        return forward16_config(128, 128, "bf16", group=group, seqlen_q=seqlen_q, varlen=True).pack_gqa

    assert packed(8, 1) == 8 and packed(8, 300) == 8 and packed(8, 1000) == 1 and packed(1, 1) == 1
    assert packed(8, 256) == 8  # on average: some are longer, some shorter, and few end with a tile
    config = forward16_config(128, 128, "bf16", causal=True, varlen=True)
    # without clusters, as all with varlen
    plain = forward16_config(128, 128, "bf16", causal=True, seqlen_q=1024)
    assert (config.consumer_regs, config.producer_regs) == (232, 40)
    same = replace(config, varlen=False, consumer_regs=240, producer_regs=24)
    assert same == plain
    assert config.name == plain.name.replace("causal", "causal_varlen") + "_r232"
    with pytest.raises(ValueError, match="cluster must be 1 with varlen, got 2"):
        replace(config, cluster=2).check()
    given = inputs(((300, 300), (100, 100)))
    lengths = [given[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    want = forward16_config(64, 32, "bf16", causal=True, group=2, seqlen_q=200, varlen=True)
    assert flash_attn_varlen_kernel(*lengths, causal=True) == want.name
    assert flash_attn_varlen_kernel(*lengths, backend="reference") == "reference"
    batch = [x.view(2, 200, *x.shape[1:]) for x in lengths[:3]]
    used = torch.zeros(2, dtype=torch.int32)
    assert cute_attn.flash_attn_kernel(*batch, causal=True, seqused_k=used) == want.name


# --- index maths of the kernel, compiled for the CPU


def words(count: int) -> Any:
    return make_fake_tensor(Int64, (count,), (1,), memspace=HOST, assumed_align=8)


class Order:
    """unit_of_sequence as a function of the host."""

    def __init__(self, config: Fwd16Config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        rest: Int32,
        rows: Int32,
        keys: Int32,
        group: Int32,
        heads_k: Int32,
        room: Int32,
    ):
        m_block, head = unit_of_sequence(rest, rows, keys, group, heads_k, room, self.config)
        out[0] = Int64(m_block)
        out[1] = Int64(head)


@pytest.mark.parametrize(("causal", "pack"), [(False, 1), (True, 1), (True, 4)])
def test_units_of_a_sequence_are_its_tiles(causal: bool, pack: int) -> None:
    config = replace(forward16_config(128, 128, "bf16", causal=causal, varlen=True), pack_gqa=pack)
    function = cute.compile(
        Order(config), words(2), *[Int32(0)] * 6, options="--enable-tvm-ffi --gpu-arch sm_90a"
    )
    out = torch.zeros(2, dtype=torch.int64)
    for rows, keys, group, heads_k, room in (
        (1, 0, 1, 1, 100),
        (128, 128, 2, 3, 100),
        (700, 300, 1, 5, 600),
        (129, 1000, 3, 4, 3000),
        (400, 50, 2, 2, 10**6),
    ):
        blocks = -(-rows * pack // config.tile_m)
        found = []
        for rest in range(blocks * group * heads_k):
            function(out, rest, rows, keys, group, heads_k, room)
            found.append(tuple(out.tolist()))
        tiles = list(itertools.product(range(blocks), range(group * heads_k)))
        assert sorted(found) == tiles
        turn = min(max(room // max(keys, 1), 1), heads_k) * group  # query heads whose tiles are mixed
        if causal:  # the longest first, of `turn` heads at a time
            assert found == sorted(found, key=lambda tile: (tile[1] // turn, -tile[0], tile[1]))
        else:
            assert found == sorted(found, key=lambda tile: (tile[1], tile[0]))


class Ragged:
    """Where `ragged`, or `ragged_load`, puts a tensor (rows, heads, dim) and `ragged_coord` a box, as a function of the
    host.
    """

    def __init__(self, load: bool):
        self.load = load

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, row0: Int32, rows: Int32, first: Int32):
        x = one_batch(x)
        x = cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))
        if cutlass.const_expr(self.load):
            x = ragged_load(x, 0)
            at = (*ragged_coord(row0, rows, first, 128, FAR), FAR)
        else:
            x = ragged(x, 0, 128)
            at = ragged_coord(row0, rows, first, 128, 128)
        found = (x.iterator.toint(), *x.shape, *x.stride, *at)
        for i in cutlass.range_constexpr(len(found)):
            out[i] = Int64(found[i])


@pytest.mark.parametrize("load", [False, True])
def test_a_box_ends_where_its_sequence_ends(load: bool) -> None:
    shape = tuple(cute.sym_int32() for _ in range(3))
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    x = make_fake_tensor(cutlass.BFloat16, shape, strides, memspace=HOST, assumed_align=16)
    rank = 5 if load else 4
    count = 1 + 2 * rank + rank - 2
    function = cute.compile(
        Ragged(load), x, words(count), *[Int32(0)] * 3, options="--enable-tvm-ffi --gpu-arch sm_90a"
    )
    x, out = torch.zeros(1000, 3, 72, dtype=BF16)[..., :64], torch.zeros(count, dtype=torch.int64)
    for row0, rows, first in (
        (0, 1000, 0),
        (0, 1000, 896),
        (100, 200, 0),
        (100, 200, 128),
        (100, 200, 192),
        (100, 200, 256),
        (1000, 0, 0),
        (7, 1, 0),
        (900, 100, 0),
    ):
        function(x, out, row0, rows, first)
        origin, *rest = out.tolist()
        extents, steps, (offset, last, *far) = rest[:rank], rest[rank : 2 * rank], rest[2 * rank :]
        box = FAR if load else 128
        assert extents == [box, 64, 3, 1001, FAR + 1][:rank]
        assert steps == [216, 1, 72, 216, 2**34 - 216][:rank]
        assert origin == (
            x.data_ptr() if load else x.data_ptr() - 2 * 128 * 216
        )  # loads: not before the tensor
        assert all(0 <= 2 * step < 2**40 for step in steps)  # what a descriptor can hold
        valid = [i for i in range(128) if 0 <= offset + i < extents[0] and 0 <= last < extents[3]]
        left = min(max(rows - first, 0), 128)
        assert valid == list(range(left))
        for i in valid:
            elements = (offset + i) * steps[0] + last * steps[3] + sum(n * steps[4] for n in far)
            assert (origin + 2 * elements) % 2**64 == x[row0 + first + i].data_ptr()
