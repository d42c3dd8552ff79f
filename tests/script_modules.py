"""Scripts of perf/ and scripts/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(path: str) -> ModuleType:
    """The script at `path` from the root of the repository, run anew as a module of its name."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module
