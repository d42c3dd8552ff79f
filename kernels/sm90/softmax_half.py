"""P by code from scores in float16 (p_rounding "half").

The product Q K^T of e4m3 operands may leave float16 sums: two scores of a row in one register. Then one HFMA2 makes two
numbers of codes and clamps them at 0, one HADD2 rounds both, and S takes half the registers. In float32 that is two
FMAs, which besides take time from a running WGMMA, and a conversion at half the rate (`perf/tuning/issue_rates.txt`).
The quantiser keeps codes so small that no sum leaves float16's range (`narrow_max`).

    v    = relu(S * f + b)         f = float16(8 * s), b = HALF_BIAS - 8 m, a multiple of 8 up to 16384, so exact
    code = v + 1024, low byte      halves from 1024 on have a last bit of 1

A score is rounded by 2^-11 of its size for each 32 columns, its unit f by 2^-11 once; rounding to e4m3 blurred it more
(docs/numerics.md). A row whose b is larger than that is marked to take the slow path at every check, and a unit that
float16 cannot hold takes it by its own bits. There codes are made of the difference to the largest score.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..config import (
    CODE_MAX,
    FIRST_ABOVE,
    HALF_BIAS,
    HALF_LSE_BIAS,
    HALF_MAX,
    HALF_SHIFT_MAX,
    HALF_SMALLEST_FACTOR,
    HALF_UNSET_SHIFT,
    HALF_WIDE,
    K_SCALE_GROUP,
    ROUND_LIMIT,
    FwdConfig,
)
from .operands import row_max
from .softmax_fp8 import GUARD_BITS, GUARD_UNSET, Fp8Softmax, max_pair

THOUSANDS = 0x64006400  # 1024 in both halves
GUARD_SET = (
    0x1B811B81  # added to a pair of codes above 1024, carries into a half's top bit iff its code is above 126
)


@cute.jit
def both(x: Float32) -> Uint32:
    """x in both halves."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Uint32], read_only_args=[x]
    )


@cute.jit
def fma_relu(s: Uint32, f: Uint32, b: Uint32) -> Uint32:
    """max(s * f + b, 0) of halves, rounded once; NaN stays."""
    return cute.arch.inline_ptx(
        "fma.rn.relu.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[s, f, b]
    )


@cute.jit
def whole(v: Uint32) -> Uint32:
    """1024 + v rounded to an integer, for each half."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 thousands; mov.b32 thousands, {THOUSANDS}; add.rn.f16x2 {{$w0}}, {{$r0}}, thousands; }}",
        write_only_types=[Uint32],
        read_only_args=[v],
    )


@cute.jit
def sum_halves(a: Uint32, b: Uint32) -> Uint32:
    """a + b of halves."""
    return cute.arch.inline_ptx(
        "add.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


@cute.jit
def product(a: Uint32, b: Uint32) -> Uint32:
    """a * b of halves."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


