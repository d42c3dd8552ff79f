"""What configurations of all kernels share: limits of the GPUs, the forms of stored tensors, constants, names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .forward import _Forward
    from .mma_sync import Fwd16Sm80Config

SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA may use on sm_90 (227 KiB)
REGISTERS_PER_SM = 65_536
WARPGROUP = 128  # threads

HEAD_DIMS = tuple(range(32, 257, 16))  # of Q and K, and of V, each by itself
HEAD_DIMS_16BIT = tuple(range(32, 257, 8))  # likewise

K_SCALE_GROUP = 64  # keys that share one K scale in storage
K_SCALE_PAD = 4  # a row of K scales is readable to a multiple of this: one vector load for any tile
V_SCALE_GROUP = 256  # keys that share one V scale; a power of two
V_KEY_PERMUTATION = 16  # V^T holds keys permuted inside groups of this many
SUM_ROWS = 8  # extra rows of the V^T tile: a row of ones yields the row sum of P; 8 is the WGMMA granule
QUANTIZE_SPAN = 512  # rows of Q or K of one CTA of the quantiser at most
QUANTIZE_SPANS_LIMIT = 65_535  # of the quantiser's grid
QUANTIZE_ROWS_LIMIT = QUANTIZE_SPANS_LIMIT * QUANTIZE_SPAN  # rows of a sequence that its grid covers

# The mean key is summed in this order, see `cute_attn.quantize.mean_key`.
MEAN_STRIDE = 16  # one key of this many is a sample
MEAN_LANES = 16  # samples of a chunk that are summed side by side
MEAN_UNROLL = 4  # samples of a lane that are in flight together; a chunk is a multiple of both
MEAN_CHUNKS = 16  # chunks at most
MEAN_SPAN = MEAN_STRIDE * MEAN_LANES * MEAN_UNROLL  # keys of a chunk at least

# Numbers of the arithmetic, shared by the kernels and their references in torch; docs/numerics.md says why.
E4M3_MAX = 448.0
INT8_MAX = 127.0
# Largest codes of Q and K in e4m3 where a float16 holds their products: max(Q) max(K) head_dim < 65504. Powers of two
# below 448, so that only codes that become subnormal differ.
NARROW_MAX = {64: (28.0, 28.0), 128: (28.0, 14.0), 256: (14.0, 14.0)}
# A group of a smaller amax is quantised as if it had this one: QMAX / amax stays finite.
SMALLEST_AMAX = 2.0**-100
# P is held times 2^lift, which the row sum cancels. e4m3 ends at 2^8.8 and has no normal numbers below 2^-6: a high
# lift keeps small P, a low one lets the reference lag the row maximum. By code the lag may be 1.8 octaves.
LIFT = {"code": 7.0, "half": 7.0, "ex2": 8.0, "cast": 0.0}
# One code in the numbers that P by code computes with: the last bit of a subnormal half.
CODE_UNIT = 2.0**-24
# 55.65625 = 56 - 0.34375 centres the rounding of the bent fraction; as a multiple of 2^-5 it is exact beside 8 m.
CODE_BIAS = 8.0 * LIFT["code"] + 55.65625
# A row's first reference is an octave above what its first keys ask for. Of later keys many are a little larger: with
# like scores one row in 50 outgrew it every 64 keys, and a warp has 16.
FIRST_ABOVE = 1.0
CODE_MAX = 126.5  # what rounds to 126 = 448; 127 is e4m3's NaN
# log of the mean of (rounded P) / P over a period of the code map; lse subtracts it. A test derives it.
CODE_LSE_BIAS = 0.009782217323564284
UNSET_SHIFT = (CODE_BIAS + 2.0**-10) * CODE_UNIT  # of a row without a reference: no integral one gives it
# References of this magnitude or more stay as they are: adding 1.5 * 2^23 rounds no more.
ROUND_LIMIT = 2.0**22
# The same of P by code from scores in float16. What is added to a code is a multiple of 8, which a half holds up to
# HALF_SHIFT_MAX, so the bias is one, too; lse knows what that does to the sum of P.
HALF_BIAS = 8.0 * LIFT["code"] + 56.0
HALF_LSE_BIAS = CODE_LSE_BIAS + (HALF_BIAS - CODE_BIAS) / 8.0 * math.log(2.0)
HALF_UNSET_SHIFT = HALF_BIAS + 1.0
HALF_SHIFT_MAX = 16384.0
HALF_SMALLEST_FACTOR = 2.0**-24
HALF_MAX = 65504.0  # largest float16
HALF_WIDE = (
    32768.0  # a unit of scores that float16 does not hold is taken in two factors, of which this is one
)
SMALLEST_FACTOR = 2.0**-126  # of a score: zero would make NaN of a masked one


def narrow_max(head_dim: int) -> tuple[float, float]:
    """Largest e4m3 codes of Q and of K, see NARROW_MAX."""
    return next(found for most, found in NARROW_MAX.items() if head_dim <= most)


def dims_name(head_dim: int, head_dim_v: int) -> str:
    """How names of kernels give the head dimensions."""
    return f"d{head_dim}" + ("" if head_dim_v == head_dim else f"v{head_dim_v}")


def rotation_block(head_dim: int) -> int:
    """Columns that the rotation mixes: the largest power of two that divides head_dim (96: 32; 192: 64)."""
    return head_dim & -head_dim


def swizzle_columns(columns: int, element_bytes: int) -> int:
    """Columns of a swizzle row in shared memory: the most of 128, 64 or 32 bytes that divides a row of the tile."""
    row = columns * element_bytes
    return next(width for width in (128, 64, 32, 16) if row % width == 0) // element_bytes


def features_name(config: _Forward | Fwd16Sm80Config) -> str:
    """How names of forward kernels give the mask and what else is done to scores."""
    mask = "causal" if config.causal else "window" if config.window else "full"
    return mask + "".join(
        f"_{name}" for name in ("softcap", "alibi", "sinks", "varlen") if getattr(config, name)
    )


def padded_columns(columns: int) -> int:
    """Columns of a row in shared memory: whole swizzle rows of 64 bytes."""
    return -(-columns // 32) * 32


def line_columns(columns: int) -> int:
    """Columns of a swizzle row of such a tile for ldmatrix: 64, or 32 where that does not divide its rows."""
    return 64 if padded_columns(columns) % 64 == 0 else 32


BARRIER_BYTES: Final = 240  # of shared memory, at most, in front of all else: barriers, and where tiles are


def aligned_bytes(*parts: int, words: int = 0, barriers: int = BARRIER_BYTES) -> int:
    """Bytes of tiles in shared memory, behind `barriers` bytes and `words` of 4 bytes; swizzle atoms repeat every 1 KiB
    at most."""
    return sum(-(-part // 1024) * 1024 for part in (barriers + 4 * words, *parts))


@dataclass(frozen=True)
class Multiprocessor:
    """What CTAs of an architecture share."""

    smem_bytes: int  # shared memory of an SM, of which each CTA costs 1 KiB beside its own
    cta_smem_bytes: int  # that one CTA may use


# Those with mma.sync of 16 bits whose shared memory the FlashAttention-2 kernels' tiles are made for.
SM80_ARCHS = {
    "sm_80": Multiprocessor(164 << 10, 163 << 10),
    "sm_86": Multiprocessor(100 << 10, 99 << 10),
    "sm_87": Multiprocessor(164 << 10, 163 << 10),
    "sm_89": Multiprocessor(100 << 10, 99 << 10),
    "sm_90a": Multiprocessor(228 << 10, SMEM_LIMIT),
    "sm_120": Multiprocessor(100 << 10, 99 << 10),  # also serves 12.1
}


def target_name(arch: str) -> str:
    """How names of these kernels give what they are compiled for."""
    return "sm80" if arch == "sm_80" else f"sm80_on_{arch.replace('_', '').removesuffix('a')}"
