"""Find out where each package comes from: a wheel, an editable installation, a commit, a checkout or a folder.

Reads metadata, and asks git for commits; imports nothing. A commit does not show changes on top of it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any, NamedTuple

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
        origin: ``wheel``, ``editable``, ``vcs`` (installed from a commit), ``checkout`` (on the path), ``folder``
            (on the path, neither installed nor under version control), or ``interpreter``.
        path: the folder on the path, the checkout, or for ``vcs`` the repository's URL.
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
    return list(dict.fromkeys([*found, *map(_distribution, others)]))


def _package(name: str, module: str, folder: str) -> Package:
    for dist in metadata.distributions(name=name):
        if _same(str(dist.locate_file(module.replace(".", "/"))), folder) and _was_installed(dist):
            return _distribution(dist)
        url = _direct_url(dist)
        checkout = _local_path(url)
        if url.get("dir_info", {}).get("editable") and checkout and _within(folder, checkout):
            stated = _versions.version_in_source(folder)
            return Package(name, stated or dist.version, "editable", checkout, commit_of(checkout))
    top = folder
    for _ in module.split("."):
        top = os.path.dirname(top)
    root = _repository(folder)
    version = _versions.version_in_source(folder)
    if root is None:
        return Package(name, version, "folder", top, None)
    return Package(name, version, "checkout", root, commit_of(root))


def _distribution(dist: metadata.Distribution) -> Package:
    """Return a package as its installer described it."""
    url = _direct_url(dist)
    name, place = dist.metadata["Name"], os.path.realpath(str(dist.locate_file("")))
    vcs, checkout = url.get("vcs_info"), _local_path(url)
    if vcs:
        return Package(name, dist.version, "vcs", str(url.get("url")), vcs.get("commit_id"))
    if url.get("dir_info", {}).get("editable") and checkout:
        return Package(name, dist.version, "editable", checkout, commit_of(checkout))
    if _was_installed(dist):
        return Package(name, dist.version, "wheel", place, None)
    root = _repository(place)
    return Package(name, dist.version, "checkout" if root else "folder", root or place, root and commit_of(root))


def _was_installed(dist: metadata.Distribution) -> bool:
    """Return whether an installer put it there; a checkout may have metadata beside its sources, too."""
    return any(dist.read_text(name) is not None for name in ("RECORD", "INSTALLER", "installed-files.txt"))


def _direct_url(dist: metadata.Distribution) -> dict[str, Any]:
    """Return where an installer took it from, if not from an index; empty where that is missing or unreadable."""
    import json

    try:
        url = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return url if isinstance(url, dict) else {}


def _local_path(url: dict[str, Any]) -> str | None:
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(str(url.get("url", "")))
    return os.path.realpath(unquote(parts.path)) if parts.scheme == "file" else None


def _same(folder: str, other: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def _within(folder: str, outer: str) -> bool:
    return os.path.commonpath([os.path.realpath(folder), outer]) == outer


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
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
