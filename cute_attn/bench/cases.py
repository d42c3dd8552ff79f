"""The shapes that the benchmark times, their inputs, and a sampled float64 check of every output.

The default grid is that of the FlashAttention papers (FlashAttention-2, arXiv 2307.08691, section 4.1, and
FlashAttention-3, arXiv 2407.08608, section 4.1): 16384 tokens in all, heads times head_dim = 2048.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
TOKENS = 16384
HIDDEN = 2048

NO_WINDOW = (-1, -1)
WINDOW = (1024, 0)  # a causal sliding window
WINDOW_SEQLEN = 16384
CACHE_SEQLENS = (4096, 32768)  # queries over a cache, and keys of it
CACHE_HEADS = (64, 8)
CACHE_PAGES = (None, 64)
MIX_TOKENS = 65536
MIX_LENGTHS = (16, 16384)  # shortest and longest sequence of the mix

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Largest relative RMSE of any one sampled row of a right output on N(0, 1) inputs is about 0.1 for 8-bit
# operands and 0.01 for 16-bit ones; a wrong mask, scale or tile gives about 1.
WORST_ROW_LIMIT = {"fp8": 0.35, "bf16": 0.05, "fp16": 0.05}


@dataclass(frozen=True)
class Case:
    """One cell of the grid. With `lengths`, sequences of these lengths lie one behind another in a batch of tokens:
    `batch` is their number and `seqlen_q` = `seqlen_k` the largest."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    window: tuple[int, int] = NO_WINDOW  # (left, right), -1 for no end; right 0 with a causal mask
    lengths: tuple[int, ...] = ()
    page_size: int | None = None  # slots of a page, where K and V are in a paged cache
    full: bool = False  # in phase decode: nobody is given lengths, as caches are full

    @property
    def flops(self) -> float:
        """Floating-point operations as the papers count them, with half of S for a causal mask; with a window, of the
        pairs that it leaves."""
        operations = 4.0 * self.head_dim * self.heads_q
        if self.window != NO_WINDOW:
            pairs = window_pairs(self.seqlen_q, self.seqlen_k, self.window)
            return operations * pairs * self.batch
        if self.lengths:
            full = operations * math.fsum(length * length for length in self.lengths)
        else:
            full = operations * self.seqlen_q * self.seqlen_k * self.batch
            if self.causal and self.over_cache:  # half of the last keys alone
                return full - operations * self.seqlen_q * (self.seqlen_q - 1) / 2 * self.batch
        return full / 2 if self.causal else full

    @property
    def over_cache(self) -> bool:
        """Whether K and V are a cache that had keys before these queries."""
        return self.seqlen_q < self.seqlen_k

    @property
    def score_bytes(self) -> int:
        """Bytes of the float32 score matrix S that an unfused implementation holds in memory."""
        return 4 * self.batch * self.heads_q * self.seqlen_q * self.seqlen_k

    @property
    def elements(self) -> tuple[int, int]:
        """Elements of Q (and of the output), and of K (and of V)."""
        return (
            self.batch * self.seqlen_q * self.heads_q * self.head_dim,
            self.batch * self.seqlen_k * self.heads_k * self.head_dim,
        )

    @property
    def fields(self) -> dict[str, int | bool]:
        """The case as fields of a record's row."""
        fields: dict[str, int | bool] = {
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "heads_q": self.heads_q,
            "heads_k": self.heads_k,
            "head_dim": self.head_dim,
            "causal": self.causal,
        }
        if self.window != NO_WINDOW:
            fields |= {"window_left": self.window[0], "window_right": self.window[1]}
        if self.lengths:
            fields |= {"tokens": sum(self.lengths)}
        if self.page_size is not None:
            fields |= {"page_size": self.page_size}
        if self.full:
            fields |= {"full_caches": True}
        return fields

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        mask += "" if self.window == NO_WINDOW else f" window {self.window[0]},{self.window[1]}"
        heads = str(self.heads_q) if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        seqlen = f"{min(self.lengths)} to {self.seqlen_k}" if self.lengths else f"{self.seqlen_k}"
        pages = "" if self.page_size is None else f" pages of {self.page_size}"
        lengths = " without lengths" if self.full else ""
        return f"d {self.head_dim} {mask} seqlen {seqlen} batch {self.batch} heads {heads}{pages}{lengths}"


