"""Build, check and time variants of the forward kernel in one go on a Hopper GPU, beside FA3 and cuDNN.

    python scripts/tune.py OUT.json [--only REGEX] [--seqlen 16384] [--tokens 16384] [--sustain SECONDS]

Every variant of `VARIANTS` runs in a process of its own: the processes compile at the same time, then take
turns at the GPU (a file lock), and a turn longer than `--turn` seconds kills its process, so that a hung
kernel costs one variant. A variant is timed only after its outputs agreed with float64 attention on the
dequantised inputs. The table goes to the terminal, the rows to OUT.json.

Thirty launches fit into the time in which the GPU may exceed its power limit; with `--sustain` launches follow
one another for so long that it may not, and the rows also give the SM clock and the power.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from cute_attn.kernels.config import FwdConfig
from cute_attn.tiles import forward_config

E4M3, INT8 = "e4m3", "int8"


def _cfg(d: int, n: int, qk: str = E4M3, causal: bool = False, p: str = "code", **more) -> FwdConfig:
    base = FwdConfig(
        head_dim=d,
        head_dim_v=d,
        tile_m=128,
        tile_n=n,
        kv_stages=2,
        qk_dtype=qk,
        p_rounding=p,
        causal=causal,
        out_dtype="bf16",
    )
    return replace(base, **more)


THREE = {"tile_m": 192, "consumer_regs": 160, "producer_regs": 32}  # three consumer warpgroups
VARIANTS: list[FwdConfig] = []
for _qk in (E4M3, INT8):
    for _causal in (False, True):
        VARIANTS += [
            forward_config(d, dv, _qk, _causal, "code", "bf16", cluster=cluster)
            for d, dv in ((64, 64), (128, 128), (256, 256), (80, 80), (96, 96), (192, 128))
            for cluster in (1, 2)
        ]
        VARIANTS += [
            _cfg(64, 128, _qk, _causal, kv_stages=4, **THREE),
            _cfg(64, 128, _qk, _causal, kv_stages=4, qk_splits=2, **THREE),
            _cfg(64, 256, _qk, _causal),
            _cfg(64, 256, _qk, _causal, qk_splits=4),
            _cfg(128, 256, _qk, _causal),
            _cfg(128, 256, _qk, _causal, qk_splits=2),
            _cfg(128, 256, _qk, _causal, qk_splits=4),
            _cfg(128, 256, _qk, _causal, qk_splits=2, pv_part=32),
            _cfg(256, 128, _qk, _causal, pv_part=128),
            _cfg(256, 128, _qk, _causal, qk_splits=2, pv_part=128),
            _cfg(256, 128, _qk, _causal, pv_part=64),
            _cfg(256, 128, _qk, _causal, qk_splits=2, pv_part=64),
        ]
VARIANTS = list(dict.fromkeys(VARIANTS))
PEERS = [
    f"{name} d{d} {mask}" for name in ("fa3", "cudnn") for d in (64, 128, 256) for mask in ("full", "causal")
]

CHECKS = (  # batch, seqlen_q, seqlen_k, heads_q, heads_k
    (1, 512, 512, 2, 2),
    (2, 200, 333, 4, 2),
    (1, 300, 100, 2, 1),
    (1, 1, 1, 1, 1),
    (1, 130, 1000, 6, 2),
)


def _time(fn, rounds: int = 30) -> dict[str, float]:
    import torch

    for _ in range(5):
        fn()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)
    ]
    for start, end in events:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return {"ms": times[len(times) // 2], "ms_min": times[0], "ms_max": times[-1]}


def _sustain(fn, seconds: float) -> dict[str, float]:
    """Mean time of launches that go on for `seconds`; clock (MHz) and power (W) over their second half."""
    import torch

    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    fn()
    torch.cuda.synchronize()
    count, begin, monitor = 0, time.time(), None
    start.record()
    while time.time() - begin < seconds:
        if monitor is None and time.time() - begin > seconds / 2:
            monitor = subprocess.Popen([*query, "-lms", "20"], stdout=subprocess.PIPE, text=True)
        for _ in range(20):
            fn()
        count += 20
        torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    assert monitor is not None  # `seconds` is at least 0.3
    monitor.terminate()
    samples = [tuple(map(float, line.split(","))) for line in monitor.communicate()[0].splitlines()]
    clocks, powers = zip(*samples[:-1], strict=True)  # the last may have come when all was done
    return {
        "ms": start.elapsed_time(end) / count,
        "sm_clock_mhz": sum(clocks) / len(clocks),
        "power_w": sum(powers) / len(powers),
    }


def _rel(a, b) -> float:
    return ((a.double() - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt().clamp(min=1e-30)).item()


def _check(cfg: FwdConfig, recipe, launch_forward, quantize_reference, attention) -> dict[str, float]:
    import torch

    worst, lse_worst = 0.0, 0.0
    for i, (b, sq, sk, hq, hk) in enumerate(CHECKS):
        gen = torch.Generator("cuda").manual_seed(i)

        def new(s: int, h: int, d: int, b: int = b, gen: torch.Generator = gen) -> torch.Tensor:
            return torch.randn(b, s, h, d, device="cuda", generator=gen).bfloat16()

        q, k, v = new(sq, hq, cfg.head_dim), new(sk, hk, cfg.head_dim), new(sk, hk, cfg.head_dim_v)
        qkv = quantize_reference(q, k, v, recipe)
        scale = cfg.head_dim**-0.5
        out, lse = launch_forward(qkv, cfg, causal=cfg.causal, softmax_scale=scale, out_dtype=torch.bfloat16)
        ref, ref_lse = attention(*qkv.dequantize(), causal=cfg.causal, softmax_scale=scale)
        if qkv.q_dot_mean is not None:
            ref_lse = ref_lse + scale * qkv.q_dot_mean.double()
        if not torch.isfinite(out).all():
            raise ValueError(f"non-finite output at {(b, sq, sk, hq, hk)}")
        empty = torch.isinf(ref_lse)
        if not torch.equal(torch.isinf(lse), empty):
            raise ValueError(f"lse of empty rows at {(b, sq, sk, hq, hk)}")
        err = _rel(out, ref)
        if not err < 0.06:
            raise ValueError(f"relative error {err:.3g} at {(b, sq, sk, hq, hk)}")
        worst = max(worst, err)
        lse_worst = max(lse_worst, (lse.double() - ref_lse)[~empty].abs().max().item())
    shapes = ((256, cfg.head_dim), (131072, cfg.head_dim), (131072, cfg.head_dim_v))
    q, k, v = (torch.randn(1, s, 1, d, device="cuda").bfloat16() for s, d in shapes)
    qkv = quantize_reference(q, k, v + 0.5, recipe)
    out, _ = launch_forward(qkv, cfg, causal=cfg.causal, softmax_scale=scale, out_dtype=torch.bfloat16)
    ref, _ = attention(*qkv.dequantize(), causal=cfg.causal, softmax_scale=scale)
    return {"rel_rmse": worst, "lse_err": lse_worst, "rel_rmse_131k": _rel(out, ref)}


def _worker(what: str, seqlen: int, tokens: int, turn: int, lock: str, sustain: float) -> dict:
    import torch

    row: dict = {"variant": what}
    peer = re.fullmatch(r"(fa3|cudnn) d(\d+) (full|causal)", what)
    if peer:
        head_dim = head_dim_v = int(peer[2])
        causal = peer[3] == "causal"
    else:
        cfg = FwdConfig(**json.loads(what))
        head_dim, head_dim_v, causal = cfg.head_dim, cfg.head_dim_v, cfg.causal
        row["variant"] = cfg.name
        from cute_attn.compile import compile_kernel
        from cute_attn.launch import launch_forward
        from cute_attn.quantize import PRESETS, quantize_reference
        from cute_attn.reference import attention

        name = "accurate" if cfg.qk_dtype == INT8 else "fp8"
        recipe = replace(PRESETS[name], p_rounding="code" if cfg.by_code else cfg.p_rounding)
        start = time.time()
        compile_kernel(cfg)
        row["compile_s"] = round(time.time() - start, 1)
    batch, heads = max(1, tokens // seqlen), 2048 // head_dim
    flops = 2 * seqlen * seqlen * (head_dim + head_dim_v) * heads * batch * (0.5 if causal else 1)
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        signal.alarm(turn)
        q, k, v = (
            torch.randn(batch, seqlen, heads, d, device="cuda", dtype=torch.bfloat16)
            for d in (head_dim, head_dim, head_dim_v)
        )
        if not peer:
            row.update(_check(cfg, recipe, launch_forward, quantize_reference, attention))
            qkv = quantize_reference(q, k, v, recipe)

            def run() -> object:
                return launch_forward(
                    qkv, cfg, causal=causal, softmax_scale=head_dim**-0.5, out_dtype=torch.bfloat16
                )

        elif peer[1] == "fa3":
            import flash_attn_interface as fa3

            q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
            one = torch.ones(batch, heads, device="cuda")

            def run() -> object:
                return fa3.flash_attn_func(
                    q8, k8, v8, causal=causal, q_descale=one, k_descale=one, v_descale=one
                )

        else:
            from cute_attn.bench.peers import cudnn_fp8_runner

            q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
            run = cudnn_fp8_runner(q8, k8, v8, causal=causal, softmax_scale=head_dim**-0.5)
        row.update(_sustain(run, sustain) if sustain else _time(run))
        row["tflops"] = flops / row["ms"] / 1e9
        signal.alarm(0)
    return row


def main() -> int:
    """Run all variants; returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="regular expression on names")
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--turn", type=int, default=40, help="seconds a variant may hold the GPU")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument(
        "--sustain", type=float, default=0.0, help="seconds of launches without a pause, at least 0.3"
    )
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--lock", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sustain and args.sustain < 0.3:
        parser.error(
            f"argument --sustain: clock and power are sampled over 0.15 s or more, got {args.sustain}"
        )
    if args.worker:
        print(
            "ROW "
            + json.dumps(_worker(args.worker, args.seqlen, args.tokens, args.turn, args.lock, args.sustain)),
            flush=True,
        )
        return 0
    lock = args.lock or tempfile.mktemp(prefix="cute_attn_gpu_")
    todo = [p for p in PEERS if re.search(args.only, p)]
    todo += [json.dumps(vars(c)) for c in VARIANTS if re.search(args.only, c.name)]
    running: list[tuple[str, subprocess.Popen]] = []
    rows: list[dict] = []
    while todo or running:
        while todo and len(running) < args.jobs:
            what = todo.pop(0)
            command = [sys.executable, __file__, str(args.out), "--worker", what, "--lock", lock]
            command += ["--seqlen", str(args.seqlen), "--tokens", str(args.tokens), "--turn", str(args.turn)]
            command += ["--sustain", str(args.sustain)]
            running.append(
                (what, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            )
        what, process = running.pop(0)
        text, _ = process.communicate()
        found = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")]
        name = what if not what.startswith("{") else FwdConfig(**json.loads(what)).name
        row = (
            found[0]
            if found
            else {"variant": name, "error": f"rc {process.returncode}: {text.strip()[-400:]}"}
        )
        rows.append(row)
        if "error" in row:
            print(f"{name:70s} FAILED {row['error']}", flush=True)
        else:
            errors = [f"{k} {row[k]:.2e}" for k in ("rel_rmse", "rel_rmse_131k", "lse_err") if k in row]
            errors += [f"{k} {row[k]:.0f}" for k in ("sm_clock_mhz", "power_w") if k in row]
            print(
                f"{row['variant']:70s} {row['tflops']:7.0f} TFLOP/s  {row['ms']:.3f} ms  {'  '.join(errors)}",
                flush=True,
            )
        args.out.write_text(json.dumps(rows, indent=1))
    return int(any("error" in r for r in rows))


if __name__ == "__main__":
    sys.exit(main())
