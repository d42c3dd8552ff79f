"""Build, check and time variants of the quantiser in one go on a Hopper GPU, beside torch's copy of as many bytes.

    python scripts/tune_quantizer.py [--only REGEX] [--tokens 16384,4096] [--recipe accurate] [--rotary half]

A variant of `VARIANTS` sets constants of the kernels' modules. Each runs in a process of its own, which compiles past
the disk cache at the same time as the others and then takes its turn at the GPU. It is timed only after all its results
have agreed with `quantize_reference` to the bit. Calls are replayed from a CUDA graph, over inputs that together exceed
the L2 cache, so that the host does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96))
SHAPES = ((1, 1, 1, 1, 1), (2, 200, 333, 4, 2), (1, 1, 1000, 6, 2), (1, 2100, 2100, 40, 40))
VARIANTS: dict[str, dict[str, Any]] = {  # module.constant: value
    "shipped": {},
    "spans of 64 rows": {"quantize.HALVINGS": 3, "quantize.FULL": 10**8},
    "spans of 128 rows": {"quantize.FULL": 10**8},
    "spans of 512 rows": {"quantize.HALVINGS": 0},
    "two rounds": {"quantize.FULL": 2 * 132},
    "four rounds": {"quantize.FULL": 4 * 132},
}


def _run(name: str, recipe_name: str, rotary: str, tokens: list[int], turn: Any) -> list[str]:
    """Lines of one variant: compiled at once, checked and timed when it is its turn."""
    os.environ["CUTE_ATTN_DISABLE_DISK_CACHE"] = "1"
    import torch

    from cute_attn import launch, tiles
    from cute_attn.compile import compile_kernel
    from cute_attn.kernels.any import quantize, rows
    from cute_attn.quantize import PRESETS, Rotary, quantize_reference

    for constant, value in VARIANTS[name].items():
        module, attribute = constant.split(".")
        setattr({"rows": rows, "quantize": quantize}[module], attribute, value)
    recipe, lines = PRESETS[recipe_name], []
    configs = [replace(tiles.quantize_config(recipe, *dims, "bf16"), rotary=rotary) for dims in DIMS]
    for config in configs:
        compile_kernel(config)

    def tables(seqlen: int, head_dim: int) -> Rotary | None:
        if rotary == "none":
            return None
        phase = torch.rand(seqlen, head_dim // 2, device="cuda") * 6.28
        return Rotary(phase.cos().bfloat16(), phase.sin().bfloat16(), rotary == "interleaved")

    def tensors(shape: tuple[int, ...], head_dim: int, head_dim_v: int) -> list[Any]:
        batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
        sizes = (
            (seqlen_q, heads_q, head_dim),
            (seqlen_k, heads_k, head_dim),
            (seqlen_k, heads_k, head_dim_v),
        )
        return [torch.randn(batch, *size, device="cuda").bfloat16() for size in sizes]

    def wrong(config: Any, shape: tuple[int, ...]) -> list[str]:
        inputs, rotation = (
            tensors(shape, config.head_dim, config.head_dim_v),
            tables(shape[2], config.head_dim),
        )
        got = launch.launch_quantize(*inputs, recipe, config, rotary=rotation)
        arguments = {}
        if rotation is not None:
            arguments = dict(zip(("rotary_cos", "rotary_sin", "rotary_interleaved"), rotation, strict=True))
        want = quantize_reference(*inputs, recipe, **arguments)
        fields = ("q", "k", "vt", "q_scale", "k_scale", "v_scale")
        differ = [f for f in fields if not torch.equal(getattr(got, f).float(), getattr(want, f).float())]
        return [f"{config.name} {shape}: {', '.join(differ)} differ"] if differ else []

    def microseconds(calls: list[Any]) -> float:
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
        return sorted(times)[len(times) // 2]

    with turn:
        for config in configs:
            found = [line for shape in SHAPES for line in wrong(config, shape)]
            if found:
                lines += [f"{name}: WRONG {line}" for line in found]
                continue
            for count in tokens:
                heads = 2048 // config.head_dim
                moved = 3 * count * heads * (2 * config.head_dim + config.head_dim_v)
                sets = max(3, 400_000_000 // moved)  # bytes, several times the L2 cache
                inputs = [
                    tensors((1, count, count, heads, heads), config.head_dim, config.head_dim_v)
                    for _ in range(sets)
                ]
                rotation = tables(count, config.head_dim)
                call = partial(launch.launch_quantize, recipe=recipe, config=config, rotary=rotation)
                ours = microseconds([partial(call, *some) for some in inputs])
                pairs = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in range(sets)]
                copy = microseconds([partial(pair[0].copy_, pair[1]) for pair in pairs])
                lines.append(
                    f"{name:20s} {count:6d} tokens {config.name}: {ours:6.1f} us, copy {copy:6.1f} us"
                    f" ({moved / copy / 1e6:.2f} TB/s): {copy / ours:.1%}"
                )
                del inputs, pairs
                torch.cuda.empty_cache()
    return lines


def main() -> None:
    """Run the variants and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=".", help="regular expression on the names of variants")
    parser.add_argument("--tokens", default="16384,4096")
    parser.add_argument("--recipe", default="accurate")
    parser.add_argument("--rotary", choices=("none", "half", "interleaved"), default="none")
    args = parser.parse_args()
    names = [name for name in VARIANTS if re.search(args.only, name)]
    tokens = [int(text) for text in args.tokens.split(",")]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(len(names), mp_context=context) as pool:
        turn = manager.Lock()
        runs = [pool.submit(_run, name, args.recipe, args.rotary, tokens, turn) for name in names]
        for name, run in zip(names, runs, strict=True):
            error = run.exception()
            print(*(run.result() if error is None else [f"{name}: {error!r}"]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
