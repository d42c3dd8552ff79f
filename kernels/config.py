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
        return features_name(self)

    @property
    def consumer_warpgroups(self) -> int:
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumer_warpgroups + 1)

    @property
    def launch_regs(self) -> int:
        """Registers that each thread starts with: an equal share of the SM's, in steps of 8.

        setmaxnreg deals them out again inside the CTA: who asks for more waits until others have given back enough.
        """
        return REGISTERS_PER_SM // self.threads // 8 * 8

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
        wanted = self.consumer_regs * self.consumer_warpgroups + self.producer_regs
        given = self.launch_regs * (self.consumer_warpgroups + 1)
        if wanted > given:  # the last warpgroup would wait for ever
            raise ValueError(
                f"{self.consumer_warpgroups} consumer warpgroups of {self.consumer_regs} registers and a producer of "
                f"{self.producer_regs} want {wanted}, more than the {given} registers that they start with"
            )


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
    def o_direct(self) -> bool:
        """O is staged: there is room for it."""
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
        return swizzle_columns(self.v_columns, 2)

    @property
    def o_direct(self) -> bool:
        """O goes to memory from registers, as shared memory has no room for it."""
        return self._tiles(1) > SMEM_LIMIT

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
        return self._tiles(q_stages) - (self.tile_m * self.v_columns * 2 if self.o_direct else 0)

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
        self._check_cta()


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
}


def target_name(arch: str) -> str:
    """How names of these kernels give what they are compiled for."""
    return "sm80" if arch == "sm_80" else f"sm80_on_{arch.replace('_', '').removesuffix('a')}"


