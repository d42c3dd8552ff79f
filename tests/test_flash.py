"""`flash_attn_func` and the 16-bit forward without a GPU: refusals, the reference, the plan, the compiled code."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import figures_of, no_spills
from torch import Tensor

import cute_attn
from cute_attn import (
    flash,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    plan16,
)
from cute_attn.compile import KernelFigures
from cute_attn.kernels.config import (
    HEAD_DIMS_16BIT,
    SMEM_LIMIT,
    Fwd16Config,
    swizzle_columns,
)
from cute_attn.plan16 import forward16_config
from cute_attn.reference import attention
from cute_attn.remember import Remembered

BF16, FP16 = torch.bfloat16, torch.float16


def tensors(
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    heads_q: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int = 32,
    dtype: torch.dtype = BF16,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, head_dim_v).to(dtype),
    )


# --- refusals


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": 3}, TypeError, "q is a int; allowed: a torch.Tensor"),
        ({"k": torch.zeros(2, 7, 2)}, ValueError, "k has 3 dimensions"),
        ({"v": torch.zeros(2, 7, 2, 32)}, TypeError, "v has dtype torch.float32"),
        ({"k": torch.zeros(2, 7, 2, 64).half()}, TypeError, "k has dtype torch.float16; allowed: that of q"),
        ({"k": torch.zeros(3, 7, 2, 64).to(BF16)}, ValueError, "batch of k is 3; allowed: that of q, 2"),
        ({"k": torch.zeros(2, 7, 2, 72).to(BF16)}, ValueError, "head_dim of k is 72; allowed: that of q, 64"),
        (
            {"v": torch.zeros(2, 7, 2, 36).to(BF16)},
            ValueError,
            "head_dim of v is 36; allowed: multiples of 8",
        ),
        (
            {"v": torch.zeros(2, 7, 2, 264).to(BF16)},
            ValueError,
            "head_dim of v is 264; allowed: multiples of 8",
        ),
        ({"v": torch.zeros(2, 8, 2, 32).to(BF16)}, ValueError, "seqlen of v is 8; allowed: that of k, 7"),
        ({"v": torch.zeros(2, 7, 4, 32).to(BF16)}, ValueError, "heads of v is 4; allowed: that of k, 2"),
        ({"q": torch.zeros(2, 5, 3, 64).to(BF16)}, ValueError, "heads of q is 3; allowed: a multiple"),
        ({"q": torch.zeros(2, 5, 64, 4).to(BF16).mT}, ValueError, "allowed: a last stride of 1"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p is 0.1, but there is no dropout"),
        ({"dropout_p": -1}, ValueError, "dropout_p is -1.0; allowed: 0.0"),
        ({"dropout_p": None}, TypeError, "dropout_p is a NoneType"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf"),
        ({"softmax_scale": 1e-40}, ValueError, "softmax_scale is 1e-40"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale is a str"),
        ({"causal": 1}, TypeError, "causal is a int; allowed: True or False"),
        ({"deterministic": None}, TypeError, "deterministic is a NoneType"),
        ({"return_attn_probs": True}, NotImplementedError, "probabilities are never in memory"),
        ({"window_size": 5}, TypeError, "window_size is 5; allowed: a tuple"),
        ({"window_size": (1, 2, 3)}, TypeError, "allowed: a tuple"),
        ({"window_size": (1.0, 2)}, TypeError, "with a float; allowed: two ints"),
        ({"window_size": (-2, 0)}, ValueError, "allowed: ends >= 0, or -1 for none"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"softcap": math.inf}, ValueError, "softcap is inf"),
        ({"softcap": True}, TypeError, "softcap is a bool"),
        ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes is a list"),
        (
            {"alibi_slopes": torch.zeros(2)},
            ValueError,
            r"alibi_slopes has shape \(2,\); allowed: \(4,\) or \(2, 4\)",
        ),
        ({"alibi_slopes": torch.zeros(4).to(BF16)}, TypeError, "alibi_slopes has dtype torch.bfloat16"),
        ({"sinks": torch.zeros(2, 4)}, ValueError, r"sinks has shape \(2, 4\); allowed: \(4,\)"),
        (
            {"backend": "sm70"},
            ValueError,
            "backend is 'sm70'; allowed: 'auto', 'sm90', 'sm80', 'reference'",
        ),
        (
            {"backend": "sm80"},
            ValueError,
            "q is on device cpu; allowed: a GPU of compute capability 8.0 to 8.9, 9.x or 12.x, or backend='reference'",
        ),
        ({"backend": "sm90"}, ValueError, "q is on device cpu; allowed: a GPU of compute capability 9.x"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = tensors()
    with pytest.raises(error, match=message):
        flash_attn_func(**{"q": q, "k": k, "v": v, "backend": "reference", **changed})


def test_packed_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"qkv has shape \(2, 5, 2, 4, 64\); allowed: \(batch, seqlen, 3, heads"
    ):
        flash_attn_qkvpacked_func(torch.zeros(2, 5, 2, 4, 64))
    with pytest.raises(TypeError, match="kv is a int"):
        flash_attn_kvpacked_func(tensors()[0], 3)  # type: ignore[arg-type]


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
    for function, first in (
        (flash_attn_func, ["q", "k", "v"]),
        (flash_attn_kvpacked_func, ["q", "kv"]),
        (flash_attn_qkvpacked_func, ["qkv"]),
    ):
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == first + names
        assert getattr(cute_attn, function.__name__) is function


# --- the reference


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: tuple[int, int],
    cap: float,
    slopes: Any,
    sinks: Any,
) -> tuple[Tensor, Tensor]:
    """Row by row, key by key, in Python's floats."""
    (batch, rows, heads, _), (_, keys, heads_k, _) = q.shape, k.shape
    out = torch.zeros(batch, rows, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, rows), -math.inf, dtype=torch.float64)
    for b, h, i in itertools.product(range(batch), range(heads), range(rows)):
        h_k = h // (heads // heads_k)
        weights: dict[int, float] = {}
        for j in range(keys):
            behind = j - (i + keys - rows)
            if (window[0] >= 0 and behind < -window[0]) or (window[1] >= 0 and behind > window[1]):
                continue
            score = scale * float(q[b, i, h].double() @ k[b, j, h_k].double())
            score = cap * math.tanh(score / cap) if cap else score
            score -= 0.0 if slopes is None else float(slopes[b, h]) * abs(behind)
            weights[j] = math.exp(score)
        total = sum(weights.values()) + (0.0 if sinks is None else math.exp(float(sinks[h])))
        if total > 0:
            lse[b, h, i] = math.log(total)
            for j, w in weights.items():
                out[b, i, h] += w / total * v[b, j, h_k].double()
    return out, lse


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (0, 3), (1, -1), (9, 9)], ids=str)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 3), (1, 6)], ids=str)
@pytest.mark.parametrize(
    ("cap", "slopes", "sinks", "scale"),
    [(0.0, False, False, 0.2), (1.5, True, True, 0.2), (0.0, True, False, -0.2), (0.0, False, True, 0.0)],
)
def test_reference(
    window: tuple[int, int], lengths: tuple[int, int], cap: float, slopes: bool, sinks: bool, scale: float
) -> None:
    q, k, v = tensors(seqlen_q=lengths[0], seqlen_k=lengths[1])
    alibi = torch.rand(2, 4) if slopes else None
    logits = torch.randn(4) if sinks else None
    out, lse = flash.reference(
        q,
        k,
        v,
        softmax_scale=scale,
        window=window,
        softcap=cap,
        alibi_slopes=alibi,
        sinks=logits,
        dtype=torch.float64,
    )
    exact, exact_lse = by_hand(q, k, v, scale, window, cap, alibi, logits)
    assert torch.allclose(out, exact, atol=1e-12) and torch.allclose(lse, exact_lse, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_backend(causal: bool) -> None:
    q, k, v = tensors(seqlen_q=9, seqlen_k=6, head_dim_v=64)
    out, lse = flash_attn_func(q, k, v, causal=causal, backend="reference", return_lse=True)
    exact, exact_lse = attention(q, k, v, causal=causal)[:2]
    assert out.dtype == BF16 and lse.dtype == torch.float32
    assert torch.allclose(out.double(), exact, atol=2e-2)
    assert torch.allclose(lse.double(), exact_lse, atol=1e-5)
    only_out = flash_attn_func(q, k, v, causal=causal, backend="reference")
    assert isinstance(only_out, Tensor) and torch.equal(only_out, out)


def test_causal_ends_a_window_at_the_query() -> None:
    q, k, v = tensors()
    for left, right in ((2, 3), (2, -1), (-1, 5)):
        got = flash_attn_func(q, k, v, causal=True, window_size=(left, right), backend="reference")
        assert torch.equal(got, flash_attn_func(q, k, v, window_size=(left, 0), backend="reference"))


def test_packed_forms() -> None:
    qkv = torch.randn(2, 6, 3, 4, 64).to(FP16)
    q, k, v = qkv.unbind(2)
    want = flash_attn_func(q, k, v, causal=True, softmax_scale=0.3, backend="reference")
    more: dict[str, Any] = {"causal": True, "softmax_scale": 0.3, "backend": "reference"}
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **more), want)
    assert torch.equal(flash_attn_kvpacked_func(q, qkv[:, :, 1:], **more), want)


