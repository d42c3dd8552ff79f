"""Public functions: check, agree, heads for rows, ring, rows for heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cute_attn import flash, validate
from cute_attn.distributed.exchange import heads_for_rows, rows_for_heads
from cute_attn.distributed.groups import Group, agree, group_of, groups_of
from cute_attn.distributed.ring import RingProblem, attend
from cute_attn.distributed.schedule import Mask
from cute_attn.distributed.sharding import Sharding
from cute_attn.problem import device_capability
from cute_attn.quantize import V_BLOCK, Fp8Recipe, resolve_recipe
from cute_attn.tracing import untraced

__all__ = ["mesh_attention", "ring_attention", "ulysses_attention"]


@untraced
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    *,
    group: Group = None,
    sharding_k: Sharding | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    recipe: str | Fp8Recipe | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences whose rows are on several ranks, keys going from rank to rank.

    Ring attention (arXiv 2310.01889): each rank attends with its rows to the keys of every rank in turn, while those of
    the next come in; parts are merged in float32 by their log-sum-exp. Out and lse are differentiable, once. Memory of
    a rank is linear in its own rows. Collective: all ranks call it with the same options, and so they do with the
    backward.

    Args:
        q: (batch, sharding.length(rank), heads_q, head_dim) float16 or bfloat16, the rows of this rank, as
            `sharding.shard` gives them; (rows, heads_q, head_dim) likewise is one batch, of several sequences as a
            rule. heads, head_dim and strides as in `flash_attn_func`, with a recipe as in `fp8_attention`.
        k: (batch, rows, heads_k, head_dim); v: (batch, rows, heads_k, head_dim_v), likewise.
        sharding: which rows are where; its `ring` is the size of the group, its `ulysses` 1.
        group: process group, or DeviceMesh of one dimension; default all ranks.
        sharding_k: that of k and v, of as many sequences and ranks; default `sharding`.
        causal, window_size: over whole sequences, as in `flash_attn_func`. A rank whose keys another does not see does
            not send them to it: with windows take the sharding order "contiguous".
        softmax_scale, softcap: as there.
        sinks: (heads_q,) float32, alike on all ranks, as there. Their gradient is that of this rank's rows, to be
            added up over ranks with those of other parameters.
        deterministic: gradients are the same, bit for bit, in every run.
        recipe: name of a recipe or `Fp8Recipe`: K and V are quantised once, where they are, and go round in 8 bits with
            their scales. It has scales of tokens and blocks, and sharding.multiple is a multiple of 256. The backward
            is that of 16 bits, as in `fp8_attention`. Default: 16 bits.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: of each rank, and of its backward, as in `flash_attn_func`; with a recipe as in `fp8_attention`, whose
            emulator has the backward in plain PyTorch.

    Returns:
        out (batch, rows, heads_q, head_dim_v) of q's dtype; with `return_lse` also lse (batch, heads_q, rows) float32,
        natural log; without a batch where q has none. A row that sees no key has out 0 and lse -inf, or its sink.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, device, group or value that is not allowed, or one that differs between ranks: on every
            rank, at the first call with such arguments.
        NotImplementedError: a recipe with scales of a whole tensor or head.
        RuntimeError: of torch.distributed, within the timeout of the group: a rank has died or does not take part.
    """
    rings = group_of(group)
    return _run(
        q,
        k,
        v,
        sharding,
        sharding_k,
        (rings, None),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        recipe=recipe,
        return_lse=return_lse,
        backend=backend,
    )


