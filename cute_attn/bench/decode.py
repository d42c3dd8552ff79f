"""Phase decode: one new query for each sequence against a KV cache, by CUDA graphs of whole passes over the caches.

A cache is read once in a call, so what counts is bytes of it in a second, beside a copy timed in the same rounds. Where
caches are small, several of like contents are read in turn, so that L2 does not hold them: a graph has a call for each.
The graph takes the host out of the time, as a server that captures its decoding step does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn.bench import cases, peers
from cute_attn.bench.cases import Case

TOKENS: Final = 131072  # of all sequences of a cell
SEQLENS: Final = (1024, 8192, 131072)
HEADS: Final = (64, 8)  # of Q, of K and V
CACHE_BYTES: Final = 256 << 20  # that a pass over the caches reads at least
COPY_BYTES: Final = 1 << 30  # of the copy: read, and as many written


def cells(
    *,
    seqlens: Sequence[int] = SEQLENS,
    head_dims: Sequence[int] = cases.HEAD_DIMS,
    tokens: int = TOKENS,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
) -> list[Case]:
    """One query for each sequence of `seqlens` keys; batch, unless given, so that there are `tokens` keys in all.

    heads default to 64, heads_k to 8, or to `heads` where that is given.

    Raises:
        ValueError: a size is not positive, or heads_k does not divide heads.
    """
    heads_q = HEADS[0] if heads is None else heads
    kv = heads_k if heads_k is not None else HEADS[1] if heads is None else heads
    found = cases.grid(
        seqlens=seqlens,
        head_dims=head_dims,
        causal=(False,),
        tokens=tokens,
        batch=batch,
        heads=heads_q,
        heads_k=kv,
    )
    return [
        Case(case.batch, 1, case.seqlen_k, case.heads_q, case.heads_k, case.head_dim, False) for case in found
    ]


def prepare(contender: peers.Contender, case: Case, q: Tensor, k: Tensor, v: Tensor) -> peers.Prepared:
    """Make `contender` ready: q (batch, 1, heads_q, head_dim), caches k and v (batch, seqlen_k, heads_k, head_dim).

    Raises:
        NotRun: the library is not installed.
        Exception: whatever the library raises.
    """
    if contender.provider == "copy":
        return _copy(q.device)
    lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=q.device)
    scales: dict[str, Tensor] = {}
    if contender.dtype == "fp8":
        (k, k_scale), (v, v_scale) = _by_token(k), _by_token(v)
        scales = {"k_descale": k_scale, "v_descale": v_scale}
    size = sum(x.numel() * x.element_size() for x in (k, v, *scales.values()))
    copies = 1 if q.device.type != "cuda" else -(-CACHE_BYTES // size)
    caches = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    calls: list[Callable[[], Any]]
    if contender.provider == peers.OURS:
        import cute_attn

        options: dict[str, Any] = {"cache_seqlens": lengths, "backend": peers.BACKEND, **scales}
        kernel, backend = cute_attn.decode_kernel(q, k, v, **options), peers.BACKEND
        attend = functools.partial(cute_attn.flash_attn_with_kvcache, **options)
        calls = [functools.partial(attend, q, *pair) for pair in caches]
    elif contender.provider == "fa3":
        fa3 = peers.need("flash_attn_interface")
        version = peers._version("flash-attn-3", module="flash_attn_interface")
        kernel, backend = f"FlashAttention-3 {version}, num_splits 0", "sm90"

        def attend3(keys: Tensor, values: Tensor) -> Tensor:
            return peers.first(
                fa3.flash_attn_with_kvcache(q, keys, values, cache_seqlens=lengths, num_splits=0)
            )

        calls = [functools.partial(attend3, *pair) for pair in caches]
    else:
        ready = [peers._prepare_sdpa(contender.provider, case, q, *pair) for pair in caches]
        kernel, backend = ready[0].kernel, ready[0].backend
        calls = [one.launch for one in ready]
    if q.device.type != "cuda":
        return peers.Prepared(calls[0], kernel, backend, cases.output_error, size)
    return peers.Prepared(_graph(calls), kernel, backend, cases.output_error, size, graph_calls=len(calls))


def _by_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and a scale for each token and head, of which those of a head lie one behind another."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    top = x.abs().amax(dim=-1).float().clamp_min(torch.finfo(torch.float32).tiny)
    scale = (top / largest).transpose(1, 2).contiguous().transpose(1, 2)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    for b in range(x.shape[0]):  # in float32 a sequence at a time
        codes[b] = (x[b].float() / scale[b].unsqueeze(-1)).to(codes.dtype)
    return codes, scale


def _graph(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """A launch that replays all calls; it returns the output of the first, always the same tensor."""
    calls[0]()  # compiles, tunes
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call() for call in calls]

    def launch() -> Tensor:
        graph.replay()
        return outs[0]

    return launch


def _copy(device: torch.device) -> peers.Prepared:
    """A copy of `COPY_BYTES`: what reading and writing reach."""
    size = COPY_BYTES if device.type == "cuda" else 1 << 10
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    name = f"torch {torch.__version__} copy_"
    return peers.Prepared(lambda: target.copy_(source), name, "cuda", None, 2 * size)
