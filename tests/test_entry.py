"""The host entries, compiled for CPU tensors with a kernel that only writes down which tensors it was given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_tensor
from host_memory import HostMemory
from torch import Tensor

from cute_attn import launch
from cute_attn.kernels.config import FwdConfig, QuantizeConfig
from cute_attn.kernels.entry import FwdEntry, QuantizeEntry
from cute_attn.kernels.operands import Layout
from cute_attn.problem import Features
from cute_attn.quantize import PRESETS, Fp8Recipe, from_fp8, mean_chunks, quantize_reference
from cute_attn.tiles import forward_config, quantize_config

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HOST = cute.AddressSpace.generic
Seen = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape, strides


def store(target: Any, words: list[Any]) -> None:
    for i, word in enumerate(words):
        target[i] = Int64(word)


class Probe:
    """In place of a kernel: writes address, shape and strides of each tensor, and each number, to host memory.

    It learns the memory's address from its argument `sink`, whose place among the arguments is given.
    """

    def __init__(self, sink: int):
        self.sink = sink
        self.form: list[int | None] = []  # ranks of the tensors; None for a number

    @cute.jit
    def write(self, args):
        place = args[self.sink]
        address = place.iterator.toint() if const_expr(isinstance(place, cute.Tensor)) else place
        words: list[Any] = []
        for x in args:
            if const_expr(isinstance(x, cute.Tensor)):
                self.form.append(len(x.shape))
                words += [x.iterator.toint(), *x.shape, *x.stride]
            else:
                self.form.append(None)
                words += [x]
        target = cute.make_tensor(cute.make_ptr(Int64, address, HOST), cute.make_layout(len(words)))
        store(target, words)

    def read(self, memory: Tensor) -> list[Any]:
        """What was written: a `Seen` for each tensor, an int for each number."""
        words, found = memory.tolist(), []
        for rank in self.form:
            if rank is None:
                found.append(words.pop(0))
                continue
            address, *rest = (words.pop(0) for _ in range(1 + 2 * rank))
            found.append((address, tuple(rest[:rank]), tuple(rest[rank:])))
        return found


class FwdProbe(Probe):
    """Writes to `lse`."""

    def __init__(self) -> None:
        super().__init__(8)

    @cute.jit
    def __call__(
        self, q, k, vt, q_scale, k_scale, v_scale, lse_add, o, lse, scale, scale_log2, sms, turn,
        slopes, sinks, softcap_factor, left, right, stream,
    ):  # fmt: skip
        assert (q.element_type, vt.element_type) == (cutlass.Int8, cutlass.Float8E4M3FN)
        ten = Float32(10.0)  # the scales, which are fractions
        integers = (scale * ten, scale_log2 * ten, sms, turn)
        features = () if const_expr(slopes is None) else (slopes, sinks, softcap_factor * ten, left, right)
        self.write((q, k, vt, q_scale, k_scale, v_scale, lse_add, o, lse, *integers, *features))


class QuantizeProbe(Probe):
    """Writes to `signs`."""

    def __init__(self) -> None:
        super().__init__(3)

    @cute.jit
    def __call__(
        self, q, k, v, signs, sums, amax_q, amax_k, amax_v, q8, k8, vt, q_scale, k_scale, v_scale, q_dot, cos, sin,
        chunk, count, stream,
    ):  # fmt: skip
        assert cos is None and sin is None  # as they come, they go
        self.write(
            (
                q,
                k,
                v,
                signs,
                sums,
                amax_q,
                amax_k,
                amax_v,
                q8,
                k8,
                vt,
                q_scale,
                k_scale,
                v_scale,
                q_dot,
                chunk,
                count,
            )
        )


def fake(element: Any, rank: int, last: int | None = None) -> Any:
    shape = [cute.sym_int32() for _ in range(rank)]
    if last is not None:
        shape[-1] = last
    strides = (*(cute.sym_int64(divisibility=128 // element.width) for _ in shape[:-1]), 1)
    return make_fake_tensor(element, tuple(shape), strides, memspace=HOST, assumed_align=16)


def scalars(rank: int = 2) -> Any:
    shape, strides = (tuple(new() for _ in range(rank)) for new in (cute.sym_int32, cute.sym_int64))
    return make_fake_tensor(Float32, shape, strides, memspace=HOST, assumed_align=4)


@functools.cache
def compiled(config: FwdConfig | QuantizeConfig) -> tuple[Callable[..., None], Probe]:
    """The entry of `config` with a probe, for CPU tensors; called without a stream."""
    layout, address = tuple(Int64(0) for _ in Layout._fields), Int64(0)
    entry: Any
    probe: Probe
    if isinstance(config, FwdConfig):
        probe = FwdProbe()
        entry = FwdEntry(probe, config)
        args = [
            fake(cutlass.BFloat16, 4, config.head_dim_v),
            *[address] * 3,
            layout,
            Float32(0),
            Float32(0),
            Int32(0),
            Int32(0),
        ]
        args += [scalars(2), scalars(1), Float32(0), Int32(0), Int32(0)] if config.alibi else [None] * 5
    else:
        probe = QuantizeProbe()
        entry = QuantizeEntry(probe, config)
        args = [
            *(fake(cutlass.BFloat16, 4, d) for d in (config.head_dim, config.head_dim, config.head_dim_v)),
            fake(Int64, 1),  # the sink, in place of signs
            *(
                scalars() if mode == "static" else None
                for mode in (config.q_mode, config.k_mode, config.v_mode)
            ),
            address,
            layout,
            None,
            None,
            *[Int32(0)] * 3,
        ]
    function = cute.compile(entry, *args, None, options="--enable-tvm-ffi --gpu-arch sm_90a")
    return lambda *given: function(*given, None), probe


def seen(x: Tensor) -> Seen:
    return x.data_ptr(), tuple(x.shape), x.stride()


def inputs(shape: tuple[int, ...], head_dim: int = 64, head_dim_v: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
    q = torch.zeros(batch, seqlen_q, heads_q, head_dim, dtype=BF16)
    k, v = (torch.zeros(batch, seqlen_k, heads_k, d, dtype=BF16) for d in (head_dim, head_dim_v))
    return q, k, v


def memory() -> Tensor:
    return torch.full((128,), -1, dtype=torch.int64)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compile_kernel", lambda config: compiled(config)[0])
    monkeypatch.setattr(launch, "_sms", lambda device: 132)
    HostMemory(monkeypatch)


SHAPES = [(2, 130, 333, 4, 2), (1, 1, 1, 1, 1), (3, 7, 1025, 6, 3), (1, 40, 16385, 2, 1), (2, 5, 50000, 2, 2)]


@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(
    "recipe",
    [PRESETS["accurate"], Fp8Recipe(rotation="none", smooth_k=False, v_scale="head")],
    ids=["default", "plain"],
)
def test_the_quantiser_writes_where_the_views_are(
    recipe: Fp8Recipe, shape: tuple[int, ...], dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python and the compiled host function agree on every address, shape and stride of the workspace."""
    q, k, v = inputs(shape, *dims)
    batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
    config = quantize_config(recipe, *dims, "bf16")
    quantiser = launch.Quantiser(q.shape, k.shape, recipe, config, q.device)
    sink = memory()
    monkeypatch.setattr(quantiser, "_signs", sink)
    workspace = quantiser(q, k, v)
    found = compiled(config)[1].read(sink)
    qkv, base = quantiser.operands(workspace, BF16), workspace.data_ptr()
    assert found[:4] == [seen(x) for x in (q, k, v, sink)]
    assert found[8:14] == [seen(x) for x in (qkv.q, qkv.k, qkv.vt, qkv.q_scale, qkv.k_scale, qkv.v_scale)]
    chunk, chunks = mean_chunks(seqlen_k)
    d = config.head_dim
    if recipe.smooth_k:
        assert qkv.q_dot_mean is not None and found[14] == seen(qkv.q_dot_mean)
        strides = (chunks * heads_k * d, heads_k * d, d, 1)
        assert found[4] == (base + quantiser.layout.sums, (batch, chunks, heads_k, d), strides)
        assert found[15:] == [chunk, -(-seqlen_k // 16)]
    else:  # of the right shape for the kernel, but of one element
        assert found[4] == (base, (batch, 1, heads_k, d), (0, 0, 0, 0))
        assert found[14] == (base, (batch, heads_q, seqlen_q), (0, 0, 0))
        assert found[15:] == [0, 1]
    unread = [(base, (batch, heads), (0, 0)) for heads in (heads_q, heads_k, heads_k)]
    assert found[5:7] == unread[:2]
    assert (found[7] == unread[2]) == (recipe.v_scale == "block")
    if recipe.v_scale != "block":
        assert found[7][1] == (batch, heads_k) and found[7][0] != base


def test_a_given_mean_is_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs((2, 9, 5000, 4, 2))
    recipe = PRESETS["accurate"]
    config = quantize_config(recipe, 64, 64, "bf16")
    quantiser = launch.Quantiser(q.shape, k.shape, recipe, config, q.device)
    sink = memory()
    monkeypatch.setattr(quantiser, "_signs", sink)
    workspace = quantiser(q, k, v, torch.ones(2, 2, 64))
    found = compiled(config)[1].read(sink)
    assert found[4] == (workspace.data_ptr() + quantiser.layout.sums, (2, 1, 2, 64), (128, 128, 64, 1))
    assert found[15:] == [0, 1]


@pytest.mark.parametrize("recipe", [PRESETS["accurate"], PRESETS["paper"]], ids=lambda recipe: recipe.name)
def test_quantising_into_given_tensors(recipe: Fp8Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands in memory of their own, and sums that are there."""
    q, k, v = inputs((2, 9, 500, 4, 2), 192, 128)
    config = quantize_config(recipe, 192, 128, "bf16")
    into = quantize_reference(q, k, v, recipe)
    wide = torch.zeros(2, 2, 12)  # rows of k_scale are readable to a multiple of 4
    into = replace(into, q_scale=into.q_scale.contiguous(), k_scale=wide[..., :8])
    sums = torch.zeros(2, 3, 2, 192) if recipe.smooth_k else None
    sink = memory()
    monkeypatch.setattr(launch, "_signs", lambda *_: sink)
    launch.launch_quantize_into(q, k, v, recipe, config, into, sums, 33)
    found = compiled(config)[1].read(sink)
    assert found[:4] == [seen(x) for x in (q, k, v, sink)]
    assert found[8:14] == [
        seen(x) for x in (into.q, into.k, into.vt, into.q_scale, into.k_scale, into.v_scale)
    ]
    if sums is None:
        assert into.q_dot_mean is None and found[15:] == [0, 1]
    else:
        assert into.q_dot_mean is not None and found[14] == seen(into.q_dot_mean)
        assert found[4] == seen(sums) and found[15:] == [0, 33]


@pytest.mark.parametrize("keys", [1, 2048, 2049, 5000])
def test_sums_alone(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks longer than those of so few keys would be."""
    _, k, v = inputs((2, 1, keys, 2, 2), 192, 128)
    recipe = PRESETS["accurate"]
    config = quantize_config(recipe, 192, 128, "bf16")
    sums = torch.zeros(2, -(-keys // 2048), 2, 192)
    sink = memory()
    monkeypatch.setattr(launch, "_signs", lambda *_: sink)
    launch.launch_key_sums(k, v, recipe, config, 128, sums)
    found = compiled(config)[1].read(sink)
    assert found[1] == seen(k) and found[4] == seen(sums)
    assert found[15:] == [128, 0]  # no samples of a mean: nothing behind the sums


@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("recipe", ["accurate", "custom"])
def test_the_forward_kernel_reads_where_the_quantiser_writes(
    recipe: str, shape: tuple[int, ...], dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = PRESETS["accurate"] if recipe == "accurate" else Fp8Recipe(smooth_k=False)
    q, k, v = inputs(shape, *dims)
    batch, seqlen_q, _, heads_q, _ = shape
    config = quantize_config(chosen, *dims, "bf16")
    forward = forward_config(*dims, "int8", False, "code", "bf16")
    sink = memory()
    call = launch.Attention(q.shape, k.shape, chosen, config, forward, 0.25, q.device)
    monkeypatch.setattr(call._quantiser, "_signs", memory())
    quantiser = call._quantiser
    workspace = quantiser._new_workspace()
    monkeypatch.setattr(launch, "raw_alloc", lambda size, stream: workspace.data_ptr())
    monkeypatch.setattr(launch, "raw_delete", lambda address: None)
    monkeypatch.setattr(call._forward, "new_lse", lambda: sink)
    out, _ = call(q, k, v, True)  # type: ignore[misc]
    qkv = quantiser.operands(workspace, BF16)
    found = compiled(forward)[1].read(sink)
    assert found[:6] == [seen(x) for x in (qkv.q, qkv.k, qkv.vt, qkv.q_scale, qkv.k_scale, qkv.v_scale)]
    if qkv.q_dot_mean is None:
        assert found[6] == (launch._zero(q.device).data_ptr(), (batch, heads_q, seqlen_q), (0, 0, 0))
    else:
        assert found[6] == seen(qkv.q_dot_mean)
    assert found[7] == seen(out)
    assert found[8] == (sink.data_ptr(), (batch, heads_q, seqlen_q), (heads_q * seqlen_q, seqlen_q, 1))
    assert found[9:] == [2, 3, 132, 1]  # 10 softmax_scale, the same times log2(e), SMs, heads in turn


def test_the_forward_kernel_reads_operands_of_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.to(E4M3) for x in inputs((2, 130, 333, 4, 2)))
    q = q.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
    qkv = from_fp8(q, k, v, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))
    config = forward_config(64, 64, "int8", False, "code", "bf16")  # one byte is as good as another here
    sink = memory()
    forward = launch.Forward((2, 130, 4, 64), k.shape, config, 0.25, q.device)
    monkeypatch.setattr(forward, "new_lse", lambda: sink)
    forward(qkv)
    found = compiled(config)[1].read(sink)
    assert found[:4] == [seen(x) for x in (qkv.q, qkv.k, qkv.vt, qkv.q_scale)]
    assert found[4][1:] == ((2, 2, 6), (16, 8, 1)) and found[5][1:] == ((2, 2, 2), (4, 2, 1))


def test_features_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes of any strides, sinks, the factor of softcap, ends of a window; a negative scale goes to Q."""
    q, k, v = (x.to(E4M3) for x in inputs((2, 130, 333, 4, 2)))
    qkv = from_fp8(q, k, v, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))
    every = {"window": True, "softcap": True, "alibi": True, "sinks": True}
    config = forward_config(64, 64, "int8", False, "code", "bf16", **every)
    slopes, sinks = torch.zeros(4).expand(2, 4), torch.zeros(8)[::2]
    found = []
    for window in ((100, -1), (7, 500)):
        sink = memory()
        features = Features(window, 0.5, True, True)
        forward = launch.Forward((2, 130, 4, 64), k.shape, config, -0.25, q.device, features)
        monkeypatch.setattr(forward, "new_lse", lambda sink=sink: sink)
        forward(qkv, slopes, sinks)
        found.append(compiled(config)[1].read(sink)[9:])
    # 10 |softmax_scale|, 10 softcap log2(e), SMs, heads in turn, slopes, sinks, 20 |softmax_scale| log2(e) / softcap
    ahead = [2, 7, 132, 1, seen(slopes), seen(sinks), 14]
    assert found == [[*ahead, 100, 130], [*ahead, 7, 130]]


def test_the_layout_crosses_as_an_object_or_a_tuple() -> None:
    config = forward_config(64, 64, "int8", False, "code", "bf16")
    function, probe = compiled(config)
    out, layout = torch.zeros(1, 5, 2, 64, dtype=BF16), Layout(*(16 * i for i in range(len(Layout._fields))))
    found = []
    for form in (layout, launch._shape_object(layout)):
        sink = memory()
        function(out, 1 << 40, sink.data_ptr(), 1 << 41, form, 0.5, 0.5, 132, 1, *[None] * 5)
        found.append(probe.read(sink)[:7])
    assert found[0] == found[1]
    assert found[0][0] == ((1 << 40) + layout.q, (1, 5, 2, 64), (*layout[3:6], 1))
    with pytest.raises((ValueError, TypeError)):
        function(out, 0, memory().data_ptr(), 0, layout[:-1], 0.5, 0.5, 132, 1, *[None] * 5)
