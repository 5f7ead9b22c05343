"""`tox -e mutants`: which mutations it finds, how it reports one, and that its tables fit the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants.__main__ import sample
from mutants.find import mutations
from mutants.runs import ROOT, Copy
from mutants.tables import Equivalent, choice, chosen_for, equivalents, files_of, outdated, row_for

pytestmark = pytest.mark.nightly  # README's command runs it, too

ROOMS = (
    "_engine",
    "_nemo_rl_split_step",
    "_pausing",
    "audit",
    "patches",
    "streaming",
    "train_step",
    "weight_sync",
)
PATH = "megapatch/_engine/settings.py"
SOURCE = '''
def mean(total: int | None, count, log):
    """Mean of 2."""
    if count == 0 or total is None:
        raise ValueError(f"{count + 1}")
    try:
        call(total, count, strict=True)
    finally:
        restore()
        count.open = False
    log.info("took %s", total - 1)
    return total / count  # é
'''


def changes(source):
    return {(one.line, *one.change(source)) for one in mutations(PATH, source)}


@pytest.mark.parametrize(
    "change",
    [
        (4, "- if count == 0 or total is None:", "+ if count != 0 or total is None:"),
        (4, "- if count == 0 or total is None:", "+ if count == 1 or total is None:"),
        (4, "- if count == 0 or total is None:", "+ if count == 0 and total is None:"),
        (4, "- if count == 0 or total is None:", "+ if count == 0 or total is not None:"),
        (4, "- if count == 0 or total is None:", "+ if (count == 0):"),
        (4, "- if count == 0 or total is None:", "+ if False:"),
        (7, "- call(total, count, strict=True)", "+ pass"),
        (7, "- call(total, count, strict=True)", "+ call(count, total, strict=True)"),
        (7, "- call(total, count, strict=True)", "+ call(total, count, )"),
        (9, "- restore()", "- count.open = False", "+ pass"),
        (10, "- count.open = False", "+ pass"),
        (12, "- return total / count  # é", "+ return total * count  # é"),
    ],
    ids=lambda change: f"{change[0]}: {change[-1]}",
)
def test_it_finds(change):
    assert change in changes(SOURCE)


def test_texts_annotations_and_logs_stay():
    assert {line for line, *_ in changes(SOURCE)} == {4, 7, 9, 10, 12}


def test_every_mutation_compiles_and_differs():
    source = (ROOT / PATH).read_text()
    found = mutations(PATH, source)
    texts = {mutation.apply(source) for mutation in found}
    assert len(texts) == len(found) and source not in texts
    for text in texts:
        compile(text, PATH, "exec")


def test_a_seed_draws_the_same_ones():
    first = sample([PATH], 5, 0)
    assert first == sample([PATH], 5, 0) != sample([PATH], 5, 1)
    assert set(first) < set(sample([PATH], 9, 0))


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_has_tests_or_is_left_out(room):
    assert [path for path in files_of(room) if chosen_for(path) == ()] == []


def test_the_chosen_tests_exist():
    words = {word for chosen in choice().values() for word in chosen.split()}
    tests = Path(__file__).parent
    assert [word for word in sorted(words - {"-"}) if "{" not in word and not list(tests.glob(word))] == []


def test_each_row_of_the_chosen_tests_is_some_files():
    used = {row_for(path) for path in files_of("")}
    assert [row for row in choice() if row not in used] == []


def test_the_equivalents_exist():
    assert outdated(equivalents()) == []


def test_an_equivalent_that_is_gone_is_named():
    gone = Equivalent(PATH, "f", ("- a", "+ b"), "")
    assert outdated([gone]) == [
        f"{PATH} f has no such mutation: - a + b",
        f"{PATH} f is listed without a reason: - a + b",
    ]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("mutants"))


def of_settings(copy, removed):
    source = copy.source(PATH)
    return next(one for one in mutations(PATH, source) if removed in one.change(source))


def test_one_is_noticed_and_taken_back(copy):
    tests = ("test_settings.py",)
    before = copy.source(PATH)
    assert copy.check(tests) is None
    outcome = copy.run(of_settings(copy, "+ if False:"), tests)
    assert outcome.noticed and "test_settings.py" in outcome.how
    assert copy.source(PATH) == before == (ROOT / PATH).read_text()


def test_one_that_no_test_notices_survives(copy):
    tests = ("test_patch.py",)
    assert copy.check(tests) is None
    assert not copy.run(of_settings(copy, "+ if False:"), tests).noticed


def test_a_hang_is_noticed(copy, monkeypatch):
    """A test that takes for ever is ended, with what it has started."""
    (copy.folder / "tests/test_hang.py").write_text(
        "import subprocess, sys\nfrom pathlib import Path\n\n"
        f"def test_it():\n    if Path({str(copy.folder / PATH)!r}).read_text() != {copy.source(PATH)!r}:\n"
        "        subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    tests = ("test_hang.py",)
    assert copy.check(tests) is None
    monkeypatch.setattr(copy, "limit", lambda tests, stage: 3.0)
    outcome = copy.run(of_settings(copy, "+ if False:"), tests)
    assert outcome.noticed and outcome.how == "ended after 3 s"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--help"], "usage"),
        (["no_such_room"], "megapatch has no no_such_room"),
        (["_engine", "--count", "0"], "expected at least 1"),
        (["patches/verl"], "do not run in this environment"),
        ([], "ROOM"),
    ],
    ids=" ".join,
)
def test_usage(arguments, says):
    command = [sys.executable, "-m", "mutants", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == (0 if arguments == ["--help"] else 2)
    assert says in done.stdout + done.stderr
