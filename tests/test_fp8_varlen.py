"""8-bit attention over sequences of unlike length without a GPU: emulator, arguments, plans, places in a workspace."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn import fp8_varlen, launch, launch_varlen, tracing
from cute_attn.flash_varlen import reference_varlen
from cute_attn.fp8_varlen import fp8_attention_varlen, fp8_attention_varlen_kernel
from cute_attn.kernels.config import (
    K_SCALE_GROUP,
    K_SCALE_PAD,
    MEAN_SPAN,
    QUANTIZE_SPAN,
    V_SCALE_GROUP,
    QuantizeConfig,
)
from cute_attn.launch_varlen import VarlenAttention, first_slot, slots
from cute_attn.problem import Features
from cute_attn.quantize import PRESETS, Fp8Recipe, QuantizedQKV, mean_chunks, quantize_reference
from cute_attn.tiles import forward_config, quantize_config

BF16 = torch.bfloat16
LENGTHS = ((0, 0), (5, 300), (64, 0), (70, 40), (0, 9), (33, 257), (1, 1), (0, 0))
ACCURATE = PRESETS["accurate"]


def ends_of(lengths: Any) -> tuple[list[int], list[int]]:
    ends_q, ends_k = (list(itertools.accumulate(n, initial=0)) for n in zip(*lengths, strict=True))
    return ends_q, ends_k


def inputs(lengths: Any = LENGTHS, heads: tuple[int, int] = (4, 2), d: int = 64) -> dict[str, Any]:
    ends_q, ends_k = ends_of(lengths)
    return {
        "q": torch.randn(ends_q[-1], heads[0], d).to(BF16),
        "k": (torch.randn(ends_k[-1], heads[1], d) + torch.randn(d)).to(BF16),
        "v": (torch.randn(ends_k[-1], heads[1], d) + 0.5).to(BF16),
        "cu_seqlens_q": torch.tensor(ends_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(ends_k, dtype=torch.int32),
        "max_seqlen_q": max(n for n, _ in lengths),
        "max_seqlen_k": max(n for _, n in lengths),
    }


def tensors(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


# ------------------------------------------------------------------------------------------------------------
# The emulator
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "recipe": "paper"},
        {"window_size": (50, 3), "softcap": 5.0, "recipe": "fp8"},
        {"softmax_scale": -0.1, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("side", [False, True])
def test_emulator_against_float64(options: dict[str, Any], side: bool) -> None:
    given = inputs()
    more: dict[str, Any] = {}
    if side:
        more = {"alibi_slopes": torch.rand(len(LENGTHS), 4) * 0.1, "sinks": torch.randn(4)}
    out, lse = fp8_attention_varlen(**given, **options, **more, return_lse=True, backend="emulator")
    exact, exact_lse = reference_varlen(
        **tensors(given),
        softmax_scale=options.get("softmax_scale", 0.125),
        window=options.get("window_size", (-1, 0 if options.get("causal") else -1)),
        softcap=options.get("softcap", 0.0),
        dtype=torch.float64,
        **more,
    )
    assert out.dtype == BF16 and out.shape == exact.shape and lse.shape == exact_lse.shape == (4, 173)
    # as in test_api.py; "paper" has coarser scales and P without lift
    bound = 4.8e-2 if options.get("recipe", "default") == "default" else 9e-2
    assert (out - exact).square().mean().sqrt() <= bound * exact.square().mean().sqrt()
    finite = exact_lse != -math.inf
    assert torch.equal(lse != -math.inf, finite)
    assert (lse - exact_lse)[finite].abs().max() <= (0.12 if bound < 5e-2 else 0.3)
    no_keys = slice(5, 69)  # the sequence of 64 queries
    assert bool((out[no_keys] == 0).all())
    expected = more["sinks"][:, None].expand(-1, 64) if side else torch.full((4, 64), -math.inf)
    assert torch.equal(lse[:, no_keys], expected)


def test_emulator_is_that_of_each_sequence() -> None:
    given = inputs()
    for options in ({}, {"causal": True}):
        out, lse = fp8_attention_varlen(**given, **options, return_lse=True, backend="emulator")
        (_, _, _, row, row_end, *_), (_, _, _, key, key_end, *_) = ends_of(LENGTHS)
        one = (given["q"][None, row:row_end], given["k"][None, key:key_end], given["v"][None, key:key_end])
        alone, alone_lse = cute_attn.fp8_attention(*one, **options, return_lse=True, backend="emulator")
        assert torch.allclose(out[row:row_end].float(), alone[0].float(), atol=2e-2)
        assert torch.allclose(lse[:, row:row_end], alone_lse[0], atol=1e-5)


def test_lengths_without_rows_or_keys() -> None:
    sinks = torch.randn(4)
    for lengths in (((0, 5),), ((3, 0), (4, 0)), ((0, 0),)):
        given = inputs(lengths)
        out, lse = fp8_attention_varlen(**given, sinks=sinks, return_lse=True)
        rows = sum(n for n, _ in lengths)
        assert out.shape == (rows, 4, 64) and not bool(out.any())
        assert torch.equal(lse, sinks[:, None].expand(-1, rows))
        assert fp8_attention_varlen_kernel(**tensors(given)) == "none"
    given = inputs(((3, 4),))
    given["cu_seqlens_q"] = given["cu_seqlens_k"] = torch.zeros(1, dtype=torch.int32)  # no sequence
    assert not bool(fp8_attention_varlen(**given).any())


def test_emulator_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_said", set())
    with pytest.warns(UserWarning, match="because the tensors are not on an NVIDIA GPU") as found:
        fp8_attention_varlen(**inputs(((2, 3),)))
    assert found[0].filename == __file__
    fp8_attention_varlen(**inputs(((2, 3),)))


# ------------------------------------------------------------------------------------------------------------
# Arguments and plans
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"q": torch.zeros(1, 173, 4, 64, dtype=BF16)},
            ValueError,
            r"q has 4 dimensions.*allowed: 3, \(total",
        ),
        ({"q": [1.0]}, TypeError, "q is a list; allowed: a torch.Tensor"),
        ({"q": torch.zeros(173, 4, 64)}, TypeError, "q has dtype torch.float32"),
        ({"k": torch.zeros(607, 3, 64, dtype=BF16)}, ValueError, "heads of v is 2; allowed: that of k, 3"),
        (
            {"v": torch.zeros(606, 2, 64, dtype=BF16)},
            ValueError,
            "seqlen of v is 606; allowed: that of k, 607",
        ),
        ({"v": torch.zeros(607, 2, 24, dtype=BF16)}, ValueError, "head_dim of v is 24"),
        ({"cu_seqlens_q": [0, 173]}, TypeError, "cu_seqlens_q is a list"),
        ({"cu_seqlens_q": torch.zeros(9)}, TypeError, "cu_seqlens_q has dtype torch.float32"),
        ({"cu_seqlens_k": torch.zeros(8, dtype=torch.int32)}, ValueError, r"cu_seqlens_k has shape \(8,\)"),
        ({"cu_seqlens_k": torch.zeros(9, 1, dtype=torch.int32)}, ValueError, "one dimension, contiguous"),
        ({"max_seqlen_q": 5.0}, TypeError, "max_seqlen_q is a float"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1"),
        ({"causal": 1}, TypeError, "causal is a int"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\)"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan"),
        ({"alibi_slopes": torch.zeros(7, 4)}, ValueError, r"alibi_slopes has shape \(7, 4\).*\(8, 4\)"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks has shape \(2,\)"),
        ({"out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32"),
        ({"backend": "sm80"}, ValueError, "backend is 'sm80'"),
        ({"backend": "sm90"}, ValueError, "backend is 'sm90' but q is on a device that is no NVIDIA GPU"),
        ({"recipe": "fast"}, ValueError, "recipe is 'fast'"),
        ({"recipe": "naive"}, NotImplementedError, "recipe 'naive' has q_scale 'tensor'"),
        ({"recipe": Fp8Recipe(v_scale="head")}, NotImplementedError, "recipe 'custom' has v_scale 'head'"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fp8_attention_varlen(**{**inputs(), **changed})


def test_gradients_are_refused() -> None:
    given = inputs()
    given["k"].requires_grad_()
    with pytest.raises(NotImplementedError, match="k requires grad"):
        fp8_attention_varlen(**given)
    with torch.no_grad():
        fp8_attention_varlen(**given, backend="emulator")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU that is not there, for planning."""
    monkeypatch.setattr(fp8_varlen, "device_capability", lambda device: (9, 0))
    fp8_varlen.choose.cache_clear()


