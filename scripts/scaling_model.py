"""A model of attention on 2 to 1024 GPUs: time and bytes of ring, Ulysses and their mix. It measures nothing.

    python scripts/scaling_model.py [--seqlen 1048576] [--recipe accurate|fp8|bf16] [--full] [--plot scaling.svg]

Kernel speed is that of the longest sequence in a record of `perf/records`; the bandwidths are arguments. Formulas, and
what the model leaves out, are in docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "perf" / "records"
WORLDS = tuple(2**i for i in range(1, 11))


@dataclass(frozen=True)
class Problem:
    """One sequence, and the kernel's speed on it."""

    seqlen: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    key_bytes: int  # of an element of K and V on the wire
    tflops: float

    @property
    def seconds(self) -> float:
        """On one GPU."""
        full = 4.0 * self.seqlen**2 * self.heads_q * self.head_dim
        return (full / 2 if self.causal else full) / (self.tflops * 1e12)


@dataclass(frozen=True)
class Machine:
    """Bandwidths of a GPU, one direction."""

    link: float  # bytes a second, to GPUs of its node
    network: float  # to others
    node: int  # GPUs of a node
    latency: float  # seconds, of a message

    def bandwidth(self, ranks: int) -> float:
        """Of the slowest of so many neighbouring ranks."""
        return self.link if ranks <= self.node else self.network


@dataclass(frozen=True)
class Estimate:
    """Of one forward call on ring * ulysses GPUs."""

    ring: int
    ulysses: int
    seconds: float
    hidden: float | None  # part of the ring's traffic behind computing; None without a ring
    bytes_sent: float  # by a rank


def estimate(problem: Problem, machine: Machine, ring: int, ulysses: int) -> Estimate:
    """Time and traffic; Ulysses groups are neighbours."""
    world = ring * ulysses
    p = problem
    step = p.seconds / world / ring
    message = 2.0 * (p.seqlen / ring) * (p.heads_k / ulysses) * p.head_dim * p.key_bytes
    arrival = machine.latency + message / machine.bandwidth(world) if ring > 1 else 0.0
    seconds = (ring - 1) * max(step, arrival) + step
    exchanged = 0.0
    if ulysses > 1:  # q, k and v, and then out, in 16 bits
        exchanged = 4.0 * (p.seqlen / world) * (p.heads_q + p.heads_k) * p.head_dim * (ulysses - 1) / ulysses
        seconds += 2 * machine.latency + exchanged / machine.bandwidth(ulysses)
    hidden = min(1.0, step / arrival) if ring > 1 else None
    return Estimate(ring, ulysses, seconds, hidden, (ring - 1) * message + exchanged)


def hiding_rows(problem: Problem, bandwidth: float) -> float:
    """Rows of a rank from which a ring hides its messages, without their latency."""
    p = problem
    share = 1.0 if p.causal else 0.5
    return share * p.key_bytes * p.heads_k / p.heads_q * p.tflops * 1e12 / bandwidth