@dataclass(frozen=True)
class Fwd16Sm80Config:
    """One compiled 16-bit forward kernel by mma.sync, for GPUs from sm_80 on."""

    head_dim: int  # of Q and K, see HEAD_DIMS_16BIT
    head_dim_v: int  # of V and O, likewise
    tile_m: int  # query rows of a CTA, shared out among its warps
    tile_n: int  # keys of one step of the main loop
    warps: int  # each with 16 or 32 rows
    kv_stages: int  # tiles of K and of V in shared memory: 2, or 1 where that leaves no room for `ctas`
    dtype: str  # "bf16" or "fp16": of Q, K, V, P and O
    causal: bool
    # as in `Fwd16Config`
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    pack_gqa: int = 1
    varlen: bool = False
    q_in_regs: int = (
        0  # of `k_steps`, the first whose fragments of Q stay in registers: others are read in every step
    )
    ctas: int = 2  # of an SM at least: bounds the registers
    arch: str = "sm_90a"

    cluster = 1  # for the order of work, which it shares with the Hopper kernel

    @property
    def features(self) -> str:
        return features_name(self)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def m_tiles(self) -> int:
        """Products of 16 rows that a warp has side by side: each fragment of K and V serves all of them."""
        return self.tile_m // (16 * self.warps)

    @property
    def k_steps(self) -> int:
        """Products that head_dim takes, of 16 columns."""
        return -(-self.head_dim // 16)

    @property
    def n_tiles(self) -> int:
        """Products that head_dim_v takes, of 8 columns."""
        return self.head_dim_v // 8

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: Q, where O is staged too, and the stages of K and V."""
        qk, v = padded_columns(self.head_dim), padded_columns(self.head_dim_v)
        return 2 * (self.tile_m * max(qk, v) + self.kv_stages * self.tile_n * (qk + v))

    @property
    def fits(self) -> bool:
        """Whether `ctas` of them find room in the shared memory of an SM."""
        processor = SM80_ARCHS[self.arch]
        taken = self.ctas * (self.smem_bytes + 1024)
        return self.smem_bytes <= processor.cta_smem_bytes and taken <= processor.smem_bytes

    @property
    def name(self) -> str:
        tiles = f"m{self.tile_m}n{self.tile_n}k{self.kv_stages}w{self.warps}"
        tiles += (f"q{self.q_in_regs}" if self.q_in_regs else "") + f"_c{self.ctas}"
        tiles += "" if self.pack_gqa == 1 else f"_g{self.pack_gqa}"
        dims = dims_name(self.head_dim, self.head_dim_v)
        return f"fwd_{target_name(self.arch)}_{self.dtype}_{dims}_{self.features}_{tiles}"

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        for field, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim not in HEAD_DIMS_16BIT:
                raise ValueError(f"{field} must be a multiple of 8 from 32 to 256, got {dim}")
        if self.dtype not in ("bf16", "fp16"):
            raise ValueError(f"dtype must be 'bf16' or 'fp16', got {self.dtype!r}")
        if self.arch not in SM80_ARCHS:
            raise ValueError(f"arch must be one of {tuple(SM80_ARCHS)}, got {self.arch!r}")
        if self.window and self.causal:
            raise ValueError("causal must be False with a window: it is one with right 0")
        if self.warps not in (4, 8) or self.tile_m not in (16 * self.warps, 32 * self.warps):
            raise ValueError(
                f"tile_m must be 16 or 32 rows for each of 4 or 8 warps, got {self.tile_m} for {self.warps}"
            )
        # rows that all threads copy at once, of 64 or of 32 columns
        pass_rows = max(self.threads * 8 // line_columns(dim) for dim in (self.head_dim, self.head_dim_v))
        if self.tile_n % pass_rows or not 0 < self.tile_n <= 128 or self.tile_m % pass_rows:
            raise ValueError(f"tile_n must be a multiple of {pass_rows} up to 128, got {self.tile_n}")
        if self.kv_stages not in (1, 2):
            raise ValueError(f"kv_stages must be 1 or 2, got {self.kv_stages}")
        if not 0 <= self.q_in_regs <= self.k_steps:
            raise ValueError(f"q_in_regs must be from 0 to {self.k_steps}, got {self.q_in_regs}")
        if self.pack_gqa < 1 or 64 % self.pack_gqa:
            raise ValueError(f"pack_gqa must divide 64, got {self.pack_gqa}")
        if self.ctas < 1 or self.ctas * self.threads * 64 > REGISTERS_PER_SM:
            raise ValueError(
                f"ctas must leave 64 registers to each of {self.threads} threads, got {self.ctas}"
            )
        limit = SM80_ARCHS[self.arch].cta_smem_bytes
        if self.smem_bytes > limit:
            raise ValueError(f"shared memory {self.smem_bytes} bytes exceeds {limit} of {self.arch}")


@dataclass(frozen=True)
class Bwd16Config:
    """One compiled 16-bit backward for sm_90a: a pass before, the main kernel, a pass behind."""

    head_dim: int  # of Q and K, see HEAD_DIMS_16BIT
    head_dim_v: int  # of V and O, likewise
    tile_m: int  # query rows of one step of the main loop
    tile_n: int  # keys of a CTA; 64 for each consumer warpgroup, with `shared_keys` for both
    dtype: str  # "bf16" or "fp16": of all operands and gradients
    causal: bool
    dq_split: (
        str  # how the warpgroups share dQ of a step: "rows" (64 queries each) or "columns" (of head_dim)
    )
    window: bool = False  # as in Fwd16Config, and so are the next two
    softcap: bool = False
    alibi: bool = False
    q_stages: int = 2  # depth of the rings of Q and of dO
    do_stages: int = 2
    ds_stages: int = 2  # buffers of dS, and with `shared_keys` of P
    # Two warpgroups share 64 keys: each has half the queries of S and half the columns of dK and dV, whose accumulators
    # would not fit otherwise
    shared_keys: bool = False
    dq_direct: bool = False  # dQ goes to memory from registers, not through shared memory
    deterministic: bool = False  # key tiles add to dQ in their order
    varlen: bool = False  # sequences of unlike length, their rows behind one another
    consumer_regs: int = 240  # setmaxnreg of the consumer warpgroups
    producer_regs: int = 24

    @property
    def consumer_warpgroups(self) -> int:
        return 2 if self.shared_keys else self.tile_n // 64

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumer_warpgroups + 1)

    @property
    def own_queries(self) -> int:
        """Queries of a step whose scores a warpgroup computes, for 64 keys."""
        return self.tile_m // 2 if self.shared_keys else self.tile_m

    @property
    def k_part(self) -> int:
        """Columns of K of which a warpgroup makes dQ: whole swizzle rows."""
        return self.qk_columns // (self.consumer_warpgroups if self.dq_split == "columns" else 1)

    @property
    def dk_part(self) -> int:
        """Columns of a warpgroup's accumulator of dK, likewise."""
        return self.qk_columns // (2 if self.shared_keys else 1)

    @property
    def dv_part(self) -> int:
        """Columns of a warpgroup's accumulator of dV, likewise."""
        return self.v_columns // (2 if self.shared_keys else 1)

    @property
    def qk_columns(self) -> int:
        """Columns of Q, K and their gradients on the chip: what the split of dQ wants. TMA fills those past head_dim
        with 0 and does not store them."""
        unit = 32 if self.dq_split == "rows" else 32 * self.consumer_warpgroups
        return -(-self.head_dim // unit) * unit

    @property
    def v_columns(self) -> int:
        """Columns of V, O and their gradients, likewise."""
        unit = 64 if self.shared_keys else 32
        return -(-self.head_dim_v // unit) * unit

    @property
    def dq_registers(self) -> int:
        """Accumulators of dQ of a thread, in units of which the float32 sum of dQ lies in memory."""
        return self.tile_m * self.qk_columns // (WARPGROUP * self.consumer_warpgroups)

    @property
    def dq_parts(self) -> int:
        """Parts of the sum of dQ of a query tile to which key tiles add in a turn of their own."""
        return self.consumer_warpgroups

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: 1 KiB of barriers and alignment, K, V, the rings of Q and dO with their rows
        of lse and D, dS, dQ."""
        k, v = (self.tile_n * columns * 2 for columns in (self.qk_columns, self.v_columns))
        q = self.q_stages * self.tile_m * self.qk_columns * 2
        do = self.do_stages * self.tile_m * self.v_columns * 2
        ds = self.ds_stages * self.tile_m * self.tile_n * 2 * (2 if self.shared_keys else 1)
        dq = 16 if self.dq_direct else self.tile_m * self.qk_columns * 4
        rows = (self.q_stages + self.do_stages) * self.tile_m * 4
        return _aligned(k, v, q, do, ds, dq, rows)

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "window" if self.window else "full"
        mask += "".join(f"_{name}" for name in ("softcap", "alibi", "varlen") if getattr(self, name))
        stages = f"q{self.q_stages}o{self.do_stages}s{self.ds_stages}"
        stages += "_shared" * self.shared_keys + "_direct" * self.dq_direct
        stages += "_deterministic" * self.deterministic
        regs = "" if self.consumer_regs == 240 else f"_r{self.consumer_regs}"
        return (
            f"bwd_sm90_{self.dtype}_{dims_name(self.head_dim, self.head_dim_v)}_{mask}"
            f"_m{self.tile_m}n{self.tile_n}{stages}_{self.dq_split}{regs}"
        )

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        for field, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim not in HEAD_DIMS_16BIT:
                raise ValueError(f"{field} must be a multiple of 8 from 32 to 256, got {dim}")
        if self.dtype not in ("bf16", "fp16"):
            raise ValueError(f"dtype must be 'bf16' or 'fp16', got {self.dtype!r}")
        if self.window and self.causal:
            raise ValueError("causal must be False with a window: it is one with right 0")
        if self.tile_n not in (64, 128, 192):
            raise ValueError(f"tile_n must be 64, 128 or 192, got {self.tile_n}")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 128:
            raise ValueError(f"tile_m must be a multiple of 16 from 16 to 128, got {self.tile_m}")
        if self.varlen and (self.tile_m & (self.tile_m - 1) or self.tile_n & (self.tile_n - 1)):
            raise ValueError(f"tiles must be powers of two with varlen, got {self.tile_m} x {self.tile_n}")
        if self.shared_keys and (self.tile_m, self.tile_n, self.dq_split) != (64, 64, "columns"):
            raise ValueError(
                f"shared_keys wants a tile of 64 x 64 and dq_split 'columns', got {self.tile_m} x {self.tile_n} and "
                f"{self.dq_split!r}"
            )
        fits = {
            "rows": self.tile_m == self.tile_n,
            "columns": self.tile_m == 64 and self.qk_columns % (32 * self.consumer_warpgroups) == 0,
        }
        if not fits.get(self.dq_split, False):
            raise ValueError(
                f"dq_split must be 'rows' with tile_m = tile_n or 'columns' with tile_m 64, got {self.dq_split!r}, "
                f"{self.tile_m} x {self.tile_n}"
            )
        accumulators = (self.dk_part + self.dv_part) // 2  # of a thread
        if accumulators > 128:
            raise ValueError(
                f"dK and dV of head_dim {self.head_dim} and {self.head_dim_v} take {accumulators} registers a thread; "
                "allowed: 128, which shared_keys halves"
            )
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"shared memory {self.smem_bytes} bytes exceeds {SMEM_LIMIT}")
        regs = WARPGROUP * (self.consumer_regs * self.consumer_warpgroups + self.producer_regs)
        if regs > REGISTERS_PER_SM:
            raise ValueError(f"{regs} registers exceed {REGISTERS_PER_SM}")


@dataclass(frozen=True)
class Bwd16Sm80Config:
    """One compiled 16-bit backward of mma.sync, for sm_80 and on: a pass before, the main kernel, a pass behind.

    The warps share each product in blocks of 16 rows and 16 columns of its result: `s_rows` of them, along the queries
    of S and dP, `kv_rows` along the keys of dK and dV, `dq_rows` along the queries of dQ; the others along columns.
    """

    head_dim: int  # of Q and K, see HEAD_DIMS_16BIT
    head_dim_v: int  # of V and O, likewise
    tile_m: int  # query rows of one step of the main loop
    tile_n: int  # keys of a CTA
    warps: int
    s_rows: int
    kv_rows: int
    dq_rows: int
    dtype: str  # "bf16" or "fp16": of all operands and gradients
    causal: bool
    window: bool = False  # as in Fwd16Config, and so are the next two
    softcap: bool = False
    alibi: bool = False
    q_stages: int = 2  # buffers of Q and of dO
    do_stages: int = 2
    deterministic: bool = False  # key tiles add to dQ in their order
    varlen: bool = False  # sequences of unlike length, their rows behind one another
    arch: str = "sm_90a"

    dq_parts = 1  # as in Bwd16Config

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def qk_columns(self) -> int:
        """Columns of Q, K and their gradients on the chip; those past head_dim hold zeros."""
        return padded_columns(self.head_dim)

    @property
    def v_columns(self) -> int:
        """Columns of V, O and their gradients, likewise."""
        return padded_columns(self.head_dim_v)

    @property
    def accumulators(self) -> int:
        """Registers of a thread for dK and dV."""
        return self.tile_n * (self.qk_columns + self.v_columns) // self.threads

    @property
    def dq_registers(self) -> int:
        """Accumulators of dQ of a thread, in units of which the float32 sum of dQ lies in memory."""
        return self.tile_m * self.qk_columns // self.threads

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: K, V, the buffers of Q and dO with their rows of lse and D, P and dS, and 96
        bytes of the key tile."""
        kv = self.tile_n * (self.qk_columns + self.v_columns) * 2
        q, do = (self.tile_m * (columns * 2 + 4) for columns in (self.qk_columns, self.v_columns))
        return kv + self.q_stages * q + self.do_stages * do + 2 * self.tile_m * self.tile_n * 2 + 96

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "window" if self.window else "full"
        mask += "".join(f"_{name}" for name in ("softcap", "alibi", "varlen") if getattr(self, name))
        shares = f"s{self.s_rows}k{self.kv_rows}d{self.dq_rows}"
        steps = f"q{self.q_stages}o{self.do_stages}"
        steps += "_deterministic" * self.deterministic
        return (
            f"bwd_{target_name(self.arch)}_{self.dtype}_{dims_name(self.head_dim, self.head_dim_v)}_{mask}"
            f"_m{self.tile_m}n{self.tile_n}w{self.warps}{shares}_{steps}"
        )

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        for field, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim not in HEAD_DIMS_16BIT:
                raise ValueError(f"{field} must be a multiple of 8 from 32 to 256, got {dim}")
        for field, value, allowed in (
            ("dtype", self.dtype, ("bf16", "fp16")),
            ("arch", self.arch, tuple(SM80_ARCHS)),
            ("tile_m", self.tile_m, (32, 64, 128)),
            ("tile_n", self.tile_n, (32, 64, 128)),
            ("warps", self.warps, (4, 8)),
            ("q_stages", self.q_stages, (1, 2)),
            ("do_stages", self.do_stages, (1, 2)),
        ):
            if value not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {value!r}")
        if self.window and self.causal:
            raise ValueError("causal must be False with a window: it is one with right 0")
        if self.q_stages < self.do_stages:
            raise ValueError(
                f"do_stages must not exceed q_stages, got {self.do_stages} and {self.q_stages}: Q is wanted longer"
            )
        for field, rows, columns in (
            ("s_rows", self.tile_m, (self.tile_n,)),
            ("kv_rows", self.tile_n, (self.qk_columns, self.v_columns)),
            ("dq_rows", self.tile_m, (self.qk_columns,)),
        ):
            count = getattr(self, field)
            if (
                count not in (1, 2, 4, 8)
                or count > self.warps
                or rows // 16 % count
                or any(width // 16 % (self.warps // count) for width in columns)
            ):
                raise ValueError(
                    f"{field} must share {rows} rows and {' and '.join(map(str, columns))} columns among "
                    f"{self.warps} warps in blocks of 16 x 16, got {count}"
                )
        if self.accumulators > 128:
            raise ValueError(f"dK and dV take {self.accumulators} registers a thread; allowed: 128")
        limit = SM80_ARCHS[self.arch].cta_smem_bytes
        if self.smem_bytes > limit:
            raise ValueError(f"shared memory {self.smem_bytes} bytes exceeds {limit} of {self.arch}")


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


E4M3_ARCHS = ("sm_89", "sm_90a")  # with conversions from and to e4m3
_DECODE_EXTRAS = ("softcap", "alibi", "sinks", "batch_idx", "leftpad")
DECODE_KEYS = (
    16  # keys of a warp's step: the depth of one m16n8k16 product P V, and what whole pages are made of
)


@dataclass(frozen=True)
class DecodeConfig:
    """One compiled kernel for few queries against a KV cache; any architecture from sm_80 (e4m3: sm_89) on."""

    head_dim: int  # of Q and K
    head_dim_v: int  # of V and O
    dtype: str  # "bf16" or "fp16": of O, of a 16-bit Q, and of a 16-bit cache
    cache: str = "16bit"  # "16bit" or "e4m3"
    scales: str = "none"  # of an e4m3 cache: "head", or "token" for one for each token and head
    # "none": each sequence is contiguous; "block": pages of a multiple of DECODE_KEYS; "token": pages of any size
    paging: str = "none"
    query: str = "16bit"  # "e4m3": Q is of e4m3, with a scale for each key head, which needs a cache of e4m3
    m_tiles: int = 1  # tiles of 16 packed rows (query, head of the group) that a CTA takes
    half_tile: bool = False  # a CTA takes 8 packed rows: the upper half of its only tile is left out
    warps: int = 4  # each with keys and a ring of its own
    stages: int = 3  # steps of the ring, of which one is computed on
    row_ends: bool = False  # rows see different keys: causal or a window, and more than one query
    softcap: bool = False  # scores go through softcap * tanh(score / softcap)
    alibi: bool = False  # a bias of -slope * |i + seqlen_k - seqlen_q - j|
    sinks: bool = False  # a logit for each head that takes its share of the softmax and has no value
    batch_idx: bool = False  # a sequence of the cache for each of q
    leftpad: bool = False  # sequences begin at a slot of their own
    arch: str = "sm_90a"

    @property
    def fp8(self) -> bool:
        """Whether the cache is of e4m3."""
        return self.cache == "e4m3"

    @property
    def token_scales(self) -> bool:
        return self.scales == "token"

    @property
    def adjusted(self) -> bool:
        """Whether scores are scaled before the softmax, not in it."""
        return self.softcap or self.alibi

    @property
    def k_steps(self) -> int:
        """Products that head_dim takes, of 16 columns."""
        return -(-self.head_dim // 16)

    @property
    def n_tiles(self) -> int:
        """Products that head_dim_v takes, of 8 columns."""
        return self.head_dim_v // 8

    @property
    def element_bytes(self) -> int:
        """Of the cache."""
        return 1 if self.fp8 else 2

    @property
    def rows(self) -> int:
        """Packed rows of a CTA."""
        return 8 if self.half_tile else 16 * self.m_tiles

    @property
    def halves(self) -> int:
        """Of a tile that are computed: a lane has a row in each."""
        return 1 if self.half_tile else 2

    @property
    def tile_keys(self) -> int:
        """Keys of one step of a CTA: the unit in which keys are shared out."""
        return DECODE_KEYS * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def k_chunks(self) -> int:
        """Pieces of 16 bytes of a row of K."""
        return self.head_dim * self.element_bytes // 16

    @property
    def v_chunks(self) -> int:
        return self.head_dim_v * self.element_bytes // 16

    @property
    def k_pitch(self) -> int:
        """Bytes between rows of K in shared memory: an odd number of pieces, so that eight rows meet all banks."""
        return 16 * (self.k_chunks | 1)

    @property
    def v_pitch(self) -> int:
        return 16 * (self.v_chunks | 1)

    @property
    def scale_bytes(self) -> int:
        """Of a step: a float32 for each key of K and of V."""
        return 8 * DECODE_KEYS if self.token_scales else 0

    @property
    def stage_bytes(self) -> int:
        return DECODE_KEYS * (self.k_pitch + self.v_pitch) + self.scale_bytes

    @property
    def o_pitch(self) -> int:
        """Floats between rows of O where warps leave it to be added up."""
        return self.head_dim_v + 4

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: its ring and, when that is done with, its O, maxima and sums."""
        left = 4 * self.rows * (self.o_pitch + 2)
        return -(-max(self.stages * self.stage_bytes, left) // 128) * 128

    @property
    def q_in_smem(self) -> bool:
        """Whether fragments of Q are read anew in each step, as registers have no room for them beside O."""
        return self.m_tiles * max(self.head_dim, self.head_dim_v) > 128

    @property
    def crowded(self) -> bool:
        """Whether registers are short: then the assembler must not move loads up, for it spills what they displace."""
        extras = self.row_ends or any(getattr(self, name) for name in _DECODE_EXTRAS)
        uneven = 32 % self.k_chunks or 32 % self.v_chunks  # addresses that do not follow one from another
        return self.q_in_smem and bool(extras or uneven)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: its warps', and Q, or 16 bytes into which an odd row's last load reaches."""
        q = 16 * self.m_tiles * 2 * (16 * self.k_steps) if self.q_in_smem else 16
        return self.warps * self.warp_bytes + q

    @property
    def name(self) -> str:
        cache = self.dtype if self.cache == "16bit" else f"{self.dtype}_{self.cache}_{self.scales}"
        cache += "" if self.query == "16bit" else f"_q_{self.query}"
        paging = "" if self.paging == "none" else f"_paged_{self.paging}"
        mask = "_ends" if self.row_ends else ""
        mask += "".join(f"_{name}" for name in _DECODE_EXTRAS if getattr(self, name))
        tiles = f"m{'half' if self.half_tile else self.m_tiles}w{self.warps}s{self.stages}"
        arch = self.arch.replace("_", "").removesuffix("a")
        return f"decode_{arch}_{cache}_{dims_name(self.head_dim, self.head_dim_v)}{paging}{mask}_{tiles}"

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        step = 16 // self.element_bytes
        for field, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim % step or not 32 <= dim <= 256:
                raise ValueError(f"{field} must be a multiple of {step} from 32 to 256, got {dim}")
        for field, value, allowed in (
            ("dtype", self.dtype, ("bf16", "fp16")),
            ("cache", self.cache, ("16bit", "e4m3")),
            ("scales", self.scales, ("head", "token") if self.cache == "e4m3" else ("none",)),
            ("paging", self.paging, ("none", "block", "token")),
            ("query", self.query, ("16bit", "e4m3") if self.cache == "e4m3" else ("16bit",)),
        ):
            if value not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {value!r}")
        if self.fp8 and self.arch not in E4M3_ARCHS:
            raise ValueError(f"arch must be one of {E4M3_ARCHS} for a cache of e4m3, got {self.arch!r}")
        if self.half_tile and self.m_tiles != 1:
            raise ValueError(f"m_tiles must be 1 with half_tile, got {self.m_tiles}")
        if self.m_tiles * max(self.head_dim, self.head_dim_v) > 256:
            raise ValueError(
                f"m_tiles * head_dim must be at most 256 for the registers, got {self.m_tiles} tiles"
            )
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if not 1 <= self.warps <= 16:
            raise ValueError(f"warps must be from 1 to 16, got {self.warps}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"shared memory {self.smem_bytes} bytes exceeds {SMEM_LIMIT}")


@dataclass(frozen=True)
class AppendConfig:
    """One compiled kernel that writes new K and V into a cache and prepares the queries that read it."""

    head_dim: int  # of Q and K
    head_dim_v: int
    in_dtype: str  # "bf16" or "fp16": of the new rows, of Q, and of a 16-bit cache
    cache: str = "16bit"  # or "e4m3"
    scales: str = "none"  # of an e4m3 cache: "head", given, or "token", made here
    paged: bool = False
    rotary: str = "none"  # of K and Q: "half" (pairs i, i + rotary_dim / 2) or "interleaved"
    rotate: bool = False  # signs and Hadamard transform of K and Q; e4m3
    batch_idx: bool = False  # a sequence of the cache for each of the new rows
    keys: bool = True  # K and V are appended
    queries: bool = False  # Q is given and comes out embedded and rotated
    arch: str = "sm_90a"

    @property
    def name(self) -> str:
        cache = self.in_dtype if self.cache == "16bit" else f"{self.in_dtype}_{self.cache}_{self.scales}"
        steps = "".join(
            f"_{name}" for name in ("paged", "rotate", "batch_idx", "keys", "queries") if getattr(self, name)
        )
        steps += "" if self.rotary == "none" else f"_rotary_{self.rotary}"
        arch = self.arch.replace("_", "").removesuffix("a")
        return f"append_{arch}_{cache}_{dims_name(self.head_dim, self.head_dim_v)}{steps}"

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        step = 16 if self.cache == "e4m3" else 8
        for field, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim % step or not 32 <= dim <= 256:
                raise ValueError(f"{field} must be a multiple of {step} from 32 to 256, got {dim}")
        for field, value, allowed in (
            ("in_dtype", self.in_dtype, ("bf16", "fp16")),
            ("cache", self.cache, ("16bit", "e4m3")),
            ("scales", self.scales, ("head", "token") if self.cache == "e4m3" else ("none",)),
            ("rotary", self.rotary, ("none", "half", "interleaved")),
        ):
            if value not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {value!r}")
        if self.cache == "e4m3" and self.arch not in E4M3_ARCHS:
            raise ValueError(f"arch must be one of {E4M3_ARCHS} for a cache of e4m3, got {self.arch!r}")
        if self.rotate and self.cache != "e4m3":
            raise ValueError("rotate must be False with a 16-bit cache")
        if not (self.keys or self.queries):
            raise ValueError("keys or queries must be True: there is nothing to do")


@dataclass(frozen=True)
class UnpackConfig:
    """One compiled kernel that tells where the keys of sequences in a KV cache are and, with `copy`, makes rows of 16
    bits of them, one behind another."""

    head_dim: int  # of K
    head_dim_v: int
    dtype: str  # "bf16" or "fp16": of the rows, and of a 16-bit cache
    cache: str = "16bit"  # or "e4m3"
    scales: str = "none"  # of an e4m3 cache: "head", or "token"
    paged: bool = False
    batch_idx: bool = False  # a sequence of the cache for each of q
    leftpad: bool = False  # sequences begin at a slot of their own
    query_scale: bool = False  # K is multiplied by the scales of an e4m3 Q, too
    copy: bool = True  # False: of a 16-bit cache that is read where it is
    arch: str = "sm_90a"

    @property
    def tile_keys(self) -> int:
        """Slots of a chunk, the unit in which copying is shared out."""
        return 64

    @property
    def name(self) -> str:
        cache = self.dtype if self.cache == "16bit" else f"{self.dtype}_{self.cache}_{self.scales}"
        steps = "".join(
            f"_{name}"
            for name in ("paged", "batch_idx", "leftpad", "query_scale", "copy")
            if getattr(self, name)
        )
        arch = self.arch.replace("_", "").removesuffix("a")
        return f"unpack_{arch}_{cache}_{dims_name(self.head_dim, self.head_dim_v)}{steps}"

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        step = 16 if self.cache == "e4m3" else 8
        for field, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim % step or not 32 <= dim <= 256:
                raise ValueError(f"{field} must be a multiple of {step} from 32 to 256, got {dim}")
        for field, value, allowed in (
            ("dtype", self.dtype, ("bf16", "fp16")),
            ("cache", self.cache, ("16bit", "e4m3")),
            ("scales", self.scales, ("head", "token") if self.cache == "e4m3" else ("none",)),
        ):
            if value not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {value!r}")
        if self.cache == "e4m3" and self.arch not in E4M3_ARCHS:
            raise ValueError(f"arch must be one of {E4M3_ARCHS} for a cache of e4m3, got {self.arch!r}")
        if self.query_scale and self.cache != "e4m3":
            raise ValueError("query_scale must be False with a 16-bit cache")
        if not self.copy and (self.cache == "e4m3" or self.paged):
            raise ValueError("copy must be True with pages or a cache of e4m3")
