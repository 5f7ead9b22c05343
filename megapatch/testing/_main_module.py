"""The caller's `__main__`, which no import finds by its name: how ranks load it, and which ones they cannot load.

multiprocessing does the same for its workers, with the same name and the same `__spec__` (CPython 3.10 to 3.13):
https://github.com/python/cpython/blob/v3.13.0/Lib/multiprocessing/spawn.py#L225. A rank loads it later, when its
environment is set.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from ..errors import MisuseError

# The second name is that in a worker, so that the part under `if __name__ == "__main__"` does not run there.
NAMES = ("__main__", "__mp_main__")

_importing = False


def find_main(needed: str) -> tuple[str, str]:
    """Return how ranks load this process's `__main__`: the name that ``python -m`` got, or "", and its file.

    Results of its classes come back under multiprocessing's name for it.

    Args:
        needed: the name of the function or class for which they need it.

    Raises:
        MisuseError: it has no file that they could load.
    """
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", "__main__")
    file = os.path.abspath(getattr(main, "__file__", None) or "")
    sys.modules[NAMES[1]] = main
    if name not in NAMES:
        return name, file
    if os.path.isfile(file):
        return "", file
    raise MisuseError(
        f"run_ranks() sends {needed} to other processes, which load the file that defines it, and found none: "
        "__main__ has no file in a notebook, an interactive session, python -c and standard input. Expected a "
        f"script or a module: write {needed} to a file, as with %%writefile jobs.py, and import it from there"
    )


def spec_of_file(name: str, file: str) -> ModuleSpec | None:
    """Return a spec for the module in this file, of any suffix, or None if there is no such file."""
    if not os.path.isfile(file):
        return None
    known = importlib.util.spec_from_file_location(name, file)
    return known or importlib.util.spec_from_loader(name, SourceFileLoader(name, file))


def load_main(name: str, file: str) -> None:
    """Run the caller's `__main__` under multiprocessing's name for it, and let it be `__main__` here."""
    spec = importlib.util.find_spec(name) if name else spec_of_file(NAMES[1], file)
    loader: Any = spec and spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        raise MisuseError(f"a rank finds no module {name or file}, which the caller has as its __main__")
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(__file__=spec.origin, __loader__=loader, __package__=spec.parent, __spec__=spec)
    if spec.name == "__mp_main__":
        # A script has no spec, and must have none: processes that this one starts would look for that module.
        main.__dict__.update(__package__=None, __spec__=None)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(loader.get_code(spec.name), main.__dict__)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Note that this rank imports the caller's modules, which must not start ranks."""
    global _importing
    _importing = True
    try:
        yield
    finally:
        _importing = False


def refuse_while_importing() -> None:
    """Raise MisuseError in a rank that is about to start ranks which would start ranks, and so on."""
    if _importing:
        raise MisuseError(
            "run_ranks() was called while a rank imports the module that defines its function: each rank would "
            "start more ranks. Expected a call that importing does not make: put it under "
            'if __name__ == "__main__":, or into a function'
        )


def load_pickle(data: bytes) -> Any:
    """Return the object that the caller has pickled, and import its modules."""
    with importing():
        return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            file = getattr(sys.modules.get(module), "__file__", None)
            raise MisuseError(
                f"run_ranks() sends {name} to other processes, which import {file or module}, and found no {name} "
                'there. Expected it at module level, and not under if __name__ == "__main__":'
            ) from error
