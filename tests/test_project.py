"""Packaging, README and CI say the same."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()


def readme_command(name: str) -> str:
    found = re.findall(rf"^<!-- command: {name} -->\n```bash\n(.*)\n```$", README, flags=re.MULTILINE)
    assert len(found) == 1, f"README must have one single-line command {name!r}"
    return str(found[0])


def test_readme_commands_do_all_set_up() -> None:
    torch, venv = ".venv/bin/pip install torch==2.13.0", "python3 -m venv .venv"
    assert readme_command("report").split(" && ") == [
        venv,
        torch,
        ".venv/bin/pip install -e .",
        ".venv/bin/python -m cute_attn.bench --dtype fp8",
    ]
    assert readme_command("tests").split(" && ") == [
        venv,
        torch,
        '.venv/bin/pip install -e ".[test]"',
        ".venv/bin/python -m pytest -n 2 --dist loadfile",
    ]


def test_ci_runs_the_readme_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    [extract] = re.findall(r"^readme_command\(\) \{.*?\n\}$", script, flags=re.MULTILINE | re.DOTALL)
    for name in ("report", "tests"):
        done = subprocess.run(
            ["bash", "-euc", f"{extract}\nreadme_command {name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == readme_command(name) + "\n"
    assert "tests_command=$(readme_command tests)" in script
    assert 'step tests bash -euo pipefail -c "$tests_command"' in script


def test_every_package_folder_is_packaged() -> None:
    folders = {
        ".".join(("cute_attn", *path.parent.relative_to(ROOT / "cute_attn").parts))
        for path in (ROOT / "cute_attn").rglob("*.py")
    } | {
        ".".join(("cute_attn.kernels", *path.parent.relative_to(ROOT / "kernels").parts))
        for path in (ROOT / "kernels").rglob("*.py")
    }
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])
    for package in folders:
        folder = ROOT.joinpath(*package.replace("cute_attn.kernels", "kernels").split("."))
        assert (folder / "__init__.py").is_file(), f"{package} needs an __init__.py"


def test_kernels_are_sources_alone() -> None:
    """The tree id of the folder says what was measured: nothing else may be in it."""
    found = [
        path for path in (ROOT / "kernels").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert found and {path.suffix for path in found} == {".py"}


def test_versions_agree() -> None:
    import cute_attn

    version = PROJECT["project"]["version"]
    assert cute_attn.__version__ == version
    assert importlib.metadata.version("cute-attn") == version


@pytest.mark.parametrize("extra", ["test", "plot", "models", "peers"])
def test_extras_exist(extra: str) -> None:
    assert extra in (importlib.metadata.metadata("cute-attn").get_all("Provides-Extra") or [])
    assert f"`{extra}`" in README
