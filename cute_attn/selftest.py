"""`python -m cute_attn.selftest`: results of the kernels on this machine's GPU beside attention in float64.

Each case attends random tensors twice. It passes if all values are finite, the error against float64 on the 16-bit
inputs is within the bound of its precision, the log-sum-exp agrees, and both runs are the same to the bit. With
`--backend emulator` the stand-ins in torch are checked instead, on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from cute_attn import api, flash, reference
from cute_attn.dispatch import EXACT
from cute_attn.problem import ARCHS, CAPABILITIES, device_capability

__all__ = ["BOUNDS", "Case", "Result", "cases", "main", "run"]

# Relative rms error of the output on N(0, 1) inputs. Rounding V and P to e4m3 is worth 4e-2, e4m3 Q K^T the rest; the
# 16-bit kernel's is that of rounding P and the output. A wrong mask, scale or tile gives about 1.
BOUNDS: Final = {EXACT: 6e-3, "accurate": 5e-2, "fp8": 7e-2, "paper": 7e-2, "naive": 7e-2}
# Absolute error of the log-sum-exp: P of 8 bits is summed rounded, and with few keys one key's rounding shows.
LSE_BOUNDS: Final = {EXACT: 5e-3, "accurate": 0.2, "fp8": 0.4, "paper": 0.4, "naive": 0.4}


@dataclass(frozen=True)
class Case:
    """One call: precision ("bf16" for the 16-bit kernel, or a recipe), dtype, shape and mask."""

    precision: str
    dtype: torch.dtype
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        what = kind if self.precision == EXACT else f"{self.precision} from {kind}"
        mask = "causal" if self.causal else "full"
        return (
            f"{what}, d {self.head_dim}, {mask}, {self.seqlen_q} x {self.seqlen_k}, "
            f"heads {self.heads_q}/{self.heads_k}"
        )


@dataclass(frozen=True)
class Result:
    """What a case gave. `reason` says what is wrong; None where nothing is."""

    case: Case
    error: float | None  # relative rms error against float64
    seconds: float  # with compilation, where the kernel was not compiled before
    reason: str | None


def cases(full: bool = False) -> list[Case]:
    """A few cases for each precision and head_dim; with `full` more head_dims, lengths, and the baseline recipes."""
    head_dims = (32, 64, 80, 96, 128, 192, 256) if full else (64, 128, 256)
    precisions = tuple(BOUNDS) if full else (EXACT, "accurate", "fp8")
    shapes = [(200, 333, 4, 2), (1, 700, 8, 1)] + ([(1024, 1024, 2, 2), (513, 100, 2, 1)] if full else [])
    return [
        Case(precision, dtype, *shape, head_dim, causal)
        for precision, head_dim, shape, causal in itertools.product(
            precisions, head_dims, shapes, (False, True)
        )
        for dtype in ((torch.bfloat16, torch.float16) if full or precision == EXACT else (torch.bfloat16,))
        if not (causal and shape[0] == 1)  # the same kernel as without a mask
    ]


def run(case: Case, backend: str = "auto", device: torch.device | str = "cuda") -> Result:
    """Attend twice and compare. An exception is a result, too, with its text as the reason."""
    generator = torch.Generator().manual_seed(hash((case.seqlen_q, case.head_dim)) % 2**31)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        return torch.randn(2, seqlen, heads, case.head_dim, generator=generator).to(case.dtype).to(device)

    q = normal(case.seqlen_q, case.heads_q)
    k, v = normal(case.seqlen_k, case.heads_k), normal(case.seqlen_k, case.heads_k)
    start = time.perf_counter()
    try:
        (out, lse), (again, _) = (_attend(case, q, k, v, backend) for _ in range(2))
        same = torch.equal(out, again)
    except Exception as raised:
        return Result(case, None, time.perf_counter() - start, f"{type(raised).__name__}: {raised}")
    seconds = time.perf_counter() - start
    exact, exact_lse = reference.attention(q, k, v, causal=case.causal)
    rms = exact.square().mean().sqrt()
    error = float((out.double() - exact).square().mean().sqrt() / rms)
    seen = exact_lse.isfinite()
    reason = None
    if not bool(out.isfinite().all()):
        reason = "the output is not finite"
    elif not error <= BOUNDS[case.precision]:
        reason = f"the error is {error:.1e}, the bound {BOUNDS[case.precision]:.1e}"
    elif not torch.equal(lse.isfinite(), seen):
        reason = "rows without keys are not those of the mask"
    elif bool(seen.any()) and not float((lse - exact_lse)[seen].abs().max()) <= LSE_BOUNDS[case.precision]:
        reason = f"the log-sum-exp is off by {float((lse - exact_lse)[seen].abs().max()):.1e}"
    elif not same:
        reason = "two runs differ"
    return Result(case, error, seconds, reason)


def _attend(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    found: Any
    if case.precision == EXACT:
        stand_in = "reference" if backend == "emulator" else backend
        found = flash.flash_attn_func(q, k, v, causal=case.causal, return_lse=True, backend=stand_in)
    else:
        found = api.fp8_attention(
            q, k, v, recipe=case.precision, causal=case.causal, return_lse=True, backend=backend
        )
    out, lse = found
    return out, lse


def run_all(
    chosen: Iterable[Case], backend: str, device: torch.device | str, on_done: Callable[[Result], None]
) -> list[Result]:
    """Results in order. Ends early where the CUDA context is lost, for then every later case would fail."""
    results = []
    for case in chosen:
        results.append(run(case, backend, device))
        on_done(results[-1])
        if results[-1].error is None and torch.device(device).type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                break
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 where a case fails; 2 where there is nothing to run on."""
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn.selftest", description="Results of the kernels on this GPU beside float64."
    )
    parser.add_argument("--full", action="store_true", help="more head dimensions, lengths and recipes")
    parser.add_argument(
        "--backend",
        choices=("sm90", "sm80", "emulator"),
        help="sm90: the kernels of Hopper; sm80: the 16-bit kernel by mma.sync; emulator: the stand-ins in torch "
        "(default: the GPU's)",
    )
    options = parser.parse_args(argv)
    from rich.console import Console

    console = Console(highlight=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = device_capability(torch.device(device, 0) if device == "cuda" else torch.device(device))
    others = capability in ARCHS and capability[0] != 9
    backend = options.backend or ("sm80" if others else "sm90")
    runs = {"sm90": capability is not None and capability[0] == 9, "sm80": capability in ARCHS}
    if not runs.get(backend, True):
        kind = "Hopper GPU" if backend == "sm90" else f"GPU of compute capability {CAPABILITIES}"
        console.print(
            f"There is no {kind} to test (python -m cute_attn.doctor says more). --backend emulator checks the "
            "stand-ins in torch."
        )
        return 2
    chosen = [case for case in cases(options.full) if backend != "sm80" or case.precision == EXACT]

    def show(result: Result) -> None:
        verdict = (
            "[green]ok[/green]" if result.reason is None else f"[bold red]FAILED[/bold red] {result.reason}"
        )
        error = "-" if result.error is None else f"{result.error:.1e}"
        console.print(f"{result.case!s:<58} {error:>8} {result.seconds:6.1f} s  {verdict}", soft_wrap=True)

    results = run_all(chosen, backend, device, show)
    failed = [result for result in results if result.reason is not None]
    left = len(chosen) - len(results)
    console.print(
        f"{len(results) - len(failed)} of {len(chosen)} cases passed"
        + (f"; {left} not run, as the GPU no longer answers" if left else "")
    )
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
