"""The backward of mma.sync without a GPU: its tiles, where its warps load and store, what the compiler makes of it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compiled import figures_of, fullest, no_spills
from numpy.typing import NDArray

from cute_attn.backward_tiles import all_backward16_sm80_configs, backward16_sm80_config
from cute_attn.compile import KernelFigures
from cute_attn.kernels.config import HEAD_DIMS_16BIT, SM80_ARCHS, Bwd16Sm80Config

Array = NDArray[Any]
LANES = np.arange(32)
GROUP, QUAD = LANES // 4, LANES % 4


# ---- tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", SM80_ARCHS)
def test_every_head_dim_has_a_backward(arch: str) -> None:
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS_16BIT, repeat=2):
        for more in ({}, {"softcap": True}):
            config = backward16_sm80_config(
                head_dim, head_dim_v, "bf16", arch=arch, **more
            )  # which checks it
            assert config.arch == arch and config.smem_bytes <= SM80_ARCHS[arch].cta_smem_bytes
            assert config.qk_columns >= head_dim and config.v_columns >= head_dim_v


def test_tiles_are_as_large_as_fits() -> None:
    def sizes(head_dim: int, arch: str, **more: bool) -> tuple[int, ...]:
        config = backward16_sm80_config(head_dim, head_dim, "bf16", arch=arch, **more)
        return config.tile_m, config.tile_n, config.warps, config.q_stages, config.do_stages

    assert sizes(64, "sm_80") == sizes(64, "sm_90a") == (128, 128, 8, 2, 2)
    assert sizes(64, "sm_80", softcap=True) == (64, 128, 8, 2, 2)
    assert sizes(128, "sm_80") == sizes(128, "sm_90a") == (64, 128, 8, 2, 2)
    crowded = sizes(128, "sm_80", softcap=True, varlen=True)
    assert crowded == sizes(128, "sm_90a", window=True) == (64, 64, 8, 2, 2)
    assert sizes(256, "sm_80") == (64, 64, 8, 1, 1)
    assert sizes(256, "sm_90a") == (64, 64, 8, 2, 2)
    assert sizes(128, "sm_86") == sizes(128, "sm_89") == (64, 64, 8, 2, 1)
    assert sizes(256, "sm_86") == (32, 32, 4, 2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 36}, "head_dim must be a multiple of 8"),
        ({"dtype": "fp32"}, "dtype must be one of"),
        ({"arch": "sm_75"}, "arch must be one of"),
        ({"tile_m": 48}, "tile_m must be one of"),
        ({"warps": 6}, "warps must be one of"),
        ({"window": True, "causal": True}, "causal must be False with a window"),
        ({"q_stages": 1}, "do_stages must not exceed q_stages"),
        ({"s_rows": 3}, "s_rows must share 64 rows and 128 columns among 8 warps"),
        ({"kv_rows": 1, "head_dim": 96}, "kv_rows must share 128 rows and 96 and 128 columns"),
        ({"dq_rows": 8}, "dq_rows must share 64 rows"),
        ({"head_dim": 256, "head_dim_v": 256}, "dK and dV take 256 registers a thread"),
        ({"arch": "sm_89"}, "shared memory 164960 bytes exceeds 101376 of sm_89"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], message: str) -> None:
    good = backward16_sm80_config(128, 128, "bf16", arch="sm_90a")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change).check()


def test_arch_must_have_a_table() -> None:
    with pytest.raises(ValueError, match=r"arch must be one of .* got 'sm_75'"):
        backward16_sm80_config(128, 128, "bf16", arch="sm_75")


def test_names_are_unique() -> None:
    configs = all_backward16_sm80_configs()
    good = backward16_sm80_config(128, 128, "bf16", arch="sm_90a")
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": "fp16"},
        {"causal": True},
        {"window": True},
        {"softcap": True},
        {"alibi": True},
        {"deterministic": True},
        {"varlen": True},
        {"do_stages": 1},
        {"s_rows": 4},
        {"kv_rows": 2},
        {"dq_rows": 4},
        {"arch": "sm_80"},
    )
    configs += [dataclasses.replace(good, **change) for change in changes]
    assert len({config.name for config in configs}) == len(configs)


# ---- where warps load and store ----------------------------------------------------------------------------


class Accumulators:
    """A thread's fragments, (4, n, m), of all lanes of a warp."""

    def __init__(self, blocks: tuple[int, int]):
        self.values = np.zeros((4, 2 * blocks[1], blocks[0], 32))

    def __getitem__(self, place: Any) -> Array:
        if isinstance(place, tuple):
            return self.values[:, place[1], place[2]] if place[0] is None else self.values[place]
        columns = self.values.shape[1]
        return self.values[place % 4, place // 4 % columns, place // 4 // columns]


class Emulator:
    """One step of a configuration, the code of bwd_step.py on numpy's integers instead of the device's."""

    def __init__(self, cfg: Bwd16Sm80Config, monkeypatch: pytest.MonkeyPatch):
        from cute_attn.kernels.sm80 import bwd, bwd_step

        self.cfg, self.bwd, self.bwd_step = cfg, bwd, bwd_step
        self.memory = np.full(1 << 17, np.nan)  # one number for two bytes
        self.step = bwd_step.BwdStep(cfg)
        monkeypatch.setattr(bwd_step, "load_matrices", lambda at: self.load(at, False))
        monkeypatch.setattr(bwd_step, "load_matrices_transposed", lambda at: self.load(at, True))
        monkeypatch.setattr(bwd_step, "multiply_add", self.multiply_add)

    def python(self, function: Any) -> Callable[..., Any]:
        """The source of a traced function, run by Python."""
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        lines = ["from __future__ import annotations", *source.split("\n")]
        source = "\n".join(line for line in lines if not line.startswith("@"))
        names = {**vars(self.bwd_step), **vars(self.bwd), "cutlass": SimpleNamespace(range_constexpr=range)}
        exec(source, names)
        return names[function.__name__]  # type: ignore[no-any-return]

    def load(self, address: Any, transposed: bool) -> tuple[Array, ...]:
        """ldmatrix.x4 (PTX ISA): lane l gives the address of row l % 8 of matrix l / 8."""
        address = np.broadcast_to(address, 32)
        assert not (address % 16).any()
        words = []
        for matrix in address.reshape(4, 8):
            assert len(set(matrix // 16 % 8)) == 8, "rows of a matrix share banks"
            rows = np.stack([self.memory[at // 2 : at // 2 + 8] for at in matrix])
            rows = rows.T if transposed else rows
            words.append(rows[GROUP[:, None], 2 * QUAD[:, None] + np.arange(2)])
        return tuple(words)

    @staticmethod
    def multiply_add(c: Array, a: tuple[Array, ...], b0: Array, b1: Array, element: str) -> None:
        """mma.m16n8k16 (PTX ISA)."""
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for e in range(2):
            for word in range(4):
                left[GROUP + word % 2 * 8, 2 * QUAD + word // 2 * 8 + e] = a[word][:, e]
            right[2 * QUAD + e, GROUP], right[2 * QUAD + 8 + e, GROUP] = b0[:, e], b1[:, e]
        result = left @ right
        for i in range(4):
            c[i] += result[GROUP + i // 2 * 8, 2 * QUAD + i % 2]

    def places(self, tile: Any, base: int, rows: int) -> Iterator[tuple[int, int, slice]]:
        """(row, first column, where in memory) of each chunk of a tile."""
        for row, chunk in itertools.product(range(rows), range(tile.columns // 8)):
            start = chunk // tile.group * tile.group
            at = base + tile.chunk(row, chunk - start) + 16 * start
            yield row, 8 * chunk, slice(at // 2, at // 2 + 8)

    def write(self, tile: Any, base: int, x: Array) -> None:
        for row, column, place in self.places(tile, base, len(x)):
            self.memory[place] = x[row, column : column + 8]

    def read(self, tile: Any, base: int, rows: int) -> Array:
        x = np.empty((rows, tile.columns))
        for row, column, place in self.places(tile, base, rows):
            x[row, column : column + 8] = self.memory[place]
        return x

    def store_word(self, address: Array, low: Array, high: Array) -> None:
        assert len(set(address // 4 % 32)) == 32, "words share banks"
        self.memory[address // 2], self.memory[address // 2 + 1] = low, high


SHARES = ((64, 64, "sm_80"), (96, 80, "sm_90a"), (160, 64, "sm_80"), (256, 256, "sm_86"))


@pytest.mark.parametrize("dims", SHARES, ids=str)
def test_products_of_a_step(dims: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every warp loads what it multiplies and stores where it belongs, without bank conflicts."""
    cfg = backward16_sm80_config(*dims[:2], "bf16", arch=dims[2])
    emulator = Emulator(cfg, monkeypatch)
    step = emulator.step
    rng = np.random.default_rng(0)
    q, do, k, v = (
        rng.integers(-3, 4, (rows, tile.columns)).astype(float)
        for rows, tile in (
            (cfg.tile_m, step.qk),
            (cfg.tile_m, step.v),
            (cfg.tile_n, step.qk),
            (cfg.tile_n, step.v),
        )
    )
    sizes = [2 * x.size for x in (k, v, q, do)] + [2 * cfg.tile_m * cfg.tile_n] * 2
    at = SimpleNamespace(
        **dict(zip(("k", "v", "q", "do", "p", "ds"), np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    )
    for tile, base, x in ((step.qk, at.q, q), (step.v, at.do, do), (step.qk, at.k, k), (step.v, at.v, v)):
        emulator.write(tile, base, x)
    lane_of = emulator.python(emulator.bwd_step.BwdStep.lane)
    lanes = [lane_of(step, LANES, warp) for warp in range(cfg.warps)]

    rows, columns = step.s_blocks
    for lane in lanes:
        s, dp = Accumulators(step.s_blocks), Accumulators(step.s_blocks)
        for acc, tile, left, right, depth in (
            (s, step.qk, (at.q, lane.s_q), (at.k, lane.s_k), cfg.qk_columns),
            (dp, step.v, (at.do, lane.s_do), (at.v, lane.s_v), cfg.v_columns),
        ):
            load_a = step.along_rows(tile, *left, rows, cfg.s_rows)
            load_b = step.along_rows(tile, *right, columns, step.s_columns)
            step.product(acc, load_a, load_b, depth // 16)
        for n, m, r in itertools.product(range(2 * columns), range(rows), range(2)):
            query = lane.row + 16 * cfg.s_rows * m + 8 * r
            for e in range(2):  # as `probabilities` places them
                key = lane.key + 16 * step.s_columns * (n // 2) + 8 * (n % 2) + e
                np.testing.assert_array_equal(s[2 * r + e, n, m], (q @ k.T)[query, key])
            for acc, base in ((s, at.p), (dp, at.ds)):
                target = step.score_target(base, lane, n, m) + 8 * r * step.scores.pitch
                emulator.store_word(target, acc[2 * r, n, m], acc[2 * r + 1, n, m])
    p, ds = (emulator.read(step.scores, base, cfg.tile_m) for base in (at.p, at.ds))
    np.testing.assert_array_equal(p, q @ k.T)
    np.testing.assert_array_equal(ds, do @ v.T)

    dq_sum = np.full(cfg.tile_m * cfg.qk_columns, np.nan)
    gradients = []
    for lane in lanes:
        dq, dk, dv = (Accumulators(blocks) for blocks in (step.dq_blocks, step.dk_blocks, step.dv_blocks))
        for acc, tile, blocks, left, right in (
            (dv, step.v, step.dv_blocks, at.p, (at.do, lane.dv_do)),
            (dk, step.qk, step.dk_blocks, at.ds, (at.q, lane.dk_q)),
        ):
            load_a = step.along_columns(step.scores, left, lane.gradient, blocks[0], cfg.kv_rows)
            load_b = step.along_columns(tile, *right, blocks[1], step.kv_columns)
            step.product(acc, load_a, load_b, cfg.tile_m // 16)
        blocks = step.dq_blocks
        load_a = step.along_rows(step.scores, at.ds, lane.dq_ds, blocks[0], cfg.dq_rows)
        load_b = step.along_columns(step.qk, at.k, lane.dq_k, blocks[1], step.dq_columns)
        step.product(dq, load_a, load_b, cfg.tile_n // 16)
        for element in range(cfg.dq_registers):
            dq_sum[lane.dq // 4 + 32 * element] = dq[element]
        gradients.append((dk, dv))
    place = emulator.python(emulator.bwd.BwdSm80Epilogue.place)
    got = np.full((cfg.tile_m, cfg.qk_columns), np.nan)
    for index, i in itertools.product(range(dq_sum.size // 4), range(4)):
        got[place(SimpleNamespace(cfg=cfg), index, i)] = dq_sum[4 * index + i]
    np.testing.assert_array_equal(got, ds @ k)

    leave = emulator.python(emulator.bwd.Bwd16Sm80Main.leave)
    monkeypatch.setitem(leave.__globals__, "store_word", lambda at, word: emulator.store_word(at, *word))
    monkeypatch.setattr(step, "pair", lambda low, high: (low, high), raising=False)
    for warp, of_warp in enumerate(gradients):
        for acc, tile, base in zip(of_warp, (step.qk, step.v), (at.k, at.v), strict=True):
            acc.shape = acc.values.shape  # type: ignore[attr-defined]
            leave(SimpleNamespace(cfg=cfg, step=step), acc, tile, base, LANES, warp)
    np.testing.assert_array_equal(emulator.read(step.qk, at.k, cfg.tile_n), ds.T @ q)
    np.testing.assert_array_equal(emulator.read(step.v, at.v, cfg.tile_n), p.T @ do)


# ---- what the compiler makes of it -------------------------------------------------------------------------

TILE = ("tile_m", "tile_n", "warps", "s_rows", "kv_rows", "dq_rows", "q_stages", "do_stages")
EVERY_TILE = fullest(backward16_sm80_config, TILE, ("softcap", "alibi", "deterministic", "varlen"))
SAMPLE = list(dict.fromkeys([*all_backward16_sm80_configs(), *EVERY_TILE]))


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[Bwd16Sm80Config], KernelFigures]]:
    with figures_of(SAMPLE) as result:
        yield result


@pytest.mark.parametrize("config", SAMPLE, ids=lambda config: config.name)
def test_compiled_kernel(
    config: Bwd16Sm80Config, figures: Callable[[Bwd16Sm80Config], KernelFigures]
) -> None:
    found = figures(config)
    no_spills(found)
    assert found.registers * config.threads <= 65_536
    assert found.smem_bytes == config.smem_bytes
    counts = found.counts
    # The step stands there with masks and without.
    products = config.tile_m * config.tile_n * (3 * config.qk_columns + 2 * config.v_columns)
    assert counts["HMMA"] >= 2 * products // (16 * 8 * 16 * config.warps)
    assert counts["LDGSTS"] > 0 and counts["LDSM"] > 0 and counts["HGMMA"] == 0
