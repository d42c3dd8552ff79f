"""Tiles of the 16-bit backward of mma.sync: which kernel serves a problem on which GPU. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

from cute_attn.kernels.config import SM80_ARCHS, Bwd16Sm80Config

__all__ = ["all_backward16_sm80_configs", "backward16_sm80_config"]


class _Tile(NamedTuple):
    columns: int  # of the wider of the head dimensions at most, on the chip
    tile_m: int
    tile_n: int
    warps: int
    plain: bool = False  # not with softcap or ALiBi, whose values beside twice the scores would not fit
    # Likewise: whether also with a window, and of softcap, ALiBi and sequences of unlike length how many together
    window: bool = True
    most: int = 3


# The first that fits serves: the largest whose dK and dV fill no more than half the registers of an SM.
_TILES: Final = (
    _Tile(64, 128, 128, 8, plain=True),
    _Tile(128, 64, 128, 8, window=False, most=1),
    _Tile(256, 64, 64, 8),
)
_TILES_99_KB: Final = (
    _Tile(64, 64, 128, 8),
    _Tile(160, 64, 64, 8),
    _Tile(192, 32, 64, 8),
    _Tile(256, 32, 32, 4),
)
# (q_stages, do_stages), the fastest first
_STAGES: Final = ((2, 2), (2, 1), (1, 1))


def backward16_sm80_config(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    arch: str,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    deterministic: bool = False,
    varlen: bool = False,
) -> Bwd16Sm80Config:
    """The 16-bit backward of mma.sync for these properties of a problem.

    Args:
        head_dim, head_dim_v: multiples of 8 from 32 to 256.
        dtype: "bf16" or "fp16".
        arch: what it is compiled for, a key of `SM80_ARCHS`.
        causal, window, softcap, alibi, deterministic, varlen: as in `Bwd16Sm80Config`; causal and window exclude
            each other.

    Raises:
        ValueError: a head_dim, dtype or arch for which there is no kernel.
    """
    if arch not in SM80_ARCHS:
        raise ValueError(f"arch must be one of {tuple(SM80_ARCHS)}, got {arch!r}")
    qk_columns, v_columns = (-(-dim // 32) * 32 for dim in (head_dim, head_dim_v))
    columns = min(max(qk_columns, v_columns), 256)  # `check` refuses more
    for tile in _TILES_99_KB if SM80_ARCHS[arch].cta_smem_bytes < 163 << 10 else _TILES:
        shares = (
            _share(tile.tile_m, tile.warps, tile.tile_n),
            _share(tile.tile_n, tile.warps, qk_columns, v_columns),
            _share(tile.tile_m, tile.warps, qk_columns),
        )
        fits = columns <= tile.columns and not (tile.plain and (softcap or alibi))
        fits = fits and window <= tile.window and softcap + alibi + varlen <= tile.most
        if fits and None not in shares:
            break
    config = Bwd16Sm80Config(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        warps=tile.warps,
        s_rows=shares[0] or 0,
        kv_rows=shares[1] or 0,
        dq_rows=shares[2] or 0,
        dtype=dtype,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi=alibi,
        deterministic=deterministic,
        varlen=varlen,
        arch=arch,
    )
    # ptxas for sm_120 has no register left for addresses of a second stage beside three features of the widest heads
    crowded = arch == "sm_120" and columns > 192 and window + softcap + alibi + varlen > 2
    for q_stages, do_stages in _STAGES[-1:] if crowded else _STAGES:
        config = dataclasses.replace(config, q_stages=q_stages, do_stages=do_stages)
        if config.smem_bytes <= SM80_ARCHS[arch].cta_smem_bytes:
            break
    config.check()
    return config


def _share(rows: int, warps: int, *columns: int) -> int | None:
    """Warps along the rows of results with so many columns, which share them in blocks of 16 x 16.

    A warp's part is about square, so that it loads little: first as many along rows as is right for 128 columns.
    """
    for along in (4, 2) if rows == 128 else (2, 4):
        if rows // 16 % along == 0 and all(width // 16 % (warps // along) == 0 for width in columns):
            return along
    return None


def all_backward16_sm80_configs() -> list[Bwd16Sm80Config]:
    """A sample for tests: every tile of the tables, every feature, every target."""
    every = {"window": True, "softcap": True, "alibi": True, "deterministic": True}
    return [
        backward16_sm80_config(64, 64, "bf16", arch="sm_80"),
        backward16_sm80_config(64, 64, "bf16", arch="sm_80", **every),
        backward16_sm80_config(128, 128, "bf16", arch="sm_80", causal=True),
        backward16_sm80_config(128, 128, "fp16", arch="sm_90a", alibi=True, deterministic=True),
        backward16_sm80_config(128, 128, "fp16", arch="sm_90a", **every, varlen=True),
        backward16_sm80_config(256, 256, "bf16", arch="sm_80", **every),
        backward16_sm80_config(40, 64, "fp16", arch="sm_86", causal=True, varlen=True),
        backward16_sm80_config(128, 96, "bf16", arch="sm_89", **every),
        backward16_sm80_config(192, 128, "bf16", arch="sm_86", causal=True),
        backward16_sm80_config(256, 256, "fp16", arch="sm_89", **every),
        backward16_sm80_config(256, 256, "fp16", arch="sm_120", window=True, alibi=True, varlen=True),
    ]
