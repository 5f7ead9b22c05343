"""nemo_rl.sync-weights-version: NeMo-RL's own synchronizers, and its own controller where the checkout has one.

Without a checkout there is our imitation of the interface, and of one transport.
"""

import asyncio
import importlib
import inspect
import pkgutil
import sys
from types import ModuleType
from unittest import mock

import pytest
from rigs.megatron.options import UNPATCHED, Log, attempt
from rigs.nemo_rl.weight_sync import (
    CHECKED,
    NAME,
    PACKAGE,
    TRANSPORTS,
    Broken,
    Remote,
    Side,
    Told,
    awaited,
    controller_syncs,
    find,
    first_controller,
    needs_synchronizers,
    synchronizer,
)
from rigs.nemo_rl.worker import CHECKOUT, needs_nemo_rl
from rigs.releases import status_of

from megapatch import apply, restore
from megapatch.patches.nemo_rl.sync_weights_version import MODULE, diagnose
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
    importlib.import_module(MODULE)
    found = {"status": status_of(NAME), "controller": attempt(controller_syncs)}
    for function in (by_transport, without_version, failures, setters, of_users, classes, verdicts, restored):
        found[function.__name__] = function()
    return found


def by_transport():
    """In a loop by position, and elsewhere by keyword, with the other keywords."""
    found = {}
    for transport in TRANSPORTS:
        made, calls = synchronizer(transport)
        result = awaited(lambda made=made: made.sync_weights(3))
        plain, plain_calls = synchronizer(transport)
        timer = importlib.import_module("nemo_rl.utils.timer").Timer() if CHECKOUT else mock.MagicMock()
        plain_result = plain.sync_weights(version=4, timer=timer)
        expected, expected_calls = synchronizer(transport)
        expected.sync_weights()
        found[transport] = {
            "results": (result, plain_result),
            "timed": list(timer.get_timing_metrics()) if CHECKOUT else list(timer.time.call_args.args),
            "stale": (made.is_stale, plain.is_stale),
            "loop": calls,
            "plain": plain_calls,
            "expected": expected_calls,
        }
    return found


def without_version():
    """As main's controller calls it, in a thread; and what a synchronizer looks like."""
    made, calls = synchronizer()
    own = vars(type(made))["sync_weights"]
    result = awaited(lambda: asyncio.to_thread(made.sync_weights, timer=None, kv_scales={"layer": 1.0}))
    return {
        "result": result,
        "scales": [value for name, value in calls if name == "kv_scales"],
        "told": [name for name, _ in calls if name == "set_weight_version"],
        "plain": made.sync_weights(),
        "signature": inspect.signature(made.sync_weights) == inspect.signature(own.__get__(made)),
        "of the class": type(made).sync_weights is own,
        "names": [made.sync_weights.__name__, made.sync_weights.__doc__ == own.__doc__],
    }


def failures():
    found = {}
    for transport in CHECKED:
        made, calls = synchronizer(transport, succeeds=False)
        outcome = attempt(awaited, lambda made=made: made.sync_weights(3))
        found[transport] = outcome, made.is_stale, [name for name, _ in calls]
    made, calls = synchronizer()
    wrong = {
        "two": lambda: made.sync_weights(3, 4),
        "twice": lambda: made.sync_weights(3, version=4),
        "no number": lambda: made.sync_weights("3"),
        "nothing": lambda: made.sync_weights(None),
    }
    found["wrong"] = {name: attempt(call)[0] for name, call in wrong.items()}
    found["calls"] = list(calls)
    found["other keyword"] = attempt(made.sync_weights, 3, nonsense=True)
    return found


