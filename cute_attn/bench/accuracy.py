"""Error of 8-bit attention against float64, for each input and recipe.

Two errors are told apart:

total
    output of quantise-and-attend against float64 attention on the original 16-bit Q, K, V. This is what a
    user gets.
kernel
    the same output against float64 attention on the dequantised codes, so without what rounding Q, K and V
    did. What is left is the kernel's own arithmetic: P in e4m3, accumulation, and the rounding of the output
    to 16 bits.

The baseline of `ratio_to_naive` is the recipe "naive" (one scale for each tensor, no rotation, e4m3), the one
that the FA3 paper (arXiv 2407.08608, section 4.3) compares with. It casts P to e4m3 as it is, so P below
about 2^-10 become 0. The default table has `NAIVE_LIFTED` beside it, the same recipe with P lifted by 2^8
before the cast, which tells what part of a ratio comes from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import pandas as pd
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import cute_attn
from cute_attn import reference
from cute_attn.bench.data import LayerTensors
from cute_attn.quantize import PRESETS, Fp8Recipe, QuantizedQKV, resolve_recipe

NAIVE_LIFTED: Final = replace(PRESETS["naive"], name="naive-lifted", p_rounding="ex2")
DEFAULT_RECIPES: Final[tuple[str | Fp8Recipe, ...]] = ("naive", NAIVE_LIFTED, "paper", "fp8", "accurate")
BASELINE = "naive"
SOURCE_LABELS = {"real": "real layers", "synthetic": "synthetic inputs", "user": "your tensors"}


def error_metrics(out: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Compare two tensors of the same shape in float64.

    Returns:
        rmse: root mean square of out - expected.
        rel_rmse: rmse over the root mean square of expected (0/0 is 0).
        max_abs_err: largest |out - expected|.
        cosine: cosine of the angle between the two, flattened (NaN where one of them is all zeros).
        A NaN in `out` makes all four NaN.

    Raises:
        ValueError: the shapes differ or there are no elements.
    """
    if out.shape != expected.shape or out.numel() == 0:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, expected {tuple(expected.shape)}; "
            "they must be the same and not empty"
        )
    x, y = out.double().flatten(), expected.double().flatten().to(out.device)
    difference = x - y
    rmse = difference.square().mean().sqrt().item()
    rms = y.square().mean().sqrt().item()
    norms = x.norm().item() * y.norm().item()
    return {
        "rmse": rmse,
        "rel_rmse": rmse / rms if rms else (rmse if rmse == 0 or math.isnan(rmse) else math.inf),
        "max_abs_err": difference.abs().max().item(),
        "cosine": torch.dot(x, y).item() / norms if norms else math.nan,
    }


def accuracy_table(
    inputs: Iterable[LayerTensors],
    recipes: Sequence[str | Fp8Recipe] = DEFAULT_RECIPES,
    *,
    causal: bool | None = None,
    backend: str = "auto",
    softmax_scale: float | None = None,
) -> pd.DataFrame:
    """Run every recipe on every input and measure its error against float64.

    Args:
        inputs: Q, K, V to attend, each on any device; head_dim and head_dim_v are
            multiples of 16 from 32 to 256.
        recipes: preset names or recipes; their names must differ.
        causal: True for the causal mask, aligned bottom-right, False for none, None for the one that belongs
            with each input (`LayerTensors.causal`).
        backend: "auto", "sm90" or "emulator", as in `cute_attn.fp8_attention`.
        softmax_scale: None means 1/sqrt(head_dim).

    Returns:
        One row for each input and recipe, in the order given. Columns: input, source, recipe, backend ("sm90"
        or "emulator": what ran), kernel, dtype, out_dtype, batch, seqlen_q, seqlen_k, heads_q, heads_k,
        head_dim, head_dim_v, causal; total error rmse, rel_rmse, max_abs_err, cosine (see `error_metrics`),
        ratio_to_naive (rmse of the naive recipe over rmse of this one, above 1 is better; the naive recipe is
        run for it even if it is not in `recipes`); kernel error rmse_kernel, rel_rmse_kernel,
        max_abs_err_kernel, cosine_kernel.

    Raises:
        ValueError: no inputs, no recipes, two recipes of one name, or what `cute_attn.quantize` refuses.
    """
    layers = list(inputs)
    resolved = [resolve_recipe(recipe) for recipe in recipes]
    names = [recipe.name for recipe in resolved]
    if not layers or not resolved:
        raise ValueError(
            f"got {len(layers)} inputs and {len(resolved)} recipes; at least one of each is needed"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"recipes are named {names}; give each a name of its own")

    rows = []
    for layer in layers:
        masked = layer.causal if causal is None else causal
        exact, _ = reference.attention(layer.q, layer.k, layer.v, causal=masked, softmax_scale=softmax_scale)
        measured = [_measure(layer, recipe, exact, masked, backend, softmax_scale) for recipe in resolved]
        naive = resolve_recipe(BASELINE)
        if naive in resolved:
            baseline = measured[resolved.index(naive)]["rmse"]
        else:
            baseline = _measure(layer, naive, exact, masked, backend, softmax_scale)["rmse"]
        for row in measured:
            row["ratio_to_naive"] = baseline / row["rmse"] if row["rmse"] else math.nan
        rows += measured
    return pd.DataFrame(rows)


