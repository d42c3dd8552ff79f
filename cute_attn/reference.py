"""Attention in float64: the oracle of the tests, and the method explained in code that runs.

For each query head, with the scores that a mask hides set to -inf::

    S = softmax_scale * Q K^T      P = softmax(S)      O = P V      lse = log(rowsum(exp(S)))

* `attention`: the definition, S and P in memory for a chunk of rows at a time. The oracle.
* `standard_attention_io`: the same with S and P in main memory, counted (FlashAttention, Algorithm 0).
* `flash_attention_1`: tiles, K and V in the outer loop (FlashAttention, Algorithm 1).
* `flash_attention_2`: tiles, Q in the outer loop, one division at the end (FlashAttention-2, Algorithm 1).
* `attention_backward`: gradients, with P recomputed from lse (FlashAttention-2, Algorithm 2).

Why tiles: with S and P in main memory (HBM), each of seqlen_q * seqlen_k scores crosses the memory bus four
times on its way to O. But a softmax can be built piece by piece: keep for each row the maximum m so far, the
sum l of exp(s - m) and the sum of exp(s - m) * v, and when a tile raises the maximum to m', multiply both
sums by exp(m - m') and go on (online softmax: Milakov and Gimelshein, arXiv 1805.02867). Nothing is
approximated, and no score leaves the chip.

Conventions: q, k, v, out and their gradients are (batch, seqlen, heads, head_dim); lse, a natural logarithm,
is (batch, heads_q, seqlen_q). Any real dtype comes in; float64 is computed and returned, on the device of q.
Query head h reads key head h // (heads_q / heads_k). The causal mask is aligned bottom-right: query i sees
key j iff j <= i + seqlen_k - seqlen_q. A row that sees no key has output 0, lse -inf and gradient 0. The
value of a hidden key is multiplied by 0, not left out, so a NaN or an infinity in it reaches the output.

Papers: FlashAttention, arXiv 2205.14135; FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

_CHUNK_SCORES = 1 << 24  # scores that `attention` holds at once unless told: 128 MiB, with a few copies alive


@dataclass(frozen=True)
class IOCount:
    """Elements moved between HBM and on-chip memory, by tensor name, over all batches and query heads.

    A (batch, query head) pair is one unit of work, as it is one thread block's on a GPU, so query heads that
    share a key head each read it for themselves. Caches between the two memories are not modelled.
    """

    reads: Mapping[str, int]
    writes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Elements read plus elements written."""
        return sum(self.reads.values()) + sum(self.writes.values())


