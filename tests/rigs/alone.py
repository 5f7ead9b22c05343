"""Modules of megapatch without megapatch: a process that has not imported it gets their functions all the same."""

import importlib
import importlib.util
import sys
import types

NAME = "megapatch_alone"


def import_alone(module):
    """Import a module by its name below megapatch, as part of another package whose __init__ modules never run."""
    (root,) = importlib.util.find_spec("megapatch").submodule_search_locations
    *packages, _ = module.split(".")
    for depth in range(len(packages) + 1):
        name = ".".join([NAME, *packages[:depth]])
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = ["/".join([root, *packages[:depth]])]
    return importlib.import_module(f"{NAME}.{module}")