def _measure(
    layer: LayerTensors,
    recipe: Fp8Recipe,
    exact: torch.Tensor,
    causal: bool,
    backend: str,
    softmax_scale: float | None,
) -> dict[str, Any]:
    # Quantised once and attended from there, which is what fp8_attention does: the codes that the kernel
    # error refers to are then those that made the output.
    qkv: QuantizedQKV = cute_attn.quantize(layer.q, layer.k, layer.v, recipe, backend=backend)
    out = cute_attn.fp8_attention_quantized(qkv, causal=causal, softmax_scale=softmax_scale, backend=backend)
    plan = cute_attn.explain(qkv, causal=causal, backend=backend)
    own, _ = reference.attention(*qkv.dequantize(), causal=causal, softmax_scale=softmax_scale)
    total, kernel = error_metrics(out, exact), error_metrics(out, own)
    return {
        "input": layer.name,
        "source": layer.source,
        "recipe": recipe.name,
        "backend": plan.backend,
        "kernel": plan.kernel,
        "dtype": "fp8",
        "out_dtype": str(out.dtype).removeprefix("torch."),
        "batch": layer.q.shape[0],
        "seqlen_q": layer.q.shape[1],
        "seqlen_k": layer.k.shape[1],
        "heads_q": layer.q.shape[2],
        "heads_k": layer.k.shape[2],
        "head_dim": layer.q.shape[3],
        "head_dim_v": layer.v.shape[3],
        "causal": causal,
        **total,
        **{f"{name}_kernel": value for name, value in kernel.items()},
    }


def geometric_means(table: pd.DataFrame) -> pd.DataFrame:
    """Summarise an `accuracy_table`: geometric means over the inputs of one source.

    Returns:
        One row for each source and recipe, in order of appearance: source, recipe, inputs (how many), and the
        geometric means ratio_to_naive, rel_rmse, rel_rmse_kernel. NaN stays NaN.
    """

    def mean(values: pd.Series[float]) -> float:
        return math.exp(
            sum(math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan) for x in values) / len(values)
        )

    rows = [
        {"source": source, "recipe": recipe, "inputs": len(group)}
        | {name: mean(group[name]) for name in ("ratio_to_naive", "rel_rmse", "rel_rmse_kernel")}
        for (source, recipe), group in table.groupby(["source", "recipe"], sort=False)
    ]
    return pd.DataFrame(rows)


