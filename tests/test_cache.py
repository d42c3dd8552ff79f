"""The disk cache: keys, damage, many processes that start at once, forks."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cute_attn import cache

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    head_dim: int = 64
    causal: bool = False


KEY, OTHER_KEY = "a" * 64, "b" * 64


class Builder:
    """Stands in for the compiler: writes known bytes and counts how often it was asked."""

    def __init__(self, content: bytes = b"object " * 100) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.content)


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()  # no effect on one that has ended
    assert process.returncode == 0, err
    return out


# ---- keys ----


def test_key_is_the_same_in_another_process() -> None:
    script = """
from dataclasses import dataclass
from cute_attn import cache

@dataclass(frozen=True)
class Config:
    head_dim: int = 64
    causal: bool = False

print(cache.cache_key(Config(), "sm_90a"))
"""
    key = cache.cache_key(Config(), "sm_90a")
    assert len(key) == 64
    assert finish(start(script)).strip() == key


def test_key_depends_on_everything_that_changes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        monkeypatch.delenv(name)
    keys = [cache.cache_key(Config(), "sm_90a")]
    keys.append(cache.cache_key(Config(head_dim=128), "sm_90a"))
    keys.append(cache.cache_key(Config(causal=True), "sm_90a"))
    keys.append(cache.cache_key(Config(), "sm_80"))

    def with_change(target: object, name: str, value: object) -> str:
        with monkeypatch.context() as change:
            change.setattr(target, name, value)
            return cache.cache_key(Config(), "sm_90a")

    import cutlass

    real_version = importlib.metadata.version
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi"):
        keys.append(
            with_change(
                importlib.metadata,
                "version",
                lambda name, package=package: "0.0" if name == package else real_version(name),
            )
        )
    keys.append(with_change(cache, "source_digest", lambda: "another"))
    keys.append(with_change(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1))
    keys.append(with_change(cache.platform, "python_version", lambda: "3.99.0"))
    keys.append(with_change(cache.platform, "machine", lambda: "another"))
    keys.append(with_change(cutlass, "CUDA_VERSION", type("Cuda", (), {"major": 12, "minor": 9})))
    for setting in ("CUTE_DSL_LINEINFO", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_NOT_KNOWN_YET"):
        with monkeypatch.context() as change:
            change.setenv(setting, "1")
            keys.append(cache.cache_key(Config(), "sm_90a"))
    assert len(set(keys)) == len(keys)

    for setting in ("CUTE_DSL_ARCH", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_KEEP", "CUTE_DSL_LOG_LEVEL"):
        monkeypatch.setenv(setting, "1")
    assert cache.cache_key(Config(), "sm_90a") == keys[0]


def test_source_digest_sees_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("cute_attn.kernels", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    deep = tmp_path / "sm90" / "deep"
    deep.mkdir(parents=True)
    a, b = tmp_path / "a.py", deep / "b.py"
    a.write_text("x = 1\n")
    b.write_text("y = 2\n")
    seen = [cache._hash_sources()]
    (tmp_path / "notes.txt").write_text("not code")
    assert cache._hash_sources() == seen[0]
    b.write_text("y = 3\n")
    seen.append(cache._hash_sources())
    a.write_text("y = 3\n")
    b.write_text("x = 1\n")  # the same contents under other names
    seen.append(cache._hash_sources())
    a.rename(tmp_path / "c.py")
    seen.append(cache._hash_sources())
    (tmp_path / "c.py").unlink()
    seen.append(cache._hash_sources())
    assert len(set(seen)) == len(seen)


def test_source_digest_covers_the_installed_kernels() -> None:
    assert cache.source_digest() == cache._hash_sources()
    spec = importlib.util.find_spec("cute_attn.kernels")
    assert spec is not None and spec.submodule_search_locations
    assert (Path(next(iter(spec.submodule_search_locations))) / "entry.py").is_file()


# ---- one process ----


def test_second_load_builds_nothing(cache_folder: Path) -> None:
    build = Builder()
    assert not cache.holds(KEY)
    first = cache.load_or_build(KEY, build, Path.read_bytes, {"config": "x"})
    assert cache.holds(KEY)
    assert cache.load_or_build(KEY, build, Path.read_bytes) == first == build.content
    assert build.calls == 1
    assert json.loads((cache_folder / f"{KEY}.json").read_text())["description"] == {"config": "x"}
    assert {path.name for path in cache_folder.iterdir()} == {f"{KEY}{s}" for s in (".o", ".json", ".lock")}


def test_keys_do_not_share_entries(cache_folder: Path) -> None:
    one, two = Builder(b"one"), Builder(b"two")
    for _ in range(2):
        assert cache.load_or_build(KEY, one, Path.read_bytes) == b"one"
        assert cache.load_or_build(OTHER_KEY, two, Path.read_bytes) == b"two"
    assert (one.calls, two.calls) == (1, 1)


def _truncate(folder: Path) -> None:
    path = folder / f"{KEY}.o"
    path.write_bytes(path.read_bytes()[:-1])


def _empty(folder: Path) -> None:
    (folder / f"{KEY}.o").write_bytes(b"")


def _flip(folder: Path) -> None:
    path = folder / f"{KEY}.o"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


def _remove_object(folder: Path) -> None:
    (folder / f"{KEY}.o").unlink()


def _remove_summary(folder: Path) -> None:
    (folder / f"{KEY}.json").unlink()


def _truncate_summary(folder: Path) -> None:
    path = folder / f"{KEY}.json"
    path.write_bytes(path.read_bytes()[:20])


def _empty_summary(folder: Path) -> None:
    (folder / f"{KEY}.json").write_text("{}")


def _list_summary(folder: Path) -> None:
    (folder / f"{KEY}.json").write_text("[1, 2]")


def _binary_summary(folder: Path) -> None:
    (folder / f"{KEY}.json").write_bytes(bytes(range(256)))


def _swap_object(folder: Path) -> None:
    cache.load_or_build(OTHER_KEY, Builder(b"of another call"), Path.read_bytes)
    (folder / f"{OTHER_KEY}.o").replace(folder / f"{KEY}.o")


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _empty,
        _flip,
        _remove_object,
        _remove_summary,
        _truncate_summary,
        _empty_summary,
        _list_summary,
        _binary_summary,
        _swap_object,
    ],
)
def test_damaged_entry_is_rebuilt(cache_folder: Path, damage: Callable[[Path], None]) -> None:
    build = Builder()
    cache.load_or_build(KEY, build, Path.read_bytes)
    damage(cache_folder)
    assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content
    assert build.calls == 2
    assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content
    assert build.calls == 2, "the rebuilt entry must be whole again"


def test_entry_that_does_not_load_is_rebuilt(cache_folder: Path) -> None:
    cache.load_or_build(KEY, Builder(b"old"), Path.read_bytes)

    def load(path: Path) -> bytes:
        content = path.read_bytes()
        if content == b"old":
            raise RuntimeError("made for another host")
        return content

    new = Builder(b"new")
    assert cache.load_or_build(KEY, new, load) == b"new"
    assert cache.load_or_build(KEY, new, load) == b"new"
    assert new.calls == 1


def test_nothing_is_stored_when_build_or_load_fails(cache_folder: Path) -> None:
    def no_build(path: Path) -> None:
        path.write_bytes(b"half")
        raise ZeroDivisionError("in the compiler")

    def no_load(path: Path) -> bytes:
        raise LookupError("in the loader")

    with pytest.raises(ZeroDivisionError, match="in the compiler"):
        cache.load_or_build(KEY, no_build, Path.read_bytes)
    with pytest.raises(LookupError, match="in the loader"):
        cache.load_or_build(KEY, Builder(), no_load)
    assert [path.name for path in cache_folder.iterdir()] == [f"{KEY}.lock"]
    build = Builder()
    assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content


def test_a_falsy_result_is_a_result(cache_folder: Path) -> None:
    build = Builder()
    for _ in range(2):
        assert cache.load_or_build(KEY, build, lambda path: None) is None
    assert build.calls == 1


def test_nothing_is_stored_once_sources_have_changed(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_hash_sources", lambda: "edited since")
    build = Builder()
    for calls in (1, 2):
        assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content
        assert build.calls == calls
    assert not list(cache_folder.glob("*.o"))


@pytest.mark.parametrize("key", ["", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
def test_malformed_key_is_refused(cache_folder: Path, key: str) -> None:
    with pytest.raises(ValueError, match="key must be 64"):
        cache.load_or_build(key, Builder(), Path.read_bytes)
    assert not cache_folder.exists()


def test_unusable_folder_warns_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    folder = blocked / "cache"
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(folder))
    build = Builder()
    for calls in (1, 2):
        with pytest.warns(RuntimeWarning, match=str(folder)) as caught:
            assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content
        assert len(caught) == 1
        assert build.calls == calls
    assert cache.clear() == 0


def test_folder_that_fills_up_costs_no_second_build(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    build = Builder()
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content
    assert build.calls == 1
    assert [path.name for path in cache_folder.iterdir()] == [f"{KEY}.lock"], "no temporary file may stay"


def test_read_only_entry_needs_no_lock(cache_folder: Path) -> None:
    build = Builder()
    cache.load_or_build(KEY, build, Path.read_bytes)
    lock = cache_folder / f"{KEY}.lock"
    lock.unlink()
    assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content
    assert build.calls == 1 and not lock.exists()


def test_disabled_cache_leaves_the_disk_alone(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_DISABLE_DISK_CACHE", "1")
    build = Builder()
    for calls in (1, 2):
        assert cache.load_or_build(KEY, build, Path.read_bytes) == build.content
        assert build.calls == calls
    assert cache.cache_dir() is None and not cache_folder.exists()
    monkeypatch.setenv("CUTE_ATTN_DISABLE_DISK_CACHE", "0")
    assert cache.cache_dir() == cache_folder


def test_default_folder_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUTE_ATTN_CACHE_DIR", raising=False)
    monkeypatch.delenv("CUTE_ATTN_DISABLE_DISK_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "cute_attn"


def test_clear_removes_entries_and_nothing_else(cache_folder: Path) -> None:
    assert cache.clear() == 0
    for key in (KEY, OTHER_KEY):
        cache.load_or_build(key, Builder(), Path.read_bytes)
    (cache_folder / f"{KEY}.abc_12.tmp").write_text("left by a process that died")
    mine = cache_folder / "mine.o"
    mine.write_text("a user's file")
    assert cache.clear() == 2
    assert list(cache_folder.iterdir()) == [mine]
    build = Builder()
    cache.load_or_build(KEY, build, Path.read_bytes)
    assert build.calls == 1


# ---- several threads and processes ----


def test_threads_build_once_and_one_at_a_time(cache_folder: Path) -> None:
    inside, most = 0, 0

    def build(path: Path) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        path.write_bytes(path.stem.encode())
        inside -= 1
        built.append(path.stem)

    built: list[str] = []
    results: list[tuple[str, bytes]] = []
    threads = [
        threading.Thread(
            target=lambda key=key: results.append((key, cache.load_or_build(key, build, Path.read_bytes)))
        )
        for key in [KEY, OTHER_KEY] * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built) == [KEY, OTHER_KEY] and most == 1
    assert len(results) == 8 and all(content == key.encode() for key, content in results)


# Asks for all keys in the order given; every build is slow and logged, so that a second one would be seen.
WORKER = """
import os, sys, time
from pathlib import Path
from cute_attn import cache

