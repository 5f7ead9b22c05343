"""Versions: of modules, found without importing them, and megapatch's own, which names the commit."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megapatch import _version, _versions
from megapatch._cli import demo
from megapatch._python import finding


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A namespace package with a package whose import fails, as megatron.training's does without a GPU, and in
    that a folder that is no package, as SkyRL's workers/megatron."""
    package = tmp_path / "megapatch_test_namespace" / "package"
    (package / "folder").mkdir(parents=True)
    (package / "folder" / "module.py").write_text("raise RuntimeError('imported')")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "module.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("megapatch_test_namespace", True),
        ("megapatch_test_namespace.package.module", True),
        ("megapatch_test_namespace.package.folder.module", True),
        ("megapatch_test_namespace.package.folder.other", False),
        ("megapatch_test_namespace.package.other", False),
        ("megapatch_test_namespace.package.module.inner", False),
        ("megapatch_test_other.package", False),
    ],
)
def test_a_module_is_found_without_importing_it(tree, name, found):
    assert (finding.find_module(name) is not None) == found
    assert not [name for name in sys.modules if name.startswith("megapatch_test_namespace")]


def test_the_version_of_what_is_installed():
    import wrapt

    assert _versions.version_of("wrapt", "wrapt") == wrapt.__version__
    assert _versions.here()["wrapt"] == wrapt.__version__
    assert _versions.version_of("no-such-distribution", "megapatch_no_such_module") is None


@pytest.mark.parametrize("metadata", [None, b"Version: 1.0\xff\n", b"Name: megapatch-test-foreign\n"])
@pytest.mark.parametrize("source", ["", "[" * 100_000, "\0"])
def test_metadata_and_sources_of_others_may_be_broken(tmp_path, monkeypatch, metadata, source):
    package, info = tmp_path / "megapatch_test_foreign", tmp_path / "megapatch_test_foreign-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(source)
    if metadata is not None:
        (info / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert _versions.version_of("megapatch-test-foreign", "megapatch_test_foreign") == "unknown version"
    assert _versions.version_in_source(str(package)) is None


# What importing a real checkout of Megatron may run: torch, and git in a subprocess.
POISON = "import subprocess\nsubprocess.run(['git', 'rev-parse'])\nraise RuntimeError('imported')\n"


def checkout(folder, info, distribution=None, editable=False):
    """A source tree as it stands on PYTHONPATH; next to it, perhaps, an installed distribution of that name."""
    package = folder / "src" / "megapatch_test_tree" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(POISON)
    for name, text in info.items():
        (package / name).write_text(text)
    found = [str(folder / "src")]
    if distribution:
        metadata = folder / "site" / f"megapatch_test_tree-{distribution}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: megapatch-test-tree\nVersion: {distribution}\n"
        )
        if not editable:
            other = folder / "site" / "megapatch_test_tree" / "core"
            other.mkdir(parents=True)
            (other / "__init__.py").write_text(POISON)
        found.append(str(folder / "site"))
    return found


PACKAGE_INFO = "MAJOR = 0\nMINOR = 18\nPATCH = 0\nPRE_RELEASE = 'rc0'\n" + POISON


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ({"info": {"package_info.py": PACKAGE_INFO}}, "0.18.0rc0 (source)"),
        ({"info": {"package_info.py": PACKAGE_INFO}, "distribution": "0.15.3"}, "0.18.0rc0 (source)"),
        (
            {"info": {"package_info.py": PACKAGE_INFO}, "distribution": "0.15.3", "editable": True},
            "0.18.0rc0 (source)",
        ),
        ({"info": {"version.py": "__version__ = '2.1'\n" + POISON}}, "2.1 (source)"),
        ({"info": {"package_info.py": "MAJOR = compute()\n"}}, "unknown version (source)"),
        ({"info": {"package_info.py": "MAJOR = 'not closed\n"}}, "unknown version (source)"),
    ],
)
def test_a_checkout_is_read_and_not_imported(tmp_path, monkeypatch, case, told):
    monkeypatch.setattr(sys, "path", [*checkout(tmp_path, **case), *sys.path])
    importlib.invalidate_caches()
    assert _versions.version_of("megapatch-test-tree", "megapatch_test_tree.core") == told


def test_what_comes_first_on_the_path_is_told(tmp_path, monkeypatch):
    source, site = checkout(tmp_path, {"package_info.py": PACKAGE_INFO}, distribution="0.15.3")
    monkeypatch.setattr(sys, "path", [site, source, *sys.path])
    importlib.invalidate_caches()
    assert _versions.version_of("megapatch-test-tree", "megapatch_test_tree.core") == "0.15.3"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.10.0", "0.10.0 is too old: megapatch is tested with 0.12 to 0.19"),
        ("0.20.0rc0+abc (source)", "0.20.0rc0+abc (source) is newer than what megapatch is tested with"),
        ("0.16.1", "0.16.1; megapatch is tested with 0.12 to 0.19"),
        ("0.19.2", "0.19.2; megapatch is tested with"),
        ("unknown version (source)", "unknown version (source); megapatch is tested with"),
    ],
)
def test_a_reason_to_refuse_tells_the_version_found_and_those_tested(monkeypatch, version, words):
    monkeypatch.setattr(_versions, "version_of", lambda distribution, module: version)
    assert f"(megatron-core {words}" in _versions.remark("megatron.training.training")
    assert _versions.remark("megatron_other.core") == ""


def test_the_remark_is_empty_without_the_package(monkeypatch):
    monkeypatch.setattr(_versions, "version_of", lambda distribution, module: None)
    assert _versions.remark("megatron.core.anything") == ""


# ------------------------------------------------------------------------ megapatch's own version
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
    with (same / "megapatch/_version.py").open("a") as file:  # as a build does
        file.write("# changed\n")
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


@pytest.mark.parametrize(
    ("found", "before"),
    [("0.16.9", True), ("0.17.0rc1", False), ("0.18 (source)", False), ("unknown version", False), (None, False)],
)
def test_a_release_is_before_another_where_its_version_is_known(monkeypatch, found, before):
    asked = []
    monkeypatch.setattr(_versions, "version_of", lambda *names: asked.append(names) or found)
    assert _versions.is_before("0.17", "megatron-core", "megatron") is before
    assert _versions.is_before("0.17", "acme", "acme") is before
    assert asked == [("megatron-core", "megatron.core"), ("acme", "acme")]