def record_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Turn an `accuracy_table` into the flat rows of a performance record.

    Each row of the table becomes two: phase "accuracy_total" and phase "accuracy_kernel", with rmse,
    rel_rmse, max_abs_err and cosine of that error. `ratio_to_naive` belongs to the total error alone.
    """
    shared = ["kernel", "backend", "dtype", "recipe", "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k"]
    shared += ["head_dim", "head_dim_v", "causal", "input", "source", "out_dtype"]
    metrics = ["rmse", "rel_rmse", "max_abs_err", "cosine"]
    rows: list[dict[str, Any]] = []
    for line in table.to_dict(orient="records"):
        facts = {"provider": "cute_attn"} | {name: line[name] for name in shared}
        total = {name: line[name] for name in metrics}
        kernel = {name: line[f"{name}_kernel"] for name in metrics}
        rows.append(facts | {"phase": "accuracy_total"} | total | {"ratio_to_naive": line["ratio_to_naive"]})
        rows.append(facts | {"phase": "accuracy_kernel"} | kernel)
    return rows


def render_accuracy(table: pd.DataFrame, console: Console) -> None:
    """Print an `accuracy_table` and its geometric means, saying what ran and naming the best recipe."""
    backends = sorted(set(table["backend"]))
    ran = {
        "sm90": "sm_90a kernels on the GPU",
        "emulator": "EMULATOR: the kernel's arithmetic in torch, no GPU kernel ran",
    }
    view = Table(
        title="Error of 8-bit attention against float64\n" + "; ".join(ran[name] for name in backends),
        caption="vs naive: RMSE of recipe naive over that of this one, higher is better.\n"
        "naive: e4m3, one scale for each tensor, P cast without a lift.\n"
        + ("naive-lifted: naive with P times 2^8.\n" if NAIVE_LIFTED.name in set(table["recipe"]) else "")
        + "kernel: relative RMSE without the part that quantising Q, K and V makes.",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1) if console.width >= 96 else (0, 0),
    )
    view.add_column("input", no_wrap=True)
    view.add_column("recipe", no_wrap=True)
    if len(backends) > 1:
        view.add_column("backend", no_wrap=True)
    for header in ("RMSE", "rel", "max", "cosine", "kernel", "vs naive"):
        view.add_column(header, justify="right", no_wrap=True)
    for _, group in table.groupby(["input", "seqlen_q", "seqlen_k", "causal"], sort=False):
        lines = group.to_dict(orient="records")
        labels = _labels(lines[0])
        for position, line in enumerate(lines):
            # What the labels do not fit beside goes below the last recipe.
            beside = labels[position : position + 1] if line is not lines[-1] else labels[position:]
            cells = ["\n".join(beside), line["recipe"]]
            if len(backends) > 1:
                cells.append(line["backend"])
            cells += [
                f"{line['rmse']:.2e}",
                f"{line['rel_rmse']:.2%}",
                f"{line['max_abs_err']:.2e}",
                f"{line['cosine']:.5f}",
                f"{line['rel_rmse_kernel']:.2%}",
                f"{line['ratio_to_naive']:.2f}x",
            ]
            view.add_row(*cells)
        view.add_section()
    console.print(view)

    means = geometric_means(table)
    summary = Table(title="Geometric means over inputs", box=box.SIMPLE, pad_edge=False)
    summary.add_column("inputs")
    summary.add_column("recipe")
    for header in ("rel", "kernel", "vs naive"):
        summary.add_column(header, justify="right")
    for source, group in means.groupby("source", sort=False):
        for position, line in enumerate(group.to_dict(orient="records")):
            label = f"{SOURCE_LABELS[str(source)]} ({line['inputs']})" if position == 0 else ""
            figures = [
                f"{line['rel_rmse']:.2%}",
                f"{line['rel_rmse_kernel']:.2%}",
                f"{line['ratio_to_naive']:.2f}x",
            ]
            summary.add_row(label, line["recipe"], *figures)
        summary.add_section()
    console.print(summary)
    for source, group in means.groupby("source", sort=False):
        if group["rel_rmse"].notna().any():
            best = group.loc[group["rel_rmse"].idxmin()]
            kind, ratio = SOURCE_LABELS[str(source)], best["ratio_to_naive"]
            console.print(f"Lowest RMSE on {kind}: recipe {best['recipe']!r}, {ratio:.2f}x vs naive.")


def _labels(line: dict[str, Any]) -> list[str]:
    """Name and shape of an input, as short lines."""
    seqlen = (
        f"{line['seqlen_q']}"
        if line["seqlen_q"] == line["seqlen_k"]
        else f"{line['seqlen_q']}/{line['seqlen_k']}"
    )
    return [
        line["input"],
        f"{line['batch']} x {seqlen} {'causal' if line['causal'] else 'full'}",
        f"heads {line['heads_q']}/{line['heads_k']}, d {line['head_dim']}",
    ]
