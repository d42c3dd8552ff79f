"""Public functions in code that torch.compile traces, in CUDA graphs, and on streams; see also test_kernels_gpu.py.

`flash_attn_func` is one operator of a graph. Others end the graph, so the checks here are that results are the same,
that the kernel ran and not torch, and that nothing of a trace is left behind for later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn import api, dispatch, flash, flash_varlen
from cute_attn.dispatch import TORCH

BF16 = torch.bfloat16
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that another test has planned or traced."""
    for memory in (dispatch._choices, api._calls, flash._plans, flash_varlen._plans):
        memory.clear()  # type: ignore[attr-defined]
    torch._dynamo.reset()
    yield


def functions(device: str) -> dict[str, Function]:
    """Public functions of (q, k, v) by name, with the stand-ins of the kernels where there is no GPU."""
    gpu = device.startswith("cuda")
    eight, sixteen = ("sm90", "sm90") if gpu else ("emulator", "reference")

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Any:
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        total = len(rows[0])
        ends = torch.arange(0, total + 1, total // 2, dtype=torch.int32, device=device)
        return cute_attn.flash_attn_varlen_func(
            *rows, ends, ends, total, total, causal=True, return_lse=True, backend=sixteen
        )

    def used(q: Tensor, k: Tensor, v: Tensor) -> Any:
        some = torch.full((len(q),), k.shape[1] - 3, dtype=torch.int32, device=device)
        return cute_attn.flash_attn_func(q, k, v, seqused_k=some, return_lse=True, backend=sixteen)

    def prepared(q: Tensor, k: Tensor, v: Tensor) -> Any:
        qkv = cute_attn.quantize(q, k, v, backend=eight)
        return cute_attn.fp8_attention_quantized(qkv, causal=True, return_lse=True, backend=eight)

    def fp8_tensors(q: Tensor, k: Tensor, v: Tensor) -> Any:
        codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        return cute_attn.flash_attn_fp8_func(*codes, causal=True, return_lse=True, backend=eight)

    def drop_in(q: Tensor, k: Tensor, v: Tensor, precision: str) -> Any:
        found = cute_attn.AttentionLog()
        out = cute_attn.sdpa(
            *(x.transpose(1, 2) for x in (q, k, v)),
            is_causal=True,
            precision=precision,
            backend=eight,
            fallback="error",
            log=found,
        )
        return out, out

    return {
        "flash_attn_func": lambda q, k, v: cute_attn.flash_attn_func(
            q, k, v, causal=True, return_lse=True, backend=sixteen
        ),
        "flash_attn_varlen_func": varlen,
        "seqused_k": used,
        "fp8_attention": lambda q, k, v: cute_attn.fp8_attention(
            q, k, v, causal=True, window_size=(20, 0), return_lse=True, backend=eight
        ),
        "fp8_attention_quantized": prepared,
        "flash_attn_fp8_func": fp8_tensors,
        "sdpa": lambda q, k, v: drop_in(q, k, v, "bf16"),
        "sdpa, 8 bits": lambda q, k, v: drop_in(q, k, v, "accurate"),
    }


NAMES = list(functions("cpu"))


def tensors(seqlen: int, device: str, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, seqlen, heads, 64, device=device).to(BF16) for heads in (4, 2, 2)]


def same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(map(torch.equal, got, wanted))


def inputs(name: str, seqlen: int, device: str) -> list[Tensor]:
    """Of one number of heads where torch's signature wants it."""
    q, k, v = tensors(seqlen, device)
    return [q, q.flip(1), q.roll(1, 3)] if name.startswith("sdpa") else [q, k, v]


def check_compiled(name: str, device: str, **options: Any) -> None:
    """Also of another shape, and plain calls between."""
    function = functions(device)[name]

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(q * 2, k, v)
        return out + 1, lse * 2

    compiled = torch.compile(run, backend="eager", **options)
    with torch.no_grad():
        for seqlen in (24, 40):
            given = inputs(name, seqlen, device)
            assert same(compiled(*given), run(*given))


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "fp8_attention"]
)  # whose stand-in is traced, slowly
def test_compiled(name: str) -> None:
    check_compiled(name, "cpu", fullgraph=name in ("flash_attn_func", "flash_attn_varlen_func", "seqused_k"))


def test_sdpa_ends_the_graph_and_runs_as_ever() -> None:
    """The log counts, the kernel runs and not torch, and gradients come back."""
    log = cute_attn.AttentionLog()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cute_attn.sdpa(q * 2, k, v, precision="accurate", backend="emulator", log=log).float().sum()

    given = [x.transpose(1, 2) for x in inputs("sdpa", 24, "cpu")]
    with torch.no_grad():
        torch.compile(run, backend="eager")(*given)
    assert log.total == 1 and TORCH not in log.kernels and not log.fallbacks
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(run, backend="eager", fullgraph=True)(*given)
    given[0].requires_grad_()
    torch.compile(run, backend="eager")(*given).backward()
    found = given[0].grad
    given[0].grad = None
    run(*given).backward()
    assert found is not None and torch.equal(found, given[0].grad)


# --- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_compiled_on_the_gpu(name: str) -> None:
    check_compiled(name, "cuda", fullgraph=name == "flash_attn_func")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["seqused_k", "flash_attn_fp8_func", "sdpa", "sdpa, 8 bits"])
def test_graph(name: str) -> None:
    """A captured call, replayed on new inputs, equals a plain one."""
    function, given = functions("cuda")[name], inputs(name, 300, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        function(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = function(*given)
    for x in given:
        x.copy_(torch.randn(x.shape, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, function(*given)) and bool(captured[0].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_current_stream(name: str) -> None:
    """Behind a slow producer on a stream, a call on that stream sees what it writes."""
    function, given = functions("cuda")[name], inputs(name, 300, "cuda")
    wanted = function(*given)
    late = [torch.zeros_like(x) for x in given]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles, about 30 ms
        for x, y in zip(late, given, strict=True):
            x.copy_(y)
        got = function(*late)
    stream.synchronize()
    assert same(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_other_device(name: str) -> None:
    """Tensors of a device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    given = inputs(name, 300, "cuda")
    wanted = functions("cuda")[name](*given)
    assert torch.cuda.current_device() == 0
    got = functions("cuda:1")[name](*(x.to("cuda:1") for x in given))
    assert got[0].device.index == 1 and same(tuple(x.to("cuda:0") for x in got), wanted)
