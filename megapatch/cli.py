"""megapatch doctor | list | explain | demo"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Sequence

import megapatch

from .catalog import PATCHES
from .engine import this_process
from .patch import NEEDS_ATTENTION, MegapatchError, Status

WELL, NOT_APPLIED, COULD_NOT_LOOK = 0, 1, 2

_EXIT_CODES = """\
exit codes:
  0  every patch that is needed is in place, or was switched off on purpose
  1  a patch that is needed, or may be, is not in place (failed, refused, overwritten)
  2  could not look: bad usage or environment, nothing to patch is installed, or it cannot be imported
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
    command.add_argument(
        "--no-import",
        action="store_true",
        help="the quick view: only say what is installed; everything stays pending, and nothing is diagnosed",
    )
    command.set_defaults(run=lambda options: doctor(as_json=options.json, importing=not options.no_import))

    command = commands.add_parser(
        "list",
        help="list all patches",
        description="List all patches, in the order in which they are considered; those of third parties last.",
    )
    command.add_argument("--markdown", action="store_true", help="megapatch's own, as the table in the README")
    command.set_defaults(run=lambda options: list_patches(markdown=options.markdown))

    command = commands.add_parser(
        "explain",
        help="tell all about a patch: symptom, upstream, seam, limits, cost",
        description="Tell all about a patch: symptom, upstream report, seam, limits, cost, where it applies and "
        "whether it changes numbers.",
        epilog="exit codes:\n  0  told\n  2  no patch has such a name\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("names", nargs="+", metavar="NAME", help="a patch's name, or a glob such as 'megatron.*'")
    command.set_defaults(run=lambda options: explain(options.names))

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


def doctor(as_json: bool, importing: bool = True) -> int:
    """Import each installed target, print the report and what is wrong; see `_EXIT_CODES`."""
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


def list_patches(markdown: bool) -> int:
    """One line a patch, in the catalogue's order."""
    if markdown:
        print("| patch | what it makes right | upstream | changes numbers |\n| --- | --- | --- | --- |")
        for patch in PATCHES:
            numbers = "yes" if patch.changes_numbers else "no"
            print(f"| `{patch.name}` | {patch.summary} | <{patch.upstream}> | {numbers} |")
        return WELL
    this_process().load_third_parties()
    width = max(len(patch.name) for patch in this_process().patches)
    for patch in this_process().patches:
        print(f"{patch.name:{width}}  {patch.summary}")
    return WELL


def explain(names: Sequence[str]) -> int:
    """All about the named patches, from their docstrings and sites."""
    this_process().load_third_parties()
    try:
        chosen = this_process().named(*names)
    except MegapatchError as error:
        _say(str(error))
        return COULD_NOT_LOOK
    for patch in this_process().patches:
        if patch.name in chosen:
            print(f"{patch.name}: {inspect.cleandoc(patch.doc)}\n")
            print(f"Link      {patch.upstream}")
            print(f"Numbers   {'changed' if patch.changes_numbers else 'not changed'} in a run that did not crash")
            for site in patch.sites:
                print(f"Site      {site.module}: {', '.join(site.paths)}")
            print()
    return WELL


def demo() -> int:
    """Run the demo, or say in one sentence what it lacks."""
    from .demo import main as run_demo

    return run_demo()


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