def window_pairs(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> int:
    """Pairs of a query and a key that a window (left, right) leaves, -1 for no end; aligned bottom-right."""
    left, right = window
    pairs = 0
    for query in range(seqlen_q):
        at = query + seqlen_k - seqlen_q
        first = 0 if left < 0 else max(0, at - left)
        last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, at + right)
        pairs += max(0, last + 1 - first)
    return pairs


def grid(
    *,
    seqlens: Iterable[int] = SEQLENS,
    head_dims: Iterable[int] = HEAD_DIMS,
    causal: Iterable[bool] = (False, True),
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
) -> list[Case]:
    """The cells, ordered by head_dim, mask and length.

    Args:
        tokens: tokens in all; the batch is tokens // seqlen, at least 1, unless `batch` is given.
        hidden: heads * head_dim, or the next multiple of head_dim below it; `heads` overrides it.
        heads_k: heads of K and V, default as many as Q has.

    Raises:
        ValueError: a size is not positive, head_dim exceeds hidden, or heads_k does not divide heads.
    """
    seqlens, head_dims, causal = list(seqlens), list(head_dims), list(causal)
    sizes = {"seqlen": seqlens, "head_dim": head_dims, "tokens": [tokens], "hidden": [hidden]}
    sizes |= {
        name: [value]
        for name, value in (("batch", batch), ("heads", heads), ("heads_k", heads_k))
        if value is not None
    }
    for name, values in sizes.items():
        if any(value < 1 for value in values):
            raise ValueError(f"{name} must be at least 1, got {values}")
    cases = []
    for head_dim in head_dims:
        if heads is None and hidden < head_dim:
            raise ValueError(f"hidden must be at least head_dim, got hidden {hidden} and head_dim {head_dim}")
        heads_q = hidden // head_dim if heads is None else heads
        kv = heads_q if heads_k is None else heads_k
        if heads_q % kv:
            raise ValueError(f"heads_k must divide the {heads_q} heads of Q at head_dim {head_dim}, got {kv}")
        for mask in causal:
            for seqlen in seqlens:
                count = max(1, tokens // seqlen) if batch is None else batch
                cases.append(Case(count, seqlen, seqlen, heads_q, kv, head_dim, mask))
    return cases


def mixed_lengths(
    tokens: int = MIX_TOKENS, lengths: tuple[int, int] = MIX_LENGTHS, seed: int = 0
) -> tuple[int, ...]:
    """Lengths of sequences of `tokens` in all: their logarithms are uniform from that of the shortest to that of the
    longest, the last one is what is left. A seed gives the same lengths on every machine."""
    generator = random.Random(seed)
    low, high = map(math.log, lengths)
    found: list[int] = []
    while (left := tokens - sum(found)) > 0:
        found.append(min(left, round(math.exp(generator.uniform(low, high)))))
    return tuple(found)


def prefill(
    *,
    head_dims: Iterable[int] = HEAD_DIMS,
    causal: Iterable[bool] = (False, True),
    hidden: int = HIDDEN,
    heads: int | None = None,
    heads_k: int | None = None,
) -> list[Case]:
    """Cells beyond the papers' grid: a mix of lengths, and under a causal mask a sliding window over a long sequence,
    and many queries over a cache, contiguous and in pages.

    Args, Raises: as `grid`; over a cache, heads default to 64 and heads_k to 8, or to `heads` where that is given.
    """
    sizes = {"hidden": hidden, "heads": heads, "heads_k": heads_k}
    masks, lengths = list(causal), mixed_lengths()
    cases = []
    for case in grid(seqlens=[WINDOW_SEQLEN], head_dims=head_dims, causal=masks, **sizes):  # type: ignore[arg-type]
        longest = max(lengths)
        cases.append(replace(case, batch=len(lengths), seqlen_q=longest, seqlen_k=longest, lengths=lengths))
        if case.causal:
            cases.append(replace(case, window=WINDOW))
            heads_q, kv = cache_heads(heads, heads_k)
            seqlen_q, seqlen_k = CACHE_SEQLENS
            for pages in CACHE_PAGES:
                cases.append(Case(1, seqlen_q, seqlen_k, heads_q, kv, case.head_dim, True, page_size=pages))
    return cases


def cache_heads(heads: int | None, heads_k: int | None) -> tuple[int, int]:
    """Heads of Q and of K of calls on a cache, by the options of the same names.

    Raises:
        ValueError: heads_k does not divide heads.
    """
    heads_q = CACHE_HEADS[0] if heads is None else heads
    kv = heads_k if heads_k is not None else CACHE_HEADS[1] if heads is None else heads
    if heads_q % kv:
        raise ValueError(f"heads_k must divide the {heads_q} heads of Q, got {kv}")
    return heads_q, kv


def in_pages(x: Tensor, page_size: int, order: Tensor) -> Tensor:
    """A cache (batch, seqlen, heads, ...) of whole pages as (pages, page_size, heads, ...); page i goes to order[i].

    Raises:
        ValueError: seqlen is no multiple of page_size.
    """
    if x.shape[1] % page_size:
        raise ValueError(f"page_size must divide the seqlen, {x.shape[1]}, got {page_size}")
    pages = x.reshape(-1, page_size, *x.shape[2:])
    out = torch.empty_like(pages)
    raw, source = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (out, pages))
    raw[order] = source  # not all of torch indexes e4m3
    return out


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) Q (batch, seqlen_q, heads_q, head_dim), K and V (batch, seqlen_k, heads_k, head_dim); with lengths
    (tokens, heads, head_dim)."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(seqlen: int, heads: int) -> Tensor:
        rows = (sum(case.lengths),) if case.lengths else (case.batch, seqlen)
        shape = (*rows, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    return (
        normal(case.seqlen_q, case.heads_q),
        normal(case.seqlen_k, case.heads_k),
        normal(case.seqlen_k, case.heads_k),
    )


@dataclass(frozen=True)
class SampledRows:
    """Exact attention output of some rows of some heads."""

    heads: tuple[tuple[int, int], ...]  # (batch, query head)
    rows: Tensor  # (rows,) int64, query positions
    values: Tensor  # (heads, rows, head_dim) float64
    causal: bool


@dataclass(frozen=True)
class OutputError:
    """Error of an output on the sampled rows."""

    rmse: float
    rel_rmse: float  # rmse / root mean square of the exact values
    worst_row: float  # the largest relative RMSE of one row
    finite: bool  # of the whole output, not of the sample alone


def sample(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] = NO_WINDOW,
    lengths: Sequence[int] = (),
) -> SampledRows:
    """Exact attention in float64 for up to 6 heads and about 48 rows: tile edges, both ends, an even spread.

    q is (batch, seqlen_q, heads_q, head_dim); k and v are (batch, seqlen_k, heads_k, head_dim). The mask is
    aligned to the bottom right and the scale is 1/sqrt(head_dim). The cost is that of about 300 rows, small
    beside the attention itself. With `lengths` tensors are (tokens, heads, head_dim): the rows are those of the first,
    the last, the shortest, the longest and the middle sequence, in a batch of one.
    """
    if lengths:
        return _sample_mix(q, k, v, lengths, causal=causal, window=window)
    batch, seqlen_q, heads_q, _ = q.shape
    pairs = batch * heads_q
    heads = tuple(divmod(pair, heads_q) for pair in sorted({round(i * (pairs - 1) / 5) for i in range(6)}))
    rows = sampled_positions(seqlen_q, q.device)
    return SampledRows(heads, rows, exact_rows(q, k, v, heads, rows, causal=causal, window=window), causal)


