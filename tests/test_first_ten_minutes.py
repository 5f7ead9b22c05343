"""docs/first-ten-minutes.md names commands, checks and headings that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megapatch._cli.main import make_parser
from megapatch._verify.command import _chosen
from megapatch.reach import ray

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
