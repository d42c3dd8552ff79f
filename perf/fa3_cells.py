"""Cells of the grid of fa3_grid.py: what there is, one call of the library, and what is wrong with its result."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import cute_attn
from cute_attn import launch, memory
from cute_attn.remember import Remembered

LENGTHS = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
)  # fmt: skip
VARLEN_LENGTHS = (
    (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217), (113, 211),
    (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
    (4096, 4096),
)  # fmt: skip
HEAD_DIMS = {64: (256, 64), 96: (96,), 128: (128,), 192: (128, 192), 256: (256,)}  # of Q and K: those of V
HEADS = 6
HEADS_K = {"mha": 6, "gqa": 2, "mqa": 1}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
SOFTCAP = 15.0
# Of torch's error. P in e4m3 by its code is 1.2 times as far off as by conversion, and largest errors scatter.
ALLOWED = {"bf16": 2.0, "fp16": 2.0, "e4m3": 3.0}
LSE_ERROR = {"bf16": 1e-3, "fp16": 1e-3, "e4m3": 0.1}  # relative where lse exceeds 1


Group = tuple[str, int, int, bool, bool, bool, bool]


@dataclass(frozen=True)
class Cell:
    """One call of the grid."""

    dtype: str
    heads: str  # "mha", "gqa" or "mqa"
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    local: bool
    softcap: bool
    varlen: bool = False
    unused: bool = False  # keys behind those that count, in every sequence

    @property
    def name(self) -> str:
        """Unique; --only searches it."""
        masks = (name for name in ("causal", "local", "softcap", "varlen", "unused") if getattr(self, name))
        dims = f"d{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}")
        return "-".join([self.dtype, self.heads, dims, f"{self.seqlen_q}x{self.seqlen_k}", *masks])

    @property
    def group(self) -> Group:
        """Cells of a group differ in heads and lengths, and share most of their kernels."""
        return (
            self.dtype, self.head_dim, self.head_dim_v, self.causal, self.local, self.softcap, self.varlen
        )  # fmt: skip

    @property
    def unsupported(self) -> str | None:
        """Why the library has no such call; None if it has."""
        if self.dtype == "e4m3" and self.varlen:
            return "no function takes ready e4m3 tensors of unlike length"
        return None

    @property
    def batch(self) -> int:
        """Sequences."""
        return 9 if (self.seqlen_q if self.varlen else self.seqlen_k) <= 2048 else 2


def cells() -> list[Cell]:
    """The whole grid. Of e4m3 operands V has the head dimension of Q."""
    found = []
    flags = (False, True)
    for varlen in flags:
        for dtype, heads, (head_dim, of_v), lengths, causal, local, softcap in itertools.product(
            DTYPES, HEADS_K, HEAD_DIMS.items(), VARLEN_LENGTHS if varlen else LENGTHS, flags, flags, flags
        ):
            for head_dim_v, unused in itertools.product(
                (head_dim,) if dtype == "e4m3" else of_v, flags if varlen else (False,)
            ):
                found.append(
                    Cell(dtype, heads, head_dim, head_dim_v, *lengths, causal, local, softcap, varlen, unused)
                )
    return found


# ------------------------------------------------------------------------------------------------------------
# One call
# ------------------------------------------------------------------------------------------------------------


@dataclass
class Sizes:
    """What is drawn for a cell beside the contents of its tensors."""

    window: tuple[int, int]
    lengths_q: list[int]  # of the sequences
    lengths_k: list[int]  # of the keys that count
    room_k: list[int]  # with those behind them


def draw_sizes(cell: Cell, seed: int) -> Sizes:
    """The same for a cell and a seed."""
    generator = random.Random(f"{seed} {cell.name}")

    def below(low: int, high: int) -> int:
        return generator.randint(low, max(low, high))

    batch = cell.batch
    lengths_q, room_k = [cell.seqlen_q] * batch, [cell.seqlen_k] * batch
    lengths_k = room_k
    if cell.varlen:
        lengths_q = [below(max(1, cell.seqlen_q - 20), cell.seqlen_q) for _ in range(batch)]
        room_k = [below(max(0, cell.seqlen_k - 20), cell.seqlen_k) for _ in range(batch)]
        # every fifth sequence is empty, and the last
        room_k = [0 if i % 5 == 0 or i == batch - 1 else room for i, room in enumerate(room_k)]
        lengths_k = [below(room // 3, room) for room in room_k] if cell.unused else room_k
    window = (-1, -1)
    if cell.local:
        window = (below(0, cell.seqlen_k - 1), below(0, cell.seqlen_k - 1))
    return Sizes(window, lengths_q, lengths_k, room_k)


@dataclass
class Inputs:
    """Tensors of a call: a batch, or sequences one behind another."""

    q: Tensor
    k: Tensor
    v: Tensor
    descales: tuple[Tensor, ...] | None  # of q, k, v: (batch, heads_k)
    sizes: Sizes


def make_inputs(cell: Cell, device: str, seed: int, contents: bool = True) -> Inputs:
    """Tensors of a cell, random or, to plan its call, with any contents. With softcap scores reach its range."""
    sizes, batch, heads_k = draw_sizes(cell, seed), cell.batch, HEADS_K[cell.heads]
    rows_q, rows_k = sum(sizes.lengths_q), sum(sizes.room_k)
    shapes = [
        (rows_q, HEADS, cell.head_dim),
        (rows_k, heads_k, cell.head_dim),
        (rows_k, heads_k, cell.head_dim_v),
    ]
    dtype, descales = DTYPES[cell.dtype], None
    if contents:
        torch.manual_seed(random.Random(f"{seed} {cell.name} tensors").getrandbits(60))
        q, k, v = (torch.randn(shape, device=device) for shape in shapes)
        if cell.softcap:
            q *= SOFTCAP / 4
        q, k, v = (x.to(dtype) for x in (q, k, v))
    else:
        q, k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    if not cell.varlen:
        q, k, v = (x.unflatten(0, (batch, x.shape[0] // batch)) for x in (q, k, v))
    if cell.dtype == "e4m3":
        descales = tuple(torch.rand(3, batch, heads_k, device=device).mul_(2).unbind())
    return Inputs(q, k, v, descales, sizes)


def call(cell: Cell, x: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of the library."""
    options: dict[str, Any] = {"causal": cell.causal, "return_lse": True, "backend": backend}
    if cell.local:
        options["window_size"] = x.sizes.window
    if cell.softcap:
        options["softcap"] = SOFTCAP
    if x.descales is not None:
        options |= dict(zip(("q_descale", "k_descale", "v_descale"), x.descales, strict=True))
        return cute_attn.flash_attn_fp8_func(x.q, x.k, x.v, **options)
    if not cell.varlen:
        return cute_attn.flash_attn_func(x.q, x.k, x.v, **options)  # type: ignore[return-value]

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=x.q.device)

    sizes = x.sizes
    starts_q, starts_k = (
        on_device([0, *itertools.accumulate(lengths)]) for lengths in (sizes.lengths_q, sizes.room_k)
    )
    if cell.unused:
        options["seqused_k"] = on_device(sizes.lengths_k)
    longest = max(sizes.lengths_q), max(sizes.room_k)
    return cute_attn.flash_attn_varlen_func(  # type: ignore[return-value]
        x.q, x.k, x.v, starts_q, starts_k, *longest, **options
    )


