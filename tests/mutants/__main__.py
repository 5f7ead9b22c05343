"""Mutate a room of the package and report what its tests do not notice.

ROOM is a folder or a file of megapatch/, such as streaming or weight_sync/_pause.py. Of its mutations --count are
drawn; the same seed draws the same ones, and an edit elsewhere does not change them. Each is made in a copy of the
tree, where the tests run that tests/mutants/chosen_tests.txt names for its file. A mutation in
tests/mutants/equivalents.txt counts for nothing.

Exits with 0 if every mutation that counts was noticed, with 1 if some were not, and with 2 for wrong usage or if
the tests fail without a mutation.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import tempfile
from pathlib import Path

from .find import Mutation, mutations
from .runs import ROOT, STAGES, Copy
from .tables import Equivalent, chosen_for, equivalents, files_of, outdated


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tox -e mutants --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", metavar="ROOM", help="a folder or a file of megapatch/")
    parser.add_argument("--count", type=int, default=50, help="how many mutations (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--list", action="store_true", help="show them, and run nothing")
    options = parser.parse_args()
    if not files_of(options.room):
        parser.error(f"megapatch has no {options.room}")
    files = [path for path in files_of(options.room) if chosen_for(path) is not None]
    if not files:
        parser.error(f"the tests of {options.room} do not run in this environment")
    if options.count < 1:
        parser.error("--count: expected at least 1")
    if lacking := [path for path in files if chosen_for(path) == ()]:
        parser.error(f"tests/mutants/chosen_tests.txt names no tests for {', '.join(lacking)}")
    listed = equivalents()
    if wrong := outdated(listed):
        parser.error("tests/mutants/equivalents.txt: " + "\n".join(wrong))
    chosen = sample(files, options.count, options.seed)
    if options.list:
        for mutation in chosen:
            print(shown(mutation))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # ends pytest, and removes the copy
    with tempfile.TemporaryDirectory(prefix="megapatch-mutants-") as folder:
        return run(options.room, chosen, listed, Copy(Path(folder)))


def sample(files: list[str], count: int, seed: int) -> list[Mutation]:
    """Draw mutations, and return them in the order of files and lines."""

    def order(mutation: Mutation) -> bytes:
        change = " ".join(mutation.change((ROOT / mutation.path).read_text()))
        return hashlib.sha256(f"{seed} {mutation.path} {mutation.function} {change}".encode()).digest()

    found = [mutation for path in files for mutation in mutations(path, (ROOT / path).read_text())]
    return sorted(sorted(found, key=order)[:count], key=lambda one: (one.path, one.start))


def run(room: str, chosen: list[Mutation], listed: list[Equivalent], copy: Copy) -> int:
    run_by = {mutation.path: chosen_for(mutation.path) for mutation in chosen}
    if problem := copy.check(dict.fromkeys(test for tests in run_by.values() for test in tests)):
        print(f"{problem}\nthese tests fail without a mutation")
        return 2
    for path, tests in run_by.items():
        if not any(copy.limit(tests, stage) for stage in STAGES):
            print(f"all tests of {path} are skipped: {' '.join(tests)}")
            return 2
    noticed, equivalent, survived = 0, 0, []
    for number, mutation in enumerate(chosen, 1):
        place = f"[{number}/{len(chosen)}] {mutation.path}:{mutation.line}"
        source = copy.source(mutation.path)
        if any(one.matches(mutation, source) for one in listed):
            equivalent += 1
            print(f"{place}  equivalent", flush=True)
            continue
        outcome = copy.run(mutation, run_by[mutation.path])
        print(f"{place}  {outcome.seconds:.0f} s  {outcome.how}", flush=True)
        if outcome.noticed:
            noticed += 1
        else:
            survived.append(mutation)
    for mutation in survived:
        print(f"\nnot noticed: {shown(mutation)}\n    tests: {' '.join(run_by[mutation.path])}")
    counted = noticed + len(survived)
    share = f", {noticed / counted:.0%} of those that count" if counted else ""
    print(f"\n{room}: {len(chosen)} mutations, {noticed} noticed{share},", end=" ")
    print(f"{equivalent} equivalent, {len(survived)} survived")
    return 1 if survived else 0


def shown(mutation: Mutation) -> str:
    lines = mutation.change((ROOT / mutation.path).read_text())
    return "\n    ".join([f"{mutation.path}:{mutation.line}  {mutation.function}", *lines])


if __name__ == "__main__":
    sys.exit(main())
