"""megapatch doctor: imports what is patched, and tells for every site what became of it, and why."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys

import megapatch

from .engine import this_process
from .patch import NEEDS_ATTENTION, Status

WELL, NOT_APPLIED, COULD_NOT_LOOK = 0, 1, 2

EXIT_CODES = """\
exit codes:
  0  every patch that is needed is in place, or was switched off on purpose
  1  a patch that is needed, or may be, is not in place (failed, refused, overwritten)
  2  could not look: bad usage or environment, nothing to patch is installed, or it cannot be imported
"""


def doctor(as_json: bool, importing: bool = True) -> int:
    """Import each installed target, print the report and what is wrong; see `EXIT_CODES`."""
    problems = _import_targets() if importing else []
    report = megapatch.report()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)

    sites = [(one.patch.name, site) for one in report.patches for site in one.sites]
    for name, site in sites:
        if site.status is Status.DISABLED:
            _say(f"disabled on purpose: {name} at {site.module} ({site.reason})")
    bad = [(name, site) for name, site in sites if site.status in NEEDS_ATTENTION]
    for name, site in bad:
        _say(f"not in place: {name} at {site.module} is {site.status.value}: {site.reason}")
    if all(site.status is Status.NOT_INSTALLED for _, site in sites):
        problems.append(
            "nothing to patch is installed here: found no megatron-core; install it next to megapatch "
            "(pip install megatron-core), or run doctor in the environment that trains"
        )
    problems += _complaints()
    for problem in problems:
        _say(problem)
    if bad:
        return NOT_APPLIED
    if problems:
        return COULD_NOT_LOOK
    if not as_json:
        print(f"all well: {'every patch that is needed is in place' if importing else 'nothing was judged'}")
    return WELL


def _import_targets() -> list[str]:
    """Import every installed target; returns what could not be imported, in words.

    Not strictly: a site that is refused would keep those in other modules of its package from being judged.
    """
    problems = []
    settings = this_process().settings
    this_process().settings = settings._replace(strict_value="0")
    pending = {
        site.module for one in megapatch.report().patches for site in one.sites if site.status is Status.PENDING
    }
    for name in sorted(pending):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is the report's alone
                importlib.import_module(name)
        except Exception as error:
            problems.append(f"{name} is installed but cannot be imported: {type(error).__name__}: {error}")
    this_process().settings = settings
    return problems


def _complaints() -> list[str]:
    this_process().load_third_parties()
    return this_process().complaints()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