class _HBM:
    """Main memory: tensors (batch, heads, rows, columns) that only counted loads and stores reach."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.tensors = {"q": q, "k": k, "v": v}  # read directly only by the caller, after the algorithm
        self._reads: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()

    def allocate(self, **columns: int) -> None:
        """Room for results: a row of so many columns for each row of q."""
        q = self.tensors["q"]
        self.tensors |= {name: q.new_empty(*q.shape[:3], width) for name, width in columns.items()}

    def load(self, name: str, rows: slice = slice(None)) -> Tensor:
        tile = self.tensors[name][:, :, rows]
        self._reads[name] += tile.numel()
        return tile

    def store(self, name: str, value: Tensor | float, rows: slice = slice(None)) -> None:
        tile = self.tensors[name][:, :, rows]
        tile[...] = value
        self._writes[name] += tile.numel()

    def count(self) -> IOCount:
        return IOCount(dict(self._reads), dict(self._writes))


def _require(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} to go with the other tensors, got {tuple(x.shape)}")
    if x.is_complex():
        raise TypeError(f"{name} must have a real dtype, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {x.device}")


def _group(x: Tensor, heads_k: int) -> Tensor:
    """(batch, heads_q, ...) viewed as (batch, heads_k, query heads of one key head, ...)."""
    return x.reshape(x.shape[0], heads_k, x.shape[1] // heads_k, *x.shape[2:])


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check the inputs; return them in float64 as (batch, heads, seqlen, head_dim), and the scale to use."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}")
    (batch, seqlen_q, heads_q, head_dim), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    if head_dim == 0:
        raise ValueError("head_dim of q must be at least 1, got 0")
    _require("q", q, (batch, seqlen_q, heads_q, head_dim), q.device)
    _require("k", k, (batch, seqlen_k, heads_k, head_dim), q.device)
    _require("v", v, (batch, seqlen_k, heads_k, v.shape[3]), q.device)
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(f"heads of q must be a multiple of those of k, got {heads_q} and {heads_k}")
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"softmax_scale must be finite and positive, got {softmax_scale}")
    q, k, v = (x.double().transpose(1, 2).contiguous() for x in (q, k, v))
    return q, k, v, scale


def _prepare_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Check the mask for prepared q and k; return it as (batch, heads_k, group, seqlen_q, seqlen_k)."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be torch.bool with True for a visible key, got {mask.dtype}")
    if mask.device != q.device:
        raise ValueError(f"mask must be on the device of q, {q.device}, got {mask.device}")
    shape = (*q.shape[:3], k.shape[2])
    try:
        return _group(mask.expand(shape), k.shape[1])
    except RuntimeError:
        raise ValueError(f"mask must broadcast to {shape}, got shape {tuple(mask.shape)}") from None


def _tiles(length: int, block: int, name: str) -> list[slice]:
    if block < 1:
        raise ValueError(f"{name} must be at least 1, got {block}")
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _hidden(rows: slice, keys: slice, diagonal: int | None) -> bool:
    """Whether the causal order hides the whole tile: its last row sees the keys up to row + diagonal."""
    return diagonal is not None and keys.start > rows.stop - 1 + diagonal


def _hide(s: Tensor, rows: slice, keys: slice, diagonal: int | None, mask: Tensor | None = None) -> Tensor:
    """Scores (..., rows, keys), with -inf for those that the mask or the causal order hides."""
    if mask is not None:
        s = s.masked_fill(~mask[..., rows, keys], -math.inf)
    if diagonal is not None:
        i = torch.arange(rows.start, rows.stop, device=s.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=s.device)
        s = s.masked_fill(j > i + diagonal, -math.inf)
    return s


def _distance(s: Tensor, rows: slice, shift: int) -> Tensor:
    """(rows, keys), of keys behind the position of a query, which is its row + shift; negative before it."""
    position = torch.arange(rows.start, rows.stop, device=s.device)[:, None] + shift
    return torch.arange(s.shape[-1], device=s.device) - position


def _finite(m: Tensor) -> Tensor:
    """A maximum or lse to subtract: for a row that sees no key exp(-inf - 0) is 0, exp(-inf + inf) NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def _softmax(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row maxima m, exp(s - m), and its row sums l; m and l are columns (..., rows, 1)."""
    # m cancels out of O and lse, so autograd may take it for a constant. amax refuses rows without elements.
    m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    p = (s - _finite(m)).exp()
    return m, p, p.sum(-1, keepdim=True)


def _finish(x: Tensor, m: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor]:
    """x / l, and lse = m + log(l). l is 0 only without a visible key, as the maximum itself adds 1."""
    row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    return x / row_sum, m + row_sum.log()


def _heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., softmax_scale: float | None = ...,
    mask: Tensor | None = ..., window: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., row_chunk: int | None = ...,
    return_lse: Literal[True] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., softmax_scale: float | None = ...,
    mask: Tensor | None = ..., window: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., row_chunk: int | None = ...,
    return_lse: Literal[False],
) -> Tensor: ...
# fmt: on
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    mask: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    row_chunk: int | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor] | Tensor:
    """Attention by its definition (FlashAttention, section 2.2), in float64. Autograd can differentiate it.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), any real dtype.
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads_q; seqlen_k may be 0.
        v: (batch, seqlen_k, heads_k, head_dim_v).
        causal: hide key j from query i unless j <= i + seqlen_k - seqlen_q.
        softmax_scale: factor of Q K^T, finite and positive; None means 1 / sqrt(head_dim).
        mask: bool, broadcastable to (batch, heads_q, seqlen_q, seqlen_k), True = visible (if causal allows).
        window: (left, right): keys before and behind a query's own position, i + seqlen_k - seqlen_q, that it sees
            (if mask and causal allow); -1 for all.
        softcap: > 0: a score s becomes softcap * tanh(s / softcap); 0 for none.
        alibi_slopes: (batch, heads_q) or (heads_q,): slope * |key position - query position| comes off a score.
        sinks: (heads_q,): one more logit for each row of a head, which has no value. A row without keys has it as lse.
        row_chunk: query rows worked on at a time; None means as many as keep the scores below 2**24. Rows are
            independent: this bounds memory and changes no result.
        return_lse: whether lse is returned beside out.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) and, if asked for, lse (batch, heads_q, seqlen_q); float64.

    Raises:
        ValueError: a shape, device, softmax_scale, window, softcap or row_chunk that does not fit.
        TypeError: a complex input, or a mask that is not bool.
    """
    q, k, v, scale = _prepare(q, k, v, softmax_scale)
    mask = _prepare_mask(mask, q, k)
    shift = k.shape[2] - q.shape[2]
    diagonal = shift if causal else None
    if min(window) < -1:
        raise ValueError(f"window must have ends of at least 0, or -1 for none, got {window}")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap must be finite and at least 0, got {softcap}")
    of_head = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1], 1, 1)
    if alibi_slopes is not None:
        shape = (q.shape[1],) if alibi_slopes.ndim == 1 else q.shape[:2]
        _require("alibi_slopes", alibi_slopes, tuple(shape), q.device)
        alibi_slopes = alibi_slopes.double().expand(q.shape[:2]).reshape(of_head)
    if sinks is not None:
        _require("sinks", sinks, (q.shape[1],), q.device)
        sinks = sinks.double().expand(q.shape[:2]).reshape(of_head)
    if row_chunk is None:
        row_chunk = max(1, _CHUNK_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))

    q_grouped = _group(q, k.shape[1])
    outs, lses = [q_grouped.new_empty(*q_grouped.shape[:3], 0, v.shape[3])], [q_grouped[..., :0, :1]]
    for rows in _tiles(q.shape[2], row_chunk, "row_chunk"):
        s = scale * torch.einsum("bgrid,bgjd->bgrij", q_grouped[..., rows, :], k)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if alibi_slopes is not None:
            s = s - alibi_slopes * _distance(s, rows, shift).abs()
        if window != (-1, -1):
            behind = _distance(s, rows, shift)
            left, right = (end if end >= 0 else math.inf for end in window)
            s = s.masked_fill((behind < -left) | (behind > right), -math.inf)
        s = _hide(s, rows, slice(0, k.shape[2]), diagonal, mask)
        if sinks is not None:
            s = torch.cat([s, sinks.expand(*s.shape[:-1], 1)], dim=-1)
        m, p, row_sum = _softmax(s)
        out, lse = _finish(torch.einsum("bgrij,bgjd->bgrid", p[..., : k.shape[2]], v), m, row_sum)
        outs.append(out)
        lses.append(lse)
    out = _heads_last(torch.cat(outs, dim=3).flatten(1, 2))
    return (out, torch.cat(lses, dim=3).flatten(1, 2).squeeze(-1)) if return_lse else out


def block_sizes(sram_elements: int, head_dim: int) -> tuple[int, int]:
    """Tile sizes (block_q, block_k) for an on-chip memory of M elements: FlashAttention, Algorithm 1, line 1.

    block_k = ceil(M / 4d) lets tiles of Q, K, V and O share the memory; block_q = min(block_k, d) keeps the
    block_q x block_k scores within the size of one of them.

    Raises:
        ValueError: head_dim below 1, or sram_elements below head_dim (the paper assumes d <= M).
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if sram_elements < head_dim:
        raise ValueError(f"sram_elements must be at least head_dim, {head_dim}, got {sram_elements}")
    block_k = math.ceil(sram_elements / (4 * head_dim))
    return min(block_k, head_dim), block_k


