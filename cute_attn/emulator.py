"""Emulation of the 8-bit forward kernel in torch, rounding by rounding.

It runs the kernel's tile loop (online softmax, FlashAttention-2, arXiv 2307.08691, Algorithm 1) on the
kernel's quantised inputs, with the kernel's roundings of P, its two-level accumulation (SageAttention2, arXiv
2411.10958) and its row sums. It is the backend where there is no Hopper GPU and the second
oracle of the kernel's tests.

Arithmetic of one row, float32 unless said, tiles of `tile_n` keys visited from the last one needed to the
first. One code, the distance of two e4m3 bytes, is an eighth of an octave; `code` counts in U = 2^-24 codes:

    scale  = q_scale * float32(softmax_scale * log2 e)              code: times 8 U
    f_g    = max(scale * k_scale_g, 2^-126)                         g: group of 64 keys
    S      = dot of the codes, -inf where masked
    ex2:   x = S * f_g ;  m_tile = max x, rounded to an integer if |m_tile| < 2^22
    cast   m = max(m_old, m_tile) ;  corr = 2^(m_old - m), 0 if m_old = -inf ;  -inf counts as 0 from here
           P = e4m3(exp2((x - m) + lift))                           lift: 8 (ex2) or 0 (cast)
    code:  for each `check_keys` keys of the tile, lowest first, with the shift that those before have left
           z     = fma(S, f_g, shift) ;  top = max z                shift = (CODE_BIAS - 8 m) U
           the row moves if top > 126.5 U, or if it has no m yet (its shift is then that of m = 0 and 2^-10 U,
           which no m gives) and sees a key here:
               octaves = (top / U - CODE_BIAS) / 8, rounded to an integer if |octaves| < 2^22, 1 more at the row's
                         first keys
               m      += octaves ;  corr = 2^-octaves, 1 at the row's first keys
               z       = (z - top) + place                          place = top - 8 U octaves,
                                                                    or CODE_BIAS U if |octaves| >= 2^22
               codes of the tile's keys before fall by 8 octaves, to 0 at least
           P     = e4m3 byte round(max(z, 0) / U)                   ties to even
    O      = O * (corr * (v_previous / v)) + P V                    v: scale of the tile's group of 256 keys
    l      = l * corr + sum P                                       of the same rounded P
    out    = O * (v / l)
    lse    = (m + log2 l - lift) ln 2 - CODE_LSE_BIAS (code; half: HALF_) + softmax_scale * q_dot_mean

With `Fp8Recipe.half_scores` (and neither softcap nor ALiBi) S is summed in float16, and `code` counts in codes:

    f_g    = float16(fma(scale * 8, k_scale_g, 2^-24)) ;  the float32 itself where that is infinite
    half:  as code, with U = 1 and the bias HALF_BIAS ;  v = float16(max(fma(S, f_g, shift), 0)), P = round(v)
           top = fma(max S, f_g, shift) ;  the row moves if float16(top) > 126.5
           where |shift| > 16384 or f_g is that float32, codes are taken from the largest:
           place = float16(top - 8 octaves)
           v = float16(max(fma((S - max S) * c, float16(f_g / c), place), 0))       c: 2^15 if f_g is large, else 1

With softcap or ALiBi S is first made a score in octaves (code: times 8 U), and then f_g is 1:

    softcap  x = fma(S, q_scale * a * k_scale_g, q_dot_mean * a)    a: 2 log2 e * softmax_scale / softcap
             S = softcap * log2 e * (1 - 2 / (1 + exp2(x)))         lse then adds no q_dot_mean
    ALiBi    S = S - slope * log2 e * |key position - query position|

A sink is a score whose P counts in l alone, at the end: l + 2^(sink * log2 e - m + lift), times e^CODE_LSE_BIAS by
code, as the sum of rounded P is, and less the softmax_scale * q_dot_mean that the scores lack. A softmax_scale <= 0 is
taken into Q (`with_positive_scale`).

P is held times 2^lift. Lifted by 8 its largest value is below e4m3's 448 and the smallest that does not
become 0 is about 2^-18 of the largest. Lifted by 7 it leaves m room to lag the row's maximum by 1.8 octaves,
and the smallest is about 2^-13 to 2^-16. Not lifted (the naive way), P below 2^-10 is lost and P below 2^-6
is rounded as a subnormal.

A row that sees no key has output 0 and lse -inf. One that sees keys and has l = 0 has left float32's range:
NaN.

What it does not reproduce:

- The order of sums inside a matmul, the fixed-point alignment of the tensor core unless asked
  (`accumulator`), and the last bits of the hardware's exp2, log2 and reciprocals.
- A row that stays while another row of its warp moves: the kernel computes (z - top) + top for it, which
  differs from z by at most 2^-17 codes where it matters, so only next to a tie.

Huge logits. Keys of one tile (code: of one check) go through the same roundings, so equal keys of one scale
have equal P, whatever their size. Between tiles (checks) float32's step counts: a logit of 2^e octaves is
rounded by up to 2^(e-24) octaves, by code the shift too. So the relative weights of keys in different tiles
(checks) are those of the logits up to about 2^21 octaves, and are not guaranteed beyond. lse then still has
a relative error of about 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn.kernels.config import (
    CODE_BIAS,
    CODE_LSE_BIAS,
    CODE_MAX,
    CODE_UNIT,
    FIRST_ABOVE,
    HALF_BIAS,
    HALF_LSE_BIAS,
    HALF_MAX,
    HALF_SHIFT_MAX,
    HALF_SMALLEST_FACTOR,
    HALF_UNSET_SHIFT,
    HALF_WIDE,
    LIFT,
    ROUND_LIMIT,
    SMALLEST_FACTOR,
    UNSET_SHIFT,
)
from cute_attn.quantize import K_GROUP, V_BLOCK, QuantizedQKV, to_e4m3, unpermute_v, with_positive_scale
from cute_attn.tiles import rounding_of

__all__ = ["emulate_forward", "p_code"]

_LOG2_E: Final = math.log2(math.e)
_SLICE: Final = 32  # k extent of one 8-bit tensor-core instruction
_ALIGNED_BITS: Final = 13  # fraction bits that survive alignment in Hopper's FP8 accumulator

# Elements of the largest temporary of one tile step; bounds the memory and keeps CPU caches useful.
_CPU_BUDGET: Final = 1 << 20
_CUDA_BUDGET: Final = 1 << 26


def p_code(z: Tensor) -> Tensor:
    """The e4m3 byte of 2^7 P from z = 8 log2 P + CODE_BIAS, without exp2.

    An e4m3 byte is nearly a fixed-point base-2 logarithm, three bits of it fraction: 1 + f stands for 2^f.

    Args:
        z: float32, any shape, at most CODE_MAX (the reference sees to that).

    Returns:
        uint8 of that shape: max(z, 0) rounded to the nearest integer, ties to even; 0x7f (NaN) where z is
        NaN. Beyond CODE_MAX it is 126, where the kernel's byte would go on counting.
    """
    rounded = z.clamp(min=0.0).round().clamp_(max=126.0)
    return rounded.nan_to_num_(nan=127.0).to(torch.uint8)


@contextmanager
def _true_float32_matmul() -> Iterator[None]:
    """Turns TF32 and bf16 shortcuts of float32 matmuls off, and back to what they were."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _hopper_matmul(a: Tensor, b: Tensor, acc: Tensor | None = None, half: bool = False) -> Tensor:
    """acc + a @ b as Hopper's FP8 tensor core is observed to sum, float32, or float16 after each slice.

    For each slice of 32, the products and the running accumulator are aligned to the largest exponent among
    them, cut toward zero 13 bits below it, and summed exactly.

    Args:
        a: (..., m, k) and b: (..., k, n), float32 values of e4m3 codes (their products are exact).
        acc: (..., m, n) float32, default 0.
    """
    if acc is None:
        acc = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for start in range(0, a.shape[-1], _SLICE):
        products = a[..., start : start + _SLICE].unsqueeze(-1) * b[..., start : start + _SLICE, :].unsqueeze(
            -3
        )
        largest = torch.maximum(products.abs().amax(dim=-2), acc.abs())
        # Biased exponent of the largest; the floor only keeps the powers of two below representable.
        exponent = (largest.view(torch.int32) >> 23).clamp_(min=27, max=254)
        to_unit = ((254 + _ALIGNED_BITS - exponent) << 23).view(torch.float32)  # 2^(13 - emax)
        from_unit = ((exponent - _ALIGNED_BITS) << 23).view(torch.float32)
        total = (products * to_unit.unsqueeze(-2)).trunc_().sum(dim=-2)
        acc = (total + (acc * to_unit).trunc_()) * from_unit
        if half:
            acc = acc.half().float()
    return acc


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 a * b + c, rounded once: a float64 product of float32 values is exact."""
    return torch.addcmul(c.double(), a.double(), b.double()).float()


def emulate_forward(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    pack_gqa: int = 1,
    check_keys: int = 64,
    out_dtype: torch.dtype | None = None,
    two_level: bool = True,
    accumulator: Literal["fp32", "hopper"] = "fp32",
    row_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention forward with the kernel's arithmetic, on CPU or CUDA tensors of any compute capability.

    Memory beyond inputs and outputs is bounded by a fixed budget of one tile step, whatever the lengths.

    Args:
        qkv: quantised inputs.
        causal: key j is visible to query i iff j <= i + seqlen_k - seqlen_q.
        softmax_scale: finite; default 1/sqrt(head_dim).
        window: (left, right): keys before and behind a query's own position i + seqlen_k - seqlen_q that it sees; -1
            for all. With `causal` right is 0.
        softcap: > 0: a score becomes softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: (batch, heads_q) float32: slope * |key position - query position| is subtracted from a score.
        sinks: (heads_q,) float32: one more logit for each row of a head, which has no value.
        tile_m: rows of queries that share a loop over key tiles. Changes results only where a tile that some
            row of the block needs holds NaN or infinity in keys that another row must not see: that one is
            NaN too.
        tile_n: keys of one tile: 64, 128 or 256.
        pack_gqa: how many query heads of a key head share the tile_m rows of a tile, a divisor of them: as
            the mask is that of the query alone, it is tile_m / pack_gqa queries that share a loop.
        check_keys: keys after which P by code is checked for overflow: 32 or 64.
        out_dtype: default `qkv.dtype`.
        two_level: a fresh accumulator for each tile, added to O in float32. False keeps one accumulator
            across all tiles, to show what that does together with `accumulator="hopper"`; row sums are then
            float32.
        accumulator: how a matmul sums. "fp32": float32. "hopper": a model of the reduced-precision
            accumulator of Hopper's FP8 instructions, for both matmuls of e4m3 operands (int8 sums are exact);
            slow.
        row_chunk: query rows of one pass; default from the memory budget. The arithmetic of a row is the
            same.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) of `out_dtype`, and lse (batch, heads_q, seqlen_q) float32,
        natural log. A row that sees no key has output 0, and lse -inf or its sink. A row that depends on a non-finite
        scale group, or whose logits leave float32, is NaN.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    batch, seqlen_q, heads_q, head_dim = qkv.q.shape
    heads_k, seqlen_k = qkv.k.shape[2], qkv.seqlen_k
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim)
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale is {softmax_scale}; allowed: finite")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap is {softcap}; allowed: finite and >= 0")
    if min(window) < -1:
        raise ValueError(f"window is {window}; allowed: ends >= 0, or -1 for none")
    if tile_n not in (64, 128, 256):
        raise ValueError(f"tile_n is {tile_n}; allowed: 64, 128, 256")
    if check_keys not in (32, 64):
        raise ValueError(f"check_keys is {check_keys}; allowed: 32, 64")
    group = heads_q // heads_k
    if pack_gqa < 1 or group % pack_gqa:
        raise ValueError(
            f"pack_gqa is {pack_gqa}; allowed: a divisor of the query heads of a key head, {group}"
        )
    if tile_m < 1 or tile_m % pack_gqa:
        raise ValueError(f"tile_m is {tile_m}; allowed: a multiple of pack_gqa, {pack_gqa}")
    if accumulator not in ("fp32", "hopper"):
        raise ValueError(f"accumulator is {accumulator!r}; allowed: 'fp32', 'hopper'")
    if row_chunk is not None and row_chunk < 1:
        raise ValueError(f"row_chunk is {row_chunk}; allowed: at least 1")

    device = qkv.q.device
    head_dim_v = qkv.vt.shape[2]
    tile_queries = tile_m // pack_gqa
    out = torch.zeros(batch, seqlen_q, heads_q, head_dim_v, dtype=out_dtype or qkv.dtype, device=device)
    lse = torch.full((batch, heads_q, seqlen_q), -math.inf, dtype=torch.float32, device=device)
    if sinks is not None:
        lse = sinks.view(1, heads_q, 1).expand_as(lse).clone()
    if out.numel() == 0 or seqlen_k == 0:
        return out, lse

    qkv, softmax_scale = with_positive_scale(qkv, softmax_scale)
    rounding = rounding_of(qkv.recipe, softcap > 0 or alibi_slopes is not None)
    left, right = window[0], 0 if causal else window[1]
    budget = _CPU_BUDGET if device.type == "cpu" else _CUDA_BUDGET
    row_cost = group * (tile_n if accumulator == "fp32" else _SLICE * max(tile_n, head_dim_v))
    blocks = max(min(budget // (row_cost * tile_queries), -(-seqlen_q // tile_queries)), 1)
    rows = row_chunk or blocks * tile_queries
    heads_step = max(budget // (row_cost * min(rows, seqlen_q)), 1)
    batch_step = max(heads_step // heads_k, 1)
    # Query heads of one kv head side by side: (batch, heads_k, group, seqlen_q, ...), all views.
    q = qkv.q.unflatten(2, (heads_k, group)).permute(0, 2, 3, 1, 4)
    q_scale = qkv.q_scale.unflatten(1, (heads_k, group))
    zeros = torch.zeros(1, dtype=torch.float32, device=device)
    q_dot = qkv.q_dot_mean if qkv.q_dot_mean is not None else zeros.expand(batch, heads_q, seqlen_q)
    q_dot = q_dot.unflatten(1, (heads_k, group))
    slopes = None if alibi_slopes is None else alibi_slopes.unflatten(1, (heads_k, group))
    sinks = None if sinks is None else sinks.expand(batch, heads_q).unflatten(1, (heads_k, group))
    out_view = out.unflatten(2, (heads_k, group)).permute(0, 2, 3, 1, 4)
    lse_view = lse.unflatten(1, (heads_k, group))
    with _true_float32_matmul():
        for b in range(0, batch, batch_step):
            for h in range(0, heads_k, heads_step):
                part = (slice(b, b + batch_step), slice(h, h + heads_step))
                k = qkv.k[part[0], :, part[1]].transpose(1, 2)
                for r in range(0, seqlen_q, rows):
                    some = (*part, slice(None), slice(r, r + rows))
                    out_rows, lse_rows = _attend_rows(
                        q[some],
                        k,
                        qkv.vt[part],
                        q_scale[some],
                        qkv.k_scale[part],
                        qkv.v_scale[part],
                        q_dot[some],
                        None if slopes is None else slopes[part],
                        None if sinks is None else sinks[part],
                        first_row=r,
                        seqlen_q=seqlen_q,
                        seqlen_k=seqlen_k,
                        window=(left, right),
                        softcap=softcap,
                        softmax_scale=softmax_scale,
                        tile_queries=tile_queries,
                        tile_n=tile_n,
                        check_keys=check_keys,
                        p_rounding=rounding,
                        two_level=two_level,
                        hopper=accumulator == "hopper",
                    )
                    out_view[some] = out_rows.to(out.dtype)
                    lse_view[some] = lse_rows
    return out, lse


def _attend_rows(
    q: Tensor,
    k: Tensor,
    vt: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    q_dot: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    first_row: int,
    seqlen_q: int,
    seqlen_k: int,
    window: tuple[int, int],
    softcap: float,
    softmax_scale: float,
    tile_queries: int,
    tile_n: int,
    check_keys: int,
    p_rounding: str,
    two_level: bool,
    hopper: bool,
) -> tuple[Tensor, Tensor]:
    """The tile loop for some rows of some heads.

    Args:
        q: (b, h, group, rows, d) codes of rows `first_row`, `first_row` + 1, ...
        k: (b, h, seqlen_k, d) codes; vt: (b, h, dv, ceil16(seqlen_k)).
        q_scale: (b, h, group, rows); k_scale: (b, h, groups of 64 keys); v_scale: (b, h, groups of 256 keys).
        q_dot: (b, h, group, rows), product with the mean key, 0 where K was not smoothed.
        slopes, sinks: (b, h, group).

    Returns:
        out (b, h, group, rows, dv) and lse (b, h, group, rows), float32.
    """
    batch, heads, group, rows, head_dim = q.shape
    device = q.device
    sums_hopper_qk = hopper and q.dtype != torch.int8
    half = p_rounding == "half"
    by_code = half or p_rounding == "code"
    qf = q.float().reshape(batch, heads, group * rows, head_dim)
    code_unit = 1.0 if half else CODE_UNIT
    unit = 8.0 * code_unit if by_code else 1.0  # of a score, beside octaves
    adjusts = softcap > 0 or slopes is not None
    rate = 2.0 * _LOG2_E * softmax_scale / softcap if softcap else softmax_scale * _LOG2_E
    row_scale = q_scale * torch.tensor(rate, dtype=torch.float32, device=device)
    if not softcap:
        row_scale = row_scale * unit

    # A row sees the keys start <= j < limit; tiles are counted for whole blocks of tile_queries rows.
    left, right = window
    shift = seqlen_k - seqlen_q
    row = torch.arange(first_row, first_row + rows, device=device)
    limit = (row + 1 + shift + right if right >= 0 else torch.full_like(row, seqlen_k)).clamp_(0, seqlen_k)
    begin = (row + shift - left).clamp_(min=0) if left >= 0 else torch.zeros_like(row)
    blocks = range(first_row // tile_queries, (first_row + rows - 1) // tile_queries + 1)
    ends, starts = [], []
    for block in blocks:
        last = min((block + 1) * tile_queries, seqlen_q) - 1
        stop = min(last + 1 + shift + right, seqlen_k) if right >= 0 else seqlen_k
        ends.append(-(-max(stop, 0) // tile_n))
        start = max(block * tile_queries + shift - left, 0) // tile_n if left >= 0 else 0
        starts.append(min(start, max(ends[-1] - 1, 0)))
    of_block = row // tile_queries - blocks[0]
    row_ends, row_starts = (torch.tensor(x, device=device)[of_block] for x in (ends, starts))

    f32 = torch.float32  # by name: torch's default dtype is the caller's
    head_dim_v = vt.shape[2]
    o_acc = torch.zeros(batch, heads, group, rows, head_dim_v, dtype=f32, device=device)
    l_acc = torch.zeros(batch, heads, group, rows, dtype=f32, device=device)
    # code: the shift; else the reference itself
    unset = (HALF_UNSET_SHIFT if half else UNSET_SHIFT) if by_code else -math.inf
    state = torch.full((batch, heads, group, rows), unset, dtype=f32, device=device)
    v_previous = torch.ones(batch, heads, dtype=f32, device=device)

    for tile in range(max(ends) - 1, -1, -1):
        # Ends and starts of later row blocks are not below those of earlier ones: neighbouring rows are at work.
        at_work = [block for block, i, j in zip(blocks, starts, ends, strict=True) if i <= tile < j]
        if not at_work:
            continue
        lo = max(at_work[0] * tile_queries - first_row, 0)
        hi = min((at_work[-1] + 1) * tile_queries - first_row, rows)
        n = hi - lo
        start = tile * tile_n
        stop = min(start + tile_n, seqlen_k)

        k_tile = F.pad(k[:, :, start:stop].float(), (0, 0, 0, start + tile_n - stop))
        v_tile = unpermute_v(vt[..., start : min(start + tile_n, vt.shape[-1])], stop - start)
        v_tile = F.pad(v_tile.float().transpose(1, 2), (0, 0, 0, start + tile_n - stop))
        k_groups = k_scale[..., start // K_GROUP : -(-stop // K_GROUP)]
        k_groups = F.pad(k_groups, (0, tile_n // K_GROUP - k_groups.shape[-1]), value=1.0)

        of_groups = k_groups[:, :, None, None, :]
        factor = row_scale[..., lo:hi, None] * of_groups  # (b, h, group, n, tile_n / 64)

        q_rows = qf if n == rows else qf.unflatten(2, (group, rows))[:, :, :, lo:hi].flatten(2, 3)
        kt = k_tile.transpose(-1, -2)
        scores = _hopper_matmul(q_rows, kt, half=half) if sums_hopper_qk else q_rows @ kt
        if half:
            scores = scores.half().float()
        scores = scores.view(batch, heads, group, n, tile_n)
        key = torch.arange(start, start + tile_n, device=device)
        if adjusts:
            scores, f = scores.unflatten(-1, (-1, K_GROUP)), factor.unsqueeze(-1)
            if softcap:
                x = _fma(scores, f, (q_dot[..., lo:hi] * rate)[..., None, None])
                scores = (1.0 - 2.0 / (1.0 + torch.exp2(x))) * (softcap * _LOG2_E * unit)
            else:
                scores = scores * f
            scores = scores.flatten(-2)
            if slopes is not None:
                distance = (key - (row[lo:hi, None] + shift)).abs().float()
                scores = scores - (slopes * (_LOG2_E * unit))[..., None, None] * distance
            factor = torch.ones_like(factor)
        if half:
            factor = _half_units(row_scale[..., lo:hi, None], of_groups)
        else:
            factor = factor.clamp(min=SMALLEST_FACTOR)  # keeps NaN
        if stop < start + tile_n or left >= 0 or right >= 0:
            hidden = (key >= limit[lo:hi, None]) | (key < begin[lo:hi, None])
            scores = scores.masked_fill(hidden, -math.inf)
        if half:
            p8, moved, corr = _half_codes(scores, factor, state[..., lo:hi], check_keys)
        elif by_code:
            p8, moved, corr = _codes(scores, factor, state[..., lo:hi], check_keys)
        else:
            p8, moved, corr = _exponentials(scores, factor, state[..., lo:hi], LIFT[p_rounding])
        state[..., lo:hi] = moved
        p = p8.float().view(batch, heads, group * n, tile_n)

        v_now = v_scale[..., start // V_BLOCK]
        first_tile = row_ends[lo:hi] == tile + 1
        ratio = torch.where(first_tile, 1.0, (v_previous / v_now)[..., None])  # (b, h, n)
        v_previous = v_now
        o = o_acc[..., lo:hi, :] * (corr * ratio[:, :, None]).unsqueeze(-1)
        row_sum = p.sum(dim=-1)
        if two_level and hopper:  # the row sum is one more column of the product, V's there is 1
            product = _hopper_matmul(p, F.pad(v_tile, (0, 1), value=1.0))
            o, row_sum = o + product[..., :-1].view_as(o), product[..., -1]
        elif two_level:
            o = o + (p @ v_tile).view_as(o)
        elif hopper:
            o = _hopper_matmul(p, v_tile, o.flatten(2, 3)).view_as(o)
        else:
            o_rows = o.view(-1, group * n, head_dim_v)
            o = torch.baddbmm(o_rows, p.flatten(0, 1), v_tile.flatten(0, 1)).view_as(o)
        o_acc[..., lo:hi, :] = o
        l_acc[..., lo:hi] = l_acc[..., lo:hi] * corr + row_sum.view(batch, heads, group, n)

    seen = limit > begin
    v_last = v_scale[..., row_starts * tile_n // V_BLOCK]  # (b, h, rows)
    share = 0.0 if softcap else softmax_scale * q_dot  # of the mean key, which scores lack
    bias = (HALF_LSE_BIAS if half else CODE_LSE_BIAS) if by_code else 0.0
    code_bias = HALF_BIAS if half else CODE_BIAS
    m = ((code_bias - state / code_unit) * 0.125 if by_code else state) - LIFT[p_rounding]
    # A row with keys and l = 0 has left float32's range: NaN instead of a plausible zero.
    l_acc = l_acc.masked_fill(l_acc == 0, math.nan)
    norm = 1.0 / l_acc
    if sinks is not None:
        sink = (sinks.unsqueeze(-1) + bias - share) * _LOG2_E
        top = torch.maximum(m, sink)
        part = torch.exp2(m - top)
        l_acc = l_acc * part + torch.exp2(sink - top)
        m, norm = top, part / l_acc
    out = torch.where(seen[:, None], o_acc * (v_last[:, :, None] * norm).unsqueeze(-1), 0.0)
    lse = (m + l_acc.log2()) * math.log(2.0) - bias + share
    empty = -math.inf if sinks is None else sinks.unsqueeze(-1)
    return out, torch.where(seen, lse, empty)


def _integral(x: Tensor) -> Tensor:
    """x rounded to an integer; as it is from 2^22 on, and for NaN and infinities."""
    return torch.where(x.abs() < ROUND_LIMIT, x.round(), x)


def _exponentials(
    scores: Tensor, factor: Tensor, m_old: Tensor, lift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """P by exp2.

    Args:
        scores: (..., tile_n); factor: (..., tile_n / 64); m_old: (...), -inf before any key.

    Returns:
        e4m3 P (..., tile_n), the new m and the rescale factor.
    """
    x = (scores.unflatten(-1, (-1, K_GROUP)) * factor.unsqueeze(-1)).flatten(-2)
    m_new = torch.maximum(m_old, _integral(x.amax(dim=-1)))
    m = m_new.masked_fill(m_new == -math.inf, 0.0)
    corr = torch.exp2(m_old - m)  # 0 where m_old is -inf
    return to_e4m3(torch.exp2((x - m.unsqueeze(-1)) + lift)), m_new, corr


def _codes(scores: Tensor, factor: Tensor, shift: Tensor, check_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """P by code, whose reference moves only where it must.

    Args:
        scores: (..., tile_n); factor: (..., tile_n / 64).
        shift: (...) what the FMA adds, (CODE_BIAS - 8 m) CODE_UNIT, or UNSET_SHIFT before any key.

    Returns:
        e4m3 P (..., tile_n), the new shift and the rescale factor.
    """
    codes = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    corr = torch.ones_like(shift)
    for first in range(0, scores.shape[-1], check_keys):
        keys = slice(first, first + check_keys)
        f = factor[..., first // K_GROUP, None]
        z = _fma(scores[..., keys], f, shift.unsqueeze(-1))
        top = z.amax(dim=-1)
        unset = shift == UNSET_SHIFT
        moves = torch.where(unset, top != -math.inf, ~(top <= CODE_MAX * CODE_UNIT))  # NaN moves
        if bool(moves.any()):
            octaves = _integral((top / CODE_UNIT - CODE_BIAS) * 0.125) + torch.where(unset, FIRST_ABOVE, 0.0)
            octaves = octaves.masked_fill(~moves, 0.0)
            fall = octaves * (8.0 * CODE_UNIT)
            corr = corr * torch.where(unset, 1.0, torch.exp2(-octaves))
            shift = torch.where(moves, shift.masked_fill(unset, CODE_BIAS * CODE_UNIT) - fall, shift)
            # Relative to the largest key, whose own place must not depend on how huge it is.
            place = torch.where(octaves.abs() >= ROUND_LIMIT, CODE_BIAS * CODE_UNIT, top - fall)
            z = torch.where(moves.unsqueeze(-1), (z - top.unsqueeze(-1)) + place.unsqueeze(-1), z)
            # An unset row has seen no key before: those codes are zero whatever falls.
            drop = (8.0 * octaves).nan_to_num(0.0).clamp(0.0, 255.0).to(torch.uint8).unsqueeze(-1)
            codes[..., :first] = torch.maximum(codes[..., :first], drop) - drop
        codes[..., keys] = p_code(z / CODE_UNIT)
    return codes.view(torch.float8_e4m3fn), shift, corr


def _half_units(row_scale: Tensor, k_scale: Tensor) -> Tensor:
    """Codes of a unit of S, float16 numbers but for those beyond 65504."""
    exact = _fma(row_scale, k_scale, torch.full_like(k_scale, HALF_SMALLEST_FACTOR))
    rounded = exact.half().float()
    return torch.where(rounded == math.inf, exact, rounded)


def _half_codes(
    scores: Tensor, factor: Tensor, shift: Tensor, check_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """P by code from scores in float16; arguments and results are those of `_codes`, in codes.

    factor is that of `_half_units`.
    """
    codes = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    corr = torch.ones_like(shift)
    for first in range(0, scores.shape[-1], check_keys):
        keys = slice(first, first + check_keys)
        s, f = scores[..., keys], factor[..., first // K_GROUP]
        most = s.amax(dim=-1)
        top = _fma(most, f, shift)
        unset, seen = shift == HALF_UNSET_SHIFT, most != -math.inf
        moves = torch.where(unset, seen, ~(top.half() <= CODE_MAX))  # NaN moves
        octaves = _integral((top - HALF_BIAS) * 0.125) + torch.where(unset, FIRST_ABOVE, 0.0)
        octaves = octaves.masked_fill(~moves, 0.0)
        fall = octaves * 8.0
        corr = corr * torch.where(unset, 1.0, torch.exp2(-octaves))
        shift = torch.where(moves, shift.masked_fill(unset, HALF_BIAS) - fall, shift)
        # An unset row has seen no key before: those codes are zero whatever falls.
        drop = (8.0 * octaves).nan_to_num(0.0).clamp(0.0, 255.0).to(torch.uint8).unsqueeze(-1)
        codes[..., :first] = torch.maximum(codes[..., :first], drop) - drop

        wide = f > HALF_MAX  # as a float16 it would be infinite
        apart = (shift.abs() > HALF_SHIFT_MAX) | wide
        v = _fma(s, f.unsqueeze(-1), shift.unsqueeze(-1))
        if bool(apart.any()):
            # Relative to the largest key, whose own place must not depend on how huge it is.
            place = torch.where(octaves.abs() >= ROUND_LIMIT, HALF_BIAS, top - fall).half().float()
            times = torch.where(wide, HALF_WIDE, 1.0)
            narrow = torch.where(wide, (f / HALF_WIDE).clamp(max=HALF_MAX), f).half().float()
            behind = (s - most.masked_fill(~seen, 0.0).unsqueeze(-1)).half()
            behind = (behind.float() * times.unsqueeze(-1)).half().float()
            v = torch.where(apart.unsqueeze(-1), _fma(behind, narrow.unsqueeze(-1), place.unsqueeze(-1)), v)
        codes[..., keys] = p_code(v.half().float())
    return codes.view(torch.float8_e4m3fn), shift, corr
