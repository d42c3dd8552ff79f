"""`is_supported`, the doctor, the self-test and compiling ahead for a model."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import (
    ModelShapes,
    compile,
    decode,
    decode_plan,
    doctor,
    is_supported,
    model_shapes,
    plan16,
    plan_sm80,
    precompile,
    selftest,
)
from cute_attn.backward_tiles import backward16_sm80_config
from cute_attn.kernels.config import (
    AppendConfig,
    Bwd16Config,
    Bwd16Sm80Config,
    DecodeConfig,
    Fwd16Config,
    Fwd16Sm80Config,
    FwdConfig,
    UnpackConfig,
)

# --- is_supported


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "the 16-bit kernel"),
        (
            {"precision": "accurate", "causal": True, "heads_q": 8, "heads_k": 2},
            "the 8-bit kernels, recipe 'accurate'",
        ),
        ({"precision": cute_attn.Fp8Recipe(name="mine")}, "the 8-bit kernels, recipe 'mine'"),
        (
            {"window_size": (5, 0), "softcap": 30.0, "alibi": True, "sinks": True, "head_dim_v": 64},
            "the 16-bit kernel",
        ),
        (
            {"precision": "fp8", "window_size": (5, 0), "softcap": 30.0, "alibi": True, "sinks": True},
            "the 8-bit kernels, recipe 'fp8'",
        ),
        ({"requires_grad": True, "window_size": (5, 0), "sinks": True}, "the 16-bit kernel"),
        ({"precision": "accurate", "requires_grad": True}, "the 8-bit kernels, recipe 'accurate'"),
    ],
)
def test_supported(options: dict[str, Any], reason: str) -> None:
    support = is_supported(**options, capability=(9, 0))
    assert support and support.reason == reason and str(support) == f"supported: {reason}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 20}, "head_dim of q is 20; allowed: multiples of 8 from 32 to 256"),
        ({"head_dim": 512}, "head_dim of q is 512"),
        ({"precision": "fp8", "head_dim": 40}, "the nearest to pad to is 48"),
        ({"heads_q": 3, "heads_k": 2}, "heads of q is 3; allowed: a multiple"),
        ({"dtype": torch.float32}, "q has dtype torch.float32"),
        ({"precision": "fp8", "window_size": (-2, 0)}, "window_size is (-2, 0); allowed: ends >= 0"),
        ({"precision": "fp8", "softcap": -1.0}, "softcap is -1.0; allowed: 0 (none)"),
        ({"attn_mask": True}, "a mask tensor is given; allowed: causal, window_size"),
        ({"dropout_p": 0.1}, "dropout_p is 0.1"),
        ({"capability": (7, 5)}, "the GPU is of 7.5; allowed: compute capability 8.0 to 8.9, 9.x or 12.x"),
    ],
)
def test_not_supported(options: dict[str, Any], reason: str) -> None:
    support = is_supported(**{"capability": (9, 0), **options})
    assert not support and reason in support.reason and str(support).startswith("not supported: ")


def test_supported_needs_a_gpu_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert is_supported().reason.startswith("there is no NVIDIA GPU")
    with pytest.raises(ValueError, match="precision is 'fp4'"):
        is_supported("fp4")


# --- doctor


def findings(**more: Any) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine(**more)}


def test_doctor_finds_the_packages(cache_folder: Path) -> None:
    found = findings()
    assert found["torch"].status == "ok" and found["torch"].found == torch.__version__
    assert found["nvidia-cutlass-dsl"].status == "ok" and not found["nvidia-cutlass-dsl"].advice
    assert (
        found["compiled kernels"].found.startswith(str(cache_folder))
        and "0 kernels" in found["compiled kernels"].found
    )
    assert found["CUTE_ATTN_CACHE_DIR"].found == str(cache_folder)


def test_doctor_names_versions_outside_of_the_range(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    metadata = doctor.importlib.metadata
    versions = {"nvidia-cutlass-dsl": "4.9.0"}
    real = metadata.version

    def version(name: str) -> str:
        if name == "apache-tvm-ffi":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = findings()
    assert found["nvidia-cutlass-dsl"].status == "problem"
    assert "pip install 'nvidia-cutlass-dsl" in found["nvidia-cutlass-dsl"].advice
    assert found["apache-tvm-ffi"].found == "missing"
    monkeypatch.setattr(metadata, "requires", lambda name: version("apache-tvm-ffi"))
    assert findings()["cute_attn"].status == "note"


def test_doctor_looks_at_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path, tmp_path: Path
) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(0o777)
    assert "chmod 700" in findings()["compiled kernels"].advice
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(file / "folder"))
    assert findings()["compiled kernels"].status == "note"
    monkeypatch.setenv("CUTE_ATTN_DISABLE_DISK_CACHE", "1")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    found = findings()
    assert found["compiled kernels"].found == "not kept on disk"
    assert found["CUTE_DSL_ARCH"].status == "problem"


class _Card:
    """torch.cuda of a machine that is not there."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], driver: str | None
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "some GPU")
        monkeypatch.setattr("cute_attn.bench.record.gpu_state", lambda: {"gpu": "some GPU", "driver": driver})


