"""Stand-ins for packages that are not installed and play no part in the tests."""

import sys
import types
from importlib.machinery import ModuleSpec, PathFinder

BRIDGE = "megatron.bridge"


class StandIns:
    """A finder for sys.meta_path that makes `names`, and any module in them, importable, except those in `real`.

    The attributes of such a module are `make(module, name)`.
    """

    def __init__(self, names, make, real=()):
        self.names, self.make, self.real = tuple(names), make, tuple(real)

    def find_spec(self, name, path=None, target=None):
        if name not in self.real and any(f"{name}.".startswith(f"{known}.") for known in self.names):
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


class ForImporters(StandIns):
    """Stand-ins for modules of these packages only; others find out that a package is not there.

    ModelOpt is in no use: its functions do nothing.
    """

    def __init__(self, importers, names):
        super().__init__(
            names, lambda module, name: _nothing if _is_of_modelopt(module, name) else Anything(name, (), {})
        )
        self.importers = tuple(importers)

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "")
        return super().find_spec(name) if importer.startswith(self.importers) else None


def _is_of_modelopt(module, name):
    return module.startswith("modelopt") and name[0].islower()


def _nothing(*ignored, **also_ignored):
    return None


OF_GPUS = ("transformer_engine", "modelopt", "megatron.energon", "causal_conv1d", "mamba_ssm", "fla")
"""Packages that Bridge and its tests import and a CPU cannot have."""

OF_SERVERS = ("datasets", "fastapi", "httpx", "openai", "tqdm", "uvicorn", "wandb")
"""Packages that Megatron's own RL imports, for rollouts by a server, and for logs."""


def is_stand_in(name):
    """Return whether the module of this name, which is imported, is a stand-in."""
    return isinstance(getattr(sys.modules[name].__spec__, "loader", None), StandIns)


class BarePackages:
    """A finder for sys.meta_path of packages without what their __init__ imports: Bridge's all conversions.

    folders   where to look for packages that are not in another; on sys.path unless given
    """

    def __init__(self, names=(BRIDGE,), folders=None):
        self.names, self.folders = tuple(names), folders

    def find_spec(self, name, path=None, target=None):
        found = PathFinder.find_spec(name, path or self.folders) if name in self.names else None
        if found is None:
            return None
        bare = ModuleSpec(name, None, is_package=True)
        bare.submodule_search_locations = list(found.submodule_search_locations)
        return bare


class Anything(type):
    """A class that has every attribute, and can be inherited from, subscripted and called."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} is a stand-in and has no {name}")
        return Anything(name, (), {})

    def __getitem__(cls, item):
        return cls

    def __call__(cls, *args, **kwargs):
        return cls if cls.__bases__ == (object,) else super().__call__(*args, **kwargs)