def test_no_keys() -> None:
    q, k, v = tensors(seqlen_k=0)
    out, lse = flash_attn_func(q, k, v, backend="reference", return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all()) and out.shape == (2, 5, 4, 32)


def test_what_tma_can_read() -> None:
    x = torch.zeros(2, 6, 4, 64, dtype=BF16)
    for view in (x, x[..., 8:40], x.transpose(1, 2), x[:, ::2], x[..., :1, :].expand(2, 6, 1, 64)):
        assert flash._loadable(view) and flash._loaded(view, True) is view
    for odd in (torch.zeros(2, 6, 4, 68, dtype=BF16)[..., :64], x[:1].expand(2, -1, -1, -1)):
        assert not flash._loadable(odd)
        copy = flash._loaded(odd, False)
        assert copy.is_contiguous() and torch.equal(copy, odd)
    moved = x[..., 4:36]  # strides are good, the address is not
    assert flash._loadable(moved) and flash._loaded(moved, True) is not moved


def test_a_call_is_checked_once_and_refused_as_before() -> None:
    q, k, v = tensors()
    good: dict[str, Any] = {"causal": True, "window_size": (1, 0), "softcap": 1.0, "backend": "reference"}
    want = flash_attn_func(q, k, v, **good)
    count = len(flash._plans)
    assert torch.equal(flash_attn_func(q, k, v, **good), want) and len(flash._plans) == count
    for changed in ({"causal": 1}, {"window_size": (True, False)}, {"softcap": True}, {"dropout_p": False}):
        with pytest.raises(TypeError):
            flash_attn_func(q, k, v, **{**good, **changed})


