"""Attention over all keys from attention over parts of them."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_attn.problem import device_capability

__all__ = ["Merged"]


class Merged:
    """Sums of partial outputs, weighted by their shares of the softmax (FlashAttention-2's rescale, by lse).

    With partial (out, lse) and what was merged before: lse' = log(e^lse_before + e^lse), out' = out_before + (out -
    out_before) e^(lse - lse'). A part that a row does not see has lse -inf: its share is exactly 0, or the other's is,
    and nothing is rounded. The sums are float32, but for the first part and the last sum, which are of 16 bits anyway.
    """

    def __init__(self, batch: int, rows: int, heads: int, head_dim_v: int, device: torch.device, parts: int):
        """
        Args:
            parts: how many will come; more where something else is to be merged behind the last.
        """
        self._shape, self._device = (batch, rows, heads, head_dim_v), device
        self._left = parts
        self._sums: tuple[Tensor, Tensor] | None = None  # until a part has come

    def _so_far(self) -> tuple[Tensor, Tensor]:
        if self._sums is None:
            batch, rows, heads, _ = self._shape
            lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=self._device)
            self._sums = torch.zeros(self._shape, dtype=torch.float32, device=self._device), lse
        return self._sums

    @property
    def out(self) -> Tensor:
        """(batch, rows, heads_q, head_dim_v) float32, or of the dtype of the parts where that is all there is to it."""
        return self._so_far()[0]

    @property
    def lse(self) -> Tensor:
        """(batch, heads_q, rows) float32, -inf where a row has seen no key yet."""
        return self._so_far()[1]

    def add(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge a part, which is not the caller's any more.

        Args:
            rows: which ones, a slice or their numbers.
            out: (batch, as many rows, heads_q, head_dim_v) float16 or bfloat16.
            lse: (batch, heads_q, as many rows) float32.
        """
        self._left -= 1
        whole = isinstance(rows, slice) and rows == slice(0, self._shape[1])
        if whole and self._sums is None:  # nothing yet to weigh them against
            self._sums = out, lse
            return
        before, lse_before = self._so_far()
        narrow = self._left <= 0 and (
            whole or before.dtype == out.dtype
        )  # else parts come, or some rows are float32
        dtype = out.dtype if narrow else torch.float32
        target = before
        if before.dtype != dtype:
            target = torch.empty(self._shape, dtype=dtype, device=self._device) if whole else before.float()
            before = before if whole else target
        self._sums = target, lse_before
        if isinstance(rows, slice):
            _merge(before[:, rows], lse_before[..., rows], out, lse, target[:, rows])
        else:
            some, lse_some = before[:, rows], lse_before[..., rows]  # copies
            _merge(some, lse_some, out, lse, some)
            target[:, rows], lse_before[..., rows] = some, lse_some

    def add_sinks(self, sinks: Tensor) -> None:
        """One more logit, (heads_q,), in each row of a head, without a value."""
        out, lse = self._so_far()
        total = torch.logaddexp(lse, sinks.float().unsqueeze(1))
        share = torch.exp(lse - total).masked_fill(total == -torch.inf, 0.0)
        self._sums = out.mul_(share.transpose(1, 2).unsqueeze(3)), total


def _merge(before: Tensor, lse_before: Tensor, part: Tensor, lse: Tensor, out: Tensor) -> None:
    """The sum of two parts into `out`, which may be `before`, and of their lse into lse_before; shapes as in `add`."""
    capability = device_capability(part.device)
    if capability is not None and capability[0] == 9:
        from cute_attn.launch import launch_merge

        launch_merge(before, lse_before, part, lse, out, lse_before)
        return
    total = torch.logaddexp(lse_before, lse)
    share = torch.exp(lse - total).masked_fill(total == -torch.inf, 0.0)
    out.copy_(torch.lerp(before.float(), part.float(), share.transpose(1, 2).unsqueeze(3)))
    lse_before.copy_(total)
