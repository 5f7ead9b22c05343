"""A target where nothing was: a function that a patch adds."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from .._python.dotted import below
from .._python.layers import MARK
from .target import ReplacedTarget


class AddedTarget(ReplacedTarget):
    """A function where the class, or the module, had none of its own.

    It is installed as it is, without a wrapper, and keeps its name (``"package.module:name"``): a class that is
    pickled by value refers to it by its name, and a process that reads the pickle imports megapatch.
    """

    __slots__ = ()

    def find(self, module: ModuleType) -> tuple[Any, str, Any]:
        module, path = below(module, self.target.partition(":")[2])
        parent_path, _, attribute = path.rpartition(".")
        parent = wrapt.resolve_path(module, parent_path)[2] if parent_path else module
        return parent, attribute, vars(parent).get(attribute)

    def __init__(self, patch_name: str, module: ModuleType, path: str, name: str) -> None:
        super().__init__(patch_name, module, path, lambda original: wrapt.resolve_path(*name.split(":"))[2])

    def _make_replacement(self, patch_name: str, make: Callable[..., Any]) -> Any:
        if not self.inherited:
            raise TypeError(f"{self.target} is to be added, and is there already")
        function = self._check_plain(make(self.original))
        setattr(function, MARK, patch_name)
        return function
