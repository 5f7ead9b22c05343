"""Doctor says that all is well only of the user's own Megatron, and where every setting means something."""

from __future__ import annotations

import pytest
from rigs.command import run
from rigs.where import needs_megatron

from megapatch.audit._settings import bad_values
from megapatch.patches._catalogue import CATALOGUE

PACKAGES = {name.partition(".")[0] for family in CATALOGUE.values() for names in family.values() for name in names}

# An environment without Megatron and frameworks, whatever is installed.
BARE = f"""
import sys, megapatch._python.finding as finding
find = finding.find_module
finding.find_module = lambda name: None if name.partition(".")[0] in {PACKAGES} else find(name)
from megapatch._cli.main import main
sys.exit(main(["doctor", *ARGUMENTS]))
"""

FINE = "class DistributedDataParallel: pass\n"


def bare(*arguments, path="", **settings):
    return run("-c", BARE.replace("ARGUMENTS", str(list(arguments))), path=path, **settings)


def assert_nothing_to_patch(shown):
    assert "all well" not in shown.stdout
    assert "nothing to patch is installed here" in shown.stderr
    assert shown.returncode == 2


@needs_megatron  # for its torch, which the audit watches
@pytest.mark.parametrize("arguments", [[], ["--no-import"]], ids=" ".join)
def test_the_audits_own_sites_are_nothing_to_patch(arguments):
    assert_nothing_to_patch(bare(*arguments, MEGAPATCH_AUDIT="1"))


@pytest.mark.parametrize(("setting", "value"), [("DISABLE", "*"), ("ONLY", "slime.*")])
def test_nor_is_what_was_switched_off(setting, value):
    assert_nothing_to_patch(bare(**{f"MEGAPATCH_{setting}": value}))


def test_nor_is_what_others_patch(tmp_path):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megapatch.patches]\nacme_target = acme:PATCH\n")
    (tmp_path / "acme_target.py").write_text("def greet(): pass\n")
    (tmp_path / "acme.py").write_text(
        "from megapatch import FIXED, Patch, Site, Verdict\n"
        "SITE = Site('acme_target', lambda module: Verdict(FIXED, 'so'), replace={'greet': lambda greet: greet})\n"
        "PATCH = Patch('acme.louder', 'Loud.', None, (SITE,))\n"
    )
    shown = bare(path=tmp_path)
    assert "acme.louder" in shown.stdout
    assert_nothing_to_patch(shown)


def test_a_number_that_means_nothing_is_a_problem():
    expected = "expected a number of steps, 1 or more; it is taken for 50"
    for value in ("abc", "0", "-1", "1.5", "10 steps"):
        assert bad_values({"MEGAPATCH_AUDIT_EVERY": value}) == [f"MEGAPATCH_AUDIT_EVERY={value}: {expected}"]
    assert bad_values({"MEGAPATCH_AUDIT_EVERY": " 20 "}) == []


def test_a_folder_in_which_no_rank_can_write_is_a_problem(fake_megatron, tmp_path):
    (tmp_path / "file").touch()
    for folder, code in (("new", 0), ("file", 2), ("file/below", 2)):
        report = str(tmp_path / folder)
        shown = run("doctor", path=fake_megatron(FINE), MEGAPATCH_DISABLE="megatron.*", MEGAPATCH_REPORT=report)
        assert (shown.returncode, f"MEGAPATCH_REPORT={report}: expected" in shown.stderr) == (code, code == 2)
        assert "all well" not in shown.stdout or not code
    assert not (tmp_path / "new").exists()


def test_a_path_that_is_named_like_a_secret_is_told(tmp_path):
    path = tmp_path / "passwd"
    assert run("doctor", str(path)).stderr.endswith(f"with the files of ranks, found none at {path}\n")


def test_nothing_is_well_where_everything_is_switched_off(fake_megatron):
    shown = run("doctor", path=fake_megatron(FINE), MEGAPATCH_DISABLE="*")
    assert "all well" not in shown.stdout
    assert shown.stdout.endswith("\nnothing was diagnosed, so this does not say whether all is well\n")
    assert "disabled on purpose: " in shown.stderr and shown.returncode == 0
