"""Phase decode: one new query for each sequence against a KV cache, by CUDA graphs of whole passes over the caches.

A cache is read once in a call, so what counts is bytes of it in a second, beside copies timed in the same rounds: one
so long that its start and end do not count, and one that moves as many bytes as the call, in a graph as long. Where
caches are small, several of like contents are read in turn, so that L2 does not hold them: a graph has a call for each.
The graph takes the host out of the time, as a server that captures its decoding step does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import decode_plan
from cute_attn.bench import cases, peers
from cute_attn.bench.cases import Case
from cute_attn.kernels.config import DecodeConfig

TOKENS: Final = 1 << 20  # of all sequences of a cell at most
SEQLENS: Final = (1024, 8192, 131072)
BATCHES: Final = (1, 16, 128)
HEADS: Final = (cases.CACHE_HEADS, (32, 32))  # of Q, of K and V
CACHE_BYTES: Final = 1 << 30  # that a pass over the caches reads at least: twenty times the L2 cache
COPY_BYTES: Final = 1 << 30  # of the copy: read, and as many written
FLASHINFER_WORKSPACE: Final = 128 << 20  # bytes, as its documentation says


def cells(
    *,
    seqlens: Sequence[int] = SEQLENS,
    head_dims: Sequence[int] = cases.HEAD_DIMS,
    tokens: int = TOKENS,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
    page_sizes: Sequence[int | None] = (None,),
    full: bool = False,
) -> list[Case]:
    """One query for each of `BATCHES` sequences of `seqlens` keys, as far as these are at most `tokens` in all.

    Args:
        batch: instead of `BATCHES`, whatever `tokens` is.
        heads, heads_k: as those of `cases.cache_heads`; where neither is given, each of `HEADS`.
        page_sizes: slots of a page, None for contiguous caches.
        full: nobody is given lengths. Without it all that take them get them in a tensor, as serving has them; torch's
            SDPA, which takes none, then knows more than the others.

    Raises:
        ValueError: heads_k does not divide heads, a page_size does not divide a seqlen, or there is no cell.
    """
    pairs = HEADS if heads is None and heads_k is None else (cases.cache_heads(heads, heads_k),)
    batches = BATCHES if batch is None else (batch,)
    found = [
        Case(count, 1, seqlen, *pair, head_dim, False, page_size=pages, full=full)
        for head_dim in head_dims
        for pair in pairs
        for pages in page_sizes
        for seqlen in seqlens
        for count in batches
        if batch is not None or count * seqlen <= tokens
    ]
    for case in found:
        if case.page_size is not None and case.seqlen_k % case.page_size:
            raise ValueError(f"page_size must divide the seqlen, {case.seqlen_k}, got {case.page_size}")
    if not found:
        raise ValueError(f"tokens must be at least the seqlen, {min(seqlens)}, got {tokens}")
    return found


def kernels(found: Sequence[Case], dtypes: Sequence[str]) -> list[DecodeConfig]:
    """Of this library, those that the cells call at these precisions: to be compiled side by side ahead of the cells.

    dtypes: of contenders, "fp8" for a cache of e4m3 with scales of tokens.
    """
    wanted: dict[DecodeConfig, None] = {}
    for case, dtype in itertools.product(found, dtypes):
        rows = case.seqlen_q * (case.heads_q // case.heads_k)
        config = decode_plan.decode_config(
            case.head_dim,
            case.head_dim,
            "bf16" if dtype == "fp8" else dtype,
            page_size=case.page_size,
            rows=rows,
            **(decode_plan.FORMS["e4m3"] if dtype == "fp8" else {}),
        )
        wanted |= dict.fromkeys(decode_plan.kernels(config, rows))
    return list(wanted)


def prepare(contender: peers.Contender, case: Case, q: Tensor, k: Tensor, v: Tensor) -> peers.Prepared:
    """Make `contender` ready: q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_k, head_dim),
    which become caches. In phase prefill there is one cache and no graph: a launch takes long enough.

    Raises:
        NotRun: the library is not installed, or has no pages.
        Exception: whatever the library raises.
    """
    if contender.provider == "copy":
        return _copy(q.device)
    if contender.provider == "copy_cache":
        return _copy_cache(case, contender.dtype, q.device)
    scales: tuple[Tensor, ...] = ()
    if contender.dtype == "fp8" and contender.provider == peers.OURS:
        (k, k_scale), (v, v_scale) = _by_token(k), _by_token(v)
        scales = (k_scale, v_scale)
    elif contender.dtype == "fp8":
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    size = sum(x.numel() * x.element_size() for x in (k, v, *scales))
    table = None
    pages = case.page_size
    if pages is not None:
        order = torch.randperm(case.batch * case.seqlen_k // pages, device=q.device)
        k, v = (cases.in_pages(x, pages, order) for x in (k, v))
        scales = tuple(_by_head(cases.in_pages(x, pages, order)) for x in scales)
        table = order.view(case.batch, -1).int()
    if contender.phase == "prefill":
        attend, kernel, backend = _of_library(contender)(contender, case, q, k, v, table, scales)
        return peers.Prepared(functools.partial(attend, k, v), kernel, backend, cases.output_error)
    copies = 1 if q.device.type != "cuda" else -(-CACHE_BYTES // size)
    caches = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    attend, kernel, backend = _of_library(contender)(contender, case, q, k, v, table, scales)
    calls = [functools.partial(attend, *pair) for pair in caches]
    if q.device.type != "cuda":
        return peers.Prepared(calls[0], kernel, backend, cases.output_error, size)
    return peers.Prepared(_Graph(calls), kernel, backend, cases.output_error, size, graph_calls=len(calls))


# ------------------------------------------------------------------------------------------------------------
# The libraries: (attend(k_cache, v_cache) -> out, kernel, backend) of a contender
# ------------------------------------------------------------------------------------------------------------

_Attend = tuple[Callable[[Tensor, Tensor], Any], str, str]


def _of_library(contender: peers.Contender) -> Callable[..., _Attend]:
    named = {peers.OURS: _ours, "fa3": _fa3, "flashinfer": _flashinfer}
    return named.get(contender.provider, _sdpa)


def _lengths(case: Case, q: Tensor) -> Tensor | None:
    if case.full:
        return None
    return torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=q.device)


def _ours(
    contender: peers.Contender,
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    scales: Sequence[Tensor],
) -> _Attend:
    import cute_attn

    options: dict[str, Any] = {
        "cache_seqlens": _lengths(case, q),
        "causal": case.causal,
        "backend": contender.backend,
    }
    options |= dict(zip(("k_descale", "v_descale"), scales, strict=False))
    if table is not None:
        options["block_table"] = table
    kernel = cute_attn.decode_kernel(q, k, v, **options)
    return functools.partial(cute_attn.flash_attn_with_kvcache, q, **options), kernel, contender.backend


def _fa3(
    contender: peers.Contender,
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    scales: Sequence[Tensor],
) -> _Attend:
    """With an FP8 cache also an FP8 query, which it wants."""
    fa3 = peers.need("flash_attn_interface")
    version = peers._version("flash-attn-3", module="flash_attn_interface")
    options: dict[str, Any] = {"cache_seqlens": _lengths(case, q), "causal": case.causal, "num_splits": 0}
    if table is not None:
        options["page_table"] = table
    query = q
    if contender.dtype == "fp8":
        query = q.to(torch.float8_e4m3fn)
        one = torch.ones(case.batch, case.heads_k, device=q.device)
        options |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return peers.first(fa3.flash_attn_with_kvcache(query, keys, values, **options))

    return attend, f"FlashAttention-3 {version}, num_splits 0", "sm90"


def _flashinfer(
    contender: peers.Contender,
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    scales: Sequence[Tensor],
) -> _Attend:
    """By its wrapper for pages, which a contiguous cache is cut into as it lies."""
    flashinfer = peers.need("flashinfer")
    size = case.page_size
    if size is None:
        size = next(n for n in (64, 16, 1) if case.seqlen_k % n == 0)
    blocks = case.seqlen_k // size
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device) * blocks
    indices = torch.arange(case.batch * blocks, dtype=torch.int32, device=q.device)
    if table is not None:
        indices = table.flatten()
    last = torch.full((case.batch,), size, dtype=torch.int32, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=case.heads_q >= 4 * case.heads_k,
        paged_kv_indptr_buffer=ends.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    heads = (case.heads_q, case.heads_k, case.head_dim)
    wrapper.plan(ends, indices, last, *heads, size, q_data_type=q.dtype, kv_data_type=k.dtype)
    rows = q.squeeze(1)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        shape = (-1, size, case.heads_k, case.head_dim)
        out: Tensor = wrapper.run(rows, (keys.view(shape), values.view(shape)))
        return out.unsqueeze(1)

    version = peers._version("flashinfer-python", module="flashinfer")
    return attend, f"FlashInfer {version}, pages of {size}", "flashinfer"


def _sdpa(
    contender: peers.Contender,
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    scales: Sequence[Tensor],
) -> _Attend:
    if table is not None:
        raise peers.NotRun("skipped", "torch's SDPA has no pages")
    function, kernel, backend = peers._sdpa_function(contender.provider, case)
    return functools.partial(function, q), kernel, backend


def _by_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and a scale for each token and head, of which those of a head lie one behind another."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    top = x.abs().amax(dim=-1).float().clamp_min(torch.finfo(torch.float32).tiny)
    scale = _by_head(top / largest)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    for b in range(x.shape[0]):  # in float32 a sequence at a time
        codes[b] = (x[b].float() / scale[b].unsqueeze(-1)).to(codes.dtype)
    return codes, scale


def _by_head(scale: Tensor) -> Tensor:
    """Scales (batch or pages, slots, heads), of which those of a head lie one behind another."""
    return scale.transpose(1, 2).contiguous().transpose(1, 2)


class _Graph:
    """A launch that replays all calls; it returns the output of the first, always the same tensor."""

    def __init__(self, calls: Sequence[Callable[[], Tensor]]):
        self.calls = calls  # a graph knows addresses alone: what the calls read has to live as long
        calls[0]()  # compiles, tunes
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outs = [call() for call in calls]

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.outs[0]


def _copy(device: torch.device) -> peers.Prepared:
    """A copy of `COPY_BYTES`: what reading and writing reach."""
    size = COPY_BYTES if device.type == "cuda" else 1 << 10
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    name = f"torch {torch.__version__} copy_"
    return peers.Prepared(lambda: target.copy_(source), name, "cuda", None, 2 * size)


def _copy_cache(case: Case, dtype: str, device: torch.device) -> peers.Prepared:
    """Copies that move as many bytes, read and written, as our call reads of the cache: several in turn, as those."""
    row = (
        case.head_dim + 4 if dtype == "fp8" else 2 * case.head_dim
    )  # of K as of V, an e4m3 one with its scale
    half = case.batch * case.seqlen_k * case.heads_k * row
    copies = 1 if device.type != "cuda" else -(-CACHE_BYTES // (2 * half))
    pairs = [torch.empty(2, half, dtype=torch.uint8, device=device) for _ in range(copies)]
    calls = [functools.partial(pair[0].copy_, pair[1]) for pair in pairs]
    name = f"torch {torch.__version__} copy_"
    if device.type != "cuda":
        return peers.Prepared(calls[0], name, "cuda", None, 2 * half)
    return peers.Prepared(_Graph(calls), name, "cuda", None, 2 * half, graph_calls=copies)
