"""The words of megapatch as small types.

A *patch* repairs one upstream defect at one or more *sites*. A site is a module, a diagnosis of it and the
targets in it; its targets are installed all or none. Diagnosing returns a *verdict* about the code that is
really there; the *status* is the outcome at the site in this process.

Every process that imports megapatch pays for this module, so it imports little.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from .errors import MisuseError

__all__ = [
    "ABSENT",
    "FIXED",
    "NEEDED",
    "UNKNOWN",
    "UNSUPPORTED",
    "Patch",
    "PatchInfo",
    "Site",
    "Status",
    "Verdict",
    "VerdictKind",
    "unpatched",
]


class Status(enum.Enum):
    """The state of a site in this process; the one that most needs attention comes first.

    Attributes:
        is_well: True: the defect cannot happen. False: the patch is needed, or may be, and is not in place; it is
            logged, and doctor exits with 1. None: neither.
    """

    _value_: str
    is_well: bool | None

    def __new__(cls, word: str, is_well: bool | None = None) -> Status:
        status = object.__new__(cls)
        status._value_, status.is_well = word, is_well
        return status

    FAILED = "failed", False
    OVERWRITTEN = "overwritten", False
    MISSED = "missed", False
    REFUSED = "refused", False
    UNSUPPORTED = "unsupported"
    PENDING = "pending"
    DISABLED = "disabled"
    APPLIED = "applied", True
    NOT_NEEDED = "not-needed", True
    NOT_INSTALLED = "not-installed"

    @property
    def needs_attention(self) -> bool:
        """Whether a patch that is needed, or may be, is not in place."""
        return self.is_well is False


class VerdictKind(enum.Enum):
    """The possible findings of a diagnosis.

    Attributes:
        status: of the site afterwards; with `Status.APPLIED` its targets are installed.
    """

    _value_: str
    status: Status

    def __new__(cls, word: str, status: Status) -> VerdictKind:
        kind = object.__new__(cls)
        kind._value_, kind.status = word, status
        return kind

    NEEDED = "needed", Status.APPLIED
    FIXED = "fixed", Status.NOT_NEEDED
    ABSENT = "absent", Status.NOT_NEEDED
    UNSUPPORTED = "unsupported", Status.UNSUPPORTED
    UNKNOWN = "unknown", Status.REFUSED


NEEDED = VerdictKind.NEEDED
"""The defect is there, in a shape that the patch knows."""
FIXED = VerdictKind.FIXED
"""Upstream has repaired it."""
ABSENT = VerdictKind.ABSENT
"""This version has no such feature."""
UNSUPPORTED = VerdictKind.UNSUPPORTED
"""The code is known, and megapatch does not patch it."""
UNKNOWN = VerdictKind.UNKNOWN
"""The code looks like nothing known: the patch refuses."""


class Verdict(NamedTuple):
    """The finding of a diagnosis.

    Attributes:
        kind: NEEDED, FIXED, or another `VerdictKind`.
        reason: why, in words that a user can act on.
    """

    kind: VerdictKind
    reason: str


class NotAsExpected(Exception):
    """Raised in a diagnosis of code that the patch does not know: the verdict is UNKNOWN, with this reason."""


class _Immutable:
    """A plain class whose attributes are set once.

    Not a dataclass: every process that imports megapatch would pay for importing dataclasses."""

    def _set(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; make a new one to change {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; {name} cannot be deleted")


class Site(_Immutable):
    """One place where a patch applies. Immutable; two sites are equal only if they are the same object.

    Args:
        module: dotted name of the concrete module to watch (namespace packages never fire).
        diagnose: called with the loaded module; inspects or runs the real code in milliseconds, without GPU or
            process group, and leaves no trace.
        replace: attribute path in the module, such as ``"Class.method"``, to a factory that takes the original
            and returns the plain function to install.
        add: attribute path where nothing is, to the plain function to put there, as ``"package.module:name"``. The
            function is loaded with the site, and by every process that unpickles a class that has it.
        rebuild: for objects made of the others, such as Ray actor classes: called with the module when all else is
            in place, returns their targets, as ``"module:path"``, each with a factory that takes the original
            object and returns a new one. Sites may share such an object.
    """

    module: str
    _diagnose: Callable[[ModuleType], Verdict]
    replace: Mapping[str, Callable[[Any], Callable[..., Any]]]
    add: Mapping[str, str]
    rebuild: Callable[[ModuleType], Mapping[str, Callable[[Any], Any]]] | None

    def __init__(
        self,
        module: str,
        diagnose: Callable[[ModuleType], Verdict],
        replace: Mapping[str, Callable[[Any], Callable[..., Any]]] | None = None,
        add: Mapping[str, str] | None = None,
        rebuild: Callable[[ModuleType], Mapping[str, Callable[[Any], Any]]] | None = None,
    ) -> None:
        self._set(
            module=module,
            _diagnose=diagnose,
            replace=MappingProxyType(dict(replace or {})),
            add=MappingProxyType(dict(add or {})),
            rebuild=rebuild,
        )

    def diagnose(self, module: ModuleType) -> Verdict:
        """Return the verdict on the loaded module."""
        try:
            return self._diagnose(module)
        except NotAsExpected as found:
            return Verdict(UNKNOWN, str(found))

    @property
    def paths(self) -> tuple[str, ...]:
        """Attribute paths of all targets but the rebuilt ones, in the order in which they are installed."""
        return (*self.replace, *self.add)

    def __repr__(self) -> str:
        return f"<Site {self.module}: {', '.join(self.paths) or 'no targets'}>"

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy cannot be pickled
        return Site, (self.module, self._diagnose, {**self.replace}, {**self.add}, self.rebuild)


class PatchInfo(_Immutable):
    """The facts of a patch whose code is not loaded, or is loaded in another process.

    The patches of a report are these, or a whole `Patch`: ``megapatch.report().patches[0].patch``.

    Attributes:
        name: ``family.what-it-makes-right``.
        doc: the docstring of the patch's module.
        upstream: the issue or pull request that describes the defect, as a URL; None if it was not reported.
        modules: of its sites, each once.
        changes_numbers: whether a run that did not crash before gives other numbers with the patch.
    """

    name: str
    doc: str
    upstream: str | None
    modules: tuple[str, ...]
    changes_numbers: bool

    def __init__(
        self, name: str, doc: str, upstream: str | None, modules: tuple[str, ...], changes_numbers: bool = False
    ) -> None:
        self._set(name=name, doc=doc, upstream=upstream, modules=modules, changes_numbers=changes_numbers)

    @property
    def family(self) -> str:
        """The name's part before the first dot: ``megatron``, ``slime``, ..."""
        return self.name.partition(".")[0]

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.strip().partition("\n")[0]

    @property
    def sections(self) -> dict[str, str]:
        """The docstring's sections, each in one line, by heading, such as ``Symptom``."""
        from inspect import cleandoc  # only reports and advice want it

        found: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in cleandoc(self.doc).splitlines():
            if heading := re.match("([A-Z][a-z]+) {2,}", line):
                lines = found.setdefault(heading[1], [])
                line = line[heading.end() :]
            elif line and not line.startswith(" "):
                lines = []  # ordinary text, of no section
            lines.append(line)
        return {name: " ".join(" ".join(text).split()) for name, text in found.items()}


