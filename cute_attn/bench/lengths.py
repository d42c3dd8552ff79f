"""Error of the forward kernel alone by number of keys, on a Hopper GPU, beside its emulator.

A tensor core that keeps one 8-bit accumulator across all keys loses precision as they grow in number; adding
each key tile in FP32 (two-level accumulation, SageAttention2, arXiv 2411.10958) does not. V of mean 0.5 shows
it: the output stays near 0.5, so that its error is that of the sum and not of a random walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_attn.bench import cases, record
from cute_attn.bench.peers import OURS

LENGTHS = (1, 64, 65, 300, 1024, 4096, 32768, 131072, 524288)
SEQLEN_Q = 128
HEADS = 2


def measure(
    recipes: Sequence[str],
    *,
    lengths: Sequence[int] = LENGTHS,
    head_dims: Sequence[int] = cases.HEAD_DIMS,
    v_means: Sequence[float] = (0.0, 0.5),
    backends: Sequence[str] = ("sm90", "emulator"),
    device: torch.device | str = "cuda",
    on_done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Rows of phase "accuracy_kernel", one for each backend, recipe, head_dim, V mean and length, full mask.

    Both backends attend the same quantised tensors: Q (1, 128, 2, head_dim), K and V (1, length, 2,
    head_dim). The error is against float64 attention on the dequantised tensors. A backend that fails gives a
    row with the reason.
    """
    from cute_attn import api

    rows = []
    for recipe in recipes:
        for head_dim in head_dims:
            for length in lengths:
                case = cases.Case(1, SEQLEN_Q, length, HEADS, HEADS, head_dim, False)
                q, k, v = cases.make_inputs(case, torch.bfloat16, device)
                for mean in v_means:
                    qkv = api.quantize(q, k, v + mean, recipe, backend=backends[0])
                    reference = cases.sample(*qkv.dequantize(), causal=False)
                    for backend in backends:
                        row = record.make_row(
                            provider=OURS,
                            backend=backend,
                            phase="accuracy_kernel",
                            dtype="fp8",
                            recipe=qkv.recipe.name,
                            v_mean=mean,
                            **case.fields,
                        )
                        try:
                            row["kernel"] = api.explain(qkv, backend=backend).kernel
                            out = api.fp8_attention_quantized(qkv, backend=backend)
                            error = cases.output_error(out, reference)
                            if error.finite:
                                row.update(rmse=error.rmse, rel_rmse=error.rel_rmse)
                            else:
                                row.update(status="wrong", reason="the output holds NaN or infinity")
                        except (RuntimeError, ValueError, TypeError) as error:
                            row.update(
                                status="failed", reason=" ".join(str(error).split())[:300] or repr(error)
                            )
                        rows.append(row)
                    on_done()
    return rows
