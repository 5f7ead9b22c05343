"""Find out where each package comes from: an installation or a checkout, and its commit.

Reads metadata, and asks git for commits; imports nothing. A commit does not show changes on top of it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

from ... import _versions

RELEVANT = (
    ("megapatch", "megapatch"),
    ("wrapt", "wrapt"),
    ("packaging", "packaging"),
    ("torch", "torch"),
    ("megatron-core", "megatron.core"),
    (
        "megatron-core",
        "megatron.training",
    ),  # a namespace package: it may come from a checkout, and the core from a wheel
    ("megatron-bridge", "megatron.bridge"),
    ("nvidia-resiliency-ext", "nvidia_resiliency_ext"),
    ("slime", "slime"),
    ("miles", "miles"),
    ("skyrl", "skyrl"),
    ("skyrl-train", "skyrl_train"),
    ("nemo-rl", "nemo_rl"),
    ("verl", "verl"),
    ("ms-swift", "swift.megatron"),
    ("mcore-bridge", "mcore_bridge"),
    ("areal", "areal"),
    ("roll", "roll.distributed"),
    ("ray", "ray"),
)
"""Distribution, and the package that shows where it is; doctor lists them in this order."""

_SECONDS = 10
"""For an answer of git, which takes milliseconds: its folder may be on a file system that has gone away."""


class Package(NamedTuple):
    """One package as it is, or would be, imported here.

    Attributes:
        name: of the distribution, or of a package that comes from elsewhere.
        version: None where it is not stated.
        origin: ``installed``, ``checkout`` (sources on the path, or an editable installation), or ``interpreter``.
        path: the folder on the path, or the checkout.
        commit: None where there is none or it cannot be read.
    """

    name: str
    version: str | None
    origin: str
    path: str
    commit: str | None

    def __str__(self) -> str:
        commit = f" at {self.commit[:12]}" if self.commit else ""
        return f"{self.path}" if self.origin == "interpreter" else f"{self.origin} {self.path}{commit}"


def packages(others: Iterable[metadata.Distribution] = ()) -> list[Package]:
    """Return Python, and those of `RELEVANT` and of the other distributions that are installed."""
    found = [Package("python", platform.python_version(), "interpreter", sys.executable, None)]
    for name, module in RELEVANT:
        folder = _versions.folder_of(module)
        if folder is not None:
            package = _package(name, module, folder)
            same = [other for other in found if other.name == name]
            if not same:
                found.append(package)
            elif package.path != same[0].path:  # a part of it comes from elsewhere
                found.append(package._replace(name=module))
    return list(dict.fromkeys([*found, *map(_installed, others)]))


def _package(name: str, module: str, folder: str) -> Package:
    version = _versions.version_in_source(folder)
    for dist in metadata.distributions(name=name):
        # A checkout may have metadata beside its sources, too, which no installer has put there.
        if _is_at(dist, module, folder) and dist.read_text("RECORD") is not None:
            return _installed(dist)
        version = version or _versions.stated(dist, "Version")
    top = folder
    for _ in module.split("."):
        top = os.path.dirname(top)
    root = _repository(folder)
    return Package(name, version, "checkout", root or top, root and commit_of(root))


def _is_at(dist: metadata.Distribution, module: str, folder: str) -> bool:
    return os.path.realpath(str(dist.locate_file(module.replace(".", "/")))) == os.path.realpath(folder)


def _installed(dist: metadata.Distribution) -> Package:
    """Return a package as its installer described it: with a commit, if it was installed from one."""
    try:
        commit = json.loads(dist.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        commit = None
    place = os.path.realpath(str(dist.locate_file("")))
    commit = commit if isinstance(commit, str) else None
    name = _versions.stated(dist, "Name") or "unnamed"
    return Package(name, _versions.stated(dist, "Version"), "installed", place, commit)


def _repository(folder: str) -> str | None:
    """Return the folder above that has a .git: a directory, or a file in a worktree or submodule."""
    while not os.path.exists(os.path.join(folder, ".git")):
        folder, below = os.path.dirname(folder), folder
        if folder == below:
            return None
    return folder


def commit_of(checkout: str) -> str | None:
    """Ask git which commit is checked out in a folder with a .git; None where there is no git, or no answer."""
    # Named, as otherwise git looks further up where this .git is none, and refuses one that another user owns.
    command = ["git", "--git-dir", os.path.join(checkout, ".git"), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
