"""Attention of new queries against a KV cache, with flash-attn's function.

The path of a call is check -> plan (`decode_plan`, `prefill`) -> launches: new keys and values into the cache
(`append`), then attention, of few queries by the splitting kernel, of many by the 16-bit forward. There is no emulator:
away from a GPU that a kernel exists for a call is an error unless `backend="reference"` asks for the definition in
float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import append, decode_plan, flash, kv, validate
from cute_attn.compile import compile_kernel
from cute_attn.decode_plan import Shares
from cute_attn.kernels.config import AppendConfig, DecodeConfig
from cute_attn.plan import report_text
from cute_attn.prefill import NO_END, Prefill, choose, launch_prefill, make_prefill, rows_between
from cute_attn.remember import Remembered
from cute_attn.tiles import DTYPE_NAMES

__all__ = ["DecodePlan", "decode_explain", "decode_kernel", "flash_attn_with_kvcache", "reference"]

LOG2_E: Final = math.log2(math.e)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    rotation_signs: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T + bias + mask) v over the keys in a cache, by flash-attn's signature.

    New keys and values, where given, go into the cache first and are seen.

    Few queries: FlashAttention-2's online softmax (arXiv 2307.08691) with keys split over the GPU. Many, on Hopper:
    FlashAttention-3's forward (arXiv 2407.08608) over the cache as rows of 16 bits. Of pages and e4m3 codes these are
    made first, in memory for all slots of a sequence, at most 1 GiB at a time; `decode_explain` says which, and why.
    Lengths are read on the device: the call can be captured in a CUDA graph and replayed with other lengths, tables and
    contents. No backward.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float16 or bfloat16, last stride 1; or float8_e4m3fn, with `q_descale`,
            where the cache is, embedded and rotated as it shall be.
        k_cache: (batch_cache, seqlen_cache, heads_k, head_dim), or (pages, page_size, heads_k, head_dim) with a
            block_table; dtype of q, or float8_e4m3fn. Last stride 1, address and other strides multiples of 16 bytes.
            head_dim a multiple of 8 from 32 to 256, of 16 with float8_e4m3fn. heads_q is a multiple of heads_k.
        v_cache: likewise, with head_dim_v.
        k: (batch, seqlen_new, heads_k, head_dim), dtype of q, which is of 16 bits then, last stride 1: keys that are
            written to slots cache_seqlens and on of each sequence, and seen. `cache_seqlens`, which must be given,
            stays as it is. Tokens past the last slot are not written. Into a float8_e4m3fn cache they go as codes: with
            a scale of each token and head, which is written to `k_descale`, or with the given scales of heads.
        v: (batch, seqlen_new, heads_k, head_dim_v), likewise.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), dtype of q, last stride 1; seqlen_ro at least the slots of
            a sequence, rotary_dim a multiple of 16. With k: rotary position embedding of k at the slots that it goes
            to, and of q at positions cache_seqlens + i with a causal mask or window, at cache_seqlens without. Q is
            rounded to its dtype afterwards.
        cache_seqlens: (batch,) int32 on the device of q, or an int: keys of each sequence; None for all slots. More
            than the slots of a sequence count as all of them. What slots from there on hold does not count.
        cache_batch_idx: (batch,) int32: sequence of the cache for each of q. Not with a block_table.
        cache_leftpad: (batch,) int32: slot where each sequence begins; slots before it are not read. Lengths count
            from slot 0 all the same.
        block_table: (batch, blocks) int32: page of slots i * page_size to (i + 1) * page_size - 1 of each sequence.
            Any page_size; whole steps of 16 slots make the fewest table reads. Entries of pages without a key that
            is seen are not read.
        softmax_scale: factor of q k^T, finite, of any sign; default 1/sqrt(head_dim).
        causal: hide key j from query i unless j <= i + seqlen_k - seqlen_q, seqlen_k the length of the sequence.
        window_size: (left, right), as in `flash_attn_func`.
        softcap, alibi_slopes, sinks: as in `flash_attn_func`.
        rotary_interleaved: pairs of columns are 2 i and 2 i + 1, else i and i + rotary_dim / 2.
        num_splits: 0: work is shared out evenly over the GPU, or by whole heads where that is about as even; n > 0:
            the keys of each head of a sequence are split into n parts by its own length alone, however many queries
            there are.
        return_softmax_lse: also return the log-sum-exp of each row's scores.
        q_descale: (batch, heads_k) float32, of a float8_e4m3fn q, any strides.
        k_descale, v_descale: float32, of a float8_e4m3fn cache: (batch, heads_k), or (batch_cache or pages,
            seqlen_cache or page_size, heads_k) for one of each token; any strides. Scales of a head best lie one
            behind another, as `KVCache` has them: where those of a token do, a cache of 32 heads takes up to a quarter
            longer (head_dim 64: 9%, 128: 24%), one of 8 heads 1%.
        rotation_signs: (head_dim,) float32, 1 or -1 (`cute_attn.quantize.rotation_signs`), of a float8_e4m3fn cache
            with rotated keys (arXiv 2407.08608, section 3.3): q, and k before it is quantised, is multiplied by them
            and by a Hadamard matrix, block by block as in `walsh_hadamard`. Q is rounded to its dtype afterwards.
        backend: "auto" (a kernel for the GPU at hand, or, with a warning the first time, "reference" where there is
            none), "sm90" (the Hopper one), "sm80" (the same for every GPU from compute capability 8 on), or "reference"
            (torch in float32, any device, sequence by sequence).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, bfloat16 with q of float8_e4m3fn; with
        `return_softmax_lse` also lse (batch, heads_q, seqlen_q) float32, natural log. A row that sees no key has out 0
        and lse -inf, or its sink.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that is not allowed, or a backend that was named and has no kernel
            for the GPU.
        NotImplementedError: grad mode is on and an input requires grad.
    """
    side: dict[str, Tensor | None] = {
        "cache_seqlens": cache_seqlens if isinstance(cache_seqlens, Tensor) else None,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    new = {
        "k": k,
        "v": v,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotation_signs": rotation_signs,
    }
    lengths = None if isinstance(cache_seqlens, Tensor) else cache_seqlens
    options = (softmax_scale, causal, softcap, window_size, num_splits, lengths)
    given = (q, k_cache, v_cache, *side.values(), *new.values())
    key, plan = _plans.find(given, (*options, rotary_interleaved, backend), window_size)
    if plan is None:
        made = _plan(q, k_cache, v_cache, side, new, options, rotary_interleaved, backend)
        plan = _plans.keep(key, made)
    validate.check_forward_only("cached", q=q, k_cache=k_cache, v_cache=v_cache, **side, **new)
    out, lse = plan.run(q, k_cache, v_cache, side, new)
    return (out, lse) if return_softmax_lse else out


def decode_explain(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str = "auto",
) -> DecodePlan:
    """What `flash_attn_with_kvcache` does with these arguments, without doing it: kernels, what they copy, and why.

    Args: as those of `flash_attn_with_kvcache`. New keys count as if the cache had them.

    Raises:
        TypeError, ValueError: as `flash_attn_with_kvcache`.
    """
    side: dict[str, Tensor | None] = {
        "cache_seqlens": cache_seqlens if isinstance(cache_seqlens, Tensor) else None,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    lengths = None if isinstance(cache_seqlens, Tensor) else cache_seqlens
    options = (None, causal, softcap, window_size, num_splits, lengths)
    plan = _plan(q, k_cache, v_cache, side, dict.fromkeys(append.TENSORS), options, True, backend)
    if plan.prefill is None:
        kernel = "reference" if plan.config is None else plan.config.name
        return DecodePlan(kernel, None, 0, 0, plan.reasons)
    unpack, batch, heads_k = plan.prefill.unpack, q.shape[0], k_cache.shape[2]
    copied = 0
    if unpack.copy:
        of_cache = (q.shape[3] + v_cache.shape[3]) * k_cache.element_size()
        copied = batch * heads_k * plan.prefill.stride * (of_cache + plan.prefill.row_bytes)
    return DecodePlan(
        plan.prefill.config.name, unpack.name, copied, plan.prefill.workspace_bytes, plan.reasons
    )


def decode_kernel(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> str:
    """Name of the kernel with which `flash_attn_with_kvcache` attends: `decode_explain(...).kernel`.

    Args, Raises: as those of `decode_explain`.
    """
    return decode_explain(q, k_cache, v_cache, **options).kernel


@dataclass(frozen=True)
class DecodePlan:
    """What a call does. `str(plan)` is the readable form.

    Attributes:
        kernel: that attends: the splitting kernel, whose name has the rows of a block ("mhalf" 8, "m1" 16, "m2" 32,
            "m4" 64, "m8" 128), or the 16-bit forward; "reference" where none runs.
        rows_kernel: that finds, or makes, rows of the cache for the forward; None without.
        copied_bytes: that it reads and writes where all sequences are as long as they may be; 0 where the forward
            reads the cache as it lies.
        workspace_bytes: of the rows that it makes at a time.
        reasons: one sentence for each choice.
    """

    kernel: str
    rows_kernel: str | None
    copied_bytes: int
    workspace_bytes: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = {"kernel": self.kernel}
        if self.rows_kernel is not None:
            lines["rows"] = self.rows_kernel
            lines["copied"] = (
                f"{self.copied_bytes / 2**20:.4g} MiB at most, through {self.workspace_bytes / 2**20:.4g} MiB"
                if self.copied_bytes
                else "nothing: the forward reads the cache as it lies"
            )
        return report_text(lines, self.reasons)


# ------------------------------------------------------------------------------------------------------------
# From arguments to a plan: once for a signature
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What a call with these shapes, strides and options does."""

    config: DecodeConfig | None  # None: the reference
    prefill: Prefill | None  # that attends instead of `config`, if it does
    append: AppendConfig | None  # of the kernel that comes first, if one does
    shares: Shares
    softmax_scale: float
    softcap: float
    window: tuple[int, int]  # -1 without an end
    length: int  # of every sequence where no tensor says it
    rotary_interleaved: bool
    reasons: tuple[str, ...] = ()

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        side: dict[str, Tensor | None],
        new: dict[str, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        batch, heads_q, device = q.shape[0], q.shape[2], q.device
        seqlens = side["cache_seqlens"]
        if seqlens is None:
            seqlens = kv.lengths_of(self.length, batch, device)
        slopes = side["alibi_slopes"]
        slopes = None if slopes is None else slopes.expand(batch, heads_q)
        k = new["k"]
        seqlen_new = 0 if k is None else k.shape[1]
        q_step = int(self.window != (-1, -1))
        places = {**side, "cache_seqlens": seqlens}
        if self.append is not None:
            turned = append.launch_append(q, k_cache, v_cache, self.append, new, places, q_step=q_step)
            q = q if turned is None else turned
        if self.config is None:
            if seqlen_new:
                append.append_reference(k_cache, v_cache, new, places, self.rotary_interleaved)
            if new["rotary_cos"] is not None or new["rotation_signs"] is not None:
                q = append.queries_reference(q, new, seqlens, self.rotary_interleaved, q_step)
            out, lse = reference(
                q,
                k_cache,
                v_cache,
                cache_seqlens=seqlens + seqlen_new,
                softmax_scale=self.softmax_scale,
                window=self.window,
                softcap=self.softcap,
                alibi_slopes=slopes,
                cache_batch_idx=side["cache_batch_idx"],
                cache_leftpad=side["cache_leftpad"],
                block_table=side["block_table"],
                sinks=side["sinks"],
                q_descale=side["q_descale"],
                k_descale=side["k_descale"],
                v_descale=side["v_descale"],
            )
            return out.to(_out_dtype(q)), lse
        if self.prefill is not None:
            return launch_prefill(
                q,
                k_cache,
                v_cache,
                self.prefill,
                places,
                alibi_slopes=slopes,
                softmax_scale=self.softmax_scale,
                softcap=self.softcap,
                seqlen_new=seqlen_new,
                sms=_sms(device),
            )
        return launch_decode(
            q,
            k_cache,
            v_cache,
            self.config,
            self.shares,
            seqlens=seqlens,
            batch_idx=side["cache_batch_idx"],
            leftpad=side["cache_leftpad"],
            block_table=side["block_table"],
            k_scale=side["k_descale"],
            v_scale=side["v_descale"],
            q_scale=side["q_descale"],
            alibi_slopes=slopes,
            sinks=side["sinks"],
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            window=self.window,
            seqlen_new=seqlen_new,
        )


_plans: Remembered[_Plan] = Remembered()


def _plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    side: dict[str, Tensor | None],
    new: dict[str, Tensor | None],
    options: tuple[object, ...],
    interleaved: bool,
    backend: str,
) -> _Plan:
    """Check everything, and plan."""
    softmax_scale, causal, softcap, window_size, num_splits, length = options
    window, cap = flash._check_options(0.0, causal, softcap, False, False, window_size)
    kv.check_caches("q", q, k_cache, v_cache, (*validate.IN_DTYPES, kv.E4M3))
    scale = validate.check_softmax_scale(softmax_scale, q.shape[3])
    validate._check_heads(q.shape[2], k_cache.shape[2])
    validate.check_side_tensors(q.shape[0], q.shape[2], q.device, side["alibi_slopes"], side["sinks"])
    capacity = kv.check_places("q", q, k_cache, side)
    kv.check_query_scale(q, k_cache.shape[2], side["q_descale"])
    if q.dtype == kv.E4M3 and any(x is not None for x in new.values()):
        name = next(name for name, x in new.items() if x is not None)
        raise ValueError(
            f"{name} is given with q of {q.dtype}; allowed: None, as such a q is taken as it is, and append_kv appends"
        )
    append.check_append("q", q, k_cache, v_cache, capacity, new, interleaved)
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits is a {type(num_splits).__name__}; allowed: an int")
    if not 0 <= num_splits <= 256:
        raise ValueError(f"num_splits is {num_splits}; allowed: 0 to 256")
    k = new["k"]
    count = 0
    if side["cache_seqlens"] is None:
        count = kv.check_length(length, capacity, None if k is None else k.shape[1])
    arch = kv.target(backend, "q", q, k_cache.dtype)
    batch, seqlen_q, heads_q, head_dim = q.shape
    heads_k, head_dim_v = v_cache.shape[2:]
    plan = _Plan(None, None, None, Shares(0, 0, 1, 0), scale, cap, window, count, interleaved)
    if arch is None or batch == 0:
        why = "the batch is empty" if arch is not None else "backend 'reference' was asked for"
        return dataclasses.replace(plan, reasons=(why,))
    keys = k is not None and k.shape[1] > 0
    queries = seqlen_q > 0 and (new["rotary_cos"] is not None or new["rotation_signs"] is not None)
    if keys or queries:
        given = new if keys else {**new, "k": None, "v": None}
        config = append.append_config(
            q, k_cache, v_cache, given, side, interleaved, queries=queries, arch=arch
        )
        plan = dataclasses.replace(plan, append=config)
    if seqlen_q == 0:
        return dataclasses.replace(plan, reasons=("there are no queries",))
    fp8 = k_cache.dtype == kv.E4M3
    descale = side["k_descale"]
    left, right = window
    rows = seqlen_q * (heads_q // heads_k)
    attend = decode_plan.decode_config(
        head_dim,
        head_dim_v,
        DTYPE_NAMES[_out_dtype(q)],
        cache="e4m3" if fp8 else "16bit",
        scales="none" if not fp8 else "token" if descale is not None and descale.dim() == 3 else "head",
        query="e4m3" if q.dtype == kv.E4M3 else "16bit",
        page_size=None if side["block_table"] is None else k_cache.shape[1],
        rows=rows,
        row_ends=seqlen_q > 1 and (left >= 0 or right >= 0),
        softcap=cap > 0.0,
        alibi=side["alibi_slopes"] is not None,
        sinks=side["sinks"] is not None,
        batch_idx=side["cache_batch_idx"] is not None,
        leftpad=side["cache_leftpad"] is not None,
        arch=arch,
    )
    seen = None
    if side["cache_seqlens"] is None and side["cache_leftpad"] is None:
        end = min(count + (0 if k is None else k.shape[1]), capacity)
        seen = (max(end - seqlen_q - left, 0) if left >= 0 else 0, end)
    sms = _sms(q.device)
    shape = (batch, heads_k, rows, capacity, num_splits, sms, seen)
    taken_by, shares = decode_plan.chosen(attend, *shape)
    plan = dataclasses.replace(plan, config=taken_by, shares=shares)
    if arch != "sm_90a":
        return dataclasses.replace(plan, reasons=(f"many queries have no other kernel for {arch}",))
    if num_splits:
        return dataclasses.replace(plan, reasons=(f"num_splits is {num_splits}, which the forward has not",))
    first, end = (0, capacity) if seen is None else seen
    most = min(end - first, seqlen_q + left) if left >= 0 else end - first
    contiguous = not fp8 and side["block_table"] is None
    stored = rows_between(k_cache, v_cache) if contiguous else None
    prefill = make_prefill(attend, batch, heads_q, heads_k, seqlen_q, capacity, most, window, stored, sms)
    taken, why = choose(attend, prefill, batch, heads_q, heads_k, seqlen_q, most, sms)
    return dataclasses.replace(plan, prefill=prefill if taken else None, reasons=(why,))


def _out_dtype(q: Tensor) -> torch.dtype:
    """Of the output."""
    return torch.bfloat16 if q.dtype == kv.E4M3 else q.dtype


@functools.lru_cache(maxsize=64)
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# ------------------------------------------------------------------------------------------------------------
# From a plan to a result
# ------------------------------------------------------------------------------------------------------------


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    config: DecodeConfig,
    shares: Shares,
    *,
    seqlens: Tensor,
    batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    seqlen_new: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run the compiled kernels of `config`; arguments as those of `flash_attn_with_kvcache`, checked.

    Args:
        config: with `shares`, from `decode_plan.chosen`.
        alibi_slopes: (batch, heads_q).
        window: (left, right), -1 without an end.
        seqlen_new: keys of each sequence behind those that `seqlens` counts.

    Returns:
        (out, lse): (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, bfloat16 with q of e4m3; (batch, heads_q,
        seqlen_q) float32.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    device, head_dim_v, out_dtype = q.device, v_cache.shape[3], _out_dtype(q)
    if softmax_scale <= 0:  # the kernel wants a positive one: signs and zero go to Q, or to its scales
        sign = math.copysign(1.0, softmax_scale) if softmax_scale else 0.0
        if q_scale is None:
            q = q * sign
        else:
            q_scale = q_scale * sign
        softmax_scale = -softmax_scale or 1.0
    q = kv.aligned(q)
    out = torch.empty((batch, seqlen_q, heads_q, head_dim_v), dtype=out_dtype, device=device)
    lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=device)
    workspace = torch.empty(shares.slots * config.rows * (2 + head_dim_v), dtype=torch.float32, device=device)
    left, right = window
    compile_kernel(config)(
        q,
        k_cache,
        v_cache,
        out,
        lse,
        seqlens,
        batch_idx,
        leftpad,
        block_table,
        k_scale,
        v_scale,
        alibi_slopes,
        sinks,
        q_scale,
        workspace.data_ptr(),
        shares.slots,
        (softcap or softmax_scale) * LOG2_E,
        2.0 * LOG2_E * softmax_scale / softcap if softcap else 0.0,
        seqlen_new,
        NO_END if left < 0 else min(left, NO_END),
        NO_END if right < 0 else min(right, NO_END),
        shares.ctas,
        shares.splits,
        shares.least,
        shares.together,
    )
    return out, lse


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The definition, sequence by sequence, with the scores in memory.

    Args: as those of `flash_attn_with_kvcache`, with window (left, right), -1 without an end; (-1, 0) is causal.
        alibi_slopes: (batch, heads_q).
        dtype: of the arithmetic.

    Returns:
        (out, lse) of `dtype`: (batch, seqlen_q, heads_q, head_dim_v), (batch, heads_q, seqlen_q).
    """
    batch, seqlen_q, heads_q, _ = q.shape
    head_dim_v = v_cache.shape[3]
    out = torch.empty((batch, seqlen_q, heads_q, head_dim_v), dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads_q, seqlen_q), dtype=dtype, device=q.device)
    slots = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    for b in range(batch):
        end = min(max(int(cache_seqlens[b]), 0), slots)
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        if window[0] >= 0:
            first = max(first, end - seqlen_q - window[0])  # pages before it need not be there
        first = min(max(first, 0), end)
        sequence = b if cache_batch_idx is None else int(cache_batch_idx[b])
        read = functools.partial(
            _slots,
            first=first,
            end=end,
            sequence=sequence,
            table=None if block_table is None else block_table[b],
        )
        keys, values = read(k_cache).to(dtype), read(v_cache).to(dtype)
        if k_descale is not None and v_descale is not None:
            keys = keys * _scales(k_descale, b, read).to(dtype)
            values = values * _scales(v_descale, b, read).to(dtype)
        queries = q[b : b + 1].to(dtype)
        if q_descale is not None:
            queries = queries * q_descale[b].to(dtype).repeat_interleave(
                heads_q // k_cache.shape[2]
            ).unsqueeze(-1)
        out[b : b + 1], lse[b : b + 1] = flash.reference(
            queries,
            keys.unsqueeze(0),
            values.unsqueeze(0),
            softmax_scale=softmax_scale,
            window=window,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes[b : b + 1],
            sinks=sinks,
            dtype=dtype,
        )
    return out, lse


def _slots(cache: Tensor, *, first: int, end: int, sequence: int, table: Tensor | None) -> Tensor:
    """Slots first to end - 1 of a sequence: (end - first, heads_k, ...)."""
    if table is None:
        return cache[sequence, first:end]
    size = cache.shape[1]
    slot = torch.arange(first, end, device=cache.device)
    return cache[table[slot // size].long(), slot % size]


def _scales(scales: Tensor, b: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Scales of a sequence's keys: (keys, heads_k, 1), or (heads_k, 1) for all."""
    return (scales[b] if scales.dim() == 2 else read(scales)).unsqueeze(-1)
