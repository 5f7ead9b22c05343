"""The releases that there are verdicts on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "releases.txt"
PACKAGES = {
    "megatron-core": ("megatron.core", "megatron.training"),
    "megatron-bridge": ("megatron.bridge",),
    "nvidia-resiliency-ext": ("nvidia_resiliency_ext",),
    "mbridge": ("mbridge",),
    "mcore-bridge": ("mcore_bridge",),
    "nemo-rl": ("nemo_rl", "nemo"),
    "skyrl-train": ("skyrl_train",),
    "skyrl": ("skyrl",),
    "slime": ("slime",),
    "miles": ("miles",),
    "verl": ("verl",),
    "ms-swift": ("swift",),
    "areal": ("areal",),
    "roll": ("roll",),
}
"""Project to its packages, in which sites' modules are."""
NO_PROJECT = ("megapatch", "torch", "torch_memory_saver")
"""Packages that the audit watches as well, of which nothing is said."""
PIP_OPTIONS = {
    # Its wheels ask for a newer C library than many machines have; their Python does not.
    "nvidia-resiliency-ext": [
        "--only-binary=:all:",
        "--platform=manylinux_2_31_x86_64",
        "--platform=manylinux_2_39_x86_64",
    ]
}


class Release(NamedTuple):
    """A version, tag or commit of a project. `beside` are the releases of others that it is imported with."""

    project: str
    name: str
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.project}=={self.name}"

    @property
    def is_wheel(self) -> bool:
        return self.name[0].isdigit() and "." in self.name


def read(text: str) -> list[Release]:
    """The lines of releases.txt. Raises ValueError for one that cannot be understood."""
    found: list[Release] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) == 1 or words[0] not in PACKAGES or not all("==" in one for one in words[2:]):
            raise ValueError(
                f"releases.txt: expected `project release [project==release ...]` with a project of "
                f"{', '.join(PACKAGES)}; found {line!r}"
            )
        found.append(Release(words[0], words[1], tuple(words[2:])))
    return found


def project_of(module: str) -> str | None:
    """The project that a site's module is of; None for what nothing is said of. Raises ValueError for others."""
    if module.partition(".")[0] in NO_PROJECT:
        return None
    for project, packages in PACKAGES.items():
        if any(f"{module}.".startswith(f"{package}.") for package in packages):
            return project
    raise ValueError(f"no project of tests/verdicts/releases.py has the module {module}; add its package there")
