"""Many queries against a KV cache away from a GPU: which kernel, and what the launches are given."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import append, decode, decode_plan, flash, flash_attn_with_kvcache, prefill
from cute_attn.kernels.config import Fwd16Config, UnpackConfig
from cute_attn.prefill import choose, make_prefill, parts, rows_between

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SMS = 132


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- the launches ---------------------------------------------------------------------------------------------


def unpacked(cfg: UnpackConfig) -> Callable[..., None]:
    """What the kernel of a configuration does, in torch."""

    def run(
        k_cache: Tensor | None,
        v_cache: Tensor | None,
        k_rows: Tensor | None,
        v_rows: Tensor | None,
        places: Tensor,
        seqlens: Tensor,
        batch_idx: Tensor | None,
        leftpad: Tensor | None,
        table: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        q_scale: Tensor | None,
        seqlen_new: int,
        capacity: int,
        seqlen_q: int,
        left: int,
        stride: int,
        ctas: int,
    ) -> None:
        assert (batch_idx is not None, leftpad is not None, table is not None) == (
            cfg.batch_idx,
            cfg.leftpad,
            cfg.paged,
        )
        assert (q_scale is not None) == cfg.query_scale and ctas > 0
        batch = len(seqlens)
        places[:] = 0
        places[2] = torch.arange(batch + 1) * seqlen_q
        for b in range(batch):
            end = max(min(int(seqlens[b]) + seqlen_new, capacity), 0)
            first = max(end - seqlen_q - left, 0, 0 if leftpad is None else int(leftpad[b]))
            first = min(first, end)
            sequence = b if batch_idx is None else int(batch_idx[b])
            places[0, b] = b * stride if cfg.copy else sequence * stride + first
            places[1, b] = end - first
            if not cfg.copy:
                continue
            assert k_cache is not None and v_cache is not None and k_rows is not None and v_rows is not None
            rows = slice(b * stride, b * stride + end - first)
            assert end - first <= stride
            for cache, out, scale, factor in (
                (k_cache, k_rows, k_scale, q_scale),
                (v_cache, v_rows, v_scale, None),
            ):
                place: Any = (sequence, slice(first, end))
                if table is not None:
                    slot = torch.arange(first, end)
                    place = (table[b, slot // cache.shape[1]].long(), slot % cache.shape[1])
                x = cache.float()[place]
                if scale is not None:
                    own = scale[b] if cfg.scales == "head" else scale[place]
                    own = own if factor is None else own * factor[b]
                    x = x * own.unsqueeze(-1)
                out[rows] = x.to(out.dtype)

    return run


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    config: Fwd16Config,
    *,
    seqused_k: Tensor,
    only_starts: bool,
    window: tuple[int, int],
    out: Tensor,
    lse: Tensor,
    alibi_slopes: Tensor | None,
    **options: Any,
) -> None:
    assert only_starts and config.varlen and (config.head_dim, config.head_dim_v) == (q.shape[2], v.shape[2])
    assert config.causal == (window == (-1, 0)) and (config.causal or config.window or window == (-1, -1))
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        keys = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b] + seqused_k[b]))
        slopes = None if alibi_slopes is None else alibi_slopes[b : b + 1]
        one, one_lse = flash.reference(
            q[None, rows], k[None, keys], v[None, keys], window=window, alibi_slopes=slopes, **options
        )
        out[rows], lse[:, rows] = one[0].to(out.dtype), one_lse[0]


def forward_split(*operands: Any, splits: int, out: Tensor, lse: Tensor, sms: int, **options: Any) -> None:
    """`launch_forward16_split`, with the keys of a tile in one piece."""
    config = operands[-1]
    assert config.split_keys and splits > 1 and sms == SMS
    rows = torch.empty(operands[0].shape[0], *out.shape[2:], dtype=out.dtype)
    rows_lse = torch.empty(lse.shape[1], rows.shape[0])
    forward(*operands, only_starts=True, out=rows, lse=rows_lse, **options)
    out[:] = rows.view(out.shape)
    lse[:] = rows_lse.view(lse.shape[1], *out.shape[:2]).transpose(0, 1)


def splitting(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """The forward takes the keys of a tile in so many shares, however few they are."""

    def make(*args: Any) -> prefill.Prefill:
        plan = make_prefill(*args)
        config = dataclasses.replace(plan.config, split_keys=True)
        return dataclasses.replace(plan, config=config, splits=splits)

    monkeypatch.setattr(decode, "make_prefill", make)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of sm_90a, done in torch."""

    def appended(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, config: Any, new: Any, side: Any, q_step: int
    ) -> Tensor | None:
        append.append_reference(k_cache, v_cache, new, side, config.rotary == "interleaved")
        if not config.queries:
            return None
        return append.queries_reference(q, new, side["cache_seqlens"], config.rotary == "interleaved", q_step)

    monkeypatch.setattr(decode.kv, "target", lambda *_: "sm_90a")
    monkeypatch.setattr(decode, "_sms", lambda _: SMS)
    monkeypatch.setattr(decode, "_plans", type(decode._plans)())
    monkeypatch.setattr(decode.append, "launch_append", appended)
    monkeypatch.setattr(prefill, "GAIN", math.inf)  # the forward, however few the queries are
    monkeypatch.setattr(prefill, "compile_kernel", unpacked)
    monkeypatch.setattr(prefill, "launch_forward16_varlen", forward)
    monkeypatch.setattr(prefill, "launch_forward16_split", forward_split)


