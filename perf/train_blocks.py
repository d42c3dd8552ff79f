"""Forward and backward of a stack of 16 GPT blocks in bf16: time of a step and peak memory, by attention.

    python perf/train_blocks.py [--json FILE]

Everything but attention is the same torch code. Providers take turns in rounds; a round of one is a step that is not
timed and `--steps` that are. `peak_bytes` is what torch's allocator held at most during a step, parameters (bf16) and
their gradients included. There is no optimiser. Rows have phase "train_step" and the field `layers`.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cute_attn.bench import record

sys.path.insert(0, str(Path(__file__).parent))
import gpt

# batch, seqlen, head_dim: 16384 tokens
SHAPES = ((8, 2048, 128), (2, 8192, 128), (1, 16384, 128), (1, 16384, 64))
PROVIDERS = ("cute_attn", "cute_attn fp8", "sdpa", "sdpa_cudnn")


def timer(device: str) -> Callable[[Callable[[], object]], float]:
    """A function that runs another and returns its milliseconds."""

    def on_host(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    def on_gpu(run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    return on_gpu if device.startswith("cuda") else on_host


def rows_of(
    shape: tuple[int, int, int],
    providers: Sequence[str],
    *,
    layers: int,
    width: int,
    rounds: int,
    steps: int,
    device: str,
) -> list[dict[str, Any]]:
    """One row for each provider, of one shape (batch, seqlen, head_dim)."""
    batch, seqlen, head_dim = shape
    heads = width // head_dim
    torch.manual_seed(0)
    with torch.device(device):
        stack = gpt.Stack(layers, width, heads).to(torch.bfloat16)
        x = torch.randn(batch, seqlen, width, dtype=torch.bfloat16)
        dout = torch.randn_like(x)
    measure, gpu = timer(device), device.startswith("cuda")
    times: dict[str, list[float]] = {provider: [] for provider in providers}
    peaks: dict[str, int] = {}
    failed: dict[str, str] = {}

    def step(attend: gpt.Attend) -> None:
        for parameter in stack.parameters():
            parameter.grad = None
        stack(x, attend).backward(dout)

    for number in range(rounds + 1):
        for provider in providers:
            if provider in failed:
                continue
            attend = gpt.attention(provider, device)
            try:
                step(attend)  # in the first round it compiles
                if gpu and number == 0:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    step(attend)
                    torch.cuda.synchronize()
                    peaks[provider] = torch.cuda.max_memory_allocated()
                elif number:
                    times[provider] += [measure(lambda attend=attend: step(attend)) for _ in range(steps)]
            except (RuntimeError, ValueError) as error:
                failed[provider] = " ".join(str(error).split())[:300] or repr(error)
    rows = []
    for provider in providers:
        row = record.make_row(
            provider=provider.split()[0],
            backend="torch" if provider.startswith("sdpa") else "sm90" if gpu else "reference",
            kernel=provider,
            phase="train_step",
            dtype="fp8" if provider.endswith("fp8") else "bf16",
            recipe=gpt.recipe_of(provider),
            batch=batch,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            heads_q=heads,
            heads_k=heads,
            head_dim=head_dim,
            causal=True,
            layers=layers,
            d_model=width,
        )
        if provider in failed:
            row.update(status="failed", reason=failed[provider])
        else:
            found = times[provider]
            row.update(
                ms=statistics.median(found),
                ms_min=min(found),
                ms_max=max(found),
                peak_bytes=peaks.get(provider),
            )
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if this library failed somewhere."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="record to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--d-model", type=int, default=2048)
    parser.add_argument(
        "--shapes", help="BATCHxSEQLENxHEAD_DIM,... (default: 16384 tokens of several lengths)"
    )
    parser.add_argument("--device", default="cuda", help="default: cuda; on a CPU the definitions stand in")
    options = parser.parse_args(words)
    shapes = SHAPES
    if options.shapes:
        shapes = tuple(tuple(map(int, part.split("x"))) for part in options.shapes.split(","))  # type: ignore[assignment]
    rows = []
    for shape in shapes:
        found = rows_of(
            shape,
            PROVIDERS,
            layers=options.layers,
            width=options.d_model,
            rounds=options.rounds,
            steps=options.steps,
            device=options.device,
        )
        for row in found:
            time_of = f"{row['ms']:.1f} ms" if row["status"] == "ok" else row["reason"][:80]
            peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
            print(
                f"d {shape[2]} seqlen {shape[1]} batch {shape[0]}: {row['kernel']} {time_of}{peak}",
                flush=True,
            )
        rows += found
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    if options.json:
        record.write(
            options.json,
            record.collect_meta(f"python perf/train_blocks.py {shlex.join(words)}".strip()),
            rows,
        )
    return int(any(row["status"] != "ok" and row["provider"] == "cute_attn" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
