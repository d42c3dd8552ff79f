"""Softmax of the 8-bit Hopper forward: accumulators of S -> P, row references, rescale factors.

policy_fp8.py has the formulas, the meaning of their symbols and the layout of an accumulator.

P by code (`softmax_code`). An e4m3 byte, read as a number, is 8 * (log2(value) + 7) with a bent fraction (mantissa
steps are linear in the value, not in its log). So round(8 * (y + lift) + 55.65625), clamped at 0, is the code of P:
no exp2, no division. One FMA computes that number times 2^-24; cvt.rn.relu.f16x2 then rounds it, for the bits of a
subnormal half are the integer (and the bits go on counting to 2047), and relu is the clamp. m need not be the
maximum of this tile, only such that no code passes 126 (448, e4m3's largest): the codes are computed with the
reference of the tiles before, and one maximum over packed pairs tells whether a row has outgrown it. That is rare;
then, and for a row's first keys, a slow path moves the reference. The maximum over every element, its shuffles, and
the wait for them disappear from the common path (FlashAttention-4 skips only the rescale).

P by exp2 (`softmax_ex2`), as in the papers: row maximum of every tile, exp2, conversion; "cast" is the same without
the lift, the naive way.

With softcap or ALiBi (`adjust`) S is made a score before the mask, and s is 1 in those formulas. Softcap:

    S <- softcap * log2(e) * tanh(x)      x = (S_ij * q_scale_i * k_scale_g + q_i . mean key) * softmax_scale / softcap

for which the kernel's `softmax_scale_log2` is softcap * log2(e) and its `softcap_factor`, on the way to e^2x,
2 * log2(e) * softmax_scale / softcap. Smoothed keys lack the share of the mean key. Without softcap it is the same for
all keys of a row, so only lse wants it, and sinks, which are compared with whole scores. ALiBi subtracts
slope * |distance| * log2(e). A sink is one more score of its row, whose P counts in l alone.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.floats import product_rn
from ..common.mask import ROW_STEP
from ..common.scores import rows, subtract_distance, tanh_of
from ..config import (
    CODE_BIAS,
    CODE_LSE_BIAS,
    CODE_MAX,
    CODE_UNIT,
    FIRST_ABOVE,
    K_SCALE_GROUP,
    LIFT,
    ROUND_LIMIT,
    SMALLEST_FACTOR,
    UNSET_SHIFT,
    FwdConfig,
)
from .operands import row_max

F8 = cutlass.Float8E4M3FN

ROUND_MAGIC = 12582912.0  # 1.5 * 2^23: added and subtracted, it rounds to an integer below ROUND_LIMIT
GUARD_SET = 0x7F817F81  # added to a pair of codes, carries into a half's top bit iff its code is above 126
GUARD_UNSET = -0x7FFF8000  # 0x80008000: always
GUARD_BITS = -0x7FFF8000


@cute.jit
def code_pair(a: Float32, b: Float32) -> Uint32:
    """Two scaled codes (times 2^-24) -> two integers in the halves of a register; negative -> 0, NaN -> 0x7fff."""
    return cute.arch.inline_ptx(
        "cvt.rn.relu.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[a, b]
    )


@cute.jit
def max_pair(a: Uint32, b: Uint32) -> Uint32:
    """Maximum of each half; ptxas joins two of them into one instruction."""
    return cute.arch.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


@cute.jit
def code_word(low: Uint32, high: Uint32) -> Uint32:
    """Two pairs of codes -> four bytes."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x6420;", write_only_types=[Uint32], read_only_args=[low, high]
    )


