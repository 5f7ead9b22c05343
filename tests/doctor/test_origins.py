"""Where packages come from, read from metadata and asked of git, with nothing imported."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from megapatch._cli.doctor import origins

ONE = "1" * 40


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Makes folders on the path with a package whose import fails; `info`: files of its metadata."""

    def make(folder, info=None, beside=None, package="megapatch_test_origin"):
        source = tmp_path / folder
        (source / package).mkdir(parents=True)
        (source / package / "__init__.py").write_text("__version__ = '2.0'\nraise RuntimeError('imported')")
        if info is not None:
            metadata = (tmp_path / beside if beside else source) / "acme_origin-1.5.dist-info"
            metadata.mkdir(parents=True)
            (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-origin\nVersion: 1.5\n")
            for name, text in info.items():
                (metadata / name).write_text(text if isinstance(text, str) else json.dumps(text))
        for one in filter(None, (folder, beside)):
            monkeypatch.syspath_prepend(str(tmp_path / one))
        importlib.invalidate_caches()
        return source

    return make


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(origins, "RELEVANT", (("acme-origin", "megapatch_test_origin"),))

    def packages(*others):
        python, *found = origins.packages(others)
        assert (python.name, python.origin, python.path) == ("python", "interpreter", sys.executable)
        assert not [name for name in sys.modules if name.startswith("megapatch_test_origin")]
        return found

    return packages


def git(folder, head):
    """Make a repository; git asks for no commit where it looks for its name."""
    for name in ("objects", "refs"):
        (folder / ".git" / name).mkdir(parents=True)
    (folder / ".git/HEAD").write_text(f"{head}\n")


def test_an_installation(place, told):
    source = place("site", info={"RECORD": ""})
    (one,) = told()
    assert one == ("acme-origin", "1.5", "installed", str(source), None)
    assert str(one) == f"installed {source}"


def test_an_installation_of_a_commit(place, told):
    url = {"url": "https://example.com/acme.git", "vcs_info": {"vcs": "git", "commit_id": ONE}}
    source = place("site", info={"RECORD": "", "direct_url.json": url})
    (one,) = told()
    assert str(one) == f"installed {source} at 111111111111"


def test_an_editable_installation(place, told, tmp_path):
    url = {"url": (tmp_path / "a checkout").as_uri(), "dir_info": {"editable": True}}
    source = place("a checkout/src", info={"RECORD": "", "direct_url.json": url}, beside="site")
    git(tmp_path / "a checkout", ONE)
    assert told() == [("acme-origin", "2.0", "checkout", str(source.parent), ONE)]


def test_a_checkout_with_metadata_beside_its_sources(place, told):
    source = place("checkout", info={})  # as `pip install -e` and builds leave them
    git(source, ONE)
    assert told() == [("acme-origin", "2.0", "checkout", str(source), ONE)]


def test_a_folder(place, told):
    source = place("folder")
    assert told() == [("acme-origin", "2.0", "checkout", str(source), None)]


def test_what_is_not_here_is_not_told(told):
    assert told() == []


def test_metadata_that_cannot_be_read(place, told):
    source = place("site", info={"RECORD": "", "direct_url.json": "[not json"})
    assert told() == [("acme-origin", "1.5", "installed", str(source), None)]


def test_a_part_that_comes_from_elsewhere(place, told, monkeypatch):
    inner = ("acme-origin", "megapatch_test_origin_training")
    monkeypatch.setattr(origins, "RELEVANT", (*origins.RELEVANT, inner))
    wheel = place("site", info={"RECORD": ""})
    (wheel / inner[1]).mkdir()
    (wheel / inner[1] / "__init__.py").touch()
    assert told() == [("acme-origin", "1.5", "installed", str(wheel), None)]  # not told twice
    place("site/below", package=inner[1])
    assert told() == [
        ("acme-origin", "1.5", "installed", str(wheel), None),
        (inner[1], "2.0", "checkout", str(wheel / "below"), None),
    ]


@pytest.mark.parametrize(
    ("head", "commit"),
    [(ONE, ONE), ("ref: refs/heads/main", None), ("nonsense", None)],  # before the first commit; nobody's
)
def test_the_commit_of_a_checkout(tmp_path, head, commit):
    git(tmp_path, "2" * 40)
    git(tmp_path / "below", head)
    assert origins.commit_of(str(tmp_path / "below")) == commit


def test_without_git_and_with_one_that_hangs_the_commit_is_unknown(tmp_path, monkeypatch):
    git(tmp_path, ONE)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert origins.commit_of(str(tmp_path)) is None
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(origins, "_SECONDS", 0.2)
    assert origins.commit_of(str(tmp_path)) is None
