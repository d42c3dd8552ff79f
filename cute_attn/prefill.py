"""Many queries against a KV cache: the 16-bit forward over rows of it, on Hopper.

The splitting kernel of `cute_attn.decode` shares the keys out over the GPU, but each block of its rows (queries times
heads of a group; 8 to 128 of them) reads all keys again. The forward has larger tiles and the tensor core's full rate.
Where it has fewer tiles than the GPU has SMs, the keys of a tile are shared out, too, and a small kernel adds up what
the shares give (`splits`). It wants rows of 16 bits one behind another: a contiguous 16-bit cache is that as it lies,
of pages and e4m3 codes a kernel makes them first (kernels/decode/unpack.py).

`choose` weighs one against the other by their times as `split_seconds` and `forward_seconds` count them. Both grow with
the keys, so the choice hardly depends on how many of them there are, which the host need not know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import flash, launch
from cute_attn.compile import compile_kernel
from cute_attn.kernels.config import DecodeConfig, Fwd16Config, UnpackConfig
from cute_attn.launch import launch_forward16_varlen
from cute_attn.plan16 import forward16_config
from cute_attn.problem import cutting_ends
from cute_attn.tiles import DTYPE_NAMES

# What the choice goes by: of one H200, the first two; the others are taken, not measured. The third is that of mma.sync
# products beside a softmax.
BYTES_PER_SECOND: Final = 4.1e12  # copied, or read by the splitting kernel (perf/tuning/run14_decode.txt)
FORWARD_FLOPS: Final = {64: 5.3e14, 128: 6.6e14, 256: 7.5e14}  # by columns (perf/records/forward_16bit.json)
SPLIT_FLOPS: Final = 3e14
LAUNCHES: Final = 1e-5  # seconds, of launches before the forward that wait for one another; taken
ADDING: Final = 5e-6  # seconds that adding up takes beside moving the parts, likewise
LEAST_BLOCKS: Final = 4  # steps of the forward in a share of a tile's keys at least
MOST_ROUNDS: Final = 4  # of shares over the SMs
GAIN: Final = 0.9  # of the splitting kernel's time that the forward may take

WORKSPACE: Final = 1 << 30  # bytes of rows that are made at a time, or those of one head of one sequence
ROWS_LIMIT: Final = 2**31 - 1  # rows are counted in int32
NO_END: Final = 1 << 30  # keys to a side that a query without a window sees


@dataclass(frozen=True)
class Prefill:
    """How the forward attends to a cache.

    Attributes:
        config: the forward kernel.
        unpack: what finds, or makes, its rows.
        stride: rows from one sequence to the next, in the cache or in the workspace.
        part: sequences and key heads that are attended to at a time: what the workspace has room for.
        window: (left, right), -1 without an end.
        splits: shares of the keys of a tile.
    """

    config: Fwd16Config
    unpack: UnpackConfig
    stride: int
    part: tuple[int, int]
    window: tuple[int, int]
    splits: int = 1

    @property
    def row_bytes(self) -> int:
        """Of K and V of one head, in the workspace."""
        return 2 * (self.unpack.head_dim + self.unpack.head_dim_v)

    @property
    def workspace_bytes(self) -> int:
        """Of the rows that are made at a time."""
        return math.prod(self.part) * self.stride * self.row_bytes if self.unpack.copy else 0


# ------------------------------------------------------------------------------------------------------------
# Which kernel
# ------------------------------------------------------------------------------------------------------------


def make_prefill(
    split: DecodeConfig,
    batch: int,
    heads_q: int,
    heads_k: int,
    seqlen_q: int,
    capacity: int,
    keys: int,
    window: tuple[int, int],
    rows: int | None,
    sms: int,
) -> Prefill:
    """How the forward would serve the call that the splitting kernel `split` serves.

    Args:
        capacity: slots of a sequence.
        keys: of them, that queries see at most.
        window: (left, right), -1 without an end.
        rows: from one sequence of the cache to the next, where that is rows as it lies; else None.
        sms: of the GPU.
    """
    left, right = cutting_ends(window, seqlen_q, capacity)
    causal = (left, right) == (-1, 0)
    config = forward16_config(
        split.head_dim,
        split.head_dim_v,
        split.dtype,
        causal=causal,
        window=not causal and (left, right) != (-1, -1),
        softcap=split.softcap,
        alibi=split.alibi,
        sinks=split.sinks,
        group=heads_q // heads_k,
        seqlen_q=seqlen_q,
        varlen=True,
    )
    unpack = UnpackConfig(
        split.head_dim,
        split.head_dim_v,
        split.dtype,
        cache=split.cache,
        scales=split.scales,
        paged=split.paging != "none",
        batch_idx=split.batch_idx,
        leftpad=split.leftpad,
        query_scale=split.query == "e4m3",
        copy=rows is None,
        arch=split.arch,
    )
    stride, part = rows, (batch, heads_k)
    if stride is None:
        stride = max(keys, 1)
        pairs = max(1, WORKSPACE // (2 * (split.head_dim + split.head_dim_v) * stride))  # heads of a sequence
        part = (min(batch, pairs // heads_k), heads_k) if pairs >= heads_k else (1, pairs)
    whole = Prefill(config, unpack, stride, part, (left, right))
    tiles = _tiles(whole, part[0] * part[1], heads_q // heads_k, seqlen_q)
    most = keys // (LEAST_BLOCKS * config.tile_n)
    counts = {min(rounds * sms // tiles, most) for rounds in range(1, MOST_ROUNDS + 1)}
    split_config = dataclasses.replace(config, split_keys=True)
    plans = [dataclasses.replace(whole, config=split_config, splits=n) for n in sorted(counts) if n > 1]
    return min(
        [whole, *plans], key=lambda plan: forward_seconds(plan, batch, heads_q, heads_k, seqlen_q, keys, sms)
    )


def _tiles(plan: Prefill, pairs: int, group: int, seqlen_q: int) -> int:
    """Tiles of so many pairs of a sequence and a key head."""
    config = plan.config
    return pairs * group // config.pack_gqa * -(-seqlen_q * config.pack_gqa // config.tile_m)


def split_seconds(config: DecodeConfig, batch: int, heads_k: int, rows: int, keys: int) -> float:
    """Time of the splitting kernel: each block of its rows reads all keys, from L2 as fast as from memory, or computes.

    rows: packed rows of a key head, queries times heads of a group.
    """
    columns = config.head_dim + config.head_dim_v
    reads = columns * config.element_bytes / BYTES_PER_SECOND
    computes = 2.0 * 16 * config.m_tiles * columns / SPLIT_FLOPS
    return batch * heads_k * -(-rows // config.rows) * keys * max(reads, computes)


def forward_seconds(
    plan: Prefill, batch: int, heads_q: int, heads_k: int, seqlen_q: int, keys: int, sms: int
) -> float:
    """Time of the forward: rounds of tiles, or of shares of their keys, or reading these, making the rows first, and
    adding up in the end."""
    config, group = plan.config, heads_q // heads_k
    columns = next(n for n in FORWARD_FLOPS if max(config.head_dim, config.head_dim_v) <= n)
    blocks = -(-keys // config.tile_n)
    of_share = min(-(-blocks // plan.splits) * config.tile_n, keys)  # keys
    of_tile = 2.0 * config.tile_m * of_share * (config.head_dim + config.head_dim_v)
    seconds = LAUNCHES
    for sequences, heads in parts(plan.part, batch, heads_k):
        pairs = (sequences.stop - sequences.start) * (heads.stop - heads.start)
        tiles = plan.splits * _tiles(plan, pairs, group, seqlen_q)
        read = pairs * keys * plan.row_bytes / BYTES_PER_SECOND
        seconds += max(-(-tiles // sms) * of_tile / (FORWARD_FLOPS[columns] / sms), read)
        if plan.splits > 1:
            seconds += ADDING + 2.0 * 4 * _part_floats(plan, pairs * group * seqlen_q) / BYTES_PER_SECOND
        if plan.unpack.copy:
            seconds += read * (
                1.5 if plan.unpack.cache == "e4m3" else 2.0
            )  # codes are half of the bytes of rows
    return seconds


def _part_floats(plan: Prefill, rows: int) -> int:
    """Of the workspace for what shares of the keys give to `rows` rows of heads: O, maximum and sum of each."""
    return plan.splits * rows * (plan.config.head_dim_v + 2)


def parts(part: tuple[int, int], batch: int, heads_k: int) -> Iterator[tuple[slice, slice]]:
    """(sequences, key heads) that are attended to one after another."""
    for b in range(0, batch, part[0]):
        for h in range(0, heads_k, part[1]):
            yield slice(b, min(b + part[0], batch)), slice(h, min(h + part[1], heads_k))


def choose(
    split: DecodeConfig,
    plan: Prefill,
    batch: int,
    heads_q: int,
    heads_k: int,
    seqlen_q: int,
    keys: int,
    sms: int,
) -> tuple[bool, str]:
    """(whether the forward attends, why).

    keys: of each sequence, as many as there may be.
    """
    rows = seqlen_q * (heads_q // heads_k)
    of_split = split_seconds(split, batch, heads_k, rows, keys)
    of_forward = forward_seconds(plan, batch, heads_q, heads_k, seqlen_q, keys, sms)
    taken = of_forward < GAIN * of_split
    why = (
        f"{rows} rows (queries times heads of a group) take the splitting kernel {-(-rows // split.rows)} passes over "
        f"the keys, about {1e6 * of_split:.3g} us at {keys} of them, and the forward"
        + (f", which shares the keys of a tile out {plan.splits} times," if plan.splits > 1 else "")
        + f" about {1e6 * of_forward:.3g} us"
    )
    return taken, why


def rows_between(k_cache: Tensor, v_cache: Tensor) -> int | None:
    """Rows from one sequence of a contiguous 16-bit cache to the next, if TMA can read the cache as rows; else None."""
    if not (flash._loadable(k_cache) and flash._loadable(v_cache)):
        return None
    if k_cache.shape[0] == 1:
        return k_cache.shape[1]
    (rows, more), (rows_v, more_v) = (divmod(x.stride(0), x.stride(1)) for x in (k_cache, v_cache))
    if more or more_v or rows != rows_v or rows < k_cache.shape[1]:
        return None
    return rows if k_cache.shape[0] * rows < ROWS_LIMIT else None


# ------------------------------------------------------------------------------------------------------------
# The launches
# ------------------------------------------------------------------------------------------------------------


def launch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Prefill,
    side: Mapping[str, Tensor | None],
    *,
    alibi_slopes: Tensor | None,
    softmax_scale: float,
    softcap: float,
    seqlen_new: int,
    sms: int,
) -> tuple[Tensor, Tensor]:
    """Run the compiled kernels of `plan`; arguments as those of `flash_attn_with_kvcache`, checked.

    Args:
        side: its tensors by name; cache_seqlens is one.
        alibi_slopes: (batch, heads_q).
        seqlen_new: keys of each sequence behind those that cache_seqlens counts.

    Returns:
        (out, lse): (batch, seqlen_q, heads_q, head_dim_v) of the forward's dtype, (batch, heads_q, seqlen_q) float32.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    heads_k, head_dim_v = v_cache.shape[2:]
    group, dtype = heads_q // heads_k, next(t for t, name in DTYPE_NAMES.items() if name == plan.config.dtype)
    q = q.to(dtype).flatten(0, 1)  # of e4m3 exactly; its scales go to K
    q = flash._loaded(q, flash._loadable(q))
    out = torch.empty((batch, seqlen_q, heads_q, head_dim_v), dtype=dtype, device=q.device)
    lse = torch.empty((heads_q, batch * seqlen_q), dtype=torch.float32, device=q.device)
    lse_out = lse.view(heads_q, batch, seqlen_q).transpose(0, 1)
    out_rows, sinks = out.flatten(0, 1), side["sinks"]
    for sequences, heads in parts(plan.part, batch, heads_k):
        rows = slice(sequences.start * seqlen_q, sequences.stop * seqlen_q)
        heads_of_q = slice(heads.start * group, heads.stop * group)
        k_rows, v_rows, places = _rows(
            k_cache, v_cache, plan, side, sequences, heads, seqlen_q, seqlen_new, sms
        )
        given = (q[rows, heads_of_q], k_rows, v_rows, places[2], places[0], plan.config)
        options: dict[str, Any] = {
            "seqused_k": places[1],
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "window": plan.window,
            "alibi_slopes": None if alibi_slopes is None else alibi_slopes[sequences, heads_of_q],
            "sinks": None if sinks is None else sinks[heads_of_q],
        }
        if plan.splits > 1:
            launch_forward16_split(
                *given,
                splits=plan.splits,
                out=out[sequences, :, heads_of_q],
                lse=lse_out[sequences, heads_of_q],
                sms=sms,
                **options,
            )
        else:
            launch_forward16_varlen(
                *given,
                only_starts=True,
                out=out_rows[rows, heads_of_q],
                lse=lse[heads_of_q, rows],
                **options,
            )
    return out, lse_out