def _open(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None
) -> tuple[_HBM, float, int, int, int | None]:
    """HBM that holds q and, for each query head, its k and v; the scale, seqlen_q, seqlen_k, the diagonal."""
    q, k, v, scale = _prepare(q, k, v, softmax_scale)
    group, seqlen_q, seqlen_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    hbm = _HBM(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    return hbm, scale, seqlen_q, seqlen_k, seqlen_k - seqlen_q if causal else None


@torch.no_grad()
def standard_attention_io(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor, IOCount]:
    """Standard attention with S and P in HBM (FlashAttention, Algorithm 0), with its traffic counted.

    Three kernels: S = Q K^T, P = softmax(S), O = P V. Each reads its operands once and writes its result
    once, the least that a blocking of the products can do. A causal mask hides scores and saves no traffic.
    lse is written as well, which the paper's listing does not do, so that all counted forwards leave the same
    results.

    Arguments, results and errors as in `attention`; third comes the count, of q, k, v, s, p, out and lse.
    """
    hbm, scale, seqlen_q, seqlen_k, diagonal = _open(q, k, v, causal, softmax_scale)
    hbm.allocate(s=seqlen_k, p=seqlen_k, out=v.shape[3], lse=1)

    s = scale * (hbm.load("q") @ hbm.load("k").mT)
    hbm.store("s", _hide(s, slice(0, seqlen_q), slice(0, seqlen_k), diagonal))

    m, p, row_sum = _softmax(hbm.load("s"))
    p, lse = _finish(p, m, row_sum)
    hbm.store("p", p)
    hbm.store("lse", lse)

    hbm.store("out", hbm.load("p") @ hbm.load("v"))
    return _heads_last(hbm.tensors["out"]), hbm.tensors["lse"].squeeze(-1), hbm.count()


@torch.no_grad()
def flash_attention_1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_q: int,
    block_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, IOCount]:
    """FlashAttention (section 3.1, Algorithm 1): K and V tiles in the outer loop, Q tiles in the inner one.

    A K, V tile is read once and visits every row. The price: O and the softmax state (m, l) of the rows live
    in HBM, and every visit reads them, merges the tile, divides by the new l and writes them back. With Tc
    key tiles the traffic is about 3 Tc seqlen_q head_dim, or Theta(N^2 d^2 / M) with `block_sizes` of M
    (Theorem 2). A tile that the causal mask hides moves nothing but its share of K and V.

    Arguments, results and errors as in `attention`, in tiles of block_q rows by block_k keys; third comes the
    count, of q, k, v, out, m and l, with the initial values of the last three. lse is formed from m and l
    after the end, uncounted.
    """
    hbm, scale, seqlen_q, seqlen_k, diagonal = _open(q, k, v, causal, softmax_scale)
    row_tiles, key_tiles = _tiles(seqlen_q, block_q, "block_q"), _tiles(seqlen_k, block_k, "block_k")
    hbm.allocate(out=v.shape[3], l=1, m=1)

    for name, initial in (("out", 0.0), ("l", 0.0), ("m", -math.inf)):  # line 2
        hbm.store(name, initial)
    for keys in key_tiles:  # line 5
        k_j, v_j = hbm.load("k", keys), hbm.load("v", keys)
        for rows in row_tiles:  # line 7
            if _hidden(rows, keys, diagonal):
                continue
            q_i, o_i, l_i, m_i = (hbm.load(name, rows) for name in ("q", "out", "l", "m"))
            s = _hide(scale * (q_i @ k_j.mT), rows, keys, diagonal)
            m_tile, p, l_tile = _softmax(s)  # line 10: of this tile alone
            m_new = torch.maximum(m_i, m_tile)  # line 11: both parts go to the common maximum
            old, new = (m_i - _finite(m_new)).exp(), (m_tile - _finite(m_new)).exp()
            l_new = old * l_i + new * l_tile
            # Line 12: times the old l undoes the division of the visit before.
            o_new, _ = _finish(old * l_i * o_i + new * (p @ v_j), m_new, l_new)
            for name, value in (("out", o_new), ("l", l_new), ("m", m_new)):  # lines 12, 13
                hbm.store(name, value, rows)
    out, m, row_sum = (hbm.tensors[name] for name in ("out", "m", "l"))
    return _heads_last(out), _finish(out, m, row_sum)[1].squeeze(-1), hbm.count()


