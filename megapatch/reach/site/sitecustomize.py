"""First on PYTHONPATH below `megapatch run`: brings megapatch in when, and only when, a target is imported.

Standard library alone, and as little of it as can be: every Python process below the command runs this.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _FirstTarget:
    """Finds nothing of its own. When a target is asked for, megapatch comes first."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        sys.meta_path.remove(self)
        try:
            import megapatch  # noqa: F401
        except ImportError as error:
            if getattr(error, "name", None) != "megapatch":
                raise
            sys.stderr.write(
                f"megapatch run: {name} is imported by {sys.executable}, where megapatch is not installed: nothing "
                "is patched in this process. Install megapatch there.\n"
            )
            return None
        # importlib is going through sys.meta_path, and has passed by what megapatch has put in front.
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                return spec
        return None


def _run_the_shadowed_one():
    """The sitecustomize that would have been found without this one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    others = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_names = frozenset(filter(None, os.environ.get("MEGAPATCH_RUN_TARGETS", "").split(",")))
if _names:
    sys.meta_path.insert(0, _FirstTarget(_names))
_run_the_shadowed_one()
