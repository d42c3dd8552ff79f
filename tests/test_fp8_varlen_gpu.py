"""The 8-bit kernels over sequences of unlike length, on a Hopper GPU: against the quantiser, the forward kernel and the
emulator, each of one sequence after the other.

What a sequence gives may depend on nothing but itself, so codes and scales must be those of its own quantiser call, and
outputs those of its own forward call, to the bit. Workspaces, outputs and the counter of tiles are poisoned before
every launch: all bytes 0xFF, a NaN as float32 and as e4m3.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from poison import poison_memory
from rounding_bounds import check_lse, doubled_lse, error_ratio, exact_attention
from torch import Tensor

import cute_attn
from cute_attn import QuantizedQKV, emulator, fp8_varlen, launch, launch_varlen
from cute_attn.flash_varlen import reference_varlen
from cute_attn.kernels.config import V_SCALE_GROUP, FwdConfig
from cute_attn.launch_varlen import VarlenAttention, first_slot
from cute_attn.problem import Features
from cute_attn.quantize import PRESETS, Fp8Recipe, quantize_reference
from cute_attn.tiles import DTYPE_NAMES, forward_config, quantize_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16 = torch.bfloat16
ACCURATE, FP8, PAPER = PRESETS["accurate"], PRESETS["fp8"], PRESETS["paper"]

Lengths = tuple[tuple[int, int], ...]

# (queries, keys) of the sequences: empty ones first, between and last, tails of every kind, rows without keys
LENGTHS: Lengths = ((0, 0), (1, 1), (7, 300), (128, 128), (0, 5), (129, 127), (200, 333), (300, 40), (64, 0))
LENGTHS += ((0, 0), (1, 700), (333, 333), (0, 0), (2, 1), (65, 257), (260, 900), (1, 128), (512, 256), (5, 0))
# longer than the mean of the keys has chunks of the shortest kind, and than two spans of the quantiser
LONG: Lengths = ((3, 17), (700, 20000), (1030, 1025), (0, 64), (40, 513))


def many(count: int, longest: int, seed: int = 0) -> Lengths:
    """Log-uniform lengths, a fifth of them 0: more sequences than a warp has lanes."""
    draw = random.Random(seed)

    def length() -> int:
        return 0 if draw.random() < 0.2 else int(math.exp(draw.uniform(0.0, math.log(longest + 1))))

    return tuple((length(), length()) for _ in range(count))


OTHERS = {"softcap": True, "alibi": True, "sinks": True}
ALL = {"window": True, **OTHERS}


def config_of(d: int, qk_dtype: str, causal: bool, *args: Any, **options: Any) -> FwdConfig:
    """The kernel for sequences of unlike length; `args` and `options` as those of `forward_config` behind out_dtype."""
    adjusts = options.get("softcap", False) or options.get("alibi", False)
    rounding = "half" if qk_dtype == "e4m3" and not adjusts else "code"
    return forward_config(
        d, options.pop("d_v", d), qk_dtype, causal, rounding, "bf16", *args, varlen=True, **options
    )


CONFIGS = [
    config_of(128, "int8", True),
    config_of(128, "e4m3", False),
    config_of(64, "e4m3", False),
    config_of(64, "int8", True),
    config_of(64, "int8", True, seqlen_k=300),
    config_of(256, "int8", False),
    config_of(256, "e4m3", True),
    config_of(128, "int8", False, **ALL),
    config_of(256, "int8", False, **ALL),
    config_of(64, "e4m3", False, **OTHERS),
    config_of(192, "int8", True, 8, d_v=128, **OTHERS),
    config_of(128, "e4m3", False, 4, window=True),
]
RECIPES = [
    (ACCURATE, (128, 128)),
    (ACCURATE, (64, 64)),
    (FP8, (256, 256)),
    (ACCURATE, (192, 128)),
    (PAPER, (64, 256)),
    (replace(PAPER, name="custom", rotation="none", smooth_k=True, k_block=64), (80, 80)),
]


# --- tools


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch, launch, launch_varlen)
    fp8_varlen._calls.clear()


@dataclass
class Batch:
    """Random q, k, v of sequences; keys have a mean that queries see, values one, too."""

    lengths: Lengths
    heads: tuple[int, int]  # of queries and of keys
    dims: tuple[int, int]
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        self.ends_q, self.ends_k = (
            list(itertools.accumulate(n, initial=0)) for n in zip(*self.lengths, strict=True)
        )
        (heads_q, heads_k), (d, d_v) = self.heads, self.dims
        q = torch.randn(self.ends_q[-1], heads_q, d, device=DEVICE) * 1.5 + 0.2
        k = torch.randn(self.ends_k[-1], heads_k, d, device=DEVICE) + torch.randn(d, device=DEVICE)
        v = torch.randn(self.ends_k[-1], heads_k, d_v, device=DEVICE) + 0.5
        self.q, self.k, self.v = (x.to(self.dtype) for x in (q, k, v))
        self.cu_q, self.cu_k = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (self.ends_q, self.ends_k)
        )

    @property
    def given(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.cu_q, self.cu_k

    def rows(self, b: int) -> tuple[slice, slice]:
        return slice(*self.ends_q[b : b + 2]), slice(*self.ends_k[b : b + 2])

    def one(self, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a sequence, a batch of one."""
        rows, keys = self.rows(b)
        return self.q[None, rows], self.k[None, keys], self.v[None, keys]

    def attention(
        self, config: FwdConfig, recipe: Fp8Recipe, scale: float, features: Features
    ) -> VarlenAttention:
        quantiser = quantize_config(recipe, *self.dims, DTYPE_NAMES[self.dtype], varlen=True)
        shapes = tuple(self.q.shape), tuple(self.k.shape)
        count = len(self.lengths)
        device = self.q.device
        return VarlenAttention(*shapes, count, recipe, quantiser, config, scale, device, features)

    def operands(self, attention: VarlenAttention, workspace: Tensor, b: int) -> QuantizedQKV:
        rows, keys = self.rows(b)
        return attention.operands(workspace, (rows.start, rows.stop), (keys.start, keys.stop), b, self.dtype)


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item() if x.numel() else 0.0


