"""The README says what is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megapatch import report
from megapatch.patch import Status

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_patches_is_what_the_command_prints():
    shown = subprocess.run(
        [sys.executable, "-m", "megapatch", "list", "--markdown"], capture_output=True, text=True, check=True
    )
    begin, end = "`megapatch list --markdown` -->\n", "<!-- end of patches -->"
    table = README.partition(begin)[2].partition(end)[0]
    assert table.strip() == shown.stdout.strip(), "run `megapatch list --markdown` and paste its output"


def test_ci_runs_the_command_for_users():
    assert "pip install tox && tox\n" in README
    assert (ROOT / ".ci" / "run").read_text().endswith("\npip install tox && tox\n")


def test_every_status_is_explained():
    for status in Status:
        assert f"| `{status.value}` |" in README


def test_every_key_of_the_json_is_documented():
    def keys(told):
        for key, value in told.items():
            yield key
            for one in value if isinstance(value, list) else ():
                yield from keys(one) if isinstance(one, dict) else ()

    for key in keys(report().to_dict()):
        assert f"`{key}`" in README, key
