"""Train a small transformer on one long sequence whose rows are on several ranks.

    torchrun --nproc-per-node 2 examples/train_ring.py

A process for each GPU (NCCL; Hopper GPUs run the kernels), or on CPUs (gloo, attention in plain torch). The parameters
are on every rank, and each rank has the gradients of its rows: they are added up, as data parallelism does. `--recipe
accurate` attends in 8 bits. The losses are those of one process, to rounding.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cute_attn.distributed import Sharding, ring_attention

VOCABULARY, WIDTH, HEADS, HEADS_K, HEAD_DIM, LAYERS = 64, 128, 4, 2, 32, 2


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of x (batch, rows, heads, head_dim)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * rates).unsqueeze(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


class Block(nn.Module):
    """Attention over all ranks, then a perceptron of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self, x: Tensor, positions: Tensor, sharding: Sharding, recipe: str | None, backend: str
    ) -> Tensor:
        """x: (batch, rows of this rank, WIDTH)."""
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, HEADS_K, HEADS_K], dim=2)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        q, k, v = (y.to(torch.bfloat16) for y in (q, k, v))
        attended = ring_attention(q, k, v, sharding, causal=True, recipe=recipe, backend=backend)
        assert isinstance(attended, Tensor)
        x = x + self.out(attended.flatten(2).to(x.dtype))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Next token from all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, *options: object) -> Tensor:
        """ids: (batch, rows of this rank); logits of each."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, positions, *options)
        return self.head(self.norm(x))


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seqlen", type=int, default=2048, help="of the whole sequence (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="default %(default)s")
    parser.add_argument("--recipe", help="attend in 8 bits by this recipe (default: 16 bits)")
    options = parser.parse_args(argv)

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if hopper else torch.device("cpu")
    if hopper:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if hopper else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = "auto" if hopper else "reference" if options.recipe is None else "emulator"

    torch.manual_seed(0)  # the same parameters and tokens on every rank
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pattern = torch.randint(VOCABULARY, (97,))  # a model that looks back 97 tokens knows the next one
    tokens = pattern.repeat(options.seqlen // 97 + 2)[: options.seqlen + 1].unsqueeze(0).to(device)

    sharding = Sharding(options.seqlen, world)
    ids, targets = (sharding.shard(x, rank) for x in (tokens[:, :-1], tokens[:, 1:]))
    positions = sharding.positions(rank, device)
    losses = []
    for step in range(options.steps):
        logits = model(ids, positions, sharding, options.recipe, backend)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / options.seqlen
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        for x in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(x)
        optimizer.step()
        losses.append(float(total))
        if rank == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
