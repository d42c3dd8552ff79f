"""Long contexts on synthetic keys: is one key still found among many, and is the mean of all of them still right?

needle
    Each query points at one key, which gets half of the attention whatever the number of the others; its value is a
    code word. The answer is right if the output is nearest to that code word. Rounding of scores and of P spoils it.
average
    All scores are about equal, and each channel of V is 2 plus 1 or minus 1, one of them a little more often. The
    answer is right if the output is on the side of 2 where the exact mean is. A sum that loses its small terms spoils
    it: a tensor core that keeps one accumulator over all keys does at 8 bits (SageAttention2, arXiv 2411.10958).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn import dispatch
from cute_attn.bench import peers
from cute_attn.bench.cases import exact_rows
from cute_attn.dispatch import TORCH

__all__ = ["FA3", "LENGTHS", "TASKS", "Score", "make_task", "measure"]

FA3: Final = "fa3 fp8"  # FlashAttention-3, 8 bits with a scale of each head, where it is installed

LENGTHS: Final = (4096, 32768, 131072, 524288)
TASKS: Final = ("needle", "average")
QUERIES: Final = 64
HEADS: Final = 2
_SHARE: Final = 0.6  # of keys with the more frequent value, task "average"


@dataclass(frozen=True)
class Score:
    """Share of right answers, and error of the output relative to the exact one's rms, of one task and precision."""

    task: str
    precision: str
    keys: int
    right: float
    rel_rmse: float
    kernel: str


def make_task(
    task: str, keys: int, head_dim: int = 128, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], float]]:
    """Tensors of a task and its examiner.

    Args:
        task: of `TASKS`.
        keys: number of keys, at least QUERIES.
        head_dim: of q, k and v.
        device: of the tensors; the numbers are drawn there.

    Returns:
        q (1, QUERIES, HEADS, head_dim), k and v (1, keys, HEADS, head_dim), bfloat16; and a function from an output
        (HEADS, QUERIES, head_dim) to the share of right answers.

    Raises:
        ValueError: an unknown task, or too few keys.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; allowed: {', '.join(map(repr, TASKS))}")
    if keys < QUERIES:
        raise ValueError(f"keys is {keys}; allowed: at least {QUERIES}")
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    k = normal(1, keys, HEADS, head_dim)
    if task == "average":
        sign = (torch.rand(HEADS, head_dim, generator=generator, device=device) < 0.5).float() * 2 - 1
        more = torch.rand(1, keys, HEADS, head_dim, generator=generator, device=device) < _SHARE
        v = (2 + torch.where(more, sign, -sign)).bfloat16()
        wanted = v.double().mean(1)[0].sub(2).sign()[:, None]  # (HEADS, 1, head_dim)
        q = 0.05 * normal(1, QUERIES, HEADS, head_dim)
        return q.bfloat16(), k.bfloat16(), v, lambda out: float(((out - 2).sign() == wanted).double().mean())
    # Spread over all depths; a key of its own for each query and head.
    places = ((torch.arange(QUERIES, device=device) + 0.5) * keys / QUERIES).long()
    codes = (torch.rand(HEADS, QUERIES, head_dim, generator=generator, device=device) < 0.5).double() * 2 - 1
    v = 0.5 + normal(1, keys, HEADS, head_dim)
    v[0, places] = codes.transpose(0, 1).to(v.dtype)
    # q = a k / |k|^2 d: its own key has the score a sqrt(d), the others N(0, a^2), so that exp of those sums to
    # keys * exp(a^2 / 2). Equal for the smaller root of a^2 / 2 - a sqrt(d) + log(keys) = 0.
    inside = head_dim - 2 * math.log(keys)
    if inside <= 0:
        raise ValueError(f"keys is {keys}; allowed at head_dim {head_dim}: fewer than exp({head_dim / 2:g})")
    strength = math.sqrt(head_dim) - math.sqrt(inside)
    own = k[:, places]
    q = strength * math.sqrt(head_dim) * own / own.norm(dim=-1, keepdim=True)

    def right(out: Tensor) -> float:
        centred = out - out.mean(-1, keepdim=True)
        answers = torch.einsum("hqd,hnd->hqn", centred, codes).argmax(-1)
        return float((answers == torch.arange(QUERIES, device=answers.device)).double().mean())

    return q.bfloat16(), k.bfloat16(), v.bfloat16(), right


def measure(
    precisions: Sequence[str],
    lengths: Sequence[int] = LENGTHS,
    *,
    tasks: Sequence[str] = TASKS,
    head_dim: int = 128,
    backend: str = "auto",
    device: torch.device | str = "cuda",
    on_done: Callable[[Score], None] = lambda score: None,
) -> list[Score]:
    """Scores of every task, length and precision; "exact" (float64) comes first for each.

    Args:
        precisions: "bf16" (the 16-bit kernel), names of recipes, and `FA3`.
        backend: "sm90" or "emulator", as in `cute_attn.sdpa`.

    Raises:
        ValueError: an unknown precision or task, or tensors that no kernel serves.
        bench.peers.NotRun: `FA3`, which is not installed.
    """
    for precision in precisions:
        if precision == FA3:
            peers.need("flash_attn_interface")
        else:
            dispatch.check_options(precision, backend, "error")
    scores = []
    for task in tasks:
        for keys in lengths:
            q, k, v, right = make_task(task, keys, head_dim, device)
            rows = torch.arange(QUERIES, device=q.device)
            exact = exact_rows(q, k, v, [(0, head) for head in range(HEADS)], rows, causal=False)
            for precision in ("exact", *precisions):
                out, kernel = exact, "float64"
                if precision == FA3:
                    out, kernel = _fa3(q, k, v)[0].transpose(0, 1).double(), peers.fa3_name()
                elif precision != "exact":
                    options: dict[str, Any] = {"backend": backend}
                    chosen = dispatch.choose(q, k, v, precision=precision, **options)
                    if chosen.kernel == TORCH:
                        raise ValueError(f"no kernel serves {precision!r}: {chosen.reason}")
                    out = dispatch.attend(q, k, v, chosen, **options)[0].transpose(0, 1).double()
                    kernel = chosen.kernel
                error = float((out - exact).square().mean().sqrt() / exact.square().mean().sqrt())
                scores.append(Score(task, precision, keys, right(out), error, kernel))
                on_done(scores[-1])
    return scores


def _fa3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Out (1, QUERIES, HEADS, head_dim) of FlashAttention-3's FP8 forward, each head scaled to the range of e4m3."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    codes, scales = [], []
    for x in (q, k, v):
        scale = x.float().abs().amax((1, 3)) / largest  # (1, HEADS)
        codes.append((x.float() / scale[:, None, :, None]).to(torch.float8_e4m3fn))
        scales.append(scale)
    attend = peers.need("flash_attn_interface").flash_attn_func
    return peers.first(attend(*codes, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]))