def sampled_positions(seqlen_q: int, device: torch.device) -> Tensor:
    """Tile edges, both ends, an even spread."""
    positions = {0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256}
    positions |= {seqlen_q - 1 - position for position in positions}
    positions |= {round(i * (seqlen_q - 1) / 23) for i in range(24)}
    return torch.tensor(sorted(row for row in positions if 0 <= row < seqlen_q), device=device)


def _sample_mix(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, causal: bool, window: tuple[int, int]
) -> SampledRows:
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    chosen = sorted({0, len(lengths) - 1, order[0], order[-1], order[len(order) // 2]})
    starts = [0, *itertools.accumulate(lengths)]
    heads = tuple((0, head) for head in sorted({0, q.shape[1] // 2, q.shape[1] - 1}))
    rows, values = [], []
    for i in chosen:
        of_q, of_k, of_v = (x[starts[i] : starts[i + 1]].unsqueeze(0) for x in (q, k, v))
        found = sampled_positions(lengths[i], q.device)
        rows.append(found + starts[i])
        values.append(exact_rows(of_q, of_k, of_v, heads, found, causal=causal, window=window))
    return SampledRows(heads, torch.cat(rows), torch.cat(values, dim=1), causal)


def exact_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Iterable[tuple[int, int]],
    rows: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] = NO_WINDOW,
) -> Tensor:
    """Attention in float64 of the given (batch, query head) pairs and query rows: (heads, rows, head_dim)."""
    seqlen_q, heads_q, head_dim = q.shape[1:]
    seqlen_k, heads_k = k.shape[1], k.shape[2]
    left, right = window[0], 0 if causal else window[1]
    behind = torch.arange(seqlen_k, device=q.device)[None, :] - (rows[:, None] + (seqlen_k - seqlen_q))
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left >= 0:
        hidden |= behind < -left
    if right >= 0:
        hidden |= behind > right
    values = []
    for b, h in heads:
        kv = h // (heads_q // heads_k)
        score = (q[b, rows, h].double() @ k[b, :, kv].double().T) / math.sqrt(head_dim)
        score = score.masked_fill(hidden, -math.inf)
        top = score.amax(dim=1, keepdim=True)
        weight = torch.exp(score - torch.where(top.isinf(), 0.0, top))  # a row without keys: all weights 0
        total = weight.sum(dim=1, keepdim=True)
        values.append((weight @ v[b, :, kv].double()) / torch.where(total == 0, 1.0, total))
    return torch.stack(values)


def compare(got: Tensor, exact: Tensor, *, finite: bool = True) -> OutputError:
    """Error of `got` against `exact`, both (heads, rows, head_dim)."""
    difference = got.double() - exact
    row_error = difference.square().mean(dim=-1).sqrt()
    row_size = exact.square().mean(dim=-1).sqrt()
    # A row without keys is exactly 0; any other value there is infinitely wrong.
    row_relative = torch.where(row_size > 0, row_error / row_size, torch.where(row_error > 0, math.inf, 0.0))
    rmse = difference.square().mean().sqrt()
    size = exact.square().mean().sqrt()
    worst = row_relative.max()
    return OutputError(
        rmse=float(rmse),
        rel_rmse=float(rmse / size) if size > 0 else (0.0 if rmse == 0 else math.inf),
        worst_row=float(worst),
        finite=finite and bool(worst.isfinite()),
    )


def output_error(out: Tensor, reference: SampledRows) -> OutputError:
    """Error on the sampled rows of an output of any float dtype: (batch, seqlen_q, heads_q, head_dim), or (tokens,
    heads_q, head_dim)."""
    out = out if out.dim() == 4 else out.unsqueeze(0)
    picked = torch.stack([out[b, :, h].float()[reference.rows] for b, h in reference.heads])
    # 8-bit floats have no isfinite of their own.
    finite = all(bool((part.float() if part.itemsize == 1 else part).isfinite().all()) for part in out)
    return compare(picked, reference.values, finite=finite)