@pytest.mark.parametrize(
    ("capability", "driver", "problems"),
    [
        ((9, 0), "580.65", []),
        ((9, 0), "550.54", []),
        ((9, 0), None, []),
        ((8, 6), "580.65", []),
        ((7, 5), "580.65", ["GPU with kernels"]),
    ],
)
def test_doctor_looks_at_the_gpu(
    capability: tuple[int, int],
    driver: str | None,
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
) -> None:
    _Card(monkeypatch, capability, driver)
    found = findings()
    assert [name for name, finding in found.items() if finding.status == "problem"] == problems
    assert (found["driver"].status == "ok") == (driver == "580.65")
    advice = {9: "", 8: "Its kernels are of 16 bits", 7: "No kernel for it"}[capability[0]]
    assert found["GPU 0"].advice.startswith(advice) and (found["GPU 0"].status == "ok") == (not advice)
    assert doctor.main([]) == int(bool(problems))


def test_doctor_command(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    status = doctor.main(["--json"])
    listed = json.loads(capsys.readouterr().out)
    assert {"what", "status", "found", "advice"} == set(listed[0])
    assert status == int(any(each["status"] == "problem" for each in listed))
    done = subprocess.run([sys.executable, "-m", "cute_attn.doctor"], capture_output=True, text=True)
    assert done.returncode == status and "nvidia-cutlass-dsl" in done.stdout


def test_doctor_compiles(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "build", lambda config: None)
    assert findings(compile_one=True)["compiler"].status == "ok"

    def fails(config: object) -> None:
        raise RuntimeError("no such target")

    monkeypatch.setattr(compile, "build", fails)
    assert "no such target" in findings(compile_one=True)["compiler"].found


# --- selftest

ONE = selftest.Case("bf16", torch.bfloat16, 20, 33, 4, 2, 64, True)


@pytest.mark.parametrize("precision", list(selftest.BOUNDS))
def test_selftest_passes_on_the_stand_ins(precision: str) -> None:
    case = replace(ONE, precision=precision, seqlen_q=70, seqlen_k=200)
    result = selftest.run(case, "emulator", "cpu")
    assert result.reason is None and result.error is not None
    assert selftest.BOUNDS[precision] / 10 < result.error  # the bound means something


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda out, lse, n: (out.index_fill(1, torch.tensor([3]), torch.nan), lse),
            "the output is not finite",
        ),
        (lambda out, lse, n: (out.flip(1), lse), "the error is"),
        (lambda out, lse, n: (out, lse + 0.5), "the log-sum-exp is off by 5.0e-01"),
        (lambda out, lse, n: (out, lse.index_fill(2, torch.tensor([0]), -torch.inf)), "rows without keys"),
        (lambda out, lse, n: (out * (1 + 2.0**-7 * (n == 1)), lse), "two runs differ"),
    ],
)
def test_selftest_finds_what_is_wrong(spoil: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = selftest.flash.flash_attn_func, iter(range(9))
    monkeypatch.setattr(
        selftest.flash, "flash_attn_func", lambda *args, **more: spoil(*real(*args, **more), next(calls))
    )
    found = selftest.run(ONE, "emulator", "cpu").reason
    assert found is not None and found.startswith(reason)


def test_selftest_reports_exceptions() -> None:
    result = selftest.run(replace(ONE, head_dim=20), "emulator", "cpu")
    assert result.error is None and result.reason is not None
    assert result.reason.startswith("ValueError: head_dim of q is 20")


def test_selftest_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert selftest.main([]) == 2
    assert "no Hopper GPU" in capsys.readouterr().out
    assert selftest.main(["--backend", "sm80"]) == 2
    assert "no GPU of compute capability 8.0 to 8.9" in capsys.readouterr().out
    monkeypatch.setattr(selftest, "cases", lambda full: [ONE, replace(ONE, head_dim=20)])
    assert selftest.main(["--backend", "emulator"]) == 1
    output = capsys.readouterr().out
    assert "bf16, d 64, causal, 20 x 33, heads 4/2" in output and "1 of 2 cases passed" in output


def test_selftest_cases() -> None:
    few, many = selftest.cases(), selftest.cases(full=True)
    assert len(set(few)) == len(few) < len(set(many)) == len(many)
    assert {case.precision for case in few} == {"bf16", "accurate", "fp8"}


@pytest.mark.gpu
def test_selftest_on_the_gpu() -> None:
    assert selftest.main([]) == 0


# --- ahead of use


def test_kernels_are_those_that_calls_use() -> None:
    shapes = ModelShapes(8, 2, 128, 128)
    configs = precompile.kernels(shapes, ["bf16", "accurate"])
    for seqlen in (1, 16, 200, 700, 5000):
        wanted = plan16.forward16_config(128, 128, "bf16", causal=seqlen > 1, group=4, seqlen_q=seqlen)
        assert wanted in configs
    assert len(configs) == len(set(configs))
    assert sum(isinstance(config, Fwd16Config) for config in configs) < len(configs)


@pytest.mark.parametrize(
    ("heads_q", "heads_k", "head_dim"), [(8, 2, 64), (8, 4, 128), (32, 2, 128), (6, 2, 256)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_default_lengths_stand_for_all(heads_q: int, heads_k: int, head_dim: int, causal: bool) -> None:
    shapes = ModelShapes(heads_q, heads_k, head_dim, head_dim, causal=causal)
    every = [*range(1, 1200), *range(1200, 20000, 97)]
    for precision in ("bf16", "accurate"):
        needed = set(precompile.kernels(shapes, [precision], every, varlen=True))
        assert needed <= set(precompile.kernels(shapes, [precision], varlen=True))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_kernels_of_older_gpus(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ModelShapes(8, 2, 128, 128, windows=((99, -1), (-1, -1)))
    configs = precompile.kernels(shapes, ["accurate"], [1, 300], varlen=True, arch=arch)
    make = plan_sm80.forward16_sm80_config
    for seqlen, mask, varlen in itertools.product(
        (1, 300), ({"causal": True}, {"window": True}), (False, True)
    ):
        if seqlen > 1 or varlen or "window" in mask:
            options: dict[str, Any] = {**mask, "group": 4, "seqlen_q": seqlen, "varlen": varlen}
            assert make(128, 128, "bf16", arch=arch, **options) in configs
    assert {config.arch for config in configs if isinstance(config, Fwd16Sm80Config)} == {arch}
    trained = precompile.kernels(shapes, seqlens=[1, 300], varlen=True, backward=True, arch=arch)
    for mask, varlen in itertools.product(({"causal": True}, {"window": True}), (False, True)):
        assert backward16_sm80_config(128, 128, "bf16", arch=arch, **mask, varlen=varlen) in trained
    assert len([config for config in trained if isinstance(config, Bwd16Sm80Config)]) == 4
    _Card(monkeypatch, (8, int(arch[-1])), "580.65")
    assert precompile._arch() == arch


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_windows_need_kernels_with_and_without(precision: str) -> None:
    shapes = ModelShapes(4, 2, 64, 64, windows=((99, -1), (-1, -1)), softcap=50.0, sinks=True)
    configs = precompile.kernels(shapes, [precision], [1, 64, 200])
    forward = [config for config in configs if isinstance(config, (Fwd16Config, FwdConfig))]
    assert {type(config) for config in forward} == {Fwd16Config if precision == "bf16" else FwdConfig}
    assert all(config.softcap and config.sinks for config in forward)
    assert {config.window for config in forward} == {True, False}
    only = precompile.kernels(replace(shapes, windows=((99, -1),), softcap=0.0), [precision], [200])
    assert all(config.window for config in only if isinstance(config, (Fwd16Config, FwdConfig)))


def test_odd_head_dims_use_the_16bit_kernel() -> None:
    found = precompile.kernels(ModelShapes(4, 2, 40, 40), ["fp8"], [1, 300], varlen=True)
    assert found == precompile.kernels(ModelShapes(4, 2, 40, 40), ["bf16"], [1, 300], varlen=True)


def test_decoding_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch, padded or not, whatever the precision."""
    monkeypatch.setattr(decode.kv, "target", lambda *_: "sm_90a")
    monkeypatch.setattr(decode, "_sms", lambda _: 132)
    shapes = ModelShapes(8, 2, 128, 128, softcap=50.0)
    q, k = (torch.empty(3, rows, heads, 128, dtype=torch.bfloat16) for rows, heads in ((1, 8), (40, 2)))
    options: dict[str, Any] = {"cache_seqlens": 40, "causal": True, "softcap": 50.0}
    dense = decode.decode_kernel(q, k, k, **options)
    padded = decode.decode_kernel(
        q, k, k, **options, cache_leftpad=torch.zeros(3, dtype=torch.int32), window_size=(9, -1)
    )
    for precision, varlen in itertools.product(("bf16", "fp8"), (False, True)):
        configs = precompile.kernels(shapes, [precision], varlen=varlen)
        steps = [config.name for config in configs if isinstance(config, DecodeConfig)]
        assert dense in steps and (padded in steps) == varlen
        assert len(steps) == len(set(steps)) == 6 * (1 + varlen)
    for other in (replace(shapes, causal=False), shapes):
        lengths = [300] if other is shapes else [1, 300]
        assert not any(isinstance(c, DecodeConfig) for c in precompile.kernels(other, ["bf16"], lengths))


def test_kernels_of_padded_batches_and_of_training() -> None:
    shapes = ModelShapes(8, 2, 128, 128, windows=((99, -1), (-1, -1)), softcap=50.0)
    dense = precompile.kernels(shapes)
    padded = [config for config in precompile.kernels(shapes, varlen=True) if config not in dense]
    for seqlen, window in itertools.product((1, 16, 200, 5000), (False, True)):
        options: dict[str, Any] = {"causal": not window, "window": window, "softcap": True}
        assert (
            plan16.forward16_config(128, 128, "bf16", **options, group=4, seqlen_q=seqlen, varlen=True)
            in padded
        )
    assert all(config.leftpad if isinstance(config, DecodeConfig) else config.varlen for config in padded)
    eight = precompile.kernels(shapes, ["accurate"], varlen=True)
    for batch, seqlen, window in itertools.product((2, 3), (1, 16, 200, 5000), ((-1, -1), (99, -1))):
        q, k = (
            torch.empty(1, heads, 128, dtype=torch.bfloat16).expand(batch * seqlen, -1, -1)
            for heads in (8, 2)
        )
        ends = torch.zeros(batch + 1, dtype=torch.int32)
        options = {"causal": True, "window_size": window, "softcap": 50.0}
        kernel = cute_attn.fp8_attention_varlen_kernel(q, k, k, ends, ends, **options)
        assert kernel.removeprefix("emulator(").removesuffix(")") in [config.name for config in eight]
    assert not any(getattr(c, "varlen", False) for c in precompile.kernels(shapes, ["naive"], varlen=True))
    trained = precompile.kernels(shapes, ["fp8"], backward=True)
    assert not any(isinstance(config, Fwd16Config) for config in trained)
    assert {config for config in trained if isinstance(config, Bwd16Config)} == {
        plan16.backward16_config(128, 128, "bf16", causal=True, softcap=True),
        plan16.backward16_config(128, 128, "bf16", window=True, softcap=True),
    }


@pytest.mark.parametrize("form", decode_plan.FORMS)
def test_kernels_of_caches(form: str) -> None:
    """Of a decoding step, of a prompt over the cache, and appending."""
    shapes = ModelShapes(16, 2, 128, 128, windows=((99, -1), (-1, -1)), softcap=50.0, sinks=True)
    found = set(precompile.kernels(shapes, seqlens=[1, 700], caches=[form]))
    features = {**decode_plan.FORMS[form], "softcap": True, "sinks": True}
    assert decode_plan.decode_config(128, 128, "bf16", rows=8, **features) in found
    assert decode_plan.decode_config(128, 128, "bf16", rows=5600, row_ends=True, **features) in found
    forward = {"softcap": True, "sinks": True, "group": 8, "seqlen_q": 700, "varlen": True}
    for mask in ("causal", "window"):
        assert plan16.forward16_config(128, 128, "bf16", **{mask: True}, **forward) in found
    paged, eight = "paged" in form, "e4m3" in form
    kinds = {(x.paged, x.cache == "e4m3") for x in found if isinstance(x, (AppendConfig, UnpackConfig))}
    assert {kind[1] for kind in kinds} == {eight} and (paged, eight) in kinds
    assert any(isinstance(x, UnpackConfig) and x.copy == (paged or eight) for x in found)
    index = {x.batch_idx for x in found if isinstance(x, DecodeConfig)}
    assert index == ({False} if paged else {False, True})
    assert any(isinstance(x, AppendConfig) and x.rotate and x.queries for x in found) == eight
    for config in found:
        config.check()


def test_unknown_forms_of_caches() -> None:
    with pytest.raises(ValueError, match="cache is 'fp4'; allowed: '16bit'"):
        precompile.kernels(ModelShapes(2, 2, 64, 64), caches=["fp4"])


def test_compile_command_takes_caches() -> None:
    configs = compile._chosen_decode(
        [(64, 64)], ["fp16"], [frozenset({"sinks"})], [1, 16], ["e4m3-paged"], "sm_89"
    )
    token = {"cache": "e4m3", "scales": "token", "arch": "sm_89"}
    assert configs == [
        decode_plan.decode_config(64, 64, "fp16", rows=1, page_size=16, sinks=True, **token),
        decode_plan.decode_config(64, 64, "fp16", rows=16, page_size=16, sinks=True, **token),
        AppendConfig(64, 64, "fp16", **token, paged=True),
    ]


def test_shapes_of_models() -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(hidden_size=256, num_attention_heads=8, num_key_value_heads=2)
    assert model_shapes(llama) == ModelShapes(8, 2, 32, 32)
    assert model_shapes(transformers.Gemma2Config(sliding_window=64)).windows == ((63, -1), (-1, -1))
    deepseek = model_shapes(transformers.DeepseekV3Config())
    assert (deepseek.head_dim, deepseek.head_dim_v, deepseek.heads_k) == (192, 128, 128)
    assert (
        not model_shapes(transformers.BertConfig()).causal
        and not model_shapes(transformers.ViTConfig()).causal
    )
    assert model_shapes(transformers.GptOssConfig()).sinks
    with pytest.raises(ValueError, match="has no num_attention_heads"):
        model_shapes(object())
    with pytest.raises(TypeError, match=r"dtype is torch.float32"):
        ModelShapes(1, 1, 64, 64, torch.float32)


def test_warmup_compiles_what_is_needed(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    """In processes where there is a disk cache, then into this one."""
    shapes, done, loaded = ModelShapes(2, 2, 64, 64), [], []

    def fill(configs: list[Any], jobs: int | None) -> Any:
        done.extend(configs)
        return ((config, 1.5) for config in configs)

    monkeypatch.setattr(compile, "fill_cache", fill)
    monkeypatch.setattr(compile, "compile_kernel", loaded.append)
    seconds = cute_attn.warmup(shapes, ["accurate"], [1, 300])
    wanted = precompile.kernels(shapes, ["accurate"], [1, 300])
    assert done == loaded == wanted and seconds == {config.name: 1.5 for config in wanted}
    monkeypatch.setattr(compile, "fill_cache", lambda configs, jobs: iter([(configs[0], ValueError("no"))]))
    with pytest.raises(RuntimeError, match="did not compile: no"):
        cute_attn.warmup(shapes)


def test_compile_command_takes_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_folder: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=2)
    config.save_pretrained(tmp_path)
    asked: list[Any] = []

    def fill(configs: list[Any], jobs: int | None) -> Any:
        asked.extend(configs)
        return ((config, 0.5) for config in configs)

    monkeypatch.setattr(compile, "fill_cache", fill)
    words = ["--model", str(tmp_path), "--recipe", "bf16,fp8", "--seqlen", "1,300", "--varlen", "--backward"]
    assert compile.main([*words, "--cache", "16bit,e4m3-paged"]) == 0
    shapes, caches = ModelShapes(2, 2, 64, 64), ["16bit", "e4m3-paged"]
    options: dict[str, Any] = {"varlen": True, "backward": True, "caches": caches}
    assert asked == precompile.kernels(shapes, ["bf16", "fp8"], [1, 300], **options)
    assert f"{asked[0].name}  0.5 s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compile.main(["--model", str(tmp_path / "none")])


def test_compile_command_takes_the_16bit_kernel() -> None:
    configs = compile._chosen16([(64, 64)], ["fp16"], ["full", "causal"], [frozenset()], [1, 8])
    assert all(isinstance(config, Fwd16Config) for config in configs)
    for seqlen, causal, group in ((1, False, 8), (4096, True, 8), (4096, False, 1)):
        assert plan16.forward16_config(64, 64, "fp16", causal=causal, group=group, seqlen_q=seqlen) in configs