@torch.no_grad()
def flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_q: int,
    block_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, IOCount]:
    """FlashAttention-2 (section 3.1.1, Algorithm 1): Q tiles in the outer loop, K and V tiles inside.

    The O, m and l of a row now stay on chip until it is finished; row tiles are independent, so they can
    spread over thread blocks (section 3.2); O stays unnormalised up to one division at the end; and of m and
    l only lse = m + log(l) is kept for the backward. With Tr row tiles the traffic is about 2 Tr seqlen_k
    head_dim: K and V once for each row tile, all else once. A tile that the causal mask hides is not read.

    Arguments, results and errors as in `attention`, in tiles of block_q rows by block_k keys; third comes the
    count, of q, k, v, out and lse.
    """
    hbm, scale, seqlen_q, seqlen_k, diagonal = _open(q, k, v, causal, softmax_scale)
    row_tiles, key_tiles = _tiles(seqlen_q, block_q, "block_q"), _tiles(seqlen_k, block_k, "block_k")
    hbm.allocate(out=v.shape[3], lse=1)

    for rows in row_tiles:  # line 3
        q_i = hbm.load("q", rows)
        acc = q_i.new_zeros(*q_i.shape[:-1], v.shape[3])  # O before its division
        row_sum, m = torch.zeros_like(acc[..., :1]), torch.full_like(acc[..., :1], -math.inf)
        for keys in key_tiles:  # line 6
            if _hidden(rows, keys, diagonal):
                break  # and so are all later keys
            k_j, v_j = hbm.load("k", keys), hbm.load("v", keys)
            s = _hide(scale * (q_i @ k_j.mT), rows, keys, diagonal)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))  # line 9
            p, correction = (s - _finite(m_new)).exp(), (m - _finite(m_new)).exp()
            row_sum = correction * row_sum + p.sum(-1, keepdim=True)
            acc = correction * acc + p @ v_j  # line 10
            m = m_new
        for name, value in zip(("out", "lse"), _finish(acc, m, row_sum), strict=True):  # lines 12-15
            hbm.store(name, value, rows)
    return _heads_last(hbm.tensors["out"]), hbm.tensors["lse"].squeeze(-1), hbm.count()


