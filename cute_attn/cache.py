"""Compiled kernels on disk, shared by all processes of a user.

A kernel compiles in seconds and loads in milliseconds, so each is compiled once per machine and kept as an
object file. An entry is trusted only if it is complete, and it is found only by a key over everything that
changes the generated code, so a stale or damaged file can cost a compilation but never give a wrong kernel:

- `<key>.o` is the object file, `<key>.json` its size, SHA-256 and a description for people. Both are written
  under another name and renamed, the object first. A pair that does not fit together is a miss.
- `<key>.lock` is locked (flock) while an entry is built. Of several processes that start together one
  compiles, the others wait and load. The kernel releases the lock of a process that dies.
- Any trouble with the folder (read-only, full, no home directory) costs a warning, not the call.

The folder is `$CUTE_ATTN_CACHE_DIR`, or `~/.cache/cute_attn`. Its object files are run as code: it must not
be writable by people whose code you would not run. `CUTE_ATTN_DISABLE_DISK_CACHE=1` leaves the disk alone.

Importing this module imports neither the DSL nor CUDA.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "COMPILE_LOCK",
    "FORMAT_VERSION",
    "cache_dir",
    "cache_key",
    "clear",
    "describe",
    "holds",
    "load_or_build",
    "source_digest",
]

T = TypeVar("T")

FORMAT_VERSION = 1  # of the entries; raise it when their meaning changes

COMPILE_LOCK = threading.RLock()
"""Held around every `cute.compile` of the process: two at once abort it (seen with DSL 4.8.1).

`load_or_build` takes it by itself; take it too where the compiler is called without the cache.
"""

# A fork waits until no thread compiles or loads. The child thus never starts with the lock taken by a thread
# that it does not have, nor with a copy of an open lock file, which would keep an entry locked as long as the
# child lives.
os.register_at_fork(
    before=COMPILE_LOCK.acquire,
    after_in_parent=COMPILE_LOCK.release,
    after_in_child=COMPILE_LOCK.release,
)

_log = logging.getLogger(__name__)
_KEY = re.compile(r"[0-9a-f]{64}")
_ENTRY_FILE = re.compile(r"[0-9a-f]{64}\.(o|json|lock|[0-9a-z_]+\.tmp)")
_MISS: Any = object()

# Settings of the DSL that change where it writes and what it prints, not the code. Any other one, known or
# not, is part of the key. The target architecture is a part of its own.
_HARMLESS_DSL_SETTINGS = re.compile(
    r"CUTE_DSL_(ARCH|CACHE_DIR|DUMP_DIR|KEEP.*|LOG_.*|PRINT_.*|JIT_.*|NO_CACHE|DISABLE_FILE_CACHING"
    r"|SHOW_STACKTRACE|FILTER_STACKTRACE|WARNINGS_IGNORE|ENABLE_OPTIMIZATION_WARNINGS)"
)
_COMPILER_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)


def cache_dir() -> Path | None:
    """Folder of the disk cache, which need not exist, or None where nothing is to be kept on disk.

    None means that `CUTE_ATTN_DISABLE_DISK_CACHE` is set (to anything but 0), or that no folder is named and
    the user has no home. Both environment variables are read at each call.
    """
    if os.environ.get("CUTE_ATTN_DISABLE_DISK_CACHE", "0") not in ("", "0"):
        return None
    if named := os.environ.get("CUTE_ATTN_CACHE_DIR"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "cute_attn"
    except RuntimeError as error:  # a user without an entry in the password file, no HOME either
        _warn(Path("~/.cache/cute_attn"), error)
        return None


@functools.cache
def source_digest() -> str:
    """SHA-256 over the names and contents of all source files that decide what code is generated.

    These are the device code (`cute_attn.kernels`, every .py file) and `cute_attn/compile.py`, which holds
    the argument layouts and options a kernel is compiled with. Read once per process, since what has been
    imported stays as it was; ask before the device code is imported. Once the files have changed,
    `load_or_build` stores nothing.
    """
    return _hash_sources()


def _hash_sources() -> str:
    spec = importlib.util.find_spec("cute_attn.kernels")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "cute_attn.kernels is not installed: run `pip install -e .` in the source tree"
        )
    sources = [(Path(__file__).with_name("compile.py"), "compile.py")]
    for location in spec.submodule_search_locations:
        root = Path(location)
        sources += [(path, f"kernels/{path.relative_to(root).as_posix()}") for path in root.rglob("*.py")]
    digest = hashlib.sha256()
    for path, name in sorted(sources, key=lambda source: source[1]):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def describe(config: object, arch: str) -> dict[str, Any]:
    """Everything that the generated code depends on, as plain data.

    Args:
        config: a frozen kernel configuration; its `repr` must show every field.
        arch: target architecture, for instance "sm_90a".

    Imports the DSL, for the CUDA toolkit it has chosen: it carries several and picks one by the driver.
    """
    import cutlass

    cuda = cutlass.CUDA_VERSION
    return {
        "format": FORMAT_VERSION,
        "config": repr(config),
        "arch": arch,
        "sources": source_digest(),
        "packages": {name: _version(name) for name in _COMPILER_PACKAGES},
        "cuda": f"{cuda.major}.{cuda.minor}",
        "python": platform.python_version(),
        "machine": platform.machine(),  # the object file also holds host code
        "settings": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("CUTE_DSL_") and not _HARMLESS_DSL_SETTINGS.fullmatch(name)
        },
    }


def cache_key(config: object, arch: str) -> str:
    """Key of a compiled kernel: 64 hexadecimal digits, the SHA-256 of `describe(config, arch)` as JSON."""
    return hashlib.sha256(json.dumps(describe(config, arch), sort_keys=True).encode()).hexdigest()


def holds(key: str) -> bool:
    """Whether the disk cache has an entry of `key`; that it can be loaded is not tried."""
    folder = cache_dir()
    return folder is not None and (folder / f"{key}.json").is_file()


def load_or_build(
    key: str,
    build: Callable[[Path], None],
    load: Callable[[Path], T],
    description: Mapping[str, Any] | None = None,
) -> T:
    """Return `load` of the object file of `key`, calling `build` first where there is no complete entry.

    Args:
        key: from `cache_key`.
        build: writes the object file to the path it is given.
        load: reads an object file; must not need it after returning. If it raises on an entry, the entry is
        rebuilt.
        description: kept beside the entry for people who look at the folder (see `describe`).

    Raises:
        ValueError: `key` is not one of `cache_key`'s.
        Exception: whatever `build` raises, or `load` on the object file just built. Nothing is stored then.

    Both callables run under `COMPILE_LOCK`, `build` also while the entry is locked against other processes.
    With the disk cache disabled or unusable the object file is built in a temporary folder, every time.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(f"key must be 64 lower-case hexadecimal digits, got {key!r}")
    with COMPILE_LOCK:
        folder = cache_dir()
        if folder is None:
            return _build_and_load(key, build, load, None, None)
        found = _load_entry(folder, key, load)
        if found is not _MISS:
            return found
        with _entry_lock(folder, key) as writable:
            found = _load_entry(folder, key, load)  # another process may have built it while this one waited
            if found is not _MISS:
                return found
            return _build_and_load(key, build, load, folder if writable else None, description)


