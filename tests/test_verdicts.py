"""docs/verdicts.csv is what the diagnoses say here and elsewhere, and which releases it has no verdicts on."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from packaging.version import Version
from pages import verdicts
from verdicts import new, releases, table
from verdicts.process import CouldNotLook, verdicts_on

from megapatch import Patch
from megapatch._python.finding import find_module
from megapatch._versions import version_of
from megapatch.patches import PATCHES

ROOT = Path(__file__).parent.parent
FILE = table.FILE.read_text()
TOX = (ROOT / "tox.ini").read_text()
RELEASES = releases.read(releases.FILE.read_text())
SKYRL = Path(os.environ.get("SKYRL_RELEASES", "no such folder"))


def problems(file=FILE, patches=PATCHES, all_releases=RELEASES, tox=TOX):
    return table.problems(file, patches, all_releases, tox)


def differences(project, name, found):
    """Return where the file differs from the findings, in words. A site without a row is new."""
    said = table.read(FILE)
    return [
        f"{site[0]} at {site[1]}: {project} {name} is {cell.verdict} ({cell.reason}), docs/verdicts.csv says "
        f"{said[site].get(name)}; run tox -e verdicts"
        for site, cell in found.items()
        if site in said and said[site].get(name) not in (cell, table.NOT_LOOKED_AT)
    ]


def skip_unless_known(project, name, must=False):
    """In CI a wheel (`must`) is there because tox.ini installs it, and then it has to have a line."""
    if not any(one.project == project and one.name == name for one in RELEASES):
        text = f"{project} {name} has no line in tests/verdicts/releases.txt; add one and run tox -e verdicts"
        (pytest.fail if must and os.environ.get("CI") else pytest.skip)(text)


# ---------------------------------------------------------------- what is here
def test_of_megatron_core():
    if find_module("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    version = version_of("megatron-core", "megatron.core")
    skip_unless_known("megatron-core", version, must="source" not in version)
    assert differences("megatron-core", version, verdicts_on("megatron-core")) == []


def test_of_bridge():
    if find_module("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed")
    version = metadata.version("megatron-bridge")
    skip_unless_known("megatron-bridge", version, must=True)
    assert differences("megatron-bridge", version, verdicts_on("megatron-bridge")) == []


def test_of_nvrx():
    if find_module("nvidia_resiliency_ext") is None:
        pytest.skip("nvidia-resiliency-ext is not installed")
    version = metadata.version("nvidia-resiliency-ext")
    skip_unless_known("nvidia-resiliency-ext", version, must=True)
    assert differences("nvidia-resiliency-ext", version, verdicts_on("nvidia-resiliency-ext")) == []


@pytest.mark.skipif(not SKYRL.is_dir(), reason="SKYRL_RELEASES is not set")
def test_of_skyrl():
    found = {one.name: one for one in SKYRL.iterdir() if not one.name.startswith("checkout")}
    looked = {_skyrl(name): verdicts_on(_skyrl(name)[0], found[name]) for name in sorted(found)}
    wrong = [text for release, cells in looked.items() for text in differences(*release, cells)]
    assert found and wrong == []


@pytest.mark.parametrize(
    ("project", "variable"),
    [("verl", "VERL_RELEASES"), ("ms-swift", "SWIFT_RELEASES"), ("areal", "AREAL_RELEASES")],
)
def test_of_wheels_in_a_folder(project, variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set")
    found = {one.name.removeprefix(f"{project}-"): one for one in Path(os.environ[variable]).iterdir()}
    for name in found:
        skip_unless_known(project, name, must=True)
    looked = {name: verdicts_on(project, found[name]) for name in sorted(found)}
    wrong = [text for name, cells in looked.items() for text in differences(project, name, cells)]
    assert found and wrong == []


def _skyrl(name):
    project, version = name.split("-")
    skip_unless_known(project.replace("_", "-"), version, must=True)
    return project.replace("_", "-"), version


@pytest.mark.parametrize("variable", ["SLIME_CHECKOUT", "NEMO_RL_CHECKOUT"])
def test_of_a_checkout(variable):
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} is not set")
    package = {"SLIME_CHECKOUT": "slime", "NEMO_RL_CHECKOUT": "nemo_rl"}[variable]
    project = package.replace("_", "-") if (Path(folder) / package).is_dir() else "miles"
    name = _release_of(folder, project)
    if name is None:
        pytest.skip("git does not say which tag or commit it is, or it has no line in releases.txt")
    assert differences(project, name, verdicts_on(project, folder)) == []


def _release_of(folder, project):
    """The release whose tag or commit is checked out there; None where git cannot tell, or it is none."""

    def git(*arguments):
        asked = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
        return asked.stdout.split()

    here = [*git("rev-parse", "HEAD"), *git("tag", "--points-at", "HEAD")]
    known = [one.name for one in RELEASES if one.project == project]
    return next((name for name in known if any(one == name or one.startswith(name) for one in here)), None)


@pytest.mark.thorough
def test_what_cannot_be_imported_is_an_error(fake_megatron):
    if find_module("torch") is None:
        pytest.skip("torch is not installed")
    with pytest.raises(CouldNotLook, match="distributed_data_parallel cannot be imported: ModuleNotFoundError"):
        verdicts_on("megatron-core", fake_megatron("import no_such_torch"))


@pytest.mark.parametrize("project", ["skyrl", "skyrl-train"])
def test_what_a_project_silently_does_without_is_named(monkeypatch, project):
    pytest.importorskip("torch")
    look = importlib.import_module("verdicts.look")
    monkeypatch.setattr(look, "find_module", lambda name: None)
    assert look.lacks(project) == [f"importing {project} takes cloudpickle, which is not installed here"]
    assert look.lacks("megatron-core") == []


# ---------------------------------------------------------------- what can be told without
def test_the_file_is_whole():
    assert problems() == [], "run tox -e verdicts"


def test_a_cell_that_differs():
    (site, cells), *_ = table.read(FILE).items()
    name, cell = next(iter(cells.items()))
    assert differences("areal", name, {site: cell}) == []
    (text,) = differences("areal", name, {site: cell._replace(reason="another")})
    assert "run tox -e verdicts" in text and "another" in text
    assert len(differences("areal", "0.0", {site: cell})) == 1


def test_the_page_has_a_row_for_each_release_with_the_patches_that_it_needs():
    page = verdicts.page()
    rows = dict(re.findall(r'^\| <a id="([^"]+)"></a>(.*)$', page, re.MULTILINE))
    assert list(rows) == [verdicts.anchor(str(one)) for one in RELEASES]
    headings = set(re.findall(r"^## (.*)$", page, re.MULTILINE))
    for release in RELEASES:
        needed = {
            patch
            for (patch, module), cells in table.read(FILE).items()
            if releases.project_of(module) == release.project and cells[release.name].verdict == "needed"
        }
        named = re.findall(r"\[`([^`]+)`\]", rows[verdicts.anchor(str(release))])
        assert len(named) == len(set(named))
        assert set(named) == needed <= headings


def test_each_thing_that_can_be_wrong():
    first, *others = PATCHES
    rows = FILE.splitlines(keepends=True)
    row = next(row for row in rows if '"0.12.3, ' in row and ",needed," in row)

    def linked(upstream):
        return [Patch(first.name, first.doc, upstream, first.sites), *others]

    def edited(old, new):
        return FILE.replace(row, row.replace(old, new), 1)

    new = "megatron.gone,megatron.core,megatron-core,0.12.3,needed,because\n"
    fixed = [line.replace(",needed,", ",fixed,") if line.startswith(f"{first.name},") else line for line in rows]
    cases = {
        "says unknown of 0.12.3": {"file": edited(",needed,", ",unknown,")},
        "says not looked at of 0.12.3": {"file": edited(",needed,", ",not looked at,")},
        "megatron.gone at megatron.core has verdicts, and is not a site": {"file": FILE + new},
        "no verdict on 0.12.3": {"file": edited("0.12.3, ", "")},
        "0.99.0 is not in releases.txt": {"file": edited("0.12.3", "0.99.0, 0.12.3")},
        f"{first.name} has expired": {"file": "".join(fixed)},
        "expected the URL of an issue": {"patches": linked("https://github.com/a/b")},
        "found ''": {"patches": linked("")},
        "tox.ini installs megatron-core==0.99.0": {"tox": f"{TOX}\n    {{[megatron]install}}==0.99.0"},
        "tox.ini installs megatron-bridge==0.9.9": {"tox": f"{TOX}\n    {{[bridge]install}}==0.9.9"},
        "tox.ini installs skyrl-train==0.9.9": {"tox": f"{TOX}\n    pip install skyrl-train==0.9.9"},
        "no verdict on 0.99.1": {"all_releases": [*RELEASES, releases.Release("megatron-core", "0.99.1")]},
        "imports with megatron-core==0.99.2": {
            "all_releases": [*RELEASES, releases.Release("slime", "v9", ("megatron-core==0.99.2",))]
        },
        "not what would be written": {"file": edited("megatron-core", "slime")},
        "two verdicts": {"file": edited(row, row + row)},
        "expected the columns": {"file": edited(row, row.replace(",", ";"))},
    }
    for text, doctored in cases.items():
        assert any(text in one for one in problems(**doctored)), (text, problems(**doctored))


def test_a_new_patch_has_no_verdicts_yet():
    """Nor has a patch that was looked at by someone without the checkouts any on these."""
    (name, module), _ = next(iter(table.read(FILE).items()))
    rows = [row for row in FILE.splitlines(keepends=True) if not row.startswith(f"{name},{module},")]
    assert problems(file="".join(rows)) == []
    found = {key: dict(cells) for key, cells in table.read(FILE).items()}
    for (_, module), cells in found.items():
        for one in RELEASES:
            if one.project == releases.project_of(module) and not one.is_wheel:
                del cells[one.name]
    text = table.write(found, PATCHES, RELEASES)
    assert ",not looked at," in text and problems(file=text) == []


def test_what_is_written_is_read_again():
    patch = next(patch for patch in PATCHES if patch.family == "megatron")
    site = patch.name, patch.sites[0].module
    cells = {"0.12.3": table.Cell("needed", 'a "b", c'), "0.13.1": table.Cell("needed", 'a "b", c')}
    cells["0.14.0"] = table.Cell("fixed", "done")
    text = table.write({site: cells}, PATCHES, RELEASES)
    assert '"0.12.3, 0.13.1",needed,"a ""b"", c"\n' in text
    assert table.read(text) == {site: {**cells, "1dcf0daf": table.NOT_LOOKED_AT}}


def test_a_line_that_means_nothing_is_refused():
    for line in ("megatron-cor 0.1", "megatron-core", "slime v1 megatron-core"):
        with pytest.raises(ValueError, match="expected `project release"):
            releases.read(line)


# ------------------------------------------------------------------------ python -m verdicts --new
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
