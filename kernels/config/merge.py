"""What the kernel that merges parts of attention is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from .common import HEAD_DIMS_16BIT


@dataclass(frozen=True)
class MergeConfig:
    """One compiled kernel that merges attention over some keys with attention over others (any/merge.py)."""

    head_dim_v: int
    dtype: str  # "bf16" or "fp16": of the part that comes in, and of what is not wide
    wide_before: bool  # what was merged before is float32
    wide_out: bool  # and so is the result

    @property
    def head_dim(self) -> int:
        """For what asks any configuration for it: there is no K here."""
        return self.head_dim_v

    @property
    def name(self) -> str:
        before, out = ("fp32" if wide else self.dtype for wide in (self.wide_before, self.wide_out))
        return f"merge_{self.dtype}_to_{before}_gives_{out}_d{self.head_dim_v}"

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built; the message names the limit."""
        if self.head_dim_v not in HEAD_DIMS_16BIT:
            raise ValueError(f"head_dim_v must be a multiple of 8 from 32 to 256, got {self.head_dim_v}")
        if self.dtype not in ("bf16", "fp16"):
            raise ValueError(f"dtype must be 'bf16' or 'fp16', got {self.dtype!r}")
