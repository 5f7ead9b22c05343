"""The pages in docs/ and the README: what is generated is up to date, and what they name is there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ADDRESS, COMMAND, DOCS, GENERATED, OF_THE_SITE, ROOT, api, with_address

import megapatch
from megapatch._version import REPOSITORY
from megapatch.audit import Finding
from megapatch.audit._findings import Repair

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.glob("*.md"))]
SOURCES = sorted((Path(megapatch.__file__).parent / "_cli").rglob("*.py"))
FILES = f"{REPOSITORY}/blob/main/"
NAME = "/megapatch"

named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.parametrize("name", GENERATED)
def test_what_is_generated_is_up_to_date(name):
    assert (ROOT / name).read_text() == GENERATED[name](), f"{name} is out of date: {COMMAND}"


def test_every_address_of_the_project_is_the_one_setting():
    """A fork or a mirror changes REPOSITORY in megapatch/_version.py, and runs the command."""
    assert not [path.name for path in with_address()], f"these have another address: {COMMAND}"
    assert ADDRESS.sub("-", f"https://git.example/a/b{NAME}/issues, {REPOSITORY}#x") == "-/issues, -#x"


def test_the_finding_on_the_audits_page_is_what_is_printed():
    (shown,) = re.findall(r"```text\n(audit: .*?)\n```", (DOCS / "audit.md").read_text(), re.DOTALL)
    shown = " ".join(shown.split())
    what = re.search(r"on rank 0\): (.*?)\. ", shown)[1]
    where = re.search(r"At (.*?)\. ", shown)[1]
    repairs = tuple(Repair(*found) for found in re.findall(r"([\w.-]+) \((switched off by .*?)\)", shown))
    assert shown == f"audit: {Finding('scaled-once', '', what, 0, 1, (where,), repairs=repairs)}"


def test_the_api_page_has_every_public_module():
    """Without the patches' own: those are promised by name."""
    package = Path(megapatch.__file__).parent
    modules = {".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in modules}
    public = {name for name in modules if not any(part.startswith("_") for part in name.split("."))}
    assert {name for name in public if not name.startswith("megapatch.patches.")} == set(api.MODULES)


def test_the_api_page_lists_what_is_really_there():
    """api.py reads the sources; Python agrees."""
    for module in api.MODULES:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            continue
        for name in getattr(found, "__all__", ()):
            assert f"| `{name}` |" in (DOCS / "api.md").read_text(), f"{module}.{name} is missing: {COMMAND}"


DOTTED = re.compile(r"(?<![\w./@-])megapatch(?:\.[A-Za-z_]\w*)+(?!\w|\.\w*://|-)")
NOT_NAMES = ("megapatch.pth",)


def dotted_names(text):
    return {name for name in DOTTED.findall(text) if name not in NOT_NAMES}


def strings(source):
    """Return the texts that a program may print: its strings, those in f-strings as well."""
    nodes = ast.walk(ast.parse(source))
    return "\n".join(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_every_dotted_name_resolves_after_import_megapatch():
    """In a new Python, attribute by attribute: nobody has imported the subpackages there."""
    places = {}
    for path in PAGES:
        for name in dotted_names(path.read_text()):
            places.setdefault(name, path.name)
    assert not [name for name in places if "._" in name], "not promised to users"
    for path in SOURCES:
        for name in dotted_names(strings(path.read_text())):
            if "._" not in name:  # an import of ours
                places.setdefault(name, path.name)
    assert {"megapatch.reach.ray.runtime_env", "megapatch.assert_consistent"} <= set(places)
    program = """
import sys, megapatch
for dotted in sys.argv[1:]:
    found = megapatch
    for name in dotted.split(".")[1:]:
        try:
            found = getattr(found, name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in ("torch", "megatron"):
                raise
            break  # this environment is without it
        except AttributeError:
            print(dotted)
            break
"""
    command = [sys.executable, "-c", program, *sorted(places)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    wrong = [f"{name} in {places[name]}" for name in shown.stdout.splitlines() if name in places]
    assert not wrong, "there is no such name"


def blocks(page):
    """The Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@named
def test_python_compiles_and_imports_what_is_there(page):
    for block in blocks(page):
        compile(block, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megapatch":
                for alias in node.names:
                    assert alias.name in api.names(node.module), f"{page.name}: {node.module}.{alias.name}"


@named
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)|<(https?://[^>\s]+)>", page.read_text())
    for link in (inline or bare for inline, bare in links):
        path = link.partition("#")[0]
        if link.startswith(FILES):
            assert (ROOT / path.removeprefix(FILES)).is_file(), link
        elif not link.startswith(("https://", "mailto:")):
            assert page.parent == DOCS, f"{link}: a package index shows this page, and has only absolute links"
            assert not path or (page.parent / path).is_file(), link


def test_every_page_is_in_the_sites_navigation():
    configuration = (ROOT / "properdocs.yml").read_text()
    for name in (*(page.name for page in DOCS.glob("*.md")), *OF_THE_SITE):
        assert f": {name}\n" in configuration, name
