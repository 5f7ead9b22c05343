"""docs/audit.md has a section for every rule, and the patches that rules name exist."""

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


def test_repairs_are_patches():
    assert {patch.name for patch in PATCHES} >= {name for rule in RULES.values() for name in rule.patches}


def test_off_it_is_not_imported():

    code = "import megapatch, sys; sys.exit('megapatch.audit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert megapatch.audit.findings() == []
