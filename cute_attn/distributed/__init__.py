"""Attention over sequences whose rows are on several ranks of torch.distributed.

Ranks are processes of torchrun, one for each GPU (NCCL), or on CPUs (gloo). `Sharding` says which rows are where,
`ring_attention` passes keys from rank to rank, `ulysses_attention` exchanges heads for rows, and `mesh_attention` does
both. `context_parallel_region` puts the ring in place of torch's `scaled_dot_product_attention`.
"""

from cute_attn.distributed.attention import mesh_attention, ring_attention, ulysses_attention
from cute_attn.distributed.region import context_parallel_region
from cute_attn.distributed.sharding import Piece, Sharding

__all__ = [
    "Piece",
    "Sharding",
    "context_parallel_region",
    "mesh_attention",
    "ring_attention",
    "ulysses_attention",
]
