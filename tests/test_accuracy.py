"""Error of the recipes against float64: metrics, table, records, text, and the goals that it must show."""

from __future__ import annotations

import dataclasses
import io
import math

import pandas as pd
import pytest
import torch
from rich.console import Console

import cute_attn
from cute_attn import reference
from cute_attn.bench import accuracy, data
from cute_attn.bench.data import LayerTensors
from cute_attn.quantize import resolve_recipe

GOAL = 2.6  # RMSE of "naive" over RMSE of "accurate"


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """The default report's table on the emulator."""
    return accuracy.accuracy_table(data.default_inputs(), backend="emulator")


def small(seqlen_q: int = 70, seqlen_k: int = 70, **changed: object) -> LayerTensors:
    layer = data.synthetic_outliers(1, seqlen_k, 2, 1, 64, seed=5)
    return dataclasses.replace(layer, q=layer.q[:, :seqlen_q].contiguous(), **changed)  # type: ignore[arg-type]


# --- metrics


def test_metrics_of_hand_made_cases() -> None:
    expected = torch.tensor([3.0, -4.0, 0.0, 0.0])
    assert accuracy.error_metrics(expected, expected) == {
        "rmse": 0.0,
        "rel_rmse": 0.0,
        "max_abs_err": 0.0,
        "cosine": 1.0,
    }
    out = torch.tensor([[3.0, -4.0], [3.0, 4.0]])
    found = accuracy.error_metrics(out, expected.view(2, 2))
    # Differences 0, 0, 3, 4: mean square 25/4. Of expected 25/4. Dot product 25, norms sqrt(50) and 5.
    assert found["rmse"] == 2.5 and found["rel_rmse"] == 1.0 and found["max_abs_err"] == 4.0
    assert found["cosine"] == pytest.approx(25 / (5 * math.sqrt(50)), rel=1e-15)
    assert accuracy.error_metrics(-expected, expected)["cosine"] == pytest.approx(-1.0, rel=1e-15)


def test_metrics_compare_in_float64() -> None:
    expected = torch.ones(3, dtype=torch.float64) + 1e-12
    found = accuracy.error_metrics(torch.ones(3, dtype=torch.bfloat16), expected)
    assert found["rmse"] == pytest.approx(1e-12, rel=1e-3)


