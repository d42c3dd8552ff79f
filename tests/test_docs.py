"""The pages and the README: their Python runs, their commands and links exist."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import distributed, doctor, hf, validate
from cute_attn.kernels.config import Fwd16Config

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(path.read_text(encoding="utf-8")) if name == language]


def with_python() -> list[Path]:
    return [path for path in PAGES if blocks(path, "python")]


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[None]:
    """The stand-ins in torch serve what the pages ask of a GPU; nothing is compiled."""
    for name in (
        name
        for name in cute_attn.__all__
        if re.fullmatch(r"flash_attn_(\w+_)?(func|explain)|decode_explain", name)
    ):
        if "fp8" in name:
            continue
        monkeypatch.setitem(
            vars(cute_attn), name, functools.partial(getattr(cute_attn, name), backend="reference")
        )
    for name in ("sdpa", "sdpa_region", "explain_sdpa"):
        monkeypatch.setitem(
            vars(cute_attn), name, functools.partial(getattr(cute_attn, name), backend="emulator")
        )
    for name in ("append", "attend"):
        method = getattr(cute_attn.KVCache, name)
        served = functools.partialmethod(method, backend="reference")
        monkeypatch.setattr(cute_attn.KVCache, name, served)
    monkeypatch.setattr(hf, "register", functools.partial(hf.register, backend="emulator"))
    monkeypatch.setattr(
        distributed, "ring_attention", functools.partial(distributed.ring_attention, backend="reference")
    )
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cute_attn.compile.fill_cache", lambda configs, jobs: ((c, 0.1) for c in configs))
    monkeypatch.setattr("cute_attn.compile.compile_kernel", lambda config: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("path", with_python(), ids=lambda path: path.name)
def test_python_of_pages_runs(path: Path, without_gpu: None) -> None:
    """The blocks of a page in order, one namespace; on the CPU with shorter sequences."""
    if "transformers" in "".join(blocks(path, "python")):
        pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    for number, text in enumerate(blocks(path, "python")):
        text = text.replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"').replace("4096", "96")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, f"{path.name}, block {number}", "exec"), names)
    out = names.get("out")
    if out is not None:
        assert isinstance(out, torch.Tensor) and bool(out.isfinite().all())


def test_python_of_the_readme_runs(without_gpu: None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    x = torch.randint(1, 64, (1, 9))
    angles = torch.rand(96, 32)
    e4m3 = torch.zeros(1, 96, 4, 64, dtype=torch.float8_e4m3fn)
    half = [torch.randn(1, 4, 96, 64).bfloat16() for _ in range(3)]
    names: dict[str, Any] = {
        "model": transformers.LlamaForCausalLM(config).bfloat16().eval(),
        "x": x,
        "inputs": {"input_ids": x, "max_new_tokens": 2},
        "cos": angles.cos().bfloat16(),
        "sin": angles.sin().bfloat16(),
        **dict(zip(("q8", "k8", "v8"), (e4m3, e4m3, e4m3), strict=True)),
        **dict.fromkeys(("dq", "dk", "dv"), torch.ones(1, 4)),
        "q1": torch.randn(1, 1, 16, 128).bfloat16(),
        **dict.fromkeys(("k1", "v1"), torch.randn(1, 1, 4, 128).bfloat16()),
        **dict(zip(("query", "key", "value"), half, strict=True)),
    }
    for number, text in enumerate(blocks(ROOT / "README.md", "python")):
        text = text.replace('"cuda"', '"cpu"').replace("4096", "96")
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            exec(compile(text, f"README.md, block {number}", "exec"), names)


def command_lines() -> list[list[str]]:
    lines = []
    for path in (*PAGES, ROOT / "README.md"):
        for text in blocks(path, "bash"):
            for line in text.splitlines():
                line = line.partition("#")[0]
                for part in line.split("&&"):
                    words = shlex.split(part)
                    if "-m" in words and words[words.index("-m") + 1].startswith("cute_attn"):
                        lines.append(words[words.index("-m") + 1 :])
    return lines


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_commands_parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Module and options exist: the parser takes the line; then nothing runs."""
    import argparse
    import importlib

    class Parsed(Exception):
        pass

    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *arguments: Any, **more: Any) -> None:
        real(self, *arguments, **more)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", words)
    name = words[0]
    module = importlib.import_module(
        f"{name}.__main__" if (ROOT / name.replace(".", "/") / "__main__.py").is_file() else name
    )
    with pytest.raises((Parsed, SystemExit)) as ended:
        module.main(words[1:])
    assert ended.type is Parsed or words[-1] == "--help"


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).is_file(), f"{path.name} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {path.name for path in PAGES}


