"""Everything that can be reached from some objects, as text by path, alike in two processes that have the same.

    before = walk({"model": model, "process": of_process()})
    optimizer.step()
    changed(before, walk(...))          # the places that differ, each with both texts

An object's path is the shortest one that leads to it; its other places say "is" and that path. So a text has an
object's type, its own value and which objects are one, and never an address, a count of handles or a set's order.
A function or class that stands under its own name is that name: patches may replace those. A function that does
not, such as a closure on an instance, is looked into, with all that it captures.
"""

from __future__ import annotations

import copy
import enum
import functools
import gc
import hashlib
import io
import itertools
import logging
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections import deque
from multiprocessing.managers import BaseProxy
from multiprocessing.process import BaseProcess
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy
import torch

from megapatch._python.layers import MARK

VALUES = (
    type(None),
    bool,
    int,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    re.Pattern,
    PurePath,
)
WITHOUT_IDENTITY = (tuple, frozenset, types.MethodType, types.BuiltinMethodType, slice, range)
OPAQUE = (types.GeneratorType, types.CoroutineType, types.FrameType, types.CodeType, type(threading.Lock()))
CONTAINERS = (dict, list, tuple, set, types.SimpleNamespace)
SETS = (set, frozenset, weakref.WeakSet)
UNSEEN = ("__dict__", "__weakref__", "__slots__", "_abc_impl", "__wrapped__", MARK)
COUNTED = frozenset({"RemovableHandle.id"})
"""Attributes that count what the process has made."""
HOOKS = re.compile(r"hooks(_\w+)?$")
"""Where keys are such counts."""
LONGEST = 200
NUMBER = re.compile(r"\d+")
OF_A_RUN = re.compile(rf"{re.escape(tempfile.gettempdir())}/[^/]+")
ADDRESS = re.compile(r"0x[0-9a-f]{4,}|id=.\d+")


class Child(NamedTuple):
    """A place in an object: how its path continues, what is there, and whether it is one of those apart."""

    step: str
    value: Any
    is_apart: bool = False


def walk(roots, apart=(), volatile=(), folder=None):
    """Return the text of each place that can be reached, by its path.

    apart     attributes, as "Class.attribute" or "module.attribute", whose places have that name in braces, and
              are not what other places are named after; of a method, what functions hold that it has made
    volatile  attributes of which only the type is read: times
    folder    a path that strings may have in them, and that each process has another of
    """
    return _Walk(frozenset(apart), COUNTED.union(volatile), folder).run(roots)


def changed(before, after):
    """Return the places whose texts differ, with both; None is for a place that is not there."""
    places = dict.fromkeys([*before, *after])
    return {
        place: (before.get(place), after.get(place)) for place in places if before.get(place) != after.get(place)
    }


