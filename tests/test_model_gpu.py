"""One model, as a user has it, on the kernels of Hopper and on those by mma.sync: the same code, the same tolerance."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_attn import sdpa_region
from cute_attn.bench.accuracy import error_metrics

WIDTH, HEADS, HEADS_K, HEAD_DIM, TOKENS = 256, 4, 2, 64, 300


class Block(nn.Module):
    """Attention with grouped heads and a rotary embedding, then a gated MLP; it knows torch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, HEADS_K, HEADS_K), dim=1)
        frequency = 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=x.device)
        phase = torch.arange(x.shape[1], device=x.device)[:, None] * frequency
        turn = torch.polar(torch.ones_like(phase), phase)

        def rotated(part: Tensor) -> Tensor:
            pairs = torch.view_as_complex(part.float().unflatten(3, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(3).to(part.dtype)

        found = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norms[1](x)).chunk(2, dim=2)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    """Logits of the next of 100 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100, bias=False)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def trained(model: Model, tokens: Tensor) -> list[Tensor]:
    """Logits, and the gradients of all weights."""
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten())
    return [logits.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.gpu
def test_a_model_runs_unchanged_on_both_paths() -> None:
    exact = Model().cuda()
    with torch.no_grad():
        for weight in exact.parameters():
            weight.copy_(weight.bfloat16())  # what both precisions hold
    model = copy.deepcopy(exact).bfloat16()
    tokens = torch.randint(100, (3, TOKENS + 1), device="cuda")
    with sdpa_kernel(SDPBackend.MATH):
        want = trained(exact.double(), tokens)
        rough = trained(model, tokens)  # torch's own, in 16 bits
    names = ["logits", *(name for name, _ in model.named_parameters())]
    for backend, kernel in (("sm90", "fwd_sm90_"), ("sm80", "fwd_sm80_")):
        with sdpa_region(backend=backend, fallback="error") as log:
            got = trained(model, tokens)
        assert log.total == 2 and not log.fallbacks and all(kernel in name for name in log.kernels), str(log)
        for name, mine, torchs, truth in zip(names, got, rough, want, strict=True):
            error, allowed = (error_metrics(x, truth)["rel_rmse"] for x in (mine, torchs))
            assert math.isfinite(error) and error <= 1.5 * allowed, (
                f"{backend} {name}: {error}, torch {allowed}"
            )
