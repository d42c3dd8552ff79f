"""Records: measurements as JSON, `{"meta": {...}, "rows": [...]}`, tied to the sources that were measured.

A record names two git tree ids, of `kernels/` and of `cute_attn/`. They are computed from the files on disk,
so that they also hold for uncommitted changes and for a copy of the tree without history; where the tree is
clean they equal `git rev-parse HEAD:kernels` and `git rev-parse HEAD:cute_attn`. A record of another tree is
history, not a claim.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = (
    "forward",
    "backward",
    "quantize",
    "whole_call",
    "decode",
    "prefill",
    "train",
    "ring",
    "accuracy_kernel",
    "accuracy_total",
    "figures",
    "overhead",
    "profile",
    "quality",
    "needle",
    "memory",
    "train_step",
    "train_curve",
    "io",
)
DTYPES = ("fp8", "bf16", "fp16")
STATUSES = ("ok", "unavailable", "skipped", "failed", "wrong")
TREES = ("kernels", "cute_attn")

# The fields that every row carries, in the order in which they are written. Other flat fields may follow.
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "provider": (str,),
    "kernel": (str,),
    "backend": (str,),
    "phase": (str,),
    "dtype": (str,),
    "recipe": (str,),
    "batch": (int,),
    "seqlen_q": (int,),
    "seqlen_k": (int,),
    "heads_q": (int,),
    "heads_k": (int,),
    "head_dim": (int,),
    "causal": (bool,),
    "ms": (float, int),
    "ms_min": (float, int),
    "ms_max": (float, int),
    "tflops": (float, int),
    "tbps": (float, int),
    "peak_bytes": (int,),
    "rmse": (float, int),
    "rel_rmse": (float, int),
    "status": (str,),
    "reason": (str,),
}
_REQUIRED = ("provider", "phase", "dtype", "status")
META_FIELDS = ("date", "gpu", "driver", "cuda", "torch", "cutlass_dsl", "command", "git")
GIT_FIELDS = ("commit", "dirty", *TREES)
_TREE_ID = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")  # SHA-1, or SHA-256 repositories


@dataclass(frozen=True)
class Record:
    """What one file holds."""

    meta: dict[str, Any]
    rows: list[dict[str, Any]]


def make_row(**fields: Any) -> dict[str, Any]:
    """A row with every field of the record form: what `fields` gives, else None, and status "ok"."""
    row: dict[str, Any] = dict.fromkeys(ROW_FIELDS)
    row["status"] = "ok"
    row.update(fields)
    return row


def validate(meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Check the record form.

    Raises:
        ValueError: a field is missing, has another type, is not finite, or contradicts another one; the
            message names the row and the field.
    """
    for key in META_FIELDS:
        if key not in meta:
            raise ValueError(f"meta lacks {key!r}; it needs {', '.join(META_FIELDS)}")
    git = meta["git"]
    if not isinstance(git, Mapping) or any(key not in git for key in GIT_FIELDS):
        raise ValueError(f"meta['git'] must hold {', '.join(GIT_FIELDS)}, got {git!r}")
    for tree in TREES:
        if git[tree] is not None and not _TREE_ID.fullmatch(str(git[tree])):
            raise ValueError(f"meta['git'][{tree!r}] must be a git tree id or null, got {git[tree]!r}")
    for number, row in enumerate(rows):
        _validate_row(f"row {number}", row)


def _validate_row(where: str, row: Mapping[str, Any]) -> None:
    for key, types in ROW_FIELDS.items():
        if key not in row:
            raise ValueError(f"{where} lacks {key!r}")
        value = row[key]
        if value is None:
            if key in _REQUIRED:
                raise ValueError(f"{where}: {key} must not be null")
        elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{where}: {key} must be {types[0].__name__} or null, got {value!r}")
    for key, value in row.items():
        if value is not None and not isinstance(value, (str, bool, int, float)):
            raise ValueError(f"{where}: {key} must be flat (text, number, true/false or null), got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {key} must be finite, got {value!r}; write null and a reason instead")
    for key, allowed in (("phase", PHASES), ("dtype", DTYPES), ("status", STATUSES)):
        if row[key] not in allowed:
            raise ValueError(f"{where}: {key} must be one of {', '.join(allowed)}, got {row[key]!r}")
    ms, low, high = row["ms"], row["ms_min"], row["ms_max"]
    if ms is not None:
        if row["status"] != "ok":
            raise ValueError(f"{where}: a row of status {row['status']!r} must have no time, got ms={ms!r}")
        if not ms > 0:
            raise ValueError(f"{where}: ms must be positive, got {ms!r}")
        if low is None or high is None or not low <= ms <= high:
            raise ValueError(f"{where}: needs ms_min <= ms <= ms_max, got {low!r}, {ms!r}, {high!r}")
    if row["status"] != "ok" and not row["reason"]:
        raise ValueError(f"{where}: status {row['status']!r} needs a reason")


