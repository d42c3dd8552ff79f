"""The 16-bit kernels: which one serves a problem, and what one call of `flash_attn_func` does and why.

Pure functions of plain data, as those of plan.py. A call goes by `forward16_choice`, and so does the report of
`flash_attn_explain`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any, Final

import torch

from cute_attn.kernels.config import (
    HEAD_DIMS_16BIT,
    SM80_ARCHS,
    SMEM_LIMIT,
    Bwd16Config,
    Fwd16Config,
    Fwd16Sm80Config,
)
from cute_attn.plan import (
    choose_backend,
    choose_cluster,
    choose_pack_gqa,
    report_text,
    tiles_text,
    work_tiles,
)
from cute_attn.plan_sm80 import forward16_sm80_choice
from cute_attn.problem import ARCHS, CAPABILITIES, dotted
from cute_attn.tiles import DTYPE_NAMES

LONG_QUERIES_BACKWARD: Final = 8192
"""Queries from which a step of the 16-bit backward has more of them under a causal mask."""

SHORT_QUERIES_BACKWARD: Final = 1024
"""Queries up to which it has as few without a mask, and persistent CTAs at head_dim 128 (perf/log.md, run 22)."""

_CAUSAL_CLUSTER_BLOCKS: Final = 64
"""Tiles of a head from which clusters pay under a causal mask, where the table has no number of its own (perf/log.md,
run 21)."""


# ------------------------------------------------------------------------------------------------------------
# Tile table
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile16:
    """One row of the 16-bit tile table; the sizes are those of `Fwd16Config`.

    It serves heads whose larger of `head_dim` and `head_dim_v`, rounded up to a multiple of 32, is at most `columns`.
    """

    columns: int
    why: str
    plain: bool | None = None  # only without (True) or with (False) a mask, softcap or ALiBi; None: both
    causal: bool = False  # only with a causal mask
    bare: bool = False  # only with at most a causal mask, and sequences of one length
    queries: range = range(1 << 31)  # only sequences of so many
    tile_m: int = 128
    tile_n: int = 128
    consumer_regs: int = 240
    producer_regs: int = 24
    pingpong: bool = False  # turns of the warpgroups at the tensor core
    kv_stages: int = 2
    cluster: int = 1  # where a head has tiles enough, see `choose_cluster`
    causal_blocks: int = _CAUSAL_CLUSTER_BLOCKS  # that are enough under a causal mask


# a consumer's and the producer's where two consume and the producer looks for tiles, too; 240 would leave it 24
_REGS_VARLEN: Final = (232, 40)
# four consumer warpgroups: 112 registers hold S and P of 64 keys, and O
_FOUR: Final[dict[str, Any]] = {
    "tile_m": 256,
    "tile_n": 64,
    "kv_stages": 4,
    "consumer_regs": 112,
    "producer_regs": 32,
}
_BOUND_16: Final = "what two stages of K and V leave room for in shared memory"
_WHY_128: Final = "176 keys a step would fit, but were 5% slower (perf/log.md, run 21)"

TILES_16: Final = (
    Tile16(
        columns=64,
        causal=True,
        bare=True,
        queries=range(512, 4097),
        **_FOUR,
        why="four consumer warpgroups cover each other's softmax, and the first and last steps of tiles; each passes "
        "over keys that its rows do not see",
    ),
    Tile16(
        columns=64,
        plain=True,
        bare=True,
        queries=range(512, 4097),
        pingpong=True,
        **_FOUR,
        why="four consumer warpgroups in turns cover each other's softmax, and the first and last steps of tiles",
    ),
    Tile16(
        columns=64,
        causal=True,
        queries=range(1025),
        pingpong=True,
        why="a block of rows also computes keys that its diagonal tiles hide: blocks of 192 rows waste more there "
        "than their third consumer warpgroup gains",
    ),
    Tile16(
        columns=64,
        tile_m=192,
        consumer_regs=160,
        producer_regs=32,
        pingpong=True,
        why="three consumer warpgroups in turns, for at 64 columns exp2 takes as long as the products; more keys "
        "a step do not fit into the 160 registers that three leave to a thread",
    ),
    Tile16(
        columns=96,
        plain=True,
        tile_n=192,
        why="S, P and O of 192 keys fit into 240 registers; a third warpgroup would leave room for 112",
    ),
    Tile16(
        columns=128,
        causal=True,
        bare=True,
        cluster=2,
        causal_blocks=16,
        why=_WHY_128,
    ),
    Tile16(columns=128, why=_WHY_128),
    Tile16(columns=192, tile_n=112, cluster=2, why=_BOUND_16),
    Tile16(
        columns=256,
        causal=True,
        bare=True,
        queries=range(4097),
        tile_n=64,
        cluster=2,
        causal_blocks=8,
        why="keys of a step end where those of a warpgroup's rows do, which passes over others; 80 keys a step fit, "
        "but were 1 to 5% slower (perf/log.md, runs 22 and 24)",
    ),
    Tile16(columns=256, tile_n=80, cluster=2, why=_BOUND_16),
)
"""Rows in the order of `columns`: the first that serves a problem is taken. Those of 64, 128 and 256 columns
were measured on an H200 (perf/log.md, runs 11, 13, 16 and 21 to 24), the others follow them."""

SHORT_QUERIES: Final = tuple(
    sorted({n for t in TILES_16 for n in (t.queries.start - 1, t.queries.stop - 1) if 0 < n < 1 << 20})
)
"""Queries of a sequence up to which it may have another tile than with more of them."""


@functools.lru_cache(maxsize=4096)
def forward16_config(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    group: int = 1,
    seqlen_q: int = 1 << 20,
    varlen: bool = False,
) -> Fwd16Config:
    """The 16-bit forward kernel for these properties of a problem. Pure.

    Args:
        head_dim, head_dim_v: multiples of 8 from 32 to 256.
        dtype: "bf16" or "fp16".
        causal, window, softcap, alibi, sinks: as in `Fwd16Config`; causal and window exclude each other.
        group: query heads of a key head.
        seqlen_q: queries of a sequence, with `varlen` on average; with few of them the rows of a group share tiles, or
            tiles have fewer rows.
        varlen: sequences of unlike length.

    Raises:
        ValueError: a head_dim or dtype for which there is no kernel.
    """
    return forward16_choice(
        head_dim, head_dim_v, dtype, causal, window, softcap, alibi, sinks, group, seqlen_q, varlen
    )[0]


def forward16_choice(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    causal: bool,
    window: bool,
    softcap: bool,
    alibi: bool,
    sinks: bool,
    group: int,
    seqlen_q: int,
    varlen: bool = False,
) -> tuple[Fwd16Config, tuple[str, ...]]:
    """What `forward16_config` returns, and the reasons, one sentence for each choice."""
    columns = -(-max(head_dim, head_dim_v) // 32) * 32
    bare = not (window or softcap or alibi or sinks or varlen)
    plain = not (causal or window or softcap or alibi)
    tile = next(
        t
        for t in TILES_16
        if columns <= t.columns
        and t.plain in (None, plain)
        and (causal or not t.causal)
        and (bare or not t.bare)
        and seqlen_q in t.queries
    )
    pack_gqa, why_pack = choose_pack_gqa(group, seqlen_q, tile.tile_m, varlen)
    consumer_regs, producer_regs = tile.consumer_regs, tile.producer_regs
    if varlen and tile.tile_m == 128:
        consumer_regs, producer_regs = _REGS_VARLEN
    cluster, why_cluster = 1, None
    if not (window or varlen):  # whose tiles do not read the same keys, or are given out one by one
        cluster, why_cluster = choose_cluster(
            tile.cluster, -(-seqlen_q * pack_gqa // tile.tile_m), tile.causal_blocks if causal else 2
        )
    config = Fwd16Config(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        kv_stages=tile.kv_stages,
        dtype=dtype,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        consumer_regs=consumer_regs,
        producer_regs=producer_regs,
        pingpong=tile.pingpong,
        cluster=cluster,
        pack_gqa=pack_gqa,
        varlen=varlen,
    )
    config.check()
    why_tile = f"tile {config.tile_m} x {config.tile_n}: {tile.why}"
    if config.o_direct:
        why_tile += "; O goes to memory from registers, as shared memory has no room to stage it"
    return config, tuple(why for why in (why_tile, why_pack, why_cluster) if why is not None)


def backward16_config(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    deterministic: bool = False,
    varlen: bool = False,
    seqlen_q: int = 1 << 20,
) -> Bwd16Config:
    """The 16-bit backward for these properties of a problem. Pure. sinks need no kernel of their own.

    Args:
        head_dim, head_dim_v: multiples of 8 from 32 to 256.
        dtype: "bf16" or "fp16".
        causal, window, softcap, alibi, deterministic, varlen: as in `Bwd16Config`; causal and window exclude each
            other.
        seqlen_q: queries of a sequence; read at head_dim 72 to 128, see `LONG_QUERIES_BACKWARD` and
            `SHORT_QUERIES_BACKWARD`.

    Raises:
        ValueError: a head_dim or dtype for which there is no kernel.
    """
    config = Bwd16Config(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        tile_m=64,
        tile_n=128,
        dtype=dtype,
        causal=causal,
        dq_split="columns",
        window=window,
        softcap=softcap,
        alibi=alibi,
        deterministic=deterministic,
        varlen=varlen,
    )
    columns = max(head_dim, head_dim_v)
    # causal sequences that are short have a large share of tiles on the diagonal, which waste more if they are wider;
    # without a mask the last tile of a short one does
    many = seqlen_q >= LONG_QUERIES_BACKWARD if causal else seqlen_q > SHORT_QUERIES_BACKWARD
    if columns > 128:  # accumulators of 128 keys do not fit, nor dQ beside two stages of Q and dO
        config = dataclasses.replace(config, tile_n=64, shared_keys=True, dq_direct=True, ds_stages=1)
    elif columns <= 64 and not (softcap or alibi):  # whose values beside twice the scores would not fit
        # under a mask the parts of a step gain nothing (perf/log.md, run 19)
        config = dataclasses.replace(
            config, tile_m=128, dq_split="rows", first_blocks=0 if causal or window else 4
        )
    elif min(head_dim, head_dim_v) > 64 and many and not (window or softcap or alibi or varlen):
        # Fewer bytes through shared memory for each query. Sequences of unlike length want powers of two.
        config = dataclasses.replace(config, tile_m=80, dq_split="transposed")
    plain = not (window or softcap or alibi or deterministic or varlen)
    most = {64: seqlen_q, 128: SHORT_QUERIES_BACKWARD}.get(head_dim, 0)
    if plain and head_dim == head_dim_v and 0 < seqlen_q <= most:
        # K and V given back early gain up to 4% at 64 columns; at 128, with one buffer for dK and dV, nothing
        config = dataclasses.replace(config, persistent=True, early_keys=head_dim == 64)
    config.check()
    return config


def all_forward16_configs() -> list[Fwd16Config]:
    """A sample of the 16-bit kernels, for ahead-of-use compilation and tests: the common ones, each feature once."""
    common = [
        forward16_config(head_dim, head_dim, dtype, causal=causal)
        for head_dim in (64, 96, 128, 192, 256)
        for dtype in DTYPE_NAMES.values()
        for causal in (False, True)
    ]
    features = [
        forward16_config(head_dim, head_dim, "bf16", **{"window": True, feature: True})
        for head_dim in (64, 128, 256)
        for feature in ("window", "softcap", "alibi", "sinks")
    ]
    others = [
        forward16_config(192, 128, "bf16", causal=True),
        forward16_config(40, 72, "fp16"),
        forward16_config(128, 128, "bf16", causal=True, group=8, seqlen_q=1),
        forward16_config(256, 256, "bf16", causal=True, seqlen_q=4097),  # as long ones, but without clusters
        *(
            forward16_config(head_dim, head_dim, dtype, causal=causal, seqlen_q=seqlen_q)
            for head_dim, dtype, causal in (
                (64, "bf16", True),
                (64, "fp16", True),
                (64, "bf16", False),
                (40, "fp16", True),
                (128, "bf16", True),
                (256, "bf16", True),
            )
            for seqlen_q in SHORT_QUERIES
        ),
    ]
    varlen = [
        forward16_config(64, 64, "bf16", causal=True, varlen=True),
        forward16_config(128, 128, "bf16", causal=True, varlen=True),
        forward16_config(256, 256, "bf16", varlen=True),
        forward16_config(128, 128, "bf16", causal=True, group=8, seqlen_q=1, varlen=True),
        forward16_config(256, 256, "bf16", window=True, softcap=True, alibi=True, sinks=True, varlen=True),
    ]
    split = [dataclasses.replace(config, split_keys=True) for config in varlen[-2:]]
    return list(dict.fromkeys([*common, *features, *others, *varlen, *split]))


def tile16_table() -> list[dict[str, object]]:
    """Tiles by head_dim (of Q, K and V alike) and mask, one flat dict each, for printing and for tests."""
    rows: list[dict[str, object]] = []
    for head_dim, causal in itertools.product(HEAD_DIMS_16BIT, (False, True)):
        config = forward16_config(head_dim, head_dim, "bf16", causal=causal)
        rows.append(
            {
                "head_dim": head_dim,
                "causal": causal,
                "tile_m": config.tile_m,
                "tile_n": config.tile_n,
                "kv_stages": config.kv_stages,
                "q_stages": config.q_stages,
                "o_direct": config.o_direct,
                "smem_bytes": config.smem_bytes,
            }
        )
    return rows


def all_backward16_configs() -> list[Bwd16Config]:
    """A sample of the 16-bit backward, as `all_forward16_configs`."""
    common = [
        backward16_config(head_dim, head_dim, "bf16", causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
    ]
    features = [
        backward16_config(head_dim, head_dim, "bf16", **{feature: True})
        for head_dim, feature in ((64, "window"), (128, "softcap"), (256, "alibi"), (128, "deterministic"))
    ]
    every = {"window": True, "softcap": True, "alibi": True, "deterministic": True}
    others = [backward16_config(head_dim, head_dim, "fp16", **every) for head_dim in (64, 128, 256)]
    others += [backward16_config(192, 128, "bf16", causal=True), backward16_config(40, 72, "bf16")]
    others += [
        backward16_config(96, 72, "fp16"),
        backward16_config(128, 128, "bf16", causal=True, seqlen_q=LONG_QUERIES_BACKWARD - 1),
        backward16_config(128, 128, "bf16", seqlen_q=SHORT_QUERIES_BACKWARD),
        backward16_config(128, 128, "bf16", causal=True, seqlen_q=SHORT_QUERIES_BACKWARD),
    ]
    varlen = [
        backward16_config(64, 64, "bf16", varlen=True),
        backward16_config(128, 128, "bf16", causal=True, deterministic=True, varlen=True),
        backward16_config(256, 256, "fp16", **every, varlen=True),
    ]
    return list(dict.fromkeys([*common, *features, *others, *varlen]))


# ------------------------------------------------------------------------------------------------------------
# Plan
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem16:
    """One call as plain data.

    Attributes:
        batch: sequences.
        seqlen_q, seqlen_k: queries and keys of each sequence.
        heads_q, heads_k: query heads, and the key/value heads that groups of them share.
        head_dim: of q and k.
        head_dim_v: of v and the output.
        dtype: float16 or bfloat16.
        window: (left, right) as asked for, right 0 with a causal mask; -1 for no end.
        softmax_scale: factor of q k^T.
        softcap: 0 for none.
        alibi, sinks: whether there are any.
        copied: names of the tensors that are copied before the launch.
        capability: CUDA compute capability of the tensors' device; None for CPU tensors and GPUs of other makers.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    window: tuple[int, int]
    softmax_scale: float
    softcap: float
    alibi: bool
    sinks: bool
    copied: tuple[str, ...]
    capability: tuple[int, int] | None

    @property
    def is_empty(self) -> bool:
        """Whether the result is known without arithmetic."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def mask(self) -> str:
        """In words."""
        left, right = self.window
        if self.window == (-1, -1):
            return "full"
        return "causal" if self.window == (-1, 0) else f"window ({left}, {right})"


@dataclass(frozen=True)
class Plan16:
    """What one call will do. `str(plan)` is the readable form.

    Attributes:
        backend: "sm90" (the Hopper kernel), "sm80" (the mma.sync kernel) or "reference" (torch in float32, with the
            scores in memory).
        kernel: name of the kernel; "reference" where none runs.
        config: what the kernel is compiled for; None where none runs.
        reasons: one sentence for each choice.
        work_tiles: tiles of query rows, which at most one CTA an SM takes in turns, or of mma.sync a CTA each; 0 where
            nothing is launched.
        problem: what was planned for.
    """

    backend: str
    kernel: str
    config: Fwd16Config | Fwd16Sm80Config | None
    reasons: tuple[str, ...]
    work_tiles: int
    problem: Problem16

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA of the kernel; 0 where none runs."""
        return 0 if self.config is None else self.config.smem_bytes

    def __str__(self) -> str:
        problem, config = self.problem, self.config
        rows = problem.batch * problem.seqlen_q * problem.heads_q
        features = [
            *([f"softcap {problem.softcap:g}"] if problem.softcap else []),
            *(["ALiBi"] if problem.alibi else []),
            *(["sinks"] if problem.sinks else []),
        ]
        lines = {
            "backend": self.backend,
            "kernel": self.kernel,
            "problem": f"batch {problem.batch}, seqlen_q {problem.seqlen_q}, seqlen_k {problem.seqlen_k}, "
            f"heads_q {problem.heads_q}, heads_k {problem.heads_k}, head_dim {problem.head_dim}, "
            + (f"head_dim_v {problem.head_dim_v}, " if problem.head_dim_v != problem.head_dim else "")
            + ", ".join([problem.mask, *features, str(problem.dtype)]),
        }
        if config is not None:
            limit = SMEM_LIMIT
            if isinstance(config, Fwd16Config):
                steps = (
                    "Q K^T of the next tile under the softmax of this one"
                    if config.overlap
                    else "in sequence"
                )
                lines["tiles"] = tiles_text(
                    config, steps + ("; warpgroups take turns at the tensor core" if config.pingpong else "")
                )
            else:
                limit = SM80_ARCHS[config.arch].cta_smem_bytes
                lines["tiles"] = (
                    f"{config.tile_m} queries x {config.tile_n} keys, {config.kv_stages} K/V stages, {config.warps} "
                    f"warps of {16 * config.m_tiles} rows, {config.ctas} CTAs an SM"
                    + (f"; rows of {config.pack_gqa} query heads packed" if config.pack_gqa > 1 else "")
                )
            lines["smem"] = f"{self.smem_bytes} of {limit} bytes"
            lines["work tiles"] = str(self.work_tiles)
        elif not problem.is_empty:
            lines["scores"] = f"{4 * rows * problem.seqlen_k / 2**20:.3g} MiB, several times"
        lines["results"] = (
            f"{2 * rows * problem.head_dim_v / 2**20:.3g} MiB out, {4 * rows / 2**20:.3g} MiB lse"
        )
        return report_text(lines, self.reasons)