def launch_forward16_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    config: Fwd16Config,
    *,
    seqused_k: Tensor,
    splits: int,
    softmax_scale: float,
    softcap: float,
    window: tuple[int, int],
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sms: int,
) -> None:
    """Run the compiled 16-bit forward of `config` over `splits` shares of the keys of each tile, and add up.

    Args: as those of `launch_forward16_varlen` with `only_starts`, but
        q: (batch * seqlen_q, heads_q, head_dim), of sequences of `seqlen_q` queries.
        out: (batch, seqlen_q, heads_q, head_dim_v).
        lse: (batch, heads_q, seqlen_q) float32.
    """
    batch, seqlen_q, heads_q, head_dim_v = out.shape
    device = q.device
    q_factor, *factors = launch._factors16(softmax_scale, softcap)
    q = q if q_factor is None else q * q_factor
    workspace = torch.empty(
        splits * q.shape[0] * heads_q * (head_dim_v + 2), dtype=torch.float32, device=device
    )
    compile_kernel(config)(
        q,
        k,
        v,
        out,
        lse,
        launch._zero(device).expand(batch, heads_q) if alibi_slopes is None else alibi_slopes,
        launch._zero(device).expand(heads_q) if sinks is None else sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        torch.empty((1,), dtype=torch.int32, device=device),  # counter of tiles
        workspace.data_ptr(),
        *factors,
        *launch._window_ends(window, seqlen_q, k.shape[0]),
        2,  # cu_seqlens_k says where keys begin, seqused_k how many there are
        sms,
        splits,
    )