@cute.jit
def max_halves(a: Uint32, b: Uint32) -> Uint32:
    """The larger of halves, NaN where one is."""
    return cute.arch.inline_ptx(
        "max.NaN.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


@cute.jit
def low_half(x: Uint32) -> Float32:
    """The low half as a number."""
    return cute.arch.inline_ptx(
        "{ .reg .f16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


@cute.jit
def high_half(x: Uint32) -> Float32:
    """The high half as a number."""
    return cute.arch.inline_ptx(
        "{ .reg .f16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, b; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


class HalfSoftmax(Fp8Softmax):
    """`Fp8Softmax` for scores in float16; its state has one tensor more, b of each row in both halves."""

    def __init__(self, cfg: FwdConfig):
        super().__init__(cfg)
        self.lse_bias = HALF_LSE_BIAS
        self.score_unit = 8.0

    def new_state(self):
        reference, rescale, guard, v_unit = super().new_state()
        reference.fill(HALF_UNSET_SHIFT)
        offset = cute.make_rmem_tensor(2, Uint32)
        offset.fill(both(Float32(HALF_UNSET_SHIFT)))
        return reference, rescale, guard, v_unit, offset

    @cute.jit
    def octaves_of(self, reference: Float32) -> Float32:
        """m of what the state holds."""
        return (Float32(HALF_BIAS) - reference) * Float32(0.125)

    @cute.jit
    def softmax_code(
        self,
        part: cutlass.Constexpr,
        acc: cute.Tensor,
        pairs: cute.Tensor,
        state,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
    ):
        """As `Fp8Softmax.softmax_code`; acc, float16, stays as it is."""
        _, rescale, guard, _, offset = state
        words = cute.recast_tensor(acc, Uint32)  # of row w % 2, columns 8 (w / 2) and the next of a lane
        count = self.cfg.check_keys // 4  # words of a check
        if const_expr(part == 0):
            for r in cutlass.range_constexpr(2):
                rescale[r] = Float32(1.0)
        for c in cutlass.range_constexpr(self.part_keys // self.cfg.check_keys):
            keys_before = part * self.part_keys + c * self.cfg.check_keys
            first_pair = keys_before // 4
            scale = k_scale[keys_before // K_SCALE_GROUP]
            units = [both(q_scale[r] * scale + Float32(HALF_SMALLEST_FACTOR)) for r in range(2)]
            # a unit above 1,150 takes the slow path, too: past 65,504 it is infinite here, and codes may be wrongly 0
            top = max_pair(units[0], units[1])
            for i in cutlass.range_constexpr(count):
                pair = whole(fma_relu(words[c * count + i], units[i % 2], offset[i % 2]))
                pairs[first_pair + i] = pair
                top = max_pair(top, pair)
            over = ((top + Uint32(guard[0])) & Uint32(GUARD_BITS & 0xFFFFFFFF)) != Uint32(0)
            if cute.arch.vote_any_sync(over):
                self.move_reference_half(c * count, first_pair, words, pairs, state, q_scale, scale)

    @cute.jit
    def move_reference_half(
        self,
        first: cutlass.Constexpr,
        first_pair: cutlass.Constexpr,
        words: cute.Tensor,
        pairs: cute.Tensor,
        state,
        q_scale: cute.Tensor,
        k_scale: Float32,
    ):
        """As `Fp8Softmax.move_reference`, from the scores; words of this check begin at `first`.

        Codes are made again as in the fast path, but for a row whose b or f is too large. It takes them from its
        largest score t here: v = relu((S - t) * c * (f / c) + its place), with c = 1, or 2^15 where f needs it.
        """
        shift, rescale, guard, _, offset = state
        count = self.cfg.check_keys // 8  # words of a row
        guard[0] = Int32(GUARD_SET)
        for r in cutlass.range_constexpr(2):
            unit = q_scale[r] * k_scale + Float32(HALF_SMALLEST_FACTOR)
            rounded = low_half(both(unit))
            wide = rounded == Float32.inf
            factor = unit if wide else rounded
            most = words[first + r]
            for i in cutlass.range_constexpr(1, count):
                most = max_halves(most, words[first + 2 * i + r])
            score = row_max(cute.arch.fmax(low_half(most), high_half(most), nan=True), nan=True)
            top = score * factor + shift[r]  # NaN: the row ends as NaN
            unset = shift[r] == Float32(HALF_UNSET_SHIFT)
            seen = score != -Float32.inf
            fits = low_half(both(top)) <= Float32(CODE_MAX)  # not for NaN
            octaves = self.integral((top - Float32(HALF_BIAS)) * Float32(0.125))
            first_octaves = octaves + Float32(FIRST_ABOVE) if seen else Float32(0.0)
            later_octaves = Float32(0.0) if fits else octaves
            octaves = first_octaves if unset else later_octaves
            factor_o = cute.math.exp2(-later_octaves, fastmath=True)
            rescale[r] = rescale[r] if unset else rescale[r] * factor_o
            fall = octaves * Float32(8.0)
            old = Float32(HALF_BIAS) if unset else shift[r]
            moved = old - fall
            shift[r] = moved if seen else shift[r]
            far = cute.arch.fmax(moved, -moved) > Float32(HALF_SHIFT_MAX)
            guard[0] = Int32(GUARD_UNSET) if far or (unset and not seen) else guard[0]
            offset[r] = both(shift[r])
            apart = far or wide
            huge = cute.arch.fmax(octaves, -octaves) >= Float32(ROUND_LIMIT)
            place = Float32(HALF_BIAS) if huge else top - fall
            anchor = score if apart and seen else Float32(0.0)
            spread = Float32(HALF_WIDE) if wide else Float32(1.0)
            narrow = cute.arch.fmin(factor * Float32(1.0 / HALF_WIDE), Float32(HALF_MAX)) if wide else rounded
            less, times, f, b = both(-anchor), both(spread), both(narrow), offset[r]
            b = both(place) if apart else b
            for i in cutlass.range_constexpr(count):
                s = product(sum_halves(words[first + 2 * i + r], less), times)
                pairs[first_pair + 2 * i + r] = whole(fma_relu(s, f, b))
            # codes before: an unset row has seen no key in them, so they are zero
            drop = Uint32(cutlass.min(cute.arch.fmax(octaves, Float32(0.0)) * Float32(8.0), Float32(1024.0)))
            drop = drop | (drop << 16)
            for i in cutlass.range_constexpr(0, first_pair, 2):
                pairs[i + r] = max_pair(pairs[i + r], drop + Uint32(THOUSANDS)) - drop