def test_plan(hopper: None) -> None:
    def kernel(lengths: Any = ((300, 2000), (100, 1500)), heads: Any = (4, 2), **options: Any) -> str:
        return fp8_attention_varlen_kernel(**tensors(inputs(lengths, heads)), **options)

    assert kernel() == forward_config(64, 64, "int8", False, "code", "bf16", varlen=True).name
    assert "_causal_varlen_" in kernel(causal=True)
    assert kernel(window_size=(-1, 0)) == kernel(causal=True)
    assert "_window_softcap_varlen_" in kernel(window_size=(30, -1), softcap=3.0)
    assert "_full_" in kernel(window_size=(3499, 399))  # hides nothing, whatever the lengths
    assert "_window_" in kernel(window_size=(3498, 399)) and "_window_" in kernel(window_size=(3499, 398))
    assert "_full_" in kernel(((1, 2000),), causal=True)  # one query sees all keys
    assert "_g8_" in kernel(((1, 2000), (1, 900)), (16, 2))
    assert "_g" not in kernel(((1920, 2000),), (16, 2))
    assert kernel(causal=True) != kernel(((300, 2000), (100, 4)), causal=True)  # short on average
    assert kernel(backend="emulator").startswith("emulator(fwd_sm90_int8_d64_full_varlen_")