def bytes_of(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


# --- the quantiser


def check_codes(batch: Batch, recipe: Fp8Recipe) -> None:
    """Codes, scales and V^T with its zeros of each sequence, against its own quantiser in torch."""
    attention = batch.attention(CONFIGS[0], recipe, 1.0, Features())  # of which only the quantiser runs
    workspace = attention.quantise(*batch.given)
    at, heads_k, d_v = attention.layout, batch.heads[1], batch.dims[1]
    for b, (seqlen_q, seqlen_k) in enumerate(batch.lengths):
        found = batch.operands(attention, workspace, b)
        want = quantize_reference(*batch.one(b), recipe)
        for name in ("q", "k", "vt", "q_scale", "k_scale", "v_scale"):
            x, y = (bytes_of(getattr(part, name)) for part in (found, want))
            assert x.shape == y.shape, (name, b)
            if not torch.equal(x, y):
                wrong = (x != y).nonzero()
                raise AssertionError(
                    f"{name} of sequence {b} {seqlen_q, seqlen_k}: {len(wrong)} of {x.numel()} bytes, first at "
                    f"{wrong[0].tolist()}, last at {wrong[-1].tolist()}"
                )
        if recipe.smooth_k:
            x, y = found.q_dot_mean, want.q_dot_mean
            assert x is not None and y is not None
            assert torch.allclose(x, y, rtol=1e-4, atol=1e-3), f"q_dot of sequence {b} {seqlen_q, seqlen_k}"
        if seqlen_k:
            begin = first_slot(batch.ends_k[b], b, V_SCALE_GROUP) * V_SCALE_GROUP
            end = begin + -(-seqlen_k // V_SCALE_GROUP) * V_SCALE_GROUP
            all_v = workspace[at.vt : at.vt + heads_k * at.vt_head].view(heads_k, d_v, at.vt_dim)
            behind = all_v[..., begin + -(-seqlen_k // 16) * 16 : end]
            assert not bool(behind.any()), f"not zero behind sequence {b} {seqlen_q, seqlen_k}"


@pytest.mark.parametrize(("recipe", "dims"), RECIPES, ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, LONG, many(100, 600)], ids=["tails", "long", "many"])
def test_codes(recipe: Fp8Recipe, dims: tuple[int, int], lengths: Lengths) -> None:
    check_codes(Batch(lengths, (6, 3), dims), recipe)


def test_codes_are_those_of_the_other_quantiser() -> None:
    """Also q . mean key, whose sum has another order in torch."""
    batch = Batch(LENGTHS + LONG, (4, 2), (128, 128), torch.float16)
    attention = batch.attention(CONFIGS[0], ACCURATE, 1.0, Features())
    workspace = attention.quantise(*batch.given)
    for b, (seqlen_q, seqlen_k) in enumerate(batch.lengths):
        if seqlen_q and seqlen_k:
            found = batch.operands(attention, workspace, b)
            want = launch.launch_quantize(
                *batch.one(b), ACCURATE, quantize_config(ACCURATE, 128, 128, "fp16")
            )
            for name in ("q", "k", "vt", "q_scale", "k_scale", "v_scale", "q_dot_mean"):
                x, y = (bytes_of(getattr(part, name)) for part in (found, want))
                assert torch.equal(x, y), (name, b)


def test_strided_and_unaligned_inputs() -> None:
    batch = Batch(LENGTHS, (4, 4), (64, 64))
    packed = torch.stack([torch.randn_like(batch.q), batch.q], dim=1)
    batch.q = packed[:, 1]
    shifted = torch.empty(batch.k.numel() + 1, dtype=BF16, device=DEVICE)[1:].view_as(batch.k)
    batch.k = shifted.copy_(batch.k)
    check_codes(batch, ACCURATE)


# --- the forward


def recipe_of(config: FwdConfig) -> Fp8Recipe:
    return ACCURATE if config.qk_dtype == "int8" else FP8


def heads_of(config: FwdConfig) -> tuple[int, int]:
    return (6, 3) if config.pack_gqa == 1 else (config.pack_gqa * 2, 2)


def features_of(config: FwdConfig, batch: int, heads_q: int) -> tuple[Features, dict[str, Any]]:
    """Random values of what `config` has."""
    side: dict[str, Any] = {"alibi_slopes": None, "sinks": None}
    if config.alibi:
        side["alibi_slopes"] = torch.rand(batch, heads_q, device=DEVICE).square() * 0.3
    if config.sinks:
        side["sinks"] = torch.randn(heads_q, device=DEVICE) * 4
    window = (170, 31) if config.window else (-1, 0) if config.causal else (-1, -1)
    features = Features(window, 8.0 if config.softcap else 0.0, config.alibi, config.sinks)
    return features, side


def check(lengths: Lengths, config: FwdConfig, to_the_bit: bool = False, sms: int | None = None) -> float:
    """Every sequence against float64 and for how far from it against the emulator; returns the ratio of their errors.

    With `to_the_bit` also against the forward kernel for sequences of one length.
    """
    batch = Batch(lengths, heads_of(config), (config.head_dim, config.head_dim_v))
    scale = config.head_dim**-0.5
    features, side = features_of(config, len(lengths), batch.heads[0])
    attention = batch.attention(config, recipe_of(config), scale, features)
    if sms is not None:
        attention._factors = (*attention._factors[:2], sms, attention._factors[3])
    workspace = attention.quantise(*batch.given)
    result = attention(*batch.given, True, side["alibi_slopes"], side["sinks"])
    out, lse = result
    worst, errors, of_emulator, of_all = (-1.0, ""), 0.0, 0.0, 0.0
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        rows, _ = batch.rows(b)
        mine, my_lse, where = out[rows], lse[:, rows], f"sequence {b} {seqlen_q, seqlen_k}"
        if not seqlen_q:
            continue
        if not seqlen_k:
            sink = side["sinks"]
            assert bool((mine == 0).all()), where
            assert bool(
                (my_lse == -math.inf).all() if sink is None else torch.allclose(my_lse, sink[:, None])
            ), where
            continue
        qkv = batch.operands(attention, workspace, b)
        slopes = None if side["alibi_slopes"] is None else side["alibi_slopes"][b : b + 1]
        options = {"softmax_scale": scale, "window": features.window, "softcap": features.softcap}
        options |= {"alibi_slopes": slopes, "sinks": side["sinks"]}
        exact, exact_lse = (x[0] for x in exact_attention(qkv, **options))
        sizes = {name: getattr(config, name) for name in ("tile_m", "tile_n", "check_keys", "pack_gqa")}
        emulated, emulated_lse = (
            x[0] for x in emulator.emulate_forward(qkv, out_dtype=BF16, **sizes, **options)
        )
        bad = (~mine.isfinite()).any(dim=2).nonzero()
        assert not len(bad), f"{where}: {len(bad)} rows not finite, first (row, head) {bad[0].tolist()}"
        assert torch.equal(my_lse == -math.inf, exact_lse == -math.inf), where
        doubled = doubled_lse(qkv, options)[0]
        check_lse(
            my_lse, emulated_lse, exact_lse, doubled, config.qk_dtype, where, seqlen_k, config.half_scores
        )
        off = rms(mine - emulated) / max(rms(exact), 1e-30)
        worst = max(worst, (off, where))
        errors += (mine - exact).square().sum().item()
        of_emulator += (emulated - exact).square().sum().item()
        of_all += exact.square().sum().item()
        if to_the_bit:
            plain = replace(config, varlen=False, consumer_regs=240 if config.tile_m == 128 else 160)
            plain = replace(plain, producer_regs=24 if config.tile_m == 128 else 32)
            same_out, same_lse = launch.launch_forward(
                qkv,
                plain,
                causal=plain.causal,
                softmax_scale=scale,
                out_dtype=BF16,
                features=features,
                alibi_slopes=slopes,
                sinks=side["sinks"],
            )
            assert torch.equal(mine, same_out[0]) and torch.equal(my_lse, same_lse[0]), f"{where}: other bits"
    ratio = error_ratio(config.qk_dtype, lse.numel())
    error, bound = math.sqrt(errors / of_all), ratio * math.sqrt(of_emulator / of_all) + 1e-5
    assert error <= bound, f"{error:.3e}, {bound:.3e} allowed; {worst[1]} is {worst[0]:.3e} from the emulator"
    return error / bound * ratio


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("sms", [None, 3])
def test_forward(config: FwdConfig, sms: int | None) -> None:
    check(LENGTHS, config, sms=sms)


@pytest.mark.parametrize("config", [CONFIGS[i] for i in (0, 2, 7, 10)], ids=lambda config: config.name)
def test_forward_is_that_of_each_sequence(config: FwdConfig) -> None:
    check(LENGTHS, config, to_the_bit=True)


@pytest.mark.parametrize("config", [CONFIGS[i] for i in (0, 2, 7)], ids=lambda config: config.name)
@pytest.mark.parametrize("lengths", [LONG, many(80, 400)], ids=["long", "many"])
def test_long_and_many(config: FwdConfig, lengths: Lengths) -> None:
    check(lengths, config)


def test_neighbours_do_not_leak() -> None:
    """A NaN in one sequence, in q, k or v, changes no bit of another."""
    lengths = ((70, 300), (65, 129), (130, 257))
    batch = Batch(lengths, (4, 2), (128, 128))
    attention = batch.attention(CONFIGS[0], ACCURATE, 0.1, Features((-1, 0)))
    clean = attention(*batch.given, True)
    for name in "qkv":
        x = getattr(batch, name)
        saved = x.clone()
        x[slice(*(batch.ends_q if name == "q" else batch.ends_k)[1:3])] = math.nan
        spoilt = attention(*batch.given, True)
        for b in (0, 2):
            rows, _ = batch.rows(b)
            assert torch.equal(spoilt[0][rows], clean[0][rows]), (name, b)
            assert torch.equal(spoilt[1][:, rows], clean[1][:, rows]), (name, b)
        rows, _ = batch.rows(1)
        assert bool(spoilt[0][rows].isnan().all()), name
        x.copy_(saved)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (100, 0), "softcap": 8.0}], ids=str
)
@pytest.mark.parametrize("softmax_scale", [None, -0.05])
def test_public_function(options: dict[str, Any], softmax_scale: float | None) -> None:
    """Against float64 on the 16-bit inputs, within the bounds of test_api.py; repeated, to the bit."""
    batch = Batch(LENGTHS, (4, 2), (128, 128))
    longest = (max(n) for n in zip(*LENGTHS, strict=True))
    options = {**options, "softmax_scale": softmax_scale, "return_lse": True}
    given = (*batch.given, *longest)
    out, lse = cute_attn.fp8_attention_varlen(*given, backend="sm90", **options)
    window = options.get("window_size", (-1, 0 if options.get("causal") else -1))
    exact, exact_lse = reference_varlen(
        *batch.given,
        softmax_scale=128**-0.5 if softmax_scale is None else softmax_scale,
        window=window,
        softcap=options.get("softcap", 0.0),
        dtype=torch.float64,
    )
    assert rms(out - exact) <= 4.8e-2 * rms(exact)
    finite = exact_lse != -math.inf
    assert torch.equal(lse != -math.inf, finite)
    assert (lse - exact_lse)[finite].abs().max().item() <= 0.12
    again = cute_attn.fp8_attention_varlen(*given, **options)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    alone = cute_attn.fp8_attention_varlen(*given, **{**options, "return_lse": False})
    assert torch.equal(alone, out)
