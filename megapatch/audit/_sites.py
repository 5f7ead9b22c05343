"""Sites whose replacements look on and change nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .._dotted import find
from ..patch import ABSENT, NEEDED, UNKNOWN, Site, Verdict


def site(
    module: str,
    replace: Mapping[str, Callable[[Any], Callable[..., Any]]],
    *,
    expected: Mapping[str, tuple[str, ...]] | None = None,
    optional: str | None = None,
) -> Site:
    """Return a site that can be watched where all of its functions are there, with the parameters that are read.

    Args:
        replace: as in Site.
        expected: by path of a function, the parameters that the audit reads.
        optional: the releases that have the module and lack the first of these functions, so that there is
            nothing to watch; None where no release lacks it.
    """
    return Site(
        module=module,
        diagnose=functools.partial(_diagnose, tuple(replace), expected or {}, optional is not None),
        replace=replace,
    )


def _diagnose(
    paths: tuple[str, ...], expected: Mapping[str, tuple[str, ...]], is_optional: bool, module: ModuleType
) -> Verdict:
    if is_optional and find(module, paths[0]) is None:
        return Verdict(ABSENT, f"this version has no {paths[0]}")
    missing = [path for path in paths if not callable(find(module, path))]
    for path, parameters in expected.items():
        known = inspect.signature(inspect.unwrap(find(module, path))).parameters if path not in missing else ()
        missing += [f"{path}({name})" for name in parameters if name not in known]
    if missing:
        return Verdict(UNKNOWN, f"expected {', '.join(missing)}")
    return Verdict(NEEDED, "watched")
