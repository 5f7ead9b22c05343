"""The tests of `tox -e quick`. CI leaves them out where it would run them again.

Of each of Megatron's patches, those with the marker `quick`: one that shows the defect, where that takes no run of
its own, and one that shows the repair. Of TrainStep, some cases, which get the marker here.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent

# A wrong divisor in TrainStep fails here, too.
OF_TRAIN_STEP = {
    f"train_step/test_parity.py::test_a_step_in_pieces_is_megatrons_step[{case}-uneven]"
    for case in ("dp2, tokens, overlap", "dp2, distributed optimizer, both", "dp2, fp16", "pp2, tokens")
}
OF_PATCHES = {
    f"{file.relative_to(TESTS).as_posix()}::{test}"
    for file in TESTS.glob("patches/megatron/test_*.py")
    for test in re.findall(r"^@pytest\.mark\.quick\ndef (\w+)", file.read_text(), re.MULTILINE)
}
QUICK = OF_TRAIN_STEP | OF_PATCHES


def is_quick(nodeid: str) -> bool:
    """Return whether a test, as pytest names it, is one of them; with all its parameters, if QUICK names none."""
    place = nodeid.removeprefix("tests/")
    return place in QUICK or place.partition("[")[0] in QUICK
