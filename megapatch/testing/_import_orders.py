"""Every order of activating megapatch and importing its targets, each in a process of its own."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

from .._engine.engine import Engine
from .._engine.record import NEEDS_ATTENTION
from .._engine.settings import Settings
from .._engine.watch import half_loaded
from .._layers import MARK
from .._versions import find_module
from ..patch import Patch, Status


def import_targets(patches: Iterable[Patch]) -> None:
    """Import every target of these patches that is installed."""
    for name in _targets(patches):
        importlib.import_module(name)


def _targets(patches: Iterable[Patch]) -> list[str]:
    names = dict.fromkeys(site.module for patch in patches for site in patch.sites)
    return [name for name in names if find_module(name) is not None]


def activate_import(engine: Engine) -> None:
    engine.activate()
    import_targets(engine.patches)


def import_activate(engine: Engine) -> None:
    import_targets(engine.patches)
    engine.activate()


def activate_twice(engine: Engine) -> None:
    engine.activate()
    import_targets(engine.patches)
    engine.activate()
    engine.apply()


def restore_and_apply(engine: Engine) -> None:
    activate_import(engine)
    engine.restore()
    engine.apply()


def restore_before_the_import(engine: Engine) -> None:
    engine.activate()
    engine.restore()
    import_targets(engine.patches)
    engine.apply()


def parents_first(engine: Engine) -> None:
    """Import the targets' packages first (no import hook fires for a namespace package), and perhaps targets."""
    for name in _targets(engine.patches):
        importlib.import_module(name.partition(".")[0])
        importlib.import_module(name.rpartition(".")[0] or name)
    engine.activate()
    import_targets(engine.patches)


def held_by_name(engine: Engine) -> None:
    """Let another module do `from target import function` and `... as alias` first."""
    import_targets(engine.patches)
    holder = types.ModuleType("megapatch_contract_holder")
    sys.modules[holder.__name__] = holder
    for record in engine.roster.sites:
        module = sys.modules.get(record.site.module)
        for path in record.site.replace:
            target = f"{record.site.module}:{path}"
            if "." not in path and hasattr(module, path):  # in some releases there is no such target
                function = getattr(module, path)
                vars(holder).update({target: function, f"alias of {target}": function})
    engine.activate()
    for record in engine.roster.sites:
        for replaced in record.installed:
            for name in (replaced.target, f"alias of {replaced.target}"):
                held = vars(holder).get(name, replaced.replacement)
                assert held is replaced.replacement, f"held elsewhere: {replaced.target}"


def reloaded(engine: Engine) -> None:
    activate_import(engine)
    for name in _targets(engine.patches):
        importlib.reload(sys.modules[name])
    engine.apply()


def imported_by_another_thread(engine: Engine) -> None:
    engine.activate()
    _in_thread(lambda: import_targets(engine.patches)).join()


def in_the_middle_of_our_own_import(engine: Engine) -> None:
    """Leave a half-imported module alone until the next event or `apply()`."""
    _InTheMiddle(engine, engine.activate).run()
    engine.apply()


def while_another_thread_imports(engine: Engine) -> None:
    """Activate while another thread imports: activating waits for the import, but not the other way round."""
    threads: list[threading.Thread] = []

    def activate_elsewhere() -> None:
        threads.append(_in_thread(engine.activate))
        time.sleep(0.1)  # it has found the half-imported target by now

    _InTheMiddle(engine, activate_elsewhere).run()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "activating and importing wait for each other"


ORDERS: tuple[Callable[[Engine], None], ...] = (
    activate_import,
    import_activate,
    activate_twice,
    restore_and_apply,
    restore_before_the_import,
    parents_first,
    held_by_name,
    reloaded,
    imported_by_another_thread,
    in_the_middle_of_our_own_import,
    while_another_thread_imports,
)


def run(rank: int, world_size: int, patches: tuple[Patch, ...]) -> tuple[str, dict[str, list[str]], list[str]]:
    """Run the order chosen by the rank; return its name, the outcome of each site, and problems."""
    import torch.distributed

    torch.distributed.barrier()  # the others may still be connecting
    torch.distributed.destroy_process_group()  # no diagnosis may need one
    order, engine = ORDERS[rank], Engine(patches, Settings())
    wrong = []
    try:
        order(engine)
    except AssertionError as error:
        wrong.append(str(error))
    outcome = {}
    for record in engine.roster.sites:
        record.refresh()
        name = f"{record.patch.name} at {record.site.module}"
        # Not rebuilt targets: which of these exist already depends on the order.
        functions = [replaced for replaced in record.installed if replaced.is_function]
        outcome[name] = [record.status.value, *(replaced.target for replaced in functions)]
        if record.status in (*NEEDS_ATTENTION, Status.PENDING):
            wrong.append(f"{name} is {record.status.value}: {record.reason} {record.traceback or ''}")
        wrong += [
            f"{replaced.target} was replaced {layers} times"
            for replaced in functions
            if (layers := _layers(replaced.current)) != 1
        ]
    return order.__name__.replace("_", " "), outcome, wrong


def problems(results: list[tuple[str, dict[str, list[str]], list[str]]]) -> list[str]:
    """Return the problems of all orders, and the orders whose outcome differs from that of the first."""
    first_name, expected, _ = results[0]
    found = [f"{name}: {text}" for name, _, wrong in results for text in wrong]
    for name, outcome, wrong in results:
        if not wrong:
            found += [
                f"{name}: {site} is {', '.join(outcome[site])}; with {first_name} it is {', '.join(came_to)}"
                for site, came_to in expected.items()
                if outcome[site] != came_to
            ]
    return found


class _InTheMiddle:
    """Calls a function once while a target's body runs: when the body imports its first module."""

    def __init__(self, engine: Engine, function: Callable[[], object]) -> None:
        self.engine, self.function = engine, function
        self.names = _targets(engine.patches)
        self.called = False

    def run(self) -> None:
        sys.meta_path.insert(0, self)
        import_targets(self.engine.patches)
        self._call()  # in case no target has imported anything that was not loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(half_loaded(sys.modules[name]) for name in self.names if name in sys.modules):
            self._call()

    def _call(self) -> None:
        if not self.called:
            self.called = True
            self.function()


def _in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def _layers(function: Any) -> int:
    count = 0
    while function is not None:
        count += MARK in getattr(function, "__dict__", ())
        function = getattr(function, "__wrapped__", None)
    return count
