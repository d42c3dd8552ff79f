"""torch's `scaled_dot_product_attention` over sharded sequences: for models that call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cute_attn.dispatch import AttentionLog
from cute_attn.distributed.attention import ring_attention
from cute_attn.distributed.groups import Group, group_of
from cute_attn.distributed.sharding import Sharding
from cute_attn.quantize import Fp8Recipe, resolve_recipe

__all__ = ["context_parallel_region"]


@contextmanager
def context_parallel_region(
    group: Group = None,
    *,
    sharding: Sharding | None = None,
    recipe: str | Fp8Recipe | None = None,
    backend: str = "auto",
) -> Iterator[AttentionLog]:
    """Within it, `torch.nn.functional.scaled_dot_product_attention` is `ring_attention` on the rows of each rank.

    For torch's own context-parallel region, whose sharding of buffers it takes over:

        with context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 0]):
            with cute_attn.distributed.context_parallel_region(mesh) as log:
                model(x)

    torch's function is replaced in its module while the region is open, in all threads, so a model that has imported it
    by name before keeps torch's own. Gradients are those of `ring_attention`; the backward may run outside.

    Args:
        group: process group, or DeviceMesh of one dimension; default all ranks.
        sharding: which rows are where; default what torch's region makes: as many rows on each rank, an even number, in
            the order "zigzag" (which torch calls head-tail).
        recipe, backend: as in `ring_attention`.

    Yields:
        the log of what ran.

    Raises:
        TypeError, ValueError: an argument is not allowed. Inside, what `ring_attention` raises, and NotImplementedError
            for mask tensors and dropout: torch's own function would see the rows of one rank alone.
    """
    process_group = group_of(group)
    named = "" if recipe is None else f", {resolve_recipe(recipe).name}"
    log = AttentionLog()

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise NotImplementedError("attn_mask is given; allowed within context_parallel_region: None")
        if dropout_p != 0.0:
            raise NotImplementedError(
                f"dropout_p is {dropout_p}; allowed within context_parallel_region: 0.0"
            )
        if not enable_gqa and key.shape[1] != query.shape[1]:
            raise ValueError(
                f"key has {key.shape[1]} heads and query {query.shape[1]}; allowed without enable_gqa: as many"
            )
        out = ring_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            _head_tail(query.shape[2], dist.get_world_size(process_group)) if sharding is None else sharding,
            group=process_group,
            causal=is_causal,
            softmax_scale=scale,
            recipe=recipe,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        log.record(f"ring_attention({dist.get_world_size(process_group)} ranks{named})", None)
        return out.transpose(1, 2)

    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend
    try:
        yield log
    finally:
        F.scaled_dot_product_attention = before


def _head_tail(rows: int, world: int) -> Sharding:
    """The sharding of torch's head-tail load balancer: 2 * world chunks of one size."""
    if rows % 2:
        raise ValueError(
            f"query has {rows} rows on a rank; allowed without a sharding: an even number, as torch's context_parallel "
            "makes"
        )
    return Sharding(rows * world, world, multiple=max(rows // 2, 1))
