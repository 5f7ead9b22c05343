"""megapatch needs no place to write to, and writes nowhere: a read-only root, installations of other users."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.where import needs_megatron

import megapatch

DDP = "megatron.core.distributed.distributed_data_parallel"
SCRIPT = f"""
import os, sys, megapatch, {DDP}
from megapatch._cli.main import main

megapatch.check()
print(megapatch.report())
os.environ.pop("MEGAPATCH_REPORT", None)  # a folder that cannot be written to is a problem for doctor
assert main(["list"]) == main(["doctor"]) == 0
for folder in sys.argv[1:]:
    try:
        open(os.path.join(folder, "file"), "w")
        sys.exit(f"{{folder}} can be written to")
    except OSError:
        pass
"""
# All that is mounted, in a namespace of its own; what the kernel makes up stays as it is.
READ_ONLY = """
while read -r _ _ _ _ place _; do
    case "$place" in /proc*|/sys*|/dev*) ;; *) mount -o remount,bind,ro "$place" || exit 77 ;; esac
done < /proc/self/mountinfo
mount -t tmpfs none "$TMPDIR" || exit 77  # torch cannot be imported without
exec "$@"
"""
NO_NAMESPACE = 77


@pytest.fixture
def installed(tmp_path):
    """A copy of megapatch and folders for all else that a process may write to."""
    source = Path(megapatch.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / "site-packages" / "megapatch", ignore=ignored)
    for name in ("home", "temporary", "working directory"):
        (tmp_path / name).mkdir()
    return tmp_path


def run(folder, *command, **environment):
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAPATCH_", "XDG_"))}
    path = [str(folder / "site-packages"), *filter(None, [known.get("PYTHONPATH")])]
    return subprocess.run(
        command,
        cwd=folder / "working directory",
        env={
            **known,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "temporary"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def files(folder):
    """All files and folders; of a folder not the time, as Python tries where temporary files can be made."""
    return {path: path.is_file() and path.stat().st_mtime_ns for path in folder.rglob("*")}


@needs_megatron
def test_it_writes_nowhere(installed):
    before = files(installed)
    of_torch = {"TORCHINDUCTOR_CACHE_DIR": str(installed.with_name(f"{installed.name} of torch"))}
    shown = run(installed, sys.executable, "-c", SCRIPT, **of_torch)
    assert shown.returncode == 0, shown.stderr
    assert files(installed) == before


@needs_megatron
def test_with_a_read_only_root_all_works(installed):
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh"]
    report, *others = (str(installed / name) for name in ("report", "site-packages", "home", "working directory"))
    shown = run(installed, *namespace, sys.executable, "-c", SCRIPT, *others, MEGAPATCH_REPORT=report)
    if shown.returncode == NO_NAMESPACE or shown.stderr.startswith("unshare: "):
        pytest.skip(f"nothing can be made read-only here: {shown.stderr}")
    assert shown.returncode == 0, shown.stderr
    assert f"MEGAPATCH_REPORT={report}: rank 0 cannot write there: Read-only file system" in shown.stderr