FORMS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "batch_idx": {},
    "paged": {},
    "head": {"dtype": E4M3},
    "head_batch_idx": {"dtype": E4M3},
    "token": {"dtype": E4M3},
    "token_paged": {"dtype": E4M3},
    "apart": {},  # rows between the sequences
    "across": {},  # sequences side by side: no rows
}


def cached(form: str, leftpad: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Caches of three sequences of 24 slots, four heads, and what to call with; NaN where nothing is read."""
    batch, slots, heads = 3, 24, 4
    lengths, pads = (24, 0, 13), (0, 0, 5) if leftpad else (0, 0, 0)
    options: dict[str, Any] = {"cache_seqlens": int32(*lengths)}
    if leftpad:
        options["cache_leftpad"] = int32(*pads)
    caches: list[Tensor] = [torch.randn(batch, slots, heads, d) for d in (32, 48)]
    scales = [torch.rand(batch, slots, heads) + 0.5 for _ in range(2)]
    eight = FORMS[form].get("dtype") == E4M3
    for b in range(batch):
        for x in (*caches, *scales):
            x[b, lengths[b] :] = math.nan
            x[b, : pads[b]] = math.nan
    caches = [x.to(E4M3 if eight else BF16) for x in caches]
    if form == "across":
        caches = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in caches]
    if form == "apart":
        caches = [torch.cat((x, torch.full_like(x, math.nan)), dim=1)[:, :slots] for x in caches]
    if "batch_idx" in form:
        order = torch.tensor([4, 0, 2])
        options["cache_batch_idx"] = order.int()
        wide = [torch.full((5, *x.shape[1:]), 0x7F, dtype=torch.uint8).view(E4M3) for x in caches]
        if not eight:
            wide = [torch.full((5, *x.shape[1:]), math.nan).to(BF16) for x in caches]
        for x, own in zip(wide, caches, strict=True):
            x.view(torch.uint8)[order] = own.view(torch.uint8)
        caches = wide
    if "paged" in form:
        table = torch.randperm(20)[:18].view(3, 6)
        for group in (caches, scales) if "token" in form else (caches,):
            for i, x in enumerate(group):
                pages = torch.zeros(20, 4, *x.shape[2:]).to(x.dtype)
                raw, own = (t.view(torch.uint8) if t.dtype == E4M3 else t for t in (pages, x))
                raw[table.flatten()] = own.reshape(18, 4, *own.shape[2:])
                group[i] = pages
        options["block_table"] = table.int()
        for b in range(batch):
            options["block_table"][b, -(-lengths[b] // 4) :] = 1 << 30
    if eight:
        if "head" in form:
            scales = [torch.rand(batch, heads) + 0.5 for _ in range(2)]
        options["k_descale"], options["v_descale"] = scales
    return caches[0], caches[1], options


@pytest.mark.parametrize(
    "workspace", [1 << 30, 2 * 24 * 160 * 4, 2 * 24 * 160, 1], ids=["all", "b", "hh", "h"]
)
@pytest.mark.parametrize("leftpad", [False, True], ids=["", "leftpad"])
@pytest.mark.parametrize("splits", [1, 3], ids=["", "split"])
@pytest.mark.parametrize("form", FORMS)
def test_launches_give_what_the_definition_says(
    form: str, splits: int, leftpad: bool, workspace: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of any size, with every feature that the kernels are given."""
    monkeypatch.setattr(prefill, "WORKSPACE", workspace)
    if splits > 1:
        splitting(monkeypatch, splits)
    k, v, options = cached(form, leftpad)
    features: list[dict[str, Any]] = [
        {"causal": True},
        {"window_size": (7, 2), "sinks": torch.randn(8), "softmax_scale": -0.2},
        {"softcap": 2.0, "alibi_slopes": torch.rand(3, 8), "causal": True},
    ]
    for q_dtype in (BF16, E4M3) if k.dtype == E4M3 else (BF16,):
        q = torch.randn(3, 9, 8, 32).to(q_dtype)
        if q_dtype == E4M3:
            options["q_descale"] = torch.rand(3, 4) + 0.5
        for feature in features:
            given = {**options, **feature}
            taken = {name: x for name, x in given.items() if name != "softmax_scale"}
            assert decode.decode_kernel(q, k, v, **taken).startswith("fwd_sm90_bf16_d32v48_")
            got = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **given)
            monkeypatch.setattr(decode.kv, "target", lambda *_: None)
            want = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, backend="reference", **given)
            monkeypatch.setattr(decode.kv, "target", lambda *_: "sm_90a")
            assert got[0].shape == want[0].shape and got[0].dtype == want[0].dtype == BF16
            rounding = 0.03 if k.dtype == E4M3 else 0.01  # of K and V to bf16, and of O
            assert torch.allclose(got[0].float(), want[0].float(), atol=rounding, rtol=rounding)
            assert torch.allclose(got[1], want[1], atol=rounding, rtol=rounding)


