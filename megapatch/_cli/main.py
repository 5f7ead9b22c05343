"""The command line: megapatch doctor | verify | audit | list | explain | run | demo

The commands, their options, and the function that runs each; and `list` and `explain` themselves.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any

from .._engine.engine import this_process
from .._engine.restoring import matching_names
from .._engine.settings import SAME_NUMBERS
from .._printable import first_line_at_the_margin
from .._reporting import terminal
from .._versions import exact_version
from ..errors import MegapatchError
from ..patch import Patch, PatchInfo
from .doctor import EXIT_CODES, compare, doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    this_process().first_sign.hush()
    try:
        try:
            return _run(arguments)
        finally:
            terminal.flush()
    except terminal.OutputLost as lost:
        if lost.reader_has_gone:
            return terminal.READER_HAS_GONE
        terminal.note(f"megapatch: the output cannot be written: {lost}")
        return terminal.COULD_NOT_LOOK
    except KeyboardInterrupt:
        terminal.note("interrupted")
        return terminal.INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    options, others = parser.parse_known_args(arguments)
    if others:
        options.parser.error(f"unrecognized arguments: {' '.join(others)}")
    code: int = options.run(options)
    return code


_EPILOG = f"""\
exit codes: see megapatch COMMAND --help; and of every command:
  2    bad usage, or the output cannot be written
  {terminal.INTERRUPTED}  interrupted (Ctrl-C)
  {terminal.READER_HAS_GONE}  whoever read the output has gone, as with `| head`
