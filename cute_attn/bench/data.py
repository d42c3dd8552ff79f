"""Inputs of the accuracy report: bundled real Q, K, V, FA3's synthetic outliers, a user's own file.

The bundled file `data/smollm2_135m_qkv.safetensors` holds the attention inputs of four layers of
SmolLM2-135M; `data/README.md` says where they come from and `scripts/capture_qkv.py` makes them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

REAL_LAYERS_PATH = Path(__file__).parent / "data" / "smollm2_135m_qkv.safetensors"

Source = Literal["real", "synthetic", "user"]


@dataclass(frozen=True)
class LayerTensors:
    """Q, K, V of one attention call, with a name for tables.

    Attributes:
        name: label of the input in a report.
        q: (batch, seqlen_q, heads_q, head_dim), bf16 or fp16.
        k: (batch, seqlen_k, heads_k, head_dim), dtype and device of q.
        v: shape, dtype and device of k.
        source: "real" (the bundled layers), "synthetic" or "user"; reports take means within one source.
        causal: whether the causal mask belongs with these tensors; a report may be told to use another.
    """

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    source: Source = "user"
    causal: bool = True


def load_real_layers(device: torch.device | str = "cpu") -> list[LayerTensors]:
    """Load the bundled layers 0, 5, 15 and 29 of SmolLM2-135M.

    Returns:
        One `LayerTensors` a layer, in layer order: q, k and v (1, 2048, 3, 64), bfloat16, after RoPE. They
        come from causal self-attention of a model with 9 query heads on 3 K and V heads; q holds the first
        query head of each group of three (heads 0, 3 and 6), so each head has a K and V head of its own.
    """
    return _load(REAL_LAYERS_PATH, device, name_prefix="smollm2 ", source="real")


def real_layers_provenance() -> dict[str, Any]:
    """Return the provenance of the bundled layers: model, text, versions and checksums."""
    with safe_open(REAL_LAYERS_PATH, framework="pt") as file:
        provenance: dict[str, Any] = json.loads(file.metadata()["provenance"])
    return provenance


def synthetic_outliers(
    batch: int,
    seqlen: int,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> LayerTensors:
    """Draw Q, K, V from N(0, 1) + N(0, 100) * Bernoulli(0.001), the outlier test of the FA3 paper.

    Every entry is standard normal; one in a thousand gets an independent normal term of standard deviation 10
    (arXiv 2407.08608, section 4.3). The numbers are drawn in float32 on the CPU, so a seed means the same
    values on every device. The paper names no mask for this test; the tensors stand for no sequence, so
    theirs is the full one.

    Returns:
        q (batch, seqlen, heads_q, head_dim) and k, v (batch, seqlen, heads_k, head_dim), of `dtype` on
        `device`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        shape = (batch, seqlen, heads, head_dim)
        base = torch.randn(shape, generator=generator)
        outlier = 10.0 * torch.randn(shape, generator=generator)
        chosen = torch.rand(shape, generator=generator) < 0.001
        return (base + outlier * chosen).to(dtype).to(device)

    name = f"synthetic d{head_dim}"
    return LayerTensors(name, draw(heads_q), draw(heads_k), draw(heads_k), source="synthetic", causal=False)


def default_inputs(device: torch.device | str = "cpu") -> list[LayerTensors]:
    """Return the inputs of the default accuracy report: real layers, then outliers of head_dim 64 and 128.

    The synthetic ones have 4096 tokens and 2 heads: rounding errors of V average out over the keys that a row
    attends to, and with fewer keys they hide what scales and rotation of Q and K do.
    """
    synthetic = [synthetic_outliers(1, 4096, 2, 2, head_dim, device=device) for head_dim in (64, 128)]
    return load_real_layers(device) + synthetic


def load_user_tensors(path: str | Path, device: torch.device | str = "cpu") -> list[LayerTensors]:
    """Load a user's own Q, K, V from a safetensors file.

    The file holds either the three tensors `q`, `k`, `v`, or any number of triples `NAME.q`, `NAME.k`,
    `NAME.v` (for instance `layer0.q`). Each is (batch, seqlen, heads, head_dim) in bfloat16 or float16, as
    the attention function takes it, so after RoPE; head_dim of v may be another than that of q and k.

    Returns:
        One `LayerTensors` a triple, in natural order of the names (layer2 before layer10); a plain triple is
        named after the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, a tensor of a triple is missing, a tensor has another name,
            or rank, shape, dtype or values do not fit together. The message names the tensor.
    """
    return _load(Path(path), device, name_prefix="", source="user")


def _load(path: Path, device: torch.device | str, *, name_prefix: str, source: Source) -> list[LayerTensors]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error

    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".")
        if part not in ("q", "k", "v"):
            raise ValueError(
                f"{path}: tensor {key!r} is not understood; "
                "tensors must be named q, k, v or NAME.q, NAME.k, NAME.v"
            )
        groups.setdefault(name, {})[part] = tensor
    if not groups:
        raise ValueError(f"{path} holds no tensors; expected q, k, v or NAME.q, NAME.k, NAME.v")

    layers = []
    for name in sorted(groups, key=_natural_order):
        group = groups[name]
        dot = f"{name}." if name else ""
        if missing := [part for part in "qkv" if part not in group]:
            raise ValueError(
                f"{path}: {', '.join(dot + part for part in missing)} is missing beside {dot}{min(group)}"
            )
        _check_triple(path, dot, group["q"], group["k"], group["v"])
        layers.append(
            LayerTensors(name_prefix + (name or path.stem), group["q"], group["k"], group["v"], source)
        )
    return layers


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that compares runs of digits as numbers."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part
    ]


def _check_triple(path: Path, dot: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors that cannot be one attention call; `dot` is the common prefix of their names."""
    for part, tensor in (("q", q), ("k", k), ("v", v)):
        label = f"{path}: {dot}{part}"
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{label} is {tensor.dtype}; allowed are torch.bfloat16 and torch.float16")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{label} is {tensor.dtype} but {dot}q is {q.dtype}; they must be the same")
        if tensor.ndim != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{label} has shape {tuple(tensor.shape)}; "
                "expected (batch, seqlen, heads, head_dim), none of them 0"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{label} holds NaN or infinity; the error of attention on it is not defined")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{path}: {dot}k has shape {tuple(k.shape)} but {dot}v {tuple(v.shape)}; all but head_dim must "
            "be the same"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{path}: {dot}q has shape {tuple(q.shape)} but {dot}k {tuple(k.shape)}; "
            "batch and head_dim must be the same"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{path}: {dot}q has {q.shape[2]} heads, {dot}k {k.shape[2]}; "
            "heads of q must be a multiple of heads of k"
        )