def test_what_a_call_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and its arguments, on a Hopper GPU that is not there."""
    calls: list[tuple[Fwd16Config, dict[str, Any]]] = []
    prepared = 0

    class Prepared:
        def __init__(
            self,
            shape_q: tuple[int, ...],
            shape_v: tuple[int, ...],
            config: Fwd16Config,
            device: torch.device,
            **options: Any,
        ):
            nonlocal prepared
            prepared += 1
            self.config, self.options = config, options

        def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
            q, _, _, slopes, _ = tensors
            assert q is not None
            calls.append((self.config, {**self.options, "alibi_slopes": slopes}))
            return q, q

    monkeypatch.setattr("cute_attn.launch.Forward16", Prepared)
    monkeypatch.setattr(flash, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "_plans", Remembered())

    def kind(seqlen_q: int = 300, **options: Any) -> tuple[str, tuple[int, int]]:
        q, k, v = tensors(seqlen_q=seqlen_q, seqlen_k=200)
        flash_attn_func(q, k, v, **options)
        config, given = calls[-1]
        return "causal" if config.causal else "window" if config.window else "full", given["window"]

    assert kind() == ("full", (-1, -1))
    assert kind(causal=True) == kind(window_size=(-1, 0)) == ("causal", (-1, 0))
    assert kind(causal=True, window_size=(199, 9)) == ("causal", (-1, 0))  # the window cuts nothing
    assert kind(causal=True, window_size=(198, 9)) == ("window", (198, 0))
    assert kind(window_size=(199, 299)) == ("full", (-1, -1))
    assert kind(window_size=(-1, 298)) == ("window", (-1, 298))
    assert kind(1, causal=True) == ("full", (-1, -1))  # one row sees every key
    assert kind(1, window_size=(7, 7)) == ("window", (7, -1))
    q, k, v = tensors()
    flash_attn_func(
        q, k, v, softcap=3.0, alibi_slopes=torch.zeros(4), sinks=torch.zeros(4), softmax_scale=-0.5
    )
    config, given = calls[-1]
    assert config.softcap and config.alibi and config.sinks
    assert (given["softcap"], given["softmax_scale"], given["alibi_slopes"].shape) == (3.0, -0.5, (2, 4))
    count, before = len(calls), prepared
    flash_attn_func(q[:, :0], k, v)
    assert len(calls) == count  # nothing to launch
    for _ in range(3):
        flash_attn_func(q, k, v, softmax_scale=0.3)
    assert (len(calls), prepared) == (count + 3, before + 1)  # what a shape fixes is worked out once


# --- plan


def test_every_head_dim_has_a_tile() -> None:
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS_16BIT, HEAD_DIMS_16BIT):
        for options in ({}, {"causal": True}, {"window": True, "alibi": True}):
            config = forward16_config(head_dim, head_dim_v, "bf16", **options)
            config.check()
            assert config.smem_bytes <= SMEM_LIMIT and config.tile_n >= 48
            assert config.causal == ("causal" in options) and config.window == ("window" in options)


def test_rows_of_a_group_share_tiles_where_that_fills_them() -> None:
    def packed(group, seqlen_q):
        return forward16_config(128, 128, "bf16", group=group, seqlen_q=seqlen_q).pack_gqa

    assert packed(8, 1) == 8 and packed(6, 1) == 2 and packed(128, 1) == 64 and packed(1, 1) == 1
    assert packed(8, 4096) == 1 and packed(8, 128) == 1 and packed(8, 129) == 8 and packed(8, 0) == 1


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is that of the call, and each choice has its reason."""
    monkeypatch.setattr(flash, "device_capability", lambda device: (9, 0))

    def explained(*shape: int, **options: Any) -> tuple[plan16.Plan16, str]:
        made = flash.flash_attn_explain(*tensors(*shape), **options)
        return made, " ".join(str(made).split())

    made, text = explained(2, 300, 5000, 12, 2, 128, 64, causal=True)
    assert made.kernel == forward16_config(128, 64, "bf16", causal=True, group=6, seqlen_q=300).name
    assert (made.backend, made.work_tiles) == ("sm90", 2 * 2 * 3 * 5)
    for part in (
        f"kernel {made.kernel}",
        "seqlen_q 300, seqlen_k 5000, heads_q 12, heads_k 2, head_dim 128, head_dim_v 64, causal, torch.bfloat16",
        "128 queries x 128 keys, 2 K/V stages, 2 consumer warpgroups of 240 registers; Q K^T of the next tile",
        "rows of 2 query heads packed",
        f"smem {made.smem_bytes} of 232448 bytes work tiles 60 results 0.879 MiB out, 0.0275 MiB lse because",
        "the GPU has compute capability 9.0 (Hopper)",
        "6 query heads share a key head: with the rows of 2 in shared tiles they need 15 of them instead of 18",
    ):
        assert part in text, text
    assert "copied" not in text and "mask hides nothing" not in text

    assert "the causal kernel serves" in explained(causal=True, window_size=(9, 9))[1]
    windowed, text = explained(window_size=(2, -1), softcap=3.0, alibi_slopes=torch.zeros(4))
    assert "window (2, -1), softcap 3, ALiBi" in text and "no others" in text
    assert windowed.config is not None and windowed.config.window
    assert "one query row sees every key: the mask hides nothing" in explained(2, 1, causal=True)[1]
    assert "every query sees every key" in explained(window_size=(7, 5))[1]
    assert "a pass over q" in explained(softmax_scale=-1.0)[1]
    assert "O goes to memory from registers" in explained(1, 9, 9, 2, 2, 136, 256)[1]
    empty, text = explained(2, 5, 0)
    assert (empty.kernel, empty.work_tiles, empty.smem_bytes) == ("reference", 0, 0)
    assert "nothing is launched: there are no keys" in text

    q, k, v = tensors(head_dim_v=64)
    text = str(flash.flash_attn_explain(q, k[:1].expand(2, -1, -1, -1), v[..., 8:40]))
    assert "k is copied first" in text and "v is copied" not in text and "q is copied" not in text
    made = flash.flash_attn_explain(q, k, v, backend="reference")
    assert (made.backend, made.kernel) == ("reference", "reference") and "scores" in str(made)
    with pytest.raises(ValueError, match="window_size"):
        flash.flash_attn_explain(q, k, v, window_size=(-2, 0))


