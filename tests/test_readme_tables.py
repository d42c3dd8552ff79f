"""scripts/readme_tables.py: README's tables are those of the records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tables_are_those_of_the_records() -> None:
    command = [sys.executable, ROOT / "scripts" / "readme_tables.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run scripts/readme_tables.py"
