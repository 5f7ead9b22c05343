"""Stand-ins for packages that are not here and have no part in what is tested."""

from __future__ import annotations

import types
from importlib.machinery import ModuleSpec


class StandIns:
    """For sys.meta_path: `names`, and any module in them, can be imported; `make(module, name)` is what such a
    module has by a name."""

    def __init__(self, names, make):
        self.names, self.make = tuple(names), make

    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{known}.") for known in self.names):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: self._attribute(spec.name, name)
        return module

    def exec_module(self, module):
        pass

    def _attribute(self, module, name):
        if name.startswith("__"):
            raise AttributeError(f"{module} is a stand-in and has no {name}")
        return self.make(module, name)