@untraced
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    *,
    group: Group = None,
    sharding_k: Sharding | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    recipe: str | Fp8Recipe | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences whose rows are on several ranks, by exchanging heads for rows.

    Ulysses (arXiv 2309.14509): one all-to-all gives each rank all rows of some heads, it attends as on one GPU, and a
    second one gives the rows back. Results are, bit for bit, those of one GPU with those heads alone; sinks
    are merged in float32 afterwards. K and V are exchanged in 16 bits, also with a recipe.

    Args:
        q, k, v, sharding_k, causal, softmax_scale, window_size, softcap, sinks, deterministic, recipe, return_lse,
            backend: as in `ring_attention`; heads_q and heads_k are multiples of the ranks.
        sharding: its `ulysses` is the size of the group, its `ring` 1.
        group: process group, or DeviceMesh of one dimension; default all ranks.

    Returns, Raises: as `ring_attention`.
    """
    return _run(
        q,
        k,
        v,
        sharding,
        sharding_k,
        (None, group_of(group)),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        recipe=recipe,
        return_lse=return_lse,
        backend=backend,
    )


@untraced
def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    mesh: DeviceMesh,
    *,
    sharding_k: Sharding | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    recipe: str | Fp8Recipe | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Rings of ranks that exchange heads for rows among themselves (USP, arXiv 2405.07719).

    Heads and rows change places inside a Ulysses group, and rings pass keys of those heads: a ring between machines,
    say, and Ulysses inside each, whose size the heads bound.

    Args:
        q, k, v, sharding_k, causal, softmax_scale, window_size, softcap, sinks, deterministic, recipe, return_lse,
            backend: as in `ring_attention`; heads_q and heads_k are multiples of sharding.ulysses.
        sharding: sharding.ring * sharding.ulysses ranks.
        mesh: DeviceMesh of two dimensions, (ring, ulysses), neighbours in the last one.

    Returns, Raises: as `ring_attention`.
    """
    rings, heads = groups_of(mesh)
    return _run(
        q,
        k,
        v,
        sharding,
        sharding_k,
        (rings, heads),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        recipe=recipe,
        return_lse=return_lse,
        backend=backend,
    )


_Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]  # ring, Ulysses


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None,
    groups: _Groups,
    *,
    sinks: Tensor | None,
    return_lse: bool,
    **options: object,
) -> Tensor | tuple[Tensor, Tensor]:
    problem = agree(
        tuple(group for group in groups if group is not None),
        lambda: _check(q, k, v, sharding, sharding_k, groups, sinks, options),
    )
    ring, heads = (None if group is None or dist.get_world_size(group) == 1 else group for group in groups)
    packed = q.dim() == 3
    if packed:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    if heads is not None:
        size, part = dist.get_world_size(heads), dist.get_rank(heads)
        first = dist.get_rank(ring) * size if ring is not None else 0
        of_q, of_k = ([s.length(first + u) for u in range(size)] for s in (problem.q, problem.k))
        q, k, v = heads_for_rows(heads, (of_q, of_k, of_k), q, k, v)
        sinks = None if sinks is None else sinks.chunk(size)[part]
    out, lse = attend(q, k, v, sinks, ring, problem)
    if heads is not None:
        (out,) = rows_for_heads(heads, (of_q,), out)
        if return_lse:
            (lse,) = rows_for_heads(heads, (of_q,), lse.transpose(1, 2).unsqueeze(3))
            lse = lse.squeeze(3).transpose(1, 2)
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