def test_metrics_of_zeros_and_nan() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    same = accuracy.error_metrics(zero, zero)
    assert same["rmse"] == same["rel_rmse"] == 0.0 and math.isnan(same["cosine"])
    assert accuracy.error_metrics(one, zero)["rel_rmse"] == math.inf
    wrong = accuracy.error_metrics(torch.tensor([1.0, math.nan]), one)
    assert all(math.isnan(value) for value in wrong.values())


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((6,), (2, 3)), ((0,), (0,))])
def test_metrics_refuse_what_cannot_be_compared(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"out has shape .* the same and not empty"):
        accuracy.error_metrics(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


# --- table


@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_of_the_public_call(causal: bool) -> None:
    layer = small(60, 300)
    [row] = accuracy.accuracy_table(
        [layer], ["fp8"], causal=causal, backend="emulator", softmax_scale=0.2
    ).to_dict(orient="records")
    out = cute_attn.fp8_attention(
        layer.q, layer.k, layer.v, recipe="fp8", causal=causal, softmax_scale=0.2, backend="emulator"
    )
    exact, _ = reference.attention(layer.q, layer.k, layer.v, causal=causal, softmax_scale=0.2)
    assert {
        name: row[name] for name in ("rmse", "rel_rmse", "max_abs_err", "cosine")
    } == accuracy.error_metrics(out, exact)
    qkv = cute_attn.quantize(layer.q, layer.k, layer.v, "fp8", backend="emulator")
    own, _ = reference.attention(*qkv.dequantize(), causal=causal, softmax_scale=0.2)
    assert row["rmse_kernel"] == accuracy.error_metrics(out, own)["rmse"]
    assert row["causal"] is causal and row["backend"] == "emulator"
    shape = [row[name] for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim")]
    assert shape == [1, 60, 300, 2, 1, 64]


def test_the_mask_defaults_to_the_inputs_own() -> None:
    layers = [small(causal=True), small(causal=False)]
    assert accuracy.accuracy_table(layers, ["fp8"], backend="emulator")["causal"].tolist() == [True, False]
    forced = accuracy.accuracy_table(layers, ["fp8"], causal=True, backend="emulator")
    assert forced["causal"].tolist() == [True, True] and forced["rmse"].nunique() == 1


def test_total_and_kernel_error_agree_where_quantisation_is_exact() -> None:
    # Entries +-1 are the largest code times the scale, so that only float32 rounding of the scale is left.
    layer = small()
    signs = LayerTensors(
        "signs", *(torch.where(x < 0, -1.0, 1.0).to(x.dtype) for x in (layer.q, layer.k, layer.v))
    )
    [row] = accuracy.accuracy_table([signs], ["naive"], backend="emulator").to_dict(orient="records")
    assert row["rmse"] == pytest.approx(row["rmse_kernel"], rel=1e-4)
    assert 0 < row["rel_rmse_kernel"] < 0.05


def test_ratio_needs_no_naive_row() -> None:
    both = accuracy.accuracy_table([small()], ["naive", "accurate"], backend="emulator")
    alone = accuracy.accuracy_table([small()], ["accurate"], backend="emulator")
    assert both["ratio_to_naive"][0] == 1.0
    assert alone["ratio_to_naive"].tolist() == [both["rmse"][0] / both["rmse"][1]]


def test_own_recipes_and_refusals() -> None:
    mine = dataclasses.replace(resolve_recipe("accurate"), name="mine", p_rounding="ex2")
    assert accuracy.accuracy_table([small()], [mine], backend="emulator")["recipe"].tolist() == ["mine"]
    with pytest.raises(ValueError, match=r"recipes are named \['mine', 'mine'\]; give each a name"):
        accuracy.accuracy_table([small()], [mine, mine], backend="emulator")
    with pytest.raises(ValueError, match="got 0 inputs and 5 recipes"):
        accuracy.accuracy_table([], backend="emulator")
    with pytest.raises(ValueError, match="got 1 inputs and 0 recipes"):
        accuracy.accuracy_table([small()], [], backend="emulator")
    with pytest.raises(ValueError, match="nonsense"):
        accuracy.accuracy_table([small()], ["nonsense"], backend="emulator")


def test_a_nan_in_the_input_is_a_nan_in_every_error() -> None:
    layer = small()
    v = layer.v.clone()
    v[0, 3, 0, 0] = math.nan
    table = accuracy.accuracy_table([dataclasses.replace(layer, v=v)], ["naive", "fp8"], backend="emulator")
    assert (
        table[["rmse", "rel_rmse", "max_abs_err", "cosine", "ratio_to_naive", "rmse_kernel"]]
        .isna()
        .all(axis=None)
    )
    assert accuracy.geometric_means(table)["rel_rmse"].isna().all()
    assert "nan" in rendered(table)


def test_geometric_means() -> None:
    table = pd.DataFrame(
        {
            "source": ["real", "real", "real", "user"],
            "recipe": ["fp8", "paper", "fp8", "fp8"],
            "ratio_to_naive": [2.0, 5.0, 8.0, 3.0],
            "rel_rmse": [0.01, 0.5, 0.04, 0.0],
            "rel_rmse_kernel": [0.1, 0.3, 0.9, math.nan],
        }
    )
    means = accuracy.geometric_means(table)
    assert means[["source", "recipe", "inputs"]].values.tolist() == [
        ["real", "fp8", 2],
        ["real", "paper", 1],
        ["user", "fp8", 1],
    ]
    assert means["ratio_to_naive"].tolist() == pytest.approx([4.0, 5.0, 3.0])
    assert means["rel_rmse"].tolist() == pytest.approx([0.02, 0.5, 0.0])
    assert means["rel_rmse_kernel"].tolist() == pytest.approx([0.3, 0.3, math.nan], nan_ok=True)


# --- records and text


def test_record_rows_are_flat_and_of_two_phases() -> None:
    table = accuracy.accuracy_table([small()], ["naive", "accurate"], backend="emulator")
    rows = accuracy.record_rows(table)
    assert [(row["recipe"], row["phase"]) for row in rows] == [
        ("naive", "accuracy_total"),
        ("naive", "accuracy_kernel"),
        ("accurate", "accuracy_total"),
        ("accurate", "accuracy_kernel"),
    ]
    for row in rows:
        assert row["provider"] == "cute_attn" and row["dtype"] == "fp8" and row["backend"] == "emulator"
        assert row["input"] == "synthetic d64" and row["source"] == "synthetic" and row["causal"] is False
        assert all(isinstance(value, str | int | float | bool) for value in row.values())
    assert rows[2]["rmse"] == table["rmse"][1] and rows[3]["rmse"] == table["rmse_kernel"][1]
    assert rows[2]["ratio_to_naive"] == table["ratio_to_naive"][1] and "ratio_to_naive" not in rows[3]


def rendered(table: pd.DataFrame, width: int = 80) -> str:
    text = io.StringIO()
    accuracy.render_accuracy(table, Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_text_says_what_ran_and_cuts_nothing(table: pd.DataFrame, width: int) -> None:
    text = rendered(table, width)
    assert "EMULATOR" in text and "no GPU kernel ran" in text and "sm_90a" not in text
    assert "…" not in text and all(len(line) <= width for line in text.splitlines())
    for line in table.to_dict(orient="records"):
        assert line["input"] in text
        assert f"{line['rmse']:.2e}" in text and f"{line['rel_rmse_kernel']:.2%}" in text
    assert "real layers (4)" in text and "synthetic inputs (2)" in text
    assert "Lowest RMSE on real layers: recipe 'accurate'" in text
    assert "1 x 2048 causal" in text and "heads 3/3, d 64" in text
    assert "P cast without a lift" in text and "naive-lifted: naive with P times 2^8" in text


def test_text_tells_backends_apart(table: pd.DataFrame) -> None:
    gpu = table.assign(backend="sm90")
    assert "sm_90a kernels on the GPU" in rendered(gpu) and "EMULATOR" not in rendered(gpu)
    mixed = rendered(pd.concat([table, gpu], ignore_index=True), 120)
    assert "sm_90a kernels on the GPU" in mixed and "EMULATOR" in mixed and "backend" in mixed


def test_text_of_one_recipe_keeps_name_and_shape(table: pd.DataFrame) -> None:
    text = rendered(table[table["recipe"] == "fp8"])
    assert "P cast without a lift" in text and "naive-lifted" not in text
    assert "smollm2 layer29" in text and "1 x 4096 full" in text and "heads 2/2, d 128" in text


# --- goals


def ratios(table: pd.DataFrame, source: str, recipe: str) -> list[float]:
    rows = table[(table["source"] == source) & (table["recipe"] == recipe)]
    return [float(x) for x in rows["ratio_to_naive"]]


def test_accurate_on_synthetic_outliers(table: pd.DataFrame) -> None:
    found = ratios(table, "synthetic", "accurate")
    assert len(found) == 2 and min(found) >= GOAL, found


def test_accurate_on_real_layers(table: pd.DataFrame) -> None:
    found = ratios(table, "real", "accurate")
    assert len(found) == 4 and math.prod(found) ** 0.25 >= GOAL, found


def test_accurate_is_the_best_recipe_on_every_real_layer(table: pd.DataFrame) -> None:
    for name, group in table[table["source"] == "real"].groupby("input"):
        assert group.loc[group["rmse"].idxmin(), "recipe"] == "accurate", name


def test_lifted_naive_differs_in_p_alone(table: pd.DataFrame) -> None:
    changed = {"name": "naive", "p_rounding": "cast"}
    assert dataclasses.replace(accuracy.NAIVE_LIFTED, **changed) == resolve_recipe("naive")
    assert accuracy.NAIVE_LIFTED.p_rounding == "ex2"
    rows = table.set_index(["recipe", "input"])
    # Small P keep their bits, so that the kernel's own error falls on every input.
    lifted, cast = rows.loc["naive-lifted"], rows.loc["naive"]
    assert (lifted["rel_rmse_kernel"] < 0.6 * cast["rel_rmse_kernel"]).all()
    assert (lifted["ratio_to_naive"] > 1.0).all()


def test_kernel_error_is_the_smaller_part(table: pd.DataFrame) -> None:
    ours = table[table["recipe"].isin(["fp8", "accurate"])]
    assert (ours["rel_rmse_kernel"] < ours["rel_rmse"]).all()
    # Rounding every P to 3 bits of mantissa costs less than that, with V of mean 0 and any number of keys.
    assert (ours["rel_rmse_kernel"] < 0.03).all(), ours[["input", "recipe", "rel_rmse_kernel"]]
    assert (table["cosine"] > 0.98).all()
