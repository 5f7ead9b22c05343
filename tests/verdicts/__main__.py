"""Write docs/verdicts.csv, or look at releases that it lacks.

    python -m verdicts [--wheels FOLDER] [PROJECT==RELEASE=FOLDER ...]
    python -m verdicts --new [--wheels FOLDER]

Wheels are downloaded into a folder, where they stay, unless their folder is given. FOLDER is what would stand on
PYTHONPATH. A release of which there is no folder keeps the verdicts that it has.

--new asks the package index for releases that the file lacks, looks at them, and prints the lines that
releases.txt would need, where verdicts differ from the release before, and the state of the process that
docs/process-state.csv lacks. It writes nothing. It exits with 0 if there is none of these, with 1 if there is one,
and with 2 if it could not ask or look.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from process_state import table as process_state

from megapatch.patches import PATCHES
from megapatch.testing import megatron_core_available

from . import new, releases, table
from .process import CouldNotLook, verdicts_on

ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verdicts", description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", metavar="FOLDER", type=Path, help="where downloaded wheels are kept")
    parser.add_argument("--file", type=Path, default=table.FILE, help="the file to write")
    parser.add_argument("--releases", type=Path, default=releases.FILE, help="the releases, a line each")
    parser.add_argument("--new", action="store_true", help="look at releases on the index that the file lacks")
    parser.add_argument("given", nargs="*", metavar="PROJECT==RELEASE=FOLDER", help="a checkout")
    options = parser.parse_args()
    wanted = releases.read(options.releases.read_text())
    folders = _given(parser, options.given, wanted)
    if megatron_core_available():
        parser.error("megatron-core is installed here, and would be mixed with the releases: uninstall it")
    if options.new:
        return _look_at_new(wanted, options)
    if options.wheels:
        folders = {**_download(wanted, options.wheels, folders), **folders}

    there = [one for one in wanted if all(name in folders for name in (str(one), *one.beside))]
    verdicts = table.read(options.file.read_text()) if options.file.exists() else {}
    failed = []
    for release in there:
        try:
            for site, cell in _look(release, folders).items():
                verdicts.setdefault(site, {})[release.name] = cell
            print(f"looked at {release}", flush=True)
        except CouldNotLook as error:
            failed.append(f"could not look at {release}: {error}")
            for site, cells in verdicts.items():  # a gap is found by the check; what was said may be wrong now
                if table.project_of(site[1]) == release.project:
                    cells.pop(release.name, None)
    print("\n".join([f"not looked at: {one}" for one in wanted if one not in there] + failed))
    text = table.write(verdicts, PATCHES, wanted)
    options.file.write_text(text)
    wrong = table.problems(text, PATCHES, wanted, (ROOT / "tox.ini").read_text())
    print("\n".join(wrong))
    return 1 if failed or wrong else 0


def _look_at_new(known: list[releases.Release], options: argparse.Namespace) -> int:
    failed = differs = False
    with tempfile.TemporaryDirectory() as folder:
        wheels = options.wheels or Path(folder)
        try:
            found = new.missing(known)
        except new.NoAnswer as error:
            print(f"could not ask the index: {error}")
            return 2
        beside = {name for release in found for name in release.beside}
        folders = _download([one for one in known if str(one) in beside], wheels, {})
        for release in found:
            print(" ".join([release.project, release.name, *release.beside]))
            try:
                here = _download([release], wheels, {})
                told = _look(release, {**folders, **here})
            except (CouldNotLook, subprocess.CalledProcessError) as error:
                print(f"  could not look: {error}")
                failed = True
                continue
            lines = new.differences(release, told, known, table.read(options.file.read_text()))
            if release.project in process_state.PACKAGES:
                rows = process_state.read(process_state.FILE.read_text())
                lines += process_state.news(release.project, [here[str(release)]], rows)
            print("\n".join(f"  {line}" for line in lines or ["no verdict differs"]))
            differs = differs or bool(lines)
    print(f"{len(found)} releases that the file lacks" if found else "the file has all releases")
    return 2 if failed else 1 if differs else 0


def _look(release: releases.Release, folders: dict[str, Path]) -> dict[tuple[str, str], table.Cell]:
    return verdicts_on(release.project, folders[str(release)], [folders[name] for name in release.beside])


def _given(parser: argparse.ArgumentParser, given: list[str], wanted: list[releases.Release]) -> dict[str, Path]:
    folders = {}
    known = {str(one) for one in wanted}
    for argument in given:
        name, _, folder = argument.partition("==")
        release, _, folder = folder.partition("=")
        name = f"{name}=={release}"
        if name not in known:
            parser.error(f"{name} is not in releases.txt, which has {', '.join(sorted(known))}")
        if not Path(folder).is_dir():
            parser.error(f"{argument}: expected a folder, found {folder!r}")
        folders[name] = Path(folder).resolve()
    return folders


def _download(wanted: list[releases.Release], into: Path, given: dict[str, Path]) -> dict[str, Path]:
    """Install each wheel into a folder of its own. Its Python code alone is looked at."""
    found = {}
    for release in wanted:
        if release.is_wheel and str(release) not in given:
            folder = found[str(release)] = (into / f"{release.project}-{release.name}").resolve()
            if not folder.is_dir():
                install = ["install", "--quiet", "--no-deps", "--ignore-requires-python", "--target", str(folder)]
                install += releases.PIP_OPTIONS.get(release.project, [])
                subprocess.run([sys.executable, "-m", "pip", *install, str(release)], check=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
