"""What a kernel is compiled for, as plain data: no CuTe DSL import, so that planning and tests stay light.

A config holds every choice that changes the generated code. Its `name` is unique among configs of its kind
and is what `cute_attn.explain`, the benchmark and the compile cache show.
"""

from __future__ import annotations

from dataclasses import dataclass

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
# A group of a smaller amax is quantised as if it had this one: QMAX / amax stays finite.
SMALLEST_AMAX = 2.0**-100
# P is held times 2^lift, which the row sum cancels. e4m3 ends at 2^8.8 and has no normal numbers below 2^-6: a high
# lift keeps small P, a low one lets the reference lag the row maximum. By code the lag may be 1.8 octaves.
LIFT = {"code": 7.0, "ex2": 8.0, "cast": 0.0}
# One code in the numbers that P by code computes with: the last bit of a subnormal half.
CODE_UNIT = 2.0**-24
# 55.65625 = 56 - 0.34375 centres the rounding of the bent fraction; as a multiple of 2^-5 it is exact beside 8 m.
CODE_BIAS = 8.0 * LIFT["code"] + 55.65625
CODE_MAX = 126.5  # what rounds to 126 = 448; 127 is e4m3's NaN
# log of the mean of (rounded P) / P over a period of the code map; lse subtracts it. A test derives it.
CODE_LSE_BIAS = 0.009782217323564284
UNSET_SHIFT = (CODE_BIAS + 2.0**-10) * CODE_UNIT  # of a row without a reference: no integral one gives it
# References of this magnitude or more stay as they are: adding 1.5 * 2^23 rounds no more.
ROUND_LIMIT = 2.0**22
SMALLEST_FACTOR = 2.0**-126  # of a score: zero would make NaN of a masked one


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


class _Forward:
    """What the forward configurations of every precision share; the fields are those of the subclasses."""

    head_dim: int
    head_dim_v: int
    tile_m: int
    cluster: int
    pack_gqa: int
    consumer_regs: int
    producer_regs: int
    causal: bool
    window: bool
    softcap: bool
    alibi: bool
    sinks: bool
    varlen = False  # sequences of one length unless a subclass has others
    padded_v = False  # with `varlen`, whether V of each sequence begins at a multiple of V_SCALE_GROUP keys

    @property
    def features(self) -> str:
        """How names of kernels give the mask and what else is done to scores."""
        mask = "causal" if self.causal else "window" if self.window else "full"
        return mask + "".join(
            f"_{name}" for name in ("softcap", "alibi", "sinks", "varlen") if getattr(self, name)
        )

    @property
    def consumer_warpgroups(self) -> int:
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumer_warpgroups + 1)

    @property
    def q_stages(self) -> int:
        """2, so that Q of the next work tile is there when this one is done, or 1 where that does not fit."""
        return 2 if self._smem_bytes(2) <= SMEM_LIMIT else 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self._smem_bytes(self.q_stages)

    def _smem_bytes(self, q_stages: int) -> int:
        raise NotImplementedError

    def _check_varlen(self) -> None:
        if self.varlen and self.cluster > 1:
            raise ValueError(
                f"cluster must be 1 with varlen, got {self.cluster}: tiles are given out one by one"
            )

    def _check_cta(self) -> None:
        """Raise ValueError where rows, cluster, shared memory or registers of a CTA break a limit."""
        if self.tile_m not in (64, 128, 192):
            raise ValueError(f"tile_m must be 64, 128 or 192, got {self.tile_m}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster must be 1 or 2, got {self.cluster}")
        if self.pack_gqa < 1 or 64 % self.pack_gqa:
            raise ValueError(f"pack_gqa must divide the 64 rows of a warpgroup, got {self.pack_gqa}")
        if self.window and self.causal:
            raise ValueError("causal must be False with a window: it is one with right 0")
        if self.window and self.cluster > 1:
            raise ValueError(
                f"cluster must be 1 with a window, got {self.cluster}: its tiles see other key blocks"
            )
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"shared memory {self.smem_bytes} bytes exceeds {SMEM_LIMIT}")
        regs = WARPGROUP * (self.consumer_regs * self.consumer_warpgroups + self.producer_regs)
        if regs > REGISTERS_PER_SM:
            raise ValueError(f"{regs} registers exceed {REGISTERS_PER_SM}")


