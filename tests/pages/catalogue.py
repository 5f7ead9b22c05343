"""The data of megapatch/patches/_catalogue.py, which `import megapatch` reads: what each patch watches."""

from __future__ import annotations

import importlib
from pathlib import Path

from megapatch import patches
from megapatch.patches._catalogue import CATALOGUE

FOLDER = Path(patches.__file__).parent
FILE = FOLDER / "_catalogue.py"
BEGINS = "CATALOGUE: dict[str, dict[str, tuple[str, ...]]] = {\n"
WIDTH = 115
ENDS = "\n}\n"


def file() -> str:
    """Return the file's text as it has to be: families and patches in the order of their names."""
    before, _, rest = FILE.read_text().partition(BEGINS)
    return "".join([before, BEGINS, *map(_family, sorted(found().items())), ENDS[1:], rest.partition(ENDS)[2]])


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


def _family(found: tuple[str, dict[str, tuple[str, ...]]]) -> str:
    family, patches = found
    return f'    "{family}": {{\n{"".join(_patch(*each) for each in sorted(patches.items()))}    }},\n'


def _patch(name: str, modules: tuple[str, ...]) -> str:
    """Return the line of a patch, or lines: as ruff formats them."""
    named = ", ".join(f'"{module}"' for module in modules)
    line = f'        "{name}": ({named}{"," if len(modules) == 1 else ""}),\n'
    if len(line) <= WIDTH + 1:
        return line
    lines = "".join(f'            "{module}",\n' for module in modules)
    return f'        "{name}": (\n{lines}        ),\n'