def clear() -> int:
    """Remove all entries of the disk cache, and only those; return how many object files went.

    Raises OSError where a file cannot be removed. Processes that run keep the kernels they have loaded.
    """
    folder = cache_dir()
    if folder is None or not folder.is_dir():
        return 0
    removed = 0
    for path in sorted(folder.iterdir()):
        if _ENTRY_FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)
            removed += path.suffix == ".o"
    return removed


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _warn(folder: Path, error: Exception) -> None:
    warnings.warn(
        f"compiled kernels are not kept on disk: {folder} cannot be used ({error}). Set CUTE_ATTN_CACHE_DIR "
        "to a folder that can be written, or CUTE_ATTN_DISABLE_DISK_CACHE=1 to silence this.",
        RuntimeWarning,
        stacklevel=2,
    )


def _load_entry(folder: Path, key: str, load: Callable[[Path], T]) -> T:
    """`load` of a complete entry, or _MISS.

    Needs no lock: files are replaced whole and checked before use.
    """
    path = folder / f"{key}.o"
    try:
        expected = json.loads(path.with_suffix(".json").read_bytes())
        content = path.read_bytes()
        complete = (
            expected["size"] == len(content) and expected["sha256"] == hashlib.sha256(content).hexdigest()
        )
    except (FileNotFoundError, NotADirectoryError):
        return _MISS
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("cache entry %s cannot be read and is rebuilt: %s", path, error)
        return _MISS
    if not complete:
        _log.warning("cache entry %s is damaged and is rebuilt", path)
        return _MISS
    try:
        return load(path)
    except Exception as error:  # whatever the loader makes of a file it cannot use
        _log.warning("cache entry %s cannot be loaded and is rebuilt: %s", path, error)
        return _MISS


def _build_and_load(
    key: str,
    build: Callable[[Path], None],
    load: Callable[[Path], T],
    folder: Path | None,
    description: Mapping[str, Any] | None,
) -> T:
    # Built elsewhere and stored once it has been loaded: what does not load is never stored, and a full disk
    # or a folder that vanished costs no second compilation.
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as scratch:
        path = Path(scratch) / f"{key}.o"
        build(path)
        content = path.read_bytes()
        result = load(path)
    if folder is not None and _hash_sources() != source_digest():
        _log.warning("kernel sources have changed since they were imported: %s is not stored", key)
    elif folder is not None:
        summary = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "description": dict(description or {}),
        }
        try:
            _replace(folder / f"{key}.o", content)
            _replace(folder / f"{key}.json", json.dumps(summary, indent=1, sort_keys=True).encode())
        except OSError as error:
            _warn(folder, error)
    return result


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _entry_lock(folder: Path, key: str) -> Iterator[bool]:
    """Lock an entry against other processes; yield whether the folder can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _warn(folder, error)
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems know no locks. Entries are replaced whole, so that costs only repeated
            # work.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        yield True
    finally:
        os.close(descriptor)  # this also releases the lock
