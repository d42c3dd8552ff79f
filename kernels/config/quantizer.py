"""The quantiser, and the transpose of a V that is e4m3 already."""

from __future__ import annotations

from dataclasses import dataclass

from .common import HEAD_DIMS, dims_name


@dataclass(frozen=True)
class QuantizeConfig:
    """One compiled quantiser: 16-bit (or, for V alone, ready e4m3) tensors to the forward's operands."""

    head_dim: int  # of Q and K, see HEAD_DIMS
    head_dim_v: int  # of V
    in_dtype: str  # "bf16", "fp16"; "e4m3" only transposes V
    qk_dtype: str  # "e4m3" or "int8"
    q_mode: str  # "token", "block" (128 rows) or "static" (amax given)
    k_mode: str  # "block64", "block128" or "static"
    v_mode: str  # "block" (256 keys) or "static"
    rotate: bool  # random signs and Hadamard transform of Q and K
    smooth: bool  # subtract the mean key from every key of a head, and leave q . mean
    # rotary position embedding of Q and K: "none", "half" (pairs i, i + rotary_dim / 2), "interleaved"
    rotary: str = "none"
    varlen: bool = False  # sequences of unlike length, their rows behind one another
    narrow: bool = False  # e4m3 codes of Q and K end at `narrow_max`

    @property
    def name(self) -> str:
        if self.in_dtype == "e4m3":
            return f"transpose_v_d{self.head_dim_v}"
        dims = dims_name(self.head_dim, self.head_dim_v)
        steps = ("_rot" if self.rotate else "") + ("_smooth" if self.smooth else "")
        steps += "" if self.rotary == "none" else f"_rotary_{self.rotary}"
        steps += "_varlen" if self.varlen else ""
        return (
            f"quantize_{self.in_dtype}_{self.qk_dtype}{'_narrow' if self.narrow else ''}_{dims}"
            f"_q{self.q_mode}_k{self.k_mode}_v{self.v_mode}{steps}"
        )

    def check(self) -> None:
        """Raise ValueError where the configuration cannot be built."""
        for field, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if size not in HEAD_DIMS:
                raise ValueError(f"{field} must be a multiple of 16 from 32 to 256, got {size}")
        for field, value, allowed in (
            ("in_dtype", self.in_dtype, ("bf16", "fp16", "e4m3")),
            ("qk_dtype", self.qk_dtype, ("e4m3", "int8")),
            ("q_mode", self.q_mode, ("token", "block", "static")),
            ("k_mode", self.k_mode, ("block64", "block128", "static")),
            ("v_mode", self.v_mode, ("block", "static")),
            ("rotary", self.rotary, ("none", "half", "interleaved")),
        ):
            if value not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {value!r}")
        if self.narrow and self.qk_dtype != "e4m3":
            raise ValueError(f"narrow must be False with qk_dtype {self.qk_dtype!r}")
        if self.varlen:
            for field, value in (("q_mode", self.q_mode), ("k_mode", self.k_mode), ("v_mode", self.v_mode)):
                if value == "static":
                    raise ValueError(f"{field} must not be 'static' with varlen: there is no given amax")
            if self.rotary != "none":
                raise ValueError(f"rotary must be 'none' with varlen, got {self.rotary!r}")
