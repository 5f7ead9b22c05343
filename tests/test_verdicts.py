"""docs/verdicts.md is what the diagnoses say: of what is installed here, and as far as can be told without."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from rigs.audit import WATCHERS
from verdicts import needs, releases, table
from verdicts.process import CouldNotLook, verdicts_on

from megapatch import Patch
from megapatch._versions import find_module, version_of
from megapatch.patches import PATCHES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/verdicts.md").read_text()
TOX = (ROOT / "tox.ini").read_text()
RELEASES = releases.read(releases.FILE.read_text())
SKYRL = Path(os.environ.get("SKYRL_RELEASES", "no such folder"))


JUDGED = (*PATCHES, *WATCHERS)


def problems(page=PAGE, patches=JUDGED, all_releases=RELEASES, tox=TOX):
    return table.problems(page, patches, all_releases, tox)


def differences(project, name, found, page=PAGE):
    """Return the differences of the page from the findings, in words."""
    said = {site: cells.get(name) for site, cells in table.read(page).items()}
    return [
        f"{patch} at {module}: {project} {name} is {cell.verdict} ({cell.reason}), docs/verdicts.md says "
        f"{said.get((patch, module))}; run tox -e verdicts"
        for (patch, module), cell in found.items()
        if said.get((patch, module)) != cell
    ]


def skip_unless_on_the_page(project, name, must=False):
    """In CI a wheel (`must`) is there because tox.ini installs it, and then it has to have a line."""
    if not any(one.project == project and one.name == name for one in RELEASES):
        text = f"{project} {name} has no line in tests/verdicts/releases.txt; add one and run tox -e verdicts"
        (pytest.fail if must and os.environ.get("CI") else pytest.skip)(text)


# ---------------------------------------------------------------- what is here
def test_of_megatron_core():
    if find_module("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    version = version_of("megatron-core", "megatron.core")
    skip_unless_on_the_page("megatron-core", version, must="source" not in version)
    assert differences("megatron-core", version, verdicts_on("megatron-core")) == []


def test_the_audit_watches_all_that_is_there():
    if find_module("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    watched = {site: cell for site, cell in verdicts_on("megatron-core").items() if site[0].startswith("audit.")}
    assert len(watched) > 10
    assert {cell.verdict for cell in watched.values()} <= {"needed", "absent"}, watched


def test_of_bridge():
    if find_module("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed")
    version = metadata.version("megatron-bridge")
    skip_unless_on_the_page("megatron-bridge", version, must=True)
    assert differences("megatron-bridge", version, verdicts_on("megatron-bridge")) == []


def test_of_nvrx():
    if find_module("nvidia_resiliency_ext") is None:
        pytest.skip("nvidia-resiliency-ext is not installed")
    version = metadata.version("nvidia-resiliency-ext")
    skip_unless_on_the_page("nvidia-resiliency-ext", version, must=True)
    assert differences("nvidia-resiliency-ext", version, verdicts_on("nvidia-resiliency-ext")) == []


@pytest.mark.skipif(not SKYRL.is_dir(), reason="SKYRL_RELEASES is not set")
def test_of_skyrl():
    found = {one.name: one for one in SKYRL.iterdir() if not one.name.startswith("checkout")}
    with ThreadPoolExecutor(2) as pool:
        looked = {name: pool.submit(verdicts_on, _skyrl(name)[0], found[name]) for name in sorted(found)}
        wrong = [text for name, cells in looked.items() for text in differences(*_skyrl(name), cells.result())]
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
        skip_unless_on_the_page(project, name, must=True)
    with ThreadPoolExecutor(2) as pool:
        looked = {name: pool.submit(verdicts_on, project, found[name]) for name in sorted(found)}
        wrong = [text for name, cells in looked.items() for text in differences(project, name, cells.result())]
    assert found and wrong == []


def _skyrl(name):
    project, version = name.split("-")
    skip_unless_on_the_page(project.replace("_", "-"), version, must=True)
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
def test_the_page_is_whole():
    assert problems() == [], "run tox -e verdicts"


def test_a_cell_that_differs_is_told():
    (site, cells), *_ = table.read(PAGE).items()
    name, cell = next(iter(cells.items()))
    assert differences("megatron-core", name, {site: cell}) == []
    (told,) = differences("megatron-core", name, {site: cell._replace(reason="another")})
    assert "run tox -e verdicts" in told and "another" in told
    assert len(differences("megatron-core", "0.0", {site: cell})) == 1


def test_each_release_has_a_row_with_the_patches_that_it_needs():
    rows = dict(re.findall(r'^\| <a id="([^"]+)"></a>(.*)$', PAGE, re.MULTILINE))
    assert list(rows) == [needs.anchor(str(one)) for one in sorted(RELEASES, key=_in_order)]
    headings = set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    for release in RELEASES:
        needed = {
            patch
            for (patch, module), cells in table.read(PAGE).items()
            if releases.project_of(module) == release.project and cells[release.name].verdict == "needed"
        }
        named = re.findall(r"\[`([^`]+)`\]", rows[needs.anchor(str(release))])
        assert len(named) == len(set(named))
        assert set(named) == {name for name in needed if not name.startswith("audit.")} <= headings


def _in_order(release):
    return list(releases.PACKAGES).index(release.project)


def test_each_thing_that_can_be_wrong_is_told():
    first, *others = PATCHES

    def linked(upstream):
        return [Patch(first.name, first.doc, upstream, first.sites), *others, *WATCHERS]

    row = next(line for line in PAGE.splitlines() if line.startswith("| 0.1"))
    columns = row.split(" | ")
    new = f"{PAGE}\n## megatron.gone\n\nAt `megatron.core`:\n"
    cases = {
        "says unknown of 0.12.3": {"page": PAGE.replace(row, " | ".join([columns[0], "unknown", columns[2]]), 1)},
        f"{first.name} at {first.sites[0].module} has no table": {
            "page": PAGE.replace(f"## {first.name}\n", "", 1).replace(f"At `{first.sites[0].module}`", "", 1)
        },
        "megatron.gone at megatron.core has a table, and is no site": {"page": new},
        "nothing is said of 0.12.3": {"page": PAGE.replace(row, row.replace("0.12.3, ", ""), 1)},
        "0.99.0 is not in releases.txt": {"page": PAGE.replace(row, row.replace("0.12.3", "0.99.0, 0.12.3"), 1)},
        f"{first.name} has expired": {"page": _fixed_everywhere(first)},
        "expected the URL of an issue": {"patches": linked("https://github.com/a/b")},
        "found ''": {"patches": linked("")},
        "tox.ini installs megatron-core==0.99.0": {"tox": f"{TOX}\n    {{[megatron]install}}==0.99.0"},
        "tox.ini installs megatron-bridge==0.9.9": {"tox": f"{TOX}\n    {{[bridge]install}}==0.9.9"},
        "tox.ini installs skyrl-train==0.9.9": {"tox": f"{TOX}\n    pip install skyrl-train==0.9.9"},
        "nothing is said of 0.99.1": {"all_releases": [*RELEASES, releases.Release("megatron-core", "0.99.1")]},
        "imports with megatron-core==0.99.2": {
            "all_releases": [*RELEASES, releases.Release("slime", "v9", ("megatron-core==0.99.2",))]
        },
        "not what would be written": {"page": PAGE.replace(first.summary, "Something else.", 1)},
        "tells twice of 0.12.3": {"page": PAGE.replace(row, f"{row}\n{row}", 1)},
    }
    for told, doctored in cases.items():
        assert any(told in one for one in problems(**doctored)), (told, problems(**doctored))


def _fixed_everywhere(patch):
    verdicts = table.read(PAGE)
    for (name, _), cells in verdicts.items():
        if name == patch.name:
            cells.update((release, cell._replace(verdict="fixed")) for release, cell in cells.items())
    return table.write(verdicts, JUDGED, RELEASES)


def test_what_is_written_is_read_again():
    patch = next(patch for patch in PATCHES if patch.family == "megatron")
    site = patch.name, patch.sites[0].module
    cells = {"0.12.3": table.Cell("needed", "a | b, c"), "0.13.1": table.Cell("needed", "a | b, c")}
    cells["0.14.0"] = table.Cell("fixed", "done")
    text = table.write({site: cells}, PATCHES, RELEASES)
    assert "| 0.12.3, 0.13.1 | needed | a \\| b, c |\n| 0.14.0 | fixed | done |\n" in text
    assert {key: value for key, value in table.read(text).items() if value} == {site: cells}


def test_a_line_that_means_nothing_is_refused():
    for line in ("megatron-cor 0.1", "megatron-core", "slime v1 megatron-core"):
        with pytest.raises(ValueError, match="expected `project release"):
            releases.read(line)