def test_sample_of_kernels_has_each_feature() -> None:
    configs = plan16.all_forward16_configs()
    assert len(set(configs)) == len(configs) == len({config.name for config in configs})
    for feature in ("causal", "window", "softcap", "alibi", "sinks", "o_direct", "split_keys"):
        assert {getattr(config, feature) for config in configs} == {False, True}


def test_tile_table() -> None:
    table = {(row["head_dim"], row["causal"]): row for row in plan16.tile16_table()}
    assert len(table) == 2 * len(HEAD_DIMS_16BIT)
    sizes = [
        (table[d, c]["tile_m"], table[d, c]["tile_n"]) for d in (64, 96, 128, 256) for c in (False, True)
    ]
    assert sizes == [(192, 128)] * 2 + [(128, 192)] + [(128, 128)] * 3 + [(128, 80)] * 2


def test_tiles_of_short_sequences() -> None:
    def tile(head_dim: int, seqlen_q: int, **options: bool) -> tuple[int, int]:
        config = forward16_config(head_dim, head_dim, "bf16", seqlen_q=seqlen_q, **options)
        return config.tile_m, config.tile_n

    old, four, long = (128, 128), (256, 64), (192, 128)
    assert [tile(64, n, causal=True) for n in (1, 511, 512, 4096, 4097)] == [old, old, four, four, long]
    assert [tile(64, n) for n in (1, 511, 512, 4096, 4097)] == [long, long, four, four, long]
    for feature in ("sinks", "softcap", "alibi", "varlen"):
        assert [tile(64, n, causal=True, **{feature: True}) for n in (1024, 1025)] == [old, long]
        assert tile(64, 1024, **{feature: True}) == long
    assert tile(64, 1024, window=True) == long
    assert [tile(256, n, causal=True) for n in (1, 4096, 4097)] == [(128, 64)] * 2 + [(128, 80)]
    assert tile(256, 512) == (128, 80) == tile(256, 512, causal=True, varlen=True)