class _Walk:
    def __init__(self, apart, volatile, folder):
        self.apart, self.volatile, self.folder = apart, volatile, folder
        self.special = {name.rpartition(".")[2] for name in (*apart, *volatile)}
        self.paths: dict[int, str] = {}
        self.storages: dict[int, str] = {}
        self.kept: list[Any] = []  # so that no object gets the address of one that has gone

    def run(self, roots):
        found: dict[str, str] = {}
        queue, sets, apart = deque(roots.items()), deque(), deque()
        while turn := queue or sets or apart:
            path, value = turn.popleft()
            if turn is queue and isinstance(
                value, SETS
            ):  # its items are named by the places that they have elsewhere
                sets.append((path, value))
                continue
            found[path], children = self._look(path, value)
            for step, each, is_apart in children:
                (apart if is_apart else queue).append((path + step, each))
        return found

    def _look(self, path, value):
        """Return the text of a place, and the places below it."""
        if (text := self._as_value(value)) is not None:
            return text, ()
        first = path if isinstance(value, WITHOUT_IDENTITY) else self.paths.setdefault(id(value), path)
        if first != path:
            return f"is {first}", ()
        self.kept.append(value)
        with torch._C.DisableTorchFunction():
            text, children = _look_of(type(value))(self, path, value)
        return f"{_name(type(value))} {text}".rstrip(), children

    def _as_value(self, value):
        """Return the text of something that is its value, or None."""
        kind = type(value)  # not its __class__, which a mock makes up
        if kind in CONTAINERS:
            return None
        if issubclass(kind, enum.Enum):
            return f"{_name(kind)}.{value.name}"
        if issubclass(kind, float):
            return f"{kind.__name__} {value.hex()}"
        if issubclass(kind, (str, bytes)) and len(value) > LONGEST:
            return (
                f"{kind.__name__} of {len(value)}: {_digest(value if issubclass(kind, bytes) else value.encode())}"
            )
        if issubclass(kind, VALUES):
            text = f"{kind.__name__} {value!r}"
            return text.replace(self.folder, "FOLDER") if self.folder else text
        if issubclass(kind, (type, types.ModuleType, logging.Logger)):
            return f"{kind.__name__} {_name(value)}"
        if kind is types.FunctionType and _stands_under(value.__module__, value.__qualname__) is value:
            return f"function {_name(value)}"
        if kind is types.BuiltinFunctionType and isinstance(value.__self__, (type(None), type, types.ModuleType)):
            return f"function {_name(value)}"
        return kind.__name__ if issubclass(kind, OPAQUE) else None

    def _attributes(self, path, value, skip=()):
        """Return what an object has in its __dict__ and its slots, by name."""
        kinds = type(value).__mro__
        names = dict(vars(value)) if isinstance(getattr(value, "__dict__", None), dict) else {}
        for name, slot in _slots_of(type(value)):
            try:
                names[name] = slot.__get__(value)
            except AttributeError:
                continue
        owners = [*(kind.__name__ for kind in kinds), path, path.rpartition(".")[2]]
        for name in sorted(map(str, names)):
            if name in UNSEEN or name in skip:
                continue
            value, mark = names[name], None
            if name in self.special:
                full = [f"{owner}.{name}" for owner in owners]
                value = type(value) if self.volatile.intersection(full) else value
                mark = next(filter(self.apart.__contains__, full), None)
            yield Child(f".{{{mark}}}" if mark else f".{name}", value, mark is not None)

    # ---------------------------------------------------------------------------- looks
    def _other(self, path, value):
        children = list(self._attributes(path, value))
        text = "" if children or hasattr(value, "__dict__") else repr(value)
        return "" if ADDRESS.search(text) or len(text) > LONGEST else text, children

    def _set(self, path, value):
        """Its items by the paths that they have from elsewhere, and then those that stand here alone."""
        texts, others = [], []
        for item in list(value):
            text = self._as_value(item)
            text = self.paths.get(id(item)) if text is None else text
            texts.append(text) if text is not None else others.append(item)
        others.sort(key=lambda item: (_name(type(item)), ADDRESS.sub("", repr(item))))
        children = [Child(f"{{{number}}}", item) for number, item in enumerate(others)]
        return f"of {len(texts) + len(others)}: {', '.join(sorted(texts))}", children

    def _mapping(self, path, value):
        of_hooks = HOOKS.search(path)
        children = []
        for number, (key, item) in enumerate(list(value.items())):
            text = None if of_hooks else self._as_value(key)
            if text is None:
                children += [] if of_hooks else [Child(f"[key {number}]", key)]
                children.append(Child(f"[{number}]", item))
            else:
                children.append(Child(f"[{text.partition(' ')[2] or text}]", item))
        factory = getattr(value, "default_factory", None)
        children += [Child(".default_factory", factory)] if factory else []
        return f"of {len(value)}", [*children, *self._attributes(path, value, WEAK_INNARDS)]

    def _sequence(self, path, value):
        items = list(value)
        texts = [self._as_value(item) for item in items]
        attributes = self._attributes(path, value)
        if None not in texts:
            text = ", ".join(texts)
            return f"of {len(items)}: {text if len(text) <= LONGEST else _digest(text.encode())}", attributes
        return f"of {len(items)}", [*(Child(f"[{index}]", item) for index, item in enumerate(items)), *attributes]

    def _tensor(self, path, value):
        children = [Child(".grad_fn", value.grad_fn), *self._attributes(path, value, ("_backward_hooks",))]
        if value.is_leaf or value.retains_grad:
            children.insert(0, Child(".grad", value.grad))
        children += [
            Child(f".{name}", hooks)
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
            if (hooks := getattr(value, name, None))
        ]
        if value._is_view():
            children.append(Child("._base", value._base))
        flags = [name for name in ("requires_grad", "retains_grad") if getattr(value, name)]
        flags += ["inference"] if value.is_inference() else []
        shape = f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device.type}"
        if value.layout is not torch.strided or value.device.type == "meta":
            return " ".join([shape, *flags]), children
        storage = value.untyped_storage()
        self.kept.append(storage)
        first = self.storages.setdefault(storage._cdata, path)
        owner = f"{storage.nbytes()} bytes" if first == path else f"bytes of {first}"
        place = f"at {value.storage_offset()} in {owner}"
        return " ".join([shape, _digest_of(value), place, *flags]), children

    def _node(self, path, value):
        """Only the hooks of nodes that accumulate gradients can be seen: none is enough to ask for them."""
        children = [Child(f".next[{number}]", node) for number, (node, _) in enumerate(value.next_functions)]
        if hasattr(value, "variable"):
            handle = value.register_hook(print)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            children += [Child(".variable", value.variable), Child(".hooks", hooks)]
        return "", [*children, *self._attributes(path, value, ("metadata",))]

    def _function(self, path, value):
        names = value.__code__.co_freevars
        maker = value.__qualname__.rpartition(".<locals>.")[0]
        step, is_apart = (f".{{{maker}}}", True) if maker in self.apart else ("", False)
        cells = [
            Child(f"{step}.<{name}>", cell, is_apart)
            for name, cell in zip(names, value.__closure__ or (), strict=True)
        ]
        defaults = [Child(".defaults", value.__defaults__), Child(".kwdefaults", value.__kwdefaults__)]
        return _name(value), [*cells, *defaults, *self._attributes(path, value)]

    def _cell(self, path, value):
        try:
            return "", [Child("", value.cell_contents)]
        except ValueError:
            return "empty", ()

    def _method(self, path, value):
        """A bound method: a method that its object's class has is told by its name."""
        name = getattr(value, "__name__", "")
        children = [Child(".__self__", value.__self__)]
        function = getattr(value, "__func__", None)
        owners = value.__self__.__mro__ if isinstance(value.__self__, type) else type(value.__self__).__mro__
        its_own = (vars(owner).get(name) for owner in owners)
        if function is not None and not any(getattr(each, "__func__", each) is function for each in its_own):
            children.append(Child(".__func__", function))
        return name, children

    def _partial(self, path, value):
        parts = ("func", "args", "keywords")
        return "", [*(Child(f".{name}", getattr(value, name)) for name in parts), *self._attributes(path, value)]

    def _reference(self, path, value):
        target = value()
        callback = [Child(".__callback__", value.__callback__)] if value.__callback__ else []
        if target is None:
            return "to what is gone", callback
        return "", [Child("()", target), *callback]

    def _array(self, path, value):
        return f"{value.dtype} {value.shape} {_digest(value.tobytes()) if value.dtype != object else ''}", ()

    def _generator(self, path, value):
        return _digest_of(value.get_state()), ()

    def _thread(self, path, value):
        return f"{NUMBER.sub('N', value.name)} {'alive' if value.is_alive() else 'ended'}", ()

    def _group(self, path, value):
        try:
            ranks = torch.distributed.get_process_group_ranks(value)
        except (KeyError, ValueError, RuntimeError):  # destroyed
            ranks = "none any more"
        return f"{value.group_name!r} of {ranks}", ()

    def _handle(self, path, value):
        return "completed" if value.is_completed() else "under way", ()

    def _file(self, path, value):
        return "closed" if value.closed else "open", ()

    def _kind_alone(self, path, value):
        return "", ()

    def _descriptor(self, path, value):
        parts = ("__func__", "fget", "fset", "func")
        return "", [Child(f".{name}", found) for name in parts if (found := getattr(value, name, None))]

    def _cache(self, path, value):
        return str(value.cache_info()), ()