def test_new_keys_are_seen(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v, options = cached("paged", False)
    options["cache_seqlens"] = int32(11, 0, 4)
    options["block_table"] = torch.arange(18).view(3, 6).int()
    new = {
        "k": torch.randn(3, 9, 4, 32, dtype=BF16),
        "v": torch.randn(3, 9, 4, 48, dtype=BF16),
        "causal": True,
    }
    new["rotary_cos"], new["rotary_sin"] = torch.rand(24, 8).to(BF16), torch.rand(24, 8).to(BF16)
    q = torch.randn(3, 9, 8, 32, dtype=BF16)
    results = []
    for arch in ("sm_90a", None):
        caches = k.nan_to_num().clone(), v.nan_to_num().clone()
        monkeypatch.setattr(decode.kv, "target", lambda *_, arch=arch: arch)
        backend = "auto" if arch else "reference"
        results.append((flash_attn_with_kvcache(q, *caches, backend=backend, **new, **options), *caches))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.01)


def test_what_explain_says(hopper: None) -> None:
    k, v, options = cached("token_paged", False)
    q = torch.randn(3, 9, 8, 32, dtype=BF16)
    plan = decode.decode_explain(q, k, v, causal=True, **options)
    assert plan.rows_kernel == "unpack_sm90_bf16_e4m3_token_d32v48_paged_copy"
    rows = 3 * 4 * 24  # of all heads and slots
    assert (plan.copied_bytes, plan.workspace_bytes) == (rows * 80 * 3, rows * 80 * 2)
    assert "MiB at most" in str(plan) and "2 passes over the keys" not in plan.reasons[0]
    k, v, options = cached("contiguous", False)
    plan = decode.decode_explain(q, k, v, causal=True, **options)
    assert plan.rows_kernel == "unpack_sm90_bf16_d32v48" and plan.copied_bytes == plan.workspace_bytes == 0
    assert "as it lies" in str(plan)
    split = decode.decode_explain(q, k, v, causal=True, num_splits=1, **options)
    assert split.kernel.startswith("decode_sm90_bf16_d32v48_ends_") and split.rows_kernel is None
    assert "num_splits is 1" in split.reasons[0]