def test_clusters_under_a_causal_mask() -> None:
    """From as many tiles of a head on as the table says, and without features."""

    def cluster(head_dim: int, seqlen_q: int, **options: bool) -> int:
        return forward16_config(head_dim, head_dim, "bf16", causal=True, seqlen_q=seqlen_q, **options).cluster

    assert [cluster(128, n) for n in (1, 1920, 2048, 1 << 20)] == [1, 1, 2, 2]
    assert [cluster(256, n) for n in (1, 896, 1024, 4096, 4224, 8192)] == [1, 1, 2, 2, 1, 2]
    for feature in ("sinks", "softcap", "alibi", "varlen"):
        assert cluster(128, 8192, **{feature: True}) == 1


def test_who_passes_over_keys() -> None:
    """Warpgroups of a tile whose steps are as narrow as their rows, without turns."""
    for head_dim, seqlen_q, causal, expected in (
        (64, 1024, True, True),
        (64, 1024, False, False),
        (64, 8192, True, False),
        (256, 512, True, True),
        (256, 4096, True, True),
        (256, 8192, True, False),
    ):
        config = forward16_config(head_dim, head_dim, "bf16", causal=causal, seqlen_q=seqlen_q)
        assert config.skips_keys == expected


def test_clusters_are_for_heads_with_tiles_enough() -> None:
    def cluster(head_dim: int, seqlen_q: int, **options: bool) -> int:
        return forward16_config(head_dim, head_dim, "bf16", seqlen_q=seqlen_q, **options).cluster

    assert [cluster(256, seqlen_q) for seqlen_q in (1, 128, 256, 300, 384, 2048)] == [1, 1, 2, 1, 1, 2]
    assert cluster(256, 7936, causal=True) == 1 and cluster(256, 8192, causal=True) == 2
    assert cluster(64, 4096) == cluster(128, 4096) == cluster(256, 4096, window=True) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 36}, "head_dim must be a multiple of 8 from 32 to 256, got 36"),
        ({"head_dim_v": 264}, "head_dim_v must be a multiple of 8 from 32 to 256, got 264"),
        ({"tile_n": 120}, "tile_n must be a multiple of 16 from 16 to 256, got 120"),
        ({"tile_m": 96}, "tile_m must be 64, 128, 192 or 256, got 96"),
        ({"dtype": "fp32"}, "dtype must be 'bf16' or 'fp16', got 'fp32'"),
        ({"causal": True, "window": True}, "causal must be False with a window"),
        ({"window": True, "cluster": 2}, "cluster must be 1 with a window, got 2"),
        ({"cluster": 3}, "cluster must be 1 or 2, got 3"),
        ({"pack_gqa": 3}, "pack_gqa must divide the 64 rows of a warpgroup, got 3"),
        ({"tile_n": 256}, "shared memory 295936 bytes exceeds 232448"),
        (
            {"tile_m": 192},
            "3 consumer warpgroups of 240 registers and a producer of 24 want 744, more than the 512",
        ),
        ({"producer_regs": 32}, "a producer of 32 want 512, more than the 504 registers"),
        ({"split_keys": True}, "varlen must be True with split_keys"),
    ],
)
def test_impossible_configurations(changed: dict[str, Any], message: str) -> None:
    good = Fwd16Config(128, 128, 128, 128, 2, "bf16", False)
    good.check()
    with pytest.raises(ValueError, match=message):
        replace(good, **changed).check()


