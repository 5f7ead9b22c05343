"""What CI tests with the Megatrons that few frameworks pin: all but 0.16 and the newest.

With each of them the quick tests and the diagnoses run; the other modules take turns: each runs with one of these
Megatrons, and in any case with 0.16 and the newest. Each night all modules run with all Megatrons: `tox -m full`
without `--ci`.
"""

from __future__ import annotations

import zlib

from rigs.quick import QUICK, is_quick

MEGATRONS = ("0.12", "0.13", "0.14", "0.15", "0.17", "0.18")
ALWAYS = (
    "patches/megatron/test_diagnos",
    "patches/megatron/test_edits.py",
    "patches/megatron/test_renames.py",
    "test_package.py",
    "test_verdicts.py",
)
QUICK_MODULES = {node.partition("::")[0] for node in QUICK}


def has_its_turn(place: str, megatron: str) -> bool:
    """Return whether a module of the tests, or a test, as pytest names them, is to run with this Megatron.

    A module does if any of its tests does.
    """
    minor = ".".join(megatron.split(".")[:2])
    module, _, test = place.removeprefix("tests/").partition("::")
    has_all = module.startswith(ALWAYS) or (is_quick(place) if test else module in QUICK_MODULES)
    if has_all or minor not in MEGATRONS:
        return True
    # By its own name, so that a new module does not change the turns of the others.
    return zlib.crc32(module.encode()) % len(MEGATRONS) == MEGATRONS.index(minor)
