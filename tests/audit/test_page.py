"""docs/audit.md has a section for every rule, and a row for every defect that changes numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import megapatch
from megapatch.audit import RULES
from megapatch.patches import PATCHES

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()


def test_every_rule_has_a_section():
    assert re.findall(r"^### (.*)$", PAGE, re.M) == list(RULES)


REPAIRS = {name for rule in RULES.values() for name in rule.patches}


def test_every_defect_that_breaks_a_rule_has_a_row():
    rows = re.findall(r"^\| `([a-z0-9_]+\.[a-z0-9_.-]+)` \|", PAGE, re.M)
    assert len(rows) == len(set(rows))
    assert REPAIRS <= set(rows) <= {patch.name for patch in PATCHES}


def test_repairs_are_patches():
    assert {patch.name for patch in PATCHES} >= REPAIRS


def test_off_it_is_not_imported():

    code = "import megapatch, sys; sys.exit('megapatch.audit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert megapatch.audit.findings() == []