def _rows(
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Prefill,
    side: Mapping[str, Tensor | None],
    sequences: slice,
    heads: slice,
    seqlen_q: int,
    seqlen_new: int,
    sms: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, places) of some sequences and key heads: rows (rows, heads, ...), and where they are, see unpack.py."""
    cfg, table, index = plan.unpack, side["block_table"], side["cache_batch_idx"]
    batch, heads_k = sequences.stop - sequences.start, heads.stop - heads.start
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])

    def of_sequences(name: str) -> Tensor | None:
        x = side[name]
        return None if x is None else x[sequences]

    def of_cache(x: Tensor) -> Tensor:
        return x[:, :, heads] if table is not None or index is not None else x[sequences, :, heads]

    def scales(name: str) -> Tensor | None:
        x = side[name]
        return None if x is None else x[sequences, heads] if x.dim() == 2 else of_cache(x)

    device = k_cache.device
    places = torch.empty((3, batch + 1), dtype=torch.int32, device=device)
    if cfg.copy:
        k_cache, v_cache = of_cache(k_cache), of_cache(v_cache)
        new = (batch * plan.stride, heads_k)
        dtype = next(t for t, name in DTYPE_NAMES.items() if name == cfg.dtype)
        k_rows, v_rows = (
            torch.empty((*new, d), dtype=dtype, device=device) for d in (cfg.head_dim, cfg.head_dim_v)
        )
        operands: tuple[Tensor | None, ...] = (k_cache, v_cache, k_rows, v_rows)
    else:
        k_rows, v_rows = (_as_rows(x, plan.stride) for x in (k_cache, v_cache))
        operands = (None,) * 4
    left = plan.window[0]
    chunks = batch * (-(-plan.stride // cfg.tile_keys) + 1)  # one more where a sequence begins inside of one
    compile_kernel(cfg)(
        *operands,
        places,
        *(
            of_sequences(name)
            for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
        ),
        *(scales(name) for name in ("k_descale", "v_descale", "q_descale")),
        seqlen_new,
        capacity,
        seqlen_q,
        NO_END if left < 0 else left,
        plan.stride,
        min(8 * sms, chunks),
    )
    return k_rows, v_rows, places


def _as_rows(x: Tensor, stride: int) -> Tensor:
    """A contiguous cache as (rows, heads, head_dim), where sequence i begins at row i * stride; a view."""
    rows = (x.shape[0] - 1) * stride + x.shape[1]
    return x.as_strided((rows, *x.shape[2:]), x.stride()[1:])
