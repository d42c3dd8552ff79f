"""Attention over all keys from attention over parts of them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Merged"]


class Merged:
    """Sums in float32 of partial outputs, weighted by their shares of the softmax (FlashAttention-2's rescale, by lse).

    With partial (out, lse) and what was merged before: lse' = log(e^lse_before + e^lse), out' = out_before + (out -
    out_before) e^(lse - lse'). A part that a row does not see has lse -inf: its share is exactly 0, or the other's is,
    and nothing is rounded.

    Attributes:
        out: (batch, rows, heads_q, head_dim_v) float32.
        lse: (batch, heads_q, rows) float32, -inf where a row has seen no key yet.
    """

    def __init__(self, batch: int, rows: int, heads: int, head_dim_v: int, device: torch.device):
        self.out = torch.zeros(batch, rows, heads, head_dim_v, dtype=torch.float32, device=device)
        self.lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=device)

    def add(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge a part.

        Args:
            rows: which ones, a slice or their numbers.
            out: (batch, as many rows, heads_q, head_dim_v), any float dtype.
            lse: (batch, heads_q, as many rows) float32.
        """
        before = self.lse[:, :, rows]
        total = torch.logaddexp(before, lse)
        share = torch.exp(lse - total).masked_fill(total == -torch.inf, 0.0)
        share = share.transpose(1, 2).unsqueeze(3)
        if isinstance(rows, slice):
            self.out[:, rows].lerp_(out.float(), share)
        else:
            self.out[:, rows] = torch.lerp(self.out[:, rows], out.float(), share)
        self.lse[:, :, rows] = total

    def add_sinks(self, sinks: Tensor) -> None:
        """One more logit, (heads_q,), in each row of a head, without a value."""
        total = torch.logaddexp(self.lse, sinks.float().unsqueeze(1))
        share = torch.exp(self.lse - total).masked_fill(total == -torch.inf, 0.0)
        self.out *= share.transpose(1, 2).unsqueeze(3)
        self.lse = total