"""


class _Parser(argparse.ArgumentParser):
    """A parser that cleans its messages, as they quote the command line."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(first_line_at_the_margin(message) if file is sys.stderr else message, file)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands: its options have `run`, and `parser` to report errors in them."""
    parser = _Parser(
        prog="megapatch",
        description="Makes Megatron safe to call repeatedly.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megapatch {exact_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_doctor, _add_verify, _add_audit, _add_list, _add_explain, _add_run, _add_demo):
        add(commands)
    return parser


def _command(commands: Any, name: str, **texts: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.set_defaults(parser=parser)  # whose usage an error shows
    return parser


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON on standard output")


def _seconds(text: str) -> float:
    """Read a time limit for argparse, which words the error."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"invalid time limit: {text}; expected a number of seconds above 0")
    return seconds


def _add_doctor(commands: Any) -> None:
    command = _command(
        commands,
        "doctor",
        help="show the status of every patch in this environment, and why",
        description="Import every target that is installed, and show each patch's status with the\nreason.",
        epilog=EXIT_CODES,
    )
    command.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="compare what ranks wrote there, with MEGAPATCH_REPORT=FOLDER"
    )
    _add_json(command)
    command.add_argument(
        "--no-import",
        action="store_true",
        help="the quick view: show only what is installed; everything stays pending, and nothing is diagnosed",
    )
    command.add_argument(
        "--report",
        nargs="?",
        const="megapatch-report.md",
        metavar="FILE",
        help="write what an issue needs, and is fine to publish, to FILE, as Markdown: versions, statuses with "
        "reasons, where exceptions came from, MEGAPATCH_* settings, platform. FILE is %(const)s if you name none, "
        "and must not exist; - is standard output",
    )

    def run(options: argparse.Namespace) -> int:
        if options.folder is not None:
            if not os.path.isdir(options.folder):
                command.error(f"expected a folder with the files of ranks, found none at {options.folder}")
            return compare(options.folder, options.json)
        if options.json and options.report == "-":
            command.error("--json and --report - both write to standard output; name a file")
        return doctor(options.json, not options.no_import, options.report)

    command.set_defaults(run=run)


def _add_verify(commands: Any) -> None:
    from .._verify.command import EXIT_CODES as VERIFY_EXIT_CODES
    from .._verify.command import SECONDS as VERIFY_SECONDS
    from .._verify.command import verify

    command = _command(
        commands,
        "verify",
        help="meet each defect here without its patch, and see that the patch repairs it",
        description="For each patch that the installed Megatron needs: meet its defect without it,\n"
        "and see that the numbers are right with it, in new processes on this machine's\n"
        "GPUs over NCCL, or on CPU over gloo. Under torchrun, in as many processes as it\nstarts.",
        epilog=VERIFY_EXIT_CODES,
    )
    command.add_argument("names", nargs="*", metavar="PATCH", help="a patch's name, or a glob; none for all")
    _add_json(command)
    command.add_argument(
        "--timeout",
        type=_seconds,
        default=VERIFY_SECONDS,
        metavar="SECONDS",
        help="end a run that takes longer (%(default)g); a check has two",
    )
    command.add_argument("--processes", type=int, metavar="N", help="how many; one a GPU, at least 2, by default")
    command.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there are GPUs, by default")

    def run(options: argparse.Namespace) -> int:
        if options.processes is not None and options.processes < 1:
            command.error(f"argument --processes: expected 1 or more, found {options.processes}")
        return verify(options.names, options.json, options.timeout, options.processes, options.device)

    command.set_defaults(run=run)


_AUDIT_EXIT_CODES = """\
exit codes:
  0  nothing was found on any rank; notes do not count
  1  there are findings
  2  could not look: bad usage, a folder without reports, or a page that cannot
     be written; or nothing was found, and a rank has left no report, or one
     that cannot be read
"""


def _add_audit(commands: Any) -> None:
    command = _command(
        commands,
        "audit",
        help="show what the audit has found on all ranks of a run, with the likely causes",
        description="Show what the ranks of a run have left in a folder with MEGAPATCH_AUDIT=1 and\n"
        "MEGAPATCH_REPORT=FOLDER: findings, each once, with the user's code and the\n"
        "likely causes; and what happened when.",
        epilog=_AUDIT_EXIT_CODES,
    )
    command.add_argument("folder", metavar="FOLDER", help="where the ranks have left their reports")
    _add_json(command)
    command.add_argument(
        "--html",
        metavar="FILE",
        help="write a page, too, with the timeline of the run; it needs nothing else, and replaces FILE",
    )

    def run(options: argparse.Namespace) -> int:
        if not os.path.isdir(options.folder):
            command.error(f"expected a folder with the reports of ranks, found none at {options.folder}")
        from .audit import audit  # the other commands need nothing of the audit

        return audit(options.folder, options.json, options.html)

    command.set_defaults(run=run)


def _add_list(commands: Any) -> None:
    command = _command(
        commands,
        "list",
        help="list all patches",
        description="List all patches in the order in which they are considered, third-party patches\nlast.",
        epilog="exit codes:\n  0  listed\n  2  no patch has this name\n",
    )
    command.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"list these only: names, globs, or {SAME_NUMBERS} for those that do not change the numbers of a run "
        "that did not crash",
    )
    command.set_defaults(run=lambda options: list_patches(options.names))


def _add_explain(commands: Any) -> None:
    command = _command(
        commands,
        "explain",
        help="show everything about a patch: symptom, upstream, seam, limits, cost",
        description="Show everything about a patch: symptom, upstream report, seam, limits,\n"
        "cost, where it applies, and whether it changes numbers.",
        epilog="exit codes:\n  0  shown\n  2  no patch has this name\n",
    )
    command.add_argument("names", nargs="+", metavar="NAME", help="a patch's name, or a glob such as 'megatron.*'")
    command.set_defaults(run=lambda options: explain(options.names))


def _add_run(commands: Any) -> None:
    from .._engine.settings import AUDIT
    from ..reach._run import launch

    command = _command(
        commands,
        "run",
        help="run a command; every Python below it activates megapatch when it imports a target",
        usage="%(prog)s [-h] [--audit] -- COMMAND ...",
        description="Run any command so that every Python process below it imports megapatch when,\n"
        "and only when, it imports one of the modules that megapatch patches. The command\n"
        "replaces this process.",
        epilog="exit codes: those of COMMAND, or\n  2    bad usage\n  126  COMMAND cannot be started\n"
        "  127  there is no such command\n",
    )
    command.add_argument(
        "--audit",
        action="store_true",
        help="watch what training does, and log steps that break Megatron's rules: sets MEGAPATCH_AUDIT=1",
    )
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, after `--`")

    def run(options: argparse.Namespace) -> int:
        if options.audit:
            os.environ.setdefault(AUDIT, "1")
        return launch(options.words[1:] if options.words[:1] == ["--"] else options.words)

    command.set_defaults(run=run)


def _add_demo(commands: Any) -> None:
    from .demo import EXIT_CODES as DEMO_EXIT_CODES
    from .demo import demo

    command = _command(
        commands,
        "demo",
        help="train a tiny GPT on two CPU ranks, with and without megapatch",
        description="Call the installed Megatron's own train() three times in one process, on two CPU\n"
        "ranks: its failures without megapatch, the repaired run, and a run without\n"
        "overlap to compare with. Takes 10 to 60 s.",
        epilog=DEMO_EXIT_CODES,
    )
    command.set_defaults(run=lambda options: demo())


# ------------------------------------------------------------- list and explain: patches, by docstrings and sites
_ALIGNED = 10
"""Columns before the text of a docstring's sections."""
_HEADING = re.compile("[A-Z][a-z]+ {2,}")
_PARAGRAPH_ENDS = re.compile(r"\n(?! )")


def list_patches(names: Sequence[str] = ()) -> int:
    """Print one line for each of the named patches, or of all, in the catalogue's order."""
    if (patches := _named_patches(names or "*")) is None:
        return terminal.COULD_NOT_LOOK
    rows = [(patch.name, patch.summary + " (changes numbers)" * patch.changes_numbers) for patch in patches]
    columns = terminal.columns_of_a_terminal()
    # In a narrow table a summary would have few words a line.
    narrow = columns is not None and columns < max(len(name) for name, _ in rows) + 40
    terminal.write("\n".join(terminal.table(rows, columns, widest=2 if narrow else None)))
    return 0


def explain(names: Sequence[str]) -> int:
    """Print everything about the named patches, from their docstrings and sites."""
    if (patches := _named_patches(names)) is None:
        return terminal.COULD_NOT_LOOK
    for patch in patches:
        columns = terminal.columns_of_a_terminal()
        for paragraph in _PARAGRAPH_ENDS.split(f"{patch.name}: {inspect.cleandoc(patch.doc)}"):
            _write_fitted(paragraph, _ALIGNED if _HEADING.match(paragraph) else 0, columns)
        terminal.write()
        _write_fitted(f"Link      {patch.upstream or 'none: not reported'}", _ALIGNED, columns)
        if "Numbers" not in patch.sections:  # its own words are more precise
            changed = "changed" if patch.changes_numbers else "not changed"
            terminal.write(f"Numbers   {changed} in a run that did not crash")
        for module, paths in _sites(patch):
            _write_fitted(f"Site      {module}{': ' * bool(paths)}{', '.join(paths)}", _ALIGNED, columns)
        terminal.write()
    return 0


def _write_fitted(text: str, indent: int, columns: int | None) -> None:
    """Print text as it is, or, where a line of it is longer than a terminal, filled again."""
    if columns and max(map(len, text.splitlines()), default=0) > columns:
        first = text[:indent] if text[indent - 1 : indent] == " " else ""
        rest = " ".join(text[len(first) :].split())
        text = "\n".join(terminal.wrapped(rest, columns, first, " " * indent))
    terminal.write(text)


def _named_patches(names: Sequence[str]) -> list[PatchInfo] | None:
    """Return the named patches; of those that are off, or cannot be loaded, the known facts.

    Say it where a name stands for none, and return None.
    """
    this_process().load_all()
    try:
        chosen = matching_names(this_process().roster, names)
    except MegapatchError as error:
        terminal.note(str(error))
        return None
    return [patch for patch in this_process().roster.known_patches if patch.name in chosen]


def _sites(patch: PatchInfo) -> list[tuple[str, tuple[str, ...]]]:
    """Return the module and the targets of each site; of a patch that is not loaded the targets are not known."""
    if isinstance(patch, Patch):
        return [(site.module, site.paths) for site in patch.sites]
    return [(module, ()) for module in patch.modules]
