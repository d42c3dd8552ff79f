"""The 16-bit forward by mma.sync without a GPU: tiles, the plan, addresses in shared memory, the compiled code."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import figures_of, fullest, no_spills
from torch import Tensor

import cute_attn
from cute_attn import dispatch, flash, flash_varlen, kv, plan_sm80, tracing
from cute_attn.compile import KernelFigures
from cute_attn.kernels.config import HEAD_DIMS_16BIT, SM80_ARCHS, Fwd16Sm80Config
from cute_attn.kernels.sm80 import tile as tile_module
from cute_attn.plan_sm80 import forward16_sm80_config
from cute_attn.problem import ARCHS
from cute_attn.remember import Remembered

BF16 = torch.bfloat16
EVERY = {"softcap": True, "alibi": True, "sinks": True}


def tensors(seqlen_q: int = 300, seqlen_k: int = 300, head_dim: int = 128) -> list[Tensor]:
    sizes = ((seqlen_q, 8), (seqlen_k, 2), (seqlen_k, 2))
    return [torch.zeros(2, rows, heads, head_dim, dtype=BF16) for rows, heads in sizes]


@pytest.fixture(params=[(8, 0), (8, 6), (8, 9), (9, 0), (12, 1)], ids=str)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU that is not there, as the target of the kernels by mma.sync."""
    for module in (flash, dispatch):
        monkeypatch.setattr(module, "device_capability", lambda device: request.param)
    for module in (flash, flash_varlen):
        monkeypatch.setattr(module, "_plans", Remembered())
    monkeypatch.setattr(dispatch, "_choices", Remembered())
    return ARCHS[request.param]


# --- tiles


@pytest.mark.parametrize("arch", SM80_ARCHS)
def test_every_head_dim_has_a_tile(arch: str) -> None:
    kinds = ({}, {"causal": True}, {"window": True, "varlen": True, **EVERY})
    for dims, kind in itertools.product(itertools.product(HEAD_DIMS_16BIT, repeat=2), kinds):
        config = forward16_sm80_config(*dims, "bf16", arch=arch, **kind)
        config.check()
        assert config.fits and config.arch == arch
        assert config.causal == ("causal" in kind) and config.softcap == ("softcap" in kind)


def test_tile_table() -> None:
    def sizes(head_dim: int, arch: str, **more: Any) -> tuple[int, ...]:
        config = forward16_sm80_config(head_dim, head_dim, "bf16", arch=arch, **more)
        return config.tile_m, config.tile_n, config.warps, config.kv_stages, config.ctas

    assert sizes(64, "sm_80") == sizes(64, "sm_90a") == (128, 96, 4, 2, 2)
    assert sizes(64, "sm_86") == sizes(64, "sm_80", window=True, **EVERY) == (128, 64, 4, 2, 2)
    assert sizes(128, "sm_90a") == (128, 64, 4, 2, 2) and sizes(128, "sm_80") == (128, 64, 4, 1, 2)
    for length in (384, 768, 4096):
        assert sizes(64, "sm_80", seqlen_q=length) == (128, 96, 4, 2, 2)
    for length in (1, 512, 1024, 2048):  # whose last tile of 96 keys would be mostly empty
        assert sizes(64, "sm_80", seqlen_q=length) == (128, 64, 4, 2, 2)
        assert sizes(64, "sm_80", seqlen_q=length, causal=True) == (128, 96, 4, 2, 2)
    assert sizes(64, "sm_80", seqlen_q=768, varlen=True) == (128, 64, 4, 2, 2)
    assert sizes(64, "sm_80", seqlen_q=2048, varlen=True) == (128, 96, 4, 2, 2)
    assert sizes(192, "sm_90a") == (64, 96, 4, 1, 2)
    assert sizes(192, "sm_90a", seqlen_q=512) == sizes(192, "sm_90a", causal=True) == (64, 64, 4, 1, 2)
    assert sizes(192, "sm_80") == (64, 64, 4, 1, 2) and sizes(192, "sm_86") == (128, 64, 8, 1, 1)
    assert forward16_sm80_config(192, 128, "bf16", arch="sm_90a").kv_stages == 2
    assert sizes(128, "sm_90a", softcap=True, varlen=True, alibi=True) == (128, 32, 4, 2, 2)
    assert sizes(128, "sm_90a", window=True, **EVERY) == (64, 64, 4, 2, 2)
    assert sizes(128, "sm_80", window=True, varlen=True) == sizes(128, "sm_80", window=True, alibi=True)
    assert sizes(128, "sm_80", window=True, alibi=True) == (64, 64, 4, 2, 2)
    assert sizes(64, "sm_80", alibi=True) == sizes(64, "sm_80", causal=True, alibi=True) == (128, 64, 4, 2, 2)
    assert sizes(128, "sm_80", causal=True, varlen=True) == (128, 32, 4, 2, 2)
    assert sizes(128, "sm_80", window=True) == sizes(128, "sm_87", varlen=True) == (128, 48, 4, 2, 2)
    packed = {"window": True, "alibi": True, "group": 4, "seqlen_q": 1}  # a slope for each row
    assert sizes(128, "sm_80", **packed) == sizes(128, "sm_90a", **packed) == (64, 64, 4, 2, 2)
    assert sizes(256, "sm_90a") == sizes(256, "sm_90a", window=True, **EVERY) == (64, 64, 4, 1, 2)
    assert sizes(128, "sm_89") == (128, 32, 4, 1, 2) and sizes(128, "sm_89", causal=True) == (64, 64, 4, 1, 2)
    in_registers = (
        ({}, 10),
        ({"causal": True}, 8),
        ({"softcap": True}, 8),
        ({"softcap": True, "window": True}, 0),
    )
    for given, pieces in in_registers:
        assert forward16_sm80_config(256, 256, "bf16", arch="sm_90a", **given).q_in_regs == pieces
    assert sizes(256, "sm_80") == (128, 64, 8, 1, 1) and sizes(256, "sm_86") == (64, 64, 4, 1, 1)


