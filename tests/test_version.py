"""The version names the commit, or what the sources are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megapatch import _version
from megapatch._cli import demo

PACKAGE = Path(_version.__file__).parent
EXACT = "import sys; sys.path.insert(0, '.'); import megapatch._versions as v; print(v.exact_version())"


def exact_in(folder):
    command = [sys.executable, "-c", EXACT]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def copied(tmp_path):
    """Copies of the package, by what _version.py says in them."""

    def copy(version):
        place = tmp_path / f"copy {len(list(tmp_path.iterdir()))}"
        shutil.copytree(PACKAGE, place / "megapatch", ignore=shutil.ignore_patterns("__pycache__"))
        source = (PACKAGE / "_version.py").read_text()
        stated = f"__version__ = {_version.__version__!r}".replace("'", '"')
        assert stated in source
        (place / "megapatch/_version.py").write_text(source.replace(stated, f'__version__ = "{version}"'))
        return place

    return copy


@pytest.mark.parametrize("version", ["0.1.0", "0.1.0+g1234567"])
def test_a_release_and_a_clean_commit_are_named(copied, version):
    assert exact_in(copied(version)) == f"{version}\n"


@pytest.mark.parametrize("version", ["0.1.0+source", "0.1.0+unknown", "0.1.0+g1234567.changed"])
def test_other_sources_are_told_apart(copied, version):
    one, same, other, third = (copied(version) for _ in range(4))
    with (other / "megapatch/patch.py").open("a") as file:
        file.write("# changed\n")
    (third / "megapatch/more.py").write_text("")
    exact = exact_in(one)
    assert exact.startswith(f"{version}.") and len(exact.strip()) == len(version) + 9
    assert exact_in(same) == exact
    assert len({exact, exact_in(other), exact_in(third)}) == 3


@pytest.mark.parametrize(
    ("version", "commit"),
    [("0.1.0", ""), ("0.1.0+g1234567", "@1234567"), ("0.1.0+g1234567.changed", ""), ("0.1.0+source", "")],
)
def test_an_extra_is_that_of_the_same_commit(monkeypatch, version, commit):
    monkeypatch.setattr(demo, "__version__", version)
    found = Requirement(demo.requirement("demo").strip('"'))
    assert found.extras == {"demo"} and found.url == f"git+{_version.REPOSITORY}{commit}"


def test_a_source_tree_and_a_build_without_git_have_the_version_of_the_next_tag():
    configuration = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    number = _version.__version__.partition("+")[0]
    assert f'default-version = "{number}+unknown"' in configuration
    assert f'default-tag = "v{number}"' in configuration
    assert (Path(__file__).parent.parent / "CHANGELOG.md").read_text().startswith(f"# Changelog\n\n## {number} ")
