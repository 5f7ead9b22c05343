"""The README, the doctor's page and the first ten minutes say what is so, and name what exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megapatch._cli.main import make_parser
from megapatch._engine.settings import matching
from megapatch._verify.command import _chosen
from megapatch.patch import Status
from megapatch.patches import PATCHES
from megapatch.patches._catalogue import CATALOGUE
from megapatch.reach import ray

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCTOR = (ROOT / "docs" / "doctor.md").read_text()


def test_the_commands_to_set_it_up_stand_alone():
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert blocks == ['pip install ".[demo]" && megapatch demo\n', "pip install tox && tox\n"]


def test_ci_runs_the_command_for_users():
    assert "pip install tox && tox\n" in README
    steps = (ROOT / ".ci" / "run").read_text()
    assert "\npip install tox && tox\n" in steps
    assert steps.rstrip().splitlines()[-1].startswith("tox -p 3 -m full ")


def test_every_status_is_explained():
    for status in Status:
        assert f"| `{status.value}` |" in DOCTOR


@pytest.mark.parametrize("family", CATALOGUE)
def test_each_frameworks_page_has_the_line_for_its_own_patches_alone(family):
    page = (ROOT / "docs" / f"{family}.md").read_text()
    (only,) = re.findall(r"^`MEGAPATCH_ONLY=(\S+)` applies these alone\.$", page, re.MULTILINE)
    rows = re.findall(r"^\|.*\|$", page.partition("| what you see |")[2].partition("\n\n")[0], re.MULTILINE)
    names = [name for names in CATALOGUE.values() for name in names]
    in_table = {name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z0-9-]+)`", row.split("|")[-2])}
    chosen = {name for pattern in only.split(",") for name in matching(pattern, names)}
    assert chosen == in_table | set(CATALOGUE[family])


@pytest.mark.parametrize("family", CATALOGUE)
def test_each_frameworks_page_has_the_patches_that_are_needed_first_with_their_reports(family):
    page = (ROOT / "docs" / f"{family}.md").read_text()
    table = page.partition("| first needed | changes numbers | report |\n")[2].partition("\n\n")[0]
    first = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    assert 3 <= len(first) <= 6
    known = {f"`{patch.name}`": patch for patch in PATCHES}
    for name, changes, report in first:
        patch = known[name]
        assert changes == ("yes" if patch.changes_numbers else "no: it is in")
        assert report == "not reported" if patch.upstream is None else report.endswith(f"]({patch.upstream})")


def test_the_figures_of_upstreams_tests_are_the_sums_of_their_table():
    page = (ROOT / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| [\w]+ \| (?:core_|Bridge )\S+ \| (\d+) \| (\d+) / .*$", page, re.MULTILINE)
    tests, passed = (f"{sum(map(int, column)):,}" for column in zip(*rows, strict=True))
    (of_those,) = re.findall(rf"Of the {tests} tests of .* {passed} pass without megapatch, and (\d+) of", page)
    assert f"{tests} unit tests have" in README
    assert f"{passed} of them pass, and {of_those} of these run patched functions" in README
    assert f"{tests} unit tests of" in (ROOT / "CHANGELOG.md").read_text()


# ------------------------------------------------------------------------ the first ten minutes
DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "first-ten-minutes.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)]


def test_the_commands_exist():
    ours = [words[1:] for words in COMMANDS if words[0] == "megapatch"]
    commands = [make_parser().parse_args(words).command for words in ours]
    assert commands == ["demo", "doctor", "verify", "doctor", "audit"]
    assert sorted(_chosen(ours[2][1:])) == sorted(ours[2][1:])


def test_the_line_of_pip_is_that_of_the_readme():
    (ours,) = [words[-1] for words in COMMANDS if "@COMMIT" in words[-1]]
    assert ours.replace("[demo]", "") in (DOCS.parent / "README.md").read_text()


def test_the_demos_last_line_is_that_of_the_readme():
    """Which tests/test_demo.py compares with what the demo prints."""
    (last,) = re.findall(r"ends\nwith `(.*)`", PAGE)
    assert f"\n{last}\n```" in (DOCS.parent / "README.md").read_text()


def test_the_loop_is_there():
    (words,) = [words for words in COMMANDS if "torchrun" in words]
    assert f"<!-- {words[-1]} -->\n```python" in PAGE
    assert "<!-- train_loop.py -->\n```python" in (DOCS / "megatron.md").read_text()


def test_each_framework_is_activated_as_its_own_page_says():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (slime|verl|SkyRL|NeMo-RL)", line)]
    assert len(rows) == 4
    for row in rows:
        words, page = re.search(r"\[`([^`]+)`\]\((\w+\.md)#activate\)", row).groups()
        assert words.rpartition(".")[2].removesuffix("()") in (DOCS / page).read_text()
        heading = re.search(r"\(reach\.md#([\w-]+)\)", row)[1]
        headings = re.findall(r"^### (.*)$", (DOCS / "reach.md").read_text(), re.MULTILINE)
        assert heading in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
    assert ray.compose_into_init
