"""The 16-bit forward and backward by mma.sync, for GPUs from sm_80 on."""

from __future__ import annotations

from dataclasses import dataclass

from .common import (
    HEAD_DIMS_16BIT,
    REGISTERS_PER_SM,
    SM80_ARCHS,
    dims_name,
    features_name,
    line_columns,
    padded_columns,
    target_name,
)


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

    # for the order of work, which it shares with the Hopper kernel
    cluster = 1
    split_keys = False

    PLACE_BYTES = 32  # of shared memory, for the place of the CTA's tile

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
        """Dynamic shared memory of a CTA: Q, where O is staged too, the stages of K and V, and `PLACE_BYTES`."""
        qk, v = padded_columns(self.head_dim), padded_columns(self.head_dim_v)
        return 2 * (self.tile_m * max(qk, v) + self.kv_stages * self.tile_n * (qk + v)) + self.PLACE_BYTES

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
    deterministic: bool = False  # key tiles add to dQ in a fixed order, see `scheduler.tiles_before`
    varlen: bool = False  # sequences of unlike length, their rows behind one another
    arch: str = "sm_90a"

    dq_parts = 1  # as in Bwd16Config, and so is the next
    clears_ahead = False

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