def choices(problem: Problem, machine: Machine, world: int) -> list[Estimate]:
    """All ways to make a mesh of so many ranks whose Ulysses part divides the heads and stays in a node."""
    sizes = [2**i for i in range(11)]
    return [
        estimate(problem, machine, world // u, u)
        for u in sizes
        if u <= min(world, machine.node) and problem.heads_k % u == 0 and problem.heads_q % u == 0
    ]


def kernel_speed(recipe: str, head_dim: int, causal: bool) -> tuple[float, int, str]:
    """(TFLOP/s, seqlen, file) of the longest sequence measured.

    Raises:
        ValueError: no such row.
    """
    name = "forward_16bit.json" if recipe == "bf16" else "forward_grid.json"
    rows: list[dict[str, Any]] = json.loads((RECORDS / name).read_text(encoding="utf-8"))["rows"]
    wanted = ("cute_attn", "forward", None if recipe == "bf16" else recipe, head_dim, causal)
    fitting = [
        row
        for row in rows
        if tuple(row[key] for key in ("provider", "phase", "recipe", "head_dim", "causal")) == wanted
        and row["tflops"]
    ]
    if not fitting:
        raise ValueError(f"perf/records/{name} has no row of {recipe}, head_dim {head_dim}")
    longest = max(fitting, key=lambda row: int(row["seqlen_q"]))
    return float(longest["tflops"]), int(longest["seqlen_q"]), f"perf/records/{name}"


def table(problem: Problem, machine: Machine) -> list[str]:
    """Lines of markdown."""
    lines = [
        "| GPUs | rows a GPU | ring: ms | hidden | GB sent | best mesh: ring x Ulysses | ms | GB sent | x one GPU |",
        "|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for world in WORLDS:
        every = choices(problem, machine, world)
        ring, best = every[0], min(every, key=lambda e: e.seconds)
        assert ring.hidden is not None
        lines.append(
            f"| {world} | {problem.seqlen // world} | {1e3 * ring.seconds:.2f} | {100 * ring.hidden:.0f}% | "
            f"{ring.bytes_sent / 1e9:.2f} | {best.ring} x {best.ulysses} | {1e3 * best.seconds:.2f} | "
            f"{best.bytes_sent / 1e9:.2f} | {problem.seconds / best.seconds:.1f} |"
        )
    return lines


def draw(path: Path, problem: Problem, machine: Machine) -> None:
    """Speed-up over one GPU by GPUs, of the ring alone and of the best mesh."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for label, pick in (
        ("ring", lambda every: every[0]),
        ("best mesh", lambda every: min(every, key=lambda e: e.seconds)),
    ):
        speedups = [problem.seconds / pick(choices(problem, machine, world)).seconds for world in WORLDS]
        axes.plot(WORLDS, speedups, marker="o", label=label)
    axes.plot(WORLDS, WORLDS, color="gray", linestyle=":", label="GPUs")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="times one GPU")
    axes.set_title(f"Model, not measured: {problem.seqlen:,} tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and draw it where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": int, "metavar": "N", "help": "default %(default)s"}
    parser.add_argument("--seqlen", default=1048576, **number)
    parser.add_argument("--heads", default=32, **number)
    parser.add_argument("--heads-k", default=8, **number)
    parser.add_argument("--head-dim", default=128, **number)
    parser.add_argument("--recipe", choices=("accurate", "fp8", "bf16"), default="accurate")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--link", type=float, default=400.0, help="GB/s inside a node (default %(default)s)")
    parser.add_argument("--network", type=float, default=45.0, help="GB/s between (default %(default)s)")
    parser.add_argument("--node", default=8, **number)
    parser.add_argument("--latency", type=float, default=20.0, help="us, of a message (default %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the speed-ups (.png, .pdf, .svg)")
    options = parser.parse_args(argv)
    try:
        speed, seqlen, name = kernel_speed(options.recipe, options.head_dim, not options.full)
    except ValueError as error:
        parser.error(str(error))
    problem = Problem(
        options.seqlen,
        options.heads,
        options.heads_k,
        options.head_dim,
        not options.full,
        2 if options.recipe == "bf16" else 1,
        speed,
    )
    machine = Machine(options.link * 1e9, options.network * 1e9, options.node, options.latency * 1e-6)
    print(
        f"Model, not measured. {options.recipe}, {'full' if options.full else 'causal'}, {options.seqlen} tokens, "
        f"{options.heads} heads of {options.head_dim}, {options.heads_k} of K and V; kernel {speed:.0f} TFLOP/s "
        f"({name}, seqlen {seqlen}); {options.link:g} GB/s in a node of {options.node}, {options.network:g} between "
        f"nodes, {options.latency:g} us a message."
    )
    node, network = (hiding_rows(problem, bandwidth) for bandwidth in (machine.link, machine.network))
    print(
        f"\nOne GPU: {1e3 * problem.seconds:.0f} ms. A ring in a node hides its traffic from {node:.0f} rows a GPU on, "
        f"one between nodes from {network:.0f}.\n"
    )
    print("\n".join(table(problem, machine)))
    if options.plot:
        draw(options.plot, problem, machine)


if __name__ == "__main__":
    main()
