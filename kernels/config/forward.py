"""Forward kernels for Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from .common import (
    BARRIER_BYTES,
    HEAD_DIMS,
    HEAD_DIMS_16BIT,
    K_SCALE_GROUP,
    REGISTERS_PER_SM,
    SMEM_LIMIT,
    SUM_ROWS,
    V_SCALE_GROUP,
    WARPGROUP,
    aligned_bytes,
    dims_name,
    features_name,
    swizzle_columns,
)


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
    split_keys = False
    padded_v = False  # with `varlen`, whether V of each sequence begins at a multiple of V_SCALE_GROUP keys

    @property
    def skips_keys(self) -> bool:
        """Whether a warpgroup passes over key blocks that a causal mask hides from its rows."""
        return False

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
    def side_words(self) -> int:
        """Numbers in shared memory that a tile begins with, beside Q, K and V; see `Fp8Policy.stage_inputs`."""
        return 0

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
        if self.tile_m not in (64, 128, 192, 256):
            raise ValueError(f"tile_m must be 64, 128, 192 or 256, got {self.tile_m}")
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


@dataclass(frozen=True)
class FwdConfig(_Forward):
    """One compiled 8-bit forward kernel for sm_90a."""

    head_dim: int  # of Q and K, see HEAD_DIMS
    head_dim_v: int  # of V and O, likewise
    tile_m: int  # query rows of a CTA; 64 for each consumer warpgroup
    tile_n: int  # keys of one step of the main loop
    kv_stages: int  # depth of the K and V rings
    qk_dtype: str  # "e4m3" or "int8": operands of Q K^T
    # "code": P's e4m3 byte computed directly; "half": likewise, from scores in float16, of e4m3 codes of Q and K up to
    # `narrow_max`; "ex2": exp2, converted; "cast": without lift
    p_rounding: str
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
    def by_code(self) -> bool:
        """Whether P is made without exp2."""
        return self.p_rounding in ("code", "half")

    @property
    def half_scores(self) -> bool:
        """Whether Q K^T is summed in float16."""
        return self.p_rounding == "half"

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

    @property
    def side_words(self) -> int:
        return 0 if self.varlen else self.tile_m + self.k_groups + 1

    def _smem_bytes(self, q_stages: int) -> int:
        """Barriers and what a tile begins with, Q, K ring, V^T ring with its sum rows, O."""
        q = q_stages * self.tile_m * self.head_dim_padded
        k = self.kv_stages * self.tile_n * self.head_dim_padded
        v = self.kv_stages * self.tile_n * (self.head_dim_v + SUM_ROWS)
        o = self.tile_m * self.head_dim_v * 2
        # a pair for each stage of Q, K and V, and for where a tile is; and two places
        barriers = BARRIER_BYTES if self.varlen else 16 * (q_stages + 2 * self.kv_stages + 1) + 64
        return aligned_bytes(q, k, v, o, words=self.side_words, barriers=barriers)

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
        if self.p_rounding not in ("code", "half", "ex2", "cast"):
            raise ValueError(f"p_rounding must be 'code', 'half', 'ex2' or 'cast', got {self.p_rounding!r}")
        if self.out_dtype not in ("bf16", "fp16"):
            raise ValueError(f"out_dtype must be 'bf16' or 'fp16', got {self.out_dtype!r}")
        if self.check_keys not in (32, 64):
            raise ValueError(f"check_keys must be 32 or 64, got {self.check_keys}")
        if self.pv_part < 16 or self.pv_part % 16:
            raise ValueError(f"pv_part must be a multiple of 16, got {self.pv_part}")
        part = self.tile_n // self.qk_splits
        if self.tile_n % self.qk_splits or part % K_SCALE_GROUP:
            raise ValueError(f"qk_splits must leave a multiple of {K_SCALE_GROUP} keys, got {self.qk_splits}")
        if self.half_scores and (self.qk_dtype != "e4m3" or self.adjusts):
            raise ValueError(
                "p_rounding must not be 'half' but for qk_dtype 'e4m3' without softcap and ALiBi, got qk_dtype "
                f"{self.qk_dtype!r}, softcap {self.softcap}, alibi {self.alibi}"
            )
        if not self.by_code and self.qk_splits != 1:
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
    consumer_regs: int = 240  # setmaxnreg of the consumer warpgroups
    producer_regs: int = 24
    cluster: int = 1  # CTAs that share every tile of K and V: each loads a part for all
    pack_gqa: int = 1  # query heads of a group whose rows share a tile, those of one query side by side
    varlen: bool = False  # sequences of unlike length, their rows behind one another
    split_keys: bool = (
        False  # with `varlen`: several CTAs share the keys of a tile, another kernel adds up their parts
    )

    @property
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def skips_keys(self) -> bool:
        """The last 64 rows of a tile see keys that others do not: blocks of them, if these are as narrow. Turns want
        as many steps of all warpgroups."""
        narrow = self.tile_n <= 64 < self.tile_m
        return self.causal and narrow and not (self.pingpong or self.split_keys or self.varlen)

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
        """O goes to memory from registers: shared memory has no room for it, or it is a part in float32."""
        return self.split_keys or self._tiles(1) > SMEM_LIMIT

    @property
    def name(self) -> str:
        steps = ("o" if self.overlap else "") + ("p" if self.pingpong else "")
        steps = f"_{steps}" if steps else ""
        regs = "" if self.consumer_regs == 240 else f"_r{self.consumer_regs}"
        cta = ("" if self.cluster == 1 else f"_x{self.cluster}") + (
            "" if self.pack_gqa == 1 else f"_g{self.pack_gqa}"
        )
        cta += "_split" if self.split_keys else ""
        tiles = f"m{self.tile_m}n{self.tile_n}k{self.kv_stages}"
        dims = dims_name(self.head_dim, self.head_dim_v)
        return f"fwd_sm90_{self.dtype}_{dims}_{self.features}_{tiles}{steps}{cta}{regs}"

    def _tiles(self, q_stages: int) -> int:
        """Bytes with room of its own for O."""
        q = q_stages * self.tile_m * self.head_dim_padded * 2
        k = self.kv_stages * self.tile_n * self.head_dim_padded * 2
        v = self.kv_stages * self.tile_n * self.v_columns * 2
        return aligned_bytes(q, k, v, self.tile_m * self.v_columns * 2)

    def _smem_bytes(self, q_stages: int) -> int:
        """Barriers, Q, K ring, V ring, O."""
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
        if self.split_keys and not self.varlen:
            raise ValueError("varlen must be True with split_keys")
        self._check_varlen()
        self._check_cta()
