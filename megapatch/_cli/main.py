"""megapatch doctor | list | explain | run | demo"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence

from .._engine.engine import this_process
from .._version import __version__
from ..errors import MegapatchError
from ..patches import PATCHES
from .doctor import COULD_NOT_LOOK, EXIT_CODES, SECONDS, WELL, doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="megapatch", description="Megatron, safe to call repeatedly.")
    parser.add_argument("--version", action="version", version=f"megapatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "doctor",
        help="say what every patch does in this environment, and why",
        description="Import every target that is installed and print each patch's status with the reason.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="the report as JSON on standard output")
    command.add_argument(
        "--no-import",
        action="store_true",
        help="the quick view: only say what is installed; everything stays pending, and nothing is diagnosed",
    )
    command.add_argument(
        "--probe",
        nargs="?",
        type=float,
        const=SECONDS,
        metavar="SECONDS",
        help="import each target in a child process of its own, so that one that crashes is a line in the report; "
        "a child that is not done after SECONDS (%(const)g) is killed",
    )
    command.set_defaults(run=lambda options: doctor(options.json, not options.no_import, options.probe))

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
        "run",
        help="run a command; every Python below it activates megapatch when it imports a target",
        usage="%(prog)s [-h] -- COMMAND ...",
        description="Run any command so that every Python process below it imports megapatch when, and only\n"
        "when, it imports one of the modules that megapatch patches. The command takes the place of\n"
        "this process.",
        epilog="exit codes: those of COMMAND, or\n  2    bad usage\n  126  COMMAND cannot be started\n"
        "  127  there is no such command\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, after `--`")
    command.set_defaults(run=lambda options: run(options.words))

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
                print(f"Site      {site.module}{': ' * bool(site.paths)}{', '.join(site.paths)}")
            print()
    return WELL


def run(words: Sequence[str]) -> int:
    """Become the command; returns only when there is none, or it cannot be started."""
    from ..reach._run.launch import launch

    return launch(list(words[1:] if words[:1] == ["--"] else words))


def demo() -> int:
    """Run the demo, or say in one sentence what it lacks."""
    from .demo import main as run_demo

    return run_demo()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
