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
        self._shape = batch, rows, heads, head_dim_v
        self._out: Tensor | None = None  # until a part has come
        self.lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=device)

    @property
    def out(self) -> Tensor:
        if self._out is None:
            self._out = torch.zeros(self._shape, dtype=torch.float32, device=self.lse.device)
        return self._out

    def add(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge a part.

        Args:
            rows: which ones, a slice or their numbers.
            out: (batch, as many rows, heads_q, head_dim_v), any float dtype.
            lse: (batch, heads_q, as many rows) float32.
        """
        if self._out is None and isinstance(rows, slice) and rows == slice(0, self._shape[1]):
            # all rows, and nothing yet to weigh them against: a third of the traffic
            self._out, self.lse = out.float(), lse.clone()
            return
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
        self.out.mul_(share.transpose(1, 2).unsqueeze(3))
        self.lse = total