def test_a_window_needs_rows_of_its_keys_alone(hopper: None) -> None:
    k, v, options = cached("paged", False)
    q = torch.randn(3, 3, 8, 32, dtype=BF16)
    plan = decode.decode_explain(q, k, v, window_size=(4, 0), **options)
    assert plan.workspace_bytes == 3 * 4 * (3 + 4) * 80 * 2


# -- which kernel ---------------------------------------------------------------------------------------------


def chosen(
    seqlen_q: int,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (64, 8),
    dim: int = 128,
    keys: int = 8192,
    **form: Any,
) -> bool:
    heads_q, heads_k = heads
    rows = seqlen_q * heads_q // heads_k
    split = decode_plan.decode_config(dim, dim, "bf16", rows=rows, row_ends=seqlen_q > 1, **form)
    stored = None if form else keys
    plan = make_prefill(split, batch, heads_q, heads_k, seqlen_q, keys, keys, (-1, 0), stored, SMS)
    return choose(split, plan, batch, heads_q, heads_k, seqlen_q, keys, SMS)[0]


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("heads", [(64, 8), (32, 32), (8, 1)])
@pytest.mark.parametrize(
    "form",
    [{}, {"page_size": 16}, {"cache": "e4m3", "scales": "token", "page_size": 64}],
    ids=["", "paged", "e4m3"],
)
def test_few_queries_are_split_and_many_are_not(
    dim: int, heads: tuple[int, int], form: dict[str, Any]
) -> None:
    for batch in (1, 8, 128):
        for keys in (1024, 32768):
            found = [chosen(1 << i, batch=batch, heads=heads, dim=dim, keys=keys, **form) for i in range(13)]
            assert found == sorted(found)  # from some number of queries on
            assert not found[0] and (found[-1] or keys == 1024)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "form",
    [{}, {"page_size": 64}, {"cache": "e4m3", "scales": "token"}],
    ids=["", "paged", "e4m3"],
)
def test_what_one_pass_over_the_keys_serves_is_split(dim: int, form: dict[str, Any]) -> None:
    """All cells of the benchmark's phase decode, and a few queries without a group."""
    for batch, keys in itertools.product((1, 16, 128), (1024, 8192, 131072)):
        for seqlen_q, heads in ((1, (64, 8)), *((1 << i, (32, 32)) for i in range(5))):
            assert not chosen(seqlen_q, batch=batch, heads=heads, dim=dim, keys=keys, **form)


def test_a_busier_gpu_takes_the_forward_sooner() -> None:
    """What a call costs whatever the batch is, and adding up, the splitting kernel has not."""
    first = [next(n for n in range(1, 4096) if chosen(n, batch=batch)) for batch in (1, 4, 16)]
    assert first == sorted(first, reverse=True) and first[0] > 8 and first[-1] < 8


