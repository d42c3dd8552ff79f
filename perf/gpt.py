"""A GPT of blocks whose attention is exchangeable, for perf/train_blocks.py and perf/train_chars.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_attn
from cute_attn.quantize import resolve_recipe

# Causal attention of q, k, v (batch, seqlen, heads, head_dim) in 16 bits, to a tensor of the shape of q.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
PROVIDERS = ("cute_attn", "cute_attn fp8", "sdpa", *_SDPA)


def attention(provider: str, device: str) -> Attend:
    """Attention by name: "cute_attn" is `flash_attn_func`, "cute_attn fp8" is `fp8_attention` by its default recipe,
    "sdpa" torch's own choice and "sdpa_..." one of its backends. Without a GPU the definitions stand in for kernels."""
    gpu = device.startswith("cuda")
    if provider == "cute_attn":
        return lambda q, k, v: cute_attn.flash_attn_func(
            q, k, v, causal=True, backend="sm90" if gpu else "reference"
        )
    if provider == "cute_attn fp8":
        return lambda q, k, v: cute_attn.fp8_attention(
            q, k, v, causal=True, backend="sm90" if gpu else "emulator"
        )

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    if provider == "sdpa" or not gpu:
        return sdpa
    backend = _SDPA[provider]

    def one_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return one_backend


def recipe_of(provider: str) -> str | None:
    """The recipe of an attention of 8 bits; None in 16."""
    return resolve_recipe("default").name if provider == "cute_attn fp8" else None


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); (batch, seqlen, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1))
        found = attend(*(part.to(torch.bfloat16) for part in qkv.unbind(2)))
        x = x + self.out(found.flatten(2).to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class Stack(nn.Module):
    """Blocks behind one another."""

    def __init__(self, layers: int, width: int, heads: int):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        for block in self.blocks:
            x = block(x, attend)
        return x


class CharModel(nn.Module):
    """Next character from up to `seqlen` before it: tokens (batch, seqlen) to logits (batch, seqlen, characters)."""

    def __init__(self, characters: int, seqlen: int, layers: int, width: int, heads: int):
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, width), nn.Embedding(seqlen, width)
        self.stack, self.norm = Stack(layers, width, heads), nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.stack(x, attend)))
