"""Adds up what CTAs left of rows whose keys they shared (see split.py), and the end of a row that both kernels have."""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.floats import bf16_pair, fp16_pair
from ..common.scheduler import share_start
from ..config import DecodeConfig, Fwd16Config
from .split import Divisors, Lengths, Shares, Splits, share_of

LOG2_E = math.log2(math.e)
WARPS = 4  # of a CTA, a row each


class Results(NamedTuple):
    """What the call returns, and the workspace for rows whose keys CTAs share."""

    out: cute.Tensor  # (batch, seqlen_q, heads_q, head_dim_v)
    lse: cute.Tensor  # (batch, heads_q, seqlen_q) float32
    sinks: cute.Tensor | None  # (heads_q,) float32
    partial_ml: cute.Tensor  # (slots, rows, 2) float32: maximum and sum
    partial_o: cute.Tensor  # (slots, rows, head_dim_v) float32
    factor: Float32  # from the unit of maxima to octaves


class Row(NamedTuple):
    """A row of the output."""

    batch: Int32
    query: Int32
    head: Int32  # of Q


@cute.jit
def row_of(batch: Int32, head: Int32, row: Int32, group: cute.FastDivmodDivisorV2) -> Row:
    """Packed row `row` of a key head, which `group` query heads have."""
    query, rest = divmod(row, group)
    return Row(batch, query, head * group.divisor + rest)


@cute.jit
def finish(
    cfg: cutlass.Constexpr,
    results: Results,
    at: Row,
    column: Int32,
    top: Float32,
    total: Float32,
    o: cute.Tensor,  # (4,) float32: columns from `column` on
):
    """O over the sum, and lse: of four columns of a row. top is its largest score."""
    reference = (Float32(0.0) if top == -Float32.inf else top) * results.factor
    share = Float32(1.0)
    if const_expr(cfg.sinks):
        sink = results.sinks[at.head] * Float32(LOG2_E)
        own = -Float32.inf if top == -Float32.inf else reference
        largest = cute.arch.fmax(own, sink, nan=True)
        largest = Float32(0.0) if largest == -Float32.inf else largest  # a sink of -inf takes no share
        share = cute.math.exp2(own - largest, fastmath=True)
        total = total * share + cute.math.exp2(sink - largest, fastmath=True)
        reference = largest
    inverse = Float32(0.0) if total == Float32(0.0) else share * cute.arch.rcp_approx(total)
    pair = bf16_pair if const_expr(cfg.dtype == "bf16") else fp16_pair
    words = cute.make_rmem_tensor(2, Uint32)
    for i in cutlass.range_constexpr(2):
        words[i] = pair(o[2 * i] * inverse, o[2 * i + 1] * inverse)
    target = cute.domain_offset((at.batch, at.query, at.head, column), results.out).iterator.toint()
    target = cute.make_ptr(Uint32, target, cute.AddressSpace.gmem, assumed_align=8)
    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))
    if column == 0:
        lse = (reference + cute.math.log2(total, fastmath=True)) * Float32(math.log(2.0))
        results.lse[at.batch, at.head, at.query] = lse


class AddUp:
    """The weighted sum of a row's parts, by a warp; what its subclasses launch."""

    def __init__(self, cfg: DecodeConfig | Fwd16Config, at_once: int):
        """at_once: parts that are loaded before one is added, a divisor of 32. For many parts of few rows it is the
        latency of loads that counts, for few parts of many rows that none is loaded in vain."""
        self.cfg = cfg
        self.at_once = at_once
        self.vectors = -(-cfg.head_dim_v // 128)  # of a lane, four columns each

    @cute.jit
    def add_up(
        self,
        results: Results,
        at: Row,
        place: Int32,  # of the row in its slots
        slot: Int32,  # of the first part
        apart: Int32,  # slots from one part to the next
        count: Int32,
        later: Int32,  # what the first part's slot is further on
        lane: Int32,
    ):
        """A row's parts, one for each of `count` slots."""
        m_ml, m_o = results.partial_ml, results.partial_o
        top = -Float32.inf
        for i in cutlass.range(lane, count, 32, unroll=1):
            top = cute.arch.fmax(top, m_ml[slot + i * apart + (later if i == 0 else 0), place, 0])
        for step in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
        finite = Float32(0.0) if top == -Float32.inf else top
        total = Float32(0.0)
        o = cute.make_rmem_tensor((4, self.vectors), Float32)
        o.fill(0.0)
        for i0 in cutlass.range(0, count, 32, unroll=1):
            i = i0 + lane
            weight = Float32(0.0)
            if i < count:
                part = slot + i * apart + (later if i == 0 else 0)
                weight = cute.math.exp2((m_ml[part, place, 0] - finite) * results.factor, fastmath=True)
                total += weight * m_ml[part, place, 1]
            for j0 in cutlass.range(0, cutlass.min(count - i0, 32), self.at_once, unroll=1):
                weights = [cute.arch.shuffle_sync(weight, j0 + j) for j in range(self.at_once)]
                for v in cutlass.range_constexpr(self.vectors):
                    column = 4 * (32 * v + lane)
                    if column < self.cfg.head_dim_v:
                        pieces = cute.make_rmem_tensor((4, self.at_once), Float32)
                        for j in cutlass.range_constexpr(self.at_once):
                            # past the last part that one again, which is not added
                            at_j = cutlass.min(i0 + j0 + j, count - 1)
                            part = slot + at_j * apart + (later if at_j == 0 else 0)
                            source = cute.domain_offset((part, place, column), m_o).iterator.toint()
                            source = cute.make_ptr(Float32, source, cute.AddressSpace.gmem, assumed_align=16)
                            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), pieces[None, j])
                        for j in cutlass.range_constexpr(self.at_once):
                            inside = i0 + j0 + j < count  # else of weight 0, but 0 times infinity is NaN
                            for e in cutlass.range_constexpr(4):
                                o[e, v] = o[e, v] + weights[j] * pieces[e, j] if inside else o[e, v]
        for step in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        for v in cutlass.range_constexpr(self.vectors):
            column = 4 * (32 * v + lane)
            if column < self.cfg.head_dim_v:
                finish(self.cfg, results, at, column, top, total, o[None, v])


