"""A small character transformer trained for 200 steps with several attentions: are the loss curves the same?

    python perf/train_chars.py [--json FILE]

The text is the bundled Declaration of Independence (public domain). Parameters are float32, attention is in 16 bits, or
in 8 in its forward. All runs begin with the same parameters; runs of one `order` see the same batches. Every
`EVERY` steps the loss over the whole text is taken, by the attention of the run. Two kinds of noise lie beside the
difference between ours and torch's flash attention: of rounding (torch's unfused attention, same order), and of the
data (torch's flash attention in other orders).

Rows have phase "train_curve" and the fields `order`, `losses` (of the evaluations), `final` (mean of the last three),
`rms_to_flash` (difference of the curves, root mean square) and in rows of ours `noise_rounding` and `noise_order`, the
same of the runs named above, that of the orders as the mean over them.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn.bench import record

sys.path.insert(0, str(Path(__file__).parent))
import gpt

TEXT = Path(record.__file__).parent / "data" / "declaration.txt"
EVERY = 10
# provider, order of the data; the first is what others are compared with
RUNS = (
    ("sdpa_flash", 0),
    ("sdpa_math", 0),
    ("sdpa_flash", 1),
    ("sdpa_flash", 2),
    ("cute_attn", 0),
    ("cute_attn fp8", 0),
)


def read_text(device: str) -> tuple[Tensor, int]:
    """The text as numbers of its characters, (length,) int64, and how many characters there are."""
    text = TEXT.read_text(encoding="utf-8")
    characters = sorted(set(text))
    return torch.tensor([characters.index(c) for c in text], device=device), len(characters)


def train(provider: str, order: int, options: argparse.Namespace) -> list[float]:
    """The losses of a run at steps 0, EVERY, ... and the last."""
    device, seqlen = options.device, options.seqlen
    text, characters = read_text(device)
    torch.manual_seed(0)
    model = gpt.CharModel(characters, seqlen, options.layers, options.d_model, options.d_model // 64).to(
        device
    )
    attend = gpt.attention(provider, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(order)
    windows = text[: (len(text) - 1) // seqlen * seqlen].view(-1, seqlen)
    targets = text[1 : windows.numel() + 1].view(-1, seqlen)

    def loss_of(tokens: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens, attend).float().flatten(0, 1), wanted.flatten())

    losses = []
    for step in range(options.steps + 1):
        if step % EVERY == 0 or step == options.steps:
            with torch.no_grad():
                losses.append(loss_of(windows, targets))
        if step == options.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        starts = torch.randint(len(text) - seqlen - 1, (options.batch,), generator=generator).tolist()
        batch = torch.stack([text[start : start + seqlen + 1] for start in starts])
        optimizer.zero_grad(set_to_none=True)
        loss_of(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
    return [float(x) for x in torch.stack(losses)]


def rms(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square of the difference of two curves."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a curve is not finite."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="record to write")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=256, help="a multiple of 64, the head_dim")
    parser.add_argument("--device", default="cuda", help="default: cuda; on a CPU the definitions stand in")
    options = parser.parse_args(words)
    curves = {run: train(*run, options) for run in RUNS}
    flash = curves[RUNS[0]]
    noise = {
        "noise_rounding": rms(curves["sdpa_math", 0], flash),
        "noise_order": (rms(curves["sdpa_flash", 1], flash) + rms(curves["sdpa_flash", 2], flash)) / 2,
    }
    rows: list[dict[str, Any]] = []
    heads, gpu = options.d_model // 64, options.device.startswith("cuda")
    for (provider, order), losses in curves.items():
        finite = all(map(math.isfinite, losses))
        fields: dict[str, Any] = {"status": "wrong", "reason": "the loss is not finite"}
        if finite:
            fields = {
                "losses": " ".join(f"{x:.5f}" for x in losses),
                "final": sum(losses[-3:]) / 3,
                "rms_to_flash": rms(losses, flash),
                **(noise if provider.startswith("cute_attn") else {}),
            }
        row = record.make_row(
            provider=provider.split()[0],
            backend="torch" if provider.startswith("sdpa") else "sm90" if gpu else "reference",
            kernel=provider,
            phase="train_curve",
            dtype="fp8" if provider.endswith("fp8") else "bf16",
            recipe=gpt.recipe_of(provider),
            batch=options.batch,
            seqlen_q=options.seqlen,
            seqlen_k=options.seqlen,
            heads_q=heads,
            heads_k=heads,
            head_dim=64,
            causal=True,
            layers=options.layers,
            d_model=options.d_model,
            order=order,
            **fields,
        )
        rows.append(row)
        if finite:
            print(
                f"{provider}, order {order}: loss {losses[0]:.3f} to {row['final']:.4f}, rms to {RUNS[0][0]} "
                f"{row['rms_to_flash']:.4f}",
                flush=True,
            )
        else:
            print(f"{provider}, order {order}: {row['reason']}", flush=True)
    print(
        f"noise of rounding {noise['noise_rounding']:.4f}, of the order of the data {noise['noise_order']:.4f}"
    )
    if options.json:
        record.write(
            options.json, record.collect_meta(f"python perf/train_chars.py {shlex.join(words)}".strip()), rows
        )
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
