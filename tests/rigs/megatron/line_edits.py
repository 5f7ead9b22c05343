"""Which line edits of a fork the diagnoses notice: each line deleted, and each two neighbours swapped.

    python -m rigs.megatron.line_edits [PATCH ...] [--list]

in tests/, from Python 3.11 on, with the Megatron that is installed. It edits each function of megatron.core that a
patch replaces, or that its diagnosis runs or looks up, one edit at a time, and asks for the verdict again. Most
edits harm nothing that a patch relies on, so the aim is not 100%: see "A fork's edits" in docs/testing.md.
"""

import argparse
import ast
import contextlib
import inspect
import itertools
import re
import signal
import sys
import warnings
from collections import Counter
from types import FunctionType
from unittest import mock

from megapatch import restore
from megapatch._dotted import find
from megapatch.patch import ABSENT, FIXED, NEEDED, UNKNOWN, unpatched
from megapatch.patches import PATCHES, _diagnosis
from rigs.megatron.edits import edited
from rigs.renames import names_in

OUTCOMES = ("refused", "not applied", "endless", "unnoticed")
SECONDS = 5  # for a diagnosis: a loop whose end was deleted does not come to one
KINDS = {
    "guards and messages": (ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.Global),
    "conditions and loops": (ast.If, ast.For, ast.While, ast.With, ast.Try),
    "returns": (ast.Return, ast.Continue, ast.Break),
    "assignments": (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.FunctionDef),
    "calls": (ast.Expr,),
}


# ------------------------------------------------------------------------ what a patch relies on
def relied_on(site, module):
    """Return how the site relies on each function of Megatron: it is replaced, run or looked up."""
    found = {}
    with _noting(found):
        site.diagnose(module)
    found |= {(site.module, path): "replaced" for path in site.replace}
    return {place: how for place, how in found.items() if place[0].startswith("megatron.core.")}


@contextlib.contextmanager
def _noting(found):
    resolve, profiler = _diagnosis.resolve, sys.getprofile()
    files = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}

    def noting(path):
        module, _, attributes = path.partition(":")
        if attributes and isinstance(unpatched(resolve(path)), FunctionType):
            found.setdefault((module, attributes), "looked up")
        return resolve(path)

    def profile(frame, event, arg):
        code = frame.f_code
        module = files.get(code.co_filename)
        held = find(sys.modules.get(module), code.co_qualname)
        if event == "call" and getattr(inspect.unwrap(unpatched(held)), "__code__", None) is code:
            found[module, code.co_qualname] = "run"

    with mock.patch.object(_diagnosis, "resolve", noting):
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(profiler)


# ------------------------------------------------------------------------ the edits
def line_edits(module, path):
    """Yield each edit of a function: in words, the statements that it takes away or moves, the edit."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(unpatched(find(module, path))))))
    for block, lines in enumerate(_blocks(tree.body[0])):
        for place, statement in enumerate(lines):
            if _does_something(statement):
                yield f"delete {_words(statement)}", [statement], _deleting(block, place)
        for place, (first, second) in enumerate(itertools.pairwise(lines)):
            if _does_something(first) and _does_something(second):
                yield f"swap {_words(first)} and {_words(second)}", [first, second], _swapping(block, place)


def _blocks(function):
    return [
        block
        for node in ast.walk(function)
        for field in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, field, None), list) and block
    ]


def _does_something(statement):
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not is_text and not isinstance(statement, ast.Pass)


def _words(statement):
    return repr(ast.unparse(statement).partition("\n")[0])


def _deleting(block, place):
    def edit(function):
        _blocks(function)[block][place] = ast.Pass()
        return True

    return edit


def _swapping(block, place):
    def edit(function):
        lines = _blocks(function)[block]
        lines[place : place + 2] = reversed(lines[place : place + 2])
        return True

    return edit


# ------------------------------------------------------------------------ what becomes of them
def outcome(sites):
    """Return what becomes of an edit: "refused" if a site is, "not applied" if one no longer needs the patch."""
    kinds = set()
    for site, module in sites:
        try:
            with _at_most(SECONDS):
                kinds.add(site.diagnose(module).kind)
        except _Endless:
            return "endless"
        except Exception:  # the engine says `failed`, as loudly
            kinds.add(UNKNOWN)
    if UNKNOWN in kinds:
        return "refused"
    return "not applied" if kinds & {FIXED, ABSENT} else "unnoticed"


class _Endless(BaseException):
    """Raised in a diagnosis that takes too long, which catches every Exception."""


@contextlib.contextmanager
def _at_most(seconds):
    def end(number, frame):
        raise _Endless

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def kind_of(statement):
    return next((kind for kind, types in KINDS.items() if isinstance(statement, types)), "others")


def sites_of(patch):
    """Return the patch's sites in this megatron.core that need it, with their modules."""
    found = []
    for site in patch.sites:
        with contextlib.suppress(ImportError):
            if site.module.startswith("megatron.core."):
                __import__(site.module)
                found.append((site, sys.modules[site.module]))
    return [(site, module) for site, module in found if site.diagnose(module).kind is NEEDED]


def judged(patch):
    """Yield (how it is relied on, whether with a name of the patch's, kind of statement, outcome, in words)."""
    sites, names, places = sites_of(patch), names_in(patch), {}
    for site, module in sites:
        places |= relied_on(site, module)
    for (name, path), how in sorted(places.items()):
        for words, statements, edit in line_edits(sys.modules[name], path):
            named = any(names & set(re.findall(r"\w+", ast.unparse(statement))) for statement in statements)
            with contextlib.suppress(SyntaxError), edited(sys.modules[name], path, edit) as made:
                if made:
                    yield how, named, kind_of(statements[0]), outcome(sites), f"{path}: {words}"
    assert outcome(sites) == "unnoticed", f"{patch.name}: an edit was not taken back"


def main():
    parser = argparse.ArgumentParser(prog="python -m rigs.megatron.line_edits")
    parser.add_argument("patches", nargs="*", metavar="PATCH", help="names; all of Megatron's if there are none")
    parser.add_argument("--list", action="store_true", help="show each edit that no diagnosis refuses")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    restore()
    by_place, by_kind = Counter(), Counter()
    for patch in PATCHES:
        if patch.family != "megatron" or (chosen.patches and patch.name not in chosen.patches):
            continue
        of_patch = Counter()
        for how, named, kind, what, words in judged(patch):
            of_patch[what] += 1
            by_place[f"{how}, {'a name' if named else 'no name'} of the patch's", what] += 1
            by_kind[kind, what] += 1
            if chosen.list and what != "refused":
                print(f"  {what}: {words}")
        if of_patch:
            print(f"{patch.name}: {of_patch['refused']} of {of_patch.total()} edits refused", flush=True)
    for table in (by_place, by_kind):
        print(f"\n| edits | made | {' | '.join(OUTCOMES)} |\n{'| --- ' * (len(OUTCOMES) + 2)}|")
        for row in sorted({row for row, _ in table}):
            counts = [table[row, what] for what in OUTCOMES]
            print(f"| {row} | {sum(counts)} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
