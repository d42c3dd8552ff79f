"""`python -m cute_attn.eval MODEL`: KL, top-1 agreement and perplexity of a language model that attends in 8 bits.

`--policy FILE` also measures each layer alone and writes which layers may attend in 8 bits; `--needle` checks long
contexts on synthetic keys, without a model. On a machine without a Hopper GPU the emulator of the kernels attends.

Exit status: 0; 1 if the policy that was written exceeds its budget; 2 if the command cannot be run as given.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

TEXT_PATH: Final = Path(__file__).parents[1] / "bench" / "data" / "declaration.txt"
EPILOG = """examples:
  python -m cute_attn.eval HuggingFaceTB/SmolLM2-135M
  python -m cute_attn.eval ./my_model --text my_text.txt --tokens 2048 --json quality.json
  python -m cute_attn.eval ./my_model --policy policy.json --budget 0.002
  python -m cute_attn.eval --needle --keys 4096,131072,524288
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    from cute_attn.bench.__main__ import _names, _output, _positive, _sizes

    parser = argparse.ArgumentParser(
        prog="python -m cute_attn.eval",
        description="What 8-bit attention does to the predictions of a causal language model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="name or folder of a causal language model of transformers")
    parser.add_argument("--gguf", metavar="FILE", help="file in that folder, for a model in GGUF form")
    parser.add_argument(
        "--text", type=Path, default=TEXT_PATH, metavar="FILE", help="UTF-8 text (default: a bundled one)"
    )
    parser.add_argument(
        "--tokens", type=_positive, default=1024, metavar="N", help="of a window (default %(default)s)"
    )
    parser.add_argument(
        "--windows", type=_positive, default=1, metavar="N", help="of the text (default %(default)s)"
    )
    parser.add_argument(
        "--recipe", type=_names, metavar="NAMES", help="precisions (default: bf16 and every preset)"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="of the model (default: fp32 on a CPU, bf16)"
    )
    parser.add_argument("--backend", choices=("auto", "sm90", "emulator"), default="auto")
    parser.add_argument(
        "--policy", type=_output, metavar="FILE", help="measure layers alone and write a policy"
    )
    parser.add_argument(
        "--policy-recipe",
        default="accurate",
        metavar="NAME",
        help="its 8-bit precision (default %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=0.01,
        metavar="NATS",
        help="KL that the policy may cost (default %(default)s)",
    )
    parser.add_argument(
        "--needle", action="store_true", help="long contexts on synthetic keys; no model is needed"
    )
    parser.add_argument("--keys", type=_sizes, metavar="N,...", help="with --needle: numbers of keys")
    parser.add_argument(
        "--head-dim", type=_positive, default=128, metavar="N", help="with --needle (default 128)"
    )
    parser.add_argument("--json", type=_output, metavar="PATH", help="record: meta and rows")
    return parser


def quality_grids(found: Any) -> list[Any]:
    """Tables of an `Evaluation`."""
    from cute_attn.bench.report import Grid

    positions = found.qualities[0].positions
    grid = Grid(
        f"Predictions beside exact attention, {positions} positions",
        ["precision", "what ran", "KL", "top-1", "perplexity"],
        text_columns=2,
    )
    for quality in found.qualities:
        ran = "\n".join(f"{name} ({count})" for name, count in quality.kernels.items()) or "float32"
        numbers = [f"{quality.kl:.5f}", f"{quality.top1:.2%}", f"{quality.perplexity:.4f}"]
        grid.lines.append([quality.precision, ran, *numbers])
        for reason, count in quality.fallbacks.items():
            grid.notes.append(f"{quality.precision}: {count} calls otherwise, because {reason}")
    grid.notes.append("KL: of the next-token distribution from the exact one, in nats, mean.")
    grids = [grid]
    if found.layers:
        precisions = list(dict.fromkeys(error.precision for error in found.layers))
        alone = any(error.kl is not None for error in found.layers)
        layers = Grid(
            "Relative error of the attention output by layer, on exact inputs",
            ["layer", *precisions, *(["KL alone"] if alone else [])],
        )
        by_layer: dict[int, dict[str, Any]] = {}
        for error in found.layers:
            by_layer.setdefault(error.layer, {})[error.precision] = error
        for layer, errors in by_layer.items():
            cells = [f"{errors[name].rel_rmse:.2%}" if name in errors else "-" for name in precisions]
            kls = [f"{error.kl:.5f}" for error in errors.values() if error.kl is not None]
            layers.lines.append([str(layer), *cells, *(kls[:1] if alone else [])])
        grids.append(layers)
    return grids


def needle_grid(scores: Sequence[Any]) -> Any:
    """Table of `needle.measure`."""
    from cute_attn.bench.report import Grid

    lengths = sorted({score.keys for score in scores})
    grid = Grid(
        "Long contexts: right answers, and error of the output",
        ["task", "precision", *(f"{keys} keys" for keys in lengths)],
        text_columns=2,
    )
    cells = {(score.task, score.precision, score.keys): score for score in scores}
    for task, precision in dict.fromkeys((score.task, score.precision) for score in scores):
        row = [cells.get((task, precision, keys)) for keys in lengths]
        grid.lines.append(
            [task, precision] + ["-" if s is None else f"{s.right:.1%} ({s.rel_rmse:.1e})" for s in row]
        )
    grid.notes.append("needle: one key has half of the attention. average: all keys have about the same.")
    grid.notes.append("In brackets the error relative to the rms of the exact output (float64).")
    return grid


def rows_of(found: Any, backend: str, shape: dict[str, Any]) -> list[dict[str, Any]]:
    """An `Evaluation` as rows of a record."""
    from cute_attn.bench.peers import OURS
    from cute_attn.bench.record import make_row

    def row(precision: str, **more: Any) -> dict[str, Any]:
        dtype = "bf16" if precision in ("exact", "bf16") else "fp8"
        return make_row(
            provider=OURS,
            phase="quality",
            dtype=dtype,
            recipe=precision,
            backend=backend,
            **{**shape, **more},
        )

    rows = [
        row(
            quality.precision,
            kernel=" ".join(quality.kernels) or None,
            kl=quality.kl,
            top1=quality.top1,
            perplexity=quality.perplexity,
            positions=quality.positions,
        )
        for quality in found.qualities
    ]
    return rows + [
        row(error.precision, layer=error.layer, rel_rmse=error.rel_rmse, kl=error.kl)
        for error in found.layers
    ]


def _load(options: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """(model, ids (windows, tokens))."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more = {} if options.gguf is None else {"gguf_file": options.gguf}
    name = options.dtype or ("fp32" if device == "cpu" else "bf16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    tokenizer = AutoTokenizer.from_pretrained(options.model, **more)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, **more)
    model = model.to(device)
    ids = tokenizer(
        options.text.read_text(encoding="utf-8"), return_tensors="pt", add_special_tokens=False
    ).input_ids
    needed = options.tokens * options.windows
    if ids.shape[1] < needed:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens and {needed} are asked for; see --tokens and --text"
        )
    return model, ids[0, :needed].view(options.windows, options.tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.needle == (options.model is not None):
        parser.error("give a model or --needle")
    if options.policy is not None and not options.budget >= 0:
        parser.error(f"argument --budget: must be 0 or more, got {options.budget}")
    import torch
    from rich.console import Console

    from cute_attn.bench import record
    from cute_attn.bench.__main__ import header_lines, hopper_device

    console = Console()
    command = "python -m cute_attn.eval " + shlex.join(sys.argv[1:] if argv is None else argv)
    meta = record.collect_meta(command)
    for line in header_lines(meta):
        console.print(line, highlight=False)
    hopper, there = hopper_device()
    backend = options.backend if options.backend != "auto" else "sm90" if hopper else "emulator"
    if backend == "emulator":
        console.print(f"The emulator of the kernels attends{'' if hopper else f', because {there}'}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if options.needle:
            rows, status = _needle(options, backend, device, console), 0
        else:
            rows, status = _quality(options, backend, device, console)
    except (ImportError, OSError, ValueError) as error:
        console.print(f"error: {error}", style="bold red")
        return 2
    if options.json is not None:
        record.write(options.json, meta, rows)
    return status


def _needle(options: argparse.Namespace, backend: str, device: str, console: Any) -> list[dict[str, Any]]:
    from cute_attn.bench.peers import OURS, NotRun, need
    from cute_attn.bench.record import make_row
    from cute_attn.eval import needle

    precisions = options.recipe or ["bf16", "accurate", "fp8", "naive"]
    if backend == "sm90":
        try:
            need("flash_attn_interface")
        except NotRun as missing:
            console.print(f"FlashAttention-3 takes no part: {missing}", highlight=False)
        else:
            precisions = [*precisions, needle.FA3]
    lengths = options.keys or (needle.LENGTHS if backend == "sm90" else needle.LENGTHS[:1])
    scores = needle.measure(
        precisions,
        lengths,
        head_dim=options.head_dim,
        backend=backend,
        device=device,
    )
    console.print(needle_grid(scores).rich())
    return [
        make_row(
            provider=OURS if score.precision != needle.FA3 else "fa3",
            kernel=score.kernel,
            backend=backend,
            phase="needle",
            dtype="bf16" if score.precision in ("exact", "bf16") else "fp8",
            recipe=score.precision if score.precision != needle.FA3 else None,
            batch=1,
            seqlen_q=needle.QUERIES,
            seqlen_k=score.keys,
            heads_q=needle.HEADS,
            heads_k=needle.HEADS,
            head_dim=options.head_dim,
            causal=False,
            rel_rmse=score.rel_rmse,
            task=score.task,
            right=score.right,
        )
        for score in scores
    ]


def _quality(
    options: argparse.Namespace, backend: str, device: str, console: Any
) -> tuple[list[dict[str, Any]], int]:
    from cute_attn.bench.__main__ import Run
    from cute_attn.eval import quality
    from cute_attn.policy import LayerPolicy
    from cute_attn.precompile import model_shapes

    model, ids = _load(options, device)
    shapes = model_shapes(model)
    recipes = options.recipe or list(quality.PRECISIONS)
    alone = None
    if options.policy is not None:
        alone = options.policy_recipe
        recipes = list(dict.fromkeys((*recipes, alone)))
    progress_console = type(console)(stderr=True)
    with Run(options, console, progress_console).progress() as progress, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="cute_attn")
        task = progress.add_task("model", total=None)
        found = quality.evaluate(
            model,
            ids,
            recipes,
            backend=backend,
            layer_kl=alone,
            on_done=lambda what: progress.update(task, advance=1, description=f"done: {what}"),
        )
        status = 0
        if alone is not None:
            about = {
                "model": options.model,
                "tokens": ids.numel(),
                "budget": options.budget,
                "backend": backend,
            }
            policy = quality.choose_policy(found.layers, alone, options.budget, about)
            checked = quality.evaluate(model, ids, (), backend=backend, policy=policy).qualities[-1]
            found = quality.Evaluation((*found.qualities, checked), found.layers)
    for grid in quality_grids(found):
        console.print(grid.rich())
    if alone is not None:
        about |= {"kl": checked.kl, "top1": checked.top1}
        LayerPolicy(policy.default, policy.layers, about).save(options.policy)
        eight = sum(precision == alone for precision in policy.layers.values())
        console.print(
            f"{options.policy}: {eight} of {len(policy.layers)} layers in {alone!r}, KL {checked.kl:.5f} of "
            f"{options.budget:g} nats allowed. Use it with cute_attn.hf.register(policy={str(options.policy)!r}) and "
            "attn_implementation='cute_attn_policy'.",
            highlight=False,
        )
        if checked.kl > options.budget:
            console.print("The policy costs more than its budget: give a smaller --budget.", style="bold red")
            status = 1
    shape = {
        "batch": ids.shape[0],
        "seqlen_q": ids.shape[1],
        "seqlen_k": ids.shape[1],
        "heads_q": shapes.heads_q,
        "heads_k": shapes.heads_k,
        "head_dim": shapes.head_dim,
        "causal": True,
    }
    return rows_of(found, backend, shape), status


if __name__ == "__main__":
    sys.exit(main())