@pytest.mark.parametrize(
    ("seqlen_q", "batch", "heads", "keys", "splits"),
    [
        (32, 1, (64, 8), 32768, 8),  # 16 tiles
        (128, 1, (64, 8), 32768, 2),  # 64
        (512, 1, (64, 8), 32768, 1),  # 256: two rounds as they are
        (32, 16, (64, 8), 32768, 1),
        (32, 1, (8, 1), 4096, 8),  # two tiles of 32 steps
        (32, 1, (8, 1), 500, 1),
    ],
)
def test_splits(seqlen_q: int, batch: int, heads: tuple[int, int], keys: int, splits: int) -> None:
    """As many shares as fill the GPU, of enough steps."""
    split = decode_plan.decode_config(128, 128, "bf16", rows=seqlen_q * heads[0] // heads[1], row_ends=True)
    plan = make_prefill(split, batch, *heads, seqlen_q, keys, keys, (-1, 0), keys, SMS)
    assert plan.splits == splits and plan.config.split_keys == (splits > 1)
    unsplit = dataclasses.replace(plan, splits=1)
    times = [prefill.forward_seconds(p, batch, *heads, seqlen_q, keys, SMS) for p in (plan, unsplit)]
    assert times[0] <= times[1]


def test_numbers_of_queries_in_the_documentation() -> None:
    """docs/performance.md: from which power of two on the forward runs, of 8,192 keys, heads 64 and 8, head_dim 128."""
    pages: dict[str, Any] = {"cache": "e4m3", "scales": "token", "page_size": 64}
    for batch, form, first in ((1, {}, 16), (16, {}, 8), (1, pages, 64), (16, pages, 32)):
        assert next(1 << i for i in range(13) if chosen(1 << i, batch=batch, **form)) == first


def test_parts_cover_all_pairs_once() -> None:
    for part in ((3, 4), (2, 4), (1, 3), (1, 1)):
        pairs = [
            (b, h)
            for sequences, heads in parts(part, 3, 4)
            for b in range(sequences.start, sequences.stop)
            for h in range(heads.start, heads.stop)
        ]
        assert sorted(pairs) == [(b, h) for b in range(3) for h in range(4)]


def test_rows_of_a_cache_as_it_lies() -> None:
    x = torch.zeros(3, 20, 2, 64, dtype=BF16)
    assert rows_between(x, x) == 20
    assert rows_between(x[:, 4:10], x[:, 4:10]) == 20
    assert rows_between(x[1:2], x[:1, :, :, :32]) == 20
    assert rows_between(x, x[:, :, :, :32]) == 20
    across = x.view(20, 3, 2, 64).transpose(0, 1)
    assert rows_between(across, across) is None
    assert rows_between(x, torch.zeros(3, 21, 2, 64, dtype=BF16)[:, :20]) is None
    assert rows_between(x, x[:1].expand(3, -1, -1, -1)) is None
    heads = (
        x.transpose(1, 2).contiguous().transpose(1, 2)
    )  # (batch, heads, slots): rows of a head are neighbours
    assert rows_between(heads, heads) == 40


def test_rows_are_views_of_the_cache() -> None:
    x = torch.arange(3 * 20 * 2 * 64.0).view(3, 2, 20, 64).transpose(1, 2)
    rows = prefill._as_rows(x, 40)
    for b in range(3):
        assert torch.equal(rows[40 * b : 40 * b + 20], x[b])
    assert rows.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"head_dim": 36}, "head_dim must be a multiple of 8"),
        ({"cache": "e4m3", "scales": "head", "head_dim_v": 40}, "head_dim_v must be a multiple of 16"),
        ({"cache": "e4m3"}, "scales must be one of"),
        ({"query_scale": True}, "query_scale must be False"),
        ({"copy": False, "paged": True}, "copy must be True"),
        ({"cache": "e4m3", "scales": "head", "arch": "sm_80"}, "arch must be one of"),
    ],
)
def test_configs_that_cannot_be_built(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(UnpackConfig(128, 128, "bf16"), **change).check()


def test_names_tell_kernels_apart() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"head_dim_v": 64},
        {"dtype": "fp16"},
        {"cache": "e4m3", "scales": "head"},
        {"cache": "e4m3", "scales": "token"},
        {"copy": False},
        {"arch": "sm_80"},
        *({name: True} for name in ("paged", "batch_idx", "leftpad", "query_scale")),
    ]
    base = UnpackConfig(128, 128, "bf16")
    assert len({dataclasses.replace(base, **change).name for change in changes}) == len(changes)
