"""Ask megapatch's diagnoses about commits of Megatron-LM.

    python -m upstream.branches GIT [REF or DATE ...] [--verify PATCH ...]

GIT is a checkout or a git directory. A DATE (2026-05-01) is what main was then. By default: the heads of main, of
dev and of the newest release branch. Prints a table with a row for each, and each refusal; `git bisect run` finds
the commit that it is from. --verify runs `megapatch verify` of these patches as well. Exits with 1 if a diagnosis
refuses, or a patch does not do what it promises.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import re
import subprocess
import sys
import tempfile

from verdicts.process import CouldNotLook, verdicts_on
from verdicts.table import KNOWN


class Repository:
    """A clone of Megatron-LM, and what the diagnoses say of its commits."""

    def __init__(self, path):
        self.path = path

    def git(self, *arguments):
        command = ["git", "-C", self.path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, name):
        """Return the commit of a ref, of a remote's branch, or of a date."""
        if re.fullmatch(r"\d{4}-\d\d-\d\d", name):
            return self.git("rev-list", "-1", "--first-parent", f"--before={name}T00:00:00Z", self.commit("main"))
        for ref in (name, f"origin/{name}"):
            with contextlib.suppress(subprocess.CalledProcessError):
                return self.git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        raise SystemExit(f"{name}: expected a branch, a tag, a commit or a date of {self.path}")

    def heads(self):
        """Return the names of main, dev and the newest release branch."""
        names = self.git("for-each-ref", "--format=%(refname:lstrip=-1)", "refs/heads", "refs/remotes").split()
        releases = [name for name in names if re.fullmatch(r"core_r\d+\.\d+\.\d+", name)]
        newest = max(releases, key=lambda name: [int(number) for number in re.findall(r"\d+", name)], default=None)
        return [name for name in ("main", "dev", newest) if name in names]

    def describe(self, commit):
        return self.git("log", "-1", "--format=%h of %cs (%s)", commit)

    @contextlib.contextmanager
    def files(self, commit):
        """Give a folder with Megatron as it is in that commit."""
        with tempfile.TemporaryDirectory() as folder:
            command = ["git", "-C", self.path, "archive", commit, "megatron"]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as archive:
                subprocess.run(["tar", "x", "-C", folder], stdin=archive.stdout, check=True)
            yield folder

    def look(self, commit):
        """Return the verdicts on a commit, by patch and module."""
        with self.files(commit) as folder:
            return verdicts_on("megatron-core", folder)

    def verify(self, commit, patches):
        """Run the patches' scenarios, and return in words what came of it."""
        with self.files(commit) as folder:
            path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "megapatch", "verify", *patches]
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
            )
        lines = done.stdout.splitlines() if done.returncode == 1 else []
        wrong = [line for line in lines if re.match(r"\S+\.\S+ +[A-Z]{4}", line)]
        return "; ".join(wrong) or {0: "well", 1: "not well"}.get(done.returncode, "cannot run")


def main():
    parser = argparse.ArgumentParser(prog="python -m upstream.branches", description=__doc__.partition("\n")[0])
    parser.add_argument("git", metavar="GIT")
    parser.add_argument("refs", nargs="*", metavar="REF or DATE")
    parser.add_argument("--verify", nargs="+", default=[], metavar="PATCH")
    options = parser.parse_args()
    repository = Repository(options.git)
    refused, well = [], True
    print("| branch | commit | verdicts | refused | verify |\n" + "| --- " * 5 + "|", flush=True)
    for name in options.refs or repository.heads():
        commit = repository.commit(name)
        try:
            cells = repository.look(commit)
        except CouldNotLook as error:
            well, verdicts, here = False, str(error)[-300:], []
        else:
            counts = collections.Counter(cell.verdict for cell in cells.values())
            verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in KNOWN if counts[verdict])
            here = [(name, *site, cell.reason) for site, cell in cells.items() if cell.verdict not in KNOWN]
        verify = repository.verify(commit, options.verify) if options.verify else "-"
        well = well and verify in ("-", "well")
        refused += here
        patches = ", ".join(dict.fromkeys(patch for _, patch, *_ in here)) or "none"
        print(f"| {name} | {repository.describe(commit)} | {verdicts} | {patches} | {verify} |", flush=True)
    for name, patch, module, reason in refused:
        print(f"{patch} at {module}: refused on {name}: {reason}", flush=True)
    return 0 if well and not refused else 1


if __name__ == "__main__":
    sys.exit(main())
