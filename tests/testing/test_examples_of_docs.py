"""The examples of docs/ that have a file name work as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rigs.needs import needs_megatron

pytestmark = needs_megatron
DOCS = Path(__file__).parent.parent.parent / "docs"


def run_examples(page, names, folder):
    """Write the page's examples of these names into the folder, and run what pytest finds in it."""
    text = (DOCS / page).read_text()
    for name in names:
        example = re.search(rf"<!-- {re.escape(name)} -->\n```python\n(.*?)```", text, re.DOTALL)
        (folder / name).write_text(example[1])
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout
    assert "1 passed" in shown.stdout


def test_a_patch_with_its_test(tmp_path):
    run_examples("writing-a-patch.md", ("acme_patches.py", "test_acme_patches.py"), tmp_path)


def test_losses_of_two_stages(tmp_path):
    run_examples("testing.md", ("test_losses.py",), tmp_path)
