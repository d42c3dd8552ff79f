"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch


def _no_hopper() -> str | None:
    """Why GPU tests cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return f"no CUDA GPU (torch {torch.__version__})"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {major}.{minor}, a 9.x (Hopper) GPU is needed"
    return None


# Tests make many small operations: threads cost more than they give, ten times as much on a busy machine.
torch.set_num_threads(1)

# Kernels are compiled beside the tests: that something takes long says nothing about it.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

NO_HOPPER = _no_hopper()
if NO_HOPPER is not None:
    # The DSL reads this once, on import; without it and without a GPU it takes another target.
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NO_HOPPER is None:
        return
    skip = pytest.mark.skip(reason=NO_HOPPER)
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def living_context(request: pytest.FixtureRequest) -> Iterator[None]:
    """After an illegal access every later call of the process fails: it ends here, with the test that did it."""
    yield
    if NO_HOPPER is None and "gpu" in request.keywords:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"\n{request.node.nodeid}: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)  # pytest-xdist says which test it was, and goes on in a new process


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of its own as the disk cache of this test and the processes it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUTE_ATTN_DISABLE_DISK_CACHE", raising=False)
    return folder
