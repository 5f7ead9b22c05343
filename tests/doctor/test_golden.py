"""megapatch doctor in a made-up environment that has everything: the whole of its JSON, and a terminal's width."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.command import terminal

HERE = Path(__file__).parent

DDP = "class DistributedDataParallel:\n    def disable_forward_pre_hook(self): pass\n"

ACME = """
import functools
from megapatch import NEEDED, UNKNOWN, Patch, Site, Verdict
import rival  # patches the target before megapatch does

def louder(greet):
    @functools.wraps(greet)
    def replacement(*args):
        return greet(*args) + "!"
    return replacement

def needed(module):
    return Verdict(NEEDED, "it is too quiet")

SITES = tuple(Site(module, needed, replace={"greet": louder}) for module in ("acme_target", "acme_other"))
LOST = (Site("acme_target", lambda module: Verdict(UNKNOWN, "it looks like nothing known")),)
PATCHES = (
    Patch("acme.louder", "Loud.", "https://example.com/1", SITES, changes_numbers=True),
    Patch("acme.lost", "Lost.", "https://example.com/2", LOST),
)
"""

RIVAL = """
import functools, acme_target

def wrap(greet):
    @functools.wraps(greet)
    def wrapper(*args):
        return greet(*args)
    return wrapper

held = [wrap(acme_target.greet)]
alias = acme_target.greet = held[0]
"""

# With `python -S`: what is installed here is none of the golden file's business.
RUN = """
import sys
sys.path[:] = [*sys.path[1:], *{path!r}]  # behind the standard library, where installations are
from megapatch._cli.main import main
sys.exit(main())
"""


@pytest.fixture
def machine(tmp_path):
    """A made-up environment: runs doctor in it."""
    site, slime, acme = tmp_path / "site", tmp_path / "slime", tmp_path / "acme"

    def write(path, text=""):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def distribute(name, version, **files):
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in {"RECORD": "", **files}.items():
            write(info / file.replace("__", "."), text)

    for name in ("wrapt", "packaging", "megapatch"):
        spec = importlib.util.find_spec(name)
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).symlink_to(Path(spec.origin).parent)
    distribute("wrapt", "1")
    distribute("packaging", "2")
    for package in ("torch", "ray", "megatron/core", "megatron/core/distributed", "megatron/bridge"):
        write(
            site / package / "__init__.py", "raise ImportError('none here')" if package in ("torch", "ray") else ""
        )
    write(site / "megatron/core/distributed/distributed_data_parallel.py", DDP)
    distribute("torch", "2.9.1")
    distribute("ray", "2.51.1")
    distribute("megatron-core", "0.16.1")
    vcs = {"url": "https://example.com/bridge.git", "vcs_info": {"vcs": "git", "commit_id": "b" * 40}}
    distribute("megatron-bridge", "0.4.0", direct_url__json=json.dumps(vcs))
    write(slime / "slime/__init__.py")
    for repository in (slime, acme):
        for name in ("objects", "refs"):
            (repository / ".git" / name).mkdir(parents=True)
    write(slime / ".git/HEAD", "ref: refs/heads/main\n")
    write(slime / ".git/packed-refs", f"{'c' * 40} refs/heads/main\n")
    write(acme / "acme_patches.py", ACME)
    write(acme / "rival.py", RIVAL)
    for name in ("acme_target", "acme_other"):
        write(acme / f"{name}.py", "def greet(name):\n    return name\n")
    write(acme / ".git/HEAD", "a" * 40)
    editable = {"url": acme.as_uri(), "dir_info": {"editable": True}}
    entry = "[megapatch.patches]\nacme_target = acme_patches:PATCHES\n"
    distribute("acme", "1.0", entry_points__txt=entry, direct_url__json=json.dumps(editable))
    (tmp_path / "cwd").mkdir()

    write(tmp_path / "run.py", RUN.format(path=[str(site), str(slime), str(acme)]))
    mine = ("MEGAPATCH_", "RAY_", "PYTHON", "COLUMNS")

    def doctor(*arguments, output=subprocess.PIPE, **environment):
        known = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        return subprocess.run(
            [sys.executable, "-S", str(tmp_path / "run.py"), "doctor", *arguments],
            cwd=tmp_path / "cwd",
            env={**known, **environment},
            stdout=output,
            stderr=output,
            text=True,
            timeout=120,
            check=False,
        )

    return doctor


def golden(told, folder):
    """Return doctor's text with a few of the patches, and without the parts that vary by machine."""
    told["digest"] = re.sub("[0-9a-f]{16}", "(16 digits)", told["digest"])
    told["versions"] |= {name: "(any)" for name in ("megapatch", "wrapt")}
    for one in told["packages"]:
        if one["name"] in ("python", "megapatch", "wrapt", "packaging"):
            one.update(version="(any)", origin="(any)", path="(any)", commit="(any)")
    kept = ("acme.louder", "acme.lost", "megatron.nested-no-sync", "slime.train-reentry")
    told["patches"] = [one for one in told["patches"] if one["name"] in kept]
    told["problems"] = [
        text for text in told["problems"] if text.partition(" at ")[0].endswith(kept) or ":" not in text
    ]
    text = json.dumps(told, indent=2).replace(str(folder.resolve()), "(folder)")
    text = re.sub('; another sitecustomize runs as well: [^"]*', "", text)  # Debian's Python has one
    return re.sub(r"\d+ modules", "(some) modules", text) + "\n"


def test_the_json_is_as_in_the_golden_file(machine, tmp_path):
    """A new key belongs in the table of docs/doctor.md; when one goes or changes its meaning, SCHEMA grows."""
    expected = (HERE / "golden/doctor.json").read_text()
    set_here = {
        "MEGAPATCH_DISABLE": "megatron.nested-*",
        "MEGAPATCH_STRIKT": "1",
        "RAY_RUNTIME_ENV_HOOK": "some.hook",
    }
    shown = machine("--json", **set_here)
    assert shown.returncode == 1, shown.stderr
    text = golden(json.loads(shown.stdout), tmp_path)
    (tmp_path / "doctor.json").write_text(text)
    assert text == expected, f"if this is meant: {tmp_path / 'doctor.json'} is the new one"


def test_every_key_of_the_golden_file_is_documented():
    page = (HERE.parents[1] / "docs/doctor.md").read_text()

    def keys(value):
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(one)
        yield from value if isinstance(value, dict) else ()

    told = json.loads((HERE / "golden/doctor.json").read_text())
    del told["versions"]  # its keys are distributions
    for key in set(keys(told)):
        assert f"`{key}`" in page, key


def test_on_a_terminal_no_line_is_longer_than_it_is_wide(machine, tmp_path):
    with terminal(80) as (output, read):
        machine(output=output, MEGAPATCH_DISABLE="megatron.nested-*")
    lines = read.decode().replace(str(tmp_path), "/some/folder").splitlines()
    assert "refused      megatron.forward-pre-hook" in lines
    assert b"\x1b" not in read  # no colours, whatever NO_COLOR says
    assert not [
        line for line in lines if len(line) > 80 and " " in line.strip()
    ]  # what is to be copied stays whole
    last = lines[max(index for index, line in enumerate(lines) if not line) :]
    assert any(line.startswith("not in place: ") for line in last)  # what is wrong comes last