@torch.no_grad()
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    mask: Tensor | None = None,
    block_q: int = 128,
    block_k: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`, P recomputed tile by tile (FlashAttention-2, section 3.1.2, Algorithm 2).

    The forward kept only out and lse. P = exp(S - lse) comes back normalised, without a pass for maximum and
    sum, and all that the softmax's Jacobian needs beyond its own tile is a row sum that O gives for free::

        D = rowsum(P * dP) = rowsum(dO * O)      dP = dO V^T      dS = P * (dP - D)
        dV = P^T dO      dQ = softmax_scale * dS K      dK = softmax_scale * dS^T Q

    dK and dV of a key tile stay on chip while the rows pass, summed over the query heads of their key head;
    dQ is added to in memory. The relative error of P is the absolute error of lse: where logits reach 1e5,
    give the float64 lse of `attention`.

    Args:
        q, k, v: as in `attention`.
        out, lse: its results: (batch, seqlen_q, heads_q, head_dim_v) and (batch, heads_q, seqlen_q).
        dout: gradient of out, of its shape.
        causal, softmax_scale, mask: as in the forward.
        block_q, block_k: rows and keys of a tile.

    Returns:
        dq, dk, dv, float64, of the shapes of q, k, v; a row without a visible key adds nothing to them.

    Raises:
        ValueError: a shape, device, softmax_scale or block size that does not fit.
        TypeError: a complex input, or a mask that is not bool.
    """
    q, k, v, scale = _prepare(q, k, v, softmax_scale)
    mask = _prepare_mask(mask, q, k)
    (batch, heads_q, seqlen_q, _), (_, heads_k, seqlen_k, head_dim_v) = q.shape, v.shape
    _require("out", out, (batch, seqlen_q, heads_q, head_dim_v), q.device)
    _require("dout", dout, (batch, seqlen_q, heads_q, head_dim_v), q.device)
    _require("lse", lse, (batch, heads_q, seqlen_q), q.device)
    q, out, dout = (_group(x, heads_k) for x in (q, *(y.double().transpose(1, 2) for y in (out, dout))))
    lse = _group(_finite(lse.double()).unsqueeze(-1), heads_k)
    diagonal = seqlen_k - seqlen_q if causal else None
    row_tiles, key_tiles = _tiles(seqlen_q, block_q, "block_q"), _tiles(seqlen_k, block_k, "block_k")

    delta = (dout * out).sum(-1, keepdim=True)  # line 4: D
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for keys in key_tiles:  # line 5
        k_j, v_j, dk_j, dv_j = (x[..., keys, :] for x in (k, v, dk, dv))
        for rows in row_tiles:  # line 8
            if _hidden(rows, keys, diagonal):
                continue
            q_i, dout_i, lse_i, delta_i = (x[..., rows, :] for x in (q, dout, lse, delta))
            s = scale * torch.einsum("bgrid,bgjd->bgrij", q_i, k_j)
            p = (_hide(s, rows, keys, diagonal, mask) - lse_i).exp()  # line 11
            dv_j += torch.einsum("bgrij,bgrid->bgjd", p, dout_i)
            dp = torch.einsum("bgrid,bgjd->bgrij", dout_i, v_j)
            ds = scale * p * (dp - delta_i)  # line 14
            dq[..., rows, :] += torch.einsum("bgrij,bgjd->bgrid", ds, k_j)
            dk_j += torch.einsum("bgrij,bgrid->bgjd", ds, q_i)
    return _heads_last(dq.flatten(1, 2)), _heads_last(dk), _heads_last(dv)