def write(path: str | os.PathLike[str], meta: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Validate and write a record, one row a line. The file appears whole or not at all.

    Raises:
        ValueError: see `validate`.
        OSError: the file cannot be written.
    """
    rows = [dict(row) for row in rows]
    validate(meta, rows)
    head = json.dumps(dict(meta), indent=2, allow_nan=False).replace("\n", "\n  ")
    body = ",\n".join("    " + json.dumps(row, allow_nan=False) for row in rows)
    text = '{\n  "meta": ' + head + ',\n  "rows": [' + (f"\n{body}\n  " if rows else "") + "]\n}\n"
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> Record:
    """Read and validate a record.

    Raises:
        ValueError: the file is no record; the message names the file and what is wrong.
    """
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(loaded, dict) or not {"meta", "rows"} <= loaded.keys():
            raise ValueError("a record is an object with 'meta' and 'rows'")
        validate(loaded["meta"], loaded["rows"])
    except ValueError as error:  # json.JSONDecodeError is one
        raise ValueError(f"{path}: {error}") from error
    return Record(loaded["meta"], loaded["rows"])


# --- what was measured


def source_root() -> Path | None:
    """The folder of the source tree this package runs from, or None where it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "kernels").is_dir() and (root / "pyproject.toml").is_file() else None


def git_state(root: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Commit, whether the tree differs from it, and the tree ids of `kernels` and `cute_attn` as they are on
    disk.

    Neither the index nor the object store of the user's repository is touched. `commit` and `dirty` are None
    where there is no history; an id is None where its folder does not exist.
    """
    state: dict[str, Any] = dict.fromkeys(GIT_FIELDS)
    if root is None:
        return state
    root = Path(root).resolve()
    present = [tree for tree in TREES if (root / tree).is_dir()]
    if shutil.which("git") is None:
        state.update({tree: tree_id_without_git(root / tree) for tree in present})
        return state
    with tempfile.TemporaryDirectory(prefix="cute_attn_git_") as scratch:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

        def git(*arguments: str) -> str | None:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            return done.stdout.strip() if done.returncode == 0 else None

        top = git("rev-parse", "--show-toplevel")
        if top is not None and Path(top).resolve() == root:
            state["commit"] = git("rev-parse", "--verify", "--quiet", "HEAD")
            status = git("--no-optional-locks", "status", "--porcelain")
            if state["commit"] is not None and status is not None:
                state["dirty"] = status != ""
            git_dir = Path(git("rev-parse", "--absolute-git-dir") or "")
            objects = git("rev-parse", "--git-path", "objects")
            # Start from a copy of the real index, for a tracked file stays tracked even where it is ignored.
            if (git_dir / "index").is_file():
                shutil.copyfile(git_dir / "index", Path(scratch, "index"))
            Path(scratch, "objects").mkdir()
            environment.update(
                GIT_INDEX_FILE=str(Path(scratch, "index")),
                GIT_OBJECT_DIRECTORY=str(Path(scratch, "objects")),
                GIT_ALTERNATE_OBJECT_DIRECTORIES=str((root / (objects or ".git/objects")).resolve()),
            )
        else:
            git("init", "--quiet", scratch)
            environment.update(GIT_DIR=str(Path(scratch, ".git")), GIT_WORK_TREE=str(root))
        if present and git("add", "--all", "--", *present) is not None:
            for tree in present:
                state[tree] = git("write-tree", f"--prefix={tree}/")
    return state


def tree_id_without_git(folder: Path) -> str | None:
    """The git tree id of a folder computed in Python, Python's byte code left out; None for an empty folder.

    Only for machines without git. Equal to git's id as long as byte code is all that the folder's ignore
    rules name.
    """

    def object_id(kind: str, data: bytes) -> bytes:
        return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data, usedforsecurity=False).digest()

    def walk(path: Path) -> bytes | None:
        entries: list[tuple[bytes, bytes]] = []  # sort key, entry
        for child in path.iterdir():
            name = os.fsencode(child.name)
            if child.is_symlink():
                entries.append(
                    (name, b"120000 " + name + b"\0" + object_id("blob", os.fsencode(os.readlink(child))))
                )
            elif child.is_dir():
                tree = None if child.name == "__pycache__" else walk(child)
                if tree is not None:
                    entries.append((name + b"/", b"40000 " + name + b"\0" + tree))
            elif child.suffix not in (".pyc", ".pyo"):
                mode = b"100755 " if child.stat().st_mode & stat.S_IXUSR else b"100644 "
                entries.append((name, mode + name + b"\0" + object_id("blob", child.read_bytes())))
        return object_id("tree", b"".join(entry for _, entry in sorted(entries))) if entries else None

    found = walk(folder)
    return None if found is None else found.hex()


def package_version(*distributions: str) -> str | None:
    """Version of the first of the named distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def gpu_state() -> dict[str, Any]:
    """Name, driver, power limit and clocks of the current CUDA device; {"gpu": None} where there is none."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None, "driver": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    state: dict[str, Any] = {
        "gpu": properties.name,
        "driver": None,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }
    fields = ("driver_version", "power.limit", "clocks.sm", "clocks.max.sm", "temperature.gpu")
    # CUDA_VISIBLE_DEVICES renumbers torch's devices but not nvidia-smi's: the UUID names one GPU to both.
    uuid = getattr(properties, "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [] if uuid is None else ["-i", f"GPU-{uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        answer = done.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return state
    values = [value.strip() for value in answer.split(",")]
    if len(values) == len(fields):
        state["driver"] = values[0]
        for key, value in zip(
            ("power_limit_w", "sm_clock_mhz", "sm_clock_max_mhz", "temperature_c"), values[1:], strict=True
        ):
            try:
                state[key] = float(value)
            except ValueError:  # "[N/A]" on some machines
                state[key] = None
    return state


def collect_meta(command: str) -> dict[str, Any]:
    """The `meta` of a record made now by `command`."""
    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **gpu_state(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cutlass_dsl": package_version("nvidia-cutlass-dsl"),
        "python": platform.python_version(),
        "command": command,
        "git": git_state(source_root()),
    }
