"""The data of megapatch/patches/_catalogue.py, which `import megapatch` reads: what each patch watches."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path

from megapatch import patches
from megapatch.patches._catalogue import CATALOGUE

FOLDER = Path(patches.__file__).parent
FILE = FOLDER / "_catalogue.py"
BEGINS = '_WATCHED = """\\\n'
WIDTH = 115
ENDS = '"""\n'


def file() -> str:
    """Return the file's text as it has to be: families and patches in the order of their names."""
    before, _, rest = FILE.read_text().partition(BEGINS)
    lines = [_line(*each) for _, patches in sorted(found().items()) for each in sorted(patches.items())]
    return "".join([before, BEGINS, *lines, ENDS, rest.partition(ENDS)[2]])


def found() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return what the files say, by family and patch."""
    by_family: dict[str, dict[str, tuple[str, ...]]] = {}
    for path in sorted(FOLDER.glob("*/[!_]*.py")):
        by_family.setdefault(path.parent.name, {})[f"{path.parent.name}.{path.stem.replace('_', '-')}"] = ()
    for family, names in by_family.items():
        named = CATALOGUE.setdefault(family, {})  # of_family() goes by it
        for gone in named.keys() - names:
            del named[gone]
        for name in names:
            file = name.partition(".")[2].replace("-", "_")
            patch = importlib.import_module(f"megapatch.patches.{family}.{file}").PATCH
            names[name] = tuple(dict.fromkeys(site.module for site in patch.sites))
    return by_family


def _line(name: str, modules: tuple[str, ...]) -> str:
    """Return the line of a patch; what does not fit in it is indented below."""
    text = " ".join([name, *modules])
    return (
        textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False) + "\n"
    )