class Fp8Softmax:
    """Softmax of one configuration; methods are traced into the kernel."""

    def __init__(self, cfg: FwdConfig):
        self.cfg = cfg
        self.part_keys = cfg.tile_n // cfg.qk_splits
        self.code = cfg.by_code
        self.lift = LIFT[cfg.p_rounding]
        self.lse_bias = CODE_LSE_BIAS if self.code else 0.0
        # what the softmax wants folded into q_scale besides softmax_scale * log2(e)
        self.score_unit = 8.0 * CODE_UNIT if self.code else 1.0

    def new_pairs(self) -> cute.Tensor:
        """Codes of one tile, two in a register (not used by exp2)."""
        return cute.make_rmem_tensor(self.cfg.tile_n // 4, Uint32)

    def new_state(self):
        """State of a work tile: (reference (2,), rescale (2,), guard (1,), V scale that O is in units of (1,)).

        By exp2, `reference` is the reference itself, -inf before any visible key. By code it is what the FMA adds,
        (CODE_BIAS - 8 reference) * 2^-24, or UNSET_SHIFT: one register a row for both.
        """
        reference = cute.make_rmem_tensor(2, Float32)
        rescale = cute.make_rmem_tensor(2, Float32)
        guard = cute.make_rmem_tensor(1, Int32)
        reference.fill(UNSET_SHIFT if self.code else -Float32.inf)
        rescale.fill(1.0)
        guard.fill(GUARD_UNSET)
        return reference, rescale, guard, cute.make_rmem_tensor(1, Float32)

    @cute.jit
    def octaves_of(self, reference: Float32) -> Float32:
        """m of what the state holds, by code."""
        return (Float32(CODE_BIAS) - reference * Float32(1.0 / CODE_UNIT)) * Float32(0.125)

    @cute.jit
    def adjust(
        self, part: cutlass.Constexpr, acc: cute.Tensor, n: Int32, k_scale: cute.Tensor, inputs, limits
    ):
        """With softcap or ALiBi: accumulator of one part of key tile n -> scores in the unit of the softmax, in place.

        k_scale  (tile_n / 64,);  inputs  of `tile_inputs`;  limits  see `first_hidden_key`
        """
        q_scale = inputs[0]
        s = rows(acc)
        per_group = K_SCALE_GROUP // 4  # columns of a K scale group in one thread
        groups = self.part_keys // K_SCALE_GROUP
        for r in cutlass.range_constexpr(2):
            for g in cutlass.range_constexpr(groups):
                factor = q_scale[r] * k_scale[part * groups + g]
                for i in cutlass.range_constexpr(g * per_group, (g + 1) * per_group):
                    if const_expr(self.cfg.softcap):
                        s[r, i] = product_rn(inputs[5], tanh_of(s[r, i] * factor + inputs[6][r]))
                    else:
                        s[r, i] = s[r, i] * factor
        if const_expr(self.cfg.alibi):
            slope = inputs[len(inputs) - 1]
            column0 = n * self.cfg.tile_n + part * self.part_keys + cute.arch.lane_idx() % 4 * 2
            ahead = (column0 - (limits[0] - 1)).to(Float32)  # of the query of the first row
            step = Float32(ROW_STEP // self.cfg.pack_gqa)
            subtract_distance(s, (slope[0], slope[cute.size(slope) - 1]), (ahead, ahead - step))

    @cute.jit
    def softmax_ex2(self, acc: cute.Tensor, state, q_scale: cute.Tensor, k_scale: cute.Tensor):
        """Scores -> P in place (float32, not yet rounded); updates reference and rescale factor of each row.

        acc      scores of the tile, masked ones -inf
        state    see `new_state`; rescale is set to 2^(old - new reference)
        q_scale  (2,) q_scale * softmax_scale * log2(e);  k_scale (tile_n / 64,)
        """
        reference, rescale, _, _ = state
        s = rows(acc)
        per_group = K_SCALE_GROUP // 4  # columns of a K scale group in one thread
        groups = self.cfg.k_groups
        for r in cutlass.range_constexpr(2):
            tile_max = -Float32.inf
            for g in cutlass.range_constexpr(groups):
                factor = self.factor(q_scale[r], k_scale[g])
                for i in cutlass.range_constexpr(g * per_group, (g + 1) * per_group):
                    if const_expr(not self.cfg.adjusts):  # else `adjust` has done it
                        # not fused with the subtraction below: the largest must meet its own rounding there, or huge
                        # logits miss it by whole octaves
                        s[r, i] = product_rn(s[r, i], factor)
                    tile_max = cute.arch.fmax(tile_max, s[r, i])
            tile_max = self.integral(row_max(tile_max))
            new = cute.arch.fmax(reference[r], tile_max)
            finite = Float32(0.0) if new == -Float32.inf else new
            rescale[r] = cute.math.exp2(reference[r] - finite, fastmath=True)
            reference[r] = new
            for i in cutlass.range_constexpr(groups * per_group):
                s[r, i] = cute.math.exp2((s[r, i] - finite) + Float32(self.lift), fastmath=True)

    @cute.jit
    def factor(self, q_scale: Float32, k_scale: Float32) -> Float32:
        """Score units of a K scale group in a row; never 0, NaN stays."""
        return cute.arch.fmax(q_scale * k_scale, Float32(SMALLEST_FACTOR), nan=True)

    @cute.jit
    def integral(self, x: Float32) -> Float32:
        """x rounded to an integer; as it is beyond 2^22, and for NaN and infinities."""
        rounded = (x + Float32(ROUND_MAGIC)) - Float32(ROUND_MAGIC)
        return rounded if cute.arch.fmax(x, -x) < Float32(ROUND_LIMIT) else x

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
        """Scores -> codes of P, two in a register; moves a row's reference only where it must.

        acc      scores of one part of the tile, masked ones -inf; overwritten
        pairs    (tile_n / 4,) out: codes in the order of the accumulator, the row of pair i is i % 2
        state    see `new_state`; rescale is set to 2^(old - new reference) over the parts of a tile
        q_scale  (2,) q_scale * softmax_scale * log2(e) * 8 * 2^-24;  k_scale (tile_n / 64,)
        """
        shift, rescale, guard, _ = state
        s = rows(acc)
        columns = self.cfg.check_keys // 4  # columns of a check in one thread
        if const_expr(part == 0):
            for r in cutlass.range_constexpr(2):
                rescale[r] = Float32(1.0)
        for c in cutlass.range_constexpr(self.part_keys // self.cfg.check_keys):
            keys_before = part * self.part_keys + c * self.cfg.check_keys
            for r in cutlass.range_constexpr(2):
                factor = self.factor(q_scale[r], k_scale[keys_before // K_SCALE_GROUP])
                offset = shift[r]
                for i in cutlass.range_constexpr(c * columns, (c + 1) * columns):
                    if const_expr(self.cfg.adjusts):
                        s[r, i] = s[r, i] + offset  # `adjust` has multiplied
                    else:
                        s[r, i] = s[r, i] * factor + offset
            top = self.pack_columns(c * columns, keys_before // 4, s, pairs)
            over = ((top + Uint32(guard[0])) & Uint32(GUARD_BITS & 0xFFFFFFFF)) != Uint32(0)
            if cute.arch.vote_any_sync(over):
                self.move_reference(c * columns, keys_before // 4, s, pairs, state)

    @cute.jit
    def pack_columns(
        self, first: cutlass.Constexpr, first_pair: cutlass.Constexpr, s: cute.Tensor, pairs: cute.Tensor
    ) -> Uint32:
        """Codes of the columns of one check; returns the pairwise maximum over both rows."""
        top = None
        for i in cutlass.range_constexpr(0, self.cfg.check_keys // 4, 2):
            for r in cutlass.range_constexpr(2):
                pair = code_pair(s[r, first + i], s[r, first + i + 1])
                pairs[first_pair + i + r] = pair
                top = pair if const_expr(top is None) else max_pair(top, pair)
        return top

    @cute.jit
    def move_reference(
        self,
        first: cutlass.Constexpr,
        first_pair: cutlass.Constexpr,
        s: cute.Tensor,
        pairs: cute.Tensor,
        state,
    ):
        """Slow path of `softmax_code`, for a whole warp: new references where a row needs one.

        A row needs one if it has none and now sees a key, or if a code passes 126. Its codes of this check (columns
        from `first` on) are computed again; those before them in the tile fall by the same whole octaves, exactly.
        """
        shift, rescale, guard, _ = state
        columns = self.cfg.check_keys // 4
        guard[0] = Int32(GUARD_SET)
        for r in cutlass.range_constexpr(2):
            top = s[r, first]
            for i in cutlass.range_constexpr(first + 1, first + columns):
                top = cute.arch.fmax(top, s[r, i], nan=True)
            top = row_max(top, nan=True)  # NaN: the row ends as NaN
            unset = shift[r] == Float32(UNSET_SHIFT)
            seen = top != -Float32.inf
            excess = (top * Float32(1.0 / CODE_UNIT) - Float32(CODE_BIAS)) * Float32(0.125)  # octaves
            octaves = self.integral(excess)
            fits = top <= Float32(CODE_MAX * CODE_UNIT)  # not for NaN
            if unset:
                octaves = octaves + Float32(FIRST_ABOVE) if seen else Float32(0.0)
            else:
                octaves = Float32(0.0) if fits else octaves
                rescale[r] = rescale[r] * cute.math.exp2(-octaves, fastmath=True)
            fall = octaves * Float32(8.0 * CODE_UNIT)
            if unset and not seen:
                guard[0] = Int32(GUARD_UNSET)
            else:
                old = Float32(CODE_BIAS * CODE_UNIT) if unset else shift[r]
                shift[r] = old - fall
            # relative to the largest, whose own place must not depend on how huge it is
            anchor = top if seen else Float32(0.0)
            huge = cute.arch.fmax(octaves, -octaves) >= Float32(ROUND_LIMIT)
            place = Float32(CODE_BIAS * CODE_UNIT) if huge else anchor - fall
            for i in cutlass.range_constexpr(first, first + columns):
                s[r, i] = (s[r, i] - anchor) + place
            # codes before: an unset row has seen no key in them, so they are zero
            drop = Uint32(cutlass.min(cute.arch.fmax(octaves, Float32(0.0)) * Float32(8.0), Float32(32767.0)))
            drop = drop | (drop << 16)
            for i in cutlass.range_constexpr(0, first_pair, 2):
                pairs[i + r] = max_pair(pairs[i + r], drop) - drop
        self.pack_columns(first, first_pair, s, pairs)

    @cute.jit
    def softmax(
        self,
        part: cutlass.Constexpr,
        acc: cute.Tensor,
        pairs: cute.Tensor,
        state,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
    ):
        """The configured softmax of one part of a tile; `pack` then makes the A operand of P V."""
        if const_expr(self.code):
            self.softmax_code(part, acc, pairs, state, q_scale, k_scale)
        else:
            self.softmax_ex2(acc, state, q_scale, k_scale)

    @cute.jit
    def pack(self, acc: cute.Tensor, pairs: cute.Tensor, p: cute.Tensor):
        """Write P's e4m3 bytes; call it only when no WGMMA that reads `p` is in flight (else C7513 serialises)."""
        if const_expr(self.code):
            words = cute.recast_tensor(p, Uint32)
            for w in cutlass.range_constexpr(cute.size(words)):
                first = 8 * (w // 4) + 4 * (w // 2 % 2) + w % 2  # register w of the A operand: row w % 2
                words[w] = code_word(pairs[first], pairs[first + 2])
        else:
            layout = cute.make_layout(
                (((2, 2), 2, 2), 1, p.shape[2]), stride=(((1, 4), 2, 8), 0, 16)
            )  # the accumulator's values in the order of the A operand's bytes
            p.store(cute.make_tensor(acc.iterator, layout).load().to(F8))
