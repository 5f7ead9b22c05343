"""Write docs/verdicts.md anew.

    python -m verdicts [--wheels FOLDER] [PROJECT==RELEASE=FOLDER ...]

Wheels are downloaded into a folder, where they stay, unless their folder is given. FOLDER is what would stand on
PYTHONPATH. A release of which there is no folder keeps the verdicts that are on the page.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megapatch.patches import PATCHES
from megapatch.testing import megatron_core_available

from . import releases, table
from .process import CouldNotLook, verdicts_on

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/verdicts.md"
# The wheels of nvidia-resiliency-ext ask for a newer C library than many machines have; their Python does not.
_FOR_ANY_GLIBC = [
    "--only-binary=:all:",
    "--platform=manylinux_2_31_x86_64",
    "--platform=manylinux_2_39_x86_64",
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verdicts", description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", metavar="FOLDER", type=Path, help="where downloaded wheels are kept")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--releases", type=Path, default=releases.FILE, help="the releases, a line each")
    parser.add_argument("given", nargs="*", metavar="PROJECT==RELEASE=FOLDER", help="a checkout")
    options = parser.parse_args()
    wanted = releases.read(options.releases.read_text())
    folders = _given(parser, options.given, wanted)
    if megatron_core_available():
        parser.error("megatron-core is installed here, and would be mixed with the releases: uninstall it")
    if options.wheels:
        folders = {**_download(wanted, options.wheels, folders), **folders}

    there = [one for one in wanted if all(name in folders for name in (str(one), *one.beside))]
    verdicts = table.read(options.page.read_text()) if options.page.exists() else {}
    failed = []
    with ThreadPoolExecutor(2) as pool:
        for release, looked in [(one, pool.submit(_look, one, folders)) for one in there]:
            try:
                for site, cell in looked.result().items():
                    verdicts.setdefault(site, {})[release.name] = cell
                print(f"looked at {release}", flush=True)
            except CouldNotLook as error:
                failed.append(f"could not look at {release}: {error}")
                for site, cells in verdicts.items():  # a gap is found by the check; what was said may be wrong now
                    if table.project_of(site[1]) == release.project:
                        cells.pop(release.name, None)
    print("\n".join([f"not looked at: {one}" for one in wanted if one not in there] + failed))
    text = table.write(verdicts, PATCHES, wanted)
    options.page.write_text(text)
    wrong = table.problems(text, PATCHES, wanted, (ROOT / "tox.ini").read_text())
    print("\n".join(wrong))
    return 1 if failed or wrong else 0


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
                install += _FOR_ANY_GLIBC if release.project == "nvidia-resiliency-ext" else []
                subprocess.run([sys.executable, "-m", "pip", *install, str(release)], check=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