class Patch(PatchInfo):
    """One fix for one upstream defect. Immutable; two patches are equal only if they are the same object.

    Args:
        name: ``family.what-it-makes-right``.
        doc: the docstring of the patch's module; its first line is the summary. None, as Python has it under -OO,
            becomes a sentence that says so.
        upstream: the issue or pull request that describes the defect, as a URL; None if it was not reported.
        sites: where it applies; each stands or falls by itself.
        changes_numbers: whether a run that did not crash before gives other numbers with the patch.
        leaves: attributes that differ on purpose after a normal call, as ``"Class.attribute"`` or
            ``"module.attribute"``, each with the reason. Everything else is as upstream leaves it.

    Raises:
        MisuseError: for a name of another form, and without sites.
    """

    sites: tuple[Site, ...]
    leaves: tuple[tuple[str, str], ...]

    def __init__(
        self,
        name: str,
        doc: str | None,
        upstream: str | None,
        sites: tuple[Site, ...],
        changes_numbers: bool = False,
        leaves: tuple[tuple[str, str], ...] = (),
    ) -> None:
        if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9-]+)+", name):
            raise MisuseError(f"patch name {name!r} is not of the form family.what-it-makes-right")
        if not sites:
            raise MisuseError(f"patch {name} has no site")
        doc = doc or "(Python was started with -OO, which removes docstrings.)"
        modules = tuple(dict.fromkeys(site.module for site in sites))
        super().__init__(name, doc, upstream, modules, changes_numbers)
        self._set(sites=tuple(sites), leaves=tuple(leaves))

    def __repr__(self) -> str:
        return f"<Patch {self.name} at {', '.join(site.module for site in self.sites)}>"


def unpatched(function: Any) -> Any:
    """Return the function that megapatch found, seen through its own replacements and their wrappers.

    Without a replacement of ours in the ``__wrapped__`` chain this is `function` itself: a decorator of upstream's
    is part of the code that a diagnosis looks at.
    """
    from ._python.layers import MARK, attribute_of, layers_of

    found = function
    layers = list(layers_of(function))
    for layer, below in itertools.pairwise(layers):
        # functools.wraps copies the mark to a wrapper on top of ours, so the lowest marked layer counts.
        if MARK in attribute_of(layer, "__dict__", ()):
            found = below
    return found
