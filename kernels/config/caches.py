"""Kernels of KV caches: attention, appending, rows for a forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from .common import SM80_ARCHS, SMEM_LIMIT, dims_name

E4M3_ARCHS = ("sm_89", "sm_90a", "sm_120")  # with conversions from and to e4m3
_DECODE_EXTRAS = ("softcap", "alibi", "sinks", "batch_idx", "leftpad")
# Keys of a warp's step: the depth of one m16n8k16 product P V, and what whole pages are made of
DECODE_KEYS = 16
SMEM_RESERVED = 1024  # bytes of shared memory that the system takes for each CTA


def turned_pieces(chunks: int) -> int:
    """Among how many neighbouring pieces of 16 bytes a row of `chunks` pieces changes their places in shared memory: a
    line of 128 bytes or half of one, so that eight rows meet all banks without gaps between them. 1: it does not."""
    return 8 if chunks % 8 == 0 else 4 if chunks % 4 == 0 else 1


def row_pitch(chunks: int) -> int:
    """Bytes between rows of `chunks` pieces in shared memory: an odd number of pieces where they keep their places.

    Rows that begin within a line of 128 bytes are copied 7% slower: each line of memory then goes to two of shared
    memory (perf/log.md, run 22).
    """
    return 16 * (chunks if turned_pieces(chunks) > 1 else chunks | 1)


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
    # Neighbouring key heads that a CTA takes as one of so many times the columns; 2 with a scale for each token alone
    heads: int = 1
    half_tile: bool = False  # a CTA takes 8 packed rows: the upper half of its only tile is left out
    warps: int = 4  # each with keys and a ring of its own
    stages: int = 3  # steps of the ring, of which one is computed on
    row_ends: bool = False  # rows see different keys: causal or a window, and more than one query
    softcap: bool = False  # scores go through softcap * tanh(score / softcap)
    alibi: bool = False  # a bias of -slope * |i + seqlen_k - seqlen_q - j|
    sinks: bool = False  # a logit for each head that takes its share of the softmax and has no value
    batch_idx: bool = False  # a sequence of the cache for each of q
    leftpad: bool = False  # sequences begin at a slot of their own
    whole: bool = False  # each CTA has a unit of its own, so there are no parts: Shares.splits is 1
    # Each CTA has one of Shares.splits shares of a unit, more than one: every splits-th tile
    fixed: bool = False
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
    def k_columns(self) -> int:
        """Of a row of K that a CTA reads."""
        return self.heads * self.head_dim

    @property
    def v_columns(self) -> int:
        return self.heads * self.head_dim_v

    @property
    def k_steps(self) -> int:
        """Products that a row of K takes, of 16 columns."""
        return -(-self.k_columns // 16)

    @property
    def n_tiles(self) -> int:
        """Products that a row of V takes, of 8 columns."""
        return self.v_columns // 8

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
        return self.k_columns * self.element_bytes // 16

    @property
    def v_chunks(self) -> int:
        return self.v_columns * self.element_bytes // 16

    @property
    def whole_lines(self) -> bool:
        """Whether rows of K and V are whole lines of 128 bytes of L2, so that no heads are taken in step."""
        return self.k_chunks % 8 == 0 and self.v_chunks % 8 == 0

    @property
    def k_pitch(self) -> int:
        """Bytes between rows of K in shared memory, see `row_pitch`."""
        return row_pitch(self.k_chunks)

    @property
    def v_pitch(self) -> int:
        return row_pitch(self.v_chunks)

    @property
    def scale_bytes(self) -> int:
        """Of a step: a float32 for each key of K and of V, of each head."""
        return 8 * DECODE_KEYS * self.heads if self.token_scales else 0

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
        return self.m_tiles * max(self.k_columns, self.v_columns) > 128

    @property
    def crowded(self) -> bool:
        """Whether registers are short: then the assembler must not move loads up, for it spills what they displace."""
        extras = self.row_ends or any(getattr(self, name) for name in _DECODE_EXTRAS)
        uneven = 32 % self.k_chunks or 32 % self.v_chunks  # addresses that do not follow one from another
        return self.q_in_smem and bool(extras or uneven or (self.warps == 2 and self.paging != "none"))

    @property
    def lean(self) -> bool:
        """Whether a lane's addresses go on from step to step: it takes the same pieces of whole rows, and no page is
        looked up. That wants a few registers more, which several tiles of rows do not leave."""
        even = 32 % self.k_chunks == 0 and 32 % self.v_chunks == 0
        return even and self.paging == "none" and self.m_tiles == 1 and not self.crowded

    @property
    def early(self) -> bool:
        """Whether a CTA's first copies start before its sequence's length is known: where they begin is."""
        return (self.whole or self.fixed) and self.lean and not (self.leftpad or self.batch_idx)

    @property
    def chains(self) -> int:
        """Accumulators that the products Q K^T of a step alternate between: a product waits for the one before it in
        its own."""
        return 2 if self.lean and self.fp8 and self.k_steps >= 4 else 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: its warps', and Q, or 16 bytes into which an odd row's last load reaches."""
        q = 16 * self.m_tiles * 2 * (16 * self.k_steps) if self.q_in_smem else 16
        return self.warps * self.warp_bytes + q

    @property
    def ctas_by_smem(self) -> int:
        """CTAs for which an SM has shared memory."""
        return SM80_ARCHS[self.arch].smem_bytes // (self.smem_bytes + SMEM_RESERVED)

    @property
    def name(self) -> str:
        cache = self.dtype if self.cache == "16bit" else f"{self.dtype}_{self.cache}_{self.scales}"
        cache += "" if self.query == "16bit" else f"_q_{self.query}"
        paging = "" if self.paging == "none" else f"_paged_{self.paging}"
        mask = "_ends" if self.row_ends else ""
        mask += "".join(f"_{name}" for name in _DECODE_EXTRAS if getattr(self, name))
        tiles = f"m{'half' if self.half_tile else self.m_tiles}w{self.warps}s{self.stages}"
        tiles += "_pair" if self.heads == 2 else ""
        tiles += "_whole" if self.whole else "_fixed" if self.fixed else ""
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
        if self.whole and self.fixed:
            raise ValueError("fixed must be False with whole")
        if self.heads not in (1, 2):
            raise ValueError(f"heads must be 1 or 2, got {self.heads}")
        if self.heads == 2 and not (self.token_scales and self.query == "16bit" and self.lean):
            raise ValueError(
                "heads must be 1 but for a cache of e4m3 without pages, with a scale for each token and a 16-bit query"
            )
        if self.m_tiles * max(self.k_columns, self.v_columns) > 256:
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