def test_the_sample_has_every_feature_and_no_name_twice() -> None:
    configs = plan_sm80.all_forward16_sm80_configs()
    assert len({config.name for config in configs}) == len(set(configs)) == len(configs)
    for feature in ("causal", "window", "softcap", "alibi", "sinks", "varlen"):
        assert {getattr(config, feature) for config in configs} == {False, True}
    for field, values in (("kv_stages", {1, 2}), ("m_tiles", {1, 2}), ("warps", {4, 8}), ("ctas", {1, 2})):
        assert {getattr(config, field) for config in configs} == values


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 36}, "head_dim must be a multiple of 8 from 32 to 256, got 36"),
        ({"dtype": "fp32"}, "dtype must be 'bf16' or 'fp16', got 'fp32'"),
        ({"arch": "sm_75"}, r"arch must be one of \('sm_80', .*, got 'sm_75'"),
        ({"causal": True, "window": True}, "causal must be False with a window"),
        ({"tile_m": 96}, "tile_m must be 16 or 32 rows for each of 4 or 8 warps, got 96 for 4"),
        ({"tile_n": 24}, "tile_n must be a multiple of 16 up to 128, got 24"),
        ({"kv_stages": 3}, "kv_stages must be 1 or 2, got 3"),
        ({"q_in_regs": 9}, "q_in_regs must be from 0 to 8, got 9"),
        ({"pack_gqa": 3}, "pack_gqa must divide 64, got 3"),
        ({"ctas": 9}, "ctas must leave 64 registers to each of 128 threads, got 9"),
        ({"head_dim": 256, "head_dim_v": 256, "arch": "sm_86"}, "131104 bytes exceeds 101376 of sm_86"),
    ],
)
def test_impossible_configurations(changed: dict[str, Any], message: str) -> None:
    good = Fwd16Sm80Config(128, 128, 128, 64, 4, 2, "bf16", False)
    good.check()
    if changed.get("arch") == "sm_86":
        changed = {**changed, "kv_stages": 1}
    with pytest.raises(ValueError, match=message):
        replace(good, **changed).check()


def test_an_architecture_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"arch must be one of .*, got 'sm_75'"):
        forward16_sm80_config(64, 64, "bf16", arch="sm_75")


# --- from a call to a kernel


