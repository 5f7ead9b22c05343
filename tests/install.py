"""pip install, with the index of torch's builds for CPU where it can be reached.

    python install.py --torch-index=URL [what pip install takes]

On Linux torch's build on PyPI brings some GB of CUDA libraries, which these tests have no use for. Where the
index cannot be reached, pip would try several times for each package; so it is asked first, once and not for long.
Without a URL pip is left with the indexes that it has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import urllib.request

PATIENCE = 5.0  # seconds


def is_reached(index: str) -> bool:
    """Return whether the index answers in time; looking a name up has no timeout of its own."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=PATIENCE):
                answers.append(True)
        except (OSError, ValueError) as error:
            print(f"{index}: {error}; torch comes from pip's own indexes", file=sys.stderr)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(answers)


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--torch-index", default="")
    known, arguments = parser.parse_known_args()
    wants_torch = any(argument.partition("=")[0] == "torch" for argument in arguments)
    if wants_torch and sys.platform == "linux" and known.torch_index and is_reached(known.torch_index):
        arguments = ["--extra-index-url", known.torch_index, *arguments]
    return subprocess.call([sys.executable, "-m", "pip", "install", *arguments])


if __name__ == "__main__":
    sys.exit(main())