@contextmanager
def recorded_kernels() -> Iterator[list[Any]]:
    """Calls inside launch nothing; the list takes the configurations that they ask for."""
    asked: list[Any] = []

    def note(config: Any) -> Callable[..., None]:
        asked.append(config)
        return lambda *args: None

    kept, launch.compile_kernel = launch.compile_kernel, note
    try:
        yield asked
    finally:
        launch.compile_kernel = kept
        forget_calls()  # those that were made ready hold what `note` returned


def forget_calls() -> None:
    """Let the package forget every call that it remembers."""
    for name, module in list(sys.modules.items()):
        if name.startswith("cute_attn."):
            for value in vars(module).values():
                if isinstance(value, Remembered):
                    value.clear()


class _PoisonEmpty(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return fill_with_nan(result) if func is torch.empty else result


def fill_with_nan(x: Tensor) -> Tensor:
    """All bits set: a NaN in every dtype that has one."""
    if x.numel():
        x.view(torch.uint8).fill_(0xFF)
    return x


@contextmanager
def poisoned() -> Iterator[None]:
    """What `torch.empty` and `cute_attn.memory.new_empty` return holds NaN."""
    kept = memory._empty_strided_cuda

    def new(*args: Any) -> Tensor:
        return fill_with_nan(kept(*args))

    memory._empty_strided_cuda = new
    try:
        with _PoisonEmpty():
            yield
    finally:
        memory._empty_strided_cuda = kept


# ------------------------------------------------------------------------------------------------------------
# What is wrong with a result
# ------------------------------------------------------------------------------------------------------------


@dataclass
class Errors:
    """Largest errors of a call; of sequences of unlike length those of the one nearest to what is allowed, or farthest
    above."""

    out: float
    allowed: float
    torch: float  # of torch's attention
    lse: float  # of all sequences; absolute, or relative where lse exceeds 1
    where: str  # of the first output that is too far off, if any
    empty_rows: bool  # rows without keys are 0 and -inf, in all sequences

    def excess(self, limit_lse: float) -> str | None:
        """What is wrong; None if nothing is."""
        wrong = []
        if not self.out <= self.allowed:
            wrong.append(f"error {self.out:.3e}, allowed {self.allowed:.3e}, first at {self.where}")
        if not self.lse <= limit_lse:
            wrong.append(f"lse error {self.lse:.3e}, allowed {limit_lse:g}")
        if not self.empty_rows:
            wrong.append("a row without keys is not 0 and -inf")
        return "; ".join(wrong) or None


def padded(x: Tensor, lengths: list[int]) -> Tensor:
    """Sequences one behind another, (rows, ...), as (sequences, rows of the longest, ...); 0 behind the others, one
    such row at least."""
    found = x.new_zeros((len(lengths), max(1, *lengths), *x.shape[1:]))
    for row, part in zip(found, x.split(lengths), strict=True):
        row[: len(part)] = part
    return found


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    dtype: torch.dtype,
    p_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, with the scores in memory, which all steps overwrite: they are the most of it.

    Args:
        q, k, v: (batch, seqlen, heads, dim).
        hidden: (batch, seqlen_q, seqlen_k) bool.
        softcap: 0 for none.
        dtype: of the arithmetic.
        p_dtype: where given, P, of which the largest of a row is 1, is rounded to it before the product with V.

    Returns:
        (out, lse) of `dtype`: (batch, seqlen_q, heads_q, head_dim_v), (batch, seqlen_q, heads_q).
    """
    (seqlen_q, heads), heads_k = q.shape[1:3], k.shape[2]
    # rows of all query heads of a key head behind one another: (batch, heads_k, group * seqlen_q, head_dim)
    q = q.to(dtype).unflatten(2, (heads_k, heads // heads_k)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k, v = (x.to(dtype).transpose(1, 2) for x in (k, v))
    p = (q @ k.transpose(2, 3)).mul_(softmax_scale)
    if softcap:
        p.div_(softcap).tanh_().mul_(softcap)
    p.unflatten(2, (-1, seqlen_q)).masked_fill_(hidden[:, None, None], -math.inf)
    top = p.amax(dim=3, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    total = p.sub_(top).exp_().sum(dim=3, keepdim=True)
    lse = top + total.log()
    shares = total.masked_fill(total == 0.0, 1.0)
    out = p.div_(shares) @ v if p_dtype is None else (p.to(p_dtype).to(dtype) @ v).div_(shares)
    out, lse = (x.unflatten(2, (-1, seqlen_q)).permute(0, 3, 1, 2, 4).flatten(2, 3) for x in (out, lse))
    return out, lse.squeeze(3)


def hidden_keys(cell: Cell, sizes: Sizes, device: torch.device) -> Tensor:
    """(batch, seqlen_q, seqlen_k) bool, of the longest sequence: keys that a query does not see."""

    def numbers(given: Any) -> Tensor:
        return torch.tensor(list(given), dtype=torch.int32, device=device)

    count_q, count_k = max(sizes.lengths_q), max(1, *sizes.room_k)
    last = numbers(sizes.lengths_k).view(-1, 1, 1)
    key = torch.arange(count_k, dtype=torch.int32, device=device)
    own = torch.arange(count_q, dtype=torch.int32, device=device).view(1, -1, 1)
    own = own + (last - numbers(sizes.lengths_q).view(-1, 1, 1))  # the key at a query's own position
    left, right = sizes.window
    hidden = key >= last
    if cell.causal:
        right = 0
    if left >= 0:
        hidden = hidden | (key < own - left)
    if right >= 0:
        hidden = hidden | (key > own + right)
    return hidden.expand(-1, count_q, -1)


def compare(cell: Cell, x: Inputs, out: Tensor, lse: Tensor) -> Errors:
    """Errors of (out, lse) against float64: largest ones of the whole batch, or of each sequence of unlike length."""
    sizes, q, k, v = x.sizes, x.q, x.k, x.v
    if cell.varlen:
        q, out, lse = (padded(y, sizes.lengths_q) for y in (q, out, lse.T))
        k, v = (padded(y, sizes.room_k) for y in (k, v))
    else:
        lse = lse.transpose(1, 2)
    if x.descales is not None:
        q, k, v = (
            y.float() * d.repeat_interleave(y.shape[2] // d.shape[1], dim=1)[:, None, :, None]
            for y, d in zip((q, k, v), x.descales, strict=True)
        )
    hidden = hidden_keys(cell, sizes, q.device)
    options: dict[str, Any] = {"softmax_scale": 1.0 / math.sqrt(cell.head_dim), "softcap": 0.0}
    if cell.softcap:
        options["softcap"] = SOFTCAP
    exact, exact_lse = attention(q, k, v, hidden, dtype=torch.float64, **options)
    if cell.dtype == "e4m3":
        options |= {"dtype": torch.float32, "p_dtype": torch.float8_e4m3fn}
    rough, _ = attention(q, k, v, hidden, **({"dtype": q.dtype} | options))
    rows = torch.arange(exact.shape[1], device=q.device)
    counts = torch.tensor(sizes.lengths_q, device=q.device)
    behind = (rows >= counts[:, None]).unsqueeze(2)  # (batch, seqlen_q, 1): rows that pad a sequence

    def off(got: Tensor) -> Tensor:
        """Errors, 0 of rows that pad, infinite for NaN."""
        difference = (got.double() - exact).abs_().masked_fill_(behind.unsqueeze(3), 0.0)
        return difference.nan_to_num_(nan=math.inf, posinf=math.inf)

    def largest(of: Tensor) -> Tensor:
        return of.flatten(1).amax(dim=1) if cell.varlen else of.amax().view(1)

    difference = off(out)
    error, theirs = largest(difference), largest(off(rough.to(out.dtype)))
    scale = largest(exact.masked_fill(behind.unsqueeze(3), 0.0).abs())
    allowed = ALLOWED[cell.dtype] * theirs + torch.finfo(out.dtype).eps * scale
    empty = (exact_lse == -math.inf) & ~behind
    wrong_empty = (((out != 0).any(dim=3) | (lse != -math.inf)) & empty).any()
    lse_error = (lse.double() - exact_lse).abs() / exact_lse.abs().clamp(min=1.0)
    lse_error = lse_error.masked_fill(empty | behind, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).amax()
    numbers = torch.cat([error, allowed, theirs, torch.stack([lse_error, wrong_empty.double()])]).tolist()
    *by_part, worst_lse, any_wrong = numbers
    count = len(error)
    parts = list(zip(by_part[:count], by_part[count : 2 * count], by_part[2 * count :], strict=True))
    # The share of what is allowed; where nothing is, no error is none of it.
    worst = max(parts, key=lambda part: part[0] / part[1] if part[1] else math.inf if part[0] else 0.0)
    where = ""
    if any(part[0] > part[1] for part in parts):
        at = (difference > allowed.view(-1, 1, 1, 1)).nonzero()[0].tolist()
        where = f"(batch, query, head, column) {at}"
    return Errors(*worst, worst_lse, where, not any_wrong)
