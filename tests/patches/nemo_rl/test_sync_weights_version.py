"""nemo_rl.sync-weights-version: NeMo-RL's own synchronizers, and its own controller where the checkout has one.

Without a checkout there is our imitation of the interface, and of one transport.
"""

import asyncio
import importlib
import inspect
import pkgutil
from unittest import mock

import pytest
from rigs.log import Log
from rigs.megatron.options import UNPATCHED, attempt
from rigs.nemo_rl.weight_sync import (
    NAME,
    PACKAGE,
    TRANSPORTS,
    awaited,
    controller_syncs,
    find,
    first_controller,
    needs_synchronizers,
    synchronizer,
)
from rigs.nemo_rl.worker import needs_nemo_rl
from rigs.releases import status_of

from megapatch import apply, restore
from megapatch.patches.nemo_rl.sync_weights_version import MODULE
from megapatch.testing import run_ranks

pytestmark = [needs_synchronizers, pytest.mark.thorough]


# ------------------------------------------------------------------------------------------ without the patch
def without(rank, world_size):
    made, calls = synchronizer()
    found = {
        "status": status_of(NAME),
        "version": attempt(awaited, lambda: made.sync_weights(3)),
        "calls": list(calls),
        "awaited": attempt(awaited, made.sync_weights),
    }
    return found | {"controller": attempt(controller_syncs)}


@pytest.fixture(scope="module")
def unpatched():
    return run_ranks(without, 1, setup=find, env=UNPATCHED)[0]


def test_without_the_patch_a_version_is_a_type_error_twice_over(unpatched):
    error, text = unpatched["version"]
    assert error == "TypeError" and "positional argument" in text
    assert unpatched["calls"] == []
    error, text = unpatched["awaited"]
    assert error == "TypeError" and "await" in text
    assert unpatched["status"] == "disabled"


def test_without_the_patch_the_first_controller_cannot_sync(unpatched):
    error, found = unpatched["controller"]
    if first_controller():
        assert error == "TypeError" and "positional argument" in found
    else:
        assert error is None


# ------------------------------------------------------------------------------------------ with it
def with_it(rank, world_size):
    log = Log()
    importlib.import_module(MODULE)
    found = {"status": status_of(NAME), "controller": attempt(controller_syncs)}
    for function in (by_transport, without_version, wrong_calls, of_users, classes):
        found[function.__name__] = function()
    return found | {"log": log.texts}


def by_transport():
    """In a loop, elsewhere, and without a version: results, whether stale, and calls."""
    found = {}
    for transport in TRANSPORTS:
        found[transport] = {}
        for how, call in {
            "loop": lambda made: awaited(lambda: made.sync_weights(3)),
            "plain": lambda made: made.sync_weights(4, timer=None),
            "without": lambda made: made.sync_weights(),
        }.items():
            made, calls = synchronizer(transport)
            found[transport][how] = call(made), made.is_stale, calls
    return found


def without_version():
    """As main's controller calls it, in a thread; and what a synchronizer looks like."""
    made, _ = synchronizer()
    own = vars(type(made))["sync_weights"]
    return {
        "result": awaited(lambda: asyncio.to_thread(made.sync_weights, timer=None, kv_scales={"layer": 1.0})),
        "signature": inspect.signature(made.sync_weights) == inspect.signature(own.__get__(made)),
        "name": made.sync_weights.__name__,
    }


def wrong_calls():
    made, calls = synchronizer()
    failing, _ = synchronizer(succeeds=False)
    wrong = {
        "two": lambda: made.sync_weights(3, 4),
        "no number": lambda: made.sync_weights("3"),
        "another keyword": lambda: made.sync_weights(3, nonsense=True),
        "failing": lambda: awaited(lambda: failing.sync_weights(3)),
    }
    return {name: attempt(call)[0] for name, call in wrong.items()}, calls


# ------------------------------------------------------------------------------------------ classes that take one
def of_users():
    """Classes of a user's, one made before the patch; some take a version already."""
    base = importlib.import_module(MODULE).WeightSynchronizer
    restore()

    class Users(base):
        is_stale = init_communicator = shutdown = mark_stale = None

        def sync_weights(self, *, timer=None, kv_scales=None):
            return {"seconds": 1.0}

    before = Users()
    apply()

    class Takes(Users):
        def sync_weights(self, version, *, timer=None):
            return ("own", version)

    class Coroutine(Users):
        async def sync_weights(self, version):
            return ("own coroutine", version)

    return {
        "before": (before.sync_weights(3), awaited(lambda: before.sync_weights(3))),
        "takes": Takes().sync_weights(3),
        "coroutine": awaited(lambda: Coroutine().sync_weights(3)),
    }


def classes():
    """Every transport of this release: its own sync_weights is called, without the version."""
    package = importlib.import_module(PACKAGE)
    found = {}
    for _, name, _ in pkgutil.iter_modules(package.__path__):
        if not name.endswith("_weight_synchronizer"):
            continue
        module = importlib.import_module(f"{PACKAGE}.{name}")
        (cls,) = (
            one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__
        )

        def own(self, *, timer=None, kv_scales=None):
            return type(self).__name__

        with mock.patch.object(cls, "sync_weights", own):
            found[name] = object.__new__(cls).sync_weights(3) == cls.__name__
    return found


# ------------------------------------------------------------------------------------------ the checks
@pytest.fixture(scope="module")
def patched():
    return run_ranks(with_it, 1, setup=find)[0]


def test_the_controller_syncs(patched):
    assert patched["status"] == "applied"
    error, found = patched["controller"]
    assert error is None, found
    assert found is None or found[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_synced_with_a_version_as_without(patched, transport):
    found = patched["by_transport"][transport]
    expected = [name for name, _ in found["without"][2]]
    assert len(expected) >= 2
    for how in ("loop", "plain"):
        result, stale, calls = found[how]
        assert (result, stale) == (None, False)
        assert calls == [(name, how == "plain") for name in expected]  # a loop goes on meanwhile


def test_it_is_said_once_that_the_version_goes_nowhere(patched):
    (text,) = patched["log"]
    assert "which goes nowhere" in text


def test_calls_without_a_version_are_what_they_were(patched):
    assert patched["without_version"] == {"result": None, "signature": True, "name": "sync_weights"}


def test_wrong_calls_and_syncs_still_fail(patched):
    failures, calls = patched["wrong_calls"]
    assert failures.pop("failing") == "RuntimeError"
    assert set(failures.values()) == {"TypeError"}
    assert calls == []


def test_synchronizers_of_users(patched):
    assert patched["of_users"] == {
        "before": ({"seconds": 1.0}, {"seconds": 1.0}),
        "takes": ("own", 3),
        "coroutine": ("own coroutine", 3),
    }


@needs_nemo_rl
def test_every_transport(patched):
    assert len(patched["classes"]) >= 3
    assert all(patched["classes"].values())
