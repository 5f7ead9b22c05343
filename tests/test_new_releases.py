"""`python -m verdicts --new`: which releases there are no verdicts on, and what differs in them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from packaging.version import Version
from verdicts import new, releases, table

VERDICTS = table.read(table.FILE.read_text())
KNOWN = releases.read(releases.FILE.read_text())


def index(**of_project):
    return lambda project: sorted(map(Version, of_project.get(project.replace("-", "_"), "").split()))


def test_newer_patch_releases_and_later_minor_ones_are_missing():
    told = index(megatron_core="0.11.0 0.12.0 0.12.3 0.19.1 0.19.2 0.19.3 0.20.0 0.20.1", verl="0.6.0 0.7.0 0.9.1")
    assert list(map(str, new.missing(KNOWN, told))) == ["megatron-core==0.19.3", "megatron-core==0.20.1"]


def test_a_minor_release_that_was_left_out_is_missing():
    known = [release for release in KNOWN if release.name != "0.7.1"]
    (release,) = new.missing(known, index(verl="0.5.0 0.6.1 0.7.1 0.9.1"))
    assert release == releases.Release("verl", "0.7.1", ("megatron-core==0.16.1",))


def test_the_difference_to_the_release_before():
    before = {key: cells["0.9.0"] for key, cells in VERDICTS.items() if "0.9.0" in cells}
    known = [release for release in KNOWN if str(release) != "verl==0.9.1"]
    release = releases.Release("verl", "0.9.1")
    assert new.differences(release, before, known, VERDICTS) == []
    (key, cell), *_ = (item for item in before.items() if item[1].verdict == "needed")
    changed = {**before, key: table.Cell("unknown", "expected it, found something else"), ("a", "b.c"): cell}
    found = new.differences(release, changed, known, VERDICTS)
    assert f"{key[0]} at {key[1]}: unknown (expected it, found something else); needed in 0.9.0" in found
    assert f"a at b.c: needed ({cell.reason}); not in the table for 0.9.0" in found


def test_what_pip_tells():
    text = "verl (0.9.1)\nAvailable versions: 0.9.1, 0.9.0, 0.9.0rc1, 0.6.1\n"
    with mock.patch("subprocess.run", return_value=SimpleNamespace(stdout=text, stderr="")):
        assert list(map(str, new.on_index("verl"))) == ["0.6.1", "0.9.0", "0.9.1"]


def test_no_answer():
    answer = SimpleNamespace(stdout="", stderr="ERROR: No matching distribution found for verl")
    with (
        mock.patch("subprocess.run", return_value=answer),
        pytest.raises(new.NoAnswer, match="verl: ERROR: No match"),
    ):
        new.on_index("verl")
