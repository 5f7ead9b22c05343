"""The README's patch of a third party works as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def example(name):
    return re.search(rf"<!-- {re.escape(name)} -->\n```python\n(.*?)```", README, re.DOTALL)[1]


def test_a_patch_with_its_test(tmp_path):
    files = {name: example(name) for name in ("acme_patches.py", "test_acme_patches.py")}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    written = [line for text in files.values() for line in text.splitlines() if line]
    assert len(written) < 25
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout
    assert "1 passed" in shown.stdout