def make_plan16(problem: Problem16, config: Fwd16Config | Fwd16Sm80Config | None, backend: str) -> Plan16:
    """The plan of a call that `flash_attn_func` has chosen `config` for; None where no kernel runs.

    Args:
        backend: as asked for, checked.
    """
    chosen, why = _backend16(problem.capability, backend)
    reasons = [why]
    if config is not None:
        sizes = (config.head_dim, config.head_dim_v, config.dtype)
        properties = (config.causal, config.window, config.softcap, config.alibi, config.sinks)
        rows = (problem.heads_q // problem.heads_k, problem.seqlen_q)
        again: Fwd16Config | Fwd16Sm80Config
        if isinstance(config, Fwd16Config):
            again, choices = forward16_choice(*sizes, *properties, *rows)
        else:
            again, choices = forward16_sm80_choice(*sizes, config.arch, *properties, *rows)
        assert again == config, "the kernel is not the one that the choices lead to"
        if problem.mask != "full" and not (config.causal or config.window):
            seen = "one query row sees every key" if problem.seqlen_q == 1 else "every query sees every key"
            reasons.append(f"{seen}: the mask hides nothing, so the kernel without one serves")
        elif problem.mask.startswith("window") and config.causal:
            reasons.append("the window's left end cuts nothing: the causal kernel serves")
        elif config.window:
            reasons.append("a tile visits the key blocks that its rows see, and no others")
        reasons += choices
        if problem.softmax_scale <= 0:
            reasons.append("softmax_scale is not positive: a pass over q changes its sign, or makes it 0")
        wants = "TMA wants an address and strides of multiples of 16 bytes, none 0"
        if isinstance(config, Fwd16Sm80Config):
            wants = "its copies want an address and strides of multiples of 16 bytes"
        reasons += [f"{name} is copied first: {wants}" for name in problem.copied]
    elif problem.is_empty:
        reasons.append(
            "nothing is launched: " + ("there are no keys" if problem.seqlen_k == 0 else "there is no output")
        )
    tiles = 0
    if config is not None:
        tiles = work_tiles(config, problem.batch, problem.seqlen_q, problem.heads_q, problem.heads_k)
    kernel = "reference" if config is None else config.name
    return Plan16(chosen, kernel, config, tuple(reasons), tiles, problem)


def _backend16(capability: tuple[int, int] | None, backend: str) -> tuple[str, str]:
    """(backend that runs, the reason), for what `flash.target` accepted."""
    if backend == "auto" and (capability is None or capability[0] != 9):
        if capability is None:
            return (
                "reference",
                f"the tensors are not on an NVIDIA GPU; the kernels need one of {CAPABILITIES}",
            )
        where = f"the GPU has compute capability {dotted(capability)}"
        if capability in ARCHS:
            return "sm80", f"{where}, without the WGMMA of the Hopper kernel"
        return "reference", f"{where}, and the kernels need {CAPABILITIES}"
    return choose_backend(capability, backend)