go, log, keys = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]

def build(path):
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (path.stem + "\\n").encode())
    os.close(descriptor)
    with open(path, "wb") as file:  # in pieces: a reader must never see a part
        for _ in range(20):
            file.write(path.stem.encode())
            file.flush()
            time.sleep(0.01)

def load(path):
    content = path.read_bytes()
    assert content == path.stem.encode() * 20, (path, len(content))
    return path.stem

print("ready", flush=True)
while not go.exists():
    time.sleep(0.005)
for key in keys:
    assert cache.load_or_build(key, build, load) == key
"""


def run_workers(tmp_path: Path, orders: list[list[str]]) -> list[str]:
    """Start one process for each order of keys, all at once; return the keys that were built."""
    go, log = tmp_path / "go", tmp_path / "log"
    go.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    workers = [start(WORKER, go, log, *order) for order in orders]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    go.touch()
    for worker in workers:
        finish(worker)
    return log.read_text().split() if log.exists() else []


def test_eight_processes_starting_together(tmp_path: Path, cache_folder: Path) -> None:
    keys = [digit * 64 for digit in "0123"]
    orders = [keys[i % 4 :] + keys[: i % 4] for i in range(8)]
    assert sorted(run_workers(tmp_path, orders)) == keys, "each key must be built by one process only"
    assert run_workers(tmp_path, [keys[::-1]]) == [], "a fresh process builds nothing"

    damaged = cache_folder / f"{keys[2]}.o"
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert run_workers(tmp_path, orders) == [keys[2]], "only the damaged entry is rebuilt, and once"


def test_entry_of_a_killed_process_is_built_by_the_next(tmp_path: Path, cache_folder: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from cute_attn import cache

def build(path):
    path.write_bytes(b"a part")
    print("building", flush=True)
    time.sleep(600)

cache.load_or_build(sys.argv[1], build, Path.read_bytes)
"""
    doomed = start(script, KEY)
    assert doomed.stdout is not None and doomed.stdout.readline() == "building\n"
    waiting = start(WORKER, cache_folder, tmp_path / "log", KEY)  # the folder exists: it starts at once
    assert waiting.stdout is not None and waiting.stdout.readline() == "ready\n"
    time.sleep(0.3)
    assert waiting.poll() is None and not (tmp_path / "log").exists(), "it must wait for the lock"
    doomed.kill()
    doomed.communicate()
    finish(waiting)
    assert (tmp_path / "log").read_text().split() == [KEY]


