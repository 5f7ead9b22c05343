"""The dry run of a release, `tox -e release`; `--demo` runs README's lines in the sdist as well.

Wheels of one commit, built twice and from the sdist, have the same hash. The wheel works in an empty environment.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

import check_distributions

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, **options: object) -> str:
    """Run a command, and return what it prints; a failure ends the check."""
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "MEGAPATCH_"))
    }
    options = {"env": environment, "text": True, "check": True, "stdout": subprocess.PIPE, **options}
    return subprocess.run([*map(str, command)], **options).stdout


def built(source: Path, folder: Path, *options: str) -> tuple[Path, str]:
    """Build the wheel of a source tree, and return it with its hash."""
    epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    run(sys.executable, "-m", "build", *options, "--outdir", folder, source, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


def main(folder: str, *flags: str) -> None:
    wheel, hash_of_it = built(ROOT, Path(folder))
    (sdist,) = Path(folder).glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    assert check_distributions.main(folder)
    version = wheel.name.split("-")[1]
    number = version.partition("+")[0]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        with tarfile.open(sdist) as archive:
            archive.extractall(place, filter="data")
        (source,) = place.glob("megapatch-*")
        for tree, name in ((ROOT, "again"), (source, "from the sdist")):
            assert built(tree, place / name, "--wheel")[1] == hash_of_it, f"another wheel {name}"
        venv.create(place / "empty", with_pip=True)
        scripts = place / "empty" / "bin"
        run(scripts / "pip", "install", "-q", wheel, cwd=place)
        assert run(scripts / "megapatch", "--version", cwd=place).strip() == f"megapatch {version}"
        patches = run(scripts / "megapatch", "list", cwd=place).splitlines()
        if "--demo" in flags:
            lines = re.search(r"^```sh\n(pip install.*?)^```", (source / "README.md").read_text(), re.M | re.S)
            path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
            print(run("sh", "-ec", lines[1], cwd=source, env={**os.environ, "PATH": path}))
    print(f"megapatch {version}: {len(patches)} patches, wheel {hash_of_it}, again and from the sdist")
    heading = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].partition("\n")[0]
    if version != number or not re.fullmatch(rf"{re.escape(number)} \(\d{{4}}-\d\d-\d\d\)", heading):
        sys.exit(f"not a release yet: its version is {version}, and CHANGELOG.md begins with {heading}")


if __name__ == "__main__":
    main(*sys.argv[1:])