# ------------------------------------------------------------------------------------------------------------
# Checks
# ------------------------------------------------------------------------------------------------------------


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None,
    groups: _Groups,
    sinks: Tensor | None,
    options: Mapping[str, object],
) -> tuple[Mapping[str, object], RingProblem]:
    """Check the arguments of this rank; what must be alike on all ranks, by name, and what it comes to."""
    given = {"q": q, "k": k, "v": v}
    packed = isinstance(q, Tensor) and q.dim() == 3
    if packed:
        given = {
            name: x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == 3 else x for name, x in given.items()
        }
    recipe = None if options["recipe"] is None else resolve_recipe(options["recipe"])  # type: ignore[arg-type]
    if recipe is None:
        flash._check_tensors(*given.values())
        flash.target(options["backend"], q)
    else:
        validate.check_inputs(*given.values())
        validate.check_backend(options["backend"], device_capability(q.device))
    shapes = {name: x.shape for name, x in given.items()}
    sharding_k = sharding if sharding_k is None else sharding_k
    _check_sharding("sharding", sharding, groups, shapes["q"], "q")
    _check_sharding("sharding_k", sharding_k, groups, shapes["k"], "k")
    if len(sharding.seqlens) != len(sharding_k.seqlens):
        raise ValueError(
            f"sharding_k has {len(sharding_k.seqlens)} sequences; allowed: those of sharding, "
            f"{len(sharding.seqlens)}"
        )
    ranks = sharding.ulysses
    for name in ("q", "k"):
        if shapes[name][2] % ranks:
            raise ValueError(
                f"{name} has {shapes[name][2]} heads; allowed: a multiple of the {ranks} ranks that exchange them "
                "(fewer of them, and a ring for the rest: mesh_attention)"
            )
    window, softcap = flash._check_options(
        0.0, options["causal"], options["softcap"], options["deterministic"], False, options["window_size"]
    )
    scale = validate.check_softmax_scale(options["softmax_scale"], q.shape[-1])
    validate.check_side_tensors(shapes["q"][0], shapes["q"][2], q.device, None, sinks)
    if recipe is not None:
        _check_recipe(recipe, sharding, sharding_k)
    problem = RingProblem(
        q=sharding,
        k=sharding_k,
        mask=Mask(*window),
        softmax_scale=scale,
        softcap=softcap,
        deterministic=bool(options["deterministic"]),
        recipe=recipe,
        backend=str(options["backend"]),
        backward=str(options["backend"])
        if recipe is None
        else _backward_backend(str(options["backend"]), q.device),
    )
    alike = {
        "dimensions of q": q.dim(),
        "batch": shapes["q"][0],
        "heads of q": shapes["q"][2],
        "heads of k": shapes["k"][2],
        "head_dim of q": shapes["q"][3],
        "head_dim of v": shapes["v"][3],
        "dtype of q": q.dtype,
        "device of q": q.device.type,
        "sharding": sharding,
        "sharding_k": sharding_k,
        "window": problem.mask,
        "softmax_scale": scale,
        "softcap": softcap,
        "sinks": sinks is not None,
        "deterministic": problem.deterministic,
        "recipe": recipe,
        "backend": problem.backend,
    }
    return alike, problem


def _check_sharding(name: str, sharding: object, groups: _Groups, shape: torch.Size, tensor: str) -> None:
    if not isinstance(sharding, Sharding):
        raise TypeError(f"{name} is a {type(sharding).__name__}; allowed: a Sharding")
    sizes = [1 if group is None else dist.get_world_size(group) for group in groups]
    for field, size in zip(("ring", "ulysses"), sizes, strict=True):
        if getattr(sharding, field) != size:
            raise ValueError(
                f"{name}.{field} is {getattr(sharding, field)}; allowed: the size of its group, {size}"
            )
    ring, part = (0 if group is None else dist.get_rank(group) for group in groups)
    rank = ring * sizes[1] + part
    if shape[1] != sharding.length(rank):
        raise ValueError(
            f"{tensor} has {shape[1]} rows on rank {rank}; allowed: {name}.length({rank}), {sharding.length(rank)}"
        )


def _check_recipe(recipe: Fp8Recipe, *shardings: Sharding) -> None:
    modes = {"q_scale": recipe.q_scale, "k_scale": recipe.k_scale, "v_scale": recipe.v_scale}
    for name, mode in modes.items():
        if mode in ("tensor", "head"):
            raise NotImplementedError(
                f"recipe {recipe.name!r} has {name} {mode!r}, and no rank has a whole tensor or head; allowed: scales "
                "of tokens and blocks"
            )
    for sharding in shardings:
        if sharding.multiple % V_BLOCK:
            raise ValueError(
                f"multiple of a sharding is {sharding.multiple}; allowed with a recipe: multiples of {V_BLOCK}, so "
                "that no block of a scale straddles ranks"
            )


def _backward_backend(backend: str, device: torch.device) -> str:
    """Backend of the 16-bit backward of what `backend` computes with a recipe."""
    capability = device_capability(device)
    hopper = capability is not None and capability[0] == 9
    return "sm90" if hopper and backend != "emulator" else "reference"