def _aligned(*parts: int) -> int:
    """Bytes of tiles in shared memory, behind 1 KiB of barriers; swizzle atoms repeat every 1 KiB at most."""
    return 1024 + sum(-(-part // 1024) * 1024 for part in parts)


@dataclass(frozen=True)
class FwdConfig(_Forward):
    """One compiled 8-bit forward kernel for sm_90a."""

    head_dim: int  # of Q and K, see HEAD_DIMS
    head_dim_v: int  # of V and O, likewise
    tile_m: int  # query rows of a CTA; 64 for each consumer warpgroup
    tile_n: int  # keys of one step of the main loop
    kv_stages: int  # depth of the K and V rings
    qk_dtype: str  # "e4m3" or "int8": operands of Q K^T
    p_rounding: str  # "code": P's e4m3 byte computed directly; "ex2": exp2, converted; "cast": without lift
    causal: bool
    out_dtype: str  # "bf16" or "fp16"
    consumer_regs: int = 240  # setmaxnreg of the consumer warpgroups
    producer_regs: int = 24
    check_keys: int = 64  # keys after which P by code is checked for overflow: fewer hold fewer registers
    qk_splits: int = 1  # parts of a tile's keys whose products Q K^T are issued and waited for one by one
    pv_part: int = 256  # columns of the value dimension whose products are issued and folded together
    cluster: int = 1  # CTAs that share every tile of K and V: each loads a part for all
    pack_gqa: int = 1  # query heads of a group whose rows share a tile, those of one query side by side
    # as in `Fwd16Config`
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    varlen: bool = False

    padded_v = True

    @property
    def adjusts(self) -> bool:
        """Whether scores are brought to their unit before the mask, as what is done to them is not linear."""
        return self.softcap or self.alibi

    @property
    def head_dim_padded(self) -> int:
        """Columns of Q and K in shared memory: WGMMA takes 32 bytes a step. TMA fills those past head_dim with 0."""
        return -(-self.head_dim // 32) * 32

    @property
    def pv_parts(self) -> tuple[int, ...]:
        """Columns of each part of the value dimension, a short one first."""
        whole, rest = divmod(self.head_dim_v, self.pv_part)
        return ((rest,) if rest else ()) + (self.pv_part,) * whole

    @property
    def k_groups(self) -> int:
        """K scale groups in one tile."""
        return self.tile_n // K_SCALE_GROUP

    @property
    def v_box(self) -> int:
        """Keys of one TMA box of V^T, a swizzle row of 128 or 64 bytes; it divides tile_n."""
        return 128 if self.tile_n % 128 == 0 else 64

    @property
    def v_columns(self) -> int:
        """Columns of V and O in shared memory."""
        return self.head_dim_v

    @property
    def o_box(self) -> int:
        """Columns of one TMA box of O."""
        return swizzle_columns(self.head_dim_v, 2)

    @property
    def o_in_q(self) -> bool:
        """O is not staged where Q was: there is room for both."""
        return False

    @property
    def name(self) -> str:
        regs = "" if self.consumer_regs == 240 else f"_r{self.consumer_regs}"
        parts = f"_q{self.qk_splits}v{len(self.pv_parts)}"
        parts += "" if self.check_keys == 64 else f"_c{self.check_keys}"
        parts += "" if self.cluster == 1 else f"_x{self.cluster}"
        parts += "" if self.pack_gqa == 1 else f"_g{self.pack_gqa}"
        dims = dims_name(self.head_dim, self.head_dim_v)
        return (
            f"fwd_sm90_{self.qk_dtype}_{dims}_{self.features}_{self.p_rounding}_{self.out_dtype}"
            f"_m{self.tile_m}n{self.tile_n}k{self.kv_stages}{parts}{regs}"
        )

    def _smem_bytes(self, q_stages: int) -> int:
        """1 KiB of barriers and alignment, Q, K ring, V^T ring with its sum rows, O."""
        q = q_stages * self.tile_m * self.head_dim_padded
        k = self.kv_stages * self.tile_n * self.head_dim_padded
        v = self.kv_stages * self.tile_n * (self.head_dim_v + SUM_ROWS)
        o = self.tile_m * self.head_dim_v * 2
        return _aligned(q, k, v, o)

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        for field, value in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if value not in HEAD_DIMS:
                raise ValueError(f"{field} must be a multiple of 16 from 32 to 256, got {value}")
        if self.tile_n % K_SCALE_GROUP or V_SCALE_GROUP % self.tile_n:
            raise ValueError(
                f"tile_n must be a multiple of 64 that divides {V_SCALE_GROUP}, got {self.tile_n}"
            )
        if self.qk_dtype not in ("e4m3", "int8"):
            raise ValueError(f"qk_dtype must be 'e4m3' or 'int8', got {self.qk_dtype!r}")
        if self.p_rounding not in ("code", "ex2", "cast"):
            raise ValueError(f"p_rounding must be 'code', 'ex2' or 'cast', got {self.p_rounding!r}")
        if self.out_dtype not in ("bf16", "fp16"):
            raise ValueError(f"out_dtype must be 'bf16' or 'fp16', got {self.out_dtype!r}")
        if self.check_keys not in (32, 64):
            raise ValueError(f"check_keys must be 32 or 64, got {self.check_keys}")
        if self.pv_part < 16 or self.pv_part % 16:
            raise ValueError(f"pv_part must be a multiple of 16, got {self.pv_part}")
        part = self.tile_n // self.qk_splits
        if self.tile_n % self.qk_splits or part % K_SCALE_GROUP:
            raise ValueError(f"qk_splits must leave a multiple of {K_SCALE_GROUP} keys, got {self.qk_splits}")
        if self.p_rounding != "code" and self.qk_splits != 1:
            raise ValueError(f"qk_splits must be 1 with {self.p_rounding!r}: its maximum is over the tile")
        self._check_varlen()
        self._check_cta()


@dataclass(frozen=True)
class Fwd16Config(_Forward):
    """One compiled 16-bit forward kernel for sm_90a."""

    head_dim: int  # of Q and K, see HEAD_DIMS_16BIT
    head_dim_v: int  # of V and O, likewise
    tile_m: int  # query rows of a CTA; 64 for each consumer warpgroup
    tile_n: int  # keys of one step of the main loop
    kv_stages: int  # depth of the K and V rings
    dtype: str  # "bf16" or "fp16": of Q, K, V, P and O
    causal: bool
    # query i sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right
    window: bool = False
    softcap: bool = False  # scores go through softcap * tanh(score / softcap)
    alibi: bool = False  # a bias of -slope * |i + seqlen_k - seqlen_q - j|, a slope for each batch and head
    sinks: bool = False  # a logit for each head that takes its share of the softmax and has no value
    # Q K^T of the next tile is issued before P V of this one, and its softmax runs under it
    overlap: bool = True
    pingpong: bool = True  # the warpgroups issue their products in turn
    skip_rescale: bool = True  # a warp leaves O as it is where none of its row maxima moved
    consumer_regs: int = 240  # setmaxnreg of the consumer warpgroups
    producer_regs: int = 24
    cluster: int = 1  # CTAs that share every tile of K and V: each loads a part for all
    pack_gqa: int = 1  # query heads of a group whose rows share a tile, those of one query side by side
    varlen: bool = False  # sequences of unlike length, their rows behind one another

    @property
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def head_dim_padded(self) -> int:
        """Columns of Q and K in shared memory: swizzle rows of 64 bytes. TMA fills those past head_dim with 0."""
        return -(-self.head_dim // 32) * 32

    @property
    def v_columns(self) -> int:
        """Columns of V and O in shared memory, likewise; TMA drops those of O past head_dim_v."""
        return -(-self.head_dim_v // 32) * 32

    @property
    def pv_parts(self) -> tuple[int, ...]:
        """Columns of each part of the value dimension: it is one."""
        return (self.v_columns,)

    @property
    def v_box(self) -> int:
        """Keys of one TMA box of V."""
        return self.tile_n

    @property
    def o_box(self) -> int:
        """Columns of one TMA box of O."""
        return swizzle_columns(self.head_dim_padded if self.o_in_q else self.v_columns, 2)

    @property
    def o_in_q(self) -> bool:
        """O is staged where this tile's Q was, as there is no room for both: the next tile's Q comes late."""
        return self._tiles(1) > SMEM_LIMIT

    @property
    def o_fits_q(self) -> bool:
        """Whether O has a place: its own, or that of Q, where swizzle rows must be the same."""
        atom = swizzle_columns(self.head_dim_padded, 2)
        return not self.o_in_q or (self.v_columns <= self.head_dim_padded and self.v_columns % atom == 0)

    @property
    def name(self) -> str:
        steps = (
            ("o" if self.overlap else "")
            + ("p" if self.pingpong else "")
            + ("s" if self.skip_rescale else "")
        )
        steps = f"_{steps}" if steps else ""
        regs = "" if self.consumer_regs == 240 else f"_r{self.consumer_regs}"
        cta = ("" if self.cluster == 1 else f"_x{self.cluster}") + (
            "" if self.pack_gqa == 1 else f"_g{self.pack_gqa}"
        )
        tiles = f"m{self.tile_m}n{self.tile_n}k{self.kv_stages}"
        dims = dims_name(self.head_dim, self.head_dim_v)
        return f"fwd_sm90_{self.dtype}_{dims}_{self.features}_{tiles}{steps}{cta}{regs}"

    def _tiles(self, q_stages: int) -> int:
        """Bytes with room of its own for O."""
        q = q_stages * self.tile_m * self.head_dim_padded * 2
        k = self.kv_stages * self.tile_n * self.head_dim_padded * 2
        v = self.kv_stages * self.tile_n * self.v_columns * 2
        return _aligned(q, k, v, self.tile_m * self.v_columns * 2)

    def _smem_bytes(self, q_stages: int) -> int:
        """1 KiB of barriers and alignment, Q, K ring, V ring, O."""
        return self._tiles(q_stages) - (self.tile_m * self.v_columns * 2 if self.o_in_q else 0)

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        for field, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim not in HEAD_DIMS_16BIT:
                raise ValueError(f"{field} must be a multiple of 8 from 32 to 256, got {dim}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 16 from 16 to 256, got {self.tile_n}")
        if self.dtype not in ("bf16", "fp16"):
            raise ValueError(f"dtype must be 'bf16' or 'fp16', got {self.dtype!r}")
        self._check_varlen()
        if not self.o_fits_q:
            raise ValueError(
                f"shared memory {self._tiles(1)} bytes exceeds {SMEM_LIMIT}, and O of head_dim_v {self.head_dim_v} "
                f"does not fit where Q of head_dim {self.head_dim} was"
            )
        self._check_cta()


@dataclass(frozen=True)
class QuantizeConfig:
    """One compiled quantiser: 16-bit (or, for V alone, ready e4m3) tensors to the forward's operands."""

    head_dim: int  # of Q and K, see HEAD_DIMS
    head_dim_v: int  # of V
    in_dtype: str  # "bf16", "fp16"; "e4m3" only transposes V
    qk_dtype: str  # "e4m3" or "int8"
    q_mode: str  # "token", "block" (128 rows) or "static" (amax given)
    k_mode: str  # "block64", "block128" or "static"
    v_mode: str  # "block" (256 keys) or "static"
    rotate: bool  # random signs and Hadamard transform of Q and K
    smooth: bool  # subtract the mean key from every key of a head, and leave q . mean
    # rotary position embedding of Q and K: "none", "half" (pairs i, i + rotary_dim / 2), "interleaved"
    rotary: str = "none"
    varlen: bool = False  # sequences of unlike length, their rows behind one another

    @property
    def name(self) -> str:
        if self.in_dtype == "e4m3":
            return f"transpose_v_d{self.head_dim_v}"
        dims = dims_name(self.head_dim, self.head_dim_v)
        steps = ("_rot" if self.rotate else "") + ("_smooth" if self.smooth else "")
        steps += "" if self.rotary == "none" else f"_rotary_{self.rotary}"
        steps += "_varlen" if self.varlen else ""
        return (
            f"quantize_{self.in_dtype}_{self.qk_dtype}_{dims}"
            f"_q{self.q_mode}_k{self.k_mode}_v{self.v_mode}{steps}"
        )

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built."""
        for field, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if size not in HEAD_DIMS:
                raise ValueError(f"{field} must be a multiple of 16 from 32 to 256, got {size}")
        for field, value, allowed in (
            ("in_dtype", self.in_dtype, ("bf16", "fp16", "e4m3")),
            ("qk_dtype", self.qk_dtype, ("e4m3", "int8")),
            ("q_mode", self.q_mode, ("token", "block", "static")),
            ("k_mode", self.k_mode, ("block64", "block128", "static")),
            ("v_mode", self.v_mode, ("block", "static")),
            ("rotary", self.rotary, ("none", "half", "interleaved")),
        ):
            if value not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {value!r}")
        if self.varlen:
            for field, value in (("q_mode", self.q_mode), ("k_mode", self.k_mode), ("v_mode", self.v_mode)):
                if value == "static":
                    raise ValueError(f"{field} must not be 'static' with varlen: there is no given amax")
            if self.rotary != "none":
                raise ValueError(f"rotary must be 'none' with varlen, got {self.rotary!r}")
