"""How far the 8-bit forward may be from float64, and from the emulator: what rounding P allows.

lse is that of the sum of rounded P. Key j of weight w_j (the softmax, sum 1) adds w_j e_j to the relative error of the
sum, and e_j, of P's rounding, has mean 0 and a deviation of 0.032 by code, 0.027 by exp2 and a conversion. So the
deviation of lse is 0.032 sqrt(sum of w_j^2): it shrinks as 1 / sqrt(keys), and is that of one key where a few keys have
the weight. With r_j the scores, the sum of w_j^2 is exp(lse of 2 r - 2 lse of r). (Keys of equal scores share an e: the
bound is not for hundreds of them.)

The emulator rounds the same P. What a kernel adds are ties: the tensor core sums e4m3 products to about 14 bits, which
moves a score by hundredths of a code, and so one key in a hundred to the next code. Products of int8 are exact. So the
largest error of a few rows is no bound for that of the same rows elsewhere; what a row's own weights allow is. The rms
error of many rows is nearly that of the emulator, that of a few rows is not.

Scores of e4m3 operands are sums in float16, times units in float16, but for softcap and ALiBi: each is rounded by
2^-11 of itself, and lse, which is near the largest score of a row, by as much of its own size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_attn import QuantizedQKV
from cute_attn.flash import reference

P_DEVIATION = 0.032
DEVIATIONS = 6.0  # of a row at most, of thousands
REST = 2e-3  # what scores and the sum on the tensor core add
# Root mean square of what a kernel may differ from the emulator by, in deviations of lse; of one row `OF_ONE` more.
TIES = {"int8": 0.1, "e4m3": 0.5}
OF_ONE = 2.0
SCORE = 2.0**-10  # of lse, where scores are summed in float16


def error_ratio(qk_dtype: str, rows: int) -> float:
    """Rms error of the output over `rows` rows, at most, relative to the emulator's."""
    return 1.1 if qk_dtype == "int8" else 1.1 + rows**-0.5


def check_lse(
    lse: Tensor,
    emulated: Tensor,
    exact: Tensor,
    doubled: Tensor,
    qk_dtype: str,
    where: str,
    keys: int = 0,
    half: bool = False,
) -> None:
    """Every row against its own bound, and all together against the emulator.

    Args:
        lse: of the kernel; emulated: of the emulator; exact: float64; all (batch, heads_q, seqlen_q).
        doubled: float64 lse of twice the scores, without sinks; -inf for a row without keys.
        qk_dtype: "int8" or "e4m3".
        where: for the message.
        keys: of a row, where they are so many that what rounds to 0 counts: about 2^-13 of the largest weight each.
        half: scores are summed in float16.
    """
    seen = doubled != -torch.inf
    if not bool(seen.any()):
        return
    deviation = deviation_of(exact[seen], doubled[seen])  # times 1 / P_DEVIATION, at least the largest weight
    allowed = DEVIATIONS * deviation + REST + keys * 2.0**-13 * deviation / P_DEVIATION
    if half:
        allowed = allowed + SCORE * exact[seen].abs()
    error = (lse.double() - exact)[seen]
    worst = int((error.abs() - allowed).argmax())
    at = seen.nonzero()[worst].tolist()
    assert bool((error.abs() <= allowed).all()), (
        f"{where}: lse is off by {error[worst]:.3e}, {allowed[worst]:.3e} allowed, at (batch, head, row) {at}"
    )
    check_agreement(lse, emulated, exact, doubled, qk_dtype, where)


def deviation_of(exact: Tensor, doubled: Tensor) -> Tensor:
    return P_DEVIATION * torch.exp(doubled / 2 - exact)


def check_agreement(
    lse: Tensor, emulated: Tensor, exact: Tensor, doubled: Tensor, qk_dtype: str, where: str
) -> None:
    """All rows together against the emulator, also where hundreds of keys have equal scores. Args as `check_lse`."""
    seen = doubled != -torch.inf
    ties = ((lse.double() - emulated.double())[seen].abs() - REST).clamp(min=0.0)
    ties = ties / deviation_of(exact[seen], doubled[seen])
    found, limit = ties.square().mean().sqrt().item(), TIES[qk_dtype] + OF_ONE / ties.numel() ** 0.5
    assert found <= limit, (
        f"{where}: lse differs from the emulator's by {found:.2f} deviations, {limit:.2f} allowed"
    )


def exact_attention(qkv: QuantizedQKV, **options: Any) -> tuple[Tensor, Tensor]:
    """Float64 (out, lse) on what the operands stand for, with the share of the mean key in every score."""
    q, k, v = qkv.dequantize()
    options.setdefault("softmax_scale", q.shape[3] ** -0.5)
    if qkv.q_dot_mean is not None:
        q = torch.cat([q, qkv.q_dot_mean.double().transpose(1, 2).unsqueeze(-1)], dim=3)
        k = torch.cat([k, torch.ones_like(k[..., :1])], dim=3)
    return reference(q, k, v, dtype=torch.float64, **options)


def doubled_lse(qkv: QuantizedQKV, options: dict[str, Any]) -> Tensor:
    """Float64 lse of twice the scores that `exact_attention` has with `options`, without sinks."""
    twice = {name: value for name, value in options.items() if name != "sinks"}
    twice["softmax_scale"] = options.get("softmax_scale", qkv.q.shape[3] ** -0.5)
    for name in ("softmax_scale", "softcap", "alibi_slopes"):  # 2 c tanh(2 x / 2 c) is twice c tanh(x / c)
        if twice.get(name) is not None:
            twice[name] = 2 * twice[name]
    return exact_attention(qkv, **twice)[1]