def test_what_a_call_launches(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Fwd16Sm80Config, dict[str, Any]]] = []

    def launched(q: Tensor, k: Tensor, v: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append((given[-1], options))
        return q, q

    def prepared(*given: Any, **options: Any) -> Any:
        calls.append((given[2], options))
        return lambda q, *others: (q, q)

    monkeypatch.setattr("cute_attn.launch.Forward16", prepared)
    monkeypatch.setattr("cute_attn.launch.launch_forward16_varlen", launched)
    q, k, v = tensors()
    cute_attn.flash_attn_func(q, k, v, causal=True, softcap=3.0, backend="sm80")
    want = forward16_sm80_config(
        128, 128, "bf16", arch=arch, causal=True, softcap=True, group=4, seqlen_q=300
    )
    assert calls[-1][0] == want and calls[-1][1]["window"] == (-1, 0)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 300, 600], dtype=torch.int32)
    cute_attn.flash_attn_varlen_func(*rows, ends, ends, 300, 300, window_size=(9, 0), backend="sm80")
    more: dict[str, Any] = {"window": True, "group": 4, "seqlen_q": 300, "varlen": True}
    assert calls[-1][0] == forward16_sm80_config(128, 128, "bf16", arch=arch, **more)
    cute_attn.flash_attn_func(q, k, v)
    assert isinstance(calls[-1][0], Fwd16Sm80Config) == (arch != "sm_90a")


def test_explain(arch: str) -> None:
    q, k, v = tensors(5)
    made = cute_attn.flash_attn_explain(q, k.expand(2, -1, -1, -1), v, causal=True, backend="sm80")
    text = " ".join(str(made).split())
    want = forward16_sm80_config(128, 128, "bf16", arch=arch, causal=True, group=4, seqlen_q=5)
    assert (made.backend, made.kernel, made.config) == ("sm80", want.name, want)
    assert want.name.startswith(
        "fwd_sm80_bf16" if arch == "sm_80" else f"fwd_sm80_on_{arch.replace('_', '').removesuffix('a')}_"
    )
    for part in (
        f"{want.tile_m} queries x {want.tile_n} keys, {want.kv_stages} K/V stages, 4 warps of "
        f"{16 * want.m_tiles} rows, 2 CTAs an SM; rows of 4 query heads packed",
        f"smem {want.smem_bytes} of {SM80_ARCHS[arch].cta_smem_bytes} bytes",
        "backend 'sm80' was asked for",
        "two stages of K and V" if want.kv_stages == 2 else "one stage of K and V",
    ):
        assert part in text, text
    if arch != "sm_90a":
        assert "without the WGMMA of the Hopper kernel" in str(cute_attn.flash_attn_explain(q, k, v))
    odd = torch.zeros(2, 5, 8, 132, dtype=BF16)[..., :128]
    text = str(cute_attn.flash_attn_explain(odd, k, v, backend="sm80"))
    assert "q is copied first: its copies want" in text and "k is copied" not in text


@pytest.mark.parametrize("capability", [None, (7, 5), (8, 1), (10, 0)], ids=str)
def test_other_gpus_are_refused(capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=r"allowed: a GPU of compute capability 8\.0 to 8\.9, 9\.x or 12\.x"):
        cute_attn.flash_attn_func(*tensors(), backend="sm80")