def test_names_tell_configurations_apart() -> None:
    good = Fwd16Config(64, 64, 128, 128, 2, "bf16", False)
    changes: list[dict[str, Any]] = [
        {},
        {"head_dim": 72},
        {"head_dim_v": 72},
        {"tile_m": 192},
        {"tile_n": 112},
        {"kv_stages": 3},
        {"dtype": "fp16"},
        {"causal": True},
        {"window": True},
        {"softcap": True},
        {"alibi": True},
        {"sinks": True},
        {"overlap": False},
        {"pingpong": False},
        {"consumer_regs": 160},
        {"cluster": 2},
        {"pack_gqa": 2},
        {"varlen": True},
        {"split_keys": True},
    ]
    names = {replace(good, **changed).name for changed in changes}
    assert len(names) == len(changes)


# --- compiled code

SAMPLE = [
    *plan16.all_forward16_configs(),
    forward16_config(256, 256, "bf16", window=True, softcap=True, alibi=True, sinks=True),
    replace(forward16_config(128, 128, "bf16", causal=True), overlap=False, pingpong=False, cluster=2),
    forward16_config(72, 40, "bf16", group=4, seqlen_q=1),
]


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[Fwd16Config], KernelFigures]]:
    with figures_of(SAMPLE) as result:
        yield result


@pytest.mark.parametrize("config", SAMPLE, ids=lambda config: config.name)
def test_compiled_kernel(config: Fwd16Config, figures: Callable[[Fwd16Config], KernelFigures]) -> None:
    found = figures(config)
    assert found.name == config.name
    no_spills(found)
    assert not found.serialized_wgmma
    # Steps of k = 16: Q K^T takes head_dim_padded / 16 of them, P V tile_n / 16. Loops: masked, plain and masked again.
    steps_qk, steps_pv = config.head_dim_padded // 16, config.tile_n // 16
    loops = 1 + (config.causal or config.window or not config.overlap) + config.window
    bodies = loops + config.overlap  # the first Q K^T and the last P V stand outside the loops
    assert found.counts["HGMMA"] == bodies * (steps_qk + steps_pv)
    assert found.counts["QGMMA"] == found.counts["IGMMA"] == 0
    # One arrival and one wait for each product: more would be products that wait for one another.
    assert found.counts["WARPGROUP"] == 4 * bodies
    q_boxes, v_boxes = (c // swizzle_columns(c, 2) for c in (config.head_dim_padded, config.v_columns))
    assert (
        found.counts["UTMALDG"] == 3 * q_boxes + 2 * v_boxes
    )  # K of the first block and of the loop, Q; V twice
    assert found.counts["UTMASTG"] == (0 if config.o_direct else config.v_columns // config.o_box)
    assert found.counts["USETMAXREG"] == 2
    assert found.registers == config.launch_regs  # what `check` counts on
    assert found.smem_bytes == config.smem_bytes <= SMEM_LIMIT


def test_the_kernel_has_a_name_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16)
    k = torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16)
    assert cute_attn.flash_attn_kernel(q, k, k, backend="reference") == "reference"
    with pytest.raises(ValueError, match=r"compute capability 8\.0 to 8\.9, 9\.x or 12\.x"):
        cute_attn.flash_attn_kernel(q, k, k, backend="sm80")
    monkeypatch.setattr("cute_attn.flash.device_capability", lambda device: (9, 0))
    want = forward16_config(64, 64, "bf16", causal=True, softcap=True, group=2, seqlen_q=300)
    assert cute_attn.flash_attn_kernel(q, k, k, causal=True, softcap=30.0) == want.name
    with pytest.raises(ValueError, match="window_size"):
        cute_attn.flash_attn_kernel(q, k, k, window_size=(-2, 0))