CODE = (
    *(types.FunctionType, staticmethod, classmethod, property, types.MemberDescriptorType, types.ModuleType),
    *(types.GetSetDescriptorType, types.BuiltinFunctionType),
)
WEAK_INNARDS = (
    "data",
    "_data",
    "_remove",
    "_pending_removals",
    "_iterating",
    "_dirty_len",
)  # of weak dictionaries
LOOKS: list[tuple[Any, Any]] = [
    (SETS, _Walk._set),
    (torch.Tensor, _Walk._tensor),
    (torch.autograd.graph.Node, _Walk._node),
    ((dict, types.MappingProxyType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _Walk._mapping),
    ((list, tuple, deque), _Walk._sequence),
    (types.FunctionType, _Walk._function),
    ((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), _Walk._method),
    (types.CellType, _Walk._cell),
    (functools.partial, _Walk._partial),
    (weakref.ref, _Walk._reference),
    ((staticmethod, classmethod, property, functools.cached_property), _Walk._descriptor),
    (type(functools.lru_cache(len)), _Walk._cache),
    ((numpy.ndarray, numpy.generic), _Walk._array),
    (torch.Generator, _Walk._generator),
    (threading.Thread, _Walk._thread),
    (torch.distributed.ProcessGroup, _Walk._group),
    (torch.distributed.Work, _Walk._handle),
    (io.IOBase, _Walk._file),
    ((BaseProxy, *weakref.ProxyTypes), _Walk._kind_alone),
    (BaseProcess, _Walk._thread),
]
"""How each kind of object is looked at, the first that fits. Others are their attributes."""


@functools.cache
def _look_of(kind):
    if kind.__module__.partition(".")[0] in ("triton", "unittest"):  # thousands of places; mocks
        return _Walk._kind_alone
    return next((look for of_kind, look in LOOKS if issubclass(kind, of_kind)), _Walk._other)


@functools.cache
def _slots_of(kind):
    """Return the slots of a class that Python code defines, by name."""
    own = [vars(owner) for owner in kind.__mro__ if "__slots__" in vars(owner)]
    return [(k, v) for names in own for k, v in names.items() if isinstance(v, types.MemberDescriptorType)]


def _stands_under(module, qualname):
    """Return what stands in a module under a qualified name now, or None."""
    found = sys.modules.get(module)
    for name in qualname.split("."):
        found = vars(found).get(name) if isinstance(found, (type, types.ModuleType)) else None
        found = getattr(found, "__func__", found)
    return found


def _name(value):
    """Return the qualified name of a class, function or module."""
    if isinstance(value, types.ModuleType) or not hasattr(value, "__qualname__"):
        return getattr(value, "__name__", None) or getattr(value, "name", "")
    module = getattr(value, "__module__", None)
    return value.__qualname__ if module in (None, "builtins") else f"{module}.{value.__qualname__}"


def _digest(content):
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def _digest_of(tensor):
    tensor = tensor.detach().cpu()
    bits = (
        tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
    )
    return _digest(bits.numpy().tobytes())


# ------------------------------------------------------------------------------------------ more roots
def of_modules(names):
    """Return what modules, their classes and functions hold besides their code: a root for each module."""
    found = {}
    for name in sorted(name for name in names if name in sys.modules):
        held = {}
        for key, value in list(vars(sys.modules[name]).items()):
            while MARK in getattr(value, "__dict__", ()):  # a patch's: what it stands for
                value = value.__wrapped__
            if isinstance(value, type):
                value = _state(value) if value.__module__ == name else None
            elif type(value) is types.FunctionType:
                value = _state(value) if value.__dict__ else None
            elif isinstance(value, CODE) or key.startswith("__"):
                continue
            if value is not None or key.isupper():
                held[key] = value
        found[name] = types.SimpleNamespace(**held)
    return found


def _state(owner):
    """Return the attributes of a class or function that are no code; None if there are none."""
    held = {
        name: each
        for name, each in vars(owner).items()
        if not (isinstance(each, CODE) or name.startswith("__")) and name not in UNSEEN
    }
    return types.SimpleNamespace(**held) if held else None


def of_process():
    """Return what belongs to the process: random streams, threads, files, handlers, groups, settings of torch."""
    world = torch.distributed.distributed_c10d._world
    settings = (
        *(torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()),
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAPATCH", "RIGS"))}
    return types.SimpleNamespace(
        random=[_digest(repr(random.getstate()).encode()), numpy.random.get_state(), torch.get_rng_state()],
        threads=sorted(NUMBER.sub("N", each.name) for each in threading.enumerate()),
        files=open_files(),
        handlers={each.name: signal.getsignal(each) for each in signal.Signals},
        excepthooks=[sys.excepthook, threading.excepthook, sys.unraisablehook],
        warnings=list(warnings.filters),
        environment=dict(sorted(environment.items())),
        gc=[gc.isenabled(), gc.get_threshold(), gc.callbacks],
        groups={name: getattr(world, name) for name in ("pg_map", "pg_names", "group_count", "pg_coalesce_state")},
        torch=settings,
        hooks={name: value for name, value in vars(torch.nn.modules.module).items() if "_global_" in name},
    )


def open_files():
    """Return the files that this process has open, by kind, and how many."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(NUMBER.sub("N", OF_A_RUN.sub("TMP", os.readlink(f"/proc/self/fd/{descriptor}"))))
        except OSError:  # that of the folder itself
            continue
    return [f"{len(list(group))} {name}" for name, group in itertools.groupby(sorted(found))]


def copies(value):
    """Return whether something pickles and deep-copies, or the errors of that, and what of megapatch is in it."""
    found = []
    for make in (pickle.dumps, copy.deepcopy):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = make(value)
                ours = sorted(set(re.findall(rb"megapatch\.\w[\w.]*", made))) if make is pickle.dumps else []
                found.append(" ".join(["yes", *map(bytes.decode, ours)]))
            except Exception as error:
                found.append(ADDRESS.sub("", f"{type(error).__name__}: {error}"))
    return found


__all__ = ["changed", "copies", "of_modules", "of_process", "walk"]
