"""Attention against a KV cache on a GPU, against float64, and appending, against the reference bit for bit.

Slots that no query sees hold NaN, table entries of their pages nonsense, and outputs are poisoned before every launch.
Cases whose name begins with "prefill" run the 16-bit forward, however few their queries are, and those that begin with
"split" run it over shares of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from poison import PoisonedTorch, poison_memory
from torch import Tensor

from cute_attn import append, append_kv, decode, decode_plan, flash_attn_with_kvcache, kv, launch, prefill
from cute_attn.append import append_reference, queries_reference
from cute_attn.decode import decode_explain, decode_kernel, reference
from cute_attn.decode_plan import Shares, decode_config
from cute_attn.kernels.config import AppendConfig, DecodeConfig
from cute_attn.quantize import rotation_signs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NAMES = {BF16: "bf16", FP16: "fp16"}
NO_PAGE = 1 << 30


@dataclass(frozen=True)
class Case:
    """A call: sizes, form of the cache, and options that go to it."""

    name: str
    lengths: tuple[int, ...] = (1000, 0, 517)
    seqlen_q: int = 1
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    slots: int = 1000
    page_size: int | None = None
    scales: str = "none"
    query: str = "16bit"
    dtype: torch.dtype = BF16
    batch_idx: bool = False
    leftpad: bool = False
    lengths_of_host: bool = False  # cache_seqlens is an int
    splits: int = 0  # shares of the keys in the 16-bit forward
    alibi: bool = False
    sinks: bool = False
    magnitudes: tuple[float, float] = (1.0, 1.0)  # of q and v
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def window(self) -> tuple[int, int]:
        left, right = self.options.get("window_size", (-1, -1))
        return left, 0 if self.options.get("causal") else right

    def config(self) -> DecodeConfig:
        return decode_config(
            *self.dims,
            NAMES[self.dtype],
            cache="16bit" if self.scales == "none" else "e4m3",
            scales=self.scales,
            query=self.query,
            page_size=self.page_size,
            rows=self.seqlen_q * self.heads[0] // self.heads[1],
            row_ends=self.seqlen_q > 1 and self.window != (-1, -1),
            softcap=self.options.get("softcap", 0.0) > 0.0,
            alibi=self.alibi,
            sinks=self.sinks,
            batch_idx=self.batch_idx,
            leftpad=self.leftpad,
        )

    def first_seen(self, b: int, pad: int) -> int:
        left = self.window[0]
        return max(pad, self.lengths[b] - self.seqlen_q - left if left >= 0 else 0)

    def make(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, caches and keyword arguments, with NaN wherever nothing may be read."""
        batch, (heads_q, heads_k) = len(self.lengths), self.heads
        q = (torch.randn(batch, self.seqlen_q, heads_q, self.dims[0], device=DEVICE) * self.magnitudes[0]).to(
            self.dtype
        )
        options = dict(self.options)
        options["cache_seqlens"] = torch.tensor(self.lengths, device=DEVICE, dtype=torch.int32)
        if self.alibi:
            options["alibi_slopes"] = torch.rand(batch, heads_q, device=DEVICE) * 0.1
        if self.sinks:
            options["sinks"] = torch.randn(heads_q, device=DEVICE)
        order, sequences = list(range(batch)), batch
        if self.batch_idx:
            sequences = batch + 3
            order = torch.randperm(sequences)[:batch].tolist()
            options["cache_batch_idx"] = torch.tensor(order, device=DEVICE, dtype=torch.int32)
        pads = [0] * batch
        if self.leftpad:
            pads = [min(5 + 13 * b, n) for b, n in enumerate(self.lengths)]
            options["cache_leftpad"] = torch.tensor(pads, device=DEVICE, dtype=torch.int32)
        caches, scales = [], []
        for dim, mean, size in ((self.dims[0], 0.0, 1.0), (self.dims[1], 0.5, self.magnitudes[1])):
            x = (torch.randn(sequences, self.slots, heads_k, dim, device=DEVICE) + mean) * size
            if self.scales == "none":
                caches.append(x.to(self.dtype))
                continue
            scale = x.abs().amax(dim=3 if self.scales == "token" else (1, 3)) / 448
            spread = scale if self.scales == "token" else scale.unsqueeze(1)
            caches.append((x / spread.unsqueeze(-1)).to(E4M3))
            scales.append(scale)
        tokens = self.scales == "token"
        for b, place in enumerate(order):
            for x in [*caches, *(scales if tokens else [])]:
                poison(x[place, self.lengths[b] :])
                poison(x[place, : self.first_seen(b, pads[b])])
        if self.page_size is not None:
            size, blocks = self.page_size, -(-self.slots // self.page_size)
            pages = batch * blocks + 5
            used = torch.randperm(pages, device=DEVICE)[: batch * blocks]
            table = used.view(batch, blocks).int()
            for group in [caches, scales] if tokens else [caches]:
                group[:] = [paged(x, used, pages, size, blocks) for x in group]
            for b in range(batch):
                table[b, -(-self.lengths[b] // size) :] = NO_PAGE
                table[b, : self.first_seen(b, pads[b]) // size] = NO_PAGE
            options["block_table"] = table
        if scales:
            if self.scales == "head" and self.batch_idx:
                scales = [x[order] for x in scales]
            options["k_descale"], options["v_descale"] = scales
        if self.query == "e4m3":
            q = q.to(E4M3)
            options["q_descale"] = torch.rand(batch, heads_k, device=DEVICE) + 0.5
        return q, *caches, options


def poison(x: Tensor) -> None:
    """NaN into a view of a cache or of scales."""
    if x.dtype == E4M3:
        x.view(torch.uint8).fill_(0x7F)
    else:
        x.fill_(math.nan)


def paged(x: Tensor, used: Tensor, pages: int, size: int, blocks: int) -> Tensor:
    """Sequences of a cache, or of scales, in pages; what is none of theirs is NaN."""
    raw = x.view(torch.uint8) if x.dtype == E4M3 else x
    empty = 0x7F if x.dtype == E4M3 else math.nan
    whole = torch.full((x.shape[0], blocks * size, *x.shape[2:]), empty, device=DEVICE, dtype=raw.dtype)
    whole[:, : x.shape[1]] = raw
    out = torch.full((pages, size, *x.shape[2:]), empty, device=DEVICE, dtype=raw.dtype)
    out[used] = whole.view(-1, size, *x.shape[2:])
    return out.view(x.dtype)


CAUSAL = {"causal": True}


def prefills() -> list[Case]:
    """Many queries, in every form of a cache and with every feature."""
    rows = {"seqlen_q": 700, "slots": 1008, "options": CAUSAL}
    cases = {
        "contiguous": Case("", **rows),
        "full": Case("", **{**rows, "options": {}}),
        "batch_idx": Case("", batch_idx=True, **rows),
        "leftpad": Case("", leftpad=True, batch_idx=True, **rows),
        "by_host": Case("", (900,) * 3, lengths_of_host=True, **rows),
        "fp16_dims_40_72": Case("", dims=(40, 72), dtype=FP16, **rows),
        "dims_64": Case("", dims=(64, 64), **rows),
        "dims_256": Case("", dims=(256, 256), **rows),
        "dims_192_128": Case("", dims=(192, 128), page_size=24, **rows),
        "mha": Case("", heads=(4, 4), **{**rows, "seqlen_q": 1000}),
        "long": Case("", (20000, 5, 700), **{**rows, "slots": 20000}),
        "many": Case("", tuple(i * 37 % 301 for i in range(70)), seqlen_q=150, slots=304, options=CAUSAL),
        "pages_of_16": Case("", page_size=16, **rows),
        "pages_of_1": Case("", page_size=1, leftpad=True, **rows),
        "pages_window": Case("", page_size=16, **{**rows, "options": {"window_size": (50, 7)}}),
        "window": Case("", sinks=True, **{**rows, "options": {"window_size": (300, 0)}}),
        "all_features": Case(
            "", alibi=True, sinks=True, page_size=16, **{**rows, "options": {"softcap": 3.0, "causal": True}}
        ),
        "negative_scale": Case("", **{**rows, "options": {"softmax_scale": -0.1}}),
        "e4m3_token": Case("", scales="token", **rows),
        "e4m3_head": Case("", scales="head", batch_idx=True, **rows),
        "e4m3_pages": Case("", scales="token", page_size=64, leftpad=True, **rows),
        "e4m3_fp16": Case("", scales="head", dtype=FP16, page_size=16, dims=(96, 48), **rows),
        "q_e4m3_token": Case("", scales="token", query="e4m3", page_size=16, **rows),
        "q_e4m3_head": Case("", scales="head", query="e4m3", **rows),
    }
    few = {"seqlen_q": 20, "slots": 1008, "options": CAUSAL}
    split = {
        "contiguous": cases["contiguous"],
        "few": Case("", heads=(64, 8), **few),
        "one_query": Case("", **{**few, "seqlen_q": 1}),
        "more_than_blocks": Case("", splits=20, **few),
        "full": cases["full"],
        "leftpad": cases["leftpad"],
        "dims_40_72": cases["fp16_dims_40_72"],
        "dims_256": Case("", (1000, 0, 100), heads=(16, 2), dims=(256, 256), **few),
        "mha": Case("", heads=(4, 4), **few),
        "long": Case("", (20000, 5, 700), splits=30, **{**few, "slots": 20000}),
        "many": cases["many"],
        "pages_window": cases["pages_window"],
        "window": cases["window"],
        "all_features": cases["all_features"],
        "negative_scale": cases["negative_scale"],
        "e4m3_pages": cases["e4m3_pages"],
        "huge": Case("", magnitudes=(3e4, 1.0), **few),
    }
    return [
        *(replace(case, name=f"prefill_{name}") for name, case in cases.items()),
        *(replace(case, name=f"split_{name}", splits=case.splits or 3) for name, case in split.items()),
    ]


def forward_taken(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 16-bit forward attends, with the case's shares of the keys."""

    def make(*args: Any) -> prefill.Prefill:
        plan = prefill.make_prefill(*args)
        config = replace(plan.config, split_keys=case.splits > 1)
        return replace(plan, config=config, splits=max(case.splits, 1))

    monkeypatch.setattr(prefill, "GAIN", math.inf)
    monkeypatch.setattr(decode, "make_prefill", make)


CASES = [
    Case("plain"),
    Case("group_of_8", heads=(64, 8)),
    Case("one_key", (1,)),
    Case("17_keys", (17,)),
    Case("64_and_65", (64, 65)),
    Case("fp16", dtype=FP16),
    *(Case(f"{n}_splits", options={"num_splits": n}) for n in (1, 3)),
    Case("7_splits_of_long", (5000, 3), slots=5000, options={"num_splits": 7}),
    Case("long", (70000, 33), slots=70000),
    Case("many", tuple(i * 37 % 301 for i in range(70)), slots=300),
    Case("mha", heads=(4, 4)),
    Case("4_queries", seqlen_q=4),
    Case("4_queries_causal", seqlen_q=4, options=CAUSAL),
    Case("16_queries_causal", seqlen_q=16, heads=(16, 2), options=CAUSAL),
    Case("200_queries_causal", seqlen_q=200, options=CAUSAL),
    Case("16_queries_window", seqlen_q=16, options={"window_size": (100, 3)}),
    *(
        Case(f"dims_{d}_{v}", seqlen_q=2, dims=(d, v), options=CAUSAL)
        for d, v in ((64, 64), (256, 256), (40, 72), (96, 96), (192, 128), (32, 256), (248, 48))
    ),
    *(Case(f"pages_of_{n}", page_size=n, slots=1024) for n in (1, 16, 24, 48, 64, 128, 256)),
    Case("pages_causal", seqlen_q=3, page_size=16, options=CAUSAL),
    Case("pages_window", page_size=16, options={"window_size": (50, 0)}),
    Case("pages_of_1_window", seqlen_q=3, page_size=1, options={"window_size": (50, 0)}),
    Case("softcap", options={"softcap": 5.0}),
    Case("alibi", alibi=True),
    Case("sinks", sinks=True),
    Case("sinks_split", sinks=True, options={"num_splits": 4}),
    Case("window", options={"window_size": (70, 0)}),
    Case("batch_idx", batch_idx=True),
    Case("leftpad", leftpad=True),
    Case("negative_scale", options={"softmax_scale": -0.1}),
    Case("zero_scale", options={"softmax_scale": 0.0}),
    Case("all_together", seqlen_q=3, alibi=True, sinks=True, options={"softcap": 3.0, "causal": True}),
    *(Case(f"e4m3_{scales}", scales=scales) for scales in ("head", "token")),
    Case("e4m3_head_batch_idx", scales="head", batch_idx=True),
    Case("e4m3_pages_of_64", scales="token", page_size=64),
    Case("e4m3_pages_of_1", scales="token", page_size=1),
    *(Case(f"e4m3_dims_{d}_{v}", scales="token", dims=(d, v)) for d, v in ((64, 64), (256, 256), (48, 80))),
    Case("e4m3_5_queries_causal", seqlen_q=5, scales="token", options=CAUSAL),
    Case("e4m3_fp16", scales="head", dtype=FP16),
    Case("e4m3_softcap_alibi", scales="token", alibi=True, options={"softcap": 4.0}),
    Case("e4m3_tiny_values", scales="token", magnitudes=(1.0, 1e-6)),
    Case("e4m3_huge_queries", scales="token", magnitudes=(1e6, 1.0), options={"softmax_scale": 1e-7}),
    Case("e4m3_long", (40000, 100), slots=40000, scales="token"),
    # Neighbouring heads in step: rows of 64 bytes, of 64 and 128, and of 80 and 144, of which eight end with a line.
    Case("in_step", (5000, 3, 777), slots=5000, dims=(64, 64), heads=(8, 4), scales="token"),
    Case(
        "in_step_pages",
        (5000, 0, 777),
        slots=5008,
        dims=(64, 128),
        heads=(8, 4),
        scales="token",
        page_size=16,
    ),
    Case("8_in_step", (3000, 1, 900), slots=3000, dims=(40, 72), heads=(16, 8)),
    Case(
        "8_in_step_queries", (3000, 70), seqlen_q=40, slots=3000, dims=(40, 72), heads=(16, 8), options=CAUSAL
    ),
    # Whole units: in one round or more, and where the host knows the lengths and combines nothing.
    Case("whole", tuple(260 + i % 40 for i in range(400)), slots=300),
    Case("whole_blocks", tuple(260 + i % 40 for i in range(100)), seqlen_q=16, slots=300, options=CAUSAL),
    Case("whole_by_host", (300,) * 400, slots=310, lengths_of_host=True),
    Case("host_knows", (4000,) * 3, slots=4010, lengths_of_host=True),
    Case("9_rows", heads=(9, 1)),
    # Blocks of half a tile, for want of registers.
    Case(
        "half_tiles",
        seqlen_q=5,
        dims=(256, 256),
        page_size=1,
        alibi=True,
        sinks=True,
        leftpad=True,
        options={"softcap": 3.0, "causal": True},
    ),
    Case("e4m3_half_tiles", seqlen_q=5, dims=(256, 256), scales="token", alibi=True, options=CAUSAL),
    *(Case(f"q_e4m3_{scales}", scales=scales, query="e4m3") for scales in ("head", "token")),
    Case(
        "q_e4m3_queries",
        seqlen_q=5,
        dims=(64, 128),
        scales="head",
        query="e4m3",
        page_size=16,
        options=CAUSAL,
    ),
    Case("q_e4m3_negative", scales="token", query="e4m3", alibi=True, options={"softmax_scale": -0.1}),
    Case(
        "q_e4m3_softcap", dims=(256, 256), scales="token", query="e4m3", page_size=1, options={"softcap": 4.0}
    ),
    Case("200_queries_split", seqlen_q=200, options={"causal": True, "num_splits": 1}),
    *prefills(),
]


@dataclass(frozen=True)
class NewTokens:
    """An append: form of the cache and what is done to the tokens."""

    name: str
    dims: tuple[int, int] = (128, 128)
    seqlen_new: int = 1
    scales: str = "none"
    page_size: int | None = None
    batch_idx: bool = False
    rotary: str = "none"
    rotary_dim: int = 64
    rotate: bool = False
    dtype: torch.dtype = BF16

    def config(self) -> AppendConfig:
        """Of a call with queries."""
        return AppendConfig(
            *self.dims,
            in_dtype=NAMES[self.dtype],
            cache="16bit" if self.scales == "none" else "e4m3",
            scales=self.scales,
            paged=self.page_size is not None,
            rotary=self.rotary,
            rotate=self.rotate,
            batch_idx=self.batch_idx,
            queries=self.rotary != "none" or self.rotate,
        )


NEW = [
    NewTokens("plain"),
    NewTokens("many", seqlen_new=333, dims=(64, 256)),
    NewTokens("paged", page_size=16, seqlen_new=5),
    NewTokens("pages_of_1", page_size=1, seqlen_new=5),
    NewTokens("batch_idx", batch_idx=True, dims=(40, 72), rotary="half", rotary_dim=32),
    NewTokens("half", rotary="half", rotary_dim=128, seqlen_new=4),
    NewTokens("interleaved", rotary="interleaved", seqlen_new=4, dtype=FP16),
    NewTokens("e4m3_token", scales="token", seqlen_new=4),
    NewTokens("e4m3_head", scales="head", seqlen_new=4, dims=(256, 64)),
    *(
        NewTokens(f"e4m3_rotated_{d}", scales="token", rotate=True, dims=(d, d), seqlen_new=3)
        for d in (48, 64, 96, 128, 256)
    ),
    NewTokens("e4m3_all", scales="token", rotate=True, rotary="half", page_size=16, seqlen_new=7),
    NewTokens("e4m3_head_all", scales="head", rotate=True, rotary="interleaved", page_size=16, dtype=FP16),
]
GRAPH = Case("graph", slots=4000, heads=(16, 2))
GRAPHS = [
    replace(GRAPH, name="graphs", lengths=(3000, 1, 4000)),
    replace(GRAPH, name="graphs_pages", lengths=(3000, 1, 4000), page_size=16),
    replace(GRAPH, name="graphs_e4m3", lengths=(3000, 1, 4000), scales="token"),
    replace(GRAPH, name="graphs_e4m3_pages", lengths=(3000, 1, 4000), scales="token", page_size=16),
]
# Units for all SMs of an H200, and more than 15/16 of what they hold: a CTA each, and no combining kernel
MANY_UNITS = Case(
    "many", lengths=tuple((37 * b) % 301 for b in range(128)), heads=(64, 8), slots=300, scales="token"
)
AT_ENDS = (0, 300, *(n + i for n in (16, 64, 128, 192, 256) for i in (-1, 0, 1)))
LONG_AND_SHORT = (8192, 0, 1, 17, 4096, 63, 5000, 8000, 64, 65, 2, 7777, 300, 8192, 1023, 1024)
OF_2048 = tuple(n // 4 for n in LONG_AND_SHORT)
MANY_SHORT = [
    MANY_UNITS,
    replace(MANY_UNITS, name="many_64", dims=(64, 64)),
    replace(MANY_UNITS, name="many_256", dims=(256, 256)),
    replace(MANY_UNITS, name="many_mha", heads=(32, 32)),
    replace(MANY_UNITS, name="many_host", lengths=(300,) * 128, lengths_of_host=True),
    replace(MANY_UNITS, name="many_all", query="e4m3", sinks=True, leftpad=True, batch_idx=True),
    replace(
        MANY_UNITS, name="many_all_64", dims=(64, 64), query="e4m3", sinks=True, leftpad=True, batch_idx=True
    ),
    replace(MANY_UNITS, name="many_64_odd", dims=(64, 64), heads=(33, 33)),
    replace(MANY_UNITS, name="many_96", dims=(96, 96)),
    replace(
        MANY_UNITS,
        name="many_long",
        scales="head",
        lengths=OF_2048,
        slots=2048,
        dims=(64, 64),
        heads=(32, 32),
    ),
    replace(MANY_UNITS, name="many_long_256", scales="none", lengths=OF_2048, slots=2048, dims=(256, 256)),
    replace(MANY_UNITS, name="many_head", scales="head", dtype=FP16, heads=(8, 8), dims=(128, 64)),
    replace(MANY_UNITS, name="many_window", options={"window_size": (50, 0)}),
    replace(MANY_UNITS, name="many_softcap", alibi=True, options={"softcap": 20.0}),
    *(replace(MANY_UNITS, name=f"many_16bit_{d}", scales="none", dims=(d, d)) for d in (64, 128, 256)),
    *(
        replace(
            MANY_UNITS,
            name=f"many_16bit_ring_{d}",
            scales="none",
            lengths=tuple(AT_ENDS[b % len(AT_ENDS)] for b in range(128)),
            dims=(d, d),
            sinks=True,
        )
        for d in (64, 128)
    ),
    # Lengths at the ends of tiles and of the rings that are filled before the length is known; room for less than one
    *(
        replace(
            MANY_UNITS,
            name=f"many_{name}_{dim}",
            lengths=tuple(lengths[b % len(lengths)] for b in range(128)),
            slots=max(lengths),
            dims=(dim, dim),
            sinks=True,
        )
        for name, lengths in (("ring", AT_ENDS), ("small", (0, 40, 1, 15, 16, 17, 39)), ("one", (1, 0)))
        for dim in (64, 128, 256)
    ),
    replace(
        MANY_UNITS,
        name="many_ring_of_four_warps",
        lengths=tuple((0, 1, 300, 319, 320, 321, 383, 384, 385, 699, 700)[b % 11] for b in range(128)),
        slots=700,
        alibi=True,
        sinks=True,
    ),
    # Several rows of units that are not full, two units of a key head, and kernels that begin with the length
    *(
        replace(
            MANY_UNITS, name=f"many_queries_{dim}", dims=(dim, dim), heads=(24, 8), seqlen_q=2, sinks=True
        )
        for dim in (64, 128, 256)
    ),
    replace(MANY_UNITS, name="many_blocks", dims=(256, 256), seqlen_q=4),
    replace(MANY_UNITS, name="many_causal", seqlen_q=2, options=CAUSAL),
    replace(MANY_UNITS, name="many_causal_blocks", dims=(256, 256), seqlen_q=4, options=CAUSAL),
]
GRAPH_MANY = Case("graph", seqlen_q=700, slots=1008, scales="token", page_size=16, options=CAUSAL)


def attending(new: NewTokens) -> Case:
    """The attention of the same call."""
    return Case(
        new.name,
        seqlen_q=3,
        heads=(4, 2),
        dims=new.dims,
        page_size=new.page_size,
        scales=new.scales,
        dtype=new.dtype,
        batch_idx=new.batch_idx,
        options=CAUSAL,
    )


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode, "torch", PoisonedTorch())
    monkeypatch.setattr(append, "torch", PoisonedTorch())
    monkeypatch.setattr(prefill, "torch", PoisonedTorch())
    poison_memory(monkeypatch, launch)
    monkeypatch.setattr(decode, "_plans", type(decode._plans)())
    yield
    torch.cuda.synchronize()


def check(got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, case: Case, **options: Any) -> None:
    """`got` (out, lse) against float64. P is rounded to 16 bits and so is O: half a step of the largest output each."""
    options.setdefault("softmax_scale", 1.0 / math.sqrt(q.shape[3]))
    for name in ("causal", "num_splits", "window_size"):
        options.pop(name, None)
    exact, exact_lse = reference(q.double(), k, v, window=case.window, dtype=torch.float64, **options)
    out, lse = got
    bound = 1.5 * torch.finfo(out.dtype).eps * exact.abs().max().item()
    error = (out.double() - exact).abs()
    wrong = ~(error <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first {wrong.nonzero()[0].tolist()}, {error.max()}"
    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert torch.allclose(lse[~empty].double(), exact_lse[~empty], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = case.name.startswith(("prefill", "split"))
    if forward:
        forward_taken(case, monkeypatch)
    q, k, v, options = case.make()
    lengths = {"cache_seqlens": case.lengths[0]} if case.lengths_of_host else {}
    got = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **{**options, **lengths})
    assert got[0].dtype == case.dtype
    if forward:
        named = {name: x for name, x in {**options, **lengths}.items() if name != "softmax_scale"}
        assert decode_kernel(q, k, v, **named).startswith("fwd_sm90_")
        q, k, v = rounded(q, k, v, case, options)
    check(got, q, k, v, case, **options)


def rounded(
    q: Tensor, k: Tensor, v: Tensor, case: Case, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """q and caches of 16 bits as the forward takes them: e4m3 times their scales, which leave `options`."""
    if case.scales == "none":
        return q, k, v

    def of_cache(x: Tensor) -> Tensor:
        """(batch, heads_k) -> for each sequence or page of the cache, which is of one sequence."""
        whole = torch.ones(k.shape[0], x.shape[1], device=DEVICE)
        order = options.get("cache_batch_idx", torch.arange(len(x)))
        for b, own in enumerate(x):
            places = order[b : b + 1] if case.page_size is None else options["block_table"][b]
            whole[places[places < NO_PAGE].long()] = own
        return whole.unsqueeze(1)

    found = []
    for x, name, factor in ((k, "k_descale", options.pop("q_descale", None)), (v, "v_descale", None)):
        scale = options.pop(name)
        if factor is not None:
            scale = scale * (factor if case.scales == "head" else of_cache(factor))
        scale = of_cache(scale) if case.scales == "head" else scale
        found.append((x.float() * scale.unsqueeze(-1)).to(case.dtype))
    return q.to(case.dtype), found[0], found[1]


@pytest.mark.parametrize("case", MANY_SHORT, ids=lambda case: case.name)
def test_many_short_units(case: Case) -> None:
    """A CTA for each: results, those of the same call again, and those of a graph with other lengths."""
    q, k, v, options = case.make()
    if case.lengths_of_host:
        options["cache_seqlens"] = case.lengths[0]

    def call() -> tuple[Tensor, Tensor]:
        return flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)

    got = call()
    [plan] = decode._plans.values()
    assert plan.config.whole
    blocks = -(-case.seqlen_q * case.heads[0] // case.heads[1] // plan.config.rows)
    assert plan.shares == Shares(len(case.lengths) * case.heads[1] * blocks, 1, 1, 0)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    check(got, q, k, v, case, **{**options, "cache_seqlens": lengths})
    assert all(torch.equal(a, b) for a, b in zip(got, call(), strict=True))
    if case.lengths_of_host:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    on_device = options["cache_seqlens"]
    for other in (torch.zeros_like(lengths), (lengths * 7 // 11), lengths.clamp_max(1), lengths):
        on_device.copy_(torch.maximum(other, options.get("cache_leftpad", other)))
        graph.replay()
        if (
            case.options.get("window_size") is None
        ):  # else slots before the window are NaN, which shorter ones see
            check(captured, q, k, v, case, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, captured, strict=True))


ONE = Case("one", lengths=(30000,), slots=32768, heads=(64, 8))


@pytest.mark.parametrize(
    "case",
    [
        *(replace(ONE, name=f"16bit_{d}", dims=(d, d)) for d in (64, 128, 256)),
        *(replace(ONE, name=f"e4m3_{d}", dims=(d, d), scales="token") for d in (128, 256)),
        replace(ONE, name="e4m3_64", dims=(64, 64), scales="token", heads=(32, 32)),
        replace(ONE, name="16bit_mha", heads=(32, 32)),
        replace(ONE, name="narrow", dims=(64, 64), scales="token", heads=(7, 7)),
        replace(ONE, name="one_head", lengths=(120000,), slots=131072, scales="token", heads=(8, 1)),
        replace(ONE, name="unlike", lengths=(2048, 0, 1, 1500), slots=2048),
        replace(ONE, name="short", lengths=(40,), slots=1024),
        replace(ONE, name="none", lengths=(0,), slots=1024, scales="token"),
        replace(ONE, name="ends", seqlen_q=2, heads=(32, 8), options=CAUSAL),
        replace(ONE, name="window", options={"window_size": (5000, 0)}),
        replace(ONE, name="pad", leftpad=True, batch_idx=True, sinks=True, scales="token"),
        replace(ONE, name="host", lengths=(5000, 5000), slots=8192, lengths_of_host=True),
    ],
    ids=lambda case: case.name,
)
def test_fixed_shares(case: Case) -> None:
    """Every so many-th tile of a unit: results, and those of a graph with other lengths."""
    q, k, v, options = case.make()
    if case.lengths_of_host:
        options["cache_seqlens"] = case.lengths[0]

    def call() -> tuple[Tensor, Tensor]:
        return flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)

    got = call()
    [plan] = decode._plans.values()
    assert plan.config.fixed and plan.shares.splits > 1
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    check(got, q, k, v, case, **{**options, "cache_seqlens": lengths})
    if case.lengths_of_host:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    on_device = options["cache_seqlens"]
    if "window_size" not in case.options:  # else slots before the window are NaN, which shorter ones see
        # among them those at which the ring of some share is filled before the length is known, and not
        ends = (2047, 2048, 2049, 8319, 8320, 9000, 10239, 10240)
        for n in (0, 1, 63, 64, 65, 1000, *ends, case.lengths[0] // 2):
            on_device.copy_(torch.maximum(lengths.clamp_max(n), options.get("cache_leftpad", lengths * 0)))
            graph.replay()
            check(captured, q, k, v, case, **options)


PAIRS = Case("pairs", dims=(64, 64), scales="token")


@pytest.mark.parametrize("length", [0, 1, 2999, 3000])
def test_a_length_that_a_captured_graph_sees_first(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that lengths of the host are taken from cannot come to the device meanwhile."""
    case = Case("graph", (length,) * 3, slots=3000)
    q, k, v, options = case.make()
    given = {**options, "cache_seqlens": length}
    flash_attn_with_kvcache(q, k, v, **given)  # compiles
    monkeypatch.setattr(kv, "_numbers", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **given)
    assert not kv._numbers
    got = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **given)
    assert len(kv._numbers) == 1
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, captured, strict=True))
    check(got, q, k, v, case, **options)


@pytest.mark.parametrize(
    "case",
    [
        *(replace(PAIRS, name=f"heads_{q}_{k}", heads=(q, k)) for q, k in ((2, 2), (8, 2), (10, 2), (16, 2))),
        replace(PAIRS, name="balanced", lengths=LONG_AND_SHORT, slots=8208, heads=(32, 32)),
        replace(PAIRS, name="balanced_full", lengths=LONG_AND_SHORT, slots=8192, heads=(64, 8)),
        replace(PAIRS, name="whole_long", lengths=OF_2048, slots=2048, heads=(32, 32)),
        replace(PAIRS, name="one", lengths=(30000,), slots=32768, heads=(32, 32)),
        replace(PAIRS, name="dims_of_values", dims=(64, 32), heads=(8, 8)),
        replace(PAIRS, name="dims_of_keys", dims=(32, 64), heads=(8, 4)),
        replace(PAIRS, name="magnitudes", magnitudes=(1e-3, 1e4), heads=(16, 2)),
        replace(PAIRS, name="few_tokens", seqlen_q=4, heads=(8, 4), options=CAUSAL),
        replace(PAIRS, name="window", heads=(8, 4), options={"window_size": (100, 0)}),
        replace(PAIRS, name="all", heads=(8, 4), sinks=True, leftpad=True, batch_idx=True),
        replace(PAIRS, name="scores", heads=(8, 4), alibi=True, options={"softcap": 20.0}),
        replace(
            MANY_UNITS,
            name="whole_mha",
            dims=(64, 64),
            heads=(32, 32),
            lengths=tuple(range(0, 384, 3)),
            slots=400,
        ),
        replace(
            MANY_UNITS, name="whole", dims=(64, 64), heads=(64, 8), lengths=tuple(range(0, 384, 3)), slots=400
        ),
    ],
    ids=lambda case: case.name,
)
def test_pairs_of_heads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads as one of twice the columns."""
    monkeypatch.setattr(decode_plan, "PAIRED_KEYS", 0)
    q, k, v, options = case.make()
    got = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    [plan] = decode._plans.values()
    assert plan.config.heads == 2
    assert plan.config.whole == (case.name.startswith("whole"))
    check(got, q, k, v, case, **options)


@pytest.mark.parametrize("case", [GRAPH], ids=["graph"])
def test_graph_with_other_lengths(case: Case) -> None:
    """One capture serves all lengths, tables and contents, and equals a call to the bit."""
    q, k, v, _ = case.make()
    k.normal_()
    v.normal_()
    lengths = torch.tensor([5, 5, 5], dtype=torch.int32, device=DEVICE)
    flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True)
    for values in ([1, 500, 4000], [0, 0, 0], [4000, 3999, 64], [2, 0, 700]):
        lengths.copy_(torch.tensor(values))
        q.normal_()
        graph.replay()
        check(captured, q, k, v, case, cache_seqlens=lengths)
        assert torch.equal(captured[0], flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))


@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.name)
def test_graphs_of_several_calls(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a graph, as of the layers of a model, share a workspace one after another, and what other graphs
    leave, deleted before or after, takes nothing from it."""
    monkeypatch.setattr(decode, "torch", torch)  # a poisoned workspace would keep neighbouring calls apart

    def captured(count: int) -> tuple[torch.cuda.CUDAGraph, list[Any], list[Any]]:
        given = [case.make() for _ in range(count)]
        q, k, v, options = given[0]
        flash_attn_with_kvcache(q, k, v, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = [
                flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
                for q, k, v, options in given
            ]
        return graph, given, got

    before = captured(2)
    before[0].replay()
    graph, given, got = captured(5)
    after = captured(3)
    after[0].replay()
    torch.cuda.synchronize()
    del before, after
    torch.cuda.empty_cache()
    for _ in range(2):
        for out, lse in got:
            out.fill_(math.nan)
            lse.fill_(math.nan)
        graph.replay()
        graph.replay()
        for (q, k, v, options), results in zip(given, got, strict=True):
            check(results, q, k, v, case, **options)


@pytest.mark.parametrize(
    "case", [GRAPH_MANY, replace(GRAPH_MANY, name="graph_split", splits=3)], ids=lambda case: case.name
)
def test_graph_of_many_queries_with_other_lengths(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_taken(case, monkeypatch)
    q, k, v, options = case.make()
    for x in (k, v):
        x.copy_(torch.randn(x.shape, device=DEVICE).to(x.dtype))
    for name in ("k_descale", "v_descale"):
        options[name].fill_(0.5)
    lengths, table = options["cache_seqlens"], options["block_table"]
    table.copy_(torch.randperm(k.shape[0], device=DEVICE)[: table.numel()].view_as(table))
    flash_attn_with_kvcache(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    for values in ([1, 500, 1000], [0, 0, 0], [1000, 999, 64]):
        lengths.copy_(torch.tensor(values))
        table.copy_(table.flip(0))
        graph.replay()
        kept = dict(options)
        assert torch.equal(captured[0], flash_attn_with_kvcache(q, k, v, **options))
        check(captured, *rounded(q, k, v, case, kept), case, **kept)


@pytest.mark.parametrize("pairs", [1, 3], ids=["head", "3_heads"])
def test_rows_in_parts(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that has room for few heads of a sequence gives the same bits."""
    case = Case("parts", seqlen_q=700, heads=(8, 4), slots=1008, scales="token", page_size=16, options=CAUSAL)
    q, k, v, options = case.make()
    monkeypatch.setattr(prefill, "GAIN", math.inf)
    whole = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    monkeypatch.setattr(prefill, "WORKSPACE", pairs * 1008 * 512)
    decode._plans.clear()
    assert decode_explain(q, k, v, **options).workspace_bytes == pairs * 1008 * 512
    got = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    for one, other in zip(got, whole, strict=True):
        assert torch.equal(raw(one.contiguous()), raw(other.contiguous()))


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name.startswith("prefill") and case.scales + str(case.page_size) != "noneNone"
    ],
    ids=lambda case: case.name,
)
def test_rows_of_a_cache(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, and where they are, bit for bit; no other row is written."""
    q, k, v, options = case.make()
    monkeypatch.setattr(prefill, "GAIN", math.inf)
    kept: list[tuple[Tensor, ...]] = []
    rows_of = prefill._rows

    def keep(*args: Any) -> tuple[Tensor, ...]:
        kept.append(rows_of(*args))
        return kept[-1]

    monkeypatch.setattr(prefill, "_rows", keep)
    flash_attn_with_kvcache(q, k, v, **options)
    (found,) = kept
    given = dict(options)
    _, *caches = rounded(q, k, v, case, given)
    stride = found[0].shape[0] // len(case.lengths)
    pads = given["cache_leftpad"].tolist() if case.leftpad else [0] * len(case.lengths)
    starts, counts, of_q = found[2].tolist()
    assert of_q == [b * case.seqlen_q for b in range(len(case.lengths) + 1)]
    for x, rows in zip(caches, found, strict=False):
        for b, end in enumerate(case.lengths):
            first = min(case.first_seen(b, pads[b]), end)
            sequence = int(given["cache_batch_idx"][b]) if case.batch_idx else b
            table = given["block_table"][b] if case.page_size is not None else None
            want = decode._slots(x, first=first, end=end, sequence=sequence, table=table)
            assert (starts[b], counts[b]) == (b * stride, end - first)
            own = rows[b * stride : (b + 1) * stride]
            assert torch.equal(raw(own[: end - first]), raw(want.contiguous()))
            assert bool(own[end - first :].isnan().all())  # poison


@pytest.mark.parametrize("case", [Case("wide_rows", (100, 100, 4000), slots=4096)], ids=["wide_rows"])
def test_offsets_past_32_bits(case: Case) -> None:
    q, _, _, _ = case.make()
    k = torch.empty(3, 4096, 2, 128 * 700, device=DEVICE, dtype=BF16)[..., :128].normal_()
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    got = flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, return_softmax_lse=True)
    check(got, q, k, k, case, cache_seqlens=lengths)


def test_an_infinite_value_stays_one() -> None:
    """In the last of 20 parts of a row, which the combining kernel loads sixteen at a time: what it loads beyond the
    last does not count, not even as zero times infinity."""
    q = torch.randn(1, 1, 8, 128, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(1, 2560, 2, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    v[0, -1, 1, 5] = math.inf
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=2560)
    assert bool((out[0, 0, 4:, 5] == math.inf).all())
    out[0, 0, 4:, 5] = 0.0
    assert bool(out.isfinite().all())


def raw(x: Tensor) -> Tensor:
    """Bits, so that NaN equals NaN."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("new", NEW, ids=lambda new: new.name)
def test_append(new: NewTokens) -> None:
    """The caches and scales bit for bit as the reference leaves them; the attention of the call against float64."""
    case = attending(new)
    q, k_cache, v_cache, options = case.make()
    lengths = options["cache_seqlens"]
    lengths.copy_(torch.tensor([700, 0, 517]))
    lengths[0] = case.slots - new.seqlen_new  # to the very last slot
    if new.page_size is not None:
        pages = k_cache.shape[0]
        table = options["block_table"]
        table.copy_(torch.randperm(pages, device=DEVICE)[: table.numel()].view_as(table))
    for x in (k_cache, v_cache):  # what the sequences hold already
        x.copy_(torch.randn(x.shape, device=DEVICE).to(x.dtype))
    if new.scales != "none":
        for name in ("k_descale", "v_descale"):
            options[name].uniform_(0.01, 0.02)
    batch, heads_k = len(case.lengths), case.heads[1]
    k, v = (torch.randn(batch, new.seqlen_new, heads_k, d, device=DEVICE).to(new.dtype) * 3 for d in new.dims)
    k[1, 0, 0] = 0.0
    if new.scales == "token":
        v[2, 0, 1, 3] = math.inf
    tokens: dict[str, Any] = dict.fromkeys(append.TENSORS) | {"k": k, "v": v}
    if new.rotary != "none":
        angles = torch.rand(case.slots + 30, new.rotary_dim // 2, device=DEVICE) * 6
        tokens |= {"rotary_cos": angles.cos().to(new.dtype), "rotary_sin": angles.sin().to(new.dtype)}
    if new.rotate:
        tokens["rotation_signs"] = rotation_signs(new.dims[0], 3, DEVICE)
    interleaved = new.rotary == "interleaved"
    side = {name: options.get(name) for name in ("cache_seqlens", "cache_batch_idx", "block_table")}
    copies = {name: options[name].clone() if name in options else None for name in ("k_descale", "v_descale")}
    caches = k_cache.clone(), v_cache.clone()
    append_reference(*caches, tokens, side | copies, interleaved)
    turned = q
    if new.rotary != "none" or new.rotate:
        turned = queries_reference(q, tokens, lengths, interleaved, 1)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, rotary_interleaved=interleaved, return_softmax_lse=True, **tokens, **options
    )
    pairs = [(k_cache, caches[0]), (v_cache, caches[1])]
    pairs += [(options[name], x) for name, x in copies.items() if x is not None]
    for i, (got, want) in enumerate(pairs):
        wrong = (raw(got) != raw(want)).nonzero()
        assert not len(wrong), f"tensor {i}: {len(wrong)} wrong, first {wrong[0].tolist()}"
    if new.scales == "token":
        assert bool(out[2, -1, 2:].isnan().all())
        out, turned = out[:2], turned[:2]
        lse, options = (
            lse[:2],
            {name: x[:2] if isinstance(x, Tensor) and x.shape[0] == 3 else x for name, x in options.items()},
        )
        if new.page_size is None:
            k_cache, v_cache = k_cache[:2], v_cache[:2]
    options["cache_seqlens"] = options["cache_seqlens"] + new.seqlen_new
    check((out, lse), turned, k_cache, v_cache, case, **options)


@pytest.mark.parametrize("new", [NEW[-2]], ids=["e4m3_all"])
def test_token_by_token_equals_all_at_once(new: NewTokens) -> None:
    cos, sin = (torch.randn(640, 32, device=DEVICE).to(BF16) for _ in range(2))
    k, v = (torch.randn(2, 601, 2, 128, device=DEVICE).to(BF16) for _ in range(2))
    results = []
    for step in (601, 1):
        caches = [torch.zeros(80, 16, 2, 128, device=DEVICE).to(E4M3) for _ in range(2)]
        scales = [torch.zeros(80, 16, 2, device=DEVICE) for _ in range(2)]
        for i in range(0, 601, step):
            append_kv(
                k[:, i : i + step],
                v[:, i : i + step],
                *caches,
                cache_seqlens=torch.tensor([i, i + 30], dtype=torch.int32, device=DEVICE),
                block_table=torch.arange(80, device=DEVICE).flip(0).view(2, 40).int(),
                rotary_cos=cos,
                rotary_sin=sin,
                rotary_interleaved=False,
                rotation_signs=rotation_signs(128, 0, DEVICE),
                k_descale=scales[0],
                v_descale=scales[1],
            )
        results.append([*caches, *scales])
    for one, other in zip(*results, strict=True):
        assert torch.equal(raw(one), raw(other))


def test_append_past_2_to_the_31() -> None:
    """Sequences 2^30 elements apart: only the slots of the new tokens change."""
    room = torch.zeros(5 << 30, dtype=FP16, device=DEVICE)
    cache = room.as_strided((5, 4096, 32, 128), (1 << 30, 4096, 128, 1))
    new = torch.ones(4, 3, 32, 128, dtype=FP16, device=DEVICE)
    index = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=DEVICE)
    out = flash_attn_with_kvcache(
        torch.zeros_like(new), cache, cache, new, new, cache_seqlens=0, cache_batch_idx=index, causal=True
    )
    assert bool((out == 1.0).all()) and bool((cache[1:, :3] == 1.0).all())
    assert int(room.count_nonzero()) == new.numel()