def setters():
    log = Log()
    for _ in range(2):
        made, _ = synchronizer(kind=Side)
        awaited(lambda made=made: made.sync_weights(3))
    broken, _ = synchronizer(kind=Broken)
    outcome = attempt(awaited, lambda: broken.sync_weights(3))
    remote, _ = synchronizer(kind=Remote)
    with mock.patch.dict(sys.modules, ray=mock.Mock()):
        awaited(lambda: remote.sync_weights(3))
        told = sys.modules["ray"].get.call_args.args
    return {"log": list(log.texts), "broken": outcome, "remote": told}


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

    mocked = Users()
    mocked.sync_weights = users = mock.Mock()
    return {
        "before": (before.sync_weights(3), awaited(lambda: before.sync_weights(3))),
        "takes": Takes().sync_weights(3),
        "coroutine": awaited(lambda: Coroutine().sync_weights(3)),
        "mocked": mocked.sync_weights is users,
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
            made = object.__new__(cls)
            made._generation = Told([])
            found[name] = made.sync_weights(3) == cls.__name__ and made._generation._calls
    return found


def verdicts():
    module = importlib.import_module(MODULE)
    found = {"as it is": diagnose(module)}

    def takes(self, version=None, *, timer=None): ...

    async def coroutine(self, *, timer=None): ...

    def other(self): ...

    for made_up in (takes, coroutine, other):
        with mock.patch.object(module.WeightSynchronizer, "sync_weights", made_up):
            found[made_up.__name__] = diagnose(module)
    found["none"] = diagnose(ModuleType("none"))
    return {name: verdict.kind.value for name, verdict in found.items()}


def restored():
    restore()
    base = importlib.import_module(MODULE).WeightSynchronizer
    made, _ = synchronizer()
    return "__getattribute__" in vars(base), attempt(made.sync_weights, 3)[0]


# ------------------------------------------------------------------------------------------ the checks
@pytest.fixture(scope="module")
def patched():
    return run_ranks(with_it, 1, setup=find)[0]


def test_the_controller_syncs(patched):
    error, found = patched["controller"]
    assert error is None, found
    if first_controller() is None:
        assert found is None
    else:
        permitted, calls = found
        assert permitted
        assert calls[-1] == ("set_weight_version", 5)
        assert [name for name, _ in calls].count("set_weight_version") == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_synced_and_the_version_is_told(patched, transport):
    found = patched["by_transport"][transport]
    expected = [name for name, _ in found["expected"]]
    assert len(expected) >= 2
    assert found["results"] == (None, None)
    assert found["timed"] == ["prepare_for_generation/transfer_and_update_weights"]
    assert found["stale"] == (False, False)
    for version, where in ((3, "loop"), (4, "plain")):
        *calls, told = found[where]
        assert told == ("set_weight_version", version)
        assert calls == [(name, where == "plain") for name in expected]  # a loop goes on meanwhile


def test_calls_without_a_version_are_what_they_were(patched):
    assert patched["without_version"] == {
        "result": None,
        "scales": [{"layer": 1.0}],
        "told": [],
        "plain": None,
        "signature": True,
        "of the class": True,
        "names": ["sync_weights", True],
    }


def test_after_a_sync_that_failed_nothing_is_told(patched):
    for transport in CHECKED:
        (error, text), stale, calls = patched["failures"][transport]
        assert error == "RuntimeError" and text.startswith("Weight transfer failed")
        assert stale
        assert "set_weight_version" not in calls


def test_other_wrong_calls_still_fail(patched):
    found = patched["failures"]
    assert set(found["wrong"].values()) == {"TypeError"}
    assert found["calls"] == []
    assert found["other keyword"][0] == "TypeError" and "nonsense" in found["other keyword"][1]


def test_setters(patched):
    found = patched["setters"]
    assert len(found["log"]) == 1, found["log"]
    assert "Side has no set_weight_version()" in found["log"][0]
    assert found["broken"] == ("OSError", "gone")
    assert found["remote"] == (("reference", 3),)


def test_synchronizers_of_users(patched):
    assert patched["of_users"] == {
        "before": ({"seconds": 1.0}, {"seconds": 1.0}),
        "takes": ("own", 3),
        "coroutine": ("own coroutine", 3),
        "mocked": True,
    }


@needs_nemo_rl
def test_every_transport(patched):
    assert len(patched["classes"]) >= 3
    for name, told in patched["classes"].items():
        assert told == [("set_weight_version", 3)], name


def test_verdicts(patched):
    assert patched["status"] == "applied"
    assert patched["verdicts"] == {
        "as it is": "needed",
        "takes": "fixed",
        "coroutine": "unknown",
        "other": "unknown",
        "none": "unknown",
    }


def test_restore(patched):
    assert patched["restored"] == (False, "TypeError")