def test_configurations() -> None:
    for d, causal, qk_dtype in itertools.product((64, 128, 256), (False, True), ("e4m3", "int8")):
        config = forward_config(d, d, qk_dtype, causal, "code", "bf16", varlen=True)
        config.check()
        plain = forward_config(d, d, qk_dtype, causal, "code", "bf16")
        threads = 128 * (config.consumer_warpgroups + 1)
        start = 65536 // threads // 8 * 8  # registers of a thread at launch; setmaxnreg deals these out
        wanted = config.consumer_regs * config.consumer_warpgroups + config.producer_regs
        assert wanted <= start * (config.consumer_warpgroups + 1)
        assert config.producer_regs > 24  # it looks for tiles, too
        regs = {"consumer_regs": plain.consumer_regs, "producer_regs": plain.producer_regs}
        assert replace(config, varlen=False, **regs) == plain
        assert "varlen" in config.name and "varlen" not in plain.name
        with pytest.raises(ValueError, match="cluster must be 1 with varlen, got 2"):
            replace(config, cluster=2).check()
    quantiser = quantize_config(ACCURATE, 64, 64, "bf16", varlen=True)
    assert quantiser.name == quantize_config(ACCURATE, 64, 64, "bf16").name + "_varlen"
    for change, message in (
        ({"rotary": "half"}, "rotary must be 'none' with varlen, got 'half'"),
        ({"v_mode": "static"}, "v_mode must not be 'static' with varlen"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(quantiser, **change).check()


# ------------------------------------------------------------------------------------------------------------
# Slots and workspaces
# ------------------------------------------------------------------------------------------------------------


def random_ends(draw: random.Random, block: int) -> list[int]:
    """Ends of up to 40 sequences, many empty or of whole blocks."""
    ends = [draw.choice((0, 0, 5, 3 * block + 1))]
    for _ in range(draw.randint(1, 40)):
        ends.append(ends[-1] + draw.choice((0, 1, block, 2 * block, draw.randint(0, 3 * block))))
    return ends


@pytest.mark.parametrize("block", [V_SCALE_GROUP, MEAN_SPAN, QUANTIZE_SPAN, QUANTIZE_SPAN // 4])
def test_blocks_of_sequences_have_slots_of_their_own(block: int) -> None:
    draw = random.Random(block)
    for _ in range(300):
        ends = random_ends(draw, block)
        batch, total = len(ends) - 1, ends[-1] + draw.choice((0, 7))
        taken: list[int] = []
        for b, (begin, end) in enumerate(itertools.pairwise(ends)):
            first = first_slot(begin, b, block)
            taken += range(first, first - (begin - end) // block)
        assert taken == sorted(set(taken)) and all(slot < slots(total, batch, block) for slot in taken)
        # even a sequence without a block has a slot to read from
        assert all(
            first_slot(begin, b, block) < slots(total, batch, block) for b, begin in enumerate(ends[:-1])
        )


def test_chunks_of_the_mean_key_have_slots() -> None:
    """They are of MEAN_SPAN keys at least, and rows of a span of the quantiser have their V^T in as many slots."""
    for keys in (1, 15, 1023, 1024, 1025, 16384, 16385, 40000, 10**6):
        assert mean_chunks(keys)[1] <= -(-keys // MEAN_SPAN)
    for total, batch, halvings in itertools.product((1, 511, 512, 5000), (1, 3, 100), (0, 1, 2)):
        spans = slots(total, batch, QUANTIZE_SPAN)  # the grid has this many, of 2^halvings halved ones each
        assert slots(total, batch, QUANTIZE_SPAN >> halvings) <= spans << halvings
        assert slots(total, batch, V_SCALE_GROUP) <= spans * (QUANTIZE_SPAN // V_SCALE_GROUP)


Kernels = list[tuple[Any, tuple[Any, ...]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """(config, arguments) of what would have been launched."""
    found: Kernels = []

    def compiled(config: Any) -> Callable[..., None]:
        return lambda *args: found.append((config, args))

    monkeypatch.setattr(launch_varlen, "compile_kernel", compiled)
    monkeypatch.setattr(launch, "_sms", lambda device: 132)
    fp8_varlen._calls.clear()
    return found


def attention_of(
    given: dict[str, Any], recipe: Fp8Recipe, causal: bool = True, scale: float = 0.125, **features: Any
) -> VarlenAttention:
    d = given["q"].shape[2]
    options = {name: bool(x) for name, x in features.items() if name != "window"}
    config = forward_config(d, d, recipe.qk_dtype, causal, recipe.p_rounding, "bf16", varlen=True, **options)
    quantiser = quantize_config(recipe, d, d, "bf16", varlen=True)
    shapes = given["q"].shape, given["k"].shape
    batch = len(given["cu_seqlens_q"]) - 1
    return VarlenAttention(
        *shapes, batch, recipe, quantiser, config, scale, given["q"].device, Features(**features)
    )


OPERANDS = ("q", "k", "vt", "q_scale", "k_scale", "v_scale", "q_dot_mean")


def bytes_of(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def pieces(qkv: QuantizedQKV) -> list[tuple[str, Tensor]]:
    return [(name, x) for name in OPERANDS if (x := getattr(qkv, name)) is not None]


@pytest.mark.parametrize("name", ["accurate", "fp8", "paper"])
def test_operands_of_all_sequences_have_places(name: str, calls: Kernels) -> None:
    """Those of every sequence, written one after the other, are all there in the end; so none lie over others."""
    lengths = (*LENGTHS, (700, 1300), (1, 256), (2, 64))
    given, recipe = inputs(lengths), PRESETS[name]
    attention = attention_of(given, recipe)
    workspace = torch.full((attention._places.size,), 0xFF, dtype=torch.uint8)
    ends_q, ends_k = ends_of(lengths)
    rows, keys = list(itertools.pairwise(ends_q)), list(itertools.pairwise(ends_k))
    wanted = []
    for b in range(len(lengths)):
        one = (given["q"][None, slice(*rows[b])], *(given[x][None, slice(*keys[b])] for x in "kv"))
        wanted.append(quantize_reference(*one, recipe))
        views = attention.operands(workspace, rows[b], keys[b], b, BF16)
        for (_, view), (_, x) in zip(pieces(views), pieces(wanted[-1]), strict=True):
            assert view.shape == x.shape and view.dtype == x.dtype
            view.copy_(x)
    for b, want in enumerate(wanted):
        found = attention.operands(workspace, rows[b], keys[b], b, BF16)
        for (part, x), (_, y) in zip(pieces(found), pieces(want), strict=True):
            assert torch.equal(bytes_of(x), bytes_of(y)), (part, b)
    at, places, slot_count = attention.layout, attention._places, attention._slots
    heads_q, heads_k, d, total_q, total_k = 4, 2, 64, ends_q[-1], ends_k[-1]
    sizes = {
        at.q: total_q * heads_q * d,
        at.k: total_k * heads_k * d,
        at.vt: heads_k * d * slot_count * V_SCALE_GROUP,
        at.q_scale: 4 * heads_q * total_q,
        at.k_scale: 4 * heads_k * slot_count * (V_SCALE_GROUP // K_SCALE_GROUP),
        at.v_scale: 4 * heads_k * slot_count,
        places.counter: 4,
        places.lse: 4 * heads_q * total_q,
    }
    if recipe.smooth_k:
        sizes[at.q_dot] = 4 * heads_q * total_q
        sizes[at.sums] = 4 * slots(total_k, len(lengths), MEAN_SPAN) * heads_k * d
    parts = sorted((first, first + size) for first, size in sizes.items())
    assert parts[0][0] == 0 and parts[-1][1] <= places.size
    assert all(first % 128 == 0 for first, _ in parts)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(parts))
    # one vector load of K's scales for any tile, TMA of V^T
    assert at.k_scale_head % K_SCALE_PAD == 0 and at.vt_dim % V_SCALE_GROUP == 0


def test_what_a_call_launches(calls: Kernels) -> None:
    given = inputs()
    ends = given["cu_seqlens_q"], given["cu_seqlens_k"]
    for recipe, scale in ((ACCURATE, 0.125), (PRESETS["paper"], -0.25)):
        calls.clear()
        attention = attention_of(given, recipe, scale=scale, softcap=3.0, sinks=True, window=(-1, 0))
        sinks = torch.zeros(4)
        out, lse = attention(*tensors(given).values(), True, None, sinks)
        assert out.shape == (173, 4, 64) and out.dtype == BF16 and lse.shape == (4, 173)
        (quantiser, first), (config, second) = calls
        assert isinstance(quantiser, QuantizeConfig) and quantiser.varlen and config.varlen
        assert torch.equal(first[0], given["q"] if scale > 0 else -given["q"])
        assert first[1] is given["k"] and first[2] is given["v"] and first[3:5] == ends
        _, _, _, base, counter, at_lse, lse_add, _, slot_count, *rest = second
        assert second[0] is out and second[1:3] == ends and base == first[6]
        assert counter == base + attention._places.counter and at_lse == lse.data_ptr()
        smooth = recipe.smooth_k
        assert lse_add == (base + attention.layout.q_dot if smooth else launch._zero(out.device).data_ptr())
        assert slot_count == first[8] == slots(len(given["k"]), len(LENGTHS), V_SCALE_GROUP)
        log2_e = math.log2(math.e)
        assert rest[:3] == [abs(scale), 3.0 * log2_e, 132] and rest[4:6] == [None, sinks]
        assert rest[6:] == [pytest.approx(2 * log2_e * abs(scale) / 3.0), None, None]
        assert isinstance(attention(*tensors(given).values(), False, None, sinks), Tensor)
        assert calls[-1][1][5] == calls[-1][1][3] + attention._places.lse


def test_public_function_prepares_once(hopper: None, calls: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    for _ in range(2):
        fp8_attention_varlen(**given, window_size=(20, 10))
    assert len(fp8_varlen._calls) == 1 and len(calls) == 4
    assert calls[-1][1][-2:] == (20, 10) and calls[-1][0].window


def test_inputs_of_any_place_are_copied(calls: Kernels) -> None:
    given = inputs()
    odd = torch.empty(given["k"].numel() + 1, dtype=BF16)[1:].view_as(given["k"]).copy_(given["k"])
    attention = attention_of(given, ACCURATE)
    attention(given["q"], odd, given["v"], given["cu_seqlens_q"], given["cu_seqlens_k"], False)
    k = calls[0][1][1]
    assert k.data_ptr() % 16 == 0 and torch.equal(k, odd)


def test_limits(calls: Kernels) -> None:
    given = inputs(((1, 1),))
    shapes = ((QUANTIZE_SPAN * 65535, 1, 64), given["k"].shape)
    configs = (
        attention_of(given, ACCURATE).config,
        forward_config(64, 64, "int8", True, "code", "bf16", varlen=True),
    )
    with pytest.raises(
        ValueError, match="q has 33553920 rows, k 1, in 1 sequences; the quantiser takes at most"
    ):
        VarlenAttention(*shapes, 1, ACCURATE, *configs, 1.0, torch.device("cpu"), Features())


# ------------------------------------------------------------------------------------------------------------
# Compiled kernels
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        quantize_config(ACCURATE, 128, 128, "bf16", varlen=True),
        quantize_config(PRESETS["paper"], 64, 256, "fp16", varlen=True),
        forward_config(128, 128, "int8", True, "code", "bf16", varlen=True),
        forward_config(64, 64, "e4m3", False, "code", "bf16", varlen=True),
        forward_config(256, 256, "int8", False, "code", "bf16", window=True, softcap=True, varlen=True),
    ],
    ids=lambda config: config.name,
)
def test_compiled(config: Any) -> None:
    from cute_attn.compile import inspect

    found = inspect(config)
    assert found.stack_bytes == found.spill_store_bytes == found.spill_load_bytes == 0
    assert not found.serialized_wgmma