class Combine(AddUp):
    """A warp for each packed row of the splitting kernel, where it has several parts."""

    def __init__(self, cfg: DecodeConfig):
        super().__init__(cfg, at_once=16)
        self.splits = Splits(cfg)
        self.pdl = cfg.arch == "sm_90a"

    @cute.jit
    def launch(
        self, results: Results, lengths: Lengths, shares: Shares, by: Divisors, heads_k: Int32, stream
    ):
        batch, seqlen_q, heads_q = results.out.shape[0], results.out.shape[1], results.out.shape[2]
        rows = batch * seqlen_q * heads_q
        *tensors, factor = results
        self.kernel(*tensors, lengths, shares, by, factor, heads_k).launch(
            grid=[cute.ceil_div(rows, WARPS), 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            # as the splitting kernel: an SM that has to divide its memory anew first ends what it runs
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        m_out: cute.Tensor,
        m_lse: cute.Tensor,
        m_sinks,
        m_ml: cute.Tensor,
        m_o: cute.Tensor,
        lengths: Lengths,
        shares: Shares,
        by: Divisors,
        factor: Float32,
        heads_k: Int32,
    ):
        cfg = self.cfg
        results = Results(m_out, m_lse, m_sinks, m_ml, m_o, factor)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tid % 32
        index = cute.arch.make_warp_uniform(cta * WARPS + tid // 32)
        splits = shares.splits
        packed = m_out.shape[1] * by.group.divisor  # rows of a key head
        units = by.units.divisor
        if index < m_out.shape[0] * heads_k * packed:
            b = index // (heads_k * packed)
            head = index // packed - b * heads_k
            row = index - (b * heads_k + head) * packed
            block, place = row // cfg.rows, row % cfg.rows
            tiles = self.splits.tiles_of(lengths, b)
            slot, count, later, apart = Int32(0), Int32(0), Int32(0), Int32(1)
            if splits == 0:
                total, before, longest = self.splits.tiles_before(lengths, b, units)
                if self.splits.whole(total, longest, units * m_out.shape[0], by) == 0:
                    total = total // by.together
                    of_side, side = divmod(head, by.together)
                    first = before // by.together + (of_side * by.blocks.divisor + block) * tiles
                    sharers = self.splits.sharers(total, by)
                    share = share_of(total, sharers, first)
                    count = share_of(total, sharers, first + tiles - 1) - share + 1
                    # The first of the CTAs may have begun with an earlier unit: then its part is in its other slot.
                    later = by.ctas.divisor if share_start(total, sharers, share) < first else Int32(0)
                    apart = by.together.divisor
                    slot = share * apart + side
            else:
                slot = (b * units + head * by.blocks.divisor + block) * splits
                count = cutlass.min(splits, tiles)
            if const_expr(self.pdl):
                # For the end of the splitting grid: all its CTAs have written their slots, which are read from here on.
                cute.arch.griddepcontrol_wait()
            if count > 1:
                at = row_of(b, head, row, by.group)
                self.add_up(results, at, place, slot, apart, count, later, lane)


class CombineShares(AddUp):
    """A warp for each row and head of the 16-bit forward over shares of the keys (sm90/fwd_16bit.py).

    Parts are (shares, rows x heads, ...), those of a row and head equally far from one another; all count, and those of
    empty shares have no weight.
    """

    def __init__(self, cfg: Fwd16Config):
        super().__init__(cfg, at_once=4)

    @cute.jit
    def launch(self, results: Results, splits: Int32, stream):
        batch, seqlen_q, heads_q = results.out.shape[0], results.out.shape[1], results.out.shape[2]
        *tensors, factor = results
        self.kernel(*tensors, factor, splits).launch(
            grid=[cute.ceil_div(batch * seqlen_q * heads_q, WARPS), 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        m_out: cute.Tensor,
        m_lse: cute.Tensor,
        m_sinks,
        m_ml: cute.Tensor,
        m_o: cute.Tensor,
        factor: Float32,
        splits: Int32,
    ):
        results = Results(m_out, m_lse, m_sinks, m_ml, m_o, factor)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        index = cute.arch.make_warp_uniform(cta * WARPS + tid // 32)
        seqlen_q, heads_q = m_out.shape[1], m_out.shape[2]
        row = index // heads_q
        batch = row // seqlen_q
        # For the end of the forward, which has written all parts.
        cute.arch.griddepcontrol_wait()
        if batch < m_out.shape[0]:
            at = Row(batch, row - batch * seqlen_q, index - row * heads_q)
            self.add_up(results, at, index, Int32(0), Int32(1), splits, Int32(0), tid % 32)
