"""Samples of output in the documentation are what megapatch prints.

`python test_samples.py`, in this folder, writes them again.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from rigs.command import run
from rigs.needs import needs_megatron

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "slime.md"

# The actor holds train() and save() by name before megapatch is there, as with --custom-megatron-init-path.
SCRIPT = """
import slime.backends.megatron_utils.actor, megapatch
from megapatch._reporting.terminal import NO_TERMINAL
(entry,) = [one for one in megapatch.report().patches if one.patch.name == "slime.train-reentry"]
print("\\n".join(entry.lines(NO_TERMINAL)))
"""
SAMPLE = re.compile(r"(?<=```text\n)[a-z-]+ +slime\.train-reentry.*\n(?:(?!```).*\n)*")


def sample():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slime").symlink_to(HERE / "imitations" / "slime")  # and without miles beside it
        shown = run("-c", SCRIPT, path=folder)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@needs_megatron
def test_the_sample_report_in_the_page_on_slime():
    (found,) = SAMPLE.findall(PAGE.read_text())
    assert found == sample(), "if this is meant: cd tests && python test_samples.py"


if __name__ == "__main__":
    PAGE.write_text(SAMPLE.sub(lambda found: sample(), PAGE.read_text()))
