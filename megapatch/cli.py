"""megapatch doctor | list | demo"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Sequence

import megapatch

from .catalog import PATCHES
from .patch import NEEDS_ATTENTION, Status

WELL, NOT_APPLIED, COULD_NOT_LOOK = 0, 1, 2

_EXIT_CODES = """\
exit codes:
  0  every patch that is needed is in place, or was switched off on purpose
  1  a patch that is needed, or may be, is not in place (failed, refused, overwritten)
  2  could not look: bad usage, nothing to patch is installed, or it cannot be imported
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="megapatch", description="Megatron, safe to call repeatedly.")
    parser.add_argument("--version", action="version", version=f"megapatch {megapatch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "doctor",
        help="say what every patch does in this environment, and why",
        description="Import every target that is installed and print each patch's status with the reason.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="the report as JSON on standard output")
    command.set_defaults(run=lambda options: doctor(as_json=options.json))

    command = commands.add_parser("list", help="list all patches", description="List all patches.")
    command.add_argument("--markdown", action="store_true", help="as the table in the README")
    command.set_defaults(run=lambda options: list_patches(markdown=options.markdown))

    command = commands.add_parser(
        "demo",
        help="train a tiny GPT on two CPU ranks, with and without megapatch",
        description="Call the installed Megatron's own train() three times in one process, on CPU with two "
        "ranks: its failures without megapatch, the repaired run, and a run without overlap to compare with.",
        epilog="exit codes:\n  0  the repaired run equals the plain one\n  1  it does not\n"
        "  2  the demo cannot run here (torch or megatron-core is missing)\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=lambda options: demo())

    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def doctor(as_json: bool) -> int:
    """Import each installed target, print the report and what is wrong; see `_EXIT_CODES`."""
    problems = _import_targets()
    report = megapatch.report()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)

    sites = [(one.patch.name, site) for one in report.patches for site in one.sites]
    for name, site in sites:
        if site.status is Status.DISABLED:
            _say(f"disabled on purpose: {name} at {site.module} ({site.reason})")
    bad = [(name, site) for name, site in sites if site.status in NEEDS_ATTENTION]
    for name, site in bad:
        _say(f"not in place: {name} at {site.module} is {site.status.value}: {site.reason}")
    if bad:
        return NOT_APPLIED
    if all(site.status is Status.NOT_INSTALLED for _, site in sites):
        problems.append(
            "nothing to patch is installed here: found no megatron-core; install it next to megapatch "
            "(pip install megatron-core), or run doctor in the environment that trains"
        )
    for problem in problems:
        _say(problem)
    if problems:
        return COULD_NOT_LOOK
    if not as_json:
        print("all well: every patch that is needed is in place")
    return WELL


def list_patches(markdown: bool) -> int:
    """One line a patch, in the catalogue's order."""
    if markdown:
        print("| patch | what it makes right | upstream | changes numbers |\n| --- | --- | --- | --- |")
    for patch in PATCHES:
        numbers = "yes" if patch.changes_numbers else "no"
        if markdown:
            print(f"| `{patch.name}` | {patch.summary} | <{patch.upstream}> | {numbers} |")
        else:
            print(f"{patch.name:28}  {patch.summary}")
    return 0


def demo() -> int:
    """Run the demo, or say in one sentence what it lacks."""
    from .demo import main as run_demo

    return run_demo()


def _import_targets() -> list[str]:
    """Import every installed target; returns what could not be imported, in words."""
    problems = []
    pending = {
        site.module for one in megapatch.report().patches for site in one.sites if site.status is Status.PENDING
    }
    for name in sorted(pending):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is the report's alone
                importlib.import_module(name)
        except Exception as error:
            problems.append(f"{name} is installed but cannot be imported: {type(error).__name__}: {error}")
    return problems


def _say(text: str) -> None:
    print(text, file=sys.stderr)
