"""Device memory that attention needs, and moves: standard attention, which writes all scores, beside ours.

What is needed is worked out from shapes and, on a Hopper GPU, measured beside: the peak of torch's allocator during a
call, beyond the inputs. What is moved is the model of the FlashAttention paper (arXiv 2205.14135, section 3.2) for one
head of N queries and keys and M bytes of on-chip memory; `cute_attn.reference` runs the same algorithms and counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cute_attn.bench import cases, gradients, record
from cute_attn.bench.cases import Case
from cute_attn.bench.peers import OURS
from cute_attn.bench.report import Grid, Row
from cute_attn.plan16 import backward16_config
from cute_attn.quantize import K_GROUP, V_BLOCK, resolve_recipe
from cute_attn.reference import block_sizes

SEQLENS: Final = tuple(1024 << i for i in range(8))  # 1k to 128k
STANDARD: Final = "standard"
FLASH1, FLASH2, ONCE = "flash", "flash2", "once"  # of the model of traffic
SRAM_BYTES: Final = 227 * 1024  # shared memory that a CTA of a Hopper GPU may have
TILE_M: Final = 128  # query rows of a CTA at head_dim 128
OUT_OF_MEMORY: Final = "out of memory"
CALLS: Final = ("forward", "train")  # a forward, or one with its backward

# --- what is needed


def standard_bytes(case: Case) -> int:
    """Peak beyond the inputs of softmax(q k^T) v in three 16-bit steps: scores and probabilities at once."""
    scores = 2 * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k
    return max(2 * scores, scores + 2 * case.elements[0])


def ours_bytes(case: Case, recipe: str | None) -> int:
    """Peak beyond the inputs of `flash_attn_func` (`recipe` None) or of `fp8_attention`.

    Both hold the output and lse, the latter the 8-bit operands and their scales too. The sums of K's mean, a few
    kilobytes a head, are left out.
    """
    queries, keys = case.elements
    rows = case.batch * case.heads_q * case.seqlen_q
    needed = 2 * queries + 4 * rows
    if recipe is None:
        return needed
    pairs = case.batch * case.heads_k
    padded = -(-case.seqlen_k // 16) * 16
    needed += queries + keys + pairs * case.head_dim * padded + 4 * rows
    needed += 4 * pairs * (-(-case.seqlen_k // K_GROUP) + -(-case.seqlen_k // V_BLOCK))
    return needed + (4 * rows if resolve_recipe(recipe).smooth_k else 0)


def standard_train_bytes(case: Case) -> int:
    """Likewise of `standard_bytes` with its backward: output, dV, and four matrices of scores at once, which is what
    torch's allocator has at its peak (perf/records/memory.json): probabilities, gradients of them and of the scores,
    and a temporary of the softmax's backward.
    """
    queries, keys = case.elements
    scores = 2 * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k
    return 4 * scores + 2 * queries + 2 * keys


def ours_train_bytes(case: Case, recipe: str | None) -> int:
    """Likewise of `ours_bytes` with its backward: output and lse, the gradients, and the backward's workspace, which is
    the float32 sum of dQ and two numbers of each row, both of whole tiles. The 8-bit operands are gone by then.
    """
    queries, keys = case.elements
    config = backward16_config(
        case.head_dim, case.head_dim, "bf16", causal=case.causal, seqlen_q=case.seqlen_q
    )
    padded = case.batch * case.heads_q * -(-case.seqlen_q // config.tile_m) * config.tile_m
    kept = 2 * queries + 4 * case.batch * case.heads_q * case.seqlen_q
    backward = kept + 2 * queries + 4 * keys + padded * (4 * config.qk_columns + 8)
    return max(ours_bytes(case, recipe), backward)


def memory_rows(
    shapes: Sequence[Case],
    recipes: Sequence[str],
    *,
    measured: bool,
    call: str = "forward",
    device: torch.device | str = "cuda",
    on_done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Rows of phase "memory": `model_bytes` as worked out and, where `measured`, `peak_bytes`.

    Standard attention that does not fit has status "unavailable" and the reason "out of memory". `call` is of `CALLS`,
    and a field of the rows.
    """
    standard, ours = {
        "forward": (standard_bytes, ours_bytes),
        "train": (standard_train_bytes, ours_train_bytes),
    }[call]
    rows = []
    for case in shapes:
        for provider, recipe in ((STANDARD, None), (OURS, None), *((OURS, name) for name in recipes)):
            model = standard(case) if provider == STANDARD else ours(case, recipe)
            row = record.make_row(
                provider=provider,
                phase="memory",
                dtype="bf16" if recipe is None else "fp8",
                recipe=recipe,
                call=call,
                model_bytes=model,
                **case.fields,
            )
            if measured:
                row["backend"] = "torch" if provider == STANDARD else "sm90"
                try:
                    row["peak_bytes"] = _peak(case, provider, recipe, call, device)
                except torch.OutOfMemoryError:
                    row.update(status="unavailable", reason=OUT_OF_MEMORY)
                except (RuntimeError, ValueError) as error:
                    row.update(status="failed", reason=" ".join(str(error).split())[:300] or repr(error))
                gc.collect()
                torch.cuda.empty_cache()
            rows.append(row)
        on_done()
    return rows