def test_public_names_are_in_the_reference() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"::: cute_attn\.[\w.]+?\.(\w+)$", reference, re.MULTILINE))
    assert set(cute_attn.__all__) - named == {"PRESETS", "__version__", "sdpa_log"}


def said(call: Callable[[], object]) -> str:
    """The text of what a call raises, or warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


def test_troubleshooting_quotes_messages_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message of the page is one that a call gives, where "..." stands for anything."""

    def x(heads: int = 2, head_dim: int = 64) -> torch.Tensor:
        return torch.zeros(1, 9, heads, head_dim, dtype=torch.bfloat16)

    def grad() -> torch.Tensor:
        return x().requires_grad_()

    monkeypatch.setattr(cute_attn.tracing, "_said", set())
    monkeypatch.delattr("torch.nn.attention.register_flash_attention_impl", raising=False)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    ends = torch.tensor([0, 9], dtype=torch.int32)
    fp8 = functools.partial(cute_attn.fp8_attention, backend="emulator")
    calls: list[Callable[[], object]] = [
        lambda: cute_attn.flash_attn_func(x(), x(), x(), backend="sm80"),
        lambda: cute_attn.flash_attn_func(x(), x(), x()),
        lambda: validate.check_backend("sm90", (8, 0)),
        lambda: cute_attn.fp8_attention(x(), x(), x()),
        lambda: cute_attn.quantize(grad(), x(), x()),
        lambda: cute_attn.flash_attn_varlen_func(
            grad()[0], x()[0], x()[0], ends, ends, 9, 9, backend="reference"
        ),
        lambda: fp8(x(2, 40), x(2, 40), x(2, 40)),
        lambda: fp8(x().mT.contiguous().mT, x(), x()),
        lambda: fp8(x(6), x(4), x(4)),
        lambda: fp8(x(), x(), x(), softmax_scale=math.inf),
        lambda: cute_attn.sdpa(x(), x(), x()),
        lambda: cute_attn.sdpa(x(), x(), x(), fallback="error"),
        lambda: hf._needs_torch(mask, None, 0.0, None),
        cute_attn.register_flash_attention_impl,
    ]
    texts = [*map(said, calls), str(hf._needs_torch(mask, None, 0.0, None))]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(quoted) > 8
    for message in quoted:
        pattern = ".*".join(map(re.escape, message.split("...")))
        assert any(re.search(pattern, text) for text in texts), message


def test_limits_are_those_of_the_kernels() -> None:
    from cute_attn.kernels.config import HEAD_DIMS, HEAD_DIMS_16BIT

    assert (HEAD_DIMS[0], HEAD_DIMS[-1], HEAD_DIMS[1] - HEAD_DIMS[0]) == (32, 256, 16)
    assert (HEAD_DIMS_16BIT[0], HEAD_DIMS_16BIT[-1], HEAD_DIMS_16BIT[1] - HEAD_DIMS_16BIT[0]) == (32, 256, 8)
    text = (ROOT / "docs" / "limits.md").read_text()
    listed = re.findall(r"^\| (.+) \| (yes|no) \| (yes|no) \|$", text, re.MULTILINE)
    assert listed == doctor.support_table()
    assert "multiples of 16 from 32 to 256" in text and "multiples of 8 from 32 to 256" in text
    assert {"window", "softcap", "alibi", "sinks"} <= set(Fwd16Config.__dataclass_fields__)
