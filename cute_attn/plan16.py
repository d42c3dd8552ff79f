"""What one call of `flash_attn_func` does, and why: the report of `flash_attn_explain`.

The choices are those of `plan.forward16_choice`, which the call itself goes by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_attn.kernels.config import SMEM_LIMIT, Fwd16Config
from cute_attn.plan import _choose_backend, forward16_choice, report_text, tiles_text, work_tiles


@dataclass(frozen=True)
class Problem16:
    """One call as plain data.

    Attributes:
        batch: sequences.
        seqlen_q, seqlen_k: queries and keys of each sequence.
        heads_q, heads_k: query heads, and the key/value heads that groups of them share.
        head_dim: of q and k.
        head_dim_v: of v and the output.
        dtype: float16 or bfloat16.
        window: (left, right) as asked for, right 0 with a causal mask; -1 for no end.
        softmax_scale: factor of q k^T.
        softcap: 0 for none.
        alibi, sinks: whether there are any.
        copied: names of the tensors that are copied before the launch.
        capability: CUDA compute capability of the tensors' device; None for CPU tensors and GPUs of other makers.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    window: tuple[int, int]
    softmax_scale: float
    softcap: float
    alibi: bool
    sinks: bool
    copied: tuple[str, ...]
    capability: tuple[int, int] | None

    @property
    def is_empty(self) -> bool:
        """Whether the result is known without arithmetic."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def mask(self) -> str:
        """In words."""
        left, right = self.window
        if self.window == (-1, -1):
            return "full"
        return "causal" if self.window == (-1, 0) else f"window ({left}, {right})"


@dataclass(frozen=True)
class Plan16:
    """What one call will do. `str(plan)` is the readable form.

    Attributes:
        backend: "sm90" (the Hopper kernel) or "reference" (torch in float32, with the scores in memory).
        kernel: name of the kernel; "reference" where none runs.
        config: what the kernel is compiled for; None where none runs.
        reasons: one sentence for each choice.
        work_tiles: tiles of query rows, which at most one CTA an SM takes in turns; 0 where nothing is launched.
        problem: what was planned for.
    """

    backend: str
    kernel: str
    config: Fwd16Config | None
    reasons: tuple[str, ...]
    work_tiles: int
    problem: Problem16

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA of the kernel; 0 where none runs."""
        return 0 if self.config is None else self.config.smem_bytes

    def __str__(self) -> str:
        problem, config = self.problem, self.config
        rows = problem.batch * problem.seqlen_q * problem.heads_q
        features = [
            *([f"softcap {problem.softcap:g}"] if problem.softcap else []),
            *(["ALiBi"] if problem.alibi else []),
            *(["sinks"] if problem.sinks else []),
        ]
        lines = {
            "backend": self.backend,
            "kernel": self.kernel,
            "problem": f"batch {problem.batch}, seqlen_q {problem.seqlen_q}, seqlen_k {problem.seqlen_k}, "
            f"heads_q {problem.heads_q}, heads_k {problem.heads_k}, head_dim {problem.head_dim}, "
            + (f"head_dim_v {problem.head_dim_v}, " if problem.head_dim_v != problem.head_dim else "")
            + ", ".join([problem.mask, *features, str(problem.dtype)]),
        }
        if config is not None:
            steps = (
                "Q K^T of the next tile under the softmax of this one" if config.overlap else "in sequence"
            )
            lines["tiles"] = tiles_text(
                config, steps + ("; warpgroups take turns at the tensor core" if config.pingpong else "")
            )
            lines["smem"] = f"{self.smem_bytes} of {SMEM_LIMIT} bytes"
            lines["work tiles"] = str(self.work_tiles)
        elif not problem.is_empty:
            lines["scores"] = f"{4 * rows * problem.seqlen_k / 2**20:.3g} MiB, several times"
        lines["results"] = (
            f"{2 * rows * problem.head_dim_v / 2**20:.3g} MiB out, {4 * rows / 2**20:.3g} MiB lse"
        )
        return report_text(lines, self.reasons)


def make_plan16(problem: Problem16, config: Fwd16Config | None, backend: str) -> Plan16:
    """The plan of a call that `flash_attn_func` has chosen `config` for; None where no kernel runs.

    Args:
        backend: as asked for, checked.
    """
    if backend == "reference":
        chosen, why = backend, "backend 'reference' was asked for"
    else:
        chosen, why = _choose_backend(problem.capability, backend)
    reasons = [why]
    if config is not None:
        again, choices = forward16_choice(
            config.head_dim,
            config.head_dim_v,
            config.dtype,
            config.causal,
            config.window,
            config.softcap,
            config.alibi,
            config.sinks,
            problem.heads_q // problem.heads_k,
            problem.seqlen_q,
        )
        assert again == config, "the kernel is not the one that the choices lead to"
        if problem.mask != "full" and not (config.causal or config.window):
            rows = "one query row sees every key" if problem.seqlen_q == 1 else "every query sees every key"
            reasons.append(f"{rows}: the mask hides nothing, so the kernel without one serves")
        elif problem.mask.startswith("window") and config.causal:
            reasons.append("the window's left end cuts nothing: the causal kernel serves")
        elif config.window:
            reasons.append("a tile visits the key blocks that its rows see, and no others")
        reasons += choices
        if problem.softmax_scale <= 0:
            reasons.append("softmax_scale is not positive: a pass over q changes its sign, or makes it 0")
        reasons += [
            f"{name} is copied first: TMA wants an address and strides of multiples of 16 bytes, none 0"
            for name in problem.copied
        ]
    elif problem.is_empty:
        reasons.append(
            "nothing is launched: " + ("there are no keys" if problem.seqlen_k == 0 else "there is no output")
        )
    tiles = 0
    if config is not None:
        tiles = work_tiles(config, problem.batch, problem.seqlen_q, problem.heads_q, problem.heads_k)
    kernel = "reference" if config is None else config.name
    return Plan16(chosen, kernel, config, tuple(reasons), tiles, problem)