def _peak(case: Case, provider: str, recipe: str | None, call: str, device: torch.device | str) -> int:
    import cute_attn

    q, k, v = cases.make_inputs(case, torch.bfloat16, device)
    dout = gradients.make_dout(case, q.dtype, device)

    def attend() -> Tensor:
        if provider == STANDARD:
            group = case.heads_q // case.heads_k
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in heads[1:])
            out = torch.softmax(heads[0] @ keys.mT, dim=-1) @ values  # a scale would be folded into q
            return out.transpose(1, 2)
        if recipe is None:
            found = cute_attn.flash_attn_func(q, k, v, backend="sm90")
        else:
            found = cute_attn.fp8_attention(q, k, v, recipe=recipe, backend="sm90")
        assert isinstance(found, Tensor)  # without lse
        return found

    def run() -> object:
        return torch.autograd.grad(attend(), (q, k, v), dout) if call == "train" else attend()

    for x in (q, k, v):
        x.requires_grad_(call == "train")
    with torch.set_grad_enabled(call == "train"):
        if provider != STANDARD:
            run()  # the constants of a device are made in its first call
            if call == "train":
                _await_engine(device)
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        found = run()
        torch.cuda.synchronize(device)
        del found
        return torch.cuda.max_memory_allocated(device) - before


def _await_engine(device: torch.device | str) -> None:
    """Returns when the thread of torch's autograd engine has let go of the gradients of the call before: it does so
    behind its caller's back, and in front of its next task."""
    x = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(2 * x, x, torch.ones_like(x))


