"""The 16-bit backward for Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from .common import (
    HEAD_DIMS_16BIT,
    REGISTERS_PER_SM,
    SMEM_LIMIT,
    WARPGROUP,
    aligned_bytes,
    dims_name,
    swizzle_columns,
)


@dataclass(frozen=True)
class Bwd16Config:
    """One compiled 16-bit backward for sm_90a: a pass before, the main kernel, a pass behind."""

    head_dim: int  # of Q and K, see HEAD_DIMS_16BIT
    head_dim_v: int  # of V and O, likewise
    tile_m: int  # query rows of one step of the main loop
    tile_n: int  # keys of a CTA; 64 for each consumer warpgroup, with `shared_keys` for both
    dtype: str  # "bf16" or "fp16": of all operands and gradients
    causal: bool
    # How the warpgroups share dQ of a step: "rows" (64 queries each), "columns" (of head_dim), or "transposed" (64
    # columns of head_dim each, as rows of dQ^T, so that tile_m may be any)
    dq_split: str
    window: bool = False  # as in Fwd16Config, and so are the next two
    softcap: bool = False
    alibi: bool = False
    q_stages: int = 2  # depth of the rings of Q and of dO
    do_stages: int = 2
    ds_stages: int = 2  # buffers of dS, and with `shared_keys` of P
    # Two warpgroups share 64 keys: each has half the queries of S and half the columns of dK and dV, whose accumulators
    # would not fit otherwise
    shared_keys: bool = False
    # Of a step's blocks of 16 queries, those whose dV and dK run under the arithmetic of the others; 0: no such parts
    first_blocks: int = 0
    dq_direct: bool = False  # dQ goes to memory from registers, not through shared memory
    deterministic: bool = False  # key tiles add to dQ in a fixed order, see `scheduler.tiles_before`
    varlen: bool = False  # sequences of unlike length, their rows behind one another
    # CTAs, one an SM, take key tiles by a count in memory, and load for the next one while this one ends
    persistent: bool = False
    early_keys: bool = False  # with `persistent`: dQ of a tile's last step ends the use of K and V, not dK
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
    def one_state(self) -> bool:
        """Whether the stages of Q and of dO, which are as many, are counted together."""
        return self.q_stages == self.do_stages

    @property
    def k_part(self) -> int:
        """Columns of K of which a warpgroup makes dQ: whole swizzle rows."""
        return self.qk_columns // (1 if self.dq_split == "rows" else self.consumer_warpgroups)

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
        warpgroups = self.consumer_warpgroups
        unit = {"rows": 32, "columns": 32 * warpgroups, "transposed": 64 * warpgroups}[self.dq_split]
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
    def clears_ahead(self) -> bool:
        """Whether CTAs clear the sum of dQ of later heads as they compute, in a warp that has nothing else to do; else
        the pass before clears all."""
        return not (self.dq_direct or self.varlen or self.deterministic) and self.consumer_warpgroups < 3

    @property
    def out_stages(self) -> int:
        """Buffers of dK and dV beside K and V, where these are loaded for the next tile while dK and dV leave: with
        one, dV waits for dK to have left."""
        if not self.persistent:
            return 0
        return 2 if self._smem_bytes(2) <= SMEM_LIMIT else 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: 1 KiB of barriers and alignment, K, V, the rings of Q and dO with their rows
        of lse and D, dS, dQ, and with `persistent` dK and dV."""
        return self._smem_bytes(self.out_stages)

    def _smem_bytes(self, out_stages: int) -> int:
        k, v = (self.tile_n * columns * 2 for columns in (self.qk_columns, self.v_columns))
        q = self.q_stages * self.tile_m * self.qk_columns * 2
        do = self.do_stages * self.tile_m * self.v_columns * 2
        ds = self.ds_stages * self.tile_m * self.tile_n * 2 * (2 if self.shared_keys else 1)
        dq = 16 if self.dq_direct else self.tile_m * self.qk_columns * 4
        rows = (self.q_stages + self.do_stages) * self.tile_m * 4
        out = (0, max(k, v), k + v)[out_stages]
        return aligned_bytes(k, v, q, do, ds, dq, out, rows)

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "window" if self.window else "full"
        mask += "".join(f"_{name}" for name in ("softcap", "alibi", "varlen") if getattr(self, name))
        stages = f"q{self.q_stages}o{self.do_stages}s{self.ds_stages}"
        stages += f"f{self.first_blocks}" * bool(self.first_blocks)
        stages += "_shared" * self.shared_keys + "_direct" * self.dq_direct
        stages += (
            "_deterministic" * self.deterministic
            + "_persistent" * self.persistent
            + "_early" * self.early_keys
        )
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
        if self.persistent and not self.clears_ahead:
            raise ValueError(
                "persistent wants two warpgroups of 64 keys each at most, without dq_direct, deterministic and varlen"
            )
        if self.early_keys and not self.persistent:
            raise ValueError("early_keys wants persistent")
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
            "columns": self.tile_m == 64,
            "transposed": self.qk_columns == 64 * self.consumer_warpgroups and not self.shared_keys,
        }
        if not fits.get(self.dq_split, False):
            raise ValueError(
                "dq_split must be 'rows' with tile_m = tile_n, 'columns' with tile_m 64, or 'transposed' with at most "
                f"64 columns of head_dim a warpgroup, got {self.dq_split!r}, {self.tile_m} x {self.tile_n}, head_dim "
                f"{self.head_dim}"
            )
        last = 0 if self.softcap or self.shared_keys else self.tile_m // 16 - 1
        if not 0 <= self.first_blocks <= last:
            raise ValueError(f"first_blocks must be from 0 to {last}, got {self.first_blocks}")
        accumulators = (self.dk_part + self.dv_part) // 2  # of a thread
        if accumulators > 128:
            raise ValueError(
                f"dK and dV of head_dim {self.head_dim} and {self.head_dim_v} take {accumulators} registers a thread; "
                "allowed: 128, which shared_keys halves"
            )
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"shared memory {self.smem_bytes} bytes exceeds {SMEM_LIMIT}")
        of_k, of_v = (self.qk_columns, self.k_part), (self.v_columns, self.dv_part)
        if self.out_stages == 1 and (of_k[0], swizzle_columns(of_k[1], 2)) != (
            of_v[0],
            swizzle_columns(of_v[1], 2),
        ):
            # dV of a warpgroup comes where its dK was, for which no other warpgroup waits
            raise ValueError(
                f"persistent with one buffer for dK and dV wants them laid out alike, got head_dim {self.head_dim} and "
                f"{self.head_dim_v}"
            )
        regs = WARPGROUP * (self.consumer_regs * self.consumer_warpgroups + self.producer_regs)
        if regs > REGISTERS_PER_SM:
            raise ValueError(f"{regs} registers exceed {REGISTERS_PER_SM}")
