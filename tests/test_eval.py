"""Quality of a language model and long contexts, on a tiny random model and short contexts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn.bench import peers, record
from cute_attn.eval import __main__ as command
from cute_attn.eval import needle
from cute_attn.eval.quality import LayerError, choose_policy, evaluate
from cute_attn.policy import LayerPolicy

TEXT = "We hold these truths to be self-evident , that all men are created equal . " * 12


def tiny(**changed: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.2,
    }
    kind = changed.pop("kind", "Llama")
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changed})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its tokenizer, as `from_pretrained` finds it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted(set(TEXT.replace("-", " - ").split()))
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(tmp_path)
    tiny().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_qualities() -> None:
    """Exact attention agrees with the model's own; the others are ordered as their errors are."""
    model, ids = tiny(), torch.randint(0, 64, (2, 48))
    before = model.config._attn_implementation
    model.train()
    done: list[str] = []
    found = evaluate(model, ids, ["bf16", "accurate", "naive"], backend="emulator", on_done=done.append)
    assert model.config._attn_implementation == before and model.training
    assert done == ["exact", "bf16", "accurate", "naive"]
    exact, bf16, accurate, naive = found.qualities
    assert exact.kl == 0 and exact.top1 == 1 and exact.positions == 2 * 47
    with torch.no_grad():
        logits = model.eval()(ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert exact.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert 0 < bf16.kl < accurate.kl < naive.kl and bf16.top1 > 0.9
    assert bf16.kernels == {"reference": 6} and not accurate.fallbacks
    errors = {(error.layer, error.precision): error.rel_rmse for error in found.layers}
    assert set(errors) == {(layer, name) for layer in range(3) for name in ("bf16", "accurate", "naive")}
    assert all(errors[layer, "bf16"] < errors[layer, "accurate"] for layer in range(3))


def test_layers_alone_and_policies() -> None:
    model, ids = tiny(), torch.randint(0, 64, (1, 48))
    found = evaluate(model, ids, ["naive"], backend="emulator", layer_kl="naive")
    assert all(error.kl is not None and 0 < error.kl < found.qualities[1].kl for error in found.layers)
    policy = choose_policy(found.layers, "naive", math.inf)
    everything = evaluate(model, ids, (), backend="emulator", policy=policy).qualities[-1]
    assert everything.precision == "policy" and everything.kl == pytest.approx(found.qualities[1].kl)
    nothing = choose_policy(found.layers, "naive", 0.0)
    assert set(nothing.layers.values()) == {"bf16"}


def test_policy_takes_the_cheapest_layers() -> None:
    layers = [LayerError(layer, "fp8", 0.1, kl) for layer, kl in enumerate([0.03, -1e-9, 0.01, 0.02])]
    policy = choose_policy(layers, "fp8", 0.035, {"model": "tiny"})
    assert policy == LayerPolicy("bf16", {0: "bf16", 1: "fp8", 2: "fp8", 3: "fp8"}, {"model": "tiny"})
    with pytest.raises(ValueError, match="no layer was measured alone in 'accurate'"):
        choose_policy(layers, "accurate", 1.0)
    with pytest.raises(ValueError, match="budget is -1"):
        choose_policy(layers, "fp8", -1)


def test_sliding_windows_and_softcap() -> None:
    model = tiny(kind="Gemma2", sliding_window=16, query_pre_attn_scalar=32)
    ids = torch.randint(0, 64, (1, 48))
    exact, bf16, fp8 = evaluate(model, ids, ["bf16", "fp8"], backend="emulator").qualities
    with torch.no_grad():
        model.set_attn_implementation("eager")
        loss = torch.nn.functional.cross_entropy(model.eval()(ids).logits[0, :-1], ids[0, 1:])
    assert exact.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert bf16.kl < 1e-3 and set(bf16.kernels) == {"reference"}
    assert bf16.kl < fp8.kl < 0.02 and not fp8.fallbacks
    assert all(name.startswith("emulator(") and "softcap" in name for name in fp8.kernels)


def test_refusals() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="ids have shape"):
        evaluate(model, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="precision is 'fp4'"):
        evaluate(model, torch.zeros(1, 5, dtype=torch.int64), ["fp4"])
    with pytest.raises(ValueError, match="no kernel serves layer 0: head_dim of q is 20"):
        evaluate(tiny(head_dim=20), torch.zeros(1, 5, dtype=torch.int64), backend="emulator")


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, policy = folder / "out.json", folder / "policy.json"
    arguments = [str(folder), "--text", str(folder / "text.txt"), "--tokens", "40", "--windows", "2"]
    arguments += [
        "--recipe",
        "bf16,accurate",
        "--backend",
        "emulator",
        "--json",
        str(out),
        "--policy",
        str(policy),
    ]
    assert command.main([*arguments, "--budget", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Predictions beside exact attention, 78 positions" in printed
        and "3 of 3 layers in 'accurate'" in printed
    )
    rows = record.read(out).rows
    assert [row["recipe"] for row in rows if "perplexity" in row] == ["exact", "bf16", "accurate", "policy"]
    assert sum("layer" in row for row in rows) == 6
    assert LayerPolicy.load(policy).layers == {0: "accurate", 1: "accurate", 2: "accurate"}
    assert json.loads(policy.read_text())["about"]["kl"] > 0


def test_command_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["model", "--needle"], ["model", "--policy", str(folder / "p"), "--budget", "-1"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
    text = ["--text", str(folder / "text.txt")]
    assert command.main([str(folder), *text, "--tokens", "4000"]) == 2
    assert "tokens and 4000 are asked for" in " ".join(capsys.readouterr().out.split())
    assert command.main([str(folder / "none"), *text]) == 2


def test_bundled_text() -> None:
    text = command.TEXT_PATH.read_text(encoding="utf-8")
    assert text.isascii() and len(text.split()) > 1500


# --- long contexts


@pytest.mark.parametrize("task", needle.TASKS)
def test_needles_are_found(task: str) -> None:
    scores = needle.measure(
        ["bf16", "accurate"], [512], tasks=[task], head_dim=64, backend="emulator", device="cpu"
    )
    assert [score.precision for score in scores] == ["exact", "bf16", "accurate"]
    assert all(score.right == 1.0 for score in scores) and 0 < scores[1].rel_rmse < scores[2].rel_rmse < 0.2


def test_a_needle_has_half_of_the_attention() -> None:
    q, k, v, right = needle.make_task("needle", 4096, 128)
    scores = torch.einsum("qhd,khd->hqk", q[0].double(), k[0].double()) / math.sqrt(128)
    own = scores.softmax(-1).amax(-1)
    assert 0.3 < float(own.mean()) < 0.7
    out = torch.einsum("hqk,khd->hqd", scores.softmax(-1), v[0].double())
    assert right(out) == 1.0 and right(out.flip(1)) < 0.1


def test_a_lost_sum_is_seen() -> None:
    """An average over the first eighth of the keys, as if the sum had lost the others, is wrong."""
    _, _, v, right = needle.make_task("average", 4096, 64)
    mean = v[0].double().mean(0)[:, None].expand(needle.HEADS, needle.QUERIES, 64)
    assert right(mean) == 1.0 and right(mean * 0.7) < 0.9


def test_needle_refusals() -> None:
    with pytest.raises(ValueError, match="task is 'hay'"):
        needle.make_task("hay", 512)
    with pytest.raises(ValueError, match="keys is 10; allowed: at least 64"):
        needle.make_task("needle", 10)
    with pytest.raises(ValueError, match="allowed at head_dim 16: fewer than"):
        needle.make_task("needle", 1 << 14, 16)


def test_needle_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--needle", "--keys", "256", "--head-dim", "64", "--recipe", "fp8", "--json", str(out)]
    assert command.main([*arguments, "--backend", "emulator"]) == 0
    assert "256 keys" in capsys.readouterr().out
    rows = record.read(out).rows
    assert {(row["task"], row["recipe"]) for row in rows} == {
        (t, p) for t in needle.TASKS for p in ("exact", "fp8")
    }


def test_flash_attention_3_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With codes and scales that give the tensors back; where it is missing, asking for it is an error."""
    q, k, v, _ = needle.make_task("needle", 512, 64)
    k, v = k * torch.tensor([1.0, 100.0])[:, None], v * torch.tensor([0.01, 3.0])[:, None]

    def attend(*codes: Tensor, **scales: Tensor) -> tuple[Tensor, None]:
        for code, given, x in zip(codes, scales.values(), (q, k, v), strict=True):
            assert code.dtype == torch.float8_e4m3fn and float(code.float().abs().max()) == 448.0
            back = code.float() * given[:, None, :, None]
            assert ((back - x.float()).abs() <= x.float().abs() / 16 + given[:, None, :, None] / 512).all()
        return codes[0].bfloat16(), None

    library = SimpleNamespace(flash_attn_func=attend)
    monkeypatch.setattr(needle.peers, "need", lambda module: library)
    assert needle._fa3(q, k, v).shape == q.shape
    options: dict[str, Any] = {"tasks": ["needle"], "backend": "emulator", "device": "cpu", "head_dim": 64}
    monkeypatch.setattr(needle, "_fa3", lambda q, k, v: q)
    found = needle.measure([needle.FA3], [512], **options)[1]
    assert found.precision == needle.FA3 and found.kernel.startswith("FlashAttention-3") and found.right < 1
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    peers._import.cache_clear()
    with pytest.raises(peers.NotRun, match="cannot import flash_attn_interface"):
        needle.measure([needle.FA3], [512], **options)
    peers._import.cache_clear()


@pytest.mark.gpu
def test_needles_on_the_gpu() -> None:
    scores = needle.measure(["bf16", "accurate", "fp8"], [131072], backend="sm90")
    assert all(score.right == 1.0 for score in scores)