def readable(size: float) -> str:
    """Bytes as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_grid(rows: Sequence[Row], call: str = "forward") -> Grid | None:
    """Memory by length, from rows of phase "memory" of a kind of `CALLS`; None without any."""
    found = [row for row in rows if row["phase"] == "memory" and row.get("call", "forward") == call]
    if not found:
        return None

    def column(row: Row) -> str:
        return "standard" if row["provider"] == STANDARD else f"ours, {row['recipe'] or '16 bits'}"

    columns = list(dict.fromkeys(map(column, found)))
    measured = any(row["peak_bytes"] is not None or row["status"] != "ok" for row in found)
    grid = Grid(
        "Memory of a call beyond its inputs"
        if call == "forward"
        else "Memory of forward and backward beyond the inputs",
        [
            "d",
            "mask",
            "b x h",
            "seqlen",
            *(name + (" (measured)" if measured else "") for name in columns),
            "ratio",
        ],
        text_columns=2,
    )
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        key = tuple(row[name] for name in ("head_dim", "causal", "batch", "heads_q", "heads_k", "seqlen_k"))
        lines.setdefault(key, {})[column(row)] = row
    for (head_dim, causal, batch, heads_q, heads_k, seqlen), cells in lines.items():
        heads = str(heads_q) if heads_q == heads_k else f"{heads_q}/{heads_k}"
        texts = []
        for name in columns:
            row = cells[name]
            text = readable(row["model_bytes"])
            if row["status"] != "ok":
                text += f" ({row['reason'] if row['reason'] == OUT_OF_MEMORY else row['status']})"
            elif row["peak_bytes"] is not None:
                text += f" ({readable(row['peak_bytes'])})"
            texts.append(text)
        sizes = [cells[name]["model_bytes"] for name in columns]
        ratio = f"{sizes[0] / max(sizes[1:]):.0f}x" if len(sizes) > 1 else "-"
        mask = "causal" if causal else "full"
        grid.lines.append([str(head_dim), mask, f"{batch} x {heads}", str(seqlen), *texts, ratio])
    grid.notes.append(
        "standard: scores and probabilities in memory, 16 bits each. ours: output, lse, 8-bit operands."
        if call == "forward"
        else "standard: probabilities, two gradients and a temporary of their size, 16 bits each. ours: output, lse, "
        "gradients, the sum of dQ in float32."
    )
    if measured:
        grid.notes.append(
            "In brackets the measured peak of torch's allocator. ratio: of worked-out bytes, to the largest of ours."
        )
    return grid


# --- what is moved


def standard_io(n: int, d: int) -> dict[str, int]:
    """Bytes by tensor that standard attention moves for one head: scores cross the memory bus four times."""
    return {"q, k, v": 2 * 3 * n * d, "out": 2 * n * d + 4 * n, "scores": 2 * 4 * n * n}


def flash1_io(n: int, d: int, block_k: int) -> dict[str, int]:
    """FlashAttention: a visit of each tile of keys to all rows, with O and the softmax's state read and written."""
    visits = -(-n // block_k)
    return {
        "q, k, v": 2 * (2 * n * d + visits * n * d),
        "out": (2 * visits + 1) * (2 * n * d + 2 * 4 * n),
        "scores": 0,
    }


def flash2_io(n: int, d: int, block_q: int) -> dict[str, int]:
    """FlashAttention-2 and later: keys and values once for each tile of rows, all else once."""
    return {"q, k, v": 2 * (n * d + 2 * -(-n // block_q) * n * d), "out": 2 * n * d + 4 * n, "scores": 0}


def io_rows(
    seqlens: Sequence[int], head_dims: Sequence[int], sram_bytes: int = SRAM_BYTES
) -> list[dict[str, Any]]:
    """Rows of phase "io": the model for one head, full mask, 16-bit tensors; `model_bytes` moved by N and d.

    Args:
        sram_bytes: M, on-chip memory; FlashAttention's tiles follow from it, FlashAttention-2's rows are `TILE_M`.

    Raises:
        ValueError: M is below one row.
    """
    rows = []
    for d in head_dims:
        _, block_k = block_sizes(sram_bytes // 2, d)
        for n in seqlens:
            moved = {
                STANDARD: sum(standard_io(n, d).values()),
                FLASH1: sum(flash1_io(n, d, block_k).values()),
                FLASH2: sum(flash2_io(n, d, TILE_M).values()),
                ONCE: 2 * 4 * n * d + 4 * n,
            }
            shape = Case(batch=1, seqlen_q=n, seqlen_k=n, heads_q=1, heads_k=1, head_dim=d, causal=False)
            rows += [
                record.make_row(
                    provider=name,
                    phase="io",
                    dtype="bf16",
                    model_bytes=size,
                    sram_bytes=sram_bytes,
                    **shape.fields,
                )
                for name, size in moved.items()
            ]
    return rows


def io_grid(rows: Sequence[Row]) -> Grid | None:
    """Traffic by head_dim and length, from rows of phase "io"; None without any."""
    cells: dict[tuple[int, int, int], dict[str, int]] = {}
    for row in rows:
        if row["phase"] == "io":
            key = (row["sram_bytes"], row["head_dim"], row["seqlen_k"])
            cells.setdefault(key, {})[row["provider"]] = row["model_bytes"]
    if not cells:
        return None
    sizes = {sram_bytes for sram_bytes, _, _ in cells}
    columns = ["standard", "FlashAttention", "FlashAttention-2", "once each"]
    grid = Grid(
        f"Memory traffic of one head, M = {', '.join(map(readable, sorted(sizes)))} on chip",
        ["d", "N", *columns, "standard / FA-2", "FLOP / byte, FA-2"],
        text_columns=0,
    )
    for (_, d, n), moved in cells.items():
        grid.lines.append(
            [
                str(d),
                str(n),
                *(readable(moved[name]) for name in (STANDARD, FLASH1, FLASH2, ONCE)),
                f"{moved[STANDARD] / moved[FLASH2]:.1f}x",
                f"{4 * n * n * d / moved[FLASH2]:.0f}",
            ]
        )
    grid.notes += [
        f"FlashAttention: tiles of ceil(M / 4d) keys, visited by all rows. FlashAttention-2: tiles of {TILE_M} rows, "
        "each of which reads all keys; caches are left out, and L2 serves most of these reads.",
        "once each: Q, K, V read and O written once, the least there is.",
    ]
    return grid


def measured_io_grid(rows: Sequence[Row], tile_m: int = TILE_M) -> Grid | None:
    """What Nsight Compute counted for a launch, beside the model; from rows of phase "profile", None without any."""
    found = [row for row in rows if row["phase"] == "profile" and row.get("dram_read_bytes") is not None]
    if not found:
        return None
    grid = Grid(
        "Memory traffic of a launch: counted, and by the model",
        [
            "kernel",
            "d",
            "seqlen",
            "b x h",
            "HBM",
            "L2",
            "operands once",
            "tiles of rows, no cache",
            "standard",
        ],
        text_columns=1,
    )
    for row in found:
        n, d, heads = row["seqlen_k"], row["head_dim"], row["batch"] * row["heads_q"]
        width = 1 if row["dtype"] == "fp8" else 2  # bytes of Q, K and V; the output has 2
        once = heads * (3 * n * d * width + 2 * n * d)
        tiles = heads * (n * d * width + 2 * -(-n // tile_m) * n * d * width + 2 * n * d)
        standard = heads * (3 * n * d * width + 2 * n * d + 8 * n * n)
        moved = row["dram_read_bytes"] + row["dram_write_bytes"]
        grid.lines.append(
            [
                f"{row['provider']} {row['recipe'] or row['dtype']}",
                str(d),
                str(n),
                f"{row['batch']} x {row['heads_q']}",
                *map(readable, (moved, row["l2_bytes"], once, tiles, standard)),
            ]
        )
    grid.notes.append(
        "HBM, L2: bytes that Nsight Compute counted (the record of scripts/profile_kernels.py)."
    )
    return grid


def profile_record() -> Path | None:
    """The record of counters in the source tree, where there is one."""
    root = record.source_root()
    path = None if root is None else root / "perf" / "records" / "profile.json"
    return path if path is not None and path.is_file() else None