def test_fork_while_another_thread_builds(cache_folder: Path) -> None:
    script = """
import os, sys, threading, time
from pathlib import Path
from cute_attn import cache

key, other = sys.argv[1:]
building = threading.Event()

def build(path):
    building.set()
    time.sleep(0.3)
    path.write_bytes(b"built once")

def fail(path):
    raise AssertionError("built again")

thread = threading.Thread(target=cache.load_or_build, args=(key, build, Path.read_bytes))
thread.start()
building.wait()
child = os.fork()
if child == 0:
    status = 1
    try:
        assert cache.load_or_build(key, fail, Path.read_bytes) == b"built once"
        assert cache.load_or_build(other, build, Path.read_bytes) == b"built once"
        status = 0
    finally:
        os._exit(status)
thread.join()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert cache.load_or_build(other, fail, Path.read_bytes) == b"built once"
print("done")
"""
    assert finish(start(script, KEY, OTHER_KEY)) == "done\n"


def test_import_needs_neither_dsl_nor_cuda() -> None:
    script = """
import sys
import cute_attn.cache
print([name for name in ("cutlass", "cuda", "torch.cuda") if name in sys.modules])
"""
    assert finish(start(script)) == "[]\n"


# ---- the real compiler ----

SAMPLE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from cute_attn import cache

def build(path):
    from dsl_samples import Exp2Scaled, compile_sample
    print("compiled")
    compile_sample(Exp2Scaled()).export_to_c(object_file_path=str(path), function_name="sample")

def load(path):
    import cutlass.cute as cute
    return cute.runtime.load_module(str(path), enable_tvm_ffi=True).sample

function = cache.load_or_build(cache.cache_key("sample", "sm_90a"), build, load)
import torch
try:
    function(torch.zeros(4), torch.zeros(4), 1.0)
except ValueError as error:
    print(error)
"""


def test_compiled_kernel_survives_export_and_load(cache_folder: Path) -> None:
    first = finish(start(SAMPLE, TESTS)).splitlines()
    second = finish(start(SAMPLE, TESTS)).splitlines()
    assert first[0] == "compiled"
    # The loaded function is the compiled one: it knows its arguments and checks them before any launch.
    assert "scale: float32" in first[1] and "expected device_type=cuda" in first[1]
    assert second == first[1:]
    [entry] = cache_folder.glob("*.o")
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    assert finish(start(SAMPLE, TESTS)).splitlines() == first