@pytest.mark.parametrize(
    ("capability", "where"),
    [
        (None, "the tensors are not on an NVIDIA GPU"),
        ((7, 5), "the GPU has compute capability 7.5"),
        ((10, 0), "the GPU has compute capability 10.0"),
    ],
    ids=str,
)
def test_auto_runs_the_reference_where_there_is_no_kernel(
    capability: tuple[int, int] | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once, whichever function meets it first, and what is planned says so always."""
    for module in (flash, kv):
        monkeypatch.setattr(module, "device_capability", lambda device: capability)
    for module in (flash, flash_varlen):
        monkeypatch.setattr(module, "_plans", Remembered())
    monkeypatch.setattr(tracing, "_said", set())
    q, k, v = (torch.randn_like(x) for x in tensors(5, 7, 32))
    named = "" if capability is None else f", a GPU of compute capability {capability[0]}.{capability[1]}"
    need = "the 16-bit kernels need a GPU of compute capability 8.0 to 8.9, 9.x or 12.x"
    with pytest.warns(
        UserWarning, match=f"runs plain PyTorch .* because q is on device cpu{named}, and {need}"
    ) as warned:
        out = cute_attn.flash_attn_func(q, k, v, causal=True)
    assert warned[0].filename == __file__
    ends = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(out, cute_attn.flash_attn_func(q, k, v, causal=True, backend="reference"))
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        unlike = cute_attn.flash_attn_varlen_func(*rows, *ends, 5, 7, causal=True)
        cached = cute_attn.flash_attn_with_kvcache(q, k, v, causal=True)
        made = cute_attn.flash_attn_explain(q, k, v, causal=True)
        trained = cute_attn.flash_attn_func(q.requires_grad_(), k, v, causal=True)
        trained.sum().backward()
    for other in (unlike.view_as(out), cached, trained):
        assert torch.allclose(other.float(), out.float(), atol=1e-2)
    assert q.grad is not None and (made.backend, made.kernel, made.config) == ("reference", "reference", None)
    assert where in " ".join(str(made).split())


def test_the_hopper_kernel_needs_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.0; allowed: .* 9\.x \(Hopper"):
        cute_attn.flash_attn_kernel(*tensors(), backend="sm90")


def test_rows_far_apart_are_copied() -> None:
    near, far = (
        torch.empty(1, 2, 1, 64, device="meta", dtype=BF16).as_strided((1, 2, 1, 64), (0, n, n, 1))
        for n in (2**25 - 8, 2**25)
    )
    assert flash.all_loadable(far, near, far, "sm_80") == (True, True, False)


# --- integrations


def test_choice(arch: str) -> None:
    """A recipe of 8 bits is left for 16 bits, and the reason says so; gradients change nothing."""
    q, k, v = tensors()
    chosen = dispatch.choose(q, k, v, precision="bf16", backend="sm80")
    assert chosen == (
        forward16_sm80_config(128, 128, "bf16", arch=arch, group=4, seqlen_q=300).name,
        "bf16",
        None,
    )
    chosen = dispatch.choose(q, k, v, precision="accurate", backend="sm80")
    assert "sm80" in chosen.kernel and chosen.precision == "bf16"
    assert chosen.reason is not None and chosen.reason.startswith("the 8-bit kernels need a Hopper GPU")
    if arch != "sm_90a":
        assert dispatch.choose(q, k, v, precision="accurate") == chosen
    chosen = dispatch.choose(q.requires_grad_(), k, v, precision="bf16", backend="sm80")
    assert "sm80" in chosen.kernel and chosen.reason is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=str)
def test_is_supported(capability: tuple[int, int]) -> None:
    support = cute_attn.is_supported(window_size=(5, 0), sinks=True, capability=capability)
    assert support and support.reason == "the 16-bit kernel by mma.sync"
    support = cute_attn.is_supported("accurate", capability=capability)
    assert not support and "allowed: compute capability 9.x" in support.reason
    assert cute_attn.is_supported(requires_grad=True, capability=capability)
    assert not cute_attn.is_supported(head_dim=20, capability=capability)


# --- addresses, by the kernel's own code


class HostTile(tile_module.Tile):
    """Traced functions as they stand: numbers in, numbers out."""

    at = tile_module.Tile.at.__wrapped__
    target = tile_module.Tile.target.__wrapped__
    a_address = tile_module.Tile.a_address.__wrapped__
    b_address = tile_module.Tile.b_address.__wrapped__
    b_transposed_address = tile_module.Tile.b_transposed_address.__wrapped__


BASE = 5 * 128  # of a tile in shared memory


def places(tile: HostTile) -> dict[int, tuple[int, int]]:
    """(row, piece of 16 bytes) by address, as the threads' copies put them there."""
    found = {}
    for tid, i, block in itertools.product(
        range(tile.pieces * tile.pass_rows), range(tile.passes), range(tile.blocks)
    ):
        address = tile.target(BASE, tid) + i * tile.pass_bytes + block * tile.block_bytes
        assert address not in found
        found[address] = (i * tile.pass_rows + tid // tile.pieces, block * tile.pieces + tid % tile.pieces)
    return found


@pytest.mark.parametrize(
    ("rows", "threads"), [(128, 128), (64, 128), (96, 128), (128, 256), (64, 256), (32, 128)]
)
@pytest.mark.parametrize("columns", [32, 40, 64, 72, 96, 128, 136, 256])
def test_addresses(columns: int, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies fill the tile once; ldmatrix and the stores of O find what the mma's fragments want, without conflicts."""
    for name in ("load_matrices", "load_matrices_transposed"):
        monkeypatch.setattr(tile_module, name, lambda address: address)
    tile = HostTile(rows, columns, threads)
    if rows % tile.pass_rows:
        pytest.skip("no tile: a pass has more rows")
    found = places(tile)
    assert len(found) * 16 == tile.bytes and (min(found), max(found)) == (BASE, BASE + tile.bytes - 16)
    steps = range(-(-columns // 16))
    for row, step in itertools.product(range(0, rows, 16), steps):
        banks: list[set[int]] = [set() for _ in range(4)]
        for lane in range(32):
            a = tile.load_a(tile.near(tile.a_address(BASE, row, lane)), step)
            assert found[a] == (row + lane % 16, 2 * step + lane // 16)
            b = tile.load_b(tile.near(tile.b_address(BASE, lane)), step, row)
            assert found[b] == (row + lane // 16 * 8 + lane % 8, 2 * step + lane // 8 % 2)
            t = tile.load_b_transposed(tile.near(tile.b_transposed_address(BASE, lane)), step, row)
            assert found[t] == (row + lane % 16, 2 * step + lane // 16)
            banks[lane // 8].add(b // 16 % 8)
        assert all(len(each) == 8 for each in banks)  # eight rows of a matrix in eight groups of banks
        for lane, h in itertools.product(range(32), (0, 1)):  # O, two columns a lane, as `finish` stores it
            own = BASE + tile.at(row + lane // 4, 0) + lane % 4 * 4 + 8 * h * tile.line_bytes
            for n in range(columns // 8):
                o = (own ^ (16 * (n % tile.pieces))) + n // tile.pieces * tile.block_bytes
                assert found[o // 16 * 16] == (row + 8 * h + lane // 4, n) and o % 16 == 4 * (lane % 4)


# --- compiled code

TILE = ("tile_m", "tile_n", "warps", "kv_stages", "q_in_regs", "ctas")
EVERY_TILE = fullest(plan_sm80.forward16_sm80_config, TILE, ("softcap", "alibi", "sinks", "varlen"))
SAMPLE = list(dict.fromkeys([*plan_sm80.all_forward16_sm80_configs(), *EVERY_TILE]))


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[Fwd16Sm80Config], KernelFigures]]:
    with figures_of(SAMPLE) as result:
        yield result


@pytest.mark.parametrize("config", SAMPLE, ids=lambda config: config.name)
def test_compiled_kernel(
    config: Fwd16Sm80Config, figures: Callable[[Fwd16Sm80Config], KernelFigures]
) -> None:
    found = figures(config)
    assert found.name == config.name
    no_spills(found)
    # The masked loop, the plain one, and at a window's left end the masked one again.
    loops = 2 + config.window
    qk = config.k_steps * config.tile_n // 8
    pv = config.n_tiles * config.tile_n // 16
    assert found.counts["HMMA"] == loops * config.m_tiles * (qk + pv)
    assert found.counts["LDGSTS"] > 0 and found.counts["HGMMA"] == found.counts["UTMALDG"] == 0
    q = config.m_tiles * (config.k_steps - config.q_in_regs)  # read in each step, the others once
    k_and_v = config.k_steps * config.tile_n // 16 + -(-config.n_tiles // 2) * config.tile_n // 16
    assert found.counts["LDSM"] == loops * (q + k_and_v) + config.m_tiles * config.q_in_regs
    assert found.registers * config.threads * config.ctas <= 65536
    assert found.smem_bytes == config.smem_bytes <= SM80_ARCHS[config.arch].cta_smem_bytes
