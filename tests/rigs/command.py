"""The command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def run(*arguments, path="", **environment):
    """`python -m megapatch`, or `python -c` when the first argument says so, with `path` first on PYTHONPATH."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    search = os.pathsep.join(filter(None, [str(path), known.get("PYTHONPATH", "")]))
    command = list(arguments) if arguments[:1] == ("-c",) else ["-m", "megapatch", *arguments]
    return subprocess.run(
        [sys.executable, *command],
        env={**known, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
